"""kernels/repair/repair.cu on the CPU: what it repairs, what it leaves, in every order of execution; and compiled.

Every case meets every order of execution: in one configuration it is run in all of them, in the others in one. A
case is met by a quarter of the configurations, and in the full run by half of them.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from abft_tsm2.checksum.device.kernels import RepairKernel
from abft_tsm2.core.compiler import source
from benchmarks.registers import ARCHITECTURES
from tests.kernels.test_kernels_compile import spilled
from tests.support.both_cases import TYPES
from tests.support.cubins import Cubins, tuned_first
from tests.support.cuda_on_cpu import ORDERS, KernelFault, Library
from tests.support.libraries import Texts, library_of, texts
from tests.support.planting import bits
from tests.support.repair_faults import FAULTS, OF_OPERANDS, Case
from tests.support.repair_model import CAP, UNRESOLVED, Work, judged

KINDS = (
    *(("float32", "float32", ""), ("float64", "float64", ""), ("float16", "float16", "")),
    *(("float16", "float32", "float16"), ("bfloat16", "bfloat16", ""), ("bfloat16", "float32", "bfloat16")),
)
# Each that ships is compiled for one architecture, in turn; where a thread needs most registers, for all of them.
SHIPPED = [
    (RepairKernel(*kind, turned), architecture)
    for number, kind in enumerate(KINDS)
    for turned in (False, True)
    for architecture in (
        ARCHITECTURES
        if kind[0] == "float64" and not turned
        else (ARCHITECTURES[(number + 2 * turned) % len(ARCHITECTURES)],)
    )
]
# Both orders of R with each size of elements, so that each path through the kernel is there.
SANITIZED = (RepairKernel("float32", "float32", t1=64), RepairKernel("float32", "float32", turned=True, t1=64))
WITH_CAST = RepairKernel("float16", "float32", "float16", t1=64)
TURNED = RepairKernel("float64", "float64", turned=True, t1=64)
PLAIN = tuple(
    config
    for config in (
        *(
            WITH_CAST,
            TURNED,
            RepairKernel("float64", "float64"),
            RepairKernel("float16", "float16", turned=True, t1=64),
        ),
        *(
            RepairKernel("bfloat16", "bfloat16", t1=64),
            RepairKernel("bfloat16", "float32", "bfloat16", turned=True, t1=64),
        ),
    )
    if config.dtype in TYPES
)
CONFIGS = (*SANITIZED, *PLAIN)

SLABS = {"k": 300, "n": 150}  # more than a slab of R and a stripe
OF_PRODUCTS = ("products", "most_lines_of_products", "too_many_products")
MOST_LINES, TOO_MANY_LINES = (Case("column", m=m, k=3, n=40) for m in (CAP, CAP + 1))
FAR_COLUMNS = Case("in_a_row", m=6, k=5, n=2500)
MUCH = Case("much_of_a_column", m=300)
UNSEEN, WIDE = Case("unseen_in_a_tile", m=300), Case("unseen_in_a_wide_tile", m=300)
CANCELLING = Case("cancelling", m=300)
OF_EQUAL_TERMS = ("added_otherwise", "fails_no_more")
OTHERWISE, NO_MORE = (Case(fault, k=700, equal=True) for fault in OF_EQUAL_TERMS)
CASES = (
    *(
        Case(fault)
        for fault in FAULTS
        if fault not in (*OF_PRODUCTS, *OF_OPERANDS, "too_many_elements", *OF_EQUAL_TERMS)
    ),
    *(Case(fault, batch=3, shared=shared) for fault in OF_PRODUCTS for shared in (False, True)),
    *(Case(fault, beta=-0.5, alpha=2.0, order="F") for fault in ("clean", "element", "rows", "many_rows", "tile")),
    *(
        Case(fault, **SLABS)
        for fault in ("element", "small", "row", "many_rows", "large_tile", "right_changed", "all_rows")
    ),
    Case("products", batch=3, beta=2.0, order="F", **SLABS),
    *(Case(fault, m=83, n=60) for fault in ("all_rows", "many_rows", "large_tile", "right_changed", "without_words")),
    *(Case("element", m=1, k=k, n=n) for k, n in ((1, 1), (7, 1), (1, 5), (2, 70), (65, 64))),
    Case("element", m=3, k=5, n=2200),
    *(FAR_COLUMNS, CANCELLING, UNSEEN, WIDE, MUCH),
    *(TOO_MANY_LINES, OTHERWISE, NO_MORE),
)
MANY_COLUMNS = Case("row_of_nan", m=3, k=5, n=2200)
TOO_MANY_ELEMENTS = Case("too_many_elements", m=CAP, k=1, n=2049)
names = {"ids": lambda x: getattr(x, "name", x)}


# name: (what is replaced, by what, what is then said, of which case). None: the statement is left out.
RACE, WRONG = "race: |uninitialised", "element|outcome|places"
PLANTED: dict[str, tuple[str, str | None, str, Case]] = {
    "residuals_not_checked": (
        "residual <= tau && tau >= FAINTEST && finite(tau) && norm <= largest",
        "true",
        "the outcome is 1",
        Case("wrong_t_beside"),
    ),
    "lines_without_faults_pass": (
        "!check.fine || !touched",
        "!check.fine",
        "the outcome is 1",
        Case("element_and_nothing"),
    ),
    "elements_not_judged": (
        "what == OUTLIERS && ordinary",
        "false",
        "should stay",
        Case("many_rows"),
    ),
    "operands_not_checked": (
        "(__ldcg(p.state + CHANGED) | __ldcg(p.state + CHANGED_BEFORE)) != 0 ||\n"
        "         (p.right_words != nullptr && __ldcg(p.state + RIGHT_WORDS) != 0)",
        "false",
        "should stay",
        Case("right_changed"),
    ),
    "lines_of_left_not_checked": ("sum != p.left_words[line]", "false", "should stay", Case("left_changed")),
    "last_row_not_checked": ("l < end && stripe == 0", "l < end - 1 && stripe == 0", "flags is 2", Case("element")),
    "words_of_all_stripes": ("l < end && stripe == 0", "l < end", "flags is 2", Case("element", **SLABS)),
    "one_strip_of_lines": ("pieces(lines, columns == 1 ? 1 : SHARE)", "1", WRONG, Case("all_rows", m=83, n=60)),
    "candidates_of_the_first_warp": ("first + warp * (32 * EACH) + lane", "first + lane", WRONG, FAR_COLUMNS),
    "candidates_of_the_first_panel": ("p.groups * pieces(p.n, PANEL)", "p.groups", WRONG, FAR_COLUMNS),
    "columns_of_other_groups": ("p.flagged > p.groups ? p.groups : 0", "0", "the outcome is 2", CANCELLING),
    "outliers_are_no_candidates": (
        "!(__ldcg(z + g * p.n + 32 * i) <= pool[g])",
        "__ldcg(z + g * p.n + 32 * i) > 1e308",
        WRONG,
        Case("small", **SLABS),
    ),
    "order_of_the_list": (
        "other < line || (other == line && x < mine)",
        "x < mine",
        "places",
        Case("large_tile", m=83, n=60),
    ),
    "order_of_the_faults": (
        "other < mine[i]",
        "x < int(threadIdx.x) + i * T1",
        "places",
        Case("many_rows"),
    ),
    "pool_reused_too_early": ("__syncthreads();  // the pool is for", None, f"{RACE}|{WRONG}", Case("large_tile")),
    "panel_read_too_early": (
        "__syncthreads();\n#pragma unroll 1\n    for (int l = 0; l < rows; l += AHEAD)",
        None,
        RACE,
        Case("element"),
    ),
    "no_stamp": ("record[0] = call;", None, "the stamp is", Case("clean")),
    "cast_forgotten": ("p.cast != nullptr", "false", "the cast", Case("element")),
    "any_number_of_lines": ("batch > 1 ? GROUPS : CAP", "batch > 1 ? GROUPS : 1 << 30", "shared", TOO_MANY_LINES),
    "products_in_one_group": ("batch > 1 ? GROUPS : CAP", "CAP", WRONG, Case("too_many_products", batch=3)),
    "any_number_of_faults": ("number >= LOG", "false", "address|overrun", Case("large_tile", m=83, n=60)),
    "words_of_left_needed": (
        "(p.left_words != nullptr ? p.flagged : 0)",
        "p.flagged",
        "address",
        Case("without_words"),
    ),
    "checksums_pass": ("(wrong == 0 && !cleared)", "false", "the outcome is 1", Case("nothing_in_all_lines")),
    "other_orders_not_tried": (
        "excess <= TRUNCATED * p.unit_roundoff * off_in_order(p, line, j)",
        "false",
        "should stay",
        OTHERWISE,
    ),
    "whole_lines_that_hold": ("p.fixed->hits[mine] = 0", "p.fixed->hits[mine] = p.settled", "should stay", NO_MORE),
    "always_right": (
        "__ldcg(p.fixed->candidates + item) == 0",
        "true",
        "the outcome is 3",
        Case("pattern_and_element", m=20, n=2000),
    ),
    "right_by_any_operands": (
        "fabs(now - check.predicted) <= check.tau",
        "true",
        "the outcome is 3",
        Case("swapped_right", m=6, k=300, n=600),
    ),
    "samples_not_looked_at": ("wrong && !complete", "false", "not the product", Case("right_all_along")),
    "nothing_between_lines": ("x % 2 && step > 1", "false", "not the product", UNSEEN),
    "nothing_of_whole_lines": (
        "whole_lines > 1 ? 0 : keys[WHOLE + other]",
        "keys[WHOLE + other]",
        "not the product",
        WIDE,
    ),
    "much_is_not_enough": ("p.m > SHORT && Index(hits) * MUCH >= p.m", "false", "not the product", MUCH),
    "samples_replaced": ("complete ? ALL : NONE", "ALL", "should stay", Case("element")),
    "lines_never_whole": ("__ldcg(p.fixed->hits + place) > 0", "false", "not the product", Case("left_all_over")),
    "entries_forgotten": ("finite(fresh(row + j * p.c_cs))", "true", "the outcome is 2", Case("scattered_nan")),
    "entries_of_changed_left": (
        "__ldcg(p.state + CHANGED_BEFORE) ? 0 : entries_of(p)",
        "entries_of(p)",
        "should stay",
        Case("nan_of_changed_left"),
    ),
    "any_number_of_columns": (
        "p.all && __ldcg(p.fixed->usual + g) > OUTLIER / 2 * noise",
        "false",
        "should stay",
        Case("half_of_all_columns"),
    ),
    "words_of_right_needed": ("p.right_words == nullptr", "false", "address", Case("without_words")),
}


def _planted() -> Texts:
    """One kernel with all of `PLANTED`: word 31 of `state`, which the kernel does not read, says which one counts."""
    text = source(WITH_CAST)
    for number, (name, (old, new, *_)) in enumerate(PLANTED.items(), 1):
        assert text.count(old) == 1, f"{name}: the kernel has not one {old!r} but {text.count(old)}"
        other = f"if (planted != {number}) {old}" if new is None else f"(planted == {number} ? ({new}) : ({old}))"
        text = text.replace(old, other)
    begin = "  after_previous();\n"
    assert text.count(begin) == 1
    text = text.replace(begin, f"  planted = int(state[31]);\n{begin}").replace(WITH_CAST.name, "planted_faults")
    return [("planted_faults", f"static int planted;\n{text}")]


library = library_of(lambda: texts(PLAIN) + _planted())
sanitized = library_of(lambda: texts(SANITIZED), sanitize=True)


def ran(
    library: Library, config: RepairKernel, case: Case, order: str, grid: int = 3, planted: str = ""
) -> tuple[Work, list[str]]:
    work = case.work(config)
    work.state[31] = [*PLANTED].index(planted) + 1 if planted else 0
    name = "planted_faults" if planted else config.name
    return work, judged(work, lambda args: library.run(name, grid, config.t1, args, order=order))


@pytest.mark.parametrize("quarter", [0, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("config", CONFIGS, **names)
def test_every_fault_in_every_order(request: pytest.FixtureRequest, config: RepairKernel, quarter: int) -> None:
    library = request.getfixturevalue("sanitized" if config in SANITIZED else "library")
    for number, case in enumerate(CASES, CONFIGS.index(config)):
        if number % 4 != quarter:
            continue
        left = set()
        for order in ORDERS if number % len(CONFIGS) == quarter else (ORDERS[number // 4 % 3],):
            work, found = ran(library, config, case, order, 1 + number // 4 % 4)
            assert not found, f"{case} {order}: {found}"
            left.add(bits(work.C).tobytes() + work.record.tobytes())
        assert len(left) == 1, str(case)


LIMITS = [(WITH_CAST, MOST_LINES), (TURNED, MOST_LINES), (WITH_CAST, MANY_COLUMNS), (TURNED, TOO_MANY_ELEMENTS)]


@pytest.mark.parametrize(("config", "case"), LIMITS, **names)
def test_as_much_as_there_may_be_and_more(library: Library, config: RepairKernel, case: Case) -> None:
    assert not ran(library, config, case, "random")[1]


def test_more_lines_than_are_repaired_one_by_one(library: Library) -> None:
    left = set()
    for most in (10**6, 4):
        work = Case("many_rows").work(WITH_CAST)
        work.most = most
        assert not judged(work, lambda args: library.run(WITH_CAST.name, 2, WITH_CAST.t1, args))
        assert int(work.record[1]) > 4
        left.add(bits(work.C).tobytes())
    assert len(left) == 1


def test_what_overflows_in_16_bits_stays(library: Library) -> None:
    config = next(config for config in CONFIGS if config.out == "float16")
    work = Case("clean").work(config)
    for x in (work.L, work.exact):
        x[0, 5] *= 4096
    with np.errstate(over="ignore"):
        work.clean[0, 5] = work.C[0, 5] = work.exact[0, 5].astype(np.float16)
    assert np.isinf(work.C[0, 5]).any()
    assert np.isfinite(work.C[0, 5]).any()
    work.words, work.lines, work.outcome = False, [5], UNRESOLVED
    assert not judged(work, lambda args: library.run(config.name, 2, config.t1, args))


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_caught(library: Library, name: str) -> None:
    *_, said, case = PLANTED[name]
    try:
        found = "; ".join(ran(library, WITH_CAST, case, "forward", planted=name)[1])
    except KernelFault as fault:
        found = str(fault)
    assert re.search(said, found), found


@pytest.mark.parametrize(("config", "architecture"), tuned_first(SHIPPED), **names)
def test_it_compiles_without_spills(compiled: Cubins, config: RepairKernel, architecture: str) -> None:
    code, log = compiled(source(config), architecture)
    assert config.name.encode() in code
    assert spilled(log) == 0, log
    assert " 0 bytes stack frame" in log, log
