"""Module that takes the place of an `nn.Embedding` whose rows are compressed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.tables import Table


class CompressedEmbedding(nn.Module):
    """A table in the place of an `nn.Embedding`: rows of ids of any shape.

    The padding row is constant and gets no gradient, as that of `nn.Embedding`: `padding_row` [dim], or zeros if None.
    """

    padding_row: Tensor | None

    def __init__(self, table: Table, padding_row: Tensor | None = None):
        super().__init__()
        self.table = table
        self.num_embeddings, self.embedding_dim = table.num_rows, table.dim
        self.padding_idx = table.padding_idx
        self.register_buffer("padding_row", padding_row)

    @property
    def sparse(self) -> bool:
        """Whether gradients of the table's row parameters are sparse, as those of the `nn.Embedding` were."""
        return self.table.sparse

    def forward(self, input: Tensor) -> Tensor:
        distinct, inverse = torch.unique(input, return_inverse=True)
        rows = F.embedding(inverse, self.table.rows(distinct))
        if self.padding_idx is None:
            return rows
        padded = (input == self.padding_idx)[..., None]
        if self.padding_row is None:
            return rows.masked_fill(padded, 0.0)
        return torch.where(padded, self.padding_row.to(rows.dtype), rows)

    def materialize(self, ids: Tensor | None = None) -> Tensor:
        """The rows that lookups give, all of them or those of `ids`: what `weight` was, without gradient."""
        if ids is None:
            ids = torch.arange(self.num_embeddings, device=self.table.device)
        with torch.no_grad():
            return self(ids)

    def num_bytes(self) -> int:
        """Bytes of the table and of the padding row."""
        return self.table.num_bytes() + (0 if self.padding_row is None else self.padding_row.nbytes)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}"

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"a compressed embedding ({self.table.method}) stores no row by itself, so it has no weight: call it "
                "with ids, read all rows with materialize(), or leave it out of compress (exclude=...) to keep its "
                "weight, as an output layer that shares it needs"
            )
        return super().__getattr__(name)
