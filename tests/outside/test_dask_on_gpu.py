"""Dask's own tests of products and of Cholesky on CuPy chunks hold for the protected functions on a card.

Of the installed Dask, or of a checkout that the environment variable ABFT_TSM2_DASK_TESTS names.
"""

from __future__ import annotations

import os

import dask.array as da
import pytest

from tests.outside.borrowed import Swap, checkout, load, swapping
from tests.outside.dask_names import cholesky, dot

pytestmark = pytest.mark.gpu
pytest.importorskip("cupy", exc_type=ImportError)

GIVEN = "ABFT_TSM2_DASK_TESTS"
if os.environ.get(GIVEN):
    path = checkout(GIVEN, "github.com/dask/dask") / "dask/array/tests/test_cupy_linalg.py"
    theirs = load("outside_dask_test_cupy_linalg", path)
else:
    theirs = load("dask.array.tests.test_cupy_linalg")

swapped = swapping(
    (
        theirs,
        {
            "da.dot": Swap(dot, da.dot, integers=False),
            "da.linalg.cholesky": Swap(cholesky, da.linalg.cholesky),
        },
    ),
)

EXPECTED: dict[str, str] = {}
LEFT_OUT = {r"test_(tsqr|sfqr).*ValueError\]": "ends before it multiplies"}

test_tsqr = theirs.test_tsqr
test_sfqr = theirs.test_sfqr
test_cholesky = theirs.test_cholesky
