// stx.h -- the vector layer under generated kernels.
//
// Includes nothing: parsing it costs a few hundredths of a second. Works with g++ 9 and clang 9 or newer, on AVX-512,
// AVX2 and any machine with 16-byte vectors (one text, the tier comes from the compiler's flags).
//
// Model. A kernel has one number of lanes N; every vector in it has N elements of whatever type, so that masks and
// mixed types line up. N is a register's worth of the kernel's widest type, hence 4- or 8-byte elements: f32 and i32
// kernels use N = BYTES / 4, kernels with f64 or i64 in registers N = BYTES / 8. Half types live in memory only.
// Booleans are masks: vectors of 0 and -1 as wide as the widest type. `n` is the number of live lanes: `All` inside
// the loop, an int in its tail. Plain arithmetic is never contracted; `mad` is fused where the machine can.
#pragma once

#define FI static inline __attribute__((always_inline))
#define INLINE __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#define CONTRACT _Pragma("clang fp contract(fast)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#define CONTRACT
#endif

namespace stx {

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned u32;
typedef long i64;  // not long long: comparing doubles gives vectors of long
typedef unsigned long u64;
typedef float f32;
typedef double f64;
struct bf16 { u16 b; };
struct f16 { u16 b; };
struct b1 { u8 b; };

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX2__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif

template <class T, int N> struct Vec {
  typedef T V __attribute__((vector_size(sizeof(T) * N)));
  typedef T U __attribute__((vector_size(sizeof(T) * N), aligned(sizeof(T)), may_alias));
};
template <class T, int N> using vec = typename Vec<T, N>::V;
template <bool c, class A, class B> struct If { typedef A T; };
template <class A, class B> struct If<false, A, B> { typedef B T; };
template <int N> using mask = vec<typename If<N * 8 == BYTES, i64, i32>::T, N>;
template <int N> struct Vec<bool, N> { typedef mask<N> V; };  // a vector of bool is a mask, one of halves is float
template <int N> struct Vec<b1, N> { typedef mask<N> V; };
template <int N> struct Vec<bf16, N> { typedef vec<f32, N> V; };
template <int N> struct Vec<f16, N> { typedef vec<f32, N> V; };

template <class T> struct Plain { typedef T R; };
template <class T> struct Plain<T &> { typedef T R; };
template <class T> struct Plain<T &&> { typedef T R; };
template <class V> struct Elem { typedef typename Plain<decltype(V{}[0])>::R T; };
template <> struct Elem<f32> { typedef f32 T; };
template <> struct Elem<f64> { typedef f64 T; };
template <> struct Elem<i64> { typedef i64 T; };
template <> struct Elem<i32> { typedef i32 T; };
template <> struct Elem<i16> { typedef i16 T; };
template <> struct Elem<i8> { typedef i8 T; };
template <> struct Elem<u8> { typedef u8 T; };
template <> struct Elem<bool> { typedef bool T; };
template <class V> using elem = typename Elem<V>::T;
template <class V> constexpr int lanes = sizeof(V) / sizeof(elem<V>);
template <int size> struct Int;
template <> struct Int<1> { typedef i8 S; typedef u8 U; };
template <> struct Int<2> { typedef i16 S; typedef u16 U; };
template <> struct Int<4> { typedef i32 S; typedef u32 U; };
template <> struct Int<8> { typedef i64 S; typedef u64 U; };
template <class V> using ints = vec<typename Int<sizeof(elem<V>)>::S, lanes<V>>;  // same shape, signed integers
template <class T> struct Float { enum { is = 0 }; };
template <> struct Float<f32> { enum { is = 1 }; };
template <> struct Float<f64> { enum { is = 1 }; };
template <class T> constexpr bool is_float = Float<T>::is;
template <class A, class B> struct Same { enum { is = 0 }; };
template <class A> struct Same<A, A> { enum { is = 1 }; };
template <class A, class B> constexpr bool same = Same<A, B>::is;

struct All {};  // every lane is live

template <class A, class B> FI A bits(B x) {
  static_assert(sizeof(A) == sizeof(B), "bits");
  A r;
  __builtin_memcpy(&r, &x, sizeof r);
  return r;
}
template <int N, class T> FI vec<T, N> splat(T x) {
  vec<T, N> v = {};
  UNROLL for (int i = 0; i < N; i++) v[i] = x;
  return v;
}
template <int N> FI vec<f32, N> splat(f32 x) { return x - vec<f32, N>{}; }
template <int N> FI vec<f64, N> splat(f64 x) { return x - vec<f64, N>{}; }
template <int N> FI vec<i32, N> splat(i32 x) { return x - vec<i32, N>{}; }
template <int N> FI vec<i64, N> splat(i64 x) { return x - vec<i64, N>{}; }
template <int N> FI mask<N> splat(bool x) { return splat<N>((elem<mask<N>>)-x); }
template <class V> FI V all_of(elem<V> x) { return splat<lanes<V>>(x); }
template <int N, class T> FI vec<T, N> iota(T start, T step) {
  vec<T, N> v = {};
  UNROLL for (int i = 0; i < N; i++) v[i] = (T)i;
  return v * step + start;
}

// ---- masks -------------------------------------------------------------------------------------------------------

template <class M, class V> FI M widen(V m) {  // a mask in another element width
  if constexpr (same<M, V>) return m;
  else return __builtin_convertvector(m, M);
}
template <class V> FI mask<lanes<V>> flags(V m) { return widen<mask<lanes<V>>>(m); }
template <int N> FI mask<N> active(int n) { return iota<N>((elem<mask<N>>)0, (elem<mask<N>>)1) < (elem<mask<N>>)n; }
template <int N> FI mask<N> active(All) { return ~mask<N>{}; }
template <class M> FI M both(M m, All) { return m; }
template <class M> FI M both(M m, int n) { return m & active<lanes<M>>(n); }
template <class M> FI M both(M m, M live) { return m & live; }
template <class M> FI M either(M m, All) { return m; }
template <class M> FI M either(M m, int n) { return m | ~active<lanes<M>>(n); }
template <class M> FI bool any(M m) {
#if defined(__AVX512F__) && !defined(__clang__)
  if constexpr (sizeof(M) == 64 && sizeof(elem<M>) == 4) return __builtin_ia32_ptestmd512((vec<i32, 16>)m, (vec<i32, 16>)m, (u16)-1) != 0;
  else
#endif
  {
    u64 w[(sizeof(M) + 7) / 8] = {}, r = 0;
    __builtin_memcpy(w, &m, sizeof m);
    UNROLL for (int i = 0; i < (int)(sizeof(w) / 8); i++) r |= w[i];
    return r != 0;
  }
}
template <class M> FI bool all(M m) { return !any(~m); }

// ---- half types --------------------------------------------------------------------------------------------------

template <class V> FI V bf16_up(vec<u16, lanes<V>> h) { return bits<V>(__builtin_convertvector(h, vec<u32, lanes<V>>) << 16); }
template <class V> FI vec<u32, lanes<V>> bf16_bits(V x) {  // to nearest even; NaN stays NaN
  typedef vec<u32, lanes<V>> U;
  U u = bits<U>(x), r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return x == x ? r : U{} + 0x7fc0;
}
template <class V> FI V f16_up(vec<u16, lanes<V>> h) {
#if defined(__F16C__) && !defined(__clang__)
#if defined(__AVX512F__)
  if constexpr (lanes<V> == 16) return (V)__builtin_ia32_vcvtph2ps512_mask(bits<vec<i16, 16>>(h), vec<f32, 16>{}, (u16)-1, 4);
#endif
  if constexpr (lanes<V> == 8) return (V)__builtin_ia32_vcvtph2ps256(bits<vec<i16, 8>>(h));
#endif
  typedef vec<u32, lanes<V>> U;
  U w = __builtin_convertvector(h, U), e = w & 0x7fff, sign = (w & 0x8000) << 16;
  U finite = bits<U>(bits<V>(e << 13) * 0x1p112f), special = (e << 13) | 0x7f800000;
  return bits<V>((e >= 0x7c00 ? special : finite) | sign);
}
template <class V> FI vec<u16, lanes<V>> f16_down(V x) {  // to nearest even; overflows to infinity
  typedef vec<u16, lanes<V>> H;
#if defined(__F16C__) && !defined(__clang__)
#if defined(__AVX512F__)
  if constexpr (lanes<V> == 16) return bits<H>(__builtin_ia32_vcvtps2ph512_mask((vec<f32, 16>)x, 0, vec<i16, 16>{}, (u16)-1));
#endif
  if constexpr (lanes<V> == 8) return bits<H>(__builtin_ia32_vcvtps2ph256((vec<f32, 8>)x, 0));
#endif
  typedef vec<u32, lanes<V>> U;
  U u = bits<U>(x), a = u & 0x7fffffff, sign = (u >> 16) & 0x8000;
  U normal = (a + 0xc8000fffu + ((a >> 13) & 1)) >> 13;
  U tiny = bits<U>(bits<V>(a) + 0.5f) - 0x3f000000;
  U huge = a > 0x7f800000 ? U{} + 0x7e00 : U{} + 0x7c00;
  U r = a < 0x38800000 ? tiny : a >= 0x47800000 ? huge : normal;
  return __builtin_convertvector(r | sign, H);
}

// ---- loads and stores: memory type -> register type --------------------------------------------------------------

template <class T> struct Reg { typedef T R; };
template <> struct Reg<bf16> { typedef f32 R; };
template <> struct Reg<f16> { typedef f32 R; };
template <class T> using reg = typename Reg<T>::R;

template <int N, class T> FI vec<T, N> loadu(const T *p) { return *(const typename Vec<T, N>::U *)p; }
template <int N, class T> FI void storeu(T *p, vec<T, N> v) { *(typename Vec<T, N>::U *)p = v; }

template <int N, class T> FI auto load(const T *p) {
  if constexpr (same<T, bf16>) return bf16_up<vec<f32, N>>(loadu<N>((const u16 *)p));
  else if constexpr (same<T, f16>) return f16_up<vec<f32, N>>(loadu<N>((const u16 *)p));
  else if constexpr (same<T, b1>) return flags(loadu<N>((const i8 *)p) != 0);
  else return loadu<N>(p);
}
template <int N> FI void store_bf16(u16 *p, vec<u32, N> r) {
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__clang__)  // GCC narrows with a storm of shuffles
  if constexpr (N == 8) {
    typedef vec<i32, 4> Q;
    struct { Q lo, hi; } h = bits<decltype(h)>(r);
    return storeu<8>(p, bits<vec<u16, 8>>(__builtin_ia32_packusdw128(h.lo, h.hi)));
  }
#endif
  storeu<N>(p, __builtin_convertvector(r, vec<u16, N>));
}
template <int N, class T, class V> FI void store(T *p, V v) {
  if constexpr (same<T, bf16>) store_bf16<N>((u16 *)p, bf16_bits(v));
  else if constexpr (same<T, f16>) storeu<N>((u16 *)p, f16_down(v));
  else if constexpr (same<T, b1>) storeu<N>((i8 *)p, __builtin_convertvector(v & 1, vec<i8, N>));
  else storeu<N>(p, v);
}

