"""A different backward pass, or log-sum-exp: which named mistake explains all that is far
off.

The rule is that of `numdev.operations.attention.explain.wrong_function`, of each tensor
as a whole. Tried are a factor of one gradient alone, mistakes that are backward's own,
and those of a forward pass, which backward may make alone, or the log-sum-exp."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from numdev.cases import AttentionCase, empty_rows
from numdev.formats import format_of
from numdev.kernels.output import GRADIENTS, Output, pull_back, upstream
from numdev.kernels.reference import attend, gradients
from numdev.operations.attention.explain.alternative_outputs import in_digits, refined
from numdev.operations.attention.explain.call_sample import all_scores, rescored
from numdev.operations.attention.explain.mistakes import instances, variants
from numdev.operations.attention.explain.wrong_function import ALIKE, CUT, Suspicion

# Of the error in the judged format, that a cause found in float32 explains
LEAST_SHARE = 0.01
WHERE = ("backward pass", "log-sum-exp")
SAME = 4e-3  # how near an estimated factor is to a known one: a rounding in bfloat16
FAR = 1e-3  # of a gradient's size: less may be roundings of P or dS
Step = Mapping[str, Tensor]


def suspect_gradients(
    case: AttentionCase,
    step: Output,
    part: str = "",
    judged: Output | None = None,
    hints: Collection[str] | None = None,
) -> dict[str, Suspicion]:
    """Returns what a kernel seems to compute instead, by the name of the tensor: dq, dk,
    dv or lse. A tensor that is not far off is left out, and so is one that no named
    mistake explains. `case`: a small one, of which fp64 references are computed. `step`:
    what the kernel returned; a tensor that is None is not looked at; with dq it must have
    dk and dv, and the case a grad_out. `part`: a phrase on which part of a call this is,
    appended to causes that are no factor of one gradient. `judged`: what the kernel
    returned of the same inputs in the format that is judged; its errors have to shrink
    too, if it has lse, or all three gradients. `hints`: causes of other calls; these
    alone are tried, and factors of single gradients; None: all."""
    suspicions: dict[str, Suspicion] = {}
    for names in (("lse",), GRADIENTS):
        if getattr(step, names[0]) is not None:
            suspicions |= _suspect_tensors(case, step, names, part, judged, hints)
    return suspicions


@dataclass(frozen=True, eq=False)
class _Errors:
    """The tensors of a training step by name, as a kernel returned them and exact, both
    fp64; `unit_roundoff`: of the format in which they were returned."""

    exact: Step
    returned: Step
    unit_roundoff: float

    @classmethod
    def of(cls, step: Output, exact: Step, empty: Tensor | None = None) -> _Errors:
        """Returns the errors of those tensors of a step that are in `exact`; the step
        must have all of these. In the returned tensors NaN and -inf count as 0, and +inf
        as the largest number. `empty`: bool [B, H, q_len], the rows that see no key,
        which count as 0; only for the log-sum-exp."""
        returned = {n: getattr(step, n).double().nan_to_num(neginf=0.0) for n in exact}
        if empty is not None:
            returned = {n: x.masked_fill(empty, 0.0) for n, x in returned.items()}
        return cls(exact, returned, format_of(step.out.dtype).unit_roundoff)

    def size(self, name: str) -> float:
        """Returns the norm of a tensor's error."""
        return float((self.returned[name] - self.exact[name]).norm())

    def cut(self, tried: Step, names: Collection[str]) -> float:
        """Returns how many times smaller the errors of the tensors `names` are against
        `tried` than against the exact results: the smallest ratio of norms over these
        tensors. An error against `tried` counts as a rounding floor at least. `names`
        must not be empty."""
        floors = {
            n: self.unit_roundoff / math.sqrt(12) * float(self.exact[n].norm())
            + math.ulp(0.0)
            for n in names
        }
        return min(
            self.size(n) / max(float((self.returned[n] - tried[n]).norm()), floors[n])
            for n in names
        )

    def share(self, tried: Step, name: str) -> float:
        """Returns the share of a tensor's rms error that is gone when it is measured
        against `tried`, negative where the error grows; 0 where there is no error, or an
        infinite one."""
        before, after = self.size(name), float((self.returned[name] - tried[name]).norm())
        return 1 - after / before if before and math.isfinite(before) else 0.0


