"""One NeuMF on MovieLens-1M: a setting, its batches, its training and its ranking (see benchmarks/neumf.py).

Its batches are those of `holdall train --shuffle rows --negatives 4`: four fresh negatives a pair and epoch. They do
not depend on the model, so each epoch is drawn once, kept in a file and moved to the device whole.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from holdall.common.device import pick_device
from holdall.common.errors import ConfigError
from holdall.data.batch import Batch, Ids
from holdall.data.dataset import DataSet
from holdall.data.negatives import NegativeSampling
from holdall.embedding.bags import EmbeddingBags
from holdall.evaluation.evaluate_model import rank_model
from holdall.models import NCF, NCFConfig
from holdall.models.loss import logloss, squared_length
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.optim.schedule import Schedule
from holdall.tables import Dense, Method, MixedDimension
from holdall.tables.budget import find_method, suggest

NEGATIVES = 4
SHARE = 1 / 8
"""Of the dense tables' bytes, for those that are compressed."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to train one model."""

    factors: int = 16
    num_layers: int = 4
    method: str = "dense"
    item_share: float | None = None
    """Share of its own dense bytes that the item table gets, the rest of the budget going to users; None: suggest's."""
    lr: float = 0.005
    """At the first step; it falls linearly to zero at the last."""
    batch_size: int = 8192
    epochs: int = 15
    l2: float = 0.0
    tune_epochs: int = 0
    """0: tables of this method are trained from the start. Else dense ones are, for `epochs`, then stored by this
    method, in its best fit to them, and trained for so many epochs more."""
    tune_lr: float | None = None
    bits: int | None = None
    """Of mixed_dimension: its narrow rows are rounded to so many bits at the end."""

    @property
    def model(self) -> NCFConfig:
        return NCFConfig(factors=self.factors, num_layers=self.num_layers)

    @property
    def all_epochs(self) -> int:
        return self.epochs + self.tune_epochs

    @property
    def dense(self) -> Setting:
        """The dense model that this one starts from."""
        return replace(self, method="dense", item_share=None, tune_epochs=0, tune_lr=None, bits=None)

    def methods(self, rows: dict[str, int]) -> dict[str, Method] | None:
        """How each table is stored; None where the method cannot be that small."""
        if self.method == "dense":
            return dict.fromkeys(rows, Dense())
        dim = self.model.dim
        try:
            if self.item_share is None:
                return suggest(rows, dim, SHARE, self.method)
            bytes_of = {name: 4 * num_rows * dim for name, num_rows in rows.items()}
            item = int(self.item_share * bytes_of["item"])
            share = {"item": item, "user": int(SHARE * sum(bytes_of.values())) - item}
            if self.bits:
                return {name: widest(rows[name], dim, self.bits, share[name]) for name in rows}
            return {name: find_method(self.method).for_bytes(rows[name], dim, share[name]) for name in rows}
        except ConfigError:
            return None


