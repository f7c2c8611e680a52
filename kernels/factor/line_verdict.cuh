// What judges the lines of a factorisation, in float64 whatever the matrix holds: growth, reach and bound of a line's
// checksum, and the verdict on all lines of a step. The formulas are those of abft_tsm2/linalg/lu_checks.py and
// line_check.py; bounds.py has the tolerances and their sources, and abft_tsm2/linalg/device/check_config.py puts them into
// `constants`. Sums and maxima of a block are taken in a fixed order: the same bits in every run.
//
// Macros   REAL float or double: the elements of the matrix
#pragma once
#include "factor/rows.cuh"
#include "tsm2/exact.cuh"
#include "tsm2/kept.cuh"

typedef REAL Real;

// Elements of `constants`, in the order of CONSTANTS in check_config.py, whose ROOM is as here.
//   ROUNDING          f u of factored_bound
//   UNDERFLOW         smallest subnormal
//   FLOOR_TERMS       operations that every element is granted
//   SHARE, SUMMED     SUM_SHARE (u of float64 / u)^2; operations that count as one sum
//   USUAL, LEAST      of relative_to_median
//   CHI_SQUARED, SMALLEST   of growth
//   MULTIPLIER        largest_multiplier
enum Constant {
  ROUNDING, UNDERFLOW, FLOOR_TERMS, SHARE, SUMMED, USUAL, LEAST, CHI_SQUARED, SMALLEST, MULTIPLIER, CONSTANTS
};

// They outlive a call: ROOM numbers, the first of which are given, kept three times.
constexpr int ROOM = 16;
struct Constants {
  const double* kept;
  INLINE double operator[](int i) const { return of_three(kept, ROOM, i); }
};

// Elements of `state`: how much what is left has grown, and the operations so far on every row and every column.
enum { GROWTH, DONE_ROWS, DONE_COLUMNS };

constexpr int ROWS_SIDE = 0, COLUMNS_SIDE = 1;

constexpr int MOST_RATIOS = 128;  // lines of a step that its growth is taken of

constexpr double LARGEST = 0x1.fffffffffffffp1023;
INLINE double double_of(unsigned long long bits) {
  double x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}
#define INFINITE double_of(0x7ffull << 52)  // an expression that overflows makes NVRTC complain
INLINE bool is_finite(double x) { return fabs(x) <= LARGEST; }

// NaN, with which no comparison holds, as what it should be taken for where a largest number is sought.
INLINE double nan_is_infinite(double x) { return x == x ? x : INFINITE; }

// NaN where either is, which fmax does not give.
INLINE double larger(double x, double y) { return x > y ? x : y >= x ? y : x + y; }

// ---- over the threads of a block, all of which get the result -------------------------------------------------------

template <int THREADS>
INLINE double sum_over_block(double x) {
  __shared__ double sums_of_warps[THREADS / 32];
  for (int bit = 16; bit; bit /= 2) x += __shfl_xor_sync(~0u, x, bit);
  if (threadIdx.x % 32 == 0) sums_of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int warp = 0; warp < THREADS / 32; warp++) x += sums_of_warps[warp];
  __syncthreads();  // the next call writes
  return x;
}

// Of numbers that are not NaN.
template <int THREADS>
INLINE double largest_over_block(double x) {
  __shared__ double largest_of_warps[THREADS / 32];
  for (int bit = 16; bit; bit /= 2) x = fmax(x, __shfl_xor_sync(~0u, x, bit));
  if (threadIdx.x % 32 == 0) largest_of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = largest_of_warps[0];
  for (int warp = 1; warp < THREADS / 32; warp++) x = fmax(x, largest_of_warps[warp]);
  __syncthreads();
  return x;
}

// ---- growth ---------------------------------------------------------------------------------------------------------

// Of `lines` lines every so many count, as in line_check.growth: at most MOST_RATIOS.
INLINE int growth_stride(int lines) { return lines / 128 + 1; }
INLINE int growth_count(int lines) { return (lines + growth_stride(lines) - 1) / growth_stride(lines); }

INLINE double growth_ratio(double floor, double sum, Constants constants) {
  return nan_is_infinite(fabs(sum) / (floor + constants[SMALLEST]));
}

// Whether ratios[i] is the one that stands in the middle, at count / 2, when all are sorted; it is for one i.
INLINE bool is_middle(const double* ratios, int count, int i) {
  const double own = ratios[i];
  int before = 0;
#pragma unroll 8
  for (int k = 0; k < count; k++) {
    const double other = ratios[k];
    before += other < own || (other == own && k < i);
  }
  return before == count / 2;
}

constexpr double GROWN = 1e145;  // of line_check.py

INLINE double growth_of(double middle, Constants constants) {
  const double usual = middle > GROWN && is_finite(middle) ? GROWN : middle;
  return usual * usual / constants[CHI_SQUARED];
}

// ---- bounds ---------------------------------------------------------------------------------------------------------

// Roundings that `count` operations on a line of `length` elements leave in its residual (bounds.operations).
INLINE double operations(double count, double length, Constants constants) {
  const double sums = count > 0 ? larger(1, count / constants[SUMMED]) : 0;
  return count + sums * length * constants[SHARE];
}

// How far operations may have taken the residual of a line (LuChecksums.reach).
//   floor         its norm in A
//   done          operations on every line of its side so far, and those since, weighted with growth
//   terms         of them, during which it was as large as its own sums say
//   first, last   its sums at the beginning of the step and when it was finished
INLINE double reach(double floor, double done, double terms, double first, double last) {
  return floor * sqrt(done) + sqrt(terms) * larger(fabs(first), fabs(last));
}

// The bound of a residual (bounds.factored_bound). weight: the sum of the weights' moduli
INLINE double factored_bound(double reached, double terms, double weight, Constants constants) {
  return constants[ROUNDING] * reached + (terms + constants[FLOOR_TERMS]) * constants[UNDERFLOW] * weight;
}

// ---- verdicts -------------------------------------------------------------------------------------------------------

// residual / bound; infinite where either is not a finite number, which is never fine.
INLINE double ratio_to_bound(double residual, double bound) {
  return is_finite(bound) ? nan_is_infinite(fabs(residual) / bound) : INFINITE;
}

// Whether `lines` lines, one of each of the first threads, are all fine as LineCheck.relative_to_median has it: no
// ratio is beyond min(1, max(LEAST, USUAL median)). Of the median only that is asked whether USUAL times it is less
// than the largest ratio: it is if that is true of more than half of them, which counting tells without sorting.
template <int THREADS>
INLINE bool all_fine(double ratio, int lines, Constants constants) {
  const bool there = int(threadIdx.x) < lines;
  const double largest = largest_over_block<THREADS>(there ? ratio : 0);
  const double lower = sum_over_block<THREADS>(there && constants[USUAL] * ratio < largest);
  return largest <= constants[LEAST] || (largest <= 1 && lower < lines / 2 + 1);
}
