"""Methods that the behaviour suites run over, small settings of each by a readable name, and tables of them."""

from __future__ import annotations

import torch
from torch import Tensor

from holdall.tables import (
    Bands,
    Clustered,
    Codes,
    Dense,
    Frobenius,
    Hashed,
    HotCold,
    MemCom,
    Method,
    MixedDimension,
    Quantized,
    QuotientRemainder,
    Robe,
    Shared,
    Sketch,
    Table,
    TensorRing,
    TensorTrain,
)

CASES: dict[str, Method] = {
    "dense": Dense(),
    "tensor train": TensorTrain(rank=4),
    "tensor train of two cores": TensorTrain(rank=5, cores=2),
    "tensor train of four cores": TensorTrain(rank=6, cores=4),
    "tensor train as large as dense": TensorTrain(rank=64),
    "tensor ring": TensorRing(rank=3),
    "tensor ring of two cores": TensorRing(rank=2, cores=2),
    "tensor ring of four cores": TensorRing(rank=2, cores=4),
    "frobenius": Frobenius(),
    "frobenius of odd sizes": Frobenius(rank=3, terms=3),
    "frobenius with one term": Frobenius(rank=5, terms=1),
    "frobenius of rank one": Frobenius(rank=1, terms=2),
    "hot and frobenius": HotCold(hot_rows=5, cold=Frobenius(rank=3, terms=2)),
    "hashed": Hashed(buckets=23),
    "hashed identity when small": Hashed(buckets=53, seed=3),
    "quotient remainder product": QuotientRemainder(buckets=10),
    "quotient remainder sum": QuotientRemainder(buckets=30, operation="add"),
    "quotient remainder halves": QuotientRemainder(buckets=10, operation="concat"),
    "memcom": MemCom(buckets=23),
    "memcom with bias": MemCom(buckets=30, bias=True),
    "robe": Robe(size=300, block=4),
    "robe without signs": Robe(size=320, block=5, seed=1, signs=False),
    "sketch": Sketch(dim=3),
    "sketch of chunks": Sketch(dim=5, chunks=3, seed=1),
    "mixed dimension": MixedDimension(dim=3),
    "mixed dimension of one": MixedDimension(dim=1),
    "mixed dimension as wide as dense": MixedDimension(dim=16),
    "mixed dimension of 8 bits": MixedDimension(dim=3, bits=8),
    "mixed dimension on one grid": MixedDimension(dim=3, bits=8, trainable=True),
    "clustered": Clustered(clusters=24),
    "clustered with two-byte assignments": Clustered(clusters=300),
    "quantized 8": Quantized(),
    "quantized 4": Quantized(bits=4),
    "quantized 8 with scales in float16": Quantized(scales="float16"),
    "quantized 4 with scales in bfloat16": Quantized(bits=4, scales="bfloat16"),
    "quantized 4 stochastic": Quantized(bits=4, rounding="stochastic"),
    "quantized trained stochastically": Quantized(rounding="stochastic", trainable=True),
    "quantized 4 trained stochastically": Quantized(bits=4, rounding="stochastic", trainable=True),
    "quantized with learned steps": Quantized(rounding="learned", trainable=True),
    "hot rows and dense": HotCold(hot_rows=5, cold=Dense()),
    "hot share and mixed dimension": HotCold(hot_rows=0.3, cold=MixedDimension(dim=2)),
    "hot and frozen": HotCold(hot_rows=20, cold=Quantized()),
    "hot and stochastic": HotCold(hot_rows=2, cold=Quantized(rounding="stochastic", trainable=True)),
    "hot within hot": HotCold(hot_rows=3, cold=HotCold(hot_rows=0.5, cold=Clustered(clusters=24))),
    "no hot rows": HotCold(hot_rows=0, cold=MixedDimension(dim=3)),
    "hot and tensor train": HotCold(hot_rows=5, cold=TensorTrain(rank=4)),
    "shared": Shared(rows=24),
    "shared with a row for every id": Shared(rows=53),
    "codes": Codes(),
    "codes of three parts": Codes(parts=3, bits=4, codebook="all"),
    "codes of two bytes": Codes(parts=2, codebook="all"),
    "two bands": Bands(((5, Dense()), (None, Shared(rows=30)))),
    "bands of frozen and trained rows": Bands(
        ((2, Quantized()), (5, Quantized(bits=4)), (9, Dense()), (20, Codes(1, 4, "all")), (None, Shared(rows=24)))
    ),
    "bands that share a codebook": Bands(((5, Dense()), (20, Codes(2, 4, "all")), (None, Codes(2, 4, "all")))),
    "bands of stochastic rows": Bands(((3, Dense()), (None, Quantized(rounding="stochastic", trainable=True)))),
    "one band": Bands(((10**9, Clustered(clusters=24)),)),
    "bands that hash": Bands(((7, MemCom(buckets=5)), (20_000, Hashed(buckets=23)), (None, Shared()))),
}

