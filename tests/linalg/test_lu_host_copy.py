"""LU of a matrix in its own memory, as on a GPU: repairs read the copy that is kept on the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import SilentDataCorruptionError, Status, protected_lu_factor
from abft_tsm2.linalg import lu as lu_module
from abft_tsm2.linalg.device.buffers import ALIGNED, leading_dimension
from abft_tsm2.linalg.device.host_copy import HostCopy
from abft_tsm2.policy import errstate
from tests.support import lu_on_cpu
from tests.support.factor_cases import lu_outside
from tests.support.lu_on_cpu import on_card
from tests.support.planting import normal

N, BETWEEN = 300, 7.0  # steps of 128 columns, and one of 44; what lies behind the last row of each column


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch, build_cache: Path) -> Any:
    return lu_on_cpu.install(monkeypatch, build_cache)


def placed(A: np.ndarray, further: int = 0) -> Any:
    """A in columns of whole loads, and of so many more between them."""
    m, n = A.shape
    ld = leading_dimension(m, A.itemsize) + further * ALIGNED // A.itemsize
    memory = np.full((ld, n), BETWEEN, A.dtype, order="F")
    memory[:m] = A
    return on_card(memory[:m])


def factored(a: Any, **options: Any) -> Any:
    options = {"overwrite_a": True, "preserve": "host", "return_report": True, **options}
    return protected_lu_factor(a, **options)


def require_right(a: Any, A: np.ndarray, found: Any) -> None:
    """The factors of A are where a was, and nothing else was written."""
    lu, piv = found
    assert (lu.ctypes.data, lu.strides, lu.shape) == (a.ctypes.data, a.strides, a.shape)
    np.testing.assert_array_equal(piv, linalg.get_lapack_funcs("getrf", (A,))(A)[1])
    assert not lu_outside(np.asarray(lu), np.asarray(piv), A).any()
    columns = a.strides[1] // a.itemsize, a.shape[1] - 1
    memory = np.lib.stride_tricks.as_strided(np.asarray(a), columns, a.strides)
    assert (memory[len(a) :] == BETWEEN).all()


class At:
    """A hook that changes an element of W whenever a stage comes, at most so many times."""

    def __init__(self, stage: str, column: int | None, place: tuple[int, int], value: float, times: int = 1) -> None:
        self.at, self.place, self.value, self.left = (stage, column), place, value, times

    def __call__(self, stage: str, arrays: Mapping[str, Any]) -> None:
        if (stage, arrays["step"][0] if "step" in arrays else None) == self.at and self.left:
            self.left -= 1
            arrays["W"][self.place] = self.value


@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize(
    ("m", "n", "further", "dtype"),
    [(N, N, 0, "float64"), (301, 270, 3, "float32"), (131, 270, 1, "float64"), (N + 1, N, 0, "float32")],
)
def test_factors_take_the_place_of_a(m: int, n: int, further: int, dtype: str, mode: str) -> None:
    A = normal(m, n, dtype=dtype)
    a = placed(A, further)
    found, report = factored(a, mode=mode)
    assert report.status is Status.CLEAN
    require_right(a, A, found)


FAULTS = {
    "a trailing element": (At, ("updated", 0, (250, 280), 37.0), "steps late"),
    "in the first step": (At, ("panel", 0, (290, 100), 0.75), "columns 0 on computed again"),
    "a finished column": (At, ("finished", None, (290, 100), 0.4), "computed again from A"),
    "a finished row": (At, ("finished", None, (100, 290), 4.0), "computed again from A"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_repaired_from_the_copy(name: str) -> None:
    kind, how, repair = FAULTS[name]
    dtype = "float64" if list(FAULTS).index(name) % 2 else "float32"
    hook, A = kind(*how), normal(N, N, dtype=dtype)
    a = placed(A)
    found, report = factored(a, mode="online", on_stage=hook)
    assert not hook.left
    assert report.status is Status.CORRECTED
    assert repair in report.faults[0].repair
    require_right(a, A, found)


def test_repairs_from_what_was_overwritten_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same fault, with a itself in the place of its copy."""

    def alias(self: HostCopy, A: Any) -> None:
        self.memory = self.array = A

    monkeypatch.setattr(HostCopy, "__init__", alias)
    monkeypatch.setattr(HostCopy, "begin", lambda *_: None)
    a = placed(normal(N, N))
    with pytest.raises(SilentDataCorruptionError):
        factored(a, mode="online", on_stage=At("updated", 0, (250, 280), 37.0))


