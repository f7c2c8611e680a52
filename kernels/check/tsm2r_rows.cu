// TSM2R with one column of weights and an epilogue, X row-major: weighted sums of the rows of X and of their squares in one
// read of it, with the sums of the rows' bits, or with the verdict on each row (epilogue.cuh).
//
//   y_i = sum_j X(i, j) w_j    z_i = sum_j X(i, j)^2 w2_j    words_i = sum_j bits of X(i, j)
//
// A team of warps takes ROWS rows at a time and walks along them, several vectors of each on their way. Weights are read
// through the level-1 cache, where the teams of a multiprocessor meet. No block needs another one: a row is its team's.
// Elements of 16 bits are multiplied in float32, and the sum of a vector is added in float64; others in float64.
//
// Where JOINT is 1, half of a block's teams take the rows of C, and the others those of L that these are the products of:
// t_i = L(i, :) s and its squares are there when C(i, :) is judged, without a pass over L of their own.
//
// Launch   (ceil(p / (ROWS TEAMS)), products) blocks of T1 threads, of TEAMS = T1 / (32 TEAM) teams, half of that if JOINT
// Macros   those of wide.cuh; T1 threads; TEAM warps of a row; ROWS, a power of two; AHEAD vectors of a row loaded at a
//          time; GIVEN 1 where the weights w2 of squares are given, else they are w^2; WORDS 0 or 1; OUT the type of y
//          and z; VERDICT 1 where each row is judged instead (VERDICT_ARGUMENTS); CAST 1 where it is also stored as
//          D_TYPE; JOINT 0 or 1, with VERDICT and without CAST; BLOCKS of a multiprocessor; ENTRY the name of the kernel
// Storage  X(i, j) of product b = X[b step + i ld + j]; ALIGNED divides its address, ld and step in bytes. Weights of
//          product b from w + b w_step on, at multiples of 16 bytes; y, z, words of row i at b out_step + i. L, of k
//          columns, likewise; s and s2 as w and w2; what is made of its rows goes to t_out, p2_out, words_out, guards_out
// Edges    p, q arbitrary; nothing outside of the matrix is read
#include "check/epilogue.cuh"

constexpr int WARPS = T1 / 32, OF_X = JOINT ? WARPS / 2 : WARPS, TEAMS = OF_X / TEAM;  // OF_X: warps that take X
constexpr int STRIDE = TEAM * 32 * V;  // columns that a team takes at a time
static_assert(OF_X % TEAM == 0 && V % UNIT == 0 || V == 1, "teams fill a block, weights of a vector whole units");
static_assert(!JOINT || VERDICT && !CAST, "rows of C are judged beside those of L");

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

// sum += x w, z += x^2 w2, or (x w)^2
template <bool SQUARES>
INLINE void add_element(ACC& sum, ACC& z, ACC x, ACC w, ACC w2) {
  const ACC term = x * w;
  sum += term;
  z += SQUARES ? x * x * w2 : term * term;
}

