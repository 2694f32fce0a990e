"""Parsing and formatting of sizes: `64MB`, `1.5 GiB`, `5%`, `1/20`."""

from __future__ import annotations

import re

from holdall.common.decode import shown
from holdall.common.errors import ConfigError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power

_DECIMAL = re.compile(r"[+-]?(?:[0-9]*\.[0-9]+|[0-9]*\.?[0-9]+e-[0-9]+)")
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str | int | float) -> int:
    """`64MB` -> 64,000,000; `64MiB` -> 67,108,864. Case and spaces do not matter."""
    size: float
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        match = _SIZE.fullmatch(str(text))
        if match is None or match.group(2).upper() not in _UNITS:
            raise ConfigError(f"{text!r} is not a size: write a number and a unit, such as 64MB, 1.5GB or 512MiB")
        size = float(match.group(1)) * _UNITS[match.group(2).upper()]
    if not size >= 1:
        raise ConfigError(f"{text!r} is not a size: it must be at least one byte")
    if size >= 2**63:
        raise ConfigError(f"{shown(text)} is not a size: it must be below 2^63 bytes")
    return int(size)


def parse_budget(budget: str | int | float, whole: int) -> int:
    """Bytes of a budget that is a size (`16MB`, 16_000_000) or a share of `whole` (0.05, `0.05`, `5%`, `1/20`)."""
    share = parse_share(budget)
    return parse_bytes(budget) if share is None else int(whole * share)


def check_budget(budget: str | int | float | None) -> None:
    """Raise a `ConfigError` for a budget that is neither a size nor a share; None is no budget."""
    if budget is not None:
        parse_budget(budget, 1 << 40)


def parse_share(text: str | int | float) -> float | None:
    """A share above 0 and at most 1 (0.05, `0.05`, `5%`, `1/20`); None for a whole number, or one with a unit."""
    written = str(text).strip()
    if isinstance(text, float) or _DECIMAL.fullmatch(written):
        share = float(text)
    elif written.endswith("%"):
        share = _number(written[:-1], written) / 100
    elif "/" in written:
        above, _, below = written.partition("/")
        parts = _number(below, written)
        share = _number(above, written) / parts if parts else 0.0
    else:
        return None
    if not 0 < share <= 1:
        raise ConfigError(f"a budget of {text!r} is not a share: it must be above 0 and at most 1")
    return share


def readable_bytes(count: float) -> str:
    """1,536 -> `1.5 KB`: powers of 1,000, as budgets are given."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{whole!r} is not a share: write it as 0.05, 5% or 1/20") from None
