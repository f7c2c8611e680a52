// All exchanges of rows of a step k:k+b as one permutation, in columns c0:c1.
//
// Row r of the step belongs to the input row that the step left at place k + r; so
//
//   X(r, :) = W(places0[order1[k + r]], :)             X is G, or W(k:k+b, :) where there is no G
//   W(places1[order0[k + r]], :) = W(k + r, :)         if that place is below the step: k + b or more
//
// A row whose place is none of W's stays where it is. A thread has a row, and reads it in all columns of the block
// before any of them is written.
//
// Launch   ceil((c1 - c0) / 8) blocks of b threads, rounded up to a multiple of 32; b <= 512
// Macros   REAL; ENTRY the name of the kernel
// Storage  W(i, j) = W[i + j ld]; G(r, c - c0) = G[r + (c - c0) ldg], or 0; order0, places0: int32[m] before the step,
//          order1, places1 after it
#include "factor/real.cuh"
#include "factor/rows.cuh"

constexpr int COLUMNS = 8;

extern "C" __global__ void __launch_bounds__(512)
    ENTRY(Real* W, Index ld, Index k, Index b, Index c0, Index c1, const int* order0, const int* places0,
          const int* order1, const int* places1, Real* G, Index ldg) {
  const Index row = threadIdx.x, column = c0 + Index(blockIdx.x) * COLUMNS;
  const int count = row < b ? int(smaller(COLUMNS, c1 - column)) : 0;
  Index source = 0, target = 0;
  if (row < b) {
    source = place_of(places0, order1[k + row], ld, k + row);
    target = place_of(places1, order0[k + row], ld, k + row);
  }
  const bool leaves = target >= k + b;
  Real* at = W + column * ld;
  Real* to = G ? G + (column - c0) * ldg + row : at + k + row;
  const Index apart = G ? ldg : ld;
  Real comes[COLUMNS], goes[COLUMNS];
#pragma unroll
  for (int i = 0; i < COLUMNS; i++) {
    if (i < count) comes[i] = at[source + i * ld];
    if (i < count && leaves) goes[i] = at[k + row + i * ld];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < COLUMNS; i++) {
    if (i < count && leaves) at[target + i * ld] = goes[i];
    if (i < count) to[i * apart] = comes[i];
  }
}
