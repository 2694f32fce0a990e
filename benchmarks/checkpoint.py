"""Checkpoint throughput: saving and loading a state of tables, against bare safetensors without manifest and hashes;
and what training waits for when the checkpoint is written in the background, by one process and by several.

python -m benchmarks.checkpoint [--gib 1.0] [--repeats 5] [--processes 1 2]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from safetensors.torch import load_file, save_file

from benchmarks.card import alternate, print_table, summary, write_card
from holdall import checkpoint
from holdall.common.files import fsync_file
from holdall.distributed.processes import process_group

SHARD_BYTES = 256 << 20
"""Several shards at 1 GiB, so that hashing one overlaps writing the next."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="that save in the background")
    options = parser.parse_args()
    tensors = make_state(options.gib)
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory() as scratch:
        sides = make_sides(Path(scratch), tensors, into)
        check(sides, tensors, into)
        times = alternate(sides, options.repeats, warmup=0)
        extra = {side: peak_anonymous_bytes(run) for side, run in sides.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    rows = []
    for side, seconds in times.items():
        spread = summary(seconds)
        rows.append({
            "side": side,
            "p50_s": spread["p50"],
            "p20_s": spread["p20"],
            "p80_s": spread["p80"],
            "gb_per_s": size / 1e9 / spread["p50"],
            "extra_mb": extra[side] / 1e6,
        })  # fmt: skip
    print_table(f"Checkpoint of {size / 1e9:.2f} GB, {len(tensors)} tensors, {options.repeats} repeats", rows)
    del tensors, into, sides
    waits = [in_the_background(num, options.gib, options.repeats) for num in options.processes]
    shown = ("processes", "foreground_s", "blocked_s", "complete_s", "lost_s")
    title = f"Saving {size / 1e9:.2f} GB while steps go on, {options.repeats} repeats"
    print_table(title, [{name: row[name] for name in shown} for row in waits])
    results: dict[str, Any] = {"bytes": size, "repeats": options.repeats, "rows": rows, "background": waits}
    write_card("checkpoint", results, notes=NOTES)


NOTES = (
    "bare: one safetensors file, no manifest, no hashes. Loading reads from the page cache; saving includes fsync. "
    "extra_mb: anonymous memory on top of the state (load returns a new copy of it, the others none). background: all "
    "processes hold the whole state, and each writes its part of it. blocked_s: until save returns, first_blocked_s of "
    "the first one, whose copy takes new memory; complete_s: until the checkpoint is complete; steps are matrix "
    "products, steps_slower how much longer one takes while a checkpoint is written (hashing and writing take a core); "
    "lost_s: blocked_s plus what those steps lose; lost_of_a_minute: that, at one save a minute."
)


def make_state(gib: float) -> dict[str, torch.Tensor]:
    """Two tables of unequal size with their optimizer states, and a few small tensors."""
    rows = int(gib * (1 << 30) / (4 * 16) / 1.25)
    generator = torch.Generator().manual_seed(0)
    large, small = int(rows * 0.8), int(rows * 0.2)
    return {
        "tables.large": torch.randn(large, 16, generator=generator),
        "tables.small": torch.randn(small, 16, generator=generator),
        "sums.large": torch.rand(large, 4, generator=generator),
        "sums.small": torch.rand(small, 4, generator=generator),
        **{f"mlp.{layer}": torch.randn(512, 256, generator=generator) for layer in range(4)},
    }


def make_sides(
    folder: Path, tensors: dict[str, torch.Tensor], into: dict[str, torch.Tensor]
) -> dict[str, Callable[[], None]]:
    bare = folder / "bare.safetensors"

    def save_checkpoint() -> None:
        checkpoint.save(folder, 1, tensors, {}, keep=1, shard_bytes=SHARD_BYTES)

    def save_bare() -> None:
        bare.unlink(missing_ok=True)
        save_file(tensors, bare)
        fsync_file(bare)

    def copy_bare() -> None:
        for name, tensor in load_file(bare).items():
            into[name].copy_(tensor)

    path = folder / "step-00000001"
    return {
        "save": save_checkpoint,
        "bare save": save_bare,
        "load": lambda: discard(checkpoint.load(path)),
        "load_into": lambda: discard(checkpoint.load_into(path, into)),
        "load_into unverified": lambda: discard(checkpoint.load_into(path, into, verify=False)),
        "bare load": copy_bare,
    }


def check(
    sides: dict[str, Callable[[], None]], tensors: dict[str, torch.Tensor], into: dict[str, torch.Tensor]
) -> None:
    """Run every side once, and see that those that load into `into` bring back what was saved."""
    for side, run in sides.items():
        for tensor in into.values():
            tensor.zero_()
        run()
        if "load_into" in side or side == "bare load":
            assert all(torch.equal(into[name], tensors[name]) for name in tensors), side


def in_the_background(num_processes: int, gib: float, repeats: int) -> dict[str, Any]:
    """What rank 0 of some processes measures: saving in the foreground and in the background, in turn."""
    with tempfile.TemporaryDirectory() as scratch:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        multiprocessing.spawn(_save_and_step, (num_processes, port, scratch, gib, repeats), nprocs=num_processes)
        found = json.loads((Path(scratch) / "found.json").read_text(encoding="utf-8"))
    medians = {name: summary(values) for name, values in found.items()}
    alone, beside = medians["step"]["p50"], medians["step_beside"]["p50"]
    slower = beside / alone - 1
    blocked, complete = medians["blocked"], medians["complete"]
    lost = blocked["p50"] + (complete["p50"] - blocked["p50"]) * (1 - alone / beside)
    return {
        "processes": num_processes,
        "foreground_s": medians["foreground"]["p50"],
        "blocked_s": blocked["p50"],
        "blocked_p20_s": blocked["p20"],
        "blocked_p80_s": blocked["p80"],
        "first_blocked_s": found["first"][0],
        "complete_s": complete["p50"],
        "steps_slower": slower,
        "lost_s": lost,
        "lost_of_a_minute": lost / 60,
    }


def _save_and_step(rank: int, num_processes: int, port: int, scratch: str, gib: float, repeats: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    tensors = make_state(gib)
    weight = torch.randn(512, 512)
    found: dict[str, list[float]] = {name: [] for name in ("foreground", "blocked", "complete", "step", "step_beside")}
    with process_group(torch.device("cpu")) as processes, checkpoint.BackgroundSaver(processes) as saver:
        folder = Path(scratch) / "checkpoints"

        def save(save_it: Callable[..., Path]) -> float:
            processes.gather(None)  # all begin together
            start = time.perf_counter()
            save_it(folder, 1, tensors, {}, keep=1, shard_bytes=SHARD_BYTES)
            return time.perf_counter() - start

        first = save(saver.save)
        saver.wait()
        for _ in range(repeats):
            for _ in range(50):
                found["step"].append(step(weight))
            found["foreground"].append(save(lambda *a, **k: checkpoint.save(*a, **k, processes=processes)))
            start = time.perf_counter()
            found["blocked"].append(save(saver.save))
            while saver.is_busy:
                found["step_beside"].append(step(weight))
            found["complete"].append(time.perf_counter() - start)
            saver.wait()
        if rank == 0:
            loaded, _ = checkpoint.load(folder / "step-00000001")
            assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
            (Path(scratch) / "found.json").write_text(json.dumps({**found, "first": [first]}), encoding="utf-8")


def step(weight: torch.Tensor) -> float:
    start = time.perf_counter()
    for _ in range(4):
        weight @ weight
    return time.perf_counter() - start


def discard(_: object) -> None:
    """Drop a result, so that every side returns None."""


def peak_anonymous_bytes(run: Callable[[], None]) -> int:
    """How much the memory of this process that no file backs grows while `run` runs, sampled every millisecond."""
    start = peak = anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return peak - start


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
