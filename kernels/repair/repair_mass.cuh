// Stages 0 and 1 of repair.cu: NaN and infinities in more lines than are repaired one by one. They are few, or the host
// has to look: each is computed again, and the lines that fail still go the way of all others.
#pragma once
#include "repair/repair_elements.cuh"
#include "repair/repair_locate.cuh"

constexpr Index ENTRIES_AT_MOST = 1 << 15;

// What fits into the space for the parts of stage 5, two words each.
INLINE Index room(const Problem& p) { return smaller(ENTRIES_AT_MOST, 2 * GROUPS * p.slabs * p.n); }
INLINE Bits* entries(const Problem& p) { return reinterpret_cast<Bits*>(p.parts); }
INLINE Index entries_of(const Problem& p) {
  const Index found = Index(__ldcg(p.state + ENTRIES));
  return found <= room(p) ? found : 0;
}

// ---- stage 0: a flagged line, and L(line, :) --------------------------------------------------------------------------

INLINE void list_entries(const Problem* problem, Index item, Bits* word_sums) {
  const Problem& p = problem[0];
  const Index line = p.lines[item];
  if (p.left_words != nullptr) check_left(p, line, CHANGED_BEFORE, word_sums);
  const C_TYPE* row = p.result(line, 0);
  for (Index j = threadIdx.x; j < p.n; j += T1) {
    if (finite(fresh(row + j * p.c_cs))) continue;
    const Bits number = atomicAdd(p.state + ENTRIES, 1ull);
    if (Index(number) < room(p)) entries(p)[number] = Bits(j) << 32 | Bits(line);
  }
}

// ---- stage 1 ----------------------------------------------------------------------------------------------------------

INLINE void recompute_entry(const Problem* problem, Index item, double* pool) {
  const Problem& p = problem[0];
  const Bits entry = __ldcg(entries(p) + item);
  const Index lines[1] = {Index(entry & 0xffffffffu)}, columns[1] = {Index(entry >> 32)};
  multiply_elements<1, 1>(p, lines, columns, pool);
  if (threadIdx.x > 0) return;
  double sum, size;
  add_warps(pool, 1, 0, sum, size);
  judge(p, lines[0], columns[0], sum, size, 1, OUTLIERS);
}

// ---- what stages 3 and on are about -----------------------------------------------------------------------------------

// By one thread of each block: at most `most` lines that are left, or else all lines of the only product. Where nothing
// is left, some lines go that way all the same: it is there that R is seen not to have changed.
INLINE void choose(Problem& p, Index most) {
  const Index left = Index(__ldcg(p.state + REMAINING));
  if (Index(__ldcg(p.state + ENTRIES)) > room(p) || left > most) {
    p.all = p.batch == 1;
    p.flagged = p.all ? int(p.m) : 0;
  } else if (left) {
    p.lines = p.fixed->remaining;
    p.flagged = int(left);
  } else {
    p.settled = true;
    p.flagged = min(p.flagged, GROUPS);
  }
  p.groups = min(p.flagged, GROUPS);
}
