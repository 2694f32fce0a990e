"""Command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import holdall
from holdall.cli import COMMANDS, main
from holdall.common.settings import flag, sections
from holdall.data.synthetic import preset, write_tsv
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import load_model

FAST = ["--dim", "4", "--bottom", "8", "--top", "8", "--batch-size", "128"]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("raw") / "clicks.tsv.gz"
    write_tsv(preset("criteo-kaggle", scale=1e-5, rows=1500), path)
    return path


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """Run a command that must fail; returns what it said on stderr."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err


def test_every_command_is_a_function_of_the_package() -> None:
    for name in COMMANDS:
        assert callable(getattr(holdall, name)), name
        assert name in holdall.__all__


def test_from_a_raw_log_to_metrics(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = str(tmp_path / "data"), str(tmp_path / "run")
    main(["prepare", str(log), "--out", data, "--valid", "0.1", "--test", "0.2"])
    assert "C26" in capsys.readouterr().out
    main(["train", data, "--out", run, "--epochs", "1", "--optimizer", "adagrad", "--lr", "0.02", *FAST])
    assert "samples/s" in capsys.readouterr().out
    main(["evaluate", run, "--split", "test", "--json"])
    metrics = json.loads(capsys.readouterr().out)
    assert {"auc", "logloss", "accuracy", "normalized_entropy", "samples"} <= metrics.keys()
    main(["evaluate", run, "--split", "valid"])
    assert "normalized_entropy" in capsys.readouterr().out
    main(["train", data, "--out", run, "--epochs", "2", "--resume", "--optimizer", "adagrad", "--lr", "0.02", *FAST])
    for path in (data, run, f"{run}/checkpoints/{json.loads(_inspected(run, capsys))['checkpoint']}"):
        assert json.loads(_inspected(path, capsys))["path"] == path
        main(["inspect", path])
        assert path.rsplit("/", 1)[-1] in capsys.readouterr().out.replace("\n", "")


def _inspected(path: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    main(["inspect", path, "--json"])
    return capsys.readouterr().out


def test_settings_file_goes_under_the_flags(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("batch-size = 64\nsteps = 3\nlr = 1\ntop = [8]\nbottom = [8]\ndim = 4\n")
    main(["train", str(data), "--out", str(tmp_path / "run"), "--config", str(file), "--lr", "0.5"])
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["config"]["train"]
    assert (settings["batch_size"], settings["steps"], settings["lr"], settings["top"]) == (64, 3, 0.5, [8])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_sise = 64", "unknown setting 'batch_sise' (did you mean 'batch_size'?)"),
        ("batch_size = 'many'", "setting 'batch_size' must be a whole number, not 'many'"),
        ("[checkpoint]\nsave_evry = 9", "unknown setting 'save_evry' in [checkpoint] (did you mean 'save_every'?)"),
        ("optimizer = 'adma'", "setting 'optimizer' must be 'sgd' or"),
        ("top = [8, 'x']", "setting 'top[1]' must be a whole number, not 'x'"),
        ("batch_size = ", "cannot be read as TOML"),
    ],
)
def test_bad_settings_files(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    assert message in fails(["train", str(data), "--out", str(tmp_path / "run"), "--config", str(file)], capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "no command 'trian' (did you mean 'train'?)"),
        (["train", "nowhere", "--out", "run"], "no data folder nowhere"),
        (["prepare", "nowhere.tsv", "--out", "data"], "nowhere.tsv"),
        (["evaluate", "nowhere"], "nowhere/run.json does not exist"),
        (["inspect", "nowhere"], "nowhere does not exist"),
        (["inspect", "."], "is not a data folder, a run folder, a bundle or a checkpoint"),
        (["train", "DATA", "--out", "run", "--config", "nowhere.toml"], "no such settings file: nowhere.toml"),
        (["evaluate", "x", "--config", "y"], "--config goes with train and prepare, not with evaluate"),
        (["train", "DATA", "--out", "run", "--model", "dlmr"], "unknown model 'dlmr'"),
        (["train", "DATA", "--out", "run", "--batch-size", "0"], "--batch-size must be at least 1"),
        (["train", "DATA", "--out", "run", "--device", "tpu9"], "device 'tpu9' cannot be used here"),
        (["train", "DATA", "--out", "."], "the output . is the current directory, or around it"),
        (["train", "DATA", "--out", ".", "--overwrite"], "the output . is the current directory, or around it"),
        (["train", "DATA", "--out", "..", "--overwrite"], "the output .. is the current directory, or around it"),
        (["train", "DATA", "--out", "DATA", "--overwrite"], "is itself an input"),
        (["train", "nowhere", "--out", "DATA", "--overwrite"], "is not a run folder"),
        (["train", "DATA", "--out", "DATA", "--resume"], "is not a run folder"),
        (["train", "DATA", "--out", "run", "--setting", "rank=2", "--setting", "seed=1"], "--setting is given twice"),
        (["train", "DATA", "--out", "run", "--batch_size=2", "--batch-size", "4"], "--batch-size is given twice"),
        (["order", "DATA", "--out", "DATA", "--overwrite"], "is itself an input"),
        (["demo", "--out", "DATA", "--overwrite"], "is not a demo folder"),
        (["profile", "DATA", "--out", "DATA"], "is a folder: name the file to write"),
        (["profile", "DATA", "--out", "DATA/schema.json"], "exists and is not a holdall-popularity document"),
    ],
)
def test_mistakes_are_named(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    assert message in fails([word.replace("DATA", str(data)) for word in arguments], capsys)
    assert not list(tmp_path.iterdir())
    assert {path: path.read_bytes() for path in data.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("command", ["train", "prepare"])
def test_a_settings_file_in_the_output_is_an_input(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    run = tmp_path / "run"
    main(["train", str(data), "--out", str(run), "--steps", "1", *FAST])
    file = run / "mine.toml"
    file.write_text("seed = 1")
    words = [command, str(data), "--out", str(run), "--overwrite", "--config", str(file)]
    assert f"is around the input {file}" in fails(words, capsys)
    assert file.exists()
    assert (run / "run.json").exists()


@pytest.mark.parametrize("words", [["--bach-size", "3"], ["--consistency", "exact"]])
def test_unknown_flags_exit_with_2(data: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert words[0] in fails(["train", str(data), "--out", "x", *words], capsys)


def test_a_run_without_run_json_is_no_data_set(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    main(["train", str(data), "--out", str(run), "--steps", "1", *FAST])
    (run / "run.json").unlink()
    assert "run has checkpoints but no run.json: put its run.json back" in fails(["inspect", str(run)], capsys)


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(Exception, match="nowhere does not exist"):
        main(["inspect", "nowhere", "--debug"])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert COMMANDS[command].__doc__.splitlines()[0].split()[0] in capsys.readouterr().out


def test_training_settings_are_flags_in_panels(capsys: pytest.CaptureFixture[str]) -> None:
    """Flags have the names of the settings, without their parts; each part is a panel."""
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    for name, part in sections(TrainConfig).items():
        assert f" {flag(name)}" in shown
        assert part is None or f" {part} options " in shown


@pytest.mark.slow
def test_ctrl_c_exits_130_with_a_checkpoint(data: Path, tmp_path: Path) -> None:
    """A real process and a real signal, sent once the run has written its first row of metrics."""
    run = tmp_path / "run"
    arguments = ["train", str(data), "--out", str(run), "--epochs", "100000", "--log-every", "1", *FAST]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "holdall", *arguments], stderr=subprocess.PIPE, text=True, env=environment
    )
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "continue with --resume" in errors
    assert "Traceback" not in errors
    assert list((run / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("flags", "methods"),
    [
        (["--method", "tensor_train", "--rank", "4", "--min-rows", "50"], {"tensor_train", "dense"}),
        (["--method", "frobenius", "--setting", "rank=2", "terms=1", "--min-rows", "50"], {"frobenius", "dense"}),
        (
            ["--method", "hot_cold", "--setting", "hot_rows=10", "cold=frobenius", "--min-rows", "300"],
            {"hot_cold", "dense"},
        ),
        (["--budget", "1/3"], {"bands", "shared", "dense"}),
        (["--budget", "1/16"], {"bands", "shared", "quantized", "dense"}),
        (["--method", "hashed", "--budget", "2KB"], {"hashed", "dense"}),
    ],
)
def test_tables_can_be_compressed(data: Path, tmp_path: Path, flags: list[str], methods: set[str]) -> None:
    main(["train", str(data), "--out", str(tmp_path / "run"), "--steps", "3", *FAST, *flags])
    model, *_ = load_model(tmp_path / "run")
    found = {model.bags.table(name).method.name for name in model.bags.features}
    assert found <= methods
    assert found != {"dense"}
    if "2KB" in flags:
        assert model.bags.num_bytes() <= 2000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--method", "tensor_rain", "--rank", "3"],
            "unknown table method 'tensor_rain' (did you mean 'tensor_train'?)",
        ),
        (["--method", "tensor_train", "--rank", "0"], "rank"),
        (["--method", "tensor_train"], "rank"),
        (["--method", "frobenius", "--setting", "terns=3"], "did you mean 'terms'"),
        (["--method", "frobenius", "--setting", "terms"], "--setting takes name=value"),
        (["--rank", "3"], "name one, such as --method tensor_train"),
        (["--method", "auto"], "needs a --budget"),
        (["--method", "frobenius", "--rank", "3", "--budget", "1MB"], "not both"),
        (["--budget", "-1MB"], "is not a size"),
        (["--budget", "10B"], "too small for these 3 tables"),
    ],
)
def test_impossible_compressions(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    # tyro reads a value that starts with a dash as a flag, so such values are joined to theirs
    words = [f"{flags[0]}={flags[1]}"] if len(flags) > 1 and flags[1].startswith("-") else flags
    assert message in fails(["train", str(data), "--out", str(tmp_path / "run"), *FAST, *words], capsys)


# --- the operating system -------------------------------------------------------------------------------------------

WRITERS = {
    "prepare": ["prepare", "LOG", "--out", "OUT"],
    "order": ["order", "DATA", "--out", "OUT", "--min-rows", "10"],
    "profile": ["profile", "DATA", "--out", "OUT"],
    "train": ["train", "DATA", "--out", "OUT", *FAST],
    "resume": ["train", "DATA", "--out", "OUT", *FAST, "--resume"],
    "overwrite": ["train", "DATA", "--out", "OUT", *FAST, "--overwrite"],
    "plan": ["plan", "DATA", "--out", "OUT"],
    "hardware": ["hardware", "--out", "OUT"],
    "demo": ["demo", "--out", "OUT", "--rows", "100"],
}
READERS = {
    "prepare": ["prepare", "IN", "--out", "out"],
    "schema": ["prepare", "LOG", "--out", "out", "--format", "table", "--schema", "IN"],
    "order": ["order", "IN", "--out", "out"],
    "profile": ["profile", "IN", "--out", "out.json"],
    "train": ["train", "IN", "--out", "out"],
    "config": ["train", "DATA", "--out", "out", "--config", "IN"],
    "plan of a run": ["train", "DATA", "--out", "out", "--plan", "IN"],
    "plan": ["plan", "IN"],
    "hardware": ["plan", "DATA", "--hardware", "IN"],
    "simulate": ["simulate", "IN"],
    "evaluate": ["evaluate", "IN"],
    "inspect": ["inspect", "IN"],
    "doctor": ["doctor", "IN"],
}
PLACES = {
    "a file": "file/out",
    "a device": "/dev/null/out",
    "long": "x" * 256,
    "long path": "x/" * 3000 + "out",
    "dangling": "dangling",
    "circle": "circle",
    "under a circle": "circle/out",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a file, a link to nothing, and a link to itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "cache"))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    return tmp_path


def sentence(said: str) -> str:
    """What a command said, which must be one line of ours."""
    lines = said.strip().splitlines()
    assert len(lines) == 1, said
    assert lines[0].startswith("holdall: ")
    return lines[0]


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("words", WRITERS.values(), ids=WRITERS)
def test_outputs_that_cannot_be_written_end_with_a_sentence(
    data: Path, log: Path, folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], place: str
) -> None:
    given = {"DATA": str(data), "LOG": str(log), "OUT": place}
    said = sentence(fails([given.get(word, word) for word in words], capsys))
    assert place.rsplit("/out", 1)[0][:50] in said
    assert {path.name for path in folder.iterdir()} == {"file", "dangling", "circle"}
    assert (folder / "file").read_text() == "mine"


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("words", READERS.values(), ids=READERS)
def test_inputs_that_cannot_be_read_end_with_a_sentence(
    data: Path, log: Path, folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], place: str
) -> None:
    given = {"DATA": str(data), "LOG": str(log), "IN": place}
    sentence(fails([given.get(word, word) for word in words], capsys))
    assert {path.name for path in folder.iterdir()} == {"file", "dangling", "circle"}


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES], ids=["read-only", "full", "permission"])
@pytest.mark.parametrize("words", [WRITERS[name] for name in ("prepare", "order", "profile", "train", "demo")])
def test_a_disk_that_takes_nothing_ends_with_a_sentence(
    data: Path,
    log: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    number: int,
) -> None:
    original = os.open

    def refuse(path: str | Path, flags: int, *rest: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(number, os.strerror(number), str(path))
        return original(path, flags, *rest, **options)

    given = {"DATA": str(data), "LOG": str(log), "OUT": "out"}
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        said = sentence(fails([given.get(word, word) for word in words], capsys))
    assert {errno.EROFS: "read-only", errno.ENOSPC: "disk is full", errno.EACCES: "no permission"}[number] in said
    assert not (folder / "out").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_names_that_are_not_utf8_are_refused(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(b"caf\xe9")
    said = sentence(fails([command, name, "--out", name], capsys))
    assert "caf\\udce9 is not valid UTF-8: rename" in said


@pytest.mark.parametrize(
    "words",
    [
        ["train", "DATA", "--out", "out", "--seed", "9" * 30],
        ["train", "DATA", "--out", "out", "--batch-size", "9" * 30],
        ["train", "DATA", "--out", "out", "--top", "8", "9" * 30],
        ["prepare", "LOG", "--out", "out", "--seed", "9" * 30],
        ["prepare", "LOG", "--out", "out", "--rows-per-file", "9" * 30],
        ["order", "DATA", "--out", "out", "--seed", "9" * 30],
        ["profile", "DATA", "--out", "out", "--windows", "9" * 30],
        ["profile", "DATA", "--out", "out", "--dim", "9" * 30],
        ["demo", "--out", "out", "--rows", "9" * 30],
    ],
)
def test_numbers_beyond_64_bits_are_refused(
    data: Path, log: Path, folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    given = {"DATA": str(data), "LOG": str(log)}
    said = sentence(fails([given.get(word, word) for word in words], capsys))
    option = [word for word in words if word.startswith("--")][-1].removeprefix("--")
    assert option in said or option.replace("-", "_") in said
    assert not (folder / "out").exists()


def test_sizes_that_no_memory_holds_end_with_a_sentence(
    data: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in (["--dim", "4", "--bottom", str(10**12)], ["--dim", str(10**14)]):
        said = sentence(fails(["train", str(data), "--out", "out", *flags], capsys))
        assert "not enough memory" in said
        assert not (folder / "out").exists()


@pytest.mark.parametrize("name", ["[red]", "[/red]", "[bold]x[/bold]", ":smile:", "[link=x]"])
def test_names_are_printed_as_they_are(data: Path, folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    run = name.replace("/", "")
    main(["train", str(data), "--out", run, "--steps", "1", *FAST])
    capsys.readouterr()
    for words in (["inspect", run], ["evaluate", run]):
        main(words)
        assert run in capsys.readouterr().out
    rows = folder / "rows.csv"
    rows.write_text(f"label,{name}\n" + "".join(f"{i % 2},{i % 3}\n" for i in range(50)))
    schema = folder / "schema.toml"
    schema.write_text(f'label = "label"\ncategorical = ["{name}"]\n')
    main(["prepare", str(rows), "--out", "data", "--format", "table", "--schema", str(schema)])
    assert name in capsys.readouterr().out
    main(["profile", "data", "--out", "popularity.json"])
    assert name in capsys.readouterr().out


INTERRUPTED = """
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"holdall {holdall.__version__}\n"


def test_no_words_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 0
    assert "subcommands" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("package", ["tyro", "torch"])  # imported to read the words, and by the command
def test_ctrl_c_while_importing_exits_130(package: str, tmp_path: Path) -> None:
    (tmp_path / f"{package}.py").write_text(INTERRUPTED)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "holdall", "inspect", "x"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "holdall: interrupted\n")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_output_to_a_full_disk_ends_with_a_sentence(data: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "holdall", "inspect", str(data), "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, sentence(done.stderr)) == (
        2,
        "holdall: holdall inspect: the disk is full; free some space or choose another place, and run it again",
    )


def test_our_warnings_are_sentences_without_code() -> None:
    from holdall.cli import run_command as cli

    shown = cli._format_warning("mind the gap", UserWarning, cli.__file__, 7)
    assert shown == "holdall: warning: mind the gap\n"
    assert "elsewhere.py:7: UserWarning: mind" in cli._format_warning("mind", UserWarning, "/x/elsewhere.py", 7)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train d --out r --epochs two", "--epochs takes a whole number, not 'two': see `holdall train --help`"),
        ("train d --out r --lr two", "--lr takes a number, not 'two'"),
        (
            "train d --out r --epoch 2",
            "there is no option --epoch (did you mean --epochs?): see `holdall train --help`",
        ),
        ("train d --out r --tail tape", "--tail is one of 'host', 'disk', not 'tape'"),
        ("train d --out r --optimizer adamm", "--optimizer is one of 'adagrad', 'adam', 'adamw', 'rowwise_adagrad', "),
        ("score b f --out s --rows x", "there is no option --rows"),
        ("train d --out r --lr", "--lr needs a value"),
        ("train", "DATA and --out PATH must be given: see `holdall train --help`"),
        ("inspect", "PATH must be given"),
        ("--nothing", "there is no option --nothing: see `holdall --help`"),
    ],
)
def test_words_that_are_no_command_end_with_a_sentence(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails(words.split(), capsys).startswith(f"holdall: {message}")
