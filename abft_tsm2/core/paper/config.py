"""The paper's kernels as configurations and launches: `Config`, `LaunchShape`, and the one predicate over them.

A kernel is a variant with its constants t1, t2, t3 and tcf (the paper's names, C. Rivera et al., TSM2X, 2021).
`why_not` says whether a configuration may serve a problem on a device, and if not, for which reason; everything that
chooses, compiles, tunes or tests configurations asks it, and `choices` lists what it lets through.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from abft_tsm2.arrays import type_name
from abft_tsm2.core.device import Device
from abft_tsm2.core.problem import C_TYPES, Problem, fitting

TSM2R = ("V0", "V1", "V2", "V3")
TSM2L = ("Opt-1", "Opt-2")
VARIANTS = (*TSM2R, *TSM2L)
BYTES = {"float32": 4, "float64": 8}

# What a kernel is compiled for. t1 is a number of threads, at least two warps, so that one can hide the other; t2
# serves 1 to 16 columns of C in one reading of A; t3 elements of A a thread are in flight; the paper saw no gain from
# fewer than m / 64 threads. V0 to V2 are steps of the paper's ladder, not tuned, and TSM2L is a stream, to which t1
# matters little: they keep the paper's t1.
T1 = (64, 128, 256)
T2 = (2, 4, 8, 16)
T3 = {
    ("tsm2r", "float32"): (4, 16, 32),
    ("tsm2r", "float64"): (4, 12, 16, 32),
    ("tsm2l", "float32"): (8, 16, 32),
    ("tsm2l", "float64"): (8, 12, 16),
}
TCF = (1, 2, 4, 8, 64)
PAPER_T1 = 128
_FIXED_REGISTERS = 80  # addresses, strides, counters: what every variant needs beside its tiles
_GRID = 2**31 - 1


@dataclass(frozen=True)
class Config:
    """A variant and its compile-time constants; a constant that the variant does not use is 1.

    Attributes
    ----------
    variant : str
        One of `VARIANTS`.
    dtype : str
        May be given as anything that NumPy takes as a dtype.
    t1 : int
        Threads of a block, and rows of a tile of B.
    t2 : int
        Columns of C that a thread computes at a time.
    t3 : int
        Elements of A that a thread loads at a time.
    tcf : int
        Rows of C of a thread (TSM2L).
    """

    variant: str
    dtype: str
    t1: int
    t2: int = 1
    t3: int = 1
    tcf: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", type_name(self.dtype))

    @property
    def family(self) -> str:
        """``"tsm2r"`` or ``"tsm2l"``: also the name of the file that holds the kernel."""
        return "tsm2l" if self.variant in TSM2L else "tsm2r"

    @property
    def function(self) -> str:
        """Name of the variant in that file."""
        return self.variant.lower().replace("-", "")

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"{self.family}_{self.function}_{self.dtype}_t1_{self.t1}_t2_{self.t2}_t3_{self.t3}_tcf_{self.tcf}"

    @property
    def file(self) -> str:
        """The file of kernels/ that holds the variant."""
        return f"paper/{self.family}.cu"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        sizes = {"T1": self.t1, "T2": self.t2, "T3": self.t3, "TCF": self.tcf}
        return {"REAL": C_TYPES[self.dtype], **sizes, "VARIANT": self.function}

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the tile of B, t1 x t2."""
        return 0 if self.variant in ("V0", "V1") else self.t1 * self.t2 * BYTES[self.dtype]

    @property
    def registers(self) -> int:
        """Registers of a thread that hold its tiles, by the paper's count, and those that every kernel needs.

        V3 and Opt-1: 3 t2 + 2 t3 values (C, nextB and the row of currB in use; currA and nextA); V2 has no next tiles;
        Opt-2 adds C and nextC.
        """
        t2, t3 = self.t2, self.t3
        values = {"V0": 2, "V1": 2 * t2 + 1, "V2": 3 * t2 + t3, "Opt-2": 5 * t2 + 2 * t3}.get(
            self.variant, 3 * t2 + 2 * t3
        )
        return values * BYTES[self.dtype] // 4 + _FIXED_REGISTERS


@dataclass(frozen=True)
class LaunchShape:
    """Blocks, threads of a block, and static shared memory of a block in bytes."""

    grid: int
    block: int
    shared_bytes: int


def why_not(problem: Problem | None, config: Config, device: Device) -> str | None:
    """Why `config` cannot serve `problem` on `device`; None if it can.

    Parameters
    ----------
    problem : Problem or None
        None asks whether the configuration may serve any problem at all.
    config : Config
    device : Device

    Returns
    -------
    reason : str or None

    Examples
    --------
    >>> from abft_tsm2.core.device import known
    >>> config = Config("V3", "float64", t1=128, t2=16, t3=16)
    >>> why_not(Problem(20480, 20480, 16, "float64"), config, known("H200")) is None
    True
    >>> why_not(Problem(20480, 20480, 16, "float64", order="C"), config, known("H200"))
    'A is not column-major: V3 reads it column by column, a row a thread'
    """
    return next(_objections(problem, config, device), None)


