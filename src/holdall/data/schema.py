"""Schema of a prepared data set: dense columns, categorical features and label.

Ids are in popularity order: id 0 of a feature is its most frequent value in the training split. Values never seen in
training, and values folded by `rare_below`, share the feature's `unseen` row, which takes its own place in that order
(the last one when nothing was folded, since its count is then 0). `holdall order` renumbers the ids from `ordered_from`
on, so that ids that occur together are neighbours; ids below it stay in popularity order.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NotRequired, TypedDict

from holdall.common.checked_files import FileHash
from holdall.common.decode import Count, NonNegativeFloat, PositiveInt, decode
from holdall.common.errors import ConfigError, did_you_mean
from holdall.common.files import read_json, write_json
from holdall.common.output_folder import FolderKind
from holdall.common.summary import Summarised, Summary

FORMAT = "holdall-data"
VERSION = 1
SCHEMA_FILE = "schema.json"
DATA_SET = FolderKind("data set", SCHEMA_FILE, FORMAT, without=("run.json", "bundle.json", "delta.json", "export.json"))
CURE = "copy the folder again, or make it again with `holdall prepare`"

FeatureKind = Literal["categorical", "bag", "sequence"]


@dataclass(frozen=True, kw_only=True)
class CrossPart:
    """Raw column that is one side of a cross, and what is done to its values (see `Feature`)."""

    name: str
    bucket: tuple[float, ...] | None = None
    hash: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One categorical feature: a single id per sample, a bag of ids, or an ordered sequence of ids."""

    name: str
    num_rows: PositiveInt
    """Rows its table needs: distinct values kept, the missing value, and the unseen row."""
    unseen: Count
    """Id of all values that are not in the map."""
    kind: FeatureKind = "categorical"
    max_length: Count | None = None
    """Longest bag or sequence kept, for kinds that have a length."""
    table: str | None = None
    """Name of the table it looks up when it shares one with another feature; its own name otherwise."""
    ordered_from: Count | None = None
    """First id that `holdall order` renumbered; None when all ids are in popularity order."""
    bucket: tuple[float, ...] | None = None
    """Bounds of the buckets that raw numbers are put into (`data.transforms`)."""
    hash: PositiveInt | None = None
    """Number below which raw values, or the texts of a cross, are hashed."""
    cross: tuple[CrossPart, ...] = ()
    """Raw columns whose values together are the value of the feature, which has no column of its own."""
    dim: PositiveInt | None = None
    """Width of the rows of its table, which the table widens to the model's; None: that of the model."""

    @property
    def one_hot(self) -> bool:
        return self.kind == "categorical"

    @property
    def num_ranked(self) -> int:
        """Number of ids, from 0 on, in popularity order: a prefix of at most this length has the hottest ids."""
        return self.num_rows if self.ordered_from is None else self.ordered_from


@dataclass(frozen=True, kw_only=True)
class DenseColumn:
    """One numeric column and how its raw value x became the stored float32."""

    name: str
    transform: Literal["log", "standard", "none"] = "log"
    """`log`: log(max(x, 0) + 1). `standard`: (x - mean) / std over the training split. `none`: as it is."""
    mean: float = 0.0
    std: float = 1.0
    missing: float = 0.0
    """Stored value where the raw one is missing."""


@dataclass(frozen=True, kw_only=True)
class WeightColumn:
    """Column with the weight of each row; the files store the raw weight divided by `mean`."""

    name: str
    mean: NonNegativeFloat
    """Mean raw weight of the training split."""


@dataclass(frozen=True, kw_only=True)
class DataFile(FileHash):
    """One Arrow IPC file of a split."""

    name: str
    rows: Count


@dataclass(frozen=True, kw_only=True)
class Split:
    """Rows of one part of the data (`train`, `valid` or `test`), in the order of its files."""

    ignores_unknown: ClassVar[bool] = True

    rows: Count
    positives: Count
    weights: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    """Sums of the stored weights of the rows with label 0 and with label 1, where the data set has weights."""
    files: tuple[DataFile, ...]


class RawFile(TypedDict):
    """Raw file that a data set was made from."""

    name: str
    bytes: Count


