// Rows of U by forward substitution: X = inv(L11) X, 8 columns a warp. No inverse, not even of small blocks: a product
// with one is not within gamma_b |L||X| of the right sides, element by element, however small the inverse is.
//
// Right-looking, by blocks of 8 rows. X lies in registers, as the accumulator of the tensor cores has it: lane l holds
// columns 2 (l % 4) and the next one, in VECTOR rows from VECTOR (l / 4) on of each tile of HEIGHT rows. A block is
// exchanged through shared memory, so that each lane has whole columns of it and substitutes on its own, in every one
// of its 8 rows; then the tiles below are updated, in double on the tensor cores, in float by fused multiply-add. Tile
// 0 is the one that the block belongs to: when it is solved, all tiles move up by one, as they are updated.
//
// NaN and infinity touch no row above their own and no other column.
#pragma once
#include "factor/arithmetic.cuh"
#include "factor/real.cuh"

constexpr int PANEL = 128;                    // columns of L11 at most
constexpr int VECTOR = 16 / sizeof(Real);     // elements of 16 bytes
constexpr int HEIGHT = 8 * VECTOR;            // rows of a tile
constexpr int TILES = PANEL / HEIGHT;
constexpr int LANES = 8 / VECTOR;             // groups of four lanes that hold a block of 8 rows
constexpr int OWN = WIDTH == 8 ? 1 : 2;       // columns of a block that a lane substitutes in
// Loops over tiles, and blocks of a tile. Where they are not unrolled, accumulators of the tensor cores, which take
// eight registers in a row, are moved about behind each branch; in float all of it would be 60 kB of code.
constexpr int UNROLLED_TILES = WIDTH == 8 ? TILES : 1, UNROLLED_BLOCKS = WIDTH == 8 ? VECTOR : 1;
// Columns of L11, and rows of a block, lie so far apart that lanes meet different banks.
constexpr int COLUMN_STEP = PANEL + VECTOR, ROW_STEP = 12;
constexpr int EXCHANGE = 2 * 8 * ROW_STEP;    // elements of a warp: two blocks by turns, so that one barrier is enough

struct alignas(16) Vector {
  Real x[VECTOR];
};
struct alignas(2 * sizeof(Real)) Pair {
  Real x, y;
};

// L11 in shared memory: by 8 columns, of which block i has rows 8 i to PANEL - 1. Column 8 i + c begins at
// start_of(i) + c step_of(i).
INLINE constexpr int step_of(int block) { return COLUMN_STEP - 8 * block; }
INLINE constexpr int start_of(int block) { return 8 * block * (COLUMN_STEP + 4 - 4 * block); }

// lower = L11, which is L(0:b, 0:b), by `warps` warps, of which this is number `warp`. L and its columns begin at
// multiples of 16 bytes; what lies behind row b in the last of them is read and means nothing.
INLINE void load_lower(Real* lower, const Real* L, Index ld, int b, int warp, int warps) {
  constexpr int AHEAD = 8, OF_LANE = PANEL / (32 * VECTOR);
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int first = warp; first < b; first += AHEAD * warps) {
    uint4 held[AHEAD][OF_LANE];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
#pragma unroll
      for (int h = 0; h < OF_LANE; h++) {
        const int column = first + i * warps, row = VECTOR * (32 * h + lane);
        held[i][h] = make_uint4(0, 0, 0, 0);
        if (column < b && row < b && row >= column / 8 * 8)
          held[i][h] = *reinterpret_cast<const uint4*>(L + row + column * ld);
      }
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
#pragma unroll
      for (int h = 0; h < OF_LANE; h++) {
        const int column = first + i * warps, row = VECTOR * (32 * h + lane), block = column / 8;
        // Counted in vectors: otherwise the compiler does not see that it may store one at once.
        const int at = (start_of(block) + column % 8 * step_of(block) + row - 8 * block) / VECTOR;
        if (column < b && row < b && row >= 8 * block) reinterpret_cast<uint4*>(lower)[at] = held[i][h];
      }
  }
}

// A warp's 8 columns of X, b rows.
struct Columns {
  Real x[TILES][VECTOR][2];
  int group, member;  // of lanes: l / 4, l % 4

