"""Tensor-ring table: a tensor train that a trace over its outer rank closes into a ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from holdall.tables.method import TableOptions
from holdall.tables.tensor_train import TensorTrain, TensorTrainTable


@dataclass(frozen=True)
class TensorRing(TensorTrain):
    """`row(id) = trace(G1[i1] G2[i2] ... GN[iN])`: the train's digits and factors, with r_0 = r_N = rank and a trace.

    There are no boundary cores: all have rank^2 values per slice, the sum of n_k * d_k * rank^2. At equal rank it
    represents every tensor train and costs rank times its flops. At equal bytes three cores have 1/sqrt(3) of the
    train's rank R, and about R/5 times its flops. All ranks equal `rank`; it is not reduced for small cores.
    """

    name: ClassVar[str] = "tensor_ring"

    def ranks(self, num_rows: int, dim: int) -> tuple[int, ...]:
        return (self.rank,) * (self.cores + 1)

    def _build(self, num_rows: int, dim: int, options: TableOptions) -> TensorRingTable:
        return TensorRingTable(self, num_rows, dim, options)


class TensorRingTable(TensorTrainTable):
    """`cores`, each [n_k, rank, d_k, rank].

    The fit to given rows is the tensor train of the same rank (rings have no such decomposition of their own): exact
    for rows that such a train represents, and no better than it for others. The unused part of the first core keeps
    its initial values against zeros in the last, so that training can use it.
    """

    @torch.no_grad()
    def _set_train(self, train: list[Tensor]) -> None:
        for core, fitted in zip(self.cores[1:], train[1:], strict=True):
            core.zero_()
            core[:, : fitted.shape[1], :, : fitted.shape[3]] = fitted
        first, fitted = self.cores[0], train[0]
        first[:, 0] = 0.0
        first[:, :1, :, : fitted.shape[3]] = fitted
