"""Sizes of blocks for Triton's interpreter, which takes as long for the empty part of a block as for the rest."""

from __future__ import annotations

import pytest

from holdall.kernels.dispatch import HAS_TRITON, INTERPRETED


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few lookups, so that runs cross many of them."""
    if not (HAS_TRITON and INTERPRETED):
        return
    from holdall.kernels import row_update_triton

    monkeypatch.setattr(row_update_triton, "ELEMENTS", 64)
    monkeypatch.setattr(row_update_triton, "ELEMENTS_WITH_STATE", 64)
    monkeypatch.setattr(row_update_triton, "LONG_RUN", 2)
    monkeypatch.setitem(row_update_triton.SHORT_RUNS, "programs", 3)
    monkeypatch.setitem(row_update_triton.SHORT_RUNS, "blocks", 2)
    monkeypatch.setitem(row_update_triton.LONG_RUNS, "programs", 1)
    monkeypatch.setitem(row_update_triton.LONG_RUNS, "blocks", 4)
