"""Decoder of JSON and TOML by type hints: one place that decides what a document may hold.

    decode(parse_json(data, "schema.json"), Schema, "schema.json")

A dataclass takes an object with its fields and refuses unknown ones, unless its class says `ignores_unknown = True`;
a `TypedDict` keeps them. Fields with `metadata=NOT_STORED` are not part of the document. The other types are `list[T]`,
`tuple[T, ...]`, `dict[str, T]`, `Literal`, unions, `Any`, `str`, `bool`, `Path`, `int` (no bools, no floats, at most 64
bits) and `float` (ints too; finite). `Annotated` bounds a number from below (`Count`). An error is one sentence with
the file, the place inside it (`tables[3].rows`), what is there, what is expected and the cure.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from holdall.common.errors import ConfigError, DataError, HoldallError, did_you_mean

T = TypeVar("T")

MAX_DEPTH = 64
"""Levels of lists and objects below a field of type `Any`; Holdall writes at most 8."""
MAX_SHOWN = 60
"""Characters of a value that an error shows."""
NOT_STORED = {"stored": False}

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class AtLeast:
    """Lowest value of a number, in `Annotated`; -inf allows what is not finite, too."""

    least: float


Count = Annotated[int, AtLeast(0)]
PositiveInt = Annotated[int, AtLeast(1)]
NonNegativeFloat = Annotated[float, AtLeast(0)]
AnyFloat = Annotated[float, AtLeast(-math.inf)]


class _DecodeError(Exception):
    """Value that its type does not take. `steps` lead to it; the sentence is `before`, the place, `after`."""

    def __init__(self, after: str, before: str = ""):
        self.before, self.after = before, after
        self.steps: list[str] = []


def parse_json(data: bytes, where: str, *, error: type[HoldallError] = DataError, cure: str = "") -> Any:
    """The value of a JSON text. Duplicate keys, lone surrogates and what Python cannot hold are refused."""
    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=_without_duplicates)
        if _SURROGATE.search(data):
            json.dumps(document, ensure_ascii=False).encode("utf-8")
        return document
    except UnicodeEncodeError:
        reason = "a string has half of a surrogate pair"
    except RecursionError:
        reason = "its lists and objects are nested too deeply"
    except ValueError as cause:
        reason = str(cause)
    raise error(f"{where} cannot be read as JSON ({reason}){_cure(cure)}")


def parse_toml(data: bytes, where: str) -> dict[str, Any]:
    """The tables of a TOML text. Keys of many parts, whose cost grows with the square of their number, are refused."""
    try:
        text = data.decode("utf-8")
        for number, line in enumerate(text.split("\n"), start=1):
            if line.partition("=")[0].count(".") > MAX_DEPTH:
                raise ValueError(f"line {number} has a key of more than {MAX_DEPTH} parts")
        return tomllib.loads(text)
    except RecursionError:
        reason = "its lists and tables are nested too deeply"
    except ValueError as cause:
        reason = str(cause)
    raise ConfigError(f"{where} cannot be read as TOML ({reason}): mend that place")


def decode(
    value: Any,
    kind: type[T],
    where: str,
    *,
    inside: str = "",
    noun: str = "",
    error: type[HoldallError] = ConfigError,
    cure: str = "",
) -> T:
    """`value`, as a parser of JSON or TOML gives it, as a `kind`.

    Errors are of class `error`, and name the document `where`, the place below `inside` in it (after `noun`, if any),
    and the `cure`.
    """
    try:
        return _converted(value, kind)
    except _DecodeError as wrong:
        steps = [inside, *wrong.steps] if inside else wrong.steps
        place = "".join(step if step.startswith("[") else f".{step}" for step in steps).removeprefix(".")
        what = f": {noun}{wrong.before}'{place}'{wrong.after}" if place else wrong.after
    raise error(f"{where}{what}{_cure(cure)}".removeprefix(": "))


def is_of(value: Any, kind: Any) -> bool:
    """Whether a value is one that a type takes as it is; what a list holds is not looked at."""
    return any(_is_like(value, option) for option in _options(kind))


def shown(value: Any) -> str:
    """A value for an error, in a few words at most, whatever its size and depth."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, int) and value.bit_length() > 64:
        return "a number of more than 64 bits"
    if value is None:
        return "null"
    text = repr(value[:MAX_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= MAX_SHOWN and len(str(value)) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(f"an object has the key {shown(twice)} twice")
    return found


def _converted(value: Any, kind: Any) -> Any:
    """`value` as the first of the types of `kind` that take values like it."""
    options = _options(kind)
    for option in options:
        if _is_like(value, option):
            return _as(value, option)
    expected = " or ".join(_described(option) for option in options if option is not types.NoneType)
    names = [name for option in options if get_origin(option) is Literal for name in get_args(option)]
    hint = did_you_mean(value[:MAX_SHOWN], names) if isinstance(value, str) and names else ""
    raise _DecodeError(f" must be {expected}, not {shown(value)}{hint if 'did you mean' in hint else ''}")


@cache
def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _is_like(value: Any, kind: Any) -> bool:
    """Whether a value has the outer form of a type; what it holds is not looked at, except for literals."""
    origin = get_origin(kind) or kind
    if origin is Annotated:
        return _is_like(value, get_args(kind)[0])
    if origin is Literal:
        return any(type(value) is type(known) and value == known for known in get_args(kind))
    if origin is float:
        return type(value) in (int, float)
    if origin in (list, tuple):
        return isinstance(value, list | tuple)
    if origin is dict or is_typeddict(origin):
        return isinstance(value, Mapping)
    if is_dataclass(origin):
        return isinstance(value, Mapping | origin)
    if origin is Path:
        return isinstance(value, str)
    return origin is Any or type(value) is origin


def _as(value: Any, kind: Any) -> Any:
    """A value that is like a type as that type."""
    origin = get_origin(kind) or kind
    if origin is Annotated:
        return _bounded(value, kind)
    if origin in (int, float):
        return _number(value, origin)
    if origin is Any:
        return _shallow(value)
    if origin in (list, tuple):
        return _sequence(value, origin, get_args(kind))
    if origin is dict:
        return {name: _at(_step(name), item, get_args(kind)[1]) for name, item in value.items()}
    if is_dataclass(origin):
        return _instance(value, origin) if isinstance(value, Mapping) else value
    if is_typeddict(origin):
        return {**_shallow(value), **_fields(value, *_hints(origin))}
    return Path(value) if origin is Path else value


def _bounded(value: Any, kind: Any) -> Any:
    base, bound = get_args(kind)
    number = _number(value, base, finite=bound.least > -math.inf)
    if number < bound.least:
        raise _DecodeError(f" must be {_described(kind)}, not {shown(value)}")
    return number


def _number(value: int | float, kind: type, *, finite: bool = True) -> int | float:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise _DecodeError(f" must be a number of at most 64 bits, not {shown(value)}")
    if finite and not math.isfinite(value):
        raise _DecodeError(f" must be a finite number, not {value}")
    return kind(value)


def _sequence(value: Any, origin: type, kinds: tuple[Any, ...]) -> Any:
    if origin is tuple and kinds[-1] is not Ellipsis:
        if len(value) != len(kinds):
            raise _DecodeError(f" must be a list of {len(kinds)} values, not of {len(value)}")
        return tuple(_at(f"[{place}]", item, kind) for place, (item, kind) in enumerate(zip(value, kinds, strict=True)))
    return origin(_at(f"[{place}]", item, kinds[0]) for place, item in enumerate(value))


def _instance(value: Mapping[str, Any], kind: Any) -> Any:
    """A dataclass; what its `__post_init__` refuses is an error of this place."""
    hints, required = _hints(kind)
    if not getattr(kind, "ignores_unknown", False):
        for name in value:
            if name not in hints:
                wrong = _DecodeError(did_you_mean(name[:MAX_SHOWN], hints), before="unknown field ")
                wrong.steps = [_step(name)]
                raise wrong
    given = _fields(value, hints, required)
    try:
        return kind(**given)
    except HoldallError as refused:
        raise _DecodeError(f": {refused}") from refused


@cache
def _hints(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Types of the fields that a document may have, by name, and the names that it must have."""
    hints = get_type_hints(kind, include_extras=True)
    if is_dataclass(kind):
        stored = [field for field in fields(kind) if field.metadata.get("stored", True)]
        required = {f.name for f in stored if f.default is MISSING and f.default_factory is MISSING}
        return {field.name: hints[field.name] for field in stored}, frozenset(required)
    optional = {name: get_args(hint)[0] for name, hint in hints.items() if get_origin(hint) is NotRequired}
    return {**hints, **optional}, frozenset(set(hints) - set(optional))


def _fields(value: Mapping[str, Any], hints: Mapping[str, Any], required: frozenset[str]) -> dict[str, Any]:
    for name in hints:
        if name in required and name not in value:
            wrong = _DecodeError(" is missing")
            wrong.steps = [name]
            raise wrong
    return {name: _at(name, value[name], kind) for name, kind in hints.items() if name in value}


def _at(step: str, value: Any, kind: Any) -> Any:
    try:
        return _converted(value, kind)
    except _DecodeError as wrong:
        wrong.steps.insert(0, step)
        raise


def _shallow(value: Any) -> Any:
    """Refuse a value of any type that is nested more deeply than code which walks through it can go."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for holder in level
            if isinstance(holder, Mapping | list)
            for item in (holder.values() if isinstance(holder, Mapping) else holder)
            if isinstance(item, Mapping | list)
        ]
        if not level:
            return value
    raise _DecodeError(f" is nested more than {MAX_DEPTH} levels deep")


def _described(kind: Any) -> str:
    origin = get_origin(kind) or kind
    if origin is Annotated:
        base, bound = get_args(kind)
        return _described(base) + (f" of at least {bound.least}" if bound.least > -math.inf else "")
    if origin is Literal:
        return " or ".join(repr(value) for value in get_args(kind))
    if origin in (list, tuple):
        return "a list"
    if origin is dict or is_dataclass(origin) or is_typeddict(origin):
        return "an object"
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", Path: "a path"}
    return names.get(origin, str(kind))


def _step(name: str) -> str:
    """A key as a step of a place: bare if it is a plain word, else quoted and cut."""
    return name if re.fullmatch(r"[\w-]{1,60}", name) else f"[{shown(name)}]"


def _cure(cure: str) -> str:
    return f": {cure}" if cure else ""
