// Stages 3 to 7 of repair.cu: which columns of the flagged lines have wrong elements, by one read of R.
#pragma once
#include "repair/repair_problem.cuh"
#include "tsm2/splitmix64.cuh"

constexpr int LEAST = 2 * (1023 - 16);     // bins of z are two an octave, from 2^-16 on
constexpr int OWN = 2, STRIPE = OWN * T1;  // columns of a thread and of a block in stage 5
// Rows of R between two barriers. Where columns are contiguous: 64 bytes of each, through shared memory.
constexpr int DEEP = TURNED ? 64 / int(sizeof(A_TYPE)) : 128;
constexpr int APART = STRIPE + 2;          // elements from row to row in shared memory
constexpr int TILE = TURNED ? DEEP * APART : 1;
static_assert(CAP >= GROUPS * BINS, "stage 7 keeps all bins");

INLINE Bits hashed(Bits x) { return splitmix64(0, x + 1); }

INLINE double weight(Index line, int lines) {
  if (lines == 1) return 1;
  const Bits z = hashed(line);
  const double size = 1 + double(z & 0x7fffffffu) * 0x1p-32;
  return z >> 63 ? -size : size;
}

// Odd, so that no change of one row of R is lost modulo 2^64; of several only by chance.
INLINE Bits multiplier(Index l, int pass) { return hashed(Bits(l) + (Bits(pass) << 48)) | 1; }

// The sum over a block, for its first thread.
INLINE Bits over_block(Bits x, Bits* word_sums) {
  x = over_lanes(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) word_sums[threadIdx.x / 32] = x;
  __syncthreads();
  Bits sum = 0;
  for (int w = 0; w < WARPS && threadIdx.x == 0; w++) sum += word_sums[w];
  return sum;
}

// ---- stage 3: order(rank of line) = line, T1 lines an item; and what is counted begins with 0 -----------------------

INLINE void sort_lines(const Problem* problem, Index item, unsigned* keys) {
  const Problem& p = problem[0];
  for (int x = threadIdx.x; x < GROUPS * BINS && item == 0; x += T1) p.fixed->bins[x] = 0;
  if (threadIdx.x < GROUPS && item == 0) p.fixed->candidates[threadIdx.x] = 0;
  if (p.all) return;  // in order as they are
  for (int x = threadIdx.x; x < p.flagged; x += T1) keys[x] = __ldcg(p.lines + x);
  __syncthreads();
  const int mine = int(item) * T1 + threadIdx.x;
  if (mine < p.flagged) {
    const unsigned line = keys[mine];
    int rank = 0;
#pragma unroll 4
    for (int x = 0; x < p.flagged; x++) {
      const unsigned other = keys[x];
      rank += other < line || (other == line && x < mine);
    }
    p.fixed->order[rank] = line;
    p.fixed->hits[mine] = 0;
  }
}

// ---- stage 4 --------------------------------------------------------------------------------------------------------

// y_g(l), a_g(l) for the thread's OWN l of a stripe
INLINE void gather_left(const Problem& p, int g, Index l) {
  const int first = p.first(g), lines = p.first(g + 1) - first;
  double y[OWN] = {}, a[OWN] = {};
#pragma unroll 8
  for (int i = 0; i < lines; i++) {
    const Index line = p.line(first + i);
    const A_TYPE* at = p.left(line);
    const double w = weight(line, lines);
#pragma unroll
    for (int c = 0; c < OWN; c++) {
      const double x = l + c * T1 < p.k ? w * double(widened(at[(l + c * T1) * p.l_cs])) : 0.0;
      y[c] += x;
      a[c] += fabs(x);
    }
  }
#pragma unroll
  for (int c = 0; c < OWN; c++)
    if (l + c * T1 < p.k) p.sides[(l + c * T1) * p.groups + g] = {y[c], a[c]};
}

