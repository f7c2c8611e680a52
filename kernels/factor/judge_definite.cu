// Judges a finished factor L of a positive definite matrix line by line (`CholeskyChecksums.certificate`):
//
//   |(L g)(c) - Z(c)| <= f u walk size(c) + underflow sum |w|,  g = w'L, Z = A w
//
// with size(c) = max(||A_c o w||, |Z(c)|) of all elements. A line that is beyond its bound gets f u norm in addition,
// norm^2 = sum over k of (k + FLOOR_TERMS) (L(c, k) g(k))^2 (`factored_element` of bounds.py: the squared sizes of all
// that remained of the line), and is judged once more: what was subtracted and cancelled may be larger than A.
//
// Counted are lines that are fine, and diagonal elements of L that are positive: L L' does not tell a column's sign.
//
// Launch   ceil(n / T1) blocks of T1 threads
// Macros   REAL; LOWER any; T1 threads; ENTRY the name of the kernel
// Storage  Lg: sums, and the squares of add_triangle_parts.cu from n on. sizes, summary: as definite_sizes.cu leaves
//          them. L(i, i) = L[i (ld + 1)]. rounding: f u; underflow: of an element. *closest: the largest |residual| /
//          bound of lines that are fine, as a float in the upper half, and the complement of the line in the lower
#include "factor/definite.cuh"

INLINE Count key(float ratio, Index line) {
  unsigned bits;
  memcpy(&bits, &ratio, sizeof(bits));
  return Count(bits) << 32 | ~unsigned(line);
}

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(const double* __restrict__ Lg, const double* __restrict__ Z, const double* __restrict__ sizes,
          const Real* __restrict__ L, Index ld, Index n, const double* __restrict__ summary, double rounding,
          double walk, double underflow, double* residuals, double* bounds, Count* right, Count* positive,
          Count* closest) {
  const Index i = Index(blockIdx.x) * T1 + threadIdx.x;
  bool fine = false, above_zero = false;
  Count close = 0;
  if (i < n) {
    const double residual = Lg[i] - Z[i];
    double bound = rounding * walk * sizes[i] + underflow * summary[0];
    if (!is_fine(residual, bound)) bound += rounding * sqrt(Lg[n + i]);
    residuals[i] = residual;
    bounds[i] = bound;
    fine = is_fine(residual, bound);
    if (fine) close = key(bound > 0 ? float(fabs(residual) / bound) : 0.0f, i);
    above_zero = exactly(L[i * (ld + 1)]) > 0;
  }
  count(fine, right);
  count(above_zero, positive);
  for (int bit = 16; bit; bit /= 2) {
    const Count other = __shfl_xor_sync(~0u, close, bit);
    close = close > other ? close : other;
  }
  if (threadIdx.x % 32 == 0 && close) atomicMax(closest, close);
}
