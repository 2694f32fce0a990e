"""Checks of the kernel that moves codes, run on the CPU by Triton's interpreter and on a GPU by its compiler."""

from __future__ import annotations

import torch

from holdall.kernels.code_rows_triton import CodePart, move_rows
from holdall.kernels.stochastic import uniform_noise
from holdall.tables.rounding import HEADROOM, move_codes, pack_pairs, unpack_pairs

ROWS = (40, 3, 17)
KEYS = ((1, 2), (0xFFFFFFFF, 7), (12345, 0x80000000))


def check_moves(bits: int, dtype: torch.dtype, dim: int, device: str = "cpu") -> None:
    """Rows of three tables that stay on their grids, outgrow them, or have grids of no width, against plain torch."""
    generator = torch.Generator().manual_seed(dim)
    levels = 2**bits - 1
    parts, ids, expected = [], [], []
    delta = torch.randn(sum(ROWS), dim, generator=generator) * 10.0 ** torch.randint(
        -6, 4, (sum(ROWS), 1), generator=generator
    )
    for number, rows in enumerate(ROWS):
        codes = torch.randint(levels + 1, (rows, dim), dtype=torch.uint8, generator=generator)
        grid = torch.stack((-torch.rand(rows, generator=generator), torch.rand(rows, generator=generator) / 50), 1)
        grid[::5, 1] = 0
        grid = grid.to(dtype)
        chosen = torch.randperm(rows, generator=generator)
        before = sum(ROWS[:number])
        its_delta = delta[before : before + rows]
        draws = uniform_noise(chosen, dim, KEYS[number])
        moved, new = move_codes(codes[chosen], grid[chosen], its_delta, levels, draws)
        wanted = codes.clone()
        wanted[chosen] = moved
        grids = grid.clone()
        grids[chosen] = new
        expected.append((wanted, grids))
        packed = pack_pairs(codes) if bits == 4 else codes
        parts.append(CodePart(packed.to(device), grid.to(device), KEYS[number], rows))
        ids.append(chosen)
    move_rows(parts, torch.cat(ids).to(device), delta.to(device), bits, HEADROOM)
    for part, (codes, grid) in zip(parts, expected, strict=True):
        found = part.codes.cpu() if bits == 8 else unpack_pairs(part.codes.cpu(), dim)
        assert torch.equal(found, codes)
        assert torch.equal(part.grid.cpu(), grid)
    assert any(not torch.equal(codes, expected[0][0]) for codes, _ in expected[1:])
