"""Mixed-dimension tables: the narrow table and its projection, the best fit, and the power rule."""

from __future__ import annotations

import pytest
import torch

from holdall.common.errors import ConfigError
from holdall.tables import MixedDimension, method_from_json, mixed_dimensions
from holdall.tables.fitting import BLOCK_NUMBERS


def test_a_row_is_its_narrow_row_times_the_projection() -> None:
    table = MixedDimension(dim=2).build(3, 4)
    with torch.no_grad():
        table.narrow.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, -1.0]]))
        table.projection.copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]]))
    assert table.rows(torch.tensor([2, 0])).tolist() == [[-8, -16, -24, -32], [1, 2, 3, 4]]


def test_a_wide_setting_has_no_projection() -> None:
    table = MixedDimension(dim=9).build(5, 8)
    assert [name for name, _ in table.named_parameters()] == ["narrow.weight"]
    assert table.num_bytes() == 4 * 5 * 8


def test_the_scale_is_shared_by_both_factors() -> None:
    table = MixedDimension(dim=8).build(5_000, 32, init_std=0.01, generator=torch.Generator().manual_seed(0))
    narrow, projection = (factor.detach().square().mean().sqrt() for factor in (table.narrow.weight, table.projection))
    assert float(narrow / projection) == pytest.approx(1, rel=0.02)
    assert float(table.materialize().std()) == pytest.approx(0.01, rel=0.02)


def test_padding_row_starts_at_zero() -> None:
    table = MixedDimension(dim=3).build(6, 8, padding_idx=2)
    assert not table.materialize(torch.tensor([2])).any()
    assert table.materialize(torch.tensor([3])).any()


def test_the_fit_of_a_table_of_its_rank_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = MixedDimension(dim=3).build(500, 16, dtype=torch.float64, generator=generator).materialize()
    table = MixedDimension(dim=3).fit(weight)
    torch.testing.assert_close(table.materialize(), weight, rtol=1e-9, atol=1e-12)
    assert table.fit_error is not None
    assert table.fit_error < 1e-7
    assert MixedDimension(dim=2).fit(weight).fit_error > 0.1


def test_the_fit_is_the_truncated_svd_over_several_blocks() -> None:
    num_rows = BLOCK_NUMBERS // 8 + 100  # more than one block
    weight = torch.randn(num_rows, 8, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 9)
    table = MixedDimension(dim=5).fit(weight)
    singular = torch.linalg.svdvals(weight.double())
    best = float((singular[5:].square().sum() / singular.square().sum()).sqrt())
    assert table.fit_error == pytest.approx(best, rel=1e-5)
    assert table.narrow.weight.dtype == torch.float32


