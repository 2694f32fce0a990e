"""Popularity profile of one data set, as stored in `popularity.json` (docs/formats.md).

    profile = Profile.load("popularity.json")
    profile.check(schema)                        # of this data set, and no other
    profile.coverage("C3", 10_000)               # share of the lookups that the 10,000 most popular rows take
    profile.rows_for_coverage("C3", 0.9)         # rows that take 90% of them
    profile.hot_inputs(100e6, row_bytes=64)      # share of inputs whose rows are all in the hottest 100 MB

Counts of every row, which a choice of hot rows needs, are stored beside it as `popularity.safetensors`; `counts()` maps
them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from holdall.common.checked_files import FileCheck, FileHash
from holdall.common.decode import NOT_STORED, Count, PositiveInt
from holdall.common.errors import ConfigError, DataError, did_you_mean
from holdall.common.files import PARTIAL, read_json, write_json
from holdall.common.summary import Summarised, Summary
from holdall.data.identity import data_fingerprint, json_digest
from holdall.data.schema import FeatureKind, Schema
from holdall.popularity.drift import Drift
from holdall.popularity.thresholds import hot_bytes

Array = npt.NDArray[Any]

FORMAT = "holdall-popularity"
VERSION = 1
AGAIN = "make it again with `holdall profile`"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Data set that a profile belongs to."""

    kind: Literal["prepared", "raw"]
    name: str
    """Name of the folder or of the first raw file, for people."""
    fingerprint: str
    """SHA-256 that identifies the data: see `data_fingerprint` and `raw_fingerprint`."""
    split: str
    rows: Count
    """Rows of the split; of raw data, those that were read."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Sample of rows that a profile was made from."""

    share: float
    seed: int
    blocks: Count
    """Blocks of consecutive rows that were read."""
    confidence: float
    """Of the intervals `low` to `high`."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Share of the lookups that the top k ids take, at log-spaced k; between `low` and `high`, equal when exact."""

    k: tuple[PositiveInt, ...]
    share: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class FeatureProfile:
    """Popularity of the ids of one feature."""

    name: str
    kind: FeatureKind
    table: str
    num_rows: PositiveInt | None
    """Rows of its table; None for raw data, whose ids are not known yet."""
    lookups: Count
    """Lookups counted."""
    distinct: Count
    """Different ids among them; for a raw stream with more ids than counters, an estimate."""
    singletons: Count
    """Ids looked up once."""
    coverage: Curve
    lru: tuple[float, ...] | None
    """Miss ratio of an LRU cache of k rows, at the curve's k; None when the stream was sampled."""
    drift: Drift | None
    """None when the rows have no order in time, or there was one window."""


