// Half types, loads and stores, transposed tiles, part of stx.h (included inside its namespace).
//
// Memory type -> register type: half types become float, booleans become masks.

// ---- half types --------------------------------------------------------------------------------------------------

template <class V> FI V bf16_up(vec<u16, lanes<V>> h) {
#if defined(__AVX512F__) && !defined(__clang__)  // GCC widens to a whole register in two halves
  if constexpr (lanes<V> == 16) return bits<V>(__builtin_ia32_pmovzxwd512_mask(bits<vec<i16, 16>>(h), vec<i32, 16>{}, (u16)-1) << 16);
#endif
  return bits<V>(convert<vec<u32, lanes<V>>>(h) << 16);
}
template <class V> FI vec<u32, lanes<V>> bf16_high(V x) {  // to nearest even in the upper half; a NaN is all ones, as eager's
  typedef vec<u32, lanes<V>> U;
  U u = bits<U>(x);
  return (u + 0x7fff + ((u >> 16) & 1)) | bits<U>(x != x);
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
  else if constexpr (same<T, b1>) return convert<mask<N>>(loadu<N>((const i8 *)p)) != 0;
  else return loadu<N>(p);
}
#if defined(__AVX512BW__) && !defined(__clang__)
#define STX_BF16_512 1
// Sixteen floats: a rounded word lies in the upper half of its element, so one permutation narrows; a NaN is put back.
FI vec<i16, 16> bf16_down(vec<f32, 16> x) {
  vec<i32, 16> u = bits<vec<i32, 16>>(x), half = vec<i32, 16>{} + 0x8000;
  auto r = u + __builtin_ia32_blendmd_512_mask(half - 1, half, __builtin_ia32_ptestmd512(u, half + half, (u16)-1));
  auto kept = __builtin_ia32_fixupimmps512_mask(bits<vec<f32, 16>>(r), x, vec<i32, 16>{} + 0x22, 0, (u16)-1, 4);
  const vec<i16, 32> upper = iota<32>((i16)1, (i16)2) & 31;
  struct { vec<i16, 16> low, high; } h = bits<decltype(h)>(__builtin_shuffle(bits<vec<i16, 32>>(kept), upper));
  return h.low;
}
#endif
template <int N> FI void store_bf16(u16 *p, vec<u32, N> high) {
  const vec<u32, N> r = high >> 16;
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
#if defined(STX_BF16_512)
  if constexpr (same<T, bf16> && N == 16) return storeu<16>((i16 *)p, bf16_down(v));
  else
#endif
  if constexpr (same<T, bf16>) store_bf16<N>((u16 *)p, bf16_high(v));
  else if constexpr (same<T, f16>) storeu<N>((u16 *)p, f16_down(v));
  else if constexpr (same<T, b1>) storeu<N>((i8 *)p, convert<vec<i8, N>>(v & 1));
  else storeu<N>(p, v);
}

// two vectors side by side
template <int N, class T, class V> FI void store(T *p, V a, V b) {
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__clang__)
  if constexpr (same<T, bf16> && N == 8) {
    auto r = __builtin_ia32_packusdw256(bits<vec<i32, 8>>(bf16_high(a) >> 16), bits<vec<i32, 8>>(bf16_high(b) >> 16));
    return storeu<16>((i16 *)p, bits<vec<i16, 16>>(__builtin_ia32_permdi256(bits<vec<long long, 4>>(r), 0xd8)));
  }
#endif
  store<N>(p, a);
  store<N>(p + N, b);
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
FI void put(bf16 *p, f32 x) { p->b = (u16)(bf16_high(vec<f32, 4>{x, 0, 0, 0})[0] >> 16); }
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

FI void prefetch(const void *p) { __builtin_prefetch(p); }
FI void prefetch_out(const void *p) { __builtin_prefetch(p, 1); }

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
      UNROLL for (int k = 0; k < B; k++) prefetch(bare(from) + (whole + B + k) * step + i);  // too far apart for the hardware
      transpose(block);
      UNROLL for (int k = 0; k < B; k++) store<B>(bare(to) + (i + k) * pitch + whole, block[k]);
    }
    for (; i < columns; i++)
      for (i64 j = whole; j < whole + B; j++) put(to + i * pitch + j, get(from + j * step + i));
  }
  for (i64 j = whole; j < rows; j++)
    for (i64 i = 0; i < columns; i++) put(to + i * pitch + j, get(from + j * step + i));
}
