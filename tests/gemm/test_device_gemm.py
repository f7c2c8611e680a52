"""Protected products on a GPU: layouts, types, queues, threads, streams, memory. These need one: ``pytest -m gpu``.

The cases of the CPU's tests run there too: ``pytest --on-gpu tests/gemm/test_gemm.py
tests/checksum/test_decisions.py``."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import abft_tsm2 as ft
from abft_tsm2 import Status
from abft_tsm2.faults.trials.gemm import LAYOUTS
from benchmarks import families
from benchmarks.planting import planted
from tests.core.test_kernels_on_gpu import sanitize
from tests.support.cases import DTYPES
from tests.support.oracles import Exact
from tests.support.sanitized_products import PLANTS

pytestmark = pytest.mark.gpu

NAMES = [dtype.name for dtype in DTYPES]
TYPES = dict(zip(NAMES, DTYPES, strict=True))
SHAPES = ((1, 1, 1), (3, 5, 2), (64, 48, 32), (130, 257, 70), (33, 300, 200), (257, 129, 1000), (512, 512, 512))


def normal(cp: Any, *shape: int, dtype: str = "float32", seed: int = 0) -> Any:
    x = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return cp.asarray(x.astype(TYPES[dtype]))


def wrong(cp: Any, a: Any, b: Any, result: Any, added: Any = None, **scalars: Any) -> bool:
    """Whether any element is outside of the rigorous bound of a product in that type."""
    host = None if added is None else cp.asnumpy(added)
    return bool(Exact.of(cp.asnumpy(a), cp.asnumpy(b), host, **scalars).outside(cp.asnumpy(result)).any())


def ordered(cp: Any, x: Any, order: str) -> Any:
    """The same matrix in another layout."""
    if order == "F":
        return cp.asfortranarray(x)
    if order == "padded":
        memory = cp.full((x.shape[0] + 3, x.shape[1] + 5), np.nan, x.dtype)
        memory[: x.shape[0], : x.shape[1]] = x
        return memory[: x.shape[0], : x.shape[1]]
    return cp.ascontiguousarray(x.T).T if order == "transposed" else x


@pytest.mark.parametrize("check", ["auto", "rows", "columns", "both"])
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_clean_products(cp: Any, shape: tuple[int, int, int], dtype: str, check: str) -> None:
    m, k, n = shape
    a, b = normal(cp, m, k, dtype=dtype), normal(cp, k, n, dtype=dtype, seed=1)
    c, report = ft.protected_gemm(a, b, check=check, return_report=True)
    assert (report.status, report.suspicions) == (Status.CLEAN, 0)
    assert all(0 <= x.closest < 1 and 0 < x.detection_limit < np.inf for x in report.checks)
    assert c.dtype == a.dtype
    assert not wrong(cp, a, b, c)


@pytest.mark.parametrize("check", ["rows", "columns"])
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("orders", [("F", "C"), ("C", "F"), ("F", "F"), ("padded", "transposed"), ("transposed", "C")])
def test_layouts_are_taken_as_they_are(cp: Any, orders: tuple[str, str], dtype: str, check: str) -> None:
    a = ordered(cp, normal(cp, 120, 70, dtype=dtype), orders[0])
    b = ordered(cp, normal(cp, 70, 90, dtype=dtype, seed=1), orders[1])
    c, report = ft.protected_gemm(a, b, check=check, return_report=True)
    assert report.status is Status.CLEAN
    assert not wrong(cp, a, b, c)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_alpha_beta_and_out(cp: Any, dtype: str) -> None:
    a, b, c = (normal(cp, *shape, dtype=dtype, seed=i) for i, shape in enumerate([(60, 50), (50, 40), (60, 40)]))
    kept, out = c.copy(), cp.empty_like(c)
    result, report = ft.protected_gemm(a, b, c, alpha=-0.5, beta=2.0, out=out, return_report=True)
    assert result is out
    assert report.status is Status.CLEAN
    assert not wrong(cp, a, b, out, kept, alpha=-0.5, beta=2.0)
    ft.protected_gemm(a, b, c, alpha=-0.5, beta=2.0, out=c)
    assert not wrong(cp, a, b, c, kept, alpha=-0.5, beta=2.0)


@pytest.mark.parametrize("dtype", NAMES)
def test_batches_and_shared_operands(cp: Any, dtype: str) -> None:
    a, b = normal(cp, 7, 30, 40, dtype=dtype), normal(cp, 7, 40, 50, dtype=dtype, seed=1)
    for left, right in ((a, b), (a[0], b), (a, b[0])):
        c, report = ft.protected_gemm(left, right, return_report=True)
        assert report.status is Status.CLEAN
        assert len(report.products) == 7
        for i in range(7):
            assert not wrong(cp, left if left.ndim == 2 else left[i], right if right.ndim == 2 else right[i], c[i])


@pytest.mark.parametrize("dtype", [name for name in NAMES if name not in ("float64", "float32")])
def test_halves_in_float32(cp: Any, dtype: str) -> None:
    a, b = normal(cp, 130, 257, dtype=dtype), normal(cp, 257, 70, dtype=dtype, seed=1)
    single, coarse = ft.protected_gemm(a, b, out_dtype="float32", return_report=True)
    rounded, fine = ft.protected_gemm(a, b, verify="float32", return_report=True)
    _, stored = ft.protected_gemm(a, b, return_report=True)
    assert single.dtype == np.float32
    assert rounded.dtype == a.dtype
    assert bool((single.astype(a.dtype) == rounded).all())
    assert fine.checks[0].detection_limit < stored.checks[0].detection_limit / 10
    assert coarse.status is fine.status is Status.CLEAN


def test_tf32_has_a_bound_of_its_own(cp: Any) -> None:
    a, b = normal(cp, 300, 400), normal(cp, 400, 500, seed=1)
    _, plain = ft.protected_gemm(a, b, return_report=True)
    _, report = ft.protected_gemm(a, b, precision="tf32", return_report=True)
    assert report.status is Status.CLEAN
    assert report.checks[0].bound > 10 * plain.checks[0].bound
    with pytest.raises(ValueError, match="tf32"):
        ft.protected_gemm(a.astype("float64"), b.astype("float64"), precision="tf32")


FAULTS: dict[str, Callable[[Any], None]] = {
    "element": lambda c: c.__setitem__((3, 5), -3 * c[3, 5] + 20),
    "nan": lambda c: c.__setitem__((3, 5), float("nan")),
    "row": lambda c: c.__setitem__(3, 2 * c[3] + 7),
    "tile": lambda c: c.__setitem__((slice(8, 24), slice(16, 48)), 0),
    "scattered": lambda c: c.__setitem__((slice(0, 130, 17), slice(0, 70, 13)), float("inf")),
}


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_faults_are_repaired_behind_the_product(cp: Any, dtype: str, kind: str, sync: bool) -> None:
    a, b = normal(cp, 130, 257, dtype=dtype), normal(cp, 257, 70, dtype=dtype, seed=1)

    def plant(stage: str, arrays: Any) -> None:
        if stage == "multiplied":
            FAULTS[kind](arrays["C"])

    with ft.errstate(sync=sync):
        c, report = ft.protected_gemm(a, b, return_report=True, on_stage=plant)
    assert report.wait().status is Status.CORRECTED
    assert not wrong(cp, a, b, c)


@pytest.mark.parametrize("stages", [(), ("multiplied",), ("multiplied", "corrected")], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_verified_in_float32_are_rounded_under_a_hook(cp: Any, dtype: str, stages: tuple[str, ...]) -> None:
    a, b = normal(cp, 130, 257, dtype=dtype), normal(cp, 257, 70, dtype=dtype, seed=1)
    expected = ft.protected_gemm(a, b, verify="float32")
    left = list(stages)

    def plant(stage: str, arrays: Any) -> None:
        if stage in left:
            left.remove(stage)
            arrays["C"][3, 5 + len(left)] = 1e4

    out = cp.zeros((130, 70), expected.dtype)
    _, report = ft.protected_gemm(a, b, verify="float32", return_report=True, on_stage=plant, out=out)
    assert report.status is (Status.CORRECTED if stages else Status.CLEAN)
    assert not left
    assert bool((out.astype("float32") == expected.astype("float32")).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("verify", [None, "float32"])
@pytest.mark.parametrize("shape", [(130, 257, 70), (33, 300, 200), (1, 64, 40), (40, 64, 1)], ids=str)
@pytest.mark.parametrize("dtype", NAMES)
def test_products_in_every_order_of_out(
    cp: Any, shape: tuple[int, int, int], dtype: str, verify: str | None, layout: str
) -> None:
    # No hook looks on: kernels round what is checked in float32, line by line.
    m, k, n = shape
    a, b = normal(cp, m, k, dtype=dtype), normal(cp, k, n, dtype=dtype, seed=1)
    for check in ("auto", "rows", "columns", "both"):
        for sync in (True, False, False):  # the third call is served as the one before
            out = LAYOUTS[layout](cp, m, n, a.dtype)
            with ft.errstate(sync=sync):
                c, report = ft.protected_gemm(a, b, out=out, check=check, verify=verify, return_report=True)
            assert report.wait().status is Status.CLEAN
            assert not wrong(cp, a, b, c), (check, sync)
            if out is not None and out.base is not None:  # nothing is written between its elements
                assert int((out.base.astype("float32") != 0).sum()) == int((out.astype("float32") != 0).sum())


@pytest.mark.parametrize("layout", ["strided", "part", "transposed", "negative"])
@pytest.mark.parametrize("shape", [(1, 64, 40), (40, 64, 1), (40, 1, 33), (1, 64, 1)], ids=str)
@pytest.mark.parametrize("dtype", NAMES)
def test_operands_whose_elements_lie_apart(cp: Any, shape: tuple[int, int, int], dtype: str, layout: str) -> None:
    m, k, n = shape
    a, b = normal(cp, m, k, dtype=dtype), normal(cp, k, n, dtype=dtype, seed=1)
    apart = [LAYOUTS[layout](cp, *x.shape, x.dtype) for x in (a, b)]
    for view, x in zip(apart, (a, b), strict=True):
        view.base[...] = 3
        view[...] = x
    for check in ("rows", "columns", "both"):
        c, report = ft.protected_gemm(*apart, check=check, return_report=True)
        assert report.status is Status.CLEAN
        assert not wrong(cp, a, b, c), check


@pytest.mark.parametrize("verify", [None, "float32"])
@pytest.mark.parametrize("layout", ["C", "F", "transposed"])
def test_products_in_every_order_whose_weights_are_taken_again(cp: Any, layout: str, verify: str | None) -> None:
    # Rows of few large elements: a sample misjudges their norms.
    z = np.exp(3 * np.random.default_rng(0).standard_normal((200, 300)))
    a = cp.asarray((z / z.sum(1, keepdims=True)).astype(TYPES["bfloat16"]))
    b = normal(cp, 300, 50, dtype="bfloat16")
    out = LAYOUTS[layout](cp, 200, 50, a.dtype)
    c, report = ft.protected_gemm(a, b, out=out, check="columns", verify=verify, return_report=True)
    assert report.status is Status.CLEAN
    assert not wrong(cp, a, b, c)


@pytest.mark.parametrize("check", ["rows", "columns", "both"])
def test_an_operand_that_is_wrong_while_it_is_multiplied_costs_a_repair(cp: Any, check: str) -> None:
    a, b = normal(cp, 130, 257), normal(cp, 257, 70, seed=1)
    stages, kept = list[str](), a.copy()

    def plant(stage: str, arrays: Any) -> None:
        stages.append(stage)
        if stage == "encoded":
            arrays["A"][3, 5] = 1e3
        if stage == "multiplied":
            a[...] = kept

    c, report = ft.protected_gemm(a, b, check=check, return_report=True, on_stage=plant)
    sides = 2 if check == "both" else 1
    assert stages[: sides + 2] == ["inputs", *["encoded"] * sides, "multiplied"]
    assert report.status is Status.CORRECTED
    assert not wrong(cp, a, b, c)


def test_encoded_weights_and_their_recheck(cp: Any) -> None:
    a, b = normal(cp, 100, 300), normal(cp, 300, 200, seed=1)
    kept = b.copy()
    guarded, trusted = ft.encode(b, side="rows"), ft.encode(b, side="rows", recheck=False)
    for encoded in (guarded, trusted):
        for _ in range(2):
            assert ft.protected_gemm(a, encoded, return_report=True)[1].status is Status.CLEAN
    b[5, 6] += 1e-3  # too little for the check of C, not for that of the bits
    c, report = ft.protected_gemm(a, guarded, return_report=True)
    assert report.status is Status.CORRECTED
    assert {(f.operand, f.rows, f.columns) for f in report.faults} == {("B", (5,), (6,))}
    assert not wrong(cp, a, kept, c)


def test_a_queue_keeps_small_records_only(cp: Any) -> None:
    a, b, out = normal(cp, 256, 256), normal(cp, 256, 256, seed=1), cp.empty((256, 256), np.float32)
    pool = cp.get_default_memory_pool()
    with ft.errstate(sync=False), ft.monitor() as log:
        for _ in range(5):  # until it is a graph, with a workspace of cuBLAS for all of this stream
            ft.protected_gemm(a, b, out=out)
        before = pool.used_bytes()
        for _ in range(1000):
            ft.protected_gemm(a, b, out=out)
        assert log.counts[Status.PENDING] == 1005
        assert pool.used_bytes() - before < 4 << 20
    assert log.counts[Status.CLEAN] == 1005


def test_threads_and_streams(cp: Any) -> None:
    """No thread takes another's workspace, events or scratch memory.

    Four at once, each on its own default stream, on one that it has made, and on a third that two of them share; half
    of the operands and results lie in columns, so that blocks share sums.
    """
    shared = cp.cuda.Stream(non_blocking=True)
    failures: list[str] = []

    def work(number: int) -> None:
        try:
            sizes = [(96 + 32 * number, 200, 640), (64, 1280 + 64 * number, 256)]
            own = shared if number < 2 else cp.cuda.Stream(non_blocking=True)
            streams = [own, cp.cuda.Stream(non_blocking=True), cp.cuda.Stream.ptds]
            reports, products = [], []
            for turn in range(60):
                m, k, n = sizes[turn % 2]
                with streams[turn // 2 % 3], ft.errstate(sync=False):
                    a, b = normal(cp, m, k, seed=turn), normal(cp, k, n, seed=turn + 1)
                    a, order = (a, "F") if (turn + number) % 2 else (cp.asfortranarray(a), "C")
                    out = cp.empty((m, n), a.dtype, order=order)
                    c, report = ft.protected_gemm(a, b, out=out, check="rows", return_report=True)
                    reports.append(report)
                    products.append((a, b, c))
            for report in reports:
                if report.wait().status is not Status.CLEAN:
                    failures.append(str(report.wait()))
            for a, b, c in products[::7]:
                if wrong(cp, a, b, c):
                    failures.append(f"wrong: thread {number}")
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_what_the_device_cannot_settle_is_told_when_it_is_waited_for(cp: Any) -> None:
    a, b = normal(cp, 200, 100), normal(cp, 100, 150, seed=1)
    ones = cp.ones((64, 4096), np.float32), cp.ones((4096, 64), np.float32)
    with ft.errstate(sync=False):
        c, report = ft.protected_gemm(*ones, return_report=True)
    assert report.wait().status is Status.CLEAN
    assert bool((c == 4096).all())
    with ft.errstate(sync=False):
        _, report = ft.protected_gemm(a, b, return_report=True)
    assert report.wait().ok


def test_an_existing_product_is_verified(cp: Any) -> None:
    a, b = normal(cp, 200, 100), normal(cp, 100, 150, seed=1)
    c = a @ b
    assert ft.verify_gemm(a, b, c).status is Status.CLEAN
    c[3, 4] += 100
    kept = c.copy()
    report = ft.verify_gemm(a, b, c, on_error="detect")
    assert report.status is Status.UNCORRECTABLE
    assert bool((c == kept).all())


def test_memory_comes_back(cp: Any) -> None:
    pool = cp.get_default_memory_pool()

    def product(n: int) -> None:
        a, b = normal(cp, n, n), normal(cp, n, n, seed=1)
        with ft.errstate(sync=False):
            reports = [ft.protected_gemm(a, b, return_report=True)[1] for _ in range(5)]
        assert all(report.wait().ok for report in reports)

    product(512)
    gc.collect()
    before = pool.used_bytes()
    for _ in range(5):
        product(512)
    gc.collect()
    assert pool.used_bytes() <= before + (1 << 20)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("batch", [0, 4])
@pytest.mark.parametrize("family", ["rank1const", "rank1pm", "cancel_half", "hilbert", "overflow"])
def test_patterns_of_rounding_are_no_faults(cp: Any, family: str, batch: int, sync: bool) -> None:
    rng = np.random.default_rng(1)
    A, B = (cp.asarray(x) for x in families.operands(family, 64, 4096, 64, rng, np.float32))
    if batch:
        A, B = (cp.stack([x] * batch) for x in (A, B))
    with ft.errstate(sync=sync, unverifiable="ignore"):
        c, report = ft.protected_gemm(A, B, return_report=True)
        assert report.wait().status in (Status.CLEAN, Status.UNVERIFIABLE)
    assert c.shape == (*A.shape[:-1], 64)


@pytest.mark.parametrize("batch", [0, 2048])
@pytest.mark.parametrize("dtype", NAMES)
def test_what_rounding_leaves_of_a_difference_is_no_fault(cp: Any, dtype: str, batch: int) -> None:
    shape = (batch, 16, 16) if batch else (16, 16)
    a, b = normal(cp, *shape, dtype=dtype), normal(cp, *shape, dtype=dtype, seed=1)
    c = ft.protected_gemm(a, b)
    with ft.errstate(sync=False):  # cuBLAS may round a @ b once more before c is subtracted
        _, report = ft.protected_gemm(a, b, c, alpha=-1.0, beta=1.0, return_report=True)
    assert report.wait().status is Status.CLEAN


def test_what_only_the_sharp_check_sees_is_not_forgotten_later(cp: Any) -> None:
    a, b = normal(cp, 200, 300, dtype="float16"), normal(cp, 300, 100, dtype="float16", seed=1)

    def scale(C: Any) -> None:
        C *= 1.01

    with ft.errstate(sync=False, uncorrectable="log", corrected="ignore"), planted(scale):
        _, report = ft.protected_gemm(a, b, verify="float32", return_report=True)
    with ft.errstate(uncorrectable="log"):
        assert report.wait().status is Status.UNCORRECTABLE


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(cp: Any, tool: str) -> None:
    few = ("--dtype", "float32") if tool == "racecheck" else ()
    done = sanitize(tool, *few, module="sanitized_products")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "products" in done.stdout


@pytest.mark.parametrize("plant", PLANTS)
def test_compute_sanitizer_finds_what_is_planted(cp: Any, plant: str) -> None:
    done = sanitize("memcheck", "--plant", plant, module="sanitized_products")
    assert done.returncode == 9, done.stdout + done.stderr


@pytest.mark.parametrize("variable", ["CUPY_TF32", "NVIDIA_TF32_OVERRIDE"])
def test_tf32_by_the_environment_is_no_fault(variable: str) -> None:
    """In a process of its own: the libraries read it once."""
    done = subprocess.run(
        [sys.executable, "-c", _TF32], env={**os.environ, variable: "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["CLEAN"] * 5, done.stdout


_TF32 = """
import cupy, abft_tsm2 as ft
rng = cupy.random.default_rng(0)
a, b = (rng.standard_normal((600, 600), dtype="float32") for _ in range(2))
wide = cupy.empty((1200, 1200), "float32")[::2, ::2]
names = [ft.protected_gemm(a, b, return_report=True)[1].status.name]
names.append(ft.protected_gemm(a, b, out=wide, return_report=True)[1].status.name)
names.append(ft.protected_gemm(a, cupy.stack([b, b]), return_report=True)[1].status.name)
names += [ft.verify_gemm(a, b, a @ b).status.name, ft.verify_gemm(a, b, wide).status.name]
print(*names)
"""


@pytest.mark.parametrize("beta", [0.0, 2.0])
@pytest.mark.parametrize("sync", [True, False])
def test_what_a_product_does_not_read_on_a_card(cp: Any, sync: bool, beta: float) -> None:
    a, b, c = normal(cp, 90, 40), normal(cp, 40, 70, seed=1), normal(cp, 90, 70, seed=2)
    a[3, 4] = b[5, 6] = float("nan")
    with ft.errstate(sync=sync):
        found, report = ft.protected_gemm(a, b, c, alpha=0.0, beta=beta, return_report=True)
        empty, of_empty = ft.protected_gemm(a[:0], b, return_report=True)
        assert (report.wait().status, of_empty.wait().status) == (Status.CLEAN, Status.CLEAN)
    assert bool((found == beta * c).all())
    assert empty.shape == (0, 70)


@pytest.mark.parametrize("inf", [float("inf"), -float("inf")])
def test_an_infinity_that_only_some_orders_give_on_a_card(cp: Any, inf: float) -> None:
    a = cp.asarray(np.tile([1.7e308, 1.7e308, -1.7e308, -1.7e308], (40, 1)))
    with ft.errstate(unverifiable="ignore"):
        report = ft.verify_gemm(a, cp.ones((4, 1)), cp.full((40, 1), inf), on_error="detect")
    assert report.status is Status.UNVERIFIABLE, report


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", ["rows", "columns"])
def test_a_change_beyond_its_limit_is_found(cp: Any, check: str, dtype: Any) -> None:
    rng = np.random.default_rng(3)
    A, B = (rng.standard_normal(shape) for shape in ((150, 200), (200, 260)))
    A[5] *= 30
    A, B = (cp.asarray(X.astype(dtype)) for X in (A, B))
    C, clean = ft.protected_gemm(A, B, check=check, return_report=True)
    for i, j in ((5, 7), (0, 0), (149, 259)):
        limit = clean.limit(i, j)
        assert limit <= clean.checks[0].detection_limit
        wrong = float(C[i, j]) + (1.01 if dtype.itemsize > 2 else 1.1) * limit

        def change(stage: str, arrays: Any, at: tuple[int, int] = (i, j), value: float = wrong) -> None:
            if stage == "multiplied":
                arrays["C"][at] = value

        report = ft.protected_gemm(A, B, check=check, return_report=True, on_stage=change)[1]
        assert report.status is Status.CORRECTED or report.suspicions, (i, j, limit, report)
