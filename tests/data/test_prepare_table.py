"""`prepare --format table`: CSV and Parquet through a TOML schema, with bags, sequences and shared tables."""

from __future__ import annotations

import csv
import datetime
import io
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.common.errors import ConfigError, DataError
from holdall.data.encode import encode_rows
from holdall.data.formats.table import load_layout
from holdall.data.id_map import id_map_path, load_id_maps
from holdall.data.layout import Layout, RawFeature, TextFormat
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.read_text import read_text
from holdall.data.schema import Schema
from tests.data.raw_files import read_map, read_split

EXAMPLE = Path(__file__).parents[2] / "configs/table-example.toml"


def run(folder: Path, schema: str, *sources: Path, **options: Any) -> Schema:
    """Prepare `sources` into `folder`/out with every row in training."""
    (folder / "schema.toml").write_text(schema, encoding="utf-8")
    config = PrepareConfig(format="table", schema=folder / "schema.toml", test=0.0, **options)
    return prepare(sources, folder / "out", config)


def write_csv(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ('dense = ["price", "clicked"]', "dense column 'clicked'"),
        ('categorical = ["user", { name = "c", column = "clicked" }]', "feature 'c'"),
        ('dense = ["price"]\n[[bag]]\nname = "clicked"', "feature 'clicked'"),
    ],
)
def test_the_label_as_an_input_is_refused(columns: str, name: str, tmp_path: Path) -> None:
    raw = write_csv(tmp_path / "log.csv", "clicked,price,user\n1,2,a\n0,3,b\n")
    told = f"column 'clicked' is the label and also {name}: a model would read its answer there; remove it from the"
    with pytest.raises(ConfigError, match=told):
        run(tmp_path, f'label = "clicked"\n{columns}\n', raw)
    assert not (tmp_path / "out").exists()


# --- CSV ------------------------------------------------------------------------------------------------------------


def test_latin_1_with_quotes_and_a_rule_for_the_label(tmp_path: Path) -> None:
    raw = write_csv(
        tmp_path / "ratings.csv",
        '"user";"title";"rating"\r\n"1";"Le Père; ""Goriot""";"9"\r\n"2";"";"7"\r\n1;plain;"6"\r\n"1";"NULL";"8"\r\n',
        "latin-1",
    )
    schema = run(
        tmp_path,
        """
        categorical = ["user", { name = "book", column = "title" }]
        [label]
        column = "rating"
        positive = ">= 7"
        [csv]
        separator = ";"
        encoding = "latin-1"
        missing = ["NULL"]
        """,
        raw,
    )
    assert read_split(tmp_path / "out", "train")["label"] == [1, 1, 0, 1]
    assert read_map(tmp_path / "out", "user") == [("1", 3), ("2", 1), (None, 0)]
    assert read_map(tmp_path / "out", "book") == [("", 2), ('Le Père; "Goriot"', 1), ("plain", 1), (None, 0)]
    assert schema.label == "rating"
    assert "dense" not in read_split(tmp_path / "out", "train")


def test_columns_are_found_by_name_in_every_file_and_others_are_not_read(tmp_path: Path) -> None:
    first = write_csv(tmp_path / "a.csv", "junk,click,x,site\nnot a number,1,2,s\n")
    second = write_csv(tmp_path / "b.csv", "site,x,click\ns,3,0\n")
    run(tmp_path, 'label = "click"\ndense = ["x"]\ncategorical = ["site"]', first, second, dense="none")
    assert read_split(tmp_path / "out", "train") == {"label": [1, 0], "dense": [[2.0], [3.0]], "ids": [[0], [0]]}


def test_files_without_a_header_take_their_names_from_the_schema(tmp_path: Path) -> None:
    raw = write_csv(tmp_path / "a.tsv", "1|a\n0|b\n0|b")
    schema = 'label = "y"\ncategorical = ["c"]\n[csv]\nseparator = "|"\ncolumns = ["y", "c"]'
    run(tmp_path, schema, raw)
    assert read_split(tmp_path / "out", "train") == {"label": [1, 0, 0], "ids": [[1], [0], [0]]}


