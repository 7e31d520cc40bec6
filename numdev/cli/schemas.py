"""JSON Schemas of what people write and what numdev writes, for editors and other programs.

They come from the models that validate the files, so that they cannot disagree, and are widened by
what a file may say besides: a list where a scalar belongs (a grid), a name in place of a mapping.
What a validator decides with code (two cases of one name, heads that do not divide) is in no
schema. Descriptions are what stands beside or under the models' fields, read from their source.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import operator
import textwrap
from collections.abc import Callable, Iterator
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from numdev.report import KINDS, SCHEMA_VERSION

DIALECT = "https://json-schema.org/draft/2020-12/schema"
CONFIGS = {
    "config": ("numdev.config:AuditConfig", "A YAML file for numdev audit and numdev diagnose"),
    "sweep": ("numdev.config:SweepConfig", "A YAML file for numdev sweep"),
    "train": ("numdev.training.config:TrainConfig", "A YAML file for numdev train"),
    "thresholds": ("numdev.gate.rules:Rules", "A YAML file of thresholds for numdev gate"),
}
"""Name to the model, and what the schema is called."""
NAMES = (*CONFIGS, "report")
SCALAR: dict[str, Any] = {"type": ["boolean", "integer", "number", "string", "null"]}
GRID: dict[str, Any] = {"anyOf": [SCALAR, {"type": "array", "items": SCALAR, "minItems": 1}]}


def schema_of(name: str) -> dict[str, Any]:
    """The schema of one of `NAMES`, as JSON's data. Raises KeyError for another name."""
    if name == "report":
        models = {kind: _model(place) for kind, place in KINDS.items()}
        joined = functools.reduce(operator.or_, models.values())
        union: Any = Annotated[joined, Field(discriminator="kind")]
        made = TypeAdapter(union).json_schema(schema_generator=_AsWritten, mode="serialization")
        used, title = set(models.values()), "A report of numdev"
        number = f":{SCHEMA_VERSION}"
    else:
        place, title = CONFIGS[name]
        model = _model(place)
        made = model.model_json_schema(schema_generator=_AsWritten)
        used, number = {model}, ""
        _widen(made)
    _describe(made, used)
    head = {"$schema": DIALECT, "$id": f"urn:numdev:schema:{name}{number}", "title": title}
    return {**head, **{key: value for key, value in made.items() if key not in head}}


def _model(place: str) -> type[BaseModel]:
    module, _, name = place.partition(":")
    found: type[BaseModel] = getattr(importlib.import_module(module), name)
    return found


class _AsWritten(GenerateJsonSchema):
    """Where something is put into form before it is validated, one value may stand for a list."""

    def function_before_schema(self, schema: Any) -> JsonSchemaValue:
        inner = self.generate_inner(schema["schema"])
        options = inner.get("anyOf", [inner])
        items = [each["items"] for each in options if "items" in each]
        return {"anyOf": [*items, *options]} if items else inner


def _widen(made: dict[str, Any]) -> None:
    """What `yamlfile.read_yaml` expands: a grid in a case, and options beside a name."""
    parts = made.get("$defs", {})
    if "Choice" in parts:
        choice = parts["Choice"]
        described = {**choice["properties"]["options"], "additionalProperties": GRID}
        parts["Choice"] = {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "options": described},
                    "required": ["name"],
                    "additionalProperties": GRID,
                },
            ],
            "description": "A name, or a mapping of `name` and options. A list of values is a "
            "grid.",
        }
    if "CaseConfig" in parts:
        case = parts["CaseConfig"]
        case["properties"].pop("axes")  # filled in when a grid is expanded
        for key, value in case["properties"].items():
            if key != "name":
                case["properties"][key] = _gridded(value)


def _gridded(value: dict[str, Any]) -> dict[str, Any]:
    """The value, or a list of such values; default and title stay outside."""
    outside = {k: v for k, v in value.items() if k in ("default", "title", "description")}
    inside = {k: v for k, v in value.items() if k not in outside}
    return {**outside, "anyOf": [inside, {"type": "array", "items": inside, "minItems": 1}]}


def _describe(made: dict[str, Any], roots: set[type[BaseModel]]) -> None:
    """Give every property of every model the words beside or under its field."""
    parts = made.get("$defs", {})
    for model in _reached(roots):
        target = parts.get(model.__name__, made if made.get("title") == model.__name__ else None)
        for name, words in _docstrings(model).items():
            value = target and target.get("properties", {}).get(name)
            if value:
                value.setdefault("description", words)


def _reached(roots: set[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    """The models and all that their fields speak of."""
    waiting, seen = list(roots), set(roots)
    while waiting:
        model = waiting.pop()
        yield model
        fields = model.model_fields.values()
        found = {m for field in fields for m in _models_in(field.annotation)} - seen
        waiting += found
        seen |= found


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models_in(argument)


@functools.cache
def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Field to what stands beside or under it, in the model's class and those it is made of."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base.__module__.startswith("numdev"):
            found |= _written(base)
    return found


def _written(model: Callable[..., Any]) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(model))
    (body,) = ast.parse(source).body
    lines = body.body if isinstance(body, ast.ClassDef) else []
    text = source.encode().splitlines()
    found = {}
    for field, after in itertools.pairwise([*lines, None]):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            beside = text[(field.end_lineno or 1) - 1][field.end_col_offset :].decode()
            if "# " in beside:
                found[field.target.id] = beside.partition("# ")[2]
            words = after.value if isinstance(after, ast.Expr) else None
            if isinstance(words, ast.Constant) and isinstance(words.value, str):
                found[field.target.id] = " ".join(words.value.split())
    return found
