"""The pages of the documentation: commands and code run, links lead somewhere, generated pages are up to date."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import holdall
from holdall import cli
from holdall.data.synthetic import preset, write_tsv
from tests import pages

pytestmark = pytest.mark.slow

ROOT = pages.ROOT
DOCS = ROOT / "docs"
GUIDES = [page for page in pages.PAGES if page.parent == DOCS and page.name != "examples.md"]  # test_examples.py

NOT_RUN = {
    "torchrun ": "needs several processes: tests/distributed/test_train_processes.py, test_two_nodes.py, tests/faults",
    "DATA=": "needs Slurm: tests/distributed/test_cluster_templates.py",
    "kubectl ": "needs Kubernetes: tests/distributed/test_cluster_templates.py",
    "python -m benchmarks": "takes minutes, or a GPU: tests/test_card.py checks the names",
    "make ": "installs: tests/test_readme.py checks the targets",
    "git ": "changes the checkout",
    "pip ": "installs",
    "source ": "changes the shell",
    "cd ": "changes the shell",
    "tensorboard ": "is a server",
    "holdall serve ": "is a server: tests/serving/server",
    "curl ": "asks a server: tests/serving/server",
    "holdall train data --out run --track ": "needs other libraries: tests/integrations/test_trackers.py",
    "holdall train data --out run --strategy plain --epochs 3 --resume": "goes on from a run under torchrun, see there",
}
"""Commands that are not run here, by how they begin, and why."""

BLOCKS_NOT_RUN = {
    (
        "exports.md",
        "holdall export bundle --format pt2",
    ): "needs a C++ compiler: tests/serving/export/test_compiled_package.py",
    ("getting-started.md", "holdall --version"): "installs: tools/check_wheel.py",
    ("getting-started.md", "holdall --tyro-print-completion"): "writes to the home folder",
    (
        "your-data.md",
        "holdall prepare 'log-*.parquet'",
    ): "starts from files of the reader: tests/data/test_time_split.py",
    (
        "your-data.md",
        "holdall prepare 'terabyte/day_*.gz'",
    ): "needs the public files: tests/data has a test for each format",
}
"""Commands outside bash blocks, which are not run: page, beginning of the block's first command, and why."""


def runs(command: str) -> bool:
    return not any(command.startswith(beginning) for beginning in NOT_RUN)


@pytest.mark.parametrize(
    "page", [page for page in GUIDES if any(map(runs, pages.commands(page)))], ids=lambda page: page.name
)
def test_the_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of a page, in order, in one folder, on small data with small models; rates are made up."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a model of one's own adds the current folder
    pages.write_modules(page, tmp_path)
    found = [command for command in pages.commands(page) if runs(command)]
    pages.set_up(tmp_path, data=not any(command.endswith("--out data") for command in found))
    for language, name in (("csv", "clicks.csv"), ("toml", "clicks.toml"), ("toml", "train.toml")):
        for block in pages.blocks(page, language)[:1]:
            Path(name).write_text(block, encoding="utf-8")
    for command in found:
        assert command.startswith("holdall "), f"{command}: neither run nor listed in NOT_RUN"
        pages.run(command)
        if " train " in command:
            assert list(Path(re.findall(r"--out (\S+)", command)[0]).glob("checkpoints/step-*")), command


def test_blocks_that_are_not_run_are_listed() -> None:
    found = []
    for page in GUIDES:
        for code in [*pages.blocks(page, ""), *pages.blocks(page, "text")]:
            if command := re.search(r"^holdall .*", code, flags=re.M):
                found += [(page.name, command[0])]
    listed = [key for key in BLOCKS_NOT_RUN for name, command in found if key[0] == name and command.startswith(key[1])]
    assert len(found) == len(listed), found
    assert set(listed) == set(BLOCKS_NOT_RUN)


CODE = [(page, code) for page in GUIDES for code in pages.blocks(page, "python")]


