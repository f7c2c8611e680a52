"""Matrix files: every format there and back, every kind of damage with its own message, writing whole or not at all."""

from __future__ import annotations

import errno
import gzip
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from scipy import io, sparse

from abft_tsm2.io import market
from abft_tsm2.io import matrix as matrixio
from abft_tsm2.io.matrix import (
    MatrixFileError,
    convert,
    members,
    output_arrays,
    output_file,
    output_matrix,
    read_indices,
    read_matrix,
    row_panels,
)

A = np.random.default_rng(0).standard_normal((7, 5))


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["C.npy", "C.npz", "C.mtx", "C.mtx.gz", "C.NPY"])
def test_what_is_written_is_read_back_bit_for_bit(tmp_path: Path, name: str, dtype: str) -> None:
    matrix = (A * 10.0 ** np.arange(-2, 3)).astype(dtype)
    with output_matrix(tmp_path / name, matrix.shape, matrix.dtype) as out:
        out[:] = matrix
    back = read_matrix(tmp_path / name).astype(dtype)  # Matrix Market has one real type, float64
    assert back.tobytes() == matrix.tobytes()
    assert files_in(tmp_path) == [name]


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (1, 1)])
def test_small_and_empty_matrices(tmp_path: Path, shape: tuple[int, int]) -> None:
    with output_matrix(tmp_path / "C.npy", shape, np.dtype("float32")):
        pass
    back = read_matrix(tmp_path / "C.npy")
    assert back.shape == shape
    assert back.dtype == np.float32


def test_a_large_npy_is_mapped_and_a_small_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "A.npy", A)
    assert not isinstance(read_matrix(tmp_path / "A.npy").base, np.memmap)
    monkeypatch.setattr(matrixio, "MAP_BYTES", A.nbytes)
    mapped = read_matrix(tmp_path / "A.npy")
    assert isinstance(mapped.base, np.memmap)
    assert type(mapped) is np.ndarray
    assert not mapped.flags.writeable
    np.testing.assert_array_equal(mapped, A)


def test_orders_and_byte_orders(tmp_path: Path) -> None:
    np.save(tmp_path / "F.npy", np.asfortranarray(A))
    np.save(tmp_path / "big.npy", A.astype(">f8"))
    np.testing.assert_array_equal(read_matrix(tmp_path / "F.npy"), A)
    big = read_matrix(tmp_path / "big.npy")
    native = convert(big, np.dtype("float64"), "big.npy")
    assert native.dtype.isnative
    np.testing.assert_array_equal(native, A)
    assert convert(native, np.dtype("float64"), "big.npy") is native


def test_npz_with_one_array_and_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", A)
    np.savez_compressed(tmp_path / "two.npz", first=A, second=2 * A)
    np.testing.assert_array_equal(read_matrix(tmp_path / "one.npz"), A)
    np.testing.assert_array_equal(read_matrix(f"{tmp_path}/two.npz:second"), 2 * A)


def test_sparse_matrix_market_becomes_dense(tmp_path: Path) -> None:
    S = sparse.random(20, 30, 0.1, random_state=1)
    io.mmwrite(tmp_path / "S.mtx", S)
    np.testing.assert_array_equal(read_matrix(tmp_path / "S.mtx"), S.toarray())


