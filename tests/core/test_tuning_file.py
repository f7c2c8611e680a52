"""The file of measurements: what it says of a problem, what it is silent about, and which file counts."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from abft_tsm2 import __version__
from abft_tsm2.core import choose, tuning_file
from abft_tsm2.core.device import known
from abft_tsm2.core.kernels import candidates, why_not
from abft_tsm2.core.problem import Problem
from abft_tsm2.core.tuning_file import VENDOR, Entry, Measurements, alternatives

CARD = replace(known("H200"), name="A card: with/odd name")
PROBLEM = Problem(10240, 10240, 8, "float32")
OTHER = next(config for config in alternatives(PROBLEM, CARD) if config != next(candidates(PROBLEM)))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache directory, a driver, and nothing remembered."""
    monkeypatch.setenv(tuning_file.VARIABLE, str(tmp_path))
    monkeypatch.setattr(tuning_file, "driver", lambda: "13.0")
    choose.forget()
    yield tmp_path
    choose.forget()


def entry(problem: Problem = PROBLEM, kernel: Any = OTHER) -> Entry:
    """The shape of a kernel as the fastest, or the vendor library."""
    form = next(candidates(problem)).form
    if kernel is None:
        return Entry(problem, form, VENDOR, None, 0.5, 0.5)
    return Entry(problem, form, kernel.form, kernel.shape, 0.25, 0.5)


def content(*entries: Entry) -> Measurements:
    return Measurements(CARD.name, "13.0", "14.2.0", __version__, "2026-11-20", entries)


