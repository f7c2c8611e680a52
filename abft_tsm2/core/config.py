"""The paper's configurations under their public path: `abft_tsm2.core.paper.config`, `abft_tsm2.core.problem`."""

from abft_tsm2.core.paper.config import (
    BYTES,
    PAPER_T1,
    T1,
    T2,
    T3,
    TCF,
    TSM2L,
    TSM2R,
    VARIANTS,
    Config,
    LaunchShape,
    choices,
    is_valid,
    launch,
    published,
    why_not,
)
from abft_tsm2.core.problem import C_TYPES, SIZES, Problem

__all__ = [
    "BYTES",
    "C_TYPES",
    "PAPER_T1",
    "SIZES",
    "T1",
    "T2",
    "T3",
    "TCF",
    "TSM2L",
    "TSM2R",
    "VARIANTS",
    "Config",
    "LaunchShape",
    "Problem",
    "choices",
    "is_valid",
    "launch",
    "published",
    "why_not",
]
