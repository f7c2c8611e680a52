"""What the tests of other libraries run under: marked `full`, their warnings ignored, failures expected by a table.

A file's EXPECTED and LEFT_OUT map regular expressions to reasons. A test whose name, from the class on, has a match of
one in EXPECTED is expected to fail, and fails if it passes. One that matches an entry of LEFT_OUT is not run.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
THEIR_MARKERS = (
    *("slow", "xslow", "fail_slow", "thread_unsafe", "parallel_threads", "parallel_threads_limit"),
    *(
        "array_api_backends",
        "skip_xp_backends",
        "xfail_xp_backends",
        "uses_xp_capabilities",
        "leaks_references",
        "valgrind_error",
    ),
)


def pytest_configure(config: pytest.Config) -> None:
    for name in THEIR_MARKERS:
        config.addinivalue_line("markers", f"{name}: of another library's tests")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without the full run their modules are not imported: that would take seconds of every run."""
    return True if collection_path.name.startswith("test_") and "not full" in config.option.markexpr else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    theirs = [item for item in items if HERE in item.path.parents]
    left_out = {item for item in theirs if _of_table(item, "LEFT_OUT") or item.get_closest_marker("xslow")}
    used: set[tuple[Path, str]] = set()
    for item in theirs:
        item.add_marker(pytest.mark.full)
        item.add_marker(pytest.mark.filterwarnings("ignore", "error::abft_tsm2.CorruptionWarning"))
        used |= {(item.path, pattern) for name in ("EXPECTED", "LEFT_OUT") for pattern in _of_table(item, name)}
        reasons = _of_table(item, "EXPECTED")
        if reasons:
            item.add_marker(pytest.mark.xfail(reason="; ".join(reasons.values()), strict=True))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    if not any("::" in argument for argument in config.args):
        _require_use(theirs, used)


def _of_table(item: pytest.Item, table: str) -> dict[str, str]:
    """The entries of a file's table that a test matches."""
    name = item.nodeid.partition("::")[2]
    entries = getattr(item.module, table, {})  # type: ignore[attr-defined]
    return {pattern: reason for pattern, reason in entries.items() if re.search(pattern, name)}


def _require_use(items: list[pytest.Item], used: set[tuple[Path, str]]) -> None:
    """Every entry is of a test that there is."""
    for path, module in {item.path: item.module for item in items}.items():  # type: ignore[attr-defined]
        for pattern in (*getattr(module, "EXPECTED", ()), *getattr(module, "LEFT_OUT", ())):
            if (path, pattern) not in used:
                raise pytest.UsageError(f"{path.name}: no test matches {pattern!r}: remove the entry")
