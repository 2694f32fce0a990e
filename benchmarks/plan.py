"""Does the planner's forecast hold? Predicted against measured step time, for eight plans of different shape.

    python -m benchmarks.plan [--device cuda] [--batch-size 2048] [--scale 0.1] [--turns 40]

The machine is measured, and nothing else is fitted: no number of a plan's own run enters its forecast. As others may
use it too, it is measured before, between and after the models, and the middle counts. Plans run as `holdall train
--plan` runs them, on the same batches, alone and one after the other, several times: side by side, threads and caches
of one would slow the others. The losses of the exact ones must agree. This is done for two models: `rmc2` (DLRM of
Criteo Kaggle), of which the dense part takes nearly all time on a CPU, and the same tables under small MLPs, where
places and methods show.

Then `auto` plans for memories that hold everything, and for a device and a host that do not: what it chooses runs in
the same way, and is compared with the fastest of the eight that fit these memories and keep every row exact.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.card import print_table, summary, write_card
from holdall.common.sizes import readable_bytes
from holdall.data.batch import Batch
from holdall.data.dataset import DataSet
from holdall.data.identity import data_fingerprint
from holdall.data.schema import Schema
from holdall.data.synthetic import preset, write_prepared
from holdall.models.loss import logloss
from holdall.optim.optimizers import Optimizers
from holdall.planning.config import PlanConfig
from holdall.planning.hot_row_selector import choose_hot
from holdall.planning.lookup_counts import LookupCounts
from holdall.planning.machine.hardware import Hardware, median_of
from holdall.planning.machine.measure import hardware as measure_hardware
from holdall.planning.memory_check import shortages
from holdall.planning.plan import Plan
from holdall.planning.planner import find_lookups, make_problem, plan_problem, predict_problem
from holdall.planning.step_cost import Problem
from holdall.runtime.allocator import keep_freed_memory
from holdall.runtime.device_times import DeviceTimes
from holdall.tables import Dense
from holdall.training.config import TrainConfig
from holdall.training.follow_plan import follow
from holdall.training.step import TrainStep
from holdall.training.strategies.registry import ONE_PROCESS as STRATEGIES

DIM = 16
"""Of both models."""
STEPS_A_TURN = 4
WARM_TURNS = 3
"""Turns that do not count: rooms grow, pages come into memory, steps are captured."""
ROUNDS = 10
"""How often a plan is run alone, with some of its turns: what others do on the machine comes and goes."""
LEAD_STEPS = 6
"""Steps of a GPU before those of a turn: they take what was made ready while nobody asked."""
MUCH = dict.fromkeys(("device", "host", "disk"), 1 << 62)
STAGES = ("read", "launch", "find", "fetch", "lookup", "dense", "update", "write_back")


class Side:
    """A plan at work, as `holdall train` follows it."""

    def __init__(self, made: Plan, data: DataSet, folder: Path, *, cpu_time: bool = False):
        folder.mkdir(parents=True)
        made.save(folder / "given.json")
        wanted = TrainConfig.of(plan=str(folder / "given.json"), device=made.device)
        self.config, self.plan = follow(wanted, data.schema, folder / "run")
        torch.manual_seed(0)
        self.device = torch.device(made.device)
        self.strategy = STRATEGIES[made.strategy](self.config, data, self.device, folder / "rows", self.plan)
        self.optimizers = Optimizers(self.strategy.model, self.config.optimizer_config())
        self.strategy.attach(self.optimizers)
        self.now = time.process_time if cpu_time else time.perf_counter
        self.strategy.stages.now = time.thread_time if cpu_time else time.perf_counter
        self.steps: list[float] = []
        self.losses: list[float] = []
        self._step = self._make_step()
        self._running = self._endless()

    @property
    def num_steps(self) -> int:
        """Steps of a turn."""
        return STEPS_A_TURN

    def turn(self) -> None:
        for _ in range(self.num_steps):
            start = self.now()
            next(self._running)
            self.steps.append(self.now() - start)

    def stages(self) -> dict[str, float]:
        """Seconds by stage, of the steps that counted."""
        return self.strategy.stages.medians()

    def close(self) -> None:
        self._running.close()
        self.strategy.close()

    def run(self, turns: int) -> None:
        """Turns that do not count, and some that do."""
        for _ in range(WARM_TURNS):
            self.turn()
        self.forget_times()
        for _ in range(turns):
            self.turn()

    def forget_times(self) -> None:
        self.steps.clear()
        self.strategy.stages.taken.clear()

    def _endless(self) -> Generator[None, None, None]:
        step = epoch = 0
        while True:
            for segment in self.strategy.segments(epoch, 0):
                segment = replace(segment, batches=self.strategy.stages.drawn(segment.batches))
                with closing(self.strategy.on_device(segment, step)) as on_device:
                    for batch, moved in on_device:
                        self._step(step, batch, moved)
                        step += 1
                        yield
            epoch += 1

    def _make_step(self) -> Callable[[int, Batch, Batch], None]:
        """A step whose stages are timed."""
        stage = self.strategy.stages.stage
        self.strategy.stages.begin_step(1 << 20)

        def step(number: int, batch: Batch, moved: Batch) -> None:
            with stage("lookup"):
                vectors: Any = self.strategy.lookup(batch, moved)
            with stage("dense"):  # cut off from the tables, so that their backward can be timed with their update
                leaf = vectors.detach().requires_grad_()
                loss = logloss(self.strategy.model.score(moved.dense, leaf), moved.label)
                loss.backward()
                self.losses.append(float(loss.detach()))
            with stage("update"):
                vectors.backward(leaf.grad)
                self.optimizers.step()
            self.strategy.after_step(number + 1)

        return step


class SideOnGpu(Side):
    """The same on a GPU: steps are CUDA graphs where they can be, and many are timed as one."""

    def _make_step(self) -> Callable[[int, Batch, Batch], None]:
        self.inner = TrainStep(self.config, self.strategy, self.optimizers, _refuse)

        def step(number: int, batch: Batch, moved: Batch) -> None:
            self.inner.run(number, f"step {number}", batch, moved, len(batch), stop=False)

        return step

    @property
    def num_steps(self) -> int:
        return 3 * STEPS_A_TURN

    def turn(self) -> None:
        """The time of a turn is that between its ends on the device, which nothing waits for."""
        for _ in range(LEAD_STEPS):
            next(self._running)
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        ends[0].record()
        for _ in range(self.num_steps):
            next(self._running)
        ends[1].record()
        torch.cuda.synchronize(self.device)
        self.steps.append(ends[0].elapsed_time(ends[1]) / 1e3 / self.num_steps)
        self.losses.append(self.inner.read_losses() / (LEAD_STEPS + self.num_steps))

    def stages(self) -> dict[str, float]:
        """Those of a turn that does not count, since they take time to be measured."""
        times = DeviceTimes()
        pipeline = getattr(self.strategy, "pipeline", None)
        if pipeline is not None:
            pipeline.times = times
        counted = list(self.steps)
        self.turn()
        self.steps = counted
        host = {f"{name}, host": seconds for name, seconds in times.host_medians(LEAD_STEPS).items()}
        graph = self.inner.graph
        replays = {"replays": 0.0 if graph is None else float(graph.replays)}
        return {**self.strategy.stages.medians(), **times.medians(LEAD_STEPS), **host, **replays}


def _refuse(batch: Batch, loss: float, place: str, done: str) -> None:
    raise SystemExit(f"the loss is {loss} at {place}")


class Planning:
    """Plans of one model for one data set."""

    def __init__(self, data: Path, known: Mapping[str, LookupCounts], config: PlanConfig, hardware: Hardware):
        self.schema, self.name, self.config = Schema.load(data), data.name, config
        self.problem: Problem = make_problem(self.schema, known, config, hardware, data)

    def plan(self, limits: Mapping[str, int] = MUCH, **changes: Any) -> Plan:
        config = replace(self.config, **changes)
        return plan_problem(self.problem, config, limits, self.name, data_fingerprint(self.schema))

    def split(self, whole: Plan, share: int, on_disk: tuple[str, ...] = ()) -> Plan:
        """A plan whose dense tables keep 1/share of their bytes, the most popular rows, on the device, and the others
        on the host, or on disk."""
        names = [table.name for table in whole.tables if isinstance(table.method, Dense)]
        row = self.problem.row_bytes + self.problem.state_bytes
        budget = row * sum(self.problem.tables.values()) // share
        known = {name: self.problem.lookups[name] for name in names}
        hot = choose_hot(known, dict.fromkeys(names, 1.0), row, budget, self.problem.batch_size)
        tables = tuple(
            replace(t, hot_rows=hot[t.name], tail="disk" if t.name in on_disk else "host")
            if hot.get(t.name, t.num_rows) < t.num_rows
            else t
            for t in whole.tables
        )
        made = replace(whole, tables=tables, strategy="split", prefetch=self.problem.prefetch, forecast=None)
        return predict_problem(made, self.problem, MUCH)

    def eight(self) -> dict[str, Plan]:
        """Everything near; everything far and looked up there; two cuts between; tails on disk; some of them; and two
        kinds of compressed tables, one with tails on the host."""
        device = self.plan(preset="device")
        largest = sorted(self.problem.tables, key=lambda name: -self.problem.tables[name])
        return {
            "device": device,
            "dlrm": self.plan(preset="dlrm"),
            "split 1/4": self.split(device, 4),
            "split 1/100": self.split(device, 100),
            "disk 1/100": self.split(device, 100, tuple(largest)),
            "mixed 1/100": self.split(device, 100, tuple(largest[:2])),
            "fpd": self.plan(preset="fpd"),
            "el-rec": self.split(self.plan(preset="tt-rec"), 1000),
        }


def exact(made: Plan) -> bool:
    return all(isinstance(method, Dense) for method in made.methods().values())


@dataclass(frozen=True)
class Taken:
    """What was measured of a plan."""

    steps: list[float]
    stages: dict[str, float]
    losses: list[float]


def measure(
    plans: Mapping[str, Plan], data: Path, turns: int, folder: Path, *, cpu_time: bool = False
) -> dict[str, Taken]:
    """Run one plan after the other, and then all of them again, until all turns are taken; those that keep every row
    exact must learn the same."""
    train = DataSet(data, "train")
    on_gpu = next(iter(plans.values())).device != "cpu"
    kind = SideOnGpu if on_gpu else Side
    found: dict[str, Taken] = {}
    for number in range(ROUNDS):
        for name in list(plans) if number % 2 == 0 else reversed(list(plans)):
            side = kind(plans[name], train, folder / str(number) / name.replace("/", " of "), cpu_time=cpu_time)
            side.run(-(-turns // ROUNDS))
            before = found[name].steps if number else []
            found[name] = Taken(before + side.steps, side.stages(), side.losses)
            side.close()
            del side  # and its memory
            gc.collect()
        so_far = ", ".join(f"{name} {summary(found[name].steps)['p50'] * 1e3:.2f}" for name in plans)
        print(f"round {number + 1} of {ROUNDS}, milliseconds so far: {so_far}", flush=True)
    shutil.rmtree(folder)
    same = [name for name, made in plans.items() if exact(made)]
    count = 2 if on_gpu else None  # a GPU sums in an order that depends on the places of rows, which grows
    first = np.array(found[same[0]].losses[:count])
    for name in same[1:]:
        apart = float(np.abs(first - np.array(found[name].losses[:count])).max())
        assert apart < 1e-3, f"plans that keep every row exact must learn the same: {name} is {apart} from {same[0]}"
    return found


def compared(made: Plan, found: Taken, *, cpu_time: bool) -> dict[str, Any]:
    """What was predicted of a plan beside what was measured; processor time has nothing that overlaps."""
    forecast = made.forecast
    assert forecast is not None
    predicted = {stage: forecast.seconds[stage] for stage in STAGES}
    expected = sum(predicted.values()) if cpu_time else forecast.step_seconds
    taken = summary(found.steps)
    return {
        "device_bytes": forecast.total("device"),
        "predicted_seconds": expected,
        "measured_seconds": taken,
        "predicted_over_measured": expected / taken["p50"],
        "stages_predicted": predicted,
        "stages_measured": found.stages,
    }


def show(title: str, results: Mapping[str, Mapping[str, Any]]) -> None:
    rows = []
    for name, found in results.items():
        stages = {
            stage: f"{found['stages_predicted'][stage] * 1e3:.2f}/{found['stages_measured'].get(stage, 0.0) * 1e3:.2f}"
            for stage in STAGES
        }
        rows.append(
            {
                "plan": name,
                "device": readable_bytes(found["device_bytes"]),
                "predicted ms": round(found["predicted_seconds"] * 1e3, 2),
                "measured ms": round(found["measured_seconds"]["p50"] * 1e3, 2),
                "ratio": round(found["predicted_over_measured"], 3),
                **stages,
            }
        )
    print_table(f"{title}: predicted and measured step; stages as predicted/measured ms", rows)


@dataclass(frozen=True)
class Ran:
    """All of one model: the eight, what `auto` chose for which memories, and what was measured of them."""

    plans: dict[str, Plan]
    chosen: dict[str, Plan]
    limits: dict[str, dict[str, int]]
    taken: dict[str, Taken]

    def results(self, planning: Planning, *, cpu_time: bool) -> dict[str, Any]:
        """Beside what the rates of `planning` foretell."""
        with_limits = [(name, made, MUCH) for name, made in self.plans.items()]
        with_limits += [(f"auto: {name}", made, self.limits[name]) for name, made in self.chosen.items()]
        results = {
            name: compared(predict_problem(made, planning.problem, limits), self.taken[name], cpu_time=cpu_time)
            for name, made, limits in with_limits
        }
        return {"plans": results, "choices": {name: self._choice(name, results) for name in self.chosen}}

    def _choice(self, name: str, results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        chosen = self.chosen[name]
        fit = [
            other
            for other, made in self.plans.items()
            if exact(made) and not shortages(replace(made, caps=chosen.caps), self.limits[name])
        ]
        best = min(fit, key=lambda other: results[other]["measured_seconds"]["p50"])
        taken = results[f"auto: {name}"]["measured_seconds"]["p50"]
        return {
            "strategy": chosen.strategy,
            "tails": sorted(set(chosen.tails().values())),
            "compared_with": fit,
            "fastest": best,
            "chosen_over_fastest": taken / results[best]["measured_seconds"]["p50"],
        }


def run_model(planning: Planning, data: Path, folder: Path, turns: int, *, cpu_time: bool) -> Ran:
    plans = planning.eight()
    tight = plans["mixed 1/100"].forecast
    assert tight is not None
    few = {place: tight.total(place) for place in ("device", "host")}
    given = {"everything fits": {}, "little memory": {f"{place}_memory": str(size) for place, size in few.items()}}
    limits = {"everything fits": MUCH, "little memory": {**MUCH, **few}}
    chosen = {name: planning.plan(limits[name], **given[name]) for name in given}
    others = {f"auto: {name}": made for name, made in chosen.items()}
    twins = {name: twin for name, made in others.items() for twin in plans if same_plan(made, plans[twin])}
    every = {**plans, **{name: made for name, made in others.items() if name not in twins}}
    taken = measure(every, data, turns, folder, cpu_time=cpu_time)
    return Ran(plans, chosen, limits, {**taken, **{name: taken[twin] for name, twin in twins.items()}})


def same_plan(one: Plan, other: Plan) -> bool:
    """Whether they run alike, so that what is measured of one holds for the other."""
    return (one.tables, one.strategy, one.prefetch) == (other.tables, other.strategy, other.prefetch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--optimizer", default="rowwise_adagrad")
    parser.add_argument("--scale", type=float, default=0.1, help="size of the tables, of Criteo Kaggle's")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--prefetch", type=int, default=None, help="steps ahead that far rows are fetched")
    parser.add_argument("--hardware", type=Path, default=None, help="rates to use instead of measuring them")
    parser.add_argument("--save-hardware", type=Path, default=None, help="keep the measured rates here")
    parser.add_argument("--cpu-time", action="store_true", help="count processor time, for a machine that is shared")
    parser.add_argument("--data", type=Path, default=None, help="keep the made-up data set here")
    parser.add_argument("--card", default="plan", help="name of the card; none is written when empty")
    arguments = parser.parse_args()
    os.environ.setdefault("COLUMNS", "180")
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        data = arguments.data or Path(folder) / "data"
        if not data.exists():
            write_prepared(preset("criteo-kaggle", scale=arguments.scale, rows=arguments.rows), data)
        run(arguments, data, Path(folder))


def measure_machine(arguments: argparse.Namespace, folder: Path) -> Hardware:
    """One pass; on a GPU, of what these models use: kernels are compiled for every dim, optimizer and precision."""
    few: dict[str, Any] = {"dims": (DIM,), "optimizers": (arguments.optimizer,), "precisions": ("float32",)}
    now = time.process_time if arguments.cpu_time else time.perf_counter
    more = few if arguments.device == "cuda" else {}
    made = measure_hardware(arguments.device, folder=folder, now=now, passes=1, **more)
    print(f"measured the machine in {made.took_seconds:.0f} s", flush=True)
    return made


def run(arguments: argparse.Namespace, data: Path, folder: Path) -> None:
    started = time.perf_counter()
    given = arguments.hardware
    passes = [measure_machine(arguments, data.parent) if given is None else Hardware.load(given)]
    known = find_lookups(Schema.load(data), data, None)
    shared = PlanConfig(batch_size=arguments.batch_size, optimizer=arguments.optimizer, prefetch=arguments.prefetch)
    models = {
        "rmc2": shared.replace(model="rmc2"),
        "small MLPs": shared.replace(model="dlrm", dim=DIM, bottom=(64,), top=(64,)),
    }
    ran = {}
    for name, config in models.items():
        planning = Planning(data, known, config, median_of(passes))
        ran[name] = run_model(planning, data, folder / "sides", arguments.turns, cpu_time=arguments.cpu_time)
        if given is None:
            passes.append(measure_machine(arguments, data.parent))
    hardware = median_of(passes)
    if arguments.save_hardware is not None:
        hardware.save(arguments.save_hardware)
    results = {}
    for name, config in models.items():
        found = ran[name].results(Planning(data, known, config, hardware), cpu_time=arguments.cpu_time)
        results[name] = found
        show(name, found["plans"])
        for what, choice in found["choices"].items():
            others = ", ".join(choice["compared_with"])
            print(f"{what}: auto chose {choice['strategy']} with tails on {', '.join(choice['tails'])}, ", end="")
            print(f"{choice['chosen_over_fastest']:.3f} times '{choice['fastest']}', the fastest of {others}")
    ratios = {
        f"{model}, {name}": made["predicted_over_measured"]
        for model, found in results.items()
        for name, made in found["plans"].items()
    }
    worst = max(ratios, key=lambda name: abs(np.log(ratios[name])))
    print(f"furthest from 1: {ratios[worst]:.3f}, {worst}")
    if not arguments.card:
        return
    write_card(
        arguments.card,
        {
            "models": results,
            "worst_ratio": ratios[worst],
            "worst_plan": worst,
            "clock": "processor time" if arguments.cpu_time else "wall clock",
            "threads": torch.get_num_threads(),
            "hardware_seconds": [one.took_seconds for one in passes],
            "seconds": time.perf_counter() - started,
        },
        notes="plans run as training runs them, each alone, several times; medians. The machine is measured before, "
        "between and after the models, and the middle counts. Steps are compared with what overlaps (processor time: "
        "with the sum of stages).",
    )


if __name__ == "__main__":
    main()
