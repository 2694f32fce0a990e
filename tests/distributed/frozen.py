"""Last import of the server that forks workers: all that is there by now stays out of their garbage collections.

A collection touches every object, and so copies the memory that a worker shares with the server: half of the time of a
small worker.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