@pytest.mark.parametrize("sync", [True, False])
def test_it_is_factored_again_into_the_same_memory(sync: bool) -> None:
    A = normal(N, N)
    a = placed(A, 2)
    with errstate(sync=sync):
        found, report = factored(a, mode="offline", on_stage=At("factored", None, (250, 280), 37.0))
        assert (report.status is Status.PENDING) != sync
    report = report if sync else report.wait()
    assert report.status is Status.CORRECTED
    assert [fault.repair for fault in report.faults] == ["factored again"]
    require_right(a, A, found)


@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("sync", [True, False])
def test_pivots_are_those_of_the_factors_that_were_made_again(sync: bool, mode: str) -> None:
    A = normal(N, N)
    a = placed(A, 2)
    with errstate(sync=sync):
        found, report = factored(a, mode=mode, on_stage=At("panel", 0, (250, 200), 1e3))  # which is a pivot then
    assert (report if sync else report.wait()).status is Status.CORRECTED
    require_right(a, A, found)


def test_verdicts_that_are_awaited_keep_the_copy() -> None:
    matrices = [normal(150, 150, seed=i) for i in range(2)]
    placed_ones = [placed(A) for A in matrices]
    with errstate(sync=False):
        queued = [factored(a) for a in placed_ones]
    for (found, report), a, A in zip(queued, placed_ones, matrices, strict=True):
        assert report.wait().status is Status.CLEAN
        require_right(a, A, found)


def twice() -> At:
    return At("factored", None, (250, 280), 37.0, times=2)


@pytest.mark.parametrize("sync", [True, False])
def test_what_is_factored_by_steps_at_last_goes_to_the_same_memory(sync: bool) -> None:
    A = normal(N, N)
    a = placed(A)
    with errstate(sync=sync):
        found, report = factored(a, mode="offline", on_stage=twice())
    report = report if sync else report.wait()
    assert report.status is Status.CORRECTED
    require_right(a, A, found)


def no_memory(*_: Any) -> Any:
    raise MemoryError


def test_without_memory_for_the_steps_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lu_module, "copy_by_columns", no_memory)
    with pytest.raises(MemoryError, match=r"\(300, 300\), float64, are wrong, .* takes 0.00072 GB .* a is lost"):
        factored(placed(normal(N, N)), mode="offline", on_stage=twice())


def test_without_memory_for_another_matrix_a_fault_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lu_module, "factored_plainly", no_memory)
    hook = At("factored", None, (250, 280), 37.0)
    a = placed(normal(N, N))
    (lu, _), report = factored(a, mode="offline", on_error="detect", on_stage=hook)
    assert report.status is Status.UNCORRECTABLE
    assert lu.ctypes.data == a.ctypes.data


def test_a_copy_that_has_changed_is_said() -> None:
    fault = At("updated", 0, (250, 280), 37.0)

    def hook(stage: str, arrays: Mapping[str, Any]) -> None:
        fault(stage, arrays)
        if stage == "updated" and arrays["step"][0] == 0:
            arrays["A"][:, 280] = 37.0

    with pytest.raises(SilentDataCorruptionError, match="changed"):
        factored(placed(normal(N, N)), mode="online", on_stage=hook)


def test_a_hook_may_change_a_before_it_is_copied() -> None:
    A = normal(N, N)
    a = placed(A)

    def hook(stage: str, arrays: Mapping[str, Any]) -> None:
        if stage == "inputs":
            arrays["A"][100, 100] = 5.0

    found, report = factored(a, on_stage=hook)
    A[100, 100] = 5.0
    assert report.status is Status.CLEAN
    require_right(a, A, found)


