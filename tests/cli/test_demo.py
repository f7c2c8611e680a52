"""The demonstration: the flip spoils the picture, protection finds it where it was planted, and says so honestly."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abft_tsm2.cli import demo
from abft_tsm2.cli.demo import DemoError, flipped, randomised_svd_picture
from abft_tsm2.io.matrix import MatrixFileError
from abft_tsm2.report import Report, Status

TIMED = demo._timed
Made = Callable[..., tuple[dict[str, Any], Path, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """The record, the folder and the text of one demonstration for each choice of options."""

    @cache
    def make(copy: int = 0, **options: Any) -> tuple[dict[str, Any], Path, str]:
        folder = tmp_path_factory.mktemp("demo") / "results"
        text = demo.run(folder, **options).text
        return json.loads((folder / "demo.json").read_text()), folder, text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "_timed", lambda section, flip: (1.0, 0.25, 0.5))  # timed in a test of its own
        yield make


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        timed = ("seconds", "overhead", "plain_seconds")
        return {key: without_times(item) for key, item in value.items() if key not in timed}
    return [without_times(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_flip_spoils_the_results_and_protection_saves_them(made: Made, dtype: str) -> None:
    picture, digits = made(dtype=dtype)[0]["sections"]
    for section in (picture, digits):
        clean, spoiled, protected = section["runs"]
        assert clean["found"] == "nothing"
        assert spoiled["found"] == "not checked"
        assert protected["agrees"]
        assert protected["if_not_repaired"] == spoiled["returned"]
        place = re.search(r"\[\d+, \d+\]", protected["planted"])
        assert place is not None
        assert protected["found"] == f"{place[0]}, as planted"
        assert protected["repaired"]
        statuses = [Report.from_dict(report).status for report in protected["reports"]]
        assert statuses.count(Status.CORRECTED) == 1
        assert set(statuses) <= {Status.CORRECTED, Status.CLEAN}
    clean, spoiled, protected = (run["returned"] for run in picture["runs"])
    assert 0.05 < clean < 0.15  # what rank 50 leaves out of this photograph
    assert spoiled > 1
    assert protected == pytest.approx(clean, rel=1e-3)
    clean, spoiled, protected = (run["returned"] for run in digits["runs"])
    assert clean > 1750
    assert spoiled < 500
    assert protected == clean


def test_the_picture_file(made: Made) -> None:
    from PIL import Image

    folder = made(dtype="float64")[1]
    assert sorted(path.name for path in folder.iterdir()) == ["demo.json", "demo.png"]
    with Image.open(folder / "demo.png") as opened:
        image = np.asarray(opened.convert("L"), dtype=float)
    photograph, _, _ = demo._load("float64")
    height, width = photograph.shape
    panels = [image[16 : 16 + height, 16 + i * (width + 16) :][:, :width] / 255 for i in range(3)]
    clean, spoiled, protected = (np.sqrt(np.mean((panel - photograph) ** 2)) for panel in panels)
    assert clean < 0.1
    assert spoiled > 3 * clean
    np.testing.assert_array_equal(panels[0], panels[2])
    assert np.any(image[16 + height :] < 128)  # captions
    assert abs(protected - clean) < 1e-12


def test_deterministic_by_seed_and_without_absolute_paths(made: Made) -> None:
    first, folder, _ = made(dtype="float64")
    again, other_folder, _ = made(copy=1, dtype="float64")
    assert without_times(first) == without_times(again)
    assert without_times(first) != without_times(made(seed=1)[0])
    assert (folder / "demo.png").read_bytes() == (other_folder / "demo.png").read_bytes()
    assert str(folder.parent) not in (folder / "demo.json").read_text()


def test_a_bit_below_the_limit_is_called_so(made: Made) -> None:
    for section in made(bit=0)[0]["sections"]:
        clean, spoiled, protected = section["runs"]
        assert protected["found"].startswith("below the limit: not found (change ")
        assert protected["agrees"] is False
        assert protected["returned"] == pytest.approx(clean["returned"], rel=1e-6)
        assert spoiled["returned"] == pytest.approx(clean["returned"], rel=1e-6)


def test_a_bit_of_the_mantissa_is_found(made: Made) -> None:
    for section in made(bit=45)[0]["sections"]:
        assert section["runs"][2]["agrees"], section["runs"][2]["found"]


def test_the_table_says_what_the_record_says(made: Made) -> None:
    record, _, text = made(dtype="float64")
    for section in record["sections"]:
        assert section["title"] in text
        for run in section["runs"]:
            line = next(line for line in text[text.index(section["title"]) :].split("\n") if run["name"] in line)
            assert run["planted"] in line
            assert run["found"] in line
    assert "+25 %" in text
    assert max(map(len, text.split("\n"))) <= 200


def test_times_are_measured_in_turns() -> None:
    calls: list[bool] = []

    def compute(products: demo.Products) -> np.ndarray:
        calls.append(products.protected)
        products.seconds += 2 if products.protected else 1
        return np.zeros((1, 1))

    section = replace(demo._digits_section(np.ones((2, 2)), np.zeros(2)), compute=compute)
    assert TIMED(section, demo.Flip(0, 0, 0, 1)) == (1.0, 1.0, 1.0)
    assert calls == [False, True, True] * demo.REPETITIONS


def test_the_randomised_svd_is_close_to_the_best_picture() -> None:
    photograph, _, _ = demo._load("float64")
    best = np.linalg.norm(np.linalg.svd(photograph, compute_uv=False)[demo.RANK :])
    found = randomised_svd_picture(photograph, np.matmul, seed=0)
    assert np.linalg.matrix_rank(found) == demo.RANK
    assert best <= np.linalg.norm(found - photograph) <= 1.02 * best


def test_flipped_is_its_own_inverse() -> None:
    for dtype, bits in (("float64", 64), ("float32", 32)):
        values = np.random.default_rng(0).standard_normal(50).astype(dtype)
        for bit in range(bits):
            once = flipped(values, bit)
            assert np.all(once.view(f"u{bits // 8}") ^ values.view(f"u{bits // 8}") == 1 << bit)
            assert flipped(once, bit).tobytes() == values.tobytes()


@pytest.mark.parametrize(("module", "package"), [("sklearn.datasets", "scikit-learn"), ("PIL", "Pillow")])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DemoError, match=rf"{package}.*pip install 'abft_tsm2\[examples\]'"):
        demo.run(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_wrong_choices(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="float32 has the bits 0 to 31"):
        demo.run(tmp_path, bit=32, dtype="float32")
    (tmp_path / "taken").touch()
    with pytest.raises(MatrixFileError, match="name another"):
        demo.run(tmp_path / "taken")
