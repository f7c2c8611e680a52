// Words of memory: elements that are read and written at once.
#pragma once
#include "tsm2/wide.cuh"

// The largest power of two that divides x, or `most`.
INLINE constexpr int divisor(int x, int most) { return x % most == 0 ? most : divisor(x, most / 2); }

template <int BYTES>
struct Bits;
template <>
struct Bits<16> {
  typedef uint4 Word;
};
template <>
struct Bits<8> {
  typedef uint2 Word;
};
template <>
struct Bits<4> {
  typedef unsigned Word;
};
template <>
struct Bits<2> {
  typedef unsigned short Word;
};

// Elements that are read and written as one word.
template <class T, int BYTES>
struct __align__(BYTES) Piece {
  T x[BYTES / sizeof(T)];
};

template <class P>
INLINE typename Bits<sizeof(P)>::Word word_of(const P& piece) {
  typename Bits<sizeof(P)>::Word word;
  memcpy(&word, &piece, sizeof(P));
  return word;
}

template <class P>
INLINE P piece_of(typename Bits<sizeof(P)>::Word word) {
  P piece;
  memcpy(&piece, &word, sizeof(P));
  return piece;
}

// To shared memory. Compilers break up some of the words that are made of elements, unless told.
template <class W>
INLINE void write(void* at, W word) {
#ifdef __CUDA_ARCH__
  const unsigned address = unsigned(__cvta_generic_to_shared(at));
  if constexpr (sizeof(W) == 16) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(word.x), "r"(word.y), "r"(word.z),
                 "r"(word.w)
                 : "memory");
    return;
  } else if constexpr (sizeof(W) == 8) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(word.x), "r"(word.y) : "memory");
    return;
  }
#endif
  *static_cast<W*>(at) = word;
}

#ifdef __CUDA_ARCH__
INLINE void renew(unsigned short& word) { asm volatile("" : "+h"(word)); }
INLINE void renew(unsigned& word) { asm volatile("" : "+r"(word)); }
INLINE void renew(uint2& word) { renew(word.x), renew(word.y); }
INLINE void renew(uint4& word) { renew(word.x), renew(word.y), renew(word.z), renew(word.w); }
#endif

// The same word, but a compiler takes it for a new one. What a loop converts from it is converted each time: kept for
// the next time instead, it would take more registers than the word does.
template <class W>
INLINE W again(W word) {
#ifdef __CUDA_ARCH__
  if (sizeof(A_TYPE) != sizeof(ACC)) renew(word);  // else nothing is converted
#endif
  return word;
}
