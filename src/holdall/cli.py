"""Command line: one typed function a command, and the handling of its errors."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from holdall.common.errors import ConfigError, HoldallError, MissingDependencyError, did_you_mean
from holdall.common.settings import flag, overlay, read_toml
from holdall.common.system_errors import explained
from holdall.data.prepare import PrepareConfig
from holdall.planning.config import PlanConfig
from holdall.popularity.order import OrderConfig
from holdall.popularity.profiling import ProfileConfig
from holdall.training.config import TrainConfig

try:
    import tyro
except ImportError:
    raise MissingDependencyError("tyro", "cli", "the command line") from None

FLAT = (tyro.conf.OmitArgPrefixes, tyro.conf.arg(name=""))
"""Annotation of settings: flags have the names of settings, without their parts; each part is a panel of `--help`."""


MAX_NUMBER = 2**63 - 1


def prepare(
    sources: tyro.conf.Positional[tuple[str, ...]],
    out: Path,
    settings: Annotated[PrepareConfig, *FLAT] = PrepareConfig(),  # noqa: B008
    config: Path | None = None,
) -> None:
    """Convert raw click logs to a data set folder, with ids in popularity order.

    Args:
        sources: Files or globs to read, in order; or the folder of a public data set.
        out: Folder to write.
        config: TOML file with values for the options below; flags take precedence.
    """
    from holdall.commands.inspect import inspect, show
    from holdall.common.output_folder import refuse_place
    from holdall.data.prepare import prepare as run

    refuse_place(out, () if config is None else [config])
    run(sources, out, settings)
    show(inspect(out))


def profile(
    sources: tyro.conf.Positional[tuple[str, ...]],
    out: Path,
    settings: Annotated[ProfileConfig, *FLAT] = ProfileConfig(),  # noqa: B008
    figures: Path | None = None,
    dim: int = 16,
    json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Count the lookups of every id: coverage, cache misses, drift, fully hot inputs.

    Args:
        sources: A data set folder; or raw files or globs, in order.
        out: File to write, such as popularity.json; counts of the rows of a data set go beside it (.safetensors).
        figures: Folder for SVG figures of coverage, thresholds and hot bytes.
        dim: Numbers (float32) in a table row, to compute the bytes of hot rows.
        json: Print the profile as JSON on stdout.
    """
    from holdall.popularity.profiling import profile as run
    from holdall.popularity.render import show
    from holdall.report.popularity import figures as draw

    if dim < 1:
        raise ConfigError(f"dim is {dim}, but must be 1 or more")
    made = run(sources, out, settings)
    if json:
        print(out.read_text(encoding="utf-8"), end="")
    else:
        show(made, dim)
    for path in draw(made, figures, dim) if figures is not None else ():
        print(f"wrote {path}", file=sys.stderr)


def order(
    data: tyro.conf.Positional[Path],
    out: Path,
    settings: Annotated[OrderConfig, *FLAT] = OrderConfig(),  # noqa: B008
    like: Path | None = None,
) -> None:
    """Renumber the tails of large tables so that ids that occur together are neighbours.

    Args:
        data: Data set folder that `holdall prepare` wrote; it is not changed.
        out: Folder to write.
        like: Ordered folder whose order is reused; options of the search are then ignored.
    """
    from holdall.popularity.order import order as run
    from holdall.popularity.order import show

    show(run(data, out, settings, like=like))


