// Adds what the tiles of factor_sums.cu have left of the sums of each column and row, always in the same order, and
// what the unit diagonal of L has in them.
//
//   pass 0   g(c) = w(order(c)) + parts; y(r) = parts; the largest |L(r, c)|, r > c, of each column c; of the lines
//            first:last of factor_sums.cu
//   pass 1   (g U)(c) = parts, c < n; (L y)(r) = parts, and y(r) where r < K, r < m
//
// and of pass 1, where factor_sums.cu has taken NORMS, the sums of squares of the same, that of y(r) times r +
// FLOOR_TERMS with those of row r < K.
//
// The warps of a block share the parts of 32 lines, and add theirs in shared memory.
//
// Launch   (ceil(lines / 32), 2) blocks of T1 threads, of the lines of pass 0, or of max(m, n): y = 0 columns, y = 1 rows;
//          with squares 4: y = 2 and 3
// Macros   REAL, any; T1 threads; ENTRY the name of the kernel
// Storage  parts as factor_sums.cu leaves them, in pass 0 from the tile on that has element (first, first); order and w are read in pass 0, y in pass 1; outputs have K elements in
//          pass 0, n (columns) and m (rows) in pass 1, twice as many with squares, which lie behind
#include "factor/certificate.cuh"

constexpr int WARPS = T1 / 32;

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(const double* __restrict__ column_parts, const double* __restrict__ row_parts,
          const double* __restrict__ largest_parts, Index tile_rows, Index tile_columns, Index first_tile_row,
          Index first_tile_column, Index m, Index n, Index pass, Index first, Index last, const int* __restrict__ order, const int* __restrict__ ends,
          const double* __restrict__ w,
          const double* __restrict__ y, double* columns_out, double* rows_out, double* largest_out) {
  __shared__ double totals[WARPS * 32];
  __shared__ double sizes[WARPS * 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool of_columns = blockIdx.y % 2 == 0, of_squares = blockIdx.y >= 2;
  const Index K = smaller(m, n), line = (pass == 0 ? first : 0) + Index(blockIdx.x) * 32 + lane;
  const Index apart = of_columns ? n : m, number = of_columns ? tile_rows : tile_columns;
  const Index from = of_columns ? first_tile_row : first_tile_column;
  const bool there = line < (pass == 0 ? last : apart);
  const bool has_size = of_columns && pass == 0;
  const double* parts = (of_columns ? column_parts : row_parts) + (of_squares ? number * apart : 0);
  double total = 0, size = 0;
  if (there)
#pragma unroll 4
    for (Index p = from + warp; p < number; p += WARPS) {
      total += parts[p * apart + line];
      if (has_size) size = fmax(size, largest_parts[p * apart + line]);  // none is NaN
    }
  totals[threadIdx.x] = total;
  sizes[threadIdx.x] = size;
  __syncthreads();
  if (warp > 0 || !there) return;
#pragma unroll
  for (int other = 1; other < WARPS; other++) {
    total += totals[other * 32 + lane];
    size = fmax(size, sizes[other * 32 + lane]);
  }
  // the unit diagonal: L(c, c) = 1
  if (of_columns && pass == 0) total += at_place(w, present_order(order, ends, m), line, m);
  if (!of_columns && pass != 0 && line < K) total += of_squares ? double(line + FLOOR) * (y[line] * y[line]) : y[line];
  (of_columns ? columns_out : rows_out)[line + (of_squares ? apart : 0)] = total;
  if (has_size) largest_out[line] = size;
}
