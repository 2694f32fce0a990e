"""Tables in several places on a GPU: the bits of plain training there, with rows fetched ahead on streams."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdall.data.synthetic import SyntheticConfig, write_prepared
from holdall.training import checkpoint
from holdall.training.config import TrainConfig
from holdall.training.evaluation import CHECKPOINTS, evaluate
from holdall.training.trainer import train

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

SMALL = TrainConfig(dim=16, bottom=(32,), top=(32,), batch_size=512, deterministic=True, lr=0.05, device="cuda")


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gpu") / "clicks"
    write_prepared(SyntheticConfig(rows=20_000, cardinalities=(5000, 70, 20_000), num_dense=3), out)
    return out


def model_of(run: Path) -> dict[str, torch.Tensor]:
    path = checkpoint.latest(run / CHECKPOINTS)
    assert path is not None
    return checkpoint.load(path, prefix="model.")[0]


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize(
    "options",
    [{"prefetch": 1}, {"prefetch": 3}, {"prefetch": 2, "tail": "disk"}],
    ids=["one", "three", "disk"],
)
def test_fetching_ahead_changes_no_bit(
    clicks: Path, tmp_path: Path, optimizer: str, options: dict[str, object]
) -> None:
    config = replace(SMALL, optimizer=optimizer, strategy="split", hot_bytes="20KB")  # type: ignore[arg-type]
    train(clicks, tmp_path / "none", config, quiet=True)
    train(clicks, tmp_path / "ahead", replace(config, **options), quiet=True)  # type: ignore[arg-type]
    none, ahead = model_of(tmp_path / "none"), model_of(tmp_path / "ahead")
    assert [name for name in none if not torch.equal(none[name], ahead[name])] == []


@pytest.mark.parametrize("options", [{}, {"prefetch": 2, "refresh_hot": 7}], ids=["split", "refreshed"])
def test_split_equals_plain_in_plain_torch(clicks: Path, tmp_path: Path, options: dict[str, object]) -> None:
    """Triton's sums of a popular row depend on how many rows come before it, so on where rows lie; torch's do not."""
    config = replace(SMALL, kernels="torch", optimizer="adagrad")
    train(clicks, tmp_path / "plain", replace(config, cuda_graph="off"), quiet=True)
    other = replace(config, strategy="split", hot_bytes="20KB", **options)  # type: ignore[arg-type]
    train(clicks, tmp_path / "split", other, quiet=True)
    plain, split = model_of(tmp_path / "plain"), model_of(tmp_path / "split")
    assert [name for name in plain if not torch.equal(plain[name], split[name])] == []


def test_split_is_close_to_plain(clicks: Path, tmp_path: Path) -> None:
    train(clicks, tmp_path / "plain", SMALL, quiet=True)
    train(clicks, tmp_path / "split", replace(SMALL, strategy="split", hot_bytes="20KB"), quiet=True)
    plain, split = model_of(tmp_path / "plain"), model_of(tmp_path / "split")
    assert all(torch.allclose(plain[name], split[name], rtol=1e-3, atol=1e-4) for name in plain)


def test_hot_batches_and_tables_on_the_host(clicks: Path, tmp_path: Path) -> None:
    aucs = []
    for name, options in {
        "host": {"strategy": "host"},
        "hot": {"strategy": "hot-batches", "hot_bytes": "100KB", "prefetch": 2},
    }.items():
        train(clicks, tmp_path / name, replace(SMALL, epochs=2, **options), quiet=True)  # type: ignore[arg-type]
        aucs.append(evaluate(tmp_path / name)["auc"])
    assert min(aucs) > 0.6
    assert abs(aucs[0] - aucs[1]) < 0.05
