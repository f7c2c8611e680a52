// Rows of U by substitution, where the inverse of L11 that has given them is too large to be trusted.
//
//   if not inv_norm <= limit:  W(k:k+b, c0:c1) = inv(L11) G, L11 = W(k:k+b, k:k+b) unit lower
//
// Launch   blocks of 256 threads, of which 16 columns a block at a time; b <= 128; columns k:k+b are not among c0:c1
// Macros   REAL; ENTRY the name of the kernel
// Storage  W(i, j) = W[i + j ld]; G(r, c - c0) = G[r + (c - c0) ldg]; inv_norm: double[1]
#include "factor/substitute.cuh"

constexpr int COLUMNS = 2;  // of a warp

extern "C" __global__ void __launch_bounds__(256)
    ENTRY(Real* W, Index ld, Index k, Index b, Index c0, Index c1, const Real* G, Index ldg, const double* inv_norm,
          double limit) {
  if (*inv_norm <= limit) return;
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const Index count = c1 - c0, step = Index(gridDim.x) * warps * COLUMNS;
  for (Index c = (Index(blockIdx.x) * warps + threadIdx.x / 32) * COLUMNS; c < count; c += step) {
    Real x[COLUMNS][HELD];
#pragma unroll
    for (int i = 0; i < COLUMNS; i++)
#pragma unroll
      for (int h = 0; h < HELD; h++) {
        const int row = 32 * h + lane;
        x[i][h] = row < b && c + i < count ? G[row + (c + i) * ldg] : Real(0);
      }
    substitute(W + k + k * ld, ld, int(b), x);
#pragma unroll
    for (int i = 0; i < COLUMNS; i++)
#pragma unroll
      for (int h = 0; h < HELD; h++) {
        const int row = 32 * h + lane;
        if (row < b && c + i < count) W[k + row + (c0 + c + i) * ld] = x[i][h];
      }
  }
}
