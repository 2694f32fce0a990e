"""What a plan is made from: its settings, the lookups of a data set, the rates of a machine, and what may be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdall.common.errors import ConfigError
from holdall.common.memory import available_memory
from holdall.common.sizes import parse_budget, parse_bytes
from holdall.data.dataset import DataSet
from holdall.data.schema import Schema
from holdall.models.settings import ModelSettings
from holdall.optim.optimizers import OptimizerConfig, OptimizerName
from holdall.planning.lookup_counts import Lookups, lookups_of
from holdall.planning.machine.hardware import Hardware, default_path, machine_identity
from holdall.planning.plan import TIERS, Caps, Plan
from holdall.planning.presets import find_preset
from holdall.planning.step_cost import Problem
from holdall.planning.workload import rehearse
from holdall.popularity.hot_rows import count_lookups, hot_inputs
from holdall.popularity.profile import Profile
from holdall.tiers.pipeline import GPU_PREFETCH


@dataclass(frozen=True, kw_only=True)
class PlanConfig(ModelSettings):
    """What a plan is made for."""

    device_memory: str | None = None
    """Most memory to use on the device, such as 4GB; what is free there when absent."""
    host_memory: str | None = None
    """Most memory to use on the host, such as 16GB; what is free there when absent."""
    disk_memory: str | None = None
    """Most space to use on the disk of the data, such as 1TB; what is free there when absent."""
    world_size: int = 1
    """Processes that train together; memory is that of each."""
    batch_size: int = 2048
    """Samples a step, over all processes."""
    optimizer: OptimizerName = "rowwise_adagrad"
    """Optimizer, whose state lives with the rows."""
    precision: Literal["float32", "bf16"] = "float32"
    """Arithmetic of the MLPs."""
    prefetch: int | None = None
    """Steps ahead that far rows are fetched; when absent, 2 on one GPU, and else 0."""
    preset: str = "auto"
    """auto, or a published system: device, dlrm, tt-rec, el-rec, fpd, fae, p2res."""
    allow_compression: str | None = None
    """Let tails be compressed down to this share of their bytes, such as 1/20, where that is faster; exact when absent,
    unless nothing else fits."""

    def __post_init__(self) -> None:
        self.model_config()  # refuses what does not go together
        OptimizerConfig(name=self.optimizer)
        for name, least in {"world_size": 1, "batch_size": 1, "prefetch": 0}.items():
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(self, name)}")
        if self.batch_size % self.world_size:
            raise ConfigError(
                f"a batch of {self.batch_size} samples does not divide among {self.world_size} processes: make "
                f"--batch-size a multiple of --world-size"
            )
        if self.preset != "auto":
            find_preset(self.preset)
        self.compression_share()
        self.caps()

    def compression_share(self) -> float | None:
        """The part of its bytes that a table may be compressed to; None where nothing was said."""
        text = self.allow_compression
        if text is None:
            return None
        whole = 1 << 40
        try:
            share = parse_budget(text if "/" in text or "%" in text else float(text), whole) / whole
        except (ConfigError, ValueError):
            share = 0.0
        if not 0 < share <= 1:
            raise ConfigError(f"--allow-compression takes a share of a table's bytes, such as 1/20 or 5%, not {text!r}")
        return share

    def caps(self) -> Caps:
        found = {}
        for tier in TIERS:
            text = getattr(self, f"{tier}_memory")
            try:
                found[tier] = None if text is None else parse_bytes(text)
            except ConfigError as error:
                raise ConfigError(f"--{tier}-memory: {error}") from None
        return Caps(**found)


def config_of(made: Plan) -> PlanConfig:
    """The settings that a plan was made with."""
    settings: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in made.model.items()}
    for tier in TIERS:
        size = getattr(made.caps, tier)
        settings[f"{tier}_memory"] = None if size is None else str(size)
    for name in ("world_size", "batch_size", "optimizer", "precision", "prefetch"):
        settings[name] = getattr(made, name)
    return PlanConfig(**settings)


def find_hardware(given: Hardware | str | Path | None) -> Hardware:
    """Measured rates: given, of a file, or this machine's own."""
    return given if isinstance(given, Hardware) else Hardware.load(default_path() if given is None else given)


