"""Options that commands share, and tyro, which reads them."""

from __future__ import annotations

import json
from typing import Any

from holdall.common.errors import MissingDependencyError

try:
    import tyro as tyro
except ImportError:
    raise MissingDependencyError("tyro", "cli", "the command line") from None

FLAT = (tyro.conf.OmitArgPrefixes, tyro.conf.arg(name=""))
"""Annotation of settings: flags have the names of settings, without their parts; each part is a panel of `--help`."""


def print_json(document: dict[str, Any]) -> None:
    """Print a document as JSON on stdout."""
    print(json.dumps(document, indent=2))
