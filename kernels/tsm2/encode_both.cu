// Both checksums of a row-major matrix in one read: A V, W' A, weighted sums of squares of rows and columns, and sums
// of the bit patterns of rows and columns.
//
// A block owns a stripe of columns of a group of rows and walks down the rows, the next T3 of them on their way while
// one is added. A thread keeps the sums of its columns, and their weights, in registers; what it has of ROWS rows is
// added over its warp by exchanges that halve what is left to add, over the warps in shared memory. Weights of rows are
// in shared memory, a panel of rows at a time. What a block has of the sums of a row or column it leaves behind;
// add_parts.cu adds these parts, always in the same order.
//
// Launch   (stripes = ceil(k / (T1 V TCF)), groups = ceil(m / slice)) blocks of T1 threads
// Macros   those of wide.cuh; T1 threads; T2 columns of V and of W, whichever has more; T3 rows loaded ahead, a divisor
//          of 32; ROWS, a divisor of T3, that a warp adds at a time; TCF vectors of a thread in a row; SQUARES, WORDS 1
//          where these sums are wanted, else 0; RIGHT, LEFT the Kind of V and W; BLOCKS of a multiprocessor; ENTRY the
//          name of the kernel
// Storage  A(i, j) = A[i lda + j]; WIDTH divides its address, lda and k in bytes. V (k x rv) and W (m x rw) as in
//          generated.cuh. Sum q, q < T2 of A V(:, q), q = T2 of the squares, of row i: row_parts[(stripe VALUES + q) m
//          + i], of column j: column_parts[(group VALUES + q) k + j]; words: row_words[stripe m + i],
//          column_words[group k + j]
// Edges    m, k arbitrary; nothing outside of the matrix is read. `slice` rows of a group, any number
#include "tsm2/exact.cuh"
#include "tsm2/wide.cuh"
#include "tsm2/generated.cuh"
#include "tsm2/sums.cuh"

constexpr int WARPS = T1 / 32;
constexpr int STRIPE = T1 * V * TCF;               // columns of a block
constexpr int PANEL = 32;                          // rows whose weights are fetched at a time, a multiple of T3
constexpr int VALUES = T2 + SQUARES;               // sums of a row or of a column
constexpr int LINE = rounded_up(VALUES, UNIT);     // of the weights of a row in shared memory
constexpr int OWN = TCF * V;                       // columns of a thread
constexpr int SUMS = ROWS * VALUES;                // that a warp adds at a time
constexpr int FETCHED = (PANEL * VALUES + T1 - 1) / T1;  // weights of rows a thread
static_assert(SUMS <= 32 && PANEL % T3 == 0 && T3 % ROWS == 0, "a lane of a warp keeps one sum");

template <Kind KIND>
INLINE ACC weight(const Weights<KIND>& w, Index i, int q) {
  return q < T2 ? w(i, q) : w.square(i);
}

// b = W(first : first + PANEL, :), the part of this thread; zero after `count` rows.
INLINE void fetch(ACC (&b)[FETCHED], const Weights<LEFT>& left, Index first, int count) {
#pragma unroll
  for (int i = 0; i < FETCHED; i++) {
    const int at = threadIdx.x + i * T1;
    const bool there = at < PANEL * VALUES && at % PANEL < count;
    b[i] = there ? weight(left, first + at % PANEL, at / PANEL) : ACC(0);
  }
}

INLINE void keep(ACC* weights, const ACC (&b)[FETCHED]) {
#pragma unroll
  for (int i = 0; i < FETCHED; i++) {
    const int at = threadIdx.x + i * T1;
    if (at < PANEL * VALUES) weights[at % PANEL * LINE + at / PANEL] = b[i];
  }
}

// a = A(row, column : column + V) for each vector of this thread, `at` being A(row, column); zero where nothing is.
INLINE void load_row(Vector (&a)[TCF], const A_TYPE* at, Index columns, bool there) {
#pragma unroll
  for (int c = 0; c < TCF; c++) a[c] = load(at + c * T1 * V, there && c * T1 * V < columns ? V : 0);
}

// x += a V, sum += w a for the elements of one row; likewise of their squares.
INLINE void add_row(ACC* x, ACC (&sum)[OWN][VALUES], const Vector (&a)[TCF], const ACC (&right)[OWN][VALUES],
                    const ACC (&left)[LINE]) {
#pragma unroll
  for (int v = 0; v < OWN; v++) {
    const auto element = widened(a[v / V].x[v % V]);
    const ACC e = sizeof(ACC) == 8 ? ACC(exactly(element)) : ACC(element);
#pragma unroll
    for (int q = 0; q < VALUES; q++) {
      const ACC term = q < T2 ? e : e * e;
      x[q] += term * right[v][q];
      sum[v][q] += term * left[q];
    }
  }
}

