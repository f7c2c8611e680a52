// What a panel kernel leaves beside the factors, for a panel W(k:m, k:k+b) that cuSOLVER's getrf has factored: pivots,
// the order of the rows after the panel, the inverse of its unit lower triangle L11.
//
// The first block inverts, the others have 4096 places each; all of these carry out the exchanges, b at most, for
// themselves: of the rows at places k:k+b, and of those that the pivots come from below.
//
// Launch   1 + ceil(m / 4096) blocks of 512 threads; b <= 128
// Macros   REAL; ENTRY the name of the kernel
// Storage  ipiv: int32[b], counted from 1 at place k; getrf_info: int32[1]; W(i, j) = W[i + j ld];
//          piv: int32, [k:k+b] is written; order0: int32[m] before the panel; order1, places1: int32[m] after it;
//          inv(i, j) = inv[i + 128 j], i, j < b; inv_norm: double[1], its largest modulus, infinite where one is NaN;
//          info: int32[1], 0 or 1 + the index of the first zero pivot, which is not changed any more
#include "factor/substitute.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32, PLACES = 4096;
constexpr int COLUMNS = 4;  // of the inverse that a warp has at a time

// A pivot that is none, which garbage in the panel may lead to, is no exchange: it must not become an address.
INLINE int pivot_of(const int* ipiv, int i, Index rows) {
  const int p = ipiv[i] - 1;
  return p < i || p >= rows ? i : p;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    ENTRY(const int* ipiv, const int* getrf_info, Index m, Index k, Index b, const Real* W, Index ld, int* piv,
          const int* __restrict__ order0, int* __restrict__ order1, int* __restrict__ places1, Real* inv,
          double* inv_norm, int* info) {
  __shared__ int pivot[PANEL];
  __shared__ int slot[PANEL];      // where among `held` the row is that comes to place k + i
  __shared__ int held[2 * PANEL];  // input rows: at places k:k+b, then at places of pivots below
  __shared__ unsigned changed[PLACES / 32];
  __shared__ Word of_warps[WARPS];
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;

  if (blockIdx.x == 0) {
    if (t < b) piv[k + t] = int(k) + pivot_of(ipiv, t, m - k);
    if (t == 0 && *getrf_info > 0 && *info == 0) *info = int(k) + *getrf_info;
    Word largest = 0;
    for (int column = warp * COLUMNS; column < b; column += WARPS * COLUMNS) {
      // inv(:, column) = inv(L11) e_column
      Real x[COLUMNS][HELD];
#pragma unroll
      for (int c = 0; c < COLUMNS; c++)
#pragma unroll
        for (int h = 0; h < HELD; h++) x[c][h] = 32 * h + lane == column + c && column + c < b ? Real(1) : Real(0);
      substitute(W + k + k * ld, ld, int(b), x);
#pragma unroll
      for (int c = 0; c < COLUMNS; c++)
#pragma unroll
        for (int h = 0; h < HELD; h++) {
          const int row = 32 * h + lane;
          if (row >= b || column + c >= b) continue;
          inv[row + (column + c) * PANEL] = x[c][h];
          largest = larger(largest, modulus(x[c][h]));
        }
    }
#pragma unroll
    for (int bit = 16; bit; bit /= 2) largest = larger(largest, __shfl_xor_sync(~0u, largest, bit));
    if (lane == 0) of_warps[warp] = largest;
    __syncthreads();
    if (t > 0) return;
    for (int i = 1; i < WARPS; i++) largest = larger(largest, of_warps[i]);
    const Real norm = real_of(largest);
    const unsigned long long infinity = 0x7ffull << 52;
    *inv_norm = double(norm);
    if (norm != norm) memcpy(inv_norm, &infinity, sizeof(infinity));
    return;
  }

  const Index start = Index(blockIdx.x - 1) * PLACES, end = smaller(m, start + PLACES);
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
    places1[row] = int(place);
  }
  // Places that have changed, each by the block that has it.
  if (t < b && k + t >= start && k + t < end) {
    const int row = held[t];
    order1[k + t] = row;
    places1[row] = int(k) + t;
  }
  if (keeps && k + own >= start && k + own < end) {
    const int row = held[b + t];
    order1[k + own] = row;
    places1[row] = int(k) + own;
  }
}
