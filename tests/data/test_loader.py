"""The mapped data set against the rows that were written, and the loader's order against its contract."""

from __future__ import annotations

import gc
import json
import threading
import time
import warnings
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.common.errors import CheckpointError, ConfigError, DataError
from holdall.common.files import sha256
from holdall.common.worker_thread import prefetched
from holdall.data.batch import Batch
from holdall.data.dataset import DataSet
from holdall.data.loader import Loader, Position
from holdall.data.schema import DataFile, DenseColumn, Feature, Schema, Split
from tests.edits import edit_json, flip_bit, swap

NUM_DENSE = 3


def bag_of(row: int) -> list[int]:
    """The planted bag of a row: empty, then longer, then empty again."""
    return [row * 5 + place for place in range(row % 4)]


def row_batch(rows: range, bags: bool) -> pa.RecordBatch:
    """Rows that tell who they are: dense is row + column / 8, ids are 10 * row + feature, the label is row % 2."""
    number = np.arange(rows.start, rows.stop)
    dense = (number[:, None] + np.arange(NUM_DENSE) / 8).astype(np.float32)
    ids = (10 * number[:, None] + np.arange(2)).astype(np.int32)
    arrays = {
        "label": pa.array((number % 2).astype(np.uint8)),
        "dense": pa.FixedSizeListArray.from_arrays(pa.array(dense.ravel()), NUM_DENSE),
        "ids": pa.FixedSizeListArray.from_arrays(pa.array(ids.ravel()), 2),
    }
    if bags:
        arrays["bag"] = pa.array([bag_of(row) for row in rows], type=pa.list_(pa.int32()))
    return pa.record_batch(arrays)


