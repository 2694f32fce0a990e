"""Checkpoints of several processes: written by all, loaded by any number of them, bit for bit, with faults."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall import checkpoint
from holdall.checkpoint.row_assignment import ROWS_OF_EACH, ROWS_OF_ONE, WHOLE, TensorInfo, assign_spans
from tests.distributed import checkpoint_workers as planted
from tests.distributed.harness import WorkerFailed, run

pytestmark = pytest.mark.slow

HERE = "tests.distributed.checkpoint_workers"
WORLDS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Checkpoints of the same model by 1, 2, 3 and 4 processes."""
    found = {world: tmp_path_factory.mktemp("saved") / str(world) for world in WORLDS}
    for world, folder in found.items():
        assert set(run(f"{HERE}:save_planted", world, str(folder))) == {str(folder / "step-00000001")}
    return found


def whole_model(version: float) -> dict[str, torch.Tensor]:
    tables = {f"tables.{name}": planted.table(name, version) for name in planted.TABLES}
    return {**planted.ordinary(version), **tables, **dict.fromkeys(("spread", "lazy"), planted.planted(version))}


class TestAnyNumberOfProcesses:
    @pytest.mark.parametrize("world", WORLDS)
    def test_loads_what_any_number_wrote(self, folders: dict[int, Path], world: int) -> None:
        assert run(f"{HERE}:load_planted", world, [str(folder) for folder in folders.values()]) == [[[]] * 4] * world

    @pytest.mark.parametrize("world", WORLDS)
    def test_loads_without_processes(self, folders: dict[int, Path], world: int) -> None:
        tensors, state = checkpoint.load(folders[world] / "step-00000001")
        expected = whole_model(1.0)
        assert state == {"v": 1.0}
        assert tensors.keys() == expected.keys()
        assert [name for name, tensor in expected.items() if not torch.equal(tensors[name], tensor)] == []

    def test_each_process_writes_about_the_same_bytes_and_each_row_is_there_once(
        self, folders: dict[int, Path]
    ) -> None:
        found = checkpoint.read(folders[4] / "step-00000001")
        by_rank = [
            sum(s.bytes for s in found.shards.values() if s.file.startswith(f"shard-{r:05d}-")) for r in range(4)
        ]
        assert sum(by_rank) == sum(shard.bytes for shard in found.shards.values())
        assert max(by_rank) < 1.02 * min(by_rank)
        rows = torch.cat([piece_rows(found, piece) for piece in found.tensors["spread.rows"].pieces])
        assert sorted(rows.tolist()) == [row for row in range(planted.NUM_ROWS) if row % 4 != 1]
        assert max(shard.bytes for shard in found.shards.values()) < 502_000

    def test_one_process_names_its_shards_as_ever(self, folders: dict[int, Path]) -> None:
        names = sorted(path.name for path in (folders[1] / "step-00000001").glob("shard-*"))
        assert names[:2] == ["shard-00000.safetensors", "shard-00001.safetensors"]


def piece_rows(found: checkpoint.Checkpoint, piece: object) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(found.path / piece.shard)["spread.rows"]  # type: ignore[attr-defined]


class TestDealing:
    @settings(derandomize=True, deadline=None, max_examples=50)
    @given(data=st.data(), world=st.integers(1, 5))
    def test_every_row_once_by_one_that_has_it(self, data: st.DataObject, world: int) -> None:
        infos: list[dict[str, TensorInfo]] = [{} for _ in range(world)]
        kinds = st.sampled_from([WHOLE, ROWS_OF_ONE, ROWS_OF_EACH])
        for number, kind in enumerate(data.draw(st.lists(kinds, max_size=6))):
            shape = tuple(data.draw(st.lists(st.integers(0, 3_000_000), max_size=1)))
            shape = shape if kind == WHOLE else (10_000_000, 3)
            for rank in data.draw(st.sets(st.integers(0, world - 1), min_size=1)):
                rows = 0 if kind == WHOLE else data.draw(st.integers(0, 500_000))
                infos[rank][f"t{number}"] = TensorInfo(kind, "float32", shape, None, rows)
        stored, _, spans = assign_spans(infos)
        for name, (_, shape) in stored.items():
            base = name.removesuffix(".rows").removesuffix(".values")
            found = sorted((s.start, s.stop, rank) for rank, its in enumerate(spans) for s in its if s.name == name)
            assert found[0][0] == 0
            assert found[-1][1] == (shape[0] if shape else 1)
            assert all(left[1] == right[0] for left, right in pairwise(found))
            assert all(base in infos[rank] for _, _, rank in found)
            for rank, its in enumerate(spans):
                for span in its:
                    if span.name == name and infos[rank][base].kind == ROWS_OF_EACH:
                        assert (span.first, span.stop - span.start) == (0, infos[rank][base].num_rows)

    def test_what_all_have_levels_what_only_some_have(self) -> None:
        replicated = {
            "w": TensorInfo(WHOLE, "float32", (4_000_000, 2)),
            "v": TensorInfo(WHOLE, "float32", (1_000_000,)),
        }
        infos = [{**replicated}, {**replicated, "mine": TensorInfo(WHOLE, "float32", (3_000_000,))}, {**replicated}]
        _, _, spans = assign_spans(infos)
        loads = [sum((s.stop - s.start) * (8 if s.name == "w" else 4) for s in its) for its in spans]
        assert max(loads) - min(loads) <= 8
        assert sum(loads) == 4 * (8_000_000 + 1_000_000 + 3_000_000)

    def test_a_tensor_that_is_not_the_same_thing_everywhere_is_refused(self, tmp_path: Path) -> None:
        first, second = run(f"{HERE}:save_what_differs", 2, str(tmp_path))
        assert first[0] == "CheckpointError"
        assert second[0] == "PeerError"
        assert "'x' is float32 [2] saved whole on rank 0 and float32 [3] saved whole on rank 1" in first[1]
        assert list(tmp_path.iterdir()) == []


