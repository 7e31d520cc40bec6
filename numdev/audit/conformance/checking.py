"""Does a kernel compute attention: `numdev kernels --check NAME`.

A kernel is put through small cases, one feature at a time, and every answer is held against the
fp64 reference or, where one is known without computing, against the known answer. The cases are
data and stand in `numdev.audit.conformance.cases`; `check` is the one loop that runs them, and the
verdicts are given here. Every verdict is one of four: *right*, *wrong* (with the cause in words
where `numdev.explain.wrong_function` finds one), *raises*, or *refuses*: the kernel says that it
cannot (`supports`, `Refused`, or a NotImplementedError), which is no fault.

Right means: the same elements are finite as in the floor, and in every head the rms error is at
most 8 times the floor's, or 4 times that of plain attention in the same format on the same inputs,
or 8 times that of plain attention in fp32; and it is less than half of the answer itself. This is a
test of the function, not of its last bits: a sound kernel stays well below on every case here, and
how close it comes is the audit's question. Inputs must come back unchanged. What is a convention
(the value of a row that sees no key) or a property (whether two runs agree bit by bit) is reported
and judged neither way.

The backward pass is checked by the same rule in `numdev.audit.conformance.backward`; a kernel that
autograd cannot follow refuses it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.audit.conformance.backward import verdict_of
from numdev.audit.conformance.cases import CHECKS, Check, case_of
from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, Refused
from numdev.explain.wrong_function import far_off, suspect
from numdev.kernels import Kernel, Output, find
from numdev.kernels.reference import attend
from numdev.kernels.reference.results import Reference
from numdev.metrics.deviation import Metrics, measure
from numdev.metrics.yardstick import Yardstick
from numdev.report import CheckRecord, ConformanceReport, FeatureRecord
from numdev.system import System

FORMATS = ("bfloat16", "float16", "float32")
FLOORS, BASELINES, IN_FP32, MOST = 8.0, 4.0, 8.0, 0.5
"""Right: up to so many floors, or so many times the baseline's error in the same format or in fp32;
and below this share of the answer."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of one check in one format."""

    check: Check
    format: str
    verdict: str
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
            verdict = "raises" if found[0].verdict == "raises" else "refuses"
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

    def result(verdict: str, words: str = "", feature: str | None = None) -> Result:
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


def _backward(kernel: Kernel, options: Mapping[str, Any], case: AttentionCase) -> tuple[str, str]:
    """The verdict on a kernel's gradients, and what there is to say."""
    try:
        return verdict_of(kernel, options, case)
    except (Refused, NotImplementedError) as refusal:
        return "refuses", _words_of(refusal)
    except Exception as error:
        words = _words_of(error)
        # PyTorch's own words for an operator without a backward in this format.
        if "not implemented" in words.lower():
            return "refuses", words
        return "raises", f"{type(error).__name__}: {words}"


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
    """Whether one head's error is rounding, by the rule at the top of this file."""
    if m["nonfinite"] or m["rms"] is None:
        return not m["nonfinite"]
    limits = ((m["floor_ratio"], FLOORS), (m["baseline_ratio"], BASELINES))
    near = any(ratio is not None and ratio <= limit for ratio, limit in limits)
    near = near or m["rms"] <= IN_FP32 * (in_fp32["rms"] or 0.0)
    return near and (m["rel"] is None or m["rel"] < MOST)


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
            CheckRecord.model_validate(
                {
                    "feature": r.check.feature,
                    "check": r.check.name,
                    "format": r.format,
                    "verdict": r.verdict,
                    "words": r.words,
                }
            )
            for r in results
        ),
    )


def _feature(name: str, results: Sequence[Result]) -> FeatureRecord:
    """One feature's verdict: the worst of its checks; `partly` where some are refused."""
    verdicts = {r.verdict for r in results}
    ranks = ("wrong", "raises", "refuses", "right")
    verdict = next(v for v in ranks if v in verdicts)
    if verdicts == {"right", "refuses"}:
        verdict = "partly"
    shown = [r for r in results if r.verdict == verdict or (verdict == "partly" and r.words)]
    return FeatureRecord.model_validate(
        {
            "feature": name,
            "verdict": verdict,
            "words": "; ".join(_grouped(shown, everywhere=len(verdicts) == 1)),
            "right": sum(r.verdict == "right" for r in results),
            "checks": len(results),
        }
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
