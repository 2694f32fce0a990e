"""Quantised tables: bytes, rounding, packing, fits, and the two forms of training."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import Quantized
from holdall.tables.fitting import BLOCK_NUMBERS
from holdall.tables.quantized import LearnedRoundingTable, QuantizedTable, StochasticRoundingTable
from holdall.tables.rounding import dequantize, pack_pairs, quantize, round_stochastically, row_grid, unpack_pairs

STOCHASTIC = Quantized(rounding="stochastic", trainable=True)
LEARNED = Quantized(rounding="learned", trainable=True)


def gaussian(num_rows: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(seed))


def stochastic_table(num_rows: int, dim: int, rows: Tensor | float) -> StochasticRoundingTable:
    """A trainable table whose rows span -1 to 1 in their first two numbers and are `rows` elsewhere."""
    weight = torch.zeros(num_rows, dim)
    weight[:] = rows
    weight[:, 0], weight[:, 1] = -1, 1
    table = STOCHASTIC.fit(weight)
    assert isinstance(table, StochasticRoundingTable)
    return table


def push(table: StochasticRoundingTable, ids: Tensor, gradient: Tensor) -> None:
    (table.rows(ids) * gradient).sum().backward()


@pytest.mark.parametrize(
    ("method", "bytes_a_row"),
    [(Quantized(), 13 + 8), (Quantized(bits=4), 7 + 8), (STOCHASTIC, 13 + 8), (LEARNED, 4 * 14)],
)
def test_bytes_of_a_row_of_thirteen(method: Quantized, bytes_a_row: int) -> None:
    table = method.build(10, 13)
    assert table.num_bytes() == 10 * bytes_a_row
    assert sum(p.numel() for p in table.parameters()) == method.num_parameters(10, 13)
    half = Quantized().build(10, 13, dtype=torch.bfloat16)
    assert half.num_bytes() == 10 * (13 + 4)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(1, 33), st.integers(0, 10_000))
def test_packing_is_undone_by_unpacking(num_rows: int, dim: int, seed: int) -> None:
    codes = torch.randint(16, (num_rows, dim), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = pack_pairs(codes)
    assert packed.shape == (num_rows, (dim + 1) // 2)
    assert torch.equal(unpack_pairs(packed, dim), codes)


def test_packing_by_hand() -> None:
    assert pack_pairs(torch.tensor([[1, 2, 15]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    st.integers(1, 20),
    st.sampled_from([15, 255]),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    st.floats(1e-3, 1e3),
    st.integers(0, 10_000),
)
def test_no_number_is_off_by_more_than_half_a_step(
    dim: int, levels: int, dtype: torch.dtype, scale: float, seed: int
) -> None:
    rows = gaussian(8, dim, seed).double() * scale
    rows[0] = rows[0, 0]  # a constant row
    rows[1] = 0
    grid = row_grid(rows, levels, dtype).double()
    found = dequantize(quantize(rows, grid, levels), grid)
    fuzz = 1e-4 if dtype == torch.float16 else 1e-9 * scale  # float16 has no small steps
    assert ((found - rows).abs() <= grid[:, 1:] / 2 * (1 + 1e-9) + fuzz).all()
    assert not found[1].any()


def test_stochastic_rounding_has_the_right_mean() -> None:
    """Means of 40,000 draws within four standard deviations, and only the two neighbours occur."""
    x = torch.tensor([0.0, 0.25, 0.5, 0.9, -0.3, 7.999, 200.001])
    draws = round_stochastically(x.repeat(40_000, 1), torch.Generator().manual_seed(0))
    deviation = ((x - x.floor()) * (x.ceil() - x) / 40_000).sqrt()
    assert ((draws.mean(0, dtype=torch.float64) - x).abs() <= 4 * deviation + 1e-5).all()
    assert ((draws == x.floor()) | (draws == x.ceil())).all()


@pytest.mark.parametrize(("bits", "error"), [(8, 0.0039), (4, 0.059)])
def test_the_error_of_a_fit_is_reported(bits: int, error: float) -> None:
    weight = gaussian(2000, 16)
    table = Quantized(bits=bits).fit(weight)
    assert table.fit_error == pytest.approx(float((table.materialize() - weight).norm() / weight.norm()), rel=1e-5)
    assert table.fit_error == pytest.approx(error, rel=0.05)
    assert not list(table.parameters())
    assert not table.rows(torch.tensor([1])).requires_grad


@pytest.mark.parametrize("dim", [2, 16, 64])
def test_four_bits_beat_the_range_of_the_row(dim: int) -> None:
    weight = gaussian(500, dim)
    grid = row_grid(weight, 15, torch.float32)
    plain = dequantize(quantize(weight, grid, 15), grid)
    by_row = (Quantized(bits=4).fit(weight).materialize() - weight).square().sum(1)
    assert (by_row <= (plain - weight).square().sum(1) + 1e-9).all()
    if dim > 2:
        assert by_row.sum() < 0.92 * (plain - weight).square().sum()


@pytest.mark.parametrize("method", [Quantized(), Quantized(bits=4), STOCHASTIC, LEARNED], ids=repr)
@pytest.mark.parametrize("dim", [1, 7, 16])
def test_a_materialised_table_is_fitted_almost_exactly(method: Quantized, dim: int) -> None:
    torch.manual_seed(0)
    weight = method.build(300, dim).materialize()
    table = method.fit(weight)
    assert table.fit_error is not None
    assert table.fit_error < 1e-6


def test_fits_walk_several_blocks() -> None:
    weight = gaussian(BLOCK_NUMBERS // 8 + 50, 8)
    table = Quantized().fit(weight)
    assert (table.materialize() - weight).abs().amax() < 0.025  # half a step of a row that spans 12


def test_large_tables_are_drawn_in_blocks() -> None:
    """Rows of every block differ: none is left at zero and none is the copy of another."""
    num_rows = 2 * BLOCK_NUMBERS // 64 + 10
    table = Quantized(bits=4).build(num_rows, 64, init_std=1.0, generator=torch.Generator().manual_seed(0))
    sample = table.materialize(torch.arange(0, num_rows, BLOCK_NUMBERS // 64))
    assert len(sample) == 3
    assert sample.std(dim=1).amin() > 0.5
    assert torch.cdist(sample, sample).fill_diagonal_(9).amin() > 1


@pytest.mark.parametrize("method", [Quantized(), Quantized(bits=4), STOCHASTIC, LEARNED], ids=repr)
def test_padding_row_starts_at_zero(method: Quantized) -> None:
    table = method.build(9, 6, padding_idx=4)
    assert not table.materialize(torch.tensor([4])).any()
    assert table.materialize(torch.tensor([5])).any()


# Stochastic rounding.


def test_a_step_moves_touched_rows_by_the_right_mean() -> None:
    """5,000 equal rows, one step of SGD by a fraction of a level: the mean moves by lr * gradient."""
    torch.manual_seed(0)
    table = stochastic_table(5000, 4, rows=0.1)
    before = table.materialize()
    gradient = torch.tensor([0.0, 0.0, 1.0, -3.0])
    push(table, torch.arange(4000), gradient)
    table.apply_gradients(lr=1e-3)
    change = table.materialize() - before
    step = 2 / 255
    mean = change[:4000].mean(0)
    assert mean[2] == pytest.approx(-1e-3, abs=4 * step / 2 / 4000**0.5)
    assert mean[3] == pytest.approx(3e-3, abs=4 * step / 2 / 4000**0.5)
    assert not change[:4000, :2].any()
    assert not change[4000:].any()


def test_numbers_without_gradient_stay_where_they_are() -> None:
    torch.manual_seed(0)
    table = stochastic_table(3, 8, rows=torch.linspace(-0.7, 0.7, 8))
    before = table.materialize()
    for _ in range(200):
        push(table, torch.tensor([0, 2]), torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 0.01]))
        table.apply_gradients(lr=0.1)
    after = table.materialize()
    assert torch.equal(after[:, :7], before[:, :7])
    assert torch.equal(after[1], before[1])
    assert after[0, 7] < before[0, 7] - 0.1


def test_tiny_steps_add_up() -> None:
    """Ten thousand rows moved a hundred times by a ten thousandth of a level: rounding to nearest would never move."""
    torch.manual_seed(0)
    table = stochastic_table(10_000, 3, rows=0.5)
    before = table.materialize()[:, 2].mean(dtype=torch.float64)
    level = 2 / 255
    for _ in range(100):
        push(table, torch.arange(10_000), torch.tensor([0.0, 0.0, -1.0]))
        table.apply_gradients(lr=1e-4 * level)
    moved = (table.materialize()[:, 2].mean(dtype=torch.float64) - before) / level
    assert float(moved) == pytest.approx(0.01, abs=4 * (0.01 / 10_000) ** 0.5)


def test_bfloat16_grids_do_not_swallow_small_steps() -> None:
    torch.manual_seed(0)
    table = stochastic_table(10_000, 3, rows=0.5).to(torch.bfloat16)
    before = table.codes[:, 2].double().mean()
    for _ in range(20):
        push(table, torch.arange(10_000), torch.tensor([0.0, 0.0, -1.0], dtype=torch.bfloat16))
        table.apply_gradients(lr=2e-4)  # bfloat16 has 0.004 between numbers from 0.5 on
    moved = float(table.codes[:, 2].double().mean() - before) * 2 / 255
    assert moved == pytest.approx(0.004, rel=0.1)


def test_a_row_that_outgrows_its_grid_gets_a_wider_one() -> None:
    torch.manual_seed(0)
    table = stochastic_table(2, 4, rows=0.1)
    push(table, torch.tensor([0]), torch.tensor([0.0, 0.0, -30.0, 0.0]))
    table.apply_gradients(lr=1.0)
    row, other = table.materialize()
    torch.testing.assert_close(row, torch.tensor([-1.0, 1.0, 30.1, 0.1]), rtol=0, atol=31.1 * 1.25 / 255)
    torch.testing.assert_close(other, torch.tensor([-1.0, 1.0, 0.1, 0.1]), rtol=0, atol=2 / 255)


def test_zero_rows_can_train() -> None:
    table = STOCHASTIC.fit(torch.zeros(2, 3))
    push(table, torch.tensor([1]), torch.tensor([-1.0, 0.0, 2.0]))
    table.apply_gradients(lr=1.0)
    torch.testing.assert_close(table.materialize()[1], torch.tensor([1.0, 0.0, -2.0]), rtol=0, atol=3 * 1.25 / 255)
    assert not table.materialize()[0].any()


def test_pending_gradients_add_up_and_clear() -> None:
    table = stochastic_table(6, 3, rows=0.0)
    table(torch.tensor([[1, 4], [4, 4]])).sum().backward()
    table.rows(torch.tensor([1])).sum().backward()
    ids, gradient = table.pending_gradient()
    assert ids.tolist() == [1, 4]
    assert gradient.tolist() == [[2.0] * 3, [3.0] * 3]
    before = table.materialize()
    table.zero_pending()
    table.apply_gradients(lr=1.0)
    assert torch.equal(table.materialize(), before)
    assert table.pending_gradient()[0].numel() == 0
    with torch.no_grad():
        assert not table.rows(torch.tensor([1])).requires_grad


def test_gradients_that_are_not_applied_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdall.tables.quantized.MAX_PENDING", 3)
    table = stochastic_table(2, 2, rows=0.0)
    for _ in range(3):
        table.rows(torch.tensor([0])).sum().backward()
    with pytest.raises(ConfigError, match="call apply_gradients"):
        table.rows(torch.tensor([0])).sum().backward()


def test_an_optimizer_with_state_drives_the_rows() -> None:
    """Row-wise Adagrad as a change of the touched rows: the first step is lr along the gradient's direction."""
    torch.manual_seed(0)
    table = stochastic_table(4, 3, rows=0.5)
    sums = torch.zeros(4)

    def adagrad(ids: Tensor, gradients: Tensor) -> Tensor:
        sums[ids] += gradients.square().mean(1)
        return -0.1 * gradients / sums[ids].sqrt()[:, None]

    push(table, torch.tensor([2]), torch.tensor([0.0, 0.0, 1e-5]))
    table.apply_row_update(adagrad)
    assert float(table.materialize()[2, 2]) == pytest.approx(0.5 - 0.1 * 3**0.5, abs=2 * 2 / 255)
    assert torch.equal(sums.nonzero()[:, 0], torch.tensor([2]))


