"""What a check says: where a kernel offends, beside what it is held to; what that looks like; what
was not tested. Lines that can be read where pytest indents them in 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from numdev.gate.verdict import Judgement
from numdev.gate.words import found_to_round, listed
from numdev.report import AuditReport, DeviationRow, Finding, Place
from numdev.report.foreign import plain

WIDTH = 72
"""pytest takes eight columns of 80."""
NAMED = len("numdev.testing.CheckFailed: ")
"""What Python writes before the first line."""
MOST = 4
"""So many offences are listed."""
EXPLAINED = 2
"""So many of them are told in full."""
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
    """Why a check failed: the offending rows first, the gravest fault's before the others';
    `left_out` is what was not tested."""
    wrong = _wrong(report)
    first, *lines = textwrap.wrap(
        "#" * NAMED + plain(_title(kernel, judgement, wrong)), WIDTH, break_on_hyphens=False
    )
    lines = [first.removeprefix("#" * NAMED), *lines]
    if wrong:
        lines.append("")
    for finding in wrong[:MOST]:
        lines += _offence(finding, report)
    if len(wrong) > MOST:
        lines.append(f"  and {len(wrong) - MOST} more")
    serious = [f.sentence for f in report.findings if f.severity != "note"]
    lines += _paragraphs(serious[:EXPLAINED])
    if not wrong:
        lines += _paragraphs(undecided(judgement))
    claims = report.request.get("claims")
    if wrong and claims is None and all(f.metric in PREDICTED for f in wrong):
        lines += _paragraphs([CLAIM])
    lines += _scripts(scripts, said)
    return "\n".join([*lines, *_paragraphs(left_out)])


def success(
    kernel: str, report: AuditReport, judgement: Judgement, left_out: Sequence[str] = ()
) -> str:
    """What a passed check has shown, and what it has not."""
    ok = [r for r in report.rows if r.role == "kernel" and r.status == "ok"]
    count = len({(r.case, r.seed) for r in ok})
    tensors = ", ".join(dict.fromkeys(r.tensor for r in ok))
    formats = listed(dict.fromkeys(r.format for r in ok))
    said = (
        f"{kernel} passes the rules {judgement.rules}: {tensors} in {count} "
        f"{'case' if count == 1 else 'cases'}, {formats}."
    )
    ways = found_to_round(report.rows)
    return "\n".join([*_wrapped(said), *_paragraphs(ways), *_paragraphs(left_out)])


def in_short(kernel: str, report: AuditReport, judgement: Judgement) -> str:
    """A failed check in one line."""
    for finding in _wrong(report):
        if finding.place is not None:
            said = f"{_against(finding, report)}: {_where(finding, finding.place)}"
            return plain(f"{kernel}: {said}")
    why = [f.sentence for f in report.findings if f.severity == "unmeasured"]
    why += [*undecided(judgement), *not_tested(report)]
    return plain(f"{kernel}: not measured: {why[0] if why else 'nothing ran'}")


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
    grouped = {c.case for c in report.cases if c.kv_heads < c.heads}
    ran = [r for r in report.rows if r.role == "kernel" and r.status == "ok" and r.case in grouped]
    if ran:
        names = ", ".join(dict.fromkeys(r.case for r in ran))
        yield (
            f"Not tested: fewer kv heads than query heads ({names}). k and v were repeated, since "
            "no parameter is named enable_gqa."
        )


def undecided(judgement: Judgement) -> Iterator[str]:
    """Rules that had to be judged and could not be."""
    for v in judgement.verdicts:
        if v.outcome == "unmeasured" and v.kernel is not None:
            reasons = "; ".join(v.reasons[:2])
            yield f"{v.rule} of {v.tensor} ({v.format}) could not be judged: {reasons}."


def _wrong(report: AuditReport) -> list[Finding]:
    return [f for f in report.findings if f.severity == "exceeded"]


def _title(kernel: str, judgement: Judgement, wrong: Sequence[Finding]) -> str:
    if wrong:
        rules = listed(dict.fromkeys(f"`{f.rule}`" for f in wrong))
        return f"{kernel} fails {rules} (rules {judgement.rules})"
    return f"{kernel} was not measured as the rules {judgement.rules} need it, which is no pass."


def _offence(finding: Finding, report: AuditReport) -> Iterator[str]:
    """Where it is worst; the number and its limit; the error beside floor and baseline."""
    if finding.place is None:
        return
    yield from _wrapped(_where(finding, finding.place), indent=2)
    heads = f"{finding.count} of {finding.judged} heads"
    yield from _wrapped(f"{_against(finding, report)}, {heads}", indent=4)
    rows = {role: _row(role, finding, report) for role in ("kernel", "floor", "baseline")}
    said = [f"{role} {r.rms:.2g}" for role, r in rows.items() if r and r.rms is not None]
    if said:
        yield f"    rms error: {', '.join(said)}"


def _where(finding: Finding, place: Place) -> str:
    head = f", head {place.head}" if place.head is not None else ""
    seed = f", seed {place.seed}" if place.seed else ""
    return f"{place.case}{head}, {finding.tensor}, {listed(finding.formats)}{seed}"


def _against(finding: Finding, report: AuditReport) -> str:
    """The worst number and its limit; of another function, which."""
    if finding.observed is None or finding.limit is None:
        row = _row("kernel", finding, report)
        return f"{finding.rule}: {row.suspicion if row else finding.metric}"
    number = f"{finding.observed:{'.0f' if finding.metric == 'nonfinite' else '.3g'}}"
    return f"{finding.rule}: {finding.metric} {number}, limit {finding.limit:g}"


def _row(role: str, finding: Finding, report: AuditReport) -> DeviationRow | None:
    """The row that a role has where a finding is worst."""
    wanted = (role, finding.formats[0], finding.tensor)
    return next(
        (
            r
            for r in report.rows
            if (r.role, r.format, r.tensor) == wanted and Place.of(r) == finding.place
        ),
        None,
    )


def _scripts(scripts: Sequence[Path], said: Sequence[str]) -> Iterator[str]:
    for script in scripts:
        yield from ("", "It shows by itself with", f"  python {script}")
    if not scripts:
        yield from _paragraphs(dict.fromkeys(said))


def _paragraphs(sentences: Iterable[str]) -> Iterator[str]:
    for sentence in sentences:
        yield ""
        yield from _wrapped(sentence)


def _wrapped(text: str, indent: int = 0) -> list[str]:
    first, rest = " " * indent, " " * (indent + 2 if indent else 0)
    return textwrap.wrap(
        plain(text), WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )
