"""Guess of what the columns of a table are: the label, numbers, values, several values, or nothing to learn from.

Every guess has a reason in words. A column is numbers (dense) or values (categorical) by its type, its name and the
number of different values; text with separators is several values if its pieces recur.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from holdall.common.errors import ConfigError, DataError, did_you_mean
from holdall.data.rows import BOOLEANS, WHOLE_TEXT, import_polars

if TYPE_CHECKING:
    import polars as pl

Role = Literal["label", "weight", "time", "dense", "categorical", "bag", "left out"]

LABEL_NAMES = (
    *("label", "target", "y", "click", "clicked", "is_click", "is_clicked", "clk", "conversion", "converted"),
    *("is_conversion", "purchase", "purchased", "bought", "buy", "install", "installed", "is_installed", "liked"),
    *("like", "is_like", "response", "outcome", "class", "fit", "rating", "stars", "score"),
)
"""Names that labels have, the surest first."""
WEIGHT_NAMES = (
    *("sample_weight", "sample_weights", "instance_weight", "example_weight", "row_weight", "importance_weight"),
    *("weight_col", "loss_weight"),
)
"""Names that weights of rows have; `weight` alone is as often that of a person or a parcel."""
YES = ("yes", "y", "true", "t", "positive", "pos", "click", "clicked", "good", "1")
FEW_NUMBERS = 20
"""Different whole numbers up to which a column is values, such as months or grades, and not amounts."""
MANY_ROWS = 100
"""Rows from which on a value of its own in each of them tells that a column names rows."""
MAX_WORDS = 8
"""Words of a text in the mean from which on it is prose."""
SEPARATORS = ("|", ";", ",", "^", "~", "/", " ")
_ID_NAME = re.compile(r"(^|[^a-z])(id|ids|code|zip|zipcode|postcode|isbn|sku|uuid|key|hash)$|[a-z](Id|ID)$")
_TIME_NAME = re.compile(r"time|date|stamp|created|updated|(^|[^a-z])ts$", re.IGNORECASE)
_DATE = (
    r"^([0-9]{4}[-/.][0-9]{1,2}[-/.][0-9]{1,2}|[0-9]{1,2}[-/.][0-9]{1,2}[-/.][0-9]{2,4}|[A-Z][a-z]{2,8}\.? [0-9]{1,2}, "
    r"[0-9]{4}|[0-9]{1,2} [A-Z][a-z]{2,8} [0-9]{4})([ T][0-9]{1,2}:[0-9]{2}.*)?$"
)
_ISO_DATE = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([ T][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?(Z|[+-][0-9]{2}:[0-9]{2})?)?$"
_NUMBER = r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$"


@dataclass(frozen=True)
class Guess:
    """What a column is taken for, and why."""

    column: str
    role: Role
    reason: str
    options: dict[str, Any] = field(default_factory=dict)
    """Further keys of its entry in a schema."""

    @property
    def entry(self) -> str | dict[str, Any]:
        """Its entry in a schema."""
        return {"name": self.column, **self.options} if self.options else self.column


def guess_columns(frame: pl.DataFrame, label: str | None = None) -> list[Guess]:
    """Guesses for all columns of a sample of rows, the label's first; `label` names its column if it is known."""
    given = {name: without_missing(frame[name]) for name in frame.columns}
    found = guess_label(given, label)
    others = [guess_column(values, frame.height) for name, values in given.items() if name != found.column]
    for role in ("weight", "time"):
        first = next((guess for guess in others if guess.role == role), None)
        others = [without_role(g, first) if first and g.role == role and g is not first else g for g in others]
    if all(guess.role in ("left out", "weight", "time") for guess in others):
        reasons = "; ".join(f"{guess.column}: {guess.reason}" for guess in others[:5])
        raise DataError(f"no column is numbers or recurring values ({reasons}): write the schema yourself")
    return [found, *others]


