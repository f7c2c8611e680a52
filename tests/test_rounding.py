"""benchmarks.rounding where no GPU is: NumPy stands for CuPy, and a cuBLAS behind raw pointers for the library."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from abft_tsm2.arrays import FLOATS
from abft_tsm2.checksum.bounds import DETECT, INPUT, statistical_factor
from benchmarks import gpu_timing, rounding, tables
from benchmarks.rounding import ENGINES, FAMILIES, Cell, Draw, Encoded, Engine, Lines, measure, rounded, widened
from tests.fake_card import Array

BY_NAME = {engine.name: engine for engine in ENGINES}
U = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
NAMES = [(kind, family) for kind in FAMILIES for family in FAMILIES[kind]]


def tf32(x: np.ndarray) -> np.ndarray:
    """To the nearest of TF32, ties away from zero, as cvt.rna does."""
    return ((x.view(np.uint32) + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32)


def computed(engine: Engine, A: Any, B: Any) -> Any:
    """What a good library gives; an emulating engine is the plain one."""
    sums = "float64" if engine.inputs == "float64" else "float32"
    a, b = (widened(x, engine.inputs).astype(sums) for x in (A, B))
    if engine.reduced:
        a, b = tf32(a), tf32(b)
    return rounded((a @ b).astype(np.float64), engine.out)


# ---- operands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "family"), NAMES)
@pytest.mark.parametrize("shape", [(230, 64, 40), (5, 33, 7), (1, 1, 1)])
def test_families_have_the_shape_and_every_type_holds_them_and_their_product(
    kind: str, family: str, shape: tuple[int, int, int]
) -> None:
    m, k, n = shape
    A, B = FAMILIES[kind][family](Draw(3), m, k, n)
    assert (A.shape, B.shape, A.dtype, B.dtype) == ((m, k), (k, n), np.float64, np.float64)
    for name in FLOATS:
        a, b = (widened(rounded(x, name), name) for x in rounding.fitted(A, B, name))
        assert np.isfinite(a).all()
        assert np.isfinite(b).all()
        assert abs(a).any() == abs(A).any()
        assert (abs(a) @ abs(b)).max() < FLOATS[name].largest / 2


def test_the_families_are_twenty_and_named_once() -> None:
    assert len({family for _, family in NAMES}) == len(NAMES) == 20


def test_families_that_cancel_do() -> None:
    for family in ("pairs cancel", "halves cancel"):
        A, B = FAMILIES["structured"][family](Draw(0), 20, 51, 9)
        A[:, 50:] = 0  # of an odd number of terms the last has no partner
        assert abs(A @ B).max() < 0.01 * (abs(A) @ abs(B)).min()


def test_draws_are_uniform_normal_and_spread() -> None:
    draw = Draw(1)
    assert abs(draw.normal(300, 300).std() - 1) < 0.02
    assert 0 <= draw.uniform(300, 300).min() < 1e-3
    decades = np.log10(draw.spread(3, 300, 300))
    assert -3 <= decades.min() < -2.99
    assert 2.99 < decades.max() <= 3


def test_bfloat16_is_rounded_and_widened_as_ml_dtypes_does() -> None:
    x = np.concatenate([np.random.default_rng(0).standard_normal(5000) * 1e5, [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8]])
    expected = x.astype(np.float32).astype(ml_dtypes.bfloat16)
    bits = rounded(x.reshape(4, -1), "bfloat16")
    assert np.array_equal(bits, expected.view(np.uint16).reshape(4, -1))
    assert np.array_equal(widened(bits, "bfloat16"), expected.astype(np.float64).reshape(4, -1))


def test_operands_come_in_rows() -> None:
    x = np.arange(12.0).reshape(3, 4).T
    for name in FLOATS:
        found = rounded(x, name)
        assert found.flags.c_contiguous
        assert np.array_equal(widened(found, name), x)


def test_float16_operands_keep_their_ratios_and_other_types_their_numbers() -> None:
    A, B = np.array([[1e9, 3.0]]), np.array([[2e-7], [5.0]])
    a, b = rounding.fitted(A, B, "float16")
    assert a[0, 0] / a[0, 1] == A[0, 0] / A[0, 1]
    assert math.log2(a[0, 0] / A[0, 0]).is_integer()
    assert math.log2(b[0, 0] / B[0, 0]).is_integer()
    assert (abs(a) @ abs(b)).max() < 2**16
    assert rounding.fitted(A, B, "bfloat16")[0] is A


# ---- the statistics -----------------------------------------------------------------------------------------------


def by_hand(A: Any, B: Any, C: Any, v: Any) -> dict[str, list[float]]:
    """r, P2, P and cn of each row, one sum after another."""
    m, k, n = len(A), len(B), len(C[0])
    rows: dict[str, list[float]] = {"r": [], "P2": [], "P": [], "cn": []}
    q2 = [math.fsum((B[l][j] * v[j]) ** 2 for j in range(n)) for l in range(k)]  # noqa: E741
    for i in range(m):
        found = math.fsum(C[i][j] * v[j] for j in range(n))
        predicted = math.fsum(A[i][l] * math.fsum(B[l][j] * v[j] for j in range(n)) for l in range(k))  # noqa: E741
        rows["r"].append(abs(found - predicted))
        rows["P2"].append(math.sqrt(math.fsum(A[i][l] ** 2 * q2[l] for l in range(k))))  # noqa: E741
        rows["P"].append(math.fsum(abs(A[i][l]) * math.sqrt(q2[l]) for l in range(k)))  # noqa: E741
        rows["cn"].append(math.sqrt(math.fsum((C[i][j] * v[j]) ** 2 for j in range(n))))
    return rows


@pytest.mark.parametrize("engine", ENGINES, ids=[engine.name for engine in ENGINES])
@pytest.mark.parametrize("block", [1 << 30, 8])
def test_measures_of_a_tiny_product_are_those_by_hand(
    engine: Engine, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "BLOCK_BYTES", block)  # all rows at once, or one after another
    rng, (m, k, n) = np.random.default_rng(4), (6, 7, 5)
    A = rounded(64 * rng.standard_normal((m, k)), engine.inputs)  # out of reach of float16's underflow
    B = rounded(rng.standard_normal((k, n)) * np.array([1, 4, 100, 1, 0.1]), engine.inputs)
    a, b = widened(A, engine.inputs), widened(B, engine.inputs)
    unit = U[engine.out] * {16: 2**2, 32: 2**14, 64: 2**36}[FLOATS[engine.out].bits]
    change = unit * rng.standard_normal((m, n)) * np.linalg.norm(b, axis=0)  # known, and large
    C = rounded(a @ b + change, engine.out)
    encoded = Encoded.of(A, B, engine.inputs)
    v = encoded.weights
    found = measure(encoded.lines(C, engine.out), engine)

    # The weights: balanced times powers of two that make the columns alike.
    powers = np.exp2(np.floor(np.log2(abs(v))))
    assert ((abs(v) / powers * 128) % 1 == 0).all()
    sizes = abs(v) * np.linalg.norm(b, axis=0)
    assert sizes.max() / sizes.min() <= 1.5 * 2

    rows = by_hand(a.tolist(), b.tolist(), widened(C, engine.out).tolist(), v.tolist())
    u = U[engine.inputs] if FLOATS[engine.inputs].bits >= 32 else U["float32"]
    largest = [max(pair) for pair in zip(rows["P2"], rows["cn"], strict=True)]

    def ratios(of: list[float], unit: float) -> list[float]:
        return [r / (unit * size) for r, size in zip(rows["r"], of, strict=True)]

    expected = {
        "ratio": max(ratios(largest, u * math.sqrt(k))),
        "ratio_999": max(ratios(largest, u * math.sqrt(k))),
        "linear": max(ratios(rows["P"], u * k)),
    }
    if FLOATS[engine.out].bits == 16:
        expected["stored"] = max(ratios(rows["cn"], U[engine.out]))
    if engine.name == "float32 TF32":
        expected["inputs_11"] = max(ratios(rows["P2"], 2.0**-11))
        expected["inputs_10"] = max(ratios(rows["P2"], 2.0**-10))
    factor = statistical_factor(engine.arithmetic, k, n)
    narrow = 4 * U[engine.out] if FLOATS[engine.out].bits == 16 else 0.0
    tiny = {"float64": 0.0, "float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-14}[engine.out]
    under = (tiny + (k + 2) * 2.0**-126 * (engine.out != "float64")) * abs(v).sum()
    operands = INPUT * 2.0**-11 * engine.reduced
    sizes_of_rows = zip(rows["r"], largest, rows["P2"], rows["cn"], strict=True)
    expected["over_tau"] = max(
        r / (factor * size + operands * P2 + narrow * cn + under) for r, size, P2, cn in sizes_of_rows
    )
    assert set(found) == set(expected)
    for name in found:
        assert found[name] == pytest.approx(expected[name], rel=1e-6), name


@pytest.mark.parametrize("engine", ENGINES, ids=[engine.name for engine in ENGINES])
def test_clean_products_lie_below_the_bound_and_one_wrong_element_above(engine: Engine) -> None:
    draw = Draw(5)
    A, B = (rounded(x, engine.inputs) for x in (draw.normal(70, 90), draw.normal(90, 50)))
    encoded = Encoded.of(A, B, engine.inputs)
    C = computed(engine, A, B)
    found = measure(encoded.lines(C, engine.out), engine)
    assert found["over_tau"] < 1
    if engine.reduced:
        assert 0.01 < found["inputs_11"] < 3
        assert found["inputs_10"] == found["inputs_11"] / 2
    if "stored" in found:
        assert 0.1 < found["stored"] < 4
    wrong = widened(C, engine.out).copy()
    wrong[3, 4] = wrong[3, 4] * 1.5 + 1  # of elements of size 10
    found = measure(encoded.lines(rounded(wrong, engine.out), engine.out), engine)
    assert found["over_tau"] > 1
    for value in (math.nan, math.inf):
        wrong[3, 4] = value
        with np.errstate(over="ignore", invalid="ignore"):
            found = measure(encoded.lines(wrong.astype(np.float64), "float64"), engine)
        assert found["over_tau"] == found["ratio"] == math.inf


def test_rows_in_whose_bound_underflow_takes_part_speak_of_the_bound_alone() -> None:
    sizes = np.array([16.0, 1e-3])  # float16's smallest normal number is a sixteenth of the latter
    found = measure(Lines(16, 4, 5.0, np.full(2, 1e-3), sizes, sizes, sizes), BY_NAME["float16"])
    assert found["stored"] == pytest.approx(1e-3 * 2**11 / 16)
    assert found["over_tau"] == pytest.approx(1e-3 / (4e-3 * 2.0**-11 + 5 * 2.0**-14), rel=0.02)


def test_a_row_of_zeros_is_no_rounding_and_a_change_of_it_infinite() -> None:
    nothing, one = np.zeros(1), np.ones(1)
    assert measure(Lines(4, 4, 4.0, nothing, nothing, nothing, nothing), BY_NAME["float64"])["ratio"] == 0
    assert measure(Lines(4, 4, 4.0, one, nothing, nothing, nothing), BY_NAME["float64"])["over_tau"] > 1


def test_zero_columns_and_rows_are_measured() -> None:
    A, B = np.zeros((3, 4)), np.ones((4, 5))
    B[:, 2] = 0
    A[1] = 1
    encoded = Encoded.of(A, B, "float64")
    assert np.isfinite(encoded.weights).all()
    assert measure(encoded.lines(A @ B, "float64"), BY_NAME["float64"])["over_tau"] < 1


# ---- all products -------------------------------------------------------------------------------------------------


def test_every_family_is_multiplied_by_every_engine() -> None:
    cells = list(rounding.products((30, 40, 20), computed, Draw(0)))
    assert len(cells) == len(NAMES) * len(ENGINES)
    assert all(cell.measured and not cell.note for cell in cells)
    assert {cell.same for cell in cells if cell.engine.plain} == {True}
    assert {cell.same for cell in cells if not cell.engine.plain} == {None}
    assert all(cell.measured["over_tau"] < 1 for cell in cells if cell.kind == "generic")
    emulated = {row["note"] for row in rounding.rows(cells) if row["engine"] == "float32 BF16x9"}
    assert emulated == {"bit for bit the plain product: the library did not emulate"}


def test_errors_are_noted_where_they_happen() -> None:
    def multiply(engine: Engine, A: Any, B: Any) -> Any:
        if engine.name == "float32 BF16x9":
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        if engine.name == "float16":
            raise RuntimeError("an illegal memory access was encountered")
        if engine.name == "bfloat16" and A[0, 0] == A[0, 1]:
            raise ValueError("no constants")
        return computed(engine, A, B)

    cells = list(rounding.products((8, 10, 8), multiply, Draw(0)))
    assert len(cells) == len(NAMES) * len(ENGINES)
    notes = {name: {c.note for c in cells if c.engine.name == name} for name in BY_NAME}
    assert notes["float32 BF16x9"] == {"not offered on this card: RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED"}
    assert notes["float16"] == {"failed: RuntimeError: an illegal memory access was encountered"}
    assert notes["bfloat16"] == {"", "failed: ValueError: no constants"}
    assert notes["float32"] == {""}
    assert not any(cell.measured for cell in cells if cell.note)
    assert not any(cell.failed for cell in cells if cell.engine.name == "float32 BF16x9")
    (row,) = (r for r in rounding.rows(cells) if r["engine"] == "float16" and r["kind"] == "generic")
    assert (row["families"], row["ratio"], row["ratio_family"]) == (0, "", "")
    assert "low rank: failed" in row["note"]


def test_large_float64_products_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "MOST_FLOAT64", 8 * 10 * 8 - 1)
    cells = list(rounding.products((8, 10, 8), computed, Draw(0)))
    left = {cell.engine.name for cell in cells if cell.note.startswith("left out")}
    assert left == {"float64", "float64 fixed-point"}
    assert not any(cell.failed for cell in cells)


def cell(engine: str, kind: str, family: str, k: int, **measured: float) -> Cell:
    return Cell(BY_NAME[engine], (8, k, 8), kind, family, measured)


def test_rows_and_summary_pick_the_worst() -> None:
    cells = [
        cell("float32", "generic", "normal", 16, ratio=1.0, linear=0.3, over_tau=0.2),
        cell("float32", "generic", "sparse", 16, ratio=2.0, linear=0.1, over_tau=0.1),
        cell("float32", "generic", "normal", 64, ratio=1.5, linear=0.1, over_tau=0.4),
        cell("float32", "structured", "sine", 16, ratio=9.0, linear=0.5, over_tau=1.7),
        cell("float16->float32", "generic", "normal", 16, ratio=DETECT + 0.4, linear=0.2, over_tau=0.3),
        cell("float16->float32", "generic", "normal", 64, ratio=DETECT + 0.6, linear=0.2, over_tau=0.3),
        cell("float16", "generic", "normal", 64, ratio=5000.0, linear=2.0, stored=1.2, over_tau=0.3),
        Cell(BY_NAME["float32 BF16x9"], (8, 16, 8), "generic", "normal", note="not offered on this card: no"),
    ]
    first, second, third, *_ = rounding.rows(cells)
    assert (first["m"], first["k"], first["n"], first["kind"], first["families"]) == (8, 16, 8, "generic", 2)
    assert (first["ratio"], first["ratio_family"]) == ("2", "sparse")
    assert (first["linear"], first["linear_family"]) == ("0.3", "normal")
    assert (first["over_tau"], first["over_tau_family"]) == ("0.2", "normal")
    assert (second["k"], third["kind"], third["over_tau"], third["stored"]) == (64, "structured", "1.7", "")

    of = {row["engine"]: row for row in rounding.summarise(cells, {"float32": "exact"}, "a card")}
    assert of["float32"]["ratio, generic"] == "2 (sparse, 8 x 16 x 8)"
    assert of["float32"]["linear"] == "0.5 (sine, 8 x 16 x 8)"
    assert of["float32"]["r / tau, generic"] == "0.4 (normal, 8 x 64 x 8)"
    assert of["float32"]["r / tau, structured"] == "1.7 (sine, 8 x 16 x 8)"
    assert (of["float32"]["DETECT"], of["float32"]["TRUNCATION"], of["float32"]["operands"]) == ("2.00", "", "exact")
    half = of["float16->float32"]
    assert (half["DETECT"], half["TRUNCATION"]) == ("4.60", "0.1000")  # 0.4 / 4 is more than 0.6 / 8
    assert (of["float16"]["DETECT"], of["float16"]["stored"]) == ("", "1.2 (normal, 8 x 64 x 8)")
    assert (of["float16"]["ratio, generic"], of["float16"]["linear"]) == ("", "")
    assert (of["float32 BF16x9"]["DETECT"], of["float32 BF16x9"]["note"]) == ("", "not offered on this card: no")
    assert of["float32"]["measured on"] == "a card"


def test_partly_emulated_says_in_how_many_families() -> None:
    engine = BY_NAME["float32 BF16x9"]
    pair = [Cell(engine, (8, 8, 8), "generic", f"{same}", {"ratio": 1.0}, same) for same in (False, True)]
    (row,) = rounding.rows(pair)
    assert row["note"] == "bit for bit the plain product in 1 of 2 families"


# ---- single elements ----------------------------------------------------------------------------------------------


def test_the_bias_of_an_adder_that_truncates_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "BIAS_SIZE", 24)

    def multiply(engine: Engine, A: Any, B: Any) -> Any:
        if engine.inputs == "float64":
            return A @ B
        if engine.plain:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        a, b = widened(A, engine.inputs), widened(B, engine.inputs)
        total = np.zeros((24, 24))
        for at in range(a.shape[1]):  # one after another, in float32
            exact = total + np.outer(a[:, at], b[at])
            near = exact.astype(np.float32).astype(np.float64)
            down = np.where(near > exact, np.nextafter(near.astype(np.float32), np.float32(0)), near)
            total = down.astype(np.float64) if engine.inputs == "float16" else near
        return rounded(total, engine.out)

    found = {row["engine"]: row for row in rounding.bias(200, multiply, Draw(2))}
    assert set(found) == {e.name for e in ENGINES if FLOATS[e.out].bits > 16}
    near, down = (float(found[name]["mean / u"]) for name in ("float32", "float16->float32"))
    assert abs(near) < 1
    assert -200 < down < -50  # half a unit in the last place, which is between u and 2 u, at most 200 times
    assert float(found["float16->float32"]["mean / (u k)"]) == pytest.approx(down / 200, rel=0.02)
    assert 1e-3 < float(found["float64"]["rms / u"]) < 20
    assert found["float32 BF16x9"]["note"].startswith("not offered")


def test_the_probe_tells_how_operands_are_reduced() -> None:
    x = rounding.probe()
    assert len(np.unique(x)) == x.size == 2**16

    def with_ties(even: bool) -> Any:
        lowest = (x.view(np.uint32) >> 13) & 1
        added = np.uint32(0xFFF) + lowest if even else np.uint32(0x1000)
        return ((x.view(np.uint32) + added) & np.uint32(0xFFFFE000)).view(np.float32)

    assert rounding.kept(x, x) == "exact"
    assert rounding.kept(x, (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)) == "truncated"
    assert rounding.kept(x, with_ties(True)) == "nearest, ties to even"
    assert rounding.kept(x, with_ties(False)) == rounding.kept(x, tf32(x)) == "nearest, ties away"
    assert rounding.kept(x, x * np.float32(0.5)).startswith("otherwise, off by up to 51")
    assert rounding.kept(x, np.full_like(x, np.nan)).startswith("otherwise")


def test_both_operands_are_probed() -> None:
    assert rounding.reduction(BY_NAME["float32"], computed) == "exact"
    assert rounding.reduction(BY_NAME["float32 TF32"], computed) == "nearest, ties away"

    def lopsided(engine: Engine, A: Any, B: Any) -> Any:
        return tf32(A) @ B

    assert rounding.reduction(BY_NAME["float32 TF32"], lopsided) == "A: nearest, ties away; B: exact"


# ---- whole runs ---------------------------------------------------------------------------------------------------


class Strict(Array):
    """An array that, like CuPy's, computes with none of NumPy's and knows no NumPy functions."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        if any(isinstance(x, np.ndarray) and not isinstance(x, Strict) for x in inputs):
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        if out is not None:
            options["out"] = tuple(plain(x) for x in out)
        found = getattr(ufunc, method)(*map(plain, inputs), **options)
        return out[0] if out is not None else strict(found)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        raise TypeError(f"{function.__name__} of NumPy was given an array of CuPy")


