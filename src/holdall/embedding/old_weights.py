"""Search for optimizers, modules and variables that still use modules which were replaced.

An optimizer that was made before trains weights which the model no longer has, and their memory is not freed. Replaced
modules and weights are followed by weak references: where all of them are dead, as usual, nothing is searched. Only for
those alive is the heap walked, once per level from a weight to its holder.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

NAMED_TABLES = 4
"""Tables that the warning names."""
LEVELS = 6
"""Levels of containers that are followed: a weight is in a list in a group in a list in the fields of an optimizer."""


@dataclass(frozen=True)
class OldWeight:
    """Weak references to a replaced module and its weight."""

    name: str
    module: weakref.ref[nn.Module]
    weight: weakref.ref[Tensor]

    @classmethod
    def of(cls, name: str, module: nn.Module, weight: Tensor) -> OldWeight:
        return cls(name, weakref.ref(module), weakref.ref(weight))

    def alive(self) -> list[Any]:
        return [found for found in (self.module(), self.weight()) if found is not None]


def warning_of_holders(old: Sequence[OldWeight]) -> str | None:
    """Sentence that names what still holds replaced weights; None if nothing does.

    A weight that only an autograd graph holds, such as that of a loss, is no reason: it goes with the graph.
    """
    if not any(weight.alive() for weight in old):
        return None
    gc.collect()  # a cycle of the caller is garbage, not a holder
    holders = _holders([found for weight in old for found in weight.alive()])
    if not holders:
        if all(weight.module() is None for weight in old):
            return None
        holders = {"a variable"}
    verb = "holds" if len(holders) == 1 else "hold"
    names = [f"'{weight.name}'" for weight in old if weight.alive()]
    if len(names) > NAMED_TABLES:
        names[NAMED_TABLES - 1 :] = [f"{len(names) - NAMED_TABLES + 1} more"]
    return (
        f"{' and '.join(sorted(holders))} still {verb} weights that compress replaced ({', '.join(names)}): the "
        "model no longer uses them, and their memory is not freed; make optimizers, and take references to tables, "
        "after compress"
    )


def _holders(objects: list[Any]) -> set[str]:
    """Names of what holds these objects, directly or through containers."""
    found: set[str] = set()
    seen = {id(objects)} | {id(one) for one in objects}
    level = objects
    for _ in range(LEVELS):
        if not level:
            break
        seen.add(id(level))
        above = [one for one in gc.get_referrers(*level) if id(one) not in seen]
        seen |= {id(one) for one in above}
        names = [(one, _name(one)) for one in above]
        found |= {name for _, name in names if name}
        level = [one for one, name in names if name is None]
        del above, names
    return found


def _name(holder: object) -> str | None:
    """A holder in words; None for a container, whose holders matter, and empty for what is ours."""
    if isinstance(holder, FrameType):
        return "" if holder.f_code.co_filename == __file__ else "a variable"
    if isinstance(holder, ModuleType):
        return f"a variable of {holder.__name__}"
    if isinstance(holder, torch.optim.Optimizer):
        return f"an optimizer ({type(holder).__name__})"
    if isinstance(holder, nn.Module):
        return f"a module ({type(holder).__name__})"
    if isinstance(holder, CellType):
        return "a variable of a closure"
    if isinstance(holder, FunctionType):  # it has the variables of its module, which are named by that
        return ""
    if isinstance(holder, dict | list | tuple | set | frozenset):
        return None
    return f"an object ({type(holder).__name__})"
