// Weighted sums of factors W = L \ U (m x n, K = min(m, n)), in one read of W.
//
//   of columns c   sum over r > c of w(order(r)) L(r, c), and the largest |L(r, c)|; what is NaN is infinite
//   of rows r      sum over c >= r of U(r, c) v(c)
//
// of the lines first:last of those before K; a tile without any part of theirs is not read. With WHOLE of all of them,
// and at the same time
//
//   of columns c < n   sum over r <= min(c, K - 1) of g(r) U(r, c), and of (r + FLOOR_TERMS) (g(r) U(r, c))^2
//   of rows r < m      sum over c < min(r, K) of L(r, c) y(c), and of (c + FLOOR_TERMS) (L(r, c) y(c))^2
//
// where the squares are of the norms of what was added, each with the operations on an element up to there.
//
// An element of L is part of sums with w and y, one of U of those with g and v. A block takes a tile, a thread V rows
// that lie side by side in all columns of it: their sums stay in registers, those of columns are added over a warp,
// GROUP columns at a time, and over the warps in shared memory. add_factor_parts.cu adds what the tiles have left,
// always in the same order.
//
// Launch   (ceil(m / (T1 V)), tile columns) blocks of T1 threads; the tile columns divide n into parts of `width`
//          columns, a multiple of GROUP of at most WIDEST: tile columns = ceil(n / such a width)
// Macros   REAL float or double; T1 threads; BLOCKS of a multiprocessor; WHOLE 0 or 1; ENTRY the
//          name of the kernel
// Storage  order: certificate.cuh. W(r, c) = W[r + c ld], 16-byte aligned, ld a multiple of 16 bytes: what is read
//          beyond row m counts nothing. w by input row; g and y by line, read with WHOLE. Parts of sums s = 0 with w
//          and v and, with WHOLE, 1 with g and y, 2 squares of these: of column c in tile row i column_parts[(s tile
//          rows + i) n + c], of row r in tile column j row_parts[(s tile columns + j) m + r]; largest_parts[i n + c].
//          All are written, 0 where there is nothing to add, but without WHOLE those of tiles that are not read.
#include "factor/certificate.cuh"
#include "factor/real.cuh"
#include "factor/warp_sums.cuh"