@pytest.mark.parametrize(("bits", "error"), [(8, 0.01), (4, 0.2)])
def test_narrow_rows_can_be_rounded(bits: int, error: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = MixedDimension(dim=6).build(500, 16, generator=generator).materialize()
    method = MixedDimension(dim=6, bits=bits)  # type: ignore[arg-type]
    table = method.fit(weight)
    assert 1e-4 < table.fit_error < error  # type: ignore[operator]
    assert table.num_bytes() == method.num_bytes(500, 16) == 500 * (6 * bits // 8 + 8) + 4 * 6 * 16
    assert [name for name, _ in table.named_parameters()] == ["projection"]
    assert table.row_parameters() == {}
    assert method_from_json(method.to_json()) == method
    wide = MixedDimension(dim=20, bits=bits).fit(weight)  # type: ignore[arg-type]
    assert wide.num_bytes() == 500 * (16 * bits // 8 + 8)


def test_bits_that_there_are_none_of() -> None:
    with pytest.raises(ConfigError, match="bits must be 8, 4 or none, not 5"):
        MixedDimension(dim=2, bits=5)  # type: ignore[arg-type]


def test_the_fit_of_zeros_is_zeros() -> None:
    table = MixedDimension(dim=2).fit(torch.zeros(7, 4))
    assert table.fit_error == 0
    assert not table.materialize().any()


def test_a_fit_to_other_rows_is_refused() -> None:
    table = MixedDimension(dim=2).build(7, 4)
    with pytest.raises(ConfigError, match=r"7 rows of dim 4 to a weight of shape \(1, 4\)"):
        type(table).from_dense(torch.zeros(1, 4), table)


@pytest.mark.parametrize(("num_rows", "dim"), [(1000, 16), (999, 17), (5, 64), (100_000, 128)])
def test_for_bytes_uses_the_budget(num_rows: int, dim: int) -> None:
    for share in (2, 3, 7, 16):
        budget = 4 * num_rows * dim // share
        if budget < 4 * (num_rows + dim):
            with pytest.raises(ConfigError, match=f"at least {4 * (num_rows + dim)} bytes"):
                MixedDimension.for_bytes(num_rows, dim, budget)
            continue
        method = MixedDimension.for_bytes(num_rows, dim, budget)
        assert method.num_bytes(num_rows, dim) <= budget
        assert MixedDimension(dim=method.dim + 1).num_bytes(num_rows, dim) > budget
    assert MixedDimension.for_bytes(num_rows, dim, 4 * num_rows * dim) == MixedDimension(dim=dim)


def test_bad_settings() -> None:
    for dim in (0, -1, 2.5):
        with pytest.raises(ConfigError, match="dim must be at least 1"):
            MixedDimension(dim=dim)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'dim' is missing"):
        method_from_json({"method": "mixed_dimension"})


def test_power_rule_by_numbers_of_rows() -> None:
    """16 * (10 / n) ** 0.3 for n = 10, 1000, 100000: 16, 4.02, 1.01."""
    found = mixed_dimensions({"small": 10, "middle": 1000, "large": 100_000}, base_dim=16)
    assert found == {"small": MixedDimension(16), "middle": MixedDimension(4), "large": MixedDimension(1)}


def test_power_rule_by_counts_is_that_of_mean_counts() -> None:
    """Means 8, 2 and 0.5: with temperature 0.5 widths of 32 times 1, 1/2 and 1/4."""
    counts = {"a": torch.tensor([12, 4]), "b": [5, 1, 1, 1], "c": torch.tensor([1, 0])}
    widths = {name: method.dim for name, method in mixed_dimensions(counts, 32, temperature=0.5).items()}
    assert widths == {"a": 32, "b": 16, "c": 8}
    one_hot = {"a": torch.full((10,), 100), "b": torch.full((1000,), 1)}  # 1000 lookups each
    assert mixed_dimensions(one_hot, 16) == mixed_dimensions({"a": 10, "b": 1000}, 16)


def test_power_rule_rounds_and_bounds() -> None:
    sizes = {"small": 10, "middle": 1000, "large": 10**9}
    widths = [method.dim for method in mixed_dimensions(sizes, 30, round_to=8).values()]
    assert widths == [30, 8, 8]  # 32 is more than the base, 7.5 rounds up, and nothing is narrower than 8
    assert {method.dim for method in mixed_dimensions(sizes, 30, temperature=0).values()} == {30}


def test_power_rule_refuses() -> None:
    with pytest.raises(ConfigError, match="not both"):
        mixed_dimensions({"a": 10, "b": [1, 2]}, 16)
    with pytest.raises(ConfigError, match="temperature"):
        mixed_dimensions({"a": 10}, 16, temperature=1.5)
    with pytest.raises(ConfigError, match="table 'a' needs at least 1 row"):
        mixed_dimensions({"a": 0}, 16)
    with pytest.raises(ConfigError, match="counts of table 'a'"):
        mixed_dimensions({"a": [1, -1]}, 16)
    with pytest.raises(ConfigError, match="round_to"):
        mixed_dimensions({"a": 1}, 16, round_to=32)


def test_trained_bytes_take_a_byte_for_each_number() -> None:
    method = MixedDimension(dim=3, bits=8, trainable=True)
    table = method.build(1_000, 16)
    assert table.num_bytes() == method.num_bytes(1_000, 16) == 3 * 1_000 + 8 + 4 * 3 * 16
    assert method.trains
    assert not MixedDimension(dim=3, bits=8).trains
    assert method_from_json(method.to_json()) == method


def test_the_fit_of_trained_bytes_uses_the_whole_grid() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = 40.0 * torch.randn(500, 3, generator=generator) @ torch.randn(3, 16, generator=generator)
    table = MixedDimension(dim=3, bits=8, trainable=True).fit(weight)
    assert {int(table.narrow.codes.min()), int(table.narrow.codes.max())} & {0, 255}
    assert table.fit_error is not None
    assert table.fit_error < 0.02
    zeros = MixedDimension(dim=3, bits=8, trainable=True).fit(torch.zeros(5, 8))
    assert not zeros.materialize().any()


@pytest.mark.parametrize("bits", [None, 4])
def test_only_rows_of_8_bits_train_as_bytes(bits: int | None) -> None:
    with pytest.raises(ConfigError, match="trainable is for narrow rows of bits=8"):
        MixedDimension(dim=3, bits=bits, trainable=True)  # type: ignore[arg-type]
