// Counts the operations of a factorisation of which only the result is known: its rows of U are rows of trailing
// matrices, by which growth is judged (LuChecksums.count_operations). For each run of RUN of the K rows
//
//   growth = (median of |y(r)| / (row_floor(order(r)) + SMALLEST))^2 / CHI_SQUARED
//   done  += operations(rows of the run, what is left of a line at its beginning) growth      of rows, and of columns
//
// A warp takes a run, WARPS of them at a time; one thread adds, in order.
//
// Launch   1 block of T1 threads
// Macros   REAL, any; T1 threads; ENTRY the name of the kernel
// Storage  y has K = min(m, n) elements. state: growth, done of rows and of columns, as they are at the beginning of a
//          factorisation; afterwards with growth of the last run and with the operations of all of them
#include "factor/certificate.cuh"

constexpr int WARPS = T1 / 32;
constexpr int RUN = 64;  // rows whose growth is taken to be the same: COUNTED of lu_checks.py
static_assert(RUN == 64, "a lane of a warp has two rows");

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(const double* __restrict__ y, const int* __restrict__ order, const double* __restrict__ row_floor, Index m,
          Index n, const double* __restrict__ tolerances, double* state) {
  const Constants constants = {tolerances};
  __shared__ double ratios[WARPS * RUN];
  __shared__ double growths[WARPS];
  __shared__ double row_terms[WARPS];
  __shared__ double column_terms[WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index K = smaller(m, n);
  double grown = state[GROWTH], of_rows = state[DONE_ROWS], of_columns = state[DONE_COLUMNS];
  for (Index first = 0; first < K; first += WARPS * RUN) {
    const Index own = first + warp * RUN;
    const int count = int(max(Index(0), smaller(RUN, K - own)));
    for (int i = lane; i < count; i += 32)
      ratios[warp * RUN + i] = growth_ratio(at_place(row_floor, order, own + i, m), y[own + i], constants);
    __syncwarp();
    for (int i = lane; i < count; i += 32)
      if (is_middle(ratios + warp * RUN, count, i)) {
        const double growth = growth_of(ratios[warp * RUN + i], constants);
        growths[warp] = growth;
        row_terms[warp] = operations(count, double(n - own), constants) * growth;
        column_terms[warp] = operations(count, double(m - own), constants) * growth;
      }
    __syncthreads();
    if (threadIdx.x == 0)
      for (int run = 0; run < WARPS && first + run * RUN < K; run++) {
        grown = growths[run];
        of_rows += row_terms[run];
        of_columns += column_terms[run];
      }
    __syncthreads();
  }
  if (threadIdx.x > 0) return;
  state[GROWTH] = grown;
  state[DONE_ROWS] = of_rows;
  state[DONE_COLUMNS] = of_columns;
}
