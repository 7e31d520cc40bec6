"""Definition files: the axes, inputs and outputs of a kernel in JSON, with the source of
a reference `run`, of which a solution is JSON with sources and an entry point.

Axes are constant, or variable and chosen by a check. A solution of destination-passing
style gets memory for its outputs, filled with NaN, after its inputs. Integer inputs
(indices, offsets) and scalars have a meaning that a definition does not tell: they come
from a file of workloads or a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, TypeVar

import torch
from pydantic import Field, ValidationError
from pydantic_core import from_json
from torch import Tensor

from numdev.errors import UsageError, one_line
from numdev.exact.rounded_results import values_format
from numdev.operations.function.inputs import Make, normal_numbers
from numdev.operations.function.shapes_and_dtypes import INTEGERS, short_name
from numdev.operations.function.task_environment import Surroundings
from numdev.operations.function.trees import Arguments
from numdev.yamlfile import Loose, problem_of

RUN = "run"
REFERENCE_FILE = "definition_reference.py"
PYTHON = ("python", "triton")  # languages of solutions that need no build
SIZES = (24, 40, 56, 72)  # of variable axes, in order, where nothing says them


R = TypeVar("R", bound="Loose")


class DefinedAxis(Loose):
    """An axis: of `value` places; None: of as many as a call has."""

    type: str
    value: int | None = None


class TensorForm(Loose):
    """A tensor by the names of its axes and of its dtype; a scalar where `shape` is
    None."""

    shape: tuple[str, ...] | None
    dtype: str


class Definition(Loose):
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
        where `chosen` names a constant axis, or none of the definition's, and for a size
        below 1."""
        for name, size in chosen.items():
            if name not in self.variable:
                axes = ", ".join(self.variable)
                raise UsageError(f"shape: expected a variable axis of {axes}, got {name}")
            if size < 1:
                raise UsageError(f"shape: expected a positive size of {name}, got {size}")
        defaults = {name: SIZES[i % len(SIZES)] for i, name in enumerate(self.variable)}
        constant = {n: axis.value for n, axis in self.axes.items() if axis.value}
        return {**defaults, **constant, **chosen}


class SolutionFile(Loose):
    """One source file of a solution, by its path in the solution."""

    path: str
    content: str


class BuildForm(Loose):
    """How a solution is run: its language, its entry point `FILE::NAME`, and whether it
    writes into memory that it gets for its outputs."""

    language: str
    entry_point: str
    destination_passing_style: bool = True


class Solution(Loose):
    """A solution file."""

    name: str
    spec: BuildForm
    sources: tuple[SolutionFile, ...]

    def unpacked(self, folder: Path) -> str:
        """Writes the sources into a folder, which is there, and returns the target
        `FILE.py:NAME` of the entry point. Raises UsageError for a language that needs a
        build, a path outside the folder, an entry point that is not `FILE::NAME` of a
        source, and where a source cannot be written, as where its path is a folder's."""
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
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(source.content, encoding="utf-8")
            except (OSError, ValueError) as error:  # ValueError: a null byte
                why = f"{path}: cannot be written ({_why(error)})"
                raise UsageError(f"solution {self.name}: {why}") from error
        file_name, _, name = self.spec.entry_point.partition("::")
        if not name or file_name not in {source.path for source in self.sources}:
            what = f"expected FILE::NAME of its sources, got {self.spec.entry_point}"
            raise UsageError(f"solution {self.name}: entry point: {what}")
        return f"{folder / file_name}:{name}"


