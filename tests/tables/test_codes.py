"""Tables of codes: residual codes, codebooks of several tables, and fits to weighted samples."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.embedding.bags import EmbeddingBags
from holdall.tables import Bands, Codes, Dense, Method, Shared, share_codebooks
from holdall.tables.codebook_fit import Sample, decode, encode, fit_codebook
from holdall.tables.codes import CodesTable
from holdall.tables.fit_tables import fit_tables
from holdall.tables.method import total_bytes


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("parts", "bits", "width"), [(1, 8, 1), (3, 8, 3), (1, 4, 1), (2, 4, 1), (5, 4, 3)])
def test_a_row_is_the_sum_of_its_codewords(parts: int, bits: int, width: int) -> None:
    table = Codes(parts, bits, codebook="all").build(70, 4)  # type: ignore[arg-type]
    assert isinstance(table, CodesTable)
    assert table.codes.shape == (70, width)
    codes = torch.randint(2**bits, (70, parts), dtype=torch.uint8)
    table.set_codes(slice(0, 70), codes)
    words = table.codebook.by_part()
    expected = sum(words[part][codes[:, part].long()] for part in range(parts))
    torch.testing.assert_close(table.materialize(), expected)


def test_rows_made_of_codewords_are_found_again() -> None:
    """Two parts of different scale: the residual of the first is exactly a codeword of the second."""
    words = torch.stack((100 * normal(16, 5), normal(16, 5, seed=1)))
    codes = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)
    rows = decode(codes, words)
    assert torch.equal(encode(rows, words), codes)
    assert Codes(2, 4, codebook="all").fit(rows).fit_error < 1e-6
    assert Codes(1, 4).fit(words[0]).fit_error < 1e-6


def test_more_parts_miss_less() -> None:
    weight = normal(3000, 8)
    errors = [Codes(parts, bits).fit(weight).fit_error for parts, bits in ((1, 4), (2, 4), (1, 8), (2, 8), (4, 8))]
    assert errors == sorted(errors, reverse=True)
    table = Codes(2).fit(weight)
    assert table.fit_error == pytest.approx(float((table.materialize() - weight).norm() / weight.norm()), rel=1e-4)


def test_counts_draw_codewords_to_popular_rows() -> None:
    weight = normal(2000, 8)
    counts = 1000.0 / (1 + torch.arange(2000)) ** 2
    plain, counted = Codes(1, 4).fit(weight), Codes(1, 4).fit(weight, counts=counts)
    lost = [float((counts * (table.materialize() - weight).square().sum(1)).sum()) for table in (plain, counted)]
    assert lost[1] < 0.2 * lost[0]


def test_a_sample_counts_like_all_rows() -> None:
    rows, weights = normal(20_000, 3), torch.rand(20_000, generator=torch.Generator().manual_seed(1)) ** 4
    sample = Sample(3, num_rows=4000)
    for start in range(0, 20_000, 700):
        sample.add(rows[start : start + 700], weights[start : start + 700])
    found, mass = sample.rows(0)
    assert len(found) == 4000
    assert float(mass.sum()) == pytest.approx(float(weights.sum()), rel=0.02)
    whole = (weights[:, None] * rows.square()).sum(0)
    torch.testing.assert_close((mass[:, None] * found.square()).sum(0).float(), whole, rtol=0.05, atol=0)
    heavy = rows[weights > float(mass.min())]
    assert {tuple(row) for row in heavy.tolist()} <= {tuple(row) for row in found.tolist()}
    few = Sample(3)
    few.add(rows[:10], torch.zeros(10))
    assert few.rows(0)[1].tolist() == [1.0] * 10


def test_a_fit_from_a_sample_is_close_to_one_from_all_rows_and_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(20_000, 8)
    whole = Codes(1, 4).fit(weight)
    words = fit_codebook([(block, None) for block in weight.split(999)], 1, 4)
    torch.testing.assert_close(words[0], whole.codebook.words.detach())
    monkeypatch.setattr(Sample.__init__, "__defaults__", (2000,))
    sampled = [Codes(1, 4).fit(weight) for _ in range(2)]
    assert torch.equal(sampled[0].materialize(), sampled[1].materialize())
    assert whole.fit_error < sampled[0].fit_error < 1.02 * whole.fit_error


METHODS: dict[str, Method] = {
    "a": Codes(2, 4, "all"),
    "b": Bands(((5, Dense()), (30, Codes(2, 4, "all")), (None, Codes(1, 4, "all")))),
    "c": Codes(1, 4),
    "d": Codes(1, 4, "other"),
}


def bags() -> EmbeddingBags:
    return EmbeddingBags.build({"a": 40, "b": 50, "c": 40, "d": 40}, 8, METHODS)


def codebooks(model: EmbeddingBags) -> list[nn.Parameter]:
    return [part.codebook.words for part in model.modules() if isinstance(part, CodesTable)]


def is_shared(model: EmbeddingBags) -> bool:
    a, b, b_too, c, d = codebooks(model)
    return a is b is b_too and len({a, c, d}) == 3


def moved(model: EmbeddingBags) -> EmbeddingBags:
    return model.to("meta").to_empty(device="cpu").double()


def loaded(model: EmbeddingBags) -> EmbeddingBags:
    other = bags()
    other.load_state_dict(model.state_dict(), assign=True)
    return other


WAYS: dict[str, Callable[[EmbeddingBags], EmbeddingBags]] = {
    "as built": lambda model: model,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "moved and cast": moved,
    "state dict assigned": loaded,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_tables_of_one_name_share_a_codebook(way: Callable[[EmbeddingBags], EmbeddingBags]) -> None:
    model = way(bags())
    assert is_shared(model)
    sizes = [(METHODS[name], model.table(name).num_rows, 8) for name in METHODS]
    dtype = model.table("a").codebook.words.dtype
    assert model.num_bytes() == total_bytes(sizes, dtype)
    assert total_bytes(sizes) == sum(method.num_bytes(*shape) for method, *shape in sizes) - 2 * 16 * 8 * 4


def test_a_codebook_of_its_own_is_no_larger_than_its_table() -> None:
    assert Codes(1).build(100, 8).num_bytes() == 100 + 100 * 8 * 4
    with pytest.raises(ConfigError, match=r"200 codewords is larger than a table of 100 rows .* use Dense\(\), Shared"):
        Codes(2).build(100, 8)
    with pytest.raises(ConfigError, match="256 codewords is larger than the 150 rows that share codebook 'x'"):
        share_codebooks([Codes(1, codebook="x").build(75, 8) for _ in range(2)])


def test_fits_of_several_tables_share_the_codebook() -> None:
    rows = 10 * normal(16, 8)
    weights = {name: rows[torch.arange(60) % 16][start : start + 45] for start, name in enumerate(("a", "b"))}
    methods: dict[str, Method] = {"a": Codes(1, 4, "all"), "b": Bands(((5, Dense()), (None, Codes(1, 4, "all"))))}
    tables = fit_tables(weights, methods, {"a": torch.ones(45)})
    for name, table in tables.items():
        torch.testing.assert_close(table.materialize(), weights[name], rtol=1e-5, atol=1e-5)
    before = tables["a"].materialize()
    tables["b"].fit_rows(torch.zeros(45, 8))  # codewords of other tables stay
    assert torch.equal(tables["a"].materialize(), before)
    bad = {**weights, "b": weights["b"].clone()}
    bad["b"][7, 0] = torch.inf
    with pytest.raises(ConfigError, match="b: row 7 of the weight to fit has a NaN or infinity"):
        fit_tables(bad, methods)


def test_a_shared_codebook_trains_once() -> None:
    first, second = (Codes(1, 4, "x").build(20, 3) for _ in range(2))
    share_codebooks([first, second])
    optimizer = torch.optim.SGD({*first.parameters(), *second.parameters()}, lr=1.0)
    before = first.codebook.words.detach().clone()
    ids = torch.arange(20)
    (first.rows(ids).sum() + second.rows(ids).sum()).backward()
    optimizer.step()
    uses = torch.bincount(torch.cat((first.codes, second.codes)).flatten().long(), minlength=16)
    torch.testing.assert_close(before - first.codebook.words.detach(), uses[:, None].expand(16, 3).float())


def test_codewords_of_another_type() -> None:
    method = Codes(2, codebook="x", dtype="float16")
    table = method.fit(normal(600, 8))
    assert table.codebook.words.dtype == torch.float16
    assert table.num_bytes() == method.num_bytes(600, 8) == 2 * 600 + 2 * 512 * 8
    assert table.rows(torch.arange(5)).dtype == torch.float32
    assert table.double().rows(torch.arange(5)).dtype == torch.float64


def test_float16_codewords_and_shared_rows_train_in_several_bands() -> None:
    """torch adds up no sparse float16 gradients on the CPU, of several bands or of several backward passes."""
    method = Bands(
        (
            (60, Codes(2, 4, codebook="all", dtype="float16")),
            (90, Codes(1, 4, codebook="all", dtype="float16")),
            (None, Shared(2, dtype="float16")),
        )
    )
    table = method.build(120, 4, sparse=True, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(120)
    for _ in range(2):
        table.rows(ids).sum().backward()
    words, stored = table.get_parameter("band0.codebook.words"), table.get_parameter("band2.stored")
    assert words.grad is not None
    assert stored.grad is not None
    assert words.grad.to_dense().float().sum() == 2 * 4 * (60 * 2 + 30)
    assert stored.grad.to_dense().float().tolist() == [[30.0] * 4] * 2


@pytest.mark.parametrize(("num_rows", "dim"), [(10, 4), (1000, 16), (100_000, 16), (1_000_000, 64)])
def test_for_bytes_uses_the_budget(num_rows: int, dim: int) -> None:
    smallest = Codes(1, 4).num_bytes(num_rows, dim)
    for share in (2, 4, 20, 60):
        budget = 4 * num_rows * dim // share
        if budget < smallest:
            with pytest.raises(ConfigError, match=f"at least {smallest} bytes"):
                Codes.for_bytes(num_rows, dim, budget)
            continue
        method = Codes.for_bytes(num_rows, dim, budget)
        assert 0.5 * budget <= method.build(num_rows, dim).num_bytes() <= budget


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parts": 0}, "parts must be from 1 to 64"),
        ({"bits": 5}, "bits must be 8 or 4"),
        ({"codebook": ""}, "codebook must be a name or None"),
        ({"dtype": "int8"}, "dtype must be one of"),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Codes(**settings)  # type: ignore[arg-type]
