"""Confidence intervals of a counted rate: exact, and how they are printed."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal

CONFIDENCE = 0.95
NARROW_SPACE = "\u202f"  # for between thousands; no line breaks there
DIGITS = 2  # of a share or of what is missing to 100 %, whichever is smaller


def clopper_pearson(events: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The exact two-sided confidence interval of a probability, of which `events` were counted in `trials`.

    It holds the true probability in at least the share `confidence` of all experiments, whatever the probability
    is: it has no approximation that fails for rare events (C. J. Clopper, E. S. Pearson, "The use of confidence or
    fiducial limits illustrated in the case of the binomial", Biometrika 26, 1934, 404-413).

    Parameters
    ----------
    events, trials : int
        ``0 <= events <= trials``.
    confidence : float
        Between 0 and 1, both excluded.

    Returns
    -------
    low, high : float
        Between 0 and 1. The low end is 0 where nothing was counted, the high end 1 where everything was; without a
        trial nothing is known, and they are 0 and 1.

    Raises
    ------
    ValueError
        If more events than trials are given, a negative number, or a confidence that is none.

    Examples
    --------
    >>> low, high = clopper_pearson(12, 345)
    >>> print(f"{low:.4f} {high:.4f}")
    0.0181 0.0600
    >>> clopper_pearson(0, 0)
    (0.0, 1.0)
    """
    _refuse_nonsense(events, trials)
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence lies between 0 and 1, got {confidence}: give 0.95 for 95 %")
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    low = float(betaincinv(events, trials - events + 1, tail)) if events else 0.0
    high = float(betaincinv(events + 1, trials - events, 1 - tail)) if events < trials else 1.0
    return low, high


def rate_text(events: int, trials: int, *, grouping: str = "") -> str:
    """A counted rate in words: the number, and what it says about the probability (at 95 %, `clopper_pearson`).

    Where nothing was counted the upper bound is what there is to say. Shares have two digits; the ends of the
    interval are rounded outwards, so that what is printed is true as well.

    Parameters
    ----------
    events, trials : int
        ``0 <= events <= trials``; ValueError otherwise.
    grouping : str
        Stands between the thousands of the two numbers.

    Examples
    --------
    >>> print(rate_text(0, 12345))
    0 of 12345 (< 0.030 %)
    >>> print(rate_text(12, 345))
    12 of 345 (3.5 %, 1.8 to 6.0 %)
    >>> print(rate_text(0, 0))
    0 of 0
    """
    _refuse_nonsense(events, trials)
    counted = f"{number(events, grouping)} of {number(trials, grouping)}"
    if not trials:
        return counted
    low, high = clopper_pearson(events, trials)
    if not events:
        return f"{counted} (< {percent(high, ROUND_CEILING)} %)"
    unit = _unit(events / trials)  # the ends have at least the digits of what is between them
    ends = f"{percent(low, ROUND_FLOOR, unit)} to {percent(high, ROUND_CEILING, unit)}"
    return f"{counted} ({percent(events / trials)} %, {ends} %)"


def percent(share: float, rounding: str = ROUND_HALF_EVEN, unit: Decimal | None = None) -> str:
    """A share as per cent, without the sign: two digits of it, or of what is missing to 100; more for a finer `unit`.

    Examples
    --------
    >>> percent(0.0347826), percent(0.99987), percent(1.0)
    ('3.5', '99.987', '100')
    """
    exact = 100 * Decimal(str(share))  # 0.0001, not the binary number just below it
    if exact in (0, 100):
        return f"{exact.normalize():f}"
    return f"{exact.quantize(min(_unit(share), unit or Decimal(1)), rounding):f}"


def _unit(share: float) -> Decimal:
    """What the last digit of a percentage stands for."""
    exact = 100 * Decimal(str(share))
    smaller = min(exact, 100 - exact)
    return Decimal(1).scaleb(min(0, smaller.adjusted() + 1 - DIGITS)) if smaller > 0 else Decimal(1)


def number(count: int, grouping: str) -> str:
    """An integer with `grouping` between its thousands.

    Examples
    --------
    >>> number(1234567, " ")
    '1 234 567'
    """
    return f"{count:,}".replace(",", grouping)


def _refuse_nonsense(events: int, trials: int) -> None:
    if not 0 <= events <= trials:
        raise ValueError(f"{events} events of {trials} trials cannot be: both are counts, and events are among trials")
