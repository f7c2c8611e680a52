// Rows by their places. What an order of rows, or a place, says may have been changed: it is no address before `is_row`
// holds.
#pragma once
#include "tsm2/index.cuh"

INLINE bool is_row(int row, Index m) { return row >= 0 && row < m; }

// places[row], or `instead` where that, or the row, is none of m.
INLINE Index place_of(const int* places, int row, Index m, Index instead) {
  const int place = is_row(row, m) ? places[row] : -1;
  return is_row(place, m) ? Index(place) : instead;
}
