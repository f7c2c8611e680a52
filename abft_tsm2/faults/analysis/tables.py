"""The tables of a campaign, each a list of rows made from the cells of a `Tally`.

A row is a plain dict of labels and numbers. Schemes that protect come first, then those they are compared with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from abft_tsm2.arrays import FLOATS
from abft_tsm2.faults.analysis.stats import clopper_pearson
from abft_tsm2.faults.analysis.tally import FOUND, HARMLESS, LOST, Cell, Tally
from abft_tsm2.faults.trials.trial import OUTCOMES, PEERS, protects

Row = dict[str, Any]
Numbers = np.ndarray[Any, np.dtype[np.float64]]
Member = tuple[Any, Cell]  # of a group: a key, and the cell

PRODUCT = "product"  # the site where `size` means what was promised
SINGLE_BIT = "bit_flip"  # the model whose `bit` is all that changed
POWERS = {"sizes": (-24, 10), "relatives": (-64, 10)}  # of two, that a histogram tells apart
MAIN = ("protected", "both")  # the scheme of tables that show one; else the first that protects


# ---- groups of cells -----------------------------------------------------------------------------------------------


def grouped(cells: Mapping[Any, Cell], *names: str) -> dict[tuple[Any, ...], list[Member]]:
    """Cells by some of their labels, sorted; schemes that protect before others."""
    groups: dict[tuple[Any, ...], list[Member]] = {}
    for key, cell in cells.items():
        groups.setdefault(tuple(getattr(key, name) for name in names), []).append((key, cell))

    def order(labels: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(by_scheme(label) if name == "scheme" else label for name, label in zip(names, labels, strict=True))

    return {labels: groups[labels] for labels in sorted(groups, key=order)}


def by_scheme(scheme: str) -> tuple[bool, int, str]:
    """What schemes are sorted by."""
    first = MAIN.index(scheme) if scheme in MAIN else len(MAIN)
    place = first if protects(scheme) else PEERS.index(scheme)
    return not protects(scheme), place, scheme


def main_scheme(schemes: Iterable[str]) -> str:
    """The scheme of tables that show one; empty if there is none at all.

    Examples
    --------
    >>> main_scheme(["double", "both", "protected"])
    'protected'
    """
    return min(schemes, key=by_scheme, default="")


def counted(members: Iterable[Member]) -> Counter[str]:
    """How many trials had each outcome."""
    counts: Counter[str] = Counter()
    for key, cell in members:
        counts[key.outcome] += cell.count
    return counts


def gathered(members: Iterable[Member], name: str) -> Numbers:
    """All numbers of one kind, sorted; NaN last, which is where a NaN belongs: nothing is further off."""
    parts = [np.frombuffer(getattr(cell, name)) for _, cell in members if getattr(cell, name)]
    return np.sort(np.concatenate(parts)) if parts else np.empty(0)


def median(numbers: Numbers) -> float | None:
    """The middle one, the lower of two: a number that was measured."""
    return float(numbers[(numbers.size - 1) // 2]) if numbers.size else None


def _last(numbers: Numbers) -> float | None:
    return float(numbers[-1]) if numbers.size else None


def _first(numbers: Numbers) -> float | None:
    return float(numbers[0]) if numbers.size else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _outcomes(counts: Mapping[str, int]) -> Row:
    return {outcome: counts.get(outcome, 0) for outcome in OUTCOMES}


def _sum(counts: Mapping[str, int], outcomes: Iterable[str]) -> int:
    return sum(counts.get(outcome, 0) for outcome in outcomes)


def _interval(events: int, trials: int, name: str) -> Row:
    low, high = clopper_pearson(events, trials)
    return {f"{name}_low": low, f"{name}_high": high}


def _split(members: Iterable[Member]) -> tuple[list[Member], list[Member]]:
    """Faults that were noticed, and the others; a call that crashed or hung is of neither."""
    said: list[Member] = []
    silent: list[Member] = []
    for key, cell in members:
        if key.outcome not in ("crash", "hang"):
            (said if key.noticed else silent).append((key, cell))
    return said, silent


def _above(cell: Cell) -> int:
    """Faults of a size that is promised to be found; one whose size is NaN is."""
    return int(np.count_nonzero(~(np.frombuffer(cell.sizes) <= 1))) if cell.sizes else 0


def at_the_product(tally: Tally) -> dict[Any, Cell]:
    return {key: cell for key, cell in tally.faults.items() if key.site == PRODUCT}


# ---- what happened -------------------------------------------------------------------------------------------------


def totals(tally: Tally) -> list[Row]:
    """By suite and scheme: how many faults and clean trials, and each outcome of both."""
    faults, clean = grouped(tally.faults, "suite", "scheme"), grouped(tally.clean, "suite", "scheme")
    rows = []
    for suite, scheme in sorted({*faults, *clean}, key=lambda labels: (labels[0], by_scheme(labels[1]))):
        of_faults = counted(faults.get((suite, scheme), []))
        of_clean = counted(clean.get((suite, scheme), []))
        rows.append(
            {
                "suite": suite,
                "scheme": scheme,
                "protects": protects(scheme),
                "faults": of_faults.total(),
                "clean_trials": of_clean.total(),
                **_outcomes(of_faults + of_clean),
            }
        )
    return rows


def outcomes(tally: Tally, names: Sequence[str]) -> list[Row]:
    """By any labels of faults: each outcome, and the interval of silent corruption."""
    rows = []
    for labels, members in grouped(tally.faults, *names).items():
        counts = counted(members)
        number = counts.total()
        interval = _interval(counts["sdc"], number, "sdc")
        rows.append({**dict(zip(names, labels, strict=True)), "faults": number, **_outcomes(counts), **interval})
    return rows


def contest(tally: Tally) -> list[Row]:
    """Scheme against scheme, by suites that ran several: all had the same faults to find.

    "escaped" are results that were returned as right and are not: silent corruption and cancelled sums.
    """
    faults, clean = grouped(tally.faults, "suite", "scheme"), grouped(tally.clean, "suite", "scheme")
    schemes = Counter(suite for suite, _ in faults)
    rows = []
    for (suite, scheme), members in faults.items():
        if schemes[suite] < 2:
            continue
        counts, of_clean = counted(members), counted(clean.get((suite, scheme), []))
        number, escaped = counts.total(), counts["sdc"] + counts["cancelled"]
        rows.append(
            {
                "suite": suite,
                "scheme": scheme,
                "faults": number,
                "found": _sum(counts, FOUND),
                "harmless": _sum(counts, HARMLESS),
                "escaped": escaped,
                "escaped_share": _share(escaped, number),
                **_interval(escaped, number, "escaped"),
                "failed": counts["crash"] + counts["hang"],
                "clean_trials": of_clean.total(),
                "false_alarm": of_clean["false_alarm"],
            }
        )
    return rows


def bits(tally: Tally) -> list[Row]:
    """What became of single flipped bits of the product, by scheme, type and position of the bit.

    Faults that come back are left out: whether they can be repaired does not depend on the bit.
    """
    flips = {key: cell for key, cell in at_the_product(tally).items() if key.model == SINGLE_BIT and key.bit >= 0}
    flips = {key: cell for key, cell in flips.items() if not key.persistent}
    rows = []
    for (scheme, dtype, bit), members in grouped(flips, "scheme", "dtype", "bit").items():
        counts, word = counted(members), word_of(scheme, dtype)
        rows.append(
            {
                "scheme": scheme,
                "dtype": dtype,
                "word": word,
                "bit": bit,
                "region": region(word, bit),
                "faults": counts.total(),
                "found": _sum(counts, FOUND),
                "harmless": _sum(counts, HARMLESS),
                "lost": _sum(counts, LOST),
                **_outcomes(counts),
            }
        )
    return rows


def word_of(scheme: str, dtype: str) -> str:
    """The type of the product that a fault hits, of operands of a type.

    Examples
    --------
    >>> word_of("protected", "bfloat16"), word_of("float32", "bfloat16")
    ('bfloat16', 'float32')
    """
    return "float32" if scheme == "float32" else dtype


def region(dtype: str, bit: int) -> str:
    """The part of a floating-point word that a bit belongs to; empty for a type that is not known.

    Examples
    --------
    >>> region("float32", 22), region("float32", 23), region("float32", 31), region("int8", 0)
    ('mantissa', 'exponent', 'sign', '')
    """
    kind = FLOATS.get(dtype)
    if kind is None:
        return ""
    return "sign" if bit >= kind.bits - 1 else "exponent" if bit >= kind.precision - 1 else "mantissa"


def alarms(tally: Tally) -> list[Row]:
    """Trials without a fault, by scheme, operation and type: how many raised an alarm, and how close others came."""
    rows = []
    for labels, members in grouped(tally.clean, "scheme", "operation", "dtype").items():
        counts, closest = counted(members), gathered(members, "closest")
        rows.append(
            {
                **dict(zip(("scheme", "operation", "dtype"), labels, strict=True)),
                "clean_trials": counts.total(),
                "false_alarm": counts["false_alarm"],
                **_interval(counts["false_alarm"], counts.total(), "false_alarm"),
                "other": counts.total() - counts["clean"] - counts["false_alarm"],
                "closest_median": median(closest),
                "closest_largest": _last(closest),
            }
        )
    return rows


def locations(tally: Tally) -> list[Row]:
    """Where faults were said to be, of those in the product that were promised to be found, and were."""
    found = {key: cell for key, cell in at_the_product(tally).items() if key.outcome in FOUND and key.located}
    rows = []
    for labels, members in grouped(found, "scheme", "operation", "dtype").items():
        counts: Counter[str] = Counter()
        for key, cell in members:
            counts[key.located] += _above(cell)
        if counts.total():
            places = {place: counts[place] for place in ("exact", "covered", "wrong")}
            labelled = dict(zip(("scheme", "operation", "dtype"), labels, strict=True))
            rows.append({**labelled, "faults": counts.total(), **places})
    return rows


# ---- how sharp the checks are --------------------------------------------------------------------------------------


def tightness(tally: Tally) -> list[Row]:
    """How close clean residuals come to their bounds, and how the sizes of faults found and not found overlap."""
    clean = grouped(tally.clean, "scheme", "dtype")
    faults = grouped(at_the_product(tally), "scheme", "dtype")
    rows = []
    for scheme, dtype in sorted({*clean, *faults}, key=lambda labels: (by_scheme(labels[0]), labels[1])):
        closest = gathered(clean.get((scheme, dtype), []), "closest")
        members = faults.get((scheme, dtype), [])
        said, silent = _split(members)
        missed, found = gathered(silent, "sizes"), gathered(said, "sizes")
        if closest.size + missed.size + found.size:
            rows.append(
                {
                    "scheme": scheme,
                    "dtype": dtype,
                    "closest_median": median(closest),
                    "closest_largest": _last(closest),
                    "missed_largest": _last(missed),
                    "found_smallest": _first(found),
                    "above": sum(_above(cell) for _, cell in members),
                    "above_found": sum(_above(cell) for _, cell in said),
                    "above_harmless": sum(_above(cell) for key, cell in silent if key.outcome in HARMLESS),
                }
            )
    return rows


def detectable(tally: Tally) -> list[Row]:
    """The smallest error of one element that is found, over the rms of the result: as stated, and as measured."""
    single = {key: cell for key, cell in at_the_product(tally).items() if key.single}
    rows = []
    for (scheme, dtype, k), members in grouped(single, "scheme", "dtype", "k").items():
        said, silent = _split(members)
        rows.append(
            {
                "scheme": scheme,
                "dtype": dtype,
                "k": k,
                "faults": counted(members).total(),
                "limit": median(gathered(members, "limits")),
                "missed_largest": _last(gathered(silent, "relatives")),
                "found_smallest": _first(gathered(said, "relatives")),
            }
        )
    return rows


def histogram(tally: Tally, name: str) -> list[Row]:
    """Faults of the product from one power of two to the next: ``2**power <= number < 2**(power + 1)``.

    `name` is "sizes", in units of what is promised to be found, or "relatives", of the largest change over the rms of
    the result. The first and the last of `POWERS` hold all that is smaller or larger; "none" is 0.
    """
    rows = []
    for (scheme,), members in grouped(at_the_product(tally), "scheme").items():
        powers: dict[int | str, Counter[str]] = {}
        for key, cell in members:
            for power, number in _by_power(gathered([(key, cell)], name), *POWERS[name]).items():
                powers.setdefault(power, Counter())[key.outcome] += number
        for power in sorted(powers, key=lambda power: (isinstance(power, int), power)):
            row = {"scheme": scheme, "power": power, "faults": powers[power].total()}
            rows.append({**row, **_outcomes(powers[power])})
    return rows


def _by_power(numbers: Numbers, lowest: int, highest: int) -> Counter[int | str]:
    found: Counter[int | str] = Counter()
    if zeros := int(np.count_nonzero(numbers == 0)):
        found["none"] = zeros
    numbers = abs(numbers[numbers != 0])
    # frexp gives no exponent to what is not finite: it goes where the largest are.
    powers = np.where(np.isfinite(numbers), np.frexp(numbers)[1] - 1, highest)
    for power, number in zip(*np.unique(powers.clip(lowest, highest), return_counts=True), strict=True):
        found[int(power)] += int(number)
    return found


def cost(tally: Tally) -> list[Row]:
    """Median seconds of clean trials by problem and scheme, and how many times those of "none"."""
    clean = {key: cell for key, cell in tally.clean.items() if key.outcome == "clean"}
    names = ("operation", "m", "k", "n", "dtype", "scheme")
    medians = {labels: gathered(members, "seconds") for labels, members in grouped(clean, *names).items()}
    rows = []
    for labels, seconds in medians.items():
        plain = median(medians.get((*labels[:-1], "none"), np.empty(0)))
        middle = median(seconds)
        rows.append(
            {
                **dict(zip(names, labels, strict=True)),
                "clean_trials": int(seconds.size),
                "seconds": middle,
                "times_none": middle / plain if plain and middle is not None else None,
            }
        )
    return rows
