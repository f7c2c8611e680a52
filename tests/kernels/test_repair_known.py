"""repair.cu on the CPU: operands that change while it repairs, and lines that it repairs and does not name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from abft_tsm2.checksum.device.kernels import RepairKernel
from abft_tsm2.core.compiler import source
from tests.support.cuda_on_cpu import Library
from tests.support.libraries import Texts, library_of
from tests.support.repair_faults import Case
from tests.support.repair_model import CALL, REPAIRED, UNRESOLVED, judged

CONFIGS = (RepairKernel("float32", "float32", t1=64), RepairKernel("float64", "float64", turned=True, t1=64))
CHANGES = {
    "L": "const_cast<A_TYPE*>(p.left(p.line(0)))[0] = A_TYPE(3);",
    "R": "const_cast<A_TYPE*>(p.right(0, p.n - 1))[(p.k - 1) * p.r_rs] = A_TYPE(3);",
    "C0": "*const_cast<C_TYPE*>(p.added(p.line(0), p.n - 1)) = C_TYPE(3);",
    "another line of L": "const_cast<A_TYPE*>(p.left(p.m - 1))[0] = A_TYPE(3);",
    "nothing": "",
}
COMPARED = "      if (stage == KNOWN) compare_known(problem, number, word_sums);\n"


def _texts() -> Texts:
    """Of each configuration a kernel in which an operand changes as stage 8 begins: word 31 of `state` says which of
    CHANGES it is, and 100 more that nothing is compared at the end."""
    found = []
    for config in CONFIGS:
        text = source(config)
        hits = "".join(f"if (planted % 100 == {i}) {{ {code} }}\n" for i, code in enumerate(CHANGES.values()))
        hit = "if (stage == RECOMPUTE && number == 0 && threadIdx.x == 0) {\n"
        hit += f"const Problem& p = problem[0];\n{hits}}}\n__syncthreads();\n"
        begin = "  after_previous();\n"
        assert text.count(COMPARED) == text.count(begin) == 1
        text = text.replace(COMPARED, hit + COMPARED.replace("if (", "if (planted < 100 && "))
        found.append(
            (config.name, "static int planted;\n" + text.replace(begin, f"  planted = int(state[31]);\n{begin}"))
        )
    return found


library = library_of(_texts)


def ran(library: Library, config: RepairKernel, case: Case, change: str, *, compared: bool = True) -> np.ndarray:
    """The record that the kernel leaves."""
    work = case.work(config)
    work.state[31] = [*CHANGES].index(change) + 100 * (not compared)
    library.run(config.name, 3, config.t1, work.arguments(), order="forward")
    assert int(work.record[0]) == CALL
    return work.record


FEW = Case("element", k=300, n=150, beta=-0.5)  # more than a slab of R and a stripe
COMPLETED = Case("much_of_a_column", m=300, k=45, beta=-0.5)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda x: x.name)
@pytest.mark.parametrize(
    ("change", "case"),
    [*((change, FEW) for change in ("L", "R", "C0")), ("another line of L", COMPLETED), ("R", replace(FEW, m=1))],
    ids=str,
)
def test_an_operand_that_changes_after_it_was_compared_is_seen(
    library: Library, config: RepairKernel, change: str, case: Case
) -> None:
    record = ran(library, config, case, change)
    assert int(record[2]) == UNRESOLVED
    assert int(record[7]) & 2
    record = ran(library, config, case, change, compared=False)  # the comparison is what tells
    assert not int(record[7]) & 2


@pytest.mark.parametrize("config", CONFIGS, ids=lambda x: x.name)
@pytest.mark.parametrize(
    "case",
    [
        *(FEW, COMPLETED, Case("products", batch=3, beta=2.0), Case("products", batch=3, shared=True)),
        *(Case("scattered_nan_and_elements"), Case("without_words"), Case("tile", order="F", beta=-0.5)),
    ],
    ids=lambda case: case.fault,
)
def test_operands_that_do_not_change_are_known(library: Library, config: RepairKernel, case: Case) -> None:
    record = ran(library, config, case, "nothing")
    assert int(record[2]) == REPAIRED
    assert not int(record[7]) & 2


PATTERN = Case("pattern", m=20, n=4000)
OTHERS = (Case("pattern_and_element", m=20, n=4000), Case("swapped_left", alpha=3.0), Case("wrong_t", beta=-0.5))
OTHERS += (Case("swapped_right", m=6), Case("swapped_right", m=6, k=300, n=600), Case("swapped_and_column", m=300))


@pytest.mark.parametrize(
    ("config", "case"),
    # In float64 what the kernel computes again is rounded as much, and may look like more than is usual.
    [(CONFIGS[0], PATTERN), (CONFIGS[0], replace(PATTERN, k=300, alpha=-0.5, beta=2.0))]
    + [(config, case) for config in CONFIGS for case in OTHERS],
    ids=lambda x: getattr(x, "name", None) or x.fault,
)
def test_a_line_is_right_by_what_was_encoded_alone(library: Library, config: RepairKernel, case: Case) -> None:
    work = case.work(config)
    work.state[31] = [*CHANGES].index("nothing")
    found = judged(work, lambda arguments: library.run(config.name, 3, config.t1, arguments, order="random"))
    assert not found


def test_where_nothing_is_replaced_nothing_is_compared(library: Library) -> None:
    record = ran(library, CONFIGS[0], Case("wrong_t", k=300, n=150), "R")
    assert not int(record[7]) & 2


@pytest.mark.parametrize("config", CONFIGS, ids=lambda x: x.name)
def test_what_rounding_leaves_of_a_line_that_is_wrong_all_over_is_replaced_and_not_told(
    library: Library, config: RepairKernel
) -> None:
    """An element off by 1.5 sqrt(k) u |L||R|, in a line of which the others are off by far more."""
    case = Case("clean", m=20, k=400, n=90)
    work = case.work(config)
    unit = float(work.checks["arithmetic"].u)
    size = (abs(work.L.astype(np.float64)) @ abs(work.R.astype(np.float64)))[0, 7]
    exact = work.exact[0, 7].astype(np.float64)
    rng = np.random.default_rng(3)
    off = rng.choice([-1, 1], 90) * rng.uniform(3, 8, 90) * np.sqrt(400)
    honest, beyond = slice(10, 15), slice(15, 20)
    off[honest], off[beyond] = 1.5 * np.sqrt(400), 2.5 * np.sqrt(400)
    off[50:53] = 3000 * np.sqrt(400)
    work.C[0, 7] = (exact + off * unit * size).astype(work.C.dtype)
    work.lines = [7]
    work.state[31] = [*CHANGES].index("nothing")
    library.run(config.name, 3, config.t1, work.arguments(), order="forward")
    assert int(work.record[2]) == REPAIRED
    assert (abs(work.C[0, 7] - exact) <= 4 * unit * size).all()
    told = {int(word) >> 32 for word in work.record[8:125].reshape(-1, 3)[: min(39, int(work.record[6])), 0]}
    assert int(work.record[6]) == 85
    assert not told & set(range(10, 15))
    assert set(range(15, 20)) <= told
