// The triangular solve with L11, which lies in shared memory: U above a strip.
#pragma once
#include "factor/panel_state.cuh"

// y := inv(L11(0:K, 0:K)) y of N right-hand sides, a warp; lane l has the unknowns l + 32 u. Four unknowns at a time.
// Unknowns from K on become what L11 makes of them, which is nothing: they change no others.
template <int N>
INLINE void Panel::solve(Real (&y)[N][UNKNOWNS], int K) {
#pragma unroll
  for (int part = 0; part < UNKNOWNS; part++) {
    if (part * 32 >= K) continue;
    const int count = min(32, K - part * 32);
#pragma unroll 1
    for (int l = 0; l < count; l += 4) {
      const Real* column = lower + (part * 32 + l) * COLUMNS + lane;
      Real own[4], known[4][N];
#pragma unroll
      for (int i = 0; i < 4; i++) own[i] = column[i * COLUMNS + part * 32];
#pragma unroll
      for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int r = 0; r < N; r++) known[i][r] = of_lane(y[r][part], l + i);
        if (lane > l + i) {  // above the diagonal lies U: 0 times what is not finite would not be 0
#pragma unroll
          for (int r = 0; r < N; r++) y[r][part] = minus_product(y[r][part], own[i], known[i][r]);
        }
      }
#pragma unroll
      for (int u = part + 1; u < UNKNOWNS; u++) {
        if (u * 32 >= K) continue;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const Real below = column[i * COLUMNS + u * 32];
#pragma unroll
          for (int r = 0; r < N; r++) y[r][u] = minus_product(y[r][u], below, known[i][r]);
        }
      }
    }
  }
}

// L11(K0:K1, 0:K1) to shared memory, from where its rows lie in P.
INLINE void Panel::gather_lower(int K0, int K1) {
  const int row = K0 + threadIdx.x % STRIP, step = warps * 32 / STRIP;
  if (row >= K1) return;
  const Real* from = P + pivot_row[row];
#pragma unroll 1
  for (int c = threadIdx.x / STRIP; c < K1; c += 8 * step) {
    Real x[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (c + i * step < K1) x[i] = __ldcg(from + (c + i * step) * ld);
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (c + i * step < K1) lower[(c + i * step) * COLUMNS + row] = x[i];
  }
}

// y = the rows of P that are pivots 0 to K - 1, in SOLVED columns from c on.
INLINE void Panel::load_above(Real (&y)[SOLVED][UNKNOWNS], int K, int c) {
#pragma unroll
  for (int r = 0; r < SOLVED; r++)
#pragma unroll
    for (int u = 0; u < UNKNOWNS; u++) {
      const int z = u * 32 + lane;
      y[r][u] = z < K && c + r < b ? __ldcg(P + pivot_row[z] + (c + r) * ld) : Real(0);
    }
}

// upper = -U(0:K, K:K + STRIP) = -inv(L11) P(pivot rows, K:K + STRIP), in every block.
INLINE void Panel::solve_above(int K) {
  Real y[SOLVED][UNKNOWNS];
  const int first_column = SOLVED * warp;
  if (first_column < STRIP) load_above(y, K, K + first_column);  // on their way while L11 is gathered
  gather_lower(K - STRIP, K);
  __syncthreads();
  for (int c = first_column; c < STRIP; c += SOLVED * warps) {
    if (c > first_column) load_above(y, K, K + c);
    solve(y, K);
#pragma unroll
    for (int r = 0; r < SOLVED; r++)
#pragma unroll
      for (int u = 0; u < UNKNOWNS; u++)
        if (u * 32 + lane < K) upper[(u * 32 + lane) * UPPER_STEP + c + r] = negative(y[r][u]);
  }
  __syncthreads();
}
