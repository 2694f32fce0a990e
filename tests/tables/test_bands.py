"""Tables in bands: the cut of a table, the order of rows, gradients, fits and bad input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import (
    Bands,
    Codes,
    Dense,
    Hashed,
    HotCold,
    Method,
    MixedDimension,
    Quantized,
    Shared,
    method_from_json,
)
from holdall.tables.bands import BandsTable

ALL_DENSE = Bands(((2, Dense()), (5, Dense()), (6, Dense()), (None, Dense())))


def numbered(num_rows: int, dim: int = 2) -> Tensor:
    """Row i is (i, 100 + i, ...)."""
    return torch.arange(num_rows)[:, None] + 100.0 * torch.arange(dim)


def planted(num_rows: int = 10, **options: object) -> BandsTable:
    table = ALL_DENSE.fit(numbered(num_rows), **options)
    assert isinstance(table, BandsTable)
    return table


IDS = [[7, 0, 3, 9, 4, 3, 0], [0, 1, 2], [8, 9, 9], [5, 5], [9, 5, 0], []]


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("ids", IDS)
def test_rows_come_in_the_order_asked_for(ids: list[int], fixed: bool) -> None:
    table = planted()
    table.fixed_shapes = fixed
    assert torch.equal(table.rows(torch.tensor(ids, dtype=torch.int64)), numbered(10)[ids])
    bags = torch.tensor([[0, 9, 4], [3, 3, 8]])
    expected = F.embedding_bag(bags, numbered(10), mode="sum")
    assert torch.equal(table(bags), expected)


@pytest.mark.parametrize("ids", IDS)
def test_fixed_shapes_give_the_same_gradients_and_touch_no_other_rows(ids: list[int]) -> None:
    results = []
    for fixed in (False, True):
        table = planted(sparse=True)
        table.fixed_shapes = fixed
        rows = table(torch.tensor(ids, dtype=torch.int64)[:, None])
        rows.mul(1 + torch.arange(len(ids))[:, None]).sum().backward()
        gradients = [part.weight.grad for part in table.parts]
        results.append(
            torch.cat(
                [
                    torch.zeros(part.num_rows, 2) if gradient is None else gradient.to_dense()
                    for part, gradient in zip(table.parts, gradients, strict=True)
                ]
            )
        )
        for band, gradient in zip(table.bands, gradients, strict=True):
            if fixed and any(band.start <= i < band.end for i in ids):
                assert {band.start + i for i in gradient._indices()[0].tolist()} <= set(ids)
    torch.testing.assert_close(*results)


def test_frozen_and_trained_bands_mix() -> None:
    method = Bands(((3, Quantized()), (6, Dense()), (None, Shared(2))))
    table = method.build(10, 4)
    before = table.materialize()
    table(torch.tensor([[0, 4], [9, 8]])).sum().backward()
    torch.optim.SGD(table.parameters(), lr=1.0).step()
    change = before - table.materialize()
    assert change[:, 0].round(decimals=4).tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 2, 2]
    with torch.no_grad():
        assert not table.rows(torch.tensor([0])).requires_grad


def test_a_small_table_keeps_the_bands_that_it_has_rows_for() -> None:
    method = Bands(((4, Dense()), (10, Quantized()), (None, Shared())))
    for num_rows, names in ((3, ["band0"]), (4, ["band0"]), (9, ["band0", "band1"]), (11, ["band0", "band1", "band2"])):
        table = method.build(num_rows, 4)
        assert [name for name, _ in table.named_children()] == names
        assert table.num_bytes() == method.num_bytes(num_rows, 4)
        assert sum(p.numel() for p in table.parameters()) == method.num_parameters(num_rows, 4)
    clipped = Bands(((4, Dense()), (100, Shared())))
    assert clipped.build(50, 4).materialize().shape == (50, 4)
    with pytest.raises(ConfigError, match=r"rows 100 to 149 of a table of 150 rows are in no band: .* with None"):
        clipped.build(150, 4)


def test_bytes_count_a_codebook_of_two_bands_once() -> None:
    method = Bands(((20, Codes(2, 4, "all")), (None, Codes(1, 4, "all"))))
    table = method.build(100, 8)
    assert table.num_bytes() == method.num_bytes(100, 8) == 20 + 80 + 2 * 16 * 8 * 4
    assert method.num_parameters(100, 8) == 2 * 16 * 8
    assert list(table.row_parameters()) == ["band0.codebook.words"]


def test_a_fit_fits_each_band_by_its_method() -> None:
    weight = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
    counts = torch.arange(2000, 0, -1)
    method = Bands(((50, Quantized()), (200, Dense()), (900, Codes(1, 4)), (None, Shared(3))))
    table = method.fit(weight, counts=counts)
    start = 0
    for (end, part), found in zip(method.bands, table.parts, strict=True):
        alone = part.fit(weight[start:end], counts=counts[start:end])
        assert torch.equal(found.materialize(), alone.materialize())
        start = end or 0
    expected = float((table.materialize() - weight).norm() / weight.norm())
    assert table.fit_error == pytest.approx(expected, rel=1e-4)


def test_bands_of_one_codebook_are_fitted_together() -> None:
    words = 10 * torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    weight = words[torch.arange(80) % 16]
    table = Bands(((8, Codes(1, 4, "x")), (None, Codes(1, 4, "x")))).fit(weight)
    torch.testing.assert_close(table.materialize(), weight)


def test_a_band_that_cannot_be_fitted_is_named() -> None:
    method = Bands(((10, Dense()), (None, Codes(2))))
    with pytest.raises(ConfigError, match="codebook of 40 codewords is larger than a table of 20 rows"):
        method.fit(torch.zeros(30, 4))
    weight = torch.zeros(30, 4)
    weight[12] = torch.nan
    with pytest.raises(ConfigError, match="row 12 of the weight to fit has a NaN"):
        Bands(((10, Dense()), (None, Shared()))).fit(weight)
    with pytest.raises(ConfigError, match="counts must be 30 numbers"):
        Bands(((10, Dense()), (None, Shared()))).fit(torch.zeros(30, 4), counts=torch.ones(29))


@pytest.mark.parametrize("num_rows", [2**31 + 5, 10**10])
def test_ids_of_huge_tables(num_rows: int) -> None:
    method = Bands(((1000, Dense()), (2**31 + 2, Hashed(buckets=64)), (None, Shared(7))))
    table = method.build(num_rows, 4)
    ids = torch.tensor([num_rows - 1, 999, 2**31 + 1, 1000, 0, 2**31 + 2])
    found = table.rows(ids)
    first, middle, last = table.parts
    assert torch.equal(found[[1, 4]], first.rows(torch.tensor([999, 0])))
    assert torch.equal(found[[2, 3]], middle.rows(torch.tensor([2**31 + 1 - 1000, 0])))
    assert torch.equal(found[[0, 5]], last.rows(torch.tensor([num_rows - 1 - 2**31 - 2, 0])))
    table.fixed_shapes = True
    assert torch.equal(table.rows(ids), found)


def test_rows_have_one_type_whatever_the_bands_store() -> None:
    table = Bands(((2, Dense(dtype="bfloat16")), (4, Dense()), (None, Dense(dtype="float16")))).build(6, 4)
    for ids in ([0], [5], [3], [0, 5], []):
        assert table.rows(torch.tensor(ids, dtype=torch.int64)).dtype == torch.float32
    assert table.double().rows(torch.tensor([0])).dtype == torch.float64


@pytest.mark.parametrize(
    ("bands", "message"),
    [
        ((), "at least one"),
        (((5, Dense()), (5, Shared()), (None, Shared())), r"bands\[1\] \(shared\) ends at row 5, and the one before"),
        (((9, Dense()), (5, Shared()), (None, Shared())), r"bands\[1\] .* neither overlap nor change places"),
        (((0, Dense()), (None, Shared())), r"bands\[0\] \(dense\) ends at row 0"),
        (((None, Dense()), (None, Shared())), r"bands\[0\] must end at a number of rows, not None"),
        (((2.5, Dense()), (None, Shared())), r"bands\[0\] must end at a number of rows, not 2.5"),
        (((2, Dense()), (None, "shared")), r"bands\[1\] must be a pair"),
        (((2, Dense()), (None, Bands(((None, Dense()),)))), r"bands\[1\] is itself in bands \(bands\): list"),
        (((2, HotCold(3, Dense())), (None, Dense())), r"bands\[0\] is itself in bands \(hot_cold\)"),
    ],
)
def test_bad_bands_are_named(bands: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Bands(bands)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bands", "message"),
    [
        ([[3, {"method": "dense"}], [None, {"method": "shared", "row": 2}]], "shared: unknown field 'row'"),
        ([[3, {"method": "dance"}], [None, {"method": "shared"}]], "unknown table method 'dance'"),
        ([[3, {"method": "dense"}, 4]], r"bands: 'bands\[0\]' must be a list of 2 values"),
        ([[[[[]]], {"method": "dense"}]], r"bands: 'bands\[0\]\[0\]' must be"),
        (5, "bands: 'bands' must be a list"),
        ([], "at least one"),
    ],
)
def test_json_of_bad_bands(bands: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        method_from_json({"method": "bands", "bands": bands})


def test_a_budget_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="choose them from counts"):
        Bands.for_bytes(1000, 16, 10_000)


GROUPED: dict[str, Method] = {
    "a": Bands(((3, Quantized()), (9, Quantized(4)), (30, Codes(2, 4, "all")), (None, Shared(2)))),
    "b": Bands(((5, Quantized(4, scales="float16")), (20, Codes(2, 4, "all")), (None, Codes(1, 4, "all")))),
    "c": Bands(((7, Dense()), (None, Hashed(buckets=5)))),
    "d": HotCold(hot_rows=4, cold=Codes(1, 4, "other")),
    "e": Bands(((2, Dense()), (None, MixedDimension(dim=2)))),
    "f": Bands(((None, Quantized()),)),
    "g": Quantized(),
}


@pytest.mark.parametrize("batch", [0, 1, 50])
def test_tables_of_bands_are_looked_up_together(batch: int) -> None:
    """The rows and gradients of one call over all tables are those of each table on its own."""
    rows = {name: 33 + place for place, name in enumerate(GROUPED)}
    generator = torch.Generator().manual_seed(0)
    values = torch.stack([torch.randint(n, (batch,), generator=generator) for n in rows.values()])
    ids = Ids(values, None, num_features=len(rows))
    direction = torch.randn(batch, len(rows), 6, generator=generator)
    results = []
    for fused in (True, False):
        bags = EmbeddingBags.build(rows, 6, GROUPED, fused=fused, generator=torch.Generator().manual_seed(1))
        found = bags(ids)
        with torch.no_grad():
            assert torch.equal(bags(ids), found)
        (found * direction).sum().backward()
        gradients = {name: parameter.grad for name, parameter in bags.named_parameters()}
        results.append((found, {name: None if grad is None else grad.to_dense() for name, grad in gradients.items()}))
    (found, gradients), (expected, wanted) = results
    assert torch.equal(found, expected)
    for name, gradient in wanted.items():
        zeros = torch.zeros(())
        given = (zeros if one is None else one for one in (gradients[name], gradient))
        torch.testing.assert_close(*torch.broadcast_tensors(*given))


def test_narrow_rows_that_train_are_looked_up_together() -> None:
    """After three steps the rows of all tables are those of each table looked up on its own."""
    narrow = MixedDimension(2, bits=8, trainable=True)
    coded = Quantized(8, "stochastic", trainable=True, scales="float16", state_bits=8)
    methods: dict[str, Method] = {
        "a": Bands(((3, coded), (20, narrow), (None, Shared(1)))),
        "b": Bands(((5, coded), (None, narrow))),
        "c": Bands(((20, MixedDimension(3, bits=8, trainable=True)), (None, Shared(1)))),
    }
    rows = dict.fromkeys(methods, 40)
    results = []
    for fused in (True, False):
        bags = EmbeddingBags.build(rows, 6, methods, fused=fused, generator=torch.Generator().manual_seed(1))
        before = {name: bags.table(name).materialize() for name in methods}
        optimizers = Optimizers(bags, OptimizerConfig(name="rowwise_adagrad", lr=0.1))
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            ids = Ids(torch.randint(40, (3, 30), generator=generator), None, num_features=3)
            (bags(ids) * torch.randn(30, 3, 6, generator=generator)).sum().backward()
            optimizers.step()
        results.append({name: bags.table(name).materialize() for name in methods})
        assert all(bool((results[-1][name] != before[name]).any()) for name in methods)
    for name, found in results[0].items():
        torch.testing.assert_close(found, results[1][name])


def test_bands_that_share_a_call() -> None:
    groups = {name: method.build(40, 6).kernel_group() for name, method in GROUPED.items() if name != "g"}
    assert [name for name, group in groups.items() if group is None] == ["e"]  # its rows cost more than copies
    table = GROUPED["a"].build(40, 6, padding_idx=3)
    assert table.kernel_group() is None
    table = GROUPED["a"].build(40, 6)
    ids = torch.tensor([[39], [0], [0], [12]])
    assert torch.equal(table(ids), table.rows(ids[:, 0]))
