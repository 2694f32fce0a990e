"""Quality at equal bytes: every table method at four budgets, on planted data and on two real samples.

    python -m benchmarks.methods [--data ../shared/data] [--sets planted criteo bookcrossing] [--seeds 3]

One small DLRM (dim 16, one hidden layer of 64 below, 64-32 above), row-wise Adagrad, batch 1,024, two epochs; the epoch
with the better validation logloss counts. Every method gets the same tuning: its learning rate is the best of three on
the validation split, tried with one seed at the second budget (or the first that it can meet). Methods that compress a
trained table (quantized, clustered) start from the dense model of the same seed. Real samples are not part of this
repository; sets that are not there are left out, and said so.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.card import RESULTS, print_table, write_card
from benchmarks.figure import line_chart
from holdall.common.errors import ConfigError
from holdall.data.dataset import DataSet
from holdall.data.loader import Loader
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.synthetic import preset, write_prepared
from holdall.embedding.bags import EmbeddingBags
from holdall.evaluation.best_possible import best_possible_of
from holdall.evaluation.evaluate_model import evaluate_model
from holdall.models import DLRM, DLRMConfig
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import METHODS, Dense, Method
from holdall.tables.budget import suggest

BUDGETS = {"1/4": 1 / 4, "1/20": 1 / 20, "1/100": 1 / 100, "1/1000": 1 / 1000}
RATES = (0.01, 0.03, 0.1)
POST_TRAINING = ("quantized", "clustered")
MODEL = DLRMConfig(dim=16, bottom=(64,), top=(64, 32))
EPOCHS, BATCH_SIZE = 2, 1024


@dataclass(frozen=True)
class Job:
    """One model to train: a data set, a method at a budget, a learning rate and a seed."""

    data: str
    method: str
    budget: str
    lr: float
    seed: int


def methods_of(job: Job) -> dict[str, Method] | None:
    """How each table is stored; None where the method cannot be that small."""
    cardinalities = DataSet(job.data, "train").schema.cardinalities
    if job.method == "dense":
        return dict.fromkeys(cardinalities, Dense())
    try:
        return suggest(cardinalities, MODEL.dim, BUDGETS[job.budget], job.method)
    except ConfigError:
        return None


def run(job: Job) -> dict[str, Any] | None:
    """Train one model; its metrics on the test split, at the epoch that was best on the validation split."""
    torch.set_num_threads(1)
    methods = methods_of(job)
    if methods is None:
        return None
    if job.method in POST_TRAINING:
        return _fit_trained(job, methods)
    model = MODEL.build(DataSet(job.data).schema, methods, generator=torch.Generator().manual_seed(job.seed))
    return train(model, job)


def train(model: DLRM, job: Job) -> dict[str, Any]:
    """Two epochs; keeps what the better one scored, and leaves the model as that one left it."""
    splits = {split: DataSet(job.data, split) for split in ("train", "valid", "test")}
    optimizers = Optimizers(model, OptimizerConfig(name="rowwise_adagrad", lr=job.lr))
    loader = Loader(splits["train"], BATCH_SIZE, shuffle="rows", seed=job.seed)
    best: dict[str, Any] = {}
    best_state: dict[str, torch.Tensor] = {}
    seconds = 0.0
    for epoch in range(EPOCHS):
        start = time.process_time()  # one thread, so this is its speed on a quiet core, however busy the machine is
        for batch in loader.epoch(epoch):
            F.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
            optimizers.step()
        seconds += time.process_time() - start
        valid = evaluate_model(model, splits["valid"])
        if not best or valid["logloss"] < best["valid_logloss"]:
            test = evaluate_model(model, splits["test"])
            best = {
                "valid_logloss": valid["logloss"],
                "auc": test["auc"],
                "logloss": test["logloss"],
                "epoch": epoch + 1,
            }
            best_state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(best_state)
    rate = EPOCHS * len(splits["train"]) / seconds
    return {**best, "bytes": model.bags.num_bytes(), "samples_per_second": rate}


def _fit_trained(job: Job, methods: dict[str, Method]) -> dict[str, Any]:
    """Train dense, then store the trained tables by the method."""
    generator = torch.Generator().manual_seed(job.seed)
    model = MODEL.build(DataSet(job.data).schema, generator=generator)
    trained = train(model, job)
    fitted = {
        name: model.bags.table(name) if isinstance(method, Dense) else method.fit(model.bags.table(name).materialize())
        for name, method in methods.items()
    }
    model.bags = EmbeddingBags(fitted, model.bags.features)
    valid = evaluate_model(model, DataSet(job.data, "valid"))
    test = evaluate_model(model, DataSet(job.data, "test"))
    measured = {"valid_logloss": valid["logloss"], "auc": test["auc"], "logloss": test["logloss"]}
    return {**trained, **measured, "bytes": model.bags.num_bytes()}


def make_sets(names: list[str], root: Path, folder: Path) -> dict[str, Path]:
    """Prepared folders of the data sets that are there."""
    made: dict[str, Path] = {}
    options = PrepareConfig(valid=0.1, test=0.2)
    for name in names:
        out = folder / name
        if name == "planted":
            write_prepared(preset("criteo-kaggle", scale=0.01, rows=130_000), out, valid=0.1, test=0.2)
        elif name == "criteo" and (root / "criteo_kaggle" / "train.tsv.gz").exists():
            prepare([root / "criteo_kaggle" / "train.tsv.gz"], out, options)
        elif name == "bookcrossing" and (root / "bookcrossing" / "BX-Book-Ratings.csv.gz").exists():
            _prepare_bookcrossing(root / "bookcrossing", folder, out)
        else:
            print(f"left out: {name} (not found under {root})")
            continue
        made[name] = out
    return made


def _prepare_bookcrossing(source: Path, folder: Path, out: Path, rows: int = 130_000) -> None:
    """A random sample of the ratings with the books' and users' columns joined; the label is whether it was rated."""
    import polars as pl

    def read(name: str) -> pl.DataFrame:
        """Every field as text; the files' quotes are not always closed, so they are stripped rather than parsed."""
        text = gzip.decompress((source / name).read_bytes()).decode("iso8859-1").encode()
        options: dict[str, Any] = {"infer_schema": False, "quote_char": None, "truncate_ragged_lines": True}
        table = pl.read_csv(text, separator=";", **options)
        return table.select(pl.all().str.strip_chars('"\r').name.map(lambda column: column.strip('"\r')))

    ratings = read("BX-Book-Ratings.csv.gz")
    books = read("BX-Books-noimg.csv.gz").unique("ISBN", keep="first", maintain_order=True)
    users = read("BX-Users.csv.gz").unique("User-ID", keep="first", maintain_order=True)
    joined = ratings.join(books, on="ISBN", how="left").join(users, on="User-ID", how="left")
    joined = joined.select(
        click=(pl.col("Book-Rating") != "0").cast(pl.Int64),
        user=pl.col("User-ID"),
        book=pl.col("ISBN"),
        author=pl.col("Book-Author"),
        publisher=pl.col("Publisher"),
        year=pl.col("Year-Of-Publication"),
        country=pl.col("Location").str.split(",").list.last().str.strip_chars(),
    )
    joined.sample(min(rows, len(joined)), seed=0, shuffle=True).write_parquet(folder / "bookcrossing.parquet")
    schema = folder / "bookcrossing.toml"
    schema.write_text(
        'label = "click"\ncategorical = ["user", "book", "author", "publisher", "year", "country"]\n', encoding="utf-8"
    )
    prepare([folder / "bookcrossing.parquet"], out, PrepareConfig(format="table", schema=schema, valid=0.1, test=0.2))