// Tails go through the stack, once a loop.
template <class T> FI void copy(T *to, const T *from, int n) {
  for (int i = 0; i < n; i++) to[i] = from[i];
}
template <int N, class T> FI auto load(const T *p, All) { return load<N>(p); }
template <int N, class T> FI auto load(const T *p, int n) {
  T t[N] = {};
  copy(t, p, n);
  return load<N>((const T *)t);
}
template <int N, class T, class V> FI void store(T *p, V v, All) { store<N>(p, v); }
template <int N, class T, class V> FI void store(T *p, V v, int n) {
  T t[N];
  store<N>((T *)t, v);
  copy(p, t, n);
}

// One element, in registers.
template <class T> FI T get(const T *p) { return *p; }
FI f32 get(const bf16 *p) { return bits<f32>((u32)p->b << 16); }
FI f32 get(const f16 *p) { return f16_up<vec<f32, 4>>(vec<u16, 4>{p->b, 0, 0, 0})[0]; }
FI bool get(const b1 *p) { return p->b != 0; }
template <class T> FI void put(T *p, T x) { *p = x; }
FI void put(bf16 *p, f32 x) { p->b = (u16)bf16_bits(vec<f32, 4>{x, 0, 0, 0})[0]; }
FI void put(f16 *p, f32 x) { p->b = f16_down(vec<f32, 4>{x, 0, 0, 0})[0]; }
FI void put(b1 *p, bool x) { p->b = x; }

