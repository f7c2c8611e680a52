// Adds what the tiles of part_rows.cu or part_columns.cu have left of the sums of each line, always in the same order,
// and judges it: whether M X = B, by X t and B t (`_check` of triangular.py), M a triangle of the factors or A.
//
//   residual(l) = (M X t)(l) - (B t)(p),   p = places[l] or l
//   reach(l)    = (M^2 (X^2 t^2))(l) + (B^2 t^2)(p) [+ 3 (L^2 U^2 (X^2 t^2))(p)]       elements squared
//   bound(l)    = f u sqrt(operations(n + FLOOR_TERMS, count) reach) + underflow
//
// The ones of a unit triangle, which are not stored, add y(l) and s(l). Counted, in verified[which], are lines that are
// fine. The last of the sums of a line, squares or more, is left in `last`: those of U are what L takes as s_more, and
// what L makes of these is `reached` of A.
//
// Launch   ceil(n / 32) blocks of T1 threads
// Macros   REAL, any; T1 threads; MORE 0 or 1, as the sums were taken; ENTRY the name of the kernel
// Storage  parts: (2 + MORE) x tiles x n; y, s, s_more: as the sums were taken with, read where unit is not 0; given,
//          given_squares by place; places: int32[n], or 0; reached: double[n] by place, or 0; last: double[n]
#include "factor/solution.cuh"

constexpr int WARPS = T1 / 32, SUMS = 2 + MORE;

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(const double* __restrict__ parts, Index tiles, Index n, Index count, Index unit, const double* __restrict__ y,
          const double* __restrict__ s, const double* __restrict__ s_more, const double* __restrict__ given,
          const double* __restrict__ given_squares, const int* __restrict__ places, const double* __restrict__ reached,
          double* __restrict__ last, const double* __restrict__ moduli, const double* __restrict__ tolerances,
          double* __restrict__ residuals, double* __restrict__ bounds, Count* verified, Index which) {
  const Constants constants = {tolerances};
  __shared__ double totals[SUMS * T1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index line = Index(blockIdx.x) * 32 + lane;
  double total[SUMS];
#pragma unroll
  for (int k = 0; k < SUMS; k++) total[k] = 0;
  if (line < n)
#pragma unroll 4
    for (Index tile = warp; tile < tiles; tile += WARPS)
#pragma unroll
      for (int k = 0; k < SUMS; k++) total[k] += parts[(k * tiles + tile) * n + line];
#pragma unroll
  for (int k = 0; k < SUMS; k++) totals[k * T1 + threadIdx.x] = total[k];
  __syncthreads();
  if (warp > 0) return;
  bool fine = false;
  if (line < n) {
#pragma unroll
    for (int other = 1; other < WARPS; other++)
#pragma unroll
      for (int k = 0; k < SUMS; k++) total[k] += totals[k * T1 + other * 32 + lane];
    if (unit) {
      total[0] += y[line];
      total[1] += s[line];
      if constexpr (MORE) total[SUMS - 1] += s_more[line];
    }
    const int place = places ? places[line] : int(line);
    const bool there = is_row(place, n);
    const double residual = there ? total[0] - given[place] : INFINITE;
    double reach_of_line = total[1] + (there ? given_squares[place] : INFINITE);
    if (reached) reach_of_line += 3 * (there ? reached[place] : INFINITE);
    const double walk = operations(double(n) + constants[FLOOR_TERMS], double(count), constants);
    const double bound = factored_bound(sqrt(walk * reach_of_line), double(n), *moduli, constants);
    residuals[line] = residual;
    bounds[line] = bound;
    last[line] = total[SUMS - 1];
    fine = is_fine(residual, bound);
  }
  count_found(fine, verified, which);
}
