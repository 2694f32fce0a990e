"""Search for the embedding tables of any PyTorch model: each module once, with all its names, and why it must stay.

A module is one table however many owners it has. Only modules whose whole behaviour is that of `nn.Embedding`,
`nn.EmbeddingBag` or a dense table can be replaced by a compressed one; for all others there is a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from holdall.common.errors import ConfigError
from holdall.embedding.bags import EmbeddingBags
from holdall.tables import Table
from holdall.tables.dense import DenseTable

Replaceable = nn.Embedding | nn.EmbeddingBag | DenseTable

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Attributes of `nn.Module` that have its hooks."""
HARMLESS = frozenset({"__init__", "__repr__", "extra_repr", "reset_parameters"}) | frozenset(
    {"__dict__", "__weakref__", "__annotate__", "__annotate_func__", "__class_getitem__", "__init_subclass__"}
)
"""Methods that a subclass may define and still be replaced (initial values, printing), and those Python gives it."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class ModelTable:
    """Embedding table of a model, at all the places where its module is."""

    module: Replaceable
    places: tuple[tuple[nn.Module, str], ...]
    """Owner and attribute (or table name, if the owner is `EmbeddingBags`) of each place."""
    names: tuple[str, ...]
    """Names in the model; the first stands for the table."""
    paths: tuple[str, ...]
    """Names with those of all modules that the table is in: other than `names` for tables of `EmbeddingBags`."""
    reason: str | None
    """Why the table cannot be replaced, to be read after its name; None if it can."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def weight(self) -> Tensor:
        return self.module.weight

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and dim: of the weight, as lookups use it, and not of attributes that may be stale."""
        weight = self.module._parameters.get("weight")
        if weight is not None and weight.dim() == 2:
            return weight.shape[0], weight.shape[1]
        if isinstance(self.module, Table):
            return self.module.num_rows, self.module.dim
        return self.module.num_embeddings, self.module.embedding_dim

    @property
    def num_rows(self) -> int:
        return self.shape[0]

    @property
    def dim(self) -> int:
        return self.shape[1]

    def is_in(self, name: str) -> bool:
        """Whether the table has this name, or is in the module of this name."""
        return name in self.names or any(path == name or path.startswith(f"{name}.") for path in self.paths)

    def num_bytes(self) -> int:
        """Bytes of its parameters and buffers."""
        tensors = chain(self.module.parameters(), self.module.buffers())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def replace_tables(replacements: Mapping[ModelTable, nn.Module]) -> None:
    """Put these modules in the place of tables, everywhere."""
    packed: dict[EmbeddingBags, dict[str, Table]] = {}
    for table, replacement in replacements.items():
        for owner, key in table.places:
            if isinstance(owner, EmbeddingBags):
                assert isinstance(replacement, Table)
                packed.setdefault(owner, {})[key] = replacement
    for owner in packed:
        if any(pack.collects for pack in owner.packs):
            raise ConfigError("the tables have an optimizer already: compress the model first, then make the optimizer")
    for owner, tables in packed.items():
        owner.replace_tables(tables)
    for table, replacement in replacements.items():
        for place, key in table.places:
            if not isinstance(place, EmbeddingBags):
                setattr(place, key, replacement)


def find_tables(model: nn.Module) -> list[ModelTable]:
    """Every uncompressed table of a model, in the order of its modules."""
    if isinstance(model, Replaceable):
        raise ConfigError(
            f"the model itself is one table ({type(model).__name__}), which cannot be replaced in place: give the "
            "module that it is part of, or build a table with `method.fit(weight)`"
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ConfigError(
                f"{path or 'the model'} is wrapped in DistributedDataParallel, which would not reduce gradients of "
                "new tables: compress the model first, then wrap it"
            )
    found: dict[Replaceable, list[_Place]] = {}
    for place in _places(model):
        found.setdefault(place.module, []).append(place)
    memory = _memory_of(model)
    return [
        ModelTable(
            module,
            tuple(dict.fromkeys((place.owner, place.key) for place in places)),
            tuple(dict.fromkeys(place.name for place in places)),
            tuple(place.path for place in places),
            why_not_replaceable(module) or _sharing(module, memory),
        )
        for module, places in found.items()
    ]


@dataclass(frozen=True)
class _Place:
    """Place of a table in a model."""

    owner: nn.Module
    key: str
    module: Replaceable
    name: str
    path: str


def _places(model: nn.Module) -> Iterator[_Place]:
    """Every place of every table; a module with several owners, or an owner with several names, has several."""
    bags = [module for module in model.modules() if isinstance(module, EmbeddingBags)]
    packed = {id(module.tables) for module in bags}
    names = Counter(name for module in bags for name in set(module.features.values()))
    for path, owner in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if isinstance(owner, EmbeddingBags):
            for name in dict.fromkeys(owner.features.values()):
                table = owner.table(name)
                if isinstance(table, DenseTable):
                    yield _Place(owner, name, table, name if names[name] == 1 else f"{prefix}{name}", f"{prefix}{name}")
        elif id(owner) not in packed and not isinstance(owner, Table):
            for key, child in owner._modules.items():  # named_children() leaves out a second name of a module
                if isinstance(child, Replaceable):
                    yield _Place(owner, key, child, f"{prefix}{key}", f"{prefix}{key}")


def why_not_replaceable(module: Replaceable) -> str | None:
    """Why no other module can take the place of this one without a change of behaviour; None if one can."""
    if getattr(module, "max_norm", None) is not None:
        return "renormalises its rows (max_norm), which compressed tables cannot"
    if getattr(module, "scale_grad_by_freq", False):
        return "scales gradients by frequency (scale_grad_by_freq), which compressed tables cannot"
    if parametrize.is_parametrized(module):
        return "has a parametrization"
    if overridden := _overridden(module):
        return f"is a {type(module).__name__} with behaviour of its own ({', '.join(overridden)})"
    weight = module._parameters.get("weight")
    if type(weight) is not nn.Parameter:
        return "has a weight that is no plain parameter (weight norm, pruning or a tensor subclass)"
    if weight.dim() != 2:
        return f"has a weight of {weight.dim()} dimensions"
    if any(getattr(module, hooks, None) for hooks in HOOKS):
        return "has hooks"
    if len(module._parameters) > 1 or module._buffers or module._modules:
        return "has parameters, buffers or modules beside its weight"
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return "has a weight with gradient hooks"
    if weight.dtype not in DTYPES:
        return f"has numbers of type {weight.dtype}, which compressed tables do not store"
    return None


def _overridden(module: Replaceable) -> list[str]:
    """Methods and properties that are not those of `nn.Embedding`, `nn.EmbeddingBag` or a dense table."""
    kind = next(k for k in (nn.Embedding, nn.EmbeddingBag, DenseTable) if isinstance(module, k))
    own = [base for base in type(module).__mro__ if base not in kind.__mro__]
    names = {
        name: None
        for base in own
        for name, value in vars(base).items()
        if name not in HARMLESS and (callable(value) or hasattr(value, "__get__"))
    }
    on_instance = [name for name in vars(module) if name in ("forward", "__call__", "_call_impl")]
    return sorted(names) + on_instance


Memory = dict[tuple[str, int], list[tuple[str, nn.Module, int, int]]]


def _memory_of(model: nn.Module) -> Memory:
    """(name, owner, first byte, end) of all parameters and buffers, by the storage that they are in."""
    memory: Memory = {}
    for path, module in model.named_modules():
        for key, tensor in chain(module._parameters.items(), module._buffers.items()):
            if tensor is not None:
                place = (f"{path}.{key}" if path else key, module, *_bytes_within(tensor))
                memory.setdefault(_storage_of(tensor), []).append(place)
    return memory


def _storage_of(tensor: Tensor) -> tuple[str, int]:
    try:
        address = 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors and tensor subclasses have none
        address = 0
    return (str(tensor.device), address) if address else ("object", id(tensor))


def _bytes_within(tensor: Tensor) -> tuple[int, int]:
    if _storage_of(tensor)[0] == "object":
        return 0, 1
    start = tensor.storage_offset() * tensor.element_size()
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return int(start), int(start + span * tensor.element_size()) if tensor.numel() else int(start)


def _sharing(module: Replaceable, memory: Memory) -> str | None:
    """The reason of a table whose weight is, or shares memory with, a tensor of another module."""
    start, end = _bytes_within(module.weight)
    others = [
        other
        for other, owner, low, high in memory[_storage_of(module.weight)]
        if owner is not module and low < end and start < high
    ]
    if not others:
        return None
    return f"shares its weight with {', '.join(others)}"
