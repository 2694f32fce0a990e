"""TorchRec's collections and jagged tensors become ours and come back; vectors, gradients and training are the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdall
from holdall.common.errors import ConfigError, DataError, IdError
from holdall.data.batch import Ids
from holdall.integrations.torchrec import BagCollection, from_collection, from_jagged, to_collection, to_jagged
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import Dense, TensorTrain

torchrec = pytest.importorskip(
    "torchrec", reason="torchrec is not installed (docs/torchrec.md says which versions fit together)"
)


def config(name: str, rows: int, features: list[str], dim: int = 4, pooling: str = "SUM", **more: object):  # type: ignore[no-untyped-def]
    return torchrec.EmbeddingBagConfig(
        name=name,
        num_embeddings=rows,
        embedding_dim=dim,
        feature_names=features,
        pooling=torchrec.PoolingType[pooling],
        **more,
    )


def collection(weighted: bool = False, dims: tuple[int, int, int] = (4, 4, 4), pooling: str = "SUM"):  # type: ignore[no-untyped-def]
    """Three tables: one shared by two features, one whose feature `b` another table looks up too."""
    torch.manual_seed(0)
    tables = [
        config("goods", 30, ["seen", "bought"], dims[0]),
        config("users", 7, ["b"], dims[1], pooling),
        config("more", 12, ["b", "c"], dims[2]),
    ]
    return torchrec.EmbeddingBagCollection(tables=tables, is_weighted=weighted)


def features(weighted: bool = False, keys: tuple[str, ...] = ("c", "seen", "unused", "bought", "b"), size: int = 6):  # type: ignore[no-untyped-def]
    """Bags of 0 to 3 ids, the keys in another order than the tables', one of which no table looks up."""
    generator = torch.Generator().manual_seed(1)
    limits = {"seen": 30, "bought": 30, "b": 7, "c": 12, "unused": 1000}
    lengths = torch.randint(0, 4, (len(keys), size), generator=generator)
    counts = lengths.sum(1).tolist()
    ids = [
        torch.randint(0, limits[key], (count,), generator=generator) for key, count in zip(keys, counts, strict=True)
    ]
    weights = torch.rand(sum(counts), generator=generator) if weighted else None
    return torchrec.KeyedJaggedTensor.from_lengths_sync(list(keys), torch.cat(ids), lengths.reshape(-1), weights)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
