"""Row mover by host copies."""

from __future__ import annotations

from tests.tiers import row_mover_checks as checks


def test_rows_are_fetched_and_written_back() -> None:
    checks.check_fetch_and_write_back("copy")


def test_rows_are_forwarded_from_the_newest_owner() -> None:
    checks.check_forward("copy")


def test_a_set_that_does_not_fit_names_the_rows_it_needs() -> None:
    checks.check_required_rows("copy")
