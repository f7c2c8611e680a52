"""How far rounding moves the checksums of clean products on a GPU, for every engine of cuBLAS.

    python -m benchmarks.rounding                      eight shapes, one or two minutes on an H200
    python -m benchmarks.rounding --quick              three small ones
    python -m benchmarks.rounding --output NAME        results/NAME.csv, NAME_summary.csv, NAME_bias.csv

An engine is a way to compute C = A B: types of the operands and of C, and a compute type of cublasGemmEx. Its product
of each family of operands and each shape is checked by rows as protected_gemm checks: s = B v, t = A s, u = C v, in
float64 and with the package's weights. The residual r = |u - t| of each row is then compared with what the constants of
`abft_tsm2.checksum.bounds` multiply, and with the bound itself. docs/rounding.rst explains the columns.

Everything but `Cublas` is written against the array module `xp`, NumPy or CuPy; bfloat16 is kept as its bit patterns.
The exit code is 1 where something failed, which "not offered on this card" is not.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abft_tsm2.arrays import FLOATS, bit_pattern
from abft_tsm2.checksum.bounds import DETECT, Arithmetic, arithmetic, statistical_bound
from abft_tsm2.checksum.weights import equilibrated, exponents, weights
from abft_tsm2.core.vendor import CUDA_TYPES
from benchmarks import gpu_timing, tables
from benchmarks.gpu_products import BLOCK_BYTES, reference

Array = Any
Shape = tuple[int, int, int]  # m, k, n
Row = dict[str, Any]
Vector = NDArray[np.float64]

SHAPES: tuple[Shape, ...] = (
    (1024, 1024, 1024),
    (4096, 4096, 4096),
    (2048, 16384, 2048),
    (512, 65536, 512),
    (8192, 512, 512),
    (64, 8192, 8192),
    (512, 262144, 64),
    (257, 1000, 129),
)
QUICK: tuple[Shape, ...] = ((1024, 1024, 1024), (8192, 512, 512), (257, 1000, 129))
BIAS_SIZE = 512  # rows and columns of the products whose elements are looked at
BIAS_TERMS = (256, 1024, 4096, 16384, 65536, 262144)
BIAS_TERMS_QUICK = (256, 1024, 4096)
MOST_FLOAT64 = 2**37  # multiplications
NEGLIGIBLE = 0.1  # of a bound: the part of underflow, itself a hundred times its effect, in rows that tell of rounding


# ---- engines ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """One way in which cuBLAS computes a product.

    Attributes
    ----------
    name, inputs, out : str
        Its name, the type of A and B, that of C.
    compute : int
        cublasComputeType_t.
    reduced : bool
        Whether operands lose bits before they are multiplied (TF32).
    plain : str
        The engine that is computed where the library declines to emulate.
    """

    name: str
    inputs: str
    out: str
    compute: int
    reduced: bool = False
    plain: str = ""

    @property
    def arithmetic(self) -> Arithmetic:
        """What the package's bound takes it for."""
        return arithmetic(self.inputs, self.out, library="cupy", tf32=self.reduced)


ENGINES = (
    Engine("float64", "float64", "float64", 70),
    Engine("float64 fixed-point", "float64", "float64", 79, plain="float64"),
    Engine("float32", "float32", "float32", 68),
    Engine("float32 TF32", "float32", "float32", 77, reduced=True),
    Engine("float32 BF16x9", "float32", "float32", 78, plain="float32"),
    Engine("float16->float32", "float16", "float32", 68),
    Engine("float16", "float16", "float16", 68),
    Engine("bfloat16->float32", "bfloat16", "float32", 68),
    Engine("bfloat16", "bfloat16", "bfloat16", 68),
)
Multiply = Callable[[Engine, Array, Array], Array]
"""The product of C-ordered operands by an engine; RuntimeError where it is not offered."""

_KEPT_AS = {"bfloat16": "uint16"}


