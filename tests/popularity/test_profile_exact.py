"""The profile of a prepared set: planted counts, hot inputs, drift, the file it is kept in, and bad input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import holdall
from holdall import Profile, ProfileConfig, Schema
from holdall.common.errors import ConfigError, DataError, IdError
from holdall.data.id_map import load_id_maps
from holdall.popularity.choose_hot_rows import hot_inputs, hot_rows
from holdall.popularity.curves import log_grid, rounded
from holdall.popularity.drift import Drift
from holdall.popularity.profile import Curve, HotCurve
from holdall.popularity.thresholds import threshold_grid
from tests.edits import edit_json, flip_bit
from tests.popularity.planted_sets import in_popularity_order, write_set, zipf


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Ten rows: c0 has counts 6, 3, 1 and two rows never looked up; c1 is 0 throughout but once."""
    ids = np.array([[0, 0], [0, 0], [1, 0], [0, 0], [0, 1], [1, 0], [2, 0], [0, 0], [1, 0], [0, 0]])
    return write_set(tmp_path / "small", ids, [5, 3])


def test_counts_of_ten_rows(small: Path) -> None:
    profile = holdall.profile(small)
    c0 = profile.feature("c0")
    assert (c0.lookups, c0.distinct, c0.singletons, c0.num_rows) == (10, 3, 1, 5)
    assert [profile.coverage("c0", k) for k in (0, 1, 2, 3, 5, 99)] == [0.0, 0.6, 0.9, 1.0, 1.0, 1.0]
    assert [profile.rows_for_coverage("c0", share) for share in (0.5, 0.6, 0.9, 0.91, 1.0)] == [1, 1, 2, 3, 3]
    assert profile.expected_hits("c0", 2, batch_size=100) == pytest.approx(90.0)
    assert profile.miss_ratio("c0", 2, policy="static") == pytest.approx(0.1)
    assert profile.miss_ratio("c0", 5) == pytest.approx(0.3)  # three first lookups, nothing else
    assert c0.coverage.low == c0.coverage.share == c0.coverage.high


def test_hot_inputs_of_ten_rows(small: Path) -> None:
    hot = holdall.profile(small).hot
    by_threshold = dict(zip(hot.threshold, zip(hot.inputs, hot.rows["c0"], hot.rows["c1"], strict=True), strict=True))
    # At a tenth every row seen is hot: the threshold of one lookup.
    assert by_threshold == {0.1: (1.0, 3, 2)}


def test_hot_inputs_agree_with_the_choice_of_hot_rows(tmp_path: Path) -> None:
    """At every threshold, hot inputs are those of the prefixes with that many rows."""
    rng = np.random.default_rng(0)
    ids = np.stack([in_popularity_order(zipf(rng, n, 20_000), n) for n in (50, 3000)], axis=1)
    folder = write_set(tmp_path / "data", ids, [51, 3001])
    profile = holdall.profile(folder, tmp_path / "popularity.json")
    data = holdall.DataSet(folder)
    assert len(profile.hot.threshold) > 10
    for place, inputs in enumerate(profile.hot.inputs):
        rows = {name: counts[place] for name, counts in profile.hot.rows.items()}
        assert hot_inputs(data, rows).mean() == pytest.approx(inputs, abs=1e-6)
    assert profile.hot.inputs[-1] == 1.0
    counts = profile.counts()
    np.testing.assert_array_equal(counts["c1"], np.bincount(ids[:, 1], minlength=3001))
    budget = 64 * 500
    chosen = hot_rows(counts, 64, budget)
    assert profile.hot_inputs(budget, row_bytes=64) == pytest.approx(hot_inputs(data, chosen).mean(), abs=0.01)


