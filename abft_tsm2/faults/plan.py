"""Fault plans: what goes wrong, where, when and how often; frozen, seeded, and the same after JSON."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from abft_tsm2.arrays import FLOATS
from abft_tsm2.record import Record

MODELS: Mapping[str, str] = {
    "bit_flip": "one bit of each of `count` elements",
    "multi_bit": "`count` different bits of one element",
    "stuck_at_0": "one bit of each of `count` elements is 0, whatever is written there",
    "stuck_at_1": "one bit of each of `count` elements is 1, whatever is written there",
    "random_value": "`count` elements hold any finite number, every bit pattern being equally likely",
    "scaled": "`count` elements times `factor`",
    "offset": "`count` elements and `factor` root mean squares of the array, of either sign",
    "nan": "`count` elements are NaN",
    "inf": "`count` elements are infinite, of either sign",
    "wrong_carry": "a carry too many into one bit of each of `count` elements, which runs on as carries do",
    "missing_carry": "a carry too few into one bit of each of `count` elements",
    "production": "one of bit_flip, wrong_carry, missing_carry and both, as often as in `PRODUCTION`",
    "row": "a whole row times `factor`",
    "column": "a whole column times `factor`",
    "tile": "a tile of 64 x 64 elements times `factor`",
    "warp": "every 32nd element of a row times `factor`: one lane of a warp",
    "swap_elements": "two elements of a row, or of a column, change places",
    "swap_rows": "two rows change places",
    "swap_columns": "two columns change places",
    "cycle_elements": "three elements of a row, or of a column, each go to the place of the next",
    "cycle_rows": "three rows each go to the place of the next",
    "cycle_columns": "three columns each go to the place of the next",
    "opposite": "+d and -d in two elements of a row, or of a column; d is `factor` root mean squares",
    "rectangle": "+d, -d, -d and +d in the corners of a rectangle: the sums of its rows and columns stay",
    "wrong_index": "`count` entries of an array of row numbers are others that might stand there",
    "not_exchanged": "rows of some columns stay where they were before they were exchanged",
}
"""The fault models, and what each does."""

ELEMENTS = frozenset(
    (
        *("bit_flip", "stuck_at_0", "stuck_at_1", "random_value", "scaled", "offset"),
        *("nan", "inf", "wrong_carry", "missing_carry"),
    )
)
"""The models that change `count` elements; "multi_bit" always changes one."""

PRODUCTION: Mapping[str, float] = {"bit_flip": 0.468, "wrong_carry": 0.251, "missing_carry": 0.241, "compound": 0.040}
"""What wrong results of a processor's arithmetic looked like in production, as shares; "compound" is two at once."""

CLASSES = (
    *("any", "sign", "exponent", "exponent_high", "exponent_low"),
    *("mantissa", "mantissa_high", "mantissa_low"),
)
"""The classes of bits; a plan may name a single bit by its number instead, 0 being the lowest."""


@dataclass(frozen=True, eq=False)
class Plan(Record):
    """One fault.

    Parameters
    ----------
    model : str
        A key of `MODELS`.
    site : str
        Where: a key of `abft_tsm2.faults.sites.SITES`.
    bits : str
        For models of bits: one of `CLASSES`, or the number of a bit as text.
    count : int
        How many elements, or bits.
    factor : float
        For models that scale or add; 0 leaves zeros.
    persistent : bool
        Whether it comes back each time the site is reached: a memory cell that is stuck, a core that is broken. For
        operands: whether it stays in memory, or is there only while the product is computed.
    visit : int
        Which visit of the site is hit, the first being 0: the step of a factorisation, or the call of a function.
    seed : tuple of int
        Of every random choice: which elements, which bits, which sign.

    Raises
    ------
    ValueError
        For an unknown model or class of bits, or a count or visit that makes no sense.

    Examples
    --------
    >>> from abft_tsm2.faults import Plan
    >>> plan = Plan("bit_flip", bits="exponent", seed=(1, 17))
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    model: str
    site: str = field(default="product", metadata={"optional": True})
    bits: str = field(default="any", metadata={"optional": True})
    count: int = field(default=1, metadata={"optional": True})
    factor: float = field(default=2.0, metadata={"optional": True})
    persistent: bool = field(default=False, metadata={"optional": True})
    visit: int = field(default=0, metadata={"optional": True})
    seed: tuple[int, ...] = field(default=(0,), metadata={"optional": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        require_known("fault model", self.model, MODELS)
        if not self.bits.isdecimal():
            require_known("class of bits", self.bits, CLASSES)
        if self.count < 1 or self.visit < 0:
            raise ValueError(f"count = {self.count}, visit = {self.visit}: count is 1 at least, visit 0")

    @property
    def single(self) -> bool:
        """Whether it changes one element only."""
        return self.model == "multi_bit" or (self.model in ELEMENTS and self.count == 1)

    def rng(self) -> np.random.Generator:
        """The generator of this fault's choices; the same ones each time."""
        return np.random.default_rng([*self.seed, 0xFA])

    def to_json(self) -> str:
        """Return the plan as strict JSON."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Build the plan that `to_json` gave."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Build a plan; ValueError for a name that no plan has."""
        for name in data:
            require_known("entry of a fault", name, cls.__dataclass_fields__)
        return super().from_dict(data)


def require_known(what: str, name: str, known: Any) -> None:
    """ValueError, with the nearest known names, for a name that is not among them."""
    if name not in known:
        nearest = difflib.get_close_matches(name, list(known), 1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"choose from {', '.join(map(repr, known))}"
        raise ValueError(f"unknown {what} {name!r}: {hint}")


def bits_of(bits: str, dtype: str) -> range:
    """The numbers of the bits of a class, in words of a floating-point type.

    Raises
    ------
    ValueError
        For the number of a bit that the type does not have.

    Examples
    --------
    >>> bits_of("exponent", "float32"), bits_of("sign", "float16")
    (range(23, 31), range(15, 16))
    """
    kind = FLOATS[dtype]
    top, mantissa = kind.bits - 1, kind.precision - 1
    if bits.isdecimal():
        if int(bits) > top:
            raise ValueError(f"{dtype} has no bit {bits}: its bits are 0 to {top}")
        return range(int(bits), int(bits) + 1)
    exponent = (mantissa + top + 1) // 2
    return {
        "any": range(top + 1),
        "sign": range(top, top + 1),
        "exponent": range(mantissa, top),
        "exponent_high": range(exponent, top),
        "exponent_low": range(mantissa, exponent),
        "mantissa": range(mantissa),
        "mantissa_high": range(mantissa // 2, mantissa),
        "mantissa_low": range(mantissa // 2),
    }[bits]
