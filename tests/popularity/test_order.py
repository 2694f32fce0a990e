"""`order`: ids that occur together become neighbours, only ids change, and data that cannot be ordered is refused."""

from __future__ import annotations

import errno
import json
import shutil
import sys
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import holdall
from benchmarks.session_log import SessionLog, planted, write_sessions
from holdall.cli import main
from holdall.common.errors import CheckpointError, ConfigError, DataError, HoldallError, MissingDependencyError
from holdall.common.files import sha256
from holdall.data.arrow_files import write_batch, write_split_file
from holdall.data.dataset import DataSet, read_columns
from holdall.data.encode import Encoder, encode_rows
from holdall.data.id_map import IdMap, id_map_path, load_id_maps
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.ranking_cases import RankingCases
from holdall.data.schema import Schema
from holdall.data.synthetic import SyntheticConfig, write_prepared
from holdall.popularity import renumber
from holdall.popularity.bijection import Bijection, load_orders, order_path
from holdall.popularity.communities import Communities, find_communities
from holdall.popularity.cooccurrence import count_pairs
from holdall.popularity.order import OrderConfig, community_order, num_hot, order
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import evaluate
from holdall.training.train import train
from tests.data.raw_files import criteo_line, read_map, read_split, write_lines
from tests.edits import edit_json, list_again

pytest.importorskip("igraph", reason="needs holdall[order]")

