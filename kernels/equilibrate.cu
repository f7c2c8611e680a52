// Weights of a check: v_j = base_j / ||R(:, j)||, rounded to eight significant bits, the norms being estimated from a
// sample of R's rows: 16 runs of 8 at scattered places, all of few. A column that is 0 there takes the largest scale
// among its 32 neighbours, 1 where they are 0 too.
//
// Launch   (ceil(n / 32), products) blocks of T1 threads
// Macros   those of wide.cuh; T1 threads; TURNED 0 where the rows of R are contiguous, 1 where its columns are; ENTRY
//          the name of the kernel
// Storage  R(l, j) of product b = R[b step + l rs + j cs]; base and v have n elements, those of product b from b v_step
//          on. parts: sum |v| and smallest |v| of each block, one product after the other. state: 32 words, wiped
#include "sums.cuh"
#include "chain.cuh"

constexpr int WARPS = T1 / 32, COLUMNS = 32, PER_WARP = COLUMNS / WARPS;
constexpr int RUNS = 16, RUN = 8, SAMPLE = RUNS * RUN;
// Scales stay clear of both ends, so that no weight becomes 0 or infinite, and nothing that has a size is unseen.
constexpr double LOWEST = sizeof(ACC) == 4 ? 0x1p-100 : 0x1p-1000, HIGHEST = sizeof(ACC) == 4 ? 0x1p100 : 0x1p1000;
constexpr double LARGEST = 0x1.fffffffffffffp1023;

// x rounded to eight significant bits.
INLINE double coarse(double x) {
  Bits bits = pattern(x);
  bits = (bits + (1ull << 44)) & ~((1ull << 45) - 1);
  double y;
  memcpy(&y, &bits, 8);
  return y;
}

// The s-th row of the sample, of k: no period in the data can hide from runs at scattered places.
INLINE Index sampled(int s, Index k) {
  if (k < 2 * SAMPLE) return s;
  const Index group = k / RUNS;
  const unsigned run = s / RUN;
  return run * group + (run * 2654435761u + 0x9e37u) % unsigned(group - RUN + 1) + s % RUN;
}

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(Index k, Index n, const A_TYPE* __restrict__ R, Index rs, Index cs, Index step,
          const float* __restrict__ base, ACC* v, Index v_step, double* parts, Bits* state) {
  __shared__ double squares[WARPS * COLUMNS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index product = blockIdx.y, first = Index(blockIdx.x) * COLUMNS;
  const int samples = k < 2 * SAMPLE ? int(k) : SAMPLE;
  const A_TYPE* at = R + product * step;
  after_previous();
  next_may_begin();
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x < 32) state[threadIdx.x] = 0;

  // squares(:, j) = R(l, j)^2 added over the sampled l, in WARPS parts
#if TURNED
#pragma unroll 1
  for (int c = 0; c < PER_WARP; c++) {
    const Index j = first + warp * PER_WARP + c;
    double sum[1] = {0};
#pragma unroll 4
    for (int s = lane; s < samples; s += 32) {
      const double x = j < n ? double(widened(at[sampled(s, k) * rs + j * cs])) : 0.0;
      sum[0] += x * x;
    }
    const double all = over_warp<1>(sum);
    if (lane < WARPS) squares[lane * COLUMNS + warp * PER_WARP + c] = lane == 0 ? all : 0.0;
  }
#else
  double sum = 0;
#pragma unroll 16
  for (int s = warp; s < samples; s += WARPS) {
    const double x = first + lane < n ? double(widened(at[sampled(s, k) * rs + (first + lane) * cs])) : 0.0;
    sum += x * x;
  }
  squares[warp * COLUMNS + lane] = sum;
#endif
  __syncthreads();
  if (warp > 0) return;

  const Index j = first + lane;
  double square = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) square += squares[w * COLUMNS + lane];
  const double norm = sqrt(square * (double(k) / double(samples)));
  double scale = norm > 0 && norm <= LARGEST ? 1 / norm : 0;  // NaN has none
  scale = scale == 0 ? 0 : scale < LOWEST ? LOWEST : scale > HIGHEST ? HIGHEST : scale;
  double top = scale;
#pragma unroll 1
  for (int bit = 16; bit; bit /= 2) top = fmax(top, __shfl_xor_sync(~0u, top, bit));
  if (scale == 0) scale = top > 0 ? top : 1;
  double total = 0, least = LARGEST;
  if (j < n) {
    const double x = coarse(base[j] * scale);
    v[product * v_step + j] = ACC(x);
    total = least = fabs(x);
  }
#pragma unroll 1
  for (int bit = 16; bit; bit /= 2) {
    total += __shfl_xor_sync(~0u, total, bit);
    least = fmin(least, __shfl_xor_sync(~0u, least, bit));
  }
  if (lane > 0) return;
  parts[2 * (product * gridDim.x + blockIdx.x)] = total;
  parts[2 * (product * gridDim.x + blockIdx.x) + 1] = least;
}
