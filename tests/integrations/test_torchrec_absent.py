"""The bridge to TorchRec, where TorchRec is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def test_without_torchrec_the_extra_is_named() -> None:
    script = """
import sys
sys.modules["torchrec"] = None
from holdall.integrations.torchrec import from_collection
from holdall.common.errors import MissingDependencyError
try:
    from_collection(object())
except MissingDependencyError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert "needs torchrec, which is not installed: pip install 'holdall[torchrec]'" in done.stdout, done.stderr
