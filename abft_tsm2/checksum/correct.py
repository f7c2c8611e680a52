"""Locate and correct wrong elements of C in suspected lines, by recomputation.

A suspected line is computed again in float64 and compared element by element. An element further off than the
rigorous rounding bound is wrong beyond doubt. A line whose checksum disagrees though none of its elements does so is
compared with the whole product, multiplied again the way it was the first time. Lines that were not suspected are the
controls: where they come back bit for bit, a suspect that comes back so is a pattern of rounding (long chains of equal
terms make them), and any other is wrong. Where the controls differ, or there are none, the second product may be
another computation, and only a line is wrong whose own error stands out among what both products leave
(`abft_tsm2.checksum.second_product`). What is wrong is replaced by recomputed values; a residual is never added,
because it would carry the whole checksum's rounding into one element, and nothing at all out of an Inf.

A wrong element of an operand, gone before the check, leaves a whole column wrong, some of it below what a line's
check sees. So columns that hold a wrong element are recomputed along their whole length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from abft_tsm2.arrays import from_host, in_float64, namespace, to_host
from abft_tsm2.checksum import repairs
from abft_tsm2.checksum.bounds import OUTLIER, element_noise, rigorous_factor, usual_of
from abft_tsm2.checksum.elements import NOTHING, Balance, element_sums
from abft_tsm2.checksum.repairs import AGAIN, RepairOutcome, Written
from abft_tsm2.checksum.second_product import compare
from abft_tsm2.checksum.sides import Floats, Integers, Mask, Scale, Side
from abft_tsm2.core.row_sums import rows_per_block, take_rows
from abft_tsm2.report import Fault

_FEW_LINES = 16  # and a sixteenth of all: more suspects than these are compared with a second product at once
_SAMPLE = 8  # the worst lines of a mass suspicion
_COMPLETE = 8  # so many columns are always completed; more only where several lines point at them
_TILE_BYTES = 2 << 20  # of one of the dozen temporaries of a recomputed tile


@dataclass(frozen=True, eq=False)
class _Tile:
    """Some lines, recomputed. All arrays are (lines, n), on the host."""

    at: Integers
    found: Floats  # as stored, in float64
    value: Floats  # what belongs there, rounded to the stored type, in float64
    wrong: Mask  # beyond the rigorous bound
    unclear: Mask  # not finite, where honest arithmetic may have overflowed
    distance: Floats  # from the recomputed value, in units of usual rounding


def few(lines: Side) -> int:
    """The most suspected lines that are recomputed one by one."""
    return max(_FEW_LINES, int(lines.L.shape[0]) // _FEW_LINES)


def locate_and_correct(
    lines: Side,
    scale: Scale,
    suspects: Integers,
    others: Integers,
    V: Floats,
    tau: Floats,
    *,
    write: bool,
    foreign: bool,
    mass: bool = False,
    written: Written | None = None,
) -> RepairOutcome:
    """Locate what is wrong in the suspected lines and, where `write`, replace it.

    Parameters
    ----------
    lines : Lines
    scale : Scale
    suspects : integer array
        The lines whose check failed, the worst first.
    others : integer array
        Lines to recompute element by element although their check holds.
    V : (n, r) array
        Scaled weights.
    tau : (m, r) array
        Bounds in the scaled domain.
    write : bool
        Whether to repair C, or only to locate.
    foreign : bool
        C was computed elsewhere, by any library and in any order of summation.
    mass : bool
        There were more than a few suspects before, and what hit them was not what has been replaced since: every line
        is multiplied again, for of lines that are wrong all over some pass the check by chance.
    written : Written, optional
        What earlier rounds have replaced; added to.
    """
    outcome = RepairOutcome(written=Written() if written is None else written)
    surely_wrong = False
    if not mass and suspects.size <= few(lines):
        m = lines.L.shape[0]
        # Where half of the lines are suspected the others are recomputed too: what hit these may have hit all.
        if 2 * suspects.size >= m:
            others = np.setdiff1d(np.flatnonzero(scale.usable_line), suspects)
        undecided = _line_by_line(lines, scale, np.concatenate([suspects, others]), outcome, write)
        undecided = np.setdiff1d(undecided, others)
        if outcome.columns:
            _complete_columns(lines, scale, outcome, write)
    else:
        undecided = suspects
        if mass:
            undecided = np.concatenate([suspects, np.setdiff1d(np.flatnonzero(scale.usable_line), suspects)])
        columns, surely_wrong = _common_columns(lines, scale, suspects[:_SAMPLE], outcome)
        if columns and not mass:
            outcome.columns = columns
            _complete_columns(lines, scale, outcome, write)
            if outcome.faults:
                return outcome
    if undecided.size:
        _multiply_again(lines, scale, undecided, V, tau, outcome, write, foreign)
    if surely_wrong and not outcome.faults:  # the second product has the same fault
        _line_by_line(lines, scale, suspects, outcome, write)
    return outcome


# ---- recomputation in float64 -------------------------------------------------------------------------------------


def _recompute(lines: Side, balance: Balance, at: Integers) -> _Tile:
    """Recompute lines `at` in float64: value, rigorous verdict, distance; each element in units of its largest part.

    exact = alpha (L R) + beta C0,  S = |alpha| |L||R| + |beta C0|,  H^2 = alpha^2 (L o L)(R o R) + (beta C0)^2
    """
    a, xp, usable = lines.arithmetic, namespace(lines.L), balance.usable[None, :]
    with np.errstate(all="ignore"):
        sums = element_sums(lines, balance, at)
        # Where even the sum of magnitudes overflows, an Inf or NaN may be what honest arithmetic gives.
        summed = np.ldexp(sums.moduli, sums.exponent)
        alpha, of_alpha = np.frexp(lines.alpha)
        least, of_least = np.frexp(a.underflow(lines.terms, lines.alpha))
        products = np.where(sums.moduli > 0, sums.exponent + int(of_alpha), NOTHING)
        unit = np.maximum(products, int(of_least))
        base, of_base = np.zeros((1, 1)), unit
        if lines.C0 is not None:
            beta, of_beta = np.frexp(lines.beta)
            base, of_base = np.frexp(np.where(usable, to_host(in_float64(take_rows(lines.C0, at))), 0.0))
            base, of_base = beta * base, of_base + int(of_beta)
            unit = np.maximum(unit, np.where(base != 0, of_base, NOTHING))
        base = np.ldexp(base, of_base - unit)
        added, gain = np.abs(base), np.ldexp(alpha, products - unit)
        exact, total = sums.exact * gain + base, sums.moduli * np.abs(gain) + added
        size = np.maximum(np.sqrt(sums.squares * gain**2 + base**2), np.abs(exact))
        stored = take_rows(lines.C, at)
        found = to_host(in_float64(stored))
        overflows = np.fmax(summed, np.ldexp(total, unit)) >= a.accumulator.largest / 2
        # exact may leave the range of C's type: then what belongs there is an infinity
        value = to_host(xp.astype(from_host(np.ldexp(exact, unit), lines.C), lines.C.dtype)).astype(np.float64)
        error = np.abs(np.ldexp(found, -unit) - exact)
        # |c - exact| <= gamma S (1 + u_out) + u_out |exact| + u_added |beta C0|: rounded once more when it is stored,
        # and perhaps before beta C0 is added
        rounded = a.u_out * np.abs(exact) + a.u_added * added + np.ldexp(least, int(of_least) - unit)
        bound = rigorous_factor(a, lines.terms) * (1 + a.u_out) * total + rounded
        noise = element_noise(a, lines.terms) * size + rounded
        right_enough = ((error <= bound) & np.isfinite(bound)) | (found == value) | (np.isnan(found) & np.isnan(value))
        unclear = overflows & ~np.isfinite(found) & ~right_enough
        right_enough |= unclear
        distance = np.where(found == value, 0.0, error / np.where(noise > 0, noise, 1e-300))
        distance = np.where(np.isfinite(distance), distance, np.where(right_enough, 0.0, np.inf))
    return _Tile(at, found, value, ~right_enough & usable, unclear, distance)


def _tiles(lines: Side, usable: Mask, at: Integers) -> Iterator[_Tile]:
    """Lines `at`, some at a time; of the columns that are `usable`."""
    step, balance = rows_per_block(lines.R.shape[1], _TILE_BYTES), Balance.of(lines, at, usable)
    for lo in range(0, at.size, step):
        yield _recompute(lines, balance, at[lo : lo + step])


def _outliers(distance: Floats) -> tuple[Mask, Mask]:
    """Elements much further off than nine tenths of their line; and the lines of which most is further off than usual.

    Such a line, if it holds a wrong element, was hit as a whole: what it does not show hides in rounding.
    """
    usual = usual_of(distance)[:, 0] if distance.shape[1] else distance[:, 0:0].sum(1)
    outliers = ~(distance <= OUTLIER * np.maximum(1.0, np.where(np.isfinite(usual), usual, 1.0))[:, None])
    return outliers, np.asarray(usual > OUTLIER / 2)


def _line_by_line(lines: Side, scale: Scale, at: Integers, outcome: RepairOutcome, write: bool) -> Integers:
    """Replace what is wrong in each suspected line; returns the lines in which no element is wrong for certain.

    A line without a residual, because an Inf in it is right, has been checked element by element by then.
    """
    undecided: list[int] = []
    k, n = lines.R.shape
    hits: dict[int, int] = {}
    for tile in _tiles(lines, scale.usable_column, at):
        outcome.multiplications += tile.at.size * n * k
        outliers, all_of_it = _outliers(tile.distance)
        likely = tile.wrong | (outliers & scale.usable_column[None, :])
        for p, line in enumerate(tile.at):
            if not tile.wrong[p].any():
                if np.isfinite(tile.found[p][scale.usable_column]).all() or tile.unclear[p].any():
                    undecided.append(int(line))
                else:
                    outcome.cleared += 1
                continue
            wrong = likely[p]
            whole = bool(all_of_it[p]) or int(np.count_nonzero(wrong)) > max(4, n // 20)
            places = np.flatnonzero(scale.usable_column if whole else wrong)
            repairs.replace(lines, int(line), places, tile.value[p], write)
            outcome.written.add(int(line), places, n)
            outcome.faults += repairs.line_faults(lines, int(line), wrong, tile.found[p], tile.value[p], whole, write)
            if not whole:
                for column in np.flatnonzero(wrong):
                    hits[int(column)] = hits.get(int(column), 0) + 1
    if len(hits) <= _COMPLETE:
        outcome.columns = set(hits)
    else:
        outcome.columns = {column for column, count in hits.items() if count > 1}
    return np.asarray(undecided, np.int64)


def _common_columns(lines: Side, scale: Scale, at: Integers, outcome: RepairOutcome) -> tuple[set[int], bool]:
    """Columns that are wrong beyond doubt in half of a sample of lines, if they are few; and whether any element is."""
    hits = np.zeros(lines.R.shape[1], np.int64)
    for tile in _tiles(lines, scale.usable_column, at):
        outcome.multiplications += tile.at.size * hits.size * lines.R.shape[0]
        hits += tile.wrong.sum(axis=0)
    columns = np.flatnonzero(hits >= max(2, at.size // 2))
    few_columns = 0 < columns.size <= max(1, hits.size // 4)
    return {int(c) for c in columns} if few_columns else set(), bool(hits.any())


def _complete_columns(lines: Side, scale: Scale, outcome: RepairOutcome, write: bool) -> None:
    """Recompute whole columns; replace what is wrong and what is out of the ordinary."""
    across = lines.across()
    columns = np.asarray(sorted(outcome.columns), np.int64)
    m, k = lines.L.shape
    known = {(f.rows, f.columns) for f in outcome.faults}
    for tile in _tiles(across, scale.usable_line, columns):
        outcome.multiplications += tile.at.size * m * k
        usable = scale.usable_line[None, :]
        outliers, all_of_it = _outliers(tile.distance)
        replaced = (tile.wrong | outliers) & usable
        for p, column in enumerate(tile.at):
            wrong = tile.wrong[p] & usable[0]
            if (all_of_it[p] and wrong.any()) or np.count_nonzero(wrong) > max(4, m // 20):
                replaced[p] = usable[0]
            repairs.replace(across, int(column), np.flatnonzero(replaced[p]), tile.value[p], write)
            outcome.written.columns.add(int(column))
            fresh = [i for i in np.flatnonzero(wrong) if repairs.place(lines, int(i), int(column)) not in known]
            if len(fresh) > 2:
                outcome.faults.append(
                    repairs.fault(across, "row", int(column), (), wrong, tile.found[p], tile.value[p], write)
                )
            else:
                outcome.faults += [
                    repairs.fault(
                        across,
                        "element",
                        int(column),
                        (int(i),),
                        np.arange(m) == i,
                        tile.found[p],
                        tile.value[p],
                        write,
                    )
                    for i in fresh
                ]


def _compute_again(lines: Side, scale: Scale, in_both: dict[int, Mask], outcome: RepairOutcome) -> None:
    """What belongs into elements that stand out in both products."""
    for tile in _tiles(lines, scale.usable_column, np.asarray(sorted(in_both), np.int64)):
        outcome.multiplications += tile.at.size * lines.R.size
        for line, value in zip(tile.at.tolist(), tile.value, strict=True):
            outcome.refined.append(repairs.Refined(lines, line, np.flatnonzero(in_both[line]), value))


# ---- the same product again ---------------------------------------------------------------------------------------


def _multiply_again(
    lines: Side,
    scale: Scale,
    at: Integers,
    V: Floats,
    tau: Floats,
    outcome: RepairOutcome,
    write: bool,
    foreign: bool,
) -> None:
    """Compare lines, the worst first, with a second product, and replace C by it where one of them is wrong."""
    second, wrong, in_both = compare(lines, scale, at, V, tau, outcome, foreign=foreign)
    # A line in which an Inf is right has no residual: what differs in it is recomputed element by element.
    # Of a product from elsewhere nothing is known of an Inf that this library's order of summation gives as well.
    by_element = ~second.finite & (foreign | ~second.equal)
    if by_element.any():
        undecided = _line_by_line(lines, scale, at[by_element], outcome, write)
        if foreign:  # partial sums of another order may overflow where these do not
            outcome.overflowed += undecided.size
        else:
            wrong[by_element] = np.isin(at[by_element], undecided)
    if wrong.any() and not foreign:  # then suspects that differ are replaced as well, and named
        wrong |= ~second.equal & second.finite
    outcome.cleared += int(np.count_nonzero(~wrong & ~by_element))
    if in_both:
        _compute_again(lines, scale, in_both, outcome)
    if not wrong.any():
        return
    if write:  # what hit these lines may have hit the others, too little to be seen
        usable = np.flatnonzero(scale.usable_column)
        for line in np.flatnonzero(scale.usable_line):
            repairs.replace(lines, int(line), usable, to_host(second.product[int(line), :]), write)
    hit = tuple(sorted(int(line) for line in at[wrong]))
    rows, columns = (hit, ()) if lines.side == "rows" else ((), hit)
    kind = "rows" if lines.side == "rows" else "block"
    largest = float(second.largest[wrong].max())  # NaN stays
    count = int(second.elements[wrong].sum())
    outcome.faults.append(Fault("C", kind, rows, columns, count, largest, AGAIN if write else ""))
