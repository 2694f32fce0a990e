"""Bundle with tables of 60 GB, opened and scored by a process that may take 4 GB of memory.

    python -m benchmarks.large_bundle            # three minutes; Linux, as root, with 10 GB free on disk

A DLRM of 26 tables whose rows take 4 KB, a page each. Of every 8 MB of the file of tables the first MB has random
numbers, 7.5 GB in all; the rest is a hole, which takes no disk and which no request reads. Requests are 64 raw rows
(dicts) whose values are drawn from all over the file, each as likely as any other: the worst case, since every lookup
is another page of the disk. The process that scores is in a cgroup of its own, in which pages of files count, too, and
the files are dropped from the page cache before it starts. Two processes open the bundle in turn: the first compares 60
GB with their hash, the second knows that they passed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from benchmarks.card import OtherWork, print_table, write_card
from holdall.common.errors import ConfigError
from holdall.data.id_map import IdMap, id_map_path
from holdall.data.schema import Schema
from holdall.data.synthetic import SyntheticConfig, write_prepared
from holdall.models import DLRMConfig
from holdall.serving import bundle as bundles
from holdall.serving import mapped_tensors
from holdall.serving.bundle_model import weight_name

NUM_TABLES, NUM_DENSE, DIM = 26, 13, 1024
ROW_BYTES = 4 * DIM
EXTENT_ROWS = 256
"""Rows of random numbers that follow one another: 1 MB."""
HOLE = 8
"""One extent in so many has numbers, the others are holes."""
REQUEST_ROWS = 64
READY_TARGET = 1.0
"""Seconds from imports to ready."""
CONFIG = DLRMConfig(dim=DIM, bottom=(512, 256), top=(512, 256))

V1 = Path("/sys/fs/cgroup/memory")
CGROUP = (V1 if V1.exists() else Path("/sys/fs/cgroup")) / "holdall-large-bundle"
LIMIT, PEAK = ("limit_in_bytes", "max_usage_in_bytes") if V1.exists() else ("max", "peak")

# Runs in the cgroup.
CHILD = """
import json, resource, sys, time
start = time.perf_counter()
import holdall.serving.scorer
imported = time.perf_counter()
scorer = holdall.serving.scorer.load(sys.argv[1])
scorer.warm_up()
ready = time.perf_counter()

def proc(name, *keys):
    lines = (line.split() for line in open(f"/proc/self/{name}"))
    return {line[0].rstrip(":"): int(line[1]) for line in lines if line[0].rstrip(":") in keys}

def score_all(requests):
    before, seconds, scores = proc("io", "read_bytes")["read_bytes"], [], []
    for rows in requests:
        begun = time.perf_counter()
        scores += scorer.score(rows).tolist()
        seconds.append(time.perf_counter() - begun)
    return {"seconds": seconds, "read_bytes": proc("io", "read_bytes")["read_bytes"] - before, "scores": scores}

requests = [json.loads(line) for line in open(sys.argv[2])]
first = score_all([requests[0][:1]])["seconds"][0]
found = {"cold": score_all(requests), "again": score_all(requests[-20:])}
values = [row["C26"] for row in requests[0]]
print(json.dumps({
    "imports": imported - start, "ready": ready - imported, "first_row": first, **found,
    "vectors": scorer.vectors("C26", values)[:, :4].tolist(), "unseen": sum(scorer.num_unseen.values()),
    **proc("status", "RssAnon", "RssFile"),
}))
"""


def filled_rows(num_rows: int) -> npt.NDArray[np.int64]:
    """Rows of a table that have numbers."""
    rows = np.arange(num_rows)
    return rows[rows // EXTENT_ROWS % HOLE == 0]


def write_sparse(path: Path, tensors: Any, joined: Any = ()) -> None:
    """`write_tensors` for tables on meta: extents of random numbers, and holes between them."""
    blocks = mapped_tensors.row_blocks

    def none_of_meta(tensor: Any) -> Iterator[Any]:
        return iter(()) if tensor.is_meta else blocks(tensor)

    with mock.patch.object(mapped_tensors, "row_blocks", none_of_meta):
        mapped_tensors.write_tensors(path, tensors, joined)
    if not any(tensor.is_meta for tensor in tensors.values()):
        return
    draw = np.random.default_rng(0)
    with path.open("r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(start - 8))
        file.truncate(start + max(entry["data_offsets"][1] for entry in entries.values()))
        for entry in entries.values():
            for row in range(0, entry["shape"][0], EXTENT_ROWS * HOLE):
                count = min(EXTENT_ROWS, entry["shape"][0] - row)
                file.seek(start + entry["data_offsets"][0] + ROW_BYTES * row)
                file.write((draw.random((count, DIM), dtype=np.float32) - 0.5).tobytes())
        os.fsync(file.fileno())


def make(folder: Path, rows: int) -> Path:
    """Data set and bundle."""
    data, out = folder / "data", folder / "bundle"
    write_prepared(SyntheticConfig(rows=2_000, cardinalities=(rows,) * NUM_TABLES, num_dense=NUM_DENSE), data)
    schema = Schema.load(data)
    model = CONFIG.build(schema, dense_device="meta")
    quality = bundles.Quality(table_bytes=model.bags.num_bytes(), dense_bytes=model.bags.num_bytes())
    origin = bundles.Origin(run=None, checkpoint=None, step=None)
    with mock.patch.object(bundles, "write_tensors", write_sparse):
        bundles.write_bundle(out, model, CONFIG, schema, data, origin, quality)
    return out


def write_requests(path: Path, bundle: Path, count: int) -> npt.NDArray[np.int64]:
    """Requests, one a line, with values of filled rows; returns the ids of the first one's last feature."""
    draw = np.random.default_rng(1)
    schema = Schema.load(bundle)
    columns: dict[str, list[Any]] = {}
    for column in schema.dense:
        columns[column.name] = draw.integers(0, 100, count * REQUEST_ROWS).tolist()
    for feature in schema.features:
        ids = draw.choice(filled_rows(feature.num_rows - 1), count * REQUEST_ROWS)
        columns[feature.name] = IdMap.load(id_map_path(bundle, feature.name)).values.take(ids).to_pylist()
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    lines = [json.dumps(rows[start : start + REQUEST_ROWS]) for start in range(0, len(rows), REQUEST_ROWS)]
    path.write_text("\n".join(lines))
    return ids[:REQUEST_ROWS]


