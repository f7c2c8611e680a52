// TSM2R for today's GPUs, A row-major: C = alpha A B + beta C, A large (m x k), B a few columns (k x n, n <= T2).
//
// A warp has TCF rows of A; its threads lie along them, V elements each, T3 such vectors at a time. The warps of a block
// multiply different rows by the same part of B. The next elements of A, and of B, are on their way while the present
// ones are multiplied. The sums of a warp's threads meet in its registers, those of slices of k in memory (split.cuh),
// always in the same order.
//
// Launch   (ceil(m / (TCF T1 / 32)), slices, products) blocks of T1 threads
// Macros   those of wide.cuh; T1 threads; T2 columns of C; T3 vectors of a row that a thread loads at a time; TCF rows of
//          a warp; PAIRS times 2 T3 vectors, for which B is fetched at once, or T3 where that is 0; BLOCKS of a multiprocessor; ENTRY the name
// Storage  A(i, j) = A[i lda + j], rows begin at multiples of WIDTH; B(i, j) = B[i rsb + j csb]; C(i, j) = C[i rsc +
//          j csc]; product b lies b times bsa, bsb, bsc further on
// Edges    m, k, n arbitrary; nothing outside of the matrices is read. `slice` is what a block has of k, a multiple of V.
#include "tsm2/split.cuh"

constexpr int WARPS = T1 / 32;
constexpr int ACROSS_A = 32 * V;                 // of k: a vector for each thread of a warp
constexpr int STEP = ACROSS_A * T3;              // of k
constexpr int STEPS = PAIRS ? 2 * PAIRS : 1;     // of a stage of B
constexpr int LOOPS = PAIRS ? PAIRS : 1;
constexpr int STAGE = STEP * STEPS;              // of k, for which B is fetched at a time
// The V rows of B that a thread multiplies by lie together in shared memory, in an odd number of units: so those of
// different threads begin in different banks.
constexpr int UNITS = (V * T2 + UNIT - 1) / UNIT;
constexpr int PITCH = (UNITS + 1 - UNITS % 2) * UNIT;
constexpr int WEIGHTS = STAGE / V * PITCH;       // elements of a stage
constexpr int ACROSS = power_of_two(T2);         // threads that fetch a row of B
// Elements of B that a thread holds until they are converted, in groups that make a unit: none where there are many.
constexpr int GROUPS_OF_B = (STAGE * ACROSS + T1 * UNIT - 1) / (T1 * UNIT);
constexpr bool HOLDS = sizeof(B_TYPE) == 2 && GROUPS_OF_B <= 4;
constexpr int HELD = HOLDS ? GROUPS_OF_B : 1;
constexpr int SUMS = TCF * T2;                   // of a thread, before those of the warp are added
constexpr int GROUP = SUMS > 32 ? 32 : power_of_two(SUMS);  // sums that are exchanged at a time
constexpr int GROUPS = (SUMS + GROUP - 1) / GROUP;

struct __align__(UNIT * sizeof(B_TYPE)) Group {
  B_TYPE x[UNIT];
};

// Which element of a stage, counted along B, is number v of the i-th group of this thread.
INLINE unsigned element(int i, int v, bool dense) {
  return dense ? (i * T1 + threadIdx.x) * UNIT + v : (i * UNIT + v) * T1 + threadIdx.x;
}

// weights = B(first : first + STAGE, 0 : T2), zero outside of B, as soon as put() and copies_done() are through: until
// then what has to be converted is `held`. `B` is B(first, 0), of which `left` rows are there. Threads follow the order
// of B.
INLINE void fetch(ACC* weights, Group (&held)[HELD], const B_TYPE* __restrict__ B, Index rsb, Index csb, Index left,
                  Index n, bool dense) {
  const int rows = int(smaller(left, STAGE));
  if constexpr (HOLDS) {
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      if (dense) {
        const int at = int(element(i, 0, true));
        if (at + UNIT <= rows * T2) {
          held[i] = *reinterpret_cast<const Group*>(B + at);
        } else {
#pragma unroll
          for (int v = 0; v < UNIT; v++) held[i].x[v] = at + v < rows * T2 ? B[at + v] : B_TYPE{0};
        }
      } else {
#pragma unroll
        for (int v = 0; v < UNIT; v++) {
          const unsigned at = element(i, v, false);
          const unsigned j = rsb == 1 ? at % STAGE : at / ACROSS, q = rsb == 1 ? at / STAGE : at % ACROSS;
          held[i].x[v] = int(j) < rows && q < n ? B[j * rsb + q * csb] : B_TYPE{0};
        }
      }
    }
    return;
  }
  if constexpr (V * T2 % UNIT == 0 && same<B_TYPE, ACC>) {
    if (dense && (T2 % UNIT == 0 || left >= STAGE)) {
#pragma unroll 2
      for (unsigned i = threadIdx.x * UNIT; i < STAGE * T2; i += T1 * UNIT)
        COPY_UNIT(weights, i / (V * T2) * PITCH + i % (V * T2), B + i, int(i) < rows * T2);
      return;
    }
  }
  if (rsb == 1) {
#pragma unroll 4
    for (unsigned i = threadIdx.x; i < STAGE * T2; i += T1) {
      const unsigned j = i % STAGE, q = i / STAGE;
      COPY(weights, j / V * PITCH + j % V * T2 + q, B + j + q * csb, int(j) < rows && q < n);
    }
  } else {
    const unsigned q = threadIdx.x % ACROSS, j = threadIdx.x / ACROSS;
    if (q >= T2) return;
    B += j * rsb + q * csb;
#pragma unroll 4
    for (unsigned i = j; i < STAGE; i += T1 / ACROSS, B += T1 / ACROSS * rsb)
      COPY(weights, i / V * PITCH + i % V * T2 + q, B, int(i) < rows && q < n);
  }
}

