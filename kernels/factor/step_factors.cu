// The factors of a step J = j:j+b written out, to be multiplied:
//
//   L(p, :) = W(r, J) below the diagonal, r = places1[order0[j + p]]     the row that lay at j + p before the step
//   corner = W(J, J) below the diagonal,  U = W(J, J) with it and above
//   came(i) = places0[order1[j + i]]                                     where the rows of J lay before the step
//
// both kinds of L with 1 on the diagonal and 0 above. Multipliers that are larger than partial pivoting allows are
// counted.
//
// Launch   (ceil((m - j) / 256), b) blocks of 256 threads
// Macros   REAL; ENTRY the name of the kernel
// Storage  W(r, c) = W[r + c ld]; L: (m - j) x b, corner and U: b x b, by columns without gaps; order0, places0
//          before the step, order1, places1 after it; came: int32[b]; found: evidence.cuh
#include "factor/evidence.cuh"

extern "C" __global__ void __launch_bounds__(256)
    ENTRY(const Real* __restrict__ W, Index ld, Index m, Index j, Index b, const int* __restrict__ order0,
          const int* __restrict__ places0, const int* __restrict__ order1, const int* __restrict__ places1,
          int* __restrict__ came, Real* __restrict__ L, Real* __restrict__ corner, Real* __restrict__ U,
          double largest_multiplier, Count* found) {
  const Index p = Index(blockIdx.x) * blockDim.x + threadIdx.x, c = blockIdx.y, rows = m - j;
  if (p >= rows) return;
  const Real* column = W + j + (j + c) * ld;
  const Index r = max(place_of(places1, order0[j + p], m, j), j) - j;
  const Real x = r > c ? column[r] : Real(r == c);
  L[p + c * rows] = x;
  if (!(fabs(exactly(x)) <= largest_multiplier)) atomicAdd(found + LARGE_MULTIPLIERS, Count(1));
  if (p >= b) return;
  if (c == 0) came[p] = int(place_of(places0, order1[j + p], m, j));
  const Real own = column[p];
  corner[p + c * b] = p > c ? own : Real(p == c);
  U[p + c * b] = p <= c ? own : Real(0);
}
