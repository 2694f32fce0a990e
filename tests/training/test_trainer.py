"""Training: it learns, resumes to the same bits, stops when it must, and leaves a complete run folder."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from holdall import checkpoint
from holdall.common.errors import CheckpointError, ConfigError, DataError, NonFiniteLossError
from holdall.data.batch import Batch
from holdall.data.dataset import DataSet
from holdall.evaluation.best_possible import best_possible_of
from holdall.tables.codes import Codebook
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import BEST, CHECKPOINTS, evaluate, load_model
from holdall.training.tracking import BAD_BATCH_FILE, load_batch, read_metrics, read_run
from holdall.training.train import train
from holdall.training.trainer import Trainer
from tests.edits import edit_json

SMALL = TrainConfig.of(dim=4, bottom=(8,), top=(16,), batch_size=128, log_every=5, deterministic=True)


def run(data: Path, out: Path, config: TrainConfig = SMALL, **options: bool) -> dict[str, object]:
    return train(data, out, config, quiet=True, **options)


def curve(out: Path) -> list[tuple[object, ...]]:
    """The rows of metrics.jsonl without the speed, which no two runs share."""
    return [
        tuple((name, value) for name, value in row.items() if name != "samples_per_second") for row in read_metrics(out)
    ]


def same_tensors(first: Path, second: Path) -> bool:
    ours, _ = checkpoint.load(checkpoint.latest(first / CHECKPOINTS))
    theirs, _ = checkpoint.load(checkpoint.latest(second / CHECKPOINTS))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_learns_and_leaves_everything(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run(data, out, SMALL.replace(epochs=2, lr=0.03))
    metrics = evaluate(out, "test")
    best = best_possible_of(DataSet(data, "test"))
    assert 0.6 < metrics["auc"] <= best["auc"] + 0.03
    assert metrics["normalized_entropy"] < 1
    assert metrics["samples"] == 400
    assert result["steps"] == 2 * 25
    document = read_run(out)
    assert document["config"]["train"]["batch_size"] == 128
    assert {"torch", "python"} <= document["versions"].keys()
    assert list((out / "tensorboard").iterdir())
    rows = read_metrics(out)
    assert [row["step"] for row in rows if row["split"] == "valid"] == [25, 50]
    losses = [row["loss"] for row in rows if row["split"] == "train"]
    assert len(losses) == 10
    assert np.mean(losses[-3:]) < np.mean(losses[:3])


def test_bags_train_too(bag_data: Path, tmp_path: Path) -> None:
    run(bag_data, tmp_path / "run", SMALL.replace(epochs=3))
    assert evaluate(tmp_path / "run", "test")["samples"] == 150


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"interaction": "concat"}, {"clip_norm": 0.1}])
def test_variants_train(data: Path, tmp_path: Path, options: dict[str, object]) -> None:
    run(data, tmp_path / "run", SMALL.replace(epochs=2, lr=0.05, **options))
    losses = [row["loss"] for row in read_metrics(tmp_path / "run") if row["split"] == "train"]
    assert losses[-1] < losses[0]


def test_the_same_seed_gives_the_same_bits(data: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(data, tmp_path / name)
    run(data, tmp_path / "c", SMALL.replace(seed=1))
    assert curve(tmp_path / "a") == curve(tmp_path / "b") != curve(tmp_path / "c")
    assert same_tensors(tmp_path / "a", tmp_path / "b")


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "stop_at"), [("sgd", 7), ("adagrad", 7), ("rowwise_adagrad", 25), ("adam", 31)])
def test_resume_continues_to_the_same_curve(data: Path, tmp_path: Path, optimizer: str, stop_at: int) -> None:
    config = SMALL.replace(optimizer=optimizer, epochs=2, evaluate_every=10, warmup_steps=9)
    run(data, tmp_path / "whole", config)
    run(data, tmp_path / "parts", config.replace(steps=stop_at))
    run(data, tmp_path / "parts", config, resume=True)
    whole = [row for row in curve(tmp_path / "whole") if row[0][1] > stop_at]
    parts = [row for row in curve(tmp_path / "parts") if row[0][1] > stop_at]
    if stop_at % 5:  # the first part logged its own last, unaligned row; what follows it starts a new window
        whole = [row for row in whole if row[0][1] > stop_at + 5]
        parts = [row for row in parts if row[0][1] > stop_at + 5]
    assert whole == parts
    assert same_tensors(tmp_path / "whole", tmp_path / "parts")


def test_a_killed_run_resumes_from_its_last_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between two checkpoints: rows after the checkpoint are written anew, none twice."""
    config = SMALL.replace(save_every=10)
    run(data, tmp_path / "whole", config)

    class Killed(BaseException):
        pass

    original = Trainer.train_step

    def dying(self: Trainer, *batches: Batch) -> float | None:
        if self.step == 17:
            raise Killed
        return original(self, *batches)

    monkeypatch.setattr(Trainer, "train_step", dying)
    with pytest.raises(Killed):
        run(data, tmp_path / "killed", config)
    monkeypatch.undo()
    assert checkpoint.latest(tmp_path / "killed" / CHECKPOINTS).name == "step-00000010"
    run(data, tmp_path / "killed", config, resume=True)
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    assert same_tensors(tmp_path / "killed", tmp_path / "whole")