// y += x w, z += x^2 w2, for one vector of a row.
template <bool SQUARES>
INLINE void add_vector(double& y, ACC& z, const Vector& x, const ACC (&w)[V], const ACC (&w2)[V]) {
  ACC sum = ACC(0);
#pragma unroll
  for (int e = 0; e < V; e++) add_element<SQUARES>(sum, z, ACC(widened(x.x[e])), w[e], w2[e]);
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

// A lane's part of the sums of its team's rows.
struct Rows {
  const A_TYPE* at[ROWS];
  double y[ROWS];
  ACC z[ROWS];
  Bits words[ROWS];

  INLINE Rows(const A_TYPE* X, Index first, Index p, Index ld) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      at[i] = X + smaller(first + i, p - 1) * ld;
      y[i] = 0;
      z[i] = ACC(0);
      words[i] = 0;
    }
  }

  // y += X(first : first + ROWS, l : l + V) w(l : l + V); SQUARES and BITS: whether w2 is given, and words are added.
  template <bool SQUARES, bool BITS>
  INLINE void take(const Vector (&x)[ROWS], Index l, const ACC* w, const ACC* w2) {
    ACC right[V], right2[V];
    load_weights(right, w + l);
    if (SQUARES) load_weights(right2, w2 + l);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      add_vector<SQUARES>(y[i], z[i], x[i], right, right2);
      if (BITS) add_bits(words[i], x[i]);
    }
  }

  // All whole vectors of rows of q elements, from column j on. `early`: they were there before the kernel in front began.
  // begin() is called when that one has ended, store(x, l) for what is at column l.
  template <bool SQUARES, bool BITS, class Begin, class Store>
  INLINE void walk(Index q, Index j, const ACC* w, const ACC* w2, bool early, Begin begin, Store store) {
    // The loop stands once: code that is run once costs more than what it does.
    const Index whole = q - q % V;
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
        begin();
      }
      if (!there) break;
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        take<SQUARES, BITS>(x[a], j + a * STRIDE, w, w2);
        store(x[a], j + a * STRIDE);
      }
    }
#if AHEAD > 1
#pragma unroll 1
    for (; j < whole; j += STRIDE) {
#pragma unroll
      for (int i = 0; i < ROWS; i++) x[0][i] = load(at[i] + j);
      take<SQUARES, BITS>(x[0], j, w, w2);
      store(x[0], j);
    }
#endif
  }

  // What is left of a vector, an element a lane.
  template <bool SQUARES, class Store>
  INLINE void take_rest(Index q, const ACC* w, const ACC* w2, Store store) {
    const Index l = q - q % V + threadIdx.x % 32;
    if (l >= q) return;
    const ACC right = w[l], right2 = SQUARES ? w2[l] : ACC(0);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const A_TYPE element = at[i][l];
      ACC sum = ACC(0);
      add_element<SQUARES>(sum, z[i], ACC(widened(element)), right, right2);
      y[i] += double(sum);
      words[i] += pattern(element);
      store(element, i, l);
    }
  }
};

#if JOINT
#define JOINT_ARGUMENTS                                                                                             \
  , const A_TYPE *__restrict__ L, Index k, Index l_ld, Index l_step, const ACC *s, const ACC *s2, Index s_step,     \
      double *t_out, double *p2_out, Bits *words_out, Bits *guards_out
#else
#define JOINT_ARGUMENTS
#endif

// Compilers need some registers more on other architectures than the one that BLOCKS was tuned on.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
#define LEAST_BLOCKS (BLOCKS > 2 ? 2 : BLOCKS)
#else
#define LEAST_BLOCKS BLOCKS
#endif

extern "C" __global__ void __launch_bounds__(T1, LEAST_BLOCKS)
    ENTRY(Index p, Index q, const A_TYPE* __restrict__ X, Index ld, Index step, const ACC* weights, const ACC* squares,
          Index w_step, EPILOGUE_ARGUMENTS JOINT_ARGUMENTS) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp % OF_X / TEAM;
  const Index product = blockIdx.y, first = (Index(blockIdx.x) * TEAMS + team) * ROWS;
  const Index j = (warp % TEAM * 32 + lane) * V;
  const ACC* w = weights + product * w_step;
  const ACC* w2 = GIVEN ? squares + product * w_step : w;
  const bool of_x = !JOINT || warp < OF_X;
#if JOINT
  Rows rows(of_x ? X + product * step : L + product * l_step, first, p, of_x ? ld : l_ld);
#else
  Rows rows(X + product * step, first, p, ld);
#endif
  // The row whose sums this lane will have, and whether it has them all then.
  const int place = sum_of<ROWS>(lane);
  const Index row = first + place;
  const bool mine = place < ROWS && warp % TEAM == 0 && row < p;
