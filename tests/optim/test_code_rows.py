"""Optimizers of codes: the update of dense rows, rounded; state that is saved, resumed and clipped with the rest."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall import checkpoint
from holdall.data.batch import Ids
from holdall.data.dataset import DataSet
from holdall.data.loader import Loader
from holdall.embedding.bags import EmbeddingBags
from holdall.evaluation.evaluate_model import evaluate_model
from holdall.kernels.stochastic import keys, uniform_noise
from holdall.models import DLRM, DLRMConfig
from holdall.optim.code_rows import find_code_rows
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizer_kinds import OPTIMIZER_KINDS
from holdall.optim.optimizers import Optimizers
from holdall.tables import Bands, Dense, HotCold, Method, Quantized
from holdall.tables.quantized import StochasticRoundingTable
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import CHECKPOINTS
from holdall.training.train import train

STOCHASTIC = Quantized(rounding="stochastic", trainable=True)
HALF_SCALES = Quantized(rounding="stochastic", trainable=True, scales="float16")
FOUR_BITS = Quantized(bits=4, rounding="stochastic", trainable=True)
ROWS, DIM = 40, 6


def coded(seed: int = 0, method: Quantized = STOCHASTIC) -> StochasticRoundingTable:
    torch.manual_seed(seed)
    table = method.fit(torch.randn(ROWS, DIM, dtype=torch.float64))
    assert isinstance(table, StochasticRoundingTable)
    return table


def push(table: nn.Module, ids: Tensor, gradients: Tensor) -> None:
    """A backward that gives the rows `ids` these gradients."""
    (table(ids[:, None]) * gradients).sum().backward()


@pytest.mark.parametrize("method", [STOCHASTIC, HALF_SCALES, FOUR_BITS], ids=["8 bits", "float16 scales", "4 bits"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", OPTIMIZER_KINDS)
def test_codes_move_as_dense_rows_do(name: str, decay: float, method: Quantized) -> None:
    """From the same rows a step ends within one level of the dense step, with the same state, and moves no others."""
    config = OptimizerConfig.of_record(name)
    config = OptimizerConfig(name=config.name, momentum=config.momentum, lr=0.05, weight_decay=decay)
    codes, dense = coded(method=method), Dense().build(ROWS, DIM, dtype=torch.float64)
    of_codes, of_dense = Optimizers(codes, config), Optimizers(dense, config)
    for step in range(6):
        before = codes.materialize()
        with torch.no_grad():
            dense.weight.copy_(before)
        ids = torch.tensor([3, 0, 3, 17, step])
        gradients = torch.randn(5, DIM, dtype=torch.float64)
        push(codes, ids, gradients)
        push(dense, ids, gradients)
        of_codes.step()
        of_dense.step()
        level = codes.grid[:, 1:].double()
        assert bool(((codes.materialize() - dense.weight).abs() <= level * (1 + 1e-6)).all())
        untouched = torch.ones(ROWS, dtype=torch.bool).index_fill(0, ids, False)
        assert torch.equal(codes.materialize()[untouched], before[untouched])
        expected = {name.replace("weight", "codes"): state for name, state in of_dense.tensors().items()}
        assert of_codes.tensors().keys() == expected.keys()
        for slot, state in of_codes.tensors().items():
            torch.testing.assert_close(state, expected[slot])


def test_updates_are_right_in_the_mean() -> None:
    """A step far below one level: it moves a number by a level once in a while, the right one on average."""
    table = coded()
    optimizers = Optimizers(table, OptimizerConfig(name="sgd", lr=1.0))
    start, level = table.materialize()[5].clone(), table.grid[5, 1].clone()
    inner = (table.codes[5] > 5) & (table.codes[5] < 200)  # numbers that stay on the grid all the way
    for _ in range(2000):
        push(table, torch.tensor([5]), -level * 0.02 * torch.ones(1, DIM, dtype=torch.float64))
        optimizers.step()
    moved = ((table.materialize()[5] - start) / level)[inner]
    assert inner.any()
    assert moved.tolist() == pytest.approx([40.0] * len(moved), abs=4 * 40**0.5)


def test_rounding_depends_on_seed_step_and_place_alone() -> None:
    ends = []
    for seed in (1, 2):
        table = coded()
        optimizers = Optimizers(table, OptimizerConfig(lr=0.1))
        torch.manual_seed(seed)  # a generator in another state
        for _ in range(5):
            push(table, torch.arange(10), torch.linspace(-1, 1, 10 * DIM, dtype=torch.float64).view(10, DIM))
            optimizers.step()
            torch.rand(3)
        ends.append(table.codes.clone())
    assert torch.equal(*ends)
    noise = uniform_noise(torch.arange(1000), 16, keys(0, 1))
    assert 0 <= float(noise.min()) < 0.001 < 0.999 < float(noise.max()) <= 1
    assert float(noise.mean()) == pytest.approx(0.5, abs=0.01)
    for other in (uniform_noise(torch.arange(1000), 16, keys(0, 2)), uniform_noise(torch.arange(1000), 16, keys(1, 1))):
        correlation = torch.corrcoef(torch.stack((noise.flatten(), other.flatten())))[0, 1]
        assert abs(float(correlation)) < 0.03


def test_gradients_are_clipped_with_the_others() -> None:
    """The joint norm is that of dense tables, and the update that of the scaled gradient."""
    norms = {}
    for name, table in (("codes", coded()), ("dense", Dense().fit(coded().materialize()))):
        model = nn.ModuleList([table, nn.Linear(DIM, 1, dtype=torch.float64)])
        with torch.no_grad():
            model[1].weight.fill_(2.0)
        optimizers = Optimizers(model, OptimizerConfig(name="sgd", lr=1.0))
        before = table.materialize()
        for _ in range(2):  # gradients of two backwards add up before they are clipped
            model[1](table(torch.tensor([[1], [1], [7]]))).sum().backward()
        norms[name] = float(optimizers.clip(0.5))
        optimizers.step()
        moved = table.materialize() - before
        grid = table.grid[:, 1].max() if isinstance(table, StochasticRoundingTable) else 1e-12
        expected = torch.zeros_like(moved)
        expected[1], expected[7] = -8.0, -4.0
        assert float((moved - expected * (0.5 / norms[name])).abs().max()) <= grid
    assert norms["codes"] == pytest.approx(norms["dense"])
    assert norms["codes"] > 1


def test_clipped_gradients_can_be_dropped() -> None:
    table = coded()
    optimizers = Optimizers(table, OptimizerConfig(name="sgd", lr=1.0))
    before = table.materialize()
    push(table, torch.tensor([2]), torch.ones(1, DIM, dtype=torch.float64))
    optimizers.clip(0.1)
    optimizers.zero_grad()
    push(table, torch.tensor([3]), torch.ones(1, DIM, dtype=torch.float64))
    optimizers.step()
    moved = (table.materialize() != before).any(1)
    assert moved.nonzero()[:, 0].tolist() == [3]


def test_tables_inside_tables_have_state_of_their_own() -> None:
    bags = EmbeddingBags.build({"a": 30, "b": 20}, 4, {"a": HotCold(hot_rows=5, cold=STOCHASTIC), "b": STOCHASTIC})
    optimizers = Optimizers(bags, OptimizerConfig(lr=0.1))
    names = {name: tuple(state.shape) for name, state in optimizers.tensors().items()}
    assert names == {
        "rows.tables.a.hot.weight.sum": (5,),
        "rows.tables.a.cold.codes.sum": (25,),
        "rows.tables.b.codes.sum": (20,),
    }
    before = bags.table("b").materialize()
    bags(Ids(torch.tensor([[2, 9], [0, 1]]), None, 2)).sum().backward()
    optimizers.step()
    touched = {name: int((state > 0).sum()) for name, state in optimizers.tensors().items()}
    assert set(touched.values()) == {1, 2}
    assert not torch.equal(bags.table("b").materialize()[:2], before[:2])


def test_bands_have_state_of_their_own() -> None:
    """Two bands of codes, whose rows round by different noise and are updated apart."""
    torch.manual_seed(0)
    table = Bands(((10, STOCHASTIC), (30, HALF_SCALES), (None, Dense()))).build(40, DIM)
    optimizers = Optimizers(table, OptimizerConfig(lr=0.1))
    shapes = sorted(tuple(state.shape) for state in optimizers.tensors().values())
    assert shapes == [(10,), (10,), (20,)]
    ids = torch.tensor([[0], [9], [10], [29], [30]])
    before = table.materialize()
    table(ids).sum().backward()
    optimizers.clip(1e9)
    optimizers.step()
    moved = (table.materialize() != before).any(1)
    assert moved.nonzero()[:, 0].tolist() == ids[:, 0].tolist()
    assert sum(int((state > 0).sum()) for state in optimizers.tensors().values()) == 5
    assert len({codes.seed for codes in find_code_rows(table, optimizers.config.kind, 3)}) == 2


def test_state_can_be_loaded_and_copied() -> None:
    """A copy of model and optimizers, and fresh ones with their state, go on to the same codes."""
    table = coded()
    optimizers = Optimizers(table, OptimizerConfig(lr=0.1))

    def go_on(table: StochasticRoundingTable, optimizers: Optimizers) -> Tensor:
        for _ in range(3):
            push(table, torch.arange(8), torch.ones(8, DIM, dtype=torch.float64))
            optimizers.step()
        return table.codes

    go_on(table, optimizers)
    copied, its_optimizers = copy.deepcopy((table, optimizers))
    loaded = coded(seed=9)
    loaded.load_state_dict(table.state_dict())
    fresh = Optimizers(loaded, OptimizerConfig(lr=0.1))
    fresh.load_state_dict(optimizers.state_dict())
    expected = go_on(table, optimizers)
    assert torch.equal(go_on(copied, its_optimizers), expected)
    assert torch.equal(go_on(loaded, fresh), expected)


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_a_resumed_run_is_the_same_to_the_bit(data: Path, tmp_path: Path, optimizer: str) -> None:
    config = TrainConfig.of(
        dim=4,
        bottom=(8,),
        top=(16,),
        batch_size=128,
        method="quantized",
        min_rows=0,
        clip_norm=1.0,
        optimizer=optimizer,
    )
    train(data, tmp_path / "whole", config.replace(steps=20), quiet=True)
    train(data, tmp_path / "parts", config.replace(steps=9), quiet=True)
    train(data, tmp_path / "parts", config.replace(steps=20), resume=True, quiet=True)
    found = []
    for run in ("whole", "parts"):
        path = checkpoint.latest(tmp_path / run / CHECKPOINTS)
        assert path is not None
        found.append(checkpoint.load(path)[0])
    whole, parts = found
    assert whole.keys() == parts.keys()
    assert any(name.startswith("optimizer.rows.") and ".codes." in name for name in whole)
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []


def test_training_on_codes_scores_as_dense_training_does(data: Path) -> None:
    """From the same initial values."""
    rows, valid = DataSet(data, "train"), DataSet(data, "valid")

    def trained(method: Method) -> float:
        torch.manual_seed(0)
        start = DLRMConfig(dim=8, bottom=(8,), top=(16,)).build(rows.schema)
        tables = {name: method.fit(start.bags.table(name).materialize()) for name in rows.schema.cardinalities}
        model = DLRM(start.config, EmbeddingBags(tables, start.bags.features), 3)
        model.load_state_dict({n: t for n, t in start.state_dict().items() if "bags" not in n}, strict=False)
        optimizers = Optimizers(model, OptimizerConfig(lr=0.1))
        for epoch in range(3):
            for batch in Loader(rows, 128, shuffle="rows").epoch(epoch):
                F.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
                optimizers.step()
        return evaluate_model(model, valid)["auc"]

    dense = trained(Dense())
    assert dense > 0.65
    assert trained(STOCHASTIC) == pytest.approx(dense, abs=0.005)
