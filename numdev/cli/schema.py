"""`numdev schema`: of what people write and what numdev writes, for editors and other programs.

They are pydantic's schemas of the models that validate the files, widened by what YAML may also
hold: a list in place of a scalar (a grid), and a name in place of a mapping. What a validator
decides with code is in no schema."""

from __future__ import annotations

import functools
import importlib
import json
import operator
from typing import Annotated, Any

import click
from pydantic import BaseModel, Field, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from numdev.cli.session import command

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


@command("Print the JSON Schema of a file numdev reads or writes.", "schema sweep")
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
        joined = functools.reduce(operator.or_, map(_model, KINDS.values()))
        union: Any = Annotated[joined, Field(discriminator="kind")]
        made = TypeAdapter(union).json_schema(schema_generator=_AsWritten, mode="serialization")
        title, number = "A report of numdev", f":{SCHEMA_VERSION}"
    else:
        place, title = CONFIGS[name]
        made, number = _model(place).model_json_schema(schema_generator=_AsWritten), ""
        _widen(made)
    head = {"$schema": DIALECT, "$id": f"urn:numdev:schema:{name}{number}", "title": title}
    return {**head, **{key: value for key, value in made.items() if key not in head}}


def _model(place: str) -> type[BaseModel]:
    module, _, name = place.partition(":")
    model: type[BaseModel] = getattr(importlib.import_module(module), name)
    return model


class _AsWritten(GenerateJsonSchema):
    def function_before_schema(self, schema: Any) -> JsonSchemaValue:
        """A field with a validator that runs before also accepts one value in place of a list."""
        inner = self.generate_inner(schema["schema"])
        options = inner.get("anyOf", [inner])
        items = [each["items"] for each in options if "items" in each]
        return {"anyOf": [*items, *options]} if items else inner


def _widen(made: dict[str, Any]) -> None:
    """Add what `yamlfile.read_yaml` expands: a grid in a case, and options beside a name."""
    parts = made.get("$defs", {})
    if "Choice" in parts:
        options = parts["Choice"]["properties"]["options"]
        written_out = {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "options": {**options, "additionalProperties": GRID},
            },
            "required": ["name"],
            "additionalProperties": GRID,
        }
        parts["Choice"] = {"anyOf": [{"type": "string"}, written_out], "description": CHOICE}
    if "CaseConfig" in parts:
        properties = parts["CaseConfig"]["properties"]
        properties.pop("axes")  # filled in when a grid is expanded
        for key in properties.keys() - {"name"}:
            one = properties[key]
            properties[key] = {"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]}
