"""What two reports must have in common to be compared, and what else differs between them.

What the request says of the inputs must be the same: the checkpoint and the text by their hashes,
wherever they lie. What may differ, since that is what a comparison is for, is where and with what
it was measured: versions, machine, settings, kernels and their options. `numdev compare` and
`numdev gate --against` ask this, and only this, of two reports.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from numdev.report import AuditReport, DeviationRow, Record, SweepReport

MUST = (
    *("checkpoint", "model", "text", "inputs", "cases", "formats", "model_dtype", "seed", "seeds"),
    *("generate", "length", "sequences", "layers", "heads", "gradients", "sampled_rows"),
)
"""Keys of a request that must be the same, and are what `--allow` takes. An audit has a `seed`, a
sweep `seeds`."""
APART = ("formats", "seed", "seeds", "layers", "heads", "gradients")
"""Of these what rows say themselves: where they differ rows are not found in the other report, or,
of other seeds, are other draws of the same cells."""
Measured = AuditReport | SweepReport
HASHES = {"checkpoint": "sha256", "text": "prompt_sha256"}
"""Keys that name files, and where their hashes are in a report's source."""
READ = ("text", "length", "sequences")
"""What the hash of the prompt covers: the same text may come from another file."""
LENGTH = 60
"""Characters of a value that are shown."""
HEX = 16
"""And of a hash."""


class Difference(Record):
    """Something the two do not have in common: a key, and both values, shortened to be read."""

    key: str
    """With the first place in it where they differ, as in `cases[0].seq_len`."""
    a: str
    b: str

    @property
    def root(self) -> str:
        """The key of the request itself."""
        return self.key.partition("[")[0].partition(".")[0]


def differences(a: Measured, b: Measured, keys: Sequence[str] = MUST) -> tuple[Difference, ...]:
    """What differs of what must be the same; of an audit and a sweep that they are that."""
    if a.kind != b.kind:
        return (Difference(key="kind", a=a.kind, b=b.kind),)
    found = (_different(key, a, b) for key in keys)
    return tuple(one for one in found if one is not None)


def _different(key: str, a: Measured, b: Measured) -> Difference | None:
    hashes = [_hash(key, x) for x in (a, b)]
    if any(hashes):
        a_hash, b_hash = (str(x or "not told") for x in hashes)
        same = a_hash == b_hash
        return None if same else Difference(key=key, a=a_hash[:HEX], b=b_hash[:HEX])
    if key in READ and all(_hash("text", x) for x in (a, b)):
        return None
    return _unequal(key, a.request.get(key), b.request.get(key))


def _hash(key: str, report: Measured) -> Any:
    return report.provenance.source.get(HASHES[key]) if key in HASHES else None


def changes(a: Measured, b: Measured) -> tuple[Difference, ...]:
    """What else differs in where the numbers come from, by key."""
    sides = [_flat(_facts(x)) for x in (a, b)]
    keys = dict.fromkeys((*sides[1], *sides[0]))
    found = [_unequal(key, *(side.get(key) for side in sides)) for key in keys]
    return (*(one for one in found if one is not None), *_options(a.rows, b.rows))


def _facts(report: Measured) -> dict[str, Any]:
    system = dict(report.provenance.system)
    packages = dict(system.pop("packages", None) or {})
    packages.pop("numdev", None)
    request = report.request
    return {
        **packages,
        "numdev": report.provenance.numdev,
        **system,
        **{key: request.get(key) for key in ("repeats", "isolate")},
    }


def _options(a: Sequence[DeviationRow], b: Sequence[DeviationRow]) -> Iterator[Difference]:
    """Of kernels that ran with one set of options in each report."""
    here, there = (options_of(rows) for rows in (a, b))
    for kernel in here.keys() & there.keys():
        if len(here[kernel]) == len(there[kernel]) == 1:
            (old,), (new,) = here[kernel].values(), there[kernel].values()
            for key in dict.fromkeys((*new, *old)):
                found = _unequal(f"{kernel[1]}: {key}", old.get(key), new.get(key))
                if found is not None:
                    yield found


def options_of(
    rows: Sequence[DeviationRow],
) -> dict[tuple[str, str], dict[str, Mapping[str, Any]]]:
    """Role and kernel to the sets of options it ran with, by what tells them apart."""
    found: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        sets = found.setdefault((row.role, row.kernel), {})
        sets.setdefault(spelt(row.options), row.options)
    return found


def spelt(options: Mapping[str, Any]) -> str:
    """Options as text: the same for the same ones in another order."""
    return json.dumps(options, sort_keys=True, default=str) if options else ""


def _flat(facts: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in facts.items():
        inner = isinstance(value, Mapping)
        flat |= _flat(value, f"{path}{key}.") if inner else {f"{path}{key}": value}
    return flat


def _unequal(key: str, a: Any, b: Any) -> Difference | None:
    """The first place at which two values differ, if they do."""
    if a == b or (a or None) == (b or None):
        return None
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = dict.fromkeys((*b, *a))
        return next((d for k in keys if (d := _unequal(f"{key}.{k}", a.get(k), b.get(k)))), None)
    if _records(a) and _records(b) and len(a) == len(b):
        parts = enumerate(zip(a, b, strict=True))
        return next((d for i, (x, y) in parts if (d := _unequal(f"{key}[{i}]", x, y))), None)
    return Difference(key=key, a=_shown(a), b=_shown(b))


def _records(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(x, Mapping) for x in value)


def _shown(value: Any) -> str:
    if value and _records(value):
        return f"{len(value)} of them"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= LENGTH else f"{text[: LENGTH - 3]}..."
