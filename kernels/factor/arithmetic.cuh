// Products on the tensor cores, and float arithmetic that keeps subnormals: CuPy compiles with -ftz=true, which flushes
// them wherever the compiler writes the instruction.
//
// The tests of the panel kernel replace this file together with cluster.cuh.
#pragma once
#include "tsm2/index.cuh"

// c += a b of 16 x 8 and 8 x 8 elements; c: rows lane / 4 and lane / 4 + 8, columns 2 (lane % 4) and the next one;
// a: the same rows in columns lane % 4 (a0, a1) and lane % 4 + 4 (a2, a3); b: those rows of column lane / 4.
INLINE void multiply_tile(double& c0, double& c1, double& c2, double& c3, double a0, double a1, double a2, double a3,
                          double b0, double b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+d"(c0), "+d"(c1), "+d"(c2), "+d"(c3)
      : "d"(a0), "d"(a1), "d"(a2), "d"(a3), "d"(b0), "d"(b1));
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define MULTIPLY_QUARTER(x, y, a, b)                                                        \
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};" \
      : "+d"(x), "+d"(y)                                                                    \
      : "d"(a), "d"(b))
  MULTIPLY_QUARTER(c0, c1, a0, b0);
  MULTIPLY_QUARTER(c2, c3, a1, b0);
  MULTIPLY_QUARTER(c0, c1, a2, b1);
  MULTIPLY_QUARTER(c2, c3, a3, b1);
#undef MULTIPLY_QUARTER
#else
  const int group = threadIdx.x % 32 / 4, member = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int t = 0; t < 4; t++) {
      const double high = __shfl_sync(~0u, half ? a2 : a0, group * 4 + t);
      const double low = __shfl_sync(~0u, half ? a3 : a1, group * 4 + t);
      const double left = __shfl_sync(~0u, half ? b1 : b0, 8 * member + t);
      const double right = __shfl_sync(~0u, half ? b1 : b0, 8 * member + 4 + t);
      c0 = fma(high, left, c0), c1 = fma(high, right, c1);
      c2 = fma(low, left, c2), c3 = fma(low, right, c3);
    }
#endif
}

INLINE double times(double x, double y) { return x * y; }
INLINE double plus_product(double z, double x, double y) { return fma(x, y, z); }
INLINE double minus_product(double z, double x, double y) { return fma(-x, y, z); }
INLINE double negative(double x) { return -x; }

#ifdef __CUDA_ARCH__
INLINE float times(float x, float y) {
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(x), "f"(y));
  return product;
}
INLINE float plus_product(float z, float x, float y) {
  float sum;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(x), "f"(y), "f"(z));
  return sum;
}
INLINE float minus_product(float z, float x, float y) {
  float sum;
  asm("{\n.reg .f32 minus;\nneg.f32 minus, %1;\nfma.rn.f32 %0, minus, %2, %3;\n}" : "=f"(sum) : "f"(x), "f"(y), "f"(z));
  return sum;
}
INLINE float negative(float x) { return __uint_as_float(__float_as_uint(x) ^ 0x80000000u); }
#else
INLINE float times(float x, float y) { return x * y; }
INLINE float plus_product(float z, float x, float y) { return fma(x, y, z); }
INLINE float minus_product(float z, float x, float y) { return fma(-x, y, z); }
INLINE float negative(float x) { return -x; }
#endif
