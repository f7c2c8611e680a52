// What a panel kernel leaves beside the factors, for a panel W(k:m, k:k+b) that cuSOLVER's getrf has factored: pivots,
// and the order of the rows after the panel.
//
// Blocks have 4096 places each; all carry out the exchanges, b at most, for themselves: of the rows at places k:k+b, and
// of those that the pivots come from below.
//
// Launch   ceil(m / 4096) blocks of 512 threads; b <= 128
// Macros   ENTRY the name of the kernel
// Storage  ipiv: int32[b], counted from 1 at place k; getrf_info: int32[1]; piv: int32, [k:k+b] is written;
//          order0: int32[m] before the panel; order1, places1: int32[m] after it;
//          info: int32[1], 0 or 1 + the index of the first zero pivot, which is not changed any more
#include "factor/rows.cuh"

constexpr int THREADS = 512, PANEL = 128, PLACES = 4096;

// A pivot that is none, which garbage in the panel may lead to, is no exchange: it must not become an address.
INLINE int pivot_of(const int* ipiv, int i, Index rows) {
  const int p = ipiv[i] - 1;
  return p < i || p >= rows ? i : p;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    ENTRY(const int* ipiv, const int* getrf_info, Index m, Index k, Index b, int* piv, const int* __restrict__ order0,
          int* __restrict__ order1, int* __restrict__ places1, int* info) {
  __shared__ int pivot[PANEL];
  __shared__ int slot[PANEL];      // where among `held` the row is that comes to place k + i
  __shared__ int held[2 * PANEL];  // input rows: at places k:k+b, then at places of pivots below
  __shared__ unsigned changed[PLACES / 32];
  const int t = threadIdx.x;

  if (blockIdx.x == 0) {
    if (t < b) piv[k + t] = int(k) + pivot_of(ipiv, t, m - k);
    if (t == 0 && *getrf_info > 0 && *info == 0) *info = int(k) + *getrf_info;
  }
  const Index start = Index(blockIdx.x) * PLACES, end = smaller(m, start + PLACES);
  if (t < b) pivot[t] = pivot_of(ipiv, t, m - k);
  if (t < PLACES / 32) changed[t] = 0;
  __syncthreads();
  int own = 0, from = 0;
  if (t < b) {
    own = pivot[t], from = own;
    if (own >= b) {  // below: where the first exchange with that place keeps its row
      int first = 0;
      while (pivot[first] != own) first++;
      from = int(b) + first;
    }
    slot[t] = from;
    held[t] = order0[k + t];
  }
  const bool keeps = t < b && from == b + t;
  if (keeps) {
    held[b + t] = order0[k + own];
    const Index place = k + own - start;
    if (place >= 0 && place < PLACES) atomicOr(&changed[place / 32], 1u << place % 32);
  }
  __syncthreads();
  if (t == 0)
    for (int i = 0; i < b; i++) {
      const int other = slot[i], x = held[i], y = held[other];
      held[i] = y;
      held[other] = x;
    }
  __syncthreads();
#pragma unroll 4
  for (Index place = start + t; place < end; place += THREADS) {
    const unsigned bits = changed[(place - start) / 32];
    if ((place >= k && place < k + b) || bits >> (place - start) % 32 & 1) continue;
    const int row = order0[place];
    order1[place] = row;
    if (is_row(row, m)) places1[row] = int(place);
  }
  // Places that have changed, each by the block that has it.
  if (t < b && k + t >= start && k + t < end) {
    const int row = held[t];
    order1[k + t] = row;
    if (is_row(row, m)) places1[row] = int(k) + t;
  }
  if (keeps && k + own >= start && k + own < end) {
    const int row = held[b + t];
    order1[k + own] = row;
    if (is_row(row, m)) places1[row] = int(k) + own;
  }
}
