"""TOML schema of a raw file, guessed from its first rows: separator, header, label and what each column is.

holdall schema infer clicks.csv > clicks.toml
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from holdall.common.errors import DataError
from holdall.data.blocks import read_blocks
from holdall.data.formats.table import parse_layout
from holdall.data.guess_columns import Guess, document, guess_columns
from holdall.data.layout import Layout, RawFeature, TextFormat
from holdall.data.read_lines import Record, is_json, names_in, parse_json, parsed, text_of, value_at
from holdall.data.read_parquet import SUFFIXES, flat_batch, for_polars
from holdall.data.read_text import read_header, read_text, without_mark
from holdall.data.rows import import_polars
from holdall.data.sources import find_sources

if TYPE_CHECKING:
    import polars as pl

MAX_ROWS = 100_000
"""Rows that guesses are made from."""
SAMPLE_BYTES = 1 << 20
"""Bytes of text that separator and header are guessed from."""
SEPARATORS = ("\t", ",", ";", "|", "\x01")
MISSING = ("NA", "N/A", "NULL", "null", "nan", "NaN", "None", "\\N")
"""Words for a missing value."""
QUOTING: tuple[dict[str, Any], ...] = (
    {"quote": '"'},
    {"quote": '"', "multiline": True},
    {"quote": '"', "escape": "\\"},
    {"quote": ""},
)
"""Rules for quotes, in the order in which they are tried."""


def schema(source: str | Path, *, label: str | None = None) -> str:
    """A TOML schema for `prepare --format table`, guessed from the first rows of a CSV, TSV, Parquet or JSON
    lines file.

    A comment says why each column is what it is. `label` names the column of the label, which is guessed otherwise.
    """
    import_polars()
    (path,) = find_sources([source], Path("schema.toml"))[:1]
    if path.suffix in SUFFIXES:
        frame, text = read_sample(path), None
    elif is_json(path):
        frame, text = read_json_sample(path), None
    else:
        text = guess_text_format(path)
        frame, text = read_text_sample(path, text)
    guesses = guess_columns(frame, label)
    parse_layout(document(guesses))
    return to_toml(guesses, text, path, frame.height)


def to_toml(guesses: Sequence[Guess], text: TextFormat | None, path: Path, num_rows: int) -> str:
    """Guesses as TOML, with their reasons."""
    label, *others = guesses
    value = toml_value(label.column)
    if label.options:
        value = toml_table({"column": label.column, **label.options})
    lines = [
        f"# Guessed from the first {num_rows:,} rows of {printable(path.name)}. Check it, then:",
        "# holdall prepare FILES... --format table --schema THIS_FILE --valid 0.1 --out data",
        "",
        f"label = {value}  # {label.reason}",
    ]
    single = [guess for guess in others if guess.role in ("weight", "time")]
    lines += [f"{guess.role} = {toml_value(guess.column)}  # {guess.reason}" for guess in single]
    for role in ("dense", "categorical", "bag"):
        members = [guess for guess in others if guess.role == role]
        if members:
            entries = [f"  {toml_entry(guess)},  # {guess.reason}" for guess in members]
            lines += ["", f"{role} = [", *entries, "]"]
    left_out = [f"#   {printable(guess.column)}: {guess.reason}" for guess in others if guess.role == "left out"]
    if left_out:
        lines += ["", "# Not used:", *left_out]
    if text is not None:
        plain = TextFormat(header=True, quote='"')
        names = [name for name in plain.__dataclass_fields__ if getattr(text, name) != getattr(plain, name)]
        if names:
            lines += ["", "[csv]", *(f"{name} = {toml_value(getattr(text, name))}" for name in names)]
    return "\n".join(lines) + "\n"


def printable(name: str) -> str:
    """A name in one line of a comment."""
    return name if name.isprintable() else repr(name)


def toml_entry(guess: Guess) -> str:
    return toml_value(guess.entry) if isinstance(guess.entry, str) else toml_table(guess.entry)


def toml_table(entry: dict[str, Any]) -> str:
    return "{ " + ", ".join(f"{name} = {toml_value(value)}" for name, value in entry.items()) + " }"


def toml_value(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False).replace("\x7f", "\\u007f")


# --- samples --------------------------------------------------------------------------------------------------------


def read_sample(path: Path) -> pl.DataFrame:
    """The first rows of a Parquet file."""
    pl = import_polars()
    try:
        with pq.ParquetFile(path) as file:
            batches, num_rows = [], 0
            for batch in file.iter_batches(batch_size=min(MAX_ROWS, 1 << 16)):
                batches.append(for_polars(flat_batch(batch)))
                num_rows += len(batch)
                if num_rows >= MAX_ROWS:
                    break
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet ({error}): copy or download it again") from error
    if not num_rows:
        raise DataError(f"{path} holds no rows: name a file with rows")
    return pl.from_arrow(pa.concat_tables(batches).slice(0, MAX_ROWS))


def read_json_sample(path: Path) -> pl.DataFrame:
    """The first rows of a file of JSON lines: text, and lists of it."""
    pl = import_polars()
    records: list[Record] = []
    with closing(read_blocks(path, SAMPLE_BYTES)) as blocks:  # type: ignore[type-var]
        for block in blocks:
            found, _, refused, _ = parsed(block, parse_json)
            if refused and not records and not found:
                raise DataError(f"{path}, line {refused[0].line}: {refused[0].reason}")
            records += found
            if len(records) >= MAX_ROWS:
                break
    records = records[:MAX_ROWS]
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for record in records for name in names_in(record)):
        values = [value_at(record, name) for record in records]
        if any(isinstance(value, list) for value in values):
            pieces = [[str(piece) for piece in value] if isinstance(value, list) else None for value in values]
            columns[name] = pl.Series(pieces, dtype=pl.List(pl.String))
        else:
            texts = [None if value == "NaN" else text_of(value, whole=False, number=False) for value in values]
            columns[name] = pl.Series(texts, dtype=pl.String)
    return pl.DataFrame(columns)


def read_text_sample(path: Path, text: TextFormat) -> tuple[pl.DataFrame, TextFormat]:
    """The first rows of a text file as text, and its format with the words for missing values that it has."""
    pl = import_polars()
    names = column_names(path, text)
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DataError(f"{path} has more than one column named '{repeated[0]}': rename all but one")
    features = tuple(RawFeature(name=f"column{place}", column=name) for place, name in enumerate(names))
    layout = Layout(label=None, features=features, text=text)
    frames, num_rows = [], 0
    with closing(read_text(path, layout, block_bytes=SAMPLE_BYTES)) as blocks:
        for rows in blocks:
            frames.append(rows.frame.select(f"feature{place}" for place in range(len(names))))
            num_rows += frames[-1].height
            if num_rows >= MAX_ROWS:
                break
    frame = pl.concat(frames).head(MAX_ROWS)
    frame.columns = names
    if not frame.height:
        raise DataError(f"{path} has no rows of {len(names)} columns: is it a table?")
    found = [word for word in MISSING if any(frame.select((pl.all() == word).any()).row(0))]
    frame = frame.with_columns(pl.when(pl.all().is_in(found)).then(pl.lit("")).otherwise(pl.all()).name.keep())
    return frame, replace(text, missing=tuple(found))


def column_names(path: Path, text: TextFormat) -> list[str]:
    if text.columns:
        return list(text.columns)
    return read_header(path, without_mark(read_blocks(path, SAMPLE_BYTES), text), text)[0]


def guess_text_format(path: Path) -> TextFormat:
    """Encoding, separator, header and quotes of a text file."""
    with closing(read_blocks(path, SAMPLE_BYTES)) as blocks:  # type: ignore[type-var]
        data = next(blocks).data.removeprefix(b"\xef\xbb\xbf")
    encoding = "utf-8"
    try:
        sample = data.decode()
    except UnicodeDecodeError:
        encoding, sample = "latin-1", data.decode("latin-1")
    lines = sample.splitlines()[:200]
    separator = max(SEPARATORS, key=lambda found: regularity(lines, found))
    rows = [row for row in csv.reader(lines, delimiter=separator) if row]
    header = is_header(rows)
    columns = () if header else tuple(f"column{place}" for place in range(len(rows[0])))
    text = TextFormat(separator=separator, encoding=encoding, header=header, columns=columns)
    return min((replace(text, **quoting) for quoting in QUOTING), key=lambda found: num_refused(path, found))


def regularity(lines: Sequence[str], separator: str) -> tuple[float, int]:
    """How well a separator splits lines: the share that has the most common number of columns, and that number."""
    counts = Counter(len(row) for row in csv.reader(lines, delimiter=separator) if row)
    number, times = counts.most_common(1)[0]
    return (round(times / counts.total(), 1), number) if number > 1 else (0.0, 0)


def is_header(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row names columns: different words, none a number, and not all of them values of below."""
    first, others = rows[0], rows[1:]
    if "" in first or len(set(first)) < len(first) or any(is_number(word) for word in first):
        return False
    below = [{row[place] for row in others if len(row) > place} for place in range(len(first))]
    return not others or not all(word in values for word, values in zip(first, below, strict=True))


def is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def num_refused(path: Path, text: TextFormat) -> int:
    """Rows at the start of a file that cannot be read with this format."""
    names = column_names(path, text)
    features = (RawFeature(name="first", column=names[0]),)
    try:
        with closing(read_text(path, Layout(label=None, features=features, text=text), SAMPLE_BYTES)) as blocks:
            return sum(row.num_rows for row in next(blocks).refused)
    except DataError:
        return 1 << 60
