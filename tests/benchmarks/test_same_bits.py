"""The gate `benchmarks.regress.same_bits`: the same lines in every run, other lines where a result is another, an exit
code where a procedure is not reached, and operands that no two cases have in common."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from abft_tsm2 import protected_gemm
from benchmarks.regress import on_device, products, same_bits
from benchmarks.regress.changes import Fault
from benchmarks.regress.lines import Case, run
from tests.support.gate_on_cpu import StandIns

ROOT = Path(__file__).parents[2]
FAULT = Fault("multiplied", "C", "element")


def gate(*arguments: str, seed: str = "0") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.regress.same_bits", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_two_runs_agree_whatever_the_hash_seed() -> None:
    first, second = (gate("--sample", "150", "--only", "factorisations", seed=seed) for seed in ("1", "2"))
    assert first.returncode == second.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert sum(not line.startswith("#") for line in first.stdout.splitlines()) > 20


@pytest.mark.parametrize(("required", "code"), [("LU offline", 0), ("LU offline:row", 1), ("stack", 1)])
def test_a_procedure_or_repair_that_no_case_reaches_fails_the_gate(
    required: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options = same_bits.parser().parse_args(["--sample", "150", "--only", "factorisations", "--require", required])
    assert same_bits.print_all(options) == code
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# required")]
    assert said == [f"# required, and reached by no case: {required.replace(':', ', ')}"] * code


def one(call: Any, planter: Any = None) -> Case:
    return Case("one", products.pair(20, 30, 10, "float64"), call, planter)


def test_a_changed_bit_changes_the_lines_of_its_product_alone() -> None:
    checked = lambda A, B: protected_gemm(A, B, on_error="detect", return_report=True)  # noqa: E731
    clean, wrong = run(one(checked)), run(one(checked, FAULT.planter))
    for part in ("result", "report"):
        assert word_after(part, clean.line) != word_after(part, wrong.line)
    assert word_after("operands", clean.line) == word_after("operands", wrong.line)
    others = [case for case in products.policies() if case.name.startswith("errstate ignore raise")]
    lines = [run(case).line for case in others]
    again = [
        run(Case(**{**vars(case), "planter": FAULT.planter}) if i == 0 else case).line for i, case in enumerate(others)
    ]
    assert [i for i, (x, y) in enumerate(zip(lines, again, strict=True)) if x != y] == [0]


def word_after(word: str, line: str) -> str:
    return line.partition(f" {word} ")[2].partition(",")[0]


def test_operands_are_fresh() -> None:
    some = [case for case in products.cases() if same_bits.is_chosen(case.name, 16)][:40]
    assert len(some) == 40
    for case in some:
        assert run(case).line == run(case).line
        for x, y in zip(case.operands(), case.operands(), strict=True):
            assert x is not y


def test_names_of_cases_are_unique() -> None:
    names = [case.name for case in products.cases()]
    assert len(set(names)) == len(names)


def test_launches_are_recorded_by_name(build_cache: Path) -> None:
    found = []
    for _ in range(2):  # each time of a package that has not seen the product
        with StandIns(build_cache).cupy("products") as cupy:
            two = lambda cupy=cupy: tuple(map(cupy.asarray, products.pair(60, 50, 70, "float32")()))  # noqa: E731
            call = lambda A, B: protected_gemm(A, B, return_report=True)  # noqa: E731
            for case in on_device.with_launches([Case("product", two, call)]):
                found.append((run(case).line, list(case.details())))
    (line, launches), again = found
    assert again == (line, launches)
    assert "CLEAN" in line
    assert launches
    assert all(" grid (" in one and "=" in one and "#0=" not in one for one in launches)
    assert any("@0" in one for one in launches)