@dataclass(frozen=True, kw_only=True)
class HotCurve:
    """Hot rows and inputs by threshold: a row is hot if it is looked up at least `threshold` times an input.
    Falling."""

    threshold: tuple[float, ...]
    rows: dict[str, tuple[Count, ...]]
    """Hot rows of each table."""
    inputs: tuple[float, ...]
    """Share of the inputs all of whose lookups are hot; between `low` and `high`, equal when exact."""
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class Profile(Summarised):
    """The popularity of every feature of a data set, and of its inputs."""

    source: Source
    method: Literal["exact", "stream"]
    """`exact`: every id counted. `stream`: bounded memory; `low` and `high` are certain bounds unless sampled."""
    rows_read: Count
    sample: Sample | None
    order: Literal["time", "none"]
    """Whether rows are in the order of time: without it there is no drift to measure."""
    windows: Count
    features: tuple[FeatureProfile, ...]
    hot: HotCurve
    counts_file: str | None = None
    """Name of the file beside this one with the lookups of every row, by table."""
    counts_hash: FileHash | None = None
    """Size and hash of that file; profiles of earlier versions have none."""
    path: Path | None = field(default=None, compare=False, metadata=NOT_STORED)
    """Path it was loaded from or saved to."""

    def _summary(self) -> Summary:
        title = f"Profile ({self.method}) of {self.rows_read:,} rows, {len(self.features)} features"
        features = sorted(self.features, key=lambda feature: -feature.distinct)
        rows = [
            (one.name, one.distinct, one.lookups, f"{self.coverage(one.name, 0.01 * one.distinct):.1%}")
            for one in features
        ]
        return Summary(title, ("feature", "ids", "lookups", "by the top 1% of ids"), rows)

    def feature(self, name: str) -> FeatureProfile:
        for feature in self.features:
            if feature.name == name:
                return feature
        raise ConfigError(f"the profile has no feature '{name}'{did_you_mean(name, [f.name for f in self.features])}")

    def coverage(self, feature: str, k: float) -> float:
        """Share of the feature's lookups that its k most popular ids take."""
        curve = self.feature(feature).coverage
        return float(np.interp(k, (0, *curve.k), (0.0, *curve.share)))

    def coverage_interval(self, feature: str, k: float) -> tuple[float, float]:
        """Interval of that share (see `method` and `sample`)."""
        curve = self.feature(feature).coverage
        places = (0, *curve.k)
        return float(np.interp(k, places, (0.0, *curve.low))), float(np.interp(k, places, (0.0, *curve.high)))

    def rows_for_coverage(self, feature: str, share: float) -> int:
        """The fewest most popular ids that take `share` of the feature's lookups, by the points of the curve."""
        if not 0 < share <= 1:
            raise ConfigError(f"a share of lookups must be above 0 and at most 1, not {share}")
        curve = self.feature(feature).coverage
        places, shares = (0, *curve.k), np.array((0.0, *curve.share))
        at = int(np.searchsorted(shares, share - 1e-12))
        if at >= len(shares):
            return curve.k[-1]
        below, above = shares[at - 1], shares[at]
        part = (share - below) / (above - below) if above > below else 0.0
        return int(np.ceil(places[at - 1] + part * (places[at] - places[at - 1]) - 1e-9))

    def expected_hits(self, feature: str, k: float, batch_size: int) -> float:
        """Lookups of a batch that go to the feature's k most popular rows, on average."""
        found = self.feature(feature)
        return self.coverage(feature, k) * found.lookups / self.rows_read * batch_size

    def miss_ratio(self, feature: str, k: float, policy: Literal["lru", "static"] = "lru") -> float:
        """Share of the lookups that a cache of k rows misses: `lru`, empty at first, or `static`, the top k rows."""
        if policy == "static":
            return 1.0 - self.coverage(feature, k)
        found = self.feature(feature)
        if found.lru is None:
            raise DataError(
                f"{self._where} was made from a sample, which does not tell when a row of '{feature}' comes again: "
                f"profile without --sample, or ask for policy='static'"
            )
        return float(np.interp(k, (0, *found.coverage.k), (1.0, *found.lru)))

    def hot_inputs(self, budget: float, row_bytes: int) -> float:
        """Share of the inputs that are fully hot when the hottest rows of all tables fill `budget` bytes."""
        sizes = hot_bytes({name: np.array(rows) for name, rows in self.hot.rows.items()}, row_bytes)
        places = (0.0, *sizes.astype(float).tolist())
        # The last of several thresholds with as many bytes is the one that interpolation should start from.
        return float(np.interp(budget, places, (0.0, *self.hot.inputs)))

    def counts(self) -> Mapping[str, Array]:
        """[rows] lookups of every row, by table, in the order of ids; read from the file beside the profile.

        Whole numbers when all rows were counted; expected lookups in the whole split, falling, when sampled.
        """
        if self.counts_file is None or self.path is None:
            raise DataError(f"{self._where} has no counts of single rows: profile a prepared data set, and save it")
        path = self.path.parent / self.counts_file
        if Path(self.counts_file).name != self.counts_file:
            raise DataError(f"{self._where} names a file outside its folder ({self.counts_file!r}): {AGAIN}")
        if self.counts_hash is not None:
            FileCheck({path: self.counts_hash}, listed_in=self.path.name, cure=AGAIN).result()
        try:
            with safe_open(path, framework="numpy") as file:
                if (file.metadata() or {}).get("fingerprint") != self.source.fingerprint:
                    raise DataError(f"{path} holds the counts of another data set than {self._where}: {AGAIN}")
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise DataError(f"the counts {path} cannot be read ({error}): {AGAIN}") from error

    def check(self, schema: Schema) -> None:
        """Raise unless this profile was made from the data set that `schema` describes, or from its raw files."""
        theirs = data_fingerprint(schema) if self.source.kind == "prepared" else raw_fingerprint(_raw_files(schema))
        if theirs != self.source.fingerprint:
            rows = {name: split.rows for name, split in schema.splits.items()}
            raise DataError(
                f"{self._where} belongs to another data set: it is of '{self.source.name}' "
                f"({self.source.rows:,} rows, {len(self.features)} features, {self.source.kind}, fingerprint "
                f"{self.source.fingerprint[:12]}), but this one has splits {rows}, {len(schema.features)} features "
                f"and fingerprint {theirs[:12]}: {AGAIN}"
            )

    @property
    def _where(self) -> str:
        return f"the profile {self.path}" if self.path else "the profile"

    def save(self, path: str | Path, counts: Mapping[str, Array] | None = None) -> Profile:
        """Write the profile, and the counts of every row beside it when they are given; returns it as `load` would."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        saved = replace(self, path=path, counts_file=None, counts_hash=None)
        if counts is not None:
            beside = path.with_suffix(".safetensors")
            _save_counts(beside, counts, self)
            saved = replace(saved, counts_file=beside.name, counts_hash=FileHash.of(beside))
        document = asdict(replace(saved, path=None))
        del document["path"]
        write_json(path, {"format": FORMAT, "version": VERSION, **document}, hashed=True)
        return saved

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read `popularity.json`; a document of another version, or a damaged one, is a DataError."""
        path = Path(path)
        profile = replace(read_json(path, cls, format=FORMAT, version=VERSION, cure=AGAIN), path=path)
        _validate(profile)
        return profile


