"""Synthetic click logs with planted click probabilities, for tests, benchmarks and comparisons of methods.

    config = preset("criteo-kaggle", scale=0.01, rows=1_000_000)
    write_prepared(config, "data/synthetic")        # a data folder, as `holdall prepare` would make it
    best_possible_of(DataSet("data/synthetic", "test"))  # of `evaluation.best_possible`

The true click probability of every row is kept, so the best AUC and logloss that any model can reach are known: there
is no noise besides the coin flip of the label. The presets put them near those of the real sets (Criteo Kaggle: AUC
0.80, logloss 0.45); a DLRM of dim 16 that sees 200,000 rows of `criteo-kaggle` once, at scales of 0.001 to 0.01,
reaches an AUC of 0.77. How rows are drawn is in `click_log.py`, the probability in `click_probability.py`.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from holdall.common.errors import ConfigError, did_you_mean
from holdall.common.files import PARTIAL
from holdall.common.output_folder import output_folder
from holdall.data.arrow_files import write_split_file
from holdall.data.click_log import BLOCK_ROWS, SyntheticConfig, draw_ids, generate, make_block
from holdall.data.columns import Columns, Ragged
from holdall.data.id_map import IDS_FOLDER, IdMap, id_map_path
from holdall.data.identity import with_files
from holdall.data.schema import DATA_SET, DenseColumn, Feature, Schema, Split

__all__ = [
    "PRESETS",
    "SyntheticConfig",
    "generate",
    "make_block",
    "preset",
    "write_prepared",
    "write_tsv",
]

ROWS_PER_FILE = 16 * BLOCK_ROWS
CRITEO_DENSE, CRITEO_FEATURES = 13, 26
MISSING_ID = 2  # of every fifth feature of a TSV: popular, so that missing values are common, as in the real log
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}

# fmt: off
_CRITEO_KAGGLE = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)
_CRITEO_1TB = (  # values seen at least 15 times, as in DLRM-small
    7912889, 33823, 17139, 7339, 20046, 4, 7105, 1382, 63, 5554114, 582469, 245828, 11, 2209, 10667, 104, 4, 968, 15,
    8165896, 2675940, 7156453, 302516, 12022, 97, 35,
)
# C1, banner_pos, site_*, app_*, device_*, C14..C21: distinct values in all 40,428,967 rows of the public train file, as
# CachedEmbedding (hpcaitech) lists them; 9,449,205 in all. FAE counts 9.3M for the 32.3M rows it trains on.
_AVAZU = (
    7, 7, 4737, 7745, 26, 8552, 559, 36, 2686408, 6729486, 8251, 5, 4, 2626, 8, 9, 435, 4, 68, 172, 60,
)
# fmt: on
PRESETS: dict[str, SyntheticConfig] = {
    "criteo-kaggle": SyntheticConfig(rows=45_840_617, cardinalities=_CRITEO_KAGGLE, base_rate=0.256),
    "criteo-1tb": SyntheticConfig(rows=4_195_197_692, cardinalities=_CRITEO_1TB, base_rate=0.25),
    "avazu": SyntheticConfig(
        rows=40_428_967,
        cardinalities=_AVAZU,
        num_dense=1,
        base_rate=0.17,
        dense_strength=0.3,
        id_strength=0.95,
    ),
}
"""Shapes of public data sets at full size: columns, ids of each feature, rows, label rate."""


def preset(name: str, *, scale: float = 0.01, rows: int | None = None, **changes: Any) -> SyntheticConfig:
    """A preset with its cardinalities (at least 3) and rows scaled; `rows` and other fields of the config at will."""
    if name not in PRESETS:
        raise ConfigError(f"no synthetic preset named '{name}'{did_you_mean(name, PRESETS)}")
    if not 0 < scale <= 1:
        raise ConfigError(f"scale is {scale}: it must be above 0 and at most 1")
    known = {field.name for field in dataclasses.fields(SyntheticConfig)}
    for field in changes.keys() - known:
        raise ConfigError(f"a synthetic config has no '{field}'{did_you_mean(field, known)}")
    full = PRESETS[name]
    scaled: dict[str, Any] = {
        "cardinalities": tuple(max(3, round(num_ids * scale)) for num_ids in full.cardinalities),
        "rows": round(full.rows * scale) if rows is None else rows,
    }
    return dataclasses.replace(full, **(scaled | changes))


def write_prepared(
    config: SyntheticConfig,
    out: str | Path,
    valid: float = 0.1,
    test: float = 0.1,
    *,
    overwrite: bool = False,
) -> Schema:
    """Write the log straight to a data folder: the first rows as `train`, the next as `valid`, the last as `test`.

    Ids are renumbered by their counts in the training split, as `prepare` does; ids that do not occur in it keep a row,
    so that tables have the size in the config (and one row more, for the unseen). The value of an id is its number in
    the log, in hexadecimal. Files carry the column `probability`. Two passes over the log; memory grows with the number
    of ids (about 30 bytes each), not with the rows.
    """
    out = Path(out)
    if valid < 0 or test < 0 or valid + test >= 1:
        raise ConfigError(f"valid {valid} and test {test} must not be negative and must leave rows to train on")
    num_valid, num_test = int(config.rows * valid), int(config.rows * test)
    num_train = config.rows - num_valid - num_test
    bounds = {
        "train": (0, num_train),
        "valid": (num_train, num_train + num_valid),
        "test": (num_train + num_valid, config.rows),
    }
    names = [f"C{number}" for number in range(1, len(config.cardinalities) + 1)]
    with output_folder(out, DATA_SET, overwrite=overwrite) as folder:
        (folder / IDS_FOLDER).mkdir()
        new_ids = []
        for name, counts in zip(names, count_ids(config, num_train), strict=True):
            order = np.argsort(-counts, kind="stable")
            new_ids.append(np.empty(len(counts), dtype=np.int32 if len(counts) < 2**31 else np.int64))
            new_ids[-1][order] = np.arange(len(counts))
            values = pa.concat_arrays([hex_strings(order), pa.nulls(1, pa.string())])
            IdMap(values, np.append(counts[order], 0), unseen=len(counts)).save(id_map_path(folder, name))
        splits = {
            split: _write_split(config, folder, split, start, stop, new_ids)
            for split, (start, stop) in bounds.items()
            if start < stop
        }
        schema = with_files(_schema(config, names, splits), folder)
        schema.save(folder)
    return schema


def count_ids(config: SyntheticConfig, stop: int) -> list[npt.NDArray[np.int64]]:
    """Occurrences of each id of each feature in the first `stop` rows."""
    counts = [np.zeros(num_ids, dtype=np.int64) for num_ids in config.cardinalities]
    for block in range(-(-stop // BLOCK_ROWS)):
        size = min(BLOCK_ROWS, config.rows - block * BLOCK_ROWS)
        wanted = min(size, stop - block * BLOCK_ROWS)
        for count, ids in zip(counts, draw_ids(config, block, size), strict=True):
            values = ids.slice(0, wanted).flat if isinstance(ids, Ragged) else ids[:wanted]
            np.add.at(count, values.astype(np.int64, copy=False), 1)
    return counts


def _schema(config: SyntheticConfig, names: list[str], splits: dict[str, Split]) -> Schema:
    features = []
    for name, num_ids, length in zip(names, config.cardinalities, config.lengths, strict=True):
        kind: dict[str, Any] = {} if length == 1 else {"kind": "bag", "max_length": length}
        features.append(Feature(name=name, num_rows=num_ids + 1, unseen=num_ids, **kind))
    return Schema(
        label="label",
        dense=tuple(DenseColumn(name=f"I{number}") for number in range(1, config.num_dense + 1)),
        features=tuple(features),
        splits=splits,
        source={"format": "synthetic", "config": dataclasses.asdict(config)},
    )


def _write_split(
    config: SyntheticConfig, folder: Path, split: str, start: int, stop: int, new_ids: list[npt.NDArray[Any]]
) -> Split:
    files = []
    positives = 0
    bag_names = [f"C{number}" for number, length in enumerate(config.lengths, start=1) if length > 1]
    for number, first in enumerate(range(start, stop, ROWS_PER_FILE)):
        blocks = [
            _renumber(block, config, new_ids) for block in generate(config, first, min(stop, first + ROWS_PER_FILE))
        ]
        columns = Columns.concatenate(blocks)
        lists = {
            name: (bag.flat, bag.offsets - bag.offsets[0]) for name, bag in zip(bag_names, columns.bags, strict=True)
        }
        path = folder / f"{split}-{number:05d}.arrow"
        files.append(
            write_split_file(path, columns.label, columns.dense, columns.ids, lists, probability=columns.probability)
        )
        positives += int(columns.label.sum())
    return Split(rows=stop - start, positives=positives, files=tuple(files))


def _renumber(block: Columns, config: SyntheticConfig, new_ids: list[npt.NDArray[Any]]) -> Columns:
    """Popularity order in place of the log's own numbers."""
    single = [table for table, length in zip(new_ids, config.lengths, strict=True) if length == 1]
    several = [table for table, length in zip(new_ids, config.lengths, strict=True) if length > 1]
    ids = np.empty_like(block.ids)
    for column, table in enumerate(single):
        ids[:, column] = table[block.ids[:, column]]
    bags = tuple(Ragged(table[bag.values], bag.offsets) for table, bag in zip(several, block.bags, strict=True))
    return dataclasses.replace(block, ids=ids, bags=bags)


