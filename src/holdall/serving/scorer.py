"""Scorer: the model of a bundle or of a run, with all that it needs to score raw rows.

    scorer = holdall.load("bundle")
    scorer.score([{"I1": 3, "C1": "68fd1e64", ...}])     # probabilities [R]

Scores are those of `holdall evaluate`: to the bit for a batch of the same rows, since they take the same path.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdall.common.device import pick_device
from holdall.common.errors import ConfigError, DataError
from holdall.data.batch import Batch
from holdall.data.encode import Encoder
from holdall.data.identity import json_digest
from holdall.data.schema import Feature, Schema
from holdall.models import DLRM, Model
from holdall.models.model import batch_device
from holdall.serving.bundle import Bundle, is_bundle
from holdall.serving.encode_arrays import Arrays
from holdall.serving.explain_row import ExplainedRow, explain_row
from holdall.serving.fast_dlrm import MAX_ROWS, FastDLRM, takes
from holdall.serving.id_lookup import IdLookup, open_lookups
from holdall.serving.published_folder import is_published, open_current
from holdall.serving.raw_rows import RowFormat
from holdall.serving.row_encoder import EncodedBatch, RowEncoder
from holdall.serving.tower_vectors import item_blocks, row_vectors, two_tower
from holdall.serving.trained_run import TrainedRun
from holdall.serving.vectors import feature_rows, write_blocks, write_vectors
from holdall.training.tracking import RUN_FILE

Floats = npt.NDArray[np.float32]
WARM_UP_ROWS = (1, 64)
"""Rows of the batches that a warm-up scores."""


def load(path: str | Path, *, device: str = "cpu", mmap: bool = True) -> Scorer:
    """The scorer of a bundle, of what is current in a published folder, or of a run with the id maps of its data set.

    The tables of a bundle are views of its file on the CPU, unless `mmap` is False: opening reads none of their rows.
    The first time that a machine opens a bundle its files are compared with their hashes, which reads them all.
    """
    path = Path(path)
    if is_bundle(path) or is_published(path):
        return load_bundle(open_current(path), device=device, mmap=mmap)
    if not (path / RUN_FILE).exists():
        raise DataError(
            f"{path} is neither a bundle, a published folder nor a run: name a folder of `holdall release`, `holdall "
            f"publish` or `holdall train`"
        )
    run = TrainedRun.load(path, device=str(pick_device(device)))
    model = run.model.requires_grad_(False).eval()
    reads = [feature.name for feature in run.config.model.model_config().reads(run.schema).features]
    lookups = open_lookups(run.data, run.schema, reads)
    fingerprint = json_digest({"run": run.origin.run, "checkpoint": run.origin.checkpoint})
    return Scorer(path, model, run.schema, lookups, step=run.origin.step, fingerprint=fingerprint, data=run.data)


def load_bundle(bundle: Bundle, *, device: str = "cpu", mmap: bool = True) -> Scorer:
    """The scorer of a bundle that was opened; see `load`."""
    model = bundle.model(pick_device(device), mmap=mmap)
    step, fingerprint = bundle.record.origin.step, bundle.fingerprint
    return Scorer(bundle.path, model, bundle.schema, bundle.id_lookups(), step=step, fingerprint=fingerprint)


class Scorer:
    """Model in evaluation mode and encoder of raw rows.

    One thread may call `encode` while another one calls `logits`; neither may be called by two at once.
    """

    def __init__(
        self,
        path: Path,
        model: Model,
        schema: Schema,
        lookups: Mapping[str, IdLookup],
        *,
        step: int | None = None,
        fingerprint: str,
        data: Path | None = None,
    ):
        """`data` is the folder with the attributes of items; `path` when None."""
        self.path = path
        self._data = path if data is None else Path(data)
        self.model = model
        self.step = step
        """Training step of the model; None where it is not known."""
        self.fingerprint = fingerprint
        """SHA-256 that names the content that was loaded."""
        self.schema = schema
        self.lookups = lookups
        """Id maps of the features that the model reads, by feature."""
        self.reads = tuple(lookups)
        """Features that the model reads: those that a row must have, beside all dense columns."""
        self._rows = RowEncoder(RowFormat.of(self.schema, self.reads), lookups)
        self._device = batch_device(model)
        self.fast = True
        """Whether logits take the fast path where the model has one; they are the same."""

    @property
    def num_unseen(self) -> dict[str, int]:
        """Lookups so far that became a feature's unseen row, by feature."""
        return dict(self._rows.num_unseen)

    @property
    def inputs(self) -> list[Feature]:
        """Columns of values that a row must have, beside all dense columns: features, and the parts of crosses."""
        return self._rows.form.features

    @property
    def encoder(self) -> Encoder:
        """Encoder of the columns of an Arrow table."""
        return self._rows.columns

    # --- scores --------------------------------------------------------------------------------------------------

    def encode(self, rows: Any) -> Batch:
        """Raw rows as a batch on the host, with labels 0; see `score` for what rows may be."""
        return rows if isinstance(rows, Batch) else self._rows.encode(rows)

    def encode_arrays(self, columns: Arrays) -> Batch | None:
        """`encode` of Arrow columns, each in one or more parts; None unless they are many plain values."""
        return self._rows.encode_arrays(columns)

    def score(self, rows: Any) -> Floats:
        """Probabilities [R] of rows.

        Rows are a list of dicts, a dict of columns, a pandas, polars or Arrow table, a file, or a `Batch`.
        Columns are named as in the schema; others are ignored. A file, Parquet or text, is read in blocks and as
        `prepare` reads it, but needs no label.
        """
        if isinstance(rows, str | Path):
            return np.concatenate([self._probabilities(batch) for batch in self._rows.blocks(rows)])
        return self._probabilities(self.encode(rows))

    def logits(self, batch: Batch) -> Tensor:
        """Logits [R] in float32, exactly those that evaluation computes for this batch."""
        if not len(batch):
            return torch.empty(0, device=self._device)
        ids = batch.ids
        if self.fast and len(batch) <= MAX_ROWS and ids.offsets is None and ids.weights is None:
            fast = self._fast_model
            if fast is not None and ids.values.dtype in (torch.int32, torch.int64):
                if not isinstance(batch, EncodedBatch) and not fast.in_range(ids):
                    self.model.check(ids)  # names the place
                with torch.inference_mode():
                    return fast(batch.dense, ids)
        with torch.no_grad():
            return self.model(batch.to(self._device)).float()

    @cached_property
    def _fast_model(self) -> FastDLRM | None:
        if self._device.type != "cpu" or not takes(self.model):
            return None
        assert isinstance(self.model, DLRM)
        with torch.inference_mode():
            return FastDLRM(self.model)

    def rank(self, user: Mapping[str, Any], items: Any) -> Floats:
        """Probabilities [R] of R items for one user.

        `items` are rows, in any form that `score` takes, without the columns of `user`. Values of the user are encoded
        once; if they are all dense columns, the bottom MLP of a DLRM runs once, too. Scores are those of `score` for
        the joined rows to 1e-6.
        """
        return self._probabilities(self._rows.encode_items(user, items))

    def _probabilities(self, batch: Batch) -> Floats:
        found: Floats = torch.sigmoid(self.logits(batch)).cpu().numpy()
        return found

    # --- values and vectors --------------------------------------------------------------------------------------

    def explain_row(self, row: Mapping[str, Any]) -> ExplainedRow:
        """What each raw value of a row became; prints as a table. The counts of unseen values do not change."""
        return explain_row(row, self._rows, self.model)

    def vectors(self, feature: str, values: Any) -> Floats:
        """Rows [n, dim] of a feature's table, in float32, of n raw values; unseen ones have the unseen row."""
        self._check_reads(feature)
        texts = self._rows.form.values(feature, values)
        return feature_rows(self.model, feature, self._rows.columns.ids(feature, texts))

    def write_vectors(self, feature: str, path: str | Path, *, overwrite: bool = False) -> int:
        """Write all values of a feature, with their counts and rows, to a Parquet file; the number of rows written.

        Columns: `id`, `value` (null for the unseen row), `count`, `vector`. Memory is that of one block of rows.
        """
        self._check_reads(feature)
        return write_vectors(self.model, feature, self.lookups[feature], Path(path), overwrite=overwrite)

    def user_vectors(self, rows: Any) -> Floats:
        """Vectors [R, K] of the users of rows, by the user's tower of a two-tower model.

        Rows are in any form that `score` takes, with the columns of that tower. The product with `item_vectors`,
        divided by the model's temperature, is the logit.
        """
        return row_vectors(two_tower(self.model), "user", self._rows, rows)

    def item_vectors(self, rows: Any) -> Floats:
        """Vectors [R, K] of the items of rows, by the item's tower of a two-tower model; see `user_vectors`."""
        return row_vectors(two_tower(self.model), "item", self._rows, rows)

    def write_item_vectors(self, path: str | Path, *, overwrite: bool = False) -> int:
        """Write the vectors of all known items, by the item's tower, for an index of nearest neighbours.

        File, result and memory are those of `write_vectors`. Attributes that the tower reads are those of the data set
        (implicit data has them).
        """
        model = two_tower(self.model)
        blocks = item_blocks(model, self.schema, self._data)
        lookup = self.lookups[model.config.item[0]]
        return write_blocks(blocks, model.config.tower[-1], lookup, Path(path), overwrite=overwrite)

    def _check_reads(self, feature: str) -> None:
        self.schema.feature(feature)
        if feature not in self.reads:
            raise ConfigError(f"the model does not read feature '{feature}': name one of {', '.join(self.reads)}")

    # --- life ----------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Score rows of popular values, so that the first real ones find id maps, decoded rows and buffers ready."""
        unseen = dict(self._rows.num_unseen)
        for lookup in set(self.lookups.values()):
            lookup.fill()
        row: dict[str, Any] = {column.name: 1.0 for column in self.schema.dense}
        for feature in self.inputs:
            text = self.lookups[feature.name].text(0) if feature.name in self.lookups else ""
            row[feature.name] = 1.0 if feature.bucket is not None else text if feature.one_hot else [text]
        for count in WARM_UP_ROWS:
            self.score([row] * count)
        self._rows.num_unseen.update(unseen)

    def close(self) -> None:
        """Let go of the model and of the id maps; the scorer cannot be used afterwards."""
        del self.model, self._rows, self.lookups

    def __repr__(self) -> str:
        return f"Scorer({str(self.path)!r}, step={self.step}, features={len(self.reads)})"
