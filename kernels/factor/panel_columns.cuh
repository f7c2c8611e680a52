// Columns of a strip: who becomes pivot, what the cluster tells one another, and elimination.
//
// Each column takes one exchange: every block sends its candidate, which is the modulus, the place, 1 / x and the rest
// of the row within the tile, to all blocks, itself included; each decides on its own which one is the pivot.
//
// Two barriers and two buffers by turns are enough. A block sends its candidate of column J + 2 only when it has those
// of J + 1 from all, and a block sends that of J + 1 only when all of its threads have read those of J.
#pragma once
#include "factor/panel_state.cuh"

// The lane with the largest (high, low); of equal ones that with the smallest place. One reduction, mostly.
INLINE int best_lane(unsigned high, unsigned low, unsigned place, int lane) {
  const unsigned top = largest_of_warp(high);
  unsigned found = lanes_where(high == top);
  if (__popc(found) > 1) {
    if (WIDTH == 8) {
      const unsigned top_low = largest_of_warp(high == top ? low : 0);
      found = lanes_where(high == top && low == top_low);
    }
    if (__popc(found) > 1) {
      const bool equal = found >> lane & 1;
      const unsigned least = smallest_of_warp(equal ? place : ~0u);
      found = lanes_where(equal && place == least);
    }
  }
  return __ffs(found) - 1;
}

// Finds the block's candidate in column J of the panel, column j of the tile, and sends it. Every warp stages its own
// before the barrier; after it, the best one goes to all blocks, a vector a thread.
INLINE void Panel::choose(int J, int j) {
  const int turn = j & 1;
  unsigned high, low, at;
  int row;
  Real x;
  auto compare = [&](bool with_nans) {
    high = low = 0, at = ~0u, row = 0, x = 0;
#pragma unroll
    for (int u = 0; u < LANE_ROWS; u++) {
      unsigned h, l;
      modulus(tile[u][0], h, l);
      if (with_nans) rank_of_nan(int(place[u]) == J, h, l);
      const bool better = h > high || (h == high && (l > low || (l == low && place[u] < at)));
      if ((active >> u & 1) && (at == ~0u || better)) high = h, low = l, at = place[u], row = u, x = tile[u][0];
    }
  };
  compare(false);
  if (high >= INFINITE) compare(true);
  const Real over[4] = {reciprocal_of(x), 0, 0, 0};

  if (lane == best_lane(high, low, at, lane)) {
    uint4* message = staged + (turn * 16 + warp) * MESSAGE;
    staged_keys[turn * 16 + warp] = make_uint4(high, low, at, 0);
    const uint4 bits = pack(over);
    message[0] = make_uint4(high, (at & 0xffff) | unsigned(warp_row + lane + 32 * row) << 16, bits.x, bits.y);
#pragma unroll
    for (int u = 0; u < LANE_ROWS; u++)
      if (u == row) {
#pragma unroll
        for (int i = 0; i < TILE_VECTORS; i++) message[1 + i] = pack(&tile[u][i * VECTOR]);
      }
  }
  __syncthreads();
  const uint4 key = lane < warps ? staged_keys[turn * 16 + lane] : make_uint4(0, 0, ~0u, 0);
  const int best = best_lane(key.x, key.y, key.z, lane), part = threadIdx.x / BLOCKS;
  if (part < vectors_of(j))
    send(received + (turn * BLOCKS + rank) * MESSAGE + part, candidates + turn, threadIdx.x % BLOCKS,
         staged[(turn * 16 + best) * MESSAGE + part]);
}