def test_counts_are_safetensors_with_the_same_bytes_every_time(data: Path, tmp_path: Path) -> None:
    holdall.profile(data, tmp_path / "popularity.json")
    counts = tmp_path / "popularity.safetensors"
    first = [counts.read_bytes(), (tmp_path / "popularity.json").read_bytes()]
    made = Profile.load(tmp_path / "popularity.json")
    arrays = load_file(counts)
    assert {name: rows.dtype.name for name, rows in arrays.items()} == dict.fromkeys(arrays, "int32")
    with safe_open(counts, framework="np") as file:
        assert file.metadata() == {"fingerprint": made.source.fingerprint, "rows_read": str(made.rows_read)}
    wide = {"few": np.zeros(0, dtype=np.int64), "many": np.array([2**40, 3]), "shares": np.array([0.5], np.float32)}
    for _ in range(8):
        made.save(tmp_path / "other.json", wide)
        assert {name: rows.tolist() for name, rows in load_file(tmp_path / "other.safetensors").items()} == {
            "few": [],
            "many": [2**40, 3],
            "shares": [0.5],
        }
        made.save(tmp_path / "popularity.json", arrays)
        assert [counts.read_bytes(), (tmp_path / "popularity.json").read_bytes()] == first
    assert len(list(tmp_path.iterdir())) == 4


def test_counts_are_those_of_the_id_maps(data: Path, tmp_path: Path) -> None:
    counts = holdall.profile(data, tmp_path / "popularity.json").counts()
    maps = load_id_maps(data)
    assert set(counts) == set(maps)
    for name, id_map in maps.items():
        np.testing.assert_array_equal(counts[name], id_map.counts)


def test_bags_and_shared_tables(tmp_path: Path) -> None:
    """A bag counts each of its values; an empty one leaves the input to its other lookups; tables pool."""
    ids = np.array([[0, 0], [0, 1], [1, 0], [0, 0]])
    bags = {"tags": [[0, 0, 1], [], [2], []]}
    folder = write_set(tmp_path / "data", ids, [3, 3], bags=bags, tables={"c0": "both", "c1": "both"})
    profile = holdall.profile(folder, tmp_path / "popularity.json")
    tags = profile.feature("tags")
    assert (tags.lookups, tags.distinct, tags.singletons) == (4, 3, 2)
    assert profile.coverage("tags", 1) == 0.5
    assert profile.expected_hits("tags", 1, batch_size=8) == pytest.approx(4.0)  # one lookup an input, half of them hot
    counts = profile.counts()
    assert counts["both"].tolist() == [6, 2, 0]
    assert counts["tags"].tolist() == [2, 1, 1, *[0] * 7]
    assert profile.hot.rows.keys() == {"both", "tags"}
    assert profile.feature("c0").table == "both"


def test_the_coldest_lookup_decides_with_bags(tmp_path: Path) -> None:
    rows = 4000
    bags = {"tags": [[0]] * (rows - 1) + [[0, 5]]}  # one input has a rare value beside a popular one
    folder = write_set(tmp_path / "data", np.zeros((rows, 1), dtype=int), [2], bags=bags)
    hot = holdall.profile(folder).hot
    assert hot.inputs[0] == pytest.approx(1 - 1 / rows)
    assert hot.inputs[-1] == 1.0