extern "C" __global__ void __launch_bounds__(T1, BLOCKS)
    ENTRY(Index m, Index k, const A_TYPE* __restrict__ A, Index lda, const ACC* __restrict__ rights, Index rsv,
          Index csv, Index rv, Bits seedv, const ACC* __restrict__ right_squares, Index ssv, Index givenv,
          const ACC* __restrict__ lefts, Index rsw, Index csw, Index rw, Bits seedw,
          const ACC* __restrict__ left_squares, Index ssw, Index givenw, Index slice, ACC* row_parts, ACC* column_parts,
          Bits* row_words, Bits* column_words) {
  __shared__ __align__(16) ACC weights[2 * PANEL * LINE];
  __shared__ ACC totals[2 * WARPS * PANEL * VALUES];
#if WORDS
  __shared__ Bits word_totals[2 * WARPS * PANEL];
  const int word = sum_of<ROWS>(threadIdx.x % 32);
  Bits word_sum[OWN];
#pragma unroll
  for (int v = 0; v < OWN; v++) word_sum[v] = 0;
#endif
  const Weights<RIGHT> all_right = {rights, rsv, csv, k, rv, seedv, right_squares, ssv, givenv != 0};
  const Weights<LEFT> all_left = {lefts, rsw, csw, m, rw, seedw, left_squares, ssw, givenw != 0};
  const int warp = threadIdx.x / 32, place = sum_of<SUMS>(threadIdx.x % 32);
  const Index begin = blockIdx.y * slice;
  const int rows = int(smaller(slice, m - begin));
  const Index column = Index(blockIdx.x) * STRIPE + threadIdx.x * V, columns = k - column;
  const A_TYPE* at = A + begin * lda + column;

  Vector a[T3][TCF];
#pragma unroll
  for (int i = 0; i < T3; i++, at += lda) load_row(a[i], at, columns, i < rows);

  ACC right[OWN][VALUES], sum[OWN][VALUES], b[FETCHED];
#pragma unroll
  for (int v = 0; v < OWN; v++)
#pragma unroll
    for (int q = 0; q < VALUES; q++) {
      right[v][q] = weight(all_right, column + v / V * (T1 * V) + v % V, q);
      sum[v][q] = ACC(0);
    }
  fetch(b, all_left, begin, rows);
  keep(weights, b);
  __syncthreads();

  int stage = 0;
#pragma unroll 1
  for (int panel = 0; panel < rows; panel += PANEL, stage ^= 1) {
    const int left_rows = min(PANEL, rows - panel);
    // the weights of the next panel are on their way while this one is added
    fetch(b, all_left, begin + panel + PANEL, rows - panel - PANEL);
#pragma unroll 1
    for (int first = 0; first < left_rows; first += T3) {
#pragma unroll
      for (int step = 0; step < T3; step += ROWS) {
        // x = A(i : i + ROWS, stripe) V(stripe, :), sum += W(i : i + ROWS, :)' A(i : i + ROWS, stripe)
        ACC x[SUMS];
#if WORDS
        Bits words[ROWS];
#endif
#pragma unroll
        for (int i = 0; i < ROWS; i++, at += lda) {
          ACC left[LINE];
#pragma unroll
          for (int q = 0; q < LINE; q += UNIT) {
            const Unit unit = *reinterpret_cast<const Unit*>(&weights[(stage * PANEL + first + step + i) * LINE + q]);
#pragma unroll
            for (int j = 0; j < UNIT; j++) left[q + j] = unit.x[j];
          }
#pragma unroll
          for (int q = 0; q < VALUES; q++) x[i * VALUES + q] = ACC(0);
          add_row(x + i * VALUES, sum, a[step + i], right, left);
#if WORDS
          words[i] = 0;
#pragma unroll
          for (int v = 0; v < OWN; v++) {
            const Bits bits = pattern(a[step + i][v / V].x[v % V]);
            words[i] += bits;
            word_sum[v] += bits;
          }
#endif
          load_row(a[step + i], at, columns, panel + first + step + i + T3 < rows);
        }
        const ACC total = over_warp<SUMS>(x);
        if (place < SUMS) totals[((stage * WARPS + warp) * PANEL + first + step) * VALUES + place] = total;
#if WORDS
        const Bits word_total = over_warp<ROWS>(words);
        if (word < ROWS) word_totals[(stage * WARPS + warp) * PANEL + first + step + word] = word_total;
#endif
      }
    }
    keep(weights + (stage ^ 1) * PANEL * LINE, b);
    __syncthreads();  // the one barrier of a panel: what the next one writes lies in the other stage
    for (int i = threadIdx.x; i < PANEL * VALUES; i += T1) {
      const int row = i % PANEL, q = i / PANEL;
      if (row >= left_rows) continue;
      ACC s = ACC(0);
#pragma unroll
      for (int w = 0; w < WARPS; w++) s += totals[((stage * WARPS + w) * PANEL + row) * VALUES + q];
      row_parts[(Index(blockIdx.x) * VALUES + q) * m + begin + panel + row] = s;
    }
#if WORDS
    for (int row = threadIdx.x; row < left_rows; row += T1) {
      Bits s = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) s += word_totals[(stage * WARPS + w) * PANEL + row];
      row_words[blockIdx.x * m + begin + panel + row] = s;
    }
#endif
  }

#pragma unroll
  for (int v = 0; v < OWN; v++) {
    const Index j = column + v / V * (T1 * V) + v % V;
    if (j >= k) continue;
#pragma unroll
    for (int q = 0; q < VALUES; q++) column_parts[(Index(blockIdx.y) * VALUES + q) * k + j] = sum[v][q];
#if WORDS
    column_words[blockIdx.y * k + j] = word_sum[v];
#endif
  }
}
