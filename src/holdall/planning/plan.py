"""Plan of a model: the method, hot rows and place of every table, and the file `plan.json` that stores it.

    plan = Plan.load("plan.json")      # refuses an invalid plan, naming the place
    plan.check(schema)                 # refuses a plan of another data set
    plan.strategy, plan.methods(), plan.hot_rows()

`plan.json` (docs/formats.md) stores choices and forecast apart. Choices may be edited by hand; a plan whose choices are
not those of its forecast loads without the forecast (`holdall plan DIR --edited plan.json` makes a new one).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from holdall.common.decode import Count, PositiveInt, decode, shown
from holdall.common.errors import ConfigError, OwnModelError, did_you_mean
from holdall.common.files import read_json, write_json
from holdall.common.settings import read_settings
from holdall.common.sizes import parse_bytes
from holdall.common.summary import Summarised, Summary
from holdall.data.identity import data_fingerprint
from holdall.data.schema import Schema
from holdall.models.model import ModelConfig
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizer_kinds import OPTIMIZER_KINDS
from holdall.planning.model_settings import ModelSettings
from holdall.planning.plan_types import (
    RENAMED_STAGES,
    STAGES,
    TIERS,
    Bytes,
    Caps,
    Forecast,
    PlannedStrategy,
    StoredCaps,
    StoredForecast,
    StoredTable,
    TableForecast,
    TablePlan,
    Tail,
)
from holdall.planning.strategy_kinds import STRATEGY_KINDS, StrategyKind, names_with
from holdall.tables import Dense, HotCold, Method, method_from_json

__all__ = [
    "STAGES",
    "TIERS",
    "Bytes",
    "Caps",
    "Forecast",
    "Plan",
    "PlannedStrategy",
    "TableForecast",
    "TablePlan",
    "Tail",
    "model_of",
]

FORMAT = "holdall-plan"
VERSION = 1
AGAIN = "make it again with `holdall plan`"
MEND = f"mend it, or {AGAIN}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Summarised):
    """Places of all tables of one model, for one data set."""

    data: str
    """Name of the data folder, for messages."""
    fingerprint: str
    """Fingerprint of the data set (`holdall.data.identity.data_fingerprint`)."""
    model: dict[str, Any]
    """Settings of `TrainConfig` that describe the model: model, dim, bottom, top, interaction, ..."""
    dim: PositiveInt
    batch_size: PositiveInt
    """Samples a step, over all processes."""
    optimizer: str
    precision: Literal["float32", "bf16"] = "float32"
    strategy: PlannedStrategy = "plain"
    """Training strategy: `plain`, all on the device; `host`, tables looked up on the host; `split`, hot rows on the
    device and the others fetched; `hot-batches`, as split, in batches that need no others; `two-fold`, several
    processes."""
    prefetch: Count = 0
    """Steps ahead that host and disk rows are fetched."""
    world_size: PositiveInt = 1
    device: Literal["cpu", "cuda"] = "cpu"
    caps: Caps = Caps()  # noqa: RUF009 (it is frozen)
    preset: str = "auto"
    tables: tuple[TablePlan, ...]
    notes: tuple[str, ...] = ()
    """Notes of the planner for the user, such as tables that are not exact."""
    forecast: Forecast | None = None

    def _summary(self) -> Summary:
        title = (
            f"Plan of {self.data!r}: strategy {self.strategy}, {len(self.tables)} tables of {self.dim} numbers a row"
        )
        if self.forecast is not None:
            title += f", {self.forecast.step_seconds * 1e3:.3g} ms a step of {self.batch_size:,} samples"
        tables = sorted(self.tables, key=lambda table: -table.num_rows)
        rows = [(table.name, table.num_rows, table.hot_rows, table.tail, table.method.name) for table in tables]
        return Summary(title, ("table", "rows", "hot rows", "tail", "method"), rows)

    # --- for training ------------------------------------------------------------------------------------------------

    @property
    def kind(self) -> StrategyKind:
        """Capabilities of the strategy."""
        return STRATEGY_KINDS[self.strategy]

    def table(self, name: str) -> TablePlan:
        for table in self.tables:
            if table.name == name:
                return table
        raise ConfigError(f"the plan has no table '{name}'{did_you_mean(name, [t.name for t in self.tables])}")

    def methods(self) -> dict[str, Method]:
        """Method of each table by name, the argument of `ModelConfig.build`."""
        return {table.name: table.method for table in self.tables}

    def hot_rows(self) -> dict[str, int]:
        """Hot rows of each dense table by name, the argument of `tiers.place`."""
        return {
            table.name: table.num_rows if table.tail == "device" else table.hot_rows
            for table in self.tables
            if isinstance(table.method, Dense)
        }

    def tails(self) -> dict[str, Tail]:
        return {table.name: table.tail for table in self.tables}

    def train_settings(self) -> dict[str, Any]:
        """Settings of `TrainConfig` that this plan was made for."""
        return {
            **self.model,
            "batch_size": self.batch_size,
            "optimizer": OptimizerConfig.of_record(self.optimizer).name,
            "precision": self.precision,
        }

    def check(self, schema: Schema) -> None:
        """Raise unless this plan is for the data set of `schema`: its tables, their rows, its files."""
        rows = model_of(self.model, "the plan").table_rows(schema)
        planned = {table.name: table.num_rows for table in self.tables}
        unknown, missing = [n for n in planned if n not in rows], [n for n in rows if n not in planned]
        if unknown:
            raise ConfigError(
                f"the plan places table '{unknown[0]}', which the data set does not have"
                f"{did_you_mean(unknown[0], missing or rows)}: {AGAIN}"
            )
        if missing:
            raise ConfigError(f"the plan does not place table '{missing[0]}' of the data set: {AGAIN}")
        for name, count in rows.items():
            if planned[name] != count:
                raise ConfigError(
                    f"the plan is for a table '{name}' of {planned[name]:,} rows, the data set's has {count:,}: {AGAIN}"
                )
        if data_fingerprint(schema) != self.fingerprint:
            raise ConfigError(
                f"the plan was made for another data set ({self.data}) whose tables have the same names and rows: its "
                f"popularity may differ, so {AGAIN}"
            )

    # --- files -------------------------------------------------------------------------------------------------------

    def choices_hash(self) -> str:
        """SHA-256 over the choices, without what was predicted."""
        choices = {name: value for name, value in self._document().items() if name not in ("notes", "preset", "data")}
        return hashlib.sha256(json.dumps(choices, sort_keys=True).encode()).hexdigest()

    def _document(self) -> dict[str, Any]:
        document = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("tables", "forecast", "caps")
        }
        document["notes"] = list(self.notes)
        document["caps"] = asdict(self.caps)
        document["tables"] = {
            table.name: {
                "rows": table.num_rows,
                "method": table.method.to_json(),
                "hot_rows": table.hot_rows,
                "tail": table.tail,
            }
            for table in self.tables
        }
        return document

    def to_json(self) -> dict[str, Any]:
        document = {"format": FORMAT, "version": VERSION, **self._document()}
        if self.forecast is not None:
            document["forecast"] = {
                "of": self.choices_hash(),
                **asdict(self.forecast),
                "tables": {t.name: asdict(t.forecast) for t in self.tables if t.forecast is not None},
            }
        return document

    def save(self, path: str | Path) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read and validate a plan; errors name the file, the key and the fix."""
        if not Path(path).exists():
            raise ConfigError(f"{path} does not exist: make it with `holdall plan DATA --out {path}`")
        document = read_json(Path(path), dict[str, Any], format=FORMAT, version=VERSION, error=ConfigError, cure=MEND)
        return cls.from_json(document, where=str(path))

    @classmethod
    def from_json(cls, document: Mapping[str, Any], where: str = "the plan") -> Plan:
        parts = decode(document, _Parts, where, cure=MEND)
        tables = tuple(_table(name, entry, f"{where}, table '{name}'") for name, entry in parts["tables"].items())
        caps = _caps(parts.get("caps", StoredCaps()), where)
        given = {name: value for name, value in document.items() if name not in ("format", "version", "forecast")}
        plan = decode({**given, "tables": tables, "caps": caps}, cls, where, cure=MEND)
        if plan.optimizer not in OPTIMIZER_KINDS:
            hint = did_you_mean(plan.optimizer, OPTIMIZER_KINDS)
            raise ConfigError(f"{where}: 'optimizer' is {shown(plan.optimizer)}{hint}: {MEND}")
        _check_strategy(plan, where)
        return _with_forecast(plan, parts.get("forecast"), where)


