"""`seterr` sets the policy of a context from now on, as numpy.seterr does, and `seterr(**old)` restores it."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import SilentDataCorruptionError, errstate, geterr, protected_gemm, seterr, verify_gemm
from abft_tsm2.policy import DEFAULTS, reports_kept, synchronous


@pytest.fixture(autouse=True)
def _in_a_context_of_its_own() -> Any:
    old = seterr()
    yield
    seterr(**old)
    assert geterr() == dict(DEFAULTS)


def test_it_holds_from_now_on_and_gives_what_was() -> None:
    assert seterr(corrected="raise") == {**DEFAULTS, "sync": True}
    assert geterr() == {**DEFAULTS, "corrected": "raise"}
    old = seterr(unverifiable="ignore", sync=False)
    assert old == {**DEFAULTS, "corrected": "raise", "sync": True}
    assert (geterr()["unverifiable"], synchronous()) == ("ignore", False)
    assert seterr(**old)["sync"] is False
    assert (geterr(), synchronous()) == ({**DEFAULTS, "corrected": "raise"}, True)


def test_products_follow_it() -> None:
    def plant(stage: str, arrays: Any) -> None:
        if stage == "multiplied":
            arrays["C"][1, 2] += 1

    eye = np.eye(4)
    protected_gemm(eye, eye, on_stage=plant)
    seterr(corrected="raise")
    with pytest.raises(SilentDataCorruptionError, match="CORRECTED"):
        protected_gemm(eye, eye, on_stage=plant)
    seterr(uncorrectable="log")
    assert not verify_gemm(eye, eye, 2 * eye).ok


def test_inside_of_a_block_it_holds_to_the_end_of_the_block() -> None:
    seterr(corrected="warn")
    with errstate(checksum_fault="raise"):
        assert seterr(corrected="raise")["corrected"] == "warn"
        assert (geterr()["corrected"], geterr()["checksum_fault"]) == ("raise", "raise")
        with errstate():
            seterr(corrected="ignore")
        assert geterr()["corrected"] == "raise"
    assert (geterr()["corrected"], geterr()["checksum_fault"]) == ("warn", "log")


def test_reports_that_are_kept_stay_so() -> None:
    with reports_kept() as kept:
        seterr(unverifiable="raise")
        protected_gemm(np.eye(2), np.eye(2))
        assert len(kept) == 1
    assert geterr()["unverifiable"] == "warn"


def test_threads_and_copies_of_the_context_have_their_own() -> None:
    found = []
    seterr(corrected="raise")
    thread = threading.Thread(target=lambda: found.append(geterr()["corrected"]))
    thread.start()
    thread.join(60)
    contextvars.copy_context().run(seterr, corrected="ignore")
    assert (found, geterr()["corrected"]) == (["log"], "raise")


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"uncorrectable": "ignore"}, ValueError),
        ({"corrected": "print"}, ValueError),
        ({"all": "raise"}, TypeError),
        ({"sync": 1}, TypeError),
    ],
    ids=str,
)
def test_what_is_refused_changes_nothing(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        seterr(checksum_fault="raise", **wrong)
    assert geterr() == dict(DEFAULTS)
