"""Measured rates of a machine, and the file `hardware.json` (docs/formats.md) that stores them.

    hardware = Hardware.load("hardware.json")
    hardware.check_machine()                     # warns when it was measured on another machine

`machine.measure` measures them; `planning.step_cost` predicts the time of a step from them.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median_low
from typing import Any, Literal

import torch

from holdall.common import environment
from holdall.common.decode import NonNegativeFloat, PositiveInt, decode, shown
from holdall.common.errors import ConfigError, did_you_mean
from holdall.common.files import cache_folder, read_json, write_json
from holdall.tables import method_from_json

FORMAT = "holdall-hardware"
VERSION = 1
FILE = "hardware.json"
AGAIN = "measure again with `holdall hardware`"


FREE_SHARE = 0.8
"""Share of the cores that must be free while a machine is measured for it not to be busy."""
MAX_SPREAD = 1.5
"""Spread of repeated measurements from which a machine was busy, and ratio from which a rate is off."""


class HardwareWarning(UserWarning):
    """Warning that the rates are those of another machine."""


@dataclass(frozen=True)
class Cost:
    """Seconds of an operation over L lookups of U distinct rows: base + per_lookup * L + per_row * U."""

    base: NonNegativeFloat = 0.0
    per_lookup: NonNegativeFloat = 0.0
    per_row: NonNegativeFloat = 0.0

    def seconds(self, lookups: float, rows: float) -> float:
        return self.base + self.per_lookup * lookups + self.per_row * rows

    def scaled(self, factor: float) -> Cost:
        """The cost of `factor` times the work a lookup and a row."""
        return Cost(self.base, self.per_lookup * factor, self.per_row * factor)

    def between(self, other: Cost, part: float) -> Cost:
        """Linear interpolation to another cost; `part` is 0 to 1."""
        mine, theirs = asdict(self).values(), asdict(other).values()
        return Cost(*(a + part * (b - a) for a, b in zip(mine, theirs, strict=True)))


@dataclass(frozen=True)
class Line:
    """Seconds of an operation on n items: base + each * n."""

    base: NonNegativeFloat = 0.0
    each: NonNegativeFloat = 0.0

    def seconds(self, n: float) -> float:
        return self.base + self.each * n


@dataclass(frozen=True)
class TableCost:
    """Cost of a lookup in tables of one method and dim, and of its backward with the update.

    For tensor trains, `rows` of the costs are products of the chain (`table_cost.Chain`), not rows.
    """

    method: dict[str, Any]
    dim: PositiveInt
    optimizer: str
    lookup: Cost
    update: Cost
    """Backward and update."""


@dataclass(frozen=True)
class Layer:
    """Seconds of a linear layer with its ReLU, forward and backward."""

    inputs: PositiveInt
    outputs: PositiveInt
    seconds: dict[str, NonNegativeFloat]
    """By samples."""
    precision: str = "float32"


@dataclass(frozen=True)
class Interaction:
    """Seconds of the dot interaction of `vectors` vectors of `dim` numbers, forward and backward."""

    vectors: PositiveInt
    dim: PositiveInt
    seconds: dict[str, NonNegativeFloat]
    """By samples."""
    precision: str = "float32"


@dataclass(frozen=True)
class Captured:
    """Host time of training steps on a GPU, which are launched as CUDA graphs where possible."""

    launch_step: Line
    """Host seconds of a step whose batch has n numbers, read by threads of the host."""
    launch_far: Line
    """The same where kernels find, fetch and write back host rows of a pack."""
    launch_layers: Line
    """Host seconds of a step of n layers whose kernels are launched one by one."""
    copied: Cost
    """Seconds that fetched rows add to a step when the host finds them among all lookups, gathers and copies them
    before the step, and writes them back after it."""


@dataclass(frozen=True)
class CollectiveRates:
    """Seconds of collectives by bytes of the tensor that each process passes (`collective_cost.Links`)."""

    backend: str
    world_size: PositiveInt
    all_reduce: dict[str, NonNegativeFloat]
    all_to_all: dict[str, NonNegativeFloat]
    all_gather: dict[str, NonNegativeFloat] = field(default_factory=dict)
    """By bytes of one process's part; empty in older files, which did not measure it."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Conditions under which rates were measured."""

    passes: PositiveInt
    """Times that everything was measured; a rate is the median."""
    quick: bool
    """Whether fewer sizes were measured."""
    spread: NonNegativeFloat
    """How many times the slowest pass took as long as the fastest, in the median over operations; 1 for one pass."""
    cores_wanted: PositiveInt
    """Cores that the process could use."""
    cores_free: NonNegativeFloat | None
    """Those that other processes left free, on average; None where the system does not say."""

    def busy(self) -> str | None:
        """Reason to think that the machine was busy with other work; None if there is none."""
        if self.cores_free is not None and self.cores_free < FREE_SHARE * self.cores_wanted:
            return f"other processes left {self.cores_free:.1f} of {self.cores_wanted} cores free"
        if self.spread > MAX_SPREAD:
            return f"the same operation took up to {self.spread:.1f} times as long when it was repeated"
        return None


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates of one machine and one device of it."""

    machine: dict[str, Any]
    """Facts of the machine that was measured; `id` is a hash of the others."""
    device: Literal["cpu", "cuda"]
    threads: PositiveInt
    """Threads of the CPU operations."""
    date: str
    took_seconds: NonNegativeFloat
    tables: tuple[TableCost, ...]
    """Tables on the device: dense ones by optimizer and dim, compressed ones for some settings."""
    host_tables: tuple[TableCost, ...]
    """Dense tables on the host; those of `tables` when the device is the CPU."""
    gather: dict[str, dict[str, Line]]
    """Reading n random rows, by tier (`device`, `host`, `disk`, or `cached`: of a file that is in the page cache) and
    bytes of a row; with a GPU also `pinned`: host rows, by a kernel on the device."""
    scatter: dict[str, dict[str, Line]]
    """Writing n random rows, by the same keys."""
    copy: dict[str, Line]
    """Copying n bytes: to_device, to_host (from and to ordinary memory), to_device_pinned, to_host_pinned; nothing
    moves when the device is the CPU."""
    find: Cost
    """Finding the rows to fetch among L lookups: U lookups are not of hot rows, and are made distinct. With a GPU, by
    kernels."""
    begin: dict[str, Cost] = field(default_factory=dict)
    """Computing initial values, which are not stored, of rows that tiers read or write (`read`, `write`): by numbers
    and rows. Empty in older files, which did not measure it."""
    layers: tuple[Layer, ...]
    interactions: tuple[Interaction, ...]
    stack: dict[str, Line]
    """Stacking n numbers of vectors of different kinds of tables into one tensor: `forward`, and `backward`."""
    dense_update: dict[str, Line]
    """Updating n dense parameters, by optimizer."""
    read: Line
    """Reading, checking and passing on a batch of n numbers."""
    overlap: NonNegativeFloat
    """Part of the shorter of two stages that is hidden when they run at the same time: 1 when both run at full
    speed."""
    call: NonNegativeFloat
    """Seconds of an empty operation on the device."""
    stream: NonNegativeFloat
    """Bytes a second of an operation that reads and writes memory in order, on the device."""
    captured: Captured | None = None
    """Of a GPU; None on a CPU, and in older files of a GPU, which are refused."""
    collectives: CollectiveRates | None = None
    conditions: Conditions | None = None
    """None in older files."""
    notes: tuple[str, ...] = field(default=())

    def machine_mismatch(self) -> str | None:
        """A sentence on how the machine of the rates differs from this one; None when they are the same."""
        here = machine_identity()
        if here["id"] == self.machine.get("id"):
            return None
        differing = [name for name in here if name != "id" and here[name] != self.machine.get(name)]
        differences = ", ".join(f"{name} {self.machine.get(name)!r} there, {here[name]!r} here" for name in differing)
        return (
            f"the rates were measured on another machine ({differences}), so times are predicted for that one: measure "
            f"this one with `holdall hardware`"
        )

    def check_machine(self) -> str | None:
        """Warn when this is not the machine that the rates were measured on; returns the warning."""
        message = self.machine_mismatch()
        if message is not None:
            warnings.warn(message, HardwareWarning, stacklevel=2)
        return message

    def busy_remark(self) -> str | None:
        """A sentence on other work that the machine had while it was measured; None if it had none."""
        busy = None if self.conditions is None else self.conditions.busy()
        return (
            None
            if busy is None
            else f"the machine was busy while it was measured ({busy}): {AGAIN} when nothing else runs"
        )

    def save(self, path: str | Path) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"format": FORMAT, "version": VERSION, **asdict(self)}, hashed=True)

    @classmethod
    def load(cls, path: str | Path) -> Hardware:
        path = Path(path)
        if not path.exists():
            raise ConfigError(f"there is no {path}: make it with `holdall hardware --out {path}`")
        return read_json(path, cls, format=FORMAT, version=VERSION, error=ConfigError, cure=AGAIN)

    def __post_init__(self) -> None:
        """Refuse tables of no method, and rates by sizes that are no numbers."""
        for table in (*self.tables, *self.host_tables):
            method_from_json(table.method)
        by_size: list[Mapping[str, Any]] = [*self.gather.values(), *self.scatter.values()]
        by_size += [*(layer.seconds for layer in self.layers), *(one.seconds for one in self.interactions)]
        for rates in by_size:
            wrong = [size for size in rates if not re.fullmatch("[1-9][0-9]{0,17}", size)]
            if wrong or not rates:
                raise ConfigError(f"rates are by size, and {shown(wrong[0]) if wrong else 'nothing'} is not a size")


def median_of(measured: Sequence[Hardware]) -> Hardware:
    """Element-wise median of several measurements of one machine."""
    notes = tuple(dict.fromkeys(note for one in measured for note in one.notes))
    median = _median([asdict(replace(one, notes=())) for one in measured])
    return replace(decode({**median, "date": measured[-1].date}, Hardware, "the median"), notes=notes)


def _median(values: Sequence[Any]) -> Any:
    """Element-wise median of nested dicts and lists; values that are not floats are those of the first."""
    first = values[0]
    if isinstance(first, dict):
        return {name: _median([value[name] for value in values]) for name in first}
    if isinstance(first, list | tuple):
        return [_median(parts) for parts in zip(*values, strict=True)]
    return median_low(values) if isinstance(first, float) else first


def machine_identity() -> dict[str, Any]:
    """Facts that tell machines apart: processor, cores, memory, accelerators; no names of people or hosts."""
    facts = environment.hardware()
    # Memory in whole gibibytes: what a kernel keeps for itself varies from boot to boot.
    facts["memory_gib"] = None if facts["memory_gib"] is None else round(facts["memory_gib"])
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return {"id": digest, **facts}


def default_path() -> Path:
    """Default file of this machine's rates: `$XDG_CACHE_HOME/holdall/hardware.json`."""
    return cache_folder() / FILE


