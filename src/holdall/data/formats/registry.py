"""Formats that `prepare` reads, by name; each opens its sources as a `RawData`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdall.data.formats.avazu import open_avazu
from holdall.data.formats.bookcrossing import open_bookcrossing
from holdall.data.formats.movielens import open_movielens
from holdall.data.formats.table import open_libsvm, open_table
from holdall.data.formats.taobao import open_taobao
from holdall.data.formats.yelp import open_yelp
from holdall.data.raw_data import RawData

if TYPE_CHECKING:
    from holdall.data.prepare import PrepareConfig

Open = Callable[[Sequence[str | Path], Path, "PrepareConfig"], RawData]

FORMATS: dict[str, Open] = {
    "criteo": open_table,
    "table": open_table,
    "avazu": open_avazu,
    "taobao": open_taobao,
    "yelp": open_yelp,
    "movielens": open_movielens,
    "bookcrossing": open_bookcrossing,
    "libsvm": open_libsvm,
}