// Lane by lane: f(k) for the live lanes k.
template <int N, class F> FI auto lanewise(All, F f) {
  typedef decltype(f(0)) T;
  if constexpr (same<T, bool>) {
    mask<N> v = {};
    UNROLL for (int k = 0; k < N; k++) v[k] = -(elem<mask<N>>)f(k);
    return v;
  } else {
    vec<T, N> v = {};
    UNROLL for (int k = 0; k < N; k++) v[k] = f(k);
    return v;
  }
}
template <int N, class F> FI auto lanewise(int n, F f) {
  typedef decltype(f(0)) T;
  if constexpr (same<T, bool>) {
    mask<N> v = {};
    for (int k = 0; k < n; k++) v[k] = -(elem<mask<N>>)f(k);
    return v;
  } else {
    vec<T, N> v = {};
    for (int k = 0; k < n; k++) v[k] = f(k);
    return v;
  }
}
template <int N, class F> FI auto lanewise(mask<N> m, F f) {
  typedef decltype(f(0)) T;
  if constexpr (same<T, bool>) {
    mask<N> v = {};
    for (int k = 0; k < N; k++)
      if (m[k]) v[k] = -(elem<mask<N>>)f(k);
    return v;
  } else {
    vec<T, N> v = {};
    for (int k = 0; k < N; k++)
      if (m[k]) v[k] = f(k);
    return v;
  }
}
template <int N, class T, class L> FI auto load_strided(const T *p, i64 step, L n) {
  return lanewise<N>(n, [=](int k) INLINE { return get(p + k * step); });
}
template <int N, class T> FI auto load(const T *p, mask<N> m) {  // touches live lanes only
  if (all(m)) return load<N>(p);
  T t[N] = {};
  for (int k = 0; k < N; k++)
    if (m[k]) t[k] = p[k];
  return load<N>((const T *)t);
}
template <int N, class T, class V> FI void store_strided(T *p, i64 step, V v, All) {
  T t[N];
  store<N>((T *)t, v);
  UNROLL for (int k = 0; k < N; k++) p[k * step] = t[k];
}
template <int N, class T, class V> FI void store_strided(T *p, i64 step, V v, int n) {
  T t[N];
  store<N>((T *)t, v);
  for (int k = 0; k < n; k++) p[k * step] = t[k];
}
template <int N, class T, class V, class L, class F> FI void store_at(T *p, V v, L n, F at) {
  T t[N];
  store<N>((T *)t, v);
  int live = N;
  if constexpr (same<L, int>) live = n;
  for (int k = 0; k < live; k++) p[at(k)] = t[k];
}

