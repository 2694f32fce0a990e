"""EmbeddingBags: one call for all tables gives what the tables give one by one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from holdall.common.errors import ConfigError, DataError, IdError
from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import Dense, Frobenius, Method, TensorRing, TensorTrain

ROWS = {"a": 5, "b": 100, "c": 1, "d": 17}


def one_hot_ids(size: int = 6) -> Ids:
    generator = torch.Generator().manual_seed(3)
    values = torch.stack(
        [torch.randint(rows, (size,), generator=generator, dtype=torch.int32) for rows in ROWS.values()]
    )
    return Ids(values=values, offsets=None, num_features=len(ROWS))


def bag_ids(weighted: bool = False) -> Ids:
    lengths = torch.tensor([2, 0, 1, 3, 1, 1, 0, 0, 4, 2, 1, 1])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    generator = torch.Generator().manual_seed(4)
    limits = torch.tensor(list(ROWS.values())).repeat_interleave(3).repeat_interleave(lengths)
    values = (torch.rand(int(offsets[-1]), generator=generator) * limits).long()
    weights = torch.rand(values.numel(), generator=generator) if weighted else None
    return Ids(values=values, offsets=offsets, num_features=len(ROWS), weights=weights)


def one_by_one(bags: EmbeddingBags, ids: Ids) -> Tensor:
    """The definition: pool each feature's rows in plain Python."""
    output = torch.zeros(ids.batch_size, len(bags.features), bags.dim)
    for f, name in enumerate(bags.features.values()):
        weight = bags.table(name).materialize()
        values, offsets, weights = ids.bag(f)
        for b in range(ids.batch_size):
            span = slice(b, b + 1) if offsets is None else slice(int(offsets[b]), int(offsets[b + 1]))
            rows = weight[values[span].long()]
            if weights is not None:
                rows = rows * weights[span, None]
            output[b, f] = rows.sum(0)
            if bags.table(name).mode == "mean" and len(rows):
                output[b, f] /= len(rows)
    return output


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("ids", [one_hot_ids(), bag_ids()], ids=["one-hot", "bags"])
def test_equals_the_definition(fused: bool, mode: str, ids: Ids) -> None:
    bags = EmbeddingBags.build(ROWS, 4, mode=mode, fused=fused)
    expected = one_by_one(bags, ids)
    torch.testing.assert_close(bags(ids), expected)
    with torch.no_grad():
        torch.testing.assert_close(bags(ids), expected)


@pytest.mark.parametrize("fused", [True, False])
def test_weights(fused: bool) -> None:
    bags = EmbeddingBags.build(ROWS, 4, fused=fused)
    with torch.no_grad():
        torch.testing.assert_close(bags(bag_ids(weighted=True)), one_by_one(bags, bag_ids(weighted=True)))


def test_features_may_share_a_table() -> None:
    bags = EmbeddingBags.build({"item": 9}, 2, features={"seen": "item", "target": "item"})
    ids = Ids(values=torch.tensor([[1, 2], [2, 8]]), offsets=None, num_features=2)
    with torch.no_grad():
        output = bags(ids)
    torch.testing.assert_close(output, one_by_one(bags, ids))
    assert torch.equal(output[1, 0], output[0, 1])
    assert bags.num_bytes() == 9 * 2 * 4


def test_tables_of_two_types_and_an_unpacked_one() -> None:
    tables = {
        "a": Dense().build(5, 4),
        "b": Dense().build(100, 4, padding_idx=3),
        "c": Dense().build(1, 4),
        "d": Dense().build(17, 4),
    }
    bags = EmbeddingBags(tables)
    assert [sorted(pack.tables) for pack in bags.packs] == [["a", "c", "d"]]
    ids = one_hot_ids()
    with torch.no_grad():
        torch.testing.assert_close(bags(ids), one_by_one(bags, ids))


def test_packed_tables_share_one_storage_and_survive_casts_and_copies() -> None:
    bags = EmbeddingBags.build(ROWS, 4)
    before = {name: bags.table(name).materialize() for name in ROWS}
    with torch.no_grad():
        bags.packs[0].storage[0] = 7.0
        assert bags.table("a").materialize()[0].tolist() == [7.0] * 4
        before["a"][0] = 7.0
        bags.double()
        assert bags(one_hot_ids()).dtype == torch.float64
        twin = copy.deepcopy(bags)
        for name in ROWS:
            assert torch.equal(twin.table(name).materialize(), before[name].double())
        twin.packs[0].storage.zero_()
        torch.testing.assert_close(bags(one_hot_ids()).float(), one_by_one(bags, one_hot_ids()))


def test_state_dict_has_one_weight_a_table_and_loads_across_layouts() -> None:
    packed, plain = EmbeddingBags.build(ROWS, 4), EmbeddingBags.build(ROWS, 4, fused=False)
    assert list(packed.state_dict()) == [f"tables.{name}.weight" for name in ROWS]
    plain.load_state_dict(packed.state_dict())
    ids = bag_ids()
    torch.testing.assert_close(plain(ids), packed(ids), rtol=0, atol=0)


