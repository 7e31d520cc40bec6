"""A plain attention function as a kernel: `--kernel package.module:function`.

What a function of q, k and v can do is read off its parameters' names: one that takes
`is_causal` or `causal` supports causal attention, one that takes no mask is skipped for a
case with a mask. Further parameters with a default are the kernel's options. Tensors are
[batch, heads, length, head_dim]. It returns what `as_output` takes; its gradients are
those autograd finds."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from functools import partial

import torch

from numdev.cases import AttentionCase, explicit_mask
from numdev.errors import UsageError
from numdev.kernels import (
    POSITIONAL,
    Kernel,
    fingerprint,
    like_fa2,
    like_fa2_with_repeated_kv,
    options_of,
    parameters_of,
    summary_of,
)
from numdev.kernels.baseline import repeat_kv
from numdev.kernels.output import why_not
from numdev.report import CaseRecord

NAMES = {
    "causal": ("is_causal", "causal"),
    "scale": ("scale", "softmax_scale", "sm_scale", "scaling"),
    "mask": ("attn_mask", "mask", "attention_mask", "bias", "attn_bias"),
    "window": ("window_size", "window"),
    "softcap": ("softcap", "soft_cap", "logits_soft_cap"),
    "sinks": ("sinks", "s_aux", "learnable_sink"),
    "gqa": ("enable_gqa",),
}
OFF: Mapping[str, object] = dict(
    mask=None, window=(-1, -1), softcap=0.0, sinks=None, gqa=False
)
"""How to say "none" for a parameter without a default, in flash-attention's words."""
Roles = Mapping[str, str | None]
"""What numdev calls an argument, to what the function calls it (None: it takes no such
thing)."""