def _suspect_tensors(
    case: AttentionCase,
    step: Output,
    tensors: Sequence[str],
    part: str,
    judged: Output | None,
    hints: Collection[str] | None,
) -> dict[str, Suspicion]:
    """Returns what is computed instead of each of `tensors` that is far off, by name: for
    gradients a factor of each, where factors explain all that are far off; else a mistake
    that explains all; where there is none, the factors that explain some. Empty where no
    tensor is far off, where the error of one that is far off is not finite, and where
    nothing explains them. `tensors`: `lse` alone, or all gradients; other arguments as of
    `suspect_gradients`."""
    exact = _exact_step(case, tensors)
    empty = empty_rows(case) if "lse" in tensors else None
    errors = _Errors.of(step, exact, empty)
    lacking = judged is None or any(getattr(judged, n) is None for n in tensors)
    coarse = errors if lacking or judged is None else _Errors.of(judged, exact, empty)
    u = errors.unit_roundoff
    least = 8 * u if "lse" in tensors else max(FAR, 8 * u)
    far = [n for n, x in exact.items() if errors.size(n) > least * float(x.norm())]
    if not far or not all(math.isfinite(errors.size(n)) for n in far):
        return {}
    kinds = instances(case)
    wide = None if coarse is errors else format_of(step.out.dtype).name
    suspicion = partial(_make_suspicion, coarse, wide, kinds, part)
    single: dict[str, Suspicion] = {}
    for n in far if "lse" not in tensors else ():
        factor = float((errors.returned[n] * exact[n]).sum() / exact[n].square().sum())
        tried = {n: factor * exact[n]}
        cause = f"{n} {_describe_factor(factor, case.scale)}"
        by = errors.cut(tried, [n])
        if by >= CUT and (one := suspicion(n, tried, [cause], by)) is not None:
            single[n] = one
    if len(single) == len(far):
        return single
    mistakes = dict(_possible_mistakes(case, exact, errors.returned))
    if hints is not None:
        mistakes = {
            cause: make for cause, make in mistakes.items()
            if not set(hints).isdisjoint((cause, *kinds.get(cause, ())))
        }  # fmt: skip
    steps = {cause: make() for cause, make in mistakes.items()}
    causes, best = _best_causes(errors, steps, far)
    if not causes:
        return single
    words = f"in the {WHERE['lse' in tensors]}, {{}}{part}"
    named = {n: suspicion(n, steps[causes[0]], causes, best, words) for n in far}
    return {n: by for n, by in named.items() if by is not None}


def _best_causes(
    errors: _Errors, steps: Mapping[str, Step], far: Collection[str]
) -> tuple[list[str], float]:
    """Returns the at most three causes that explain all tensors of `far`, the best first,
    and how many times smaller the best makes the error (0 where `steps` is empty). No
    cause is returned where none reaches CUT, and none that explains ALIKE times less than
    the best. `steps`: the tensors that would come out, by cause."""
    cuts = sorted(
        ((errors.cut(x, far), cause) for cause, x in steps.items()), reverse=True
    )
    best = cuts[0][0] if cuts else 0.0
    return [cause for by, cause in cuts if by >= max(CUT, best / ALIKE)][:3], best


def _make_suspicion(
    coarse: _Errors,
    wide: str | None,
    kinds: Mapping[str, tuple[str, ...]],
    part: str,
    name: str,
    tried: Step,
    causes: Sequence[str],
    cut: float,
    words: str = "{}",
) -> Suspicion | None:
    """Returns the suspicion of the tensor `name`, its causes put into the template
    `words`. None where the causes were found in a wider format, named `wide`, and explain
    less than LEAST_SHARE of the errors in the judged format, `coarse`. `kinds`: by cause,
    what it is an instance of in calls of other lengths; `tried`: the tensors of the first
    cause."""
    share = coarse.share(tried, name)
    if wide is not None and share < LEAST_SHARE:
        return None
    # Others tried it on all keys
    forms = dict.fromkeys((words, words.removesuffix(part)))

    def in_forms(cause: str) -> tuple[str, ...]:
        mechanisms = (cause, *kinds.get(cause, ()))
        return tuple(form.format(y) for y in mechanisms for form in forms)

    return Suspicion(
        cause=words.format(", or ".join(causes)),
        cut=cut,
        share=share,
        cut_format=wide,
        instances=tuple(map(in_forms, causes)),
        words=tuple(y for x in causes for y in (x, *kinds.get(x, ()))),
    )


