"""`--l2`: its part of the loss, for every model, and its effect on rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdall.common.errors import ConfigError
from holdall.models.loss import logloss, squared_length
from holdall.training.config import TrainConfig
from holdall.training.train import train
from holdall.training.trainer import Trainer

SMALL = TrainConfig.of(dim=4, bottom=(4,), top=(4,), batch_size=64, epochs=2, optimizer="adam", lr=0.02, device="cpu")


def test_the_loss_has_the_squared_lengths_of_a_sample(data: Path, tmp_path: Path) -> None:
    trainer = Trainer(data, tmp_path / "run", SMALL.replace(l2=0.5), quiet=True)
    batch = next(trainer.loader.epoch(0))
    vectors_BFD = trainer.model.lookup(batch)
    expected = logloss(trainer.model(batch), batch.label) + 0.5 * (vectors_BFD**2).sum(dim=(1, 2)).mean()
    assert float(trainer.steps.loss(batch, batch).detach()) == pytest.approx(float(expected.detach()), rel=1e-6)


def test_every_part_of_what_was_looked_up_counts_but_masks_do_not() -> None:
    parts = (torch.tensor([[1.0, 2.0]]), torch.tensor([3.0], dtype=torch.bfloat16), torch.tensor([True]))
    assert float(squared_length(parts)) == 14.0


def test_rows_stay_shorter(data: Path, tmp_path: Path) -> None:
    lengths = []
    for l2 in (0.0, 1.0):
        trainer = Trainer(data, tmp_path / str(l2), SMALL.replace(l2=l2), quiet=True)
        trainer.run()
        lengths.append(float(trainer.model.bags.table("C1").materialize().norm()))
    assert lengths[1] < 0.5 * lengths[0]


def test_a_negative_weight_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--l2 must be 0 or more, not -0.1"):
        train(data, tmp_path / "run", SMALL.replace(l2=-0.1))
