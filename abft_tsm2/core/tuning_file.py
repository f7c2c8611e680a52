"""What was measured on this user's card: the file that ``abft-tsm2 tune`` leaves behind, and what it says of a problem.

A file belongs to a card, its driver and a version of this package; one that belongs to others, or cannot be read, is
left alone and counts for nothing. Nothing is measured here, and nothing written.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from abft_tsm2 import __version__
from abft_tsm2.core.device import Device
from abft_tsm2.core.kernels import FORMS, Stream, candidates, why_not
from abft_tsm2.core.problem import Problem
from abft_tsm2.core.tuned import Shape

SCHEMA = 1
VARIABLE = "ABFT_TSM2_CACHE_DIR"  # environment: a cache directory other than the user's
VENDOR = "vendor"  # in place of a form: the vendor library multiplies
NEAR = 2.0  # powers of two by which m, k and the number of products may differ from what was measured
_log = logging.getLogger("abft_tsm2")
_Record = TypeVar("_Record", Problem, Shape)
_TYPES: Mapping[str, type] = {"int": int, "str": str, "bool": bool}


@dataclass(frozen=True)
class Entry:
    """What multiplies one problem.

    Attributes
    ----------
    problem : Problem
        That was measured.
    form : str
        Of the first kernel that was made for it.
    kernel : str
        Form of the kernel that multiplies, or `VENDOR`.
    shape : Shape or None
        Of that kernel; None for the vendor library.
    milliseconds : float
        Of one product by it.
    vendor : float or None
        Milliseconds of the vendor library; None where it has no such product.
    """

    problem: Problem
    form: str
    kernel: str
    shape: Shape | None
    milliseconds: float
    vendor: float | None

    @property
    def key(self) -> tuple[Any, ...]:
        """What a problem has in common with the measured one if that speaks for it."""
        return _key(self.problem, self.form)


@dataclass(frozen=True)
class Measurements:
    """A file's content.

    Attributes
    ----------
    device, driver : str
        The card, and the CUDA version of its driver.
    cupy, version : str
        Versions of CuPy and of this package.
    date : str
        ISO, of the last measurement.
    entries : tuple of Entry
    """

    device: str
    driver: str
    cupy: str
    version: str
    date: str
    entries: tuple[Entry, ...]

    @functools.cached_property
    def by_key(self) -> Mapping[tuple[Any, ...], list[Entry]]:
        """Entries by what a problem has to have in common with them."""
        found: dict[tuple[Any, ...], list[Entry]] = {}
        for entry in self.entries:
            found.setdefault(entry.key, []).append(entry)
        return found


@dataclass(frozen=True)
class TunedEntries:
    """What there is for a card.

    Attributes
    ----------
    path : Path
        Where its file is, or would be.
    measurements : Measurements or None
    ignored : str
        Why the file that is there does not count; else empty.
    """

    path: Path
    measurements: Measurements | None
    ignored: str = ""


def folder() -> Path:
    """The cache directory: ``ABFT_TSM2_CACHE_DIR``, else ``abft_tsm2`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    own = os.environ.get(VARIABLE)
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "abft_tsm2"


def path_of(device: str) -> Path:
    """The file of a card, by the name that its driver reports.

    Examples
    --------
    >>> path_of("NVIDIA H100 80GB HBM3").name
    'nvidia-h100-80gb-hbm3.json'
    """
    return folder() / "tuned" / f"{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def driver() -> str:
    """The CUDA version of the driver; empty without CuPy or a driver. No host synchronisation."""
    try:
        import cupy

        number = int(cupy.cuda.runtime.driverGetVersion())
    except Exception:  # CuPy is not installed, or not for this machine: then there is no card to speak of
        return ""
    return f"{number // 1000}.{number % 1000 // 10}"


def to_json(measurements: Measurements) -> str:
    """The text of a file."""
    return json.dumps({"schema": SCHEMA, **asdict(measurements)}, indent=1) + "\n"


def read(path: Path, device: str) -> Measurements:
    """The file of a card.

    Parameters
    ----------
    path : Path
    device : str
        The card's name.

    Raises
    ------
    FileNotFoundError
        If there is none.
    OSError, ValueError
        If it cannot be read, is no such file, or was not measured on this card with this driver and this version of the
        package; the message says which.
    """
    with path.open(encoding="utf-8") as stream:
        try:
            data = json.load(stream)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError("it is no JSON object")
    for name, here in {"schema": SCHEMA, "device": device, "driver": driver(), "version": __version__}.items():
        if data.get(name) != here:
            raise ValueError(f"its {name} is {data.get(name)!r}, and here it is {here!r}")
    if not (isinstance(data.get("cupy"), str) and isinstance(data.get("date"), str)):
        raise ValueError("it does not say when and with which CuPy it was measured")
    listed = data.get("entries")
    if not isinstance(listed, list):
        raise ValueError("it has no list of entries")
    entries = tuple(_entry(entry) for entry in listed)
    return Measurements(device, data["driver"], data["cupy"], data["version"], data["date"], entries)


@functools.cache  # a file is read once in a process: what is in use does not change under the user's hands
def found(device: str) -> TunedEntries:
    """What there is for a card of that name; raises nothing."""
    path = path_of(device)
    try:
        return TunedEntries(path, read(path, device))
    except FileNotFoundError:
        return TunedEntries(path, None)
    except (OSError, ValueError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return TunedEntries(path, None, text.partition("\n")[0])


@functools.cache  # once
def _warn(path: Path, reason: str) -> None:
    _log.warning("%s is ignored: %s; abft-tsm2 tune measures anew, abft-tsm2 tune --reset deletes it", path, reason)


def forget() -> None:
    """Read the file again when it is needed next."""
    found.cache_clear()
    _warn.cache_clear()


def kernels(problem: Problem, device: Device) -> tuple[Stream, ...] | None:
    """What was measured to multiply fastest.

    Parameters
    ----------
    problem : Problem
    device : Device

    Returns
    -------
    configs : tuple of Stream, or None
        Kernels to try, best first; none of them where the vendor library was faster. None where no measurement speaks
        for the problem.

    Notes
    -----
    A measurement speaks for problems of the same form, types, orders and width of loads, with n between the same powers
    of two (1, 2, 3 to 4, 5 to 8, ...), whose m, k and number of products are at most 4 times larger or smaller; of
    several, the one that is nearest in the sum of the three differences of log2. Raises nothing: a file that cannot be
    used is logged once, as a warning of the logger ``abft_tsm2``. No host synchronisation.
    """
    there = found(device.name)
    if there.ignored:
        _warn(there.path, there.ignored)
    made = tuple(config for config in candidates(problem) if why_not(problem, config, device) is None)
    if there.measurements is None or not made or 0 in (problem.m, problem.k, problem.n, problem.batch):
        return None
    entry = nearest(there.measurements, problem, made[0].form)
    if entry is None or entry.kernel == VENDOR:
        return None if entry is None else ()
    # A shape that this problem has not got is no longer, or not for this problem, among the ones that exist.
    best = [c for c in alternatives(problem, device) if (c.form, c.shape) == (entry.kernel, entry.shape)]
    return tuple(dict.fromkeys((*best, *made))) if best else None


def nearest(measurements: Measurements, problem: Problem, form: str) -> Entry | None:
    """The measurement that speaks for a problem whose first kernel is of that form; see `kernels`."""

    def distances(entry: Entry) -> list[float]:
        other = entry.problem
        pairs = ((problem.m, other.m), (problem.k, other.k), (problem.batch, other.batch))
        return [abs(math.log2(here / there)) for here, there in pairs]

    near = [entry for entry in measurements.by_key.get(_key(problem, form), ()) if max(distances(entry)) <= NEAR]
    return min(near, key=lambda entry: sum(distances(entry)), default=None)


def alternatives(problem: Problem, device: Device) -> tuple[Stream, ...]:
    """The kernels that may be fastest for a problem.

    Those made for it, best first, and after them the same ones in the shapes that other numbers of columns take: the
    power of two that holds n, half of it, and twice as many. So problems that share a measurement share them too.
    """
    made = list(candidates(problem))
    columns = 1 << (problem.n - 1).bit_length()
    for n in (columns, max(1, columns // 2), 2 * columns):
        shapes = [(c.form, c.shape) for c in candidates(replace(problem, n=n))]
        made += [replace(c, shape=shape) for c in candidates(problem) for form, shape in shapes if form == c.form]
    return tuple(config for config in dict.fromkeys(made) if why_not(problem, config, device) is None)


def _key(problem: Problem, form: str) -> tuple[Any, ...]:
    types = problem.dtype, problem.weights, problem.out
    layout = problem.small if form == "small" else (problem.order, problem.out_order, problem.width)
    return form, *types, layout, (problem.n - 1).bit_length()


def _entry(data: Any) -> Entry:
    if not isinstance(data, dict) or set(data) != {field.name for field in fields(Entry)}:
        raise ValueError("an entry has other fields than it should")
    form, kernel, shape, vendor = (data[name] for name in ("form", "kernel", "shape", "vendor"))
    if form not in FORMS or kernel not in (*FORMS, VENDOR) or (shape is None) != (kernel == VENDOR):
        raise ValueError(f"there is no kernel {kernel!r} with shape {shape!r} in place of form {form!r}")
    if not all(isinstance(x, float) and x > 0 for x in (data["milliseconds"], 1.0 if vendor is None else vendor)):
        raise ValueError("a time is not a number of milliseconds")
    return Entry(
        _record(Problem, data["problem"]),
        form,
        kernel,
        None if shape is None else _record(Shape, shape),
        data["milliseconds"],
        vendor,
    )


def _record(kind: type[_Record], data: Any) -> _Record:
    """A `Problem` or `Shape` of what JSON made of one: texts, whole numbers, and the two pairs of them in ``small``."""
    if isinstance(data, dict) and isinstance(data.get("small"), list):
        data = {**data, "small": tuple(tuple(x) if isinstance(x, list) else x for x in data["small"])}
    types = {field.name: _TYPES.get(str(field.type), tuple) for field in fields(kind)}
    fits = isinstance(data, dict) and {name: type(value) for name, value in data.items()} == types
    numbers = [(x, 1) for name, x in data.items() if types[name] is int and name != "pairs"] if fits else []
    if fits:
        pairs = data.get("small", ((0, 1), (0, 1)))
        fits = len(pairs) == 2 and all(isinstance(x, tuple) and len(x) == 2 for x in pairs)
        numbers += [(data["pairs"], 0)] if "pairs" in data else []
        numbers += [(x, least) for pair in pairs for x, least in zip(pair, (0, 1), strict=False)] if fits else []
    if not fits or any(type(x) is not int or x < least for x, least in numbers):
        raise ValueError(f"{data!r} is no {kind.__name__}")
    return kind(**data)
