"""Errors against row position: the bins, the numbers in them, what is made of them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from on_bench import THIS_CPU, grouped_step, prepare, task_of

from numdev.formats import format_named
from numdev.kernels import find
from numdev.metrics.histogram import by_ulps
from numdev.metrics.row_samples import BINS, FEWEST, starts
from numdev.metrics.yardstick import Yardstick
from numdev.report import AuditReport, ProfileRow
from numdev.report.document import Bullets, Figures
from numdev.report.renderers import html, markdown
from numdev.request_models import AuditRequest, CaseConfig, Choice
from numdev.studies.audit.case_measurement import measure_task
from numdev.studies.audit.explanations import profile
from numdev.studies.audit.run import audit
from numdev.studies.audit.view import positions, spread


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> AuditReport:
    shape: dict[str, Any] = {
        "batch": 2,
        "heads": 4,
        "seq_len": 64,
        "head_dim": 16,
        "causal": True,
    }
    request = AuditRequest(
        target="x.yaml",
        cases=[CaseConfig(name=f"c{n}", **shape) for n in (1, 2)],
        kernels=tuple(Choice(name=f"planted:{name}") for name in ("late", "wrapper")),
        formats=("bfloat16",),
        reproducers=0,
    )
    return audit(request, tmp_path_factory.mktemp("profile"))


def drawn(profiles: Sequence[ProfileRow], kernel: str) -> list[float]:
    """The points of one kernel's curve in the one figure of these profiles."""
    ((figure,),) = (n.figures for n in positions(profiles) if isinstance(n, Figures))
    return [point.mean for c in figure.curves if c.label == kernel for point in c.points]


def test_bins_double_and_then_are_even() -> None:
    """At 256 rows bins of 1, 1, 2, 4 and 8, then 16 each; at 30 of 1, 1, 2 each, and 1 at
    last."""
    assert starts(256) == (0, 1, 2, 4, 8, *range(16, 256, 16))
    assert starts(30) == (0, 1, *range(2, 22, 2), *range(22, 30))
    assert starts(BINS) == tuple(range(BINS))
    assert starts(FEWEST - 1) == ()


def test_errors_are_those_of_the_rows_in_each_bin() -> None:
    """Root mean squares, over heads and sequences, of row errors relative to their term
    scales."""
    bench = prepare(grouped_step(25, is_causal=True), "bfloat16")
    y = bench.yardsticks["out"]
    task = task_of(bench, find("sdpa-flash"))
    measured = measure_task(task, find("sdpa-flash"), bench, THIS_CPU)
    (row,) = profile(task, measured, bench)
    error = (measured.output.out.double() - y.reference).norm(dim=-1) / y.term_scale.norm(
        dim=-1
    )
    bins = zip(
        row.starts, [*row.starts[1:], row.length], row.errors, row.predicted, strict=True
    )
    for start, end, mean, predicted in bins:
        assert mean == pytest.approx(
            float(error[..., start:end].square().mean().sqrt()), rel=1e-3
        )
        assert predicted == pytest.approx(mean, rel=0.5) or mean < 1e-9
    assert not profile(dataclasses.replace(task, role="control"), measured, bench)


def test_calls_of_one_length_are_pooled_bin_by_bin() -> None:
    """Medians over three calls of the length that most have; ratios to the prediction by
    call."""
    shared: dict[str, Any] = {
        "layer": None, "role": "kernel", "kernel": "k", "format": "bfloat16", "tensor": "out",
        "length": 4, "starts": (0, 2), "counts": (2, 2),
    }  # fmt: skip
    calls = {
        "a": ((1.0, None), (2.0, None)),
        "b": ((2.0, 5.0), (1.0, 5.0)),
        "c": ((9.0, 6.0),) * 2,
    }
    rows = [
        ProfileRow(**shared, case=case, errors=errors, predicted=predicted)
        for case, (errors, predicted) in calls.items()
    ]
    longer = [
        row.model_copy(update={"length": 8, "case": f"{row.case}2"}) for row in rows[:2]
    ]
    assert drawn([*longer, *rows], "k") == [1.0, 1.0]
    assert drawn([row.model_copy(update={"predicted": None}) for row in rows], "k") == [
        2.0,
        5.5,
    ]


@pytest.mark.slow
def test_a_kernel_that_errs_more_at_late_rows_shows_it(audited: AuditReport) -> None:
    """Its last bin is far above what is predicted, its first are not, nor a sound
    kernel's."""
    bad, good = (
        drawn(audited.profiles, f"planted:{name}") for name in ("late", "wrapper")
    )
    assert bad[-1] > 5
    assert [*bad[:7], *good] == pytest.approx([1.0] * 26, abs=0.1)


def test_errors_in_ulps_are_counted_by_size(audited: AuditReport) -> None:
    """Against math.frexp, an element each; the floor has none above half an ulp, a
    kernel's are all its elements, and the page has their shares."""
    errors = [0.0, 2.0**-6, 2.0**-5, 0.49, 0.5, 1.0, 63.0, 64.0, 1e9, math.nan, 3.0]
    one = torch.ones(1, 1, len(errors), 1, dtype=torch.float64)
    off = torch.tensor(errors, dtype=torch.float64).reshape_as(one)
    empty = torch.zeros(1, 1, len(errors), dtype=torch.bool)
    empty[..., -1] = True
    yardstick = Yardstick(
        reference=one, term_scale=one, empty=empty, format=format_named("bfloat16")
    )
    counts = [0] * 13
    for error in errors[:-2]:
        counts[min(max(math.frexp(error)[1] - 1, -6), 6) + 6 if error else 0] += 1
    assert by_ulps(one + off * 2.0**-7, yardstick) == tuple(counts)
    (figure,) = (f for node in spread(audited.profiles) for f in node.figures)
    shares = {c.label: {p.label: p.mean for p in c.points} for c in figure.curves}
    assert all(sum(of.values()) == pytest.approx(100) for of in shares.values())
    assert {"1", "2"}.isdisjoint(shares["floor"])
    late, sound = (shares[f"planted:{name}"] for name in ("late", "wrapper"))
    assert sound == pytest.approx(shares["planted:wrapper, predicted"], abs=0.5)
    assert late["4"] > 0.1
    assert "4" not in shares["planted:late, predicted"]


def test_the_page_draws_them(audited: AuditReport) -> None:
    """One figure: error / expected, of the kernels for which something is; pointing
    at a dot tells its row. Nothing is drawn at 0."""
    assert "| first query row of the bin | 0 |" in markdown.page(audited)
    page = html.page(audited)
    assert page.count("(64 rows): error / expected by position</figcaption>") == 1
    first = next(row.starts[-1] for row in audited.profiles)
    worst = drawn(audited.profiles, "planted:late")[-1]
    assert f"<title>planted:late at row {first}: {worst:.3g}</title>" in page
    assert "<title>planted:wrapper at row 1: " in page
    assert "<title>planted:wrapper at row 0: " not in page
    (peak,) = (
        item
        for n in positions(audited.profiles)
        if isinstance(n, Bullets)
        for item in n.items
    )
    points = re.findall(r"late at row (\d+): ([\d.]+)", page)
    onset = next(at for at, x in points if float(x) >= 2)
    most = f"row {onset}; most at row {first}: {worst:.2f}×."
    assert peak.lead.startswith("planted:late (bfloat16")
    assert peak.text == f"first above 2× the predicted error at {most}"
