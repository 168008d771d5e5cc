// stx.h -- the vector layer under generated kernels.
//
// Includes nothing but its own parts: parsing them costs a few hundredths of a second. Works with g++ 9 and clang 9 or newer, on AVX-512,
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

#include "stx_vector.h"
#include "stx_memory.h"
#include "stx_arithmetic.h"
#include "stx_math.h"
#include "stx_reduce.h"

// ---- loops -------------------------------------------------------------------------------------------------------

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

// ---- threads -----------------------------------------------------------------------------------------------------

extern "C" {
void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
}
// f(chunk, begin, end) for `chunks` fixed parts of [0, n): the result does not depend on who runs a part.
template <class F> static void parallel(int chunks, i64 n, F f) {
  struct Team {
    F f;
    i64 n;
    int chunks;
    __attribute__((noinline)) void run(int c, int step) const {
      const F own = f;  // in registers: nothing that is stored can change it
      for (; c < chunks; c += step) own(c, n * c / chunks, n * (c + 1) / chunks);
    }
  } team{f, n, chunks < n ? chunks : (int)n};
  if (team.chunks <= 1) return team.chunks = 1, team.run(0, 1);
  GOMP_parallel([](void *p) { ((Team *)p)->run(omp_get_thread_num(), omp_get_num_threads()); }, &team, team.chunks, 0);
}
// f over those of the parts low .. high - 1, counted from 0, that lie in [begin, end): one kernel's share of a launch
template <class F> FI void part(i64 begin, i64 end, i64 low, i64 high, F f) {
  i64 from = begin > low ? begin : low, to = end < high ? end : high;
  if (from < to) f(from - low, to - low);
}
FI i64 upto(i64 x, i64 limit) { return x < limit ? x : limit; }
FI int at_most(int threads, int limit) { return threads < limit ? threads : limit; }
// columns of a tile, at most `most`: in every one of `rows` outer steps, as many tiles for each of the threads
FI i64 tile(i64 size, i64 most, int threads, i64 rows) {
  const i64 each = (threads + rows - 1) / rows, count = ((size + most - 1) / most + each - 1) / each * each;
  const i64 width = ((size + count - 1) / count + 63) / 64 * 64;
  return width < 128 ? 128 : width;
}
FI void fail(int *code, int check) { __atomic_store_n(code, check, __ATOMIC_RELAXED); }

}  // namespace stx
