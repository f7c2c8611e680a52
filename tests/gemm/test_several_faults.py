"""Two faults in one product: a checksum is hit and an operand changes, or both operands change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from abft_tsm2 import SilentDataCorruptionError, Status, encode, protected_gemm
from tests.support.planting import at, both, pair, put, scale


def product(hook: Any, side: str, encoded: str = "", dtype: Any = np.float64) -> tuple[np.ndarray, Any, np.ndarray]:
    A, B = pair(60, 50, 40, dtype)
    right = A @ B
    E = {"A": A, "B": B} | {name: encode({"A": A, "B": B}[name]) for name in encoded}
    C, report = protected_gemm(E["A"], E["B"], check=side, on_stage=hook, return_report=True)
    return C, report, right


@pytest.mark.parametrize("side", ["rows", "columns"])
@pytest.mark.parametrize("operand", ["A", "B"])
@pytest.mark.parametrize(("checksum", "stage"), [("s", "encoded"), ("t", "encoded"), ("t", "verified")])
def test_a_checksum_that_is_hit_hides_no_operand_that_changes(
    checksum: str, operand: str, stage: str, side: str
) -> None:
    # C is right where the operand changes behind the product: it must not be overwritten with what that gives now.
    seen: dict[str, np.ndarray] = {}

    def hook(reached: str, arrays: Any) -> None:
        seen.update(arrays)
        if reached == stage:
            scale((5, 0), 2)(seen[checksum])
            scale((3, 7), 2)(seen[operand])

    with pytest.raises(SilentDataCorruptionError, match=f"{operand} changed") as caught:
        product(hook, side)
    assert caught.value.report.status is Status.INPUT_CHANGED


@pytest.mark.parametrize("side", ["rows", "columns"])
@pytest.mark.parametrize("checksum", ["s", "t"])
@pytest.mark.parametrize("value", [1e3, np.nan, 0.0])
def test_a_checksum_alone_costs_nothing(checksum: str, value: float, side: str) -> None:
    C, report, right = product(at("encoded", checksum, put((5, 0), value)), side)
    assert report.status is Status.CHECKSUM_FAULT or checksum == "s"  # which is not read again
    assert np.array_equal(C, right)


@pytest.mark.parametrize("check", ["auto", "rows", "columns", "both"])
@pytest.mark.parametrize("encoded", ["A", "B"])
def test_restoring_one_operand_hides_no_change_of_the_other(encoded: str, check: str) -> None:
    hits = both(at("encoded", "B", put((3, 7), 9.0)), at("encoded", "A", put((5, 9), 9.0)))
    other = "AB".replace(encoded, "")
    with pytest.raises(SilentDataCorruptionError, match=f"{other}.* changed") as caught:
        product(hits, check, encoded)
    assert other in {fault.operand for fault in caught.value.report.faults}


@pytest.mark.parametrize("check", ["auto", "rows", "columns", "both"])
@pytest.mark.parametrize("encoded", ["A", "B", "AB"])
def test_what_is_encoded_is_restored(encoded: str, check: str) -> None:
    done: list[str] = []

    def hook(stage: str, arrays: Any) -> None:
        if stage == "encoded" and not done:
            done.append(stage)
            for name in encoded:
                arrays[name][3, 7] = 9.0

    C, report, right = product(hook, check, encoded)
    assert report.status is Status.CORRECTED
    assert {fault.operand for fault in report.faults} == {*encoded}
    assert abs(C - right).max() < 1e-12
