// Elements as float64.
#pragma once
#include "tsm2/index.cuh"

// An element as a float64. CuPy's -ftz=true would make 0 of a subnormal float.
INLINE double exactly(double x) { return x; }
INLINE double exactly(float x) {
#ifdef __CUDA_ARCH__
  double y;
  asm("cvt.f64.f32 %0, %1;" : "=d"(y) : "f"(x));
  return y;
#else
  return double(x);
#endif
}
