"""Two reports of one request: what the requests must share, and which rows are a pair."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from numdev.errors import UsageError
from numdev.gate.rows import GRADIENTS, Key, Measured, spelt
from numdev.report import CaseRecord, DeviationRow, Record

MUST = (
    *("checkpoint", "model", "text", "inputs", "cases", "formats", "model_dtype", "seed", "seeds"),
    *("generate", "length", "sequences", "layers", "heads", "gradients", "sampled_rows"),
)
"""Keys of a request that must be the same, and that `compare --allow` takes."""
HASHES = {"checkpoint": "sha256", "text": "prompt_sha256"}
"""Keys that name files, and where the files' hashes stand in a report's source."""
PROMPT = ("text", "length", "sequences")
"""What the hash of the prompt covers: the same text may come from another file."""

# --- what the requests must have in common -------------------------------------------------------


class Difference(Record):
    """A key in which two reports differ, and both values, shortened to be read."""

    key: str
    """With the first place in it where they differ, as in `cases.0.seq_len`."""
    a: str
    b: str

    @property
    def root(self) -> str:
        """The key of the request itself."""
        return self.key.partition(".")[0]


def shared_request(a: Measured, b: Measured, allow: Collection[str] = ()) -> list[Difference]:
    """The differences of two requests that `allow` lets pass. Raises UsageError for any other, and
    for an audit beside a sweep."""
    differences = [Difference(key="kind", a=a.kind, b=b.kind)] if a.kind != b.kind else []
    sources = [report.provenance.source for report in (a, b)]
    same_prompt = all(source.get(HASHES["text"]) for source in sources)
    for key in () if differences else MUST:
        hashes = [source.get(HASHES.get(key, "")) for source in sources]
        if any(hashes):
            differences += unequal(key, *(str(x or "not told")[:16] for x in hashes))
        elif not (same_prompt and key in PROMPT):
            differences += unequal(key, a.request.get(key), b.request.get(key))
    refused = [d for d in differences if d.root not in allow]
    if refused:
        words = ", ".join(f"{d.key} ({d.a} in A, {d.b} in B)" for d in refused)
        keys = dict.fromkeys(d.root for d in refused if d.root in MUST)
        options = f", or {' '.join(f'--allow {key}' for key in keys)}" if keys else ""
        raise UsageError(
            f"the two do not measure the same: they differ in {words}",
            hint=f"measure the same{options}",
        )
    return differences


def unequal(key: str, a: Any, b: Any) -> list[Difference]:
    """The first place at which two values differ; empty where they do not."""
    if a == b or (a or None) == (b or None):
        return []
    sides = [dict(flat(x, key)) for x in (a, b)]
    at = next(k for k in (*sides[1], *sides[0]) if sides[0].get(k) != sides[1].get(k))
    return [Difference(key=at, a=_shown(sides[0].get(at)), b=_shown(sides[1].get(at)))]


def flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """The leaves of mappings and of lists of mappings, each with its path."""
    items: Any = value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, list | tuple) and all(isinstance(x, Mapping) for x in value):
        items = enumerate(value)
    if not items:
        yield key, value
    for name, inner in items:
        yield from flat(inner, f"{key}.{name}")


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- which rows are a pair -----------------------------------------------------------------------

Inputs = Literal["same", "other", "unknown"]
"""Whether both rows were measured on the same inputs, told by their floors (the exact result
rounded once): `same` with equal bits, or numbers within NEARLY."""
NEARLY = 1e-4
"""Floors of a model whose own layers differ by an ulp here and there differ by less, relatively;
floors of other inputs by about 1 / sqrt(elements)."""
FLOOR = ("rms", "mean_abs", "max_abs", "rel")
WIDTHS = {"out": "v_dim", "dv": "v_dim", "dq": "head_dim", "dk": "head_dim"}


@dataclass(eq=False)
class Pair:
    """The same head in both reports, measured in both."""

    a: DeviationRow
    b: DeviationRow
    inputs: Inputs
    width: int
    """Elements in a row of the tensor."""

    @property
    def tensor(self) -> Key:
        """Which tensor of which kernel in which format."""
        row = self.b
        return (row.role, row.kernel, spelt(row.options), row.format, row.tensor)

    @property
    def call(self) -> Key:
        """The tensor, and of which call."""
        row = self.b
        return (*self.tensor, row.case, row.module, row.layer, row.call, row.phase, row.seed)


class Names:
    """The keys by which rows of both reports are paired.

    Options are part of a kernel's name only where it ran with several sets of them, and the seed
    only where there are several: otherwise they may have changed from A to B.
    """

    def __init__(self, a: Sequence[DeviationRow], b: Sequence[DeviationRow]) -> None:
        sides = [options_of(rows) for rows in (a, b)]
        self._several = {k for kernels in sides for k, sets in kernels.items() if len(sets) > 1}
        self._seeds = any(len({row.seed for row in rows}) > 1 for rows in (a, b))

    def kernel(self, row: DeviationRow) -> Key:
        """Role, kernel, options and format."""
        several = (row.role, row.kernel) in self._several
        return (row.role, row.kernel, spelt(row.options) if several else "", row.format)

    def call(self, row: DeviationRow) -> Key:
        """Case, place and seed."""
        seed = row.seed if self._seeds else None
        return (row.case, row.module, row.layer, row.call, row.phase, seed)

    def step(self, row: DeviationRow) -> Key:
        """The forward or backward pass of a call."""
        return (self.kernel(row), self.call(row), row.tensor in GRADIENTS)

    def row(self, row: DeviationRow) -> Key:
        """One head of one tensor."""
        return (self.kernel(row), self.call(row), row.tensor, row.head)

    def inputs(self, row: DeviationRow) -> Key:
        """The row of the floor that tells of this row's inputs."""
        tensor = "out" if row.tensor == "lse" else row.tensor
        return (row.format, self.call(row), tensor, row.head)


