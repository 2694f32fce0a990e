"""Orders of samples that a loader has."""

from __future__ import annotations

from typing import Literal

Shuffle = Literal["chunks", "blocks", "rows", "none"]