def make_folder(folder: Path, file_rows: list[int], bags: bool = False) -> Path:
    """A prepared folder with one split `train` in files of these sizes; the bag stands between the one-hot features."""
    folder.mkdir()
    files, first = [], 0
    for number, rows in enumerate(file_rows):
        batch = row_batch(range(first, first + rows), bags)
        first += rows
        path = folder / f"train-{number:05d}.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        files.append(DataFile(name=path.name, rows=rows, bytes=path.stat().st_size, sha256=sha256(path)))
    names = ["a", "bag", "b"] if bags else ["a", "b"]
    Schema(
        label="label",
        dense=tuple(DenseColumn(name=f"x{column}") for column in range(NUM_DENSE)),
        features=tuple(
            Feature(name=name, num_rows=10_000, unseen=9_999, kind="bag" if name == "bag" else "categorical")
            for name in names
        ),
        splits={"train": Split(rows=first, positives=first // 2, files=tuple(files))},
    ).save(folder)
    return folder


def rows_of(batch: Batch) -> list[int]:
    """Which rows a batch holds, after checking that all its parts tell the same."""
    rows = batch.dense[:, 0].long()
    assert torch.equal(batch.dense, rows[:, None] + torch.arange(NUM_DENSE) / 8)
    assert torch.equal(batch.label, (rows % 2).float())
    if batch.ids.offsets is None:
        assert torch.equal(batch.ids.values.long(), 10 * rows + torch.arange(2)[:, None])
    else:
        expected = [[10 * row] for row in rows.tolist()]
        expected += [bag_of(row) for row in rows.tolist()]
        expected += [[10 * row + 1] for row in rows.tolist()]
        offsets = batch.ids.offsets.tolist()
        assert batch.ids.offsets.dtype == torch.int64
        assert len(offsets) == 3 * len(rows) + 1
        found = [batch.ids.values[start:stop].tolist() for start, stop in pairwise(offsets)]
        assert found == expected
    return rows.tolist()


@pytest.fixture(scope="module", params=[False, True], ids=["one-hot", "bags"])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    """103 rows in files of 40, 1, 39 and 23."""
    folder = make_folder(tmp_path_factory.mktemp("sets") / "data", [40, 1, 39, 23], bags=request.param)
    return DataSet(folder, verify=True)


# The data set


def test_opening_and_slicing_warn_of_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = DataSet(make_folder(tmp_path / "data", [20]))
        assert len(data) == 20
        assert rows_of(data.slice(3, 9)) == [3, 4, 5, 6, 7, 8]


def test_a_slice_of_one_file_is_a_view(tmp_path: Path) -> None:
    data = DataSet(make_folder(tmp_path / "data", [20, 20]))
    wide, narrow = data.slice(0, 20), data.slice(5, 10)
    assert wide.dense[5:].data_ptr() == narrow.dense.data_ptr()
    assert wide.ids.values[:, 5:].data_ptr() == narrow.ids.values.data_ptr()
    assert narrow.ids.values.shape == (2, 5)
    assert narrow.ids.values.dtype == torch.int32
    assert narrow.ids.values.stride() == (1, 2)


def test_writing_into_a_batch_leaves_the_file_alone(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "data", [20])
    batch = DataSet(folder).slice(0, 20)
    batch.dense.fill_(-1.0)
    batch.ids.values.fill_(-1)
    assert rows_of(DataSet(folder, verify=True).slice(0, 20)) == list(range(20))


@settings(derandomize=True, deadline=None, max_examples=50)
@given(bounds=st.tuples(st.integers(0, 103), st.integers(0, 103)))
def test_slices_within_and_across_files(data: DataSet, bounds: tuple[int, int]) -> None:
    start, stop = sorted(bounds)
    batch = data.slice(start, stop)
    assert len(batch) == batch.ids.batch_size == stop - start
    assert rows_of(batch) == list(range(start, stop))


@settings(derandomize=True, deadline=None, max_examples=50)
@given(rows=st.lists(st.integers(0, 102), max_size=40))
def test_take_gathers_any_rows_in_order(data: DataSet, rows: list[int]) -> None:
    assert rows_of(data.take(np.array(rows, dtype=np.int64))) == rows


def test_join_puts_ranges_after_each_other(data: DataSet) -> None:
    assert rows_of(data.join((98, 103), (0, 4))) == [98, 99, 100, 101, 102, 0, 1, 2, 3]


def test_only_synthetic_sets_have_a_probability(data: DataSet) -> None:
    with pytest.raises(DataError, match="no planted probability: only synthetic"):
        data.probability()
    assert data.labels().tolist() == [row % 2 for row in range(103)]


@pytest.mark.parametrize("bounds", [(-1, 3), (5, 3), (0, 104)])
def test_slices_outside_the_split(data: DataSet, bounds: tuple[int, int]) -> None:
    with pytest.raises(IndexError):
        data.slice(*bounds)


def test_sets_without_dense_columns_or_without_features(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    path = folder / "train-00000.arrow"
    batch = pa.record_batch({"label": pa.array([0, 1, 1], type=pa.uint8())})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    files = (DataFile(name=path.name, rows=3, bytes=path.stat().st_size, sha256=sha256(path)),)
    Schema(label="label", dense=(), features=(), splits={"train": Split(rows=3, positives=2, files=files)}).save(folder)
    batch = DataSet(folder).slice(1, 3)
    assert batch.dense.shape == (2, 0)
    assert batch.ids.values.shape == (0, 2)
    assert batch.label.tolist() == [1.0, 1.0]


def test_a_missing_folder_and_an_unknown_split(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no data folder .*nowhere.*holdall prepare"):
        DataSet(tmp_path / "nowhere")
    folder = make_folder(tmp_path / "data", [5])
    with pytest.raises(DataError, match=r"no split 'tran' \(did you mean 'train'\?\)"):
        DataSet(folder, "tran")


def test_a_missing_file(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "data", [5, 5])
    (folder / "train-00001.arrow").unlink()
    with pytest.raises(DataError, match=r"train-00001\.arrow is missing.*holdall prepare"):
        DataSet(folder)


@pytest.mark.parametrize("length", [0, 10, -1])
def test_a_truncated_file(tmp_path: Path, length: int) -> None:
    folder = make_folder(tmp_path / "data", [50])
    path = folder / "train-00000.arrow"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataError, match=r"train-00000\.arrow.*truncated.*holdall prepare"):
        DataSet(folder)


@pytest.mark.parametrize("verify", [False, True])
def test_a_changed_byte_is_found(tmp_path: Path, verify: bool) -> None:
    folder = make_folder(tmp_path / "data", [50])
    flip_bit(folder / "train-00000.arrow")
    with pytest.raises(DataError, match=r"train-00000\.arrow was changed"):
        DataSet(folder, verify=verify)


def test_exchanged_files_are_found(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "data", [50, 50])
    swap(folder / "train-00000.arrow", folder / "train-00001.arrow")
    with pytest.raises(DataError, match=r"train-00000\.arrow was changed"):
        DataSet(folder)


def test_the_check_may_be_left_to_the_caller(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "data", [50])
    DataSet(folder, check=False).check_files().result()
    flip_bit(folder / "train-00000.arrow")
    data = DataSet(folder, check=False)
    with pytest.raises(DataError, match=r"train-00000\.arrow was changed"):
        data.check_files().result()


def rewrite(folder: Path, batches: list[pa.RecordBatch], compression: str | None = None, name: str = "") -> None:
    """Replace the one file of a folder, and its entry in the schema."""
    path = folder / "train-00000.arrow"
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    entry = {"bytes": path.stat().st_size, "sha256": sha256(path), "name": name or path.name}
    edit_json(folder / "schema.json", lambda document: document["splits"]["train"]["files"][0].update(entry))


def test_files_of_the_wrong_form(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "data", [500])
    good = row_batch(range(500), bags=False)

    def refused(message: str, batches: list[pa.RecordBatch], **options: str) -> None:
        rewrite(folder, batches, **options)
        with pytest.raises(DataError, match=message):
            DataSet(folder)

    refused("2 record batches instead of one", [good.slice(0, 250), good.slice(250)])
    refused("compressed", [good], compression="zstd")
    refused("499 rows instead of 500", [good.slice(0, 499)])
    refused("no column 'ids'", [good.drop_columns(["ids"])])
    integers = pa.array(np.zeros(500, dtype=np.int32))
    refused("column 'label' .* is int32 instead of uint8", [good.set_column(0, "label", integers)])
    narrow = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(1000, dtype=np.float32)), 2)
    refused("column 'dense' .* instead of a fixed-size list of 3 float", [good.set_column(1, "dense", narrow)])
    nulls = pa.array([None] + [1] * 499, type=pa.uint8())
    refused("column 'label' .* has 1 nulls", [good.set_column(0, "label", nulls)])
    refused("outside its folder", [good], name="../data/train-00000.arrow")
    rewrite(folder, [good], name="train-00000.arrow")
    assert rows_of(DataSet(folder).slice(0, 500)) == list(range(500))


def test_a_file_that_is_not_arrow(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "data", [500])
    path = folder / "train-00000.arrow"
    path.write_bytes(b"x" * path.stat().st_size)
    edit_json(folder / "schema.json", lambda d: d["splits"]["train"]["files"][0].update(sha256=sha256(path)))
    with pytest.raises(DataError, match=r"train-00000\.arrow cannot be read as an Arrow IPC file"):
        DataSet(folder)


# The order of an epoch


def order_of(loader: Loader, epoch: int = 0, start_batch: int = 0) -> list[list[int]]:
    return [rows_of(batch) for batch in loader.epoch(epoch, start_batch)]


@pytest.mark.parametrize("shuffle", ["chunks", "blocks", "rows", "none"])
@pytest.mark.parametrize("batch_size", [1, 7, 40, 102, 103, 500])
def test_every_row_once_an_epoch(data: DataSet, shuffle: str, batch_size: int) -> None:
    loader = Loader(data, batch_size, shuffle=shuffle)
    for epoch in range(3):
        batches = order_of(loader, epoch)
        assert len(batches) == loader.num_batches
        assert sorted(row for batch in batches for row in batch) == list(range(103))
        assert all(len(batch) == batch_size for batch in batches[:-1])


def test_no_shuffle_is_file_order(data: DataSet) -> None:
    assert order_of(Loader(data, 10, shuffle=False)) == [list(range(i, min(i + 10, 103))) for i in range(0, 103, 10)]


def test_blocks_are_contiguous_on_the_ring_and_move_between_epochs(data: DataSet) -> None:
    loader = Loader(data, 10, shuffle="blocks")
    epochs = [order_of(loader, epoch) for epoch in range(4)]
    for batches in epochs:
        assert all((later - row) % 103 == 1 for batch in batches for row, later in pairwise(batch))
        assert batches[:10] != sorted(batches[:10])
    assert len({batches[0][0] % 10 for batches in epochs}) > 1  # cut at other places
    assert len({str(batches) for batches in epochs}) == 4


def test_rows_are_mixed(data: DataSet) -> None:
    batches = order_of(Loader(data, 10, shuffle="rows"))
    neighbours = sum(later - row == 1 for batch in batches for row, later in pairwise(batch))
    assert neighbours < 10  # of 92; about 1 by chance


@pytest.mark.parametrize("shuffle", ["chunks", "blocks", "rows"])
def test_the_order_depends_on_seed_and_epoch_alone(data: DataSet, shuffle: str) -> None:
    def order(seed: int, epoch: int, prefetch: int) -> list[list[int]]:
        return order_of(Loader(data, 10, shuffle=shuffle, seed=seed, prefetch=prefetch), epoch)

    assert order(0, 5, prefetch=2) == order(0, 5, prefetch=0)
    assert order(0, 5, prefetch=2) != order(1, 5, prefetch=2)
    assert order(0, 5, prefetch=2) != order(0, 6, prefetch=2)


@pytest.mark.parametrize("shuffle", ["chunks", "blocks", "rows", "none"])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_ranks_together_see_what_one_process_sees(data: DataSet, shuffle: str, world_size: int) -> None:
    whole = order_of(Loader(data, 25, shuffle=shuffle), 1)
    ranks = [
        order_of(Loader(data, 25, shuffle=shuffle, rank=rank, world_size=world_size), 1) for rank in range(world_size)
    ]
    for number, batch in enumerate(whole):
        shares = [rank[number] for rank in ranks]
        assert [row for share in shares for row in share] == batch
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_global_batch_smaller_than_the_world(data: DataSet) -> None:
    sizes = [len(order_of(Loader(data, 2, rank=rank, world_size=4))[0]) for rank in range(4)]
    assert sorted(sizes) == [0, 0, 1, 1]


def test_drop_last_gives_full_batches_and_drops_other_rows_each_epoch(data: DataSet) -> None:
    loader = Loader(data, 20, drop_last=True)
    assert loader.num_batches == 5
    assert loader.num_samples == 100
    dropped = set()
    for epoch in range(4):
        batches = order_of(loader, epoch)
        assert [len(batch) for batch in batches] == [20] * 5
        dropped.add(frozenset(range(103)) - frozenset(row for batch in batches for row in batch))
    assert all(len(rows) == 3 for rows in dropped)
    assert len(dropped) > 1


# Going on


@pytest.mark.parametrize("shuffle", ["chunks", "blocks", "rows", "none"])
def test_resume_gives_the_batches_that_were_left(data: DataSet, shuffle: str) -> None:
    loader = Loader(data, 10, shuffle=shuffle)
    whole = order_of(loader, 2)
    for start in range(loader.num_batches + 1):
        assert order_of(loader, 2, start) == whole[start:]


def test_state_goes_through_json_to_another_world_size(data: DataSet) -> None:
    whole = order_of(Loader(data, 10, seed=3), 2)
    state = json.loads(json.dumps(Loader(data, 10, seed=3, rank=1, world_size=2).state(epoch=2, num_given=4)))
    loader = Loader(data, 10, seed=3)
    position = loader.load_state(state)
    assert position == Position(epoch=2, batch=4, sample=40)
    assert order_of(loader, position.epoch, position.batch) == whole[4:]


def test_the_end_of_an_epoch_is_the_start_of_the_next(data: DataSet) -> None:
    loader = Loader(data, 10)
    assert loader.load_state(loader.state(epoch=2, num_given=11)) == Position(epoch=3, batch=0, sample=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 4}, "made with seed 4 and this run has 0"),
        ({"batch_size": 20}, "made with batch_size 20"),
        ({"rows": 99}, "made with rows 99"),
        ({"shuffle": "rows"}, "made with shuffle 'rows'"),
        ({"sample": 5}, "is at sample 5"),
        ({"sample": 500}, "is at sample 500"),
        ({"epoch": "one"}, r"'state\.data\.epoch' must be a whole number of at least 0, not 'one'"),
        ({"epoch": -1}, r"'state\.data\.epoch' must be a whole number of at least 0, not -1"),
    ],
)
def test_a_state_of_another_run_is_refused(data: DataSet, change: dict[str, object], message: str) -> None:
    loader = Loader(data, 10)
    with pytest.raises(CheckpointError, match=message):
        loader.load_state({**loader.state(0, 1), **change})


