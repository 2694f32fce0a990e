"""`prepare` on Criteo files: popularity order, splits, dense values, and files after an interrupted run."""

from __future__ import annotations

import errno
import gzip
import json
import math
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from holdall.common.errors import ConfigError, HoldallError
from holdall.common.files import sha256
from holdall.data import arrow_files, passes
from holdall.data.encode import Encoder, encode_rows
from holdall.data.formats.criteo import CATEGORICAL
from holdall.data.layout import Layout
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.read_text import read_text
from holdall.data.rows import Rows
from holdall.data.schema import Schema
from holdall.data.splits import draw_splits
from tests.data.raw_files import criteo_line, read_map, read_split, write_lines

GOLDEN = [0, 0, 1, 2, 1, 0, 2, 0, 0, 0, 0, 0, 1, 0, 2, 0, 1, 0, 0, 0]
ALL_TRAIN = PrepareConfig(test=0.0)
SAMPLE = Path(__file__).parents[2].parent / "shared/data/criteo_kaggle/train.tsv.gz"


def c1_lines(**counts: int) -> list[str]:
    """Lines whose C1 has each value that often, interleaved; `missing` stands for the empty value."""
    values = [(turn, name) for name, count in counts.items() for turn in range(count)]
    return [criteo_line(values=["" if name == "missing" else name]) for _, name in sorted(values)]