LOG = SessionLog(rows=30_000, num_ids=1500, communities=15, tags=4, exponent=0.5)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30,000 samples in sessions of 64, in files of 5,000 rows."""
    out = tmp_path_factory.mktemp("order") / "plain"
    write_sessions(LOG, out, rows_per_file=5000)
    return out


@pytest.fixture(scope="module")
def ordered(plain: Path) -> Path:
    order(plain, plain.with_name("ordered"))
    return plain.with_name("ordered")


def raw_rows(folder: Path, split: str) -> dict[str, list[Any]]:
    """The rows of a split with raw values in place of ids."""
    schema, maps, columns = Schema.load(folder), load_id_maps(folder), read_split(folder, split)
    values = {name: id_map.values.to_pylist() for name, id_map in maps.items()}
    singles = [feature.name for feature in schema.features if feature.one_hot]
    found = {name: columns[name] for name in ("label", "dense", "probability") if name in columns}
    for place, name in enumerate(singles):
        found[name] = [values[name][ids[place]] for ids in columns["ids"]]
    for feature in schema.features:
        if not feature.one_hot:
            found[feature.name] = [[values[feature.name][id] for id in ids] for ids in columns[feature.name]]
    return found


# --- what it finds --------------------------------------------------------------------------------------------------


def information(first: np.ndarray, second: np.ndarray) -> float:
    """Normalised mutual information of two divisions of the same things, from 0 to 1."""
    joint = np.zeros((first.max() + 1, second.max() + 1))
    np.add.at(joint, (first, second), 1 / len(first))
    rows, columns = joint.sum(1), joint.sum(0)
    entropies = [-(p[p > 0] * np.log(p[p > 0])).sum() for p in (rows, columns)]
    outer = np.outer(rows, columns)
    mutual = (joint[joint > 0] * np.log(joint[joint > 0] / outer[joint > 0])).sum()
    return float(2 * mutual / sum(entropies))


@pytest.mark.parametrize("feature", ["page", "tags"])
def test_planted_communities_are_found(plain: Path, feature: str) -> None:
    """By samples near each other (page) and by ids of one bag (tags)."""
    edges = count_pairs(DataSet(plain), feature, 75, window=512, partners=8, max_edges=10**6, seed=0)
    found = find_communities(edges, size=150)
    answer = planted(load_id_maps(plain)[feature])[found.ids]
    assert information(found.levels[-1], answer) > 0.9


def test_with_little_memory_the_popular_part_of_the_tail_is_still_found(plain: Path) -> None:
    """A tenth of the edges."""
    edges = count_pairs(DataSet(plain), "page", 75, window=512, partners=8, max_edges=12_000, seed=0)
    assert len(edges) <= 12_000
    assert edges.stop < 1000
    found = find_communities(edges, size=150)
    assert found.ids.max() < edges.stop
    assert information(found.levels[-1], planted(load_id_maps(plain)["page"])[found.ids]) > 0.9


@pytest.mark.parametrize("feature", ["page", "tags"])
def test_neighbours_in_the_new_order_are_of_one_community(plain: Path, ordered: Path, feature: str) -> None:
    def share(folder: Path) -> float:
        answer = planted(load_id_maps(folder)[feature])[75:1400]
        return float((answer[1:] == answer[:-1]).mean())

    assert share(plain) < 0.2
    assert share(ordered) > 0.9


def test_a_batch_touches_fewer_prefixes(plain: Path, ordered: Path) -> None:
    def prefixes(folder: Path) -> float:
        ids = DataSet(folder).columns(0, 20_000).ids[:, 0]
        return float(np.mean([len(np.unique(batch // 12)) for batch in np.split(ids, 200)]))

    assert prefixes(ordered) < 0.6 * prefixes(plain)


def test_ids_that_meet_by_chance_keep_their_order(tmp_path: Path) -> None:
    write_sessions(SessionLog(rows=20_000, num_ids=1000, communities=1), tmp_path / "plain")
    with pytest.raises(ConfigError, match="page: no communities among 950 ids"):
        order(tmp_path / "plain", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_same_seed_gives_the_same_order(plain: Path, ordered: Path, tmp_path: Path) -> None:
    again = order(plain, tmp_path / "again")
    assert again.order_hashes == Schema.load(ordered).order_hashes
    other = order(plain, tmp_path / "other", OrderConfig(window=3, partners=1))
    assert other.order_hashes != again.order_hashes


# --- the order ------------------------------------------------------------------------------------------------------


def test_communities_come_by_lookups_and_ids_within_by_frequency() -> None:
    counts = np.array([90, 80, 9, 8, 7, 6, 5, 4, 3, 0])
    ids, group = np.array([2, 3, 4, 5, 7]), np.array([0, 1, 1, 0, 0])
    found = Communities(ids, (group,), 0.5)
    # {2, 5, 7} has 9 + 6 + 4 lookups, {3, 4} has 8 + 7; then 6, 8 and 9, which are in none.
    assert community_order(counts, 2, found).tolist() == [0, 1, 2, 5, 7, 3, 4, 6, 8, 9]


def test_finer_communities_stay_inside_the_coarser_ones() -> None:
    counts = np.array([10, 9, 8, 7, 6, 5])
    coarse, fine = np.array([0, 1, 0, 1, 0, 1]), np.array([0, 1, 2, 3, 2, 1])
    found = Communities(np.arange(6), (coarse, fine), 0.5)
    assert community_order(counts, 0, found).tolist() == [2, 4, 0, 1, 5, 3]


def test_hot_is_a_share_of_the_rows_or_of_the_lookups() -> None:
    counts = np.array([50, 30, 10, 5, 3, 2])
    assert num_hot(counts, OrderConfig(hot=0.4)) == 3
    assert num_hot(counts, OrderConfig(hot=0.0)) == 0
    assert num_hot(counts, OrderConfig(hot=0.8, hot_by="lookups")) == 2
    assert num_hot(counts, OrderConfig(hot=0.81, hot_by="lookups")) == 3
    assert num_hot(counts, OrderConfig(hot=0.0, hot_by="lookups")) == 0


# --- nothing but numbers changes ------------------------------------------------------------------------------------


def test_every_row_has_the_same_values_under_new_ids(plain: Path, ordered: Path) -> None:
    for split in ("train", "test"):
        assert raw_rows(plain, split) == raw_rows(ordered, split)
    assert read_split(plain, "train")["ids"] != read_split(ordered, "train")["ids"]
    for name in ("page", "tags"):
        before, after = read_map(plain, name), read_map(ordered, name)
        assert before[:76] == after[:76]
        assert sorted(before, key=str) == sorted(after, key=str)
        assert before != after


def test_the_folder_is_what_schema_json_says(plain: Path, ordered: Path) -> None:
    before, schema = Schema.load(plain), Schema.load(ordered)
    for split in before.splits:
        assert [file.rows for file in schema.splits[split].files] == [file.rows for file in before.splits[split].files]
        for file in schema.splits[split].files:
            assert sha256(ordered / file.name) == file.sha256
    assert [feature.ordered_from for feature in schema.features] == [76, 76]
    assert [feature.num_ranked for feature in before.features] == [1501, 1501]
    assert schema.features[0].num_ranked == 76
    assert schema.order is not None
    assert schema.order["source"] == sha256(plain / "schema.json")
    assert schema.order["parameters"]["window"] == 512
    assert schema.order["tables"]["page"]["sha256"] == sha256(ordered / "order" / "page.arrow")
    (old,) = pa.ipc.open_file(ordered / "order" / "page.arrow").read_all().columns
    assert sorted(old.to_pylist()) == list(range(1501))
    assert {path.name for path in ordered.iterdir()} - {path.name for path in plain.iterdir()} == {"order"}


def test_new_raw_rows_get_the_new_ids(ordered: Path) -> None:
    stored = DataSet(ordered, "test").slice(0, 50)
    values = raw_rows(ordered, "test")
    encoder = Encoder(ordered)
    batch = encoder.encode({name: values[name][:50] for name in ("page", "tags")})
    assert batch.ids.values.tolist() == stored.ids.values.tolist()
    assert sum(encoder.num_unseen.values()) == 0
    unseen = encode_rows(ordered, {"page": ["never seen"], "tags": [[]]})
    assert unseen.ids.values.tolist() == [Schema.load(ordered).feature("page").unseen]


def test_the_row_of_rare_values_keeps_its_meaning(tmp_path: Path) -> None:
    """It holds a third of the lookups here, but values that have nothing in common: it belongs to no community."""
    rng = np.random.default_rng(0)
    values = []
    for session in range(300):
        values += [
            f"{session % 10}-{rng.integers(8)}" if rng.random() < 0.7 else f"r{len(values)}.{i}" for i in range(20)
        ]
    raw = write_lines(tmp_path / "raw.tsv", [criteo_line(values=[value]) for value in values])
    prepare([raw], tmp_path / "plain", PrepareConfig(test=0.1, rare_below=2))
    schema = order(tmp_path / "plain", tmp_path / "ordered", OrderConfig(min_rows=50, window=20, hot=0.0))
    before = read_map(tmp_path / "plain", "C1")
    after = read_map(tmp_path / "ordered", "C1")
    assert before[0][0] is None
    unseen = schema.feature("C1").unseen
    assert after[unseen] == before[0]
    assert unseen == len(after) - 1  # the others are all in communities
    assert raw_rows(tmp_path / "plain", "test") == raw_rows(tmp_path / "ordered", "test")
    assert encode_rows(tmp_path / "ordered", criteo_row("r1")).ids.values[0].tolist() == [unseen]


def criteo_row(c1: str) -> dict[str, list[Any]]:
    names = [f"I{i}" for i in range(1, 14)] + [f"C{i}" for i in range(2, 27)]
    return {"C1": [c1]} | {name: [""] for name in names}


def test_features_of_one_table_and_the_files_of_implicit_data_go_along(tmp_path: Path) -> None:
    """Histories share the item's table; items.arrow and ranking cases hold ids too."""
    rng = np.random.default_rng(0)
    write_lines(tmp_path / "u.user", [f"{user} 8 2 2 2 2 3 0 3 " for user in range(60)])
    write_lines(tmp_path / "u.item", [f"{item} {item % 12} {item % 5} 1" for item in range(120)])
    chosen = [rng.permutation(20)[:9] + 20 * (user % 6) for user in range(60)]
    write_lines(tmp_path / "train.txt", [" ".join(map(str, [user, *items[:8]])) for user, items in enumerate(chosen)])
    write_lines(tmp_path / "test.txt", [f"{user} {items[8]}" for user, items in enumerate(chosen)])
    plain, out = tmp_path / "plain", tmp_path / "out"
    prepare([tmp_path], plain, PrepareConfig(format="taobao", max_length=8, negatives=2, candidates=5))
    schema = order(plain, out, OrderConfig(min_rows=60, hot=0.02, seed=1))
    assert schema.order is not None
    assert "item" in schema.order["tables"]
    assert schema.feature("item").unseen == schema.feature("history").unseen
    assert schema.feature("item").ordered_from == schema.feature("history").ordered_from == 3
    for split in ("train", "test"):
        assert raw_rows(plain, split) == raw_rows(out, split)
    answers = []
    for folder in (plain, out):
        data, maps = DataSet(folder, "test"), load_id_maps(folder)
        names = [feature.name for feature in data.schema.features]
        answer = []
        for batch, keep in RankingCases.load(folder, "test").batches(data):
            answer.append(keep.tolist())
            for place, name in enumerate(names):
                ids = batch.ids.bag(place)[0].tolist()
                answer.append(maps[name].values.take(pa.array(ids)).to_pylist())
        answers.append(answer)
    assert answers[0] == answers[1]


