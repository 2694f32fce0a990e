"""Life of a server: loading, readiness, swaps, token, log of requests, metrics, and its end."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np
import pytest

from holdall.cli import main
from holdall.common.errors import ConfigError, DataError
from holdall.serving.publish import publish
from holdall.serving.scorer import Scorer, load
from holdall.serving.server.connection import Request
from holdall.serving.server.front import Front
from holdall.serving.server.request_log import RequestLog
from holdall.serving.server.run import Server
from holdall.serving.server.served import Served
from holdall.serving.server.settings import ServerConfig, read_token
from holdall.serving.server.source import FixedSource, PublishedSource
from tests.serving.server.running import Client, made_bundle, running
from tests.serving.server.test_connection import post, statuses

TOKEN = "0123456789abcdef"


class Handed:
    """Source that gives what a test puts in."""

    def __init__(self, *scorers: Scorer | Exception):
        self.scorers = list(scorers)

    def poll(self) -> Scorer | None:
        if not self.scorers:
            return None
        first = self.scorers.pop(0)
        if isinstance(first, Exception):
            raise first
        return first


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for(client: Client, line: str) -> str:
    """The metrics, once they have this line."""
    deadline = time.monotonic() + 30
    while line not in (text := client.ask("GET", "/metrics")[2].decode()):
        assert time.monotonic() < deadline, text
        time.sleep(0.01)
    return text


class Blocked:
    """Source whose scorer is not loaded before it is let go."""

    def __init__(self, path: Path):
        self.source, self.go = FixedSource(path), threading.Event()

    def poll(self) -> Scorer | None:
        assert self.go.wait(30)
        return self.source.poll()


def test_a_server_answers_503_until_its_model_is_ready(bundle: Path, row: dict[str, Any]) -> None:
    source = Blocked(bundle)
    server = Server(source, ServerConfig(port=0, max_wait=60.0))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    client = Client(server)
    assert client.json("GET", "/v2/health/live")[0] == 200
    for path in ("/v2/health/ready", "/v2/models/model/ready", "/schema", "/openapi.json"):
        assert client.json("GET", path)[0] == 503
    status, headers, _ = client.ask("POST", "/score", {"rows": [row]})
    assert (status, headers["retry-after"]) == (503, "1")
    assert "holdall_ready 0.0" in client.ask("GET", "/metrics")[2].decode()
    source.go.set()
    assert server.ready.wait(30)
    assert client.json("GET", "/v2/health/ready")[0] == 200
    assert client.json("POST", "/score", {"rows": [row]})[0] == 200
    client.http.close()
    server.stop()
    thread.join(30)
    assert not thread.is_alive()


def test_a_bundle_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither a bundle, a published folder nor a run"):
        Server(FixedSource(tmp_path), ServerConfig(port=0)).run()


def test_a_port_in_use_is_named(bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: choose a free --port"):
            Server(FixedSource(bundle), ServerConfig(port=port)).run()


def test_a_newer_model_is_swapped_in_and_a_broken_one_is_not(data: Path, bundle: Path, tmp_path: Path) -> None:
    newer = made_bundle(data, tmp_path / "newer", step=8)
    source = Handed(load(bundle))
    with running(source, poll_seconds=0.01) as server:
        client = Client(server)
        _, schema = client.json("GET", "/schema")
        before = client.json("POST", "/score", schema["example"])[1]
        source.scorers.append(DataError("damaged"))
        wait_for(client, 'holdall_swaps_total{outcome="refused"} 1.0')
        assert client.json("POST", "/score", schema["example"])[1] == before
        source.scorers.append(load(newer))
        text = wait_for(client, 'holdall_swaps_total{outcome="taken"} 1.0')
        assert "holdall_bundle_step 8.0" in text
        after = client.json("POST", "/score", schema["example"])[1]
        assert np.float32(after["scores"]) == load(newer).score(schema["example"]["rows"])
        assert after != before
        client.http.close()


def test_metrics_that_count_a_swap_are_those_of_its_model(data: Path, bundle: Path, tmp_path: Path) -> None:
    newer = load(made_bundle(data, tmp_path / "newer", step=8))
    found = []
    with running(bundle) as server:
        for swaps_meanwhile in (True, False):
            values = {}
            for family in server.front.metrics.collect():
                values |= {(family.name, *sample.labels.values()): sample.value for sample in family.samples}
                if swaps_meanwhile and family.name == "holdall_unseen_ids":
                    server._swap_soon(newer)
            found.append((values["holdall_swaps", "taken"], values["holdall_bundle_step",]))
    assert found == [(0, 7), (1, 8)]


def test_swaps_under_load_fail_no_request(data: Path, bundle: Path, tmp_path: Path) -> None:
    """Every answer has the scores of one of the two models, and names it."""
    newer = made_bundle(data, tmp_path / "newer", step=8)
    scorers = [load(bundle), load(newer)]
    source = Handed(load(bundle))
    with running(source, poll_seconds=0.005) as server:
        _, schema = Client(server).json("GET", "/schema")
        expected = {one.fingerprint[:16]: float(one.score(schema["example"]["rows"])[0]) for one in scorers}
        assert len(set(expected.values())) == 2
        seen: set[str] = set()

        def ask() -> None:
            client = Client(server)
            for _ in range(150):
                status, headers, body = client.ask("POST", "/score", schema["example"])
                assert status == 200
                assert json.loads(body)["scores"][0] == pytest.approx(expected[headers["holdall-bundle"]], rel=1e-6)
                seen.add(headers["holdall-bundle"])
            client.http.close()

        failures: list[BaseException] = []

        def watched() -> None:
            try:
                ask()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=watched) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            source.scorers += [load(newer), load(bundle)]
            time.sleep(0.02)
        assert not failures
        assert seen == set(expected)


def test_a_published_folder_is_followed(data: Path, bundle: Path, tmp_path: Path) -> None:
    from holdall.serving.server.source import source_of

    folder = tmp_path / "published"
    publish(bundle, folder)
    with running(source_of(folder), poll_seconds=0.01) as server:
        client = Client(server)
        assert "holdall_bundle_step 7.0" in client.ask("GET", "/metrics")[2].decode()
        publish(made_bundle(data, tmp_path / "newer", step=8), folder)
        wait_for(client, "holdall_bundle_step 8.0")
        publish(None, folder, back=True)
        wait_for(client, "holdall_bundle_step 7.0")
        (folder / "current.json").write_text("{}")
        wait_for(client, 'holdall_swaps_total{outcome="refused"}')
        assert client.json("GET", "/v2/health/ready")[0] == 200
        client.http.close()


def test_a_model_that_arrives_late_is_tried_again(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("holdall.serving.server.source.time", SimpleNamespace(monotonic=lambda: now[0]))
    name = publish(bundle, tmp_path / "served").target.bundle
    tables, later = tmp_path / "served" / name / "tables.safetensors", tmp_path / "later"
    tables.rename(later)
    source = PublishedSource(tmp_path / "served")
    for seconds in (0, 11, 21):
        now[0] += seconds
        with pytest.raises(DataError, match=r"tables\.safetensors is missing"):
            source.poll()
        assert source.poll() is None
    later.rename(tables)
    assert source.poll() is None
    now[0] += 41
    assert source.poll() is not None
    now[0] += 1e6
    assert source.poll() is None


def test_a_token_guards_all_but_health(bundle: Path, row: dict[str, Any]) -> None:
    with running(bundle, token=TOKEN) as server:
        for given in (None, "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xff"):
            client = Client(server)
            headers = {} if given is None else {"authorization": given}
            for path in ("/schema", "/metrics", "/openapi.json", "/v2/models/model"):
                assert client.json("GET", path, headers=headers)[0] == 401
            assert client.json("POST", "/score", {"rows": [row]}, headers)[0] == 401
            client.http.close()
        client = Client(server)
        headers = {"authorization": f"bearer {TOKEN}"}
        assert client.json("POST", "/score", {"rows": [row]}, headers)[0] == 200
        assert client.json("GET", "/schema", headers=headers)[0] == 200
        assert client.json("GET", "/v2/health/ready")[0] == 200
        client.http.close()


def test_tokens_come_from_a_file_or_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDALL_TOKEN", raising=False)
    assert read_token(None) is None
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert read_token(tmp_path / "token") == TOKEN
    monkeypatch.setenv("HOLDALL_TOKEN", "short")
    with pytest.raises(ConfigError, match="HOLDALL_TOKEN has no usable token: 16 or more"):
        read_token(None)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "absent")


def test_the_request_log_can_be_scored_again(bundle: Path, scorer: Scorer, row: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with running(bundle, request_log=path) as server:
        client = Client(server)
        client.ask("POST", "/score", {"rows": [row, row | {"C1": 5, "I1": None}]})
        user = {name: row[name] for name in row if name != "C3"}
        client.ask("POST", "/rank", {"user": user, "items": [{"C3": "00000001"}, {"C3": None}]})
        client.ask("POST", "/score", {"rows": [{}]})
        client.http.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [len(line["rows"]) for line in lines] == [2, 2]  # a request that was refused is not logged
    for line in lines:
        assert line["fingerprint"] == scorer.fingerprint
        np.testing.assert_allclose(np.float32(line["scores"]), scorer.score(line["rows"]), rtol=1e-6)
    assert path.stat().st_mode & 0o077 == 0


def test_a_request_log_on_a_full_disk_loses_whole_lines_only(
    bundle: Path, row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "requests.jsonl", os.write

    def write_half(handle: int, data: memoryview) -> int:
        if len(data) < 30:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data[: len(data) // 2])

    with running(bundle, request_log=path) as server:
        client = Client(server)
        assert client.ask("POST", "/score", {"rows": [row]})[0] == 200
        log = server.request_log
        assert log is not None
        wait_until(lambda: path.stat().st_size > 0)
        with monkeypatch.context() as patch:
            patch.setattr("holdall.serving.server.request_log.os.write", write_half)
            assert client.ask("POST", "/score", {"rows": [row] * 2})[0] == 200
            wait_until(lambda: log.num_dropped > 0)
        assert client.ask("POST", "/score", {"rows": [row] * 3})[0] == 200
        client.http.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [len(line["rows"]) for line in lines] == [1, 3]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_request_log_that_is_full_ends(bundle: Path, scorer: Scorer, row: dict[str, Any]) -> None:
    log = RequestLog(Path("/dev/full"))
    served = Served(scorer, ServerConfig(max_rows=10))
    log.put(served, [tuple(row.values())], scorer.score([row]))
    log.close()
    assert log.num_dropped == 1


def test_rows_that_wait_to_be_logged_are_bounded(
    bundle: Path, row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdall.serving.server.request_log.MAX_WAITING_ROWS", 3)
    with running(bundle, request_log=tmp_path / "requests.jsonl") as server:
        client = Client(server)
        assert client.ask("POST", "/score", {"rows": [row] * 4})[0] == 200
        wait_for(client, "holdall_request_log_dropped_total 1.0")
        client.http.close()


def test_metrics_count_what_happened(bundle: Path, row: dict[str, Any]) -> None:
    with running(bundle) as server:
        client = Client(server)
        client.ask("POST", "/score", {"rows": [row | {"C1": "never seen"}] * 3})
        client.ask("POST", "/score", {"rows": [{}]})
        client.ask("POST", "/v2/models/model/infer", b"{")
        text = client.ask("GET", "/metrics")[2].decode()
        client.http.close()
    for line in (
        'holdall_requests_total{outcome="ok",route="score"} 1.0',
        'holdall_requests_total{outcome="bad_rows",route="score"} 1.0',
        'holdall_requests_total{outcome="bad_request",route="infer"} 1.0',
        'holdall_rows_total{route="score"} 3.0',
        'holdall_unseen_ids_total{feature="C1"} 3.0',
        'holdall_unseen_ids_total{feature="C2"} 0.0',
        "holdall_queue_seconds_count 1.0",
        "holdall_compute_seconds_count 1.0",
        'holdall_batch_rows_bucket{le="4"} 1.0',
        "holdall_bundle_step 7.0",
        "holdall_queue_rows 0.0",
    ):
        assert f"\n{line}\n" in text
    age = float(text.split("\nholdall_bundle_age_seconds ")[1].split("\n")[0])
    assert 0 <= age < 3600


class Slow:
    """Scorer that scores only when it is let go."""

    def __init__(self, scorer: Scorer):
        self.scorer, self.begun, self.go = scorer, threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scorer, name)

    def score(self, rows: Any) -> Any:
        self.begun.set()
        assert self.go.wait(30)
        return self.scorer.score(rows)


def test_a_full_queue_answers_429_and_a_shutdown_answers_what_was_taken(bundle: Path, row: dict[str, Any]) -> None:
    slow = Slow(load(bundle))
    body = json.dumps({"rows": [row] * 4}).encode()
    with running(Handed(slow), queue_rows=8, max_rows=8, max_wait=30.0) as server:  # type: ignore[arg-type]
        place = urlsplit(server.address)
        first = [socket.create_connection((place.hostname or "", place.port or 0), timeout=30) for _ in range(2)]
        for connection in first:
            connection.sendall(post(body))
        assert slow.begun.wait(30)
        while server.front.queue.num_rows < 8:
            time.sleep(0.01)
        status, headers, content = Client(server).ask("POST", "/score", {"rows": [row]})
        assert (status, headers["retry-after"]) == (429, "1")
        assert "8 rows wait" in json.loads(content)["error"]
        server.stop()
        while server.servers[0].is_serving():
            time.sleep(0.01)
        with pytest.raises(OSError, match="refused"):
            Client(server).ask("GET", "/v2/health/live")
        slow.go.set()
        for connection in first:
            found = b""
            while part := connection.recv(1 << 16):
                found += part
            assert statuses(found) == [200]
            assert b"connection: close" in found


def test_a_server_that_is_late_answers_429() -> None:
    front = Front(ServerConfig(max_wait=0.5))
    front.served = cast(Any, "a model")
    request = Request(cast(Any, None), "POST", b"/score", {b"content-length": b"7"})
    assert front.early(request) is None
    front.lag = 0.6
    refusal = front.early(request)
    assert refusal is not None
    assert (refusal.status, refusal.headers) == (429, ((b"retry-after", b"1"),))
    assert front.early(Request(cast(Any, None), "GET", b"/metrics")) is None


def test_an_error_of_the_server_shows_neither_path_nor_trace(bundle: Path, row: dict[str, Any]) -> None:
    scorer = load(bundle)

    class Broken(Slow):
        def score(self, rows: Any) -> Any:
            raise RuntimeError(f"no such file: {bundle}")

    with running(Handed(Broken(scorer))) as server:  # type: ignore[arg-type]
        client = Client(server)
        status, headers, body = client.ask("POST", "/score", {"rows": [row]})
        assert status == 500
        for text in (str(bundle), "Traceback", "RuntimeError"):
            assert text not in body.decode() + str(headers)
        assert client.json("GET", "/v2/health/live")[0] == 200
        client.http.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_until_it_is_told_to_end(bundle: Path, number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "holdall", "serve", str(bundle), "--port", str(port), "--name", "m"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"HOLDALL_TOKEN": TOKEN}
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert f"step 7, on http://127.0.0.1:{port}" in line
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


def test_wrong_options_are_refused(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in (
        (["--max-rows", "0"], "--max-rows is 0: it must be 1 or more"),
        (["--port", "70000"], "--port is 70000"),
        (["--queue-rows", "10"], "could never be taken"),
        (["--max-wait", "0"], "--max-wait is 0.0"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["serve", str(bundle), *words])
        assert ended.value.code == 2
        assert sentence in capsys.readouterr().err
