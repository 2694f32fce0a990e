"""Choice of the device that a setting names."""

from __future__ import annotations

import torch

from holdall.common.errors import CheckpointError


def pick_device(name: str) -> torch.device:
    """The device `name` stands for; `auto` is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CheckpointError(
            f"device '{name}' cannot be used here ({str(error).splitlines()[0]}): choose cpu or auto"
        ) from None
    return device
