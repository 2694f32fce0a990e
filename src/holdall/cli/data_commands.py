"""Commands on data: schema, prepare, profile, order, inspect, doctor and demo."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from holdall.cli.options import FLAT, print_json, tyro
from holdall.common.errors import ConfigError
from holdall.data.prepare_config import PrepareConfig
from holdall.popularity.order_config import OrderConfig
from holdall.popularity.profile_config import ProfileConfig


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


def schema(
    action: tyro.conf.Positional[Literal["infer"]],
    source: tyro.conf.Positional[Path],
    label: str | None = None,
    out: Path | None = None,
) -> None:
    """Guess the TOML schema of a raw file, and print it with the reason of each guess.

    Args:
        action: What to do; infer a schema.
        source: CSV, TSV, Parquet or JSON lines file, compressed or not.
        label: Column of the label; guessed by name and values when absent.
        out: File to write, which must not exist; the schema is printed when absent.
    """
    from holdall.data.infer_schema import schema as run

    if out is not None and out.exists():
        raise ConfigError(f"{out} exists: name another file, or remove it")
    made = run(source, label=label)
    if out is None:
        print(made, end="")
    else:
        out.write_text(made, encoding="utf-8")


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


def inspect(
    path: tyro.conf.Positional[Path],
    all: bool = False,
    json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Describe a data set folder, run folder, bundle or checkpoint.

    Args:
        path: Folder to describe.
        all: Show all settings of a run, those at their defaults too.
        json: Print JSON on stdout.
    """
    from holdall.commands import inspect

    description = inspect.inspect(path)
    if json:
        print_json(description)
    else:
        inspect.show(description, all=all)


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
        print_json(found.to_json())
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
