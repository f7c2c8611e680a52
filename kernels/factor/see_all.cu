// Whether each of the sums that a factorisation was checked with shows changes of all elements of its line (`sees_all`
// of lu_checks.py, with the largest element of each line of A in place of an estimated size): then SEES_ALL is 1.
//
//   bound(row r < K)     f u (row_floor sqrt(done rows) + sqrt(K) max(|S|, |y|)) + underflow
//   bound(column c < K)  f u (column_floor sqrt(done columns) + sqrt(K) max(|Z|, |g(c) U(c, c)|)) + underflow
//   0 beyond them: columns of U and rows of L beyond the square are seen by the others' sums
//   allowed(line)        how large a change of an element may be that no sum shows:
//                        blind_factor max(largest, least size)
//
// and row r sees all where bound(r) <= |v(j)| min(allowed(r), allowed(j)) for every column j; columns likewise, by |w|.
// With NORMS the bounds are those of the certificate instead, as judge_factors.cu leaves them for all rows and columns:
// the norms in some of them may make these larger than what is above.
//
// All by logarithms to base 2, which no scale takes out of the range.
//
// Launch   1 block of T1 threads
// Macros   REAL float or double, of W and of row_largest and column_largest; T1 threads; NORMS 0
//          or 1; ENTRY the name of the kernel
// Storage  W(i, i) = W[i (ld + 1)]; w, S, row_floor and row_largest (of A) by input row. moduli: sums of |w| and |v|
#include "factor/certificate.cuh"
#include "factor/real.cuh"

INLINE double log_of(double x) { return log2(fabs(x)); }

// NaN, which is the smallest here: nothing is within it.
INLINE double least_over_block(double x) { return -largest_over_block<T1>(nan_is_infinite(-x)); }

INLINE double allowed(Real largest, const double* constants) {
  return constants[BLIND] + larger(log_of(exactly(largest)), constants[LEAST_SIZE]);
}

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(const double* __restrict__ w, const double* __restrict__ v, const int* __restrict__ order,
          const double* __restrict__ row_floor, const double* __restrict__ column_floor, const double* __restrict__ S,
          const double* __restrict__ Z, const double* __restrict__ y, const double* __restrict__ g,
          const Real* __restrict__ W, Index ld, const Real* __restrict__ row_largest,
          const Real* __restrict__ column_largest, const double* __restrict__ moduli, const double* __restrict__ state,
          Index m, Index n, const double* __restrict__ constants, Count* verified
#if NORMS
          , const double* __restrict__ bounds
#endif
    ) {
  const Index K = smaller(m, n);
  // of the lines of each side the smallest weight, and weight and allowed change together
  double row_weight = INFINITE, row_size = INFINITE, column_weight = INFINITE, column_size = INFINITE;
  for (Index i = threadIdx.x; i < m; i += T1) {
    const double weight = log_of(w[i]);
    row_weight = smaller_number(row_weight, weight);
    row_size = smaller_number(row_size, weight + allowed(row_largest[i], constants));
  }
  for (Index j = threadIdx.x; j < n; j += T1) {
    const double weight = log_of(v[j]);
    column_weight = smaller_number(column_weight, weight);
    column_size = smaller_number(column_size, weight + allowed(column_largest[j], constants));
  }
  row_weight = least_over_block(row_weight);
  row_size = least_over_block(row_size);
  column_weight = least_over_block(column_weight);
  column_size = least_over_block(column_size);

  // a line sees all where the logarithm of its bound is within min(allowed + weight, size) of the other side
  bool all = true;
  for (Index r = threadIdx.x; r < (NORMS ? m : K); r += T1) {
    const int row = order[r];
    const bool there = is_row(row, m);
#if NORMS
    const double bound = there ? bounds[r] : INFINITE;
#else
    const double reached = there ? reach(row_floor[row], state[DONE_ROWS], double(K), S[row], y[r]) : INFINITE;
    const double bound = factored_bound(reached, double(K), moduli[1], constants);
#endif
    const double change = allowed(there ? row_largest[row] : Real(0), constants);
    all &= is_finite(bound) && log_of(bound) <= smaller_number(change + column_weight, column_size);
  }
  for (Index c = threadIdx.x; c < (NORMS ? n : K); c += T1) {
#if NORMS
    const double bound = bounds[max(m, n) + c];
#else
    const double last = g[c] * exactly(W[c * (ld + 1)]);
    const double reached = reach(column_floor[c], state[DONE_COLUMNS], double(K), Z[c], last);
    const double bound = factored_bound(reached, double(K), moduli[0], constants);
#endif
    const double change = allowed(column_largest[c], constants);
    all &= is_finite(bound) && log_of(bound) <= smaller_number(change + row_weight, row_size);
  }
  const double blind = sum_over_block<T1>(!all);
  if (threadIdx.x == 0 && blind == 0) verified[SEES_ALL] = 1;
}
