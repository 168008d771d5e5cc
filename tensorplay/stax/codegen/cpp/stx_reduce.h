// Folds across lanes, long sums, extremes with an index, part of stx.h (included inside its namespace).

// ---- reductions --------------------------------------------------------------------------------------------------

template <class V, class F> FI elem<V> across(V v, F f) {  // pairwise over the lanes
  alignas(V) elem<V> a[lanes<V>];
  *(V *)a = v;  // GCC 12 copies a vector that it knows at compile time as if all its lanes were the first
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
