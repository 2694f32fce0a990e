"""Run folders: run.json, the metrics log and its resumption, TensorBoard, saved batches."""

from __future__ import annotations

import json
import math
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch

from holdall.common.errors import DataError, HoldallError
from holdall.data.batch import Batch, Ids
from holdall.training.tracking import RunLog, load_batch, read_metrics, read_run, save_batch

CONFIG = {"data": "clicks", "train": {"lr": 0.1, "model": "dlrm"}}


def start(folder: Path, steps: range) -> None:
    with RunLog.create(folder, CONFIG, tensorboard=False) as log:
        for step in steps:
            log.write(step, loss=1 / step)


class TestRunFile:
    def test_holds_configuration_and_environment(self, tmp_path: Path):
        RunLog.create(tmp_path / "run", CONFIG, tensorboard=False).close()
        document = json.loads((tmp_path / "run" / "run.json").read_text())
        assert (document["format"], document["version"]) == ("holdall-run", 1)
        assert document["config"] == CONFIG
        assert document["versions"]["torch"] == torch.__version__
        assert document["hardware"]["cores"] >= 1
        assert {"commit", "dirty", "started"} <= document.keys()
        assert read_run(tmp_path / "run") == {key: value for key, value in document.items() if key != "sha256"}
        edited = (tmp_path / "run" / "run.json").read_text().replace("dlrm", "dcn")
        (tmp_path / "run" / "run.json").write_text(edited)
        with pytest.raises(DataError, match=r"run\.json was changed after it was written"):
            read_run(tmp_path / "run")

    def test_a_resumption_is_recorded(self, tmp_path: Path):
        start(tmp_path, range(1, 5))
        for step in (2, 3):
            RunLog.resume(tmp_path, step, tensorboard=False).close()
        document = read_run(tmp_path)
        assert [entry["step"] for entry in document["resumed"]] == [2, 3]
        assert document["config"] == CONFIG

    def test_not_a_run(self, tmp_path: Path):
        with pytest.raises(DataError, match=r"run\.json does not exist"):
            RunLog.resume(tmp_path, 1)
        with pytest.raises(DataError, match=r"metrics\.jsonl does not exist: is .* a run folder"):
            read_metrics(tmp_path)


class TestMetricsLog:
    def test_rows_are_on_disk_at_once(self, tmp_path: Path):
        log = RunLog.create(tmp_path, CONFIG, tensorboard=False)
        log.write(1, epoch=0, samples=64, loss=0.5, lr=0.1, samples_per_second=1000.0)
        log.write(1, "valid", auc=0.75, logloss=math.nan)
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        log.close()
        train = {"step": 1, "split": "train", "epoch": 0, "samples": 64, "loss": 0.5, "lr": 0.1}
        assert json.loads(lines[0]) == {**train, "samples_per_second": 1000.0}
        assert json.loads(lines[1]) == {"step": 1, "split": "valid", "auc": 0.75, "logloss": None}
        assert len(lines) == 2

    def test_a_resumed_run_has_one_clean_curve(self, tmp_path: Path):
        start(tmp_path, range(1, 8))
        with RunLog.resume(tmp_path, 5, tensorboard=False) as log:
            for step in (6, 7, 8):
                log.write(step, loss=1 / step)
        rows = read_metrics(tmp_path)
        assert [row["step"] for row in rows] == list(range(1, 9))
        assert [row["loss"] for row in rows] == [1 / step for step in range(1, 9)]

    @pytest.mark.parametrize("torn", ['{"step": 8, "spl', '{"step": 3, "split": "train"}', "{"])
    def test_a_line_that_a_kill_cut_short_is_dropped(self, tmp_path: Path, torn: str):
        start(tmp_path, range(1, 4))
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(torn)
        assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
        with RunLog.resume(tmp_path, 3, tensorboard=False) as log:
            log.write(4, loss=0.0)
        assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]

    @pytest.mark.parametrize(
        "line",
        ["nonsense", "[1]", '{"split": "train"}', '{"step": 3}', '{"step": 1e9, "split": "train"}', "\xff", "[" * 9**5],
    )
    def test_a_damaged_line_is_named(self, tmp_path: Path, line: str):
        start(tmp_path, range(1, 3))
        with (tmp_path / "metrics.jsonl").open("a", encoding="latin-1") as file:
            file.write(line + "\n" + '{"step": 4, "split": "train"}\n')
        before = (tmp_path / "run.json").read_bytes()
        for read in (read_metrics, lambda folder: RunLog.resume(folder, 2, tensorboard=False)):
            with pytest.raises(DataError, match=r"metrics.jsonl, line 3\b.*: delete that line"):
                read(tmp_path)
        assert (tmp_path / "run.json").read_bytes() == before

    def test_a_folder_in_place_of_the_log_is_refused(self, tmp_path: Path):
        start(tmp_path, range(1, 3))
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "metrics.jsonl").mkdir()
        with pytest.raises(DataError, match=r"metrics.jsonl cannot be read \(Is a directory\): delete it"):
            read_metrics(tmp_path)

    def test_resumes_before_any_row_was_written(self, tmp_path: Path):
        start(tmp_path, range(1, 4))
        (tmp_path / "metrics.jsonl").unlink()
        RunLog.resume(tmp_path, 2, tensorboard=False).close()
        assert read_metrics(tmp_path) == []


