"""Configuration files: YAML, read strictly into validated models.

An unknown key is an error that names the closest known one; every error names the line. A list
where a scalar belongs is a grid: the entry is repeated for every value, and several lists multiply.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError

from numdev.errors import UsageError, closest

Scalar = bool | int | float | str | None
MOST_CELLS = 100_000  # of a grid in one file: more are a slip of the pen, and would fill the memory
MOST_VALUES = 200_000  # of one file, aliases written out
Place = tuple[int | str, ...]  # keys and indices, from the top of a file down


class Strict(BaseModel):
    # Built when it is first used, as the records of a report are.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


def each_once(values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    if values is not None:
        if not values:
            raise ValueError("is an empty list")
        twice = next((v for v, n in Counter(map(str, values)).items() if n > 1), None)
        if twice is not None:
            raise ValueError(f"names {twice} twice")
    return values


def _as_list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_as_list), AfterValidator(each_once)]
M = TypeVar("M", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """YAML forbids a key that stands twice in a mapping; of two limits the loader would take the
    last and say nothing."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                problem = f"the key {key.value!r} stands twice"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            seen.add(str(key.value))
        return node


def read_yaml(path: Path, model: type[M]) -> M:
    """A YAML file as a validated model; raises UsageError that names the file, line and key."""
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        raw = loader.construct_document(node) if node is not None else None
    except FileNotFoundError as error:
        raise UsageError(f"{path}: cannot be read (no such file)", hint=_shipped(path)) from error
    except (OSError, ValueError) as error:  # not text, or a value such as the date 2024-13-01
        raise UsageError(f"{path}: cannot be read ({error})", hint="give a YAML file") from error
    except RecursionError as error:
        raise UsageError(
            f"{path}: is nested too deeply", hint="see the files under configs/"
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "malformed"
        raise UsageError(
            f"{path}{line}: not valid YAML: {problem}", hint="fix that line"
        ) from error
    if not isinstance(raw, dict):
        raise UsageError(f"{path}: holds no mapping of keys", hint="see the files under configs/")
    if _endless(raw):
        raise UsageError(
            f"{path}: comes to more than {MOST_VALUES:,} values", hint="see to its aliases (*name)"
        )
    return validated(raw, model, str(path), node)


def validated(raw: Mapping[str, Any], model: type[M], where: str, node: Any = None) -> M:
    """A mapping as a validated model, its grids expanded; raises UsageError that names `where` it
    stands, the key, and the line in `node`, the file's tree."""
    origins: dict[str, list[int]] = {}
    for part, cells in (("cases", expand), ("kernels", expand_options)):
        if isinstance(raw.get(part), list):
            found = (
                (i, cell)
                for i, entry in enumerate(raw[part])
                for cell in cells(entry, f"{where}{_line(node, (part, i))}")
            )
            few = list(itertools.islice(found, MOST_CELLS + 1))
            if len(few) > MOST_CELLS:
                raise UsageError(
                    f"{where}{_line(node, (part,))}: {part}: a grid of more than {MOST_CELLS:,} "
                    "cells",
                    hint="give fewer values, or several files",
                )
            origins[part] = [i for i, _ in few]
            raw = {**raw, part: [cell for _, cell in few]}
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        # An unknown key comes first: a misspelt one is also missed under its right name.
        errors = error.errors()
        first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
        place = first["loc"]
        named = ".".join(map(str, place))
        if first["type"] == "extra_forbidden":
            hint = closest(str(place[-1]), _model_at(place, model).model_fields)
            what = f"unknown key {named!r}; {hint}"
        else:
            message = first["msg"].removeprefix("Value error, ")
            what = f"{named}: {message}" if named else message
        if len(place) > 1 and place[0] in origins and isinstance(place[1], int):
            place = (place[0], origins[str(place[0])][place[1]], *place[2:])
        raise UsageError(f"{where}{_line(node, place)}: {what}") from error


def _line(node: Any, place: Place) -> str:
    """`, line N` of what stands at a place of a file's tree, or of the nearest above it."""
    if node is None:
        return ""
    mark = node.start_mark
    for part in place:
        if isinstance(node, yaml.MappingNode):
            entry = next(((k, v) for k, v in node.value if k.value == str(part)), None)
            if entry is None:
                continue  # a level that only the model has
            mark, node = entry[0].start_mark, entry[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            if part >= len(node.value):
                break
            node = node.value[part]
            mark = node.start_mark
    return f", line {mark.line + 1}"


def lines_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Of a YAML file that `read_yaml` read, for each key of its mapping: the line, from 1, where
    the key stands, then those where the entries of its list or mapping begin."""
    tree = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    lines = {}
    for key, value in tree.value if isinstance(tree, yaml.MappingNode) else ():
        entries = value.value if isinstance(value, yaml.CollectionNode) else ()
        begin = (entry[0] if isinstance(entry, tuple) else entry for entry in entries)
        lines[str(key.value)] = (key.start_mark.line + 1, *(e.start_mark.line + 1 for e in begin))
    return lines


def _endless(raw: Any) -> bool:
    """Whether aliases that repeat aliases come to more values than any file would hold. Such values
    are small in memory, until something writes them out."""
    waiting, seen = [raw], 0
    while waiting and seen <= MOST_VALUES:
        value = waiting.pop()
        seen += 1
        if isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value
    return seen > MOST_VALUES


def expand(entry: Any, where: str) -> Iterator[Any]:
    """The cells of one grid entry: every list (also inside `inputs`) is an axis.

    A cell's name says its place on every axis. A value of the axis `inputs` may hold axes itself.
    Raises UsageError for an empty axis.
    """
    if not isinstance(entry, dict):
        yield entry
        return
    inputs = entry.get("inputs")
    axes: list[tuple[tuple[str, ...], list[Any]]] = [
        ((key,), value) for key, value in entry.items() if isinstance(value, list)
    ]
    if isinstance(inputs, dict):
        axes += [(("inputs", k), v) for k, v in inputs.items() if isinstance(v, list)]
    for cell in _product([(".".join(path), values) for path, values in axes], where):
        case = {**entry, "inputs": dict(inputs)} if isinstance(inputs, dict) else dict(entry)
        place = {}
        for (path, _), value in zip(axes, cell, strict=True):
            target = case if len(path) == 1 else case["inputs"]
            target[path[-1]] = value
            place[path[-1]] = _shown(value)
        if place:
            case["axes"] = {**case.get("axes", {}), **place}
            shown = ",".join(f"{axis}={value}" for axis, value in place.items())
            if "name" in case:  # else its absence is what validation reports
                case["name"] = f"{case['name']}/{shown}"
        if isinstance(case.get("inputs"), dict) and case["inputs"] != inputs:
            yield from expand(case, where)
        else:
            yield case


def expand_options(entry: Any, where: str) -> Iterator[Any]:
    """The kernels of one entry of `kernels`: every list among its options is an axis."""
    if not isinstance(entry, dict):
        yield entry
        return
    entries = [entry]
    if isinstance(entry.get("options"), dict):
        options = expand_options(entry["options"], where)
        entries = [{**entry, "options": given} for given in options]
    for each in entries:
        axes = {key: value for key, value in each.items() if isinstance(value, list)}
        for cell in _product([(f"kernels: {k}", v) for k, v in axes.items()], where):
            yield {**each, **dict(zip(axes, cell, strict=True))}


def _product(axes: Sequence[tuple[str, list[Any]]], where: str) -> Iterator[tuple[Any, ...]]:
    for name, values in axes:
        if not values:
            raise UsageError(f"{where}: {name} is an empty list", hint="give it values")
    return itertools.product(*(values for _, values in axes))


def _shown(value: Any) -> str:
    """A value as a cell's name has it; of a regime its name and the options it is given."""
    if not isinstance(value, dict):
        return type(value).__name__ if isinstance(value, list) else str(value)
    nested = (list, dict)
    options = [f"{k}={v}" for k, v in value.items() if k != "name" and not isinstance(v, nested)]
    return f"{value.get('name')}({','.join(options)})" if options else str(value.get("name"))


def bundled(name: str) -> Path:
    """A file of `configs/`, from the source tree or from inside the installed package."""
    for folder in (Path(__file__).parent / "configs", Path(__file__).parent.parent / "configs"):
        if (folder / name).is_file():
            return folder / name
    raise UsageError(f"the bundled configuration {name} is missing", hint="reinstall numdev")


def _shipped(path: Path) -> str:
    """Where a file is of which the documentation speaks as it is called in the source tree."""
    try:
        return f"numdev's own is {bundled(path.relative_to('configs').as_posix())}"
    except (UsageError, ValueError):
        return "give a YAML file"


def _model_at(place: Place, model: type[BaseModel]) -> type[BaseModel]:
    """The model whose key stands at the end of `place`, for example cases.0.inputs.KEY."""
    for part in place[:-1]:
        if part in model.model_fields:
            inner = models_in(model.model_fields[str(part)].annotation)
            model = next(inner, model)
    return model


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models an annotation speaks of: of `tuple[CaseConfig, ...]`, CaseConfig."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)