// weights = what fetch() left to be converted.
INLINE void put(ACC* weights, const Group (&held)[HELD], Index rsb, bool dense) {
  if (!HOLDS) return;
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    Unit unit;
#pragma unroll
    for (int v = 0; v < UNIT; v++) unit.x[v] = ACC(widened(held[i].x[v]));
    if (dense) {
      const unsigned at = element(i, 0, true);
      if (at < STAGE * T2) *reinterpret_cast<Unit*>(&weights[at / (V * T2) * PITCH + at % (V * T2)]) = unit;
    } else {
#pragma unroll
      for (int v = 0; v < UNIT; v++) {
        const unsigned at = element(i, v, false);
        const unsigned j = rsb == 1 ? at % STAGE : at / ACROSS, q = rsb == 1 ? at / STAGE : at % ACROSS;
        if (j < STAGE && q < T2) weights[j / V * PITCH + j % V * T2 + q] = unit.x[v];
      }
    }
  }
}

// What was fetched is there for all threads, and the next stage, `weights`, is on its way.
INLINE void begin_stage(ACC* weights, Group (&held)[HELD], const B_TYPE* __restrict__ B, Index rsb, Index csb, Index left,
                        Index n, bool dense) {
  copies_done();
  __syncthreads();
  fetch(weights, held, B, rsb, csb, left, n, dense);
}

// a = A(row : row + TCF, j : j + V) for T3 vectors. `at` is A(row, j), which `rows` more follow: where there are fewer
// than TCF, the last one is read again.
INLINE void load_rows(Vector (&a)[T3][TCF], const A_TYPE* __restrict__ at, Index lda, int rows) {
#pragma unroll
  for (int r = 0; r < TCF; r++) {
#pragma unroll
    for (int t = 0; t < T3; t++) a[t][r] = load(at + t * ACROSS_A);
    if (r < rows) at += lda;
  }
}

// The same where only `left` elements from A(row, j) on are there: zero beyond.
INLINE void load_rows(Vector (&a)[T3][TCF], const A_TYPE* __restrict__ at, Index lda, int rows, Index left) {
#pragma unroll
  for (int r = 0; r < TCF; r++) {
#pragma unroll
    for (int t = 0; t < T3; t++) a[t][r] = load(at + t * ACROSS_A, left - t * ACROSS_A);
    if (r < rows) at += lda;
  }
}

// sum += a B(j : j + V, :) for each of T3 vectors, B in shared memory from `first` on.
INLINE void multiply(ACC (&sum)[TCF][T2], const Vector (&a)[T3][TCF], ACC* weights, int first) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < T3; t++) {
    ACC x[TCF][V];
#pragma unroll
    for (int r = 0; r < TCF; r++)
#pragma unroll
      for (int v = 0; v < V; v++) x[r][v] = ACC(widened(a[t][r].x[v]));
#pragma unroll
    for (int e = 0; e < V * T2; e += UNIT) {
      const Unit b = *reinterpret_cast<const Unit*>(&weights[(first / V + t * 32 + lane) * PITCH + e]);
#pragma unroll
      for (int i = 0; i < UNIT; i++) {
        const int v = (e + i) / T2, q = (e + i) % T2;
#pragma unroll
        for (int r = 0; r < TCF; r++)
          if (v < V) sum[r][q] += x[r][v % V] * b.x[i];
      }
    }
  }
}

