// What the kernels share that check solutions on a GPU: the counts that they leave.
#pragma once
#include "factor/certificate.cuh"

// Elements of `verified`, zeros before. A solution is right only if each that is asked for is n: a kernel that did not
// run shows.
enum Found {
  RIGHT_EXCHANGES = 0,  // exchanges with a row that is not above
  RIGHT_PLACES = 1,     // places that a row came to
  RIGHT_FORWARD = 2,    // rows of the first triangle's system
  RIGHT_BACKWARD = 3,   // of the second one's
  RIGHT_SOLUTION = 4,   // of A X = B
  SAME_LINES = 5,       // lines of lu that hold what they held before it was read
};

INLINE void count_found(bool fine, Count* verified, Index which) { count_fine(fine, verified, Verified(which)); }
