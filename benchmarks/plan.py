"""Does the planner's forecast hold? Predicted against measured step time, for eight plans of different shape.

    python -m benchmarks.plan [--device cuda] [--model rmc2] [--dim 16] [--batch-size 2048] [--scale 0.1]

The machine is measured first (or read from --hardware), and nothing else is fitted: no number of a plan's own run
enters its forecast. All plans train the same model on the same batches, in turn; the losses of the exact ones must
agree. The card also says how far the plan that `auto` chose is from the fastest of those measured.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.card import print_table, summary, write_card
from holdall.batch import Batch
from holdall.data.dataset import DataSet
from holdall.data.loader import Loader
from holdall.data.synthetic import preset, write_prepared
from holdall.placement.hardware import Hardware
from holdall.placement.lookups import choose_hot
from holdall.placement.measure import measure_hardware
from holdall.placement.plan import Plan
from holdall.placement.planner import PlanConfig, find_lookups, plan, predict
from holdall.placement.show import show
from holdall.schema import Schema
from holdall.sizes import readable_bytes
from holdall.tables import Dense
from holdall.tiers.place import Tiers, move_dense_part, place
from holdall.training.config import TrainConfig
from holdall.training.memory import keep_freed_memory
from holdall.training.optimizers import OptimizerConfig, Optimizers, state_bytes_per_row
from holdall.training.step import logloss

STEPS_A_TURN = 4


class Side:
    """A plan at work: its model in its places, and steps whose stages are timed."""

    def __init__(self, made: Plan, data: DataSet, now: Callable[[], float]):
        self.plan, self.now = made, now
        self.device = torch.device(made.device)
        settings = TrainConfig(**{n: tuple(v) if isinstance(v, list) else v for n, v in made.train_settings().items()})
        torch.manual_seed(0)
        on_host = made.strategy != "plain"
        place_of = "cpu" if on_host else self.device
        self.model = settings.model_config().build(data.schema, made.methods(), device=place_of)
        self.tiers: Tiers | None = None
        if made.strategy == "host":
            move_dense_part(self.model, self.device)
            self.model.bags.deliver_to = self.device
        elif made.strategy == "split":
            self.tiers = place(self.model, made.hot_rows(), self.device)
        self.optimizers = Optimizers(self.model, settings.optimizer_config())
        self.batches = self._endless(Loader(data, made.batch_size, seed=0))
        self.stages: dict[str, list[float]] = {}
        self.losses: list[float] = []

    @staticmethod
    def _endless(loader: Loader) -> Iterator[Batch]:
        epoch = 0
        while True:
            yield from (batch for batch in loader.epoch(epoch) if len(batch) == loader.batch_size)
            epoch += 1

    def __call__(self) -> float:
        """One step; its seconds."""
        marks = [("", self._now())]

        def mark(stage: str) -> None:
            marks.append((stage, self._now()))

        batch = next(self.batches)
        self.model.check(batch.ids)
        moved = batch.to(self.device)
        mark("read")
        if self.tiers is not None:
            self.tiers.fetch(moved.ids)
        mark("find+fetch")
        vectors: Any = self.model.lookup(replace(moved, ids=batch.ids) if self.plan.strategy == "host" else moved)
        mark("lookup")
        leaf = vectors.detach().requires_grad_()
        loss = logloss(self.model.score(moved.dense, leaf), moved.label)
        self.losses.append(float(loss.detach()))
        loss.backward()
        mark("dense")
        vectors.backward(leaf.grad)
        self.optimizers.step()
        mark("update")
        if self.tiers is not None:
            self.tiers.send_back()
        mark("send_back")
        for (_, start), (stage, stop) in pairwise(marks):
            self.stages.setdefault(stage, []).append(stop - start)
        return marks[-1][1] - marks[0][1]

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.now()


def eight(data: Path, base: PlanConfig, hardware: Hardware) -> dict[str, Plan]:
    """Plans of different shape: everything near, everything far, three cuts between, and three compressed ones."""
    made = {"device": plan(data, replace(base, preset="device"), hardware=hardware)}
    forecast = made["device"].forecast
    assert forecast is not None
    tables = forecast.memory["device"]["tables"] + forecast.memory["device"]["table_state"]
    for name, share in {"split 1/4": 4, "split 1/20": 20, "split 1/100": 100}.items():
        made[name] = split(made["device"], data, hardware, tables // share)
    for name in ("dlrm", "tt-rec", "fpd"):
        made[name] = plan(data, replace(base, preset=name), hardware=hardware)
    made["el-rec"] = split(made["tt-rec"], data, hardware, tables // 1000)
    return made


def split(whole: Plan, data: Path, hardware: Hardware, hot_bytes: int) -> Plan:
    """A plan whose dense tables keep the `hot_bytes` most popular rows on the device and the others on the host."""
    schema = Schema.load(data)
    known = find_lookups(schema, data, None)
    names = [table.name for table in whole.tables if isinstance(table.method, Dense)]
    row = whole.dim * 4 + state_bytes_per_row(OptimizerConfig(name=whole.optimizer), whole.dim)  # type: ignore[arg-type]
    chosen = choose_hot({n: known[n] for n in names}, dict.fromkeys(names, 1.0), row, hot_bytes, whole.batch_size)
    tables = tuple(
        replace(t, hot_rows=chosen[t.name], tail="host") if chosen.get(t.name, t.num_rows) < t.num_rows else t
        for t in whole.tables
    )
    return predict(replace(whole, tables=tables, strategy="split", forecast=None), data, hardware=hardware)


def measure(plans: dict[str, Plan], data: Path, turns: int, now: Callable[[], float]) -> dict[str, Side]:
    """Run every plan in turn, `STEPS_A_TURN` steps at a time; each side keeps its stages."""
    train = DataSet(data, "train")
    sides = {name: Side(made, train, now) for name, made in plans.items()}
    for turn in range(turns + 1):
        for name in list(sides) if turn % 2 == 0 else reversed(list(sides)):
            for _ in range(STEPS_A_TURN):
                sides[name]()
        if turn == 0:
            for side in sides.values():
                side.stages.clear()
    exact = [name for name, made in plans.items() if all(isinstance(m, Dense) for m in made.methods().values())]
    first = np.array(sides[exact[0]].losses)
    for name in exact[1:]:
        apart = float(np.abs(first - np.array(sides[name].losses)).max())
        assert apart < 1e-3, f"plans that keep every row exact must learn the same: {name} is {apart} from {exact[0]}"
    return sides


def _same(one: Plan, other: Plan) -> bool:
    """Whether two plans put every row in the same place."""
    return one.strategy == other.strategy and one.methods() == other.methods() and one.hot_rows() == other.hot_rows()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="rmc2")
    parser.add_argument("--dim", type=int, default=None)
    parser.add_argument("--bottom", type=int, nargs="*", default=None)
    parser.add_argument("--top", type=int, nargs="*", default=None)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--optimizer", default="rowwise_adagrad")
    parser.add_argument("--scale", type=float, default=0.1, help="size of the tables, of Criteo Kaggle's")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--hardware", type=Path, default=None)
    parser.add_argument("--cpu-time", action="store_true", help="count processor time, for a machine that is shared")
    parser.add_argument("--data", type=Path, default=None, help="keep the made-up data set here")
    parser.add_argument("--card", default="plan")
    arguments = parser.parse_args()
    keep_freed_memory()
    now = time.process_time if arguments.cpu_time else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        data = arguments.data or Path(folder) / "data"
        if not data.exists():
            write_prepared(preset("criteo-kaggle", scale=arguments.scale, rows=arguments.rows), data)
        run(arguments, data, now)


def run(arguments: argparse.Namespace, data: Path, now: Callable[[], float]) -> None:
    if arguments.hardware is not None and arguments.hardware.exists():
        hardware = Hardware.load(arguments.hardware)
    else:
        hardware = measure_hardware(arguments.device, folder=data.parent, now=now)
        if arguments.hardware is not None:
            hardware.save(arguments.hardware)
    base = PlanConfig(
        model=arguments.model,
        dim=arguments.dim,
        bottom=None if arguments.bottom is None else tuple(arguments.bottom),
        top=None if arguments.top is None else tuple(arguments.top),
        batch_size=arguments.batch_size,
        optimizer=arguments.optimizer,
    )
    plans = eight(data, base, hardware)
    chosen = plan(data, base, hardware=hardware)
    show(chosen)
    sides = measure(plans, data, arguments.turns, now)
    results, rows = {}, []
    for name, side in sides.items():
        forecast = plans[name].forecast
        assert forecast is not None
        predicted = {
            "read": forecast.seconds["read"],
            "find+fetch": forecast.seconds["find"] + forecast.seconds["fetch"],
            **{stage: forecast.seconds[stage] for stage in ("lookup", "dense", "update", "send_back")},
        }
        total = summary([sum(parts) for parts in zip(*side.stages.values(), strict=True)])
        expected = sum(predicted.values())
        measured = {stage: float(np.median(taken)) for stage, taken in side.stages.items()}
        results[name] = {
            "device_bytes": forecast.total("device"),
            "predicted_seconds": expected,
            "measured_seconds": total,
            "predicted_over_measured": expected / total["p50"],
            "stages_predicted": predicted,
            "stages_measured": measured,
        }
        rows.append(
            {
                "plan": name,
                "device": readable_bytes(forecast.total("device")),
                "predicted ms": expected * 1e3,
                "measured ms": total["p50"] * 1e3,
                "ratio": expected / total["p50"],
                **{stage: f"{predicted[stage] * 1e3:.1f}/{measured[stage] * 1e3:.1f}" for stage in predicted},
            }
        )
    print_table("predicted and measured step; stages as predicted/measured ms", rows)
    best = min(results, key=lambda name: results[name]["measured_seconds"]["p50"])
    same = next((name for name, made in plans.items() if _same(made, chosen)), None)
    print(f"fastest measured: {best}; chosen by auto: {same or 'another plan'}")
    ratios = [result["predicted_over_measured"] for result in results.values()]
    write_card(
        arguments.card,
        {
            "plans": results,
            "worst_ratio": max(ratios, key=lambda ratio: abs(np.log(ratio))),
            "chosen": same,
            "fastest": best,
            "chosen_over_fastest": None
            if same is None
            else results[same]["measured_seconds"]["p50"] / results[best]["measured_seconds"]["p50"],
            "clock": "processor time" if arguments.cpu_time else "wall clock",
            "threads": torch.get_num_threads(),
            "hardware_seconds": hardware.took_seconds,
        },
        notes="stages are timed one after the other, so that nothing overlaps; predictions are sums of stages likewise",
    )


if __name__ == "__main__":
    main()
