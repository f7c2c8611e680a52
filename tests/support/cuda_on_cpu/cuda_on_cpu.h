// CUDA C++ as the kernels of this repository use it, for g++: each thread of a block is a fiber, blocks run one after
// the other, and shared memory is watched element by element. build.py translates the declarations of shared arrays
// and puts this header in front of a kernel's text; runtime.cpp holds what need not be inlined.
//
// Watched     shared arrays: bounds, elements read before any thread wrote them, races (two threads, one element, at
//             least one writes, no barrier between them), stores of uninitialised registers
//             barriers and shuffles: who meets whom, at which line, with which mask
// Unwatched   shared memory through raw pointers (&array[i], for 16-byte loads): it is poisoned with NaN for every block
//             and lies between red zones, which are compared when the block ends, or trapped by AddressSanitizer
// Left out    clusters, textures, cooperative groups, spinning on what another block will write
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

#define CUDA_ON_CPU_VECTOR_2(name, T)      \
  struct alignas(2 * sizeof(T)) name {     \
    T x, y;                                \
  };                                       \
  inline name make_##name(T x, T y) { return {x, y}; }
#define CUDA_ON_CPU_VECTOR_4(name, T)      \
  struct alignas(16) name {                \
    T x, y, z, w;                          \
  };                                       \
  inline name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }

CUDA_ON_CPU_VECTOR_2(float2, float)
CUDA_ON_CPU_VECTOR_2(double2, double)
CUDA_ON_CPU_VECTOR_2(int2, int)
CUDA_ON_CPU_VECTOR_2(uint2, unsigned)
CUDA_ON_CPU_VECTOR_4(float4, float)
CUDA_ON_CPU_VECTOR_4(int4, int)
CUDA_ON_CPU_VECTOR_4(uint4, unsigned)

namespace cuda_on_cpu {

constexpr unsigned warp_size = 32, most_threads = 1024, nobody = ~0u;

// A place in a kernel's text, as #line has it.
struct Site {
  const char* file;
  int line;
};

enum class State : unsigned char { ready, at_block_barrier, at_warp_barrier, ended };

struct Thread {
  uint3 index;
  unsigned number, lane;  // in the block, in the warp
  State state;
  const char* operation;  // where it waits or last waited: the intrinsic, its place and its mask
  Site site;
  unsigned mask;
  unsigned source;  // of a shuffle: the lane whose value it takes
  alignas(16) unsigned char given[16], taken[16];
  // Up to which time of the warp's clock this thread has synchronised with each lane: a vector clock.
  std::uint32_t known[warp_size];
};

struct Block {
  uint3 index;
  dim3 size, grid;
  // Barriers of blocks since the program began, never reset, so that old records need no erasing.
  std::uint32_t epoch, first_epoch;
  std::uint32_t clock[most_threads / warp_size];  // warp barriers of each warp since the block began
};

extern Thread* current;
extern Block block;

// Who last wrote and read an element (or two bytes of dynamic shared memory). Epochs before the block's are void.
struct Cell {
  std::uint32_t written_epoch, written_clock;
  std::uint32_t read_epoch, read_clock;
  std::uint32_t settled_epoch;  // in which more reads add nothing: two warps have read, none has written
  std::uint32_t read_lanes;     // of the first reader's warp
  std::uint16_t writer, reader, other_reader;  // the last one is of another warp; the reader itself where there is none
  bool atomic;
};

// One shared array of a kernel, and where it lies in the present block.
struct Declaration {
  const char* name;
  Site site;
  std::uint32_t valid_from = 0;  // the first epoch of the block that `data` belongs to
  char* data = nullptr;
  Cell* cells = nullptr;
  std::size_t bytes = 0;
  unsigned element = 0, cells_per_element = 0;
};

void lay_out_static(Declaration&, std::size_t bytes, unsigned element);
void lay_out_dynamic(Declaration&, unsigned element);
[[noreturn]] void outside(const Declaration&, long long index);
void note_read(const Declaration&, Cell&, const void* at);
void note_write(const Declaration&, Cell&, const void* at, bool atomic);
[[noreturn]] void uninitialised_register(const Declaration&, const void* at);
void note_atomic(const void* at, unsigned size);
void block_barrier(Site);
void warp_barrier(const char* operation, unsigned mask, Site);
[[noreturn]] void bad_width(const char* operation, int width, Site);

// What -ftrivial-auto-var-init=pattern puts into every variable: no number a product of real data gives.
template <class T>
bool is_register_pattern(const T& value) {
  if (sizeof(T) < 4) return false;
  unsigned char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  for (unsigned char byte : bytes)
    if (byte != 0xFE) return false;
  return true;
}

// array[i]: what is read and written through it is noted. It converts only as a temporary, so that `auto x = array[i]`,
// which would read late, does not compile.
template <class T>
class Element {
 public:
  Element(const Declaration* declaration, T* at, Cell* cells) : declaration_(declaration), at_(at), cells_(cells) {}
  Element(const Element&) = delete;

