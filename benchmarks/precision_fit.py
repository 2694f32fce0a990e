"""How long it takes to store a large trained table by the popularity of its rows, and how much memory.

    python -m benchmarks.precision_fit [--rows 10000000] [--dim 64] [--budget 1/100] [--card precision_fit]

The rows are in a file that is mapped into memory: a few hundred centres and noise, lookups falling as 1/rank. The floor
is one read of the file. The memory is what the process has of its own (`RssAnon`), not the pages of the file.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.card import print_table, write_card
from holdall.tables.fitting import block_slices
from holdall.tables.precision import PrecisionFit


def make_rows(path: Path, num_rows: int, dim: int) -> torch.Tensor:
    """Rows on disk, as a mapped tensor."""
    rows = torch.from_file(str(path), shared=True, size=num_rows * dim, dtype=torch.float32).view(num_rows, dim)
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(300, dim, generator=draw)
    for place in block_slices(num_rows, dim):
        count = place.stop - place.start
        noise = torch.randn(count, dim, generator=draw).mul_(0.3)
        rows[place] = noise.add_(centres[torch.randint(300, (count,), generator=draw)]).mul_(0.05)
    return rows


def own_memory() -> int:
    """Bytes of this process that are not pages of files."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon: this benchmark needs Linux")


class PeakMemory:
    """The most memory of this process while the block runs, above what it had before."""

    def __enter__(self) -> PeakMemory:
        self.before = self.peak = own_memory()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.peak = max(self.peak, own_memory())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def added(self) -> int:
        return self.peak - self.before


def timed(task: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    found = task()
    return found, time.perf_counter() - start


def run(num_rows: int, dim: int, budget: str) -> dict[str, Any]:
    counts = (num_rows / torch.arange(1, num_rows + 1, dtype=torch.float64)).long()
    with tempfile.TemporaryDirectory() as folder:
        rows = make_rows(Path(folder) / "rows", num_rows, dim)
        floor = timed(lambda: sum(float(rows[place].sum()) for place in block_slices(num_rows, dim)))[1]
        with PeakMemory() as memory:
            fit, measuring = timed(lambda: PrecisionFit({"table": rows}, {"table": counts}))
            choice, choosing = timed(lambda: fit.choose(budget))
            tables, fitting = timed(lambda: fit.fit(choice))
        table = tables["table"]
    bands = [(band.end - band.start, str(band.method)) for band in table.bands]
    return {
        "rows": num_rows,
        "dim": dim,
        "budget": budget,
        "dense_bytes": num_rows * dim * 4,
        "bytes": choice.num_bytes,
        "bands": bands,
        "one_read_seconds": floor,
        "measure_seconds": measuring,
        "choose_seconds": choosing,
        "fit_seconds": fitting,
        "seconds": measuring + choosing + fitting,
        "peak_memory_bytes": memory.added,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--budget", default="1/100")
    parser.add_argument("--card", help="name of the card to write")
    arguments = parser.parse_args()
    results = run(arguments.rows, arguments.dim, arguments.budget)
    print_table("Fit by popularity", [{key: value for key, value in results.items() if key != "bands"}])
    if arguments.card:
        write_card(arguments.card, results)


if __name__ == "__main__":
    main()