FI i8 *bare(b1 *p) { return (i8 *)p; }  // booleans move as bytes
FI const i8 *bare(const b1 *p) { return (const i8 *)p; }
template <class T> FI T *bare(T *p) { return p; }
// A block of B x B elements in registers: interleaving rows i and i + B / 2, log2(B) times over, transposes it.
template <class V> FI V interleave(V a, V b, int from) {
#if defined(__clang__)
  V r = {};
  UNROLL for (int i = 0; i < lanes<V>; i++) r[i] = i & 1 ? b[from + i / 2] : a[from + i / 2];
  return r;
#else
  ints<V> at = {};
  UNROLL for (int i = 0; i < lanes<V>; i++) at[i] = (elem<ints<V>>)(from + i / 2 + (i & 1) * lanes<V>);
  return __builtin_shuffle(a, b, at);
#endif
}
template <class V> FI void transpose(V *rows) {
  constexpr int B = lanes<V>;
  UNROLL for (int step = 1; step < B; step *= 2) {
    V next[B];
    UNROLL for (int i = 0; i < B / 2; i++) {
      next[2 * i] = interleave(rows[i], rows[i + B / 2], 0);
      next[2 * i + 1] = interleave(rows[i], rows[i + B / 2], B / 2);
    }
    UNROLL for (int i = 0; i < B; i++) rows[i] = next[i];
  }
}
// to[i * pitch + j] = from[j * step + i]: a tile of a matrix that is read against its layout, through a near cache
template <class R, class T> static void turn(R *to, i64 pitch, const T *from, i64 step, i64 rows, i64 columns) {
  constexpr int B = sizeof(R) > 4 ? BYTES / 8 : BYTES / 4;
  i64 whole = 0;
  for (; whole + B <= rows; whole += B) {
    i64 i = 0;
    for (; i + B <= columns; i += B) {
      vec<typename Plain<decltype(*bare(to))>::R, B> block[B] = {};
      UNROLL for (int k = 0; k < B; k++) block[k] = load<B>(bare(from) + (whole + k) * step + i);
      transpose(block);
      UNROLL for (int k = 0; k < B; k++) store<B>(bare(to) + (i + k) * pitch + whole, block[k]);
    }
    for (; i < columns; i++)
      for (i64 j = whole; j < whole + B; j++) put(to + i * pitch + j, get(from + j * step + i));
  }
  for (i64 j = whole; j < rows; j++)
    for (i64 i = 0; i < columns; i++) put(to + i * pitch + j, get(from + j * step + i));
}
FI void prefetch(const void *p) { __builtin_prefetch(p); }

// f(i, n, u) over [begin, end) in steps of N lanes; u counts 0 .. U - 1 round and round.
template <int N, int U, class F> FI void each(i64 begin, i64 end, F f) {
  i64 i = begin;
  if constexpr (U > 1)
    for (; i + U * N <= end; i += U * N) {
      UNROLL for (int u = 0; u < U; u++) f(i + u * N, All(), u);
    }
  for (; i + N <= end; i += N) f(i, All(), 0);
  if (i < end) f(i, (int)(end - i), 0);
}

// ---- conversion, as Tensor.to ------------------------------------------------------------------------------------

template <class T, class V> FI auto cast(V x) {
  typedef elem<V> S;
  constexpr int N = lanes<V>;
  if constexpr (same<T, S>) return x;
  else if constexpr (is_float<S> && sizeof(T) == 1 && !is_float<T> && sizeof(S) == 8)
    return __builtin_convertvector(__builtin_convertvector(x, vec<i64, N>), vec<T, N>);
  else if constexpr (is_float<S> && !is_float<T> && sizeof(T) < 4)
    return __builtin_convertvector(__builtin_convertvector(x, vec<i32, N>), vec<T, N>);
  else if constexpr (is_float<T> && sizeof(S) < 4)
    return __builtin_convertvector(__builtin_convertvector(x, vec<i32, N>), vec<T, N>);
  else return __builtin_convertvector(x, vec<T, N>);
}
template <class T, class V> FI T cast_lane(V x) {  // one element
  if constexpr (is_float<V> && !is_float<T> && sizeof(T) == 1 && sizeof(V) == 8) return (T)(i64)x;
  else if constexpr (is_float<V> && !is_float<T> && sizeof(T) < 4) return (T)(i32)x;
  else return (T)x;
}
template <class V> FI auto truth(V x) { return flags(x != 0); }
template <class T, class M> FI vec<T, lanes<M>> from_mask(M m) {
  typedef vec<T, lanes<M>> V;
  return bits<V>(widen<ints<V>>(m) & bits<ints<V>>(all_of<V>((T)1)));
}
template <class V> FI V round_bf16(V x) { return bits<V>(bf16_bits(x) << 16); }
template <class V> FI V round_f16(V x) { return f16_up<V>(f16_down(x)); }
FI f32 round_bf16(f32 x) { return round_bf16(vec<f32, 4>{x, 0, 0, 0})[0]; }
FI f32 round_f16(f32 x) { return round_f16(vec<f32, 4>{x, 0, 0, 0})[0]; }

