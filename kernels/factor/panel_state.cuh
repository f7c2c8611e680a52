// What a thread of the panel kernel holds, how shared memory is laid out, and how 16 bytes become elements.
//
// Panel here: P = W(k:m, k:k+b), `rows` x b. Rows of P are dealt out to warps in order, WARP_ROWS to each. They never
// move while columns are eliminated: a pivot row is marked, and each row carries the place where it lies meanwhile.
// Columns come in strips of STRIP, these in tiles of 8:
//
//   strip  in registers, as the accumulator of the tensor cores has it: lane l holds columns 2 (l % 4) and the next one
//          of each tile, in VECTOR rows from VECTOR (l / 4) on, and again every 8 VECTOR rows
//   tile   the tile at work once more, as whole rows: row u of lane l is the warp's row l + 32 u. Its element 0 is of
//          the column at work: with each column all elements shift by one, so that one piece of code serves them all.
#pragma once
#include "tsm2/index.cuh"
#include "factor/cluster.cuh"

typedef REAL Real;

constexpr int BLOCKS = 16;                   // of the cluster
constexpr int COLUMNS = 128;                 // of a panel at most
constexpr int STRIP = 8 * TILES;             // columns of a strip
constexpr int VECTOR = 16 / sizeof(Real);    // elements of 16 bytes
constexpr int TILE_VECTORS = 8 / VECTOR;     // vectors of a row of a tile
constexpr int MESSAGE = 1 + TILE_VECTORS;    // vectors of a candidate: what is said of it, and the rest of its row
constexpr int WARP_ROWS = 8 * ROWS_A_LANE;   // rows of a warp
constexpr int LANE_ROWS = ROWS_A_LANE / 4;   // whole rows of a lane
constexpr int UPPER_STEP = STRIP + 4;        // from row to row of U in shared memory: lanes meet different banks
constexpr int UNKNOWNS = COLUMNS / 32;       // of a lane, in a triangular solve
constexpr int SOLVED = ROWS_A_LANE == 4 ? 8 : 4;        // columns of U that a warp solves at a time
constexpr int BUFFER_ROWS = TILES > 1 ? WARP_ROWS : 64;  // rows of the buffer between strip and tile

static_assert(WIDTH == sizeof(Real), "bytes of REAL");
static_assert(TILES <= 4 && WARPS_MOST <= 16, "urows has a lane a column, choose a lane a warp");

// The modulus as an unsigned number of two words: of NaNs it is above all others.
constexpr unsigned SMALLEST_NORMAL = WIDTH == 8 ? 0x00100000u : 0x00800000u;  // the high word
constexpr unsigned LARGEST_PLAIN = WIDTH == 8 ? 0x7fc00000u : 0x7e000000u;    // 1 / x is a normal number as well
constexpr unsigned INFINITE = WIDTH == 8 ? 0x7ff00000u : 0x7f800000u;
constexpr unsigned NO_PLACE = 0xffffu;

INLINE void modulus(double x, unsigned& high, unsigned& low) {
  const long long bits = __double_as_longlong(x);
  high = unsigned(bits >> 32) & 0x7fffffffu;
  low = unsigned(bits);
}
INLINE void modulus(float x, unsigned& high, unsigned& low) {
  high = __float_as_uint(x) & 0x7fffffffu;
  low = 0;
}
INLINE bool is_nan(unsigned high, unsigned low) { return high > INFINITE || (high == INFINITE && low > 0); }

// idamax compares |x| > (largest so far), beginning with the row at the present place: NaN is chosen where it stands
// there, and nowhere else.
INLINE void rank_of_nan(bool first, unsigned& high, unsigned& low) {
  if (is_nan(high, low)) high = low = first ? ~0u : 0;
}

INLINE double double_of(unsigned low, unsigned high) {
  return __longlong_as_double((long long)((unsigned long long)high << 32 | low));
}
INLINE void unpack(uint4 x, double* to) { to[0] = double_of(x.x, x.y), to[1] = double_of(x.z, x.w); }
INLINE void unpack(uint4 x, float* to) {
  to[0] = __uint_as_float(x.x), to[1] = __uint_as_float(x.y);
  to[2] = __uint_as_float(x.z), to[3] = __uint_as_float(x.w);
}
INLINE uint4 pack(const double* x) {
  const unsigned long long a = __double_as_longlong(x[0]), b = __double_as_longlong(x[1]);
  return make_uint4(unsigned(a), unsigned(a >> 32), unsigned(b), unsigned(b >> 32));
}
INLINE uint4 pack(const float* x) {
  return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
}

struct alignas(2 * WIDTH) Pair {
  Real x, y;
};

// A panel as it is launched, and the part of it that this thread holds.
struct Panel {
  Real* P;        // P(0, 0)
  Index ld;
  int rows, b;    // of P
  int first;      // k: the panel's place in W
  int *piv, *info;

  int rank, warp, warps, lane, group, member;  // the block in the cluster; groups of four lanes
  int warp_row;                                // the warp's first row of P