@dataclass(frozen=True, kw_only=True)
class DefinitionSurroundings(Surroundings):
    """What a solution finds around it: it is called with inputs in order, and with
    `passes_outputs` with memory for the outputs after the inputs. Raises UsageError for
    an output of which no memory can be made then, since PyTorch or numdev lacks its
    dtype."""

    definition: Definition
    passes_outputs: bool = False

    def __post_init__(self) -> None:
        if self.passes_outputs:  # what is told here no solution is blamed for
            for form in self.definition.outputs.values():
                _unwritten((), form, torch.device("cpu"))

    def function_at(self, target: str) -> Callable[..., object]:
        """Returns the solution's function, which takes its inputs by place or name and
        returns its outputs by name, whether it returns them or writes into memory that it
        gets. Raises UsageError where the file cannot be imported or lacks the function.
        The returned function raises what the solution raises, and UsageError as
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

    def check_outputs(
        self, inputs: Sequence[object], outputs: Mapping[str, object]
    ) -> None:
        """Raises UsageError where a reference returns other outputs than the definition
        names; with `passes_outputs` also where one has another dtype or shape than the
        memory that solutions get for it. A single number may have any shape."""
        name, forms = self.definition.name, self.definition.outputs
        if set(outputs) != set(forms):
            what = f"expected outputs {', '.join(forms)}, its run returns "
            raise UsageError(f"definition {name}: {what}{', '.join(outputs) or 'none'}")
        sizes = axes_of(self.definition, inputs)
        for output, form in forms.items():
            x = outputs[output]
            if not self.passes_outputs or not isinstance(x, Tensor):
                continue
            shape = [sizes.get(axis, -1) for axis in form.shape or ()]
            fits = list(x.shape) == shape or x.numel() == math.prod(shape) == 1
            if not fits or x.dtype != _dtype(form):
                what = f"{output}: expected {short_name(_dtype(form))} {shape}, its run "
                got = f"returns {short_name(x.dtype)} {list(x.shape)}"
                raise UsageError(f"definition {name}: {what}{got}")

    def memory(self, inputs: Sequence[object]) -> list[Tensor]:
        """Returns memory for the outputs of a call, in the definition's order, filled
        with NaN, of integers with the largest, of bools with True. It is on the device of
        the first tensor among the inputs, on the CPU without one. `inputs`: in the
        definition's order. Raises UsageError where the inputs lack an axis of an output,
        and for a dtype that PyTorch or numdev lacks."""
        sizes = axes_of(self.definition, inputs)
        tensors = (x for x in inputs if isinstance(x, Tensor))
        device = next((x.device for x in tensors), torch.device("cpu"))
        try:
            return [
                _unwritten([sizes[axis] for axis in form.shape or ()], form, device)
                for form in self.definition.outputs.values()
            ]
        except KeyError as error:
            what = f"no input has the axis {error} of an output"
            raise UsageError(f"definition {self.definition.name}: {what}") from error


def read_definition(path: Path) -> Definition:
    """Reads a definition file. Raises UsageError for a file that cannot be read or is
    none or has no output, a tensor with an axis that is not among the definition's, a
    constant axis below 1, and an output with a variable axis that no input has: nothing
    tells its size."""
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
    if not definition.outputs:
        raise UsageError(f"{path}: outputs: expected one at least, got none")
    told_by_inputs = {a for form in definition.inputs.values() for a in form.shape or ()}
    for name, form in definition.outputs.items():
        for axis_name in form.shape or ():
            if axis_name in definition.variable and axis_name not in told_by_inputs:
                what = f"{name}: expected axes of the inputs, got {axis_name}"
                raise UsageError(f"{path}: {what}", hint="make it constant")
    return definition


def read_solution(path: Path) -> Solution:
    """Reads a solution file. Raises UsageError for a file that cannot be read or is
    none."""
    return _read(path, Solution)


def _read(path: Path, record: type[R]) -> R:
    """Returns the record in a JSON file. Raises UsageError for a file that cannot be
    read, or does not hold such a record."""
    try:
        return record.model_validate_json(_bytes_of(path))
    except ValidationError as error:
        raise UsageError(f"{path}: {_first_problem(error)}") from error


def _bytes_of(path: Path) -> bytes:
    """Returns the content of a file. Raises UsageError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {_why(error)}") from error


def _why(error: OSError | ValueError) -> str:
    """Returns why a file cannot be read or written, without its path."""
    return getattr(error, "strerror", None) or str(error)


def _first_problem(error: ValidationError) -> str:
    """Returns the first thing that is wrong with a record, and where in it:
    `axes.n.type: expected a valid string, got 3`."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {problem_of(first)}" if where else problem_of(first)


def reference_of(definition: Definition, folder: Path) -> str:
    """Writes the source of a definition's reference into a folder, which is there, as
    REFERENCE_FILE, and returns its target `FILE.py:run`. Raises OSError where it cannot
    be written."""
    file = folder / REFERENCE_FILE
    file.write_text(definition.reference, encoding="utf-8")
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
    bools with True. Raises UsageError for a dtype that PyTorch or numdev lacks."""
    x = torch.empty(tuple(shape), dtype=_dtype(form), device=device)
    if x.dtype.is_floating_point:
        return x.fill_(torch.nan)
    if x.dtype.is_complex:
        return x.fill_(complex(torch.nan, torch.nan))
    return x.fill_(1 if x.dtype == torch.bool else torch.iinfo(x.dtype).max)


def _dtype(form: TensorForm) -> torch.dtype:
    """Returns the dtype of a tensor. Raises UsageError where PyTorch has none of this
    name, and for one of which numdev does not read the values, such as a quantized
    one."""
    dtype = getattr(torch, form.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"definition: dtype {form.dtype} is none of PyTorch's")
    if dtype.is_floating_point or dtype.is_complex:
        values_format(dtype)
    elif dtype not in INTEGERS:
        raise UsageError(f"definition: dtype {form.dtype} is none that numdev reads")
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


class _RandomInput(Loose):
    """An input of a workload that is random numbers."""

    type: Literal["random"]


class _ScalarInput(Loose):
    """An input of a workload that is a number."""

    type: Literal["scalar"]
    value: bool | int | float


