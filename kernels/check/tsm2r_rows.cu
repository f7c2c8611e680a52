// TSM2R with one column of weights and an epilogue, X row-major: weighted sums of the rows of X and of their squares in one
// read of it, with the sums of the rows' bits, or with the verdict on each row (epilogue.cuh).
//
//   y_i = sum_j X(i, j) w_j    z_i = sum_j X(i, j)^2 w2_j    words_i = sum_j bits of X(i, j)
//
// A team of warps takes ROWS rows at a time and walks along them, several vectors of each on their way. Weights are read
// through the level-1 cache, where the teams of a multiprocessor meet. No block needs another one: a row is its team's.
// Elements of 16 bits are multiplied in float32, and the sum of a vector is added in float64; others in float64.
//
// Launch   (ceil(p / (ROWS T1 / (32 TEAM))), products) blocks of T1 threads
// Macros   those of wide.cuh; T1 threads; TEAM warps of a row; ROWS, a power of two; AHEAD vectors of a row loaded at a
//          time; GIVEN 1 where the weights w2 of squares are given, else they are w^2; WORDS 0 or 1; OUT the type of y
//          and z; VERDICT 1 where each row is judged instead (VERDICT_ARGUMENTS); CAST 1 where it is also stored as
//          D_TYPE; BLOCKS of a multiprocessor; ENTRY the name of the kernel
// Storage  X(i, j) of product b = X[b step + i ld + j]; ALIGNED divides its address, ld and step in bytes. Weights of
//          product b from w + b w_step on, at multiples of 16 bytes; y, z, words of row i at b out_step + i
// Edges    p, q arbitrary; nothing outside of the matrix is read
#include "check/epilogue.cuh"

constexpr int WARPS = T1 / 32, TEAMS = WARPS / TEAM;
constexpr int STRIDE = TEAM * 32 * V;  // columns that a team takes at a time
constexpr int UNITS = (V + UNIT - 1) / UNIT;
static_assert(WARPS % TEAM == 0 && V % UNIT == 0 || V == 1, "teams fill a block, weights of a vector whole units");

// w(0 : V). Not by __ldg, nor from what is __restrict__: the kernel in front may have written them while this one had
// begun, and such loads may be moved in front of after_previous().
INLINE void load_weights(ACC (&w)[V], const ACC* at) {
  if constexpr (V % UNIT == 0) {
#pragma unroll
    for (int e = 0; e < V; e += UNIT) {
      const uint4 word = *reinterpret_cast<const uint4*>(at + e);
      memcpy(&w[e], &word, 16);
    }
  } else {
    w[0] = *at;
  }
}

// The sum of both halves of a word, and of `sum`.
INLINE unsigned add_halves(unsigned word, unsigned sum) {
#ifdef __CUDA_ARCH__
  return __dp2a_lo(word, 0x0101u, sum);
#else
  return sum + (word & 0xffffu) + (word >> 16);
#endif
}

// words += bits of x, element by element.
INLINE void add_bits(Bits& words, const Vector& x) {
  if constexpr (sizeof(A_TYPE) == 2 && V % 2 == 0) {
    unsigned pairs[V / 2], sum = 0;
    memcpy(pairs, &x, sizeof(pairs));
#pragma unroll
    for (int e = 0; e < V / 2; e++) sum = add_halves(pairs[e], sum);
    words += sum;
  } else {
#pragma unroll
    for (int e = 0; e < V; e++) words += pattern(x.x[e]);
  }
}

// sum += x w, z += x^2 w2
INLINE void add_element(ACC& sum, ACC& z, ACC x, ACC w, ACC w2) {
#if GIVEN
  sum += x * w;
  z += x * x * w2;
#else
  const ACC term = x * w;
  sum += term;
  z += term * term;
#endif
}

// y += x w, z += x^2 w2, for one vector of a row.
INLINE void add_vector(double& y, ACC& z, const Vector& x, const ACC (&w)[V], const ACC (&w2)[V]) {
  ACC sum = ACC(0);
#pragma unroll
  for (int e = 0; e < V; e++) add_element(sum, z, ACC(widened(x.x[e])), w[e], w2[e]);
  y += double(sum);
}

#if CAST
// to(0 : V) = x, in one store where that is `packed`
INLINE void store_narrowed(D_TYPE* to, const Vector& x, bool packed) {
  D_TYPE narrow[V];
#pragma unroll
  for (int e = 0; e < V; e++) narrow[e] = narrowed(x.x[e], D_TYPE());
  if (packed && sizeof(narrow) == 8) {
    uint2 word;
    memcpy(&word, narrow, 8);
    *reinterpret_cast<uint2*>(to) = word;
  } else {
#pragma unroll
    for (int e = 0; e < V; e++) to[e] = narrow[e];
  }
}
#endif

// Compilers need some registers more on other architectures than the one that BLOCKS was tuned on.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
#define LEAST_BLOCKS (BLOCKS > 2 ? 2 : BLOCKS)
#else
#define LEAST_BLOCKS BLOCKS
#endif

