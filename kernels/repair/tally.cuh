// What the replays of a product in a graph have found so far, added up on the device: nobody reads the records of each.
//
// A tally is followed by the records of the last replays, as many as a power of two. Words of it:
//   NUMBER                         of the replay that runs, or of the next one; its kernels read it by number_of
//   STARTED, VERDICTS              replays whose first line was expected, and judged (state.cuh)
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

// The verdict of a replay, and the number of the next one; by one thread. Replays of a graph follow one another.
INLINE void add_replay(Bits* tally, Bits call, bool judged, Bits outcome, Bits wrong, Bits lines, Bits closest,
                       Bits flags) {
  // Those in front of this one that have begun and not ended. What has not begun cannot have a verdict.
  const Bits before = tally[ENDED] + tally[MISSING] + 1;
  const Bits begun = tally[STARTED] > tally[VERDICTS] ? tally[STARTED] : tally[VERDICTS];
  if (begun > before) tally[MISSING] += begun - before;
  tally[ENDED]++;
  tally[STARTED] = tally[VERDICTS] = tally[ENDED] + tally[MISSING];
  if (!judged) {
    if (tally[UNJUDGED]++ == 0) tally[FIRST_UNJUDGED] = call;
  } else if (outcome == NOT_BOUNDED && !(flags & 2)) {
    if (tally[UNBOUND]++ == 0) tally[FIRST_UNBOUND] = call;
  } else if (outcome == NOT_RESOLVED || (flags & 2)) {
    if (tally[REFUSED]++ == 0) tally[FIRST_REFUSED] = call;
  } else if (outcome) {
    tally[outcome == ALL_REPAIRED ? REPAIRED : CLEARED_REPLAYS]++;
  }
  tally[ELEMENTS] += wrong;
  if (judged && outcome == ALL_RIGHT) tally[LINES] += lines;
  if (closest > tally[LARGEST]) tally[LARGEST] = closest;
  tally[ALL_FLAGS] |= flags;
  tally[NUMBER] = call + 1;
}

// The same, by the record of a verdict on so many lines.
INLINE void add_record(Bits* tally, const Bits* record, Index lines) {
  const Bits call = record[0], flagged = record[1], raised = record[7];
  const bool judged = raised >> 8 == call && flagged >> 32 == Bits(lines);
  add_replay(tally, call, judged, record[2], record[6], flagged & 0xffffffffu, record[3], raised & 0xff);
}