def hardware(
    out: Path | None = None,
    device: str = "auto",
    disk: Path = Path("."),
    json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Measure the rates of this machine for plans. Takes 1-2 minutes, a few more on a GPU.

    Args:
        out: File to write; when absent, the one that `holdall plan` reads by default.
        device: Device to measure: cpu, cuda, or auto for a GPU if there is one.
        disk: Folder on the disk to measure; a file is written there and removed.
        json: Print the rates as JSON on stdout.
    """
    from holdall.common.output_folder import refuse_other_file
    from holdall.planning.machine.hardware import FORMAT, default_path
    from holdall.planning.machine.measure import hardware as measure_hardware
    from holdall.planning.render import show_hardware

    out = default_path() if out is None else out
    refuse_other_file(out, FORMAT)
    measured = measure_hardware(device, folder=disk, note=lambda stage: print(f"measuring {stage}", file=sys.stderr))
    if int(os.environ.get("RANK", "0")) == 0:  # under torchrun all ranks measure, rank 0 writes
        measured.save(out)
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
        _print_json(made.to_json())
    else:
        show(made)
        if explanation is not None:
            show_explanation(explanation, made)
    if out is not None:
        save_plan(made, out)
        start = "holdall" if made.world_size == 1 else f"torchrun --nproc-per-node {made.world_size} -m holdall"
        print(f"wrote {out}; next: {start} train {data} --out run --plan {out}", file=sys.stderr)


def simulate(
    plan: tyro.conf.Positional[Path],
    world_size: str = "8..4096",
    strategy: Literal["two-fold", "row-wise", "table-wise", "data-parallel"] = "two-fold",
    hardware: Path | None = None,
    data: Path | None = None,
    profile: Path | None = None,
    batch_size: int | None = None,
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
        json: Print JSON on stdout.
    """
    from holdall.commands.simulate import show
    from holdall.commands.simulate import simulate as run

    simulation = run(plan, world_size, strategy, hardware=hardware, data=data, profile=profile, batch_size=batch_size)
    if json:
        _print_json(simulation.to_json())
    else:
        show(simulation)


def train(
    data: tyro.conf.Positional[Path],
    out: Path,
    settings: Annotated[TrainConfig, *FLAT] = TrainConfig(),  # noqa: B008
    config: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> None:
    """Train a model on a prepared data set.

    Args:
        data: Data set folder that `holdall prepare` wrote.
        out: Run folder to write: checkpoints, metrics.jsonl, TensorBoard files, run.json.
        config: TOML file with values for the options below; flags take precedence.
        resume: Continue from the newest checkpoint in the run folder.
        overwrite: Replace an older run; it is removed when the new one has its first checkpoint.
    """
    from holdall.commands.metrics import show_metrics, show_stages
    from holdall.common.output_folder import refuse_place
    from holdall.training.trainer import train as run

    if config is not None and not resume:
        refuse_place(out, [config])
    result = run(data, out, settings, resume=resume, overwrite=overwrite)
    if int(os.environ.get("RANK", "0")) != 0:  # under torchrun all ranks train, rank 0 prints
        return
    show_metrics(f"trained {result['steps']:,} steps at {result['samples_per_second']:,.0f} samples/s", result["valid"])
    if result.get("hot_share_of_inputs") == 1.0:
        print(
            "every input is fully hot within these bytes, so there were no cold batches and nothing was moved: "
            "--strategy plain does the same",
            file=sys.stderr,
        )
    if result.get("stages"):
        show_stages(result["stages"])
    print(f"next: holdall evaluate {out}", file=sys.stderr)


def evaluate(
    run: tyro.conf.Positional[Path],
    split: Literal["valid", "test", "train"] = "test",
    data: Path | None = None,
    k: int | None = None,
    group_by: str | None = None,
    device: str = "auto",
    json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Evaluate a trained or released model on a split.

    Args:
        run: Run folder or bundle.
        split: Split to evaluate on.
        data: Another data set folder with the same ids; the one trained on when absent. A bundle needs it.
        k: K of HR@K and NDCG@K, of held-out events of implicit data (10 when absent) or of clicks by --group-by.
        group_by: Feature, such as user: AUC is also computed within the rows of each of its ids (gauc).
        device: cpu, cuda, or auto for a GPU if there is one.
        json: Print JSON on stdout.
    """
    from holdall.commands.metrics import show_metrics
    from holdall.serving.evaluate import evaluate as measure

    metrics = measure(run, split, data=data, k=k, group_by=group_by, device=device, quiet=json)
    if json:
        _print_json(metrics)
        return
    checkpoint = f", {metrics['checkpoint']}" if metrics["checkpoint"] else ""
    show_metrics(f"{split} split of {run}{checkpoint}", metrics)
    if metrics.get("dropped"):
        print(f"{metrics['dropped']:,} candidates did not count: the chosen item itself, or an item listed twice")


def release(
    run: tyro.conf.Positional[Path],
    out: Path,
    budget: str | None = None,
    max_auc_loss: float | None = None,
    polish: int = 0,
    as_trained: bool = False,
    data: Path | None = None,
    device: str = "auto",
    overwrite: bool = False,
    json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Write the model of a run as a bundle, in a small form that is proved to be as good.

    Args:
        run: Run folder.
        out: Folder to write.
        budget: Size of all tables, such as 16MB, or a share of their bytes as float32 rows, such as 1/100. When absent,
            the smallest form within --max-auc-loss.
        max_auc_loss: Largest loss of AUC on the validation split, with 95% confidence: 0.0005 when absent, and no limit
            with --budget.
        polish: Epochs, at most, that forms are trained on at each of a few rates; kept where validation says so.
        as_trained: Keep the tables as they were trained.
        data: Data set folder with the same ids; the one trained on when absent.
        device: cpu, cuda, or auto for a GPU if there is one.
        overwrite: Replace an older bundle.
        json: Print the description of the bundle as JSON on stdout.
    """
    from holdall.commands.inspect import inspect, show
    from holdall.common.console import make_console
    from holdall.serving.gate import GateError
    from holdall.serving.release import release as run_release
    from holdall.serving.render import show_front

    try:
        run_release(
            run,
            out,
            budget=budget,
            max_auc_loss=max_auc_loss,
            polish=polish,
            as_trained=as_trained,
            data=data,
            device=device,
            overwrite=overwrite,
            note=lambda row: print(f"tested {row.budget}: {row.verdict}", file=sys.stderr),
        )
    except GateError as refused:
        if not json:
            show_front([row.to_json() for row in refused.front], make_console())
        raise
    if json:
        _print_json(inspect(out))
    else:
        show(inspect(out))


def inspect(path: tyro.conf.Positional[Path], json: Annotated[bool, tyro.conf.arg(name="json")] = False) -> None:
    """Describe a data set folder, run folder, bundle or checkpoint.

    Args:
        path: Folder to describe.
        json: Print JSON on stdout.
    """
    from holdall.commands import inspect

    description = inspect.inspect(path)
    if json:
        _print_json(description)
    else:
        inspect.show(description)


def doctor(
    data: tyro.conf.Positional[Path],
    plan: tyro.conf.Positional[Path | None] = None,
    verify: bool = False,
    json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Check labels, numbers, ids and memory before training; predict the time of an epoch.

    Args:
        data: Data set folder that `holdall prepare` wrote.
        plan: Plan for the data set, to compare with the memory of this machine.
        verify: Read every file and compare its hash, also of files that this machine has checked before.
        json: Print JSON on stdout.
    """
    from holdall.commands.doctor import doctor as run
    from holdall.commands.doctor import show

    found = run(data, plan, verify=verify)
    if json:
        _print_json(found.to_json())
    else:
        show(found)
    if found.problems:
        raise SystemExit(1)


def demo(out: Path = Path("demo-run"), rows: int = 400_000, overwrite: bool = False) -> None:
    """Generate a click log, prepare it, train and evaluate: every stage on synthetic data.

    Args:
        out: Folder for everything the demo writes.
        rows: Clicks to generate.
        overwrite: Replace the folder of an earlier demo.
    """
    from holdall.commands.demo import demo as run
    from holdall.commands.demo import show
    from holdall.common.console import make_console

    console = make_console(soft_wrap=True)
    show(run(out, rows=rows, overwrite=overwrite, note=console.print), console)


COMMANDS: dict[str, Callable[..., None]] = {
    "prepare": prepare,
    "profile": profile,
    "order": order,
    "hardware": hardware,
    "plan": plan,
    "simulate": simulate,
    "train": train,
    "evaluate": evaluate,
    "release": release,
    "inspect": inspect,
    "doctor": doctor,
    "demo": demo,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; user errors end with one message and exit code 2, Ctrl-C with 130."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    if debug:
        given.remove("--debug")
    plain_format, warnings.formatwarning = warnings.formatwarning, _format_warning
    plain_hook, threading.excepthook = threading.excepthook, threading.excepthook if debug else _report_of_thread
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of any bytes can be printed
    try:
        _refuse_other_encodings(given)
        _refuse_repeated(given)
        _parse(given)()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output, such as `head`, has ended
        _drop_output()
        raise SystemExit(1) from None
    except KeyboardInterrupt as error:
        if debug:
            raise
        _fail(str(error) or "interrupted", 130)
    except Exception as error:
        if debug:
            raise
        _report(error, given)
    finally:
        warnings.formatwarning, threading.excepthook = plain_format, plain_hook


def _report(error: Exception, given: Sequence[str]) -> None:
    """End with the sentence of an error that a user can mend; raise any other."""
    if not isinstance(error, HoldallError):
        out = _option(given, "--out")
        sentence = explained(error, f"holdall {given[0]}" if out is None else out)
        if sentence is None:
            raise error
        error = HoldallError(sentence)
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _fail_as_rank(error)
    _fail(str(error), 2)


def _report_of_thread(failed: threading.ExceptHookArgs) -> None:
    """Leave errors of the system to the thread that waits for the result: it ends with their sentence."""
    if failed.exc_value is None or explained(failed.exc_value, "") is None:
        threading.__excepthook__(failed)


def _drop_output() -> None:
    """Point stdout to nowhere, so that Python does not fail to write what is left of it when it ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse_other_encodings(given: Sequence[str]) -> None:
    for word in given:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"the argument {word.encode('utf-8', 'backslashreplace').decode()} is not valid UTF-8: rename the file "
                f"or folder"
            ) from None


def _refuse_repeated(given: Sequence[str]) -> None:
    """Refuse an option that is given twice: only one of its values would count, without a word about the other."""
    options = itertools.takewhile(lambda word: word != "--", given)
    names = [flag(word[2:].partition("=")[0]) for word in options if word.startswith("--")]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ConfigError(f"{name} is given twice: give it once, with all of its values after it")


def _parse(given: Sequence[str]) -> Callable[[], None]:
    """The command of these words, ready to run.

    tyro prints every `ValueError` of a settings class in a box of its own and exits. Our errors are such, but end as
    all others of ours do, so its words are held back until it is clear that the error is not ours.
    """
    commands = _with_settings_file(given)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            call: functools.partial[None] = tyro.extras.subcommand_cli_from_dict(
                commands,
                prog="holdall",
                description="Train recommendation models whose embedding tables do not fit the hardware.",
                args=given,
                config=(tyro.conf.PositionalMetavarFromFieldName,),
            )
    except SystemExit as stop:
        cause: BaseException | None = stop
        while cause is not None and not isinstance(cause, HoldallError):
            cause = cause.__context__
        if cause is not None:
            raise cause from None
        print(said.getvalue(), end="", file=sys.stderr)
        raise
    _refuse_huge(call.keywords)
    return call


def _refuse_huge(options: Mapping[str, Any]) -> None:
    """Refuse whole numbers that 64 bits do not hold, naming the option."""
    for name, value in options.items():
        if is_dataclass(value) and not isinstance(value, type):
            _refuse_huge({entry.name: getattr(value, entry.name) for entry in fields(value)})
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and abs(number) > MAX_NUMBER:
                raise ConfigError(f"{flag(name)} has a number of {len(str(abs(number)))} digits: at most {MAX_NUMBER}")


def _deferred(command: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """`command` with its signature, which returns a call of it instead of running it."""

    @functools.wraps(command)
    def call(*args: Any, **options: Any) -> Callable[[], None]:
        return functools.partial(command, *args, **options)

    return call


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Our own warnings as a sentence, without the line of code; others as Python formats them."""
    if Path(filename).is_relative_to(Path(__file__).parent):
        return f"holdall: warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _with_settings_file(given: Sequence[str]) -> dict[str, Callable[..., Callable[[], None]]]:
    """The commands, deferred; `--config FILE`, if given, sets the defaults of the one to run."""
    commands = {name: _deferred(command) for name, command in COMMANDS.items()}
    command = given[0] if given else "--help"
    if command not in commands:
        if not command.startswith("-"):
            raise ConfigError(f"no command '{command}'{did_you_mean(command, commands)}")
        return commands
    path = _option(given, "--config")
    if path is not None:
        defaults: dict[str, Any] = {"train": TrainConfig, "prepare": PrepareConfig}
        if command not in defaults:
            raise ConfigError(f"--config goes with {' and '.join(defaults)}, not with {command}")
        settings = overlay(defaults[command](), read_toml(Path(path)), path)
        function = functools.partial(commands[command], settings=settings)
        # Not functools.wraps: tyro would read the signature, and so the defaults, of the plain function.
        function.__doc__ = commands[command].__doc__
        commands[command] = function
    return commands


def _option(given: Sequence[str], name: str) -> str | None:
    """The value of an option, written as `--name VALUE` or `--name=VALUE`."""
    for word, following in zip(given, [*given[1:], None], strict=True):
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
        if word == name:
            return following
    return None


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2))


def _fail_as_rank(error: HoldallError) -> None:
    """Under torchrun: print which rank failed, unless another rank prints it."""
    from holdall.distributed.processes import PeerError

    if isinstance(error, PeerError):
        raise SystemExit(2)
    rank = f"rank {os.environ.get('RANK', '0')}"
    _fail(str(error) if str(error).startswith((f"{rank}, ", f"{rank}: ")) else f"{rank}: {error}", 2)


def _fail(message: str, code: int) -> None:
    print(f"holdall: {message}", file=sys.stderr)
    raise SystemExit(code)
