"""Checks of the Triton kernels against float64, run on the CPU by Triton's interpreter and on a GPU by its compiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from holdall.kernels.interaction import dot_interaction_reference, interaction_width
from holdall.kernels.row_gradient import RowGradient, sum_by_row_reference
from holdall.kernels.row_update import DeviceScalars, UpdateScalars
from holdall.optim.optimizer_kinds import OPTIMIZER_KINDS

SCALARS = UpdateScalars(lr=0.1, eps=1e-3, betas=(0.8, 0.95), step=3, momentum=0.7)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def error(found: Tensor, expected: Tensor) -> float:
    """Distance over the norm of `expected`; infinite when something is not a number."""
    found, expected = found.double().cpu(), expected.double().cpu()
    assert found.shape == expected.shape
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def some_ids(kind: str, num_lookups: int, num_rows: int, generator: torch.Generator) -> Tensor:
    """Ids of the named kind: both ends of the table always occur, given two lookups."""
    ids = torch.randint(num_rows, (num_lookups,), generator=generator)
    if kind == "one row":
        ids[:] = num_rows - 1
    elif kind == "long runs":
        ids = torch.where(torch.rand(num_lookups, generator=generator) < 0.9, ids % 2 * (num_rows - 1), ids)
    elif kind == "distinct":
        ids = torch.randperm(num_rows, generator=generator)[:num_lookups]
    if num_lookups > 1:
        ids[0], ids[-1] = 0, num_rows - 1
    return ids


def check_update(
    optimizer: str,
    *,
    num_lookups: int,
    num_rows: int,
    dim: int,
    kind: str = "random",
    bags: int | None = None,
    weighted: bool = False,
    weight_dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype = torch.float32,
    weight_decay: float = 0.0,
    device: str = "cpu",
    seed: int = 0,
) -> None:
    """`update_rows` equals summing and updating in float64, and does not change other rows."""
    from holdall.kernels.row_update_triton import update_rows

    generator = torch.Generator().manual_seed(seed)
    ids = some_ids(kind, num_lookups, num_rows, generator)
    gradient = RowGradient(
        ids.to(device),
        torch.randn(bags or num_lookups, dim, generator=generator).to(grad_dtype).to(device),
        None if bags is None else torch.randint(bags, (num_lookups,), generator=generator).to(device),
        torch.rand(num_lookups, generator=generator).to(device) if weighted else None,
    )
    weight = torch.randn(num_rows, dim, generator=generator).to(weight_dtype).to(device)
    kind = OPTIMIZER_KINDS[optimizer]
    states = [torch.rand(s.shape, generator=generator).to(device) for s in kind.row_state(weight).values()]
    expected = [tensor.double().cpu() for tensor in (weight, *states)]
    exact = RowGradient(
        ids,
        gradient.grad.double().cpu(),
        None if gradient.bag_of is None else gradient.bag_of.cpu(),
        None if gradient.weights is None else gradient.weights.double().cpu(),
    )
    before = weight.clone()
    touched, summed = sum_by_row_reference(exact)
    scalars = replace(SCALARS, weight_decay=weight_decay)
    kind.row_update(expected[0], touched, summed, scalars, *expected[1:])
    update_rows(kind.row_rule, weight, states, gradient, scalars)
    assert error(weight, expected[0]) < TOLERANCE[weight_dtype], optimizer
    for state, wanted in zip(states, expected[1:], strict=True):
        assert error(state, wanted) < TOLERANCE[torch.float32], optimizer
    untouched = torch.ones(num_rows, dtype=torch.bool)
    untouched[touched] = False
    assert torch.equal(weight[untouched.to(device)], before[untouched.to(device)])


def check_interaction(
    size: int,
    num_vectors: int,
    dim: int,
    dtype: torch.dtype,
    *,
    first: bool,
    device: str = "cpu",
    seed: int = 0,
) -> None:
    """Both kernels against float64 of the same rounded inputs, every output poisoned beforehand."""
    from holdall.kernels import interaction_triton

    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(size, num_vectors, dim, generator=generator).to(dtype)
    width = interaction_width(num_vectors, dim)
    direction = torch.randn(size, width, generator=generator).to(dtype)
    exact = vectors.double().requires_grad_()
    expected = dot_interaction_reference(exact)
    (expected_grad,) = torch.autograd.grad((expected * direction.double()).sum(), exact)

    head = vectors[:, 0].contiguous().to(device) if first else None
    rest = (vectors[:, 1:] if first else vectors).contiguous().to(device)
    out = torch.full((size, width), float("nan"), dtype=dtype, device=device)
    interaction_triton.forward(head, rest, None, out)
    tolerance = TOLERANCE[dtype]
    assert error(out, expected.detach()) < tolerance
    assert not out[:, dim + num_vectors * (num_vectors - 1) // 2 :].any()

    grad_head = None if head is None else torch.full_like(head, float("nan"))
    grad_rest = torch.full_like(rest, float("nan"))
    interaction_triton.backward(head, rest, direction.to(device), grad_head, grad_rest)
    found = grad_rest if grad_head is None else torch.cat([grad_head[:, None], grad_rest], dim=1)
    assert error(found, expected_grad) < tolerance

    order = torch.randperm(size * rest.shape[1], generator=generator).to(device)
    storage = torch.empty_like(rest.view(-1, dim))
    storage[order] = rest.view(-1, dim)
    out.fill_(float("nan"))
    interaction_triton.forward(head, storage, order.view(size, -1).int(), out)
    assert error(out, expected.detach()) < tolerance


def check_gather(shape: tuple[int, ...], num_rows: int, dim: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Rows are exact, in the given type; both ends of the storage included."""
    from holdall.kernels.lookup_triton import gather

    storage = torch.randn(num_rows, dim).to(device)
    rows = torch.randint(num_rows, shape, dtype=torch.int32).to(device)
    rows.view(-1)[0], rows.view(-1)[-1] = num_rows - 1, 0
    out = torch.full((*shape, dim), float("nan"), dtype=dtype, device=device)
    assert torch.equal(gather(storage, rows, dtype, out), storage.to(dtype)[rows.long()])


