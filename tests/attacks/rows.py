"""Attacker of rows: files of every format full of lines that nothing should be able to read.

    attack_rows(seed=0, rows=10_000)

Each line has an expectation made by plain Python, which shares no code with the readers: the values it holds, or None
where it must be refused. A row ends `identical` (accepted with exactly its values), `refused` (listed by line, with a
reason of one sentence), `silent` (accepted with other values, or although it must be refused) or `traceback` (anything
but our own errors, or an error for the file as a whole). Good rows that are refused are `refused`, and listed.
"""

from __future__ import annotations

import random
import re
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from holdall.common.errors import HoldallError
from holdall.data.encode import Encoder
from holdall.data.formats.avazu import CATEGORICAL as AVAZU_COLUMNS
from holdall.data.formats.id_files import read_attributes, read_id_columns, read_id_lists
from holdall.data.formats.movielens import split_movie
from holdall.data.id_map import load_id_maps
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema
from tests.attacks.bad_lines import LIMIT, decoded, make_lines, nasty, split_csv, split_quoted
from tests.data.raw_files import read_split

NUMBER = re.compile(r"[-+]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][-+]?[0-9]+)?")
WHOLE = re.compile(r"[-+]?[0-9]{1,19}")
FLOAT32_MAX = float(np.finfo(np.float32).max)
Row = tuple[Any, ...] | None
"""Label, dense values, and values of features; None: to be refused."""


