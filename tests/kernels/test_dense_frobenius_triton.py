"""Tables of several kinds written into one output, in Triton's interpreter: steps and inference equal plain torch."""

from __future__ import annotations

import pytest
import torch

from holdall.data.batch import Batch, Ids
from holdall.data.schema import DenseColumn, Feature, Schema
from holdall.embedding.bags import EmbeddingBags
from holdall.kernels.dispatch import HAS_TRITON, INTERPRETED, kernel_path
from holdall.models.dlrm import DLRMConfig
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import Frobenius
from holdall.tiers.placement import place

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)
if not INTERPRETED:
    pytest.skip("Triton's interpreter is off: set TRITON_INTERPRET=1", allow_module_level=True)

from tests.kernels.dense_frobenius_checks import METHODS, ROWS, some_ids, steps
from tests.tiers import small


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_steps_equal_plain_torch(optimizer: str) -> None:
    for found, expected in zip(steps("triton", optimizer), steps("torch", optimizer), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def test_some_features_in_another_order() -> None:
    bags = EmbeddingBags.build(ROWS, 8, METHODS)
    with torch.no_grad():
        expected = bags(some_ids(5, 0))
        with kernel_path("triton"):
            found = bags(some_ids(5, 0), [3, 0, 4])
    torch.testing.assert_close(found, expected[:, [3, 0, 4]])


def test_row_numbers_come_sorted() -> None:
    bags = EmbeddingBags.build(ROWS, 8, METHODS)
    Optimizers(bags, OptimizerConfig(name="sgd", lr=0.1))
    with kernel_path("triton"):
        bags(some_ids(21, 0)).sum().backward()
    (gradient,) = bags.packs[0].gradients
    assert gradient.sorted is not None
    in_order, bags_in_order = gradient.sorted
    order = gradient.ids.sort(stable=True)
    assert torch.equal(in_order, order.values)
    assert gradient.bag_of is not None
    assert torch.equal(bags_in_order, gradient.bag_of[order.indices])


def test_inference_reads_rows_where_they_are() -> None:
    rows = {name: count for name, count in ROWS.items() if name != "e"}
    schema = Schema(
        label="label",
        dense=(DenseColumn(name="x"),),
        features=tuple(Feature(name=name, num_rows=count, unseen=count - 1) for name, count in rows.items()),
        splits={},
    )
    model = DLRMConfig(dim=8, bottom=(4,), top=(4,)).build(schema, METHODS)
    values = torch.stack([torch.randint(count, (6,)) for count in rows.values()])
    batch = Batch(torch.rand(6, 1), Ids(values, None, len(rows)), torch.zeros(6))
    with torch.no_grad():
        expected = model(batch)
        with kernel_path("triton"):
            looked_up = model.lookup(batch)
            assert isinstance(looked_up, tuple)
            assert looked_up[2].shape == (18, 8)
            torch.testing.assert_close(model.score(batch.dense, looked_up), expected)


@pytest.mark.parametrize(
    "tails", [{"a": "device", "b": "host"}, {"a": "host", "b": "host"}], ids=["one on the device", "both on the host"]
)
def test_beside_rows_that_are_on_the_host(tails: dict[str, str]) -> None:
    """Frobenius tables, a dense one on the device, and host rows that a pack fetches: as with plain torch."""
    found = {}
    for path in ("torch", "triton"):
        with kernel_path(path):  # type: ignore[arg-type]
            model = small.build(method={"c": Frobenius(rank=4, terms=2)})
            tiers = place(model, {"a": 5, "b": 2}, "cpu", tails=tails)
            optimizers = Optimizers(model, OptimizerConfig(name="adagrad", lr=0.1))
            for batch in small.batches(4):
                tiers.fetch(batch.ids)
                small.step(model, optimizers, batch)
                tiers.write_back()
            tiers.flush()
            with torch.no_grad():
                logits = model(next(iter(small.batches(1))))
        found[path] = {**small.state(model, optimizers), "logits": logits}
    assert found["torch"].keys() == found["triton"].keys()
    for name, expected in found["torch"].items():
        torch.testing.assert_close(found["triton"][name], expected, rtol=1e-4, atol=1e-5)
