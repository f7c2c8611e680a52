// Whether a matrix has the bits that were encoded: the ordered sums of its lines in memory, which see order
// (abft_tsm2/core/ordered_sums.py has them), compared with those that it had, or kept.
//
//   sum(w, i) = sum over j of a_j x(i, j, w) modulo 2^64, x(., ., w) being the words of 32 bits of an element, or its 16
//
// A warp takes PIECE elements of a line; of a line that is longer, the last warp adds up what all of them have.
//
// Launch   ceil(lines pieces / (T1 / 32)) blocks of T1 threads, pieces = max(1, ceil(length / PIECE))
// Macros   T1 threads; ELEMENT_BYTES 2, 4 or 8; PIECE elements, a multiple of 32; KEEPS whether the sums are kept, and
//          COUNTS whether lines that have them are counted; ENTRY the name of the kernel
// Storage  element j of line i at X[i apart + j]; expected[w lines + i], written where KEEPS; parts: WORDS for each piece
//          of each line, and tickets: one for each line, 0 before and after, where a line has several pieces
// State    word 0: 2 of the flags in its high half, where a line has another sum; where COUNTS, the lines that have it
#include "check/chain.cuh"
#include "check/state.cuh"

#if ELEMENT_BYTES == 8
typedef Bits Element;
#elif ELEMENT_BYTES == 4
typedef unsigned Element;
#else
typedef unsigned short Element;
#endif

constexpr int WORDS = ELEMENT_BYTES == 8 ? 2 : 1, AHEAD = 8;
constexpr unsigned LONGEST = 1u << 30;

// As `multipliers` of abft_tsm2/core/ordered_sums.py.
INLINE Bits multiplier(Index j) {
  unsigned x = (unsigned(j) + 0x1b873593u) % LONGEST;
  x = x * 0x2c1b3c6du % LONGEST, x ^= x >> 15;
  x = x * 0x297a2d39u % LONGEST, x ^= x >> 15;
  x = x * 0x3c6ef373u % LONGEST, x ^= x >> 15;
  return 2 * x + 1;
}

INLINE void add(Bits (&sums)[WORDS], Index j, Element x) {
  const Bits a = multiplier(j);
  sums[0] += a * (Bits(x) & 0xffffffffu);
#if ELEMENT_BYTES == 8
  sums[1] += a * (x >> 32);
#endif
}

INLINE void over_lanes(Bits (&sums)[WORDS]) {
#pragma unroll
  for (int w = 0; w < WORDS; w++)
#pragma unroll
    for (int bit = 16; bit; bit /= 2) sums[w] += __shfl_xor_sync(~0u, sums[w], bit);
}

extern "C" __global__ void __launch_bounds__(T1)
    ENTRY(Index lines, Index length, const Element* X, Index apart, Index pieces, Bits* expected, Bits* parts,
          unsigned* tickets, Bits* state) {
  after_previous();
  next_may_begin();
  const int lane = threadIdx.x % 32;
  const Index item = Index(blockIdx.x) * (T1 / 32) + threadIdx.x / 32, line = item / pieces, piece = item % pieces;
  if (line >= lines) return;
  const Element* at = X + line * apart;
  const Index end = smaller(length, (piece + 1) * PIECE);
  Bits sums[WORDS] = {};
#pragma unroll 1
  for (Index j = piece * PIECE + lane; j < end; j += 32 * AHEAD) {
    Element x[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) x[i] = j + 32 * i < end ? __ldcs(at + j + 32 * i) : Element(0);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) add(sums, j + 32 * i, x[i]);
  }
  over_lanes(sums);
  if (pieces > 1) {
    Bits* own = parts + line * pieces * WORDS;
    unsigned ticket = 0;
    if (lane == 0) {
#pragma unroll
      for (int w = 0; w < WORDS; w++) __stcg(own + piece * WORDS + w, sums[w]);
      __threadfence();
      ticket = atomicAdd(tickets + line, 1u);
    }
    if (__shfl_sync(~0u, ticket, 0) != unsigned(pieces - 1)) return;
    __threadfence();
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      sums[w] = 0;
      for (Index i = lane; i < pieces; i += 32) sums[w] += __ldcg(own + i * WORDS + w);
    }
    over_lanes(sums);
    if (lane == 0) tickets[line] = 0;
  }
  if (lane > 0) return;
#if KEEPS
#pragma unroll
  for (int w = 0; w < WORDS; w++) expected[w * lines + line] = sums[w];
#else
  bool same = true;
#pragma unroll
  for (int w = 0; w < WORDS; w++) same = same && sums[w] == expected[w * lines + line];
#if COUNTS
  if (same) atomicAdd(state, 1ull);
#else
  if (!same) atomicOr(reinterpret_cast<unsigned*>(state) + 1, 2u);
#endif
#endif
}
