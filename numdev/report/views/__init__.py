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
from numdev.report.document import (
    PAGE,
    TERMINAL,
    TEXT,
    Bullets,
    Code,
    Column,
    Document,
    Fold,
    Heading,
    Item,
    Node,
    Paragraph,
    Row,
    Style,
    Table,
    as_cell,
    headed,
    notes,
)

REPRODUCERS = "reproducers"
LONGEST = 32_000
"""Characters of a reproducer that the page shows; a longer one is only named."""
SEVERITIES: dict[str, tuple[str, Style]] = {
    "exceeded": ("Exceeded", "bad"),
    "unmeasured": ("Not measured", "warn"),
    "note": ("", "soft"),
}


def document_of(report: Report, directory: Path | None = None) -> Document:
    """The report as a document; reproducers are looked for under `directory`."""
    view: Any = importlib.import_module(f"numdev.report.views.{report.kind}")
    summary: Any = getattr(report, "summary")  # noqa: B009 - every kind has one
    accusations = [f for f in report.findings if f.metric == "suspicion"]
    answer = (
        *(Item("", lead=finding.sentence, style="bad") for finding in accusations),
        *map(headed, summary.answer),
    )
    return Document(
        view.title(report),
        (
            Bullets(answer, "answer"),
            Paragraph(view.line(report), "soft", TEXT),
            *_findings(report, directory),
            *notes(getattr(report, "tested", ())),
            *view.blocks(report),
            *_origin(report),
        ),
    )


def findings(found: tuple[Finding, ...], directory: Path | None = None) -> Bullets:
    """Findings as a list; one that computes a different function leads the answer, and is repeated
    only for its reproducer."""
    items = []
    for finding in found:
        script = _script(finding, directory)
        if finding.metric != "suspicion" or script:
            name, style = SEVERITIES[finding.severity]
            lead = f"{name} ({finding.rule}):" if name else ""
            items.append(Item(finding.sentence, lead=lead, style=style, script=script))
    return Bullets(tuple(items), "findings")


def _findings(report: Report, directory: Path | None) -> Iterator[Node]:
    listed = findings(report.findings, directory)
    if listed.items:
        yield Heading("Findings", TEXT)
        yield listed


def _script(finding: Finding, directory: Path | None) -> tuple[str, str] | None:
    """Path and text of a finding's reproducer, where one was written. The folder's name is foreign:
    it is only ever compared with what is there."""
    folder = directory / REPRODUCERS if directory else None
    if folder is None or not folder.is_dir():
        return None
    for path in folder.iterdir():
        if path.name == finding.folder and not path.is_symlink():
            try:
                text = (path / "reproduce.py").read_text(encoding="utf-8", errors="replace")
            except OSError:
                return None
            shown = text if len(text) <= LONGEST else ""
            return f"{REPRODUCERS}/{path.name}/reproduce.py", shown
    return None


def _origin(report: Report) -> Iterator[Node]:
    """Where the numbers come from: a table on the page, a line or two in the terminal."""
    yield Heading("Where this comes from", TEXT)
    yield Table(
        columns=(Column("", align="left"), Column("", align="left")),
        rows=tuple(Row((as_cell(name), as_cell(value))) for name, value in facts(report)),
        only=TEXT,
    )
    request = json.dumps(report.request, indent=1, ensure_ascii=False)
    yield Fold("The request, complete", (Code(request),), only=PAGE)
    yield from notes((source_line(report), seconds(report.timings)), TERMINAL)


def facts(report: Report) -> list[tuple[str, str]]:
    """Where the numbers come from, as pairs of a name and a value."""
    system, source = report.provenance.system, report.provenance.source
    packages = system.get("packages") or {}
    pairs = {
        "command": report.provenance.command,
        "made": report.provenance.created,
        "source": source.get("checkpoint") or source.get("config"),
        "SHA-256": source.get("sha256"),
        "read": source.get("prompt"),
        "pipeline": source.get("pipeline"),
        "not audited": source.get("not_audited"),
        "GPU": system.get("gpu"),
        "CPU": f"{system.get('cpu')} ({system.get('cpu_capability')})",
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "numdev": report.provenance.numdev,
        "time": seconds(report.timings),
    }
    return [(name, str(value)) for name, value in pairs.items() if value]


def source_line(report: Report) -> str:
    """What was read, on which machine, in one line."""
    source, system = report.provenance.source, report.provenance.system
    what = source.get("checkpoint") or source.get("tensors") or source.get("config")
    read = f", {source['prompt']}" if "prompt" in source else ""
    if "captured_from" in source:
        read = f", captured from {source['captured_from']}"
    where = system.get("gpu") or f"{system.get('cpu')} ({system.get('cpu_capability')})"
    torch = system.get("packages", {}).get("torch", "?")
    return f"{what}{read}. torch {torch} on {where}. numdev {report.provenance.numdev}."


def target_of(report: Report) -> str:
    """What the report is about, as the user called it."""
    source = report.provenance.source
    return str(report.request.get("target") or source.get("checkpoint") or source.get("config"))
