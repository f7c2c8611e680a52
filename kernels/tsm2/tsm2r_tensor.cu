// TSM2R on tensor cores: C = alpha A B + beta C, A large (m x k), B some columns (k x n, n <= T2), where the multiply-adds
// would keep the other units busy for longer than the memory takes. float64 is float64 (IEEE) on tensor cores too; 16-bit
// elements are multiplied exactly and added in float32, without rounding to nearest: so each stage is added to a sum of
// its own that is rounded so.
//
// A warp has TCF tiles of 16 rows. A thread loads vectors of A just as the tensor cores want them in registers: rows and
// elements of k may be taken in any order, as long as B follows. The warps of a block multiply different rows by the same
// part of B. The next elements of A, and of B, are on their way while the present ones are multiplied. Slices of k are
// added in memory (split.cuh), always in the same order.
//
// Launch   (ceil(m / (TCF T1 / 2)), slices, products) blocks of T1 threads
// Macros   those of wide.cuh, WIDTH = 16; SIZE bytes of an element of A; ORDER 0 where the columns of A are contiguous, 1
//          where the rows are; T1 threads; T2 columns of C, a multiple of 8; T3 times DEPTH elements of k are loaded
//          at a time; TCF tiles of a warp, a multiple of 4 in columns of 16-bit elements; PAIRS times 2 such steps,
//          for which B is fetched at once; BLOCKS of a multiprocessor; TURNED 1 where B's columns are contiguous and
//          begin at multiples of 16 bytes, and are read so; ENTRY the name of the kernel
// Storage  A(i, j) = A[i + j lda] or A[i lda + j], the contiguous lines begin at multiples of ALIGNED bytes;
//          B(i, j) = B[i rsb + j csb], of the type of A; C(i, j) = C[i rsc + j csc]; product b lies b times bsa, bsb, bsc
//          further on
// Edges    m, k, n arbitrary; nothing outside of the matrices is read. `slice` is what a block has of k, a multiple of V.
#include "tsm2/split.cuh"

#define STAGE_OF(depth) (depth * T3 * 2 * PAIRS)  // of k, for which B is fetched at a time
#if SIZE == 8
#include "tsm2/tensor64.cuh"
#else
#include "tsm2/tensor16.cuh"
#endif

constexpr int WARPS = T1 / 32;
constexpr int STEP = DEPTH * T3;  // of k
constexpr int BANDS = T2 / 8;     // of 8 columns
static_assert(WIDTH == 16 && T2 % 8 == 0 && same<A_TYPE, B_TYPE>, "no such kernel");
static_assert(SIZE == 8 || ORDER == 1 || TCF % 4 == 0, "columns of 16-bit elements make up four tiles at a time");

// Where the vectors of a thread begin. ORDER 0: rows V group to V group + V - 1, from column `first_column` on. ORDER 1:
// rows group and group + 8 of each tile, every fourth vector of them; a row that is not there repeats the last one.
constexpr int LINES = ORDER ? 2 * TCF : 1;

INLINE void find_lines(const A_TYPE* (&lines)[LINES], const A_TYPE* __restrict__ A, Index lda, Index row, Index m,
                       Index begin) {
  if constexpr (ORDER == 0) {
    lines[0] = A + row + V * group() + (begin + first_column()) * lda;
  } else {
#pragma unroll
    for (int i = 0; i < LINES; i++) lines[i] = A + smaller(row + group() + 8 * i, m - 1) * lda + begin + member() * V;
  }
}

// a = the vectors of TCF tiles, T3 times DEPTH elements deep, from element `done` of k on, counted as A lies in memory.
INLINE void load_tiles(Vector (&a)[TCF][T3][VECTORS], const A_TYPE* const (&lines)[LINES], Index lda, Index done) {
#pragma unroll
  for (int t = 0; t < T3; t++) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
#pragma unroll
      for (int c = 0; c < TCF; c++)
        a[c][t][v] = ORDER ? load(lines[(2 * c + v % 2) % LINES] + done + t * DEPTH + v / 2 * (4 * V))
                           : load(lines[0] + done + (t * DEPTH + column_of(c, v)) * lda + row_of(c));
    }
  }
}

// The same where only `rows` from the warp's first one on are there, and `left` elements of k: zero beyond.
INLINE void load_tiles(Vector (&a)[TCF][T3][VECTORS], const A_TYPE* const (&lines)[LINES], Index lda, Index done,
                       Index rows, Index left) {
#pragma unroll
  for (int t = 0; t < T3; t++) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
#pragma unroll
      for (int c = 0; c < TCF; c++) {
        const int j = t * DEPTH + (ORDER ? v / 2 * (4 * V) + member() * V : column_of(c, v) + first_column());
        a[c][t][v] = ORDER ? load(lines[(2 * c + v % 2) % LINES] + done + t * DEPTH + v / 2 * (4 * V), left - j)
                           : load(lines[0] + done + (t * DEPTH + column_of(c, v)) * lda + row_of(c),
                                  j < left ? rows - row_of(c) - V * group() : 0);
      }
    }
  }
}

// weights = columns of B(first : first + STAGE, 0 : T2), zero outside of B and in 16 bytes that B ends in. `B` is
// B(first, 0), of which `left` rows are there.
INLINE void fetch_turned(B_TYPE* weights, const B_TYPE* __restrict__ B, Index csb, Index left, Index n) {
  const int rows = int(smaller(left, STAGE));
#pragma unroll 4
  for (int i = threadIdx.x * V; i < STAGE * T2; i += T1 * V) {
    const int q = i / STAGE, j = i % STAGE;
    COPY_WIDE(weights, q * COLUMN + j, B + j + q * csb, j + V <= rows && q < n);
  }
}