  operator T() && { return read(); }
  T operator=(T value) && { return write(value); }
  T operator=(Element&& other) && { return write(other.read()); }
  template <class U>
  T operator+=(U&& value) && {
    return write(read() + std::forward<U>(value));
  }
  template <class U>
  T operator-=(U&& value) && {
    return write(read() - std::forward<U>(value));
  }
  template <class U>
  T operator*=(U&& value) && {
    return write(read() * std::forward<U>(value));
  }
  T* operator&() && { return at_; }  // raw: nothing is noted from here on

 private:
  T read() {
    const unsigned count = declaration_->cells_per_element;
    for (unsigned i = 0; i < count; i++)
      if (cells_[i].settled_epoch != block.epoch) note_read(*declaration_, cells_[i], at_);
    return *at_;
  }
  T write(T value) {
    if (is_register_pattern(value)) uninitialised_register(*declaration_, at_);
    const unsigned count = declaration_->cells_per_element;
    for (unsigned i = 0; i < count; i++) note_write(*declaration_, cells_[i], at_, false);
    return *at_ = value;
  }

  const Declaration* declaration_;
  T* at_;
  Cell* cells_;
};

// A shared array, or what is left of one from some element on (array + i). It does not turn into a raw pointer by
// itself, since all checks would end there: a parameter of a function takes it under the array's own name.
template <class T>
class SharedArray {
 public:
  SharedArray(const Declaration* declaration, long long first)
      : declaration_(declaration),
        data_(reinterpret_cast<T*>(declaration->data)),
        cells_(declaration->cells),
        count_(declaration->bytes / sizeof(T)),
        first_(first) {}

  template <class I, class = std::enable_if_t<std::is_integral_v<I>>>
  Element<T> operator[](I index) const {
    const long long i = first_ + static_cast<long long>(index);
    if (static_cast<unsigned long long>(i) >= count_) outside(*declaration_, i);
    return {declaration_, data_ + i, cells_ + i * declaration_->cells_per_element};
  }
  template <class I, class = std::enable_if_t<std::is_integral_v<I>>>
  SharedArray operator+(I offset) const {
    return {declaration_, first_ + static_cast<long long>(offset)};
  }

 private:
  const Declaration* declaration_;
  T* data_;
  Cell* cells_;
  unsigned long long count_;
  long long first_;
};

template <class T, std::size_t count>
SharedArray<T> static_array(Declaration& declaration) {
  static_assert(count > 0, "a shared array of no elements");
  if (declaration.valid_from != block.first_epoch) lay_out_static(declaration, count * sizeof(T), sizeof(T));
  return {&declaration, 0};
}

template <class T>
SharedArray<T> dynamic_array(Declaration& declaration) {
  static_assert(sizeof(T) % 2 == 0, "dynamic shared memory is watched in steps of two bytes");
  if (declaration.valid_from != block.first_epoch) lay_out_dynamic(declaration, sizeof(T));
  return {&declaration, 0};
}

// Values travel through slots of 16 bytes; a lane that does not take part gives NaN (of integers: a wild number).
template <class T>
T shuffle(const char* operation, unsigned mask, T value, unsigned source, Site site) {
  static_assert(sizeof(T) <= 16 && std::is_trivially_copyable_v<T>, "a shuffle moves at most 16 bytes");
  std::memcpy(current->given, &value, sizeof(T));
  current->source = source;
  warp_barrier(operation, mask, site);
  std::memcpy(&value, current->taken, sizeof(T));
  return value;
}

// First lane of the segment of `width` lanes that the calling lane is in.
inline unsigned segment(const char* operation, int width, Site site) {
  if (width < 1 || width > 32 || (width & (width - 1))) bad_width(operation, width, site);
  return current->lane & ~(unsigned(width) - 1);
}

// The kernel's parameters, a letter each, so that the caller's arguments can be compared with them.
template <class P>
constexpr char letter() {
  static_assert(std::is_pointer_v<P> || std::is_arithmetic_v<P>, "kernels take pointers and numbers");
  if (std::is_pointer_v<P>) return 'p';
  if (std::is_same_v<P, float>) return 'f';
  if (std::is_same_v<P, double>) return 'd';
  return sizeof(P) == 8 ? 'q' : sizeof(P) == 4 ? 'i' : '?';
}

// A kernel with its arguments unpacked from an array of pointers to values, as cuLaunchKernel takes them.
template <auto kernel>
struct Entry;

template <class... P, void (*kernel)(P...)>
struct Entry<kernel> {
  static constexpr char signature[] = {letter<P>()..., 0};

