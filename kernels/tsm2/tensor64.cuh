// Tiles of float64 for the tensor cores: what a thread loads of A and of B, and the product.
//
// The tensor cores multiply 16 rows by 8 columns, 16 elements of k at a time (4 before compute capability 9.0). Threads
// come in groups of four. A's vectors are two rows of one column (ORDER 0) or two columns of one row (ORDER 1).
#pragma once
#include "tsm2/split.cuh"

constexpr int DEPTH = 16;   // of k: what the vectors of a tile reach
constexpr int VECTORS = 4;  // of a tile, a thread
// Rows of B in shared memory lie so far apart that the threads of half a warp meet different banks.
constexpr int ROW = ORDER ? T2 + 2 : T2 + 4;
constexpr int STAGE = STAGE_OF(DEPTH);
// A B with contiguous columns lies in shared memory as it does in memory, but for gaps to the same end.
constexpr int COLUMN = STAGE + (ORDER ? 8 : 4);
constexpr int WEIGHTS = STAGE * ROW > T2 * COLUMN ? STAGE * ROW : T2 * COLUMN;  // elements of a stage

INLINE int group() { return threadIdx.x % 32 / 4; }   // of four threads: rows of A and C, columns of B
INLINE int member() { return threadIdx.x % 4; }

// ORDER 0: where the vector v of tile c of a thread begins, in columns from `first_column`, and in rows from V group on.
INLINE int first_column() { return member(); }
INLINE constexpr int column_of(int, int v) { return 4 * v; }
INLINE constexpr int row_of(int c) { return 16 * c; }
// Row of C, from the warp's first one on, that the sums 2 high and 2 high + 1 of tile c belong to.
INLINE int row_of_sums(int c, int high) { return 16 * c + (ORDER ? group() + 8 * high : 2 * group() + high); }

// Which element of k the i-th number of a thread's B belongs to.
INLINE int depth(int i) { return ORDER ? i / 2 * 8 + 2 * member() + i % 2 : 4 * i + member(); }

// COPY_WIDE begins the copy of 16 bytes of B.
#define COPY_WIDE(array, at, from, there) COPY_UNIT(array, at, from, there)

// weights = B(first : first + STAGE, 0 : T2), zero outside of B. `B` is B(first, 0), of which `left` rows are there.
INLINE void fetch(B_TYPE* weights, const B_TYPE* __restrict__ B, Index rsb, Index csb, Index left, Index n, bool dense) {
  constexpr int ACROSS = power_of_two(T2);
  const int rows = int(smaller(left, STAGE));
  if (dense) {
#pragma unroll 2
    for (unsigned i = threadIdx.x * UNIT; i < STAGE * T2; i += T1 * UNIT)
      COPY_UNIT(weights, i / T2 * ROW + i % T2, B + i, int(i) < rows * T2);
    return;
  }
  if (rsb == 1) {
    fetch_patches<STAGE, ROW>(weights, B, csb, rows, n);
    return;
  }
#pragma unroll 4
  for (unsigned i = threadIdx.x; i < STAGE * ACROSS; i += T1) {
    const unsigned j = i / ACROSS, q = i % ACROSS;
    if (q < T2) COPY(weights, j * ROW + q, B + j * rsb + q * csb, int(j) < rows && q < n);
  }
}

// c += a b for a tile of 16 rows, 16 of k and 8 columns: rows group and group + 8 of a, columns 2 member and 2 member + 1
// of c; element i of b is of column group.
INLINE void multiply_tile_plain(double (&c)[4], const double (&a)[8], const double (&b)[4]) {
#pragma unroll
  for (int t = 0; t < 4; t++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const double low = __shfl_sync(~0u, a[2 * i], group() * 4 + t);
      const double high = __shfl_sync(~0u, a[2 * i + 1], group() * 4 + t);
#pragma unroll
      for (int q = 0; q < 2; q++) {
        const double x = __shfl_sync(~0u, b[i], (2 * member() + q) * 4 + t);
        c[q] += low * x;
        c[2 + q] += high * x;
      }
    }
  }
}

INLINE void multiply_tile(double (&c)[4], const double (&a)[8], const double (&b)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, "
      "{%12, %13, %14, %15}, {%0, %1, %2, %3};"
      : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]), "d"(b[1]),
        "d"(b[2]), "d"(b[3]));
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#pragma unroll
  for (int i = 0; i < 4; i++) {
#pragma unroll
    for (int r = 0; r < 2; r++)
      asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
          : "+d"(c[2 * r]), "+d"(c[2 * r + 1])
          : "d"(a[2 * i + r]), "d"(b[i]));
  }
#else
  multiply_tile_plain(c, a, b);
#endif
}

// b = the numbers of this thread in 16 rows of B, from row `first` on, in column `column` + group.
template <bool COLUMNS_OF_B>
INLINE void load_b(double (&b)[4], B_TYPE* weights, int first, int column) {
  if constexpr (COLUMNS_OF_B && ORDER == 1) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const Unit two = *reinterpret_cast<const Unit*>(&weights[(column + group()) * COLUMN + first + depth(i)]);
      b[i] = two.x[0];
      b[i + 1] = two.x[1];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++)
      b[i] = COLUMNS_OF_B ? weights[(column + group()) * COLUMN + first + depth(i)]
                          : weights[(first + depth(i)) * ROW + column + group()];
  }
}

// sum += a B(j : j + STEP, :), B in shared memory from element `first` of k on.
template <bool COLUMNS_OF_B>
INLINE void multiply(ACC (&sum)[TCF][T2 / 8][4], const Vector (&a)[TCF][T3][VECTORS], B_TYPE* weights, int first) {
#pragma unroll
  for (int t = 0; t < T3; t++) {
#pragma unroll
    for (int p = 0; p < T2 / 8; p++) {
      double b[4];
      load_b<COLUMNS_OF_B>(b, weights, first + t * DEPTH, p * 8);
#pragma unroll
      for (int c = 0; c < TCF; c++) {
        double x[8];
#pragma unroll
        for (int i = 0; i < 8; i++)  // number 2 i + r is of the r-th row of a thread, and of depth(i)
          x[i] = ORDER ? a[c][t][i / 4 * 2 + i % 2].x[i / 2 % 2] : a[c][t][i / 2].x[i % 2];
        multiply_tile(sum[c][p], x, b);
      }
    }
  }
}
