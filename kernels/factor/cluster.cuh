// What the blocks of a cluster exchange and what only PTX can say: barriers, messages, reductions over a warp,
// reciprocals. Compute capability 9.0 or newer.
//
// The tests replace this file as a whole, with what it includes (tests/support/cluster_on_cpu.h).
#pragma once
#include "tsm2/index.cuh"
#include "factor/arithmetic.cuh"

typedef unsigned long long Barrier;  // in shared memory: an mbarrier on which bytes that arrive are counted

INLINE unsigned char* shared_memory() {
  extern __shared__ __align__(16) unsigned char of_the_block[];
  return of_the_block;
}
INLINE unsigned shared_address(const void* at) { return unsigned(__cvta_generic_to_shared(at)); }

// threadIdx.x, read anew: what follows from it is computed where it is needed, and takes no register elsewhere.
INLINE int thread_now() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// ---- a warp --------------------------------------------------------------------------------------------------------

INLINE unsigned largest_of_warp(unsigned x) { return __reduce_max_sync(~0u, x); }
INLINE unsigned smallest_of_warp(unsigned x) { return __reduce_min_sync(~0u, x); }
INLINE unsigned lanes_where(bool yes) { return __ballot_sync(~0u, yes); }
template <class T>
INLINE T of_lane(T x, int lane) {
  return __shfl_sync(~0u, x, lane);
}

// ---- the cluster ---------------------------------------------------------------------------------------------------

INLINE int block_of_cluster() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
}

// All threads of all blocks meet; what they wrote before is seen by all afterwards.
INLINE void cluster_barrier() {
  __syncwarp();  // "aligned": a warp arrives as one
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

INLINE void initialize(Barrier* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
// Before the barrier of the cluster after which others may send: they see barriers initialized.
INLINE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// The barrier's present phase ends when so many bytes have come. By one thread, once a phase.
INLINE void expect(Barrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Until the phase of this parity (0 for the first, 1 for the second, ...) has ended.
INLINE void wait_for(Barrier* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "AGAIN_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra AGAIN_%=;\n}" ::"r"(shared_address(barrier)), "r"(parity)
      : "memory");
}

// 16 bytes to the same place in another block's shared memory (or the own one's), counted on that block's barrier.
INLINE void send(uint4* at, Barrier* barrier, int block, uint4 x) {
  unsigned there, counted;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(at)), "r"(block));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counted) : "r"(shared_address(barrier)), "r"(block));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(
                   there),
               "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(counted)
               : "memory");
}

// ---- arithmetic ----------------------------------------------------------------------------------------------------

// 1 / x where x and 1 / x are normal numbers: in double to the last bit but one (20 bits, then two steps of Newton's).
INLINE double reciprocal_of(double x) {
  double r;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(r) : "d"(x));
  r = fma(fma(-x, r, 1.0), r, r);
  return fma(fma(-x, r, 1.0), r, r);
}
INLINE float reciprocal_of(float x) {
  float r;
  asm("rcp.rn.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
