"""Negative sampling: items that a user did not choose, drawn for training and for ranking.

Every draw is a hash of what it is for (seed, epoch, sample, place), so it depends neither on the number of processes
nor on where a run was resumed. A draw that hits one of the user's own items is drawn again; membership is a binary
search in the sorted codes `user * num_items + item`, 8 bytes a pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from holdall.common.errors import ConfigError, DataError
from holdall.data.batch import Batch
from holdall.data.columns import Columns, Ragged
from holdall.data.dataset import DataSet
from holdall.data.items import ITEMS_FILE, ItemTable, feature_columns
from holdall.data.loader import Loader
from holdall.data.splits import hash_numbers

Array = npt.NDArray[Any]
ROUNDS = 32  # of drawing again; a user who chose half of all items needs more once in 2^32 draws
CASES_AT_ONCE = 8192


class Positives:
    """Known pairs of user and item."""

    def __init__(self, users: Array, items: Array, num_items: int):
        self.num_items = num_items
        self.codes = np.unique(self._codes(users, items))

    @classmethod
    def of(cls, data: DataSet, user: str = "user", item: str = "item") -> Positives:
        """The pairs with label 1 of a split."""
        columns = data.columns(0, len(data))
        wanted = feature_columns(data.schema, (user, item))
        chosen = columns.label == 1
        users, items = (columns.ids[chosen, place] for place in wanted)
        return cls(users, items, data.schema.feature(item).num_rows)

    def _codes(self, users: Array, items: Array) -> npt.NDArray[np.int64]:
        return users.astype(np.int64) * self.num_items + items

    def contains(self, users: Array, items: Array) -> npt.NDArray[np.bool_]:
        codes = self._codes(users, items)
        places = np.searchsorted(self.codes, codes)
        found = places < len(self.codes)
        found[found] = self.codes[places[found]] == codes[found]
        return found

    def items_of(self, user: int) -> npt.NDArray[np.int64]:
        bounds = np.searchsorted(self.codes, [user * self.num_items, (user + 1) * self.num_items])
        return self.codes[bounds[0] : bounds[1]] - user * self.num_items

    def others(self, user: int, catalogue: Array) -> Array:
        """The items of the catalogue that the user has not chosen."""
        return np.setdiff1d(catalogue, self.items_of(user), assume_unique=True)


def draw_negatives(keys: Array, users: Array, known: Positives, catalogue: Array) -> Array:
    """[N] items, one for each key and user: uniform over the catalogue without the user's own items."""
    drawn = np.empty(len(keys), dtype=np.int64)
    left = np.arange(len(keys))
    for attempt in range(ROUNDS):
        drawn[left] = pick(keys[left], attempt, catalogue)
        left = left[known.contains(users[left], drawn[left])]
        if not len(left):
            return drawn
    for row in left.tolist():  # users who have chosen nearly everything
        others = known.others(int(users[row]), catalogue)
        if not len(others):
            raise DataError(
                f"the user with id {int(users[row])} has chosen all {len(catalogue):,} items, so there is no negative "
                f"to draw: leave this user out of the data"
            )
        drawn[row] = pick(keys[row : row + 1], ROUNDS, others)[0]
    return drawn


