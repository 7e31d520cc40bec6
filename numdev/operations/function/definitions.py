"""Definition files: the axes, inputs and outputs of a kernel in JSON, with the source of
a reference `run`, of which a solution is JSON with sources and an entry point.

Axes are constant, or variable and chosen by a check. A solution of destination-passing
style gets memory for its outputs, filled with NaN, after its inputs. Integer inputs
(indices, offsets) and scalars have a meaning that a definition does not tell: they come
from a file of workloads or a function."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from numdev.errors import UsageError, one_line
from numdev.operations.function.inputs import Make
from numdev.operations.function.surroundings import Surroundings
from numdev.operations.function.trees import Arguments
from numdev.yamlfile import problem_of

RUN = "run"
REFERENCE_FILE = "definition_reference.py"
PYTHON = ("python", "triton")  # languages of solutions that need no build
SIZES = (24, 40, 56, 72)  # of variable axes, in order, where nothing says them


R = TypeVar("R", bound="_Loose")


class _Loose(BaseModel):
    """A record of a file that may have keys which a check does not read."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class DefinedAxis(_Loose):
    """An axis: of `value` places; None: of as many as a call has."""

    type: str
    value: int | None = None


class TensorForm(_Loose):
    """A tensor by the names of its axes and of its dtype; a scalar where `shape` is
    None."""

    shape: tuple[str, ...] | None
    dtype: str


class Definition(_Loose):
    """A definition file: axes, inputs and outputs by name, and the source of the
    reference."""

    name: str
    axes: dict[str, DefinedAxis]
    inputs: dict[str, TensorForm]
    outputs: dict[str, TensorForm]
    reference: str

    @property
    def variable(self) -> list[str]:
        """Returns the names of the variable axes."""
        return [name for name, axis in self.axes.items() if axis.value is None]

    def sizes(self, chosen: Mapping[str, int]) -> dict[str, int]:
        """Returns the size of each axis by name: of a variable axis the one in `chosen`,
        or else one of SIZES in turn; of a constant axis its value. Raises UsageError
        where `chosen` names a constant axis, or none of the definition's. A size is not
        checked, and may be 0."""
        for name in chosen:
            if name not in self.variable:
                axes = ", ".join(self.variable)
                raise UsageError(f"shape: expected a variable axis of {axes}, got {name}")
        defaults = {name: SIZES[i % len(SIZES)] for i, name in enumerate(self.variable)}
        constant = {n: axis.value for n, axis in self.axes.items() if axis.value}
        return {**defaults, **constant, **chosen}


class SolutionFile(_Loose):
    """One source file of a solution, by its path in the solution."""

    path: str
    content: str


class BuildForm(_Loose):
    """How a solution is run: its language, its entry point `FILE::NAME`, and whether it
    writes into memory that it gets for its outputs."""

    language: str
    entry_point: str
    destination_passing_style: bool = True


class Solution(_Loose):
    """A solution file."""

    name: str
    spec: BuildForm
    sources: tuple[SolutionFile, ...]

    def unpacked(self, folder: Path) -> str:
        """Writes the sources into a folder, which is there, and returns the target
        `FILE.py:NAME` of the entry point. Raises UsageError for a language that needs a
        build, a path outside the folder, and an entry point that is not `FILE::NAME` of a
        source; OSError where a source cannot be written, as where its path is a
        folder's."""
        if self.spec.language not in PYTHON:
            raise UsageError(
                f"solution {self.name}: expected python or triton, got "
                f"{self.spec.language}",
                hint="build it, and check FILE.py:function that calls it",
            )
        for source in self.sources:
            path = PurePosixPath(source.path)
            if path.is_absolute() or ".." in path.parts:
                raise UsageError(
                    f"solution {self.name}: {path}: expected a relative path"
                )
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source.content)
        file_name, _, name = self.spec.entry_point.partition("::")
        if not name or file_name not in {source.path for source in self.sources}:
            what = f"expected FILE::NAME of its sources, got {self.spec.entry_point}"
            raise UsageError(f"solution {self.name}: entry point: {what}")
        return f"{folder / file_name}:{name}"


