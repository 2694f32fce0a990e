"""Reader of Taobao: ad clicks with attributes of users and ads, the data of TBSM in the FAE papers.

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

USER_COLUMNS = (
    "cms_segid",
    "cms_group_id",
    "gender",
    "age",
    "pvalue",
    "shopping",
    "occupation",
    "new_user_class",
)
ITEM_COLUMNS = ("category", "brand", "price")


def open_taobao(sources: Sequence[str | Path], out: Path, config: PrepareConfig) -> RawData:
    return open_lists(
        sources,
        out,
        config,
        user_columns=USER_COLUMNS,
        item_columns=ITEM_COLUMNS,
        history_of=("item", "category"),
    )
