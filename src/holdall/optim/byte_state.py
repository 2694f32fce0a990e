"""Numbers from 0 up in one byte each, on a logarithmic scale: row-wise optimizer state of rows that are bytes too.

Code 0 is 0; code c is `2 ** ((c - ZERO_CODE) / STEPS)`, from 4e-15 to 5e4, each 19% above the last. A number between
two codes is rounded to one of them at random so that its mean is the number: a sum that grows by less than a step in an
update grows right in the mean. Adagrad divides by the root of it, which is then off by 5% in the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 4
"""Codes of a factor of 2."""
ZERO_CODE = 193
"""Code of 1."""


def decode_bytes(codes: Tensor) -> Tensor:
    """Numbers of uint8 codes, in float32."""
    powers = codes.to(torch.float32).sub_(ZERO_CODE).div_(STEPS).exp2_()
    return torch.where(codes > 0, powers, 0.0)


def encode_bytes(values: Tensor, draws: Tensor) -> Tensor:
    """uint8 codes of `values`, 0 or more, by `draws` that are uniform from 0 to 1; the largest code where they are more
    than it."""
    lower = values.log2().mul_(STEPS).floor_().clamp_(-ZERO_CODE, 254 - ZERO_CODE)  # log2(0) is -inf
    below = torch.where(lower > -ZERO_CODE, (lower / STEPS).exp2(), 0.0)
    above = ((lower + 1) / STEPS).exp2()
    return (lower + ZERO_CODE + (draws < (values - below) / (above - below))).to(torch.uint8)
