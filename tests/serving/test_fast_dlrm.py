"""Fast path of a DLRM: the logits of the plain one, to the bit, wherever it is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdall
from holdall.common.errors import IdError
from holdall.data.batch import Batch, Ids
from holdall.data.schema import Feature, Schema
from holdall.models import DLRM, DLRMConfig
from holdall.serving import fast_dlrm
from holdall.serving.fast_dlrm import FastDLRM, shared_out, takes
from holdall.tables import Bands, Codes, Dense, Hashed, Method, Quantized, Shared, TensorTrain
from tests.serving.test_bundle import SMALL, wide_data, write
from tests.tables.cases import CASES

__all__ = ["wide_data"]


def batch_of(model: DLRM, size: int, dtype: torch.dtype = torch.int32, seed: int = 0) -> Batch:
    """Ids of every row of a table with the same probability, as batches lie in their files."""
    draw = torch.Generator().manual_seed(seed)
    limits = torch.tensor([model.bags.table(name).num_rows for name in model.bags.features.values()])
    ids = (torch.rand(size, len(limits), generator=draw) * limits).to(dtype)
    dense = torch.randn(size, model.num_dense, generator=draw)
    return Batch(dense, Ids(ids.t(), None, len(limits)), torch.zeros(size))


def both(model: DLRM, batch: Batch, fast: FastDLRM) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode():
        made = fast(batch.dense, batch.ids)
    with torch.no_grad():
        return made, model(batch)


TAKEN = (
    *("dense", "hashed", "hashed identity when small", "shared", "shared with a row for every id", "codes"),
    *("codes of three parts", "codes of two bytes", "quantized 8", "quantized 4", "quantized 8 with scales in float16"),
    *("quantized 4 with scales in bfloat16", "quantized 4 stochastic", "quantized trained stochastically"),
    *("hot rows and dense", "hot and frozen", "hot and stochastic", "two bands", "bands of frozen and trained rows"),
    *("bands that share a codebook", "bands of stochastic rows"),
)
"""Methods whose rows are the same to the bit whatever rows are made with them."""


@pytest.mark.parametrize("decoded_rows", [10_000, 3])
@pytest.mark.parametrize("name", TAKEN)
def test_every_method_has_the_logits_of_the_plain_path(name: str, decoded_rows: int, wide_data: Path) -> None:
    model = SMALL.build(Schema.load(wide_data), CASES[name]).requires_grad_(False).eval()
    assert isinstance(model, DLRM)
    assert takes(model)
    with torch.inference_mode():
        fast = FastDLRM(model, decoded_bytes=decoded_rows * 64)
    for size in (1, 7, 64, 3):
        made, expected = both(model, batch_of(model, size), fast)
        assert torch.equal(made, expected)


BANDS = Bands(((5, Dense()), (100, Quantized(4)), (300, Codes(2, 4)), (None, Shared(1))))
MIXED: dict[str, dict[str, Method]] = {
    "dense beside bands": {"C1": BANDS},
    "two kinds": {"C1": BANDS, "C2": Quantized()},
    "half-precision rows": {"C1": Dense("bfloat16"), "C2": Dense("float16")},
    "several shared rows": {"C1": Bands(((5, Quantized()), (None, Shared(3)))), "C2": Shared(1)},
    "hashed": {"C1": Hashed(buckets=30), "C2": BANDS},
}


@pytest.mark.parametrize("decoded_rows", [10_000, 120, 1])
@pytest.mark.parametrize("name", MIXED)
def test_mixed_tables_have_the_logits_of_the_plain_path(name: str, decoded_rows: int, wide_data: Path) -> None:
    model = SMALL.build(Schema.load(wide_data), MIXED[name]).requires_grad_(False).eval()
    assert isinstance(model, DLRM)
    model.bags.vector_dtype = torch.float32
    with torch.inference_mode():
        fast = FastDLRM(model, decoded_bytes=decoded_rows * 64)
    for size, dtype in ((64, torch.int32), (1, torch.int64), (9, torch.int32)):
        made, expected = both(model, batch_of(model, size, dtype), fast)
        assert torch.equal(made, expected)


def test_shared_tables_and_no_dense_columns(tmp_path: Path) -> None:
    features = [
        Feature(name=name, num_rows=rows, unseen=0, table=t) for name, rows, t in (("a", 9, "t"), ("b", 7, None))
    ]
    features.append(Feature(name="c", num_rows=9, unseen=0, table="t"))
    for method in (None, Quantized()):
        model = SMALL.build(Schema(label="y", dense=(), features=tuple(features)), method).requires_grad_(False).eval()
        assert isinstance(model, DLRM)
        with torch.inference_mode():
            fast = FastDLRM(model)
        made, expected = both(model, batch_of(model, 20), fast)
        assert torch.equal(made, expected)


def test_what_the_fast_path_does_not_compute_is_left_to_the_plain_one(wide_data: Path) -> None:
    schema = Schema.load(wide_data)
    assert not takes(DLRMConfig(dim=16, bottom=(8,), top=(8,), interaction="concat").build(schema))
    assert not takes(holdall.DCNConfig().build(schema))
    assert not takes(SMALL.build(schema, {"C1": TensorTrain(rank=4)}))
    assert not takes(SMALL.build(schema, Dense("bfloat16")))  # the layers are float32: evaluation refuses it, too


def test_a_scorer_takes_it_and_can_be_told_not_to(
    wide_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SMALL.build(Schema.load(wide_data), BANDS)
    assert isinstance(model, DLRM)
    write(tmp_path / "bundle", model, SMALL, wide_data)
    monkeypatch.setattr(fast_dlrm, "MAX_ROWS", 64)
    scorer = holdall.load(tmp_path / "bundle")
    calls: list[int] = []
    plain = FastDLRM.__call__
    monkeypatch.setattr(
        FastDLRM, "__call__", lambda self, dense, ids: calls.append(len(dense)) or plain(self, dense, ids)
    )
    batches = [batch_of(model, size, seed=size) for size in (64, 5, 1)]
    made = [scorer.logits(batch) for batch in batches]
    assert calls == [64, 5, 1]
    scorer.fast = False
    expected = [scorer.logits(batch) for batch in batches]
    assert calls == [64, 5, 1]
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))  # none was written over


def test_ids_that_are_no_rows_are_refused(wide_data: Path, tmp_path: Path) -> None:
    model = SMALL.build(Schema.load(wide_data))
    assert isinstance(model, DLRM)
    write(tmp_path / "bundle", model, SMALL, wide_data)
    scorer = holdall.load(tmp_path / "bundle")
    for wrong in (-1, model.bags.table("C1").num_rows):
        batch = batch_of(model, 4)
        batch.ids.values[0, 2] = wrong
        with pytest.raises(IdError, match=f"feature 'C1' has id {wrong}"):
            scorer.logits(batch)


def test_rows_to_decode_are_shared_out() -> None:
    assert shared_out({"a": 1000, "b": 5, "c": 30, "d": 1000}, 105) == {"b": 5, "c": 30, "a": 35, "d": 35}
    assert shared_out({"a": 10, "b": 10}, 0) == {"a": 1, "b": 1}