def write_tsv(
    config: SyntheticConfig, path: str | Path, *, start: int = 0, stop: int | None = None, overwrite: bool = False
) -> None:
    """Write rows start..stop in Criteo's layout.

    A line is the label, 13 integers and 26 values of 8 hexadecimal digits, separated by tabs; missing ones are empty.
    `.gz` and `.zst` names are compressed. A fifth of the features have one popular id that is written as missing. The
    true probabilities are written to `<path>.probability.npy` (float32, one a line). Several files of one log, say one
    a day, are several calls with their own rows.
    """
    path = Path(path)
    shape = (config.num_dense, len(config.cardinalities))
    if shape != (CRITEO_DENSE, CRITEO_FEATURES) or max(config.lengths) > 1:
        raise ConfigError(
            f"Criteo's layout has 13 dense columns and 26 features of one id, this log has {shape[0]} and {shape[1]}"
            f"{', with bags' if max(config.lengths) > 1 else ''}: use write_prepared, or the criteo presets"
        )
    if path.is_dir() or (path.exists() and not overwrite):
        raise ConfigError(f"{path} exists already: choose another name or pass overwrite=True")
    path.parent.mkdir(parents=True, exist_ok=True)
    sidecar = path.with_name(path.name + ".probability.npy")
    partial = path.with_name(path.name + PARTIAL)
    options = pa_csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    probabilities = []
    try:
        compression = COMPRESSIONS.get(path.suffix)
        with pa.output_stream(str(partial), compression=compression) as file:
            for columns in generate(config, start, stop):
                pa_csv.write_csv(_tsv_batch(columns), file, options)
                probabilities.append(np.asarray(columns.probability))
        np.save(sidecar, np.concatenate(probabilities), allow_pickle=False)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _tsv_batch(columns: Columns) -> pa.RecordBatch:
    """A block as the columns of Criteo's layout, with nulls where a value is missing."""
    arrays: dict[str, pa.Array] = {"label": pa.array(columns.label)}
    counts = np.rint(np.expm1(columns.dense)).astype(np.int32)
    # A missing count means 0 to the click probability, as it does to `prepare`; write every other zero as missing.
    missing = (counts == 0) & (np.cumsum(counts == 0, axis=0) % 2 == 0)
    for column in range(CRITEO_DENSE):
        arrays[f"I{column + 1}"] = pa.array(counts[:, column], mask=missing[:, column])
    for feature in range(CRITEO_FEATURES):
        ids = columns.ids[:, feature]
        absent = pa.array(ids == (MISSING_ID if feature % 5 == 0 else -1))
        arrays[f"C{feature + 1}"] = pc.if_else(absent, None, hex_strings(scramble(ids, feature)))
    return pa.record_batch(arrays)


def scramble(ids: npt.NDArray[Any], feature: int) -> npt.NDArray[np.uint32]:
    """Other 32-bit numbers for the ids of a feature, distinct for distinct ids: an odd multiplier permutes them."""
    return (ids.astype(np.uint32) + np.uint32(feature * 0x9E3779B9 & 0xFFFFFFFF)) * np.uint32(2654435761)


def hex_strings(numbers: npt.NDArray[Any]) -> pa.StringArray:
    """8 hexadecimal digits for each number below 2^32 (16 where one is larger)."""
    wide = len(numbers) > 0 and int(numbers.max()) >= 2**32
    pairs = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), dtype=np.uint16)
    digits = pairs[numbers.astype(">u8" if wide else ">u4").view(np.uint8)]
    offsets = np.arange(len(numbers) + 1, dtype=np.int32) * (16 if wide else 8)
    return pa.StringArray.from_buffers(len(numbers), pa.py_buffer(offsets), pa.py_buffer(digits))
