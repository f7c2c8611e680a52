// What the kernels of one product leave for one another: the words of its state, and guards of what must hold of lines.
#pragma once
#include "tsm2/sums.cuh"

// Words of `state`. FLAGGED: how many lines fail, in its low half, and flags of passes; CLOSEST: of the others the largest
// residual / tau, and its line; CALL, JUDGED: which call's verdict this is, and on how many lines; UNBOUNDED: how many
// fail whose bound is not finite. The others belong to
// repair.cu. CHANGED_BEFORE, ENTRIES, REMAINING: of stages 0 to 2; HIT, COMPLETED: columns, of stages 9 and 10;
// CHANGED_AFTER, RIGHT_AFTER: of stage 13; CLEARED: lines that fail although nothing in them is wrong.
enum State {
  FLAGGED, CLOSEST, TICKETS, DONE, CHANGED, RIGHT_WORDS, WRONG, UNRESOLVED, CHANGED_BEFORE, ENTRIES, REMAINING, HIT, COMPLETED,
  CLEARED, CHANGED_AFTER, RIGHT_AFTER, CALL, JUDGED, UNBOUNDED
};

// Bounds below that verify nothing: sums of 2^15 terms may lose as much to underflow.
constexpr double FAINTEST = 0x1p-1060;

// Where replays of a product in a graph are counted (repair/tally.cuh): a call has this address for a number, with the
// topmost bit set. Null for a call that has a number.
INLINE Bits* tally_of(Bits given) { return given >> 63 ? reinterpret_cast<Bits*>(given << 1 >> 1) : nullptr; }

constexpr int STARTED_AT = 1, VERDICTS_AT = 2;

// Counts a replay there; by one thread, which waits for nothing.
INLINE void count_replay(Bits given, int word) {
  if (Bits* tally = tally_of(given)) atomicAdd(tally + word, 1ull);
}

// What the first kernel of a product does, by a warp: it wipes the state, and counts the replay.
INLINE void begin_product(Bits* state, Bits encoded) {
  state[threadIdx.x] = 0;
  if (threadIdx.x == 0) count_replay(encoded, STARTED_AT);
}

// The number of a call, or of the replay that runs.
INLINE Bits number_of(Bits given) { return given >> 63 ? *tally_of(given) : given; }

// A copy of two sums of a line that shows when they were lost together with C: they are kept apart from it, and mixed with
// the line and the number of the call, so that neither zeros nor what an earlier call left fit.
INLINE Bits guard_of(double sum, double squares, Index line, Bits encoded) {
  const Bits bits = pattern(squares);
  return (pattern(sum) ^ (bits << 32 | bits >> 32)) + ((encoded << 32) + Bits(line) + 1) * 0x9E3779B97F4A7C15ull;
}

// The first of two sums that a guard is of; NaN, which nothing agrees with, where they are not what they were.
INLINE double guarded(double sum, double squares, Index line, Bits encoded, Bits guard) {
  return guard_of(sum, squares, line, encoded) == guard ? sum : double(from_bits(0x7fc00000u));
}
