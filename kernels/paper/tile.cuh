// The pieces every tall-skinny kernel is made of: a thread's part of a row of A, a tile of B in shared memory, the
// outer product of the two, and the store of C.
//
// Given as macros, in front of this text:
//   REAL              float or double
//   T1                rows of a tile of B, which is also the number of threads of a block (the paper's t1)
//   T2                columns of C that a thread computes at a time (t2)
//   T3                elements of A that a thread loads at a time (t3)
//   TCF               horizontal tiles of A that a thread works through (tcf; 1 but for TSM2L)
//
// Storage      A(i, j) = A[i + j lda]; B(i, j) = B[i rsb + j csb]; C(i, j) = C[i rsc + j csc]
// Alignment    that of one element
// Edges        m, k and n are arbitrary; nothing is read that lies outside of the matrices. A thread whose row is not
//              there works on the last one and stores nothing, so that all threads meet at every barrier.
// Indices      64 bits: m k may exceed 2^32.
#pragma once
#include "tsm2/index.cuh"

// What every kernel takes.
#define ARGUMENTS                                                                                             \
  Index m, Index k, Index n, REAL alpha, const REAL *__restrict__ A, Index lda, const REAL *__restrict__ B,   \
      Index rsb, Index csb, REAL beta, REAL *C, Index rsc, Index csc

// a = A(row, first : first + T3), zero from column `end` on. All threads of a block go the same way: the common case has
// no comparison an element, nor has that of nothing left to load.
INLINE void load_A(REAL (&a)[T3], const REAL* __restrict__ A, Index lda, Index row, Index first, Index end) {
  const REAL* at = A + row + first * lda;
  if (first + T3 <= end) {
#pragma unroll
    for (int i = 0; i < T3; i++, at += lda) a[i] = *at;
  } else if (first < end) {
#pragma unroll
    for (int i = 0; i < T3; i++, at += lda) a[i] = first + i < end ? *at : REAL(0);
  } else {
#pragma unroll
    for (int i = 0; i < T3; i++) a[i] = REAL(0);
  }
}

// b = B(row, p : p + T2), zero outside of B.
INLINE void load_B(REAL (&b)[T2], const REAL* __restrict__ B, Index rsb, Index csb, Index row, Index p, Index k, Index n) {
#pragma unroll
  for (int q = 0; q < T2; q++) b[q] = row < k && p + q < n ? B[row * rsb + (p + q) * csb] : REAL(0);
}

// currB(thread, :) = b. The tile is column-major: the threads of a warp write to neighbouring banks.
INLINE void store_tile(REAL* currB, const REAL (&b)[T2]) {
#pragma unroll
  for (int q = 0; q < T2; q++) currB[q * T1 + threadIdx.x] = b[q];
}

// Elements of A that are multiplied without a question in between: they divide T3 and T1. Longer is faster, but where k
// is less than T3 = 32, as in TSM2L with the paper's parameters, the rest of a group is multiplied for nothing.
#define GROUP (T3 == 16 ? 16 : T3 % 8 == 0 ? 8 : T3 % 4 == 0 ? 4 : 1)
// Above so many multiplications in a row the groups become a loop: they would take the compiler a second and more.
#define GROUPS_UNROLLED (T3 * T2 > 256 ? 1 : T3 / GROUP)

// c += a(0 : T3) currB(l : l + T3, :), or of what is left of it where the tile has fewer than l + T3 rows: whole groups
// are left out, and within a group both factors are zero from there on. a is used up: each group moves the next one to
// the front, which costs nothing where the loop is unrolled. All threads read the same element of the tile: a broadcast,
// whatever the storage. l is a multiple of GROUP; said so, the compiler reads 16 bytes at a time.
INLINE void outer_product(REAL (&c)[T2], REAL (&a)[T3], const REAL* currB, int l, int rows) {
#pragma unroll GROUPS_UNROLLED
  for (int g = 0; g < T3; g += GROUP) {
    if (l + g < rows) {
#pragma unroll
      for (int i = 0; i < GROUP; i++) {
#pragma unroll
        for (int q = 0; q < T2; q++) c[q] += a[i] * currB[q * T1 + ((l + g) & -GROUP) + i];
      }
    }
#pragma unroll
    for (int i = 0; i + GROUP < T3; i++) a[i] = a[i + GROUP];
  }
}

INLINE void clear(REAL (&c)[T2]) {
#pragma unroll
  for (int q = 0; q < T2; q++) c[q] = REAL(0);
}

// C(row, p : p + T2) = alpha c + beta C(row, p : p + T2). C is not read where beta is 0.
INLINE void store_C(REAL* C, Index rsc, Index csc, Index row, Index p, Index n, REAL alpha, const REAL (&c)[T2],
                    REAL beta) {
  REAL* at = C + row * rsc + p * csc;
#pragma unroll
  for (int q = 0; q < T2; q++)
    if (p + q < n) at[q * csc] = beta == REAL(0) ? alpha * c[q] : alpha * c[q] + beta * at[q * csc];
}
