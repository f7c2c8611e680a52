// Whether the rows of a matrix have the words that they had: sums of eight bytes each, modulo 2^64, a warp for each row.
//
// Launch   ceil(rows / (T1 / 32)) blocks of T1 threads
// Macros   T1 threads; ENTRY the name of the kernel
// Storage  word j of row i at words[i length + j]; sums: one for each row; differ: one byte, 1 where a row has others
#include "tsm2/index.cuh"

typedef unsigned long long Bits;

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(Index rows, Index length, const Bits* __restrict__ words, const Bits* __restrict__ sums, bool* differ) {
  const Index i = Index(blockIdx.x) * (T1 / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (i >= rows) return;
  const Bits* row = words + i * length;
  Bits sum = 0;
#pragma unroll 16
  for (Index j = lane; j < length; j += 32) sum += __ldcs(row + j);
#pragma unroll
  for (int away = 16; away > 0; away /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, away);
  if (lane == 0 && sum != sums[i]) *differ = true;
}
