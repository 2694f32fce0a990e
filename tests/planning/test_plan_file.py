"""plan.json: choices survive a round trip, edits are accepted, and invalid plans are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdall.common.errors import ConfigError
from holdall.planning.config import PlanConfig
from holdall.planning.plan import Caps, Plan
from holdall.planning.planner import plan_tables
from holdall.tables import Frobenius, HotCold
from tests.planning.made_up_hardware import hardware, lookups, schema_of

ROWS = {"users": 3000, "items": 500, "hours": 24}
SCHEMA = schema_of(ROWS)
CONFIG = PlanConfig.of(dim=8, bottom=(16,), top=(16,), batch_size=64, preset="el-rec", device_memory="100KB")


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan_tables(SCHEMA, lookups(ROWS), CONFIG, hardware())


def test_round_trip(made: Plan, tmp_path: Path) -> None:
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == made
    assert loaded.forecast is not None
    loaded.check(SCHEMA)
    assert loaded.train_settings()["batch_size"] == 64
    assert loaded.train_settings()["dim"] == 8
    assert loaded.hot_rows().keys() == ROWS.keys()
    assert loaded.tails()["users"] == "host"


def edited(made: Plan, change: Callable[[dict[str, Any]], None]) -> Plan:
    document = json.loads(json.dumps(made.to_json()))
    change(document)
    return Plan.from_json(document, "plan.json")


def test_an_edited_plan_loads_without_its_forecast(made: Plan) -> None:
    changed = edited(made, lambda d: d["tables"]["users"].update(hot_rows=7))
    assert changed.forecast is None
    assert changed.table("users").forecast is None
    assert changed.hot_rows()["users"] == 7
    assert edited(made, lambda d: d.update(notes=["mine"])).forecast is not None


def test_sizes_as_people_write_them(made: Plan) -> None:
    assert edited(made, lambda d: d["caps"].update(device="4 GiB", host=None)).caps == Caps(device=4 << 30)


def test_a_compressed_table_by_hand(made: Plan) -> None:
    method = {"method": "hot_cold", "hot_rows": 40, "cold": {"method": "frobenius", "rank": 4, "terms": 2}}
    changed = edited(made, lambda d: d["tables"]["users"].update(hot_rows=40, tail="compressed", method=method))
    assert changed.methods()["users"] == HotCold(hot_rows=40, cold=Frobenius(rank=4, terms=2))
    assert "users" not in changed.hot_rows()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(tabels={}), r"unknown field 'tabels' \(did you mean 'tables'\?\)"),
        (lambda d: d.pop("tables"), "'tables' is missing"),
        (lambda d: d.update(tables={}), "it places no table"),
        (lambda d: d.update(batch_size=0), "'batch_size' must be a whole number of at least 1, not 0"),
        (lambda d: d.update(optimizer="adma"), r"'optimizer' is 'adma' \(did you mean 'adam'\?\): mend it"),
        (lambda d: d.update(strategy="splat"), r"'strategy' must be .*, not 'splat' \(did you mean 'split'\?\)"),
        (lambda d: d["caps"].update(devise=1), r"unknown field 'caps\.devise' \(did you mean 'device'\?\)"),
        (lambda d: d["tables"]["users"].update(hot_rows=3001), "'users': 3,001 hot rows, but it has 3,000 rows"),
        (
            lambda d: d["tables"]["users"].update(hot_rows=-1),
            r"'tables\.users\.hot_rows' must be a whole number of at least 0",
        ),
        (
            lambda d: d["tables"]["users"].update(hot_rows=1.5),
            r"hot_rows' must be a whole number of at least 0, not 1\.5",
        ),
        (lambda d: d["tables"]["users"].update(tail="hots"), r"tail' must be .*, not 'hots' \(did you mean 'host'\?\)"),
        (lambda d: d["tables"]["users"].update(hot=3), r"unknown field 'tables\.users\.hot'"),
        (lambda d: d["tables"]["users"].pop("tail"), r"'tables\.users\.tail' is missing"),
        (lambda d: d["tables"]["users"].update(method={"method": "tensor_tain"}), "'users': unknown table method"),
        (
            lambda d: d["tables"]["users"].update(method={"method": "hashed", "bukets": 2}),
            "'users': hashed: unknown field 'bukets'",
        ),
        (
            lambda d: d["tables"]["users"].update(method="dense"),
            r"'tables\.users\.method' must be an object, not 'dense'",
        ),
        (lambda d: d["tables"]["users"].update(tail="compressed"), "its method is dense: name a compressed method"),
        (
            lambda d: d["tables"]["users"].update(method={"method": "hashed", "buckets": 5}),
            "its method is hashed, which is stored whole on the device",
        ),
        (
            lambda d: d["tables"]["users"].update(method={"method": "hashed", "buckets": 5}, tail="compressed"),
            "but its method keeps 0 rows exact: make them equal",
        ),
        (lambda d: d.update(strategy="plain"), "'plain' keeps every table on the device, but the tail of 'users'"),
        (lambda d: d.update(strategy="host"), "'host' looks every table up on the host"),
        (lambda d: d["tables"]["users"].update(tail="sharded"), "sharded tails need strategy 'two-fold'"),
        (lambda d: d.update(strategy="two-fold"), "needs a world_size of 2 or more"),
        (lambda d: d["forecast"].pop("tables"), r"'forecast\.tables' is missing: make it again"),
        (lambda d: d["forecast"].update(seconds=5), r"'forecast\.seconds' must be an object, not 5"),
        (lambda d: d["forecast"].update(staging_rows=5), r"'forecast\.staging_rows' must be an object"),
        (lambda d: d["forecast"]["memory"].pop("host"), r"'forecast': 'memory\.host' has no 'table_"),
        (lambda d: d.update(forecast="none"), "'forecast' must be an object"),
        (lambda d: d.update(dim=99), "'dim' is 99, but its model's is 8: change model.dim, and plan again"),
        (
            lambda d: d["model"].update(model="dlmr"),
            r"plan.json, model: unknown model 'dlmr' \(did you mean 'dlrm'\?\)",
        ),
        (lambda d: d["model"].update(botom=[3]), "plan.json, model: unknown setting 'botom'"),
        (lambda d: d["caps"].update(device=-4), "plan.json, caps: 'device': -4 is not a size"),
        (lambda d: d["caps"].update(host="much"), "plan.json, caps: 'host': 'much' is not a size"),
        (lambda d: d.update(caps=None), "'caps' must be an object, not null"),
        (lambda d: d.update(notes="mine"), "'notes' must be a list, not 'mine'"),
        (lambda d: d.update(device="gpu"), "'device' must be 'cpu' or 'cuda', not 'gpu'"),
        (lambda d: d.update(data=5), "'data' must be a string, not 5"),
    ],
)
def test_mistakes(made: Plan, change: Callable[[dict[str, Any]], None], message: str) -> None:
    assert made.table("users").hot_rows > 0
    with pytest.raises(ConfigError, match=message):
        edited(made, change)


def test_files_that_are_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(ConfigError, match="does not exist"):
        Plan.load(path)
    path.write_text('{"format": "holdall-data", "version": 1}')
    with pytest.raises(ConfigError, match="is not a holdall-plan document"):
        Plan.load(path)
    path.write_text('{"format": "holdall-plan", "version": 9}')
    with pytest.raises(ConfigError, match="version 9, this Holdall reads version 1"):
        Plan.load(path)


def test_a_plan_for_other_tables(made: Plan) -> None:
    with pytest.raises(ConfigError, match=r"places table 'hours', which the data set does not have"):
        made.check(schema_of({"users": 3000, "items": 500}))
    with pytest.raises(ConfigError, match=r"which the data set does not have \(did you mean 'item'\?\)"):
        made.check(schema_of({"users": 3000, "item": 500, "hours": 24}))
    with pytest.raises(ConfigError, match="does not place table 'days' of the data set"):
        made.check(schema_of({**ROWS, "days": 7}))
    with pytest.raises(ConfigError, match="a table 'items' of 500 rows, the data set's has 501"):
        made.check(schema_of({**ROWS, "items": 501}))
    with pytest.raises(ConfigError, match=r"made for another data set .* whose tables have the same names and rows"):
        replace(made, fingerprint="other").check(SCHEMA)
    with pytest.raises(ConfigError, match=r"no table 'user' \(did you mean 'users'\?\)"):
        made.table("user")
