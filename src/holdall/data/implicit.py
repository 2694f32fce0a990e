"""Implicit data: events of users that chose items, and none for the items they did not choose.

All such data sets take the same steps, once their files are read: events are put in each user's order, repeated ones
are dropped, the last is held out, attributes are joined, the items before an event become its history, negatives are
drawn for held-out events, and two kinds of files are written: `items.arrow`, from which training draws negatives, and
`ranking-*.arrow`, by which a model is ranked.

The train split has positives alone, in random order; valid and test have each held-out event followed by the first
`negatives` of its ranking case. Memory: about 100 bytes an event (MovieLens-25M: 2.5 GB).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdall.common.errors import ConfigError, DataError
from holdall.data.columns import Ragged, offsets_of
from holdall.data.id_map import IdMap, id_map_path
from holdall.data.items import ItemTable
from holdall.data.layout import Layout, RawDense, RawFeature
from holdall.data.negatives import Positives, draw_candidates, repeated
from holdall.data.ranking_cases import RankingCases
from holdall.data.raw_data import RawData, no_rows
from holdall.data.rows import Refused, Rows, import_polars
from holdall.data.schema import Schema
from holdall.data.splits import SPLITS, TEST, TRAIN, VALID, hash_numbers

if TYPE_CHECKING:
    from holdall.data.prepare import PrepareConfig

Array = npt.NDArray[Any]
Parse = Callable[[Path], Iterator[list[Refused]]]
"""Function that reads a file into an `Implicit` and yields refused lines, block by block."""
USER, ITEM, HISTORY = "user", "item", "history"
ROWS_AT_ONCE = 1 << 16
MAX_CANDIDATES = 1 << 31  # 20 GB while they are drawn


@dataclass(frozen=True)
class GivenNegatives:
    """Negatives that are part of a data set."""

    path: Path
    users: Array
    """[C]"""
    items: Array
    """[C] the items chosen."""
    negatives: Array
    """[C, n]"""
    lines: Array
    """[C] lines of the file."""


@dataclass(frozen=True)
class Cases:
    """Held-out events and their negatives, as codes."""

    events: Array
    negatives: Array
    keep: Array


class Implicit:
    """Builder of the rows of an implicit data set, from its events and attributes."""

    def __init__(
        self,
        config: PrepareConfig,
        *,
        user_features: tuple[RawFeature, ...] = (),
        item_features: tuple[RawFeature, ...] = (),
        history_of: tuple[str, ...] = (),
        leave_one_out: bool = False,
    ):
        """`history_of` names the item and those of its features whose earlier values are sequences of a row;
        `leave_one_out` makes the last event of each user a test event, for data sets without a test file."""
        self.config = config
        self.leave_one_out = leave_one_out
        self.item_features = item_features
        self.history_of = history_of
        tables = {feature.name: feature.table_name for feature in item_features} | {ITEM: ITEM}
        self.layout = Layout(
            label="chosen",
            dense=(RawDense(name="num_events", column="num_events"),) if history_of else (),
            features=(
                RawFeature(name=USER, column=USER),
                *user_features,
                RawFeature(name=ITEM, column=ITEM),
                *item_features,
                *(
                    RawFeature(
                        name=HISTORY if name == ITEM else f"{HISTORY}_{name}",
                        column=name,
                        kind="sequence",
                        max_length=config.max_length,
                        table=tables[name],
                    )
                    for name in history_of
                ),
            ),
        )
        self.counts: dict[str, int] = {}
        self.attributes: dict[str, Any] = {}
        """By `user` and `item`: a frame with `id` and a column for each feature that depends on it."""
        self.given: GivenNegatives | None = None
        self._events: list[tuple[Array, Array, Array, int]] = []
        self._cases: dict[int, Cases] = {}
        self._case_rows: dict[int, Array] = {}

    def add_events(self, users: Array, items: Array, split: int = TRAIN, order: Array | None = None) -> None:
        """Events with whole-number ids; without `order`, in the order they are added."""
        if order is None:
            first = sum(len(part[0]) for part in self._events)
            order = np.arange(first, first + len(users))
        self._events.append((users, items, order, split))

    def raw_data(self, parsers: dict[Path, Parse]) -> RawData:
        """Read the files in the order of `parsers`; the rows come with the last."""
        last = list(parsers)[-1]

        def read(path: Path) -> Generator[Rows]:
            for refused in parsers[path](path):
                yield no_rows(self.layout, refused)
            if path == last:
                self._split_events()
                yield from self._rows(path.stat().st_size)

        return RawData(layout=self.layout, files=list(parsers), read=read, finish=self._finish, counts=self.counts)

    # --- events ------------------------------------------------------------------------------------------------------

    def _split_events(self) -> None:
        """Code users and items, put events in order, drop repeated ones, hold some out."""
        users, items, order = (np.concatenate([part[k] for part in self._events]) for k in range(3))
        split = np.concatenate([np.full(len(part[0]), part[3], dtype=np.uint8) for part in self._events])
        self._events.clear()
        if not len(users):
            raise DataError("the files hold no events: check that they are the files of this format")
        given = self.given.negatives.ravel() if self.given else np.zeros(0, dtype=np.int64)
        self.user_ids, users = np.unique(users, return_inverse=True)
        self.item_ids, codes = np.unique(np.concatenate([items, given]), return_inverse=True)
        items = codes[: len(items)]
        by_user = np.lexsort((order, split == TEST, users))  # stable: equal times stay in file order
        users, items, split = users[by_user], items[by_user], split[by_user]
        _, first = np.unique(users * len(self.item_ids) + items, return_index=True)
        first.sort()
        self.counts["duplicate_events"] = len(users) - len(first)
        self.user, self.item, self.split = users[first].astype(np.int32), items[first].astype(np.int32), split[first]
        self.starts = np.searchsorted(self.user, np.arange(len(self.user_ids) + 1))
        self._hold_out()
        self._count()
        self._align()
        own = Positives(self.user, self.item, len(self.item_ids))
        for held in (VALID, TEST):
            self._cases[held] = self._make_cases(held, own)
        if self.given:
            equal = self.given.negatives == self.given.items[:, None]
            self.counts["negatives_equal_positive"] = int(equal.sum())
            self.counts["negatives_repeated"] = int((repeated(self.given.negatives) & ~equal).sum())

    def _hold_out(self) -> None:
        """Test: given, or the last event of each user. Valid: the last event before it, of some users."""
        lengths = np.diff(self.starts)
        self.counts["users_with_one_event"] = int((lengths == 1).sum())
        if self.leave_one_out:
            self.split[self.starts[1:][lengths > 1] - 1] = TEST
        num_train = np.bincount(self.user[self.split == TRAIN], minlength=len(lengths))
        self.history_end = self.starts[:-1] + num_train
        """[users] end of the events that a model may use."""
        drawn = hash_numbers(self.user_ids, self.config.seed) / 2.0**64 < self.config.valid_fraction
        self.split[self.history_end[drawn & (num_train > 1)] - 1] = VALID
        self.counts["users_without_valid_event"] = int((drawn & (num_train < 2)).sum())

    def _count(self) -> None:
        trained = self.split == TRAIN
        if not trained.any():
            raise DataError(
                "there are no events to train on: check the training file, and bad_rows.tsv with --bad-rows skip"
            )
        self.catalogue = np.flatnonzero(np.bincount(self.item[trained], minlength=len(self.item_ids)))
        known_user = np.bincount(self.user[trained], minlength=len(self.user_ids)) > 0
        self.known_item = np.zeros(len(self.item_ids), dtype=bool)
        self.known_item[self.catalogue] = True
        self.counts["held_out_events_of_unseen_users"] = int((~known_user[self.user[~trained]]).sum())
        self.counts["held_out_events_of_unseen_items"] = int((~self.known_item[self.item[~trained]]).sum())
        if self.history_of:
            longest = np.minimum(np.arange(len(self.user)), self.history_end[self.user]) - self.starts[self.user]
            self.counts["events_without_history"] = int((longest == 0).sum())
            self.counts["histories_cut"] = int((longest > self.config.max_length).sum())

    def _align(self) -> None:
        """Put attributes in the order of the codes; users and items without any get missing values and are counted."""
        pl = import_polars()
        for key, ids in ((USER, self.user_ids), (ITEM, self.item_ids)):
            names = {"id": ids, key: pl.Series(ids).cast(pl.String)}
            frame = pl.DataFrame(names)
            if key in self.attributes:
                found = self.attributes[key]
                self.counts[f"{key}s_without_attributes"] = len(frame.join(found, on="id", how="anti"))
                frame = frame.join(found, on="id", how="left", maintain_order="left")
            self.attributes[key] = frame.with_columns(pl.col(pl.String).fill_null(""))

    def _make_cases(self, held: int, own: Positives) -> Cases:
        events = np.flatnonzero(self.split == held)
        if held == TEST and self.given:
            negatives = self._given_cases(events)
            keep = (negatives != self.item[events, None]) & ~repeated(negatives)
            self.counts["negatives_of_unseen_items"] = int((~self.known_item[negatives]).sum())
            return Cases(events, negatives, keep)
        num, seed = min(self.config.candidates, len(self.catalogue)), self.config.seed + held
        if len(events) * num > MAX_CANDIDATES:
            raise ConfigError(
                f"--candidates {num:,} for {len(events):,} held-out events is more than {MAX_CANDIDATES:,} in all, "
                f"which would not fit in memory: lower it"
            )
        return Cases(events, *draw_candidates(self.user[events], own, self.catalogue, num, seed))

    def _given_cases(self, events: Array) -> Array:
        """[C, n] codes of the negatives given for these events."""
        assert self.given is not None
        users, items = self.user_ids[self.user[events]], self.item_ids[self.item[events]]
        pairs = zip(self.given.users.tolist(), self.given.items.tolist(), strict=True)
        places = {pair: place for place, pair in enumerate(pairs)}
        try:
            order = [places.pop(pair) for pair in zip(users.tolist(), items.tolist(), strict=True)]
        except KeyError as error:
            raise DataError(
                f"{self.given.path} has no line for the test event {error}: the files do not match"
            ) from None
        for pair, place in places.items():
            raise DataError(
                f"{self.given.path}, line {self.given.lines[place]}: the event {pair} is not among the test events: "
                f"the files do not match"
            )
        return np.searchsorted(self.item_ids, self.given.negatives[order])

    # --- rows --------------------------------------------------------------------------------------------------------

    def _rows(self, position: int) -> Iterator[Rows]:
        rng = np.random.default_rng(self.config.seed)
        events = rng.permutation(np.flatnonzero(self.split == TRAIN))
        yield from self._blocks(TRAIN, events, self.item[events], np.ones(len(events), dtype=np.uint8), position)
        for held, cases in self._cases.items():
            stored = cases.keep & (np.cumsum(cases.keep, axis=1) <= self.config.negatives)
            chosen = np.ones((len(stored), 1), dtype=bool)
            case, place = np.nonzero(np.concatenate([chosen, stored], axis=1))
            label = (place == 0).astype(np.uint8)
            items = self.item[cases.events][case].astype(np.int64)
            items[place > 0] = cases.negatives[stored]
            self._case_rows[held] = np.flatnonzero(label)
            yield from self._blocks(held, cases.events[case], items, label, position)

    def _blocks(self, split: int, events: Array, items: Array, label: Array, position: int) -> Iterator[Rows]:
        for start in range(0, len(events), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            frame = self._frame(events[part], items[part], label[part])
            splits = np.full(len(frame), split, dtype=np.uint8)
            yield Rows(frame, np.arange(len(frame)), [], len(frame), position, splits)

    def _frame(self, events: Array, items: Array, label: Array) -> Any:
        """Rows of these events with these items in place of their own."""
        pl = import_polars()
        users = self.user[events]
        columns = {"label": pl.Series(label, dtype=pl.UInt8)}
        stop = np.minimum(events, self.history_end[users])
        if self.history_of:
            columns["dense0"] = pl.Series((stop - self.starts[users]).astype(np.float64))
        for index, feature in enumerate(self.layout.features):
            if feature.kind == "sequence":
                columns[f"feature{index}"] = self._history(users, stop, feature.column)
            elif feature.column in self.attributes[USER].columns:
                columns[f"feature{index}"] = self.attributes[USER][feature.column].gather(users)
            else:
                columns[f"feature{index}"] = self.attributes[ITEM][feature.column].gather(items)
        return pl.DataFrame(columns)

    def _history(self, users: Array, stop: Array, column: str) -> Any:
        """The last values before `stop`, oldest first."""
        pl = import_polars()
        start = np.maximum(self.starts[users], stop - self.config.max_length)
        offsets = offsets_of(stop - start)
        places = np.arange(offsets[-1]) + np.repeat(start - offsets[:-1], stop - start)
        values = self.attributes[ITEM][column].gather(self.item[places]).to_arrow().cast(pa.large_string())
        return pl.Series(pa.LargeListArray.from_arrays(pa.array(offsets), values))

    # --- files beside the splits -------------------------------------------------------------------------------------

    def _finish(self, folder: Path, schema: Schema) -> None:
        items = IdMap.load(id_map_path(folder, ITEM))
        users = IdMap.load(id_map_path(folder, USER)).apply(self.user_ids)
        codes = items.apply(self.item_ids)
        self._item_table(folder, schema, codes).save(folder)
        for held, cases in self._cases.items():
            if len(cases.events):
                RankingCases(
                    row=self._case_rows[held],
                    user=users[self.user[cases.events]],
                    item=codes[self.item[cases.events]],
                    negatives=codes[cases.negatives],
                    keep=cases.keep,
                ).save(folder, SPLITS[held])

    def _item_table(self, folder: Path, schema: Schema, codes: Array) -> ItemTable:
        """The features of each item id; the unseen row, which is no item, has missing or empty ones."""
        feature = schema.feature(ITEM)
        code_of = np.full(feature.num_rows, -1)
        code_of[codes] = np.arange(len(codes))
        code_of[feature.unseen] = -1
        pl = import_polars()
        taken = pl.Series(code_of).replace(-1, None)
        attributes: dict[str, Array | Ragged] = {}
        for raw in self.item_features:
            id_map = IdMap.load(id_map_path(folder, raw.name))
            values = self.attributes[ITEM][raw.column].gather(taken)
            if raw.kind == "categorical":
                attributes[raw.name] = id_map.apply(values.to_arrow())
            else:
                lists = values.fill_null([]).to_arrow()
                lengths = lists.value_lengths().to_numpy()
                attributes[raw.name] = Ragged(id_map.apply(lists.flatten()), offsets_of(lengths))
        return ItemTable(schema, ITEM, attributes)