def is_valid(problem: Problem | None, config: Config, device: Device) -> bool:
    """Whether `config` can serve `problem` on `device`."""
    return why_not(problem, config, device) is None


def _objections(problem: Problem | None, config: Config, device: Device) -> Iterator[str]:
    variant, t1, t2, t3, tcf = config.variant, config.t1, config.t2, config.t3, config.tcf
    if variant not in VARIANTS:
        yield f"there is no variant {variant!r}: choose from {', '.join(VARIANTS)}"
        return
    if config.dtype not in BYTES:
        yield f"{variant} multiplies float32 and float64, not {config.dtype}"
        return
    # Kernels exist for these; each one is compiled and tested. A variant takes 1 for what it has no use for.
    streams = variant in TSM2L
    values = {
        "t1": (t1, T1 if variant == "V3" else (PAPER_T1,)),
        "t2": (t2, (1,) if variant == "V0" else T2[streams:]),
        "t3": (t3, (1,) if variant in ("V0", "V1") else T3[config.family, config.dtype]),
        "tcf": (tcf, TCF if streams else (1,)),
    }
    for name, (value, allowed) in values.items():
        if value not in allowed:
            yield f"{name} = {value}: {variant} is compiled for {name} in {', '.join(map(str, allowed))}"
    if t1 > device.max_threads_per_block:
        yield f"t1 = {t1} is more than the {device.max_threads_per_block} threads of a block"
    if config.shared_bytes > device.shared_bytes_per_block:
        yield f"a tile of B of {t1} x {t2} elements takes {config.shared_bytes} bytes of shared memory, \
a block has {device.shared_bytes_per_block}"
    # Beyond this the compiler spills tiles to memory. The paper's Opt-2 does so at its own t2 = 16, t3 = 12 and 16 in
    # float64, and stays.
    limit = min(device.max_registers_per_thread, device.registers_per_sm // t1)
    if config.registers > limit and (variant, t2, t3 in (12, 16)) != ("Opt-2", T2[-1], True):
        yield f"its tiles take {config.registers} registers a thread, and a block of {t1} threads has {limit} for each"
    if problem is None:
        return
    types = {problem.dtype, problem.weights, problem.out}
    if types != {config.dtype}:
        yield f"the kernel multiplies {config.dtype}, the operands are {' and '.join(sorted(types))}"
    if problem.batch != 1:
        yield f"{variant} multiplies one pair of matrices, not {problem.batch}"
    if problem.order != "F":
        yield f"A is not column-major: {variant} reads it column by column, a row a thread"
    if launch(problem, config).grid > _GRID:
        yield f"m = {problem.m} needs more than {_GRID} blocks of {t1 * tcf} rows"


def choices(device: Device, *, variant: str | None = None, dtype: Any = None) -> tuple[Config, ...]:
    """Every configuration that can be chosen on `device`: what `why_not` lets through of all combinations.

    Parameters
    ----------
    device : Device
    variant : str, optional
    dtype : dtype or str, optional
        Only those of this variant, of this type.
    """
    variants = VARIANTS if variant is None else (variant,)
    dtypes = BYTES if dtype is None else (type_name(dtype),)
    grid = product(variants, dtypes, T1, (1, *T2), sorted({1}.union(*T3.values())), TCF)
    return tuple(config for config in (Config(*values) for values in grid) if is_valid(None, config, device))


def launch(problem: Problem, config: Config) -> LaunchShape:
    """A thread a row of C, or a thread for tcf rows: ceil(m / (t1 tcf)) blocks of t1 threads."""
    return LaunchShape(-(-problem.m // (config.t1 * config.tcf)), config.t1, config.shared_bytes)


def published(problem: Problem, variant: str) -> Config:
    """The parameters that the paper found on a V100, by exhaustive search (section 4.2.3, Tables 3 and 4).

    t1 = 128; t2 = n; t3 = 32 in float32, in float64 16 for small m and 12 for large; tcf = 1, 1, 2, 8 in float32 and
    1, 1, 1, 4 in float64 for m = 1e4, 1e5, 1e6, 1e7. The text switches t3 at m = 10240, the published program at 20480:
    here the program's value stands, because its times are the ones to compare with.
    """
    t2 = fitting(T2[1:] if variant in TSM2L else T2, problem.n)
    t3 = 32 if problem.dtype == "float32" else 16 if problem.m < 20480 else 12
    if variant == "V0":
        return Config(variant, problem.dtype, PAPER_T1)
    if variant == "V1":
        return Config(variant, problem.dtype, PAPER_T1, t2)
    if variant not in TSM2L:
        return Config(variant, problem.dtype, PAPER_T1, t2, t3)
    large = problem.m >= 10**7
    if problem.dtype == "float32":
        tcf = 8 if large else 2 if problem.m >= 10**6 else 1
    else:
        tcf = 4 if large else 1
    return Config(variant, problem.dtype, PAPER_T1, t2, t3, tcf)