class Cublas:
    """`Multiply` by cublasGemmEx, row-major: to cuBLAS the matrices are transposed, and C' = B' A'."""

    def __call__(self, engine: Engine, A: Array, B: Array) -> Array:
        import cupy
        from cupy_backends.cuda.libs import cublas

        (m, k), n = A.shape, B.shape[1]
        nan = 0x7FC0 if engine.out in _KEPT_AS else math.nan  # what is not computed shows
        C = cupy.full((m, n), nan, dtype=_KEPT_AS.get(engine.out, engine.out))
        factors = np.array((1, 0), engine.arithmetic.accumulator.name)
        at, of, to = factors.ctypes.data, CUDA_TYPES[engine.inputs], CUDA_TYPES[engine.out]
        cublas.gemmEx(
            *(cupy.cuda.device.get_cublas_handle(), 0, 0, n, m, k),
            *(at, B.data.ptr, of, n, A.data.ptr, of, k),
            *(at + factors.itemsize, C.data.ptr, to, n, engine.compute, -1),
        )
        return C


# ---- operands -----------------------------------------------------------------------------------------------------


class Draw:
    """Random float64 numbers, and the array module they come from."""

    def __init__(self, seed: int, xp: Any = np) -> None:
        self.xp, self._generator = xp, xp.random.default_rng(seed)

    def normal(self, *shape: int) -> Array:
        return self._generator.standard_normal(math.prod(shape), dtype=self.xp.float64).reshape(shape)

    def uniform(self, *shape: int) -> Array:
        return self._generator.random(math.prod(shape), dtype=self.xp.float64).reshape(shape)

    def spread(self, decades: float, *shape: int) -> Array:
        """Powers of ten from -decades to decades, uniform in the exponent."""
        return self.xp.exp((2 * decades * math.log(10)) * (self.uniform(*shape) - 0.5))

    def steps(self, n: int) -> Array:
        """0, 1, ..., n - 1 in float64."""
        return self.xp.arange(n, dtype=self.xp.float64)


Operands = tuple[Array, Array]
Family = Callable[[Draw, int, int, int], Operands]


def _pair(of_a: Callable[..., Array], of_b: Callable[..., Array] | None = None) -> Family:
    """A and B from functions of a `Draw` and a shape; from the same one where there is no other."""
    return lambda d, m, k, n: (of_a(d, m, k), (of_b or of_a)(d, k, n))


def _scaled_inner(d: Draw, m: int, k: int, n: int) -> Operands:
    scale = d.spread(2, k)
    return d.normal(m, k) * scale, d.normal(k, n) / scale[:, None]


def _mixed_rows(d: Draw, m: int, k: int, n: int) -> Operands:
    a = d.normal(m, k)
    a[::100] = abs(a[::100])  # one row in a hundred sums up instead of averaging out
    return a, d.normal(k, n) + 1


def _sine(d: Draw, m: int, k: int, n: int) -> Operands:
    at = d.steps(k)
    return d.xp.sin(0.01 * at + 6 * d.uniform(m, 1)), d.xp.cos(0.013 * at[:, None] + 6 * d.uniform(1, n))


def _pairs_cancel(d: Draw, m: int, k: int, n: int) -> Operands:
    # To a millionth of each.
    a, b, half = d.uniform(m, k) + 0.5, d.uniform(k, n) + 0.5, k // 2
    b[1::2] = b[0 : 2 * half : 2] * (-1 - 1e-6 * d.normal(half, n))
    a[:, 1::2] = a[:, 0 : 2 * half : 2]
    return a, b


def _halves_cancel(d: Draw, m: int, k: int, n: int) -> Operands:
    # The second half of the sum takes away what the first has gathered.
    a, half = d.uniform(m, k) + 1, k // 2
    a[:, half : 2 * half] = -a[:, :half]
    return a, 1 + 1e-3 * d.normal(k, n)


def _hilbert(d: Draw, *shape: int) -> Array:
    return 1 / (d.steps(shape[0])[:, None] + d.steps(shape[1]) + 1)


