"""Reports read part by part: the same rows, the same refusals."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from gate_rows import control, lse, report, row
from pydantic import TypeAdapter, ValidationError

from numdev.errors import MeasurementError, UsageError
from numdev.gate import rowparts
from numdev.gate.ahead import Ahead
from numdev.gate.judging import judge
from numdev.gate.rowparts import lean_row, read_judged
from numdev.report import AuditReport, CaseRecord, DeviationRow, Role, SweepReport, read, write

TRICKY = '},{"case":"x"}],"weights":[{"rows":[\\'


def some() -> list[DeviationRow]:
    """Kernels, planted faults and what stands beside them, with names like ends of rows."""
    rows = [
        row(h, kernel="k", case=TRICKY, options={"a": TRICKY}, nulls={TRICKY: TRICKY})
        for h in range(40)
    ]
    beside = [row(role=role, kernel=TRICKY) for role in ("floor", "baseline", "precision")]
    return [*rows, *beside, control("scale", 0.1, 1.0), lse(), *beside]


def data(rows: Any) -> list[dict[str, Any]]:
    return [{name: getattr(r, name) for name in DeviationRow.model_fields} for r in rows]


@pytest.mark.parametrize("stretch", [1, 1000, 1 << 16])
def test_the_rows_are_those_of_the_file(tmp_path: Path, monkeypatch: Any, stretch: int) -> None:
    """However long the parts are, and without a look at the whole."""
    monkeypatch.setattr(rowparts, "STRETCH", stretch)
    monkeypatch.setattr(rowparts, "read", _never)
    rows = some()
    write(report(*rows), tmp_path)
    found = read_judged(tmp_path, every=True)
    assert isinstance(found, AuditReport)
    assert data(found.rows) == data(rows)
    assert found.model_copy(update={"rows": ()}) == report()
    judged = read_judged(tmp_path)
    assert isinstance(judged, AuditReport)
    assert data(judged.rows) == data(r for r in rows if r.role in ("kernel", "control"))


def _never(path: Path) -> None:
    raise AssertionError("read as a whole")


def test_the_verdict_is_the_same(tmp_path: Path) -> None:
    """Of the rows that are kept, and of all."""
    write(report(*some(), row(1, nonfinite=3)), tmp_path)
    whole, part = read(tmp_path), read_judged(tmp_path)
    assert isinstance(whole, AuditReport)
    assert isinstance(part, AuditReport)
    assert judge(whole.rows) == judge(part.rows)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: json.dumps(json.loads(text), indent=1),
        lambda text: json.dumps(json.loads(text), sort_keys=True),
        lambda text: text.replace('"rows":', '"ro\\u0077s":'),
        lambda text: text + "\n",
        lambda text: text.replace('"request":{}', '"request":{"rows":[{"case":"x"}]}'),
        lambda text: text.replace('"request":{}', '"request":{"a":{"rows":[{"case":1}],"b":2}}'),
    ],
)
def test_a_file_that_looks_otherwise_is_read_all_the_same(
    tmp_path: Path, change: Callable[[str], str]
) -> None:
    """Other whitespace, another order, escapes, and rows of something else inside it."""
    write(report(*some()), tmp_path)
    path = tmp_path / "report.json"
    path.write_text(change(path.read_text()))
    found = read_judged(path)
    assert isinstance(found, AuditReport)
    assert data(found.rows) == data(r for r in some() if r.role in ("kernel", "control"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace('"rms":0.001', '"rms":NaN'),
        lambda text: text.replace('"rms":0.001', '"rms":1e999'),
        lambda text: text.replace('"rms":0.001', '"rms":0.001,"rsm":1'),
        lambda text: text.replace('"role":"kernel"', '"role":"king"', 1),
        lambda text: text.replace('"call":0', '"call":{}'),
        lambda text: text.replace('"schema_version":2', '"schema_version":3'),
        lambda text: text[:-1],
        lambda text: text[: len(text) // 2],
        lambda text: text + "}",
        lambda text: text.replace('"weights":[]', '"weights":[],"rows":[{}]'),
        lambda text: text.replace('},{"case":', '},,{"case":', 1),
        lambda text: text.replace('},{"case":', '}],[{"case":', 1),
    ],
)
def test_what_cannot_be_understood_is_refused(tmp_path: Path, damage: Callable[[str], str]) -> None:
    """As by reading it whole: NaN, unknown keys, half a file."""
    write(report(*(row(h) for h in range(4))), tmp_path)
    path = tmp_path / "report.json"
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    with pytest.raises(MeasurementError):
        read(path)
    with pytest.raises(MeasurementError):
        read_judged(path)


def test_reports_without_rows_and_of_other_kinds(tmp_path: Path) -> None:
    """An empty list, a sweep, whose rows come last, and no file."""
    write(report(), tmp_path)
    found = read_judged(tmp_path)
    assert isinstance(found, AuditReport)
    assert found.rows == ()
    with pytest.raises(UsageError):
        read_judged(tmp_path / "none")


def test_a_sweeps_rows(tmp_path: Path, monkeypatch: Any) -> None:
    """They stand at the end."""
    ticks = [{"x": 1.0, "label": "1"}]
    summary = {"answer": [], "axis": {"name": "x", "title": "x", "scale": "log", "ticks": ticks},
               "cells": 0, "seeds": [0], "baseline": "b"}  # fmt: skip
    rows = [r.model_dump() for r in some()]
    sweep = SweepReport.model_validate(
        {"provenance": report().provenance, "request": {}, "summary": summary, "figures": [],
         "cells": [], "rows": rows}
    )  # fmt: skip
    write(sweep, tmp_path)
    monkeypatch.setattr(rowparts, "read", _never)
    found = read_judged(tmp_path, every=True)
    assert isinstance(found, SweepReport)
    assert data(found.rows) == rows


def test_a_lean_row_is_validated_as_any_other() -> None:
    """The same defaults; the same refusals, field by field, of what is missing, unknown, of another
    type or not finite; and it cannot be a role that was not asked for."""
    lean, whole = TypeAdapter(lean_row(Role)), TypeAdapter(DeviationRow)
    sound = row().model_dump(exclude_defaults=True)
    assert data([lean.validate_python(sound)]) == data([whole.validate_python(sound)])
    for name in [*DeviationRow.model_fields, "unknown"]:
        for value in (None, "x", 3, 2.5, True, [1], {"a": 1}, {"a": "b"}, float("nan"), "absent"):
            given = {**sound, name: value}
            if value == "absent":
                given.pop(name)
            assert _taken(lean, given) == _taken(whole, given), (name, value)
    assert _taken(lean, {**sound, "rms": float("inf")}) is None
    assert _taken(TypeAdapter(lean_row(Literal["kernel"])), {**sound, "role": "floor"}) is None


def _taken(adapter: TypeAdapter[Any], given: dict[str, Any]) -> list[dict[str, Any]] | None:
    try:
        return data([adapter.validate_json(json.dumps(given))])
    except ValidationError:
        return None


def test_rows_begin_with_their_case_and_hold_no_list_of_objects() -> None:
    """What the cuts rest on; reports begin with their kind."""
    assert next(iter(DeviationRow.model_fields)) == "case"
    assert next(iter(CaseRecord.model_fields)) == "case", "cases come before rows, and are no rows"
    assert next(iter(AuditReport.model_fields)) == "kind"
    for field in DeviationRow.model_fields.values():
        assert "Record" not in str(field.annotation)
        assert "list" not in str(field.annotation)


def test_what_is_read_ahead_is_handed_over_once(tmp_path: Path) -> None:
    """Of a directory its report; an error is told where the text is asked for."""
    (tmp_path / "report.json").write_bytes(b"text")
    ahead = Ahead(tmp_path)
    assert (ahead.text(), ahead.text()) == (b"text", b"")
    with pytest.raises(FileNotFoundError):
        Ahead(tmp_path / "none").text()


def test_without_another_thread_it_is_read_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    (tmp_path / "report.json").write_bytes(b"text")
    assert Ahead(tmp_path).text() == b"text"


def test_a_path_that_cannot_be_looked_at_is_named() -> None:
    """As one within a directory that is closed to us, or with a name that is too long."""
    path = Path("a" * 300)
    for reading in (read, read_judged):
        with pytest.raises(UsageError, match=r"a{300}: cannot read a report there"):
            reading(path)
