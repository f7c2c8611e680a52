// TSM2R for today's GPUs, A row-major, many columns: C = alpha A B + beta C, A large (m x k), B k x n, n <= T2.
//
// A thread has TCF rows of A, a block T1 TCF: the more there are, the less often B is fetched. They come through shared
// memory, T3 vectors of each at a time and with them the rows of B that they are multiplied by, in a ring of PAIRS such
// stages: while one is multiplied, the next PAIRS - 1 are on their way. Neighbouring threads copy neighbouring vectors
// of a row; when they multiply, each reads its own rows, and all of them the same elements of B. A thread's sums are
// whole; those of slices of k meet in memory (split.cuh), always in the same order.
//
// Launch   (ceil(m / (T1 TCF)), slices, products) blocks of T1 threads
// Macros   those of wide.cuh, WIDTH 16; T1 threads, a multiple of 32; T2 columns of C; T3 vectors of a row
//          in a stage: 1, 2, 4 or 8; TCF rows of a thread; PAIRS stages of the ring, 2 or more; BLOCKS of a
//          multiprocessor; ENTRY the name of the kernel
// Storage  A(i, j) = A[i lda + j], rows begin at multiples of WIDTH; B(i, j) = B[i rsb + j csb]; C(i, j) = C[i rsc +
//          j csc]; product b lies b times bsa, bsb, bsc further on
// Edges    m, k, n arbitrary; nothing outside of the matrices is read. `slice` is what a block has of k, a multiple of
//          T3 V. Rows beyond m are others once more; elements beyond k, and columns beyond n, are zero.
#include "tsm2/split.cuh"

static_assert(WIDTH == 16 && PAIRS > 1 && T3 <= 8 && (T3 & (T3 - 1)) == 0 && T1 % 32 == 0);

constexpr int ROWS = T1 * TCF;
constexpr int DEPTH = T3 * V;       // of k: a stage
constexpr int COPIED = T1 / T3;     // rows that the threads copy at a time
constexpr int COPIES = TCF * T3;    // of a thread, in a stage
constexpr int VECTORS = ROWS * T3;  // of a stage
// Rows of B begin in different banks: an odd number of units apart.
constexpr int UNITS = (T2 + UNIT - 1) / UNIT;
constexpr int PITCH = (UNITS + 1 - UNITS % 2) * UNIT;
constexpr int WEIGHTS = DEPTH * PITCH;    // elements of a stage
constexpr int ACROSS = power_of_two(T2);  // places for a row of B, where its elements are copied one by one
constexpr int SUMS = TCF * T2;            // of a thread
// Vectors of a row whose multiplications the compiler may mix: some hundred of them hide what the loads take.
constexpr int MIXED = T3 * V * SUMS <= 1024 ? T3 : V * SUMS <= 512 ? 2 : 1;

