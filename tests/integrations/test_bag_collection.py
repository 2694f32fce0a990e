"""`BagCollection` in the place of TorchRec's collection: with TorchRec, and with a stand-in where it is absent."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdall
from holdall.common.errors import ConfigError, DataError
from holdall.integrations.torchrec import BagCollection, from_collection
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import Dense, TensorTrain
from tests.integrations import torchrec_stand_in

NAMES = {"goods": (30, 4, ["seen", "bought"]), "users": (7, 2, ["user"]), "more": (12, 4, ["seen", "c"])}
KEYS = ("c", "user", "unused", "bought", "seen")


@pytest.fixture(params=["stand-in", "torchrec"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "torchrec":
        return pytest.importorskip("torchrec", reason="torchrec is not installed (docs/torchrec.md has the versions)")
    module = torchrec_stand_in.module()
    monkeypatch.setitem(sys.modules, "torchrec", module)
    return module


def collection(library: Any, names: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    tables = [
        library.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features)
        for name, (rows, dim, features) in (NAMES if names is None else names).items()
    ]
    return library.EmbeddingBagCollection(tables=tables, **options)


def features(library: Any, weighted: bool = False) -> Any:
    """Bags of 0 to 2 ids of 3 samples."""
    lengths = torch.tensor([1, 0, 2, 1, 1, 1, 0, 0, 1, 2, 0, 0, 0, 2, 1])
    values = torch.tensor([11, 3, 3, 6, 0, 1, 500, 29, 4, 5, 8, 11])
    weights = torch.linspace(0.5, 2, 12) if weighted else None
    return library.KeyedJaggedTensor.from_lengths_sync(list(KEYS), values, lengths, weights)


def expected(theirs: Any, jagged: Any) -> Tensor:
    """Vectors of the collection's rows, looked up by torch: seen@goods, bought, user, seen@more, c."""
    columns = []
    bounds = jagged.offset_per_key()
    for table, key in (("goods", "seen"), ("goods", "bought"), ("users", "user"), ("more", "seen"), ("more", "c")):
        place = KEYS.index(key)
        chosen = slice(bounds[place], bounds[place + 1])
        lengths = jagged.lengths().view(len(KEYS), -1)[place]
        weights = jagged.weights_or_none()
        columns.append(
            nn.functional.embedding_bag(
                jagged.values()[chosen],
                theirs.embedding_bags[table].weight,
                nn.functional.pad(lengths.cumsum(0), (1, 0)),
                mode="sum",
                per_sample_weights=None if weights is None else weights[chosen],
                include_last_offset=True,
            )
        )
    return torch.cat(columns, dim=1)


@pytest.mark.parametrize("weighted", [False, True])
def test_vectors_keys_and_lengths(library: Any, weighted: bool) -> None:
    theirs, jagged = collection(library, is_weighted=weighted), features(library, weighted)
    found = BagCollection.of(theirs)(jagged)
    assert list(found.keys()) == ["seen@goods", "bought", "user", "seen@more", "c"]
    assert list(found.length_per_key()) == [4, 4, 2, 4, 4]
    torch.testing.assert_close(found.values(), expected(theirs, jagged))


def test_attributes_of_a_collection(library: Any) -> None:
    theirs = collection(library)
    ours = BagCollection.of(theirs)
    assert ours.embedding_bag_configs() == theirs.embedding_bag_configs()
    assert list(ours.embedding_bags) == list(NAMES)
    assert ours.device == torch.device("cpu")
    assert not ours.is_weighted()
    for name in NAMES:
        assert torch.equal(ours.embedding_bags[name].weight, theirs.embedding_bags[name].weight)  # type: ignore[arg-type]
    with torch.no_grad():
        ours.embedding_bags["users"].weight.zero_()  # type: ignore[operator]
    assert not ours(features(library)).to_dict()["user"].any()
    assert theirs.embedding_bags["users"].weight.any()  # ours are copies
    assert not any(name.startswith("embedding_bags") for name in ours.state_dict())


def test_configs_of_tables_that_were_built_here(library: Any) -> None:
    bags = holdall.EmbeddingBags(
        {"a": Dense().build(9, 4, mode="mean"), "b": TensorTrain(rank=2).build(100, 4)}, {"x": "b", "y": "a", "z": "b"}
    )
    first, second = BagCollection([bags]).embedding_bag_configs()
    assert (first.name, first.num_embeddings, first.embedding_dim, first.feature_names) == ("b", 100, 4, ["x", "z"])
    assert (second.name, second.num_embeddings, second.feature_names) == ("a", 9, ["y"])
    assert (first.pooling, second.pooling) == (library.PoolingType.SUM, library.PoolingType.MEAN)
    with pytest.raises(ConfigError, match="table 'm' pools by max"):
        BagCollection([holdall.EmbeddingBags({"m": Dense().build(5, 4, mode="max")})]).embedding_bag_configs()


