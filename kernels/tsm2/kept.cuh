// Memory of the device that outlives a call, and that verdicts rest on: three copies, one behind the other. A bit that flips
// in one of them changes nothing.
#pragma once
#include "tsm2/index.cuh"

// Element i of `count` that are kept, by way of the read-only cache: no kernel writes them.
template <class T>
INLINE T of_three(const T* kept, Index count, Index i) {
  const T x = __ldg(kept + i), y = __ldg(kept + count + i), z = __ldg(kept + 2 * count + i);
  return x == y ? x : z;  // NaN, which nothing is when it is written, equals nothing
}
