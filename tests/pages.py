"""Pages of the documentation as tests read them: fenced blocks, commands, links, headings."""

from __future__ import annotations

import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from holdall.cli import main
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.synthetic import preset, write_tsv
from tests.data.raw_files import write_lines
from tests.planning.made_up_hardware import hardware

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

SMALL = {"train": ["--dim", "4", "--bottom", "8", "--top", "8"], "plan": ["--dim", "4", "--bottom", "8", "--top", "8"]}
"""Options added to commands, by command: a small model."""
HERE = {"cuda": "cpu", "65536": "512", "--compile": "--no-compile", "0.001": "0.5"}
"""Words of a command that are replaced: no GPU is needed, no compiler, and no rows that prove a small loss of AUC."""


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language; "" for those that name none."""
    return blocks_of(page.read_text(encoding="utf-8"), language)


def blocks_of(text: str, language: str) -> list[str]:
    return [
        code for name, code in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.M) if name == language
    ]


def commands(page: Path) -> list[str]:
    """The lines of a page's bash blocks, without comments, continued lines joined."""
    return commands_of(page.read_text(encoding="utf-8"))


def commands_of(text: str) -> list[str]:
    lines = [line for block in blocks_of(text, "bash") for line in block.replace("\\\n", " ").splitlines()]
    return [stripped for line in lines if (stripped := re.sub(r"(^|\s)#.*", "", line).strip())]


def write_modules(page: Path, folder: Path) -> None:
    """Write the Python blocks of a page that open with the name of a file (`# my_model.py`) to that file."""
    for block in blocks(page, "python"):
        if named := re.match(r"# (\w+\.py)\n", block):
            (folder / named[1]).write_text(block, encoding="utf-8")


def set_up(folder: Path, *, data: bool) -> None:
    """The files that commands of pages start from: logs, rates of a machine, and a prepared data set."""
    (folder / "demo-run").mkdir()
    write_tsv(preset("criteo-kaggle", scale=5e-4, rows=2000), folder / "demo-run" / "clicks.tsv.gz")
    for day in (0, 1):
        write_tsv(preset("criteo-kaggle", scale=5e-4, rows=2000, seed=day), folder / f"day_{day}.tsv.gz")
    hardware().save(folder / "hardware.json")
    write_choices(folder)
    if data:
        prepare([folder / "day_0.tsv.gz"], folder / "data", PrepareConfig())


def write_choices(folder: Path) -> None:
    """Folders in the formats of MovieLens and Taobao: 40 users with 8 of 200 items each."""
    chosen = {user: [(user * 7 + event * 13) % 200 for event in range(8)] for user in range(40)}
    for name in ("ml-1m", "taobao"):
        (folder / name).mkdir()
    ratings = [f"{user}::{item}::5::{event}" for user, items in chosen.items() for event, item in enumerate(items)]
    write_lines(folder / "ml-1m" / "ratings.dat", ratings)
    write_lines(folder / "taobao" / "u.user", [f"{user} 0 4 2 4 0 3 0 4 " for user in chosen])
    write_lines(folder / "taobao" / "u.item", [f"{item} {item % 3} {item % 2} 1" for item in range(200)])
    write_lines(folder / "taobao" / "train.txt", [" ".join(map(str, [user, *chosen[user][:-1]])) for user in chosen])
    write_lines(folder / "taobao" / "test.txt", [f"{user} {chosen[user][-1]}" for user in chosen])


def run(command: str) -> None:
    """A `holdall` command, in this process, with a small model; rates of the machine are not measured."""
    words = [HERE.get(word, word) for word in shlex.split(command)[1:]]
    if ">" in words:
        end = words.index(">")
        with Path(words[end + 1]).open("w", encoding="utf-8") as file, redirect_stdout(file):
            main(words[:end])
        return
    if words[0] == "hardware":
        return
    if words[0] == "plan" and "--hardware" not in words:
        words += ["--hardware", "hardware.json"]
    if not {"--plan", "--model", "--dim"} & set(words):
        words += SMALL.get(words[0], [])
    main(words)


def run_python(code: str, page: Path) -> None:
    exec(compile(code, str(page), "exec", dont_inherit=True), {"__name__": page.stem})


def links(page: Path) -> list[str]:
    """Targets of the links and images of a page, outside code."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)


def anchors(page: Path) -> set[str]:
    """The anchors that the headings of a page get."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """Links of a page to files that do not exist, or to headings that a page does not have; none to the network."""
    wrong = []
    for link in links(page):
        if re.match(r"https?:|mailto:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        is_theme = anchor in ("gh-light-mode-only", "gh-dark-mode-only")
        if not target.exists() or (anchor and not is_theme and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


def skip_without(code: str) -> None:
    """Skip the test of a block that needs a package which is not installed."""
    for name in re.findall(r"^import (\w+)", code, flags=re.M):
        pytest.importorskip(name)
