"""A module that stands in the place of an `EmbeddingBagCollection`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError, DataError
from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags, module_name
from holdall.integrations.torchrec.jagged import from_jagged
from holdall.integrations.torchrec.library import load_torchrec
from holdall.integrations.torchrec.tables import checked_configs, configs_of, make_bags, output_features
from holdall.tables import Method


class BagCollection(nn.Module):
    """Tables that take a `KeyedJaggedTensor` and return a `KeyedTensor`, as an `EmbeddingBagCollection` does.

    TorchRec's models take it in the place of one: it has its methods and attributes, runs on `meta`, loads its state
    dict, and torch.fx traces it, with the lookup of each group as one call. Tables of one dim are one group, an
    `EmbeddingBags`. Train it with `holdall.Optimizers(model, ...)`; compress it with `holdall.compress(model, ...)`.
    """

    def __init__(self, groups: Sequence[EmbeddingBags], order: Sequence[str] | None = None, *, weighted: bool = False):
        super().__init__()
        self.groups = nn.ModuleList(groups)
        self.weighted = weighted
        everything = {feature: bags.dim for bags in groups for feature in bags.features}
        if len(everything) < sum(bags.num_features for bags in groups):
            raise ConfigError("two groups of tables have a feature of the same name")
        self.order = list(everything if order is None else order)
        """Keys of the output."""
        assert sorted(self.order) == sorted(everything)
        self.widths = [everything[key] for key in self.order]
        self.looked_up = {feature: table for bags in groups for feature, table in bags.features.items()}
        self._configs: list[Any] | None = None
        for bags in groups:
            bags.vector_dtype = torch.float32  # the type of a collection's output, whatever its tables are
        self.register_load_state_dict_pre_hook(_rename_weights)

    @classmethod
    def of(
        cls,
        collection: Any,
        method: Method | Mapping[str, Method] | None = None,
        *,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> BagCollection:
        """The same tables as a collection's, of one dim or several; arguments as `from_collection`."""
        configs = checked_configs(collection)
        by_dim: dict[int, list[Any]] = {}
        for config in configs:
            by_dim.setdefault(config.embedding_dim, []).append(config)
        groups = [make_bags(collection, group, method, device, generator) for group in by_dim.values()]
        made = cls(groups, list(output_features(collection, configs)), weighted=collection.is_weighted())
        made._configs = configs
        return made

    def forward(self, features: Any) -> Any:
        """Pooled vectors, `KeyedTensor` [B, sum of dims], with the keys of the collection in their order."""
        if not self.groups:
            raise DataError("this collection has no tables, so it has no vectors for the features")
        sizes = [bags.num_features for bags in self._groups()]
        ids = _ids_by_group(features, self.looked_up, self.weighted, sizes)
        vectors = [_look_up(bags, ids[place]) for place, bags in enumerate(self._groups())]
        values = _in_order(vectors, list(self.looked_up), self.order)
        return load_torchrec().KeyedTensor(keys=self.order, length_per_key=self.widths, values=values)

    def _groups(self) -> Iterator[EmbeddingBags]:
        for bags in self.groups:
            assert isinstance(bags, EmbeddingBags)
            yield bags

    def is_weighted(self) -> bool:
        """Whether ids are weighted."""
        return self.weighted

    def embedding_bag_configs(self) -> list[Any]:
        """Descriptions of the tables (`EmbeddingBagConfig`): those it was made of, or else new ones."""
        if self._configs is None:
            configs = {config.name: config for bags in self._groups() for config in configs_of(bags)}
            self._configs = [configs[name] for name in self._names()]
        return self._configs

    @property
    def embedding_bags(self) -> nn.ModuleDict:
        """The tables by name; dense ones have a `weight`, which is the parameter."""
        tables = {name: bags.table(name) for bags in self._groups() for name in bags.features.values()}
        return nn.ModuleDict({module_name(name): tables[name] for name in self._names()})

    def _names(self) -> list[str]:
        """Names of the tables, in the order of the output."""
        return list(dict.fromkeys(self.looked_up[key] for key in self.order))

    @property
    def device(self) -> torch.device:
        """Device of the tables."""
        tables = (bags.table(name) for bags in self._groups() for name in bags.features.values())
        return next((table.device for table in tables), torch.device("cpu"))


# --- steps of the lookup ----------------------------------------------------------------------------------------------
# Each is one node of a graph that torch.fx traces.


@torch.fx.wrap
def _ids_by_group(features: Any, looked_up: Mapping[str, str], weighted: bool, sizes: Sequence[int]) -> list[Ids]:
    """Ids of each group of tables, which has so many features."""
    ids = from_jagged(features, looked_up, weighted=weighted)
    if len(sizes) == 1:
        return [ids]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [_some(ids, start, size) for start, size in zip(starts, sizes, strict=True)]


def _some(ids: Ids, start: int, count: int) -> Ids:
    """The ids of features `start` to `start + count`, views where that can be."""
    if ids.offsets is None:
        chosen = slice(start, start + count)
        return Ids(ids.values[chosen], None, count, None if ids.weights is None else ids.weights[chosen])
    size = ids.batch_size
    bounds = ids.offsets[start * size : (start + count) * size + 1]
    if bounds.is_meta:  # the number of ids is not known, and no shape depends on it
        return Ids(ids.values, bounds, count, ids.weights)
    chosen = slice(int(bounds[0]), int(bounds[-1]))
    weights = None if ids.weights is None else ids.weights[chosen]
    return Ids(ids.values[chosen], bounds - bounds[0], count, weights)


def _look_up(bags: EmbeddingBags, ids: Any) -> Any:
    """Vectors [B, F, dim]."""
    if isinstance(ids, torch.fx.Proxy):  # lookups depend on the ids, which a trace does not have
        tracer: Any = ids.tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(bags), (ids,), {})
    return bags(ids)


@torch.fx.wrap
def _in_order(vectors: Sequence[Tensor], features: Sequence[str], order: Sequence[str]) -> Tensor:
    """Vectors [B, sum of dims] of the features in the order of the output."""
    columns = [column for of_group in vectors for column in of_group.unbind(1)]
    if list(features) == list(order):
        return torch.cat(columns, dim=1)
    return torch.cat([columns[features.index(key)] for key in order], dim=1)


def _rename_weights(collection: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Weights under the names that an `EmbeddingBagCollection` has for them, renamed to ours."""
    assert isinstance(collection, BagCollection)
    for place, bags in enumerate(collection._groups()):
        for name in bags.tables:
            theirs = f"{prefix}embedding_bags.{name}."
            for key in [key for key in state_dict if key.startswith(theirs)]:
                state_dict[f"{prefix}groups.{place}.tables.{name}.{key.removeprefix(theirs)}"] = state_dict.pop(key)
