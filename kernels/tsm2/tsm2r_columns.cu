// TSM2R for today's GPUs, A column-major: C = alpha A B + beta C, A large (m x k), B a few columns (k x n, n <= T2).
//
// A warp covers 32 TCF vectors of rows. The warps of a block share the columns of a slice of A, T3 at a time each; the
// next ones are on their way while the present ones are multiplied. Their sums meet in shared memory, those of slices
// in memory (split.cuh), always in the same order.
//
// Launch   (ceil(m / (32 V TCF)), slices, products) blocks of T1 threads
// Macros   those of wide.cuh; T1 threads; T2 columns of C; T3 columns of A that a warp loads at a time; TCF vectors of
//          a thread in a column; PAIRS times 2 T3 columns of A a warp, for which B is fetched at once; BLOCKS of a
//          multiprocessor; TURNED 1 where B's columns are contiguous and begin at multiples of 16 bytes, and are read
//          so; ENTRY the name of the kernel
// Storage  A(i, j) = A[i + j lda], columns begin at multiples of WIDTH; B(i, j) = B[i rsb + j csb]; C(i, j) = C[i rsc +
//          j csc]; product b lies b times bsa, bsb, bsc further on
// Edges    m, k, n arbitrary; nothing outside of the matrices is read. `slice` is what a block has of k.
#include "tsm2/split.cuh"

constexpr int WARPS = T1 / 32;
constexpr int COLUMNS = WARPS * T3;         // of A: a step of all warps
constexpr int STAGE = COLUMNS * 2 * PAIRS;  // columns of A for which B is fetched at a time
constexpr int READ = rounded_up(T2, UNIT);  // of a row of B in shared memory
constexpr int QUADS = (T2 + 3) / 4;         // from two on, rows lie an odd number of 4 elements apart
constexpr int LINE = QUADS < 2 ? READ : (QUADS + 1 - QUADS % 2) * 4;
constexpr int ACROSS = power_of_two(T2);    // threads that fetch a row of B
constexpr int SUMS = TCF * V * T2;          // of a thread, before the warps' are added
constexpr int ROUNDS = (SUMS + WARPS - 1) / WARPS;
constexpr int RUN = common_divisor(ROUNDS, T2);  // sums of a thread, added over the warps, that lie in one row of C
constexpr bool CONVERTS = !same<B_TYPE, ACC>;
// Units that a thread copies of the columns of a stage, and how many at a time: before compute capability 9.0 the
// registers hold no addresses of more.
constexpr int UNITS = (STAGE * T2 + T1 * UNIT - 1) / (T1 * UNIT);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define UNITS_AT_ONCE 1
#else
#define UNITS_AT_ONCE 2
#endif
static_assert(!TURNED || (!CONVERTS && T3 % UNIT == 0), "columns of B are read in units");
constexpr int HELD = CONVERTS ? (STAGE * ACROSS + T1 - 1) / T1 : 1;  // elements of B that a thread holds meanwhile

// weights = B(first : first + STAGE, 0 : T2), zero outside of B, as soon as put() and copies_done() are through: until
// then what has to be converted is `held`. `B` is B(first, 0), of which `left` rows are there.
INLINE void fetch(ACC* weights, B_TYPE (&held)[HELD], const B_TYPE* __restrict__ B, Index rsb, Index csb, Index left,
                  Index n, bool dense) {
  const int rows = int(smaller(left, STAGE)), q = threadIdx.x % ACROSS, j = threadIdx.x / ACROSS;
  if constexpr (CONVERTS) {
    B += j * rsb + q * csb;
#pragma unroll
    for (int i = 0; i < HELD; i++, B += T1 / ACROSS * rsb)
      held[i] = i * (T1 / ACROSS) + j < rows && q < n ? *B : B_TYPE{0};
    return;
  }
  if constexpr (T2 % UNIT == 0) {
    if (dense) {
#pragma unroll 2
      for (int i = threadIdx.x * UNIT; i < STAGE * T2; i += T1 * UNIT)
        COPY_UNIT(weights, i / T2 * LINE + i % T2, B + i, i < rows * T2);
      return;
    }
  }
  if (T2 > 3 && rsb == 1) {
    fetch_patches<STAGE, LINE>(weights, B, csb, rows, n);
    return;
  }
  if (q >= T2) return;
  B += j * rsb + q * csb;
#pragma unroll 4
  for (int i = j; i < STAGE; i += T1 / ACROSS, B += T1 / ACROSS * rsb) COPY(weights, i * LINE + q, B, i < rows && q < n);
}

