"""Stand-ins for `nn.Embedding`, `nn.EmbeddingBag` and their functions that look up a dense table of Holdall.

They have torch's constructors and attributes, so that torch's own tests run on them. Rows that only torch can hold or
renormalise are left to torch: `REASONS_LEFT_TO_TORCH` has the options. Each lookup is recorded, to be compared with
the other methods later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.common.errors import HoldallError
from holdall.tables import Dense, Table

REASONS_LEFT_TO_TORCH = {
    "max_norm": "renormalises rows in the forward pass",
    "scale_grad_by_freq": "scales gradients by how often an id occurs",
}


class RefusedError(ValueError, NotImplementedError, AssertionError, IndexError):
    """A refusal of Holdall, in every class that torch refuses the same call with."""


@dataclass
class Lookup:
    """A lookup of a test: sizes and options of the table, and its arguments."""

    kind: str
    num_rows: int
    dim: int
    dtype: torch.dtype
    options: dict[str, Any]
    arguments: tuple[Tensor | None, ...]


@dataclass
class Record:
    """Lookups of the tests that ran, in order."""

    lookups: list[Lookup] = field(default_factory=list)
    left_to_torch: int = 0

    def add(self, kind: str, table: Table, *arguments: Tensor | None) -> None:
        if torch.compiler.is_compiling() or table.device.type == "meta":
            return
        options = {
            "mode": table.mode,
            "padding_idx": table.padding_idx,
            "include_last_offset": table.include_last_offset,
        }
        copies = tuple(None if one is None else one.detach().clone() for one in arguments)
        dtype = next(table.parameters()).dtype
        self.lookups.append(Lookup(kind, table.num_rows, table.dim, dtype, options, copies))


RECORD = Record()


@contextmanager
def refusals() -> Iterator[None]:
    """Turn refusals of Holdall into errors that torch's tests accept."""
    try:
        yield
    except HoldallError as error:
        raise RefusedError(str(error)) from error


def _needs_torch(options: dict[str, Any]) -> bool:
    return any(options.get(name) for name in REASONS_LEFT_TO_TORCH)


class _StandIn(nn.Module):
    """What both have: a table whose rows are `weight`, and a constructor from given rows."""

    table: Table

    def _make(self, num_rows: int, dim: int, weight: Tensor | None, freeze: bool, options: dict[str, Any]) -> None:
        with refusals(), torch.random.fork_rng(devices=[]):
            self.table = Dense().build(num_rows, dim, **_given(options))
        self.num_embeddings, self.embedding_dim = num_rows, dim
        if weight is None:  # torch's rows: tests of 16 bits pass with some random numbers and fail with others
            padding = self.table.padding_idx
            own = nn.Embedding(num_rows, dim, padding, dtype=options["dtype"], device=options["device"])
            weight = own.weight.detach()
        self.table.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point() and not freeze)

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "padding_idx", "mode", "include_last_offset"):
            return getattr(self.table, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            self.table.weight = value
        else:
            super().__setattr__(name, value)


def _build_options(sparse: bool, dtype: torch.dtype | None, device: Any, weight: Tensor | None) -> dict[str, Any]:
    """Options of a table that torch's constructors have too."""
    if weight is not None:
        dtype, device = weight.dtype, weight.device
    return {"dtype": dtype or torch.get_default_dtype(), "device": device, "sparse": sparse}


class Embedding(_StandIn):
    """`nn.Embedding` whose rows are those of a dense table."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        if _needs_torch(options):
            RECORD.left_to_torch += 1
            return nn.Embedding(*arguments, **options)
        return super().__new__(cls)

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False, _weight: Tensor | None = None,
        _freeze: bool = False, device: Any = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        options = {**_build_options(sparse, dtype, device, _weight), "padding_idx": padding_idx}
        self._make(num_embeddings, embedding_dim, _weight, _freeze, options)

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, **options: Any) -> Any:
        return cls(*embeddings.shape, _weight=embeddings.detach(), _freeze=freeze, **options)

    def forward(self, input: Tensor) -> Tensor:
        RECORD.add("embedding", self.table, input)
        with refusals():
            return self.table.rows(input)


class EmbeddingBag(_StandIn):
    """`nn.EmbeddingBag` whose rows are those of a dense table."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        if _needs_torch(options):
            RECORD.left_to_torch += 1
            freeze = options.pop("_freeze", False)
            return nn.EmbeddingBag(*arguments, **options).requires_grad_(not freeze)
        return super().__new__(cls)

    def __init__(
        self, num_embeddings: int, embedding_dim: int, max_norm: float | None = None, norm_type: float = 2.0,
        scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, _weight: Tensor | None = None,
        include_last_offset: bool = False, padding_idx: int | None = None, device: Any = None,
        dtype: torch.dtype | None = None, _freeze: bool = False,
    ):  # fmt: skip
        super().__init__()
        options = {
            **_build_options(sparse, dtype, device, _weight),
            "mode": mode, "include_last_offset": include_last_offset, "padding_idx": padding_idx,
        }  # fmt: skip
        self._make(num_embeddings, embedding_dim, _weight, _freeze, options)

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, **options: Any) -> Any:
        return cls(*embeddings.shape, _weight=embeddings.detach(), _freeze=freeze, **options)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        RECORD.add("embedding_bag", self.table, input, offsets, per_sample_weights)
        with refusals():
            return self.table(input, offsets, per_sample_weights)


def embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """`F.embedding` of the rows of a dense table whose parameter is `weight`."""
    given = {"padding_idx": padding_idx, "max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq}
    if _needs_torch(given) or weight.dim() != 2:
        RECORD.left_to_torch += 1
        return F.embedding(input, weight, norm_type=norm_type, sparse=sparse, **given)
    with refusals():
        table = _empty_table(weight, sparse=sparse, padding_idx=padding_idx)
    RECORD.add("embedding", table, input)
    with refusals():
        return torch.func.functional_call(_Rows(table), {"table.weight": weight}, (input,))


def embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None,
    norm_type: float = 2, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """`F.embedding_bag` of a dense table whose parameter is `weight`."""
    if _needs_torch({"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq}) or weight.dim() != 2:
        RECORD.left_to_torch += 1
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    options = {"mode": mode, "include_last_offset": include_last_offset, "padding_idx": padding_idx}
    with refusals():
        table = _empty_table(weight, sparse=sparse, **options)
    RECORD.add("embedding_bag", table, input, offsets, per_sample_weights)
    with refusals():
        return torch.func.functional_call(table, {"weight": weight}, (input, offsets, per_sample_weights))


class _Rows(nn.Module):
    """Rows of a table as a module, for `functional_call`."""

    def __init__(self, table: Table):
        super().__init__()
        self.table = table

    def forward(self, input: Tensor) -> Tensor:
        return self.table.rows(input)


def _empty_table(weight: Tensor, **options: Any) -> Table:
    with torch.random.fork_rng(devices=[]):
        return Dense().build(*weight.shape, dtype=weight.dtype, device=weight.device, **_given(options))


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


class Overlay(ModuleType):
    """A module with some of its names replaced, for one importer alone."""

    def __init__(self, base: ModuleType, **replaced: Any):
        super().__init__(base.__name__)
        self.__dict__.update(replaced, _base=base)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def install(module: ModuleType) -> Record:
    """Give a test module the stand-ins in the place of torch's modules and functions, and start a record.

    Only the names `torch`, `nn` and `F` of that module change: the tables themselves call torch's own functions.
    """
    RECORD.lookups, RECORD.left_to_torch = [], 0
    functional = Overlay(F, embedding=embedding, embedding_bag=embedding_bag)
    modules = Overlay(nn, Embedding=Embedding, EmbeddingBag=EmbeddingBag, functional=functional)
    vars(module).update(torch=Overlay(torch, nn=modules), nn=modules, F=functional)
    return RECORD