class _Parts(TypedDict):
    """Parts of `plan.json` that differ from the fields of `Plan`."""

    tables: dict[str, StoredTable]
    caps: NotRequired[StoredCaps]
    forecast: NotRequired[dict[str, Any] | None]


def model_of(settings: Mapping[str, Any], where: str) -> ModelConfig:
    """The model that the settings of a plan describe."""
    given = read_settings(ModelSettings, settings, f"{where}, model")
    try:
        return ModelSettings(**given).model_config()
    except OwnModelError:
        raise
    except ConfigError as error:
        raise ConfigError(f"{where}, model: {error}") from None


def _caps(given: StoredCaps, where: str) -> Caps:
    found = {}
    for tier, size in asdict(given).items():
        try:
            found[tier] = None if size is None else parse_bytes(size)
        except ConfigError as error:
            raise ConfigError(f"{where}, caps: '{tier}': {error}") from None
    return Caps(**found)


def _table(name: str, entry: StoredTable, place: str) -> TablePlan:
    if entry.hot_rows > entry.rows:
        raise ConfigError(f"{place}: {entry.hot_rows:,} hot rows, but it has {entry.rows:,} rows: lower hot_rows")
    try:
        method = method_from_json(entry.method)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    table = TablePlan(name=name, num_rows=entry.rows, method=method, hot_rows=entry.hot_rows, tail=entry.tail)
    _check_method(table, place)
    return table


