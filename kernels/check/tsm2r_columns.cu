// TSM2R with one column of weights and an epilogue, X column-major: what tsm2r_rows.cu does, for lines that lie across
// memory (epilogue.cuh).
//
//   y_i = sum_j x w_j    z_i = sum_j x^2 w2_j    words_i = sum_j bits of x,    x = X(i, j), element i of row j
//
// A block takes a stripe of 32 V lines, a thread V of them, and keeps their sums in registers. The rows of memory go
// to the warps in turn, and to groups of blocks by slices. Weights are one number for a warp, read through the level-1
// cache. The sums of AHEAD rows are added in ACC, and these, of y, in float64. The warps' sums meet in shared memory,
// those of groups where the last block of a stripe finds them: both are added in the order of their numbers, whoever
// came last.
//
// Launch   (stripes = ceil(p / (32 V)), groups = ceil(q / slice), products) blocks of T1 threads, at least 32 V
// Macros   those of wide.cuh; T1 threads; AHEAD rows of memory that a warp loads at a time; GIVEN 1 where the weights
//          w2 of squares are given, else they are w^2; WORDS 0 or 1; OUT the type of y and z; VERDICT 1 where each line
//          is judged instead (VERDICT_ARGUMENTS); CAST 1 where it is also stored as D_TYPE; BLOCKS of a multiprocessor;
//          ENTRY the name of the kernel
// Storage  x of product b = X[b step + j ld + i], its copy = cast[b cast_step + j ldd + i]; WIDTH divides X's address,
//          ld and step in bytes. Weights of product b from w + b w_step on; y, z, words of line i at b out_step + i.
//          partial: (2 + WORDS) 32 V words of 8 bytes a block, where there is more than one group; tickets: a 0 a
//          stripe and product, which is 0 again afterwards
// Edges    V divides p; q arbitrary; nothing outside of the matrix is read. `slice` is at most 2^16 WARPS where the
//          words of elements of 16 bits are added
#include "check/epilogue.cuh"

constexpr int WARPS = T1 / 32, LINES = 32 * V, VALUES = 2 + WORDS;
constexpr int APART = 32 + 16 / V;  // of 32 sums in shared memory, so that a stripe's lines do not meet in one bank
constexpr int AT_ONCE = 8;          // parts of a line that are on their way from memory
static_assert(T1 % 32 == 0 && LINES <= T1, "a thread for each line of a stripe");

// Of the bits of elements: a thread's 2^16 elements of 16 bits do not exceed 32.
template <int BYTES>
struct OfElements {
  typedef Bits Sum;
};
template <>
struct OfElements<2> {
  typedef unsigned Sum;
};
typedef OfElements<sizeof(A_TYPE)>::Sum BitSum;

#if CAST
struct __align__(V * sizeof(D_TYPE)) Copy {
  D_TYPE x[V];
};

template <class W>
INLINE void store_word(void* to, const Copy& copy) {
  W word;
  memcpy(&word, &copy, sizeof(W));
  *static_cast<W*>(to) = word;
}

// `whole`: the address is a multiple of a Copy's size.
INLINE void store(D_TYPE* to, const Vector& x, bool whole) {
  constexpr int SIZE = sizeof(Copy);
  Copy copy;
#pragma unroll
  for (int e = 0; e < V; e++) copy.x[e] = narrowed(x.x[e], D_TYPE());
  if constexpr (SIZE == 16) {
    if (whole) return store_word<uint4>(to, copy);
  } else if constexpr (SIZE == 8) {
    if (whole) return store_word<uint2>(to, copy);
  } else if constexpr (SIZE == 4) {
    if (whole) return store_word<unsigned>(to, copy);
  }
#pragma unroll
  for (int e = 0; e < V; e++) to[e] = copy.x[e];
}
#endif

// The kernel in front may still be writing weights when this one begins: without __restrict__, they are not read before
// after_previous(), nor through a cache that takes them for constants.
extern "C" __global__ void __launch_bounds__(T1, BLOCKS)
    ENTRY(Index p, Index q, const A_TYPE* __restrict__ X, Index ld, Index step, const ACC* weights, const ACC* squares,
          Index w_step, EPILOGUE_ARGUMENTS, Index slice, char* partial, unsigned* tickets) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index product = blockIdx.z, first = Index(blockIdx.x) * LINES;
  const bool there = first + lane * V < p;
  const Index begin = blockIdx.y * slice + warp, end = smaller(q, (blockIdx.y + 1) * slice);
  const A_TYPE* at = X + product * step + begin * ld + first + lane * V;
  const ACC* w = weights + product * w_step;
  const ACC* w2 = GIVEN ? squares + product * w_step : w;
#if CAST
  D_TYPE* to = cast + product * cast_step + begin * ldd + first + lane * V;
  const bool whole = (reinterpret_cast<unsigned long long>(cast) | ldd * sizeof(D_TYPE) |
                      cast_step * sizeof(D_TYPE)) % sizeof(Copy) == 0;
#endif
  double y[V];
  ACC z[V];
  BitSum words[V];
#pragma unroll
  for (int e = 0; e < V; e++) {
    y[e] = 0;
    z[e] = ACC(0);
    words[e] = 0;
  }
