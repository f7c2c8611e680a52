"""Matrix Market files: what a head may say, and that the body is what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import io, sparse

from abft_tsm2.io import market
from abft_tsm2.io.matrix import MatrixFileError, read_matrix

HEAD = "%%MatrixMarket matrix"
FIELDS: dict[str, Any] = {"real": np.float64, "integer": np.int64}
SIGNS = {"symmetric": 1, "skew-symmetric": -1, "hermitian": 1}


def read(path: Path, text: str) -> np.ndarray:
    path.write_text(f"{HEAD} {text}\n")
    return read_matrix(path, dtype="float64")


@pytest.mark.parametrize("form", ["array", "coordinate"])
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("symmetry", SIGNS)
@pytest.mark.parametrize("order", [1, 2, 7])
def test_a_triangle_is_completed(tmp_path: Path, form: str, field: str, symmetry: str, order: int) -> None:
    lower = np.tril(np.random.default_rng(order).normal(0, 1e3, (order, order)), -(symmetry == "skew-symmetric"))
    lower = np.rint(lower).astype(np.int64) if field == "integer" else lower
    whole = lower + SIGNS[symmetry] * np.tril(lower, -1).T
    stored = whole if form == "array" else sparse.coo_array(whole)
    io.mmwrite(tmp_path / "A.mtx", stored, symmetry="symmetric" if symmetry == "hermitian" else symmetry)
    text = (tmp_path / "A.mtx").read_text()
    (tmp_path / "A.mtx").write_text(text.replace("symmetric", "hermitian") if symmetry == "hermitian" else text)
    assert symmetry in (tmp_path / "A.mtx").read_text()
    found = read_matrix(tmp_path / "A.mtx", dtype="float64")
    assert np.array_equal(found, whole)


@pytest.mark.parametrize("form", ["array", "coordinate"])
def test_what_is_general_is_read_as_it_stands(tmp_path: Path, form: str) -> None:
    A = np.random.default_rng(0).standard_normal((5, 3))
    A[2] = 0
    io.mmwrite(tmp_path / "A.mtx", A if form == "array" else sparse.coo_array(A), symmetry="general")
    assert np.array_equal(read_matrix(tmp_path / "A.mtx"), A)


@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (0, 3), (3, 0)])
def test_what_has_no_elements(tmp_path: Path, rows: int, columns: int) -> None:
    for body in (f"array real general\n{rows} {columns}", f"coordinate real general\n{rows} {columns} 0"):
        assert read(tmp_path / "A.mtx", body).shape == (rows, columns)
    with pytest.raises(MatrixFileError, match=rf"line 2 has 1 entries of a {rows} x {columns} matrix"):
        read(tmp_path / "A.mtx", f"coordinate real general\n{rows} {columns} 1\n1 1 1.0")
    with pytest.raises(MatrixFileError, match="line 2 asks for 0 entries, and 1 are there"):
        read(tmp_path / "A.mtx", f"array real general\n{rows} {columns}\n1.0")


def test_entries_of_one_place_are_added_and_none_is_zero(tmp_path: Path) -> None:
    assert read(tmp_path / "A.mtx", "coordinate real general\n2 2 3\n1 2 1\n1 2 2\n\n2 2 -1").tolist() == [
        [0, 3],
        [0, -1],
    ]
    assert read(tmp_path / "A.mtx", "coordinate real symmetric\n2 2 0").tolist() == [[0, 0], [0, 0]]
    assert read(tmp_path / "A.mtx", "coordinate pattern hermitian\n2 2 1\n2 1").tolist() == [[0, 1], [1, 0]]


WRONG = {
    # a triangle of what is not square
    **{f"array real {symmetry}\n3 2\n1\n2\n3\n4\n5": f"says {symmetry}, and line 2 3 x 2" for symmetry in SIGNS},
    "coordinate real symmetric\n3 2 1\n1 1 1": "says symmetric, and line 2 3 x 2",
    # entries of the other triangle
    "coordinate real symmetric\n2 2 3\n1 1 1\n\n1 2 2\n2 1 2": "line 5 is '1 2 2': only the lower triangle of a symm",
    "coordinate pattern symmetric\n2 2 2\n2 1\n1 2": "line 4 is '1 2'",
    "coordinate integer hermitian\n2 2 1\n1 2 2": "line 3 is '1 2 2': only the lower triangle of a hermitian matrix",
    "coordinate real skew-symmetric\n2 2 2\n1 2 -2\n2 1 2": "line 3 is '1 2 -2'",
    "coordinate real skew-symmetric\n%\n\n2 2 2\n2 1 2\n2 2 3": "line 6 is '2 2 3': only the lower triangle, without",
    # places that are not there
    "coordinate real general\n%\n2 2 1\n3 1 1": "line 4: Row index out of bounds",
    "coordinate real general\n2 2 1\n1 3 1": "line 3: Column index out of bounds",
    "coordinate real general\n2 2 1\n0 1 1": "line 3 is '0 1 1', which is not one entry",
    "coordinate real general\n2 2 1\n-1 1 1": "line 3 is '-1 1 1', which is not one entry",
    "coordinate real general\n2 2 1\n99999999999999999999 1 1": "line 3: Integer out of range",
    # other numbers of entries
    "array real general\n2 2\n1\n2\n\n3": "line 2 asks for 4 entries, and 3 are there",
    "array real symmetric\n2 2\n1\n2\n2\n1": "asks for 3 entries (the lower triangle of a symmetric matrix), and 4 are",
    "array real skew-symmetric\n2 2\n0\n1": "asks for 1 entries (the lower triangle of a skew-symmetric matrix), and 2",
    "coordinate real general\n2 2 2\n1 1 1": "line 2 asks for 2 entries, and 1 are there",
    "coordinate real general\n2 2 999999999999\n1 1 1": "asks for 999999999999 entries",
    # sizes
    "coordinate pattern symmetric\n% about\n3 2\n2 1": "line 3 is '3 2', where its sizes have to be, whole numbers: ro",
    **{
        f"coordinate real general\n{sizes}\n1 1 1": f"line 2 is '{sizes}', where its sizes have to be"
        for sizes in ("3", "a b c", "3.0 3.0 2", "-1 1 1", "2 2 1 1", "2 2 99999999999999999999")
    },
    "array real general\n2 2 4\n1\n2\n3\n4": "whole numbers: rows columns)",
    "array real general\n% nothing else": "it ends at line 3, before the sizes",
    "array real general\n" + 70_000 * "%": "has no end, or is longer than 65536 bytes",
    # words
    "array real": "not %%MatrixMarket matrix format field symmetry",
    "dense real general\n1 1\n1": "the format 'dense', which is none of coordinate, array",
    "array float general\n1 1\n1": "the field 'float', which is none of real, double",
    "array real upper\n1 1\n1": "the symmetry 'upper', which is none of general",
    "array pattern general\n1 1": "array, pattern and general, which do not go together",
    "coordinate pattern skew-symmetric\n2 2 1\n2 1": "which do not go together",
}


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_what_contradicts_itself_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(MatrixFileError) as caught:
        read(tmp_path / "A.mtx", text)
    assert WRONG[text] in str(caught.value)
    assert "A.mtx is not a Matrix Market file or is damaged" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_line_is_endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(market, "_CHUNK", 7)
    for body in (70_000 * "1", "1" + 70_000 * " "):
        with pytest.raises(MatrixFileError, match=r"line 3 is '1.*', which is not one entry"):
            read(tmp_path / "A.mtx", f"array real general\n1 1\n{body}")


def test_first_lines(tmp_path: Path) -> None:
    for first in ("%MatrixMarket matrix array real general", "%%matrixmarket MATRIX Array Double General  "):
        (tmp_path / "A.mtx").write_text(f"{first}\n1 1\n5\n")
        assert read_matrix(tmp_path / "A.mtx") == 5
    for first in ("", "%%MatrixMarket vector array real general", "1 1"):
        (tmp_path / "A.mtx").write_text(f"{first}\n1 1\n5\n")
        with pytest.raises(MatrixFileError, match="line 1 is "):
            read_matrix(tmp_path / "A.mtx")


def test_scipys_reader_is_given_general_matrices_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it writes outside of the array where a dense triangle is not square, and this very process ends."""
    seen, honest = [], io.mmread

    def noted(source: Any) -> Any:
        seen.append(source.read(1000))
        return honest(market._Plain(seen[-1], source))

    monkeypatch.setattr(io, "mmread", noted)
    for symmetry in ("general", "symmetric", "skew-symmetric"):
        A = np.array([[0.0, -2.0], [2.0, 0.0]]) if symmetry == "skew-symmetric" else np.ones((2, 2))
        for stored in (A, sparse.coo_array(A)):
            io.mmwrite(tmp_path / "A.mtx", stored, symmetry=symmetry)
            assert np.array_equal(read_matrix(tmp_path / "A.mtx"), A)
    assert len(seen) == 6
    assert all(b" real general\n" in head for head in seen)
