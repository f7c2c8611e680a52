"""One flipped bit in real data, with and without protection: what ``abft-tsm2 demo`` shows.

A photograph is compressed by the randomised SVD of Halko, Martinsson and Tropp (2011), and handwritten digits
are classified by their nearest neighbours. Each is run clean, with one bit flipped in one product, and with
the same flip in a protected product. Both data sets ship inside scikit-learn.
"""

from __future__ import annotations

import io
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from abft_tsm2.errors import AbftError
from abft_tsm2.gemm import protected_gemm
from abft_tsm2.io.matrix import MatrixFileError, output_file
from abft_tsm2.report import Report, Status

Matrix = np.ndarray[Any, np.dtype[Any]]

RANK, OVERSAMPLING, POWER_ITERATIONS = 50, 10, 2
REPETITIONS = 7  # of every timed run; the median counts
CANDIDATES = 256  # random positions, of which the flip takes the one that does most harm
TOP_EXPONENT_BIT = {"float64": 62, "float32": 30}
GREY = (0.299, 0.587, 0.114)  # ITU-R BT.601


class DemoError(AbftError):
    """The demonstration cannot run; the message says what to do."""


@dataclass(frozen=True)
class Flip:
    """One bit of one element of one product of a run."""

    product: int  # counted from 0
    row: int
    column: int
    bit: int

    def apply(self, c: Matrix) -> None:
        c[self.row, self.column] = flipped(c[self.row, self.column], self.bit)


def flipped(values: Any, bit: int) -> Any:
    """`values` with bit `bit` of each inverted (0 is the lowest of the mantissa).

    Examples
    --------
    >>> float(flipped(np.float64(1.5), 63)), float(flipped(np.float32(2.0), 30))
    (-1.5, 0.0)
    """
    bits = np.asarray(values).view(f"u{values.dtype.itemsize}")
    return (bits ^ bits.dtype.type(1 << bit)).view(values.dtype)


@dataclass
class Products:
    """The matrix products of one run: protected or not, timed, and one of them spoiled."""

    protected: bool
    flip: Flip | None = None
    results: list[Matrix] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    seconds: float = 0.0

    def __call__(self, a: Matrix, b: Matrix) -> Matrix:
        flip = self.flip if self.flip and self.flip.product == len(self.results) else None
        started = time.perf_counter()
        if self.protected:

            def plant(stage: str, arrays: Mapping[str, Any]) -> None:
                if flip and stage == "multiplied":
                    flip.apply(arrays["C"])

            hook = plant if flip else None
            c, report = protected_gemm(a, b, on_error="correct", return_report=True, on_stage=hook)
            self.reports.append(report)
        else:
            c = a @ b
            if flip:
                flip.apply(c)
        self.seconds += time.perf_counter() - started
        self.results.append(c)
        return np.asarray(c)


@dataclass(frozen=True)
class Section:
    """One computation on real data, and how to judge what comes out of it."""

    title: str
    compute: Callable[[Products], Matrix]
    judge: Callable[[Matrix], float]
    measure: str  # what `judge` returns
    product: int  # which product is spoiled
    product_name: str
    candidates: Callable[[Matrix, np.random.Generator], tuple[Matrix, Matrix]]  # rows, columns
    harm: Callable[[Matrix, Matrix], Matrix]  # of old and new values


@dataclass(frozen=True)
class DemoRun:
    """One line of the table."""

    name: str
    planted: str
    found: str
    repaired: str
    before: float
    after: float
    overhead: float | None
    agrees: bool | None  # found where it was planted; None where nothing was looked for
    result: Matrix
    reports: tuple[Report, ...]


@dataclass(frozen=True)
class RunOutcome:
    """What the demonstration prints, and every report behind it."""

    text: str
    reports: tuple[Report, ...]


