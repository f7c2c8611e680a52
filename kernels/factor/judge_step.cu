// Judges a step J = j:j+b that is finished: its columns, which should be what getrf makes of them, and its rows of U.
//
//   y(J) = U(J, J) v(J) + sum of parts              of row_sums.cu
//   residuals(0, J) = L(J, J) y(J) - S(order1(J))    rows
//   residuals(1, J) = g(J) U(J, J) - Z(J)            columns
//
// As LuChecksums does with norms estimated (check_panel, check_rows, _reach_within, _judged): growth first by columns,
// then by rows; bounds from the growth and the operations so far; the verdict relative to the median. Then the step
// counts as done, with the growth of its rows (_count). What is not a finite number is never fine.
//
// U and then L are read once, by all warps: a warp takes AT_ONCE columns at a time, a lane every 32nd row of them.
//
// Launch   one block of T1 threads
// Macros   REAL float or double; T1 threads, 512: one for each row of the widest step; CHUNKS of 32 rows, 4, 8 or 16:
//          b <= 32 CHUNKS; ENTRY the name of the kernel
// Storage  W(r, c) = W[r + c ld]; order1: which row of the input each row of W is, after the step. S, row_floor by row
//          of the input; v, Z, column_floor, biggest by column; g, y by place; parts[block b + i] of `blocks` blocks, 0
//          where nothing is right of the step; all float64.
//          moduli: sum |w|, sum |v|. state: growth, operations on rows, on columns, read and updated; tolerances: see
//          line_verdict.cuh. residuals and bounds: of rows, and from max(m, n) on of columns.
//          status: long long; status[at] = 8 token + 1 where a row is not fine + 2 where a column is not + 4 where an
//          element of biggest is larger than partial pivoting allows; in_doubt: these flags again, where line_squares.cu
//          reads them. w is not read.
#include "factor/line_verdict.cuh"

constexpr int AT_ONCE = 16 / CHUNKS;  // columns, so that a lane has 16 loads on their way
constexpr int WARPS = T1 / 32, ROWS = 32 * CHUNKS, GROUPS = T1 / ROWS;
static_assert(ROWS <= T1 && T1 >= 2 * MOST_RATIOS, "a thread for each row, and for each ratio of both sides");

INLINE bool is_part(bool upper, int row, int column) { return upper ? row <= column : row > column; }

// sums(i) += X(r, c) right(c), r = lane + 32 i, over the warp's columns c < b of a triangle X of the square: the upper
// one with the diagonal, or what is strictly below that. Of the upper one each column's left(r) X(r, c), added over the
// warp, goes to across(c) as well.
template <bool UPPER>
INLINE void add_triangle(const Real* __restrict__ square, Index ld, int b, const double* right_of,
                         const double (&left)[CHUNKS], double (&sums)[CHUNKS], double* across) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int c = warp * AT_ONCE; c < b; c += WARPS * AT_ONCE) {
    Real x[AT_ONCE][CHUNKS];
#pragma unroll
    for (int q = 0; q < AT_ONCE; q++)
#pragma unroll
      for (int i = 0; i < CHUNKS; i++) {
        const int row = lane + 32 * i;
        const bool there = row < b && c + q < b && is_part(UPPER, row, c + q);
        x[q][i] = there ? square[row + Index(c + q) * ld] : Real(0);
      }
#pragma unroll
    for (int q = 0; q < AT_ONCE; q++) {
      if (c + q >= b) break;
      const double right = right_of[c + q];
      double z = 0;
#pragma unroll
      for (int i = 0; i < CHUNKS; i++) {
        // What is not part of it counts nothing even where `right` is not finite.
        if (!is_part(UPPER, lane + 32 * i, c + q)) continue;
        const double element = exactly(x[q][i]);
        sums[i] += element * right;
        if constexpr (UPPER) z += left[i] * element;
      }
      if constexpr (UPPER) {
#pragma unroll
        for (int bit = 16; bit; bit /= 2) z += __shfl_xor_sync(~0u, z, bit);
        if (lane == 0) across[c + q] = z;
      }
    }
  }
}

// The sums of a row over all warps, to the thread of its number; in a fixed order.
INLINE double over_warps(const double (&sums)[CHUNKS], double* sums_of_rows) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = WARPS / 2;
#pragma unroll
  for (int i = 0; i < CHUNKS; i++)
    if (warp >= half) sums_of_rows[(warp - half) * ROWS + lane + 32 * i] = sums[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < CHUNKS; i++)
    if (warp < half) sums_of_rows[warp * ROWS + lane + 32 * i] += sums[i];
  __syncthreads();
  double sum = 0;
  if (threadIdx.x < ROWS) {
#pragma unroll
    for (int k = 0; k < half; k++) sum += sums_of_rows[k * ROWS + threadIdx.x];
  }
  __syncthreads();
  return sum;
}

