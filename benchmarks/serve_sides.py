"""Servers that `benchmarks.serve` measures, each a process on a core of its own, and the requests that they get."""

from __future__ import annotations

import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from holdall.data.dataset import DataSet
from holdall.data.id_map import load_id_maps
from holdall.data.loader import Loader
from holdall.data.schema import Schema
from holdall.data.synthetic import preset, write_prepared
from holdall.models import DLRMConfig
from holdall.serving.bundle import Origin, Quality, open_bundle, write_bundle
from holdall.serving.delta import apply_deltas, open_delta
from holdall.serving.forms import Forms
from holdall.serving.scorer import Scorer, load
from holdall.serving.write_delta import write_delta
from holdall.training.config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
JSON, ARROW = "application/json", "application/vnd.apache.arrow.stream"


@dataclass(frozen=True)
class Side:
    """One server: the command that starts it, without its port."""

    name: str
    command: tuple[str, ...]
    formats: tuple[str, ...] = (JSON, ARROW)


def ours(name: str, folder: Path, *options: str) -> Side:
    return Side(name, ("-m", "holdall", "serve", str(folder), *options, "--port"))


def plain(name: str, bundle: Path, onnx: Path | None = None) -> Side:
    own = () if onnx is None else (str(onnx),)
    return Side(name, ("-m", "benchmarks.serve_plain", str(bundle), *own), (JSON,))


def onnx_front(name: str, bundle: Path, onnx: Path) -> Side:
    return Side(name, ("-m", "benchmarks.serve_sides", str(bundle), str(onnx)))


@dataclass
class Running:
    """A server that is ready."""

    process: subprocess.Popen[bytes]
    address: tuple[str, int]
    seconds: float
    """From the start of the process to its first answer that it is ready."""

    def memory(self) -> int:
        """Bytes of memory that are the process's own (RssAnon)."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
        raise AssertionError

    def metric(self, name: str) -> float:
        """A number of `/metrics`."""
        lines = self.ask(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").decode().splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + " "))

    def ask(self, request: bytes) -> bytes:
        """Body of the answer to one request."""
        with socket.create_connection(self.address, timeout=30) as connection:
            connection.sendall(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            found = b""
            while part := connection.recv(1 << 18):
                found += part
        head, _, body = found.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), found[:500]
        return body


def on_core(core: int | None) -> Callable[[], None] | None:
    """Function that a new process calls first to stay on one core."""
    return None if core is None else lambda: os.sched_setaffinity(0, {core})


@contextmanager
def running(side: Side, core: int | None) -> Iterator[Running]:
    """A side on a free port and on one core, until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *side.command, str(port)],
        env=environment,
        cwd=ROOT,
        preexec_fn=on_core(core),
    )
    try:
        while not _is_ready(port):
            if process.poll() is not None:
                raise RuntimeError(f"{side.name} ended with {process.returncode}")
            if time.perf_counter() - start > 300:
                raise TimeoutError(f"{side.name} was not ready in 300 s")
            time.sleep(0.005)
        yield Running(process, ("127.0.0.1", port), time.perf_counter() - start)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


# --- bundles and rows --------------------------------------------------------------------------------------------


def make_bundles(folder: Path, scale: float, budget: str) -> dict[str, Path]:
    """A dense DLRM of the shape of Criteo Kaggle, untrained, and a form of it in bands."""
    data = folder / "data"
    write_prepared(preset("criteo-kaggle", scale=scale, rows=100_000), data)
    schema, config = Schema.load(data), DLRMConfig()
    torch.manual_seed(0)
    model = config.build(schema).requires_grad_(False).eval()
    forms = {"dense": model, "banded": Forms(model, TrainConfig.of(), data).fit(budget).model}
    found = {}
    for name, form in forms.items():
        quality = Quality(table_bytes=form.bags.num_bytes(), dense_bytes=model.bags.num_bytes())
        origin = Origin(run=None, checkpoint=None, step=1)
        write_bundle(folder / name, form, config, schema, data, origin, quality)
        found[name] = folder / name
    return found


@torch.no_grad()
def make_deltas(bundle: Path, out: Path, number: int, share: float = 0.01) -> list[Path]:
    """Deltas of a bundle of dense tables, one on the other; each changes a share of the rows of every table."""
    base, found = open_bundle(bundle), []
    for step in range(number):
        model = base.model(mmap=False)
        generator = torch.Generator().manual_seed(step)
        for table in dict.fromkeys(model.bags.table(name) for name in model.bags.features.values()):
            changed = torch.randperm(table.num_rows, generator=generator)[: max(1, int(share * table.num_rows))]
            table.weight[changed] += 1e-3
        origin = Origin(run=None, checkpoint=None, step=2 + step)
        found.append(out / f"delta-{step}")
        write_delta(found[-1], model, DLRMConfig(), base, origin, lambda made: made.record.quality)
        base = apply_deltas(base, [open_delta(found[-1])])
    return found


def draw_rows(data: Path, number: int) -> list[dict[str, Any]]:
    """Raw rows of the test split of a data set folder, so that values are as popular as in the log."""
    schema, maps = Schema.load(data), load_id_maps(data)
    batch = next(iter(Loader(DataSet(data, "test"), number, shuffle="none").epoch(0)))
    columns: dict[str, list[Any]] = {}
    for index, column in enumerate(schema.dense):
        assert column.transform == "log"
        columns[column.name] = np.expm1(batch.dense[:, index].double().numpy()).round().astype(int).tolist()
    for feature, ids in zip(schema.features, batch.ids.values.numpy(), strict=True):
        columns[feature.name] = maps[feature.name].values.take(pa.array(ids)).fill_null("never seen").to_pylist()
    names = list(columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def make_requests(rows: list[dict[str, Any]], num_rows: int, kind: str) -> list[bytes]:
    """Requests of so many rows each, as bytes to send."""
    found = []
    for start in range(0, len(rows) - num_rows + 1, num_rows):
        part = rows[start : start + num_rows]
        if kind == JSON:
            body = json.dumps({"rows": part}, separators=(",", ":")).encode()
        else:
            table = pa.Table.from_pylist(part)
            sink = io.BytesIO()
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
            body = sink.getvalue()
        head = f"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        found.append(head.encode() + body)
    return found


def scores_of(body: bytes, kind: str) -> np.ndarray:
    """Scores of an answer."""
    if kind == JSON:
        return np.float32(json.loads(body)["scores"])
    return pa.ipc.open_stream(body).read_all()["score"].to_numpy()


# --- onnxruntime behind our front --------------------------------------------------------------------------------


class OnnxBehindFront:
    """Scorer that encodes as ours does, and computes with onnxruntime."""

    def __init__(self, scorer: Scorer, onnx: Path):
        from holdall.serving.export.export import open_export

        self.scorer, self.exported = scorer, open_export(onnx, num_threads=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scorer, name)

    def score(self, rows: Any) -> np.ndarray:
        return self.exported.scores(self.scorer.encode(rows))


def main() -> None:
    """`python -m benchmarks.serve_sides BUNDLE ONNX PORT`: our server with onnxruntime in the place of the model."""
    from holdall.serving.server.run import Server
    from holdall.serving.server.settings import ServerConfig

    bundle, onnx, port = sys.argv[1:]
    torch.set_num_threads(1)

    class Once:
        scorer: Any = OnnxBehindFront(load(bundle), Path(onnx))

        def poll(self) -> Any:
            found, self.scorer = self.scorer, None
            return found

    Server(Once(), ServerConfig(port=int(port))).run()


if __name__ == "__main__":
    main()
