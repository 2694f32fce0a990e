"""`host`: tables are stored and looked up on the host, as in the hybrid mode of DLRM.

Pooled vectors are copied to the device and their gradients back: 2 * features * dim numbers per sample cross the bus.
"""

from __future__ import annotations

from holdall.data.batch import Batch
from holdall.models.model import LookedUp, Model
from holdall.planning.strategy_kinds import STRATEGY_KINDS
from holdall.tiers.placement import move_dense_part
from holdall.training.strategies.base import Strategy


class HostStrategy(Strategy):
    """Tables on the host, the dense part of the model on the device."""

    kind = STRATEGY_KINDS["host"]
    _samples = 0
    _bytes = 0

    def _build_model(self) -> Model:
        model = self.config.build_model(self.data.schema, self.methods)
        move_dense_part(model, self.device)
        model.bags.output_device = self.device
        for pack in model.bags.packs:
            pack.pin_output = self.device.type == "cuda"
        return model

    def lookup(self, batch: Batch, moved: Batch) -> LookedUp:
        found = self.model.lookup(Batch(moved.dense, batch.ids, moved.label))
        parts = found if isinstance(found, tuple) else (found,)
        self._samples += len(batch)
        self._bytes += 2 * sum(part.nbytes for part in parts)
        return found

    def measures(self) -> dict[str, float]:
        return {"moved_bytes_per_sample": self._bytes / max(1, self._samples)}
