// Numbers that look random, each from its place: SplitMix64 (G. L. Steele, D. Lea, C. H. Flood, Fast splittable
// pseudorandom number generators, OOPSLA 2014). abft_tsm2/core/generated.py has the same for NumPy.
#pragma once
#include "tsm2/index.cuh"

typedef unsigned long long Bits;

// Number i of those that begin with `seed`.
INLINE Bits splitmix64(Bits seed, Bits i) {
  Bits z = seed + i * 0x9E3779B97F4A7C15ull;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}
