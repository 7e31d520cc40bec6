"""Does a kernel compute attention: `numdev kernels --check NAME`.

A kernel is put through the small cases of `cases`, one feature at a time, and every answer is held
against the fp64 reference or, where one is known without computing, against the known answer. A
verdict is *right*, *wrong* (with the cause in words where `numdev.explain.wrong_function` finds
one), *raises*, or *refuses*: the kernel says that it cannot (`supports`, `Refused`, or a
NotImplementedError; in backward, that autograd cannot follow), which is no fault.

What is right stands in configs/gate/conformance.yaml; the gradients, for a drawn upstream gradient,
are held to the same limits, over all heads. Elements are finite where the floor's are. Inputs must
come back unchanged. What is a convention (the value of a row that sees no key) or a property
(whether two runs agree bit by bit) is reported and judged neither way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from numdev.audit.conformance.cases import CHECKS, Check, case_of
from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, Refused
from numdev.explain.wrong_function import far_off, suspect
from numdev.formats import round_to
from numdev.gate.rules import conformance_limits
from numdev.kernels import Kernel, Output, find
from numdev.kernels.output import GRADIENTS
from numdev.kernels.reference import attend, floor_of, gradients
from numdev.kernels.reference.results import Reference
from numdev.metrics.deviation import Metrics, measure
from numdev.metrics.yardstick import Yardstick
from numdev.report import CheckRecord, ConformanceReport, FeatureRecord
from numdev.system import System

Verdict = Literal["right", "wrong", "raises", "refuses"]
FORMATS = ("bfloat16", "float16", "float32")
# A gradient is called a multiple of the right one when that explains nine tenths of its error.
FACTOR_CUT = 10.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of one check in one format."""

    check: Check
    format: str
    verdict: Verdict
    words: str = ""


# --- the loop ------------------------------------------------------------------------------------


def check(
    kernel: Kernel,
    system: System,
    *,
    options: Mapping[str, Any] | None = None,
    checks: Sequence[Check] = CHECKS,
    formats: Sequence[str] = FORMATS,
) -> ConformanceReport:
    """Run all checks in all formats. A format in which nothing runs is reported once, not for
    every check. Raises MeasurementError where the kernel cannot run on `system`, or runs nothing.
    """
    missing = kernel.missing(system)
    if missing:
        raise MeasurementError(f"{kernel.name} cannot run here: {missing}")
    given = dict(options or {})
    results: list[Result] = []
    for fmt in formats:
        found = [r for c in checks for r in _run(kernel, given, c, fmt, system)]
        if any(r.verdict in ("right", "wrong") for r in found):
            found.append(
                Result(check=Check(feature="formats", name=fmt), format=fmt, verdict="right")
            )
        elif found:
            what = Check(feature="formats", name=fmt)
            verdict: Verdict = "raises" if found[0].verdict == "raises" else "refuses"
            found = [Result(check=what, format=fmt, verdict=verdict, words=found[0].words)]
        results += found
    if not any(r.verdict in ("right", "wrong") for r in results):
        why = results[0].words if results else "there was nothing to check"
        raise MeasurementError(f"{kernel.name} ran none of the checks: {why}")
    return _report(kernel, given, system, results)


def _run(
    kernel: Kernel, options: Mapping[str, Any], check: Check, fmt: str, system: System
) -> Iterator[Result]:
    """The results of one check: of the output, and of the log-sum-exp where there is one."""

    def result(verdict: Verdict, words: str = "", feature: str | None = None) -> Result:
        at = check if feature is None else dataclasses.replace(check, feature=feature)
        return Result(check=at, format=fmt, verdict=verdict, words=words)

    case, known = case_of(check, fmt, system.device)
    if check.backward:
        yield result(*_backward(kernel, options, case))
        return
    before = {n: x.clone() for n, x in _tensors(case).items()}
    try:
        with torch.no_grad():
            outputs = [kernel.attend(case, **options) for _ in range(check.runs)]
        if system.device == "cuda":
            torch.cuda.synchronize()
    except (Refused, NotImplementedError) as refusal:
        yield result("refuses", _words_of(refusal))
        return
    except MeasurementError as error:  # what it returned is no output of this case
        yield result("wrong", error.message)
        return
    except Exception as error:
        yield result("raises", f"{type(error).__name__}: {_words_of(error)}")
        return
    written = [n for n, x in _tensors(case).items() if not _identical(x, before[n])]
    if written:
        yield result("wrong", f"it writes into its inputs ({', '.join(written)})")
        case = dataclasses.replace(case, **before)
    exact = attend(case)
    output = outputs[0]
    wrong = _wrong(case, output, exact, known)
    convention = (
        _convention(output.out, exact, case) if check.feature == "fully masked rows" else ""
    )
    yield result("wrong" if wrong else "right", wrong or convention)
    if output.lse is not None:
        wrong = _wrong_lse(output.lse, exact, case)
        yield result("wrong" if wrong else "right", wrong, feature="log-sum-exp")
    if len(outputs) > 1:
        yield result("right", _noise(outputs), feature="reproducible")


