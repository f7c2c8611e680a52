// The order of rows before the first panel, no zero pivot seen, no panel begun.
//
// Launch   ceil(count / 256) blocks of 256 threads
// Macros   ENTRY the name of the kernel
// Storage  order and places: int32[count]; info: int32[1]; started: uint32[1]
#include "tsm2/index.cuh"

extern "C" __global__ void ENTRY(int* order, int* places, Index count, int* info, unsigned* started) {
  const Index i = Index(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) order[i] = places[i] = int(i);
  if (i == 0) *info = 0, *started = 0;
}
