"""What every test shares: one thread count, so that results do not depend on the machine's."""

from __future__ import annotations

import torch

torch.set_num_threads(2)