# The thread


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "holdall-loader"]


def test_closing_or_dropping_an_iterator_stops_its_thread(data: DataSet) -> None:
    loader = Loader(data, 5)
    assert not loader_threads()
    closed = loader.epoch(0)
    next(closed)
    assert len(loader_threads()) == 1
    closed.close()  # type: ignore[attr-defined]
    assert not loader_threads()
    assert list(closed) == []
    dropped = loader.epoch(0)
    next(dropped)
    del dropped
    gc.collect()
    assert not loader_threads()
    loader.epoch(0)  # never asked for anything
    assert not loader_threads()
    list(loader.epoch(0))
    assert not loader_threads()


def test_no_more_than_the_depth_is_made_ahead(data: DataSet) -> None:
    made = []

    def make() -> object:
        for number in range(50):
            made.append(number)
            yield data.slice(number, number + 1)

    batches = prefetched(make(), depth=3)
    next(batches)
    deadline = time.monotonic() + 5
    while len(made) < 5 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)  # time in which a thread without a bound would go on
    assert len(made) == 5  # one given, three waiting, one in the thread's hands
    batches.close()  # type: ignore[attr-defined]


def test_an_error_in_the_thread_comes_after_the_batches_before_it(data: DataSet) -> None:
    def make() -> object:
        yield data.slice(0, 2)
        yield data.slice(2, 4)
        raise DataError("the disk is gone")

    batches = prefetched(make(), depth=4, name="loader")
    assert [rows_of(batch) for batch in islice(batches, 2)] == [[0, 1], [2, 3]]
    with pytest.raises(DataError, match="the disk is gone"):
        next(batches)
    assert not loader_threads()


