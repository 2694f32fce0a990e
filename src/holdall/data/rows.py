"""Raw rows of any source with checked values: a label of 0 or 1, finite numbers, text.

Both readers (text lines, Parquet) pass their columns to `check_values`, whose result no longer depends on the format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from holdall.common.errors import DataError, MissingDependencyError, did_you_mean
from holdall.data.layout import Layout, RawFeature, RawPart, is_number_input

if TYPE_CHECKING:
    import polars as pl

FLOAT32_MAX = float(np.finfo(np.float32).max)
MAX_SHOWN = 80
BOOLEANS = {"true": 1.0, "True": 1.0, "TRUE": 1.0, "false": 0.0, "False": 0.0, "FALSE": 0.0}
"""Labels in the words of common programs."""
WHOLE_FLOATS = {32: 2.0**24, 64: 2.0**53}
"""By bits of a float, the size from which on it may be a rounded whole number."""
WHOLE_TEXT = r"^-?[0-9]+(\.0*)?$"
"""Whole numbers as programs write them that store them as floats."""
NOT_WHOLE = "which is not the exact value of a whole number: store ids as text or integers, or name it as dense"
NO_WEIGHT = "which is no finite number of 0 or more: correct it; 0 leaves a row out of loss and metrics"
NO_TIME = "which is no time: give seconds or another number, or a date as 2024-05-31 or 2024-05-31T23:59:59Z"
DATE_FORMATS = ("%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%d %H:%M%:z", "%Y-%m-%d %H:%M:%S%.f%:z")
"""Texts that are times, with a blank or a T before the hour; without an offset they are taken as UTC."""
TEXT_LABELS = """; for another text set positive = "== TEXT" in [label] of the schema"""


def import_polars() -> Any:
    """The polars module; an error with the install command where it is missing."""
    try:
        import polars
    except ImportError as error:
        raise MissingDependencyError("polars", "prepare", "preparing a data set") from error
    return polars


@dataclass(frozen=True)
class Refused:
    """Row that is left out: its line, the reason, and its content."""

    line: int
    """Line number, or row number in files without lines; counted from 1."""
    reason: str
    raw: str
    num_rows: int = 1
    """Rows that it stands for: a run of empty lines is one."""


@dataclass(frozen=True)
class Rows:
    """Checked rows of one file. R rows."""

    frame: pl.DataFrame
    """`label` (UInt8, null where an optional one is missing), `dense0`.. (Float64, null where missing), `feature0`..
    (String or lists of it, no nulls; Float64, null where missing, of buckets; none of a cross), `part0`.. (further
    columns of crosses), `keep0`.. (of any type); `weight` (Float64), `time` (Float64) and `is_date` (Boolean, whether
    that time is a date) where the layout has them."""
    numbers: npt.NDArray[np.int64]
    """[R] number of each row in its file, from 0, with refused rows counted: what the split is drawn from."""
    refused: list[Refused]
    num_rows: int
    """Rows read: those in `frame` and those in `refused`."""
    position: int
    """Bytes of the file read so far."""
    splits: npt.NDArray[np.uint8] | None = None
    """[R] split of each row where the data set defines it; None: drawn by a hash."""


def check_columns(names: Sequence[str], layout: Layout, where: str) -> list[int]:
    """Positions of the used columns among a file's columns."""
    positions = []
    for column in layout.used_columns:
        if column not in names:
            raise DataError(
                f"{where} has no column '{column}'{did_you_mean(column, names)}: correct the schema or the file"
            )
        if names.count(column) > 1:
            raise DataError(f"{where} has {names.count(column)} columns named '{column}': rename all but one")
        positions.append(list(names).index(column))
    return positions