def test_vectors_are_those_of_the_collection(weighted: bool, pooling: str) -> None:
    if weighted and pooling == "MEAN":
        with pytest.raises(ConfigError, match="table 'users' pools by mean, and weights go with sum pooling only"):
            from_collection(collection(weighted, pooling=pooling))
        return
    theirs, jagged = collection(weighted, pooling=pooling), features(weighted)
    bags = from_collection(theirs)
    assert bags.features == {"seen": "goods", "bought": "goods", "b@users": "users", "b@more": "more", "c": "more"}
    expected = theirs(jagged)
    assert list(bags.features) == expected.keys()
    found = bags(from_jagged(jagged, bags, weighted=weighted))
    torch.testing.assert_close(found.reshape(6, -1), expected.values(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("weighted", [False, True])
def test_there_and_back_is_the_same(weighted: bool) -> None:
    theirs, jagged = collection(weighted), features(weighted)
    bags = from_collection(theirs)
    again = to_collection(bags, weighted=weighted)
    for one, other in zip(theirs.embedding_bag_configs(), again.embedding_bag_configs(), strict=True):
        assert (one.name, one.num_embeddings, one.embedding_dim, one.feature_names, one.pooling) == (
            (other.name, other.num_embeddings, other.embedding_dim, other.feature_names, other.pooling)
        )
    back = to_jagged(from_jagged(jagged, bags, weighted=weighted), bags)
    assert back.keys() == ["seen", "bought", "b", "c"]
    for key in back.keys():  # noqa: SIM118  (a KeyedJaggedTensor does not iterate)
        assert torch.equal(back[key].values(), jagged[key].values())
        assert torch.equal(back[key].lengths(), jagged[key].lengths())
        if weighted:
            assert torch.equal(back[key].weights(), jagged[key].weights())
    assert torch.equal(again(back).values(), theirs(jagged).values())


def test_one_id_a_bag_is_the_one_hot_form_and_nothing_is_copied() -> None:
    values = torch.tensor([3, 4, 5, 6, 0, 1, 2, 3])
    jagged = torchrec.KeyedJaggedTensor.from_lengths_sync(["x", "y"], values, torch.ones(8, dtype=torch.int64))
    ids = from_jagged(jagged, {"x": "x", "y": "y"})
    assert ids.offsets is None
    assert ids.values.tolist() == [[3, 4, 5, 6], [0, 1, 2, 3]]
    assert ids.values.data_ptr() == values.data_ptr()
    back = to_jagged(ids, {"x": "x", "y": "y"})
    assert back.lengths().tolist() == [1] * 8
    assert torch.equal(back.values(), values)
    uneven = torchrec.KeyedJaggedTensor.from_lengths_sync(["x", "y"], values, torch.tensor([2, 0, 1, 1, 1, 1, 1, 1]))
    assert from_jagged(uneven, {"x": "x", "y": "y"}).offsets is not None


@pytest.mark.parametrize("dims", [(4, 4, 4), (4, 8, 2)])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_bag_collection_trains_as_the_collection_does(dims: tuple[int, int, int], weighted: bool) -> None:
    theirs, jagged = collection(weighted, dims), features(weighted)
    ours = BagCollection.of(theirs)
    assert ours.is_weighted() is weighted
    optimizers = Optimizers(ours, OptimizerConfig(name="sgd", lr=0.5))
    plain = torch.optim.SGD(theirs.parameters(), lr=0.5)
    for _ in range(3):
        for step, module in ((optimizers.step, ours), (plain.step, theirs)):
            vectors = module(jagged).values()
            (vectors * torch.linspace(-1, 2, vectors.shape[1])).sum(1).add(0.3).square().mean().backward()
            step()
        plain.zero_grad()
    expected, found = theirs(jagged), ours(jagged)
    assert found.keys() == expected.keys()
    assert found.length_per_key() == expected.length_per_key()
    torch.testing.assert_close(found.values(), expected.values(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["b@more"], expected["b@more"], rtol=1e-5, atol=1e-6)


def models() -> dict[str, Callable[[object], torch.nn.Module]]:
    """TorchRec's own models, by name."""
    from torchrec.models.deepfm import SimpleDeepFMNN
    from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection

    sizes = {"dense_in_features": 5, "dense_arch_layer_sizes": [8, 4], "over_arch_layer_sizes": [6, 1]}
    branches = {"interaction_branch1_layer_sizes": [8], "interaction_branch2_layer_sizes": [8]}
    return {
        "DLRM": lambda tables: DLRM(embedding_bag_collection=tables, **sizes),
        "DLRM_DCN": lambda tables: DLRM_DCN(
            embedding_bag_collection=tables, dcn_num_layers=2, dcn_low_rank_dim=4, **sizes
        ),
        "DLRM_Projection": lambda tables: DLRM_Projection(embedding_bag_collection=tables, **sizes, **branches),
        "SimpleDeepFMNN": lambda tables: SimpleDeepFMNN(
            num_dense_features=5, embedding_bag_collection=tables, hidden_layer_size=6, deep_fm_dimension=3
        ),
    }


@pytest.mark.parametrize("name", ["DLRM", "DLRM_DCN", "DLRM_Projection", "SimpleDeepFMNN"])
def test_models_of_torchrec_take_a_bag_collection(name: str) -> None:
    tables = [config("goods", 30, ["seen", "bought"]), config("users", 7, ["b"]), config("more", 12, ["c"])]
    dense, jagged = torch.rand(6, 5, generator=torch.Generator().manual_seed(2)), features()
    torch.manual_seed(0)
    theirs = models()[name](torchrec.EmbeddingBagCollection(tables=tables))
    torch.manual_seed(0)
    ours = models()[name](BagCollection.of(torchrec.EmbeddingBagCollection(tables=tables)))
    torch.testing.assert_close(ours(dense, jagged), theirs(dense, jagged), rtol=1e-6, atol=1e-7)
    traced = torchrec.fx.symbolic_trace(ours)
    assert torch.equal(traced(dense, jagged), ours(dense, jagged))
    optimizers = Optimizers(ours, OptimizerConfig(name="sgd", lr=0.3))
    plain = torch.optim.SGD(theirs.parameters(), lr=0.3)
    for _ in range(3):
        for step, model in ((optimizers.step, ours), (plain.step, theirs)):
            (model(dense, jagged) - 1).square().mean().backward()
            step()
        ours.zero_grad()
        plain.zero_grad()
    torch.testing.assert_close(ours(dense, jagged), theirs(dense, jagged), rtol=1e-5, atol=1e-6)
    fresh = models()[name](BagCollection.of(torchrec.EmbeddingBagCollection(tables=tables)))
    fresh.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(fresh(dense, jagged), theirs(dense, jagged), rtol=1e-6, atol=1e-7)


def test_a_tensor_dict_of_jagged_tensors() -> None:
    from tensordict import TensorDict

    jagged, theirs = features(), collection()
    found = BagCollection.of(theirs)(TensorDict({key: jagged[key] for key in jagged.keys()}))  # noqa: SIM118
    torch.testing.assert_close(found.values(), theirs(jagged).values(), rtol=1e-6, atol=1e-7)


def test_a_collection_on_meta_gets_its_rows_here() -> None:
    wide = torchrec.EmbeddingBagCollection(tables=[config("t", 100_000, ["f"], 16)], device=torch.device("meta"))
    compressed = from_collection(wide, TensorTrain(rank=4), generator=torch.Generator().manual_seed(0))
    assert compressed.num_bytes() < 100_000 * 16 * 4 / 20
    dense = from_collection(wide, generator=torch.Generator().manual_seed(0))
    rows = dense.table("t").materialize()
    assert float(rows.std()) == pytest.approx((1 / 300_000) ** 0.5, rel=0.01)
    asked = config("t", 1000, ["f"], 16, weight_init_min=-0.3, weight_init_max=0.3)
    bags = from_collection(torchrec.EmbeddingBagCollection(tables=[asked], device=torch.device("meta")))
    assert float(bags.table("t").materialize().std()) == pytest.approx(0.3 / 3**0.5, rel=0.05)
    own = config("t", 10, ["f"], 4, init_fn=lambda weight: weight.zero_())
    with pytest.raises(ConfigError, match=r"table 't' has no rows yet .* its own init_fn"):
        from_collection(torchrec.EmbeddingBagCollection(tables=[own], device=torch.device("meta")))


def test_compressed_tables_are_fitted_and_written_out() -> None:
    theirs = collection()
    with torch.no_grad():  # rows of rank 1, which a small tensor train holds
        theirs.embedding_bags["goods"].weight.copy_(torch.ones(30, 1) * torch.arange(4.0))
    bags = from_collection(theirs, {"goods": TensorTrain(rank=4)})
    assert isinstance(bags.table("goods").method, TensorTrain)
    assert isinstance(bags.table("users").method, Dense)
    again = to_collection(bags)
    weight = again.embedding_bags["goods"].weight
    torch.testing.assert_close(weight, theirs.embedding_bags["goods"].weight, rtol=1e-4, atol=1e-4)


def test_compress_takes_a_collection_as_it_is() -> None:
    big = torchrec.EmbeddingBagCollection(tables=[config("t", 5000, ["f"], 8)])
    before = big.embedding_bags["t"].weight.nbytes
    report = holdall.compress(big, budget="1/10")
    assert report.bytes_after <= before / 10
    jagged = torchrec.KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1, 4999, 7]), torch.tensor([2, 0, 1]))
    vectors = big(jagged).values().detach()
    assert vectors.shape == (3, 8)
    assert float(vectors[1].abs().max()) == 0.0
    assert float(vectors[0].abs().max()) > 0.0


