"""Rows of a tensor train or ring: `row = trace(G1[i1] G2[i2] ... GN[iN])`, one chain of small products per id.

Core k is a tensor [n_k, r_(k-1), d_k, r_k]; a train has r_0 = r_N = 1, a ring any r_0 = r_N. The id is read as
mixed-radix digits (i1, ..., iN) of (n_1, ..., n_N), the first the most significant, and the row's dim is split as
(d_1, ..., d_N), the first the slowest. So ids next to each other share the prefix (i1, ..., i(N-1)); where ids are in
popularity order, the popular ones share few prefixes.

Two paths to the same rows:

reference  Gathers every id's core slices and multiplies them. Simple, and differentiable any number of times.
fast       Computes each distinct prefix once, in both passes (Eff-TT of EL-Rec). Prefixes with the same last digit use
           the same core slice: they are laid out side by side, so that one batched product per core computes them all
           and sums the gradient of the slice. Neither a core slice nor its gradient is ever
           copied per id. With P distinct prefixes of U distinct ids, three cores of rank R and dim = d1*d2*d3, the
           forward takes 2*R*(P*d1*d2*R + U*dim) flops, the backward twice that.

`holdall.kernels.tensor_train_triton` is the fast path in Triton, for trains of three cores on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from holdall.common.eager import eager, has_values, transforms
from holdall.kernels.dispatch import Path as KernelPath
from holdall.kernels.dispatch import takes_triton
from holdall.kernels.second_derivative import gradients_of_reference, records_gradients

Path = Literal["auto", "reference", "fast", "triton"]

# Most elements that the gathered prefixes of one block of ids may have: 64 MB in float32.
BLOCK_ELEMENTS = 2**24
# Up to this many elements of core slices, gathering them costs less than finding prefixes: measured, 64 ids at
# rank 32 (dim 64) or 1,000 at rank 8, forward and backward alike.
REFERENCE_ELEMENTS = 2**18
# What copying a core slice (twice) and adding its gradient costs, in products of the slice with one row. With ranks 16,
# 32 and 64 and batches of 512 and 4,096 ids, Zipf and uniform, a step took at most 15% more than with the best of ten
# widths, and up to ten times less than with the worst.
EXTRA_GROUP_COST = 16


def row_digits(ids: Tensor, row_shape: Sequence[int]) -> list[Tensor]:
    """Mixed-radix digits of ids, most significant first; exact for any int64."""
    digits = []
    for size in reversed(row_shape[1:]):
        digits.append(ids % size)
        ids = ids // size
    return [ids, *reversed(digits)]


def tensor_train_rows(ids: Tensor, cores: Sequence[Tensor], path: Path = "auto") -> Tensor:
    """Rows [U, d_1*...*d_N] of 1-D int64 ids, which may repeat and come in any order.

    `auto` takes Triton's kernels where they are available (`kernel_path`) and fit, else the fast path for all but a
    few ids. Both compute in the type of the cores, also under autocast, and have second derivatives (the reference's).
    """
    if ids.numel() == 0 or transforms() or not has_values(ids):
        return reference_rows(ids, cores)
    if uses_triton(cores, path):
        return triton_vectors(ids, [cores])
    if path == "auto":
        num_elements = ids.numel() * max(core[0].numel() for core in cores)
        path = "reference" if num_elements <= REFERENCE_ELEMENTS else "fast"
    return reference_rows(ids, cores) if path == "reference" else _fast_rows(ids, *cores)


def uses_triton(cores: Sequence[Tensor], path: Path = "auto") -> bool:
    """Whether Triton's kernels compute the rows of this train; an error where they are required and cannot."""
    if path in ("reference", "fast"):
        return False
    choice: KernelPath | None = "triton" if path == "triton" else None
    return takes_triton("the tensor-train lookup", cores[1], choice, fits=_fits_triton(cores))


def _fits_triton(cores: Sequence[Tensor]) -> bool:
    """Whether these are three float32 cores on one device, of a train and no ring, with dims that fit a tile."""
    if len(cores) != 3 or cores[0].shape[1] != 1 or cores[2].shape[3] != 1:
        return False
    d1, d2, d3 = (core.shape[2] for core in cores)
    small = d1 <= 32 and d1 * d2 <= 128 and d3 <= 128 and d1 * d2 * d3 <= 2048
    return small and all(core.dtype == torch.float32 and core.device == cores[0].device for core in cores)


@eager  # Triton's launches are not traced
def triton_vectors(
    ids: Tensor,
    trains: Sequence[Sequence[Tensor]],
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    mean: bool = False,
) -> Tensor:
    """`tensor_train_triton.train_vectors`: rows, or bags, of one train or several in one call."""
    from holdall.kernels.tensor_train_triton import train_vectors

    return train_vectors(ids, trains, offsets, weights, mean=mean)


def reference_rows(ids: Tensor, cores: Sequence[Tensor]) -> Tensor:
    """The definition, one chain of products per id."""
    slices = [core[digit] for core, digit in zip(cores, row_digits(ids, [len(core) for core in cores]), strict=True)]
    product = slices[0]
    for factor in slices[1:]:
        product = torch.einsum("uaxr,urys->uaxys", product, factor).flatten(2, 3)
    return torch.einsum("uaxa->ux", product)


@eager  # the layout depends on the ids
def _fast_rows(ids: Tensor, *cores: Tensor) -> Tensor:
    if ids.numel() > 1 and not bool((ids[1:] > ids[:-1]).all()):
        ids, inverse = torch.unique(ids, return_inverse=True)
        return F.embedding(inverse, _fast_rows(ids, *cores))
    prefix_elements = prod(core.shape[2] for core in cores[:-1]) * cores[-1].shape[1] * cores[-1].shape[3]
    blocks = ids.split(max(1, BLOCK_ELEMENTS // prefix_elements))
    rows = [_PrefixProducts.apply(block, *cores) for block in blocks]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


@dataclass(frozen=True)
class _Sum:
    """Sums of rows of a matrix into the rows of another: an `embedding_bag` without weights."""

    order: Tensor
    offsets: Tensor

    @classmethod
    def by(cls, targets: Tensor, num_targets: int, sources: Tensor | None = None) -> _Sum:
        """Add row `sources[j]` (row j when None) to row `targets[j]`."""
        ordered, order = torch.sort(targets, stable=True)
        offsets = torch.searchsorted(ordered, torch.arange(num_targets, device=targets.device))
        return cls(order if sources is None else sources[order], offsets)

    def __call__(self, matrix: Tensor) -> Tensor:
        # Ten times faster than index_add_ on the CPU, and deterministic everywhere.
        return F.embedding_bag(self.order, matrix.flatten(1), self.offsets, mode="sum")


@dataclass(frozen=True)
class _Level:
    """Layout of the distinct prefixes that end at one inner core: groups of `width` slots, one digit a group.

    The first groups are those of digits 0, 1, 2, ... and use the core without a copy; the `extra` groups after them, of
    digits with more prefixes than `width`, use copies of its slices. Where most digits are absent all groups are extra.
    Slots without a prefix get a product that nothing reads, and their gradient is zero.
    """

    width: int
    num_direct: int
    extra: Tensor
    """Digit of every extra group."""
    parent: Tensor
    """Slot, in the level before, of the prefix that each slot extends."""
    to_parent: _Sum

    @classmethod
    def of(cls, digit: Tensor, parent: Tensor, size: int, before: Tensor) -> tuple[_Level, Tensor]:
        """The level of prefixes with last digits `digit` < size that extend slots of `before`; the slot of each."""
        counts = torch.bincount(digit, minlength=size)
        direct = 2 * int(torch.count_nonzero(counts)) >= size
        width = _best_width(counts, direct, before.shape[1])
        extras = (counts + (width - 1)) // width
        if direct:
            extras = (extras - 1).clamp_(min=0)
        ends = extras.cumsum(0)
        extra = torch.repeat_interleave(torch.arange(size, device=digit.device), extras)
        num_direct = size if direct else 0

        ordered, order = torch.sort(digit, stable=True)
        rank = torch.arange(len(digit), device=digit.device) - (counts.cumsum(0) - counts)[ordered]
        group = (ends - extras + num_direct)[ordered] + rank // width
        if direct:
            group = torch.where(rank < width, ordered, group - 1)
        slot = torch.empty_like(digit)
        slot[order] = group * width + rank % width
        parents = torch.zeros((num_direct + len(extra)) * width, dtype=torch.int64, device=digit.device)
        parents[slot] = parent
        return cls(width, num_direct, extra, parents, _Sum.by(parent, len(before), slot)), slot

    def gathered(self, before: Tensor) -> Tensor:
        """The prefixes to extend, [groups, width*A, r]."""
        return _take(before, self.parent).view(-1, self.width * before.shape[1], before.shape[2])

    def parts(self, core: Tensor) -> list[tuple[slice, Tensor]]:
        """Groups and their core slices [groups, r, d*s]: the direct ones, then the extra ones."""
        parts = []
        if self.num_direct:
            parts.append((slice(0, self.num_direct), core.flatten(2)))
        if len(self.extra):
            parts.append((slice(self.num_direct, None), _take(core.flatten(2), self.extra)))
        return parts

    def product(self, before: Tensor, core: Tensor) -> Tensor:
        """Prefix products of this level, [slots, A*d, s], from those before [.., A, r] and the core [n, r, d, s]."""
        gathered = self.gathered(before)
        product = core.new_empty(*gathered.shape[:2], core[0, 0].numel())
        for part, slices in self.parts(core):
            torch.bmm(gathered[part], slices, out=product[part])
        return product.view(len(self.parent), -1, core.shape[3])

    def gradients(self, grad: Tensor, before: Tensor, core: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the products before (flattened) and of the core, from that of this level's products."""
        gathered = self.gathered(before)
        grad = grad.view(*gathered.shape[:2], -1)
        grad_core = core.new_empty(core.shape) if self.num_direct else core.new_zeros(core.shape)
        grad_gathered = torch.empty_like(gathered)
        for part, slices in self.parts(core):
            torch.bmm(grad[part], slices.mT, out=grad_gathered[part])
            if part.start == 0 and self.num_direct:
                torch.bmm(gathered[part].mT, grad[part], out=grad_core.flatten(2))
            else:
                grad_core.flatten(2).index_add_(0, self.extra, torch.bmm(gathered[part].mT, grad[part]))
        return self.to_parent(grad_gathered.view(len(self.parent), -1)), grad_core


def _best_width(counts: Tensor, direct: bool, num_prefix_rows: int) -> int:
    """The width that costs least: every slot is multiplied, used or not, and extra groups copy core slices."""
    frequency = torch.bincount(counts)
    most = len(frequency) - 1
    widths = torch.tensor(sorted({-int(-most // 2 ** (j / 2)) for j in range(2 * most.bit_length() + 1)}))
    widths = widths.to(counts.device)[:, None]
    count = torch.arange(len(frequency), device=counts.device)
    groups = (count + widths - 1) // widths
    extra = (groups - 1).clamp_(min=0) if direct else groups
    slots = widths * (groups.clamp(min=1) if direct else groups)
    cost = ((slots * num_prefix_rows + EXTRA_GROUP_COST * extra) * frequency).sum(1)
    return int(widths[cost.argmin()])


class _PrefixProducts(torch.autograd.Function):
    """Rows of strictly increasing ids, level by level: prefixes (i1), (i1, i2), ..., then the ids themselves."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, *cores: Tensor) -> Tensor:
        sizes = [len(core) for core in cores]
        digits = row_digits(ids, sizes)
        prefixes, extends = _distinct_prefixes(ids, sizes)
        with torch.autocast(ids.device.type, enabled=False):
            product, slot = cores[0].flatten(1, 2), prefixes[0]  # the first level is the first core itself
            products, levels = [], []
            for k in range(1, len(cores) - 1):
                level, next_slot = _Level.of(prefixes[k] % sizes[k], slot[extends[k - 1]], sizes[k], product)
                levels.append(level)
                products.append(product)
                product, slot = level.product(product, cores[k]), next_slot
            prefix, last = _closed(product, cores[0].shape[1]), _closing(cores[-1])
            slot = slot[extends[-1]]
            taken = _take(prefix, slot, out=_scratch(prefix, len(ids)))
            rows = torch.bmm(_take(last, digits[-1]), taken.mT)  # [U, d_N, d_1*...*d_(N-1)]
        ctx.levels, ctx.slot, ctx.digit = levels, slot, digits[-1]
        ctx.save_for_backward(*cores, *products, prefix, last, ids)
        return rows.mT.reshape(len(ids), -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        levels = ctx.levels
        num_cores = len(levels) + 2
        cores, products = ctx.saved_tensors[:num_cores], ctx.saved_tensors[num_cores:-3]
        prefix, last, ids = ctx.saved_tensors[-3:]
        if records_gradients():
            needed = ctx.needs_input_grad[1:]
            return None, *gradients_of_reference(lambda *train: reference_rows(ids, train), cores, needed, grad)
        grad = grad.reshape(len(grad), -1, last.shape[1])
        scratch = _scratch(prefix, len(grad))
        grad_last = torch.bmm(grad.mT.contiguous(), _take(prefix, ctx.slot, out=scratch))
        grads = [_unclosing(_Sum.by(ctx.digit, len(last))(grad_last), cores[-1])]
        grad = torch.bmm(grad, _take(last, ctx.digit), out=scratch)
        grad = _Sum.by(ctx.slot, len(prefix))(grad)
        grad = _unclosed(grad, prefix, cores[0].shape[1])
        for level, core, product in zip(reversed(levels), reversed(cores[1:-1]), reversed(products), strict=True):
            grad, grad_core = level.gradients(grad, product, core)
            grads.append(grad_core)
        grads.append(grad.reshape(cores[0].shape))
        return None, *reversed(grads)


def _distinct_prefixes(ids: Tensor, sizes: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Distinct prefixes of length 1, 2, ..., N-1 as numbers, and for each length the prefix that longer ones extend.

    Ids increase, so equal prefixes are next to each other.
    """
    prefixes: list[Tensor] = []
    extends: list[Tensor] = []
    for size in reversed(sizes[1:]):
        ids, inverse = torch.unique_consecutive(ids // size, return_inverse=True)
        prefixes.insert(0, ids)
        extends.insert(0, inverse)
    return prefixes, extends


def _take(tensor: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """`tensor[index]`, along rows."""
    if out is not None:
        torch.index_select(tensor.flatten(1), 0, index, out=out.flatten(1))
        return out
    return F.embedding(index, tensor.flatten(1)).view(len(index), *tensor.shape[1:])


_buffers = threading.local()


def _scratch(like: Tensor, num_rows: int) -> Tensor:
    """Scratch buffer for `num_rows` rows of `like`, the same memory at every call in this thread.

    The prefixes gathered for every id are the largest thing here, and fresh pages for them at every step cost more than
    all the arithmetic. At most `BLOCK_ELEMENTS` are kept. torch's allocator does this by itself on other devices.
    """
    shape = (num_rows, *like.shape[1:])
    if like.device.type != "cpu":
        return like.new_empty(shape)
    kept = getattr(_buffers, "kept", None)
    if kept is None:
        kept = _buffers.kept = {}
    buffer = kept.get(like.dtype)
    if buffer is None or buffer.numel() < prod(shape):
        buffer = kept[like.dtype] = like.new_empty(prod(shape))
    return buffer[: prod(shape)].view(shape)


# A ring closes between its last core and its first: its rank r_0 is summed along with r_(N-1). With r_0 = 1 these four
# are views.


def _closed(product: Tensor, r0: int) -> Tensor:
    """Prefix products [S, r_0*D, r] as [S, D, r_0*r]."""
    return product.unflatten(1, (r0, -1)).transpose(1, 2).reshape(len(product), -1, r0 * product.shape[2])


def _unclosed(grad: Tensor, prefix: Tensor, r0: int) -> Tensor:
    """A gradient of `_closed`'s result as one of its input, flattened [S, r_0*D*r]."""
    return grad.view(len(prefix), prefix.shape[1], r0, -1).transpose(1, 2).reshape(len(prefix), -1)


def _closing(core: Tensor) -> Tensor:
    """The last core [n, r, d, r_0] as [n, d, r_0*r]."""
    return core.permute(0, 2, 3, 1).reshape(len(core), core.shape[2], -1)


def _unclosing(grad: Tensor, core: Tensor) -> Tensor:
    """A gradient of `_closing`'s result as one of the core."""
    _, r, d, r0 = core.shape
    return grad.view(-1, d, r0, r).permute(0, 3, 1, 2).contiguous()
