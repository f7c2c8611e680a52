"""What benchmarks.rounding measures of a product, against the same by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from abft_tsm2.arrays import FLOATS
from abft_tsm2.checksum.bounds import INPUT, statistical_factor
from benchmarks.rounding import lines as rounding_lines
from benchmarks.rounding.engines import ENGINES, Engine
from benchmarks.rounding.lines import Encoded, Lines, measure
from benchmarks.rounding.operands import Draw, rounded, widened
from tests.support.rounding_library import computed

BY_NAME = {engine.name: engine for engine in ENGINES}
U = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


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
    monkeypatch.setattr(rounding_lines, "BLOCK_BYTES", block)  # all rows at once, or one after another
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
    assert ((abs(v) / powers * 2**23) % 1 == 0).all()
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
