// Types, vectors and masks, part of stx.h (included inside its namespace).

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

// ---- conversion --------------------------------------------------------------------------------------------------

// As __builtin_convertvector. Between a register of integers and narrower ones GCC goes by halves, or lane by lane.
template <class V, class X> FI V convert(X x) {
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__clang__)
  typedef vec<char, 16> B;
  typedef vec<i16, 8> H;
  typedef vec<i32, 4> Q;
  constexpr int N = lanes<V>, from = sizeof(elem<X>), to = sizeof(elem<V>);
  constexpr bool integers = !is_float<elem<X>> && !is_float<elem<V>>, plus = (elem<X>)-1 > 0;
  if constexpr (integers && from < to && to * N == 32) {
    Q q = {};
    if constexpr (sizeof x == 16) q = bits<Q>(x);
    else if constexpr (sizeof x == 8) q = bits<Q>(vec<i64, 2>{bits<i64>(x), 0});
    else q[0] = bits<i32>(x);
#define STX_EXTEND(a, b, name, R) \
    if constexpr (from == a && to == b) return bits<V>(plus ? __builtin_ia32_pmovzx##name##256((R)q) : __builtin_ia32_pmovsx##name##256((R)q));
    STX_EXTEND(1, 4, bd, B) STX_EXTEND(2, 4, wd, H) STX_EXTEND(1, 8, bq, B) STX_EXTEND(2, 8, wq, H) STX_EXTEND(4, 8, dq, Q)
  } else if constexpr (integers && to < from && from * N == 32) {
    struct { Q low, high; } h = bits<decltype(h)>(x);
    Q q = h.low;
    if constexpr (from == 8) q = bits<Q>(__builtin_ia32_shufps(bits<vec<f32, 4>>(q), bits<vec<f32, 4>>(h.high), 0x88));  // even words
    if constexpr (to < 4) q = bits<Q>(__builtin_ia32_packusdw128(q & ((1 << 8 * (to & 3)) - 1), from == 8 ? q : h.high & ((1 << 8 * (to & 3)) - 1)));
    if constexpr (to == 1) q = bits<Q>(__builtin_ia32_packuswb128((H)q, (H)q));
    if constexpr (sizeof(V) == 16) return bits<V>(q);
    else if constexpr (sizeof(V) == 8) return bits<V>(bits<vec<i64, 2>>(q)[0]);
    else return bits<V>(q[0]);
  } else
#endif
  return __builtin_convertvector(x, V);
}

// ---- masks -------------------------------------------------------------------------------------------------------

template <class M, class V> FI M widen(V m) {  // a mask in another element width
  if constexpr (same<M, V>) return m;
  else return convert<M>(m);
}
template <class V> FI mask<lanes<V>> flags(V m) { return widen<mask<lanes<V>>>(m); }
template <class V> FI auto same_index(V x, i64 y) { return flags((x == (i32)y) & splat<lanes<V>>(-(i32)((i32)y == y))); }
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
    alignas(M) u64 w[(sizeof(M) + 7) / 8] = {}, r = 0;
    *(M *)w = m;  // as in `across`
    UNROLL for (int i = 0; i < (int)(sizeof(w) / 8); i++) r |= w[i];
    return r != 0;
  }
}
template <class M> FI bool all(M m) { return !any(~m); }
