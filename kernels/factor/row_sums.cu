// What U of the rows of a step, right of its own columns, adds to the checks, in one read:
//
//   Z(c) -= sum over i < b of g(j+i) W(j+i, c)                    for the columns c >= j+b
//   parts(block, i) = sum over the block's c of W(j+i, c) v(c)    which judge_step.cu adds to y = U v
//
// A warp takes AT_ONCE columns at a time; a lane holds every 32nd row of them, and these rows' sums to the end.
//
// Launch   some blocks of T1 threads, at most ceil((n - j - b) / (T1 / 32 * AT_ONCE))
// Macros   REAL float or double; T1 threads; CHUNKS of 32 rows, b <= 32 CHUNKS: 4, 8 or 16; ENTRY the name of the
//          kernel
// Storage  W(r, c) = W[r + c ld]; v, Z by column, g by place; parts[block b + i]; float64 but for W
#include "factor/line_verdict.cuh"

constexpr int AT_ONCE = 16 / CHUNKS;  // columns, so that a lane has 16 loads on their way
constexpr int WARPS = T1 / 32, ROWS = 32 * CHUNKS;

extern "C" __global__ void __launch_bounds__(T1, 2)
    ENTRY(const Real* __restrict__ W, Index ld, Index n, Index j, Index b, const double* __restrict__ v,
          const double* __restrict__ g, double* Z, double* parts) {
  __shared__ double sums_of_rows[WARPS * ROWS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Real* rows = W + j;
  double own[CHUNKS], y[CHUNKS];
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    own[i] = lane + 32 * i < b ? g[j + lane + 32 * i] : 0;
    y[i] = 0;
  }
#pragma unroll 1
  for (Index c = j + b + (Index(blockIdx.x) * WARPS + warp) * AT_ONCE; c < n; c += Index(gridDim.x) * WARPS * AT_ONCE) {
    Real x[AT_ONCE][CHUNKS];
#pragma unroll
    for (int q = 0; q < AT_ONCE; q++)
#pragma unroll
      for (int i = 0; i < CHUNKS; i++)
        x[q][i] = lane + 32 * i < b && c + q < n ? rows[lane + 32 * i + (c + q) * ld] : Real(0);
#pragma unroll
    for (int q = 0; q < AT_ONCE; q++) {
      const double weight = c + q < n ? v[c + q] : 0;
      double z = 0;
#pragma unroll
      for (int i = 0; i < CHUNKS; i++) {
        const double element = exactly(x[q][i]);
        z += own[i] * element;
        y[i] += element * weight;
      }
#pragma unroll
      for (int bit = 16; bit; bit /= 2) z += __shfl_xor_sync(~0u, z, bit);
      if (lane == 0 && c + q < n) Z[c + q] -= z;
    }
  }
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) sums_of_rows[warp * ROWS + lane + 32 * i] = y[i];
  __syncthreads();
  for (int i = threadIdx.x; i < b; i += T1) {
    double sum = 0;
#pragma unroll
    for (int k = 0; k < WARPS; k++) sum += sums_of_rows[k * ROWS + i];
    parts[Index(blockIdx.x) * b + i] = sum;
  }
}