// ---- arithmetic --------------------------------------------------------------------------------------------------

template <class M, class V> FI V where(M m, V a, V b) { return widen<ints<V>>(m) ? a : b; }
template <class M, class V> FI V where(M m, V a, elem<V> b) { return where(m, a, all_of<V>(b)); }
template <class M, class V> FI V where(M m, elem<V> a, V b) { return where(m, all_of<V>(a), b); }
FI f32 where(bool m, f32 a, f32 b) { return m ? a : b; }
FI f64 where(bool m, f64 a, f64 b) { return m ? a : b; }
FI i64 where(bool m, i64 a, i64 b) { return m ? a : b; }
FI i32 where(bool m, i32 a, i32 b) { return m ? a : b; }
FI i16 where(bool m, i16 a, i16 b) { return m ? a : b; }
FI i8 where(bool m, i8 a, i8 b) { return m ? a : b; }
FI u8 where(bool m, u8 a, u8 b) { return m ? a : b; }
FI bool where(bool m, bool a, bool b) { return m ? a : b; }

// c > x ? c : x is one instruction and keeps a NaN, or a -0, in x
template <class V> FI V clamp_min(V x, V c) { return c > x ? c : x; }
template <class V> FI V clamp_max(V x, V c) { return c < x ? c : x; }
template <class V> FI V maximum(V a, V b) { V m = a > b ? a : b; return a == a ? m : a; }  // NaN from either side
template <class V> FI V minimum(V a, V b) { V m = a < b ? a : b; return a == a ? m : a; }
template <class V> FI V clamp_min(V x, elem<V> c) { return clamp_min(x, all_of<V>(c)); }
template <class V> FI V clamp_max(V x, elem<V> c) { return clamp_max(x, all_of<V>(c)); }
template <class V> FI V maximum(V a, elem<V> b) { return maximum(a, all_of<V>(b)); }
template <class V> FI V minimum(V a, elem<V> b) { return minimum(a, all_of<V>(b)); }
template <class V> FI V fmax(V a, V b) { V m = b > a ? b : a; return a == a ? m : b; }  // the first of 0 and -0
template <class V> FI V fmin(V a, V b) { V m = b < a ? b : a; return a == a ? m : b; }

template <class T> struct SignBit;
template <> struct SignBit<f32> { static constexpr u32 m = 0x80000000u; };
template <> struct SignBit<f64> { static constexpr u64 m = 0x8000000000000000ul; };
template <class V> FI V abs(V x) {
  if constexpr (is_float<elem<V>>) return bits<V>(bits<ints<V>>(x) & (elem<ints<V>>)~SignBit<elem<V>>::m);
  else return x < 0 ? -x : x;
}
FI f32 abs(f32 x) { return __builtin_fabsf(x); }
FI f64 abs(f64 x) { return __builtin_fabs(x); }
FI i64 abs(i64 x) { return x < 0 ? -x : x; }
FI i32 abs(i32 x) { return x < 0 ? -x : x; }
FI i16 abs(i16 x) { return (i16)(x < 0 ? -x : x); }
FI i8 abs(i8 x) { return (i8)(x < 0 ? -x : x); }
FI u8 abs(u8 x) { return x; }
template <class V> FI V copysign(V x, V s) {
  typedef ints<V> I;
  constexpr elem<I> m = (elem<I>)SignBit<elem<V>>::m;
  return bits<V>((bits<I>(x) & ~m) | (bits<I>(s) & m));
}
FI f32 copysign(f32 x, f32 s) { return __builtin_copysignf(x, s); }
FI f64 copysign(f64 x, f64 s) { return __builtin_copysign(x, s); }
template <class V> FI auto signbit(V x) { return bits<ints<V>>(x) < 0; }
FI bool signbit(f32 x) { return bits<i32>(x) < 0; }
FI bool signbit(f64 x) { return bits<i64>(x) < 0; }
template <class V> FI auto isinf(V x) { return abs(x) == (elem<V>)__builtin_inf(); }
FI bool isinf(f32 x) { return abs(x) == __builtin_inff(); }
FI bool isinf(f64 x) { return abs(x) == __builtin_inf(); }

// Rounding without instructions of a tier: |x| below 2^23 (2^52) is rounded by adding and subtracting it.
template <class V> FI V round(V x) {
  const elem<V> R = sizeof(elem<V>) == 4 ? (elem<V>)8388608.0 : (elem<V>)4503599627370496.0;
  V a = abs(x), r = (a + R) - R;
  return copysign(a < R ? r : a, x);
}
template <class V> FI V floor(V x) { V r = round(x); return copysign(r > x ? r - 1 : r, x); }
template <class V> FI V ceil(V x) { V r = round(x); return copysign(r < x ? r + 1 : r, x); }
template <class V> FI V trunc(V x) { V a = abs(x), r = round(a); return copysign(r > a ? r - 1 : r, x); }