def plain(x: Any) -> Any:
    return x.view(np.ndarray) if isinstance(x, Strict) else x


def strict(x: Any) -> Any:
    return x.view(Strict) if isinstance(x, np.ndarray) else x


def lifted(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        return strict(function(*map(plain, arguments), **options))

    return call


REALS = {0: np.float32, 1: np.float64, 2: np.float16, 14: ml_dtypes.bfloat16}  # cudaDataType_t


def gemm_ex(handle: int, *arguments: Any) -> None:
    """Column-major, from raw addresses; TF32 is 77, BF16x9 (78) is not there, and 79 is float64."""
    ta, tb, m, n, k, alpha, a, of_a, lda, b, of_b, ldb, beta, c, of_c, ldc, compute, algorithm = arguments
    assert (handle, ta, tb, algorithm) == (1, 0, 0, -1)
    sums = {68: np.float32, 77: np.float32, 70: np.float64, 79: np.float64}.get(compute)
    if sums is None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    def at(pointer: int, dtype: Any, rows: int, columns: int, lead: int) -> np.ndarray:
        assert lead >= rows
        size = np.dtype(dtype).itemsize
        memory = (ctypes.c_char * (size * lead * columns)).from_address(pointer)
        return np.frombuffer(memory, dtype).reshape(columns, lead)[:, :rows].T

    assert [float(at(x, sums, 1, 1, 1)[0, 0]) for x in (alpha, beta)] == [1, 0]
    A, B = (at(a, REALS[of_a], m, k, lda).astype(sums), at(b, REALS[of_b], k, n, ldb).astype(sums))
    if compute == 77:
        A, B = tf32(np.ascontiguousarray(A)), tf32(np.ascontiguousarray(B))
    at(c, REALS[of_c], m, n, ldc)[...] = (A @ B).astype(REALS[of_c])


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    module: Any = ModuleType("cupy")
    for name in ("float32", "float64", "uint16", "uint32", "uint64"):
        setattr(module, name, getattr(np, name))
    makers = ("zeros", "full", "arange", "asarray", "ascontiguousarray")
    for name in (*makers, "exp", "sin", "cos", "sign", "sqrt", "sort", "rint"):
        setattr(module, name, lifted(getattr(np, name)))
    module.asnumpy = plain

    def default_rng(seed: int) -> Any:
        rng = np.random.default_rng(seed)
        return SimpleNamespace(
            random=lambda size, dtype: strict(rng.random(size, dtype)),
            standard_normal=lambda size, dtype: strict(rng.standard_normal(size, dtype)),
        )

    module.random = SimpleNamespace(default_rng=default_rng)
    module.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)
    module.cuda = SimpleNamespace(device=SimpleNamespace(get_cublas_handle=lambda: 1))
    monkeypatch.setitem(sys.modules, "cupy", module)
    cublas: Any = ModuleType("cupy_backends.cuda.libs.cublas")
    cublas.gemmEx = gemm_ex
    libs: Any = ModuleType("cupy_backends.cuda.libs")
    libs.cublas = cublas
    for name in ("cupy_backends", "cupy_backends.cuda"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, libs.__name__, libs)
    monkeypatch.setitem(sys.modules, cublas.__name__, cublas)
    known = ("device", "driver", "cuda", "cublas", "cupy", "date")
    monkeypatch.setattr(gpu_timing, "environment", lambda: dict.fromkeys(known, "fake"))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setenv("CUBLAS_EMULATION_STRATEGY", "performant")  # what somebody sets stays
    return module


