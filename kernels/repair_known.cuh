// Stage 13 of repair.cu: whether all that a repair has read is still what was encoded.
//
// Elements are computed from L, R and C0 after these were compared with their sums of bits, and so are compared once more
// behind that: what changed in between would have gone into C, and into no residual where a line was not flagged. Only
// where something was replaced.
#pragma once
#include "repair_locate.cuh"

// Lines of L and of C0: all of a product of which columns were completed, and the flagged ones.
INLINE Index lines_of_products(const Problem& p) {
  return __ldcg(p.state + COMPLETED) ? (p.batch > 1 ? p.groups : 1) * p.m : 0;
}
INLINE Index lines_known(const Problem& p) {
  if (p.left_words == nullptr) return 0;
  return lines_of_products(p) + (p.mass ? p.failing : p.flagged);
}
INLINE Index items_known(const Problem& p) {
  if (!p.replaced()) return 0;
  return lines_known(p) + (p.right_words != nullptr ? p.passes() * p.stripes * p.slabs : 0);
}

// Elements that a thread has on their way from memory. What is beyond the end is read elsewhere and counts nothing: a
// load that waits for no branch is in flight with the others.
constexpr int IN_FLIGHT = TUNED ? 32 : 8;

// Whether the bits of `count` elements, `apart` from one to the next, add up to `words`; by a block.
template <class T>
INLINE void compare_line(const Problem& p, const T* at, Index count, Index apart, Bits words, Bits* word_sums) {
  Bits sum = 0;
#pragma unroll 1
  for (Index l = threadIdx.x; l < count; l += IN_FLIGHT * T1) {
    Bits bits[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) bits[i] = fresh_bits(at + smaller(l + i * T1, count - 1) * apart);
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) sum += l + i * T1 < count ? bits[i] : 0;
  }
  sum = over_block(sum, word_sums);
  if (threadIdx.x == 0 && sum != words) atomicAdd(p.state + CHANGED_AFTER, 1ull);
}

// 0 = sum_l multiplier(l) (bits of R(l, :) - what they were) over all items of a product, as in stage 5. Neighbouring
// threads read what is contiguous.
INLINE void compare_right(const Problem& p, Index item, int pass, Bits* word_sums) {
  const Index slab = item / p.stripes, stripe = item % p.stripes, product = p.product(p.passes() > 1 ? pass : 0);
  const Index begin = slab * p.depth, end = smaller(begin + p.depth, p.k);
  const Index left = stripe * STRIPE, right = smaller(left + STRIPE, p.n);
  const A_TYPE* R = p.R + product * p.r_step;
  // A thread's rows and columns at a time, and how far apart they are.
  constexpr int ACROSS = TURNED || IN_FLIGHT < STRIPE / 32 ? IN_FLIGHT : STRIPE / 32, ROWS = IN_FLIGHT / ACROSS;
  constexpr int NEXT_ROW = TURNED ? T1 : WARPS, NEXT_COLUMN = TURNED ? 1 : 32;
  const int row = TURNED ? threadIdx.x : threadIdx.x / 32, column = TURNED ? 0 : threadIdx.x % 32;
  Bits word = 0;
#pragma unroll 1
  for (Index l = begin + row; l < end; l += ROWS * NEXT_ROW)
#pragma unroll 1
    for (Index j = left + column; j < right; j += ACROSS * NEXT_COLUMN) {
      Bits bits[ROWS][ACROSS];
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; i++)
        bits[i / ACROSS][i % ACROSS] = fresh_bits(R + smaller(l + i / ACROSS * NEXT_ROW, end - 1) * p.r_rs +
                                                  smaller(j + i % ACROSS * NEXT_COLUMN, right - 1) * p.r_cs);
#pragma unroll
      for (int a = 0; a < ROWS; a++) {
        Bits sum = 0;
#pragma unroll
        for (int c = 0; c < ACROSS; c++) sum += j + c * NEXT_COLUMN < right ? bits[a][c] : 0;
        if (l + a * NEXT_ROW < end) word += multiplier(l + a * NEXT_ROW, pass) * sum;
      }
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
  const Index line = place < 0 ? p.product(p.batch > 1 ? int(item / p.m) : 0) * p.m + item % p.m
                               : (p.mass ? Index(p.listed[place]) : p.line(int(place)));
  compare_line(p, p.left(line), p.k, p.l_cs, p.left_words[line], word_sums);
  if (p.added_words != nullptr) compare_line(p, p.added(line, 0), p.n, p.c0_cs, p.added_words[line], word_sums);
}
