"""Errors against row position: the bins, the numbers in them, what a report and a page make of
them."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile import NAMES
from on_bench import prepare
from test_html import Seen
from torch import Tensor

from numdev import report
from numdev.audit.examine import profile
from numdev.audit.journal import JOURNAL
from numdev.audit.plan import Task
from numdev.audit.run import audit
from numdev.audit.task import measure_task
from numdev.cases import AttentionCase, CaseRef
from numdev.config import AuditRequest, CaseConfig, Choice
from numdev.kernels import find
from numdev.metrics.binning import BINS, FEWEST, membership, starts
from numdev.report import AuditReport, ProfileRow, ProfileSummary
from numdev.report.profile_summary import LENGTHS, NOTABLE, ROWS, pooled, remark
from numdev.report.renderers import html, markdown
from numdev.report.views.along import figures
from numdev.sources.synthetic import Shapes, draw
from numdev.system import System

LATE = 0.05
"""How far `late` is off at the last row, relative to its output."""


def sound(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def late(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Right at first, and off by more and more towards the last row."""
    out = sound(q, k, v, is_causal=is_causal).float()
    generator = torch.Generator().manual_seed(0)
    share = torch.linspace(0, 1, out.shape[2])[:, None] ** 6
    return (out * (1 + LATE * share * torch.randn(out.shape, generator=generator))).to(q.dtype)


def summary(*ratios: float | None, **changes: Any) -> ProfileSummary:
    """Of bins that hold rows 0, 1, 2 to 3, 4 to 39, with 0.001 predicted in each."""
    errors = tuple(None if x is None else x / 1000 for x in ratios)
    fields: dict[str, Any] = {
        "kernel": "k", "options": {}, "role": "kernel", "format": "bfloat16", "tensor": "out",
        "length": 40, "calls": 2, "starts": (0, 1, 2, 4), "counts": (64, 64, 128, 2000),
        "errors": errors, "lows": errors, "highs": errors, "predicted": (0.001,) * 4,
        "ratios": ratios, "ratio_lows": ratios, "ratio_highs": ratios,
    }  # fmt: skip
    return ProfileSummary(**{**fields, **changes})


def row(case: str = "a", **changes: Any) -> ProfileRow:
    fields: dict[str, Any] = {
        "case": case, "layer": None, "role": "kernel", "kernel": "k", "format": "bfloat16",
        "tensor": "out", "length": 4, "starts": (0, 1, 2, 3), "counts": (16, 16, 16, 0),
        "errors": (1.0, 2.0, 3.0, None), "predicted": (1.0, 1.0, 0.0, None),
    }  # fmt: skip
    return ProfileRow(**{**fields, **changes})


