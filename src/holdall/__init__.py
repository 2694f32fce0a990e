"""Holdall trains and serves recommendation models whose embedding tables do not fit.

    holdall.prepare(["clicks.tsv.gz"], "data")
    holdall.train("data", "run", holdall.TrainConfig(epochs=1))
    holdall.evaluate("run")

Every command of the command line is a function here with the same name.
"""

from __future__ import annotations

from holdall.bags import EmbeddingBags
from holdall.batch import Batch, Ids
from holdall.data.dataset import DataSet
from holdall.data.encode import encode_rows
from holdall.data.loader import Loader
from holdall.data.prepare import PrepareConfig, prepare
from holdall.errors import HoldallError
from holdall.inspection import inspect
from holdall.models import DLRM, DLRMConfig
from holdall.schema import Feature, Schema
from holdall.tables import METHODS, Dense, Method, Table
from holdall.training.config import TrainConfig
from holdall.training.evaluation import evaluate, load_model
from holdall.training.optimizers import OptimizerConfig, Optimizers
from holdall.training.trainer import train

__version__ = "0.1.0"

__all__ = [
    "DLRM",
    "METHODS",
    "Batch",
    "DLRMConfig",
    "DataSet",
    "Dense",
    "EmbeddingBags",
    "Feature",
    "HoldallError",
    "Ids",
    "Loader",
    "Method",
    "OptimizerConfig",
    "Optimizers",
    "PrepareConfig",
    "Schema",
    "Table",
    "TrainConfig",
    "encode_rows",
    "evaluate",
    "inspect",
    "load_model",
    "prepare",
    "train",
]
