// What the kernels share that compare a step with A element by element.
#pragma once
#include "factor/line_verdict.cuh"

typedef unsigned long long Count;

// Elements of `found`, zeros before: elements that are wrong, columns of which no bound is known, multipliers beyond
// what partial pivoting allows, and the bits of the largest distance, infinite where one is NaN. Behind them flags, a
// byte each: of the m rows and then of the n columns in which elements are wrong.
enum Found { WRONG, UNBOUNDED, LARGE_MULTIPLIERS, FARTHEST, FOUND };

// The largest modulus among X(0:rows), and their squares added up in units of `scale`, over a block; to all threads.
template <int THREADS>
INLINE double largest_of_column(const Real* __restrict__ X, Index rows, double scale, double& squares) {
  double largest = 0, sum = 0;
  for (Index i = threadIdx.x; i < rows; i += THREADS) {
    const double x = exactly(X[i]), scaled = x / scale;
    largest = fmax(largest, nan_is_infinite(fabs(x)));
    sum += scaled * scaled;
  }
  squares = sum_over_block<THREADS>(sum);
  return largest_over_block<THREADS>(largest);
}
