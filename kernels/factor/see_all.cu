// Counts the lines of finished factors whose sum shows changes of all of their elements, SEES_ALL (`sees_all` of
// lu_checks.py, with the largest element of each line of A in place of an estimated size):
//
//   allowed(line)   how large a change of an element may be that no sum shows: blind_factor max(largest, least size)
//   row r           bound(r) <= |v(j)| min(allowed(r), allowed(j)) for every column j; columns likewise, by |w|
//
// where the bounds are those of the certificate, as judge_factors.cu leaves them. All by logarithms to base 2, which no
// scale takes out of the range.
//
// Launch   (ceil(max(m, n) / T1), 2) blocks of T1 threads: y = 0 rows, y = 1 columns
// Macros   REAL float or double, of row_largest and column_largest; T1 threads; ENTRY the name of the kernel
// Storage  row_largest (of A) by input row; least as least_weights.cu leaves it; the bound of row r at [r], of column c at
//          [max(m, n) + c]
#include "factor/certificate.cuh"
#include "factor/real.cuh"

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(const int* __restrict__ order, const Real* __restrict__ row_largest, const Real* __restrict__ column_largest,
          const double* __restrict__ least, Index m, Index n, const double* __restrict__ tolerances,
          const double* __restrict__ bounds, Count* verified) {
  const Constants constants = {tolerances};
  const bool of_rows = blockIdx.y == 0;
  const Index line = Index(blockIdx.x) * T1 + threadIdx.x;
  const double* others = least + (of_rows ? LEASTS : 0);
  bool sees = false;
  if (line < (of_rows ? m : n)) {
    const double bound = bounds[line + (of_rows ? 0 : max(m, n))];
    const Index at = of_rows ? order[line] : line;
    const bool there = !of_rows || is_row(int(at), m);
    const double change = allowed(there ? (of_rows ? row_largest : column_largest)[at] : Real(0), constants);
    sees = there && is_finite(bound) && log_of(bound) <= smaller_number(change + others[WEIGHT], others[SIZE]);
  }
  count_fine(sees, verified, SEES_ALL);
}
