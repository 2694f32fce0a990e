"""Rows of a synthetic click log, drawn block by block; each block can be drawn on its own.

    rank ~ Zipf(n_f, s_f)  ->  group  ->  drift  ->  id      dense ~ log(1 + counts)      label ~ Bernoulli(probability)

*Groups*: a row draws one of G groups. The most popular 5% of a feature's ids belong to none; the others belong to group
`(id - first) % G`, and a lookup of one of them is, with probability `group_share`, moved to the row's group among the G
neighbouring ranks. The frequency of each id hardly changes; co-occurrence across features does.

*Drift*: ranks r and r + n/2 form a pair. In a fraction `drift` of the pairs the two ids are swapped, at a time drawn
for the pair; so the ids are always a permutation of the ranks, and of the ids that are hot at the first row the
fraction `drift` is cold at the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from holdall.common.errors import ConfigError
from holdall.data.click_probability import ClickProbability, FloatArray, hash_uniform
from holdall.data.columns import Columns, Ragged, offsets_of
from holdall.data.zipf import Zipf

BLOCK_ROWS = 65_536
HOT_SHARE = 0.05  # of a feature's ids belong to no group, as in EL-Rec's local order
DENSE_QUANTILES = 4096

# Streams of random numbers, so that none depends on how many numbers another has used.
_GROUPS, _IDS, _DENSE, _LABELS = range(4)
_CALIBRATION = 2**32 - 1  # in place of a block's number
# Salts of the hash, one for each use.
_SWAP, _MISSING, _LOCATION = 201, 202, 203

IdColumn = npt.NDArray[np.int64] | Ragged


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """A synthetic click log. The same config gives the same log, row for row."""

    rows: int
    cardinalities: tuple[int, ...]
    """Ids of each feature: 0..n-1."""
    num_dense: int = 13
    zipf: float | tuple[float, ...] = 1.05
    """Exponent of the popularity of ids, one for all features or one each; 0 is uniform."""
    bag_lengths: tuple[int, ...] | None = None
    """Longest bag of each feature; lengths are uniform from 0 to it. 1: exactly one id. None: 1 for all."""
    groups: int = 0
    """Groups of ids that occur together; 0 for none."""
    group_share: float = 0.8
    """Share of the lookups of grouped ids that go to the row's group."""
    drift: float = 0.0
    """Share of the hot ids replaced from the first row to the last."""
    base_rate: float = 0.25
    """Mean click probability."""
    teacher_rank: int = 3
    """Length of the vectors whose products are the pairwise part of the logit."""
    dense_strength: float = 0.6
    """Standard deviation of the logit's part that depends on the dense values alone; likewise the other two."""
    id_strength: float = 1.15
    pair_strength: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        def check(good: bool, message: str) -> None:
            if not good:
                raise ConfigError(f"synthetic data: {message}")

        check(self.rows >= 1, f"{self.rows} rows: at least 1 is needed")
        check(bool(self.cardinalities) and min(self.cardinalities) >= 1, "each feature needs at least one id")
        check(self.num_dense >= 0, f"num_dense is {self.num_dense}: it must be 0 or more")
        for name, values in (("zipf", self.exponents), ("bag_lengths", self.lengths)):
            count = len(self.cardinalities)
            check(len(values) == count, f"{name} has {len(values)} entries for {count} features")
        check(all(0 <= s < math.inf for s in self.exponents), f"zipf {self.zipf} must not be negative")
        check(min(self.lengths) >= 1, f"bag_lengths {self.bag_lengths} must be 1 or more")
        check(self.groups >= 0, f"groups is {self.groups}: it must be 0 or more")
        for name in ("group_share", "drift"):
            check(0 <= getattr(self, name) <= 1, f"{name} is {getattr(self, name)}: it must be between 0 and 1")
        check(0 < self.base_rate < 1, f"base_rate is {self.base_rate}: it must be between 0 and 1")
        check(self.teacher_rank >= 1, f"teacher_rank is {self.teacher_rank}: it must be 1 or more")
        check(min(self.strengths) >= 0, f"the strengths {self.strengths} must not be negative")
        check(self.seed >= 0, f"seed is {self.seed}: it must be 0 or more")

    @property
    def exponents(self) -> tuple[float, ...]:
        return self.zipf if isinstance(self.zipf, tuple) else (self.zipf,) * len(self.cardinalities)

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.bag_lengths if self.bag_lengths is not None else (1,) * len(self.cardinalities)

    @property
    def strengths(self) -> tuple[float, float, float]:
        return self.dense_strength, self.id_strength, self.pair_strength

    @property
    def num_blocks(self) -> int:
        return -(-self.rows // BLOCK_ROWS)


def generate(config: SyntheticConfig, start: int = 0, stop: int | None = None) -> Iterator[Columns]:
    """Rows start..stop of the log (all of them by default), in blocks of up to 65,536 rows.

    Ids are those of the log: id r is the r-th most popular at its first row, up to chance. Memory does not depend on
    the number of rows.
    """
    stop = config.rows if stop is None else stop
    if not 0 <= start <= stop <= config.rows:
        raise ConfigError(f"rows {start}..{stop} of a log of {config.rows}")
    for block in range(start // BLOCK_ROWS, -(-stop // BLOCK_ROWS)):
        first = block * BLOCK_ROWS
        yield make_block(config, block).slice(max(start - first, 0), min(stop - first, BLOCK_ROWS))


def make_block(config: SyntheticConfig, block: int) -> Columns:
    """Rows `block * 65,536`.. of the log: a function of (config, block) and nothing else."""
    size = min(BLOCK_ROWS, config.rows - block * BLOCK_ROWS)
    if block < 0 or size <= 0:
        raise ConfigError(f"block {block} of a log of {config.num_blocks} blocks")
    ids = list(draw_ids(config, block, size))
    dense = draw_dense(config, block, size)
    probability = click_probability_of(config).probability(dense, ids)
    label = _rng(config, block, _LABELS).random(size, dtype=np.float32) < probability
    singles = [column for column in ids if not isinstance(column, Ragged)]
    id_type = np.int32 if max(config.cardinalities) <= np.iinfo(np.int32).max else np.int64
    matrix = np.empty((size, len(singles)), dtype=id_type)
    for place, column in enumerate(singles):
        matrix[:, place] = column
    return Columns(
        label=label.astype(np.uint8),
        dense=dense,
        ids=matrix,
        bags=tuple(Ragged(bag.values.astype(id_type), bag.offsets) for bag in ids if isinstance(bag, Ragged)),
        probability=probability,
    )


def draw_ids(config: SyntheticConfig, block: int, size: int) -> Iterator[IdColumn]:
    """For each feature the ids of a block's rows: [B], or a bag a row."""
    row_group = None
    if config.groups > 0:
        row_group = _rng(config, block, _GROUPS).integers(config.groups, size=size)
    moment = _moments(config, block, size)
    for feature, longest in enumerate(config.lengths):
        rng = _rng(config, block, _IDS, feature)
        lengths = None if longest == 1 else rng.integers(longest + 1, size=size)
        num_lookups = size if lengths is None else int(lengths.sum())
        ids = _zipf(config.cardinalities[feature], config.exponents[feature]).ranks(rng.random(num_lookups))
        if row_group is not None:
            group = row_group if lengths is None else np.repeat(row_group, lengths)
            _move_to_group(config, feature, ids, group, rng)
        if config.drift > 0:
            when = moment if lengths is None else np.repeat(moment, lengths)
            _swap(config, feature, ids, when)
        yield ids if lengths is None else Ragged(ids, offsets_of(lengths))


def first_grouped(num_ids: int) -> int:
    """First id that belongs to a group; the more popular ids before it belong to none."""
    return math.ceil(num_ids * HOT_SHARE)


def _move_to_group(
    config: SyntheticConfig,
    feature: int,
    ranks: npt.NDArray[np.int64],
    group: npt.NDArray[np.int64],
    rng: np.random.Generator,
) -> None:
    """Replace each rank, in place, by the one of the row's group in the same run of G ranks."""
    first = first_grouped(config.cardinalities[feature])
    within = ranks - first
    moved = within - within % config.groups + group + first
    chosen = (within >= 0) & (moved < config.cardinalities[feature]) & (rng.random(len(ranks)) < config.group_share)
    np.copyto(ranks, moved, where=chosen)


def _swap(config: SyntheticConfig, feature: int, ranks: npt.NDArray[np.int64], moment: npt.NDArray[np.float64]) -> None:
    """Replace ranks, in place, by the ids that have them at these times (0 at the first row, 1 at the last)."""
    half = config.cardinalities[feature] // 2
    if half == 0:
        return
    pair = ranks % half
    swapped = (hash_uniform(pair, config.seed, _SWAP, feature) < config.drift * moment) & (ranks < 2 * half)
    np.copyto(ranks, np.where(ranks < half, ranks + half, ranks - half), where=swapped)


def draw_dense(config: SyntheticConfig, block: int, size: int) -> FloatArray:
    """[B, N]: log(1 + count), where counts are log-normal and a share of them 0 or missing."""
    quantile = _rng(config, block, _DENSE).integers(DENSE_QUANTILES, size=(config.num_dense, size), dtype=np.uint16)
    dense = np.empty((size, config.num_dense), dtype=np.float32)
    for column, table in enumerate(_dense_tables(config.seed, config.num_dense)):
        dense[:, column] = table[quantile[column]]
    return dense


@lru_cache(maxsize=8)
def _dense_tables(seed: int, num_dense: int) -> list[FloatArray]:
    """Quantiles of log(1 + floor(exp(1.5 z + location))), a share of them set to 0; one table a column."""
    columns = np.arange(num_dense)
    locations = 3.0 * hash_uniform(columns, seed, _LOCATION)
    missing = 0.4 * hash_uniform(columns, seed, _MISSING)
    normal = NormalDist()
    levels = (np.arange(DENSE_QUANTILES) + 0.5) / DENSE_QUANTILES
    z = np.array([normal.inv_cdf(level) for level in levels.tolist()])
    tables = []
    for column, location, share in zip(columns.tolist(), locations, missing, strict=True):
        values = np.log1p(np.floor(np.exp(1.5 * z + location)))
        # Not the smallest ones: a missing count is as likely to be large.
        values[hash_uniform(np.arange(DENSE_QUANTILES), seed, _MISSING, column) < share] = 0.0
        tables.append(values.astype(np.float32))
    return tables


@lru_cache(maxsize=8)
def click_probability_of(config: SyntheticConfig) -> ClickProbability:
    """The config's click probability, calibrated on rows of its own, spread over the log (about 0.2 s, then cached)."""
    uncalibrated = ClickProbability(
        seed=config.seed,
        cardinalities=config.cardinalities,
        num_dense=config.num_dense,
        rank=config.teacher_rank,
        strengths=config.strengths,
    )
    ids = list(draw_ids(config, _CALIBRATION, BLOCK_ROWS))
    return uncalibrated.calibrated(draw_dense(config, _CALIBRATION, BLOCK_ROWS), ids, config.base_rate)


def _moments(config: SyntheticConfig, block: int, size: int) -> npt.NDArray[np.float64]:
    """Time of each row of a block: 0 for the first row of the log, 1 for the last."""
    if block == _CALIBRATION:
        return np.linspace(0.0, 1.0, size)
    return (block * BLOCK_ROWS + np.arange(size)) / max(1, config.rows - 1)


@lru_cache(maxsize=256)
def _zipf(num_values: int, exponent: float) -> Zipf:
    return Zipf(num_values, exponent)


def _rng(config: SyntheticConfig, block: int, *stream: int) -> np.random.Generator:
    return np.random.default_rng([config.seed, block, *stream])