// D_g(j), sum_i |w_i beta C0(i, j)|, sum_i |w_i C(i, j)| for the thread's OWN j of a stripe
INLINE void gather_result(const Problem& p, int g, Index j) {
  const int first = p.first(g), lines = p.first(g + 1) - first;
  double d[OWN] = {}, before[OWN] = {}, now[OWN] = {};
#pragma unroll 8
  for (int i = 0; i < lines; i++) {
    const Index line = p.line(first + i);
    const double w = weight(line, lines);
#pragma unroll
    for (int q = 0; q < OWN; q++) {
      if (j + q * T1 >= p.n) continue;
      const double c = w * fresh(p.result(line, j + q * T1));
      const double c0 = p.beta != 0 ? w * p.beta * fresh(p.added(line, j + q * T1)) : 0.0;
      d[q] += c - c0;
      before[q] += fabs(c0);
      now[q] += fabs(c);
    }
  }
#pragma unroll
  for (int q = 0; q < OWN; q++) {
    const Index at = j + q * T1;
    if (at >= p.n) continue;
    p.sums[g * p.n + at] = d[q];
    p.sums[(GROUPS + g) * p.n + at] = before[q];
    p.sums[(2 * GROUPS + g) * p.n + at] = now[q];
  }
}

INLINE void check_left(const Problem& p, Index line, State into, Bits* word_sums) {
  const A_TYPE* at = p.left(line);
  Bits sum = 0;
#pragma unroll 16
  for (Index l = threadIdx.x; l < p.k; l += T1) sum += pattern(at[l * p.l_cs]);
  sum = over_block(sum, word_sums);
  if (threadIdx.x == 0 && sum != p.left_words[line]) atomicAdd(p.state + into, 1ull);
}

INLINE void gather(const Problem* problem, Index item, Bits* word_sums) {
  const Problem& p = problem[0];
  const Index of_left = pieces(p.k, STRIPE), left = p.groups * of_left, both = left + p.groups * p.stripes;
  if (item < left)
    gather_left(p, int(item / of_left), item % of_left * STRIPE + threadIdx.x);
  else if (item < both)
    gather_result(p, int((item - left) / p.stripes), (item - left) % p.stripes * STRIPE + threadIdx.x);
  else
    check_left(p, p.line(int(item - both)), CHANGED, word_sums);
}

// ---- stage 5: (y R, a |R|)(groups, stripe) over a slab of rows, of COUNT groups -------------------------------------

template <int COUNT>
INLINE void add_row(double (&sum)[OWN][COUNT][2], Bits& word, const A_TYPE (&r)[OWN], int l, const double* pool,
                    const Bits* factors) {
  const Bits factor = factors[l];
  double x[OWN];
  Bits bits = 0;
#pragma unroll
  for (int c = 0; c < OWN; c++) {
    x[c] = widened(r[c]);
    bits += pattern(r[c]);
  }
  word += factor * bits;
#pragma unroll
  for (int g = 0; g < COUNT; g++) {
    const double2 side = *reinterpret_cast<const double2*>(&pool[(l * COUNT + g) * 2]);
#pragma unroll
    for (int c = 0; c < OWN; c++) {
      sum[c][g][0] += side.x * x[c];
      sum[c][g][1] += side.y * fabs(x[c]);
    }
  }
}

// r = R(l : l + AHEAD, the thread's columns), `at` being the first element; zero after so many rows and columns.
template <int AHEAD>
INLINE void load_rows(A_TYPE (&r)[AHEAD][OWN], const A_TYPE*& at, Index down, Index right, Index rows, Index columns) {
#pragma unroll
  for (int a = 0; a < AHEAD; a++, at += down)
#pragma unroll
    for (int c = 0; c < OWN; c++) r[a][c] = a < rows && c * T1 < columns ? at[c * right] : A_TYPE();
}

template <int COUNT>
INLINE void multiply(const Problem* problem, Index item, int pass, double* pool, A_TYPE* tile, Bits* factors,
                     Bits* word_sums) {
  const Problem& p = problem[0];
  const int first = p.passes() > 1 ? pass : 0, count = p.passes() > 1 ? 1 : p.groups;
  const Index product = p.product(first), slab = item / p.stripes, stripe = item % p.stripes;
  const Index begin = slab * p.depth, end = smaller(begin + p.depth, p.k), column = stripe * STRIPE + threadIdx.x;
  const A_TYPE* R = p.R + product * p.r_step;
  constexpr int OF_GROUPS = !TUNED ? 2 : sizeof(A_TYPE) > 4 ? 8 : 16;
  constexpr int AHEAD = TURNED ? (TUNED ? 4 : 2) : COUNT == 1 ? (TUNED ? 16 : 8) : OF_GROUPS;
  A_TYPE r[AHEAD][OWN];
  double sum[OWN][COUNT][2];
  Bits word = 0;
#pragma unroll
  for (int x = 0; x < OWN * COUNT * 2; x++) sum[x / (2 * COUNT)][x / 2 % COUNT][x % 2] = 0;
#if !TURNED
  const A_TYPE* at = R + begin * p.r_rs + column * p.r_cs;
  load_rows(r, at, p.r_rs, T1 * p.r_cs, end - begin, p.n - column);
#endif

#pragma unroll 1
  for (Index panel = begin; panel < end; panel += DEEP) {
    const int rows = int(smaller(DEEP, end - panel));
    __syncthreads();
#pragma unroll 2
    for (int x = threadIdx.x; x < DEEP * COUNT; x += T1) {
      const int l = x / COUNT, g = x % COUNT;
      double2 side = {0, 0};
      if (l < rows && g < count) side = __ldcg(p.sides + (panel + l) * p.groups + first + g);
      pool[2 * x] = side.x;
      pool[2 * x + 1] = side.y;
    }
#pragma unroll 1
    for (int l = threadIdx.x; l < DEEP; l += T1) factors[l] = multiplier(panel + l, pass);
#if TURNED
    // tile = R(panel : panel + DEEP, stripe): neighbouring threads read what is contiguous
#pragma unroll(AHEAD)
    for (int x = threadIdx.x; x < DEEP * STRIPE; x += T1) {
      const Index l = x % DEEP, j = stripe * STRIPE + x / DEEP;
      tile[l * APART + x / DEEP] = l < rows && j < p.n ? R[(panel + l) * p.r_rs + j * p.r_cs] : A_TYPE();
    }
#endif
    __syncthreads();
#pragma unroll 1
    for (int l = 0; l < rows; l += AHEAD) {
#if TURNED
#pragma unroll
      for (int x = 0; x < AHEAD * OWN; x++)
        r[x / OWN][x % OWN] = tile[(l + x / OWN) * APART + x % OWN * T1 + threadIdx.x];
#pragma unroll
      for (int a = 0; a < AHEAD; a++) add_row<COUNT>(sum, word, r[a], l + a, pool, factors);
#else
      A_TYPE now[AHEAD][OWN];  // while the next rows are on their way from memory
#pragma unroll
      for (int x = 0; x < AHEAD * OWN; x++) now[x / OWN][x % OWN] = r[x / OWN][x % OWN];
      load_rows(r, at, p.r_rs, T1 * p.r_cs, end - panel - l - AHEAD, p.n - column);
#pragma unroll
      for (int a = 0; a < AHEAD; a++) add_row<COUNT>(sum, word, now[a], l + a, pool, factors);
#endif
    }
  }

#pragma unroll
  for (int c = 0; c < OWN; c++) {
    const Index j = column + c * T1;
    if (j >= p.n) continue;
#pragma unroll
    for (int g = 0; g < COUNT; g++) {
      double* at = p.parts + (slab * GROUPS + first + g) * 2 * p.n + j;
      if (g < count) at[0] = sum[c][g][0];
      if (g < count) at[p.n] = sum[c][g][1];
    }
  }
  // 0 = sum_l multiplier(l) (bits of R(l, :) - what they were), over all items
  if (p.right_words == nullptr) return;
#pragma unroll 1
  for (Index l = begin + threadIdx.x; l < end && stripe == 0; l += T1)
    word -= multiplier(l, pass) * p.right_words[product * p.w_step + l];
  word = over_block(word, word_sums);
  if (threadIdx.x == 0) atomicAdd(p.state + RIGHT_WORDS, word);
}

INLINE void multiply_any(const Problem* problem, Index item, double* pool, A_TYPE* tile, Bits* factors,
                         Bits* word_sums) {
  const Problem& p = problem[0];
  const Index each = p.stripes * p.slabs;
  if (p.groups == 1 || p.passes() > 1)
    multiply<1>(problem, item % each, int(item / each), pool, tile, factors, word_sums);
  else
    multiply<GROUPS>(problem, item, 0, pool, tile, factors, word_sums);
}

// ---- stage 6: z of T1 columns of a group ----------------------------------------------------------------------------

