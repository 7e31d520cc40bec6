"""Configuration files: YAML, read strictly into validated models.

An unknown key is an error that names the most similar known one; every error names the
line. A list where a scalar belongs is a grid: the entry is repeated for each value;
several lists multiply."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
)

from numdev.errors import UsageError, closest, similar_file

Scalar = bool | int | float | str | None
# Of a grid in one file: more are a slip of the pen, and would fill the memory
MOST_CELLS = 100_000
LONGEST_VALUE = 40  # characters of a wrong value that a message repeats


class Strict(BaseModel):
    # Built when it is first used, as the records of a report are.
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True
    )


class Loose(BaseModel):
    """A record of a foreign file, which may have keys that nothing here reads."""

    model_config = ConfigDict(extra="ignore", frozen=True)


def each_once(values: tuple[object, ...]) -> tuple[object, ...]:
    """Returns the values as they are. Raises ValueError for an empty tuple, and for two
    values with the same `str`."""
    if not values:
        raise ValueError("is an empty list")
    (value, count), *_ = Counter(map(str, values)).most_common(1)
    if count > 1:
        raise ValueError(f"names {value} twice")
    return values


def as_list(value: object) -> object:
    """Returns a single string, integer or bool as a tuple of one; any other value as it
    is."""
    return (value,) if isinstance(value, int | str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(as_list), AfterValidator(each_once)]
M = TypeVar("M", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses a key that stands twice in a mapping. YAML forbids that;
    PyYAML's own loader takes the last value silently."""

    def compose_mapping_node(self, anchor: dict[str, yaml.Node]) -> yaml.MappingNode:
        """Returns a mapping of the file's tree. Raises ComposerError, with the line, for
        two keys of the same text (`1` and `'1'` too)."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                problem = f"the key {key.value!r} is repeated"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            seen.add(str(key.value))
        return node


# For numdev's own files, which tests hold to `_Loader`: in C it takes a tenth of the
# time.
_Trusted: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", _Loader)


def parse_bundled(name: str) -> Any:
    """Returns a file of `configs/` as plain data, unchecked. `name`: its path below
    `configs/`. Raises UsageError where it is missing."""
    return yaml.load(bundled_path(name).read_text(encoding="utf-8"), Loader=_Trusted)


def read_yaml(path: Path, model: type[M]) -> M:
    """Returns a YAML file as a validated model, the grids of `cases` and `kernels`
    expanded. Raises UsageError that names the file, and the line and the key where one is
    at fault; also for a file that cannot be read, is empty, or is no mapping."""
    try:
        is_bundled = path.is_relative_to(bundled_path("gate/default.yaml").parent.parent)
        loader = (_Trusted if is_bundled else _Loader)(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        raw = loader.construct_document(node) if node is not None else None
    except FileNotFoundError as error:
        near = similar_file(path)
        hint = f"did you mean {str(near)!r}?" if near else "give a YAML file"
        # As the documentation writes it
        with contextlib.suppress(UsageError, ValueError):
            hint = (
                f"numdev's own is {bundled_path(path.relative_to('configs').as_posix())}"
            )
        raise UsageError(f"{path}: cannot be read (no such file)", hint=hint) from error
    except (
        OSError,
        ValueError,
        RecursionError,
    ) as error:  # ValueError: the date 2024-13-01
        why = (isinstance(error, OSError) and error.strerror) or error
        raise UsageError(
            f"{path}: cannot be read ({why})", hint="give a YAML file"
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "malformed"
        raise UsageError(f"{path}{line}: not valid YAML: {problem}") from error
    if not isinstance(raw, dict):
        raise UsageError(f"{path}: expected a mapping", hint="see examples in configs/")
    return validated(raw, model, str(path), node)


def validated(
    raw: Mapping[str, object], model: type[M], where: str, node: yaml.Node | None = None
) -> M:
    """Returns a mapping as a validated model, the grids of `cases` and `kernels`
    expanded. `where`: the file or option it comes from; `node`: the file's tree, for line
    numbers. Raises UsageError that names `where`, the line if there is a `node`, and the
    key if one is at fault; for more than MOST_CELLS cells and an empty axis too."""
    origins: dict[
        int | str, list[int]
    ] = {}  # of each cell of a grid, the index of its entry
    for part in ("cases", "kernels"):
        entries = raw.get(part)
        if isinstance(entries, list):
            lines = [
                f"{where}{_line_clause(node, (part, i))}" for i in range(len(entries))
            ]
            pairs = (
                (cell, i)
                for i, entry in enumerate(entries)
                for cell in expand_grid(_named(entry, part, i), part, lines[i])
            )
            cells = list(itertools.islice(pairs, MOST_CELLS + 1))
            if len(cells) > MOST_CELLS:
                what = (
                    f"{part}: expected at most {MOST_CELLS:,} cells of a grid, got more"
                )
                raise UsageError(f"{lines[cells[-1][1]]}: {what}")
            raw = {**raw, part: [cell for cell, _ in cells]}
            origins[part] = [i for _, i in cells]
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        # An unknown key comes first: a misspelt one is also missed under its right name.
        errors = error.errors()
        first = min(errors, key=lambda e: e["type"] != "extra_forbidden")
        place = _place_of_value(raw, first)
        alike = [e for e in errors if _place_of_value(raw, e) == place]
        named = ".".join(map(str, place))
        if first["type"] == "extra_forbidden":
            hint = closest(str(place[-1]), _model_at(place, model).model_fields)
            what = f"unknown key {named!r}; {hint}"
        else:
            what = f"{named}: {_problem_of_union(alike)}".removeprefix(": ")
        if len(place) > 1 and place[0] in origins and isinstance(place[1], int):
            place = (place[0], origins[place[0]][place[1]], *place[2:])
        raise UsageError(f"{where}{_line_clause(node, place)}: {what}") from error


def _place_of_value(raw: object, error: Mapping[str, Any]) -> tuple[int | str, ...]:
    """Returns where the value stands that an error of pydantic is about, as keys and
    indices. For one member of a union, pydantic's place has the member's name behind it
    (`margin.bool`), which is no key of the mapping `raw` and is left out. Pydantic's
    place as it is for a missing value, and where `raw` has no part of it."""
    place: tuple[int | str, ...] = error["loc"]
    if error["type"] == "missing":
        return place
    length = 0
    for number, part in enumerate(place, 1):
        if isinstance(raw, Mapping):
            has_part = part in raw
        else:
            has_part = isinstance(raw, list) and part in range(len(raw))
        if has_part:
            raw, length = cast(Any, raw)[part], number
    return place[:length] if length else place


def _problem_of_union(errors: Sequence[Mapping[str, Any]]) -> str:
    """Returns what is wrong with a value, by pydantic's errors about it: one, or one for
    each member of its union. The member of the value's own type counts alone. Where there
    is none, all that was expected is named (`expected a valid integer or a valid
    string`), or the first error where one names nothing expected."""
    of_type = [e for e in errors if e["loc"][-1:] == (type(e["input"]).__name__,)]
    words = [problem_of(e) for e in of_type or errors]
    if len(words) == 1 or not all(text.startswith("expected ") for text in words):
        return words[0]
    expected = dict.fromkeys(text.partition(", got ")[0][9:] for text in words)
    _, comma, got = words[0].partition(", got ")
    return f"expected {' or '.join(expected)}{comma}{got}"


def problem_of(error: Mapping[str, object]) -> str:
    """Returns what is wrong with a value, by one of pydantic's errors: `expected a valid
    integer, got 'x'`, without the value where it is long; `expected a value, got none`
    for a missing one; any other words, as those of a validator of numdev, as they are."""
    words = str(error["msg"]).replace("Value error, ", "", 1)
    if error["type"] == "missing":
        return "expected a value, got none"
    if not words.startswith("Input should be "):
        return words
    got = repr(error["input"])
    clause = f", got {got}" if len(got) <= LONGEST_VALUE else ""
    return f"expected {words.removeprefix('Input should be ')}{clause}"


def _line_clause(node: yaml.Node | None, place: Sequence[int | str]) -> str:
    """Returns `, line N` for a place in a file's tree, given by keys and indices; for a
    place that the file does not have, the line of the part of it that it has. Empty
    without a tree."""
    if node is None:
        return ""
    mark = node.start_mark
    for part in place:
        if isinstance(node, yaml.MappingNode):
            # A level that only the model has is in no file.
            for key, value in node.value:
                if key.value == str(part):
                    mark, node = key.start_mark, value
        elif (
            isinstance(node, yaml.SequenceNode)
            and isinstance(part, int)
            and part < len(node.value)
        ):
            node = node.value[part]
            mark = node.start_mark
    return f", line {mark.line + 1}"


def _named(entry: object, part: str, at: int) -> object:
    """Returns an entry of `cases` with a name. One without gets `case` if it is the first
    (`at` is 0), else `case 2` and so on. Entries of `kernels`, and any that are no
    mappings, are returned as they are."""
    if part != "cases" or not isinstance(entry, dict) or "name" in entry:
        return entry
    return {"name": f"case {at + 1}" if at else "case", **entry}


def expand_grid(entry: object, part: str, where: str) -> Iterator[object]:
    """Yields the cells of one grid entry of `cases` or `kernels` (`part`). Every list in
    it, and in a case's `inputs` or a kernel's `options`, is an axis. An entry without a
    list, and one that is no mapping, is its own cell.

    The name of a case's cell gets its place on every axis (`name/heads=2,seq_len=64`),
    which also goes into `axes`. A value of the axis `inputs` may have axes itself. Raises
    UsageError for an empty axis; `where`: what the message calls the entry."""
    if not isinstance(entry, dict):
        yield entry
        return
    nested = "inputs" if part == "cases" else "options"
    inner = entry[nested] if isinstance(entry.get(nested), dict) else {}
    axes: dict[tuple[str, ...], list[object]] = {}
    axes |= {(key,): value for key, value in entry.items() if isinstance(value, list)}
    axes |= {
        (nested, key): value for key, value in inner.items() if isinstance(value, list)
    }
    for path, values in axes.items():
        if not values:
            raise UsageError(
                f"{where}: {'.'.join(path)} is an empty list", hint="give it values"
            )
    for chosen in itertools.product(*axes.values()):
        cell = {**entry, nested: {**inner}} if inner else dict(entry)
        for path, value in zip(axes, chosen, strict=True):
            (cell[nested] if len(path) > 1 else cell)[path[-1]] = value
        if axes and part == "cases":
            place = {
                path[-1]: _value_in_name(value)
                for path, value in zip(axes, chosen, strict=True)
            }
            cell["axes"] = {**cell.get("axes", {}), **place}
            if isinstance(cell.get("name"), str):  # validation reports any other
                shown = ",".join(f"{axis}={value}" for axis, value in place.items())
                cell["name"] = f"{cell['name']}/{shown}"
        again = (nested,) in axes and isinstance(cell[nested], dict)
        yield from expand_grid(cell, part, where) if again else (cell,)


def _value_in_name(value: object) -> str:
    """Returns a value as a cell's name has it: its `str`; of a regime (a mapping) its
    name and options (`ties(share=0.5)`), without those that are lists or mappings; of a
    list `list`."""
    if not isinstance(value, dict):
        return type(value).__name__ if isinstance(value, list) else str(value)
    nested = (list, dict)
    options = [
        f"{k}={v}" for k, v in value.items() if k != "name" and not isinstance(v, nested)
    ]
    return (
        f"{value.get('name')}({','.join(options)})" if options else str(value.get("name"))
    )


def bundled_path(name: str) -> Path:
    """Returns the path of a file of `configs/`, from the source tree or from inside the
    installed package. Raises UsageError where it is missing."""
    for folder in (
        Path(__file__).parent / "configs",
        Path(__file__).parent.parent / "configs",
    ):
        if (folder / name).is_file():
            return folder / name
    raise UsageError(
        f"the bundled configuration {name} is missing", hint="reinstall numdev"
    )


def _model_at(place: Sequence[int | str], model: type[BaseModel]) -> type[BaseModel]:
    """Returns the model that has the last key of `place`, for example of
    cases.0.inputs.KEY. Parts that no model has as a field are passed over."""
    for part in place[:-1]:
        if part in model.model_fields:
            parts = parts_of(model.model_fields[str(part)].annotation)
            models = (
                x for x in parts if isinstance(x, type) and issubclass(x, BaseModel)
            )
            model = next(models, model)
    return model


def parts_of(annotation: object) -> Iterator[object]:
    """Yields an annotation, all types within it, and the metadata of `Annotated`: of
    `tuple[Case, ...]` the tuple, Case and Ellipsis."""
    yield annotation
    for part in (*get_args(annotation), *getattr(annotation, "metadata", ())):
        yield from parts_of(part)