class TestFailures:
    @pytest.mark.parametrize(("failing", "function"), [(1, "save_file"), (0, "fsync_file"), (0, "write_json")])
    def test_a_full_disk_on_one_process_ends_the_save_on_all(self, tmp_path: Path, failing: int, function: str) -> None:
        checkpoint.save(tmp_path, 1, {"x": torch.ones(2)}, {})
        found = run(f"{HERE}:save_with_a_failure", 2, str(tmp_path), failing, function)
        for rank, (kind, words, left) in enumerate(found):
            assert kind == ("CheckpointError" if rank == failing else "PeerError")
            assert f"the disk is full while writing {tmp_path}/step-00000002" in words
            assert words.startswith("the disk" if rank == failing else f"rank {failing}: the disk")
            assert left == ["step-00000001"]
        assert checkpoint.latest(tmp_path) == tmp_path / "step-00000003"

    @pytest.mark.parametrize(("dying", "function"), [(1, "save_file"), (0, "write_json"), (0, "set_aside")])
    def test_killed_during_a_save_the_earlier_one_is_there(self, tmp_path: Path, dying: int, function: str) -> None:
        path = checkpoint.save(tmp_path, 1, {"x": torch.ones(2)}, {})
        with pytest.raises(WorkerFailed, match=f"rank {dying} died without a word|lost another process"):
            run(f"{HERE}:save_and_die", 2, str(tmp_path), dying, function)
        assert checkpoint.latest_sound(tmp_path) == path
        assert checkpoint.load(path)[0]["x"].tolist() == [1, 1]
        checkpoint.save(tmp_path, 3, {}, {}, keep=1)
        assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000003"]

    @pytest.mark.parametrize("make_partial", [False, True])
    def test_processes_that_do_not_see_one_folder(self, tmp_path: Path, make_partial: bool) -> None:
        folders = [str(tmp_path / "a"), str(tmp_path / "b")]
        found = run(f"{HERE}:save_to_other_places", 2, folders, make_partial)
        failing = 0 if make_partial else 1
        assert found[failing][0] == "CheckpointError"
        assert found[1 - failing][0] == "PeerError"
        assert all("all processes must see the same folder" in words for _, words in found)
        assert list((tmp_path / "a").iterdir()) == []

    def test_what_does_not_fit_on_one_process_is_refused_by_all(self, folders: dict[int, Path]) -> None:
        first, second = run(f"{HERE}:load_what_does_not_fit", 2, str(folders[3]))
        assert [first[0], second[0]] == ["CheckpointError", "CheckpointError"]
        assert "1 tensors differ: 'tables.C' is in the checkpoint only" in first[1]
        assert "2 tensors differ: 'tables.B' has shape [10, 2] in the checkpoint and [11, 2] here" in second[1]
        assert first[2] == second[2] == 0


def test_a_damaged_checkpoint_is_passed_over_and_each_shard_hashed_once(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {f"t{n}": torch.full((64,), step + n) for n in range(5)}, {}, shard_bytes=512)
    shard = tmp_path / "step-00000002" / "shard-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4] + b"\1\1\1\1")
    found = run(f"{HERE}:find_sound", 3, str(tmp_path))
    assert [name for name, _, _ in found] == ["step-00000001"] * 3
    assert [told for _, told, _ in found[1:]] == [[], []]
    (warning,) = found[0][1]
    assert "step-00000002/shard-00003.safetensors has been altered" in warning
    assert "resumes from step-00000001" in warning
    hashed = [file for _, _, files in found for file in files]
    assert len(hashed) == len(set(hashed))
    assert {file for file in hashed if "00001/" in file} == {
        f"step-00000001/shard-0000{n}.safetensors" for n in range(5)
    }


def test_in_the_background_while_other_collectives_run(tmp_path: Path) -> None:
    found = run(f"{HERE}:save_in_the_background", 2, str(tmp_path))
    for rank, (absent, totals, done, kind, words) in enumerate(found):
        assert absent
        assert totals == [1.0 + 2 * number for number in range(50)]
        assert done == str(tmp_path / "step-00000001")
        assert kind == ("CheckpointError" if rank == 1 else "PeerError")
        assert "the disk is full" in words
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000004"]
    tensors, _ = checkpoint.load(tmp_path / "step-00000001")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in whole_model(1.0).items())


@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (3, 1)])
def test_hot_rows_over_their_base(tmp_path: Path, saving: int, loading: int) -> None:
    run(f"{HERE}:save_hot_rows", saving, str(tmp_path))
    assert run(f"{HERE}:load_hot_rows", loading, str(tmp_path)) == [[]] * loading