def test_the_optimizer_of_a_model_applies_them() -> None:
    torch.manual_seed(0)
    table = stochastic_table(50, 4, rows=0.2)
    head = torch.nn.Linear(4, 1)
    model = torch.nn.ModuleList([table, head])
    optimizers = Optimizers(model, OptimizerConfig(name="sgd", lr=0.3))
    target = torch.randn(50, 1)
    losses = []
    for _ in range(200):
        loss = (head(table(torch.arange(50)[:, None])) - target).square().mean()
        loss.backward()
        optimizers.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]
    assert table.pending_gradient()[0].numel() == 0


# Learned rounding.


def test_learned_rounding_by_hand() -> None:
    table = LEARNED.build(1, 3, dtype=torch.float64)
    assert isinstance(table, LearnedRoundingTable)
    with torch.no_grad():
        table.stored.copy_(torch.tensor([[127.0, 10.3, -5.6]]))
    row = table.rows(torch.tensor([0]))
    assert row.tolist() == [[127, 10, -6]]
    (row * torch.tensor([[1.0, 10.0, 100.0]])).sum().backward()
    assert table.stored.grad.to_dense().tolist() == [[1, 10, 100]]
    # step is 1: the sum of gradient * (round(w / step) - w / step) over the numbers.
    assert float(table.log_step.grad.to_dense()) == pytest.approx(10 * -0.3 + 100 * -0.4)