def randomised_svd_picture(x: Matrix, products: Callable[[Matrix, Matrix], Matrix], seed: int) -> Matrix:
    """The picture of rank `RANK` that the randomised SVD finds; NaN where a fault made the SVD fail.

    Halko, Martinsson and Tropp, "Finding structure with randomness", SIAM Review 53 (2011): the range by
    subspace iteration (algorithm 4.4), then the SVD of the small matrix Q^T X (algorithm 5.1).
    """
    random = np.random.default_rng(seed)
    omega = random.standard_normal((x.shape[1], RANK + OVERSAMPLING)).astype(x.dtype)
    q = np.linalg.qr(products(x, omega)).Q
    for _ in range(POWER_ITERATIONS):
        w = np.linalg.qr(products(x.T, q)).Q
        q = np.linalg.qr(products(x, w)).Q
    try:
        u, s, vt = np.linalg.svd(products(q.T, x), full_matrices=False)
    except np.linalg.LinAlgError:  # it did not converge: the matrix holds NaN or Inf
        return np.full_like(x, np.nan)
    return products(products(q, u[:, :RANK]) * s[:RANK], vt[:RANK])


def _picture_section(x: Matrix, seed: int) -> Section:
    def error(picture: Matrix) -> float:
        difference = picture - x
        largest = float(np.abs(difference).max())  # taken out, so that the squares do not overflow
        return largest * float(np.linalg.norm(difference / largest) / np.linalg.norm(x))

    def anywhere(c: Matrix, random: np.random.Generator) -> tuple[Matrix, Matrix]:
        return random.integers(c.shape[0], size=CANDIDATES), random.integers(c.shape[1], size=CANDIDATES)

    return Section(
        title=f"photograph china.jpg, {x.shape[0]} x {x.shape[1]} {x.dtype}: randomised SVD of rank {RANK}",
        compute=lambda products: randomised_svd_picture(x, products, seed),
        judge=error,
        measure="relative error",
        product=1 + 2 * POWER_ITERATIONS,
        product_name="Q^T X",
        candidates=anywhere,
        harm=lambda old, new: np.abs(new - old),
    )


def _digits_section(x: Matrix, labels: Matrix) -> Section:
    def right(gram: Matrix) -> float:
        # |x_i - x_j|^2 = g_ii + g_jj - 2 g_ij, of which g_ii does not matter to the nearest j.
        distance = np.diagonal(gram) - 2 * gram
        np.fill_diagonal(distance, np.inf)
        return float(np.count_nonzero(labels[distance.argmin(axis=1)] == labels))

    def diagonal(c: Matrix, random: np.random.Generator) -> tuple[Matrix, Matrix]:
        chosen = random.integers(len(c), size=CANDIDATES)
        return chosen, chosen

    return Section(
        title=f"{x.shape[0]} handwritten digits, {x.dtype}: nearest neighbours from the Gram matrix X X^T",
        compute=lambda products: products(x, x.T),
        judge=right,
        measure="classified right",
        product=0,
        product_name="X X^T",
        candidates=diagonal,
        harm=lambda old, new: old - new,  # a digit with too small a norm becomes everybody's neighbour
    )


def _choose(section: Section, c: Matrix, bit: int, seed: int) -> Flip:
    """Of some random positions, the one where the flip does most harm and stays finite."""
    rows, columns = section.candidates(c, np.random.default_rng([seed, section.product]))
    old = c[rows, columns]
    new = flipped(old, bit)
    harm = section.harm(old.astype(np.longdouble), new.astype(np.longdouble))
    best = int(np.argmax(np.where(np.isfinite(new), harm, -np.inf)))
    return Flip(section.product, int(rows[best]), int(columns[best]), bit)


