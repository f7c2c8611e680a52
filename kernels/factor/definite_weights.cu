// Weights of the check of a positive definite matrix, which undo its diagonal: w_i = base_i 2^-e, where the root of
// |a_ii| is in [2^(e-1), 2^e). A power of two keeps every bit of base_i. e = 0 where a_ii is 0, NaN or infinite.
//
// Launch   ceil(n / 256) blocks of 256 threads
// Macros   REAL; ENTRY the name of the kernel
// Storage  a_ii = A[i step]; w: double[n]; base: the same, kept three times (tsm2/kept.cuh)
#include "factor/line_verdict.cuh"

extern "C" __global__ void __launch_bounds__(256)
    ENTRY(const Real* __restrict__ A, Index step, const double* __restrict__ base, double* w, Index n) {
  const Index i = Index(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const double root = sqrt(fabs(exactly(A[i * step])));  // never subnormal, and |e| <= 538
  unsigned long long bits;
  memcpy(&bits, &root, sizeof(bits));
  const int biased = int(bits >> 52) & 0x7ff;
  const int e = biased == 0 || biased == 0x7ff ? 0 : biased - 1022;
  w[i] = of_three(base, n, i) * double_of((unsigned long long)(1023 - e) << 52);
}
