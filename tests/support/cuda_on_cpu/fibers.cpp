// A fiber for each thread of a block: its stack, and switching between it and the scheduler.
#include "runtime.h"

#include <sys/mman.h>
#include <ucontext.h>

#if !defined(__x86_64__) && !defined(CUDA_ON_CPU_UCONTEXT)
#define CUDA_ON_CPU_UCONTEXT
#endif

// Registers that a called function keeps, on the stack that is left and from the one that is entered.
#ifndef CUDA_ON_CPU_UCONTEXT
extern "C" void cuda_on_cpu_transfer(void** leave, void* enter);
asm(R"(
.text
.type cuda_on_cpu_transfer, @function
cuda_on_cpu_transfer:
    leaq -48(%rsp), %rsp
    movq %rbx, 0(%rsp)
    movq %rbp, 8(%rsp)
    movq %r12, 16(%rsp)
    movq %r13, 24(%rsp)
    movq %r14, 32(%rsp)
    movq %r15, 40(%rsp)
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    movq 0(%rsp), %rbx
    movq 8(%rsp), %rbp
    movq 16(%rsp), %r12
    movq 24(%rsp), %r13
    movq 32(%rsp), %r14
    movq 40(%rsp), %r15
    leaq 48(%rsp), %rsp
    ret
.size cuda_on_cpu_transfer, .-cuda_on_cpu_transfer
)");
#endif

namespace cuda_on_cpu {

namespace {

constexpr std::size_t stack_bytes = SANITIZED ? 256 << 10 : 64 << 10;
constexpr std::size_t page = 64 << 10;  // the largest there is: 4 KiB on x86-64

struct Context {
#ifdef CUDA_ON_CPU_UCONTEXT
  ucontext_t state;
#else
  void* stack_pointer;
#endif
};

struct Fiber {
  Context context;
  char* stack;
  void* sanitizer;  // AddressSanitizer's own record of a stack that was left
};

Fiber fibers[most_threads];
Context scheduler;
#if SANITIZED
void* scheduler_sanitizer;
const void* scheduler_stack;
std::size_t scheduler_stack_bytes;
#endif

void (*body)(void**);
void** arguments;

void transfer(Context& leave, Context& enter) {
#ifdef CUDA_ON_CPU_UCONTEXT
  swapcontext(&leave.state, &enter.state);
#else
  cuda_on_cpu_transfer(&leave.stack_pointer, enter.stack_pointer);
#endif
}

void fiber_main() {
#if SANITIZED
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
  body(arguments);
  current->state = State::ended;
  to_scheduler(true);
  __builtin_unreachable();
}

}  // namespace

// Stacks last as long as the process, and serve the kernels of all libraries: each lies above a page that must not be
// touched, so it is two of the mappings of which a process may have some ten thousand.
bool reserve_stacks(unsigned count, char** stacks) {
  for (unsigned i = 0; i < count; i++) {
    if (!stacks[i]) {
      char* stack = pages(page + stack_bytes);
      if (!stack) return false;
      mprotect(stack, page, PROT_NONE);
      stacks[i] = stack + page;
    }
    fibers[i].stack = stacks[i];
  }
  return true;
}

void set_body(void (*entry)(void**), void** values) {
  body = entry;
  arguments = values;
}

void prepare_fiber(unsigned number) {
  Fiber& fiber = fibers[number];
  ASAN_UNPOISON_MEMORY_REGION(fiber.stack, stack_bytes);  // frames of a thread that was left for good
  fiber.sanitizer = nullptr;
#ifdef CUDA_ON_CPU_UCONTEXT
  getcontext(&fiber.context.state);
  fiber.context.state.uc_stack.ss_sp = fiber.stack;
  fiber.context.state.uc_stack.ss_size = stack_bytes;
  fiber.context.state.uc_link = nullptr;
  makecontext(&fiber.context.state, fiber_main, 0);
#else
  // As if fiber_main had been called from address 0: six registers, then where to return to.
  void** top = reinterpret_cast<void**>(fiber.stack + stack_bytes);
  top[-1] = nullptr;
  top[-2] = reinterpret_cast<void*>(&fiber_main);
  for (int i = 3; i <= 8; i++) top[-i] = nullptr;
  fiber.context.stack_pointer = top - 8;
#endif
}

void to_scheduler(bool for_good) {
  Fiber& fiber = fibers[current->number];
#if SANITIZED
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber.sanitizer, scheduler_stack, scheduler_stack_bytes);
#else
  (void)for_good;
#endif
  transfer(fiber.context, scheduler);
#if SANITIZED
  __sanitizer_finish_switch_fiber(fiber.sanitizer, &scheduler_stack, &scheduler_stack_bytes);
#endif
}

void to_thread(Thread& thread) {
  Fiber& fiber = fibers[thread.number];
  current = &thread;
#if SANITIZED
  __sanitizer_start_switch_fiber(&scheduler_sanitizer, fiber.stack, stack_bytes);
#endif
  transfer(scheduler, fiber.context);
#if SANITIZED
  __sanitizer_finish_switch_fiber(scheduler_sanitizer, nullptr, nullptr);
#endif
  current = nullptr;
}

char* pages(std::size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? nullptr : static_cast<char*>(at);
}

}  // namespace cuda_on_cpu
