"""Python calls of one training step on a CPU: how many, in how many files, and how often the package changes.

    python -m benchmarks.step_calls [--list]

A call is one of a function of this package, resumptions of generators included; a package is a folder of
`src/holdall`. The fewer of each, the easier a step is to follow and the less the interpreter adds to it. `--list`
prints the calls in their order. Before the packages were put in layers (026acf4), a step of `plain` made 131 calls in
25 files with 42 changes of package, one of `split` 234 in 33 with 74. The card also counts the lines of source.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import holdall
from benchmarks.card import print_table, write_card
from holdall.data.synthetic import SyntheticConfig, write_prepared
from holdall.training.trainer import Trainer

SOURCE = Path(holdall.__file__).parent
SETTINGS = {"dim": 4, "bottom": (8,), "top": (8,), "batch_size": 64, "steps": 12, "log_every": 1000}
STRATEGIES: dict[str, dict[str, Any]] = {"plain": {}, "split": {"strategy": "split", "hot_bytes": "2KB"}}
STEP = 8
"""The step that is counted: late enough that nothing is done for the first time."""
Call = tuple[str, str]
"""File within the package, function."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the calls of each step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write_prepared(SyntheticConfig(rows=4000, cardinalities=(50, 7, 400), num_dense=3), data)
        for name, settings in STRATEGIES.items():
            config = holdall.TrainConfig.of(**SETTINGS, **settings)
            calls = calls_of_a_step(Trainer(data, Path(folder) / name, config, quiet=True))
            rows.append({"strategy": name, **counts(calls)})
            if arguments.list:
                print("\n".join(f"{file}: {function}" for file, function in calls))
    print_table("calls of a step", rows)
    write_card("step_calls", {"steps": rows, "source": source_lines()})


def calls_of_a_step(trainer: Trainer) -> list[Call]:
    """The calls between the ends of two steps of a run."""
    calls: list[Call] = []
    ends: list[int] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(SOURCE)):
            if code.co_name == "_after_step":
                ends.append(len(calls))
            calls.append((str(Path(code.co_filename).relative_to(SOURCE)), code.co_name))

    profiled(note, trainer.run)
    return calls[ends[STEP - 1] : ends[STEP]]


def profiled(note: Callable[[FrameType, str, Any], None], run: Callable[[], Any]) -> None:
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)


def counts(calls: list[Call]) -> dict[str, int]:
    packages = [file.split("/")[0] for file, _ in calls]
    return {
        "calls": len(calls),
        "files": len({file for file, _ in calls}),
        "changes of package": sum(before != after for before, after in pairwise(packages)),
    }


def source_lines() -> dict[str, int]:
    files = list(SOURCE.rglob("*.py"))
    return {"files": len(files), "lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)}


if __name__ == "__main__":
    main()