def widest(num_rows: int, dim: int, bits: Any, num_bytes: int) -> MixedDimension:
    """Rounded narrow rows, as wide as fits."""
    methods = [MixedDimension(dim=width, bits=bits) for width in range(1, dim)]
    fits = [method for method in methods if method.num_bytes(num_rows, dim) <= num_bytes]
    if not fits:
        raise ConfigError(f"{num_rows} rows of dim {dim} do not fit into {num_bytes} bytes in {bits} bits")
    return fits[-1]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A setting on a data folder with a seed, scored on one of its splits."""

    setting: Setting
    data: str
    split: str
    seed: int
    device: str
    deadline: float
    """time.time() after which it gives up."""


# --- batches ---------------------------------------------------------------------------------------------------------


def epoch_file(data: Path, seed: int, epoch: int) -> Path:
    return data.parent / f"epochs-{data.name}-{seed}-{epoch}.npy"


def draw_epoch(data: Path, seed: int, epoch: int) -> Path:
    """The file with the ids [2, rows] of an epoch: those of `holdall train` with this seed, whatever its batch size.

    Made by the process that asks first; the others wait for it.
    """
    path = epoch_file(data, seed, epoch)
    try:
        os.close(os.open(path.with_suffix(".drawn"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        while not path.exists():
            time.sleep(0.02)
        return path
    rows = DataSet(data, "train")
    loader = NegativeSampling(rows, len(rows), num_negatives=NEGATIVES, shuffle="rows", seed=seed, prefetch=0)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.save(file, next(loader.epoch(epoch)).ids.values.to(torch.int32).numpy())
    return partial.rename(path)


def batches(job: Job, epoch: int, device: torch.device) -> Iterator[Batch]:
    """An epoch on the device, in batches of whole groups of a pair and its negatives."""
    ids = torch.from_numpy(np.load(draw_epoch(Path(job.data), job.seed, epoch))).to(device)
    size = job.setting.batch_size // (1 + NEGATIVES) * (1 + NEGATIVES)
    label = torch.zeros(size // (1 + NEGATIVES), 1 + NEGATIVES, device=device)
    label[:, 0] = 1
    label = label.reshape(-1)
    for start in range(0, ids.shape[1], size):
        part = ids[:, start : start + size].contiguous()
        yield Batch(label.new_zeros(part.shape[1], 0), Ids(part, None, 2), label[: part.shape[1]])


# --- one model -------------------------------------------------------------------------------------------------------


def run(job: Job) -> dict[str, Any] | None:
    """Train one model; its ranking metrics after the last epoch, or None without a table that small or time left."""
    torch.set_num_threads(1)
    setting, held_out = job.setting, DataSet(job.data, job.split)
    methods = setting.methods(setting.model.table_rows(held_out.schema))
    if methods is None or time.time() > job.deadline:
        return None
    started, device = time.time(), pick_device(job.device)
    torch.manual_seed(job.seed)
    if setting.tune_epochs:
        model = setting.model.build(held_out.schema)
        model.load_state_dict(load_file(state_file(job.data, setting.dense, job.seed)))
        store(model, without_bits(methods), device)
        fitted = rank_model(model, held_out)
        curve = train(model, job, setting.epochs, setting.tune_epochs, setting.tune_lr or setting.lr)
        if setting.bits:
            store(model, methods, device)
        curve = [[0.0, fitted["hr@10"], fitted["ndcg@10"]], *curve]  # of the fit, before any step
    else:
        model = setting.model.build(held_out.schema, methods).to(device)
        curve = train(model, job, 0, setting.epochs, setting.lr)
        state = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
        save_file(state, state_file(job.data, setting, job.seed))
    found = {"curve": curve, "bytes": model.bags.num_bytes(), "seconds": time.time() - started}
    if len(curve) < (1 + setting.tune_epochs if setting.tune_epochs else setting.epochs):
        return found
    metrics = rank_model(model, held_out)
    names = {name: str(method) for name, method in methods.items()}
    return {**{name: metrics[name] for name in ("hr@10", "ndcg@10", "cases", "dropped")}, **found, "tables": names}


def store(model: NCF, methods: dict[str, Method], device: torch.device) -> None:
    """Store the tables of a model by other methods, in their best fit, and have it on the device."""
    tables = {name: method.fit(model.bags.table(name).materialize().cpu()) for name, method in methods.items()}
    model.bags = EmbeddingBags(tables, model.bags.features)
    model.to(device)


def without_bits(methods: dict[str, Method]) -> dict[str, Method]:
    """The same tables before they are rounded, which can be trained."""
    return {
        name: MixedDimension(dim=method.dim) if isinstance(method, MixedDimension) else method
        for name, method in methods.items()
    }


def state_file(data: str, setting: Setting, seed: int) -> Path:
    """Where a model is kept."""
    name = hashlib.sha256(repr(setting).encode()).hexdigest()[:16]
    return Path(data).parent / f"{Path(data).name}-{name}-{seed}.safetensors"


def train(model: NCF, job: Job, first_epoch: int, epochs: int, lr: float) -> list[list[float]]:
    """Train with a rate that falls to zero; loss, and on the validation split HR and NDCG, after each epoch."""
    setting, held_out = job.setting, DataSet(job.data, job.split)
    device = next(model.parameters()).device
    optimizers = Optimizers(model, OptimizerConfig(name="adam", lr=lr))
    steps_an_epoch = -(-len(DataSet(job.data, "train")) // (setting.batch_size // (1 + NEGATIVES)))
    schedule = Schedule(decay_steps=epochs * steps_an_epoch, power=1.0)
    step, curve = 0, []
    for epoch in range(first_epoch, first_epoch + epochs):
        total = torch.zeros((), device=device)
        for batch in batches(job, epoch, device):
            vectors = model.lookup(batch)
            loss = logloss(model.score(batch.dense, vectors), batch.label)
            total += loss.detach()
            if setting.l2:
                loss = loss + setting.l2 * squared_length(vectors) / len(batch)
            loss.backward()
            optimizers.set_factor(schedule.factor(step))
            optimizers.step()
            step += 1
        curve.append([float(total) / steps_an_epoch])
        if job.split == "valid":
            metrics = rank_model(model, held_out)
            curve[-1] += [metrics["hr@10"], metrics["ndcg@10"]]
        if time.time() > job.deadline:
            break
    return curve
