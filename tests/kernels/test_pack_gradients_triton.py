"""Gradients that Triton kernels collect for packs follow zero_grad, clipping and freezing as plain torch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.kernels.dispatch import INTERPRETED, Path, kernel_path
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import Frobenius, Method

if not INTERPRETED:
    pytest.skip("Triton's interpreter is off: set TRITON_INTERPRET=1", allow_module_level=True)

ROWS = {"a": 20, "b": 7, "c": 30}


def trained(path: Path, methods: dict[str, Method] | None, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    with kernel_path(path):
        bags = EmbeddingBags.build(ROWS, 8, methods, generator=torch.Generator().manual_seed(1))
        optimizers = Optimizers(bags, OptimizerConfig(lr=0.02, **options))
        for step in range(6):
            generator = torch.Generator().manual_seed(step)
            values = torch.stack([torch.randint(rows, (6,), generator=generator) for rows in ROWS.values()])
            ids = Ids(values, None, 3)
            bags(ids).square().sum().backward()
            bags.zero_grad()  # a batch that is skipped
            bags.table("b").requires_grad_(step not in (2, 3))
            (bags(ids) - 1).square().sum().backward()
            if step == 4:
                torch.nn.utils.clip_grad_norm_(bags.parameters(), 0.5)
            if step == 5:
                optimizers.clip(0.3)
            optimizers.step()
        return {name: tensor.clone() for name, tensor in bags.state_dict().items()}


@pytest.mark.parametrize("methods", [None, {"c": Frobenius(2, 2)}], ids=["dense", "with Frobenius"])
@pytest.mark.parametrize(
    "options",
    [{"name": "sgd", "momentum": 0.9, "weight_decay": 0.01}, {"name": "adamw", "weight_decay": 0.1}],
    ids=lambda options: options["name"],
)
def test_steps_equal_those_of_plain_torch(methods: dict[str, Method] | None, options: dict[str, Any]) -> None:
    found, expected = (trained(path, methods, options) for path in ("triton", "torch"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
