"""Precision by popularity: cuts within a budget, against an exhaustive search, and the tables that are fitted."""

import itertools

import numpy as np
import pytest
import torch

from holdall import Bands, Codes, Dense, Quantized, Shared
from holdall.common.errors import ConfigError
from holdall.tables.bands import BandsTable
from holdall.tables.codes import CodesTable
from holdall.tables.expected_lookups import expected_lookups
from holdall.tables.metric_kmeans import RowsToCode, metric_codewords
from holdall.tables.precision import PrecisionFit, cut
from holdall.tables.precision_levels import TAIL, Curves, chunk_ends, transform_of


def zipf_counts(num_rows: int, top: int) -> torch.Tensor:
    return (top / torch.arange(1, num_rows + 1)).long()


def trained(num_rows: int, dim: int, seed: int) -> torch.Tensor:
    """Rows that share a few directions, as trained ones do, beside noise."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(12, dim, generator=draw)
    mixed = centres[torch.randint(12, (num_rows,), generator=draw)]
    return mixed + 0.1 * torch.randn(num_rows, dim, generator=draw)


@pytest.fixture(scope="module")
def fitted() -> PrecisionFit:
    weights = {"large": trained(3_000, 8, 0), "small": trained(40, 8, 1)}
    counts = {"large": zipf_counts(3_000, 20_000), "small": zipf_counts(40, 20_000)}
    return PrecisionFit(weights, counts)


def test_expected_lookups_give_the_unseen_row_what_single_values_lose() -> None:
    counts = torch.tensor([10, 2, 1, 1, 1, 0])
    expected = expected_lookups(counts)
    discount = 3 / (3 + 2 * 1)
    assert torch.allclose(expected[:5], counts[:5].double() - discount)
    assert expected[5] == pytest.approx(5 * discount)
    assert float(expected.sum()) == pytest.approx(float(counts.sum()))


def test_expected_lookups_without_counts_are_equal() -> None:
    assert expected_lookups(torch.zeros(3)).tolist() == [1, 1, 1]


def test_chunks_cover_all_rows_and_stay_few() -> None:
    ends = chunk_ends(zipf_counts(1_000_000, 10**6).double())
    assert ends[0] == 0
    assert ends[-1] == 1_000_000
    assert (np.diff(ends) > 0).all()
    assert len(ends) < 200


def test_cut_is_the_best_of_all_cuts() -> None:
    draw = np.random.default_rng(0)
    ladder = (Dense("float16"), Quantized(8), Codes(1, 8, "long"))
    for trial in range(20):
        ends = np.concatenate(([0], np.cumsum(draw.integers(1, 9, size=6))))
        errors = {
            level: np.concatenate(([0.0], np.cumsum(draw.random(6) * scale)))
            for level, scale in zip(ladder, (0.1, 1.0, 4.0), strict=True)
        }
        tail = np.concatenate((np.cumsum(draw.random(6) * 9)[::-1], [0.0]))
        price = 10 ** draw.uniform(-3, 0)
        curves = Curves(ends, errors, tail)
        method, error = cut(curves, ladder, price, 4)
        row_bytes = (8.0, 12.0, 1.0)
        best = np.inf
        for places in itertools.combinations_with_replacement(range(7), 3):
            starts = (0, *places[:-1])
            cost = tail[places[-1]] + (price * TAIL.num_bytes(1, 4) if places[-1] < 6 else 0.0)
            for level, width, start, end in zip(ladder, row_bytes, starts, places, strict=True):
                cost += errors[level][end] - errors[level][start] + price * width * (ends[end] - ends[start])
            best = min(best, cost)
        assert isinstance(method, Bands)
        size, start = 0.0, 0
        for end, level in method.bands:
            stop = int(ends[-1]) if end is None else end
            size += TAIL.num_bytes(1, 4) if level == TAIL else row_bytes[ladder.index(level)] * (stop - start)
            start = stop
        assert error + price * size == pytest.approx(best), trial


@pytest.mark.parametrize("budget", ["1/4", "1/10", "1/30"])
def test_bytes_are_within_the_budget_and_equal_those_of_the_tables(fitted: PrecisionFit, budget: str) -> None:
    choice = fitted.choose(budget)
    tables = fitted.fit(choice)
    tensors = {id(tensor): tensor for table in tables.values() for tensor in (*table.parameters(), *table.buffers())}
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) == choice.num_bytes
    share = int(budget.split("/")[1])
    assert choice.num_bytes <= fitted.dense_bytes / share
    assert choice.num_bytes > 0.5 * fitted.dense_bytes / share


def test_more_bytes_lose_less(fitted: PrecisionFit) -> None:
    errors = [fitted.choose(budget).error for budget in ("1/60", "1/20", "1/8", "1/3")]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3 < errors[0]


def test_tables_lose_no_more_than_forecast(fitted: PrecisionFit) -> None:
    choice = fitted.choose("1/20")
    missed = nothing = 0.0
    for name, table in fitted.fit(choice).items():
        rows, lookups = fitted.weights[name].double(), fitted.tables[name].lookups
        missed += float((lookups * (rows - table.materialize().double()).square().sum(1)).sum())
        mean = (lookups[:, None] * rows).sum(0) / lookups.sum()
        nothing += float((lookups * (rows - mean).square().sum(1)).sum())
    assert 0.6 * choice.error < missed / nothing < 1.02 * choice.error


def test_popular_rows_are_stored_more_exactly(fitted: PrecisionFit) -> None:
    table = fitted.fit(fitted.choose("1/20"))["large"]
    assert isinstance(table, BandsTable)
    missed = (fitted.weights["large"] - table.materialize()).square().sum(1)
    assert missed[:50].mean() < 0.1 * missed[-1000:].mean()


def test_sensitive_tables_get_more_bytes() -> None:
    weights = {"a": trained(2_000, 8, 0), "b": trained(2_000, 8, 1)}
    counts = dict.fromkeys(weights, zipf_counts(2_000, 10_000))
    sensitivity = {"a": torch.eye(8).double(), "b": 100 * torch.eye(8).double()}
    choice = PrecisionFit(weights, counts, sensitivity).choose("1/20")
    sizes = {name: method.num_bytes(2_000, 8) for name, method in choice.methods.items()}
    assert sizes["b"] > 1.2 * sizes["a"]


def test_transform_has_the_norm_of_the_sensitivity() -> None:
    draw = torch.Generator().manual_seed(0)
    gradients = torch.randn(500, 6, dtype=torch.float64, generator=draw)
    sensitivity = gradients.T @ gradients / 500
    change = torch.randn(6, generator=draw)
    even = sensitivity.trace() / 6 * change.double().square().sum()
    expected = 0.9 * change.double() @ sensitivity @ change.double() + 0.1 * even
    assert float((change @ transform_of(sensitivity, 6)).square().sum()) == pytest.approx(float(expected), rel=1e-5)


def test_codewords_of_few_distinct_rows_are_these_rows() -> None:
    distinct = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    rows = distinct.repeat(20, 1)
    words = metric_codewords([RowsToCode(rows, torch.ones(100), torch.eye(4), 1)], 16, 1_000)
    assert torch.cdist(distinct, words[0]).min(dim=1).values.max() < 1e-6


def test_codewords_of_a_sample_are_near_those_of_all_rows() -> None:
    rows = trained(20_000, 6, 3)
    weights = torch.ones(20_000, dtype=torch.float64)
    errors = []
    for most in (2_000, 20_000):
        words = metric_codewords([RowsToCode(rows, weights, torch.eye(6), 1)], 16, most)[0]
        errors.append(float(torch.cdist(rows, words).min(dim=1).values.square().mean()))
    assert errors[0] < 1.1 * errors[1]


def test_directions_that_do_not_count_are_given_up() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(2_000, 4, generator=draw)
    sensitivity = torch.diag(torch.tensor([1.0, 1e-6, 1e-6, 1e-6])).double()
    counts = {"t": torch.ones(2_000)}
    blind = PrecisionFit({"t": rows}, counts).choose("1/12")
    seeing_fit = PrecisionFit({"t": rows}, counts, {"t": sensitivity})
    seeing = seeing_fit.fit(seeing_fit.choose("1/12"))["t"].materialize()
    plain = PrecisionFit({"t": rows}, counts).fit(blind)["t"].materialize()
    assert (rows - seeing)[:, 0].square().mean() < 0.3 * (rows - plain)[:, 0].square().mean()


def test_a_budget_below_one_row_a_table_says_what_the_least_is(fitted: PrecisionFit) -> None:
    least = fitted.smallest()
    assert set(least.methods.values()) == {Bands(((None, Shared(1, dtype="float16")),))}
    with pytest.raises(ConfigError, match=f"one row for all ids of every table takes {least.num_bytes}B"):
        fitted.choose(least.num_bytes - 1)
    assert fitted.choose(least.num_bytes).num_bytes == least.num_bytes


def test_counts_of_another_data_set_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 rows and 2 counts: are they of another data set"):
        PrecisionFit({"t": torch.ones(3, 2)}, {"t": torch.ones(2)})
    with pytest.raises(ConfigError, match="table 't' has no counts"):
        PrecisionFit({"t": torch.ones(3, 2)}, {})


def test_rows_that_are_not_numbers_are_refused_with_their_place() -> None:
    rows = trained(100, 4, 0)
    rows[17, 2] = float("nan")
    with pytest.raises(ConfigError, match=r"table 't': .*row 17"):
        PrecisionFit({"t": rows}, {"t": torch.ones(100)})


def test_a_codebook_that_loses_more_is_not_taken(fitted: PrecisionFit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codewords fitted to the chosen rows may leave out a single row that counts a lot, in a small table say."""
    choice = fitted.choose("1/20")
    coded = [part for table in fitted.fit(choice).values() for part in table.parts if isinstance(part, CodesTable)]
    assert coded

    def none(rows: list[RowsToCode], num_words: int, max_rows: int) -> torch.Tensor:
        return torch.zeros(max(table.parts for table in rows), num_words, rows[0].rows.shape[1])

    monkeypatch.setattr("holdall.tables.precision.metric_codewords", none)
    missed = 0.0
    for name, table in fitted.fit(choice).items():
        squares = (table.materialize() - fitted.weights[name]).double().square().sum(dim=1)
        missed += float((fitted.tables[name].lookups * squares).sum())
    nothing = sum(float(curves.tail[0]) for curves in fitted.curves.values())
    assert missed / nothing == pytest.approx(choice.error, rel=0.1)
