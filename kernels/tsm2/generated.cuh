// Weights of a checksum, one column of them for each sum: read from memory, or made where they are used.
//
// Given as a macro, in front of this text: ACC, float or double.
#pragma once
#include "tsm2/splitmix64.cuh"

enum Kind { READ, ONES, RAMP, BALANCED };

// sign (1 + g 2^-23), the sign from a hash of index and column; g, of 22 bits, a bijection of i modulo 2^22 with keys from
// the column, made of odd factors and shifts, all modulo 2^22: up to 2^22 indices have pairwise different magnitudes. On
// the grid of float32, so that they are the same in both types.
INLINE ACC balanced(Bits seed, Index i, int q) {
  constexpr unsigned MOST = (1u << 22) - 1;
  const Bits column = Bits(q) << 48, z = splitmix64(seed, Bits(i) + column), keys = splitmix64(~seed, column);
  unsigned g = unsigned(i) + unsigned(keys) & MOST;
  g = (g ^ g >> 11) * 0x2c1b3c6du & MOST;
  g = (g ^ g >> 9 ^ unsigned(keys >> 32)) * 0x297a2d39u & MOST;
  g ^= g >> 11;
  const ACC size = ACC(1) + ACC(g) * ACC(0x1p-23);
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
