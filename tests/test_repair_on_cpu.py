"""kernels/repair.cu on the CPU: what it repairs, what it leaves, in every order of execution; and compiled."""

from __future__ import annotations

import re

import numpy as np
import pytest

from abft_tsm2.core.compiler import source
from benchmarks.registers import ARCHITECTURES, compiled
from tests.cuda_on_cpu import ORDERS, KernelFault, Library
from tests.libraries import library_of, texts
from tests.repair_model import CASES, CONFIGS, UNRESOLVED, Case, RepairConfig, Work, bits, judged

SMALL = CONFIGS[0]
TURNED = next(config for config in CONFIGS if config.turned)
SHIPPED = [RepairConfig(x.dtype, x.out, x.cast, x.turned, 128) for x in CONFIGS]
library = library_of(lambda: texts((*CONFIGS, SHIPPED[0], SHIPPED[-1])))
sanitized = library_of(lambda: texts((SMALL, TURNED)), sanitize=True)
names = {"ids": lambda x: getattr(x, "name", x)}


def ran(
    library: Library, config: RepairConfig, case: Case, order: str, grid: int = 3, name: str = ""
) -> tuple[Work, list[str]]:
    work = case.work(config)
    found = judged(work, lambda args: library.run(name or config.name, grid, config.t1, args, order=order))
    return work, found


@pytest.mark.parametrize("config", [*CONFIGS, SHIPPED[0], SHIPPED[-1]], **names)
def test_every_fault_in_every_order(library: Library, config: RepairConfig) -> None:
    for number, case in enumerate(CASES):
        left: list[tuple[bytes, bytes]] = []
        for order in ORDERS if number % 4 == 0 or config in (SMALL, TURNED) else ORDERS[number % 3 :][:1]:
            work, found = ran(library, config, case, order, 1 + number % 3)
            assert not found, f"{case} {order}: {found}"
            left.append((bits(work.C).tobytes(), work.record.tobytes()))
        assert len(set(left)) == 1, str(case)


@pytest.mark.parametrize("config", [SMALL, TURNED], **names)
def test_under_address_sanitizer(sanitized: Library, config: RepairConfig) -> None:
    for number, case in enumerate(CASES):
        assert not ran(sanitized, config, case, ORDERS[number % 3])[1], str(case)


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


# name: (what is replaced, by what, what is then said)
RACE, WRONG = "race: |uninitialised", "element|outcome|places"
PLANTED = {
    "residuals_not_checked": ("!(residual <= tau && finite(tau)) ||", "", "the outcome is 1"),
    "lines_without_faults_pass": ("|| __ldcg(p.fixed->hits + place) == 0", "", "the outcome is 1"),
    "elements_not_judged": (
        "if (finite(s) && excess <= p.rigorous",
        "if (false && excess <= p.rigorous",
        "should stay",
    ),
    "operands_not_checked": ("if (has_changed(p)) return 0;", "", "should stay"),
    "lines_of_left_not_checked": ("if (threadIdx.x == 0 && sum != p.left_words[line])", "if (false)", "should stay"),
    "last_row_not_checked": ("l < end && stripe == 0", "l < end - 1 && stripe == 0", "flags is 2"),
    "words_of_all_stripes": ("l < end && stripe == 0", "l < end", "flags is 2"),
    "one_strip_of_lines": ("pieces(lines, columns == 1 ? 1 : SHARE)", "1", WRONG),
    "candidates_of_the_first_warp": ("place += w < warp ? of_warp : 0;", "", WRONG),
    "no_candidate_that_is_nan": (
        "!(__ldcg(p.sums + g * p.n + j) <= limit)",
        "__ldcg(p.sums + g * p.n + j) > 1e308",
        WRONG,
    ),
    "order_of_the_list": ("rank += other < line || (other == line && x < mine);", "rank += x < mine;", "places"),
    "order_of_the_faults": (
        "rank += other < line || (other == line && keys[2 * x + 1] < position);",
        "rank += x < mine;",
        "places",
    ),
    "pool_reused_too_early": (
        "  __syncthreads();  // the pool is for sums",
        "  // the pool is for sums",
        RACE + "|" + WRONG,
    ),
    "panel_read_too_early": ("#endif\n    __syncthreads();", "#endif", RACE),
    "stamp_first": ("*static_cast<volatile Bits*>(record) = 1;", "", "the stamp is"),
    "cast_forgotten": ("if (p.cast != nullptr)", "if (false)", "the cast"),
}
WITH_CAST = next(config for config in CONFIGS if config.cast != config.out)


def of(name: str) -> RepairConfig:
    return WITH_CAST if name == "cast_forgotten" else SMALL


def planted(name: str) -> tuple[str, str]:
    text, (old, new, _) = source(of(name)), PLANTED[name]
    assert text.count(old) == 1, f"{name}: the kernel has not one {old!r} but {text.count(old)}"
    return name, text.replace(old, new).replace(of(name).name, name)


faulty = library_of(lambda: [planted(name) for name in PLANTED])


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_caught(faulty: Library, name: str) -> None:
    said: list[str] = []
    for case in CASES:
        try:
            said += ran(faulty, of(name), case, "forward", name=name)[1]
        except KernelFault as fault:
            said.append(str(fault))
    assert re.search(PLANTED[name][2], "; ".join(said)), said


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("config", SHIPPED, **names)
def test_it_compiles_without_spills(config: RepairConfig, architecture: str) -> None:
    code, log = compiled(source(config), architecture)
    assert config.name.encode() in code
    assert " 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log, log
