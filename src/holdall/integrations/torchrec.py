"""Conversion of TorchRec's collections and jagged tensors to Holdall's and back (`pip install 'holdall[torchrec]'`).

    bags = from_collection(collection)            # EmbeddingBagCollection -> EmbeddingBags, with its rows
    ids = from_jagged(features, bags)             # KeyedJaggedTensor -> Ids
    bags(ids)                                     # [B, F, dim]; F in the order of the collection's output keys
    to_collection(bags), to_jagged(ids, bags)     # the way back
    BagCollection.of(collection)                  # KeyedJaggedTensor -> KeyedTensor, in the place of the collection

Sum and mean pooling, weights, tables that several features share, and a feature that several tables look up (TorchRec
calls its outputs `feature@table`; so do we). A collection on the `meta` device gets its rows here, in any method:
TorchRec then never allocates the tables. Collections that are sharded already are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.common.errors import ConfigError, DataError, MissingDependencyError, did_you_mean
from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags, module_name
from holdall.tables import Dense, Method, Table
from holdall.tables.dense import DenseTable

POOLINGS = ("sum", "mean")
"""TorchRec's pooling types, by mode."""


def _torchrec() -> Any:
    try:
        import torchrec
    except (ImportError, OSError) as error:  # OSError: fbgemm's library was built for another torch
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "torchrec":
            raise MissingDependencyError("torchrec", "torchrec", "the bridge to TorchRec") from None
        raise ConfigError(
            f"torchrec is installed but does not import ({str(error).splitlines()[0]}): its fbgemm-gpu must fit torch "
            f"{torch.__version__}, see docs/torchrec.md"
        ) from error
    return torchrec


# --- tables -----------------------------------------------------------------------------------------------------------


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
    configs = _configs(collection)
    dims = {config.name: config.embedding_dim for config in configs}
    if len(set(dims.values())) > 1:
        raise ConfigError(
            f"all tables must give vectors of one dim, and those of this collection have {sorted(set(dims.values()))}: "
            f"use BagCollection.of, which takes several"
        )
    return _bags(collection, configs, method, device, generator)


def _configs(collection: Any) -> list[Any]:
    """The tables' descriptions, checked."""
    torchrec = _torchrec()
    if not isinstance(collection, torchrec.EmbeddingBagCollection):
        raise ConfigError(
            f"a torchrec.EmbeddingBagCollection is wanted, not a {type(collection).__name__}: of a sharded model take "
            f"the collection from before it was sharded, with its state dict gathered and loaded"
        )
    configs = collection.embedding_bag_configs()
    if not configs:
        raise ConfigError("the collection has no tables")
    for config in configs:
        if config.use_virtual_table:
            raise ConfigError(f"table '{config.name}' is virtual (its ids are hashed as they come): give it rows")
        if collection.is_weighted() and config.pooling is not torchrec.PoolingType.SUM:
            raise ConfigError(f"table '{config.name}' pools by mean, and weights go with sum pooling only")
    return list(configs)


def _bags(
    collection: Any,
    configs: Sequence[Any],
    method: Method | Mapping[str, Method] | None,
    device: torch.device | str | None,
    generator: torch.Generator | None,
) -> EmbeddingBags:
    """`configs`, which are some of the collection's, of one dim."""
    weights = {config.name: collection.embedding_bags[config.name].weight.detach() for config in configs}
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
    bags = EmbeddingBags(tables, _features(collection, configs), generator=generator, device=place)
    with torch.no_grad():
        for name, weight in weights.items():
            table = bags.table(name)
            if isinstance(table, DenseTable) and not weight.is_meta and not table.weight.is_meta:
                table.weight.copy_(weight)
    return bags


def _table(
    config: Any, weight: Tensor, method: Method, device: torch.device, generator: torch.Generator | None
) -> Table:
    """One table; a dense one on `meta`, because its rows are laid out, and filled, with those of the others."""
    options: dict[str, Any] = {"mode": config.pooling.name.lower(), "dtype": weight.dtype, "generator": generator}
    if weight.is_meta:
        options["init_std"] = _initial_std(config)
    if isinstance(method, Dense):
        return method.build(config.num_embeddings, config.embedding_dim, device="meta", **options)
    if weight.is_meta:
        return method.build(config.num_embeddings, config.embedding_dim, device=device, **options)
    return method.fit(weight.to(device), device=device, **options)


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


