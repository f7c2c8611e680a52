"""Reports of a clean batch's products are made when they are asked for: by several threads, or interrupted."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import Report, protected_gemm
from tests.support.nesting import after_calls


def batch(count: int = 3) -> Report:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((count, 8, 8)), np.broadcast_to(np.eye(8), (count, 8, 8))  # exact: all are clean
    report: Report = protected_gemm(a, b, return_report=True)[1]
    return report


USES: dict[str, Callable[[Report], Any]] = {
    "products": lambda report: report.products,
    "str": str,
    "JSON": lambda report: report.to_json(),
    "==": lambda report: report == report,
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("use", USES)
def test_an_interrupt_at_any_call_leaves_the_report_as_it_was(use: str) -> None:
    right, interrupted = batch().to_dict()["products"], 0
    for at in range(10_000):
        report, left = batch(), [at]

        def interrupt(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

        try:
            with after_calls(lambda file: file.endswith("gemm/stack.py"), interrupt):
                USES[use](report)
        except KeyboardInterrupt:
            interrupted += 1
        found = report.to_dict()["products"]
        assert [{**one, "seconds": {}} for one in found] == [{**one, "seconds": {}} for one in right]
        if left[0] >= 0:  # it came to the end
            break
    assert interrupted > 5


def test_threads_that_ask_at_the_same_time_have_the_same_products() -> None:
    for _ in range(20):
        report, barrier = batch(200), threading.Barrier(4)

        def ask(report: Report = report, barrier: threading.Barrier = barrier) -> int:
            barrier.wait(10)
            return len(report.products)

        with ThreadPoolExecutor(4) as pool:
            assert [one.result() for one in [pool.submit(ask) for _ in range(4)]] == [200] * 4
        assert report.products is report.products
