"""Layers that models share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from holdall.kernels.linear_relu import fuses, linear_relu


class MLP(nn.Sequential):
    """Linear layers and activations, one after the other; a layer and a ReLU are one operation where that is faster."""

    @property
    def output(self) -> nn.Linear:
        """The last linear layer."""
        return next(layer for layer in reversed(list(self)) if isinstance(layer, nn.Linear))

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self)
        while layers:
            layer = layers.pop(0)
            if layers and isinstance(layer, nn.Linear) and isinstance(layers[0], nn.ReLU) and fuses(x):
                layers.pop(0)
                x = linear_relu(x, layer.weight, layer.bias)
            else:
                x = layer(x)
        return x


def mlp(
    sizes: Sequence[int],
    *,
    last_activation: bool,
    activation: Literal["relu", "prelu"] = "relu",
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> MLP:
    """Linear layers of the given sizes with an activation between them, and after the last one if asked.

    Initialised as DLRM does: weights N(0, 2 / (in + out)), biases N(0, 1 / out). The slopes of a PReLU, one
    a unit, start at 1/4.
    """
    layers: list[nn.Module] = []
    place = drawn_on(generator, device)
    for i, (size_in, size_out) in enumerate(pairwise(sizes)):
        linear = nn.Linear(size_in, size_out, device=place)
        with torch.no_grad():
            linear.weight.normal_(0.0, (2.0 / (size_in + size_out)) ** 0.5, generator=generator)
            linear.bias.normal_(0.0, (1.0 / size_out) ** 0.5, generator=generator)
        layers.append(linear.to(device))
        if last_activation or i < len(sizes) - 2:
            relu = activation == "relu"
            layers.append(nn.ReLU(inplace=True) if relu else nn.PReLU(size_out, device=device))
    return MLP(*layers)


def drawn_on(generator: torch.Generator | None, device: torch.device | str | None) -> torch.device:
    """Device that draws the initial values of parameters for `device`: the CPU, or that of the generator, so that a
    seed gives the same values on every device."""
    if device is not None and torch.device(device).type == "meta":
        return torch.device("meta")
    return torch.device("cpu") if generator is None else generator.device
