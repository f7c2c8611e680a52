"""The shim itself: what CUDA defines comes out as CUDA defines it, and every planted fault is caught and named."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.cuda_on_cpu import ORDERS, BuildError, KernelFault, Library, build, translate
from tests.support.cuda_on_cpu.examples import ADDRESSES, CLEAN, FAULTS, OTHERS, UNSET
from tests.support.libraries import some

THREADS = 64


def kernel(name: str, body: str) -> tuple[str, str]:
    head = f'extern "C" __global__ void __launch_bounds__(64) {name}(const double* x, double* y, long long n) {{\n'
    return name, f"{head}const unsigned t = threadIdx.x;{body}\n}}\n"


def planted(faults: dict[str, tuple[str, str, str, str]]) -> list[tuple[str, str]]:
    texts = []
    for name, (clean, old, new, _) in faults.items():
        assert old in clean, f"{name} replaces nothing"
        texts.append(kernel(name, clean.replace(old, new)))
    return texts


@pytest.fixture(
    scope="module", params=["assembler", *(pytest.param(x, marks=pytest.mark.full) for x in ("ucontext", "sanitized"))]
)
def library(request: pytest.FixtureRequest, build_cache: Path) -> Iterator[Library]:
    kernels = [kernel(*item) for item in CLEAN.items()] + planted(FAULTS) + planted(ADDRESSES)
    made = build(
        kernels, ucontext=request.param == "ucontext", sanitize=request.param == "sanitized", cache=build_cache
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain(build_cache: Path) -> Library:
    """Kernels with parameters of their own."""
    return build(list(OTHERS.items()), cache=build_cache)


def run(library: Library, name: str, *, grid: int = 1, size: int = THREADS, order: str = "forward") -> np.ndarray:
    x = np.arange(1.0, 1 + THREADS)
    y = np.zeros(size)
    library.run(
        name, grid, THREADS, (x, y, THREADS), order=order, seed=3, shared_bytes=1024 if "dynamic" in name else 0
    )
    return y


X = np.arange(1.0, 65.0)
LANES = np.arange(64)


def reference(name: str) -> np.ndarray:
    """What the clean kernels compute."""
    pair = X[::-1][LANES ^ 1]
    source = np.where(LANES % 32 < 30, LANES + 2, LANES)
    return {
        "reversed": X[::-1] + 1,
        "neighbour": X[LANES ^ 1],
        "read_then_write": X[LANES // 32 * 32] - 1,
        "ended": np.where(LANES % 32 < 8, X[(LANES + 32) % 64] + X[LANES ^ 1], 0),
        "halves": X[np.where(LANES % 32 < 16, LANES ^ 3, LANES ^ 5)],
        "dynamic": X[::-1] + 2 * X[LANES ^ 1],
        "vectors": -pair + 10 * pair + 1000 * (4 * source + 6),
        "tickets": np.append(np.full(64, 64), X.sum()),
        "arithmetic": 1 + np.minimum(X, 0.5) + 3,
        "gather": X[(LANES * 7) % 64],
    }[name]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CLEAN)
def test_clean_kernels_pass_and_are_right(library, name, order):
    expected = reference(name)
    assert np.array_equal(run(library, name, size=expected.size, order=order), expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(library, name, order):
    grid, size = (2 if name == "block_before" else 1), (65 if "atomic" in name else 64)
    with pytest.raises(KernelFault, match=f"(?s){FAULTS[name][3]}") as caught:
        run(library, name, grid=grid, size=size, order=order)
    assert name in str(caught.value)
    assert np.array_equal(run(library, "reversed"), reference("reversed"))  # the next kernel is none the worse


@pytest.mark.parametrize("name", some(ADDRESSES, 3))
def test_the_sanitizer_catches_every_wrong_address(build_cache, name):
    library = build(planted({name: ADDRESSES[name]}), sanitize=True, cache=build_cache)
    with pytest.raises(KernelFault, match=f"(?s){ADDRESSES[name][3]}") as caught:
        run(library, name)
    assert re.search(rf"kernel {name}, block \(0, 0, 0\), thread \(\d+, 0, 0\)", str(caught.value))
    assert re.search(rf"{name}:\d+", str(caught.value))
    library.close()


def test_a_missing_barrier_gives_wrong_numbers_in_some_order_even_unwatched(plain):
    wrong = {}
    for name in ("raw", "raw_unsynced"):
        for order in ORDERS:
            y = np.zeros(64)
            plain.run(name, 1, 64, (X.copy(), y), order=order)
            wrong[name, order] = not np.array_equal(y, X[::-1])
    assert not any(wrong["raw", order] for order in ORDERS)
    assert any(wrong["raw_unsynced", order] for order in ORDERS)


@pytest.mark.parametrize("order", ORDERS)
def test_arrays_stay_watched_where_functions_take_them(plain, order):
    y = np.zeros(64)
    plain.run("passed", 1, 64, (X.copy(), y), order=order)
    assert np.array_equal(y, X[::-1])
    with pytest.raises(KernelFault, match=r"(race|uninitialised).* tile\[\d+\].*\(passed_unsynced:2\)"):
        plain.run("passed_unsynced", 1, 64, (X.copy(), y), order=order)


def test_grids_and_blocks_have_three_dimensions(plain):
    y = np.zeros(2 * 3 * 4 * 5 * 3 * 2, np.int64)
    plain.run("volume", (2, 3, 4), (5, 3, 2), (y,))
    bz, by, bx, tz, ty, tx = np.indices((4, 3, 2, 2, 3, 5))
    assert np.array_equal(y, (bx + 10 * by + 100 * bz + 1000 * tx + 10000 * ty + 100000 * tz).ravel())


@pytest.mark.parametrize("width", [1, 2, 8, 32])
@pytest.mark.parametrize("by", [0, 1, 3, 9, 31])
def test_shuffles_have_segments(plain, width, by):
    y = np.zeros(128, np.int32)
    plain.run("shuffles", 1, 32, (y, np.int32(width), np.int32(by)), order="random")
    lane = np.arange(32)
    first = lane // width * width
    up, down, across = lane - by, lane + by, lane ^ by
    assert y[:32].tolist() == (first + by % width).tolist()
    assert y[32:64].tolist() == np.where(up >= first, up, lane).tolist()
    assert y[64:96].tolist() == np.where(down < first + width, down, lane).tolist()
    assert y[96:].tolist() == np.where(across < first + width, across, lane).tolist()


def test_a_lane_that_has_ended_gives_nan(plain):
    y = np.zeros(32, np.float32)
    plain.run("absent", 1, 32, (y,))
    assert np.isnan(y).tolist() == [i == 0 for i in range(32)]
    assert y[2] == 0


def test_a_division_by_zero_ends_the_kernel_only(plain):
    with pytest.raises(KernelFault, match=r"division by zero: kernel divide, .*\(divide:1\)"):
        plain.run("divide", 1, 1, (0, np.zeros(1, np.int64)))
    y = np.zeros(1, np.int64)
    plain.run("divide", 1, 1, (7, y))
    assert y[0] == 14


@pytest.mark.parametrize("name", UNSET)
def test_unset_variables_have_wild_values(plain, name):
    x, y = np.arange(1.0, 5.0), np.zeros(1)
    plain.run(f"unset_{name}", 1, 1, (x, y, np.int32(1)))
    assert abs(y[0]) < 20
    plain.run(f"unset_{name}", 1, 1, (x, y, np.int32(0)))
    assert not abs(y[0]) < 1e16


def test_unset_shared_memory_is_nan_through_raw_pointers(plain):
    y = np.zeros(64)
    plain.run("unset_tile", 1, 64, (y,))
    assert np.isnan(y).all()


@pytest.mark.parametrize("order", ORDERS)
def test_the_last_block_sees_what_all_have_written(plain, order):
    y = np.zeros(1)
    plain.run("last_block", 9, 32, (X[:9].copy(), np.zeros(9), y, np.zeros(1, np.uint32)), order=order)
    assert y[0] == X[:9].sum()


def test_arguments_are_compared_with_the_kernel(plain):
    y = np.zeros(1)
    good = (1.5, np.float32(2), np.int32(3), 4, y)
    plain.run("mixed", 1, 1, good)
    assert y[0] == 10.5
    for number, wrong, text in (
        (0, np.float32(1), "argument 0 of mixed is a float32, the kernel takes a numpy.float64"),
        (1, 2.0, "argument 1 of mixed is a float"),
        (2, 3, "argument 2 of mixed is a int, the kernel takes a numpy.int32"),
        (3, y.copy(), "argument 3 of mixed is a NumPy array"),
        (4, 4, "argument 4 of mixed is a int, the kernel takes a NumPy array"),
    ):
        with pytest.raises(TypeError, match=text):
            plain.run("mixed", 1, 1, (*good[:number], wrong, *good[number + 1 :]))
    with pytest.raises(TypeError, match="mixed takes 5 arguments, not 4"):
        plain.run("mixed", 1, 1, good[:4])
    with pytest.raises(ValueError, match="no kernel 'other'"):
        plain.run("other", 1, 1, ())
    with pytest.raises(ValueError, match=r"grid is \(0,\)"):
        plain.run("mixed", 0, 1, good)
    with pytest.raises(ValueError, match="1056 threads"):
        plain.run("mixed", 1, (33, 32), good)
    with pytest.raises(ValueError, match="order 'backward'"):
        plain.run("mixed", 1, 1, good, order="backward")
    with pytest.raises(ValueError, match="overlap"):
        plain.run("raw", 1, 64, (y, y))


def test_arrays_may_have_strides_of_either_sign(library):
    x, y = np.arange(1.0, 129.0)[::2][::-1], np.zeros((64, 3))[:, 1]
    x = x[::-1]  # contiguous in neither direction, positive again
    memory = np.zeros(192)
    memory[::3] = x
    with pytest.raises(KernelFault):  # the kernel takes its arrays as contiguous: 64 elements reach beyond the view
        library.run("gather", 1, 64, (x, y[:8], 64))
    library.run("gather", 1, 64, (memory[:64], y, 64))
    assert y[0] == memory[0]


def test_a_fault_leaves_the_arrays_as_they_were(library):
    y = np.zeros(THREADS)
    with pytest.raises(KernelFault):
        library.run("written_past", 1, THREADS, (X.copy(), y, THREADS))
    assert not y.any()


def test_messages_say_what_where_and_who(plain, library):
    with pytest.raises(KernelFault) as caught:
        run(library, "missing_second", order="forward")
    pattern = (
        r"race: kernel missing_second, block \(0, 0, 0\), thread \(32, 0, 0\) reads tile\[31\] \(64 elements, "
        r"missing_second:3\), which thread \(31, 0, 0\) wrote with no barrier between the two; its last barrier was "
        r"__syncthreads at missing_second:6 \(missing_second:7\)"
    )
    assert re.fullmatch(pattern, str(caught.value))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mappings are counted on Linux")
def test_kernels_of_all_libraries_run_on_the_same_stacks(build_cache):
    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    def large(name: str) -> None:
        text = kernel(name, " y[t] = x[t];")[1].replace("__launch_bounds__(64)", "__launch_bounds__(1024)")
        x, y = np.arange(1024.0), np.zeros(1024)
        build([(name, text)], cache=build_cache).run(name, 1, 1024, (x, y, 1024))
        np.testing.assert_array_equal(y, x)

    large("first_of_all")
    before = mappings()
    for name in ("second_of_all", "third_of_all"):
        large(name)
    assert mappings() - before < 100


def test_text_is_translated_line_for_line():
    text = """// __shared__ REAL no[1];