def test_half_precision() -> None:
    half = torchrec.EmbeddingBagCollection(tables=[config("t", 50, ["f"], 4, data_type=torchrec.DataType.FP16)])
    jagged = torchrec.KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1, 4, 7]), torch.tensor([2, 1]))
    ours = BagCollection.of(half)
    found = ours(jagged).values()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, half(jagged).values(), rtol=1e-3, atol=1e-3)
    (bags,) = ours.groups
    assert torch.equal(to_collection(bags).embedding_bags["t"].weight, half.embedding_bags["t"].weight)  # type: ignore[arg-type]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"have \[2, 4, 8\]: use BagCollection.of"):
        from_collection(collection(dims=(4, 8, 2)))
    with pytest.raises(ConfigError, match="EmbeddingBagCollection is wanted, not a Linear"):
        from_collection(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"no table 'good' \(did you mean 'goods'"):
        from_collection(collection(), {"good": Dense()})
    bags = from_collection(collection())
    with pytest.raises(DataError, match="has no feature 'c'"):
        from_jagged(features(keys=("seen", "bought", "b")), bags)
    with pytest.raises(DataError, match="is weighted, and the KeyedJaggedTensor has no weights"):
        from_jagged(features(), bags, weighted=True)
    with pytest.raises(DataError, match=r"a torchrec\.KeyedJaggedTensor is wanted, not a Tensor"):
        from_jagged(torch.zeros(1), bags)
    learned = torchrec.KeyedJaggedTensor.from_lengths_sync(
        ["f"], torch.tensor([0]), torch.tensor([1]), torch.ones(1, requires_grad=True)
    )
    with pytest.raises(DataError, match="weights that are learned"):
        from_jagged(learned, {"f": "t"}, weighted=True)
    uneven = torchrec.KeyedJaggedTensor(
        keys=["f", "g"], values=torch.arange(3), lengths=torch.ones(3).long(), stride_per_key_per_rank=[[2], [1]]
    )
    with pytest.raises(DataError, match="batches of different sizes"):
        from_jagged(uneven, {"f": "t", "g": "t"})
    jagged = torchrec.KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([0, 99]), torch.tensor([0, 2]))
    with pytest.raises(IdError, match=r"feature 'f' has id 99 but its table has 5 rows \(sample 1"):
        BagCollection.of(torchrec.EmbeddingBagCollection(tables=[config("t", 5, ["f"])]))(jagged)


