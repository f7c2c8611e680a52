// TSM2R: C = alpha A B + beta C, A large (m x k), B tall and skinny (k x n, n of a few columns).
// Rivera, Chen et al., TSM2X (JPDC 2021), section 3.1: Algorithms 1 to 4.
//
// Launch   ceil(m / T1) blocks of T1 threads, a row of C each; static shared memory of T1 T2 elements in V2 and V3
// Macros   those of tile.cuh; VARIANT is one of v0, v1, v2, v3, ENTRY the name of the kernel
// Corrected from the paper: the tile of B is loaded by the thread's index in the block (Algorithm 3, line 11);
//          Algorithm 4, lines 15 and 19, compare with k; sums start at 0 and meet beta C at the end.
#include "paper/prefetch.cuh"

INLINE Index global_tid() { return Index(blockIdx.x) * T1 + threadIdx.x; }

// Algorithm 1, the inner product: A is read once a column of C.
INLINE void v0(ARGUMENTS) {
  const Index row = global_tid();
  if (row >= m) return;
#pragma unroll 1
  for (Index q = 0; q < n; q++) {
    REAL c = 0;
#pragma unroll 1
    for (Index j = 0; j < k; j++) c += A[row + j * lda] * B[j * rsb + q * csb];
    REAL* at = C + row * rsc + q * csc;
    *at = beta == REAL(0) ? alpha * c : alpha * c + beta * *at;
  }
}

// Algorithm 2, the outer product: A is read once for T2 columns of C.
INLINE void v1(ARGUMENTS) {
  const Index row = global_tid();
  if (row >= m) return;
  REAL c[T2];
#pragma unroll 1
  for (Index p = 0; p < n; p += T2) {
    clear(c);
#pragma unroll 1
    for (Index j = 0; j < k; j++) {
      // c += A(row, j) B(j, p : p + T2); a column that is not there repeats the last one and is not stored
      const REAL a = A[row + j * lda];
#pragma unroll
      for (int q = 0; q < T2; q++) c[q] += a * B[j * rsb + smaller(p + q, n - 1) * csb];
    }
    store_C(C, rsc, csc, row, p, n, alpha, c, beta);
  }
}

// Algorithm 3: the tile of B goes through shared memory.
INLINE void v2(ARGUMENTS) {
  __shared__ __align__(16) REAL currB[T1 * T2];
  const Index row = global_tid(), here = smaller(row, m - 1);
  REAL a[T3], b[T2], c[T2];
#pragma unroll 1
  for (Index p = 0; p < n; p += T2) {
    clear(c);
#pragma unroll 1
    for (Index j = 0; j < k; j += T1) {
      const int rows = int(smaller(T1, k - j));
      __syncthreads();
      // currB = B(j : j + T1, p : p + T2)
      load_B(b, B, rsb, csb, j + threadIdx.x, p, k, n);
      store_tile(currB, b);
      __syncthreads();
#pragma unroll 1
      for (int l = 0; l < rows; l += T3) {
        // c += A(row, j + l : j + l + T3) currB(l : l + T3, :)
        load_A(a, A, lda, here, j + l, j + rows);
        outer_product(c, a, currB, l, rows);
      }
    }
    if (row < m) store_C(C, rsc, csc, row, p, n, alpha, c, beta);
  }
}

// Algorithm 4: the next tiles of A and B are fetched while the present ones are multiplied.
INLINE void v3(ARGUMENTS) {
  __shared__ __align__(16) REAL currB[T1 * T2];
  multiply_row(currB, global_tid(), m, k, n, alpha, A, lda, B, rsb, csb, beta, C, rsc, csc);
}

// 256 threads a multiprocessor leave each of them the most registers that there are, 255.
extern "C" __global__ void __launch_bounds__(T1, 256 / T1) ENTRY(ARGUMENTS) {
  VARIANT(m, k, n, alpha, A, lda, B, rsb, csb, beta, C, rsc, csc);
}
