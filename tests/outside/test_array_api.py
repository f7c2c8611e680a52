"""array-api-tests' own tests of matmul, solve and cholesky hold for the protected functions.

The arrays are array_api_strict's.

Of a checkout, with its submodule, and with what its requirements.txt names installed: the environment variable
ABFT_TSM2_ARRAY_API_TESTS names it. A subprocess runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.outside.borrowed import AS_THEY_ARE, REAL_NUMBERS, checkout

FILES = ("test_linalg", "test_signatures", "test_has_names")
ROOT = Path(__file__).parents[2]
ALL_TYPES = "integers and complex numbers are not supported yet"
FAILS = {
    AS_THEY_ARE: {
        "test_linalg::test_matmul": ALL_TYPES,
        "test_linalg::test_linalg_matmul": ALL_TYPES,
        "test_linalg::test_solve": ALL_TYPES,
        "test_linalg::test_cholesky": ALL_TYPES,
    },
    REAL_NUMBERS: {},
}


@pytest.mark.parametrize("mode", FAILS)
def test_array_api(mode: str, tmp_path: Path) -> None:
    theirs = checkout("ABFT_TSM2_ARRAY_API_TESTS", "github.com/data-apis/array-api-tests")
    results = tmp_path / "results.xml"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "ABFT_TSM2_OUTSIDE_MODE": mode,
        "ARRAY_API_TESTS_MODULE": "exec('from tests.outside.array_api_names import xp')",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    environment.pop("PYTEST_ADDOPTS", None)
    options = ["-p", "no:cacheprovider", "--disable-deadline", "--derandomize", f"--junit-xml={results}"]
    options += ["-W", "ignore", "-W", "error::abft_tsm2.CorruptionWarning"]
    files = [f"array_api_tests/{name}.py" for name in FILES]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-k", "matmul or solve or cholesky", *options, *files],
        cwd=theirs,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert results.exists(), done.stdout + done.stderr
    cases = list(ElementTree.parse(results).iter("testcase"))
    run = {f"{case.attrib['classname'].rpartition('.')[2]}::{case.attrib['name']}": case for case in cases}
    assert run.keys() >= FAILS[AS_THEY_ARE].keys(), done.stdout
    failed = {name for name, case in run.items() if case.find("failure") is not None or case.find("error") is not None}
    assert failed == FAILS[mode].keys(), done.stdout
    assert not any(case.find("skipped") is not None for case in cases), done.stdout
