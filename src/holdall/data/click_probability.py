"""Planted click probability of synthetic logs, for any row, without tables.

    logit = bias + a_dense * D / sd(D) + a_ids * E / sd(E) + a_pairs * P / sd(P)
    D = sum_j w_j x_j                                          linear in the dense values
    E = sum_f e_f(id_f)                                        an effect of every id
    P = sum_{f<g} <v_f(id_f), v_g(id_g)>                       a factorisation machine of rank k

`e_f(id)` and `v_f(id)` are uniform numbers made from a hash of (seed, feature, id), times the feature's weight and a
scale that falls with the id's rank: `(1 + rank / 100)^-0.5`. Rare ids thus matter less, as they do in models fitted to
real logs; their effects cannot be learnt from the few rows they occur in, so without it most of the signal would be
out of any model's reach. A bag counts as the mean of its ids, an empty one as nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from holdall.data.columns import Ragged, offsets_of
from holdall.data.splits import hash_numbers

FloatArray = npt.NDArray[np.float32]
SCALE_RANK = 100.0
SCALE_POWER = 0.5
_UNIT = np.float32(np.sqrt(12.0) / 65536.0)  # of a 16-bit number, so that the uniform number has unit variance


def hash_ids(ids: npt.NDArray[np.int64], *salt: int) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of (salt..., id) for every id."""
    key = 0
    for part in salt:
        key = int(hash_numbers(np.array([part]), key)[0])
    return hash_numbers(ids, key)


def hash_uniform(ids: npt.NDArray[np.int64], *salt: int) -> npt.NDArray[np.float64]:
    """A number of [0, 1) from the hash of (salt..., id)."""
    return (hash_ids(ids, *salt) >> np.uint64(11)).astype(np.float64) * 2.0**-53


# Salts that keep the uses of the hash apart.
_IDS, _FEATURE_WEIGHT, _DENSE_WEIGHT = 101, 102, 103


@dataclass(frozen=True, kw_only=True)
class ClickProbability:
    """Probability as defined above; made by `calibrated`, which measures the standard deviations and finds the bias."""

    seed: int
    cardinalities: tuple[int, ...]
    num_dense: int
    rank: int
    strengths: tuple[float, float, float]
    """Standard deviation of the dense, the id and the pair part of the logit."""
    means: tuple[float, float, float] = (0.0, 0.0, 0.0)
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)
    bias: float = 0.0

    def probability(self, dense: FloatArray, ids: Sequence[npt.NDArray[np.int64] | Ragged]) -> FloatArray:
        """[B] click probabilities of rows with dense values [B, N] and, for each feature, an id or a bag a row."""
        parts = self.parts(dense, ids)
        logit = np.full(len(dense), self.bias, dtype=np.float32)
        for part, mean, factor in zip(parts, self.means, self.factors, strict=True):
            logit += (part - np.float32(mean)) * np.float32(factor)
        return sigmoid(logit)

    def parts(
        self, dense: FloatArray, ids: Sequence[npt.NDArray[np.int64] | Ragged]
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """The three parts D, E and P, each [B], before they are scaled."""
        columns = np.arange(self.num_dense)
        weights = (2.0 * hash_uniform(columns, self.seed, _DENSE_WEIGHT) - 1.0).astype(np.float32)
        effects = np.zeros(len(dense), dtype=np.float32)
        total = np.zeros((self.rank, len(dense)), dtype=np.float32)
        squares = np.zeros(len(dense), dtype=np.float32)
        for feature, values in enumerate(ids):
            numbers = self.numbers(feature, values)
            effects += numbers[0]
            vectors = numbers[1:]
            total += vectors
            squares += np.einsum("kb,kb->b", vectors, vectors)
        pairs = 0.5 * (np.einsum("kb,kb->b", total, total) - squares)
        return dense @ weights, effects, pairs

    def numbers(self, feature: int, values: npt.NDArray[np.int64] | Ragged) -> FloatArray:
        """[1 + k, B]: the effect and the vector of each row's id, or their mean over its bag."""
        if isinstance(values, Ragged):
            return _mean_of_bags(self.numbers(feature, values.flat.astype(np.int64)), values.lengths)
        # One hash holds four 16-bit numbers.
        num_hashes = -(-(1 + self.rank) // 4)
        hashes = [hash_ids(values, self.seed, _IDS, feature, number) for number in range(num_hashes)]
        quarters = np.concatenate([one.view(np.uint16).reshape(-1, 4).T for one in hashes])[: 1 + self.rank]
        numbers = (quarters.astype(np.float32) - np.float32(32767.5)) * _UNIT
        weight = 0.5 + hash_uniform(np.array([feature]), self.seed, _FEATURE_WEIGHT)[0]
        # Drift swaps an id with the one half a table away: both count by the rank of the more popular.
        rank = values % max(1, self.cardinalities[feature] // 2)
        numbers *= (weight * (1.0 + rank / SCALE_RANK) ** -SCALE_POWER).astype(np.float32)
        return numbers

    def calibrated(
        self, dense: FloatArray, ids: Sequence[npt.NDArray[np.int64] | Ragged], base_rate: float
    ) -> ClickProbability:
        """The probability whose parts have the stated strengths and whose mean on these rows is `base_rate`."""
        parts = self.parts(dense, ids)
        means = tuple(float(part.mean()) for part in parts)
        deviations = tuple(float(part.std()) for part in parts)
        # A part that does not vary (no dense columns, one id per feature) has nothing to scale.
        factors = tuple(
            strength / deviation if deviation > 1e-6 else 0.0
            for strength, deviation in zip(self.strengths, deviations, strict=True)
        )
        scaled = replace(self, means=means, factors=factors, bias=0.0)  # type: ignore[arg-type]
        logit = np.sum(
            [(part - mean) * factor for part, mean, factor in zip(parts, means, factors, strict=True)], axis=0
        )
        low, high = -30.0, 30.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if sigmoid(logit + middle).mean() < base_rate else (low, middle)
        return replace(scaled, bias=(low + high) / 2)


def sigmoid(logit: FloatArray) -> FloatArray:
    """1 / (1 + exp(-logit)), without overflow."""
    return (0.5 * (1.0 + np.tanh(0.5 * logit))).astype(np.float32)


def _mean_of_bags(numbers: FloatArray, lengths: npt.NDArray[np.generic]) -> FloatArray:
    """[C, R] means over consecutive runs of the columns of [C, L]; 0 for runs of length 0."""
    means = np.zeros((len(numbers), len(lengths)), dtype=np.float32)
    filled = np.flatnonzero(lengths)
    if len(filled):
        starts = offsets_of(lengths)[filled]
        means[:, filled] = np.add.reduceat(numbers, starts, axis=1) / lengths[filled]
    return means
