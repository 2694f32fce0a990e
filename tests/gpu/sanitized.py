"""Small shapes of every kernel but the tensor train's, for compute-sanitizer: `python -m tests.gpu.sanitized`."""

from __future__ import annotations

import torch

from tests.kernels import frobenius_checks, placed_checks, triton_checks


def main() -> None:
    for optimizer in triton_checks.SLOTS:
        triton_checks.check_update(optimizer, num_lookups=333, num_rows=41, dim=20, kind="long runs", device="cuda")
    triton_checks.check_norm(333, 41, 20, "long runs", "cuda")
    triton_checks.check_stochastic("sgd", torch.bfloat16, "cuda")
    triton_checks.check_interaction(33, 27, 16, torch.float32, first=True, device="cuda")
    triton_checks.check_pool(3, 57, 20, weighted=True, mean=False, device="cuda")
    triton_checks.check_place("cuda")
    frobenius_checks.check_many((8, 88), 8, 4, 16, 501, kind="long runs", device="cuda")
    frobenius_checks.check_bags(16, 8, 2, 12, 101, scaled=True, device="cuda")
    frobenius_checks.check_places("cuda")
    placed_checks.steps("triton", "sgd", "cuda")
    torch.cuda.synchronize()
    print("all checks ran")


if __name__ == "__main__":
    main()
