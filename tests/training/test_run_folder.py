"""Run folder: one writer, and an old run that is never lost before the new one has a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from holdall import checkpoint
from holdall.common.errors import CheckpointError, HoldallError, NonFiniteLossError
from holdall.common.folder_lock import locked
from holdall.common.output_folder import clear_mark
from holdall.distributed.processes import SINGLE_PROCESS
from holdall.training import trainer
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import CHECKPOINTS
from holdall.training.run_folder import RunFolder, make_run_folder
from holdall.training.tracking import RunLog, read_metrics, read_run
from holdall.training.train import train
from holdall.training.trainer import Trainer
from tests.common.killed import killed_at_each_change

SMALL = TrainConfig.of(dim=4, bottom=(8,), top=(8,), batch_size=256, steps=2, log_every=1)
MODES = pytest.mark.parametrize(
    "options", [{"resume": True}, {"overwrite": True}, {}], ids=["resume", "overwrite", "new"]
)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Path:
    """A run of two steps, alone in its folder."""
    out = tmp_path / "runs/run"
    train(data, out, SMALL, quiet=True)
    return out


@MODES
def test_nobody_else_trains_in_the_folder_of_a_run(data: Path, run: Path, options: dict[str, bool]) -> None:
    before = contents(run)
    with locked(run), pytest.raises(HoldallError, match=r"process \d+ on .* is writing to"):
        train(data, run, SMALL, quiet=True, **options)
    assert contents(run) == before
    train(data, run, SMALL, quiet=True, resume=True)


@MODES
@pytest.mark.parametrize("exists", [True, False])
def test_a_second_run_during_the_start_changes_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, bool], exists: bool
) -> None:
    """The second one starts while the first builds its model, when nothing has been written yet."""
    out = tmp_path / "run"
    if exists:
        train(data, out, SMALL, quiet=True)
    original, refused = trainer.find_strategy, []

    def find_strategy(*arguments: object) -> object:
        if not refused:
            before = contents(tmp_path)
            with pytest.raises(HoldallError, match="is writing to") as stop:
                train(data, out, SMALL, quiet=True, **options)
            refused.append(str(stop.value))
            assert contents(tmp_path) == before
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer, "find_strategy", find_strategy)
    train(data, out, SMALL, quiet=True, overwrite=True)
    assert len(refused) == 1
    assert [row["step"] for row in read_metrics(out) if row["split"] == "train"] == [1, 2]
    assert names(tmp_path) == {"run"}


def test_inputs_are_checked_before_the_old_run_is_touched(data: Path, run: Path, tmp_path: Path) -> None:
    before = contents(run)
    damaged = tmp_path / "damaged"
    shutil.copytree(data, damaged)
    (damaged / "schema.json").write_text("{")
    cases: list[tuple[Path, dict[str, object], str]] = [
        (tmp_path / "TYPO", {}, "no data folder"),
        (damaged, {}, "schema.json"),
        (data, {"plan": str(tmp_path / "plan.json")}, "plan.json does not exist"),
        (data, {"early_stopping": 1, "best_by": "ndcg"}, "needs ranking cases"),
    ]
    for folder, settings, message in cases:
        with pytest.raises(HoldallError, match=message):
            train(folder, run, SMALL.replace(**settings), quiet=True, overwrite=True)
        assert contents(run) == before
        assert names(run.parent) == {"run"}


def test_inputs_in_the_run_folder_are_kept(data: Path, run: Path) -> None:
    (run / "plan.json").write_text("{}")
    with pytest.raises(HoldallError, match=r"is around the input .*plan\.json"):
        train(data, run, SMALL.replace(plan=str(run / "plan.json")), quiet=True, overwrite=True)
    assert (run / "plan.json").exists()
    counts = SMALL.replace(strategy="split", hot_bytes="1KB", profile=str(run / "popularity.json"))
    with pytest.raises(HoldallError, match=r"is around the input .*popularity\.json"):
        train(data, run, counts, quiet=True, overwrite=True)


@pytest.mark.parametrize("options", [{"resume": True}, {"overwrite": True}], ids=["resume", "overwrite"])
def test_without_run_json_checkpoints_are_kept(data: Path, run: Path, options: dict[str, bool]) -> None:
    (run / "run.json").unlink()
    before = contents(run)
    with pytest.raises(HoldallError, match=r"no run\.json"):
        train(data, run, SMALL.replace(steps=4), quiet=True, **options)
    assert contents(run) == before
    if "resume" in options:
        with pytest.raises(CheckpointError, match=r"has checkpoints but no run\.json.*put its run\.json back"):
            train(data, run, SMALL, quiet=True, resume=True)


@MODES
def test_a_folder_that_is_no_run_is_refused(data: Path, tmp_path: Path, options: dict[str, bool]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text("mine\n")
    with pytest.raises(HoldallError, match="exists already" if not options else "is not a run folder"):
        train(data, other, SMALL, quiet=True, **options)
    assert contents(other) == {"metrics.jsonl": b"mine\n"}
    assert names(tmp_path) == {"other"}


def test_an_empty_folder_is_filled_by_resume(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert train(data, tmp_path / "run", SMALL, quiet=True, resume=True)["steps"] == 2


def test_the_old_run_goes_when_the_new_one_has_a_checkpoint(
    data: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, seen = contents(run), []
    original = Trainer.save

    def save(self: Trainer, *arguments: object, **options: object) -> Path:
        aside = contents(run.parent / "run.replaced") if (run.parent / "run.replaced").exists() else {}
        seen.append({name: content for name, content in aside.items() if not name.startswith(".holdall-")} == old)
        return original(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "save", save)
    train(data, run, SMALL.replace(save_every=1, save_in_background=False), quiet=True, overwrite=True)
    assert seen == [True, False]
    assert names(run.parent) == {"run"}
    assert read_run(run)["config"]["train"]["save_every"] == 1


def test_a_new_run_that_fails_later_leaves_both(
    data: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = checkpoint.latest(run / CHECKPOINTS)
    assert old is not None

    def fail(self: Trainer, *_: object) -> None:
        (self.out / "bad_batch.safetensors").write_text("look")
        raise NonFiniteLossError("the loss is nan")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", fail)
        for _ in range(2):  # again in the place of the one that failed
            with pytest.raises(NonFiniteLossError):
                train(data, run, SMALL.replace(lr=0.5), quiet=True, overwrite=True)
            assert "the run that it replaces is kept in" in capsys.readouterr().err
            assert (run / "bad_batch.safetensors").exists()
            assert checkpoint.latest(run.parent / "run.replaced" / CHECKPOINTS) is not None
    with pytest.raises(HoldallError, match="exists already"):
        train(data, run, SMALL, quiet=True)
    assert names(run.parent) == {"run", "run.replaced"}
    train(data, run, SMALL.replace(lr=0.5), quiet=True, resume=True)
    assert names(run.parent) == {"run"}
    assert read_run(run)["config"]["train"]["lr"] == 0.5


def work(out: Path, seed: int, *, overwrite: bool = False, resume: bool = False) -> None:
    """What a run does with its folder."""
    with make_run_folder(out, SINGLE_PROCESS, resume=resume, overwrite=overwrite):
        (out / "tiers").mkdir(exist_ok=True)
        if not resume or not (out / "run.json").exists():
            RunLog.create(out, {"data": "data", "train": {"seed": seed}}, tensorboard=False)
            clear_mark(out)
        state = {"seed": read_run(out)["config"]["train"]["seed"]}
        for step in (1, 2):
            checkpoint.save(out / CHECKPOINTS, step, {"x": torch.zeros(2)}, state, keep=1)
            RunFolder(out).remove_replaced()


def seed_of(run: Path) -> int | None:
    """Seed of a run whose checkpoint loads; None if it has none."""
    path = checkpoint.latest(run / CHECKPOINTS)
    return None if path is None else int(checkpoint.load(path)[1]["seed"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has no manifest.json and is skipped")  # a run that was being removed
@pytest.mark.parametrize("options", [{"resume": True}, {"overwrite": True}], ids=["resume", "overwrite"])
def test_a_kill_at_any_moment_leaves_a_whole_run(tmp_path: Path, options: dict[str, bool]) -> None:
    out = tmp_path / "run"

    def before() -> None:
        work(out, 1, overwrite=True)

    for number in killed_at_each_change(lambda: work(out, 2, overwrite=True), before):
        assert {seed_of(out), seed_of(tmp_path / "run.replaced")} & {1, 2}, number
        work(out, 3, **options)
        assert seed_of(out) in ((3,) if "overwrite" in options else (1, 2, 3)), number
        assert read_run(out)["config"]["train"]["seed"] == seed_of(out)
        assert names(tmp_path) == {"run"}, number
        assert not any(name.startswith(".holdall") for name in names(out))
