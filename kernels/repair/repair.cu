// Flagged lines of C = alpha L R + beta C0: what is wrong in them is located, computed again in double precision,
// replaced and checked again, without the host. Launched behind every check: where no line is flagged it writes the
// record and ends.
//
// Blocks take items of work from a queue, by tickets. Those of a stage wait until all of the stages before are done:
// tickets are handed out in order, so a block waits only for blocks that run already, however many fit on the card.
// Sums are taken in an order that follows from shapes alone; what blocks add to together are integers.
//
// Of more than `repaired` lines (repair_mass.cuh):
//   stage 0  elements that are NaN or infinite; sums of bits of these lines of L
//         1  each of them again
//         2  the lines that fail still. Where they are too many: all lines of the product, if there is only one
// Of the others (repair_locate.cuh, repair_elements.cuh):
//         3  the flagged lines i(0) < i(1) < ... in up to GROUPS groups g of consecutive ones; few: a line a group
//         4  y_g(l) = sum_i w_i L(i, l), a_g(l) = sum_i |w_i L(i, l)|, D_g(j) = sum_i w_i (C(i, j) - beta C0(i, j)),
//            magnitudes of C0 and C, sums of bits of these lines of L. w_i = +-(1 + h), h < 1/2 of 31 bits, so that
//            equal faults of several lines do not cancel; 1 where i is alone
//         5  y_g R and a_g |R|, and a sum of bits of R, in one read of R for all groups: slabs of rows, stripes of
//            columns
//         6  e_g = D_g - alpha y_g R, S_g likewise, z = |e_g| / (u S_g), how many columns have which z
//         7  candidates: columns beyond the rigorous bound, not finite, or 8 times further off than nine tenths of
//            them; of groups of several lines also those that are so in two other groups
//         8  C(i, j) of each line and candidate again; what is wrong is replaced
// What is left of a fault, too little to be seen (repair_rest.cuh):
//         9  lines that are wrong all over, and columns that were hit: FEW_COLUMNS of them, or in several lines
//        10  a sample of each such column; completed are those in which something is out of the ordinary, and those of
//            which an eighth is wrong
//        11  the lines that are wrong all over, 12  the columns: each element again, and replaced where it differs
// And at the end:
//        13  where something was replaced, whether L, R and C0 are still what was encoded (repair_known.cuh)
//        14  the residual, with what C holds now, of each flagged line, and of all lines of products of which columns
//            were completed. A line in which nothing was replaced is not resolved, unless it is right element by element
//            and L, R and C0 as they are now predict of it what was predicted
//        15  the record
//
// Launch   any grid of blocks of T1 threads, best as many as the card holds at a time (BLOCKS a multiprocessor)
// Macros   A_TYPE, WIDTH, ACC of wide.cuh, C_TYPE, D_TYPE of C and of its cast; T1 threads, at least 64; BLOCKS of a
//          multiprocessor; TURNED 0: rows of R are contiguous, 1: columns; FIXED bytes of `Fixed`; ENTRY the name
//          of the kernel
// Storage  strides in elements, `step` from product to product; line b m + i is row i of product b. cast, C0, t0,
//          added2, left_words, right_words, added_words may be null. C0 is not C: what was overwritten cannot be computed again.
//          state: 32 words, all from the third on 0 but CALL and JUDGED. scratch: from a multiple of 16 on, at least
//          FIXED + 64 (2 k + (3 + 2 slabs) n) bytes, slabs = max(1, min(264 / ceil(n / STRIPE), ceil(k / 128))),
//          divided without remainder
// call     as number_of takes it, and so is `encoded`
// tally    of the replays of a graph (tally.cuh), `record` being the first of a ring of so many; null for a product that
//          runs once
// record   0: `call`, the number of the call that this kernel was launched for; 1: flagged lines, and lines that were judged
//          in the upper half; 2: 0 clean, 1 all repaired, 2 not resolved, 3 not resolved but right
//          in every element, by operands that are what was encoded, 4 not resolved, and no line that fails has a bound;
//          3: state[1]; 4: VERDICTS of the tally, or 0; 5: least |v|; 6: wrong elements; 7: upper half of state[0], or 2
//          where L, R or C0 changed, in the low byte, and above it the number of the call that was judged. The host takes
//          a record for a verdict only where both numbers and the count are those of its call; from 8 on up to 39 faults
//          by line and position: position << 32 | line, found, now. Of more than LOG of them those found first are sorted;
//          127: where it is not resolved, the digest of what was encoded (digest_of)
// Edges    not resolved: lines or elements that are too many (more than `repaired` or CAP lines, GROUPS of a batch, that
//          neither NaN nor some columns explain; LIMIT elements). Operands that changed: nothing is replaced but NaN
#define B_TYPE A_TYPE
#define T2 1
#include "repair/repair_locate.cuh"
#include "repair/repair_elements.cuh"
#include "repair/repair_rest.cuh"
#include "repair/repair_mass.cuh"
#include "repair/repair_known.cuh"
#include "repair/tally.cuh"
#include "check/chain.cuh"

