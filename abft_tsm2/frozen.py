"""Frozen plain data that converts what it is given, and is written as JSON: what a report is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from functools import cache
from operator import index
from typing import Any, ClassVar, Self


class Record:
    """Frozen plain data, equal when the JSON is: a NaN in it equals itself, also after a round trip.

    The annotation of a field says how its value is converted, from NumPy scalars and from JSON alike.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __post_init__(self) -> None:
        for part in fields(self):
            value = CONVERTERS[str(part.type)](getattr(self, part.name))
            choices = part.metadata.get("choices", (value,))
            if value not in choices:
                raise ValueError(f"unknown {part.name} {value!r}: choose one of {', '.join(choices)}")
            object.__setattr__(self, part.name, value)

    @classmethod
    def made_of(cls, **values: Any) -> Self:
        """A record of values that need no conversion: much faster than converting them."""
        kind: Any = cls
        record = cls.__new__(cls)
        parts = record.__dict__
        parts.update(_defaults(kind))
        parts.update(values)
        return record

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON types (non-finite floats as "NaN", "Infinity", "-Infinity")."""
        return {part.name: _plain(getattr(self, part.name)) for part in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build the record that `to_dict` gave, also through JSON; ValueError if a field is missing."""
        needed = [part.name for part in fields(cls) if not part.metadata.get("optional")]
        if missing := [name for name in needed if name not in data]:
            raise ValueError(f"not a {cls.__name__}: {', '.join(missing)} missing; see Report.schema()")
        return cls(**{part.name: data[part.name] for part in fields(cls) if part.name in data})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record) or type(self) is not type(other):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # as a report holds a dict


def each(convert: Callable[[Any], Any]) -> Callable[[Iterable[Any]], tuple[Any, ...]]:
    """The conversion of all items of a tuple."""
    return lambda values: tuple(map(convert, values))


CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "str": str,
    "int": index,  # refuses 1.5, and makes a bool the number that JSON has to show
    "float": float,
    "tuple[int, ...]": each(index),
    "tuple[str, ...]": each(str),
    # A plain dict, not a mapping proxy, because a report has to be picklable.
    "Mapping[str, float]": lambda steps: {str(step): float(time) for step, time in steps.items()},
}
"""Of values, by the text of the annotation; those that define records add theirs."""


@cache
def _defaults(kind: Any) -> dict[str, Any]:
    """Of the fields that have one."""
    found = {part.name: part.default for part in fields(kind) if part.default is not MISSING}
    factories = {part.name: part.default_factory for part in fields(kind)}
    return found | {name: made() for name, made in factories.items() if made is not MISSING}


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