def store(*entries: Entry, **changed: Any) -> Path:
    """Write the card's file, with some of its fields changed, and forget what was read before."""
    path = tuning_file.path_of(CARD.name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**json.loads(tuning_file.to_json(content(*entries))), **changed}))
    choose.forget()
    return path


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert tuning_file.path_of(CARD.name) == cache / "tuned" / "a-card-with-odd-name.json"
    monkeypatch.delenv(tuning_file.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert tuning_file.folder() == Path("/somewhere/abft_tsm2")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert tuning_file.folder() == Path("/home/me/.cache/abft_tsm2")


def test_a_measurement_decides_and_its_absence_leaves_what_is_shipped(caplog: pytest.LogCaptureFixture) -> None:
    default = choose.choose(PROBLEM, CARD)
    assert default == choose.shipped(PROBLEM, CARD)
    assert default.source == "model"
    store(entry())
    choice = choose.choose(PROBLEM, CARD)
    assert choice.source == "measured"
    assert choice.configs == (OTHER, *default.configs)
    store(entry(kernel=None))
    assert choose.choose(PROBLEM, CARD) == choose.Choice((), "measured")
    store(entry(kernel=default.configs[0]))
    assert choose.choose(PROBLEM, CARD) == choose.Choice(default.configs, "measured")
    assert not caplog.records


def test_the_table_of_a_card_gives_way_to_its_measurements(cache: Path) -> None:
    card = replace(CARD, name="NVIDIA H200")
    assert choose.choose(PROBLEM, card).source == "table"
    path = tuning_file.path_of(card.name)
    path.parent.mkdir()
    path.write_text(tuning_file.to_json(replace(content(entry(kernel=None)), device=card.name)))
    choose.forget()
    assert choose.choose(PROBLEM, card) == choose.Choice((), "measured")


@pytest.mark.parametrize("kernel", [OTHER, None], ids=["kernel", "vendor"])
@pytest.mark.parametrize(
    "changed",
    [
        {"m": 4 * 10240, "k": 10240 // 4},
        {"m": 10240 // 4, "k": 4 * 10240},
        {"m": 10007, "n": 5},
        {"batch": 4},
    ],
    ids=str,
)
def test_what_a_measurement_speaks_for(changed: dict[str, Any], kernel: Any) -> None:
    store(entry(kernel=kernel))
    problem = replace(PROBLEM, **changed)
    choice = choose.choose(problem, CARD)
    assert choice.source == "measured"
    assert [config.shape for config in choice.configs[:1]] == ([] if kernel is None else [kernel.shape])
    assert all(why_not(problem, config, CARD) is None for config in choice.configs)


@pytest.mark.parametrize("kernel", [OTHER, None], ids=["kernel", "vendor"])
@pytest.mark.parametrize(
    "changed",
    [
        {"m": 4 * 10240 + 1},
        {"m": 10240 // 4 - 1},
        {"k": 4 * 10240 + 1},
        {"k": 10240 // 4 - 1},
        {"batch": 5},
        {"n": 4},
        {"n": 9},
        {"order": "C"},
        {"out_order": "F"},
        {"width": 8},
        {"out": "float64"},
        {"weights": "float64"},
        {"dtype": "float64", "weights": "float64", "out": "float64"},
        {"n": 100},
        {"m": 0},
        {"order": "A"},
    ],
    ids=str,
)
def test_what_it_says_nothing_of(changed: dict[str, Any], kernel: Any) -> None:
    store(entry(kernel=kernel))
    problem = replace(PROBLEM, **changed)
    assert choose.choose(problem, CARD) == choose.shipped(problem, CARD)


SIZES = st.builds(lambda e: round(2**e), st.floats(7, 21))


@given(st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=6, unique=True), SIZES, SIZES)
def test_the_nearest_measurement_counts(sizes: list[tuple[int, int]], m: int, k: int) -> None:
    entries = [entry(replace(PROBLEM, m=a, k=b)) for a, b in sizes]
    found = tuning_file.nearest(content(*entries), replace(PROBLEM, m=m, k=k), "columns")
    near = [
        (abs(math.log2(m) - math.log2(a)) + abs(math.log2(k) - math.log2(b)), a, b)
        for a, b in sizes
        if max(m, a) <= 4 * min(m, a) and max(k, b) <= 4 * min(k, b)
    ]
    assert (found is None) == (not near)
    if found is not None:
        distance = abs(math.log2(m / found.problem.m)) + abs(math.log2(k / found.problem.k))
        assert distance <= min(near)[0] + 1e-12


def test_a_shape_that_no_longer_exists_says_nothing() -> None:
    strange = replace(OTHER, shape=replace(OTHER.shape, t1=7))
    store(entry(kernel=strange))
    assert choose.choose(PROBLEM, CARD) == choose.shipped(PROBLEM, CARD)


@given(
    st.integers(1, 10**7),
    st.integers(1, 10**5),
    st.integers(1, 32),
    st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
    st.sampled_from("FC"),
    st.sampled_from([16, 8, 4]),
)
def test_alternatives_begin_with_the_candidates_and_all_serve(
    m: int, k: int, n: int, dtype: str, order: str, width: int
) -> None:
    problem = Problem(m, k, n, dtype, order, width=width if dtype != "float64" else 16)
    found = alternatives(problem, CARD)
    made = tuple(config for config in candidates(problem) if why_not(problem, config, CARD) is None)
    assert found[: len(made)] == made
    assert len(set(found)) == len(found)
    assert all(why_not(problem, config, CARD) is None for config in found)
    assert {(config.form, config.t2) for config in found} == {(config.form, config.t2) for config in made}


# ---- files that do not count ---------------------------------------------------------------------------------------

NOT_OURS = {
    "device": "NVIDIA H100",
    "driver": "12.9",
    "version": "0.0.1",
    "schema": 2,
    "entries": {},
    "date": None,
    "cupy": 14,
}


def assert_ignored(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """The choice is the shipped one, the log has one line, and `info` says why."""
    caplog.clear()
    choose.forget()
    for n in (1, 2, 8):
        problem = replace(PROBLEM, n=n)
        assert choose.choose(problem, CARD) == choose.shipped(problem, CARD)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("abft_tsm2", logging.WARNING)
    assert reason in record.getMessage()
    assert str(tuning_file.path_of(CARD.name)) in record.getMessage()
    assert f"is ignored: {tuning_file.found(CARD.name).ignored})" in choose.described(CARD)
    assert "measured on" not in choose.described(CARD)


@pytest.mark.parametrize("name", NOT_OURS)
def test_a_foreign_file_is_ignored(name: str, caplog: pytest.LogCaptureFixture) -> None:
    store(entry(), **{name: NOT_OURS[name]})
    assert_ignored(caplog, "entries" if name == "entries" else "when" if name in ("date", "cupy") else repr(name)[1:-1])


def test_a_file_of_a_machine_without_cupy_is_ignored(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(entry())
    monkeypatch.setattr(tuning_file, "driver", lambda: "")
    assert_ignored(caplog, "its driver is '13.0', and here it is ''")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"schema": 1}'])
def test_a_corrupt_file_is_ignored(text: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store(entry()).write_bytes(text)
    assert_ignored(caplog, "ignored: ")


def test_a_folder_in_its_place_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    tuning_file.path_of(CARD.name).mkdir(parents=True)
    assert_ignored(caplog, "directory")


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("form", "diagonal"),
        ("kernel", "diagonal"),
        ("kernel", VENDOR),
        ("kernel", []),
        ("shape", None),
        ("shape", {"t1": 128}),
        ("shape", {**vars(OTHER.shape), "t1": 0}),
        ("shape", {**vars(OTHER.shape), "t1": "128"}),
        ("shape", {**vars(OTHER.shape), "t1": True}),
        ("shape", {**vars(OTHER.shape), "t9": 1}),
        ("problem", None),
        ("problem", {**vars(PROBLEM), "m": 0}),
        ("problem", {**vars(PROBLEM), "m": 10240.0}),
        ("problem", {**vars(PROBLEM), "dtype": 32}),
        ("milliseconds", 0.0),
        ("milliseconds", math.nan),
        ("milliseconds", "fast"),
        ("vendor", -1.0),
        ("speed", 1),
    ],
)
def test_one_bad_entry_spoils_the_file(where: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    good = json.loads(tuning_file.to_json(content(entry())))["entries"][0]
    store(entries=[good])
    assert choose.choose(PROBLEM, CARD).source == "measured"
    store(entries=[good, {**good, where: value}])
    assert_ignored(caplog, "ignored: ")


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.floats() | st.sampled_from(["", "columns", VENDOR, "float32"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["m", "t1", "x"]), inner, max_size=2),
    max_leaves=4,
)


@given(st.data())
def test_no_content_ever_makes_a_product_fail(data: st.DataObject) -> None:
    """Any one value of a good file, at any depth, replaced by any other."""
    whole = json.loads(tuning_file.to_json(content(entry())))
    inner = whole
    while True:
        name = data.draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else list(range(len(inner)))))
        if not (inner[name] and isinstance(inner[name], dict | list)) or data.draw(st.booleans()):
            break
        inner = inner[name]
    inner[name] = data.draw(JSON)
    store(**whole)
    for problem in (PROBLEM, replace(PROBLEM, m=3, n=1), replace(PROBLEM, order="C")):
        assert choose.choose(problem, CARD).source in ("measured", "model")


PROBLEMS = st.builds(
    lambda m, k, n, dtype, order, batch: Problem(m, k, n, dtype, order, batch=batch),
    SIZES,
    SIZES,
    st.integers(1, 32),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from("FC"),
    st.integers(1, 9),
)
TIMES = st.floats(1e-3, 1e3)
ENTRIES = st.one_of(
    st.builds(Entry, PROBLEMS, st.just("rows"), st.just(VENDOR), st.none(), TIMES, TIMES),
    st.builds(Entry, PROBLEMS, st.just("small"), st.just("rows"), st.just(OTHER.shape), TIMES, st.none() | TIMES),
)


@given(st.lists(ENTRIES, max_size=5))
def test_a_file_reads_as_it_was_written(entries: list[Entry]) -> None:
    written = content(*entries)
    path = store()
    path.write_text(tuning_file.to_json(written))
    assert tuning_file.read(path, CARD.name) == written


def test_the_file_is_read_once_and_again_after_forgetting() -> None:
    path = store(entry())
    assert choose.choose(PROBLEM, CARD).source == "measured"
    path.unlink()
    assert choose.choose(replace(PROBLEM, n=7), CARD).source == "measured"
    choose.forget()
    assert choose.choose(PROBLEM, CARD).source == "model"


def test_what_decides_in_words(cache: Path) -> None:
    assert choose.described(CARD) == "model: no measurement of this card; run abft-tsm2 tune"
    assert choose.described(replace(CARD, name="NVIDIA H200")) == "table shipped for NVIDIA H200"
    path = store(entry(), entry(replace(PROBLEM, n=1)))
    expected = f"measured on 2026-11-20 with driver 13.0, 2 cases, {path}; elsewhere the model"
    assert choose.described(CARD) == expected


def test_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the fixture's
    runtime = SimpleNamespace(driverGetVersion=lambda: 13020)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    assert tuning_file.driver() == "13.2"
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert tuning_file.driver() == ""


def test_nothing_is_measured_by_choosing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Untouchable:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"cupy.{name} was used")

    monkeypatch.setitem(sys.modules, "cupy", Untouchable())
    for stored in ((), (entry(),)):
        store(*stored)
        for n in range(1, 40):
            assert choose.choose(replace(PROBLEM, n=n), CARD).source in ("measured", "model")
