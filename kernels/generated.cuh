// Weights of a checksum, one column of them for each sum: read from memory, or made where they are used.
//
// Given as a macro, in front of this text: ACC, float or double.
#pragma once
#include "splitmix64.cuh"

enum Kind { READ, ONES, RAMP, BALANCED };

// sign (1 + h / 128), h = 0..64, sign and h from a hash of index and column. Eight significant bits: exact in every type.
INLINE ACC balanced(Bits seed, Index i, int q) {
  const Bits z = splitmix64(seed, Bits(i) + (Bits(q) << 48));
  const int h = int((z & 0x7fffffffu) * 65 >> 31);
  const ACC size = ACC(128 + h) / ACC(128);
  return z >> 63 ? -size : size;
}

// ((i + 1) / n)^q, as products of (i + 1) (1 / n): in float64 and rounded once.
INLINE ACC ramp(Index n, Index i, int q) {
  const double step = double(i + 1) * (1.0 / double(n));
  double x = 1;
  for (int c = 0; c < q; c++) x *= step;
  return ACC(x);
}

template <Kind KIND>
struct Weights {
  const ACC* at;       // element (i, q) is at[i rs + q cs], where it is read
  Index rs, cs;
  Index n, r;          // weights in a column, and columns
  Bits seed;
  const ACC* squares;  // weight of the square of element i: squares[i ss], where it is given; else that of the element,
  Index ss;            // in the first column, squared
  bool given;

  // Weight q of element i; zero outside.
  INLINE ACC operator()(Index i, int q) const {
    if (i >= n || q >= r) return ACC(0);
    if (KIND == READ) return at[i * rs + q * cs];
    if (KIND == BALANCED) return balanced(seed, i, q);
    return KIND == RAMP ? ramp(n, i, q) : ACC(1);
  }

  // Weight of its square.
  INLINE ACC square(Index i) const {
    const ACC w = KIND != READ && !given ? (*this)(i, 0) : i < n ? *(given ? squares + i * ss : at + i * rs) : ACC(0);
    return given ? w : w * w;
  }
};