// Eliminates column J of the panel, column j of the tile: P(:, J) of rows that are no pivots becomes the multipliers,
// tile -= multipliers * (rest of the pivot row). `column` is this lane's first element of the column. Chooses the next
// candidate unless this is the tile's last column. Returns the pivot's row in this warp, or -1.
INLINE int Panel::eliminate(int J, int j, bool last, Real* column) {
  const int turn = j & 1;
  wait_for(candidates + turn, J >> 1 & 1);
  if (threadIdx.x == 0 && J + 2 < b) expect(candidates + turn, bytes_of((j + 2) & 7));

  const uint4* chosen = received + turn * BLOCKS * MESSAGE;
  const uint4 of_block = lane < BLOCKS ? chosen[lane * MESSAGE] : make_uint4(0, NO_PLACE, 0, 0);
  unsigned low = 0;
  // Low words are not sent: where high ones are equal, they are taken from the element itself.
  if (WIDTH == 8) {
    const unsigned top = largest_of_warp(of_block.x);
    unsigned found = lanes_where(of_block.x == top);
    if (__popc(found) > 1) {
      if (lane < BLOCKS && (of_block.y & 0xffff) != NO_PLACE) {
        unsigned high;
        modulus(*reinterpret_cast<const Real*>(chosen + lane * MESSAGE + 1), high, low);
        rank_of_nan(of_block.x == ~0u, high, low);
      }
      found = 1u << best_lane(of_block.x, low, of_block.y & 0xffff, lane);
    }
    chosen += (__ffs(found) - 1) * MESSAGE;
  } else {
    chosen += best_lane(of_block.x, 0, of_block.y & 0xffff, lane) * MESSAGE;
  }

  const uint4 header = chosen[0];
  Real words[4], pivot[8];
  unpack(make_uint4(header.z, header.w, 0, 0), words);
  Real over = words[0];
#pragma unroll
  for (int i = 0; i < TILE_VECTORS; i++) unpack(chosen[1 + i], pivot + i * VECTOR);
  const int its_place = header.y & 0xffff, its_row = header.y >> 16, in_warp = its_row - warp_row;
  const bool own = unsigned(in_warp) < unsigned(WARP_ROWS);

  if (own && lane == (in_warp & 31)) active &= ~(1u << (in_warp >> 5));
  if (header.x - SMALLEST_NORMAL > LARGEST_PLAIN - SMALLEST_NORMAL) {  // all threads alike, and rare
    unsigned high;
    modulus(pivot[0], high, low);
    if ((high | low) == 0) {  // as LAPACK: the column stays as it is
      over = 1;
      if (threadIdx.x == 0 && rank == 0 && *info == 0) *info = first + J + 1;
    } else {
      // 1 / pivot would be infinite, or no normal number, though no multiplier exceeds 1: both are scaled first.
      const Real scale = high < SMALLEST_NORMAL ? Real(0x1p64) : Real(0x1p-64);
      over = high == INFINITE && low == 0 ? Real(0) : reciprocal_of(times(pivot[0], scale));
#pragma unroll
      for (int u = 0; u < LANE_ROWS; u++)
        if (active >> u & 1) tile[u][0] = times(tile[u][0], scale);
    }
  }

#pragma unroll
  for (int u = 0; u < LANE_ROWS; u++) {  // the pivot goes to place J, what lay there to the pivot's
    if (warp_row + lane + 32 * u == its_row)
      place[u] = J;
    else if (int(place[u]) == J)
      place[u] = its_place;
  }
#pragma unroll
  for (int u = 0; u < LANE_ROWS; u++) {
    const bool on = active >> u & 1;
    const Real x = tile[u][0], multiplier = on ? times(x, over) : Real(0);
    if (TILES > 1) buffer[in_buffer(lane + 32 * u, j)] = multiplier;
    if (at_start >> u & 1) column[32 * u] = on ? multiplier : x;
#pragma unroll
    for (int i = 1; i < 8; i++) tile[u][i - 1] = minus_product(tile[u][i], multiplier, pivot[i]);
  }
  if (!last) choose(J + 1, j + 1);
  if (threadIdx.x == 0) {
    pivot_row[J] = its_row;
    if (rank == 0) piv[first + J] = first + its_place;
  }
  return own ? in_warp : -1;
}

// `row` of this warp became pivot j of tile T: its multipliers in the tile and its elements in the strip's later tiles,
// as they were before this tile, go to all blocks.
template <int T>
INLINE void Panel::push(int row, int j) {
  constexpr int VECTORS = (TILES - T) * TILE_VECTORS;
  const int its_group = row % (8 * VECTOR) / VECTOR, its_i = row / (8 * VECTOR) * VECTOR + row % VECTOR;
  uint4* later = staged_rest + (j & 1) * TILES * TILE_VECTORS;
  if (group == its_group) {
#pragma unroll
    for (int i = 0; i < ROWS_A_LANE; i++)
      if (i == its_i) {
#pragma unroll
        for (int t = T + 1; t < TILES; t++)
          *reinterpret_cast<Pair*>(reinterpret_cast<Real*>(later) + 8 * (t - T - 1) + 2 * member) =
              Pair{strip[i][t][0], strip[i][t][1]};
      }
  }
  __syncwarp();
  const uint4* multipliers = reinterpret_cast<const uint4*>(buffer + row * 8);
  uint4* to = reinterpret_cast<uint4*>(rest + (T * 8 + j) * STRIP + 8 * T);
  uint4 vector[VECTORS / 2];
#pragma unroll
  for (int i = 0; i < VECTORS / 2; i++) {
    const int n = 2 * i + lane / BLOCKS;
    vector[i] = n < TILE_VECTORS ? multipliers[n ^ turned(row)] : later[n - TILE_VECTORS];
  }
#pragma unroll
  for (int i = 0; i < VECTORS / 2; i++)
    send(to + 2 * i + lane / BLOCKS, rest_there + T, lane % BLOCKS, vector[i]);
}

