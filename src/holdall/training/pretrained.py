"""Pretrained rows: vectors of raw values in a Parquet file, which a fresh run starts from.

The file has the columns `value` and `vector`, as `Scorer.write_vectors` writes them; others are ignored. A null value
is the unseen row, the empty text a missing value. Rows of values without a vector start as usual.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from holdall.checkpoint.protocols import TensorByRows
from holdall.common.errors import ConfigError, DataError
from holdall.common.files import sha256
from holdall.data.dataset import DataSet
from holdall.data.id_map import IdMap, as_text, is_nameable, load_id_map
from holdall.distributed.processes import Processes
from holdall.embedding.bags import EmbeddingBags, module_name
from holdall.tables.dense import DenseTable

BLOCK_ROWS = 1 << 16
"""Rows of a file that are in memory at a time, where tables are dense."""

Block = tuple[Tensor, Tensor]
"""Ids [n] and their vectors [n, dim] in float32."""


@dataclass(frozen=True)
class Pretrained:
    """Rows of a table that a run started from, as `run.json` has them."""

    feature: str
    table: str
    file: str
    sha256: str
    rows: int
    """Rows of the table with a vector of the file."""
    unknown: int
    """Values of the file that the data set does not have."""
    error: float
    """Norm of what the table stores less the vectors, by their norm: 0 for dense tables in float32."""

    def describe(self, num_rows: int) -> str:
        """A sentence for people."""
        unknown = f"; {self.unknown:,} values of the file are not in the data set" if self.unknown else ""
        error = f"; the table stores them to {self.error:.2%}" if self.error else ""
        return (
            f"pretrained: {self.rows:,} of {num_rows:,} rows of table '{self.table}' start as in {self.file}"
            f"{unknown}{error}"
        )


def pretrained_files(pairs: tuple[str, ...]) -> dict[str, Path]:
    """Files by feature, from `feature=file`."""
    found: dict[str, Path] = {}
    for pair in pairs:
        feature, _, file = pair.partition("=")
        if not feature or not file:
            raise ConfigError(f"--pretrained takes feature=file, such as user=vectors.parquet, not {pair!r}")
        if feature in found:
            raise ConfigError(f"--pretrained has two files for feature '{feature}': give one")
        found[feature] = Path(file)
    return found


def load_pretrained(
    pairs: tuple[str, ...],
    data: DataSet,
    bags: EmbeddingBags,
    tensors: Mapping[str, Tensor | TensorByRows],
    processes: Processes,
) -> list[Pretrained]:
    """Put the vectors of files into the tables of a fresh model; `tensors` are those of a checkpoint, by name.

    Dense rows are the vectors, rounded to their number type. Compressed tables are fitted to their initial rows with
    the vectors in place. All ranks call it, and each has its own rows.
    """
    done: list[Pretrained] = []
    for feature, path in pretrained_files(pairs).items():
        table = _table_of(feature, data, bags)
        if table in [other.table for other in done]:
            raise ConfigError(
                f"--pretrained has two files for table '{table}', which several features look up: give one"
            )
        file = _VectorFile(path, feature, _id_map(feature, data), bags.dim)
        target = tensors.get(f"model.bags.tables.{module_name(table)}.weight")
        is_here = module_name(table) in bags.tables
        if is_here and not isinstance(bags.table(table), DenseTable):
            error = _fit(file, table, bags, processes)
        else:
            error = _write(file, target)
        done.append(Pretrained(feature, table, str(path), sha256(path), file.num_rows, file.num_unknown, error))
    return done


def pretrained_json(done: list[Pretrained]) -> list[dict[str, object]]:
    return [asdict(one) for one in done]


def _table_of(feature: str, data: DataSet, bags: EmbeddingBags) -> str:
    data.schema.feature(feature)  # raises if there is none
    if feature not in bags.features:
        raise ConfigError(f"--pretrained {feature}: the model does not read it; it reads {', '.join(bags.features)}")
    return bags.features[feature]


def _id_map(feature: str, data: DataSet) -> IdMap:
    """The map of a feature, whose file is that of the first feature of the table."""
    table = data.schema.feature(feature).table or feature
    first = next(f.name for f in data.schema.features if (f.table or f.name) == table)
    return load_id_map(data.folder, first, data.schema)


@torch.no_grad()
def _write(file: _VectorFile, target: Tensor | TensorByRows | None) -> float:
    """Replace rows of a dense table by the vectors; the relative error of its number type."""
    lost = total = 0.0
    for ids, vectors in file.blocks():
        if target is None:  # another process has the table
            continue
        rows = vectors.to(target.dtype)
        if isinstance(target, Tensor):
            target[ids.to(target.device)] = rows.to(target.device)
        else:
            target.write(ids, rows)
        lost += float((rows.double() - vectors.double()).square().sum())
        total += float(vectors.double().square().sum())
    return (lost / total) ** 0.5 if total else 0.0


@torch.no_grad()
def _fit(file: _VectorFile, name: str, bags: EmbeddingBags, processes: Processes) -> float:
    """Fit a compressed table to its initial rows with the vectors in place; the relative error of the vectors."""
    table = bags.table(name)
    where = f"--pretrained {file.feature}: table '{name}' is stored by {table.method}"
    if processes.world_size > 1:
        raise ConfigError(f"{where}, which is fitted to vectors in one process: start one, or keep the table dense")
    weight = table.materialize().float()
    blocks = list(file.blocks())
    for ids, vectors in blocks:
        weight[ids.to(weight.device)] = vectors.to(weight.device)
    try:
        table.fit_rows(weight)
    except ConfigError as error:
        raise ConfigError(f"{where}, and {error}; or keep the table dense") from error
    lost = sum(
        float((table.rows(ids.to(weight.device)).cpu().double() - vectors).square().sum()) for ids, vectors in blocks
    )
    total = sum(float(vectors.double().square().sum()) for _, vectors in blocks)
    return (lost / total) ** 0.5 if total else 0.0


class _VectorFile:
    """Parquet file of raw values and vectors of a feature, read in blocks and checked."""

    def __init__(self, path: Path, feature: str, id_map: IdMap, dim: int):
        self.path, self.feature, self.id_map, self.dim = path, feature, id_map, dim
        self.num_rows = self.num_unknown = 0
        """Rows of the table found, and values that are not in the map, once all blocks were read."""
        try:
            self._file = pq.ParquetFile(path)
        except FileNotFoundError:
            raise DataError(f"no file {path}: --pretrained {feature}=FILE names a Parquet file") from None
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"{path} cannot be read as Parquet ({str(error).splitlines()[0]})") from error
        schema = self._file.schema_arrow
        missing = [name for name in ("value", "vector") if name not in schema.names]
        if missing:
            raise DataError(
                f"{path} has no column '{missing[0]}' (it has {', '.join(schema.names)}): vectors are in the columns "
                f"value and vector"
            )
        if not is_nameable(schema.field("value").type):
            raise DataError(f"{path}: column 'value' is {schema.field('value').type}: store the values as text")
        kind = schema.field("vector").type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not is_list or not pa.types.is_floating(kind.value_type):
            raise DataError(f"{path}: column 'vector' is {kind}, not a list of numbers in floating point")

    def blocks(self) -> Iterator[Block]:
        """Blocks of the rows whose values the map has."""
        seen = np.zeros(self.id_map.num_rows, dtype=bool)
        row, num_nulls, last_null = 0, 0, None
        for batch in self._file.iter_batches(BLOCK_ROWS, columns=["value", "vector"]):
            values, vectors = batch.column("value"), self._vectors(batch.column("vector"), row)
            nulls = values.is_null().to_numpy(zero_copy_only=False)
            if nulls.any():
                num_nulls += int(nulls.sum())
                last_null = vectors[np.flatnonzero(nulls)[-1:]].copy()
            ids = self.id_map.apply(as_text(values)).astype(np.int64)
            known = (ids != self.id_map.unseen) & ~nulls
            self.num_unknown += int((~known & ~nulls).sum())
            self._refuse_repeated(ids, known, seen, values, row)
            yield torch.from_numpy(ids[known]), torch.from_numpy(vectors[known])
            row += len(batch)
        self.num_rows = int(seen.sum())
        if not self.num_rows:
            raise DataError(
                f"{self.path}: none of its {row:,} values is one of feature '{self.feature}' in the data set, such as "
                f"'{self.id_map.values[int(self.id_map.unseen == 0)]}': values are compared as text"
            )
        if num_nulls == 1 and last_null is not None:
            self.num_rows += 1
            yield torch.tensor([self.id_map.unseen]), torch.from_numpy(last_null)
        self.num_unknown += num_nulls if num_nulls > 1 else 0  # withdrawn values, which are null like the unseen row

    def _vectors(self, column: pa.Array, row: int) -> npt.NDArray[np.float32]:
        """Vectors [n, dim] of a block, whose first row is `row` in the file."""
        lengths = pc.fill_null(pc.list_value_length(column), -1).to_numpy(zero_copy_only=False)
        wrong = np.flatnonzero(lengths != self.dim)
        if len(wrong):
            length = int(lengths[wrong[0]])
            found = "no vector" if length < 0 else f"a vector of {length} numbers"
            raise DataError(
                f"{self.path}, row {row + int(wrong[0]) + 1}: {found}, but rows of the tables have {self.dim}: set "
                f"--dim, or leave the row out"
            )
        numbers = pc.fill_null(column.flatten().cast(pa.float32()), float("nan")).to_numpy(zero_copy_only=False)
        vectors: npt.NDArray[np.float32] = numbers.reshape(-1, self.dim).copy()
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            raise DataError(
                f"{self.path}, row {row + int(bad[0]) + 1}: a number of its vector is missing or not finite"
            )
        return vectors

    def _refuse_repeated(
        self,
        ids: npt.NDArray[np.int64],
        known: npt.NDArray[np.bool_],
        seen: npt.NDArray[np.bool_],
        values: pa.Array,
        row: int,
    ) -> None:
        """Mark the ids of a block as seen; raise if one was there before."""
        places = np.flatnonzero(known)
        first = np.unique(ids[places], return_index=True)[1]
        again = np.setdiff1d(np.arange(len(places)), first)
        before = np.flatnonzero(seen[ids[places]])
        if len(again) or len(before):
            place = int(places[min([*again[:1], *before[:1]])])
            raise DataError(f"{self.path}, row {row + place + 1}: value {values[place]} is there twice: keep one")
        seen[ids[places]] = True
