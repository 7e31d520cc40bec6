"""A report that another version of numdev wrote is read right, or refused with both versions named.

tests/data/older/audit-schema2.json is as an early version wrote it (two heads of the demo, forward
and backward): of the same schema, before the log-sum-exp's noise, checksums and more had fields.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import numdev
from numdev.cli.main import main
from numdev.cli.schema import schema_of
from numdev.errors import MeasurementError
from numdev.report import AuditReport, read

OLDER = Path(__file__).parent / "data" / "older" / "audit-schema2.json"


def run(*arguments: str) -> int:
    try:
        main(list(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def changed(path: Path, **changes: Any) -> Path:
    """The older report with what all of its rows say, or it itself, changed."""
    data = json.loads(OLDER.read_text(encoding="utf-8"))
    row = changes.pop("row", {})
    data["rows"] = [each | row for each in data["rows"]]
    data["provenance"] |= changes.pop("provenance", {})
    path.write_text(json.dumps({**data, **changes}, separators=(",", ":")), encoding="utf-8")
    return path


def test_an_older_report_keeps_every_number() -> None:
    """What it says is what is read, field by field; what it does not know of is null or empty."""
    told = json.loads(OLDER.read_text(encoding="utf-8"))
    found = read(OLDER)
    assert isinstance(found, AuditReport)
    assert len(found.rows) == len(told["rows"])
    for now, then in zip(found.rows, told["rows"], strict=True):
        data = now.model_dump(mode="json")
        assert {key: data[key] for key in then} == then
        assert not any(value for key, value in data.items() if key not in then)
    whole = found.model_dump(mode="json")
    assert {part: whole[part] for part in ("provenance", "request")} == {
        part: told[part] for part in ("provenance", "request")
    }
    for part in ("cases", "weights"):
        pairs = zip(whole[part], told[part], strict=True)
        assert all({key: now[key] for key in then} == then for now, then in pairs)


def test_an_older_report_is_judged_by_its_numbers(tmp_path: Path, capsys: Any) -> None:
    """Sound then, sound now; one error too large is found in it."""
    assert run("gate", str(OLDER)) == 0
    assert run("gate", str(OLDER), "--against", str(OLDER)) == 0
    data = json.loads(OLDER.read_text(encoding="utf-8"))
    bad = next(r for r in data["rows"] if r["role"] == "kernel")
    bad["expected_ratio"] = 1.2
    (tmp_path / "report.json").write_text(json.dumps(data))
    assert run("gate", str(tmp_path)) == 1
    assert run("compare", str(OLDER), str(OLDER), "-o", str(tmp_path / "out"), "-q") == 0
    assert run("report", str(OLDER)) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema_version": 3}, "is 3, and this version reads schema 2; update numdev"),
        ({"schema_version": 1}, "is 1, and this version reads schema 2; measure again"),
        ({"schema_version": "1"}, "schema_version"),
        ({"row": {"novel": 1.0}}, ".novel"),
        ({"novel": 1.0}, "novel"),
        ({"kind": "novel"}, "no report of kind 'novel' is known here"),
    ],
)
def test_a_newer_report_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """By its number, or by what it says that is not known here: a field that is left out could be
    the one that matters."""
    path = changed(tmp_path / "report.json", provenance={"numdev": "9.9.9"}, **changes)
    with pytest.raises(MeasurementError) as error:
        read(path)
    assert said in str(error.value)
    assert "9.9.9" in str(error.value) or "schema_version" in said or "kind" in changes
    if "novel" in said and "kind" not in changes:
        assert f"numdev 9.9.9 wrote it, and this is numdev {numdev.__version__}" in str(error.value)


def test_no_field_of_the_schema_is_lost() -> None:
    """Whoever removes or renames a field of a row writes another schema, and has to say so in
    SCHEMA_VERSION; one that every row must have is no field to add, either."""
    told = json.loads(OLDER.read_text(encoding="utf-8"))
    row = schema_of("report")["$defs"]["DeviationRow"]
    assert set(told["rows"][0]) <= set(row["properties"])
    assert set(row["required"]) <= set(told["rows"][0])
