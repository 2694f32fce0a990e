"""Schedule of the learning rate over a run: linear warm-up, a plateau, polynomial decay.

DLRM's reference schedule is `power=2, end_factor=0`. A factor depends on the step alone, so a resumed run gets the same
factors.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdall.common.errors import ConfigError
from holdall.common.settings import check_types


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Factor on the learning rate by step; constant 1 by default.

    With w warm-up steps, decay from step s over d steps, power p, end factor e, and step counted from 0:

        (step + 1) / w                                    step < w
        1                                                 w <= step < s, or d = 0
        e + (1 - e) * (1 - (step - s) / d) ** p           s <= step < s + d
        e                                                 s + d <= step
    """

    warmup_steps: int = 0
    """Number of steps in which the factor rises linearly to 1, from above 0. 0: no warm-up."""
    decay_start: int = 0
    """First step of the decay."""
    decay_steps: int = 0
    """Number of steps of the decay. 0: no decay."""
    power: float = 2.0
    """1 is linear, 2 is DLRM's."""
    end_factor: float = 0.0
    """Factor kept after the decay."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("warmup_steps", "decay_start", "decay_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"schedule: {name} is {getattr(self, name)}, it must be 0 or more")
        if self.power <= 0:
            raise ConfigError(f"schedule: power is {self.power}, it must be positive")
        if not 0 <= self.end_factor <= 1:
            raise ConfigError(f"schedule: end_factor is {self.end_factor}, it must be between 0 and 1")
        if self.decay_steps and self.decay_start < self.warmup_steps:
            raise ConfigError(
                f"schedule: the decay starts at step {self.decay_start}, within the {self.warmup_steps} warm-up steps: "
                f"set decay_start to {self.warmup_steps} or more"
            )

    def factor(self, step: int) -> float:
        """Factor on the learning rate of the update number `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if not self.decay_steps or step < self.decay_start:
            return 1.0
        left = max(0.0, 1.0 - (step - self.decay_start) / self.decay_steps)
        return self.end_factor + (1.0 - self.end_factor) * left**self.power
