"""Layout of raw data: the columns of the label, of dense values and of features, in a TOML schema or a known format."""

from __future__ import annotations

import codecs
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from holdall.common.decode import NOT_STORED
from holdall.common.errors import ConfigError
from holdall.data.schema import FeatureKind

RESERVED = (
    "label",
    "dense",
    "ids",
    "probability",
)  # columns of a split file that a bag or sequence must not be named after

MAX_BUCKETS = 10_000
"""Most buckets of a column."""
MAX_VALUE_BYTES = 64 << 10
"""Default length of the longest categorical value: one beyond it is text or a broken file, not the name of a row."""

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
}


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """Rules for splitting lines of text into columns."""

    separator: str = ","
    quote: str = ""
    """Character around fields that hold separators; empty when a quote is a character like any other."""
    escape: str = ""
    """Character that, before a quote inside a quoted field, makes it plain; a doubled quote is always plain."""
    encoding: str = "utf-8"
    header: bool = False
    """Whether the first line of every file names its columns."""
    columns: tuple[str, ...] = ()
    """Names of the columns, in order, for files without a header."""
    missing: tuple[str, ...] = ()
    """Fields that mean "missing", besides the empty one."""
    multiline: bool = False
    """Whether a quoted field may hold line breaks."""

    def __post_init__(self) -> None:
        if len(self.separator.encode()) != 1 or self.separator in "\r\n":
            raise ConfigError(f"the separator must be one ASCII character, not {self.separator!r}")
        if len(self.quote.encode()) > 1 or self.quote == self.separator:
            raise ConfigError(f"the quote must be one ASCII character or empty, not {self.quote!r}")
        if len(self.escape.encode()) > 1 or (self.escape and not self.quote):
            raise ConfigError(f"escape must be one ASCII character, and needs a quote, but is {self.escape!r}")
        if self.multiline and not self.quote:
            raise ConfigError("multiline needs a quote character: only quoted fields can hold line breaks")
        if self.header == bool(self.columns):
            raise ConfigError("name the columns when there is no header line, and only then (header, columns)")
        try:
            codecs.lookup(self.encoding)
        except (LookupError, UnicodeError, ValueError):
            raise ConfigError(
                f"unknown encoding '{self.encoding}': use a Python codec such as utf-8, latin-1"
            ) from None
        if not extends_ascii(self.encoding):  # blocks are cut at newline bytes, before decoding
            raise ConfigError(f"encoding '{self.encoding}' does not extend ASCII: convert the files to utf-8 first")


ASCII = (bytes(range(128)), b"+AAo-", b"~{0l~}", b"~\n", b"\x1b$B0l\x1b(B", b"\\u000a\\n", b"xn--bcher-kva")
"""All ASCII characters, and sequences of them that encodings of 7 bits use for others."""


def extends_ascii(encoding: str) -> bool:
    """Whether ASCII text is the same in this encoding, without a mark before it; it is never decoded."""
    try:
        return "\n".encode(encoding) == b"\n" and all(text.decode(encoding) == text.decode("ascii") for text in ASCII)
    except (LookupError, UnicodeError):
        return False


@dataclass(frozen=True)
class Positive:
    """Rule that turns a number or a text into a label: `value OP threshold`."""

    comparison: str
    threshold: float | str

    def __post_init__(self) -> None:
        if self.comparison not in COMPARISONS:
            raise ConfigError(f"{self.comparison[:20]!r} is no comparison: use one of {' '.join(COMPARISONS)}")
        if self.compares_text and self.comparison not in ("==", "!="):
            raise ConfigError(f"'{self}' compares text: use == or !=, or a number")

    @property
    def compares_text(self) -> bool:
        """Whether labels are compared as text: a boolean is `true` or `false`."""
        return isinstance(self.threshold, str)

    def __call__(self, value: Any) -> Any:
        return COMPARISONS[self.comparison](value, self.threshold)

    def __str__(self) -> str:
        threshold = f'"{self.threshold}"' if isinstance(self.threshold, str) else f"{self.threshold:g}"
        return f"{self.comparison} {threshold}"


@dataclass(frozen=True, kw_only=True)
class RawDense:
    """A numeric column of the raw data."""

    name: str
    column: str
    transform: Literal["log", "standard", "none"] | None = None
    """Its own transform; None takes the one of the whole run."""


@dataclass(frozen=True, kw_only=True)
class RawPart:
    """Raw column that is one side of a cross; see `RawFeature` for its fields."""

    name: str
    column: str
    integer: bool = False
    bucket: tuple[float, ...] | None = None
    hash: int | None = None


@dataclass(frozen=True, kw_only=True)
class RawFeature:
    """A categorical feature of the raw data."""

    name: str
    column: str
    """Empty for a cross, which has no column of its own."""
    kind: FeatureKind = "categorical"
    separator: str | None = None
    """Separator of the values of a bag or sequence in a text column; None where the column holds lists."""
    max_length: int | None = None
    """Bags keep their first `max_length` values, sequences their last."""
    integer: bool = False
    """Whether values are whole numbers also where a text writes them as floats: 12.0 is 12, and others are refused."""
    table: str | None = None
    """Name of a table shared with other features; a feature's own name names its table."""
    bucket: tuple[float, ...] | None = None
    """Bounds of the buckets that its numbers are put into (`data.transforms`)."""
    buckets: int | None = None
    """Number of buckets of about equal counts, whose bounds are found in the training rows."""
    hash: int | None = None
    """Number below which its texts are hashed."""
    cross: tuple[RawPart, ...] = ()
    """Columns whose values together are its value."""
    dim: int | None = None
    """Width of the rows of its table; None: that of the model."""

    @property
    def table_name(self) -> str:
        return self.table or self.name


