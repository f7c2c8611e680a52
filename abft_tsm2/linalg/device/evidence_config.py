"""The kernels that look again at a step of LU on a GPU: at the norms of its lines, and at its elements beside A.

Each is a file of kernels/factor, which says there what it does and takes. `judged_by` are the tolerances that
judge_elements.cu takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from abft_tsm2.arrays import FLOATS
from abft_tsm2.checksum.rigorous import compared_rounding, largest_multiplier, underflow
from abft_tsm2.core.problem import C_TYPES
from abft_tsm2.linalg.device.move_config import Launch

THREADS = 256
COUNTS = 4
"""Numbers of `found`, before its flags: `enum Found` of kernels/factor/evidence.cuh."""
WRONG, UNBOUNDED, LARGE_MULTIPLIERS, FARTHEST = range(COUNTS)


@dataclass(frozen=True)
class EvidenceKernel:
    """A file of kernels/factor, compiled for a real type.

    Attributes
    ----------
    routine : str
        The file's name without its suffix.
    dtype : {"float64", "float32"}
    """

    routine: str
    dtype: str

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"factor_{self.routine}_{self.dtype}"

    @property
    def file(self) -> str:
        """The file of kernels/ that holds it."""
        return f"factor/{self.routine}.cu"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        return {"REAL": C_TYPES[self.dtype], "T1": THREADS}


def step_factors(rows: int, b: int) -> Launch:
    """A thread for each element of L(j:, J)."""
    return Launch((-(-rows // THREADS), b), THREADS)


def line_squares(b: int) -> Launch:
    """A block for each row and for each column of a step."""
    return Launch((b, 2), THREADS)


def by_columns(count: int) -> Launch:
    """A block for each column."""
    return Launch((count,), THREADS)


def judged_by(dtype: str, terms: int) -> tuple[float, float]:
    """What an element of so many terms may be off for each unit of its column, and what underflow takes from it."""
    stored = FLOATS[dtype]
    return compared_rounding(stored, terms) * largest_multiplier(stored), underflow(stored, terms, 1.0)
