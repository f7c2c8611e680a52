// Weighted sums of the rows of one part of a matrix M (n x n), a triangle or all of it, in one read:
//
//   sums(r)    = sum over c of M(r, c) y(c)               over least <= r - c <= most
//   squares(r) = sum over c of M(r, c)^2 s(c)
//   more(r)    = sum over c of M(r, c)^2 s_more(c)        with MORE
//
// A block takes a tile, a thread EACH rows of it, T1 apart, whose sums stay in registers; neighbouring threads read
// neighbouring rows of a column, whatever the alignment. judge_solution.cu adds what the tiles have left.
//
// Launch   (ceil(n / (T1 EACH)), tiles) blocks of T1 threads; the tiles divide the columns into parts of `width`, a
//          multiple of GROUP of at most WIDEST: tiles = ceil(n / such a width)
// Macros   REAL float or double; T1 threads; BLOCKS of a multiprocessor; MORE 0 or 1; ENTRY the name of the kernel
// Storage  M(r, c) = M[r + c ld]; y, s, s_more: double[n], s_more read with MORE only. Of row r in tile j
//          parts[j n + r], then behind all of these squares, then more. All are written, 0 where there is nothing.
#include "factor/real.cuh"
#include "factor/solution.cuh"

constexpr int EACH = 16 / sizeof(Real);  // rows of a thread
constexpr int GROUP = 16 / EACH;         // columns at a time: 16 loads of a thread are on their way
constexpr int WIDEST = 512;              // columns of a tile
constexpr int HEIGHT = T1 * EACH;
constexpr int NOWHERE = 1 << 30;  // a distance from the diagonal that no element has

extern "C" __global__ void __launch_bounds__(T1, BLOCKS)
    ENTRY(const Real* __restrict__ M, Index ld, Index n, Index least, Index most, const double* __restrict__ y,
          const double* __restrict__ s, const double* __restrict__ s_more, double* __restrict__ parts) {
  __shared__ double y_here[WIDEST];
  __shared__ double s_here[WIDEST];
  __shared__ double more_here[MORE ? WIDEST : 1];
  const Index tiles = gridDim.y;
  const int width = int((n + tiles * GROUP - 1) / (tiles * GROUP)) * GROUP;
  const Index first_row = Index(blockIdx.x) * HEIGHT, first_column = Index(blockIdx.y) * width;
  const Index end_row = smaller(n, first_row + HEIGHT), end_column = smaller(n, first_column + width);
  // Columns with elements of the part: first_row - most <= c <= end_row - 1 - least
  const int from = int(max(first_column, first_row - most) - first_column);
  const int to = int(smaller(end_column, end_row - least) - first_column);

  for (int j = threadIdx.x; j < width; j += T1) {
    const bool there = first_column + j < n;
    y_here[j] = there ? y[first_column + j] : 0;
    s_here[j] = there ? s[first_column + j] : 0;
    if constexpr (MORE) more_here[j] = there ? s_more[first_column + j] : 0;
  }
  __syncthreads();

  double sum[EACH], squares[EACH], more[EACH];
  int ahead[EACH];  // r - first_column - least: element j of the tile's row is of the part where this - j is in the range
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const Index r = first_row + threadIdx.x + i * T1;
    ahead[i] = r < n ? int(r - first_column - least) : -NOWHERE;
    sum[i] = squares[i] = more[i] = 0;
  }
  const unsigned range = unsigned(most - least);
  const Real* at = M + first_row + threadIdx.x + first_column * ld;
#pragma unroll 1
  for (int j = from; j < to; j += GROUP) {
    Real x[GROUP][EACH];
#pragma unroll
    for (int q = 0; q < GROUP; q++)
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        x[q][i] = 0;
        if (j + q < to && unsigned(ahead[i] - (j + q)) <= range) x[q][i] = at[(j + q) * ld + i * T1];
      }
#pragma unroll
    for (int q = 0; q < GROUP; q++) {
      if (j + q >= to) break;
      const double weight = y_here[j + q], size = s_here[j + q];
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        if (unsigned(ahead[i] - (j + q)) > range) continue;  // where weight may be infinite, 0 would not do
        const double element = exactly(x[q][i]), square = element * element;
        sum[i] = fma(element, weight, sum[i]);
        squares[i] = fma(square, size, squares[i]);
        if constexpr (MORE) more[i] = fma(square, more_here[j + q], more[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const Index r = first_row + threadIdx.x + i * T1;
    if (r >= n) continue;
    double* part = parts + blockIdx.y * n + r;
    part[0] = sum[i];
    part[tiles * n] = squares[i];
    if constexpr (MORE) part[2 * tiles * n] = more[i];
  }
}
