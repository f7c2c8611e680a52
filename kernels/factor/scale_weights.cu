// Weights of a check that fit the sizes of its lines: w_i = base_i 2^-e, e the exponent of the line's largest modulus,
// which is in [2^(e-1), 2^e). A power of two keeps every bit of base_i. e = 0 for lines that are 0 or hold NaN or
// infinity.
//
// e is kept within 1000 of 0, so that no weight becomes 0 or infinite.
//
// Launch   ceil(max(m, n) / 256) blocks of 256 threads
// Macros   REAL; ENTRY the name of the kernel
// Storage  row_max, column_max: bits of moduli as measure.cu leaves them; w: double[m], v: double[n]; base_w and base_v: the
//          same, kept three times (tsm2/kept.cuh)
#include "factor/real.cuh"
#include "tsm2/kept.cuh"

constexpr int DIGITS = sizeof(Real) == 4 ? 23 : 52;      // stored ones of the significand
constexpr int LOWEST = sizeof(Real) == 4 ? -125 : -1021;  // e of the smallest normal number, as of all frexp
constexpr int BEYOND = sizeof(Real) == 4 ? 0xff : 0x7ff;  // the biased exponent of infinity and NaN
constexpr int FAR = 1000;

INLINE int exponent(Word bits) {
  const int biased = int(bits >> DIGITS);
  if (bits == 0 || biased == BEYOND) return 0;
  int e = LOWEST - 1 + biased;
  if (biased == 0)  // subnormal: the first digit that is not 0 says how small
    for (e = LOWEST - DIGITS; bits > 1; bits >>= 1) e++;
  return min(FAR, max(-FAR, e));
}

// 2^e for |e| <= FAR
INLINE double power(int e) {
  const unsigned long long bits = (unsigned long long)(1023 + e) << 52;
  double x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

extern "C" __global__ void __launch_bounds__(256)
    ENTRY(const Word* row_max, const double* base_w, double* w, Index m, const Word* column_max, const double* base_v,
          double* v, Index n) {
  const Index i = Index(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < m) w[i] = of_three(base_w, m, i) * power(-exponent(row_max[i]));
  if (i < n) v[i] = of_three(base_v, n, i) * power(-exponent(column_max[i]));
}
