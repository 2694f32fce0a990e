"""A click log in sessions: samples next to each other draw their ids from one planted community.

A value's text is `<community>.<number>`, so the planted answer can be read off any id map. Popularity is Zipf-like over
all values, whatever their community; a share `noise` of the lookups draws from all values instead of the session's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdall.common.files import atomic_folder
from holdall.data.arrow_files import write_split_file
from holdall.data.id_map import IDS_FOLDER, IdMap, id_map_path
from holdall.data.schema import Feature, Schema, Split

Array = npt.NDArray[Any]
ROWS_PER_FILE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class SessionLog:
    """A page a sample and, with `tags` above 0, bags of as many tags, which have communities of their own."""

    rows: int
    num_ids: int
    communities: int
    session: int = 64
    """Samples a session."""
    noise: float = 0.1
    exponent: float = 1.0
    tags: int = 0
    test: float = 0.1
    seed: int = 0


class Values:
    """Values with a community and a popularity each."""

    def __init__(self, config: SessionLog, rng: np.random.Generator):
        num = config.num_ids
        self.community = np.sort(rng.integers(config.communities, size=num))
        self.name = rng.permutation(num)  # so that equal counts are not in the order of communities
        popularity = (1.0 + rng.permutation(num)) ** -config.exponent
        self.total = np.concatenate([[0.0], np.cumsum(popularity)])
        self.bounds = np.searchsorted(self.community, np.arange(config.communities + 1))
        self.noise = config.noise

    def draw(self, communities: Array, rng: np.random.Generator) -> Array:
        """A value for each of these communities [...], of that shape."""
        low, high = self.total[self.bounds[communities]], self.total[self.bounds[communities + 1]]
        low, high = low.copy(), high.copy()
        anything = rng.random(communities.shape) < self.noise
        low[anything], high[anything] = 0.0, self.total[-1]
        found = np.searchsorted(self.total, low + rng.random(communities.shape) * (high - low), side="right") - 1
        return np.clip(found, 0, len(self.community) - 1)

    def ordered(self, drawn: Array, num_train: int) -> tuple[Array, IdMap]:
        """Ids in popularity order in place of values, and their map; values that training lacks have count 0."""
        counts = np.bincount(drawn[:num_train].reshape(-1), minlength=len(self.community))
        order = np.lexsort((self.name, -counts))
        ids = np.empty(len(order), dtype=np.int32)
        ids[order] = np.arange(len(order))
        texts = [f"{self.community[value]}.{self.name[value]}" for value in order.tolist()]
        return ids[drawn], IdMap(pa.array([*texts, None]), np.append(counts[order], 0), unseen=len(order))


def planted(id_map: IdMap) -> Array:
    """[num_rows] planted community of each id; -1 for the unseen row."""
    return np.array([-1 if text is None else int(text.partition(".")[0]) for text in id_map.values.to_pylist()])


def write_sessions(config: SessionLog, out: Path, rows_per_file: int = ROWS_PER_FILE) -> Schema:
    """A prepared data folder with features `page` and, where the config has them, `tags`; labels are coin flips."""
    rng = np.random.default_rng(config.seed)
    num_train = config.rows - int(config.rows * config.test)
    sessions = np.repeat(rng.integers(config.communities, size=-(-config.rows // config.session)), config.session)
    pages = Values(config, rng)
    features = {"page": pages.ordered(pages.draw(sessions[: config.rows], rng), num_train)}
    if config.tags:
        tags = Values(config, rng)
        own = rng.integers(config.communities, size=(config.rows, 1))
        features["tags"] = tags.ordered(tags.draw(np.repeat(own, config.tags, axis=1), rng), num_train)
    label = rng.integers(2, size=config.rows).astype(np.uint8)
    with atomic_folder(out) as folder:
        (folder / IDS_FOLDER).mkdir()
        for name, (_, id_map) in features.items():
            id_map.save(id_map_path(folder, name))
        splits = {}
        for split, start, stop in (("train", 0, num_train), ("test", num_train, config.rows)):
            files = []
            for first in range(start, stop, rows_per_file):
                part = slice(first, min(first + rows_per_file, stop))
                files.append(_write(folder / f"{split}-{len(files):05d}.arrow", label[part], features, part))
            if files:
                positives = int(label[start:stop].sum())
                splits[split] = Split(rows=stop - start, positives=positives, files=tuple(files))
        kinds: dict[str, dict[str, Any]] = {"page": {}, "tags": {"kind": "bag", "max_length": config.tags}}
        schema = Schema(
            label="label",
            dense=(),
            features=tuple(
                Feature(name=name, num_rows=id_map.num_rows, unseen=id_map.unseen, **kinds[name])
                for name, (_, id_map) in features.items()
            ),
            splits=splits,
        )
        schema.save(folder)
    return schema


def _write(path: Path, label: Array, features: dict[str, tuple[Array, IdMap]], part: slice) -> Any:
    lists = {}
    if "tags" in features:
        bags = features["tags"][0][part]
        lists["tags"] = (bags.reshape(-1), np.arange(len(bags) + 1) * bags.shape[1])
    dense = np.zeros((len(label), 0), dtype=np.float32)
    return write_split_file(path, label, dense, features["page"][0][part, None], lists)
