// What the kernels share that compare a step with A element by element.
#pragma once
#include "factor/line_verdict.cuh"

typedef unsigned long long Count;

// Elements of `found`, zeros before: elements that are wrong, columns of which no bound is known, multipliers beyond
// what partial pivoting allows, and the bits of the largest distance, infinite where one is NaN. Behind them flags, a
// byte each: of the m rows and then of the n columns in which elements are wrong.
enum Found { WRONG, UNBOUNDED, LARGE_MULTIPLIERS, FARTHEST, FOUND };

// The sum of |X(0:rows)| over a block, to all threads.
template <int THREADS>
INLINE double sum_of_moduli(const Real* __restrict__ X, Index rows) {
  double sum = 0;
  for (Index i = threadIdx.x; i < rows; i += THREADS) sum += fabs(exactly(X[i]));
  return sum_over_block<THREADS>(sum);
}

// The largest modulus among X(0:rows) over a block, to all threads; infinite where one is NaN.
template <int THREADS>
INLINE double largest_of_column(const Real* __restrict__ X, Index rows) {
  double largest = 0;
  for (Index i = threadIdx.x; i < rows; i += THREADS) largest = fmax(largest, nan_is_infinite(fabs(exactly(X[i]))));
  return largest_over_block<THREADS>(largest);
}
