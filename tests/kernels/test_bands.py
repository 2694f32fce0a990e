"""The plain-torch lookup in bands against the rows that tables represent."""

from __future__ import annotations

import pytest
import torch

from holdall.common.errors import ConfigError
from holdall.kernels.bands import BandColumn, StoredBand, write_band_columns
from holdall.kernels.dispatch import HAS_TRITON, INTERPRETED
from holdall.tables import Bands, Codes, Dense, Quantized, Shared
from holdall.tables.stored_bands import stored_bands

METHOD = Bands(
    (
        (3, Dense()),
        (9, Quantized(8)),
        (20, Quantized(4, scales="bfloat16")),
        (60, Codes(3, 4, codebook="words")),
        (70, Codes(2, 4, codebook="words")),
        (90, Shared(4)),
        (None, Shared(1)),
    )
)


@pytest.mark.parametrize("dim", [1, 4, 7, 16])
def test_every_row_is_that_of_the_table(dim: int) -> None:
    table = METHOD.build(100, dim, generator=torch.Generator().manual_seed(0))
    bands = stored_bands(table)
    assert bands is not None
    out = torch.zeros(100, 2, dim)
    write_band_columns([BandColumn(bands, 1, 0)], torch.stack([torch.zeros(100).long(), torch.arange(100)]), out)
    torch.testing.assert_close(out[:, 0], table.materialize())
    assert not out[:, 1].any()


@pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="Triton can run here")
def test_the_kernel_is_refused_without_a_gpu() -> None:
    band = StoredBand(0, 3, "rows", torch.zeros(3, 4))
    with pytest.raises(ConfigError, match="needs a GPU"):
        write_band_columns([BandColumn([band], 0, 0)], torch.zeros(1, 2).long(), torch.zeros(2, 1, 4), path="triton")
