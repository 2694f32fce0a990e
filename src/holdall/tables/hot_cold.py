"""Hot/cold table: the popular rows exact, the tail stored by any other method.

Ids are in order of popularity, so hot is a prefix: `id < hot_rows` is the whole test. FAE (arXiv:2103.00686) and the
cache of TT-Rec (arXiv:2101.11714) treat popular rows apart; here they are ordinary parameters, which train, are saved
and are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from holdall.common.errors import ConfigError
from holdall.tables.bands import Band, BandedMethod, BandsTable
from holdall.tables.dense import Dense
from holdall.tables.method import Method, TableOptions, require
from holdall.tables.table import Table


@dataclass(frozen=True)
class HotCold(BandedMethod):
    """`row_i = hot[i]` for i < hot_rows, else row `i - hot_rows` of the cold table; bytes and flops are their sums."""

    name: ClassVar[str] = "hot_cold"

    hot_rows: int | float
    """Rows stored exactly: a number of rows, or a share of the table between 0 and 1."""
    cold: Method
    """Method of the other rows: trained, frozen (`Quantized`) or another `HotCold`."""

    def __post_init__(self) -> None:
        rows = self.hot_rows
        valid = 0 < rows < 1 if isinstance(rows, float) else isinstance(rows, int) and rows >= 0
        require(
            valid and not isinstance(rows, bool),
            self.name,
            f"hot_rows must be a number of rows of at least 0 or a share between 0 and 1, not {rows!r}",
        )
        require(isinstance(self.cold, Method), self.name, f"cold must be a table method, not {self.cold!r}")

    def split(self, num_rows: int) -> tuple[int, int]:
        """Number of hot rows of a table, and of cold ones."""
        hot = round(self.hot_rows * num_rows) if isinstance(self.hot_rows, float) else min(self.hot_rows, num_rows)
        return hot, num_rows - hot

    @property
    def trains(self) -> bool:
        return self.cold.trains

    def for_training(self) -> HotCold:
        return replace(self, cold=self.cold.for_training())

    def bands_of(self, num_rows: int) -> list[Band]:
        hot, cold = self.split(num_rows)
        bands = [Band("hot", 0, hot, Dense()), Band("cold", hot, hot + cold, self.cold)]
        return [band for band in bands if band.start < band.end]

    def _build(self, num_rows: int, dim: int, options: TableOptions) -> HotColdTable:
        return HotColdTable(self, num_rows, dim, options)

    @classmethod
    def for_bytes(
        cls, num_rows: int, dim: int, num_bytes: int, cold: type[Method] | None = None, hot_share: float = 0.5
    ) -> HotCold:
        """Hot rows for `hot_share` of the bytes, and the largest setting of `cold` (Frobenius when None) for the rest.

        Where the rest is too little for the cold method, there are fewer hot rows; bytes that it leaves unused go to
        them.
        """
        if cold is None:
            from holdall.tables.frobenius import Frobenius

            cold = Frobenius
        require(0 <= hot_share <= 1, cls.name, f"hot_share must be from 0 to 1, not {hot_share}")
        if num_bytes >= 4 * num_rows * dim:
            return cls(hot_rows=num_rows, cold=Dense())
        hot = min(int(num_bytes * hot_share) // (4 * dim), num_rows - 1)
        while True:
            try:
                tail = cold.for_bytes(num_rows - hot, dim, num_bytes - 4 * dim * hot)
                break
            except ConfigError as error:
                if hot == 0:
                    raise ConfigError(
                        f"{cls.name}: its cold part does not fit, even without hot rows: {error}"
                    ) from None
                hot //= 2
        found = cls(hot_rows=hot, cold=tail)
        unused = (num_bytes - found.num_bytes(num_rows, dim)) // (4 * dim)
        larger = replace(found, hot_rows=min(hot + unused, num_rows - 1))
        return larger if larger.num_bytes(num_rows, dim) <= num_bytes else found


class HotColdTable(BandsTable):
    """`hot`, a dense table of the first rows, and `cold`, the table of the others; either is None if it has no rows."""

    hot: Table | None
    cold: Table | None

    def __init__(self, method: HotCold, num_rows: int, dim: int, options: TableOptions):
        super().__init__(method, num_rows, dim, options)
        self.hot_rows = method.split(num_rows)[0]
        for name in ("hot", "cold"):
            if name not in self._modules:
                setattr(self, name, None)
