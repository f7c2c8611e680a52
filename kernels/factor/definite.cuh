// What the kernels share that certify L of a positive definite matrix A = L L'. A triangle lies in a column-major
// matrix X, below its diagonal or above it: what is row-major is its transpose.
//
// Macros   REAL float or double; LOWER 1 for the triangle below the diagonal of X, 0 for that above it
#pragma once
#include "factor/certificate.cuh"
#include "factor/real.cuh"

constexpr int GROUP = 8;  // columns whose sums are added over a warp at the same time

// Adds eight numbers of each lane over the warp: lane l gets the sum of number l / 4. Each of the first three exchanges
// halves what a lane has left to add.
INLINE double sum_of_group(double (&x)[GROUP], int lane) {
#pragma unroll
  for (int half = GROUP / 2; half; half /= 2) {
    const bool upper = lane & 4 * half;
#pragma unroll
    for (int i = 0; i < half; i++) {
      const double given = upper ? x[i] : x[i + half], kept = upper ? x[i + half] : x[i];
      x[i] = kept + __shfl_xor_sync(~0u, given, 4 * half);
    }
  }
  double sum = x[0];
  sum += __shfl_xor_sync(~0u, sum, 2);
  return sum + __shfl_xor_sync(~0u, sum, 1);
}

// *counter += how many threads of this warp bring something that is fine; whole warps call it.
INLINE void count(bool fine, Count* counter) { count_fine(fine, counter, Verified(0)); }

// *counter += 1 for a block that has come to its end.
INLINE void count_block(Count* counter) {
  if (threadIdx.x == 0) atomicAdd(counter, Count(1));
}