def test_drift_of_a_hot_set_that_moves(tmp_path: Path) -> None:
    """Feature c0 has the same four hot ids throughout, c1 four others in every eighth of the log."""
    rows = 8000
    rng = np.random.default_rng(1)
    still = rng.integers(0, 4, rows)
    moving = rng.integers(0, 4, rows) + 4 * (np.arange(rows) * 8 // rows)
    folder = write_set(tmp_path / "data", np.stack([still, moving], axis=1), [5, 33])
    profile = holdall.profile(folder)
    kept, gone = profile.feature("c0").drift, profile.feature("c1").drift
    assert kept is not None
    assert gone is not None
    assert kept.kept == (1.0,) * 7
    assert kept.lost == 0.0
    assert gone.kept == gone.hits == (0.0,) * 7
    assert min(gone.best) > 0.9
    assert gone.lost == 1.0
    one_window = holdall.profile(folder, config=ProfileConfig(windows=1))
    assert one_window.feature("c1").drift is None


def test_no_drift_of_sets_without_an_order(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "data", np.zeros((100, 1), dtype=int), [2], source={"format": "movielens"})
    profile = holdall.profile(folder)
    assert profile.order == "none"
    assert profile.feature("c0").drift is None
    assert holdall.profile(folder, config=ProfileConfig(order="time")).feature("c0").drift is not None


def test_save_and_load(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "popularity.json"
    made = holdall.profile(data, path)
    loaded = Profile.load(path)
    assert loaded == made
    loaded.check(Schema.load(data))
    assert loaded.counts().keys() == {feature.name for feature in Schema.load(data).features}


def test_the_file_stays_small(small: Path, tmp_path: Path) -> None:
    """26 features with the table sizes of Criteo Kaggle, every number with all its digits: under 200 KB."""
    sizes = [1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194, 27, 14_992]
    sizes += [5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572]
    made = holdall.profile(small)
    rng = np.random.default_rng(0)
    features = []
    for number, size in enumerate(sizes, start=1):
        grid = tuple(log_grid(size).tolist())
        shares = [rounded(np.sort(rng.random(len(grid)))) for _ in range(4)]
        curve = Curve(k=grid, share=shares[0], low=shares[1], high=shares[2])
        drift = Drift(k=100, kept=rounded(rng.random(7)), hits=rounded(rng.random(7)), best=rounded(rng.random(7)))
        first = made.features[0]
        features.append(
            replace(first, name=f"C{number}", table=f"C{number}", coverage=curve, lru=shares[3], drift=drift)
        )
    thresholds = tuple(threshold_grid(45_000_000).tolist())
    rows = {feature.name: tuple(rng.integers(10**6, 10**7, len(thresholds)).tolist()) for feature in features}
    share = rounded(rng.random(len(thresholds)))
    hot = HotCurve(threshold=thresholds, rows=rows, inputs=share, low=share, high=share)
    path = tmp_path / "popularity.json"
    replace(made, features=tuple(features), hot=hot).save(path)
    assert path.stat().st_size < 200_000
    assert len(Profile.load(path).features) == 26


def test_a_profile_of_another_data_set_is_refused(data: Path, small: Path, tmp_path: Path) -> None:
    profile = holdall.profile(small, tmp_path / "popularity.json")
    with pytest.raises(DataError, match=r"belongs to another data set.*'small'.*2 features.*3 features"):
        profile.check(Schema.load(data))


def test_counts_of_another_profile_are_refused(data: Path, small: Path, tmp_path: Path) -> None:
    mine = holdall.profile(small, tmp_path / "mine.json")
    holdall.profile(data, tmp_path / "other.json")
    (tmp_path / "mine.safetensors").write_bytes((tmp_path / "other.safetensors").read_bytes())
    with pytest.raises(DataError, match=r"mine\.safetensors (was changed|has .* bytes instead of)"):
        mine.counts()
    old = replace(mine, counts_hash=None)
    with pytest.raises(DataError, match="counts of another data set"):
        old.counts()
    (tmp_path / "mine.safetensors").write_bytes(b"not a file of tensors")
    with pytest.raises(DataError, match="cannot be read"):
        old.counts()
    (tmp_path / "mine.safetensors").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        old.counts()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "version 99"),
        ({"format": "holdall-data"}, "not a holdall-popularity document"),
        ({"surprise": 1}, "unknown field 'surprise'"),
        ({"hot": {}}, r"'hot\.threshold' is missing"),
        ({"counts_file": "../../etc/passwd"}, "outside its folder"),
    ],
)
def test_a_damaged_file_is_refused(small: Path, tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "popularity.json"
    holdall.profile(small, path)
    edit_json(path, lambda document: document.update(change))
    with pytest.raises(DataError, match=message):
        Profile.load(path).counts()


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('{"format": "holdall-popul')
    with pytest.raises(DataError, match="cannot be read as JSON"):
        Profile.load(tmp_path / "cut.json")
    with pytest.raises(DataError, match="does not exist"):
        Profile.load(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        ("share", [0.9, 0.6, 1.0, 1.0, 1.0], "not rising"),
        ("share", [0.5], "different lengths"),
        ("high", [0.6, 0.9, 1.0, 1.0, 7.0], "not between 0 and 1"),
        ("k", [1, 2, 2, 4, 5], "not rising"),
    ],
)
def test_a_curve_that_cannot_be_is_refused(
    small: Path, tmp_path: Path, key: str, values: list[float], message: str
) -> None:
    path = tmp_path / "popularity.json"
    holdall.profile(small, path)
    edit_json(path, lambda document: document["features"][0]["coverage"].update({key: values}))
    with pytest.raises(DataError, match=message):
        Profile.load(path)


