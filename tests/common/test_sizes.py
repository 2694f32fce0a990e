"""Sizes and budgets as people write them."""

from __future__ import annotations

import pytest

from holdall.common.errors import ConfigError
from holdall.common.sizes import parse_budget, parse_bytes, readable_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MB", 64_000_000),
        ("64 MiB", 64 * 2**20),
        ("4gb", 4_000_000_000),
        ("1.5k", 1500),
        ("512", 512),
        (512, 512),
        (".5GiB", 2**29),
        ("1e3MB", 10**9),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1", "4 XB", "4 G B", "0", "0.1", "many", "1,5GB", -3, True])
def test_what_is_not_a_size(text: str | int) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("budget", "size"),
    [
        (0.05, 50),
        ("0.05", 50),
        (" .05 ", 50),
        ("5e-2", 50),
        ("1e2", 100),
        ("5%", 50),
        ("1/20", 50),
        ("16B", 16),
        ("16", 16),
        (16, 16),
        ("0.5kB", 500),
        (1.0, 1000),
        ("1.0", 1000),
    ],
)
def test_budgets(budget: str | float, size: int) -> None:
    assert parse_budget(budget, 1000) == size


@pytest.mark.parametrize("budget", ["1/0", 0.0, 1.5, "1.5", -0.1, "-0.1", "0.0", "0%", "3/2", "x%", "1/y", "1/0x"])
def test_what_is_not_a_share(budget: str | float) -> None:
    with pytest.raises(ConfigError, match="share"):
        parse_budget(budget, 1000)


def test_readable() -> None:
    assert [readable_bytes(n) for n in (7, 1536, 2_160_000_000, 5.12e12)] == ["7 B", "1.5 KB", "2.2 GB", "5.1 TB"]


@pytest.mark.parametrize("size", ["1e999", "9e300GB", "10000000 TB", 10**400, 2**63])
def test_sizes_that_no_machine_has(size: str | int) -> None:
    with pytest.raises(ConfigError, match=r"is not a size: it must be below 2\^63 bytes"):
        parse_bytes(size)
