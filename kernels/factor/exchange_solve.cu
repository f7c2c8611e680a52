// The exchanges of a panel's rows in columns c0:c1, and the rows of U there, at once: for the few columns that the next
// panel waits for.
//
//   X(r, :) = W(places0[order1[k + r]], :)
//   W(places1[order0[k + r]], :) = W(k + r, :)         if that place is below the panel
//   W(k:k+b, :) = inv(L11) X                           by the inverse where its largest element is within `limit`,
//                                                      else by substitution: then inv(L11) is as bad as L11 can be
//
// Launch   ceil((c1 - c0) / 4) blocks of 512 threads; b <= 128; columns k:k+b are not among c0:c1
// Macros   REAL; ENTRY the name of the kernel
// Storage  W(i, j) = W[i + j ld], m x n; order0, places0: int32[m] before the panel, order1, places1 after it;
//          inv(L11)(i, j) = inv[i + 128 j], i, j < b; inv_norm: its largest modulus, infinite where one is NaN
#include "factor/substitute.cuh"

constexpr int COLUMNS = 4;                // of a block; as many groups of threads share a product
constexpr int SHARE = PANEL / COLUMNS;    // columns of the inverse that a group takes

extern "C" __global__ void __launch_bounds__(COLUMNS* PANEL)
    ENTRY(Real* W, Index ld, Index m, Index n, Index k, Index b, Index c0, Index c1, const int* order0,
          const int* places0, const int* order1, const int* places1, const Real* inv, const double* inv_norm,
          double limit) {
  __shared__ Real gathered[COLUMNS * PANEL];
  __shared__ Real parts[COLUMNS * COLUMNS * PANEL];
  const int row = threadIdx.x % PANEL, group = threadIdx.x / PANEL;
  const Index first = c0 + Index(blockIdx.x) * COLUMNS;
  const bool serves = *inv_norm <= limit;  // not if it is NaN
  const bool there = row < b && first + group < c1;
  Real* own = W + (first + group) * ld;
  Index source = 0, target = 0;
  if (there) source = places0[order1[k + row]], target = places1[order0[k + row]];
  Real share[SHARE];
#pragma unroll
  for (int i = 0; i < SHARE; i++) {
    const int j = group * SHARE + i;
    share[i] = j <= row && row < b ? inv[row + j * PANEL] : Real(0);
  }
  const bool leaves = target >= k + b;
  const Real comes = there ? own[source] : Real(0), goes = leaves ? own[k + row] : Real(0);
  gathered[group * PANEL + row] = comes;
  __syncthreads();
  if (leaves) own[target] = goes;

  if (!serves) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp >= COLUMNS || first + warp >= c1) return;
    Real x[1][HELD];
#pragma unroll
    for (int h = 0; h < HELD; h++) x[0][h] = gathered[warp * PANEL + 32 * h + lane];
    substitute(W + k + k * ld, ld, int(b), x);
#pragma unroll
    for (int h = 0; h < HELD; h++)
      if (32 * h + lane < b) W[k + 32 * h + lane + (first + warp) * ld] = x[0][h];
    return;
  }

  // parts(group) = inv(:, share of the group) X(share, :)
  Real sum[COLUMNS];
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) sum[c] = 0;
#pragma unroll
  for (int i = 0; i < SHARE; i++)
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) sum[c] += share[i] * gathered[c * PANEL + group * SHARE + i];
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) parts[(group * COLUMNS + c) * PANEL + row] = sum[c];
  __syncthreads();
  Real total = 0;
#pragma unroll
  for (int g = 0; g < COLUMNS; g++) total += parts[(g * COLUMNS + group) * PANEL + row];
  if (there) own[k + row] = total;
}
