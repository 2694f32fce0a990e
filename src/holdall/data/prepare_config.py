"""Settings of `prepare`. Reads no other package: `--help` needs the settings alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdall.common.errors import ConfigError
from holdall.common.settings import check_types
from holdall.data.layout import MAX_VALUE_BYTES

IMPLICIT = ("movielens", "taobao", "yelp")
"""Formats of implicit data, of which events of users are held out, not a fraction of rows."""

LEAST = {"rare_below": 1, "rows_per_file": 1, "candidates": 1, "max_length": 1, "max_value_bytes": 1, "negatives": 0}
"""The least value of each size among the settings."""


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Settings for preparing raw files as a data set."""

    format: Literal["criteo", "table", "avazu", "taobao", "yelp", "movielens", "bookcrossing", "libsvm"] = "criteo"
    """Layout of the raw files: a public data set (docs/your-data.md), table (CSV, Parquet or JSON lines, see schema),
    or libsvm (libSVM and libFM text)."""
    schema: Path | None = None
    """TOML file that describes the columns, for --format table (sample: configs/table-example.toml) and libsvm."""
    rare_below: int = 1
    """Values seen fewer times than this in training share the unseen row."""
    valid: float | None = None
    """Fraction of the rows for the valid split, by a hash; of the users (an event each) for movielens, taobao, yelp.
    When absent: 1 for movielens (leave-one-out: an event of every user for valid, one for test), else 0."""
    test: float = 0.1
    """Fraction of the rows for the test split, by a hash; not used where the last file or users' last events are it."""
    split: Literal["random", "time"] = "random"
    """Choice of the valid and test rows: random, or the newest ones (avazu, and tables whose schema names a time)."""
    test_from_last_file: bool = False
    """Take the last source file as the test split, as for files in time order."""
    negatives: int = 4
    """Movielens, taobao, yelp: rows with label 0 after each held-out event; training draws its own every epoch."""
    candidates: int = 99
    """Movielens, taobao, yelp: items that each held-out event is ranked against, where no file gives them."""
    max_length: int = 20
    """Taobao, yelp: longest history of a user in a row."""
    positive: str | None = None
    """Bookcrossing: ratings that count as label 1, such as ">= 7"; "> 0" by default."""
    seed: int = 0
    """Seed of the split and of the negatives."""
    dense: Literal["log", "standard", "none"] = "log"
    """Stored value of a number x: log(max(x, 0) + 1), (x - mean) / std of the training rows, or x; 0 if missing."""
    max_value_bytes: int = MAX_VALUE_BYTES
    """Bytes of the longest categorical value; a row with a longer one is a row that cannot be read."""
    bad_rows: Literal["stop", "skip"] | None = None
    """A row that cannot be read: stop, or skip and list it in bad_rows.tsv; stop by default (bookcrossing: skip)."""
    overwrite: bool = False
    """Replace the output folder when it holds a data set already."""
    rows_per_file: int = 2**18
    """Most rows in one file of a split; two files of this size are in memory at once for each core."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.format in IMPLICIT:
            if not 0 <= self.valid_fraction <= 1:
                raise ConfigError(f"valid is {self.valid_fraction}: it must be a fraction of the users, from 0 to 1")
        elif not (self.valid_fraction >= 0 and self.test >= 0 and self.valid_fraction + self.test < 1):
            raise ConfigError(
                f"valid ({self.valid_fraction}) and test ({self.test}) must not be negative and leave rows to train on"
            )
        for name, least in LEAST.items():
            if not least <= getattr(self, name) < 2**31:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be {least} or more, and below 2^31")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}, but must be 0 or more, and below 2^63")
        if self.format == "table" and self.schema is None:
            raise ConfigError("--format table needs --schema FILE.toml (sample: configs/table-example.toml)")
        if self.format not in ("table", "libsvm") and self.schema is not None:
            raise ConfigError(f"--schema goes with --format table: the layout of {self.format} is known")
        if self.split == "time" and self.format in (*IMPLICIT, "bookcrossing"):
            raise ConfigError(
                f"--split time goes with --format avazu or table, not with {self.format}: its rows have no time, or "
                f"are split by each user's time already"
            )
        if self.split == "time" and self.test_from_last_file:
            raise ConfigError("--split time and --test-from-last-file are two ways to hold rows out: leave one out")
        if self.positive is not None:
            if self.format != "bookcrossing":
                raise ConfigError("--positive goes with --format bookcrossing; a schema has its own [label] rule")
            from holdall.data.formats.table import parse_positive

            parse_positive(self.positive)
        if self.test_from_last_file and self.format not in ("criteo", "table", "avazu", "libsvm"):
            raise ConfigError(f"--test-from-last-file is for files of rows, not for --format {self.format}")

    @property
    def valid_fraction(self) -> float:
        """`valid`, or the default of the format."""
        if self.valid is not None:
            return self.valid
        return 1.0 if self.format == "movielens" else 0.0
