// TSM2L: C = alpha A B + beta C, A tall and skinny (m x k), B small (k x n).
// Rivera, Chen et al., TSM2X (JPDC 2021), section 3.2: Algorithms 6 and 7.
//
// Few rows of B leave a thread little to do. So fewer threads are launched and each works through TCF rows of C, which
// lie `gridDim.x T1` rows apart.
//
// Launch   ceil(m / (T1 TCF)) blocks of T1 threads; static shared memory of T1 T2 elements
// Macros   those of tile.cuh; VARIANT is opt1 or opt2, ENTRY the name of the kernel
// Corrected from the paper: Algorithm 7 loads A anew for every tile of A, and works for k > T1.
#include "paper/prefetch.cuh"

// First row of C of this block in the r-th horizontal tile of A. The same for all threads of the block.
INLINE Index tile_row(int r) { return (Index(blockIdx.x) + Index(r) * gridDim.x) * T1; }

// Algorithm 6: Algorithm 4 once for each tile of A. B is read TCF times.
INLINE void opt1(ARGUMENTS) {
  __shared__ __align__(16) REAL currB[T1 * T2];
#pragma unroll 1
  for (int r = 0; r < TCF && tile_row(r) < m; r++)
    multiply_row(currB, tile_row(r) + threadIdx.x, m, k, n, alpha, A, lda, B, rsb, csb, beta, C, rsc, csc);
}

// c = beta C(row, p : p + T2), zero outside of C; C is not read where beta is 0.
INLINE void load_C(REAL (&c)[T2], const REAL* C, Index rsc, Index csc, Index row, Index m, Index p, Index n, REAL beta) {
  const REAL* at = C + row * rsc + p * csc;
#pragma unroll
  for (int q = 0; q < T2; q++) c[q] = row < m && p + q < n && beta != REAL(0) ? beta * at[q * csc] : REAL(0);
}

// Algorithm 7: each tile of B meets all the tiles of A, and the sums so far wait in C. B is read once.
INLINE void opt2(ARGUMENTS) {
  __shared__ __align__(16) REAL currB[T1 * T2];
  REAL currA[T3], nextA[T3], nextB[T2], c[T2], currC[T2], nextC[T2];
#pragma unroll 1
  for (Index p = 0; p < n; p += T2) {
    // currB = B(0 : T1, p : p + T2)
    load_B(nextB, B, rsb, csb, threadIdx.x, p, k, n);
    store_tile(currB, nextB);
    Index j = 0;
    do {  // once also for k = 0: C = beta C
      const int rows = int(smaller(T1, k - j));
      const REAL kept = j == 0 ? beta : REAL(1);  // beta C before the first tile of B, later the sums so far
      __syncthreads();
      // nextB = B(j + T1 : j + 2 T1, p : p + T2)
      if (j + T1 < k) load_B(nextB, B, rsb, csb, j + T1 + threadIdx.x, p, k, n);
      Index row = tile_row(0) + threadIdx.x;
      load_C(currC, C, rsc, csc, row, m, p, n, kept);
      load_A(currA, A, lda, smaller(row, m - 1), j, j + rows);
#pragma unroll 1
      for (int r = 0; r < TCF && tile_row(r) < m; r++) {
        const bool more = r + 1 < TCF && tile_row(r + 1) < m;
        const Index next = tile_row(r + 1) + threadIdx.x;
        // nextC = C(next, p : p + T2): the sums so far of the next tile of A; nothing where there is none
        load_C(nextC, C, rsc, csc, next, more ? m : 0, p, n, kept);
        clear(c);
#pragma unroll 1
        for (int l = 0; l < rows; l += T3) {
          // nextA = A(row, j + l + T3 : j + l + 2 T3), or the first T3 of the next tile of A
          if (l + T3 < rows)
            load_A(nextA, A, lda, smaller(row, m - 1), j + l + T3, j + rows);
          else
            load_A(nextA, A, lda, smaller(next, m - 1), j, more ? j + rows : j);
          // c += A(row, j + l : j + l + T3) currB(l : l + T3, :)
          outer_product(c, currA, currB, l, rows);
#pragma unroll
          for (int i = 0; i < T3; i++) currA[i] = nextA[i];
        }
        // C(row, p : p + T2) = alpha c + what was there
        if (row < m) {
          REAL* at = C + row * rsc + p * csc;
#pragma unroll
          for (int q = 0; q < T2; q++)
            if (p + q < n) at[q * csc] = alpha * c[q] + currC[q];
        }
#pragma unroll
        for (int q = 0; q < T2; q++) currC[q] = nextC[q];
        row = next;
      }
      __syncthreads();
      if (j + T1 < k) store_tile(currB, nextB);
      j += T1;
    } while (j < k);
  }
}

// 256 threads a multiprocessor leave each of them the most registers that there are, 255.
extern "C" __global__ void __launch_bounds__(T1, 256 / T1) ENTRY(ARGUMENTS) {
  VARIANT(m, k, n, alpha, A, lda, B, rsb, csb, beta, C, rsc, csc);
}