def damaged(folder: Path) -> dict[str, str]:
    """Files that cannot be read, each with a part of the message it must have."""
    np.save(folder / "A.npy", A)
    whole = (folder / "A.npy").read_bytes()
    (folder / "truncated.npy").write_bytes(whole[:200])
    (folder / "head.npy").write_bytes(whole[:40])
    (folder / "longer.npy").write_bytes(whole + b"\n")
    (folder / "several.npy").write_bytes(whole + whole)
    with zipfile.ZipFile(folder / "longer.npz", "w") as archive:
        archive.writestr("x.npy", whole + b"\n")
    (folder / "empty.npy").write_bytes(b"")
    (folder / "text.npy").write_text("1 2 3")
    np.save(folder / "vector.npy", np.ones(3))
    np.save(folder / "cube.npy", np.ones((2, 2, 2)))
    np.save(folder / "objects.npy", np.array([[1, None]], dtype=object), allow_pickle=True)
    np.save(folder / "integers.npy", np.ones((2, 2), int))
    np.save(folder / "bools.npy", np.ones((2, 2), bool))
    np.save(folder / "complex.npy", np.ones((2, 2), complex))
    np.save(folder / "records.npy", np.zeros((2, 2), [("x", "f8")]))
    np.save(folder / "words.npy", np.array([["a", "b"]]))
    (folder / "folder.npy").mkdir()
    (folder / "A.txt").write_text("1 2 3")
    (folder / "A").write_text("1 2 3")
    np.savez(folder / "two.npz", first=A, second=A)
    np.savez(folder / "none.npz")
    np.savez(folder / "objects.npz", np.array([[1, None]], dtype=object))
    (folder / "text.npz").write_text("no archive")
    packed = bytearray((folder / "two.npz").read_bytes())
    packed[200] ^= 0xFF  # in the data of the first array: its CRC disagrees
    (folder / "flipped.npz").write_bytes(packed)
    sparse.save_npz(folder / "sparse.npz", sparse.eye(3, format="csr"))
    head = "%%MatrixMarket matrix"
    (folder / "text.mtx").write_text("1 2 3")
    (folder / "short.mtx").write_text(f"{head} array real general\n2 2\n1\n2\n3\n")
    (folder / "integers.mtx").write_text(f"{head} array integer general\n1 1\n1\n")
    (folder / "complex.mtx").write_text(f"{head} array complex general\n1 1\n1 1\n")
    (folder / "huge.mtx").write_text(f"{head} coordinate real general\n9000000 9000000 1\n1 1 1.0\n")
    (folder / "text.mtx.gz").write_text("not packed")
    for number, value in enumerate(("1,5", "1.5E", "0x10", "1 2", "1_0", "1.5 %", "nan(1)", "1D5")):
        (folder / f"value{number}.mtx").write_text(f"{head} array real general\n% about\n2 1\n1\n{value}\n")
    for number, value in enumerate(("1 1", "1 1 2 3", "1.5 1 2", "1 1 2x")):
        (folder / f"entry{number}.mtx").write_text(f"{head} coordinate real general\n2 2 1\n{value}\n")
    (folder / "cut.mtx").write_text(f"{head} array real general\n2 1\n1\n1.25E")  # at which SciPy 1.17 crashes
    with gzip.open(folder / "cut.mtx.gz", "wb") as stream:
        stream.write(f"{head} array real general\n2 1\n1\n1.25".encode())
    (folder / "tokens.npy").write_bytes(whole.replace(b"(7, 5)", b"(7, 5("))
    (folder / "syntax.npy").write_bytes(whole.replace(b"'<f8'", b"'<,8'"))
    return {
        "missing.npy": "no such file",
        "longer.npy": "7 x 5 float64 take 280 bytes, 281 are there",
        "several.npy": "7 x 5 float64 take 280 bytes, 688 are there",
        "longer.npz": "longer.npz:x goes on behind its array: 7 x 5 float64 take 280 bytes, 281 are there",
        "truncated.npy": "7 x 5 float64 need 280 bytes, 72 are there",
        "head.npy": "head is damaged",
        "empty.npy": "head is damaged",
        "text.npy": "not a .npy file",
        "vector.npy": "1 dimensions, shape (3,)",
        "cube.npy": "3 dimensions, shape (2, 2, 2)",
        "objects.npy": "never unpickled",
        "integers.npy": "pass --dtype float64",
        "bools.npy": "pass --dtype float64",
        "complex.npy": "real and the imaginary part",
        "records.npy": "save x.astype('float32')",
        "words.npy": "save x.astype('float64')",
        "folder.npy": "a folder",
        "A.txt": "extension",
        "A": "extension",
        "two.npz": "2 arrays (first, second); name one",
        "two.npz:frist": "did you mean",
        "two.npz:zzz": "it holds first, second",
        "none.npz": "no array",
        "objects.npz": "never unpickled",
        "text.npz": "not a .npz archive",
        "flipped.npz:first": "damaged",
        "sparse.npz": "toarray()",
        "text.mtx": "not a Matrix Market file",
        "short.mtx": "damaged",
        **{f"value{number}.mtx": "line 5 is" for number in range(8)},
        **{f"entry{number}.mtx": "line 3 is" for number in range(4)},
        "cut.mtx": "line 4 is '1.25E', which is not one entry",
        "cut.mtx.gz": "last line has no end",
        "tokens.npy": "head is damaged",
        "syntax.npy": "head is damaged",
        "integers.mtx": "pass --dtype float64",
        "complex.mtx": "real and the imaginary part",
        "huge.mtx": "9000000 x 9000000",
        "text.mtx.gz": "cannot be read",
        "a" * 300 + ".npy": "name too long",
    }


