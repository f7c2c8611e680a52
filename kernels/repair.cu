// Flagged lines of C = alpha L R + beta C0: what is wrong in them is located, computed again in double precision,
// replaced and checked again, without the host. Launched behind every check: where no line is flagged it writes the
// record and ends.
//
// Blocks take items of work from a queue, by tickets. Those of a stage wait until all of the stages before are done:
// tickets are handed out in order, so a block waits only for blocks that run already, however many fit on the card.
// Sums are taken in an order that follows from shapes alone; what blocks add to together are integers.
//
//   stage 0  the flagged lines i(0) < i(1) < ... in up to GROUPS groups g of consecutive ones; few: a line a group
//         1  y_g(l) = sum_i w_i L(i, l), a_g(l) = sum_i |w_i L(i, l)|, D_g(j) = sum_i w_i (C(i, j) - beta C0(i, j)),
//            magnitudes of C0 and C, sums of bits of these lines of L. w_i = +-(1 + h), h < 1/2 of 31 bits, so that
//            equal faults of several lines do not cancel; 1 where i is alone
//         2  y_g R and a_g |R|, and a sum of bits of R, in one read of R for all groups: slabs of rows, stripes of
//            columns
//         3  e_g = D_g - alpha y_g R, S_g likewise, z = |e_g| / (u S_g), how many columns have which z
//         4  candidates: columns beyond the rigorous bound, not finite, or 8 times further off than nine tenths of
//            them; of 16 bits also those that are so in most groups
//         5  C(i, j) of each line and candidate again; what is wrong is replaced. The only stage that writes to C
//         6  each flagged line's residual with what C holds now. One in which nothing was replaced is not resolved
//         7  the record
//
// Launch   any grid of blocks of T1 threads, best as many as the card holds at a time (BLOCKS a multiprocessor)
// Macros   A_TYPE, WIDTH, ACC of wide.cuh, C_TYPE, D_TYPE of C and of its cast; T1 threads, at least 64; BLOCKS of a
//          multiprocessor; TURNED 0: rows of R are contiguous, 1: columns; ENTRY the name of the kernel
// Storage  strides in elements, `step` from product to product; line b m + i is row i of product b. cast, C0, t0,
//          added2, left_words, right_words may be null. C0 is not C: what was overwritten cannot be computed again.
//          state: 32 words, all from the third on 0. scratch: from a multiple of 16 on, at least
//          45152 + 64 (2 k + (3 + 2 slabs) n) bytes, slabs = max(1, min(264 / ceil(n / (2 T1)), ceil(k / 128))),
//          divided without remainder
// record   0: 1; 1: flagged lines; 2: 0 clean, 1 all repaired, 2 not resolved; 3: state[1]; 4: tau of the
//          line it names; 5: least |v|; 6: wrong elements; 7: upper half of state[0], or 2 where L or R changed; from 8
//          on up to 40 faults by line and position: position << 32 | line, found, now. Of more than LOG of them those
//          found first are sorted
// Edges    more than CAP lines, or GROUPS of a batch, or LIMIT elements: not resolved, and nothing is written
#define B_TYPE A_TYPE
#define T2 1
#include "wide.cuh"
#include "chain.cuh"

typedef unsigned long long Bits;

constexpr int WARPS = T1 / 32;
constexpr int CAP = 2048, GROUPS = 8, LOG = 1024, TOLD = 40, STAGES = 8;
constexpr Index LIMIT = 1 << 22;
constexpr int BINS = 128, LEAST = 2 * (1023 - 16);  // of z, two an octave, from 2^-16 on
constexpr int WAVE = 264, LEAST_ROWS = 128;         // items aimed at in stage 2, rows of a slab at least
constexpr int OWN = 2, STRIPE = OWN * T1;           // columns of a thread and of a block in stage 2
// Rows of R between two barriers. Where columns are contiguous: 64 bytes of each, through shared memory.
constexpr int DEEP = TURNED ? 64 / int(sizeof(A_TYPE)) : 128;
constexpr int APART = STRIPE + 2;                   // elements from row to row in shared memory
constexpr int TILE = TURNED ? DEEP * APART : 1;
constexpr int SHARE = 4, PAIR = 2;                  // lines and columns that are computed again together
constexpr int FEW = 64;                             // elements of a group that are better computed one by one
constexpr int PER_WARP = TURNED ? 2 * SHARE * PAIR : 2 * SHARE * 32;  // sums of a warp in stage 5
constexpr int POOL = PER_WARP * WARPS > 2 * DEEP * GROUPS ? PER_WARP * WARPS : 2 * DEEP * GROUPS;
constexpr double OUTLIER = 8;
static_assert(CAP >= GROUPS * BINS, "stage 4 keeps all bins");

