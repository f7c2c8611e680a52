// TSM2L for today's GPUs: C = alpha A B + beta C, A a few columns (m x k, k = T3), B small (k x n, n = T2). A stream:
// each element of A is read once and each of C written once, in words of up to 16 bytes that lie side by side.
//
// A warp has a tile of TILE rows at a time, all of whose loads are issued before the first use; warps wait for each
// other only once, for B. A thread multiplies whole rows of the tile. Where those are not what it has loaded of A, or
// is to store of C, elements change hands in shared memory of the warp's own: first A's, then C's in the same place.
//
// Launch   (blocks, 1, products) blocks of T1 threads: any number of blocks, ceil(m / (WARPS TILE)) for a tile a warp
// Macros   those of wide.cuh; T1 threads; T2 = n; T3 = k; TCF times a thread has RUN rows; GROUP columns of C that are
//          computed at a time, all of them or a multiple of 4; C_WIDTH bytes of C in one store; LEAVES_FIRST of C too;
//          BLOCKS of a multiprocessor; ENTRY the name of the kernel
//          A_ORDER   0  threads follow the columns of A: rsa = 1, or any strides where V = 1
//                    1  its rows, and they follow each other: csa = 1, rsa = k
//                    2  its rows: csa = 1 and V divides k, or any strides where V = 1
//          C_ORDER   the same of C, with CV, n, rsc and csc
// Storage  A(i, j) = A[i rsa + j csa]; where V > 1, the address of A, in order 0 of each column, in order 2 of each row
//          is a multiple of WIDTH. C(i, j) = C[i rsc + j csc], likewise of C_WIDTH. B(i, j) = B[i rsb + j csb]. Product
//          b lies b times the batch stride further on
// Edges    m arbitrary, k and n are T3 and T2; nothing outside of the matrices is read or written. slice, partial and
//          tickets have a meaning for other kernels only
#include "tsm2/pieces.cuh"

constexpr int WARPS = T1 / 32;
constexpr int CV = C_WIDTH / int(sizeof(C_TYPE));              // elements of C that could be stored at once
constexpr int RUN = A_ORDER == 0 ? V : C_ORDER == 0 ? CV : 1;  // rows of a thread that lie side by side
constexpr int STORED = C_ORDER == 0 && CV > RUN ? RUN : CV;    // elements of C in one store
constexpr int ROWS = TCF * RUN;                                // of a thread
constexpr int TILE = 32 * ROWS;                                // rows of a warp
constexpr int LINE = rounded_up(T2, GROUP);                    // of a row of B in shared memory

// The rows of a tile in shared memory: a contiguous matrix, but for gaps. A thread reads and writes pieces of its own
// rows. Where these are smaller than 16 bytes, a row has an odd number of them, and so they spread over the banks.
// Where they are 16 bytes, a gap as large lies wherever the rows of another thread would begin in the first one's
// banks.
template <class T, int COLUMNS>
struct Rows {
  static constexpr int PIECE = divisor(COLUMNS * int(sizeof(T)), 16);     // bytes
  static constexpr int UNITS = RUN * COLUMNS * int(sizeof(T)) / 16;       // of 16 bytes, that a thread has in a row
  static constexpr int PERIOD = RUN * COLUMNS * (8 / divisor(UNITS, 8));  // elements between gaps
  static constexpr int GAP = PIECE < 16 ? 0 : 16 / int(sizeof(T));

  // Where element `at` of the matrix lies, or begins a piece that no gap divides.
  INLINE static constexpr int place(int at) { return at + at / PERIOD * GAP; }

  static constexpr int BYTES = (TILE * COLUMNS + TILE * COLUMNS / PERIOD * GAP) * int(sizeof(T));
};
typedef Rows<A_TYPE, T3> RowsA;
typedef Rows<ACC, T2> RowsC;
constexpr int BYTES_A = A_ORDER == 0 ? 16 : RowsA::BYTES, BYTES_C = C_ORDER == 0 ? 16 : RowsC::BYTES;
constexpr int SHARED = rounded_up(BYTES_A > BYTES_C ? BYTES_A : BYTES_C, 16) / int(sizeof(ACC));  // of a warp, elements

