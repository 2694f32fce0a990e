"""Training by a plan: tables are placed by it, the model is that of plain training, contradictions are named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdall import checkpoint
from holdall.common.errors import CheckpointError, ConfigError
from holdall.data.dataset import DataSet
from holdall.data.synthetic import SyntheticConfig, write_prepared
from holdall.optim.optimizer_kinds import OPTIMIZER_KINDS
from holdall.planning.config import PlanConfig
from holdall.planning.plan import Plan
from holdall.planning.planner import plan, predict
from holdall.tables import Frobenius
from holdall.tiers.tiered_pack import TieredPack
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import CHECKPOINTS, evaluate
from holdall.training.follow_plan import STAGES_FILE
from holdall.training.train import train
from holdall.training.trainer import Trainer
from tests.planning.made_up_hardware import hardware

SMALL = TrainConfig.of(dim=4, bottom=(8,), top=(16,), batch_size=128, log_every=5, deterministic=True, lr=0.05)


def made(data: Path, path: Path, places: dict[str, dict[str, object]], **changes: object) -> Path:
    """A plan with these places, everything else on the device."""
    config = PlanConfig.of(dim=4, bottom=(8,), top=(16,), batch_size=128, preset="device")
    whole = plan(data, config, hardware=hardware())
    tables = tuple(replace(t, forecast=None, **places.get(t.name, {})) for t in whole.tables)  # type: ignore[arg-type]
    edited = replace(whole, tables=tables, strategy="split", forecast=None, **changes)  # type: ignore[arg-type]
    predict(edited, data, hardware=hardware()).save(path)
    return path


def names(data: Path) -> list[str]:
    return [feature.name for feature in DataSet(data).schema.features]


def model_of(run: Path) -> dict[str, torch.Tensor]:
    path = checkpoint.latest(run / CHECKPOINTS)
    assert path is not None
    return checkpoint.load(path)[0]


def test_tables_go_where_the_plan_says_and_learn_the_same(data: Path, tmp_path: Path) -> None:
    first, second, third = names(data)
    places = {first: {"hot_rows": 6, "tail": "host"}, third: {"hot_rows": 30, "tail": "disk"}}
    path = made(data, tmp_path / "plan.json", places, prefetch=2)
    config = TrainConfig.of(plan=str(path), log_every=5, deterministic=True, lr=0.05)
    packs = Trainer(data, tmp_path / "look", config, quiet=True).model.bags.packs
    found = {name: pack.hot_rows[name] for pack in packs if isinstance(pack, TieredPack) for name in pack.tables}
    assert found == {first: 6, third: 30}
    assert [list(pack.tables) for pack in packs if not isinstance(pack, TieredPack)] == [[second]]
    result = train(data, tmp_path / "planned", config, quiet=True)
    train(data, tmp_path / "plain", SMALL, quiet=True)
    ours, theirs = model_of(tmp_path / "planned"), model_of(tmp_path / "plain")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    path.unlink()  # the run has its own copy
    assert evaluate(tmp_path / "planned") == evaluate(tmp_path / "plain")
    stages = {row["stage"]: row for row in result["stages"]}
    assert {"find", "fetch", "lookup", "dense and update", "write_back", "step"} <= stages.keys()
    assert all(row["measured"] > 0 for row in stages.values() if row["measured"] is not None)
    assert json.loads((tmp_path / "planned" / STAGES_FILE).read_text())["stages"] == result["stages"]


def test_a_plan_that_mixes_memory_and_disk_learns_the_same(tmp_path: Path) -> None:
    """Made by the planner, for a machine whose memory and disk hold one of two large tables each."""
    data = tmp_path / "data"
    write_prepared(SyntheticConfig(rows=3000, cardinalities=(6000, 1500, 7), num_dense=2, zipf=0.5), data)
    config = PlanConfig.of(dim=4, bottom=(8,), top=(16,), batch_size=128)
    bare = plan(data, replace(config, preset="dlrm"), hardware=hardware()).forecast
    assert bare is not None
    config = replace(config, device_memory=str(bare.total("device") + 35_000), host_memory="60KB", disk_memory="125KB")
    mixed = plan(data, config, hardware=hardware())
    assert (mixed.table("C1").tail, mixed.table("C2").tail) == ("disk", "host")
    assert mixed.table("C1").hot_rows > 0
    mixed.save(tmp_path / "plan.json")
    followed = TrainConfig.of(plan=str(tmp_path / "plan.json"), log_every=5, deterministic=True, lr=0.05)
    train(data, tmp_path / "planned", followed, quiet=True)
    train(data, tmp_path / "plain", SMALL, quiet=True)
    ours, theirs = model_of(tmp_path / "planned"), model_of(tmp_path / "plain")
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_compressed_tables_of_a_plan(data: Path, tmp_path: Path) -> None:
    third = names(data)[2]
    places = {third: {"method": Frobenius(rank=4), "hot_rows": 0, "tail": "compressed"}}
    path = made(data, tmp_path / "plan.json", places)
    train(data, tmp_path / "run", TrainConfig.of(plan=str(path), steps=5), quiet=True)
    assert evaluate(tmp_path / "run")["samples"] == 400
    assert isinstance(
        Trainer(data, tmp_path / "look", TrainConfig.of(plan=str(path))).model.bags.table(third).method, Frobenius
    )


def test_a_run_resumes_by_its_plan_and_by_no_other(data: Path, tmp_path: Path) -> None:
    first = names(data)[0]
    path = made(data, tmp_path / "plan.json", {first: {"hot_rows": 6, "tail": "host"}})
    config = TrainConfig.of(plan=str(path), deterministic=True)
    train(data, tmp_path / "whole", config, quiet=True)
    train(data, tmp_path / "parts", config.replace(steps=7), quiet=True)
    train(data, tmp_path / "parts", config, resume=True, quiet=True)
    ours, theirs = model_of(tmp_path / "parts"), model_of(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    other = made(data, tmp_path / "other.json", {first: {"hot_rows": 7, "tail": "host"}})
    with pytest.raises(CheckpointError, match="was trained by another plan"):
        train(data, tmp_path / "parts", config.replace(plan=str(other)), resume=True, quiet=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 64}, "--batch-size 64 is not what .*plan.json was made for .128."),
        ({"optimizer": "adam"}, "--optimizer adam is not what"),
        ({"optimizer": "sgd", "momentum": 0.9}, "--optimizer sgd is not what"),
        ({"dim": 32}, "--dim 32 is not what"),
        ({"strategy": "host"}, "--strategy host is not what"),
    ],
)
def test_settings_that_contradict_the_plan(
    data: Path, tmp_path: Path, options: dict[str, object], message: str
) -> None:
    path = made(data, tmp_path / "plan.json", {})
    with pytest.raises(ConfigError, match=message):
        train(data, tmp_path / "run", TrainConfig.of(plan=str(path), **options), quiet=True)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_a_plan_counts_the_state_of_momentum(data: Path, tmp_path: Path) -> None:
    """And it is followed with --momentum only, as one that counts none is followed without."""
    first = names(data)[0]
    places = {first: {"hot_rows": 6, "tail": "host"}}
    path = made(data, tmp_path / "plan.json", places, optimizer="momentum_sgd")
    forecasts = [
        Plan.load(made(data, tmp_path / f"{name}.json", places, optimizer=name)).forecast for name in OPTIMIZER_KINDS
    ]
    state = {
        name: made.memory["host"]["table_state"] for name, made in zip(OPTIMIZER_KINDS, forecasts, strict=True) if made
    }
    assert state["momentum_sgd"] == state["adagrad"] > state["sgd"] == 0
    with pytest.raises(ConfigError, match="was made with --momentum, whose state takes memory: give it here"):
        train(data, tmp_path / "run", TrainConfig.of(plan=str(path), optimizer="sgd"), quiet=True)
    plain = made(data, tmp_path / "plain.json", {}, optimizer="sgd")
    with_momentum = TrainConfig.of(plan=str(plain), optimizer="sgd", momentum=0.9)
    with pytest.raises(ConfigError, match=r"was made without --momentum, .*: plan again with it"):
        train(data, tmp_path / "run", with_momentum, quiet=True)
    settings = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.01, "steps": 8, "deterministic": True}
    train(data, tmp_path / "planned", TrainConfig.of(plan=str(path), lr=0.05, **settings), quiet=True)
    train(data, tmp_path / "plain", SMALL.replace(**settings), quiet=True)
    ours, theirs = model_of(tmp_path / "planned"), model_of(tmp_path / "plain")
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert any("momentum_buffer" in name for name in theirs)


@pytest.mark.parametrize("name", ["method", "budget", "hot_bytes"])
def test_settings_that_a_plan_decides(name: str) -> None:
    given = {"method": "quantized", "budget": "1MB", "hot_bytes": "1MB"}[name]
    with pytest.raises(ConfigError, match=f"leave --{name.replace('_', '-')} out"):
        TrainConfig.of(plan="plan.json", **{name: given})  # type: ignore[arg-type]


def test_a_plan_for_other_tables(data: Path, bag_data: Path, tmp_path: Path) -> None:
    path = made(data, tmp_path / "plan.json", {})
    with pytest.raises(ConfigError, match=r"the plan was made for another data set|does not place table"):
        train(bag_data, tmp_path / "run", TrainConfig.of(plan=str(path)), quiet=True)


def test_a_plan_for_several_processes(data: Path, tmp_path: Path) -> None:
    path = made(data, tmp_path / "plan.json", {})
    several = replace(Plan.load(path), world_size=4)
    several.save(path)
    with pytest.raises(ConfigError, match="is for 4 processes"):
        train(data, tmp_path / "run", TrainConfig.of(plan=str(path)), quiet=True)


def test_an_edited_copy_of_the_plan_is_refused(data: Path, tmp_path: Path) -> None:
    path = made(data, tmp_path / "plan.json", {})
    train(data, tmp_path / "run", TrainConfig.of(plan=str(path), steps=2), quiet=True)
    copy = tmp_path / "run" / "plan.json"
    copy.write_text(copy.read_text().replace('"strategy": "split"', '"strategy": "plain"'))
    with pytest.raises(CheckpointError, match=r"plan\.json is not the one that the run was trained with"):
        evaluate(tmp_path / "run")
    copy.unlink()
    with pytest.raises(CheckpointError, match=r"plan\.json is missing, and the run followed it"):
        evaluate(tmp_path / "run")
