"""Choice of the row mover: kernels or host copies, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdall.common.errors import ConfigError
from holdall.kernels.dispatch import INTERPRETED
from holdall.tiers.choose_mover import uses_kernels, why_not_by_kernels
from holdall.tiers.copy_mover import CopyMover
from holdall.tiers.host_rows import DiskRows, HostRows
from holdall.tiers.placement import place
from holdall.training.config import TrainConfig
from tests.tiers.small import HOT, build

CPU = torch.device("cpu")


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs kernels on a CPU")
def test_kernels_need_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"--fetch-by kernel is not possible, .*: use auto or copy"):
        place(build(), HOT, "cpu", fetch_by="kernel")


@pytest.mark.parametrize("fetch_by", ["auto", "copy"])
def test_a_cpu_copies(fetch_by: str) -> None:
    (pack,) = place(build(), HOT, "cpu", fetch_by=fetch_by).packs
    assert isinstance(pack.mover, CopyMover)


def test_an_unknown_mover_is_refused() -> None:
    with pytest.raises(ConfigError, match="auto, kernel or copy, not 'kernels'"):
        uses_kernels("kernels", HostRows(torch.zeros(3, 4)), CPU)


def test_rows_that_kernels_cannot_move(tmp_path: Path) -> None:
    gpu = torch.device("cuda")
    assert why_not_by_kernels(HostRows(torch.zeros(3, 4, dtype=torch.float64)), gpu) is not None
    assert "on disk" in str(why_not_by_kernels(DiskRows(tmp_path, (3, 4), torch.float32), gpu))


def test_plain_training_has_no_rows_to_fetch() -> None:
    with pytest.raises(ConfigError, match="--fetch-by kernel goes with split"):
        TrainConfig.of(fetch_by="kernel")
