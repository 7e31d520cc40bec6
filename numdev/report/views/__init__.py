"""What is shown of each kind of report, as a document: one module a kind, with `blocks`.
Here is what all have: the title, the answer, the findings, and where the numbers come
from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, assert_never

from numdev.gate.judgement import RATIOS
from numdev.grouping import grouped
from numdev.metrics.statistics import BIAS_FORMATS
from numdev.report import (
    DeviationRow,
    Finding,
    KernelSummary,
    KernelVerdict,
    Outcome,
    Places,
    Report,
)
from numdev.report import document as doc
from numdev.report.number_text import MOST, label, multiple, ratio, si, three
from numdev.report_kinds import kind_of
from numdev.studies.audit.section_timing import words as seconds
from numdev.tensor_properties import ATTENTION_WORDS, Words

REPRODUCERS = "reproducers"
TESTED = 2  # sentences on what was tested that a page shows at once
# Characters of a reproducer that the page shows; a longer one is only named
LONGEST = 32_000


def style_of(outcome: Outcome | None) -> doc.Style:
    """Returns the style (colour) of an outcome: `bad`, `warn` (not judged) or `good`;
    `soft` for None, where nothing follows."""
    match outcome:
        case Outcome.EXCEEDED:
            return "bad"
        case Outcome.NOT_JUDGED:
            return "warn"
        case Outcome.PASSED:
            return "good"
        case None:
            return "soft"
        case _:
            assert_never(outcome)


def _is_repeated(item: doc.Item, lines: Sequence[doc.Item]) -> bool:
    """Whether one of these lines has the item's text, and in its lead the item's name:
    the item's lead up to a comma, or of a `Cause` what its text begins with (`Cause:
    rollout: temperature 1`)."""
    name, text = item.lead.partition(",")[0].rstrip(":"), item.text.removesuffix(".")
    if name == "Cause":
        name, _, text = text.partition(": ")
    return any(text in line.text and name in line.lead.split() for line in lines)


def document_of(
    report: Report | doc.Document, directory: Path | None = None
) -> doc.Document:
    """Returns the report as a document: verdicts, answer, findings, what its kind shows,
    and where the numbers come from. First sentences of the answer for which its kind has
    a style stand before the verdicts; a sentence that a verdict repeats is left out. A
    document stays as it is. Reproducers are looked for under `directory`; None:
    nowhere."""
    if isinstance(report, doc.Document):
        return report
    kind = kind_of(report.kind)
    summary: Any = getattr(report, "summary")  # noqa: B009 - every kind has one
    target = report.request.get("target") or report.provenance.command
    findings = tuple(_finding_items(report, directory))
    lines, answer = (
        list(verdicts(report, directory)),
        [doc.item_with_lead(line) for line in summary.answer],
    )
    first = [replace(answer.pop(0), style=style) for style in kind.styles(report)]
    lines = [*first, *lines]
    answer = [item for item in answer if not _is_repeated(item, lines)]
    title = report.request.get("title") or f"{report.kind.capitalize()}: {target}"
    blocks = (
        doc.Bullets(tuple(lines), "verdicts"),
        doc.Bullets(tuple(answer), "answer"),
        *((doc.Heading("Findings", doc.TEXT),) if findings else ()),
        doc.Bullets(findings, "findings"),
        *_tested_nodes(report.tested),
        *kind.blocks(report),
        *_provenance_nodes(report),
    )
    return doc.Document(str(title), blocks)


def _tested_nodes(sentences: Sequence[str]) -> Iterator[doc.Node]:
    """Yields the sentences on what was tested and what was not, as notes. Where there are
    more than TESTED, a page shows them all on request alone, so that numbers are near the
    verdict."""
    if len(sentences) <= TESTED:
        yield from doc.notes(sentences)
        return
    title = f"What was tested, and what was not ({len(sentences)})"
    yield doc.Details(title, doc.notes(sentences))


class Verdicts(NamedTuple):
    """What became of each kernel, without a report."""

    verdicts: Sequence[KernelVerdict]
    findings: Sequence[Finding]


def verdicts(
    report: Report | Verdicts, directory: Path | None = None
) -> Iterator[doc.Item]:
    """Yields a line for each kernel in each format, the gravest first: its verdict, and
    the number or finding that matters most; below it the details, and the reproducer of
    its finding, looked for under `directory`. A finding that leads in several formats is
    one line."""
    kernels = getattr(getattr(report, "summary", None), "kernels", ())
    words: Words = getattr(report, "words", ATTENTION_WORDS)
    sizes = {
        (k.kernel, str(k.options), k.format): k for k in kernels if k.role == "kernel"
    }
    ordered = sorted(report.verdicts, key=_verdict_rank)
    lines = list(grouped(ordered, lambda v: _line_key(ordered, v)).values())
    names = [label(of[0]) for of in lines]
    width = max(map(len, names), default=0)
    wide = max((len(_word_and_style(of[0])[0]) for of in lines), default=0)
    for name, of in zip(names, lines, strict=True):
        v, formats = of[0], [each.format for each in of]
        summaries = [sizes.get((v.kernel, str(v.options), fmt)) for fmt in formats]
        word, style = _word_and_style(v)
        lead = f"{word:{wide}}  {name:{width}}  {', '.join(formats)} "
        if v.finding is None:
            text = v.reason or _passed_line(v, summaries[0], words)
            yield doc.Item(text, lead=lead, style=style, detail=v.details)
            continue
        finding = report.findings[v.finding]
        yield doc.Item(
            finding.sentence.removeprefix(f"{name} ({', '.join(finding.formats)}) "),
            lead=lead, style=style, link=_cell_link(report, finding),
            detail=_finding_details(v, finding, summaries, words),
            script=_reproducer(finding, directory),
        )  # fmt: skip


def _passed_line(v: KernelVerdict, summary: KernelSummary | None, words: Words) -> str:
    """Returns the line on a kernel that passed and whose study has no words for it: how
    far it is from fp64, else the rule that it came nearest to, else that no limit
    applies."""
    if summary is not None and summary.max_abs is not None:
        return _error_line(summary, words)
    if v.rule is None:
        return "no limit on the size of its errors applies here"
    write = multiple if v.metric in RATIOS else three
    number = write(v.observed, v.limit)
    bias = v.observed if v.metric is not None and v.metric.startswith("bias") else None
    is_beyond = bias is not None and v.limit is not None and bias > v.limit
    limit = three(v.limit) + ", beyond it but not certain" * is_beyond
    return f"closest to its limit: rule `{v.rule}`, {number} (limit {limit})"


def _line_key(every: Sequence[KernelVerdict], v: KernelVerdict) -> object:
    """Returns the key by which verdicts share a line: kernel, word and finding. A verdict
    without a finding has a line of its own, so that the key is its index in `every`."""
    if v.finding is None:
        return next(at for at, each in enumerate(every) if each is v)
    return label(v), _word_and_style(v), f"finding {v.finding}"


def _finding_details(
    v: KernelVerdict,
    finding: Finding,
    summaries: Sequence[KernelSummary | None],
    words: Words,
) -> str:
    """Returns the details of a finding, and how far off the kernel's output is in each of
    these formats where a limit is exceeded, its elements are finite and its error over
    the floor is above 0 and not too large to mean anything. `summaries`: of the kernel in
    each format, None where there is none; `words`: of the operation."""
    far = [
        k
        for k in summaries
        if k
        and v.outcome == "exceeded"
        and k.nonfinite == 0
        and (k.floor_ratio or MOST) < MOST
    ]
    sizes = [
        f"{'median ' * (k.ok > 1)}{_over_clause(k, words)}"
        + f" ({k.format})" * (len(far) > 1)
        for k in far
    ]
    whole = f"Error of its output: {'; '.join(sizes)}." if sizes else ""
    return f"{finding.details} {whole}".strip()


def _verdict_rank(verdict: KernelVerdict) -> int:
    """Returns the order of a verdict, 0 to 3: what is wrong first, then not judged, then
    passed; last the soft ones, such as what this machine cannot run."""
    return ("bad", "warn", "good", "soft").index(_word_and_style(verdict)[1])


def _word_and_style(of: KernelVerdict | Finding) -> tuple[str, doc.Style]:
    """Returns the word and the style (colour) of an outcome, as `FAIL` and `bad`. A
    failed call is CRASHED, in red (`bad`). Where no rule could be applied the style is
    `soft`; a note has no word, and is soft too."""
    if isinstance(of, Finding) and of.severity == "note":
        return "", "soft"
    outcome = Outcome(of.severity) if isinstance(of, Finding) else of.outcome
    # Of a failed call
    if outcome is Outcome.NOT_JUDGED and of.rule == "runs" and of.tensor:
        return "CRASHED", "bad"
    soft = outcome is Outcome.NOT_JUDGED and of.rule is None
    return outcome.word, "soft" if soft else style_of(outcome)


def _error_line(k: KernelSummary, words: Words) -> str:
    """Returns how far a kernel that passed is from fp64: its error over the expected, the
    floor and the baseline's, as `_over_clause` writes it. Its largest error instead where
    its error over the floor is missing or too large to mean anything, and in float64,
    which the reference has too. `words`: of the operation."""
    if k.format == "float64":
        return f"max difference {si(k.max_abs)} from the reference, which is float64 too"
    if k.floor_ratio is None or k.floor_ratio > MOST:
        return f"max error {si(k.max_abs)}; the exact result needs no rounding"
    return f"{'median' if k.ok > 1 else 'error'} {_over_clause(k, words)}"


def _over_clause(k: KernelSummary, words: Words) -> str:
    """Returns `1.00× expected, 1.23× floor, 0.34× eager; worst 1.48× floor, decode head
    2`: medians over heads, without what is not in the summary, and without `expected` in
    formats other than BIAS_FORMATS. Of one head alone its numbers; the worst is left out
    there, and where it is missing or too large to mean anything."""
    expected = k.expected_ratio if k.format in BIAS_FORMATS else None
    sizes = {
        "expected": expected,
        "floor": k.floor_ratio,
        words.baseline: k.baseline_ratio,
    }
    text = ", ".join(f"{ratio(x)}× {name}" for name, x in sizes.items() if x is not None)
    if k.ok == 1 or (k.floor_ratio_worst or math.inf) > MOST:
        return text
    return f"{text}; worst {ratio(k.floor_ratio_worst)}× floor, {k.floor_ratio_where}"


def _finding_items(report: Report, directory: Path | None) -> Iterator[doc.Item]:
    """Yields as lines the findings that no verdict shows. Kernels are in the order of
    their verdicts, those without one last."""
    shown = {v.finding for v in report.verdicts}
    ordered = sorted(report.verdicts, key=_verdict_rank)
    names = [label(v) for v in ordered]
    names += [label(f) for f in report.findings]
    places = [names.index(label(f)) for f in report.findings]
    for number, finding in sorted(
        enumerate(report.findings), key=lambda pair: places[pair[0]]
    ):
        if number not in shown:
            script = _reproducer(finding, directory)
            (name, style), link = _word_and_style(finding), _cell_link(report, finding)
            lead = f"{name} ({finding.rule}):" if name else ""
            yield doc.Item(
                finding.sentence, lead=lead, style=style, script=script, link=link,
                detail=finding.details,
            )  # fmt: skip


def _cell_link(report: Report | Verdicts, finding: Finding) -> str:
    """Returns the id of the cell on an audit's map that a finding is about; empty for a
    finding without a head, or a report whose kind has no map."""
    place, tensor = finding.place, finding.tensor or "out"
    mapped = isinstance(report, Report) and kind_of(report.kind).has_map
    if place is None or place.head is None or not mapped:
        return ""
    rows: Sequence[DeviationRow] = getattr(report, "rows", ())
    layer = Places(rows).layer(place)
    kernel = label(finding)
    return doc.cell_id(kernel, finding.formats[0], tensor, layer, place.head)


def _reproducer(finding: Finding, directory: Path | None) -> tuple[str, str] | None:
    """Returns the path `reproducers/FOLDER/reproduce.py` and the text of a finding's
    reproducer; the text is empty where it is too long for a page. None where none was
    written, the folder is a link, or there is no directory. The folder's name is foreign:
    it is only ever compared with what is there."""
    for path in (directory / REPRODUCERS).glob("*/reproduce.py") if directory else ():
        if path.parent.name == finding.folder and not path.parent.is_symlink():
            text = path.read_text(encoding="utf-8", errors="replace")
            shown = text if len(text) <= LONGEST else ""
            return f"{REPRODUCERS}/{finding.folder}/reproduce.py", shown
    return None


def _provenance_nodes(report: Report) -> Iterator[doc.Node]:
    """Yields where the numbers come from: a table on the page and in Markdown, a line or
    two in the terminal. What is not known is left out."""
    origin, system, source = (
        report.provenance,
        report.provenance.system,
        report.provenance.source,
    )
    packages = system.get("packages")
    packages = packages if isinstance(packages, dict) else {}
    cpu, instructions = system.get("cpu"), system.get("cpu_capability")
    where = f"{cpu} ({instructions})" if cpu and instructions else cpu or instructions
    pairs = {
        "command": origin.command,
        "made": origin.created,
        **{k.replace("_", " "): v for k, v in source.items() if not isinstance(v, dict)},
        "GPU": system.get("gpu"),
        "CPU": where,
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "numdev": origin.numdev,
        "time": seconds(report.timings),
    }
    cells = [(k, str(v)) for k, v in pairs.items() if v]
    title = doc.Heading("Where this comes from", ("markdown",))
    table = doc.text_table(("", ""), cells, only=doc.TEXT)
    yield doc.Details(title.text, (title, table), doc.TEXT)
    read = map(source.get, ("checkpoint", "tensors", "config", "prompt", "captured_from"))
    torch = "torch" in packages and f"torch {packages['torch']}"
    machine = " on ".join(str(x) for x in (torch, system.get("gpu") or where) if x)
    parts = (", ".join(str(x) for x in read if x), machine, f"numdev {origin.numdev}")
    line = f"{'. '.join(filter(None, parts))}."
    counts = sorted(
        {case.threads for case in getattr(report, "cases", ()) if case.threads}
    )
    threads = system.get("threads")
    if not counts and isinstance(threads, int) and not system.get("gpu"):
        counts = [threads]
    if counts:
        few = "1 thread for small calls, " if counts[0] == 1 < counts[-1] else ""
        line += (
            f" {few}{counts[-1]} "
            f"thread{'s' * (counts[-1] > 1)}{' for large ones' * bool(few)}."
        )
    yield from doc.notes((line, seconds(report.timings)), doc.TERMINAL)