// The same of columns of B, each from weights[q STAGE] on; zero also in a unit that B ends in.
INLINE void fetch_turned(ACC* weights, const B_TYPE* __restrict__ B, Index csb, Index left, Index n) {
  const int rows = int(smaller(left, STAGE)) - UNIT;
#pragma unroll UNITS_AT_ONCE
  for (int u = 0; u < UNITS; u++) {
    const int i = (u * T1 + threadIdx.x) * UNIT, q = i / STAGE, j = i % STAGE;
    if (i < STAGE * T2) COPY_UNIT(weights, i, B + j + q * csb, j <= rows && q < n);
  }
}

INLINE void fetch_stage(ACC* weights, B_TYPE (&held)[HELD], const B_TYPE* __restrict__ B, Index rsb, Index csb,
                        Index left, Index n, bool dense) {
  if constexpr (TURNED)
    fetch_turned(weights, B, csb, left, n);
  else
    fetch(weights, held, B, rsb, csb, left, n, dense);
}

// weights = what fetch() left to be converted.
INLINE void put(ACC* weights, const B_TYPE (&held)[HELD]) {
  const int q = threadIdx.x % ACROSS, j = threadIdx.x / ACROSS;
  if (!CONVERTS || q >= T2) return;
#pragma unroll
  for (int i = 0; i < HELD; i++)
    if (const int row = i * (T1 / ACROSS) + j; row < STAGE) weights[row * LINE + q] = ACC(widened(held[i]));
}

// a = A(row : row + V, j : j + T3) for each of the TCF rows of this thread. `at` is A(row, j).
INLINE void load_columns(Vector (&a)[TCF][T3], const A_TYPE* __restrict__ at, Index lda) {
#pragma unroll
  for (int u = 0; u < T3; u++, at += lda) {
#pragma unroll
    for (int c = 0; c < TCF; c++) a[c][u] = load(at + c * 32 * V);
  }
}

// The same where `rows` from A(row, j) on are there, and `columns`: zero beyond.
INLINE void load_columns(Vector (&a)[TCF][T3], const A_TYPE* __restrict__ at, Index lda, Index rows, Index columns) {
#pragma unroll
  for (int u = 0; u < T3; u++, at += lda) {
#pragma unroll
    for (int c = 0; c < TCF; c++) a[c][u] = load(at + c * 32 * V, u < columns ? rows - c * 32 * V : 0);
  }
}

// sum += a B(j : j + T3, :), B in shared memory from `first` on: all threads of a warp read the same.
INLINE void multiply(ACC (&sum)[TCF][V][T2], const Vector (&a)[TCF][T3], ACC* weights, int first) {
#pragma unroll
  for (int u = 0; u < T3; u++) {
    ACC b[READ];
#pragma unroll
    for (int q = 0; q < READ; q += UNIT) {
      const Unit unit = *reinterpret_cast<const Unit*>(&weights[(first + u) * LINE + q]);
#pragma unroll
      for (int i = 0; i < UNIT; i++) b[q + i] = unit.x[i];
    }
#pragma unroll
    for (int c = 0; c < TCF; c++) {
#pragma unroll
      for (int v = 0; v < V; v++) {
        const ACC x = ACC(widened(a[c][u].x[v]));
#pragma unroll
        for (int q = 0; q < T2; q++) sum[c][v][q] += x * b[q];
      }
    }
  }
}

// The same of columns of B.
INLINE void multiply_turned(ACC (&sum)[TCF][V][T2], const Vector (&a)[TCF][T3], ACC* weights, int first) {
#pragma unroll
  for (int q = 0; q < T2; q++) {
#pragma unroll
    for (int u = 0; u < T3; u += UNIT) {
      const Unit b = *reinterpret_cast<const Unit*>(&weights[q * STAGE + first + u]);
#pragma unroll
      for (int i = 0; i < UNIT; i++)
#pragma unroll
        for (int c = 0; c < TCF; c++)
#pragma unroll
          for (int v = 0; v < V; v++) sum[c][v][q] += ACC(widened(a[c][(u + i) % T3].x[v])) * b.x[i];
    }
  }
}