def find_lookups(schema: Schema, data: str | Path, profile: Profile | str | Path | None) -> dict[str, Lookups]:
    """Lookups of every table: from a profile of this data set, or counted."""
    if profile is None:
        train = DataSet(data, "train")
        return lookups_of(schema, count_lookups(train), len(train))
    if not isinstance(profile, Profile) and not Path(profile).exists():
        raise ConfigError(f"{profile} does not exist: make it with `holdall profile {data} --out {profile}`")
    known = profile if isinstance(profile, Profile) else Profile.load(profile)
    known.check(schema)
    if known.counts_file is not None and known.source.kind == "prepared":
        return lookups_of(schema, known.counts(), known.rows_read)
    found: dict[str, Lookups] = {}
    for feature in schema.features:
        found.setdefault(feature.table or feature.name, Lookups.from_curve(known, feature.name, feature.num_rows))
    return found


def make_problem(
    schema: Schema, lookups: Mapping[str, Lookups], config: PlanConfig, hardware: Hardware, folder: Path | None = None
) -> Problem:
    """Everything a forecast needs."""
    _refuse_incomplete(hardware)
    model = config.model_config()
    tables = model.table_rows(schema)
    features: dict[str, int] = {}
    for feature in schema.features:
        table = feature.table or feature.name
        features[table] = features.get(table, 0) + 1
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
        optimizer=config.optimizer,
        work=rehearse(model, schema, config.optimizer, lengths),
        hardware=hardware,
        world_size=config.world_size,
        prefetch=prefetch_depth(config, hardware),
        precision=config.precision,
        hot_inputs=None if folder is None else lambda hot: _hot_share(folder, hot),
    )


def prefetch_depth(config: PlanConfig, hardware: Hardware) -> int:
    """How many steps ahead far rows are fetched: as was said, or as pays on such a machine.

    A GPU computes while rows move; the cores of a CPU would do both.
    """
    if config.prefetch is not None:
        return config.prefetch
    return GPU_PREFETCH if hardware.device == "cuda" and config.world_size == 1 else 0


def _refuse_incomplete(hardware: Hardware) -> None:
    """Raise where rates are missing that every forecast needs."""
    known: dict[str, Any] = {name: getattr(hardware, name) for name in ("tables", "layers", "interactions")}
    for name in ("gather", "scatter"):
        known |= {f"{name}, {tier}": getattr(hardware, name).get(tier) for tier in ("host", "cached", "disk")}
    if hardware.device != "cpu":
        known["steps that are graphs"] = hardware.captured
    for name, rates in known.items():
        if not rates:
            raise ConfigError(f"the hardware file has no rates for {name}: measure again with `holdall hardware`")


def _hot_share(folder: Path, hot: Mapping[str, int]) -> float:
    """Share of the training samples that need hot rows alone; tables that the model does not read need none."""
    data = DataSet(folder, "train")
    rows = {feature.table or feature.name: feature.num_rows for feature in data.schema.features}
    return float(hot_inputs(data, {**rows, **hot}).mean())


def find_limits(config: PlanConfig, hardware: Hardware, folder: Path | None) -> dict[str, int]:
    """Bytes that each tier may take: what was given, else what this machine has free, else no limit.

    Where the rates are those of another machine, nothing is known of its memory but what was given.
    """
    caps = config.caps()
    here = hardware.machine.get("id") == machine_identity()["id"]
    free = available_memory(folder or ".", hardware.device) if here else dict.fromkeys(TIERS, 1 << 62)
    limits = {tier: free[tier] if getattr(caps, tier) is None else getattr(caps, tier) for tier in TIERS}
    if hardware.device == "cpu" and here and caps.device is None:
        limits["device"] = free["host"]
    return limits