def test_columns_that_hold_no_ids_are_copied(tmp_path: Path) -> None:
    write_prepared(SyntheticConfig(rows=3000, cardinalities=(400, 7), num_dense=2, bag_lengths=(3, 1)), tmp_path / "a")
    (tmp_path / "a" / "bad_rows.tsv").write_text("source\tline\n")
    list_again(tmp_path / "a")
    found = find_anything(tmp_path / "a", tmp_path / "b")
    assert found.order is not None
    for split in ("train", "valid", "test"):
        assert raw_rows(tmp_path / "a", split) == raw_rows(tmp_path / "b", split)
    assert (tmp_path / "b" / "bad_rows.tsv").read_text() == "source\tline\n"


def test_one_file_of_rows_is_in_memory_at_a_time(
    plain: Path, ordered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[weakref.ref[Any]] = []

    def read(*arguments: Any, **options: Any) -> Any:
        assert not any(reference() is not None for reference in seen)
        columns = read_columns(*arguments, **options)
        seen.append(weakref.ref(columns))
        return columns

    monkeypatch.setattr(renumber, "read_columns", read)
    order(plain, tmp_path / "out", like=ordered)
    assert len(seen) == 7


def find_anything(plain: Path, out: Path) -> Schema:
    """An order of C1 that was not searched for: the tail turned round."""
    id_map = IdMap.load(id_map_path(plain, "C1"))
    old = np.concatenate([np.arange(20), np.arange(20, id_map.num_rows)[::-1]])
    out.mkdir()
    orders = {"C1": Bijection("C1", old, 20, id_map.fingerprint())}
    return renumber.RenumberedFolder(plain, orders).write(out, {}, lambda stage, done, total: None)


# --- used again, and refused ----------------------------------------------------------------------------------------


def test_an_order_can_be_used_again(
    plain: Path, ordered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "igraph", None)  # it is not needed for that
    schema = order(plain, tmp_path / "out", like=ordered)
    assert schema == Schema.load(ordered)
    for file in schema.splits["train"].files:
        assert sha256(tmp_path / "out" / file.name) == file.sha256


def test_ordering_twice_is_refused(ordered: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="in community order already"):
        order(ordered, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_order_that_is_no_bijection_is_refused(ordered: Path) -> None:
    old = np.arange(10)
    for wrong, message in (
        ([0, 1, 2, 3, 4, 5, 6, 8, 8, 9], r"'page' is not a bijection: old id 8 has the new ids 7 and 8, and old id 7"),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 10], r"'page' is not a bijection: new id 9 has old id 10"),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, -1], r"'page' is not a bijection: new id 9 has old id -1"),
        ([1, 0, 2, 3, 4, 5, 6, 7, 8, 9], r"'page' moves id 0"),
    ):
        with pytest.raises(DataError, match=message):
            Bijection("page", np.array(wrong), 2, "")
    assert Bijection("page", old, 10, "").new.tolist() == old.tolist()
    assert load_orders(ordered)["page"].first == 76


