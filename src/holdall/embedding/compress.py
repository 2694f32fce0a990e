"""Compression of the embedding tables of any PyTorch model, in place: `compress(model, budget="64MB")`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table as RichTable
from torch import Tensor, nn

from holdall.common.errors import ConfigError, did_you_mean
from holdall.common.sizes import parse_budget, readable_bytes
from holdall.embedding.bags import EmbeddingBags
from holdall.tables import Dense, Method, Table
from holdall.tables.budget import MIN_ROWS, suggest
from holdall.tables.dense import DenseTable


@dataclass(frozen=True)
class CompressedTable:
    """One line of a compression report."""

    name: str
    rows: int
    dim: int
    method: Method
    bytes_before: int
    bytes_after: int
    error: float | None
    """Relative error of the fitted rows; None when the table starts afresh."""


@dataclass(frozen=True)
class CompressionReport:
    """Printable report of `compress`."""

    tables: list[CompressedTable] = field(default_factory=list)
    bytes_before: int = 0
    """Bytes of all tables of the model, those left alone included."""
    bytes_after: int = 0

    def __str__(self) -> str:
        shown = RichTable(box=None, pad_edge=False, header_style="bold")
        for i, column in enumerate(("table", "method", "rows", "dim", "before", "after", "error")):
            shown.add_column(column, justify="left" if i < 2 else "right")
        for t in self.tables:
            error = "" if t.error is None else f"{t.error:.4f}"
            sizes = (readable_bytes(t.bytes_before), readable_bytes(t.bytes_after))
            shown.add_row(t.name, str(t.method), f"{t.rows:,}", str(t.dim), *sizes, error)
        console = Console(width=140)
        with console.capture() as capture:
            console.print(shown)
        ratio = self.bytes_before / max(self.bytes_after, 1)
        total = f"{readable_bytes(self.bytes_before)} -> {readable_bytes(self.bytes_after)} ({ratio:,.1f} times less)"
        return f"{capture.get()}{len(self.tables)} tables compressed; all tables: {total}"


class CompressedEmbedding(nn.Module):
    """A table in the place of an `nn.Embedding`: rows of ids of any shape; the padding row is zero and stays so."""

    def __init__(self, table: Table):
        super().__init__()
        self.table = table
        self.num_embeddings, self.embedding_dim = table.num_rows, table.dim
        self.padding_idx = table.padding_idx

    def forward(self, input: Tensor) -> Tensor:
        distinct, inverse = torch.unique(input, return_inverse=True)
        rows = F.embedding(inverse, self.table.rows(distinct))
        if self.padding_idx is None:
            return rows
        return rows.masked_fill((input == self.padding_idx)[..., None], 0.0)


@dataclass(frozen=True)
class _ModelTable:
    """Table of a model that another one can replace."""

    name: str
    owner: nn.Module
    key: str
    module: nn.Module
    weight: Tensor

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "padding_idx": getattr(self.module, "padding_idx", None),
            "sparse": getattr(self.module, "sparse", False),
        }
        if isinstance(self.module, nn.EmbeddingBag | Table):
            options |= {"mode": self.module.mode, "include_last_offset": self.module.include_last_offset}
        return options

    def put(self, table: Table) -> None:
        if isinstance(self.owner, EmbeddingBags):
            self.owner.replace_tables({self.key: table})
        elif isinstance(self.module, nn.Embedding):
            setattr(self.owner, self.key, CompressedEmbedding(table))
        else:
            setattr(self.owner, self.key, table)


def compress(
    model: nn.Module,
    budget: str | int | float | None = None,
    method: str | Method | type[Method] | Mapping[str, Method] = "auto",
    *,
    min_rows: int | None = None,
    fit: bool = False,
) -> CompressionReport:
    """Swap the `nn.Embedding`, `nn.EmbeddingBag` and dense tables of `model` for compressed ones, in place.

    `budget` is a size for all tables together (`"64MB"`) or a share of what they take (0.05, `"1/20"`). `method` is one
    method for all, a name to be sized by the budget, or one by module name. Tables with fewer than `min_rows` rows are
    left alone; by default those that the budget leaves room for, or those of fewer than 1,000 rows when there is no
    budget. With `fit`, compressed tables start as the best fit of the present rows (and the report has its error);
    otherwise afresh, with rows of the same standard deviation. A model without such a table is an error, and nothing is
    changed when anything is wrong.
    """
    places = {place.name: place for place in _places(model)}
    if not places:
        raise ConfigError(
            "the model has no nn.Embedding, nn.EmbeddingBag or dense table to compress: nothing was changed"
        )
    _refuse_unsupported(model, places)
    chosen = {
        name: choice
        for name, choice in _choose(places, budget, method, min_rows).items()
        if not isinstance(choice, Dense) or choice.dtype is not None
    }
    made: dict[str, tuple[Table, float | None]] = {}
    before = sum(place.weight.nbytes for place in places.values())
    lines = []
    for name, choice in chosen.items():
        made[name] = _make(places[name], choice, fit=fit)
    for name, (table, error) in made.items():
        weight = places[name].weight
        lines.append(
            CompressedTable(name, table.num_rows, table.dim, chosen[name], weight.nbytes, table.num_bytes(), error)
        )
        places[name].put(table)
    after = before - sum(line.bytes_before - line.bytes_after for line in lines)
    return CompressionReport(lines, before, after)


def _places(model: nn.Module) -> Iterator[_ModelTable]:
    """Every uncompressed table of a model."""
    for path, owner in model.named_modules():
        if isinstance(owner, EmbeddingBags):
            for name in dict.fromkeys(owner.features.values()):
                table = owner.table(name)
                if isinstance(table, DenseTable):
                    yield _ModelTable(name, owner, name, table, table.weight)
            continue
        for key, module in owner.named_children():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                yield _ModelTable(f"{path}.{key}" if path else key, owner, key, module, module.weight)


def _refuse_unsupported(model: nn.Module, places: Mapping[str, _ModelTable]) -> None:
    owners: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(f"{path}.{key}" if path else key)
    for name, place in places.items():
        if getattr(place.module, "max_norm", None) is not None:
            raise ConfigError(f"{name} renormalises its rows (max_norm), which compressed tables cannot: leave it out")
        if getattr(place.module, "scale_grad_by_freq", False):
            raise ConfigError(f"{name} scales gradients by frequency, which compressed tables cannot: leave it out")
        shared = owners[id(place.weight)]
        if len(shared) > 1:
            raise ConfigError(f"{name} shares its weight ({', '.join(shared)}): untie them first; nothing was changed")


def _choose(
    places: Mapping[str, _ModelTable],
    budget: str | int | float | None,
    method: str | Method | type[Method] | Mapping[str, Method],
    min_rows: int | None,
) -> dict[str, Method]:
    """The method of every table that is to change."""
    if isinstance(method, Mapping):
        for name in method:
            if name not in places:
                raise ConfigError(f"the model has no table '{name}'{did_you_mean(name, places)}")
        return dict(method)
    if min_rows is None:
        min_rows = MIN_ROWS if budget is None else 0
    large = {name: place for name, place in places.items() if place.weight.shape[0] >= min_rows}
    if not large:
        raise ConfigError(f"no table of the model has {min_rows:,} rows or more: lower min_rows; nothing was changed")
    if isinstance(method, Method):
        if budget is not None:
            raise ConfigError(f"give a budget or a method with its settings ({method}), not both")
        return dict.fromkeys(large, method)
    if budget is None:
        raise ConfigError(f"how small? Give a budget such as '64MB' or 0.05 for method {method!r}")
    dims = {place.weight.shape[1] for place in places.values()}
    if len(dims) == 1:
        rows = {name: place.weight.shape[0] for name, place in places.items()}
        return suggest(rows, dims.pop(), budget, method, min_rows=min_rows)
    # Tables of different widths: each gets the same share of its own bytes.
    total = sum(place.weight.numel() * 4 for place in places.values())
    share = parse_budget(budget, total) / total
    return {
        name: suggest({name: place.weight.shape[0]}, place.weight.shape[1], share, method)[name]
        for name, place in large.items()
    }


def _make(place: _ModelTable, method: Method, *, fit: bool) -> tuple[Table, float | None]:
    weight = place.weight.detach()
    options = place.options()
    if fit:
        table = method.fit(weight, **options)
        return table, getattr(table, "fit_error", None)
    sample = weight[:: max(1, weight.shape[0] // 10_000)].float()
    std = float(sample.square().mean().sqrt())
    table = method.build(*weight.shape, init_std=std or None, dtype=weight.dtype, device=weight.device, **options)
    return table, None
