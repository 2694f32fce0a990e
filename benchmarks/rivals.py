"""Models of public libraries, as modules of ours: DCN-v2 and DeepFM of torch-rechub, DCN of deepctr-torch.

They read our batches (ids, dense values, split: nothing is prepared twice) and give logits, so that one loop trains
and one function scores every side. Their layers, initial values and regularisation are the libraries' own. Neither
library is a dependency of this project; without one, `require` says how to get both.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from holdall.common.errors import HoldallError
from holdall.data.batch import Batch
from holdall.data.schema import Schema

PACKAGES = {"torch_rechub": "torch-rechub", "deepctr_torch": "deepctr-torch"}
# --no-deps, because their requirements would let pip replace torch; what they import besides is named instead.
INSTALL = (
    "pip install --no-deps --target rivals torch-rechub deepctr-torch pandas scikit-learn scipy joblib cloudpickle "
    "threadpoolctl narwhals tqdm requests urllib3 idna certifi charset-normalizer python-dateutil six pytz tzdata"
)
RIVALS = ("rechub dcn-v2", "rechub deepfm", "deepctr dcn")


def missing() -> list[str]:
    """The packages that are not there."""
    return [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]


def require() -> None:
    """Raise, with the line that installs them, unless both libraries can be imported."""
    if missing():
        raise HoldallError(
            f"the public libraries to compare with are not installed ({', '.join(missing())}): `{INSTALL}`, then "
            f"PYTHONPATH=rivals; or leave them out with --no-rivals"
        )


def versions() -> dict[str, str]:
    return {package: version(package) for package in PACKAGES.values() if package not in missing()}


class Rival(nn.Module):
    """A library's model behind our interface: logits [B] of a batch, and what its loss adds to the logloss."""

    def __init__(self, model: nn.Module, schema: Schema):
        super().__init__()
        self.model = model
        self.features = [feature.name for feature in schema.features]
        self.dense = [column.name for column in schema.dense]

    def inputs(self, batch: Batch) -> Any:
        raise NotImplementedError

    def penalty(self) -> Tensor | float:
        return 0.0

    def forward(self, batch: Batch) -> Tensor:
        """Their models end in a sigmoid, ours do not. In float64, where no probability a float32 holds is lost."""
        return torch.logit(self.model(self.inputs(batch)).reshape(-1).double(), eps=1e-12)


class RecHub(Rival):
    """Weight decay is the optimizer's, as in the library's trainer."""

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        ids = {name: batch.ids.values[place] for place, name in enumerate(self.features)}
        return ids | {name: batch.dense[:, place] for place, name in enumerate(self.dense)}


class DeepCtr(Rival):
    """L2 of embeddings is part of the loss; ids travel as float32 in one matrix, exact below 2^24."""

    def inputs(self, batch: Batch) -> Tensor:
        return torch.cat([batch.ids.values.t().float(), batch.dense], dim=1)

    def penalty(self) -> Tensor:
        return self.model.get_regularization_loss().sum() + self.model.aux_loss.sum()


def build_rival(
    name: str, schema: Schema, *, dim: int, hidden: tuple[int, ...], cross_layers: int, decay: float, seed: int
) -> Rival:
    """The library's model with these sizes and its own initial values."""
    require()
    assert all(feature.one_hot and feature.num_rows < 2**24 for feature in schema.features)
    torch.manual_seed(seed)
    sizes = {feature.name: feature.num_rows for feature in schema.features}
    dense_names = [column.name for column in schema.dense]
    if name == "deepctr dcn":
        from deepctr_torch.inputs import DenseFeat, SparseFeat
        from deepctr_torch.models import DCN

        columns = [SparseFeat(feature, rows, embedding_dim=dim) for feature, rows in sizes.items()]
        columns += [DenseFeat(column, 1) for column in dense_names]
        settings: dict[str, Any] = {"l2_reg_embedding": decay, "l2_reg_linear": decay, "l2_reg_cross": decay}
        settings |= {"cross_num": cross_layers, "cross_parameterization": "matrix", "dnn_hidden_units": hidden}
        return DeepCtr(DCN(columns, columns, seed=seed, **settings), schema)
    from torch_rechub.basic.features import DenseFeature, SparseFeature
    from torch_rechub.models.ranking import DCNv2, DeepFM

    sparse = [SparseFeature(feature, vocab_size=rows, embed_dim=dim) for feature, rows in sizes.items()]
    dense = [DenseFeature(column) for column in dense_names]
    mlp = {"dims": list(hidden), "activation": "relu"}
    if name == "rechub deepfm":
        return RecHub(DeepFM(deep_features=sparse + dense, fm_features=sparse, mlp_params=mlp), schema)
    assert name == "rechub dcn-v2"
    return RecHub(DCNv2(sparse + dense, cross_layers, mlp, use_low_rank_mixture=False), schema)


def rival_optimizer(model: Rival, lr: float, decay: float) -> torch.optim.Optimizer:
    """Adam, as both libraries' examples; deepctr-torch has its L2 in the loss already."""
    return torch.optim.Adam(model.parameters(), lr=lr, weight_decay=decay if isinstance(model, RecHub) else 0.0)
