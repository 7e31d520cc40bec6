"""A different backward pass, or log-sum-exp: which named mistake explains all that is far off.

The rule is that of `numdev.explain.wrong_function`, of each tensor as a whole. Tried are a factor
of one gradient alone, mistakes that are backward's own, and those of a forward pass, which backward
may make alone, or the log-sum-exp."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.explain.alternatives import refined
from numdev.explain.mistakes import variants
from numdev.explain.probe import all_scores, rescored
from numdev.explain.wrong_function import ALIKE, CUT, Suspicion
from numdev.formats import format_of
from numdev.kernels.output import GRADIENTS, Output, upstream
from numdev.kernels.reference import attend, gradients

SAME = 4e-3  # how near an estimated factor is to a known one: a rounding in bfloat16
FAR = 1e-3  # of a gradient's size: less may be roundings of P or dS
Step = Mapping[str, Tensor]


def suspect_gradients(case: AttentionCase, step: Output, part: str = "") -> dict[str, Suspicion]:
    """Of the gradients that a training step of a small case gave, and the log-sum-exp, those far
    off, with what seems to be computed instead; nothing where that cannot be said. `part`: of what
    call."""
    apart = [names for names in (("lse",), GRADIENTS) if getattr(step, names[0]) is not None]
    return {n: by for names in apart for n, by in _suspects(case, step, names, part).items()}


def _suspects(
    case: AttentionCase, step: Output, tensors: Sequence[str], part: str
) -> dict[str, Suspicion]:
    exact = _step(case, tensors)
    given = {n: getattr(step, n).double().nan_to_num(neginf=0.0) for n in tensors}
    u = format_of(step.out.dtype).unit_roundoff
    errors = {n: float((given[n] - x).norm()) for n, x in exact.items()}
    least = 8 * u if "lse" in tensors else max(FAR, 8 * u)
    far = [n for n, x in exact.items() if errors[n] > least * float(x.norm())]
    if not far or not all(math.isfinite(errors[n]) for n in far):
        return {}

    def cut(tried: Step, names: Sequence[str] = far) -> float:
        least = {n: u / math.sqrt(12) * float(exact[n].norm()) + math.ulp(0.0) for n in names}
        return min(errors[n] / max(float((given[n] - tried[n]).norm()), least[n]) for n in names)

    single = {}
    for n in far if "lse" not in tensors else ():
        factor = float((given[n] * exact[n]).sum() / exact[n].square().sum())
        if (by := cut({n: factor * exact[n]}, [n])) >= CUT:
            single[n] = Suspicion(cause=f"{n} {_in_words(factor, case.scale)}", cut=by)
    if len(single) == len(far):
        return single
    found = [(cut(tried), cause) for cause, tried in _mistakes(case, exact, given)]
    best = max(found)[0]
    causes = [cause for by, cause in sorted(found, reverse=True) if by >= max(CUT, best / ALIKE)]
    where = "log-sum-exp" if "lse" in tensors else "backward pass"
    cause = f"in the {where}, {', or '.join(causes[:3])}{part}"
    return {n: Suspicion(cause=cause, cut=best) for n in far} if causes else single


def _in_words(factor: float, scale: float) -> str:
    """The factor of a gradient, as the mistake it is."""
    known = {
        "is 0": 0.0,
        "is ln 2 times what it should be": math.log(2),
        "is log2(e) times what it should be": 1 / math.log(2),
        "lacks the scale": 1 / scale,
        "has the scale twice": scale,
    }
    same = (words for words, f in known.items() if abs(factor - f) <= SAME * (abs(f) or 1.0))
    return next(same, f"is {factor:.4g} times what it should be")


def _step(case: AttentionCase, tensors: Collection[str] = GRADIENTS) -> Step:
    if "lse" in tensors:
        found = attend(case)
        return {"lse": found.lse.masked_fill(found.empty, 0.0)}
    found = gradients(case)
    return {n: getattr(found, n) for n in GRADIENTS}


def _mistakes(case: AttentionCase, exact: Step, given: Step) -> Iterator[tuple[str, Step]]:
    with torch.enable_grad():
        leaves: Any = {n: getattr(case, n).double().requires_grad_() for n in "qkv"}
        tried = [*variants(dataclasses.replace(case, **leaves))]
    for cause, one in tried:
        step = _step(one.detached(), exact)
        if "lse" not in exact:  # back from the variant's q, k and v to the call's
            ends, of = (one.q, one.k, one.v), [*leaves.values()]
            back = torch.autograd.grad(ends, of, [*step.values()], materialize_grads=True)
            step = dict(zip(GRADIENTS, back, strict=True))
        yield cause, step
    if "lse" in exact:
        tops = all_scores(case).amax(dim=-1)
        yield "the logarithm is to base 2", {"lse": exact["lse"] / math.log(2)}
        yield "the maximum is not added", {"lse": exact["lse"] - tops}
        yield "the maximum is all there is", {"lse": tops}
        return
    if exact["dq"].shape == exact["dk"].shape:
        yield "dq and dk are swapped", {**exact, "dq": exact["dk"], "dk": exact["dq"]}
    if case.group > 1:
        first = _step(case.one_of_each_group(0))
        yield "dk, dv have only the first query head of each group", {**first, "dq": exact["dq"]}
    whole, dO = attend(case), upstream(case).double()
    if case.softcap is None:  # with another delta dS = P o (dP - delta) is off by P o the rest
        delta = (dO * whole.out).sum(-1, keepdim=True) * case.scale
        for words, other in {"left out": delta * 0, "the next row's": delta.roll(-1, 2)}.items():
            rest = delta - other
            keys = dataclasses.replace(case, v=case.k, grad_out=rest * case.q)
            dq, dk = exact["dq"] + rest * attend(keys).out, exact["dk"] + gradients(keys).dv
            yield f"delta, the row sum of dO·O, is {words}", {**exact, "dq": dq, "dk": dk}
    else:
        capped = dataclasses.replace(case, **rescored(case, all_scores(case)))
        yield "the slope of the soft cap is missing", _step(capped)
    row_sum = (whole.lse - all_scores(case).amax(dim=-1)).exp()[..., None]
    larger = gradients(dataclasses.replace(case, grad_out=dO * row_sum)).dv
    yield "dv is computed from P before its division by the row sum", {**exact, "dv": larger}
    yield _scaled(case, exact, given)


def _scaled(case: AttentionCase, exact: Step, given: Step) -> tuple[str, Step]:
    """With the scale that fits best, by Gauss-Newton steps from the right one."""
    unit = {n: max(float(x.norm()), math.ulp(0.0)) for n, x in exact.items()}

    def step(t: float) -> Step:
        return _step(dataclasses.replace(case, scale=case.scale * math.exp(t)))

    def error(t: float) -> Tensor:
        tried = step(t)
        return torch.cat([((given[n] - tried[n]) / unit[n]).flatten() for n in GRADIENTS])

    at = refined(error)
    return f"the scale is {math.exp(at):.4g} times the requested one", step(at)
