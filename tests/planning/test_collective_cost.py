"""Cost model of collectives on made-up curves, so that every answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from holdall.common.errors import ConfigError
from holdall.planning.collective_cost import Links, Message, wire_share
from holdall.planning.machine.hardware import CollectiveRates

SIZES = (1 << 8, 1 << 14, 1 << 18, 1 << 22, 1 << 25)


def planted(latency: float, bandwidth: float, power: float = 1.0) -> dict[str, float]:
    return {str(size): latency + size**power / bandwidth for size in SIZES}


def links(world_size: int = 2, backend: str = "gloo") -> Links:
    return Links(CollectiveRates(backend, world_size, planted(1e-3, 1e9), planted(2e-4, 2e9)))


@pytest.mark.parametrize("num_bytes", [0, 1, 256, 5000, 123_456, 7_000_000, 1 << 25, 1 << 30])
def test_latency_and_bandwidth_are_found_again(num_bytes: int) -> None:
    assert float(links().all_reduce(num_bytes, 2)) == pytest.approx(1e-3 + num_bytes / 1e9, rel=1e-9)
    assert float(links().all_to_all(num_bytes, 2)) == pytest.approx(2e-4 + num_bytes / 2e9, rel=1e-9)


def test_between_sizes_a_power_law_is_followed() -> None:
    # 4^k bytes in 2^k nanoseconds: straight in logarithms, far from it on a line between sizes.
    curve = {str(1 << bits): 2.0 ** (bits / 2) * 1e-9 for bits in (0, 10, 20, 30)}
    slow = Links(CollectiveRates("gloo", 2, curve, curve))
    between = 1 << 24
    on_a_line = 1e-9 * (2**10 + (2**15 - 2**10) * (between - 2**20) / (2**30 - 2**20))
    assert float(slow.all_to_all(between, 2)) == pytest.approx(2**12 * 1e-9, rel=0.02)
    assert on_a_line < 0.5 * float(slow.all_to_all(between, 2))


def test_other_numbers_of_processes_scale_bytes_and_rounds_apart() -> None:
    measured = links(world_size=4)
    # No bytes: rounds alone. A ring has 2 (W - 1) of them, an all-to-all W - 1.
    assert float(measured.all_reduce(0, 16)) == pytest.approx(1e-3 * 15 / 3)
    assert float(measured.all_to_all(0, 16)) == pytest.approx(2e-4 * 15 / 3)
    # What each byte adds: 2 (W - 1) / W and (W - 1) / W, against those of 4 processes.
    more = 1 << 24
    by_byte = (15 / 16) / (3 / 4)
    added = float(measured.all_reduce(more, 16)) - float(measured.all_reduce(0, 16))
    assert added == pytest.approx(more / 1e9 * by_byte)
    added = float(measured.all_to_all(more, 16)) - float(measured.all_to_all(0, 16))
    assert added == pytest.approx(more / 2e9 * by_byte)


def test_a_tree_over_nccl_has_few_rounds() -> None:
    ring, tree = links(world_size=8), links(world_size=8, backend="nccl")
    assert float(tree.all_reduce(0, 4096)) == pytest.approx(1e-3 * math.log2(4096) / 3)
    assert float(ring.all_reduce(0, 4096)) == pytest.approx(1e-3 * 4095 / 7)
    assert float(tree.all_to_all(0, 4096)) == float(ring.all_to_all(0, 4096))


def test_a_gather_is_half_an_all_reduce_of_what_it_gathers() -> None:
    measured = links(world_size=4)
    part = 1 << 20
    assert float(measured.all_gather(part, 8)) == pytest.approx(float(measured.all_reduce(8 * part, 8)) / 2)
    assert wire_share("all_gather", 8) * part == wire_share("all_reduce", 8) * 8 * part / 2 == 7 * part


def test_a_gather_that_was_measured_is_taken_as_it_was() -> None:
    curves = (planted(1e-3, 1e9), planted(2e-4, 2e9), planted(5e-4, 1e8))
    measured = Links(CollectiveRates("gloo", 4, *curves))
    assert float(measured.all_gather(1 << 20, 4)) == pytest.approx(5e-4 + (1 << 20) / 1e8)
    assert float(measured.all_gather(1 << 20, 8)) == pytest.approx((5e-4 + (1 << 20) / 1e8) * 7 / 3)


def test_one_process_waits_for_nobody() -> None:
    for collective in ("all_reduce", "all_to_all", "all_gather"):
        assert float(getattr(links(), collective)(1 << 20, 1)) == 0
        assert wire_share(collective, 1) == 0  # type: ignore[arg-type]


def test_arrays_of_sizes_are_what_single_sizes_are() -> None:
    sizes = np.array([0.0, 10.0, 256.0, 1e5, 4e6, 1e9])
    together = links().all_reduce(sizes, 3)
    assert together.tolist() == [float(links().all_reduce(size, 3)) for size in sizes]
    assert (np.diff(together) > 0).all()


def test_noise_does_not_make_a_larger_message_faster() -> None:
    noisy = {"256": 2e-3, "16384": 1e-3, "262144": 1.5e-3, "4194304": 8e-3}
    shaken = Links(CollectiveRates("gloo", 2, noisy, noisy))
    seconds = shaken.all_reduce(np.geomspace(1, 1e9, 200), 2)
    assert (np.diff(seconds) >= 0).all()
    assert float(seconds[0]) == pytest.approx(1e-3), "the size that was disturbed is as fast as the next"
    assert float(shaken.all_reduce(4194304, 2)) == pytest.approx(8e-3)


def test_calls_share_bytes_but_not_latencies() -> None:
    one = Message("dense", "all_reduce", 4e6, 4e6)
    four = Message("dense", "all_reduce", 4e6, 4e6, calls=4)
    assert links().seconds(four, 2) - links().seconds(one, 2) == pytest.approx(3e-3)


def test_a_single_size_is_a_rate_and_no_size_is_an_error() -> None:
    lone = Links(CollectiveRates("gloo", 2, {"1000": 1e-3}, {"1000": 2e-3}))
    assert float(lone.all_reduce(5000, 2)) == pytest.approx(5e-3)
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2"):
        Links(CollectiveRates("gloo", 2, {}, {"1000": 2e-3}))
    with pytest.raises(ConfigError, match="two processes or more"):
        Links(CollectiveRates("gloo", 1, {"1000": 1e-3}, {"1000": 2e-3}))