def random_lines(num_rows: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(num_rows):
        dense = ["" if rng.random() < 0.3 else int(rng.integers(-2, 1000)) for _ in range(13)]
        values = ["" if rng.random() < 0.1 else f"{int(rng.zipf(1.3)) % 50:08x}" for _ in range(26)]
        lines.append(criteo_line(int(rng.integers(0, 2)), dense, values))
    return lines


# --- popularity order -----------------------------------------------------------------------------------------------


def test_ids_follow_counts_then_the_bytes_of_the_value(tmp_path: Path) -> None:
    lines = c1_lines(zebra=5, apple=2, missing=3, Apple=2, été=2)
    schema = prepare([write_lines(tmp_path / "raw.tsv", lines)], tmp_path / "out", ALL_TRAIN)
    assert read_map(tmp_path / "out", "C1") == [
        ("zebra", 5),
        ("", 3),
        ("Apple", 2),
        ("apple", 2),
        ("été", 2),
        (None, 0),
    ]
    assert schema.features[0].num_rows == 6
    assert schema.features[0].unseen == 5
    order = ["zebra", "", "Apple", "apple", "été"]
    stored = [row[0] for row in read_split(tmp_path / "out", "train")["ids"]]
    assert stored == [order.index(line.split("\t")[14]) for line in lines]


def test_many_equal_counts_are_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    values = [f"{(number * 7919) % 1000:03}" for number in range(1000)]
    lines = [criteo_line(values=[value]) for value in values + values[::2]]
    prepare([write_lines(tmp_path / "raw.tsv", lines)], tmp_path / "out", ALL_TRAIN)
    twice, once = sorted(values[::2]), sorted(values[1::2])
    assert read_map(tmp_path / "out", "C1") == [*((v, 2) for v in twice), *((v, 1) for v in once), (None, 0)]


def test_rare_values_share_one_row_that_takes_its_place_in_the_order(tmp_path: Path) -> None:
    raw = write_lines(tmp_path / "raw.tsv", c1_lines(a=9, b=4, c=2, d=2, e=2, f=1))
    schema = prepare([raw], tmp_path / "out", PrepareConfig(test=0.0, rare_below=3))
    assert read_map(tmp_path / "out", "C1") == [("a", 9), (None, 7), ("b", 4)]
    assert schema.features[0].unseen == 1
    ids = [row[0] for row in read_split(tmp_path / "out", "train")["ids"]]
    assert [ids.count(id) for id in range(3)] == [9, 7, 4]


def test_the_unseen_row_stands_behind_values_of_the_same_count(tmp_path: Path) -> None:
    raw = write_lines(tmp_path / "raw.tsv", c1_lines(a=4, z=3, b=2, c=1))
    prepare([raw], tmp_path / "out", PrepareConfig(test=0.0, rare_below=3))
    assert read_map(tmp_path / "out", "C1") == [("a", 4), ("z", 3), (None, 3)]


def test_only_training_rows_are_counted_and_new_values_become_unseen(tmp_path: Path) -> None:
    first = write_lines(tmp_path / "day_0.tsv", c1_lines(a=2, b=3))
    last = write_lines(tmp_path / "day_1.tsv", c1_lines(a=50, new=1))
    schema = prepare([first, last], tmp_path / "out", PrepareConfig(test_from_last_file=True))
    assert read_map(tmp_path / "out", "C1") == [("b", 3), ("a", 2), (None, 0)]
    assert sorted(row[0] for row in read_split(tmp_path / "out", "test")["ids"]) == [1] * 50 + [2]
    assert {name: split.rows for name, split in schema.splits.items()} == {"train": 5, "test": 51}


def test_files_of_any_size_hold_the_same_rows_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = write_lines(tmp_path / "raw.tsv", random_lines(300))
    prepare([raw], tmp_path / "one", PrepareConfig(valid=0.2))
    monkeypatch.setattr("holdall.data.formats.table.read_text", read_small_blocks)
    schema = prepare([raw], tmp_path / "many", PrepareConfig(valid=0.2, rows_per_file=7))
    assert [file.rows for file in schema.splits["train"].files][:-1] == [7] * (schema.splits["train"].rows // 7)
    for split in ("train", "valid", "test"):
        assert read_split(tmp_path / "one", split) == read_split(tmp_path / "many", split)


def read_small_blocks(path: Path, layout: Layout) -> Generator[Rows]:
    return read_text(path, layout, block_bytes=5000)


# --- what is stored -------------------------------------------------------------------------------------------------


def test_the_folder_is_what_schema_json_says(tmp_path: Path) -> None:
    raw = write_lines(tmp_path / "raw.tsv", random_lines(100))
    schema = prepare([raw], tmp_path / "out", PrepareConfig(valid=0.1, test=0.2))
    assert Schema.load(tmp_path / "out") == schema
    assert not (tmp_path / "out.partial").exists()
    listed = {file.name for split in schema.splits.values() for file in split.files}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"schema.json", "ids", *listed}
    assert {path.name for path in (tmp_path / "out/ids").iterdir()} == {f"{name}.arrow" for name in CATEGORICAL}
    for name, split in schema.splits.items():
        columns = read_split(tmp_path / "out", name)
        assert split.rows == len(columns["label"])
        assert split.positives == sum(columns["label"])
        for file in split.files:
            path = tmp_path / "out" / file.name
            assert (file.bytes, file.sha256) == (path.stat().st_size, sha256(path))
            types = pa.ipc.open_file(path).schema
            assert types.field("label").type == pa.uint8()
            assert types.field("dense").type == pa.list_(pa.float32(), 13)
            assert types.field("ids").type == pa.list_(pa.int32(), 26)
    assert schema.source["rows"] == 100
    assert schema.source["bad_rows"] == 0


def test_log_is_the_default_and_missing_is_zero(tmp_path: Path) -> None:
    raw = write_lines(tmp_path / "raw.tsv", [criteo_line(1, [7, "", -3, 0])])
    prepare([raw], tmp_path / "out", ALL_TRAIN)
    assert read_split(tmp_path / "out", "train")["dense"][0][:4] == pytest.approx([math.log(8), 0, 0, 0])


def test_standard_uses_the_training_rows_and_missing_is_the_mean(tmp_path: Path) -> None:
    first = write_lines(tmp_path / "day_0.tsv", [criteo_line(0, [x, 4]) for x in (1, 2, 3, "", 6)])
    last = write_lines(tmp_path / "day_1.tsv", [criteo_line(0, [1000, 5])])
    schema = prepare([first, last], tmp_path / "out", PrepareConfig(test_from_last_file=True, dense="standard"))
    std = math.sqrt((4 + 1 + 0 + 9) / 4)
    assert (schema.dense[0].mean, schema.dense[0].std) == pytest.approx((3, std))
    train = read_split(tmp_path / "out", "train")["dense"]
    assert [row[0] for row in train] == pytest.approx([-2 / std, -1 / std, 0, 0, 3 / std])
    assert [row[1] for row in train] == [0] * 5  # a constant column
    assert read_split(tmp_path / "out", "test")["dense"][0][:2] == pytest.approx([997 / std, 1])


def test_mean_and_deviation_do_not_depend_on_how_a_file_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.concatenate([np.arange(400) + 1_000_000, np.arange(100) * 37])
    raw = write_lines(tmp_path / "raw.tsv", [criteo_line(0, [number]) for number in numbers])
    monkeypatch.setattr("holdall.data.formats.table.read_text", read_small_blocks)
    schema = prepare([raw], tmp_path / "out", PrepareConfig(test=0.0, dense="standard"))
    assert (schema.dense[0].mean, schema.dense[0].std) == pytest.approx((numbers.mean(), numbers.std()), rel=1e-12)


def test_none_stores_the_numbers(tmp_path: Path) -> None:
    raw = write_lines(tmp_path / "raw.tsv", [criteo_line(0, [-2.5, "", 16777217])])
    prepare([raw], tmp_path / "out", PrepareConfig(test=0.0, dense="none"))
    assert read_split(tmp_path / "out", "train")["dense"][0][:3] == [-2.5, 0, 16777216]


@pytest.mark.parametrize("config", [PrepareConfig(test=0.0, rare_below=3), PrepareConfig(test=0.0, dense="standard")])
def test_encoding_the_raw_training_rows_gives_the_stored_arrays(tmp_path: Path, config: PrepareConfig) -> None:
    lines = random_lines(200)
    schema = prepare([write_lines(tmp_path / "raw.tsv", lines)], tmp_path / "out", config)
    names = ["label", *(column.name for column in schema.dense), *(feature.name for feature in schema.features)]
    columns = dict(zip(names, zip(*(line.split("\t") for line in lines), strict=True), strict=True))
    encoder = Encoder(tmp_path / "out")
    batch = encoder.encode(columns)
    stored = read_split(tmp_path / "out", "train")
    assert batch.dense.tolist() == stored["dense"]
    assert batch.ids.values.t().tolist() == stored["ids"]
    assert batch.label.tolist() == stored["label"]
    in_unseen_row = sum(row[0] == schema.features[0].unseen for row in stored["ids"])
    assert encoder.num_unseen["C1"] == in_unseen_row


def test_values_unknown_to_the_maps_are_encoded_as_unseen_and_counted(tmp_path: Path) -> None:
    schema = prepare([write_lines(tmp_path / "raw.tsv", random_lines(50))], tmp_path / "out", ALL_TRAIN)
    rows: dict[str, list[object]] = {column.name: [None] for column in schema.dense}
    rows |= {feature.name: ["never seen"] for feature in schema.features}
    batch = encode_rows(tmp_path / "out", rows)
    assert batch.ids.values[:, 0].tolist() == [feature.unseen for feature in schema.features]
    assert batch.label.tolist() == [0]
    with pytest.raises(HoldallError, match="no column 'C1'"):
        encode_rows(tmp_path / "out", {name: values for name, values in rows.items() if name != "C1"})


# --- splits ---------------------------------------------------------------------------------------------------------


def test_a_split_depends_on_seed_and_row_number_alone() -> None:
    numbers = np.arange(100_000)
    splits = draw_splits(numbers, seed=3, valid=0.2, test=0.1)
    assert np.bincount(splits) / len(splits) == pytest.approx([0.7, 0.2, 0.1], abs=0.005)
    assert (draw_splits(numbers[50_000:], seed=3, valid=0.2, test=0.1) == splits[50_000:]).all()
    assert (draw_splits(numbers, seed=4, valid=0.2, test=0.1) != splits).mean() > 0.3
    assert splits[:20].tolist() == GOLDEN  # another hash would reshuffle everyone's splits
    other = draw_splits(numbers, seed=3, valid=0.0, test=0.1)
    assert ((other == 2) == (splits == 2)).all()  # the test rows do not depend on `valid`


def test_leaving_out_a_bad_row_moves_no_other_row_to_another_split(tmp_path: Path) -> None:
    lines = [criteo_line(0, [number]) for number in range(200)]
    config = PrepareConfig(dense="none", bad_rows="skip", test=0.5)
    prepare([write_lines(tmp_path / "good.tsv", lines)], tmp_path / "good", config)
    lines[17] = "broken"
    prepare([write_lines(tmp_path / "bad.tsv", lines)], tmp_path / "bad", config)
    good = [row[0] for row in read_split(tmp_path / "good", "test")["dense"]]
    bad = [row[0] for row in read_split(tmp_path / "bad", "test")["dense"]]
    assert [number for number in good if number != 17] == bad


def test_the_last_file_is_the_test_split_and_valid_comes_from_the_rest(tmp_path: Path) -> None:
    for day in range(3):
        write_lines(tmp_path / f"day_{day}.tsv", [criteo_line(0, [day])] * 100)
    config = PrepareConfig(test_from_last_file=True, valid=0.3, dense="none")
    schema = prepare([str(tmp_path / "day_*.tsv")], tmp_path / "out", config)
    assert schema.splits["test"].rows == 100
    assert 30 < schema.splits["valid"].rows < 90
    assert {row[0] for row in read_split(tmp_path / "out", "test")["dense"]} == {2}
    assert {row[0] for row in read_split(tmp_path / "out", "valid")["dense"]} == {0, 1}


# --- sources --------------------------------------------------------------------------------------------------------


def test_patterns_expand_in_sorted_order_after_files_given_before(tmp_path: Path) -> None:
    for number, name in enumerate(["b.tsv", "a.tsv", "first.txt"]):
        write_lines(tmp_path / name, [criteo_line(0, [number])])
    config = PrepareConfig(test=0.0, dense="none")
    prepare([tmp_path / "first.txt", str(tmp_path / "*.tsv")], tmp_path / "out", config)
    assert [row[0] for row in read_split(tmp_path / "out", "train")["dense"]] == [2, 1, 0]


def test_compressed_files_give_the_same_data_as_plain_ones(tmp_path: Path) -> None:
    raw = write_lines(tmp_path / "raw.tsv", random_lines(500))
    halves = raw.read_bytes()[:5000], raw.read_bytes()[5000:]
    (tmp_path / "raw.tsv.gz").write_bytes(b"".join(map(gzip.compress, halves)))  # two members, as `cat a.gz b.gz` makes
    (tmp_path / "raw.tsv.zst").write_bytes(pa.compress(raw.read_bytes(), "zstd", asbytes=True))
    for name in ("raw.tsv", "raw.tsv.gz", "raw.tsv.zst"):
        prepare([tmp_path / name], tmp_path / f"out.{name}", PrepareConfig())
    plain = read_split(tmp_path / "out.raw.tsv", "train")
    assert len(plain["label"]) > 400
    assert read_split(tmp_path / "out.raw.tsv.gz", "train") == plain
    assert read_split(tmp_path / "out.raw.tsv.zst", "train") == plain


@pytest.mark.skipif(not SAMPLE.exists(), reason="the real Criteo sample is not here (../shared/data/criteo_kaggle)")
def test_the_real_criteo_sample(tmp_path: Path) -> None:
    with gzip.open(SAMPLE, "rt") as file:
        lines = [next(file).rstrip("\n") for _ in range(4000)]
    schema = prepare([write_lines(tmp_path / "raw.tsv", lines)], tmp_path / "out", ALL_TRAIN)
    assert schema.splits["train"].rows == 4000
    columns = list(zip(*(line.split("\t") for line in lines), strict=True))
    assert schema.splits["train"].positives == columns[0].count("1")
    for index, feature in enumerate(schema.features):
        counts = {value: columns[14 + index].count(value) for value in set(columns[14 + index])} if index < 3 else None
        assert feature.num_rows == len(set(columns[14 + index])) + 1
        if counts:
            ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0].encode()))
            assert read_map(tmp_path / "out", feature.name) == [*ordered, (None, 0)]


