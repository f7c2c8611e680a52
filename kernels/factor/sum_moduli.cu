// moduli[0] = sum |w|, moduli[1] = sum |v|: what bounds of underflow are multiplied with.
//
// Launch   one block of T1 threads
// Macros   REAL float or double, not used; T1 threads; ENTRY the name of the kernel
// Storage  w has m elements, v has n; all float64
#include "factor/line_verdict.cuh"

INLINE double sum_of_moduli(const double* __restrict__ x, Index count) {
  double sum = 0;
#pragma unroll 8
  for (Index i = threadIdx.x; i < count; i += T1) sum += fabs(x[i]);
  return sum_over_block<T1>(sum);
}

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(const double* w, Index m, const double* v, Index n, double* moduli) {
  const double of_rows = sum_of_moduli(w, m), of_columns = sum_of_moduli(v, n);
  if (threadIdx.x > 0) return;
  moduli[0] = of_rows;
  moduli[1] = of_columns;
}
