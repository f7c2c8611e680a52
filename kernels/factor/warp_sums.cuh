// Sums over a warp of several numbers of each lane at once.
#pragma once
#include "tsm2/index.cuh"

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
