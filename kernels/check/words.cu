// Sums of the words of a matrix by rows and by columns, and whether they are those that it had: eight bytes each, modulo
// 2^64, so that the order of additions is of no consequence. The rows are as long as the caller says: those of the
// matrix, or others, across which words of its diagonals are added.
//
//   sums(i)        = sum over j of words(i, j)         rows = ceil(size / length), of which the last may be shorter
//   sums(rows + j) = sum over i of words(i, j)
//
// A warp takes ROWS rows and STEPS x 32 columns: what a lane has read counts for its column at once, and for the rows at
// the end. The last block compares.
//
// Launch   ceil(length / (T1 STEPS)) ceil(size / (length ROWS)) blocks of T1 threads
// Macros   T1 threads; ROWS and STEPS of a warp, ROWS at most 32; COMPARE whether there are sums to compare with;
//          ENTRY the name of the kernel
// Storage  word j of row i at words[i length + j]. sums[0:rows + length], then two more: the blocks that are done, and 1
//          where a row or column has another sum; all 0 before. Rows are not compared where of_rows is null.
#include "tsm2/index.cuh"

typedef unsigned long long Bits;

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(Index size, Index length, const Bits* __restrict__ words, const Bits* __restrict__ of_rows,
          const Bits* __restrict__ of_columns, Bits* sums) {
  const Index rows = (size + length - 1) / length;
  const Index across = (length + T1 * STEPS - 1) / (T1 * STEPS);
  const Index first = blockIdx.x / across * ROWS, left = blockIdx.x % across * (T1 * STEPS);
  const int lane = threadIdx.x % 32;
  Bits row[ROWS];
#pragma unroll
  for (int q = 0; q < ROWS; q++) row[q] = 0;
  for (int step = 0; step < STEPS; step++) {
    const Index j = left + step * T1 + threadIdx.x;
    Bits column = 0;
#pragma unroll
    for (int q = 0; q < ROWS; q++) {
      const Index at = (first + q) * length + j;
      const Bits word = j < length && at < size ? __ldcs(words + at) : 0;
      row[q] += word;
      column += word;
    }
    if (j < length) atomicAdd(sums + rows + j, column);
  }
  Bits mine = 0;
#pragma unroll
  for (int q = 0; q < ROWS; q++) {
#pragma unroll
    for (int away = 16; away > 0; away /= 2) row[q] += __shfl_xor_sync(0xffffffffu, row[q], away);
    if (q == lane) mine = row[q];
  }
  if (lane < ROWS && first + lane < rows) atomicAdd(sums + first + lane, mine);
#if COMPARE
  __shared__ bool last[1];
  __threadfence();
  __syncthreads();
  Bits* done = sums + rows + length;
  if (threadIdx.x == 0) last[0] = atomicAdd(done, 1ull) == gridDim.x - 1;
  __syncthreads();
  if (!last[0]) return;
  __threadfence();
  for (Index i = threadIdx.x + (of_rows == nullptr ? rows : 0); i < rows + length; i += T1)
    if (__ldcg(sums + i) != (i < rows ? of_rows[i] : of_columns[i - rows])) done[1] = 1;
#endif
}
