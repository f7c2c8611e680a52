// The real type, and moduli as unsigned integers: these are ordered as the moduli are, infinity above all numbers, NaN
// above infinity. What is compared so is no arithmetic: subnormal numbers count, whatever the compiler flushes.
//
// Macros   REAL float or double
#pragma once
#include "tsm2/index.cuh"

typedef REAL Real;

template <int SIZE>
struct Unsigned;
template <>
struct Unsigned<4> {
  typedef unsigned type;
};
template <>
struct Unsigned<8> {
  typedef unsigned long long type;
};
typedef Unsigned<sizeof(Real)>::type Word;

// The bits of |x|.
INLINE Word modulus(Real x) {
  Word bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits & (~Word(0) >> 1);
}

INLINE Real real_of(Word bits) {
  Real x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

INLINE Word larger(Word x, Word y) { return x > y ? x : y; }
