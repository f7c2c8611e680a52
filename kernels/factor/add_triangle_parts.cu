// Adds what the tiles of triangle_sums.cu have left of the sum of each line, always in the same order: of columns, of
// rows or of both; and those of squares.
//
// The warps of a block share the parts of 32 lines, and add theirs in shared memory.
//
// Launch   (ceil(n / 32), 1) blocks of T1 threads; with squares (ceil(n / 32), 2)
// Macros   REAL, LOWER any; T1 threads; ENTRY the name of the kernel
// Storage  parts as triangle_sums.cu leaves them; tile_rows is 0 where there are none of columns, tile_columns 0 where
//          there are none of rows. sums: n, those of squares behind them
#include "factor/definite.cuh"

constexpr int WARPS = T1 / 32;

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(const double* __restrict__ column_parts, const double* __restrict__ row_parts, Index tile_rows,
          Index tile_columns, Index n, double* sums) {
  __shared__ double totals[WARPS * 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index line = Index(blockIdx.x) * 32 + lane, side = blockIdx.y;
  double total = 0;
  if (line < n) {
#pragma unroll 4
    for (Index p = warp; p < tile_rows; p += WARPS) total += column_parts[(side * tile_rows + p) * n + line];
#pragma unroll 4
    for (Index p = warp; p < tile_columns; p += WARPS) total += row_parts[(side * tile_columns + p) * n + line];
  }
  totals[threadIdx.x] = total;
  __syncthreads();
  if (warp == 0 && line < n) {
#pragma unroll
    for (int other = 1; other < WARPS; other++) total += totals[other * 32 + lane];
    sums[side * n + line] = total;
  }
}