// Adds each of COUNT numbers over the threads of a warp: every exchange halves what a thread has left to add. Thread
// `lane` ends up with number index_of(lane).
template <int BIT = 1, int COUNT = GROUP>
INLINE ACC over_warp(ACC (&x)[GROUP]) {
  if constexpr (BIT < 32) {
    constexpr int HALF = COUNT / 2;
    const bool upper = threadIdx.x & BIT;
    if constexpr (HALF == 0) x[0] += __shfl_xor_sync(~0u, x[0], BIT);
#pragma unroll
    for (int i = 0; i < HALF; i++) {
      const ACC given = upper ? x[i] : x[i + HALF], kept = upper ? x[i + HALF] : x[i];
      x[i] = kept + __shfl_xor_sync(~0u, given, BIT);
    }
    return over_warp<2 * BIT, HALF == 0 ? 1 : HALF>(x);
  } else {
    return x[0];
  }
}
INLINE int index_of(int lane) {
  int index = 0;
#pragma unroll
  for (int bit = 1, half = GROUP / 2; half; bit *= 2, half /= 2) index += lane & bit ? half : 0;
  return index;
}

extern "C" __global__ void __launch_bounds__(T1, BLOCKS)
    ENTRY(Index m, Index k, Index n, ACC alpha, const A_TYPE* __restrict__ A, Index lda, Index bsa,
          const B_TYPE* __restrict__ B, Index rsb, Index csb, Index bsb, ACC beta, C_TYPE* C, Index rsc, Index csc,
          Index bsc, Index slice, ACC* partial, unsigned* tickets) {
  __shared__ __align__(16) ACC weights[2 * WEIGHTS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Index row = (Index(blockIdx.x) * WARPS + warp) * TCF;
  const Index begin = smaller(k, blockIdx.y * slice), end = smaller(k, begin + slice);
  A += blockIdx.z * bsa + smaller(row, m - 1) * lda + begin + lane * V;
  B += blockIdx.z * bsb + begin * rsb;
  const bool dense = V * T2 % UNIT == 0 && is_dense(B, rsb, csb, n);
  Group held[HELD];
  C += blockIdx.z * bsc;

  ACC sum[TCF][T2];
#pragma unroll
  for (int r = 0; r < TCF; r++)
#pragma unroll
    for (int q = 0; q < T2; q++) sum[r][q] = ACC(0);

  const int rows = int(smaller(TCF, m - row)) - 1;  // that follow the first one
  const Index length = end - begin;
  const int steps = int(length / STEP);             // whole ones: these take no comparison a load
  if (steps) {
    Vector a[2][T3][TCF];
    fetch(weights, held, B, rsb, csb, length, n, dense);
    load_rows(a[0], A, lda, rows);
    put(weights, held, rsb, dense);
    int stage = 0;
#pragma unroll 1
    for (int s = 0; s < steps; s += 2 * LOOPS) {
      const Index ahead = (s + STEPS) * Index(STEP);
      if (PAIRS) begin_stage(weights + (1 - stage) * WEIGHTS, held, B + ahead * rsb, rsb, csb, length - ahead, n, dense);
#pragma unroll 1
      for (int i = 0; i < 2 * LOOPS; i += 2) {
        // sum += A(rows, j : j + V) B(j : j + V, :), while the next elements of A are on their way; after the last step
        // it is loaded once more
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int now = s + i + half;
          if (PAIRS == 0 && now < steps) {
            const Index next = (now + 1) * Index(STEP);
            begin_stage(weights + (1 - stage) * WEIGHTS, held, B + next * rsb, rsb, csb, length - next, n, dense);
          }
          if (now + 1 < steps) A += STEP;
          load_rows(a[1 - half], A, lda, rows);
          if (now < steps) multiply(sum, a[half], weights + stage * WEIGHTS, PAIRS ? (i + half) * STEP : 0);
          if (PAIRS == 0) {
            if (now < steps) put(weights + (1 - stage) * WEIGHTS, held, rsb, dense);
            stage = 1 - stage;
          }
        }
      }
      if (PAIRS) {
        put(weights + (1 - stage) * WEIGHTS, held, rsb, dense);
        stage = 1 - stage;
      }
    }
    copies_done();
    A += STEP;
  }
  if (const Index first = begin + Index(steps) * STEP; first < end) {
    Vector a[T3][TCF];
    __syncthreads();
    fetch(weights, held, B + Index(steps) * STEP * rsb, rsb, csb, end - first, n, dense);
    put(weights, held, rsb, dense);
    copies_done();
    __syncthreads();
    load_rows(a, A, lda, rows, end - first - lane * V);
    multiply(sum, a, weights, 0);
  }

  ACC total[GROUPS];
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    ACC x[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      const int at = g * GROUP + i;
      x[i] = at < SUMS ? sum[at / T2 % TCF][at % T2] : ACC(0);
    }
    total[g] = over_warp(x);
  }
  const Index tile = Index(blockIdx.z) * gridDim.x + blockIdx.x;
  if (!is_last_and_sums(total, tile, blockIdx.y, gridDim.y, partial, tickets)) return;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    const int at = g * GROUP + index_of(lane), q = at % T2;
    const Index r = row + at / T2;
    if (lane < GROUP && at < SUMS && r < m) store_row<1>(C + r * rsc + q * csc, csc, n - q, alpha, total + g, beta);
  }
}
