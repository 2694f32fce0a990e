"""Files of a data set folder: each is listed with its hash, and a damaged, exchanged or foreign one is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from holdall.common.errors import DataError
from holdall.data.dataset import DataSet
from holdall.data.encode import Encoder
from holdall.data.id_map import load_id_maps
from holdall.data.identity import data_fingerprint, ids_fingerprint
from holdall.data.items import ItemTable
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.ranking_cases import RankingCases, has_ranking_cases
from holdall.data.schema import Schema
from tests.data.raw_files import criteo_line, prepare_films, write_lines
from tests.edits import edit_json, flip_bit, swap

READERS: dict[str, Callable[[Path], object]] = {
    "train-00000.arrow": lambda folder: DataSet(folder, "train"),
    "ids/item.arrow": load_id_maps,
    "ids/genres.arrow": Encoder,
    "items.arrow": lambda folder: ItemTable.load(folder, Schema.load(folder)),
    "ranking-test.arrow": lambda folder: RankingCases.load(folder, "test"),
}


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_films(tmp_path_factory.mktemp("films"))


@pytest.fixture
def folder(films: Path, tmp_path: Path) -> Path:
    return shutil.copytree(films, tmp_path / "films")


def test_every_file_is_listed(films: Path) -> None:
    document = json.loads((films / "schema.json").read_text())
    listed = set(document["files"]) | {f["name"] for split in document["splits"].values() for f in split["files"]}
    found = {path.relative_to(films).as_posix() for path in films.rglob("*") if path.is_file()}
    assert listed == found - {"schema.json"}
    assert set(READERS) < listed
    assert set(document["ids"]) == {feature["table"] or feature["name"] for feature in document["features"]}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 1.0])
def test_a_flipped_bit_is_refused(folder: Path, name: str, place: float) -> None:
    READERS[name](folder)
    flip_bit(folder / name, place)
    with pytest.raises(DataError, match=rf"{Path(name).name} was changed: .*schema\.json; copy the folder again"):
        READERS[name](folder)


@pytest.mark.parametrize("name", READERS)
def test_a_missing_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(DataError, match=rf"{Path(name).name} is missing, but schema\.json lists it"):
        READERS[name](folder)


@pytest.mark.parametrize("names", [("ranking-test.arrow", "ranking-valid.arrow"), ("ids/user.arrow", "ids/item.arrow")])
def test_exchanged_files_are_refused(folder: Path, names: tuple[str, str]) -> None:
    swap(folder / names[0], folder / names[1])
    with pytest.raises(DataError, match=r"was changed|bytes instead of"):
        load_id_maps(folder) if "ids" in names[0] else RankingCases.load(folder, "test")


def test_an_edited_schema_is_refused(folder: Path) -> None:
    path = folder / "schema.json"
    path.write_text(path.read_text().replace('"unseen": ', '"unseen": 1'))
    with pytest.raises(DataError, match=r"schema\.json was changed after it was written: .*copy the folder again"):
        Schema.load(folder)


def test_a_deleted_ranking_file_is_not_taken_for_a_set_without(folder: Path) -> None:
    (folder / "ranking-test.arrow").unlink()
    assert has_ranking_cases(folder, "test", Schema.load(folder))
    assert not has_ranking_cases(folder, "other", Schema.load(folder))


def test_a_folder_of_an_earlier_version_is_read(folder: Path) -> None:
    def without_hashes(document: dict[str, object]) -> None:
        for key in ("files", "ids", "sha256"):
            del document[key]

    edit_json(folder / "schema.json", without_hashes)
    assert "sha256" not in json.loads((folder / "schema.json").read_text())
    schema = Schema.load(folder)
    assert (schema.files, schema.ids, ids_fingerprint(schema)) == (None, None, None)
    assert data_fingerprint(schema)
    for read in READERS.values():
        read(folder)
    assert has_ranking_cases(folder, "test", schema)


def prepared(folder: Path, labels: list[int], values: str) -> DataSet:
    """A set of one feature that goes round the values, one character each."""
    folder.mkdir(parents=True)
    lines = [criteo_line(label, values=[values[row % len(values)]]) for row, label in enumerate(labels)]
    prepare([write_lines(folder / "log.tsv", lines)], folder / "data", PrepareConfig(test=0.0))
    return DataSet(folder / "data")


def test_fingerprints_tell_ids_from_rows(tmp_path: Path) -> None:
    first = prepared(tmp_path / "first", [0, 1] * 20, "aabc")
    again = prepared(tmp_path / "again", [0, 1] * 20, "aabc")
    other_rows = prepared(tmp_path / "rows", [1, 0] * 20, "aabc")
    other_ids = prepared(tmp_path / "ids", [0, 1] * 20, "bbac")
    assert again.fingerprint == first.fingerprint
    assert again.ids_fingerprint == first.ids_fingerprint is not None
    assert other_rows.ids_fingerprint == first.ids_fingerprint
    assert other_rows.fingerprint != first.fingerprint
    assert other_ids.ids_fingerprint != first.ids_fingerprint
    assert other_ids.schema.features == first.schema.features  # as far as columns and counts tell, they are the same