class _StoredInput(Loose):
    """An input of a workload that is a tensor of a safetensors file."""

    type: Literal["safetensors"]
    path: str
    tensor_key: str

    def read(self, beside: Path) -> Tensor:
        """Returns the tensor, from the file that lies at `path` in the folder of the file
        `beside`, or in one above it. Raises UsageError where there is no such file, and
        for one that is no safetensors file or lacks the tensor."""
        from safetensors import safe_open

        try:
            for folder in (beside.parent, *beside.resolve().parents):
                if (folder / self.path).is_file():
                    with safe_open(folder / self.path, framework="pt") as stored:
                        tensor: Tensor = stored.get_tensor(self.tensor_key)
                        return tensor
        except Exception as error:  # of the file's reader
            raise UsageError(f"{self.path}: {one_line(error)}") from error
        raise UsageError(f"{self.path}: no such file beside {beside} or above")


_WorkloadInput = _RandomInput | _ScalarInput | _StoredInput


class _WorkloadForm(Loose):
    """A workload as it stands in a file."""

    axes: dict[str, int]
    inputs: dict[str, Annotated[_WorkloadInput, Field(discriminator="type")]]


def workloads_of(path: Path, definition: Definition) -> list[Workload]:
    """Returns the calls in a file of workloads, one JSON object in a line; empty lines
    are passed over. Tensors in safetensors files are read from their paths beside the
    file or in a folder above it. Raises UsageError for a file that cannot be read or has
    no line, and, with its number, for a line that is no workload of the definition."""
    calls: list[Workload] = []
    for number, line in enumerate(_bytes_of(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            calls.append(_workload(line, path, definition))
        except ValidationError as error:
            why = _first_problem(error)
            raise UsageError(f"{path}: line {number}: {why}") from error
        except (ValueError, UsageError) as error:
            raise UsageError(f"{path}: line {number}: {error}") from error
    if not calls:
        raise UsageError(f"{path}: expected a workload in each line, got no line")
    return calls


def _workload(line: bytes, path: Path, definition: Definition) -> Workload:
    """Returns the workload of a line in the file `path`, which stands there as it is or
    under the key `workload`. Raises ValueError for what is no JSON or no workload. Raises
    UsageError for axes that are not the definition's variable ones, sizes below 1, inputs
    that the definition lacks or that are not as it says, and tensors that cannot be
    read."""
    data = from_json(line)
    form = _WorkloadForm.model_validate(
        data.get("workload") or data if isinstance(data, dict) else data
    )
    sizes = definition.sizes(form.axes)
    if lacking := [name for name in definition.variable if name not in form.axes]:
        raise UsageError(f"axes: expected a size of {lacking[0]}, got none")
    values: dict[str, object] = {}
    for name, entry in form.inputs.items():
        if name not in definition.inputs:
            names = ", ".join(definition.inputs)
            raise UsageError(f"inputs: expected inputs of {names}, got {name}")
        if not isinstance(entry, _RandomInput):
            value = entry.read(path) if isinstance(entry, _StoredInput) else entry.value
            _check_form(name, value, definition.inputs[name], sizes)
            values[name] = value
    return Workload(axes=form.axes, values=values)


def _check_form(
    name: str, value: object, form: TensorForm, sizes: Mapping[str, int]
) -> None:
    """Raises UsageError for an input of a workload that has not the shape and dtype which
    its definition says. One of a dtype that PyTorch lacks, and which others stand for,
    passes. `value`: a tensor or a number; `sizes`: of all axes."""
    expected, got = "a number", "a number"
    if form.shape is not None:
        dtype = getattr(torch, form.dtype, None)
        if not isinstance(dtype, torch.dtype):
            return
        expected = f"{short_name(dtype)} {[sizes[axis] for axis in form.shape]}"
    if isinstance(value, Tensor):
        got = f"{short_name(value.dtype)} {list(value.shape)}"
    if got != expected:
        raise UsageError(f"{name}: expected {expected}, got {got}")


def calls_of_workloads(
    definition: Definition, workloads: Sequence[Workload], device: str
) -> Make:
    """Returns a function that makes the calls of a seed, one for each workload. A real
    floating-point input that a workload lacks is normal numbers of the seed. The function
    raises UsageError where a workload lacks any other input, where it names an axis that
    is not variable, for a size below 1 or beyond memory, and for a dtype that PyTorch or
    numdev lacks."""

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
    Raises UsageError for an integer, a complex tensor or a scalar that the workload
    lacks, an axis that is not variable, a size below 1 or beyond memory, and a dtype that
    PyTorch or numdev lacks."""
    sizes = definition.sizes(call.axes)
    for name, form in definition.inputs.items():
        value = call.values.get(name)
        if value is None and form.shape is not None and _dtype(form).is_floating_point:
            shape = [sizes[axis] for axis in form.shape]
            value = normal_numbers(name, shape, generator).to(_dtype(form))
        if value is None:
            kind = "a scalar" if form.shape is None else form.dtype
            raise UsageError(
                f"definition {definition.name}: {name} is {kind}, whose meaning it does "
                "not tell",
                hint="--inputs FILE.jsonl (workloads) or FILE.py:function of a seed",
            )
        yield value.to(device) if isinstance(value, Tensor) else value
