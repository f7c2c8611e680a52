"""The walk of a clean protected product through the code: functions called, and files entered.

    python -m benchmarks.walk              a 200 x 300 x 100 product of float64 on NumPy
    python -m benchmarks.walk --verbose    each function, and how often it was called

Counts the calls of `sys.setprofile`: of the package's Python functions, and of Python functions outside of it.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import abft_tsm2
from abft_tsm2 import protected_gemm

ROOT = Path(abft_tsm2.__file__).parent
FOUNDATION = ("arrays.py", "errors.py", "policy.py", "report.py")


@dataclass
class Walk:
    """Calls of the package's functions, by file and name, and the number of those outside."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    outside: int = 0

    @property
    def total(self) -> int:
        """Calls of the package's functions."""
        return self.calls.total()

    @property
    def files(self) -> Counter[str]:
        """Calls of each file beside those of the foundation."""
        found: Counter[str] = Counter()
        for (file, _), count in self.calls.items():
            if file not in FOUNDATION:
                found[file] += count
        return found

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            self.calls[path.relative_to(ROOT).as_posix(), frame.f_code.co_qualname] += 1
        else:
            self.outside += 1


def walk(A: Any, B: Any) -> Walk:
    """Of one product, after others of the same."""
    for _ in range(3):
        protected_gemm(A, B)
    found = Walk()
    before = sys.getprofile()
    sys.setprofile(found)
    try:
        protected_gemm(A, B)
    finally:
        sys.setprofile(before)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbose", action="store_true", help="each function, and how often it was called")
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    found = walk(rng.standard_normal((200, 300)), rng.standard_normal((300, 100)))
    print(f"{found.total} calls of {len(found.calls)} functions of the package, {found.outside} of others")
    print(f"{len(found.files)} files beside the foundation's: {', '.join(found.files)}")
    if options.verbose:
        for (file, name), count in found.calls.most_common():
            print(f"{count:4} {file} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
