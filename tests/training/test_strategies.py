"""Strategies through the trainer: the same model where they promise it, resumable; bad combinations are named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from holdall import checkpoint
from holdall.cli import main
from holdall.common.errors import ConfigError, DataError
from holdall.data.dataset import DataSet
from holdall.data.synthetic import SyntheticConfig, write_prepared
from holdall.optim.optimizer_kinds import NAMES
from holdall.popularity.profiling import profile
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import CHECKPOINTS, evaluate, load_model
from holdall.training.tracking import read_metrics
from holdall.training.train import train
from holdall.training.trainer import SCRATCH, Trainer

SMALL = TrainConfig.of(dim=4, bottom=(8,), top=(16,), batch_size=128, log_every=5, deterministic=True, lr=0.05)
SPLIT = SMALL.replace(strategy="split", hot_bytes="1KB")
HOT_BATCHES = SMALL.replace(strategy="hot-batches", hot_bytes="4KB")


def tensors(run: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    path = checkpoint.latest(run / CHECKPOINTS)
    assert path is not None
    return checkpoint.load(path, prefix=prefix)[0]


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("optimizer", NAMES)
@pytest.mark.parametrize("strategy", ["host", "split", "refresh", "prefetch"])
def test_the_model_is_that_of_plain_training(data: Path, tmp_path: Path, strategy: str, optimizer: str) -> None:
    config = SMALL.replace(optimizer=optimizer)  # type: ignore[arg-type]
    train(data, tmp_path / "plain", config, quiet=True)
    options = {
        "host": {"strategy": "host"},
        "split": {"strategy": "split", "hot_bytes": "1KB"},
        "refresh": {"strategy": "split", "hot_bytes": "1KB", "refresh_hot": 4},
        "prefetch": {"strategy": "split", "hot_bytes": "1KB", "refresh_hot": 7, "prefetch": 3},
    }[strategy]
    train(data, tmp_path / "other", config.replace(**options), quiet=True)  # type: ignore[arg-type]
    for prefix in ("model.", "optimizer."):
        assert same(tensors(tmp_path / "plain", prefix), tensors(tmp_path / "other", prefix))
    assert evaluate(tmp_path / "plain") == evaluate(tmp_path / "other")


@pytest.mark.parametrize("strategy", ["host", "split"])
def test_bags_too(bag_data: Path, tmp_path: Path, strategy: str) -> None:
    train(bag_data, tmp_path / "plain", SMALL, quiet=True)
    other = SMALL.replace(strategy=strategy, hot_bytes="1KB" if strategy == "split" else None)  # type: ignore[arg-type]
    train(bag_data, tmp_path / "other", other, quiet=True)
    assert same(tensors(tmp_path / "plain", "model."), tensors(tmp_path / "other", "model."))


@pytest.mark.parametrize(
    "config",
    [SPLIT, SPLIT.replace(refresh_hot=3), SPLIT.replace(refresh_hot=7, prefetch=3), HOT_BATCHES.replace(prefetch=2)],
    ids=["split", "refresh", "refresh, prefetched", "hot-batches"],
)
@pytest.mark.parametrize("stop", [4, 11, 26])
def test_a_resumed_run_ends_with_the_same_bits(data: Path, tmp_path: Path, config: TrainConfig, stop: int) -> None:
    config = config.replace(epochs=2)
    train(data, tmp_path / "whole", config, quiet=True)
    train(data, tmp_path / "parts", config.replace(steps=stop), quiet=True)
    train(data, tmp_path / "parts", config, resume=True, quiet=True)
    assert same(tensors(tmp_path / "whole"), tensors(tmp_path / "parts"))


def test_hot_batches_learn_and_say_what_moved(data: Path, tmp_path: Path) -> None:
    result = train(data, tmp_path / "run", HOT_BATCHES.replace(epochs=2), quiet=True)
    assert evaluate(tmp_path / "run")["auc"] > 0.6
    assert 0 < result["hot_share_of_inputs"] < 1
    plain = train(data, tmp_path / "host", SMALL.replace(strategy="host", epochs=2), quiet=True)
    assert plain["moved_bytes_per_sample"] == 2 * 3 * 4 * 4  # three features of four floats, there and back
    logged = [row for row in read_metrics(tmp_path / "run") if row["split"] == "train"]
    assert all(0 < row["hot_share_of_lookups"] < 1 for row in logged)
    valid = [row["step"] for row in read_metrics(tmp_path / "run") if row["split"] == "valid"]
    assert len(valid) >= 4  # after each cycle, not only at the end of an epoch


def test_everything_hot_moves_nothing(data: Path, tmp_path: Path) -> None:
    result = train(data, tmp_path / "run", HOT_BATCHES.replace(hot_bytes="1GB"), quiet=True)
    assert result["hot_share_of_inputs"] == 1.0
    flushes = 457 * (4 * 4 + 4) * 2  # every row and its accumulator, to the device once and home once
    assert result["moved_bytes_per_sample"] * 3200 <= flushes


def test_everything_hot_is_said(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--dim", "4", "--bottom", "8", "--top", "8"]
    command = ["train", str(data), "--out", str(tmp_path / "run"), "--strategy", "hot-batches", "--hot-bytes", "1GB"]
    main([*command, *sizes])
    assert "every input is fully hot" in capsys.readouterr().err


def test_a_data_set_that_is_all_cold_is_refused(tmp_path: Path) -> None:
    config = SyntheticConfig(rows=600, cardinalities=(5000, 5000, 5000), num_dense=1, zipf=0.0)
    write_prepared(config, tmp_path / "flat")
    with pytest.raises(ConfigError, match=r"no input of .* is fully hot within --hot-bytes 100B.*would make a tenth"):
        train(tmp_path / "flat", tmp_path / "run", HOT_BATCHES.replace(hot_bytes="100B"), quiet=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "split"}, "needs --hot-bytes"),
        ({"strategy": "plain", "hot_bytes": "1MB"}, "goes with split, hot-batches and two-fold"),
        ({"strategy": "two-fold", "prefetch": 2}, "--prefetch is 0 or 1"),
        ({"strategy": "split", "hot_bytes": "1MB", "save_hot_every": 5}, "needs --save-every"),
        ({"strategy": "plain", "save_every": 9, "save_hot_every": 5}, "--save-hot-every goes with split"),
        ({"strategy": "split", "hot_bytes": "1MB", "hardware": "hardware.json"}, "goes with --strategy two-fold"),
        ({"strategy": "hot-batches", "hot_bytes": "1MB", "refresh_hot": 5}, "--refresh-hot goes with --strategy split"),
        ({"strategy": "split", "hot_bytes": "4 gigs"}, "is not a size"),
        ({"strategy": "split", "hot_bytes": "-1"}, "is not a size"),
        ({"strategy": "split", "hot_bytes": "1MB", "refresh_hot": 0}, "--refresh-hot must be at least 1"),
    ],
)
def test_settings_that_do_not_go_together(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SMALL.replace(**options)  # type: ignore[arg-type]


def test_a_budget_below_a_row(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="19 B for hot rows is less than the 20 B of a single row"):
        train(data, tmp_path / "run", SPLIT.replace(hot_bytes="19B"), quiet=True)


def test_hot_rows_by_a_profile(data: Path, tmp_path: Path) -> None:
    profile(data, tmp_path / "popularity.json")
    counted = train(data, tmp_path / "counted", SPLIT, quiet=True)
    read = train(data, tmp_path / "read", SPLIT.replace(profile=str(tmp_path / "popularity.json")), quiet=True)
    assert read["hot_share_of_lookups"] == counted["hot_share_of_lookups"]
    assert same(tensors(tmp_path / "counted"), tensors(tmp_path / "read"))


def test_a_profile_of_another_data_set_is_refused(data: Path, bag_data: Path, tmp_path: Path) -> None:
    profile(bag_data, tmp_path / "popularity.json")
    with pytest.raises(DataError, match="another data set"):
        train(data, tmp_path / "run", SPLIT.replace(profile=str(tmp_path / "popularity.json")), quiet=True)


@pytest.mark.parametrize("optimizer", NAMES)
def test_rows_on_disk_train_to_the_same_bits(data: Path, tmp_path: Path, optimizer: str) -> None:
    config = SMALL.replace(optimizer=optimizer)  # type: ignore[arg-type]
    train(data, tmp_path / "plain", config, quiet=True)
    on_disk = config.replace(strategy="split", hot_bytes="1KB", tail="disk", prefetch=2)
    train(data, tmp_path / "disk", on_disk, quiet=True)
    for prefix in ("model.", "optimizer."):
        assert same(tensors(tmp_path / "plain", prefix), tensors(tmp_path / "disk", prefix))
    assert evaluate(tmp_path / "plain") == evaluate(tmp_path / "disk")
    assert not (tmp_path / "disk" / SCRATCH).exists()


def test_a_disk_that_cannot_hold_all_files_together_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and the two states of Adam are a file each: their sum is refused, before anything is written."""
    needed = 3 * 4 * 4 * sum(feature.num_rows for feature in DataSet(data).schema.features)
    free = needed - 1
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    config = SPLIT.replace(tail="disk", optimizer="adam", steps=2)
    with pytest.raises(ConfigError, match=r"on disk take .* and the disk of .*tiers has .* left: free 1 B, or use"):
        train(data, tmp_path / "run", config, quiet=True)
    assert not (tmp_path / "run").exists()
    free = needed
    assert train(data, tmp_path / "run", config, quiet=True)["steps"] == 2


