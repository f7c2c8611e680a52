"""Copies of a checkout, one for each process that edits the package and runs tests."""

from __future__ import annotations

import queue
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parents[2]
IGNORED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "_build", "*.egg-info")


@contextmanager
def copies(checkout: Path, count: int) -> Iterator[queue.SimpleQueue[Path]]:
    """So many copies of the checkout in temporary folders; who takes one from the queue puts it back."""
    with tempfile.TemporaryDirectory(prefix="abft_acceptance_") as folder:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(count):
            tree = Path(folder, str(number))
            shutil.copytree(checkout, tree, ignore=IGNORED, symlinks=True)
            trees.put(tree)
        yield trees
