"""Compression of the embedding tables of any PyTorch model, in place: `compress(model, budget="64MB")`."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError, did_you_mean
from holdall.embedding.best_fit import BestFit, fit_best
from holdall.embedding.compressed_embedding import CompressedEmbedding
from holdall.embedding.compression_report import CompressedTable, CompressionReport, LeftTable
from holdall.embedding.model_tables import ModelTable, find_tables, replace_tables
from holdall.embedding.old_weights import OldWeight, warning_of_holders
from holdall.embedding.precision_of_tables import counts_by_table
from holdall.tables import Dense, Method, Table, share_codebooks
from holdall.tables.budget import MIN_ROWS, divide_budget
from holdall.tables.expected_lookups import expected_lookups
from holdall.tables.fit_tables import fit_tables
from holdall.tables.fitting import relative_error
from holdall.tables.table_size import TableSize

TINY_ROWS = 16
"""Tables of at most so many rows stay dense under any budget: there is nothing to save, and their ids would merge."""


def compress(
    model: nn.Module,
    budget: str | int | float | None = None,
    method: str | Method | type[Method] | Mapping[str, Method] = "auto",
    *,
    min_rows: int | None = None,
    exclude: str | Iterable[str] = (),
    fit: bool = False,
    counts: Mapping[str, Tensor] | None = None,
) -> CompressionReport:
    """Swap the `nn.Embedding`, `nn.EmbeddingBag` and dense tables of `model` for compressed ones, in place.

    `budget` is a size for all tables together (`"64MB"`) or a share of what they take (0.05, `"1/20"`). It counts every
    table that could be replaced, those that stay dense included, and a module with several names once. `method` is one
    method for all, a name to be sized by the budget, or one by module name, which leaves out all others.

    Tables with fewer than `min_rows` rows stay dense: by default those of fewer than 1,000 rows when there is no
    budget. Under a budget small tables stay dense as long as it allows, and those of at most 16 rows always. Tables
    that `exclude` names, by themselves or by a module that they are in, are left alone and not counted. So are modules
    that mean more than their rows: max_norm, weights that another module shares, hooks, parametrizations, subclasses
    with methods of their own. The report has the reason.

    With `fit`, compressed tables start as the best fit of the present rows, and the report has its error; otherwise
    afresh, with rows of the same standard deviation. `auto` then fits bands of precision (`PrecisionFit`), clusters and
    narrow rows within the budget, and takes what loses least on a lookup. Bands are fixed codes: to train on, choose a
    method that trains, such as clustered. Frozen tables stay frozen, and gradients are sparse where the
    module's were.

    `counts` [num_rows], by name the lookups of every row of each table, divide the budget by popularity: ids must be in
    popularity order. With `fit`, rows are stored in fewer bits and codes the less they are looked up (`PrecisionFit`);
    otherwise popular ids keep rows of their own, and the others share one (`keep_popular_rows`).

    A model without a table to compress is an error, and nothing is changed when anything is wrong. What
    still holds replaced weights, such as an optimizer, is named in a warning.
    """
    try:
        report, old, notes = _compress(model, budget, method, min_rows, exclude, counts, fit=fit)
    except Exception as error:  # its traceback must not hold the tables, for a caller that catches it and goes on
        found: BaseException | None = error
        while found is not None:
            traceback.clear_frames(found.__traceback__)
            found = found.__cause__
        raise
    for note in (*notes, warning_of_holders(old)):  # here no frame of ours holds a replaced module any more
        if note is not None:
            warnings.warn(note, stacklevel=2)
    return report


@dataclass(frozen=True)
class _Left:
    """Decision to leave a table alone."""

    reason: str
    counted: bool
    """Whether the budget counts the table."""


KEPT = _Left("stays dense by method", True)


def _compress(
    model: nn.Module,
    budget: str | int | float | None,
    method: str | Method | type[Method] | Mapping[str, Method],
    min_rows: int | None,
    exclude: str | Iterable[str],
    counts: Mapping[str, Tensor] | None,
    *,
    fit: bool,
) -> tuple[CompressionReport, list[OldWeight], list[str]]:
    """Report, weak references to what was replaced, and warnings."""
    tables = find_tables(model)
    if not tables:
        raise ConfigError(
            "the model has no nn.Embedding, nn.EmbeddingBag or dense table to compress: nothing was changed"
        )
    out = {table: _Left("is excluded", False) for table in _excluded(tables, exclude)}
    decisions: dict[ModelTable, Method | _Left]
    best: BestFit | None = None
    named = None if counts is None else counts_by_table(tables, counts)
    if counts is not None and (budget is None or method != "auto"):
        raise ConfigError("counts choose bands of rows within a budget: give both, and leave out method")
    if isinstance(method, Mapping):
        if budget is not None or min_rows is not None:
            raise ConfigError("method={...} names tables with their settings: give it or budget and min_rows, not both")
        decisions = {**out, **_by_name(tables, out, method)}
    else:
        out |= {table: _Left(table.reason, False) for table in tables if table.reason and table not in out}
        replaceable = [table for table in tables if table not in out]
        if not replaceable:
            whys = "; ".join(f"{table.name} {left.reason}" for table, left in out.items())
            raise ConfigError(f"no table of the model can be compressed: {whys}; nothing was changed")
        by_size, best = _by_size(replaceable, budget, method, min_rows, named, fit=fit)
        decisions = {**out, **by_size}
    chosen = {table: choice for table in tables if isinstance(choice := decisions[table], Method)}
    left = {table: choice for table in tables if isinstance(choice := decisions[table], _Left)}
    made = _make(chosen, {} if best is None else best.tables, fit=fit)
    counted: set[Tensor] = set()
    report = CompressionReport(
        [_compressed_line(table, choice, made[table], counted, named) for table, choice in chosen.items()],
        [_left_line(table, choice) for table, choice in left.items()],
        None if best is None else str(best),
    )
    notes = []
    if not fit and (fixed := [table.name for table, new in made.items() if not _trains(new)]):
        notes.append(
            f"{', '.join(fixed)}: the new rows are random and nothing trains them, as the table is frozen or its "
            "method stores fixed codes; use fit=True to keep the rows, or exclude the table"
        )
    old = [OldWeight.of(table.name, table.module, table.weight) for table in made]
    replace_tables(made)
    return report, old, notes


def _excluded(tables: Sequence[ModelTable], exclude: str | Iterable[str]) -> list[ModelTable]:
    """Tables that `exclude` names, by any of their names or by a module that they are in."""
    found: list[ModelTable] = []
    for name in [exclude] if isinstance(exclude, str) else exclude:
        named = [table for table in tables if table.is_in(name)]
        if not named:
            known = [name for table in tables for name in table.names]
            raise ConfigError(
                f"exclude names '{name}', but no table has that name or is in it{did_you_mean(name, known)}"
            )
        found += named
    return found


def _by_name(
    tables: Sequence[ModelTable], excluded: Container[ModelTable], methods: Mapping[str, Method]
) -> dict[ModelTable, Method | _Left]:
    """Decisions where `method` has one method for each table by name."""
    by_name = {name: table for table in tables for name in table.names}
    chosen: dict[ModelTable, Method] = {}
    for name, choice in methods.items():
        if name not in by_name:
            raise ConfigError(f"the model has no table '{name}'{did_you_mean(name, by_name)}")
        table = by_name[name]
        if not isinstance(choice, Method):
            raise ConfigError(f"the method of '{name}' must be one with its settings, such as Hashed(buckets=100)")
        if table in excluded:
            raise ConfigError(f"'{name}' is in exclude and in method: leave it out of one of them")
        if chosen.setdefault(table, choice) != choice:
            raise ConfigError(f"{' and '.join(table.names)} are one module: give it one method")
        if table.reason and choice != Dense():
            raise ConfigError(f"{name} {table.reason}: leave it out of method; nothing was changed")
    left = _Left("is not named in method", False)
    return {
        table: _Left(KEPT.reason, False) if chosen.get(table) == Dense() else chosen.get(table, left)
        for table in tables
        if table not in excluded
    }


def _by_size(
    tables: Sequence[ModelTable],
    budget: str | int | float | None,
    method: str | Method | type[Method],
    min_rows: int | None,
    counts: Mapping[str, Tensor] | None,
    *,
    fit: bool,
) -> tuple[dict[ModelTable, Method | _Left], BestFit | None]:
    """Decisions of one method with its settings, or of a budget, for tables that can be replaced.

    Also the tables that `auto` has fitted already.
    """
    fewest = min_rows if min_rows is not None else MIN_ROWS if budget is None else 0
    if fewest and all(table.num_rows < fewest for table in tables):
        raise ConfigError(f"no table of the model has {fewest:,} rows or more: lower min_rows; nothing was changed")
    small = {table: _Left(f"has fewer than {fewest:,} rows", True) for table in tables if table.num_rows < fewest}
    if isinstance(method, Method):
        if budget is not None:
            raise ConfigError(f"give a budget or a method with its settings ({method}), not both")
        return {table: small.get(table, KEPT if method == Dense() else method) for table in tables}, None
    if budget is None:
        name = method if isinstance(method, str) else method.name
        raise ConfigError(f"how small? Give a budget such as '64MB' or 0.05 for method {name}")
    dense = _Left("stays dense within the budget", True)
    least_rows = max(fewest, TINY_ROWS + 1)
    ranked = [table for table in tables if table.num_rows >= least_rows]
    if counts is not None:
        counts = {table.name: counts[table.name] for table in ranked if table.name in counts}
    sizes = {
        table.name: TableSize(table.num_rows, table.dim, table.weight.dtype, _nbytes(_padding_row(table, fit=fit)))
        for table in tables
    }
    best: BestFit | None = None
    if fit and method == "auto" and ranked:
        kept = sum(sizes[table.name].dense_bytes for table in tables if table.num_rows < least_rows)
        kept += sum(sizes[table.name].extra_bytes for table in ranked)
        options = {table.name: _options(table) for table in ranked}

        def divided(kind: type[Method]) -> dict[str, Method]:
            return divide_budget(sizes, budget, kind, min_rows=least_rows)

        best = fit_best(ranked, kept, budget, counts, options, divided)
        found = {} if best is None else best.tables
        methods = {name: found[name].method if name in found else Dense() for name in sizes}
    else:
        methods = divide_budget(sizes, budget, method, min_rows=least_rows, counts=counts)
    return {
        table: methods[table.name] if methods[table.name] != Dense() else small.get(table, dense) for table in tables
    }, best


def _padding_row(table: ModelTable, *, fit: bool) -> Tensor | None:
    """The padding row of an `nn.Embedding` that a fit must keep, since lookups return it; None where it is zero."""
    index = table.module.padding_idx
    if not fit or index is None or not isinstance(table.module, nn.Embedding) or table.weight.is_meta:
        return None
    row = table.weight.detach()[index].clone()
    return row if row.any() else None


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes


def _make(
    chosen: Mapping[ModelTable, Method], fitted: Mapping[str, Table], *, fit: bool
) -> dict[ModelTable, CompressedEmbedding | Table]:
    """The modules that take the places of tables; `fitted` are those that have been made already, all or none."""
    options = {table.name: _options(table) for table in chosen}
    methods = {table.name: method for table, method in chosen.items()}
    if fitted:
        made = dict(fitted)
    elif fit:
        for table in chosen:
            if table.weight.is_meta:
                raise ConfigError(
                    f"{table.name}: is on the meta device and has no rows to fit: load them first, or use fit=False"
                )
        made = fit_tables({table.name: table.weight.detach() for table in chosen}, methods, options=options)
    else:
        deviations = {table.name: _deviation(table.weight.detach()) for table in chosen}
        made = {}
        for table, method in chosen.items():
            try:
                made[table.name] = method.build(
                    table.num_rows, table.dim, init_std=deviations[table.name], **options[table.name]
                )
            except ConfigError as error:
                raise ConfigError(f"{table.name}: {error}") from error
        share_codebooks(made.values())
    return {table: _placed(table, method, made[table.name], fit=fit) for table, method in chosen.items()}


def _options(table: ModelTable) -> dict[str, Any]:
    """`TableOptions` of the table that takes the place of another."""
    module, weight = table.module, table.weight
    options = {"dtype": weight.dtype, "device": weight.device, "sparse": module.sparse}
    options["padding_idx"] = module.padding_idx
    if isinstance(module, nn.EmbeddingBag | Table):
        options |= {"mode": module.mode, "include_last_offset": module.include_last_offset}
    return options


def _placed(table: ModelTable, method: Method, made: Table, *, fit: bool) -> CompressedEmbedding | Table:
    """The module that takes the place of a table: `made` itself, or an `nn.Embedding` of its rows."""
    module = table.module
    new: CompressedEmbedding | Table = made
    if isinstance(module, nn.EmbeddingBag):
        vars(made).update(num_embeddings=table.num_rows, embedding_dim=table.dim)  # its owner may read them
    elif isinstance(module, nn.Embedding):
        new = CompressedEmbedding(made, _padding_row(table, fit=fit))
    if not table.weight.requires_grad:
        new.requires_grad_(False)
        if _trains(new):  # codes that train without a parameter
            raise ConfigError(f"{table.name} is frozen, but a table by {method} trains: choose trainable=False")
    return new.train(module.training)


def _deviation(weight: Tensor) -> float | None:
    """Root mean square of a sample of the rows; None, the default of tables, if they are zero or not there."""
    if weight.is_meta:
        return None
    sample = weight[:: max(1, weight.shape[0] // 10_000)].float()
    return float(sample.square().mean().sqrt()) or None


def _trains(new: CompressedEmbedding | Table) -> bool:
    """Whether a gradient reaches any row of a new table."""
    table = new.table if isinstance(new, CompressedEmbedding) else new
    if table.device.type == "meta":
        return any(parameter.requires_grad for parameter in table.parameters())
    with torch.enable_grad():
        return table.rows(torch.tensor([0, table.num_rows - 1], device=table.device)).requires_grad


def _compressed_line(
    table: ModelTable,
    method: Method,
    new: CompressedEmbedding | Table,
    counted: set[Tensor],
    counts: Mapping[str, Tensor] | None,
) -> CompressedTable:
    """Line of a new table; its bytes are without tensors that are in `counted`, and its own are added to those.

    The error of fitted rows is that of a lookup where `counts` are known.
    """
    rows = new.table if isinstance(new, CompressedEmbedding) else new
    error = rows.fit_error
    if error is not None and counts is not None:
        error = relative_error(table.weight.detach(), rows, expected_lookups(torch.as_tensor(counts[table.name])))
    tensors = {*new.parameters(), *new.buffers()} - counted
    counted |= tensors
    sizes = (table.weight.nbytes, sum(tensor.nbytes for tensor in tensors))
    return CompressedTable(table.name, table.num_rows, table.dim, method, *sizes, error, table.names[1:])


def _left_line(table: ModelTable, left: _Left) -> LeftTable:
    size = table.num_bytes()
    return LeftTable(table.name, table.num_rows, table.dim, size, left.reason, left.counted, table.names[1:])
