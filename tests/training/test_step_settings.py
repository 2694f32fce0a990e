"""Settings of the step: kernels, CUDA graphs, tables in two bytes with stochastic rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdall.common.errors import ConfigError
from holdall.kernels import dispatch as paths
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import load_model
from holdall.training.tracking import read_metrics
from holdall.training.train import train

SMALL = TrainConfig.of(dim=8, bottom=(8,), top=(8,), batch_size=256, log_every=1, steps=6, device="cpu")


def curve(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run) if row["split"] == "train"]


def test_kernels_that_cannot_be_had_are_an_error(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "INTERPRETED", False)
    with pytest.raises(ConfigError, match="was asked to use Triton"):
        train(data, tmp_path / "run", SMALL.replace(kernels="triton"), quiet=True)
    assert not (tmp_path / "run").exists()  # nothing was begun
    assert not paths.plain_torch()
    train(data, tmp_path / "torch", SMALL.replace(kernels="torch"), quiet=True)


def test_a_graph_on_a_cpu_is_an_error(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--cuda-graph on cannot be had, the device is cpu"):
        train(data, tmp_path / "run", SMALL.replace(cuda_graph="on"), quiet=True)
    assert "cuda_graph" not in train(data, tmp_path / "auto", SMALL, quiet=True)


def test_rounding_is_for_narrow_tables() -> None:
    with pytest.raises(ConfigError, match="--stochastic-rounding is for tables in bf16 or fp16"):
        TrainConfig.of(stochastic_rounding=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("options", [{}, {"method": "frobenius", "min_rows": 100}, {"precision": "bf16"}])
def test_tables_in_two_bytes(
    data: Path, tmp_path: Path, name: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    config = SMALL.replace(table_dtype=name, stochastic_rounding=True, lr=0.05, steps=40, **options)
    wide = train(data, tmp_path / "wide", SMALL.replace(lr=0.05, steps=40, **options), quiet=True)
    narrow = train(data, tmp_path / "narrow", config, quiet=True)
    assert narrow["table_bytes"] < wide["table_bytes"]
    ends = [sum(curve(tmp_path / run)[-10:]) for run in ("narrow", "wide")]  # they start from other draws
    assert ends[0] == pytest.approx(ends[1], rel=0.05)
    assert ends[0] < 0.98 * 10 * curve(tmp_path / "narrow")[0]
    model, *_ = load_model(tmp_path / "narrow", device="cpu")
    assert model.bags.packs[0].storage.dtype == dtype
    train(data, tmp_path / "again", config, quiet=True)
    assert curve(tmp_path / "again") == curve(tmp_path / "narrow")
    train(data, tmp_path / "other", config.replace(seed=0, stochastic_rounding=False), quiet=True)
    assert curve(tmp_path / "other") != curve(tmp_path / "narrow")
