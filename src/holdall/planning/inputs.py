"""Inputs of the planner: lookups of a data set, rates of a machine, the `Problem` they make, and memory limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdall.common.errors import ConfigError
from holdall.common.files import quoted
from holdall.common.memory import available_memory
from holdall.data.dataset import DataSet
from holdall.data.schema import Schema
from holdall.models.model import ModelConfig
from holdall.optim.optimizer_kinds import MEASURED, OptimizerKind
from holdall.planning.config import PlanConfig
from holdall.planning.dense_work import trace_dense_work
from holdall.planning.lookup_counts import LookupCounts, table_lookups
from holdall.planning.machine.hardware import Hardware, default_path, machine_identity
from holdall.planning.plan import TIERS
from holdall.planning.step_cost import Problem
from holdall.planning.table_settings import TableSettings, TableUsage
from holdall.popularity.choose_hot_rows import count_lookups, hot_inputs
from holdall.popularity.profile import Profile
from holdall.popularity.table_counts import stored_counts
from holdall.tables import Method
from holdall.tiers.pipeline import GPU_PREFETCH


def find_hardware(given: Hardware | str | Path | None) -> Hardware:
    """Measured rates: as given, from a file, or this machine's own when None."""
    return given if isinstance(given, Hardware) else Hardware.load(default_path() if given is None else given)


def find_lookups(schema: Schema, data: str | Path, profile: Profile | str | Path | None) -> dict[str, LookupCounts]:
    """Lookups of every table: from a profile of this data set, or counted when None."""
    if profile is None:
        train = DataSet(data, "train")
        return table_lookups(schema, count_lookups(train), len(train))
    if not isinstance(profile, Profile) and not Path(profile).exists():
        raise ConfigError(
            f"{profile} does not exist: make it with `holdall profile {quoted(data)} --out {quoted(profile)}`"
        )
    known = profile if isinstance(profile, Profile) else Profile.load(profile)
    known.check(schema)
    if known.counts_file is not None and known.source.kind == "prepared":
        return table_lookups(schema, known.counts(), known.rows_read)
    found: dict[str, LookupCounts] = {}
    for feature in schema.features:
        found.setdefault(feature.table or feature.name, LookupCounts.from_curve(known, feature.name, feature.num_rows))
    return found


def make_problem(
    schema: Schema,
    lookups: Mapping[str, LookupCounts],
    config: PlanConfig,
    hardware: Hardware,
    folder: Path | None = None,
) -> Problem:
    """The planning problem of a data set, a model and a machine."""
    _refuse_incomplete(hardware)
    model = config.model.model_config()
    tables = model.table_rows(schema)
    features = features_per_table(schema)
    lengths = {}
    for feature in schema.features:
        table = feature.table or feature.name
        known = lookups[table].per_sample / features[table]
        lengths[feature.name] = 1.0 if feature.one_hot else max(known, 1.0)
    return Problem(
        tables=tables,
        lookups={name: lookups[name] for name in tables},
        dim=model.dim,
        batch_size=config.batch_size // config.world_size,
        num_dense=schema.num_dense,
        optimizer=config.optimizer_kind().name,
        work=trace_dense_work(model, schema, config.optimizer_kind().name, lengths),
        hardware=hardware,
        world_size=config.world_size,
        prefetch=prefetch_depth(config, hardware),
        precision=config.precision,
        methods=None if config.budget is None else _budget_methods(config, schema, folder),
        hot_inputs=None if folder is None else lambda hot: _hot_share(folder, hot),
    )


def _budget_methods(config: PlanConfig, schema: Schema, folder: Path | None) -> dict[str, Method]:
    """Methods of all tables within the budget, the same that `holdall train --budget` chooses."""
    if folder is None:
        raise ConfigError("a budget is divided by the counts in a data folder: plan with the folder of the data set")
    model = config.model.model_config()
    usage = table_usage(DataSet(folder, "train"), model, config.optimizer_kind())
    methods = TableSettings(budget=config.budget).methods(model.table_rows(schema), model.dim, usage)
    assert methods is not None
    return methods


def table_usage(data: DataSet, model: ModelConfig, optimizer: OptimizerKind, *, codes_train: bool = True) -> TableUsage:
    """Use of the tables of a model, which a budget is divided by: the counts of the data folder."""
    counts = stored_counts(data)
    return TableUsage(
        counts={name: counts[name] for name in model.table_rows(data.schema)},
        row_state=optimizer.row_state_bytes(model.dim),
        codes_train=codes_train,
    )


def features_per_table(schema: Schema) -> Counter[str]:
    """Number of features that share each table."""
    return Counter(feature.table or feature.name for feature in schema.features)


def prefetch_depth(config: PlanConfig, hardware: Hardware) -> int:
    """Steps ahead that rows are fetched: as configured, or by the device when absent.

    A GPU computes while rows are transferred; on a CPU the same cores would do both.
    """
    if config.prefetch is not None:
        return config.prefetch
    return GPU_PREFETCH if hardware.device == "cuda" and config.world_size == 1 else 0


def _refuse_incomplete(hardware: Hardware) -> None:
    """Raise where rates are missing that every forecast needs."""
    known: dict[str, Any] = {name: getattr(hardware, name) for name in ("tables", "layers", "interactions")}
    for name in ("gather", "scatter"):
        known |= {f"{name}, {tier}": getattr(hardware, name).get(tier) for tier in ("host", "cached", "disk")}
    known |= {f"stack, {way}": hardware.stack.get(way) for way in ("forward", "backward")}
    known |= {f"dense_update, {name}": hardware.dense_update.get(name) for name in MEASURED}
    if hardware.device != "cpu":
        known["steps as CUDA graphs"] = hardware.captured
        known |= {f"copy, {way}": hardware.copy.get(way) for way in ("to_device_pinned", "to_host_pinned")}
    for name, rates in known.items():
        if not rates:
            raise ConfigError(f"the hardware file has no rates for {name}: measure again with `holdall hardware`")


def _hot_share(folder: Path, hot: Mapping[str, int]) -> float:
    """Share of the training samples that look up hot rows only; tables that the model does not use do not count."""
    data = DataSet(folder, "train")
    rows = {feature.table or feature.name: feature.num_rows for feature in data.schema.features}
    return float(hot_inputs(data, {**rows, **hot}).mean())


def find_limits(config: PlanConfig, hardware: Hardware, folder: Path | None) -> dict[str, int]:
    """Bytes that each tier may use: the cap, else what is free on this machine, else no limit.

    Where the rates are those of another machine, its free memory is unknown, and only caps limit.
    """
    caps = config.caps()
    here = hardware.machine.get("id") == machine_identity()["id"]
    free = available_memory(folder or ".", hardware.device) if here else dict.fromkeys(TIERS, 1 << 62)
    limits = {tier: free[tier] if getattr(caps, tier) is None else getattr(caps, tier) for tier in TIERS}
    if hardware.device == "cpu" and here and caps.device is None:
        limits["device"] = free["host"]
    return limits
