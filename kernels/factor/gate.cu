// Holds a stream until the panel kernel of this token, or a later one, has its multiprocessors: a product queued behind
// this would otherwise take them first. It says nothing of what that kernel has written.
//
// The wait ends by itself after a tenth of a second, so that a panel that was never launched cannot hang the stream.
// A product that begins too early is only slow.
//
// Launch   1 block of 1 thread
// Macros   ENTRY the name of the kernel
// Storage  started: uint32[1]
#include "tsm2/index.cuh"

constexpr Index LONGEST = 100'000'000;  // nanoseconds

#ifdef __CUDA_ARCH__
INLINE Index nanoseconds() {
  Index now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
INLINE void rest() { __nanosleep(50); }
#else
INLINE Index nanoseconds() {  // on a CPU nothing runs beside this
  static Index polls = 0;
  return polls += LONGEST / 100;
}
INLINE void rest() {}
#endif

extern "C" __global__ void ENTRY(const unsigned* started, Index token) {
  const Index begin = nanoseconds();
  while (Index(*(const volatile unsigned*)started) < token && nanoseconds() - begin < LONGEST) rest();
}
