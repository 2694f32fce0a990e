"""`prepare --format movielens`: leave-one-out, attributes, NCF's files, and their irregularities."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdall.common.errors import ConfigError, DataError
from holdall.data.dataset import DataSet
from holdall.data.id_map import load_id_maps
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.ranking_cases import RankingCases
from holdall.data.schema import Schema
from tests.data.raw_files import read_map, read_split, write_lines

# user::item::rating::time; user 1's last is film 30, user 2's 20; user 3 has one event.
RATINGS = ["1::10::5::100", "1::20::3::300", "1::30::4::900", "2::10::1::50", "2::20::5::60", "3::40::2::70"]


def run(folder: Path, *files: Path, **options: Any) -> Schema:
    return prepare(
        files, folder / "out", PrepareConfig(format="movielens", **{"candidates": 2, "valid": 0.0, **options})
    )


def events(folder: Path, split: str) -> list[tuple[Any, ...]]:
    """(user, item, label) with raw values; unseen ones are None."""
    maps = load_id_maps(folder)
    columns = read_split(folder, split)
    names = [feature.name for feature in Schema.load(folder).features if feature.one_hot]
    places = [names.index("user"), names.index("item")]
    values = [maps[name].values.to_pylist() for name in ("user", "item")]
    pairs = [tuple(value[ids[place]] for place, value in zip(places, values, strict=True)) for ids in columns["ids"]]
    return [(*pair, label) for pair, label in zip(pairs, columns["label"], strict=True)]


# --- GroupLens's own files ------------------------------------------------------------------------------------------


def test_the_last_event_of_each_user_is_the_test(tmp_path: Path) -> None:
    schema = run(tmp_path, write_lines(tmp_path / "ratings.dat", RATINGS), negatives=0)
    train = [("1", "10", 1), ("1", "20", 1), ("2", "10", 1), ("3", "40", 1)]
    assert sorted(events(tmp_path / "out", "train")) == train
    # Film 30 was never seen in training; user 3 has one event, which is trained on.
    assert events(tmp_path / "out", "test") == [("1", None, 1), ("2", "20", 1)]
    counts = schema.source["counts"]
    assert (counts["users_with_one_event"], counts["held_out_events_of_unseen_items"]) == (1, 1)
    assert [feature.name for feature in schema.features] == ["user", "item"]
    assert schema.source["rows"] == 6


def test_csv_of_the_larger_sets(tmp_path: Path) -> None:
    lines = ["userId,movieId,rating,timestamp", *(line.replace("::", ",").replace(",5,", ",4.5,") for line in RATINGS)]
    with gzip.open(tmp_path / "ratings.csv.gz", "wt") as file:
        file.write("\r\n".join(lines) + "\r\n")
    run(tmp_path, tmp_path / "ratings.csv.gz", negatives=0)
    assert events(tmp_path / "out", "test") == [("1", None, 1), ("2", "20", 1)]


def test_equal_times_are_in_file_order_and_repeated_events_are_dropped(tmp_path: Path) -> None:
    lines = ["1::10::5::7", "1::20::5::7", "1::10::2::7", "1::30::1::6", "2::30::1::6", "2::20::1::6", "2::20::1::6"]
    schema = run(tmp_path, write_lines(tmp_path / "ratings.dat", lines), negatives=0)
    assert events(tmp_path / "out", "test") == [("1", None, 1), ("2", None, 1)]  # film 20, which nobody is left with
    assert sorted(events(tmp_path / "out", "train")) == [("1", "10", 1), ("1", "30", 1), ("2", "30", 1)]
    assert schema.source["counts"]["duplicate_events"] == 2


def test_attributes_are_joined_where_their_files_are_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "ratings.dat", RATINGS)
    write_lines(tmp_path / "users.dat", ["1::F::1::10::48067", "2::M::56::16::70072"])
    movies = [
        "10::Amélie: le film (2001)::Comedy|Romance",
        "20::Heat (1995)::Action",
        "40::No year::(no genres listed)",
    ]
    (tmp_path / "movies.dat").write_bytes("".join(line + "\n" for line in movies).encode("latin-1"))
    schema = run(tmp_path, tmp_path, negatives=1)  # the folder stands for its files
    out = tmp_path / "out"
    names = [feature.name for feature in schema.features]
    assert names == ["user", "gender", "age", "occupation", "zip", "item", "year", "genres"]
    assert dict(read_map(out, "gender")) == {"F": 2, "M": 1, "": 1, None: 0}
    assert dict(read_map(out, "year")) == {"2001": 2, "1995": 1, "": 1, None: 0}
    assert dict(read_map(out, "genres")) == {"Comedy": 2, "Romance": 2, "Action": 1, None: 0}
    counts = schema.source["counts"]
    assert (counts["users_without_attributes"], counts["items_without_attributes"]) == (1, 1)
    genres, items = load_id_maps(out)["genres"].values.to_pylist(), load_id_maps(out)["item"].values.to_pylist()
    place = [f.name for f in schema.features if f.one_hot].index("item")
    train = read_split(out, "train")
    found = {
        items[ids[place]]: [genres[g] for g in bag] for ids, bag in zip(train["ids"], train["genres"], strict=True)
    }
    assert found == {"10": ["Comedy", "Romance"], "20": ["Action"], "40": []}


def test_movies_of_the_larger_sets(tmp_path: Path) -> None:
    write_lines(tmp_path / "ratings.csv", ["userId,movieId,rating,timestamp", "1,10,4.0,1", "1,20,0.5,2", "2,20,1.0,3"])
    write_lines(
        tmp_path / "movies.csv", ["movieId,title,genres", '10,"Piano, The (1993)",Drama', "20,Été (2014),War|Drama"]
    )
    schema = run(tmp_path, tmp_path)
    assert dict(read_map(tmp_path / "out", "year")) == {"1993": 1, "2014": 1, None: 0}
    assert dict(read_map(tmp_path / "out", "genres")) == {"Drama": 2, "War": 1, None: 0}
    assert schema.source["bad_rows"] == 0


def test_the_event_before_the_last_can_be_the_validation(tmp_path: Path) -> None:
    lines = [f"{user}::{item}::3::{100 + item}" for user in range(40) for item in range(5)]
    run(tmp_path, write_lines(tmp_path / "ratings.dat", lines), valid=0.5, negatives=0, candidates=1)
    assert {item for _, item, _ in events(tmp_path / "out", "test")} == {None}  # film 4, which is everybody's last
    valid = events(tmp_path / "out", "valid")
    assert {item for _, item, _ in valid} == {"3"}
    assert 10 < len(valid) < 30
    assert len(events(tmp_path / "out", "train")) == 40 * 4 - len(valid)
    assert len(RankingCases.load(tmp_path / "out", "valid")) == len(valid)


def test_validation_holds_out_one_more_event_of_every_user_unless_told_otherwise(tmp_path: Path) -> None:
    lines = [f"{user}::{item}::3::{100 + item}" for user in range(5) for item in range(4)]
    lines += ["8::2::3::1", "8::1::3::2"]
    schema = run(tmp_path, write_lines(tmp_path / "ratings.dat", lines), valid=None, negatives=0, candidates=1)
    assert schema.source["options"]["valid"] == 1.0
    assert events(tmp_path / "out", "valid") == [(str(user), "2", 1) for user in range(5)]
    assert len(events(tmp_path / "out", "test")) == 6
    assert sorted(events(tmp_path / "out", "train"))[-1] == ("8", "2", 1)  # who has nothing left to hold out
    assert schema.source["counts"]["users_without_valid_event"] == 1
    assert "valid" not in run(tmp_path, tmp_path / "ratings.dat", overwrite=True).splits
    assert PrepareConfig(format="taobao").valid_fraction == PrepareConfig().valid_fraction == 0.0
    with pytest.raises(ConfigError, match=r"valid is 1.5: it must be a fraction of the users"):
        PrepareConfig(format="movielens", valid=1.5)


def test_held_out_events_come_with_negatives_and_ranking_cases(tmp_path: Path) -> None:
    lines = [f"{user}::{(user * 7 + k) % 50}::3::{k}" for user in range(30) for k in range(6)]
    run(tmp_path, write_lines(tmp_path / "ratings.dat", lines), negatives=3, candidates=20)
    cases = RankingCases.load(tmp_path / "out", "test")
    assert cases.negatives.shape == (30, 20)
    assert cases.keep.all()
    items = load_id_maps(tmp_path / "out")["item"].values.to_pylist()
    rows = events(tmp_path / "out", "test")
    assert [label for _, _, label in rows] == [1, 0, 0, 0] * 30
    for case in range(30):
        user = int(rows[cases.row[case]][0])
        chosen = {str((user * 7 + k) % 50) for k in range(6)}
        drawn = [items[item] for item in cases.negatives[case]]
        assert len(set(drawn)) == 20
        assert not chosen & set(drawn)
        assert [item for _, item, _ in rows[cases.row[case] :][:4]] == [str((user * 7 + 5) % 50), *drawn[:3]]
    data = DataSet(tmp_path / "out", "test")
    for batch, keep in cases.batches(data, cases_at_once=7):
        assert batch.label.view(keep.shape)[:, 0].all()
        assert batch.label.sum() == len(keep)
        assert (batch.ids.values[0].view(keep.shape) == batch.ids.values[0].view(keep.shape)[:, :1]).all()


def test_users_with_few_items_left_get_what_there_is(tmp_path: Path) -> None:
    lines = [f"{user}::{item}::3::{item}" for user in range(3) for item in range(4 if user else 5)]
    run(tmp_path, write_lines(tmp_path / "ratings.dat", lines), negatives=9, candidates=9)
    cases = RankingCases.load(tmp_path / "out", "test")
    assert cases.keep.sum(axis=1).tolist() == [0, 0, 0]  # items 0..3 are all they could be asked about
    assert [label for _, _, label in events(tmp_path / "out", "test")] == [1, 1, 1]


def test_the_same_seed_gives_the_same_files_and_another_another(tmp_path: Path) -> None:
    raw = write_lines(
        tmp_path / "ratings.dat", [f"{u}::{(u * 7 + k) % 50}::3::{k}" for u in range(30) for k in range(6)]
    )
    config = {"format": "movielens", "candidates": 5, "valid": 0.0}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        prepare([raw], tmp_path / name, PrepareConfig(seed=seed, **config))  # type: ignore[arg-type]
    read = {name: (tmp_path / name / "ranking-test.arrow").read_bytes() for name in "abc"}
    assert read["a"] == read["b"] != read["c"]
    assert read_split(tmp_path / "a", "train") == read_split(tmp_path / "b", "train")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("1\t20\t5\t978", "1 column instead of 4 columns separated by '::'"),
        ("1,20,5,978", "1 column instead of 4 columns separated by '::'"),
        ("1::20::5", "3 columns instead of 4"),
        ("one::20::5::978", "user or item or timestamp is not a whole number"),
        ("1::20.5::5::978", "user or item or timestamp is not a whole number"),
        ("1::::5::978", "user or item or timestamp is not a whole number"),
        ("", "an empty line"),
    ],
)
def test_bad_ratings_are_named(tmp_path: Path, line: str, reason: str) -> None:
    raw = write_lines(tmp_path / "ratings.dat", [*RATINGS, line])
    with pytest.raises(DataError, match=rf"ratings.dat, line 7: {reason}"):
        run(tmp_path, raw)
    schema = run(tmp_path, raw, bad_rows="skip", negatives=0)
    assert schema.source["bad_rows"] == 1
    assert schema.splits["train"].rows == 4
    assert (tmp_path / "out/bad_rows.tsv").read_text().splitlines()[1].endswith(f"\t{line}")


def test_files_of_another_version_are_refused(tmp_path: Path) -> None:
    raw = write_lines(tmp_path / "ratings.csv", ["userId,movieId,rating,time", "1,2,3,4"])
    with pytest.raises(DataError, match=r"ratings.csv has no column 'timestamp' \(did you mean 'time'"):
        run(tmp_path, raw)
    raw = write_lines(tmp_path / "ratings.csv", ["userId\tmovieId\trating\ttimestamp", "1\t2\t3\t4"])
    with pytest.raises(DataError, match=r"ratings.csv has no column 'userId'"):
        run(tmp_path, raw)
    raw = write_lines(tmp_path / "ratings.dat", ["1,2,3,4"] * 3)
    with pytest.raises(DataError, match=r"the files hold no events"):
        run(tmp_path, raw, bad_rows="skip")
    write_lines(tmp_path / "ratings.dat", RATINGS)
    users = write_lines(tmp_path / "users.dat", ["1::F::1::10::48067", "2::F::1::10", "1::M::1::10::48067"])
    with pytest.raises(DataError, match=r"users.dat, line 2: 4 fields instead of 5 \(user, gender"):
        run(tmp_path, tmp_path / "ratings.dat", users)
    run(tmp_path, tmp_path / "ratings.dat", users, bad_rows="skip")
    listed = (tmp_path / "out/bad_rows.tsv").read_text().splitlines()
    assert "line 1 already" in listed[2]


def test_sources_that_are_not_the_set(tmp_path: Path) -> None:
    other = write_lines(tmp_path / "links.csv", ["x"])
    with pytest.raises(ConfigError, match=r"links.csv is none of the files of this data set"):
        run(tmp_path, other)
    with pytest.raises(DataError, match=r"holds none of the files of this data set \(users.dat"):
        run(tmp_path, tmp_path)
    movies = write_lines(tmp_path / "movies.csv", ["1,a,b"])
    with pytest.raises(DataError, match=r"the ratings of the data set \(ratings.dat or ratings.csv\) are not among"):
        run(tmp_path, movies)
    both = [write_lines(tmp_path / name, RATINGS) for name in ("ratings.dat", "ratings.csv")]
    with pytest.raises(ConfigError, match=r"are both the ratings of the data set"):
        run(tmp_path, *both)


# --- NCF's files ----------------------------------------------------------------------------------------------------


def ncf_files(folder: Path, negatives: list[str] | None, pairs: list[str] | None = None) -> list[Path]:
    pairs = pairs or ["0\t0", "0\t1", "1\t1", "1\t2", "2\t3"]
    test = ["0\t2\t5\t978", "1\t0\t3\t978", "2\t9\t1\t978"]
    files = [write_lines(folder / "s.train.pairs.tsv", pairs), write_lines(folder / "s.test.rating", test)]
    return files if negatives is None else [*files, write_lines(folder / "s.test.negative", negatives)]


NEGATIVES = ["(0,2)\t3\t2\t3", "(1,0)\t3\t7\t2", "(2,9)\t0\t1\t2"]


def test_negatives_that_are_the_positive_or_stand_twice_do_not_count(tmp_path: Path) -> None:
    schema = run(tmp_path, *ncf_files(tmp_path, NEGATIVES), negatives=2)
    cases = RankingCases.load(tmp_path / "out", "test")
    users = load_id_maps(tmp_path / "out")["user"].values.to_pylist()
    keep = {users[user]: row.tolist() for user, row in zip(cases.user, cases.keep, strict=True)}
    assert keep == {"0": [True, False, False], "1": [True] * 3, "2": [True] * 3}
    counts = schema.source["counts"]
    assert (counts["negatives_equal_positive"], counts["negatives_repeated"]) == (1, 1)
    assert (counts["negatives_of_unseen_items"], counts["held_out_events_of_unseen_items"]) == (1, 1)
    item = schema.feature("item")
    place = [users[user] for user in cases.user].index("1")
    assert cases.negatives[place, 1] == item.unseen  # item 7
    # Rows of the test split: each event, then the first two negatives that count.
    assert [row for row in events(tmp_path / "out", "test") if row[0] == "0"] == [("0", "2", 1), ("0", "3", 0)]


def test_without_negatives_they_are_drawn(tmp_path: Path) -> None:
    run(tmp_path, *ncf_files(tmp_path, None), candidates=1)
    cases = RankingCases.load(tmp_path / "out", "test")
    items = load_id_maps(tmp_path / "out")["item"].values.to_pylist()
    users = load_id_maps(tmp_path / "out")["user"].values.to_pylist()
    drawn = {users[user]: items[row[0]] for user, row in zip(cases.user, cases.negatives, strict=True)}
    assert (drawn["0"], drawn["1"]) == ("3", "3")  # what is left to them
    assert drawn["2"] in {"0", "1", "2"}


def test_pairs_without_times_hold_out_random_events(tmp_path: Path) -> None:
    pairs = [f"{user}\t{item}" for user in range(200) for item in range(4)]
    test = [f"{user}\t9\t1\t0" for user in range(200)]
    files = [write_lines(tmp_path / "s.train.pairs.tsv", pairs), write_lines(tmp_path / "s.test.rating", test)]
    run(tmp_path, *files, valid=0.8, negatives=0, candidates=1)
    valid = events(tmp_path / "out", "valid")
    counts = np.unique([item for _, item, _ in valid], return_counts=True)[1]
    assert len(counts) == 4  # any of the four, about equally often
    assert counts.min() > 20
    assert len({user for user, _, _ in valid}) == len(valid)


def test_rating_files_of_ncf_have_times(tmp_path: Path) -> None:
    train = write_lines(tmp_path / "s.train.rating", ["0\t5\t1\t900", "0\t6\t1\t100", "0\t7\t1\t500"])
    test = write_lines(tmp_path / "s.test.rating", ["0\t8\t5\t978"])
    run(tmp_path, train, test, valid=0.89, negatives=0, candidates=1, seed=1)
    assert events(tmp_path / "out", "valid") == [("0", None, 1)]
    assert sorted(events(tmp_path / "out", "train")) == [("0", "6", 1), ("0", "7", 1)]


@pytest.mark.parametrize(
    ("negatives", "error"),
    [
        (["(0,2)\t3\t1", "(1,0)\t3", "(2,9)\t0\t1"], "line 2: 1 negatives instead of 2, as on line 1"),
        (["0,2\t3\t1", *NEGATIVES[1:]], r"line 1: the line is not '\(user,item\)' and then items"),
        (["(0,2) 3 1", *NEGATIVES[1:]], r"line 1: the line is not '\(user,item\)' and then items"),
        (NEGATIVES[:2], r"s.test.negative has no line for the test event \(2, 9\)"),
        ([*NEGATIVES, "(7,7)\t1\t2\t3"], r"line 4: the event \(7, 7\) is not among the test events"),
    ],
)
def test_negatives_that_do_not_fit_are_named(tmp_path: Path, negatives: list[str], error: str) -> None:
    with pytest.raises(DataError, match=error):
        run(tmp_path, *ncf_files(tmp_path, negatives))


def test_test_events_that_training_has_are_repeated_ones(tmp_path: Path) -> None:
    files = ncf_files(tmp_path, None, ["0\t0", "0\t2", "1\t1", "2\t3"])
    schema = run(tmp_path, *files, negatives=0)
    assert schema.source["counts"]["duplicate_events"] == 1
    assert [user for user, _, _ in events(tmp_path / "out", "test")] == ["1", "2"]


def test_large_ids_stay_exact_beside_lines_that_are_refused(tmp_path: Path) -> None:
    item = str(2**53 + 1)
    raw = write_lines(tmp_path / "ratings.dat", [f"1::{item}::5::100", "1::2::5::200", "1::3::5::x"])
    run(tmp_path, raw, negatives=0, bad_rows="skip")
    assert events(tmp_path / "out", "train") == [("1", item, 1)]


@pytest.mark.parametrize(
    "line", ['1,"Toy (1995),Comedy', '1,Toy (1995),"Comedy', '1,"Toy" x,Comedy', '1,"' + "x" * 200_000]
)
def test_movies_with_wrong_quotes_are_refused(tmp_path: Path, line: str) -> None:
    ratings = write_lines(tmp_path / "ratings.csv", ["userId,movieId,rating,timestamp", "1,1,5,1", "1,2,5,2"])
    movies = write_lines(tmp_path / "movies.csv", ["movieId,title,genres", "2,B (1990),Drama", line])
    with pytest.raises(DataError, match=r"movies.csv, line 3: \d field"):
        run(tmp_path, ratings, movies)


@pytest.mark.parametrize("pair", ["(" + "9" * 30 + ",10)", "(\u0661,10)"])
def test_negatives_of_ids_that_are_no_ids_are_refused(tmp_path: Path, pair: str) -> None:
    train = write_lines(tmp_path / "a.train.rating", ["0\t10\t5\t1", "0\t20\t5\t2"])
    test = write_lines(tmp_path / "a.test.rating", ["0\t30\t5\t3"])
    given = write_lines(tmp_path / "a.test.negative", [f"{pair}\t20"])
    with pytest.raises(DataError, match=r"a.test.negative, line 1: the line is not '\(user,item\)'"):
        run(tmp_path, train, test, given)


def test_a_separator_of_one_character_is_not_that_of_the_file(tmp_path: Path) -> None:
    raw = write_lines(tmp_path / "ratings.dat", [RATINGS[0], "1\x1f20\x1f3\x1f300", *RATINGS[2:]])
    with pytest.raises(DataError, match=r"ratings.dat, line 2: \d+ columns instead of 4 columns separated by '::'"):
        run(tmp_path, raw)
