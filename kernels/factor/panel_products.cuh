// Products that bring a strip up to date: in double on the tensor cores, in float by fused multiply-add.
#pragma once
#include "factor/panel_state.cuh"

#if WIDTH == 8

// strip(:, later) += multipliers of tile T * rest, which is -U.
template <int T>
INLINE void Panel::apply() {
#pragma unroll
  for (int i = 0; i < ROWS_A_LANE; i += 2) {
    const Pair one = *reinterpret_cast<const Pair*>(buffer + in_buffer(row_of(i), 2 * member));
    const Pair two = *reinterpret_cast<const Pair*>(buffer + in_buffer(row_of(i + 1), 2 * member));
#pragma unroll
    for (int t = T + 1; t < TILES; t++) {
      const Real* u = rest + (T * 8 + 2 * member) * STRIP + 8 * t + group;
      multiply_tile(strip[i][t][0], strip[i][t][1], strip[i + 1][t][0], strip[i + 1][t][1], one.x, two.x, one.y, two.y,
                    u[0], u[STRIP]);
    }
  }
  __syncwarp();
}

// strip += P(:, 0:K) * upper, which is -U: by pieces of 8 columns of P and CHUNK rows a lane, the next ones of which
// load meanwhile. So many SETS of them are held, beside the strip, as registers allow.
INLINE void Panel::update(int K) {
  constexpr int CHUNK = ROWS_A_LANE == 16 ? 8 : 4, CHUNKS = ROWS_A_LANE / CHUNK, SETS = ROWS_A_LANE == 16 ? 3 : 2;
  constexpr int PERIOD = SETS % CHUNKS ? SETS * CHUNKS : SETS;  // pieces after which sets and chunks begin anew
  const Real* from = P + warp_row + VECTOR * group;
  Real of_P[SETS][2][CHUNK];
  auto load = [&](int l, int piece) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const Real* column = from + (l + piece / CHUNKS * 8 + member + 4 * half) * ld;
#pragma unroll
      for (int v = 0; v < CHUNK / 2; v++) {
        const int row = (piece % CHUNKS * CHUNK / 2 + v) * 8 * VECTOR;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (warp_row + VECTOR * group + row < rows) x = __ldcg(reinterpret_cast<const uint4*>(column + row));
        unpack(x, &of_P[piece % SETS][half][2 * v]);
      }
    }
  };
  auto multiply = [&](int l, int piece) {
    const Real(&x)[2][CHUNK] = of_P[piece % SETS];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const Real* u = upper + (l + piece / CHUNKS * 8 + member) * UPPER_STEP + 8 * t + group;
      const Real u0 = u[0], u1 = u[4 * UPPER_STEP];
#pragma unroll
      for (int v = 0; v < CHUNK; v += 2) {
        const int i = piece % CHUNKS * CHUNK + v;
        multiply_tile(strip[i][t][0], strip[i][t][1], strip[i + 1][t][0], strip[i + 1][t][1], x[0][v], x[0][v + 1],
                      x[1][v], x[1][v + 1], u0, u1);
      }
    }
  };
#pragma unroll
  for (int piece = 0; piece < SETS - 1; piece++)
    if (piece / CHUNKS * 8 < K) load(0, piece);
#pragma unroll 1
  for (int l = 0; l < K; l += PERIOD / CHUNKS * 8) {
#pragma unroll
    for (int piece = 0; piece < PERIOD; piece++) {
      const int next = piece + SETS - 1;
      if (next < CHUNKS || l + next / CHUNKS * 8 < K) load(l, next);
      if (piece < CHUNKS || l + piece / CHUNKS * 8 < K) multiply(l, piece);
    }
  }
}

#else

template <int T>
INLINE void Panel::apply() {
#pragma unroll
  for (int t = T + 1; t < TILES; t++) {
    Pair u[8];
#pragma unroll
    for (int l = 0; l < 8; l++) u[l] = *reinterpret_cast<const Pair*>(rest + (T * 8 + l) * STRIP + 8 * t + 2 * member);
#pragma unroll
    for (int i = 0; i < ROWS_A_LANE; i++) {
      Real multiplier[8];
#pragma unroll
      for (int v = 0; v < TILE_VECTORS; v++)
        unpack(*reinterpret_cast<const uint4*>(buffer + in_buffer(row_of(i), v * VECTOR)), multiplier + v * VECTOR);
#pragma unroll
      for (int l = 0; l < 8; l++) {
        strip[i][t][0] = plus_product(strip[i][t][0], multiplier[l], u[l].x);
        strip[i][t][1] = plus_product(strip[i][t][1], multiplier[l], u[l].y);
      }
    }
  }
  __syncwarp();
}

INLINE void Panel::update(int K) {
  constexpr int DEPTH = ROWS_A_LANE <= 16 ? 4 : 2;  // columns of P at a time
  const Real* from = P + warp_row + VECTOR * group;
#pragma unroll 1
  for (int l = 0; l < K; l += DEPTH) {
    Real of_P[DEPTH][ROWS_A_LANE];
#pragma unroll
    for (int z = 0; z < DEPTH; z++) {
      const Real* column = from + (l + z) * ld;
#pragma unroll
      for (int v = 0; v < ROWS_A_LANE / VECTOR; v++) {
        uint4 x = make_uint4(0, 0, 0, 0);
        if (warp_row + VECTOR * group + v * 8 * VECTOR < rows)
          x = __ldcg(reinterpret_cast<const uint4*>(column + v * 8 * VECTOR));
        unpack(x, &of_P[z][v * VECTOR]);
      }
    }
#pragma unroll
    for (int z = 0; z < DEPTH; z++)
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const Pair u = *reinterpret_cast<const Pair*>(upper + (l + z) * UPPER_STEP + 8 * t + 2 * member);
#pragma unroll
        for (int i = 0; i < ROWS_A_LANE; i++) {
          strip[i][t][0] = plus_product(strip[i][t][0], of_P[z][i], u.x);
          strip[i][t][1] = plus_product(strip[i][t][1], of_P[z][i], u.y);
        }
      }
  }
}

#endif
