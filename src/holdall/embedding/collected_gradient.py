"""Stand-in for the gradient of a packed table, in `weight.grad`, while its pack collects gradients by row.

What PyTorch does with gradients goes through `weight.grad`, so that is where a pack learns of it: `model.zero_grad()`
drops what was collected, `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` and `GradScaler.unscale_` work on the
summed gradients of the touched rows, and what autograd adds to it (a penalty on a weight, say) is collected with the
rest. It can be looked at. Everything else is refused. It has no memory of its own.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from holdall.common.errors import ConfigError

if TYPE_CHECKING:
    from holdall.embedding.dense_pack import DensePack

aten = torch.ops.aten

DROPS = {aten.zero_, aten._foreach_zero_}
KEEPS_ZERO = {
    aten.linalg_vector_norm, aten.norm, aten._foreach_norm, aten.mul_, aten._foreach_mul_, aten.div_,
    aten._foreach_div_, aten.clamp_, aten.clamp_min_, aten.clamp_max_, aten._foreach_clamp_min_,
    aten._foreach_clamp_max_, aten._foreach_maximum_, aten._foreach_minimum_,
    aten._amp_foreach_non_finite_check_and_unscale_,
}  # fmt: skip
"""Operations that rows without a gradient play no part in: they are those of the touched rows."""
READS = {
    aten.abs, aten.isnan, aten.isinf, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.sum, aten.mean,
    aten.var, aten.std, aten.max, aten.min, aten.amax, aten.amin, aten.aminmax, aten.histc, aten.count_nonzero,
}  # fmt: skip
"""Operations that look at a gradient, as logs and checks of it do: they get all rows, as a dense gradient has them."""


class CollectedGradient(torch.Tensor):
    """The gradient that a pack has collected for its table `name`, of the shape, type and device of `weight`."""

    _pack: weakref.ref[DensePack]
    _name: str

    @staticmethod
    def __new__(cls, pack: DensePack, name: str, weight: Tensor) -> CollectedGradient:
        found = torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)
        # Weak: the weight holds its gradient in C++, where Python does not look for cycles.
        found._pack, found._name = weakref.ref(pack), name
        return found

    def __init__(self, pack: DensePack, name: str, weight: Tensor):
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<gradient of table '{self._name}', collected by row for its optimizer>"

    def touched_rows(self) -> Tensor:
        """[U, dim]: the summed gradients of the touched rows, as a view of what the optimizer will apply."""
        pack = self._pack()
        if pack is None:
            return torch.empty(0, self.shape[1], dtype=self.dtype, device=self.device)
        return pack.summed_rows(self._name)[1]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        packet, target = func.overloadpacket, args[0]
        if packet in DROPS:
            every = target if isinstance(target, list) else [target]
            for gradient in every:
                if isinstance(gradient, cls):
                    gradient._drop()
                else:
                    gradient.zero_()
            return None if isinstance(target, list) else target
        if packet in KEEPS_ZERO:
            found = func(*tree_map(_touched, args), **tree_map(_touched, kwargs or {}))
            return target if isinstance(target, cls) and func._schema.is_mutable else found
        if packet in READS:
            return func(*tree_map(_dense, args), **tree_map(_dense, kwargs or {}))
        if isinstance(target, cls):
            if packet in (aten.add_, aten.add) and len(args) == 2 and not kwargs:
                return target._add(args[1])
            if packet is aten.detach:
                return target
            if packet in (aten._to_copy, aten.empty_like):
                raise ConfigError("the tables moved after their optimizer was made: move the model first")
        name = next(each._name for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
        raise ConfigError(
            f"the gradient of table '{name}' is collected by row for holdall's Optimizers, and {func} cannot read it: "
            f"let them update the tables, and give other optimizers the other parameters only"
        )

    def _drop(self) -> None:
        pack = self._pack()
        if pack is not None:
            pack.drop_gradients([self._name])

    def _add(self, gradient: Tensor) -> CollectedGradient:
        """Collect a gradient that autograd computed for the weight itself."""
        pack = self._pack()
        if pack is not None:
            pack.adopt_gradient(self._name, gradient)
        return self


def _dense(value: Any) -> Any:
    if not isinstance(value, CollectedGradient):
        return value
    pack, dense = value._pack(), torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    if pack is not None:
        rows, gradients = pack.summed_rows(value._name)
        dense[rows] = gradients.to(dense.dtype)
    return dense


def _touched(value: Any) -> Any:
    return value.touched_rows() if isinstance(value, CollectedGradient) else value
