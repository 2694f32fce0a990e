"""What moved between host and device, counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Traffic:
    """Bytes moved between host and device, and what was looked up where."""

    fetched: int = 0
    """To the device: rows and their optimizer state."""
    sent_back: int = 0
    """To the host."""
    flushed: int = 0
    """Hot rows copied home or back, in slices: for checkpoints, never for a step."""
    looked_at: int = 0
    """To the device for lookups outside of steps, such as evaluations; not in `total`."""
    fetched_rows: int = 0
    lookups: int = 0
    hot_lookups: int = 0

    @property
    def total(self) -> int:
        return self.fetched + self.sent_back + self.flushed
