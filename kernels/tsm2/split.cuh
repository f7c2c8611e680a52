// Sums over blocks that share a tile of C: the block that comes last adds what all of them have left behind, in the
// order of their numbers. So the result does not depend on who came last.
#pragma once
#include "tsm2/pieces.cuh"

#define PARTS_AT_ONCE (COUNT > 32 ? 2 : COUNT > 4 ? 4 : 8)  // that are on their way from memory

// Of the `splits` blocks that call this for the same `tile`, each with its part of sum, one returns true, with the whole
// sum. All threads of a block call it. `partial` holds splits T1 COUNT sums a tile, which come and go in pieces of up to
// 16 bytes; `tickets` a 0 a tile, which is 0 again afterwards.
template <int COUNT>
INLINE bool is_last_and_sums(ACC (&sum)[COUNT], Index tile, unsigned split, unsigned splits, ACC* partial,
                             unsigned* tickets) {
  if (splits == 1) return true;
  __shared__ int last[1];
  typedef Piece<ACC, divisor(COUNT * int(sizeof(ACC)), 16)> Sums;
  typedef typename Bits<sizeof(Sums)>::Word Words;
  constexpr int EACH = sizeof(Sums) / sizeof(ACC), PIECES = COUNT / EACH;  // of a part
  Words* parts = reinterpret_cast<Words*>(partial + tile * splits * (COUNT * T1)) + threadIdx.x;
#pragma unroll
  for (int p = 0; p < PIECES; p++) {
    Sums sums;
#pragma unroll
    for (int i = 0; i < EACH; i++) sums.x[i] = sum[p * EACH + i];
    parts[(split * PIECES + p) * T1] = word_of(sums);
  }
  __threadfence();  // what this thread wrote is there before the ticket is
  __syncthreads();
  if (threadIdx.x == 0) last[0] = atomicInc(tickets + tile, splits - 1) == splits - 1;
  __syncthreads();
  if (!last[0]) return false;
  __threadfence();
#pragma unroll
  for (int i = 0; i < COUNT; i++) sum[i] = ACC(0);
#pragma unroll PARTS_AT_ONCE
  for (unsigned s = 0; s < splits; s++, parts += PIECES * T1) {
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const Sums sums = piece_of<Sums>(__ldcg(parts + p * T1));
#pragma unroll
      for (int i = 0; i < EACH; i++) sum[p * EACH + i] += sums.x[i];
    }
  }
  return true;
}

// C(r, q : q + COUNT) = alpha sum + beta C(r, q : q + COUNT), `at` being C(r, q), of which the first `count` columns are
// there. C is not read where beta is 0; what then lies side by side is stored 16 bytes at a time.
template <int COUNT>
INLINE void store_row(C_TYPE* at, Index csc, Index count, ACC alpha, const ACC* sum, ACC beta) {
  constexpr int EACH = 16 / int(sizeof(C_TYPE));
  if constexpr (COUNT % EACH == 0) {
    if (beta == ACC(0) && csc == 1 && count >= COUNT && reinterpret_cast<unsigned long long>(at) % 16 == 0) {
#pragma unroll
      for (int q = 0; q < COUNT; q += EACH) {
        Piece<C_TYPE, 16> c;
#pragma unroll
        for (int i = 0; i < EACH; i++) c.x[i] = narrowed(alpha * sum[q + i], C_TYPE());
        *reinterpret_cast<uint4*>(at + q) = word_of(c);
      }
      return;
    }
  }
  if (beta == ACC(0)) {
#pragma unroll
    for (int q = 0; q < COUNT; q++, at += csc)
      if (q < count) *at = narrowed(alpha * sum[q], C_TYPE());
  } else {
#pragma unroll
    for (int q = 0; q < COUNT; q++, at += csc)
      if (q < count) *at = narrowed(alpha * sum[q] + beta * ACC(widened(*at)), C_TYPE());
  }
}
