// Adds what the tiles of factor_sums.cu have left of the sums of each column and row, always in the same order, and
// what the unit diagonal of L has in them.
//
//   s = 0   (w'L)(c) = w(order(c)) + parts; (U v)(r) = parts; the largest |L(r, c)|, r > c, of each column c; of the
//           lines first:last
//   s = 1   (g U)(c) = parts, c < n; (L y)(r) = parts, and y(r) where r < K, r < m
//   s = 2   squares of the same, that of y(r) times r + FLOOR_TERMS with those of row r < K
//
// The warps of a block share the parts of 32 lines, and add theirs in shared memory.
//
// Launch   (ceil(lines / 32), 2) blocks of T1 threads, of the lines first:last: y = 0 columns, y = 1 rows; after
//          factor_sums.cu with WHOLE (ceil(max(m, n) / 32), 6): s = y / 2
// Macros   REAL, any; T1 threads; ENTRY the name of the kernel
// Storage  parts as factor_sums.cu leaves them, from the tile on that has element (first, first). order: certificate.cuh;
//          y is read where s > 0. wL, Uv and largest have K elements; gU has n, Ly m, and the squares lie behind.
#include "factor/certificate.cuh"

constexpr int WARPS = T1 / 32;

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(const double* __restrict__ column_parts, const double* __restrict__ row_parts,
          const double* __restrict__ largest_parts, Index tile_rows, Index tile_columns, Index first_tile_row,
          Index first_tile_column, Index m, Index n, Index first, Index last, const int* __restrict__ order,
          const int* __restrict__ ends, const double* __restrict__ w, const double* __restrict__ y, double* wL,
          double* Uv, double* largest, double* gU, double* Ly) {
  __shared__ double totals[WARPS * 32];
  __shared__ double sizes[WARPS * 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, which = blockIdx.y / 2;
  const bool of_columns = blockIdx.y % 2 == 0;
  const Index K = smaller(m, n), line = (which ? 0 : first) + Index(blockIdx.x) * 32 + lane;
  const Index apart = of_columns ? n : m, number = of_columns ? tile_rows : tile_columns;
  const Index from = of_columns ? first_tile_row : first_tile_column;
  const bool there = line < (which ? apart : last), has_size = of_columns && which == 0;
  const double* parts = (of_columns ? column_parts : row_parts) + which * number * apart;
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
  if (which == 0) {
    if (of_columns) total += at_place(w, present_order(order, ends, m), line, m);  // the unit diagonal: L(c, c) = 1
    (of_columns ? wL : Uv)[line] = total;
    if (has_size) largest[line] = size;
    return;
  }
  if (!of_columns && line < K) total += which == 2 ? double(line + FLOOR) * (y[line] * y[line]) : y[line];
  (of_columns ? gU : Ly)[(which - 1) * apart + line] = total;
}
