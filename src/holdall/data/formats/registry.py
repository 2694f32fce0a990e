"""The formats that `prepare` knows, by name: each opens its sources as a `RawData`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from holdall.data.formats.avazu import open_avazu
from holdall.data.formats.bookcrossing import open_bookcrossing
from holdall.data.formats.criteo import CRITEO
from holdall.data.formats.custom import load_layout
from holdall.data.formats.movielens import open_movielens
from holdall.data.formats.taobao import open_taobao
from holdall.data.formats.yelp import open_yelp
from holdall.data.layout import Layout
from holdall.data.raw_data import RawData
from holdall.data.read_parquet import SUFFIXES, read_parquet
from holdall.data.read_text import read_text
from holdall.data.rows import Rows
from holdall.data.sources import find_sources

if TYPE_CHECKING:
    from holdall.data.prepare import PrepareConfig

Open = Callable[[Sequence[str | Path], Path, "PrepareConfig"], RawData]


def open_table(sources: Sequence[str | Path], out: Path, config: PrepareConfig) -> RawData:
    """CSV and Parquet files, with the layout of the TOML schema, or Criteo's."""
    layout = CRITEO if config.schema is None else load_layout(config.schema)
    return RawData(layout=layout, files=find_sources(sources, out), read=partial(read_table, layout=layout))


def read_table(path: Path, layout: Layout) -> Generator[Rows]:
    return read_parquet(path, layout) if path.suffix in SUFFIXES else read_text(path, layout)


FORMATS: dict[str, Open] = {
    "criteo": open_table,
    "table": open_table,
    "avazu": open_avazu,
    "taobao": open_taobao,
    "yelp": open_yelp,
    "movielens": open_movielens,
    "bookcrossing": open_bookcrossing,
}