def test_names_that_torch_does_not_allow() -> None:
    bags = EmbeddingBags.build({"user.id": 3, "": 2, "items": 4, "training": 5}, 2)
    assert [bags.table(name).num_rows for name in bags.features] == [3, 2, 4, 5]
    assert bags(Ids(torch.tensor([[2], [1], [3], [4]]), None, 4)).shape == (1, 4, 2)


@pytest.mark.parametrize("bad", [-1, 17, 100_000])
def test_an_id_out_of_range_is_named(bad: int) -> None:
    bags = EmbeddingBags.build(ROWS, 4)
    ids = one_hot_ids()
    ids.values[3, 2] = bad
    with pytest.raises(IdError, match=rf"feature 'd' has id {bad} but its table has 17 rows \(sample 2"):
        bags(ids)
    ids = bag_ids()
    ids.values[-2] = bad
    with pytest.raises(IdError, match=rf"feature 'd' has id {bad} but its table has 17 rows \(sample 1"):
        bags(ids)


def test_offsets_that_are_no_bags() -> None:
    bags = EmbeddingBags.build(ROWS, 4)
    good = bag_ids()
    falling = good.offsets.clone()
    falling[4] = 0
    with pytest.raises(IdError, match="must not decrease"):
        bags(Ids(good.values, falling, 4))
    with pytest.raises(IdError, match="start at 0"):
        bags(Ids(good.values, good.offsets + 1, 4))
    with pytest.raises(IdError, match="F \\* B \\+ 1 offsets, not 12"):
        bags(Ids(good.values, good.offsets[:-1], 4))
    with pytest.raises(IdError, match="the batch has ids of 3 features, the model has 4"):
        bags(Ids(good.values, good.offsets, 3))


@pytest.mark.parametrize("method", [Dense(), TensorTrain(rank=2)])
def test_meta_gives_shapes_and_no_values(method: Method) -> None:
    bags = EmbeddingBags.build(ROWS, 8, method, device="meta")
    for ids in (one_hot_ids(), bag_ids(), bag_ids(weighted=True)):
        vectors = bags(ids.to("meta"))
        assert vectors.shape == (ids.batch_size, 4, 8)
        assert (vectors.is_meta, vectors.dtype, vectors.requires_grad) == (True, torch.float32, True)
        assert bags(ids.to("meta"), [2, 0]).shape == (ids.batch_size, 2, 8)
    bags.vector_dtype = torch.bfloat16
    with torch.no_grad():
        vectors = bags(one_hot_ids().to("meta"))
    assert (vectors.dtype, vectors.requires_grad) == (torch.bfloat16, False)
    with pytest.raises(DataError, match="the ids are on meta and the tables are not"):
        EmbeddingBags.build(ROWS, 8)(one_hot_ids().to("meta"))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torchscript_is_refused_in_one_sentence() -> None:
    bags = EmbeddingBags.build(ROWS, 8)
    for module in (bags, torch.nn.Sequential(bags, torch.nn.Linear(8, 1))):
        with pytest.raises(ConfigError, match="TorchScript cannot compile EmbeddingBags: leave torch"):
            torch.jit.script(module)


def test_impossible_tables() -> None:
    with pytest.raises(ConfigError, match="at least one table"):
        EmbeddingBags({})
    with pytest.raises(ConfigError, match=r"one dim, these have \[2, 3\]"):
        EmbeddingBags({"a": Dense().build(3, 2), "b": Dense().build(3, 3)})
    with pytest.raises(ConfigError, match="looks up table 'itme' \\(did you mean 'item'"):
        EmbeddingBags.build({"item": 3}, 2, features={"x": "itme"})


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize(
    ("many", "one"),
    [(Frobenius(4, 2), Frobenius(2, 1)), (TensorTrain(3), TensorTrain(2)), (TensorRing(2), TensorRing(3))],
    ids=["frobenius", "tensor_train", "tensor_ring"],
)
def test_compressed_tables_looked_up_together_train_as_they_do_one_by_one(
    optimizer: str, many: Method, one: Method
) -> None:
    """Tables of two settings among dense ones, some sharing a call; three steps end at the same numbers."""
    rows = {"a": 500, "b": 100, "c": 900, "d": 1700, "e": 40}
    methods = {"a": many, "c": many, "d": many, "e": one}
    generator = torch.Generator().manual_seed(7)
    values = torch.stack([torch.randint(limit, (64,), generator=generator) for limit in rows.values()])
    first = EmbeddingBags.build(rows, 4, methods, dtype=torch.float64)
    start = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    results = []
    for fused in (True, False):
        bags = EmbeddingBags.build(rows, 4, methods, fused=fused, dtype=torch.float64)
        bags.load_state_dict(start)
        optimizers = Optimizers(bags, OptimizerConfig(name=optimizer, lr=0.1))
        for _ in range(3):
            bags(Ids(values, None, 5)).sin().sum().backward()
            optimizers.step()
        results.append(bags.state_dict())
    for name, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][name], rtol=1e-9, atol=1e-12)
        assert not torch.equal(tensor, start[name])
