"""Commands of training: hardware, plan, simulate, train and evaluate."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from holdall.cli.options import FLAT, model_again, print_json, refuse_other_model, tyro
from holdall.common.files import quoted
from holdall.planning.config import PlanConfig
from holdall.training.config import TrainConfig


def hardware(
    out: Path | None = None,
    device: str = "auto",
    disk: Path = Path("."),
    quick: bool = False,
    json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Measure the rates of this machine for plans. Takes a minute at most, a few on a GPU.

    Args:
        out: File to write; when absent, the one that `holdall plan` reads by default.
        device: Device to measure: cpu, cuda, or auto for a GPU if there is one.
        disk: Folder on the disk to measure; a file is written there and removed.
        quick: Measure fewer sizes once, in ten seconds; forecasts are rougher.
        json: Print the rates as JSON on stdout.
    """
    from holdall.commands.hardware import measure_machine, save_rates
    from holdall.common.output_folder import refuse_other_file
    from holdall.planning.machine.hardware import FORMAT, default_path
    from holdall.planning.render import show_hardware

    out = default_path() if out is None else out
    refuse_other_file(out, FORMAT)
    measured = measure_machine(device, disk, quick=quick)
    if int(os.environ.get("RANK", "0")) == 0:  # under torchrun all ranks measure, rank 0 writes
        save_rates(measured, out)
        if json:
            print(out.read_text(encoding="utf-8"), end="")
        else:
            show_hardware(measured)
        print(f"wrote {out}", file=sys.stderr)


