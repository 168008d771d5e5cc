// Mathematical functions, part of stx.h (included inside its namespace).
//
// float: exp, log, tanh, erf, sigmoid inline and free of branches, about one ulp (bench/ulp.py prints the table),
// denormals and infinities right. The rest, and double, are the SLEEF functions that libtorch_cpu exports; where
// there is none for a tier, libm lane by lane.

// exp without its power of two n, for -104 <= x <= 88.8 and for a NaN. Adding and subtracting R = 1.5 * 2^23 + bias rounds to
// the nearest integer, and the last bits of `shifted`, the sum, are n + bias.
template <int bias, class V> FI V exp_reduced(V x, V &n, ints<V> &shifted) {
  const f32 R = 12582912.f + bias;
  V sum = mad(x, 1.44269504f, all_of<V>(R));
  shifted = bits<ints<V>>(sum);
  n = sum - R;
  V r = mad(n, -0.693359375f, x);
  r = mad(n, 2.12194440e-4f, r);
  V z = r * r, low = mad(all_of<V>(1.66664720e-1f), r, 4.99999851e-1f), high = mad(all_of<V>(8.37333966e-3f), r, 4.16695364e-2f);
  V p = mad(mad(z, 1.38419088e-3f, high), z, low);
  return mad(p, z, r) + 1.f;
}
template <class V> FI V exp_f32(V x) {
  V n;
  ints<V> k;
  V p = exp_reduced<254>(clamp_max(clamp_min(x, all_of<V>(-104.f)), all_of<V>(88.8f)), n, k);  // a NaN passes
#if defined(__AVX512F__) && !defined(__clang__)
  if constexpr (sizeof(V) == 64) return (V)__builtin_ia32_scalefps512_mask((vec<f32, 16>)p, (vec<f32, 16>)n, vec<f32, 16>{}, (u16)-1, 4);
#endif
  return p * bits<V>((k >> 1) << 23) * bits<V>((k - (k >> 1)) << 23);  // two factors: exact for denormals, infinite on overflow
}
template <class V> FI V exp_below(V x) {  // exp of x <= 0 where 2^-28 is as good as nothing
  V n;
  ints<V> k;
  V p = exp_reduced<127>(clamp_min(x, all_of<V>(-20.f)), n, k);
  return p * bits<V>(k << 23);
}
template <class V> FI V log_f32(V x) {
  typedef ints<V> I;
  I tiny = x < 1.17549435e-38f;
  V y = tiny ? x * 8388608.f : x, e0 = tiny ? all_of<V>(-23.f) : V{};
  I i = bits<I>(y), e = (i - 0x3f3504f3) >> 23;
  V k = __builtin_convertvector(e, V) + e0, f = bits<V>(i - (e << 23)) - 1.f, z = f * f;
  V p = mad(all_of<V>(7.0376836292e-2f), f, -1.1514610310e-1f);
  p = mad(p, f, 1.1676998740e-1f);
  p = mad(p, f, -1.2420140846e-1f);
  p = mad(p, f, 1.4249322787e-1f);
  p = mad(p, f, -1.6668057665e-1f);
  p = mad(p, f, 2.0000714765e-1f);
  p = mad(p, f, -2.4999993993e-1f);
  p = mad(p, f, 3.3333331174e-1f);
  V t = mad(p * f, z, k * -2.12194440e-4f);
  t = mad(z, -0.5f, t);
  V r = mad(k, 0.693359375f, f + t);
  const f32 inf = __builtin_inff();
  r = x == inf ? x : r;
  r = x == 0.f ? all_of<V>(-inf) : r;
  return x >= 0.f ? r : x != x ? x : all_of<V>(__builtin_nanf(""));
}
template <class V> FI V tanh_f32(V x) {
  V a = abs(x), z = x * x;
  V p = mad(all_of<V>(-5.70498872745e-3f), z, 2.06390887954e-2f);
  p = mad(p, z, -5.37397155531e-2f);
  p = mad(p, z, 1.33314422036e-1f);
  p = mad(p, z, -3.33332819422e-1f);
  V e = exp_below(-2.f * a), small = mad(p * z, x, x), big = 1.f - (e + e) / (e + 1.f);
  return copysign(a < 0.625f ? small : big, x);  // also of -0
}
#if defined(__AVX2__) && !defined(__clang__)
// erf(t) / t on [k S, (k + 1) S), k S < 4, S = ERF_STEP, in powers of the distance from the middle: a row a coefficient, the first in two
// parts; minimax in float64. A row is a register. erf(4) is 1.
#if defined(__AVX512F__)
constexpr f32 ERF_STEP = 0.25f;
static const f32 ERF[][16] __attribute__((aligned(64))) = {
    {1.1225296f, 1.0776451f, 0.9971854f, 0.8960858f, 0.78967845f, 0.68957824f, 0.6021192f, 0.5290614f,
     0.46933928f, 0.42072296f, 0.38087416f, 0.34780943f, 0.31999683f, 0.29629576f, 0.27586198f, 0.2580645f},
    {9.578518e-9f, 2.7286003e-8f, 3.4437355e-9f, -1.2600697e-8f, -2.4511326e-8f, 2.6806124e-10f, 1.2892313e-8f, -1.34616505e-8f,
     -1.4526896e-9f, 1.1715395e-8f, -1.4463686e-8f, 7.846266e-9f, -7.4261963e-10f, -3.6104484e-9f, 9.029445e-9f, -3.2716405e-9f},
    {-0.093154944f, -0.25944608f, -0.3738974f, -0.42438942f, -0.4190262f, -0.37761343f, -0.3210135f, -0.26427495f,
     -0.2150581f, -0.17545958f, -0.14465763f, -0.120876245f, -0.102378264f, -0.08778756f, -0.07609925f, -0.0665972f},
    {-0.36564228f, -0.28849527f, -0.16526486f, -0.039730955f, 0.054191805f, 0.1042674f, 0.11707473f, 0.10740139f,
     0.08886349f, 0.069871515f, 0.053959895f, 0.0417537f, 0.03269627f, 0.025998358f, 0.020990666f, 0.017186025f},
    {0.055377234f, 0.1429849f, 0.17534402f, 0.15160084f, 0.09622989f, 0.03903339f, -1.3737646e-3f, -0.021311421f,
     -0.02627085f, -0.023638323f, -0.018693205f, -0.014000457f, -0.010334825f, -7.675794e-3f, -5.7853796e-3f, -4.4342554e-3f},
    {0.106053516f, 0.062698f, 1.980659e-3f, -0.044399496f, -0.060336962f, -0.050438754f, -0.02978676f, -0.011271554f,
     -1.2749697e-4f, 4.375949e-3f, 5.0412803e-3f, 4.2129266e-3f, 3.1314262e-3f, 2.2355057e-3f, 1.5898778e-3f, 1.1445137e-3f},
    {-0.01944398f, -0.04620161f, -0.04641987f, -0.025504148f, -6.502599e-4f, 0.014384435f, 0.016899299f, 0.012043902f,
     5.9129638e-3f, 1.6779877e-3f, -3.0559232e-4f, -8.6370483e-4f, -8.1475574e-4f, -6.128946e-4f, -4.2739089e-4f, -2.9317444e-4f},
};
#else
constexpr f32 ERF_STEP = 0.5f;
static const f32 ERF[][8] __attribute__((aligned(32))) = {
    {1.1053056f, 0.9482075f, 0.7383201f, 0.5638124f, 0.44379434f, 0.36359978f, 0.30769098f, 0.26666665f},
    {6.7891532e-9f, 1.4187986e-8f, -9.1712735e-9f, 7.969369e-9f, 7.917725e-9f, -3.3682626e-9f, 5.8057488e-9f, -1.4444029e-8f},
    {-0.18116549f, -0.4070351f, -0.4014393f, -0.2920214f, -0.19406754f, -0.1320049f, -0.09466517f, -0.07111087f},
    {-0.33535084f, -0.100217596f, 0.08463f, 0.11409442f, 0.07910997f, 0.047415502f, 0.029098552f, 0.018962016f},
    {0.10469183f, 0.16932423f, 0.06634178f, -0.013673194f, -0.02550782f, -0.016239464f, -0.008893189f, -5.0543468e-3f},
    {0.08901327f, -0.024855888f, -0.057976454f, -0.019676419f, 2.8525188e-3f, 4.7206813e-3f, 2.6483487e-3f, 1.3441541e-3f},
    {-0.034970503f, -0.037270643f, 8.0860555e-3f, 0.014861975f, 3.5717622e-3f, -6.746595e-4f, -7.171219e-4f, -3.556564e-4f},
    {-0.017932652f, 0.014155194f, 9.981724e-3f, -3.3128646e-3f, -2.8161814e-3f, -3.6162316e-4f, 1.3604386e-4f, 8.927579e-5f},
};
#endif
template <class V> FI V erf_table(V x) {
  const f32 M = 12582912.f * ERF_STEP;  // 1.5 * 2^23 S: adding it rounds to multiples of S, and its last bits count them
  V t = clamp_max(abs(x), all_of<V>(3.9999998f)), s = t - ERF_STEP / 2, m = s + M, r = s - (m - M);
  auto row = [&](int c) INLINE {
#if defined(__AVX512F__)
    return __builtin_shuffle(*(const V *)ERF[c], bits<ints<V>>(m));
#else
    return (V)__builtin_ia32_permvarsf256(*(const vec<f32, 8> *)ERF[c], bits<vec<i32, 8>>(m));
#endif
  };
  constexpr int last = sizeof ERF / sizeof ERF[0] - 1;
  V q = row(last);
  UNROLL for (int c = last - 1; c; c--) q = mad(q, r, row(c));
  return copysign(mad(t, row(0), t * q), x);
}
#endif
template <class V> FI V erf_f32(V x) {  // two minimax polynomials, after N. Juffa
#if defined(__AVX2__) && !defined(__clang__)
  if constexpr (sizeof(V) == BYTES) return erf_table(x);
#endif
  V t = abs(x), s = x * x;
  V r = mad(all_of<V>(-1.72853470e-5f), t, 3.83197126e-4f), u = mad(all_of<V>(-3.88396438e-3f), t, 2.42546219e-2f);
  r = mad(r, s, u);
  r = mad(r, t, -1.06777877e-1f);
  r = mad(r, t, -6.34846687e-1f);
  r = mad(r, t, -1.28717512e-1f);
  r = mad(r, t, -t);
  V big = copysign(1.f - exp_below(r), x);
  V p = mad(all_of<V>(-5.96761703e-4f), s, 4.99119423e-3f);
  p = mad(p, s, -2.67681349e-2f);
  p = mad(p, s, 1.12819925e-1f);
  p = mad(p, s, -3.76125336e-1f);
  p = mad(p, s, 1.28379166e-1f);
  return t > 0.927734375f ? big : mad(p, x, x);
}

