"""``import abft_tsm2`` is light, and its lazy names are all there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import abft_tsm2

HEAVY = ("numpy", "scipy", "cupy", "array_api_compat", "click", "sklearn", "PIL", "matplotlib", "ml_dtypes")


def loaded_after(statement: str) -> set[str]:
    """Top-level names in sys.modules after a statement, in an interpreter of its own."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_the_package_alone_loads_nothing_heavy():
    assert loaded_after("import abft_tsm2").isdisjoint(HEAVY)


def test_a_product_loads_neither_scipy_nor_cupy():
    code = "import abft_tsm2, numpy as np; abft_tsm2.protected_gemm(np.eye(3), np.eye(3))"
    assert loaded_after(code).isdisjoint({"scipy", "cupy", "click", "sklearn", "PIL", "matplotlib"})


def test_the_look_at_sys_modules_can_fail():
    assert "numpy" in loaded_after("import numpy")


@pytest.mark.parametrize("name", abft_tsm2.__all__)
def test_every_public_name_is_there(name):
    value = getattr(abft_tsm2, name)
    assert name in dir(abft_tsm2)
    if hasattr(value, "__name__"):
        assert value.__name__.rpartition(".")[2] == name
        assert value.__doc__


def test_few_public_names():
    # Products, factorisations, encodings, reports, policy: what a user cannot do without. All else is in the modules.
    assert len([name for name in abft_tsm2.__all__ if not name.startswith("_")]) <= 31


def test_only_public_names_are_listed():
    code = "import abft_tsm2; abft_tsm2.protected_gemm; print(dir(abft_tsm2) == sorted(abft_tsm2.__all__))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "True\n"


def test_a_wrong_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'protected_gem'"):
        abft_tsm2.protected_gem  # noqa: B018
