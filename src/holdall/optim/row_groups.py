"""Groups of table rows that are updated by row: their gradients, their optimizer state and their updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdall.embedding.bags import EmbeddingBags
from holdall.embedding.dense_pack import DensePack
from holdall.kernels.dispatch import takes_triton
from holdall.kernels.row_gradient import RowGradient, join, sum_by_row
from holdall.kernels.row_update import DeviceScalars, UpdateScalars
from holdall.optim.optimizer_kinds import OptimizerKind
from holdall.tables import Table

SortedGradient = tuple[RowGradient, tuple[Tensor, Tensor]]
"""A gradient and its `row_update_triton.sorted_ids`."""


class RowGroup:
    """Rows of one storage, with their optimizer state: a pack of tables, or one parameter with sparse gradients."""

    def __init__(self, names: dict[str, str], kind: OptimizerKind, pack: DensePack | None, weight: Tensor):
        self.names = names
        """Full parameter name -> table name in the pack (or '' for a single parameter)."""
        self.kind = kind
        self.pack = pack
        self.parameter = weight
        self.summed: tuple[Tensor, Tensor] | None = None
        """Distinct rows and their summed gradients, after `sum_gradients`."""
        self._sorted: SortedGradient | None = None
        """After `squared_norm`, for `update`."""
        self._source: list[Any] = []
        """Gradients that `summed` or `_sorted` were made of (see `drop_stale`)."""
        self._slots = {} if pack is not None else kind.row_state(weight)
        if pack is not None:
            pack.allocate_slots(kind.row_state)

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles: without gradients, and with the optimizer state that a pack holds for it."""
        slots = {} if self.pack is None else self.pack.slots
        return {**self.__dict__, "summed": None, "_sorted": None, "_source": [], "pack_slots": slots}

    def __setstate__(self, state: dict[str, Any]) -> None:
        slots = state.pop("pack_slots")
        self.__dict__.update(state)
        if self.pack is not None:
            self.pack.slots, self.pack.collects = slots, True

    @property
    def weight(self) -> Tensor:
        return self.parameter if self.pack is None else self.pack.storage

    def weights(self) -> Sequence[Tensor]:
        """The parameters whose rows these are."""
        return [self.parameter] if self.pack is None else self.pack.weights()

    @property
    def slots(self) -> dict[str, Tensor]:
        """Optimizer state by slot, its rows those of `weight`."""
        return self._slots if self.pack is None else self.pack.slots

    def gradient(self) -> RowGradient | None:
        """The gradient of the backward, not summed."""
        if self.pack is not None:
            gradients = self.pack.collected()
            return join(gradients) if gradients else None
        grad = self.parameter.grad
        if grad is None:
            return None
        if not grad.is_sparse:  # of a backward before the optimizer, which makes gradients sparse
            ids = grad.flatten(1).any(1).nonzero()[:, 0]
            return RowGradient(ids, grad.index_select(0, ids))
        return RowGradient(grad._indices()[0], grad._values())

    def replace_gradient(self, gradient: RowGradient) -> None:
        """Put a gradient in the place of the backward's, such as that of all processes."""
        if self.pack is not None:
            self.pack.collected()[:] = [gradient]
            return
        weight, values = self.parameter, gradient.grad.to(self.parameter.dtype)
        self.parameter.grad = torch.sparse_coo_tensor(gradient.ids[None], values, weight.shape, check_invariants=False)

    def sum_gradients(self) -> None:
        """Sum the gradient of the backward by distinct row, into `summed`."""
        gradient = self.gradient()
        self.summed = None if gradient is None else sum_by_row(gradient)
        if self.summed is not None:  # in its place: what clipping scales, it scales there
            self.replace_gradient(RowGradient(*self.summed, is_summed=True))
        self._source = self._gradients()

    def _gradients(self) -> list[Any]:
        """Objects that change when the gradient does."""
        if self.pack is not None:
            return list(self.pack.collected())
        grad = self.parameter.grad
        return [] if grad is None else [grad, grad._version]

    def drop_stale(self) -> bool:
        """Drop what was made of gradients that were replaced since, by `zero_grad` after clipping for example."""
        if self.summed is None and self._sorted is None:
            return False
        now = self._gradients()
        if len(now) == len(self._source) and all(
            one is other or (type(one) is int and one == other) for one, other in zip(self._source, now, strict=True)
        ):
            return False
        self.summed = self._sorted = None
        return True

    def squared_norm(self) -> Tensor | None:
        """Squared norm of the summed gradient, by kernels that store no sums. Keeps the sorted ids for `update`."""
        from holdall.kernels import row_update_triton

        self._sorted = self._sort_gradient()
        self._source = self._gradients()
        return None if self._sorted is None else row_update_triton.squared_norm(*self._sorted)

    def _sort_gradient(self) -> SortedGradient | None:
        from holdall.kernels import row_update_triton

        gradient = self.gradient()
        if gradient is None or gradient.ids.numel() == 0:
            return None
        return gradient, row_update_triton.sorted_ids(gradient, self.weight.shape[0])

    @property
    def fuses(self) -> bool:
        """Whether a Triton kernel sums the gradients and updates the rows in one pass."""
        weight = self.weight
        narrow = weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        fits = narrow and weight.ndim == 2 and weight.is_contiguous() and weight.shape[1] <= 2048
        return takes_triton("the row update", weight, fits=fits)

    def update(self, scalars: UpdateScalars, on_device: DeviceScalars) -> None:
        """Apply the gradient of the backward, or `summed`; where it fuses, without waiting for the device."""
        if self.summed is None and self.fuses:
            self._fused_update(scalars, on_device)
            return
        summed = self.summed
        if summed is None:
            gradient = self.gradient()
            summed = None if gradient is None else sum_by_row(gradient)
        if summed is not None:
            self.kind.row_update(self.weight, *summed, scalars, **self.slots)

    def _fused_update(self, scalars: UpdateScalars, on_device: DeviceScalars) -> None:
        from holdall.kernels import row_update_triton

        found = self._sorted or self._sort_gradient()
        if found is not None:
            rule, states = self.kind.row_rule, list(self.slots.values())
            row_update_triton.update_sorted_rows(rule, self.weight, states, *found, scalars, on_device)

    def clear(self) -> None:
        """Drop the gradients."""
        self.summed = self._sorted = None
        self._source = []
        if self.pack is not None:
            self.pack.gradients.clear()
        self.parameter.grad = None

    def views(self) -> Iterator[tuple[str, Any]]:
        """State tensors by parameter name and slot."""
        for full_name, table in self.names.items():
            views = self._slots if self.pack is None else self.pack.slot_views(table)
            for slot, state in views.items():
                yield f"{full_name}.{slot}", state


