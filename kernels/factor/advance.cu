// Takes off the sums S of the rows that are left what the trailing matrix has lost, L21 U12:
//
//   S(order1(r)) -= sum over i < b of W(r, j+i) y(j+i)     for r >= j+b
//
// A block takes ROWS rows; its threads share the columns in PARTS interleaved parts.
//
// Launch   ceil((m - j - b) / ROWS) blocks of ROWS * PARTS threads
// Macros   REAL float or double; ROWS, PARTS; ENTRY the name of the kernel
// Storage  W(r, c) = W[r + c ld], r < m. order1: which row of the input each row of W is, after the step. S by row of
//          the input, y by place; float64
#include "factor/line_verdict.cuh"

constexpr int T1 = ROWS * PARTS;

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(const Real* __restrict__ W, Index ld, Index m, Index j, Index b, const int* __restrict__ order1,
          const double* __restrict__ y, double* S) {
  __shared__ double sums_of_parts[T1];
  const int row = threadIdx.x % ROWS, part = threadIdx.x / ROWS;
  const Index r = j + b + Index(blockIdx.x) * ROWS + row;
  const Real* from = W + (r < m ? r : m - 1) + j * ld;
  double sum = 0;
#pragma unroll 16
  for (int i = part; i < int(b); i += PARTS) sum += exactly(from[i * ld]) * y[j + i];
  sums_of_parts[threadIdx.x] = sum;
  __syncthreads();
  if (part > 0 || r >= m) return;
#pragma unroll
  for (int k = 1; k < PARTS; k++) sum += sums_of_parts[k * ROWS + row];
  const int input = order1[r];
  if (is_row(input, m)) S[input] -= sum;  // else the row that was meant will not agree
}