enum State { FLAGGED, CLOSEST, TICKETS, DONE, CHANGED, WORDS, WRONG, UNRESOLVED };  // words of `state`

struct Fixed {  // the first part of scratch
  unsigned order[CAP], hits[CAP];  // lines in ascending order; wrong elements of each
  unsigned bins[GROUPS * BINS], candidates[GROUPS];
  double usual[GROUPS];  // z of nine tenths of the columns
  Bits log[3 * LOG];
};

struct Problem {
  Index m, k, n, batch;
  const A_TYPE* L;
  Index l_rs, l_cs, l_step;
  const A_TYPE* R;
  Index r_rs, r_cs, r_step;
  C_TYPE* C;
  Index c_rs, c_cs, c_step;
  D_TYPE* cast;
  Index d_rs, d_cs, d_step;
  const C_TYPE* C0;
  Index c0_rs, c0_cs, c0_step;
  double alpha, beta;
  const ACC* v;
  Index v_step;
  const double *t, *t0, *p2, *added2;
  double factor, input_factor, out_factor, k_root;
  const Bits *left_words, *right_words;
  Index w_step;
  double unit_roundoff, rigorous, out_roundoff, underflow;
  const double* sizes;
  const unsigned* lines;
  Bits* state;
  int flagged, groups;
  Index k_pieces, n_pieces, stripes, slabs, depth;  // depth: rows of R in a slab
  Fixed* fixed;
  double2* sides;  // (y_g(l), a_g(l)) at l groups + g
  double* sums;    // D, |C0| and |C| of GROUPS, n columns each; then z in place of D, candidates of |C0|
  double* parts;   // of (y_g R, a_g |R|)(j) of slab s: ((s GROUPS + g) 2 + q) n + j

  INLINE int first(int g) const { return int(Index(g) * flagged / groups); }  // of the lines of a group, in order
  INLINE Index line(int place) const { return __ldcg(fixed->order + place); }
  INLINE const A_TYPE* left(Index line) const { return L + line / m * l_step + line % m * l_rs; }
  INLINE const C_TYPE* added(Index line, Index j) const {
    return C0 + line / m * c0_step + line % m * c0_rs + j * c0_cs;
  }
  INLINE C_TYPE* result(Index line, Index j) const { return C + line / m * c_step + line % m * c_rs + j * c_cs; }
  // Groups that R is read for together: all, or each where every product has an R of its own.
  INLINE int passes() const { return batch > 1 && r_step ? groups : 1; }
  INLINE unsigned* columns(int g) const { return reinterpret_cast<unsigned*>(sums + (GROUPS + g) * n); }
};

INLINE Index pieces(Index x, Index of) { return (x + of - 1) / of; }
INLINE bool finite(double x) { return x - x == 0.0; }
INLINE double infinity() { return double(from_bits(0x7f800000u)); }

template <class To, class From>
INLINE To same_bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To y;
  memcpy(&y, &x, sizeof(To));
  return y;
}
INLINE Bits pattern(float16 x) { return x.bits; }
INLINE Bits pattern(bfloat16 x) { return x.bits; }
INLINE Bits pattern(float x) { return to_bits(x); }
INLINE Bits pattern(double x) { return same_bits<Bits>(x); }

// From the level-2 cache: other blocks may have written it since this multiprocessor last read it.
INLINE double fresh(const float16* at) {
  return widened(float16{__ldcg(reinterpret_cast<const unsigned short*>(at))});
}
INLINE double fresh(const bfloat16* at) {
  return widened(bfloat16{__ldcg(reinterpret_cast<const unsigned short*>(at))});
}
INLINE double fresh(const float* at) { return __ldcg(at); }
INLINE double fresh(const double* at) { return __ldcg(at); }

INLINE Bits hashed(Bits x) {  // the finalizer of SplitMix64, as in generated.cuh
  Bits z = (x + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}

INLINE double weight(Index line, int lines) {
  if (lines == 1) return 1;
  const Bits z = hashed(line);
  const double size = 1 + double(z & 0x7fffffffu) * 0x1p-32;
  return z >> 63 ? -size : size;
}

// Odd, so that no change of one row of R is lost modulo 2^64; of several only by chance.
INLINE Bits multiplier(Index l, int pass) { return hashed(Bits(l) + (Bits(pass) << 48)) | 1; }

template <class T>
INLINE T over_lanes(T x) {
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) x += __shfl_xor_sync(~0u, x, bit);
  return x;
}

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