template <class V> FI V sqrt(V x) {
#if defined(__clang__) && __clang_major__ >= 16
  return __builtin_elementwise_sqrt(x);
#elif defined(__x86_64__) && !defined(__clang__)
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64 && sizeof(elem<V>) == 4) return (V)__builtin_ia32_sqrtps512_mask((vec<f32, 16>)x, (vec<f32, 16>)x, (u16)-1, 4);
  if constexpr (sizeof(V) == 64 && sizeof(elem<V>) == 8) return (V)__builtin_ia32_sqrtpd512_mask((vec<f64, 8>)x, (vec<f64, 8>)x, (u8)-1, 4);
#endif
#if defined(__AVX__)
  if constexpr (sizeof(V) == 32 && sizeof(elem<V>) == 4) return (V)__builtin_ia32_sqrtps256((vec<f32, 8>)x);
  if constexpr (sizeof(V) == 32 && sizeof(elem<V>) == 8) return (V)__builtin_ia32_sqrtpd256((vec<f64, 4>)x);
#endif
  if constexpr (sizeof(V) == 16 && sizeof(elem<V>) == 4) return (V)__builtin_ia32_sqrtps((vec<f32, 4>)x);
  if constexpr (sizeof(V) == 16 && sizeof(elem<V>) == 8) return (V)__builtin_ia32_sqrtpd((vec<f64, 2>)x);
#endif
  V r = {};
  UNROLL for (int i = 0; i < lanes<V>; i++) r[i] = sizeof(elem<V>) == 4 ? __builtin_sqrtf(x[i]) : __builtin_sqrt(x[i]);
  return r;
}
FI f32 sqrt(f32 x) { return __builtin_sqrtf(x); }
FI f64 sqrt(f64 x) { return __builtin_sqrt(x); }
template <class V> FI V rsqrt(V x) { return 1 / sqrt(x); }

f32 libm_fma(f32, f32, f32) __asm__("fmaf");
f64 libm_fma(f64, f64, f64) __asm__("fma");
FI f32 fma(f32 a, f32 b, f32 c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return libm_fma(a, b, c);
#endif
}
FI f64 fma(f64 a, f64 b, f64 c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fma(a, b, c);
#else
  return libm_fma(a, b, c);
#endif
}
template <class V> FI V fma(V a, V b, V c) {
#if defined(__FMA__) && defined(__clang__)
  CONTRACT return a * b + c;
#elif defined(__FMA__)
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64 && sizeof(elem<V>) == 4) return (V)__builtin_ia32_vfmaddps512_mask((vec<f32, 16>)a, (vec<f32, 16>)b, (vec<f32, 16>)c, (u16)-1, 4);
  if constexpr (sizeof(V) == 64 && sizeof(elem<V>) == 8) return (V)__builtin_ia32_vfmaddpd512_mask((vec<f64, 8>)a, (vec<f64, 8>)b, (vec<f64, 8>)c, (u8)-1, 4);
#endif
  if constexpr (sizeof(V) == 32 && sizeof(elem<V>) == 4) return (V)__builtin_ia32_vfmaddps256((vec<f32, 8>)a, (vec<f32, 8>)b, (vec<f32, 8>)c);
  if constexpr (sizeof(V) == 32 && sizeof(elem<V>) == 8) return (V)__builtin_ia32_vfmaddpd256((vec<f64, 4>)a, (vec<f64, 4>)b, (vec<f64, 4>)c);
  if constexpr (sizeof(V) == 16 && sizeof(elem<V>) == 4) return (V)__builtin_ia32_vfmaddps((vec<f32, 4>)a, (vec<f32, 4>)b, (vec<f32, 4>)c);
  if constexpr (sizeof(V) == 16 && sizeof(elem<V>) == 8) return (V)__builtin_ia32_vfmaddpd((vec<f64, 2>)a, (vec<f64, 2>)b, (vec<f64, 2>)c);
#endif
  V r = {};
  UNROLL for (int i = 0; i < lanes<V>; i++) r[i] = fma((elem<V>)a[i], (elem<V>)b[i], (elem<V>)c[i]);
  return r;
}
// a * b + c, fused where that is one instruction: for polynomials
template <class V> FI V mad(V a, V b, V c) {
#if defined(__FMA__) || defined(__aarch64__)
  return fma(a, b, c);
#else
  return a * b + c;
#endif
}
template <class V> FI V mad(V a, V b, elem<V> c) { return mad(a, b, all_of<V>(c)); }
template <class V> FI V mad(V a, elem<V> b, V c) { return mad(a, all_of<V>(b), c); }

// ---- integers: nothing traps -------------------------------------------------------------------------------------

