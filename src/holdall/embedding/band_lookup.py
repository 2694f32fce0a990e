"""Features of a batch whose tables are stored in bands: one launch writes the vectors of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.kernels.bands import BandColumn, StoredBand, fits_triton
from holdall.kernels.row_gradient import RowGradient
from holdall.tables import Table
from holdall.tables.bands import BandsTable
from holdall.tables.code_updates import GradientShare
from holdall.tables.codes import CodesTable
from holdall.tables.quantized import QuantizedTable
from holdall.tables.shared import SharedTable
from holdall.tables.stored_bands import (
    BandLearning,
    BandParameters,
    Lookup,
    collects_gradients,
    stored_bands,
    tensor_places,
)

if TYPE_CHECKING:
    from holdall.kernels.band_gradients_triton import BandGradientLaunch
    from holdall.kernels.bands_triton import BandLaunch

MAX_SIZES = 8
"""Sizes of batches for which the launch of gradients is kept."""


class BandState:
    """Tables as they were at a lookup, with what launches on them need."""

    def __init__(self, members: Sequence[Lookup], tensors: Sequence[Tensor]):
        self.members = members
        self.parameters = BandParameters([table for table, *_ in members])
        self.seen = [(id(tensor), tensor.data_ptr()) for tensor in tensors]
        self.launch: BandLaunch | None = None
        self._gradients: dict[tuple[Any, ...], tuple[BandLearning, BandGradientLaunch, Tensor]] = {}

    def write(self, values: Tensor, out: Tensor) -> None:
        if self.launch is None:
            from holdall.kernels.bands_triton import BandLaunch

            columns = [BandColumn(_bands(table), source, target) for table, source, target in self.members]
            self.launch = BandLaunch(columns, values.device)
        self.launch.write(values, out)

    def gradients(self, values: Tensor, grad: Tensor) -> list[Tensor | None]:
        """Gradient of each parameter; tables that collect gradients get theirs."""
        if grad.shape[0] == 0:
            return [None] * len(self.parameters.tensors)
        learning, launch, bags = self._gradient_launch(grad)
        numbers, sums, touched = launch.write(values, grad)
        joint = RowGradient(numbers, grad.view(-1, grad.shape[2]), bags)
        for table, start in learning.coded.items():
            table.collect(GradientShare(joint, start, start + table.num_rows))
        return self.parameters.gradients(learning, sums, touched, self.members, values, grad)

    def _gradient_launch(self, grad: Tensor) -> tuple[BandLearning, BandGradientLaunch, Tensor]:
        """What the tables learn, the launch for it, and the row of the flat gradient of each of its lookups."""
        from holdall.kernels.band_gradients_triton import BandGradientLaunch

        assert self.launch is not None
        size, width, _ = grad.shape
        key = (size, width, *(tensor.requires_grad for tensor in self.parameters.tensors))
        if key not in self._gradients:
            if len(self._gradients) >= MAX_SIZES:
                self._gradients.clear()
            learning = self.parameters.learning([table for table, *_ in self.members], size)
            launch = BandGradientLaunch(self.launch, learning.lines, learning.num_coded, learning.num_summed)
            rows = torch.arange(size, device=grad.device) * width
            bags = self.launch.columns[:, 1:2] + rows if learning.coded else rows[:0]
            bags = bags.reshape(-1)
            self._gradients[key] = learning, launch, bags.int() if size * width < 2**31 else bags
        return self._gradients[key]


class BandPart:
    """Features of tables in bands: (table, source, target).

    What a launch needs is made once, and again when a tensor was moved or replaced.
    """

    def __init__(self) -> None:
        self.members: list[Lookup] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self._state: BandState | None = None
        with torch.inference_mode(False):
            self._anchor = torch.empty(0, requires_grad=True)

    @staticmethod
    def takes(table: Table) -> bool:
        """Whether the kernel looks up this table as it is now."""
        if not isinstance(table, BandsTable | CodesTable | SharedTable | QuantizedTable):
            return False
        bands = stored_bands(table)
        return bands is not None and fits_triton(bands)

    def add(self, table: Table, source: int, target: int) -> None:
        """Assign a feature, at `source` of the batch and `target` of the output."""
        self.members.append((table, source, target))
        self._places.extend(tensor_places(table))

    def _tensors(self) -> list[Tensor]:
        return [tensors[name] for tensors, name in self._places]

    def state(self) -> BandState:
        """All tables as they are now."""
        tensors = self._tensors()
        if self._state is None or self._state.seen != [(id(tensor), tensor.data_ptr()) for tensor in tensors]:
            self._state = BandState(self.members, tensors)
        return self._state

    def inputs(self) -> Iterator[Tensor]:
        """Tensors that a lookup may have gradients of: the parameters, and one for tables that collect gradients."""
        if self.members:
            yield from self.state().parameters.tensors
            if any(collects_gradients(table) for table, *_ in self.members):
                yield self._anchor

    def write(self, values: Tensor, out: Tensor) -> BandLookup:
        """Write the vectors of ids `values` [F, B] into their columns of `out` [B, F', dim]."""
        state = self.state()
        state.write(values, out)
        return BandLookup(state, self._tensors())

    def gradients(self, lookup: BandLookup, values: Tensor, grad: Tensor) -> list[Tensor | None]:
        """Gradients of `inputs()` as they were at `write`, for the gradient [B, F', dim] of the output."""
        found = lookup.state.gradients(values, grad)
        return [*found, None] if any(collects_gradients(table) for table, *_ in self.members) else found


class BandLookup(NamedTuple):
    """What the backward of a lookup needs."""

    state: BandState
    tensors: list[Tensor]
    """Those that the state has addresses of: they must outlive it."""


def _bands(table: Table) -> list[StoredBand]:
    bands = stored_bands(table)
    if bands is None or not fits_triton(bands):
        raise ConfigError(
            f"a {table.method.name} table was cast or replaced after its lookups were planned, and the kernel no "
            "longer takes it: call plan_lookups() of its EmbeddingBags"
        )
    return bands
