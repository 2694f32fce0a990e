"""What a killed rank costs, and what saving costs training: two processes under torchrun, gloo on loopback.

python -m benchmarks.recovery [--rows 400000] [--ids 200000] [--steps 400] [--save-every 40] [--kills 3]

Two runs of the same training. In one, ranks are killed (kill -9) between two saves, and torchrun starts all anew; in
the other nothing happens, and every other save is waited for. Both must end with the same tensors, to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.card import alternate, print_table, summary, write_card
from holdall import checkpoint
from holdall.data.synthetic import SyntheticConfig, write_prepared
from holdall.training.evaluate_run import CHECKPOINTS

PARTS = ("noticed", "restarted", "started", "loaded", "repeated")
NOTES = (
    "lost, from the kill until the step that was about to be made is made again, by part: noticed, until the "
    "other rank's collective fails; restarted, until torchrun (--monitor-interval 0.1) has begun new processes; "
    "started, until they have imported, met and built the model; loaded, until hashes are compared and rows "
    "copied; repeated, the steps since the checkpoint, which is as old as --save-every makes it. Saves: blocked_s "
    "is how long training waits in the call, complete_s until the checkpoint is complete, steps_slower how much "
    "longer a step takes meanwhile, lost_s what both come to, lost_of_a_minute that at one save a minute; "
    "foreground is --no-save-in-background. Sides alternate in one run; the first save, whose copy takes new "
    "memory, is apart. copy_s is the floor of blocked_s: one copy of a process's part in memory. One thread a "
    "process."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400_000, help="of the training log")
    parser.add_argument("--ids", type=int, default=200_000, help="of each of eight features")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=40)
    parser.add_argument("--kills", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data"
        shape = SyntheticConfig(rows=options.rows, cardinalities=(options.ids,) * 8, num_dense=4, zipf=ZIPF)
        write_prepared(shape, data, valid=0.01, test=0.01)
        kills = choose_kills(options.steps, options.save_every, options.kills)
        hurt = run(Path(scratch) / "hurt", data, options, kills)
        calm = run(Path(scratch) / "calm", data, options, [], alternates=True)
        refuse_different(tensors(Path(scratch) / "hurt"), tensors(Path(scratch) / "calm"))
        size = sum(shard.bytes for shard in checkpoint.read(newest(Path(scratch) / "calm")).shards.values())
    lost = [lost_to(kill, hurt) for kill in kills]
    saves = cost_of_saves(calm, size // 2)
    print_table(f"seconds lost to a killed rank, checkpoint of {size / 1e6:.0f} MB", lost)
    shown = ("side", "blocked_s", "complete_s", "steps_slower", "lost_s", "lost_of_a_minute", "saves")
    print_table("seconds a save costs", [{name: line[name] for name in shown} for line in saves["sides"]])
    medians = {part: median(one[part] for one in lost) for part in (*PARTS, "lost")}
    print_table("medians of seconds lost", [medians])
    results = {"processes": 2, "checkpoint_bytes": size, **vars(options), "killed": lost, "medians": medians, **saves}
    write_card("recovery", results, notes=NOTES)


ZIPF = 0.6
"""Flatter than clicks are, so that most rows are touched within the run."""


def choose_kills(steps: int, save_every: int, num: int) -> list[tuple[int, int]]:
    """`(step, rank)`: spread over the run, each half-way between two saves, on one rank and the other in turn."""
    intervals = steps // save_every - 1
    if not 1 <= num <= intervals:
        raise SystemExit(f"--kills must be 1 to {intervals} for {steps} steps and a save every {save_every}")
    places = [1 + number * intervals // num for number in range(num)]
    return [(place * save_every + save_every // 2, (number + 1) % 2) for number, place in enumerate(places)]


def run(
    out: Path, data: Path, options: argparse.Namespace, kills: list[tuple[int, int]], *, alternates: bool = False
) -> list[list[dict[str, Any]]]:
    """Train under torchrun; what happened, by rank."""
    notes = out.with_name(out.name + "-notes")
    notes.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agent = ["--nproc-per-node", "2", "--max-restarts", str(len(kills)), "--monitor-interval", "0.1"]
    agent += ["--master-port", str(port), "-m", "benchmarks.recovery_worker"]
    words = ["train", data, "--out", out, "--resume", "--deterministic", "--strategy", "two-fold", "--hot-bytes", "1MB"]
    words += ["--dim", options.dim, "--bottom", "32", "--top", "64", "--batch-size", options.batch_size]
    words += ["--steps", options.steps, "--save-every", options.save_every, "--evaluate-every", options.steps]
    command = [sys.executable, "-m", "torch.distributed.run", *agent, notes, json.dumps(kills), int(alternates), *words]
    subprocess.run([str(word) for word in command], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    files = [notes / f"rank-{rank}.jsonl" for rank in range(2)]
    return [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files]


def newest(run_folder: Path) -> Path:
    path = checkpoint.latest(run_folder / CHECKPOINTS)
    assert path is not None
    return path


def tensors(run_folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(newest(run_folder), verify=False)[0]


def refuse_different(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    if first.keys() != second.keys() or any(not torch.equal(first[name], second[name]) for name in first):
        raise SystemExit("the run that was killed and the one that was not ended with different tensors")


def lost_to(kill: tuple[int, int], notes: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Seconds by part, as NOTES says. Times of other ranks than the killed one's are those of the last of them."""
    step, rank = kill
    (killed,) = [row for row in notes[rank] if row["what"] == "kill" and row["step"] == step]
    attempt = killed["attempt"] + 1

    def when(what: str, attempt: int, ranks: tuple[int, ...], field: str = "time", **more: Any) -> float:
        wanted = {"what": what, "attempt": attempt, **more}
        found = [row[field] for r in ranks for row in notes[r] if all(row.get(k) == v for k, v in wanted.items())]
        return max(found)

    first = min(row["step"] for row in notes[0] if row["what"] == "step" and row["attempt"] == attempt)
    times = [
        killed["time"],
        when("run fails", attempt - 1, (1 - rank,)),
        when("begin", attempt, (0, 1), "begun"),
        when("load begins", attempt, (0, 1)),
        when("load ends", attempt, (0, 1)),
        when("step", attempt, (0, 1), "begun", step=step),
    ]
    parts = {part: later - sooner for part, sooner, later in zip(PARTS, times, times[1:], strict=False)}
    return {"step": step, "rank": rank, **parts, "lost": times[-1] - times[0], "repeated_steps": step - first}


