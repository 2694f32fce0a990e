"""The libraries of models, by the name of their package index entry: models, or the reason why there are none."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata

from tests.peers import zoo_ctr, zoo_graphs, zoo_hugging_face, zoo_recommenders
from tests.peers.model_checks import ModelOutcome, PeerModel, check

LIBRARIES: dict[str, Callable[[], Iterator[PeerModel]]] = {
    "torch-rechub": zoo_ctr.torch_rechub,
    "deepctr-torch": zoo_ctr.deepctr_torch,
    "torchfm": zoo_ctr.torchfm,
    "recbole": zoo_recommenders.recbole,
    "fuxictr": zoo_recommenders.fuxictr,
    "transformers": zoo_hugging_face.hugging_face,
    "torch-geometric": zoo_graphs.pyg,
    "pykeen": zoo_graphs.pykeen,
}


def version(library: str) -> str | None:
    """Installed version; None where it is not installed."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def check_models(library: str, only: str = "") -> Iterator[ModelOutcome]:
    """Outcomes of the models of an installed library, without what the library prints."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        found = [check(model) for model in LIBRARIES[library]() if only in model.name]
    logging.disable(logging.NOTSET)
    yield from found