def _describe_factor(factor: float, scale: float) -> str:
    """Returns a predicate of a gradient that is `factor` times the exact one, for a call
    of this scale: `is 0`, `is ln 2 times what it should be`, `is log2(e) times what it
    should be`, `lacks the scale` or `has the scale twice`, the first from which the
    factor differs by SAME of it at most (of 1 for 0); else `is 1.37 times what it should
    be`. Of a scale of 0, or one whose reciprocal is not finite, no factor is the
    scale's."""
    factors = {
        "is 0": 0.0,
        "is ln 2 times what it should be": math.log(2),
        "is log2(e) times what it should be": 1 / math.log(2),
    }
    if scale and math.isfinite(1 / scale):
        factors |= {"lacks the scale": 1 / scale, "has the scale twice": scale}
    same = (
        words for words, f in factors.items() if abs(factor - f) <= SAME * (abs(f) or 1.0)
    )
    return next(same, f"is {in_digits(factor)} times what it should be")


def _exact_step(case: AttentionCase, tensors: Collection[str] = GRADIENTS) -> Step:
    """Returns fp64 tensors by name: the exact log-sum-exp of a case, 0 in rows that see
    no key, as `lse` alone, where `tensors` has `lse`; else its exact gradients dq, dk and
    dv. Raises UsageError for gradients of a case without grad_out."""
    if "lse" in tensors:
        forward = attend(case)
        return {"lse": forward.lse.masked_fill(forward.empty, 0.0)}
    backward = gradients(case)
    return {n: getattr(backward, n) for n in GRADIENTS}


def _possible_mistakes(
    case: AttentionCase, exact: Step, returned: Step
) -> Iterator[tuple[str, Callable[[], Step]]]:
    """Yields the causes that are tried, each with a function that computes by name what
    would come out: mistakes of the forward pass, then those of the log-sum-exp or of
    backward alone. `exact`, `returned`: `lse` alone, or dq, dk and dv."""
    with torch.enable_grad():
        leaves = q, k, v = tuple(
            x.double().requires_grad_() for x in (case.q, case.k, case.v)
        )
        tried = [*variants(dataclasses.replace(case, q=q, k=k, v=v))]

    def of_variant(one: AttentionCase) -> Step:
        """Returns the exact tensors of a changed case, as a kernel would return them that
        computes this case. Gradients are with respect to the call's own q, k and v."""
        step = _exact_step(one.detached(), exact)
        if "lse" not in exact:  # back from the variant's q, k and v to the call's
            ends, upstream = (one.q, one.k, one.v), [*step.values()]
            with torch.enable_grad():
                back = pull_back(ends, upstream, leaves, retain_graph=True)
            step = dict(zip(GRADIENTS, back, strict=True))
        return step

    for cause, one in tried:
        yield cause, partial(of_variant, one)
    yield from (
        _lse_mistakes(case, exact, returned)
        if "lse" in exact
        else _backward_mistakes(case, exact, returned)
    )


def _lse_mistakes(
    case: AttentionCase, exact: Step, returned: Step
) -> Iterator[tuple[str, Callable[[], Step]]]:
    """Yields causes of a wrong log-sum-exp alone, each with a function that returns the
    log-sum-exp by name, as `{"lse": ...}`, 0 in rows that see no key. One cause adds the
    mean error as a constant. For this one and for parts of the keys, a row whose exact
    value is 0 counts as one that sees no key."""
    lse, tops = exact["lse"], all_scores(case).amax(dim=-1).nan_to_num(neginf=0.0)
    seen = lse != 0
    constant = float((returned["lse"] - lse)[seen].mean()) if bool(seen.any()) else 0.0
    steps = {
        "the logarithm is to base 2": lse / math.log(2),
        "the maximum is not added": lse - tops,
        "the maximum is all there is": tops,
        "the maximum is added in base 2": lse - tops + tops / math.log(2),
        "the logarithm of the row sum is to base 2": tops + (lse - tops) / math.log(2),
        f"{constant:+.4g} is added": torch.where(seen, lse + constant, lse),
    }
    for cause, tried in steps.items():
        yield cause, partial(dict, lse=tried)
    for words, tried in merged_in_base_2(case).items():
        yield words, partial(dict, lse=tried.masked_fill(~seen, 0.0))


