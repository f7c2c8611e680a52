// In front of a product whose right operand was encoded before: what equilibrate.cu does beside its weights for others.
//
// Launch   (1) block of T1 threads, 32
// Macros   those of wide.cuh; ENTRY the name of the kernel
// Storage  state: 32 words, wiped. encoded: number of the call, as number_of takes it, or 0
#include "check/state.cuh"
#include "check/chain.cuh"

extern "C" __global__ void __launch_bounds__(T1) ENTRY(Bits* state, Bits encoded) {
  after_previous();  // the kernel behind begins when this one has ended, and so behind a product on another stream
  begin_product(state, encoded);
}