// ---- stage 0: order(rank of line) = line, T1 lines an item; and what is counted begins with 0 -----------------------

INLINE void sort_lines(const Problem* problem, Index item, unsigned* keys) {
  const Problem& p = problem[0];
  for (int x = threadIdx.x; x < p.flagged; x += T1) keys[x] = p.lines[x];
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
  for (int x = threadIdx.x; x < GROUPS * BINS && item == 0; x += T1) p.fixed->bins[x] = 0;
}

// ---- stage 1 --------------------------------------------------------------------------------------------------------

// y_g(l), a_g(l) for T1 of l
INLINE void gather_left(const Problem& p, int g, Index l) {
  if (l >= p.k) return;
  const int first = p.first(g), lines = p.first(g + 1) - first;
  double y = 0, a = 0;
#pragma unroll 4
  for (int i = 0; i < lines; i++) {
    const Index line = p.line(first + i);
    const double x = weight(line, lines) * double(widened(p.left(line)[l * p.l_cs]));
    y += x;
    a += fabs(x);
  }
  p.sides[l * p.groups + g] = {y, a};
}

// D_g(j), sum_i |w_i beta C0(i, j)|, sum_i |w_i C(i, j)| for T1 of j
INLINE void gather_result(const Problem& p, int g, Index j) {
  if (j >= p.n) return;
  const int first = p.first(g), lines = p.first(g + 1) - first;
  double d = 0, before = 0, now = 0;
#pragma unroll 4
  for (int i = 0; i < lines; i++) {
    const Index line = p.line(first + i);
    const double w = weight(line, lines), c = w * fresh(p.result(line, j));
    const double c0 = p.beta != 0 ? w * p.beta * fresh(p.added(line, j)) : 0.0;
    d += c - c0;
    before += fabs(c0);
    now += fabs(c);
  }
  p.sums[g * p.n + j] = d;
  p.sums[(GROUPS + g) * p.n + j] = before;
  p.sums[(2 * GROUPS + g) * p.n + j] = now;
}

INLINE void check_left(const Problem& p, int place, Bits* word_sums) {
  const Index line = p.line(place);
  const A_TYPE* at = p.left(line);
  Bits sum = 0;
#pragma unroll 8
  for (Index l = threadIdx.x; l < p.k; l += T1) sum += pattern(at[l * p.l_cs]);
  sum = over_block(sum, word_sums);
  if (threadIdx.x == 0 && sum != p.left_words[line]) atomicAdd(p.state + CHANGED, 1ull);
}

INLINE void gather(const Problem* problem, Index item, Bits* word_sums) {
  const Problem& p = problem[0];
  const Index left = p.groups * p.k_pieces, both = left + p.groups * p.n_pieces;
  if (item < left)
    gather_left(p, int(item / p.k_pieces), item % p.k_pieces * T1 + threadIdx.x);
  else if (item < both)
    gather_result(p, int((item - left) / p.n_pieces), (item - left) % p.n_pieces * T1 + threadIdx.x);
  else
    check_left(p, int(item - both), word_sums);
}

// ---- stage 2: (y R, a |R|)(groups, stripe) over a slab of rows, of COUNT groups -------------------------------------

