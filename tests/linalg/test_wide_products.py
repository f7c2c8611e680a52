"""The oracle of factors: products by exact slices are fractions', but for roundings to long double."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy import linalg

from tests.support import wide_products
from tests.support.factor_cases import lu_outside
from tests.support.oracles import exact_product
from tests.support.planting import normal
from tests.support.wide_products import WIDE, wide_moduli, wide_product

UNIT = Fraction(1, 2**63)


def fractions(x: np.ndarray) -> Any:
    """Long doubles as they are: the sum of two float64."""
    high = x.astype(np.float64)
    low = (x - high.astype(WIDE)).astype(np.float64)
    of = np.vectorize(Fraction, otypes=[object])
    return of(high) + of(low)


@pytest.mark.parametrize("spread", ["none", "rows", "elements"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_products_are_those_of_fractions(dtype: str, spread: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_products, "SMALL", 0)
    for m, k, n in ((1, 1, 1), (3, 40, 2), (17, 9, 12)):
        a, b = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype, seed=1)
        b[0] = 0
        shape = {"none": (1, 1), "rows": (m, 1), "elements": (m, k)}[spread]
        a *= (10.0 ** np.random.default_rng(2).integers(-14, 14, shape)).astype(dtype)
        exact, moduli = exact_product(a, b), exact_product(abs(a), abs(b))
        assert (abs(fractions(wide_product(a, b)) - exact) <= 4 * UNIT * moduli).all()
        lower = fractions(wide_moduli(a, b))
        assert (lower <= moduli).all()
        assert (lower >= moduli * (1 - Fraction(1, 10**12))).all()


@pytest.mark.parametrize("special", [np.nan, np.inf, 1e300, 1e-300, 5e-324])
def test_what_slices_do_not_hold_is_multiplied_in_long_double(special: float) -> None:
    a, b = normal(40, 40), normal(40, 40, seed=1)
    a[7, 3] = special
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(wide_product(a, b), a.astype(WIDE) @ b.astype(WIDE))


def test_factors_are_outside_where_one_element_is() -> None:
    a = normal(300, 300)
    lu, piv = linalg.lu_factor(a)
    assert not lu_outside(lu, piv, a).any()
    lu[299, 299] += 1e-9
    assert np.argwhere(lu_outside(lu, piv, a)).tolist() == [[299, 299]]
