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
    found = [(cut(tried), cause) for cause, tried in _mistakes(case, exact)]
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


def _mistakes(case: AttentionCase, exact: Step) -> Iterator[tuple[str, Step]]:
    """What is tried, with the gradients that would come out."""
    yield "dq and dk are swapped", {**exact, "dq": exact["dk"], "dk": exact["dq"]}
    if case.group > 1:
        first = _step(case.one_of_each_group(0))
        yield "dk and dv are of the first query head of each group", {**first, "dq": exact["dq"]}
    if case.softcap is None:  # without delta dS = P o (dP - delta) is larger by P o delta
        delta = (upstream(case).double() * attend(case).out).sum(-1, keepdim=True) * case.scale
        keys = dataclasses.replace(case, v=case.k, grad_out=delta * case.q)
        dq, dk = exact["dq"] + delta * attend(keys).out, exact["dk"] + gradients(keys).dv
        yield "delta is missing", {**exact, "dq": dq, "dk": dk}
    for cause, variant in variants(case):
        yield cause, {n: _as(x, exact[n]) for n, x in _step(variant).items()}


def _as(x: Tensor, like: Tensor) -> Tensor:
    """With 0 for rows and features that a mistake leaves out, and without those it adds."""
    return pad(x, (0, like.shape[3] - x.shape[3], 0, like.shape[2] - x.shape[2]))
