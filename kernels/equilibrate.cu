// Weights of a check: v_j = base_j / ||R(:, j)||, rounded to eight significant bits, the norms being estimated from a
// sample of R's rows. A column that is 0 there takes the largest scale of the others.
//
// A block takes 32 columns. The one that comes last adds up |v|, which bounds need, and gives the zero columns theirs.
//
// Launch   (ceil(n / 32), products) blocks of T1 threads
// Macros   those of wide.cuh; T1 threads; TURNED 0 where the rows of R are contiguous, 1 where its columns are; ENTRY the name
// Storage  R(l, j) of product b = R[b step + l rs + j cs]; base and v have n elements, those of product b from b v_step
//          on; sample has the numbers of `samples` rows, `share` is k / samples. parts: 4 gridDim.x numbers a product;
//          tickets: a 0 a product, which is 0 again afterwards; sizes: sum |v| and smallest |v| a product; state: 32
//          words, wiped
#include "sums.cuh"

constexpr int WARPS = T1 / 32, COLUMNS = 32, PER_WARP = COLUMNS / WARPS;
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

INLINE double weight(double base, double scale) { return coarse(base * scale); }

// Sum, smallest, largest, sum over a warp; all its threads have them.
INLINE void over_lanes(double& total, double& least, double& top, double& missing) {
#pragma unroll 1
  for (int bit = 16; bit; bit /= 2) {
    total += __shfl_xor_sync(~0u, total, bit);
    least = fmin(least, __shfl_xor_sync(~0u, least, bit));
    top = fmax(top, __shfl_xor_sync(~0u, top, bit));
    missing += __shfl_xor_sync(~0u, missing, bit);
  }
}

// The same over a block.
INLINE void over_block(double* exchange, double& total, double& least, double& top, double& missing) {
  over_lanes(total, least, top, missing);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) {
    exchange[warp] = total;
    exchange[WARPS + warp] = least;
    exchange[2 * WARPS + warp] = top;
    exchange[3 * WARPS + warp] = missing;
  }
  __syncthreads();
  total = top = missing = 0, least = LARGEST;
#pragma unroll 1
  for (int w = 0; w < WARPS; w++) {
    total += exchange[w];
    least = fmin(least, exchange[WARPS + w]);
    top = fmax(top, exchange[2 * WARPS + w]);
    missing += exchange[3 * WARPS + w];
  }
}

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(Index n, const A_TYPE* __restrict__ R, Index rs, Index cs, Index step, const int* __restrict__ sample,
          Index samples, double share, const float* __restrict__ base, ACC* v, Index v_step, double* parts,
          unsigned* tickets, double* sizes, Bits* state) {
  __shared__ double squares[WARPS * COLUMNS];
  __shared__ double exchange[4 * WARPS];
  __shared__ int last[1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index product = blockIdx.y, first = Index(blockIdx.x) * COLUMNS;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x < 32) state[threadIdx.x] = 0;
  const A_TYPE* at = R + product * step;

  // squares(:, j) = R(l, j)^2 added over the sampled l, in WARPS parts
#if TURNED
#pragma unroll 1
  for (int c = 0; c < PER_WARP; c++) {
    const Index j = first + warp * PER_WARP + c;
    double sum[1] = {0};
#pragma unroll 4
    for (int s = lane; s < samples; s += 32) {
      const double x = j < n ? double(widened(at[sample[s] * rs + j * cs])) : 0.0;
      sum[0] += x * x;
    }
    const double all = over_warp<1>(sum);
    if (lane < WARPS) squares[lane * COLUMNS + warp * PER_WARP + c] = lane == 0 ? all : 0.0;
  }
#else
  double sum = 0;
#pragma unroll 8
  for (int s = warp; s < samples; s += WARPS) {
    const double x = first + lane < n ? double(widened(at[sample[s] * rs + (first + lane) * cs])) : 0.0;
    sum += x * x;
  }
  squares[warp * COLUMNS + lane] = sum;
#endif
  __syncthreads();

  // v, and of the block: sum |v|, smallest |v|, largest scale, columns without one
  double total = 0, least = LARGEST, top = 0, missing = 0;
  if (warp == 0 && first + lane < n) {
    const Index j = first + lane;
    double square = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) square += squares[w * COLUMNS + lane];
    const double norm = sqrt(square * share);
    if (norm > 0 && norm <= LARGEST) {
      top = 1 / norm;
      top = top < LOWEST ? LOWEST : top > HIGHEST ? HIGHEST : top;
      const double x = weight(base[j], top);
      v[product * v_step + j] = ACC(x);
      total = least = fabs(x);
    } else {  // NaN, too
      v[product * v_step + j] = ACC(0);
      missing = 1;
    }
  }
  double* mine = parts + product * (4 * gridDim.x);
  if (warp == 0) {
    over_lanes(total, least, top, missing);
    if (lane == 0) {
      double* at = mine + 4 * blockIdx.x;
      at[0] = total, at[1] = least, at[2] = top, at[3] = missing;
    }
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last[0] = atomicInc(tickets + product, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  if (!last[0]) return;
  __threadfence();

  // the same of all blocks, always in the same order
  total = top = missing = 0, least = LARGEST;
#pragma unroll 1
  for (int b = threadIdx.x; b < gridDim.x; b += T1) {
    total += __ldcg(mine + 4 * b);
    least = fmin(least, __ldcg(mine + 4 * b + 1));
    top = fmax(top, __ldcg(mine + 4 * b + 2));
    missing += __ldcg(mine + 4 * b + 3);
  }
  over_block(exchange, total, least, top, missing);
  if (missing > 0) {  // the same for all threads
    top = top > 0 ? top : 1;
    total = 0;
#pragma unroll 1
    for (Index j = threadIdx.x; j < n; j += T1) {
      double x = double(__ldcg(v + product * v_step + j));
      if (x == 0) v[product * v_step + j] = ACC(x = weight(base[j], top));
      total += fabs(x);
      least = fmin(least, fabs(x));
    }
    __syncthreads();
    over_block(exchange, total, least, top, missing);
  }
  if (threadIdx.x == 0) {
    sizes[2 * product] = total;
    sizes[2 * product + 1] = least;
  }
}