  Real strip[ROWS_A_LANE][TILES][2], tile[LANE_ROWS][8];
  unsigned place[LANE_ROWS];   // where the tile's rows lie by now
  unsigned active, at_start;   // a bit for each of them: no pivot row by now; at the start of the tile

  // Shared memory. Two of each that columns use by turns.
  uint4* received;       // [2][BLOCKS][MESSAGE] candidates of all blocks
  uint4* staged;         // [2][16][MESSAGE] candidates of the warps
  uint4* staged_keys;    // [2][16] modulus and place of them
  uint4* staged_rest;    // [2][TILES][TILE_VECTORS] a pivot row's later tiles
  Real* lower;           // [COLUMNS][COLUMNS] L11, column-major
  Real* upper;           // [COLUMNS][UPPER_STEP] -U, the rows above the strip
  Real* rest;            // [TILES][8][STRIP] pivot rows of each tile from that tile on, then -U
  Real* buffers;         // [WARPS_MOST][BUFFER_ROWS][8]
  Real* buffer;          // the warp's: a tile on its way, its multipliers
  int* pivot_row;        // [COLUMNS] row of P that became pivot
  int* final_place;      // [COLUMNS] of the first rows of P
  Barrier* candidates;   // [2]
  Barrier* rest_there;   // [TILES]

  __device__ void locate();
  __device__ void begin();
  __device__ void load_strip(int K);
  __device__ void store_upper(int K);

  // panel_columns.cuh
  __device__ void choose(int J, int j);
  __device__ int eliminate(int J, int j, bool last, Real* column);
  template <int T>
  __device__ void push(int row, int j);
  __device__ void solve_rest(int t);
  __device__ void store_rest(int K, int t);
  template <int T>
  __device__ void open();
  __device__ void eliminate_strip(int K);

  // panel_products.cuh
  template <int T>
  __device__ void apply();
  __device__ void update(int K);

  // panel_solve.cuh
  template <int N>
  __device__ void solve(Real (&y)[N][UNKNOWNS], int K);
  __device__ void gather_lower(int K0, int K1);
  __device__ void load_above(Real (&y)[SOLVED][UNKNOWNS], int K, int c);
  __device__ void solve_above(int K);

  // The warp's row that element i of a column of the strip belongs to.
  INLINE int row_of(int i) const { return i / VECTOR * 8 * VECTOR + VECTOR * group + i % VECTOR; }

  // Where an element of the buffer lies: vectors of a row are exchanged, so that lanes meet different banks.
  INLINE static int turned(int row) { return WIDTH == 8 ? row >> 1 & 3 : row >> 2 & 1; }
  INLINE static int in_buffer(int row, int column) {
    return row * 8 + ((column / VECTOR) ^ turned(row)) * VECTOR + column % VECTOR;
  }

  // Vectors of a candidate in column j of a tile, and bytes that a block gets from all.
  INLINE static int vectors_of(int j) { return 1 + (8 - j + VECTOR - 1) / VECTOR; }
  INLINE static int bytes_of(int j) { return 16 * BLOCKS * vectors_of(j); }
  INLINE int tiles_of(int K) const { return min(TILES, (b - K + 7) / 8); }
};

// Who this thread is. Called in every phase, so that a compiler short of registers keeps none of it, nor addresses made
// of it, from one to the next.
INLINE void Panel::locate() {
  const int thread = thread_now();
  lane = thread % 32, warp = thread / 32, group = lane / 4, member = lane % 4;
  warp_row = (rank * warps + warp) * WARP_ROWS;
  buffer = buffers + warp * BUFFER_ROWS * 8;
}

INLINE void Panel::begin() {
  warps = blockDim.x / 32, rank = block_of_cluster();
  received = reinterpret_cast<uint4*>(shared_memory());
  staged = received + 2 * BLOCKS * MESSAGE;
  staged_keys = staged + 2 * 16 * MESSAGE;
  staged_rest = staged_keys + 2 * 16;
  lower = reinterpret_cast<Real*>(staged_rest + 2 * TILES * TILE_VECTORS);
  upper = lower + COLUMNS * COLUMNS;
  rest = upper + COLUMNS * UPPER_STEP;
  buffers = rest + TILES * 8 * STRIP;
  pivot_row = reinterpret_cast<int*>(buffers + WARPS_MOST * BUFFER_ROWS * 8);
  final_place = pivot_row + COLUMNS;
  candidates = reinterpret_cast<Barrier*>(final_place + COLUMNS);
  rest_there = candidates + 2;
  locate();

  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 + TILES; i++) initialize(candidates + i);
    publish_barriers();
    expect(candidates, bytes_of(0));
    if (b > 1) expect(candidates + 1, bytes_of(1));
  }
  active = 0;
#pragma unroll
  for (int u = 0; u < LANE_ROWS; u++) {
    place[u] = warp_row + lane + 32 * u;
    if (int(place[u]) < rows) active |= 1u << u;
  }
}
