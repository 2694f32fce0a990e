"""Options that commands share, and tyro, which reads them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from holdall.common.errors import ConfigError, MissingDependencyError

try:
    import tyro as tyro
except ImportError:
    raise MissingDependencyError("tyro", "cli", "the command line") from None

FLAT = (tyro.conf.OmitArgPrefixes, tyro.conf.arg(name=""))
"""Annotation of settings: flags have the names of settings, without their parts; each part is a panel of `--help`."""


def print_json(document: dict[str, Any]) -> None:
    """Print a document as JSON on stdout."""
    print(json.dumps(document, indent=2))


def import_model(place: str) -> None:
    """Import a model of one's own, `package.module:Config`, also from the current folder, as `python -m` does."""
    from holdall.models.own import register_model

    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    register_model(place)


def model_again(name: str) -> str:
    """The option that the next command needs for a model; none but for one's own."""
    return f" --model {name}" if ":" in name else ""


def refuse_other_model(path: Path, model: str | None) -> None:
    """Raise if `--model` is given and is not the model of the run or bundle at `path`."""
    from holdall.models.own import own_config
    from holdall.serving.bundle import is_bundle, open_bundle
    from holdall.training.tracking import RUN_FILE, read_run

    if model is None:
        return
    if is_bundle(path):
        found = open_bundle(path).record.model["family"]
    elif (path / RUN_FILE).exists():
        found = read_run(path)["config"]["train"].get("model")
    else:
        return
    if ":" not in model or own_config(model).family != found:
        raise ConfigError(f"{path} has the model {found}, not {model}: leave --model out, or name that one")
