"""Hot rows within `--hot-bytes`: the most looked up rows of the dense tables, for strategies without a plan.

The choice itself is `popularity.choose_hot_rows`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from holdall.common.sizes import parse_bytes
from holdall.data.dataset import DataSet
from holdall.models.model import Model
from holdall.popularity.choose_hot_rows import count_lookups, hot_rows, ranked_rows
from holdall.popularity.profile import Profile
from holdall.training.config import TrainConfig


def lookups_by_row(config: TrainConfig, data: DataSet) -> Mapping[str, Any]:
    """Lookups of each row by table: those of the profile if one is given, else counted in the training split."""
    if config.placement.profile is None:
        return count_lookups(data)
    profile = Profile.load(config.placement.profile)
    profile.check(data.schema)
    return profile.counts()


def lookups_of(tables: Collection[str], config: TrainConfig, data: DataSet) -> dict[str, Any]:
    """`lookups_by_row` of some tables."""
    return {name: counts for name, counts in lookups_by_row(config, data).items() if name in tables}


def rows_within_hot_bytes(
    tables: Collection[str], config: TrainConfig, data: DataSet, row_bytes: int
) -> dict[str, int]:
    """As many rows of the tables as fit `--hot-bytes`, the most looked up first."""
    assert config.placement.hot_bytes is not None
    counts = lookups_of(tables, config, data)
    return hot_rows(counts, row_bytes, parse_bytes(config.placement.hot_bytes), at_most=ranked_rows(data.schema))


def bytes_per_row(config: TrainConfig, model: Model) -> int:
    """Bytes of a row with its optimizer state."""
    return model.bags.dim * 4 + config.optimizer_config().kind.row_state_bytes(model.bags.dim)


def packed_tables(model: Model) -> set[str]:
    """Tables whose rows can be stored apart: the dense ones."""
    return {name for pack in model.bags.packs for name in pack.tables}


def first_cold_rows(model: Model, hot: Mapping[str, int]) -> dict[str, int]:
    """The first row of each table that is not hot. Compressed tables are on the device as a whole."""
    return {**{name: model.bags.table(name).num_rows for name in dict.fromkeys(model.bags.features.values())}, **hot}