@dataclass
class Outcomes:
    """Numbers of rows by outcome, and what went wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    """By `identical`, `refused`, `silent`, `traceback`."""
    by_format: dict[str, Counter[str]] = field(default_factory=dict)
    defects: list[str] = field(default_factory=list)
    needless: list[str] = field(default_factory=list)
    """Rows that were refused although their values are fine."""

    def add(self, kind: str, outcome: str, note: str = "", number: int = 1) -> None:
        self.counts[outcome] += number
        self.by_format.setdefault(kind, Counter())[outcome] += number
        if outcome in ("silent", "traceback"):
            self.defects.append(f"{kind}: {outcome}: {note}"[:500])

    def judge(self, kind: str, line: object, expected: Any, found: Any, reason: str | None) -> None:
        """Judge one row, which was refused for `reason`, or accepted as `found`."""
        if reason is not None:
            if not 0 < len(reason) < 600 or "\n" in reason:
                self.add(kind, "traceback", f"{line!r:.200} is refused by no sentence: {reason!r}")
                return
            self.add(kind, "refused")
            if expected is not None:
                self.needless.append(f"{kind}: {line!r:.200} ({reason})")
        elif expected == found and expected is not None:
            self.add(kind, "identical")
        else:
            self.add(kind, "silent", f"{line!r:.200} became {found!r:.200}, not {expected!r:.200}")


def attack_rows(seed: int, rows: int) -> Outcomes:
    """About `rows` rows, in files of at most 500, of all formats in turn."""
    outcomes = Outcomes()
    number = 0
    while outcomes.counts.total() < rows:
        kind = list(FORMATS)[number % len(FORMATS)]
        chosen = random.Random(f"{seed}/{number}")
        size = min(500, max(5, (rows - outcomes.counts.total()) // (len(FORMATS) - number % len(FORMATS))))
        with tempfile.TemporaryDirectory() as folder:
            try:
                FORMATS[kind](outcomes, chosen, Path(folder), size)
            except HoldallError as error:
                outcomes.add(kind, "traceback", f"seed {seed}/{number}, not by line: {error}", size)
            except BaseException as error:  # polars raises a panic as a BaseException
                if isinstance(error, KeyboardInterrupt):
                    raise
                outcomes.add(kind, "traceback", f"seed {seed}/{number}: {traceback.format_exc()[-400:]}", size)
        number += 1
    return outcomes


# --- formats that `prepare` reads row by row -------------------------------------------------------------------------


def as_number(text: str) -> float | None:
    """0 where it is missing, None where it is no number that float32 holds."""
    if text == "":
        return 0.0
    if not NUMBER.fullmatch(text) or abs(float(text)) > FLOAT32_MAX:
        return None
    return float(np.float32(float(text)))


def as_row(label: str, dense: Sequence[str], values: Sequence[str], lists: Sequence[list[str]] = ()) -> Row:
    """What a row of text holds, or None."""
    numbers = [as_number(text) for text in dense]
    if not NUMBER.fullmatch(label) or float(label) not in (0.0, 1.0) or None in numbers:
        return None
    if any(len(value.encode()) > LIMIT for value in [*values, *(value for one in lists for value in one)]):
        return None
    return (int(float(label)), *numbers, *values, *map(tuple, lists))


def prepared_rows(folder: Path) -> list[Row]:
    """The rows of the train split with their raw values."""
    schema, maps, columns = Schema.load(folder), load_id_maps(folder), read_split(folder, "train")
    values = {name: id_map.values.to_pylist() for name, id_map in maps.items()}
    singles = [feature.name for feature in schema.features if feature.one_hot]
    found: list[Row] = []
    for row, label in enumerate(columns["label"]):
        made: list[Any] = [label, *(columns["dense"][row] if schema.dense else ())]
        made += [values[name][id] for name, id in zip(singles, columns["ids"][row], strict=True)]
        for feature in schema.features:
            if not feature.one_hot:
                made.append(tuple(values[feature.name][id] for id in columns[feature.name][row]))
        found.append(tuple(made))
    return found


def refused_lines(folder: Path, source: Path) -> dict[int, str]:
    """Reasons by line, from bad_rows.tsv."""
    path = folder / "bad_rows.tsv"
    found: dict[int, str] = {}
    for entry in path.read_bytes().decode().split("\n")[1:-1] if path.exists() else ():
        file, line, reason, _ = entry.split("\t", 3)
        if file == str(source):
            match = re.match(r"([0-9,]+) empty lines", reason)
            number = int(match[1].replace(",", "")) if match else 1
            found |= dict.fromkeys(range(int(line), int(line) + number), reason)
    return found


def judge_prepared(
    outcomes: Outcomes,
    kind: str,
    source: Path,
    lines: Sequence[Any],
    expected: Sequence[Row],
    first_line: int,
    **options: Any,
) -> None:
    """Prepare a file whose lines, from `first_line` on, are these, and judge each."""
    out = source.parent / "out"
    options = {"test": 0.0, "dense": "none", "bad_rows": "skip", **options}
    schema = prepare([source], out, PrepareConfig(**options))
    refused = refused_lines(out, source)
    found = iter(prepared_rows(out))
    assert schema.source["bad_rows"] == len(refused)
    assert schema.source["rows"] == len(lines) == schema.splits["train"].rows + len(refused)
    for number, (line, row) in enumerate(zip(lines, expected, strict=True), start=first_line):
        outcomes.judge(kind, line, row, None if number in refused else next(found), refused.get(number))


def attack_criteo(outcomes: Outcomes, chosen: random.Random, folder: Path, rows: int) -> None:
    def good() -> list[bytes]:
        numbers = [b"%d" % chosen.randrange(-2, 99) for _ in range(13)]
        return [b"%d" % chosen.randrange(2), *numbers, *(b"%x" % chosen.randrange(9) for _ in range(26))]

    def expect(line: bytes) -> Row:
        text = decoded(line)
        columns = text.split("\t") if text is not None else []
        return as_row(columns[0], columns[1:14], columns[14:]) if len(columns) == 40 else None

    lines = make_lines(chosen, rows, good, b"\t")
    source = folder / "a.tsv"
    source.write_bytes(b"\n".join(lines) + b"\n")
    judge_prepared(outcomes, "criteo", source, lines, [expect(line) for line in lines], 1)


def attack_csv(outcomes: Outcomes, chosen: random.Random, folder: Path, rows: int) -> None:
    def good() -> list[bytes]:
        quoted = chosen.choice((b"a", b'"a,b"', b'"a ""b"""', b""))
        return [b"%d" % chosen.randrange(2), b"%.3f" % chosen.gauss(0, 9), quoted, chosen.choice((b"", b"a|b", b"c"))]

    def expect(line: bytes) -> Row:
        text = decoded(line, encoding)
        columns = split_quoted(text, ",") if text is not None else None
        if columns is None or len(columns) != 4:
            return None
        return as_row(columns[0], columns[1:2], columns[2:3], [[piece for piece in columns[3].split("|") if piece]])

    encoding = chosen.choice(("utf-8", "latin-1"))
    schema = 'label = "y"\ndense = ["x"]\ncategorical = ["c"]\n[[bag]]\nname = "b"\nseparator = "|"\n'
    (folder / "schema.toml").write_text(f'{schema}[csv]\nencoding = "{encoding}"')
    lines = make_lines(chosen, rows, good, b",")
    source = folder / "a.csv"
    source.write_bytes(b"y,x,c,b\n" + b"\n".join(lines) + b"\n")
    options = {"format": "table", "schema": folder / "schema.toml"}
    judge_prepared(outcomes, "csv", source, lines, [expect(line) for line in lines], 2, **options)


