// Weighted sums of finished factors W = L \ U (m x n, K = min(m, n)), all in one read of W.
//
//   pass 0   columns c of some lines   sum over r > c of w(order(r)) L(r, c), and the largest |L(r, c)|; what is NaN is
//                                      infinite
//            rows r of some lines      sum over c >= r of U(r, c) v(c)
//   pass 1   columns c < n   sum over r <= min(c, K - 1) of g(r) U(r, c)
//            rows r < m      sum over c < min(r, K) of L(r, c) y(c)
//
// and with NORMS, which is for pass 1 alone, sums of squares of the same terms, each times the operations on an
// element up to there:
//
//            columns c < n   sum of (r + FLOOR_TERMS) (g(r) U(r, c))^2
//            rows r < m      sum of (c + FLOOR_TERMS) (L(r, c) y(c))^2
//
// The lines of pass 0 are first:last, of those before K. A tile without any part of theirs is not read.
//
// An element is part of one of the two sums: what is below the diagonal of that of its column in pass 0, and of that
// of its row in pass 1; the others the other way round. A block takes a tile, a thread V rows that lie side by side in
// all columns of it: their sums stay in registers, those of columns are added over a warp, GROUP columns at a time,
// and over the warps in shared memory. add_factor_parts.cu adds what the tiles have left, always in the same order.
//
// Launch   (ceil(m / (T1 V)), tile columns) blocks of T1 threads; the tile columns divide n into parts of `width`
//          columns, a multiple of GROUP of at most WIDEST: tile columns = ceil(n / such a width)
// Macros   REAL float or double; T1 threads; BLOCKS of a multiprocessor; NORMS 0 or 1; ENTRY the
//          name of the kernel
// Storage  order: certificate.cuh. W(r, c) = W[r + c ld], 16-byte aligned, ld a multiple of 16 bytes: what is read beyond row m counts nothing.
//          left is w by input row and right v (pass 0); left is g, right y (pass 1). Parts: of column c in tile row i
//          column_parts[i n + c] and, of pass 0, largest_parts[i n + c]; of row r in tile column j row_parts[j m + r].
//          All are written, 0 where there is nothing to add, but in pass 0 those of tiles that are not read. Parts of
//          squares lie behind all those of sums.
#include "factor/certificate.cuh"
#include "factor/real.cuh"
#include "factor/warp_sums.cuh"

constexpr int V = 16 / sizeof(Real);  // elements of a load
constexpr int WIDEST = 128;           // columns of a tile
constexpr int WARPS = T1 / 32;

struct __align__(16) Vector {
  Real x[V];
};

// The largest of eight numbers of each lane over the warp, as `sum_of_group` adds them.
INLINE Word largest_of_group(Word (&x)[GROUP], int lane) {
#pragma unroll
  for (int half = GROUP / 2; half; half /= 2) {
    const bool upper = lane & 4 * half;
#pragma unroll
    for (int i = 0; i < half; i++) {
      const Word given = upper ? x[i] : x[i + half], kept = upper ? x[i + half] : x[i];
      x[i] = larger(kept, __shfl_xor_sync(~0u, given, 4 * half));
    }
  }
  Word largest_word = larger(x[0], __shfl_xor_sync(~0u, x[0], 2));
  return larger(largest_word, __shfl_xor_sync(~0u, largest_word, 1));
}

