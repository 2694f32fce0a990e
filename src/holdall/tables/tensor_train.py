"""Tensor-train table: a row is a chain of small matrix products, one factor for each digit of its id."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from holdall.common.eager import has_values, transforms
from holdall.kernels.repeat_rows import rows_of_distinct
from holdall.kernels.tensor_train import Path, row_digits, tensor_train_rows, triton_vectors, uses_triton
from holdall.tables.fitting import check_shape, relative_error
from holdall.tables.method import Method, TableOptions, dense_std, require
from holdall.tables.table import Table
from holdall.tables.tt_svd import full_ranks, tt_svd

CoreShape = tuple[int, int, int, int]
"""(n_k, r_(k-1), d_k, r_k)."""


@dataclass(frozen=True)
class TensorTrain(Method):
    """`row(id) = G1[i1] G2[i2] ... GN[iN]`, where i1...iN are the mixed-radix digits of the id, most significant first.

    Core k has n_k slices [r_(k-1), d_k, r_k], the dim is d_1*...*d_N, and r_0 = r_N = 1 (TT-Rec, EL-Rec).
    Neighbouring ids share all digits but the last, so in popularity order popular ids share their prefix products.

    Stores the sum of n_k * r_(k-1) * d_k * r_k numbers, for three balanced cores about
    cbrt(num_rows) * cbrt(dim) * rank^2: 3.8 MB for 10M rows of dim 64 at rank 32 (2.6 GB dense). The flops of a lookup
    are in `holdall.kernels.tensor_train`.

    Rows are padded to a full grid. An inner rank is cut where a smaller one already represents every table, so small
    tables never take more than they need.
    """

    name: ClassVar[str] = "tensor_train"

    rank: int
    """Largest inner rank; size and time of a lookup grow with its square."""
    cores: int = 3
    """Factors that ids and the dim are split into."""
    row_shape: tuple[int, ...] | None = None
    """(n_1, ..., n_N) with a product of at least num_rows; balanced when None, the smallest inside."""
    dim_shape: tuple[int, ...] | None = None
    """(d_1, ..., d_N) with product dim; balanced when None, the smallest inside and the largest last."""

    def __post_init__(self) -> None:
        require(_is_count(self.rank), self.name, f"rank must be an integer of at least 1, not {self.rank!r}")
        valid = _is_count(self.cores) and self.cores >= 2
        require(valid, self.name, f"cores must be an integer of at least 2, not {self.cores!r}")
        for what in ("row_shape", "dim_shape"):
            shape = getattr(self, what)
            if shape is None:
                continue
            valid = isinstance(shape, tuple | list) and all(_is_count(size) for size in shape)
            require(valid, self.name, f"{what} must be {self.cores} integers of at least 1, not {shape!r}")
            require(
                len(shape) == self.cores,
                self.name,
                f"{what} {tuple(shape)} has {len(shape)} factors for {self.cores} cores; set cores={len(shape)}",
            )
            object.__setattr__(self, what, tuple(shape))

    def rows_split(self, num_rows: int) -> tuple[int, ...]:
        """(n_1, ..., n_N) for a table of `num_rows` rows."""
        if self.row_shape is None:
            return row_factors(num_rows, self.cores)
        covered = prod(self.row_shape)
        require(
            num_rows <= covered < 2**63,
            self.name,
            f"row_shape {self.row_shape} makes {covered} rows, but the table has {num_rows}; "
            f"{row_factors(num_rows, self.cores)} would do",
        )
        return self.row_shape

    def dim_split(self, dim: int) -> tuple[int, ...]:
        """(d_1, ..., d_N) for rows of `dim` numbers."""
        if self.dim_shape is None:
            return dim_factors(dim, self.cores)
        require(
            prod(self.dim_shape) == dim,
            self.name,
            f"dim_shape {self.dim_shape} makes {prod(self.dim_shape)} numbers per row, but dim is {dim}; "
            f"{dim_factors(dim, self.cores)} would do",
        )
        return self.dim_shape

    def ranks(self, num_rows: int, dim: int) -> tuple[int, ...]:
        """(r_0, ..., r_N): `rank`, or less where one side of the cut has no more rows than that."""
        most = full_ranks(self.rows_split(num_rows), self.dim_split(dim))
        return tuple(min(self.rank, full) for full in most)

    def core_shapes(self, num_rows: int, dim: int) -> list[CoreShape]:
        sizes, dims, ranks = self.rows_split(num_rows), self.dim_split(dim), self.ranks(num_rows, dim)
        return list(zip(sizes, ranks[:-1], dims, ranks[1:], strict=True))

    def num_parameters(self, num_rows: int, dim: int) -> int:
        return sum(prod(shape) for shape in self.core_shapes(num_rows, dim))

    @classmethod
    def for_bytes(cls, num_rows: int, dim: int, num_bytes: int) -> Self:
        """The largest rank that fits with three balanced cores, and no larger than represents every table."""
        smallest = cls(rank=1).num_bytes(num_rows, dim)
        require(
            num_bytes >= smallest,
            cls.name,
            f"a table of {num_rows} rows of dim {dim} takes at least {smallest} bytes (rank 1), not {num_bytes}",
        )
        low, high = 1, max(full_ranks(row_factors(num_rows, 3), dim_factors(dim, 3)))
        while low < high:
            middle = (low + high + 1) // 2
            if cls(rank=middle).num_bytes(num_rows, dim) <= num_bytes:
                low = middle
            else:
                high = middle - 1
        return cls(rank=low)

    def _build(self, num_rows: int, dim: int, options: TableOptions) -> TensorTrainTable:
        return TensorTrainTable(self, num_rows, dim, options)


class TensorTrainTable(Table):
    """`cores`, each [n_k, r_(k-1), d_k, r_k], with dense gradients, as they are small."""

    method: TensorTrain

    def __init__(self, method: TensorTrain, num_rows: int, dim: int, options: TableOptions):
        super().__init__(method, num_rows, dim, options)
        std = dense_std(num_rows) if options.init_std is None else options.init_std
        shapes = method.core_shapes(num_rows, dim)
        self.cores = nn.ParameterList(initial_cores(shapes, std, options))
        self.path: Path = "auto"
        """Path that computes the rows; see `holdall.kernels.tensor_train`."""

    def _rows(self, ids: Tensor) -> Tensor:
        return tensor_train_rows(ids, list(self.cores), self.path)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """As every table; on Triton's path sums and means are computed without synchronizing."""
        pools = self.mode != "max" and self.padding_idx is None and input.numel() > 0
        if not pools or (per_sample_weights is not None and per_sample_weights.requires_grad):
            return super().forward(input, offsets, per_sample_weights)
        if transforms() or not has_values(input) or not uses_triton(list(self.cores), self.path):
            return super().forward(input, offsets, per_sample_weights)
        train, weights = list(self.cores), per_sample_weights
        if offsets is None and weights is None and input.dim() == 2 and input.shape[1] == 1:
            ids = self._checked(input) if self.check_bounds else input  # the kernels take int32 ids
            return triton_vectors(ids.reshape(-1), [train])
        if self.check_bounds or offsets is None:
            input, offsets = self._bags(input, offsets, weights)
        if not self.include_last_offset:
            offsets = nn.functional.pad(offsets, (0, 1), value=input.numel())
        weights = None if weights is None else weights.reshape(-1)
        return triton_vectors(input, [train], offsets, weights, mean=self.mode == "mean").squeeze(1)

    def kernel_group(self) -> Hashable | None:
        if self.padding_idx is not None or self.path not in ("auto", "triton"):
            return None
        if uses_triton(list(self.cores), self.path):
            return ("triton", *((core.shape[2], core.dtype, core.device) for core in self.cores))
        return tuple((tuple(core.shape[1:]), core.dtype, core.device) for core in self.cores)

    @staticmethod
    def rows_many(tables: Sequence[TensorTrainTable], ids: Tensor) -> Tensor:
        """Several trains are one train of concatenated cores, with digits numbered consecutively over tables.

        So the fixed cost of finding prefixes is paid once; joining the cores copies them, a few hundred KB a table.
        Triton's kernels read the cores where they are, whatever their ranks.
        """
        if uses_triton(list(tables[0].cores), tables[0].path):
            return triton_vectors(ids.reshape(-1), [list(table.cores) for table in tables]).view(*ids.shape, -1)
        cores = [torch.cat(parts) for parts in zip(*(table.cores for table in tables), strict=True)]
        starts = [0] * len(cores)
        lines = []
        for table, line in zip(tables, ids, strict=True):
            sizes = [len(core) for core in table.cores]
            joined = torch.zeros_like(line)
            for core, start, digit in zip(cores, starts, row_digits(line, sizes), strict=True):
                joined = joined * len(core) + (digit + start)
            lines.append(joined)
            starts = [start + size for start, size in zip(starts, sizes, strict=True)]
        rows = rows_of_distinct(torch.cat(lines), lambda distinct: tensor_train_rows(distinct, cores))
        return rows.view(*ids.shape, -1)

    @staticmethod
    def pool_many(
        tables: Sequence[TensorTrainTable], ids: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> Tensor | None:
        first = tables[0]
        plain = first.mode == "sum" or (first.mode == "mean" and weights is None)
        if not plain or (weights is not None and weights.requires_grad):
            return None
        if not uses_triton(list(first.cores), first.path):
            return None
        weights = None if weights is None else weights.reshape(-1)
        return triton_vectors(ids, [list(table.cores) for table in tables], offsets, weights, mean=first.mode == "mean")

    @classmethod
    def from_dense(cls, weight: Tensor, table: Table) -> Table:
        """TT-SVD with the table's ranks; within sqrt(cores - 1) of the least error, and exact where that is zero.

        `holdall.tables.tt_svd` has its cost. The scale is then spread evenly over the cores.
        """
        assert isinstance(table, TensorTrainTable)
        check_shape(weight, table)
        table._set_train(fitted_train(weight, table))
        table.fit_error = relative_error(weight, table)
        return table

    @torch.no_grad()
    def _set_train(self, train: list[Tensor]) -> None:
        for core, fitted in zip(self.cores, train, strict=True):
            core.copy_(fitted)


def fitted_train(weight: Tensor, table: TensorTrainTable) -> list[Tensor]:
    """Cores of the tensor train of `table.method.rank` that TT-SVD fits to `weight`, of equal scale, in float64."""
    method = table.method
    sizes, dims = method.rows_split(table.num_rows), method.dim_split(table.dim)
    train = tt_svd(weight, sizes, dims, method.rank, table.device)
    scales = [float(core.square().mean().sqrt()) for core in train]
    if min(scales) == 0.0:
        return train
    even = math.exp(sum(math.log(scale) for scale in scales) / len(scales))
    return [core * (even / scale) for core, scale in zip(train, scales, strict=True)]


def initial_cores(shapes: Sequence[CoreShape], std: float, options: TableOptions) -> Iterator[nn.Parameter]:
    """Cores of equal scale whose rows have mean 0, deviation `std` and an exactly Gaussian shape.

    An entry of a row is linear in every core: the sum of a core's slice [r, s], weighted by the matrix that all other
    cores make. The slices of one core are Gaussian; those of all others are random isometries times a scale, so that
    matrix has the same Frobenius norm for every row, and the sum is Gaussian with the same deviation for every row. The
    Gaussian core is the one with the largest ranks: isometries keep norms from either end up to it.
    """
    ranks = [shape[1] for shape in shapes]
    peak = max(range(1, len(shapes)), key=lambda k: ranks[k])
    gaussian = max((peak - 1, peak), key=lambda k: prod(shapes[k]))
    # An isometry [r, s] times e * sqrt(max(r, s)) has entries of deviation e. A ring adds up r_0 of the products.
    spread = prod(max(r, s) for k, (_, r, _, s) in enumerate(shapes) if k != gaussian) * ranks[0]
    scale = (std / math.sqrt(spread)) ** (1 / len(shapes))
    for k, (n, r, d, s) in enumerate(shapes):
        if k == gaussian:
            core = _normal((n, r, d, s), options) * scale
        else:
            core = _isometries(n * d, r, s, options).view(n, d, r, s).transpose(1, 2)
            core = core * (scale * math.sqrt(max(r, s)))
        yield nn.Parameter(core.contiguous().to(options.dtype))


def _isometries(count: int, r: int, s: int, options: TableOptions) -> Tensor:
    """Random matrices [count, r, s] with orthonormal rows or columns, whichever are fewer.

    A few are drawn and reused, each time with new random signs of its rows and columns: ten times faster.
    """
    if min(r, s) == 1:
        return nn.functional.normalize(_normal((count, r * s), options), dim=1).view(count, r, s)
    drawn = torch.linalg.qr(_normal((min(count, 64), max(r, s), min(r, s)), options)).Q
    drawn = drawn if r >= s else drawn.mT
    index = torch.arange(count, device=drawn.device) % len(drawn)
    of_rows, of_columns = _normal((count, r, 1), options), _normal((count, 1, s), options)
    return drawn[index] * torch.ones_like(of_rows).copysign(of_rows) * torch.ones_like(of_columns).copysign(of_columns)


def _normal(shape: tuple[int, ...], options: TableOptions) -> Tensor:
    dtype = torch.float64 if options.dtype == torch.float64 else torch.float32  # no factorisation below float32
    return torch.empty(shape, dtype=dtype, device=options.device).normal_(generator=options.generator)


def row_factors(num_rows: int, count: int) -> tuple[int, ...]:
    """`count` nearly equal factors whose product just covers `num_rows`, the smallest inside."""
    factors, rest = [], num_rows
    for left in range(count, 0, -1):
        factors.append(_root_above(rest, left))
        rest = -(-rest // factors[-1])
    return _ends_large(factors)


def dim_factors(dim: int, count: int) -> tuple[int, ...]:
    """The `count` factors of `dim` that are nearest to equal, the smallest inside and the largest last."""

    def splits(rest: int, count: int, least: int) -> Iterator[tuple[int, ...]]:
        if count == 1:
            yield (rest,)
            return
        factor = least
        while factor**count <= rest:
            if rest % factor == 0:
                yield from ((factor, *others) for others in splits(rest // factor, count - 1, factor))
            factor += 1

    return _ends_large(min(splits(dim, count, 1), key=sum))


def _ends_large(factors: Sequence[int]) -> tuple[int, ...]:
    """Inner cores cost rank times more than the end cores, and a long last core makes prefixes few and short."""
    *inside, first, last = sorted(factors)
    return (first, *inside, last)


def _root_above(value: int, degree: int) -> int:
    """The smallest integer whose `degree`-th power is at least `value`."""
    root = max(1, round(value ** (1 / degree)))
    while root**degree < value:
        root += 1
    while root > 1 and (root - 1) ** degree >= value:
        root -= 1
    return root


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