template <class T> FI T div_lane(T a, T b) { return b == 0 ? (T)0 : b == (T)-1 && (T)-1 < 0 ? (T)(0 - a) : (T)(a / b); }
template <class T> FI T rem_lane(T a, T b) { return b == 0 || (b == (T)-1 && (T)-1 < 0) ? (T)0 : (T)(a % b); }
template <class T> FI T floor_lane(T a, T b) {
  T q = div_lane(a, b), r = rem_lane(a, b);
  return (T)(r != 0 && (r < 0) != (b < 0) ? q - 1 : q);
}
template <class T> FI T mod_lane(T a, T b) {
  T r = rem_lane(a, b);
  return (T)(r != 0 && (r < 0) != (b < 0) ? r + b : r);
}
template <class V, class F> FI V map(V a, V b, F f) {
  V r = {};
  for (int k = 0; k < lanes<V>; k++) r[k] = f(a[k], b[k]);
  return r;
}
#define STX_INT(name, one)                                                                                   \
  template <class V> FI V name(V a, V b) { return map(a, b, [](elem<V> x, elem<V> y) { return one(x, y); }); } \
  FI i64 name(i64 a, i64 b) { return one(a, b); }                                                            \
  FI i32 name(i32 a, i32 b) { return one(a, b); }                                                            \
  FI i16 name(i16 a, i16 b) { return one(a, b); }                                                            \
  FI i8 name(i8 a, i8 b) { return one(a, b); }                                                               \
  FI u8 name(u8 a, u8 b) { return one(a, b); }
STX_INT(div_trunc, div_lane)
STX_INT(div_floor, floor_lane)
STX_INT(mod_int, mod_lane)
STX_INT(rem_int, rem_lane)
template <class T> FI T pow_lane(T a, T b) {
  if (b < 0) return (T)(a == (T)1 ? 1 : a == (T)-1 ? (b & 1 ? -1 : 1) : 0);
  T r = 1;
  for (; b; b = (T)(b >> 1), a = (T)(a * a))
    if (b & 1) r = (T)(r * a);
  return r;
}
template <class T> FI T gcd_lane(T a, T b) {
  a = (T)((T)-1 < 0 && a < 0 ? 0 - a : a), b = (T)((T)-1 < 0 && b < 0 ? 0 - b : b);
  while (a != 0) {
    T rest = rem_lane(b, a);
    b = a, a = rest;
  }
  return b;
}
template <class T> FI T lcm_lane(T a, T b) {
  auto m = div_lane(a, gcd_lane(a, b)) * b;  // an int for narrow types, as in eager
  return (T)(m < 0 ? 0 - m : m);
}
STX_INT(int_pow, pow_lane)
STX_INT(gcd, gcd_lane)
STX_INT(lcm, lcm_lane)
// a shift by a negative count or by the width and more leaves no bit (or the sign)
template <class T> FI T shl_lane(T a, T b) { return b < 0 || b >= (T)(8 * sizeof(T)) ? (T)0 : (T)(a << b); }
template <class T> FI T shr_lane(T a, T b) { return (T)(a >> (b < 0 || b >= (T)(8 * sizeof(T)) ? (T)(8 * sizeof(T) - 1 + ((T)-1 > 0)) : b)); }
STX_INT(lshift, shl_lane)
STX_INT(rshift, shr_lane)
FI i64 floor_index(i64 x, i64 d) { return x >= 0 ? x / d : -((d - 1 - x) / d); }
FI i64 mod_index(i64 x, i64 d) { return x - floor_index(x, d) * d; }

// ---- mathematical functions: inline where they are hot -----------------------------------------------------------

#include "stx_math.h"

// ---- reductions --------------------------------------------------------------------------------------------------

template <class V, class F> FI elem<V> across(V v, F f) {  // pairwise over the lanes
  elem<V> a[lanes<V>];
  __builtin_memcpy(a, &v, sizeof v);
  UNROLL for (int h = lanes<V> / 2; h; h >>= 1)
    for (int i = 0; i < h; i++) a[i] = f(a[i], a[i + h]);
  return a[0];
}
template <class T> FI T max_lane(T a, T b) { return b > a || b != b ? b : a; }
template <class T> FI T min_lane(T a, T b) { return b < a || b != b ? b : a; }
template <class V> FI elem<V> sum(V v) { return across(v, [](elem<V> a, elem<V> b) { return (elem<V>)(a + b); }); }
template <class V> FI elem<V> prod(V v) { return across(v, [](elem<V> a, elem<V> b) { return (elem<V>)(a * b); }); }
template <class V> FI elem<V> amax(V v) { return across(v, [](elem<V> a, elem<V> b) { return max_lane(a, b); }); }
template <class V> FI elem<V> amin(V v) { return across(v, [](elem<V> a, elem<V> b) { return min_lane(a, b); }); }
#define STX_SCALAR(T)                                        \
  FI T maximum(T a, T b) { return max_lane(a, b); }          \
  FI T minimum(T a, T b) { return min_lane(a, b); }          \
  FI T clamp_min(T x, T c) { return c > x ? c : x; }         \
  FI T clamp_max(T x, T c) { return c < x ? c : x; }
STX_SCALAR(f32) STX_SCALAR(f64) STX_SCALAR(i64) STX_SCALAR(i32) STX_SCALAR(i16) STX_SCALAR(i8) STX_SCALAR(u8)
FI f32 fmax(f32 a, f32 b) { return a != a || b > a ? b : a; }
FI f64 fmax(f64 a, f64 b) { return a != a || b > a ? b : a; }
FI f32 fmin(f32 a, f32 b) { return a != a || b < a ? b : a; }
FI f64 fmin(f64 a, f64 b) { return a != a || b < a ? b : a; }