extern "C" __global__ void __launch_bounds__(T1, 1)
    ENTRY(const Real* __restrict__ W, Index ld, Index m, Index n, Index j, Index width, const int* __restrict__ order1,
          const double* __restrict__ w, const double* __restrict__ v, const double* __restrict__ g,
          const double* __restrict__ S, const double* __restrict__ Z, const double* __restrict__ biggest,
          const double* __restrict__ parts, Index blocks, double* y, const double* __restrict__ row_floor,
          const double* __restrict__ column_floor, const double* __restrict__ moduli, double* state, double* residuals,
          double* bounds, Index* status, Index at, Index token, Index* in_doubt, const double* __restrict__ tolerances) {
  const Constants constants = {tolerances};
  __shared__ double sums_of_rows[WARPS / 2 * ROWS];
  __shared__ double right_of[ROWS];  // v(J), then y(J)
  __shared__ double across[ROWS];    // g(J) U(J, J)
  __shared__ double shares[T1];      // of the sum of parts
  __shared__ double ratios[2 * MOST_RATIOS];
  __shared__ double grown[2];
  const int b = int(width), t = threadIdx.x, lane = t % 32;
  const bool there = t < b;
  const Index line = j + (there ? t : 0);
  const Real* square = W + j + j * ld;

  // parts, in GROUPS interleaved shares
  double share = 0;
  const int row = t % ROWS;
  if (row < b) {
#pragma unroll 8
    for (Index k = t / ROWS; k < blocks; k += GROUPS) share += parts[k * b + row];
  }
  shares[t] = share;
  if (there) right_of[t] = v[line];
  double left[CHUNKS], sums[CHUNKS];
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    left[i] = lane + 32 * i < b ? g[j + lane + 32 * i] : 0;
    sums[i] = 0;
  }
  __syncthreads();

  // y(J) = U(J, J) v(J) + parts, and g(J) U(J, J)
  add_triangle<true>(square, ld, b, right_of, left, sums, across);
  double row_last = over_warps(sums, sums_of_rows);
  if (there) {
#pragma unroll
    for (int k = 0; k < GROUPS; k++) row_last += shares[k * ROWS + t];
    y[line] = right_of[t] = row_last;
  }
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) sums[i] = 0;
  __syncthreads();

  // What a thread's row and column are judged by, loaded here: U takes all registers, L leaves some.
  const int known = order1[line], input = is_row(known, m) ? known : 0;
  const double row_first = known == input ? S[input] : INFINITE - INFINITE;  // NaN
  const double column_first = Z[line], largest_multiplier = there ? biggest[line] : 0;
  const double floors[2] = {row_floor[input], column_floor[line]};
  const double column_last = g[line] * exactly(square[(line - j) * (ld + 1)]);
  const double growth_before = state[GROWTH], done[2] = {state[DONE_ROWS], state[DONE_COLUMNS]};

  // L(J, J) y(J) - S(order1(J)), and what was found of columns
  add_triangle<false>(square, ld, b, right_of, left, sums, across);
  const double below = over_warps(sums, sums_of_rows);
  double residual[2] = {0, 0};
  if (there) {
    residual[ROWS_SIDE] = row_last + below - row_first;
    residual[COLUMNS_SIDE] = across[t] - column_first;
  }

  // How much both kinds of lines have grown by now: a median of at most MOST_RATIOS of them
  const int stride = growth_stride(b), count = growth_count(b);
  if (there && t % stride == 0) {
    ratios[t / stride] = growth_ratio(floors[ROWS_SIDE], row_last, constants);
    ratios[MOST_RATIOS + t / stride] = growth_ratio(floors[COLUMNS_SIDE], column_last, constants);
  }
  __syncthreads();
  if (t < 2 * MOST_RATIOS && t % MOST_RATIOS < count) {
    const int side = t / MOST_RATIOS, i = t % MOST_RATIOS;
    if (is_middle(ratios + side * MOST_RATIOS, count, i)) grown[side] = growth_of(ratios[t], constants);
  }
  __syncthreads();

  // Bounds, as of the step's beginning but for growth: an operation more for each line than for the one before it
  const double firsts[2] = {row_first, column_first}, lasts[2] = {row_last, column_last};
  const Index lengths[2] = {n - j, m - j}, lines = m > n ? m : n;
  double ratio[2];
#pragma unroll
  for (int side = 0; side < 2; side++) {
    const double of_side = grown[side];
    const double more = double(t + 1) / b * operations(b, double(lengths[side]), constants);
    const double done_by_then = done[side] + more * larger(of_side, growth_before);
    const double reached = reach(floors[side], done_by_then, double(j) + more, firsts[side], lasts[side]);
    const double bound = factored_bound(reached, double(j + b), moduli[1 - side], constants);
    ratio[side] = ratio_to_bound(residual[side], bound);
    if (!there) continue;
    residuals[side * lines + line] = residual[side];
    bounds[side * lines + line] = bound;
  }
  const bool rows_fine = all_fine<T1>(ratio[ROWS_SIDE], b, constants);
  const bool columns_fine = all_fine<T1>(ratio[COLUMNS_SIDE], b, constants);
  const bool small = largest_over_block<T1>(nan_is_infinite(largest_multiplier)) <= constants[MULTIPLIER];
  if (t > 0) return;
  *in_doubt = (rows_fine ? 0 : 1) + (columns_fine ? 0 : 2) + (small ? 0 : 4);
  status[at] = 8 * token + *in_doubt;
  const double growth = grown[ROWS_SIDE];
  state[GROWTH] = growth;
  state[DONE_ROWS] = done[ROWS_SIDE] + operations(b, double(lengths[ROWS_SIDE]), constants) * growth;
  state[DONE_COLUMNS] = done[COLUMNS_SIDE] + operations(b, double(lengths[COLUMNS_SIDE]), constants) * growth;
}
