// Stages 9 to 12 of repair.cu: what is left of a fault, too little for the check to see.
//
// A wrong element of an operand, gone before anyone looked, leaves a line or a column of C wrong all over, and only some
// of that is found by its size. So lines that are wrong all over are computed again whole; so are columns that have a
// wrong element, where a sample of their other elements is out of the ordinary.
#pragma once
#include "repair_elements.cuh"

constexpr int EACH = 4, BLOCK = EACH * WARPS;  // lines of a warp and of a block
constexpr int SAMPLES = 32;                    // of a column
constexpr int DEPTH = 1024;                    // of R(:, j) at a time
constexpr Index FEW_COLUMNS = 8;               // so many are looked at; of more those that several lines point at
static_assert(SAMPLES % BLOCK == 0, "blocks share the samples of a column");

INLINE Bits column_of(int g, Index product, Index j) { return Bits(g) << 56 | Bits(product) << 32 | Bits(j); }

// ---- stage 9 --------------------------------------------------------------------------------------------------------

// Wrong elements of column j in a group, but those of its lines that are wrong all over.
INLINE unsigned hits_of(const Problem& p, int g, Index j) {
  const unsigned hits = __ldcg(p.column_hits(g) + j), whole = __ldcg(p.fixed->whole + g);
  return hits > whole ? hits - whole : 0;
}

// In how many lines column j of a group is hit, counted where the first group of the product has it; else 0.
INLINE unsigned hits_of_column(const Problem& p, int g, Index j) {
  unsigned hits = 0;
  for (int other = 0; other < p.groups; other++) {
    if (p.product(other) != p.product(g)) continue;
    const unsigned mine = hits_of(p, other, j);
    if (mine && other < g) return 0;
    hits += mine;
  }
  return hits;
}

// By one block.
INLINE void list_rest(const Problem* problem, unsigned* keys) {
  const Problem& p = problem[0];
  if (threadIdx.x < GROUPS) p.fixed->whole[threadIdx.x] = 0;
  if (threadIdx.x == 0) keys[0] = 0;
  __syncthreads();
  for (int g = 0; g < p.groups && !p.all; g++)
    for (int place = p.first(g) + threadIdx.x; place < p.first(g + 1); place += T1)
      if (is_whole(p, g, place)) atomicAdd(p.fixed->whole + g, 1u);
  __threadfence_block();
  __syncthreads();
  for (int turn = 0; turn < 2; turn++) {  // how many there are decides which count
    for (int g = 0; g < p.groups; g++)
      for (int c = threadIdx.x; c < int(__ldcg(p.fixed->candidates + g)); c += T1) {
        const Index j = __ldcg(p.columns(g) + c);
        const unsigned hits = hits_of_column(p, g, j);
        if (hits && turn == 0) atomicAdd(&keys[0], 1u);
        if (turn == 0 || !(hits > 1 || (hits && keys[0] <= FEW_COLUMNS))) continue;
        const Bits number = atomicAdd(p.state + HIT, 1ull);
        if (number < REST) p.fixed->hit[number] = column_of(g, p.product(g), j);
      }
    __syncthreads();
  }
}

// ---- stages 10 and 12: C(first + step x, j), x < BLOCK, of a product again ------------------------------------------

INLINE Index columns_in(const Problem& p, State word) { return smaller(Index(__ldcg(p.state + word)), REST); }

// Whether one of them is out of the ordinary, for each thread of the block.
INLINE bool recompute_column(const Problem& p, Bits column, Index first, Index step, What what, double* pool) {
  const int g = int(column >> 56), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index product = Index(column >> 32 & 0xffffffu), j = Index(column & 0xffffffffu), end = (product + 1) * p.m;
  const A_TYPE* right = p.R + product * p.r_step + j * p.r_cs;
  const A_TYPE* left[EACH];
  double sum[EACH][2];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    left[i] = p.left(smaller(product * p.m + first + step * (warp * EACH + i), end - 1));
    sum[i][0] = sum[i][1] = 0;
  }
#pragma unroll 1
  for (Index panel = 0; panel < p.k; panel += DEPTH) {
    const Index depth = smaller(Index(DEPTH), p.k - panel);
    __syncthreads();
#pragma unroll 4
    for (Index l = threadIdx.x; l < depth; l += T1) pool[l] = widened(right[(panel + l) * p.r_rs]);
    __syncthreads();
#pragma unroll 2
    for (Index l = lane; l < depth; l += 32)
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const double x = double(widened(left[i][(panel + l) * p.l_cs])) * pool[l];
        sum[i][0] += x;
        sum[i][1] += fabs(x);
      }
  }
  bool wrong = false;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const Index line = product * p.m + first + step * (warp * EACH + i);
    const double total = over_lanes(sum[i][0]), size = over_lanes(sum[i][1]);
    if (lane == i && line < end) wrong = judge(p, line, j, total, size, __ldcg(p.fixed->usual + g), what);
  }
  const unsigned found = over_lanes(unsigned(wrong));
  __syncthreads();
  if (lane == 0) pool[warp] = found;
  __syncthreads();
  double all = 0;
  for (int w = 0; w < WARPS; w++) all += pool[w];
  __syncthreads();
  return all > 0;
}

// Of a sample, whether the column is to be completed; or BLOCK lines of one that is.
INLINE void look_at_column(const Problem* problem, Index item, bool complete, double* pool) {
  const Problem& p = problem[0];
  const Index parts = complete ? pieces(p.m, BLOCK) : 1, number = item / parts;
  const Bits column = __ldcg((complete ? p.fixed->completed : p.fixed->hit) + number);
  const Index step = complete || p.m <= SAMPLES ? 1 : p.m / SAMPLES, first = item % parts * BLOCK + step / 2;
  bool wrong = false;
#pragma unroll 1
  for (int x = 0; x < (complete ? BLOCK : SAMPLES) && !wrong; x += BLOCK)
    wrong = recompute_column(p, column, first + step * x, step, complete ? ALL : NONE, pool);
  if (threadIdx.x == 0 && wrong && !complete)
    p.fixed->completed[atomicAdd(p.state + COMPLETED, 1ull)] = column;
}
