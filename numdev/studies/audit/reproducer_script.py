"""A finding as a bug report: a short script that needs torch alone, its tensors, and the
finding in words.

The script reads the tensors, computes the answer in fp64 by the definition, runs the
kernel as a user would, prints the figure of the finding, and exits with 1 if it shows. It
uses nothing of numdev, unless the kernel itself is written for numdev. The text is in the
template `data/reproducer/audit.py.j2`; this module computes the facts for it."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase, explicit_mask
from numdev.errors import MeasurementError, UsageError, closest, first_line
from numdev.kernels import Kernel, import_callable
from numdev.kernels.output import GRADIENTS
from numdev.kernels.plain_functions import adapt
from numdev.kernels.sdpa import backend_of
from numdev.request_models import BACKENDS
from numdev.sources import captured_calls
from numdev.sources.captured_calls import DTYPES, OPTIONAL, REQUIRED, storage_order
from numdev.system import System

EVERYWHERE: Any = {"is_causal": False, "causal_offset": 0, "window": None}
ENOUGH = 0.5  # a script shows a finding from this part of the reported figure on
RUNS_OF_NOISE = 10
# Figures that stand on a kernel's tensors (of `narrow_sum` a gradient and the output) and
# the exact ones alone, in the words a script prints.
FIGURES = {
    "nonfinite": "elements that are finite or not against the exact result",
    "max_abs": "largest error",
    "rms": "rms error",
    "row_rel": "rms over rows of |error| / |terms|",
    "bias": "mean of kernel - exact rounded once, in ulps at the size of the terms",
    "bias_sign": "mean along the sign of kernel - exact rounded once, in ulps",
    "bias_feature": "largest mean over a feature of kernel - exact rounded once, in ulps",
    "narrow_sum": "share of the error of a sum in 16 bits over tiles",
}
# By figure, the other metrics that it shows.
SHOWN_BY = {
    "row_rel": ("expected_ratio", "worst_row", "suspicion"),
    "rms": ("rms_ratio", "floor_ratio", "baseline_ratio", "rel", "mean_abs", "lse_error"),
    "max_abs": ("max_ulp", "fa_rule"),
    "noise": ("noise_ratio",),
}
# The case as the kernel was given it; the spelling
Call = tuple[AttentionCase, dict[str, object]]


def figure_for(metric: str, bias_of: str | None = None) -> str:
    """Returns the name of the number by which a script shows a finding about `metric`:
    one of FIGURES, or `noise`. Where the metric is a ratio that needs more than the
    kernel's and the exact tensor, it is the error in the numerator. `bias_of`: of a bias,
    the row's word for what it is of (`mean`, which None is too, `sign`; any other: a
    feature). Raises UsageError for a metric that has no such number."""
    if metric in ("bias_size", "bias_p", "bias_t"):
        return {"mean": "bias", "sign": "bias_sign"}.get(
            bias_of or "mean", "bias_feature"
        )
    figure = next((f for f, metrics in SHOWN_BY.items() if metric in metrics), metric)
    if figure not in (*FIGURES, "noise"):
        raise UsageError(
            f"a script cannot show {metric!r}", hint=closest(metric, FIGURES)
        )
    return figure


def write(
    directory: Path,
    case: AttentionCase,
    kernel: Kernel,
    options: Mapping[str, object],
    *,
    tensor: str,
    head: int,
    metric: str,
    observed: float | None,
    words: str,
    system: System,
    limit: float | None = None,
) -> Path:
    """Writes reproduce.py and tensors.safetensors into `directory`, which is made;
    returns the path of the script. `options`: those that differ from the kernel's
    defaults. `head`: a kv head for dk and dv. `metric`: one of FIGURES, `noise`, or
    `raises`; `observed`: its value. The script shows the finding from `limit` on; None:
    from one element for `nonfinite`, else from half of `observed`. `words`: the finding.
    Raises UsageError for an option that has no spelling and a function that no script can
    import; MeasurementError for a format without a dtype, for gradients of inputs that
    are not finite, and where it cannot be written."""
    training, backward = case.grad_out is not None, tensor in GRADIENTS
    _refuse_incomputable(case, backward=backward)
    if not backward:
        case = dataclasses.replace(case, grad_out=None)
    case, call = _spell_call(kernel, options, case, tensor)
    if limit is None:
        limit = 1 if metric == "nonfinite" else ENOUGH * abs(observed or 0.0)
    facts: dict[str, object] = {
        **{"imports": (), "needs": "", "backend": None, "folder": None},
        **call,
        **_input_facts(case),
        "tensor": tensor,
        "head": head,
        "figure": metric,
        "figures": FIGURES,
        "training": training,
        "words": textwrap.wrap(words, 97),
        "kernel": kernel.name,
        "observed": observed,
        "limit": limit,
        "runs": RUNS_OF_NOISE,
        "about": f"Measured: {_describe_measurement(kernel, options, system)}.",
    }
    script = directory / "reproduce.py"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        captured_calls.write_cases(directory / "tensors.safetensors", [case])
        script.write_text(rendered("audit", facts), encoding="utf-8")
    except OSError as error:
        raise MeasurementError(
            f"{directory}: cannot be written ({error.strerror})"
        ) from error
    return script


def _refuse_incomputable(case: AttentionCase, *, backward: bool) -> None:
    """Raises MeasurementError for a case that a script of torch alone cannot compute: one
    in a format without a dtype; with `backward` also one whose q, k or grad_out is
    missing or not finite."""
    if case.working is not None:
        raise MeasurementError(
            f"no reproducer: torch has no dtype for {case.working.name}"
        )
    # Where P is 0 the reference lets nothing through; dense autograd would: 0 * NaN.
    inputs = (case.q, case.k, case.grad_out)
    if backward and not all(x is not None and bool(x.isfinite().all()) for x in inputs):
        raise MeasurementError(
            "no reproducer: a short script cannot differentiate inputs that are not "
            "finite"
        )


def _input_facts(case: AttentionCase) -> dict[str, object]:
    """Returns facts on a case for the template, by name: its fields, what a query may
    see, and how its tensors are loaded."""
    tensors = {n: getattr(case, n) for n in (*REQUIRED, *OPTIONAL)}
    present = {n: x for n, x in tensors.items() if x is not None}
    stored = {x.dtype for x in present.values()}
    return {
        "case": case,
        "additive": case.mask is not None and case.mask.dtype != torch.bool,
        "shown": _spell_visibility(case),
        "loaded": [
            f'{name} = t["{name}"]{_spell_view(x)}' for name, x in present.items()
        ],
        "dtypes": {n: d for n, d in DTYPES.items() if d in stored},
    }


def _describe_measurement(
    kernel: Kernel, options: Mapping[str, object], system: System
) -> str:
    """Returns in words the kernel that was measured, its options, torch's version and the
    machine."""
    settings = ", ".join(f"{n} = {v!r}" for n, v in options.items())
    with_options = f" with {settings}" if options else ""
    where = f"{system.cpu} ({system.cpu_capability})"
    if system.gpu:
        where = f"{system.gpu}, driver {system.driver}, CUDA {system.cuda}"
    torch_version = system.packages.get("torch", "?")
    return f"{kernel.name}{with_options}, torch {torch_version}, {where}"


def rendered(template: str, facts: Mapping[str, object]) -> str:
    """Returns the text of a script. `template`: a file of `data/reproducer`, by its name
    without `.py.j2`; jinja2.TemplateNotFound is raised for any other. Raises
    jinja2.UndefinedError where `facts` lacks one that the template needs."""
    blocks: Any = {
        "trim_blocks": True,
        "lstrip_blocks": True,
        "keep_trailing_newline": True,
    }
    # Late: a check that passes writes no script
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("numdev", "data/reproducer")
    templates = Environment(loader=loader, undefined=StrictUndefined, **blocks)
    templates.filters["literal"] = literal
    templates.filters["literal_mapping"] = literal_mapping
    return templates.get_template(f"{template}.py.j2").render(facts)


def literal(value: object) -> str:
    """Returns a value as Python source: bools, integers, floats (NaN and infinity as
    `float("nan")`; so those of a subclass, as NumPy's), text, None, dtypes, shapes, and
    lists and tuples of these. Raises UsageError for another type, as a mapping, a complex
    number, a named tuple or a member of an IntEnum."""
    if isinstance(value, float):
        plain = float.__repr__(value)
        return plain if math.isfinite(value) else f'float("{plain}")'
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return literal_sequence(value, literal)
    if type(value) in (type(None), bool, int, str, torch.dtype, torch.Size):
        return repr(value)
    raise UsageError(f"a script cannot spell the value {first_line(repr(value))}")


def literal_sequence(values: Sequence[object], spelled: Callable[[object], str]) -> str:
    """Returns a list, or else a tuple, as Python source, each value as `spelled` returns
    it."""
    inner = ", ".join(map(spelled, values))
    if isinstance(values, list):
        return f"[{inner}]"
    return f"({inner},)" if values else "()"


def literal_mapping(values: Mapping[str, object]) -> str:
    """Returns a mapping as Python source. Raises UsageError for a value that `literal`
    refuses."""
    return "{" + ", ".join(f"{k!r}: {literal(x)}" for k, x in values.items()) + "}"


def _spell_call(
    kernel: Kernel, options: Mapping[str, object], case: AttentionCase, tensor: str
) -> Call:
    """Returns the case as the kernel was called with it (its positions as a mask, where
    the kernel gets them so), and facts by which the template spells the call. Raises
    UsageError for an option that has no spelling, and for a function that no script can
    import."""
    name = kernel.name
    if name in BACKENDS and tensor != "lse":  # the public function returns no log-sum-exp
        forced, positions = backend_of(name), case.window or case.causal_offset
        if case.restricts_positions and (positions or case.mask is not None):
            case = dataclasses.replace(case, mask=explicit_mask(case), **EVERYWHERE)
        backend = forced and forced.name
        how = f"backend {backend}, forced alone" if backend else "whatever PyTorch picks"
        words = f"PyTorch's SDPA, {how}"
        return case, {"call": "sdpa", "kernel_words": words, "backend": backend}
    if name == "baseline":
        words = (
            "plain attention as eager model code has it, every product in the "
            "working format"
        )
        return case, {"call": "baseline", "kernel_words": words}
    function = import_callable(name, "kernel") if ":" in name else kernel.adapted
    if function and next(iter(inspect.signature(function).parameters), "") != "case":
        return _spell_function(name, function, options, case)
    return case, {
        "call": "numdev",
        "kernel_words": f"{name}, a kernel written for numdev",
        "arguments": "".join(f", {n}={literal(x)}" for n, x in options.items()),
        "imports": (
            "from numdev.cases import AttentionCase, CaseRef",
            "from numdev.kernels import find",
        ),
        "needs": "numdev",
    }


def _spell_function(
    path: str,
    function: Callable[..., object],
    options: Mapping[str, object],
    case: AttentionCase,
) -> Call:
    """Returns the case as a function of q, k and v was called with it, and facts by which
    the template spells the call: the other arguments by their names. `path`:
    `module:name`. The function itself is not called. Raises UsageError for a function
    that no script can import, and for an argument that has no spelling."""
    module, _, name = path.partition(":")
    if not name:  # no module has it under its name
        what = f"a script of its own cannot import {path}"
        raise UsageError(what, hint="define it with `def` at the top of a module")
    seen: dict[str, Any] = {}

    def recorder(*args: object, **named: object) -> None:
        seen.update(args=args, named=named)

    recorder.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    adapt(path, recorder).function(case, **options)
    whole, values = case, {}
    for argument, x in seen["named"].items():
        if not isinstance(x, Tensor):
            values[argument] = "SCALE" if x is whole.scale else literal(x)
        elif x is whole.sinks:
            values[argument] = "sinks"
        else:
            values[argument] = "mask"
            # Positions, or a bool mask, as the function's one mask
            if x is not case.mask:
                case = dataclasses.replace(case, mask=x, **EVERYWHERE)
    return case, {
        "call": "function",
        "kernel_words": path,
        "function": name,
        "arguments": "".join(f", {n}={x}" for n, x in values.items()),
        "repeats": seen["args"][1].shape != case.k.shape,
        "imports": (f"from {module} import {name}",),
        "needs": module,
        "folder": folder_of(module),
    }


def _spell_view(x: Tensor) -> str:
    """Returns the suffix by which a script restores the order of a stored tensor's axes
    in memory, `.permute(0, 2, 1, 3)`; empty where the axes are in order."""
    order = storage_order(x)
    inverse = ", ".join(str(order.index(axis)) for axis in range(x.ndim))
    return "" if order == sorted(order) else f".permute({inverse})"


def _spell_visibility(case: AttentionCase) -> str:
    """Returns which keys a query may see, as an expression of i, j and mask: `(j <= i) &
    mask`; empty if it may see all. The causal offset is not in it."""
    parts = ["(j <= i)"] if case.is_causal else []
    left, right = case.window or (None, None)
    parts += [f"(j >= i - {left})"] if left is not None else []
    parts += [f"(j <= i + {right})"] if right is not None else []
    if case.mask is not None:
        additive = "(mask != torch.finfo(mask.dtype).min)"  # models write "hidden" so
        parts.append("mask" if case.mask.dtype == torch.bool else additive)
    return " & ".join(parts) if len(parts) > 1 else parts[0].strip("()") if parts else ""


def name_of(function: Callable[..., object]) -> str:
    """Returns `module:name` of a function that its module, if not `__main__`, has under
    that name; else its own name alone, which no script can import. An object without a
    name has that of its type."""
    module = getattr(function, "__module__", None) or ""
    name = getattr(function, "__qualname__", type(function).__name__)
    if getattr(sys.modules.get(module), name, None) is function and module != "__main__":
        return f"{module}:{name}"
    return str(name).rpartition("<locals>.")[2]


def folder_of(module: str) -> str | None:
    """Returns the folder that an imported module was imported from, above its packages;
    None for a module that was not imported or has no file."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    return str(path.parents[module.count(".") + (path.name == "__init__.py")])
