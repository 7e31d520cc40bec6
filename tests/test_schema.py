"""JSON Schemas: they accept what numdev accepts, and reject what it rejects for its shape."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from numdev.cli import schema

ROOT = Path(__file__).parent.parent
REPORTS = sorted((ROOT / "tests" / "data" / "reports").glob("*.json"))
FOLDERS = {"audit": "config", "check": "config", "gate": "thresholds"}
FILES = [
    (FOLDERS.get(p.parent.name, p.parent.name), p) for p in sorted(ROOT.glob("configs/*/*.yaml"))
]
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
SAID = {"title", "description", "default", "examples", "$defs", "$schema", "$id", "discriminator"}


def has_type(value: Any, name: str | list[str]) -> bool:
    if isinstance(name, list):
        return any(has_type(value, each) for each in name)
    if name in ("number", "integer"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (name == "number" or float(value).is_integer())
    return isinstance(value, TYPES[name])


def accepts(value: Any, rule: Any, root: Any) -> bool:
    """Whether JSON Schema (2020-12, the keywords used here) accepts a value."""
    if isinstance(rule, bool):
        return rule

    def each(rules: Any) -> list[bool]:
        return [accepts(value, r, root) for r in rules]

    known, first = rule.get("properties", {}), rule.get("prefixItems", [])
    checks: dict[str, tuple[type | tuple[type, ...], Callable[[Any], Any]]] = {
        "$ref": (object, lambda x: accepts(value, root["$defs"][x.rpartition("/")[2]], root)),
        "type": (object, lambda x: has_type(value, x)),
        "anyOf": (object, lambda x: any(each(x))),
        "oneOf": (object, lambda x: sum(each(x)) == 1),
        "enum": (object, lambda x: value in x),
        "const": (object, lambda x: value == x),
        "pattern": (str, lambda x: re.search(x, value)),
        "minLength": (str, lambda x: len(value) >= x),
        "maxLength": (str, lambda x: len(value) <= x),
        "minimum": ((int, float), lambda x: value >= x),
        "maximum": ((int, float), lambda x: value <= x),
        "exclusiveMinimum": ((int, float), lambda x: value > x),
        "exclusiveMaximum": ((int, float), lambda x: value < x),
        "minItems": (list, lambda x: len(value) >= x),
        "maxItems": (list, lambda x: len(value) <= x),
        "prefixItems": (list, lambda x: all(map(accepts, value, x, [root] * len(x)))),
        "items": (list, lambda x: all(accepts(v, x, root) for v in value[len(first) :])),
        "required": (dict, lambda x: {*x} <= {*value}),
        "properties": (dict, lambda x: all(accepts(value[n], x[n], root) for n in x if n in value)),
        "additionalProperties": (
            dict, lambda x: all(accepts(v, x, root) for n, v in value.items() if n not in known)
        ),
    }  # fmt: skip
    assert rule.keys() <= checks.keys() | SAID, rule.keys() - checks.keys() - SAID
    return all(
        check(rule[name])
        for name, (kind, check) in checks.items()
        if name in rule and isinstance(value, kind)
    )


def valid(value: Any, name: str) -> bool:
    made = schema.schema_of(name)
    return accepts(value, made, made)


# --- they agree with the files -------------------------------------------------------------------


@pytest.mark.parametrize(("name", "path"), FILES, ids=lambda x: getattr(x, "stem", x))
def test_bundled_files_are_accepted(name: str, path: Path) -> None:
    """Grids, names with options and single values in place of lists included."""
    assert valid(yaml.safe_load(path.read_text(encoding="utf-8")), name)


@pytest.mark.parametrize("path", REPORTS, ids=lambda p: p.stem)
def test_reports_are_accepted(path: Path) -> None:
    """Each as what its kind says; and as written, with every field."""
    from numdev import report

    assert valid(json.loads(report.read(path).model_dump_json()), "report")


CASE = {"name": "a", "heads": 1, "seq_len": 8, "head_dim": 8}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("config", {"cases": [case]})
          for case in ({**CASE, "heads": "one"}, {**CASE, "head": 1}, {"name": "a"})),
        *(("config", {"checkpoint": "x", **wrong})
          for wrong in ({"kernel": ["sdpa-flash"]}, {"kernels": [{"block": 64}]}, {"repeats": 0})),
        ("sweep", {"kernels": ["baseline"]}),
        ("sweep", {"cases": [CASE], "rows": "columns"}),
        ("sweep", {"cases": [{**CASE, "seq_len": []}]}),
        ("train", {"title": "x"}),
        ("thresholds", {"thresholds": []}),
        *(("thresholds", {"thresholds": [{"name": "a", "at_most": 1, **wrong}]})
          for wrong in ({"metric": "rms", "at_most": -1}, {"metrik": "rms"}, {"metric": "rmse"},
                        {"metric": "rms / w1"}, {"metric": "rms/rms/rms"})),
        ("report", {"kind": "audit", "schema_version": 2}),
        ("report", {"kind": "horoscope"}),
    ],
)  # fmt: skip
def test_what_numdev_rejects_is_rejected(name: str, value: Any) -> None:
    """Wrong types, unknown and missing keys, numbers out of range."""
    assert not valid(value, name)
