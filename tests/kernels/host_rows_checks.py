"""Checks of the kernels that copy rows from and to host memory, interpreted on the CPU or compiled for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from holdall.kernels import host_rows, host_rows_triton
from holdall.kernels.host_rows import BUFFER_SHIFT, NO_ROW, InitialRowParams
from holdall.tables.hashing import stream
from holdall.tables.initial_rows import quantiles
from holdall.tiers.host_rows import HostRows, InitialValues, LazyRows

SIZES = (40, 3, 500, 1)
HOT = (7, 3, 0, 0)
SHAPES = (host_rows_triton.WHOLE_DEVICE, host_rows_triton.BESIDE_STEPS)


def pinned(tensor: Tensor, device: str) -> Tensor:
    """Host memory that kernels of the device can address."""
    return tensor.pin_memory() if device == "cuda" else tensor


def columns() -> Tensor:
    """[T, 3] hot rows, start on the device, start on the host."""
    device_start, host_start, lines = 0, 0, []
    for size, hot in zip(SIZES, HOT, strict=True):
        lines.append((hot, device_start, host_start))
        device_start, host_start = device_start + hot, host_start + size
    return torch.tensor(lines)


def check_find(batch: int, seed: int, device: str, *, transposed: bool = False) -> None:
    """Distinct host rows and storage rows of lookups equal the plain reference, with and without spare capacity."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([(torch.rand(batch, generator=generator) ** 3 * size).int() for size in SIZES])
    ids = (ids.t().contiguous().t() if transposed else ids).to(device)
    info, num_hot = columns().to(device), sum(HOT)
    rows, located, num_host_lookups = host_rows.find_host_rows(ids, info, num_hot)
    for spare in (0, 5):
        found = torch.full((rows.numel() + spare,), -7, device=device)
        placed = torch.full((batch, len(SIZES)), -7, dtype=torch.int32, device=device)
        counts = torch.full((3,), -7, dtype=torch.int32, device=device)
        host_rows_triton.find_host_rows(ids, info, placed, found, counts, num_host_lookups + spare, num_hot)
        assert counts.tolist() == [num_host_lookups, rows.numel(), 0]
        assert torch.equal(found[: rows.numel()], rows)
        assert bool((found[rows.numel() :] == NO_ROW).all())
        assert torch.equal(placed.long(), located)


def check_too_many(device: str) -> None:
    """Beyond the capacity, all host lookups are counted and nothing is written past the end."""
    ids = torch.stack([torch.arange(60) % size for size in SIZES]).int().to(device)
    info = columns().to(device)
    expected, _, num_host_lookups = host_rows.find_host_rows(ids, info, sum(HOT))
    guarded = torch.full((20,), -7, device=device)
    located = torch.empty(60, len(SIZES), dtype=torch.int32, device=device)
    counts = torch.full((3,), -7, dtype=torch.int32, device=device)
    host_rows_triton.find_host_rows(ids, info, located, guarded[:10], counts, num_host_lookups, sum(HOT))
    assert counts.tolist()[:2] == [num_host_lookups, expected.numel()]
    assert torch.equal(guarded[:10], expected[:10])
    assert guarded[10:].tolist() == [-7] * 10
    host_rows_triton.find_host_rows(ids, info, located, guarded[:10], counts, 30, sum(HOT))
    assert int(counts[0]) == num_host_lookups
    assert guarded[10:].tolist() == [-7] * 10


