"""`data-parallel`: everything on every rank; gradients are summed, and all ranks make the same update.

Compressed tables are a few megabytes of cores, so replicating them is cheap: their gradients (not the parameters) are
reduced with those of the MLPs (EL-Rec on several GPUs, with the gradients of the whole batch).
"""

from __future__ import annotations

from holdall.distributed.row_gradient_exchange import exchange_row_gradients
from holdall.planning.strategy_kinds import STRATEGY_KINDS
from holdall.training.strategies.process_strategy import ProcessStrategy


class DataParallelStrategy(ProcessStrategy):
    """The model of one process on the concatenated batch, up to the order in which floats are added; the same bits on
    every rank."""

    kind = STRATEGY_KINDS["data-parallel"]

    def _exchange_rows(self) -> None:
        exchange_row_gradients(self.row_groups, self.collectives)
