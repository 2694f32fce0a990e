"""Recommenders of RecBole and FuxiCTR, on data sets that only have sizes."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tests.peers.model_checks import PeerModel


def _random(high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(high))


def recbole() -> Iterator[PeerModel]:
    import numpy

    for old, new in {"float_": "float64", "complex_": "complex128", "unicode_": "str_", "bool8": "bool_"}.items():
        if not hasattr(numpy, old):  # removed in NumPy 2.0, which RecBole 1.2.1 does not know
            setattr(numpy, old, getattr(numpy, new))
    import scipy.sparse

    if not hasattr(scipy.sparse.dok_matrix, "_update"):  # private, and gone from SciPy
        scipy.sparse.dok_matrix._update = lambda self, items: self._dict.update(items)
    from recbole.config import Config
    from recbole.utils import get_model

    users, items = 1500, 1200
    batch = {
        "user_id": _random(users, 32, low=1), "item_id": _random(items, 32, low=1),
        "item_id_list": _random(items, 32, 6, low=1), "item_length": torch.full((32,), 6),
    }  # fmt: skip
    batch["neg_item_id"] = batch["item_id"].flip(0)

    class Data(SimpleNamespace):
        """What the models ask of a data set."""

        user_num, item_num, field2seqlen = users, items, {}

        def num(self, field: str) -> int:
            return {"user_id": users, "item_id": items}[field]

        def inter_matrix(self, form: str = "coo", value_field: str | None = None) -> Any:
            rows, columns = _random(users, 4000).numpy(), _random(items, 4000).numpy()
            matrix = scipy.sparse.coo_matrix((torch.ones(4000).numpy(), (rows, columns)), shape=(users, items))
            return matrix.asformat(form)

    def build(name: str) -> nn.Module:
        settings = {"device": "cpu", "use_gpu": False, "embedding_size": 16, "train_neg_sample_args": None,
                    "MAX_ITEM_LIST_LENGTH": 6, "loss_type": "CE", "hidden_size": 16, "inner_size": 16, "n_heads": 2,
                    "n_layers": 1, "mf_embedding_size": 16, "mlp_embedding_size": 16, "show_progress": False,
                    "attn_dropout_prob": 0.1, "benchmark_filename": None}  # fmt: skip
        with mock.patch.object(sys, "argv", sys.argv[:1]):  # it reads the arguments of the process
            config = Config(model=name, dataset="ml-100k", config_dict=settings)
        config["device"] = torch.device("cpu")
        config["ITEM_LIST_LENGTH_FIELD"], config["LIST_SUFFIX"] = "item_length", "_list"
        return get_model(name)(config, Data())

    general = ("BPR", "NeuMF", "LightGCN", "NGCF")
    sequential = ("SASRec", "GRU4Rec", "BERT4Rec", "Caser", "NARM", "STAMP", "NextItNet", "HGN", "TransRec",
                  "LightSANs", "SINE", "NPE", "RepeatNet", "SRGNN", "GCSAN")  # fmt: skip
    for name in (*general, *sequential):
        yield PeerModel("RecBole", name, lambda name=name: build(name), lambda module: module.predict(batch))
    for name in ("BPR", "SASRec", "GRU4Rec"):
        yield PeerModel(
            "RecBole", f"{name}, scores of all items", lambda name=name: build(name),
            lambda module: module.full_sort_predict(batch),
        )  # fmt: skip


def fuxictr() -> Iterator[PeerModel]:
    from fuxictr.features import FeatureMap
    from fuxictr.pytorch.layers import FactorizationMachine, FeatureEmbedding, MLP_Block

    sizes = {"user": 3000, "item": 700, "kind": 4, "shop": 1200}
    x = {name: _random(rows, 32) for name, rows in sizes.items()}
    shared_x = x | {"seen": _random(701, 32) % 700}

    def features(*, shared: bool) -> Any:
        found = FeatureMap("peers", ".")
        found.features = OrderedDict(
            (name, {"type": "categorical", "source": "", "vocab_size": rows, "padding_idx": 0})
            for name, rows in sizes.items()
        )
        if shared:
            found.features["seen"] = {
                "type": "categorical", "source": "", "vocab_size": 700, "padding_idx": 0, "share_embedding": "item",
            }  # fmt: skip
        found.num_fields = len(found.features)
        found.set_column_index()
        return found

    class DeepFM(nn.Module):
        """FuxiCTR's DeepFM, of its layers: wide tables of one column beside deep ones."""

        def __init__(self, *, shared: bool = False):
            super().__init__()
            found = features(shared=shared)
            self.embedding_layer = FeatureEmbedding(found, 8)
            self.fm = FactorizationMachine(found)
            self.mlp = MLP_Block(input_dim=8 * found.num_fields, output_dim=1, hidden_units=[16])

        def forward(self, x: dict[str, Tensor]) -> Tensor:
            vectors = self.embedding_layer(x)
            return self.fm(x, vectors) + self.mlp(vectors.flatten(start_dim=1))

    yield PeerModel("FuxiCTR", "DeepFM", DeepFM, lambda module: module(x))
    yield PeerModel("FuxiCTR", "DeepFM of shared features", lambda: DeepFM(shared=True), lambda m: m(shared_x))
