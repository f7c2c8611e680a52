// Sums over the threads of a warp, the bit patterns of elements as numbers that can be added, and the sizes of weights.
#pragma once
#include "tsm2/wide.cuh"

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

// The sum of all lanes' `total`, and the smallest `least`, to each lane.
INLINE void join_sizes(double& total, double& least) {
#pragma unroll 1
  for (int bit = 16; bit; bit /= 2) {
    total += __shfl_xor_sync(~0u, total, bit);
    least = fmin(least, __shfl_xor_sync(~0u, least, bit));
  }
}

// sum |v| and the smallest |v| of a product, from those of `count` groups of columns (kernels/check/equilibrate.cu): by a warp.
INLINE void add_sizes(const double* parts, Index count, double* sizes) {
  constexpr int AT_ONCE = 2;  // on their way from memory
  double total = 0, least = 0x1.fffffffffffffp1023;
#pragma unroll 1
  for (Index b = threadIdx.x; b < count; b += 32 * AT_ONCE) {
    double sum[AT_ONCE], one[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const bool there = b + 32 * i < count;
      sum[i] = there ? parts[2 * (b + 32 * i)] : 0;
      one[i] = there ? parts[2 * (b + 32 * i) + 1] : least;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      total += sum[i];
      least = fmin(least, one[i]);
    }
  }
  join_sizes(total, least);
  if (threadIdx.x == 0) sizes[0] = total, sizes[1] = least;
}
