"""What is shown of each kind of report, as a document: one module a kind, with `blocks`. Here is
what all have: the title, the answer, the findings, and where the numbers come from."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numdev.audit.timing import words as seconds
from numdev.report import Finding, Report
from numdev.report import document as doc

REPRODUCERS = "reproducers"
LONGEST = 32_000  # characters of a reproducer that the page shows; a longer one is only named
SEVERITIES: dict[str, tuple[str, doc.Style]] = {
    "exceeded": ("Exceeded", "bad"),
    "unmeasured": ("Not measured", "warn"),
    "note": ("", "soft"),
}


def document_of(report: Report | doc.Document, directory: Path | None = None) -> doc.Document:
    """The report as a document; reproducers are looked for under `directory`."""
    if isinstance(report, doc.Document):
        return report
    view: Any = importlib.import_module(f"numdev.report.views.{report.kind}")
    summary: Any = getattr(report, "summary")  # noqa: B009 - every kind has one
    target = report.request.get("target") or report.provenance.command
    accused = [f.sentence for f in report.findings if f.metric == "suspicion"]
    leading = [doc.Item("", lead=sentence, style="bad") for sentence in accused]
    findings = tuple(_findings(report.findings, directory))
    return doc.Document(
        str(report.request.get("title") or f"{report.kind.capitalize()}: {target}"),
        (
            doc.Bullets((*leading, *map(doc.headed, summary.answer)), "answer"),
            *((doc.Heading("Findings", doc.TEXT),) if findings else ()),
            doc.Bullets(findings, "findings"),
            *doc.notes(getattr(report, "tested", ())),
            *view.blocks(report),
            *_origin(report),
        ),
    )


def _findings(findings: tuple[Finding, ...], directory: Path | None) -> Iterator[doc.Item]:
    """Findings as lines; a different function leads the answer, repeated only if reproduced."""
    for finding in findings:
        script = _script(finding, directory)
        if finding.metric != "suspicion" or script:
            name, style = SEVERITIES[finding.severity]
            lead = f"{name} ({finding.rule}):" if name else ""
            yield doc.Item(finding.sentence, lead=lead, style=style, script=script)


def _script(finding: Finding, directory: Path | None) -> tuple[str, str] | None:
    """Path and text of a finding's reproducer, where one was written. The folder's name is foreign:
    it is only ever compared with what is there."""
    for path in (directory / REPRODUCERS).glob("*/reproduce.py") if directory else ():
        if path.parent.name == finding.folder and not path.parent.is_symlink():
            text = path.read_text(encoding="utf-8", errors="replace")
            shown = text if len(text) <= LONGEST else ""
            return f"{REPRODUCERS}/{finding.folder}/reproduce.py", shown
    return None


def _origin(report: Report) -> Iterator[doc.Node]:
    """Where the numbers come from: a table on the page, a line or two in the terminal."""
    origin, system, source = report.provenance, report.provenance.system, report.provenance.source
    packages = system.get("packages")
    packages = packages if isinstance(packages, dict) else {}
    where = f"{system.get('cpu')} ({system.get('cpu_capability')})"
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
    yield doc.Heading("Where this comes from", doc.TEXT)
    yield doc.words(("", ""), [(k, str(v)) for k, v in pairs.items() if v], only=doc.TEXT)
    read = map(source.get, ("checkpoint", "tensors", "config", "prompt", "captured_from"))
    line = (
        f"{', '.join(str(x) for x in read if x)}. torch {packages.get('torch', '?')} on "
        f"{system.get('gpu') or where}. numdev {origin.numdev}."
    )
    yield from doc.notes((line, seconds(report.timings)), doc.TERMINAL)
