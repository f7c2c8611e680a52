"""Small NumPy products of encoded operands: the short procedure finds, repairs and reports what the full one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from abft_tsm2 import encode, protected_gemm
from abft_tsm2.checksum.encoded import Encoded
from abft_tsm2.gemm import host, small
from tests.support.planting import bits, pair
from tests.support.short_way import fully, told

DTYPES = [np.dtype(name) for name in ("float64", "float32", "float16", ml_dtypes.bfloat16)]
ENCODED: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "A": lambda A, B: (encode(A, "columns"), B),
    "B": lambda A, B: (A, encode(B, "rows")),
    "A and B": lambda A, B: (encode(A), encode(B, repair=True)),
    "of another side": lambda A, B: (A, encode(B, "columns")),
    "not rechecked": lambda A, B: (A, encode(B, recheck=False)),
    "own weights": lambda A, B: (A, encode(B, "rows", np.linspace(1, 2, B.shape[1]))),
}
DAMAGE: dict[str, Callable[..., None]] = {  # before a product, when it is encoded, and when it is multiplied
    "none": lambda now, A, B, C: None,
    "an element": lambda now, A, B, C: C.__setitem__((3, 4), 99) if now == "multiplied" else None,
    "operands": lambda now, A, B, C: flip(A, B) if now == "before" else None,
    "operands, then": lambda now, A, B, C: flip(A, B) if now == "encoded" else None,
    "sums": lambda now, A, B, C: scale("sums", A, B) if now == "before" else None,
    "weights": lambda now, A, B, C: scale("weights", A, B) if now == "before" else None,
}


def flip(*operands: Any) -> None:
    """Change one element of those that are encoded."""
    for x in operands:
        if isinstance(x, Encoded):
            x.array[1, 2] = 99  # far more than 16 bits round


def scale(field: str, *operands: Any) -> None:
    """Change what those that are encoded carry."""
    for x in operands:
        for side in (x.right, x.left) if isinstance(x, Encoded) else ():
            if side is not None:
                getattr(side, field)[2] *= 1.5


@pytest.mark.parametrize(("dtype", "sizes"), [(x, (16, 16, 16)) for x in DTYPES] + [(x, (72, 520, 90)) for x in DTYPES])
@pytest.mark.parametrize("check", ["auto", "both"])
@pytest.mark.parametrize("which", ENCODED)
@pytest.mark.parametrize("damage", DAMAGE)
def test_encoded_operands_are_those_of_the_full_procedure(
    damage: str, which: str, check: str, dtype: Any, sizes: Any, monkeypatch: pytest.MonkeyPatch, ended: list[bool]
) -> None:
    plain, results = pair(*sizes, dtype=dtype), []
    honest = host.multiply
    for procedure in (protected_gemm, protected_gemm, fully):  # the first of its form, another one
        A, B = ENCODED[which](*(x.copy() for x in plain))
        DAMAGE[damage]("before", A, B, None)
        done: list[int] = []

        def spoiled(*given: Any, A: Any = A, B: Any = B, done: list[int] = done, **options: Any) -> None:
            first = not done
            done.append(1)
            if first:
                DAMAGE[damage]("encoded", A, B, None)
            honest(*given, **options)
            if first:
                DAMAGE[damage]("multiplied", A, B, given[2])

        for steps in (small, host):
            monkeypatch.setattr(steps, "multiply", spoiled)
        C, report = procedure(A, B, check=check, on_error="detect", return_report=True)
        results.append((bits(C), told(report), [bits(x.array) for x in (A, B) if isinstance(x, Encoded)]))
    *short, full = results
    for C, report, operands in short:
        assert report == full[1]
        assert np.array_equal(C, full[0])
        assert all(np.array_equal(x, y) for x, y in zip(operands, full[2], strict=True))
    assert (full[1]["status"] == "CLEAN") == (damage == "none")
    assert len(ended) == 2 * (dtype.itemsize > 2 or sizes[1] < 512)


def test_an_array_that_was_typed_anew_is_refused_in_every_product() -> None:
    A, B = pair(16, 16, 16)
    right = encode(B)
    protected_gemm(A, right)
    B.dtype = np.int64
    with pytest.raises(ValueError, match=r"encoded as .* float64 and is .* int64 now"):
        protected_gemm(A, right)


def test_more_than_one_vector_goes_the_full_way(ended: list[bool]) -> None:
    A, B = pair(16, 16, 16)
    weights = np.stack([np.linspace(1, 2, 16), np.linspace(2, 1, 16)], axis=1)
    protected_gemm(A, encode(B, "rows"))
    assert protected_gemm(A, encode(B, "rows", weights), return_report=True)[1].checks[0].vectors == 2
    assert len(ended) == 1
