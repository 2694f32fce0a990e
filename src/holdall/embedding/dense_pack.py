"""Dense tables of one dim and type, end to end in one storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.kernels.row_gradient import RowGradient
from holdall.tables import Table
from holdall.tables.dense import DenseTable


class DensePack:
    """Dense tables of one dim and type, end to end in one storage [R, dim]; each keeps its `weight`, a view of it."""

    vector_dtype: torch.dtype | None = None
    """Type of looked-up vectors and of their gradients; that of the storage when None."""
    pin_output = False
    """Whether looked-up vectors are written to pinned memory, from which a GPU copies at full speed."""

    def __init__(self, tables: Mapping[str, DenseTable], generator: torch.Generator | None, device: torch.device | str):
        self.tables = dict(tables)
        self.collects = False
        """Set by the optimizer that consumes `gradients`; without one, gradients go to `weight.grad` as usual."""
        self.gradients: list[RowGradient] = []
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

    def repack(self) -> None:
        """Lay the tables out anew if they were moved or cast one by one."""
        base, step = self.storage.data_ptr(), self.storage.shape[1] * self.storage.element_size()
        weights = {name: table.weight for name, table in self.tables.items()}
        if any(weight.data_ptr() != base + self.starts[name] * step for name, weight in weights.items()):
            if self.collects:
                raise ConfigError("the tables moved after their optimizer was made: move the model first")
            self._lay_out(next(iter(weights.values())).device)

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