def rows_on_disk(bundle: Path, table: str, ids: npt.NDArray[np.int64]) -> list[list[float]]:
    """First numbers of rows, read from their place in the file."""
    with (bundle / bundles.TABLES_FILE).open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        start += json.loads(file.read(start - 8))[weight_name(table)]["data_offsets"][0]
        found = []
        for row in ids.tolist():
            file.seek(start + ROW_BYTES * row)
            found.append(np.frombuffer(file.read(16), np.float32).tolist())
    return found


def drop_from_cache(folder: Path) -> None:
    """Have the system forget the pages of files, so that they are read from the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def limited(command: list[str], limit: int) -> dict[str, Any]:
    """What a process in a cgroup with a limit of memory printed, and the most memory it had, with pages of files."""
    try:
        CGROUP.mkdir(exist_ok=True)
        (CGROUP / f"memory.{LIMIT}").write_text(str(limit))
    except OSError as error:
        raise ConfigError(
            f"no limit of memory can be set ({error}): run this as root, on Linux with cgroups"
        ) from error
    inside = f'echo $$ > {CGROUP}/cgroup.procs; exec "$@"'
    try:
        done = subprocess.run(["bash", "-c", inside, "score", *command], stdout=subprocess.PIPE, text=True, check=True)
        peak = int((CGROUP / f"memory.{PEAK}").read_text())
    finally:
        CGROUP.rmdir()
    return {**json.loads(done.stdout.splitlines()[-1]), "peak": peak}


def summarized(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """A row of the table of results."""
    cold, again = found["cold"], found["again"]
    rows = len(cold["scores"])
    return {
        "process": name,
        "imports_s": found["imports"],
        "ready_s": found["ready"],
        "first_row_ms": 1e3 * found["first_row"],
        "rows": rows,
        "cold_rows_per_s": rows / sum(cold["seconds"]),
        "cold_p50_ms": 1e3 * float(np.percentile(cold["seconds"], 50)),
        "cold_p99_ms": 1e3 * float(np.percentile(cold["seconds"], 99)),
        "read_kb_per_lookup": cold["read_bytes"] / 1e3 / (rows * NUM_TABLES),
        "again_p50_ms": 1e3 * float(np.percentile(again["seconds"], 50)),
        "own_memory_mb": found["RssAnon"] / 1024,
        "mapped_memory_mb": found["RssFile"] / 1024,
        "peak_in_cgroup_mb": found["peak"] / 2**20,
        "other_work": found["other_work"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=564_000, help="of each of the 26 tables, 4 KB a row")
    parser.add_argument("--requests", type=int, default=200, help="of 64 rows each")
    parser.add_argument("--limit", type=int, default=4 << 30, help="bytes of memory")
    parser.add_argument("--folder", type=Path, help="where the bundle is made for the time of the run")
    parser.add_argument("--card", default="large_bundle", help="name of the run card; empty: none is written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        folder = Path(made)
        bundle = make(folder, options.rows)
        ids = write_requests(folder / "requests", bundle, options.requests)
        file = (bundle / bundles.TABLES_FILE).stat()
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        command = [sys.executable, "-c", CHILD, str(bundle), str(folder / "requests")]
        found = {}
        for name in ("first", "second"):
            drop_from_cache(bundle)
            with OtherWork() as others:
                found[name] = limited(command, options.limit)
            found[name]["other_work"] = others.share
            assert found[name]["vectors"] == rows_on_disk(bundle, "C26", ids)
            assert found[name]["unseen"] == 0
        assert found["first"]["cold"]["scores"] == found["second"]["cold"]["scores"]
    results = [summarized(name, one) for name, one in found.items()]
    title = f"{file.st_size / 1e9:.1f} GB of tables in {options.limit / 2**30:.1f} GiB of memory"
    print_table(title, [{"": key, **{one["process"]: one[key] for one in results}} for key in list(results[0])[1:]])
    if options.card:
        card = {
            "table_bytes": file.st_size,
            "bytes_on_disk": 512 * file.st_blocks,
            "limit": options.limit,
            "target_ready_s": READY_TARGET,
            "processes": results,
        }
        write_card(options.card, card, notes=" ".join((__doc__ or "").split("\n\n", 2)[2].split()))


if __name__ == "__main__":
    main()
