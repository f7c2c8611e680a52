// Where the exchanges of each panel of 128 pivots take rows from, all panels at the same time.
//
//   moves[p][place] = where the row that is at `place` after the exchanges of panel p was before them
//
// Of n exchanges those of row i with a row that is not above it are carried out and counted, RIGHT_EXCHANGES; LAPACK's
// are such. A panel changes the places of its own rows, k:k+b, and of those that it exchanges them with below: at most
// 2 b, which lie in shared memory while one thread exchanges them.
//
// Launch   ceil(n / 128) blocks of 256 threads
// Macros   REAL, any; ENTRY the name of the kernel
// Storage  piv: int32[n], counted from 0; moves: int32[P][n]
#include "factor/solution.cuh"

constexpr int PANEL = 128, THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
    ENTRY(const int* __restrict__ piv, Index n, int* __restrict__ moves, Count* verified) {
  __shared__ int pivot[PANEL];     // counted from k
  __shared__ int slot[PANEL];      // where in `held` the row is that comes to place k + i
  __shared__ int held[2 * PANEL];  // places that rows came from: at k:k+b, then at places below
  const int t = threadIdx.x;
  const Index k = Index(blockIdx.x) * PANEL;
  const int b = int(smaller(PANEL, n - k));
  int* own_moves = moves + Index(blockIdx.x) * n;

  int own = t;
  bool right = false;
  if (t < b) {
    const int given = piv[k + t];
    right = given >= k + t && given < n;
    if (right) own = int(given - k);
    pivot[t] = own;
  }
  count_found(right, verified, RIGHT_EXCHANGES);
  for (Index place = t; place < n; place += THREADS) own_moves[place] = int(place);
  __syncthreads();
  int from = own;
  if (t < b && own >= b) {  // below: where the first exchange with that place keeps its row
    int first = 0;
    while (pivot[first] != own) first++;
    from = b + first;
  }
  const bool keeps = t < b && from == b + t;
  if (t < b) {
    slot[t] = from;
    held[t] = int(k) + t;
  }
  if (keeps) held[b + t] = int(k) + own;
  __syncthreads();
  if (t == 0)
    for (int i = 0; i < b; i++) {
      const int other = slot[i], x = held[i], y = held[other];
      held[i] = y;
      held[other] = x;
    }
  __syncthreads();
  if (t < b) own_moves[k + t] = held[t];
  if (keeps) own_moves[k + own] = held[b + t];
}