@pytest.mark.parametrize("engine", ENGINES, ids=[engine.name for engine in ENGINES])
def test_cublas_is_asked_for_the_product(engine: Engine, cupy: Any) -> None:
    draw = Draw(0, cupy)
    A, B = (rounded(x, engine.inputs, cupy) for x in (draw.normal(7, 5), draw.normal(5, 3)))
    if engine.compute == 78:
        with pytest.raises(RuntimeError, match="NOT_SUPPORTED"):
            rounding.Cublas()(engine, A, B)
        return
    C = rounding.Cublas()(engine, A, B)
    assert C.shape == (7, 3)
    a, b, c = (plain(widened(x, name, cupy)) for x, name in ((A, engine.inputs), (B, engine.inputs), (C, engine.out)))
    tolerance = 2.0**-9 if engine.reduced else 8 * U[engine.out]
    assert np.allclose(c, a @ b, rtol=tolerance, atol=tolerance)


def test_a_quick_run(cupy: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rounding, "QUICK", ((30, 40, 20), (9, 33, 12)))
    monkeypatch.setattr(rounding, "BIAS_TERMS_QUICK", (16, 48))
    monkeypatch.setattr(rounding, "BIAS_SIZE", 16)
    monkeypatch.setattr(rounding, "BLOCK_BYTES", 2048)
    assert rounding.main(["--quick", "--output", "tried"]) == 0
    output = capsys.readouterr().out
    assert "float64, " not in output
    assert f"{2 * len(NAMES) * (len(ENGINES) - 1)} products, 0 failed" in output

    found = tables.read("tried")
    assert len(found) == 2 * 2 * len(ENGINES)
    assert {row["device"] for row in found} == {"fake"}
    for row in found:
        offered = row["engine"] != "float32 BF16x9"
        assert bool(row["ratio"]) == bool(row["over_tau"]) == offered
        assert bool(row["stored"]) == (row["output"] in ("float16", "bfloat16"))
        assert bool(row["inputs_11"]) == (row["engine"] == "float32 TF32")
        if offered and row["kind"] == "generic":
            assert float(row["over_tau"]) < 1
            assert row["over_tau_family"] in FAMILIES["generic"]
    summary = {row["engine"]: row for row in tables.read("tried_summary")}
    assert list(summary) == list(BY_NAME)
    assert summary["float32 BF16x9"]["note"].startswith("not offered on this card")
    assert summary["float64 fixed-point"]["note"] == "bit for bit the plain product: the library did not emulate"
    assert summary["float32 TF32"]["operands"] == "nearest, ties away"
    assert summary["float32"]["operands"] == "exact"
    assert len(tables.read("tried_bias")) == 2 * len([e for e in ENGINES if FLOATS[e.out].bits > 16])


def test_a_family_that_fails_makes_the_run_fail(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(d: Any, m: int, k: int, n: int) -> Any:
        raise ValueError("no numbers")

    monkeypatch.setattr(rounding, "QUICK", ((9, 12, 8),))
    monkeypatch.setattr(rounding, "BIAS_TERMS_QUICK", (16,))
    monkeypatch.setattr(rounding, "FAMILIES", {"generic": {"normal": FAMILIES["generic"]["normal"], "broken": broken}})
    assert rounding.main(["--quick"]) == 1
    output = capsys.readouterr().out
    assert "float32, broken, 9 x 12 x 8: failed: ValueError: no numbers" in output
    assert all("broken: failed" in row["note"] for row in tables.read("rounding"))
