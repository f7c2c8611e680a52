// Rows of a matrix, in any order, into rows of another one:
//
//   to(scatter[p], c) = X(gather[p], c)      for p < n, c < count
//
// Tiles go through shared memory: they are read along whichever lines of X are closer together, and written down the
// columns of `to`.
//
// Launch   ceil(n / 64) ceil(count / 64) blocks of 256 threads
// Macros   REAL; ENTRY the name of the kernel
// Storage  X(i, c) = X[i row_stride + c column_stride], strides of any sign; to(i, c) = to[i + c ld]; gather, scatter:
//          int32[n], or 0 for p itself
#include "factor/real.cuh"
#include "factor/tile.cuh"

extern "C" __global__ void __launch_bounds__(TILE* GROUPS)
    ENTRY(const Real* __restrict__ X, Index row_stride, Index column_stride, const int* __restrict__ gather, Index n,
          Index count, Real* __restrict__ to, Index ld, const int* __restrict__ scatter) {
  __shared__ Real tile[TILE * APART];
  const Index down = (n + TILE - 1) / TILE;
  const Index row = Index(blockIdx.x) % down * TILE, column = Index(blockIdx.x) / down * TILE;
  const int height = int(smaller(TILE, n - row)), width = int(smaller(TILE, count - column));
  const int line = threadIdx.x % TILE, group = threadIdx.x / TILE;
  const bool turned = distance(column_stride) < distance(row_stride);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int other = group + GROUPS * i, p = turned ? other : line, c = turned ? line : other;
    if (p >= height || c >= width) continue;
    const Index source = gather ? Index(gather[row + p]) : row + p;
    tile[p + c * APART] = X[source * row_stride + (column + c) * column_stride];
  }
  __syncthreads();
  if (line >= height) return;
  const Index target = scatter ? Index(scatter[row + line]) : row + line;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int c = group + GROUPS * i;
    if (c < width) to[target + (column + c) * ld] = tile[line + c * APART];
  }
}