def cost_of_saves(notes: list[list[dict[str, Any]]], own_bytes: int) -> dict[str, Any]:
    """What rank 0 saw of saves, by side."""
    rows = notes[0]
    steps = [(row["time"] - row["begun"], row) for row in rows if row["what"] == "step"][5:]
    alone = median(seconds for seconds, row in steps if row["alone"])
    beside = [seconds for seconds, row in steps if row["beside"]]
    slower = median(beside) / alone - 1 if beside else 0.0
    done = {row["begun"]: row["time"] for row in rows if row["what"] == "complete"}
    blocked: dict[str, list[float]] = {"foreground": [], "background": []}
    complete: dict[str, list[float]] = {"foreground": [], "background": []}
    first, *saves = [row for row in rows if row["what"] == "save"]
    for row in saves:
        blocked[row["side"]].append(row["time"] - row["begun"])
        complete[row["side"]].append(done.get(row["begun"], row["time"]) - row["begun"])
    lines = []
    for side in blocked:
        spread, end = summary(blocked[side]), median(complete[side])
        meanwhile = (end - spread["p50"]) * (1 - 1 / (1 + slower)) if side == "background" else 0.0
        lines.append({
            "side": side,
            "blocked_s": spread["p50"],
            "blocked_p20_s": spread["p20"],
            "blocked_p80_s": spread["p80"],
            "complete_s": end,
            "steps_slower": slower if side == "background" else None,
            "lost_s": spread["p50"] + meanwhile,
            "lost_of_a_minute": (spread["p50"] + meanwhile) / 60,
            "saves": spread["repeats"],
        })  # fmt: skip
    source, target = torch.ones(own_bytes, dtype=torch.uint8), torch.ones(own_bytes, dtype=torch.uint8)
    copies = alternate({"copy": lambda: discard(target.copy_(source))}, 5)["copy"]
    return {
        "sides": lines,
        "first_blocked_s": first["time"] - first["begun"],
        "step_s": alone,
        "copy_s": median(copies),
    }


def discard(_: object) -> None:
    """Drop a result."""


if __name__ == "__main__":
    main()
