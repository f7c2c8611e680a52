// What the stages of repair.cu share: the problem, the first part of scratch, and what it is read with.
#pragma once
#include "check/state.cuh"

constexpr int WARPS = T1 / 32;
constexpr int CAP = 2048, GROUPS = 8, LOG = 1024;
constexpr int REST = 1024;      // columns that are looked at along their whole length
constexpr int GAPS = 8;         // lines next to flagged ones
constexpr int BINS = 128;      // of z
constexpr double OUTLIER = 8;    // times further off than the usual is wrong
constexpr double TRUNCATED = 2;  // units of roundoff that an addition is off by where a tensor core truncates

// Compilers need some registers more on other architectures than the one that loads ahead are tuned on.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr bool TUNED = false;
#else
constexpr bool TUNED = true;
#endif

struct Fixed {  // the first part of scratch
  unsigned order[CAP], hits[CAP];  // lines in ascending order; wrong elements of each
  unsigned remaining[CAP];         // lines that fail still after stage 1
  unsigned bins[GROUPS * BINS], candidates[GROUPS], whole[GROUPS];  // whole: lines that are wrong all over
  double usual[GROUPS];  // z of a line in nine tenths of the columns
  Bits hit[REST], completed[REST];  // columns of a product, as named by `column_of`
  unsigned known[REST];             // whether one that was hit is completed
  unsigned gaps[GAPS];              // lines next to flagged ones, or ~0
  Bits log[3 * LOG];
};
static_assert(sizeof(Fixed) == FIXED, "as abft_tsm2/checksum/device/kernels.py has it");

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
  const Bits *guards, *guards0;
  Bits encoded;
  const Bits *left_words, *right_words, *added_words;
  Index w_step;
  double unit_roundoff, rigorous, out_roundoff, underflow;
  const double* sizes;
  const unsigned* lines;
  Bits* state;
  int flagged, groups;
  const unsigned* listed;  // lines that the check has flagged, as many as `failing`
  int failing;
  bool mass, all, settled;  // more lines failed than are repaired; all lines are looked at; none fails any more
  bool checked;             // stages 8 to 13 are there
  Index n_pieces, stripes, slabs, depth;  // depth: rows of R in a slab
  Fixed* fixed;
  double2* sides;  // (y_g(l), a_g(l)) at l groups + g
  double* sums;    // D, |C0| and |C| of GROUPS, n columns each; then z in place of D, candidates and hits of |C0|
  double* parts;   // of (y_g R, a_g |R|)(j) of slab s: ((s GROUPS + g) 2 + q) n + j; from stage 6 on y_g R in slab 0
  Bits call;       // its number
  Bits* record;

  INLINE int first(int g) const { return int(unsigned(g) * unsigned(flagged) / unsigned(groups)); }  // of the lines of a group, in order
  INLINE Index line(int place) const { return all ? Index(place) : Index(__ldcg(fixed->order + place)); }
  INLINE Index product_of(Index line) const { return batch == 1 ? 0 : line / m; }
  INLINE Index within(Index line, Index step, Index rs) const {
    const Index product = product_of(line);
    return product * step + (line - product * m) * rs;
  }
  INLINE const A_TYPE* left(Index line) const { return L + within(line, l_step, l_rs); }
  INLINE const C_TYPE* added(Index line, Index j) const { return C0 + within(line, c0_step, c0_rs) + j * c0_cs; }
  INLINE C_TYPE* result(Index line, Index j) const { return C + within(line, c_step, c_rs) + j * c_cs; }
  INLINE const A_TYPE* right(Index product, Index j) const { return R + product * r_step + j * r_cs; }
  // Groups that R is read for together: all, or each where every product has an R of its own.
  INLINE int passes() const { return batch > 1 && r_step ? groups : 1; }
  INLINE double* product_sum(int g, Index j) const { return parts + 2 * g * n + j; }  // (y_g R)(j), from stage 6 on
  INLINE unsigned* columns(int g) const { return reinterpret_cast<unsigned*>(sums + (GROUPS + g) * n); }
  INLINE unsigned* column_hits(int g) const { return columns(g) + n; }  // wrong elements of each column
  INLINE bool replaced() const { return __ldcg(state + WRONG) != 0; }
  INLINE Index product(int g) const { return product_of(line(first(g))); }
};

// All lines of products of which columns were completed, by number.
INLINE Index lines_of_products(const Problem& p) {
  return __ldcg(p.state + COMPLETED) ? (p.batch > 1 ? p.groups : 1) * p.m : 0;
}
INLINE Index line_of_products(const Problem& p, Index number) {
  return p.product(p.batch > 1 ? int(number / p.m) : 0) * p.m + number % p.m;
}

INLINE Index pieces(Index x, Index of) { return (x + of - 1) / of; }
INLINE bool finite(double x) { return x - x == 0.0; }
INLINE double infinity() { return double(from_bits(0x7f800000u)); }

// From the level-2 cache: other blocks may have written it since this multiprocessor last read it.
INLINE double fresh(const float16* at) {
  return widened(float16{__ldcg(reinterpret_cast<const unsigned short*>(at))});
}
INLINE double fresh(const bfloat16* at) {
  return widened(bfloat16{__ldcg(reinterpret_cast<const unsigned short*>(at))});
}
INLINE double fresh(const float* at) { return __ldcg(at); }
INLINE double fresh(const double* at) { return __ldcg(at); }

// The bits of an element, past the level-1 cache, which may hold what was there before.
INLINE Bits fresh_bits(const float16* at) { return __ldcg(reinterpret_cast<const unsigned short*>(at)); }
INLINE Bits fresh_bits(const bfloat16* at) { return __ldcg(reinterpret_cast<const unsigned short*>(at)); }
INLINE Bits fresh_bits(const float* at) { return pattern(__ldcg(at)); }
INLINE Bits fresh_bits(const double* at) { return pattern(__ldcg(at)); }

// The sum over the lanes of a warp, for each of them.
template <class T>
INLINE T over_lanes(T x) {
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) x += __shfl_xor_sync(~0u, x, bit);
  return x;
}
