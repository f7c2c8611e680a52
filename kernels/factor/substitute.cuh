// Forward substitution with the unit lower triangle of a panel, by a warp.
#pragma once
#include "factor/real.cuh"

constexpr int PANEL = 128;        // its most columns
constexpr int HELD = PANEL / 32;  // rows of a column that a lane holds: lane, lane + 32, ...
constexpr int AHEAD = 4;          // columns of L on their way from memory

// x = inv(L) x, of COLUMNS columns at a time. L is b x b, b <= PANEL; x is 0 in rows b and beyond. NaN and infinity
// touch no row above their own, which they do in a product with the inverse, zeros times them being NaN.
template <int COLUMNS>
INLINE void substitute(const Real* L, Index ld, int b, Real (&x)[COLUMNS][HELD]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int block = 0; block < HELD; block++) {
    // x(32 block : 32 block + 32) is what a lane holds as its number `block`.
#pragma unroll 1
    for (int first = 0; first < 32 && 32 * block + first < b; first += AHEAD) {
      Real l[AHEAD][HELD];
#pragma unroll
      for (int i = 0; i < AHEAD; i++)
#pragma unroll
        for (int h = block; h < HELD; h++) {
          const int row = 32 * h + lane, j = 32 * block + first + i;
          l[i][h] = j < row && row < b ? L[row + j * ld] : Real(0);
        }
      // x(j+1:b) -= L(j+1:b, j) x(j)
#pragma unroll
      for (int i = 0; i < AHEAD; i++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
          const Real known = __shfl_sync(~0u, x[c][block], first + i);
#pragma unroll
          for (int h = block; h < HELD; h++) {
            const Real rest = x[c][h] - l[i][h] * known;
            x[c][h] = h > block || lane > first + i ? rest : x[c][h];
          }
        }
    }
  }
}