// Live lanes of a tail step; the rest is the identity.
template <class V, class T> FI V keep(V v, All, T) { return v; }
template <class V, class T> FI V keep(V v, int n, T other) { return where(active<lanes<V>>(n), v, all_of<V>((elem<V>)other)); }

// A sum of blocks: what rounding loses is kept beside (Neumaier), so that long sums stay as good as short ones.
template <class V> struct Sum {
  V hi = {}, lo = {};
  INLINE void add(V x) {
    V s = hi + x, t = s - hi;
    lo += (hi - (s - t)) + (x - t);
    hi = s;
  }
  INLINE V value() const { return where(hi - hi == 0, hi + lo, hi); }  // infinities make lo a NaN
  INLINE elem<V> total() const {
    Sum<elem<V>> t;
    UNROLL for (int i = 0; i < lanes<V>; i++) {
      t.add(hi[i]);
      t.lo += lo[i];
    }
    return t.value();
  }
};

template <class V> FI V sum_of(V hi, V lo) {
  Sum<V> s;
  s.hi = hi;
  s.lo = lo;
  return s.value();
}
template <int N, class T> FI void add_block(T *hi, T *lo, vec<T, N> x) {
  Sum<vec<T, N>> s;
  s.hi = load<N>((const T *)hi);
  s.lo = load<N>((const T *)lo);
  s.add(x);
  store<N>(hi, s.hi);
  store<N>(lo, s.lo);
}
template <class T, class S> FI void fill(T *p, int n, S x) {
  for (int i = 0; i < n; i++) put(p + i, x);
}

// The extreme and its first index; a NaN is the extreme. `sign` > 0: largest.
template <int sign, class T, class I> struct Best {
  T value;
  I at;
  INLINE void add(T x, I i) {
    bool take = (sign > 0 ? x > value : x < value) || (x != x && value == value) || (!(x < value) && !(x > value) && (x == x) == (value == value) && i < at);
    value = take ? x : value;
    at = take ? i : at;
  }
};
template <int sign, class V, class I> struct BestLanes {
  V value;
  I at;
  INLINE void add(V x, I i) {  // i grows within a lane, so a tie keeps what is there
    auto take = sign > 0 ? x > value : x < value;
    if constexpr (is_float<elem<V>>) take = take | ((x != x) & (value == value));
    value = take ? x : value;
    at = widen<I>(take) ? i : at;
  }
  template <class L> INLINE void add(V x, I i, L n) {
    if constexpr (same<L, All>) add(x, i);
    else {
      BestLanes next = *this;
      next.add(x, i);
      value = where(active<lanes<V>>(n), next.value, value);
      at = where(active<lanes<V>>(n), next.at, at);
    }
  }
  INLINE Best<sign, elem<V>, i64> best() const {
    Best<sign, elem<V>, i64> b{value[0], at[0]};
    for (int k = 1; k < lanes<V>; k++) b.add(value[k], at[k]);
    return b;
  }
};

// columns: each lane is its own sequence, indices grow
template <int sign, class V, class I> FI void better(V &value, I &at, V x, i64 i) {
  auto take = sign > 0 ? x > value : x < value;
  if constexpr (is_float<elem<V>>) take = take | ((x != x) & (value == value));
  value = take ? x : value;
  at = where(take, all_of<I>(i), at);
}
// running extreme with its last index, as cummax
template <int sign, class T> struct Extreme {
  T value = 0;
  i64 at = -1;
  INLINE void add(T x, i64 i) {
    bool take = at < 0 || x != x || (value == value && (sign > 0 ? x >= value : x <= value));
    value = take ? x : value;
    at = take ? i : at;
  }
};
FI f64 logaddexp(f64 a, f64 b) {
  f64 high = max_lane(a, b), low = min_lane(a, b);
  return high == low && isinf(high) ? high : libm_log1p(libm_exp(low - high)) + high;
}

// ---- threads -----------------------------------------------------------------------------------------------------

extern "C" {
void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
}
// f(chunk, begin, end) for `chunks` fixed parts of [0, n): the result does not depend on who runs a part.
template <class F> static void parallel(int chunks, i64 n, F f) {
  if (chunks > n) chunks = (int)n;
  if (chunks <= 1) return f(0, (i64)0, n);
  struct Team { F &f; i64 n; int chunks; } team{f, n, chunks};
  GOMP_parallel([](void *p) {
    Team &t = *(Team *)p;
    for (int c = omp_get_thread_num(), k = omp_get_num_threads(); c < t.chunks; c += k) t.f(c, t.n * c / t.chunks, t.n * (c + 1) / t.chunks);
  }, &team, chunks, 0);
}
FI int at_most(int threads, int limit) { return threads < limit ? threads : limit; }
FI void fail(int &code, int check) { __atomic_store_n(&code, check, __ATOMIC_RELAXED); }

}  // namespace stx
