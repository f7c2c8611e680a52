// What the kernels share that certify L of a positive definite matrix A = L L'. A triangle lies in a column-major
// matrix X, below its diagonal or above it: what is row-major is its transpose.
//
// Macros   REAL float or double; LOWER 1 for the triangle below the diagonal of X, 0 for that above it
#pragma once
#include "factor/certificate.cuh"
#include "factor/real.cuh"
#include "factor/warp_sums.cuh"

// *counter += how many threads of this warp bring something that is fine; whole warps call it.
INLINE void count(bool fine, Count* counter) { count_fine(fine, counter, Verified(0)); }

// *counter += 1 for a block that has come to its end.
INLINE void count_block(Count* counter) {
  if (threadIdx.x == 0) atomicAdd(counter, Count(1));
}
