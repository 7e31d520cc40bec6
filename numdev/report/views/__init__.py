"""What is shown of each kind of report, as a document: one module a kind, with `title`, `line` and
`blocks`. Here is what all have: the answer, the findings, and where the numbers come from."""

from __future__ import annotations

import importlib
import json
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


def document_of(report: Report, directory: Path | None = None) -> doc.Document:
    """The report as a document; reproducers are looked for under `directory`."""
    view: Any = importlib.import_module(f"numdev.report.views.{report.kind}")
    summary: Any = getattr(report, "summary")  # noqa: B009 - every kind has one
    accused = [f.sentence for f in report.findings if f.metric == "suspicion"]
    leading = [doc.Item("", lead=sentence, style="bad") for sentence in accused]
    listed = findings(report.findings, directory)
    return doc.Document(
        view.title(report),
        (
            doc.Bullets((*leading, *map(doc.headed, summary.answer)), "answer"),
            doc.Paragraph(view.line(report), "soft", doc.TEXT),
            *((doc.Heading("Findings", doc.TEXT), listed) if listed.items else ()),
            *doc.notes(getattr(report, "tested", ())),
            *view.blocks(report),
            *_origin(report),
        ),
    )


def findings(found: tuple[Finding, ...], directory: Path | None = None) -> doc.Bullets:
    """Findings as a list; one that computes a different function leads the answer, and is repeated
    only for its reproducer."""
    items = []
    for finding in found:
        script = _script(finding, directory)
        if finding.metric != "suspicion" or script:
            name, style = SEVERITIES[finding.severity]
            lead = f"{name} ({finding.rule}):" if name else ""
            items.append(doc.Item(finding.sentence, lead=lead, style=style, script=script))
    return doc.Bullets(tuple(items), "findings")


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
    system, source = report.provenance.system, report.provenance.source
    packages = system.get("packages")
    packages = packages if isinstance(packages, dict) else {}
    where = f"{system.get('cpu')} ({system.get('cpu_capability')})"
    what = source.get("checkpoint") or source.get("tensors") or source.get("config")
    pairs = {
        "command": report.provenance.command,
        "made": report.provenance.created,
        "source": what,
        "SHA-256": source.get("sha256"),
        "read": source.get("prompt"),
        "captured from": source.get("captured_from"),
        "pipeline": source.get("pipeline"),
        "not audited": source.get("not_audited"),
        "GPU": system.get("gpu"),
        "CPU": where,
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "numdev": report.provenance.numdev,
        "time": seconds(report.timings),
    }
    yield doc.Heading("Where this comes from", doc.TEXT)
    columns = [doc.Column("", align="left")] * 2
    yield doc.table(columns, [(k, str(v)) for k, v in pairs.items() if v], only=doc.TEXT)
    request = json.dumps(report.request, indent=1, ensure_ascii=False)
    yield doc.Fold("The request, complete", (doc.Code(request),), only=doc.PAGE)
    read = [str(x) for x in (what, source.get("prompt"), source.get("captured_from")) if x]
    line = (
        f"{', '.join(read)}. torch {packages.get('torch', '?')} on {system.get('gpu') or where}. "
        f"numdev {report.provenance.numdev}."
    )
    yield from doc.notes((line, seconds(report.timings)), doc.TERMINAL)


def target_of(report: Report) -> str:
    """What the report is about, as the user called it."""
    source = report.provenance.source
    return str(report.request.get("target") or source.get("checkpoint") or source.get("config"))
