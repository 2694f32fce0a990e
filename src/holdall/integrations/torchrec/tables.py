"""Tables of an `EmbeddingBagCollection` as `EmbeddingBags`, and back."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError, did_you_mean
from holdall.embedding.bags import EmbeddingBags, module_name
from holdall.integrations.torchrec.jagged import jagged_keys
from holdall.integrations.torchrec.library import load_torchrec
from holdall.tables import Dense, Method, Table
from holdall.tables.dense import DenseTable

POOLINGS = ("sum", "mean")
"""TorchRec's pooling types, by mode."""


def from_collection(
    collection: Any,
    method: Method | Mapping[str, Method] | None = None,
    *,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> EmbeddingBags:
    """The tables of an unsharded `EmbeddingBagCollection`, whose rows are copied, and the features that look them up.

    `method` is one for all tables or one by table name, dense where absent; compressed tables start as the best fit of
    the rows. Tables go where the collection is, or to `device`. A collection on `meta` has no rows: its tables are
    initialised with the standard deviation of its configs, on `device` or else on the CPU. Features have the names, and
    the order, of the keys of the collection's output. Tables of several dims are refused: see `BagCollection`.
    """
    configs = checked_configs(collection)
    if not configs:
        raise ConfigError("the collection has no tables")
    dims = {config.name: config.embedding_dim for config in configs}
    if len(set(dims.values())) > 1:
        raise ConfigError(
            f"all tables must give vectors of one dim, and those of this collection have {sorted(set(dims.values()))}: "
            f"use BagCollection.of, which takes several"
        )
    return make_bags(collection, configs, method, device, generator)


def checked_configs(collection: Any) -> list[Any]:
    """The tables' descriptions, checked."""
    torchrec = load_torchrec()
    if not isinstance(collection, torchrec.EmbeddingBagCollection):
        raise ConfigError(
            f"a torchrec.EmbeddingBagCollection is wanted, not a {type(collection).__name__}: of a sharded model take "
            f"the collection from before it was sharded, with its state dict gathered and loaded"
        )
    configs = collection.embedding_bag_configs()
    for config in configs:
        if config.use_virtual_table:
            raise ConfigError(f"table '{config.name}' is virtual (its ids are hashed as they come): give it rows")
        if collection.is_weighted() and config.pooling is not torchrec.PoolingType.SUM:
            raise ConfigError(f"table '{config.name}' pools by mean, and weights go with sum pooling only")
    return list(configs)


def make_bags(
    collection: Any,
    configs: Sequence[Any],
    method: Method | Mapping[str, Method] | None,
    device: torch.device | str | None,
    generator: torch.Generator | None,
) -> EmbeddingBags:
    """`configs`, which are some of the collection's, of one dim."""
    weights = {config.name: collection.embedding_bags[config.name].weight for config in configs}
    if isinstance(method, Mapping):
        wrong = [name for name in method if name not in collection.embedding_bags]
        if wrong:
            raise ConfigError(
                f"the collection has no table '{wrong[0]}'{did_you_mean(wrong[0], collection.embedding_bags)}"
            )
    first = next(iter(weights.values())).device
    place = torch.device(device) if device is not None else torch.device("cpu") if first.type == "meta" else first
    tables: dict[str, Table] = {}
    for config in configs:
        chosen = method.get(config.name, Dense()) if isinstance(method, Mapping) else method or Dense()
        tables[config.name] = _table(config, weights[config.name], chosen, place, generator)
    bags = EmbeddingBags(tables, output_features(collection, configs), generator=generator, device=place)
    for name, weight in weights.items():
        if not weight.requires_grad:
            bags.table(name).requires_grad_(False)
    return bags


def _table(
    config: Any, weight: Tensor, method: Method, device: torch.device, generator: torch.Generator | None
) -> Table:
    """One table with the rows of `weight`; initial ones, which a dense table gets with its storage, where it is on
    `meta`."""
    options: dict[str, Any] = {"mode": config.pooling.name.lower(), "dtype": weight.dtype, "generator": generator}
    if weight.is_meta:
        options["init_std"] = _initial_std(config)
    if isinstance(method, Dense):
        table = method.build(config.num_embeddings, config.embedding_dim, device="meta", **options)
        if not weight.is_meta:
            assert isinstance(table, DenseTable)
            table.seed = 0  # its rows are given: none is drawn
            table.weight = nn.Parameter(weight.detach().to(device, table.weight.dtype))  # `EmbeddingBags` copies it
        return table
    if weight.is_meta:
        return method.build(config.num_embeddings, config.embedding_dim, device=device, **options)
    return method.fit(weight.detach().to(device), device=device, **options)


def _initial_std(config: Any) -> float:
    """Standard deviation of uniform(low, high), which TorchRec draws initial rows from; ours are Gaussian with it."""
    uniform = isinstance(config.init_fn, functools.partial) and config.init_fn.func is nn.init.uniform_
    low, high = config.get_weight_init_min(), config.get_weight_init_max()
    if not uniform or low != -high:
        raise ConfigError(
            f"table '{config.name}' has no rows yet (it is on meta) and is initialised by its own init_fn or bounds: "
            f"build the collection on a device with memory, or leave them out"
        )
    return float(high / 3**0.5)


def output_features(collection: Any, configs: Sequence[Any]) -> dict[str, str]:
    """Output key -> table, in the order of the collection's output."""
    looked_up = [(feature, config.name) for config in collection.embedding_bag_configs() for feature in _names(config)]
    several = {feature for i, (feature, _) in enumerate(looked_up) for other, _ in looked_up[:i] if other == feature}
    wanted = {config.name for config in configs}
    return {
        f"{feature}@{table}" if feature in several else feature: table
        for feature, table in looked_up
        if table in wanted
    }


def _names(config: Any) -> list[str]:
    return list(config.feature_names) or [config.name]


def to_collection(bags: EmbeddingBags, *, weighted: bool = False) -> Any:
    """An `EmbeddingBagCollection` with the rows of `bags`; compressed tables are written out, rows x dim numbers.

    Its output has the features of one table after those of another, each under its name: where the features of `bags`
    are in another order, the order of the output differs. bfloat16 rows become float32 ones, which hold the same
    numbers.
    """
    torchrec = load_torchrec()
    for name in dict.fromkeys(bags.features.values()):
        _refuse_what_torchrec_lacks(name, bags.table(name), weighted)
    configs = configs_of(bags)
    collection = torchrec.EmbeddingBagCollection(tables=configs, is_weighted=weighted)
    with torch.no_grad():
        for config in configs:
            collection.embedding_bags[config.name].weight.copy_(bags.table(config.name).materialize())
    return collection


def configs_of(bags: EmbeddingBags) -> list[Any]:
    """`EmbeddingBagConfig`s of the tables, in the order in which features look them up first."""
    torchrec = load_torchrec()
    keys = jagged_keys(bags.features)
    by_table: dict[str, list[str]] = {}
    for feature, name in bags.features.items():
        by_table.setdefault(name, []).append(keys[feature])
    configs = []
    for name, features in by_table.items():
        table = bags.table(name)
        _refuse_pooling(name, table)
        configs.append(
            torchrec.EmbeddingBagConfig(
                name=name,
                num_embeddings=table.num_rows,
                embedding_dim=table.dim,
                feature_names=features,
                pooling=torchrec.PoolingType[table.mode.upper()],
                data_type=torchrec.DataType.FP16 if _dtype(table) == torch.float16 else torchrec.DataType.FP32,
            )
        )
    return configs


def _refuse_pooling(name: str, table: Table, weighted: bool = False) -> None:
    if table.mode not in POOLINGS or (weighted and table.mode != "sum"):
        raise ConfigError(f"table '{name}' pools by {table.mode}{' with weights' * weighted}, which TorchRec cannot")


def _refuse_what_torchrec_lacks(name: str, table: Table, weighted: bool) -> None:
    if table.device.type == "meta":
        raise ConfigError(f"the rows of table '{name}' are not here: merge or load them into plain tables first")
    _refuse_pooling(name, table, weighted)
    if table.padding_idx is not None:
        raise ConfigError(f"table '{name}' has a padding id, which TorchRec has not: leave such ids out of the bags")
    if _dtype(table) == torch.float64:
        raise ConfigError(f"table '{name}' is float64, which TorchRec cannot hold: convert it with .float() first")
    if module_name(name) != name:
        raise ConfigError(f"TorchRec cannot have a table of the name '{name}': rename it, without dots")


def _dtype(table: Table) -> torch.dtype:
    return next((p.dtype for p in table.parameters() if p.is_floating_point()), torch.float32)