constexpr int V = 16 / sizeof(Real);  // elements of a load
constexpr int WIDEST = 128;           // columns of a tile
constexpr int WARPS = T1 / 32, OF_WARPS = WARPS * WIDEST;

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
    ENTRY(const Real* __restrict__ W, Index ld, Index m, Index n, Index first, Index last,
          const int* __restrict__ order, const int* __restrict__ ends, const double* __restrict__ w,
          const double* __restrict__ v, const double* __restrict__ g, const double* __restrict__ y,
          double* column_parts, double* row_parts, double* largest_parts) {
  __shared__ double sums_of_L[OF_WARPS];
  __shared__ Word largest[OF_WARPS];
  __shared__ double v_of_column[WIDEST];
#if WHOLE
  __shared__ double sums_of_U[OF_WARPS];
  __shared__ double squares_of_U[OF_WARPS];
  __shared__ double y_of_column[WIDEST];
#endif
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index K = smaller(m, n);
  const Index tiles = gridDim.y;
  const int width = int((n + tiles * GROUP - 1) / (tiles * GROUP)) * GROUP;
  const Index first_row = (Index(blockIdx.x) * T1 + threadIdx.x) * V, first_column = Index(blockIdx.y) * width;
  const int columns = int(max(Index(0), smaller(width, n - first_column)));  // that are there
  const int rows = int(max(Index(0), smaller(V, m - first_row)));
#if !WHOLE
  const Index tile_row = Index(blockIdx.x) * T1 * V, end_row = tile_row + T1 * V, end_column = first_column + width;
  const bool behind = tile_row >= last && first_column >= last;
  if (behind || end_row <= first || end_column <= first) return;
#endif
  order = present_order(order, ends, m);

  double w_of_row[V], of_U[V];
#if WHOLE
  double g_of_row[V], of_L[V], squares_of_L[V], operations[V];  // on an element up to this row
#endif
#pragma unroll
  for (int i = 0; i < V; i++) {
    const Index r = first_row + i;
    w_of_row[i] = i < rows ? at_place(w, order, r, m) : 0;
    of_U[i] = 0;
#if WHOLE
    g_of_row[i] = i < rows && r < K ? g[r] : 0;
    of_L[i] = squares_of_L[i] = 0;
    operations[i] = double(r + FLOOR);
#endif
  }
  for (int j = threadIdx.x; j < width; j += T1) {
    const Index c = first_column + j;
    v_of_column[j] = j < columns ? v[c] : 0;
#if WHOLE
    y_of_column[j] = j < columns && c < K ? y[c] : 0;
#endif
  }
  __syncthreads();

  // Element (first_row + i, first_column + j) is below the diagonal where offset + i > j.
  const int offset = int(first_row - first_column);
  const int offset_of_warp = offset - lane * V;
  const Real* at = W + first_row + first_column * ld;
#if WHOLE
  double operations_here = double(first_column + FLOOR);  // and up to the present column
#endif
  for (int j = 0; j < width; j += GROUP, at += GROUP * ld) {
    Vector x[GROUP];
#pragma unroll
    for (int q = 0; q < GROUP; q++) {
#pragma unroll
      for (int i = 0; i < V; i++) x[q].x[i] = 0;
      if (rows > 0 && j + q < columns) x[q] = *reinterpret_cast<const Vector*>(at + q * ld);
    }
    const int place = warp * WIDEST + j + lane / 4;
    double in_column[GROUP];
    // Whole warps have nothing of L in columns whose diagonal is beyond their rows, and nothing of U in those before.
    double total = 0;
    Word most = 0;
    if (offset_of_warp + 32 * V - 1 > j) {
      Word sizes[GROUP];
#pragma unroll
      for (int q = 0; q < GROUP; q++) {
        in_column[q] = 0;
        sizes[q] = 0;
#pragma unroll
        for (int i = 0; i < V; i++) {
          const double element = exactly(x[q].x[i]);
          const bool there = i < rows && offset + i > j + q;
          if (there) in_column[q] = fma(w_of_row[i], element, in_column[q]);
          if (there) sizes[q] = larger(sizes[q], modulus(x[q].x[i]));
#if WHOLE
          const double term = element * y_of_column[j + q];
          if (there) of_L[i] += term;
          if (there) squares_of_L[i] = fma((operations_here + q) * term, term, squares_of_L[i]);
#endif
        }
      }
      total = sum_of_group(in_column, lane);
      most = largest_of_group(sizes, lane);
    }
    if (lane % 4 == 0) {
      sums_of_L[place] = total;
      largest[place] = most;
    }
    const bool above = offset_of_warp <= j + GROUP - 1;
#if WHOLE
    double total_of_U = 0, squares = 0;
#endif
    if (above) {
#if WHOLE
      double squares_in_column[GROUP];
#endif
#pragma unroll
      for (int q = 0; q < GROUP; q++) {
#if WHOLE
        in_column[q] = squares_in_column[q] = 0;
#endif
#pragma unroll
        for (int i = 0; i < V; i++) {
          const double element = exactly(x[q].x[i]);
          const bool there = i < rows && offset + i <= j + q;
          if (there) of_U[i] = fma(element, v_of_column[j + q], of_U[i]);
#if WHOLE
          const double term = element * g_of_row[i];
          if (there) in_column[q] += term;
          if (there) squares_in_column[q] = fma(operations[i] * term, term, squares_in_column[q]);
#endif
        }
      }
#if WHOLE
      total_of_U = sum_of_group(in_column, lane);
      squares = sum_of_group(squares_in_column, lane);
#endif
    }
#if WHOLE
    if (lane % 4 == 0) {
      sums_of_U[place] = total_of_U;
      squares_of_U[place] = squares;
    }
    operations_here += GROUP;
#endif
  }
#pragma unroll
  for (int i = 0; i < V; i++)
    if (i < rows) {
      row_parts[blockIdx.y * m + first_row + i] = of_U[i];
#if WHOLE
      row_parts[(tiles + blockIdx.y) * m + first_row + i] = of_L[i];
      row_parts[(2 * tiles + blockIdx.y) * m + first_row + i] = squares_of_L[i];
#endif
    }
  __syncthreads();
  for (int j = threadIdx.x; j < columns; j += T1) {
    double of_column = 0;
    Word most = 0;
#pragma unroll
    for (int k = 0; k < WARPS; k++) {
      of_column += sums_of_L[k * WIDEST + j];
      most = larger(most, Word(largest[k * WIDEST + j]));
    }
    column_parts[blockIdx.x * n + first_column + j] = of_column;
    largest_parts[blockIdx.x * n + first_column + j] = nan_is_infinite(exactly(real_of(most)));
#if WHOLE
    double of_products = 0, of_squares = 0;
#pragma unroll
    for (int k = 0; k < WARPS; k++) {
      of_products += sums_of_U[k * WIDEST + j];
      of_squares += squares_of_U[k * WIDEST + j];
    }
    column_parts[(gridDim.x + blockIdx.x) * n + first_column + j] = of_products;
    column_parts[(2 * Index(gridDim.x) + blockIdx.x) * n + first_column + j] = of_squares;
#endif
  }
}
