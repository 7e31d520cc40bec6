"""JSON Schemas: they accept what numdev accepts, and reject what it rejects for its shape."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from numdev.cli import schema

ROOT = Path(__file__).parent.parent
REPORTS = sorted((ROOT / "tests" / "data" / "reports").glob("*.json"))
FOLDERS = {
    "audit": "config",
    "check": "config",
    "sweep": "sweep",
    "train": "train",
    "gate": "thresholds",
}
FILES = [(FOLDERS[p.parent.name], p) for p in sorted((ROOT / "configs").glob("*/*.yaml"))]
TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None),
}  # fmt: skip
KEYWORDS = {
    *("type", "anyOf", "oneOf", "$ref", "properties", "required", "additionalProperties"),
    *("items", "prefixItems", "minItems", "maxItems", "enum", "const", "minimum", "maximum"),
    *("exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern", "examples"),
    *("title", "description", "default", "$defs", "$schema", "$id", "discriminator"),
}


def has_type(value: Any, name: str) -> bool:
    if name in ("number", "integer"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (name == "number" or float(value).is_integer())
    return isinstance(value, TYPES[name])


def accepts(value: Any, rule: Any, root: Any) -> bool:
    """Whether JSON Schema (2020-12, the keywords used here) accepts a value."""
    if isinstance(rule, bool):
        return rule
    assert set(rule) <= KEYWORDS, set(rule) - KEYWORDS
    if "$ref" in rule:
        target = root["$defs"][rule["$ref"].removeprefix("#/$defs/")]
        if not accepts(value, target, root):
            return False
    types = rule.get("type", [])
    if types and not any(
        has_type(value, t) for t in ([types] if isinstance(types, str) else types)
    ):
        return False
    if "anyOf" in rule and not any(accepts(value, r, root) for r in rule["anyOf"]):
        return False
    if "oneOf" in rule and sum(accepts(value, r, root) for r in rule["oneOf"]) != 1:
        return False
    if "pattern" in rule and isinstance(value, str) and not re.search(rule["pattern"], value):
        return False
    if ("enum" in rule and value not in rule["enum"]) or rule.get("const", value) != value:
        return False
    return in_bounds(value, rule) and inside(value, rule, root)


def in_bounds(value: Any, rule: Any) -> bool:
    if has_type(value, "number"):
        return bool(
            value >= rule.get("minimum", value)
            and value <= rule.get("maximum", value)
            and value > rule.get("exclusiveMinimum", float("-inf"))
            and value < rule.get("exclusiveMaximum", float("inf"))
        )
    size = len(value) if isinstance(value, str | list) else 0
    least, most = ("minLength", "maxLength") if isinstance(value, str) else ("minItems", "maxItems")
    return rule.get(least, 0) <= size <= rule.get(most, size)


def inside(value: Any, rule: Any, root: Any) -> bool:
    if isinstance(value, dict):
        known = rule.get("properties", {})
        rest = rule.get("additionalProperties", True)
        return set(rule.get("required", ())) <= set(value) and all(
            accepts(v, known.get(k, rest), root) for k, v in value.items()
        )
    if isinstance(value, list):
        first = rule.get("prefixItems", [])
        each = [*first, *[rule.get("items", True)] * max(0, len(value) - len(first))]
        return all(accepts(v, r, root) for v, r in zip(value, each, strict=False))
    return True


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
        ("config", {"cases": [{**CASE, "heads": "one"}]}),
        ("config", {"cases": [{**CASE, "head": 1}]}),
        ("config", {"cases": [{"name": "a"}]}),
        ("config", {"checkpoint": "x", "kernel": ["sdpa-flash"]}),
        ("config", {"checkpoint": "x", "kernels": [{"block": 64}]}),
        ("config", {"checkpoint": "x", "repeats": 0}),
        ("sweep", {"kernels": ["baseline"]}),
        ("sweep", {"cases": [CASE], "rows": "columns"}),
        ("sweep", {"cases": [{**CASE, "seq_len": []}]}),
        ("train", {"title": "x"}),
        ("thresholds", {"thresholds": []}),
        ("thresholds", {"thresholds": [{"name": "a", "metric": "rms", "at_most": -1}]}),
        ("thresholds", {"thresholds": [{"name": "a", "metrik": "rms", "at_most": 1}]}),
        ("thresholds", {"thresholds": [{"name": "a", "metric": "rmse", "at_most": 1}]}),
        ("thresholds", {"thresholds": [{"name": "a", "metric": "rms / w1", "at_most": 1}]}),
        ("thresholds", {"thresholds": [{"name": "a", "metric": "rms/rms/rms", "at_most": 1}]}),
        ("report", {"kind": "audit", "schema_version": 2}),
        ("report", {"kind": "horoscope"}),
    ],
)
def test_what_numdev_rejects_is_rejected(name: str, value: Any) -> None:
    """Wrong types, unknown and missing keys, numbers out of range."""
    assert not valid(value, name)
