"""What it costs to compare the files of a data set with their hashes: the first time, the second, and in an epoch.

    python -m benchmarks.checked_files --rows 4000000

The set is Criteo-Kaggle-shaped (13 dense values, 26 ids, 161 bytes a row). Files are hashed from the page cache and
from the disk, beside a plain read of the same files. Then runs of one epoch alternate: with files that this machine
remembers, and with files that it does not, hashed before the first step or in the background. All must have the same
losses.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.card import alternate, print_table, summary, write_card
from holdall.common.checked_files import REMEMBER, SETTLED_NS
from holdall.data.dataset import DataSet
from holdall.data.synthetic import preset, write_prepared
from holdall.training import data_check
from holdall.training.config import TrainConfig
from holdall.training.tracking import read_metrics
from holdall.training.train import train

TARGET = 0.02  # of an epoch
BUFFER = 1 << 20


def drop_from_cache(files: Iterable[Path]) -> None:
    """Ask the system to forget the pages of files, so that the next read comes from the disk."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(files: Iterable[Path]) -> None:
    buffer = bytearray(BUFFER)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def timed(task: Callable[[], Any], before: Callable[[], None] = lambda: None, repeats: int = 1) -> dict[str, float]:
    seconds = []
    for _ in range(repeats):
        before()
        start = time.perf_counter()
        task()
        seconds.append(time.perf_counter() - start)
    return summary(seconds)


def measure_hashing(folder: Path, repeats: int) -> dict[str, Any]:
    """Seconds of checking the training split, by what is known of its files."""
    split = DataSet(folder, check=False)
    files = [folder / file.name for file in split.files]

    def check(remember: bool) -> None:
        split.check_files(remember=remember).result()

    forget = partial(drop_from_cache, files)
    check(remember=True)  # now they are remembered
    return {
        "bytes": sum(path.stat().st_size for path in files),
        "hash_first_time_s": timed(lambda: check(remember=False), repeats=repeats),
        "hash_second_time_s": timed(lambda: check(remember=True), repeats=repeats),
        "hash_from_disk_s": timed(lambda: check(remember=False), forget, repeats),
        "read_from_disk_s": timed(lambda: read_plainly(files), forget, repeats),
    }


def measure_epochs(folder: Path, out: Path, config: TrainConfig, repeats: int) -> dict[str, Any]:
    """Seconds of an epoch by how its files are checked, which must not change what is trained."""
    losses, numbers = set(), itertools.count()

    def epoch(remember: bool, bytes_at_start: int) -> None:
        os.environ[REMEMBER] = "1" if remember else "0"
        data_check.BYTES_AT_START = bytes_at_start
        run = out / str(next(numbers))
        train(folder, run, config, quiet=True)
        losses.add(json.dumps([row["loss"] for row in read_metrics(run)]))

    sides = {
        "remembered": partial(epoch, True, 1 << 62),
        "hashed before the first step": partial(epoch, False, 1 << 62),
        "hashed in the background": partial(epoch, False, 0),
    }
    times = alternate(sides, repeats)
    assert len(losses) == 1, "the check changed what was trained"
    return {side: summary(seconds) for side, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = str(Path(scratch) / "cache")
        folder = Path(scratch) / "data"
        write_prepared(preset("criteo-kaggle", scale=0.01, rows=arguments.rows), folder, valid=0.0, test=0.0)
        time.sleep(SETTLED_NS / 1e9 + 0.5)  # files of this moment are not remembered
        hashing = measure_hashing(folder, arguments.repeats)
        config = TrainConfig.of(batch_size=arguments.batch_size, epochs=1)
        epochs = measure_epochs(folder, Path(scratch) / "runs", config, arguments.repeats)
    first, epoch = hashing["hash_first_time_s"]["p50"], epochs["remembered"]["p50"]
    print_table("seconds of checking the files", [{"what": k, **v} for k, v in hashing.items() if k != "bytes"])
    print_table("seconds of an epoch, files", [{"checked": side, **seconds} for side, seconds in epochs.items()])
    rate = hashing["bytes"] / first / 1e9
    print(f"{hashing['bytes'] / 1e6:,.0f} MB at {rate:.2f} GB/s: {first / epoch:.2%} of an epoch (target {TARGET:.0%})")
    write_card(
        "checked_files",
        {
            "rows": arguments.rows,
            **hashing,
            "hash_gb_per_s": rate,
            "epoch_s": epochs,
            "share_of_epoch": first / epoch,
            "added_share_at_start": epochs["hashed before the first step"]["p50"] / epoch - 1,
            "added_share_in_background": epochs["hashed in the background"]["p50"] / epoch - 1,
            "target_share": TARGET,
            "load_average": os.getloadavg()[0],
        },
        notes="SHA-256 of the files of a training split, several at a time. first time: from the page cache, nothing "
        "remembered; second time: remembered by size, times and inode; from disk: after posix_fadvise(DONTNEED). "
        "share_of_epoch: first time over an epoch of training on this machine's device with remembered files. added "
        "shares: medians of whole epochs, which alternate; all end with the same losses.",
    )


if __name__ == "__main__":
    main()
