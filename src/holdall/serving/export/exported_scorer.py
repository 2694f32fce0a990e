"""Base of the scorers of exports: a batch to logits, as `Scorer.logits` gives them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdall.data.batch import Batch
from holdall.data.schema import Schema
from holdall.serving.bundle_model import model_from_json
from holdall.serving.export.export_folder import EXPORT_FILE, ExportRecord
from holdall.serving.export.model_inputs import Arrays, ModelInputs


class ExportedScorer(ABC):
    """Model of an export folder and the inputs that it takes."""

    def __init__(self, path: Path, record: ExportRecord):
        self.path, self.record = path, record
        self.schema = Schema.load(path)
        config = model_from_json(record.model, str(path / EXPORT_FILE))
        self.inputs = ModelInputs.of(config, self.schema)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the bundle that was exported."""
        found: str = self.record.bundle["fingerprint"]
        return found

    @property
    def step(self) -> int | None:
        """Training step of the model; None where it is not known."""
        found: int | None = self.record.bundle["step"]
        return found

    def logits(self, batch: Batch) -> Tensor:
        """Logits [R] in float32 of a batch on the host."""
        if not len(batch):
            return torch.empty(0)
        return torch.from_numpy(self._run(self.inputs.arrays(batch))["logit"])

    def scores(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Probabilities [R] of a batch on the host."""
        if not len(batch):
            return np.empty(0, np.float32)
        return self._run(self.inputs.arrays(batch))["score"]

    @abstractmethod
    def _run(self, arrays: Arrays) -> Arrays:
        """Outputs `score` [R] and `logit` [R]."""
