"""Tables of 63 GB with 4 GB of device memory: rows fetched ahead, against none ahead and against all on the device.

    python -m benchmarks.tiers_gpu [--rows 246000000] [--samples 4000000] [--batch-size 65536]

DLRM with the layers of Criteo Terabyte (rmc3, dim 64), bf16, SGD; ids by a Zipf law in order of popularity. `split`
keeps 3.5 GB of hot rows on the device and the others in host memory; exact. Speeds are those of the second half of a
run, end to end, from its log.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.card import print_table, write_card
from benchmarks.hot_batches import steady_speed
from benchmarks.tiers_disk import DIM, write_data
from holdall.training.config import TrainConfig
from holdall.training.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=246_000_000)
    parser.add_argument("--samples", type=int, default=4_000_000)
    parser.add_argument("--batch-size", type=int, default=65_536)
    parser.add_argument("--hot-bytes", default="3.5GB")
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write_data(data, arguments)
        runs += [measure(data, Path(folder) / f"split-{depth}", arguments, depth) for depth in arguments.depths]
        runs.append(measure(data, Path(folder) / "plain", arguments, None))
    none_ahead, whole = runs[0]["samples_per_second"], runs[-1]["samples_per_second"]
    for run in runs:
        run["over_none_ahead"] = run["samples_per_second"] / none_ahead
        run["over_all_on_device"] = run["samples_per_second"] / whole
    print_table(
        f"{arguments.rows * DIM * 4 / 1e9:.0f} GB of tables, {arguments.hot_bytes} of hot rows",
        [{name: value for name, value in run.items() if name != "stages_ms"} for run in runs],
    )
    print_table("milliseconds by stage", [{"steps ahead": run["steps ahead"], **run["stages_ms"]} for run in runs])
    write_card("tiers_gpu", {"table_bytes": arguments.rows * DIM * 4, "hot_bytes": arguments.hot_bytes, "runs": runs})


def measure(data: Path, out: Path, arguments: argparse.Namespace, depth: int | None) -> dict[str, Any]:
    """Speed, device memory and stages of a run; all tables on the device when nothing is to be fetched."""
    tiered: dict[str, Any] = {}
    if depth is not None:
        tiered = {"strategy": "split", "hot_bytes": arguments.hot_bytes, "prefetch": depth}
    config = TrainConfig(
        model="rmc3",
        batch_size=arguments.batch_size,
        optimizer="sgd",
        precision="bf16" if arguments.device == "cuda" else "float32",
        epochs=2,
        log_every=5,
        device=arguments.device,
        **tiered,
    )
    if arguments.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(data, out, config, quiet=True)
    trainer.save = lambda *_, **__: out  # type: ignore[method-assign]  # 63 GB of checkpoint is not what is measured
    trainer.run()
    peak = torch.cuda.max_memory_allocated() / 1e9 if arguments.device == "cuda" else 0.0
    return {
        "steps ahead": "all on the device" if depth is None else str(depth),
        "samples_per_second": steady_speed(out),
        "device_gb": peak,
        **{
            name: trainer.strategy.measures().get(name, 0.0)
            for name in ("hot_share_of_lookups", "moved_bytes_per_sample")
        },
        "stages_ms": {stage: seconds * 1e3 for stage, seconds in trainer.strategy.stages.means().items()},
    }


if __name__ == "__main__":
    main()
