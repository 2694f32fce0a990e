"""Ranking and grouped metrics of runs, by the command line and the library: what is reported, and what is the best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import holdall
from holdall import checkpoint
from holdall.cli import main
from holdall.common.errors import ConfigError, DataError
from holdall.data.dataset import DataSet
from holdall.data.prepare import PrepareConfig, prepare
from holdall.evaluation.grouped import grouped_metrics
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import BEST, evaluate, evaluate_ranking, load_model
from holdall.training.tracking import read_metrics
from holdall.training.train import train
from tests.data.raw_files import write_lines
from tests.data.test_taobao import write_set

GMF = TrainConfig.of(model="gmf", epochs=6, batch_size=100, optimizer="adam", lr=0.05, negatives=2, device="cpu")
DLRM = TrainConfig.of(dim=4, bottom=(4,), top=(4,), batch_size=256, epochs=1, device="cpu")


def films(folder: Path, **options: Any) -> Path:
    """40 users with 8 of 60 films each, all of the user's parity; the last two are valid and test."""
    lines = [f"{u}::{2 * ((u * 3 + k * (1 + u % 5)) % 30) + u % 2}::4::{k}" for u in range(40) for k in range(8)]
    raw = write_lines(folder / "ratings.dat", lines)
    prepare([raw], folder / "films", PrepareConfig(format="movielens", **{"candidates": 20, **options}))
    return folder / "films"


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """What `holdall evaluate ... --json` prints."""
    capsys.readouterr()
    main(["evaluate", *map(str, arguments), "--device", "cpu", "--json"])
    return json.loads(capsys.readouterr().out)


# --- implicit data ---------------------------------------------------------------------------------------------------


def test_an_implicit_set_is_ranked_from_the_raw_file_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = films(tmp_path), tmp_path / "run"
    flags = ["--epochs", "6", "--batch-size", "100", "--optimizer", "adam", "--lr", "0.05", "--device", "cpu"]
    main(["train", str(data), "--out", str(run), "--model", "gmf", *flags])
    assert "ndcg@10" in capsys.readouterr().out
    found = evaluated(capsys, run)
    assert {"auc", "logloss", "hr@10", "ndcg@10"} <= found.keys()
    assert (found["cases"], found["dropped"]) == (40, 0)
    third = evaluated(capsys, run, "--k", 3, "--split", "valid")
    assert "hr@10" not in third
    assert third["hr@3"] == evaluate_ranking(run, "valid", 3, device="cpu")["hr@3"] > 3 / 21


def test_every_epoch_is_ranked_on_the_validation_pairs_and_the_best_by_ndcg_is_kept(tmp_path: Path) -> None:
    data, run = films(tmp_path), tmp_path / "run"
    train(data, run, GMF.replace(epochs=12, early_stopping=3), quiet=True)
    rows = [row for row in read_metrics(run) if row["split"] == "valid"]
    assert [row["epoch"] for row in rows] == list(range(1, len(rows) + 1))
    best = max(rows, key=lambda row: row["ndcg@10"])
    assert best["step"] != min(rows, key=lambda row: row["logloss"])["step"]  # which the old rule would have kept
    assert checkpoint.latest(run / BEST).name == f"step-{best['step']:08d}"  # type: ignore[union-attr]
    assert evaluate(run, "valid", device="cpu")["ndcg@10"] == pytest.approx(best["ndcg@10"], rel=1e-9)
    assert evaluate(run, "valid", device="cpu")["hr@10"] == pytest.approx(best["hr@10"], rel=1e-9)


@pytest.mark.parametrize(("by", "better"), [("hr", max), ("auc", max), ("logloss", min)])
def test_the_best_can_be_by_something_else(tmp_path: Path, by: str, better: Any) -> None:
    data, run = films(tmp_path), tmp_path / "run"
    config = GMF.replace(early_stopping=99, best_by=by, rank_at=3)
    train(data, run, config, quiet=True)
    rows = [row for row in read_metrics(run) if row["split"] == "valid"]
    name = "hr@3" if by == "hr" else by
    best = better(rows, key=lambda row: row[name])
    assert checkpoint.latest(run / BEST).name == f"step-{best['step']:08d}"  # type: ignore[union-attr]


def test_a_resumed_run_remembers_its_best(tmp_path: Path) -> None:
    data = films(tmp_path)
    config = GMF.replace(early_stopping=99)
    train(data, tmp_path / "whole", config, quiet=True)
    train(data, tmp_path / "parts", config.replace(epochs=3), quiet=True)
    train(data, tmp_path / "parts", config, quiet=True, resume=True)
    best = [checkpoint.latest(tmp_path / name / BEST).name for name in ("whole", "parts")]  # type: ignore[union-attr]
    assert best[0] == best[1]


def test_ranking_can_be_turned_off(tmp_path: Path) -> None:
    result = train(films(tmp_path), tmp_path / "run", GMF.replace(epochs=1, rank_at=0, early_stopping=1), quiet=True)
    assert "logloss" in result["valid"]
    assert "hr@10" not in result["valid"]


