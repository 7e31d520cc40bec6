"""A kernel's call as source code, the way a user of that kernel would write it.

For a reproducer: what PyTorch, the baseline, or somebody's function of q, k and v were given is
spelled out, with the same arguments. A kernel that is written for numdev is called through it.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.audit.reproduce.functionsource import defined_again
from numdev.audit.reproduce.reduction import with_explicit_mask
from numdev.cases import AttentionCase
from numdev.errors import UsageError
from numdev.kernels import Kernel, imported
from numdev.kernels.plain import adapt

BACKENDS: Mapping[str, str | None] = {
    "sdpa-math": "MATH",
    "sdpa-flash": "FLASH_ATTENTION",
    "sdpa-efficient": "EFFICIENT_ATTENTION",
    "sdpa-cudnn": "CUDNN_ATTENTION",
    "sdpa-default": None,
}
"""The kernels that are a call of scaled_dot_product_attention, and the backend each forces."""


@dataclass(frozen=True, kw_only=True)
class CallCode:
    """The body of `def kernel(q, k, v[, mask][, sinks])`, and what it needs."""

    kernel_words: str
    kernel_lines: tuple[str, ...]
    imports: tuple[str, ...] = ()
    """Made inside, so that one that fails is no finding."""
    backend: str | None = None
    lse_of_operator: bool = False
    needs: str = ""
    """Packages beside torch."""
    gives_gradient: bool = False
    """Whether the body takes grad_out as well, and returns the gradient instead of the output."""


def call_of(
    kernel: Kernel, options: Mapping[str, Any], case: AttentionCase, tensor: str
) -> tuple[AttentionCase, CallCode]:
    """The call, and the case in the form in which the kernel was given it (its mask explicit).

    Raises UsageError for an option that has no spelling.
    """
    if kernel.name in BACKENDS:
        return _sdpa(kernel.name, case, tensor)
    if kernel.name == "baseline":
        return case, _baseline(case)
    if kernel.adapted is not None and ":" not in kernel.name:
        return _function(kernel.name, kernel.adapted, options, case, tensor)
    if ":" in kernel.name:
        function = imported(kernel.name, "kernel")
        if next(iter(inspect.signature(function).parameters), "") != "case":
            return _function(kernel.name, function, options, case, tensor)
    return case, _through_numdev(kernel.name, options, case, tensor)


def literal(value: Any) -> str:
    """A value as Python source. Raises UsageError where it has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, tuple | list):
        inner = ", ".join(map(literal, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    raise UsageError(f"a script cannot spell the option {value!r}")


def _sdpa(name: str, case: AttentionCase, tensor: str) -> tuple[AttentionCase, CallCode]:
    backend = BACKENDS[name]
    by_flag = case.is_causal and case.mask is None and not case.window and not case.causal_offset
    if case.restricts_positions and not by_flag:
        case = with_explicit_mask(case)
    arguments = {
        "attn_mask": "mask" if case.mask is not None else None,
        "is_causal": "True" if case.is_causal else None,
        "scale": "SCALE",
        "enable_gqa": "True" if case.group > 1 else None,
    }
    given = ", ".join(f"{n}={x}" for n, x in arguments.items() if x)
    function = "torch.nn.functional.scaled_dot_product_attention"
    call: tuple[str, ...] = (f"{function}(", f"    q, k, v, {given}", ")")
    before = len("return ") if tensor != "lse" else 0
    before += 8 if backend or tensor == "lse" else 4
    if before + len(short := f"{function}(q, k, v, {given})") <= 100:
        call = (short,)
    contexts = [f"sdpa_kernel([SDPBackend.{backend}])"] if backend else []
    if tensor == "lse":
        opened = ", ".join([*contexts, "Operator() as operator"])
        lines = (
            f"with {opened}:",
            *_indented(call),
            "lse = operator.returned[1]",
            "lse = lse.squeeze(-1) if lse.ndim == 4 else lse",
            "return lse[..., : q.shape[2]]",
        )
    elif contexts:
        lines = (f"with {contexts[0]}:", *_indented(_returned(call)))
    else:
        lines = _returned(call)
    forced = f"backend {backend}, forced alone" if backend else "whatever PyTorch picks"
    return case, CallCode(
        kernel_words=f"PyTorch's SDPA, {forced}",
        kernel_lines=lines,
        backend=backend,
        lse_of_operator=tensor == "lse",
    )


def _baseline(case: AttentionCase) -> CallCode:
    masked = ", mask" if case.mask is not None else ""
    hides = case.restricts_positions or case.mask is not None
    lines = ["S = q @ k.transpose(-1, -2) * SCALE"]
    if case.group > 1:  # by expanding, as models do: the backward is then one sum
        each = f"x[:, :, None].expand(-1, -1, {case.group}, -1, -1).flatten(1, 2)"
        lines.insert(0, f"k, v = ({each} for x in (k, v))")
    if case.softcap is not None:
        lines.append("S = torch.tanh(S / SOFTCAP) * SOFTCAP")
    if case.mask is not None and case.mask.dtype != torch.bool:
        lines.append("S = S + mask")
    if hides:
        lines.append(f"S = S.masked_fill(~visible(q, k{masked}), -torch.inf)")
    if case.sinks is not None:
        lines.append("sink = sinks.to(S.dtype)[None, :, None, None].expand(*S.shape[:3], 1)")
        lines.append("S = torch.cat([S, sink], dim=-1)")
    lines.append("wide = torch.promote_types(q.dtype, torch.float32)")
    lines.append("P = torch.softmax(S, dim=-1, dtype=wide).to(q.dtype)")
    if case.sinks is not None:
        lines.append("P = P[..., :-1]")
    if hides:
        lines.append(f"P = P.masked_fill(~visible(q, k{masked}), 0.0)")
    words = "plain attention as eager model code has it, every product in the working format"
    return CallCode(kernel_words=words, kernel_lines=(*lines, "return P @ v"))


def _function(
    path: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    case: AttentionCase,
    tensor: str,
) -> tuple[AttentionCase, CallCode]:
    """A function of q, k, v: the arguments that numdev gives it, by their names."""
    module, _, name = path.partition(":")
    imports: tuple[str, ...] = (f"from {module} import {name}",)
    if not name:  # no module has it under its name
        module, name, imports = defined_again(function)
    tensors, named = _recorded(path, function, options, case)
    values = {}
    for argument, x in named.items():
        if not isinstance(x, Tensor):
            values[argument] = "SCALE" if x is case.scale else literal(x)
        elif x is case.sinks:
            values[argument] = "sinks"
        else:
            values[argument] = "mask"
            if x is not case.mask:  # positions, or a bool mask, as the function's one mask
                case = dataclasses.replace(with_explicit_mask(case), mask=x)
    given = "".join(f", {n}={x}" for n, x in values.items())
    lines = [f"result = {name}(q, k, v{given})"]
    if tensors[1].shape != case.k.shape:
        lines.insert(0, f"k, v = (x.repeat_interleave({case.group}, dim=1) for x in (k, v))")
    if tensor == "lse":
        lines.append("return result[1]")
    else:
        lines.append("return result[0] if isinstance(result, tuple) else result")
    return case, CallCode(
        kernel_words=path,
        kernel_lines=tuple(lines),
        imports=imports,
        needs=module,
    )


def _recorded(
    path: str, function: Callable[..., Any], options: Mapping[str, Any], case: AttentionCase
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that an adapted function is called with, without calling it."""
    seen: dict[str, Any] = {}

    def recorder(*args: Any, **named: Any) -> None:
        seen.update(args=args, named=named)

    recorder.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    adapt(path, recorder).function(case, **options)
    return seen["args"], seen["named"]


def _through_numdev(
    name: str, options: Mapping[str, Any], case: AttentionCase, tensor: str
) -> CallCode:
    fields: dict[str, str] = {"q": "q", "k": "k", "v": "v", "scale": "SCALE"}
    fields |= {name: name for name in ("mask", "sinks") if getattr(case, name) is not None}
    for field in ("is_causal", "causal_offset", "window"):
        if getattr(case, field):
            fields[field] = literal(getattr(case, field))
    if case.softcap is not None:
        fields["softcap"] = "SOFTCAP"
    backward = tensor in ("dq", "dk", "dv")
    if backward:
        fields["grad_out"] = "grad_out"
    settings = "".join(f", {n}={literal(x)}" for n, x in options.items())
    lines = (
        "case = AttentionCase(",
        '    ref=CaseRef(case="reproducer"),',
        *(f"    {n}={x}," for n, x in fields.items()),
        ")",
        f'output = find("{name}").{"gradients" if backward else "attend"}(case{settings})',
        f"return output.{tensor}",
    )
    return CallCode(
        kernel_words=f"{name}, a kernel written for numdev",
        kernel_lines=lines,
        imports=(
            "from numdev.cases import AttentionCase, CaseRef",
            "from numdev.kernels import find",
        ),
        needs="numdev",
        gives_gradient=backward,
    )


def _indented(lines: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"    {line}" for line in lines)


def _returned(lines: tuple[str, ...]) -> tuple[str, ...]:
    return (f"return {lines[0]}", *lines[1:])
