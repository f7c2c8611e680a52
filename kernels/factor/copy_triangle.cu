// A triangle of A (n x n) copied into W, or zeros in its place; and in how many tiles of A it is finite.
//
// Tiles go through shared memory: they are read along whichever lines of A are closer together, and written down the
// columns of W. What is outside of the triangle is neither read nor written.
//
// Launch   ceil(n / 64)^2 blocks of 256 threads
// Macros   REAL; LOWER 1 for the triangle below the diagonal, 0 for that above it; DIAGONAL whether it has the diagonal;
//          READ whether A is read, else all counts as finite; ZERO whether W gets zeros; ENTRY the name of the kernel
// Storage  A(i, j) = A[i row_stride + j column_stride], strides of any sign; W(i, j) = W[i + j ld]. *finite: tiles that
//          are finite, of t (t + 1) / 2, t = ceil(n / 64)
#include "factor/definite.cuh"

constexpr int TILE = 64, GROUPS = 4, EACH = TILE / GROUPS;
constexpr int APART = TILE + 1;  // columns of the tile in shared memory: no two lanes meet in a bank along either line
constexpr Word NOT_FINITE = sizeof(Real) == 4 ? Word(0xff) << 23 : Word(0x7ff) << (sizeof(Real) == 4 ? 0 : 52);

INLINE Index distance(Index stride) { return stride < 0 ? -stride : stride; }

extern "C" __global__ void __launch_bounds__(TILE* GROUPS)
    ENTRY(const Real* __restrict__ A, Index row_stride, Index column_stride, Index n, Real* __restrict__ W, Index ld,
          Count* finite) {
#if !ZERO
  __shared__ Real tile[TILE * APART];
#endif
  const Index down = (n + TILE - 1) / TILE;
  const Index row = Index(blockIdx.x) % down * TILE, column = Index(blockIdx.x) / down * TILE;
  if (LOWER ? row < column : row > column) return;
  const int height = int(smaller(TILE, n - row)), width = int(smaller(TILE, n - column));
  const int line = threadIdx.x % TILE, group = threadIdx.x / TILE;
  const bool turned = distance(column_stride) < distance(row_stride);
  const int ahead = int(row - column);  // element (i, j) of the tile is below the diagonal where ahead + i > j

  auto taken = [&](int i, int j) {
    const int below = ahead + i - j;
    return i < height && j < width && (LOWER ? below >= 1 - DIAGONAL : below <= DIAGONAL - 1);
  };
  Real x[EACH];
#if READ
  // Neighbouring threads read along a column of A, or along a row of it where that is closer together.
  const Real* from = A + row * row_stride + column * column_stride;
#pragma unroll
  for (int q = 0; q < EACH; q++) {
    const int other = group + GROUPS * q, i = turned ? other : line, j = turned ? line : other;
    x[q] = taken(i, j) ? __ldcs(from + i * row_stride + j * column_stride) : Real(0);
  }
  bool all = true;
#pragma unroll
  for (int q = 0; q < EACH; q++) all &= modulus(x[q]) < NOT_FINITE;
  const bool right = sum_over_block<TILE * GROUPS>(!all) == 0;
#else
  const bool right = true;
#endif
#if ZERO
#pragma unroll
  for (int q = 0; q < EACH; q++) x[q] = 0;
#else
#pragma unroll
  for (int q = 0; q < EACH; q++) {
    const int other = group + GROUPS * q;
    tile[turned ? other + line * APART : line + other * APART] = x[q];
  }
  __syncthreads();
#pragma unroll
  for (int q = 0; q < EACH; q++) x[q] = tile[line + (group + GROUPS * q) * APART];
#endif
#pragma unroll
  for (int q = 0; q < EACH; q++) {
    const int j = group + GROUPS * q;
    if (taken(line, j)) W[row + line + (column + j) * ld] = x[q];
  }
  if (right) count_block(finite);
}