def attack_avazu(outcomes: Outcomes, chosen: random.Random, folder: Path, rows: int) -> None:
    def good() -> list[bytes]:
        hour = b"1410%02d%02d" % (chosen.randrange(21, 31), chosen.randrange(24))
        return [b"7", b"%d" % chosen.randrange(2), hour, *(b"%x" % chosen.randrange(9) for _ in AVAZU_COLUMNS)]

    def expect(line: bytes) -> Row:
        text = decoded(line)
        columns = text.split(",") if text is not None else []
        if len(columns) != 24 or not re.fullmatch("[0-9]{8}", columns[2]):
            return None
        try:
            time = datetime.strptime(f"20{columns[2]}", "%Y%m%d%H")
        except ValueError:
            return None
        hours = (time - datetime(2014, 10, 21)).total_seconds() // 3600
        return as_row(columns[1], [str(int(hours))], [str(time.hour), str(time.weekday()), *columns[3:]])

    lines = make_lines(chosen, rows, good, b",")
    source = folder / "train.csv"
    source.write_bytes(",".join(["id", "click", "hour", *AVAZU_COLUMNS]).encode() + b"\n" + b"\n".join(lines) + b"\n")
    judge_prepared(outcomes, "avazu", source, lines, [expect(line) for line in lines], 2, format="avazu")


def attack_parquet(outcomes: Outcomes, chosen: random.Random, folder: Path, rows: int) -> None:
    floats = (0.0, 1.0, -0.0, 0.1, 3.4e38, 3.5e38, -1e300, 5e-324, float("nan"), float("inf"), float("-inf"), None)
    integers = (0, 1, -1, 2**53 + 1, 2**63 - 1, -(2**63), None)

    def text() -> bytes | None:
        return None if chosen.random() < 0.1 else chosen.choice((b"a", b"b", nasty(chosen)))

    def readable(values: Sequence[bytes | None]) -> list[str] | None:
        try:
            made = [(value or b"").decode() for value in values]
        except UnicodeDecodeError:
            return None
        return None if any(len(value.encode()) > LIMIT for value in made) else made

    def number(value: float | None) -> float | None:
        return 0.0 if value is None else float(np.float32(value)) if abs(value) <= FLOAT32_MAX else None

    table, expected = [], []
    for row in range(rows):
        label = chosen.choice((0.0, 1.0)) if chosen.random() < 0.9 else chosen.choice(floats)
        dense = chosen.choice(floats) if chosen.random() < 0.5 else chosen.random()
        one, many, id = text(), [text() for _ in range(chosen.randrange(4))], chosen.choice(integers)
        if not row:
            label, dense, one, many = 0.0, 0.0, b"a", []
        table.append((label, dense, one, id, many))
        singles, pieces, found = readable([one]), readable([piece for piece in many if piece]), number(dense)
        fine = label in (0.0, 1.0) and singles is not None and pieces is not None and found is not None
        values = (*(singles or ()), "" if id is None else str(id), tuple(pieces or ()))
        expected.append((int(label or 0), found, *values) if fine else None)
    labels, numbers, ones, ids, lists = zip(*table, strict=True)
    columns = {"y": pa.array(labels), "x": pa.array(numbers), "c": pa.array(ones, pa.binary()), "i": pa.array(ids)}
    offsets = np.cumsum([0, *map(len, lists)], dtype=np.int32)
    flat = as_string(pa.array([piece for one in lists for piece in one], pa.binary()))
    columns["c"], columns["s"] = as_string(columns["c"]), pa.ListArray.from_arrays(pa.array(offsets), flat)
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=chosen.randrange(1, rows + 1))
    schema = 'label = "y"\ndense = ["x"]\ncategorical = ["c", "i"]\n[[sequence]]\nname = "s"'
    (folder / "schema.toml").write_text(schema)
    options = {"format": "table", "schema": folder / "schema.toml"}
    judge_prepared(outcomes, "parquet", folder / "a.parquet", table, expected, 1, **options)


