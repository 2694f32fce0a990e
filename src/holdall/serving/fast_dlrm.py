"""Fast path of a DLRM on the CPU for one id per feature: the operations of its forward, fewer and into kept buffers.

Ids become row numbers of one storage, which one gather reads; the dense vector is written beside them. Matrix products
have the shapes and operands of the plain path, so the logits are the same to the bit. At batch 1 it takes 84 us where
the plain path takes 300, and 1,050 with tables in bands (Criteo Kaggle's model, one core).

The storage is the pack of the tables where they are dense. Of tables that are stored otherwise (8 bits, codes, bands),
a prefix of their rows is decoded once, as far as a limit of bytes goes: hot is a prefix. The other rows are decoded at
every lookup. Ids that share the last row of a table need no more than that row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.embedding.dense_pack import DensePack
from holdall.kernels.interaction import interaction_width
from holdall.models import DLRM, Model
from holdall.tables import Table
from holdall.tables.bands import BandsTable
from holdall.tables.bands_lookup import CHEAP
from holdall.tables.shared import SharedTable

DECODED_BYTES = 64 << 20
"""Bytes of decoded rows, of all tables together: a million rows of 16 numbers, decoded in 0.1 s."""
BLOCK_ROWS = 1 << 16
"""Rows that are decoded at a time."""
MAX_ROWS = 4096
"""Samples of the largest batch that takes the fast path: larger ones gain nothing, and buffers take 8 KB a sample."""

Array = npt.NDArray[Any]


class FastDLRM:
    """Logits of a DLRM. One thread may call it at a time; tables must not change after it was made."""

    def __init__(self, model: DLRM, decoded_bytes: int = DECODED_BYTES):
        assert takes(model)
        self._rows = DecodedRows(model.bags, decoded_bytes)
        self._dim, self._num_features = model.bags.dim, model.bags.num_features
        self._bottom = None if model.bottom is None else _layers(model.bottom)
        self._top = _layers(model.top)
        self._num_vectors = self._num_features + (self._bottom is not None)
        self._width = interaction_width(self._num_vectors, self._dim)
        row, column = torch.tril_indices(self._num_vectors, self._num_vectors, -1)
        self._num_pairs = row.numel()
        padding = torch.zeros(self._width - self._dim - self._num_pairs, dtype=torch.int64)
        self._cells = torch.cat([torch.zeros(self._dim, dtype=torch.int64), row * self._num_vectors + column, padding])
        """Cell of the products that is each number of the interaction; any, for those that are not products."""
        rows = [model.bags.table(name).num_rows for name in model.bags.features.values()]
        # A negative id is larger than any other without its sign.
        self._limits = {4: np.minimum(rows, 1 << 31).astype("u4")[:, None], 8: np.array(rows, "u8")[:, None]}
        self._capacity = 0
        self._of_size: dict[int, _Buffers] = {}

    def in_range(self, ids: Ids) -> bool:
        """Whether all ids are rows of their tables: `all_below` without its sums, for small batches."""
        values = ids.values.numpy()
        limits = self._limits[values.itemsize]
        return len(values) == len(limits) and not (values.view(limits.dtype) >= limits).any()

    def __call__(self, dense_BN: Tensor, ids: Ids) -> Tensor:
        """Logits [B] of ids that are rows of their tables, at most `MAX_ROWS` samples."""
        size = dense_BN.shape[0]
        buffers = self._buffers(size)
        self._rows.write(ids.values.t(), buffers)
        vectors_BVD = buffers.vectors
        if self._bottom is not None:
            same = size > 1 and dense_BN.stride(0) == 0  # one row for all samples, expanded
            found = _run(self._bottom, dense_BN[:1], self._buffers(1).bottom) if same else None
            buffers.first.copy_(_run(self._bottom, dense_BN, buffers.bottom) if found is None else found)
        torch.bmm(vectors_BVD, buffers.transposed, out=buffers.products)
        torch.index_select(buffers.cells, 1, self._cells, out=buffers.features)
        buffers.copied.copy_(vectors_BVD[:, 0])
        if buffers.padding is not None:
            buffers.padding.zero_()
        return _run(self._top, buffers.features, buffers.top)[:, 0].clone()

    def _buffers(self, size: int) -> _Buffers:
        """Buffers of a batch of this size, views of those of the largest."""
        found = self._of_size.get(size)
        if found is not None:
            return found
        if size > self._capacity:
            self._capacity = min(MAX_ROWS, 1 << (size - 1).bit_length())
            self._of_size.clear()
            self._whole = self._allocate(self._capacity)
        made = self._of_size[size] = self._views(size)
        return made

    def _allocate(self, size: int) -> list[Tensor]:
        count = self._num_vectors
        bottom = [] if self._bottom is None else [layer.weight_t.shape[1] for layer in self._bottom]
        widths = [count * self._dim, count * count, self._width, *bottom]
        widths += [layer.weight_t.shape[1] for layer in self._top]
        return [torch.zeros(size, count, dtype=torch.int64), *(torch.zeros(size, width) for width in widths)]

    def _views(self, size: int) -> _Buffers:
        numbers, vectors, products, features, *layers = [buffer[:size] for buffer in self._whole]
        bottom = 0 if self._bottom is None else len(self._bottom)
        vectors_BVD = vectors.view(size, self._num_vectors, self._dim)
        used = self._dim + self._num_pairs
        return _Buffers(
            numbers=numbers.view(-1),
            own_numbers=numbers[:, self._num_vectors - self._num_features :],
            rows=vectors.view(-1, self._dim),
            vectors=vectors_BVD,
            transposed=vectors_BVD.transpose(1, 2),
            first=vectors_BVD[:, 0],
            products=products.view(size, self._num_vectors, self._num_vectors),
            cells=products,
            features=features,
            copied=features[:, : self._dim],
            padding=features[:, used:] if used < self._width else None,
            bottom=layers[:bottom],
            top=layers[bottom:],
        )


def takes(model: Model) -> bool:
    """Whether the fast path computes what this model does for one id per feature."""
    if type(model) is not DLRM or model.config.interaction != "dot" or model.bags.output_device is not None:
        return False
    bags = model.bags
    tensors = [*model.parameters(), *model.buffers()]
    dense = [p for mlp in (model.bottom, model.top) if mlp is not None for p in mlp.parameters()]
    if any(tensor.device.type != "cpu" for tensor in tensors) or any(p.dtype != torch.float32 for p in dense):
        return False
    tables = [bags.table(name) for name in bags.features.values()]
    single = bags.vector_dtype == torch.float32 or (
        bags.vector_dtype is None and all(table.row_dtype == torch.float32 for table in tables)
    )
    packs = all(type(pack) is DensePack for pack in bags.packs)
    return single and packs and all(_decodes(table) for table in tables)


def _decodes(table: Table) -> bool:
    """Whether a row is the same to the bit whatever rows are made with it."""
    parts = table.parts if isinstance(table, BandsTable) else [table]
    return table.padding_idx is None and all(isinstance(part, CHEAP) for part in parts)


# --- rows ------------------------------------------------------------------------------------------------------------


class DecodedRows:
    """Rows of the tables in one storage: their pack, or a decoded prefix of each."""

    def __init__(self, bags: EmbeddingBags, decoded_bytes: int):
        names = list(bags.features.values())
        self._tables = [bags.table(name) for name in names]
        self._bands = [_bands(table) for table in self._tables]
        (pack,) = bags.packs if len(bags.packs) == 1 else (None,)
        if pack is not None and pack.storage.dtype == torch.float32 and set(names) <= set(pack.tables):
            pack.repack()
            self._storage = pack.storage.detach()
            self._starts = torch.tensor([pack.starts[name] for name in names])
            self._lasts = self._tail_from = None
            return
        tables = dict(zip(names, self._tables, strict=True))
        needed = {name: _distinct_prefix(table) for name, table in tables.items()}
        kept = shared_out(needed, decoded_bytes // (4 * bags.dim))
        starts = dict(zip(kept, np.cumsum([0, *kept.values()]).tolist(), strict=False))
        self._storage = torch.empty(sum(kept.values()), bags.dim)
        for name, table in tables.items():
            for first in range(0, kept[name], BLOCK_ROWS):
                last = min(first + BLOCK_ROWS, kept[name])
                self._storage[starts[name] + first : starts[name] + last] = table._rows(torch.arange(first, last))
        self._starts = torch.tensor([starts[name] for name in names])
        self._lasts = torch.tensor([kept[name] - 1 for name in names])
        """Last decoded row of each feature, which stands for the ids after it where they share a row."""
        partial = [kept[name] < needed[name] for name in names]
        self._tail_from = None
        """First id of each feature that is not decoded; None if there is none in any."""
        if any(partial):
            ends = [kept[name] if cut else 1 << 62 for name, cut in zip(names, partial, strict=True)]
            self._tail_from = torch.tensor(ends)

    def write(self, ids_BF: Tensor, buffers: _Buffers) -> None:
        """Write the rows of ids into the places of their features."""
        if self._lasts is None:
            torch.add(ids_BF, self._starts, out=buffers.own_numbers)
        else:
            torch.minimum(ids_BF, self._lasts, out=buffers.own_numbers)
            buffers.own_numbers.add_(self._starts)
        torch.index_select(self._storage, 0, buffers.numbers, out=buffers.rows)
        if self._tail_from is not None:
            tail = (ids_BF >= self._tail_from).numpy()
            if tail.any():
                self._write_tail(ids_BF.numpy(), tail, buffers.vectors)

    def _write_tail(self, ids_BF: Array, tail_BF: Array, vectors_BVD: Tensor) -> None:
        """Decode rows that are not in the storage, those of one band together."""
        samples, features = np.nonzero(tail_BF)
        skipped = vectors_BVD.shape[1] - len(self._tables)
        found: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        places = samples * vectors_BVD.shape[1] + features + skipped
        for feature, number, place in zip(
            features.tolist(), ids_BF[samples, features].tolist(), places.tolist(), strict=True
        ):
            starts, _ = self._bands[feature]
            band = bisect_right(starts, number) - 1
            numbers, of = found.setdefault((feature, band), ([], []))
            numbers.append(number - starts[band])
            of.append(place)
        rows = [
            self._bands[f][1][band]._rows(torch.tensor(numbers)).float() for (f, band), (numbers, _) in found.items()
        ]
        where = torch.tensor([place for _, of in found.values() for place in of])
        vectors_BVD.view(-1, vectors_BVD.shape[2]).index_copy_(0, where, torch.cat(rows))


def _bands(table: Table) -> tuple[list[int], list[Table]]:
    """First row of each band of a table, and the tables of the bands."""
    if isinstance(table, BandsTable):
        return [band.start for band in table.bands], table.parts
    return [0], [table]


def _distinct_prefix(table: Table) -> int:
    """Rows from the first on that are all different rows: those after them are the last of these."""
    starts, parts = _bands(table)
    last = parts[-1]
    return starts[-1] + 1 if isinstance(last, SharedTable) and last.num_stored == 1 else table.num_rows


def shared_out(needed: dict[str, int], total: int) -> dict[str, int]:
    """Of a number of rows as many for each table as it needs; where that is too many, equally many for the large ones,
    and at least one for each."""
    found = {}
    for place, name in enumerate(sorted(needed, key=needed.__getitem__)):
        found[name] = max(1, min(needed[name], total // (len(needed) - place)))
        total = max(0, total - found[name])
    return found


# --- layers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    bias: Tensor
    weight_t: Tensor
    relu: bool


@dataclass(frozen=True)
class _Buffers:
    """Views of the buffers for one batch size B; V vectors, those of F features last."""

    numbers: Tensor
    """[B * V] row numbers."""
    own_numbers: Tensor
    """[B, F] those of the features."""
    rows: Tensor
    """[B * V, dim]."""
    vectors: Tensor
    """[B, V, dim]: the same."""
    transposed: Tensor
    first: Tensor
    """[B, dim]: the first vectors."""
    products: Tensor
    """[B, V, V]."""
    cells: Tensor
    """[B, V * V]: the same."""
    features: Tensor
    """[B, width]: the interaction."""
    copied: Tensor
    """[B, dim] of it: the first vector."""
    padding: Tensor | None
    bottom: Sequence[Tensor]
    top: Sequence[Tensor]


def _layers(mlp: nn.Sequential) -> list[_Layer]:
    layers, modules = [], list(mlp)
    for place, module in enumerate(modules):
        if isinstance(module, nn.Linear):
            relu = place + 1 < len(modules) and isinstance(modules[place + 1], nn.ReLU)
            layers.append(_Layer(module.bias.detach(), module.weight.detach().t(), relu))
        else:
            assert isinstance(module, nn.ReLU)
    return layers


def _run(layers: Sequence[_Layer], x: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    for layer, output in zip(layers, outputs, strict=True):
        torch.addmm(layer.bias, x, layer.weight_t, out=output)
        x = output.relu_() if layer.relu else output
    return x
