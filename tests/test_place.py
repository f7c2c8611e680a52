"""Every report names the host and the device that its operation ran on."""

from __future__ import annotations

import json
import multiprocessing
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import abft_tsm2 as ft
from abft_tsm2 import Report, SilentDataCorruptionError
from abft_tsm2.place import DEVICE_VARIABLE, device_name, gpu_name, host_name
from tests.support import cupy_on_cpu
from tests.support.planting import normal

card, cp = cupy_on_cpu.card, cupy_on_cpu.cp
HERE = os.uname().nodename


def places(report: Report) -> set[tuple[str, str]]:
    return {(report.host, report.device)}.union(*map(places, report.products))


def damaged(A: Any) -> Any:
    E = ft.encode(A.copy())
    E.array[1, 2] += 1.0
    return E


A, POSITIVE, LARGE = normal(20, 20), normal(20, 20) @ normal(20, 20).T + np.eye(20), normal(300, 1000)
OPERATIONS: dict[str, Callable[[], Any]] = {
    "small product": lambda: ft.protected_gemm(A, A),
    "small product again": lambda: (ft.protected_gemm(A, A), ft.protected_gemm(A, A)),
    "product": lambda: ft.protected_gemm(LARGE, LARGE.T),
    "product with a hook": lambda: ft.protected_gemm(A, A, on_stage=lambda stage, arrays: None),
    "wrong product": lambda: ft.verify_gemm(A, A, np.zeros((20, 20)), on_error="detect"),
    "batch": lambda: ft.protected_gemm(normal(5, 8, 8), normal(5, 8, 8)),
    "large batch": lambda: ft.protected_gemm(normal(2, 200, 150), normal(2, 150, 200)),
    "no batch": lambda: ft.protected_gemm(normal(0, 8, 8), normal(0, 8, 8)),
    "verified": lambda: ft.verify_gemm(A, A, A @ A),
    "encoded": lambda: ft.encode(A).verify(),
    "restored": lambda: damaged(A).correct(),
    "product of a damaged matrix": lambda: damaged(A) @ A,
    "lu": lambda: ft.protected_lu_factor(A),
    "lu online": lambda: ft.protected_lu_factor(A, mode="online"),
    "lu of nothing": lambda: ft.protected_lu_factor(A[:0]),
    "lus": lambda: ft.protected_lu_factor(np.stack([A, A])),
    "cholesky": lambda: ft.protected_cholesky(POSITIVE),
    "choleskys": lambda: ft.protected_cholesky(np.stack([POSITIVE, POSITIVE])),
    "cholesky of nothing": lambda: ft.protected_cholesky(np.empty((0, 4, 4))),
    "solve": lambda: ft.protected_solve(A, A[0]),
    "solve nothing": lambda: ft.protected_solve(A, A[:, :0]),
    "solves": lambda: ft.protected_solve(np.stack([A, A]), A[0]),
    "no solves": lambda: ft.protected_solve(np.empty((0, 4, 4)), np.ones(4)),
    "lu_solve": lambda: ft.protected_lu_solve(ft.protected_lu_factor(A), A[0]),
    "cho_solve": lambda: ft.protected_cho_solve(ft.protected_cho_factor(POSITIVE), A[0]),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_on_numpy(operation: str) -> None:
    with ft.monitor() as log:
        OPERATIONS[operation]()
    assert len(log)
    assert set().union(*map(places, log)) == {(HERE, "cpu")}


def test_in_json_and_back() -> None:
    _, report = ft.protected_gemm(A, A, return_report=True)
    data = json.loads(report.to_json())
    assert (data["host"], data["device"], data["worker"]) == (HERE, "cpu", "")
    assert Report.from_dict(data) == report
    del data["host"], data["device"]  # of an earlier version: it was not made here
    assert places(Report.from_dict(data)) == {("", "")}


def test_a_batch_of_several_places_names_them_all() -> None:
    one = ft.protected_gemm(A, A, return_report=True)[1]
    others = [replace(one, device=device, host=host) for device, host in (("GPU-1", "b"), ("cpu", "b"))]
    both = Report.merge([one, one, *others], operation="gemm")
    assert (both.host, both.device) == (f"{HERE}, b", "cpu, GPU-1")


# ---- names --------------------------------------------------------------------------------------------------------


def test_names_are_looked_up_once() -> None:
    assert host_name() is host_name()
    assert device_name(A) is device_name(A)


def _named(name: str, connection: Any) -> None:
    os.environ[DEVICE_VARIABLE] = name
    with ft.monitor() as log:
        ft.protected_gemm(A, A)
        ft.protected_lu_factor(A)
    connection.send([report.device for report in log])


def test_a_process_that_was_forked_may_have_a_device_of_another_name() -> None:
    ft.protected_gemm(A, A)
    ft.protected_gemm(A, A)
    for name in ("socket 1", "socket 2"):
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        process = context.Process(target=_named, args=(name, there))
        process.start()
        assert here.poll(60)
        assert here.recv() == [name, name]
        process.join(60)
    assert ft.protected_gemm(A, A, return_report=True)[1].device == "cpu"


def test_a_gpu_has_its_uuid_and_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    identity, calls = uuid.uuid4(), []
    known = {1: {"uuid": identity.bytes}, 2: {}, 3: {"uuid": b"\xf2\x4f"}}  # CuPy's copy ends at a byte that is 0

    def properties(number: int) -> dict[str, Any]:
        calls.append(number)
        return {"name": b"NVIDIA H100 80GB HBM3", **known[number]}

    runtime = SimpleNamespace(getDeviceProperties=properties, deviceGetPCIBusId=lambda number: f"0000:3{number}:00.0")
    monkeypatch.setitem(__import__("sys").modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    gpu_name.cache_clear()
    try:
        assert [gpu_name(1) for _ in range(3)] == [f"GPU-{identity} (NVIDIA H100 80GB HBM3)"] * 3
        assert [gpu_name(number) for number in (2, 3)] == [
            f"GPU 0000:3{number}:00.0 (NVIDIA H100 80GB HBM3)" for number in (2, 3)
        ]
        assert calls == [1, 2, 3]
    finally:
        gpu_name.cache_clear()


# ---- on a GPU -----------------------------------------------------------------------------------------------------


def on_a_gpu(cp: Any) -> dict[str, Callable[[], Any]]:
    rng = np.random.default_rng(0)
    x, y, stack = (cp.asarray(rng.standard_normal(s).astype(np.float32)) for s in ((60, 50), (50, 70), (3, 60, 50)))
    wrong = {"on_stage": lambda stage, arrays: arrays["C"].__setitem__((3, 5), 1e4) if stage == "multiplied" else None}

    def later() -> None:
        with ft.errstate(sync=False):
            report = ft.protected_gemm(x, y, return_report=True)[1]
            assert places(report) == {(HERE, gpu_name(0))}
            report.wait()

    def changed() -> None:
        def change(stage: str, arrays: Any) -> None:
            if stage == "multiplied":
                arrays["A"] = x
                x[1] = 7.0

        ft.protected_gemm(x, y, on_stage=change)

    return {
        "product": lambda: ft.protected_gemm(x, y),
        "product again": lambda: (ft.protected_gemm(x, y), ft.protected_gemm(x, y)),
        "repaired": lambda: ft.protected_gemm(x, y, **wrong),
        "batch": lambda: ft.protected_gemm(stack, y),
        "pending": later,
        "operand changed": changed,
        "verified": lambda: ft.verify_gemm(x, y, ft.protected_gemm(x, y)),
        "encoded": lambda: ft.protected_gemm(x, ft.encode(y)),
        "stored": lambda: ft.encode(x).verify(),
    }


@pytest.mark.parametrize("operation", ["product", "product again", "repaired", "batch", "pending", "encoded", "stored"])
def test_kernels_on_the_cpu(operation: str, cp: Any) -> None:
    with ft.monitor() as log:
        on_a_gpu(cp)[operation]()
    assert len(log)
    assert set().union(*map(places, log)) == {(HERE, gpu_name(0))}
    assert gpu_name(0).startswith("GPU")


@pytest.mark.gpu
def test_on_a_card() -> None:
    cupy = pytest.importorskip("cupy")
    square = cupy.asarray(POSITIVE)
    more: dict[str, Callable[[], Any]] = {
        "lu": lambda: ft.protected_lu_factor(square),
        "cholesky": lambda: ft.protected_cholesky(square),
        "solve": lambda: ft.protected_solve(square, square[0]),
        "lu_solve": lambda: ft.protected_lu_solve(ft.protected_lu_factor(square), square[0]),
        "cho_solve": lambda: ft.protected_cho_solve(ft.protected_cho_factor(square), square[0]),
    }
    for name, operation in (on_a_gpu(cupy) | more).items():
        with ft.monitor() as log, suppress(SilentDataCorruptionError):
            operation()
        assert set().union(*map(places, log)) == {(HERE, gpu_name(0))}, name
    assert gpu_name(0).startswith("GPU")
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    assert name in gpu_name(0)