// COPY_VECTOR begins tile[at] = the vector at `from`; committed() ends a group of copies, and arrived() waits for all
// groups of this thread but the PAIRS - 2 last ones.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
INLINE void copy_vector(Vector* to, const A_TYPE* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(unsigned(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}
#define COPY_VECTOR(tile, at, from) copy_vector(&tile[at], from)
INLINE void committed() { asm volatile("cp.async.commit_group;" ::: "memory"); }
INLINE void arrived() { asm volatile("cp.async.wait_group %0;" ::"n"(PAIRS - 2) : "memory"); }
#else
#define COPY_VECTOR(tile, at, from) tile[at] = load(from)
INLINE void committed() {}
INLINE void arrived() {}
#endif

// The same address, but a compiler does not compute it from another one.
INLINE const A_TYPE* apart_from(const A_TYPE* at) {
#ifdef __CUDA_ARCH__
  asm("" : "+l"(at));
#endif
  return at;
}

// Where vector u of row r lies: eight threads that copy vectors of one row or of neighbouring ones, and eight that read
// the same vector of their rows, are in different banks.
INLINE unsigned place(unsigned r, unsigned u) { return r * T3 + (u ^ r * T3 / 8 % T3); }

// tile = A(rows, j : j + DEPTH), zero beyond the end of k. `at` is A(r, j + u V) for the first row r that this thread
// copies, which `follow` more do, COPIES where all are there, `apart` elements from one another; `left` elements are there
// from `at` on.
INLINE void fetch_rows(Vector* tile, const A_TYPE* __restrict__ at, Index apart, int follow, Index left) {
  const unsigned first = place(threadIdx.x / T3, threadIdx.x % T3);
  // tile[place(r + i COPIED, u)] = A(r + i COPIED, j : j + V): a sum without a carry
#define PLACE (first + i * T1) ^ (i * (T1 / 8) % T3)
  if (left >= V && follow == COPIES) {
    // no comparison a copy, and addresses that do not wait for one another
    constexpr int CHAINS = COPIES < 4 ? COPIES : 4;
    const A_TYPE* lines[CHAINS];
#pragma unroll
    for (int i = 0; i < CHAINS; i++) lines[i] = apart_from(at + i * apart);
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
      COPY_VECTOR(tile, PLACE, lines[i % CHAINS]);
      lines[i % CHAINS] += CHAINS * apart;
    }
  } else if (left >= V) {
#pragma unroll 2
    for (int i = 0; i < COPIES; i++) {
      COPY_VECTOR(tile, PLACE, at);
      if (i < follow) at += apart;
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < COPIES; i++) {
      tile[PLACE] = load(at, left);
      if (i < follow) at += apart;
    }
  }
}

// weights = B(j : j + DEPTH, 0 : T2), zero outside of B. `B` is B(j, 0), of which `left` rows are there. Threads follow
// the order of B.
INLINE void fetch(ACC* weights, const B_TYPE* __restrict__ B, Index rsb, Index csb, Index left, Index n, bool dense) {
  const int rows = int(smaller(left, DEPTH));
  if constexpr (T2 % UNIT == 0 && same<B_TYPE, ACC>) {
    if (dense) {
#pragma unroll
      for (int c = 0; c < DEPTH * T2; c += T1 * UNIT) {
        const unsigned i = c + threadIdx.x * UNIT;
        if (i < DEPTH * T2) COPY_UNIT(weights, i / T2 * PITCH + i % T2, B + i, int(i) < rows * T2);
      }
      return;
    }
  }
  if (rsb == 1) {
    fetch_patches<DEPTH, PITCH>(weights, B, csb, rows, n);
    return;
  }
#pragma unroll 4
  for (unsigned i = threadIdx.x; i < DEPTH * ACROSS; i += T1) {
    const unsigned j = i / ACROSS, q = i % ACROSS;
    if (q < T2) COPY(weights, j * PITCH + q, B + j * rsb + q * csb, int(j) < rows && q < n);
  }
}

// sum += A(rows, j : j + DEPTH) B(j : j + DEPTH, :), both in shared memory.
INLINE void multiply(ACC (&sum)[SUMS], Vector* tile, ACC* weights) {
#pragma unroll MIXED
  for (int u = 0; u < T3; u++) {
    ACC x[TCF][V];
#pragma unroll
    for (int r = 0; r < TCF; r++) {
      const Vector a = tile[place(threadIdx.x, u) + r * VECTORS / TCF];
#pragma unroll
      for (int v = 0; v < V; v++) x[r][v] = ACC(widened(a.x[v]));
    }
#pragma unroll
    for (int v = 0; v < V; v++) {
#pragma unroll
      for (int q = 0; q < T2; q += UNIT) {
        const Unit b = *reinterpret_cast<const Unit*>(&weights[(u * V + v) * PITCH + q]);
#pragma unroll
        for (int i = 0; i < UNIT; i++)
#pragma unroll
          for (int r = 0; r < TCF; r++)
            if (q + i < T2) sum[r * T2 + (q + i) % T2] += x[r][v] * b.x[i];
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(T1, BLOCKS)
    ENTRY(Index m, Index k, Index n, ACC alpha, const A_TYPE* __restrict__ A, Index lda, Index bsa,
          const B_TYPE* __restrict__ B, Index rsb, Index csb, Index bsb, ACC beta, C_TYPE* C, Index rsc, Index csc,
          Index bsc, Index slice, ACC* partial, unsigned* tickets) {
  __shared__ __align__(16) Vector tile[PAIRS * VECTORS];
  __shared__ __align__(16) ACC weights[PAIRS * WEIGHTS];
  const Index own_row = Index(blockIdx.x) * ROWS, row = whole_tile(own_row, ROWS, m, 1);
  const Index begin = smaller(k, blockIdx.y * slice), end = smaller(k, begin + slice);
  // the rows that this thread copies
  const Index first = smaller(row + threadIdx.x / T3, m - 1), apart = COPIED * lda;
  const int follow = m >= ROWS ? COPIES : int((m - 1 - first) / COPIED), offset = threadIdx.x % T3 * V;
  A += blockIdx.z * bsa + first * lda + begin + offset;
  B += blockIdx.z * bsb + begin * rsb;
  C += blockIdx.z * bsc;
  const bool dense = is_dense(B, rsb, csb, n);

  ACC sum[SUMS];
#pragma unroll
  for (int i = 0; i < SUMS; i++) sum[i] = ACC(0);

  Index left = end - begin;  // of k, from the next stage to fetch on
  const int steps = int((left + DEPTH - 1) / DEPTH);
#pragma unroll 1
  for (int s = 1 - PAIRS; s < steps; s++) {
    if (s >= 0) {
      arrived();
      __syncthreads();  // stage s is there, and stage s - 1 is read no more: the next one takes its place
    }
    if (left > 0) {
      const int stage = (s + PAIRS - 1) % PAIRS;
      fetch_rows(tile + stage * VECTORS, A, apart, follow, left - offset);
      fetch(weights + stage * WEIGHTS, B, rsb, csb, left, n, dense);
      A += DEPTH;
      B += DEPTH * rsb;
      left -= DEPTH;
    }
    committed();
    if (s >= 0) multiply(sum, tile + s % PAIRS * VECTORS, weights + s % PAIRS * WEIGHTS);
  }

  const Index part = Index(blockIdx.z) * gridDim.x + blockIdx.x;
  if (!is_last_and_sums(sum, part, blockIdx.y, gridDim.y, partial, tickets)) return;
#pragma unroll
  for (int i = 0; i < TCF; i++) {
    const Index r = row + threadIdx.x + i * T1;
    if (r >= own_row && r < m) store_row<T2>(C + r * rsc, csc, n, alpha, sum + i * T2, beta);
  }
}
