"""Worker functions of the test of the links benchmark."""

from __future__ import annotations

import torch

from benchmarks.links import MODELS, WAYS, make_batch
from benchmarks.links_sides import Ours, build_model
from holdall.distributed.processes import process_group

ROWS = [50, 3, 400]
SIZE = 64


def losses(model: str) -> dict[str, list[float]]:
    """Of this rank's shares, for every way of ours, over a few steps."""
    interaction, hidden = MODELS[model]
    found: dict[str, list[float]] = {}
    with process_group(torch.device("cpu"), timeout=30) as processes:
        batches = [make_batch(ROWS, SIZE, processes.rank, place) for place in range(3)]
        hot = {"C1": 5, "C2": 3, "C3": 20}
        for way, name in WAYS.items():
            if name != "torchrec":
                ahead = way == "two-fold"
                side = Ours(name, build_model(ROWS, 4, interaction, hidden), processes, hot, batches, ahead=ahead)
                found[way] = [float(loss) for loss in side.run([0, 1, 2, 0, 1, 2])]
                assert set(side.stages.seconds) == {"exchange before", "compute", "exchange after", "update"}
    return found