def check_values(raw: pl.DataFrame, layout: Layout) -> tuple[pl.DataFrame, dict[int, str]]:
    """Typed columns of the good rows, and the reasons why the others (by position in `raw`) are refused.

    `raw` holds the used columns by name, as text or as Parquet's own types; null and "" are missing.
    """
    pl = import_polars()
    label, fine = label_of(raw, layout)
    outputs = [label.alias("label")]
    checks = [fine.alias("label")]
    for index, dense in enumerate(layout.dense):
        number, fine = number_of(raw.schema[dense.column], dense.column)
        outputs.append(number.alias(f"dense{index}"))
        checks.append(fine.alias(f"dense{index}"))
    whole = {}
    if layout.weight is not None:
        number, fine = weight_of(raw.schema[layout.weight], layout.weight)
        outputs.append(number.alias("weight"))
        whole["weight"] = fine
    if layout.time is not None:
        outputs.append(time_of(raw.schema[layout.time], layout.time).alias("time"))
        whole["time"] = outputs[-1].is_not_null()
        outputs.append(is_date(raw.schema[layout.time], layout.time).alias("is_date"))
    inputs = inputs_of(layout)
    for name, feature in inputs.items():
        values, fine = values_of(raw.schema[feature.column], feature)
        outputs.append(values.alias(name))
        if fine is not None:
            whole[f"whole {name}"] = fine
    outputs += [pl.col(column).alias(f"keep{index}") for index, column in enumerate(layout.keep)]
    frame = raw.select(outputs)
    texts = {name: feature for name, feature in inputs.items() if not is_number_input(feature)}
    lengths = frame.select(length_of(feature, name) for name, feature in texts.items())
    plainly = [checks[0].all().alias("label"), *(fine.all().alias(name) for name, fine in whole.items())]
    if all(raw.select(plainly).row(0)) and clearly_fine(raw, frame, lengths, layout):
        return frame, {}
    flags = raw.select(checks).hstack(lengths.select(pl.all().fill_null(0) <= layout.max_value_bytes))
    flags = flags.hstack(raw.select(fine.alias(name) for name, fine in whole.items()))
    good = flags.select(pl.all_horizontal(pl.all())).to_series()
    return frame.filter(good), explain(raw, flags, lengths, (~good).arg_true().to_list(), layout)


def inputs_of(layout: Layout) -> dict[str, RawFeature | RawPart]:
    """Columns of values by their names in a checked frame: those of features, then further ones of crosses."""
    features = {f"feature{index}": f for index, f in enumerate(layout.features) if not f.cross}
    return {**features, **{f"part{index}": part for index, part in enumerate(layout.parts)}}


def clearly_fine(raw: pl.DataFrame, frame: pl.DataFrame, lengths: pl.DataFrame, layout: Layout) -> bool:
    """Whether every dense value is a number or plainly missing and no value is too long: a tenth of the time that
    flags for each row take."""
    pl = import_polars()
    names = [f"dense{index}" for index in range(len(layout.dense))]
    columns = [dense.column for dense in layout.dense]
    if any(frame[name].null_count() > raw[column].null_count() for name, column in zip(names, columns, strict=True)):
        return False
    if not all(lengths.select((pl.all() <= layout.max_value_bytes).all()).row(0) if lengths.width else []):
        return False
    return all(frame.select((pl.col(name).abs() <= FLOAT32_MAX).all() for name in names).row(0) if names else [])


def length_of(feature: RawFeature | RawPart, name: str) -> Any:
    """Expression for the bytes of a feature's value, of the longest one in a list; null for an empty list."""
    pl = import_polars()
    if isinstance(feature, RawPart) or feature.kind == "categorical":
        return pl.col(name).str.len_bytes()
    return pl.col(name).list.eval(pl.element().str.len_bytes()).list.max()


