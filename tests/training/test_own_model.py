"""A model of one's own: from the command line and from a call, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import holdall
from holdall import cli
from holdall.cli.options import import_model
from holdall.common.errors import CheckpointError, ConfigError
from holdall.models import own
from holdall.planning.model_settings import ModelSettings
from holdall.serving.fast_dlrm import takes
from holdall.training.check_own_model import check_own_model
from holdall.training.config import TrainConfig
from tests import pages
from tests.models.made_up import click_batch, clicks

PAGE = pages.ROOT / "docs" / "your-model.md"
QUICK = ("--steps", "3", "--batch-size", "64", "--model-setting", "hidden=4", "dim=4")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the example of the page, which nobody has imported or registered yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(own, "_GIVEN", {})
    pages.write_modules(PAGE, tmp_path)
    yield tmp_path
    sys.modules.pop("my_model", None)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start as a new process does: with no model registered."""
    monkeypatch.setattr(own, "_GIVEN", {})


def failed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence that a command ends with."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_the_example_trains_resumes_and_is_released(
    data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["train", str(data), "--out", "run", "--model", "my_model:Config", *QUICK])
    assert "my_model" in sys.modules
    assert "next: holdall evaluate run --model my_model:Config\n" in capsys.readouterr().err
    cli.main(["train", str(data), "--out", "run", "--model", "my_model:Config", *QUICK, "--resume"])
    holdall.release("run", "bundle", as_trained=True)
    assert holdall.evaluate("bundle", data=data)["auc"] == holdall.evaluate("run")["auc"]

    forget(monkeypatch)
    capsys.readouterr()
    words = ["train", str(data), "--out", "run", "--resume"]
    assert f"holdall {' '.join(words)} --model my_model:Config" in failed(words, capsys)
    assert holdall.inspect("run")["config"]["train"]["model"] == "my_model:Config"
    assert holdall.inspect("bundle")["model"]["family"] == "my_model:Config"
    for words in (["evaluate", "run"], ["score", "bundle", "rows.parquet", "--out", "scores.parquet"]):
        assert f"holdall {' '.join(words)} --model my_model:Config\n" in failed(words, capsys)
    with pytest.raises(ConfigError, match=r"holdall.register_model\('my_model:Config'\)"):
        holdall.load("bundle")
    holdall.register_model("my_model:Config")
    assert type(holdall.load("run").model).__name__ == "MeanModel"
    assert type(holdall.load("bundle").model).__name__ == "MeanModel"


