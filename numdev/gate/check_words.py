"""What a check says, in lines that can be read where pytest indents them in 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from numdev.gate.findings import found_to_round, listed
from numdev.gate.verdict import Judgement
from numdev.report import AuditReport, DeviationRow, Finding, Place
from numdev.report.foreign import plain

WIDTH = 72  # pytest takes eight columns of 80
MOST = 4  # so many findings are listed
PREDICTED = ("expected_ratio", "worst_row")
CLAIM = (
    "Without `claims` a function is held against the roundings of FlashAttention-2: P, dS and the "
    "results. Where they did not explain its errors, neither did any other way of rounding that is "
    "known of sound kernels. One that rounds elsewhere by design says so: "
    'claims={"preset": "eager"}, or other options of `emulated`.'
)


def failure(
    kernel: str,
    report: AuditReport,
    judgement: Judgement,
    scripts: Sequence[Path],
    said: Sequence[str],
    left_out: Sequence[str] = (),
) -> str:
    """Why a check failed: what is wrong, the gravest first, with the rms error beside floor and
    baseline; `left_out` is what was not tested."""
    wrong = [f for f in report.findings if f.severity == "exceeded"]
    if wrong:
        rules = listed(dict.fromkeys(f"`{f.rule}`" for f in wrong))
        paragraphs = [f"{kernel} fails {rules} (rules {judgement.rules})"]
    else:
        paragraphs = [f"{kernel} was not measured as the rules {judgement.rules} need it: no pass."]
        paragraphs += _unmeasured(report, judgement)[:MOST]
    for finding in wrong[:MOST]:
        sentence = finding.sentence.removeprefix(f"{kernel} ")  # the title names it
        paragraphs.append(f"{sentence[:1].upper()}{sentence[1:]} {_errors(finding, report)}")
    if len(wrong) > MOST:
        paragraphs.append(f"And {len(wrong) - MOST} more.")
    if wrong and report.request.get("claims") is None:
        paragraphs += [CLAIM] * all(f.metric in PREDICTED for f in wrong)
    text = _wrapped(paragraphs)
    for script in scripts:
        text += f"\n\nIt shows by itself with\n  python {script}"
    rest = [*(() if scripts else dict.fromkeys(said)), *left_out]
    return text + ("\n\n" + _wrapped(rest) if rest else "")


def success(
    kernel: str, report: AuditReport, judgement: Judgement, left_out: Sequence[str] = ()
) -> str:
    """What a passed check has shown, and what it has not."""
    ok = [r for r in report.rows if r.role == "kernel" and r.status == "ok"]
    count = len({(r.case, r.seed) for r in ok})
    tensors, formats = (
        ", ".join(dict.fromkeys(getattr(r, n) for r in ok)) for n in ("tensor", "format")
    )
    passed = (
        f"{kernel} passes the rules {judgement.rules}: {tensors} in {count} "
        f"case{'s' * (count != 1)}, {formats}."
    )
    return _wrapped([passed, *found_to_round(report.rows), *left_out])


def in_short(report: AuditReport, judgement: Judgement) -> str:
    """A failed check in one sentence."""
    wrong = [f.sentence for f in report.findings if f.severity == "exceeded"]
    why = [*_unmeasured(report, judgement), *not_tested(report), "nothing ran"]
    return plain(wrong[0] if wrong else f"not measured: {why[0]}")


def not_tested(report: AuditReport) -> Iterator[str]:
    """A sentence for each reason for which calls were skipped."""
    kernel = [r for r in report.rows if r.role == "kernel"]
    every = {(r.case, r.seed, r.format) for r in kernel}
    reasons: dict[tuple[bool, str], list[DeviationRow]] = {}
    for row in kernel:
        if row.status == "skipped":
            reasons.setdefault((row.tensor == "dq", row.reason or "no reason"), []).append(row)
    for (backward, why), rows in reasons.items():
        what = "backward passes" if backward else "calls"
        names = ", ".join(dict.fromkeys(r.case for r in rows))
        which = "" if len(rows) == len(every) else f" ({names})"
        yield f"Skipped: {len(rows)} of {len(every)} {what}{which}: {why}."


def repeated(report: AuditReport) -> Iterator[str]:
    """Of a function that takes as many kv heads as query heads: where it was not given fewer."""
    fewer = {c.case for c in report.cases if c.kv_heads < c.heads}
    ran = [r for r in report.rows if r.role == "kernel" and r.status == "ok" and r.case in fewer]
    if ran:
        names = ", ".join(dict.fromkeys(r.case for r in ran))
        yield (
            f"Not tested: fewer kv heads than query heads ({names}). k and v were repeated, since "
            "no parameter is named enable_gqa."
        )


def _unmeasured(report: AuditReport, judgement: Judgement) -> list[str]:
    """What had to be judged and could not be."""
    return [
        *(f.sentence for f in report.findings if f.severity == "unmeasured"),
        *(
            f"{v.rule} of {v.tensor} ({v.format}) could not be judged: {'; '.join(v.reasons[:2])}."
            for v in judgement.verdicts
            if v.outcome == "unmeasured" and v.kernel is not None
        ),
    ]


def _errors(finding: Finding, report: AuditReport) -> str:
    """The rms error where a finding is worst, beside floor and baseline."""
    at = (finding.formats[0], finding.tensor, finding.place)
    rms = {r.role: r.rms for r in report.rows if (r.format, r.tensor, Place.of(r)) == at}
    told = [f"{n} {rms[n]:.2g}" for n in ("kernel", "floor", "baseline") if rms.get(n) is not None]
    return f"rms error: {', '.join(told)}." if told else ""


def _wrapped(paragraphs: Iterable[str]) -> str:
    return "\n\n".join(
        textwrap.fill(plain(text), WIDTH, break_on_hyphens=False) for text in paragraphs
    )
