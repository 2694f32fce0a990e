"""Exchange of all gradients of a step between processes: the dense part in buckets, table rows as the strategy does.

Rows are exchanged by `distributed.row_gradient_exchange` and, in `two-fold`, by `distributed.two_fold_pack`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from holdall.distributed.collectives import Collectives
from holdall.distributed.gradient_buckets import GradientBuckets
from holdall.optim.optimizers import SquaredNorm


class GradientExchange:
    """Makes the gradients of every rank those of the global batch.

        exchange.begin(step, num_samples, loss, stop)
        loss.backward()                # dense gradients are sent meanwhile
        signals = exchange.finish()    # [2, W]: `loss` and `stop` of every rank, on all of them

    `parameters` are the dense ones that every rank has: their gradients are summed in buckets, in a process group of
    their own. `exchange_rows` exchanges the gradients of table rows. `squared_norm` is the squared norm of all
    gradients, where no rank has all of them (see `Optimizers.clip`).
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        collectives: Collectives,
        exchange_rows: Callable[[], None],
        squared_norm: SquaredNorm | None = None,
    ):
        self.processes = collectives.processes
        self.squared_norm = squared_norm
        self.num_samples = 0
        """Samples of this rank so far."""
        self.collectives = [collectives, Collectives(self.processes, own_group=True)]
        """Collectives of row gradients, then those of dense gradients."""
        self._exchange_rows = exchange_rows
        num_signals = 2 * self.processes.world_size
        self._buckets = GradientBuckets(parameters, self.collectives[1], num_signals=num_signals)

    def begin(self, step: int, num_samples: int, loss: Tensor, stop: bool) -> None:
        """Prepare for the backward of `loss`, this rank's share of the loss of the global batch; `stop` requests the
        end of the run."""
        for collectives in self.collectives:
            collectives.step = step
        self.num_samples += num_samples
        signals = torch.zeros(2, self.processes.world_size, device=self.processes.device)
        signals[0, self.processes.rank] = loss
        signals[1, self.processes.rank] = float(stop)
        self._buckets.begin(signals.view(-1))

    def finish(self) -> Tensor:
        """Wait for all gradients; returns the signals."""
        self._buckets.flush()
        self._exchange_rows()
        return self._buckets.finish().view(2, -1)
