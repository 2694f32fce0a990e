"""Bundles of small models on made-up data, for exports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema
from holdall.data.synthetic import SyntheticConfig, write_prepared
from holdall.models import Model, ModelConfig
from holdall.serving.bundle import Origin, Quality, open_bundle, write_bundle
from holdall.tables import Bands, Codes, Method, Quantized, Shared
from tests.serving.made_up import implicit_files

BANDS = Bands(((3, Quantized()), (40, Quantized(4)), (100, Codes(2, 4)), (None, Shared(rows=2))))


def clicks(folder: Path, cardinalities: tuple[int, ...], **settings: object) -> Path:
    """Clicks with one-hot features, and bags where `bag_lengths` says so."""
    settings = {"rows": 1500, "num_dense": 2, **settings}
    write_prepared(SyntheticConfig(cardinalities=cardinalities, **settings), folder)  # type: ignore[arg-type]
    return folder


def histories(folder: Path) -> Path:
    """Users, items and sequences of earlier items."""
    raw = implicit_files(folder.with_name(folder.name + " raw"))
    prepare([str(raw)], folder, PrepareConfig(format="taobao", valid=0.1))
    return folder


def bundle_of(
    out: Path, data: Path, config: ModelConfig, method: Method | Mapping[str, Method] | None = None
) -> tuple[Path, Model]:
    """A bundle of a model with tables of these methods, and the model as the bundle opens it."""
    torch.manual_seed(0)
    schema = Schema.load(data)
    model = config.build(schema, method)
    with torch.no_grad():
        for parameter in model.bags.parameters():
            parameter *= 10  # so that tables matter beside the dense part
    quality = Quality(table_bytes=model.bags.num_bytes(), dense_bytes=1)
    write_bundle(out, model, config, schema, data, Origin(run=None, checkpoint=None, step=7), quality)
    return out, open_bundle(out).model()
