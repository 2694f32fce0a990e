"""Checkpoint throughput: saving and loading a state of tables, against bare safetensors without manifest and hashes.

python -m benchmarks.checkpoint [--gib 1.0] [--repeats 5]
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.card import alternate, print_table, summary, write_card
from holdall.files import fsync_file
from holdall.training import checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--repeats", type=int, default=5)
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
    results: dict[str, Any] = {"bytes": size, "tensors": len(tensors), "repeats": options.repeats, "rows": rows}
    write_card(
        "checkpoint",
        results,
        notes="bare: one safetensors file, no manifest, no hashes. Loading reads from the page cache; saving includes "
        "fsync. extra_mb: anonymous memory on top of the state (load returns a new copy of it, the others none).",
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
    shard_bytes = 256 << 20  # several shards at 1 GiB, so that hashing one overlaps writing the next

    def save_checkpoint() -> None:
        checkpoint.save(folder, 1, tensors, {}, keep=1, shard_bytes=shard_bytes)

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