# Bad options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch size is 0"),
        ({"shuffle": "row"}, "shuffle is 'row'"),
        ({"rank": 2, "world_size": 2}, "rank 2 of a world of 2"),
        ({"seed": -1}, "seed is -1"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"batch_size": 200, "drop_last": True}, "more than the 103 rows"),
    ],
)
def test_bad_options(data: DataSet, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Loader(data, **{"batch_size": 10, **options})  # type: ignore[arg-type]


def test_a_start_beyond_the_epoch(data: DataSet) -> None:
    with pytest.raises(ConfigError, match="batch 12 of an epoch of 11"):
        Loader(data, 10).epoch(0, 12)


@pytest.mark.parametrize("file_rows", [[], [0]])
def test_an_empty_split(tmp_path: Path, file_rows: list[int]) -> None:
    data = DataSet(make_folder(tmp_path / "data", file_rows))
    assert len(data) == 0
    assert len(data.slice(0, 0)) == 0
    with pytest.raises(DataError, match=r"split 'train' of .* has no rows"):
        Loader(data, 10)


def test_a_loader_takes_the_path_of_a_folder_and_refuses_texts_as_numbers(data: DataSet) -> None:
    first, same = (next(Loader(given, 4).epoch(0)) for given in (data, str(data.folder)))
    assert torch.equal(first.label, same.label)
    with pytest.raises(ConfigError, match="'batch_size' must be a whole number, not '4'"):
        Loader(data, "4")  # type: ignore[arg-type]