def raw_fingerprint(files: list[tuple[str, int]]) -> str:
    """SHA-256 over the names (without folders) and sizes of raw files, in order: they are too large to hash."""
    return json_digest({"raw": [[name, size] for name, size in files]})


def _raw_files(schema: Schema) -> list[tuple[str, int]]:
    return [(Path(file["name"]).name, file["bytes"]) for file in schema.source.get("files", [])]


def _save_counts(path: Path, counts: Mapping[str, Array], profile: Profile) -> None:
    arrays = {}
    for name, rows in sorted(counts.items()):
        dtype = rows.dtype
        if dtype.kind == "i":
            dtype = np.dtype(np.int32 if int(rows.max(initial=0)) < 2**31 else np.int64)
        arrays[name] = np.ascontiguousarray(rows, dtype=dtype)
    metadata = {"fingerprint": profile.source.fingerprint, "rows_read": str(profile.rows_read)}
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("wb") as file:
        _write_safetensors(file, arrays, metadata)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _write_safetensors(file: BinaryIO, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write arrays in the safetensors format, without a copy of them, the same bytes every time.

    The library writes to a file of its own beside this one, which stays there when the process is killed.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, rows in arrays.items():
        start, end = end, end + rows.nbytes
        kind = f"{rows.dtype.kind.upper()}{8 * rows.dtype.itemsize}"
        header[name] = {"dtype": kind, "shape": list(rows.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for rows in arrays.values():
        file.write(rows.data)


def is_counts_file(path: Path) -> bool:
    """Whether a safetensors file has the counts of some profile."""
    try:
        with safe_open(path, framework="np") as file:
            return {"fingerprint", "rows_read"} <= (file.metadata() or {}).keys()
    except (OSError, SafetensorError):
        return False


def _validate(profile: Profile) -> None:
    """Refuse numbers that a profile cannot have, before a plan depends on them."""

    def refuse(where: str, what: str) -> None:
        raise DataError(f"{profile.path} is damaged: {where} {what}; {AGAIN}")

    for feature in profile.features:
        curve, where = feature.coverage, f"the coverage of '{feature.name}'"
        lengths = {len(curve.k), len(curve.share), len(curve.low), len(curve.high)}
        lengths |= set() if feature.lru is None else {len(feature.lru)}
        if len(lengths) != 1 or not curve.k:
            refuse(where, "has columns of different lengths")
        if np.any(np.diff(curve.k) <= 0) or np.any(np.diff(curve.share) < -1e-6):
            refuse(where, "is not rising")
        shares = np.array([curve.share, curve.low, curve.high, *([] if feature.lru is None else [feature.lru])])
        if not np.all((shares >= -1e-6) & (shares <= 1 + 1e-6)):
            refuse(where, "is not between 0 and 1")
        if feature.table not in profile.hot.rows:
            refuse("the hot curve", f"lacks the table '{feature.table}'")
        if (drift := feature.drift) and not len(drift.kept) == len(drift.hits) == len(drift.best):
            refuse(f"the drift of '{feature.name}'", "has columns of different lengths")
    hot = profile.hot
    if {len(hot.inputs), len(hot.low), len(hot.high)} != {len(hot.threshold)}:
        refuse("the hot curve", "has columns of different lengths")
    for name, rows in hot.rows.items():
        if len(rows) != len(hot.threshold):
            refuse("the hot curve", f"has another length at table '{name}'")
