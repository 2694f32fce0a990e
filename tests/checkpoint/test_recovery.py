"""Checkpoint that a run resumes from: the newest undamaged one, with hot rows that were saved after it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdall import checkpoint
from holdall.checkpoint import HotPart
from holdall.common.errors import CheckpointError, ConfigError
from holdall.tiers.host_rows import HostRows
from holdall.tiers.lazy_tensor import LazyTensor
from tests.edits import edit_json

LAST = "shard-00001.safetensors"


def save(folder: Path, step: int, keep: int = 3) -> Path:
    return checkpoint.save(folder, step, model(step), {"step": step}, keep=keep, shard_bytes=200)


def model(step: int) -> dict[str, torch.Tensor]:
    """A table of 12 rows, each worth step + its number / 100, and a dense part worth the step."""
    rows = step + torch.arange(12.0)[:, None] / 100
    return {"table": rows.repeat(1, 4), "sums": rows[:, 0].clone(), "dense": torch.full((5,), float(step))}


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in model(0).items()}


def change_byte(path: Path) -> None:
    content = bytearray((path / LAST).read_bytes())
    content[-1] ^= 1
    (path / LAST).write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda p: (p / LAST).write_bytes((p / LAST).read_bytes()[:-7]), f"{LAST} has .* bytes where"),
    "altered": (change_byte, f"{LAST} has been altered"),
    "missing": (lambda p: (p / LAST).unlink(), f"{LAST} is missing"),
    "manifest": (lambda p: (p / "manifest.json").write_text("{"), "manifest.json cannot be read as JSON"),
}


class TestLatestSound:
    @pytest.mark.parametrize("kind", DAMAGE)
    def test_takes_the_one_before_a_damaged_one(self, tmp_path: Path, kind: str) -> None:
        damage, words = DAMAGE[kind]
        for step in (1, 2, 3):
            save(tmp_path, step)
        damage(tmp_path / "step-00000003")
        with pytest.warns(UserWarning, match=f"step-00000003/{words}.*resumes from step-00000002"):
            found = checkpoint.latest_sound(tmp_path)
        assert found == tmp_path / "step-00000002"
        into = zeros()
        assert checkpoint.load_into(found, into, verify=False) == {"step": 2}
        assert torch.equal(into["table"], model(2)["table"])

    def test_says_nothing_of_older_ones(self, tmp_path: Path) -> None:
        for step in (1, 2):
            save(tmp_path, step)
        change_byte(tmp_path / "step-00000001")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert checkpoint.latest_sound(tmp_path) == tmp_path / "step-00000002"

    def test_all_damaged(self, tmp_path: Path) -> None:
        for step in (1, 2):
            change_byte(save(tmp_path, step))
        with pytest.raises(
            CheckpointError, match=r"every checkpoint in .* is damaged: .*0002/shard.*altered.*0001/shard"
        ):
            checkpoint.latest_sound(tmp_path)

    def test_none_at_all(self, tmp_path: Path) -> None:
        assert checkpoint.latest_sound(tmp_path) is None
        assert checkpoint.latest_sound(tmp_path / "absent") is None

    def test_what_was_passed_over_is_the_first_to_go(self, tmp_path: Path) -> None:
        for step in (2, 4):
            save(tmp_path, step)
        change_byte(tmp_path / "step-00000004")
        save(tmp_path, 3, keep=2)  # the run went on from step 2
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def hot(step: int, rows: list[int], **kwargs: Any) -> dict[str, Any]:
    """The dense part and some rows of the table and its sums, at a step."""
    now = {**model(step), **kwargs}
    chosen = torch.tensor(rows, dtype=torch.int64)
    return {"dense": now["dense"], "table": HotPart(now["table"], chosen), "sums": HotPart(now["sums"], chosen)}


class TestHotRows:
    @pytest.mark.parametrize("rows", [[0, 1, 2], [7, 0, 11], []], ids=["prefix", "any", "none"])
    def test_gives_hot_rows_and_dense_part_of_the_later_step(self, tmp_path: Path, rows: list[int]) -> None:
        base = save(tmp_path, 10)
        path = checkpoint.save_hot(tmp_path, 15, hot(15, rows), {"step": 15}, base=10, shard_bytes=40)
        assert checkpoint.latest(tmp_path) == base
        assert checkpoint.latest_hot(tmp_path, 10) == path == tmp_path / "hot-00000015"
        into = zeros()
        checkpoint.load_into(base, into)
        assert checkpoint.load_hot_into(path, into) == {"step": 15}
        for name in ("table", "sums"):
            expected = model(10)[name]
            expected[rows] = model(15)[name][rows]
            assert torch.equal(into[name], expected)
        assert torch.equal(into["dense"], model(15)["dense"])

    def test_rows_of_a_lazy_tensor_become_touched(self, tmp_path: Path) -> None:
        def lazy(step: int, touched: list[int]) -> LazyTensor:
            rows = torch.zeros(12, 4)
            rows[touched] = model(step)["table"][touched]
            flags = torch.zeros(12, dtype=torch.bool)
            flags[touched] = True
            return LazyTensor(HostRows(rows), flags, 0, 12, {"std": 0.0, "seed": 0})

        base = checkpoint.save(tmp_path, 10, {"table": lazy(10, [0, 1, 5])}, {})
        part = {"table": HotPart(lazy(15, [0, 1, 2, 5, 6]), torch.arange(3))}
        path = checkpoint.save_hot(tmp_path, 15, part, {}, base=10)
        into = lazy(20, [3, 4])
        checkpoint.load_into(base, {"table": into})
        checkpoint.load_hot_into(path, {"table": into})
        assert into.touched().tolist() == [0, 1, 2, 5]
        expected = torch.zeros(12, 4)
        expected[[0, 1, 2]], expected[5] = model(15)["table"][:3], model(10)["table"][5]
        assert torch.equal(into.rows.tensor, expected)

    def test_only_the_newest_of_a_base_is_kept_and_goes_with_it(self, tmp_path: Path) -> None:
        def names() -> list[str]:
            return sorted(path.name for path in tmp_path.iterdir())

        save(tmp_path, 10, keep=2)
        for step in (12, 14):
            checkpoint.save_hot(tmp_path, step, hot(step, [0]), {}, base=10)
        assert names() == ["hot-00000014", "step-00000010"]
        save(tmp_path, 20, keep=2)
        checkpoint.save_hot(tmp_path, 22, hot(22, [0]), {}, base=20)
        assert names() == ["hot-00000014", "hot-00000022", "step-00000010", "step-00000020"]
        assert checkpoint.latest_hot(tmp_path, 10) == tmp_path / "hot-00000014"
        save(tmp_path, 30, keep=2)
        assert names() == ["hot-00000022", "step-00000020", "step-00000030"]
        assert checkpoint.latest_hot(tmp_path, 30) is None
        save(tmp_path, 21, keep=3)  # a run that went on from step 20: step 22 is yet to come
        assert names() == ["step-00000020", "step-00000021", "step-00000030"]

    def test_a_damaged_one_is_passed_over(self, tmp_path: Path) -> None:
        save(tmp_path, 10)
        path = checkpoint.save_hot(tmp_path, 12, hot(12, [0, 1]), {}, base=10, shard_bytes=40)
        change_byte(path)
        with pytest.warns(UserWarning, match=f"hot-00000012/{LAST} has been altered.*skipped"):
            assert checkpoint.latest_hot(tmp_path, 10) is None

    def test_killed_while_saving_there_is_none(self, tmp_path: Path) -> None:
        save(tmp_path, 10)
        (tmp_path / "hot-00000012.partial").mkdir()
        assert checkpoint.latest_hot(tmp_path, 10) is None
        checkpoint.save_hot(tmp_path, 13, hot(13, [0]), {}, base=10)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["hot-00000013", "step-00000010"]

    def test_what_cannot_be_is_refused(self, tmp_path: Path) -> None:
        base = save(tmp_path, 10)
        with pytest.raises(ConfigError, match="step 9 cannot complete the checkpoint of step 10"):
            checkpoint.save_hot(tmp_path, 9, hot(9, [0]), {}, base=10)
        with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 11 .*save one first"):
            checkpoint.save_hot(tmp_path, 12, hot(12, [0]), {}, base=11)
        path = checkpoint.save_hot(tmp_path, 12, hot(12, [0]), {}, base=10)
        with pytest.raises(CheckpointError, match="holds the hot rows of a step after 10 only"):
            checkpoint.load_into(path, zeros())
        with pytest.raises(CheckpointError, match="is a full checkpoint, not one of hot rows"):
            checkpoint.load_hot_into(base, zeros())
        with pytest.raises(CheckpointError, match=r"'table' has shape \[12, 4\] in the checkpoint and \[11, 4\] here"):
            checkpoint.load_hot_into(path, {**zeros(), "table": torch.zeros(11, 4)})
        with pytest.raises(CheckpointError, match="'dense' is in the checkpoint only"):
            checkpoint.load_hot_into(path, {"table": torch.zeros(12, 4), "sums": torch.zeros(12)})

    def test_row_numbers_out_of_range_are_refused(self, tmp_path: Path) -> None:
        save(tmp_path, 10)
        path = checkpoint.save_hot(tmp_path, 12, hot(12, [0, 11]), {}, base=10)
        for name in ("table", "sums"):
            edit_json(path / "manifest.json", lambda m, name=name: m["lazy"][name]["shape"].__setitem__(0, 11))
        smaller = {"table": torch.zeros(11, 4), "sums": torch.zeros(11), "dense": torch.zeros(5)}
        with pytest.raises(CheckpointError, match=r"has rows of '\w+' from 0 to 11, of which there are 11"):
            checkpoint.load_hot_into(path, smaller)

    def test_a_full_one_needs_initial_values(self, tmp_path: Path) -> None:
        save(tmp_path, 10)
        path = checkpoint.save_hot(tmp_path, 12, hot(12, [0]), {}, base=10)
        edit_json(path / "manifest.json", lambda manifest: manifest.pop("base"))
        with pytest.raises(CheckpointError, match="has no initial values for the rows"):
            checkpoint.load_into(path, zeros())