def test_a_tampered_order_file_is_refused(plain: Path, ordered: Path, tmp_path: Path) -> None:
    like = tmp_path / "like"
    shutil.copytree(ordered, like)
    path = order_path(like, "page")
    batch = pa.ipc.open_file(order_path(ordered, "page")).get_batch(0)
    old = batch["old"].to_numpy().copy()
    old[100] = old[101]
    changed = pa.RecordBatch.from_pydict({"old": pa.array(old)}).replace_schema_metadata(batch.schema.metadata)
    path.unlink()
    write_batch(path, changed)
    with pytest.raises(DataError, match=rf"'page' is not a bijection: old id {old[100]} has the new ids 100 and 101"):
        order(plain, tmp_path / "out", like=like)
    old = batch["old"].to_numpy().copy()
    old[[100, 101]] = old[[101, 100]]  # a bijection, but not the one that was written
    path.unlink()
    write_batch(path, pa.RecordBatch.from_pydict({"old": old}).replace_schema_metadata(batch.schema.metadata))
    with pytest.raises(DataError, match="SHA-256"):
        order(plain, tmp_path / "out", like=like)
    path.write_bytes(b"not arrow")
    with pytest.raises(DataError, match="cannot be read as an order"):
        order(plain, tmp_path / "out", like=like)
    path.unlink()
    with pytest.raises(DataError, match="is missing"):
        order(plain, tmp_path / "out", like=like)
    with pytest.raises(DataError, match="no order to use again"):
        order(plain, tmp_path / "out", like=plain)
    assert not list(tmp_path.glob("out*"))


