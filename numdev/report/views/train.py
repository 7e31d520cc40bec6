"""A training run, shown: the variants, then losses and distances by step."""

from __future__ import annotations

from collections.abc import Iterator

from numdev.report.document import (
    PAGE,
    TERMINAL,
    TEXT,
    Figures,
    Heading,
    Node,
    Paragraph,
    charts,
    table,
    words,
)
from numdev.report.numbers import NONE
from numdev.training.report import TrainReport

IN_TERMINAL = ("loss", "rel")
"""Metrics whose figures the terminal shows."""
BANDS = "lines are geometric means over seeds, bands reach from the smallest to the largest. "
PROXY = (
    "Distances are from the weights of the golden run of the same seed at the same step. They grow "
    "whatever the difference was, and then saturate: beside the nulls they say something, alone "
    "nothing."
)


def title(report: TrainReport) -> str:
    return report.request.get("title") or f"Training: {report.request.get('target')}"


def line(report: TrainReport) -> str:
    several = len(report.summary.seeds) > 1
    return f"{_run(report)} {BANDS if several else ''}{PROXY}"


def blocks(report: TrainReport) -> Iterator[Node]:
    golden = next((v.name for v in report.variants if v.role == "golden"), "")
    yield words(
        ("variant", "role", "kernel", "format", "attention", "differs in", "ran"),
        (
            (
                *(v.name, v.role.replace("_", " ")),
                " ".join([v.kernel, *(f"{name}={value}" for name, value in v.options.items())]),
                *(v.format, v.attention_format),
                " ".join(f"{name} {value}" for name, value in v.differs.items()),
                v.ran or NONE,
            )
            for v in report.variants
        ),
        title="Variants",
        only=TEXT,
    )
    drawn = charts(
        report.figures, report.summary.axis, golden, interval="smallest to largest", seeds="runs"
    )
    yield Heading("By step", PAGE)
    yield Figures(drawn, TEXT)
    yield Figures(tuple(c for c in drawn if c.figure.metric in IN_TERMINAL), TERMINAL)
    yield table(
        ("variant", "seed", "step", "loss"),
        ((r.variant, str(r.seed), str(r.step), f"{r.loss:.3f}") for r in report.rows if r.spike),
        title="Spikes of the loss",
        only=TEXT,
    )
    yield Paragraph(_run(report), "soft", TERMINAL)


def _run(report: TrainReport) -> str:
    s = report.summary
    several = "s" if len(s.seeds) > 1 else ""
    means = ": means over seeds" if several else ""
    return (
        f"{s.model} of {s.parameters:,} parameters, {s.data}; {s.steps} steps, seed{several} "
        f"{', '.join(map(str, s.seeds))}{means}."
    )