def _backward(
    kernel: Kernel, options: Mapping[str, Any], case: AttentionCase
) -> tuple[Verdict, str]:
    """The verdict on a kernel's gradients, and what there is to say."""
    try:
        case = dataclasses.replace(case, grad_out=_upstream(case))
        output = kernel.gradients(case, **options)
        exact = gradients(case)
        others = {
            "floor": floor_of(exact, case.format),
            "baseline": find("baseline").gradients(case),
            "baseline in fp32": find("baseline").gradients(_widened(case)),
        }
        remarks = [
            _wrong_gradient(
                name,
                getattr(output, name).double(),
                getattr(exact, name),
                {other: getattr(x, name).double() for other, x in others.items()},
            )
            for name in GRADIENTS
        ]
    except (Refused, NotImplementedError) as refusal:
        return "refuses", _words_of(refusal)
    except Exception as error:
        words = _words_of(error)
        # PyTorch's own words for an operator without a backward in this format.
        if "not implemented" in words.lower():
            return "refuses", words
        return "raises", f"{type(error).__name__}: {words}"
    wrong = "; ".join(words for words in remarks if words)
    return ("wrong" if wrong else "right"), wrong


def _upstream(case: AttentionCase) -> Tensor:
    """The gradient with respect to the output: N(0, 1), rounded to the case's format."""
    shape = (*case.q.shape[:3], case.v.shape[-1])
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return round_to(drawn, case.format).to(case.q.dtype).to(case.q.device)


def _wrong_gradient(name: str, got: Tensor, r: Tensor, others: Mapping[str, Tensor]) -> str:
    """What is wrong with one gradient, in words; empty if nothing is. `others` by the limit of how
    many times their error is still right."""
    strays = int((~got.isfinite() & r.isfinite()).sum())
    if strays:
        return f"{name} has {strays} elements that are NaN or infinite and should not be"
    limits = conformance_limits()
    error, size = float((got - r).norm()), float(r.norm())
    near = any(error <= limits[key] * float((x - r).norm()) for key, x in others.items())
    if near and error <= limits["answer"] * size:
        return ""
    factor = float((got * r).sum()) / size**2 if size else 0.0
    if factor and float((got - factor * r).norm()) * FACTOR_CUT <= error:
        return f"{name} is {factor:.3g} times what it should be"
    if not got.any():
        return f"{name} is 0"
    return f"{name} is off by {100 * error / size:.2g} %, and no known mistake explains it"


def _wrong(case: AttentionCase, output: Output, exact: Reference, known: Tensor | None) -> str:
    """What is wrong with an output, in words; empty if nothing is."""
    plain = find("baseline")
    # A kernel may return a wider format than it computes in; its floor is that of its inputs.
    yardstick = Yardstick(
        reference=exact.out if known is None else known,
        term_scale=exact.term_scale,
        empty=exact.empty,
        format=case.format,
        baseline=plain.attend(case).out,
    )
    in_fp32 = measure(plain.attend(_widened(case)).out, yardstick).heads
    measured = measure(output.out, yardstick).heads
    pairs = list(zip(measured, in_fp32, strict=True))
    bad = [h for h, (m, plainly) in enumerate(pairs) if not _is_right(m, plainly)]
    if not bad:
        return ""
    # An error that the baseline makes as well is rounding, however much it looks like a mistake.
    own = [h for h in bad if far_off(measured[h])]
    found = suspect(case, output.out, exact, list(range(case.heads)), own) if own else {}
    if found:
        return next(iter(found.values())).cause
    strays = sum(m["nonfinite"] for m in measured)
    if strays:
        return f"{strays} elements are NaN or infinite and should not be"
    worst = max(bad, key=lambda h: measured[h]["rel"] or 0.0)
    share = measured[worst]["rel"]
    size = f"{100 * share:.2g} % of the answer" if share is not None else "more than the answer"
    return f"the error is {size}, and no known mistake explains it"


def _is_right(m: Metrics, in_fp32: Metrics) -> bool:
    """Whether one head's error is rounding."""
    if m["nonfinite"] or m["rms"] is None:
        return not m["nonfinite"]
    limits = conformance_limits()
    ratios = {"floor": m["floor_ratio"], "baseline": m["baseline_ratio"]}
    near = any(ratio is not None and ratio <= limits[key] for key, ratio in ratios.items())
    near = near or m["rms"] <= limits["baseline in fp32"] * (in_fp32["rms"] or 0.0)
    return near and (m["rel"] is None or m["rel"] < limits["answer"])


def _widened(case: AttentionCase) -> AttentionCase:
    wider = torch.promote_types(case.q.dtype, torch.float32)
    changed: dict[str, Any] = {
        n: x.to(wider) for n, x in _tensors(case).items() if x.dtype != torch.bool
    }
    return dataclasses.replace(case, **changed)


