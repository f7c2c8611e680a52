// Judges finished factors line by line, by sums over both of them (`certificate` of certify.py).
//
//   rows r < m      |(L y)(r) - S(order(r))| <= f u (row_floor sqrt(done rows) + sqrt(FLOOR_TERMS) |S|) + underflow
//   columns c < n   |(g U)(c) - Z(c)|        <= the same with column_floor, done columns and Z
//   columns c < K   the largest |L(r, c)|, r > c, is within largest_multiplier
//
// With NORMS a line that is beyond its bound gets the norm of what was added up, operations counted, in addition to
// row_floor sqrt(done rows) and so on, and is judged once more. Without, estimated norms have to do: of 2000 x 2000
// normal numbers one line or two of a clean factorisation in three are beyond their bounds.
//
// Counted are those that are fine: RIGHT_ROWS, RIGHT_COLUMNS, SMALL_MULTIPLIERS.
//
// Launch   (ceil(max(m, n) / T1), 2) blocks of T1 threads: y = 0 rows, y = 1 columns
// Macros   REAL, any; T1 threads; NORMS 0 or 1; ENTRY the name of the kernel
// Storage  Ly by place, gU and largest by column; S and row_floor by input row. With NORMS squares lie behind Ly, from
//          m on, and gU, from n on, as add_factor_parts.cu leaves them. moduli: sums of |w| and |v|. residuals and
//          bounds of row r at [r], of column c at [max(m, n) + c]
#include "factor/certificate.cuh"

extern "C" __global__ void __launch_bounds__(T1, 4)
    ENTRY(const double* __restrict__ Ly, const double* __restrict__ gU, const int* __restrict__ order,
          const double* __restrict__ S, const double* __restrict__ Z, const double* __restrict__ row_floor,
          const double* __restrict__ column_floor, const double* __restrict__ largest,
          const double* __restrict__ moduli, const double* __restrict__ state, Index m, Index n,
          const double* __restrict__ tolerances, double* residuals, double* bounds, Count* verified) {
  const Constants constants = {tolerances};
  const bool of_rows = blockIdx.y == 0;
  const Index K = smaller(m, n), line = Index(blockIdx.x) * T1 + threadIdx.x;
  bool fine = false, small = false;
  if (line < (of_rows ? m : n)) {
    const double then = of_rows ? at_place(S, order, line, m) : Z[line];
    const double floor = of_rows ? at_place(row_floor, order, line, m) : column_floor[line];
    const double residual = (of_rows ? Ly[line] : gU[line]) - then;
    const double reached =
        reach(floor, state[of_rows ? DONE_ROWS : DONE_COLUMNS], constants[FLOOR_TERMS], then, then);
    const double weight = moduli[of_rows ? 1 : 0], norm = NORMS ? sqrt(of_rows ? Ly[m + line] : gU[n + line]) : 0;
    double bound = factored_bound(reached, double(K), weight, constants);
    if (NORMS && !is_fine(residual, bound)) bound = factored_bound(reached + norm, double(K), weight, constants);
    const Index at = line + (of_rows ? 0 : max(m, n));
    residuals[at] = residual;
    bounds[at] = bound;
    fine = is_fine(residual, bound);
    small = !of_rows && line < K && largest[line] <= constants[MULTIPLIER];
  }
  count_fine(fine, verified, of_rows ? RIGHT_ROWS : RIGHT_COLUMNS);
  count_fine(small, verified, SMALL_MULTIPLIERS);
}
