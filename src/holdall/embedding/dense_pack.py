"""Dense tables of one dim and type, end to end in one storage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from holdall.common.eager import transforms
from holdall.common.errors import ConfigError
from holdall.embedding.collected_gradient import CollectedGradient
from holdall.kernels.row_gradient import RowGradient, join, sum_by_row
from holdall.tables import Table
from holdall.tables.dense import DenseTable


class DensePack:
    """Dense tables of one dim and type, end to end in one storage [R, dim]; each keeps its `weight`, a view of it."""

    vector_dtype: torch.dtype | None = None
    """Type of looked-up vectors and of their gradients; that of the storage when None."""
    pin_output = False
    """Whether looked-up vectors are written to pinned memory, from which a GPU copies at full speed."""
    _laid_out: Sequence[Tensor] = ()
    """The weights that are views of the storage; empty where none is."""

    def __init__(self, tables: Mapping[str, DenseTable], generator: torch.Generator | None, device: torch.device | str):
        self.tables = dict(tables)
        self.collects = False
        """Set by the optimizer that consumes `gradients`; without one, gradients go to `weight.grad` as usual."""
        self.gradients: list[RowGradient] = []
        """Of the lookups since the last step; valid while `weight.grad` stands for them (see `collected`)."""
        self._stand_ins: list[CollectedGradient] = []
        """What `weight.grad` of each table is while its gradients are here; dropped with it, by `zero_grad` say."""
        self.slots: dict[str, Tensor] = {}
        """Optimizer state, each kind laid out like the storage."""
        self._lay_out(device, generator)

    def _lay_out(self, device: torch.device | str, generator: torch.Generator | None = None) -> None:
        first = next(iter(self.tables.values()))
        num_rows = sum(table.num_rows for table in self.tables.values())
        self.storage = torch.empty(num_rows, first.dim, dtype=first.weight.dtype, device=device)
        self.starts: dict[str, int] = {}
        self._start_tensors: dict[tuple[tuple[str, ...], torch.device], Tensor] = {}
        start = 0
        for name, table in self.tables.items():
            self.starts[name] = start
            view = self.storage[start : start + table.num_rows]
            start += table.num_rows
            if table.weight.is_meta:
                table.weight = nn.Parameter(view)
                table.initialize(generator)
            else:
                table.weight.data = view.copy_(table.weight.data)
        self._laid_out = self.weights()

    def use_storage(self, storage: Tensor) -> None:
        """Take the rows [R, dim] of all tables, in their order, from this storage, such as a mapped file."""
        assert storage.shape == self.storage.shape
        assert storage.dtype == self.storage.dtype
        self.storage = storage
        for name, table in self.tables.items():
            table.weight = nn.Parameter(self.view(storage, name))
        self._laid_out = self.weights()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle takes over: not the storage, which holds the weights of `tables` once more, and
        nothing of the optimizer, which brings its own part along (`optim.row_groups.RowGroup`)."""
        if type(self) is not DensePack:
            raise ConfigError(
                "a model whose rows are in several places cannot be copied or pickled: save a checkpoint of it instead"
            )
        return {"tables": self.tables, "vector_dtype": self.vector_dtype, "pin_output": self.pin_output}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.collects, self.gradients, self._stand_ins, self.slots = False, [], [], {}
        self._lay_out(self.weights()[0].device)

    def weights(self) -> list[nn.Parameter]:
        """Weights of the tables, in their order."""
        return [table._parameters["weight"] for table in self.tables.values()]  # type: ignore[misc]

    def repack(self) -> None:
        """Lay the tables out anew if they were moved or cast one by one."""
        base, step = self.storage.data_ptr(), self.storage.shape[1] * self.storage.element_size()
        weights = self.weights()
        if [weight.data_ptr() for weight in weights] != [base + start * step for start in self.starts.values()]:
            if self.collects:
                raise ConfigError("the tables moved after their optimizer was made: move the model first")
            self._lay_out(weights[0].device)
        elif self._laid_out:
            self._laid_out = weights

    def is_replaced(self) -> bool:
        """Whether a transform of `torch.func` is under way, or other tensors are in the place of weights, as in
        `torch.func.functional_call`: tables are then looked up one by one."""
        if not self._laid_out:
            return False
        if transforms():
            return True
        weights = self.weights()
        if all(map(is_, weights, self._laid_out)):
            return False
        if self.collects and torch.is_grad_enabled():
            known = {id(weight) for weight in self._laid_out}
            if any(isinstance(weight, nn.Parameter) and id(weight) not in known for weight in weights):
                raise ConfigError(
                    "parameters were put in the place of packed tables' weights after their optimizer was made: make "
                    "the Optimizers anew, or give torch.func.functional_call tensors that are no Parameters"
                )
        return True

    # --- gradients ---------------------------------------------------------------------------------------------------

    def collect(self, gradient: RowGradient) -> None:
        """Take the gradient of a lookup."""
        self.collected().append(gradient)

    def collected(self) -> list[RowGradient]:
        """`gradients`, without those of tables whose `weight.grad` was set to None since they were collected."""
        weights = self.weights()
        if not self._stand_ins or not all(map(is_, [weight.grad for weight in weights], self._stand_ins)):
            self._renew(weights)
        return self.gradients

    def _renew(self, weights: Sequence[Tensor]) -> None:
        """Drop the gradients that no `weight.grad` stands for, adopt those found in its place, and stand in anew."""
        for name, weight in zip(self.tables, weights, strict=True):
            if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
                raise ConfigError(
                    f"the weight of table '{name}' has a hook for its gradient, which is not called where gradients "
                    f"are collected by row: remove it, or build EmbeddingBags with fused=False"
                )
        if not self._stand_ins:
            self._stand_ins = [CollectedGradient(self, n, w) for n, w in zip(self.tables, weights, strict=True)]
        others = {
            name: weight.grad
            for name, weight, stand_in in zip(self.tables, weights, self._stand_ins, strict=True)
            if weight.grad is not stand_in
        }
        self.drop_gradients(others)
        for weight, stand_in in zip(weights, self._stand_ins, strict=True):
            weight.grad = stand_in
        for name, grad in others.items():
            if grad is not None:
                self.adopt_gradient(name, grad)

    def drop_gradients(self, names: Collection[str]) -> None:
        """Drop what was collected for these tables."""
        if len(names) == len(self.tables):
            self.gradients.clear()
        elif self.gradients:
            self.gradients = [self.without(gradient, names) for gradient in self.gradients]

    def without(self, gradient: RowGradient, names: Collection[str]) -> RowGradient:
        """A gradient without the rows of these tables."""
        self._require_rows_by_table()
        ids, keep = gradient.ids, torch.ones_like(gradient.ids, dtype=torch.bool)
        for name in names:
            start = self.starts[name]
            keep &= (ids < start) | (ids >= start + self.tables[name].num_rows)
        bag_of = torch.arange(ids.numel(), device=ids.device) if gradient.bag_of is None else gradient.bag_of
        weights = None if gradient.weights is None else gradient.weights[keep]
        return RowGradient(ids[keep], gradient.grad, bag_of[keep], weights)

    def adopt_gradient(self, name: str, grad: Tensor) -> None:
        """Collect a gradient of a table's weight that autograd computed outside of the pack, sparse or dense."""
        self._require_rows_by_table()
        if grad.is_sparse:
            ids, values = grad._indices()[0], grad._values()
        else:
            ids, values = torch.arange(grad.shape[0], device=grad.device), grad
        self.gradients.append(RowGradient(ids + self.starts[name], values.contiguous()))

    def summed_rows(self, name: str) -> tuple[Tensor, Tensor]:
        """[U] touched rows of a table and their gradients [U, dim], a view of what the optimizer will apply."""
        if not self.gradients:
            empty = torch.empty(0, dtype=torch.int64, device=self.storage.device)
            return empty, self.storage.new_empty(0, self.storage.shape[1])
        self._require_rows_by_table()
        if len(self.gradients) > 1 or not self.gradients[0].is_summed:
            self.gradients = [RowGradient(*sum_by_row(join(self.gradients)), is_summed=True)]
        (gradient,) = self.gradients
        start = self.starts[name]
        ends = torch.tensor([start, start + self.tables[name].num_rows], device=gradient.ids.device)
        first, last = torch.searchsorted(gradient.ids, ends).tolist()
        return gradient.ids[first:last] - start, gradient.grad[first:last]

    def _require_rows_by_table(self) -> None:
        if type(self) is not DensePack:
            raise ConfigError(
                "gradients of tables whose rows are in several places cannot be read, dropped or frozen one table at a "
                "time: use the clip and zero_grad of Optimizers"
            )

    @property
    def mean(self) -> bool:
        """Whether bags are averaged rather than summed; the same for all tables of a pack."""
        return next(iter(self.tables.values())).mode == "mean"

    @property
    def fits_kernels(self) -> bool:
        """Whether the Triton kernels read this storage."""
        return self.storage.dtype in (torch.float32, torch.bfloat16, torch.float16) and self.storage.shape[1] <= 4096

    def start_tensor(self, names: Sequence[str], device: torch.device) -> Tensor:
        """First row of each of these tables; cached, because making it on a GPU waits for the GPU.

        int32 on a GPU when every row number fits: half the bytes to sort.
        """
        key = (tuple(names), device)
        if key not in self._start_tensors:
            narrow = device.type != "cpu" and self.storage.shape[0] < 2**31
            dtype = torch.int32 if narrow else torch.int64
            self._start_tensors[key] = torch.tensor([self.starts[name] for name in names], dtype=dtype, device=device)
        return self._start_tensors[key]

    def locate(self, ids: Tensor, names: Sequence[str], which: Tensor | None = None) -> Tensor:
        """Row numbers of the storage for ids whose last dimension runs over these tables, or table `which[l]` for id l.

        int32 where `start_tensor` is and the ids are.
        """
        starts = self.start_tensor(names, ids.device)
        return ids + (starts if which is None else starts[which])

    def row_numbers(self, rows: Tensor) -> Tensor:
        """Located rows as a kernel takes them: contiguous, and int32 when every row number fits."""
        return rows.to(torch.int32 if self.storage.shape[0] < 2**31 else torch.int64).contiguous()

    def allocate_slots(self, make: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Allocate optimizer state; `make` returns tensors with one row for each row of the tensor it is given."""
        self.slots = make(self.storage)
        return self.slots

    def slot_views(self, name: str) -> dict[str, Tensor]:
        """Optimizer state of a table's rows, by kind."""
        return {slot: self.view(state, name) for slot, state in self.slots.items()}

    def view(self, packed: Tensor, name: str) -> Tensor:
        """Rows of table `name` in a tensor laid out like the storage, such as its optimizer state."""
        return packed[self.starts[name] : self.starts[name] + self.tables[name].num_rows]


def pack_tables(
    tables: Mapping[str, Table], generator: torch.Generator | None, device: torch.device | str
) -> list[DensePack]:
    """Packs of the dense tables among `tables`, one for each type and mode.

    Tables with a padding row, and those that take the maximum of a bag, stay unpacked. Tables on `meta` get their rows
    on `device`; others stay where they are.
    """
    groups: dict[tuple[torch.dtype, str], dict[str, DenseTable]] = {}
    for name, table in tables.items():
        if type(table) is DenseTable and table.mode != "max" and table.padding_idx is None:
            groups.setdefault((table.weight.dtype, table.mode), {})[name] = table
    packs = []
    for group in groups.values():
        first = next(iter(group.values())).weight
        packs.append(DensePack(group, generator, device if first.is_meta else first.device))
    return packs
