// Sums of what blocks have left behind, always in the same order: out[i] = parts[i] + parts[count + i] + ...
//
// The warps of a block share the parts of 32 sums, and add theirs in shared memory. Four arrays of sums at once,
// blockIdx.y says which; one of a single part is where it belongs already.
//
// Launch   (ceil(largest count / 32), 4 with WORDS, else 2) blocks of T1 threads
// Macros   ACC float or double, of y = 0 and 1 (2 and 3 are 64-bit integers); T1 threads; WORDS 0 or 1; ENTRY the name
#include "tsm2/index.cuh"

typedef unsigned long long Bits;

constexpr int WARPS = T1 / 32;

template <class T>
INLINE void add(T* out, const T* parts, Index number, Index count) {
  __shared__ T exchange[WARPS * 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index i = Index(blockIdx.x) * 32 + lane;
  if (number < 2) return;
  T sum = T(0);
  if (i < count)
#pragma unroll 8
    for (Index p = warp; p < number; p += WARPS) sum += __ldcg(parts + p * count + i);
  exchange[threadIdx.x] = sum;
  __syncthreads();
  if (warp > 0 || i >= count) return;
#pragma unroll
  for (int w = 1; w < WARPS; w++) sum += exchange[w * 32 + lane];
  out[i] = sum;
}

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(Index row_number, Index row_count, const ACC* row_parts, ACC* rows, Index column_number, Index column_count,
          const ACC* column_parts, ACC* columns, Index m, const Bits* row_word_parts, Bits* row_words, Index k,
          const Bits* column_word_parts, Bits* column_words) {
  if (blockIdx.y == 0) add(rows, row_parts, row_number, row_count);
  if (blockIdx.y == 1) add(columns, column_parts, column_number, column_count);
#if WORDS
  if (blockIdx.y == 2) add(row_words, row_word_parts, row_number, m);
  if (blockIdx.y == 3) add(column_words, column_word_parts, column_number, k);
#endif
}