INLINE int lane() { return threadIdx.x % 32; }

// i elements further on in the direction in which COUNT of them are loaded or stored at once.
template <int COUNT>
INLINE Index along(int i, Index stride) {
  return COUNT > 1 ? i : i * stride;
}

// Where element i of rows lies, counted in their order.
template <int ORDER, int COLUMNS, int COUNT>
INLINE Index offset(int i, Index rs, Index cs) {
  return ORDER == 1 ? i : i / COLUMNS * rs + along<COUNT>(i % COLUMNS, cs);
}

// Where row r of this thread lies in the tile.
INLINE int place_of(int r) { return (r / RUN * 32 + lane()) * RUN + r % RUN; }

#if A_ORDER == 0

// The rows of a thread, RUN elements of a column each.
struct Thread {
  Word x[TCF][T3];

  INLINE ACC at(int row, int j) const {
    return ACC(widened(piece_of<Vector>(again(x[row / RUN][j])).x[row % RUN]));
  }
};
typedef Thread Loaded;

// A(row : row + TILE, :), `at` being A(row, 0): the rows of this thread. Zero after the last of `rows`.
INLINE void load_tile(Loaded& a, const A_TYPE* __restrict__ at, Index rsa, Index csa, Index rows) {
  if (rows >= TILE) {
#pragma unroll
    for (int j = 0; j < T3; j++, at += csa) {
#pragma unroll
      for (int c = 0; c < TCF; c++) a.x[c][j] = word_of(load(at + along<V>(place_of(c * RUN), rsa)));
    }
  } else {
#pragma unroll
    for (int j = 0; j < T3; j++, at += csa) {
#pragma unroll
      for (int c = 0; c < TCF; c++) {
        const int first = place_of(c * RUN);
        a.x[c][j] = word_of(load(at + along<V>(first, rsa), rows - first));
      }
    }
  }
}

INLINE void hand_over(Thread& a, const Loaded& loaded, ACC*) { a = loaded; }

#else

typedef Piece<A_TYPE, RowsA::PIECE> PieceA;
typedef Bits<RowsA::PIECE>::Word WordA;
constexpr int P = RowsA::PIECE / int(sizeof(A_TYPE));

// The rows of a thread, P elements of a row each.
struct Thread {
  WordA x[ROWS][T3 / P];

  INLINE ACC at(int row, int j) const { return ACC(widened(piece_of<PieceA>(again(x[row][j / P])).x[j % P])); }
};

// The vectors of a tile that this thread loads: those of a warp lie side by side.
constexpr int LOADS = (TILE * T3 + 32 * V - 1) / (32 * V);
struct Loaded {
  Word x[LOADS];
};

// The i-th vector of this thread in a tile: its first element, in the order of the rows; and whether there is one.
INLINE int vector(int i) { return (i * 32 + lane()) * V; }
INLINE bool is_vector(int i) { return (i + 1) * 32 * V <= TILE * T3 || vector(i) < TILE * T3; }

// A(row : row + TILE, :), `at` being A(row, 0), in the order of the rows. Zero after the last of `rows`.
INLINE void load_tile(Loaded& a, const A_TYPE* __restrict__ at, Index rsa, Index csa, Index rows) {
  if (rows >= TILE) {
#pragma unroll
    for (int i = 0; i < LOADS; i++)
      if (is_vector(i)) a.x[i] = word_of(load(at + offset<A_ORDER, T3, V>(vector(i), rsa, csa)));
  } else {
#pragma unroll
    for (int i = 0; i < LOADS; i++)
      a.x[i] = word_of(load(at + offset<A_ORDER, T3, V>(vector(i), rsa, csa), rows * T3 - vector(i)));
  }
}

// a = the rows of this thread, out of what all threads of the warp have loaded.
INLINE void hand_over(Thread& a, const Loaded& loaded, ACC* tile) {
  A_TYPE* rows = reinterpret_cast<A_TYPE*>(tile);
  __syncwarp();  // what was there has been read
#pragma unroll
  for (int i = 0; i < LOADS; i++)
    if (is_vector(i)) write(rows + RowsA::place(vector(i)), loaded.x[i]);
  __syncwarp();
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int j = 0; j < T3; j += P)
      a.x[r][j / P] = *reinterpret_cast<const WordA*>(rows + RowsA::place(place_of(r) * T3) + j);
}

