"""One self-contained HTML page for a report: readable offline, on paper, in light and dark.

No script and nothing loaded from elsewhere. All names and messages are foreign text; the templates
escape everything, the drawings' texts among them.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from numdev.audit.timing import words
from numdev.report import AuditReport, Finding, Report, SweepReport, replacing
from numdev.report.foreign import plain
from numdev.report.renderers import chart, numbers, parts
from numdev.report.renderers.sentences import headed
from numdev.report.views import along, positions

REPRODUCERS = "reproducers"
_CODE = re.compile(r"`([^`\s]+)`")
LONGEST = 32_000
"""Characters of a reproducer that the page shows; a longer one is only named."""


@dataclass(frozen=True)
class Script:
    """A finding's reproducer."""

    path: str
    """From the directory of the report."""
    text: str


def write(report: Report, directory: Path) -> None:
    """Write report.html beside report.json and the reproducers, atomically."""
    with replacing(directory / "report.html") as file:
        file.write(page(report, directory))


def page(report: Report, directory: Path | None = None) -> str:
    """The report as an HTML page, from the template of its kind; with its reproducers, which are
    looked for under `directory`.

    What is no audit's and no sweep's has a module of its kind beside this one, whose `seen` says
    what the template gets; `summary`, with its `answer`, is among it.
    """
    seen: dict[str, Any] = {
        "report": report,
        "request": json.dumps(report.request, indent=1, ensure_ascii=False),
        "facts": facts(report),
        "findings": [(f, _script(f, directory)) for f in report.findings],
    }
    if isinstance(report, AuditReport):
        seen |= _audit(report)
    elif isinstance(report, SweepReport):
        seen["summary"] = report.summary
        seen["charts"] = chart.charts(report.figures, report.summary.axis, report.summary.baseline)
    else:
        seen |= importlib.import_module(f"numdev.report.views.{report.kind}").seen(report)
    return _templates().get_template(f"{report.kind}.html.j2").render(seen)


@lru_cache(maxsize=1)
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("numdev.report.renderers"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "si": numbers.si,
        "ratio": numbers.ratio,
        "short": numbers.short,
        "shade": numbers.shade,
        "said": chart.value,
        "headed": headed,
        "prose": _prose,
    }
    return environment


def _visible(value: Any) -> Any:
    """Foreign text without marks that would turn the direction of what stands around it."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return plain(value, keep="\n\t")
    return value


def _prose(text: str) -> Markup:
    """A sentence, what stands in backticks set as code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(_visible(text)))))


def _audit(report: AuditReport) -> dict[str, Any]:
    """What the template of an audit gets."""
    figures = positions.figures(report.summary.worst_rows)
    profiles = report.summary.profiles
    return {
        "summary": report.summary,
        "grids": parts.grids(report.summary.parts),
        "by_step": parts.charts(report.summary.parts),
        "along": along.charts([p for p in profiles if p.tensor == "out"]),
        "along_gradients": along.charts([p for p in profiles if p.tensor != "out"]),
        "positions": chart.charts(figures, positions.AXIS, "baseline"),
        "sites": {s.site: s.rounds for e in report.summary.explanations for s in e.sites},
    }


def _script(finding: Finding, directory: Path | None) -> Script | None:
    """A finding's reproducer, where one was written. The folder's name is foreign: it is only ever
    compared with what is there."""
    folder = directory / REPRODUCERS if directory else None
    if folder is None or not folder.is_dir():
        return None
    for path in folder.iterdir():
        if path.name == finding.folder and not path.is_symlink():
            return _read(path / "reproduce.py")
    return None


def _read(path: Path) -> Script | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    named = f"{REPRODUCERS}/{path.parent.name}/{path.name}"
    return Script(named, text if len(text) <= LONGEST else "")


def facts(report: Report) -> list[tuple[str, str]]:
    """Where the numbers come from, as pairs for a table."""
    return [(name, str(value)) for name, value in _facts(report) if value]


def _facts(report: Report) -> Iterator[tuple[str, Any]]:
    system, source = report.provenance.system, report.provenance.source
    packages = system.get("packages")
    yield "command", report.provenance.command
    yield "made", report.provenance.created
    yield "source", source.get("checkpoint") or source.get("config")
    yield "SHA-256", source.get("sha256")
    yield "read", source.get("prompt")
    yield "pipeline", source.get("pipeline")
    yield "not audited", source.get("not_audited")
    yield "GPU", system.get("gpu")
    yield "CPU", f"{system.get('cpu')} ({system.get('cpu_capability')})"
    if isinstance(packages, dict):
        yield "packages", ", ".join(f"{name} {version}" for name, version in packages.items())
    yield "numdev", report.provenance.numdev
    yield "time", words(report.timings)