#define STX_LIBM1(name)                     \
  f32 libm_##name(f32) __asm__(#name "f");  \
  f64 libm_##name(f64) __asm__(#name);
#define STX_LIBM2(name)                         \
  f32 libm_##name(f32, f32) __asm__(#name "f"); \
  f64 libm_##name(f64, f64) __asm__(#name);
#if defined(__AVX512F__) && defined(__x86_64__)
#define STX_512(sf, sd, A1, A2) \
  extern "C" vec<f32, 16> sf##avx512f A1; \
  extern "C" vec<f64, 8> sd##avx512f A2;
#define STX_CALL512(sf, sd, AS, AD)                                          \
  if constexpr (sizeof(V) == 64 && sizeof(elem<V>) == 4) return (V)sf##avx512f AS; \
  if constexpr (sizeof(V) == 64 && sizeof(elem<V>) == 8) return (V)sd##avx512f AD;
#else
#define STX_512(sf, sd, A1, A2)
#define STX_CALL512(sf, sd, AS, AD)
#endif
#if defined(__AVX2__)
#define STX_256(sf, sd, A1, A2) \
  extern "C" vec<f32, 8> sf##avx2 A1; \
  extern "C" vec<f64, 4> sd##avx2 A2;
#define STX_CALL256(sf, sd, AS, AD, AH)                                      \
  if constexpr (sizeof(V) == 32 && sizeof(elem<V>) == 4) return (V)sf##avx2 AS; \
  if constexpr (sizeof(V) == 32 && sizeof(elem<V>) == 8) return (V)sd##avx2 AD; \
  if constexpr (sizeof(V) == 16 && sizeof(elem<V>) == 4) return low(sf##avx2 AH);
FI vec<f32, 8> twice(vec<f32, 4> x) { return vec<f32, 8>{x[0], x[1], x[2], x[3], x[0], x[1], x[2], x[3]}; }
FI vec<f32, 4> low(vec<f32, 8> x) { return vec<f32, 4>{x[0], x[1], x[2], x[3]}; }
template <class V> FI vec<f32, 8> both_halves(V x) { return twice((vec<f32, 4>)x); }
#else
#define STX_256(sf, sd, A1, A2)
#define STX_CALL256(sf, sd, AS, AD, AH)
#endif
#define STX_V1(T, N) (vec<T, N>)
#define STX_V2(T, N) (vec<T, N>, vec<T, N>)
#define STX_LANES(call)                               \
  V r = {};                                           \
  for (int k = 0; k < lanes<V>; k++) r[k] = call;     \
  return r;
// name, SLEEF's float and double names without the tier
#define STX_FN1_ONLY(name, u)                                                                     \
  STX_LIBM1(name)                                                                                 \
  STX_512(Sleef_##name##f16_##u, Sleef_##name##d8_##u, STX_V1(f32, 16), STX_V1(f64, 8))           \
  STX_256(Sleef_##name##f8_##u, Sleef_##name##d4_##u, STX_V1(f32, 8), STX_V1(f64, 4))             \
  template <class V> FI V sleef_##name(V x) {                                                     \
    STX_CALL512(Sleef_##name##f16_##u, Sleef_##name##d8_##u, ((vec<f32, 16>)x), ((vec<f64, 8>)x)) \
    STX_CALL256(Sleef_##name##f8_##u, Sleef_##name##d4_##u, ((vec<f32, 8>)x), ((vec<f64, 4>)x), (both_halves(x))) \
    STX_LANES(libm_##name(x[k]))                                                                  \
  }
#define STX_FN2(name, u)                                                        \
  STX_LIBM2(name)                                                               \
  STX_512(Sleef_##name##f16_##u, Sleef_##name##d8_##u, STX_V2(f32, 16), STX_V2(f64, 8)) \
  STX_256(Sleef_##name##f8_##u, Sleef_##name##d4_##u, STX_V2(f32, 8), STX_V2(f64, 4))   \
  template <class V> FI V name(V x, V y) {                                      \
    STX_CALL512(Sleef_##name##f16_##u, Sleef_##name##d8_##u, ((vec<f32, 16>)x, (vec<f32, 16>)y), ((vec<f64, 8>)x, (vec<f64, 8>)y)) \
    STX_CALL256(Sleef_##name##f8_##u, Sleef_##name##d4_##u, ((vec<f32, 8>)x, (vec<f32, 8>)y), ((vec<f64, 4>)x, (vec<f64, 4>)y), (both_halves(x), both_halves(y))) \
    STX_LANES(libm_##name(x[k], y[k]))                                          \
  }                                                                             \
  FI f32 name(f32 x, f32 y) { return libm_##name(x, y); }                       \
  FI f64 name(f64 x, f64 y) { return libm_##name(x, y); }
// inline in float, SLEEF in double
#define STX_HOT(name, u)                                                        \
  STX_FN1_ONLY(name, u)                                                         \
  template <class V> FI V name(V x) {                                           \
    if constexpr (sizeof(elem<V>) == 4) return name##_f32(x);                   \
    else return sleef_##name(x);                                                \
  }                                                                             \
  FI f32 name(f32 x) { return name##_f32(vec<f32, 4>{x, x, x, x})[0]; }         \
  FI f64 name(f64 x) { return libm_##name(x); }
#define STX_PLAIN2(name)                                                        \
  STX_LIBM2(name)                                                               \
  template <class V> FI V name(V x, V y) { STX_LANES(libm_##name(x[k], y[k])) } \
  FI f32 name(f32 x, f32 y) { return libm_##name(x, y); }                       \
  FI f64 name(f64 x, f64 y) { return libm_##name(x, y); }

STX_HOT(exp, u10) STX_HOT(log, u10) STX_HOT(tanh, u10) STX_HOT(erf, u10)
// SLEEF's asinh and acosh overflow where x * x does
#define STX_AREA(name, limit)                                                            \
  STX_FN1_ONLY(name, u10)                                                         \
  template <class V> FI V name(V x) {                                             \
    V a = abs(x), far = copysign(log(a) + (elem<V>)0.69314718055994530942, x);    \
    return limit > (elem<V>)1e15 ? far : sleef_##name(x); \
  }                                                                               \
  FI f32 name(f32 x) { return libm_##name(x); }                                   \
  FI f64 name(f64 x) { return libm_##name(x); }
// SLEEF's sinh and cosh are infinite from 88 (709) on, where half of exp(x) is not
#define STX_HYPERBOLIC(name, sign)                                                                          \
  STX_FN1_ONLY(name, u10)                                                                                   \
  template <class V> FI V name(V x) {                                                                       \
    V a = abs(x), half = exp(a * (elem<V>)0.5), far = (elem<V>)0.5 * half * half;                           \
    return a > (elem<V>)(sizeof(elem<V>) == 4 ? 88 : 709) ? sign : sleef_##name(x);                         \
  }                                                                                                         \
  FI f32 name(f32 x) { return libm_##name(x); }                                                             \
  FI f64 name(f64 x) { return libm_##name(x); }
#define STX_RARE1(X) X(exp2, u10) X(expm1, u10) X(log2, u10) X(log10, u10) X(log1p, u10) X(sin, u10) X(cos, u10) \
  X(tan, u10) X(asin, u10) X(acos, u10) X(atan, u10)                                   \
  X(atanh, u10) X(erfc, u15) X(lgamma, u10)
#define STX_SCALAR1(name, u)                    \
  STX_FN1_ONLY(name, u)                         \
  template <class V> FI V name(V x) { return sleef_##name(x); } \
  FI f32 name(f32 x) { return libm_##name(x); } \
  FI f64 name(f64 x) { return libm_##name(x); }
STX_RARE1(STX_SCALAR1)
STX_AREA(asinh, a) STX_AREA(acosh, x) STX_HYPERBOLIC(sinh, copysign(far, x)) STX_HYPERBOLIC(cosh, far)
STX_FN2(pow, u10) STX_FN2(atan2, u10) STX_FN2(hypot, u05)
STX_PLAIN2(fmod) STX_PLAIN2(nextafter)
template <class V> FI V sigmoid(V x) { return 1 / (1 + exp(-x)); }
// Python's remainder: the sign of the divisor
template <class V> FI V remainder(V a, V b) {
  V r = fmod(a, b);
  return (r != 0) & ((b < 0) != (r < 0)) ? r + b : r;
}
FI f32 remainder(f32 a, f32 b) { f32 r = fmod(a, b); return r != 0 && (b < 0) != (r < 0) ? r + b : r; }
FI f64 remainder(f64 a, f64 b) { f64 r = fmod(a, b); return r != 0 && (b < 0) != (r < 0) ? r + b : r; }
