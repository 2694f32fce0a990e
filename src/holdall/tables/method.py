"""Method of storing a table: a small frozen dataclass that builds tables, counts their bytes and converts to JSON.

`holdall.tables.METHODS`, a plain dict, is the only registry of names: nothing is imported by name and nothing is
evaluated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from holdall.common.errors import ConfigError

if TYPE_CHECKING:
    from holdall.tables.table import Table

Mode = Literal["sum", "mean", "max"]


def dense_std(num_rows: int) -> float:
    """Standard deviation of freshly initialised rows: that of DLRM's uniform(-1/sqrt(n), 1/sqrt(n)).

    Every method starts with rows of mean 0, this deviation and a Gaussian shape, whatever its factors look like.
    """
    return (1.0 / (3.0 * num_rows)) ** 0.5


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Options of lookup and initial values, the same for every method; the meaning is that of `nn.EmbeddingBag`."""

    mode: Mode = "sum"
    padding_idx: int | None = None
    """Id that contributes nothing to its bag and gets no gradient; a negative one counts from the end, as in torch."""
    include_last_offset: bool = False
    sparse: bool = False
    """Whether gradients of row parameters are sparse. False works with every torch optimizer, but costs memory and time
    for all rows at every step; `EmbeddingBags` and `Optimizers` ask for sparse ones themselves."""
    init_std: float | None = None
    """Standard deviation of the initial rows; `dense_std(num_rows)` when None."""
    dtype: torch.dtype = torch.float32
    device: torch.device | str | None = None
    generator: torch.Generator | None = None
    """Generator of the initial values; torch's global one when None."""


@dataclass(frozen=True)
class Method(ABC):
    """Base of the methods. Subclasses are frozen dataclasses whose fields are the settings of the method."""

    name: ClassVar[str]
    """Its name in JSON and on the command line."""

    @abstractmethod
    def _build(self, num_rows: int, dim: int, options: TableOptions) -> Table:
        """The table module, initialised."""

    @abstractmethod
    def num_parameters(self, num_rows: int, dim: int) -> int:
        """Parameters a table of this shape has, counted without building it."""

    def num_bytes(self, num_rows: int, dim: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes a table of this shape takes, index buffers included; equals `Table.num_bytes()` of the built one."""
        return self.num_parameters(num_rows, dim) * dtype.itemsize

    def build(self, num_rows: int, dim: int, **options: Any) -> Table:
        """A freshly initialised table of `num_rows` rows of `dim` numbers; options are those of `TableOptions`."""
        for what, value in (("num_rows", num_rows), ("dim", dim)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"a {self.name} table needs {what} of at least 1, not {value!r}")
        try:
            parsed = TableOptions(**options)
        except TypeError as error:
            raise ConfigError(f"unknown option for a {self.name} table: {error}") from None
        if parsed.mode not in ("sum", "mean", "max"):
            raise ConfigError(f"mode must be 'sum', 'mean' or 'max', not {parsed.mode!r}")
        if not isinstance(parsed.sparse, bool):
            raise ConfigError(f"sparse must be True or False, not {parsed.sparse!r}")
        if not parsed.dtype.is_floating_point:
            raise ConfigError(
                f"rows of {self.name} tables are floating-point numbers, not {parsed.dtype}: convert them"
            )
        if parsed.padding_idx is not None:
            if not -num_rows <= parsed.padding_idx < num_rows:
                raise ConfigError(f"padding_idx {parsed.padding_idx} is not a row of a table of {num_rows} rows")
            parsed = replace(parsed, padding_idx=parsed.padding_idx % num_rows)
        return self._build(num_rows, dim, parsed)

    @property
    def trains(self) -> bool:
        """Whether training changes the rows of a table; codes that do not train are fitted or loaded."""
        return True

    def for_training(self) -> Method:
        """The form of this method that trains fresh rows and takes as many bytes; itself where there is no other."""
        return self

    @classmethod
    def for_bytes(cls, num_rows: int, dim: int, num_bytes: int) -> Method:
        """The largest setting of this method that stores a float32 table in at most `num_bytes`."""
        raise ConfigError(f"{cls.name} has no size to choose: it cannot be fitted to a byte budget")

    def fit(self, weight: Tensor, *, counts: Tensor | None = None, **options: Any) -> Table:
        """A table of this method, fitted to `weight` [num_rows, dim] as closely as the method can.

        With `counts` [num_rows], how often each row is looked up, popular rows are fitted more closely where the
        method can choose (`Table.fit_rows`).
        """
        check_finite(weight)
        num_rows, dim = weight.shape
        options.setdefault("dtype", weight.dtype)
        options.setdefault("device", weight.device)
        table = self.build(num_rows, dim, **options)
        table.fit_rows(weight, counts)
        return table

    def shared_parts(self, num_rows: int, dim: int, dtype: torch.dtype = torch.float32) -> dict[Hashable, SharedPart]:
        """Parts that several tables of a model store once, by what they must agree in; `num_bytes` counts them too."""
        return {}

    def to_json(self) -> dict[str, Any]:
        return {"method": self.name, **{field.name: _to_json(getattr(self, field.name)) for field in fields(self)}}


class SharedPart(NamedTuple):
    """Size of what tables share: a part of one key has the size of the largest."""

    num_parameters: int
    num_bytes: int


def merge_shared(parts: Iterable[Mapping[Hashable, SharedPart]]) -> dict[Hashable, SharedPart]:
    """Shared parts of several methods together: each key once, as large as the largest."""
    merged: dict[Hashable, SharedPart] = {}
    for found in parts:
        for key, part in found.items():
            merged[key] = max(part, merged.get(key, part))
    return merged


def total_bytes(tables: Iterable[tuple[Method, int, int]], dtype: torch.dtype = torch.float32) -> int:
    """Bytes of all tables of a model, given as (method, num_rows, dim); what several of them share counts once."""
    tables = list(tables)
    shared = [method.shared_parts(num_rows, dim, dtype) for method, num_rows, dim in tables]
    apart = sum(method.num_bytes(num_rows, dim, dtype) for method, num_rows, dim in tables)
    counted = sum(part.num_bytes for found in shared for part in found.values())
    return apart - counted + sum(part.num_bytes for part in merge_shared(shared).values())


def _to_json(value: Any) -> Any:
    if isinstance(value, Method):
        return value.to_json()
    return [_to_json(item) for item in value] if isinstance(value, tuple) else value


def check_finite(weight: Tensor) -> None:
    """Raise a `ConfigError` that names the first row of `weight` [num_rows, dim] with a NaN or infinity."""
    step = max(1, (1 << 20) // max(1, weight.shape[1]))
    for start in range(0, 0 if weight.is_meta else weight.shape[0], step):
        rows = weight[start : start + step].detach()
        if not all(bool(end.isfinite()) for end in torch.aminmax(rows)):
            row = start + int((~rows.isfinite().all(dim=1)).nonzero()[0])
            raise ConfigError(
                f"row {row} of the weight to fit has a NaN or infinity: train it again, or set the row to zero"
            )


def require(condition: bool, method: str, message: str) -> None:
    """Raise a `ConfigError` that names the method unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{method}: {message}")