def test_the_order_of_another_data_set_is_refused(ordered: Path, tmp_path: Path) -> None:
    others = {
        "same size": SessionLog(rows=2000, num_ids=1500, communities=15, tags=4, seed=1),
        "larger": SessionLog(rows=2000, num_ids=1600, communities=15, tags=4),
        "fewer features": SessionLog(rows=2000, num_ids=1500, communities=15),
    }
    messages = {"same size": "made for other ids", "larger": "1,501 ids, but in", "fewer features": "a table 'tags'"}
    for name, log in others.items():
        write_sessions(log, tmp_path / name)
        with pytest.raises(DataError, match=messages[name]):
            order(tmp_path / name, tmp_path / "out", like=ordered)
    assert not list(tmp_path.glob("out*"))


def test_a_model_of_the_old_order_is_not_used_with_the_new_one(plain: Path, ordered: Path, tmp_path: Path) -> None:
    """Tables have the same sizes, so nothing but the schema can tell."""
    run = tmp_path / "run"
    config = TrainConfig.of(dim=4, bottom=(4,), top=(4,), steps=2, batch_size=64)
    train(plain, run, config, quiet=True)
    assert evaluate(run)["samples"] == 3000
    with pytest.raises(CheckpointError, match="not the one this model was trained on"):
        evaluate(run, data=ordered)
    with pytest.raises(CheckpointError, match="not the one this model was trained on"):
        train(
            ordered, run, TrainConfig.of(dim=4, bottom=(4,), top=(4,), steps=4, batch_size=64), resume=True, quiet=True
        )
    train(ordered, tmp_path / "new", config, quiet=True)
    assert evaluate(tmp_path / "new", data=ordered)["samples"] == 3000
    order(plain, tmp_path / "another", OrderConfig(window=3, partners=1))  # the same boundaries, other ids behind them
    with pytest.raises(CheckpointError, match="in another order"):
        evaluate(tmp_path / "new", data=tmp_path / "another")


def test_tables_without_a_tail_are_left_and_named(tmp_path: Path) -> None:
    write_prepared(SyntheticConfig(rows=2000, cardinalities=(3, 40), num_dense=1), tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"C1: 4 rows, fewer than min_rows; C2: 41 rows, fewer"):
        order(tmp_path / "plain", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"C1: all 4 ids are hot"):
        order(tmp_path / "plain", tmp_path / "out", OrderConfig(min_rows=0, hot=0.99))
    assert not list(tmp_path.glob("out*"))


