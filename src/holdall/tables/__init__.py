"""Every way to store one embedding table, one file per method."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from holdall.errors import ConfigError, suggest
from holdall.tables.dense import Dense
from holdall.tables.method import Method, TableOptions
from holdall.tables.table import Table

METHODS: dict[str, type[Method]] = {method.name: method for method in (Dense,)}
"""Every method by its name in JSON and on the command line."""


def method_from_json(document: dict[str, Any]) -> Method:
    """The method that `Method.to_json` described; unknown names and settings are refused."""
    settings = dict(document)
    name = settings.pop("method", None)
    if name not in METHODS:
        raise ConfigError(f"unknown table method {name!r}{suggest(str(name), METHODS)}")
    known = {field.name for field in fields(METHODS[name])}
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(f"{name} has no setting '{key}'{suggest(key, known)}")
        if isinstance(value, dict):
            settings[key] = method_from_json(value)
        elif isinstance(value, list):
            settings[key] = tuple(value)
    try:
        return METHODS[name](**settings)
    except TypeError as error:
        raise ConfigError(f"{name} cannot be built from {settings}: {error}") from None


__all__ = ["METHODS", "Dense", "Method", "Table", "TableOptions", "method_from_json"]
