"""JSON documents: what is written can be read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdall.common.errors import HoldallError
from holdall.common.files import read_json, write_json


def test_half_a_surrogate_pair_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with pytest.raises(
        HoldallError, match=r"^/data/b\\udcffd/x is not valid UTF-8, so .*run\.json cannot name it: rename"
    ):
        write_json(path, {"format": "f", "version": 1, "config": {"data": "/data/b\udcffd/x"}}, hashed=True)
    assert not list(tmp_path.iterdir())


def test_text_beyond_16_bits_is_read_back(tmp_path: Path) -> None:
    document = {"format": "f", "version": 1, "name": "\U0001f392 \u00e4"}
    write_json(tmp_path / "a.json", document, hashed=True)
    assert read_json(tmp_path / "a.json", dict[str, Any], format="f", version=1) == document