def as_string(column: pa.Array) -> pa.Array:
    """Bytes as text that nobody has checked."""
    return pa.Array.from_buffers(pa.string(), len(column), column.buffers())


def attack_bookcrossing(outcomes: Outcomes, chosen: random.Random, folder: Path, rows: int) -> None:
    def good() -> list[bytes]:
        return [b'"%d"' % chosen.randrange(99), b'"%010d"' % chosen.randrange(999), b'"%d"' % chosen.randrange(11)]

    seen: set[tuple[str, str]] = set()
    repeated = []

    def expect(line: bytes) -> Row:
        text = decoded(line, "latin-1")
        columns = split_quoted(text, ";", "\\") if text is not None else None
        if columns is None or len(columns) != 3:
            return None
        user, book, rating = ("" if column == "NULL" else column for column in columns)
        if not NUMBER.fullmatch(rating) or float(rating) in (float("inf"), float("-inf")):
            return None
        if max(len(user.encode()), len(book.encode())) > LIMIT:
            return None
        book = book.strip('" ').upper()
        repeated.append((user, book) in seen)
        seen.add((user, book))
        return (int(float(rating) > 0), user, book)

    (folder / "BX-Users.csv").write_text('"User-ID";"Location";"Age"\n"1";"a, b";"20"\n')
    names = '"ISBN";"Book-Title";"Book-Author";"Year-Of-Publication";"Publisher"'
    (folder / "BX-Books.csv").write_text(f'{names}\n"i";"t";"a";"1990";"p"\n')
    lines = make_lines(chosen, rows, good, b";")
    expected = [expect(line) for line in lines]
    source = folder / "BX-Book-Ratings.csv"
    source.write_bytes(b'"User-ID";"ISBN";"Book-Rating"\n' + b"\n".join(lines) + b"\n")
    prepare([folder], folder / "out", PrepareConfig(format="bookcrossing", test=0.0))
    refused, found = refused_lines(folder / "out", source), iter(prepared_rows(folder / "out"))
    again = iter(repeated)
    for number, (line, row) in enumerate(zip(lines, expected, strict=True), start=2):
        dropped = row is not None and next(again)
        if number in refused or not dropped:  # a rating twice is one, and counted
            accepted = None if number in refused else (next(found) or ())[:3]
            outcomes.judge("bookcrossing", line, row, accepted, refused.get(number))


# --- files of ids ----------------------------------------------------------------------------------------------------


