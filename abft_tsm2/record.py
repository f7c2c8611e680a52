"""Frozen plain data, with JSON: what reports and plans of faults are made of."""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from functools import cache
from operator import index
from typing import Any, ClassVar, Self

_SHOWN = 4  # items of a tuple, in a repr


class Record:
    """Frozen plain data, equal when the JSON is: a NaN in it equals itself, also after a round trip.

    The annotation of a field says how its value is converted, from NumPy scalars and from JSON alike.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __post_init__(self) -> None:
        for part in fields(self):
            value = _converted(getattr(self, part.name), part, type(self).__name__)
            least = part.metadata.get("least", 0)
            if part.type == "int" and value < least:
                raise ValueError(f"{part.name} = {value} of a {type(self).__name__}: at least {least} is expected")
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

    def like(self, **values: Any) -> Self:
        """A record with these values, and the others of this one, as `made_of`."""
        record = type(self).__new__(type(self))
        parts = record.__dict__
        parts.update(self.__dict__)
        parts.update(values)
        return record

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON types (non-finite floats as "NaN", "Infinity", "-Infinity")."""
        return {part.name: _plain(getattr(self, part.name)) for part in fields(self) if part.metadata.get("json", True)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build the record that `to_dict` gave, also through JSON; ValueError for anything else."""
        if not isinstance(data, Mapping):
            raise ValueError(f"not a {cls.__name__}, which is a mapping of names to values, but {short(data)}")
        needed = [part.name for part in fields(cls) if not part.metadata.get("optional")]
        if missing := [name for name in needed if name not in data]:
            raise ValueError(f"not a {cls.__name__}: {', '.join(missing)} missing; see Report.schema()")
        try:
            return cls(**{part.name: data[part.name] for part in fields(cls) if part.name in data})
        except TypeError as error:
            raise ValueError(str(error)) from error

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record) or type(self) is not type(other):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # as a report holds a dict

    def __repr__(self) -> str:
        """What is not as usual; long tuples are cut."""
        kind: Any = type(self)
        usual = _defaults(kind)
        values = {part.name: getattr(self, part.name) for part in fields(self) if part.repr}
        shown = [
            f"{name}={_brief(x)}"
            for name, x in values.items()
            if name not in usual or not (x is usual[name] or x == usual[name])
        ]
        return f"{kind.__name__}({', '.join(shown)})"


def each(convert: Callable[[Any], Any]) -> Callable[[Iterable[Any]], tuple[Any, ...]]:
    """The conversion of all items of a tuple."""

    def converted(values: Iterable[Any]) -> tuple[Any, ...]:
        if isinstance(values, str | bytes | Mapping):  # what they iterate over is not what was meant
            raise TypeError("a sequence is expected")
        return tuple(map(convert, values))

    return converted


def text_of(value: Any) -> str:
    """A name or a sentence, also a dtype; of JSON's other types, none."""
    if value is None or isinstance(value, int | float | list | tuple | Mapping):
        raise TypeError("a text is expected")
    return str(value)


def number_of(value: Any) -> float:
    """A float: also those that are not finite, which JSON has as texts."""
    if isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity"):
        raise TypeError("a number is expected")
    return float(value)


def _numbers(steps: Any) -> dict[str, float]:
    if not isinstance(steps, Mapping):
        raise TypeError("a mapping of names to numbers is expected")
    return {text_of(step): number_of(time) for step, time in steps.items()}


def _converted(value: Any, part: Any, record: str) -> Any:
    """`value` as the annotation of a field has it; TypeError or ValueError that names the field."""
    try:
        return CONVERTERS[str(part.type)](value)
    except (TypeError, ValueError, OverflowError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{record}.{part.name} is {short(value)}: {error}") from error


def short(value: Any) -> str:
    text = reprlib.repr(value)
    return text if len(text) < 80 else f"a {type(value).__name__}"


CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "str": text_of,
    "int": index,  # refuses 1.5, and makes a bool the number that JSON has to show
    "float": number_of,
    "bool": bool,
    "tuple[int, ...]": each(index),
    "tuple[str, ...]": each(text_of),
    "Mapping[str, float]": _numbers,  # a plain dict, not a mapping proxy, because a report has to be picklable
}
"""Of values, by the text of the annotation; those that define records add theirs."""


@cache
def _defaults(kind: Any) -> dict[str, Any]:
    """Of the fields that have one."""
    found = {part.name: part.default for part in fields(kind) if part.default is not MISSING}
    factories = {part.name: part.default_factory for part in fields(kind)}
    return found | {name: made() for name, made in factories.items() if made is not MISSING}


os.register_at_fork(after_in_child=_defaults.cache_clear)  # device and host are among them


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


def _brief(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value)
    if not isinstance(value, tuple):
        return repr(value)
    if value and hasattr(value[0], "SCHEMA"):  # what has a file of its own
        return f"<{len(value)} {type(value[0]).__name__.lower()}s>"
    shown = [_brief(item) for item in value[:_SHOWN]]
    if len(value) > len(shown):
        shown.append(f"... {len(value)} in all")
    return f"({', '.join(shown)}{',' if len(value) == 1 else ''})"
