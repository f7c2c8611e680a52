// Moves the rows of finished columns to their final places: a column at a time, through a buffer.
//
//   W(place, c) = W(map[p][place], c) for place >= ends[p], p = c / 128 the column's panel
//
// Launch   at most K blocks of 512 threads; (m - ends[0]) sizeof(Real) bytes of dynamic shared memory where
//          scratch is 0, else none
// Macros   REAL; ENTRY the name of the kernel
// Storage  W(i, j) = W[i + j ld]; ends, map as left_map.cu has them; scratch: scratch_rows >= m - ends[0] elements a
//          block, or 0
#include "factor/real.cuh"

constexpr int PANEL = 128, THREADS = 512;
constexpr int AT_ONCE = 8;  // elements of a thread on their way from memory

// Loads a column into the buffer from `first` on, with stride THREADS: unrolled by COUNT, the remainder by halves.
template <int COUNT, class Buffer>
INLINE void take(const Real* column, int first, int rows, Buffer buffer) {
#pragma unroll 1
  for (; first + (COUNT - 1) * THREADS < rows; first += COUNT * THREADS) {
    Real x[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) x[i] = __ldcs(column + first + i * THREADS);
#pragma unroll
    for (int i = 0; i < COUNT; i++) buffer[first + i * THREADS] = x[i];
  }
  if constexpr (COUNT > 1) take<COUNT / 2>(column, first, rows, buffer);
}

// Stores the same elements from where they lie in the buffer.
template <int COUNT, class Buffer>
INLINE void give(Real* column, int first, int rows, const int* map, int end, Buffer buffer) {
#pragma unroll 1
  for (; first + (COUNT - 1) * THREADS < rows; first += COUNT * THREADS) {
    int from[COUNT];
    Real x[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) from[i] = map[first + i * THREADS] - end;
#pragma unroll
    for (int i = 0; i < COUNT; i++) x[i] = buffer[from[i]];
#pragma unroll
    for (int i = 0; i < COUNT; i++) __stcs(column + first + i * THREADS, x[i]);
  }
  if constexpr (COUNT > 1) give<COUNT / 2>(column, first, rows, map, end, buffer);
}

template <class Buffer>
INLINE void move(Real* column, int rows, const int* map, int end, Buffer buffer) {
  take<AT_ONCE>(column, threadIdx.x, rows, buffer);
  __syncthreads();
  give<AT_ONCE>(column, threadIdx.x, rows, map, end, buffer);
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    ENTRY(Real* W, Index ld, Index m, Index K, const int* ends, const int* map, Real* scratch, Index scratch_rows) {
  extern __shared__ Real shared[];
  for (Index c = blockIdx.x; c < K; c += gridDim.x) {
    const Index panel = c / PANEL;
    const int end = ends[panel];
    if (end >= K) return;  // of the last step, and so are the columns that follow
    Real* column = W + end + c * ld;
    const int* moves = map + panel * m + end;
    if (scratch)
      move(column, int(m - end), moves, end, scratch + blockIdx.x * scratch_rows);
    else
      move(column, int(m - end), moves, end, shared);
  }
}
