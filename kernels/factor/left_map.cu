// How rows of finished columns still have to move, once all panels are done: the exchanges of later steps at once.
//
//   map[p][place] = where the row that finally lies at `place` lay when the step of panel p ended, place >= ends[p]
//
// or `place` itself where that is no row from ends[p] on. Rows above ends[p] have not moved since. Where ends[p] is the
// end of the last panel no row has, and left_rows reads no map.
//
// Launch   (ceil(m / 256), panels P) blocks of 256 threads
// Macros   ENTRY the name of the kernel
// Storage  order_last: int32[m]; places_by_panel: int32[P + 1][m], [p] before panel p, [P] after the last;
//          ends: int32[P], multiples of 128 but for the end of the last panel; map: int32[P][m]
#include "factor/rows.cuh"

constexpr int PANEL = 128;

extern "C" __global__ void __launch_bounds__(256)
    ENTRY(const int* order_last, const int* places_by_panel, const int* ends, Index m, int* map) {
  const Index place = Index(blockIdx.x) * blockDim.x + threadIdx.x, panel = blockIdx.y;
  const int end = ends[panel];
  if (place < end || place >= m) return;
  const Index after = smaller((end + PANEL - 1) / PANEL, gridDim.y);
  const Index from = place_of(places_by_panel + after * m, order_last[place], m, place);
  map[panel * m + place] = int(from < end ? place : from);
}