@dataclass(frozen=True, kw_only=True)
class DefinitionSurroundings(Surroundings):
    """What a solution finds around it: it is called with inputs in order, and with
    `passes_outputs` with memory for the outputs after the inputs."""

    definition: Definition
    passes_outputs: bool = False

    def function_at(self, target: str) -> Callable[..., object]:
        """Returns the solution's function, which takes its inputs by place or name and
        returns its outputs by name, whether it returns them or writes into memory that it
        gets. Raises UsageError where the file cannot be imported or lacks the function.
        The returned function raises what the solution raises, and KeyError as
        `memory`."""
        function = super().function_at(target)

        def call(*arguments: object, **named: object) -> object:
            inputs = in_order(self.definition, arguments, named)
            outputs: list[Tensor] = []
            if self.passes_outputs:
                outputs = self.memory(inputs)
            returned = function(*inputs, *outputs)
            return by_name(self.definition, outputs if outputs else returned)

        return call

    def memory(self, inputs: Sequence[object]) -> list[Tensor]:
        """Returns memory for the outputs of a call, in the definition's order, filled
        with NaN, of integers with the largest. It is on the device of the first tensor
        among the inputs. Raises KeyError for a variable axis that no input has,
        UsageError for a dtype that PyTorch lacks, TypeError for a complex one."""
        sizes = axes_of(self.definition, inputs)
        tensors = (x for x in inputs if isinstance(x, Tensor))
        device = next((x.device for x in tensors), torch.device("cpu"))
        return [
            _unwritten(tuple(sizes[a] for a in form.shape or ()), form, device)
            for form in self.definition.outputs.values()
        ]


def read_definition(path: Path) -> Definition:
    """Reads a definition file. Raises UsageError for a file that cannot be read or is
    none, a tensor with an axis that is not among the definition's, and a constant axis
    below 1."""
    definition = _read(path, Definition)
    for axis_name, axis in definition.axes.items():
        if axis.value is not None and axis.value < 1:
            what = f"axes.{axis_name}: expected a positive size, got {axis.value}"
            raise UsageError(f"{path}: {what}")
    for name, form in {**definition.inputs, **definition.outputs}.items():
        for axis_name in form.shape or ():
            if axis_name not in definition.axes:
                axes = ", ".join(definition.axes)
                what = f"{name}: expected axes of {axes}, got {axis_name}"
                raise UsageError(f"{path}: {what}")
    return definition


def read_solution(path: Path) -> Solution:
    """Reads a solution file. Raises UsageError for a file that cannot be read or is
    none."""
    return _read(path, Solution)


def _read(path: Path, record: type[R]) -> R:
    """Returns the record in a JSON file. Raises UsageError for a file that cannot be
    read, or does not hold such a record."""
    try:
        return record.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}." for part in first["loc"]).rstrip(".")
        place = f"{path}: {where}" if where else str(path)
        raise UsageError(f"{place}: {problem_of(first)}") from error


def reference_of(definition: Definition, folder: Path) -> str:
    """Writes the source of a definition's reference into a folder, as REFERENCE_FILE, and
    returns its target `FILE.py:run`."""
    file = folder / REFERENCE_FILE
    file.write_text(definition.reference)
    return f"{file}:{RUN}"


def in_order(
    definition: Definition, arguments: Sequence[object], named: Mapping[str, object]
) -> list[object]:
    """Returns the inputs of a call: `arguments` as they are, then the `named` ones in the
    definition's order. Nothing is checked: what is missing, or not an input of the
    definition, is left out."""
    return [*arguments, *(named[name] for name in definition.inputs if name in named)]


def by_name(definition: Definition, returned: object) -> dict[str, object]:
    """Returns what a function returned, by the names of the outputs: a mapping as it is,
    with its keys as text; a tuple or list in order; anything else as the only output.
    Outputs beyond the definition's have their places as names (`2`); missing ones are
    left out."""
    if isinstance(returned, Mapping):
        return {str(name): x for name, x in returned.items()}
    every = list(returned) if isinstance(returned, tuple | list) else [returned]
    names = [*definition.outputs, *map(str, range(len(definition.outputs), len(every)))]
    return dict(zip(names, every, strict=False))


def axes_of(definition: Definition, inputs: Sequence[object]) -> dict[str, int]:
    """Returns the sizes of the axes by name: constant ones, and those of a call's inputs,
    which are in the definition's order. A variable axis that no input has is left out. Of
    an axis with several sizes the last input's counts."""
    sizes = {n: axis.value for n, axis in definition.axes.items() if axis.value}
    for form, x in zip(definition.inputs.values(), inputs, strict=False):
        if form.shape is not None and isinstance(x, Tensor):
            sizes |= dict(zip(form.shape, x.shape, strict=False))
    return {name: int(size) for name, size in sizes.items()}