def label_of(raw: pl.DataFrame, layout: Layout) -> tuple[Any, Any]:
    """Expressions for the label: 0 or 1, null where it is missing, and whether each row is fine."""
    pl = import_polars()
    if layout.label is None:
        return pl.repeat(None, pl.len(), dtype=pl.UInt8), pl.repeat(True, pl.len())
    given = pl.col(layout.label)
    if raw.schema[layout.label] in (pl.Categorical, pl.Enum):
        given = given.cast(pl.String)
    is_text = raw.schema[layout.label] in (pl.String, pl.Categorical, pl.Enum)
    missing = given.is_null() | (given == "" if is_text else False)
    if layout.positive is not None and layout.positive.compares_text:
        label = pl.when(~missing).then(layout.positive(given.cast(pl.String)))
        fine = pl.repeat(True, pl.len()) & ~missing
    else:
        number = given.cast(pl.Float64, strict=False)
        if is_text and layout.positive is None:
            number = pl.coalesce(number, given.replace_strict(BOOLEANS, default=None, return_dtype=pl.Float64))
        fine = (number.is_in([0.0, 1.0]) if layout.positive is None else number.is_finite()).fill_null(False)
        label = number if layout.positive is None else layout.positive(number)
    if layout.label_optional:
        fine |= missing
    return label.cast(pl.UInt8, strict=False), fine


def number_of(dtype: Any, column: str) -> tuple[Any, Any]:
    """Expressions for a dense column: its numbers (null where missing) and whether each row is fine."""
    pl = import_polars()
    raw = pl.col(column)
    number = raw.cast(pl.Float64, strict=False)
    missing = raw.is_null()
    if dtype == pl.String:
        missing |= raw == ""
    return number, missing | (number.abs() <= FLOAT32_MAX).fill_null(False)  # NaN is above every number to polars


def weight_of(dtype: Any, column: str) -> tuple[Any, Any]:
    """Expressions for the weights of rows, and whether each is one: a finite number of 0 or more."""
    number, fine = number_of(dtype, column)
    return number, fine & (number >= 0).fill_null(False)


def time_of(dtype: Any, column: str) -> Any:
    """Expression for times: numbers as they are, dates as microseconds since 1970; null where it is neither."""
    pl = import_polars()
    raw = pl.col(column)
    if dtype in (pl.Categorical, pl.Enum):
        raw, dtype = raw.cast(pl.String), pl.String
    if dtype in (pl.Date, pl.Datetime):
        return raw.cast(pl.Datetime("us")).to_physical().cast(pl.Float64)
    if dtype != pl.String:
        number = raw.cast(pl.Float64, strict=False)
        return pl.when(number.is_finite()).then(number)
    number = raw.cast(pl.Float64, strict=False)
    plain = raw.str.replace(r"^([0-9-]{10})T", "$1 ").str.replace(r"(Z|\+00)$", "+00:00")
    dates = [read_date(plain, form) for form in DATE_FORMATS]
    return pl.coalesce(pl.when(number.is_finite()).then(number), *dates)


def is_date(dtype: Any, column: str) -> Any:
    """Expression for whether a time is a date, not a number."""
    pl = import_polars()
    if dtype in (pl.String, pl.Categorical, pl.Enum):
        return pl.col(column).cast(pl.String).cast(pl.Float64, strict=False).is_null()
    return pl.repeat(dtype.is_temporal(), pl.len())


def read_date(text: Any, form: str) -> Any:
    """Expression for the microseconds since 1970 of dates in one format; null for other texts."""
    pl = import_polars()
    kind = pl.Datetime("us", "UTC") if form.endswith("z") else pl.Datetime("us")
    return text.str.strptime(kind, form, strict=False).to_physical().cast(pl.Float64)


def values_of(dtype: Any, feature: RawFeature | RawPart) -> tuple[Any, Any]:
    """Expressions for a feature: text without nulls, or lists of text without nulls or empty pieces, or the numbers of
    buckets; and whether each row is fine, None where every row is."""
    pl = import_polars()
    raw = pl.col(feature.column)
    if is_number_input(feature):
        return number_of(dtype, feature.column)
    if isinstance(feature, RawPart) or feature.kind == "categorical":
        texts, fine = text_of(raw, dtype, feature.integer)
        return texts.fill_null(""), fine
    if dtype == pl.String:
        assert feature.separator is not None
        raw = raw.str.split(feature.separator)
    pieces = raw.cast(pl.List(pl.String)).fill_null([])
    pieces = pieces.list.eval(pl.element().filter(pl.element().is_not_null() & (pl.element() != "")))
    if feature.max_length is None:
        return pieces, None
    return pieces.list.head(feature.max_length) if feature.kind == "bag" else pieces.list.tail(feature.max_length), None