template <int COUNT>
INLINE void add_row(double (&sum)[OWN][COUNT][2], Bits& word, const A_TYPE (&r)[OWN], int l, const double* pool,
                    const Bits* factors) {
  const Bits factor = factors[l];
  double x[OWN];
#pragma unroll
  for (int c = 0; c < OWN; c++) {
    x[c] = widened(r[c]);
    word += factor * pattern(r[c]);
  }
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
  const Index product = p.line(p.first(first)) / p.m, slab = item / p.stripes, stripe = item % p.stripes;
  const Index begin = slab * p.depth, end = smaller(begin + p.depth, p.k), column = stripe * STRIPE + threadIdx.x;
  const A_TYPE* R = p.R + product * p.r_step;
  constexpr int AHEAD = TURNED ? (sizeof(A_TYPE) == 8 ? 4 : 8) : COUNT == 1 ? 16 : 8;
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
#pragma unroll 8
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
  if (threadIdx.x == 0) atomicAdd(p.state + WORDS, word);
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

// ---- stage 3: z of T1 columns of a group ----------------------------------------------------------------------------

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
    const int lines = p.first(g + 1) - p.first(g);
    const double* sums = p.sums + g * p.n + j;
    e = __ldcg(sums) - p.alpha * e;
    s = fabs(p.alpha) * s + __ldcg(sums + GROUPS * p.n);
    // What storing C has rounded follows from C: one per cent more, since that was rounded itself.
    const double stored = 1.01 * p.out_roundoff * __ldcg(sums + 2 * GROUPS * p.n);
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

// ---- stage 4: the candidates of a group, in ascending order ---------------------------------------------------------

INLINE void list_candidates(const Problem* problem, int g, double* pool, unsigned* keys) {
  const Problem& p = problem[0];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int x = threadIdx.x; x < p.groups * BINS; x += T1) keys[x] = __ldcg(p.fixed->bins + x);
  __syncthreads();
  if (threadIdx.x < p.groups) {  // the upper end of the bin that nine tenths of the columns reach to
    const int first = threadIdx.x * BINS;
    int bin = 0;
    Index below = keys[first];
    while (below <= (p.n - 1) * 9 / 10 && bin < BINS - 1) below += keys[first + ++bin];
    const double upper = bin == BINS - 1 ? 1e300 : same_bits<double>(Bits(LEAST + bin + 1) << 51);
    const double usual = upper > 1 ? upper : 1;
    pool[threadIdx.x] = OUTLIER * usual;
    if (threadIdx.x == g) p.fixed->usual[g] = usual;
  }
  __syncthreads();
  const double limit = pool[g];
  // Faults in one column may cancel in a group up to what rounding to 16 bits explains: others tell of them.
  const int others = p.out_roundoff > 0 ? p.groups : 0;
  unsigned count = 0;
#pragma unroll 1
  for (Index panel = 0; panel < p.n; panel += 32 * T1) {
    unsigned marks = 0;  // of columns panel + 32 threadIdx.x + bit
#pragma unroll 8
    for (int word = 0; word < 32; word++) {
      const Index j = panel + warp * 1024 + word * 32 + lane;
      bool marked = j < p.n && !(__ldcg(p.sums + g * p.n + j) <= limit);
      int votes = 0;
#pragma unroll 1
      for (int other = 0; other < others && j < p.n; other++)
        votes += !(__ldcg(p.sums + other * p.n + j) <= pool[other]);
      marked = marked || 2 * votes > p.groups;
      unsigned gathered = marked ? 1u << lane : 0u;
#pragma unroll
      for (int bit = 1; bit < 32; bit *= 2) gathered |= __shfl_xor_sync(~0u, gathered, bit);
      if (word == lane) marks = gathered;
    }
    unsigned mine = 0;
    for (unsigned rest = marks; rest; rest &= rest - 1) mine++;
    unsigned place = mine;  // of the last one, by the threads before in the warp
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const unsigned other = __shfl_up_sync(~0u, place, lanes);
      if (lane >= lanes) place += other;
    }
    __syncthreads();
    if (lane == 31) keys[warp] = place;
    __syncthreads();
    place += count - mine;
#pragma unroll 1
    for (int w = 0; w < WARPS; w++) {
      const unsigned of_warp = keys[w];
      place += w < warp ? of_warp : 0;
      count += of_warp;
    }
    for (int bit = 0; bit < 32 && marks >> bit; bit++)
      if (marks >> bit & 1) p.columns(g)[place++] = unsigned(panel + threadIdx.x * 32 + bit);
  }
  if (threadIdx.x == 0) p.fixed->candidates[g] = count;
}

// ---- stage 5: C(lines, candidates) of a group again -----------------------------------------------------------------

// With sum = L(i, :) R(:, j) and size = |L(i, :)| |R(:, j)|, judges C(i, j), i being line `place`, and replaces it.
INLINE void judge(const Problem& p, int g, int place, Index j, double sum, double size) {
  const int lines = p.first(g + 1) - p.first(g);
  const Index line = p.line(place);
  const double c0 = p.beta != 0 ? p.beta * fresh(p.added(line, j)) : 0.0;
  const double exact = p.alpha * sum + c0, s = fabs(p.alpha) * size + fabs(c0), found = fresh(p.result(line, j));
  const C_TYPE made = narrowed(exact, C_TYPE());  // 16 bits by way of float: rounded twice, by half a unit and a bit
  const double value = widened(made);
  if (found == value || (found != found && value != value)) return;
  // Errors of the lines of a group may have cancelled in its z: its usual one is that much more for one line.
  const double outlier = OUTLIER * __ldcg(p.fixed->usual + g) * sqrt(double(lines)) * p.unit_roundoff * s;
  const double excess = fabs(found - exact) - p.out_roundoff * fabs(exact) - p.underflow;
  if (finite(s) && excess <= p.rigorous * (1 + p.out_roundoff) * s && excess <= outlier) return;
  // Where magnitudes overflow, what is not finite may be what honest arithmetic gives: for the host to see.
  const double largest = p.unit_roundoff > 1e-12 ? 0x1.fffffep127 : 0x1.fffffffffffffp1023;
  if (!finite(s) || (!finite(found) && s >= largest / 2)) {
    atomicAdd(p.state + UNRESOLVED, 1ull);
    return;
  }
  *const_cast<C_TYPE*>(p.result(line, j)) = made;
  if (p.cast != nullptr)
    p.cast[line / p.m * p.d_step + line % p.m * p.d_rs + j * p.d_cs] = narrowed(widened(made), D_TYPE());
  atomicAdd(p.fixed->hits + place, 1u);
  const Bits number = atomicAdd(p.state + WRONG, 1ull);
  if (number >= LOG) return;
  Bits* log = p.fixed->log + 3 * number;
  log[0] = Bits(j) << 32 | Bits(line);
  log[1] = same_bits<Bits>(found);
  log[2] = same_bits<Bits>(value);
}