@pytest.mark.parametrize("sync", [True, False])
def test_the_host_memory_is_freed_with_the_call(sync: bool, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, give = [], cupy.cuda.PinnedMemory

    def noted(nbytes: int) -> Any:
        pinned = give(nbytes)
        taken.append((nbytes, weakref.ref(pinned)))
        return pinned

    monkeypatch.setattr(cupy.cuda, "PinnedMemory", noted)
    with errstate(sync=sync):
        found, report = factored(placed(normal(151, 130)))
        ((nbytes, pinned),) = taken
        assert nbytes == 152 * 130 * 8
        assert (pinned() is None) == sync
    assert sync or report.wait().ok
    assert pinned() is None
    del found


# ---- what is refused -------------------------------------------------------------------------------------------------

Make = Callable[[], Any]
REFUSED: dict[str, tuple[Make, dict[str, Any], str]] = {
    "not to be overwritten": (lambda: placed(normal(8, 8)), {"overwrite_a": False}, "pass overwrite_a=True"),
    "an unknown place": (
        lambda: placed(normal(8, 8)),
        {"preserve": "disk"},
        "unknown preserve 'disk': .* device, h",
    ),
    "NumPy's": (lambda: normal(8, 8), {}, "a is a numpy.ndarray, .*: leave it out"),
    "a list": (lambda: [[1.0, 2.0], [3.0, 4.0]], {}, "a is a builtins.list, .*: leave it out"),
    "in rows": (
        lambda: on_card(np.asarray(normal(8, 8), order="C")),
        {},
        r"\(64, 8\) bytes, .* make it as .*\[:8\]",
    ),
    "columns that begin anywhere": (
        lambda: on_card(np.asfortranarray(normal(9, 8))),
        {},
        r"are \(8, 72\) bytes, for shape \(9, 8\), .* cupy.empty\(\(10, 8\), \"float64\", order=\"F\"\)\[:9\]",
    ),
    "a part that begins anywhere": (lambda: placed(normal(9, 8))[1:], {}, "lies 8 bytes beyond"),
    "every second row": (lambda: placed(normal(16, 8))[::2], {}, r"are \(16, 128\) bytes"),
    "one column for all": (
        lambda: np.lib.stride_tricks.as_strided(placed(normal(8, 8)), (8, 8), (8, 0), subok=True),
        {},
        r"are \(8, 0\) bytes",
    ),
    "a stack": (lambda: on_card(np.zeros((2, 8, 8))), {}, r"has 3 dimensions, shape \(2, 8, 8\): pass matrices one by"),
    "a vector": (lambda: on_card(np.zeros(8)), {}, r"has 1 dimensions, shape \(8,\)"),
    "integers": (lambda: placed(np.ones((8, 8), np.int64)), {}, "a is int64: pass float64 or float32"),
    "16 bits": (lambda: placed(np.ones((8, 8), np.float16)), {}, "a is float16: pass float64 or float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_factored_in_place_is_refused(name: str) -> None:
    make, options, message = REFUSED[name]
    a = make()
    before = np.array(a)
    with pytest.raises(ValueError, match=message):
        factored(a, **options)
    np.testing.assert_array_equal(a, before)


def test_host_memory_that_is_not_there_leaves_a_as_it_was(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class CUDARuntimeError(RuntimeError): ...

    def refuse(nbytes: int) -> Any:
        raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")

    cupy.cuda.runtime.CUDARuntimeError = CUDARuntimeError
    monkeypatch.setattr(cupy.cuda, "PinnedMemory", refuse)
    A = normal(201, 300)
    a = placed(A)
    with pytest.raises(MemoryError, match=r"takes 0.000485 GB .* \(201, 300\), float64, .*out of memory.*ulimit -l"):
        factored(a)
    np.testing.assert_array_equal(a, A)


def test_so_does_memory_for_the_checks(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfMemoryError(MemoryError): ...

    def full(*_: Any, **named: Any) -> Any:
        raise OutOfMemoryError

    cupy.cuda.memory = SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
    cupy.cuda.runtime.memGetInfo = lambda: (3_000, 80_000_000_000)
    cupy.get_default_memory_pool = lambda: SimpleNamespace(free_bytes=lambda: 1_000)
    A = normal(200, 300)
    a = placed(A)
    monkeypatch.setattr(cupy, "empty", full)
    with pytest.raises(MemoryError, match=r"needs 7.2e-06 GB beside it on the GPU for the checks of its factors, and"):
        factored(a)
    np.testing.assert_array_equal(a, A)
