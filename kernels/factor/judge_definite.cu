// Judges a finished factor L of a positive definite matrix line by line (`CholeskyChecksums.certificate`):
//
//   |(L g)(c) - Z(c)| <= f u walk size(c) + underflow sum |w|,  size = max(||A_c o w||, |Z(c)|),  g = w'L, Z = A w
//
// with ||A_c o w|| of all elements. A line that is beyond its bound gets f u norm in addition, norm^2 = sum over k of (k
// + FLOOR_TERMS) (L(c, k) g(k))^2 (`factored_element` of bounds.py: the squared sizes of all that remained of the line),
// and is judged once more: what was subtracted and cancelled may be larger than A.
//
// Counted are lines that are fine, and diagonal elements of L that are positive: L L' does not tell a column's sign.
//
// Launch   ceil(n / T1) blocks of T1 threads
// Macros   REAL; LOWER any; T1 threads; ENTRY the name of the kernel
// Storage  Lg and Z: sums, and the squares of add_triangle_parts.cu from n on. L(i, i) = L[i (ld + 1)]. modulus: sum |w|.
//          rounding: f u; underflow: of an element
#include "factor/definite.cuh"

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(const double* __restrict__ Lg, const double* __restrict__ Z, const Real* __restrict__ L, Index ld, Index n,
          const double* __restrict__ modulus, double rounding, double walk, double underflow, double* residuals,
          double* bounds, Count* right, Count* positive) {
  const Index i = Index(blockIdx.x) * T1 + threadIdx.x;
  bool fine = false, above_zero = false;
  if (i < n) {
    const double residual = Lg[i] - Z[i];
    double bound = rounding * walk * larger(sqrt(Z[n + i]), fabs(Z[i])) + underflow * modulus[0];
    if (!is_fine(residual, bound)) bound += rounding * sqrt(Lg[n + i]);
    residuals[i] = residual;
    bounds[i] = bound;
    fine = is_fine(residual, bound);
    above_zero = exactly(L[i * (ld + 1)]) > 0;
  }
  count(fine, right);
  count(above_zero, positive);
}
