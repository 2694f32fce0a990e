"""Features of a batch whose tables are stored in bands: one launch writes the vectors of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.kernels.bands import BandColumn, StoredBand, fits_triton
from holdall.tables import Table
from holdall.tables.bands import BandsTable
from holdall.tables.codes import CodesTable
from holdall.tables.quantized import QuantizedTable
from holdall.tables.shared import SharedTable
from holdall.tables.stored_bands import BandParameters, collects_gradients, stored_bands, tensor_places

if TYPE_CHECKING:
    from holdall.kernels.bands_triton import BandLaunch


class BandPart:
    """Features of tables in bands: (table, source, target).

    What a launch needs is made once, and again when a tensor was moved or replaced.
    """

    def __init__(self) -> None:
        self.members: list[tuple[Table, int, int]] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self._seen: list[tuple[int, int]] = []
        self._launch: BandLaunch | None = None
        self._parameters = BandParameters([])
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

    def parameters(self) -> BandParameters:
        """Parameters of all tables as they are now."""
        seen = [(id(tensors[name]), tensors[name].data_ptr()) for tensors, name in self._places]
        if seen != self._seen:
            self._seen, self._launch = seen, None
            self._parameters = BandParameters([table for table, *_ in self.members])
        return self._parameters

    def inputs(self) -> Iterator[Tensor]:
        """Tensors that a lookup may have gradients of: the parameters, and one for tables that collect gradients."""
        if self.members:
            yield from self.parameters().tensors
            if any(collects_gradients(table) for table, *_ in self.members):
                yield self._anchor

    def write(self, values: Tensor, out: Tensor) -> BandParameters:
        """Write the vectors of ids `values` [F, B] into their columns of `out` [B, F', dim]."""
        parameters = self.parameters()
        if self._launch is None:
            from holdall.kernels.bands_triton import BandLaunch

            columns = [BandColumn(_bands(table), source, target) for table, source, target in self.members]
            self._launch = BandLaunch(columns, values.device)
        self._launch.write(values, out)
        return parameters

    def gradients(self, parameters: BandParameters, values: Tensor, grad: Tensor) -> list[Tensor | None]:
        """Gradients of `inputs()` as they were at `write`, for the gradient [B, F', dim] of the output."""
        members = self.members if grad.shape[0] else []
        found = parameters.gradients(
            (table, values[source].long(), grad[:, target]) for table, source, target in members
        )
        return [*found, None] if any(collects_gradients(table) for table, *_ in self.members) else found


def _bands(table: Table) -> list[StoredBand]:
    bands = stored_bands(table)
    if bands is None or not fits_triton(bands):
        raise ConfigError(
            f"a {table.method.name} table was cast or replaced after its lookups were planned, and the kernel no "
            "longer takes it: call plan_lookups() of its EmbeddingBags"
        )
    return bands
