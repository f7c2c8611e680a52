"""The kernel that says once more what a step's lines are judged by, on the CPU, beside NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from abft_tsm2.checksum.bounds import FLOOR_TERMS
from abft_tsm2.linalg.device import evidence_config
from abft_tsm2.linalg.device.evidence_config import EvidenceKernel
from abft_tsm2.linalg.device.schedule import PANEL
from tests.support.cuda_on_cpu import ORDERS, KernelFault
from tests.support.libraries import Libraries, first_complaint, library_of, texts, with_faults

DTYPES = ("float64", "float32")
KERNEL = EvidenceKernel("line_squares", "float64")
FAULTS = {
    "no_unit": (KERNEL, "l == line ? 1 :", 0, "l == line ? 0 :"),
    "own_place_of_the_unit": (KERNEL, "l == line ? 1 :", 0, ""),
    "where_rows_are_last": (KERNEL, "present_order(places, end, m)", 0, "places + (line / PANEL + 1) * m"),
    "the_panel_before": (KERNEL, "(*ends + PANEL - 1) / PANEL", 0, "*ends / PANEL"),
    "ends_by_column": (KERNEL, "ends + l / PANEL", 0, "ends"),
    "rows_from_the_top": (KERNEL, "order1[line]", 0, "order1[blockIdx.x]"),
    "columns_from_the_top": (KERNEL, "l + line * ld", 0, "l + blockIdx.x * ld"),
    "without_the_pivot": (KERNEL, "l <= line", 0, "l < line"),
    "of_the_step_alone": (KERNEL, "Index l = threadIdx.x", 0, "Index l = j + threadIdx.x"),
    "no_operations": (KERNEL, "double(FLOOR + l)", 0, "double(FLOOR)"),
    "no_floor": (KERNEL, "double(FLOOR + l)", 0, "double(l)"),
    "sums_of_the_other_side": (KERNEL, "element * y[l]", 0, "element * g[l]"),
    "moduli": (KERNEL, "(term * term)", 0, "fabs(term)"),
    "own_thread": (KERNEL, "sum_over_block<T1>(sum)", 0, "sum"),
    "rows_left_out": (KERNEL, "l += T1", 0, "l += 2 * T1"),
    "no_place_is_nothing": (
        KERNEL,
        "exactly(W[place + l * ld]) : INFINITE - INFINITE",
        0,
        "exactly(W[place + l * ld]) : 0",
    ),
    "columns_over_rows": (KERNEL, "looked += blockIdx.y * b + blockIdx.x", 0, "looked += blockIdx.x"),
    "bounds_of_rows": (KERNEL, "bounds[blockIdx.y * lines + line]", 0, "bounds[line]"),
    "residuals_of_rows": (KERNEL, "residuals[blockIdx.y * lines + line]", 0, "residuals[line]"),
    "lines_from_the_top": (
        KERNEL,
        "residuals[blockIdx.y * lines + line]",
        0,
        "residuals[blockIdx.y * lines + blockIdx.x]",
    ),
    "bounds_first": (KERNEL, "looked[2 * b]", 0, "looked[0]"),
    "never_in_doubt": (KERNEL, "*in_doubt == 0", 0, "true"),
    "always_in_doubt": (KERNEL, "*in_doubt == 0", 0, "false"),
    "doubts_about_rows_alone": (KERNEL, "*in_doubt == 0", 0, "!(*in_doubt & 1)"),
}
library = library_of(
    lambda: [*texts([EvidenceKernel("line_squares", dtype) for dtype in DTYPES]), *with_faults(FAULTS)]
)
# What reads beyond an array may not be run but under AddressSanitizer, which sees it.
READS = {
    "any_row": (KERNEL, "is_row(row, m) ? places[row]", 0, "true ? places[row]"),
    "any_end": (KERNEL, "is_one ? place_of", 0, "true ? place_of"),
    "any_place": (KERNEL, "place >= 0 ? exactly", 0, "true ? exactly"),
}
sanitized = library_of(lambda: [*texts([KERNEL]), *with_faults(READS)], sanitize=True)


@dataclass
class Step:
    """Columns j:j+b, when they are finished; rows of each panel lie where `ends` says."""

    W: np.ndarray
    m: int
    j: int
    b: int
    places: np.ndarray
    order1: np.ndarray
    ends: np.ndarray
    g: np.ndarray
    y: np.ndarray
    judged: np.ndarray
    in_doubt: int = 3

    @classmethod
    def draw(cls, rng: np.random.Generator, m: int, n: int, j: int, b: int, dtype: str) -> Step:
        panels, last = -(-min(m, n) // PANEL), -(-(j + b) // PANEL)
        W = np.full((m + 3, n), np.nan, dtype, order="F")
        W[:m] = rng.standard_normal((m, n))
        order = np.stack([rng.permutation(m) for _ in range(panels + 1)]).astype(np.int32)
        places = np.argsort(order, axis=1).astype(np.int32)
        # The end of a panel, of some panels, or of the last one, which may be cut off.
        ends = [min(j + b, PANEL * int(rng.integers(p + 1, last + 1))) for p in range(last)] + [0] * (panels - last)
        g, y = rng.standard_normal((2, min(m, n)))
        judged = rng.standard_normal((2, 2, max(m, n)))
        return cls(W, m, j, b, places, order[last], np.array(ends, np.int32), g, y, judged)

    def expected(self) -> np.ndarray:
        """Residuals, bounds and squares, of rows and of columns; of a step that is not in doubt, what was there."""
        if not self.in_doubt:
            return np.full((3, 2, self.b), 7.0)
        lines = slice(self.j, self.j + self.b)
        W, squares = self.W.astype(np.longdouble), np.zeros((2, self.b), np.longdouble)
        for i, line in enumerate(range(self.j, self.j + self.b)):
            at, row = np.arange(line + 1), self.order1[line]
            if 0 <= row < self.m:
                ends = self.ends[at // PANEL]
                known = (ends >= 0) & (ends <= self.j + self.b)
                place = np.where(known, self.places[np.where(known, -(-ends // PANEL), 0), row], -1)
                L = np.where((place >= 0) & (place < self.m), W[np.clip(place, 0, self.m - 1), at], np.nan)
            else:
                L = np.full(line + 1, np.nan, np.longdouble)
            L[line] = 1
            squares[0, i] = np.sum((FLOOR_TERMS + at) * (L * self.y[: line + 1]) ** 2)
            squares[1, i] = np.sum((FLOOR_TERMS + at) * (self.g[: line + 1] * W[: line + 1, line]) ** 2)
        return np.stack([*self.judged[:, :, lines], squares.astype(np.float64)])

    def wrong(self, library: Libraries, name: str, order: str = "forward") -> list[str]:
        """What is wrong with what the kernel tells."""
        looked = np.full((3, 2, self.b), 7.0)
        launch = evidence_config.line_squares(self.b)
        of_step = self.W, len(self.W), self.m, self.j, self.b, self.order1, self.places, self.ends, self.g, self.y
        judged = self.judged[0], self.judged[1], self.judged.shape[2], np.array([self.in_doubt])
        args = *of_step, *judged, looked
        library.run(name, launch.grid, launch.threads, args, order=order)
        expected, kinds = self.expected(), ("residuals", "bounds", "squares")
        right = [np.array_equal(looked[:2], expected[:2])] * 2
        right.append(np.allclose(looked[2], expected[2], rtol=1e-13, atol=0, equal_nan=True))
        return [kind for kind, is_right in zip(kinds, right, strict=True) if not is_right]


SHAPES = (  # m, n, j, b
    *((1, 1, 0, 1), (5, 3, 0, 3), (300, 200, 128, 72), (130, 131, 128, 2), (390, 400, 256, 128), (700, 650, 128, 256)),
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_those_of_the_lines(library: Libraries, dtype: str) -> None:
    rng, name = np.random.default_rng(41), EvidenceKernel("line_squares", dtype).name
    for i, shape in enumerate(SHAPES):
        assert not Step.draw(rng, *shape, dtype).wrong(library, name, ORDERS[i % 3]), shape


def spoiled(rng: np.random.Generator) -> Step:
    """Rows without a place, and numbers that are none."""
    step = Step.draw(rng, 390, 400, 256, 128, "float64")
    step.order1[256 + np.arange(3)] = -1, 390, 2**31 - 1
    step.places[1, step.order1[300]] = -7
    step.places[:, step.order1[301]] = 390
    step.W[7, 290], step.W[20, 291] = np.nan, np.inf
    step.y[300] = np.inf
    return step


def test_an_end_that_is_none_is_no_number(library: Libraries) -> None:
    step = Step.draw(np.random.default_rng(45), 390, 400, 256, 128, "float64")
    step.ends[1] = 1 << 20
    assert np.isnan(step.expected()[2, 0]).all()
    assert not step.wrong(library, KERNEL.name)


def doubted(rng: np.random.Generator) -> list[Step]:
    """Steps that are in doubt for some reason, and one that is not."""
    steps = [Step.draw(rng, 300, 200, 128, 72, "float64") for _ in range(5)]
    for step, in_doubt in zip(steps, (0, 1, 2, 4, 7), strict=True):
        step.in_doubt = in_doubt
    return steps


def test_of_a_step_that_is_not_in_doubt_nothing_is_told(library: Libraries) -> None:
    for step in doubted(np.random.default_rng(46)):
        assert not step.wrong(library, KERNEL.name)


@pytest.mark.parametrize("order", ORDERS)
def test_a_row_without_a_place_is_no_number(library: Libraries, order: str) -> None:
    step = spoiled(np.random.default_rng(42))
    assert np.isnan(step.expected()[2, 0, [0, 1, 2, 45]]).all()
    assert not step.wrong(library, KERNEL.name, order)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(library: Libraries, fault: str) -> None:
    rng = np.random.default_rng(43)
    steps = [Step.draw(rng, *shape, "float64") for shape in SHAPES[2:]]
    assert first_complaint([*steps, spoiled(rng), *doubted(rng)], lambda step: step.wrong(library, fault)) != "nothing"


@pytest.mark.parametrize("fault", READS)
def test_nothing_is_read_beyond_an_array(sanitized: Libraries, fault: str) -> None:
    step = Step.draw(np.random.default_rng(44), 390, 384, 256, 128, "float64")
    step.ends[:] = 384
    step.ends[1] = 129 * 128
    step.places[3, step.order1[257]] = -1
    step.order1[256] = 390
    assert not step.wrong(sanitized, KERNEL.name)
    with pytest.raises(KernelFault, match="address error"):
        step.wrong(sanitized, fault)
