"""Graph models of PyTorch Geometric and PyKEEN."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tests.peers.model_checks import PeerModel

NODES, RELATIONS = 1500, 40


def _random(high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(high))


def pyg() -> Iterator[PeerModel]:
    from torch_geometric.nn import GCNConv, LightGCN, MetaPath2Vec
    from torch_geometric.nn.kge import ComplEx, DistMult, RotatE, TransE

    edges = _random(NODES, 2, 4000)
    head, relation, tail = _random(NODES, 64), _random(RELATIONS, 64), _random(NODES, 64).flip(0)

    class NodeModel(nn.Module):
        """The tutorials' way: learned node features and two convolutions."""

        def __init__(self) -> None:
            super().__init__()
            self.nodes = nn.Embedding(NODES, 16)
            self.first, self.second = GCNConv(16, 16), GCNConv(16, 4)

        def forward(self, ids: Tensor, edge_index: Tensor) -> Tensor:
            return self.second(self.first(self.nodes(ids), edge_index).relu(), edge_index)

    for kind in (TransE, DistMult, ComplEx, RotatE):
        yield PeerModel(
            "PyG", kind.__name__, lambda kind=kind: kind(NODES, RELATIONS, 16),
            lambda module: module(head, relation, tail),
        )  # fmt: skip
    yield PeerModel(
        "PyG", "DistMult of sparse gradients", lambda: DistMult(NODES, RELATIONS, 16, sparse=True),
        lambda module: module(head, relation, tail),
    )  # fmt: skip
    yield PeerModel("PyG", "GCN on node embeddings", NodeModel, lambda module: module(torch.arange(NODES), edges))
    yield PeerModel("PyG", "LightGCN", lambda: LightGCN(NODES, 16, 2), lambda module: module(edges))
    words = {("a", "to", "a"): edges}
    yield PeerModel(
        "PyG", "MetaPath2Vec",
        lambda: MetaPath2Vec(words, 16, [("a", "to", "a")] * 2, 3, 3, num_nodes_dict={"a": NODES}),
        lambda module: module.loss(_random(NODES, 20, 3), _random(NODES + 1, 20, 3) % NODES)[None],
    )  # fmt: skip


def pykeen() -> Iterator[PeerModel]:
    from pykeen import models
    from pykeen.triples import CoreTriplesFactory

    triples = torch.stack([_random(NODES, 500), _random(RELATIONS, 500), _random(NODES + 1, 500) % NODES], dim=1)
    for name in ("TransE", "DistMult", "ComplEx", "RotatE", "TransD", "TransH", "HolE", "ERMLP", "SimplE", "TuckER"):

        def build(name: str = name) -> nn.Module:
            factory = CoreTriplesFactory.create(triples, num_entities=NODES, num_relations=RELATIONS)
            return getattr(models, name)(triples_factory=factory, embedding_dim=16, random_seed=0)

        yield PeerModel("PyKEEN", name, build, lambda module: module.score_hrt(triples[:64]))
