// The order of rows after the exchanges of all panels, each place followed back through them.
//
//   order[place] = moves[0][moves[1][... moves[P - 1][place]]],   places[order[place]] = place
//
// Counted are places that are reached from rows, RIGHT_PLACES.
//
// Launch   ceil(n / 256) blocks of 256 threads
// Macros   REAL, any; ENTRY the name of the kernel
// Storage  moves: int32[P][n] as pivot_moves.cu leaves them; order, places: int32[n]
#include "factor/solution.cuh"

extern "C" __global__ void __launch_bounds__(256)
    ENTRY(const int* __restrict__ moves, Index n, Index panels, int* __restrict__ order, int* __restrict__ places,
          Count* verified) {
  const Index place = Index(blockIdx.x) * blockDim.x + threadIdx.x;
  bool right = place < n;
  int row = int(place);
  for (Index p = panels - 1; p >= 0 && right; p--) {
    row = moves[p * n + row];
    right = is_row(row, n);
  }
  if (place < n) order[place] = right ? row : -1;
  if (right) places[row] = int(place);
  count_found(right, verified, RIGHT_PLACES);
}
