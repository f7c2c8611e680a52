// What runtime.cpp (order, barriers), fibers.cpp and watch.cpp (shared memory) know of each other.
//
// A fault ends the kernel: its message is kept, the fiber that met it is left for good (a kernel's variables need no
// destructors), and the launch returns 1. Nothing is thrown across a fiber.
#pragma once
#include "cuda_on_cpu.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define SANITIZED 1
#else
#define SANITIZED 0
#define ASAN_POISON_MEMORY_REGION(at, size) ((void)(at), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(at, size) ((void)(at), (void)(size))
#endif

namespace cuda_on_cpu {

extern Thread threads[most_threads];  // of the present block

// A message in parts: its beginning says what happened, in which kernel, block and thread. `address` is the place in
// the kernel's code that called, 0 if it is not known.
void begin_fault(const char* kind, std::uintptr_t address);
void add(const char* format, ...);
void add_place(const char* what, const uint3& index);
void add_last_barrier();
[[noreturn]] void abandon();
#define CALLER reinterpret_cast<std::uintptr_t>(__builtin_return_address(0))

bool reserve_stacks(unsigned count, char** stacks);
void set_body(void (*entry)(void**), void** values);  // what every fiber runs
void prepare_fiber(unsigned number);                  // to begin anew
void to_thread(Thread&);                              // runs it until it stops or ends
void to_scheduler(bool for_good);

// Zeroed memory of the system's that lasts as long as the process; null if there is none.
char* pages(std::size_t bytes);

bool reserve_shared();
void begin_shared(std::size_t dynamic_bytes);  // of a block
void check_red_zones();                        // of the block's arrays, when it has ended

// Two bytes that are NaN in every floating-point format and a negative number in the integers, at any alignment.
inline unsigned char poison(const void* at) { return reinterpret_cast<std::uintptr_t>(at) & 1 ? 0xFF : 0xFB; }

}  // namespace cuda_on_cpu