def test_what_torchrec_lacks_is_refused() -> None:
    def bags(**options: object) -> holdall.EmbeddingBags:
        return holdall.EmbeddingBags({"t": Dense().build(5, 4, **options)})

    with pytest.raises(ConfigError, match="table 't' pools by max"):
        to_collection(bags(mode="max"))
    with pytest.raises(ConfigError, match="pools by mean with weights"):
        to_collection(bags(mode="mean"), weighted=True)
    with pytest.raises(ConfigError, match="padding id"):
        to_collection(bags(padding_idx=0))
    with pytest.raises(ConfigError, match="a table of the name 'items': rename it"):
        to_collection(holdall.EmbeddingBags({"items": Dense().build(5, 4)}))
    with pytest.raises(ConfigError, match="float64"):
        to_collection(bags(dtype=torch.float64))
    with pytest.raises(ConfigError, match="rows of table 't' are not here"):
        to_collection(holdall.EmbeddingBags.build({"t": 5}, 4, dense_device="meta"))
    with pytest.raises(DataError, match="'f' is one feature of several tables"):
        to_jagged(Ids(torch.tensor([[0, 1], [1, 1]]), None, 2), {"f@t": "t", "f@u": "u"})
    with pytest.raises(DataError, match="ids are of 2 features, and 1 are named"):
        to_jagged(Ids(torch.tensor([[0, 1], [1, 1]]), None, 2), {"f": "t"})
    short = bags(dtype=torch.bfloat16)  # not refused: float32 holds the same numbers
    assert torch.equal(to_collection(short).embedding_bags["t"].weight, short.table("t").materialize().float())


def test_the_code_of_the_page_runs() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "torchrec.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    exec(code, names)
    vectors = names["vectors"]
    assert isinstance(vectors, torch.Tensor)
    assert vectors.shape == (2, 3, 16)