def judge_read(
    outcomes: Outcomes, kind: str, lines: Sequence[bytes], expected: Sequence[Row], found: Sequence[Row], blocks: Any
) -> None:
    """Judge the rows of a reader, which come in the order of the lines that it did not refuse."""
    refused = {row.line + later: row.reason for block in blocks for row in block for later in range(row.num_rows)}
    assert len(found) + len(refused) == len(lines), f"{len(found)} rows and {len(refused)} refused of {len(lines)}"
    rows = iter(found)
    for number, (line, row) in enumerate(zip(lines, expected, strict=True), start=1):
        outcomes.judge(kind, line, row, None if number in refused else next(rows), refused.get(number))


def drained(reading: Any) -> tuple[list[Any], Any]:
    """What a generator yields, and what it returns."""
    blocks = []
    while True:
        try:
            blocks.append(next(reading))
        except StopIteration as end:
            return blocks, end.value


def is_id(text: str) -> bool:
    return re.fullmatch("[0-9]{1,18}", text) is not None


def attack_ratings(outcomes: Outcomes, chosen: random.Random, folder: Path, rows: int) -> None:
    def good() -> list[bytes]:
        return [b"%d" % chosen.randrange(10 ** chosen.randrange(1, 19)) for _ in range(4)]

    def expect(line: bytes) -> Row:
        text = decoded(line)
        columns = text.split("::") if text is not None and "\x1f" not in text else []
        if len(columns) != 4 or not all(WHOLE.fullmatch(columns[place]) for place in (0, 1, 3)):
            return None
        numbers = tuple(int(columns[place]) for place in (0, 1, 3))
        return numbers if all(-(2**63) <= number < 2**63 for number in numbers) else None

    lines = make_lines(chosen, rows, good, b"::")
    (folder / "ratings.dat").write_bytes(b"\n".join(lines) + b"\n")
    names = ("user", "item", "rating", "time")
    blocks = list(read_id_columns(folder / "ratings.dat", ("user", "item", "time"), names, "::"))
    found = [tuple(row) for numbers, _ in blocks for row in numbers.tolist()]
    judge_read(outcomes, "ratings", lines, [expect(line) for line in lines], found, [block for _, block in blocks])


def attack_lists(outcomes: Outcomes, chosen: random.Random, folder: Path, rows: int) -> None:
    users = iter(range(10 * rows + 10_000))
    seen: set[int] = set()

    def good() -> list[bytes]:
        items = [b"%d" % chosen.randrange(10 ** chosen.randrange(1, 18)) for _ in range(chosen.randrange(1, 6))]
        return [b"%d" % next(users), *items]

    def expect(line: bytes) -> Row:
        text = decoded(line)
        fields = text.split() if text is not None else []
        if not fields or not all(map(is_id, fields)) or int(fields[0]) in seen:
            return None
        seen.add(int(fields[0]))
        return tuple(map(int, fields))

    lines = make_lines(chosen, rows, good, b" ")
    (folder / "train.txt").write_bytes(b"\n".join(lines) + b"\n")
    blocks, (found_users, found_items, _) = drained(read_id_lists(folder / "train.txt"))
    expected = [expect(line) for line in lines]
    by_user: dict[int, list[int]] = {}
    for user, item in zip(found_users.tolist(), found_items.tolist(), strict=True):
        by_user.setdefault(user, []).append(item)
    refused = {row.line + later for block in blocks for row in block for later in range(row.num_rows)}
    accepted = [row for number, row in enumerate(expected, start=1) if number not in refused]
    found = [(row[0], *by_user.pop(row[0], [])) if row is not None else ("unexpected",) for row in accepted]
    assert not by_user, f"events of users that no line has: {list(by_user)[:3]}"
    judge_read(outcomes, "lists", lines, expected, found, blocks)


