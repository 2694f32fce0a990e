"""The few classes of TorchRec that the bridge reads, written anew for tests without TorchRec."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


class PoolingType(enum.Enum):
    SUM = "SUM"
    MEAN = "MEAN"


class DataType(enum.Enum):
    FP32 = "FP32"
    FP16 = "FP16"


@dataclass
class EmbeddingBagConfig:
    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: list[str] = field(default_factory=list)
    pooling: PoolingType = PoolingType.SUM
    data_type: DataType = DataType.FP32
    use_virtual_table: bool = False
    init_fn: Any = field(default_factory=lambda: functools.partial(nn.init.uniform_, a=-0.1, b=0.1))

    def get_weight_init_min(self) -> float:
        return -0.1

    def get_weight_init_max(self) -> float:
        return 0.1


class EmbeddingBagCollection(nn.Module):
    """Tables with rows and no lookup."""

    def __init__(self, tables: list[EmbeddingBagConfig], is_weighted: bool = False, device: Any = None) -> None:
        super().__init__()
        self._tables, self._is_weighted = tables, is_weighted
        self.embedding_bags = nn.ModuleDict(
            {
                table.name: nn.EmbeddingBag(
                    table.num_embeddings, table.embedding_dim, mode=table.pooling.value.lower(), device=device
                )
                for table in tables
            }
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._tables

    def is_weighted(self) -> bool:
        return self._is_weighted


class KeyedJaggedTensor:
    """Bags of ids by key; lengths are key-major."""

    def __init__(self, keys: list[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> None:
        self._keys, self._values, self._lengths, self._weights = keys, values, lengths, weights

    @classmethod
    def from_lengths_sync(cls, *args: Any, **more: Any) -> KeyedJaggedTensor:
        return cls(*args, **more)

    def to(self, device: str) -> KeyedJaggedTensor:
        weights = None if self._weights is None else self._weights.to(device)
        return KeyedJaggedTensor(self._keys, self._values.to(device), self._lengths.to(device), weights)

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        return self._lengths

    def offsets(self) -> Tensor:
        return nn.functional.pad(self._lengths.cumsum(0), (1, 0))

    def weights(self) -> Tensor | None:
        return self._weights

    weights_or_none = weights

    def stride(self) -> int:
        return len(self._lengths) // len(self._keys)

    def offset_per_key(self) -> list[int]:
        return self.offsets()[:: self.stride()].tolist()

    def variable_stride_per_key(self) -> bool:
        return False

    def inverse_indices_or_none(self) -> None:
        return None


class KeyedTensor(metaclass=torch.fx.ProxyableClassMeta):
    """Columns of `values` by key."""

    def __init__(self, keys: list[str], length_per_key: list[int], values: Tensor) -> None:
        self._keys, self._length_per_key, self._values = keys, length_per_key, values

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def length_per_key(self) -> list[int]:
        return self._length_per_key

    def to_dict(self) -> dict[str, Tensor]:
        return dict(zip(self._keys, self._values.split(self._length_per_key, dim=1), strict=True))


def module() -> ModuleType:
    """A module `torchrec` of these classes."""
    made = ModuleType("torchrec")
    for one in (PoolingType, DataType, EmbeddingBagConfig, EmbeddingBagCollection, KeyedJaggedTensor, KeyedTensor):
        setattr(made, one.__name__, one)
    return made
