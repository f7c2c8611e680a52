// Rows of U by substitution.
//
//   W(k:k+b, c0:c1) = inv(L11) G, L11 = W(k:k+b, k:k+b) unit lower
//
// Columns are dealt out by eights, first to all blocks, then to their warps.
//
// Launch   at most ceil((c1 - c0) / 8) blocks of 256 threads; b <= 128; columns k:k+b are not among c0:c1; dynamic shared
//          memory as in abft_tsm2/linalg/device/move_config.py
// Macros   REAL, WIDTH its bytes; ENTRY the name of the kernel
// Storage  W(i, j) = W[i + j ld], columns and W(k, :) from multiples of 16 bytes on; G(r, c - c0) = G[r + (c - c0) ldg]
#include "factor/substitute.cuh"

constexpr int WARPS = 8;

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    ENTRY(Real* W, Index ld, Index k, Index b, Index c0, Index c1, const Real* __restrict__ G, Index ldg) {
  extern __shared__ __align__(16) Real l11[];
  __shared__ __align__(16) Real exchanged[WARPS * EXCHANGE];
  const int warp = threadIdx.x / 32, rows = int(b);
  const Index blocks = gridDim.x, step = 8 * blocks * WARPS;
  bool first = true;
  // All warps of a block come by at least once, and load their columns anew in each turn: what is carried from one to
  // the next would be moved about by the compiler.
  for (Index column = c0 + 8 * (blockIdx.x + blocks * warp); first || column < c1; column += step) {
    const int count = int(smaller(8, c1 - column));
    Columns columns;
    columns.locate();
    columns.load(G + (column - c0) * ldg, ldg, rows, count);
    if (first) {  // while the columns are on their way
      load_lower(&l11[0], W + k + k * ld, ld, rows, warp, WARPS);
      __syncthreads();
      first = false;
    }
    if (count > 0) columns.substitute(&l11[0], &exchanged[warp * EXCHANGE], W + k + column * ld, ld, rows, count);
    __syncwarp();  // all lanes have read what was exchanged
  }
}
