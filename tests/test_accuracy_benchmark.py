"""The accuracy benchmark: what it tries, what it keeps, what it chooses by, and what its tables say."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import accuracy, accuracy_runs, accuracy_tables, rivals
from benchmarks.accuracy import Work, best_setting, jobs_of, run_set, sides_of
from benchmarks.accuracy_runs import FIT, RULES, Job, build, run, stepper, train
from holdall.common.errors import HoldallError
from holdall.data.dataset import DataSet
from holdall.data.synthetic import preset, write_prepared
from holdall.evaluation.evaluate_model import evaluate_model

pytestmark = pytest.mark.slow

SETTING = (0.01, 0.03)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("accuracy") / "data"
    write_prepared(preset("avazu", scale=0.0005, rows=2_000), folder, valid=0.2, test=0.2)
    return folder


def final(side: str, budget: str, seed: int, auc: float, valid: float = 0.5) -> dict[str, Any]:
    job = {"set": "avazu", "side": side, "budget": budget, "setting": SETTING, "seed": seed}
    return {**job, "auc": auc, "logloss": 0.4, "accuracy": 0.8, "valid_logloss": valid, "bytes": 1}


SAMPLE = {"train_rows": 2_000, "test_rows": 200, "test_positives": 100}


# --- plan and resume --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", accuracy.SOURCES)
def test_every_side_of_a_set_tries_as_many_settings(name: str):
    assert len({len(grid) for _, grid in sides_of(name, with_rivals=True).values()}) == 1


def test_settings_are_tried_before_any_seed_and_the_best_one_is_taken(tmp_path: Path):
    work = Work(tmp_path)
    for job in jobs_of(work, "taobao", seeds=2, with_rivals=False):
        best = job.side == "auto" and job.setting == accuracy.GRID[2]
        work.add(job, {"valid_logloss": 0.1 if best else 0.2, "auc": 0.7})
    jobs = list(jobs_of(work, "taobao", seeds=2, with_rivals=False))
    stages = [job.stage for job in jobs]
    assert stages == sorted(stages, reverse=True)  # "tune" comes before "final"
    chosen = {job.side: job.setting for job in jobs if job.stage == "final"}
    assert chosen["auto"] == accuracy.GRID[2]
    assert chosen["tbsm"] == accuracy.GRID[0]
    assert {job.budget for job in jobs if job.side == "auto" and job.stage == "final"} == {"1/20", "1/100"}


def test_a_cut_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[Job] = []

    def pretend(job: Job, data: Path, dense_setting: Any) -> dict[str, Any]:
        if len(made) == 7:
            raise KeyboardInterrupt
        made.append(job)
        return {"valid_logloss": 0.5, "cpu_seconds": 0.0}

    monkeypatch.setattr(accuracy, "run", pretend)
    monkeypatch.setattr(Work, "prepared", lambda self, name, source: tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_set(Work(tmp_path), "taobao", tmp_path, 1, False)
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"key": "half a li')
    first, made[:] = list(made), []
    monkeypatch.setattr(
        accuracy, "run", lambda *given: (made.append(given[0]), {"valid_logloss": 0.5, "cpu_seconds": 0.0})[1]
    )
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write("\n")
    run_set(Work(tmp_path), "taobao", tmp_path, 1, False)
    assert not set(first) & set(made)
    assert len(first) + len(made) == len(list(jobs_of(Work(tmp_path), "taobao", 1, False)))


def test_runs_of_other_rules_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = Job("avazu", "dlrm", "1", SETTING, 0, "tune")
    Work(tmp_path).add(job, {"valid_logloss": 0.5})
    assert Work(tmp_path).get(job) == {"valid_logloss": 0.5}
    monkeypatch.setitem(RULES, "avazu", dataclasses.replace(RULES["avazu"], batch_size=7))
    assert Work(tmp_path).get(job) is None


def test_a_missing_sample_is_named(tmp_path: Path):
    with pytest.raises(HoldallError, match=r"avazu: no avazu/train\.csv\.gz under .*--data"):
        Work(tmp_path).prepared("avazu", tmp_path / "nowhere")


def test_no_setting_is_best_before_all_are_tried(tmp_path: Path):
    work = Work(tmp_path)
    grid = (SETTING, (0.1, 0.1))
    work.add(Job("avazu", "dlrm", "1", SETTING, 0, "tune"), {"valid_logloss": 0.5})
    assert best_setting(work, "avazu", "dlrm", "1", grid) is None


# --- runs -------------------------------------------------------------------------------------------------------------


def test_tuning_leaves_the_test_split_alone(data: Path, monkeypatch: pytest.MonkeyPatch):
    opened: list[str] = []

    class Watched(DataSet):
        def __init__(self, folder: Path, split: str = "train"):
            opened.append(split)
            super().__init__(folder, split)

    monkeypatch.setattr(accuracy_runs, "DataSet", Watched)
    tuned = run(Job("avazu", "dlrm", "1", SETTING, 0, "tune"), data)
    assert "test" not in opened
    assert "auc" not in tuned
    scored = run(Job("avazu", "dlrm", "1", SETTING, 0, "final"), data)
    assert "test" in opened
    assert scored["valid_logloss"] == tuned["valid_logloss"]
    assert 0.5 < scored["auc"] < 1


def test_the_best_state_is_the_one_that_counts(data: Path, monkeypatch: pytest.MonkeyPatch):
    rules = dataclasses.replace(RULES["avazu"], epochs=6, patience=3)
    monkeypatch.setitem(RULES, "avazu", rules)
    job = Job("avazu", "dlrm", "1", (0.1, 0.3), 0, "tune")  # far too fast: it overfits within the first epochs
    model = build(job, data, rules.model)
    found = train(model, stepper(model, job.setting), job, data)
    assert found["epochs"] < 6
    assert evaluate_model(model, DataSet(data, "valid"))["logloss"] == pytest.approx(found["valid_logloss"], abs=1e-7)


@pytest.mark.parametrize("side", ["tensor_train", "hot_tensor_train", "auto", "clustered" + FIT])
def test_compressed_sides_keep_to_their_budget(data: Path, side: str):
    dense = run(Job("avazu", "dlrm", "1", SETTING, 0, "tune"), data)
    small = run(Job("avazu", side, "1/4", (0.001, 0.001), 0, "tune"), data, SETTING)
    assert 0 < small["bytes"] <= dense["bytes"] / 4


def test_a_fitted_side_starts_from_the_trained_model(data: Path):
    """Training on is too slow to change anything here, so what is scored is the fit; fresh tables know nothing yet."""
    still = (1e-9, 1e-9)
    dense = run(Job("avazu", "dlrm", "1", SETTING, 1, "tune"), data)
    fitted = run(Job("avazu", "clustered" + FIT, "1/2", still, 1, "tune"), data, SETTING)
    fresh = run(Job("avazu", "auto", "1/2", still, 1, "tune"), data)
    assert fitted["valid_logloss"] == pytest.approx(dense["valid_logloss"], abs=0.005)
    assert fresh["valid_logloss"] > dense["valid_logloss"] + 0.02


# --- tables -----------------------------------------------------------------------------------------------------------


def test_differences_are_taken_seed_by_seed():
    runs = [final("dlrm", "1", seed, 0.70 + seed / 100) for seed in range(3)]
    runs += [final("auto", "1/20", seed, 0.69 + seed / 100) for seed in range(3)]
    dense, auto = accuracy_tables.summarise(runs, SAMPLE)
    assert dense["auc"] == pytest.approx(0.71)
    assert dense["auc_sd"] == pytest.approx(0.01)
    assert auto["minus_dense"] == pytest.approx(-0.01)
    assert auto["standard_error"] == pytest.approx(0.0, abs=1e-12)
    assert (auto["train_rows"], auto["test_rows"]) == (2_000, 200)


def test_fitted_sides_are_also_compared_with_dense_that_was_trained_on():
    runs = [final("dlrm", "1", 0, 0.70), final("dlrm fit", "1", 0, 0.73), final("hot_cold fit", "1/20", 0, 0.72)]
    _, _, fitted = accuracy_tables.summarise(runs, SAMPLE)
    assert (fitted["minus_dense"], fitted["minus_dense_fit"]) == (pytest.approx(0.02), pytest.approx(-0.01))


def test_the_best_compressed_side_is_chosen_on_validation():
    runs = [final("dlrm", "1", 0, 0.70), final("auto", "1/20", 0, 0.80, valid=0.6)]
    runs += [final("frobenius", "1/20", 0, 0.69, valid=0.5), final("hot_cold fit", "1/20", 0, 0.68, valid=0.4)]
    rows = accuracy_tables.best_compressed(accuracy_tables.summarise(runs, SAMPLE))
    assert {row["start"]: row["side"] for row in rows} == {"any": "hot_cold fit", "fresh tables": "frobenius"}


def test_libraries_are_compared_with_both_dense_models():
    runs = [final("dlrm", "1", 0, 0.70), final("dcn", "1", 0, 0.72), final("rechub deepfm", "1", 0, 0.71)]
    rows = accuracy_tables.against_libraries({"avazu": runs})
    assert {row["ours"]: round(row["ours_minus_theirs"], 9) for row in rows} == {"dlrm": -0.01, "dcn": 0.01}


def test_table_of_papers_names_the_rows_of_the_sample():
    runs = [final("dlrm", "1", 0, 0.7), final("tensor_train", "1/20", 0, 0.7)]
    rows = accuracy_tables.compare({"avazu": runs}, {"avazu": SAMPLE})["papers"]
    column = "avazu (2,000 / 200 rows)"
    assert {row["system"]: row.get(column) for row in rows} == {
        "DLRM": 80.0, "TT-Rec": None, "FAE": None, "EL-Rec": 80.0
    }  # fmt: skip


def test_standard_error_of_an_auc_without_signal_is_that_of_wilcoxon():
    assert accuracy_tables.auc_standard_error(0.5, 100, 300) == pytest.approx(math.sqrt(301 / (12 * 100 * 200)))


# --- libraries --------------------------------------------------------------------------------------------------------


def test_missing_libraries_come_with_the_line_that_installs_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rivals, "PACKAGES", {"no_such_module": "torch-rechub"})
    with pytest.raises(HoldallError, match=r"pip install --no-deps .* torch-rechub deepctr-torch"):
        rivals.require()


@pytest.mark.skipif(bool(rivals.missing()), reason=f"{', '.join(rivals.missing())} not installed")
@pytest.mark.parametrize("name", rivals.RIVALS)
def test_a_library_reads_our_ids_and_learns(data: Path, name: str):
    schema = DataSet(data).schema
    model = rivals.build_rival(name, schema, dim=4, hidden=(8,), cross_layers=1, decay=0.0, seed=0)
    batch = DataSet(data).slice(0, 64)
    expected = model.model(model.inputs(batch)).reshape(-1)
    torch.testing.assert_close(torch.sigmoid(model(batch)).float(), expected)
    found = run(Job("avazu", name, "1", (0.003, 1e-6), 0, "tune"), data)
    assert found["steps"] > 0