constexpr int TOLD = 39, ENCODED = 127, BOUNDS = 128;
constexpr Index LIMIT = 1 << 22;
constexpr int WAVE = 264, LEAST_ROWS = 128;  // items aimed at in stage 5, rows of a slab at least
constexpr int POOL = PER_WARP * WARPS > 2 * DEEP * GROUPS ? PER_WARP * WARPS : 2 * DEEP * GROUPS;

INLINE bool has_changed(const Problem& p) {
  return (__ldcg(p.state + CHANGED) | __ldcg(p.state + CHANGED_BEFORE)) != 0 ||
         (p.right_words != nullptr && __ldcg(p.state + RIGHT_WORDS) != 0);
}

// The same of all stages, at the end.
INLINE bool has_changed_since(const Problem& p) {
  return has_changed(p) || (__ldcg(p.state + CHANGED_AFTER) | __ldcg(p.state + RIGHT_AFTER)) != 0;
}

// ---- the record -----------------------------------------------------------------------------------------------------

// The least weight of all products, for each lane of a block's first warp.
INLINE double least_weight(const double* sizes, Index products) {
  double least = infinity();
  for (Index b = threadIdx.x; b < products; b += 32) least = sizes[2 * b + 1] < least ? sizes[2 * b + 1] : least;
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    const double other = __shfl_xor_sync(~0u, least, bit);
    least = other < least ? other : least;
  }
  return least;
}

// The bounds of 32 lines, evenly spread, by a block's first warp: for the host, which takes their median.
INLINE void write_bounds(const double* tau, Index lines, Bits* record) {
  record[BOUNDS + threadIdx.x] = same_bits<Bits>(lines > 0 ? tau[(2 * threadIdx.x + 1) * lines / 64] : 0.0);
}

// What verdicts have left in the state.
struct Said {
  Bits flags, closest, call, judged;
};

// By one thread; of the verdict on so many lines.
INLINE void write_record(Bits outcome, Bits changed, Bits wrong, const Said& said, Bits call, Index lines, double least,
                         Bits* record, Bits* tally, const Counts& counts) {
  const Bits flags = said.flags, closest = said.closest, raised = flags >> 32 | (changed ? 2 : 0);
  record[1] = (flags & 0xffffffffu) | said.judged << 32;
  record[2] = outcome;
  record[3] = closest;
  record[4] = counts.was[VERDICTS];
  record[5] = same_bits<Bits>(least);
  record[6] = wrong;
  record[7] = raised | said.call << 8;
  record[0] = call;
  if (tally == nullptr) return;
  const bool judged = said.call == call && said.judged == Bits(lines);
  add_replay(tally, counts, call, judged, outcome, wrong, flags & 0xffffffffu, closest, raised);
}

// All that was encoded of operands: a host that has to verify C later sees by it whether they are still those.
struct EncodedSums {
  const double *t, *p2, *t0, *added2;
  const Bits *left_words, *right_words, *added_words;
  Index lines, k, rights, w_step;
};

