"""Ranking cases for HR@K and NDCG@K: a held-out event of a user against items that the user did not choose.

`ranking-<split>.arrow` (docs/formats.md) holds one case a row. Candidates of a case are the event's row of the split
with one item after the other in it, so they share the user's features and history.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from holdall.common.errors import DataError
from holdall.data.arrow_files import read_batch, whole_numbers, write_batch
from holdall.data.batch import Batch
from holdall.data.columns import Columns
from holdall.data.dataset import DataSet
from holdall.data.folder_files import check_other_file, has_other_file
from holdall.data.items import ItemTable
from holdall.data.schema import Schema

Array = npt.NDArray[Any]


def ranking_path(folder: str | Path, split: str) -> Path:
    return Path(folder) / f"ranking-{split}.arrow"


def has_ranking_cases(folder: str | Path, split: str, schema: Schema) -> bool:
    """Whether a split of the data set of `schema` has ranking cases."""
    return has_other_file(Path(folder), ranking_path(folder, split), schema)


@dataclass(frozen=True)
class RankingCases:
    """C cases with n negatives each."""

    row: Array
    """[C] row of the split that is the held-out event, ascending."""
    user: Array
    """[C] user id."""
    item: Array
    """[C] id of the item that was chosen."""
    negatives: Array
    """[C, n] ids of the others."""
    keep: Array
    """[C, n] whether a negative counts: not the chosen item itself, a repeated one, or padding."""

    def __len__(self) -> int:
        return len(self.row)

    def save(self, folder: Path, split: str) -> None:
        num = self.negatives.shape[1]
        columns = {
            "row": pa.array(self.row.astype(np.int64)),
            "user": pa.array(self.user),
            "item": pa.array(self.item),
            "negatives": pa.FixedSizeListArray.from_arrays(pa.array(self.negatives.reshape(-1)), num),
            "keep": pa.FixedSizeListArray.from_arrays(pa.array(self.keep.reshape(-1).astype(np.uint8)), num),
        }
        write_batch(ranking_path(folder, split), pa.RecordBatch.from_pydict(columns))

    @classmethod
    def load(cls, folder: str | Path, split: str = "test") -> RankingCases:
        path = ranking_path(folder, split)
        check_other_file(Path(folder), path)
        try:
            batch = read_batch(path)
            num = batch.schema.field("negatives").type.list_size
            flat = (whole_numbers(batch[name].flatten(), name, path) for name in ("negatives", "keep"))
            matrices = [numbers.reshape(len(batch), num) for numbers in flat]
            row, user, item = (whole_numbers(batch[name], name, path) for name in ("row", "user", "item"))
        except FileNotFoundError:
            raise DataError(
                f"{folder} has no ranking cases for split '{split}': they are written for implicit data sets "
                f"(holdall prepare --format movielens, taobao or yelp), for valid with --valid"
            ) from None
        except DataError:
            raise
        except (OSError, KeyError, AttributeError, ValueError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read ({error}): prepare the data set again") from error
        return cls(row, user, item, matrices[0], matrices[1].astype(bool))

    def batches(self, data: DataSet, cases_at_once: int = 256) -> Iterator[tuple[Batch, Tensor]]:
        """Candidates of up to `cases_at_once` cases at a time, and which count.

        The batch has C * (1 + n) rows, case after case, the chosen item first; the mask is [C, 1 + n]. Memory: one
        such batch.
        """
        table = ItemTable.load(data.folder, data.schema)
        path, num_items = ranking_path(data.folder, data.split), data.schema.feature(table.item).num_rows
        whole_numbers(pa.array(self.row), "row", path, below=len(data))
        whole_numbers(pa.array(self.negatives.reshape(-1)), "negatives", path, below=num_items)
        for start in range(0, len(self), cases_at_once):
            part = slice(start, start + cases_at_once)
            columns = Columns.concatenate([data.columns(row, row + 1) for row in self.row[part].tolist()])
            keep = np.concatenate([np.ones((len(columns), 1), dtype=bool), self.keep[part]], axis=1)
            yield table.candidates(columns, self.negatives[part]), torch.from_numpy(keep)
