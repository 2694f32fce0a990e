"""Smaller forms of a trained model: the same dense part, with tables stored by precision within a budget."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from holdall.common.memory import available_memory
from holdall.data.dataset import DataSet
from holdall.data.loader import Loader
from holdall.data.negatives import training_loader
from holdall.embedding.bags import EmbeddingBags
from holdall.evaluation.evaluate_model import SplitScores, score_split
from holdall.evaluation.sensitivity import sensitivity
from holdall.models import Model
from holdall.models.model import batch_device
from holdall.popularity.table_counts import table_counts
from holdall.serving.bundle_model import BAGS, table_names
from holdall.serving.proof import Comparison, compare
from holdall.tables import Table
from holdall.tables.dense import DenseTable
from holdall.tables.fitting import block_slices
from holdall.tables.precision import PrecisionFit
from holdall.tiers.mapped_file import MappedFile
from holdall.tiers.tiered_pack import TieredPack
from holdall.training.config import TrainConfig

MEMORY_SHARE = 0.25
"""Share of the free memory that the float32 rows of a table may take; larger ones are in a file."""


@dataclass(frozen=True)
class Form:
    """Smaller form of a model."""

    budget: str
    """Budget that it was made for, such as 1/100."""
    model: Model
    num_bytes: int
    """Bytes of its tables."""


class Forms:
    """A trained model in memory and its smaller forms, and comparisons of these with it.

        forms = Forms(model, config, data)
        small = forms.fit("1/100")
        forms.compare(small.model, "valid").auc.loss_bound

    `config` are the settings that the model was trained with, and `data` is its data set folder. Lookups are counted,
    and the sensitivity is measured, on batches as training has them, with negatives where it draws some.
    """

    def __init__(self, model: Model, config: TrainConfig, data: str | Path):
        self.model, self.config, self.data = model, config, Path(data)
        self.device = batch_device(model)
        self._scores: dict[str, SplitScores] = {}

    def loader(self) -> Loader:
        """Batches of the training split, as training has them."""
        config = self.config
        return training_loader(
            DataSet(self.data, "train"),
            config.batch_size,
            num_negatives=config.num_negatives,
            shuffle=config.sample_order,
            seed=config.seed,
        )

    @cached_property
    def precision(self) -> PrecisionFit:
        """Fit of the tables to any budget."""
        loader = self.loader()
        counts = table_counts(loader.epoch(0), loader.data.schema)
        rows = trained_rows(self.model)
        return PrecisionFit(rows, {name: counts[name] for name in rows}, sensitivity(self.model, loader.epoch(0)))

    def fit(self, budget: str | int | float) -> Form:
        """The form of least expected error whose tables take at most `budget`."""
        choice = self.precision.choose(budget)
        bags = EmbeddingBags(self.precision.fit(choice), self.model.bags.features)
        schema = DataSet(self.data, "train", check=False).schema
        model = self.config.model.model_config().with_tables(bags, schema, None, "cpu")
        bags.vector_dtype = self.model.bags.vector_dtype
        dense = {name: tensor for name, tensor in self.model.state_dict().items() if not name.startswith(BAGS)}
        model.load_state_dict(dense, strict=False)
        return Form(str(budget), model.to(self.device).eval(), choice.num_bytes)

    def scores(self, split: str) -> SplitScores:
        """Scores of the trained model; computed once."""
        if split not in self._scores:
            self._scores[split] = score_split(self.model, DataSet(self.data, split))
        return self._scores[split]

    def compare(self, model: Model, split: str = "valid", rows: Tensor | None = None) -> Comparison:
        """Comparison of a model with the trained one on a split, or on some of its rows [n] bool."""
        return compare(self.scores(split), score_split(model, DataSet(self.data, split)), rows)


def trained_rows(model: Model, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """The rows [num_rows, dim] of every table, or of some, in float32, on the host.

    Dense tables are not copied. Others are written out, table by table: into memory, or into a nameless file of the
    temporary folder where a table would take much of the memory.
    """
    on_disk = {
        name: pack.saved_weight(name)
        for pack in model.bags.packs
        if isinstance(pack, TieredPack) and pack.lazy
        for name in pack.tables
    }
    found: dict[str, Tensor] = {}
    for name in table_names(model) if names is None else names:
        table = model.bags.table(name)
        if name in on_disk:
            found[name] = _written_out(on_disk[name].read, table.num_rows, table.dim)
        elif isinstance(table, DenseTable) and table.weight.dtype == torch.float32:
            found[name] = table.weight.detach().cpu()
        else:
            found[name] = _written_out(partial(_materialized, table), table.num_rows, table.dim)
    return found


def _materialized(table: Table, ids: Tensor) -> Tensor:
    return table.materialize(ids.to(table.device))


def _written_out(read: Callable[[Tensor], Tensor], num_rows: int, dim: int) -> Tensor:
    """Rows that `read` gives for ids [n], a block at a time."""
    num_bytes = 4 * num_rows * dim
    if num_bytes <= MEMORY_SHARE * available_memory()["host"]:
        rows = torch.empty(num_rows, dim)
    else:
        rows = MappedFile(Path(tempfile.gettempdir()), num_bytes).tensor((num_rows, dim), torch.float32)
    for place in block_slices(num_rows, dim):
        rows[place] = read(torch.arange(place.start, place.stop)).float().cpu()
    return rows