def test_rows_are_copied_and_none_is_drawn(library: Any) -> None:
    theirs = collection(library)
    torch.manual_seed(5)
    BagCollection.of(theirs)
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))  # what a model draws next is what it draws beside TorchRec's collection


def test_frozen_tables_stay_frozen(library: Any) -> None:
    theirs = collection(library)
    theirs.embedding_bags["users"].weight.requires_grad_(False)
    ours = BagCollection.of(theirs, {"more": TensorTrain(rank=2)})
    assert not ours.embedding_bags["users"].weight.requires_grad
    assert ours.embedding_bags["goods"].weight.requires_grad
    before = ours.embedding_bags["users"].weight.clone()  # type: ignore[operator]
    optimizers = Optimizers(ours, OptimizerConfig(name="sgd", lr=1.0))
    ours(features(library)).values().sum().backward()
    optimizers.step()
    assert torch.equal(ours.embedding_bags["users"].weight, before)  # type: ignore[arg-type]
    assert not torch.equal(ours.embedding_bags["goods"].weight, theirs.embedding_bags["goods"].weight)  # type: ignore[arg-type]


class Model(nn.Module):
    """A model as TorchRec's are written: it reads the configs, and takes the vectors by name."""

    def __init__(self, embedding_bag_collection: Any) -> None:
        super().__init__()
        assert len(embedding_bag_collection.embedding_bag_configs()) > 0, "at least one table is needed"
        self.collection = embedding_bag_collection
        self.layer = nn.Linear(4 + 2, 1)

    def forward(self, features: Any) -> Tensor:
        by_name = self.collection(features).to_dict()
        return self.layer(torch.cat([by_name["bought"], by_name["user"]], dim=1))


@pytest.mark.parametrize("weighted", [False, True])
def test_fx_traces_the_collection_and_models_on_it(library: Any, weighted: bool) -> None:
    ours, jagged = BagCollection.of(collection(library, is_weighted=weighted)), features(library, weighted)
    model = Model(ours)
    for module in (ours, model):
        traced = torch.fx.symbolic_trace(module)
        lookups = [node for node in traced.graph.nodes if node.op == "call_module" and "groups" in str(node.target)]
        assert len(lookups) == 2  # one a dim
        found, direct = traced(jagged), module(jagged)
        assert torch.equal(*(x if isinstance(x, Tensor) else x.values() for x in (found, direct)))
    traced(jagged).sum().backward()  # the graph looks up the same parameters
    assert ours.embedding_bags["users"].weight.grad is not None


def test_meta_gives_shapes(library: Any) -> None:
    for weighted in (False, True):
        theirs = collection(library, is_weighted=weighted, device="meta")
        ours = BagCollection.of(theirs, device="meta")
        assert ours.device == ours.embedding_bags["goods"].weight.device == torch.device("meta")
        found = ours(features(library, weighted).to("meta"))
        assert found.values().shape == (3, 18)
        assert found.values().is_meta
        assert found.values().dtype == torch.float32
        assert list(found.keys()) == ["seen@goods", "bought", "user", "seen@more", "c"]
    with pytest.raises(DataError, match="the ids are on meta and the tables are not"):
        BagCollection.of(collection(library))(features(library).to("meta"))


def test_state_dicts_of_a_collection_and_our_own_load(library: Any) -> None:
    theirs, jagged = collection(library), features(library)
    ours = BagCollection.of(theirs)
    wanted = ours(jagged).values().detach().clone()
    own, model = ours.state_dict(), Model(BagCollection.of(theirs))
    of_theirs = {"collection." + name: value for name, value in theirs.state_dict().items()}
    of_theirs |= {"layer." + name: value for name, value in model.layer.state_dict().items()}
    for target, state in ((ours, own), (ours, theirs.state_dict()), (model, of_theirs)):
        bags = target if isinstance(target, BagCollection) else model.collection
        state = {name: value.clone() for name, value in state.items()}
        with torch.no_grad():
            for parameter in bags.parameters():
                parameter.fill_(7.0)
        target.load_state_dict(state, strict=True)
        assert torch.equal(bags(jagged).values(), wanted)


def test_copies_and_pickles(library: Any) -> None:
    ours, jagged = BagCollection.of(collection(library)), features(library)
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(again(jagged).values(), ours(jagged).values())
        assert [config.name for config in again.embedding_bag_configs()] == list(NAMES)


def test_a_collection_without_tables(library: Any) -> None:
    empty = collection(library, names={})
    ours = BagCollection.of(empty)
    assert ours.embedding_bag_configs() == []
    assert ours.device == torch.device("cpu")
    with pytest.raises(AssertionError, match="at least one table"):
        Model(ours)
    with pytest.raises(DataError, match="has no tables"):
        ours(features(library))
    with pytest.raises(ConfigError, match="has no tables"):
        from_collection(empty)