def document(guesses: Sequence[Guess]) -> dict[str, Any]:
    """Guesses as a parsed TOML schema."""
    label = guesses[0]
    entries = {
        role: [guess.entry for guess in guesses if guess.role == role] for role in ("dense", "categorical", "bag")
    }
    single = {str(guess.role): guess.column for guess in guesses if guess.role in ("weight", "time")}
    return {"label": {"column": label.column, **label.options}, **single, **entries}


def without_role(guess: Guess, first: Guess) -> Guess:
    """The guess for a second column of a role that only one can have."""
    return Guess(guess.column, "left out", f"{guess.reason}; '{first.column}' is the {first.role} already")


def without_missing(values: pl.Series) -> pl.Series:
    """The values that are there; dictionaries as text."""
    pl = import_polars()
    if values.dtype in (pl.Categorical, pl.Enum):
        values = values.cast(pl.String)
    values = values.drop_nulls()
    if values.dtype.is_float():
        values = values.drop_nans()
    return values.filter(values != "") if values.dtype == pl.String else values


# --- the label ------------------------------------------------------------------------------------------------------


def guess_label(columns: dict[str, pl.Series], label: str | None) -> Guess:
    """The label by its name and by having two values."""
    if label is not None:
        if label not in columns:
            raise ConfigError(f"there is no column '{label}' to be the label{did_you_mean(label, columns)}")
        found = label_rule(columns[label], "named as the label")
        if found is None:
            number = columns[label].n_unique()
            raise ConfigError(f"column '{label}' has {number:,} different values and is no label: name another column")
        return found
    by_name = sorted((name for name in columns if rank(name) < math.inf), key=rank)
    for two_values in (True, False):
        for name in by_name:
            if not two_values or columns[name].n_unique() == 2:
                found = label_rule(columns[name], f"its name, and {columns[name].n_unique()} different values")
                if found is not None:
                    return found
    binary = [name for name, values in columns.items() if is_binary(values)]
    names = list(columns)
    for name in (names[0], names[-1], *(binary if len(binary) == 1 else ())):
        if name in binary:
            where = {names[0]: "the first column", names[-1]: "the last column"}.get(name, "the only such column")
            return Guess(name, "label", f"{where}, with the values 0 and 1 alone")
    raise DataError(
        f"no column looks like a label, by its name ({', '.join(LABEL_NAMES[:4])}, ...) or by being the only one with "
        f"0 and 1: name it (--label)"
    )


def rank(name: str) -> float:
    """Place of a name among those of labels; infinite for others."""
    plain = plain_name(name)
    return LABEL_NAMES.index(plain) if plain in LABEL_NAMES else math.inf


def plain_name(name: str) -> str:
    """A name in small letters, with underscores for everything else."""
    return re.sub(r"[^a-z]+", "_", name.lower()).strip("_")


def is_binary(values: pl.Series) -> bool:
    """Whether a column has 0 and 1, or both booleans, and nothing else."""
    distinct = {str(value) for value in values.unique().head(5).to_list()}
    return len(distinct) == 2 and {BOOLEANS.get(text, text) for text in distinct} in (
        *({0.0, 1.0}, {"0", "1"}, {"0.0", "1.0"}),
    )