def test_no_file_imports_a_model(data: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.toml").write_text('model = "my_model:Config"\n', encoding="utf-8")
    assert "--model my_model:Config" in failed(["train", str(data), "--out", "run", "--config", "train.toml"], capsys)
    with pytest.raises(ConfigError, match="give it again with --model my_model:Config"):
        TrainConfig.from_json({"model": "my_model:Config"})
    assert "my_model" not in sys.modules
    assert not Path("run").exists()


def test_the_model_of_a_run_must_be_the_one_given(data: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.py").write_text(Path("my_model.py").read_text(encoding="utf-8"), encoding="utf-8")
    holdall.train(data, "run", TrainConfig.of(steps=1, dim=4, bottom=(4,), top=(4,)), quiet=True)
    assert "run has the model dlrm, not other:Config" in failed(["evaluate", "run", "--model", "other:Config"], capsys)
    cli.main(["train", str(data), "--out", "own", "--model", "my_model:Config", *QUICK])
    capsys.readouterr()
    given = ["train", str(data), "--out", "own", "--model", "other:Config", *QUICK, "--resume"]
    assert "trained with model='my_model:Config'" in failed(given, capsys)
    sys.modules.pop("other")


def test_the_current_folder_is_searched_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python -m` does; the installed command starts without it."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path) != folder])
    import_model("my_model:Config")
    assert Path(sys.path[0]) == folder
    assert Path(sys.modules["my_model"].__file__ or "") == folder / "my_model.py"


@dataclass(frozen=True, kw_only=True)
class Sum(holdall.ModelConfig):
    """Sum of all numbers, for calls; what is wrong with it is `wrong`."""

    dim: int = 2
    widths_of_layers: tuple[int, ...] = (3, 2)
    rate: float = 0.5
    scaled_by: bool = False
    wrong: str = ""

    def with_tables(self, bags, schema, generator, device):
        return nn.Linear(1, 1) if self.wrong == "class" else SumModel(self, bags, device)


class SumModel(holdall.Model):
    def __init__(self, config, bags, device):
        super().__init__()
        self.bags, self.wrong = bags, config.wrong
        self.scale = nn.Parameter(torch.ones(3, device="cpu" if self.wrong == "device" else device))

    def score(self, dense, vectors):
        sums = vectors.sum((1, 2)) * self.scale[0]
        if self.wrong == "code":
            raise KeyError("no such layer")
        return {"shape": sums[:, None], "type": [sums], "gradient": sums.detach()}.get(self.wrong, sums)


def test_a_config_from_a_call_is_kept_as_settings(data: Path, tmp_path: Path) -> None:
    given = Sum(dim=4, widths_of_layers=(), rate=0.25, scaled_by=True)
    config = TrainConfig.of(model=given, steps=2, batch_size=32)
    assert config.model.model == "tests.training.test_own_model:Sum" or config.model.model.endswith(
        "test_own_model:Sum"
    )
    assert config.model.model_config() == given
    assert TrainConfig.from_json(config.to_json()) == config
    assert TrainConfig.of(model=holdall.DLRMConfig(top=(8, 4))).model == ModelSettings(model_setting=("top=8,4",))
    assert TrainConfig.of(model=Sum).model.model_config() == Sum()
    holdall.train(data, tmp_path / "run", config, quiet=True)
    assert holdall.evaluate(tmp_path / "run")["logloss"] > 0
    with pytest.raises(CheckpointError, match="model_setting"):
        holdall.train(data, tmp_path / "run", config.replace(model=Sum(dim=3)), resume=True, quiet=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("class", "with_tables gives Linear, not a module derived from holdall.Model"),
        ("shape", r"shape \[3, 1\] for 3 samples, not \[3\]: end it with .squeeze\(1\)"),
        ("type", "score gives list, not a tensor"),
        ("gradient", "logits without a gradient"),
        ("device", "'scale' is on cpu whatever device"),
        ("code", r"Sum fails on 3 samples of this data set in test_own_model.py, line \d+: KeyError: 'no such layer'"),
    ],
)
def test_a_wrong_model_is_refused_before_the_run(wrong: str, message: str, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        holdall.train(data, tmp_path / "run", TrainConfig.of(model=Sum(wrong=wrong), steps=1), quiet=True)
    assert not (tmp_path / "run").exists()


def test_the_check_leaves_the_random_state_and_takes_bags(bag_data: Path) -> None:
    schema = holdall.Schema.load(bag_data)
    before = torch.get_rng_state()
    check_own_model(Sum(), schema)
    assert torch.equal(torch.get_rng_state(), before)


def test_wrong_names_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.py").write_text("import holdall\nraise RuntimeError('not today')\n", encoding="utf-8")
    Path("needs.py").write_text("import no_such_package\n", encoding="utf-8")
    refused = {
        "no_such_module:Config": "there is no module 'no_such_module'",
        "my_model.inner:Config": "there is no module 'my_model.inner'",
        "my_model:Confg": "'my_model' has no 'Confg' (did you mean 'Config'?)",
        "my_model:MeanModel": "not the config of a model",
        "my_model:": "named as package.module:Config",
        "broken:Config": "'broken' cannot be imported (RuntimeError: not today)",
        "needs:Config": "module 'needs' needs 'no_such_package', which is not installed",
    }
    for name, sentence in refused.items():
        assert sentence in failed(["train", "data", "--out", "run", "--model", name], capsys), name
    assert "package.module:Config" in failed(["train", "data", "--out", "run", "--model", "my_model"], capsys)


def test_wrong_classes_are_refused() -> None:
    class Plain(holdall.DLRMConfig):
        hidden: int = 3

    @dataclass(frozen=True)
    class Abstract(holdall.ModelConfig):
        hidden: int = 3

    @dataclass(frozen=True, kw_only=True)
    class Named(Sum):
        family = "dlrm"

    @dataclass(frozen=True, kw_only=True)
    class Needs(Sum):
        hidden: int

    @dataclass(frozen=True, kw_only=True)
    class Text(Sum):
        name: str = "a"

    with pytest.raises(ConfigError, match="Plain is not a dataclass"):
        holdall.register_model(Plain)
    with pytest.raises(ConfigError, match="lacks dim and with_tables"):
        holdall.register_model(Abstract)
    with pytest.raises(ConfigError, match="has a family, 'dlrm'"):
        holdall.register_model(Named)
    with pytest.raises(ConfigError, match="give every field a default"):
        holdall.register_model(Needs)
    with pytest.raises(ConfigError, match="is an instance"):
        holdall.register_model(Sum())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot be kept in run"):
        TrainConfig.of(model=Text(name="a,b"))
    with pytest.raises(ConfigError, match="has no widths to scale"):
        TrainConfig.of(model=Sum, model_scale=2.0)


def test_a_model_derived_from_dlrm_is_another_model() -> None:
    """Its family is its own, and the fast path of serving, which computes a DLRM, does not take it."""

    class Halved(holdall.DLRM):
        def score(self, dense_BN, looked_up):
            return super().score(dense_BN, looked_up) / 2

    @dataclass(frozen=True, kw_only=True)
    class HalvedConfig(holdall.DLRMConfig):
        def with_tables(self, bags, schema, generator, device):
            return Halved(self, bags, schema.num_dense, generator=generator, device=device)

    schema = clicks(2, a=5, b=6)
    config = HalvedConfig(dim=4, bottom=(4,), top=(4,))
    assert config.family != "dlrm"
    model = config.build(schema, generator=torch.Generator().manual_seed(0))
    plain = holdall.DLRMConfig(dim=4, bottom=(4,), top=(4,)).build(schema, generator=torch.Generator().manual_seed(0))
    batch = click_batch(schema)
    torch.testing.assert_close(model(batch), plain(batch) / 2)
    assert takes(plain)
    assert not takes(model)


def test_a_class_of_a_script_has_the_name_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    main.__file__ = "/some/where/train_it.py"
    monkeypatch.setitem(sys.modules, "__main__", main)
    made = type("Config", (holdall.ModelConfig,), {"__module__": "__main__", "__qualname__": "Config"})
    assert made.own_name() == made.family == "train_it:Config"