class TestTensorBoard:
    def test_scalars_by_split_and_a_resumed_curve(self, tmp_path: Path):
        pytest.importorskip("tensorboard", reason="needs tensorboard, which training can do without")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        with RunLog.create(tmp_path, CONFIG) as log:
            for step in (1, 2, 3, 4):
                log.write(step, loss=step / 2, note="text is not drawn")
            log.write(4, "valid", auc=0.5)
        with RunLog.resume(tmp_path, 2) as log:
            log.write(3, loss=30.0)
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        assert events.Tags()["scalars"] == ["train/loss", "valid/auc"]
        assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 1.0), (3, 30.0)]

    def test_an_error_of_its_thread_is_one_sentence(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        pytest.importorskip("tensorboard", reason="needs tensorboard, which training can do without")
        monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
        others = set(threading.enumerate())  # of logs that other tests left open
        with RunLog.create(tmp_path, {}) as log:
            shutil.rmtree(tmp_path / "tensorboard")
            log.write(1, loss=0.5)
            for thread in set(threading.enumerate()) - others:
                if type(thread).__module__.startswith("tensorboard"):
                    thread.join()
            with pytest.raises(HoldallError, match=r"the log of the run in .* cannot be written at step 2"):
                log.write(2, loss=0.5)
        assert capsys.readouterr().err == ""

    def test_without_tensorboard_there_is_one_note_and_the_log_works(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
        with RunLog.create(tmp_path, CONFIG) as log:
            log.write(1, loss=0.5)
            log.write(2, loss=0.25)
        assert capsys.readouterr().err.count("pip install 'holdall[cli]'") == 1
        assert len(read_metrics(tmp_path)) == 2
        assert not (tmp_path / "tensorboard").exists()


class TestBatchFile:
    @pytest.mark.parametrize(
        "ids",
        [
            Ids(torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32), None, 3),
            Ids(torch.tensor([7, 8, 9]), torch.tensor([0, 2, 2, 3, 3]), 2),
            Ids(torch.tensor([7, 8, 9]), torch.tensor([0, 2, 2, 3, 3]), 2, torch.tensor([0.5, 1.0, 2.0])),
        ],
        ids=["one id a feature", "bags", "weighted bags"],
    )
    def test_round_trip(self, tmp_path: Path, ids: Ids):
        buffer = torch.tensor([[1.0, math.nan, 3.0], [4.0, 5.0, math.inf]])
        batch = Batch(dense=buffer[:, 1:], ids=ids, label=buffer[:, 0])
        save_batch(tmp_path / "bad_batch.safetensors", batch)
        loaded = load_batch(tmp_path / "bad_batch.safetensors")
        assert torch.equal(loaded.dense.nan_to_num(7), batch.dense.nan_to_num(7))
        assert torch.equal(loaded.label, batch.label)
        assert loaded.ids.num_features == ids.num_features
        for name in ("values", "offsets", "weights"):
            before, after = getattr(ids, name), getattr(loaded.ids, name)
            assert (before is None) == (after is None)
            assert before is None or (before.dtype == after.dtype and torch.equal(before, after))
        assert [file.name for file in tmp_path.iterdir()] == ["bad_batch.safetensors"]

    def test_refuses_other_files(self, tmp_path: Path):
        with pytest.raises(DataError, match="does not exist"):
            load_batch(tmp_path / "absent")
        (tmp_path / "x").write_bytes(b"\x00" * 30)
        with pytest.raises(DataError, match="is not a batch saved by Holdall"):
            load_batch(tmp_path / "x")