def check_pool(num_features: int, size: int, dim: int, *, weighted: bool, mean: bool, device: str = "cpu") -> None:
    """Bags of 0 to 5 ids, the last one empty, against `embedding_bag` in float64."""
    from holdall.kernels.lookup_triton import pool

    generator = torch.Generator().manual_seed(size)
    lengths = torch.randint(6, (num_features * size,), generator=generator)
    lengths[-1] = 0
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    storage = torch.randn(50, dim, generator=generator)
    rows = torch.randint(50, (int(offsets[-1]),), generator=generator)
    weights = torch.rand(rows.numel(), generator=generator) if weighted else None
    scale = None if weights is None else weights.double()
    expected = torch.nn.functional.embedding_bag(
        rows, storage.double(), offsets[:-1], mode="sum", per_sample_weights=scale
    )
    if mean:
        expected /= lengths.clamp(min=1)[:, None]
    expected = expected.view(num_features, size, dim).transpose(0, 1)
    found = pool(
        storage.to(device),
        rows.to(device),
        offsets.to(device),
        None if weights is None else weights.to(device),
        num_features=num_features,
        mean=mean,
        dtype=torch.float32,
        out=torch.full((size, num_features, dim), float("nan"), device=device),
    )
    assert error(found, expected) < TOLERANCE[torch.float32]


