"""Hooks of the documentation site: pages and files outside docs/ that its pages link to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
FILES = ("benchmarks/results/*", "configs/*", "LICENSE")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository's root, run cards and shipped configs."""
    for pattern in (*PAGES, *FILES):
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links that leave docs/, or enter it, to where the site has their targets."""
    if page.file.src_path in PAGES:
        return markdown.replace("](docs/", "](").replace("](README.md)", "](index.md)")
    return markdown if "/" in page.file.src_path else markdown.replace("](../", "](")