def test_an_evaluation_from_disk_has_no_files_with_names(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nothing is left of one that is killed."""
    train(data, tmp_path / "run", SPLIT.replace(tail="disk"), quiet=True)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    model, *_ = load_model(tmp_path / "run")
    with torch.no_grad():
        assert model(DataSet(data, "test").slice(0, 50)).shape == (50,)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_untouched_rows_are_not_saved(tmp_path: Path) -> None:
    """Of 300,000 rows a few thousand are looked up: the checkpoint holds those, and every row loads."""
    write_prepared(SyntheticConfig(rows=3000, cardinalities=(200_000, 100_000), num_dense=1), tmp_path / "data")
    config = SMALL.replace(batch_size=500)
    for name, options in (("plain", {}), ("disk", {"strategy": "split", "hot_bytes": "1KB", "tail": "disk"})):
        train(tmp_path / "data", tmp_path / name, config.replace(**options), quiet=True)  # type: ignore[arg-type]
    sizes = {name: folder_bytes(tmp_path / name / CHECKPOINTS) for name in ("plain", "disk")}
    assert sizes["plain"] > 300_000 * (4 * 4 + 4)
    assert sizes["disk"] < sizes["plain"] / 10
    assert same(tensors(tmp_path / "plain", "model."), tensors(tmp_path / "disk", "model."))
    assert evaluate(tmp_path / "plain") == evaluate(tmp_path / "disk")


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_resuming_from_disk_after_a_crash(data: Path, tmp_path: Path) -> None:
    """The files of the killed run are in the way, and not used: the checkpoint is what counts."""
    config = SPLIT.replace(tail="disk", refresh_hot=3)
    train(data, tmp_path / "whole", config, quiet=True)
    train(data, tmp_path / "parts", config.replace(steps=8), quiet=True)
    (tmp_path / "parts" / SCRATCH).mkdir(parents=True)
    (tmp_path / "parts" / SCRATCH / "weight.rows").write_bytes(b"half a row")
    train(data, tmp_path / "parts", config, resume=True, quiet=True)
    assert same(tensors(tmp_path / "whole"), tensors(tmp_path / "parts"))


def test_a_checkpoint_goes_from_one_strategy_to_another(data: Path, tmp_path: Path) -> None:
    """A model trained on disk loads as a plain one, and the reverse."""
    train(data, tmp_path / "disk", SPLIT.replace(tail="disk"), quiet=True)
    train(data, tmp_path / "plain", SMALL, quiet=True)
    model, _, schema, _ = load_model(tmp_path / "disk")
    lazy, ordinary = SMALL.build_model(schema), SMALL.build_model(schema)
    for run, into in ((tmp_path / "disk", lazy), (tmp_path / "plain", ordinary)):
        path = checkpoint.latest(run / CHECKPOINTS)
        assert path is not None
        checkpoint.load_into(path, {f"model.{n}": t for n, t in into.state_dict().items()}, prefix="model.")
    assert all(torch.equal(lazy.state_dict()[name], tensor) for name, tensor in ordinary.state_dict().items())
    batch = DataSet(data, "test").slice(0, 50)
    with torch.no_grad():
        assert torch.equal(model(batch), ordinary(batch))


def test_what_grew_where_it_was_is_noticed(data: Path, tmp_path: Path) -> None:
    """A captured step must not go on with tables that are larger now, though they lie where they did."""
    trainer = Trainer(data, tmp_path / "run", SPLIT.replace(optimizer="adagrad"), quiet=True)
    (pack,) = trainer.model.bags.packs
    room = torch.empty(2 * pack.storage.shape[0], pack.storage.shape[1])
    pack.storage = room[: pack.storage.shape[0]]
    before = trainer.strategy.addresses()
    pack.storage = room
    assert trainer.strategy.addresses() != before
    before = trainer.strategy.addresses()
    pack.slots = {name: slot.clone() for name, slot in pack.slots.items()}
    assert trainer.strategy.addresses() != before


def test_rows_are_fetched_ahead_where_that_pays() -> None:
    """On one GPU, unless the setting says otherwise."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert (SPLIT.placement.prefetch_depth(gpu), SPLIT.placement.prefetch_depth(cpu)) == (2, 0)
    for given in (0, 3):
        assert SPLIT.replace(prefetch=given).placement.prefetch_depth(gpu) == given
