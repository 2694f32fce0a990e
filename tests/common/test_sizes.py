"""Sizes and budgets as people write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdall import compress, demo, release, suggest
from holdall.common.errors import ConfigError
from holdall.common.sizes import parse_budget, parse_bytes, readable_bytes
from holdall.planning.config import PlanConfig
from holdall.planning.table_settings import TableSettings


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


@pytest.mark.parametrize("budget", ["1/0", "0/5", "-5%", "nan", float("nan"), "101%", "3/2", 20.0, "inf%", "-1", 0])
def test_budgets_are_refused_before_anything_is_read(budget: str | float, tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"t": torch.nn.Embedding(100, 4)})
    refused: list[Callable[[Any], object]] = [
        lambda given: TableSettings(budget=str(given)),
        lambda given: PlanConfig.of(budget=str(given)),
        lambda given: release(tmp_path / "no run", tmp_path / "bundle", budget=given),
        lambda given: demo(tmp_path / "demo", budget=str(given)),
        lambda given: suggest({"t": 100}, 4, given),
        lambda given: compress(model, given),
        lambda given: compress(model, given, fit=True),
    ]
    for call in refused:
        with pytest.raises(ConfigError, match=r"is not a (share|size)"):
            call(budget)
    assert not list(tmp_path.iterdir())
    assert type(model["t"]) is torch.nn.Embedding


def test_one_share_in_three_writings_is_one_budget() -> None:
    chosen = [suggest({"t": 50_000}, 16, share, "hashed") for share in (0.05, "0.05", "5%", "1/20")]
    assert all(methods == chosen[0] for methods in chosen)
    rows = {"t": 50_000, "u": 300}
    by_settings = [TableSettings(method="robe", budget=share).methods(rows, 16) for share in ("0.05", "5%", "1/20")]
    assert by_settings[0] == by_settings[1] == by_settings[2]


def test_readable() -> None:
    assert [readable_bytes(n) for n in (7, 1536, 2_160_000_000, 5.12e12)] == ["7 B", "1.5 KB", "2.2 GB", "5.1 TB"]


@pytest.mark.parametrize("size", ["1e999", "9e300GB", "10000000 TB", 10**400, 2**63])
def test_sizes_that_no_machine_has(size: str | int) -> None:
    with pytest.raises(ConfigError, match=r"is not a size: it must be below 2\^63 bytes"):
        parse_bytes(size)
