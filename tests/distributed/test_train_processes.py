"""`holdall train` on several processes: the model and metrics of one process, one output, one folder, a clean exit."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from holdall import checkpoint
from holdall.common.errors import ConfigError
from holdall.data.synthetic import SyntheticConfig, write_prepared
from holdall.planning.config import PlanConfig
from holdall.planning.planner import plan
from holdall.serving.scorer import load
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import CHECKPOINTS, evaluate
from holdall.training.follow_plan import STAGES_FILE
from holdall.training.tracking import BAD_BATCH_FILE, read_metrics, read_run
from holdall.training.train import train
from tests.distributed.harness import run
from tests.planning.made_up_hardware import hardware

pytestmark = pytest.mark.slow

HERE = "tests.distributed.process_workers"
SMALL = TrainConfig.of(dim=4, bottom=(8,), top=(16,), batch_size=128, log_every=5, lr=0.05, seed=3, timeout=20)
DATA_PARALLEL = SMALL.replace(strategy="data-parallel")
FAST = ["--dim", "4", "--bottom", "8", "--top", "8", "--batch-size", "512"]
LOCAL = SMALL.replace(strategy="local", merge_every=4)


def tensors(run_folder: Path) -> dict[str, torch.Tensor]:
    path = checkpoint.latest(run_folder / CHECKPOINTS)
    assert path is not None
    return checkpoint.load(path)[0]


def close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Up to float32 sums in another order, over some 25 steps; the float64 tests are the exact ones."""
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(
            first[name], second[name], rtol=2e-3, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "run"
    train(data, out, SMALL, quiet=True)
    return out


def test_two_processes_train_the_model_of_one(data: Path, tmp_path: Path, plain: Path) -> None:
    out = tmp_path / "run"
    results = run(f"{HERE}:train_run", 2, str(data), str(out), DATA_PARALLEL.to_json())
    close(tensors(out), tensors(plain))
    assert results[0]["valid"] == results[1]["valid"]
    rows, expected = read_metrics(out), read_metrics(plain)
    assert [(row["step"], row["split"]) for row in rows] == [(row["step"], row["split"]) for row in expected]
    for row, other in zip(rows, expected, strict=True):  # losses and metrics are global
        name = "loss" if row["split"] == "train" else "auc"
        assert row[name] == pytest.approx(other[name], rel=1e-3)
    assert rows[-1]["samples"] == expected[-1]["samples"] == 400  # of the whole validation split
    assert evaluate(out)["auc"] == pytest.approx(evaluate(plain)["auc"], rel=1e-3)
    logged = [row for row in rows if row["split"] == "train"]
    for row in logged:
        kinds = [row[f"{kind}_bytes_per_sample"] for kind in ("all_gather", "all_reduce", "sizes")]
        assert row["sent_bytes_per_sample"] == pytest.approx(sum(kinds))
        assert min(kinds) > 0
    for rank in range(2):
        text = (out / f"rank-{rank}.log").read_text(encoding="utf-8")
        assert f"start at step 0 as rank {rank} of 2" in text
        assert "step 25: train loss" in text
        assert "step 25: valid logloss" in text


SPREAD = {
    "two-fold, hot rows by bytes": {"strategy": "two-fold", "hot_bytes": "4KB", "optimizer": "adam"},
    "two-fold, rows fetched ahead": {"strategy": "two-fold", "hot_bytes": "4KB", "prefetch": 1},
    "two-fold, cut chosen": {"strategy": "two-fold", "clip_norm": 0.02, "optimizer": "adagrad"},
    "two-fold with compressed tables": {"strategy": "two-fold", "method": "tensor_train", "rank": 4, "min_rows": 100},
    "table-wise": {"strategy": "table-wise", "clip_norm": 0.02, "optimizer": "adam"},
    "table-wise with compressed tables": {"strategy": "table-wise", "method": "hashed", "setting": ("buckets=20",)},
}


@pytest.mark.parametrize("name", SPREAD)
def test_spread_tables_are_those_of_one_process(name: str, data: Path, tmp_path: Path) -> None:
    config = SMALL.replace(**SPREAD[name])  # type: ignore[arg-type]
    plain = config.replace(strategy="plain", hot_bytes=None, prefetch=0)
    whole = train(data, tmp_path / "plain", plain, quiet=True)
    num = 3 if "cut" in name else 2
    results = run(f"{HERE}:train_run", num, str(data), str(tmp_path / "run"), config.to_json())
    close(tensors(tmp_path / "run"), tensors(tmp_path / "plain"))
    assert results[0]["valid"] == results[-1]["valid"]
    assert results[0]["valid"]["logloss"] == pytest.approx(whole["valid"]["logloss"], rel=1e-4)
    assert results[0]["table_bytes"] == whole["table_bytes"]
    sent = {kind for kind, n in results[0].items() if kind.endswith("_bytes_per_sample") and n > 0}
    assert ("cold_rows_bytes_per_sample" in sent) == (config.placement.strategy == "two-fold")
    assert ("pooled_vectors_bytes_per_sample" in sent) == (config.placement.strategy == "table-wise")
    assert config.placement.strategy in (tmp_path / "run" / "rank-0.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("strategy", "num"), [("data-parallel", 2), ("two-fold", 4), ("table-wise", 2)], ids=lambda value: str(value)
)
def test_negatives_are_those_of_the_whole_batch(strategy: str, num: int, data: Path, tmp_path: Path) -> None:
    """With four processes the last batch has fewer samples than processes: a rank without any takes part."""
    first, second, third = (feature["name"] for feature in json.loads((data / "schema.json").read_text())["features"])
    rows = json.loads((data / "schema.json").read_text())["splits"]["train"]["rows"]
    batch_size = next(size for size in range(64, 512) if rows % size in (1, 2))
    config = TrainConfig.of(
        model="two-tower", dim=4, batch_size=batch_size, epochs=1, seed=3, timeout=20, lr=0.02, table_lr=0.05
    ).replace(model_setting=(f"user={first},{second}", f"item={third}", "tower=8,4"))
    whole = train(data, tmp_path / "plain", config, quiet=True)
    extra = {"hot_bytes": "2KB"} if strategy == "two-fold" else {}
    config = config.replace(strategy=strategy, **extra)  # type: ignore[arg-type]
    results = run(f"{HERE}:train_run", num, str(data), str(tmp_path / "run"), config.to_json())
    close(tensors(tmp_path / "run"), tensors(tmp_path / "plain"))
    assert results[0]["valid"]["auc"] == pytest.approx(whole["valid"]["auc"], rel=1e-4)
    assert results[0]["samples_bytes_per_sample"] > 0
    assert results[0]["gradients_of_samples_bytes_per_sample"] > 0


@pytest.mark.parametrize("strategy", ["two-fold", "table-wise"])
def test_spread_bags_with_more_processes_than_samples(strategy: str, bag_data: Path, tmp_path: Path) -> None:
    rows = json.loads((bag_data / "schema.json").read_text())["splits"]["train"]["rows"]
    batch_size = next(size for size in range(64, 512) if rows % size in (1, 2))
    config = SMALL.replace(batch_size=batch_size, steps=rows // batch_size + 2)
    train(bag_data, tmp_path / "plain", config, quiet=True)
    extra = {"hot_bytes": "2KB", "prefetch": 1} if strategy == "two-fold" else {}
    config = config.replace(strategy=strategy, **extra)  # type: ignore[arg-type]
    run(f"{HERE}:train_run", 4, str(bag_data), str(tmp_path / "run"), config.to_json())
    close(tensors(tmp_path / "run"), tensors(tmp_path / "plain"))


@pytest.mark.parametrize(("num", "prefetch"), [(2, 0), (3, 1)])
def test_hot_batches_of_several_processes(num: int, prefetch: int, data: Path, tmp_path: Path) -> None:
    """The batches of one process, sample for sample; a run resumes with another number of processes."""
    config = SMALL.replace(strategy="hot-batches", hot_bytes="6KB", optimizer="adam", epochs=2, prefetch=prefetch)
    alone = train(data, tmp_path / "alone", config, quiet=True)
    assert 0.1 < alone["hot_share_of_inputs"] < 0.9
    run(f"{HERE}:train_run", num, str(data), str(tmp_path / "run"), config.replace(steps=31).to_json())
    (result, *_) = run(f"{HERE}:train_run", 2, str(data), str(tmp_path / "run"), config.to_json(), True)
    close(tensors(tmp_path / "run"), tensors(tmp_path / "alone"))
    assert result["valid"]["logloss"] == pytest.approx(alone["valid"]["logloss"], rel=1e-4)
    assert result["hot_share_of_inputs"] == alone["hot_share_of_inputs"]


def test_a_checkpoint_goes_on_in_another_strategy(data: Path, tmp_path: Path, plain: Path) -> None:
    out, two_fold = tmp_path / "run", SMALL.replace(strategy="two-fold", hot_bytes="3KB")
    run(f"{HERE}:train_run", 2, str(data), str(out), two_fold.replace(steps=5).to_json())
    table_wise = SMALL.replace(strategy="table-wise", steps=10).to_json()
    run(f"{HERE}:train_run", 3, str(data), str(out), table_wise, True)
    train(data, out, SMALL.replace(strategy="split", hot_bytes="2KB", steps=15), resume=True, quiet=True)
    run(f"{HERE}:train_run", 4, str(data), str(out), two_fold.replace(steps=20).to_json(), True)
    train(data, out, SMALL, resume=True, quiet=True)
    close(tensors(out), tensors(plain))
    assert [entry["step"] for entry in read_run(out)["resumed"]] == [5, 10, 15, 20]


def test_hot_rows_saved_more_often(data: Path, tmp_path: Path) -> None:
    """A killed run resumes from the step of the hot rows; the other rows are those of the full checkpoint."""
    config = SMALL.replace(strategy="two-fold", hot_bytes="3KB", save_every=8, save_hot_every=3)
    at = {step: tmp_path / str(step) for step in (8, 12)}
    for step, folder in at.items():
        run(f"{HERE}:train_run", 2, str(data), str(folder), config.replace(steps=step).to_json())
    out = tmp_path / "run"
    run(f"{HERE}:train_until", 2, str(data), str(out), config.to_json(), 14)
    assert checkpoint.latest(out / CHECKPOINTS) == out / CHECKPOINTS / "step-00000008"
    assert (out / CHECKPOINTS / "hot-00000012").exists()
    (step, found, hot_rows), _ = run(f"{HERE}:restored", 2, str(data), str(out), config.to_json())
    assert step == 12
    older, newer = tensors(at[8]), tensors(at[12])
    differ = 0
    for table, rows in hot_rows.items():
        name = f"model.bags.tables.{table}.weight"
        assert torch.equal(torch.as_tensor(found[table][:rows]), newer[name][:rows])
        assert torch.equal(torch.as_tensor(found[table][rows:]), older[name][rows:])
        differ += int((older[name][rows:] != newer[name][rows:]).any(1).sum())
    assert differ > 0, "cold rows learned something in between, which is lost"


def test_a_checkpoint_goes_on_at_another_number_of_processes(data: Path, tmp_path: Path, plain: Path) -> None:
    out = tmp_path / "run"
    run(f"{HERE}:train_run", 2, str(data), str(out), DATA_PARALLEL.replace(steps=7).to_json())
    run(f"{HERE}:train_run", 3, str(data), str(out), {**DATA_PARALLEL.to_json(), "steps": 15}, True)
    train(data, out, SMALL, resume=True, quiet=True)
    close(tensors(out), tensors(plain))
    assert [entry["step"] for entry in read_run(out)["resumed"]] == [7, 15]


def test_local_tables_learn_and_resume_to_the_same_bits(data: Path, tmp_path: Path) -> None:
    settings = LOCAL.replace(save_every=10).to_json()  # saving merges: both runs must save alike
    results = run(f"{HERE}:train_run", 2, str(data), str(tmp_path / "whole"), settings)
    run(f"{HERE}:train_run", 2, str(data), str(tmp_path / "parts"), {**settings, "steps": 10})
    run(f"{HERE}:train_run", 2, str(data), str(tmp_path / "parts"), settings, True)
    whole, parts = tensors(tmp_path / "whole"), tensors(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert results[0]["difference_between_ranks"] > 0
    assert results[0]["valid"]["logloss"] == pytest.approx(evaluate(tmp_path / "whole", "valid")["logloss"], rel=1e-6)
    assert results[0]["valid"]["auc"] > 0.6


def test_ranks_told_different_things_are_refused(data: Path, bag_data: Path, tmp_path: Path) -> None:
    settings = DATA_PARALLEL.to_json()
    for text in run(f"{HERE}:train_with_other_settings", 2, str(data), str(tmp_path / "a"), settings):
        assert "--lr is '0.5' on rank 1 and '0.05' on rank 0" in text
    for text in run(f"{HERE}:train_on", 2, [str(data), str(bag_data)], str(tmp_path / "b"), settings):
        assert "the data set (its fingerprint) is" in text
        assert "on rank 1" in text
    assert "ProcessError" in (tmp_path / "b" / "rank-0.log").read_text(encoding="utf-8")


def test_a_signal_to_one_rank_stops_all_at_the_same_step(data: Path, tmp_path: Path, plain: Path) -> None:
    settings = DATA_PARALLEL.replace(epochs=10_000).to_json()
    first, second = run(f"{HERE}:stopped_by_a_signal", 2, str(data), str(tmp_path / "run"), settings)
    assert first == second
    step = checkpoint.read(checkpoint.latest(tmp_path / "run" / CHECKPOINTS)).step  # type: ignore[arg-type]
    assert first == f"stopped at step {step}; continue with --resume"
    assert step in (4, 5)  # the step of the signal, or the next: ranks agree to stop when a step begins


def test_a_loss_that_is_no_number_on_one_rank_stops_all_before_the_update(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    (first, kept), (second, also_kept) = run(f"{HERE}:one_bad_loss", 2, str(data), str(out), DATA_PARALLEL.to_json())
    assert "the loss of rank 1 is nan at step 3" in first
    assert "nothing was updated" in second
    assert kept
    assert also_kept
    assert [path.name for path in out.glob("bad_batch*")] == [BAD_BATCH_FILE.replace(".", "-rank-1.")]


def test_more_processes_than_samples_in_the_last_batch(tmp_path: Path) -> None:
    write_prepared(SyntheticConfig(rows=162, cardinalities=(9, 5), num_dense=1, bag_lengths=(3, 1)), tmp_path / "data")
    settings = SMALL.replace(batch_size=64, strategy="data-parallel", optimizer="adam")
    run(f"{HERE}:train_run", 3, str(tmp_path / "data"), str(tmp_path / "run"), settings.to_json())
    train(tmp_path / "data", tmp_path / "one", settings.replace(strategy="plain"), quiet=True)
    rows = json.loads((tmp_path / "data" / "schema.json").read_text())["splits"]["train"]["rows"]
    assert rows % 64 in (1, 2), "the last batch leaves a rank without samples"
    close(tensors(tmp_path / "run"), tensors(tmp_path / "one"))


def test_a_start_that_was_refused_leaves_its_folder_free(data: Path, tmp_path: Path) -> None:
    config = SMALL.replace(strategy="two-fold", hot_bytes="1B", steps=2)
    with pytest.raises(Exception, match="less than the 20 B of a single row"):
        run(f"{HERE}:train_run", 2, str(data), str(tmp_path / "run"), config.to_json())
    assert (tmp_path / "run" / "rank-0.log").exists()
    run(f"{HERE}:train_run", 2, str(data), str(tmp_path / "run"), config.replace(hot_bytes="4KB").to_json())
    with pytest.raises(Exception, match="exists already"):  # now it has a run
        run(f"{HERE}:train_run", 2, str(data), str(tmp_path / "run"), config.replace(hot_bytes="4KB").to_json())


def test_strategies_of_one_process_are_refused_for_several(data: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="--strategy plain is for one process, and there are 2: use --strategy data-p"):
        run(f"{HERE}:train_run", 2, str(data), str(tmp_path / "run"), SMALL.to_json())
    train(data, tmp_path / "alone", DATA_PARALLEL.replace(steps=2), quiet=True)  # the other way round is fine


def planned_for_two(data: Path, path: Path) -> Path:
    """A plan for two processes with little memory, so that some rows are sharded."""
    config = PlanConfig.of(dim=4, bottom=(8,), top=(16,), batch_size=128, world_size=2, device_memory="100KB")
    made = plan(data, config, hardware=hardware())
    assert made.strategy == "two-fold"
    assert any(table.tail == "sharded" for table in made.tables)
    made.save(path)
    return path


def test_a_plan_for_two_processes_is_followed(data: Path, tmp_path: Path, plain: Path) -> None:
    path, out = planned_for_two(data, tmp_path / "plan.json"), tmp_path / "run"
    config = TrainConfig.of(plan=str(path), log_every=5, lr=0.05, seed=3, timeout=20)
    first, second = run(f"{HERE}:train_run", 2, str(data), str(out), config.to_json())
    close(tensors(out), tensors(plain))
    stages = {row["stage"]: row for row in first["stages"]}
    assert stages["exchange"]["predicted"] > 0
    assert stages["exchange"]["measured"] > 0
    assert json.loads((out / STAGES_FILE).read_text())["stages"] == first["stages"]
    assert second["valid"] == first["valid"]
    path.unlink()  # the run has its own copy
    assert evaluate(out)["auc"] == pytest.approx(evaluate(plain)["auc"], abs=2e-3)


def test_a_plan_for_another_number_of_processes(data: Path, tmp_path: Path) -> None:
    path = planned_for_two(data, tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="is for 2 processes, and this run has 1: plan with --world-size 1, or start"):
        train(data, tmp_path / "alone", TrainConfig.of(plan=str(path)), quiet=True)
    with pytest.raises(Exception, match="is for 2 processes, and this run has 3"):
        run(
            f"{HERE}:train_run",
            3,
            str(data),
            str(tmp_path / "three"),
            TrainConfig.of(plan=str(path), timeout=20).to_json(),
        )
    assert not (tmp_path / "three" / "plan.json").exists()


def test_the_commands_of_the_page(data: Path, tmp_path: Path) -> None:
    """With smaller models, and the harness in the place of torchrun. An error is printed once."""
    (tmp_path / "data").symlink_to(data)
    text = (Path(__file__).resolve().parents[2] / "docs" / "processes.md").read_text(encoding="utf-8")
    block = re.findall(r"^```bash\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)[0]
    commands = [shlex.split(line) for line in block.splitlines()]
    assert [command[0] for command in commands] == ["torchrun"] * 5 + ["holdall"]
    for command in [*commands, commands[0]]:
        num = int(command[command.index("--nproc-per-node") + 1]) if command[0] == "torchrun" else 1
        words = command[command.index("holdall") + 1 :]
        (out, err, code), *others = run(f"{HERE}:command", num, str(tmp_path), [*words, *FAST])
        if command is commands[0] and (tmp_path / "again").exists():
            assert "holdall: rank 0: the run folder run exists already" in err
            assert code == 2
            assert others == [["", "", 2]]
            continue
        (tmp_path / "again").touch()
        assert code == 0, err
        assert "trained" in out
        assert others == [["", "", 0]] * (num - 1)
    assert list((tmp_path / "local-run" / CHECKPOINTS).glob("step-*"))


def test_a_callback_of_rank_zero_stops_all_ranks(data: Path, tmp_path: Path) -> None:
    """One step later than it asks for: with the signals of that step all ranks know."""
    settings = DATA_PARALLEL.to_json()
    results = run(f"{HERE}:train_with_callback", 2, str(data), str(tmp_path / "stopped"), settings, False)
    assert [outcome for outcome, _ in results] == [[11, "enough"]] * 2
    assert [seen for _, seen in results] == [[5, 10], []]
    outcomes = [
        outcome
        for outcome, _ in run(f"{HERE}:train_with_callback", 2, str(data), str(tmp_path / "run"), settings, True)
    ]
    assert [kind for kind, _ in outcomes] == ["CallbackError", "PeerError"]
    assert all("callback Stops failed in on_log at step 10 (ValueError: no chart)" in text for _, text in outcomes)
    for folder in ("stopped", "run"):
        newest = checkpoint.latest(tmp_path / folder / CHECKPOINTS)
        assert newest is not None
        assert newest.name == "step-00000011"


def test_pretrained_rows_reach_the_process_that_has_them(data: Path, tmp_path: Path, plain: Path) -> None:
    scorer = load(plain)
    scorer.write_vectors("C3", tmp_path / "vectors.parquet")
    expected = scorer.model.bags.table("C3").materialize()
    for strategy, hot_bytes in (("two-fold", "2KB"), ("table-wise", None)):
        config = SMALL.replace(strategy=strategy, hot_bytes=hot_bytes, pretrained=(f"C3={tmp_path}/vectors.parquet",))
        out = tmp_path / strategy
        assert run(f"{HERE}:start_and_stop", 2, str(data), str(out), config.to_json()) == [0, 0]
        assert torch.equal(load(out).model.bags.table("C3").materialize(), expected)