def test_every_damage_has_its_message(tmp_path: Path) -> None:
    for name, message in damaged(tmp_path).items():
        with pytest.raises(MatrixFileError) as caught:
            read_matrix(f"{tmp_path}/{name}")
        text = str(caught.value)
        assert message in text, f"{name}: {text}"
        assert name.partition(":")[0] in text
        assert "\n" not in text


def test_numbers_as_matrix_market_writes_them(tmp_path: Path) -> None:
    path, head = tmp_path / "A.mtx", "%%MatrixMarket matrix"
    values = ["1", "-2.", ".5", "3e5", "4.25E-3", "inf", "-Infinity", "NaN"]
    for end in ("\n", "\r\n", " \t\n", "\n\n"):
        path.write_bytes(f"{head} array real general\n% about\n\n2 4\n{end.join(values)}{end}".encode())
        assert np.array_equal(read_matrix(path).ravel("F"), np.array(values, float), equal_nan=True)
    path.write_text(f"{head} coordinate pattern symmetric\n2 2 2\n1 1\n 2  1 \n")
    assert read_matrix(path).tolist() == [[1, 1], [1, 0]]
    path.write_text(f"{head} coordinate real general\n2 3 0\n")
    assert not read_matrix(path).any()


def test_an_integer_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "A.mtx"
    for value, whole in (("-15", True), ("1.5", False), ("1e5", False)):
        path.write_text(f"%%MatrixMarket matrix array integer general\n1 1\n{value}\n")
        if whole:
            assert read_matrix(path, dtype="float64") == -15
        else:
            with pytest.raises(MatrixFileError, match=f"line 3 is '{value}', which is not one entry"):
                read_matrix(path, dtype="float64")


def test_a_long_matrix_market_file_is_looked_at_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(market, "_CHUNK", 7)
    A, path = np.random.default_rng(0).standard_normal((9, 5)), tmp_path / "A.mtx"
    io.mmwrite(path, A)
    assert np.array_equal(read_matrix(path), A)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:30], lines[30] + ",", *lines[31:], ""]))
    with pytest.raises(MatrixFileError, match=r"line 31 is '.*,', which is not one entry"):
        read_matrix(path)


def test_integers_are_read_where_a_conversion_is_announced(tmp_path: Path) -> None:
    for values in (np.arange(6), np.array([True, False] * 3), np.arange(6, dtype=np.longdouble)):
        np.save(tmp_path / "A.npy", values.reshape(2, 3))
        matrix = convert(read_matrix(tmp_path / "A.npy", dtype="float64"), np.dtype("float64"), tmp_path / "A.npy")
        np.testing.assert_array_equal(matrix, values.reshape(2, 3).astype(float))
    np.save(tmp_path / "A.npy", np.ones((2, 2), complex))
    with pytest.raises(MatrixFileError, match="complex"):
        read_matrix(tmp_path / "A.npy", dtype="float64")


