"""`prepare --format yelp`."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdall.common.errors import DataError
from holdall.data.formats.yelp import ITEM_COLUMNS, USER_COLUMNS
from holdall.data.prepare import PrepareConfig, prepare
from tests.data.raw_files import read_map, read_split, write_lines
from tests.data.test_taobao import write_set

USERS = ["0 1 10 2 5 2", "1 1 6 1 3 1"]
ITEMS = [f"{item} 3 {item} 0 0 0 0 0 0 0 0 0 1 1 0 0 0 0 " for item in range(6)]


def test_users_and_businesses_have_their_attributes(tmp_path: Path) -> None:
    files = {"u_user": USERS, "u_item": ITEMS, "train_txt": ["0 5 1 4", "1 3 5"], "test_txt": ["0 3", "1 1"]}
    config = PrepareConfig(format="yelp", candidates=1, negatives=1)
    schema = prepare([write_set(tmp_path, **files)], tmp_path / "out", config)
    assert [feature.name for feature in schema.features] == [
        "user",
        *(f"user_{name}" for name in USER_COLUMNS),
        "item",
        *ITEM_COLUMNS,
        "history",
    ]
    assert read_map(tmp_path / "out", "user_useful") == [("10", 3), ("6", 2), (None, 0)]
    assert read_map(tmp_path / "out", "state")[0] == ("5", 2)
    assert read_map(tmp_path / "out", "attribute9")[0] == ("1", 5)
    assert sorted(map(len, read_split(tmp_path / "out", "train")["history"])) == [0, 0, 1, 1, 2]
    assert schema.splits["test"].rows == 3  # no item of training is left that user 0 has not chosen


def test_taobao_is_not_yelp(tmp_path: Path) -> None:
    write_set(tmp_path)
    with pytest.raises(DataError, match=r"u.user, line 1: 9 fields instead of 6 \(user, user_review_count"):
        prepare([tmp_path], tmp_path / "out", PrepareConfig(format="yelp"))
    write_lines(tmp_path / "u.user", USERS)
    with pytest.raises(DataError, match=r"u.item, line 1: 4 fields instead of 18 \(item, city"):
        prepare([tmp_path], tmp_path / "out", PrepareConfig(format="yelp"))
