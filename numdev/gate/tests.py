"""Numbers beside limits, one by one: what studies other than an audit are judged by.

A test is of a kernel in a format, or of the whole `model`. From a list of them come a report's
findings and verdicts, and a judgement for `numdev gate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from numdev.gate.rows import grouped
from numdev.gate.verdict import Calls, Judgement, Verdict
from numdev.report import Finding, KernelVerdict
from numdev.report.numbers import labelled, three

MODEL = "model"  # whose tests are of no kernel


class Test(NamedTuple):
    """One number of a kernel in a format, or of the model, beside its limit."""

    about: Mapping[str, Any]  # kernel, options, format
    rule: str
    fails: bool
    sentence: str  # on the number, or why there is none
    observed: float | None = None
    limit: float | None = None

    @property
    def nearness(self) -> float:
        return (self.observed or 0.0) / (self.limit or 1.0)

    def finding(self) -> Finding:
        kernel, options, fmt = self.about.values()
        name = "" if kernel == MODEL else f"{labelled(kernel, options)} ({fmt}) "
        of: Any = {"kernel": kernel, "options": options, "formats": (fmt,), "rule": self.rule}
        of |= {"observed": self.observed, "limit": self.limit, "count": 1, "judged": 1}
        return Finding(severity="exceeded", sentence=f"{name}{self.sentence}.", **of)


def judged(tests: Sequence[Test], *, named: bool) -> dict[str, Any]:
    """Findings, a verdict for the model and for each kernel in each format, and the outcome, as
    fields of a report. `named`: whether the kernels were asked for by name; then one that did not
    run is no pass."""
    findings: list[Finding] = []
    verdicts = []
    for own in grouped(tests, lambda t: str(t.about)).values():
        test = min(own, key=lambda t: (not t.fails, t.observed is not None, -t.nearness))
        more: dict[str, Any] = {"outcome": "passed", "reason": test.sentence, "rule": test.rule}
        if test.fails:
            more |= {"outcome": "exceeded", "reason": None, "finding": len(findings)}
        elif test.observed is None:
            more |= {"outcome": "unmeasured", "rule": test.rule if named else None}
        more |= {"observed": test.observed, "limit": test.limit}
        verdicts.append(KernelVerdict(**test.about, **more))
        findings += [t.finding() for t in own if t.fails]
    outcomes = [v.outcome for v in verdicts if named or v.outcome != "unmeasured"]
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
        more |= {"reasons": () if ran else (t.sentence,), "required": named}
        more["outcome"] = "passed" if ran else "unmeasured" if named else "untested"
        calls.setdefault(str(t.about), Calls(**t.about, **more, backward=False))
        if ran:
            more = {"observed": t.observed, "bound": t.limit, "limit": f"at most {three(t.limit)}"}
            more |= {"rule": t.rule, "outcome": "exceeded" if t.fails else "passed"}
            verdicts.append(Verdict(**t.about, **more, judged=1))
    made: Any = {"rules": rules, "outcome": fields["outcome"], "calls": tuple(calls.values())}
    return Judgement(**made, verdicts=tuple(verdicts)), fields["findings"]
