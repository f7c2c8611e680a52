// In front of a product whose right operand was encoded before: what equilibrate.cu does beside its weights for others.
//
// Launch   (1) block of T1 threads, 32
// Macros   those of wide.cuh; ENTRY the name of the kernel
// Storage  state: 32 words, wiped. encoded: number of the call, as number_of takes it, or 0
// pause    clock cycles until the kernel behind may begin
#include "check/state.cuh"
#include "check/chain.cuh"

extern "C" __global__ void __launch_bounds__(T1) ENTRY(Bits* state, Bits encoded, Index pause) {
#ifdef __CUDA_ARCH__
  const long long begin = clock64();
#endif
  after_previous();
  begin_product(state, encoded);
#ifdef __CUDA_ARCH__
  while (clock64() - begin < pause) {
  }
#endif
}