GENERIC: Mapping[str, Family] = {
    "normal": _pair(Draw.normal),
    "uniform01": _pair(Draw.uniform),
    "uniform x normal": _pair(Draw.uniform, Draw.normal),
    "normal+1": _pair(lambda d, *s: d.normal(*s) + 1),
    "lognormal": _pair(
        lambda d, *s: d.xp.exp(3 * d.normal(*s)),
        lambda d, *s: d.xp.exp(3 * d.normal(*s)) * d.xp.sign(d.normal(*s)),
    ),
    "six decades": _pair(lambda d, *s: d.normal(*s) * d.spread(3, *s)),
    "scaled rows and columns": _pair(
        lambda d, m, k: d.normal(m, k) * d.spread(2, m, 1),
        lambda d, k, n: d.normal(k, n) * d.spread(2, 1, n),
    ),
    "scaled inner": _scaled_inner,
    "sparse": _pair(lambda d, *s: d.normal(*s) * (d.uniform(*s) < 0.02)),
    "low rank": _pair(lambda d, m, n: d.normal(m, 4) @ d.normal(4, n)),
    "mixed rows": _mixed_rows,
}
"""Entries without order: rounding errors behave like independent random numbers."""

STRUCTURED: Mapping[str, Family] = {
    "sorted": _pair(
        lambda d, m, k: d.xp.sort(d.uniform(m, k), axis=1),
        lambda d, k, n: d.xp.sort(d.uniform(k, n), axis=0),
    ),
    "sine": _sine,
    "equal columns": _pair(Draw.uniform, lambda d, k, n: d.uniform(k, 1) + d.xp.zeros((k, n))),
    "constant": _pair(lambda d, *s: d.xp.full(s, 0.1), lambda d, *s: d.xp.full(s, 0.3)),
    "constant rows": _pair(
        lambda d, m, k: d.uniform(m, 1) + d.xp.zeros((m, k)),
        lambda d, k, n: d.uniform(1, n) + d.xp.zeros((k, n)),
    ),
    "constant rows of both signs": _pair(
        lambda d, m, k: d.normal(m, 1) + d.xp.zeros((m, k)),
        lambda d, k, n: d.normal(1, n) + d.xp.zeros((k, n)),
    ),
    "pairs cancel": _pairs_cancel,
    "halves cancel": _halves_cancel,
    "Hilbert": _pair(_hilbert),
}
"""Neighbours are related, or the sum cancels: rounding errors may all have the same sign."""

FAMILIES = {"generic": GENERIC, "structured": STRUCTURED}


def fitted(A: Array, B: Array, name: str) -> Operands:
    """A and B times powers of two with which a product of that type overflows nowhere; they are for float16 only."""
    if FLOATS[name].max_exponent > 16:
        return A, B
    top_a, top_b = (math.frexp(float(abs(x).max()))[1] for x in (A, B))
    largest = float((abs(A) @ abs(B).max(axis=1)).max())
    together = 14 - math.frexp(largest)[1]
    of_a = (together + top_b - top_a) // 2  # the largest elements of both become alike
    return A * 2.0 ** min(of_a, 15 - top_a), B * 2.0 ** min(together - of_a, 15 - top_b)


