"""Folder with one healthy artifact of every kind, tiny, made by the commands themselves; and copies of it."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.attacks.command import run
from tests.planning.made_up_hardware import hardware

MODEL = "--dim 2 --bottom 4 --top 4"
TRAIN = f"{MODEL} --batch-size 32 --device cpu --deterministic --save-every 3 --evaluate-every 3 --log-every 2"
DISK = "--strategy split --hot-bytes 200 --tail disk"
NCF = "--model ncf --model-setting factors=2 --batch-size 64 --device cpu --deterministic"
PREPARE = "prepare clicks.csv --format table --schema schema.toml --valid 0.1 --test 0.2"
ORDER = "order data --min-rows 10 --window 4"
MEMORY = "--device-memory 1GB --host-memory 1GB --disk-memory 1GB"
PLAN = f"plan data {MODEL} --batch-size 32 {MEMORY} --hardware hardware.json"

MADE = (
    f"{PREPARE} --rows-per-file 200 --out data",
    "prepare ratings.dat --format movielens --candidates 5 --out implicit",
    f"{ORDER} --out ordered",
    "profile data --out popularity.json",
    f"{PLAN} --profile popularity.json --out plan.json",
    f"{PLAN} --world-size 2 --out plan-2.json",
    f"train data {TRAIN} --steps 6 --out run",
    f"train data {TRAIN} {DISK} --steps 4 --out disk-run",
    f"train implicit {NCF} --steps 4 --evaluate-every 2 --early-stopping 2 --out implicit-run",
    "train data --plan plan.json --steps 4 --deterministic --out plan-run",
    "release run --budget 1/2 --device cpu --out bundle",
    "release disk-run --as-trained --device cpu --out base",
    "release run --since base --device cpu --out delta",
    "publish base --to served",
    "publish delta --to served",
)


def build(folder: Path) -> None:
    """Make every artifact in an empty folder."""
    _write_raw(folder)
    hardware().save(folder / "hardware.json")
    for words in MADE:
        ended = run(words, folder)
        if ended.code != 0:
            raise RuntimeError(f"{words} ended with {ended.code}: {ended.err}")


def _write_raw(folder: Path) -> None:
    """Clicks whose items come in sessions, ratings, and the TOML files."""
    chosen = random.Random(7)
    lines = ["label,price,user,item,tags"]
    for row in range(600):
        session = row // 20 % 6
        item = session * 12 + chosen.randrange(12)
        user = int(chosen.paretovariate(0.7)) % 40
        tags = "|".join(f"t{chosen.randint(0, 9)}" for _ in range(chosen.randint(0, 3)))
        label = int(chosen.random() < 0.2 + 0.6 * (session % 2))
        lines.append(f"{label},{chosen.random():.3f},u{user},i{item},{tags}")
    (folder / "clicks.csv").write_text("\n".join(lines) + "\n")
    ratings = [f"{user}::{chosen.randint(1, 30)}::5::{100 + event}" for user in range(1, 13) for event in range(8)]
    (folder / "ratings.dat").write_text("\n".join(ratings) + "\n")
    (folder / "schema.toml").write_text(
        'label = "label"\ndense = ["price"]\ncategorical = ["user", "item"]\n'
        '[[bag]]\nname = "tags"\nseparator = "|"\nmax_length = 4\n'
    )
    (folder / "train.toml").write_text(
        "steps = 6\nbatch_size = 32\ndim = 2\nbottom = [4]\ntop = [4]\nlr = 0.05\ndevice = 'cpu'\n"
        "deterministic = true\n[checkpoint]\nsave_every = 3\n"
    )
    (folder / "prepare.toml").write_text("format = 'table'\nschema = 'schema.toml'\nvalid = 0.1\ntest = 0.2\n")


@contextmanager
def copied(healthy: Path, inside: Path | None = None) -> Iterator[Path]:
    """Copy of the artifacts in a new folder, which is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="attack-", dir=inside))
    try:
        shutil.copytree(healthy, folder / "here", symlinks=True)
        yield folder / "here"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def snapshot(folder: Path) -> dict[str, str]:
    """Every name below a folder with what it is: a digest of the file's bytes, `folder`, or the link's target."""
    found: dict[str, str] = {}
    for place, folders, files in os.walk(folder):
        for name in folders + files:
            path = Path(place) / name
            key = str(path.relative_to(folder))
            if path.is_symlink():
                found[key] = f"link to {os.readlink(path)}"
            elif path.is_dir():
                found[key] = "folder"
            else:
                found[key] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
