// Sums over blocks that share a tile of C: the block that comes last adds what all of them have left behind, in the
// order of their numbers. So the result does not depend on who came last.
#pragma once
#include "wide.cuh"

#define PARTS_AT_ONCE (COUNT > 32 ? 2 : COUNT > 4 ? 4 : 8)  // that are on their way from memory

// Of the `splits` blocks that call this for the same `tile`, each with its part of sum, one returns true, with the whole
// sum. All threads of a block call it. `partial` holds splits T1 COUNT sums a tile, `tickets` a 0 a tile, which is 0 again
// afterwards.
template <int COUNT>
INLINE bool is_last_and_sums(ACC (&sum)[COUNT], Index tile, unsigned split, unsigned splits, ACC* partial,
                             unsigned* tickets) {
  if (splits == 1) return true;
  __shared__ int last[1];
  ACC* parts = partial + tile * splits * (COUNT * T1) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < COUNT; i++) parts[(split * COUNT + i) * T1] = sum[i];
  __threadfence();  // what this thread wrote is there before the ticket is
  __syncthreads();
  if (threadIdx.x == 0) last[0] = atomicInc(tickets + tile, splits - 1) == splits - 1;
  __syncthreads();
  if (!last[0]) return false;
  __threadfence();
#pragma unroll
  for (int i = 0; i < COUNT; i++) sum[i] = ACC(0);
#pragma unroll PARTS_AT_ONCE
  for (unsigned s = 0; s < splits; s++, parts += COUNT * T1) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) sum[i] += __ldcg(parts + i * T1);
  }
  return true;
}

// C(row, column) = alpha sum + beta C(row, column). C is not read where beta is 0.
INLINE void store(C_TYPE* at, ACC alpha, ACC sum, ACC beta) {
  const ACC c = beta == ACC(0) ? alpha * sum : alpha * sum + beta * ACC(widened(*at));
  *at = narrowed(c, C_TYPE());
}
