"""A report of many rows, read part by part, and of its rows those that are judged.

`numdev.report.read` has the whole file as a tree before it makes the first row. What the gate needs
is less: here the list of rows is cut between two of them and validated a stretch at a time, and a
row of the floor, the baseline or the format's cost is passed over once its role is read, unless
these are asked for. All else, the rows that are kept included, is held to the same models as there.

A cut is where `},{"case":` stands. That is never inside a string, since a quote in a string is
escaped, and after a quote that ends one no word follows; and rows begin with `case` and hold no
objects in lists. A file that does not look so (other whitespace, another order of keys) or in which
anything is wrong is left to `report.read`, which reads it or says what is the matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, make_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from pydantic_core import from_json

from numdev.gate.ahead import Ahead
from numdev.report import AuditReport, DeviationRow, Report, Role, SweepReport, read

AUDIT, START, CUT = b'{"kind":"audit"', b'"rows":[', b'},{"case":'
END, LAST = b'}],"weights":[', b"}]}"
"""Of the rows of an audit, and of a sweep."""
NO_NUMBER = re.compile(rb"[:,\[]\s*-?(?:NaN|Infinity)")
STRETCH = 1 << 16
"""Bytes that are validated at once: a tree of them stays in the processor's cache."""
Validate = Callable[[bytes], Sequence[Any]]


def read_judged(path: Path, *, every: bool = False, ahead: Ahead | None = None) -> Report:
    """As `numdev.report.read`; but an audit or a sweep has in `rows` only kernels under audit and
    planted faults, unless it is to be every row. Rows have the attributes of a DeviationRow, and
    need not be of that class (`lean_row`): they are to be looked at, not written. `ahead`: who
    began to read that path already."""
    in_parts = _in_parts(ahead or Ahead(path), every=every)
    if in_parts is not None:
        return in_parts
    found = read(path)
    if every or not isinstance(found, AuditReport | SweepReport):
        return found
    kept = tuple(row for row in found.rows if row.role in ("kernel", "control"))
    return found.model_copy(update={"rows": kept})


def _in_parts(ahead: Ahead, *, every: bool) -> AuditReport | SweepReport | None:
    """None of a file that cannot be read so."""
    try:
        text = ahead.text()
    except OSError:
        return None
    start = text.find(START) + len(START)
    # From behind: far less is there than rows. Where it is not theirs, the parts are no JSON.
    end = text.rfind(END) + 1 if text.startswith(AUDIT) else len(text) - len(LAST) + 1
    if start < len(START) or end < start or text[end - 1 : end + 1] != LAST[:2]:
        return None
    if _no_number(text, start, end):
        return None
    try:
        report = _without_rows(text[:start], text[end:])
        if report is None:
            return None
        validate = _validator(every)
        kept: list[Any] = []
        for part in _stretches(text, start, end):
            kept += [row for row in validate(part) if row.__class__ is not Beside]
    except ValueError:  # pydantic's errors are some
        return None
    return report.model_copy(update={"rows": tuple(kept)})


def _no_number(text: bytes, start: int, end: int) -> bool:
    """Whether NaN or infinity may be there, which JSON cannot hold and Python writes all the same:
    a row that is passed over would not be refused for that."""
    if max(text.find(letter, start, end) for letter in (b"N", b"I")) < 0:  # ten times as fast
        return False
    return bool(NO_NUMBER.search(text, start, end))


def _without_rows(before: bytes, after: bytes) -> AuditReport | SweepReport | None:
    """The report around its rows; None where these are not its own, but of something inside it.
    Raises ValueError for one that is wrong."""
    # Closed here it is an object, so no other list or object is open; and later on it has no more.
    kind = from_json(before + b"]}").get("kind")
    if kind not in ("audit", "sweep") or "rows" in from_json(b'{"":[' + after):
        return None
    model = AuditReport if kind == "audit" else SweepReport
    return model.model_validate_json(before + after)


def _stretches(text: bytes, start: int, end: int) -> Iterator[bytes]:
    """The rows as lists of some."""
    view = memoryview(text)
    while start < end:
        cut = text.find(CUT, start + STRETCH, end) + 1 or end
        yield b"".join((b"[", view[start:cut], b"]"))
        start = cut + 1


@lru_cache(maxsize=2)
def _validator(every: bool) -> Validate:
    """What makes rows of a list; of a row that nobody asked for, its role alone."""
    kept: Any = lean_row(Role if every else Literal["kernel", "control"])
    either: Any = kept if every else Annotated[kept | Beside, Field(discriminator="role")]
    rows: TypeAdapter[list[Any]] = TypeAdapter(list[either])
    return rows.validate_json


class Beside(BaseModel):
    """A row that nobody asked for."""

    role: Literal["precision", "floor", "baseline"]


def lean_row(role: Any) -> type[Any]:
    """A class with the fields of DeviationRow, validated in the same way, in far less memory: it
    has no dictionary, and does not remember which fields were given. Of these roles alone."""
    required: list[tuple[str, Any]] = []
    optional: list[tuple[str, Any, Any]] = []
    for name, known in DeviationRow.model_fields.items():
        kind = role if name == "role" else known.annotation
        if known.is_required():
            required.append((name, kind))
        elif known.default_factory is not None:
            optional.append((name, kind, field(default_factory=dict)))
        else:
            optional.append((name, kind, field(default=known.default)))
    made = make_dataclass("LeanRow", (*required, *optional), slots=True, kw_only=True)
    made.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)  # type: ignore[attr-defined]
    return made
