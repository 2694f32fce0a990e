"""Sensitivity of a model to its tables: how much a small change of a looked-up vector moves the logit."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from holdall.common.errors import DataError
from holdall.data.batch import Batch
from holdall.models.model import Model, batch_device

BATCHES = 40
"""Batches that a sensitivity is measured on, at most."""


def sensitivity(model: Model, batches: Iterable[Batch], max_batches: int = BATCHES) -> dict[str, Tensor]:
    """For each table the mean of `g g^T` [dim, dim] over samples and features, in float64 on the host.

    g is the gradient of a sample's logit by the vector that a feature looked up. A small change e of all rows of a
    table moves a logit by `g . e`, so `e^T S e` is the mean square of that.
    """
    names = list(model.bags.features.values())
    sums = {name: torch.zeros(model.bags.dim, model.bags.dim, dtype=torch.float64) for name in names}
    samples = dict.fromkeys(names, 0)
    looked_up: list[tuple[Tensor, list[str]]] = []

    def cut_off(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], vectors: Tensor) -> Tensor:
        """Put a leaf of the graph in the place of the vectors, and keep it."""
        positions = kwargs.get("positions", args[1] if len(args) > 1 else None)
        leaf = vectors.detach().requires_grad_()
        looked_up.append((leaf, names if positions is None else [names[position] for position in positions]))
        return leaf

    device = batch_device(model)
    was_training = model.training
    model.eval()
    handle = model.bags.register_forward_hook(cut_off, with_kwargs=True)
    collected = [pack.collects for pack in model.bags.packs]
    try:
        for pack in model.bags.packs:
            pack.collects = True  # lookups read the storage, as weights of rows on disk have none; nothing is collected
        for batch in islice(batches, max_batches):
            looked_up.clear()
            logits = model(batch.to(device))
            gradients = torch.autograd.grad(logits.sum(), [leaf for leaf, _ in looked_up])
            for gradient_BFD, (_, tables) in zip(gradients, looked_up, strict=True):
                gradient_FBD = gradient_BFD.detach().double().transpose(0, 1)
                products_FDD = (gradient_FBD.transpose(1, 2) @ gradient_FBD).cpu()
                for table, product_DD in zip(tables, products_FDD, strict=True):
                    sums[table] += product_DD
                    samples[table] += gradient_BFD.shape[0]
    finally:
        for pack, collects in zip(model.bags.packs, collected, strict=True):
            pack.collects = collects
        handle.remove()
        model.train(was_training)
    if not any(samples.values()):
        raise DataError("the sensitivity of a model needs at least one batch: there was none")
    return {name: total / max(1, samples[name]) for name, total in sums.items()}
