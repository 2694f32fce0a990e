"""Profiles of raw files: as those of the prepared set, in bounded memory, whole and sampled."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

import holdall
from holdall import Profile, ProfileConfig, Schema
from holdall.common.errors import ConfigError, DataError
from holdall.data.synthetic import preset, write_tsv
from holdall.popularity.raw_stream import copy_sample
from tests.data.raw_files import criteo_line, write_lines


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("raw") / "clicks.tsv"
    write_tsv(preset("criteo-kaggle", scale=3e-4, rows=12_000), path)
    return path


@pytest.fixture(scope="module")
def prepared(log: Path) -> Path:
    out = log.parent / "data"
    holdall.prepare([log], out)
    return out


def test_as_the_prepared_set(log: Path, prepared: Path) -> None:
    """With room for all ids the stream's numbers are the prepared set's, but for the missing unseen row."""
    raw, exact = holdall.profile(log), holdall.profile(prepared)
    assert raw.rows_read == exact.rows_read
    assert raw.method == "stream"
    for feature in exact.features:
        other = raw.feature(feature.name)
        assert (other.lookups, other.distinct, other.singletons) == (
            feature.lookups, feature.distinct, feature.singletons
        )  # fmt: skip
        for k in (1, 3, 10, 100):
            assert raw.coverage(feature.name, k) == pytest.approx(exact.coverage(feature.name, k), abs=2e-3)
            assert raw.miss_ratio(feature.name, k) == pytest.approx(exact.miss_ratio(feature.name, k), abs=0.01)
        assert other.drift is not None
        assert feature.drift is not None
        assert other.drift.lost == pytest.approx(feature.drift.lost, abs=0.02)
    assert raw.hot.threshold == exact.hot.threshold
    np.testing.assert_allclose(raw.hot.inputs, exact.hot.inputs, atol=1e-6)  # all rows fit the reservoir
    assert raw.hot.rows == exact.hot.rows


def test_few_counters(log: Path, prepared: Path) -> None:
    """128 counters for thousands of ids: bounds still hold, and the head of the curve is right."""
    raw, exact = holdall.profile(log, config=ProfileConfig(counters=128)), holdall.profile(prepared)
    for feature in exact.features:
        for k in (1, 10, 64, 400):
            low, high = raw.coverage_interval(feature.name, k)
            assert low - 2e-3 <= exact.coverage(feature.name, k) <= high + 2e-3
        assert raw.coverage(feature.name, 8) == pytest.approx(exact.coverage(feature.name, 8), abs=0.02)
    # Thresholds stop where the counters cannot tell any more.
    assert raw.hot.threshold[-1] > exact.hot.threshold[-1]
    wide = raw.feature("C3").coverage
    assert wide.high[-1] > wide.low[-1]


def test_a_sample_reads_a_part_and_says_how_sure_it_is(log: Path, prepared: Path) -> None:
    exact = holdall.profile(prepared)
    sampled = holdall.profile(log, config=ProfileConfig(sample=0.2))
    assert sampled.sample is not None
    assert sampled.source.rows < 0.3 * exact.rows_read
    assert sampled.rows_read < sampled.source.rows  # a fifth is held out
    within = 0
    for feature in exact.features:
        low, high = sampled.coverage_interval(feature.name, 3)
        assert high - low < 0.2
        within += low <= exact.coverage(feature.name, 3) <= high
    assert within >= 0.8 * len(exact.features)
    with pytest.raises(DataError, match="made from a sample"):
        sampled.miss_ratio("C1", 3)


def test_compressed_files_are_sampled_as_they_come(log: Path, tmp_path: Path) -> None:
    packed = tmp_path / "clicks.tsv.gz"
    packed.write_bytes(gzip.compress(log.read_bytes(), 1))
    sampled = holdall.profile(packed, config=ProfileConfig(sample=0.3))
    assert sampled.source.rows > 10_000
    assert 0.1 * sampled.source.rows < sampled.rows_read < 0.4 * sampled.source.rows
    assert 0 < sampled.coverage("C3", 10) < 1


def test_it_belongs_to_the_set_prepared_from_the_same_files(log: Path, prepared: Path, tmp_path: Path) -> None:
    holdall.profile(log, tmp_path / "popularity.json")
    Profile.load(tmp_path / "popularity.json").check(Schema.load(prepared))
    other = tmp_path / "clicks.tsv"
    other.write_bytes(log.read_bytes()[: log.stat().st_size // 2].rpartition(b"\n")[0] + b"\n")
    with pytest.raises(DataError, match=r"another data set.*'clicks\.tsv'"):
        holdall.profile(other).check(Schema.load(prepared))


def test_sampled_lines_are_whole_and_none_twice(tmp_path: Path) -> None:
    path, part = tmp_path / "log.csv", tmp_path / "part.csv"
    lines = [f"{number},{'x' * (number % 97)}\n" for number in range(20_000)]
    path.write_text("header,words\n" + "".join(lines))
    ends = copy_sample(path, part, 0.25, header=True, seed=3)
    first, *rest = part.read_text().splitlines(keepends=True)
    assert first == "header,words\n"
    assert len(set(rest)) == len(rest)
    assert set(rest) <= set(lines)
    assert ends[-1] == len(rest)
    assert len(ends) > 50
    assert len("".join(rest)) == pytest.approx(0.25 * path.stat().st_size, rel=0.1)
    copy_sample(path, part, 1.0, header=True, seed=3)
    assert part.read_text() == path.read_text()
    path.write_text("a\nb\nno newline at the end")
    copy_sample(path, part, 1.0, header=False, seed=0)
    assert part.read_text() == "a\nb\nno newline at the end\n"


def test_a_table_with_bags_and_a_shared_table(tmp_path: Path) -> None:
    schema = tmp_path / "schema.toml"
    schema.write_text('label = "y"\ncategorical = ["item"]\n[[bag]]\nname = "seen"\nseparator = "|"\ntable = "item"\n')
    path = tmp_path / "log.csv"
    rows = ["0,a,a|b", "1,a,", "0,b,a", "0,c,c"]
    path.write_text("y,item,seen\n" + "".join(row + "\n" for row in rows))
    profile = holdall.profile(path, config=ProfileConfig(format="table", schema=schema, test=0.0))
    assert profile.coverage("item", 1) == 0.5
    seen = profile.feature("seen")
    assert (seen.lookups, seen.distinct, seen.singletons, seen.table) == (4, 3, 2, "item")
    assert profile.hot.rows == {"item": (3,)}  # one table, of the values a, b and c


def test_bad_input_is_named(log: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        holdall.profile(tmp_path / "absent.tsv")
    with pytest.raises(ConfigError, match="training rows count"):
        holdall.profile(log, config=ProfileConfig(split="test"))
    with pytest.raises(ConfigError, match="two source files or more"):
        holdall.profile(log, config=ProfileConfig(test_from_last_file=True))
    (tmp_path / "cut.tsv.gz").write_bytes(gzip.compress(log.read_bytes(), 1)[:100_000])
    with pytest.raises(DataError, match="is truncated"):
        holdall.profile(tmp_path / "cut.tsv.gz")
    (tmp_path / "empty.tsv").touch()
    with pytest.raises(DataError, match="is empty"):
        holdall.profile(tmp_path / "empty.tsv")
    bad = write_lines(tmp_path / "bad.tsv", [criteo_line(values=["a"]), "not a row", criteo_line(values=["b"])])
    with pytest.raises(DataError, match=r"bad\.tsv, line 2: .*--bad-rows skip"):
        holdall.profile(bad)
    skipped = holdall.profile(bad, config=ProfileConfig(bad_rows="skip", test=0.0))
    assert skipped.feature("C1").distinct == 2
    with pytest.raises(DataError, match="of its sampled lines"):
        holdall.profile(bad, config=ProfileConfig(sample=0.9))
    nothing = write_lines(tmp_path / "nothing.tsv", ["not a row"])
    with pytest.raises(DataError, match="no rows to profile: 0 training rows"):
        holdall.profile(nothing, config=ProfileConfig(bad_rows="skip"))
