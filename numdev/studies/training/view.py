"""Shows the report of a training run: the variants, then losses and distances by step."""

from __future__ import annotations

from collections.abc import Iterator

from numdev.report import document as doc
from numdev.report.document import PAGE, TEXT
from numdev.report.number_text import NONE, label
from numdev.studies.training.answer_sentences import NO_RUN
from numdev.studies.training.report import TrainReport, VariantRecord

ABOUT = (
    "Lines are geometric means over seeds, bands reach from the smallest to the largest. "
    "Distances are from the weights of the golden run of the same seed at the same step. "
    "They grow whatever the difference was, and then saturate: they mean something only "
    "beside those of the nulls."
)


def styles(report: TrainReport) -> tuple[doc.Style, ...]:
    """Returns the style of the conclusion, the first sentence: `bad` where runs diverged,
    `warn` where none did but something else is wrong, `good` where nothing is. Empty
    where the answer has no conclusion."""
    first = next(iter(report.summary.answer), "")
    if " diverged: " in first:
        return ("bad",)
    if not first.startswith(NO_RUN.partition("{")[0]):
        return ()
    return ("warn" if ", but " in first else "good",)


def blocks(report: TrainReport) -> Iterator[doc.Node]:
    """Yields what is shown below the answer: the variants (not in a terminal), the
    figures where the summary has an axis, and a line on the run."""
    golden = next((v.name for v in report.variants if v.role == "golden"), "")
    yield doc.text_table(
        ("variant", "role", "kernel", "format", "attention", "differs in", "ran"),
        map(_variant_cells, report.variants),
        title="Variants",
        only=TEXT,
    )
    if axis := report.summary.axis:
        yield doc.Heading("By step", PAGE)
        yield doc.Figures(report.figures, axis, golden)
    s, seeds = report.summary, ", ".join(map(str, report.summary.seeds))
    what = f"{s.model} of {s.parameters:,} parameters, {s.data}"
    yield doc.Paragraph(f"{what}; {s.steps} steps, seeds {seeds}. {ABOUT}", "soft")


def _variant_cells(v: VariantRecord) -> Iterator[str]:
    """Yields the cells of a variant in the table, one for each column."""
    yield v.name
    yield v.role.replace("_", " ")
    yield label(v)
    yield v.format
    yield v.attention_format
    yield " ".join(f"{name} {value}" for name, value in v.differs.items())
    yield v.ran or NONE