def is_number_input(feature: RawFeature | RawPart) -> bool:
    """Whether the raw values of a feature, or of a column of a cross, are numbers."""
    return feature.bucket is not None or (isinstance(feature, RawFeature) and feature.buckets is not None)


def transform_of(feature: RawFeature) -> Any:
    """What makes the texts of its id map of the raw values; a feature of quantiles or a cross is like no other."""
    own = feature.name if feature.cross or feature.buckets is not None else None
    return own, feature.bucket, feature.hash


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Raw columns that make up a data set."""

    label: str | None
    """None: the files have no label, as those with rows to score may not."""
    label_optional: bool = field(default=False, metadata=NOT_STORED)
    """Whether files may be without the label column, and rows without a label."""
    positive: Positive | None = None
    """None: the label column holds 0 and 1, or booleans."""
    weight: str | None = None
    """Column with the weight of each row; None: every row counts once."""
    time: str | None = None
    """Column with the time of each row, which `--split time` reads."""
    dense: tuple[RawDense, ...] = ()
    features: tuple[RawFeature, ...] = ()
    text: TextFormat | None = None
    """For text files; Parquet files describe themselves."""
    lines: Literal["libsvm"] | None = None
    """Lines of another form than `text`: `label index:value ...`."""
    max_value_bytes: int = MAX_VALUE_BYTES
    """Rows with a categorical value of more bytes are refused."""
    keep: tuple[str, ...] = field(default=(), metadata=NOT_STORED)
    """Further columns that are passed on as they are."""

    def __post_init__(self) -> None:
        names = [column.name for column in self.dense] + [feature.name for feature in self.features]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(f"names of dense columns and features must differ, but these repeat: {repeated}")
        if not names and (self.label is not None or self.time is None):
            raise ConfigError("the schema names no dense column and no feature: there is nothing to learn from")
        for feature in self.features:
            reserved = RESERVED if self.weight is None else (*RESERVED, "weight")
            if feature.kind != "categorical" and feature.name in reserved:
                raise ConfigError(f"a {feature.kind} must not be named '{feature.name}': choose another name")
            if feature.max_length is not None and not 1 <= feature.max_length < 2**31:
                bounds = "1 or more, and below 2^31"
                raise ConfigError(f"max_length of '{feature.name}' is {feature.max_length}, but must be {bounds}")

        self._check_transforms()

    def _check_transforms(self) -> None:
        for feature in self.features:
            for bounds in (feature.bucket, *(part.bucket for part in feature.cross)):
                if bounds is not None and (not bounds or list(bounds) != sorted(set(bounds))):
                    raise ConfigError(f"bucket of '{feature.name}' is {list(bounds)}, but must be ascending numbers")
            for size in (feature.hash, *(part.hash for part in feature.cross)):
                if size is not None and not 1 <= size < 2**31:
                    raise ConfigError(f"hash of '{feature.name}' is {size}, but must be 1 or more, and below 2^31")
            if feature.buckets is not None and not 2 <= feature.buckets <= MAX_BUCKETS:
                raise ConfigError(f"buckets of '{feature.name}' is {feature.buckets}, but must be 2 to {MAX_BUCKETS:,}")
            if sum((feature.bucket is not None, feature.buckets is not None, bool(feature.cross))) > 1:
                raise ConfigError(f"feature '{feature.name}' has two of bucket, buckets and cross: choose one of them")
            if feature.dim is not None and feature.dim < 1:
                raise ConfigError(f"dim of '{feature.name}' is {feature.dim}, but must be 1 or more")
            if feature.kind != "categorical" and (feature.cross or is_number_input(feature)):
                raise ConfigError(f"{feature.kind} '{feature.name}' has several values a row: of those only hash works")
        for table in self.tables:
            dims = {f.dim for f in self.features if f.table_name == table}
            if len(dims) > 1:
                raise ConfigError(f"the features that share table '{table}' have different dims: give each the same")
            rules = {transform_of(f) for f in self.features if f.table_name == table}
            if len(rules) > 1:
                raise ConfigError(
                    f"the features that share table '{table}' have different transforms, so their ids would mean "
                    f"different things: give them the same, or tables of their own"
                )

    @property
    def parts(self) -> tuple[RawPart, ...]:
        """Columns of crosses that are no features themselves, once each."""
        known = {feature.name for feature in self.features if not feature.cross}
        found = {part.name: part for feature in self.features for part in feature.cross if part.name not in known}
        return tuple(found.values())

    @property
    def has_transforms(self) -> bool:
        return any(f.cross or f.hash is not None or is_number_input(f) for f in self.features)

    @property
    def used_columns(self) -> tuple[str, ...]:
        """Every raw column that is read, once each, label first."""
        first = [column for column in (self.label, self.weight, self.time) if column is not None]
        used = [*first, *(dense.column for dense in self.dense), *(f.column for f in self.features if not f.cross)]
        used += [part.column for part in self.parts]
        return tuple(dict.fromkeys([*used, *self.keep]))

    def for_columns(self, names: Sequence[str]) -> Layout:
        """The layout of a file with these columns: without the label if that is optional and not among them."""
        return replace(self, label=None) if self.label_optional and self.label not in names else self

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the value tables, once each, in the order of the features."""
        return tuple(dict.fromkeys(feature.table_name for feature in self.features))
