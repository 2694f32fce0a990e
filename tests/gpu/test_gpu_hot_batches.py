"""Hot batches on a GPU: bit-equal whether fetched ahead or not, by kernels or copies, captured or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdall.training.config import TrainConfig
from holdall.training.train import train
from tests.gpu.runs import model_of, write_clicks

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

CONFIG = TrainConfig.of(
    dim=16,
    bottom=(32,),
    top=(32,),
    batch_size=512,
    deterministic=True,
    lr=0.05,
    device="cuda",
    epochs=2,
    save_every=53,
    strategy="hot-batches",
    hot_bytes="100KB",
)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clicks(tmp_path_factory.mktemp("gpu"), 40_000)


@pytest.fixture(scope="module")
def plain(clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Nothing ahead, copied by the host, no graph."""
    run = tmp_path_factory.mktemp("plain") / "run"
    train(clicks, run, CONFIG.replace(cuda_graph="off", fetch_by="copy", prefetch=0), quiet=True)
    return model_of(run)


@pytest.mark.parametrize(
    "options",
    [
        {"fetch_by": "copy", "prefetch": 2},
        {"fetch_by": "kernel", "prefetch": 0},
        {},
        {"fetch_by": "kernel", "prefetch": 2},
        {"fetch_by": "kernel", "prefetch": 4},
    ],
    ids=["copy-2", "kernel-0", "default", "kernel-2", "kernel-4"],
)
def test_the_same_bits(clicks: Path, plain: dict[str, torch.Tensor], tmp_path: Path, options: dict[str, Any]) -> None:
    result = train(clicks, tmp_path / "run", CONFIG.replace(**options), quiet=True)
    found = model_of(tmp_path / "run")
    assert [name for name in plain if not torch.equal(plain[name], found[name])] == []
    hot_steps = int(result["hot_share_of_inputs"] * 32_000 / 512) * 2
    assert int(result["cuda_graph"].split()[0]) > hot_steps  # cold ones are captured too
