"""One self-contained HTML page for a report: readable offline, on paper, in light and dark.

No script and nothing loaded from elsewhere. All names and messages are foreign text; the templates
escape everything, the drawings' texts among them.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from numdev.render import chart
from numdev.report import AuditReport, Report, SweepReport, replacing
from numdev.stopwatch import words


def write(report: Report, directory: Path) -> None:
    """Write report.html beside report.json, atomically."""
    with replacing(directory / "report.html") as file:
        file.write(page(report))


def page(report: Report) -> str:
    """The report as an HTML page, from the template of its kind. What is no audit's and no sweep's
    has a module of its kind beside this one, whose `seen` says what the template gets; `summary`,
    with its `answer`, is among it."""
    environment = Environment(
        loader=PackageLoader("numdev.render"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"si": _si, "ratio": _ratio, "shade": _shade, "said": chart.value}
    seen: dict[str, Any] = {
        "report": report,
        "request": json.dumps(report.request, indent=1, ensure_ascii=False),
        "facts": _facts(report),
    }
    if not isinstance(report, AuditReport | SweepReport):
        seen |= importlib.import_module(f"numdev.render.{report.kind}").seen(report)
    else:
        seen["summary"] = report.summary
    if isinstance(report, SweepReport):
        seen["charts"] = chart.charts(report.figures, report.summary.axis, report.summary.baseline)
    return environment.get_template(f"{report.kind}.html.j2").render(seen)


def _facts(report: Report) -> list[tuple[str, str]]:
    """Where the numbers come from, as pairs for a table."""
    system, source = report.provenance.system, report.provenance.source
    packages = system.get("packages", {})
    facts = {
        "command": report.provenance.command,
        "made": report.provenance.created,
        "source": source.get("checkpoint") or source.get("config"),
        "SHA-256": source.get("sha256"),
        "read": source.get("prompt"),
        "GPU": system.get("gpu"),
        "CPU": f"{system.get('cpu')} ({system.get('cpu_capability')})",
        "packages": ", ".join(f"{n} {v}" for n, v in packages.items()),
        "numdev": report.provenance.numdev,
        "time": words(report.timings),
    }
    return [(name, str(value)) for name, value in facts.items() if value]


def _si(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2g}" if value == 0 or 0.01 <= abs(value) < 1e4 else f"{value:.1e}"


def _ratio(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if value < 100 else f"{value:.3g}"


def _shade(value: float | None) -> int:
    """How dark a multiple of the floor is shown, 0 to 4: up to 1.25, 2, 4, 16, and above."""
    return sum(value > limit for limit in (1.25, 2.0, 4.0, 16.0)) if value is not None else 0
