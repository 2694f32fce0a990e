"""Fetching rows ahead: time by stage and what overlaps, for K = 0, 1, 2 and 4 steps ahead.

    python -m benchmarks.pipeline [--tail disk]
    python -m benchmarks.pipeline --tail host --device cuda --batch-size 16384 --samples 2000000 [--fetch-by kernel]

The model, data and tables of `tiers_disk`, smaller. `overlap` is the time of all stages over that of a step: above 1
stages ran at the same time. All depths must end with the same loss to the last bit.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.card import print_table, write_card
from benchmarks.hot_batches import steady_speed
from benchmarks.tiers_disk import write_data
from holdall.runtime.device_times import DeviceTimes
from holdall.training.config import TrainConfig
from holdall.training.strategies.split import SplitStrategy
from holdall.training.tracking import read_metrics
from holdall.training.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tail", choices=["host", "disk"], default="disk")
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--rows", type=int, default=40_000_000)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--hot-bytes", default="64MB")
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--fetch-by", choices=["auto", "kernel", "copy"], default="auto", help="on a GPU")
    arguments = parser.parse_args()
    rows, losses = [], set()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write_data(data, arguments)
        for depth in arguments.depths:
            config = TrainConfig.of(
                model="rmc3",
                batch_size=arguments.batch_size,
                strategy="split",
                tail=arguments.tail,
                hot_bytes=arguments.hot_bytes,
                prefetch=depth,
                fetch_by=arguments.fetch_by,
                log_every=10,
                device=arguments.device,
                deterministic=True,
            )
            out = Path(folder) / f"run-{depth}"
            trainer = Trainer(data, out, config, quiet=True)
            times = DeviceTimes() if arguments.device == "cuda" else None
            assert isinstance(trainer.strategy, SplitStrategy)
            trainer.strategy.pipeline.times = (
                times  # on a GPU steps are captured whole: their stages are on its streams
            )
            trainer.run()
            means = trainer.strategy.stages.means() if times is None else times.medians(skip=8)
            stages = {name: seconds * 1e3 for name, seconds in means.items()}
            step = arguments.batch_size / steady_speed(out) * 1e3
            losses.add([row["loss"] for row in read_metrics(out) if row["split"] == "train"][-1])
            rows.append({"K": depth, "step_ms": step, "overlap": sum(stages.values()) / step, **stages})
    print_table(f"milliseconds by stage, rows on {arguments.tail}", rows)
    if len(losses) > 1:
        raise SystemExit(f"the depths ended with different losses: {sorted(losses)}")
    name = "pipeline" if arguments.device == "cpu" else "pipeline_gpu"
    write_card(
        name, {"tail": arguments.tail, "rows": rows, "over_none_ahead": rows[0]["step_ms"] / rows[-1]["step_ms"]}
    )


if __name__ == "__main__":
    main()
