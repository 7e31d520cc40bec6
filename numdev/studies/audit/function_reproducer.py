"""A failed check of a function as a script of its own: it imports the function, reads
inputs and exact results from a file beside it, and needs nothing of numdev.

The call that fails is made smaller as long as the same tensor fails. All axes of one
length are cut together, so that equal lengths stay equal. A length that a number among
the arguments is equal to is a constant, and stays."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import math
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from numdev.cases import may_overlap
from numdev.errors import MeasurementError, NumdevError, UsageError, one_line
from numdev.gate.judgement import RUNS
from numdev.gate.rules import Rules
from numdev.kernels import importable_path
from numdev.operations.function.function_runs import FunctionRun, cotangent_numbers
from numdev.operations.function.judged_call import FunctionCall, Judge
from numdev.operations.function.reference import FunctionReference
from numdev.operations.function.trees import Arguments
from numdev.operations.function.yardstick import LEAST_ELEMENT, OF_U
from numdev.report import Finding, Standing
from numdev.report.safe_text import plain
from numdev.studies.audit.finding_reproducers import FOLDER
from numdev.studies.audit.functions import (
    Draw,
    FormatPart,
    calls_of_part,
)
from numdev.studies.audit.isolation import Failure
from numdev.studies.audit.reproducer_script import literal, literal_sequence, rendered
from numdev.studies.audit.tolerance_power import tests_of_runs
from numdev.tensor_properties import GRADIENT

SECONDS = 5.0  # how long a call is made smaller
FIGURES = {
    "error": "rms error over what the reference's own rounding explains",
    "slice": "largest rms error of a place of an axis over what is explained",
    "element": "largest error of an element over what is explained",
    "slope": "slope of the error on the exact result, in unit roundoffs",
    "shift": "mean error over the result's size, in unit roundoffs",
    "mismatches": "integers that are not the reference's",
    "nonfinite": "elements that are finite or not against the exact result",
    "form": "shape, dtype and what is done to the inputs",
    "raises": "an exception",
}
# By the rule that fails, the figure that a script shows; in this order of choice.
BY_METRIC = {
    "form": "form",
    "nonfinite": "nonfinite",
    "mismatches": "mismatches",
    "reference_ratio": "error",
    "slice_ratio": "slice",
    "element_ratio": "element",
    "slope": "slope",
    "shift": "shift",
}
COUNTS = ("mismatches", "nonfinite")
SAFETENSORS = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16,
    "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "C64": torch.complex64,
}  # fmt: skip
TINY = 1e-300
# What a template is told of a function that a module has by its name
NO_TARGET: Mapping[str, object] = {
    "file": None, "aside": None, "class_arguments": None, "class_seed": 0,
    "class_dtype": None, "has_state": False, "memory": [], "outputs": [],
    "expected_names": [], "untouched": [], "memory_of": None, "lacking": {},
    "contiguous": False, "remembers": False, "has_buffers": False, "unwritten": False,
}  # fmt: skip
EARLIER = "an earlier call"  # in a finding on a function that returns what it remembers
CLEARLY = 1.2  # times sound code's figure: from there on a call shows the failure


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FailingCall:
    """A call on which a function fails, the function's runs of it, and the figure that
    shows the failure of each tensor."""

    call: FunctionCall
    runs: Sequence[FunctionRun]
    figures: Mapping[str, str]  # by tensor that fails, in which figure

    def judged(self, tensor: str) -> tuple[Judge, Tensor | None]:
        """Returns the judge of a tensor, by its name, and the function's tensor, its
        draws stacked; None in place of a tensor of another form."""
        x = self.call.tensors_of(self.runs)[0][tensor]
        return self.call.judges[tensor].beside(x), x


def write_reproducer(
    finding: Finding, part: FormatPart, rules: Rules, target: str, directory: Path
) -> Path:
    """Writes reproduce.py and tensors.safetensors for a finding on a function into a
    folder of `directory`/reproducers, and returns the path of the script. `target`:
    `FILE.py:name` or `module:name`. A call in which the function did not raise is made
    smaller first, which runs the function many times. Raises NumdevError where the fault
    does not show again, where a script cannot import the function or spell its arguments,
    and where a file or folder cannot be written. Raises what reading the function's file,
    or the reference, raises."""
    script = part.script
    module, name, folder = (
        _import_of(target) if script is None else (script.file.name, script.name, None)
    )
    call, runs = _call_of(finding, part)
    failed = next((x for x in runs if isinstance(x, Failure)), None)
    if failed is not None:
        facts = _facts_of_call(call, "raises", None)
        tensors = _stored_inputs(call)
    else:
        small = _smaller(call, part, rules, finding)
        tensor, figure = next(iter(small.figures.items()))
        facts = _facts_of_call(small.call, figure, tensor)
        facts |= _facts_of_figure(small, tensor, figure)
        facts["remembers"] = EARLIER in finding.whole
        facts["has_buffers"] = bool(small.runs[0].state)
        tensors = {**_stored_inputs(small.call), **_stored_exact(small, tensor)}
        call = small.call
    words = textwrap.wrap(plain(finding.whole), 97)
    if script is not None:
        first = call.draws[0].arguments
        facts |= script.facts(first, call.draws[0].device)
        if facts.get("memory") or facts.get("outputs"):
            facts["expected_names"] = []  # numdev names them
        tensors |= script.stored()
    about = {
        "words": words,
        "about": f"Checked with torch {torch.__version__} on {call.draws[0].device}.",
        "module": module,
        "name": name,
        "folder": folder,
        "source": _source_of(part),
        "device": call.draws[0].device,
        "figures": FIGURES,
        "dtypes": {n: d for n, d in SAFETENSORS.items() if d in _dtypes(tensors)},
    }
    text = rendered("function", {**NO_TARGET, **facts, **about})
    place = directory / FOLDER / finding.folder
    path = _written(place, text, tensors)
    if script is not None:
        script.write_aside(place)
    return path


def _dtypes(tensors: Mapping[str, Tensor]) -> set[torch.dtype]:
    """Returns the dtypes of tensors."""
    return {x.dtype for x in tensors.values()}


def _import_of(target: str) -> tuple[str, str, str | None]:
    """Returns the module, name and folder by which a script imports a function; the
    folder is None for a module that is not found, and for one without a file of its own,
    as a built-in module. Raises UsageError for a function inside another, for one without
    a name, for one of `__main__`, and for a file that does not exist or that no module's
    name can stand for. Raises ModuleNotFoundError where a package that a dotted name
    begins with is not found."""
    module, _, name = importable_path(target).partition(":")
    if not name or "<" in name or module == "__main__":
        what = f"a script cannot import {target}"
        raise UsageError(what, hint="define it with `def` at the top of a module")
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.has_location:
        return module, name, None
    path = Path(spec.origin).resolve()
    levels = module.count(".") + (path.name == "__init__.py")
    return module, name, str(path.parents[levels])


def _source_of(part: FormatPart) -> list[str]:
    """Returns the lines of a reference's source; where it cannot be read the single line
    `(its source is not to be had)`."""
    if part.script is not None and part.script.source:
        return part.script.source.rstrip().splitlines()
    reference = part.asked.reference
    called = reference.forward if isinstance(reference, torch.nn.Module) else reference
    try:
        return textwrap.dedent(inspect.getsource(called)).rstrip().splitlines()
    except (OSError, TypeError):
        return ["(its source is not to be had)"]


def _call_of(
    finding: Finding, part: FormatPart
) -> tuple[FunctionCall, Sequence[FunctionRun | Failure]]:
    """Returns the call that a finding is worst in, and the function's runs of its draws.
    For a finding without a place it is the first call in which the function failed.
    Raises MeasurementError where no call fits."""
    wanted = finding.place.case if finding.place is not None else None
    for call, runs in calls_of_part(part):
        failed = any(isinstance(x, Failure) for x in runs)
        if call.name == wanted or (wanted is None and failed):
            return call, runs
    raise MeasurementError("the finding has no call")


# --- smaller --------------------------------------------------------------------------


def _smaller(
    call: FunctionCall, part: FormatPart, rules: Rules, finding: Finding
) -> FailingCall:
    """Returns the smallest form of a call, reached by halving sizes for SECONDS, in which
    the same tensor fails in the same figure as in the whole call: the finding's, or the
    first that fails. A closer look is taken at the last of these alone; where it does not
    fail then, at the one before. The whole call where no smaller one fails. Raises
    MeasurementError where it does not fail in the whole call."""
    whole = best = _failing(call, part, rules, finding.tensor)
    if whole is None or best is None:
        raise MeasurementError("the failure does not show where its call runs alone")
    wanted, smaller_ones = next(iter(best.figures.items())), []
    deadline = time.monotonic() + SECONDS
    constants = part.script.constants if part.script is not None else frozenset()
    for size in sizes_to_cut(call.draws[0].arguments):
        if size in constants:
            continue
        smaller = size // 2
        while smaller >= 1 and time.monotonic() < deadline:
            candidate = _cut_call(best.call, size, smaller)
            tried = _failing(candidate, part, rules, finding.tensor)
            if tried is None or wanted != next(iter(tried.figures.items())):
                break
            best, size, smaller = tried, smaller, smaller // 2
            smaller_ones.append(best)
    for each in reversed(smaller_ones):
        closely = dataclasses.replace(each.call, looks_closer=True)
        tried = _failing(closely, part, rules, finding.tensor)
        if tried is not None and wanted == next(iter(tried.figures.items())):
            return tried
    return whole


def sizes_to_cut(arguments: Arguments) -> list[int]:
    """Returns the sizes of axes that may be cut: those above 1, each once, the largest
    first, without sizes that a number among the arguments is equal to."""
    numbers = {x for x in tree_leaves(arguments.tree) if isinstance(x, int | float)}
    shapes = [x.shape for x in arguments.leaves().values()]
    sizes = {n for shape in shapes for n in shape}
    return sorted((n for n in sizes if n > 1 and n not in numbers), reverse=True)


def _cut_call(call: FunctionCall, size: int, smaller: int) -> FunctionCall:
    """Returns a call in which every axis of length `size` has its first `smaller` places
    alone, and which is judged as the call itself. Nobody looks closer at what exceeds a
    limit there."""

    def cut(name: str, x: Tensor) -> Tensor:
        """Returns x with the first places of every axis of that length, contiguous."""
        for axis, n in enumerate(x.shape):
            x = x.narrow(axis, 0, smaller) if n == size else x
        return x.contiguous()

    draws = [
        dataclasses.replace(draw, arguments=draw.arguments.mapped(cut))
        for draw in call.draws
    ]
    others = [other.mapped(cut) for other in call.others]
    return dataclasses.replace(call, draws=draws, others=others, looks_closer=False)


def _failing(
    call: FunctionCall, part: FormatPart, rules: Rules, tensor: str | None
) -> FailingCall | None:
    """Runs the function on a call. Returns how it fails where a rule is exceeded in
    `tensor` (None: in any tensor) and the figure is clearly above sound code's. None
    where no rule is, where the function or the reference raises, and where the figure is
    not."""
    draws = [Draw(call=0, seed=x.seed, arguments=x.arguments) for x in call.draws]
    runs = part.run(draws)
    ran = [x for x in runs if isinstance(x, FunctionRun)]
    if len(ran) < len(runs):
        return None
    try:
        tests = list(tests_of_runs(ran, call, part.asked.name, part.format.name, rules))
    except Exception:  # the reference is foreign code, and these are parts of its data
        return None
    figures: dict[str, str] = {}
    for metric, figure in BY_METRIC.items():
        for test in tests:
            is_wrong = test.metric == metric and test.standing is Standing.EXCEEDED
            if is_wrong and test.tensor and (tensor is None or test.tensor == tensor):
                figures.setdefault(test.tensor, figure)
    failing = FailingCall(call=call, runs=ran, figures=figures)
    return failing if figures and _shows(failing) else None


def _shows(failing: FailingCall) -> bool:
    """Whether the figure of the first tensor is more than CLEARLY times that of sound
    code; True for counts and for a wrong form."""
    tensor, figure = next(iter(failing.figures.items()))
    if figure in COUNTS or figure == "form":
        return True
    observed, sound = _observed(failing, tensor, figure)
    return observed > CLEARLY * sound


# --- figures --------------------------------------------------------------------------


def _observed(failing: FailingCall, tensor: str, figure: str) -> tuple[float, float]:
    """Returns a figure of the function's tensor, and the largest figure of sound code.
    Sound code is the reference as PyTorch runs it and its rounded runs; its figure counts
    at least as 1, for a single element as LEAST_ELEMENT, for slope and shift as OF_U.
    Both figures are 0 for a tensor of another form."""
    judge, x = failing.judged(tensor)
    if x is None:
        return 0.0, 0.0
    sound = [figure_of(figure, y, judge) for y in (judge.plain, *judge.rounded)]
    least = {"element": LEAST_ELEMENT, "slope": OF_U, "shift": OF_U}.get(figure, 1.0)
    return figure_of(figure, x, judge), max(least, *sound)


def figure_of(figure: str, x: Tensor, judge: Judge) -> float:
    """Returns a figure of a tensor x, its draws stacked, as the script computes it.
    `figure`: a key of FIGURES, but not `form` or `raises`. `mismatches` and `nonfinite`
    are counts of elements; `slope` and `shift` are in unit roundoffs, without their sign,
    the others in multiples of what is explained. All but the counts leave out the errors
    of elements that are not finite in x or in the exact result. x has at least one
    element."""
    if figure == "mismatches":
        return float((x != judge.truth).sum())
    if figure == "nonfinite":
        return float((x.isfinite() != judge.truth.isfinite()).sum())
    allowed, explained = _allowed(judge)
    usable = judge.truth.isfinite() & x.isfinite()
    error = torch.where(usable, x.double() - judge.truth, 0.0)
    exact = torch.where(usable, judge.truth, 0.0)
    if figure == "error":
        return math.sqrt(float(error.square().sum() / allowed.sum()))
    if figure == "element":
        return float((error.abs() / allowed.sqrt()).max())
    if figure == "slice":
        return max(_largest_of_axis(error, allowed, axis) for axis in range(error.ndim))
    weight = torch.where(usable, 1 / explained, 0.0)
    weight = weight / weight.sum()
    size = float((weight * exact.square()).sum().sqrt())
    along = exact / size if figure == "slope" else torch.ones_like(exact)
    return abs(float((weight * along * error).sum())) / size / judge.format.unit_roundoff


def _largest_of_axis(error: Tensor, allowed: Tensor, axis: int) -> float:
    """Returns the largest rms error of an entry of an axis, over what is allowed for that
    entry. `error`: errors; `allowed`: squared errors."""
    others = [i for i in range(error.ndim) if i != axis]
    sums = [x.sum(others) if others else x for x in (error.square(), allowed)]
    return float((sums[0] / sums[1]).sqrt().max())


def _allowed(judge: Judge) -> tuple[Tensor, Tensor]:
    """Returns two fp64 tensors of squared errors, element by element: those that are
    allowed, and those that the reference's operations explain, at least TINY. Both are 1
    for integers."""
    if judge.errors is None:
        ones = torch.ones(judge.truth.shape, dtype=torch.float64)
        return ones, ones
    explained = judge.errors.mean_square.clamp_min(TINY)
    return torch.maximum(explained, judge.errors.allowed_plain), explained


# --- facts of the template ------------------------------------------------------------


def _facts_of_figure(failing: FailingCall, tensor: str, figure: str) -> dict[str, object]:
    """Returns what a script prints and compares its figure with, by name: the expected
    shape, dtype and device, the function's figure and sound code's, the limit, and the
    unit roundoff. The limit is the geometric mean of the two figures; of a count it is
    one element. For the figure `form` there are, besides shape, dtype and device, the
    facts of `_facts_of_form` in place of numbers."""
    form = failing.call.forms[tensor]
    unit = failing.call.judges[tensor].format.unit_roundoff
    facts: dict[str, object] = {
        "shape": list(form.shape), "dtype": str(form.dtype), "on": form.device,
    }  # fmt: skip
    if figure == "form":
        return {**facts, **_facts_of_form(failing, tensor)}
    observed, sound = _observed(failing, tensor, figure)
    limit = 1.0 if figure in COUNTS else math.sqrt(max(sound, TINY) * observed)
    numbers = {"observed": observed, "sound": sound, "limit": limit, "unit": repr(unit)}
    return {**facts, **numbers}


def _facts_of_form(failing: FailingCall, tensor: str) -> dict[str, object]:
    """Returns what a script looks at where the first run is of another form than the
    reference's: names of what is returned, inputs that are written into, whether the
    tensor is an input that is not, that whose memory is returned, outputs that let no
    gradient back, and whether the tensor is to be contiguous. What is as the reference's
    is empty, None, False or left out."""
    ran, like = failing.runs[0], failing.call.draws[0].plain
    names = list(like.outputs)
    facts: dict[str, object] = {}
    # A named tuple's have a dot, which a script does not spell
    if ran.outputs.keys() != like.outputs.keys() and "." not in "".join(names):
        facts["expected_names"] = names
    facts["untouched"] = ran.wrongly_written(like)
    facts["unwritten"] = tensor in like.written and tensor not in ran.written
    if not like.alias and ran.alias not in {*like.written, *like.buffers}:
        facts["memory_of"] = ran.alias
    lacking = {i: n for i, n in enumerate(names) if n in like.differentiable}
    if like.gradients and ran.outputs.keys() >= like.outputs.keys():
        facts["lacking"] = {
            i: n for i, n in lacking.items() if n not in ran.differentiable
        }
    strides = like.strides.get(tensor)
    if strides is not None:
        alike = torch.empty_strided(
            failing.call.forms[tensor].shape, strides, device="meta"
        )
        facts["contiguous"] = alike.is_contiguous()
    return facts


def _facts_of_call(
    call: FunctionCall, figure: str, tensor: str | None
) -> dict[str, object]:
    """Returns facts for the template, by name: how a script calls the function, and which
    tensor it looks at. Raises UsageError for an argument that has no spelling."""
    first = call.draws[0]
    outputs = list(first.plain.outputs)
    is_gradient = tensor is not None and tensor in first.plain.gradients
    leaves = first.arguments.leaves()
    is_of_module = is_gradient and str(tensor).removesuffix(GRADIENT) not in leaves
    index = None if tensor else 0
    if tensor in outputs:
        index = outputs.index(tensor)
    looked_at = {
        "figure": figure,
        "tensor": tensor or "output",
        "index": index,
        "gradient": tensor.removesuffix(GRADIENT) if tensor and is_gradient else None,
        "is_of_module": is_of_module,
        # A named tuple's have a dot, which a script does not spell
        "in_order": outputs if len(outputs) > 1 and "." not in "".join(outputs) else [],
    }
    return {
        **looked_at,
        "backward": bool(first.backward),
        "draws": len(call.draws),
        "seeds": [draw.seed for draw in call.draws],
        "names": list(leaves),
        "call": _spelled_call(first.arguments, leaves),
        "strides": {n: tuple(x.stride()) for n, x in leaves.items() if _is_strided(x)},
    }


def _is_strided(x: Tensor) -> bool:
    """Whether a tensor is not contiguous, and only places of one axis share memory (an
    expanded tensor)."""
    once = [1 if step == 0 else n for n, step in zip(x.shape, x.stride(), strict=True)]
    return not x.is_contiguous() and not may_overlap(once, x.stride())


def _spelled_call(arguments: Arguments, leaves: Mapping[str, Tensor]) -> str:
    """Returns the arguments of a call as Python source, tensors as `inputs["NAME"]`.
    Raises UsageError for an argument that has no spelling, as an object that holds a
    tensor which `leaves` lacks."""
    names = {id(x): name for name, x in leaves.items()}

    def spelled(value: object) -> str:
        """Returns one argument as Python source. Raises UsageError for one that has no
        spelling."""
        if id(value) in names:
            return f'inputs["{names[id(value)]}"]'
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return literal_sequence(value, spelled)
        if isinstance(value, Mapping):
            items = (f"{literal(k)}: {spelled(x)}" for k, x in value.items())
            return "{" + ", ".join(items) + "}"
        return literal(value)

    positional, named = arguments.tree
    parts = [*map(spelled, positional), *(f"{n}={spelled(x)}" for n, x in named.items())]
    return ", ".join(parts)


def _stored_inputs(call: FunctionCall) -> dict[str, Tensor]:
    """Returns the tensors by which a script makes its calls, by name: `0.in.x` is the
    argument x of the first draw, `0.back.0` the gradient that comes back into the first
    of its floating-point outputs. Without a backward pass there are no `back` tensors."""
    stored: dict[str, Tensor] = {}
    for i, draw in enumerate(call.draws):
        for name, x in draw.arguments.leaves().items():
            stored[f"{i}.in.{name}"] = x.detach().contiguous()
        for j, x in enumerate(_cotangents(draw)):
            stored[f"{i}.back.{j}"] = x
    return stored


def _cotangents(draw: FunctionReference) -> Iterator[Tensor]:
    """Yields the gradient that comes back into each floating-point output of a draw, in
    their order and dtypes; nothing without a backward pass."""
    if draw.cotangents is not None:
        for name, i in cotangent_numbers(draw.plain.outputs).items():
            output = draw.plain.outputs[name]
            yield draw.cotangents.of(i, output).to(output.dtype).contiguous()


def _stored_exact(failing: FailingCall, tensor: str) -> dict[str, Tensor]:
    """Returns by name, as in `x.exact`, three fp64 tensors of a tensor x: its exact
    values (`exact`), the squared errors that are allowed (`allowed`), and those that are
    explained (`explained`)."""
    judge, _ = failing.judged(tensor)
    allowed, explained = _allowed(judge)
    return {
        f"{tensor}.exact": judge.truth.contiguous(),
        f"{tensor}.allowed": allowed.contiguous(),
        f"{tensor}.explained": explained.contiguous(),
    }


def _written(folder: Path, text: str, tensors: Mapping[str, Tensor]) -> Path:
    """Writes a script and its tensors into a folder, which is made, and returns the path
    of the script; older files are replaced. Raises MeasurementError where the folder
    cannot be made, or a file cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    script = folder / "reproduce.py"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stored = {name: x.detach().cpu().clone() for name, x in tensors.items()}
        save_file(stored, folder / "tensors.safetensors")
        script.write_text(text, encoding="utf-8")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise MeasurementError(f"{folder}: cannot be written ({error})") from error
    return script


def reproducer_of(
    findings: Sequence[Finding],
    parts: Sequence[FormatPart],
    rules: Rules,
    target: str,
    directory: Path,
) -> tuple[Path | None, str]:
    """Returns the path of a script for the first finding that a script can be written
    for, and an empty text; else None, and a sentence that says why the first attempt
    failed. None and an empty text where no finding is an error or exception of the
    function. `directory`: gets the folder `reproducers`."""
    why = ""
    for finding in findings:
        part = next((x for x in parts if x.format.name in finding.formats), None)
        if part is None or finding.severity == "note":
            continue
        failed = any(isinstance(x, Failure) for x in part.runs)
        if finding.severity != "exceeded" and not (finding.rule == RUNS and failed):
            continue
        try:
            return write_reproducer(finding, part, rules, target, directory), ""
        except NumdevError as error:
            why = why or f"No reproducer: {error}"
        except Exception as error:  # of the reference, which may be any code
            why = why or f"No reproducer: {one_line(error)}"
    return None, why