def test_a_learned_step_clips() -> None:
    table = LEARNED.build(1, 3, dtype=torch.float64)
    with torch.no_grad():
        table.stored.copy_(torch.tensor([[254.0, 10.0, -254.0]]))
        table.log_step.fill_(-torch.tensor(2.0).double().log())
    row = table.rows(torch.tensor([0]))
    torch.testing.assert_close(row, torch.tensor([[127.0, 10.0, -127.0]], dtype=torch.float64))
    (row * torch.tensor([[1.0, 1.0, 2.0]])).sum().backward()
    torch.testing.assert_close(table.stored.grad.to_dense(), torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64))
    assert float(table.log_step.grad.to_dense()) == pytest.approx(127 - 2 * 127)


def test_training_through_the_rounding_reaches_its_targets() -> None:
    """Rows that start tiny grow a thousandfold: their grid grows with them."""
    table = LEARNED.build(40, 8, init_std=1e-3, generator=torch.Generator().manual_seed(0))
    optimizers = Optimizers(torch.nn.ModuleList([table]), OptimizerConfig(name="rowwise_adagrad", lr=0.1))
    target = gaussian(40, 8, seed=1)
    for _ in range(300):
        (table.rows(torch.arange(40)) - target).square().sum().backward()
        optimizers.step()
    assert (table.materialize() - target).norm() < 0.02 * target.norm()


