"""Tiered tables on a GPU: bit-equal to plain training there, with rows fetched ahead on streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdall.common.errors import ConfigError
from holdall.kernels.dispatch import HAS_TRITON
from holdall.models.layers import mlp
from holdall.planning.config import PlanConfig
from holdall.planning.machine.clock import Clock
from holdall.planning.machine.measure_captured import measure_captured
from holdall.planning.machine.measure_pinned import pinned_rows
from holdall.planning.planner import plan, predict
from holdall.runtime.launch_graphs import LaunchGraphs
from holdall.tables import Frobenius
from holdall.tiers.kernel_mover import KernelMover
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import evaluate
from holdall.training.train import train
from holdall.training.trainer import Trainer

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tests.gpu.runs import model_of, write_clicks
from tests.kernels import host_rows_checks as checks
from tests.planning.made_up_hardware import hardware

SMALL = TrainConfig.of(dim=16, bottom=(32,), top=(32,), batch_size=512, deterministic=True, lr=0.05, device="cuda")
SPLIT = SMALL.replace(strategy="split", hot_bytes="20KB")


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clicks(tmp_path_factory.mktemp("gpu"), 20_000)


@pytest.fixture(scope="module")
def none_ahead(clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, torch.Tensor]]:
    """Tensors of a run by host copies that fetches none ahead, without a graph, by optimizer."""
    found: dict[str, dict[str, torch.Tensor]] = {}

    def run(optimizer: str) -> dict[str, torch.Tensor]:
        if optimizer not in found:
            out = tmp_path_factory.mktemp("none-ahead") / optimizer
            config = SPLIT.replace(optimizer=optimizer, fetch_by="copy", prefetch=0, cuda_graph="off")  # type: ignore[arg-type]
            train(clicks, out, config, quiet=True)
            found[optimizer] = model_of(out)
        return found[optimizer]

    return run


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        *(("rowwise_adagrad", {"fetch_by": "copy", "prefetch": depth}) for depth in (0, 1, 3)),
        *(("rowwise_adagrad", {"fetch_by": "kernel", "prefetch": depth}) for depth in (0, 1, 2, 3, 4)),
        *((optimizer, {"fetch_by": "kernel", "prefetch": 2}) for optimizer in ("sgd", "adagrad", "adam")),
        ("sgd", {"fetch_by": "copy", "prefetch": 2}),
        ("rowwise_adagrad", {"fetch_by": "kernel", "prefetch": 2, "cuda_graph": "off"}),
        ("rowwise_adagrad", {"prefetch": 2, "tail": "disk"}),
    ],
    ids=str,
)
def test_fetching_ahead_changes_no_bit(
    clicks: Path,
    tmp_path: Path,
    none_ahead: Callable[[str], dict[str, torch.Tensor]],
    optimizer: str,
    options: dict[str, object],
) -> None:
    config = SPLIT.replace(optimizer=optimizer, **options)  # type: ignore[arg-type]
    result = train(clicks, tmp_path / "ahead", config, quiet=True)
    none, ahead = none_ahead(optimizer), model_of(tmp_path / "ahead")
    assert [name for name in none if not torch.equal(none[name], ahead[name])] == []
    if options.get("cuda_graph") != "off":
        assert result["cuda_graph"].endswith(" steps")
        assert result["cuda_graph"] != "0 steps"


def test_auto_takes_kernels_where_rows_can_be_pinned(clicks: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    trainer = Trainer(clicks, tmp_path / "run", SPLIT.replace(steps=4), quiet=True)
    (pack,) = trainer.strategy.tiers.packs
    assert isinstance(pack.mover, KernelMover)


def test_launches_for_host_rows_are_replayed(clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over epochs that end in a partial batch; bit-equal to launching them one by one."""
    captured, capture = [], LaunchGraphs._capture
    monkeypatch.setattr(LaunchGraphs, "_capture", lambda *given: captured.append(given) or capture(*given))
    config = SPLIT.replace(epochs=4, prefetch=2, fetch_by="kernel")
    train(clicks, tmp_path / "replayed", config, quiet=True)
    assert len(captured) >= 25  # five for each of five staging buffers
    captured.clear()
    train(clicks, tmp_path / "launched", config.replace(cuda_graph="off"), quiet=True)
    assert not captured
    found, expected = model_of(tmp_path / "replayed"), model_of(tmp_path / "launched")
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_kernels_cannot_move_rows_on_disk(clicks: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--fetch-by kernel is not possible, the rows are on disk"):
        train(clicks, tmp_path / "run", SPLIT.replace(fetch_by="kernel", tail="disk"), quiet=True)


@pytest.mark.parametrize(("batch", "transposed"), [(1, False), (50, True), (20_000, True)])
def test_finds_distinct_host_rows(batch: int, transposed: bool) -> None:
    checks.check_find(batch, batch, "cuda", transposed=transposed)


def test_more_rows_than_fit_the_buffer() -> None:
    checks.check_too_many("cuda")


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [1, 7, 64, 128])
def test_rows_there_and_back(dim: int, dtype: torch.dtype, lazy: bool) -> None:
    for shape in checks.SHAPES:
        checks.check_copy_rows(dim, dtype, "cuda", lazy=lazy, shape=shape)


