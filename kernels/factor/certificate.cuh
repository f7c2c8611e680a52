// What the kernels share that certify finished factors: the counts that they leave, and lines by their place.
#pragma once
#include "factor/line_verdict.cuh"

typedef unsigned long long Count;

// Elements of `verified`, zeros before. A factorisation is certified only if each is the full number: a kernel that did
// not run shows. To those that are the SAME a host may add lines whose own norms explain what guessed ones do not
// (`unchanged` of repair.py).
enum Verified {
  RIGHT_ROWS = 0,         // m: rows of which L y = S
  RIGHT_COLUMNS = 1,      // n: columns of which g U = Z
  SMALL_MULTIPLIERS = 2,  // K: columns of L whose elements are at most 1
  SAME_COLUMNS = 4,       // K: columns of L that give the g that was kept
  SAME_ROWS = 5,          // K: rows of U that give the y that was kept
  RIGHT_PANELS = 6,       // P: panels whose pivots are the exchanges between two snapshots
  SEES_ALL = 7,           // m + n: lines whose sum shows changes of all of their elements
};

// Elements of `constants` behind those of line_verdict.cuh, as certificate_config.py has them.
//   CHANGED_COLUMNS, CHANGED_ROWS   changed_bound of a norm of 1: of sums over m, and over n elements
//   BLIND, LEAST_SIZE               logarithms to base 2: blind_factor; what sizes of lines are not less than
enum { CHANGED_COLUMNS = CONSTANTS, CHANGED_ROWS, BLIND, LEAST_SIZE };

constexpr int FLOOR = 16;  // FLOOR_TERMS of bounds.py, where it is needed without `constants`

// The order that the rows of finished columns are in: that, or, where it is the first of snapshots, one before each
// panel, the one at which `ends` says they have arrived.
INLINE const int* present_order(const int* __restrict__ order, const int* __restrict__ ends, Index m) {
  constexpr Index PANEL = 128;
  return ends ? order + (*ends + PANEL - 1) / PANEL * m : order;
}

// x of the input row that lies at place r; NaN where the order names no row.
INLINE double at_place(const double* __restrict__ x, const int* __restrict__ order, Index r, Index m) {
  const int row = order[r];
  return is_row(row, m) ? x[row] : INFINITE - INFINITE;
}

// What is least over the lines of a side, as least_weights.cu leaves it.
enum Least { WEIGHT, SIZE, LEASTS };

INLINE double log_of(double x) { return log2(fabs(x)); }

// The logarithm of how large a change of an element may be that no sum shows, in a line of A with that largest element.
template <class T>
INLINE double allowed(T largest, Constants constants) {
  return constants[BLIND] + larger(log_of(exactly(largest)), constants[LEAST_SIZE]);
}

// NaN where either is, which fmin does not give.
INLINE double smaller_number(double x, double y) { return x < y ? x : y <= x ? y : x + y; }

// As LineCheck.of has it: NaN, and a bound that overflowed, are never fine.
INLINE bool is_fine(double residual, double bound) { return fabs(residual) <= bound && is_finite(bound); }

// verified[which] += how many threads of this warp bring something that is fine; whole warps call it.
INLINE void count_fine(bool fine, Count* verified, Verified which) {
  unsigned count = fine;
  for (int bit = 16; bit; bit /= 2) count += __shfl_xor_sync(~0u, count, bit);
  if (threadIdx.x % 32 == 0 && count) atomicAdd(verified + which, Count(count));
}