class SourceRecord(TypedDict):
    """Fields of `Schema.source` that are read again."""

    format: NotRequired[str]
    files: NotRequired[list[RawFile]]
    bad_rows: NotRequired[Count]
    counts: NotRequired[dict[str, Count]]


class OrderedTable(TypedDict):
    """Renumbering of one table by `holdall order`."""

    sha256: str
    rows: NotRequired[Count]
    ordered_from: NotRequired[Count]
    communities: NotRequired[Count]
    grouped_lookups: NotRequired[float]


class OrderRecord(TypedDict):
    """Fields of `Schema.order` that are read again."""

    tables: dict[str, OrderedTable]
    left: NotRequired[dict[str, str]]


@dataclass(frozen=True, kw_only=True, repr=False)
class Schema(Summarised):
    """Complete description of a prepared data set, as stored in `schema.json`."""

    ignores_unknown: ClassVar[bool] = True

    label: str
    dense: tuple[DenseColumn, ...]
    features: tuple[Feature, ...]
    weight: WeightColumn | None = None
    """None: every row counts once."""
    splits: dict[str, Split] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    """Origin: format, files, options. For people; nothing depends on it."""
    layout: dict[str, Any] | None = None
    """Format and columns of the raw files (`data.stored_layout`), by which others are read for scoring. None: the
    folder was written by an earlier version, or from no files."""
    order: dict[str, Any] | None = None
    """Record of `holdall order`: its parameters, the bijection of each table and its hash. None: it was not applied."""
    files: dict[str, FileHash] | None = None
    """Every file of the folder besides this one and those of the splits, by its path in the folder. None: the folder
    was written by an earlier version, which did not list them."""
    ids: dict[str, str] | None = None
    """By table, the fingerprint of its id map (`IdMap.fingerprint`); None as for `files`."""

    def _summary(self) -> Summary:
        rows = sum(split.rows for split in self.splits.values())
        columns = f"{len(self.dense)} dense columns, {len(self.features)} features"
        title = f"Schema: label '{self.label}', {columns}, {rows:,} rows"
        splits = [(f"split {name}", "", split.rows) for name, split in self.splits.items()]
        features = [(feature.name, feature.kind, feature.num_rows) for feature in self.features]
        return Summary(title, ("name", "kind", "rows"), [*splits, *features])

    def __post_init__(self) -> None:
        decode(self.source, SourceRecord, "", inside="source")
        if self.order is not None:
            decode(self.order, OrderRecord, "", inside="order")
        names = [feature.name for feature in self.features]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ConfigError(f"feature names must differ, but these repeat: {sorted(repeated)}")
        for feature in self.features:
            if feature.num_ranked > feature.num_rows:
                raise ConfigError(
                    f"feature '{feature.name}' has ordered_from {feature.ordered_from}, but {feature.num_rows} rows"
                )

    @property
    def num_dense(self) -> int:
        return len(self.dense)

    @property
    def one_hot(self) -> bool:
        """Whether every feature has exactly one id per sample."""
        return all(feature.one_hot for feature in self.features)

    @property
    def cardinalities(self) -> dict[str, int]:
        """Rows of each feature's table, by feature name."""
        return {feature.name: feature.num_rows for feature in self.features}

    @property
    def order_hashes(self) -> dict[str, str]:
        """By table, the hash of its renumbering by `holdall order`; data sets in one order have the same."""
        return {table: entry["sha256"] for table, entry in (self.order or {"tables": {}})["tables"].items()}

    def feature(self, name: str) -> Feature:
        for feature in self.features:
            if feature.name == name:
                return feature
        known = [feature.name for feature in self.features]
        raise ConfigError(f"no feature named '{name}'{did_you_mean(name, known)}")

    def save(self, folder: Path) -> None:
        write_json(folder / SCHEMA_FILE, {"format": FORMAT, "version": VERSION, **asdict(self)}, hashed=True)

    @classmethod
    def load(cls, folder: Path) -> Schema:
        return read_json(Path(folder) / SCHEMA_FILE, cls, format=FORMAT, version=VERSION, cure=CURE)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
