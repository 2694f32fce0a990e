"""Holdall trains and serves recommendation models whose embedding tables do not fit.

    holdall.prepare(["clicks.tsv.gz"], "data")
    holdall.train("data", "run", holdall.TrainConfig(epochs=1))
    holdall.evaluate("run")

Every command of the command line is a function here with the same name.
"""

from __future__ import annotations

from holdall.commands.demo import demo
from holdall.commands.doctor import doctor
from holdall.commands.inspect import inspect
from holdall.commands.simulate import simulate
from holdall.common.errors import HoldallError
from holdall.data.batch import Batch, Ids
from holdall.data.dataset import DataSet
from holdall.data.encode import encode_rows
from holdall.data.loader import Loader
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Feature, Schema
from holdall.embedding.bags import EmbeddingBags
from holdall.embedding.compress import compress
from holdall.evaluation.evaluate_model import evaluate_model
from holdall.evaluation.grouped import GroupedAUC, grouped_metrics
from holdall.evaluation.ranking import RankingMetrics, ranking_metrics
from holdall.models import DLRM, DLRMConfig
from holdall.models.loss import logloss
from holdall.optim.optimizers import OptimizerConfig, Optimizers
from holdall.planning.config import PlanConfig
from holdall.planning.machine.hardware import Hardware
from holdall.planning.machine.measure import measure_hardware as hardware
from holdall.planning.plan import Plan
from holdall.planning.planner import plan
from holdall.popularity.measure import ProfileConfig, profile
from holdall.popularity.order import OrderConfig, order
from holdall.popularity.profile import Profile
from holdall.tables import (
    METHODS,
    Clustered,
    Dense,
    Frobenius,
    Hashed,
    HotCold,
    MemCom,
    Method,
    MixedDimension,
    Quantized,
    QuotientRemainder,
    Robe,
    Sketch,
    Table,
    TensorRing,
    TensorTrain,
)
from holdall.tables.budget import suggest
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import evaluate, evaluate_ranking, load_model
from holdall.training.trainer import train

__version__ = "0.1.0"

__all__ = [
    "DLRM",
    "METHODS",
    "Batch",
    "Clustered",
    "DLRMConfig",
    "DataSet",
    "Dense",
    "EmbeddingBags",
    "Feature",
    "Frobenius",
    "GroupedAUC",
    "Hardware",
    "Hashed",
    "HoldallError",
    "HotCold",
    "Ids",
    "Loader",
    "MemCom",
    "Method",
    "MixedDimension",
    "OptimizerConfig",
    "Optimizers",
    "OrderConfig",
    "Plan",
    "PlanConfig",
    "PrepareConfig",
    "Profile",
    "ProfileConfig",
    "Quantized",
    "QuotientRemainder",
    "RankingMetrics",
    "Robe",
    "Schema",
    "Sketch",
    "Table",
    "TensorRing",
    "TensorTrain",
    "TrainConfig",
    "compress",
    "demo",
    "doctor",
    "encode_rows",
    "evaluate",
    "evaluate_model",
    "evaluate_ranking",
    "grouped_metrics",
    "hardware",
    "inspect",
    "load_model",
    "logloss",
    "order",
    "plan",
    "prepare",
    "profile",
    "ranking_metrics",
    "simulate",
    "suggest",
    "train",
]
