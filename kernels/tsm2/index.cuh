// What every kernel is written with.
#pragma once

typedef long long Index;  // m k may exceed 2^32

#define INLINE __device__ __forceinline__

INLINE Index smaller(Index x, Index y) { return x < y ? x : y; }