def plan(
    data: tyro.conf.Positional[Path],
    out: Path | None = None,
    settings: Annotated[PlanConfig, *FLAT] = PlanConfig(),  # noqa: B008
    hardware: Path | None = None,
    profile: Path | None = None,
    edited: Path | None = None,
    explain: str | None = None,
    json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Choose method, hot rows and placement of every table; predict time and memory.

    Args:
        data: Data set folder that `holdall prepare` wrote.
        out: File to write, such as plan.json; nothing is written when absent.
        hardware: hardware.json that `holdall hardware` wrote; this machine's when absent, measured now if missing.
        profile: popularity.json of the data set; its lookups are counted when absent.
        edited: Plan changed by hand, to predict again instead of making one.
        explain: Table whose placement is explained.
        json: Print the plan as JSON on stdout.
    """
    from holdall.commands.plan import make_plan, save_plan
    from holdall.common.output_folder import refuse_other_file
    from holdall.planning.explain import show_explanation
    from holdall.planning.plan import FORMAT
    from holdall.planning.render import show

    if out is not None:
        refuse_other_file(out, FORMAT)
    made, explanation = make_plan(data, settings, hardware=hardware, profile=profile, edited=edited, explain=explain)
    if json:
        print_json(made.to_json())
    else:
        show(made)
        if explanation is not None:
            show_explanation(explanation, made)
    if out is not None:
        save_plan(made, out)
        start = "holdall" if made.world_size == 1 else f"torchrun --nproc-per-node {made.world_size} -m holdall"
        again = model_again(settings.model.model)
        print(f"wrote {out}; next: {start} train {quoted(data)} --out run --plan {quoted(out)}{again}", file=sys.stderr)


def simulate(
    plan: tyro.conf.Positional[Path],
    world_size: str = "8..4096",
    strategy: Literal["two-fold", "row-wise", "table-wise", "data-parallel"] = "two-fold",
    hardware: Path | None = None,
    data: Path | None = None,
    profile: Path | None = None,
    batch_size: int | None = None,
    model: str | None = None,
    json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Predict step time, bytes sent and memory of a plan for other numbers of processes.

    Args:
        plan: Plan for two processes or more.
        world_size: Numbers of processes: 8, 1,2,4, or the powers of two of a range such as 8..4096.
        strategy: How tables are sharded: two-fold with the plan's hot rows, row-wise, table-wise or data-parallel.
        hardware: hardware.json measured under torchrun; this machine's when absent.
        data: Data set folder of the plan; when absent, found by its name here or beside the plan.
        profile: popularity.json of the data set; its lookups are counted when absent.
        batch_size: Samples in a step, over all processes; when absent, each process keeps its share of the plan's.
        model: The model that it was trained with, where that is one of your own: package.module:Config.
        json: Print JSON on stdout.
    """
    from holdall.commands.simulate import show
    from holdall.commands.simulate import simulate as run

    simulation = run(plan, world_size, strategy, hardware=hardware, data=data, profile=profile, batch_size=batch_size)
    if json:
        print_json(simulation.to_json())
    else:
        show(simulation)


def train(
    data: tyro.conf.Positional[Path],
    out: Path,
    settings: Annotated[TrainConfig, *FLAT] = TrainConfig(),  # noqa: B008
    config: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    track: tuple[Literal["mlflow", "wandb"], ...] = (),
) -> None:
    """Train a model on a prepared data set.

    Args:
        data: Data set folder that `holdall prepare` wrote.
        out: Run folder to write: checkpoints, metrics.jsonl, TensorBoard files, run.json.
        config: TOML file with values for the options below; flags take precedence.
        resume: Continue from the newest checkpoint in the run folder.
        overwrite: Replace an older run; it is removed when the new one has its first checkpoint.
        track: Send metrics to MLflow or Weights & Biases, too; their own variables say where.
    """
    from holdall.commands.hardware import check_plan_rates
    from holdall.commands.metrics import show_stages
    from holdall.commands.train_summary import show_training
    from holdall.common.output_folder import refuse_place
    from holdall.integrations.trackers import TRACKERS
    from holdall.training.train import train as run

    if config is not None and not resume:
        refuse_place(out, [config])
    plan = settings.placement.plan
    if plan is not None and int(os.environ.get("WORLD_SIZE", "1")) == 1 and (off := check_plan_rates(Path(plan))):
        print(off, file=sys.stderr)
    callbacks = [TRACKERS[name]() for name in track]
    result = run(data, out, settings, resume=resume, overwrite=overwrite, callbacks=callbacks)
    if int(os.environ.get("RANK", "0")) != 0:  # under torchrun all ranks train, rank 0 prints
        return
    show_training(result)
    if result.get("hot_share_of_inputs") == 1.0:
        print(
            "every input is fully hot within these bytes, so there were no cold batches and nothing was moved: "
            "--strategy plain does the same",
            file=sys.stderr,
        )
    if result.get("stages"):
        show_stages(result["stages"])
    print(f"next: holdall evaluate {quoted(out)}{model_again(settings.model.model)}", file=sys.stderr)


def evaluate(
    run: tyro.conf.Positional[Path],
    split: Literal["valid", "test", "train"] = "test",
    data: Path | None = None,
    k: int | None = None,
    group_by: str | None = None,
    model: str | None = None,
    device: str = "auto",
    json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Evaluate a trained or released model on a split.

    Args:
        run: Run folder, bundle or published folder.
        split: Split to evaluate on.
        data: Another data set folder with the same ids; the one trained on when absent. A bundle needs it.
        k: K of HR@K and NDCG@K, of held-out events of implicit data (10 when absent) or of clicks by --group-by.
        group_by: Feature, such as user: AUC is also computed within the rows of each of its ids (gauc).
        model: The model that it was trained with, where that is one of your own: package.module:Config.
        device: cpu, cuda, or auto for a GPU if there is one.
        json: Print JSON on stdout.
    """
    from holdall.commands.metrics import show_metrics
    from holdall.serving.evaluate import evaluate as measure

    refuse_other_model(run, model)
    metrics = measure(run, split, data=data, k=k, group_by=group_by, device=device, quiet=json)
    if json:
        print_json(metrics)
        return
    checkpoint = f", {metrics['checkpoint']}" if metrics["checkpoint"] else ""
    show_metrics(f"{split} split of {run}{checkpoint}", metrics)
    if metrics.get("dropped"):
        print(f"{metrics['dropped']:,} candidates did not count: the chosen item itself, or an item listed twice")
