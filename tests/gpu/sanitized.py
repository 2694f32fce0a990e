"""Small shapes of every kernel, for compute-sanitizer: `python -m tests.gpu.sanitized [tables | trains | rows]`."""

from __future__ import annotations

import sys

import torch

from holdall.optim.optimizer_kinds import OPTIMIZER_KINDS
from tests.kernels import dense_frobenius_checks, frobenius_checks, host_rows_checks, train_checks, triton_checks


def tables() -> None:
    """Dense and Frobenius tables, and the interaction."""
    for optimizer in OPTIMIZER_KINDS:
        triton_checks.check_update(optimizer, num_lookups=333, num_rows=41, dim=20, kind="long runs", device="cuda")
    triton_checks.check_norm(333, 41, 20, "long runs", "cuda")
    triton_checks.check_stochastic("sgd", torch.bfloat16, "cuda")
    triton_checks.check_interaction(33, 27, 16, torch.float32, first=True, device="cuda")
    triton_checks.check_pool(3, 57, 20, weighted=True, mean=False, device="cuda")
    triton_checks.check_write_columns("cuda")
    frobenius_checks.check_many((8, 88), 8, 4, 16, 501, kind="long runs", device="cuda")
    frobenius_checks.check_bags(16, 8, 2, 12, 101, scaled=True, device="cuda")
    frobenius_checks.check_columns("cuda")
    dense_frobenius_checks.steps("triton", "sgd", "cuda")


def trains() -> None:
    """Tensor trains: one, two of different shapes, and bags."""
    pair: list[train_checks.Chain] = [((5, 4, 6), (2, 2, 4), (1, 7, 9, 1)), ((3, 5, 2), (2, 2, 4), (1, 16, 5, 1))]
    train_checks.check_rows(pair[:1], 77, "long runs", device="cuda")
    train_checks.check_rows(pair, 51, device="cuda")
    train_checks.check_bags(pair, 33, mean=True, device="cuda")
    train_checks.check_bags(pair, 33, weighted=True, device="cuda")


def rows() -> None:
    """Rows between the host and the device."""
    host_rows_checks.check_find(57, 1, "cuda")
    host_rows_checks.check_too_many("cuda")
    for shape in host_rows_checks.SHAPES:
        host_rows_checks.check_copy_rows(20, torch.float32, "cuda", lazy=True, shape=shape)
    host_rows_checks.check_copy_between_buffers("cuda")
    host_rows_checks.check_find_in_buffers("cuda")


GROUPS = {"tables": tables, "trains": trains, "rows": rows}


def main() -> None:
    for name in sys.argv[1:] or GROUPS:
        GROUPS[name]()
    torch.cuda.synchronize()
    print("all checks ran")


if __name__ == "__main__":
    main()