INLINE void fetch_stage(B_TYPE* weights, const B_TYPE* __restrict__ B, Index rsb, Index csb, Index left, Index n,
                        bool dense) {
  if constexpr (TURNED)
    fetch_turned(weights, B, csb, left, n);
  else
    fetch(weights, B, rsb, csb, left, n, dense);
}

INLINE void clear(ACC (&sum)[TCF][BANDS][4]) {
#pragma unroll
  for (int c = 0; c < TCF; c++)
#pragma unroll
    for (int p = 0; p < BANDS; p++)
#pragma unroll
      for (int i = 0; i < 4; i++) sum[c][p][i] = ACC(0);
}

// total += sum, and sum = 0
INLINE void add(ACC (&total)[TCF][BANDS][4], ACC (&sum)[TCF][BANDS][4]) {
#pragma unroll
  for (int c = 0; c < TCF; c++)
#pragma unroll
    for (int p = 0; p < BANDS; p++)
#pragma unroll
      for (int i = 0; i < 4; i++) total[c][p][i] += sum[c][p][i];
  clear(sum);
}

extern "C" __global__ void __launch_bounds__(T1, BLOCKS)
    ENTRY(Index m, Index k, Index n, ACC alpha, const A_TYPE* __restrict__ A, Index lda, Index bsa,
          const B_TYPE* __restrict__ B, Index rsb, Index csb, Index bsb, ACC beta, C_TYPE* C, Index rsc, Index csc,
          Index bsc, Index slice, ACC* partial, unsigned* tickets) {
  __shared__ __align__(16) B_TYPE weights[2 * WEIGHTS];
  constexpr int ROWS = WARPS * TCF * 16;
  const Index own_row = Index(blockIdx.x) * ROWS;
  // Vectors of columns stay where they are; of rows, the last one is repeated.
  const Index tile_row = ORDER == 0 ? whole_tile(own_row, ROWS, m, ALIGNED / SIZE) : own_row;
  const Index row = tile_row + threadIdx.x / 32 * (TCF * 16);
  const Index begin = smaller(k, blockIdx.y * slice), end = smaller(k, begin + slice);
  A += blockIdx.z * bsa;
  B += blockIdx.z * bsb + begin * rsb;
  C += blockIdx.z * bsc;
  const bool dense = is_dense(B, rsb, csb, n);
#if SIZE == 2
  if (is_row(B, rsb, csb, n, 2) || is_row(B, rsb, csb, n, 4)) clear_stages(weights);
#endif
  const A_TYPE* lines[LINES];
  find_lines(lines, A, lda, row, m, begin);

  ACC total[TCF][BANDS][4], sum[TCF][BANDS][4];
  clear(total);
  clear(sum);

  // Steps of all elements of k and, where they are read in vectors, all rows: these take no comparison a load.
  const bool whole = ORDER == 1 || tile_row + ROWS <= m;
  const int steps = whole ? int((end - begin) / STEP) : 0;
  const Index step = ORDER ? STEP : STEP * lda;
  Index done = 0;
  if (steps) {
    Vector tiles[2][TCF][T3][VECTORS];
    fetch_stage(weights, B, rsb, csb, end - begin, n, dense);
    load_tiles(tiles[0], lines, lda, done);
    int stage = 0;
#pragma unroll 1
    for (int s = 0; s < steps; s += 2 * PAIRS) {
      copies_done();
      __syncthreads();
      // the next stage of B is on its way while this one is multiplied
      const Index next = (s + 2 * PAIRS) * Index(STEP);
      fetch_stage(weights + (1 - stage) * WEIGHTS, B + next * rsb, rsb, csb, end - begin - next, n, dense);
#pragma unroll 1
      for (int i = 0; i < 2 * PAIRS; i += 2) {
        // sum += A(rows, j : j + STEP) B(j : j + STEP, :), while the next elements of A are on their way; after the last
        // step it is loaded once more
#pragma unroll
        for (int half = 0; half < 2; half++) {
          if (s + i + half + 1 < steps) done += step;
          load_tiles(tiles[1 - half], lines, lda, done);
          if (s + i + half < steps)
            multiply<TURNED>(sum, tiles[half], weights + stage * WEIGHTS, (i + half) * STEP);
        }
      }
      stage = 1 - stage;
      if constexpr (SIZE == 2) add(total, sum);
    }
    copies_done();
    done += step;
  }
#pragma unroll 1
  for (Index first = begin + Index(steps) * STEP; first < end; first += STEP, done += step) {
    Vector tiles[TCF][T3][VECTORS];
    __syncthreads();
    fetch(weights, B + (first - begin) * rsb, rsb, csb, end - first, n, dense);
    copies_done();
    __syncthreads();
    load_tiles(tiles, lines, lda, done, m - row, end - first);
    multiply<false>(sum, tiles, weights, 0);
  }

  if constexpr (SIZE == 2) add(total, sum);
  ACC mine[TCF * BANDS * 4];
#pragma unroll
  for (int i = 0; i < TCF * BANDS * 4; i++)
    mine[i] = (SIZE == 2 ? total : sum)[i / 4 / BANDS][i / 4 % BANDS][i % 4];
  const Index tile = Index(blockIdx.z) * gridDim.x + blockIdx.x;
  if (!is_last_and_sums(mine, tile, blockIdx.y, gridDim.y, partial, tickets)) return;
#pragma unroll
  for (int i = 0; i < TCF * BANDS * 4; i += 2) {  // pairs that lie side by side in C
    const int c = i / 4 / BANDS, q = i / 4 % BANDS * 8 + 2 * member(), high = i % 4 / 2;
    const Index r = row + row_of_sums(c, high);
    if (r >= own_row && r < m) store_row<2>(C + r * rsc + q * csc, csc, n - q, alpha, mine + i, beta);
  }
}