@pytest.mark.parametrize("method", [Quantized(), STOCHASTIC, LEARNED], ids=repr)
def test_freezing_keeps_the_rows(method: Quantized) -> None:
    table = method.build(200, 12, mode="mean", padding_idx=7, generator=torch.Generator().manual_seed(0))
    frozen = table.freeze()
    assert type(frozen) is QuantizedTable
    assert frozen.method == Quantized()
    assert frozen.num_bytes() == 200 * (12 + 8) == Quantized().num_bytes(200, 12)
    torch.testing.assert_close(frozen.materialize(), table.materialize(), rtol=0, atol=1e-6)
    bags = torch.tensor([[3, 7, 199], [7, 7, 7]])
    torch.testing.assert_close(frozen(bags), table(bags), rtol=0, atol=1e-6)
    assert not frozen(bags).requires_grad


def test_freezing_a_clipped_row() -> None:
    table = LEARNED.build(5, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        table.log_step.copy_(torch.tensor([[-1.0], [-0.1], [0.0], [0.5], [3.0]]))
    torch.testing.assert_close(table.freeze().materialize(), table.materialize(), rtol=1e-5, atol=1e-7)


def test_for_bytes_picks_the_bits() -> None:
    assert Quantized.for_bytes(1000, 16, 1000 * 24) == Quantized(bits=8)
    assert Quantized.for_bytes(1000, 16, 1000 * 24 - 1) == Quantized(bits=4)
    assert Quantized.for_bytes(1000, 16, 1000 * 16) == Quantized(bits=4)
    with pytest.raises(ConfigError, match="at least 16000 bytes, not 15999"):
        Quantized.for_bytes(1000, 16, 15_999)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bits": 3}, "bits must be 8 or 4"),
        ({"rounding": "up"}, "rounding must be one of"),
        ({"trainable": True}, "lose every update"),
        ({"rounding": "learned"}, "set trainable=True"),
        ({"bits": 4, "rounding": "learned", "trainable": True}, "4 bits train by stochastic rounding"),
    ],
)
def test_bad_settings(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Quantized(**wrong)  # type: ignore[arg-type]


def test_a_fit_to_other_rows_is_refused() -> None:
    for method in (Quantized(), LEARNED):
        table = method.build(4, 3)
        with pytest.raises(ConfigError, match="4 rows of dim 3"):
            type(table).from_dense(torch.zeros(1, 3), table)


@pytest.mark.parametrize(("scales", "more"), [("float16", 1.06), ("bfloat16", 1.08)])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [1e-9, 1e-6, 1e-4, 1.0, 1e4])
def test_scales_of_16_bits_miss_little_more(scales: str, more: float, bits: int, size: float) -> None:
    """Steps of small rows are subnormal in float16, whose smallest number is 6e-8."""
    weight = size * gaussian(300, 16)
    method = Quantized(bits=bits, scales=scales)  # type: ignore[arg-type]
    table, plain = method.fit(weight), Quantized(bits=bits).fit(weight)  # type: ignore[arg-type]
    assert table.num_bytes() == method.num_bytes(300, 16) == 300 * (2 * bits + 4)
    rounding = 3e-8 if scales == "float16" and size < 1e-4 else 0.0
    assert size * table.fit_error < size * more * plain.fit_error + rounding


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_grids_of_16_bits_hold_every_number(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.randint(-8, 5, (2000, 1), generator=generator)
    rows = (torch.randn(2000, 6, generator=generator, dtype=torch.float64) + 1) * sizes
    rows[0] = 0
    rows[1] = 3.0
    zero, step = row_grid(rows, 255, dtype).double().split(1, dim=1)
    low, high = torch.aminmax(rows, dim=1, keepdim=True)
    assert bool((zero <= low).all())
    assert bool((zero + 255 * step >= high * (1 - 1e-12)).all())
    assert (zero[0], step[0]) == (0, 0)


def test_scales_keep_their_type_and_rows_that_of_the_table() -> None:
    table = Quantized(scales="float16").fit(torch.randn(10, 4))
    assert table.rows(torch.tensor([3])).dtype == torch.float32
    before = table.materialize()
    table.double()
    assert table.grid.dtype == torch.float16
    assert table.rows(torch.tensor([3])).dtype == torch.float64
    torch.testing.assert_close(table.materialize().float(), before)


def test_numbers_beyond_float16_are_refused() -> None:
    weight = torch.ones(10, 4)
    weight[6, 2] = -70_000.0
    with pytest.raises(ConfigError, match=r"row 6 has a number beyond 65,504, .* scales='bfloat16'"):
        Quantized(scales="float16").fit(weight)
    assert Quantized(scales="bfloat16").fit(weight).fit_error < 0.01


def test_scales_of_16_bits_train() -> None:
    """SGD on a sum moves every number by lr, in the mean of the rounding."""
    torch.manual_seed(0)
    table = Quantized(rounding="stochastic", trainable=True, scales="float16").build(200, 8, init_std=1.0)
    assert isinstance(table, StochasticRoundingTable)
    before = table.materialize()
    for _ in range(50):
        table.rows(torch.arange(200)).sum().backward()
        table.apply_gradients(0.01)
    assert float((before - table.materialize()).mean()) == pytest.approx(0.5, rel=0.02)
    frozen = table.freeze()
    assert frozen.method == Quantized(scales="float16")
    assert torch.equal(frozen.materialize(), table.materialize())


def test_bad_scales() -> None:
    with pytest.raises(ConfigError, match="scales must be one of"):
        Quantized(scales="float8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="stores no scales until freeze"):
        Quantized(rounding="learned", trainable=True, scales="float16")
