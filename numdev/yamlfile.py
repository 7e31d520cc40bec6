"""Configuration files: YAML, read strictly into validated models.

An unknown key is an error that names the closest known one. A list where a scalar belongs is a
grid: the entry is repeated for every value, and several lists multiply.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError

from numdev.errors import UsageError, closest

Scalar = bool | int | float | str | None

MOST_CELLS = 100_000
"""Of a grid in one file: more are a slip of the pen, and would fill the memory."""
MOST_VALUES = 200_000
"""Of one file, aliases written out."""


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


def read_yaml(path: Path, model: type[M]) -> M:
    """A YAML file as a validated model; raises UsageError that names the file and the key."""
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_EachKeyOnce)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: cannot be read (no such file)", hint=_shipped(path)) from error
    except (OSError, ValueError) as error:  # not text, or a value such as the date 2024-13-01
        raise UsageError(f"{path}: cannot be read ({error})", hint="give a YAML file") from error
    except RecursionError as error:
        raise UsageError(
            f"{path}: is nested too deeply", hint="see the files under configs/"
        ) from error
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
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
    return validated(raw, model, str(path))


class _EachKeyOnce(yaml.SafeLoader):
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


def validated(raw: Mapping[str, Any], model: type[M], where: str) -> M:
    """A mapping as a validated model, its grids expanded; raises UsageError that names `where` it
    stands and the key."""
    for part, cells in (("cases", expand), ("kernels", expand_options)):
        if isinstance(raw.get(part), list):
            found = (cell for entry in raw[part] for cell in cells(entry, where))
            raw = {**raw, part: list(itertools.islice(found, MOST_CELLS + 1))}
            if len(raw[part]) > MOST_CELLS:
                raise UsageError(
                    f"{where}: {part}: a grid of more than {MOST_CELLS:,} cells",
                    hint="give fewer values, or several files",
                )
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise UsageError(f"{where}: {_explain(error, model)}") from error


def lines_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Of a YAML file that `read_yaml` read, for each key of its mapping: the line, from 1, where
    the key stands, then those where the entries of its list or mapping begin."""
    text = path.read_text(encoding="utf-8")
    try:  # ten times as fast, where there is one
        tree = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError:  # of what `read_yaml` takes it refuses some: `%YAML 1.3`
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
    found = {}
    for key, value in tree.value if isinstance(tree, yaml.MappingNode) else ():
        entries = value.value if isinstance(value, yaml.CollectionNode) else ()
        begin = (entry[0] if isinstance(entry, tuple) else entry for entry in entries)
        found[str(key.value)] = (key.start_mark.line + 1, *(e.start_mark.line + 1 for e in begin))
    return found


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
    for path, values in axes:
        if not values:
            raise UsageError(f"{where}: {'.'.join(path)} is an empty list", hint="give it values")
    for cell in itertools.product(*(values for _, values in axes)):
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
    if isinstance(entry.get("options"), dict):
        options = expand_options(entry["options"], where)
        entries = [{**entry, "options": given} for given in options]
    else:
        entries = [entry]
    for each in entries:
        axes = {key: value for key, value in each.items() if isinstance(value, list)}
        for key, values in axes.items():
            if not values:
                raise UsageError(f"{where}: kernels: {key} is an empty list", hint="give it values")
        for cell in itertools.product(*axes.values()):
            yield {**each, **dict(zip(axes, cell, strict=True))}


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


def _explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first thing wrong, in one sentence, with the closest known key for an unknown one.

    An unknown key comes first: a misspelt one is also missed under its right name.
    """
    errors = error.errors()
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        nested = _model_at(first["loc"], model)
        hint = closest(str(first["loc"][-1]), nested.model_fields)
        return f"unknown key {where!r}; {hint}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def _model_at(place: tuple[int | str, ...], model: type[BaseModel]) -> type[BaseModel]:
    """The model whose key stands at the end of `place`, for example cases.0.inputs.KEY."""
    for part in place[:-1]:
        if part in model.model_fields:
            model = _model_in(model.model_fields[str(part)].annotation) or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The first model an annotation speaks of: of `tuple[CaseConfig, ...]`, CaseConfig."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _model_in(arg))), None)
