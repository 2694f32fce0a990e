"""The links benchmark: every way trains the same model, and its lines follow from what processes noted."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.links import MODELS, WAYS, _lines, check_losses
from tests.distributed.harness import run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model", list(MODELS))
def test_every_way_has_the_same_losses(model: str) -> None:
    for found in run("tests.distributed.links_workers:losses", 2, model):
        assert list(found) == [way for way in WAYS if way != "torchrec"]
        assert found["two-fold"][0] > found["two-fold"][3], "the second time the same batch is easier"
        for losses in found.values():
            assert losses == pytest.approx(found["two-fold"], rel=1e-5)
        check_losses(found)
        with pytest.raises(SystemExit, match="the losses of table-wise are up to"):
            check_losses({**found, "table-wise": [loss + 0.01 for loss in found["table-wise"]]})


def test_lines_compare_with_the_best_of_the_others() -> None:
    def noted(seconds: float, sent: int) -> dict[str, object]:
        stages = {"compute": [0.1, 0.3, 0.2]}
        return {"step seconds": [seconds] * 3, "sent": sent, "received": 0, "stages": stages, "losses": [0.5]}

    ways = {"two-fold": noted(0.1, 1000), "row-wise, distinct": noted(0.1, 1000), "table-wise": noted(0.4, 4000)}
    told = [{"1.0": {**ways, "torchrec": noted(0.3, 4000 + 1000 * rank)}} for rank in range(4)]
    lines = {line["way"]: line for line in _lines(told, "light", 16, argparse.Namespace(gbits=[1.0], batch_size=10))}
    assert lines["two-fold"]["samples/s"]["p50"] == pytest.approx(400)
    assert lines["two-fold"]["it / best of others"] == pytest.approx(3.0), "torchrec is the best of the others"
    assert lines["table-wise"]["two-fold / it"] == pytest.approx(4.0)
    assert lines["torchrec"]["bytes a sample"] == pytest.approx(550)
    assert lines["torchrec"]["floor of the link, ms"] == pytest.approx(7000 * 8 / 1e9 * 1e3), "of the busiest host"
    assert lines["torchrec"]["stages, ms"]["compute"] == pytest.approx(200)
