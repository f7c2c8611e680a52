"""``abft-tsm2 lu`` and ``solve`` as their users meet them, and the files they read and write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from scipy import io, linalg

from abft_tsm2.io.matrix import members, read_matrix
from abft_tsm2.report import Report, Status
from tests.support.command_line import in_process, new_files, run
from tests.support.factor_cases import lu_outside, solved
from tests.support.planting import normal

N = 90


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("systems")
    A, b, wide = normal(N, N), normal(N), normal(40, N)
    singular = np.eye(N)
    singular[:, 7] = 0
    nan = A.copy()
    nan[61, 4] = np.nan
    for name, array in {
        "A": A,
        "b": b,
        "B": normal(N, 4),
        "column": b[:, None],
        "short": b[:-1],
        "flat": normal(4, N),
        "wide": wide,
        "tall": wide.T,
        "single": A.astype(np.float32),
        "b32": b.astype(np.float32),
        "half": A.astype(np.float16),
        "fortran": np.asfortranarray(A),
        "foreign": A.astype(">f8"),
        "integers": np.rint(9 * A).astype(int),
        "bi": np.arange(N),
        "big": np.full((N, N), 1e300),
        "singular": singular,
        "hilbert": linalg.hilbert(N),
        "nan": nan,
        "bnan": np.where(np.arange(N) == 5, np.inf, b),
        "cube": np.ones((2, 2, 2)),
        "number": np.array(3.0),
        "complex": A + 0j,
        "none": np.empty((0, 0)),
        "no": np.empty(0),
    }.items():
        np.save(folder / f"{name}.npy", array)
    np.savez(folder / "both.npz", x=A, y=b)
    io.mmwrite(folder / "A.mtx", A, precision=17)
    io.mmwrite(folder / "column.mtx", b[:, None], precision=17)
    lu, piv = linalg.lu_factor(A)
    zero = lu.copy()
    zero[6, 6] = 0
    for name, arrays in {
        "scipy": {"lu": lu, "piv": piv, "note": np.ones(3)},
        "oblong": dict(zip(("lu", "piv"), linalg.lu_factor(wide), strict=True)),
        "zero": {"lu": zero, "piv": piv},
        "far": {"lu": lu, "piv": piv + 40},
        "few": {"lu": lu, "piv": piv[1:]},
        "real": {"lu": lu, "piv": piv.astype(float)},
        "alone": {"lu": lu},
    }.items():
        np.savez(folder / f"{name}.npz", **arrays)
    return folder


@pytest.fixture
def here(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path in files.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def report(name: str = "r.json") -> Report:
    data = json.loads(Path(name).read_text())
    jsonschema.Draft202012Validator(Report.schema()).validate(data)
    return Report.from_dict(data)


# ---- round trips --------------------------------------------------------------------------------------------


def test_lu_and_solve_as_processes(here: Path) -> None:
    done = run(here, "lu", "A.npy", "-o", "lu.npz", "--report", "r.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "CLEAN" in done.stdout
    assert "lu.npz was written" in done.stdout
    assert (report().status, report().operation) == (Status.CLEAN, "lu_factor")
    with np.load("lu.npz") as written:
        assert sorted(written) == ["lu", "piv"]
        lu, piv = written["lu"], written["piv"]
    A, b = np.load("A.npy"), np.load("b.npy")
    assert (lu.dtype, piv.dtype) == (np.float64, np.int32)
    assert not lu_outside(lu, piv, A).any()
    np.testing.assert_array_equal(piv, linalg.lu_factor(A)[1])
    assert solved(linalg.lu_solve((lu, piv), b), A, b)

    for first, operation in (("A.npy", "solve"), ("lu.npz", "lu_solve"), ("scipy.npz", "lu_solve")):
        done = run(here, "solve", first, "b.npy", "-o", "x.npy", "--report", "r.json")
        assert (done.returncode, done.stderr) == (0, "")
        assert "x.npy was written" in done.stdout
        assert (report().status, report().operation) == (Status.CLEAN, operation)
        x = np.load("x.npy")
        assert (x.shape, x.dtype) == (b.shape, b.dtype)
        assert solved(x, A, b)
    assert new_files(here) == ["lu.npz", "r.json", "x.npy"]


@pytest.mark.parametrize("mode", ["auto", "online", "offline"])
@pytest.mark.parametrize("a", ["A", "wide", "tall", "fortran", "foreign", "single"])
def test_kinds_of_matrices(here: Path, capsys: pytest.CaptureFixture[str], a: str, mode: str) -> None:
    code, out, err = in_process(capsys, "lu", f"{a}.npy", "-o", "lu.npz", "--mode", mode, "-q")
    assert (code, out, err) == (0, "", "")
    A = np.load(f"{a}.npy")
    with np.load("lu.npz") as written:
        assert written["lu"].dtype == A.dtype.newbyteorder("=")
        assert not lu_outside(written["lu"], written["piv"], A.astype(written["lu"].dtype)).any()


@pytest.mark.parametrize(
    ("a", "b", "options", "dtype"),
    [
        ("A.npy", "b.npy", [], "float64"),
        ("A.npy", "column.npy", [], "float64"),
        ("A.npy", "B.npy", [], "float64"),
        ("A.npy", "b.npy", ["--refine"], "float64"),
        ("A.npy", "B.npy", ["--mode", "online", "--refine"], "float64"),
        ("A.npy", "B.npy", ["--mode", "offline"], "float64"),
        ("single.npy", "b32.npy", [], "float32"),
        ("single.npy", "b.npy", [], "float64"),
        ("A.npy", "b32.npy", [], "float64"),
        ("A.npy", "b.npy", ["--dtype", "float32"], "float32"),
        ("half.npy", "b32.npy", [], "float64"),
        ("integers.npy", "bi.npy", ["--dtype", "float64"], "float64"),
        ("foreign.npy", "b.npy", [], "float64"),
        ("both.npz:x", "both.npz:y", [], "float64"),
        ("A.mtx", "column.mtx", [], "float64"),
        ("scipy.npz", "b.npy", [], "float64"),
        ("scipy.npz", "B.npy", ["--dtype", "float32"], "float32"),
    ],
)
def test_kinds_of_systems(
    here: Path, capsys: pytest.CaptureFixture[str], a: str, b: str, options: list[str], dtype: str
) -> None:
    assert in_process(capsys, "solve", a, b, "-o", "x.npy", "-q", *options) == (0, "", "")
    x, right = np.load("x.npy"), "b.npy" if ":" in b else b.replace(".mtx", ".npy")
    left = "A.npy" if a in ("both.npz:x", "A.mtx", "scipy.npz") else a
    assert x.dtype == dtype
    assert x.shape == np.load(right).shape
    assert solved(x, np.load(left).astype(dtype), np.load(right).astype(dtype))


@pytest.mark.parametrize("name", ["x.npz", "x.mtx", "x.mtx.gz"])
def test_solutions_in_other_formats(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert in_process(capsys, "solve", "A.npy", "B.npy", "-o", name, "-q") == (0, "", "")
    assert solved(read_matrix(name), np.load("A.npy"), np.load("B.npy"))
    code, _, err = in_process(capsys, "solve", "A.npy", "b.npy", "-o", name, "-q")
    assert code == (0 if name == "x.npz" else 2)
    assert code == 0 or "Matrix Market has no vectors; name a .npy file" in err


def test_systems_without_equations(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process(capsys, "lu", "none.npy", "-o", "lu.npz", "-q") == (0, "", "")
    for a in ("none.npy", "lu.npz"):
        assert in_process(capsys, "solve", a, "no.npy", "-o", "x.npy", "-q") == (0, "", "")
        assert np.load("x.npy").shape == (0,)


def test_what_was_there_is_replaced_whole(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("lu.npz").write_bytes(b"before")
    assert in_process(capsys, "lu", "singular.npy", "-o", "no/lu.npz", "-q")[0] == 2
    assert Path("lu.npz").read_bytes() == b"before"
    assert in_process(capsys, "lu", "A.npy", "-o", "lu.npz", "-q")[0] == 0
    assert members("lu.npz") == ["lu", "piv"]


# ---- singular, and nearly -----------------------------------------------------------------------------------


def test_the_factors_of_a_singular_matrix_are_written_with_a_word(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = in_process(capsys, "lu", "singular.npy", "-o", "lu.npz", "-q")
    assert code == 0
    assert err == "Warning: singular.npy: Diagonal number 8 is exactly zero. Singular matrix.\n"
    assert not lu_outside(*(np.load("lu.npz")[name] for name in ("lu", "piv")), np.load("singular.npy")).any()
    code, _, err = in_process(capsys, "solve", "lu.npz", "b.npy", "-o", "x.npy")
    assert code == 2
    assert err.startswith("Error: lu.npz is singular (diagonal number 8 of U is zero): ")
    assert new_files(here) == ["lu.npz"]


@pytest.mark.parametrize("mode", ["auto", "online", "offline"])
def test_a_singular_system_is_2(here: Path, capsys: pytest.CaptureFixture[str], mode: str) -> None:
    code, out, err = in_process(capsys, "solve", "singular.npy", "b.npy", "-o", "x.npy", "--mode", mode)
    assert (code, out) == (2, "")
    assert err.startswith("Error: singular.npy is singular (")
    assert "no solution" in err
    assert err.count("\n") == 1
    assert new_files(here) == []


def test_an_ill_conditioned_system_is_solved_with_a_word(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = in_process(capsys, "solve", "hilbert.npy", "b.npy", "-o", "x.npy", "-q")
    assert code == 0
    assert err.startswith("Warning: hilbert.npy: ")
    assert "ll-conditioned" in err
    assert err.count("\n") == 1
    assert new_files(here) == ["x.npy"]


# ---- errors -------------------------------------------------------------------------------------------------


ERRORS: Mapping[str, str] = {
    "lu missing.npy -o lu.npz": "missing.npy: no such file",
    "lu A.npy": "Missing option '-o'",
    "lu -o lu.npz": "Missing argument 'A'",
    "lu A.npy -o lu.npy": "it is to hold several arrays; name a .npz file",
    "lu A.npy -o lu.csv": "extension",
    "lu A.npy -o no/lu.npz": "there is no folder",
    "lu A.npy -o lu.npz --report lu.npz": "given twice",
    "lu both.npz:x -o both.npz": "given twice",
    "lu A.npy -o lu.npz --report no/r.json": "there is no folder",
    "lu A.npy -o lu.npz --mode onlin": "'onlin' is not one of",
    "lu A.npy -o lu.npz --mod online": "--mode",
    "lu b.npy -o lu.npz": "b.npy is no matrix: it has 1 dimensions",
    "lu integers.npy -o lu.npz": "pass --dtype float64",
    "lu complex.npy -o lu.npz": "complex is not supported",
    "lu big.npy -o lu.npz --dtype float32": "beyond the largest float32",
    "lu nan.npy -o lu.npz": "nan.npy holds nan at [61, 4]: linear systems need finite numbers",
    "solve missing.npy b.npy -o x.npy": "missing.npy: no such file",
    "solve missing.npz b.npy -o x.npy": "missing.npz: no such file",
    "solve A.npy c.npy -o x.npy": "c.npy: no such file",
    "solve A.npy b.npy": "Missing option '-o'",
    "solve A.npy -o x.npy": "Missing argument 'B'",
    "solve A.npy b.npy -o A.npy": "given twice",
    "solve A.npy b.npy -o b.npy": "given twice",
    "solve A.npy b.npy -o x.csv": "extension",
    "solve A.npy b.npy -o x.mtx": "Matrix Market has no vectors; name a .npy file",
    "solve A.npy b.npy -o no/x.npy": "there is no folder",
    "solve A.npy b.npy -o x.npy --refin": "--refine",
    "solve A.npy short.npy -o x.npy": "A.npy is 90 x 90 and short.npy is a vector of 89: the rows of b (89)",
    "solve A.npy flat.npy -o x.npy": "flat.npy is 4 x 90: the rows of b (4) must be those of A (90); transpose it",
    "solve wide.npy b.npy -o x.npy": "wide.npy is 40 x 90: solve takes square matrices",
    "solve oblong.npz b.npy -o x.npy": "oblong.npz is 40 x 90: solve takes square matrices",
    "solve b.npy A.npy -o x.npy": "b.npy is no matrix",
    "solve A.npy cube.npy -o x.npy": "neither a matrix nor a vector: it has 3 dimensions, shape (2, 2, 2)",
    "solve A.npy number.npy -o x.npy": "neither a matrix nor a vector: it has 0 dimensions",
    "solve A.npy bi.npy -o x.npy": "bi.npy holds int64, which cannot be checked: pass --dtype float64",
    "solve nan.npy b.npy -o x.npy": "nan.npy holds nan at [61, 4]",
    "solve A.npy bnan.npy -o x.npy": "bnan.npy holds inf at [5]",
    "solve both.npz b.npy -o x.npy": "2 arrays (x, y)",
    "solve scipy.npz b.npy -o x.npy --refine": "--refine needs A itself, and scipy.npz holds its factors",
    "solve scipy.npz b.npy -o x.npy --mode online": "--mode is about factoring A",
    "solve zero.npz b.npy -o x.npy": "zero.npz is singular (diagonal number 7 of U is zero)",
    "solve far.npz b.npy -o x.npy": "far.npz is damaged: its piv are no pivots of the 90 x 90 lu",
    "solve few.npz b.npy -o x.npy": "few.npz is damaged",
    "solve real.npz b.npy -o x.npy": "real.npz:piv is no vector of integers",
    "sovle A.npy b.npy -o x.npy": "did you mean solve?",
}


@pytest.mark.parametrize("words", ERRORS)
def test_every_error_is_one_line_and_2(here: Path, capsys: pytest.CaptureFixture[str], words: str) -> None:
    code, out, err = in_process(capsys, *words.split())
    assert code == 2
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert ERRORS[words] in err
    assert new_files(here) == []


def test_an_archive_of_one_array_is_that_matrix(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("matrix.npz", np.load("alone.npz")["lu"])
    for name in ("matrix.npz", "alone.npz:lu"):
        assert in_process(capsys, "solve", name, "b.npy", "-o", "x.npy", "-q")[0] == 0
        assert solved(np.load("x.npy"), np.load("alone.npz")["lu"], np.load("b.npy"))


@pytest.mark.parametrize(("held", "missing"), [("lu", "piv"), ("piv", "lu")])
def test_half_of_the_factors_are_not_the_matrix(
    here: Path, capsys: pytest.CaptureFixture[str], held: str, missing: str
) -> None:
    np.savez("half.npz", **{held: np.load("alone.npz")["lu"], "more": np.zeros(3)})
    code, out, err = in_process(capsys, "solve", "half.npz", "b.npy", "-o", "x.npy")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"half.npz holds {held} and no {missing}" in err
    assert not Path("x.npy").exists()


@pytest.mark.parametrize("name", ["protected_lu_factor", "protected_solve"])
def test_too_little_memory_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import abft_tsm2

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("too big")

    monkeypatch.setattr(abft_tsm2, name, fail, raising=False)
    words = ["lu", "A.npy", "-o", "o.npz"] if "lu" in name else ["solve", "A.npy", "b.npy", "-o", "o.npy"]
    code, _, err = in_process(capsys, *words)
    assert code == 2
    assert err == "Error: out of memory (too big); --dtype float32 needs half as much, where it will do\n"
    assert new_files(here) == []


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name, options in (("lu", ()), ("solve", ("--refine",))):
        code, text, _ = in_process(capsys, name, "--help")
        assert code == 0
        for word in (
            "--output",
            "--report",
            "--mode [auto|online|offline]",
            "--dtype",
            "--quiet",
            "Exit codes",
            *options,
        ):
            assert word in text
