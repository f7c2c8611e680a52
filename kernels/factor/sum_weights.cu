// Weights that right-hand sides are added up with, so that none of them vanishes beside the others (summing_weights of
// triangular.py): t(c) = base(c) 2^-e(c), and moduli = sum of |t|.
//
//   e(c) = rint(l(c) - (middle - rint(middle))), within LOWEST and HIGHEST
//
// l being the logarithms to base 2 of the columns' largest moduli, and middle the median of those that are numbers;
// columns of zeros, or with NaN or infinity, have the smallest of the others (exponents of checksum/encode.py).
//
// Launch   1 block of T1 threads
// Macros   REAL float or double, of largest; T1 threads; ENTRY the name of the kernel
// Storage  largest: bits of moduli as measure.cu leaves them; logs (scratch), t: double[count]; base: the same, kept three
//          times (tsm2/kept.cuh); moduli: double[1]
#include "factor/real.cuh"
#include "factor/solution.cuh"
#include "tsm2/kept.cuh"

constexpr double LOWEST = -1000, HIGHEST = 1020;

// 2^e of a whole number whose power is normal
INLINE double power(double e) { return double_of((unsigned long long)(1023 + int(e)) << 52); }

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(const Word* __restrict__ largest, const double* __restrict__ base, Index count, double* logs, double* t,
          double* moduli) {
  __shared__ double around[2];  // those on either side of the middle
  double positive = 0, least = INFINITE;
  for (Index c = threadIdx.x; c < count; c += T1) {
    const double size = exactly(real_of(largest[c])), log_of_size = size > 0 ? log2(size) : INFINITE;
    logs[c] = log_of_size;
    if (is_finite(log_of_size)) {
      positive += 1;
      least = fmin(least, log_of_size);
    }
  }
  const Index number = Index(sum_over_block<T1>(positive));
  least = -largest_over_block<T1>(-least);  // of nothing: infinite
  if (threadIdx.x < 2) around[threadIdx.x] = 0;
  __syncthreads();  // logs as well are there
  for (Index c = threadIdx.x; c < count; c += T1) {
    const double own = logs[c];
    if (!is_finite(own)) continue;
    Index before = 0;
    for (Index k = 0; k < count; k++) {
      const double other = logs[k];
      before += other < own || (other == own && k < c);
    }
    if (before == (number - 1) / 2) around[0] = own;
    if (before == number / 2) around[1] = own;
  }
  __syncthreads();
  const double middle = (around[0] + around[1]) / 2, shift = middle - rint(middle);
  double sum = 0;
#pragma unroll 1
  for (Index c = threadIdx.x; c < count; c += T1) {
    const double own = is_finite(logs[c]) ? logs[c] : least;
    const double e = number == 0 ? 0 : fmin(HIGHEST, fmax(LOWEST, rint(own - shift)));
    const double weight = of_three(base, count, c) * power(-e);
    t[c] = weight;
    sum += fabs(weight);
  }
  sum = sum_over_block<T1>(sum);
  if (threadIdx.x == 0) *moduli = sum;
}
