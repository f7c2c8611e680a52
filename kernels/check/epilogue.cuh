// What a check does with the sums of a line of X that TSM2R with one column of weights gives (tsm2r_rows.cu, tsm2r_columns.cu):
// statistics for a later verdict, or, where VERDICT is 1, the verdict itself.
//
// Macros   VERDICT 0 or 1; OUT the type of y and z; D_TYPE that of the copy of X; WORDS 0 or 1
// Storage  y, z, words of line i of product b at b out_step + i; guards, where given, at b p + i (state.cuh, `encoded`
//          the number of the call, as number_of takes it)
// State    flags in the high half of word 0: 1, some z_i > outstanding; 2, some words_i is not expected_i
// written  whether the kernel in front may have written X
// Sizes    sum |w| and smallest |w| of product b, from those of `part_count` groups of columns (equilibrate.cu), from
//          parts[2 b part_count] on; `parts` may be null
#pragma once
#include "check/verdict.cuh"
#include "check/chain.cuh"

#if VERDICT
#define EPILOGUE_ARGUMENTS VERDICT_ARGUMENTS, D_TYPE *cast, Index ldd, Index cast_step
#else
#define EPILOGUE_ARGUMENTS                                                                                            \
  OUT *y_out, OUT *z_out, Bits *words_out, Index out_step, double outstanding, Bits *state, Index written,            \
      const Bits *expected, const double *parts, Index part_count, double *sizes, Bits *guards, Bits encoded

// What the first block of a product does beside its lines, when the kernel in front has ended.
#define BEGIN_STATISTICS(first_of_product)                                                                            \
  do {                                                                                                                \
    if (!GIVEN && parts && (first_of_product) && threadIdx.x < 32)                                                    \
      add_sizes(parts + 2 * product * part_count, part_count, sizes + 2 * product);                                   \
  } while (0)

// y, z and words of a line, to where a later verdict finds them; `number` of the call, where there are guards.
#define STORE_STATISTICS(line, y, z, words, number)                                                                          \
  do {                                                                                                                \
    y_out[product * out_step + line] = OUT(y);                                                                        \
    z_out[product * out_step + line] = OUT(z);                                                                        \
    if (guards) {                                                                                                     \
      const Index own = product * p + line;                                                                           \
      guards[own] = guard_of(double(OUT(y)), double(OUT(z)), own, number);                                            \
    }                                                                                                                 \
    if (WORDS) words_out[product * out_step + line] = words;                                                          \
    /* A line this far above the others may have escaped the sample that columns were scaled by. */                   \
    if (double(z) > outstanding) atomicOr(reinterpret_cast<unsigned*>(state) + 1, 1u);                                \
    if (WORDS && expected && words != expected[product * out_step + line])                                            \
      atomicOr(reinterpret_cast<unsigned*>(state) + 1, 2u);                                                           \
  } while (0)
#endif