def seconds_at(measured: Mapping[str, float], at: float) -> float:
    """Seconds at a size, interpolated between the measured sizes."""
    points = sorted((int(size), seconds) for size, seconds in measured.items())
    return interpolate([size for size, _ in points], [seconds for _, seconds in points], at)


def interpolate(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """Linear interpolation between points; below the first its value, beyond the last in proportion."""
    if at <= places[0]:
        return values[0]
    if at >= places[-1]:
        return values[-1] * at / places[-1]
    right = bisect_left(places, at)
    part = (at - places[right - 1]) / (places[right] - places[right - 1])
    return values[right - 1] + part * (values[right] - values[right - 1])


def line_at(lines: Mapping[str, Line], width: int) -> Line:
    """The line of rows of `width` bytes, interpolated from lines by bytes of a row (`interpolate`)."""
    points = sorted((int(size), line) for size, line in lines.items())
    nearest = min(points, key=lambda point: abs(point[0] - width))[1]
    return Line(nearest.base, interpolate([size for size, _ in points], [line.each for _, line in points], width))


def device_kind(name: str) -> str:
    """`cpu` or `cuda` of a device, which must exist; `auto` is a GPU if there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"no device kind '{name}'{did_you_mean(kind, ['cpu', 'cuda', 'auto'])}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device '{name}' does not exist: this machine has no GPU that torch can use; choose cpu")
    return kind
