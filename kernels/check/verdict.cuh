// The verdict on a line of C from its weighted sum, that of its squares, and what must hold of it
// (abft_tsm2/checksum/bounds.py has the bound and its sources).
#pragma once
#include "check/state.cuh"

// What every verdict takes. All arrays but `sizes` have an element for each line, those of one product after the other.
//   alpha, beta     C = alpha L R + beta C0
//   t, p2           L (R v), and (L o L) of the squares of the rows of R o v
//   t0, added2      C0 v and (C0 o v)^2; null where beta is 0
//   sizes           sum |v| and smallest |v| of each product, `sizes_step` from one to the next
//   factor, input_factor, out_factor, root, underflow
//                   tau = factor max(|alpha| P2, ||C o v||, |beta| ||C0 o v||) + input_factor |alpha| P2
//                         + out_factor (||C o v|| + |beta| ||C0 o v||) + underflow sum |v|,
//                   with ||C o v|| <= root |alpha| P2 + 1.01 |beta| ||C0 o v|| + ...
//   tau, lines      where bounds, and the numbers of lines that fail go
//   state           FLAGGED, CLOSEST, CALL and JUDGED of state.cuh
//   guards, guards0, encoded   of t and p2, of t0 and added2, by the call of this number; a line that they do not fit fails
//   call            number of the call that this verdict is for; both as number_of takes them
#define VERDICT_ARGUMENTS                                                                                         \
  double alpha, double beta, const double *t, const double *p2, const double *t0, const double *added2,           \
      const double *sizes, Index sizes_step, double factor, double input_factor, double out_factor, double root, double underflow,     \
      double *tau, unsigned *lines, Bits *state, const Bits *guards, const Bits *guards0, Bits encoded, Bits call

// The square root to seven digits, whatever the range: exact ones are longer than all else here, and code that is run
// once costs by its length.
INLINE double root_of(double x) {
  if (!(x > 0 && x <= 0x1.fffffffffffffp1023)) return x;  // 0, infinity, NaN
  const Bits bits = pattern(x);
  const long long half = ((long long)(bits >> 52) - 1023) >> 1;  // x = 4^half m, m in [1, 4)
  const double m = same_bits<double>(bits - (Bits(2 * half) << 52));
  return same_bits<double>(pattern(double(sqrtf(float(m)))) + (Bits(half) << 52));
}

// x / y to seven digits, for 0 <= x <= y.
INLINE float ratio_of(double x, double y) {
  const Bits bits = pattern(y);
  if (bits >> 52 == 0) return 0;  // 0, and what is next to it
  const double scale = same_bits<double>((2047 - (bits >> 52)) << 52);
  return float(x * scale) / float(y * scale);
}

// What is known of a line before its sums are: loaded early, so that the verdict does not wait for memory.
struct Expected {
  double sum, products, added, least;
  Bits call;  // for the first line: the number of the call
};

// beta C0 v, and what is rounded in it.
INLINE Expected added_to(Index line, Index product, double beta, const double* t0, const double* added2,
                         const double* sizes, Index sizes_step, double underflow, const Bits* guards0, Bits encoded,
                         Bits call) {
  Expected e = {0, 0, 0, underflow * sizes[product * sizes_step], line == 0 ? number_of(call) : 0};
  if (t0) {
    e.sum = beta * guarded(t0[line], added2[line], line, number_of(encoded), guards0[line]);
    e.added = fabs(beta) * root_of(added2[line]);
  }
  return e;
}
#define ADDED_TO(line, product) \
  added_to(line, product, beta, t0, added2, sizes, sizes_step, underflow, guards0, encoded, call)

// And alpha L (R v).
INLINE void expect_products(Expected& e, double alpha, double sum, double squares) {
  e.sum += alpha * sum;
  e.products = fabs(alpha) * root_of(squares);
}

INLINE Expected with_products(Expected e, Index line, double alpha, const double* t, const double* p2, const Bits* guards,
                              Bits encoded) {
  expect_products(e, alpha, guarded(t[line], p2[line], line, number_of(encoded), guards[line]), p2[line]);
  return e;
}
#define EXPECTED_OF(line, product) with_products(ADDED_TO(line, product), line, alpha, t, p2, guards, encoded)

// Writes the bound of a line, and its number where it fails; else returns residual / bound and the line as one number,
// which is the larger the closer the residual came.
INLINE Bits verdict(Index line, double u, double squares, const Expected& e, double factor, double input_factor,
                    double out_factor, double root, double* tau, unsigned* lines, Bits* state, Bits call) {
  // A large fault must not widen the bound that it is compared with: ||C o v|| is cut to what it can be.
  const double largest = root * e.products + 1.01 * e.added + e.least, found = root_of(squares);
  const double stored = found <= largest ? found : largest;
  const double size = e.products > e.added ? e.products : e.added;
  const double bound =
      factor * (stored > size ? stored : size) + input_factor * e.products + out_factor * (stored + e.added) + e.least;
  const double residual = fabs(u - e.sum);
  tau[line] = bound;
  if (line == 0) {
    state[CALL] = e.call;
    count_replay(call, VERDICTS_AT);
  }
  // NaN compares false, and so does a bound that overflowed. One below FAINTEST is compared with what is left of sums.
  if (residual <= bound && bound >= FAINTEST && bound <= 0x1.fffffffffffffp1023 && found <= largest)
    return Bits(to_bits(ratio_of(residual, bound))) << 32 | Bits(line);
  if (!(bound <= 0x1.fffffffffffffp1023)) atomicAdd(state + UNBOUNDED, 1ull);
  lines[atomicAdd(reinterpret_cast<unsigned*>(state), 1u)] = unsigned(line);
  return 0;
}
#define GIVE_VERDICT(line, u, squares, expected) \
  verdict(line, u, squares, expected, factor, input_factor, out_factor, root, tau, lines, state, call)

// What was kept so far: read early, so that keep_closest need not wait for memory. There may be more by then.
INLINE Bits kept_closest(const Bits* state) { return __ldcg(state + CLOSEST); }

// Keeps the largest number that a block's verdicts returned: `mine` is the thread's, `kept` is of kept_closest; and counts
// the lines that were `judged`.
template <int THREADS>
INLINE void keep_closest(bool judged, Bits mine, Bits kept, Bits* state) {
  __shared__ Bits closest[THREADS / 32];
  __shared__ unsigned counts[THREADS / 32];
  unsigned count = judged;
#pragma unroll 1
  for (int bit = 16; bit; bit /= 2) {
    const Bits other = __shfl_xor_sync(~0u, mine, bit);
    mine = other > mine ? other : mine;
    count += __shfl_xor_sync(~0u, count, bit);
  }
  if (threadIdx.x % 32 == 0) {
    closest[threadIdx.x / 32] = mine;
    counts[threadIdx.x / 32] = count;
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
#pragma unroll
  for (int w = 1; w < THREADS / 32; w++) {
    const Bits other = closest[w];
    mine = other > mine ? other : mine;
    count += counts[w];
  }
  if (mine > kept) atomicMax(state + CLOSEST, mine);
  atomicAdd(state + JUDGED, Bits(count));
}