def request(*kernels: str) -> AuditRequest:
    shape: dict[str, Any] = {"batch": 2, "heads": 4, "seq_len": 64, "head_dim": 16, "causal": True}
    return AuditRequest(
        target="x.yaml",
        cases=[CaseConfig(name=f"c{n}", **shape) for n in (1, 2)],
        kernels=tuple(Choice(name=name) for name in kernels),
        formats=("bfloat16",),
        reproducers=0,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> AuditReport:
    names = ("test_profile:late", "test_profile:sound")
    return audit(request(*names), tmp_path_factory.mktemp("profile"))


# --- bins ----------------------------------------------------------------------------------------


def test_bins_double_and_then_are_even() -> None:
    """At 256 rows bins of 1, 1, 2, 4 and 8, then 16 each; at 30 of 1, 1, 2 each, and 1 at last."""
    assert starts(256) == (0, 1, 2, 4, 8, *range(16, 256, 16))
    assert starts(30) == (0, 1, *range(2, 22, 2), *range(22, 30))
    assert starts(BINS) == tuple(range(BINS))
    assert starts(FEWEST - 1) == ()


@pytest.mark.parametrize("length", [FEWEST, 25, 47, 1000, 131072, 1 << 26])
def test_bins_cover_the_call(length: int) -> None:
    """At most 20, from row 0, each with a row; from the widest on they differ by one at most."""
    widths = np.diff([*starts(length), length])
    assert starts(length)[0] == 0
    assert len(widths) <= BINS
    assert widths.min() >= 1
    assert np.ptp(widths[widths.argmax() :]) <= 1


@pytest.mark.parametrize("at", [range(100), [0, 3, 17, 99]])
def test_membership_puts_every_row_into_one_bin(at: Any) -> None:
    """The last bin that begins at or before the row."""
    mine = membership(100, torch.tensor(at))
    assert mine is not None
    expected = np.searchsorted(starts(100), at, side="right") - 1
    assert (mine.argmax(dim=1).numpy() == expected).all()
    assert bool((mine.sum(dim=1) == 1).all())
    assert membership(FEWEST - 1, torch.arange(FEWEST - 1)) is None


# --- calls together ------------------------------------------------------------------------------


def test_errors_are_those_of_the_rows_in_each_bin() -> None:
    """Root mean squares, over heads and sequences, of row errors relative to their term scales."""
    shapes = Shapes(batch=2, heads=2, kv_heads=2, q_len=25, kv_len=25, head_dim=16, v_dim=16)
    q, k, v = draw("normal", shapes, seed=0, options={})
    case = AttentionCase(ref=CaseRef(case="x"), q=q, k=k, v=v, scale=0.25, is_causal=True)
    bench = prepare(case, "bfloat16")
    y = bench.yardsticks["out"]
    task = Task(case=case.ref, role="kernel", kernel="sdpa-flash", format="bfloat16")
    measured = measure_task(task, find("sdpa-flash"), bench, System.here("cpu"))
    (row,) = profile(task, measured, bench)
    error = (measured.output.out.double() - y.reference).norm(dim=-1) / y.term_scale.norm(dim=-1)
    bins = zip(row.starts, [*row.starts[1:], row.length], row.errors, row.predicted, strict=True)
    for start, end, mean, predicted in bins:
        assert mean == pytest.approx(float(error[..., start:end].square().mean().sqrt()), rel=1e-3)
        assert predicted == pytest.approx(mean, rel=0.5) or mean < 1e-9
    assert not profile(dataclasses.replace(task, role="control"), measured, bench)


def test_a_summary_is_the_median_and_range_over_calls() -> None:
    """Of each bin, over calls that have a number; a ratio to a prediction of 0 is none."""
    rows = [
        row("a"),
        row("b", errors=(2.0, 2.0, 4.0, None)),
        row("c", errors=(9.0, None, 8.0, None), predicted=(3.0, 1.0, 1.0, None)),
    ]
    (s,) = pooled(rows)
    assert (s.calls, s.counts) == (3, (48, 48, 48, 0))
    assert s.errors == (2.0, 2.0, 4.0, None)
    assert (s.lows, s.highs) == ((1.0, 2.0, 3.0, None), (9.0, 2.0, 8.0, None))
    assert s.predicted == (1.0, 1.0, 0.0, None)
    assert s.ratios == (2.0, 2.0, 8.0, None)
    assert (s.ratio_lows[0], s.ratio_highs[0]) == (1.0, 3.0)
    bins = list(s.bins())
    assert [(b["first"], b["last"], b["error"]) for b in bins][2:] == [(2, 2, 4.0), (3, 3, None)]
    (none,) = pooled([row(predicted=None)])
    assert none.ratios == ()
    assert next(none.bins())["ratio"] is None


def test_lengths_kernels_and_tensors_are_not_mixed() -> None:
    """Each has its own; of lengths those that most calls have, of as many the longest."""
    sizes = {n: tuple(range(n)) for n in (4, 5, 6, 7)}
    rows = [
        row(f"{n}.{i}", length=n, starts=at, counts=at, errors=at, predicted=None)
        for n, at in sizes.items()
        for i in range(2 if n == 5 else 1)
    ]
    assert [s.length for s in pooled(rows)] == [5, 7, 6]
    assert LENGTHS == 3
    kinds = [row(), row(options={"x": 1}), row(tensor="dk"), row(attends="cross")]
    assert [(s.calls, s.tensor) for s in pooled(kinds)].count((1, "out")) == 3
    assert len(pooled(kinds)) == 4


@pytest.mark.parametrize(
    ("ratios", "changes", "where"),
    [
        ((0.0, 1.0, 1.0, 2.5), {}, "rows 4 to 39 err 2.5 x"),
        ((0.0, 3.0, 1.0, 1.0), {}, "rows 1 to 1 err 3 x"),
        ((2.5, 1.0, 1.0, 1.0), {"tensor": "dk"}, "keys 0 to 0 err 2.5 x"),
        ((0.0, 1.0, 1.0, NOTABLE), {}, None),
        ((0.0, 1.0, 3.0, 1.0), {}, None),  # in the middle
        ((0.0, 0.1, 0.1, 0.9), {}, None),  # less than predicted
        ((0.0, 1.0, 1.0, 2.5), {"format": "float32"}, None),
        ((0.0, 1.0, 1.0, 2.5), {"role": "baseline"}, None),
        ((0.0, 1.0, 1.0, 2.5), {"counts": (64, 64, 64, ROWS - 1)}, None),
        ((0.0, None, 1.0, 2.5), {"counts": (1, 0, 64, 64)}, None),  # two bins
        ((), {"predicted": ()}, None),
        ((9.0, 1.0, 1.0, 1.0), {"errors": (0.0001, 0.001, 0.001, 0.001)}, None),
    ],
)
def test_an_end_that_stands_out_is_named(ratios: Any, changes: Any, where: str | None) -> None:
    """More than twice the middle bin, each over what is predicted, and more than predicted, there
    and of the middle bin; the first bin that errs and the last one are looked at. Of several
    kernels the one that stands out most is named."""
    said = remark([summary(*ratios, **changes)])
    assert said is None if where is None else where in (said or "")
    others = [summary(0.0, 1.0, 1.0, x, kernel=f"k{x}") for x in (3.0, 7.0, 5.0)]
    assert "k7.0 (bfloat16, out)" in (remark(others) or "")


# --- a report ------------------------------------------------------------------------------------


def test_a_kernel_that_errs_more_at_late_rows_shows_it(made: AuditReport) -> None:
    """Its last bin is far above what is predicted, its first ones are not, nor is the sound
    kernel's; the sentence names it."""
    of = {s.kernel: s for s in made.summary.profiles}
    bad, good = of["test_profile:late"], of["test_profile:sound"]
    assert (bad.ratios[-1] or 0) > 5
    for ratio in (*bad.ratios[1:8], *good.ratios[1:]):
        assert abs((ratio or 0) - 1) < 0.1
    assert "test_profile:late" in (made.summary.along or "")
    assert remark([good]) is None


def test_the_page_draws_them(made: AuditReport) -> None:
    """The error of every kernel beside floor and baseline, and over what is predicted; pointing at
    a dot tells its rows and the range of calls, and so does the table."""
    page = html.page(made)
    assert "bfloat16, out (64 rows): error by position" in page
    assert "bfloat16, out (64 rows): error over what is predicted, by position" in page
    (bad,) = (s for s in made.summary.profiles if s.kernel == "test_profile:late")
    first, last = bad.starts[-1], bad.length - 1
    error, low, high = (x[-1] or 0 for x in (bad.errors, bad.lows, bad.highs))
    value = f"{error:.3g} [{low:.3g} to {high:.3g}]"
    assert f"test_profile:late at rows {first} to {last}: {value}</title>" in page
    assert f"<td>rows {first} to {last}</td><td>{value}</td><td>2</td>" in page
    assert (made.summary.along or "?") in page
    for name in ("floor", "baseline", "test_profile:sound"):
        assert f"<title>{name} at rows 1 to 1: " in page


def test_a_first_row_with_nothing_to_round_stretches_no_axis() -> None:
    """Where it errs less than a tenth of the next bin with rows it is not drawn, in neither
    figure; else it is."""
    for ratios, first in (
        ((0.09, 1.0, 1.0, 1.0), 1.0),
        ((0.09, None, 1.0, 1.0), 2.0),
        ((0.11, 1.0, 1.0, 1.0), 0.0),
        ((None, 0.01, 1.0, 1.0), 1.0),
    ):
        drawn = figures([summary(*ratios)])
        assert [along.figure.curves[0].points[0].x for along in drawn] == [first, first]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_no_markup(made: AuditReport, name: str) -> None:
    """Names that try to be markup add no element to the page, and no heading to Markdown; a bin
    without a number and one of 0 break no drawing."""

    def with_one(kernel: str) -> AuditReport:
        odd = summary(None, 1.0, 0.0, 2.0, kernel=kernel)
        changed = made.summary.model_copy(update={"profiles": (odd,), "along": kernel})
        return made.model_copy(update={"summary": changed})

    seen, harmless = (Seen(html.page(with_one(kernel))) for kernel in (name, "flash"))
    assert seen.names == harmless.names
    headings = [markdown.page(with_one(kernel)).count("\n#") for kernel in (name, "flash")]
    assert headings[0] == headings[1]


def test_tables_for_people_and_spreadsheets(made: AuditReport, tmp_path: Path) -> None:
    """Markdown has a row for each kernel and eight places; profiles.csv a line for each bin."""
    assert "| first query row of the bin | 0 |" in markdown.page(made)
    report.write(made, tmp_path)
    with (tmp_path / "profiles.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == sum(len(s.starts) for s in made.summary.profiles)
    last = [x for x in lines if x["kernel"] == "test_profile:late"][-1]
    assert (last["last"], last["calls"], last["tensor"]) == ("63", "2", "out")
    assert float(last["ratio"]) > 5


def test_an_interrupted_run_ends_with_the_same_profiles(tmp_path: Path) -> None:
    """Cut off after any line, a journal is continued to the same rows and summary."""
    wanted = request("test_profile:sound")
    whole = audit(wanted, tmp_path / "whole")
    lines = (tmp_path / "whole" / JOURNAL).read_text(encoding="utf-8").splitlines(keepends=True)
    assert any('"starts"' in line for line in lines)
    for cut in range(2, len(lines), 3):
        part = tmp_path / str(cut)
        part.mkdir()
        (part / JOURNAL).write_text("".join(lines[:cut]) + lines[cut][:9], encoding="utf-8")
        again = audit(wanted, part)
        assert (again.profiles, again.summary) == (whole.profiles, whole.summary)
    assert len(whole.profiles) == 2 * 3  # calls, and floor, baseline and kernel
