"""One training run of the accuracy benchmark: which model, trained how, stopped when, and what it scored.

Every side of a comparison goes through `run`: the same batches in the same order for a seed, the same evaluations on
the validation split, the same rule to stop, and the state with the best validation logloss is the one that counts. Runs
that tune do not open the test split.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.rivals import RIVALS, build_rival, rival_optimizer
from holdall.data.batch import Batch
from holdall.data.dataset import DataSet
from holdall.data.negatives import training_loader
from holdall.embedding.compress import compress
from holdall.evaluation.evaluate_model import evaluate_model
from holdall.models import DCNConfig, DLRMConfig, Model, ModelConfig, TBSMConfig
from holdall.models.model import batch_device
from holdall.optim.config import OptimizerConfig, OptimizerName
from holdall.optim.optimizers import Optimizers
from holdall.tables import HotCold, Method, TensorTrain
from holdall.tables.budget import suggest

MODEL = DLRMConfig(dim=16, bottom=(64,), top=(64, 32))
OPTIMIZER: OptimizerName = "rowwise_adagrad"
HIDDEN, CROSS_LAYERS = (256, 128), 2
"""Sizes of our DCN-v2 and of the libraries' models."""
DCN_V2 = DCNConfig(dim=MODEL.dim, cross_layers=CROSS_LAYERS, top=HIDDEN, structure="parallel")
FIT = " fit"
"""End of the name of a side whose tables are fitted to those of the trained dense model, then trained on."""


@dataclass(frozen=True)
class Rules:
    """How a data set is trained on, the same for all sides."""

    model: ModelConfig
    batch_size: int
    epochs: int
    """Most passes over the training split."""
    evaluations: int = 4
    """Evaluations on the validation split a pass."""
    patience: int = 2
    """Evaluations without a better validation logloss after which a run stops."""
    negatives: int = 1
    """Items drawn for each event, where the data set has none of its own."""


RULES = {
    "planted": Rules(MODEL, batch_size=1024, epochs=2),
    "criteo": Rules(MODEL, batch_size=1024, epochs=2),
    "avazu": Rules(MODEL, batch_size=256, epochs=4, patience=4),
    "bookcrossing": Rules(MODEL, batch_size=2048, epochs=2, evaluations=2, patience=1),
    # rmc1 with the last 5 events of a history instead of 20: users have 8 events here on average
    "taobao": Rules(TBSMConfig(dim=16, bottom=(), event=(15, 15), top=(60,), length=5), batch_size=2048, epochs=1),
}


@dataclass(frozen=True)
class Job:
    """One model to train."""

    set: str
    side: str
    """`dlrm`, `dcn` or `tbsm` for dense tables, a table method, or a library's model. With FIT at its end, a method is
    fitted to the trained dense tables, and a dense model trained on as those are: what training on gains by itself."""
    budget: str
    """Share of the dense bytes; "1" for dense tables."""
    setting: tuple[float, float]
    """Ours: learning rates of the network and of the tables. Libraries: learning rate and weight decay."""
    seed: int
    stage: Literal["tune", "final"]


class HotTrain(HotCold):
    """Sizes a `HotCold` whose cold part is a tensor train: the popular rows exact, as in the cache of TT-Rec."""

    @classmethod
    def for_bytes(cls, num_rows: int, dim: int, num_bytes: int, *_: Any) -> HotCold:  # type: ignore[override]
        return HotCold.for_bytes(num_rows, dim, num_bytes, cold=TensorTrain)


KINDS: dict[str, type[Method] | str] = {"hot_tensor_train": HotTrain}
"""Sides that `suggest` does not know by their name."""


def run(job: Job, data: Path, dense_setting: tuple[float, float] | None = None) -> dict[str, Any]:
    """Train one model on the prepared folder `data`; a FIT side starts from the dense model of `dense_setting`."""
    torch.set_num_threads(1)
    start = time.process_time()
    found = _run_rival(job, data) if job.side in RIVALS else _run_ours(job, data, dense_setting)
    return {**found, "cpu_seconds": round(time.process_time() - start, 1)}


