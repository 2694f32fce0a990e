"""`prepare --format taobao`: attributes, histories that share the item's table, given test events, and bad files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdall.common.errors import ConfigError, DataError
from holdall.data.formats.taobao import USER_COLUMNS
from holdall.data.id_map import load_id_maps
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema
from tests.data.raw_files import read_map, read_split, write_lines

USERS = ["0 8 2 2 2 2 3 0 3 ", "1 0 4 2 4 0 3 0 4 ", "2 0 3 2 3 0 3 0 3 "]
ITEMS = [f"{item} {item % 3} {item % 2} 1" for item in range(8)]
TRAIN = ["0 5 1 4 2", "1 3 5", "2 0"]
TEST = ["0 6 7", "1 1"]


def write_set(folder: Path, **files: list[str]) -> Path:
    contents = {"u.user": USERS, "u.item": ITEMS, "train.txt": TRAIN, "test.txt": TEST}
    contents |= {name.replace("_", "."): lines for name, lines in files.items()}
    for name, lines in contents.items():
        (folder / name).write_text("".join(line + "\r\n" for line in lines), newline="")
    return folder


def run(folder: Path, **options: Any) -> Schema:
    config = {"max_length": 3, "negatives": 1, "candidates": 2, **options}
    return prepare([folder], folder / "out", PrepareConfig(format="taobao", **config))


def rows(folder: Path, split: str) -> dict[tuple[str | None, ...], dict[str, Any]]:
    """Rows by (user, item, label), with raw values; unseen ones are None."""
    schema, maps, columns = Schema.load(folder), load_id_maps(folder), read_split(folder, split)
    singles = [feature.name for feature in schema.features if feature.one_hot]
    found = {}
    for row, ids in enumerate(columns["ids"]):
        values = {name: maps[name].values[id].as_py() for name, id in zip(singles, ids, strict=True)}
        for name in ("history", "history_category"):
            values[name] = [maps[name].values[id].as_py() for id in columns[name][row]]
        values["num_events"] = columns["dense"][row][0]
        found[values["user"], values["item"], columns["label"][row]] = values
    return found


def test_rows_have_attributes_and_the_items_before(tmp_path: Path) -> None:
    schema = run(write_set(tmp_path), dense="none")
    train = rows(tmp_path / "out", "train")
    assert set(train) == {("0", i, 1) for i in "5142"} | {("1", "3", 1), ("1", "5", 1), ("2", "0", 1)}
    fourth = train["0", "2", 1]
    assert (fourth["history"], fourth["history_category"]) == (["5", "1", "4"], ["2", "1", "1"])
    assert (fourth["category"], fourth["brand"], fourth["user_cms_segid"], fourth["num_events"]) == ("2", "0", "8", 3.0)
    assert train["0", "5", 1]["history"] == []
    names = [feature.name for feature in schema.features]
    assert names == [
        "user",
        *(f"user_{name}" for name in USER_COLUMNS),
        *("item", "category", "brand", "price", "history", "history_category"),
    ]
    history = schema.feature("history")
    assert (history.kind, history.table, history.max_length) == ("sequence", "item", 3)
    assert history.num_rows == schema.feature("item").num_rows
    # Item 5 is the target of two rows and in the history of three.
    assert dict(read_map(tmp_path / "out", "item"))["5"] == 2 + 3


def test_test_events_know_the_last_training_events_alone(tmp_path: Path) -> None:
    schema = run(write_set(tmp_path), dense="none")
    test = rows(tmp_path / "out", "test")
    positives = {key: row for key, row in test.items() if key[2] == 1}
    assert set(positives) == {("0", None, 1), ("1", "1", 1)}  # items 6 and 7 were never trained on
    assert positives["0", None, 1]["history"] == ["1", "4", "2"]  # cut to the last three
    assert positives["0", None, 1]["num_events"] == 4.0
    assert positives["0", None, 1]["category"] == "1"  # of item 7: its category is known
    negatives = [key for key in test if key[2] == 0]
    assert {user for user, _, _ in negatives} == {"0", "1"}
    assert all(item in {"0", "3"} for user, item, _ in negatives if user == "0")
    counts = schema.source["counts"]
    assert counts["held_out_events_of_unseen_items"] == 2
    assert counts["histories_cut"] == 2  # of the two test events of user 0
    assert counts["events_without_history"] == 3


def test_validation_is_the_last_training_event(tmp_path: Path) -> None:
    run(write_set(tmp_path), valid=0.89, seed=2)
    valid = {key: row for key, row in rows(tmp_path / "out", "valid").items() if key[2] == 1}
    assert set(valid) == {("0", None, 1), ("1", "5", 1)}  # item 2 is trained on no more
    assert valid["0", None, 1]["history"] == ["5", "1", "4"]
    assert rows(tmp_path / "out", "test")["0", None, 1]["history"] == ["1", "4", None]
    assert ("2", "0", 1) in rows(tmp_path / "out", "train")  # user 2 has no other


def test_dirt_is_counted(tmp_path: Path) -> None:
    write_set(tmp_path, train_txt=["0 5 1 5 1 2", "1", "2 0", "3 4 1"], test_txt=["0 1 3", "2", "9 5"])
    schema = run(tmp_path, negatives=0)
    counts = schema.source["counts"]
    assert counts["duplicate_events"] == 3  # two in training, and one in the test that training has
    assert counts["users_without_events"] == 2
    assert counts["users_with_one_event"] == 2  # 2, who is trained on, and 9, who is only tested
    assert counts["held_out_events_of_unseen_users"] == 1
    assert counts["users_without_attributes"] == 2  # 3 and 9
    assert set(rows(tmp_path / "out", "test")) == {("0", None, 1), (None, "5", 1)}
    assert rows(tmp_path / "out", "train")["3", "4", 1]["user_gender"] == ""


@pytest.mark.parametrize(
    ("file", "lines", "error"),
    [
        ("train.txt", ["0 5", "1,3,5"], "train.txt, line 2: '1,3,5' is not a whole number: a line is a user and its"),
        ("train.txt", ["0 5", "1 -3"], "train.txt, line 2: '-3' is not a whole number"),
        ("train.txt", ["0 5", "0 4"], "train.txt, line 2: user 0 has line 1 already"),
        ("test.txt", ["0 5", "", "1 4"], "test.txt, line 2: an empty line"),
        ("u.user", ["0 8 2 2 2 2 3 0 3", "1 2"], r"u.user, line 2: 2 fields instead of 9 \(user, user_cms_segid"),
        ("u.user", ["0,8,2,2,2,2,3,0,3"], "u.user, line 1: 1 field instead of 9"),
        ("u.item", ["0 1 1 1", "a 1 1 1"], "u.item, line 2: the item 'a' is not a whole number"),
        ("u.item", ["0 1 1 1", "0 1 1 1"], "u.item, line 2: item 0 has line 1 already"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, file: str, lines: list[str], error: str) -> None:
    write_set(tmp_path)
    write_lines(tmp_path / file, lines)
    with pytest.raises(DataError, match=error):
        run(tmp_path)
    if len(lines) > 1:
        schema = run(tmp_path, bad_rows="skip")
        assert schema.source["bad_rows"] == 1


def test_nothing_to_train_on(tmp_path: Path) -> None:
    write_set(tmp_path, train_txt=["0,5,1", "1,3"])
    with pytest.raises(DataError, match=r"there are no events to train on"):
        run(tmp_path, bad_rows="skip")


def test_options_and_files_that_do_not_fit(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "u.item").unlink()
    with pytest.raises(DataError, match=r"the item attributes of the data set \(u.item\) are not among the sources"):
        run(tmp_path)
    with pytest.raises(ConfigError, match=r"--test-from-last-file is for files of rows"):
        PrepareConfig(format="taobao", test_from_last_file=True)
    with pytest.raises(ConfigError, match=r"max_length is 0"):
        PrepareConfig(format="taobao", max_length=0)
    with pytest.raises(ConfigError, match=r"negatives is -1"):
        PrepareConfig(format="taobao", negatives=-1)
    with pytest.raises(ConfigError, match=r"--positive goes with --format bookcrossing"):
        PrepareConfig(format="taobao", positive="> 3")
    with pytest.raises(ConfigError, match=r"the layout of taobao is known"):
        PrepareConfig(format="taobao", schema=Path("x.toml"))


@pytest.mark.parametrize(
    ("file", "line", "error"),
    [
        ("u.item", b"0 a\xff 1 1", "line 1: byte 0xff"),
        ("u.item", b"0 a 1\r1", "line 1: a carriage return is inside the line"),
        ("train.txt", b"0 5 1\r1 3 5", "line 1: a carriage return is inside the line"),
    ],
)
def test_bytes_that_are_no_text_are_refused(tmp_path: Path, file: str, line: bytes, error: str) -> None:
    (write_set(tmp_path) / file).write_bytes(line + b"\n")
    with pytest.raises(DataError, match=error):
        run(tmp_path)