/* __shared__ REAL
 neither[2]; */ const char* s = "__shared__ REAL nor[3];";
__shared__ REAL currB[T1 * T2]; extern __shared__ float4 rows[];
INLINE void f(const REAL* __restrict__ currB, int i, REAL *rows) { REAL* other = g(currB) * rows[1]; }
"""
    translated = translate(text)
    assert translated.count("\n") == text.count("\n")
    assert translated.splitlines()[:3] == text.splitlines()[:3]
    assert "static_array<REAL, (T1 * T2)>(currB_declaration)" in translated
    assert "dynamic_array<float4>(rows_declaration)" in translated
    last = translated.splitlines()[4]
    array = "const ::cuda_on_cpu::SharedArray<REAL>"
    assert last == f"INLINE void f({array} currB, int i, {array} rows) {{ REAL* other = g(currB) * rows[1]; }}"
    for unwatchable in ("__shared__ double x;", "__shared__ double a[2], b[2];", "#define S __shared__"):
        with pytest.raises(BuildError, match=r"line 2 declares shared memory .*write `__shared__ T name"):
            translate("\n" + unwatchable)


def test_what_does_not_compile_is_named(build_cache):
    with pytest.raises(BuildError, match=r"g\+\+ fails:\n(?s:.*)broken:2:\d+: error"):
        build([("broken", 'extern "C" __global__ void broken() {\n  undeclared = 1;\n}')], cache=build_cache)
    text = OTHERS["raw"].replace("= &tile[0]", "= tile")
    with pytest.raises(BuildError, match=r"raw:3:.*SharedArray<double>"):  # an array does not lose its watch in silence
        build([("raw", text)], cache=build_cache)
    with pytest.raises(BuildError, match="two kernels of one name"):
        build([("divide", OTHERS["divide"])] * 2, cache=build_cache)


def test_what_was_compiled_is_kept_for_a_week(tmp_path):
    name, text = "divide", OTHERS["divide"]
    first = build([(name, text)], cache=tmp_path)
    files = {path: path.stat().st_ino for path in tmp_path.iterdir()}
    assert build([(name, text)], cache=tmp_path).path == first.path
    assert {path: path.stat().st_ino for path in tmp_path.iterdir()} == files
    os.utime(first.path, (0, 0))
    changed = build([(name, text.replace("100", "200"))], cache=tmp_path)
    assert changed.path != first.path
    assert not first.path.exists()
    y = np.zeros(1, np.int64)
    changed.run(name, 1, 1, (7, y))
    assert y[0] == 28


def test_without_a_compiler_it_says_what_to_install(build_cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"no 'no-such-compiler'.*install g\+\+ 12"):
        build([("divide", OTHERS["divide"])], cache=build_cache)