  static void call(void** arguments) { unpack(arguments, std::index_sequence_for<P...>()); }

 private:
  template <std::size_t... i>
  static void unpack([[maybe_unused]] void** arguments, std::index_sequence<i...>) {
    kernel(*static_cast<std::remove_cv_t<P>*>(arguments[i])...);
  }
};

}  // namespace cuda_on_cpu

#define CUDA_ON_CPU_HERE ::cuda_on_cpu::Site{file, line}
#define CUDA_ON_CPU_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define threadIdx (::cuda_on_cpu::current->index)
#define blockIdx (::cuda_on_cpu::block.index)
#define blockDim (::cuda_on_cpu::block.size)
#define gridDim (::cuda_on_cpu::block.grid)
constexpr int warpSize = 32;

inline void __syncthreads(CUDA_ON_CPU_SITE) { ::cuda_on_cpu::block_barrier(CUDA_ON_CPU_HERE); }
inline void __syncwarp(unsigned mask = ~0u, CUDA_ON_CPU_SITE) {
  ::cuda_on_cpu::warp_barrier("__syncwarp", mask, CUDA_ON_CPU_HERE);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, CUDA_ON_CPU_SITE) {
  const unsigned first = cuda_on_cpu::segment("__shfl_sync", width, CUDA_ON_CPU_HERE);
  return cuda_on_cpu::shuffle("__shfl_sync", mask, value, first + (unsigned(lane) & (width - 1)), CUDA_ON_CPU_HERE);
}
// Beyond its segment, a lane keeps its own value.
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_ON_CPU_SITE) {
  const unsigned first = cuda_on_cpu::segment("__shfl_up_sync", width, CUDA_ON_CPU_HERE);
  const unsigned lane = cuda_on_cpu::current->lane;
  const unsigned source = lane - first >= delta ? lane - delta : lane;
  return cuda_on_cpu::shuffle("__shfl_up_sync", mask, value, source, CUDA_ON_CPU_HERE);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_ON_CPU_SITE) {
  const unsigned first = cuda_on_cpu::segment("__shfl_down_sync", width, CUDA_ON_CPU_HERE);
  const unsigned lane = cuda_on_cpu::current->lane;
  const unsigned source = lane - first + delta < unsigned(width) ? lane + delta : lane;
  return cuda_on_cpu::shuffle("__shfl_down_sync", mask, value, source, CUDA_ON_CPU_HERE);
}
// Earlier segments may be read, later ones not.
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, CUDA_ON_CPU_SITE) {
  const unsigned first = cuda_on_cpu::segment("__shfl_xor_sync", width, CUDA_ON_CPU_HERE);
  const unsigned lane = cuda_on_cpu::current->lane, source = lane ^ unsigned(lanes);
  return cuda_on_cpu::shuffle("__shfl_xor_sync", mask, value, source < first + width ? source : lane, CUDA_ON_CPU_HERE);
}

// Blocks run one after the other and threads one at a time: what is written is seen.
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

template <class T>
T atomicAdd(T* at, T value) {
  ::cuda_on_cpu::note_atomic(at, sizeof(T));
  const T before = *at;
  *at = before + value;
  return before;
}

// Counts up to `most`, then starts again from 0.
inline unsigned atomicInc(unsigned* at, unsigned most) {
  ::cuda_on_cpu::note_atomic(at, sizeof(*at));
  const unsigned before = *at;
  *at = before >= most ? 0 : before + 1;
  return before;
}

template <class T>
T atomicMax(T* at, T value) {
  ::cuda_on_cpu::note_atomic(at, sizeof(T));
  const T before = *at;
  *at = before < value ? value : before;
  return before;
}
template <class T>
T atomicOr(T* at, T value) {
  ::cuda_on_cpu::note_atomic(at, sizeof(T));
  const T before = *at;
  *at = before | value;
  return before;
}

template <class T>
T __ldg(const T* at) {
  return *at;
}
template <class T>
T __ldcg(const T* at) {
  return *at;
}
template <class T>
void __stcg(T* at, T value) {
  *at = value;
}
template <class T>
T __ldcs(const T* at) {
  return *at;
}
template <class T>
void __stcs(T* at, T value) {
  *at = value;
}

// CUDA has overloads for each pair of types; integers of different width meet in the wider one.
template <class X, class Y>
auto min(X&& x, Y&& y) {
  using T = std::common_type_t<X, Y>;
  const T a = std::forward<X>(x), b = std::forward<Y>(y);
  return b < a ? b : a;
}
template <class X, class Y>
auto max(X&& x, Y&& y) {
  using T = std::common_type_t<X, Y>;
  const T a = std::forward<X>(x), b = std::forward<Y>(y);
  return a < b ? b : a;
}

using std::fma;
