// Weights of a check: v_j = base_j 2^-e, 2^e the power of two nearest to ||R(:, j)||, the norms being estimated from a
// sample of R's rows: 16 runs of 8 at scattered places, all of few. A power of two keeps every bit of base_j, so that
// weights differ pairwise in magnitude where bases do. A column that is 0 there takes the largest scale among its 32
// neighbours, 1 where they are 0 too. Where R is sparse, a few elements tell little of a column's norm: if most of 32
// columns are 0 in most runs, these have at least the mean norm of them all.
//
// Nearest as seen from some elements that all blocks look at, up to 512: columns of one norm get one scale, wherever that
// lies between two powers of two. Without it, half of the columns of k = 2048 normal rows, of norm 2^5.5, would weigh
// half as much as the others.
//
// A block takes 32 V columns at a time, so that few blocks do: a product that begins at the same time needs nearly all
// multiprocessors, and waits for them. The kernel behind does not begin before this one ends, and so behind the product.
//
// Launch   (at most ceil(n / (32 V)), products) blocks of T1 threads
// Macros   those of wide.cuh; T1 threads, 512: a warp for each run; TURNED 0 where the rows of R are contiguous, 1 where
//          its columns are; BLOCKS of a multiprocessor; ENTRY the name of the kernel
// Storage  R(l, j) of product b = R[b step + l rs + j cs]; base has n elements, kept three times (tsm2/kept.cuh), and v
//          has n, those of product b from b v_step on. ALIGNED divides the address of R, step, and the larger of rs and cs, in bytes. parts: sum |v| and smallest
//          |v| of each 32 columns, one product after the other. state: 32 words, wiped. enlarge: k / rows in the sample
//          encoded: number of the call, as number_of takes it, or 0
#include "check/state.cuh"
#include "check/chain.cuh"
#include "tsm2/kept.cuh"

constexpr int WARPS = T1 / 32, COLUMNS = 32 * V, RUN = 8;
static_assert(WARPS == 16, "a run for each warp");
static_assert(V <= WARPS && RUN % V == 0, "a warp for 32 columns of a block, whole vectors in a run");
// Scales stay clear of both ends, so that no weight becomes 0 or infinite, and nothing that has a size is unseen.
constexpr int FAR = sizeof(ACC) == 4 ? 100 : 1000;

INLINE unsigned scattered(unsigned x) {
  x = (x + 1) * 0x9e3779b1u;
  x = (x ^ x >> 15) * 0x85ebca77u;
  return x ^ x >> 13;
}

constexpr int NONE = -2 * FAR;  // the exponent of a column that has no scale of its own

// The e for which 4^e is nearest to x > 0 by its logarithm: x 4^-e is in [1/2, 2).
INLINE int half_exponent(double x) { return (int(pattern(2 * x) >> 52) - 1023) >> 1; }

INLINE bool has_size(double square) { return square > 0 && square <= 0x1.fffffffffffffp1023; }  // not 0, NaN, infinity

// Vector i of a half of a thread's is so many rows and columns from its first one.
constexpr int HALF = RUN / 2;
INLINE int down(int i, int half) { return TURNED ? i % (RUN / V) * V : half * HALF + i; }
INLINE int right(int i, int half) { return TURNED ? (half * HALF + i) / (RUN / V) * 32 : 0; }

// Of float16 exact in float, of others in double, as is their range.
INLINE float square_of(float16 x) { return widened(x) * widened(x); }
template <class T>
INLINE double square_of(T x) {
  return double(widened(x)) * double(widened(x));
}
typedef decltype(square_of(A_TYPE())) Square;

