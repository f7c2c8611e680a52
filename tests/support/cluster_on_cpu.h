// CUDA C++ of a kernel that is one cluster of blocks, for g++: all threads of all blocks are fibers, which run in an
// order that the seed draws; messages between blocks are in flight for as long as it draws. Stands for
// kernels/factor/cluster.cuh, and for what the kernel uses of CUDA; tests/support/cluster_on_cpu.py puts it there.
//
// Watched     deadlocks, with who waits where; barriers and exchanges of a warp that meet at different lines; mbarriers
//             used before they are initialized, expected twice in a phase, left with bytes that nobody waits for or
//             with bytes that never come; messages to blocks that have ended; writes behind the shared memory
// Unwatched   races that no drawn order shows; fences: what is written is seen at once
// Planted     faults, so that tests can see that they are found: one of `Fault`, at its `number`-th place
#pragma once

#include <csetjmp>
#include <csignal>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include <sys/mman.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

typedef unsigned long long Barrier;

namespace cluster_on_cpu {

constexpr unsigned blocks = 16, warp_size = 32, most_threads = 512;
constexpr std::size_t stack_bytes = (32 << 10) + 320, red_zone = 256;

enum class Fault : int {
  none,
  no_cluster_barrier,  // every thread passes its number-th one
  no_block_barrier,    // every thread passes its number-th one
  wrong_parity,        // of every thread's number-th wait
  lost_message,        // the number-th
  early_end,           // threads of block 0 end at their number-th cluster barrier
  expected_twice,      // the number-th expectation
};

// An mbarrier, in its 8 bytes of shared memory.
struct State {
  std::int32_t bytes;     // that are expected and have not come
  std::int8_t arrivals;   // that the phase still needs: 1 or 0
  std::uint8_t mark;      // of one that is initialized
  std::uint16_t phase;    // phases that have ended
};
static_assert(sizeof(State) == sizeof(Barrier), "");
constexpr std::uint8_t initialized = 0x5A;

struct Place {
  const char* operation;
  int line;
};

struct Thread {
  void* stack_pointer;
  struct {
    unsigned x;
  } index;
  unsigned number, block, lane;
  bool ended, waits;
  Place at;
  int cluster_barriers, block_barriers, waits_so_far;
  alignas(16) unsigned char given[48], taken[32];
  int source;  // of a shuffle
};

struct Message {
  char* to;
  State* counted;
  unsigned block;
  uint4 x;
};

struct Meeting {
  unsigned arrived = 0;
  Place at = {nullptr, 0};
};

struct Known {
  State* state;
  unsigned block;
  int waited;  // phases that somebody has waited for
};

struct Cluster {
  unsigned threads_a_block, count;
  std::size_t shared_bytes;
  std::vector<Thread> threads;
  std::vector<Thread*> ready;
  std::vector<std::vector<char>> shared;
  std::vector<Meeting> of_block, of_warp;
  Meeting of_cluster;
  std::vector<unsigned> live;  // threads of each block
  std::vector<Message> in_flight;
  std::vector<Known> barriers;
  std::vector<std::pair<Thread*, std::pair<State*, int>>> waiting;  // for a phase of this parity
  Fault fault;
  int fault_number, messages, expectations;
  std::uint64_t random;
  unsigned slow;      // block whose threads run when no others can; `blocks` for none
  unsigned laziness;  // of messages: one is delivered with each 2^laziness-th switch, or when nothing else can happen
  bool stable;        // threads in turn
};

inline Cluster* cluster;
inline Thread* current;
inline void* scheduler;
inline char message[1024];
inline bool faulted;
inline sigjmp_buf wild;
inline char* stacks;

extern "C" void cluster_on_cpu_switch(void** leave, void* enter);
asm(R"(
.text
.weak cluster_on_cpu_switch
.type cluster_on_cpu_switch, @function
cluster_on_cpu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

// Splitmix64 (Steele, Lea and Flood, 2014).
inline std::uint64_t drawn() {
  std::uint64_t z = cluster->random += 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

inline void stop() {
  current->waits = true;
  cluster_on_cpu_switch(&current->stack_pointer, scheduler);
}
inline void go_on(Thread& thread) {
  thread.waits = false;
  cluster->ready.push_back(&thread);
}

inline void fail(const char* format, ...) {
  if (faulted) return;
  faulted = true;
  int used = 0;
  if (current)
    used = std::snprintf(message, sizeof(message), "block %u, thread %u: ", current->block, current->index.x);
  va_list values;
  va_start(values, format);
  std::vsnprintf(message + used, sizeof(message) - used, format, values);
  va_end(values);
  if (current) stop();  // for good
}

inline bool planted(Fault fault, int number) { return cluster->fault == fault && cluster->fault_number == number; }

inline char* shared_of(unsigned block) {
  char* start = cluster->shared[block].data();
  return start + (128 - reinterpret_cast<std::uintptr_t>(start) % 128) % 128;
}

// ---- who meets -----------------------------------------------------------------------------------------------------

// True for the last one of `wanted` threads; the others wait until it wakes them.
inline bool last_to_meet(Meeting& meeting, unsigned wanted, Place at) {
  if (meeting.arrived && (meeting.at.line != at.line || std::strcmp(meeting.at.operation, at.operation) != 0))
    fail("%s at line %d, where others wait in %s at line %d", at.operation, at.line, meeting.at.operation,
         meeting.at.line);
  meeting.at = at;
  current->at = at;
  if (++meeting.arrived < wanted) {
    stop();
    return false;
  }
  meeting.arrived = 0;
  return true;
}

template <class Members>
void wake(Members&& others) {
  for (Thread& thread : cluster->threads)
    if (&thread != current && !thread.ended && others(thread)) go_on(thread);
}

inline void block_barrier(int line) {
  if (planted(Fault::no_block_barrier, current->block_barriers++)) return;
  const unsigned block = current->block;
  if (last_to_meet(cluster->of_block[block], cluster->live[block], {"__syncthreads", line})) {
    Thread* first = &cluster->threads[block * cluster->threads_a_block];
    for (unsigned i = 0; i < cluster->threads_a_block; i++)
      if (first + i != current && !first[i].ended) go_on(first[i]);
  }
}

template <class Result>
void meet_warp(const char* operation, int line, Result&& result) {
  Meeting& meeting = cluster->of_warp[current->number / warp_size];
  if (!last_to_meet(meeting, warp_size, {operation, line})) return;
  Thread* warp = current - current->lane;
  result(warp);
  for (unsigned i = 0; i < warp_size; i++)
    if (warp + i != current) go_on(warp[i]);
}

template <class T>
void give(const T& x) {
  static_assert(sizeof(T) <= sizeof(Thread::given), "");
  std::memcpy(current->given, &x, sizeof(T));
}
template <class T>
T given(const Thread& thread) {
  T x;
  std::memcpy(&x, thread.given, sizeof(T));
  return x;
}
template <class T>
void hand(Thread& thread, const T& x) {
  static_assert(sizeof(T) <= sizeof(Thread::taken), "");
  std::memcpy(thread.taken, &x, sizeof(T));
}
template <class T>
T taken() {
  T x;
  std::memcpy(&x, current->taken, sizeof(T));
  return x;
}

// One result for all lanes, of what all give.
template <class Reduce>
unsigned reduced(const char* operation, int line, unsigned x, Reduce&& reduce) {
  give(x);
  meet_warp(operation, line, [&](Thread* warp) {
    unsigned result = given<unsigned>(warp[0]);
    for (unsigned i = 1; i < warp_size; i++) result = reduce(result, given<unsigned>(warp[i]));
    for (unsigned i = 0; i < warp_size; i++) hand(warp[i], result);
  });
  return taken<unsigned>();
}

// ---- mbarriers and messages ----------------------------------------------------------------------------------------

inline State& state_of(Barrier* barrier) {
  State& state = *reinterpret_cast<State*>(barrier);
  if (state.mark != initialized) fail("an mbarrier that is not initialized");
  return state;
}

inline void end_phase_if_complete(State& state) {
  if (state.arrivals > 0 || state.bytes != 0) return;
  state.phase++;
  state.arrivals = 1;
  auto& waiting = cluster->waiting;
  for (std::size_t i = 0; i < waiting.size();) {
    if (waiting[i].second.first == &state && (state.phase & 1) != waiting[i].second.second) {
      go_on(*waiting[i].first);
      waiting[i] = waiting.back();
      waiting.pop_back();
    } else {
      i++;
    }
  }
}

inline void deliver(std::size_t i) {
  auto& in_flight = cluster->in_flight;
  const Message one = in_flight[i];
  in_flight[i] = in_flight.back();
  in_flight.pop_back();
  if (cluster->live[one.block] == 0) return fail("a message to block %u, which has ended", one.block);
  if (one.counted->mark != initialized) return fail("a message to an mbarrier of block %u not initialized", one.block);
  std::memcpy(one.to, &one.x, sizeof(one.x));
  one.counted->bytes -= sizeof(one.x);
  end_phase_if_complete(*one.counted);
}

// ---- a launch ------------------------------------------------------------------------------------------------------

inline void (*body)(void**);
inline void** arguments;

inline void fiber() {
  body(arguments);
  current->ended = true;
  Cluster& all = *cluster;
  if (--all.live[current->block] > 0) {
    Meeting& meeting = all.of_block[current->block];  // those who wait need not wait for this one
    if (meeting.arrived && meeting.arrived == all.live[current->block]) {
      meeting.arrived = 0;
      wake([](Thread& thread) { return thread.block == current->block && thread.waits; });
    }
  }
  stop();
}

inline void on_signal(int) { siglongjmp(wild, 1); }

inline void report_deadlock() {
  char where[600];
  int used = 0;
  where[0] = 0;
  std::vector<Place> told;
  for (const Thread& one : cluster->threads) {
    if (one.ended) continue;
    bool known = false;
    for (const Place& place : told) known |= place.line == one.at.line && place.operation == one.at.operation;
    if (known || told.size() >= 5) continue;
    told.push_back(one.at);
    unsigned number = 0;
    for (const Thread& other : cluster->threads)
      number += !other.ended && other.at.line == one.at.line && other.at.operation == one.at.operation;
    used += std::snprintf(where + used, sizeof(where) - used, "; %u in %s at line %d, the first is %u of block %u",
                          number, one.at.operation, one.at.line, one.index.x, one.block);
  }
  fail("deadlock%s", where);
}

inline Thread* next_to_run() {
  auto& ready = cluster->ready;
  std::size_t i = cluster->stable ? ready.size() - 1 : drawn() % ready.size();
  for (int tries = 0; ready[i]->block == cluster->slow && tries < 8; tries++) i = drawn() % ready.size();
  Thread* thread = ready[i];
  ready[i] = ready.back();
  ready.pop_back();
  return thread;
}

inline void run_all() {
  Cluster& all = *cluster;
  while (!faulted) {
    const bool idle = all.ready.empty();
    if (idle && all.in_flight.empty()) {
      bool ended = true;
      for (const Thread& thread : all.threads) ended &= thread.ended;
      if (ended) return;
      return report_deadlock();
    }
    if (!all.in_flight.empty() && (idle || drawn() % (1u << all.laziness) == 0))
      deliver(drawn() % all.in_flight.size());
    if (all.ready.empty()) continue;
    current = next_to_run();
    cluster_on_cpu_switch(&scheduler, current->stack_pointer);
    current = nullptr;
  }
}

inline void check_at_the_end() {
  for (const Known& known : cluster->barriers) {
    if (known.state->bytes != 0 || known.state->arrivals != 1)
      fail("block %u ends with an mbarrier that expects %d bytes, %d arrivals", known.block, known.state->bytes,
           known.state->arrivals);
    if (known.waited != known.state->phase) fail("nobody has waited for the last message to block %u", known.block);
  }
  for (unsigned block = 0; block < blocks; block++)
    for (std::size_t i = 0; i < red_zone; i++)
      if (static_cast<unsigned char>(shared_of(block)[cluster->shared_bytes + i]) != 0xC5)
        fail("byte %zu behind the shared memory of block %u was written", i, block);
}

// Null, or what went wrong.
inline const char* launch(unsigned threads, std::size_t shared_bytes, std::uint64_t seed, int fault, int number) {
  static Cluster all;
  all = Cluster{};
  cluster = &all;
  faulted = false;
  current = nullptr;
  all.threads_a_block = threads;
  all.count = blocks * threads;
  all.shared_bytes = shared_bytes;
  all.fault = static_cast<Fault>(fault);
  all.fault_number = number;
  all.random = seed;
  all.stable = seed == 0;
  all.slow = seed % 3 == 1 ? drawn() % blocks : blocks;
  all.laziness = seed % 4 * 3;
  if (!stacks)
    stacks = static_cast<char*>(mmap(nullptr, stack_bytes * blocks * most_threads, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  all.shared.resize(blocks);
  for (unsigned block = 0; block < blocks; block++) {
    all.shared[block].assign(shared_bytes + 128 + red_zone, static_cast<char>(0xFF));
    std::memset(shared_of(block) + shared_bytes, 0xC5, red_zone);
  }
  all.of_block.resize(blocks);
  all.of_warp.resize(all.count / warp_size);
  all.live.assign(blocks, threads);
  all.threads.resize(all.count);
  for (unsigned i = 0; i < all.count; i++) {
    Thread& thread = all.threads[i];
    thread = Thread{};
    thread.number = i, thread.block = i / threads, thread.index.x = i % threads, thread.lane = i % warp_size;
    void** top = reinterpret_cast<void**>(stacks + stack_bytes * (i + 1));
    top[-1] = nullptr;
    top[-2] = reinterpret_cast<void*>(&fiber);
    for (int j = 3; j <= 8; j++) top[-j] = nullptr;
    thread.stack_pointer = top - 8;
    all.ready.push_back(&thread);
  }
  static char signal_stack[64 << 10];
  stack_t own = {}, old_stack;
  own.ss_sp = signal_stack, own.ss_size = sizeof(signal_stack);
  struct sigaction action = {}, old[2];
  action.sa_handler = on_signal, action.sa_flags = SA_ONSTACK | SA_NODEFER;
  sigaltstack(&own, &old_stack);
  sigaction(SIGSEGV, &action, &old[0]), sigaction(SIGBUS, &action, &old[1]);
  if (sigsetjmp(wild, 1) == 0) {
    run_all();
    if (!faulted) check_at_the_end();
  } else {
    current = nullptr;
    fail("a wild address");
  }
  sigaction(SIGSEGV, &old[0], nullptr), sigaction(SIGBUS, &old[1], nullptr);
  sigaltstack(&old_stack, nullptr);
  return faulted ? message : nullptr;
}

template <auto kernel>
struct Entry;
template <class... P, void (*kernel)(P...)>
struct Entry<kernel> {
  static void call(void** values) { unpack(values, std::index_sequence_for<P...>()); }

 private:
  template <std::size_t... i>
  static void unpack(void** values, std::index_sequence<i...>) {
    kernel(*static_cast<std::remove_cv_t<P>*>(values[i])...);
  }
};

}  // namespace cluster_on_cpu

#define threadIdx (::cluster_on_cpu::current->index)
#define LINE_ON_CPU int line = __builtin_LINE()
struct BlockSizeOnCpu {
  unsigned x;
};
#define blockDim (BlockSizeOnCpu{::cluster_on_cpu::cluster->threads_a_block})

// ---- what kernels/factor/cluster.cuh has ----------------------------------------------------------------------------

inline unsigned char* shared_memory() {
  return reinterpret_cast<unsigned char*>(cluster_on_cpu::shared_of(cluster_on_cpu::current->block));
}
inline int thread_now() { return int(threadIdx.x); }
inline int block_of_cluster() { return int(cluster_on_cpu::current->block); }

inline unsigned largest_of_warp(unsigned x, LINE_ON_CPU) {
  return cluster_on_cpu::reduced("largest_of_warp", line, x, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
inline unsigned smallest_of_warp(unsigned x, LINE_ON_CPU) {
  return cluster_on_cpu::reduced("smallest_of_warp", line, x, [](unsigned a, unsigned b) { return a < b ? a : b; });
}
inline unsigned lanes_where(bool yes, LINE_ON_CPU) {
  return cluster_on_cpu::reduced("lanes_where", line, unsigned(yes) << cluster_on_cpu::current->lane,
                                 [](unsigned a, unsigned b) { return a | b; });
}
template <class T>
T of_lane(T x, int lane, LINE_ON_CPU) {
  using namespace cluster_on_cpu;
  give(x);
  current->source = lane & 31;
  meet_warp("of_lane", line, [](Thread* warp) {
    for (unsigned i = 0; i < warp_size; i++) std::memcpy(warp[i].taken, warp[warp[i].source].given, sizeof(T));
  });
  return taken<T>();
}

inline void multiply_tile(double& c0, double& c1, double& c2, double& c3, double a0, double a1, double a2, double a3,
                          double b0, double b1, LINE_ON_CPU) {
  using namespace cluster_on_cpu;
  struct Given {
    double a[4], b[2];
  };
  struct Taken {
    double sum[4];
  };
  give(Given{{a0, a1, a2, a3}, {b0, b1}});
  hand(*current, Taken{{c0, c1, c2, c3}});
  meet_warp("multiply_tile", line, [](Thread* warp) {
    Given x[warp_size];
    for (unsigned i = 0; i < warp_size; i++) x[i] = given<Given>(warp[i]);
    for (unsigned i = 0; i < warp_size; i++) {
      Taken c;
      std::memcpy(&c, warp[i].taken, sizeof(c));
      for (unsigned k = 0; k < 8; k++)
        for (unsigned row = 0; row < 2; row++)
          for (unsigned column = 0; column < 2; column++)
            c.sum[2 * row + column] += x[i / 4 * 4 + k % 4].a[k / 4 * 2 + row] *
                                       x[(2 * (i % 4) + column) * 4 + k % 4].b[k / 4];
      hand(warp[i], c);
    }
  });
  const Taken c = taken<Taken>();
  c0 = c.sum[0], c1 = c.sum[1], c2 = c.sum[2], c3 = c.sum[3];
}

inline void cluster_barrier(LINE_ON_CPU) {
  using namespace cluster_on_cpu;
  const int number = current->cluster_barriers++;
  if (planted(Fault::no_cluster_barrier, number)) return;
  if (planted(Fault::early_end, number) && current->block == 0) {
    current->ended = true;
    cluster->live[0]--;
    stop();
  }
  unsigned live = 0;
  for (unsigned threads : cluster->live) live += threads;
  if (last_to_meet(cluster->of_cluster, live, {"cluster_barrier", line})) wake([](Thread&) { return true; });
}

inline void initialize(Barrier* barrier) {
  using namespace cluster_on_cpu;
  State& state = *reinterpret_cast<State*>(barrier);
  state = {0, 1, initialized, 0};
  cluster->barriers.push_back({&state, current->block, 0});
}
inline void publish_barriers() {}

inline void expect(Barrier* barrier, int bytes) {
  using namespace cluster_on_cpu;
  State& state = state_of(barrier);
  for (int i = planted(Fault::expected_twice, cluster->expectations++) ? 2 : 1; i > 0; i--) {
    state.bytes += bytes;
    if (--state.arrivals < 0) fail("an mbarrier is expected twice in one phase");
  }
  end_phase_if_complete(state);
}

inline void wait_for(Barrier* barrier, int parity, LINE_ON_CPU) {
  using namespace cluster_on_cpu;
  State& state = state_of(barrier);
  if (planted(Fault::wrong_parity, current->waits_so_far++)) parity ^= 1;
  current->at = {"wait_for", line};
  if ((state.phase & 1) == parity) {
    cluster->waiting.push_back({current, {&state, parity}});
    stop();
  }
  for (Known& known : cluster->barriers)
    if (known.state == &state && known.waited < state.phase) known.waited = state.phase;
}

inline void send(uint4* at, Barrier* barrier, int block, uint4 x) {
  using namespace cluster_on_cpu;
  char *from = shared_of(current->block), *to = shared_of(block);
  const std::size_t offset = reinterpret_cast<char*>(at) - from, counted = reinterpret_cast<char*>(barrier) - from;
  if (offset + 16 > cluster->shared_bytes || offset % 16 || counted + 8 > cluster->shared_bytes)
    fail("a message to byte %zu of %zu, counted at %zu", offset, cluster->shared_bytes, counted);
  if (planted(Fault::lost_message, cluster->messages++)) return;
  cluster->in_flight.push_back({to + offset, reinterpret_cast<State*>(to + counted), unsigned(block), x});
}

inline double times(double x, double y) { return x * y; }
inline double plus_product(double z, double x, double y) { return std::fma(x, y, z); }
inline double minus_product(double z, double x, double y) { return std::fma(-x, y, z); }
inline double negative(double x) { return -x; }
inline float times(float x, float y) { return x * y; }
inline float plus_product(float z, float x, float y) { return std::fma(x, y, z); }
inline float minus_product(float z, float x, float y) { return std::fma(-x, y, z); }
inline float negative(float x) { return -x; }

// Outside of its range the card's may be anything.
template <class T>
T reciprocal_of(T x) {
  return std::isnormal(x) && std::isnormal(1 / x) ? 1 / x : T(NAN);
}

// ---- what CUDA has -------------------------------------------------------------------------------------------------

inline void __syncthreads(LINE_ON_CPU) { cluster_on_cpu::block_barrier(line); }
inline void __syncwarp(unsigned = ~0u, LINE_ON_CPU) {
  cluster_on_cpu::meet_warp("__syncwarp", line, [](cluster_on_cpu::Thread*) {});
}
inline void __threadfence() {}
template <class T>
T __ldcg(const T* at) {
  return *at;
}
inline int min(int x, int y) { return x < y ? x : y; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }

template <class To, class From>
To bits_on_cpu(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}
inline long long __double_as_longlong(double x) { return bits_on_cpu<long long>(x); }
inline double __longlong_as_double(long long x) { return bits_on_cpu<double>(x); }
inline unsigned __float_as_uint(float x) { return bits_on_cpu<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return bits_on_cpu<float>(x); }