def test_both_directions_are_measured() -> None:
    found = pinned_rows(Clock(torch.device("cuda"), repeats=1), 1 << 26, (4, 256))
    assert found is not None
    for lines in found:
        assert set(lines) == {"4", "256"}
        assert all(line.seconds(1000) > 0 for line in lines.values())


def test_rows_that_other_buffers_own() -> None:
    checks.check_find_in_buffers("cuda")


def test_copies_between_buffers() -> None:
    checks.check_copy_between_buffers("cuda")


@pytest.mark.parametrize("options", [{}, {"prefetch": 2, "refresh_hot": 7}], ids=["split", "refreshed"])
def test_split_equals_plain_in_plain_torch(clicks: Path, tmp_path: Path, options: dict[str, object]) -> None:
    """Triton's sums of a popular row depend on how many rows come before it, so on their order; torch's do not."""
    config = SMALL.replace(kernels="torch", optimizer="adagrad")
    train(clicks, tmp_path / "plain", config.replace(cuda_graph="off"), quiet=True)
    other = config.replace(strategy="split", hot_bytes="20KB", **options)  # type: ignore[arg-type]
    train(clicks, tmp_path / "split", other, quiet=True)
    plain, split = model_of(tmp_path / "plain"), model_of(tmp_path / "split")
    assert [name for name in plain if not torch.equal(plain[name], split[name])] == []


def test_split_is_close_to_plain(clicks: Path, tmp_path: Path) -> None:
    train(clicks, tmp_path / "plain", SMALL, quiet=True)
    train(clicks, tmp_path / "split", SMALL.replace(strategy="split", hot_bytes="20KB"), quiet=True)
    plain, split = model_of(tmp_path / "plain"), model_of(tmp_path / "split")
    assert all(torch.allclose(plain[name], split[name], rtol=1e-3, atol=1e-4) for name in plain)


def test_hot_batches_and_tables_on_the_host(clicks: Path, tmp_path: Path) -> None:
    aucs = []
    for name, options in {
        "host": {"strategy": "host"},
        "hot": {"strategy": "hot-batches", "hot_bytes": "100KB", "prefetch": 2},
    }.items():
        train(clicks, tmp_path / name, SMALL.replace(epochs=2, **options), quiet=True)  # type: ignore[arg-type]
        aucs.append(evaluate(tmp_path / name)["auc"])
    assert min(aucs) > 0.6
    assert abs(aucs[0] - aucs[1]) < 0.05


@pytest.mark.parametrize("tail", ["device", "disk"])
def test_steps_of_tables_in_several_tiers_are_captured(clicks: Path, tmp_path: Path, tail: str) -> None:
    """A compressed table, one with host rows, and one on the device or with disk rows, which threads copy meanwhile:
    captured in a graph, bit-equal to no graph."""
    settings = PlanConfig.of(dim=16, bottom=(32,), top=(32,), batch_size=512, preset="device")
    whole = plan(clicks, settings, hardware=hardware(device="cuda"))
    first, second, third = whole.tables
    tables = (
        replace(first, method=Frobenius(rank=4, terms=2), hot_rows=0, tail="compressed", forecast=None),
        second if tail == "device" else replace(second, hot_rows=7, tail=tail, forecast=None),
        replace(third, hot_rows=100, tail="host", forecast=None),
    )
    edited = replace(whole, tables=tables, strategy="split", prefetch=2, forecast=None)
    predict(edited, clicks, hardware=hardware(device="cuda")).save(tmp_path / "plan.json")
    config = TrainConfig.of(plan=str(tmp_path / "plan.json"), epochs=4, deterministic=True, lr=0.05, device="cuda")
    captured = train(clicks, tmp_path / "captured", config, quiet=True)
    train(clicks, tmp_path / "launched", config.replace(cuda_graph="off"), quiet=True)
    assert int(captured["cuda_graph"].split()[0]) > 20
    found, expected = model_of(tmp_path / "captured"), model_of(tmp_path / "launched")
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_tables_on_the_host_learn_the_same(clicks: Path, tmp_path: Path) -> None:
    train(clicks, tmp_path / "plain", SMALL, quiet=True)
    train(clicks, tmp_path / "host", SMALL.replace(strategy="host"), quiet=True)
    plain, host = model_of(tmp_path / "plain"), model_of(tmp_path / "host")
    assert all(torch.allclose(plain[name], host[name], rtol=1e-3, atol=1e-4) for name in plain)


def test_a_seed_means_the_same_on_a_gpu() -> None:
    def weights(device: str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        return [parameter.cpu() for parameter in mlp((7, 5, 1), last_activation=True, device=device).parameters()]

    assert all(torch.equal(a, b) for a, b in zip(weights("cpu"), weights("cuda"), strict=True))


def test_host_costs_of_steps_are_measured(tmp_path: Path) -> None:
    found = measure_captured(Clock(torch.device("cuda"), repeats=1), tmp_path)
    assert found is not None
    for line in (found.launch_step, found.launch_far, found.launch_layers):
        assert line.seconds(1e5) > 0
    assert found.copied.seconds(1e5, 1e4) > 0
    assert list(tmp_path.iterdir()) == []
