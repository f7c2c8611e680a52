// Weights of a check: v_j = base_j 2^-e, 2^e the power of two nearest to ||R(:, j)||, the norms being estimated from a
// sample of R's rows: 16 runs of 8 at scattered places, all of few. A power of two keeps every bit of base_j, so that
// weights differ pairwise in magnitude where bases do. A column that is 0 there takes the largest scale among its 32
// neighbours, 1 where they are 0 too.
//
// Nearest as seen from some elements that all blocks look at, up to 512: columns of one norm get one scale, wherever that
// lies between two powers of two. Without it, half of the columns of k = 2048 normal rows, of norm 2^5.5, would weigh
// half as much as the others.
//
// Launch   (ceil(n / 32), products) blocks of T1 threads
// Macros   those of wide.cuh; T1 threads, 512: a warp for each run; TURNED 0 where the rows of R are contiguous, 1 where
//          its columns are; ENTRY the name of the kernel
// Storage  R(l, j) of product b = R[b step + l rs + j cs]; base and v have n elements, those of product b from b v_step
//          on. parts: sum |v| and smallest |v| of each block, one product after the other. state: 32 words, wiped.
//          enlarge: k / rows in the sample
#include "tsm2/sums.cuh"
#include "check/chain.cuh"

constexpr int WARPS = T1 / 32, COLUMNS = 32, RUN = 8;
static_assert(WARPS == 16, "a run for each warp");
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

extern "C" __global__ void __launch_bounds__(T1, 3)
    ENTRY(Index k, Index n, const A_TYPE* __restrict__ R, Index rs, Index cs, Index step,
          const float* __restrict__ base, ACC* v, Index v_step, double* parts, double enlarge, Bits* state) {
  __shared__ double squares[WARPS * COLUMNS];
  __shared__ double of_all[WARPS * COLUMNS];
#if TURNED
  __shared__ double by_row[WARPS * COLUMNS * RUN];
#endif
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index product = blockIdx.y, first = Index(blockIdx.x) * COLUMNS;
  const A_TYPE* at = R + product * step;
  // A warp takes a run of rows, or its share of few.
  const bool few = k < RUN * WARPS;
  const int length = few ? int(k + WARPS - 1) / WARPS : RUN;
  const float own_base = warp == 0 && first + lane < n ? base[first + lane] : 0;  // early: it is far away
  after_previous();
  next_may_begin();
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x < 32) state[threadIdx.x] = 0;

  // squares(:, j) = R(l, j)^2 added over the sampled l, in WARPS parts. Where columns are contiguous a warp takes 8 rows of
  // 4 columns at a time, and each thread has a part of the sums of 8 columns.
  double sum[TURNED ? RUN : 1];
#pragma unroll
  for (int i = 0; i < (TURNED ? RUN : 1); i++) sum[i] = 0;
  // No period in the data can hide from runs at scattered places.
  const unsigned group = unsigned(k / WARPS);
  const Index start = few ? Index(warp) * length : warp * Index(group) + scattered(warp) % (group - RUN + 1);
  // What is not there is read elsewhere and counts nothing: a load that waits for no branch is in flight with the others.
  const int own_row = TURNED ? lane % RUN : 0, own_column = TURNED ? lane / RUN : lane;
  const Index row = start + own_row, column = first + own_column;
  const bool row_there = own_row < length && row < k;
  // An element a thread of what all blocks look at: the first row of each run, where columns are contiguous all rows of it.
  const bool looks = row_there && own_column < n;
  const A_TYPE seen = at[looks ? row * rs + own_column * cs : 0];
  const Index apart = TURNED ? 4 * cs : rs;
  const int there = !row_there || column >= n ? 0
                                              : int(smaller(RUN, TURNED ? (n - column + 3) / 4 : smaller(length, k - row)));
  const A_TYPE* from = at + (there ? row * rs + column * cs : 0);
  A_TYPE x[RUN];
#pragma unroll
  for (int i = 0; i < RUN; i++) {
    x[i] = *from;
    if (i + 1 < there) from += apart;
  }
#pragma unroll
  for (int i = 0; i < RUN; i++) {
    const double e = i < there ? double(widened(x[i])) : 0;
    sum[TURNED ? i : 0] += e * e;
  }
  const double of_thread = looks ? double(widened(seen)) : 0;
  of_all[warp * COLUMNS + lane] = of_thread * of_thread;
#if TURNED
#pragma unroll
  for (int i = 0; i < RUN; i++) by_row[(warp * COLUMNS + own_column + 4 * i) * RUN + own_row] = sum[i];
  __syncwarp();
  sum[0] = 0;
#pragma unroll 1
  for (int i = 0; i < RUN; i++) sum[0] += by_row[(warp * COLUMNS + lane) * RUN + i];
#endif
  squares[warp * COLUMNS + lane] = sum[0];
  __syncthreads();
  if (warp > 0) return;

  const Index j = first + lane;
  double square = 0, common = 0;
#pragma unroll 4
  for (int w = 0; w < WARPS; w++) square += squares[w * COLUMNS + lane], common += of_all[w * COLUMNS + lane];
#pragma unroll 1
  for (int bit = 16; bit; bit /= 2) common += __shfl_xor_sync(~0u, common, bit);
  constexpr int ROWS = TURNED ? RUN : 1, ACROSS = COLUMNS / ROWS;
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
  if (lane > 0) return;
  parts[2 * (product * gridDim.x + blockIdx.x)] = total;
  parts[2 * (product * gridDim.x + blockIdx.x) + 1] = least;
}
