"""Check of a model of one's own before a run starts: it scores, learns and is built where it is told to be."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import holdall
from holdall.common.errors import ConfigError, HoldallError
from holdall.data.batch import Batch, Ids
from holdall.data.schema import Schema
from holdall.models import Model, ModelConfig
from holdall.models.loss import logloss
from holdall.models.no_initial_values import NoInitialValues
from holdall.models.own import is_built_in

NUM_SAMPLES = 3


def check_own_model(config: ModelConfig, schema: Schema) -> None:
    """Raise, naming what is wrong, unless a model that is not Holdall's can be trained on a data set and saved.

    Three samples pass through the model with small tables on the CPU. The random state stays as it is.
    """
    if is_built_in(type(config)):
        return
    small = replace(schema, features=tuple(replace(f, num_rows=2, unseen=1) for f in schema.features))
    batch = _samples(small)
    with torch.random.fork_rng(devices=[]), _named_errors(config.family):
        model = config.build(small)
        if not isinstance(model, Model) or getattr(model, "bags", None) is None:
            raise ConfigError(
                f"{config.family}: with_tables gives {type(model).__name__}, not a module derived from holdall.Model "
                f"that keeps the tables as self.bags"
            )
        _check_logits(config.family, model(batch))
        loss = logloss(model.score(batch.dense, model.lookup(batch)), batch.label)
        loss.backward()
        with NoInitialValues():
            _check_place(config.family, config.build(small, device="meta"))


def _samples(schema: Schema) -> Batch:
    """Samples with id 0 once in every feature."""
    num_features = len(schema.features)
    if schema.one_hot:
        ids = Ids(torch.zeros(num_features, NUM_SAMPLES, dtype=torch.int32), None, num_features)
    else:
        lookups = num_features * NUM_SAMPLES
        ids = Ids(torch.zeros(lookups, dtype=torch.int32), torch.arange(lookups + 1), num_features)
    return Batch(torch.zeros(NUM_SAMPLES, schema.num_dense), ids, torch.tensor([0.0, 1.0, 0.0]))


def _check_logits(name: str, logits: object) -> None:
    if not isinstance(logits, Tensor):
        raise ConfigError(f"{name}: score gives {type(logits).__name__}, not a tensor of one logit a sample")
    if logits.shape != (NUM_SAMPLES,):
        cure = "end it with .squeeze(1)" if logits.shape == (NUM_SAMPLES, 1) else "one logit a sample"
        raise ConfigError(
            f"{name}: score gives a tensor of shape {list(logits.shape)} for {NUM_SAMPLES} samples, not "
            f"[{NUM_SAMPLES}]: {cure}"
        )
    if not logits.requires_grad:
        raise ConfigError(f"{name}: score gives logits without a gradient, so nothing would be trained")


def _check_place(name: str, model: Model) -> None:
    for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta and not tensor_name.startswith("bags."):
            raise ConfigError(
                f"{name}: '{tensor_name}' is on {tensor.device} whatever device with_tables is given: make it with "
                f"device=device"
            )


@contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Context whose errors name the model and the line of its code."""
    try:
        yield
    except HoldallError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        inside = (Path(holdall.__file__).parent, Path(torch.__file__).parent)
        own = [f for f in frames if not any(Path(f.filename).is_relative_to(folder) for folder in inside)]
        place = f" in {Path(own[-1].filename).name}, line {own[-1].lineno}" if own else ""
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{name} fails on {NUM_SAMPLES} samples of this data set{place}: {type(error).__name__}: {reason}"
        ) from error