// rest = -U: the pivot rows of tile t in the later tiles, by substitution with the tile's 8 x 8 part of L, a lane a
// column.
INLINE void Panel::solve_rest(int t) {
  Real* of_tile = rest + t * 8 * STRIP;
  const int c = 8 * (t + 1) + lane;
  if (c >= STRIP) return;
  Real u[8];
#pragma unroll
  for (int i = 0; i < 8; i++) u[i] = of_tile[i * STRIP + c];
#pragma unroll
  for (int l = 0; l < 8; l++) {
#pragma unroll
    for (int i = l + 1; i < 8; i++) u[i] = minus_product(u[i], of_tile[i * STRIP + 8 * t + l], u[l]);
    of_tile[l * STRIP + c] = negative(u[l]);
  }
}

// P(pivot rows of tile t, K + 8 (t + 1):K + STRIP) = U, by all blocks together: to the bit what other rows are
// eliminated with, which the strip's own registers, where sums are added in another order, are not.
INLINE void Panel::store_rest(int K, int t) {
  const int columns = min(STRIP, b - K) - 8 * (t + 1), threads = warps * 32;
  for (int i = threadIdx.x + rank * threads; i < 8 * columns; i += BLOCKS * threads) {
    const int row = t * 8 + i % 8, c = 8 * (t + 1) + i / 8;
    P[pivot_row[K + row] + (K + c) * ld] = negative(rest[row * STRIP + c]);
  }
}

// tile = tile T of the strip.
template <int T>
INLINE void Panel::open() {
  constexpr int PASSES = WARP_ROWS / BUFFER_ROWS;
  constexpr int OF_STRIP = ROWS_A_LANE / PASSES, OF_TILE = LANE_ROWS / PASSES;
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
#pragma unroll
    for (int i = 0; i < OF_STRIP; i++)
      *reinterpret_cast<Pair*>(buffer + in_buffer(row_of(i), 2 * member)) =
          Pair{strip[pass * OF_STRIP + i][T][0], strip[pass * OF_STRIP + i][T][1]};
    __syncwarp();
#pragma unroll
    for (int u = 0; u < OF_TILE; u++)
#pragma unroll
      for (int i = 0; i < TILE_VECTORS; i++)
        unpack(*reinterpret_cast<const uint4*>(buffer + in_buffer(lane + 32 * u, i * VECTOR)),
               &tile[pass * OF_TILE + u][i * VECTOR]);
    __syncwarp();
  }
}

// Columns K to K + STRIP, or to b: a tile after the other. A finished one updates the later ones by one product:
// P(:, later) -= P(:, tile) U(tile, later). Nothing waits for what follows the last tile.
INLINE void Panel::eliminate_strip(int K) {
  Real* column = P + warp_row + lane + K * ld;
  const int tiles = tiles_of(K);
#pragma unroll 1
  for (int t = 0; t < TILES && t < tiles; t++) {
    const int J0 = K + 8 * t, columns = min(8, b - J0);
    const bool more = t + 1 < TILES && t + 1 < tiles;
    if (more && threadIdx.x == 0) expect(rest_there + t, 8 * 16 * (TILES - t) * TILE_VECTORS);
    // The last branch is taken without asking: the compiler sees that no tile outlives its columns.
    if (TILES > 1 && t == 0)
      open<0>();
    else if (TILES > 2 && t == 1)
      open<(TILES > 2 ? 1 : 0)>();
    else if (TILES > 3 && t == 2)
      open<(TILES > 3 ? 2 : 0)>();
    else
      open<TILES - 1>();
    at_start = active;
    choose(J0, 0);
#pragma unroll 1
    for (int j = 0; j < columns; j++) {
      const int row = eliminate(J0 + j, j, j + 1 == columns, column);
      column += ld;
      if (row >= 0 && more) {
        if constexpr (TILES > 1) if (t == 0) push<0>(row, j);
        if constexpr (TILES > 2) if (t == 1) push<1>(row, j);
        if constexpr (TILES > 3) if (t == 2) push<2>(row, j);
      }
    }
    if (!more) return;
    if (warp == 0) {
      wait_for(rest_there + t, K / STRIP & 1);
      solve_rest(t);
    }
    __syncthreads();
    store_rest(K, t);
    if constexpr (TILES > 1) if (t == 0) apply<0>();
    if constexpr (TILES > 2) if (t == 1) apply<1>();
    if constexpr (TILES > 3) if (t == 2) apply<2>();
  }
}
