"""Settings that choose the storage method of each table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from holdall.common.errors import ConfigError
from holdall.common.settings import name_and_value, plain_value
from holdall.tables import METHODS, Dense, Method, method_from_json
from holdall.tables.budget import MIN_ROWS, find_method, suggest


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
    """Size of all tables in total, such as 16MB, or a share of their dense bytes, such as 1/20."""
    min_rows: int | None = None
    """Tables with fewer rows stay dense. When absent, the budget decides, and 1,000 rows without a budget."""
    table_dtype: Literal["float32", "bf16", "fp16"] = "float32"
    """Number type that rows of dense tables are stored in; arithmetic on them is float32."""
    stochastic_rounding: bool = False
    """Round updated bf16 and fp16 rows up or down at random, so that updates too small for the type still count."""

    def __post_init__(self) -> None:
        if self.stochastic_rounding and self.table_dtype == "float32":
            raise ConfigError(
                "--stochastic-rounding is for tables in bf16 or fp16: give --table-dtype, or leave it out"
            )
        has_settings = self.rank is not None or bool(self.setting)
        if self.method is None:
            if has_settings:
                raise ConfigError("--rank and --setting describe a --method: name one, such as --method tensor_train")
        elif self.budget is not None:
            if self.method != "auto":
                find_method(self.method)
            if has_settings:
                raise ConfigError("--budget chooses the settings of the method: give it or --rank/--setting, not both")
        elif self.method == "auto":
            raise ConfigError("--method auto needs a --budget to work towards, such as --budget 16MB")
        else:
            self._given_method()

    def methods(self, num_rows: Mapping[str, int], dim: int) -> dict[str, Method] | None:
        """Method of each table, by table name, for tables of `num_rows` rows; None when all are dense in float32."""
        methods = self._compressed(num_rows, dim)
        if self.table_dtype == "float32":
            return methods
        dense = Dense(dtype="bfloat16" if self.table_dtype == "bf16" else "float16")
        found = methods or {}
        return {name: dense if found.get(name, Dense()) == Dense() else found[name] for name in num_rows}

    def _compressed(self, num_rows: Mapping[str, int], dim: int) -> dict[str, Method] | None:
        if self.method is None and self.budget is None:
            return None
        if self.budget is not None:
            return suggest(
                num_rows, dim, self.budget, self.method or "auto", min_rows=self.min_rows or 0, training=True
            )
        method = self._given_method()
        min_rows = MIN_ROWS if self.min_rows is None else self.min_rows
        return {name: method for name, rows in num_rows.items() if rows >= min_rows}

    def _given_method(self) -> Method:
        """The method that `method`, `rank` and `setting` describe, in the form that trains unless they rule it out."""
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