// For a block's first thread.
INLINE Bits digest_of(const EncodedSums& e, Bits* word_sums) {
  Bits sum = 0;
  auto add = [&](const void* x, Index count, Index first, int which) {
    const Bits* bits = static_cast<const Bits*>(x);
    for (Index i = threadIdx.x; i < count && bits != nullptr; i += T1) sum += multiplier(first + i, which) * bits[i];
  };
  const void* of_lines[] = {e.t, e.p2, e.left_words, e.t0, e.added2, e.added_words};
#pragma unroll
  for (int which = 0; which < 6; which++) add(of_lines[which], e.lines, 0, which);
#pragma unroll 1
  for (Index b = 0; b < e.rights && e.right_words != nullptr; b++) add(e.right_words + b * e.w_step, e.k, b * e.k, 6);
  return over_block(sum, word_sums);
}

// With the faults that were logged, by line and position.
INLINE void finish(const Problem* problem, const double* tau, Bits* tally, unsigned* keys, Bits* word_sums) {
  const Problem& p = problem[0];
  Bits* const record = p.record;
  const Bits wrong = __ldcg(p.state + WRONG);
  const int count = wrong < LOG ? int(wrong) : LOG;
  constexpr int OWN_KEYS = LOG / T1;
  Bits mine[OWN_KEYS];
  int rank[OWN_KEYS];
#pragma unroll
  for (int i = 0; i < OWN_KEYS; i++) {
    const int x = threadIdx.x + i * T1;
    const Bits key = x < count ? __ldcg(p.fixed->log + 3 * x) : 0;
    mine[i] = key << 32 | key >> 32;  // the line first
    rank[i] = 0;
    if (x >= count) continue;
    keys[2 * x] = unsigned(key);
    keys[2 * x + 1] = unsigned(key >> 32);
  }
  __syncthreads();
#pragma unroll 4
  for (int x = 0; x < count; x++) {
    const Bits other = Bits(keys[2 * x]) << 32 | keys[2 * x + 1];
#pragma unroll
    for (int i = 0; i < OWN_KEYS; i++) rank[i] += other < mine[i];
  }
#pragma unroll
  for (int i = 0; i < OWN_KEYS; i++) {
    const int x = threadIdx.x + i * T1;
    for (int q = 0; q < 3 && x < count && rank[i] < TOLD; q++)
      record[8 + 3 * rank[i] + q] = __ldcg(p.fixed->log + 3 * x + q);
  }
  __syncthreads();
  // Lines that hold now and in which nothing was wrong: their checksum was.
  const bool cleared = __ldcg(p.state + CLEARED) != 0;
  const bool changed = has_changed_since(p), open = __ldcg(p.state + UNRESOLVED) != 0 || (wrong == 0 && !cleared);
  const EncodedSums encoded = {p.t, p.p2, p.t0, p.added2, p.left_words, p.right_words, p.added_words,
                               p.m * p.batch, p.k, p.w_step ? p.batch : 1, p.w_step};
  const Bits digest = changed || open || !p.checked ? digest_of(encoded, word_sums) : 0;
  if (threadIdx.x == 0) record[ENCODED] = digest;
  if (threadIdx.x >= 32) return;
  const bool bounded = Bits(p.failing) > __ldcg(p.state + UNBOUNDED);
  const Bits unresolved = bounded || wrong ? NOT_RESOLVED : NOT_BOUNDED;
  const Bits outcome = changed || open || !p.checked ? unresolved : Bits(cleared ? ALL_RIGHT : ALL_REPAIRED);
  const Said said = {p.state[FLAGGED], p.state[CLOSEST], p.state[CALL], p.state[JUDGED]};
  const double least = least_weight(p.sizes, p.v_step ? p.batch : 1);
  write_bounds(tau, p.m * p.batch, record);
  if (tally != nullptr) log_faults(tally, p.call, record + 8, count < TOLD ? count : TOLD);
  if (threadIdx.x > 0) return;
  write_record(outcome, changed, wrong, said, p.call, p.m * p.batch, least, record, tally, Counts(tally));
}

// ---- the queue ------------------------------------------------------------------------------------------------------

enum Stage {
  LIST_ENTRIES, ENTRIES_AGAIN, LIST_REMAINING, SORT, GATHER, MULTIPLY, COMPARE, CANDIDATES, RECOMPUTE, LIST_REST, SAMPLE,
  WHOLE_LINES, WHOLE_COLUMNS, KNOWN, VERIFY, RECORD, STAGES
};

INLINE Index items_of_groups(const Problem& p, What what) {
  Index items = 0;
  for (int g = 0; g < p.groups; g++) items += items_of_group(p, g, what);
  return items;
}

