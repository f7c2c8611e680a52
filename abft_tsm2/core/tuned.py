"""Tuned numbers of this layer, measured on an NVIDIA H200 in November 2026: no other module of core/ has any.

The shapes in which each kernel of `abft_tsm2.core.kernels` was fastest; up to how many columns they are ahead of
cuBLAS; how k is divided among blocks; the tiles of `encode_both`. How each was measured stands above it; what is a rule
of the kernels, not a measurement, stands with the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """What is tuned of a kernel.

    Attributes
    ----------
    t1 : int
        Threads of a block.
    tcf : int
        Rows of A of a warp ("rows") or of a thread ("staged"), tiles of 16 of them ("tensor"), vectors of rows of a
        thread ("columns"), or how often a thread has rows ("small").
    t3 : int
        Vectors of a row, or columns of A, that a thread loads at a time; vectors of a row in a stage ("staged");
        columns of C that a thread computes at a time ("small").
    pairs : int
        B is fetched for 2 pairs such steps at a time; 0 for a single one ("rows"). Stages under way ("staged").
    blocks : int
        Of a multiprocessor: bounds the registers of a thread.
    leaves_first : bool
        Whether lines of A ("small": and of C) leave the level-2 cache first; else they pass it like any others.
    """

    t1: int
    tcf: int
    t3: int
    pairs: int
    blocks: int
    leaves_first: bool = True


# The fastest of some hundred shapes at m = k = 10240 and 20480 on an H200, by form, type of A, type of the sums, and
# the largest t2 that it serves; the last one serves any. float16 stands for bfloat16 where that has none of its own.
BEST: Mapping[tuple[str, str, str], Mapping[int, Shape]] = {
    ("columns", "float32", "float32"): {
        1: Shape(128, 2, 4, 1, 4),
        2: Shape(128, 1, 8, 1, 4),
        4: Shape(128, 1, 4, 1, 6),
        8: Shape(128, 1, 8, 1, 4),
        16: Shape(64, 1, 8, 2, 6),
        32: Shape(128, 1, 2, 1, 2),
    },
    ("columns", "float64", "float64"): {
        1: Shape(128, 4, 2, 1, 4),
        2: Shape(128, 2, 4, 1, 4),
        4: Shape(128, 1, 8, 2, 3),
        8: Shape(128, 1, 8, 1, 3),
        16: Shape(128, 1, 4, 1, 2),
        32: Shape(128, 1, 2, 1, 2),
    },
    ("columns", "float32", "float64"): {
        1: Shape(128, 1, 8, 1, 4),
        2: Shape(128, 1, 4, 1, 4),
        4: Shape(128, 1, 8, 2, 3),
        8: Shape(128, 1, 4, 1, 3),
        16: Shape(128, 1, 2, 1, 2),
    },
    ("columns", "bfloat16", "float32"): {
        2: Shape(128, 1, 4, 1, 2),
        4: Shape(128, 1, 8, 1, 3),
        8: Shape(128, 1, 4, 1, 3),
        16: Shape(128, 1, 1, 1, 2),
    },
    ("columns", "float16", "float32"): {
        4: Shape(128, 1, 4, 1, 2),
        8: Shape(128, 1, 4, 1, 3),
        16: Shape(128, 1, 1, 1, 2),
    },
    ("columns", "float16", "float64"): {
        2: Shape(128, 1, 4, 2, 3),
        4: Shape(128, 1, 4, 1, 2),
        8: Shape(128, 1, 2, 1, 2),
    },
    ("rows", "float32", "float32"): {
        2: Shape(128, 8, 2, 1, 3),
        8: Shape(128, 8, 1, 1, 3),
        16: Shape(128, 8, 1, 1, 2),
        32: Shape(128, 4, 1, 0, 2),
    },
    ("rows", "float64", "float64"): {
        1: Shape(128, 8, 1, 1, 4),
        2: Shape(128, 4, 1, 2, 2),
        4: Shape(128, 8, 1, 2, 3),
        8: Shape(128, 4, 2, 1, 3),
        16: Shape(128, 4, 1, 1, 2),
        32: Shape(128, 2, 1, 0, 2),
    },
    ("rows", "float32", "float64"): {
        1: Shape(128, 8, 1, 2, 3),
        2: Shape(128, 8, 1, 1, 3),
        4: Shape(128, 4, 2, 0, 4),
        8: Shape(128, 4, 1, 1, 2),
        16: Shape(128, 2, 1, 0, 2),
        32: Shape(128, 1, 2, 0, 2),
    },
    ("rows", "float16", "float32"): {
        2: Shape(128, 8, 1, 1, 4),
        4: Shape(128, 4, 1, 1, 5),
        8: Shape(128, 4, 1, 1, 3),
        16: Shape(128, 2, 1, 0, 2),
    },
    ("rows", "float16", "float64"): {
        2: Shape(128, 4, 1, 1, 3),
        4: Shape(128, 4, 1, 1, 2),
        16: Shape(128, 2, 1, 0, 2),
        32: Shape(128, 1, 2, 0, 2),
    },
}
# The same of the tensor cores, by order and type of A, and by order of B.
TENSOR: Mapping[tuple[str, str, str], Mapping[int, Shape]] = {
    ("F", "float64", "C"): {8: Shape(128, 1, 2, 2, 5), 16: Shape(128, 1, 2, 2, 3), 32: Shape(128, 2, 1, 2, 2)},
    ("F", "float64", "F"): {8: Shape(128, 1, 1, 2, 5), 16: Shape(128, 1, 2, 2, 3), 32: Shape(128, 2, 1, 2, 2)},
    ("C", "float64", "C"): {8: Shape(128, 1, 2, 4, 3), 16: Shape(128, 1, 2, 2, 3), 32: Shape(128, 1, 1, 2, 3)},
    ("F", "float16", "C"): {8: Shape(64, 4, 1, 2, 6), 16: Shape(64, 4, 1, 4, 6)},
    ("C", "float16", "C"): {8: Shape(128, 1, 4, 1, 5), 16: Shape(128, 1, 4, 2, 4), 32: Shape(128, 2, 2, 2, 2)},
    ("C", "float16", "F"): {8: Shape(128, 1, 4, 2, 4), 16: Shape(128, 1, 4, 2, 4), 32: Shape(128, 2, 2, 2, 2)},
}
# Of tensor cores where A has so many bytes or more, by order and type of A: shapes for just so many columns.
TENSOR_LARGE: Mapping[tuple[str, str], Mapping[int, tuple[int, Shape]]] = {
    ("F", "float64"): {16: (2**31, Shape(128, 2, 2, 2, 2, leaves_first=False))},
    ("F", "float16"): {16: (2**29, Shape(64, 4, 2, 1, 4))},
}
# Of A's rows through shared memory, where there are many columns, by type of A.
STAGED: Mapping[str, Mapping[int, Shape]] = {"float32": {16: Shape(32, 4, 4, 2, 4), 32: Shape(64, 2, 4, 2, 4)}}

# ---- which kernel ----

DEEP = 256  # elements of k below which a block of TSM2R has no time to get going, and m has to make up for it
# Cards on which own kernels and cuBLAS were measured side by side: the most columns with which the own ones are ahead,
# by order of A, types of A and of the sums; where that tells them apart, by form too, and by the orders of B and C
# (benchmarks/results/stream.csv).
COLUMNS_AHEAD: Mapping[str, Mapping[tuple[str, ...], int]] = {
    "NVIDIA H200": {
        ("F", "float32", "float32"): 16,
        ("F", "float64", "float64"): 16,
        ("F", "float16", "float32"): 4,
        ("F", "float16", "float32", "tensor"): 8,
        ("F", "float16", "float32", "tensor", "CC"): 16,
        ("F", "bfloat16", "float32"): 4,
        ("F", "bfloat16", "float32", "tensor"): 8,
        ("F", "bfloat16", "float32", "tensor", "CC"): 16,
        ("C", "float32", "float32"): 16,
        ("C", "float64", "float64"): 16,
        ("C", "float16", "float32"): 16,
        ("C", "bfloat16", "float32"): 16,
    }
}
BUSY = 0.45  # of the arithmetic peak, while reading at the peak of the memory: up to there a product streams
FEW_COLUMNS = 4  # columns of C that need no tensor cores where A is of float64, or lies in columns
FEW_ROWS = 2**16  # which leave most of a card idle unless a thread has little to do
ONE_WAVE = 2**18  # rows of float32 that its multiprocessors hold at a time
AT_ONCE = 16  # columns of C that a thread computes at a time where it has no other work
CACHED = 2**25  # bytes of A and C that a level-2 cache holds together

# ---- how k is divided among blocks ----

MOST_PARTS = 64  # of k at most: the block that comes last adds them
# Of the cost of a division of k, in steps: what a block takes to begin and to end; the share of the slots that
# saturates the memory; how much longer than the mean the slowest block takes; what a part more takes to be added; and
# how often the sums of a part move. Fitted to 3,200 shapes, 3 to 6 divisions each, on an H200: what is chosen is on
# average 2 % slower than the best. What reads columns does best where its blocks fill whole waves.
OVERHEAD, MOVED = 2.0, 4.0
DIVIDED_ROWS = (0.8, 0.2, 0.5)  # saturated, straggler, added: "rows" and "tensor"
DIVIDED_WAVES = (0.9, 0.5, 2.0)  # "columns" and "staged"
FILLED_WAVES = (1, 2, 3, 4, 6)  # waves

# ---- encode_both ----

# t1, t3, rows, columns of a thread, blocks by bytes of an element, type of sums, and 1, 2, or more columns of weights:
# without spills on every architecture, and as much of A on its way as the registers have room for.
ENCODE_TILES = {
    (4, "float32"): ((128, 4, 4, 8, 3), (128, 4, 4, 8, 3), (256, 4, 4, 4, 2)),
    (8, "float64"): ((256, 4, 4, 2, 3), (256, 4, 4, 2, 3), (256, 2, 2, 2, 3)),
    (4, "float64"): ((256, 8, 4, 4, 2), (128, 8, 2, 4, 4), (128, 4, 4, 4, 2)),
    (2, "float32"): ((128, 4, 4, 8, 2), (128, 4, 4, 8, 2), (128, 4, 4, 8, 2)),
    (2, "float64"): ((128, 4, 4, 4, 3), (128, 4, 4, 4, 3), (128, 4, 4, 4, 2)),
}


def shape_of(shapes: Mapping[int, Shape], t2: int) -> Shape:
    """The shape for t2 columns: that of the next larger number in the table, or of the largest."""
    return shapes[next((columns for columns in shapes if columns >= t2), max(shapes))]