def test_a_conversion_never_makes_an_infinity() -> None:
    with pytest.raises(MatrixFileError, match=r"A\.npy.*3\.4e\+38.*--dtype float64"):
        convert(np.array([[1e39]]), np.dtype("float32"), "A.npy")
    # What is infinite already stays so.
    assert convert(np.array([[np.inf, np.nan]]), np.dtype("float32"), "A.npy")[0, 0] == np.inf


@pytest.mark.parametrize(
    ("rows", "row_bytes", "panel"), [(10, 8, 32), (1, 8, 1), (7, 10**9, 1), (5, 0, 64), (0, 8, 64)]
)
def test_panels_cover_every_row_once(rows: int, row_bytes: int, panel: int) -> None:
    panels = list(row_panels(rows, row_bytes, panel))
    assert panels
    assert [row for part in panels for row in range(part.start, part.stop)] == list(range(rows))


def matrix_then(failure: type[BaseException], path: Path) -> None:
    with output_matrix(path, A.shape, A.dtype) as out:
        out[:] = 1
        raise failure


def text_then(failure: type[BaseException], path: Path) -> None:
    with output_file(path) as keep:
        keep(b"{}")
        raise failure


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit, MemoryError])
def test_a_failure_leaves_what_was_there(tmp_path: Path, failure: type[BaseException]) -> None:
    target = tmp_path / "C.npy"
    target.write_bytes(b"before")
    with pytest.raises(failure):
        matrix_then(failure, target)
    with pytest.raises(failure):
        text_then(failure, tmp_path / "r.json")
    assert target.read_bytes() == b"before"
    assert files_in(tmp_path) == ["C.npy"]


@pytest.mark.parametrize("name", ["C.npy", "C.npz", "C.mtx"])
def test_a_full_disk_is_one_line(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setitem(matrixio._WRITERS, ".npz", full)
    monkeypatch.setitem(matrixio._WRITERS, ".mtx", full)
    with (
        pytest.raises(MatrixFileError, match=rf"{name}: no space left.*; free space"),
        output_matrix(tmp_path / name, A.shape, A.dtype) as out,
    ):
        out[:] = A
    assert files_in(tmp_path) == []


def test_space_is_asked_for_before_the_work(tmp_path: Path) -> None:
    began = False
    with (
        pytest.raises(MatrixFileError, match="space"),
        output_matrix(tmp_path / "C.npy", (2**28, 2**28), A.dtype),
    ):
        began = True
    assert not began


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder.npy").mkdir()
    os.mkfifo(tmp_path / "pipe.npy")
    for name, message in {
        "nowhere/C.npy": "there is no folder",
        "folder.npy": "a folder",
        "pipe.npy": "not a regular file",
        "C.csv": "extension",
        "a" * 300 + ".npy": "name too long",
    }.items():
        with (
            pytest.raises(MatrixFileError, match=message),
            output_matrix(tmp_path / name, A.shape, A.dtype) as out,
        ):
            out[:] = A
    assert files_in(tmp_path) == ["folder.npy", "pipe.npy"]


def test_links_and_permissions_stay(tmp_path: Path) -> None:
    (tmp_path / "behind.npy").write_bytes(b"before")
    (tmp_path / "behind.npy").chmod(0o640)
    (tmp_path / "link.npy").symlink_to("behind.npy")
    with output_matrix(tmp_path / "link.npy", A.shape, A.dtype) as out:
        out[:] = A
    assert (tmp_path / "link.npy").is_symlink()
    assert (tmp_path / "behind.npy").stat().st_mode & 0o777 == 0o640
    np.testing.assert_array_equal(np.load(tmp_path / "behind.npy"), A)


def test_new_files_have_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    with output_file(tmp_path / "r.json") as keep:
        keep(b"{}")
    assert (tmp_path / "r.json").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_vectors_are_read_where_they_are_asked_for(tmp_path: Path) -> None:
    b = A[:, 0]
    for name, write in {"b.npy": np.save, "b.npz": np.savez}.items():
        write(tmp_path / name, b)
        np.testing.assert_array_equal(read_matrix(tmp_path / name, vectors=True), b)
        with pytest.raises(MatrixFileError, match="no matrix"):
            read_matrix(tmp_path / name)
    whole = (tmp_path / "b.npy").read_bytes()
    (tmp_path / "b.npy").write_bytes(whole[:-8])
    with pytest.raises(MatrixFileError, match="truncated: 7 float64 need 56 bytes, 48 are there"):
        read_matrix(tmp_path / "b.npy", vectors=True)


def test_large_vectors_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "b.npy", A[:, 0])
    monkeypatch.setattr(matrixio, "MAP_BYTES", 56)
    assert isinstance(read_matrix(tmp_path / "b.npy", vectors=True).base, np.memmap)


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
def test_vectors_are_written(tmp_path: Path, name: str) -> None:
    with output_matrix(tmp_path / name, (7,), np.dtype(np.float32)) as out:
        out[:] = np.arange(7)
    np.testing.assert_array_equal(read_matrix(tmp_path / name, vectors=True), np.arange(7, dtype=np.float32))