def _wrong_lse(lse: Tensor, exact: Reference, case: AttentionCase) -> str:
    """What is wrong with a log-sum-exp; empty if nothing is. Rows without a key are left out."""
    r = torch.where(exact.empty, 0.0, exact.lse)
    o = torch.where(exact.empty, 0.0, lse.double())
    # A score is a sum of products, whose errors scale with the factors' sizes, not with the sum.
    sizes = [x.double().norm(dim=-1).amax() for x in (case.q, case.k)]
    largest = abs(case.scale) * float(sizes[0] * sizes[1])
    allowed = 4 * case.format.unit_roundoff * (1 + largest + r.abs())

    def near(x: Tensor) -> bool:
        return bool(((o - x).abs() <= allowed).all())

    if near(r):
        return ""
    if near(r / math.log(2)):
        return "it is in base 2; numdev expects the natural logarithm"
    if near(r.exp()):
        return "it is the sum of exponentials, not its logarithm"
    return f"it is off by up to {float((o - r).abs().max()):.2g}, and no known mistake explains it"


def _convention(out: Tensor, exact: Reference, case: AttentionCase) -> str:
    """What stands in rows that see no key."""
    rows = out.double()[exact.empty]
    v = case.v.double().repeat_interleave(case.group, dim=1)
    mean = v.mean(dim=2, keepdim=True).expand_as(exact.out)[exact.empty]
    if bool((rows == 0).all()):
        what = "0"
    elif bool(rows.isnan().all()):
        what = "NaN"
    elif bool(((rows - mean).abs() <= 8 * case.format.unit_roundoff * (1 + mean.abs())).all()):
        what = "the mean of V"
    else:
        what = "neither 0, NaN nor the mean of V"
    return f"a row that sees no key is {what}"


def _noise(outputs: Sequence[Output]) -> str:
    first = outputs[0].out
    if all(_identical(first, o.out) for o in outputs[1:]):
        return "bit by bit"
    spread = max(float((o.out.double() - first.double()).abs().max()) for o in outputs[1:])
    return f"not bit by bit: runs differ by up to {spread:.1e}"


def _identical(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all()) if a.dtype != torch.bool else a.equal(b)


def _tensors(case: AttentionCase) -> dict[str, Any]:
    return {
        f.name: x
        for f in dataclasses.fields(case)
        if isinstance(x := getattr(case, f.name), Tensor)
    }


def _words_of(error: Exception) -> str:
    text = str(error).strip() or repr(error)
    return text.splitlines()[0]


# --- from results to the report ------------------------------------------------------------------


def _report(
    kernel: Kernel, options: Mapping[str, Any], system: System, results: Sequence[Result]
) -> ConformanceReport:
    names = dict.fromkeys(r.check.feature for r in results)
    features = [_feature(n, [r for r in results if r.check.feature == n]) for n in names]
    bad = [f.feature for f in features if f.verdict in ("wrong", "raises")]
    refused = [f.feature for f in features if f.verdict == "refuses"]
    ran = len(features) - len(bad) - len(refused)
    sentence = f"{kernel.name} "
    sentence += f"does not conform: {', '.join(bad)}." if bad else f"conforms in {ran} features."
    if refused:
        sentence += f" It refuses {', '.join(refused)}."
    return ConformanceReport(
        kernel=kernel.name,
        options={k: str(v) for k, v in options.items()},
        system=system.as_dict(),
        conforms=not bad,
        sentence=sentence,
        features=tuple(features),
        checks=tuple(
            CheckRecord(
                feature=r.check.feature,
                check=r.check.name,
                format=r.format,
                verdict=r.verdict,
                words=r.words,
            )
            for r in results
        ),
    )


def _feature(name: str, results: Sequence[Result]) -> FeatureRecord:
    """One feature's verdict: the worst of its checks; `partly` where some are refused."""
    verdicts = {r.verdict for r in results}
    ranks: tuple[Verdict, ...] = ("wrong", "raises", "refuses", "right")
    verdict: Verdict | Literal["partly"] = next(v for v in ranks if v in verdicts)
    if verdicts == {"right", "refuses"}:
        verdict = "partly"
    shown = [r for r in results if r.verdict == verdict or (verdict == "partly" and r.words)]
    return FeatureRecord(
        feature=name,
        verdict=verdict,
        words="; ".join(_grouped(shown, everywhere=len(verdicts) == 1)),
        right=sum(r.verdict == "right" for r in results),
        checks=len(results),
    )


def _grouped(results: Iterable[Result], *, everywhere: bool) -> Iterator[str]:
    """Each distinct remark once, and where it holds if that is not `everywhere`."""
    places: dict[str, list[Result]] = {}
    for r in results:
        if r.words:
            places.setdefault(r.words, []).append(r)
    for words, here in list(places.items())[:3]:
        if here[0].verdict == "right" or (everywhere and len(places) == 1):
            yield words
            continue
        names = list(dict.fromkeys(r.check.name for r in here))
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        formats = ", ".join(dict.fromkeys(r.format for r in here))
        yield f"{words} ({', '.join(names[:2])}{more}; {formats})"
    if len(places) > 3:
        yield f"and {len(places) - 3} other remarks"