def text_of(raw: Any, dtype: Any, integer: bool) -> tuple[Any, Any]:
    """Expressions for values as text, and whether each is fine, None where all are.

    A float stands for the whole number that it is; NaN is missing.
    """
    pl = import_polars()
    if dtype in (pl.Float32, pl.Float64):
        number = raw.cast(pl.Float64).fill_nan(None)
        limit = WHOLE_FLOATS[32 if dtype == pl.Float32 else 64]
        fine = (number == number.round()) & (number.abs() < limit)
        return number.cast(pl.Int64, strict=False).cast(pl.String), fine.fill_null(True)
    if integer and dtype in (pl.String, pl.Categorical, pl.Enum):
        text = raw.cast(pl.String)
        number = text.str.replace(r"\.0*$", "").cast(pl.Int64, strict=False)
        fine = text.is_null() | (text == "") | (text.str.contains(WHOLE_TEXT) & number.is_not_null())
        return number.cast(pl.String), fine
    return raw.cast(pl.String), None


def explain(
    raw: pl.DataFrame, fine: pl.DataFrame, lengths: pl.DataFrame, rows: list[int], layout: Layout
) -> dict[int, str]:
    """Reason why each of these rows is refused: its first invalid value."""
    names, inputs = fine.columns, inputs_of(layout)
    single = {"label": layout.label or "", "weight": layout.weight or "", "time": layout.time or ""}
    of_dense = {f"dense{index}": dense.column for index, dense in enumerate(layout.dense)}
    of_inputs = {name: feature.column for name, feature in inputs.items()}
    known = {**single, **of_dense, **of_inputs, **{f"whole {name}": column for name, column in of_inputs.items()}}
    columns = [known[name] for name in names]
    wrong = fine[rows].to_numpy().argmin(axis=1).tolist()
    values = {place: raw[columns[place]] for place in set(wrong)}
    reasons = {}
    for row, place in zip(rows, wrong, strict=True):
        name, column = names[place], columns[place]
        if name == "weight":
            reasons[row] = f"the weight (column '{column}') is {shown(values[place][row])}, {NO_WEIGHT}"
            continue
        if name == "time":
            reasons[row] = f"the time (column '{column}') is {shown(values[place][row])}, {NO_TIME}"
            continue
        if name.startswith("whole") and not is_number_input(inputs[name.removeprefix("whole ")]):
            reasons[row] = f"column '{column}' holds {shown(values[place][row])}, {NOT_WHOLE}"
            continue
        if name in lengths.columns:
            reasons[row] = too_long(column, lengths[name][row], layout.max_value_bytes)
            continue
        value = values[place][row]
        if name != "label":
            hint = " (a missing one is null)" if isinstance(value, float) and math.isnan(value) else ""
            reasons[row] = f"column '{column}' holds {shown(value)}, which is not a finite number{hint}"
        elif value is None or value == "":
            reasons[row] = f"the label (column '{column}') is missing"
        else:
            wanted = "a finite number"
            if layout.positive is None:
                wanted = "0 or 1" + (TEXT_LABELS if isinstance(value, str) else "")
            reasons[row] = f"the label (column '{column}') is {shown(value)} instead of {wanted}"
    return reasons


def shown(value: object) -> str:
    """A value as an error quotes it: long ones are cut."""
    if isinstance(value, int) and value.bit_length() > 4096:  # Python refuses to write more than 4,300 digits
        return f"an integer of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text):,} characters)"


def too_long(column: str, length: int, limit: int) -> str:
    return f"column '{column}' holds a value of {length:,} bytes, but {limit:,} are the most (--max-value-bytes)"
