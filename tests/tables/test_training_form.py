"""What trains from the start: methods say so, settings and budgets choose such forms, and `train` refuses others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdall.common.errors import ConfigError
from holdall.data.loader import Loader
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.planning.table_settings import TableSettings
from holdall.tables import Dense, HotCold, Method, MixedDimension, Quantized
from holdall.tables.budget import suggest
from holdall.training.config import TrainConfig
from holdall.training.start import refuse_frozen_tables
from holdall.training.train import train
from holdall.training.trainer import Trainer
from tests.tables.cases import CASES

STOCHASTIC = Quantized(rounding="stochastic", trainable=True)
FOUR_BITS = Quantized(bits=4, rounding="stochastic", trainable=True)
SMALL = TrainConfig.of(dim=4, bottom=(8,), top=(16,), batch_size=128, optimizer="sgd", lr=0.05)


@pytest.mark.parametrize("method", CASES.values(), ids=CASES)
def test_methods_say_whether_every_row_trains(method: Method) -> None:
    """Every row moves in a step that looks it up alone, or the method does not claim to train."""
    torch.manual_seed(0)
    table = method.build(37, 8)
    optimizers = Optimizers(table, OptimizerConfig(name="sgd", lr=0.1))
    moved = []
    for row in range(37):
        before = table.materialize(torch.tensor([row]))
        loss = table.rows(torch.tensor([row])).sum()
        if loss.requires_grad:
            loss.backward()
            optimizers.step()
        moved.append(not torch.equal(table.materialize(torch.tensor([row])), before))
    assert method.trains == all(moved) or isinstance(method, MixedDimension)  # its projection moves all rows


@pytest.mark.parametrize("method", CASES.values(), ids=CASES)
def test_the_form_for_training_takes_the_same_bytes(method: Method) -> None:
    trained = method.for_training()
    assert type(trained) is type(method)
    assert trained.num_bytes(37, 8) == method.num_bytes(37, 8)
    assert trained == method or not method.trains


def test_forms_for_training() -> None:
    assert Quantized().for_training() == STOCHASTIC
    assert Quantized(bits=4).for_training() == FOUR_BITS
    assert HotCold(hot_rows=2, cold=Quantized()).for_training() == HotCold(hot_rows=2, cold=STOCHASTIC)
    assert not MixedDimension(dim=3, bits=8).trains


def test_budgets_choose_forms_that_train() -> None:
    rows = {"users": 10_000, "items": 5_000}
    assert set(suggest(rows, 16, "1/2", "quantized").values()) == {Quantized()}
    assert set(suggest(rows, 16, "1/2", "quantized", training=True).values()) == {STOCHASTIC}
    assert set(suggest(rows, 16, "1/4", "quantized", training=True).values()) == {FOUR_BITS}
    with pytest.raises(ConfigError, match=r"smallest that method mixed_dimension can train in is [0-9]+B \("):
        suggest(rows, 16, "1/50", "mixed_dimension", training=True)


def test_settings_choose_forms_that_train_unless_they_rule_them_out() -> None:
    rows = {"users": 10_000}
    assert TableSettings(method="quantized").methods(rows, 16) == {"users": STOCHASTIC}
    assert TableSettings(method="quantized", budget="1/2").methods(rows, 16) == {"users": STOCHASTIC}
    learned = ("trainable=true", "rounding=learned")
    expected = Quantized(rounding="learned", trainable=True)
    assert TableSettings(method="quantized", setting=learned).methods(rows, 16) == {"users": expected}
    assert TableSettings(method="quantized", setting=("bits=4",)).methods(rows, 16) == {"users": FOUR_BITS}
    for given in ("rounding=nearest", "trainable=false"):
        methods = TableSettings(method="quantized", setting=(given,)).methods(rows, 16)
        assert methods is not None
        assert not methods["users"].trains


def test_tables_that_would_stay_random_are_refused() -> None:
    refuse_frozen_tables(None)
    refuse_frozen_tables({"a": Dense(), "b": STOCHASTIC})
    for frozen in (Quantized(bits=4), HotCold(hot_rows=3, cold=Quantized()), MixedDimension(dim=2, bits=8)):
        with pytest.raises(ConfigError, match=r"table 'b' is stored by .* do not train: choose .* or train dense"):
            refuse_frozen_tables({"a": Dense(), "b": frozen})


@pytest.mark.parametrize(("setting", "method"), [((), STOCHASTIC), (("bits=4",), FOUR_BITS)])
def test_quantized_tables_train_from_the_start(
    data: Path, tmp_path: Path, setting: tuple[str, ...], method: Quantized
) -> None:
    """The rows that a run on codes looked up have moved, and nothing is stored but codes and grids."""
    config = SMALL.replace(method="quantized", setting=setting, min_rows=0, lr=1.0)
    trainer = Trainer(data, tmp_path / "run", config, quiet=True)
    tables = [trainer.model.bags.table(name) for name in trainer.schema.cardinalities]
    before = [table.materialize() for table in tables]
    result = trainer.run()
    looked_up = torch.cat([batch.ids.values for batch in Loader(trainer.data, 512).epoch(0)], dim=1)
    for table, start, ids in zip(tables, before, looked_up, strict=True):
        moved = (table.materialize() != start).any(1)
        assert moved[ids.unique().long()].float().mean() > 0.9  # a small update may round to none
        assert table.method == method
    assert result["table_bytes"] == sum(method.num_bytes(table.num_rows, 4) for table in tables)


def test_train_refuses_codes_that_do_not_train_before_it_writes(data: Path, tmp_path: Path) -> None:
    config = SMALL.replace(method="quantized", setting=("trainable=false",), min_rows=0)
    with pytest.raises(ConfigError, match="do not train"):
        train(data, tmp_path / "run", config, quiet=True)
    assert not (tmp_path / "run").exists()
