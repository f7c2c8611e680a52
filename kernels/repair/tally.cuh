// What the replays of a product in a graph have found so far, added up on the device: the record of each is unobserved.
//
// A tally is followed by the records of the last replays, as many as a power of two. Words of it:
//   NUMBER                         of the replay that runs, or of the next one; its kernels read it by number_of
//   STARTED, VERDICTS              replays whose first kernel ran, and whose first line was judged (state.cuh)
//   ENDED, MISSING                 replays that came to their end, and that others have followed without
//   UNJUDGED                       of the former, those without a verdict on all lines
//   REPAIRED, CLEARED_REPLAYS, UNBOUND, REFUSED   of the others, by outcome: the rest is clean
//   FIRST_UNJUDGED, FIRST_UNBOUND, FIRST_REFUSED  the number of the first of these, 0 for none
//   ELEMENTS, LINES                wrong elements; lines that failed in replays that were cleared
//   LARGEST                        of all `closest` of the state
//   ALL_FLAGS                      that were raised: of passes; 2 where an operand changed
//   LOGGED                         faults in the log, which begins at ENTRIES_AT: number of the replay, place, found, now
#pragma once
#include "check/state.cuh"

enum TallyWord {
  NUMBER, STARTED = STARTED_AT, VERDICTS = VERDICTS_AT, ENDED, MISSING, UNJUDGED, REPAIRED, CLEARED_REPLAYS, UNBOUND, REFUSED,
  FIRST_UNJUDGED, FIRST_UNBOUND, FIRST_REFUSED, ELEMENTS, LINES, LARGEST, ALL_FLAGS, LOGGED, ENTRIES_AT = 24
};
constexpr Bits TALLY_LOG = 256;
constexpr int RECORD_WORDS = 160;
enum Outcome { ALL_CLEAN, ALL_REPAIRED, NOT_RESOLVED, ALL_RIGHT, NOT_BOUNDED };  // of a record

// Where the record of a replay goes, into a ring of so many that begins at `records`.
INLINE Bits* record_of(const Bits* tally, Bits call, Bits* records, Index ring) {
  return tally != nullptr ? records + RECORD_WORDS * (call & Bits(ring - 1)) : records;
}

// Faults of a record, of three words each, to the log, as far as there is space; by a block's first warp.
INLINE void log_faults(Bits* tally, Bits call, const Bits* faults, int count) {
  const Bits logged = tally[LOGGED];
  __syncwarp();
  for (int x = threadIdx.x; x < count; x += 32) {
    if (logged + x >= TALLY_LOG) break;
    Bits* entry = tally + ENTRIES_AT + 4 * (logged + x);
    entry[0] = call;
#pragma unroll
    for (int q = 0; q < 3; q++) entry[1 + q] = faults[3 * x + q];
  }
  if (threadIdx.x == 0) tally[LOGGED] = logged + count < TALLY_LOG ? logged + count : TALLY_LOG;
}

// What a tally holds: read at once, while other words are on their way.
struct Counts {
  Bits was[LOGGED];

  INLINE explicit Counts(const Bits* tally) {
#pragma unroll
    for (int word = 0; word < LOGGED; word++) was[word] = tally != nullptr ? tally[word] : 0;
  }
};

// The verdict of a replay, and the number of the next one; by one thread. Replays of a graph follow one another.
INLINE void add_replay(Bits* tally, const Counts& counts, Bits call, bool judged, Bits outcome, Bits wrong, Bits lines,
                       Bits closest, Bits flags) {
  const Bits(&was)[LOGGED] = counts.was;
  // Those in front of this one that have begun and not ended. What has not begun cannot have a verdict.
  const Bits before = was[ENDED] + was[MISSING] + 1, begun = was[STARTED] > was[VERDICTS] ? was[STARTED] : was[VERDICTS];
  const Bits missing = was[MISSING] + (begun > before ? begun - before : 0);
  tally[MISSING] = missing;
  tally[ENDED] = was[ENDED] + 1;
  tally[STARTED] = tally[VERDICTS] = was[ENDED] + 1 + missing;
  const auto add = [&](int word, int first) {  // read now: it is seldom needed
    if (tally[word]++ == 0 && first) tally[first] = call;
  };
  if (!judged) {
    add(UNJUDGED, FIRST_UNJUDGED);
  } else if (outcome == NOT_BOUNDED && !(flags & 2)) {
    add(UNBOUND, FIRST_UNBOUND);
  } else if (outcome == NOT_RESOLVED || (flags & 2)) {
    add(REFUSED, FIRST_REFUSED);
  } else if (outcome) {
    add(outcome == ALL_REPAIRED ? REPAIRED : CLEARED_REPLAYS, 0);
  }
  tally[ELEMENTS] = was[ELEMENTS] + wrong;
  if (judged && outcome == ALL_RIGHT) tally[LINES] = was[LINES] + lines;
  if (closest > was[LARGEST]) tally[LARGEST] = closest;
  tally[ALL_FLAGS] = was[ALL_FLAGS] | flags;
  tally[NUMBER] = call + 1;
}
