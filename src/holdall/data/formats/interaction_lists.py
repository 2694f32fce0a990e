"""Data sets of four files: `train.txt`, `test.txt` (a user and its items, in order), `u.user`, `u.item` (attributes).

All ids are whole numbers and fields are separated by spaces. `test.txt` holds each user's later events. A row has the
user, the item, their attributes, the items before it (and one attribute of them, where the set names it) as sequences,
and one number, how many events the user had before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdall.data.formats.id_files import read_attributes, read_id_lists
from holdall.data.implicit import ITEM, USER, Implicit, Parse
from holdall.data.layout import RawFeature
from holdall.data.raw_data import RawData, find_roles
from holdall.data.rows import Refused
from holdall.data.splits import TEST, TRAIN

if TYPE_CHECKING:
    from holdall.data.prepare import PrepareConfig

ROLES: dict[str, tuple[str, ...]] = {
    "user attributes": ("u.user",),
    "item attributes": ("u.item",),
    "training events": ("train.txt",),
    "test events": ("test.txt",),
}


def open_lists(
    sources: Sequence[str | Path],
    out: Path,
    config: PrepareConfig,
    *,
    user_columns: tuple[str, ...],
    item_columns: tuple[str, ...],
    history_of: tuple[str, ...],
) -> RawData:
    """The columns are those of `u.user` and `u.item` after the id; user's are named `user_...` as features."""
    files = find_roles(sources, out, ROLES, needed=tuple(ROLES))
    user_names = tuple(f"user_{name}" for name in user_columns)
    data = Implicit(
        config,
        user_features=tuple(RawFeature(name=name, column=name) for name in user_names),
        item_features=tuple(RawFeature(name=name, column=name) for name in item_columns),
        history_of=history_of,
    )

    def attributes(key: str, names: tuple[str, ...]) -> Parse:
        def parse(path: Path) -> Iterator[list[Refused]]:
            data.attributes[key] = yield from read_attributes(
                path, (key, *names), max_value_bytes=config.max_value_bytes
            )

        return parse

    def events(split: int) -> Parse:
        def parse(path: Path) -> Iterator[list[Refused]]:
            users, items, num_empty = yield from read_id_lists(path)
            data.counts["users_without_events"] = data.counts.get("users_without_events", 0) + num_empty
            data.add_events(users, items, split)

        return parse

    parsers = (attributes(USER, user_names), attributes(ITEM, item_columns), events(TRAIN), events(TEST))
    return data.raw_data(dict(zip(files.values(), parsers, strict=True)))