def label_rule(values: pl.Series, why: str) -> Guess | None:
    """The label with the rule that makes it 0 and 1; None if there is no plain one."""
    pl = import_polars()
    if is_binary(values):
        return Guess(values.name, "label", f"{why}: 0 and 1" if values.dtype != pl.Boolean else f"{why}: booleans")
    numbers = as_numbers(values)
    if numbers is not None:
        distinct = sorted(numbers.unique().to_list())
        if not 2 <= len(distinct) <= FEW_NUMBERS:
            return None
        threshold = min(n for n in distinct if n >= distinct[0] + 0.7 * (distinct[-1] - distinct[0]))
        share = (numbers >= threshold).mean()
        said = f"{why}: {distinct[0]:g} to {distinct[-1]:g}; the upper third is 1 ({share:.0%} of the rows), check it"
        return Guess(values.name, "label", said, {"positive": f">= {threshold:g}"})
    if values.dtype != pl.String or not 2 <= values.n_unique() <= FEW_NUMBERS:
        return None
    counts = values.value_counts(sort=True).rows()
    yes = next((text for text, _ in counts if text.lower() in (*YES, values.name.lower())), None)
    text = yes or (counts[-1][0] if len(counts) == 2 else counts[0][0])
    shown = ", ".join(f"{value!r} {count / len(values):.0%}" for value, count in counts[:4])
    quoted = f"'{text}'" if re.search(_NUMBER, text) or text != text.strip() else text
    return Guess(values.name, "label", f"{why}: {shown}; {text!r} is 1, check it", {"positive": f"== {quoted}"})


# --- all others -----------------------------------------------------------------------------------------------------


def guess_column(values: pl.Series, num_rows: int) -> Guess:
    """What a column that is not the label is, from its values without missing ones."""
    pl = import_polars()
    name, dtype, missing = values.name, values.dtype, num_rows - len(values)
    if not len(values):
        return Guess(name, "left out", "it has no values")
    if isinstance(dtype, pl.List | pl.Array):
        if dtype.inner.is_nested() or dtype.inner.is_float() or dtype.inner.is_temporal():
            return Guess(name, "left out", f"lists of {dtype.inner} have no obvious text")
        return Guess(name, "bag", "lists")
    if dtype.is_temporal():
        if dtype not in (pl.Date, pl.Datetime) or missing:
            return Guess(name, "left out", f"a time ({dtype}): make columns such as the hour of it")
        return Guess(name, "time", f"a time ({dtype}), for --split time; no input of the model")
    if dtype.is_nested() or dtype in (pl.Binary, pl.Object):
        return Guess(name, "left out", f"values of type {dtype} are not read")
    distinct = values.n_unique()
    if distinct == 1 and not missing:
        return Guess(name, "left out", "all rows have the same value")
    if dtype == pl.Boolean:
        return Guess(name, "categorical", "booleans")
    numbers = as_numbers(values)
    if numbers is not None:
        if plain_name(name) in WEIGHT_NAMES and not missing and float(numbers.min()) >= 0:  # type: ignore[arg-type]
            return Guess(name, "weight", f"its name; {said_range(numbers)}")
        return guess_numbers(values, numbers, distinct, missing)
    return guess_text(values, distinct, missing)


def as_numbers(values: pl.Series) -> pl.Series | None:
    """The values as numbers; None if one is none, or starts with a 0 as codes do."""
    pl = import_polars()
    if values.dtype == pl.String:
        if not values.str.contains(_NUMBER).all() or values.str.contains(r"^-?0[0-9]").any():
            return None
        return values.cast(pl.Float64, strict=False)
    return values.cast(pl.Float64) if values.dtype.is_numeric() else None