extern "C" __global__ void __launch_bounds__(T1, BLOCKS)
    ENTRY(Index m, Index k, Index n, ACC alpha, const A_TYPE* __restrict__ A, Index lda, Index bsa,
          const B_TYPE* __restrict__ B, Index rsb, Index csb, Index bsb, ACC beta, C_TYPE* C, Index rsc, Index csc,
          Index bsc, Index slice, ACC* partial, unsigned* tickets) {
  __shared__ __align__(16) ACC weights[2 * STAGE * LINE];
  __shared__ ACC exchange[WARPS * T1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Index own_row = Index(blockIdx.x) * (32 * V * TCF);
  const Index tile_row = whole_tile(own_row, 32 * V * TCF, m, V);  // vectors stay where they are
  const Index row = tile_row + lane * V;
  const Index begin = smaller(k, blockIdx.y * slice), end = smaller(k, begin + slice);
  A += blockIdx.z * bsa;
  const B_TYPE* __restrict__ from = B + blockIdx.z * bsb;
  const bool dense = is_dense(from, rsb, csb, n);
  C += blockIdx.z * bsc;

  ACC sum[TCF][V][T2];
#pragma unroll
  for (int c = 0; c < TCF; c++)
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
      for (int q = 0; q < T2; q++) sum[c][v][q] = ACC(0);

  B_TYPE held[HELD];
  // Steps of all columns and, in all rows of the tile, whole vectors: these take no comparison a load.
  const bool whole = tile_row + 32 * V * TCF <= m;
  const int steps = whole ? int((end - begin) / COLUMNS) : 0;
  if (steps) {
    Vector a[2][TCF][T3];
    const A_TYPE* at = A + row + (begin + warp * T3) * lda;
    B = from + begin * rsb;
    fetch_stage(weights, held, B, rsb, csb, end - begin, n, dense);
    load_columns(a[0], at, lda);
    put(weights, held);
    int stage = 0;
#pragma unroll 1
    for (int s = 0; s < steps; s += 2 * PAIRS) {
      copies_done();
      __syncthreads();
      // the next stage of B is on its way while this one is multiplied
      B += STAGE * rsb;
      const int next = (1 - stage) * STAGE * LINE;
      fetch_stage(weights + next, held, B, rsb, csb, end - begin - Index(s) * COLUMNS - STAGE, n, dense);
#pragma unroll 1
      for (int i = 0; i < 2 * PAIRS; i += 2) {
        // sum += A(rows, j : j + T3) B(j : j + T3, :), while the columns of the next step are on their way; after the
        // last step it is loaded once more
#pragma unroll
        for (int half = 0; half < 2; half++) {
          if (s + i + half + 1 < steps) at += COLUMNS * lda;
          load_columns(a[1 - half], at, lda);
          if (s + i + half < steps) {
            const int first = (i + half) * COLUMNS + warp * T3;
            if constexpr (TURNED)
              multiply_turned(sum, a[half], weights + stage * STAGE * LINE, first);
            else
              multiply(sum, a[half], weights + stage * STAGE * LINE, first);
          }
        }
      }
      put(weights + next, held);
      stage = 1 - stage;
    }
    copies_done();
  }
#pragma unroll 1
  for (Index first = begin + Index(steps) * COLUMNS; first < end; first += COLUMNS) {
    Vector a[TCF][T3];
    __syncthreads();
    fetch(weights, held, from + first * rsb, rsb, csb, end - first, n, dense);
    put(weights, held);
    copies_done();
    __syncthreads();
    load_columns(a, A + row + (first + warp * T3) * lda, lda, m - row, end - first - warp * T3);
    multiply(sum, a, weights, warp * T3);
  }

  // The warps' sums: total[i] is number warp ROUNDS + i of each lane.
  ACC total[ROUNDS];
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const int at = w * ROUNDS + i;
      if (at < SUMS) exchange[(warp * WARPS + w) * 32 + lane] = sum[at / (V * T2)][at / T2 % V][at % T2];
    }
    __syncthreads();
    total[i] = ACC(0);
    if (warp * ROUNDS + i < SUMS)
#pragma unroll
      for (int w = 0; w < WARPS; w++) total[i] += exchange[(w * WARPS + warp) * 32 + lane];
  }
  const Index tile = Index(blockIdx.z) * gridDim.x + blockIdx.x;
  if (!is_last_and_sums(total, tile, blockIdx.y, gridDim.y, partial, tickets)) return;
#pragma unroll
  for (int i = 0; i < ROUNDS; i += RUN) {
    const int at = warp * ROUNDS + i, q = at % T2;
    const Index r = row + at / (V * T2) * (32 * V) + at / T2 % V;
    if (at < SUMS && r >= own_row && r < m) store_row<RUN>(C + r * rsc + q * csc, csc, n - q, alpha, total + i, beta);
  }
}
