// The verdict on lines whose weighted sums, and those of their squares, are known: one thread a line.
//
// Launch   (ceil(lines / T1), products) blocks of T1 threads
// Macros   those of wide.cuh; T1; ENTRY the name of the kernel
// Storage  u and squares of the lines of product b from b count on
#include "check/verdict.cuh"
#include "check/chain.cuh"

extern "C" __global__ void __launch_bounds__(T1, 1)
    ENTRY(Index count, const double* u, const double* squares, VERDICT_ARGUMENTS) {
  const Index product = blockIdx.y, i = Index(blockIdx.x) * T1 + threadIdx.x, line = product * count + i;
  after_previous();
  next_may_begin();
  const Bits kept = kept_closest(state);
  const bool mine = i < count;
  keep_closest<T1>(mine, mine ? GIVE_VERDICT(line, u[line], squares[line], EXPECTED_OF(line, product)) : 0, kept, state);
}
