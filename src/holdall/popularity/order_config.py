"""Settings of `order`. Reads no other package: `--help` needs the settings alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdall.common.errors import ConfigError
from holdall.common.settings import check_types
from holdall.common.sizes import parse_bytes, readable_bytes

LEAST_EDGES = 1000
BYTES_PER_EDGE = 256
"""Memory for finding the communities of a graph, igraph's included; counting its pairs takes 112 bytes an edge."""


@dataclass(frozen=True, kw_only=True)
class OrderConfig:
    """Settings for ordering the tail of each table."""

    hot: float = 0.05
    """Share of the most popular ids that keep their rank."""
    hot_by: Literal["rows", "lookups"] = "rows"
    """Unit of `hot`: a share of the rows of a table (EL-Rec), or of the lookups, which its most popular ids take."""
    window: int = 512
    """Samples less than this apart in the files count as together, for features of one id per sample."""
    partners: int = 8
    """Most later lookups that each lookup is linked with, drawn when the window or bag has more."""
    min_rows: int = 1000
    """Tables with fewer rows keep their order: they are stored dense, where it gains nothing."""
    memory: str = "1GB"
    """For the graph of one table, besides an id map and a file of rows; beyond it the rarest ids are left out."""
    seed: int = 0
    """Seed of the drawn partners and of the search for communities."""
    overwrite: bool = False
    """Replace the output folder when it holds a data set already."""

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.hot < 1:
            raise ConfigError(f"hot is {self.hot}: it is a share, from 0 to below 1, of the ids that keep their rank")
        for name, least in (("window", 2), ("partners", 1), ("min_rows", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be {least} or more")
        if self.max_edges < LEAST_EDGES:
            least_bytes = readable_bytes(LEAST_EDGES * BYTES_PER_EDGE)
            raise ConfigError(f"memory is {self.memory}, but a graph worth having needs {least_bytes} or more")

    @property
    def max_edges(self) -> int:
        return parse_bytes(self.memory) // BYTES_PER_EDGE