def _features(collection: Any, configs: Sequence[Any]) -> dict[str, str]:
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
    torchrec = _torchrec()
    by_table: dict[str, list[str]] = {}
    for feature, name in bags.features.items():
        by_table.setdefault(name, []).append(feature)
    keys = _keys(bags.features)
    configs = []
    for name, features in by_table.items():
        table = bags.table(name)
        _refuse_what_torchrec_lacks(name, table, weighted)
        configs.append(
            torchrec.EmbeddingBagConfig(
                name=name,
                num_embeddings=table.num_rows,
                embedding_dim=table.dim,
                feature_names=[keys[feature] for feature in features],
                pooling=torchrec.PoolingType[table.mode.upper()],
                data_type=torchrec.DataType.FP16 if _dtype(table) == torch.float16 else torchrec.DataType.FP32,
            )
        )
    collection = torchrec.EmbeddingBagCollection(tables=configs, is_weighted=weighted)
    with torch.no_grad():
        for name in by_table:
            collection.embedding_bags[name].weight.copy_(bags.table(name).materialize())
    return collection


def _refuse_what_torchrec_lacks(name: str, table: Table, weighted: bool) -> None:
    if table.device.type == "meta":
        raise ConfigError(f"the rows of table '{name}' are not here: merge or load them into plain tables first")
    if table.mode not in POOLINGS or (weighted and table.mode != "sum"):
        raise ConfigError(f"table '{name}' pools by {table.mode}{' with weights' * weighted}, which TorchRec cannot")
    if table.padding_idx is not None:
        raise ConfigError(f"table '{name}' has a padding id, which TorchRec has not: leave such ids out of the bags")
    if _dtype(table) == torch.float64:
        raise ConfigError(f"table '{name}' is float64, which TorchRec cannot hold: convert it with .float() first")
    if module_name(name) != name:
        raise ConfigError(f"TorchRec cannot have a table of the name '{name}': rename it, without dots")


def _dtype(table: Table) -> torch.dtype:
    return next((p.dtype for p in table.parameters() if p.is_floating_point()), torch.float32)


def _keys(features: Mapping[str, str]) -> dict[str, str]:
    """The key of each feature in a `KeyedJaggedTensor`: `f` for the several `f@table` of one feature, else its name."""
    bases = {feature: feature.removesuffix(f"@{table}") for feature, table in features.items()}
    several = {base for base in bases.values() if list(bases.values()).count(base) > 1}
    return {feature: base if base in several else feature for feature, base in bases.items()}


# --- ids --------------------------------------------------------------------------------------------------------------


def from_jagged(features: Any, bags: EmbeddingBags | Mapping[str, str], *, weighted: bool = False) -> Ids:
    """The ids of a `KeyedJaggedTensor` for the features of `bags` (or features -> tables), in their order.

    Keys that no table looks up are left out. Weights are taken with `weighted` alone, as a collection does. Nothing is
    copied where keys and features are the same. Where every bag has one id, ids are [F, B].
    """
    looked_up = bags.features if isinstance(bags, EmbeddingBags) else bags
    _check_jagged(features, looked_up, weighted)
    keys = list(features.keys())
    wanted = _wanted(looked_up, keys)
    values = features.values()
    lengths = features.lengths().view(len(keys), features.stride())
    weights = features.weights() if weighted else None
    if keys == wanted:
        offsets = features.offsets()
    else:
        places = [keys.index(key) for key in wanted]
        bounds = features.offset_per_key()
        values = torch.cat([values[bounds[place] : bounds[place + 1]] for place in places])
        if weights is not None:
            weights = torch.cat([weights[bounds[place] : bounds[place + 1]] for place in places])
        lengths = torch.stack([lengths[place] for place in places])
        offsets = F.pad(lengths.reshape(-1).long().cumsum(0), (1, 0))
    if values.numel() and values.numel() == lengths.numel() and bool((lengths == 1).all()):
        return Ids(values.view_as(lengths), None, len(wanted), None if weights is None else weights.view_as(lengths))
    return Ids(values, offsets.long(), len(wanted), weights)


def _check_jagged(features: Any, looked_up: Mapping[str, str], weighted: bool) -> None:
    torchrec = _torchrec()
    if not isinstance(features, torchrec.KeyedJaggedTensor):
        raise DataError(f"a torchrec.KeyedJaggedTensor is wanted, not a {type(features).__name__}")
    if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        raise DataError("the features of this KeyedJaggedTensor have batches of different sizes: expand them first")
    if features.values().is_floating_point():
        raise DataError(f"ids must be whole numbers, and the values are {features.values().dtype}")
    keys = features.keys()
    missing = [key for key in _wanted(looked_up, keys) if key not in keys]
    if missing:
        raise DataError(f"the KeyedJaggedTensor has no feature '{missing[0]}'{did_you_mean(missing[0], keys)}")
    if weighted:
        weights = features.weights_or_none()
        if weights is None:
            raise DataError("the collection is weighted, and the KeyedJaggedTensor has no weights")
        if weights.requires_grad:
            raise DataError("weights that are learned get no gradient here: detach them, or leave them with TorchRec")


