"""Click models of torch-rechub, deepctr-torch and torchfm, small, with tables of several sizes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.peers.model_checks import PeerModel

ROWS = (3000, 700, 4, 1200)
BATCH = 32


def _ids(rows: int, *shape: int, low: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(low, rows, shape, generator=generator)


# --- torchfm ----------------------------------------------------------------------------------------------------------


def torchfm() -> Iterator[PeerModel]:
    import numpy

    if not hasattr(numpy, "long"):
        numpy.long = numpy.int64
    from torchfm.model import afi, afm, afn, dcn, dfm, ffm, fm, fnfm, fnn, lr, ncf, nfm, pnn, wd, xdfm

    x = torch.stack([_ids(rows, BATCH) for rows in ROWS], dim=1)
    builds: dict[str, Callable[[], nn.Module]] = {
        "LogisticRegression": lambda: lr.LogisticRegressionModel(ROWS),
        "FactorizationMachine": lambda: fm.FactorizationMachineModel(ROWS, 8),
        "FieldAwareFM": lambda: ffm.FieldAwareFactorizationMachineModel(ROWS, 4),
        "FNN": lambda: fnn.FactorizationSupportedNeuralNetworkModel(ROWS, 8, (16, 8), 0.1),
        "WideAndDeep": lambda: wd.WideAndDeepModel(ROWS, 8, (16, 8), 0.1),
        "IPNN": lambda: pnn.ProductNeuralNetworkModel(ROWS, 8, (16,), 0.1, method="inner"),
        "OPNN": lambda: pnn.ProductNeuralNetworkModel(ROWS, 8, (16,), 0.1, method="outer"),
        "DCN": lambda: dcn.DeepCrossNetworkModel(ROWS, 8, 2, (16, 8), 0.1),
        "NFM": lambda: nfm.NeuralFactorizationMachineModel(ROWS, 8, (16,), (0.1, 0.1)),
        "NCF": lambda: ncf.NeuralCollaborativeFiltering(ROWS, numpy.array([0]), numpy.array([1]), 8, (16,), 0.1),
        "FNFM": lambda: fnfm.FieldAwareNeuralFactorizationMachineModel(ROWS, 4, (16,), (0.1, 0.1)),
        "DeepFM": lambda: dfm.DeepFactorizationMachineModel(ROWS, 8, (16, 8), 0.1),
        "xDeepFM": lambda: xdfm.ExtremeDeepFactorizationMachineModel(ROWS, 8, (16,), 0.1, (8, 8)),
        "AFM": lambda: afm.AttentionalFactorizationMachineModel(ROWS, 8, 8, (0.1, 0.1)),
        "AutoInt": lambda: afi.AutomaticFeatureInteractionModel(ROWS, 8, 8, 2, 2, (16,), (0.1, 0.1, 0.1)),
        "AFN": lambda: afn.AdaptiveFactorizationNetwork(ROWS, 8, 16, (16,), (0.1, 0.1)),
    }  # fmt: skip
    for name, build in builds.items():
        yield PeerModel("torchfm", name, build, lambda module: module(x))


# --- torch-rechub -----------------------------------------------------------------------------------------------------


def torch_rechub() -> Iterator[PeerModel]:
    from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature
    from torch_rechub.models import matching, multi_task, ranking

    two, towers = ["classification"] * 2, [{"dims": [4]}] * 2
    mlp = {"dims": [16, 8], "activation": "relu", "dropout": 0.1}
    names = ("user", "item", "kind", "shop")
    x: dict[str, Tensor] = {name: _ids(rows, BATCH) for name, rows in zip(names, ROWS, strict=True)}
    x["hist"], x["seen"] = _ids(700, BATCH, 6), _ids(700, BATCH, 6)
    x["neg"], x["price"] = _ids(700, BATCH, 3), torch.linspace(0, 1, BATCH)

    def sparse(dim: int = 8) -> list[Any]:
        return [SparseFeature(n, vocab_size=r, embed_dim=dim) for n, r in zip(names, ROWS, strict=True)]

    def dense() -> list[Any]:
        return [DenseFeature("price")]

    def history(name: str = "hist", pooling: str = "concat") -> list[Any]:
        return [SequenceFeature(name, vocab_size=700, embed_dim=8, pooling=pooling, shared_with="item")]

    def alone() -> Any:
        return SequenceFeature("hist", vocab_size=700, embed_dim=8, pooling="concat")

    def item() -> list[Any]:
        return [SparseFeature("item", vocab_size=700, embed_dim=8)]

    def user() -> list[Any]:
        return [SparseFeature("user", vocab_size=3000, embed_dim=8)]

    def ffm(kind: Any, *more: Any) -> nn.Module:
        fields = [SparseFeature(n, vocab_size=r * 4, embed_dim=4) for n, r in zip(names, ROWS, strict=True)]
        linear = [SparseFeature(n, vocab_size=r, embed_dim=1) for n, r in zip(names, ROWS, strict=True)]
        return kind(linear, fields, 4, *more, mlp)

    def ffm_shared(kind: Any, *more: Any) -> nn.Module:
        fields = [SparseFeature(n, vocab_size=r * 4, embed_dim=4) for n, r in zip(names, ROWS, strict=True)]
        return kind(fields, fields, 4, *more, mlp)

    def attention(kind: Any) -> nn.Module:
        if kind is ranking.DIN:
            dims = {"dims": [16, 8], "dropout": 0.1}
            return kind(user(), history(), item(), dims, {"dims": [8]})
        return kind(user(), history(), item(), mlp, nhead=2, max_seq_len=7)

    builds: dict[str, Callable[[], nn.Module]] = {
        "DeepFM": lambda: ranking.DeepFM([*dense(), *sparse()], sparse(), mlp),
        "DeepFM of shared features": lambda: (lambda f: ranking.DeepFM(f, f, mlp))(sparse()),
        "WideDeep": lambda: ranking.WideDeep(dense(), sparse(), mlp),
        "DCN": lambda: ranking.DCN([*dense(), *sparse()], 2, mlp),
        "DCNv2": lambda: ranking.DCNv2([*dense(), *sparse()], 2, mlp),
        "EDCN": lambda: ranking.EDCN(sparse(), 2, {"dropout": 0.1, "activation": "relu"}),
        "FiBiNet": lambda: ranking.FiBiNet(sparse(), mlp),
        "DeepFFM": lambda: ffm(ranking.DeepFFM),
        "DeepFFM of shared features": lambda: ffm_shared(ranking.DeepFFM),
        "FatDeepFFM": lambda: ffm(ranking.FatDeepFFM, 1),
        "AFM": lambda: ranking.AFM(sparse(), 8),
        "AutoInt": lambda: ranking.AutoInt(sparse(), dense(), mlp_params=mlp),
        "DIN": lambda: attention(ranking.DIN),
        "BST": lambda: attention(ranking.BST),
        "SharedBottom": lambda: multi_task.SharedBottom(sparse(), two, {"dims": [8]}, towers),
        "MMOE": lambda: multi_task.MMOE(sparse(), two, 2, {"dims": [8]}, towers),
        "ESMM": lambda: multi_task.ESMM(user(), item(), {"dims": [8]}, {"dims": [8]}),
        "DSSM": lambda: matching.DSSM(user(), item(), {"dims": [8]}, {"dims": [8]}),
        "YoutubeDNN": lambda: matching.YoutubeDNN([*user(), *history(pooling="mean")], item(), history("neg"), mlp),
        "GRU4Rec": lambda: matching.GRU4Rec(user(), history(), item(), history("neg"), {"dims": [8]}),
        "MIND": lambda: matching.MIND(user(), history(), item(), history("neg"), 6),
        "ComirecSA": lambda: matching.ComirecSA(user(), history(), item(), history("neg")),
        "NARM": lambda: matching.NARM(alone(), 8, 0.1, 0.1),
        "STAMP": lambda: matching.STAMP(alone(), 0.1, 0.1),
    }  # fmt: skip
    for name, build in builds.items():
        yield PeerModel(
            "torch-rechub", name, build, lambda module: _first(module({k: v.clone() for k, v in x.items()}))
        )


def _first(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    parts = [part for part in output if isinstance(part, Tensor) and part.is_floating_point()]
    return torch.cat([part.reshape(-1) for part in parts])


# --- deepctr-torch ----------------------------------------------------------------------------------------------------


def deepctr_torch() -> Iterator[PeerModel]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from deepctr_torch import models
        from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat

    names = ("user", "item", "kind", "shop")
    ids = torch.stack([_ids(rows, BATCH) for rows in ROWS], dim=1).float()
    x = torch.cat([ids, torch.linspace(0, 1, BATCH)[:, None]], dim=1)
    sequence = torch.cat([_ids(3000, BATCH, 1), _ids(700, BATCH, 1), _ids(700, BATCH, 4, low=1)], dim=1).float()
    sequence = torch.cat([sequence, torch.full((BATCH, 1), 3.0)], dim=1)

    def sparse() -> list[Any]:
        return [SparseFeat(n, vocabulary_size=r, embedding_dim=8) for n, r in zip(names, ROWS, strict=True)]

    def features() -> list[Any]:
        return [*sparse(), DenseFeat("price", 1)]

    def with_history() -> list[Any]:
        hist = SparseFeat("hist_item", vocabulary_size=700, embedding_dim=8, embedding_name="item")
        return [
            SparseFeat("user", 3000, embedding_dim=8),
            SparseFeat("item", 700, embedding_dim=8, embedding_name="item"),
            VarLenSparseFeat(hist, maxlen=4, length_name="seq_length"),
        ]

    for name in ("WDL", "DeepFM", "xDeepFM", "AFN", "AutoInt", "DCN", "DCNMix", "DIFM", "FiBiNET", "IFM", "NFM", "ONN"):
        kind = getattr(models, name)
        yield PeerModel("deepctr-torch", name, lambda kind=kind: kind(features(), features()), lambda module: module(x))
    for name in ("AFM", "CCPM"):
        kind = getattr(models, name)
        yield PeerModel(
            "deepctr-torch", name, lambda kind=kind: kind(sparse(), sparse()), lambda module: module(x[:, :4])
        )
    yield PeerModel("deepctr-torch", "PNN", lambda: models.PNN(features()), lambda module: module(x))
    yield PeerModel("deepctr-torch", "MLR", lambda: models.MLR(features()), lambda module: module(x))
    yield PeerModel(
        "deepctr-torch", "DIN", lambda: models.DIN(with_history(), ["item"]), lambda module: module(sequence)
    )
    yield PeerModel(
        "deepctr-torch", "WDL of shared features", lambda: models.WDL(with_history(), with_history()),
        lambda module: module(sequence),
    )  # fmt: skip
