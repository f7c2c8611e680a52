// Tiles of 16-bit elements for the tensor cores: what a thread loads of A and of B, and the product.
//
// The tensor cores multiply 16 rows by 8 columns, 16 elements of k at a time. Threads come in groups of four, which have 8
// elements of k each; products are exact, sums are float32 and not rounded to nearest. A's vectors are 8 columns of a row
// (ORDER 1), or 8 rows of a column, of which 8 columns make up four tiles (ORDER 0).
#pragma once
#include "tsm2/split.cuh"

constexpr int DEPTH = 32;   // of k: what the vectors of a tile reach
constexpr int VECTORS = 2;  // of a tile, a thread
constexpr int STAGE = STAGE_OF(DEPTH);
// A B with contiguous columns lies in shared memory as it does in memory, but for gaps that spread them over the banks.
constexpr int COLUMN = STAGE + 32;
constexpr int WEIGHTS = COLUMN * T2;  // elements of a stage

INLINE int group() { return threadIdx.x % 32 / 4; }   // of four threads: rows of A and C, columns of B
INLINE int member() { return threadIdx.x % 4; }

// ORDER 0: where the vector v of tile c of a thread begins, in columns from `first_column`, and in rows from V group on.
INLINE int first_column() { return 8 * member(); }
INLINE constexpr int column_of(int c, int v) { return c % 4 * 2 + v; }
INLINE constexpr int row_of(int c) { return c / 4 * 64; }
// Row of C, from the warp's first one on, that the sums 2 high and 2 high + 1 of tile c belong to.
INLINE int row_of_sums(int c, int high) {
  return ORDER ? 16 * c + group() + 8 * high : row_of(c) + 8 * group() + c % 4 * 2 + high;
}

// Where element q of row j of B lies in shared memory: the rows that the four threads of a group read at the same time
// side by side, and of eight such rows the same columns in different banks.
INLINE unsigned place(unsigned j, unsigned q) {
  const unsigned at = j % 8 * 4 + j % DEPTH / 8, swap = T2 == 16 ? at / 4 % 2 : T2 == 32 ? at / 2 % 4 : 0;
  return (j / DEPTH * DEPTH + at) * T2 + (q ^ swap * 8);
}

// COPY_HALVES begins array[at : at + count] = there ? from[0 : count] : 0, and COPY_WIDE that of 16 bytes.
#define COPY_WIDE(array, at, from, there) COPY_HALVES(8, array, at, from, there)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define COPY_HALVES(count, array, at, from, there) copy<2 * (count)>(&array[at], from, there)
#else
#define COPY_HALVES(count, array, at, from, there) \
  for (int e = 0; e < (count); e++) array[(at) + e] = there ? (from)[e] : B_TYPE{0}
#endif

// weights = B(first : first + STAGE, 0 : N), one copy a row. The columns beyond stay as they are.
template <int N>
INLINE void fetch_few(B_TYPE* weights, const B_TYPE* __restrict__ B, Index rsb, int rows) {
#pragma unroll 1
  for (int j = threadIdx.x; j < STAGE; j += T1) COPY_HALVES(N, weights, place(j, 0), B + j * rsb, j < rows);
}

// Zero in all stages, once, for columns that nothing is copied to.
INLINE void clear_stages(B_TYPE* weights) {
#pragma unroll 1
  for (int i = threadIdx.x; i < 2 * WEIGHTS; i += T1) weights[i] = B_TYPE{0};
  __syncthreads();
}

// Whether rows of B are N elements that can be copied at once.
INLINE bool is_row(const B_TYPE* B, Index rsb, Index csb, Index n, int N) {
  return n == N && csb == 1 && rsb % N == 0 && reinterpret_cast<unsigned long long>(B) % (2 * N) == 0;
}

// weights = B(first : first + STAGE, 0 : T2), zero outside of B. `B` is B(first, 0), of which `left` rows are there.
INLINE void fetch(B_TYPE* weights, const B_TYPE* __restrict__ B, Index rsb, Index csb, Index left, Index n, bool dense) {
  constexpr int ACROSS = power_of_two(T2);
  const int rows = int(smaller(left, STAGE));
  if (dense) {
#pragma unroll 2
    for (unsigned i = threadIdx.x * 8; i < STAGE * T2; i += T1 * 8)
      COPY_WIDE(weights, place(i / T2, i % T2), B + i, int(i) < rows * T2);
    return;
  }
  if (is_row(B, rsb, csb, n, 4)) {
    fetch_few<4>(weights, B, rsb, rows);
    return;
  }
  if (is_row(B, rsb, csb, n, 2)) {
    fetch_few<2>(weights, B, rsb, rows);
    return;
  }
  // One by one: what cannot be copied waits in registers, ONCE elements at a time.
  constexpr int APART = T1 / ACROSS, ONCE = T2 == 16 ? 2 : 4;
  const int q = threadIdx.x % ACROSS;
  if (q >= T2) return;
  B += threadIdx.x / ACROSS * rsb + q * csb;
#pragma unroll 1
  for (int j = threadIdx.x / ACROSS; j < STAGE; j += ONCE * APART) {
    B_TYPE x[ONCE];
#pragma unroll
    for (int i = 0; i < ONCE; i++, B += APART * rsb) x[i] = j + i * APART < rows && q < n ? *B : B_TYPE{0};
#pragma unroll
    for (int i = 0; i < ONCE; i++)
      if (j + i * APART < STAGE) weights[place(j + i * APART, q)] = x[i];
  }
}