def _unwritten(shape: Sequence[int], form: TensorForm, device: torch.device) -> Tensor:
    """Returns memory for an output, filled with NaN, of integers with the largest, of
    bools with True. Raises UsageError for a dtype that PyTorch lacks, TypeError for a
    complex one."""
    x = torch.empty(tuple(shape), dtype=_dtype(form), device=device)
    if x.dtype.is_floating_point:
        return x.fill_(torch.nan)
    return x.fill_(1 if x.dtype == torch.bool else torch.iinfo(x.dtype).max)


def _dtype(form: TensorForm) -> torch.dtype:
    """Returns the dtype of a tensor. Raises UsageError where PyTorch has none of this
    name."""
    dtype = getattr(torch, form.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"definition: dtype {form.dtype} is none of PyTorch's")
    return dtype


# --- inputs ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One call of a definition: sizes of its axes, and by name the inputs that are no
    random numbers."""

    axes: Mapping[str, int]
    values: Mapping[str, object] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Returns the sizes of the workload's axes as text, `M=64, N=32`; `inputs`
        without axes."""
        return ", ".join(f"{name}={n}" for name, n in self.axes.items()) or "inputs"


def workloads_of(path: Path, definition: Definition) -> list[Workload]:
    """Returns the calls in a file of workloads, one JSON object in a line; empty lines
    are passed over. Tensors in safetensors files are read from their paths beside the
    file or in a folder above it. Raises UsageError for a line that is no workload, a
    safetensors file that is not there, and a file without a line; OSError where `path`
    cannot be read, UnicodeDecodeError where it is no text, SafetensorError as
    `_given_value`."""
    calls: list[Workload] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            data = data.get("workload") or data
            values = {
                name: _given_value(entry, path)
                for name, entry in data["inputs"].items()
                if entry["type"] != "random"
            }
            axes = {str(name): int(n) for name, n in data["axes"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path}: line {number}: {one_line(error)}") from error
        calls.append(Workload(axes=axes, values=values))
    if not calls:
        raise UsageError(f"{path}: expected a workload in each line, got no line")
    return calls


def _given_value(entry: Mapping[str, object], path: Path) -> object:
    """Returns the number or the tensor that an input of a workload names. Raises
    UsageError for a safetensors file that is not there, KeyError for an entry that lacks
    a key, SafetensorError for a file that is none and for a tensor that it lacks."""
    if entry["type"] == "scalar":
        return entry["value"]
    from safetensors import safe_open

    named = str(entry["path"])
    for folder in (path.parent, *path.resolve().parents):
        if (folder / named).is_file():
            with safe_open(folder / named, framework="pt") as stored:
                return stored.get_tensor(str(entry["tensor_key"]))
    raise UsageError(f"{path}: {named}: no such file beside it or above")


def calls_of_workloads(
    definition: Definition, workloads: Sequence[Workload], device: str
) -> Make:
    """Returns a function that makes the calls of a seed, one for each workload. A real
    floating-point input that a workload lacks is normal numbers of the seed. The function
    raises UsageError where a workload lacks an integer or a scalar, and where it names an
    axis that is not variable; it raises RuntimeError for a size below 0 or beyond
    memory."""

    def make(seed: int) -> list[Arguments]:
        """Returns the calls of a seed."""
        generator = torch.Generator().manual_seed(seed)
        return [
            Arguments(
                positional=tuple(_inputs(definition, each, generator, device)),
                names=tuple(definition.inputs),
            )
            for each in workloads
        ]

    return make


def _inputs(
    definition: Definition, call: Workload, generator: torch.Generator, device: str
) -> Iterator[object]:
    """Yields the inputs of a call in the definition's order: the workload's own, or else
    normal numbers of its axes' sizes, drawn from `generator`. Tensors are on `device`.
    Raises UsageError for an integer or a scalar that the workload lacks, an axis that is
    not variable, and a dtype that PyTorch lacks; RuntimeError for a size below 0 or
    beyond memory."""
    sizes = definition.sizes(call.axes)
    for name, form in definition.inputs.items():
        value = call.values.get(name)
        if value is None and form.shape is not None and _dtype(form).is_floating_point:
            shape = [sizes[axis] for axis in form.shape]
            value = torch.randn(shape, generator=generator).to(_dtype(form))
        if value is None:
            kind = "a scalar" if form.shape is None else form.dtype
            raise UsageError(
                f"definition {definition.name}: {name} is {kind}, whose meaning it does "
                "not tell",
                hint="--inputs FILE.jsonl (workloads) or FILE.py:function of a seed",
            )
        yield value.to(device) if isinstance(value, Tensor) else value