def find_row_groups(model: nn.Module, kind: OptimizerKind) -> Iterator[RowGroup]:
    """All parameters of the model that are updated by row. Packs start to collect their gradients, and
    the other tables give sparse ones."""
    full_names = {id(parameter): name for name, parameter in model.named_parameters()}
    packed: set[int] = set()
    for module in model.modules():
        if isinstance(module, EmbeddingBags):
            for pack in module.packs:
                trainable = {n: t for n, t in pack.tables.items() if t.weight.requires_grad}
                if len(trainable) != len(pack.tables):
                    continue  # some are frozen: leave the whole pack to ordinary sparse gradients
                pack.repack()
                pack.collects = True
                names = {full_names[id(table.weight)]: name for name, table in pack.tables.items()}
                packed.update(id(table.weight) for table in pack.tables.values())
                # Not its storage itself: a pack may replace it, and the old one's memory must be freed then.
                yield RowGroup(names, kind, pack, torch.empty(0))
    for module in model.modules():
        if isinstance(module, Table):
            module.use_sparse_gradients()
            for parameter in module.row_parameters().values():
                if parameter.requires_grad and id(parameter) not in packed:
                    packed.add(id(parameter))
                    yield RowGroup({full_names[id(parameter)]: ""}, kind, None, parameter)
