"""Checks of the Frobenius kernels against float64, by Triton's interpreter on a CPU and its compiler on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from holdall.kernels import frobenius_triton as fused
from holdall.kernels.frobenius import Factors, frobenius_bags, frobenius_bags_reference, frobenius_rows_many
from tests.kernels.triton_checks import TOLERANCE, error, some_ids


def some_factors(side: int, rank: int, terms: int, dim: int, generator: torch.Generator) -> Factors:
    shapes = ((side, terms * rank), (side, terms * rank), (rank, dim))
    left, right, basis = (torch.randn(shape, generator=generator) for shape in shapes)
    return left, right, basis


def on(tables: list[Factors], dtype: torch.dtype, device: str) -> list[Tensor]:
    """All factors, one table after the other, rounded to a type, and learning."""
    return [factor.to(dtype).to(device).requires_grad_() for table in tables for factor in table]


def check_many(
    sides: tuple[int, ...],
    rank: int,
    terms: int,
    dim: int,
    num_lookups: int,
    *,
    kind: str = "random",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    tolerance: float | None = None,
    seed: int = 0,
) -> None:
    """Rows and all gradients of several tables at once, against the formula in float64 of the same rounded factors."""
    generator = torch.Generator().manual_seed(seed)
    factors = on([some_factors(side, rank, terms, dim, generator) for side in sides], dtype, device)
    ids = torch.stack([some_ids(kind, num_lookups, side * side, generator) for side in sides])
    direction = torch.randn(len(sides), num_lookups, dim, generator=generator).to(dtype)
    tables = list(zip(factors[::3], factors[1::3], factors[2::3], strict=True))
    found = frobenius_rows_many(tables, ids.to(device), path="triton")
    assert found.dtype == dtype
    found_grads = torch.autograd.grad(found, factors, direction.to(device))
    exact = [factor.detach().double().cpu().requires_grad_() for factor in factors]
    rows = [
        frobenius_bags_reference(*exact[3 * t : 3 * t + 3], ids[t], None, None)  # type: ignore[call-arg]
        for t in range(len(sides))
    ]
    expected = torch.stack(rows)
    grads = torch.autograd.grad(expected, exact, direction.double())
    assert error(found.detach(), expected.detach()) < TOLERANCE[dtype]
    for gradient, wanted in zip(found_grads, grads, strict=True):
        assert gradient.dtype == dtype
        assert error(gradient, wanted) < (TOLERANCE[dtype] if tolerance is None else tolerance)


def check_bags(
    side: int,
    rank: int,
    terms: int,
    dim: int,
    num_bags: int,
    *,
    scaled: bool,
    sparse: bool = False,
    device: str = "cpu",
) -> None:
    """Bags of 0 to 5 ids, the last one empty, with the gradient of their weights."""
    generator = torch.Generator().manual_seed(num_bags)
    lengths = torch.randint(6, (num_bags,), generator=generator)
    lengths[-1] = 0
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    ids = some_ids("random", int(offsets[-1]), side * side, generator)
    factors = on([some_factors(side, rank, terms, dim, generator)], torch.float32, device)
    scale = torch.randn(ids.numel(), generator=generator).to(device).requires_grad_() if scaled else None
    direction = torch.randn(num_bags, dim, generator=generator)
    inputs = [*factors, scale] if scale is not None else factors
    found = frobenius_bags(
        factors[0], factors[1], factors[2], ids.to(device), offsets.to(device), scale, sparse=sparse, path="triton"
    )
    found_grads = torch.autograd.grad(found, inputs, direction.to(device))
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in inputs]
    expected = frobenius_bags_reference(exact[0], exact[1], exact[2], ids, offsets, exact[3] if scaled else None)
    grads = torch.autograd.grad(expected, exact, direction.double())
    assert error(found.detach(), expected.detach()) < TOLERANCE[torch.float32]
    for gradient, wanted in zip(found_grads, grads, strict=True):
        assert error(gradient.to_dense() if gradient.is_sparse else gradient, wanted) < TOLERANCE[torch.float32]


def check_columns(device: str = "cpu") -> None:
    """Rows are written to their columns of a wider, poisoned output and nothing else is, for ids of any strides."""
    generator = torch.Generator().manual_seed(0)
    sides, size, num_columns, dim = (9, 20, 3), 37, 5, 12
    tables = [some_factors(side, 3, 2, dim, generator) for side in sides]
    places = [fused.TableColumns(source=2 - t, target=2 * t) for t in range(3)]
    values = torch.full((size, 4), 10**9, dtype=torch.int32)  # sample-major, with a column of other ids
    for side, place in zip(sides, places, strict=True):
        values[:, place.source] = some_ids("random", size, side * side, generator)
    values = values.t()
    on_device = values.to(device)
    moved = [(left.to(device), right.to(device), basis.to(device)) for left, right, basis in tables]
    out = torch.full((size, num_columns, dim), float("nan"), device=device)
    lookups = fused.one_id_a_sample(on_device, num_columns)
    u = fused.forward(moved, places, lookups, out, saves_u=True)
    assert u is not None
    assert out[:, 1::2].isnan().all()
    grad = torch.randn(size, num_columns, dim, generator=generator)
    grad[:, 1::2] = float("nan")  # other tables' columns are not read
    whole = fused.backward(moved, places, lookups, u, grad.to(device))
    by_lookup = fused.backward(moved, places, lookups, u, grad.to(device), by_lookup=True)
    start = 0
    for table, (side, place) in enumerate(zip(sides, places, strict=True)):
        exact = [factor.double().requires_grad_() for factor in tables[table]]
        ids = values[place.source].long()
        rows = frobenius_bags_reference(exact[0], exact[1], exact[2], ids, None, None)
        assert error(out[:, place.target], rows.detach()) < TOLERANCE[torch.float32]
        wanted = torch.autograd.grad(rows, exact, grad[:, place.target].double())
        lines = by_lookup.left[table * size : (table + 1) * size].double().cpu()
        for left in (whole.left[start : start + side], torch.zeros_like(wanted[0]).index_add_(0, ids // side, lines)):
            assert error(left, wanted[0]) < TOLERANCE[torch.float32]
        assert error(whole.right[start : start + side], wanted[1]) < TOLERANCE[torch.float32]
        assert error(whole.basis[table], wanted[2]) < TOLERANCE[torch.float32]
        start += side