#if VERDICT
  after_previous();
  next_may_begin();
#else
  // X was there before the kernel in front began, unless that one has written X.
  if (written) after_previous();
#endif

  // Each warp comes here once, though there may be no row for it.
  Index j = begin;
#pragma unroll 1
  do {
    const int left = int(smaller(end - j, AHEAD * WARPS));  // row a is there if a WARPS < left
    Vector x[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; a++, at += WARPS * ld) {
      memset(&x[a], 0, WIDTH);
      if (there && a * WARPS < left) x[a] = load(at);
    }
#if !VERDICT
    if (j == begin) {
      after_previous();
      next_may_begin();
      BEGIN_STATISTICS(blockIdx.x == 0 && blockIdx.y == 0);
    }
#endif
    ACC right[AHEAD], right2[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      right[a] = a * WARPS < left ? w[j + a * WARPS] : ACC(0);
      if (GIVEN) right2[a] = a * WARPS < left ? w2[j + a * WARPS] : ACC(0);
    }
#if CAST
#pragma unroll
    for (int a = 0; a < AHEAD; a++, to += WARPS * ldd)
      if (there && a * WARPS < left) store(to, x[a], whole);
#endif
#pragma unroll
    for (int e = 0; e < V; e++) {
      ACC sum = ACC(0), square = ACC(0);
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        const ACC element = ACC(widened(x[a].x[e])), term = element * right[a];
        const ACC term2 = GIVEN ? element * element * right2[a] : term * term;
        sum = a ? sum + term : term;
        square = a ? square + term2 : term2;
        if (WORDS) words[e] += BitSum(pattern(x[a].x[e]));
      }
      y[e] += double(sum);
      z[e] += square;
    }
    j += AHEAD * WARPS;
  } while (j < end);

  // The sums of a line to one thread.
  __shared__ double y_parts[WARPS * V * APART];
  __shared__ ACC z_parts[WARPS * V * APART];
#if WORDS
  __shared__ BitSum word_parts[WARPS * V * APART];
#endif
#pragma unroll
  for (int e = 0; e < V; e++) {
    const int place = (warp * V + e) * APART + lane;
    y_parts[place] = y[e];
    z_parts[place] = z[e];
#if WORDS
    word_parts[place] = words[e];
#endif
  }
  const int own = threadIdx.x;
  const Index line = first + own;
  const bool mine = own < LINES && line < p;
#if VERDICT
  Expected known = {0, 0, 0, 0, 0};
  if (mine) known = EXPECTED_OF(product * p + line, product);
  const Bits kept = kept_closest(state);
#else
  const Bits number = guards ? number_of(encoded) : 0;
#endif
  __syncthreads();
  double y_sum = 0, z_sum = 0;
  Bits word_sum = 0;
  if (mine) {
#pragma unroll 1
    for (int place = own % V * APART + own / V; place < WARPS * V * APART; place += V * APART) {
      y_sum += y_parts[place];
      z_sum += double(z_parts[place]);
#if WORDS
      word_sum += word_parts[place];
#endif
    }
  }

  if (gridDim.y > 1) {
    __shared__ int last[1];
    const Index stripe = product * gridDim.x + blockIdx.x;
    double* sums = reinterpret_cast<double*>(partial) + stripe * gridDim.y * (VALUES * LINES) + own;
    if (mine) {
      double* sum = sums + blockIdx.y * (VALUES * LINES);
      sum[0] = y_sum;
      sum[LINES] = z_sum;
      if (WORDS) reinterpret_cast<Bits*>(sum)[2 * LINES] = word_sum;
    }
    __threadfence();  // what this thread wrote is there before the ticket is
    __syncthreads();
    if (threadIdx.x == 0) last[0] = atomicInc(tickets + stripe, gridDim.y - 1) == gridDim.y - 1;
    __syncthreads();
    if (!last[0]) return;
    __threadfence();
    y_sum = z_sum = 0, word_sum = 0;
#pragma unroll 1
    for (int group = 0; group < gridDim.y; group += AT_ONCE, sums += AT_ONCE * VALUES * LINES) {
      double ys[AT_ONCE], zs[AT_ONCE];
      Bits some[AT_ONCE];
#pragma unroll
      for (int g = 0; g < AT_ONCE; g++) {
        const bool left = mine && group + g < gridDim.y;
        const double* sum = sums + g * (VALUES * LINES);
        ys[g] = left ? __ldcg(sum) : 0;
        zs[g] = left ? __ldcg(sum + LINES) : 0;
        some[g] = WORDS && left ? __ldcg(reinterpret_cast<const Bits*>(sum) + 2 * LINES) : 0;
      }
#pragma unroll
      for (int g = 0; g < AT_ONCE; g++) y_sum += ys[g], z_sum += zs[g], word_sum += some[g];
    }
  }
#if VERDICT
  keep_closest<T1>(mine, mine ? GIVE_VERDICT(product * p + line, y_sum, z_sum, known) : 0, kept, state);
#else
  if (!mine) return;
  STORE_STATISTICS(line, y_sum, z_sum, word_sum, number);
#endif
}
