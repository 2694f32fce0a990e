"""The comparison of table methods: which runs it makes, what it keeps to, and what its tables say."""

from __future__ import annotations

import json
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    accuracy_runs,
    card,
    methods,
    methods_data,
    methods_figures,
    methods_release,
    methods_sides,
    methods_start,
)
from benchmarks.accuracy import Work
from benchmarks.accuracy_runs import Job
from benchmarks.methods_sides import DENSE, FOLDING, GRID, fold, methods_of, tune_budget
from benchmarks.methods_tables import summarise, summarise_forms
from holdall.common.errors import ConfigError
from holdall.data.dataset import DataSet
from holdall.data.synthetic import preset, write_prepared
from holdall.serving.forms import Forms
from holdall.tables import Bands, Dense, Shared
from holdall.tables.method import total_bytes

pytestmark = pytest.mark.slow

SAMPLE = {"dense_bytes": 6_400}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("methods")
    write_prepared(preset("avazu", scale=0.0005, rows=2_000), folder / "planted", valid=0.2, test=0.2)
    return folder


# --- folding ----------------------------------------------------------------------------------------------------------


def test_folding_keeps_the_ids_of_all_tables_that_are_looked_up_k_times():
    counts = {"a": torch.tensor([9, 5, 5, 1, 1, 1, 1, 1]), "b": torch.tensor([4, 1, 1, 1])}
    methods, k = fold(counts, 16, f"{64 * 6}B")  # four rows and a shared one in each table
    assert k == 4
    assert methods == {"a": Bands(((3, Dense()), (None, Shared(1)))), "b": Bands(((1, Dense()), (None, Shared(1))))}
    assert fold(counts, 16, "1/1") == ({"a": Dense(), "b": Dense()}, 1)
    assert fold(counts, 16, f"{64 * 5}B")[1] == 5


def test_folding_refuses_a_budget_below_one_row_a_table():
    with pytest.raises(ConfigError, match="one row for all ids of every table"):
        fold({"a": torch.tensor([3, 1]), "b": torch.tensor([1, 1])}, 16, "100B")


@pytest.mark.parametrize("side", [side for side in methods_sides.sides() if side != DENSE])
def test_every_side_keeps_its_budget(prepared: Path, side: str):
    data = prepared / "planted"
    budget = tune_budget("planted", side, data)
    assert budget in ("1/20", "1/4")
    rows = accuracy_runs.MODEL.table_rows(DataSet(data).schema)
    dense = 64 * sum(rows.values())
    found = methods_of("planted", side, budget, data)
    assert found is not None
    assert all(method.trains for method in found.values())
    assert 0 < total_bytes([(method, rows[name], 16) for name, method in found.items()]) <= dense / int(budget[2:])


