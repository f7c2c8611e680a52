"""Tuned numbers of the passes of GPU products, all of this layer, measured on an NVIDIA H200 in November 2026.

Measured by sweeps over shapes of 64 to 16384 rows and columns of each type, the passes of a product one after another,
as they are queued, CUDA events around each. What is a rule of the kernels, not a measurement, stands with the kernels.
"""

from __future__ import annotations

from typing import NamedTuple

MANY_ROWS = 64  # of a multiprocessor: enough for warps that take several each
JOINT = 12 << 20  # bytes of a left operand whose rows are summed where those of the product are judged,
JOINT_ROWS = 1 << 13  # its rows,
JOINT_VECTORS = {2: 256, 4: 256, 8: 512}  # and vectors of 16 bytes in the longer rows, by bytes of an element
WEIGHT_BLOCKS = 4  # that make weights, while cuBLAS fills 128 of 132 multiprocessors in one wave
# Clock cycles of the kernel in front of a pass, by bytes of an element. cuBLAS's blocks of float32 share
# multiprocessors, and do so for good where those of a pass lie when they begin: the product takes up to twice as long.
PAUSE = {2: 0, 4: 6000, 8: 0}
FEW_ROWS = 2  # of a multiprocessor, so long that a block takes each
MOST_ROWS = 48  # of a multiprocessor, so that three blocks are there whose warps take two each

MOST_GROUPS = 32  # of blocks that share a stripe: the last of them adds what all have found
LEAST_ROWS = 16  # of memory that a warp takes
FIXED_ROWS = 64  # of memory, that a block could read while it begins and ends
# By bytes of a load: rows of memory ahead in sums and in verdicts, blocks of a multiprocessor. As much in flight as
# there are registers for on every architecture.
AHEAD = {16: (6, 8, 2), 8: (10, 10, 2), 4: (16, 12, 2), 2: (16, 16, 3)}


def are_joint(size: int, m: int, k: int, n: int, products: int) -> bool:
    """Whether rows of so many left operands, m x k, are summed where those of the products, m x n, are judged; `size`
    bytes an element."""
    rows, vectors = m * products, -(-max(k, n) * size // 16)
    return rows * k * size <= JOINT and rows <= JOINT_ROWS and vectors <= JOINT_VECTORS[size]


class LineShape(NamedTuple):
    """Threads of a block, warps of a row, rows of a team and vectors loaded at a time, blocks of a multiprocessor."""

    t1: int
    team: int
    rows: int
    ahead: int
    blocks: int


def line_shape(
    size: int,
    vectors: int,
    p: int,
    products: int,
    multiprocessors: int,
    *,
    given: bool,
    verdict: bool,
    stored: bool,
    joint: bool = False,
) -> LineShape:
    """The shape of kernels/check/tsm2r_rows.cu for p rows of so many vectors, of each product; `size` bytes an element.

    given, verdict : squares have weights of their own; rows are judged. stored : rows that are judged are stored, too.
    joint : beside those that are judged rows of the left operand are summed.
    """
    rows = p * products
    if joint:
        return LineShape(256, 4, 2, 1, 3) if size == 8 else LineShape(256, 1 if vectors <= 32 else 2, 2, 1, 4)
    if rows >= MANY_ROWS * multiprocessors and vectors <= 256 and size < 8:
        team, at_once, ahead = (1, 8, 1) if vectors <= 32 else (1, 4, 1) if vectors <= 64 else (1, 4, 2)
        return LineShape(128, team, at_once, ahead, 4 if ahead == 1 or (verdict and size == 4) else 3)
    if vectors <= 64:
        return LineShape(128, 2 if vectors > 32 else 1, 2, 1, 4)
    if p <= FEW_ROWS * multiprocessors and vectors >= 512:
        return LineShape(512, 16, 1, 2, 1) if given else LineShape(256, 8, 1, 4, 2)
    if size == 8 and vectors <= 512:  # sums run beside a product, in as few places of the card as serve
        return LineShape(128, 4, 1, 2, 4) if verdict else LineShape(64, 1, 2, 4, 8)
    if size == 8:
        return LineShape(128, 4, 2, 2, 4) if verdict and vectors <= 1024 else LineShape(128, 2, 2, 4, 4)
    if size == 2 and vectors <= 256:
        return LineShape(256, 4, 2, 1, 3) if verdict else LineShape(128, 4, 2, 1, 6)
    if vectors <= (512 if size == 2 else 256):
        return LineShape(128, 4, 2, 1, 8 if given and size == 2 else 4)
    if verdict and stored:  # what is stored takes turns with what is loaded
        team = next(team for team in (1, 2, 4) if team == 4 or rows * team >= MOST_ROWS * multiprocessors)
        return LineShape(256, team, 2, 2, 4)
    if vectors <= 512:
        return LineShape(128, 2, 2, 4, 4)
    return LineShape(128, 1, 2, 4, 3 if given and size == 2 else 4)  # one register too many for four