def _run_rival(job: Job, data: Path) -> dict[str, Any]:
    lr, decay = job.setting
    schema = DataSet(data).schema
    sizes: dict[str, Any] = {"dim": MODEL.dim, "hidden": HIDDEN, "cross_layers": CROSS_LAYERS}
    rival = build_rival(job.side, schema, decay=decay, seed=job.seed, **sizes)
    optimizer = rival_optimizer(rival, lr, decay)

    def step_rival(batch: Batch) -> None:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(rival(batch), batch.label.double())
        (loss + rival.penalty()).backward()
        optimizer.step()

    return train(rival, step_rival, job, data)


def _run_ours(job: Job, data: Path, dense_setting: tuple[float, float] | None) -> dict[str, Any]:
    if job.side.endswith(FIT):
        assert dense_setting is not None
        model = copy.deepcopy(fitted(job.set, job.side.removesuffix(FIT), job.budget, data, dense_setting, job.seed))
    else:
        model = build(job, data, DCN_V2 if job.side == "dcn" else RULES[job.set].model)
    return {**train(model, stepper(model, job.setting), job, data), "bytes": model.bags.num_bytes()}


def build(job: Job, data: Path, config: ModelConfig) -> Model:
    """The model of a job with freshly initialised tables."""
    schema = DataSet(data).schema
    methods = None
    if job.budget != "1":
        methods = suggest(config.table_rows(schema), config.dim, job.budget, KINDS.get(job.side, job.side))
    return config.build(schema, methods, generator=torch.Generator().manual_seed(job.seed))


def stepper(model: Model, setting: tuple[float, float]) -> Callable[[Batch], None]:
    """What a step does to a model of ours."""
    lr, table_lr = setting
    optimizers = Optimizers(model, OptimizerConfig(name=OPTIMIZER, lr=lr, table_lr=table_lr))

    def step(batch: Batch) -> None:
        F.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
        optimizers.step()

    return step


@lru_cache(maxsize=1)
def trained_dense(name: str, data: Path, setting: tuple[float, float], seed: int) -> Model:
    """The dense model of a set after training; the last one is kept, for all methods that are fitted to it."""
    job = Job(name, RULES[name].model.family, "1", setting, seed, "tune")
    model = build(job, data, RULES[name].model)
    train(model, stepper(model, setting), job, data)
    return model


@lru_cache(maxsize=1)
def fitted(name: str, method: str, budget: str, data: Path, setting: tuple[float, float], seed: int) -> Model:
    """The trained dense model with its tables stored by a method, as near to the trained rows as that can come."""
    trained = trained_dense(name, data, setting, seed)
    model = build(Job(name, trained.config.family, "1", setting, seed, "tune"), data, RULES[name].model)
    model.load_state_dict(trained.state_dict())
    if budget != "1":
        compress(model, budget, method, fit=True)
    return model


def train(model: nn.Module, step: Callable[[Batch], None], job: Job, data: Path) -> dict[str, Any]:
    """Train until the validation logloss has stopped falling; the model is left as it was at its lowest.

    The untrained model is evaluated too: it counts where a table was fitted and training on makes it worse.
    """
    rules = RULES[job.set]
    valid = DataSet(data, "valid")
    options: dict[str, Any] = {"num_negatives": rules.negatives, "shuffle": "rows", "seed": job.seed}
    loader = training_loader(DataSet(data, "train"), rules.batch_size, **options)
    every = math.ceil(loader.num_batches / rules.evaluations)
    scores = evaluate_model(model, valid)
    best = {"valid_logloss": scores["logloss"], "valid_auc": scores["auc"], "steps": 0}
    best_state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    num_steps, without_gain, device = 0, 0, batch_device(model)
    for epoch in range(rules.epochs):
        for number, batch in enumerate(loader.epoch(epoch), start=1):
            step(batch.to(device))
            num_steps += 1
            if number % every and number != loader.num_batches:
                continue
            scores = evaluate_model(model, valid)
            without_gain += 1
            if scores["logloss"] < best["valid_logloss"]:
                best = {"valid_logloss": scores["logloss"], "valid_auc": scores["auc"], "steps": num_steps}
                best_state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                without_gain = 0
            if without_gain == rules.patience:
                break
        if without_gain == rules.patience:
            break
    model.load_state_dict(best_state)
    found = {**best, "epochs": round(best["steps"] / loader.num_batches, 2)}
    if job.stage == "final":
        test = evaluate_model(model, DataSet(data, "test"))
        found |= {name: test[name] for name in ("auc", "logloss", "accuracy")}
    return found
