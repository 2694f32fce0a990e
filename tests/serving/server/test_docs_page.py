"""The page about serving: its code asks a server, and its tables name what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdall.serving.server.run import Server
from tests import pages
from tests.serving.server.running import Client, running

PAGE = pages.ROOT / "docs" / "serving.md"


@pytest.mark.parametrize("code", pages.blocks(PAGE, "py"), ids=["json", "arrow", "triton"])
def test_the_code_of_the_page_runs(bundle: Path, code: str) -> None:
    if "tritonclient" in code:
        pytest.importorskip("tritonclient.http")
    with running(bundle, name="bundle") as server:
        found: dict[str, object] = {}
        own = server.address.removeprefix("http://")
        exec(compile(code.replace("127.0.0.1:8000", own), str(PAGE), "exec"), found)
        scores = list(found["scores"])  # type: ignore[call-overload]
        assert scores
        assert all(0 < score < 1 for score in scores)


def test_metrics_that_the_page_names_are_there(server: Server, client: Client) -> None:
    client.ask("GET", "/v2")  # so that there is a request to count
    text = client.ask("GET", "/metrics")[2].decode()
    named = set(re.findall(r"`((?:holdall|process)_\w+)", PAGE.read_text(encoding="utf-8")))
    assert len(named) > 10
    for name in named - {"holdall_request_log_dropped_total"}:
        assert f"\n{name}" in text
