// Weights of a check: v_j = base_j / ||R(:, j)||, rounded to eight significant bits, the norms being estimated from a
// sample of R's rows: 16 runs of 8 at scattered places, all of few. A column that is 0 there takes the largest scale
// among its 32 neighbours, 1 where they are 0 too.
//
// Launch   (ceil(n / 32), products) blocks of T1 threads
// Macros   those of wide.cuh; T1 threads, 512: a warp for each run; TURNED 0 where the rows of R are contiguous, 1 where
//          its columns are; ENTRY the name of the kernel
// Storage  R(l, j) of product b = R[b step + l rs + j cs]; base and v have n elements, those of product b from b v_step
//          on. parts: sum |v| and smallest |v| of each block, one product after the other. state: 32 words, wiped.
//          unshare: sqrt(rows in the sample / k)
#include "sums.cuh"
#include "chain.cuh"

constexpr int WARPS = T1 / 32, COLUMNS = 32, RUN = 8;
static_assert(WARPS == 16, "a run for each warp");
// Scales stay clear of both ends, so that no weight becomes 0 or infinite, and nothing that has a size is unseen.
constexpr int FAR = sizeof(ACC) == 4 ? 100 : 1000;

INLINE unsigned scattered(unsigned x) {
  x = (x + 1) * 0x9e3779b1u;
  x = (x ^ x >> 15) * 0x85ebca77u;
  return x ^ x >> 13;
}

// A scale as (digits in (unshare / 2, unshare], exponent), digits 0 for none: 1 / sqrt(square), to seven digits, whatever the range.
struct Scale {
  float digits;
  int exponent;
};

INLINE Scale scale_of(double square, float unshare) {
  if (!(square > 0 && square <= 0x1.fffffffffffffp1023)) return {0, -FAR};  // 0, NaN, infinity
  const Bits bits = pattern(square);
  const int half = (int(bits >> 52) - 1023) >> 1;  // square = 4^half m, m in [1, 4)
  const float m = float(same_bits<double>(bits - (Bits(2 * half) << 52)));
  return {unshare / sqrtf(m), max(-FAR, min(FAR, -half))};
}

// base times a scale, rounded to eight significant bits.
INLINE ACC weight(float base, Scale scale) {
  const unsigned bits = to_bits(base * scale.digits) + 0x8000u & 0xffff0000u;
  const double power = same_bits<double>(Bits(1023 + scale.exponent) << 52);
  return ACC(double(from_bits(bits)) * power);
}

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(Index k, Index n, const A_TYPE* __restrict__ R, Index rs, Index cs, Index step,
          const float* __restrict__ base, ACC* v, Index v_step, double* parts, double unshare, Bits* state) {
  __shared__ double squares[WARPS * COLUMNS];
#if TURNED
  __shared__ double by_row[WARPS * COLUMNS * RUN];
#endif
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index product = blockIdx.y, first = Index(blockIdx.x) * COLUMNS;
  const A_TYPE* at = R + product * step;
  // A warp takes a run of rows, or its share of few.
  const bool few = k < 2 * RUN * WARPS;
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
#pragma unroll 1
  for (int l = 0; l < length; l += RUN) {
    A_TYPE x[RUN];
#pragma unroll
    for (int i = 0; i < RUN; i++) {
      const int down = l + (TURNED ? lane % RUN : i);
      const Index j = first + (TURNED ? lane / RUN + 4 * i : lane);
      memset(&x[i], 0, sizeof(A_TYPE));
      if (down < length && start + down < k && j < n) x[i] = at[(start + down) * rs + j * cs];
    }
#pragma unroll
    for (int i = 0; i < RUN; i++) {
      const double e = double(widened(x[i]));
      sum[TURNED ? i : 0] += e * e;
    }
  }
#if TURNED
#pragma unroll
  for (int i = 0; i < RUN; i++) by_row[(warp * COLUMNS + lane / RUN + 4 * i) * RUN + lane % RUN] = sum[i];
  __syncwarp();
  sum[0] = 0;
#pragma unroll 1
  for (int i = 0; i < RUN; i++) sum[0] += by_row[(warp * COLUMNS + lane) * RUN + i];
#endif
  squares[warp * COLUMNS + lane] = sum[0];
  __syncthreads();
  if (warp > 0) return;

  const Index j = first + lane;
  double square = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) square += squares[w * COLUMNS + lane];
  Scale scale = scale_of(square, float(unshare));
  // The largest scale of the neighbours, for a column that has none: those of one exponent are much the same.
  int top = scale.digits > 0 ? scale.exponent : -2 * FAR;
#pragma unroll 1
  for (int bit = 16; bit; bit /= 2) top = max(top, __shfl_xor_sync(~0u, top, bit));
  if (!(scale.digits > 0)) scale = {1, top == -2 * FAR ? 0 : top};
  double total = 0, least = 0x1.fffffffffffffp1023;
  if (j < n) {
    const ACC x = weight(own_base, scale);
    v[product * v_step + j] = x;
    total = least = fabs(double(x));
  }
  join_sizes(total, least);
  if (lane > 0) return;
  parts[2 * (product * gridDim.x + blockIdx.x)] = total;
  parts[2 * (product * gridDim.x + blockIdx.x) + 1] = least;
}