def guess_numbers(values: pl.Series, numbers: pl.Series, distinct: int, missing: int) -> Guess:
    """Values or amounts, by name, size and number of different ones."""
    pl = import_polars()
    name = values.name
    low, high = float(numbers.min()), float(numbers.max())  # type: ignore[arg-type]
    whole = bool((numbers == numbers.round()).all()) and not values.dtype.is_decimal()
    options: dict[str, Any] = {}
    as_floats = ""
    if whole and values.dtype == pl.String and not values.str.contains(r"^-?[0-9]+$").all():
        if values.str.contains(WHOLE_TEXT).all():
            options["integer"] = True
        as_floats = ", written as floats" + (" because some are missing" if missing else "")
    elif whole and values.dtype.is_float():
        as_floats = ", stored as floats" + (" because some are missing" if missing else "")
    is_id = bool(_ID_NAME.search(name) or _ID_NAME.search(name.lower()))
    if whole:
        of_rows = distinct == len(values) and not missing and len(values) >= MANY_ROWS
        seconds = low if high < 1e11 else low / 1000
        if 9.4e8 < seconds < 4.2e9 and high < 4.2e12 and distinct > FEW_NUMBERS and _TIME_NAME.search(name):
            role: Role = "left out" if missing else "time"
            return Guess(name, role, "a time (seconds or milliseconds since 1970), for --split time; no input")
        if of_rows and is_id:
            return Guess(name, "left out", f"another id in each of {distinct:,} rows: nothing recurs")
        if is_id:
            return Guess(name, "categorical", f"an id by its name, {distinct:,} different{as_floats}", options)
        if distinct <= FEW_NUMBERS:
            return Guess(name, "categorical", f"{distinct} different whole numbers{as_floats}", options)
        if max(-low, high) >= 1e9 and distinct < len(values):
            return Guess(name, "categorical", f"numbers as large as ids, {distinct:,} different{as_floats}", options)
        if distinct <= len(values) / MANY_ROWS and are_codes(numbers, distinct):
            return Guess(name, "categorical", f"{distinct:,} different whole numbers, far apart{as_floats}", options)
    said = f"numbers from {low:g} to {high:g}"
    if -low >= 0.01 * high and low < 0:
        return Guess(name, "dense", f"{said}, some of them negative", {"transform": "standard"})
    return Guess(name, "dense", f"{said}; negative ones become 0" if low < 0 else said)


def said_range(numbers: pl.Series) -> str:
    return f"numbers from {float(numbers.min()):g} to {float(numbers.max()):g}"  # type: ignore[arg-type]


def are_codes(numbers: pl.Series, distinct: int) -> bool:
    """Whether small numbers are as far apart as large ones, which those of counts and ages are not."""
    lower = numbers.unique().sort().head(distinct // 2)
    return float(lower[-1] - lower[0]) > 4 * len(lower)


def guess_text(values: pl.Series, distinct: int, missing: int) -> Guess:
    """A value, several values with a separator, a time, or prose."""
    name = values.name
    if values.head(200).str.contains(_DATE).all():
        if not missing and values.head(200).str.contains(_ISO_DATE).all():
            return Guess(name, "time", "a time, for --split time; no input of the model")
        return Guess(name, "left out", "a time: make columns such as the weekday of it")
    several = guess_separator(values, distinct)
    if several is not None:
        return several
    words = float(values.str.count_matches(" ", literal=True).mean()) + 1  # type: ignore[arg-type]
    if words > MAX_WORDS and distinct > len(values) / 10:
        return Guess(name, "left out", f"prose, {words:.0f} words in the mean")
    if distinct > 0.95 * len(values) and len(values) >= MANY_ROWS:
        return Guess(name, "left out", f"{distinct:,} different values in {len(values):,} rows: hardly one recurs")
    return Guess(name, "categorical", f"{distinct:,} different values")


def guess_separator(values: pl.Series, distinct: int) -> Guess | None:
    """Several values in a text: a separator is in a tenth of the texts, and the pieces are fewer than the texts."""
    for separator in SEPARATORS:
        has = values.str.contains(separator, literal=True)
        if not has.mean() or has.mean() < 0.1:  # type: ignore[operator]
            continue
        if separator == "," and values.filter(has).str.contains(", ", literal=True).all():
            separator = ", "
        pieces = values.str.split(separator)
        number = pieces.list.explode().n_unique()
        mean = float(pieces.list.len().mean())  # type: ignore[arg-type]
        # Words of names and prose recur as well, though less.
        if number < distinct * (0.1 if separator == " " else 0.8) and mean <= 100:
            said = f"{number:,} different pieces between {separator!r}, {mean:.1f} in the mean"
            return Guess(values.name, "bag", said, {"separator": separator})
    return None