// Whether anything is replaced: not where operands have changed, nor where so much is to be computed again that the
// whole product had better be.
INLINE bool may_be_repaired(const Problem& p) {
  if (p.flagged == 0 || has_changed(p)) return false;
  Index elements = 0;
  for (int g = 0; g < p.groups; g++) {
    const Index lines = p.first(g + 1) - p.first(g);
    elements += lines * __ldcg(p.fixed->candidates + g);
    // Errors are everywhere. Those of float64 are compared with sums that have as many roundings themselves.
    const double noise = sizeof(C_TYPE) == 8 ? sqrt(double(lines)) : 1;
    if (p.all && __ldcg(p.fixed->usual + g) > OUTLIER / 2 * noise) return false;
  }
  return elements <= LIMIT;
}

// Items of a stage: known when the stages before it are done, and the same for every block, also for one that comes late:
// no later stage writes what they follow from.
INLINE Index items_of(const Problem* problem, int stage) {
  const Problem& p = problem[0];
  if (stage == RECORD) return 1;
  if (stage < SORT && !p.mass) return 0;
  if (stage == LIST_ENTRIES) return p.flagged;
  if (stage == ENTRIES_AGAIN) return __ldcg(p.state + CHANGED_BEFORE) ? 0 : entries_of(p);
  if (stage == LIST_REMAINING) return Index(__ldcg(p.state + ENTRIES)) <= room(p) ? p.flagged : 0;
  if (p.flagged == 0) return 0;
  if (stage == SORT) return p.all ? 1 : pieces(p.flagged, T1);
  if (stage == GATHER) return p.groups * (pieces(p.k, STRIPE) + p.stripes) + (p.left_words != nullptr ? p.flagged : 0);
  if (stage == MULTIPLY) return p.passes() * p.stripes * p.slabs;
  if (has_changed(p)) return 0;
  if (stage == COMPARE) return p.groups * p.n_pieces;
  if (stage == CANDIDATES) return p.groups * pieces(p.n, PANEL);
  if (!p.checked) return 0;
  if (stage == RECOMPUTE) return items_of_groups(p, OUTLIERS);
  if (stage == LIST_REST) return 1;
  if (stage == SAMPLE) return columns_in(p, HIT) * items_of_column(p, false);
  if (stage == WHOLE_LINES) return items_of_groups(p, ALL);
  if (stage == WHOLE_COLUMNS) return columns_in(p, COMPLETED) * items_of_column(p, true);
  if (stage == KNOWN) return items_known(p);
  return lines_verified(p);
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
          double out_factor, double k_root, const Bits* guards, const Bits* guards0, Bits encoded,
          const Bits* left_words, const Bits* right_words, const Bits* added_words, Index w_step,
          double unit_roundoff, double rigorous, double out_roundoff, double underflow, const double* sizes,
          Index repaired, const unsigned* lines, Bits* state, char* scratch, Index scratch_bytes, Bits call, Bits* record,
          Bits* tally, Index ring) {
  after_previous();
  next_may_begin();
  // Nearly always nothing is flagged: as little as possible stands in front of that, and what the record needs is read
  // at the same time.
  const Said said = {state[FLAGGED], state[CLOSEST], state[CALL], state[JUDGED]};
  const unsigned flagged = unsigned(said.flags);
  const bool records = blockIdx.x == 0 && threadIdx.x < 32, writes = records && threadIdx.x == 0;
  const Counts counts(writes ? tally : nullptr);
  const double least = records ? least_weight(sizes, v_step ? batch : 1) : 0;
  const Bits number = number_of(call);
  Bits* const own = record_of(tally, number, record, ring);
  if (flagged == 0) {
    if (records) write_bounds(tau, m * batch, own);
    if (writes) write_record(ALL_CLEAN, 0, 0, said, number, m * batch, least, own, tally, counts);
    return;
  }
  const Index stripes = pieces(n, STRIPE), deep = smaller(stripes ? WAVE / stripes : 1, pieces(k, LEAST_ROWS));
  const Index slabs = deep > 1 ? deep : 1;
  const Index needed = Index(sizeof(Fixed)) + 8 * GROUPS * (2 * k + (3 + 2 * slabs) * n);
  __shared__ Bits word_sums[WARPS];
  if (scratch_bytes < needed) {
    if (blockIdx.x > 0) return;
    const EncodedSums sums = {t, p2, t0, added2, left_words, right_words, added_words,
                              m * batch, k, w_step ? batch : 1, w_step};
    const Bits digest = digest_of(sums, word_sums);
    if (writes) own[ENCODED] = digest;
    if (records) write_bounds(tau, m * batch, own);
    const Bits outcome = state[UNBOUNDED] < flagged ? NOT_RESOLVED : NOT_BOUNDED;
    if (writes) write_record(outcome, 0, 0, said, number, m * batch, least, own, tally, Counts(tally));
    return;
  }
  encoded = number_of(encoded);
  __shared__ __align__(16) double pool[POOL];
  __shared__ A_TYPE tile[TILE];
  __shared__ Bits factors[DEEP];
  __shared__ unsigned keys[CAP];
  __shared__ Bits ticket[1];
  __shared__ Problem problem[1];
  static_assert(CAP >= 2 * LOG && CAP >= BINS && LOG % T1 == 0 && T1 >= 64, "what the stages keep in them");
  double2* sides = reinterpret_cast<double2*>(scratch + sizeof(Fixed));
  double* sums = reinterpret_cast<double*>(sides + GROUPS * k);
  const Index most = smaller(repaired, batch > 1 ? GROUPS : CAP);
  const int groups = min(int(flagged), GROUPS);
  if (threadIdx.x == 0)
    problem[0] = {m, k, n, batch, L, l_rs, l_cs, l_step, R, r_rs, r_cs, r_step, C, c_rs, c_cs, c_step,
                  cast, d_rs, d_cs, d_step, C0, c0_rs, c0_cs, c0_step, alpha, beta, v, v_step, t, t0, p2, added2,
                  factor, input_factor, out_factor, k_root, guards, guards0, encoded, left_words, right_words, added_words, w_step,
                  unit_roundoff, rigorous, out_roundoff, underflow, sizes, lines, state, int(flagged), groups, lines, int(flagged),
                  flagged > most, false, false, false, pieces(n, T1), stripes, slabs, pieces(k, slabs),
                  reinterpret_cast<Fixed*>(scratch), sides, sums, sums + 3 * GROUPS * n, number, own};
  __syncthreads();

  Index base = 0, item = next(state, false, ticket);
#pragma unroll 1
  for (int stage = 0; stage < STAGES; stage++) {
    wait(state, base);
    if (threadIdx.x == 0 && (stage == SORT || stage == RECOMPUTE)) {
      Problem p = problem[0];
      if (stage == SORT && p.mass) choose(p, most);
      if (stage == RECOMPUTE) p.checked = may_be_repaired(p);
      problem[0] = p;
    }
    __syncthreads();
    const Index items = items_of(problem, stage);
#pragma unroll 1
    for (; item < base + items; item = next(state, true, ticket)) {
      const Index number = item - base;
      if (stage == LIST_ENTRIES) list_entries(problem, number, word_sums);
      if (stage == ENTRIES_AGAIN) recompute_entry(problem, number, pool);
      if (stage == SORT) sort_lines(problem, number, keys);
      if (stage == GATHER) gather(problem, number, word_sums);
      if (stage == MULTIPLY) multiply_any(problem, number, pool, tile, factors, word_sums);
      if (stage == COMPARE) compare(problem, number, keys);
      if (stage == CANDIDATES) list_candidates(problem, number, pool, keys);
      if (stage == RECOMPUTE || stage == WHOLE_LINES)
        recompute_any(problem, number, stage == RECOMPUTE ? OUTLIERS : ALL, pool);
      if (stage == LIST_REST) list_rest(problem, keys);
      if (stage == SAMPLE || stage == WHOLE_COLUMNS) look_at_column(problem, number, stage == WHOLE_COLUMNS, pool);
      if (stage == LIST_REMAINING) list_failing(problem, number, pool);
      if (stage == VERIFY) verify(problem, number, pool);
      if (stage == KNOWN) compare_known(problem, number, word_sums);
      if (stage == RECORD) finish(problem, tau, tally, keys, word_sums);
    }
    base += items;
  }
}