FITTABLE: dict[str, Method] = {
    "dense": Dense(),
    "tensor train": TensorTrain(rank=4),
    "tensor train of two cores": TensorTrain(rank=5, cores=2),
    "tensor train of four cores": TensorTrain(rank=6, cores=4),
    "tensor train as large as dense": TensorTrain(rank=64),
    "frobenius of odd sizes": Frobenius(rank=3, terms=3),
    "frobenius with one term": Frobenius(rank=5, terms=1),
    "frobenius of rank one": Frobenius(rank=1, terms=2),
    "hashed": Hashed(buckets=23),
    "hashed identity when small": Hashed(buckets=53, seed=3),
    "quotient remainder product": QuotientRemainder(buckets=10),
    "quotient remainder sum": QuotientRemainder(buckets=30, operation="add"),
    "quotient remainder halves": QuotientRemainder(buckets=10, operation="concat"),
    "memcom": MemCom(buckets=23),
    "memcom with bias": MemCom(buckets=30, bias=True),
    "robe": Robe(size=300, block=4),
    "robe without signs": Robe(size=320, block=5, seed=1, signs=False),
    "sketch": Sketch(dim=3),
    "sketch of chunks": Sketch(dim=5, chunks=3, seed=1),
    "mixed dimension": MixedDimension(dim=3),
    "mixed dimension of one": MixedDimension(dim=1),
    "mixed dimension as wide as dense": MixedDimension(dim=16),
    "mixed dimension of 8 bits": MixedDimension(dim=3, bits=8),
    "mixed dimension on one grid": MixedDimension(dim=3, bits=8, trainable=True),
    "clustered": Clustered(clusters=24),
    "clustered with two-byte assignments": Clustered(clusters=300),
    "quantized 8": Quantized(),
    "quantized 4": Quantized(bits=4),
    "quantized trained stochastically": Quantized(rounding="stochastic", trainable=True),
    "quantized 4 trained stochastically": Quantized(bits=4, rounding="stochastic", trainable=True),
    "quantized with learned steps": Quantized(rounding="learned", trainable=True),
    "hot rows and dense": HotCold(hot_rows=5, cold=Dense()),
    "hot share and mixed dimension": HotCold(hot_rows=0.3, cold=MixedDimension(dim=2)),
    "hot and frozen": HotCold(hot_rows=20, cold=Quantized()),
    "hot and stochastic": HotCold(hot_rows=2, cold=Quantized(rounding="stochastic", trainable=True)),
    "hot within hot": HotCold(hot_rows=3, cold=HotCold(hot_rows=0.5, cold=Clustered(clusters=24))),
    "no hot rows": HotCold(hot_rows=0, cold=MixedDimension(dim=3)),
    "hot and tensor train": HotCold(hot_rows=5, cold=TensorTrain(rank=4)),
    "shared": Shared(rows=24),
    "codes": Codes(),
    "codes of three parts": Codes(parts=3, bits=4, codebook="all"),
    "bands of frozen and trained rows": CASES["bands of frozen and trained rows"],
    "bands that share a codebook": CASES["bands that share a codebook"],
}
"""Methods with a `from_dense` fit."""

SHAPES = [(37, 8), (101, 1), (64, 16), (1, 4), (53, 12)]
"""(num_rows, dim): prime, odd, tiny and dim 1."""

BAGS = torch.tensor([0, 3, 3, 4, 9])  # with an empty bag in the middle and the end given


def build(method: Method, num_rows: int = 37, dim: int = 8, **options: object) -> Table:
    options.setdefault("dtype", torch.float64)
    options.setdefault("init_std", 1.0)
    torch.manual_seed(0)
    return method.build(num_rows, dim, **options)


def some_ids(num_rows: int, count: int = 9) -> Tensor:
    """Ids with both ends of the table and forced duplicates."""
    ids = torch.randint(num_rows, (count,), generator=torch.Generator().manual_seed(1))
    ids[0], ids[1], ids[2] = 0, num_rows - 1, num_rows - 1
    return ids
