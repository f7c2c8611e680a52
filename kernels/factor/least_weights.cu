// Of the lines of each side the least |weight|, and the least weight and allowed change of an element together, which
// see_all.cu compares bounds with; logarithms to base 2. NaN is the least.
//
//   WEIGHT   min log |x(i)|
//   SIZE     min log |x(i)| + allowed(i)
//
// Launch   1 block of T1 threads
// Macros   REAL float or double, of row_largest and column_largest; T1 threads; ENTRY the name of the kernel
// Storage  w and row_largest (of A) by input row, v and column_largest by column; least: LEASTS of rows, then of columns
#include "factor/certificate.cuh"
#include "factor/real.cuh"

INLINE double least_over_block(double x) { return -largest_over_block<T1>(nan_is_infinite(-x)); }

INLINE void least_of(const double* __restrict__ weights, const Real* __restrict__ largest, Index lines,
                     Constants constants, double* least) {
  double weight = INFINITE, size = INFINITE;
  for (Index i = threadIdx.x; i < lines; i += T1) {
    const double own = log_of(weights[i]);
    weight = smaller_number(weight, own);
    size = smaller_number(size, own + allowed(largest[i], constants));
  }
  weight = least_over_block(weight);
  size = least_over_block(size);
  if (threadIdx.x > 0) return;
  least[WEIGHT] = weight;
  least[SIZE] = size;
}

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(const double* __restrict__ w, const double* __restrict__ v, const Real* __restrict__ row_largest,
          const Real* __restrict__ column_largest, Index m, Index n, const double* __restrict__ tolerances,
          double* least) {
  const Constants constants = {tolerances};
  least_of(w, row_largest, m, constants, least);
  least_of(v, column_largest, n, constants, least + LEASTS);
}
