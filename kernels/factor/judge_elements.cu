// Judges, element by element, what should be nothing but rounding: R = T - L U, of p rows and the columns c0 + c of a
// step J = j:j+b, where T follows from A and the factors above (compared_rounding of rigorous.py, for all rows of a
// column: no multiplier is larger than 1).
//
//   |R(i, c)| <= spread (max |A(:, c)| + 2 sum |U(:j+b, c)|) + lost, which has to be finite
//
// What step J has left of a column counts if all of it is finite. What underflow takes from a quotient is lost in its
// pivot's share of the sum.
//
// Launch   as many blocks of T1 threads as there are columns
// Macros   REAL; T1 threads; ENTRY the name of the kernel
// Storage  R(i, c) = R[i + c ldr]; W(r, c) = W[r + c ld]; column_largest: moduli, of REAL; found: evidence.cuh, flags of
//          rows from `first` on and of columns from m + c0 on
#include "factor/evidence.cuh"

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(const Real* __restrict__ R, Index ldr, Index p, const Real* __restrict__ W, Index ld, Index m, Index j,
          Index b, Index c0, Index first, const Real* __restrict__ column_largest, double spread, double lost,
          Count* found) {
  const Index column = c0 + blockIdx.x;
  const Real* above = W + column * ld;
  const double before = sum_of_moduli<T1>(above, j);
  const double now = sum_of_moduli<T1>(above + j, smaller(b, column + 1 - j));  // rows of U in J
  const double of_U = before + (is_finite(now) ? now : 0);
  const double bound = spread * (exactly(column_largest[column]) + 2 * of_U) + lost;
  unsigned char* flags = reinterpret_cast<unsigned char*>(found + FOUND);
  double farthest = 0;
  int wrong = 0;
  for (Index i = threadIdx.x; i < p; i += T1) {
    const double distance = fabs(exactly(R[i + Index(blockIdx.x) * ldr]));
    if (distance <= bound && is_finite(bound)) continue;
    wrong++;
    farthest = fmax(farthest, nan_is_infinite(distance));
    flags[first + i] = 1;
  }
  const double count = sum_over_block<T1>(double(wrong)), most_off = largest_over_block<T1>(farthest);
  if (threadIdx.x > 0) return;
  if (!is_finite(bound)) atomicAdd(found + UNBOUNDED, Count(1));
  if (count == 0) return;
  flags[m + column] = 1;
  atomicAdd(found + WRONG, Count(count));
  Count bits;
  memcpy(&bits, &most_off, sizeof(bits));
  atomicMax(found + FARTHEST, bits);  // of numbers that are not negative, bits are in their order
}
