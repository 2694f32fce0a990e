"""How rows get from the host to a GPU and back: by a kernel that reaches them, or gathered by the host and copied."""

from __future__ import annotations

from holdall.common.errors import ConfigError
from holdall.planning.machine.hardware import Hardware, default_path, line_at, machine_identity

PINNED = "pinned"
"""The tier of `Hardware.gather` and `scatter` that is host memory as kernels of the device reach it."""
PINNED_BESIDE = "pinned beside steps"
"""The same while steps compute: by few programs, which leave most of the device to those."""


def seconds_by_path(hardware: Hardware, row_bytes: int, num_rows: int) -> dict[str, float] | None:
    """Seconds of fetching so many rows and sending them back, by `kernel` and by `copy`; None where not measured."""
    copies = ("to_device_pinned", "to_host_pinned")
    if PINNED not in hardware.gather or PINNED not in hardware.scatter or not all(c in hardware.copy for c in copies):
        return None

    def moved(tier: str) -> float:
        return sum(line_at(lines[tier], row_bytes).seconds(num_rows) for lines in (hardware.gather, hardware.scatter))

    copied = sum(hardware.copy[copy].seconds(num_rows * row_bytes) for copy in copies)
    return {"kernel": moved(PINNED), "copy": moved("host") + copied}


def kernel_is_faster(row_bytes: int, num_rows: int) -> bool:
    """What this machine's hardware.json, where it is kept when no file is named, says of the two.

    Yes where there is none, or it is another machine's or from before this was measured: a kernel leaves the host free.
    """
    path = default_path()
    if not path.exists():
        return True
    try:
        hardware = Hardware.load(path)
    except ConfigError:  # damaged: whoever plans with it is told
        return True
    seconds = seconds_by_path(hardware, row_bytes, num_rows)
    if seconds is None or hardware.machine.get("id") != machine_identity()["id"]:
        return True
    return seconds["kernel"] <= seconds["copy"]
