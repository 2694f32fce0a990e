"""Settings of `profile`. Reads no other package: `--help` needs the settings alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdall.common.errors import ConfigError
from holdall.common.settings import check_types
from holdall.data.layout import MAX_VALUE_BYTES
from holdall.data.prepare_config import PrepareConfig


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Settings of a profile: the rows to count, and the share of them to read."""

    sample: float | None = None
    """Share of the rows to read, in blocks drawn at random, such as 0.05; curves then come with 95% intervals."""
    windows: int = 8
    """Windows of the log whose hot sets are compared for drift."""
    order: Literal["auto", "time", "none"] = "auto"
    """Whether rows are in the order of time: auto: known for the public data sets, assumed for other files."""
    split: Literal["train", "valid", "test"] = "train"
    """Split of a prepared set to profile."""
    seed: int = 0
    """Seed of the sample, and for raw files of the split."""
    format: Literal["criteo", "table", "avazu", "taobao", "yelp", "movielens", "bookcrossing"] | None = None
    """Raw files: their layout, as for prepare; criteo by default."""
    schema: Path | None = None
    """Raw files: TOML file that describes the columns, for --format table."""
    valid: float | None = None
    """Raw files: fraction of the rows that prepare would put into the valid split, and that is not counted."""
    test: float = 0.1
    """Raw files: likewise for the test split."""
    test_from_last_file: bool = False
    """Raw files: leave the last file out, which is the test split."""
    max_length: int = 20
    """Raw files, taobao and yelp: longest history of a user in a row."""
    positive: str | None = None
    """Raw files, bookcrossing: ratings that count as label 1."""
    max_value_bytes: int = MAX_VALUE_BYTES
    """Raw files: bytes of the longest categorical value, as in `prepare`."""
    bad_rows: Literal["stop", "skip"] | None = None
    """Raw files: stop at a row that cannot be read, or skip it."""
    counters: int = 1 << 16
    """Raw files: ids of a feature counted one by one; counts are wrong by at most lookups / (counters + 1)."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.sample is not None and not 0 < self.sample <= 1:
            raise ConfigError(f"sample is {self.sample}, but must be above 0 and at most 1, such as 0.05")
        for name in ("windows", "counters"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be 1 or more")

    def prepare_config(self) -> PrepareConfig:
        """Options for reading raw files."""
        return PrepareConfig(
            format=self.format or "criteo", schema=self.schema, valid=self.valid, test=self.test, seed=self.seed,
            test_from_last_file=self.test_from_last_file, max_length=self.max_length, positive=self.positive,
            bad_rows=self.bad_rows, max_value_bytes=self.max_value_bytes,
        )  # fmt: skip
