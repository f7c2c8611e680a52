// Finds columns in which rows j:e of U are so large that an update with them has cost what was there its digits:
//
//   flags[c] = not max |W(j:e, c0 + c)| <= most max(|A(:, c0 + c)|, |W(:j, c0 + c)|)
//
// where NaN in W counts as infinite.
//
// Launch   as many blocks of T1 threads as there are columns
// Macros   REAL; T1 threads; ENTRY the name of the kernel
// Storage  W(r, c) = W[r + c ld]; column_largest: moduli, of REAL; flags: a byte for each column
#include "factor/evidence.cuh"

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(const Real* __restrict__ W, Index ld, Index j, Index e, Index c0, const Real* __restrict__ column_largest,
          double most, unsigned char* flags) {
  const Index column = c0 + blockIdx.x;
  const double of_A = exactly(column_largest[column]);
  const double before = largest_of_column<T1>(W + column * ld, j);
  const double made = largest_of_column<T1>(W + j + column * ld, e - j);
  if (threadIdx.x == 0) flags[blockIdx.x] = !(made <= most * larger(of_A, before));
}