def attack_movies(outcomes: Outcomes, chosen: random.Random, folder: Path, rows: int) -> None:
    ids = iter(range(10 * rows + 10_000))
    seen: set[int] = set()

    def good() -> list[bytes]:
        return [b"%d" % next(ids), chosen.choice((b"A (1990)", b'"A, ""B"" (1991)"')), b"Comedy|Drama"]

    def expect(line: bytes) -> Row:
        text = decoded(line)
        if text is None:
            return None
        fields = text.split("::") if "::" in text else split_csv(text)
        if fields is None or len(fields) != 3 or not is_id(fields[0]) or int(fields[0]) in seen:
            return None
        if max(len(value.encode()) for value in fields) > LIMIT:
            return None
        seen.add(int(fields[0]))
        return (int(fields[0]), *fields[1:])

    lines = make_lines(chosen, rows, good, b",")
    (folder / "movies.csv").write_bytes(b"\n".join(lines) + b"\n")
    blocks, frame = drained(read_attributes(folder / "movies.csv", ("item", "title", "genres"), split_movie))
    judge_read(outcomes, "movies", lines, [expect(line) for line in lines], frame.rows(), blocks)


# --- rows to score ---------------------------------------------------------------------------------------------------


def attack_encode(outcomes: Outcomes, chosen: random.Random, folder: Path, rows: int) -> None:
    """Rows given as Python values to an `Encoder`, one by one."""
    (folder / "schema.toml").write_text('label = "y"\ndense = ["x"]\ncategorical = ["c"]\n[[bag]]\nname = "b"')
    known = ["a", "", "1", "é", "\x00", "9223372036854775807"]
    lists = pa.array([[value] for value in known])
    table = pa.table({"y": [0] * len(known), "x": [0.0] * len(known), "c": known, "b": lists})
    pq.write_table(table, folder / "a.parquet")
    config = PrepareConfig(format="table", schema=folder / "schema.toml", test=0.0, dense="none")
    prepare([folder / "a.parquet"], folder / "out", config)
    encoder = Encoder(folder / "out")
    maps = {name: id_map.values.to_pylist() for name, id_map in load_id_maps(folder / "out").items()}
    numbers = (
        0,
        1.5,
        -1,
        None,
        3.4e38,
        3.5e38,
        10**30,
        10**400,
        float("nan"),
        float("inf"),
        "1.5",
        "",
        "x",
        "nan",
        b"1",
    )
    texts = (*known, None, "unknown", "x" * (LIMIT + 1), "\udcff", b"\xff", 1, 2**63 - 1, 2**64, 1.5, ["a"], {"a": 1})
    for _ in range(rows):
        x, c = chosen.choice(numbers), chosen.choice(texts)
        b = chosen.choice((None, [], "a", [chosen.choice(texts)], [chosen.choice(known), chosen.choice(known)]))
        row = {"x": [x], "c": [c], "b": [b]}
        try:
            batch = encoder.encode(row)
        except HoldallError as error:
            outcomes.judge("encode", row, None, None, str(error))
            continue
        except Exception as error:
            outcomes.add("encode", "traceback", f"{row!r:.200}: {error!r:.200}")
            continue
        given = [one for one in (b or []) if one not in (None, "")]
        wanted = [expected_value(value, maps["c" if place == 0 else "b"]) for place, value in enumerate([c, *given])]
        single, bag = batch.ids.bag(0)[0].tolist(), batch.ids.bag(1)[0].tolist()
        found = [maps["c"][single[0]], *(maps["b"][id] for id in bag)]
        dense = float(np.float32(float(x))) if x not in (None, "") else 0.0
        outcomes.judge("encode", row, (dense, *wanted), (float(batch.dense[0, 0]), *found), None)


def expected_value(value: Any, known: Sequence[str | None]) -> str | None:
    """The value whose row a raw value looks up; None is the unseen row."""
    text = "" if value is None else str(value)
    return text if text in known else None


FORMATS: dict[str, Callable[[Outcomes, random.Random, Path, int], None]] = {
    "criteo": attack_criteo,
    "csv": attack_csv,
    "parquet": attack_parquet,
    "avazu": attack_avazu,
    "bookcrossing": attack_bookcrossing,
    "ratings": attack_ratings,
    "lists": attack_lists,
    "movies": attack_movies,
    "encode": attack_encode,
}
