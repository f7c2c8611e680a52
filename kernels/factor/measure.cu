// A copied into W, unless that is 0, with the largest modulus of each row and of each column.
//
// Tiles go through shared memory: they are read along whichever lines of A are closer together, and written down the
// columns of W.
//
// Launch   ceil(m / 64) ceil(n / 64) blocks of 256 threads
// Macros   REAL; ENTRY the name of the kernel
// Storage  A(i, j) = A[i row_stride + j column_stride], strides of any sign; W(i, j) = W[i + j ld], or 0;
//          row_max, column_max: bits of moduli, unsigned integers as large as a Real, wiped before. NaN is the largest
#include "factor/real.cuh"
#include "factor/tile.cuh"

extern "C" __global__ void __launch_bounds__(TILE* GROUPS)
    ENTRY(const Real* __restrict__ A, Index row_stride, Index column_stride, Index m, Index n, Real* __restrict__ W,
          Index ld, Word* row_max, Word* column_max) {
  __shared__ Real tile[TILE * APART];
  __shared__ Word of_rows[TILE * GROUPS];
  __shared__ Word of_columns[TILE * GROUPS];
  const Index down = (m + TILE - 1) / TILE;
  const Index row = Index(blockIdx.x) % down * TILE, column = Index(blockIdx.x) / down * TILE;
  const int height = int(smaller(TILE, m - row)), width = int(smaller(TILE, n - column));
  const int line = threadIdx.x % TILE, group = threadIdx.x / TILE;
  const bool turned = distance(column_stride) < distance(row_stride);

  // Neighbouring threads read along a column of A, or along a row of it where that is closer together.
  const Real* from = A + row * row_stride + column * column_stride;
  const Index along = turned ? column_stride : row_stride, across = turned ? row_stride : column_stride;
  const int length = turned ? width : height, count = turned ? height : width;
  Real x[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int other = group + GROUPS * i;
    x[i] = line < length && other < count ? __ldcs(from + line * along + other * across) : Real(0);
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int other = group + GROUPS * i;
    tile[turned ? other + line * APART : line + other * APART] = x[i];
  }
  __syncthreads();

  Word of_row = 0, of_column = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int other = group + GROUPS * i;
    const Real down_column = tile[line + other * APART], along_row = tile[other + line * APART];
    if (W && line < height && other < width) W[row + line + (column + other) * ld] = down_column;
    of_row = larger(of_row, modulus(down_column));
    of_column = larger(of_column, modulus(along_row));
  }
  of_rows[threadIdx.x] = of_row;
  of_columns[threadIdx.x] = of_column;
  __syncthreads();
  // A thread of the first group a row, one of the second a column; 0 is there already.
  Word largest = 0;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    const Word of_group = group == 0 ? of_rows[g * TILE + line] : of_columns[g * TILE + line];
    largest = larger(largest, of_group);
  }
  if (group == 0 && line < height && largest) atomicMax(row_max + row + line, largest);
  if (group == 1 && line < width && largest) atomicMax(column_max + column + line, largest);
}