extern "C" __global__ void __launch_bounds__(T1, BLOCKS)
    ENTRY(const Real* __restrict__ W, Index ld, Index m, Index n, Index pass, Index first, Index last,
          const int* __restrict__ order, const int* __restrict__ ends, const double* __restrict__ left, const double* __restrict__ right,
          double* column_parts, double* row_parts, double* largest_parts) {
  __shared__ double column_sums[WARPS * WIDEST];
  __shared__ Word largest[WARPS * WIDEST];
  __shared__ double of_column[WIDEST];  // v or y of the tile's columns
  __shared__ double column_squares[NORMS ? WARPS * WIDEST : 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index K = smaller(m, n);
  const Index tiles = gridDim.y;
  const int width = int((n + tiles * GROUP - 1) / (tiles * GROUP)) * GROUP;
  const Index first_row = (Index(blockIdx.x) * T1 + threadIdx.x) * V, first_column = Index(blockIdx.y) * width;
  const int columns = int(max(Index(0), smaller(width, n - first_column)));  // that are there
  const int rows = int(max(Index(0), smaller(V, m - first_row)));
  const Index tile_row = Index(blockIdx.x) * T1 * V, end_row = tile_row + T1 * V, end_column = first_column + width;
  const bool behind = tile_row >= last && first_column >= last;
  if (pass == 0 && (behind || end_row <= first || end_column <= first)) return;
  order = present_order(order, ends, m);

  double of_row[V], sum[V], squares[V], operations[V];  // with NORMS: on an element up to this row
#pragma unroll
  for (int i = 0; i < V; i++) {
    const Index r = first_row + i;
    of_row[i] = 0;
    if (i < rows && pass == 0) of_row[i] = at_place(left, order, r, m);
    if (i < rows && pass != 0 && r < K) of_row[i] = left[r];
    sum[i] = squares[i] = 0;
    operations[i] = double(r + FLOOR);
  }
  for (int j = threadIdx.x; j < width; j += T1)
    of_column[j] = j < columns && (pass == 0 || first_column + j < K) ? right[first_column + j] : 0;
  __syncthreads();

  // Element (first_row + i, first_column + j) is below the diagonal where offset + i > j.
  const int offset = int(first_row - first_column);
  const int offset_of_warp = offset - lane * V;
  const Real* at = W + first_row + first_column * ld;
  double operations_here = double(first_column + FLOOR);  // and up to the present column
  for (int j = 0; j < width; j += GROUP, at += GROUP * ld) {
    Vector x[GROUP];
#pragma unroll
    for (int q = 0; q < GROUP; q++) {
#pragma unroll
      for (int i = 0; i < V; i++) x[q].x[i] = 0;
      if (rows > 0 && j + q < columns) x[q] = *reinterpret_cast<const Vector*>(at + q * ld);
    }
    double in_column[GROUP], squares_in_column[GROUP];
    Word sizes[GROUP];
#pragma unroll
    for (int q = 0; q < GROUP; q++) {
      const double weight = of_column[j + q];
      in_column[q] = squares_in_column[q] = 0;
      sizes[q] = 0;
#pragma unroll
      for (int i = 0; i < V; i++) {
        const bool below = offset + i > j + q, down = below == (pass == 0);
        const double element = exactly(x[q].x[i]);
        if (i < rows && down) in_column[q] = fma(of_row[i], element, in_column[q]);
        if (i < rows && !down) sum[i] = fma(element, weight, sum[i]);
        if constexpr (NORMS) {
          const double term = element * (down ? of_row[i] : weight), square = term * term;
          if (i < rows && down) squares_in_column[q] = fma(operations[i], square, squares_in_column[q]);
          if (i < rows && !down) squares[i] = fma(operations_here, square, squares[i]);
        }
        if (!NORMS && i < rows && down) sizes[q] = larger(sizes[q], modulus(x[q].x[i]));
      }
      if constexpr (NORMS) operations_here += 1;
    }
    // Whole warps have nothing in columns whose diagonal is beyond their rows.
    const bool some = pass == 0 ? offset_of_warp + 32 * V - 1 > j : offset_of_warp <= j + GROUP - 1;
    const double total = some ? sum_of_group(in_column, lane) : 0;
    const Word most = !NORMS && some && pass == 0 ? largest_of_group(sizes, lane) : Word(0);
    if constexpr (NORMS) {
      const double of_squares = some ? sum_of_group(squares_in_column, lane) : 0;
      if (lane % 4 == 0) column_squares[warp * WIDEST + j + lane / 4] = of_squares;
    }
    if (lane % 4 == 0) {
      column_sums[warp * WIDEST + j + lane / 4] = total;
      largest[warp * WIDEST + j + lane / 4] = most;
    }
  }
#pragma unroll
  for (int i = 0; i < V; i++)
    if (i < rows) {
      row_parts[blockIdx.y * m + first_row + i] = sum[i];
      if constexpr (NORMS) row_parts[(tiles + blockIdx.y) * m + first_row + i] = squares[i];
    }
  __syncthreads();
  for (int j = threadIdx.x; j < columns; j += T1) {
    double total = 0;
    Word most = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      total += column_sums[w * WIDEST + j];
      most = larger(most, Word(largest[w * WIDEST + j]));
    }
    column_parts[blockIdx.x * n + first_column + j] = total;
    if constexpr (NORMS) {
      double of_squares = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) of_squares += column_squares[w * WIDEST + j];
      column_parts[(Index(gridDim.x) + blockIdx.x) * n + first_column + j] = of_squares;
    }
    if (!NORMS && pass == 0) largest_parts[blockIdx.x * n + first_column + j] = nan_is_infinite(exactly(real_of(most)));
  }
}
