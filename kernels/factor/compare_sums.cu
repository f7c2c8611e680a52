// Whether finished factors still give the sums that were kept when they were made (`changed` of certify.py, with
// guessed norms): counts columns of L and rows of U that do, SAME_COLUMNS and SAME_ROWS, and notes which do not.
//
//   columns c < last   |(w'L)(c) - g(c)| <= changed(m) max(|g(c)|, min(column_floor(c) / |pivot|, ||w(order(c : m))||))
//   rows r < last      |(U v)(r) - y(r)| <= changed(n) max(|y(r)|, row_floor(order(r)))
//
// |g| itself estimates the norm that the bound needs, as does that of A's column over the pivot, and |l| <= 1 limits
// it: to the norm of the weights from the column's own on. A block adds up the squares of those behind its columns by
// itself.
//
// Launch   ceil(last / T1) blocks of T1 threads, last <= min(m, n)
// Macros   REAL float or double, of W; T1 threads; ENTRY the name of the kernel
// Storage  W(i, i) = W[i (ld + 1)]; w and row_floor by input row; differs[i]: ROW where row i does not, COLUMN where
//          column i does not, or both added, or 0
#include "factor/certificate.cuh"
#include "factor/real.cuh"

// ||w(order(r : m))|| for the row r of this thread, which are those of a block one after the other from `first` on.
INLINE double tail_norm(const double* w, const int* order, Index first, Index m) {
  __shared__ double squares[T1];
  double largest = 0;
  for (Index r = threadIdx.x; r < m; r += T1) largest = fmax(largest, nan_is_infinite(fabs(w[r])));
  largest = largest_over_block<T1>(largest);
  const double scale = largest > 0 ? largest : 1;  // squares stay in the range
  double behind = 0;
  for (Index r = first + T1 + threadIdx.x; r < m; r += T1) {
    const double x = at_place(w, order, r, m) / scale;
    behind += x * x;
  }
  behind = sum_over_block<T1>(behind);
  const Index own = first + threadIdx.x;
  const double x = own < m ? at_place(w, order, own, m) / scale : 0;
  squares[threadIdx.x] = x * x;
  // squares(i) = sum of squares(i : T1): each step doubles how many of them are added
  for (int step = 1; step < T1; step *= 2) {
    __syncthreads();
    const double more = int(threadIdx.x) + step < T1 ? double(squares[threadIdx.x + step]) : 0;
    __syncthreads();
    squares[threadIdx.x] += more;
  }
  return largest * sqrt(behind + squares[threadIdx.x]);
}

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(const double* __restrict__ wL, const double* __restrict__ g, const double* __restrict__ Uv,
          const double* __restrict__ y, const Real* __restrict__ W, Index ld, const double* __restrict__ column_floor,
          const double* __restrict__ row_floor, const double* __restrict__ w, const int* __restrict__ order, Index m,
          Index last, const double* __restrict__ tolerances, Count* verified, double* differs) {
  const Constants constants = {tolerances};
  constexpr double ROW = 1, COLUMN = 2;
  const Index first = Index(blockIdx.x) * T1, line = first + threadIdx.x;
  const double tail = tail_norm(w, order, first, m);
  bool same_column = false, same_row = false;
  if (line < last) {
    const double pivot = fabs(exactly(W[line * (ld + 1)]));
    const double by_pivot = column_floor[line] / (pivot > 0 ? pivot : 1);
    const double of_column = larger(fabs(g[line]), smaller_number(by_pivot, tail));
    same_column = is_fine(wL[line] - g[line], constants[CHANGED_COLUMNS] * of_column);
    const double of_row = larger(fabs(y[line]), at_place(row_floor, order, line, m));
    same_row = is_fine(Uv[line] - y[line], constants[CHANGED_ROWS] * of_row);
    differs[line] = (same_row ? 0 : ROW) + (same_column ? 0 : COLUMN);
  }
  count_fine(same_column, verified, SAME_COLUMNS);
  count_fine(same_row, verified, SAME_ROWS);
}
