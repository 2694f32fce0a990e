"""Counters of bytes moved between host and device, and of lookups."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TierTraffic:
    """Bytes moved between host and device, and the lookups that needed them."""

    fetched: int = 0
    """To the device, for steps: rows and their optimizer state."""
    written_back: int = 0
    """To the host, after steps."""
    flushed: int = 0
    """Hot rows copied either way, in slices: for checkpoints, never for a step."""
    outside_steps: int = 0
    """To the device for lookups outside of steps, such as evaluations; not in `total`."""
    fetched_rows: int = 0
    lookups: int = 0
    hot_lookups: int = 0

    @property
    def total(self) -> int:
        return self.fetched + self.written_back + self.flushed
