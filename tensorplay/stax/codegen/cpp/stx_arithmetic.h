// Conversions, arithmetic, integers, part of stx.h (included inside its namespace).

// ---- conversion, as Tensor.to ------------------------------------------------------------------------------------

template <class T, class V> FI auto cast(V x) {
  typedef elem<V> S;
  constexpr int N = lanes<V>;
  if constexpr (same<T, S>) return x;
  else if constexpr (is_float<S> && same<T, u8> && sizeof(S) == 8)
    return convert<vec<T, N>>(convert<vec<i64, N>>(x));
  else if constexpr (is_float<S> && !is_float<T> && sizeof(T) < 4)
    return convert<vec<T, N>>(convert<vec<i32, N>>(x));
  else if constexpr (is_float<T> && sizeof(S) < 4)
    return convert<vec<T, N>>(convert<vec<i32, N>>(x));
  else return convert<vec<T, N>>(x);
}
template <class T, class V> FI T cast_lane(V x) {  // one element
  if constexpr (is_float<V> && same<T, u8> && sizeof(V) == 8) return (T)(i64)x;
  else if constexpr (is_float<V> && !is_float<T> && sizeof(T) < 4) return (T)(i32)x;
  else return (T)x;
}
template <class V> FI auto truth(V x) { return flags(x != 0); }
template <class T, class M> FI vec<T, lanes<M>> from_mask(M m) {
  typedef vec<T, lanes<M>> V;
  return bits<V>(widen<ints<V>>(m) & bits<ints<V>>(all_of<V>((T)1)));
}
template <class V> FI V round_bf16(V x) { return bits<V>(bf16_high(x) & 0xffff0000); }
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

// a > b ? a : b, and b where they are equal or one is a NaN: one instruction, which GCC does not find on vectors
#if defined(__AVX512F__) && !defined(__clang__)
#define STX_EXTREME512(op)                                                                                                  \
  if constexpr (sizeof(V) == 64 && same<elem<V>, f32>) return (V)__builtin_ia32_##op##ps512_mask((vec<f32, 16>)a, (vec<f32, 16>)b, vec<f32, 16>{}, (u16)-1, 4); \
  if constexpr (sizeof(V) == 64 && same<elem<V>, f64>) return (V)__builtin_ia32_##op##pd512_mask((vec<f64, 8>)a, (vec<f64, 8>)b, vec<f64, 8>{}, (u8)-1, 4);
#else
#define STX_EXTREME512(op)
#endif
#if defined(__AVX__) && !defined(__clang__)
#define STX_EXTREME256(op)                                                                                                  \
  if constexpr (sizeof(V) == 32 && same<elem<V>, f32>) return (V)__builtin_ia32_##op##ps256((vec<f32, 8>)a, (vec<f32, 8>)b); \
  if constexpr (sizeof(V) == 32 && same<elem<V>, f64>) return (V)__builtin_ia32_##op##pd256((vec<f64, 4>)a, (vec<f64, 4>)b);
#else
#define STX_EXTREME256(op)
#endif
#if defined(__SSE2__) && !defined(__clang__)
#define STX_EXTREME128(op)                                                                                            \
  if constexpr (sizeof(V) == 16 && same<elem<V>, f32>) return (V)__builtin_ia32_##op##ps((vec<f32, 4>)a, (vec<f32, 4>)b); \
  if constexpr (sizeof(V) == 16 && same<elem<V>, f64>) return (V)__builtin_ia32_##op##pd((vec<f64, 2>)a, (vec<f64, 2>)b);
#else
#define STX_EXTREME128(op)
#endif
template <class V> FI V greater(V a, V b) {
  STX_EXTREME512(max) STX_EXTREME256(max) STX_EXTREME128(max)
  return a > b ? a : b;
}
template <class V> FI V lesser(V a, V b) {
  STX_EXTREME512(min) STX_EXTREME256(min) STX_EXTREME128(min)
  return a < b ? a : b;
}
template <class V> FI V clamp_min(V x, V c) { return greater(c, x); }  // keeps a NaN, or a -0, in x
template <class V> FI V clamp_max(V x, V c) { return lesser(c, x); }
template <class V> FI V maximum(V a, V b) { return a == a ? greater(a, b) : a; }  // NaN from either side
template <class V> FI V minimum(V a, V b) { return a == a ? lesser(a, b) : a; }
template <class V> FI V clamp_min(V x, elem<V> c) { return clamp_min(x, all_of<V>(c)); }
template <class V> FI V clamp_max(V x, elem<V> c) { return clamp_max(x, all_of<V>(c)); }
template <class V> FI V maximum(V a, elem<V> b) { return maximum(a, all_of<V>(b)); }
template <class V> FI V minimum(V a, elem<V> b) { return minimum(a, all_of<V>(b)); }
template <class V> FI V fmax(V a, V b) { return a == a ? greater(b, a) : b; }  // the first of 0 and -0
template <class V> FI V fmin(V a, V b) { return a == a ? lesser(b, a) : b; }

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
