"""Reader of Yelp: reviews as events, with attributes of users and businesses.

Its files are described in `interaction_lists.py`; the numbers in `u.user` and `u.item` are classes already, so all of
them are categorical.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdall.data.formats.interaction_lists import open_lists
from holdall.data.raw_data import RawData

if TYPE_CHECKING:
    from holdall.data.prepare import PrepareConfig

USER_COLUMNS = ("review_count", "useful", "elite", "fans", "average_stars")
NUM_ATTRIBUTES = 14  # of a business, after its place and its number of reviews
ITEM_COLUMNS = ("city", "state", "review_count", *(f"attribute{number}" for number in range(1, NUM_ATTRIBUTES + 1)))


def open_yelp(sources: Sequence[str | Path], out: Path, config: PrepareConfig) -> RawData:
    return open_lists(
        sources,
        out,
        config,
        user_columns=USER_COLUMNS,
        item_columns=ITEM_COLUMNS,
        history_of=("item",),
    )
