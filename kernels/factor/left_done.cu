// Notes that the rows of finished columns are in order when k columns are factored, where they were not beyond that:
//
//   ends[p] = max(ends[p], k)
//
// Launch   1 block of 256 threads
// Macros   ENTRY the name of the kernel
// Storage  ends: int32[panels]
#include "tsm2/index.cuh"

extern "C" __global__ void __launch_bounds__(256) ENTRY(int* ends, Index panels, Index k) {
  for (Index p = threadIdx.x; p < panels; p += 256) ends[p] = max(ends[p], int(k));
}
