"""Run of a function in several processes of a gloo group, which is made for it and destroyed after it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tests.distributed import harness


def spawn(function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """`function(rank, *arguments)` in `world_size` processes; their results by rank, as in `harness.run`.

    The function is one of a module.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    return harness.run(f"{__name__}:in_group", world_size, name, arguments, timeout=timeout)


def in_group(function: str, arguments: tuple[Any, ...]) -> Any:
    """Call a function in the default process group, on loopback."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    module, _, name = function.partition(":")
    dist.init_process_group("gloo")
    result = getattr(importlib.import_module(module), name)(dist.get_rank(), *arguments)
    dist.barrier()  # no process leaves while another still needs it
    dist.destroy_process_group()
    return result
