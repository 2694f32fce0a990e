"""Settings from a file laid over a dataclass: unknown names and wrong types are refused, with the nearest name."""

from __future__ import annotations

import tomllib
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from holdall.common.errors import ConfigError, did_you_mean

T = TypeVar("T")


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dict, with errors that name the file and the line."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"no such settings file: {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def overlay(default: T, settings: Mapping[str, Any], where: str) -> T:
    """`default`, a dataclass instance, with the values of `settings` in place of its own; `where` goes into errors.

    Names may be written with hyphens, as on the command line.
    """
    assert is_dataclass(default)
    hints = get_type_hints(type(default))
    known = {field.name for field in fields(default)}
    given = {}
    for written, value in settings.items():
        name = written.replace("-", "_")
        if name not in known:
            raise ConfigError(f"{where}: unknown setting '{written}'{did_you_mean(name, known)}")
        given[name] = _converted(value, hints[name], f"{where}: setting '{written}'")
    return replace(default, **given)  # type: ignore[type-var, return-value]


def name_and_value(pair: str, flag: str) -> tuple[str, str]:
    """`name=value`, as options such as --setting take it."""
    name, equals, value = pair.partition("=")
    if not equals:
        raise ConfigError(f"{flag} takes name=value, not {pair!r}")
    return name.replace("-", "_"), value


def plain_value(text: str) -> int | float | bool | str:
    """Such a value: a number or true/false where it reads as one."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _converted(value: Any, kind: Any, where: str) -> Any:
    """`value` as the annotated type takes it, or a ConfigError."""
    for option in _options(kind):
        if get_origin(option) is Literal:
            if value in get_args(option):
                return value
        elif get_origin(option) is tuple and isinstance(value, list | tuple):
            return tuple(_converted(item, get_args(option)[0], where) for item in value)
        elif option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        elif option is Path and isinstance(value, str):
            return Path(value)
        elif value is None and option is types.NoneType:
            return None
        elif isinstance(option, type) and type(value) is option:
            return value
    expected = " or ".join(_described(option) for option in _options(kind) if option is not types.NoneType)
    raise ConfigError(f"{where} must be {expected}, not {value!r}")


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _described(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(repr(value) for value in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list of {_described(get_args(kind)[0])}"
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", Path: "a path"}
    return names.get(kind, str(kind))
