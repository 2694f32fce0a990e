"""How long a training step takes to reach served scores, and how many bytes: a delta, and a whole bundle beside it.

    python -m benchmarks.delta --bytes 1GB --share 0.01

A DLRM with tables of so many bytes is trained for one step, released as trained, published, and served. Then it is
trained for one more step, which changes about that share of the rows. The clock starts when the checkpoint of this step
is in the run folder. It covers a process that releases the delta and publishes it, imports included, and the wait until
the server answers `/score` by the new model. The other side goes the same way with a whole bundle. Both must lead to
the same fingerprint, and the score that is served must be that of the bundle.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import holdall
from benchmarks.card import print_table, summary, write_card
from holdall.common.sizes import parse_bytes
from holdall.data.synthetic import SyntheticConfig, write_prepared
from holdall.serving.delta import open_delta

FEATURES = 8
# Runs in the child: the clock covers its imports, too.
CHILD = """
import json, sys, time
run, out, served, how = sys.argv[1:]
from holdall import publish, release
start = time.perf_counter()
options = {"since": served} if how == "delta" else {"as_trained": True}
release(run, out, device="cpu", **options)
released = time.perf_counter()
publish(out, served)
print(json.dumps([released - start, time.perf_counter() - released]))
"""
WAIT_SECONDS = 300.0
SIDES = ("delta", "whole bundle")


def command(*words: str | Path) -> None:
    """A `holdall` command in a process of its own."""
    subprocess.run([sys.executable, "-m", "holdall", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def asked(port: int, path: str, body: bytes | None = None) -> dict[str, Any]:
    """The server's answer."""
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=body, headers=kind)
    with urllib.request.urlopen(request, timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


@contextmanager
def server(folder: Path) -> Iterator[int]:
    """Port of a server of a published folder, once it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "holdall", "serve", str(folder), "--port", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port, lambda found: True)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def wait_for(port: int, is_there: Any) -> dict[str, Any]:
    """The answer of `/schema`, once there is one that `is_there` accepts."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        try:
            found = asked(port, "/schema")
            if is_there(found):
                return found
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(0.05)
    raise RuntimeError(f"the server on port {port} did not answer as expected within {WAIT_SECONDS:.0f} s")


def update(side: str, folder: Path, port: int, step: int) -> dict[str, Any]:
    """Release, publish and serve the step that the run has reached; seconds of each part."""
    out = folder / f"{side}-{step}"
    load = os.getloadavg()[0]
    start = time.perf_counter()
    words = [sys.executable, "-c", CHILD, *map(str, (folder / "run", out, folder / side, side))]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    release, publish = json.loads(done.stdout)
    published = time.perf_counter()
    found = wait_for(port, lambda schema: schema["step"] == step)
    rows = json.dumps(found["example"]).encode()
    score = asked(port, "/score", rows)["scores"][0]
    served = time.perf_counter()
    expected = holdall.load(folder / side).score(found["example"]["rows"])[0]
    assert abs(score - float(expected)) < 1e-6, (score, expected)
    return {
        "import_seconds": published - start - release - publish,
        "release_seconds": release,
        "publish_seconds": publish,
        "served_seconds": served - published,
        "seconds": served - start,
        "bytes": sum(file.stat().st_size for file in out.rglob("*") if file.is_file()),
        "fingerprint": found["fingerprint"],
        "load_before": load,
    }


def measure(folder: Path, num_bytes: int, dim: int, share: float, repeats: int) -> dict[str, Any]:
    num_rows = num_bytes // (4 * dim) // FEATURES
    batch_size = max(1, round(share * num_rows))  # ids are uniform, so hardly any row is looked up twice
    config = SyntheticConfig(
        rows=2 * (repeats + 2) * batch_size, cardinalities=(num_rows,) * FEATURES, num_dense=13, zipf=0.0
    )
    write_prepared(config, folder / "data")

    def train(step: int) -> None:
        settings = holdall.TrainConfig.of(dim=dim, batch_size=batch_size, steps=step, save_every=1, device="cpu")
        holdall.train(folder / "data", folder / "run", settings, resume=step > 1)

    train(1)
    command("release", folder / "run", "--as-trained", "--out", folder / "first", "--device", "cpu")
    for side in SIDES:
        command("publish", folder / "first", "--to", folder / side)
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    changed = []
    with server(folder / SIDES[0]) as first, server(folder / SIDES[1]) as second:
        ports = dict(zip(SIDES, (first, second), strict=True))
        for repeat in range(repeats):
            train(repeat + 2)
            for side in SIDES if repeat % 2 == 0 else reversed(SIDES):
                runs[side].append(update(side, folder, ports[side], repeat + 2))
            assert runs["delta"][-1]["fingerprint"] == runs["whole bundle"][-1]["fingerprint"]
            rows = open_delta(folder / f"delta-{repeat + 2}").num_changed().values()
            changed.append(sum(num_rows if count is None else count for count in rows) / (num_rows * FEATURES))
    return {
        "table_bytes": 4 * dim * (num_rows + 1) * FEATURES,
        "dim": dim,
        "rows": (num_rows + 1) * FEATURES,
        "changed_share": changed,
        **{
            side: {
                **{name: summary([run[name] for run in found]) for name in found[0] if name.endswith("seconds")},
                "bytes": max(run["bytes"] for run in found),
                "load_before": [run["load_before"] for run in found],
            }
            for side, found in runs.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=parse_bytes, default="1GB", help="bytes of all tables")
    parser.add_argument("--dim", type=int, default=64, help="numbers of a row")
    parser.add_argument("--share", type=float, default=0.01, help="share of the rows that a step changes")
    parser.add_argument("--repeats", type=int, default=3, help="steps that are served")
    parser.add_argument("--folder", type=Path, help="where to put the files (default: the temporary folder)")
    parser.add_argument("--no-card", action="store_true", help="print only")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        results = measure(Path(folder), arguments.bytes, arguments.dim, arguments.share, arguments.repeats)
    parts = ("import_seconds", "release_seconds", "publish_seconds", "served_seconds", "seconds")
    rows = [
        {"side": side, "bytes": results[side]["bytes"], **{part: results[side][part]["p50"] for part in parts}}
        for side in SIDES
    ]
    print_table(f"from a step to served scores, {results['table_bytes']:,} bytes of tables", rows)
    if not arguments.no_card:
        notes = "Seconds include the start of a process and its imports, and the server's poll of the folder."
        print(write_card("delta", results, notes))


if __name__ == "__main__":
    main()