def _wanted(looked_up: Mapping[str, str], keys: Sequence[str]) -> list[str]:
    """The key of each feature: its own name where there is such a key."""
    return [feature if feature in keys else key for feature, key in _keys(looked_up).items()]


def to_jagged(ids: Ids, bags: EmbeddingBags | Mapping[str, str]) -> Any:
    """A `KeyedJaggedTensor` of the ids of `bags`' features (or features -> tables).

    Of the several `f@table` that one feature f was made of, the first is taken; they must have the same ids.
    """
    looked_up = bags.features if isinstance(bags, EmbeddingBags) else bags
    if len(looked_up) != ids.num_features:
        raise DataError(f"the ids are of {ids.num_features} features, and {len(looked_up)} are named")
    first: dict[str, int] = {}
    for place, key in enumerate(_keys(looked_up).values()):
        if first.setdefault(key, place) != place and not _same(ids.bag(first[key]), ids.bag(place)):
            raise DataError(f"'{key}' is one feature of several tables, and its ids for them are not the same")
    pieces = [ids.bag(place) for place in first.values()]
    lengths = [
        torch.ones(ids.batch_size, dtype=torch.int64, device=values.device) if offsets is None else offsets.diff()
        for values, offsets, _ in pieces
    ]
    weights = [weights for _, _, weights in pieces if weights is not None]
    return _torchrec().KeyedJaggedTensor.from_lengths_sync(
        keys=list(first),
        values=torch.cat([values for values, _, _ in pieces]),
        lengths=torch.cat(lengths),
        weights=torch.cat(weights) if weights else None,
    )


def _same(one: tuple[Tensor | None, ...], other: tuple[Tensor | None, ...]) -> bool:
    pairs = zip(one, other, strict=True)
    return all((a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


# --- both at once -----------------------------------------------------------------------------------------------------


class BagCollection(nn.Module):
    """Tables that take a `KeyedJaggedTensor` and return a `KeyedTensor`, as an `EmbeddingBagCollection` does.

    Tables of one dim are one `EmbeddingBags`. Train it with `holdall.Optimizers(model, ...)`; compress it with
    `holdall.compress(model, ...)`.
    """

    def __init__(self, groups: Sequence[EmbeddingBags], order: Sequence[str] | None = None, *, weighted: bool = False):
        super().__init__()
        self.groups = nn.ModuleList(groups)
        self.weighted = weighted
        everything = [feature for bags in groups for feature in bags.features]
        if len(set(everything)) < len(everything):
            raise ConfigError("two groups of tables have a feature of the same name")
        self.order = list(everything if order is None else order)
        """Keys of the output."""
        assert sorted(self.order) == sorted(everything)
        self.looked_up = {feature: table for bags in groups for feature, table in bags.features.items()}
        for bags in groups:
            bags.vector_dtype = torch.float32  # the type of a collection's output, whatever its tables are

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
        configs = _configs(collection)
        by_dim: dict[int, list[Any]] = {}
        for config in configs:
            by_dim.setdefault(config.embedding_dim, []).append(config)
        groups = [_bags(collection, group, method, device, generator) for group in by_dim.values()]
        return cls(groups, list(_features(collection, configs)), weighted=collection.is_weighted())

    def forward(self, features: Any) -> Any:
        """Pooled vectors, `KeyedTensor` [B, sum of dims], with the keys of the collection in their order."""
        ids = from_jagged(features, self.looked_up, weighted=self.weighted)
        columns: dict[str, Tensor] = {}
        start = 0
        for bags in self._groups():
            part = ids if len(self.groups) == 1 else _some(ids, start, bags.num_features)
            columns.update(zip(bags.features, bags(part).unbind(1), strict=True))
            start += bags.num_features
        vectors = [columns[key] for key in self.order]
        widths = [vector.shape[1] for vector in vectors]
        return _torchrec().KeyedTensor(keys=self.order, length_per_key=widths, values=torch.cat(vectors, dim=1))

    def _groups(self) -> Iterator[EmbeddingBags]:
        for bags in self.groups:
            assert isinstance(bags, EmbeddingBags)
            yield bags

    def is_weighted(self) -> bool:
        return self.weighted


def _some(ids: Ids, start: int, count: int) -> Ids:
    """The ids of features `start` to `start + count`, views where that can be."""
    if ids.offsets is None:
        chosen = slice(start, start + count)
        return Ids(ids.values[chosen], None, count, None if ids.weights is None else ids.weights[chosen])
    size = ids.batch_size
    bounds = ids.offsets[start * size : (start + count) * size + 1]
    chosen = slice(int(bounds[0]), int(bounds[-1]))
    weights = None if ids.weights is None else ids.weights[chosen]
    return Ids(ids.values[chosen], bounds - bounds[0], count, weights)