  INLINE void locate() { group = threadIdx.x % 32 / 4, member = threadIdx.x % 4; }
  __device__ void load(const Real* from, Index ld, int rows, int columns);
  __device__ void load_shared(const Real* from);
  __device__ void substitute(const Real* lower, Real* exchange, Real* to, Index ld, int b, int columns);
};

// X = from(0:rows, 0:columns), zero in other rows and columns.
INLINE void Columns::load(const Real* from, Index ld, int rows, int columns) {
  const bool whole = rows == PANEL && columns >= 8;
  if (whole && (reinterpret_cast<size_t>(from) | size_t(ld) * sizeof(Real)) % 16 == 0) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const Vector v =
            *reinterpret_cast<const Vector*>(from + t * HEIGHT + VECTOR * group + (2 * member + e) * ld);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) x[t][i][e] = v.x[i];
      }
    return;
  }
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = t * HEIGHT + VECTOR * group + i, column = 2 * member + e;
        x[t][i][e] = row < rows && column < columns ? from[row + column * ld] : Real(0);
      }
}

// The same of PANEL rows in shared memory, COLUMN_STEP from column to column.
INLINE void Columns::load_shared(const Real* from) {
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const Vector v =
          *reinterpret_cast<const Vector*>(from + t * HEIGHT + VECTOR * group + (2 * member + e) * COLUMN_STEP);
#pragma unroll
      for (int i = 0; i < VECTOR; i++) x[t][i][e] = v.x[i];
    }
}

// y = inv(L) y for unit lower L of 8 rows, of whose columns `triangle` has what lies below the diagonal.
INLINE void substitute_block(const Vector (&triangle)[7][LANES], Real (&y)[OWN][8]) {
#pragma unroll
  for (int s = 0; s < 7; s++)
#pragma unroll
    for (int r = s + 1; r < 8; r++)
#pragma unroll
      for (int c = 0; c < OWN; c++) y[c][r] = minus_product(y[c][r], triangle[s][r / VECTOR].x[r % VECTOR], y[c][s]);
}

// Rows 2 part and 2 part + 1 of 8: a number of a lane's own registers must be known when the kernel is compiled.
INLINE Pair pair_of(const Real (&y)[8], int part) {
  const bool odd = part & 1, late = part & 2;
  const Real x0 = odd ? y[2] : y[0], y0 = odd ? y[3] : y[1];
  const Real x1 = odd ? y[6] : y[4], y1 = odd ? y[7] : y[5];
  return {late ? x1 : x0, late ? y1 : y0};
}

#if WIDTH == 8

// What a lane gives to the update: elements of B, negative, rows 2 member and the next one of column `group`.
struct Known {
  Pair b;
};
INLINE Known known_of(const Real (&y)[OWN][8], const Pair& own) { return {{negative(own.x), negative(own.y)}}; }
INLINE const Real* first_column(const Real* columns, int step, int member) { return columns + 2 * member * step; }

// to = from - L(tile, block) X(block); `at` are this lane's rows in its first column of L.
INLINE void update_tile(Real (&to)[VECTOR][2], const Real (&from)[VECTOR][2], const Real* at, int step,
                        const Known& known) {
  const Vector one = *reinterpret_cast<const Vector*>(at), two = *reinterpret_cast<const Vector*>(at + step);
  Real c0 = from[0][0], c1 = from[0][1], c2 = from[1][0], c3 = from[1][1];
  multiply_tile(c0, c1, c2, c3, one.x[0], one.x[1], two.x[0], two.x[1], known.b.x, known.b.y);
  to[0][0] = c0, to[0][1] = c1, to[1][0] = c2, to[1][1] = c3;
}

#else

// Columns 2 member and the next one, which the lane has solved for itself.
struct Known {
  Real y[OWN][8];
};
INLINE Known known_of(const Real (&y)[OWN][8], const Pair&) {
  Known known;
#pragma unroll
  for (int c = 0; c < OWN; c++)
#pragma unroll
    for (int r = 0; r < 8; r++) known.y[c][r] = y[c][r];
  return known;
}
INLINE const Real* first_column(const Real* columns, int, int) { return columns; }

