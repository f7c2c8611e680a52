// What the replays of a product in a graph have found so far, added up on the device: nobody reads the records of each.
//
// A tally is followed by the records of the last replays, as many as a power of two. Words of it:
//   NUMBER                         of the replay that runs, or of the next one; its kernels read it by number_of
//   VERDICTS                       replays whose first line was judged
//   RING                           how many records there are, less one
//   ENDED, UNJUDGED                replays that came to their end; of them those without a verdict on all lines
//   REPAIRED, CLEARED_REPLAYS, REFUSED  of the others, by outcome: the rest is clean
//   FIRST_UNJUDGED, FIRST_REFUSED  the number of the first of these, 0 for none
//   ELEMENTS, LINES                wrong elements; lines that failed in replays that were cleared
//   LARGEST                        of all `closest` of the state
//   ALL_FLAGS                       all that were raised: of passes; 2 where an operand changed
//   LOGGED                         faults in the log, which begins at ENTRIES_AT: number of the replay, place, found, now
#pragma once
#include "check/state.cuh"

enum TallyWord {
  NUMBER, VERDICTS, RING, ENDED, UNJUDGED, REPAIRED, CLEARED_REPLAYS, REFUSED, FIRST_UNJUDGED, FIRST_REFUSED, ELEMENTS,
  LINES, LARGEST, ALL_FLAGS, LOGGED, ENTRIES_AT = 16
};
constexpr Bits TALLY_LOG = 256;
constexpr int TALLY_WORDS = ENTRIES_AT + 4 * int(TALLY_LOG), RECORD_WORDS = 160;

// Where the record of a replay goes, the ring beginning at `records`.
INLINE Bits* record_of(const Bits* tally, Bits call, Bits* records) {
  return tally != nullptr ? records + RECORD_WORDS * (call & tally[RING]) : records;
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
  tally[ENDED]++;
  const bool refused = outcome == 2 || (flags & 2);
  if (!judged) {
    if (tally[UNJUDGED]++ == 0) tally[FIRST_UNJUDGED] = call;
  } else if (refused) {
    if (tally[REFUSED]++ == 0) tally[FIRST_REFUSED] = call;
  } else if (outcome) {
    tally[outcome == 1 ? REPAIRED : CLEARED_REPLAYS]++;
  }
  tally[ELEMENTS] += wrong;
  if (judged && !refused && outcome == 3) tally[LINES] += lines;
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
