"""Packed batches have the values of the batch they were made from."""

from __future__ import annotations

import pytest
import torch

from holdall.data.batch import Batch, Ids
from holdall.runtime.packed_batch import ALIGNED, packed


def batch_of(kind: str, samples: int = 5) -> Batch:
    dense = torch.rand(samples, 0 if kind == "no dense" else 3)
    label = torch.rand(samples)
    if kind == "bags":
        offsets = torch.arange(2 * samples + 1)
        ids = Ids(torch.arange(2 * samples, dtype=torch.int32), offsets, 2, torch.rand(2 * samples))
    elif kind == "gaps":
        ids = Ids(torch.arange(4 * samples).reshape(2, -1)[:, ::2], None, 2)
    elif kind == "by feature":
        ids = Ids(torch.arange(2 * samples).reshape(2, -1), None, 2)
    else:
        ids = Ids(torch.arange(2 * samples, dtype=torch.int32).reshape(-1, 2).t(), None, 2)
    return Batch(dense, ids, label)


@pytest.mark.parametrize("samples", [0, 1, 5])
@pytest.mark.parametrize("kind", ["by sample", "by feature", "bags", "gaps", "no dense"])
def test_the_same_numbers_in_one_piece(kind: str, samples: int) -> None:
    batch = batch_of(kind, samples)
    made = packed(batch)
    assert made.ids.num_features == 2
    assert len(made) == samples
    for tensor, wanted in zip(made.tensors(), batch.tensors(), strict=True):
        assert tensor.dtype == wanted.dtype
        assert torch.equal(tensor, wanted)
        assert tensor.untyped_storage().data_ptr() == made.memory.untyped_storage().data_ptr()
        assert tensor.storage_offset() * tensor.element_size() % ALIGNED == 0
    if kind == "by sample" and samples > 1:
        assert made.ids.values.stride() == batch.ids.values.stride() == (1, 2)
    moved = made.to("meta")
    assert [tensor.stride() for tensor in moved.tensors()] == [tensor.stride() for tensor in made.tensors()]


def test_a_copy_is_filled_at_once_and_from_other_batches_too() -> None:
    kept = packed(batch_of("by sample")).empty_like()
    for other in (packed(batch_of("by sample")), batch_of("by sample"), packed(batch_of("by feature"))):
        kept.fill(other)
        assert torch.equal(kept.ids.values.long(), other.ids.values.long())
        assert torch.equal(kept.dense, other.dense)
        assert torch.equal(kept.label, other.label)
    plain = batch_of("bags").empty_like()
    plain.fill(packed(batch_of("bags")))
    assert torch.equal(plain.ids.values, batch_of("bags").ids.values)
