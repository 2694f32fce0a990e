"""Differences to PyTorch and TorchRec that are meant, with their reasons, and the verdict on a test that fails."""

from __future__ import annotations

import re

from tests.peers.suites import Case

EXPECTED = {
    r"test_embedding_from_pretrained_u?int\d+$": "Rows are floating-point numbers; a table of integers is refused.",
    r"test_embedding_sparse_empty_tensor$": "A table has at least one row and one column; an empty one is refused.",
    r"test_embeddingbag_include_last_offset$": (
        "With `include_last_offset` the last offset is the number of ids; torch ignores another, Holdall refuses it."
    ),
}
"""Reason by the end of a test's name."""


def verdict(case: Case) -> tuple[str, str]:
    """Outcome of a test ("works", "refused", "expected difference", "fails" or "silently wrong") and its sentence."""
    if case.outcome in ("passed", "skipped"):
        return ("works" if case.outcome == "passed" else "skipped"), case.message
    if case.outcome == "expected":
        return "expected difference", case.message
    kind = case.message.partition(":")[0]
    for pattern, reason in EXPECTED.items():
        if re.search(pattern, case.name) and kind != "AssertionError":
            return "expected difference", reason
    if kind == "RefusedError":
        return "refused", case.message.partition(": ")[2]
    return ("silently wrong" if kind == "AssertionError" else "fails"), case.message
