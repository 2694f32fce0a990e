"""Hot rows while popularity drifts: share of lookups that are hot, day by day, with and without refreshing.

    python -m benchmarks.drift [--days 8] [--steps 150]

Ids are drawn by a Zipf law whose ranks are dealt out anew to a fifth of the ids every day. Hot rows are chosen from the
first day's counts; `--refresh-hot` swaps them for those that were looked up more, counted while training. The best
possible share, with the day's most popular rows known beforehand, is beside it, and both runs must end with the same
model, bit for bit: where a row lives changes nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.card import print_table, write_card
from holdall.data.batch import Batch, Ids
from holdall.data.schema import DenseColumn, Feature, Schema
from holdall.models.dlrm import DLRMConfig
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tiers.pipeline import Pipeline
from holdall.tiers.placement import place

ROWS = (100_000, 50_000, 20_000)
HOT_SHARE = 0.02
CHANGED = 0.2
"""Share of the ids that get another rank from one day to the next."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=8)
    parser.add_argument("--steps", type=int, default=150, help="steps a day")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--every", type=int, nargs="+", default=[25, 75], help="refresh after so many steps")
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    runs = {"never": run(arguments, None)}
    runs.update({f"every {steps}": run(arguments, steps) for steps in arguments.every})
    best = best_possible(arguments)
    rows = [
        {"day": day + 1, **{name: found["shares"][day] for name, found in runs.items()}, "best possible": best[day]}
        for day in range(arguments.days)
    ]
    print_table("share of lookups that are hot", rows)
    states = [found.pop("state") for found in runs.values()]
    same = all(torch.equal(state[name], states[0][name]) for state in states[1:] for name in states[0])
    if not same:
        raise SystemExit("the runs ended with different models")
    write_card(
        "drift", {"days": rows, "moved_bytes_per_sample": {n: r["moved"] for n, r in runs.items()}, "equal": same}
    )


def run(arguments: argparse.Namespace, every: int | None) -> dict[str, Any]:
    features = tuple(Feature(name=f"C{i}", num_rows=rows, unseen=rows - 1) for i, rows in enumerate(ROWS))
    schema = Schema(label="y", dense=(DenseColumn(name="d"),), features=features)
    torch.manual_seed(0)
    model = DLRMConfig(dim=16, bottom=(32,), top=(32,)).build(schema)
    hot = {feature.name: int(feature.num_rows * HOT_SHARE) for feature in features}
    tiers = place(model, hot, "cpu", refreshes=every is not None)
    pipeline = Pipeline(tiers, 0, refresh_every=every)
    optimizers = Optimizers(model, OptimizerConfig(lr=0.05))
    shares, step = [], 0
    for day in range(arguments.days):
        before = tiers.traffic
        for _, moved in pipeline.steps(batches(arguments, day), lambda batch: None, first=step):
            F.binary_cross_entropy_with_logits(model(moved), moved.label).backward()
            optimizers.step()
            pipeline.finish_step()
            step += 1
            if every is not None and step % every == 0:
                pipeline.refresh()
        after = tiers.traffic
        shares.append((after.hot_lookups - before.hot_lookups) / (after.lookups - before.lookups))
    tiers.flush()
    with tiers.in_order_of_ids():
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moved_bytes = tiers.traffic.total / (step * arguments.batch_size)
    return {"shares": shares, "moved": moved_bytes, "state": state}


def ranking(table: int, day: int) -> np.ndarray:
    """Id of every rank on a day; on the first it is the rank itself."""
    order = np.arange(ROWS[table])
    for date in range(1, day + 1):
        rng = np.random.default_rng([table, date])
        chosen = rng.choice(ROWS[table], int(CHANGED * ROWS[table]), replace=False)
        order[chosen] = order[rng.permutation(chosen)]
    return order


def popularity(table: int) -> np.ndarray:
    weights = 1.0 / np.arange(1, ROWS[table] + 1) ** 1.05
    return np.cumsum(weights / weights.sum())


def batches(arguments: argparse.Namespace, day: int) -> Iterator[Batch]:
    orders, laws = [ranking(t, day) for t in range(len(ROWS))], [popularity(t) for t in range(len(ROWS))]
    rng = np.random.default_rng([99, day])
    for _ in range(arguments.steps):
        draws = rng.random((len(ROWS), arguments.batch_size))
        ranks = [np.minimum(np.searchsorted(law, draw), len(law) - 1) for law, draw in zip(laws, draws, strict=True)]
        ids = np.stack([order[rank] for order, rank in zip(orders, ranks, strict=True)]).astype(np.int32)
        dense = torch.from_numpy(rng.random((arguments.batch_size, 1)).astype(np.float32))
        label = torch.from_numpy((rng.random(arguments.batch_size) < 0.3).astype(np.float32))
        yield Batch(dense, Ids(torch.from_numpy(ids), None, len(ROWS)), label)


def best_possible(arguments: argparse.Namespace) -> list[float]:
    """Share of the lookups that go to the most popular rows of the day: the same every day."""
    shares = [popularity(table)[int(ROWS[table] * HOT_SHARE) - 1] for table in range(len(ROWS))]
    return [float(np.mean(shares))] * arguments.days


if __name__ == "__main__":
    main()