def adapt(name: str, function: Callable[..., object]) -> Kernel:
    """Returns `function(case, ...)` or `function(q, k, v, ...)` as a Kernel called
    `name`. A function of q, k and v supports what its parameters have names for
    (`NAMES`); other parameters with defaults are its options, and `*args` and `**kwargs`
    get nothing. Where it has no parameter for causality or a window, they go into the
    mask.

    The first three parameters get q, k and v, whatever they are called, but not a name in
    NAMES. Raises UsageError where parameters cannot be read, fewer than three are
    positional, one of the first three has such a name, or a further one without a default
    is of unknown meaning. For a function whose first parameter is `case` it raises
    UsageError for an option without a default, and for a second positional parameter."""
    parameters = list(parameters_of(function, name).values())
    named_kernel = partial(
        Kernel, name=name, summary=summary_of(function), made_from=fingerprint(function)
    )
    if parameters and parameters[0].name == "case":
        return named_kernel(function=function, options=options_of(function))
    named = {
        p.name: p
        for p in parameters[3:]
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    roles = _roles(named)
    others = [p for p in named.values() if p.name not in roles.values()]
    _refuse_misfits(name, parameters, [p.name for p in others if p.default is p.empty])
    required = {p.name for p in named.values() if p.default is p.empty}

    def run(case: AttentionCase, **options: object) -> object:
        """Calls the function on a case and returns what it returns. Where the case has a
        mask, is causal or windowed, and the function has parameters for these, it is
        tried with all of them. If it raises an Exception, it is called again with one
        mask that has causality and window in it."""
        k, v = (case.k, case.v) if roles["gqa"] else repeat_kv(case)
        by_name = _positions_by_name(case, roles)
        if by_name and case.mask is not None and case.restricts_positions:
            # PyTorch's operator, for one, takes no mask beside is_causal: the mask then
            # has both.
            with contextlib.suppress(Exception):
                return function(
                    case.q,
                    k,
                    v,
                    **_call_arguments(case, roles, required, True),
                    **options,
                )
            by_name = False
        return function(
            case.q, k, v, **_call_arguments(case, roles, required, by_name), **options
        )

    return named_kernel(
        function=run,
        supports=lambda case: _unsupported(roles, case),
        options={p.name: p.default for p in others},
        adapted=function,
        claims=like_fa2 if roles["gqa"] else like_fa2_with_repeated_kv,
    )


def _roles(names: Container[str]) -> dict[str, str | None]:
    """Returns, for each meaning in NAMES (`causal`, `scale`, `mask`, `window`, `softcap`,
    `sinks`, `gqa`), the first of its spellings that is among `names`; None where `names`
    has no spelling of it."""
    return {
        role: next((way for way in ways if way in names), None)
        for role, ways in NAMES.items()
    }


def _refuse_misfits(
    name: str, parameters: Sequence[inspect.Parameter], unknown: Sequence[str]
) -> None:
    """Raises UsageError where the first three parameters are not all positional, are
    fewer than three, or one of them is named like another argument. Raises it too where
    `unknown` is not empty: the required parameters whose meaning numdev does not know."""
    first = parameters[:3]
    ways = set(itertools.chain.from_iterable(NAMES.values()))
    misplaced = [p.name for p in first if p.name in ways]
    few = len(first) < 3 or any(p.kind not in POSITIONAL for p in first)
    wrong = why_not(
        (few, "q, k and v must be its first three arguments"),
        (misplaced, f"expected q, k or v, got {', '.join(misplaced[:1])}"),
        (unknown, f"numdev does not know what to pass for {', '.join(unknown)}"),
    )
    if wrong:
        what = f"kernel {name!r} takes ({', '.join(p.name for p in parameters)}): {wrong}"
        accepted = "q, k, v and arguments with known names or defaults"
        hint = (
            f"a kernel is a function of {accepted}, or of a numdev AttentionCase "
            "named 'case'; any other function is checked beside its reference (numdev "
            "check --reference)"
        )
        raise UsageError(what, hint=hint)


def parameters_by_role(function: Callable[..., object]) -> dict[str, str]:
    """Returns the names of a plain function's parameters by their meaning, a key of
    NAMES: `{"causal": "is_causal"}`. Of two with one meaning it has the one that comes
    first in NAMES. Meanings without a parameter are left out. Raises UsageError where
    Python cannot tell the parameters."""
    roles = _roles(parameters_of(function))
    return {role: name for role, name in roles.items() if name}


def untested_parameters(
    function: Callable[..., object], cases: Collection[CaseRecord]
) -> list[str]:
    """Returns the names of a plain function's parameters of a meaning in NAMES that none
    of these cases sets, so that they were never tested, in the order of NAMES: those
    whose value no case needs to set, all of them without cases; and of several with one
    meaning (`mask` and `bias`) all but the first. Raises UsageError where Python cannot
    tell the parameters."""
    parameters = parameters_of(function)
    needed = set(itertools.chain.from_iterable(map(_needed_roles, cases)))
    untested: list[str] = []
    for role, ways in NAMES.items():
        names = [way for way in ways if way in parameters]
        untested += names[1:] if role in needed else names
    return untested


def _needed_roles(case: CaseRecord) -> Iterator[str]:
    """Yields the meanings (keys of NAMES) that a function must have a parameter for, or
    it computes something else than this case. `causal` is needed where the case is causal
    without an offset, `mask` where it has a mask or an offset other than 0, `scale` where
    it is not 1 / sqrt(head_dim). The other four are needed where the case has such a
    thing."""
    if case.is_causal and not case.causal_offset:
        yield "causal"
    if not math.isclose(case.scale, case.head_dim**-0.5):
        yield "scale"
    if case.mask != "none" or case.causal_offset != 0:
        yield "mask"
    if case.window is not None:
        yield "window"
    if case.softcap is not None:
        yield "softcap"
    if case.sinks:
        yield "sinks"
    if case.kv_heads < case.heads:
        yield "gqa"


def _positions_by_name(case: AttentionCase, roles: Roles) -> bool:
    """Whether causality and window can be passed by parameters of their own: offset 0,
    and a parameter for each of the two that the case has. `roles`: meaning to parameter
    name."""
    return (
        case.causal_offset == 0
        and not (case.is_causal and roles["causal"] is None)
        and not (case.window is not None and roles["window"] is None)
    )


def _unsupported(roles: Roles, case: AttentionCase) -> str | None:
    """Returns what the case needs and the function has no parameter for, as a sentence:
    `the function takes no window: no parameter is named window_size or window`. None
    where it can run. `roles`: for each meaning in NAMES the parameter's name, or None."""
    by_mask = case.restricts_positions and not _positions_by_name(case, roles)
    by_mask = (by_mask or case.mask is not None) and not roles["mask"]
    masked, windowed = case.mask is not None, case.window is not None
    causal = not masked and not windowed and roles["causal"] is None
    # d ** -0.5 and 1 / sqrt(d) may differ in the last bit.
    usual = math.isclose(case.scale, case.q.shape[-1] ** -0.5, rel_tol=1e-15)
    needs = {
        "window": by_mask and windowed,
        "causal": by_mask and causal,
        "mask": by_mask and (masked or not windowed) and not causal,
        "softcap": case.softcap is not None,
        "sinks": case.sinks is not None,
        "scale": not usual,
    }
    if lacking := [
        role for role, needed in needs.items() if needed and roles[role] is None
    ]:
        names = " or ".join(NAMES[lacking[0]])
        words = ", ".join(lacking).replace("causal", "causal flag")
        return f"the function takes no {words}: no parameter is named {names}"
    return None


def _call_arguments(
    case: AttentionCase, roles: Roles, required: Collection[str], by_name: bool
) -> dict[str, object]:
    """Returns the values of the case by the function's own parameter names; what it has
    no parameter for is left out. `by_name`: causality and window are passed by their
    parameters, else as part of the mask; a bool mask goes to a parameter called a bias as
    0 and -inf. A value that the case does not need is left to the function's default, or
    for a `required` parameter set to the one in OFF. `causal` and `scale` are always
    passed, since some functions are causal by default."""
    values: dict[str, object] = {
        "scale": case.scale,
        "softcap": case.softcap,
        "sinks": case.sinks,
    }
    values["causal"] = case.is_causal and by_name
    if by_name:
        values["window"] = case.window and tuple(
            -1 if w is None else w for w in case.window
        )
    mask = case.mask if by_name else explicit_mask(case)
    if mask is not None and mask.dtype == torch.bool and "bias" in (roles["mask"] or ""):
        zero = torch.zeros(mask.shape, dtype=case.q.dtype, device=mask.device)
        mask = zero.masked_fill(~mask, -math.inf)  # what is called a bias is added
    values["mask"] = mask
    values["gqa"] = True if case.group > 1 else None
    asked = {role: x for role, x in values.items() if x is not None}
    off = {role: x for role, x in OFF.items() if roles[role] in required}
    return {str(roles[r]): x for r, x in {**off, **asked}.items() if roles[r]}