def test_a_column_can_be_a_number_and_a_category_at_once_and_transforms_can_differ(tmp_path: Path) -> None:
    raw = write_csv(tmp_path / "a.csv", "\ufeffy,hour\n1,3\n0,5\n")
    dense = (
        '[{ name = "h", column = "hour", transform = "none" }, { name = "s", column = "hour", transform = "standard" }]'
    )
    schema = run(tmp_path, f'label = "y"\ndense = {dense}\ncategorical = ["hour"]', raw)
    assert read_split(tmp_path / "out", "train")["dense"] == [[3, -1], [5, 1]]
    assert [column.transform for column in schema.dense] == ["none", "standard"]


def test_names_that_no_file_can_have_are_percent_encoded(tmp_path: Path) -> None:
    raw = write_csv(tmp_path / "a.csv", 'y,"../a/b %"\n1,v\n')
    run(tmp_path, 'label = "y"\ncategorical = ["../a/b %"]', raw)
    assert id_map_path(tmp_path / "out", "../a/b %").name == "..%2Fa%2Fb%20%25.arrow"
    assert read_map(tmp_path / "out", "../a/b %") == [("v", 1), (None, 0)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('1,"a', "line 3: a quoted field is not closed; set multiline"),
        ('1,a"b"', "line 3: a quote is inside a field"),
        ('1,"a"b', "line 3: a quote is inside a field"),
        ("1,a,b", "line 3: 3 columns instead of 2"),
        ("x,a", "line 3: the label .column 'y'. is 'x' instead of 0 or 1"),
        ("", "line 3: an empty line"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, reason: str) -> None:
    raw = write_csv(tmp_path / "a.csv", f'y,c\n1,"a,b"\n{line}\n0,"say ""hi"""\n')
    with pytest.raises(DataError, match=reason):
        run(tmp_path, 'label = "y"\ncategorical = ["c"]', raw)
    schema = run(tmp_path, 'label = "y"\ncategorical = ["c"]', raw, bad_rows="skip")
    assert (schema.splits["train"].rows, schema.source["bad_rows"]) == (2, 1)
    assert [value for value, _ in read_map(tmp_path / "out", "c")] == ["a,b", 'say "hi"', None]


def test_quoted_fields_may_span_lines_when_the_schema_says_so(tmp_path: Path) -> None:
    raw = write_csv(tmp_path / "a.csv", 'y,c\n1,"two\nlines"\n0,x\n7,"\n"\n0,"not closed\n1,a\n')
    schema = 'label = "y"\ncategorical = ["c"]\n[csv]\nmultiline = true'
    made = run(tmp_path, schema, raw, bad_rows="skip")
    assert [value for value, _ in read_map(tmp_path / "out", "c")] == ["two\nlines", "x", None]
    listed = (tmp_path / "out/bad_rows.tsv").read_text().splitlines()[1:]
    assert [line.split("\t")[1] for line in listed] == ["5", "7"]
    assert made.source["rows"] == 4


def test_quotes_may_be_escaped_when_the_schema_says_so(tmp_path: Path) -> None:
    raw = write_csv(tmp_path / "a.csv", 'y,c\n1,"say \\"hi\\", twice"\n0,"\\""\n')
    with pytest.raises(DataError, match="line 2: a quote is inside a field"):
        run(tmp_path, 'label = "y"\ncategorical = ["c"]', raw)
    run(tmp_path, 'label = "y"\ncategorical = ["c"]\n[csv]\nescape = "\\\\"', raw)
    assert [value for value, _ in read_map(tmp_path / "out", "c")] == ['"', 'say "hi", twice', None]


def test_bad_bytes_are_named_in_other_encodings_too(tmp_path: Path) -> None:
    raw = tmp_path / "a.csv"
    raw.write_bytes("y,c\n1,日本\n0,".encode("shift-jis") + b"\xff\n" + "1,αβ\n".encode("shift-jis"))
    schema = 'label = "y"\ncategorical = ["c"]\n[csv]\nencoding = "shift-jis"'
    with pytest.raises(DataError, match="line 3: byte 0xff"):
        run(tmp_path, schema, raw)
    run(tmp_path, schema, raw, bad_rows="skip")
    assert [value for value, _ in read_map(tmp_path / "out", "c")] == ["αβ", "日本", None]


def test_files_with_nothing_to_read_are_named(tmp_path: Path) -> None:
    schema = 'label = "y"\ncategorical = ["c"]'
    with pytest.raises(DataError, match=r"a\.csv holds a header and no rows"):
        run(tmp_path, schema, write_csv(tmp_path / "a.csv", "y,c\n"))
    with pytest.raises(DataError, match=r"b\.csv has no column 'c' \(did you mean 'cc'\?\)"):
        run(tmp_path, schema, write_csv(tmp_path / "b.csv", "y,cc\n1,2\n"))
    with pytest.raises(DataError, match=r"c\.csv has 2 columns named 'c'"):
        run(tmp_path, schema, write_csv(tmp_path / "c.csv", "y,c,c\n1,2,3\n"))


fields = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=6)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(rows=st.lists(st.tuples(fields, fields), min_size=1, max_size=12), quoting=st.sampled_from([0, 1]))
def test_whatever_python_writes_as_csv_is_read_back(rows: list[tuple[str, str]], quoting: int) -> None:
    layout = Layout(
        label="y",
        features=tuple(RawFeature(name=name, column=name) for name in ("a", "b")),
        text=TextFormat(quote='"', columns=("a", "y", "b")),
    )
    text = io.StringIO()
    csv.writer(text, quoting=quoting).writerows((a, 1, b) for a, b in rows)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.csv"
        raw.write_bytes(text.getvalue().encode())
        read = [row for block in read_text(raw, layout, block_bytes=50) for row in block.frame.rows()]
    mark = rows[0][0].startswith("\ufeff") and not text.getvalue().startswith(
        '"'
    )  # at the start of a file it is no value
    rows[0] = (rows[0][0][mark:], rows[0][1])
    assert read == [(1, a, b) for a, b in rows]