#endif

// sum = alpha A(rows, :) B(:, q : q + GROUP), B in shared memory: all threads of a warp read the same of it.
INLINE void multiply(ACC (&sum)[ROWS][GROUP], const Thread& a, ACC* weights, int q, ACC alpha) {
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int i = 0; i < GROUP; i++) sum[r][i] = ACC(0);
#pragma unroll
  for (int j = 0; j < T3; j++) {
    ACC b[GROUP];
    if constexpr (GROUP % UNIT == 0) {
#pragma unroll
      for (int i = 0; i < GROUP; i += UNIT) {
        const Unit unit = *reinterpret_cast<const Unit*>(&weights[j * LINE + q + i]);
#pragma unroll
        for (int u = 0; u < UNIT; u++) b[i + u] = unit.x[u];
      }
    } else {
#pragma unroll
      for (int i = 0; i < GROUP; i++) b[i] = weights[j * LINE + q + i];
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const ACC x = a.at(r, j);
#pragma unroll
      for (int i = 0; i < GROUP; i++) sum[r][i] += x * b[i];
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int i = 0; i < GROUP; i++) sum[r][i] *= alpha;
}

// Lines that leave the level-2 cache first leave other data in it, that of the next launch for one. But where the cache
// is full of such data, they have little room there, and memory that is read and written at a time takes up to 5 % longer.
#if LEAVES_FIRST
#define STORE(at, word) __stcs(at, word)
#else
#define STORE(at, word) *(at) = word
#endif

// C(at : at + STORED) = x + beta C, side by side in memory, only the first `count` of them. PLAIN: all, and beta is 0.
template <bool PLAIN>
INLINE void store(C_TYPE* at, const ACC (&x)[STORED], ACC beta, Index count) {
  typedef Piece<C_TYPE, STORED * sizeof(C_TYPE)> PieceC;
  typedef Bits<sizeof(PieceC)>::Word WordC;
  const bool reads = !PLAIN && beta != ACC(0);
  if (PLAIN || count >= STORED) {
    PieceC c;
    if (reads) c = piece_of<PieceC>(*reinterpret_cast<const WordC*>(at));
#pragma unroll
    for (int i = 0; i < STORED; i++) c.x[i] = narrowed(reads ? x[i] + beta * ACC(widened(c.x[i])) : x[i], C_TYPE());
    STORE(reinterpret_cast<WordC*>(at), word_of(c));
  } else {
#pragma unroll
    for (int i = 0; i < STORED; i++)
      if (i < count) at[i] = narrowed(reads ? x[i] + beta * ACC(widened(at[i])) : x[i], C_TYPE());
  }
}

// C(row : row + TILE, q : q + GROUP), `at` being C(row, 0), of which there are `rows` rows: those of this thread.
template <bool PLAIN>
INLINE void store_columns(C_TYPE* at, Index rsc, Index csc, const ACC (&sum)[ROWS][GROUP], int q, ACC beta,
                          Index rows) {
  at += q * csc;
#pragma unroll
  for (int i = 0; i < GROUP; i++, at += csc) {
    if (T2 % GROUP && q + i >= T2) break;
#pragma unroll
    for (int r = 0; r < ROWS; r += STORED) {
      const int first = place_of(r);
      ACC x[STORED];
#pragma unroll
      for (int v = 0; v < STORED; v++) x[v] = sum[r + v][i];
      store<PLAIN>(at + along<STORED>(first, rsc), x, beta, rows - first);
    }
  }
}

// The same of this thread's rows into shared memory.
INLINE void keep(ACC* tile, const ACC (&sum)[ROWS][GROUP], int q) {
  typedef Piece<ACC, RowsC::PIECE> Sums;
  constexpr int COUNT = RowsC::PIECE / int(sizeof(ACC));
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    ACC* row = tile + RowsC::place(place_of(r) * T2) + q;
#pragma unroll
    for (int i = 0; i < GROUP; i += COUNT) {
      Sums sums;
#pragma unroll
      for (int u = 0; u < COUNT; u++) sums.x[u] = sum[r][i + u];
      if (T2 % GROUP == 0 || q + i < T2) write(row + i, word_of(sums));
    }
  }
}

