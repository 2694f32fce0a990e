"""`plain`: all tables on the device of one process.

One process trains like this under the strategies that shard or merge tables too, since there is no other.
"""

from __future__ import annotations

from holdall.models.model import Model
from holdall.planning.strategy_kinds import STRATEGY_KINDS
from holdall.training.strategies.base import Strategy


class PlainStrategy(Strategy):
    """All tables on the device, with everything else."""

    kind = STRATEGY_KINDS["plain"]

    def _build_model(self) -> Model:
        return self.config.build_model(self.data.schema, self.methods, device=self.device)