def check_copy_rows(
    dim: int,
    dtype: torch.dtype,
    device: str,
    *,
    lazy: bool,
    shape: host_rows_triton.LaunchShape = host_rows_triton.WHOLE_DEVICE,
) -> None:
    """Rows are fetched and written back unchanged: those of the staging buffer, and no others."""
    generator = torch.Generator().manual_seed(dim)
    starts = torch.tensor([0, 40, 43, 543])
    initial_values = InitialValues(starts, torch.tensor([5, 2**61, 0, 77]), torch.tensor([0.5, 0.1, 2.0, 1.0]))
    store = HostRows(pinned(torch.zeros(sum(SIZES), dim, dtype=dtype), device))
    host = LazyRows(store, initial_values) if lazy else store
    initial = None
    if isinstance(host, LazyRows):
        params = initial_values.to(torch.device(device))
        host.touched = pinned(host.touched, device)
        values = quantiles(torch.device(device))
        initial = InitialRowParams(params.starts, params.seeds, params.stds, values, (stream(0), stream(1)))
    expected = host.read(torch.arange(sum(SIZES)))
    touched = torch.zeros(sum(SIZES), dtype=torch.bool)
    for count in (37, 0, 200, 1):
        rows = torch.randperm(sum(SIZES), generator=generator)[:count].sort().values
        padded = torch.full((210,), NO_ROW)
        padded[:count] = rows
        counts = torch.tensor([count, count, 0], dtype=torch.int32, device=device)
        buffer = torch.full((210, dim), -7.0, dtype=dtype, device=device)
        elsewhere = torch.rand(210, generator=generator) < 0.3
        source = torch.where(elsewhere, 5, -1).to(device)
        options = {"write_back": False, "initial": initial, "source": source, "shape": shape}
        host_rows_triton.copy_rows(host.tensor, padded.to(device), counts, buffer, **options)
        there = torch.where(elsewhere[:count, None], -7.0, expected[rows]).to(dtype)
        assert torch.equal(buffer[:count].cpu(), there)
        assert bool((buffer[count:] == -7).all())
        buffer[:count] = torch.randn(count, dim, generator=generator).to(dtype).to(device)
        marked = host.touched if isinstance(host, LazyRows) else None
        options = {"write_back": True, "initial": initial, "touched": marked, "shape": shape}
        host_rows_triton.copy_rows(host.tensor, padded.to(device), counts, buffer, **options)
        if device == "cuda":
            torch.cuda.synchronize()
        expected[rows], touched[rows] = buffer[:count].cpu(), True
        assert torch.equal(host.read(torch.arange(sum(SIZES))), expected)
        if isinstance(host, LazyRows):
            assert torch.equal(host.touched, touched)


def check_copy_between_buffers(device: str, width: int = 3) -> None:
    """Rows that other staging buffers have are copied into that of the step; the others stay."""
    num_hot, buffer_rows = 4, 6
    storage = torch.arange(float((num_hot + 3 * buffer_rows) * width), device=device).view(-1, width)
    expected = storage.clone()
    source = torch.full((buffer_rows,), -1)
    for place, (buffer, there) in {0: (1, 5), 2: (2, 0), 5: (1, 0)}.items():  # the last is beyond the number of rows
        source[place] = buffer << BUFFER_SHIFT | there
        if place < 3:
            expected[num_hot + place] = expected[num_hot + buffer * buffer_rows + there]
    counts = torch.tensor([9, 3, 2], dtype=torch.int32, device=device)
    shape = {"num_hot": num_hot, "buffer_rows": buffer_rows, "own_buffer": 0, "num_rows": buffer_rows}
    host_rows_triton.copy_between_buffers(storage, source.to(device), counts, **shape)
    assert torch.equal(storage, expected)


def check_find_in_buffers(device: str) -> None:
    """Buffer and slot of a row, and their count, equal the plain reference, for padded lists of different length."""
    generator = torch.Generator().manual_seed(0)

    def padded(count: int, length: int) -> Tensor:
        rows = torch.full((length,), NO_ROW)
        rows[:count] = torch.randperm(600, generator=generator)[:count].sort().values
        return rows.to(device)

    for others in ([(3, padded(100, 130))], [(0, padded(1, 1)), (4, padded(300, 300)), (2, padded(0, 9))]):
        rows = padded(280, 290)
        counts = torch.tensor([280, 280, 0], dtype=torch.int32, device=device)
        expected = host_rows.find_in_buffers(rows, others)
        found = torch.full_like(rows, -7)
        host_rows_triton.find_in_buffers(rows, counts, others, found)
        assert torch.equal(found, expected)
        assert counts.tolist() == [280, 280, int((expected >= 0).sum())]
        assert int((expected >= 0).sum()) > 0