def tune(sets: dict[str, Path], names: list[str], pool: ProcessPoolExecutor) -> tuple[dict[Any, float], list[dict]]:
    """The learning rate of every (set, method), and the search that found it."""
    jobs = []
    for path in sets.values():
        for method in names:
            for budget in ("1/20", "1/4", "1/100", "1/1000"):
                if methods_of(Job(str(path), method, budget, 0.1, 0)) is not None:
                    jobs += [Job(str(path), method, budget, lr, 0) for lr in RATES]
                    break
    search = []
    best: dict[Any, tuple[float, float]] = {}
    for job, found in zip(jobs, pool.map(run, jobs), strict=True):
        assert found is not None
        search.append({"set": Path(job.data).name, "method": job.method, "lr": job.lr, **found})
        key = (job.data, job.method)
        best[key] = min(best.get(key, (np.inf, 0.0)), (found["valid_logloss"], job.lr))
    return {key: lr for key, (_, lr) in best.items()}, search


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--sets", nargs="+", default=["planted", "criteo", "bookcrossing"])
    parser.add_argument("--methods", nargs="+", default=[*METHODS, "auto"])
    parser.add_argument("--update", action="store_true", help="keep the card's rows of other methods")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        sets = make_sets(arguments.sets, arguments.data, Path(folder))
        rates, search = tune(sets, arguments.methods, pool)
        jobs = [
            Job(str(path), method, budget, rates[str(path), method], seed)
            for path in sets.values()
            for method in arguments.methods
            for budget in (BUDGETS if method != "dense" else ["1/4"])
            for seed in range(arguments.seeds)
            if (str(path), method) in rates
        ]
        found = list(zip(jobs, pool.map(run, jobs), strict=True))
        best = {
            name: best_possible_of(DataSet(path, "test"))["auc"] for name, path in sets.items() if name == "planted"
        }
        sizes = {name: len(DataSet(path, "train")) for name, path in sets.items()}
    rows = summarise(found)
    print_table("AUC at equal bytes", rows)
    if arguments.update:
        before = json.loads((RESULTS / "methods.json").read_text(encoding="utf-8"))["results"]
        assert before["train_rows"] == sizes, "the card is of other data"
        rows += [row for row in before["runs"] if row["method"] not in arguments.methods]
        rows.sort(key=in_order)
        search += [row for row in before["learning_rates"] if row["method"] not in arguments.methods]
    write_card("methods", {"train_rows": sizes, "best_possible_auc": best, "runs": rows, "learning_rates": search})
    draw(rows, best)