def _runs(section: Section, bit: int, seed: int) -> tuple[list[DemoRun], float]:
    """The three runs: clean, spoiled, and spoiled under protection; and the seconds of the plain products."""
    clean = Products(protected=True)
    good = section.compute(clean)
    flip = _choose(section, clean.results[section.product], bit, seed)
    spoiled, repaired = Products(protected=False, flip=flip), Products(protected=True, flip=flip)
    bad, same = section.compute(spoiled), section.compute(repaired)
    before, wrong, after = section.judge(good), section.judge(bad), section.judge(same)
    plain, first, last = _timed(section, flip)
    where = f"{section.product_name} [{flip.row}, {flip.column}], bit {bit}"
    found, how, agrees = _finding(repaired.reports[section.product], flip, clean.results[section.product])
    alarms = [report.status.name for report in clean.reports if report.status is not Status.CLEAN]
    nothing = ", ".join(alarms) or "nothing"
    runs = [
        DemoRun("clean, protected", "-", nothing, "-", before, before, first, None, good, tuple(clean.reports)),
        DemoRun("flip, unprotected", where, "not checked", "-", wrong, wrong, None, None, bad, ()),
        DemoRun("flip, protected", where, found, how, wrong, after, last, agrees, same, tuple(repaired.reports)),
    ]
    return runs, plain


def _timed(section: Section, flip: Flip) -> tuple[float, float, float]:
    """Medians: seconds of the plain products, overhead of protecting them, and of also repairing the flip."""
    rounds = []
    for _ in range(REPETITIONS):  # in turns, so that a slow moment of the machine meets all three
        turn = [Products(protected=False), Products(protected=True), Products(protected=True, flip=flip)]
        for products in turn:
            section.compute(products)
        plain, *others = (products.seconds for products in turn)
        rounds.append((plain, *(seconds / plain - 1 for seconds in others)))
    plain, first, last = map(statistics.median, zip(*rounds, strict=True))
    return plain, first, last


def _finding(report: Report, flip: Flip, clean: Matrix) -> tuple[str, str, bool]:
    """Where the fault was found, how it was repaired, and whether that is where it was planted."""
    faults = [fault for fault in report.faults if fault.operand == "C"]
    if not faults and report.status is not Status.CLEAN:
        return f"nowhere: {report.status.value}", "-", False
    if not faults:
        value = clean[flip.row, flip.column]
        change = float(abs(flipped(value, flip.bit) - value))
        limit = min((check.detection_limit for check in report.checks), default=math.inf)
        verdict = "below the limit: not found" if change <= limit else "NOT FOUND"
        return f"{verdict} (change {change:.2g}, limit {limit:.2g})", "-", False
    agrees = all(flip.row in (f.rows or [flip.row]) and flip.column in (f.columns or [flip.column]) for f in faults)
    places = "; ".join(f"[{_place(fault.rows)}, {_place(fault.columns)}]" for fault in faults[:3])
    how = "; ".join(dict.fromkeys(fault.repair or "not repaired" for fault in faults))
    return f"{places}, {'as planted' if agrees else 'NOT where it was planted'}", how, agrees


def _place(positions: tuple[int, ...]) -> str:
    return ", ".join(map(str, positions[:4])) or ":"


