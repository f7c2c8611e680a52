// Weighted sums of a triangle of X (n x n), all in one read of it: by rows, by columns or both.
//
//   rows r      sum over c in the triangle of X(r, c) x(c)
//   columns c   sum over r in the triangle of x(r) X(r, c), without the diagonal where there are sums by rows as well
//
// Both together are A x of the symmetric matrix A whose triangle this is. Of L in the triangle below the diagonal w'L is
// that of columns and L g that of rows; of its transpose L' in that above it is the other way round. With SQUARES also
// sums of the squares of the same terms; those with OPERATIONS are times the operations on an element up to there, k +
// FLOOR_TERMS for that with weight x(k).
//
// A block takes a tile, a thread a row in all columns of it: sums of rows stay in a register, those of columns are added
// over a warp, GROUP columns at a time, and over the warps in shared memory. add_triangle_parts.cu adds what the tiles
// have left, always in the same order.
//
// Launch   (ceil(n / T1), tile columns) blocks of T1 threads; the tile columns divide n into parts of `width` columns, a
//          multiple of GROUP of at most WIDEST: tile columns = ceil(n / such a width)
// Macros   REAL, LOWER; T1 threads; BLOCKS of a multiprocessor; ROWS, COLUMNS 0 or 1; SQUARES 0 or 1; OPERATIONS 0 or
//          1; ENTRY the name of the kernel
// Storage  X(r, c) = X[r + c ld], of any alignment. Parts: of column c in tile row i column_parts[i n + c], of row r in
//          tile column j row_parts[j n + r], and those of squares behind all of these; all of them are written, 0 where
//          there is nothing to add. *done: blocks that have come to their end
#include "factor/definite.cuh"

constexpr int WIDEST = 128;  // columns of a tile
constexpr int WARPS = T1 / 32;

extern "C" __global__ void __launch_bounds__(T1, BLOCKS)
    ENTRY(const Real* __restrict__ X, Index ld, Index n, const double* __restrict__ x, double* column_parts,
          double* row_parts, Count* done) {
  __shared__ double of_column[WIDEST];  // x of the tile's columns
  __shared__ double column_sums[COLUMNS ? WARPS * WIDEST : 1];
  __shared__ double column_squares[COLUMNS && SQUARES ? WARPS * WIDEST : 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index tiles = gridDim.y;
  const int width = int((n + tiles * GROUP - 1) / (tiles * GROUP)) * GROUP;
  const Index first_row = Index(blockIdx.x) * T1, first_column = Index(blockIdx.y) * width;
  const int columns = int(max(Index(0), smaller(width, n - first_column)));  // that are there
  const Index r = first_row + threadIdx.x;
  const bool there = r < n;
  const bool outside = LOWER ? first_row + T1 <= first_column : first_row >= first_column + width;

  const double of_row = COLUMNS && there ? x[r] : 0;
  for (int j = threadIdx.x; j < width; j += T1) of_column[j] = j < columns ? x[first_column + j] : 0;
  __syncthreads();

  // Element (r, first_column + j) is on the diagonal where offset = j, and below it where offset > j.
  const int offset = int(r - first_column), offset_of_warp = offset - lane;
  const double operations = OPERATIONS ? double(r + FLOOR) : 1;
  double operations_here = OPERATIONS ? double(first_column + FLOOR) : 1;  // and up to the present column
  double sum = 0, squares = 0;
  const Real* at = X + r + first_column * ld;
  for (int j = 0; j < (outside ? 0 : width); j += GROUP, at += GROUP * ld) {
    Real element[GROUP];
#pragma unroll
    for (int q = 0; q < GROUP; q++) {
      const bool taken = there && j + q < columns && (LOWER ? offset >= j + q : offset <= j + q);
      element[q] = taken ? __ldcs(at + q * ld) : Real(0);
    }
    double in_column[GROUP], squares_in_column[GROUP];
#pragma unroll
    for (int q = 0; q < GROUP; q++) {
      const double value = exactly(element[q]);
      if constexpr (ROWS) {
        const double weight = of_column[j + q];
        sum = fma(value, weight, sum);
        if constexpr (SQUARES) {
          const double term = value * weight;
          squares = fma(operations_here, term * term, squares);
          if constexpr (OPERATIONS) operations_here += 1;
        }
      }
      if constexpr (COLUMNS) {
        const double term = ROWS && offset == j + q ? 0 : of_row * value;
        in_column[q] = term;
        if constexpr (SQUARES) squares_in_column[q] = operations * (term * term);
      }
    }
    if constexpr (COLUMNS) {
      // Whole warps have nothing in columns whose part of the triangle is not in their rows.
      const bool some = LOWER ? offset_of_warp + 31 >= j : offset_of_warp < j + GROUP;
      const double total = some ? sum_of_group(in_column, lane) : 0;
      if (lane % 4 == 0) column_sums[warp * WIDEST + j + lane / 4] = total;
      if constexpr (SQUARES) {
        const double of_squares = some ? sum_of_group(squares_in_column, lane) : 0;
        if (lane % 4 == 0) column_squares[warp * WIDEST + j + lane / 4] = of_squares;
      }
    }
  }
  if (ROWS && there) {
    row_parts[blockIdx.y * n + r] = sum;
    if (SQUARES) row_parts[(tiles + blockIdx.y) * n + r] = squares;
  }
  __syncthreads();
  if constexpr (COLUMNS)
    for (int j = threadIdx.x; j < columns; j += T1) {
      double total = 0, of_squares = 0;
      if (!outside)
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
          total += column_sums[w * WIDEST + j];
          if (SQUARES) of_squares += column_squares[w * WIDEST + j];
        }
      column_parts[blockIdx.x * n + first_column + j] = total;
      if (SQUARES) column_parts[(Index(gridDim.x) + blockIdx.x) * n + first_column + j] = of_squares;
    }
  count_block(done);
}
