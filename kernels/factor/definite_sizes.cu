// Sizes of the lines of a positive definite matrix, which bounds start from, and what is said of all of them:
//
//   sizes(c) = max(||A_c o w||, |Z(c)|)
//   summary  = sum |w|, min |w|, and the size that is number n / 2, from 0, when all are sorted
//
// The middle one is built bit by bit from the highest: numbers that are not negative are ordered as their bits are, NaN
// behind all others.
//
// Launch   one block of T1 threads
// Macros   REAL, LOWER any; T1 threads; ENTRY the name of the kernel
// Storage  Z: sums, and squares from n on; all float64
#include "factor/definite.cuh"

INLINE unsigned long long bits_of(double x) {
  unsigned long long bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(const double* __restrict__ Z, const double* __restrict__ w, Index n, double* sizes, double* summary) {
  double modulus = 0, least = INFINITE;
  for (Index i = threadIdx.x; i < n; i += T1) {
    sizes[i] = larger(sqrt(Z[n + i]), fabs(Z[i]));
    modulus += fabs(w[i]);
    least = fmin(least, fabs(w[i]));
  }
  modulus = sum_over_block<T1>(modulus);
  least = -largest_over_block<T1>(-least);

  // A thread reads what it has written itself.
  unsigned long long middle = 0;
  for (int bit = 62; bit >= 0; bit--) {
    const unsigned long long candidate = middle | 1ull << bit;
    double below = 0;
    for (Index i = threadIdx.x; i < n; i += T1) below += bits_of(fabs(sizes[i])) < candidate;
    if (sum_over_block<T1>(below) <= double(n / 2)) middle = candidate;
  }
  if (threadIdx.x > 0) return;
  summary[0] = modulus;
  summary[1] = least;
  summary[2] = double_of(middle);
}
