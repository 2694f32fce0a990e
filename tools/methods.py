"""Generator of the tables of methods in docs/benchmarks.md from their run card, benchmarks/results/methods.json.

python tools/methods.py           write them
python tools/methods.py --check   fail if they are out of date
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CARD = ROOT / "benchmarks" / "results" / "methods.json"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- tables of methods: python tools/methods.py -->\n", "<!-- end of the tables of methods -->\n"

SETS = {
    "criteo": "Criteo sample",
    "planted": "Planted data",
    "bookcrossing": "Book-Crossing",
    "avazu": "Avazu sample",
    "taobao": "Taobao sample",
}
FORMS = {
    "precision": "precision by popularity",
    "polished": "the same, polished",
    "clustered": "`clustered`",
    "folding": "folding",
    "quantized": "`quantized`, 4 bits",
}
SIDES = {"dense": "dense, all bytes", "auto, counts": "`auto` with counts", "auto": "`auto` without counts"}
SIDES |= {"folding": "folding"}
BOUNDED = ("1/20", "1/100", "1/300")
"""Budgets of the table of bounds."""
PEAK = 1 / 40

Row = Mapping[str, Any]


def section(card: Mapping[str, Any]) -> str:
    """The tables of a card."""
    results = card["results"]
    parts = [bounds(results), peaks(results)]
    parts += [of_set(results, name) for name in results["samples"]]
    return "\n".join(parts)


def bounds(results: Mapping[str, Any]) -> str:
    """What the released forms of every set lose at most."""
    head = [f"{budget}{text}" for budget in BOUNDED for text in ("", ", polished")]
    lines = []
    for name in results["samples"]:
        cells = []
        for budget in BOUNDED:
            for form in ("precision", "polished"):
                row = _row(results["released"], set=name, form=form, budget=budget)
                cells.append("" if row is None else f"{_signed(row['test_auc_loss'])}, {_signed(_bound(row))}")
        lines.append([SETS[name], *cells])
    text = "AUC that is lost after training, and the 95% bound of the loss; test rows, mean of the seeds:"
    return f"{text}\n\n{_table(['set', *head], lines)}"


def peaks(results: Mapping[str, Any]) -> str:
    """What tables lose that are small from the start, by their peak bytes."""
    lines = []
    for name in results["samples"]:
        for side in ("auto, counts", "folding"):
            row = next(
                (row for row in results["from_start"] if row["set"] == name and _is_peak(row) and row["side"] == side),
                None,
            )
            if row is not None:
                share = f"1/{1 / row['peak_share']:.1f}"
                gap = f"{_signed(row['minus_dense'])} ± {row['standard_error']:.4f}"
                lines.append([SETS[name], SIDES[side], share, f"{row['auc']:.4f}", gap])
    text = "From the start at 1/40: tables and optimizer state against dense, test AUC, and its difference to dense:"
    return f"{text}\n\n{_table(['set', 'method', 'peak bytes', 'AUC', 'minus dense ± standard error'], lines)}"


def of_set(results: Mapping[str, Any], name: str) -> str:
    """The figure and both tables of a set."""
    sample = results["samples"][name]
    sizes = [
        f"{sample['train_rows']:,} training rows",
        f"{sample['ids']:,} ids",
        f"{sample['dense_bytes'] / 1e6:.1f} MB",
    ]
    if name in results["best_possible_auc"]:
        sizes.append(f"the best possible AUC is {results['best_possible_auc'][name]:.4f}")
    about = ", ".join(sizes)
    picture = [
        f"![AUC at equal bytes, {SETS[name]}](images/methods-{name}-{theme}.svg#gh-{theme}-mode-only)"
        for theme in ("light", "dark")
    ]
    after = [row for row in results["released"] if row["set"] == name]
    start = [row for row in results["from_start"] if row["set"] == name]
    tables = [
        f"Test AUC, trained dense, then stored in fewer bytes:\n\n{_grid(after, 'form', FORMS)}",
        f"Test AUC, small from the start:\n\n{_grid(start, 'side', SIDES)}",
    ]
    return "\n".join([f"### {SETS[name]}\n", f"{about}.\n", *picture, "", *tables])


def _grid(rows: Sequence[Row], kind: str, names: Mapping[str, str]) -> str:
    """A line for each method, a column for each budget; the best of a column is bold."""
    budgets = sorted({row["budget"] for row in rows if row["budget"] != "1"}, key=lambda text: int(text[2:]))
    best = {budget: max(f"{row['auc']:.4f}" for row in rows if row["budget"] == budget) for budget in budgets}
    found = dict.fromkeys(row[kind] for row in rows)
    lines = []
    for method in [*(name for name in names if name in found), *(name for name in found if name not in names)]:
        cells = {row["budget"]: f"{row['auc']:.4f}" for row in rows if row[kind] == method}
        shown = [f"**{cells[b]}**" if cells.get(b) == best[b] else cells.get(b, "") for b in budgets]
        if "1" in cells:
            shown[0] = cells["1"]
        lines.append([names.get(method, f"`{method}`"), *shown])
    return _table(["method", *budgets], lines)


def _row(rows: Sequence[Row], **wanted: str) -> Row | None:
    return next((row for row in rows if all(row[key] == value for key, value in wanted.items())), None)


def _is_peak(row: Row) -> bool:
    return row["budget"] == f"1/{1 / PEAK:.0f}"


def _bound(row: Row) -> float:
    return float(row["test_auc_loss_bound"])


def _signed(value: float) -> str:
    return f"{value:.4f}" if f"{value:.4f}" != "-0.0000" else "0.0000"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    made = section(json.loads(CARD.read_text(encoding="utf-8")))
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", flags=re.DOTALL)
    assert pattern.search(text), f"{PAGE.name} has no line {BEGIN!r}"
    new = pattern.sub(lambda _: f"{BEGIN}\n{made}\n{END}", text)
    if "--check" in sys.argv[1:]:
        if new != text:
            sys.exit(f"{PAGE.name} is not that of {CARD.name}: run python tools/methods.py")
        return
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
