"""Order of samples that `--shuffle auto` stands for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdall.data.dataset import DataSet
from holdall.data.prepare import PrepareConfig, prepare
from holdall.distributed.processes import SINGLE_PROCESS
from holdall.training.config import TrainConfig
from holdall.training.resume_check import with_sample_order

SCHEMA = """
label = "click"
dense = ["age"]
categorical = ["site"]
"""


@pytest.fixture(params=["sorted", "mixed"])
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, DataSet]:
    lines = [f"{int(row < 600)},{row % 7},site{row * 31 % 50}" for row in range(2000)]
    if request.param == "mixed":
        order = torch.randperm(2000, generator=torch.Generator().manual_seed(0)).tolist()
        lines = [lines[row] for row in order]
    (tmp_path / "log.csv").write_text("click,age,site\n" + "\n".join(lines) + "\n")
    (tmp_path / "schema.toml").write_text(SCHEMA)
    config = PrepareConfig(format="table", schema=tmp_path / "schema.toml", test=0)
    prepare([tmp_path / "log.csv"], tmp_path / "data", config)
    return request.param, DataSet(tmp_path / "data", "train")


def test_a_gpu_copies_chunks_of_sorted_rows_only(rows: tuple[str, DataSet], tmp_path: Path) -> None:
    kind, data = rows
    orders = {
        device: with_sample_order(
            TrainConfig(), data, tmp_path / "run", torch.device(device), resume=False, processes=SINGLE_PROCESS
        ).shuffle
        for device in ("cpu", "cuda")
    }
    assert orders == {"cpu": "chunks", "cuda": "chunks" if kind == "sorted" else "blocks"}
