// Stages 9 to 12 of repair.cu: what is left of a fault, too little for the check to see.
//
// A wrong element of an operand, gone before anyone looked, leaves a line or a column of C wrong all over, and only some
// of that is found by its size. So lines that are wrong all over are computed again whole; so are columns that have a
// wrong element, where a sample of their other elements is out of the ordinary, or many are wrong.
#pragma once
#include "repair/repair_elements.cuh"

constexpr Index SAMPLES = 16;         // of a column, looked at SHARE at a time; every other one is next to flagged lines
constexpr Index SHORT = 128;          // columns of which all are looked at
constexpr Index MUCH = 8;             // of which so great a part is wrong are completed whatever the sample says
constexpr unsigned FEW_COLUMNS = 16;  // if there are not more candidates, all that are wrong somewhere are looked at;
                                      // else those that several lines point at

INLINE Bits column_of(int g, Index product, Index j) { return Bits(g) << 56 | Bits(product) << 32 | Bits(j); }

// ---- stage 9 --------------------------------------------------------------------------------------------------------

// By one block. Does not count what a single line has that is wrong all over; several may be a tile. Next to flagged
// lines, in the middle of a fault or at its edge, there may be some in which it cancels: of each quarter of them the first
// line that follows one, and the first that precedes one, and is none.
INLINE void list_rest(const Problem* problem, unsigned* keys) {
  const Problem& p = problem[0];
  constexpr int WHOLE = GROUPS, PRODUCT = 2 * GROUPS, AFTER = 3 * GROUPS;  // keys: of each group, candidates up to it
  if (threadIdx.x < AFTER + GAPS) keys[threadIdx.x] = 0;
  __syncthreads();
  for (int place = threadIdx.x; place < p.flagged && !p.all; place += T1) {
    const Index line = p.line(place), next = line + 1;
    const unsigned quarter = unsigned(place) * (GAPS / 2) / unsigned(p.flagged);
    const bool after = next % p.m != 0 && (place + 1 == p.flagged || p.line(place + 1) != next);
    const bool ahead = line % p.m != 0 && (place == 0 || p.line(place - 1) != line - 1);
    if (after) atomicMax(&keys[AFTER + quarter], ~unsigned(next % p.m));
    if (ahead) atomicMax(&keys[AFTER + GAPS / 2 + quarter], ~unsigned((line - 1) % p.m));
  }
  for (int g = 0; g < p.groups && !p.all; g++)
    for (int place = p.first(g) + threadIdx.x; place < p.first(g + 1); place += T1)
      if (is_whole(p, g, place)) atomicAdd(&keys[WHOLE + g], 1u);
  if (threadIdx.x < p.groups) {
    const int g = threadIdx.x;
    keys[PRODUCT + g] = unsigned(p.product(g));
    unsigned total = 0;
    for (int before = 0; before <= g; before++) total += __ldcg(p.fixed->candidates + before);
    keys[g] = total;
  }
  __syncthreads();
  if (threadIdx.x < p.groups) p.fixed->whole[threadIdx.x] = keys[WHOLE + threadIdx.x];
  if (threadIdx.x < GAPS) p.fixed->gaps[threadIdx.x] = ~keys[AFTER + threadIdx.x];
  const unsigned all = keys[p.groups - 1];
  for (unsigned c = threadIdx.x; c < all; c += T1) {
    int g = 0;
    while (c >= keys[g]) g++;
    const Index j = __ldcg(p.columns(g) + c - (g ? keys[g - 1] : 0));
    const unsigned product = keys[PRODUCT + g];
    unsigned hits = 0, before = 0, whole_lines = 0;  // of this column of the product, and in groups before
    for (int other = 0; other < p.groups; other++)
      if (keys[PRODUCT + other] == product) whole_lines += keys[WHOLE + other];
#pragma unroll
    for (int other = 0; other < GROUPS; other++) {
      if (other >= p.groups || keys[PRODUCT + other] != product) continue;
      const unsigned here = __ldcg(p.column_hits(other) + j), whole = whole_lines > 1 ? 0 : keys[WHOLE + other];
      const unsigned mine = here > whole ? here - whole : 0;
      hits += mine;
      before += other < g ? mine : 0;
      if (other == g && mine == 0) before = ~0u;
    }
    if (before || !(hits > 1 || (hits && all <= FEW_COLUMNS))) continue;
    const Bits number = atomicAdd(p.state + HIT, 1ull), column = column_of(g, product, j);
    if (number >= REST) continue;
    const bool much = p.m > SHORT && Index(hits) * MUCH >= p.m;
    p.fixed->hit[number] = column;
    p.fixed->known[number] = much;
    if (much) p.fixed->completed[atomicAdd(p.state + COMPLETED, 1ull)] = column;
  }
}

// ---- stages 10 and 12: SHARE elements of a column again -------------------------------------------------------------

INLINE Index columns_in(const Problem& p, State word) { return smaller(Index(__ldcg(p.state + word)), REST); }
INLINE Index lines_of_column(const Problem& p, bool complete) { return complete || p.m <= SHORT ? p.m : SAMPLES; }
INLINE Index items_of_column(const Problem& p, bool complete) { return pieces(lines_of_column(p, complete), SHARE); }

// Of a sample, whether the column is to be completed; or lines of one that is.
INLINE void look_at_column(const Problem* problem, Index item, bool complete, double* pool) {
  const Problem& p = problem[0];
  const Index parts = items_of_column(p, complete), number = item / parts, part = item % parts;
  const Bits column = __ldcg((complete ? p.fixed->completed : p.fixed->hit) + number);
  const int g = int(column >> 56);
  const Index begin = Index(column >> 32 & 0xffffffu) * p.m, j = Index(column & 0xffffffffu);
  const Index step = p.m / lines_of_column(p, complete);
  auto line_of = [&](int i) {
    const Index x = part * SHARE + i;
    const unsigned gap = x % 2 && step > 1 ? __ldcg(p.fixed->gaps + x / 2) : ~0u;
    return begin + (gap < p.m ? Index(gap) : smaller(step / 2 + step * x, p.m - 1));
  };
  Index lines[SHARE], columns[1] = {j};
#pragma unroll
  for (int i = 0; i < SHARE; i++) lines[i] = line_of(i);
  multiply_elements<SHARE, 1>(p, lines, columns, pool);
  if (threadIdx.x >= SHARE || part * SHARE + threadIdx.x >= p.m) return;
  double sum, size;
  add_warps(pool, SHARE, threadIdx.x, sum, size);
  const bool wrong = judge(p, line_of(threadIdx.x), j, sum, size, __ldcg(p.fixed->usual + g), complete ? ALL : NONE);
  if (wrong && !complete && atomicAdd(p.fixed->known + number, 1u) == 0)
    p.fixed->completed[atomicAdd(p.state + COMPLETED, 1ull)] = column;
}
