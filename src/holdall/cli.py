"""The command line: one typed function a command; nothing else."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from holdall.data.prepare import PrepareConfig
from holdall.errors import ConfigError, HoldallError, MissingDependencyError, did_you_mean
from holdall.settings import overlay, read_toml
from holdall.training.config import TrainConfig

try:
    import tyro
except ImportError:
    raise MissingDependencyError("tyro", "cli", "the command line") from None


def prepare(
    sources: tyro.conf.Positional[tuple[str, ...]],
    out: Path,
    settings: tyro.conf.OmitArgPrefixes[PrepareConfig] = PrepareConfig(),  # noqa: B008
    config: Path | None = None,
) -> None:
    """Turn raw click logs into a data set folder: ids in popularity order, memory-mapped Arrow files.

    Args:
        sources: Files or globs to read, in order; or the folder of a public data set.
        out: Folder to make.
        config: TOML file with values for the options below; what is given on the command line goes before it.
    """
    from holdall.data.prepare import prepare as run
    from holdall.inspection import inspect, show

    run(sources, out, settings)
    show(inspect(out))


def train(
    data: tyro.conf.Positional[Path],
    out: Path,
    settings: tyro.conf.OmitArgPrefixes[TrainConfig] = TrainConfig(),  # noqa: B008
    config: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> None:
    """Train a model on a prepared data set.

    Args:
        data: Data set folder, as prepare made it.
        out: Run folder to make: checkpoints, metrics.jsonl, TensorBoard files, run.json.
        config: TOML file with values for the options below; what is given on the command line goes before it.
        resume: Go on from the newest checkpoint in the run folder.
        overwrite: Replace the run folder if it exists.
    """
    from holdall.training.trainer import train as run

    result = run(data, out, settings, resume=resume, overwrite=overwrite)
    _report(f"trained {result['steps']:,} steps at {result['samples_per_second']:,.0f} samples/s", result["valid"])
    print(f"next: holdall evaluate {out}", file=sys.stderr)


def evaluate(
    run: tyro.conf.Positional[Path],
    split: Literal["valid", "test", "train"] = "test",
    data: Path | None = None,
    device: str = "auto",
    json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Measure a trained model on a split.

    Args:
        run: Run folder.
        split: Part of the data to measure on.
        data: Another prepared folder with the same ids; the one trained on when absent.
        device: cpu, cuda, or auto for a GPU if there is one.
        json: Print JSON on stdout.
    """
    from holdall.training.evaluation import evaluate as measure

    metrics = measure(run, split, data=data, device=device, quiet=json)
    if json:
        _print_json(metrics)
    else:
        _report(f"{split} split of {run}, {metrics['checkpoint']}", metrics)


def inspect(path: tyro.conf.Positional[Path], json: Annotated[bool, tyro.conf.arg(name="json")] = False) -> None:
    """Say what a data folder, run folder or checkpoint holds.

    Args:
        path: The artifact.
        json: Print JSON on stdout.
    """
    from holdall import inspection

    description = inspection.inspect(path)
    if json:
        _print_json(description)
    else:
        inspection.show(description)


def demo(out: Path = Path("demo-run"), rows: int = 400_000, overwrite: bool = False) -> None:
    """Generate a click log, prepare it, train on it and measure it: the whole way, on made-up data.

    Args:
        out: Folder for everything the demo makes.
        rows: Clicks to generate.
        overwrite: Replace the folder if it exists.
    """
    from holdall.demo import run

    run(out, rows=rows, overwrite=overwrite)


COMMANDS: dict[str, Callable[..., None]] = {
    "prepare": prepare,
    "train": train,
    "evaluate": evaluate,
    "inspect": inspect,
    "demo": demo,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; user errors end with one message and exit code 2, Ctrl-C with 130."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    if debug:
        given.remove("--debug")
    try:
        commands = _with_settings_file(given)
        tyro.extras.subcommand_cli_from_dict(
            commands, prog="holdall", description="Train and serve recommenders whose tables do not fit.", args=given
        )
    except HoldallError as error:
        if debug:
            raise
        _fail(str(error), 2)
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except KeyboardInterrupt as error:
        if debug:
            raise
        _fail(str(error) or "interrupted", 130)


def _with_settings_file(given: Sequence[str]) -> dict[str, Callable[..., None]]:
    """The commands, with the settings of the chosen one taken from its `--config FILE`, if it has one."""
    commands = dict(COMMANDS)
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
        # Not functools.wraps: it would make the signature, and so the defaults, those of the plain function.
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


def _report(title: str, metrics: dict[str, Any] | None) -> None:
    from rich.console import Console

    from holdall.inspection import table

    console = Console()
    console.print(f"[bold]{title}[/bold]")
    if metrics:
        shown = table("metric", "value")
        for name, value in metrics.items():
            if isinstance(value, int | float):
                shown.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:.6g}")
        console.print(shown)


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2))


def _fail(message: str, code: int) -> None:
    print(f"holdall: {message}", file=sys.stderr)
    raise SystemExit(code)
