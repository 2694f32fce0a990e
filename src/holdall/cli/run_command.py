"""Command line: the words of a command to a call of its function, and the handling of its errors."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import shlex
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from holdall import __version__
from holdall.cli.data_commands import demo, doctor, inspect, order, prepare, profile, schema
from holdall.cli.export_command import export
from holdall.cli.options import import_model, tyro
from holdall.cli.serve_command import serve
from holdall.cli.serving_commands import publish, release, score, verify
from holdall.cli.training_commands import evaluate, hardware, plan, simulate, train
from holdall.cli.usage_errors import usage_error
from holdall.common.errors import ConfigError, HoldallError, OwnModelError, did_you_mean
from holdall.common.settings import flag, overlay, read_toml
from holdall.common.system_errors import explained
from holdall.data.prepare_config import PrepareConfig
from holdall.training.config import TrainConfig

MAX_NUMBER = 2**63 - 1
DESCRIPTION = (
    "Train recommendation models whose embedding tables do not fit the hardware. `holdall COMMAND --help` lists the "
    "options of a command; `holdall --version` prints the version."
)

COMMANDS: dict[str, Callable[..., None]] = {
    "schema": schema,
    "prepare": prepare,
    "profile": profile,
    "order": order,
    "hardware": hardware,
    "plan": plan,
    "simulate": simulate,
    "train": train,
    "evaluate": evaluate,
    "release": release,
    "score": score,
    "verify": verify,
    "publish": publish,
    "serve": serve,
    "export": export,
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
        if given == ["--version"]:
            print(f"holdall {__version__}")
        else:
            _command(given or ["--help"])()
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
    if isinstance(error, OwnModelError):
        error = ConfigError(
            f"'{error.name}' is a model of your own, and a file does not import code: give it again, as "
            f"{shlex.join(['holdall', *_without(given, '--model'), '--model', error.name])}"
        )
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


def _command(given: Sequence[str]) -> Callable[[], None]:
    """The command of these words, after checks of the words themselves."""
    _refuse_other_encodings(given)
    _refuse_repeated(given)
    own_model = _option(given, "--model")
    if own_model is not None and ":" in own_model:
        import_model(own_model)  # before settings are made, which name it
    return _parse(given)


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
                description=DESCRIPTION,
                args=given,
                config=(tyro.conf.PositionalMetavarFromFieldName,),
            )
    except SystemExit as stop:
        cause: BaseException | None = stop
        while cause is not None and not isinstance(cause, HoldallError):
            cause = cause.__context__
        if cause is not None:
            raise cause from None
        sentence = usage_error(said.getvalue(), given) if stop.code else None
        if sentence is not None:
            raise ConfigError(sentence) from None
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
    if Path(filename).is_relative_to(Path(__file__).parent.parent):
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


def _without(given: Sequence[str], name: str) -> list[str]:
    """The words of a command without an option and its value."""
    before = [None, *given[:-1]]
    return [
        word
        for word, last in zip(given, before, strict=True)
        if word != name and last != name and not word.startswith(f"{name}=")
    ]


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