def test_positives_alone_are_ranked_and_have_no_auc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = films(tmp_path, negatives=0)
    train(data, tmp_path / "run", GMF.replace(epochs=1, early_stopping=2), quiet=True)
    found = evaluated(capsys, tmp_path / "run")
    assert "auc" not in found
    assert "hr@10" in found
    with pytest.raises(ConfigError, match="--best-by auc needs both labels in the validation split"):
        train(data, tmp_path / "auc", GMF.replace(best_by="auc"), quiet=True)


def test_candidates_that_are_the_chosen_item_are_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in the public MovieLens-1M file: two of six candidates are the positive, one stands twice."""
    files = [
        write_lines(tmp_path / "s.train.pairs.tsv", ["0\t0", "0\t1", "0\t4", "1\t1", "1\t2", "1\t3", "2\t3"]),
        write_lines(tmp_path / "s.test.rating", ["0\t2\t5\t978", "1\t0\t3\t978"]),
        write_lines(tmp_path / "s.test.negative", ["(0,2)\t3\t2\t3", "(1,0)\t4\t0\t7"]),
    ]
    schema = prepare(files, tmp_path / "data", PrepareConfig(format="movielens", candidates=1))
    counts = schema.source["counts"]
    assert (counts["negatives_equal_positive"], counts["negatives_repeated"]) == (2, 1)
    train(tmp_path / "data", tmp_path / "run", GMF.replace(epochs=1), quiet=True)
    found = evaluated(capsys, tmp_path / "run", "--k", 1)
    assert (found["cases"], found["dropped"]) == (2, 3)
    main(["evaluate", str(tmp_path / "run"), "--device", "cpu"])
    assert "3 candidates did not count: the chosen item itself, or an item listed twice" in capsys.readouterr().out
    main(["inspect", str(tmp_path / "data")])
    assert "negatives equal positive 2" in " ".join(capsys.readouterr().out.split())


def test_dirt_goes_all_the_way(tmp_path: Path) -> None:
    """Users of one event or none, unseen items and users, repeated events, empty and overlong histories."""
    lists = {"train_txt": ["0 5 1 5 1 2 3 4", "1", "2 0", "3 4 1 2"], "test_txt": ["0 1 6", "2", "9 5", "3 0"]}
    config = PrepareConfig(format="taobao", max_length=3, candidates=2, valid=1.0)
    schema = prepare([write_set(tmp_path, **lists)], tmp_path / "data", config)
    counts = schema.source["counts"]
    assert all(counts[name] for name in ("duplicate_events", "users_without_events", "users_with_one_event"))
    assert all(counts[name] for name in ("held_out_events_of_unseen_items", "held_out_events_of_unseen_users"))
    assert all(counts[name] for name in ("events_without_history", "histories_cut", "users_without_valid_event"))
    tbsm = TrainConfig.of(model="tbsm", dim=4, epochs=1, batch_size=8, device="cpu", model_setting=("length=3",))
    result = train(tmp_path / "data", tmp_path / "run", tbsm, quiet=True)
    assert result["valid"]["cases"] == 2
    assert evaluate(tmp_path / "run", device="cpu")["cases"] == 3


# --- click data ------------------------------------------------------------------------------------------------------


def test_auc_within_groups_of_clicks(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    train(data, run, DLRM, quiet=True)
    plain = evaluated(capsys, run)
    found = evaluated(capsys, run, "--group-by", "C2")
    assert plain == {name: found[name] for name in plain}
    assert found.keys() - plain.keys() == {"gauc", "groups", "groups_left_out"}
    expected = grouped_metrics(load_model(run, device="cpu")[0], DataSet(data, "test"), "C2", k=5)
    assert found["gauc"] == pytest.approx(expected["gauc"], rel=1e-9)
    ranked = holdall.evaluate(run, group_by="C2", k=5, device="cpu")
    assert ranked["ndcg@5"] == pytest.approx(expected["ndcg@5"], rel=1e-9)
    assert ranked["groups"] + ranked["groups_left_out"] <= 7


def test_ranking_that_cannot_be_had(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(data, run, DLRM, quiet=True)
    with pytest.raises(ConfigError, match=r"HR@5 and NDCG@5 need ranking cases.*name the feature to rank within"):
        evaluate(run, k=5)
    with pytest.raises(ConfigError, match="no feature named 'user'"):
        evaluate(run, group_by="user")
    with pytest.raises(DataError, match="has no ranking cases for split 'test'"):
        evaluate_ranking(run)
    for by in ("ndcg", "hr"):
        with pytest.raises(ConfigError, match=f"--best-by {by} needs ranking cases"):
            train(data, tmp_path / "other", DLRM.replace(best_by=by), quiet=True)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="which --rank-at 0 turns off"):
            TrainConfig.of(best_by=by, rank_at=0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--rank-at must be 0 or more"):
        TrainConfig.of(rank_at=-1)
    assert not (tmp_path / "other").exists()
