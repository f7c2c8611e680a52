// Algorithm 4 for one row of C a thread: lines 9 to 29, which TSM2R V3 runs once and TSM2L Opt-1 once a tile of A.
//
// While the tiles of A and B that are in hand are multiplied, the next ones are on their way: of A into the registers
// nextA, of B into nextB and, once every thread has done with the present tile, from there into shared memory.
#pragma once
#include "paper/tile.cuh"

// C(row, :) = alpha A(row, :) B + beta C(row, :) for the row of this thread; all threads of the block take part.
INLINE void multiply_row(REAL* currB, Index row, Index m, Index k, Index n, REAL alpha, const REAL* __restrict__ A,
                         Index lda, const REAL* __restrict__ B, Index rsb, Index csb, REAL beta, REAL* C, Index rsc,
                         Index csc) {
  const Index here = smaller(row, m - 1);
  REAL currA[T3], nextA[T3], nextB[T2], c[T2];
#pragma unroll 1
  for (Index p = 0; p < n; p += T2) {
    clear(c);
    // currB = B(0 : T1, p : p + T2), currA = A(row, 0 : T3)
    load_B(nextB, B, rsb, csb, threadIdx.x, p, k, n);
    store_tile(currB, nextB);
    load_A(currA, A, lda, here, 0, smaller(k, T1));
#pragma unroll 1
    for (Index j = 0; j < k; j += T1) {
      const int rows = int(smaller(T1, k - j));
      __syncthreads();
      // nextB = B(j + T1 : j + 2 T1, p : p + T2)
      if (j + T1 < k) load_B(nextB, B, rsb, csb, j + T1 + threadIdx.x, p, k, n);
#pragma unroll 1
      for (int l = 0; l < rows; l += T3) {
        // nextA = A(row, j + l + T3 : j + l + 2 T3), or the first T3 of the next tile; a tile's last may be fewer
        const bool inside = l + T3 < rows;
        load_A(nextA, A, lda, here, j + (inside ? l + T3 : T1), smaller(k, inside ? j + T1 : j + 2 * T1));
        // c += A(row, j + l : j + l + T3) B(j + l : j + l + T3, p : p + T2)
        outer_product(c, currA, currB, l, rows);
#pragma unroll
        for (int i = 0; i < T3; i++) currA[i] = nextA[i];
      }
      __syncthreads();
      if (j + T1 < k) store_tile(currB, nextB);
    }
    if (row < m) store_C(C, rsc, csc, row, p, n, alpha, c, beta);
  }
}
