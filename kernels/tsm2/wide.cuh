// Elements of A as the memory likes to give them, and the types they may have.
//
// Given as macros, in front of this text:
//   A_TYPE            float, double, float16 or bfloat16: of the elements of A
//   B_TYPE            of B: A_TYPE or ACC
//   ACC               float or double: of every product and sum
//   C_TYPE            of C: A_TYPE or ACC
//   WIDTH             bytes of A in one vector: 16, or what its address and its strides are multiples of
//   ALIGNED           the latter, where vectors are wider: each is loaded in so many bytes. WIDTH where it is not given
//   LEAVES_FIRST      1, or where it is not given: lines of A leave the level-2 cache first; 0: they pass it like others
//
// PTX stands behind `#if __CUDA_ARCH__`; what is plain has the same results, and serves where kernels run on a CPU.
#pragma once
#include "tsm2/index.cuh"

// 16-bit formats: their bits, whatever the headers of the toolkit have, which a run-time compiler may not find.
struct float16 {
  unsigned short bits;
};
struct bfloat16 {
  unsigned short bits;
};

INLINE float from_bits(unsigned bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
INLINE unsigned to_bits(float x) {
  unsigned bits;
  memcpy(&bits, &x, 4);
  return bits;
}

// Subnormal numbers are scaled by the exponent that the format has less than float: 2^112 is exact, and so is the rest.
INLINE float widened_plain(float16 x) {
  const unsigned sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  const float finite = from_bits(rest << 13) * 0x1p112f;
  return from_bits(sign | (rest >= 0x7c00u ? 0x7f800000u | (rest & 0x3ffu) << 13 : to_bits(finite)));
}

// Rounded to nearest, ties to even; NaN stays NaN.
INLINE float16 narrowed_plain(float x, float16) {
  const unsigned bits = to_bits(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  unsigned half;
  if (size > 0x7f800000u) {
    half = 0x7fffu;
  } else if (size >= 0x477ff000u) {  // 65520 and more round to infinity
    half = 0x7c00u;
  } else if (size < 0x38800000u) {  // subnormal: an addition to 0.5 leaves the rounded digits at the end
    half = to_bits(from_bits(size) + 0.5f) - to_bits(0.5f);
  } else {
    half = (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13;
  }
  return {static_cast<unsigned short>(sign | half)};
}

INLINE bfloat16 narrowed_plain(float x, bfloat16) {
  const unsigned bits = to_bits(x);
  const unsigned rounded = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffffffu : bits + 0x7fffu + (bits >> 16 & 1u);
  return {static_cast<unsigned short>(rounded >> 16)};
}

INLINE float widened(float16 x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  return widened_plain(x);
#endif
}
INLINE float widened(bfloat16 x) { return from_bits(unsigned(x.bits) << 16); }
INLINE float widened(float x) { return x; }
INLINE double widened(double x) { return x; }

INLINE float16 narrowed(float x, float16 type) {
#ifdef __CUDA_ARCH__
  float16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#else
  return narrowed_plain(x, type);
#endif
}
INLINE bfloat16 narrowed(float x, bfloat16 type) {
#ifdef __CUDA_ARCH__
  bfloat16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#else
  return narrowed_plain(x, type);
#endif
}
INLINE float narrowed(float x, float) { return x; }
INLINE double narrowed(double x, double) { return x; }
INLINE float narrowed(double x, float) { return float(x); }

// Elements of A in one vector.
constexpr int V = WIDTH / int(sizeof(A_TYPE));

struct __align__(WIDTH) Vector {
  A_TYPE x[V];
};

#ifndef ALIGNED
#define ALIGNED WIDTH
#endif
#if ALIGNED == 16
typedef uint4 Word;
#elif ALIGNED == 8
typedef uint2 Word;
#elif ALIGNED == 4
typedef unsigned Word;
#else
typedef unsigned short Word;
#endif

#ifndef LEAVES_FIRST
#define LEAVES_FIRST 1
#endif
#if LEAVES_FIRST
#define LOAD __ldcs
#else
#define LOAD __ldcg
#endif

INLINE Vector load(const A_TYPE* at) {
  constexpr int EACH = ALIGNED / int(sizeof(A_TYPE));
  Vector a;
#pragma unroll
  for (int i = 0; i < V; i += EACH) {
    const Word word = LOAD(reinterpret_cast<const Word*>(at + i));
    memcpy(&a.x[i], &word, ALIGNED);
  }
  return a;
}

// The first `count` elements, zero beyond. All that is there where count >= V.
INLINE Vector load(const A_TYPE* at, Index count) {
  if (count >= V) return load(at);
  Vector a;
  memset(&a, 0, WIDTH);
#pragma unroll
  for (int i = 0; i < V; i++)
    if (i < count) a.x[i] = at[i];
  return a;
}

// Values that are used together lie in shared memory in units of 16 bytes: one load each.
constexpr int UNIT = 16 / int(sizeof(ACC));

struct __align__(16) Unit {
  ACC x[UNIT];
};

INLINE constexpr int rounded_up(int x, int to) { return (x + to - 1) / to * to; }
INLINE constexpr int common_divisor(int x, int y) { return y ? common_divisor(y, x % y) : x; }
INLINE constexpr int power_of_two(int x) { return x <= 1 ? 1 : 2 * power_of_two((x + 1) / 2); }

// Copies of elements of B to shared memory. On GPUs that can do so (compute capability 8.0) they go on by themselves
// where the type stays. COPY begins array[at] = there ? *from : 0, COPY_UNIT, where B is of type ACC, the same of the 16 bytes
// from there on, and copies_done() waits for all that this thread began.
template <class X, class Y>
constexpr bool same = false;
template <class X>
constexpr bool same<X, X> = true;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <int BYTES>
INLINE void copy(void* to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(unsigned(__cvta_generic_to_shared(to))), "l"(from),
               "n"(BYTES), "r"(there ? BYTES : 0)
               : "memory");
}
#define COPY(array, at, from, there)                  \
  if constexpr (same<B_TYPE, ACC>)                    \
    copy<sizeof(ACC)>(&array[at], from, there);       \
  else                                                \
    array[at] = there ? ACC(widened(*(from))) : ACC(0)
#define COPY_UNIT(array, at, from, there) copy<16>(&array[at], from, there)
INLINE void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#else
#define COPY(array, at, from, there) array[at] = there ? ACC(widened(*(from))) : ACC(0)
#define COPY_UNIT(array, at, from, there) \
  for (int unit = 0; unit < UNIT; unit++) COPY(array, (at) + unit, (from) + unit, there)
INLINE void copies_done() {}
#endif

// weights = B(first : first + DEEP, 0 : T2), zero outside of B, of contiguous columns; rows lie APART in weights. `B`
// is B(first, 0), of which `rows` rows are there. A warp copies PATCH rows of 4 columns at a time: so it reads whole
// sectors of memory, 32 bytes, and writes to different banks where APART is an odd number of 4 elements. A block copies
// T1 / 4 rows.
constexpr int PATCH = 32 / int(sizeof(ACC));

template <int DEEP, int APART>
INLINE void fetch_patches(ACC* weights, const B_TYPE* __restrict__ B, Index csb, int rows, Index n) {
#pragma unroll 1
  for (int q = threadIdx.x / PATCH % 4; q < T2; q += 4) {
#pragma unroll 4
    for (int j = threadIdx.x / (4 * PATCH) * PATCH + threadIdx.x % PATCH; j < DEEP; j += T1 / 4)
      COPY(weights, j * APART + q, B + j + q * csb, j < rows && q < n);
  }
}

// Where a tile begins so that it is whole, if there are that many rows and they are a multiple of `unit`: the last one
// before its `own` first row, where rows are the tile's before it, which stores them.
INLINE Index whole_tile(Index own, int tile, Index m, int unit) {
  return m % unit == 0 && m >= tile ? smaller(own, m - tile) : own;
}

// Whether the rows of B, T2 elements each, follow one another without a gap, from a multiple of 16 bytes on.
INLINE bool is_dense(const B_TYPE* B, Index rsb, Index csb, Index n) {
  return csb == 1 && rsb == T2 && n == T2 && reinterpret_cast<unsigned long long>(B) % 16 == 0;
}
