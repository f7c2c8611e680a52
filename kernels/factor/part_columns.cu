// The same as part_rows.cu of the columns: of M transposed, as it lies.
//
//   sums(c)    = sum over r of M(r, c) y(r)               over least <= r - c <= most
//   squares(c) = sum over r of M(r, c)^2 s(r)
//   more(c)    = sum over r of M(r, c)^2 s_more(r)        with MORE
//
// A block takes a tile, a warp COLUMNS columns of it at a time, each lane every 32nd row; their sums are added over the
// warp at the end. judge_solution.cu adds what the tiles have left.
//
// Launch   (tiles = ceil(n / HEIGHT), some) blocks of T1 threads, which divide the columns into parts of a multiple of
//          COLUMNS T1 / 32
// Macros   REAL float or double; T1 threads; BLOCKS of a multiprocessor; MORE 0 or 1; ENTRY the name of the kernel
// Storage  as part_rows.cu has it, of column c in tile i parts[i n + c]
#include "factor/real.cuh"
#include "factor/solution.cuh"

constexpr int COLUMNS = 4, ROWS = 4;  // of a lane at a time: 16 loads are on their way
constexpr int HEIGHT = 512;           // rows of a tile
constexpr int WARPS = T1 / 32;

INLINE double sum_over_warp(double x) {
#pragma unroll
  for (int bit = 16; bit; bit /= 2) x += __shfl_xor_sync(~0u, x, bit);
  return x;
}

extern "C" __global__ void __launch_bounds__(T1, BLOCKS)
    ENTRY(const Real* __restrict__ M, Index ld, Index n, Index least, Index most, const double* __restrict__ y,
          const double* __restrict__ s, const double* __restrict__ s_more, double* __restrict__ parts) {
  __shared__ double y_here[HEIGHT];
  __shared__ double s_here[HEIGHT];
  __shared__ double more_here[MORE ? HEIGHT : 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index tiles = gridDim.x, across = gridDim.y;
  const Index width = (n + across * WARPS * COLUMNS - 1) / (across * WARPS * COLUMNS) * (WARPS * COLUMNS);
  const Index first_row = Index(blockIdx.x) * HEIGHT, first_column = Index(blockIdx.y) * width;
  const int rows = int(smaller(HEIGHT, n - first_row));
  for (int i = threadIdx.x; i < HEIGHT; i += T1) {
    y_here[i] = i < rows ? y[first_row + i] : 0;
    s_here[i] = i < rows ? s[first_row + i] : 0;
    if constexpr (MORE) more_here[i] = i < rows ? s_more[first_row + i] : 0;
  }
  __syncthreads();

  const unsigned range = unsigned(most - least);
#pragma unroll 1
  for (Index c = first_column + warp * COLUMNS; c < smaller(n, first_column + width); c += WARPS * COLUMNS) {
    const int columns = int(smaller(COLUMNS, n - c));
    const int ahead = int(first_row - c - least);  // row i of column c + q is of the part where this + i - q is in range
    // Rows with elements of the part: c + least <= r <= c + columns - 1 + most; whole loads of a warp
    const int from = int(max(Index(0), c + least - first_row)) / 32 * 32;
    const int to = int(max(Index(0), smaller(rows, c + columns + most - first_row)));
    double sum[COLUMNS], squares[COLUMNS], more[COLUMNS];
#pragma unroll
    for (int q = 0; q < COLUMNS; q++) sum[q] = squares[q] = more[q] = 0;
    const Real* at = M + first_row + c * ld;
#pragma unroll 1
    for (int i = from + lane; i < to; i += 32 * ROWS) {
      Real x[ROWS][COLUMNS];
#pragma unroll
      for (int k = 0; k < ROWS; k++)
#pragma unroll
        for (int q = 0; q < COLUMNS; q++) {
          const int row = i + 32 * k;
          x[k][q] = 0;
          if (row < to && q < columns && unsigned(ahead + row - q) <= range) x[k][q] = at[row + q * ld];
        }
#pragma unroll
      for (int k = 0; k < ROWS; k++) {
        const int row = i + 32 * k;
        if (row >= to) break;
        const double weight = y_here[row], size = s_here[row];
#pragma unroll
        for (int q = 0; q < COLUMNS; q++) {
          if (q >= columns || unsigned(ahead + row - q) > range) continue;
          const double element = exactly(x[k][q]), square = element * element;
          sum[q] = fma(element, weight, sum[q]);
          squares[q] = fma(square, size, squares[q]);
          if constexpr (MORE) more[q] = fma(square, more_here[row], more[q]);
        }
      }
    }
#pragma unroll
    for (int q = 0; q < COLUMNS; q++) {
      sum[q] = sum_over_warp(sum[q]);
      squares[q] = sum_over_warp(squares[q]);
      if constexpr (MORE) more[q] = sum_over_warp(more[q]);
      if (lane > 0 || q >= columns) continue;
      double* part = parts + blockIdx.x * n + c + q;
      part[0] = sum[q];
      part[tiles * n] = squares[q];
      if constexpr (MORE) part[2 * tiles * n] = more[q];
    }
  }
}
