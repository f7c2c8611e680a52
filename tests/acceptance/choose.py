"""Choose mutants of the package at random, with cosmic-ray's operators: a line of code, then one change of it.

Every line of code of the folders has the same weight. The draw is one sequence for a seed, so that a longer list begins
with the shorter one; `mutants.csv` keeps more of it than are counted, for those whose lines no test touches.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FOLDERS = ("checksum", "gemm", "linalg", "core")
NOT_MUTATED = ("VariableReplacer", "VariableInserter")  # they need arguments


class Mutant(NamedTuple):
    """`occurrence`: of the operator in the file, as cosmic-ray counts; `old` becomes `new` at `line`."""

    file: str
    line: int
    operator: str
    occurrence: int
    old: str
    new: str


def code_lines(source: str) -> list[int]:
    """Lines of statements and of their parts; not docstrings, annotations, imports or messages of exceptions."""
    tree = ast.parse(source)
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr):
            lines.update((node.lineno, node.end_lineno or node.lineno))
    return sorted(lines - _left_out(tree))


def _left_out(tree: ast.Module) -> set[int]:
    """Lines that hold nothing but what is not mutated."""
    found: set[int] = set()
    for node in ast.walk(tree):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if text or isinstance(node, ast.Import | ast.ImportFrom | ast.Raise):
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


Span = tuple[tuple[int, int], tuple[int, int]]


def _spans_left_out(source: str) -> list[Span]:
    """From and to (line, column) of annotations, f-strings, exceptions that are raised, and imports."""
    found: list[Any] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            found += [one.annotation for one in every if one is not None] + [node.returns]
        elif isinstance(node, ast.AnnAssign):
            found.append(node.annotation)
        elif isinstance(node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom):
            found.append(node)
    return [((x.lineno, x.col_offset), (x.end_lineno, x.end_col_offset)) for x in found if x is not None]


def _positions(source: str) -> Iterator[tuple[int, str, int]]:
    """(line, operator, occurrence) of all mutations of a source."""
    import cosmic_ray.plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    nodes, left_out = list(ast_nodes(get_ast(source))), _spans_left_out(source)
    for name in sorted(cosmic_ray.plugins.operator_names()):
        if name.endswith(NOT_MUTATED):
            continue
        operator = cosmic_ray.plugins.get_operator(name)()
        places = (place for node in nodes for place in operator.mutation_positions(node))
        for occurrence, (start, end) in enumerate(places):
            if not any(first <= start and end <= last for first, last in left_out):
                yield start[0], name, occurrence


def _family(operator: str) -> str:
    """Operators that replace one kind of thing count as one: a comparison has eight of them."""
    return operator.partition("_")[0]


def _mutated(source: str, line: int, operator: str, occurrence: int) -> tuple[int, str, str] | None:
    """The first line that differs, and the lines before and after; None where nothing does, or it is no Python."""
    import cosmic_ray.plugins
    from cosmic_ray.mutating import mutate_code

    changed = mutate_code(source, cosmic_ray.plugins.get_operator(operator)(), occurrence)
    if changed is None or changed == source or not _compiles(changed):
        return None
    before, after = source.split("\n"), changed.split("\n")
    first = next(i for i, (x, y) in enumerate(zip(before, after, strict=False)) if x != y)
    last = 0
    while last < min(len(before), len(after)) - first - 1 and before[-1 - last] == after[-1 - last]:
        last += 1
    return first + 1, "\n".join(before[first : len(before) - last]), "\n".join(after[first : len(after) - last])


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def draw(package: Path, seed: int, count: int) -> list[Mutant]:
    """The first `count` mutants of the sequence of this seed; a line without a mutation is drawn in vain."""
    files = sorted(path for folder in FOLDERS for path in (package / folder).rglob("*.py"))
    sources = {path: path.read_text() for path in files}
    lines = [(path, line) for path in files for line in code_lines(sources[path])]
    random.Random(seed).shuffle(lines)
    rng, found = random.Random(f"{seed} of a line"), []
    mutations: dict[Path, dict[int, dict[str, list[tuple[str, int]]]]] = {}
    for path, line in lines:
        if len(found) == count:
            break
        if path not in mutations:
            mutations[path] = {}
            for at, operator, occurrence in _positions(sources[path]):
                of_line = mutations[path].setdefault(at, {})
                of_line.setdefault(_family(operator), []).append((operator, occurrence))
        families = mutations[path].get(line)
        if not families:
            continue
        operator, occurrence = rng.choice(families[rng.choice(sorted(families))])
        changed = _mutated(sources[path], line, operator, occurrence)
        if changed is not None:
            found.append(Mutant(str(path.relative_to(package.parent)), changed[0], operator, occurrence, *changed[1:]))
    return found