INLINE void update_tile(Real (&to)[VECTOR][2], const Real (&from)[VECTOR][2], const Real* at, int step,
                        const Known& known) {
  Real sum[VECTOR][2];
#pragma unroll
  for (int i = 0; i < VECTOR; i++) sum[i][0] = from[i][0], sum[i][1] = from[i][1];
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const Vector l = *reinterpret_cast<const Vector*>(at + k * step);
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
#pragma unroll
      for (int e = 0; e < 2; e++) sum[i][e] = minus_product(sum[i][e], l.x[i], known.y[e][k]);
  }
#pragma unroll
  for (int i = 0; i < VECTOR; i++) to[i][0] = sum[i][0], to[i][1] = sum[i][1];
}

#endif

// to(0:b, 0:columns) = inv(L11) X, with L11 as load_lower has left it; `exchange` is shared memory of this warp, which
// some lanes may still be reading when others return. X is lost.
INLINE void Columns::substitute(const Real* lower, Real* exchange, Real* to, Index ld, int b, int columns) {
  // This lane's part of a block's results: rows 2 part and 2 part + 1 of one column.
  const int part = OWN == 1 ? member : group % 4, column = OWN == 1 ? group : 2 * member + group / 4;
  Real* stored = to + 2 * part + column * ld;
#pragma unroll(UNROLLED_TILES)
  for (int tile = 0; tile < TILES; tile++) {
    const int below = TILES - 1 - tile;
#pragma unroll(UNROLLED_BLOCKS)
    for (int number = 0; number < VECTOR; number++) {
      const int block = tile * VECTOR + number, row = 8 * block, step = step_of(block);
      if (row >= b) return;
      const Real* diagonal = lower + start_of(block);
      Vector triangle[7][LANES];
#pragma unroll
      for (int s = 0; s < 7; s++)
#pragma unroll
        for (int v = (s + 1) / VECTOR; v < LANES; v++)
          triangle[s][v] = *reinterpret_cast<const Vector*>(diagonal + s * step + v * VECTOR);

      // y = X(block, own columns)
      Real* here = exchange + number % 2 * (EXCHANGE / 2);
      if (group / LANES == number) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
          *reinterpret_cast<Pair*>(here + (VECTOR * (group % LANES) + i) * ROW_STEP + 2 * member) =
              Pair{x[0][i][0], x[0][i][1]};
      }
      __syncwarp();
      Real y[OWN][8];
#pragma unroll
      for (int r = 0; r < 8; r++) {
        if constexpr (OWN == 1) {
          y[0][r] = here[r * ROW_STEP + group];
        } else {
          const Pair z = *reinterpret_cast<const Pair*>(here + r * ROW_STEP + 2 * member);
          y[0][r] = z.x, y[OWN - 1][r] = z.y;
        }
      }

      // y = inv(L(block, block)) y
      substitute_block(triangle, y);
      Pair own = pair_of(y[0], part);
      if (OWN > 1 && group / 4) own = pair_of(y[OWN - 1], part);

      // X(below) -= L(below, block) y; rows of the same tile that are solved already become anything, and count no more
      const Known known = known_of(y, own);
      const Real* at = first_column(diagonal, step, member) + VECTOR * group - 8 * number;
      if (number < VECTOR - 1) {
        update_tile(x[0], x[0], at, step, known);
#pragma unroll
        for (int count = TILES - 1; count > 0; count--)
          if (below == count) {
#pragma unroll
            for (int u = 1; u <= count; u++) update_tile(x[u], x[u], at + u * HEIGHT, step, known);
          }
      } else {
#pragma unroll
        for (int count = TILES - 1; count > 0; count--)
          if (below == count) {
#pragma unroll
            for (int u = 1; u <= count; u++) update_tile(x[u - 1], x[u], at + u * HEIGHT, step, known);
          }
      }

      // Stored last: the next block waits for the tiles.
      if (column < columns) {
        if (row + 2 * part + 1 < b)
          *reinterpret_cast<Pair*>(stored + row) = own;
        else if (row + 2 * part < b)
          stored[row] = own.x;
      }
    }
  }
}