extern "C" __global__ void __launch_bounds__(T1, BLOCKS)
    ENTRY(Index k, Index n, const A_TYPE* __restrict__ R, Index rs, Index cs, Index step,
          const float* __restrict__ base, ACC* v, Index v_step, double* parts, double enlarge, Bits* state,
          Bits encoded) {
  __shared__ double squares[WARPS * COLUMNS];
  __shared__ double of_all[T1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index product = blockIdx.y;
  const A_TYPE* at = R + product * step;
  // A warp takes a run of rows, or its share of few: whole vectors, where columns are contiguous.
  const bool few = k < RUN * WARPS;
  const int length = few ? rounded_up(int(k + WARPS - 1) / WARPS, TURNED ? V : 1) : RUN;
  after_previous();
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x < 32) begin_product(state, encoded);

  // No period in the data can hide from runs at scattered places.
  const unsigned group = unsigned(k / WARPS), places = few ? 1 : group - RUN + 1;
  const Index scatter = scattered(warp) % places, start = few ? warp * length : warp * Index(group) + scatter;
  const Index row = TURNED ? start - start % V : start, rows = smaller(length, k - row);
  // An element a thread of what all blocks look at: the first row of each run, where columns are contiguous all rows of it.
  const int own_row = TURNED ? lane % RUN : 0, own_column = TURNED ? lane / RUN : lane;
  const bool looks = own_row < rows && own_column < n;
  const A_TYPE seen = at[looks ? (row + own_row) * rs + own_column * cs : 0];
  of_all[threadIdx.x] = looks ? double(square_of(seen)) : 0;

#pragma unroll 1
  for (Index first = Index(blockIdx.x) * COLUMNS; first < n; first += Index(gridDim.x) * COLUMNS) {
    const Index j = first + threadIdx.x;
    // squares(warp, j) = R(l, j)^2 added over the l of the run. What is not there is not read, and counts nothing; where
    // all is there, no load of a half waits for another. With all of them on their way BLOCKS would not fit.
    const A_TYPE* from = at + row * rs + (first + (TURNED ? lane : lane * V)) * cs;
    const Index beyond = n - first - (TURNED ? lane : lane * V);
    const bool whole = rows == RUN && first + COLUMNS <= n;
    constexpr int SUMS = TURNED ? V / 2 : V;  // columns of a half
    Square sum[SUMS];
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
      Vector x[HALF];
      if (whole) {
#pragma unroll
        for (int i = 0; i < HALF; i++) x[i] = load(from + down(i, half) * rs + right(i, half) * cs);
      } else {
#pragma unroll
        for (int i = 0; i < HALF; i++) {
          const Index below = rows - down(i, half), aside = beyond - right(i, half);
          const Index count = TURNED ? (aside > 0 ? below : 0) : (below > 0 ? aside : 0);
          x[i] = load(from + down(i, half) * rs + right(i, half) * cs, count);
        }
      }
#pragma unroll
      for (int c = 0; c < SUMS; c++)
        if (TURNED || half == 0) sum[c] = 0;
#pragma unroll
      for (int i = 0; i < HALF; i++)
#pragma unroll
        for (int e = 0; e < V; e++) sum[TURNED ? right(i, 0) / 32 : e] += square_of(x[i].x[e]);
      if (!TURNED && half == 0) continue;
#pragma unroll
      for (int c = 0; c < SUMS; c++)
        squares[warp * COLUMNS + (TURNED ? (half * SUMS + c) * 32 + lane : lane * V + c)] = sum[c];
    }
    __syncthreads();

    if (warp < V) {
      const float own_base = j < n ? of_three(base, n, j) : 0;
      double square = 0, common = 0;
      int runs_with = 0;
#pragma unroll 4
      for (int w = 0; w < WARPS; w++) {
        const double part = squares[w * COLUMNS + threadIdx.x];
        square += part, runs_with += part != 0, common += of_all[w * 32 + lane];
      }
      const bool sparse = !few && j < n && 2 * runs_with < WARPS && square <= 0x1.fffffffffffffp1023;
      double of_sparse = sparse ? square : 0;
      int sparse_columns = sparse;
#pragma unroll 1
      for (int bit = 16; bit; bit /= 2) {
        of_sparse += __shfl_xor_sync(~0u, of_sparse, bit);
        sparse_columns += __shfl_xor_sync(~0u, sparse_columns, bit);
      }
      if (sparse && 2 * sparse_columns >= min(n - j + lane, Index(32))) square = max(square, of_sparse / sparse_columns);
#pragma unroll 1
      for (int bit = 16; bit; bit /= 2) common += __shfl_xor_sync(~0u, common, bit);
      constexpr int ROWS = TURNED ? RUN : 1, ACROSS = 32 / ROWS;
      const int runs = few ? (int(k) + length - 1) / length : WARPS;
      const int looked = (few && TURNED ? int(k) : runs * ROWS) * int(min(n, Index(ACROSS)));
      // Their mean norm^2 = 4^h m, m in [1/2, 2): what is as large has the exponent h, and what is off by less than 2^(1/2).
      const double mean = common * (float(k) / float(looked));
      double centre = 1;
      if (has_size(mean)) centre = same_bits<double>(pattern(mean) - (Bits(2 * half_exponent(mean)) << 52));
      const double norm2 = square * (enlarge * (1.0f / float(centre)));
      int exponent = has_size(square) ? max(-FAR, min(FAR, -half_exponent(norm2))) : NONE;
      // The largest scale of the neighbours, for a column that has none: those of one exponent are much the same.
      int top = exponent;
#pragma unroll 1
      for (int bit = 16; bit; bit /= 2) top = max(top, __shfl_xor_sync(~0u, top, bit));
      if (exponent == NONE) exponent = top == NONE ? 0 : top;
      double total = 0, least = 0x1.fffffffffffffp1023;
      if (j < n) {
        const ACC x = ACC(double(own_base) * same_bits<double>(Bits(1023 + exponent) << 52));  // exact
        v[product * v_step + j] = x;
        total = least = fabs(double(x));
      }
      join_sizes(total, least);
      if (lane == 0 && j < n) {
        double* own = parts + 2 * (product * ((n + 31) / 32) + j / 32);
        own[0] = total;
        own[1] = least;
      }
    }
    __syncthreads();
  }
}