# --- bags and sequences ---------------------------------------------------------------------------------------------

LISTS = """
label = "y"
categorical = ["item"]
[[bag]]
name = "genres"
separator = "|"
max_length = 2
[[sequence]]
name = "history"
separator = " "
max_length = 2
table = "item"
"""


def test_bags_keep_the_first_sequences_the_last_and_tables_can_be_shared(tmp_path: Path) -> None:
    raw = write_csv(tmp_path / "a.csv", "y,item,genres,history\n1,p,a|b|c,p q r\n0,q,,\n0,r,||b|,r r  r\n")
    schema = run(tmp_path, LISTS, raw)
    # items: p 1, q 1, r 1; history after truncation: q r, nothing, r r
    assert read_map(tmp_path / "out", "item") == [("r", 4), ("q", 2), ("p", 1), (None, 0)]
    assert read_map(tmp_path / "out", "history") == read_map(tmp_path / "out", "item")
    assert read_map(tmp_path / "out", "genres") == [("b", 2), ("a", 1), (None, 0)]
    assert read_split(tmp_path / "out", "train") == {
        "label": [1, 0, 0],
        "ids": [[2], [1], [0]],
        "genres": [[1, 0], [], [0]],
        "history": [[1, 0], [], [0, 0]],
    }
    assert [(feature.name, feature.kind, feature.table) for feature in schema.features] == [
        ("item", "categorical", None),
        ("genres", "bag", None),
        ("history", "sequence", "item"),
    ]
    assert schema.feature("history").num_rows == schema.feature("item").num_rows == 4
    maps = load_id_maps(tmp_path / "out")
    assert maps["history"] is maps["item"]


