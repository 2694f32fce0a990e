"""Synthetic click logs compared with their config: popularity, groups, drift, the planted click probability."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from holdall.common.errors import ConfigError, DataError, HoldallError
from holdall.data.click_log import BLOCK_ROWS, draw_ids, first_grouped
from holdall.data.columns import Columns, Ragged
from holdall.data.dataset import DataSet
from holdall.data.id_map import load_id_maps
from holdall.data.loader import Loader
from holdall.data.synthetic import (
    PRESETS,
    SyntheticConfig,
    generate,
    make_block,
    preset,
    write_prepared,
    write_tsv,
)
from holdall.data.zipf import HEAD, Zipf
from holdall.evaluation.best_possible import best_possible, best_possible_of
from holdall.evaluation.metrics import exact_auc

SMALL = SyntheticConfig(rows=20_000, cardinalities=(3, 50, 2000, 100_000), num_dense=2)
CRITEO = preset("criteo-kaggle", scale=0.001, rows=3_000)


def whole(config: SyntheticConfig) -> Columns:
    return Columns.concatenate(list(generate(config)))


def same(a: Columns, b: Columns) -> bool:
    assert a.probability is not None
    assert b.probability is not None
    return (
        np.array_equal(a.label, b.label)
        and np.array_equal(a.dense, b.dense)
        and np.array_equal(a.ids, b.ids)
        and np.array_equal(a.probability, b.probability)
    )


# Rows


def test_the_same_config_gives_the_same_rows_and_another_seed_others() -> None:
    assert same(whole(SMALL), whole(SMALL))
    other = whole(replace(SMALL, seed=1))
    first = whole(SMALL)
    assert (first.ids != other.ids).mean() > 0.3
    assert not np.array_equal(first.dense, other.dense)
    assert abs(np.corrcoef(first.probability, other.probability)[0, 1]) < 0.05


def test_a_block_can_be_made_on_its_own() -> None:
    config = replace(SMALL, rows=2 * BLOCK_ROWS + 100, drift=0.5, groups=5)
    alone = make_block(config, 2)
    streamed = list(generate(config))
    assert [len(block) for block in streamed] == [BLOCK_ROWS, BLOCK_ROWS, 100]
    assert same(alone, streamed[2])
    assert not same(streamed[0], streamed[1])
    part = Columns.concatenate(list(generate(config, BLOCK_ROWS - 10, BLOCK_ROWS + 10)))
    assert same(part, Columns.concatenate([streamed[0].slice(BLOCK_ROWS - 10, BLOCK_ROWS), streamed[1].slice(0, 10)]))


def test_shapes_and_ranges() -> None:
    rows = whole(SMALL)
    assert rows.dense.shape == (20_000, 2)
    assert rows.dense.dtype == np.float32
    assert (rows.dense >= 0).all()
    assert rows.ids.dtype == np.int32
    assert (rows.ids >= 0).all()
    assert (rows.ids < np.array(SMALL.cardinalities)).all()
    assert set(np.unique(rows.label)) == {0, 1}


def test_bags_have_lengths_from_none_to_the_longest() -> None:
    config = replace(SMALL, bag_lengths=(1, 4, 1, 7))
    rows = whole(config)
    assert rows.ids.shape == (20_000, 2)
    for bag, longest, num_ids in zip(rows.bags, (4, 7), (50, 100_000), strict=True):
        counts = np.bincount(bag.lengths, minlength=longest + 1)
        assert len(counts) == longest + 1
        assert np.allclose(counts / 20_000, 1 / (longest + 1), atol=0.02)
        assert bag.flat.min() >= 0
        assert bag.flat.max() < num_ids


# Popularity


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 1.05, 1.3])
@pytest.mark.parametrize("num_values", [1, 3, HEAD, HEAD + 1, 20_000])
def test_zipf_frequencies_are_those_of_the_formula(exponent: float, num_values: int) -> None:
    """Evenly spaced numbers in place of random ones: counts are then exact to one."""
    num_draws = 400_000
    ranks = Zipf(num_values, exponent).ranks((np.arange(num_draws) + 0.5) / num_draws)
    expected = np.arange(1, num_values + 1) ** -exponent
    expected *= num_draws / expected.sum()
    counts = np.bincount(ranks, minlength=num_values)
    assert len(counts) == num_values
    assert np.abs(np.cumsum(counts) - np.cumsum(expected)).max() < 1.1
    assert Zipf(num_values, exponent).probability(num_values - 1) * num_draws == pytest.approx(expected[-1], rel=1e-5)


def test_zipf_stays_in_range_for_millions_of_values() -> None:
    edge = np.array([0.0, 1.0 - 2.0**-53])
    assert Zipf(10_131_227, 1.05).ranks(edge).tolist() == [0, 10_131_226]
    assert Zipf(10_131_227, 1.0).ranks(edge).tolist() == [0, 10_131_226]


def test_each_feature_has_its_exponent() -> None:
    config = SyntheticConfig(rows=BLOCK_ROWS, cardinalities=(1000, 1000), zipf=(0.5, 1.2), num_dense=0)
    ids = whole(config).ids
    for column, exponent in enumerate((0.5, 1.2)):
        weights = np.arange(1, 1001) ** -exponent
        share = (ids[:, column] < 10).mean()
        assert share == pytest.approx(weights[:10].sum() / weights.sum(), abs=0.01)


# Groups and drift


def test_ids_of_a_group_occur_together() -> None:
    config = SyntheticConfig(rows=60_000, cardinalities=(5000, 8000), zipf=0.5, groups=20, num_dense=0)

    def share_of_pairs_in_one_group(config: SyntheticConfig) -> float:
        ids = whole(config).ids.astype(np.int64)
        first, second = (ids[:, feature] - first_grouped(config.cardinalities[feature]) for feature in (0, 1))
        grouped = (first >= 0) & (second >= 0)
        return float((first[grouped] % 20 == second[grouped] % 20).mean())

    assert share_of_pairs_in_one_group(replace(config, groups=0)) == pytest.approx(1 / 20, abs=0.01)
    # Both are moved to the row's group with 0.8 * 0.8, else they agree by chance.
    assert share_of_pairs_in_one_group(config) == pytest.approx(0.64 + 0.36 / 20, abs=0.02)


def test_groups_leave_popularity_as_it_was() -> None:
    plain = SyntheticConfig(rows=60_000, cardinalities=(5000,), groups=0, num_dense=0)
    ids, grouped = (whole(config).ids[:, 0] for config in (plain, replace(plain, groups=20)))
    for top in (1, 10, 250, 1000, 4000):
        assert (grouped < top).mean() == pytest.approx((ids < top).mean(), abs=0.01)


@pytest.mark.parametrize("drift", [0.0, 0.4, 1.0])
def test_drift_replaces_that_share_of_the_hot_ids(drift: float) -> None:
    config = SyntheticConfig(rows=300_000, cardinalities=(20_000,), drift=drift, num_dense=0)
    ids = whole(config).ids[:, 0]
    tenth = len(ids) // 10
    first, last = (np.argsort(-np.bincount(part)) for part in (ids[:tenth], ids[-tenth:]))
    # Still among the top 150 counts as still hot: where exactly an id ranks is a matter of chance.
    kept = len(set(first[:100].tolist()) & set(last[:150].tolist())) / 100
    assert kept == pytest.approx(1 - 0.9 * drift, abs=0.02 if drift == 0 else 0.12)  # the deciles are 0.9 apart


def test_drift_keeps_ids_a_permutation_of_the_ranks() -> None:
    """A uniform log with drift is still uniform at any time: no id is lost and none counts twice."""
    config = SyntheticConfig(rows=BLOCK_ROWS, cardinalities=(11,), zipf=0.0, drift=1.0, num_dense=0)
    last = whole(config).ids[-20_000:, 0]
    assert np.allclose(np.bincount(last, minlength=11) / 20_000, 1 / 11, atol=0.01)


# The click probability


def test_labels_follow_the_probability() -> None:
    rows = whole(replace(SMALL, rows=BLOCK_ROWS))
    p = rows.probability
    assert p is not None
    assert p.mean() == pytest.approx(SMALL.base_rate, abs=0.005)
    assert rows.label.mean() == pytest.approx(p.mean(), abs=4 * 0.5 / 256)
    for low in np.arange(0.0, 0.8, 0.1):  # calibrated in every band, not on average alone
        band = (p >= low) & (p < low + 0.1)
        assert rows.label[band].mean() == pytest.approx(p[band].mean(), abs=4 * 0.5 / np.sqrt(band.sum()))


def test_each_strength_moves_the_logit_by_that_much() -> None:
    config = replace(SMALL, rows=BLOCK_ROWS)

    def deviation(**strengths: float) -> float:
        off = {"dense_strength": 0.0, "id_strength": 0.0, "pair_strength": 0.0}
        p = whole(replace(config, **(off | strengths))).probability
        assert p is not None
        return float(np.log(p / (1 - p)).std())

    assert deviation() == pytest.approx(0.0, abs=1e-4)
    for name in ("dense_strength", "id_strength", "pair_strength"):
        assert deviation(**{name: 0.7}) == pytest.approx(0.7, rel=0.03)


def test_the_click_probability_depends_on_ids_and_pairs_of_ids() -> None:
    """The same ids give the same probability; with the pair part off, effects of two features add up in the logit."""
    config = SyntheticConfig(rows=BLOCK_ROWS, cardinalities=(4, 5), num_dense=0, zipf=0.3)

    def table(config: SyntheticConfig) -> np.ndarray:
        rows = whole(config)
        logits = np.full((4, 5), np.nan)
        for first in range(4):
            for second in range(5):
                found = rows.probability[(rows.ids[:, 0] == first) & (rows.ids[:, 1] == second)]
                assert len(np.unique(found)) == 1
                logits[first, second] = np.log(found[0] / (1 - found[0]))
        return logits

    def interaction(logits: np.ndarray) -> float:
        return float(np.abs(logits - logits[:1] - logits[:, :1] + logits[0, 0]).max())

    assert interaction(table(replace(config, pair_strength=0.0))) < 1e-4
    assert interaction(table(config)) > 0.3


def test_a_bag_counts_as_the_mean_of_its_ids() -> None:
    config = replace(SMALL, bag_lengths=(1, 3, 1, 1), dense_strength=0.0, pair_strength=0.0)
    rows = whole(config)
    logit = np.log(rows.probability / (1 - rows.probability))
    bag = rows.bags[0]
    by_bag: dict[tuple[int, ...], float] = {}
    checked = 0
    for row in np.flatnonzero((rows.ids == 0).all(axis=1)):  # rows that differ in their bags alone
        by_bag[tuple(bag.values[bag.offsets[row] : bag.offsets[row + 1]].tolist())] = float(logit[row])
    for ids, value in by_bag.items():
        if len(ids) == 2 and all((one,) in by_bag for one in ids):
            assert value == pytest.approx((by_bag[(ids[0],)] + by_bag[(ids[1],)]) / 2, abs=1e-4)
            checked += 1
    assert checked >= 3


def test_best_possible_scores_the_probabilities() -> None:
    p = np.array([0.1, 0.4, 0.35, 0.8])
    y = np.array([0, 0, 1, 1])
    best = best_possible(p, y)
    logloss = -(np.log(0.9) + np.log(0.6) + np.log(0.35) + np.log(0.8)) / 4
    assert best == pytest.approx(
        {
            "auc": 0.75,  # three of the four pairs are in order
            "logloss": logloss,
            "normalized_entropy": logloss / np.log(2),
            "accuracy": 0.75,
            "samples": 4,
        }
    )
    assert np.isfinite(best_possible(np.array([0.0, 1.0, 0.5], dtype=np.float32), np.array([1, 0, 1]))["logloss"])
    with pytest.raises(DataError, match="class"):
        best_possible(p, np.zeros(4))


def test_no_other_score_does_better() -> None:
    rows = whole(replace(SMALL, rows=BLOCK_ROWS))
    best = best_possible(rows.probability, rows.label)
    rng = np.random.default_rng(0)
    noisy = rows.probability * np.exp(0.3 * rng.standard_normal(len(rows)))
    assert best["auc"] == pytest.approx(exact_auc(rows.probability, rows.label))
    assert exact_auc(noisy, rows.label) < best["auc"]
    worse = best_possible(np.clip(rows.probability * 1.2, 0, 0.999), rows.label)
    assert worse["logloss"] > best["logloss"]


# Presets


@pytest.mark.parametrize(
    ("name", "num_dense", "num_features", "total", "auc", "rate"),
    [
        ("criteo-kaggle", 13, 26, 33.76e6, 0.80, 0.256),
        ("criteo-1tb", 13, 26, 32.71e6, 0.80, 0.25),
        ("avazu", 1, 21, 9.45e6, 0.76, 0.17),
    ],
)
def test_presets_have_the_shape_and_the_quality_of_the_real_sets(
    name: str, num_dense: int, num_features: int, total: float, auc: float, rate: float
) -> None:
    full = PRESETS[name]
    assert (full.num_dense, len(full.cardinalities)) == (num_dense, num_features)
    assert sum(full.cardinalities) == pytest.approx(total, rel=0.001)
    config = preset(name, scale=0.005, rows=BLOCK_ROWS)
    assert min(config.cardinalities) == 3
    assert max(config.cardinalities) == round(max(full.cardinalities) * 0.005)
    rows = whole(config)
    assert rows.label.mean() == pytest.approx(rate, abs=0.01)
    assert best_possible(rows.probability, rows.label)["auc"] == pytest.approx(auc, abs=0.015)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 0}, "0 rows"),
        ({"cardinalities": ()}, "at least one id"),
        ({"cardinalities": (5, 0)}, "at least one id"),
        ({"zipf": (1.0,)}, "zipf has 1 entries for 4 features"),
        ({"zipf": -1.0}, "must not be negative"),
        ({"bag_lengths": (1, 2)}, "bag_lengths has 2 entries"),
        ({"bag_lengths": (1, 1, 1, 0)}, "must be 1 or more"),
        ({"drift": 1.5}, "drift is 1.5"),
        ({"base_rate": 1.0}, "base_rate is 1.0"),
        ({"id_strength": -0.1}, "must not be negative"),
    ],
)
def test_configs_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **changes)  # type: ignore[arg-type]


def test_presets_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="did you mean 'criteo-kaggle'"):
        preset("criteo-kagle")
    with pytest.raises(ConfigError, match=r"no 'drfit'.*did you mean 'drift'"):
        preset("avazu", drfit=0.1)
    with pytest.raises(ConfigError, match="scale is 0"):
        preset("avazu", scale=0)


# Files


def test_a_prepared_folder_opens_and_holds_the_log(tmp_path: Path) -> None:
    config = replace(SMALL, bag_lengths=(1, 3, 1, 1), drift=0.5)
    schema = write_prepared(config, tmp_path / "data", valid=0.2, test=0.1)
    assert {name: split.rows for name, split in schema.splits.items()} == {"train": 14_000, "valid": 4000, "test": 2000}
    assert [feature.num_rows for feature in schema.features] == [4, 51, 2001, 100_001]
    rows = whole(config)
    data = DataSet(tmp_path / "data", "valid", verify=True)
    assert (data.schema.features, data.schema.dense, data.schema.splits) == (
        schema.features,
        schema.dense,
        schema.splits,
    )
    assert schema.splits["valid"].positives == data.labels().sum()
    batch = data.slice(0, 4000)
    expected = rows.slice(14_000, 18_000)
    assert np.array_equal(batch.dense.numpy(), expected.dense)
    assert np.array_equal(data.labels(), expected.label)
    assert np.array_equal(data.probability(), expected.probability)
    # The id map leads from the new ids back to the numbers of the log.
    maps = load_id_maps(tmp_path / "data")
    for feature, name in ((0, "C1"), (3, "C4")):
        values = [int(value, 16) for value in maps[name].values.take(batch.ids.bag(feature)[0].numpy()).to_pylist()]
        assert values == expected.ids[:, 0 if feature == 0 else 2].tolist()
    bag_values, bag_offsets, _ = batch.ids.bag(1)
    assert np.array_equal(np.diff(bag_offsets.numpy()), expected.bags[0].lengths)
    values = [int(value, 16) for value in maps["C2"].values.take(bag_values.numpy()).to_pylist()]
    assert values == expected.bags[0].flat.tolist()


def test_prepared_ids_are_in_the_training_split_s_popularity_order(tmp_path: Path) -> None:
    write_prepared(replace(SMALL, drift=0.8, groups=4), tmp_path / "data")
    maps = load_id_maps(tmp_path / "data")
    ids = DataSet(tmp_path / "data").columns(0, 16_000).ids
    for column, name in enumerate(maps):
        counts = np.bincount(ids[:, column], minlength=maps[name].num_rows)
        assert np.array_equal(counts, maps[name].counts)
        assert (np.diff(counts) <= 0).all()
        assert maps[name].unseen == len(counts) - 1


def test_the_loader_gives_a_synthetic_set(tmp_path: Path) -> None:
    write_prepared(CRITEO, tmp_path / "data")
    data = DataSet(tmp_path / "data")
    batches = list(Loader(data, 500).epoch(0))
    assert [len(batch) for batch in batches] == [500] * 4 + [400]
    assert batches[0].ids.values.shape == (26, 500)
    assert sum(float(batch.label.sum()) for batch in batches) == data.schema.splits["train"].positives
    assert 0.7 < best_possible_of(data)["auc"] < 0.9


def test_prepared_folders_are_not_overwritten_unasked(tmp_path: Path) -> None:
    write_prepared(replace(SMALL, rows=100), tmp_path / "data")
    with pytest.raises(HoldallError, match="exists already"):
        write_prepared(replace(SMALL, rows=100), tmp_path / "data")
    with pytest.raises(ConfigError, match="leave rows to train on"):
        write_prepared(SMALL, tmp_path / "other", valid=0.5, test=0.5)
    assert write_prepared(replace(SMALL, rows=200), tmp_path / "data", overwrite=True).splits["train"].rows == 160


@pytest.mark.parametrize("suffix", [".tsv", ".tsv.gz"])
def test_tsv_has_criteo_s_layout_and_the_rows_of_the_log(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"day_0{suffix}"
    write_tsv(CRITEO, path)
    rows = whole(CRITEO)
    content = gzip.decompress(path.read_bytes()) if suffix.endswith(".gz") else path.read_bytes()
    lines = [line.split("\t") for line in content.decode().splitlines()]
    assert len(lines) == 3000
    assert {len(line) for line in lines} == {40}
    assert [int(line[0]) for line in lines] == rows.label.tolist()
    counts = np.array([[int(cell or 0) for cell in line[1:14]] for line in lines])
    assert np.allclose(np.log1p(counts), rows.dense, atol=1e-6)
    for feature in range(26):
        value_of: dict[int, str] = {}
        for line, number in zip(lines, rows.ids[:, feature].tolist(), strict=True):
            assert value_of.setdefault(number, line[14 + feature]) == line[14 + feature]
        assert len(set(value_of.values())) == len(value_of)  # one value an id, one id a value
        assert all(value == "" or (len(value) == 8 and int(value, 16) >= 0) for value in value_of.values())
    cells = [cell for line in lines for cell in line]
    assert 0.02 < cells.count("") / len(cells) < 0.3
    probability = np.load(tmp_path / f"day_0{suffix}.probability.npy", allow_pickle=False)
    assert np.array_equal(probability, rows.probability)
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name, f"{path.name}.probability.npy"]


def test_one_log_in_several_tsv_files(tmp_path: Path) -> None:
    write_tsv(CRITEO, tmp_path / "all.tsv")
    write_tsv(CRITEO, tmp_path / "a.tsv", stop=1000)
    write_tsv(CRITEO, tmp_path / "b.tsv", start=1000)
    parts = [(tmp_path / name).read_text().splitlines() for name in ("a.tsv", "b.tsv", "all.tsv")]
    assert [len(part) for part in parts] == [1000, 2000, 3000]
    ids = [[line.split("\t")[14:] for line in part] for part in parts]
    assert ids[0] + ids[1] == ids[2]


def test_tsv_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="13 dense columns and 26 features"):
        write_tsv(SMALL, tmp_path / "x.tsv")
    with pytest.raises(ConfigError, match="with bags"):
        write_tsv(replace(CRITEO, bag_lengths=(2,) * 26), tmp_path / "x.tsv")
    with pytest.raises(ConfigError, match=r"rows 0\.\.4000 of a log of 3000"):
        write_tsv(CRITEO, tmp_path / "x.tsv", stop=4000)
    assert list(tmp_path.iterdir()) == []
    write_tsv(CRITEO, tmp_path / "x.tsv")
    with pytest.raises(HoldallError, match="exists already"):
        write_tsv(CRITEO, tmp_path / "x.tsv")


def test_ids_do_not_depend_on_the_dense_columns() -> None:
    """Every kind of number has its own stream, so that one dial does not turn another."""
    one, other = (list(draw_ids(replace(SMALL, num_dense=n), 0, 1000)) for n in (2, 5))
    for a, b in zip(one, other, strict=True):
        assert not isinstance(a, Ragged)
        assert not isinstance(b, Ragged)
        assert np.array_equal(a, b)