// What the warps of a block have of ROWS x COLUMNS elements, from line `place` and candidate `at` on, is judged.
template <int ROWS, int COLUMNS>
INLINE void judge_all(const Problem& p, int g, int place, int at, const double* pool) {
  const int last = p.first(g + 1), candidates = int(__ldcg(p.fixed->candidates + g));
  __syncthreads();
  for (int x = threadIdx.x; x < ROWS * COLUMNS; x += T1) {
    const int i = place + x / COLUMNS, c = at + x % COLUMNS;
    if (i >= last || c >= candidates) continue;
    double sum = 0, size = 0;
    for (int w = 0; w < WARPS; w++) {
      sum += pool[(w * ROWS * COLUMNS + x) * 2];
      size += pool[(w * ROWS * COLUMNS + x) * 2 + 1];
    }
    judge(p, g, i, __ldcg(p.columns(g) + c), sum, size);
  }
}

// The threads of a block share l.
template <int ROWS, int COLUMNS>
INLINE void recompute(const Problem& p, int g, int place, int at, double* pool) {
  const int last = p.first(g + 1) - 1, candidates = int(__ldcg(p.fixed->candidates + g));
  const A_TYPE *left[ROWS], *right[COLUMNS];
  double sum[ROWS * COLUMNS * 2];
#pragma unroll
  for (int x = 0; x < ROWS * COLUMNS * 2; x++) sum[x] = 0;
#pragma unroll
  for (int i = 0; i < ROWS; i++) left[i] = p.left(p.line(min(place + i, last))) + threadIdx.x * p.l_cs;
#pragma unroll
  for (int c = 0; c < COLUMNS; c++)
    right[c] = p.R + p.line(place) / p.m * p.r_step + threadIdx.x * p.r_rs +
               __ldcg(p.columns(g) + min(at + c, candidates - 1)) * p.r_cs;
#pragma unroll(ROWS * COLUMNS == 1 ? 8 : 2)
  for (Index l = threadIdx.x; l < p.k; l += T1) {
    double x[ROWS], r[COLUMNS];
#pragma unroll
    for (int i = 0; i < ROWS; i++, left[i - 1] += T1 * p.l_cs) x[i] = widened(*left[i]);
#pragma unroll
    for (int c = 0; c < COLUMNS; c++, right[c - 1] += T1 * p.r_rs) r[c] = widened(*right[c]);
#pragma unroll
    for (int y = 0; y < ROWS * COLUMNS; y++) {
      sum[2 * y] += x[y / COLUMNS] * r[y % COLUMNS];
      sum[2 * y + 1] += fabs(x[y / COLUMNS] * r[y % COLUMNS]);
    }
  }
#pragma unroll
  for (int x = 0; x < ROWS * COLUMNS * 2; x++) {
    const double total = over_lanes(sum[x]);
    if (threadIdx.x % 32 == 0) pool[threadIdx.x / 32 * (ROWS * COLUMNS * 2) + x] = total;
  }
  judge_all<ROWS, COLUMNS>(p, g, place, at, pool);
}