def test_members_and_indices(tmp_path: Path) -> None:
    np.savez(tmp_path / "two.npz", lu=A, piv=np.arange(5, dtype=np.int32))
    np.save(tmp_path / "A.npy", A)
    assert members(tmp_path / "two.npz") == ["lu", "piv"]
    for name in ("A.npy", "missing.npz", "."):
        assert members(tmp_path / name) == []
    np.testing.assert_array_equal(read_indices(f"{tmp_path}/two.npz:piv"), np.arange(5))
    with pytest.raises(MatrixFileError, match="no vector of integers"):
        read_indices(f"{tmp_path}/two.npz:lu")


def test_archives_appear_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "o.npz"
    with output_arrays(target, 100) as write:
        write(x=np.ones(3), y=np.zeros((2, 2), np.float32))
        assert not target.exists()
    assert members(target) == ["x", "y"]
    before = target.read_bytes()

    def interrupted(failure: type[BaseException]) -> None:
        with output_arrays(target, 100) as write:
            write(x=np.ones(5))
            raise failure

    for failure in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(failure):
            interrupted(failure)
    with pytest.raises(MatrixFileError, match="no space left"), output_arrays(target, 2**62):
        pytest.fail("before the work")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(MatrixFileError, match="no space left"), output_arrays(target, 100) as write:
        write(x=np.ones(5))
    assert target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["o.npz"]


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ("(True, 2)", r"shape \(True, 2\) in its head: a boolean is no size"),
        ("(2, False)", r"shape \(2, False\) in its head: a boolean is no size"),
        ("(-20, 30)", r"shape \(-20, 30\) in its head: a shape cannot be negative"),
        ("(-2, -1)", r"shape \(-2, -1\) in its head: a shape cannot be negative"),  # of which 2 elements are there
        ("(0, 10**20)", r"shape \(0, 1(0{20})\) in its head: no array of float64 is so large"),
        ("(2**63, 0)", r"shape \(9223372036854775808, 0\) in its head: no array of float64 is so large"),
        ("(0, 2**60)", r"shape \(0, 1152921504606846976\) in its head: no array of float64 is so large"),
        ("(10**12, 10**12)", "shape .* in its head: no array of float64 is so large"),
    ],
)
def test_a_shape_that_no_array_has(tmp_path: Path, shape: str, told: str) -> None:
    head = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {eval(shape)}, }}".ljust(117) + "\n"
    content = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode() + bytes(16)
    (tmp_path / "A.npy").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "A.npz", "w") as archive:
        archive.writestr("x.npy", content)
    for name, source in (("A.npy", r"A\.npy"), ("A.npz", r"A\.npz:x")):
        with pytest.raises(MatrixFileError, match=f"{source} has the {told}") as error:
            read_matrix(tmp_path / name)
        assert "\n" not in str(error.value)
