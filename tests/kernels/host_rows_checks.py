"""Checks of the kernels that reach the host's rows, by Triton's interpreter on the CPU and its compiler on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from holdall.kernels import host_rows, host_rows_triton
from holdall.kernels.host_rows import NOBODY, Initial
from holdall.tables.hashing import stream
from holdall.tables.initial_rows import quantiles
from holdall.tiers.host_rows import HostRows, InitialValues, LazyRows

SIZES = (40, 3, 500, 1)
HOT = (7, 3, 0, 0)
SHAPES = (host_rows_triton.WHOLE_DEVICE, host_rows_triton.BESIDE_STEPS)


def pinned(tensor: Tensor, device: str) -> Tensor:
    """Memory of the host that kernels of a device reach."""
    return tensor.pin_memory() if device == "cuda" else tensor


def columns() -> Tensor:
    """[T, 3] hot rows, start on the device, start on the host."""
    near, far, lines = 0, 0, []
    for size, hot in zip(SIZES, HOT, strict=True):
        lines.append((hot, near, far))
        near, far = near + hot, far + size
    return torch.tensor(lines)


def check_find(batch: int, seed: int, device: str, *, transposed: bool = False) -> None:
    """Distinct far rows and places of lookups as the plain reference finds them, whatever room is left over."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([(torch.rand(batch, generator=generator) ** 3 * size).int() for size in SIZES])
    ids = (ids.t().contiguous().t() if transposed else ids).to(device)
    info, num_hot = columns().to(device), sum(HOT)
    rows, located, num_far = host_rows.find(ids, info, num_hot)
    for spare in (0, 5):
        found = torch.full((rows.numel() + spare,), -7, device=device)
        placed = torch.full((batch, len(SIZES)), -7, dtype=torch.int32, device=device)
        counts = torch.full((3,), -7, dtype=torch.int32, device=device)
        host_rows_triton.find(ids, info, placed, found, counts, num_far + spare, num_hot)
        assert counts.tolist() == [num_far, rows.numel(), 0]
        assert torch.equal(found[: rows.numel()], rows)
        assert bool((found[rows.numel() :] == NOBODY).all())
        assert torch.equal(placed.long(), located)


def check_too_many(device: str) -> None:
    """Without place for all, the host is told how many there were, and nothing is written beyond what there is."""
    ids = torch.stack([torch.arange(60) % size for size in SIZES]).int().to(device)
    info = columns().to(device)
    expected, _, num_far = host_rows.find(ids, info, sum(HOT))
    guarded = torch.full((20,), -7, device=device)
    located = torch.empty(60, len(SIZES), dtype=torch.int32, device=device)
    counts = torch.full((3,), -7, dtype=torch.int32, device=device)
    host_rows_triton.find(ids, info, located, guarded[:10], counts, num_far, sum(HOT))
    assert counts.tolist()[:2] == [num_far, expected.numel()]
    assert torch.equal(guarded[:10], expected[:10])
    assert guarded[10:].tolist() == [-7] * 10
    host_rows_triton.find(ids, info, located, guarded[:10], counts, 30, sum(HOT))
    assert int(counts[0]) == num_far
    assert guarded[10:].tolist() == [-7] * 10


def check_moves(
    dim: int,
    dtype: torch.dtype,
    device: str,
    *,
    lazy: bool,
    shape: host_rows_triton.Shape = host_rows_triton.WHOLE_DEVICE,
) -> None:
    """Rows go where they belong and come home as they are: those of the room, and no others."""
    generator = torch.Generator().manual_seed(dim)
    starts = torch.tensor([0, 40, 43, 543])
    beginnings = InitialValues(starts, torch.tensor([5, 2**61, 0, 77]), torch.tensor([0.5, 0.1, 2.0, 1.0]))
    store = HostRows(pinned(torch.zeros(sum(SIZES), dim, dtype=dtype), device))
    far = LazyRows(store, beginnings) if lazy else store
    initial = None
    if isinstance(far, LazyRows):
        near = beginnings.to(torch.device(device))
        far.touched = pinned(far.touched, device)
        values = quantiles(torch.device(device))
        initial = Initial(near.starts, near.seeds, near.stds, values, (stream(0), stream(1)))
    expected = far.read(torch.arange(sum(SIZES)))
    touched = torch.zeros(sum(SIZES), dtype=torch.bool)
    for count in (37, 0, 200, 1):
        rows = torch.randperm(sum(SIZES), generator=generator)[:count].sort().values
        padded = torch.full((210,), NOBODY)
        padded[:count] = rows
        counts = torch.tensor([count, count, 0], dtype=torch.int32, device=device)
        room = torch.full((210, dim), -7.0, dtype=dtype, device=device)
        elsewhere = torch.rand(210, generator=generator) < 0.3
        source = torch.where(elsewhere, 5, -1).to(device)
        options = {"home": False, "initial": initial, "source": source, "shape": shape}
        host_rows_triton.move(far.tensor, padded.to(device), counts, room, **options)
        there = torch.where(elsewhere[:count, None], -7.0, expected[rows]).to(dtype)
        assert torch.equal(room[:count].cpu(), there)
        assert bool((room[count:] == -7).all())
        room[:count] = torch.randn(count, dim, generator=generator).to(dtype).to(device)
        marked = far.touched if isinstance(far, LazyRows) else None
        options = {"home": True, "initial": initial, "touched": marked, "shape": shape}
        host_rows_triton.move(far.tensor, padded.to(device), counts, room, **options)
        if device == "cuda":
            torch.cuda.synchronize()
        expected[rows], touched[rows] = room[:count].cpu(), True
        assert torch.equal(far.read(torch.arange(sum(SIZES))), expected)
        if isinstance(far, LazyRows):
            assert torch.equal(far.touched, touched)


def check_take(device: str, width: int = 3) -> None:
    """Rows that other rooms hold are copied into the room of the step, the others stay."""
    num_hot, room_rows = 4, 6
    storage = torch.arange(float((num_hot + 3 * room_rows) * width), device=device).view(-1, width)
    expected = storage.clone()
    source = torch.full((room_rows,), -1)
    for place, (room, there) in {0: (1, 5), 2: (2, 0), 5: (1, 0)}.items():  # the last is beyond the rows there are
        source[place] = room << host_rows.ROOM_SHIFT | there
        if place < 3:
            expected[num_hot + place] = expected[num_hot + room * room_rows + there]
    counts = torch.tensor([9, 3, 2], dtype=torch.int32, device=device)
    shape = {"num_hot": num_hot, "room_rows": room_rows, "own_room": 0, "num_rows": room_rows}
    host_rows_triton.take(storage, source.to(device), counts, **shape)
    assert torch.equal(storage, expected)


def check_held(device: str) -> None:
    """Who holds a row as the plain reference says, for padded sets of different length, and how many are held."""
    generator = torch.Generator().manual_seed(0)

    def padded(count: int, length: int) -> Tensor:
        rows = torch.full((length,), NOBODY)
        rows[:count] = torch.randperm(600, generator=generator)[:count].sort().values
        return rows.to(device)

    for others in ([(3, padded(100, 130))], [(0, padded(1, 1)), (4, padded(300, 300)), (2, padded(0, 9))]):
        rows = padded(280, 290)
        counts = torch.tensor([280, 280, 0], dtype=torch.int32, device=device)
        expected = host_rows.held_by(rows, others)
        found = torch.full_like(rows, -7)
        host_rows_triton.held_by(rows, counts, others, found)
        assert torch.equal(found, expected)
        assert counts.tolist() == [280, 280, int((expected >= 0).sum())]
        assert int((expected >= 0).sum()) > 0
