"""Settings as dataclasses: read from files, changed by name, checked.

A dataclass of settings may have parts, which are dataclasses of settings too. Every setting has one name: that of its
field, its flag on the command line and its key in files. No two parts share a name, so a setting can be given without
its part. Files may write the parts as sections: `[placement] hot_bytes = "64MB"`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar, get_type_hints

from holdall.common.decode import decode, is_of, parse_toml, shown
from holdall.common.errors import ConfigError, did_you_mean
from holdall.common.files import read_bounded

T = TypeVar("T")


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dict, with errors that name the file and the line."""
    try:
        data = read_bounded(path)
    except FileNotFoundError:
        raise ConfigError(f"no such settings file: {path}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give another file") from error
    return parse_toml(data, str(path))


def overlay(default: T, settings: Mapping[str, Any], where: str) -> T:
    """`default`, a dataclass instance, with the values of `settings`, as a file has them, in place of its own."""
    return with_settings(default, read_settings(type(default), settings, where))


def read_settings(kind: type, settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Values for the settings of a dataclass, by name, from a file; `where` goes into errors.

    Names may be written with hyphens, as on the command line. Settings of a part may be in a section of its name or
    outside it. `REMOVED` of the class names settings that no longer exist, with the one value still accepted.
    """
    parts, known, removed = parts_of(kind), sections(kind), getattr(kind, "REMOVED", {})
    entries: list[tuple[str | None, str, Any]] = []
    for written, value in settings.items():
        if not parts or not isinstance(value, Mapping):
            entries.append((None, written, value))
        elif _name(written) in parts:
            entries += [(_name(written), inner, inner_value) for inner, inner_value in value.items()]
        else:
            raise ConfigError(f"{where}: unknown section [{written}]{did_you_mean(_name(written), parts)}")
    given: dict[str, Any] = {}
    for section, written, value in entries:
        name = _name(written)
        if name in removed:
            if value != removed[name]:
                only = f"only its value {removed[name]!r} is left"
                raise ConfigError(f"{where}: setting '{written}' was removed and {only}, not {shown(value)}")
            continue
        _refuse_unknown(written, section, known, where)
        if name in given:
            raise ConfigError(f"{where}: setting '{written}' is given twice")
        part = known[name]
        hints = _hints(kind if part is None else parts[part])
        given[name] = decode(value, hints[name], where, inside=written, noun="setting ")
    return given


def _refuse_unknown(written: str, section: str | None, known: Mapping[str, str | None], where: str) -> None:
    """Raise unless a setting exists and is in its own section, or in none."""
    name = _name(written)
    if name not in known:
        allowed = [other for other, part in known.items() if section in (None, part)]
        place = "" if section is None else f" in [{section}]"
        raise ConfigError(f"{where}: unknown setting '{written}'{place}{did_you_mean(name, allowed)}")
    if section not in (None, known[name]):
        place = "before the first section" if known[name] is None else f"in [{known[name]}]"
        raise ConfigError(f"{where}: setting '{written}' does not belong in [{section}]: write it {place}")


class Settings:
    """Base of dataclasses of settings with parts."""

    def __new__(cls, **settings: Any) -> Self:
        """Refuse settings of parts, which the constructor does not take, with the way to give them."""
        own = {field.name for field in _fields(cls)}
        for name in settings:
            if name not in own and name in sections(cls):
                cure = f"write {cls.__name__}.of({name}={settings[name]!r})"
                raise ConfigError(f"{name} is a setting of the part '{sections(cls)[name]}': {cure}")
        return super().__new__(cls)

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """Settings given by name, without their parts: `TrainConfig.of(strategy="split", hot_bytes="256MB")`."""
        return with_settings(cls(), settings)

    def replace(self, **settings: Any) -> Self:
        """These settings with some changed, by name, without their parts: `config.replace(hot_bytes="1GB")`."""
        return with_settings(self, settings)

    def check_parts(self) -> None:
        """Raise if a part is not of its class, such as the `"rmc2"` of `TrainConfig(model="rmc2")`, or a value not of
        its type."""
        for name, part in parts_of(type(self)).items():
            value = getattr(self, name)
            if not isinstance(value, part):
                cure = f"write {type(self).__name__}.of({name}={value!r})"
                raise ConfigError(f"{name} takes {part.__name__}, not {value!r}: {cure}")
        check_types(self)


def with_settings(config: T, changes: Mapping[str, Any]) -> T:
    """`config`, a dataclass instance, with settings changed by name, or whole parts by theirs."""
    parts, known = parts_of(type(config)), sections(type(config))
    changed: dict[str, Any] = {}
    by_part: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        if name in parts and isinstance(value, parts[name]):
            changed[name] = value
        elif name not in known:
            raise ConfigError(f"unknown setting '{name}'{did_you_mean(name, known)}")
        elif (part := known[name]) is None:
            changed[name] = value
        else:
            by_part.setdefault(part, {})[name] = value
    for part, values in by_part.items():
        changed[part] = replace(changed.get(part, getattr(config, part)), **values)
    return replace(config, **changed)  # type: ignore[type-var]


def flat_settings(config: Any) -> dict[str, Any]:
    """Every setting by name, those of parts included."""
    return {
        name: getattr(config if part is None else getattr(config, part), name)
        for name, part in sections(type(config)).items()
    }


def sections(kind: type) -> dict[str, str | None]:
    """The part that each setting is in, by the setting's name; None for those of the dataclass itself."""
    parts = parts_of(kind)
    own: dict[str, str | None] = {field.name: None for field in _fields(kind) if field.name not in parts}
    return own | {field.name: name for name, part in parts.items() for field in _fields(part)}


def settings_marked(kind: type, mark: str) -> frozenset[str]:
    """Names of the settings whose field has `mark` in its metadata."""
    own = {field.name for field in _fields(kind) if field.metadata.get(mark)}
    return frozenset(own).union(*(settings_marked(part, mark) for part in parts_of(kind).values()))


def parts_of(kind: type) -> dict[str, type]:
    """The parts of a dataclass of settings, by name."""
    return {name: hint for name, hint in _hints(kind).items() if is_dataclass(hint) and isinstance(hint, type)}


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Types of the fields; working them out from text takes far longer than a setting does to be read."""
    return get_type_hints(kind)


def check_types(config: Any) -> None:
    """Refuse settings of another type than their field's, such as `epochs="2"`; convert paths, NumPy's numbers, and
    numbers in the place of sizes such as "16MB".

    Called by `__post_init__`, before it compares values.
    """
    kind: Any = type(config)
    hints = _hints(kind)
    for field in _fields(kind):
        value, hint = getattr(config, field.name), hints[field.name]
        if is_dataclass(value) or (is_of(value, hint) and not isinstance(value, str | list | tuple)):
            continue
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        elif getattr(value, "shape", None) == ():
            value = value.item()
        if type(value) in (int, float) and not is_of(value, hint) and is_of("", hint):
            value = str(value)
        typed = decode(value, hint, "", inside=field.name, noun="setting ")
        object.__setattr__(config, field.name, typed)


def refuse_other_types(kind: type, **options: Any) -> None:
    """Raise unless options of a call that are given, by name, are numbers of this kind."""
    for name, value in options.items():
        if value is not None:
            decode(value, kind, "", inside=name)


def refuse_below(least: int, config: Any, *names: str) -> None:
    """Raise unless each of these settings is at least `least` where it is given."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            bound = f"at least {least}" if least else "0 or more"
            raise ConfigError(f"{flag(name)} must be {bound}, not {value}")


def flag(name: str) -> str:
    """A setting as the command line writes it: `--hot-bytes`."""
    return f"--{name.replace('_', '-')}"


def name_and_value(pair: str, flag: str) -> tuple[str, str]:
    """`name=value`, as options such as --setting take it."""
    name, equals, value = pair.partition("=")
    if not equals:
        raise ConfigError(f"{flag} takes name=value, not {pair!r}")
    return name.replace("-", "_"), value


def plain_value(text: str) -> int | float | bool | str:
    """The value of such a pair: a number or a bool where the text is one, else the text."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _name(written: str) -> str:
    return written.replace("-", "_")


def _fields(kind: Any) -> tuple[Field[Any], ...]:
    return fields(kind)
