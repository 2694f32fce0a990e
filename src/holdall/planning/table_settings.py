"""Settings that choose the storage method of each table.

Imports neither torch nor the methods until one is chosen: `--help` needs the settings alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from holdall.common.errors import ConfigError, did_you_mean
from holdall.common.settings import check_types, name_and_value, plain_value
from holdall.common.sizes import check_budget

if TYPE_CHECKING:
    from torch import Tensor

    from holdall.tables import Dense, Method


@dataclass(frozen=True, kw_only=True)
class TableUsage:
    """Use of the tables of a run, which a budget is divided by."""

    counts: Mapping[str, Tensor]
    """Lookups [num_rows] of every row in training, by table."""
    row_state: int = 0
    """Bytes of optimizer state of a row."""
    codes_train: bool = True
    """Whether 8-bit codes can train, as they can in one process."""


@dataclass(frozen=True, kw_only=True)
class TableSettings:
    """Storage of tables: compression and number type."""

    method: str | None = None
    """Method that stores large tables: tensor_train, frobenius, hashed, ... or auto; dense when absent."""
    rank: int | None = None
    """Rank of the method, if it has one."""
    setting: tuple[str, ...] = ()
    """Further settings of the method, such as terms=4 or buckets=10000."""
    budget: str | None = None
    """Size of all tables in total, such as 16MB, or a share of their dense bytes, such as 1/20. Popular ids keep rows
    of their own, unless a method is named."""
    min_rows: int | None = None
    """Tables with fewer rows stay dense. When absent, the budget decides, and 1,000 rows without a budget."""
    table_dim: tuple[str, ...] = ()
    """Width of the rows of single tables, such as city=4, in the place of those in the schema of the data; a table
    widens them to --dim. Or none: --dim for all tables."""
    table_dtype: Literal["float32", "bf16", "fp16"] = "float32"
    """Number type that rows of dense tables are stored in; arithmetic on them is float32."""
    stochastic_rounding: bool = False
    """Round updated bf16 and fp16 rows up or down at random, so that updates too small for the type still count."""

    def __post_init__(self) -> None:
        check_types(self)
        check_budget(self.budget)
        if self.stochastic_rounding and self.table_dtype == "float32":
            raise ConfigError(
                "--stochastic-rounding is for tables in bf16 or fp16: give --table-dtype, or leave it out"
            )
        self.given_dims()
        has_settings = self.rank is not None or bool(self.setting)
        if self.method is None:
            if has_settings:
                raise ConfigError("--rank and --setting describe a --method: name one, such as --method tensor_train")
        elif self.budget is not None:
            if self.method != "auto":
                from holdall.tables.budget import find_method

                find_method(self.method)
            if has_settings:
                raise ConfigError("--budget chooses the settings of the method: give it or --rank/--setting, not both")
        elif self.method == "auto":
            raise ConfigError("--method auto needs a --budget to work towards, such as --budget 16MB")
        else:
            self._given_method()

    def given_dims(self) -> dict[str, int]:
        """Widths of `table_dim`, by table."""
        found: dict[str, int] = {}
        for pair in self.table_dim if self.table_dim != ("none",) else ():
            name, _, value = pair.rpartition("=")
            if not name or not value.isdecimal() or int(value) < 1:
                raise ConfigError(f"--table-dim takes a table and its width, as city=4, or none, not {pair!r}")
            found[name] = int(value)
        return found

    def with_dims(
        self,
        methods: dict[str, Method] | None,
        stored: Mapping[str, int],
        num_rows: Mapping[str, int],
        dim: int,
        *,
        has_plan: bool = False,
    ) -> dict[str, Method] | None:
        """The methods, with narrow rows for the tables that have a width of their own.

        `stored` are the widths in the schema of the data, by table; those of `table_dim` take their place. A plan, a
        budget or a method for all tables decides by itself, so that other widths are refused.
        """
        given = self.given_dims()
        dims = {**(stored if self.table_dim != ("none",) else {}), **given}
        for name in given:
            if name not in num_rows:
                raise ConfigError(
                    f"the model has no table '{name}'{did_you_mean(name, num_rows)}: name another one in --table-dim"
                )
        for name, width in dims.items():
            if width > dim:
                raise ConfigError(
                    f"table '{name}' has rows of {width} numbers, and the model reads {dim}: raise --dim to {width}, "
                    f"or give --table-dim {name}={dim}"
                )
        narrow = {name: width for name, width in dims.items() if width < dim}
        if not narrow:
            return methods
        other = "a plan" if has_plan else "--budget" if self.budget is not None else "--method"
        if has_plan or self.budget is not None or self.method is not None:
            raise ConfigError(
                f"table '{next(iter(narrow))}' has a width of its own, and {other} stores tables by its own rule: give "
                f"--table-dim none, or leave {other.removeprefix('a ')} out"
            )
        from holdall.tables import MixedDimension

        return {**(methods or {}), **{name: MixedDimension(dim=width) for name, width in narrow.items()}}

    @property
    def uses_counts(self) -> bool:
        """Whether the budget is divided by how often rows are looked up."""
        return self.budget is not None and self.method in (None, "auto")

    def methods(
        self, num_rows: Mapping[str, int], dim: int, usage: TableUsage | None = None
    ) -> dict[str, Method] | None:
        """Method of each table, by table name, for tables of `num_rows` rows; None when all are dense in float32.

        `usage` is what a budget is divided by if `uses_counts`; without it, the budget is divided by bytes alone.
        """
        methods = self._compressed(num_rows, dim, usage)
        if self.table_dtype == "float32":
            return methods
        from holdall.tables import Dense

        dense = Dense(dtype="bfloat16" if self.table_dtype == "bf16" else "float16")
        found = methods or {}
        return {name: _with_dense(found.get(name, Dense()), dense) for name in num_rows}

    def _compressed(self, num_rows: Mapping[str, int], dim: int, usage: TableUsage | None) -> dict[str, Method] | None:
        if self.method is None and self.budget is None:
            return None
        from holdall.tables.budget import MIN_ROWS, suggest

        if self.budget is not None and usage is not None and self.uses_counts:
            return suggest(
                num_rows,
                dim,
                self.budget,
                min_rows=self.min_rows or 0,
                training=usage.codes_train,
                counts=usage.counts,
                row_state=usage.row_state,
            )
        if self.budget is not None:
            return suggest(
                num_rows, dim, self.budget, self.method or "auto", min_rows=self.min_rows or 0, training=True
            )
        method = self._given_method()
        min_rows = MIN_ROWS if self.min_rows is None else self.min_rows
        return {name: method for name, rows in num_rows.items() if rows >= min_rows}

    def _given_method(self) -> Method:
        """The method that `method`, `rank` and `setting` describe, in the form that trains unless they rule it out."""
        from holdall.tables import METHODS, method_from_json

        document: dict[str, Any] = {"method": self.method}
        if self.rank is not None:
            document["rank"] = self.rank
        for pair in self.setting:
            name, value = name_and_value(pair, "--setting")
            document[name] = {"method": value} if value in METHODS else plain_value(value)
        given = method_from_json(document)
        trained = given.for_training()
        is_free = all(getattr(trained, name) == getattr(given, name) for name in document if name != "method")
        return trained if is_free else given


def _with_dense(method: Method, dense: Dense) -> Method:
    """A method with `dense` in the place of dense rows of the table's own type."""
    from holdall.tables import Bands, Dense

    if isinstance(method, Bands):
        return Bands(tuple((end, _with_dense(band, dense)) for end, band in method.bands))
    return dense if method == Dense() else method