SPLITS = (2, 4, 8)


def merged_in_base_2(case: AttentionCase) -> dict[str, Tensor]:
    """Returns by cause, in words, the log-sum-exp [B, H, q_len] of 2, 4 and 8 parts of
    the keys (fewer where widths do not come out even), each to base e, merged as if to
    base 2. Sinks do not count. A count that leaves one part is left out: the mapping is
    empty for a single key."""
    S, merged_by_cause = all_scores(case), {}
    for count in SPLITS:
        width = -(-case.kv_len // count)
        if width < case.kv_len:
            parts = torch.stack([x.logsumexp(-1) for x in S.split(width, dim=-1)])
            merged = (parts * math.log(2)).logsumexp(0) / math.log(2)
            merged_by_cause[f"{count} parts of the keys are merged with powers of 2"] = (
                merged
            )
    return merged_by_cause


def _backward_mistakes(
    case: AttentionCase, exact: Step, returned: Step
) -> Iterator[tuple[str, Callable[[], Step]]]:
    """Yields causes that are backward's alone, each with a function that computes dq, dk
    and dv by name: swapped gradients (where dq and dk have one shape), a group's first
    head alone (where it has several), a wrong delta (without a soft cap), no slope of the
    soft cap (with one), P before its division, another scale."""
    if exact["dq"].shape == exact["dk"].shape:
        yield (
            "dq and dk are swapped",
            lambda: {**exact, "dq": exact["dk"], "dk": exact["dq"]},
        )
    if case.group > 1:
        cause = "dk, dv have only the first query head of each group"
        first = case.restrict(heads=slice(0, None, case.group))
        yield cause, lambda: {**_exact_step(first), "dq": exact["dq"]}
    whole, dO = attend(case), upstream(case).double()
    # With another delta dS = P o (dP - delta) is off by P o the rest
    if case.softcap is None:
        delta = (dO * whole.out).sum(-1, keepdim=True) * case.scale
        for words, other in {
            "left out": delta * 0,
            "the next row's": delta.roll(-1, 2),
        }.items():
            cause = f"delta, the row sum of dO·O, is {words}"
            yield cause, partial(_with_wrong_delta, case, exact, delta - other)
    else:
        capped = dataclasses.replace(case, **rescored(case, all_scores(case)))
        yield "the slope of the soft cap is missing", partial(_exact_step, capped)
    row_sum = (whole.lse - all_scores(case).amax(dim=-1)).exp()[..., None]
    larger = dataclasses.replace(case, grad_out=dO * row_sum)
    cause = "dv is computed from P before its division by the row sum"
    yield cause, lambda: {**exact, "dv": gradients(larger).dv}
    cause, scaled = _fit_scale(case, exact, returned)
    yield cause, lambda: scaled


def _with_wrong_delta(case: AttentionCase, exact: Step, deficit: Tensor) -> Step:
    """Returns dq, dk and dv where delta, the row sum of dO·O, is too small by `deficit` /
    scale; `deficit`: [B, H, q_len, 1]. dv is the exact one. For calls without a soft
    cap."""
    keys = dataclasses.replace(case, v=case.k, grad_out=deficit * case.q)
    dq = exact["dq"] + deficit * attend(keys).out
    dk = exact["dk"] + gradients(keys).dv
    return {**exact, "dq": dq, "dk": dk}


def _fit_scale(case: AttentionCase, exact: Step, returned: Step) -> tuple[str, Step]:
    """Returns the cause, `the scale is 1.37 times the requested one`, and the gradients
    of the scale that fits the returned ones best, by Gauss-Newton steps from the
    requested scale."""
    unit = {n: max(float(x.norm()), math.ulp(0.0)) for n, x in exact.items()}

    def step(t: float) -> Step:
        return _exact_step(dataclasses.replace(case, scale=case.scale * math.exp(t)))

    def error(t: float) -> Tensor:
        tried = step(t)
        return torch.cat(
            [((returned[n] - tried[n]) / unit[n]).flatten() for n in GRADIENTS]
        )

    at = refined(error)
    return f"the scale is {in_digits(math.exp(at))} times the requested one", step(at)