extern "C" __global__ void __launch_bounds__(T1, LEAST_BLOCKS)
    ENTRY(Index p, Index q, const A_TYPE* __restrict__ X, Index ld, Index step, const ACC* weights, const ACC* squares,
          Index w_step, EPILOGUE_ARGUMENTS) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp / TEAM;
  const Index product = blockIdx.y, first = (Index(blockIdx.x) * TEAMS + team) * ROWS;
  const ACC* w = weights + product * w_step;
  const ACC* w2 = GIVEN ? squares + product * w_step : w;
  const A_TYPE* at[ROWS];
  double y[ROWS];
  ACC z[ROWS];
  Bits words[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    at[i] = X + product * step + smaller(first + i, p - 1) * ld;
    y[i] = 0;
    z[i] = ACC(0);
    words[i] = 0;
  }
  // The row whose sums this lane will have, and whether it has them all then.
  const int place = sum_of<ROWS>(lane);
  const Index row = first + place;
  const bool mine = place < ROWS && warp % TEAM == 0 && row < p;
#if VERDICT
  constexpr bool early = false;
#else
  // X was there before the kernel in front began, unless that one is no part of this product, or has written X.
  const bool early = !fresh;
#endif
#if CAST
  D_TYPE* to = cast + product * cast_step + first * ldd;
  const bool packed = reinterpret_cast<unsigned long long>(to) % 8 == 0 && ldd % 4 == 0;
#endif

  // y += X(first : first + ROWS, l : l + V) w(l : l + V)
  auto take = [&](const Vector(&x)[ROWS], Index l) {
    ACC right[V], right2[V];
    load_weights(right, w + l);
    if (GIVEN) load_weights(right2, w2 + l);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      add_vector(y[i], z[i], x[i], right, right2);
      if (WORDS) add_bits(words[i], x[i]);
#if CAST
      if (first + i < p) store_narrowed(to + i * ldd + l, x[i], packed);
#endif
    }
  };

  // The loop stands once: code that is run once costs more than what it does.
  const Index whole = q - q % V;
  Index j = (warp % TEAM * 32 + lane) * V;
  Vector x[AHEAD][ROWS];
#pragma unroll 1
  for (bool begun = false;; j += AHEAD * STRIDE) {
    const bool there = j + (AHEAD - 1) * STRIDE < whole;
    if (!begun && !early) after_previous();
    if (there) {
#pragma unroll
      for (int a = 0; a < AHEAD; a++)
#pragma unroll
        for (int i = 0; i < ROWS; i++) x[a][i] = load(at[i] + j + a * STRIDE);
    }
    if (!begun) {
      begun = true;
      if (early) after_previous();
      next_may_begin();
#if !VERDICT
      BEGIN_STATISTICS(blockIdx.x == 0 && blockIdx.y == 0, blockIdx.x == 0);
#endif
    }
    if (!there) break;
#pragma unroll
    for (int a = 0; a < AHEAD; a++) take(x[a], j + a * STRIDE);
  }
#if AHEAD > 1
#pragma unroll 1
  for (; j < whole; j += STRIDE) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) x[0][i] = load(at[i] + j);
    take(x[0], j);
  }
#endif
#if VERDICT
  Expected known = {0, 0, 0, 0};
  if (mine) known = EXPECTED_OF(product * p + row, product);
  const Bits kept = kept_closest(state);
#endif
  // What is left of a vector, an element a lane.
  if (whole + lane < q && warp % TEAM == 0) {
    const ACC right = w[whole + lane], right2 = GIVEN ? w2[whole + lane] : ACC(0);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const A_TYPE element = at[i][whole + lane];
      ACC sum = ACC(0);
      add_element(sum, z[i], ACC(widened(element)), right, right2);
      y[i] += double(sum);
      words[i] += pattern(element);
#if CAST
      if (first + i < p) to[i * ldd + whole + lane] = narrowed(element, D_TYPE());
#endif
    }
  }

  // Each row's sums to one lane, and over the warps of a team.
  double y_sum = over_warp<ROWS>(y);
  ACC z_sum = over_warp<ROWS>(z);
  Bits word_sum = WORDS ? over_warp<ROWS>(words) : 0;
#if TEAM > 1
  __shared__ double y_parts[WARPS * ROWS];
  __shared__ ACC z_parts[WARPS * ROWS];
  __shared__ Bits word_parts[WARPS * ROWS];
  if (place < ROWS) {
    y_parts[warp * ROWS + place] = y_sum;
    z_parts[warp * ROWS + place] = z_sum;
    if (WORDS) word_parts[warp * ROWS + place] = word_sum;
  }
  __syncthreads();
  if (place < ROWS && warp % TEAM == 0) {
#pragma unroll
    for (int member = 1; member < TEAM; member++) {
      y_sum += y_parts[(warp + member) * ROWS + place];
      z_sum += z_parts[(warp + member) * ROWS + place];
      if (WORDS) word_sum += word_parts[(warp + member) * ROWS + place];
    }
  }
#endif
#if VERDICT
  keep_closest<T1>(mine, mine ? GIVE_VERDICT(product * p + row, y_sum, double(z_sum), known) : 0, kept, state);
#else
  if (!mine) return;
  STORE_STATISTICS(row, y_sum, z_sum, word_sum);
#endif
}
