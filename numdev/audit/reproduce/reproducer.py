"""A finding as a bug report: a short script that needs torch alone, its tensors, a few words.

The script reads the tensors, computes the answer in fp64 by the definition, runs the kernel as a
user would, prints the figure of the finding, and exits with 1 if it shows. Nothing of numdev is in
it, unless the kernel itself is written for numdev. It is made from a template
(`data/reproducer/reproduce.py.j2`) that has only what this finding needs.

What is written is the case as it is given; `numdev.audit.reproduce.reduction` makes it small
beforehand.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from numdev.audit.reproduce.callcode import call_of, literal
from numdev.audit.reproduce.showing import BIASES, ENOUGH, FIGURES
from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, UsageError
from numdev.kernels import Kernel
from numdev.kernels.output import GRADIENTS
from numdev.sources import tensorwriter
from numdev.sources.tensorfile import DTYPES, OPTIONAL, REQUIRED
from numdev.sources.tensorwriter import storage_order
from numdev.system import System

TENSORS = (*REQUIRED, *OPTIONAL)
SHAPES = {
    "out": "(q.shape[0], q.shape[2], v.shape[3])",
    "lse": "(q.shape[0], q.shape[2], 1)",
    "dq": "(q.shape[0], q.shape[2], q.shape[3])",
    "dk": "(k.shape[0], k.shape[2], k.shape[3])",
    "dv": "(v.shape[0], v.shape[2], v.shape[3])",
}
"""Of one head, as an expression: what a kernel that does not raise should return."""
RUNS_OF_NOISE = 10
SHORT = {
    "nonfinite": "elements that are finite or not against the exact result",
    "max_abs": "largest error",
    "mean_abs": "mean |error|",
    "rms": "rms error",
    "rel": "|error| / |exact|",
    "row_rel": "rms over rows of |error| / |terms|",
    "max_ulp": "largest error in ulps at the size of its terms",
    "floor_ratio": "rms error / that of the exact result rounded once",
    "bias": "mean of kernel - exact rounded once, in ulps at the size of the terms",
    "bias_sign": "mean along the sign of kernel - exact rounded once, in ulps",
    "bias_feature": "largest mean over a feature of kernel - exact rounded once, in ulps",
}
WORDS = {
    **SHORT,
    "nonfinite": "How many elements are finite where the exact result, rounded once, is not, or "
    "the reverse",
}
NEEDS_FLOOR = ("nonfinite", "floor_ratio", *BIASES)
NEEDS_ULPS = ("max_ulp", *BIASES)
NEEDS_TERMS = ("row_rel", *NEEDS_ULPS)


def write(
    directory: Path,
    case: AttentionCase,
    kernel: Kernel,
    options: Mapping[str, Any],
    *,
    tensor: str,
    head: int,
    metric: str,
    observed: float | None,
    words: str,
    system: System,
    limit: float | None = None,
    runs: int = 1,
    folder: Path | None = None,
) -> Path:
    """Write reproduce.py, tensors.safetensors and README.md into `directory`; returns the script.

    `tensor` is out, lse, dq, dk or dv; `head` a query head, or a kv head for dk and dv. A case with
    grad_out is a training step: inputs require gradients also where `tensor` is out or lse.

    `metric` is one of `reproducers.showing.FIGURES` (see `reproducers.showing.figure_for`),
    `noise`, or `raises` for a kernel that refuses or fails; `observed` is its value for this case,
    in the unit of the report. The script says that the deviation shows from `limit` on: by default
    half of what was observed, and a single element for `nonfinite`. A kernel that is not
    deterministic is run `runs` times and the worst is taken. `options` are those that are not the
    kernel's defaults. `folder` is where the module of the kernel is looked for last.

    Raises UsageError for a metric that no script can show, MeasurementError for a format that torch
    has no dtype for, gradients of inputs that are not finite, and where the directory cannot be
    written.
    """
    if metric not in (*FIGURES, "noise", "raises"):
        raise UsageError(
            f"no script shows {metric!r}", hint=f"known: {', '.join(FIGURES)}, noise, raises"
        )
    if case.working is not None:
        raise MeasurementError(f"no reproducer: torch has no dtype for {case.working.name}")
    training = case.grad_out is not None
    if tensor in GRADIENTS:
        _check_gradients(case, tensor)
    else:
        case = dataclasses.replace(case, grad_out=None)
    case, call = call_of(kernel, options, case, tensor)
    if limit is None:
        limit = 1 if metric == "nonfinite" else ENOUGH * abs(observed or 0.0)
    facts: dict[str, Any] = {
        **_facts(case, tensor, head, metric),
        **dataclasses.asdict(call),
        "training": training,
        "words": words,
        "kernel": kernel.name,
        "observed": literal(observed),
        "limit": literal(limit),
        "folder": None if folder is None else literal(str(folder)),
        "runs": max(runs, RUNS_OF_NOISE) if metric == "noise" else runs,
        "about": _about(kernel, options, system),
        "environment": _environment(system),
        "environment_variable": _environment_variable(system),
    }
    script = directory / "reproduce.py"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tensorwriter.write(directory / "tensors.safetensors", [case])
        comment = {**facts, "words": textwrap.wrap(words, 97) or [""]}
        script.write_text(_render("reproduce.py.j2", comment), encoding="utf-8")
        readme = _render("README.md.j2", facts)
        (directory / "README.md").write_text(readme, encoding="utf-8")
    except OSError as error:
        raise MeasurementError(f"{directory}: cannot be written ({error.strerror})") from error
    return script


def _check_gradients(case: AttentionCase, tensor: str) -> None:
    if case.grad_out is None:
        raise UsageError(f"case {case.ref.case!r} has no grad_out, so there is no {tensor}")
    # Where P is 0 the reference lets nothing through; dense autograd would: 0 * NaN.
    if not all(bool(x.isfinite().all()) for x in (case.q, case.k, case.grad_out)):
        raise MeasurementError(
            "no reproducer: a short script cannot differentiate inputs that are not finite"
        )


def _render(template: str, facts: Mapping[str, Any]) -> str:
    environment = Environment(
        loader=PackageLoader("numdev", "data/reproducer"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(facts)


# --- what the script is told ---------------------------------------------------------------------


def _facts(case: AttentionCase, tensor: str, head: int, metric: str) -> dict[str, Any]:
    """Everything that a case, and what is looked at in it, decide."""
    mask = case.mask
    present = [n for n in ("mask", "sinks") if getattr(case, n) is not None]
    more = "".join(f", {name}" for name in present)
    backward = tensor in GRADIENTS
    return {
        "tensor": tensor,
        "head": head,
        "figure": metric,
        "short_of": SHORT,
        "words_of": WORDS,
        "device": case.q.device.type,
        "format": case.format.name,
        "scale": literal(case.scale),
        "softcap": literal(case.softcap) if case.softcap is not None else None,
        "sinks": case.sinks is not None,
        "mask": None if mask is None else "bool" if mask.dtype == torch.bool else "additive",
        "group": case.group,
        "positions": case.restricts_positions,
        "offset": f" + {case.causal_offset}" if case.causal_offset else "",
        "shown": _shown(case),
        "hidden_values": not bool(case.v.isfinite().all()),
        "backward": backward,
        "gradient": GRADIENTS.index(tensor) if backward else None,
        "shape": SHAPES[tensor],
        "args": f"q, k, v{more}",
        "more_args": more,
        "run_args": f"q, k, v{more}{', grad_out' if backward else ''}",
        "loaded": _loaded(case),
        "dtypes": _dtypes(case),
        "terms": metric in NEEDS_TERMS,
        "slope": metric in NEEDS_TERMS and tensor in ("dq", "dk") and case.softcap is not None,
        "floor": metric in NEEDS_FLOOR,
        "ulps": metric in NEEDS_ULPS,
    }


def _shown(case: AttentionCase) -> str:
    """Which keys a query may see, as an expression of i, j and mask; empty if it may see all."""
    parts = ["(j <= i)"] if case.is_causal else []
    left, right = case.window or (None, None)
    parts += [f"(j >= i - {left})"] if left is not None else []
    parts += [f"(j <= i + {right})"] if right is not None else []
    if case.mask is not None:
        additive = "(mask != torch.finfo(mask.dtype).min)"  # models write "hidden" so
        parts.append("mask" if case.mask.dtype == torch.bool else additive)
    return " & ".join(parts) if len(parts) > 1 else parts[0].strip("()") if parts else ""


def _dtypes(case: AttentionCase) -> dict[str, torch.dtype]:
    """The dtypes of its tensors by their names in a safetensors file."""
    used = {x.dtype for name in TENSORS if (x := getattr(case, name)) is not None}
    return {name: dtype for name, dtype in DTYPES.items() if dtype in used}


def _loaded(case: AttentionCase) -> list[str]:
    """Lines that take the tensors, as views with their axes in memory as the kernel saw them."""
    lines = []
    for name in TENSORS:
        x = getattr(case, name)
        if x is None:
            continue
        order = storage_order(x)
        inverse = [order.index(axis) for axis in range(x.ndim)]
        view = "" if order == sorted(order) else f".permute({', '.join(map(str, inverse))})"
        lines.append(f'{name} = t["{name}"]{view}')
    return lines


# --- where it was measured -----------------------------------------------------------------------


def _about(kernel: Kernel, options: Mapping[str, Any], system: System) -> str:
    given = f" with {', '.join(f'{n} = {v!r}' for n, v in options.items())}" if options else ""
    where = system.gpu or f"{system.cpu} ({system.cpu_capability})"
    return f"Measured: {kernel.name}{given}, torch {system.packages.get('torch', '?')}, {where}."


def _environment(system: System) -> list[tuple[str, str]]:
    """The environment as pairs for a table."""
    packages = {n: v for n, v in system.as_dict()["packages"].items() if n != "transformers"}
    settings = {n: v for n, v in system.settings.items() if v is not None}
    facts = {
        "GPU": system.gpu,
        "driver, CUDA, cuDNN": system.gpu and f"{system.driver}, {system.cuda}, {system.cudnn}",
        "CPU": f"{system.cpu} ({system.cpu_capability}), {system.threads} threads",
        "system": f"{system.platform}, Python {system.python}",
        "packages": ", ".join(f"{n} {v}" for n, v in packages.items()),
        "settings": ", ".join(f"{n} {v}" for n, v in settings.items()),
    }
    return [(name, value) for name, value in facts.items() if value]


def _environment_variable(system: System) -> str:
    """What must be set before the script to have the same instruction set."""
    override = system.settings.get("cpu_capability_override")
    return f"ATEN_CPU_CAPABILITY={override} " if override else ""
