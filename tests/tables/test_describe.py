"""Words for methods in reports."""

from __future__ import annotations

import pytest

from holdall.tables import Bands, Codes, Dense, Hashed, Method, Quantized, Shared, TensorTrain
from holdall.tables.describe import describe_method


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (
            Bands(((512, Quantized(8)), (4_096, Quantized(4)), (60_000, Codes(2)), (None, Shared(1)))),
            "8-bit 512, 4-bit 3,584, 2 codes 55,904, 1 row for the rest",
        ),
        (
            Bands(((10, Dense("float16")), (20, Shared(3)), (None, Codes(1)))),
            "float16 10, 3 rows for 10, 1 code 99,980",
        ),
        (Bands(((10, Dense()), (None, Hashed(buckets=9)))), "dense 10, Hashed(buckets=9) 99,990"),
        (Bands(((200_000, Dense()), (None, Shared(1)))), "dense 100,000"),
        (TensorTrain(rank=8), "TensorTrain(rank=8)"),
    ],
)
def test_words(method: Method, words: str) -> None:
    assert describe_method(method, 100_000) == words
