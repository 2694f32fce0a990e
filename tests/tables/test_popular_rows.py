"""Budgets by popularity: the rows worth most per byte over all tables, to the row, against a plain sort of all rows."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.optim.optimizer_kinds import OPTIMIZER_KINDS
from holdall.optim.table_bytes import count_table_bytes
from holdall.tables import Bands, Dense, Method, MixedDimension, Quantized, Shared
from holdall.tables.bands import Band
from holdall.tables.budget import divide_budget, suggest
from holdall.tables.method import total_bytes
from holdall.tables.popular_rows import CODED, CODED_BELOW, NARROW_GAIN
from holdall.tables.table_size import TableSize


def zipf(num_rows: int, lookups: float) -> Tensor:
    return (lookups / (1.0 + torch.arange(num_rows))).ceil().long()


COUNTS = {"days": zipf(7, 4000), "items": zipf(2_000, 9000), "users": zipf(30_000, 60_000)}
ROWS = {name: len(counts) for name, counts in COUNTS.items()}
DENSE = sum(64 * rows for rows in ROWS.values())
NARROW = MixedDimension(4, bits=8, trainable=True)


def taken(methods: dict[str, Method], dim: int = 16) -> int:
    return total_bytes([(method, ROWS[name], dim) for name, method in methods.items()])


def kept_rows(method: Method, num_rows: int) -> int:
    """Rows of a table that are stored one by one."""
    if isinstance(method, Bands):
        (end, _), (last, rest) = method.bands
        assert last is None
        assert rest == Shared(1)
        assert end is not None
        return end
    return 0 if method == Shared(1) else num_rows


def band_rows(method: Method, num_rows: int) -> dict[str, int]:
    """Rows of a table by the method of their band."""
    bands = method.bands_of(num_rows) if isinstance(method, Bands) else [Band("", 0, num_rows, method)]
    return {band.method.name: band.end - band.start for band in bands}


@pytest.mark.parametrize("budget", ["1/2", "1/10", "1/100", "1/1000"])
def test_popular_rows_of_all_tables_are_kept_by_one_threshold(budget: str) -> None:
    methods = suggest(ROWS, 16, budget, counts=COUNTS)
    kept = {name: kept_rows(method, ROWS[name]) for name, method in methods.items()}
    least = min(int(COUNTS[name][rows - 1]) for name, rows in kept.items() if rows)
    most = max((int(COUNTS[name][rows]) for name, rows in kept.items() if rows < ROWS[name]), default=0)
    assert least >= most - 1  # the expected lookups of a table are its counts less a number between 0 and 1
    share = float(budget.partition("/")[2])
    assert DENSE / share - 64 < taken(methods) <= DENSE / share


def test_equal_rows_are_kept_in_the_order_of_tables() -> None:
    counts = {"a": torch.full((100,), 5), "b": torch.full((100,), 5)}
    methods = suggest({"a": 100, "b": 100}, 16, 64 * 151, counts=counts)
    assert methods == {"a": Dense(), "b": Bands(((50, Dense()), (None, Shared(1))))}


def test_a_table_that_is_kept_whole_is_not_in_bands() -> None:
    methods = suggest(ROWS, 16, "1/2", counts=COUNTS)
    assert methods["days"] == Dense()
    assert isinstance(methods["users"], Bands)
    assert suggest(ROWS, 16, "1/1", counts=COUNTS) == dict.fromkeys(ROWS, Dense())
    coded = suggest(ROWS, 16, "1/25", counts=COUNTS, training=True)
    assert coded["days"] == CODED


def test_kept_rows_are_codes_below_a_share_where_codes_train() -> None:
    for share, training, kept in [
        (CODED_BELOW * 1.01, True, Dense()),
        (CODED_BELOW * 0.99, True, CODED),
        (CODED_BELOW * 0.99, False, Dense()),
    ]:
        users = suggest(ROWS, 16, share, counts=COUNTS, training=training)["users"]
        assert isinstance(users, Bands)
        assert users.bands[0][1] == kept
        assert users.trains
    assert isinstance(CODED, Quantized)
    assert CODED.trains
    narrow = suggest(ROWS, 1, 1 / 100, counts=COUNTS, training=True)["users"]  # a grid would take more than the number
    assert isinstance(narrow, Bands)
    assert narrow.bands[0][1] == Dense()


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam", "adagrad", "sgd"])
def test_tables_with_their_optimizer_state_keep_the_share(optimizer: str) -> None:
    kind = OPTIMIZER_KINDS[optimizer]
    for share in (1 / 10, 1 / 40, 1 / 100):
        methods = suggest(ROWS, 16, share, counts=COUNTS, training=True, row_state=kind.row_state_bytes(16))
        tables = torch.nn.ModuleList(method.build(ROWS[name], 16) for name, method in methods.items())
        counted = count_table_bytes(tables, kind)
        assert counted.tables <= share * counted.dense_tables
        spare = share * counted.dense_total - counted.total
        assert 0 <= spare < 64 + kind.row_state_bytes(16)


def test_scarce_bytes_give_ids_in_between_narrow_rows() -> None:
    """Over all tables, ids with a wide row are looked up more than those with a narrow one, and those than the rest."""
    methods = suggest(ROWS, 16, "1/40", counts=COUNTS, training=True, row_state=4)
    assert isinstance(methods["users"], Bands)
    assert [method for _, method in methods["users"].bands] == [CODED, NARROW, Shared(1)]
    looked_up: dict[str, list[Tensor]] = {}
    for name, method in methods.items():
        start = 0
        for kind, rows in band_rows(method, ROWS[name]).items():
            looked_up.setdefault(kind, []).append(COUNTS[name][start : start + rows])
            start += rows
    wide, narrow, rest = (torch.cat(looked_up[kind]) for kind in ("quantized", "mixed_dimension", "shared"))
    ratio = NARROW_GAIN / 5 / ((1 - NARROW_GAIN) / 16)  # of bytes with state: 5 of a narrow row, 16 more of a wide one
    assert int(wide.min()) >= int(narrow.max()) - 1
    assert int(narrow.min()) >= int(rest.max()) - 1
    assert int(wide.min()) / int(narrow.min()) == pytest.approx(ratio, rel=0.1)


def test_narrow_rows_are_left_out_where_they_save_nothing() -> None:
    alone = suggest(ROWS, 16, "1/40", counts=COUNTS)  # does not train
    assert "mixed_dimension" not in band_rows(alone["users"], ROWS["users"])
    short = suggest(ROWS, 3, "1/20", counts=COUNTS, training=True)  # no quarter of a row
    assert "mixed_dimension" not in band_rows(short["users"], ROWS["users"])
    few = {f"t{index}": zipf(60, 500) for index in range(40)}  # a projection takes as much as a dozen rows
    methods = suggest(dict.fromkeys(few, 60), 16, "1/16", counts=few, training=True, row_state=4)
    assert all("mixed_dimension" not in band_rows(method, 60) for method in methods.values())


def test_rows_that_were_never_looked_up_are_not_kept() -> None:
    counts = {"a": torch.cat((torch.full((50,), 9), torch.zeros(50, dtype=torch.int64)))}
    assert suggest({"a": 100}, 16, "9/10", counts=counts) == {"a": Bands(((50, Dense()), (None, Shared(1))))}
    assert suggest({"a": 100}, 16, "9/10", counts={"a": torch.zeros(100)}) == {"a": Shared(1)}


def test_counts_that_rise_do_not_split_the_popularity_order() -> None:
    counts = {"a": torch.tensor([100, 0, 90, 0, 80, *([2] * 95)])}
    (end, method), _ = bands_of(suggest({"a": 100}, 4, 16 * 6, counts=counts)["a"])
    assert (end, method) == (5, Dense())


def bands_of(method: Method) -> tuple[tuple[int | None, Method], ...]:
    assert isinstance(method, Bands)
    return method.bands


def smallest_budget(error: ConfigError) -> int:
    found = re.search(r"one row for all ids of every table takes ([0-9]+)B", str(error))
    assert found, str(error)
    return int(found[1])


SIZES = st.builds(
    TableSize,
    num_rows=st.integers(1, 300),
    dim=st.integers(1, 40),
    dtype=st.sampled_from((torch.float64, torch.float32, torch.bfloat16)),
    training=st.just(True),
    row_state=st.sampled_from((0, 4, 80)),
)


@given(sizes=st.lists(SIZES, min_size=1, max_size=5), share=st.floats(1e-3, 1.0), seed=st.integers(0, 999))
@settings(deadline=None, max_examples=200)
def test_any_mix_keeps_its_budget_or_names_the_smallest(sizes: list[TableSize], share: float, seed: int) -> None:
    tables = {f"t{index}": size for index, size in enumerate(sizes)}
    generator = torch.Generator().manual_seed(seed)
    counts = {
        name: torch.randint(0, 40, (size.num_rows,), generator=generator).sort(descending=True).values
        for name, size in tables.items()
    }
    dense = sum(size.dense_bytes for size in sizes)
    budget = max(1, int(share * dense))
    try:
        methods = divide_budget(tables, budget, counts=counts)
    except ConfigError as error:
        budget = smallest_budget(error)
        methods = divide_budget(tables, budget, counts=counts)
        with pytest.raises(ConfigError, match=f"takes {budget}B"):
            divide_budget(tables, budget - 1, counts=counts)
    assert sum(size.bytes_by(methods[name]) for name, size in tables.items()) <= budget
    for name, size in tables.items():
        built = methods[name].build(size.num_rows, size.dim, dtype=size.dtype)
        assert built.num_bytes() == size.bytes_by(methods[name])


def test_small_tables_stay_dense_if_asked() -> None:
    methods = suggest(ROWS, 16, "1/10", counts={**COUNTS, "days": torch.zeros(7)}, min_rows=100)
    assert methods["days"] == Dense()


def test_a_budget_below_the_smallest_form_names_it() -> None:
    with pytest.raises(ConfigError, match=r"too small for these 3 tables: one row .* takes 192B"):
        suggest(ROWS, 16, 191, counts=COUNTS)
    assert suggest(ROWS, 16, 192, counts=COUNTS) == dict.fromkeys(ROWS, Shared(1))
    with pytest.raises(ConfigError, match="fewer than 100 rows kept dense, takes 576B"):
        suggest(ROWS, 16, 575, counts=COUNTS, min_rows=100)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"days": COUNTS["days"]}, "table 'items' has no counts"),
        ({**COUNTS, "items": COUNTS["items"][:-1]}, "'items' has 2,000 rows and 1,999 counts: are they of another"),
        ({**COUNTS, "items": COUNTS["items"][None]}, r"counts of shape \(1, 2000\)"),
        ({**COUNTS, "days": torch.tensor([1, 2, -3, 0, 0, 0, 0])}, "row 2 of table 'days' has a count of -3"),
        (
            {**COUNTS, "days": torch.tensor([1, float("nan"), 0, 0, 0, 0, 0])},
            "row 1 of table 'days' has a count of nan",
        ),
        ({**COUNTS, "user": COUNTS["users"]}, "counts has 'user', which is no table .did you mean 'users'"),
    ],
)
def test_counts_that_cannot_be_those_of_the_tables(counts: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        suggest(ROWS, 16, "1/10", counts=counts)


def test_counts_go_with_auto_alone() -> None:
    with pytest.raises(ConfigError, match="leave out counts or method hashed"):
        suggest(ROWS, 16, "1/10", "hashed", counts=COUNTS)