#if !TURNED
// A column a lane, so that neighbouring ones are read together; the warps share l, 32 of them at a time.
INLINE void recompute_wide(const Problem& p, int g, int place, int at, double* pool) {
  constexpr int LOADS = sizeof(A_TYPE) == 8 ? 16 : 32;
  const int last = p.first(g + 1) - 1, candidates = int(__ldcg(p.fixed->candidates + g));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index share = pieces(pieces(p.k, 32), WARPS) * 32, end = smaller((warp + 1) * share, p.k);
  const A_TYPE* right = p.R + p.line(place) / p.m * p.r_step +
                        __ldcg(p.columns(g) + min(at + lane, candidates - 1)) * p.r_cs + warp * share * p.r_rs;
  const A_TYPE* left[SHARE];
  double sum[SHARE][2];
#pragma unroll
  for (int i = 0; i < SHARE; i++) {
    left[i] = p.left(p.line(min(place + i, last)));
    sum[i][0] = sum[i][1] = 0;
  }
#pragma unroll 1
  for (Index l = warp * share; l < end; l += 32) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < SHARE; i++)
      pool[(warp * 32 + lane) * SHARE + i] = l + lane < end ? double(widened(left[i][(l + lane) * p.l_cs])) : 0.0;
    __syncwarp();
#pragma unroll 1
    for (int begin = 0; begin < 32; begin += LOADS) {
      A_TYPE r[LOADS];
#pragma unroll
      for (int a = 0; a < LOADS; a++, right += p.r_rs) r[a] = l + begin + a < end ? *right : A_TYPE();
#pragma unroll
      for (int a = 0; a < LOADS; a++)
#pragma unroll
        for (int i = 0; i < SHARE; i += 2) {
          const double2 x = *reinterpret_cast<const double2*>(&pool[(warp * 32 + begin + a) * SHARE + i]);
          const double y = x.x * double(widened(r[a])), z = x.y * double(widened(r[a]));
          sum[i][0] += y;
          sum[i][1] += fabs(y);
          sum[i + 1][0] += z;
          sum[i + 1][1] += fabs(z);
        }
    }
  }
  __syncthreads();  // the pool is for sums from here on
#pragma unroll
  for (int x = 0; x < SHARE * 2; x++) pool[((warp * SHARE + x / 2) * 32 + lane) * 2 + x % 2] = sum[x / 2][x % 2];
  judge_all<SHARE, 32>(p, g, place, at, pool);
}
#endif

// How many columns of a group are computed together, and in how many items all of them are.
INLINE int together(Index lines, Index candidates) {
  return lines * candidates <= FEW ? 1 : !TURNED && candidates > 8 ? 32 : PAIR;
}
INLINE Index items_of_group(const Problem& p, int g) {
  const Index lines = p.first(g + 1) - p.first(g), candidates = __ldcg(p.fixed->candidates + g);
  const int columns = together(lines, candidates);
  return pieces(lines, columns == 1 ? 1 : SHARE) * pieces(candidates, columns);
}

INLINE void recompute_any(const Problem* problem, Index item, double* pool) {
  const Problem& p = problem[0];
  int g = 0;
  for (Index items = items_of_group(p, 0); item >= items; items = items_of_group(p, ++g)) item -= items;
  const int lines = p.first(g + 1) - p.first(g), columns = together(lines, __ldcg(p.fixed->candidates + g));
  const int rows = columns == 1 ? 1 : SHARE, strips = int(pieces(lines, rows));
  const int place = p.first(g) + int(item % strips) * rows, at = int(item / strips) * columns;
  if (columns == 1) recompute<1, 1>(p, g, place, at, pool);
  if (columns == PAIR) recompute<SHARE, PAIR>(p, g, place, at, pool);
#if !TURNED
  if (columns == 32) recompute_wide(p, g, place, at, pool);
#endif
}

// ---- stage 6: |C(i, :) v - alpha t_i - beta t0_i| <= tau_i, as `bounds.statistical_bound` has it --------------------

INLINE void verify(const Problem* problem, int place, double* pool) {
  const Problem& p = problem[0];
  const Index line = p.line(place), product = line / p.m;
  const ACC* v = p.v + product * p.v_step;
  double u = 0, squares = 0;
#pragma unroll 4
  for (Index j = threadIdx.x; j < p.n; j += T1) {
    const double x = fresh(p.result(line, j)) * double(v[j]);
    u += x;
    squares += x * x;
  }
  u = over_lanes(u);
  squares = over_lanes(squares);
  if (threadIdx.x % 32 == 0) {
    pool[threadIdx.x / 32 * 2] = u;
    pool[threadIdx.x / 32 * 2 + 1] = squares;
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int w = 1; w < WARPS; w++) {
    u += pool[2 * w];
    squares += pool[2 * w + 1];
  }
  const double residual = fabs(u - p.alpha * p.t[line] - (p.beta != 0 ? p.beta * p.t0[line] : 0.0));
  const double least = p.underflow * p.sizes[p.v_step ? 2 * product : 0];
  const double products = fabs(p.alpha) * sqrt(p.p2[line]);
  const double added = p.added2 != nullptr ? fabs(p.beta) * sqrt(p.added2[line]) : 0.0;
  const double norm = sqrt(squares), largest = p.k_root * products + 1.01 * added + least;
  const double stored = norm < largest ? norm : largest, scale = products > added ? products : added;
  const double tau = p.factor * (scale > stored ? scale : stored) + p.input_factor * products + p.out_factor * stored + least;
  if (!(residual <= tau && finite(tau)) || __ldcg(p.fixed->hits + place) == 0) atomicAdd(p.state + UNRESOLVED, 1ull);
}

INLINE bool has_changed(const Problem& p) {
  return __ldcg(p.state + CHANGED) != 0 || (p.right_words != nullptr && __ldcg(p.state + WORDS) != 0);
}

// ---- the record -----------------------------------------------------------------------------------------------------

INLINE void write_record(Bits outcome, Bits changed, Bits wrong, Index lines, Index products, const double* tau,
                         const double* sizes, const Bits* state, Bits* record) {
  if (threadIdx.x >= 32) return;
  double least = infinity();
  for (Index b = threadIdx.x; b < products; b += 32) least = sizes[2 * b + 1] < least ? sizes[2 * b + 1] : least;
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    const double other = __shfl_xor_sync(~0u, least, bit);
    least = other < least ? other : least;
  }
  if (threadIdx.x > 0) return;
  const Bits flags = state[FLAGGED], closest = state[CLOSEST];
  record[1] = flags & 0xffffffffu;
  record[2] = outcome;
  record[3] = closest;
  record[4] = same_bits<Bits>(lines > 0 ? tau[closest & 0xffffffffu] : 0.0);
  record[5] = same_bits<Bits>(least);
  record[6] = wrong;
  record[7] = flags >> 32 | (changed ? 2 : 0);
  record[0] = 1;
}

// With the faults that were logged, by line and position. `checked`: the last stages had items.
INLINE void finish(const Problem* problem, bool checked, const double* tau, Bits* record, unsigned* keys) {
  const Problem& p = problem[0];
  const Bits wrong = __ldcg(p.state + WRONG);
  const int count = wrong < LOG ? int(wrong) : LOG;
  for (int x = threadIdx.x; x < count; x += T1) {
    const Bits key = __ldcg(p.fixed->log + 3 * x);
    keys[2 * x] = unsigned(key);
    keys[2 * x + 1] = unsigned(key >> 32);
  }
  __syncthreads();
  for (int mine = threadIdx.x; mine < count; mine += T1) {
    const unsigned line = keys[2 * mine], position = keys[2 * mine + 1];
    int rank = 0;
    for (int x = 0; x < count; x++) {
      const unsigned other = keys[2 * x];
      rank += other < line || (other == line && keys[2 * x + 1] < position);
    }
    for (int q = 0; q < 3 && rank < TOLD; q++) record[8 + 3 * rank + q] = __ldcg(p.fixed->log + 3 * mine + q);
  }
  __syncthreads();
  const bool changed = has_changed(p), open = __ldcg(p.state + UNRESOLVED) != 0;
  write_record(changed || open || !checked ? 2 : 1, changed, wrong, p.m * p.batch, p.v_step ? p.batch : 1, tau, p.sizes,
               p.state, record);
}

// ---- the queue ------------------------------------------------------------------------------------------------------

// Items of a stage: known when the stages before it are done, and the same for every block.
INLINE Index items_of(const Problem* problem, int stage) {
  const Problem& p = problem[0];
  if (stage == 0) return pieces(p.flagged, T1);
  if (stage == 1) return p.groups * (p.k_pieces + p.n_pieces) + (p.left_words != nullptr ? p.flagged : 0);
  if (stage == 2) return p.passes() * p.stripes * p.slabs;
  if (stage == 7) return 1;
  if (has_changed(p)) return 0;
  if (stage == 3) return p.groups * p.n_pieces;
  if (stage == 4) return p.groups;
  Index items = 0, elements = 0;
  for (int g = 0; g < p.groups; g++) {
    elements += Index(p.first(g + 1) - p.first(g)) * __ldcg(p.fixed->candidates + g);
    items += items_of_group(p, g);
  }
  return elements > LIMIT ? 0 : stage == 5 ? items : p.flagged;
}

// The number of the next item; what this block wrote for the last one is there before that one counts as done.
INLINE Index next(Bits* state, bool done, Bits* ticket) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    if (done) atomicAdd(state + DONE, 1ull);
    ticket[0] = atomicAdd(state + TICKETS, 1ull);
  }
  __syncthreads();
  return Index(Bits(ticket[0]));
}