def check_settings_on_the_device(optimizer: str, device: str = "cpu") -> None:
    """Rates and a scale given as tensors: the update of rates and scaled gradients given as numbers."""
    from holdall.kernels.row_update_triton import update_rows

    generator = torch.Generator().manual_seed(3)
    ids = some_ids("long runs", 61, 20, generator).to(device)
    grad = torch.randn(61, 12, generator=generator).to(device)
    kind = OPTIMIZER_KINDS[optimizer]
    results = []
    for on_device in (False, True):
        weight = torch.ones(20, 12, device=device)
        states = [torch.ones_like(state) for state in kind.row_state(weight).values()]
        if on_device:
            rates = torch.tensor([0.1, 1 - 0.8**3, 1 - 0.95**3], device=device)
            given = DeviceScalars(rates=rates, scale=torch.tensor(0.25, device=device))
            host = UpdateScalars(eps=SCALARS.eps, betas=SCALARS.betas, momentum=SCALARS.momentum)
            update_rows(kind.row_rule, weight, states, RowGradient(ids, grad), host, given)
        else:
            update_rows(kind.row_rule, weight, states, RowGradient(ids, grad * 0.25), SCALARS)
        results.append([weight, *states])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def check_norm(num_lookups: int, num_rows: int, dim: int, kind: str, device: str = "cpu") -> None:
    """The squared norm of the summed gradient, against float64."""
    from holdall.kernels import row_update_triton

    generator = torch.Generator().manual_seed(num_lookups)
    ids = some_ids(kind, num_lookups, num_rows, generator)
    gradient = RowGradient(ids.to(device), torch.randn(num_lookups, dim, generator=generator).to(device))
    found = row_update_triton.squared_norm(gradient, row_update_triton.sorted_ids(gradient, num_rows))
    rows, sums = sum_by_row_reference(RowGradient(ids, gradient.grad.double().cpu()))
    assert error(found, sums.square().sum()) < TOLERANCE[torch.float32]
    summed = row_update_triton.sum_by_row(gradient)
    assert torch.equal(summed[0].cpu(), rows)
    assert error(summed[1], sums) < TOLERANCE[torch.float32]


def check_stochastic(optimizer: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """The kernels round as plain torch does, bit for bit where both computed the same number, and by the same noise."""
    from holdall.kernels.row_update_triton import update_rows
    from holdall.kernels.stochastic import keys

    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(60, generator=generator)[:40]
    grad = torch.randn(40, 12, generator=generator)
    kind, scalars = OPTIMIZER_KINDS[optimizer], replace(SCALARS, lr=2.0**-9, rounding=keys(7, 5))
    results = []
    for fused in (False, True):
        weight = torch.ones(60, 12, dtype=dtype).to(device)
        states = [torch.ones_like(state) for state in kind.row_state(weight).values()]
        if fused:
            update_rows(kind.row_rule, weight, states, RowGradient(ids.to(device), grad.to(device)), scalars)
        else:
            ordered = ids.sort()
            summed = grad[ordered.indices].to(device)
            kind.row_update(weight, ordered.values.to(device), summed, scalars, *states)
        results.append(weight)
    differs = results[0] != results[1]
    assert int(differs.sum()) <= 2  # a last bit of float32 apart, on the edge of a draw
    if optimizer == "sgd" and device == "cpu":
        assert not differs.any()
    assert results[0].unique().numel() > 1


def check_write_columns(device: str = "cpu") -> None:
    """Rows are written to their columns and nowhere else, for ids of any strides, and have their numbers."""
    from holdall.kernels.lookup_triton import row_numbers, write_columns

    storage = torch.arange(10.0)[:, None] + torch.arange(5) / 8
    values = torch.tensor([[1, 2, 0], [7, 7, 7], [0, 1, 3]], dtype=torch.int32).to(device)
    lines = torch.tensor([[2, 0, 6], [0, 3, 1]]).to(device)
    expected = torch.tensor([[6, 2], [7, 3], [9, 1]])
    for ids in (values, values.t().contiguous().t()):
        out = torch.full((3, 4, 5), float("nan"), dtype=torch.float16, device=device)
        write_columns(storage.to(device), ids, lines, out)
        assert row_numbers(ids, lines, 0, 10).tolist() == expected.tolist()
        assert torch.equal(out[:, [0, 3]].float().cpu(), storage[expected])
        assert out[:, 1:3].isnan().all()
        numbers = row_numbers(ids, torch.tensor([[0, 0, 4], [1, 1, -1], [2, 0, -1]]).to(device), 2, 10)
        assert numbers.tolist() == [[5, -2, -1], [6, -4, -3], [4, -6, -5]]


def second_derivatives(output: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Gradient of the squared norm of the gradient of the output's squared norm."""
    first = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
    total = torch.stack([gradient.to_dense().square().sum() for gradient in first]).sum()
    return [gradient.to_dense() for gradient in torch.autograd.grad(total, inputs)]