def test_parquet_lists_and_types_give_what_csv_gives(tmp_path: Path) -> None:
    table = pa.table(
        {
            "y": [True, False, False],
            "item": pa.array(["p", "q", "r"]).dictionary_encode(),
            "genres": pa.array([["a", "b", "c"], None, ["", None, "b"]]),
            "history": pa.array([["p", "q", "r"], [], ["r", "r", "r"]], pa.large_list(pa.string())),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    schema = run(tmp_path, LISTS, tmp_path / "a.parquet")
    assert read_split(tmp_path / "out", "train")["genres"] == [[1, 0], [], [0]]
    assert read_split(tmp_path / "out", "train")["history"] == [[1, 0], [], [0, 0]]
    batch = encode_rows(tmp_path / "out", table)
    assert batch.ids.offsets is not None
    assert [batch.ids.bag(feature)[0].tolist() for feature in range(3)] == [[2, 1, 0], [1, 0, 0], [1, 0, 0, 0]]
    assert batch.ids.offsets.tolist() == [0, 1, 2, 3, 5, 5, 6, 8, 8, 10]
    assert schema.splits["train"].positives == 1


def test_parquet_numbers_integers_as_categories_and_bad_rows(tmp_path: Path) -> None:
    table = pa.table(
        {
            "y": [0, 1, 2, 1, 0],
            "price": [1.5, None, 2.0, float("inf"), 0.0],
            "count": pa.array([1, 2, 3, 4, 5], pa.int8()),
            "site": pa.array([7, 7, 9, None, None], pa.int64()),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    schema = 'label = "y"\ndense = ["price", "count"]\ncategorical = ["site"]'
    with pytest.raises(DataError, match=r"a.parquet, line 3: the label .* is 2 instead of 0 or 1"):
        run(tmp_path, schema, tmp_path / "a.parquet", dense="none")
    made = run(tmp_path, schema, tmp_path / "a.parquet", dense="none", bad_rows="skip")
    assert made.source["bad_rows"] == 2
    assert read_split(tmp_path / "out", "train") == {
        "label": [0, 1, 0],
        "dense": [[1.5, 1], [0, 2], [0, 5]],
        "ids": [[0], [0], [1]],
    }
    assert read_map(tmp_path / "out", "site") == [("7", 2), ("", 1), (None, 0)]
    assert encode_rows(tmp_path / "out", table.take([0, 1, 4])).ids.values.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize(
    ("column", "values", "schema", "message"),
    [
        ("c", [[1], [2]], 'categorical = ["c"]', "name 'c' as a bag or sequence"),
        ("c", [[1.0], [2.0]], '[[bag]]\nname = "c"', "store them as text"),
        ("c", [datetime.date(2020, 1, 1)] * 2, 'dense = ["c"]', "numbers are needed"),
        ("c", ["a b", "c"], '[[bag]]\nname = "c"', "needs lists, or a separator"),
        ("d", [1, 2], 'dense = ["c"]', "has no column 'c'"),
    ],
)
def test_parquet_columns_of_the_wrong_type_are_refused(
    tmp_path: Path, column: str, values: list[Any], schema: str, message: str
) -> None:
    pq.write_table(pa.table({"y": [0, 1], column: values}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=message):
        run(tmp_path, f'label = "y"\n{schema}', tmp_path / "a.parquet")


def test_parquet_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet"):
        run(tmp_path, 'label = "y"\ncategorical = ["c"]', tmp_path / "a.parquet")
    pq.write_table(pa.table({"y": pa.array([], pa.int8()), "c": pa.array([], pa.string())}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet holds no rows"):
        run(tmp_path, 'label = "y"\ncategorical = ["c"]', tmp_path / "b.parquet")


# --- the schema -----------------------------------------------------------------------------------------------------


def test_the_example_schema_is_valid_and_says_what_its_comments_say() -> None:
    layout = load_layout(EXAMPLE)
    assert layout.label == "click"
    assert [feature.name for feature in layout.features] == ["site_id", "user", "item_id", "genres", "history"]
    assert layout.tables == ("site_id", "user", "item_id", "genres")
    assert layout.text == TextFormat(quote='"', header=True, missing=("NULL",))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('categorical = ["a"]', "has no label"),
        ('label = "y"', "nothing to learn from"),
        ('label = "y"\ncategorial = ["a"]', r"unknown key 'categorial' in the schema \(did you mean 'categorical'\?\)"),
        ('label = "y"\n[csv]\ndense = ["a"]', r"unknown key 'dense' in \[csv\]: TOML puts .* above the first one"),
        ('label = "y"\n[csv]\nseperator = ";"', "did you mean 'separator'"),
        ('label = "y"\ncategorical = ["a", "a"]', r"these repeat: \['a'\]"),
        ('label = "y"\ncategorical = "a"', "must be list, not 'a'"),
        ('label = "y"\ncategorical = [3]', "neither a name nor a table"),
        ('label = "y"\ndense = [{ name = "a", transform = "lag" }]', "did you mean 'log'"),
        ('[label]\ncolumn = "y"\npositive = "7 or more"', "is no rule"),
        ('[label]\npositive = "> 7"', "names no column"),
        ('label = "y"\n[[bag]]\nname = "ids"', "must not be named 'ids'"),
        ('label = "y"\n[[bag]]\nname = "b"\nmax_length = 0', "must be 1 or more"),
        ('label = "y"\n[[bag]]\nname = "b"\nseparator = ""', "is empty"),
        ('label = "y"\ncategorical = ["a"]\n[csv]\nseparator = "::"', "one ASCII character"),
        ('label = "y"\ncategorical = ["a"]\n[csv]\nencoding = "utf-17"', "unknown encoding"),
        ('label = "y"\ncategorical = ["a"]\n[csv]\nencoding = "utf-16"', "does not extend ASCII"),
        ('label = "y"\ncategorical = ["a"]\n[csv]\nencoding = "utf-7"', "does not extend ASCII"),
        ('label = "y"\ncategorical = ["a"]\n[csv]\nencoding = "iso2022-jp"', "does not extend ASCII"),
        ('label = "y"\ncategorical = ["a"]\n[csv]\nencoding = "hz"', "does not extend ASCII"),
        ('label = "y"\ncategorical = ["a"]\n[csv]\nencoding = "raw_unicode_escape"', "does not extend ASCII"),
        ('label = "y"\ncategorical = ["a"]\n[csv]\nencoding = "cp864"', "does not extend ASCII"),
        ('label = "y"\ncategorical = ["a"]\n[csv]\nencoding = "a\\u0000b"', "unknown encoding"),
        ('label = "y"\ncategorical = ["a"]\n[csv]\nheader = false', "name the columns"),
        ("label = ", "cannot be read as TOML"),
    ],
)
def test_mistakes_in_the_schema_are_named(tmp_path: Path, schema: str, message: str) -> None:
    (tmp_path / "schema.toml").write_text(schema)
    with pytest.raises(ConfigError, match=message) as caught:
        load_layout(tmp_path / "schema.toml")
    assert "schema.toml" in str(caught.value)


def test_a_bag_in_text_needs_a_separator(tmp_path: Path) -> None:
    raw = write_csv(tmp_path / "a.csv", "y,b\n1,a b\n")
    with pytest.raises(ConfigError, match="bag 'b' needs a separator"):
        run(tmp_path, 'label = "y"\n[[bag]]\nname = "b"', raw)


def test_a_schema_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no schema file .*nowhere\.toml"):
        load_layout(tmp_path / "nowhere.toml")
