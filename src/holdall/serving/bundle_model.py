"""Model of a bundle: its tensors as files store them, and the model built around those files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from holdall.checkpoint.protocols import TensorByRows
from holdall.common.decode import decode
from holdall.common.errors import DataError, did_you_mean
from holdall.data.schema import Schema
from holdall.embedding.bags import EmbeddingBags, module_name
from holdall.models import CONFIGURATIONS, Model, ModelConfig
from holdall.models.no_initial_values import NoInitialValues
from holdall.models.own import own_config
from holdall.serving.mapped_tensors import CURE, MappedTensors
from holdall.tables import Method
from holdall.tables.codes import tie_codebooks
from holdall.tables.dense import DenseTable
from holdall.tiers.tiered_pack import TieredPack

BAGS = "bags."
"""Prefix of the tensors of tables in a model."""
FAMILIES: dict[str, type[ModelConfig]] = {config.family: type(config) for config in CONFIGURATIONS.values()}


def model_json(config: ModelConfig) -> dict[str, Any]:
    """Family and settings of a model, as JSON has them."""
    return {"family": config.family, **asdict(config)}  # type: ignore[call-overload]


def model_from_json(document: Mapping[str, Any], where: str) -> ModelConfig:
    """The settings that `model_json` described; unknown families and settings are refused."""
    settings = dict(document)
    family = settings.pop("family", None)
    if isinstance(family, str) and ":" in family:
        kind = own_config(family)
    elif isinstance(family, str) and family in FAMILIES:
        kind = FAMILIES[family]
    else:
        raise DataError(f"{where}: unknown model family{did_you_mean(str(family)[:60], FAMILIES)}")
    return decode(settings, kind, where, inside="model", error=DataError, cure=CURE)


def stored_tensors(model: Model) -> tuple[dict[str, Tensor], dict[str, Tensor | TensorByRows]]:
    """Tensors of the dense part and of the tables, by name, each once however many tables share it."""
    dense: dict[str, Tensor] = {}
    tables: dict[str, Tensor | TensorByRows] = {}
    for names, tensor in _named_tensors(model):
        (tables if names[0].startswith(BAGS) else dense)[names[0]] = tensor
    for pack in model.bags.packs:
        if isinstance(pack, TieredPack) and pack.lazy:  # rows on disk, whose weight is on meta
            tables.update({weight_name(name): pack.saved_weight(name) for name in pack.tables})
    return dense, tables


def packed_tensors(model: Model) -> list[list[str]]:
    """Names of the tensors that a model packs into one storage, once it is built anew (`pack_tables`)."""
    groups: dict[torch.dtype, list[str]] = {}
    for name in table_names(model):
        table = model.bags.table(name)
        if type(table) is DenseTable:
            groups.setdefault(table.weight.dtype, []).append(weight_name(name))
    return list(groups.values())


def table_names(model: Model) -> list[str]:
    """Tables of a model, in the order of the features that look them up."""
    return list(dict.fromkeys(model.bags.features.values()))


def weight_name(table: str) -> str:
    """Name of a dense table's weight in a model."""
    return f"{BAGS}tables.{module_name(table)}.weight"


def build_model(
    config: ModelConfig,
    schema: Schema,
    methods: Mapping[str, Method],
    vector_dtype: torch.dtype | None,
    dense: MappedTensors,
    tables: MappedTensors,
) -> Model:
    """The model whose tables are views of a file, in evaluation mode and without gradients; no row is read."""
    try:
        model = _without_values(config, schema, methods)
    except (ValueError, RuntimeError, OverflowError) as error:  # torch's errors for sizes past 2^63, and our own
        reason = str(error).partition("\n")[0]
        raise DataError(f"the model of the bundle {tables.path.parent} cannot be built ({reason}): {CURE}") from error
    bags = model.bags
    bags.vector_dtype = vector_dtype
    for of_names, expected in _named_tensors(model):
        source = tables if of_names[0].startswith(BAGS) else dense
        tensor = _checked(source, of_names[0], expected)
        if isinstance(expected, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=False)
        for name in of_names:
            _assign(model, name, tensor)
    for pack in bags.packs:
        pack.use_storage(tables.joined([weight_name(name) for name in pack.tables]))
    bags.plan_lookups()
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model.requires_grad_(False).eval()


def _without_values(config: ModelConfig, schema: Schema, methods: Mapping[str, Method]) -> Model:
    """The model on the meta device, where it takes no memory."""
    rows = config.table_rows(schema)
    if set(methods) != set(rows):
        raise DataError("its tables are not those of its schema")
    features = {feature.name: feature.table or feature.name for feature in config.reads(schema).features}
    names = dict.fromkeys(features.values())
    with NoInitialValues():
        built = {name: methods[name].build(rows[name], config.dim, device="meta") for name in names}
        tie_codebooks(built.values())
        return config.with_tables(EmbeddingBags(built, features, device="meta"), schema, None, "meta")


def _named_tensors(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Parameters and buffers of a model, each with all its names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def _checked(source: MappedTensors, name: str, expected: Tensor) -> Tensor:
    """The tensor of that name, if it has the type and shape that the model needs."""
    if name not in source.names():
        raise DataError(f"{source.path} has no tensor '{name}', which the model needs: {CURE}")
    found = source[name]
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise DataError(
            f"{source.path}: tensor '{name}' has {found.dtype} {list(found.shape)} in the place of {expected.dtype} "
            f"{list(expected.shape)}: {CURE}"
        )
    return found


def _assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of a parameter or buffer, whatever the module does when an attribute is set."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if isinstance(tensor, nn.Parameter):
        owner._parameters[leaf] = tensor
    else:
        owner._buffers[leaf] = tensor