@pytest.mark.parametrize("sample", [0.0, -0.1, 1.01, float("nan")])
def test_a_sample_out_of_range(sample: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        ProfileConfig(sample=sample)


def test_bad_input_is_named(data: Path, small: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="windows is 0"):
        ProfileConfig(windows=0)
    with pytest.raises(ConfigError, match="nothing to profile"):
        holdall.profile([])
    with pytest.raises(ConfigError, match="is a folder: name the file to write"):
        holdall.profile(small, tmp_path)
    with pytest.raises(ConfigError, match="is where the counts go"):
        holdall.profile(small, tmp_path / "popularity.safetensors")
    with pytest.raises(ConfigError, match="go with raw files"):
        holdall.profile(small, config=ProfileConfig(format="criteo"))
    with pytest.raises(ConfigError, match="profile it alone"):
        holdall.profile([small, data])
    with pytest.raises(DataError, match="no split 'test'"):
        holdall.profile(small, config=ProfileConfig(split="test"))
    with pytest.raises(DataError, match=r"without a schema\.json"):
        holdall.profile(tmp_path)
    empty = write_set(tmp_path / "empty", np.zeros((0, 1), dtype=int), [2])
    with pytest.raises(DataError, match="no rows to profile"):
        holdall.profile(empty)
    unused = write_set(tmp_path / "unused", np.zeros((4, 1), dtype=int), [2], bags={"tags": [[], [], [], []]})
    with pytest.raises(DataError, match=r"feature 'tags'.*has no lookups in the 4 rows"):
        holdall.profile(unused)
    for wrong in (7, -1):
        outside = write_set(tmp_path / f"outside{wrong}", np.array([[0], [wrong]]), [2])
        with pytest.raises(IdError, match=f"feature 'c0'.*has id {wrong} but its table has 2 rows"):
            holdall.profile(outside)
    (small / "train-00000.arrow").write_bytes(b"cut short")
    with pytest.raises(DataError, match="truncated"):
        holdall.profile(small)


def test_unknown_features_and_shares(small: Path) -> None:
    profile = holdall.profile(small)
    with pytest.raises(ConfigError, match="no feature 'c9'"):
        profile.coverage("c9", 1)
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        profile.rows_for_coverage("c0", 1.5)
    with pytest.raises(DataError, match="no counts of single rows"):
        profile.counts()


@pytest.mark.parametrize("place", [0.1, 0.5, 0.99])
def test_a_flipped_bit_in_either_file_is_refused(small: Path, tmp_path: Path, place: float) -> None:
    path = tmp_path / "popularity.json"
    holdall.profile(small, path)
    counts = path.with_suffix(".safetensors")
    before = counts.read_bytes()
    flip_bit(counts, place)
    with pytest.raises(DataError, match=r"popularity\.safetensors was changed: .*in popularity\.json; make it again"):
        Profile.load(path).counts()
    counts.write_bytes(before)
    assert Profile.load(path).counts()
    document = path.read_text()
    path.write_text(document.replace('"rows_read": ', '"rows_read": 1'))
    with pytest.raises(DataError, match=r"popularity\.json was changed after it was written: .*make it again"):
        Profile.load(path)


def test_a_profile_of_an_earlier_version_is_read(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "popularity.json"
    holdall.profile(small, path)

    def without_hashes(document: dict[str, object]) -> None:
        del document["counts_hash"], document["sha256"]

    edit_json(path, without_hashes)
    assert Profile.load(path).counts_hash is None
    assert Profile.load(path).counts()