def rounded(x: Array, name: str, xp: Any = np) -> Array:
    """x, float64, in a type and in C order; finite numbers to the nearest bfloat16, ties to even."""
    x = xp.ascontiguousarray(x)
    if name != "bfloat16":
        return x.astype(name, copy=False)
    bits = x.astype(xp.float32).view(xp.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(xp.uint16)


def widened(x: Array, name: str, xp: Any = np) -> Array:
    """x, of a type, in float64, exactly."""
    if name == "bfloat16":
        x = (x.astype(xp.uint32) << 16).view(xp.float32)
    return x.astype(xp.float64, copy=False)


def _blocks(x: Array, name: str, xp: Any) -> Iterator[tuple[slice, Array]]:
    """x in float64, as many rows at a time as fit into a block."""
    rows = max(1, BLOCK_BYTES // (8 * x.shape[1]))
    for at in range(0, x.shape[0], rows):
        yield slice(at, at + rows), widened(x[at : at + rows], name, xp)


# ---- one product --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoded:
    """What the check of C = A B needs of the operands: the weights v of the columns (on the device), and for each row
    t = A B v, P2 and P (on the host)."""

    k: int
    weights: Array
    predicted: Vector
    products: Vector
    magnitudes: Vector

    @classmethod
    def of(cls, A: Array, B: Array, name: str, xp: Any = np) -> Encoded:
        """Of operands of a type."""
        (m, k), n = A.shape, B.shape[1]
        squares = xp.zeros(n)
        for _, b in _blocks(B, name, xp):
            squares += (b * b).sum(axis=0)
        with np.errstate(divide="ignore"):
            exponent = exponents(np.log2(_host(squares, xp)) / 2)
        v = xp.asarray(np.ascontiguousarray(equilibrated(weights("balanced", n), exponent)[:, 0]))
        s, q2 = xp.zeros(k), xp.zeros(k)
        for part, b in _blocks(B, name, xp):
            s[part] = b @ v
            q2[part] = (b * b) @ (v * v)
        q = xp.sqrt(q2)
        t, products, magnitudes = (xp.zeros(m) for _ in range(3))
        for part, a in _blocks(A, name, xp):
            t[part] = a @ s
            products[part] = xp.sqrt((a * a) @ q2)
            magnitudes[part] = abs(a) @ q
        return cls(k, v, *(_host(x, xp) for x in (t, products, magnitudes)))

    def lines(self, C: Array, name: str, xp: Any = np) -> Lines:
        """The rows of a product of type `name` beside what was predicted of them."""
        v = self.weights
        found, stored = xp.zeros(C.shape[0]), xp.zeros(C.shape[0])
        for part, c in _blocks(C, name, xp):
            found[part] = c @ v
            stored[part] = xp.sqrt((c * c) @ (v * v))
        with np.errstate(invalid="ignore"):
            residual = abs(_host(found, xp) - self.predicted)
        weight = float(abs(v).sum())
        return Lines(self.k, v.size, weight, residual, self.products, self.magnitudes, _host(stored, xp))


@dataclass(frozen=True)
class Lines:
    """The rows of a checked product, on the host.

    Attributes
    ----------
    k, n, weight : int, int, float
        Terms of an element, elements of a row, ||v||_1.
    residual, products, magnitudes, stored : (m,) arrays
        r = |u - t|, P2 = sqrt((A o A) ||B_l o v||^2), P = |A| ||B_l o v||, cn = ||C_i o v||.
    """

    k: int
    n: int
    weight: float
    residual: Vector
    products: Vector
    magnitudes: Vector
    stored: Vector


def _host(x: Array, xp: Any) -> Vector:
    found: Vector = getattr(xp, "asnumpy", np.asarray)(x)
    return found


MEASURES = ("ratio", "ratio_999", "linear", "stored", "inputs_11", "inputs_10", "over_tau")
"""See `measure`."""


def measure(lines: Lines, engine: Engine) -> dict[str, float]:
    """The largest residuals of a product, each in units of what a constant multiplies.

    Returns
    -------
    measures : dict
        ``ratio``: r / (u sqrt(k) max(P2, cn)), and ``ratio_999`` its 99.9 % quantile over the rows; ``linear``:
        r / (u k P); ``stored``: r / (u_out cn) where C is rounded once more; ``inputs_11``, ``inputs_10``:
        r / (2^-11 P2) and r / (2^-10 P2) where operands are reduced; ``over_tau``: r / tau. All but the last leave out
        rows in whose bound underflow takes part. What cannot be judged, NaN, is infinitely large.
    """
    a = engine.arithmetic
    sizes: dict[str, Any] = {"products": lines.products, "stored": lines.stored, "added": None}
    underflow = a.underflow(lines.k) * lines.weight
    with np.errstate(invalid="ignore"):
        tau = statistical_bound(np, a, lines.k, lines.n, underflow=underflow, **sizes)
    clear = ~(underflow > NEGLIGIBLE * tau)

    def worst(unit: Any, where: Any = clear) -> Vector:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            found = np.where(lines.residual == 0, 0.0, lines.residual / unit)
        return np.asarray(np.where(np.isnan(found), np.inf, found)[where])

    largest = np.maximum(lines.products, lines.stored)
    ratio = worst(a.u * math.sqrt(lines.k) * largest)
    found = {
        "ratio": ratio.max(initial=0.0),
        "ratio_999": np.quantile(ratio, 0.999, method="higher") if ratio.size else 0.0,
        "linear": worst(a.u * lines.k * lines.magnitudes).max(initial=0.0),
    }
    if a.u_out:
        found["stored"] = worst(a.u_out * lines.stored).max(initial=0.0)
    if engine.reduced:
        found |= {f"inputs_{bits}": worst(2.0**-bits * lines.products).max(initial=0.0) for bits in (11, 10)}
    found["over_tau"] = worst(tau, slice(None)).max(initial=0.0)
    return {name: float(value) for name, value in found.items()}


# ---- all products -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One product.

    Attributes
    ----------
    measured : dict
        What `measure` found; empty where there is no product.
    same : bool or None
        Whether an emulating engine gave the plain one's result bit for bit.
    note : str
        Why there is no product.
    """

    engine: Engine
    shape: Shape
    kind: str
    family: str
    measured: dict[str, float] = field(default_factory=dict)
    same: bool | None = None
    note: str = ""

    @property
    def failed(self) -> bool:
        return self.note.startswith("failed")


def products(shape: Shape, multiply: Multiply, draw: Draw, engines: Sequence[Engine] = ENGINES) -> Iterator[Cell]:
    """Every family of operands by every engine; an error is noted in the cells it concerns, and the others go on."""
    m, k, n = shape
    for kind, families in FAMILIES.items():
        for family, make in families.items():
            begun: list[Cell] = []
            try:
                A, B = make(draw, m, k, n)
                for cell in _of_operands(Cell(engines[0], shape, kind, family), A, B, multiply, draw.xp, engines):
                    begun.append(cell)
            except Exception as error:
                done = {cell.engine for cell in begun}
                note = f"failed: {gpu_timing.message(error)}"
                begun += [Cell(one, shape, kind, family, note=note) for one in engines if one not in done]
            yield from begun


def _of_operands(
    of: Cell, A: Array, B: Array, multiply: Multiply, xp: Any, engines: Sequence[Engine]
) -> Iterator[Cell]:
    for inputs in dict.fromkeys(engine.inputs for engine in engines):
        a, b = (rounded(x, inputs, xp) for x in fitted(A, B, inputs))
        encoded = Encoded.of(a, b, inputs, xp)
        results: dict[str, Array] = {}
        for engine in engines:
            if engine.inputs != inputs:
                continue
            if inputs == "float64" and math.prod(of.shape) > MOST_FLOAT64:
                yield replace(of, engine=engine, note="left out: takes too long")
                continue
            try:
                C = multiply(engine, a, b)
            except RuntimeError as error:
                yield replace(of, engine=engine, note=declined(error))
                continue
            if any(other.plain == engine.name for other in engines):
                results[engine.name] = C
            plain = results.get(engine.plain)
            same = None if plain is None else bool((bit_pattern(C) == bit_pattern(plain)).all())
            yield replace(of, engine=engine, same=same, measured=measure(encoded.lines(C, engine.out, xp), engine))


def declined(error: RuntimeError) -> str:
    """What to note of a product that raised."""
    text = gpu_timing.message(error)
    return f"not offered on this card: {text}" if "CUBLAS_STATUS" in text else f"failed: {text}"


def rows(cells: Iterable[Cell]) -> list[Row]:
    """One for each engine, shape and kind of family: the largest of each measure, and the family it comes from."""
    groups: dict[tuple[Engine, Shape, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.engine, cell.shape, cell.kind), []).append(cell)
    found = []
    for (engine, (m, k, n), kind), group in groups.items():
        row: Row = {"engine": engine.name, "inputs": engine.inputs, "output": engine.out, "compute": engine.compute}
        row |= {"m": m, "k": k, "n": n, "kind": kind, "families": sum(bool(cell.measured) for cell in group)}
        for name in MEASURES:
            value, family = max(((c.measured[name], c.family) for c in group if name in c.measured), default=("", ""))
            row |= {name: f"{value:.4g}" if family else "", f"{name}_family": family}
        found.append(row | {"note": _note(group)})
    return found


def _note(group: Sequence[Cell]) -> str:
    notes = dict.fromkeys(f"{c.family}: {c.note}" if c.failed else c.note for c in group if c.note)
    compared = [cell.same for cell in group if cell.same is not None]
    if compared and all(compared):
        notes["bit for bit the plain product: the library did not emulate"] = None
    elif any(compared):
        notes[f"bit for bit the plain product in {sum(map(bool, compared))} of {len(compared)} families"] = None
    return "; ".join(notes)


# ---- single elements ----------------------------------------------------------------------------------------------


def bias(k: int, multiply: Multiply, draw: Draw, engines: Sequence[Engine] = ENGINES) -> list[Row]:
    """Mean and root mean square of the relative error of single elements, for operands uniform in [0, 1).

    An adder that rounds errs to both sides, one that truncates towards zero: the mean tells. Results that are rounded
    once more on storing tell nothing of it and are left out.
    """
    xp, size, found = draw.xp, BIAS_SIZE, []
    A, B = draw.uniform(size, k), draw.uniform(k, size)
    for inputs in dict.fromkeys(engine.inputs for engine in engines):
        a, b = (rounded(x, inputs, xp) for x in (A, B))
        sums = arithmetic(inputs, inputs).accumulator.name
        exact = reference(widened(a, inputs, xp), widened(b, inputs, xp), xp, sums=sums)
        for engine in engines:
            if engine.inputs != inputs or engine.arithmetic.u_out:
                continue
            row: Row = {"engine": engine.name, "k": k, "mean / u": "", "mean / (u k)": "", "rms / u": "", "note": ""}
            try:
                C = widened(multiply(engine, a, b), engine.out, xp)
            except RuntimeError as error:
                found.append(row | {"note": declined(error)})
                continue
            relative, u = ((C - exact.high) - exact.low) / exact.high, engine.arithmetic.u
            mean, rms = float(relative.mean()) / u, math.sqrt(float((relative * relative).mean())) / u
            numbers = {"mean / u": mean, "mean / (u k)": mean / k, "rms / u": rms}
            found.append(row | {name: f"{value:.3g}" for name, value in numbers.items()})
    return found


def probe() -> NDArray[np.float32]:
    """256 x 256 float32 numbers with all patterns of the 13 bits that TF32 lacks, after 0 to 3 in those before, of both
    signs."""
    low, before, sign = np.arange(2**13), np.arange(4)[:, None], np.array([1, -1])[:, None, None]
    found = sign * (1 + (before * 2**13 + low) * 2.0**-23)
    return np.asarray(found, np.float32).reshape(256, 256)


def kept(x: NDArray[np.float32], y: NDArray[np.float32]) -> str:
    """What an engine did to the operand x, of which y is the product with the identity."""
    steps, found = x.astype(np.float64) * 2.0**10, y.astype(np.float64) * 2.0**10
    ways = {
        "exact": steps,
        "truncated": np.trunc(steps),
        "nearest, ties to even": np.rint(steps),
        "nearest, ties away": np.copysign(np.floor(abs(steps) + 0.5), steps),
    }
    for name, expected in ways.items():
        if np.array_equal(found, expected):
            return name
    return f"otherwise, off by up to {abs(found - steps).max():.3g} of the last place of TF32"


def reduction(engine: Engine, multiply: Multiply, xp: Any = np) -> str:
    """How an engine reduces float32 operands before it multiplies them."""
    x, one = xp.asarray(probe()), xp.asarray(np.eye(256, dtype=np.float32))
    try:
        ways = [kept(probe(), np.asarray(_host(multiply(engine, *pair), xp))) for pair in ((x, one), (one, x))]
    except RuntimeError as error:
        return declined(error)
    return ways[0] if ways[0] == ways[1] else f"A: {ways[0]}; B: {ways[1]}"


# ---- what comes of it ---------------------------------------------------------------------------------------------

_WORST: Mapping[str, tuple[str, str]] = {  # column: measure, kind
    "ratio, generic": ("ratio", "generic"),
    "ratio, structured": ("ratio", "structured"),
    "linear": ("linear", ""),
    "stored": ("stored", "generic"),
    "inputs 2^-11": ("inputs_11", "generic"),
    "r / tau, generic": ("over_tau", "generic"),
    "r / tau, structured": ("over_tau", "structured"),
}


def summarise(cells: Sequence[Cell], reductions: Mapping[str, str], where: str = "") -> list[Row]:
    """One row for each engine: the worst of its products, with family and shape, and what constants would cover them.

    ``DETECT`` is the largest ratio over generic families; ``TRUNCATION`` the least c for which
    ``(DETECT sqrt(k) + c k) u max(P2, cn)``, with the package's DETECT, covers them. Where operands or results are
    rounded as well, ratios in units of u tell nothing and are left out.
    """
    found = []
    for engine in dict.fromkeys(cell.engine for cell in cells):
        own = [cell for cell in cells if cell.engine == engine]
        own_sums = not engine.arithmetic.u_out and not engine.reduced
        row: Row = {"engine": engine.name}
        for column, (name, kind) in _WORST.items():
            worst = max(
                (cell for cell in own if name in cell.measured and kind in ("", cell.kind)),
                key=lambda cell: cell.measured[name],
                default=None,
            )
            if worst is None or (name in ("ratio", "linear") and not own_sums):
                row[column] = ""
            else:
                row[column] = f"{worst.measured[name]:.3g} ({worst.family}, {_times(worst.shape)})"
        generic = [(c.measured["ratio"], c.shape[1]) for c in own if c.measured and c.kind == "generic"]
        least = max(((ratio - DETECT) / math.sqrt(k) for ratio, k in generic), default=0.0)
        row["DETECT"] = f"{max(generic)[0]:.2f}" if generic and own_sums else ""
        truncating = bool(generic) and own_sums and engine.arithmetic.truncating
        row["TRUNCATION"] = f"{max(0.0, least):.4f}" if truncating else ""
        row["operands"] = reductions.get(engine.name, "")
        found.append(row | {"note": _note(own), "measured on": where})
    return found


def _times(shape: Shape) -> str:
    return " x ".join(map(str, shape))


def _print(found: Sequence[Row]) -> None:
    shown = [{name: value for name, value in row.items() if name != "measured on"} for row in found]
    print(tables.markdown(list(shown[0]), [[str(value) for value in row.values()] for row in shown]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three small shapes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="rounding", metavar="NAME", help="results/NAME.csv and its companions")
    options = parser.parse_args(arguments)
    # cuBLAS reads it when it starts: wherever an emulating compute type is asked for, not only where that is faster.
    os.environ.setdefault("CUBLAS_EMULATION_STRATEGY", "eager")
    import cupy

    start, multiply = time.monotonic(), Cublas()
    environment = gpu_timing.environment()
    where = "{device}, driver {driver}, CUDA {cuda}, cuBLAS {cublas}, CuPy {cupy}, {date}".format(**environment)
    print(where, flush=True)
    cells: list[Cell] = []
    for number, shape in enumerate(QUICK if options.quick else SHAPES):
        cells += products(shape, multiply, Draw(options.seed + number, cupy))
        tables.write(options.output, [row | environment for row in rows(cells)])
        cupy.get_default_memory_pool().free_all_blocks()
        print(f"{time.monotonic() - start:6.1f} s: {_times(shape)}", flush=True)
    biases: list[Row] = []
    for k in BIAS_TERMS_QUICK if options.quick else BIAS_TERMS:
        biases += bias(k, multiply, Draw(options.seed + k, cupy))
        cupy.get_default_memory_pool().free_all_blocks()
    tables.write(f"{options.output}_bias", biases)
    reductions = {e.name: reduction(e, multiply, cupy) for e in ENGINES if e.inputs == "float32"}
    summary = summarise(cells, reductions, where)
    tables.write(f"{options.output}_summary", summary)
    _print(summary)
    _print(biases)
    failed = [cell for cell in cells if cell.failed]
    for cell in failed:
        print(f"{cell.engine.name}, {cell.family}, {_times(cell.shape)}: {cell.note}")
    measured = sum(bool(cell.measured) for cell in cells)
    print(f"{measured} products, {len(failed)} failed, in {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
