"""The acceptance of the tests holds what it says: edits that do not fit are errors, a defect that no test sees is
reported, and a run that ended early goes on where it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.acceptance import defects, mutants, trees
from tests.acceptance.choose import Mutant
from tests.acceptance.contexts import Contexts
from tests.acceptance.edits import Edit, EditError, LineEdit, edited
from tests.acceptance.table import Table

TOY = {
    "toy/__init__.py": "",
    "toy/check.py": "def clean(x):\n    return x == x\n\n\ndef unseen(x):\n    return x == x\n",
    "tests/test_toy.py": "from toy.check import clean\n\n\ndef test_nan():\n    assert not clean(float('nan'))\n",
    "pyproject.toml": "[tool.pytest.ini_options]\ntestpaths = ['tests']\n",
}
LIST = """
[[defect]]
name = "seen"
without = "NaN is clean."
file = "toy/check.py"
old = "x == x"
new = "True or x"
found = 2
tests = ["tests"]
hint = ["tests/test_that_is_gone.py", "tests/test_toy.py::test_of_no_such_name"]

[[defect]]
name = "unseen"
without = "NaN is clean elsewhere."
tests = ["tests"]
[[defect.edit]]
file = "toy/check.py"
old = "x == x"
new = "True or x"
occurrence = 2
found = 2
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    for name, text in TOY.items():
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "checkout"


def test_an_edit_replaces_one_place_and_refuses_what_does_not_fit() -> None:
    assert Edit("f", "a", "c", 2, 2).apply("a b a") == "a b c"
    for edit in (Edit("f", "d", "c"), Edit("f", "a", "c"), Edit("f", "a", "c", 3, 2), Edit("f", "", "c")):
        with pytest.raises(EditError, match="f:"):
            edit.apply("a b a")


def test_an_edit_of_lines_holds_to_its_place() -> None:
    assert LineEdit("f", 2, "b\nc", "d").apply("a\nb\nc\na") == "a\nd\na"
    with pytest.raises(EditError, match="f:1"):
        LineEdit("f", 1, "b", "d").apply("a\nb")


def test_a_tree_is_as_it_was_after_an_edit_and_after_one_that_failed(toy: Path) -> None:
    before = (toy / "toy/check.py").read_text()
    with edited(toy, (Edit("toy/check.py", "x == x", "y", 1, 2),)):
        assert (toy / "toy/check.py").read_text() != before
    assert (toy / "toy/check.py").read_text() == before
    with (
        pytest.raises(EditError),
        edited(toy, (Edit("toy/check.py", "x == x", "y", 1, 2), Edit("toy/check.py", "z", ""))),
    ):
        pass
    assert (toy / "toy/check.py").read_text() == before


def test_a_defect_is_killed_or_survives_and_is_not_judged_twice(toy: Path, tmp_path: Path) -> None:
    listed, results = defects.parse(LIST), tmp_path / "results.csv"
    options = defects.Options(limit=60.0)
    table = defects.run(listed[:1], toy, results, options)
    row = table.rows["seen"]
    assert (row["outcome"], row["first_failing"]) == ("killed", "tests/test_toy.py::test_nan")
    assert row["without_the_defect"] == "passes"
    results.write_text(results.read_text().replace("killed", "kept"))
    table = defects.run(listed, toy, results, options)
    assert {name: row["outcome"] for name, row in table.rows.items()} == {"seen": "kept", "unseen": "survived"}
    assert defects.summary(listed, table) == 1


def test_a_defect_that_does_not_fit_is_an_error(toy: Path, tmp_path: Path) -> None:
    listed = defects.parse(LIST.replace("x == x", "x != x"))
    table = defects.run(listed, toy, tmp_path / "results.csv", defects.Options())
    assert {row["outcome"] for row in table.rows.values()} == {"error"}


def test_a_table_keeps_its_rows(tmp_path: Path) -> None:
    Table(tmp_path / "t.csv", ("name", "text")).put({"name": "a", "text": "of two\nlines, and a comma"})
    assert Table(tmp_path / "t.csv", ("name", "text")).rows["a"]["text"] == "of two\nlines, and a comma"


def test_every_defect_of_the_list_fits_the_package() -> None:
    for defect in defects.frozen():
        sources: dict[str, str] = {}
        for edit in defect.edits:
            source = sources.get(edit.file) or (trees.HERE / edit.file).read_text()
            sources[edit.file] = edit.apply(source)
            assert edit.file.startswith(("abft_tsm2/", "kernels/"))
        for file, source in sources.items():
            compile(source, file, "exec")


# ---- mutants -------------------------------------------------------------------------------------------------------

MUTANT = Mutant("toy/check.py", 2, "core/ReplaceComparisonOperator_Eq_LtE", 0, "    return x == x", "    return True")
TOUCHING = {"tests": ["tests/test_toy.py::test_nan"], "lines": {"toy/check.py": {"0": [0], "2": [0]}}, "arcs": {}}


@pytest.fixture
def listed(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Contexts:
    """Two mutants of the toy, of which a test touches the first."""
    for name, value in (("LIST", tmp_path / "mutants.csv"), ("RESULTS", tmp_path)):
        monkeypatch.setattr(mutants, name, value)
    monkeypatch.setattr(mutants.trees, "HERE", toy)
    contexts = Contexts(tmp_path / "contexts.json.gz")
    contexts.put("tests", TOUCHING)
    mutants.write([MUTANT, MUTANT._replace(line=6)], 2, [], mutants.LIST)
    return contexts


def test_mutants_are_run_on_the_tests_that_touch_them_and_survivors_on_all(toy: Path, listed: Contexts) -> None:
    chosen = mutants.read(mutants.LIST)
    options = mutants.Options(limit=60.0)
    rows = [mutants.judge(toy, number, one, listed, options) for number, _, one in chosen]
    assert [row["outcome"] for row in rows] == ["killed", "survived"]
    assert [row["tests"] for row in rows] == [1, 0]
    whole = mutants.judge(toy, *chosen[1][::2], listed, replace(options, whole=True))
    assert (whole["outcome"], whole["tests"], whole["on"]) == ("survived", 1, "whole suite")


def test_mutants_that_no_test_touches_do_not_count(listed: Contexts, tmp_path: Path) -> None:
    three = [MUTANT._replace(line=6), MUTANT, MUTANT]
    table = mutants.write(three, 1, [Contexts(listed.path)], tmp_path / "listed.csv")
    assert [row["state"] for row in table.rows.values()] == ["not covered", "chosen", "reserve"]


def test_the_lines_of_a_mutant_are_those_of_its_statement(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants.trees, "HERE", toy)
    (toy / "toy/check.py").write_text(
        "def f(\n    x=1,\n):\n    if (\n        x\n    ):\n        return 1\n    return 2\n"
    )
    lines = [mutants.statement(MUTANT._replace(line=line, old="?")) for line in (2, 5, 7, 8)]
    assert lines == [range(1, 9), range(4, 7), range(7, 8), range(8, 9)]


def test_the_listed_mutants_fit_the_package() -> None:
    for _, _, one in mutants.read():
        changed = LineEdit(one.file, one.line, one.old, one.new).apply((trees.HERE / one.file).read_text())
        compile(changed, one.file, "exec")
