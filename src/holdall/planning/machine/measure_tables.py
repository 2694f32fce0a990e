"""Measured costs of tables: a lookup, and its backward with the update, of dense and of compressed tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdall.common.threads import torch_threads
from holdall.data.batch import Ids
from holdall.data.zipf import Zipf
from holdall.embedding.bags import EmbeddingBags
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.planning.machine.clock import Clock, fit, median_run
from holdall.planning.machine.hardware import TableCost
from holdall.planning.table_cost import COMPRESSED_ROWS, Chain, chain_of
from holdall.tables import Frobenius, Hashed, MemCom, Method, MixedDimension, QuotientRemainder, Robe, TensorTrain

FEATURES = 8
"""Features of the table that lookups are timed with; they share it."""
MANY_BYTES = 1 << 24
"""Bytes of the vectors of the largest lookup that is timed; it has at least `many` lookups."""
BATCHES = 4
"""Batches of different ids that a table is timed with, in turn."""
COMPRESSED: tuple[Method, ...] = (
    TensorTrain(rank=32),
    Frobenius(rank=8, terms=4),
    Robe(size=1 << 18),
    Hashed(buckets=1 << 14),
    QuotientRemainder(buckets=1 << 10),
    MemCom(buckets=1 << 14),
    MixedDimension(dim=8),
    TensorTrain(rank=8),
)
STANDING_FOR = (TensorTrain, Frobenius, Robe)
"""Methods that stand for the others where there is no time to measure these (`table_costs`)."""


def dense_table_costs(
    clock: Clock, table_bytes: int, dims: Sequence[int], optimizers: Sequence[str], *, quick: bool = False
) -> Iterator[TableCost]:
    """Costs of dense tables, of the first of `dims` in any case; `quick` ones are fitted to fewer batches."""
    for dim in dims:
        if dim != dims[0] and clock.hurries():
            return
        bags = _bags(clock, None, max(1024, table_bytes // (4 * dim)), dim)
        for optimizer in optimizers:
            yield _table_cost(clock, bags, None, optimizer, quick=quick)


def sample_dims(dims: Sequence[int]) -> tuple[int, ...]:
    """The dims at which operations are timed that are not timed at all of them."""
    return tuple(dims)[:2]


def compressed_table_costs(clock: Clock, dims: Sequence[int], *, quick: bool = False) -> Iterator[TableCost]:
    """Costs of compressed tables, of `STANDING_FOR` at the first dim in any case; `quick`: one dim, fewer batches."""
    dims = sample_dims(dims)[-1:] if quick else sample_dims(dims)
    for dim, method in product(dims, COMPRESSED):
        if isinstance(method, MixedDimension) and method.dim >= dim:
            continue
        is_needed = dim == dims[0] and isinstance(method, STANDING_FOR)
        if not is_needed and clock.hurries():
            continue
        bags = _bags(clock, method, COMPRESSED_ROWS, dim)
        yield _table_cost(clock, bags, method, "rowwise_adagrad", quick=quick)


def _bags(clock: Clock, method: Method | None, rows: int, dim: int) -> EmbeddingBags:
    """A table to time. A compressed one has one feature, as each feature is looked up separately; a dense one
    several."""
    features = {f"f{i}": "t" for i in range(FEATURES if method is None else 1)}
    with torch_threads(1):  # threads that wait for cores make this many times slower
        return EmbeddingBags.build({"t": rows}, dim, method, features=features, device=clock.device)


def _table_cost(clock: Clock, bags: EmbeddingBags, method: Method | None, optimizer: str, *, quick: bool) -> TableCost:
    """Cost of one kind of table, fitted to a few batches of different size and repetition."""
    rows = bags.table("t").num_rows
    optimizers = Optimizers(bags, OptimizerConfig(name=optimizer, lr=1e-3))  # type: ignore[arg-type]
    many = 1 << 15 if clock.device.type == "cpu" else 1 << 17
    many = many if method is None else many // FEATURES
    points, lookups, updates = [], [], []
    shapes = [  # lookups, ids, skew
        (many // 8, rows, 1.05),
        (many, many // 4, 1.05),  # many small tables
        (many, rows, 0.5),
    ]
    if not (quick or clock.hurries()):
        shapes.append((many, rows, 1.05))
        # more vectors than caches hold
        shapes.append((max(many, min(4 * many, MANY_BYTES // (4 * bags.dim))), many, 1.05))
    chain = None if method is None else chain_of(method, rows, bags.dim)
    for num_lookups, num_ids, exponent in shapes:
        ids, distinct = _drawn(num_lookups, min(num_ids, rows), exponent)
        lookup, update = _time_step(clock, bags, optimizers, ids)
        points.append((num_lookups, _rows_or_products(distinct, chain)))
        lookups.append(lookup)
        updates.append(update)
    document = {"method": "dense"} if method is None else method.to_json()
    return TableCost(document, bags.dim, optimizer, fit(points, lookups), fit(points, updates))


@lru_cache(maxsize=32)
def _drawn(num_lookups: int, num_ids: int, exponent: float) -> tuple[Any, list[Any]]:
    """Ids [BATCHES, num_lookups] of batches, and the distinct ones of each, in order."""
    drawn = np.random.default_rng(0).random(BATCHES * num_lookups)
    ids = Zipf(num_ids, exponent).ranks(drawn).reshape(BATCHES, num_lookups).astype(np.int32)
    return ids, [np.unique(batch) for batch in ids]


def _rows_or_products(distinct: list[Any], chain: Chain | None) -> float:
    """Distinct ids of a batch, on average; for a tensor train, the products of their chains."""
    rows = float(np.mean([len(batch) for batch in distinct]))
    if chain is None:
        return rows
    return chain.products(float(np.mean([len(np.unique(batch // chain.block)) for batch in distinct])), rows)


def _time_step(clock: Clock, bags: EmbeddingBags, optimizers: Optimizers, ids: Any) -> tuple[float, float]:
    """Median seconds of the lookup, and of its backward and update, over batches `ids` [BATCHES, lookups]."""
    num_lookups = ids.shape[1]
    least = 4 * num_lookups * bags.dim / clock.bandwidth  # the looked-up vectors are written, and their gradients read
    what = f"a step of {num_lookups:,} lookups of dim {bags.dim}"
    if clock.device.type == "cuda":
        return _time_captured(clock, bags, optimizers, ids, least, what)
    size = num_lookups // bags.num_features
    grad = torch.full((size, bags.num_features, bags.dim), 1e-3, device=clock.device)
    found = (0.0, 0.0)

    def measure() -> float:
        nonlocal found
        lookups: list[float] = []
        updates: list[float] = []
        while clock.wants_repeat(updates):
            batch = ids[len(updates) % BATCHES].reshape(bags.num_features, size)
            values = torch.from_numpy(batch).to(clock.device)
            clock.evict_caches()
            start = clock.now()
            vectors = bags(Ids(values, None, bags.num_features))
            lookups.append(clock.now() - start)
            clock.evict_caches()
            start = clock.now()
            vectors.backward(grad)
            optimizers.step()
            updates.append(clock.now() - start)
        found = median_run(lookups), median_run(updates)
        return min(found)

    clock.possible(measure, least, what)
    return found


def _time_captured(
    clock: Clock, bags: EmbeddingBags, optimizers: Optimizers, ids: Any, least: float, what: str
) -> tuple[float, float]:
    """The same inside CUDA graphs: the lookup, and the difference of the whole step to it."""
    size = ids.shape[1] // bags.num_features
    batches = [torch.from_numpy(batch.reshape(bags.num_features, size)).to(clock.device) for batch in ids]
    values = batches[0].clone()
    grad = torch.full((size, bags.num_features, bags.dim), 1e-3, device=clock.device)

    def change() -> None:
        batches.append(batches.pop(0))
        values.copy_(batches[0])
        optimizers.prepare()

    def lookup() -> Tensor:
        return bags(Ids(values, None, bags.num_features))

    def whole() -> None:
        lookup().backward(grad)
        optimizers.apply()

    optimizers.prepare()
    lookup_seconds = clock.replayed(lookup, change, least=least, what=what)
    step_seconds = clock.replayed(whole, change, least=least, what=what)
    optimizers.zero_grad()  # a capture that failed may have left gradients
    return lookup_seconds, max(1e-9, step_seconds - lookup_seconds)