// C(row : row + TILE, :), `at` being C(row, 0), of which there are `rows` rows, from shared memory in their order.
template <bool PLAIN>
INLINE void store_rows(C_TYPE* at, Index rsc, Index csc, const ACC* tile, ACC beta, Index rows) {
  constexpr int STORES = (TILE * T2 + 32 * STORED - 1) / (32 * STORED);
  constexpr int COUNT = STORED < UNIT ? STORED : UNIT;
  typedef Piece<ACC, COUNT * sizeof(ACC)> Sums;
#pragma unroll(PLAIN ? STORES : 2)
  for (int i = 0; i < STORES; i++) {
    const int first = (i * 32 + lane()) * STORED;
    if ((i + 1) * 32 * STORED > TILE * T2 && first >= TILE * T2) continue;
    ACC x[STORED];
#pragma unroll
    for (int v = 0; v < STORED; v += COUNT) {
      const Sums sums = *reinterpret_cast<const Sums*>(tile + RowsC::place(first + v));
#pragma unroll
      for (int u = 0; u < COUNT; u++) x[v + u] = sums.x[u];
    }
    store<PLAIN>(at + offset<C_ORDER, T2, STORED>(first, rsc, csc), x, beta, rows * T2 - first);
  }
}

extern "C" __global__ void __launch_bounds__(T1, BLOCKS)
    ENTRY(Index m, Index k, Index n, ACC alpha, const A_TYPE* __restrict__ A, Index rsa, Index csa, Index bsa,
          const B_TYPE* __restrict__ B, Index rsb, Index csb, Index bsb, ACC beta, C_TYPE* C, Index rsc, Index csc,
          Index bsc, Index slice, ACC* partial, unsigned* tickets) {
  __shared__ __align__(16) ACC weights[T3 * LINE];
  __shared__ __align__(16) ACC tiles[WARPS * SHARED];
  const int warp = threadIdx.x / 32;
  const Index step = Index(gridDim.x) * WARPS * TILE;
  Index row = (Index(blockIdx.x) * WARPS + warp) * TILE;
  ACC* tile = &tiles[warp * SHARED];
  A += blockIdx.z * bsa;
  B += blockIdx.z * bsb;
  C += blockIdx.z * bsc;

  bool first = true;
#pragma unroll 1
  do {
    Loaded loaded;
    load_tile(loaded, A + row * rsa, rsa, csa, m - row);
    if (first) {  // B is fetched while A is on its way
#pragma unroll 4
      for (int at = threadIdx.x; at < T3 * LINE; at += T1) {
        const int j = at / LINE, q = at % LINE;
        weights[at] = q < T2 ? ACC(widened(B[j * rsb + q * csb])) : ACC(0);
      }
      __syncthreads();
      first = false;
    }
    Thread a;
    hand_over(a, loaded, tile);
    if (C_ORDER != 0) __syncwarp();  // what was there, of A or of C, has been read
    // C(rows, q : q + GROUP) = alpha A(rows, :) B(:, q : q + GROUP) + beta C(rows, q : q + GROUP)
    C_TYPE* at = C + row * rsc;
    const bool plain = beta == ACC(0) && row + TILE <= m;
#pragma unroll 1
    for (int q = 0; q < T2; q += GROUP) {
      ACC sum[ROWS][GROUP];
      multiply(sum, a, weights, q, alpha);
      if (C_ORDER != 0)
        keep(tile, sum, q);
      else if (plain)
        store_columns<true>(at, rsc, csc, sum, q, beta, m - row);
      else
        store_columns<false>(at, rsc, csc, sum, q, beta, m - row);
    }
    if (C_ORDER != 0) {
      __syncwarp();
      if (plain)
        store_rows<true>(at, rsc, csc, tile, beta, m - row);
      else
        store_rows<false>(at, rsc, csc, tile, beta, m - row);
    }
    row += step;
  } while (row < m);
}