# --- the output folder ----------------------------------------------------------------------------------------------


def test_an_existing_folder_is_refused_and_only_a_data_set_is_overwritten(tmp_path: Path) -> None:
    raw = write_lines(tmp_path / "raw.tsv", random_lines(20))
    out = tmp_path / "out"
    prepare([raw], out, ALL_TRAIN)
    with pytest.raises(HoldallError, match=r"exists already.*--overwrite"):
        prepare([raw], out, ALL_TRAIN)
    schema = prepare([raw], out, PrepareConfig(test=0.5, overwrite=True))
    assert Schema.load(out) == schema
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letter.txt").write_text("dear")
    with pytest.raises(HoldallError, match="not a data set"):
        prepare([raw], tmp_path / "home", PrepareConfig(overwrite=True))
    assert (tmp_path / "home/letter.txt").exists()


def test_a_failed_overwrite_keeps_the_old_data_set(tmp_path: Path) -> None:
    out = tmp_path / "out"
    old = prepare([write_lines(tmp_path / "raw.tsv", random_lines(20))], out, ALL_TRAIN)
    with pytest.raises(HoldallError, match="line 1"):
        prepare([write_lines(tmp_path / "bad.tsv", ["broken"])], out, PrepareConfig(overwrite=True))
    assert Schema.load(out) == old
    assert not (tmp_path / "out.partial").exists()


