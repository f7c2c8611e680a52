// The exchanges of a panel's rows in columns c0:c1, and the rows of U there, at once: for the few columns that the next
// panel waits for.
//
//   X(r, :) = W(places0[order1[k + r]], :)
//   W(places1[order0[k + r]], :) = W(k + r, :)         if that place is below the panel
//   W(k:k+b, :) = inv(L11) X                           L11 = W(k:k+b, k:k+b) unit lower
//
// A block has 8 columns, so that these few are spread over many multiprocessors. Some of its warps gather X, a row a
// thread, while the others fetch L11; one of them substitutes.
//
// Launch   ceil((c1 - c0) / 8) blocks of 384 threads; b <= 128; columns k:k+b are not among c0:c1; dynamic shared memory
//          as in abft_tsm2/linalg/device/move_config.py
// Macros   REAL, WIDTH its bytes; ENTRY the name of the kernel
// Storage  W(i, j) = W[i + j ld], columns and W(k, :) from multiples of 16 bytes on; order0, places0: int32[m] before
//          the panel, order1, places1 after it
#include "factor/rows.cuh"
#include "factor/substitute.cuh"

constexpr int WARPS = 12, GATHERERS = PANEL / 32;

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    ENTRY(Real* W, Index ld, Index k, Index b, Index c0, Index c1, const int* __restrict__ order0,
          const int* __restrict__ places0, const int* __restrict__ order1, const int* __restrict__ places1) {
  extern __shared__ __align__(16) Real l11[];
  __shared__ __align__(16) Real gathered[8 * COLUMN_STEP];
  __shared__ __align__(16) Real exchanged[EXCHANGE];
  const int warp = threadIdx.x / 32, row = threadIdx.x, rows = int(b);
  const Index first = c0 + Index(blockIdx.x) * 8;
  const int count = int(smaller(8, c1 - first));
  Real* columns = W + first * ld;
  Index target = 0;
  Real goes[8];
  if (warp < GATHERERS) {
    Index source = 0;
    if (row < rows) {
      const int comes = order1[k + row], leaves = order0[k + row];
      source = place_of(places0, comes, ld, k + row), target = place_of(places1, leaves, ld, k + row);
    }
    Real x[8];
#pragma unroll
    for (int c = 0; c < 8; c++) x[c] = row < rows && c < count ? columns[source + c * ld] : Real(0);
#pragma unroll
    for (int c = 0; c < 8; c++) goes[c] = target >= k + b && c < count ? columns[k + row + c * ld] : Real(0);
#pragma unroll
    for (int c = 0; c < 8; c++) gathered[c * COLUMN_STEP + row] = x[c];
  } else {
    load_lower(&l11[0], W + k + k * ld, ld, rows, warp - GATHERERS, WARPS - GATHERERS);
  }
  __syncthreads();  // all rows that come have been read
  if (warp < GATHERERS) {
    if (target < k + b) return;
#pragma unroll
    for (int c = 0; c < 8; c++)
      if (c < count) columns[target + c * ld] = goes[c];
  } else if (warp == GATHERERS) {
    Columns solved;
    solved.locate();
    solved.load_shared(&gathered[0]);
    solved.substitute(&l11[0], &exchanged[0], columns + k, ld, rows, count);
  }
}
