"""The import graph is part of the design: a module imports only from what is below it.

An import counts wherever it stands: at the top, inside a function, relative, or by name through importlib.
One under ``if TYPE_CHECKING`` never runs: it may name a later module of its own layer too, but none above.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "abft_tsm2"
INIT = "__init__.py"
ROOT = Path(__file__).resolve().parents[1] / PACKAGE

# Lowest first: a folder or a file at the top is in one layer; inside a folder no imports form a circle.
LAYERS = [
    ["errors"],
    ["arrays"],
    ["place"],
    ["record"],
    ["report"],
    ["policy"],
    ["core"],
    ["checksum"],
    ["gemm", "linalg"],
    ["io"],
    ["faults"],
    ["interop"],
    ["cli"],
    ["__main__"],
]
LAYER = {name: number for number, layer in enumerate(LAYERS) for name in layer}
FOUNDATION = {"errors", "arrays", "place", "record", "report", "policy"}
APART = {("checksum.correct", "checksum.verify")}  # neighbours that must not know each other, beside those of a layer
# Where arrays arrive that another module serves, and operators of what products are made of.
DOORS = {("arrays", "interop.dask"), ("checksum.encoded", "gemm")}
PUBLIC = {"core.config", "core.model"}  # paths that users import, and nothing in the package

TOP = ""  # the package itself: its lazy names reach everything, so only the outermost layer may take them
FREE = {"__version__"}
HEAVY = {
    "scipy",
    "sklearn",
    "PIL",
    "matplotlib",
    "pandas",
    "cupy",
    "cupyx",
    "ml_dtypes",
    "jinja2",
    "dask",
    "distributed",
}
SERVED = {"interop.dask": {"dask", "distributed"}}  # what a folder is for, and is not imported without
EMPTY_NAMES = {"util", "utils", "helper", "helpers", "common", "misc"}
MAX_LINES = 400


class Import(NamedTuple):
    target: str  # "checksum.encode", or TOP
    line: int
    typing_only: bool


def modules(root: Path) -> dict[str, Path]:
    """Dotted name below the package -> file, without __init__.py but for that of gemm/."""
    files = (path for path in sorted(root.rglob("*.py")) if path.name != INIT or path.parent.name == "gemm")
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def walk(node: ast.AST, typing_only: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node, with whether it stands under ``if TYPE_CHECKING``."""
    yield node, typing_only
    for field, value in ast.iter_fields(node):
        inside = typing_only or (is_type_checking(node) and field == "body")
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from walk(child, inside)


def absolute(base: str | None, level: int, parents: list[str]) -> str:
    """The dotted name an import statement means, seen from inside the package ``parents``."""
    start = parents[: len(parents) - level + 1] if level else []
    return ".".join([*start, *([base] if base else [])])


