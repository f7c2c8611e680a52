// Tiles of a matrix that kernels take through shared memory, where a matrix is read along either of its lines.
#pragma once
#include "tsm2/index.cuh"

constexpr int TILE = 64, GROUPS = 4, EACH = TILE / GROUPS;  // lines; of threads; lines of a group
constexpr int APART = TILE + 1;  // columns of the tile in shared memory: no two lanes meet in a bank along either line

INLINE Index distance(Index stride) { return stride < 0 ? -stride : stride; }
