"""List the mutants of kernels that the tests plant: `python -m tests.acceptance.kernel_mutants [FILE]`.

A mutant is a tuple in a table of a test module: (kernel, old text, occurrence, new text, how it is noticed), some
without the kernel, the occurrence or the last. The list is frozen: whoever rewrites those tests compares it with a new
one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.acceptance import trees

LIST = Path(__file__).parent / "kernel_mutants.txt"
FOLDERS = ("tests/kernels", "tests/core", "tests/support", "tests/gemm", "tests/linalg", "tests/checksum")
OF_ONE_KERNEL = ("test_encode_both",)  # beside tests/kernels: tables that do not name their kernel
TABLES = ("PLANTED", "FAULTS", "READS", "ADDRESSES", "MUTANTS", "RACES")


class KernelMutant(NamedTuple):
    kernel: str
    name: str
    old: str
    occurrence: int
    new: str
    noticed: str

    def __str__(self) -> str:
        return "\t".join(x.replace("\n", "\\n") if isinstance(x, str) else str(x) for x in self)


def as_mutant(name: str, of: Any, table: str) -> KernelMutant | None:
    """The mutant that an entry of a table stands for; None if it is of something else."""
    if not isinstance(of, tuple):
        return None
    kernel, rest = (getattr(of[0], "name", ""), of[1:]) if hasattr(of[0], "name") else (table, of)
    if rest and callable(rest[0]):
        return None
    if table.startswith("test_cuda_on_cpu"):  # (kernel, old text, new text, how it is noticed)
        kernel, rest = str(of[0]), of[1:]
    match rest:
        case (str(old), int(occurrence), str(new), *more):
            pass
        case (str(old), str() | None as new, *more):
            occurrence = 0
        case _:
            return None
    noticed = " ".join(str(getattr(x, "name", x)) for x in more)
    return KernelMutant(
        kernel, name, old, occurrence, "(left out)" if new is None else new, noticed or "anything is said"
    )


def found() -> Iterator[KernelMutant]:
    """The mutants of all tables, each once."""
    seen: set[tuple[str | int, ...]] = set()
    for folder in FOLDERS:
        for path in sorted((trees.HERE / folder).glob("*.py")):
            if (path.name.startswith("test_") and not path.stem.endswith("on_gpu")) or folder.endswith("support"):
                if not any(table in path.read_text() for table in TABLES):
                    continue
                module = importlib.import_module(".".join(path.relative_to(trees.HERE).with_suffix("").parts))
                for table, value in vars(module).items():
                    if not table.isupper() or not any(word in table for word in TABLES):
                        continue
                    unnamed = folder == "tests/kernels" or path.stem in OF_ONE_KERNEL
                    for one in _of_table(f"{path.stem}.{table}", value, seen):
                        if unnamed or not one.kernel.startswith(path.stem):
                            yield one


def _of_table(table: str, value: Any, seen: set[tuple[str | int, ...]]) -> Iterator[KernelMutant]:
    if isinstance(value, Mapping):
        for name, entry in value.items():
            one = as_mutant(str(name), entry, table)
            if one is not None and (key := one[:5]) not in seen:
                seen.add(key)
                yield one
    elif isinstance(value, list) and value and all(isinstance(x, tuple) and len(x) == 2 for x in value):
        for kind, number in value:  # kinds of faults of a model of the hardware, at so many places
            yield KernelMutant(table, str(kind), str(kind), int(number), "(a fault of the machine)", "anything is said")


def main(path: Path = LIST) -> None:
    mutants = list(found())
    lines = [
        f"# {len(mutants)} mutants of kernels",
        "# kernel or table\tname\told\toccurrence (0 is the first)\tnew\tnoticed by",
    ]
    path.write_text("\n".join([*lines, *map(str, mutants)]) + "\n")
    print(f"{len(mutants)} mutants of kernels in {path}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
