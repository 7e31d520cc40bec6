"""Numbers beside limits, one by one: what studies other than an audit are judged by.

A test is of a kernel in a format, or of the whole `model`. From a list of them come a report's
findings and verdicts, and a judgement for `numdev gate`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from numdev.gate.rows import grouped
from numdev.gate.verdict import Calls, Judgement, Verdict
from numdev.report import Finding, KernelVerdict
from numdev.report.numbers import labelled, three

MODEL = "model"  # whose tests are of no kernel
NUMBERS = ("rule", "tensor", "metric", "observed", "limit")


class Test(NamedTuple):
    """One number of a kernel in a format, or of the model, beside its limit."""

    about: Mapping[str, Any]  # kernel, options, format
    rule: str
    fails: bool
    sentence: str  # on the number, or why there is none
    observed: float | None = None
    limit: float | None = None
    tensor: str | None = None
    metric: str | None = None
    failing: int = 1  # how many numbers fail, of those that were `judged`
    judged: int = 1
    accused: bool = True  # not where it fails since another does, whose sentence says so
    must: bool = False  # it may not lack its number, though the kernels were not asked for by name

    @property
    def nearness(self) -> float:
        observed = self.observed or 0.0
        return observed / self.limit if self.limit else math.inf if observed else 0.0

    def finding(self) -> Finding:
        kernel, options, fmt = self.about.values()
        name = "" if kernel == MODEL else f"{labelled(kernel, options)} ({fmt}) "
        of: Any = {"kernel": kernel, "options": options, "formats": (fmt,)}
        of |= {n: getattr(self, n) for n in (*NUMBERS, "judged")} | {"count": self.failing}
        return Finding(severity="exceeded", sentence=f"{name}{self.sentence}.", **of)


def judged(tests: Sequence[Test], *, named: bool) -> dict[str, Any]:
    """Findings, a verdict for the model and for each kernel in each format, and the outcome, as
    fields of a report. `named`: whether the kernels were asked for by name; then one that did not
    run is no pass."""
    findings: list[Finding] = []
    verdicts = []
    outcomes = set()
    for own in grouped(tests, lambda t: str(t.about)).values():
        accused = [t for t in own if t.fails and t.accused]
        test = max(accused, key=lambda t: t.nearness, default=None)
        lacking = [t for t in own if t.observed is None and not t.fails]
        more: dict[str, Any] = {"outcome": "passed"}
        if test is not None:
            more = {"outcome": "exceeded", "finding": len(findings) + accused.index(test)}
        elif lacking:
            test = lacking[0]
            more = {"outcome": "unmeasured", "reason": test.sentence}
        else:
            test = max(own, key=lambda t: t.nearness)
            more["reason"] = test.sentence
        numbers = {name: getattr(test, name) for name in NUMBERS}
        if named or more["outcome"] != "unmeasured" or any(t.must for t in lacking):
            outcomes.add(more["outcome"])
        else:
            numbers["rule"] = None
        verdicts.append(KernelVerdict(**test.about, **numbers, **more))
        findings += [t.finding() for t in accused]
    outcome = next((o for o in ("exceeded", "unmeasured") if o in outcomes), "passed")
    return {"findings": tuple(findings), "verdicts": tuple(verdicts), "outcome": outcome}


def judgement(
    tests: Sequence[Test], rules: str, *, named: bool
) -> tuple[Judgement, tuple[Finding, ...]]:
    """The tests of a finished report held to the rules of this name, for `numdev gate`."""
    fields, verdicts = judged(tests, named=named), []
    calls: dict[str, Calls] = {}
    for t in tests:
        ran = t.fails or t.observed is not None
        more: dict[str, Any] = {"ok": int(ran), "skipped": int(not ran), "failed": 0}
        more |= {"reasons": () if ran else (t.sentence,), "required": named or t.must}
        more["outcome"] = "passed" if ran else "unmeasured" if more["required"] else "untested"
        calls.setdefault(str(t.about), Calls(**t.about, **more, backward=False))
        if ran:
            more = {"observed": t.observed, "bound": t.limit, "limit": f"at most {three(t.limit)}"}
            more |= {"rule": t.rule, "outcome": "exceeded" if t.fails else "passed"}
            more |= {"tensor": t.tensor, "metric": t.metric, "offending": t.failing * t.fails}
            verdicts.append(Verdict(**t.about, **more, judged=t.judged))
    made: Any = {"rules": rules, "outcome": fields["outcome"], "calls": tuple(calls.values())}
    return Judgement(**made, verdicts=tuple(verdicts)), fields["findings"]