INLINE void compare(const Problem* problem, Index item, unsigned* keys) {
  const Problem& p = problem[0];
  const int g = int(item / p.n_pieces);
  const Index j = item % p.n_pieces * T1 + threadIdx.x;
  for (int x = threadIdx.x; x < BINS; x += T1) keys[x] = 0;
  __syncthreads();
  if (j < p.n) {
    double e = 0, s = 0;
#pragma unroll 8
    for (Index slab = 0; slab < p.slabs; slab++) {
      const double* at = p.parts + (slab * GROUPS + g) * 2 * p.n + j;
      e += __ldcg(at);
      s += __ldcg(at + p.n);
    }
    *p.product_sum(g, j) = e;
    const int lines = p.first(g + 1) - p.first(g);
    const double* sums = p.sums + g * p.n + j;
    e = __ldcg(sums) - p.alpha * e;
    const double added = __ldcg(sums + GROUPS * p.n);
    s = fabs(p.alpha) * s + added;
    // What storing C has rounded follows from C: one per cent more, since that was rounded itself. alpha L R may have
    // been rounded before beta C0 was added.
    const double stored = 1.01 * p.out_roundoff * (__ldcg(sums + 2 * GROUPS * p.n) + added);
    const double excess = fabs(e) - stored - p.underflow * (lines > 1 ? 1.5 * lines : 1);
    double z = excess <= 0 ? 0 : excess / (p.unit_roundoff * s);
    if (!(excess <= p.rigorous * (1 + p.out_roundoff) * s && finite(s))) z = infinity();
    p.sums[g * p.n + j] = z;
    const int bin = int(same_bits<Bits>(z) >> 51) - LEAST;
    atomicAdd(&keys[bin < 0 ? 0 : bin < BINS ? bin : BINS - 1], 1u);
  }
  __syncthreads();
  for (int x = threadIdx.x; x < BINS; x += T1) {
    const unsigned count = keys[x];
    if (count) atomicAdd(p.fixed->bins + g * BINS + x, count);
  }
}

// ---- stage 7: the candidates of a group, a warp's in ascending order --------------------------------------------------

constexpr int EACH = 8, PANEL = EACH * T1;  // columns of a lane, 32 apart, and of an item

INLINE unsigned bits_in(unsigned x) {
#ifdef __CUDA_ARCH__
  return __popc(x);
#else
  return __builtin_popcount(x);
#endif
}

INLINE void list_candidates(const Problem* problem, Index item, double* pool, unsigned* keys) {
  const Problem& p = problem[0];
  const Index panels = pieces(p.n, PANEL), first = item % panels * PANEL;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = int(item / panels);
  for (int x = threadIdx.x; x < p.groups * BINS; x += T1) keys[x] = __ldcg(p.fixed->bins + x);
  __syncthreads();
  if (threadIdx.x < p.groups) {  // the upper end of the bin that nine tenths of the columns reach to
    const int begin = threadIdx.x * BINS;
    int bin = 0;
    Index below = keys[begin];
    while (below <= (p.n - 1) * 9 / 10 && bin < BINS - 1) below += keys[begin + ++bin];
    const double upper = bin == BINS - 1 ? 1e300 : same_bits<double>(Bits(LEAST + bin + 1) << 51);
    pool[threadIdx.x] = OUTLIER * (upper > 1 ? upper : 1);
    // Errors of the lines of a group may have cancelled in its z: the usual one is that much more for one line.
    if (threadIdx.x == g && first == 0) p.fixed->usual[g] = upper * sqrt(double(p.first(g + 1) - p.first(g)));
  }
  __syncthreads();
  // Errors of several lines may cancel in a column of a group. Other groups tell of that column.
  const int others = p.flagged > p.groups ? p.groups : 0;
  const Index begin = first + warp * (32 * EACH) + lane;
  const double* z = p.sums + begin;
  int votes[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) votes[i] = begin + 32 * i < p.n && !(__ldcg(z + g * p.n + 32 * i) <= pool[g]) ? 2 : 0;
#pragma unroll 2
  for (int other = 0; other < others; other++)
#pragma unroll
    for (int i = 0; i < EACH; i++) votes[i] += begin + 32 * i < p.n && !(__ldcg(z + other * p.n + 32 * i) <= pool[other]);
  unsigned marks[EACH], count = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    marks[i] = over_lanes(votes[i] >= 2 ? 1u << lane : 0u);
    count += bits_in(marks[i]);
    if (begin + 32 * i < p.n) p.column_hits(g)[begin + 32 * i] = 0;
  }
  unsigned place = __shfl_sync(~0u, lane == 0 ? atomicAdd(p.fixed->candidates + g, count) : 0u, 0);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    if (marks[i] >> lane & 1) p.columns(g)[place + bits_in(marks[i] & ((1u << lane) - 1))] = unsigned(begin + 32 * i);
    place += bits_in(marks[i]);
  }
}
