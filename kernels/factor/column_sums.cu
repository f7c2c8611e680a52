// g = w'L of the columns of a step that is finished, and the largest multiplier of each of them:
//
//   g(j+c) = w(order1(j+c)) + sum over r > j+c of w(order1(r)) W(r, j+c)
//   biggest(j+c) = max over r > j+c of |W(r, j+c)|
//
// A block takes COLUMNS columns, so that a weight, which is fetched from a scattered place, serves them all.
//
// Launch   ceil(b / COLUMNS) blocks of T1 threads
// Macros   REAL float or double; T1 threads; COLUMNS of a block; ENTRY the name of the kernel
// Storage  W(r, c) = W[r + c ld], r < m. order1: which row of the input each row of W is, after the step. w by row of
//          the input, g and biggest by column of W; float64. What is NaN is infinite in `biggest`.
#include "factor/line_verdict.cuh"

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(const Real* __restrict__ W, Index ld, Index m, Index j, Index b, const int* __restrict__ order1,
          const double* __restrict__ w, double* g, double* biggest) {
  const Index first = j + Index(blockIdx.x) * COLUMNS;
  const int columns = int(smaller(COLUMNS, j + b - first));
  double sum[COLUMNS], largest[COLUMNS];
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) sum[c] = largest[c] = 0;
#pragma unroll 4
  for (Index r = first + threadIdx.x; r < m; r += T1) {
    const int input = order1[r];
    const double weight = is_row(input, m) ? w[input] : INFINITE - INFINITE;  // NaN
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      // A column that is not there is read elsewhere and counts nothing.
      const double x = exactly(W[r + (first + (c < columns ? c : 0)) * ld]);
      const bool below = r > first + c;
      if (below) sum[c] += weight * x;
      if (r == first + c) sum[c] += weight;
      if (below) largest[c] = fmax(largest[c], nan_is_infinite(fabs(x)));
    }
  }
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    const double of_column = sum_over_block<T1>(sum[c]), of_all = largest_over_block<T1>(largest[c]);
    if (threadIdx.x == 0 && c < columns) {
      g[first + c] = of_column;
      biggest[first + c] = of_all;
    }
  }
}