def options_of(
    rows: Sequence[DeviationRow],
) -> dict[tuple[str, str], dict[str, Mapping[str, Any]]]:
    """By role and kernel: the sets of options it ran with, by their text."""
    sets: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        sets.setdefault((row.role, row.kernel), {}).setdefault(spelt(row.options), row.options)
    return sets


def pairs_of(
    a: Sequence[DeviationRow], b: Sequence[DeviationRow], cases: Sequence[CaseRecord]
) -> list[Pair]:
    """Rows of kernels and baselines that were measured in both reports. A row that is there twice
    counts once; `cases` tell how wide the tensors are."""
    names = Names(a, b)
    sides = [{names.row(r): r for r in rows if r.status == "ok"} for rows in (a, b)]
    floors = [{names.inputs(r): r for r in rows.values() if r.role == "floor"} for rows in sides]
    width = {(c.case, t): getattr(c, name) for c in cases for t, name in WIDTHS.items()}
    return [
        Pair(
            sides[0][key],
            row,
            _inputs(*(floor.get(names.inputs(row)) for floor in floors)),
            width.get((row.case, row.tensor), 1),
        )
        for key, row in sides[1].items()
        if key in sides[0] and row.role in ("kernel", "baseline")
    ]


def _inputs(a: DeviationRow | None, b: DeviationRow | None) -> Inputs:
    if a is None or b is None:
        return "unknown"
    if same_bits(a, b):
        return "same"
    numbers = [(getattr(a, name), getattr(b, name)) for name in FLOOR]
    close = all(
        x == y or (None not in (x, y) and math.isclose(x, y, rel_tol=NEARLY)) for x, y in numbers
    )
    return "same" if close and a.elements == b.elements else "other"


def same_bits(a: DeviationRow, b: DeviationRow) -> bool:
    """Whether two outputs have the same checksum."""
    return a.bits is not None and a.bits == b.bits
