"""The charts of a campaign's report: SVG that stands inside a page and takes its colours from the page's CSS.

Matplotlib draws with placeholders, each of which becomes ``var(--name)``: one drawing serves light, dark and print.
Outcomes differ by colour, by their order in the stack, and what is lost by hatching as well.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from abft_tsm2.arrays import FLOATS
from abft_tsm2.faults.analysis.stats import NARROW_SPACE, number
from abft_tsm2.faults.analysis.tables import Row, main_scheme
from abft_tsm2.faults.trials.trial import protects

# Names of CSS variables; a placeholder is a colour that no drawing has by chance.
NAMES = (
    *("ink", "soft", "rule", "paper"),
    *("corrected", "detected", "masked", "below", "cancelled", "sdc", "failed"),
    *("line-1", "line-2", "line-3", "line-4", "line-5", "line-6"),
)
COLOURS = {name: f"#0a1b{place:02x}" for place, name in enumerate(NAMES, 16)}
INK, SOFT, RULE, PAPER = (COLOURS[name] for name in NAMES[:4])

Part = tuple[str, str, tuple[str, ...], str]  # label, colour, outcomes, hatching
STACK: Sequence[Part] = (
    ("corrected", "corrected", ("corrected",), ""),
    ("detected, not repaired", "detected", ("detected",), ""),
    ("masked", "masked", ("masked",), ""),
    ("below bound", "below", ("below_bound",), ""),
    ("cancelled", "cancelled", ("cancelled",), r"\\\\"),
    ("silent corruption", "sdc", ("sdc",), "////"),
    ("crash or hang", "failed", ("crash", "hang"), "xxxx"),
)
"""The parts of a stack of outcomes, the lowest first."""

LOOKS = (
    *(("line-1", "o"), ("line-2", "s"), ("line-3", "^"), ("line-4", "D"), ("line-5", "v"), ("line-6", "X")),
    *(("line-1", "P"), ("line-2", "*"), ("line-3", "<"), ("line-4", ">")),
)
"""Colour and marker of a scheme."""

STYLE: Mapping[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "abft_tsm2",
    "font.size": 9.5,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.4,
    "hatch.linewidth": 1.1,
    "legend.fontsize": 9.5,
    "text.parse_math": False,  # a name with a dollar sign is a name
}
WIDTH = 9.0  # inches; the page scales it
LARGEST_DRAWN = 3  # power of two: larger faults are far above the limit, and would flatten what is near it
TIMES = (0.125, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256)  # marked on its axis
PROBLEMS = 10  # of the chart of cost
BARS = 30  # of the chart of outcomes


def bit_chart(rows: Sequence[Row]) -> str:
    """What became of a flipped bit by its position: outcomes of one scheme, and what each scheme found.

    Below the outcomes each scheme has a strip of its own, with bars as high as the share found: lines would lie upon
    one another where all find everything, or nothing.

    Parameters
    ----------
    rows : sequence of dict
        Those of `abft_tsm2.faults.analysis.tables.bits`, of one type of operands and one of words.

    Returns
    -------
    svg : str
        Deterministic, with no external resource.
    """
    dtype, word = rows[0]["dtype"], rows[0]["word"]
    name = dtype if word == dtype else f"{word} from {dtype}"
    others = list(dict.fromkeys(row["scheme"] for row in rows))
    main = main_scheme(others)
    mine = [row for row in rows if row["scheme"] == main]
    width = FLOATS[word].bits if word in FLOATS else max(row["bit"] for row in rows) + 1

    def draw(figure: Any) -> None:
        strips = 0.27 * len(others)
        figure.set_size_inches(WIDTH, 3.4 + strips)
        axes = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [2.5, strips], "hspace": 0.13})
        _stacks(axes[0], [row["bit"] for row in mine], mine, 0.86)
        axes[0].set_ylabel(f"outcome, {main}")
        axes[0].set_ylim(0, 1)
        axes[0].set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "50 %", "", "100 %"])
        axes[0].grid(axis="y")
        axes[0].tick_params(axis="x", length=0)
        _regions(axes[0], word, named=True)
        for place, scheme in enumerate(reversed(others)):
            found = [row for row in rows if row["scheme"] == scheme]
            shares = [0.76 * row["found"] / row["faults"] for row in found]
            colour = COLOURS["corrected"] if protects(scheme) else SOFT
            axes[1].bar([row["bit"] for row in found], shares, 0.86, bottom=place, color=colour, linewidth=0)
            axes[1].axhline(place, color=RULE, linewidth=0.8)
        axes[1].set_ylabel("found")
        axes[1].set_yticks([place + 0.36 for place in range(len(others))], others[::-1])
        axes[1].tick_params(axis="y", length=0)
        axes[1].spines["left"].set_visible(False)
        axes[1].set_ylim(-0.05, len(others) - 0.1)
        _regions(axes[1], word, named=False)
        axes[1].set_xlim(-0.7, width - 0.3)
        axes[1].set_xticks(range(0, width, 4 if width > 16 else 1))
        axes[1].set_xlabel(f"number of the flipped bit, {name}; 0 is the lowest", labelpad=3)
        _legend(figure, axes[0], mine, 1.10)

    label = (
        f"Outcome of single flipped bits in {name} by position, scheme {main}; the table that follows has the numbers"
    )
    return _svg(draw, f"bits-{dtype}-{word}", label)


def outcome_chart(rows: Sequence[Row]) -> str:
    """Shares of outcomes of faults by suite and scheme, from rows of `abft_tsm2.faults.analysis.tables.totals`."""
    rows = [row for row in rows if row["faults"]]
    if len(rows) > BARS:
        rows = _pooled(rows)
    if not rows:
        return ""
    suites = [row.get("suite", "") for row in rows]
    starts = [at for at, suite in enumerate(suites) if suite and (at == 0 or suites[at - 1] != suite)]
    places = [at + 0.75 * sum(start <= at for start in starts) for at in range(len(rows))]

    def draw(figure: Any) -> None:
        figure.set_size_inches(WIDTH, 0.9 + 0.27 * (places[-1] + 1))
        axis = figure.subplots()
        _stacks(axis, places, rows, 0.72, across=True)
        for place, row in zip(places, rows, strict=True):
            lost = f"{number(row['sdc'], NARROW_SPACE)} silent of {number(row['faults'], NARROW_SPACE)}"
            axis.text(1.012, place, lost, va="center", weight="bold" if row["sdc"] else "normal", fontsize=9)
        for start in starts:
            axis.text(0, places[start] - 0.78, suites[start], va="center", style="italic", color=INK, fontsize=9.5)
        axis.set_yticks(places, [row["scheme"] for row in rows])
        axis.tick_params(axis="y", length=0)
        axis.spines["left"].set_visible(False)
        axis.set_ylim(places[-1] + 0.5, -0.5 if not starts else -0.2)
        axis.set_xlim(0, 1)
        axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
        axis.set_xlabel("share of the planted faults")
        _legend(figure, axis, rows, 1 + 0.32 / figure.get_size_inches()[1])

    return _svg(draw, "outcomes", "Outcomes of planted faults by scheme; the table that follows has the numbers")


def size_chart(rows: Sequence[Row], scheme: str) -> str:
    """Faults of one scheme around the promised limit, from rows of `analysis.tables.histogram` of sizes."""
    rows = [row for row in rows if row["scheme"] == scheme and row["power"] != "none"]
    rows = [row for row in rows if row["power"] <= LARGEST_DRAWN]
    if not rows:
        return ""

    def draw(figure: Any) -> None:
        figure.set_size_inches(WIDTH, 3.3)
        axis = figure.subplots()
        _stacks(axis, [row["power"] + 0.5 for row in rows], rows, 0.9, shares=False)
        lowest = min(-4, *(row["power"] for row in rows))
        axis.axvline(0, color=INK, linewidth=1.4)
        axis.text(0.15, 1.0, "promised to be found", transform=axis.get_xaxis_transform(), va="bottom", fontsize=9)
        axis.set_xlim(lowest - 0.3, LARGEST_DRAWN + 1.2)
        ticks = range(lowest - lowest % -2, LARGEST_DRAWN + 2, 2)  # 1, which is 2 to the 0, is among them
        axis.set_xticks(list(ticks), [_power(tick) for tick in ticks])
        axis.set_xlabel("size of the fault, in units of what is promised to be found")
        axis.set_ylabel("faults")
        axis.yaxis.get_major_locator().set_params(integer=True)
        axis.grid(axis="y")
        _legend(figure, axis, rows, 1.10)

    return _svg(draw, "sizes", f"Faults by size around the promised limit, scheme {scheme}, by outcome")


def cost_chart(rows: Sequence[Row], schemes: Sequence[str]) -> str:
    """Time of each scheme over that of no protection, from rows of `abft_tsm2.faults.analysis.tables.cost`.

    A scheme's look is that of its place in `schemes`, whichever were timed.
    """
    rows = [row for row in rows if row["times_none"] is not None and row["scheme"] != "none"]
    problems = dict.fromkeys(tuple(row[name] for name in ("operation", "m", "k", "n", "dtype")) for row in rows)
    largest = sorted(problems, key=lambda problem: -problem[1] * problem[2] * problem[3])[:PROBLEMS]
    timed = dict.fromkeys(row["scheme"] for row in rows)
    if not largest:
        return ""

    def draw(figure: Any) -> None:
        figure.set_size_inches(WIDTH, 1.2 + 0.42 * len(largest))
        axis = figure.subplots()
        for scheme in timed:
            colour, marker = LOOKS[schemes.index(scheme) % len(LOOKS)]
            times = {_problem(row): row["times_none"] for row in rows if row["scheme"] == scheme}
            points = [(times[problem], place) for place, problem in enumerate(largest) if problem in times]
            axis.plot(
                [time for time, _ in points],
                [place for _, place in points],
                linestyle="none",
                marker=marker,
                markersize=7,
                color=COLOURS[colour],
                label=scheme,
            )
        axis.axvline(1, color=INK, linewidth=1.2)
        axis.set_xscale("log")
        low, high = axis.get_xlim()
        low, high = min(low, 0.9), max(high, 2.2)
        ticks = [tick for tick in TIMES if low <= tick <= high]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_xticks([], minor=True)
        axis.set_xlim(low, high)
        axis.set_yticks(range(len(largest)), [_name(problem) for problem in largest])
        axis.set_ylim(len(largest) - 0.5, -0.6)
        axis.grid(axis="both")
        axis.set_xlabel("median time, in times of no protection")
        figure.legend(
            *axis.get_legend_handles_labels(),
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            bbox_transform=axis.transAxes,
            ncols=7,
        )

    return _svg(draw, "cost", "Median time of each scheme over no protection; the table that follows has the numbers")


# ---- parts of charts -----------------------------------------------------------------------------------------------


def _stacks(
    axis: Any, places: Sequence[float], rows: Sequence[Row], width: float, *, across: bool = False, shares: bool = True
) -> None:
    """Stacked bars of outcomes: shares of their faults, or numbers."""
    base = [0.0] * len(rows)
    for label, colour, outcomes, hatch in STACK:
        parts = [_part(row, outcomes) / (row["faults"] if shares else 1) for row in rows]
        if not any(parts):
            continue
        look = {"color": COLOURS[colour], "edgecolor": PAPER, "linewidth": 0.4, "hatch": hatch, "label": label}
        if across:
            axis.barh(places, parts, width, left=base, **look)
        else:
            axis.bar(places, parts, width, bottom=base, **look)
        base = [one + other for one, other in zip(base, parts, strict=True)]


def _part(row: Row, outcomes: Iterable[str]) -> int:
    return sum(int(row[outcome]) for outcome in outcomes)


def _legend(figure: Any, axis: Any, rows: Sequence[Row], top: float) -> None:
    handles, labels = axis.get_legend_handles_labels()
    if rows:
        figure.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(-0.01, top - 0.01),
            bbox_transform=axis.transAxes,
            ncols=7,
            handlelength=1.2,
            handletextpad=0.5,
        )


def _regions(axis: Any, dtype: str, named: bool) -> None:
    """Lines between mantissa, exponent and sign, and their names above."""
    if dtype not in FLOATS:
        return
    kind = FLOATS[dtype]
    edges = {"mantissa": (0, kind.precision - 1), "exponent": (kind.precision - 1, kind.bits - 1)}
    edges["sign"] = (kind.bits - 1, kind.bits)
    for name, (first, end) in edges.items():
        if first:
            axis.axvline(first - 0.5, color=INK, linewidth=0.9, linestyle=(0, (2, 2)))
        if named:
            bits = end - first
            # The sign's region is narrower than its name, which may stand over the edge.
            place, text = (first - 0.5, name) if bits == 1 else ((first + end - 1) / 2, f"{name}, {bits} bits")
            side = "left" if bits == 1 else "center"
            axis.text(place, 1.02, text, transform=axis.get_xaxis_transform(), ha=side, va="bottom", fontsize=9)


def _problem(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("operation", "m", "k", "n", "dtype"))


def _name(problem: tuple[Any, ...]) -> str:
    operation, m, k, n, dtype = problem
    return f"{operation} {m} × {k} × {n}, {dtype}"


def _power(exponent: int) -> str:
    """A power of two; the digits are characters of their own, as markup in the SVG would not scale."""
    small = {0: "1", 1: "2", 2: "4", 3: "8", 4: "16", -1: "½", -2: "¼"}
    return small.get(exponent, "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")))


def _pooled(rows: Sequence[Row]) -> list[Row]:
    """Rows of all suites together, by scheme."""
    pooled: dict[str, Row] = {}
    for row in rows:
        sums = pooled.setdefault(row["scheme"], {"scheme": row["scheme"]})
        for name, value in row.items():
            if type(value) is int:
                sums[name] = sums.get(name, 0) + value
    return list(pooled.values())


# ---- from Matplotlib to the page -----------------------------------------------------------------------------------


def _svg(draw: Callable[[Any], None], name: str, label: str) -> str:
    """Draw, and make of it an element that a page can hold: its colours, names and size are the page's."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not what the user has set for other figures
        matplotlib.rcParams.update(STYLE)
        figure = Figure()
        draw(figure)
        file = io.StringIO()
        plain: Mapping[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", bbox_inches="tight", pad_inches=0.04, transparent=True, metadata=plain)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    # Names in a page are unique: each chart has its own. Of an unknown type, letters alone.
    name = re.sub(r"[^\w-]", lambda found: f"{ord(found[0]):x}", name)
    svg = re.sub(r'( id="|url\(#|href="#)', rf"\1{name}-", svg)
    for colour_name, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{colour_name})")
    width, height = (float(size) for size in re.findall(r'(?:width|height)="([\d.]+)pt"', svg)[:2])
    head = f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img"'
    return re.sub(r"<svg [^>]*>", f'{head} aria-label="{escape(label)}">', svg, count=1)
