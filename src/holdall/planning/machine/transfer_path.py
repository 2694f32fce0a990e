"""Choice of the transfer path between host rows and a GPU: a kernel that reads pinned memory, or gather and copy."""

from __future__ import annotations

from holdall.common.errors import ConfigError
from holdall.planning.machine.hardware import Hardware, default_path, line_at, machine_identity

PINNED = "pinned"
"""The tier of `Hardware.gather` and `scatter` for pinned host memory that kernels of the device read and write."""
PINNED_DURING_STEPS = "pinned beside steps"
"""The same while a training step computes: by few thread blocks, which leave most of the device to the step."""


def seconds_by_path(hardware: Hardware, row_bytes: int, num_rows: int) -> dict[str, float] | None:
    """Seconds to fetch `num_rows` rows and write them back, by `kernel` and by `copy`; None where not measured."""
    copies = ("to_device_pinned", "to_host_pinned")
    if PINNED not in hardware.gather or PINNED not in hardware.scatter or not all(c in hardware.copy for c in copies):
        return None

    def moved(tier: str) -> float:
        return sum(line_at(lines[tier], row_bytes).seconds(num_rows) for lines in (hardware.gather, hardware.scatter))

    copied = sum(hardware.copy[copy].seconds(num_rows * row_bytes) for copy in copies)
    return {"kernel": moved(PINNED), "copy": moved("host") + copied}


def kernel_is_faster(row_bytes: int, num_rows: int) -> bool:
    """Whether a kernel is faster than a copy, by the rates in this machine's default hardware.json.

    True where there is no file, or it is another machine's, or has no such rates: a kernel leaves the host free.
    """
    path = default_path()
    if not path.exists():
        return True
    try:
        hardware = Hardware.load(path)
    except ConfigError:  # damaged: planning with it raises
        return True
    seconds = seconds_by_path(hardware, row_bytes, num_rows)
    if seconds is None or hardware.machine.get("id") != machine_identity()["id"]:
        return True
    return seconds["kernel"] <= seconds["copy"]
