// Weighted sums of the rows of X (n x count), which may be moved on the way:
//
//   sums(p) = sum over c of X(r, c) t(c),   squares(p) = sum over c of (X(r, c) t(c))^2,   to(q, c) = X(r, c)
//
// r = gather[p] or p, q = scatter[p] or p. A row that an order does not name is NaN, and is not written.
//
// The warps of a block share the columns of 32 rows, and add theirs in shared memory, always in the same order.
//
// Launch   ceil(n / 32) blocks of T1 threads
// Macros   REAL; T1 threads; ENTRY the name of the kernel
// Storage  X(i, c) = X[i step + c ld], of any sign; to(i, c) = to[i + c ld_to], or 0; gather, scatter: int32[n], or 0; t: double[count]
#include "factor/real.cuh"
#include "factor/solution.cuh"

constexpr int WARPS = T1 / 32;

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(const Real* __restrict__ X, Index step, Index ld, Index n, Index count,
          const int* __restrict__ gather, const double* __restrict__ t, Real* __restrict__ to, Index ld_to, const int* __restrict__ scatter,
          double* __restrict__ sums, double* __restrict__ squares) {
  __shared__ double sums_of_warps[T1];
  __shared__ double squares_of_warps[T1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index place = Index(blockIdx.x) * 32 + lane;
  int source = -1, target = -1;
  if (place < n) {
    source = gather ? gather[place] : int(place);
    target = scatter ? scatter[place] : int(place);
  }
  const bool there = is_row(source, n), moves = to && there && is_row(target, n);
  double sum = 0, of_squares = 0;
  if (there)
#pragma unroll 4
    for (Index c = warp; c < count; c += WARPS) {
      const Real x = X[source * step + c * ld];
      if (moves) to[target + c * ld_to] = x;
      const double term = exactly(x) * t[c];
      sum += term;
      of_squares = fma(term, term, of_squares);
    }
  sums_of_warps[threadIdx.x] = sum;
  squares_of_warps[threadIdx.x] = of_squares;
  __syncthreads();
  if (warp > 0 || place >= n) return;
#pragma unroll
  for (int other = 1; other < WARPS; other++) {
    sum += sums_of_warps[other * 32 + lane];
    of_squares += squares_of_warps[other * 32 + lane];
  }
  const double nan = INFINITE - INFINITE;
  sums[place] = there ? sum : nan;
  squares[place] = there ? of_squares : nan;
}