def _table(section: Section, runs: list[DemoRun], plain: float) -> str:
    """The text for the terminal."""
    head = ("run", "planted at", "found at", "repaired", "if not repaired", "returned", "time")
    rows = [head, *map(_cells, runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    note = f"(at the right: {section.measure}; time of the products against {1e3 * plain:.3g} ms of plain A @ B)"
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([section.title, note, *lines, ""])


def _cells(run: DemoRun) -> tuple[str, ...]:
    time = "-" if run.overhead is None else f"{100 * run.overhead:+.0f} %"
    return run.name, run.planted, run.found, run.repaired, _number(run.before), _number(run.after), time


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) and value < 1e6 else f"{value:.3g}"


def _draw(runs: list[DemoRun], bit: int, measure: str) -> bytes:
    """The three pictures side by side, with captions, as PNG."""
    from PIL import Image, ImageDraw, ImageFont

    margin, line = 16, 24
    height, width = runs[0].result.shape
    titles = ("no fault", f"bit {bit} of one element flipped, not protected", "the same flip, protected")
    canvas = Image.new("RGB", (3 * width + 4 * margin, height + 3 * margin + 2 * line), "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=18)
    for number, (run, title) in enumerate(zip(runs, titles, strict=True)):
        left = margin + number * (width + margin)
        grey = 255 * np.nan_to_num(run.result.clip(0, 1))
        canvas.paste(Image.fromarray(grey.astype(np.uint8)), (left, margin))
        draw.text((left, 2 * margin + height), title, fill="black", font=font)
        outcome = f"{measure} {_number(run.after)}"
        outcome += f", repaired at {run.found.removesuffix(', as planted')}" if number == 2 and run.agrees else ""
        draw.text((left, 2 * margin + height + line), outcome, fill="black", font=font)
    stream = io.BytesIO()
    canvas.save(stream, format="PNG")
    return stream.getvalue()


def _record(section: Section, runs: list[DemoRun], plain: float) -> dict[str, Any]:
    """A section as plain JSON types."""
    shown = ("name", "planted", "found", "repaired", "overhead", "agrees")
    return {
        "title": section.title,
        "measure": section.measure,
        "plain_seconds": plain,
        "runs": [
            {name: getattr(run, name) for name in shown}
            | {"if_not_repaired": _finite(run.before), "returned": _finite(run.after)}
            | {"reports": [report.to_dict() for report in run.reports]}
            for run in runs
        ],
    }


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"


def _load(dtype: str) -> tuple[Matrix, Matrix, Matrix]:
    """The photograph in grey (0 to 1), the digits (a row each, 0 to 1), and their labels."""
    try:
        import PIL  # noqa: F401  (scikit-learn reads the photograph with it)
        from sklearn.datasets import load_digits, load_sample_image
    except ImportError as error:
        missing = {"PIL": "Pillow", "sklearn": "scikit-learn"}.get((error.name or "").partition(".")[0], error.name)
        raise DemoError(f"the demo needs {missing}: pip install 'abft_tsm2[examples]'") from error
    photograph = load_sample_image("china.jpg") @ np.array(GREY) / 255
    digits = load_digits()
    return photograph.astype(dtype), (digits.data / 16).astype(dtype), digits.target


def run(folder: Path, *, seed: int = 0, bit: int | None = None, dtype: str = "float64") -> RunOutcome:
    """Run both sections, and write ``demo.png`` and ``demo.json`` into `folder`.

    Parameters
    ----------
    folder : Path
        Made where it is missing.
    seed : int
        Decides the random test matrix and where the bits are flipped.
    bit : int, optional
        Which bit to flip, 0 the lowest; by default the top bit of the exponent.
    dtype : {"float64", "float32"}
        Precision of every product.

    Returns
    -------
    Outcome

    Raises
    ------
    DemoError
        If a package is missing or there is no such bit.
    MatrixFileError
        If the results cannot be written.
    SilentDataCorruptionError
        If a product stays wrong.
    """
    highest = 8 * np.dtype(dtype).itemsize - 1
    bit = TOP_EXPONENT_BIT[dtype] if bit is None else bit
    if not 0 <= bit <= highest:
        raise DemoError(f"--bit {bit}: {dtype} has the bits 0 to {highest}; choose one of them")
    x, digits, labels = _load(dtype)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MatrixFileError(f"cannot make the folder {folder}: {error.strerror}; name another") from error
    picture, gram = _picture_section(x, seed), _digits_section(digits, labels)
    with np.errstate(all="ignore"):
        sections = [(section, *_runs(section, bit, seed)) for section in (picture, gram)]
    record = {"schema": "abft_tsm2/demo/1", "seed": seed, "bit": bit, "dtype": dtype}
    record |= {"sections": [_record(*section) for section in sections]}
    with output_file(folder / "demo.png") as keep:
        keep(_draw(sections[0][1], bit, picture.measure))
    with output_file(folder / "demo.json") as keep:
        keep(f"{json.dumps(record, indent=2, allow_nan=False)}\n".encode())
    small = "These products take milliseconds, so that checking weighs much; benchmarks/ times large ones."
    wrote = f"Wrote {folder / 'demo.png'} and {folder / 'demo.json'}"
    text = "\n".join([*(_table(*section) for section in sections), small, wrote])
    return RunOutcome(text, tuple(report for _, runs, _ in sections for one in runs for report in one.reports))