INLINE A_TYPE of_pair(unsigned pair, int i) {
  A_TYPE x;
  const unsigned short bits = static_cast<unsigned short>(pair >> 16 * i);
  memcpy(&x, &bits, sizeof(bits));
  return x;
}

// The same of pairs of 16-bit elements.
INLINE void multiply_tile_plain(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                unsigned b1) {
  const unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
#pragma unroll
  for (int t = 0; t < 4; t++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const unsigned low = __shfl_sync(~0u, a[2 * i], group() * 4 + t);
      const unsigned high = __shfl_sync(~0u, a[2 * i + 1], group() * 4 + t);
#pragma unroll
      for (int q = 0; q < 2; q++) {
        const unsigned x = __shfl_sync(~0u, b[i], (2 * member() + q) * 4 + t);
#pragma unroll
        for (int e = 0; e < 2; e++) {
          c[q] += float(widened(of_pair(low, e))) * float(widened(of_pair(x, e)));
          c[2 + q] += float(widened(of_pair(high, e))) * float(widened(of_pair(x, e)));
        }
      }
    }
  }
}

INLINE void multiply_tile(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define MMA_16(type)                                                                                                  \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "    \
      "{%0, %1, %2, %3};"                                                                                             \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                                \
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
  if constexpr (same<A_TYPE, bfloat16>)
    MMA_16("bf16");
  else
    MMA_16("f16");
#else
  multiply_tile_plain(c, a0, a1, a2, a3, b0, b1);
#endif
}

// b = elements 8 member + 2 i and 8 member + 2 i + 1 of 32 rows of B, from row `first` on, in column `column` + group.
template <bool COLUMNS_OF_B>
INLINE void load_b(unsigned (&b)[4], B_TYPE* weights, int first, int column) {
  if constexpr (COLUMNS_OF_B) {
    const Vector eight =
        *reinterpret_cast<const Vector*>(&weights[(column + group()) * COLUMN + first + 8 * member()]);
    memcpy(b, &eight, 16);
    return;
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  // Thread r + 8 i names the r-th of 8 rows that make up b[i].
  const int r = threadIdx.x % 8, i = threadIdx.x % 32 / 8;
  const unsigned at = __cvta_generic_to_shared(&weights[place(first + r / 2 * 8 + 2 * i + r % 2, column)]);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(at)
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const B_TYPE low = weights[place(first + member() * 8 + 2 * i, column + group())];
    const B_TYPE high = weights[place(first + member() * 8 + 2 * i + 1, column + group())];
    b[i] = low.bits | unsigned(high.bits) << 16;
  }
#endif
}

// Pairs of elements of k of the two rows that this thread has of tile c: pair i is of 8 member + 2 i and the next one.
INLINE void pairs_of(unsigned (&low)[4], unsigned (&high)[4], const Vector (&a)[TCF][T3][VECTORS], int c, int t) {
  if constexpr (ORDER == 1) {
    memcpy(low, &a[c][t][0], 16);
    memcpy(high, &a[c][t][1], 16);
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      unsigned one[4], next[4];  // of columns 2 i and 2 i + 1: rows 2 (c % 4) and 2 (c % 4) + 1 in a word
      memcpy(one, &a[c / 4 * 4 + i][t][0], 16);
      memcpy(next, &a[c / 4 * 4 + i][t][1], 16);
      low[i] = (one[c % 4] & 0xffffu) | next[c % 4] << 16;
      high[i] = one[c % 4] >> 16 | (next[c % 4] & 0xffff0000u);
    }
  }
}

// sum += a B(j : j + STEP, :), B in shared memory from element `first` of k on.
template <bool COLUMNS_OF_B>
INLINE void multiply(ACC (&sum)[TCF][T2 / 8][4], const Vector (&a)[TCF][T3][VECTORS], B_TYPE* weights, int first) {
#pragma unroll
  for (int t = 0; t < T3; t++) {
#pragma unroll
    for (int p = 0; p < T2 / 8; p++) {
      unsigned b[4];
      load_b<COLUMNS_OF_B>(b, weights, first + t * DEPTH, p * 8);
#pragma unroll
      for (int c = 0; c < TCF; c++) {
        unsigned low[4], high[4];
        pairs_of(low, high, a, c, t);
        multiply_tile(sum[c][p], low[0], high[0], low[1], high[1], b[0], b[1]);
        multiply_tile(sum[c][p], low[2], high[2], low[3], high[3], b[2], b[3]);
      }
    }
  }
}