KILLED = """
import os, signal, sys
from holdall.data.prepare import PrepareConfig, prepare
def kill(stage, done, total):
    if stage == "write" and done == 2:
        os.kill(os.getpid(), signal.SIGKILL)
prepare([sys.argv[1]], sys.argv[2], PrepareConfig(test=0.0, rows_per_file=5), progress=kill)
"""


@pytest.mark.slow
def test_a_killed_run_leaves_no_data_set_and_the_next_one_completes(tmp_path: Path) -> None:
    raw = write_lines(tmp_path / "raw.tsv", random_lines(20))
    killed = subprocess.run([sys.executable, "-c", KILLED, str(raw), str(tmp_path / "out")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.holdall-lock", "out.partial", "raw.tsv"]
    assert (tmp_path / "out.partial/train-00001.arrow").exists()
    assert not (tmp_path / "out.partial/schema.json").exists()
    prepare([raw], tmp_path / "out", ALL_TRAIN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "raw.tsv"]
    assert not (tmp_path / "out/train-00001.arrow").exists()
    assert len(read_split(tmp_path / "out", "train")["label"]) == 20


@pytest.mark.parametrize("function", ["write_batch", "write_split_file"])
def test_a_full_disk_is_reported_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def full(*_: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(arrow_files if function == "write_batch" else passes, function, full)
    with pytest.raises(HoldallError, match="disk is full"):
        prepare([write_lines(tmp_path / "raw.tsv", random_lines(20))], tmp_path / "out", ALL_TRAIN)
    assert [path.name for path in tmp_path.iterdir()] == ["raw.tsv"]


def test_an_interrupt_cleans_up(tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "write":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([write_lines(tmp_path / "raw.tsv", random_lines(20))], tmp_path / "out", ALL_TRAIN, progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["raw.tsv"]


def test_progress_reaches_the_end_of_every_stage(tmp_path: Path) -> None:
    last: dict[str, tuple[int, int]] = {}
    raw = write_lines(tmp_path / "raw.tsv", random_lines(20))
    prepare([raw], tmp_path / "out", progress=lambda stage, done, total: last.update({stage: (done, total)}))
    assert list(last) == ["read", "order", "write"]
    assert all(done == total > 0 for done, total in last.values())


def test_the_source_is_kept_for_people(tmp_path: Path) -> None:
    raw = write_lines(tmp_path / "raw.tsv", random_lines(20))
    prepare([raw], tmp_path / "out", PrepareConfig(seed=5))
    source = json.loads((tmp_path / "out/schema.json").read_text())["source"]
    assert source["format"] == "criteo"
    assert source["files"] == [{"name": str(raw), "bytes": raw.stat().st_size}]
    assert source["options"]["seed"] == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"valid": 0.5, "test": 0.5}, "leave rows to train on"),
        ({"valid": -0.1}, "must not be negative"),
        ({"test": float("nan")}, "must not be negative"),
        ({"rare_below": 0}, "rare_below is 0"),
        ({"rows_per_file": 0}, "rows_per_file is 0"),
        ({"format": "table"}, "--schema"),
        ({"schema": Path("x.toml")}, "--format table"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrepareConfig(**options)  # type: ignore[arg-type]
