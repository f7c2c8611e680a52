// What the lines J = j:j+b of a step that is in doubt are judged by once more (`suspected` of repair.py): their residuals
// and bounds as judge_step.cu has left them, and the squares of the norms of what was added up, each term with the
// operations on it:
//
//   rows      sum over l <= j + i of (FLOOR + l) (L(r, l) y(l))^2       r: the row that lies at place j + i after the step
//   columns   sum over l <= j + i of (FLOOR + l) (g(l) U(l, j + i))^2
//
// Rows of finished columns are read where they are by now. Of a step that is not in doubt nothing is read or written.
//
// Launch   (b, 2) blocks of T1 threads: y = 0 rows, y = 1 columns
// Macros   REAL; T1 threads; ENTRY the name of the kernel
// Storage  W(r, c) = W[r + c ld]; order1: which row of the input each row of W is, after the step; places: where each row
//          of the input lies, before each panel and after the last; ends: as present_order of certificate.cuh takes
//          them, one for each panel; residuals and bounds: of `lines` rows, then of columns; in_doubt: 0 for a step that
//          is not. looked[side b + i]: residuals, at 2 b bounds, at 4 b squares
#include "factor/certificate.cuh"

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(const Real* __restrict__ W, Index ld, Index m, Index j, Index b, const int* __restrict__ order1,
          const int* __restrict__ places, const int* __restrict__ ends, const double* __restrict__ g,
          const double* __restrict__ y, const double* __restrict__ residuals, const double* __restrict__ bounds,
          Index lines, const Index* __restrict__ in_doubt, double* looked) {
  if (*in_doubt == 0) return;
  constexpr Index PANEL = 128;
  const bool of_rows = blockIdx.y == 0;
  const Index line = j + blockIdx.x;
  const int row = order1[line];
  double sum = 0;
  for (Index l = threadIdx.x; l <= line; l += T1) {
    double term = g[l];
    if (of_rows) {
      const int* end = ends + l / PANEL;
      const bool is_one = *end >= 0 && *end <= j + b;  // a fault may have changed it
      const Index place = is_one ? place_of(present_order(places, end, m), row, m, -1) : -1;
      const double element = l == line ? 1 : place >= 0 ? exactly(W[place + l * ld]) : INFINITE - INFINITE;
      term = element * y[l];
    } else {
      term *= exactly(W[l + line * ld]);
    }
    sum += double(FLOOR + l) * (term * term);
  }
  sum = sum_over_block<T1>(sum);
  if (threadIdx.x > 0) return;
  looked += blockIdx.y * b + blockIdx.x;
  looked[0] = residuals[blockIdx.y * lines + line];
  looked[2 * b] = bounds[blockIdx.y * lines + line];
  looked[4 * b] = sum;
}
