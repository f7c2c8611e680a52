// Sums over the threads of a warp, and the bit patterns of elements as numbers that can be added.
#pragma once
#include "wide.cuh"

typedef unsigned long long Bits;

template <class To, class From>
INLINE To same_bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "of one size");
  To y;
  memcpy(&y, &x, sizeof(y));
  return y;
}

INLINE Bits pattern(float16 x) { return x.bits; }
INLINE Bits pattern(bfloat16 x) { return x.bits; }
INLINE Bits pattern(float x) { return to_bits(x); }
INLINE Bits pattern(double x) { return same_bits<Bits>(x); }

// Adds the first COUNT of x over the threads of a warp: each exchange, with the lane that differs in BIT, halves what a
// thread has left to add.
template <int COUNT, int BIT = 1, class T, int SIZE>
INLINE T over_warp(T (&x)[SIZE]) {
  if constexpr (BIT == 32) {
    return x[0];
  } else {
    constexpr int HALF = (COUNT + 1) / 2;
    const bool upper = threadIdx.x & BIT;
    if (COUNT == 1) x[0] += __shfl_xor_sync(~0u, x[0], BIT);
#pragma unroll
    for (int i = 0; COUNT > 1 && i < HALF; i++) {
      const T other = i + HALF < COUNT ? x[(i + HALF) % SIZE] : T(0);
      const T given = upper ? x[i] : other, kept = upper ? other : x[i];
      x[i] = kept + __shfl_xor_sync(~0u, given, BIT);
    }
    return over_warp<HALF, 2 * BIT>(x);
  }
}

// Which of the COUNT sums over_warp returns to a lane; COUNT where another lane has it too.
template <int COUNT>
INLINE int sum_of(int lane) {
  int first = 0, mine = COUNT;
#pragma unroll
  for (int bit = 1, count = COUNT; bit < 32; bit *= 2, count = (count + 1) / 2) {
    const int half = (count + 1) / 2;
    const bool upper = lane & bit;
    first += upper && count > 1 ? half : 0;
    mine = upper ? (count > 1 ? mine - half : 0) : min(mine, half);
  }
  return mine > 0 ? first : COUNT;
}
