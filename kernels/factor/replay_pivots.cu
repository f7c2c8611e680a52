// Whether pivots are the exchanges that led from one snapshot of the order of rows to the next: a block replays those
// of a panel, piv(k : k + b), on the snapshot before it, and compares with the snapshot after it. Counts the panels
// that agree: RIGHT_PANELS. The first snapshot has to be 0, 1, 2, ...
//
// An exchange moves rows of the panel and rows whose places are pivots: these alone are kept in shared memory, the
// latter under the number of the first exchange that names the place. So one thread replays up to PANEL exchanges
// there, and all others compare.
//
// Launch   P = ceil(K / PANEL) blocks of T1 threads
// Macros   REAL, any; T1 threads, at least PANEL; ENTRY the name of the kernel
// Storage  orders: P + 1 snapshots of m numbers, one after the other. Pivots that are none, and numbers of rows that
//          are none, agree with nothing; nothing is read or written beyond the arrays
#include "factor/certificate.cuh"

constexpr int PANEL = 128;  // columns
static_assert(T1 >= PANEL, "a thread for each exchange");

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(const int* __restrict__ piv, const int* __restrict__ orders, Index m, Index K, Count* verified) {
  __shared__ int places[PANEL];   // of the pivots
  __shared__ int slots[PANEL];    // of each: where the row there is kept, in `inside` or from PANEL on in `outside`
  __shared__ int inside[PANEL];   // rows of the panel
  __shared__ int outside[PANEL];  // rows at pivots below it
  const Index k = Index(blockIdx.x) * PANEL;
  const int b = int(smaller(PANEL, K - k)), i = threadIdx.x;
  const int* before = orders + blockIdx.x * m;
  const int* after = before + m;

  bool fine = true;
  if (i < b) {
    const int place = piv[k + i];
    fine = place >= k + i && place < m;
    places[i] = fine ? place : int(k) + i;
    inside[i] = before[k + i];
  }
  __syncthreads();
  if (i < b) {
    const int place = places[i];
    int slot = int(place - k);
    if (slot >= b) {
      int first = 0;
      while (places[first] != place) first++;
      slot = PANEL + first;
      outside[i] = before[place];
    }
    slots[i] = slot;
  }
  __syncthreads();
  if (i == 0)
    for (int step = 0; step < b; step++) {
      const int slot = slots[step], row = inside[step];
      if (slot < PANEL) {
        inside[step] = int(inside[slot]);
        inside[slot] = row;
      } else {
        inside[step] = int(outside[slot - PANEL]);
        outside[slot - PANEL] = row;
      }
    }
  __syncthreads();

  // the panel's rows, and those at its pivots
  if (i < b) {
    fine &= after[k + i] == inside[i];
    const int slot = slots[i];
    if (slot >= PANEL) fine &= after[places[i]] == outside[slot - PANEL];
  }
  // all others stay
  for (Index r = i; r < m; r += T1) {
    const int row = after[r];
    fine &= is_row(row, m);
    if (blockIdx.x == 0) fine &= before[r] == r;
    if (row == before[r] || (r >= k && r < k + b)) continue;
    bool moved = false;
    for (int step = 0; step < b; step++) moved |= places[step] == r;
    fine &= moved;
  }
  const double wrong = sum_over_block<T1>(!fine);
  if (i == 0 && wrong == 0) atomicAdd(verified + RIGHT_PANELS, Count(1));
}
