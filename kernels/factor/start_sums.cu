// What the checks of a factorisation start from: sums to be carried, norms of lines, and nothing done yet.
//
//   kept_S = carried_S = S, row_floor = max(sqrt(row_squares), |S|)               rows of A
//   kept_Z = carried_Z = Z, column_floor = max(sqrt(column_squares), |Z|)         columns
//   steps_state = state = initial
//
// Launch   enough blocks of any number of threads for a thread each line of the longer side
// Macros   ENTRY the name of the kernel
// Storage  all float64; steps_state, state: three each; initial: the same, kept three times (tsm2/kept.cuh)
#include "tsm2/kept.cuh"

INLINE void start(Index i, Index lines, const double* sums, const double* squares, double* kept, double* carried,
                  double* floor) {
  if (i >= lines) return;
  const double sum = sums[i], norm = sqrt(squares[i]), size = fabs(sum);
  kept[i] = carried[i] = sum;
  floor[i] = norm < size ? size : norm;  // NaN stays
}

extern "C" __global__ void ENTRY(const double* S, const double* row_squares, Index m, const double* Z,
                                 const double* column_squares, Index n, double* kept_S, double* kept_Z,
                                 double* carried_S, double* carried_Z, double* row_floor, double* column_floor,
                                 const double* initial, double* steps_state, double* state) {
  const Index i = Index(blockIdx.x) * blockDim.x + threadIdx.x;
  start(i, m, S, row_squares, kept_S, carried_S, row_floor);
  start(i, n, Z, column_squares, kept_Z, carried_Z, column_floor);
  if (i < 3) steps_state[i] = state[i] = of_three(initial, 3, i);
}
