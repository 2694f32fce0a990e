"""Worker functions of the tests of several hosts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from holdall.common.errors import ProcessError
from holdall.distributed.addresses import choose_interface, interface_addresses
from holdall.distributed.processes import process_group
from holdall.distributed.shared_folder import check_shared


def folders(given: list[str]) -> str:
    """Each rank checks its own folder; the error it gets."""
    with process_group(torch.device("cpu"), timeout=20) as processes:
        try:
            check_shared(Path(given[processes.rank]), processes, timeout=0.5)
        except ProcessError as error:
            return f"{type(error).__name__}: {error}"
    return "shared"


def interfaces() -> None:
    """Print, as JSON, the interfaces that this host chooses for several addresses of rank 0."""
    asked = os.environ["ASKED"].split(",")
    print(json.dumps({"addresses": interface_addresses(), **{address: choose_interface(address) for address in asked}}))


if __name__ == "__main__":
    interfaces()
