"""Table of codes: a row is the sum of a few codewords, and an id stores one small code for each of them.

Residual (additive) quantisation of whole rows, as in Chen, Guan and Wang, "Approximate Nearest Neighbor Search by
Residual Vector Quantization", 2010. The first codeword is the nearest to the row, the next the nearest to what is left.
Tables of one model may share one codebook: see `share_codebooks`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.tables.codebook_fit import Sample, encode_with_error, fit_words
from holdall.tables.fitting import block_slices, check_counts, check_shape
from holdall.tables.method import Method, SharedPart, TableOptions, dense_std, require
from holdall.tables.rounding import pack_pairs, unpack_pairs
from holdall.tables.table import Table, adds_sparse_gradients

MAX_PARTS = 64


@dataclass(frozen=True)
class Codes(Method):
    """`row_i = sum over p of words[p, codes[i, p]]`: the codes are found by a fit and stay, the codewords train.

    A row takes `ceil(parts * bits / 8)` bytes, beside a codebook of `parts * 2^bits` codewords of `dim` numbers (at
    most `parts * num_rows` of them where it has no name). In a fresh table the codes are random.
    """

    name: ClassVar[str] = "codes"

    parts: int = 1
    """Codewords that are added up to a row."""
    bits: Literal[8, 4] = 8
    """Bits of a code: 256 or 16 codewords to choose from in each part."""
    codebook: str | None = None
    """Name of a codebook that tables of one model, bits and dim share; a table with fewer parts uses the first ones.
    None: a codebook of its own."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the codewords; that of the table when None."""

    def __post_init__(self) -> None:
        valid = isinstance(self.parts, int) and not isinstance(self.parts, bool) and 1 <= self.parts <= MAX_PARTS
        require(valid, self.name, f"parts must be from 1 to {MAX_PARTS}, not {self.parts!r}")
        require(self.bits in (8, 4), self.name, f"bits must be 8 or 4, not {self.bits!r}")
        named = self.codebook is None or (isinstance(self.codebook, str) and bool(self.codebook))
        require(named, self.name, f"codebook must be a name or None, not {self.codebook!r}")
        known = (None, "float32", "bfloat16", "float16")
        require(self.dtype in known, self.name, f"dtype must be one of {known[1:]}, not {self.dtype!r}")

    @property
    def row_width(self) -> int:
        """Bytes of a row's codes."""
        return -(-self.parts * self.bits // 8)

    def num_words(self, num_rows: int) -> int:
        """Codewords of each part."""
        return 2**self.bits if self.codebook is not None else min(2**self.bits, num_rows)

    def num_parameters(self, num_rows: int, dim: int) -> int:
        return self.parts * self.num_words(num_rows) * dim

    def num_bytes(self, num_rows: int, dim: int, dtype: torch.dtype = torch.float32) -> int:
        return num_rows * self.row_width + self.num_parameters(num_rows, dim) * self.stored(dtype).itemsize

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        """Type of the codewords of a table of type `dtype`."""
        return dtype if self.dtype is None else getattr(torch, self.dtype)

    def shared_parts(self, num_rows: int, dim: int, dtype: torch.dtype = torch.float32) -> dict[Hashable, SharedPart]:
        if self.codebook is None:
            return {}
        numbers, stored = self.num_parameters(num_rows, dim), self.stored(dtype)
        return {("codebook", self.codebook, self.bits, dim, stored): SharedPart(numbers, numbers * stored.itemsize)}

    def _build(self, num_rows: int, dim: int, options: TableOptions) -> CodesTable:
        if self.codebook is None:
            check_codebook(self.parts * self.num_words(num_rows), num_rows, f"a table of {num_rows} rows")
        return CodesTable(self, num_rows, dim, options)

    @classmethod
    def for_bytes(cls, num_rows: int, dim: int, num_bytes: int) -> Codes:
        """The most bytes that fit, of all parts and bits whose codebook is no larger than the dense table."""
        fitting: dict[int, Codes] = {}
        least = None
        for method in (cls(parts, bits) for bits in (8, 4) for parts in range(1, MAX_PARTS + 1)):
            if method.parts * method.num_words(num_rows) <= num_rows:
                size = method.num_bytes(num_rows, dim)
                least = size if least is None else min(least, size)
                if size <= num_bytes:
                    fitting.setdefault(size, method)
        require(bool(fitting), cls.name, f"{num_rows} rows of dim {dim} take at least {least} bytes, not {num_bytes}")
        return fitting[max(fitting)]


def check_codebook(num_words: int, num_rows: int, of: str) -> None:
    """Raise a `ConfigError` if a codebook has more codewords than the tables that it stands for have rows."""
    if num_words > num_rows:
        raise ConfigError(
            f"codes: a codebook of {num_words} codewords is larger than {of} stored densely: use Dense(), Shared() "
            "where a few rows do for all ids, fewer parts or bits, or a codebook=... that larger tables share"
        )


class Codebook(nn.Module):
    """`words` [parts * num_words, dim]: codeword c of part p is row `p * num_words + c`, gathered by row.

    Codebooks that are tied have one parameter, and keep it through casts, moves, copies and loaded state dicts. They
    are modules of their own, because `torch.func.functional_call` does not restore a module that has two places.
    """

    def __init__(self, parts: int, num_words: int, dim: int, dtype: torch.dtype, device: torch.device | str | None):
        super().__init__()
        self.parts, self.num_words = parts, num_words
        self.words = nn.Parameter(torch.empty(parts * num_words, dim, dtype=dtype, device=device))
        self.tied: list[Codebook] = [self]
        """All codebooks that have this parameter; with more than one, the fit of one table keeps the codewords."""

    def by_part(self) -> Tensor:
        """The codewords [parts, num_words, dim], without gradients."""
        return self.words.detach().view(self.parts, self.num_words, -1)

    @torch.no_grad()
    def set_words(self, words: Tensor) -> None:
        """Set all codewords to `words` [parts, num_words, dim]."""
        self.words.copy_(words.reshape(self.words.shape))

    @staticmethod
    def tie(codebooks: list[Codebook]) -> None:
        """Give all of them the codewords of the one with the most parts."""
        widest = max(codebooks, key=lambda codebook: codebook.parts)
        for codebook in codebooks:
            codebook.parts, codebook.tied = widest.parts, codebooks
        widest._spread()

    def _spread(self) -> None:
        for codebook in self.tied:
            codebook._parameters["words"] = self._parameters["words"]

    def _apply(self, fn: Any, recurse: bool = True) -> Codebook:
        super()._apply(fn, recurse)
        self._spread()  # to another kind of device makes a new parameter
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._spread()  # `assign=True` sets another parameter

    def extra_repr(self) -> str:
        return f"{self.parts} x {self.num_words} codewords of dim {self.words.shape[1]}"


class CodesTable(Table):
    """`codes` [num_rows, row_width] uint8, a buffer, and `codebook`, which may be tied to those of other tables."""

    def __init__(self, method: Codes, num_rows: int, dim: int, options: TableOptions):
        super().__init__(method, num_rows, dim, options)
        self.method: Codes = method
        num_words = method.num_words(num_rows)
        self.codebook = Codebook(method.parts, num_words, dim, method.stored(options.dtype), options.device)
        codes = torch.empty(num_rows, method.row_width, dtype=torch.uint8, device=options.device)
        self.register_buffer("codes", codes)
        self.codes: Tensor
        self._initialize(options)

    @torch.no_grad()
    def _initialize(self, options: TableOptions) -> None:
        """Draw codewords whose sums have the deviation of fresh rows, and random codes; none on the meta device."""
        if self.codes.is_meta:
            return
        std = dense_std(self.num_rows) if options.init_std is None else options.init_std
        self.codebook.words.normal_(0.0, std / self.method.parts**0.5, generator=options.generator)
        for place in block_slices(self.num_rows, self.method.parts):
            drawn = self.codes.new_empty(place.stop - place.start, self.method.parts)
            self.set_codes(place, drawn.random_(0, self.codebook.num_words, generator=options.generator))

    def set_codes(self, place: slice | Tensor, codes: Tensor) -> None:
        """Store codes [U, parts] of the rows at `place`."""
        self.codes[place] = codes if self.method.bits == 8 else pack_pairs(codes)

    def places(self, codes: Tensor) -> Tensor:
        """Rows [U, parts] of the codebook that stored codes [U, row_width] name."""
        parts = self.method.parts
        places = (codes if self.method.bits == 8 else unpack_pairs(codes, parts)).long()
        return places if parts == 1 else places + self.codebook.num_words * torch.arange(parts, device=codes.device)

    def rows_of_codes(self, codes: Tensor) -> Tensor:
        """Rows [U, dim] of stored codes [U, row_width]."""
        places, words = self.places(codes), self.codebook.words
        sparse = self.sparse and adds_sparse_gradients(words)
        if self.method.parts == 1:
            return F.embedding(places[:, 0], words, sparse=sparse).to(self.row_dtype)
        return F.embedding(places, words, sparse=sparse).to(self.row_dtype).sum(dim=1)

    def _rows(self, ids: Tensor) -> Tensor:
        return self.rows_of_codes(self.codes.index_select(0, ids))

    def row_parameters(self) -> dict[str, nn.Parameter]:
        return {"codebook.words": self.codebook.words}

    @classmethod
    def from_dense(cls, weight: Tensor, table: Table) -> Table:
        table.fit_rows(weight)
        return table

    @torch.no_grad()
    def fit_rows(self, weight: Tensor, counts: Tensor | None = None) -> None:
        """Residual k-means of a sample of the rows, weighted by `counts`; then every row gets its codes.

        A codebook that other tables have too stays as it is: `fit_tables` fits it to all of them. `fit_error` does not
        weigh rows.
        """
        check_shape(weight, self)
        weights = check_counts(counts, self)
        if len(self.codebook.tied) == 1:
            sample = Sample(self.dim)
            sample.add(weight, weights, self.method.parts)
            self.codebook.set_words(fit_words(sample, self.codebook.parts, self.codebook.num_words))
        self.encode_rows(weight)

    @torch.no_grad()
    def encode_rows(self, weight: Tensor, transform: Tensor | None = None) -> None:
        """Give every row its codes in the codebook as it is, in one pass over `weight`; sets `fit_error`.

        With a `transform` [dim, dim], the nearest codewords, and the error, are those of rows and codewords times it.
        """
        dtype = torch.promote_types(weight.dtype, torch.float32)
        words = self.codebook.by_part()[: self.method.parts].to(dtype)
        if transform is not None:
            transform = transform.to(self.device, dtype)
            words = words @ transform
        missed = total = 0.0
        for place in block_slices(self.num_rows, self.dim):
            rows = weight[place].detach().to(self.device, dtype)
            rows = rows if transform is None else rows @ transform
            codes, squares = encode_with_error(rows, words)
            self.set_codes(place, codes)
            total += float(rows.square().sum(dtype=torch.float64))
            missed += float(squares.sum(dtype=torch.float64))
        self.fit_error = (missed / total) ** 0.5 if total else float("inf") if missed else 0.0


def share_codebooks(tables: Iterable[Table]) -> None:
    """Tie the codebooks of freshly built tables whose `Codes` name the same one, wherever they are inside a table.

    They must agree in bits, dim, type and device. Their rows are no longer those that were drawn or fitted before, so
    share first and fit afterwards (`fit_tables` does both).
    """
    for members in tie_codebooks(tables):
        num_rows = sum(table.num_rows for table in members)
        name, num_words = members[0].method.codebook, len(members[0].codebook.words)
        check_codebook(num_words, num_rows, f"the {num_rows} rows that share codebook '{name}'")


def tie_codebooks(tables: Iterable[Table]) -> list[list[CodesTable]]:
    """`share_codebooks` without a check of the size; returns the tables of codes of each codebook."""
    found: dict[Hashable, list[CodesTable]] = {}
    for table in dict.fromkeys(tables):
        for part in table.modules():
            if isinstance(part, CodesTable) and part.method.codebook is not None:
                words = part.codebook.words
                key = (part.method.codebook, part.method.bits, part.dim, words.dtype, words.device)
                found.setdefault(key, []).append(part)
    for members in found.values():
        Codebook.tie([part.codebook for part in members])
    return list(found.values())
