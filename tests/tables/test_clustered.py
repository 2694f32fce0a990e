"""Clustered tables: shared rows of a fresh table, and k-means over trained rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.tables import Clustered
from holdall.tables.clustered import ClusteredTable
from holdall.tables.fitting import BLOCK_NUMBERS


def fitted(weight: Tensor, clusters: int, counts: Tensor | None = None, iterations: int = 10) -> ClusteredTable:
    table = Clustered(clusters, iterations).build(*weight.shape, dtype=weight.dtype)
    assert isinstance(table, ClusteredTable)
    table.fit_rows(weight, counts)
    return table


def test_a_fresh_table_shares_modulo_the_clusters() -> None:
    table = Clustered(clusters=4).build(11, 3)
    weight = table.materialize()
    assert torch.equal(weight, weight[:4][torch.arange(11) % 4])
    assert weight[:4].unique(dim=0).shape[0] == 4


@pytest.mark.parametrize(
    ("clusters", "dtype"), [(256, torch.uint8), (257, torch.int16), (2**15, torch.int16), (2**15 + 1, torch.int32)]
)
def test_assignments_take_the_smallest_type(clusters: int, dtype: torch.dtype) -> None:
    num_rows = 2**16 + 7
    table = Clustered(clusters=clusters).build(num_rows, 1)
    assert table.assignment.dtype == dtype
    assert table.num_bytes() == num_rows * dtype.itemsize + 4 * clusters
    assert torch.equal(table.assignment.long(), torch.arange(num_rows) % clusters)


def test_past_two_to_the_24_rows() -> None:
    table = Clustered(clusters=251).build(2**24 + 5, 2)
    ids = torch.tensor([0, 2**24 - 1, 2**24, 2**24 + 1, 2**24 + 4])
    expected = table.centroids[[int(i) % 251 for i in ids]]
    assert torch.equal(table.rows(ids), expected)


def test_a_table_of_few_distinct_rows_is_fitted_exactly() -> None:
    """All distinct rows are found, although the popular rows are copies of one and the last occurs once, at the end."""
    distinct = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    of = torch.cat((torch.zeros(20, dtype=torch.int64), torch.arange(4).repeat(9), torch.tensor([4])))
    table = fitted(distinct[of], clusters=5)
    assert torch.equal(table.materialize(), distinct[of])
    assert table.fit_error == 0
    spare = fitted(distinct[of], clusters=8)  # more clusters than distinct rows
    assert torch.equal(spare.materialize(), distinct[of])
    assert fitted(distinct[of], clusters=4).fit_error > 0


def test_a_materialised_table_of_the_same_method_is_fitted_exactly() -> None:
    weight = Clustered(clusters=24).build(500, 8, generator=torch.Generator().manual_seed(1)).materialize()
    assert torch.equal(Clustered(clusters=24).fit(weight).materialize(), weight)


def test_the_popular_rows_are_the_seeds() -> None:
    """The first rows stay the centroids, in order, where nothing moves them; of equal distances the first counts."""
    weight = torch.tensor([[0.0], [10.0], [20.0], [10.0], [0.0], [20.0]])
    table = fitted(weight, clusters=3)
    assert table.centroids.flatten().tolist() == [0, 10, 20]
    assert table.assignment.tolist() == [0, 1, 2, 1, 0, 2]


def test_planted_clusters_are_found() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = 10 * torch.randn(6, 4, generator=generator)
    of = torch.cat((torch.arange(6), torch.randint(6, (3000,), generator=generator)))
    weight = centres[of] + 0.1 * torch.randn(3006, 4, generator=generator)
    table = fitted(weight, clusters=6)
    assert torch.equal(table.assignment.long(), of)
    means = torch.stack([weight[of == cluster].mean(0) for cluster in range(6)])
    torch.testing.assert_close(table.centroids.detach(), means, rtol=1e-5, atol=1e-6)
    assert table.fit_error == pytest.approx(float((weight - means[of]).norm() / weight.norm()), rel=1e-4)


def test_counts_weigh_the_rows() -> None:
    weight = torch.tensor([[0.0], [100.0], [1.0], [103.0], [98.0]])
    table = fitted(weight, clusters=2, counts=torch.tensor([3, 1, 1, 2, 0]))
    assert table.centroids.flatten().tolist() == [pytest.approx(0.25), pytest.approx(102.0)]


def test_an_emptied_cluster_moves_to_the_row_that_is_worst_off() -> None:
    """Two rows pull the third seed away, then change to another cluster: without a move it would stay empty."""
    weight = torch.tensor([[1.0, 14], [18, 20], [4, 17], [13, 6], [15, 4]])
    first, alone, third, *below = fitted(weight, clusters=3).assignment.tolist()
    assert first == third
    assert below[0] == below[1]
    assert len({first, alone, below[0]}) == 3


def test_fits_over_several_blocks_are_deterministic() -> None:
    num_rows = BLOCK_NUMBERS // 64 + 1000
    weight = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(0))
    first, second = (fitted(weight, clusters=40, iterations=3) for _ in range(2))
    assert torch.equal(first.assignment, second.assignment)
    assert torch.equal(first.centroids, second.centroids)
    distances = torch.cdist(weight, first.centroids.detach())
    chosen = distances.gather(1, first.assignment.long()[:, None])[:, 0]
    torch.testing.assert_close(chosen, distances.amin(dim=1), rtol=1e-4, atol=1e-5)
    more = fitted(weight, clusters=40, iterations=8)
    assert more.fit_error < first.fit_error < fitted(weight, clusters=10, iterations=3).fit_error


def test_centroids_train_after_a_fit() -> None:
    weight = torch.tensor([[1.0], [2.0], [1.0]])
    table = fitted(weight, clusters=2)
    table.rows(torch.tensor([0, 2, 1])).sum().backward()
    assert table.centroids.grad.to_dense().flatten().tolist() == [2, 1]


@pytest.mark.parametrize(("num_rows", "dim"), [(1000, 16), (100_000, 16), (1_000_000, 128)])
def test_for_bytes_uses_the_budget(num_rows: int, dim: int) -> None:
    for share in (2, 4, 20, 60):
        budget = 4 * num_rows * dim // share
        if budget < num_rows + 4 * dim:
            with pytest.raises(ConfigError, match=f"at least {num_rows + 4 * dim} bytes"):
                Clustered.for_bytes(num_rows, dim, budget)
            continue
        method = Clustered.for_bytes(num_rows, dim, budget)
        assert method.num_bytes(num_rows, dim) <= budget
        assert Clustered(method.clusters + 1).num_bytes(num_rows, dim) > budget


def test_bad_settings_and_counts() -> None:
    with pytest.raises(ConfigError, match="clusters must be at least 1"):
        Clustered(clusters=0)
    with pytest.raises(ConfigError, match="iterations must be at least 1"):
        Clustered(clusters=2, iterations=0)
    with pytest.raises(ConfigError, match="counts must be 3 numbers"):
        fitted(torch.zeros(3, 2), 2, counts=torch.ones(2))
    with pytest.raises(ConfigError, match="least value -1"):
        fitted(torch.zeros(3, 2), 2, counts=torch.tensor([1, -1, 1]))