def imported_names(node: ast.AST, parents: list[str]) -> Iterator[str]:
    """Full dotted names a statement imports; of ``from a import b`` it is "a.b", whatever b is."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = absolute(node.module, node.level, parents)
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in {
        "import_module",
        "importlib.import_module",
        "__import__",
    }:
        if not (node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)):
            raise AssertionError(f"line {node.lineno}: an import whose target cannot be read")
        name = node.args[0].value
        level = len(name) - len(name.lstrip("."))
        yield absolute(name.lstrip("."), level, parents)


def owner(dotted: str, known: Collection[str]) -> str:
    """The module a full dotted name belongs to: "abft_tsm2.report.Fault" -> "report"; TOP for a name of the package."""
    inner = dotted.removeprefix(PACKAGE).lstrip(".")
    while inner and inner not in known:
        inner = inner.rpartition(".")[0]
    return inner


def room(name: str) -> str:
    """The folder or file at the top that a module belongs to."""
    return name.partition(".")[0]


def imports(name: str, path: Path, known: Collection[str]) -> Iterator[Import]:
    """Imports from inside the package."""
    parents = [PACKAGE, *name.split(".")[: None if path.name == INIT else -1]]
    for node, typing_only in walk(ast.parse(path.read_text(encoding="utf-8"))):
        for dotted in imported_names(node, parents):
            inside = dotted == PACKAGE or dotted.startswith(f"{PACKAGE}.")
            if (name, dotted.removeprefix(f"{PACKAGE}.")) in DOORS:
                continue
            if inside and dotted.rpartition(".")[2] not in FREE:
                yield Import(owner(dotted, known), node.lineno, typing_only)  # type: ignore[attr-defined]


def order_faults(root: Path) -> list[str]:
    """Every import that does not point down."""
    faults = []
    found = modules(root)
    known = {*modules(ROOT), *found}
    for name, path in found.items():
        own, here = LAYER.get(room(name)), f"{name}, line"
        if own is None:
            faults.append(f"{name}: {room(name)} has no layer")
            continue
        for target, line, typing_only in imports(name, path, known):
            if target == TOP:
                allowed = own >= LAYER["cli"]
            elif typing_only and {name, target} <= FOUNDATION:
                allowed = True
            elif room(target) == room(name):
                allowed = (name, target) not in APART
            else:
                allowed = LAYER[room(target)] < own
            if not allowed or target in PUBLIC:
                faults.append(f"{here} {line}: imports {target or PACKAGE}, which is not below it")
    return faults


def circle_faults(root: Path) -> list[str]:
    """Modules that import one another, directly or through others."""
    found = modules(root)
    below = {
        name: {each.target for each in imports(name, path, found) if not each.typing_only} & set(found)
        for name, path in found.items()
    }
    while leaves := [name for name, others in below.items() if not others & set(below)]:
        for name in leaves:
            del below[name]
    return [f"imports form a circle among {', '.join(sorted(below))}"] if below else []


def heavy_faults(root: Path) -> list[str]:
    """Heavy libraries imported when the module is, not when they are needed."""
    faults = []
    for name, path in modules(root).items():
        heavy = HEAVY - SERVED.get(name.rpartition(".")[0], set())
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) and not is_type_checking(node):
                dotted = (n for inner in ast.walk(node) for n in imported_names(inner, [PACKAGE]))
                faults += [f"{name}: imports {n} at its top" for n in dotted if n.partition(".")[0] in heavy]
    return faults


def code_lines(text: str) -> int:
    """Lines with code: neither blank, nor comment, nor docstring."""
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in ignored:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def size_faults(root: Path) -> list[str]:
    lines = {path: code_lines(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.py"))}
    return [f"{path.name}: {count} lines of code" for path, count in lines.items() if count > MAX_LINES]


def name_faults(root: Path) -> list[str]:
    return [path.name for path in sorted(root.rglob("*.py")) if path.stem in EMPTY_NAMES]


def class_faults(root: Path) -> list[str]:
    """Classes of the same name, a leading underscore aside."""
    homes: dict[str, list[str]] = {}
    for name, path in modules(root).items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(name)
    return [f"class {name}: in {' and '.join(found)}" for name, found in homes.items() if len(found) > 1]


def map_faults(root: Path, text: str) -> list[str]:
    """Modules that the map of a text does not name."""
    words = set(re.findall(r"\w+", text))
    return [f"{name}: not on the map" for name in modules(root) if not set(name.strip("_").split(".")) <= words]


def test_the_map_has_every_module():
    text = (ROOT.parent / "AGENTS.md").read_text(encoding="utf-8").split("```")[1]
    assert map_faults(ROOT, text) == []
    assert map_faults(ROOT, text.replace("tuning_file ", "")) == ["core.tuning_file: not on the map"]


def test_every_layer_exists():
    assert {room(name) for name in modules(ROOT)} == {name for layer in LAYERS for name in layer}


@pytest.mark.parametrize("check", [order_faults, circle_faults, class_faults, heavy_faults, size_faults, name_faults])
def test_the_package_keeps_the_rules(check):
    assert check(ROOT) == []


def test_benchmarks_import_no_tests_and_no_circle():
    found = {f"benchmarks.{name}": path for name, path in modules(ROOT.parent / "benchmarks").items()}
    below = {}
    for name, path in found.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        dotted = {each for node, _ in walk(tree) for each in imported_names(node, ["benchmarks"])}
        assert not [each for each in dotted if each.partition(".")[0] == "tests"], name
        below[name] = {each for full in dotted for each in (full, full.rpartition(".")[0]) if each in found} - {name}
    while leaves := [name for name, others in below.items() if not others & set(below)]:
        for name in leaves:
            del below[name]
    assert not below


def test_subpackages_import_nothing():
    # Names re-exported by core/ or checksum/ would hide which module an import really means. Those of faults/ and
    # interop/dask/ are for users, lazy like the package's own, and nothing in the package takes them from there.
    for path in set(ROOT.rglob("*/__init__.py")) - {
        ROOT / "__init__.py",
        ROOT / "faults" / "__init__.py",
        ROOT / "gemm" / "__init__.py",
        ROOT / "interop" / "dask" / "__init__.py",
    }:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        assert not any(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes), path


TYPING = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"


def plant(root: Path, name: str, text: str) -> Path:
    path = root.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("report", "from abft_tsm2.policy import errstate\n", id="sideways"),
        pytest.param("report", "from abft_tsm2 import policy\n", id="module-from-package"),
        pytest.param("report", "import abft_tsm2.gemm as g\n", id="plain-import"),
        pytest.param("errors", "from .report import Report\n", id="relative"),
        pytest.param("errors", "from . import report\n", id="relative-module"),
        pytest.param("core.tsm2", "from ..checksum import encode\n", id="relative-two-up"),
        pytest.param("core.tsm2", "def f():\n    from abft_tsm2.gemm import x\n", id="lazy"),
        pytest.param("core.tsm2", "import importlib\nimportlib.import_module('abft_tsm2.gemm')\n", id="by-name"),
        pytest.param("checksum.correct", "from .verify import verify\n", id="kept-apart"),
        pytest.param("gemm", "from abft_tsm2 import protected_gemm\n", id="through-the-lazy-names"),
        pytest.param("gemm", "import abft_tsm2\n", id="the-whole-package"),
        pytest.param(
            "core.tsm2",
            f"{TYPING}    from abft_tsm2.gemm import x\n",
            id="typing-only-but-above",
        ),
        pytest.param(
            "errors",
            f"{TYPING}    pass\nelse:\n    from .report import Report\n",
            id="else-of-type-checking",
        ),
    ],
)
def test_a_planted_import_is_found(tmp_path, name, text):
    assert len(order_faults(plant(tmp_path, name, text))) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("policy", "from abft_tsm2.report import Report\nfrom .errors import AbftError\nimport numpy\n"),
        (
            "checksum.verify",
            "def f():\n    from abft_tsm2.checksum import bounds\n    from ..core import tsm2\n",
        ),
        ("errors", f"{TYPING}    from abft_tsm2.report import Report\n"),
        ("cli.main", "from abft_tsm2 import __version__, protected_gemm\n"),
        ("report", "from abft_tsm2 import __version__\n"),
    ],
)
def test_a_rightful_import_passes(tmp_path, name, text):
    assert order_faults(plant(tmp_path, name, text)) == []


def test_an_unreadable_import_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="cannot be read"):
        order_faults(plant(tmp_path, "gemm", "from importlib import import_module\nimport_module('a' + 'b')\n"))


@pytest.mark.parametrize(
    ("check", "name", "text"),
    [
        (circle_faults, "core.tsm2", "def f():\n    from abft_tsm2.core import tsm2\n"),
        (heavy_faults, "gemm", "import scipy.linalg\n"),
        (heavy_faults, "gemm", "try:\n    from cupy import ndarray\nexcept ImportError:\n    pass\n"),
        (size_faults, "gemm", "x = 1\n" * (MAX_LINES + 1)),
        (class_faults, "core.tsm2", "class Plan: ...\n\n\nclass _Plan: ...\n"),
        (name_faults, "core.utils", "x = 1\n"),
    ],
)
def test_every_other_rule_bites(tmp_path, check, name, text):
    assert len(check(plant(tmp_path, name, text))) == 1


def test_heavy_imports_inside_functions_pass(tmp_path):
    text = f"import numpy\n{TYPING}    import cupy\n\ndef f():\n    import scipy\n"
    assert heavy_faults(plant(tmp_path, "gemm", text)) == []


def test_every_module_of_a_planted_tree_is_seen(tmp_path):
    plant(tmp_path, "stray", "x = 1\n")
    assert set(modules(plant(tmp_path, "checksum.encode", ""))) == {"stray", "checksum.encode"}