def draw_candidates(
    users: Array, known: Positives, catalogue: Array, num: int, seed: int
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """[C, num] different items for each of C users, none of their own, and which of them to keep.

    All are kept unless the catalogue has fewer than `num` others for a user; then the rest of the row is padding.
    """
    drawn = np.zeros((len(users), num), dtype=np.int64)
    keep = np.ones((len(users), num), dtype=bool)
    for start in range(0, len(users), CASES_AT_ONCE):
        part = slice(start, start + CASES_AT_ONCE)
        keys = hash_numbers(np.arange(start * num, start * num + drawn[part].size), seed).reshape(-1, num)
        left = np.arange(len(keys))
        wrong = np.ones(keys.shape, dtype=bool)
        for attempt in range(ROUNDS):
            items = drawn[part][left]
            items[wrong] = pick(keys[left][wrong], attempt, catalogue)
            drawn[start + left] = items
            own = known.contains(np.repeat(users[part][left], num), items.ravel()).reshape(items.shape)
            wrong = own | repeated(items)
            unfinished = wrong.any(axis=1)
            left, wrong = left[unfinished], wrong[unfinished]
            if not len(left):
                break
        for case in (start + left).tolist():  # users with few others: list them all
            others = known.others(int(users[case]), catalogue)
            order = np.argsort(hash_numbers(others, seed + case), kind="stable")[:num]
            drawn[case, : len(order)] = others[order]
            keep[case, len(order) :] = False
    return drawn, keep


def pick(keys: Array, attempt: int, catalogue: Array) -> Array:
    return catalogue[(hash_numbers(keys, attempt) % np.uint64(len(catalogue))).astype(np.int64)]


def repeated(items: Array) -> npt.NDArray[np.bool_]:
    """[C, n]: whether a value occurs earlier in its row."""
    order = np.argsort(items, axis=1, kind="stable")
    ordered = np.take_along_axis(items, order, axis=1)
    again = np.zeros(items.shape, dtype=bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    back = np.zeros(items.shape, dtype=bool)
    np.put_along_axis(back, order, again, axis=1)
    return back


class NegativeSampling(Loader):
    """Loader of a split of positives, each followed by `num_negatives` negatives that are drawn anew in every epoch.

    Its batches have B * (1 + num_negatives) rows: a positive, then its negatives, which are the same row with another
    item (and that item's attributes) and label 0. Items are those of the training split, drawn uniformly; the user's
    own of this split are left out, those held out for validation and test are not, since training cannot know them.
    """

    def __init__(self, data: DataSet, batch_size: int, *, num_negatives: int = 4, **options: Any):
        super().__init__(data, batch_size, **options)
        if num_negatives < 1:
            raise ConfigError(
                f"num_negatives is {num_negatives}, but must be 1 or more: use a Loader for positives alone"
            )
        if len(data) and not data.labels().all():
            raise DataError(
                f"split '{data.split}' of {data.folder} has rows with label 0: negatives are drawn for splits of "
                f"positives alone, such as the train split of an implicit data set"
            )
        self.num_negatives = num_negatives
        self.items = ItemTable.load(data.folder, data.schema)
        self.known = Positives.of(data, item=self.items.item)
        feature = data.schema.feature(self.items.item)
        self.catalogue = np.delete(np.arange(feature.num_rows), feature.unseen)
        self._user = feature_columns(data.schema, ("user",))[0]

    def global_size(self, batch: int) -> int:
        return super().global_size(batch) * (1 + self.num_negatives)

    @property
    def num_samples(self) -> int:
        return super().num_samples * (1 + self.num_negatives)

    def _order(self) -> dict[str, Any]:
        return {**super()._order(), "num_negatives": self.num_negatives}

    @property
    def _gives_views(self) -> bool:
        return False

    def _batches(self, epoch: int, start_batch: int) -> Iterator[Batch]:
        stream = int(hash_numbers(np.array([epoch]), self.seed)[0])
        for number, batch in enumerate(super()._batches(epoch, start_batch), start=start_batch):
            first = number * self.batch_size
            size = min(self.batch_size, len(self.data) - first)
            yield self.expand(batch, first + size * self.rank // self.world_size, stream)

    def expand(self, batch: Batch, first_sample: int, stream: int) -> Batch:
        """The batch with negatives; its first row is sample `first_sample` of the epoch."""
        columns = columns_of(batch, [feature.one_hot for feature in self.data.schema.features])
        num = self.num_negatives
        samples = np.repeat(np.arange(first_sample, first_sample + len(columns)), num)
        keys = hash_numbers(samples * num + np.tile(np.arange(num), len(columns)), stream)
        users = np.repeat(columns.ids[:, self._user], num)
        negatives = draw_negatives(keys, users, self.known, self.catalogue).reshape(-1, num)
        return self.items.candidates(columns, negatives)


def training_loader(data: DataSet, batch_size: int, *, num_negatives: int = 4, **options: Any) -> Loader:
    """Loader for a split: with negatives for a split of positives alone, otherwise, or for none of them, a plain one.

    `batch_size` counts all rows of a batch; with negatives a batch has the most whole groups that fit, at least one.
    """
    if not num_negatives or not (data.folder / ITEMS_FILE).exists():
        return Loader(data, batch_size, **options)
    positives = max(1, batch_size // (1 + num_negatives))
    return NegativeSampling(data, positives, num_negatives=num_negatives, **options)


def positive_rate(data: DataSet, num_negatives: int = 4) -> float:
    """Share of label 1 among the rows that `training_loader` gives, by weight where they have weights; above 0 and
    below 1 also where all are alike."""
    if num_negatives and (data.folder / ITEMS_FILE).exists():
        return 1 / (1 + num_negatives)
    split = data.schema.splits[data.split]
    if split.weights is not None:
        return (split.weights[1] + 0.5) / (sum(split.weights) + 1)
    return (split.positives + 0.5) / (split.rows + 1)


def columns_of(batch: Batch, one_hot: list[bool]) -> Columns:
    """The rows of a batch on the host, as arrays."""
    label, dense = batch.label.numpy().astype(np.uint8), batch.dense.numpy()
    if batch.ids.offsets is None:
        return Columns(label=label, dense=dense, ids=batch.ids.values.t().numpy())
    singles, bags = [], []
    for feature, single in enumerate(one_hot):
        values, offsets, _ = batch.ids.bag(feature)
        if single:
            singles.append(values.numpy())
        else:
            assert offsets is not None
            bags.append(Ragged(values.numpy(), offsets.numpy()))
    ids = np.stack(singles, axis=1) if singles else np.zeros((len(label), 0), dtype=np.int32)
    return Columns(label=label, dense=dense, ids=ids, bags=tuple(bags))