def test_resume_of_nothing_starts(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "new", SMALL.replace(steps=2), resume=True)
    assert checkpoint.latest(tmp_path / "new" / CHECKPOINTS) is not None


def test_a_resumed_run_keeps_its_order_of_samples(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "whole", SMALL.replace(steps=4, shuffle="blocks"))
    run(data, tmp_path / "run", SMALL.replace(steps=2, shuffle="blocks"))
    run(data, tmp_path / "run", SMALL.replace(steps=4), resume=True)
    assert same_tensors(tmp_path / "run", tmp_path / "whole")
    run(data, tmp_path / "new", SMALL.replace(steps=1))
    assert read_run(tmp_path / "new")["config"]["train"]["shuffle"] == "chunks"
    with pytest.raises(CheckpointError, match="trained with shuffle='chunks' and is asked to resume with"):
        run(data, tmp_path / "new", SMALL.replace(steps=2, shuffle="rows"), resume=True)


def test_resume_with_other_settings_is_refused(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", SMALL.replace(steps=2))
    with pytest.raises(CheckpointError, match=r"trained with lr=0.001 and is asked to resume with lr=0.5"):
        run(data, tmp_path / "run", SMALL.replace(lr=0.5), resume=True)


def test_ctrl_c_saves_and_stops(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes in the middle of a step; the step is finished, saved, and the run resumes to the same bits."""
    original = Trainer.train_step

    def interrupted(self: Trainer, *batches: Batch) -> float | None:
        if self.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *batches)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt, match="stopped at step 4; continue with --resume"):
        run(data, tmp_path / "run")
    monkeypatch.undo()
    assert checkpoint.latest(tmp_path / "run" / CHECKPOINTS).name == "step-00000004"
    run(data, tmp_path / "run", resume=True)
    run(data, tmp_path / "whole")
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert same_tensors(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_only_the_end_of_torchrun_saves_and_stops(
    by_torchrun: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent of the process ends in the middle of a step; a shell may, torchrun may not."""
    original, parent = Trainer.train_step, os.getppid()

    def orphaned(self: Trainer, *batches: Batch) -> float | None:
        if self.step == 3:
            monkeypatch.setattr(os, "getppid", lambda: parent + 1)
        return original(self, *batches)

    monkeypatch.setattr(Trainer, "train_step", orphaned)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if not by_torchrun:
        assert run(data, tmp_path / "run")["steps"] == 25
        return
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(KeyboardInterrupt, match="stopped at step 4, since torchrun has ended; continue with --resume"):
        run(data, tmp_path / "run")
    assert checkpoint.latest(tmp_path / "run" / CHECKPOINTS).name == "step-00000004"


def test_losses_read_later_are_the_same_curve(data: Path, tmp_path: Path) -> None:
    """As on a GPU, where reading a loss in every step would wait for the device."""
    run(data, tmp_path / "at once")
    trainer = Trainer(data, tmp_path / "later", SMALL, quiet=True)
    trainer.steps.reads_losses_later = True
    torch.use_deterministic_algorithms(True)
    trainer.run()
    torch.use_deterministic_algorithms(False)
    assert curve(tmp_path / "later") == curve(tmp_path / "at once")
    assert same_tensors(tmp_path / "later", tmp_path / "at once")


def test_a_loss_that_is_not_finite_is_found_later_and_never_saved(data: Path, tmp_path: Path) -> None:
    trainer = Trainer(data, tmp_path / "run", SMALL, quiet=True)
    trainer.steps.reads_losses_later = True
    batches = trainer.loader.epoch(0)
    trainer.train_step(next(batches))
    poisoned = replace(next(batches), dense=torch.full((128, 3), float("inf")))
    trainer.step = 1
    trainer.train_step(poisoned)
    trainer.step = 2
    trainer.train_step(next(batches))
    with pytest.raises(NonFiniteLossError, match=r"the loss is nan at step 1 .* the model was updated"):
        trainer.save()
    assert checkpoint.latest(tmp_path / "run" / CHECKPOINTS) is None
    assert torch.equal(load_batch(tmp_path / "run" / BAD_BATCH_FILE).ids.values, poisoned.ids.values)


def test_a_loss_that_is_not_finite_stops_before_the_update(data: Path, tmp_path: Path) -> None:
    trainer = Trainer(data, tmp_path / "run", SMALL, quiet=True)
    batches = trainer.loader.epoch(0)
    trainer.train_step(next(batches))
    before = {name: tensor.clone() for name, tensor in trainer.checkpoints.tensors().items()}
    batch = next(batches)
    poisoned = replace(batch, dense=torch.full_like(batch.dense, float("inf")))
    with pytest.raises(NonFiniteLossError, match=r"the loss is nan at step 0 .* lower --lr"):
        trainer.train_step(poisoned)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.checkpoints.tensors().items())
    kept = load_batch(tmp_path / "run" / BAD_BATCH_FILE)
    assert torch.isinf(kept.dense).all()
    assert torch.equal(kept.ids.values, batch.ids.values)


def test_early_stopping_keeps_the_best(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run(data, out, SMALL.replace(epochs=60, lr=0.3, evaluate_every=10, early_stopping=3))
    assert result["stopped_early"]
    rows = [row for row in read_metrics(out) if row["split"] == "valid"]
    best = min(rows, key=lambda row: row["logloss"])
    assert len(rows) == rows.index(best) + 4
    assert checkpoint.latest(out / BEST).name == f"step-{best['step']:08d}"
    assert evaluate(out, "valid")["logloss"] == pytest.approx(best["logloss"], rel=1e-9)


def test_early_stopping_needs_a_validation_split(tmp_path: Path) -> None:
    from holdall.data.synthetic import SyntheticConfig, write_prepared

    write_prepared(SyntheticConfig(rows=300, cardinalities=(5,)), tmp_path / "data", valid=0.0)
    with pytest.raises(ConfigError, match="prepare with --valid"):
        run(tmp_path / "data", tmp_path / "run", SMALL.replace(early_stopping=1))


@pytest.mark.slow
def test_compiled_dense_part_gives_the_same_loss(data: Path, tmp_path: Path) -> None:
    plain = Trainer(data, tmp_path / "plain", SMALL, quiet=True)
    compiled = Trainer(data, tmp_path / "compiled", SMALL, quiet=True)
    compiled.steps._outputs = torch.compile(compiled.model.training_outputs, backend="aot_eager")
    for batch in list(plain.loader.epoch(0))[:3]:
        assert compiled.train_step(batch) == pytest.approx(plain.train_step(batch), rel=1e-6)


def test_one_class_only_says_so(tmp_path: Path) -> None:
    from holdall.data.synthetic import SyntheticConfig, write_prepared

    write_prepared(SyntheticConfig(rows=400, cardinalities=(5,), base_rate=1e-6), tmp_path / "data")
    result = run(tmp_path / "data", tmp_path / "run", SMALL.replace(steps=2))
    assert result["steps"] == 2  # training goes on; its validation AUC is not a number
    with pytest.raises(DataError, match="AUC is undefined: all 40 labels are 0"):
        evaluate(tmp_path / "run", "test")


def test_evaluating_on_other_data_is_refused(data: Path, bag_data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", SMALL.replace(steps=2))
    with pytest.raises(CheckpointError, match="is not the one this model was trained on"):
        evaluate(tmp_path / "run", "test", data=bag_data)


def test_a_checkpoint_of_another_model_is_refused(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", SMALL.replace(steps=2))
    edit_json(tmp_path / "run" / "run.json", lambda document: document["config"]["train"].update(dim=8))
    with pytest.raises(CheckpointError, match="shape"):
        load_model(tmp_path / "run")


def test_checkpoints_hold_parameters_and_no_seeds_of_hashes(data: Path, tmp_path: Path) -> None:
    """As those of 0.1.0, which load: seeds are in run.json. The run resumes and its model is that of the end."""
    config = SMALL.replace(method="hashed", setting=("buckets=20", "seed=3"), min_rows=0, steps=6)
    run(data, tmp_path / "whole", config)
    run(data, tmp_path / "parts", config.replace(steps=3))
    run(data, tmp_path / "parts", config, resume=True)
    assert same_tensors(tmp_path / "whole", tmp_path / "parts")
    model, *_, path = load_model(tmp_path / "parts", device="cpu")
    stored, _ = checkpoint.load(path, prefix="model.")
    parameters = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    assert stored.keys() == parameters.keys()
    assert all(torch.equal(stored[name], parameters[name]) for name in stored)


@pytest.mark.parametrize(
    ("method", "settings"), [("codes", ("parts=2", "bits=4", "codebook=all")), ("codes", ("bits=4",)), ("shared", ())]
)
def test_codes_and_shared_rows_train_and_resume(
    data: Path, tmp_path: Path, method: str, settings: tuple[str, ...]
) -> None:
    config = SMALL.replace(method=method, setting=settings, min_rows=40, steps=6)
    run(data, tmp_path / "whole", config)
    run(data, tmp_path / "parts", config.replace(steps=3))
    run(data, tmp_path / "parts", config, resume=True)
    assert same_tensors(tmp_path / "whole", tmp_path / "parts")
    model, *_, path = load_model(tmp_path / "parts", device="cpu")
    stored, _ = checkpoint.load(path, prefix="model.")
    codes = {f"model.{name}": buffer for name, buffer in model.named_buffers() if name.endswith("codes")}
    assert all(torch.equal(stored[name], buffer) for name, buffer in codes.items())
    words = [module.words for module in model.modules() if isinstance(module, Codebook)]
    assert len({id(parameter) for parameter in words}) == (1 if "codebook=all" in settings else len(words))
    assert len(words) == len(codes) == (2 if method == "codes" else 0)


def test_a_run_without_a_checkpoint_says_so_before_its_model_is_built(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Trainer(data, tmp_path / "run", SMALL, quiet=True)
    monkeypatch.delattr(TrainConfig, "build_model")
    with pytest.raises(CheckpointError, match="no complete checkpoint yet"):
        evaluate(tmp_path / "run")


def test_evaluation_of_a_run_that_saves_and_prunes(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on between any two of the reads of its folder, and keeps one checkpoint."""
    out, config = tmp_path / "run", SMALL.replace(epochs=1, steps=2, keep=1)
    run(data, out, config)
    original, steps = checkpoint.loading.load_into, [4, 6]

    def go_on(path: Path, *arguments: object, **options: object) -> dict[str, object]:
        if steps:
            with monkeypatch.context() as alone:
                alone.setattr(checkpoint.loading, "load_into", original)
                run(data, out, config.replace(steps=steps.pop(0)), resume=True)
        return original(path, *arguments, **options)

    monkeypatch.setattr(checkpoint.loading, "load_into", go_on)
    monkeypatch.setattr(checkpoint.read_lock, "fcntl", None)
    metrics = evaluate(out, "test")
    assert steps == []
    monkeypatch.undo()
    assert metrics == evaluate(out, "test")
    assert metrics["checkpoint"] == "step-00000006"
