// Runs a kernel: the order of blocks and threads, barriers, and what is said of a fault. See cuda_on_cpu.h.
#include "runtime.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <vector>

#include <csignal>
#include <dlfcn.h>
#include <ucontext.h>
#include <unistd.h>

namespace cuda_on_cpu {

Thread* current;
Block block;
Thread threads[most_threads];

namespace {

enum class Order : int { forward, reverse, random };

const char* kernel_name;
std::size_t dynamic_bytes;
unsigned live;  // threads of the block that have not ended

char message[2048];
std::uintptr_t message_address;  // in the kernel's code, 0 for none
bool faulted;

// Barriers

bool same_place(const Thread& a, const Thread& b) {
  return a.site.line == b.site.line && std::strcmp(a.site.file, b.site.file) == 0 &&
         std::strcmp(a.operation, b.operation) == 0 && a.mask == b.mask;
}

void stop(State state, const char* operation, unsigned mask, Site site) {
  current->state = state;
  current->operation = operation;
  current->mask = mask;
  current->site = site;
  to_scheduler(false);
}

// All live lanes of the waiting thread's mask wait with it: exchange values, go on.
void complete_warp_barrier(Thread& one) {
  Thread* warp = &one - one.lane;
  unsigned here = 0;
  for (unsigned lane = 0; lane < warp_size; lane++) {
    if (!(one.mask >> lane & 1) || warp[lane].state == State::ended) continue;
    if (warp[lane].state != State::at_warp_barrier || !same_place(one, warp[lane])) return;
    here |= 1u << lane;
  }
  std::uint32_t& clock = block.clock[one.number / warp_size];
  std::uint32_t known[warp_size] = {};
  const bool orders = std::strcmp(one.operation, "__syncwarp") == 0;  // a shuffle orders no memory accesses
  if (orders) clock++;
  for (unsigned lane = 0; lane < warp_size; lane++) {
    if (!(here >> lane & 1)) continue;
    Thread& thread = warp[lane];
    if (orders) {
      for (unsigned i = 0; i < warp_size; i++) known[i] = std::max(known[i], thread.known[i]);
      known[lane] = clock;
    } else if (thread.source < warp_size && (here >> thread.source & 1)) {
      std::memcpy(thread.taken, warp[thread.source].given, sizeof(thread.taken));
    } else {
      for (unsigned char& byte : thread.taken) byte = poison(&byte);
    }
    thread.state = State::ready;
  }
  if (orders)
    for (unsigned lane = 0; lane < warp_size; lane++)
      if (here >> lane & 1) std::memcpy(warp[lane].known, known, sizeof(known));
}

void diverged(unsigned count) {
  begin_fault("divergent barriers", 0);
  unsigned groups = 0;
  bool told[most_threads] = {};
  for (unsigned i = 0; i < count; i++) {
    if (told[i] || threads[i].state == State::ended) continue;
    unsigned members = 0;
    for (unsigned j = i; j < count; j++)
      if (threads[j].state != State::ended && same_place(threads[i], threads[j])) told[j] = true, members++;
    if (groups++ < 4) {
      add("%s %u thread(s), first (%u, %u, %u), wait in %s", groups == 1 ? ":" : ";", members, threads[i].index.x,
          threads[i].index.y, threads[i].index.z, threads[i].operation);
      if (threads[i].state == State::at_warp_barrier) add(" (mask 0x%08x)", threads[i].mask);
      add(" at %s:%d", threads[i].site.file, threads[i].site.line);
    }
  }
  add("; %u have ended. All live threads of a block, or of a mask, have to meet at one place", count - live);
}

// One block

void begin_block(unsigned count) {
  block.first_epoch = ++block.epoch;
  std::memset(block.clock, 0, sizeof(block.clock));
  begin_shared(dynamic_bytes);
  for (unsigned i = 0; i < count; i++) {
    Thread& thread = threads[i];
    thread.index = {i % block.size.x, i / block.size.x % block.size.y, i / (block.size.x * block.size.y)};
    thread.number = i;
    thread.lane = i % warp_size;
    thread.state = State::ready;
    thread.site = {nullptr, 0};
    std::memset(thread.known, 0, sizeof(thread.known));
    prepare_fiber(i);
  }
  // The rest of the last warp: lanes that are not there.
  for (unsigned i = count; i % warp_size; i++) threads[i].state = State::ended;
  live = count;
}

// Splitmix64 (Steele, Lea and Flood, 2014).
std::uint64_t random_state;
std::uint64_t random_below(std::uint64_t limit) {
  std::uint64_t z = random_state += 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return (z ^ z >> 31) % limit;
}

void shuffle_in_place(std::vector<unsigned>& numbers) {
  for (std::size_t i = numbers.size(); i > 1; i--) std::swap(numbers[i - 1], numbers[random_below(i)]);
}

std::vector<unsigned> sequence(unsigned count, Order order) {
  std::vector<unsigned> numbers(count);
  for (unsigned i = 0; i < count; i++) numbers[i] = order == Order::reverse ? count - 1 - i : i;
  if (order == Order::random) shuffle_in_place(numbers);
  return numbers;
}

// Whether every live thread waits at the block's barrier; they go on if it is the same one for all.
bool release_block(unsigned count) {
  const Thread* first = nullptr;
  for (unsigned i = 0; i < count; i++) {
    if (threads[i].state == State::ended) continue;
    if (threads[i].state != State::at_block_barrier || (first && !same_place(*first, threads[i]))) return false;
    first = &threads[i];
  }
  block.epoch++;
  for (unsigned i = 0; i < count; i++)
    if (threads[i].state != State::ended) threads[i].state = State::ready;
  return true;
}

void run_block(unsigned count, Order order) {
  begin_block(count);
  std::vector<unsigned> turn = sequence(count, order);
  while (true) {
    bool ran = false;
    for (unsigned number : turn) {
      Thread& thread = threads[number];
      if (thread.state != State::ready) continue;
      ran = true;
      to_thread(thread);
      if (faulted) return;
      if (thread.state == State::ended) {
        live--;
        Thread* warp = &thread - thread.lane;
        for (unsigned lane = 0; lane < warp_size; lane++)
          if (warp[lane].state == State::at_warp_barrier) complete_warp_barrier(warp[lane]);
      } else if (thread.state == State::at_warp_barrier) {
        complete_warp_barrier(thread);
      }
    }
    if (live == 0) return check_red_zones();
    if (!ran && !release_block(count)) return diverged(count);
    if (order == Order::random) shuffle_in_place(turn);
  }
}

// What the processor or a check of the compiler's stops ends the kernel, not the process.
void on_signal(int number, siginfo_t* information, void* state) {
  if (!current || faulted) {  // not the kernel's doing
    std::signal(number, SIG_DFL);
    return;
  }
  std::uintptr_t address = 0;
#ifdef __x86_64__
  address = static_cast<std::uintptr_t>(static_cast<ucontext_t*>(state)->uc_mcontext.gregs[REG_RIP]) + 1;
#else
  (void)state;
#endif
  if (number == SIGILL) {
    begin_fault("misaligned or outside", address);
    add(" uses an address that is no multiple of its type's size, or an index outside of an array of its own");
  } else if (number == SIGFPE) {
    begin_fault("division by zero", address);
  } else {
    begin_fault("wild address", address);
    add(" touches %p, where no memory is", information->si_addr);
  }
  abandon();
}

// AddressSanitizer has its own report of wild addresses.
constexpr int caught[] = {SIGILL, SIGFPE, SIGBUS, SIGSEGV};
constexpr int number_caught = SANITIZED ? 2 : 4;

class Signals {
 public:
  Signals() {
    static char stack[64 << 10];
    stack_t mine = {};
    mine.ss_sp = stack;
    mine.ss_size = sizeof(stack);
    sigaltstack(&mine, &old_stack_);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < number_caught; i++) sigaction(caught[i], &action, &old_[i]);
  }
  ~Signals() {
    for (int i = 0; i < number_caught; i++) sigaction(caught[i], &old_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  struct sigaction old_[number_caught];
  stack_t old_stack_;
};

#if SANITIZED
// AddressSanitizer knows the line, but neither kernel nor block.
void on_death() {
  char text[256];
  const uint3 b = block.index, t = current ? current->index : uint3{0, 0, 0};
  const int length = std::snprintf(text, sizeof(text), "\nkernel %s, block (%u, %u, %u), thread (%u, %u, %u)\n",
                                   kernel_name, b.x, b.y, b.z, t.x, t.y, t.z);
  if (write(STDERR_FILENO, text, static_cast<std::size_t>(length)) < 0) return;
}
#endif

}  // namespace

// Faults

void add(const char* format, ...) {
  const std::size_t used = std::strlen(message);
  va_list values;
  va_start(values, format);
  std::vsnprintf(message + used, sizeof(message) - used, format, values);
  va_end(values);
}

void add_place(const char* what, const uint3& index) { add("%s (%u, %u, %u)", what, index.x, index.y, index.z); }

void begin_fault(const char* kind, std::uintptr_t address) {
  faulted = true;
  message[0] = 0;
  message_address = address;
  add("%s: kernel %s", kind, kernel_name);
  add_place(", block", block.index);
  if (current) add_place(", thread", current->index);
}

void abandon() {
  to_scheduler(true);
  __builtin_unreachable();
}

void add_last_barrier() {
  if (current->site.file)
    add("; its last barrier was %s at %s:%d", current->operation, current->site.file, current->site.line);
}

// What kernels call

void block_barrier(Site site) { stop(State::at_block_barrier, "__syncthreads", 0, site); }

void warp_barrier(const char* operation, unsigned mask, Site site) {
  if (!(mask >> current->lane & 1)) {
    begin_fault("bad mask", 0);
    add(": lane %u calls %s at %s:%d with mask 0x%08x, which leaves it out", current->lane, operation, site.file,
        site.line, mask);
    abandon();
  }
  stop(State::at_warp_barrier, operation, mask, site);
}

void bad_width(const char* operation, int width, Site site) {
  begin_fault("bad width", 0);
  add(": %s at %s:%d has width %d, which is no power of two up to 32", operation, site.file, site.line, width);
  abandon();
}

struct Launch {
  const char* name;
  unsigned grid[3], threads[3];
  std::size_t shared_bytes;
  int order;
  std::uint64_t seed;
  char** stacks;  // of up to most_threads threads, null where there is none yet; no other launch uses them meanwhile
};

}  // namespace cuda_on_cpu

// Runs a kernel. 0, or 1 with a message of what went wrong and the offset of the code in this library (0 if not known).
extern "C" __attribute__((visibility("default"))) int cuda_on_cpu_launch(const cuda_on_cpu::Launch* launch,
                                                                         void (*entry)(void**), void** values,
                                                                         const char** text, std::uintptr_t* offset) {
  using namespace cuda_on_cpu;
  *text = message;
  *offset = 0;
  const unsigned count = launch->threads[0] * launch->threads[1] * launch->threads[2];
  if (!reserve_stacks(count, launch->stacks) || !reserve_shared()) {
    std::snprintf(message, sizeof(message), "no memory for the stacks of %u threads", count);
    return 1;
  }
#if SANITIZED
  __sanitizer_set_death_callback(on_death);
#endif
  const Signals signals;
  kernel_name = launch->name;
  set_body(entry, values);
  dynamic_bytes = launch->shared_bytes;
  random_state = launch->seed;
  faulted = false;
  message_address = 0;
  const Order order = static_cast<Order>(launch->order);
  block.size = {launch->threads[0], launch->threads[1], launch->threads[2]};
  block.grid = {launch->grid[0], launch->grid[1], launch->grid[2]};
  for (unsigned number : sequence(block.grid.x * block.grid.y * block.grid.z, order)) {
    block.index = {number % block.grid.x, number / block.grid.x % block.grid.y, number / (block.grid.x * block.grid.y)};
    run_block(count, order);
    if (!faulted) continue;
    Dl_info library;
    if (message_address && dladdr(reinterpret_cast<void*>(message_address), &library))
      *offset = message_address - reinterpret_cast<std::uintptr_t>(library.dli_fbase) - 1;
    return 1;
  }
  return 0;
}
