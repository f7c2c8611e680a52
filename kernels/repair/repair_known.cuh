// Stage 13 of repair.cu: whether all that a repair has read is still what was encoded.
//
// Elements are computed from L, R and C0 after these were compared with their sums of bits, and so are compared once more
// behind that: what changed in between would have gone into C, and into no residual where a line was not flagged. Only
// where something was replaced.
#pragma once
#include "repair/repair_locate.cuh"

// Lines of L and of C0: all of a product of which columns were completed, and the flagged ones.
INLINE Index lines_known(const Problem& p) {
  if (p.left_words == nullptr) return 0;
  return lines_of_products(p) + (p.mass ? p.failing : p.flagged);
}
INLINE Index items_known(const Problem& p) {
  if (!p.replaced()) return 0;
  return lines_known(p) + (p.right_words != nullptr ? p.passes() * p.stripes * p.slabs : 0);
}

// Elements that a thread has on their way from memory at a time: so many that memory is never idle.
constexpr int IN_FLIGHT = TUNED ? 32 : 8;

// The bits of ROWS x COLUMNS elements from `at` on, `down` and `across` from one to the next, of which the first so many are
// there (WHOLE: all). What is beyond is read elsewhere and counts nothing: a load that waits for no branch is in flight
// with the others.
template <bool WHOLE, int ROWS, int COLUMNS, class T>
INLINE void add_bits(Bits (&sums)[ROWS], const T* at, Index down, Index across, Index rows, Index columns) {
  Bits bits[ROWS][COLUMNS];
#pragma unroll
  for (int a = 0; a < ROWS; a++) {
    const T* row = at + (WHOLE ? Index(a) : smaller(a, rows - 1)) * down;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) bits[a][c] = fresh_bits(row + (WHOLE ? Index(c) : smaller(c, columns - 1)) * across);
  }
#pragma unroll
  for (int a = 0; a < ROWS; a++)
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) sums[a] += WHOLE || (a < rows && c < columns) ? bits[a][c] : 0;
}

// Whether the bits of `count` elements, `apart` from one to the next, add up to `words`; by a block.
template <class T>
INLINE void compare_line(const Problem& p, const T* at, Index count, Index apart, Bits words, Bits* word_sums) {
  Bits sum[1] = {0};
#pragma unroll 1
  for (Index l = threadIdx.x; l < count; l += IN_FLIGHT * T1)
    add_bits<false, 1, IN_FLIGHT>(sum, at + l * apart, 0, T1 * apart, 1, pieces(count - l, T1));
  const Bits found = over_block(sum[0], word_sums);
  if (threadIdx.x == 0 && found != words) atomicAdd(p.state + CHANGED_AFTER, 1ull);
}

// 0 = sum_l multiplier(l) (bits of R(l, :) - what they were) over all items of a product, as in stage 5. Neighbouring
// threads read what is contiguous.
INLINE void compare_right(const Problem& p, Index item, int pass, Bits* word_sums) {
  const Index slab = item / p.stripes, stripe = item % p.stripes, product = p.product(p.passes() > 1 ? pass : 0);
  const Index begin = slab * p.depth, end = smaller(begin + p.depth, p.k);
  const Index left = stripe * STRIPE, right = smaller(left + STRIPE, p.n);
  const A_TYPE* R = p.R + product * p.r_step;
  // A thread's rows and columns at a time, and how far apart they are.
  constexpr int COLUMNS = TURNED || IN_FLIGHT < STRIPE / 32 ? IN_FLIGHT : STRIPE / 32, ROWS = IN_FLIGHT / COLUMNS;
  constexpr int DOWN = TURNED ? T1 : WARPS, ACROSS = TURNED ? 1 : 32;
  const int row = TURNED ? threadIdx.x : threadIdx.x / 32, column = TURNED ? 0 : threadIdx.x % 32;
  Bits word = 0;
#pragma unroll 1
  for (Index l = begin + row; l < end; l += ROWS * DOWN) {
    const Index rows = pieces(end - l, DOWN);
    Bits sums[ROWS] = {};
#pragma unroll 1
    for (Index j = left + column; j < right; j += COLUMNS * ACROSS) {
      const A_TYPE* at = R + l * p.r_rs + j * p.r_cs;
      const Index columns = pieces(right - j, ACROSS);
      if (rows >= ROWS && columns >= COLUMNS)
        add_bits<true, ROWS, COLUMNS>(sums, at, DOWN * p.r_rs, ACROSS * p.r_cs, ROWS, COLUMNS);
      else
        add_bits<false, ROWS, COLUMNS>(sums, at, DOWN * p.r_rs, ACROSS * p.r_cs, rows, columns);
    }
#pragma unroll
    for (int a = 0; a < ROWS; a++) word += multiplier(l + a * DOWN, pass) * sums[a];  // 0 of rows that are not there
  }
  const Index told_by = stripe == 0 ? end : begin;  // what rows were is subtracted once
#pragma unroll 1
  for (Index l = begin + threadIdx.x; l < told_by; l += T1)
    word -= multiplier(l, pass) * p.right_words[product * p.w_step + l];
  word = over_block(word, word_sums);
  if (threadIdx.x == 0) atomicAdd(p.state + RIGHT_AFTER, word);
}

INLINE void compare_known(const Problem* problem, Index item, Bits* word_sums) {
  const Problem& p = problem[0];
  const Index lines = lines_known(p), whole = lines_of_products(p);
  if (item >= lines) {
    const Index each = p.stripes * p.slabs, number = item - lines;
    return compare_right(p, number % each, int(number / each), word_sums);
  }
  const Index place = item - whole;
  const Index line = place < 0 ? line_of_products(p, item) : (p.mass ? Index(p.listed[place]) : p.line(int(place)));
  compare_line(p, p.left(line), p.k, p.l_cs, p.left_words[line], word_sums);
  if (p.added_words != nullptr) compare_line(p, p.added(line, 0), p.n, p.c0_cs, p.added_words[line], word_sums);
}
