"""`numdev schema`: of what people write and what numdev writes, for editors and other programs.

They come from the models that validate the files, so that they cannot disagree, and are widened by
what a file may say besides: a list where a scalar belongs (a grid), a name in place of a mapping,
null for a default. What a validator decides with code (two cases of one name, heads that do not
divide) is in no schema. Descriptions are what stands beside or under the models' fields.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import json
import operator
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any

import click
from pydantic import BaseModel, Field, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from numdev.yamlfile import models_in

DIALECT = "https://json-schema.org/draft/2020-12/schema"
# Name to the model, and what the schema is called.
CONFIGS = {
    "config": ("numdev.config:AuditConfig", "A YAML file for numdev audit and numdev diagnose"),
    "sweep": ("numdev.config:SweepConfig", "A YAML file for numdev sweep"),
    "train": ("numdev.training.config:TrainConfig", "A YAML file for numdev train"),
    "thresholds": ("numdev.gate.rules:Rules", "A YAML file of thresholds for numdev gate"),
}
NAMES = (*CONFIGS, "report")
SCALAR: dict[str, Any] = {"type": ["boolean", "integer", "number", "string", "null"]}
GRID: dict[str, Any] = {"anyOf": [SCALAR, {"type": "array", "items": SCALAR, "minItems": 1}]}
CHOICE = "A name, or a mapping of `name` and options. A list of values is a grid."
OUTSIDE = ("default", "title", "description")


@click.command(
    short_help="Print the JSON Schema of a file numdev reads or writes.",
    epilog="Example:  numdev schema sweep",
)
@click.argument("name", metavar="WHAT", type=click.Choice(NAMES))
def schema(name: str) -> None:
    """Print the JSON Schema of a file that numdev reads or writes, for editors.

    WHAT is config (a YAML file for audit and diagnose), sweep, train, thresholds (of the gate), or
    report (report.json of any kind).
    """
    click.echo(json.dumps(schema_of(name), indent=1, ensure_ascii=False))


def schema_of(name: str) -> dict[str, Any]:
    """The schema of one of `NAMES`, as JSON's data. Raises KeyError for another name."""
    from numdev.report import KINDS, SCHEMA_VERSION

    if name == "report":
        models = {kind: _model(place) for kind, place in KINDS.items()}
        joined = functools.reduce(operator.or_, models.values())
        union: Any = Annotated[joined, Field(discriminator="kind")]
        made = TypeAdapter(union).json_schema(schema_generator=_AsWritten, mode="serialization")
        used, title, number = set(models.values()), "A report of numdev", f":{SCHEMA_VERSION}"
    else:
        place, title = CONFIGS[name]
        model = _model(place)
        made = model.model_json_schema(schema_generator=_AsWritten)
        used, number = {model}, ""
        _widen(made, null_is_default=name in ("config", "sweep"))
    _describe(made, used)
    head = {"$schema": DIALECT, "$id": f"urn:numdev:schema:{name}{number}", "title": title}
    return {**head, **{key: value for key, value in made.items() if key not in head}}


def _model(place: str) -> type[BaseModel]:
    module, _, name = place.partition(":")
    model: type[BaseModel] = getattr(importlib.import_module(module), name)
    return model


class _AsWritten(GenerateJsonSchema):
    """Where something is put into form before it is validated, one value may stand for a list."""

    def function_before_schema(self, schema: Any) -> JsonSchemaValue:
        inner = self.generate_inner(schema["schema"])
        options = inner.get("anyOf", [inner])
        items = [each["items"] for each in options if "items" in each]
        return {"anyOf": [*items, *options]} if items else inner


def _widen(made: dict[str, Any], *, null_is_default: bool) -> None:
    """What `yamlfile.read_yaml` expands: a grid in a case, and options beside a name."""
    parts = made.get("$defs", {})
    if "Choice" in parts:
        choice = parts["Choice"]
        described = {**choice["properties"]["options"], "additionalProperties": GRID}
        written_out = {
            "type": "object",
            "properties": {"name": {"type": "string"}, "options": described},
            "required": ["name"],
            "additionalProperties": GRID,
        }
        parts["Choice"] = {"anyOf": [{"type": "string"}, written_out], "description": CHOICE}
    if "CaseConfig" in parts:
        properties = parts["CaseConfig"]["properties"]
        properties.pop("axes")  # filled in when a grid is expanded
        for key in properties.keys() - {"name"}:
            outside, inside = _split(properties[key])
            many = {"type": "array", "items": inside, "minItems": 1}
            properties[key] = {**outside, "anyOf": [inside, many]}
    for key, value in made["properties"].items() if null_is_default else ():
        outside, inside = _split(value)
        made["properties"][key] = {**outside, "anyOf": [inside, {"type": "null"}]}


def _split(value: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is said about a value, and what it may be."""
    outside = {k: v for k, v in value.items() if k in OUTSIDE}
    return outside, {k: v for k, v in value.items() if k not in outside}


def _describe(made: dict[str, Any], roots: set[type[BaseModel]]) -> None:
    """Give every property of every model the docstring that stands under its field."""
    parts, waiting, seen = made.get("$defs", {}), list(roots), set(roots)
    while waiting:
        model = waiting.pop()
        target = parts.get(model.__name__, made if made.get("title") == model.__name__ else None)
        for name, words in _descriptions(model):
            value = target and target.get("properties", {}).get(name)
            if value:
                value.setdefault("description", words)
        fields = model.model_fields.values()
        new = {m for field in fields for m in models_in(field.annotation)} - seen
        waiting += new
        seen |= new


def _descriptions(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Field and its description, of a model and those it is made of."""
    for base in model.__mro__:
        if not (issubclass(base, BaseModel) and base.__module__.startswith("numdev")):
            continue
        source = textwrap.dedent(inspect.getsource(base))
        (body,) = ast.parse(source).body
        text = source.encode().splitlines()
        written = body.body if isinstance(body, ast.ClassDef) else []
        for field, after in itertools.pairwise([*written, None]):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                words = after.value if isinstance(after, ast.Expr) else None
                if isinstance(words, ast.Constant) and isinstance(words.value, str):
                    yield field.target.id, " ".join(words.value.split())
                beside = text[(field.end_lineno or 1) - 1][field.end_col_offset :].decode()
                if "# " in beside:
                    yield field.target.id, beside.partition("# ")[2]