def _check_method(table: TablePlan, place: str) -> None:
    """Refuse a method, hot rows and tail that contradict each other."""
    dense = isinstance(table.method, Dense)
    if dense and table.tail == "compressed":
        raise ConfigError(f"{place}: its tail is compressed, but its method is dense: name a compressed method")
    if not dense and table.tail != "compressed":
        raise ConfigError(
            f"{place}: its method is {table.method.name}, which is stored whole on the device: set tail to "
            f"'compressed', or method to dense"
        )
    if not dense:
        exact = table.method.split(table.num_rows)[0] if isinstance(table.method, HotCold) else 0
        if exact != table.hot_rows:
            raise ConfigError(
                f"{place}: hot_rows is {table.hot_rows:,}, but its method keeps {exact:,} rows exact: make them equal"
            )


def _check_strategy(plan: Plan, where: str) -> None:
    """Refuse a strategy that cannot place these tables."""
    if not plan.tables:
        raise ConfigError(f"{where}: it places no table: {AGAIN}")
    dim = model_of(plan.model, where).dim
    if plan.dim != dim:
        raise ConfigError(f"{where}: 'dim' is {plan.dim}, but its model's is {dim}: change model.dim, and plan again")
    tails = {table.tail for table in plan.tables}
    name = next((table.name for table in plan.tables if table.tiered), "")
    kind = plan.kind
    if name and not (kind.has_hot_rows or kind.looks_up_on_host):
        raise ConfigError(
            f"{where}: strategy '{plan.strategy}' keeps every table on the device, but the tail of '{name}' is on "
            f"{plan.table(name).tail}: use strategy 'split'"
        )
    if kind.looks_up_on_host:
        wrong = [t.name for t in plan.tables if t.tail != "compressed" and (t.tail != "host" or t.hot_rows)]
        if wrong:
            raise ConfigError(
                f"{where}: strategy '{plan.strategy}' looks every table up on the host, so table '{wrong[0]}' must "
                f"have tail 'host' and no hot rows: or use strategy 'split'"
            )
    if "sharded" in tails and not kind.shards_rows:
        needed = names_with("shards_rows")
        raise ConfigError(f"{where}: sharded tails need strategy '{needed}', not '{plan.strategy}'")
    if kind.shards_rows and plan.world_size < 2:
        raise ConfigError(f"{where}: strategy '{plan.strategy}' needs a world_size of 2 or more")


def _with_forecast(plan: Plan, given: Mapping[str, Any] | None, where: str) -> Plan:
    """The plan with its forecast, or without it when its choices have been edited since."""
    if given is None or given.get("of") != plan.choices_hash():
        return plan
    if isinstance(seconds := given.get("seconds"), Mapping):
        given = {**given, "seconds": {RENAMED_STAGES.get(stage, stage): value for stage, value in seconds.items()}}
    found = decode(given, StoredForecast, where, inside="forecast", cure=AGAIN)
    tables = tuple(replace(table, forecast=found.tables.get(table.name)) for table in plan.tables)
    forecast = Forecast(**{field.name: getattr(found, field.name) for field in fields(Forecast)})
    return replace(plan, tables=tables, forecast=forecast)
