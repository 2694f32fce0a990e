"""A data set folder with other ids: every file that holds ids, rewritten one file at a time.

Memory: a file of a split (`rows_per_file` rows), the new ids of all tables (4 bytes per row) and one id map.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holdall.common.errors import DataError
from holdall.common.files import sha256
from holdall.data.arrow_files import Lists, write_split_file
from holdall.data.bad_rows import BAD_ROWS_FILE
from holdall.data.columns import Columns, Ragged
from holdall.data.dataset import read_columns
from holdall.data.folder_files import check_other_file, check_split_files, has_other_file
from holdall.data.id_map import IDS_FOLDER, id_map_path, load_id_map
from holdall.data.identity import with_files
from holdall.data.items import ITEMS_FILE, ItemTable
from holdall.data.passes import Progress
from holdall.data.ranking_cases import RankingCases, has_ranking_cases, ranking_path
from holdall.data.schema import DataFile, Feature, Schema
from holdall.popularity.bijection import ORDER_FOLDER, Bijection

Array = npt.NDArray[Any]
USER = "user"  # the feature that ranking cases call so


class RenumberedFolder:
    """New ids for the tables of one data set folder."""

    def __init__(self, folder: Path, orders: Mapping[str, Bijection]):
        self.folder = folder
        self.schema = Schema.load(folder)
        self.orders = orders
        tables = {feature.table or feature.name: feature for feature in self.schema.features}
        for table, order in orders.items():
            if table not in tables:
                raise DataError(
                    f"the order has a table '{table}' that {folder} does not have: it is of another data set"
                )
            if len(order.old) != tables[table].num_rows:
                raise DataError(
                    f"the order of '{table}' has {len(order.old):,} ids, but in {folder} it has "
                    f"{tables[table].num_rows:,}: it is of another data set"
                )

    def order_of(self, feature: str) -> Bijection | None:
        """The new order of the feature's table; None if its ids stay."""
        found = self.schema.feature(feature)
        return self.orders.get(found.table or found.name)

    def new_ids(self, feature: str, ids: Array, where: str) -> Array:
        """The ids under their new numbers, of the same type."""
        order = self.order_of(feature)
        num_rows = self.schema.feature(feature).num_rows
        wrong = np.flatnonzero((ids < 0) | (ids >= num_rows))
        if len(wrong):
            raise DataError(
                f"{where} has id {int(ids.reshape(-1)[wrong[0]])} of feature '{feature}', which has {num_rows:,} rows: "
                f"the folder is damaged, prepare it again"
            )
        return ids if order is None else order.new[ids].astype(ids.dtype, copy=False)

    def write(self, out: Path, record: dict[str, Any], progress: Progress) -> Schema:
        """Fill the folder `out`; `schema.json`, with `record` as its order, is written last."""
        self._write_maps(out)
        bad_rows = self.folder / BAD_ROWS_FILE
        if has_other_file(self.folder, bad_rows, self.schema):
            check_other_file(self.folder, bad_rows, self.schema)
            shutil.copyfile(bad_rows, out / BAD_ROWS_FILE)
        total = sum(len(split.files) for split in self.schema.splits.values())
        splits, done = {}, 0
        for name, split in self.schema.splits.items():
            files = []
            for file in split.files:
                files.append(self._write_file(out, file))
                done += 1
                progress("write", done, total)
            splits[name] = dataclasses.replace(split, files=tuple(files))
        tables = {table: self._saved(out, order) for table, order in self.orders.items()}
        records = record.get("tables", {})
        schema = dataclasses.replace(
            self.schema,
            features=tuple(self._feature(feature) for feature in self.schema.features),
            splits=splits,
            order={**record, "tables": {table: {**records.get(table, {}), **entry} for table, entry in tables.items()}},
        )
        self._write_items(out, schema)
        schema = with_files(schema, out)
        schema.save(out)
        return schema

    def _saved(self, out: Path, order: Bijection) -> dict[str, Any]:
        (out / ORDER_FOLDER).mkdir(exist_ok=True)
        path = order.save(out)
        return {"ordered_from": order.first, "sha256": sha256(path), "ids": order.fingerprint}

    def _feature(self, feature: Feature) -> Feature:
        order = self.order_of(feature.name)
        if order is None:
            return feature
        return dataclasses.replace(feature, unseen=int(order.new[feature.unseen]), ordered_from=order.first)

    def _write_maps(self, out: Path) -> None:
        (out / IDS_FOLDER).mkdir()
        renumbered: dict[str, Path] = {}
        for feature in self.schema.features:
            order = self.order_of(feature.name)
            source, target = (id_map_path(folder, feature.name) for folder in (self.folder, out))
            if order is not None and order.table not in renumbered:
                id_map = load_id_map(self.folder, feature.name, self.schema)
                if id_map.fingerprint() != order.fingerprint:
                    raise DataError(
                        f"the order of '{order.table}' was made for other ids than those of {self.folder} (their maps "
                        f"differ): order this data set by itself"
                    )
                order.renumber(id_map).save(target)
                renumbered[order.table] = target
            else:
                check_other_file(self.folder, source, self.schema)
                if not source.exists():
                    raise DataError(f"the id map {source} is missing: prepare the data set again")
                shutil.copyfile(source if order is None else renumbered[order.table], target)

    def _write_file(self, out: Path, file: DataFile) -> DataFile:
        """One file of a split. Its hash is checked, since the new one gets a hash of its own."""
        check_split_files(self.folder, [file], remember=False).result()
        columns = read_columns(self.folder, file, self.schema, full=True)
        columns = self._columns(columns, str(self.folder / file.name))
        names = [feature.name for feature in self.schema.features if not feature.one_hot]
        lists: dict[str, Lists] = {
            name: (bag.flat, bag.offsets - bag.offsets[0]) for name, bag in zip(names, columns.bags, strict=True)
        }
        return write_split_file(
            out / file.name,
            columns.label,
            columns.dense,
            columns.ids,
            lists,
            weight=columns.weight,
            probability=columns.probability,
        )

    def _columns(self, columns: Columns, where: str) -> Columns:
        singles = [feature.name for feature in self.schema.features if feature.one_hot]
        several = [feature.name for feature in self.schema.features if not feature.one_hot]
        ids = np.empty_like(columns.ids)
        for place, name in enumerate(singles):
            ids[:, place] = self.new_ids(name, columns.ids[:, place], where)
        bags = tuple(
            Ragged(self.new_ids(name, bag.flat, where), bag.offsets - bag.offsets[0])
            for name, bag in zip(several, columns.bags, strict=True)
        )
        return dataclasses.replace(columns, ids=ids, bags=bags)

    def _write_items(self, out: Path, schema: Schema) -> None:
        """Renumber the further files of implicit data sets: items by id, and ranking cases."""
        if not has_other_file(self.folder, self.folder / ITEMS_FILE, self.schema):
            return
        items = ItemTable.load(self.folder, self.schema)
        order = self.order_of(items.item)
        attributes: dict[str, Array | Ragged] = {}
        for name, values in items.attributes.items():
            if order is not None:
                values = values.take(order.old)
            if isinstance(values, Ragged):
                attributes[name] = Ragged(self.new_ids(name, values.flat, ITEMS_FILE), values.offsets)
            else:
                attributes[name] = self.new_ids(name, values, ITEMS_FILE)
        ItemTable(schema, items.item, attributes).save(out)
        for split in self.schema.splits:
            path = ranking_path(self.folder, split)
            if has_ranking_cases(self.folder, split, self.schema):
                cases = RankingCases.load(self.folder, split)
                shape = cases.negatives.shape
                dataclasses.replace(
                    cases,
                    user=self.new_ids(USER, cases.user, path.name),
                    item=self.new_ids(items.item, cases.item, path.name),
                    negatives=self.new_ids(items.item, cases.negatives.reshape(-1), path.name).reshape(shape),
                ).save(out, split)
