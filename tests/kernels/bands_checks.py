"""Checks of the lookup in bands, run on the CPU by Triton's interpreter and on a GPU by its compiler."""

from __future__ import annotations

import torch
from torch import Tensor

from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.kernels.bands import BandColumn, StoredBand, write_band_columns
from holdall.kernels.dispatch import kernel_path
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import Bands, Codes, Dense, Frobenius, Hashed, Method, Quantized, Shared
from holdall.tables.bands import BandsTable

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
ROWS = {"a": 50, "b": 700, "c": 90, "d": 60, "e": 30, "f": 40, "g": 300, "h": 70}
METHODS: dict[str, Method] = {
    "b": Bands(
        (
            (5, Dense()),
            (20, Quantized(8, rounding="stochastic", trainable=True)),
            (60, Quantized(4, scales="float16")),
            (300, Codes(2, 4, codebook="words")),
            (None, Shared(3)),
        )
    ),
    "c": Codes(1, 4, codebook="words"),
    "d": Shared(2),
    "e": Quantized(8),
    "f": Quantized(4, scales="bfloat16"),
    "g": Frobenius(rank=4, terms=2),
    "h": Hashed(buckets=9),
}


def stored(dim: int, dtype: torch.dtype, seed: int, device: str = "cpu") -> list[StoredBand]:
    """A band of each kind, of 1 to 12 ids."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 13, (9,), generator=generator).tolist()

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def codes(*shape: int, limit: int = 256) -> Tensor:
        return torch.randint(limit, shape, generator=generator, dtype=torch.uint8).to(device)

    found, start = [], 0
    for kind, size in enumerate(sizes):
        end = start + size
        if kind < 3:
            data = numbers((size, max(1, size // 2), 1)[kind], dim)
            found.append(StoredBand(start, end, "rows", data))
        elif kind < 5:
            bits = 8 if kind == 3 else 4
            found.append(StoredBand(start, end, "grid", codes(size, -(-dim * bits // 8)), numbers(size, 2), bits))
        else:
            bits, parts = (8, kind - 4) if kind < 8 else (4, 3)
            width, limit = -(-parts * bits // 8), 16 if bits == 8 else 256
            words = numbers(16 * parts, dim)
            found.append(
                StoredBand(start, end, "words", codes(size, width, limit=limit), words, bits, parts, num_words=16)
            )
        start = end
    return found


def check_every_id(dim: int, dtype: torch.dtype, out_dtype: torch.dtype, device: str = "cpu") -> None:
    """Every id of two tables, so all edges of bands, in columns between others that stay, on both paths."""
    tables = [stored(dim, dtype, seed, device) for seed in range(2)]
    tables[1] = tables[1][2:4]  # fewer bands, from a start that is not 0: its ids begin there
    first, last = tables[1][0].start, tables[1][-1].end
    ids = torch.arange(tables[0][-1].end, device=device)
    values = torch.stack([ids.clamp(first, last - 1), ids, ids]).int().t().contiguous().t()
    columns = [BandColumn(tables[0], 1, 3), BandColumn(tables[1], 0, 1)]
    outs = [torch.full((ids.numel(), 4, dim), 7.0, dtype=out_dtype, device=device) for _ in range(2)]
    for out, path in zip(outs, ("torch", "triton"), strict=True):
        write_band_columns(columns, values, out, path=path)  # type: ignore[arg-type]
    torch.testing.assert_close(outs[1], outs[0], rtol=2 * TOLERANCE[out_dtype], atol=TOLERANCE[out_dtype])
    assert bool((outs[1][:, [0, 2]] == 7).all())


def check_far_rows(device: str = "cpu") -> None:
    """Ids and addresses past 2^31: one byte for each of 2^31 + 20 ids, then rows; most of it is never written."""
    near, far = 2**31, 2**31 + 20
    codes = torch.empty(far, 1, dtype=torch.uint8, device=device)
    codes[:2], codes[-20:] = 1, torch.arange(20, dtype=torch.uint8, device=device)[:, None] % 16
    words, rows = torch.randn(16, 8, device=device), torch.randn(4, 8, device=device)
    bands = [StoredBand(0, far, "words", codes, words, num_words=16), StoredBand(far, far + 4, "rows", rows)]
    ids = torch.tensor([[0, 1, near, far - 1, far, far + 3]], device=device)
    out = torch.zeros(6, 1, 8, device=device)
    write_band_columns([BandColumn(bands, 0, 0)], ids, out, path="triton")
    assert torch.equal(out[:, 0], torch.stack([words[1], words[1], words[0], words[3], rows[0], rows[3]]))


def some_ids(size: int, seed: int, device: str = "cpu") -> Ids:
    generator = torch.Generator().manual_seed(seed)
    values = torch.stack([torch.randint(rows, (size,), generator=generator) for rows in ROWS.values()]).int()
    return Ids(values.to(device), None, len(ROWS))


def build(device: str = "cpu", dtype: torch.dtype = torch.float32) -> EmbeddingBags:
    """Tables of all kinds, whose lookups by torch alone are those of a GPU."""
    generator = torch.Generator(device).manual_seed(0)
    bags = EmbeddingBags.build(ROWS, 8, METHODS, device=device, generator=generator, dtype=dtype)
    for table in bags.modules():
        if isinstance(table, BandsTable):
            table.fixed_shapes = True
    return bags


def steps(path: str, optimizer: str, device: str = "cpu", size: int = 21) -> list[Tensor]:
    """The vectors of the last of three steps, every parameter and every buffer after it."""
    with kernel_path(path):  # type: ignore[arg-type]
        bags = build(device)
        optimizers = Optimizers(bags, OptimizerConfig(name=optimizer, lr=0.1))  # type: ignore[arg-type]
        for step in range(3):
            vectors = bags(some_ids(size, step, device))
            vectors.square().sum().backward()
            optimizers.step()
        return [vectors.detach(), *(tensor.detach().float() for tensor in (*bags.parameters(), *bags.buffers()))]