def summarise(found: list[tuple[Job, dict[str, Any] | None]]) -> list[dict[str, Any]]:
    """Mean and spread over seeds, a row for each set, method and budget; dense counts as budget 1."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for job, result in found:
        if result is not None:
            budget = "1" if job.method == "dense" else job.budget
            groups.setdefault((Path(job.data).name, budget, job.method), []).append({**result, "lr": job.lr})
    rows = []
    for (name, budget, method), results in groups.items():
        aucs = [result["auc"] for result in results]
        rows.append(
            {
                "set": name,
                "budget": budget,
                "method": method,
                "auc": float(np.mean(aucs)),
                "spread": float(np.max(aucs) - np.min(aucs)),
                "logloss": float(np.mean([result["logloss"] for result in results])),
                "bytes": results[0]["bytes"],
                "samples_per_second": float(np.median([result["samples_per_second"] for result in results])),
                "lr": results[0]["lr"],
                "seeds": len(results),
            }
        )
    return sorted(rows, key=in_order)


def in_order(row: dict[str, Any]) -> tuple[str, float, float]:
    return row["set"], -share_of(row["budget"]), -row["auc"]


def share_of(budget: str) -> float:
    return 1.0 if budget == "1" else BUDGETS[budget]


def draw(rows: list[dict[str, Any]], best: dict[str, float]) -> None:
    """One chart a data set: AUC against the share of the dense bytes, a line a method."""
    for name in dict.fromkeys(row["set"] for row in rows):
        lines: dict[str, list[tuple[float, float]]] = {}
        dense = None
        for row in rows:
            if row["set"] == name and row["method"] == "dense":
                dense = row["auc"]
            elif row["set"] == name:
                lines.setdefault(row["method"], []).append((share_of(row["budget"]), row["auc"]))
        levels = {"dense": dense} if dense is not None else {}
        if name in best:
            levels["best possible"] = best[name]
        line_chart(
            RESULTS / f"methods-{name}.svg",
            {method: sorted(points) for method, points in lines.items()},
            levels=levels,
            title=f"AUC at equal bytes: {name}",
            x_label="share of the dense bytes",
            y_label="test AUC",
        )


if __name__ == "__main__":
    main()
