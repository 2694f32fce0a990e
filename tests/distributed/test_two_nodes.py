"""Several hosts: two network namespaces train one model, and connection errors have one-sentence messages."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.namespaces import INTERFACE, Host, hosts, unavailable
from holdall.common.errors import ProcessError
from holdall.distributed import addresses
from holdall.distributed.addresses import connection_advice, prepare_addresses
from holdall.training.config import TrainConfig
from holdall.training.tracking import read_metrics
from holdall.training.train import train
from tests.distributed.harness import run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SMALL = TrainConfig.of(dim=4, bottom=(8,), top=(8,), batch_size=512, log_every=2, lr=0.05)
OPTIONS = ["--dim", "4", "--bottom", "8", "--top", "8", "--batch-size", "512", "--log-every", "2", "--lr", "0.05"]


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[list[Host]]:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with hosts(2) as found:
        yield found


def run_on_each(found: Sequence[Host], commands: Sequence[Sequence[str]], timeout: float) -> list[tuple[int, str]]:
    """Exit status and output of one command on each host, at the same time; none is left running."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO_", "MASTER_"))}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    started = [
        subprocess.Popen(
            host.command(words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        for host, words in zip(found, commands, strict=True)
    ]
    try:
        texts = [process.communicate(timeout=timeout)[0] for process in started]
        return [(process.returncode, text) for process, text in zip(started, texts, strict=True)]
    finally:
        for process in started:
            process.terminate()  # torchrun ends its workers
            process.wait(60)


@pytest.mark.slow
def test_two_hosts_train_the_model_of_one(two_hosts: list[Host], data: Path, tmp_path: Path) -> None:
    """By the command of the page, a process each, without an interface: this machine's name may be 127.0.0.1."""
    text = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    (command,) = [block for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL) if "is_host=1" in block]
    commands = []
    for number, host in enumerate(two_hosts):
        here = command.replace("is_host=1", f"is_host={1 - number}").replace("addr 10.0.0.1", f"addr {host.address}")
        here = here.replace("10.0.0.1", two_hosts[0].address)
        here = here.replace("--nproc-per-node 2", "--nproc-per-node 1")
        here = here.replace("/shared/data", str(data)).replace("/shared/run", str(tmp_path / "run"))
        first, *words = shlex.split(here.replace("\\\n", " "))
        assert first == "torchrun"
        commands.append([sys.executable, "-m", "torch.distributed.run", *words, *OPTIONS])
    (first, out), (second, nothing) = run_on_each(two_hosts, commands, timeout=300)
    assert first == 0, out
    assert second == 0, nothing
    assert out.count("trained 7 steps") == 1
    assert "trained" not in nothing, "rank 0 alone speaks"
    train(data, tmp_path / "one", SMALL.replace(strategy="plain"), quiet=True)
    found, expected = read_metrics(tmp_path / "run"), read_metrics(tmp_path / "one")
    assert [(row["step"], row["split"]) for row in found] == [(row["step"], row["split"]) for row in expected]
    for row, other in zip(found, expected, strict=True):
        name = "loss" if row["split"] == "train" else "logloss"
        assert row[name] == pytest.approx(other[name], rel=1e-4)
    for rank in range(2):
        assert f"rank {rank} of 2" in (tmp_path / "run" / f"rank-{rank}.log").read_text(encoding="utf-8")


def test_the_interface_is_the_one_that_others_reach(two_hosts: list[Host]) -> None:
    host, other = two_hosts

    def asked(*given: str) -> dict[str, Any]:
        words = ["env", f"ASKED={','.join(given)}", sys.executable, "-m", "tests.distributed.host_workers"]
        ((status, text),) = run_on_each([host], [words], timeout=100)
        assert status == 0, text
        return json.loads(text.splitlines()[-1])

    found = asked(host.address, other.address, "127.0.0.1")
    assert found["addresses"] == {"lo": "127.0.0.1", INTERFACE: host.address}
    assert found[host.address] == found[other.address] == INTERFACE
    assert found["127.0.0.1"] == INTERFACE, "the only one there is"
    ip = ["ip", "-n", host.name]
    subprocess.run([*ip, "link", "add", "more0", "type", "veth", "peer", "name", "more1"], check=True)
    try:
        subprocess.run([*ip, "addr", "add", "10.88.0.1/24", "dev", "more0"], check=True)
        for end in ("more0", "more1"):
            subprocess.run([*ip, "link", "set", "dev", end, "up"], check=True)
        found = asked(other.address, "10.88.0.7", "127.0.0.1")
        assert found[other.address] == INTERFACE
        assert found["10.88.0.7"] == "more0"
        assert found["127.0.0.1"] is None, "two could be meant, and none is the default"
    finally:
        subprocess.run([*ip, "link", "del", "more0"], check=True)


# --- without namespaces -----------------------------------------------------------------------------------------------


@pytest.fixture
def several_hosts(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of rank 2, on the second of two hosts."""
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that what the code sets is taken back
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(addresses, "choose_interface", lambda master: "net7")
    return monkeypatch


@pytest.mark.parametrize("master", ["localhost", "127.0.0.1"])
def test_a_loopback_address_of_rank_zero_is_refused(several_hosts: pytest.MonkeyPatch, master: str) -> None:
    several_hosts.setenv("MASTER_ADDR", master)
    for group in ("0", "1"):
        several_hosts.setenv("GROUP_RANK", group)
        with pytest.raises(ProcessError, match=f"rank 0 is {master}, which on each host means that host itself"):
            prepare_addresses()
    several_hosts.setenv("LOCAL_WORLD_SIZE", "4")
    prepare_addresses()  # one host: that is the usual address
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_name_that_means_this_host(several_hosts: pytest.MonkeyPatch) -> None:
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    several_hosts.setattr(addresses.socket, "getaddrinfo", lambda *given: answer)
    several_hosts.setenv("MASTER_ADDR", "first")
    with pytest.raises(ProcessError, match=r"is first \(here 127\.0\.1\.1, by this host's /etc/hosts.*--local-addr"):
        prepare_addresses()
    several_hosts.setenv("GROUP_RANK", "0")  # the first host itself
    prepare_addresses()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "net7"


def test_an_interface_that_was_named_is_kept_unless_it_is_loopback(several_hosts: pytest.MonkeyPatch) -> None:
    several_hosts.setenv("MASTER_ADDR", "192.0.2.7")
    several_hosts.setattr(addresses, "interface_addresses", lambda: {"lo": "127.0.0.1", "net1": "10.1.1.1"})
    several_hosts.setenv("GLOO_SOCKET_IFNAME", "net1")
    prepare_addresses()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "net1"
    several_hosts.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(ProcessError, match="GLOO_SOCKET_IFNAME is lo, by which no other host can be reached: unset it"):
        prepare_addresses()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[enforce fail] . Unable to find address for: eth7",
            "must name an interface of this host that has an address",
        ),
        ("bind failed: EADDRINUSE", "the port is taken on this host"),
        ("[Errno -2] Name or service not known", "not known here: give its address (torchrun --local-addr"),
        ("wait timeout after 20000ms, keys: /default_pg/0//cpu//0/2", "rank 2 did not connect in time"),
        (
            "Gloo connectFullMesh failed with [pair.cc] timed out connecting: refused, remote=[10.99.2.1]:37781$2",
            "another process listens at 10.99.2.1, and this host cannot reach it there",
        ),
        ("The client socket has timed out after 1000ms", "not all 4 processes connected"),
        ("something else", "something else"),
    ],
)
def test_what_torch_says_is_explained(text: str, said: str) -> None:
    assert said in connection_advice(text, 4)


def test_a_run_folder_that_ranks_do_not_share_is_refused(tmp_path: Path) -> None:
    worker = "tests.distributed.host_workers:folders"
    shared = [str(tmp_path / "run")] * 2
    assert run(worker, 2, shared) == ["shared", "shared"]
    assert list((tmp_path / "run").iterdir()) == [], "nothing is left there"
    own = [str(tmp_path / "here"), str(tmp_path / "there")]
    first, second = run(worker, 2, own)
    assert first.startswith("ProcessError: rank 1 does not see the run folder of rank 0")
    assert second.startswith("PeerError: rank 1")
    assert str(tmp_path / "there") in first
    assert "on a file system that all hosts share" in first
    assert not (tmp_path / "here").exists(), "the next try must find it free"
