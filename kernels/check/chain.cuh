// Kernels that follow one another on a stream, each of which may begin before the one before has ended.
//
// Each kernel of a chain calls after_previous() before it touches anything that the one before writes, and then
// next_may_begin(). So when a kernel begins, all that was there before the one in front of it began is there too: only
// what that one writes has to be waited for. Without compute capability 9.0, or in a launch without the attribute,
// both do nothing, because the kernel before has ended.
#pragma once
#include "tsm2/index.cuh"

INLINE void after_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

INLINE void next_may_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