#if CAST
  D_TYPE* to = cast + product * cast_step + first * ldd;
  const bool packed = reinterpret_cast<unsigned long long>(to) % 8 == 0 && ldd % 4 == 0;
  auto store = [&](const Vector(&x)[ROWS], Index l) {
#pragma unroll
    for (int i = 0; i < ROWS; i++)
      if (first + i < p) store_narrowed(to + i * ldd + l, x[i], packed);
  };
  auto store_one = [&](A_TYPE x, int i, Index l) {
    if (first + i < p) to[i * ldd + l] = narrowed(x, D_TYPE());
  };
#else
  auto store = [](const Vector(&)[ROWS], Index) {};
  auto store_one = [](A_TYPE, int, Index) {};
#endif
#if VERDICT
  auto begin = [] {};
  constexpr bool early = false;
#else
  // X was there before the kernel in front began, unless that one has written X.
  const bool early = !written;
  auto begin = [&] { BEGIN_STATISTICS(blockIdx.x == 0); };
#endif

#if JOINT
  if (!of_x) rows.walk<true, true>(k, j, s + product * s_step, s2 + product * s_step, early, begin, store);
#endif
  if (of_x) rows.walk<GIVEN, WORDS>(q, j, w, w2, early, begin, store);
#if VERDICT
  Expected known = {0, 0, 0, 0, 0};
  if (mine && of_x) known = JOINT ? ADDED_TO(product * p + row, product) : EXPECTED_OF(product * p + row, product);
  const Bits kept = kept_closest(state);
#endif
#if JOINT
  const Bits number = number_of(encoded);
#elif !VERDICT
  const Bits number = guards ? number_of(encoded) : 0;
#endif
  if (warp % TEAM == 0) {
#if JOINT
    if (!of_x) rows.take_rest<true>(k, s + product * s_step, s2 + product * s_step, store_one);
#endif
    if (of_x) rows.take_rest<GIVEN>(q, w, w2, store_one);
  }

  // Each row's sums to one lane, and over the warps of a team.
  double y_sum = over_warp<ROWS>(rows.y);
  ACC z_sum = over_warp<ROWS>(rows.z);
  Bits word_sum = WORDS || JOINT ? over_warp<ROWS>(rows.words) : 0;
#if TEAM > 1
  __shared__ double y_parts[WARPS * ROWS];
  __shared__ ACC z_parts[WARPS * ROWS];
  __shared__ Bits word_parts[WARPS * ROWS];
  if (place < ROWS) {
    y_parts[warp * ROWS + place] = y_sum;
    z_parts[warp * ROWS + place] = z_sum;
    if (WORDS || JOINT) word_parts[warp * ROWS + place] = word_sum;
  }
  __syncthreads();
  if (place < ROWS && warp % TEAM == 0) {
#pragma unroll
    for (int member = 1; member < TEAM; member++) {
      y_sum += y_parts[(warp + member) * ROWS + place];
      z_sum += z_parts[(warp + member) * ROWS + place];
      if (WORDS || JOINT) word_sum += word_parts[(warp + member) * ROWS + place];
    }
  }
#endif
#if JOINT
  __shared__ double left_y[TEAMS * ROWS];
  __shared__ double left_z[TEAMS * ROWS];
  const int beside = team * ROWS + place;
  if (mine && !of_x) {
    const Index own = product * p + row;
    left_y[beside] = t_out[own] = y_sum;
    left_z[beside] = p2_out[own] = double(z_sum);
    guards_out[own] = guard_of(y_sum, double(z_sum), own, number);
    words_out[own] = word_sum;
  }
  __syncthreads();
  if (mine && of_x) expect_products(known, alpha, left_y[beside], left_z[beside]);
#endif
#if VERDICT
  const bool judged = mine && of_x;
  keep_closest<T1>(judged, judged ? GIVE_VERDICT(product * p + row, y_sum, double(z_sum), known) : 0, kept, state);
#else
  if (!mine) return;
  STORE_STATISTICS(row, y_sum, z_sum, word_sum, number);
#endif
}
