// Factors a panel: W(k:m, k:k+b) = P' L U with partial pivoting, b <= 128, in one cluster of 16 blocks. Pivots are
// LAPACK's (getf2): the largest modulus, of equal ones the first row; NaN only where it stands at the present place.
//
// Strips of columns, left-looking: a strip comes into registers, is brought up to date with what lies left of it, and
// eliminated by tiles of 8 columns (panel_state.cuh, panel_columns.cuh). Rows stay where they are until the last column
// is done; then the panel's own rows move, and all else learns of the exchanges from order1 and places1.
//
// Where an element U(l, j) is not finite, up to 7 above it, in rows of the same tile, may become NaN; pivots and L are
// right.
//
// Launch   16 blocks, one cluster, of 32 w threads, 4 <= w <= WARPS_MOST, 128 ROWS_A_LANE w >= m - k; dynamic shared
//          memory as in abft_tsm2/linalg/device/panel_config.py. The kernel needs the attribute for clusters of more than 8.
// Macros   REAL double or float, WIDTH its bytes; ROWS_A_LANE a multiple of 4, TILES of a strip, WARPS_MOST of a block;
//          ENTRY the name of the kernel
// Storage  W(i, j) = W[i + j ld], m rows; W and its columns begin at multiples of 16 bytes, and k is a multiple of 128.
//          Rows m to ld - 1 may be read; they count nothing, and stay. piv[j], k <= j < k + b: the row exchanged with
//          j. order0[p]: the input row at place p before the panel; order1: the same behind it, places1 its inverse,
//          of all m places. moved: 128 words of scratch. *info = 1 + j for the first pivot j that is 0, unless it is
//          set already. *started = token when the kernel begins.
#include "factor/panel_columns.cuh"
#include "factor/panel_products.cuh"
#include "factor/panel_solve.cuh"
#include "factor/rows.cuh"

// strip = P(:, K:K + STRIP). What is not there counts as 0; rows from m on have no part in anything.
INLINE void Panel::load_strip(int K) {
  const Real* from = P + warp_row + VECTOR * group;
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int c = K + 8 * t + 2 * member + e;
      const Real* column = from + c * ld;
#pragma unroll
      for (int v = 0; v < ROWS_A_LANE / VECTOR; v++) {
        uint4 x = make_uint4(0, 0, 0, 0);
        if (c < b && warp_row + VECTOR * group + v * 8 * VECTOR < rows)
          x = __ldcg(reinterpret_cast<const uint4*>(column + v * 8 * VECTOR));
        Real element[VECTOR];
        unpack(x, element);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) strip[v * VECTOR + i][t][e] = element[i];
      }
    }
}

// P(pivot rows, K:K + STRIP) = U(0:K, K:K + STRIP), by all blocks together.
INLINE void Panel::store_upper(int K) {
  const int threads = warps * 32;
  for (int i = threadIdx.x + rank * threads; i < STRIP * COLUMNS; i += BLOCKS * threads) {
    const int row = i % COLUMNS, c = i / COLUMNS;
    if (row < K && K + c < b) P[pivot_row[row] + (K + c) * ld] = negative(upper[row * UPPER_STEP + c]);
  }
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(32 * WARPS_MOST, 1)
    ENTRY(Real* W, Index ld, Index m, Index k, Index b, int* piv, const int* order0, int* order1, int* places1,
          int* moved, int* info, unsigned* started, Index token) {
  Panel panel;
  panel.P = W + k + k * ld, panel.ld = ld, panel.rows = int(m - k), panel.b = int(b);
  panel.first = int(k), panel.piv = piv, panel.info = info;
  const int threads = blockDim.x, thread = threadIdx.x, width = int(b), offset = int(k);
  panel.begin();
  const int of_cluster = panel.rank * threads + thread;
  if (of_cluster == 0) *static_cast<volatile unsigned*>(started) = unsigned(token);
  cluster_barrier();  // barriers are initialized: others may send

#pragma unroll 1
  for (int K = 0; K < width; K += STRIP) {
    panel.locate();
    if (K) panel.solve_above(K);
    panel.locate();
    panel.load_strip(K);
    if (K) panel.update(K);
    panel.locate();
    panel.eliminate_strip(K);
    panel.locate();
    if (K) panel.store_upper(K);
    if (K + STRIP >= width) {
      // Where all rows have gone: order1(k:m), places1 and, of the panel's first rows, moved.
#pragma unroll
      for (int u = 0; u < LANE_ROWS; u++) {
        const int row = panel.warp_row + panel.lane + 32 * u, to = int(panel.place[u]);
        if (row < panel.rows) {
          const int input = order0[offset + row];
          order1[offset + to] = input;
          if (is_row(input, m)) places1[input] = offset + to;
          if (row < width) moved[row] = to;
        }
      }
      for (int p = of_cluster; p < offset; p += BLOCKS * threads) {
        const int input = order0[p];
        order1[p] = input;
        if (is_row(input, m)) places1[input] = p;
      }
    }
    __threadfence();
    cluster_barrier();  // the strip is written: the next one reads rows of all blocks
  }

  // The panel's own rows move, 8 columns a block: pivot rows to the top, what lay there to where it has gone.
  for (int i = thread; i < width; i += threads) panel.final_place[i] = __ldcg(moved + i);
  constexpr int OF_BLOCK = COLUMNS / BLOCKS, MOST = OF_BLOCK;  // elements of a thread, of 128 threads or more
  Real pivot[MOST], replaced[MOST];
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    const int z = thread + i * threads, row = z % COLUMNS, c = panel.rank * OF_BLOCK + z / COLUMNS;
    if (z >= OF_BLOCK * COLUMNS || row >= width || c >= width) continue;
    const Real* column = panel.P + c * ld;
    pivot[i] = __ldcg(column + panel.pivot_row[row]);
    replaced[i] = __ldcg(column + row);
  }
  cluster_barrier();  // all have read
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    const int z = thread + i * threads, row = z % COLUMNS, c = panel.rank * OF_BLOCK + z / COLUMNS;
    if (z >= OF_BLOCK * COLUMNS || row >= width || c >= width) continue;
    Real* column = panel.P + c * ld;
    column[row] = pivot[i];
    const int to = panel.final_place[row];
    if (to >= width) column[to] = replaced[i];
  }
}
