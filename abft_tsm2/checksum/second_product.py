"""Compare suspected lines with a second product, multiplied in the same manner: which of them are wrong.

Lines that were not suspected are the controls. Where they come back bit for bit, the second product is the same
computation, and a suspect that differs from it is wrong. Where they differ, or there are none, it may be another one,
and only a suspect is wrong whose own error stands out among what both products leave. A product from elsewhere always
is another computation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from abft_tsm2.arrays import Array, from_host, in_float64, namespace, to_host
from abft_tsm2.checksum import repairs
from abft_tsm2.checksum.bounds import OUTLIER, STANDS_OUT
from abft_tsm2.checksum.evidence import line_errors, sequential_errors, summed_in_order, weighted_norms
from abft_tsm2.checksum.repairs import RepairOutcome, Written
from abft_tsm2.checksum.rescaled import verify_rescaled
from abft_tsm2.checksum.sides import Floats, Integers, Mask, Scale, Side
from abft_tsm2.checksum.standing_out import outlying_from, standing_out
from abft_tsm2.core.row_sums import rows_per_block, take_rows

_NOTHING = Written()
_MEASURED = 32  # lines, or elements of one, whose own errors are measured
_TILE_BYTES = 2 << 20  # of one of the temporaries of some lines


@dataclass(frozen=True, eq=False)
class Second:
    """Suspected lines compared with those of the second product, on the host.

    Attributes
    ----------
    product : (m, n) array
        All of its lines.
    at : integer array
        The suspects.
    equal, finite : boolean arrays
        Which of them came back bit for bit, and which hold finite numbers only.
    change : array
        What differs, in units of the line's bound.
    elements, largest : arrays
        How many elements differ, and by how much at most.
    outstanding : dict
        Of suspects, the columns in which the difference stands out among the line.
    """

    product: Array
    at: Integers
    equal: Mask
    finite: Mask
    change: Floats
    elements: Integers
    largest: Floats
    outstanding: dict[int, Integers]

    @classmethod
    def of(
        cls,
        lines: Side,
        scale: Scale,
        at: Integers,
        V: Floats,
        tau: Floats,
        product: Array,
        written: Written = _NOTHING,
    ) -> Second:
        """`written`: elements that were recomputed in float64, and so are rounded otherwise, count as the same."""
        equal, finite = np.ones((2, at.size), np.bool_)
        change, largest = np.zeros((2, at.size))
        elements, outstanding = np.zeros(at.size, np.int64), dict[int, Integers]()
        step = rows_per_block(lines.C.shape[1], _TILE_BYTES)
        for here in (slice(lo, lo + step) for lo in range(0, at.size, step)):
            part = at[here]
            old, new, same = _side_by_side(lines, scale, part, product)
            for p in np.flatnonzero(np.isin(part, list(written.lines))):
                same[p] |= written.lines[int(part[p])]
            with np.errstate(all="ignore"):
                shift = -(scale.line[part][:, None] + scale.column[None, :])
                difference = np.where(same, 0.0, np.ldexp(old, shift) - np.ldexp(new, shift))
                # Changes may cancel in the signed sum; honest ones are as small in the norm.
                off = np.maximum(np.abs(difference @ V), weighted_norms(difference, V)) / tau[part]
                change[here] = np.where(np.isfinite(tau[part]), off, np.inf).max(axis=1)
                size = np.abs(difference) * np.abs(V).max(axis=1)[None, :]
                outlying = ~(size <= outlying_from(size, tau[part]))
                largest[here] = np.where(same, 0.0, np.abs(old - new)).max(axis=1, initial=0.0)
            outstanding |= {int(i): np.flatnonzero(row) for i, row in zip(part, outlying, strict=True) if row.any()}
            finite[here] = (np.isfinite(old) | ~scale.usable_column[None, :]).all(axis=1)
            equal[here], elements[here] = same.all(axis=1), np.count_nonzero(~same, axis=1)
        return cls(product, at, equal, finite, change, elements, largest, outstanding)


def compare(
    lines: Side, scale: Scale, at: Integers, V: Floats, tau: Floats, outcome: RepairOutcome, *, foreign: bool
) -> tuple[Second, Mask, dict[int, Mask]]:
    """Compare the suspects `at`, the worst first, with a second product; tell which of those that are finite are wrong,
    and, by line, which elements stand out in both.

    Elements of a product from elsewhere that stand out are added to the outcome's faults.
    """
    m, (k, n) = lines.C.shape[0], lines.R.shape
    second = Second.of(lines, scale, at, V, tau, lines.again(), outcome.written)
    outcome.multiplications += m * n * k
    controls = np.setdiff1d(np.flatnonzero(scale.usable_line), at)
    controls = np.setdiff1d(controls, np.fromiter(outcome.written.lines, np.int64))
    wrong, in_both = ~second.equal & second.finite, dict[int, Mask]()
    if foreign:
        wrong &= _beyond_controls(lines, scale, second, controls, V, tau)
        _outlying_elements(lines, scale, second, wrong, V, tau, outcome)
        return second, wrong, in_both
    # Where elements are wrong for certain, lines that differ may all be, and none stands out among the others.
    some_are = bool(outcome.faults or outcome.written.lines)
    if not some_are and not _all_equal(lines, scale, controls, outcome.written, second.product):
        beyond, excused = _beyond_second(lines, scale, second, controls, V, tau)
        wrong &= beyond
        if not beyond.all():
            outcome.excused = max(outcome.excused, excused)
    alike = at[second.equal & second.finite]
    if alike.size and not wrong.any():  # else the second product replaces everything
        in_both = standing_out(lines, scale, alike, controls, V, tau)
    return second, wrong, in_both


def _side_by_side(lines: Side, scale: Scale, at: Integers, product: Array) -> tuple[Floats, Floats, Mask]:
    """Lines of C, those of another product in float64, and where they are the same or cannot be checked."""
    old, new = (to_host(in_float64(take_rows(X, at))) for X in (lines.C, product))
    return old, new, (old == new) | (np.isnan(old) & np.isnan(new)) | ~scale.usable_column[None, :]


def _all_equal(lines: Side, scale: Scale, controls: Integers, written: Written, product: Array) -> bool:
    """Whether there are controls, and all came back bit for bit, but for columns that have been repaired."""
    xp = namespace(lines.C)
    skipped = ~scale.usable_column
    skipped[np.fromiter(written.columns, np.int64)] = True
    skip = from_host(skipped[None, :], lines.C)
    for part in np.array_split(controls, -(-controls.size // rows_per_block(lines.C.shape[1], _TILE_BYTES)) or 1):
        old, new = (take_rows(X, part) for X in (lines.C, product))
        if not bool(xp.all((old == new) | (xp.isnan(old) & xp.isnan(new)) | skip)):
            return False
    return controls.size > 0


def _beyond_second(
    lines: Side, scale: Scale, second: Second, controls: Integers, V: Floats, tau: Floats
) -> tuple[Mask, float]:
    """Which suspects are further from an accurate product than rounding is seen to take lines of this product; and a
    change in units of a line's bound that would be, whatever the errors beside it.

    Of the worst suspects and of some controls the errors of both products are measured, and that of a sum in order,
    which roundings of one direction make worst; those of the other suspects follow from their distances.
    """
    worst = np.argsort(-second.change, kind="stable")[:_MEASURED]
    sample = np.concatenate([second.at[worst], _some(controls)])
    columns = _some(np.flatnonzero(scale.usable_column))
    share = np.sqrt(np.count_nonzero(scale.usable_column) / max(columns.size, 1))

    def size(errors: Floats, at: Integers, V: Floats) -> Floats:
        """In units of the bounds."""
        return np.asarray((weighted_norms(errors, V) / tau[at]).max(axis=1))

    both, twice = [take_rows(X, sample) for X in (lines.C, second.product)], np.tile(sample, 2)
    with np.errstate(all="ignore"):
        first, honest = np.split(size(line_errors(lines, scale, twice, namespace(lines.C).concat(both)), twice, V), 2)
        for p, line in enumerate(sample):
            if not first[p] <= STANDS_OUT * max(honest[p], 1 / OUTLIER):
                at = sample[p : p + 1]
                errors = line_errors(lines, scale, at, summed_in_order(lines, int(line), columns), columns)
                honest[p] = np.fmax(honest[p], share * size(errors, at, V[columns])[0])
    usual = max(float(np.median(honest)), 1 / OUTLIER)
    apart = (1 + STANDS_OUT) * max(float(np.quantile(honest, 0.9)), usual)
    beyond = ~(second.change <= apart)
    beyond[worst] = ~(first <= STANDS_OUT * np.maximum(honest, usual))[: worst.size]
    return np.asarray(beyond & ~(second.change <= 1)), 2 * max(apart, STANDS_OUT * float(honest.max()))


def _beyond_controls(lines: Side, scale: Scale, second: Second, controls: Integers, V: Floats, tau: Floats) -> Mask:
    """Which suspects of a product from elsewhere are much further from an accurate product than its other lines, and
    than a sum in order may be; where all lines are suspected, they are each other's controls."""
    if controls.size:
        usual = float(Second.of(lines, scale, _some(controls), V, tau, second.product).change.max())
    else:
        usual = float(np.median(second.change))
    limit = OUTLIER * max(usual, 1 / OUTLIER)
    beyond = ~(second.change <= limit)
    some = _some(np.flatnonzero(scale.usable_column))
    far = np.flatnonzero(beyond)
    for part in np.array_split(far, -(-far.size // _MEASURED)) if far.size else ():
        at = second.at[part]
        errors = line_errors(lines, scale, at, take_rows(lines.C, at))
        with np.errstate(all="ignore"):
            beyond[part] = ~(np.max(weighted_norms(errors, V) / tau[at], axis=1) <= limit)
        for p, line in zip(part, at, strict=True):
            if beyond[p]:
                error, most = errors[at == line][0, some], sequential_errors(lines, scale, int(line), some)
                beyond[p] = ~np.all(weighted_norms(error[None], V[some]) <= weighted_norms(most[None], V[some]))
    return beyond


def excusable(lines: Side, weights: Array) -> float:
    """How many bounds a change of a line of a product from elsewhere may have before it is taken for rounding no more,
    as `compare` takes it, from a few elements of a few lines.

    Twice what an error may have: the change may hide behind another one.
    """
    m, n = lines.C.shape
    if 0 in (m, n, lines.R.shape[0]):
        return 0.0
    xp, rows, columns = namespace(lines.C), _some(np.arange(m))[::8], _some(np.arange(n))
    at, along = (from_host(x, lines.C) for x in (rows, columns))

    def part(X: Array) -> Array:
        return xp.take(xp.take(X, at, axis=0), along, axis=1)

    few = lines._replace(
        L=xp.take(lines.L, at, axis=0),
        R=xp.take(lines.R, along, axis=1),
        C=part(lines.C),
        C0=None if lines.C0 is None else part(lines.C0),
    )
    again = verify_rescaled(few, xp.take(weights, along, axis=0))
    every = np.arange(columns.size)
    with np.errstate(all="ignore"):
        errors = line_errors(few, again.scale, np.arange(rows.size), few.C)
        usual = weighted_norms(errors, again.V) / again.tau
        most = np.stack([sequential_errors(few, again.scale, i, every) for i in range(rows.size)])
        known = np.maximum(OUTLIER * np.maximum(usual, 1 / OUTLIER), weighted_norms(most, again.V) / again.tau)
    return 2 * float(np.max(known, where=np.isfinite(known), initial=1.0))


def _outlying_elements(
    lines: Side, scale: Scale, second: Second, wrong: Mask, V: Floats, tau: Floats, outcome: RepairOutcome
) -> None:
    """Elements of suspects, not wrong all over, that stand out among their line and that no sum in order explains."""
    for line, columns in second.outstanding.items():
        if wrong[second.at == line][0] or not second.finite[second.at == line][0]:
            continue
        at = np.asarray([line])
        error = np.abs(line_errors(lines, scale, at, take_rows(lines.C, at)))[0]
        size = error * np.abs(V).max(axis=1)
        with np.errstate(all="ignore"):
            beyond = ~(size[columns] <= outlying_from(size[None], tau[at])[0])
            beyond &= ~(error[columns] <= sequential_errors(lines, scale, line, columns))
        if beyond.any():
            found, value, _ = _side_by_side(lines, scale, at, second.product)
            hit = np.zeros(error.size, np.bool_)
            hit[columns[beyond]] = True
            outcome.faults += repairs.line_faults(lines, line, hit, found[0], value[0], False, False)


def _some(of: Integers) -> Integers:
    """At most `_MEASURED` of these, evenly spread."""
    return of[:: max(1, -(-of.size // _MEASURED))]
