// Memory of the device that outlives a call, and that verdicts rest on: three copies, one behind the other. A bit that flips
// in one of them changes nothing.
#pragma once
#include "tsm2/index.cuh"

// By way of the read-only cache: no kernel writes what is kept.
template <class T>
INLINE T read_only(const T* at) {
#ifdef __CUDA_ARCH__
  return __ldg(at);
#else
  return *at;
#endif
}

// Element i of `count` that are kept.
template <class T>
INLINE T of_three(const T* kept, Index count, Index i) {
  const T x = read_only(kept + i), y = read_only(kept + count + i), z = read_only(kept + 2 * count + i);
  return x == y ? x : z;  // NaN, which nothing is when it is written, equals nothing
}
