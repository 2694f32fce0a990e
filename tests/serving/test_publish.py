"""Published folders: what is current is complete at any moment, and only a newer bundle of the same ids replaces it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdall
from holdall.cli import main
from holdall.common.errors import ConfigError, DataError, HoldallError
from holdall.common.files import write_json
from holdall.common.folder_lock import locked
from holdall.data.dataset import DataSet
from holdall.data.loader import Loader
from holdall.data.schema import Schema
from holdall.data.synthetic import SyntheticConfig, write_prepared
from holdall.models import DLRMConfig
from holdall.serving.bundle import TABLES_FILE, Origin, Quality, open_bundle, write_bundle
from holdall.serving.publish import publish
from holdall.serving.published_folder import CURRENT_FILE, Published
from holdall.serving.scorer import load_bundle
from holdall.serving.write_delta import write_delta
from tests.common.killed import killed_at_each_change

SMALL = DLRMConfig(dim=4, bottom=(4,), top=(4,))


def made(out: Path, data: Path, step: int | None) -> Path:
    """A bundle of random weights that says it is of a step."""
    torch.manual_seed(step or 0)
    schema = Schema.load(data)
    model = SMALL.build(schema)
    origin = Origin(run=None, checkpoint=None, step=step)
    write_bundle(out, model, SMALL, schema, data, origin, Quality(table_bytes=1, dense_bytes=1))
    return out


@pytest.fixture(scope="module")
def bundles(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("bundles")
    return [made(folder / f"step-{step}", data, step) for step in (10, 20, 30, 40, 50)]


def steps(folder: Path) -> list[int | None]:
    """Steps of the targets of a published folder, each of which opens."""
    published = Published(folder)
    return [published.open(target).record.origin.step for target in published.targets()]


def copies(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != CURRENT_FILE)


def test_the_last_three_are_kept(bundles: list[Path], tmp_path: Path) -> None:
    served = tmp_path / "served"
    for number, bundle in enumerate(bundles, start=1):
        done = publish(bundle, served)
        assert done.changed
        assert Published(served).current() == done.target
        assert steps(served) == [10 * n for n in range(number, max(0, number - 3), -1)]
        assert len(copies(served)) == min(number, 3)


def test_going_back_makes_the_one_before_current(bundles: list[Path], tmp_path: Path) -> None:
    served = tmp_path / "served"
    for bundle in bundles[:3]:
        publish(bundle, served)
    assert publish(None, served, back=True).target.step == 20
    assert steps(served) == [20, 10]
    publish(bundles[3], served)
    assert steps(served) == [40, 20, 10]
    assert len(copies(served)) == 3
    publish(None, served, back=True)
    publish(None, served, back=True)
    with pytest.raises(ConfigError, match="no bundle before the current one"):
        publish(None, served, back=True)
    assert steps(served) == [10]


def test_a_copy_takes_no_space_of_its_own(bundles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdall.serving.publish.fcntl", None)  # shared blocks, where the file system has them
    target = publish(bundles[0], tmp_path / "served").target
    copy = tmp_path / "served" / target.bundle
    assert os.path.samefile(copy / TABLES_FILE, bundles[0] / TABLES_FILE)
    assert sorted(p.name for p in copy.rglob("*")) == sorted(p.name for p in bundles[0].rglob("*"))


def test_files_are_copied_and_compared_where_links_cannot_be(
    bundles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("holdall.serving.publish.fcntl", None)
    monkeypatch.setattr("os.link", fail)
    target = publish(bundles[0], tmp_path / "served").target
    copy = tmp_path / "served" / target.bundle / TABLES_FILE
    assert not os.path.samefile(copy, bundles[0] / TABLES_FILE)
    assert copy.read_bytes() == (bundles[0] / TABLES_FILE).read_bytes()
    monkeypatch.setattr("shutil.copyfile", lambda source, to: Path(to).write_bytes(b"x" * Path(source).stat().st_size))
    with pytest.raises(DataError, match="was changed"):
        publish(bundles[1], tmp_path / "served")
    assert steps(tmp_path / "served") == [10]
    assert copies(tmp_path / "served") == [target.bundle]


def test_current_is_read_again_only_when_it_was_replaced(
    bundles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(bundles[0], tmp_path)
    published = Published(tmp_path)
    first = published.current()
    with monkeypatch.context() as patched:
        patched.setattr("holdall.serving.published_folder.read_json", None)
        assert published.current() is first
    publish(bundles[1], tmp_path)
    assert published.current().step == 20


def test_what_is_loaded_scores_as_the_bundle(bundles: list[Path], data: Path, tmp_path: Path) -> None:
    for bundle in bundles[:2]:
        publish(bundle, tmp_path)
    published = Published(tmp_path)
    batch = next(iter(Loader(DataSet(data, "test"), 100).epoch(0)))
    for target, bundle in zip(published.targets(), reversed(bundles[:2]), strict=True):
        scorer, expected = load_bundle(published.open(target)), holdall.load(bundle)
        assert scorer.fingerprint == target.fingerprint == expected.fingerprint
        assert scorer.step == target.step
        assert torch.equal(scorer.logits(batch), expected.logits(batch))


def test_what_is_current_already_changes_nothing(bundles: list[Path], tmp_path: Path) -> None:
    first = publish(bundles[0], tmp_path / "served")
    content = (tmp_path / "served" / CURRENT_FILE).read_bytes()
    again = publish(bundles[0], tmp_path / "served")
    assert not again.changed
    assert again.target == first.target
    assert (tmp_path / "served" / CURRENT_FILE).read_bytes() == content


def test_an_older_bundle_needs_a_word(bundles: list[Path], tmp_path: Path) -> None:
    for bundle in bundles[:2]:
        publish(bundle, tmp_path / "served")
    with pytest.raises(DataError, match=r"is of step 10, and step 20 is current .*--allow-older"):
        publish(bundles[0], tmp_path / "served")
    assert steps(tmp_path / "served") == [20, 10]
    publish(bundles[0], tmp_path / "served", allow_older=True)
    assert steps(tmp_path / "served") == [10, 20]
    assert len(copies(tmp_path / "served")) == 2


def test_a_bundle_of_other_ids_needs_a_word(bundles: list[Path], tmp_path: Path) -> None:
    write_prepared(SyntheticConfig(rows=500, cardinalities=(50, 7, 401), num_dense=3), tmp_path / "data")
    foreign = made(tmp_path / "foreign", tmp_path / "data", 60)
    publish(bundles[0], tmp_path / "served")
    with pytest.raises(DataError, match=r"has other ids than the bundle that is current .*--allow-other-ids"):
        publish(foreign, tmp_path / "served")
    assert steps(tmp_path / "served") == [10]
    publish(foreign, tmp_path / "served", allow_other_ids=True)
    assert steps(tmp_path / "served") == [60, 10]


def test_a_damaged_bundle_is_refused(bundles: list[Path], tmp_path: Path) -> None:
    damaged = shutil.copytree(bundles[1], tmp_path / "damaged")
    content = bytearray((damaged / TABLES_FILE).read_bytes())
    content[-1] ^= 1
    (damaged / TABLES_FILE).write_bytes(content)
    with pytest.raises(DataError, match=r"damaged/tables.safetensors was changed"):
        publish(damaged, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    publish(bundles[0], tmp_path / "served")
    with pytest.raises(DataError, match=r"damaged/tables.safetensors was changed"):
        publish(damaged, tmp_path / "served")
    assert steps(tmp_path / "served") == [10]


def test_a_kill_leaves_a_folder_that_loads(bundles: list[Path], tmp_path: Path) -> None:
    served, start = tmp_path / "served", tmp_path / "start"
    for bundle in bundles[:3]:
        publish(bundle, start)

    def fresh() -> None:
        shutil.rmtree(served, ignore_errors=True)
        shutil.copytree(start, served)

    found = []
    for _ in killed_at_each_change(lambda: publish(bundles[3], served), fresh):
        found.append(steps(served))
        publish(bundles[3], served)
        assert steps(served) == [40, 30, 20]
        assert len(copies(served)) == 3
        publish(bundles[4], served)
        assert steps(served)[0] == 50
        assert len(copies(served)) == 3
    assert set(map(tuple, found)) == {(30, 20, 10), (40, 30, 20)}
    assert found.count([30, 20, 10]) > 5


def test_two_publishers_take_turns(bundles: list[Path], tmp_path: Path) -> None:
    publish(bundles[0], tmp_path / "served")
    with locked(tmp_path / "served"), pytest.raises(HoldallError, match="is writing to"):
        publish(bundles[1], tmp_path / "served")
    assert steps(tmp_path / "served") == [10]


def test_only_a_published_folder_is_published_to(bundles: list[Path], data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a published folder"):
        publish(bundles[0], data)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        publish(bundles[0], tmp_path / "file")
    with pytest.raises(ConfigError, match="name a bundle or a delta to publish"):
        publish(None, tmp_path / "served")
    with pytest.raises(ConfigError, match="name a bundle or a delta to publish"):
        publish(bundles[0], tmp_path / "served", back=True)
    with pytest.raises(DataError, match="is not a published folder"):
        Published(data).current()


# --- deltas ---------------------------------------------------------------------------------------------------------


def next_delta(out: Path, served: Path, step: int | None, seed: int = 0) -> Path:
    """A delta to what is current, with other rows in a table."""
    base = Published(served).open()
    model = base.model(mmap=False)
    with torch.no_grad():
        model.bags.packs[0].storage[seed % 50] += 1.0
    origin = Origin(run=None, checkpoint=None, step=step)
    write_delta(out, model, SMALL, base, origin, lambda _: Quality(table_bytes=1, dense_bytes=1))
    return out


def test_a_delta_is_published_and_gone_back_from(bundles: list[Path], data: Path, tmp_path: Path) -> None:
    served = tmp_path / "served"
    publish(bundles[0], served)
    scores = []
    batch = next(iter(Loader(DataSet(data, "test"), 100).epoch(0)))
    for step in (11, 12, 13, 14):
        scores.append(holdall.load(served).logits(batch))
        target = publish(next_delta(tmp_path / f"delta-{step}", served, step, step), served).target
        assert (target.step, len(target.deltas)) == (step, step - 10)
    assert steps(served) == [14, 13, 12]
    assert len(copies(served)) == 5  # the last three need the bundle and all deltas
    for step in (13, 12):
        publish(None, served, back=True)
        assert torch.equal(holdall.load(served).logits(batch), scores[step - 10])
    publish(bundles[1], served)
    assert steps(served) == [20, 12]
    assert len(copies(served)) == 4


def test_a_delta_that_does_not_follow_is_refused(bundles: list[Path], tmp_path: Path) -> None:
    served = tmp_path / "served"
    publish(bundles[0], served)
    first, other = (next_delta(tmp_path / f"delta-{seed}", served, 11, seed) for seed in (1, 2))
    older = next_delta(tmp_path / "older", served, 9)
    with pytest.raises(ConfigError, match="has no bundle yet"):
        publish(first, tmp_path / "new")
    with pytest.raises(DataError, match=r"is of step 9, and step 10 is current .*--allow-older"):
        publish(older, served)
    assert publish(first, served).changed
    assert not publish(first, served).changed
    with pytest.raises(DataError, match=r"was made for another bundle .*`holdall release RUN --since"):
        publish(other, served)
    assert steps(served) == [11, 10]
    shutil.rmtree(served / Published(served).current().deltas[0])
    with pytest.raises(DataError, match="no delta"):
        Published(served).open()


def test_a_kill_while_a_delta_is_published_leaves_a_folder_that_loads(bundles: list[Path], tmp_path: Path) -> None:
    served, start = tmp_path / "served", tmp_path / "start"
    publish(bundles[0], start)
    delta = next_delta(tmp_path / "delta", start, 11)

    def fresh() -> None:
        shutil.rmtree(served, ignore_errors=True)
        shutil.copytree(start, served)

    found = []
    for _ in killed_at_each_change(lambda: publish(delta, served), fresh):
        found.append(tuple(steps(served)))
        publish(delta, served)
        assert steps(served) == [11, 10]
        assert len(copies(served)) == 2
    assert set(found) == {(10,), (11, 10)}


# --- folders that were changed --------------------------------------------------------------------------------------


def edit(folder: Path, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    """Change `current.json` as someone would who knows the format: its hash is right again."""
    document = json.loads((folder / CURRENT_FILE).read_text())
    change(document)
    write_json(folder / CURRENT_FILE, document, hashed=True)


def leave(folder: Path) -> None:
    edit(folder, lambda found: found.update(bundle="../outside"))


def leave_before(folder: Path) -> None:
    edit(folder, lambda found: found["history"][0].update(bundle="/etc"))


def exchange(folder: Path) -> None:
    edit(folder, lambda found: found.update(bundle=found["history"][0]["bundle"]))


def newer(folder: Path) -> None:
    edit(folder, lambda found: found.update(version=2))


def retype(folder: Path) -> None:
    text = (folder / CURRENT_FILE).read_text()
    (folder / CURRENT_FILE).write_text(text.replace('"step": 20', '"step": 21'))


def truncate(folder: Path) -> None:
    os.truncate(folder / CURRENT_FILE, 100)


def link(folder: Path) -> None:
    name = Published(folder).current().bundle
    (folder / name).rename(folder.parent / "moved")
    (folder / name).symlink_to(folder.parent / "moved")


def remove(folder: Path) -> None:
    shutil.rmtree(folder / Published(folder).current().bundle)


CHANGES: dict[Callable[[Path], None], str] = {
    leave: "names a folder that is not its own",
    leave_before: "names a folder that is not its own",
    exchange: "is another one than current.json says",
    newer: "version 2, this Holdall reads version 1",
    retype: "was changed after it was written",
    truncate: "current.json",
    link: "is a link",
    remove: "no bundle",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_folder_is_refused(change: Callable[[Path], None], bundles: list[Path], tmp_path: Path) -> None:
    for bundle in bundles[:2]:
        publish(bundle, tmp_path / "served")
    change(tmp_path / "served")
    with pytest.raises(DataError, match=CHANGES[change]):
        Published(tmp_path / "served").open()


def test_going_back_to_a_damaged_bundle_is_refused(bundles: list[Path], tmp_path: Path) -> None:
    served = tmp_path / "served"
    for bundle in bundles[:2]:
        publish(bundle, served)
    shutil.rmtree(served / Published(served).targets()[1].bundle)
    with pytest.raises(DataError, match="no bundle"):
        publish(None, served, back=True)
    assert Published(served).open().record.origin.step == 20


def test_the_command_publishes_and_goes_back(
    bundles: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = str(tmp_path / "served")
    main(["publish", str(bundles[0]), "--to", served])
    main(["publish", str(bundles[1]), "--to", served])
    assert "now 000002-bundle-" in capsys.readouterr().out
    main(["publish", "--back", "--to", served, "--json"])
    assert json.loads(capsys.readouterr().out)["step"] == 10
    main(["inspect", served])
    assert "of step 10" in capsys.readouterr().out
    assert holdall.inspect(served)["fingerprint"] == open_bundle(bundles[0]).fingerprint
    with pytest.raises(SystemExit):
        main(["publish", "--to", served])
    assert "name a bundle or a delta to publish" in capsys.readouterr().err
