"""Negatives for training: never the user's own, anew every epoch, the same for any number of processes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.common.errors import CheckpointError, ConfigError, DataError
from holdall.data.dataset import DataSet
from holdall.data.id_map import load_id_maps
from holdall.data.items import ITEMS_FILE, ItemTable
from holdall.data.loader import Loader
from holdall.data.negatives import NegativeSampling, Positives, draw_candidates, draw_negatives, training_loader
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.ranking_cases import RankingCases
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import evaluate_ranking
from holdall.training.train import train
from tests.data.raw_files import prepare_films
from tests.data.test_taobao import write_set
from tests.edits import list_again


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_films(tmp_path_factory.mktemp("films"))


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clicks")
    train_lines = [" ".join(map(str, [u, *((u + 3 * k) % 8 for k in range(5))])) for u in range(3)]
    write_set(folder, train_txt=train_lines, test_txt=[f"{u} {(u + 15) % 8}" for u in range(3)])
    prepare([folder], folder / "out", PrepareConfig(format="taobao", candidates=2))
    return folder / "out"


def test_rows_are_a_positive_and_its_negatives_with_their_attributes(films: Path) -> None:
    data = DataSet(films, "train")
    maps = load_id_maps(films)
    known = Positives.of(data)
    names = [feature.name for feature in data.schema.features]
    seen = 0
    for batch in NegativeSampling(data, 16, num_negatives=3, shuffle="rows").epoch(0):
        users, items, years = (batch.ids.bag(names.index(name))[0].numpy() for name in ("user", "item", "year"))
        assert batch.label.view(-1, 4).tolist() == [[1.0, 0.0, 0.0, 0.0]] * (len(batch) // 4)
        assert (users.reshape(-1, 4) == users.reshape(-1, 4)[:, :1]).all()
        assert known.contains(users, items).tolist() == (batch.label == 1).tolist()
        genres, offsets, _ = batch.ids.bag(names.index("genres"))
        assert offsets is not None
        for row, (item, year) in enumerate(zip(items, years, strict=True)):
            number = int(maps["item"].values[item].as_py())
            assert maps["year"].values[year].as_py() == str(1900 + number)
            bag = [maps["genres"].values[g].as_py() for g in genres[offsets[row] : offsets[row + 1]].tolist()]
            assert "|".join(bag) == ["", "a", "b|c", "a|b|c"][number % 4]
        seen += len(batch)
    assert seen == 4 * len(data)


def test_histories_stay_with_their_row(clicks: Path) -> None:
    data = DataSet(clicks, "train")
    names = [feature.name for feature in data.schema.features]
    table = ItemTable.load(clicks, data.schema)
    plain = next(Loader(data, 8, shuffle="none").epoch(0))
    batch = next(NegativeSampling(data, 8, num_negatives=2, shuffle="none").epoch(0))
    for name in ("history", "history_category"):
        before, after = plain.ids.bag(names.index(name)), batch.ids.bag(names.index(name))
        assert before[1] is not None
        assert after[1] is not None
        lists = [v.tolist() for v in before[0].split(before[1].diff().tolist())]
        assert [v.tolist() for v in after[0].split(after[1].diff().tolist())] == [x for x in lists for _ in range(3)]
    items, brands = (batch.ids.bag(names.index(name))[0].numpy() for name in ("item", "brand"))
    assert (np.asarray(table.attributes["brand"])[items] == brands).all()
    assert (batch.dense == plain.dense.repeat_interleave(3, 0)).all()


def test_every_epoch_and_seed_draws_anew_and_the_same_again(films: Path) -> None:
    data = DataSet(films, "train")

    def epoch(number: int, **options: int) -> list[int]:
        loader = NegativeSampling(data, 16, shuffle="none", **options)
        return torch.cat([batch.ids.bag(1)[0] for batch in loader.epoch(number)]).tolist()

    assert epoch(0) == epoch(0)
    assert epoch(0) != epoch(1)
    assert epoch(0) != epoch(0, seed=1)
    assert epoch(0)[::5] == epoch(1)[::5]  # the positives


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_share_the_same_global_batch(films: Path, world_size: int) -> None:
    data = DataSet(films, "train")
    whole = list(NegativeSampling(data, 10, shuffle="rows", seed=3).epoch(1))
    parts = [
        list(NegativeSampling(data, 10, shuffle="rows", seed=3, rank=rank, world_size=world_size).epoch(1))
        for rank in range(world_size)
    ]
    for number, batch in enumerate(whole):
        for feature in (0, 1, 2):
            shares = [part[number].ids.bag(feature)[0] for part in parts]
            assert torch.equal(torch.cat(shares), batch.ids.bag(feature)[0])


def test_it_goes_on_where_it_stopped(films: Path) -> None:
    loader = NegativeSampling(DataSet(films, "train"), 16, seed=5)
    whole = list(loader.epoch(2))
    position = loader.load_state(loader.state(2, 3))
    rest = list(loader.epoch(position.epoch, position.batch))
    assert [batch.ids.values.tolist() for batch in rest] == [batch.ids.values.tolist() for batch in whole[3:]]
    other = NegativeSampling(DataSet(films, "train"), 16, seed=5, num_negatives=2)
    with pytest.raises(CheckpointError, match=r"num_negatives 4 and this run has 2"):
        other.load_state(loader.state(2, 3))


def test_draws_are_uniform_over_what_the_user_has_not_chosen() -> None:
    known = Positives(np.array([0, 0, 1]), np.array([2, 5, 0]), 8)
    users = np.zeros(60_000, dtype=np.int64)
    drawn = draw_negatives(np.arange(len(users)), users, known, np.array([0, 1, 2, 3, 5, 7]))
    counts = np.bincount(drawn, minlength=8)
    assert counts[[2, 4, 5, 6]].tolist() == [0, 0, 0, 0]
    assert np.abs(counts[[0, 1, 3, 7]] - 15_000).max() < 600  # 5 standard deviations are 530


def test_users_who_chose_nearly_everything(clicks: Path) -> None:
    known = Positives(np.zeros(999, dtype=np.int64), np.arange(999), 1000)
    drawn = draw_negatives(np.arange(50), np.zeros(50, dtype=np.int64), known, np.arange(1000))
    assert (drawn == 999).all()
    known = Positives(np.array([0, 0, 4]), np.array([0, 1, 0]), 2)
    with pytest.raises(DataError, match=r"the user with id 0 has chosen all 2 items"):
        draw_negatives(np.arange(5), np.array([4, 0, 4, 0, 4]), known, np.arange(2))


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 11)), max_size=40),
    num=st.integers(1, 15),
    seed=st.integers(0, 9),
)
def test_candidates_are_different_and_never_known(pairs: list[tuple[int, int]], num: int, seed: int) -> None:
    known = Positives(np.array([u for u, _ in pairs], dtype=int), np.array([i for _, i in pairs], dtype=int), 12)
    catalogue = np.arange(1, 12)
    users = np.array([0, 1, 2, 3, 4, 0])
    drawn, keep = draw_candidates(users, known, catalogue, num, seed)
    for user, items, kept in zip(users.tolist(), drawn, keep, strict=True):
        free = set(range(1, 12)) - {item for owner, item in pairs if owner == user}
        found = items[kept].tolist()
        assert len(found) == len(set(found)) == min(num, len(free))
        assert set(found) <= free


@settings(derandomize=True, deadline=None, max_examples=50)
@given(pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=30))
def test_membership_is_that_of_a_set(pairs: list[tuple[int, int]]) -> None:
    known = Positives(np.array([u for u, _ in pairs], dtype=int), np.array([i for _, i in pairs], dtype=int), 7)
    users, items = np.divmod(np.arange(70), 7)
    assert known.contains(users, items).tolist() == [pair in set(pairs) for pair in zip(users, items, strict=True)]
    assert known.items_of(3).tolist() == sorted({item for user, item in pairs if user == 3})


def test_what_cannot_be_sampled_says_so(films: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_negatives is 0"):
        NegativeSampling(DataSet(films, "train"), 8, num_negatives=0)
    with pytest.raises(DataError, match=r"split 'test' of .* has rows with label 0"):
        NegativeSampling(DataSet(films, "test"), 8)
    with pytest.raises(DataError, match=rf"has no {ITEMS_FILE}, so items cannot be exchanged"):
        ItemTable.load(data, DataSet(data).schema)
    with pytest.raises(DataError, match=r"no ranking cases for split 'test'"):
        RankingCases.load(data)
    folder = shutil.copytree(films, tmp_path / "films")
    (folder / "ranking-other.arrow").write_bytes(b"ARROW1")
    with pytest.raises(DataError, match=r"ranking-other.arrow is not a file of this data set"):
        RankingCases.load(folder, "other")
    list_again(folder)
    with pytest.raises(DataError, match=r"ranking-other.arrow cannot be read"):
        RankingCases.load(folder, "other")


def test_the_loader_of_a_split_is_the_one_it_needs(films: Path, data: Path) -> None:
    plain = training_loader(DataSet(data), 100, num_negatives=4)
    assert not isinstance(plain, NegativeSampling)
    sampled = training_loader(DataSet(films), 103, num_negatives=4)
    assert isinstance(sampled, NegativeSampling)
    assert len(next(sampled.epoch(0))) == 100
    assert len(next(training_loader(DataSet(films), 2, num_negatives=4).epoch(0))) == 5


def test_training_learns_to_rank(films: Path, tmp_path: Path) -> None:
    """Users choose films of their own parity alone: of ten others about half are of the other, and rank below."""
    config = TrainConfig.of(model="gmf", epochs=30, batch_size=100, optimizer="adam", lr=0.05, negatives=2)
    train(films, tmp_path / "run", config, quiet=True)
    trained = evaluate_ranking(tmp_path / "run", k=3, device="cpu")
    train(films, tmp_path / "none", TrainConfig.of(model="gmf", steps=1, lr=1e-9), quiet=True)
    untrained = evaluate_ranking(tmp_path / "none", k=3, device="cpu")
    assert trained["cases"] == 40
    assert trained["hr@3"] > untrained["hr@3"] + 0.15