# --- a whole run ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A comparison of three sides with two settings and two seeds; the card goes to a folder of the test."""
    monkeypatch.setattr(methods_sides, "GRID", GRID[2:4])
    monkeypatch.setattr(methods_sides, "OTHERS", ("hashed",))
    monkeypatch.setattr(methods_sides, "BUDGETS", dict.fromkeys(methods_sides.BUDGETS, ("1/20",)))
    monkeypatch.setattr(card, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(methods_figures, "IMAGES", tmp_path / "images")
    return tmp_path


def call(monkeypatch: pytest.MonkeyPatch, work: Path, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["methods", "--work", str(work), "--sets", "planted", "--seeds", "2", *options])
    methods.main()


def test_a_comparison_ends_in_time_goes_on_and_writes_its_card(
    prepared: Path, small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    archive = small / "sets.tar.xz"
    call(monkeypatch, small / "packing", "--prepared", str(prepared), "--pack", str(archive))
    work = small / "work"
    options = ("--prepared", str(archive), "--jobs", "1")
    call(monkeypatch, work, *options, "--minutes", "0")
    assert "0 runs are done" in capsys.readouterr().out
    assert not (small / "results").exists()
    call(monkeypatch, work, *options)
    assert " 0 are left" in capsys.readouterr().out
    made = json.loads((small / "results" / "methods.json").read_text())
    results = made["results"]
    rows = {(row["side"], row["budget"]): row for row in results["from_start"]}
    assert set(rows) == {(DENSE, "1"), *((side, "1/20") for side in ("folding", "auto", "auto, counts", "hashed"))}
    assert all(row["seeds"] == 2 and 0.4 < row["auc"] < 1 for row in rows.values())
    assert rows[FOLDING, "1/20"]["peak_share"] < 1 / 15
    assert len(results["search"]) == 2 * len(rows)
    precise = [row for row in results["released"] if row["form"] == "precision"]
    assert [row["budget"] for row in precise][:2] == ["1/20", "1/50"]
    polished = [row["budget"] for row in results["released"] if row["form"] == "polished"]
    assert polished == [row["budget"] for row in precise if row["budget"] in methods_release.POLISHED_AT]
    assert all(row["test_auc_loss_bound"] >= row["test_auc_loss"] for row in precise)
    assert (small / "images" / "methods-planted-dark.svg").read_text().startswith("<svg")
    page = runpy.run_path(str(card.ROOT / "tools" / "methods.py"))["section"](made)
    assert f"| dense, all bytes | {rows[DENSE, '1']['auc']:.4f} |" in page
    assert f"{precise[0]['test_auc_loss']:.4f}, {precise[0]['test_auc_loss_bound']:.4f}" in page.replace(
        "-0.0000", "0.0000"
    )
    lines = (work / "runs.jsonl").read_text()
    call(monkeypatch, work, *options)
    assert (work / "runs.jsonl").read_text() == lines


def test_small_from_the_start_is_compared_with_dense(
    prepared: Path, small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(methods_start, "GRID", GRID[2:4])
    options = ["--work", str(small / "work"), "--prepared", str(prepared), "--sets", "planted", "--seeds", "2"]
    monkeypatch.setattr(sys, "argv", ["methods_start", *options, "--jobs", "2", "--device", "cpu"])
    methods_start.main()
    made = json.loads((small / "results" / "methods_start.json").read_text())["results"]["from_start"]
    found = [(row["side"], row["budget"], row["seeds"]) for row in made]
    assert found == [("auto, counts", "1/40", 2), (DENSE, "1", 2)]
    assert 1 / 41 < made[0]["peak_share"] <= 1 / 40
    runs = [json.loads(line) for line in (small / "work" / "runs.jsonl").read_text().splitlines()]
    assert len(runs) == 2 * (2 * methods_start.TUNING_SEEDS + 2)
    assert all(("auc" in run["result"]) == (run["job"]["stage"] == "final") for run in runs)
    for row in made:
        tried = [run for run in runs if run["job"]["side"] == row["side"] and run["job"]["stage"] == "tune"]
        losses = {}
        for run in tried:
            key = tuple(run["job"]["setting"])
            losses[key] = losses.get(key, 0.0) + run["result"]["valid_logloss"]
        assert tuple(row["setting"]) == min(losses, key=lambda setting: losses[setting])


def test_settings_are_tried_before_seeds_and_test_scores_are_of_the_last_runs_alone(prepared: Path, small: Path):
    work = Work(small / "work")
    queue = methods.Queue(work, {"planted": prepared / "planted"}, 2)
    stages = []
    while (job := queue.pop(1e9)) is not None:
        stages.append((job.side, job.stage))
        best = job.setting == methods_sides.GRID[1]
        work.add(job, {"valid_logloss": 0.1 if best else 0.2})
        if job.stage == "tune":
            queue.push_final(job.set, job.side)
        else:
            assert best
    assert stages[:4] == [(DENSE, "tune")] * 2 + [(DENSE, "final")] * 2
    assert set(Counter(stages).values()) == {2}  # two settings and two seeds of every side
    assert queue.pop(1e9) is None


def test_a_set_that_is_nowhere_is_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert methods_data.find_folders(["avazu"], Work(tmp_path), None, tmp_path / "raw") == {}
    assert "left out: avazu: no avazu/train.csv.gz" in capsys.readouterr().out


# --- tables -----------------------------------------------------------------------------------------------------------


def final(side: str, budget: str, seed: int, auc: float, **more: Any) -> dict[str, Any]:
    job = vars(Job("criteo", side, budget, GRID[0], seed, "final"))
    sizes = {"bytes": 640, "peak_bytes": 680, "dense_peak_bytes": 6_800, "cpu_seconds": 1.0}
    return {**job, **sizes, "auc": auc, "logloss": 0.4, "valid_auc": auc, "valid_logloss": 0.5, **more}


def test_differences_to_dense_are_taken_seed_by_seed():
    runs = [final(DENSE, "1", seed, 0.70 + seed / 100) for seed in range(3)]
    runs += [final(FOLDING, "1/10", seed, 0.69 + seed / 100) for seed in range(3)]
    _, folding = summarise(runs, "criteo", SAMPLE)
    assert folding["minus_dense"] == pytest.approx(-0.01)
    assert folding["standard_error"] == pytest.approx(0.0, abs=1e-12)
    assert (folding["auc_low"], folding["auc_high"]) == (0.69, 0.71)
    assert (folding["share"], folding["peak_share"]) == (0.1, 0.1)


def test_bounds_of_forms_are_the_mean_and_the_worst_of_the_seeds():
    def form(bound: float) -> dict[str, Any]:
        numbers = {f"{split}_{metric}_{x}": 0.0 for split in ("valid", "test") for metric in ("auc", "logloss")
                   for x in ("loss", "loss_bound")}  # fmt: skip
        scores = {"test_auc": 0.7, "test_logloss": 0.4}
        return {"form": "precision", "budget": "1/100", "bytes": 64, **scores, **numbers, "test_auc_loss_bound": bound}

    runs = [final(DENSE, "1", seed, 0.7, forms=[form(bound)]) for seed, bound in enumerate((0.001, 0.003))]
    (row,) = summarise_forms(runs, "criteo", SAMPLE)
    assert row["test_auc_loss_bound"] == pytest.approx(0.002)
    assert row["test_auc_worst_bound"] == 0.003
    assert row["share"] == 0.01


@pytest.mark.parametrize("name", accuracy_runs.RULES)
def test_forms_are_made_with_the_settings_of_the_run(name: str):
    config = methods_release.train_config(Job(name, DENSE, "1", GRID[0], 3, "final"))
    assert config.model.model_config() == accuracy_runs.RULES[name].model
    assert (config.seed, config.optimizer.lr, config.optimizer.table_lr) == (3, *GRID[0])


def test_a_form_of_all_bytes_loses_nothing(prepared: Path):
    data = prepared / "planted"
    job = Job("planted", "dlrm", "1", GRID[0], 0, "tune")
    model = accuracy_runs.build(job, data, accuracy_runs.MODEL)
    same = methods_release.scored(Forms(model, methods_release.train_config(job), data), "dense", "1", model)
    assert same["test_auc_loss"] == same["test_auc_loss_bound"] == same["valid_logloss_loss"] == 0
