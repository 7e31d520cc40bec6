"""A different backward pass: which named mistake explains all gradients that are far off.

The rule is that of `numdev.explain.wrong_function`, of each gradient as a whole. Tried are a factor
of one gradient alone, mistakes that are backward's own, and those of a forward pass, which backward
may make alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor
from torch.nn.functional import pad

from numdev.cases import AttentionCase
from numdev.explain.alternatives import all_scores
from numdev.explain.mistakes import variants
from numdev.explain.wrong_function import ALIKE, CUT, Suspicion
from numdev.formats import format_of
from numdev.kernels.output import GRADIENTS, Output, upstream
from numdev.kernels.reference import attend, gradients

SAME = 4e-3  # how near an estimated factor is to a known one: a rounding in bfloat16
FAR = 1e-3  # of a gradient's size: less may be roundings of P or dS
Step = Mapping[str, Tensor]


def suspect_gradients(case: AttentionCase, step: Output, part: str = "") -> dict[str, Suspicion]:
    """Of the gradients that a training step of a small case gave, those that are far off, with what
    backward seems to compute instead; nothing where that cannot be said. `part`: of what call."""
    exact, given = _step(case), {n: getattr(step, n).double() for n in GRADIENTS}
    u = format_of(step.out.dtype).unit_roundoff
    errors = {n: float((given[n] - x).norm()) for n, x in exact.items()}
    far = [n for n, x in exact.items() if errors[n] > max(FAR, 8 * u) * float(x.norm())]
    if not far or not all(math.isfinite(errors[n]) for n in far):
        return {}

    def cut(tried: Step, names: Sequence[str] = far) -> float:
        least = {n: u / math.sqrt(12) * float(exact[n].norm()) + math.ulp(0.0) for n in names}
        return min(errors[n] / max(float((given[n] - tried[n]).norm()), least[n]) for n in names)

    single = {}
    for n in far:
        factor = float((given[n] * exact[n]).sum() / exact[n].square().sum())
        if (by := cut({n: factor * exact[n]}, [n])) >= CUT:
            single[n] = Suspicion(cause=f"{n} {_in_words(factor, case.scale)}", cut=by)
    if len(single) == len(far):
        return single
    found = [(cut(tried), cause) for cause, tried in _mistakes(case, exact, given)]
    best = max(found)[0]
    causes = [cause for by, cause in sorted(found, reverse=True) if by >= max(CUT, best / ALIKE)]
    cause = f"in the backward pass, {', or '.join(causes[:3])}{part}"
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


def _step(case: AttentionCase) -> Step:
    found = gradients(case)
    return {n: getattr(found, n) for n in GRADIENTS}


def _mistakes(case: AttentionCase, exact: Step, given: Step) -> Iterator[tuple[str, Step]]:
    """What is tried, with the gradients that would come out."""
    if exact["dq"].shape == exact["dk"].shape:
        yield "dq and dk are swapped", {**exact, "dq": exact["dk"], "dk": exact["dq"]}
    if case.group > 1:
        first = _step(case.one_of_each_group(0))
        yield "dk and dv are of the first query head of each group", {**first, "dq": exact["dq"]}
    whole, dO = attend(case), upstream(case).double()
    if case.softcap is None:  # with another delta dS = P o (dP - delta) is off by P o the rest
        delta = (dO * whole.out).sum(-1, keepdim=True) * case.scale
        for words, other in {"missing": delta * 0, "of the next row": delta.roll(-1, 2)}.items():
            rest = delta - other
            keys = dataclasses.replace(case, v=case.k, grad_out=rest * case.q)
            dq, dk = exact["dq"] + rest * attend(keys).out, exact["dk"] + gradients(keys).dv
            yield f"delta is {words}", {**exact, "dq": dq, "dk": dk}
    if case.group == 1:
        row_sum = (whole.lse - all_scores(case).amax(dim=-1)).exp()[..., None]
        larger = gradients(dataclasses.replace(case, grad_out=dO * row_sum)).dv
        yield "dv is of P before it is divided by the row sum", {**exact, "dv": larger}
    for cause, variant in variants(case):
        yield cause, {n: _as(x, exact[n]) for n, x in _step(variant).items()}
    yield _scaled(case, exact, given)


def _scaled(case: AttentionCase, exact: Step, given: Step) -> tuple[str, Step]:
    """With the scale that fits best, by Gauss-Newton steps from the right one."""
    at, unit = 0.0, {n: max(float(x.norm()), math.ulp(0.0)) for n, x in exact.items()}

    def step(t: float) -> Step:
        return _step(dataclasses.replace(case, scale=case.scale * math.exp(t)))

    for _ in range(4):
        here, near = step(at), step(at + 1e-4)
        rise = {n: (near[n] - here[n]) / (1e-4 * unit[n]) for n in GRADIENTS}
        fits = sum(float((rise[n] * (given[n] - here[n])).sum()) / unit[n] for n in GRADIENTS)
        size = sum(float(x.square().sum()) for x in rise.values())
        move = fits / max(size, math.ulp(0.0))
        at += min(max(move, -0.7), 0.7) if math.isfinite(move) else 0.0
    return f"the scale is {math.exp(at):.4g} times what was asked", step(at)


def _as(x: Tensor, like: Tensor) -> Tensor:
    """With 0 for rows and features that a mistake leaves out, and without those it adds."""
    return pad(x, (0, like.shape[3] - x.shape[3], 0, like.shape[2] - x.shape[2]))
