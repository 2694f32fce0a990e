"""Ids of a `KeyedJaggedTensor` as `Ids`, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holdall.common.errors import DataError, did_you_mean
from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.integrations.torchrec.library import load_torchrec


def from_jagged(features: Any, bags: EmbeddingBags | Mapping[str, str], *, weighted: bool = False) -> Ids:
    """The ids of a `KeyedJaggedTensor` for the features of `bags` (or features -> tables), in their order.

    Keys that no table looks up are left out. Weights are taken with `weighted` alone, as a collection does. Nothing is
    copied where keys and features are the same. Where every bag has one id, ids are [F, B].
    """
    looked_up = bags.features if isinstance(bags, EmbeddingBags) else bags
    features = _from_tensor_dict(features)
    _check_jagged(features, looked_up, weighted)
    keys = list(features.keys())
    wanted = _wanted(looked_up, keys)
    values = features.values()
    lengths = features.lengths().view(len(keys), features.stride())
    weights = features.weights() if weighted else None
    if keys == wanted:
        offsets = features.offsets()
    elif values.is_meta:  # the number of ids is not known, and no shape depends on it
        offsets = values.new_empty(len(wanted) * features.stride() + 1)
    else:
        places = [keys.index(key) for key in wanted]
        bounds = features.offset_per_key()
        values = torch.cat([values[bounds[place] : bounds[place + 1]] for place in places])
        if weights is not None:
            weights = torch.cat([weights[bounds[place] : bounds[place + 1]] for place in places])
        lengths = torch.stack([lengths[place] for place in places])
        offsets = F.pad(lengths.reshape(-1).long().cumsum(0), (1, 0))
    if _is_one_hot(values, lengths):
        return Ids(values.view_as(lengths), None, len(wanted), None if weights is None else weights.view_as(lengths))
    return Ids(values, offsets.long(), len(wanted), weights)


def _is_one_hot(values: Tensor, lengths: Tensor) -> bool:
    """Whether every bag has one id; False on `meta`, where that cannot be read."""
    if values.is_meta or not values.numel() or values.numel() != lengths.numel():
        return False
    return bool((lengths == 1).all())


def _from_tensor_dict(features: Any) -> Any:
    """A `KeyedJaggedTensor` of the jagged tensors in a `TensorDict`, which a collection takes too."""
    if type(features).__name__ != "TensorDict":
        return features
    load_torchrec()
    from torchrec.sparse.tensor_dict import maybe_td_to_kjt

    return maybe_td_to_kjt(features, None)


def _check_jagged(features: Any, looked_up: Mapping[str, str], weighted: bool) -> None:
    torchrec = load_torchrec()
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
    return [feature if feature in keys else key for feature, key in jagged_keys(looked_up).items()]


def to_jagged(ids: Ids, bags: EmbeddingBags | Mapping[str, str]) -> Any:
    """A `KeyedJaggedTensor` of the ids of `bags`' features (or features -> tables).

    Of the several `f@table` that one feature f was made of, the first is taken; they must have the same ids.
    """
    looked_up = bags.features if isinstance(bags, EmbeddingBags) else bags
    if len(looked_up) != ids.num_features:
        raise DataError(f"the ids are of {ids.num_features} features, and {len(looked_up)} are named")
    first: dict[str, int] = {}
    for place, key in enumerate(jagged_keys(looked_up).values()):
        if first.setdefault(key, place) != place and not _same(ids.bag(first[key]), ids.bag(place)):
            raise DataError(f"'{key}' is one feature of several tables, and its ids for them are not the same")
    pieces = [ids.bag(place) for place in first.values()]
    lengths = [
        torch.ones(ids.batch_size, dtype=torch.int64, device=values.device) if offsets is None else offsets.diff()
        for values, offsets, _ in pieces
    ]
    weights = [weights for _, _, weights in pieces if weights is not None]
    return load_torchrec().KeyedJaggedTensor.from_lengths_sync(
        keys=list(first),
        values=torch.cat([values for values, _, _ in pieces]),
        lengths=torch.cat(lengths),
        weights=torch.cat(weights) if weights else None,
    )


def _same(one: tuple[Tensor | None, ...], other: tuple[Tensor | None, ...]) -> bool:
    pairs = zip(one, other, strict=True)
    return all((a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def jagged_keys(features: Mapping[str, str]) -> dict[str, str]:
    """The key of each feature in a `KeyedJaggedTensor`: `f` for the several `f@table` of one feature, else its name."""
    bases = {feature: feature.removesuffix(f"@{table}") for feature, table in features.items()}
    several = {base for base in bases.values() if list(bases.values()).count(base) > 1}
    return {feature: base if base in several else feature for feature, base in bases.items()}