INLINE void wait(const Bits* state, Index items) {
  if (threadIdx.x == 0)
    while (Index(*static_cast<const volatile Bits*>(state + DONE)) < items) {
#ifdef __CUDA_ARCH__
      __nanosleep(100);
#endif
    }
  __threadfence();
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(T1, BLOCKS)
    ENTRY(Index m, Index k, Index n, Index batch, const A_TYPE* L, Index l_rs, Index l_cs, Index l_step,
          const A_TYPE* R, Index r_rs, Index r_cs, Index r_step, C_TYPE* C, Index c_rs, Index c_cs, Index c_step,
          D_TYPE* cast, Index d_rs, Index d_cs, Index d_step, const C_TYPE* C0, Index c0_rs, Index c0_cs,
          Index c0_step, double alpha, double beta, const ACC* v, Index v_step, const double* t, const double* t0,
          const double* p2, const double* added2, const double* tau, double factor, double input_factor,
          double out_factor, double k_root, const Bits* left_words, const Bits* right_words, Index w_step,
          double unit_roundoff, double rigorous, double out_roundoff, double underflow, const double* sizes,
          const unsigned* lines, Bits* state, char* scratch, Index scratch_bytes, Bits* record) {
  after_previous();
  next_may_begin();
  const unsigned flagged = unsigned(state[FLAGGED]);
  const Index products = v_step ? batch : 1;
  if (flagged == 0) {  // nearly always: as little as possible stands in front of this
    if (blockIdx.x == 0) write_record(0, 0, 0, m * batch, products, tau, sizes, state, record);
    return;
  }
  const Index stripes = pieces(n, STRIPE), most = smaller(stripes ? WAVE / stripes : 1, pieces(k, LEAST_ROWS));
  const Index slabs = most > 1 ? most : 1;
  const Index needed = Index(sizeof(Fixed)) + 8 * GROUPS * (2 * k + (3 + 2 * slabs) * n);
  if (flagged > (batch > 1 ? GROUPS : CAP) || scratch_bytes < needed) {
    if (blockIdx.x == 0) write_record(2, 0, 0, m * batch, products, tau, sizes, state, record);
    return;
  }
  __shared__ __align__(16) double pool[POOL];
  __shared__ A_TYPE tile[TILE];
  __shared__ Bits factors[DEEP];
  __shared__ Bits word_sums[WARPS];
  __shared__ unsigned keys[CAP];
  __shared__ Bits ticket[1];
  __shared__ Problem problem[1];
  static_assert(CAP >= 2 * LOG && CAP >= BINS && T1 >= 64, "what the stages keep in them");
  double2* sides = reinterpret_cast<double2*>(scratch + sizeof(Fixed));
  double* sums = reinterpret_cast<double*>(sides + GROUPS * k);
  const int groups = min(int(flagged), GROUPS);
  if (threadIdx.x == 0)
    problem[0] = {m,          k,          n,           batch,      L,         l_rs,     l_cs,   l_step,
                     R,          r_rs,       r_cs,        r_step,     C,         c_rs,     c_cs,   c_step,
                     cast,       d_rs,       d_cs,        d_step,     C0,        c0_rs,    c0_cs,  c0_step,
                     alpha,      beta,       v,           v_step,     t,         t0,       p2,     added2,
                     factor,     input_factor, out_factor, k_root,    left_words, right_words, w_step,
                     unit_roundoff, rigorous, out_roundoff, underflow, sizes,      lines,     state,    int(flagged), groups,
                     pieces(k, T1), pieces(n, T1), stripes, slabs,    pieces(k, slabs),
                     reinterpret_cast<Fixed*>(scratch), sides, sums, sums + 3 * GROUPS * n};
  __syncthreads();

  Index base = 0, item = next(state, false, ticket);
#pragma unroll 1
  for (int stage = 0; stage < STAGES; stage++) {
    wait(state, base);
    const Index items = items_of(problem, stage);
#pragma unroll 1
    for (; item < base + items; item = next(state, true, ticket)) {
      const Index number = item - base;
      if (stage == 0) sort_lines(problem, number, keys);
      if (stage == 1) gather(problem, number, word_sums);
      if (stage == 2) multiply_any(problem, number, pool, tile, factors, word_sums);
      if (stage == 3) compare(problem, number, keys);
      if (stage == 4) list_candidates(problem, int(number), pool, keys);
      if (stage == 5) recompute_any(problem, number, pool);
      if (stage == 6) verify(problem, int(number), pool);
      if (stage == 7) finish(problem, items_of(problem, 6) > 0, tau, record, keys);
    }
    base += items;
  }
}