@pytest.mark.parametrize(("page", "code"), CODE, ids=[page.name for page, _ in CODE])
def test_the_code_runs(page: Path, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tsv(preset("criteo-kaggle", scale=1e-3, rows=2000), tmp_path / "clicks.tsv.gz")
    pages.write_modules(page, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    pages.skip_without(code)
    pages.run_python(code, page)


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert pages.broken(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading, here\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#a-heading-here) [b](other.md#none) [c](none.md) [d](https://x.org) `[e](none)`\n")
    assert pages.broken(page) == ["other.md#none", "none.md"]


def test_the_architecture_page_is_up_to_date() -> None:
    command = [sys.executable, ROOT / "tools" / "architecture.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_compatibility_page_is_that_of_its_card() -> None:
    command = [sys.executable, ROOT / "tools" / "compatibility.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    card = json.loads((ROOT / "benchmarks" / "results" / "compatibility.json").read_text(encoding="utf-8"))["results"]
    wrong = [model["model"] for model in card["models"] if model["outcome"] in ("fails", "silently wrong")]
    assert wrong == []
    assert card["pytorch"]["passed"] >= 155
    assert [method["different"] for method in card["methods"] if method["different"]] == []


def test_the_tables_of_methods_are_those_of_their_card() -> None:
    command = [sys.executable, ROOT / "tools" / "methods.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_site_has_every_page() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (str(page.relative_to(DOCS)) for page in pages.PAGES if page.is_relative_to(DOCS)):
        assert re.search(rf"\b{re.escape(page)}$", settings, flags=re.M), f"{page} is not in the nav of mkdocs.yml"


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    documented = re.findall(r"^::: holdall\.(\w+)$", text, flags=re.M)
    assert sorted(documented) == sorted(holdall.__all__)


def test_modules_that_pages_name_exist() -> None:
    """Paths in code style, from the root or below src/holdall."""
    for page in pages.PAGES:
        if page.name == "architecture.md":
            continue
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
        named = [name for name in re.findall(r"`([\w./-]+/[\w.-]+\.py)`", text) if "NAME" not in name]
        missing = [name for name in named if not any((top / name).exists() for top in (ROOT, ROOT / "src/holdall"))]
        assert missing == [], page.name


def test_messages_that_a_page_explains_are_those_of_the_code() -> None:
    text = (DOCS / "clusters.md").read_text(encoding="utf-8")
    section = text[text.index("Messages of Holdall") : text.index("Messages of torchrun")]
    messages = re.findall(r"^\| `([^`]+)` \|", section, flags=re.M)
    assert len(messages) == 8
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src" / "holdall" / "distributed").glob("*.py")]
    code = re.sub(r'"\s*f?"', "", "\n".join(sources))
    variable = r"\blocalhost\b|\blo\b|\b\d[\d.]*\b|\.\.\."
    missing = [part for message in messages for part in re.split(variable, message) if part not in code]
    assert missing == []


OTHER_FLAGS = {
    "torchrun": "nproc-per-node nnodes node-rank max-restarts master-addr master-port local-addr "
    "rdzv-backend rdzv-endpoint rdzv-id rdzv-conf",
    "sbatch": "nodes gpus-per-node",
    "pip": "no-deps",
    "tritonserver": "model-repository",
    "benchmarks": "list data source criteo avazu help",
    "mkdocs": "strict",
    "tyro": "tyro-print-completion tyro-write-completion",
    "tests.attacks": "only",
    "of 0.1.0, which the changelog names": "consistency",
}
"""Flags in pages that are not those of `holdall`, by program."""


def test_flags_that_pages_name_exist(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    known = {flag for flags in OTHER_FLAGS.values() for flag in flags.split()}
    for words in ([], *([command] for command in cli.COMMANDS)):
        with pytest.raises(SystemExit):
            cli.main([*words, "--help"])
        known |= set(re.findall(r"--([a-z][a-z0-9-]*)", capsys.readouterr().out))
    for page in pages.PAGES:
        code = "\n".join(re.findall(r"`[^`\n]+`|^```.*?^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M))
        unknown = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", code)) - known
        assert unknown == set(), page.name


def test_every_command_method_and_extra_is_described() -> None:
    table = (DOCS / "compressed-tables.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)\(", table, flags=re.M)) == {kind.__name__ for kind in holdall.METHODS.values()}
    started = (DOCS / "getting-started.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `holdall (\w+)` \|", started, flags=re.M) == list(cli.COMMANDS)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(re.findall(r"^\| `(\w+)` \|", started, flags=re.M)) == extras.keys() - {"dev", "docs"}


def test_drawings_are_those_of_their_script() -> None:
    script = runpy.run_path(str(ROOT / "tools" / "drawing.py"))
    for theme in script["PALETTES"]:
        drawn = (DOCS / "images" / f"data-flow-{theme}.svg").read_text(encoding="utf-8")
        assert drawn == script["data_flow"](theme)


OLD_WORDS = r"\b(rooms?|far rows?|near rows?|dealt|take home|goes on|at hand|begun|beginnings)\b"
"""Words of an earlier dialect, for which the field has others: CONTRIBUTING.md, Words."""


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    assert re.findall(OLD_WORDS, text, flags=re.I) == []


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install 'holdall[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    loaded = r"<(?:script|img|source|iframe)[^>]+src=[\"']?https?:|<link[^>]+href=[\"']?https?:|url\(https?:"
    for page in [*(tmp_path / "site").rglob("*.html"), *(tmp_path / "site").rglob("*.css")]:
        assert not re.search(loaded, page.read_text(encoding="utf-8")), page.name