def test_a_feature_without_lookups_is_left(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(plain, folder)
    schema = Schema.load(folder)
    made = {}
    for split in schema.splits.values():
        for file in split.files:
            batch = pa.ipc.open_file(folder / file.name).get_batch(0)
            ids = batch["ids"].flatten().to_numpy().reshape(-1, 1)
            empty = {"tags": (np.zeros(0, dtype=np.int32), np.zeros(file.rows + 1))}
            (folder / file.name).unlink()
            dense = np.zeros((file.rows, 0))
            made[file.name] = write_split_file(folder / file.name, batch["label"].to_numpy(), dense, ids, empty)

    def list_files(document: dict[str, Any]) -> None:
        for entry in document["splits"]["train"]["files"] + document["splits"]["test"]["files"]:
            entry.update(bytes=made[entry["name"]].bytes, sha256=made[entry["name"]].sha256)

    edit_json(folder / "schema.json", list_files)
    id_map = IdMap.load(id_map_path(folder, "tags"))
    IdMap(id_map.values, np.zeros(id_map.num_rows), id_map.unseen).save(folder / "tags.arrow")
    shutil.move(folder / "tags.arrow", id_map_path(folder, "tags"))
    list_again(folder)
    found = order(folder, tmp_path / "out")
    assert found.order is not None
    assert found.order["left"] == {"tags": "no lookups in the training split"}
    assert found.feature("tags").ordered_from is None
    assert raw_rows(folder, "test") == raw_rows(tmp_path / "out", "test")


def test_a_full_disk_leaves_nothing_and_keeps_what_was_there(
    plain: Path, ordered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(plain, out)
    calls = []

    def full(path: Path, *rest: Any, **options: Any) -> Any:
        calls.append(path)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_split_file(path, *rest, **options)

    monkeypatch.setattr(renumber, "write_split_file", full)
    with pytest.raises(HoldallError, match="disk is full"):
        order(plain, out, OrderConfig(overwrite=True), like=ordered)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert Schema.load(out) == Schema.load(plain)
    monkeypatch.undo()
    assert order(plain, out, OrderConfig(overwrite=True), like=ordered) == Schema.load(out) == Schema.load(ordered)


def test_damaged_rows_are_not_given_a_new_hash(plain: Path, ordered: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(plain, folder)
    path = folder / Schema.load(folder).splits["test"].files[0].name
    data = bytearray(path.read_bytes())
    place = len(data) // 2
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="was changed"):
        order(folder, tmp_path / "out", like=ordered)


def test_ids_outside_the_table_are_named(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(plain, folder)
    edit_json(folder / "schema.json", lambda document: document["features"][0].update(num_rows=1200))
    with pytest.raises(DataError, match=r"split 'train' of .* has id \d+ of feature 'page', which has 1,200 rows"):
        order(folder, tmp_path / "out")


def test_places_that_cannot_be_written_are_refused(plain: Path, ordered: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is itself an input"):
        order(plain, plain, OrderConfig(overwrite=True))
    with pytest.raises(HoldallError, match="exists already"):
        order(plain, ordered)
    with pytest.raises(DataError, match=r"schema\.json does not exist"):
        order(tmp_path, tmp_path / "out")


def test_without_igraph_the_error_says_what_to_install(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "igraph", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'holdall\[order\]'"):
        order(plain, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("wrong", [{"hot": 1.0}, {"hot": -0.1}, {"window": 1}, {"partners": 0}, {"memory": "1KB"}])
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        OrderConfig(**wrong)


def test_folders_from_before_orders_existed_are_read(plain: Path, tmp_path: Path) -> None:
    document = json.loads((plain / "schema.json").read_text())
    del document["order"], document["sha256"]
    for feature in document["features"]:
        del feature["ordered_from"]
    (tmp_path / "schema.json").write_text(json.dumps(document))
    assert Schema.load(tmp_path) == Schema.load(plain)


def test_the_command(plain: Path, ordered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert holdall.order is order
    main(["order", str(plain), "--out", str(tmp_path / "out"), "--hot", "0.1", "--min-rows", "100"])
    shown = capsys.readouterr().out
    assert "communities" in shown
    assert "151" in shown
    main(["inspect", str(tmp_path / "out")])
    assert "ordered from" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["order", str(tmp_path / "out"), "--out", str(tmp_path / "twice")])
    assert stop.value.code == 2
    assert "already" in capsys.readouterr().err
    counts = [count for _, count in read_map(tmp_path / "out", "page")]
    assert all(a >= b for a, b in pairwise(counts[:151]))
