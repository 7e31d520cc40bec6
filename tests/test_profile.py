"""Errors against row position: the bins, the numbers in them, what a report and a page make of
them."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile import NAMES
from on_bench import prepare
from rich.console import Console
from torch import Tensor

from numdev import report
from numdev.audit.examine import profile
from numdev.audit.journal import JOURNAL
from numdev.audit.plan import Task
from numdev.audit.run import audit
from numdev.audit.task import measure_task
from numdev.cases import AttentionCase, CaseRef
from numdev.config import AuditRequest, CaseConfig, Choice
from numdev.formats import FORMATS
from numdev.kernels import find
from numdev.metrics.binning import BINS, FEWEST, membership, starts
from numdev.report import AuditReport, ProfileRow, ProfileSummary
from numdev.report.profile_summary import LENGTHS, NOTABLE, ROWS, pooled, remark
from numdev.report.renderers import html, markdown, terminal
from numdev.report.views.positions import figures
from numdev.sources.synthetic import Shapes, draw
from numdev.system import System

HERE = System.here("cpu")
BF16 = FORMATS["bfloat16"]
LATE = 0.05
"""How far `late` is off at the last row, relative to its output."""

# --- kernels as users bring them -----------------------------------------------------------------


def sound(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def late(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Right at first, and off by more and more towards the last row."""
    out = sound(q, k, v, is_causal=is_causal).float()
    generator = torch.Generator().manual_seed(0)
    share = torch.linspace(0, 1, out.shape[2])[:, None] ** 6
    return (out * (1 + LATE * share * torch.randn(out.shape, generator=generator))).to(q.dtype)


# --- helpers -------------------------------------------------------------------------------------


def summary(**changes: Any) -> ProfileSummary:
    given: dict[str, Any] = {
        "kernel": "k",
        "options": {},
        "role": "kernel",
        "format": "bfloat16",
        "tensor": "out",
        "length": 40,
        "calls": 2,
        "starts": (0, 1, 2, 4),
        "counts": (64, 64, 128, 2000),
        "errors": (0.0, 0.001, 0.001, 0.001),
        "lows": (0.0, 0.001, 0.001, 0.001),
        "highs": (0.0, 0.001, 0.001, 0.001),
        "predicted": (0.001, 0.001, 0.001, 0.001),
        "ratios": (0.0, 1.0, 1.0, 1.0),
        "ratio_lows": (0.0, 1.0, 1.0, 1.0),
        "ratio_highs": (0.0, 1.0, 1.0, 1.0),
    }
    return ProfileSummary(**{**given, **changes})


def row(case: str = "a", **changes: Any) -> ProfileRow:
    given: dict[str, Any] = {
        "case": case,
        "layer": None,
        "role": "kernel",
        "kernel": "k",
        "format": "bfloat16",
        "tensor": "out",
        "length": 4,
        "starts": (0, 1, 2, 3),
        "counts": (16, 16, 16, 0),
        "errors": (1.0, 2.0, 3.0, None),
        "predicted": (1.0, 1.0, 0.0, None),
    }
    return ProfileRow(**{**given, **changes})


def request(*kernels: str, **changes: Any) -> AuditRequest:
    cases = [
        CaseConfig(name=f"c{n}", batch=2, heads=4, seq_len=64, head_dim=16, causal=True)
        for n in (1, 2)
    ]
    given: dict[str, Any] = {
        "target": "x.yaml",
        "cases": cases,
        "kernels": tuple(Choice(name=name) for name in kernels),
        "formats": ("bfloat16",),
        "reproducers": 0,
    }
    return AuditRequest(**{**given, **changes})


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> AuditReport:
    names = ("test_profile:late", "test_profile:sound")
    return audit(request(*names), tmp_path_factory.mktemp("profile"))


def shown(found: AuditReport) -> str:
    out = io.StringIO()
    terminal.show(found, Console(file=out, width=200))
    return out.getvalue()


# --- bins ----------------------------------------------------------------------------------------


def test_bins_double_and_then_are_even() -> None:
    """At 256 rows bins of 1, 1, 2, 4 and 8, then 16 each; at 30 of 1, 1, 2 each, and 1 at last."""
    assert starts(256) == (0, 1, 2, 4, 8, *range(16, 256, 16))
    assert starts(30) == (0, 1, *range(2, 22, 2), *range(22, 30))
    assert starts(BINS) == tuple(range(BINS))


@pytest.mark.parametrize("length", [0, 1, FEWEST - 1, FEWEST, 25, 47, 1000, 4096, 131072, 1 << 26])
def test_bins_cover_the_call(length: int) -> None:
    """At most 20, from row 0, each with a row; from the widest on they differ by one at most. Fewer
    than four rows have none."""
    found = starts(length)
    assert len(found) <= BINS
    if length < FEWEST:
        assert found == ()
        return
    widths = [b - a for a, b in zip(found, (*found[1:], length), strict=True)]
    assert found[0] == 0
    assert min(widths) >= 1
    even = widths[widths.index(max(widths)) :]
    assert max(even) - min(even) <= 1


@pytest.mark.parametrize("at", [None, [0, 3, 17, 99]])
def test_membership_puts_every_row_into_one_bin(at: list[int] | None) -> None:
    """The last bin that begins at or before the row."""
    positions = np.arange(100) if at is None else np.array(at)
    mine = membership(100, torch.tensor(positions))
    assert mine is not None
    expected = np.searchsorted(starts(100), positions, side="right") - 1
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
    measured = measure_task(task, find("sdpa-flash"), bench, HERE)
    (row,) = profile(task, measured, bench)
    error = (measured.output.out.double() - y.reference).norm(dim=-1) / y.term_scale.norm(dim=-1)
    ends = [*row.starts[1:], row.length]
    for start, end, mean, predicted in zip(
        row.starts, ends, row.errors, row.predicted, strict=True
    ):
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
    assert [(b.first, b.last, b.error) for b in s.bins()][2:] == [(2, 2, 4.0), (3, 3, None)]
    (none,) = pooled([row(predicted=None)])
    assert none.ratios == ()
    assert next(none.bins()).ratio is None


def test_lengths_kernels_and_tensors_are_not_mixed() -> None:
    """Each has its own; of lengths those that most calls have, of as many the longest."""
    sizes = {n: tuple(range(n)) for n in (4, 5, 6, 7)}
    rows = [
        row(f"{n}.{i}", length=n, starts=at, counts=at, errors=at, predicted=None)
        for n, at in sizes.items()
        for i in range(2 if n == 5 else 1)
    ]
    assert [s.length for s in pooled(rows)] == [5, 7, 6]
    assert len(pooled(rows)) == LENGTHS
    kinds = [row(), row(options={"x": 1}), row(tensor="dk"), row(attends="cross")]
    assert [(s.calls, s.tensor) for s in pooled(kinds)].count((1, "out")) == 3
    assert len(pooled(kinds)) == 4


def test_a_summary_that_contradicts_itself_is_refused() -> None:
    """A bin more in one list than in another, and bins out of order."""
    for changes in (
        {"errors": (1.0,)},
        {"ratios": (1.0,)},
        {"ratios": ()},
        {"starts": (0, 2, 1, 4)},
        {"length": 4},
    ):
        with pytest.raises(ValueError, match="bin"):
            summary(**changes)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"ratios": (0.0, 1.0, 1.0, 2.5)}, "rows 4 to 39 err 2.5 x"),
        ({"ratios": (0.0, 3.0, 1.0, 1.0)}, "row 1 errs 3 x"),
        ({"ratios": (2.5, 1.0, 1.0, 1.0), "tensor": "dk"}, "key 0 errs 2.5 x"),
        ({"ratios": (0.0, 1.0, 1.0, NOTABLE)}, None),
        ({"ratios": (0.0, 1.0, 3.0, 1.0)}, None),  # in the middle
        ({"ratios": (0.0, 0.1, 0.1, 0.9)}, None),  # less than predicted
        ({"ratios": (0.0, 1.0, 1.0, 2.5), "format": "float32"}, None),
        ({"ratios": (0.0, 1.0, 1.0, 2.5), "role": "baseline"}, None),
        ({"ratios": (0.0, 1.0, 1.0, 2.5), "counts": (64, 64, 64, ROWS - 1)}, None),
        ({"ratios": (0.0, None, 1.0, 2.5), "counts": (1, 0, 64, 64)}, None),  # two bins
        ({"ratios": (), "ratio_lows": (), "ratio_highs": (), "predicted": ()}, None),
        ({"ratios": (9.0, 1.0, 1.0, 1.0), "errors": (0.0001, 0.001, 0.001, 0.001)}, None),
    ],
)
def test_an_end_that_stands_out_is_named(changes: dict[str, Any], where: str | None) -> None:
    """More than twice the middle bin, each over what is predicted, and more than predicted, there
    and of the middle bin; the first bin that errs and the last one are looked at."""
    ratios = changes.get("ratios", ())
    given = {"errors": tuple(None if x is None else x / 1000 for x in ratios)} if ratios else {}
    said = remark([summary(**{**given, **changes})])
    assert (said is None) == (where is None)
    if where is not None:
        assert where in (said or "")


def test_one_remark_is_enough() -> None:
    """The one that stands out most."""
    ends = [
        summary(kernel=f"k{x}", ratios=(0.0, 1.0, 1.0, x), errors=(0.0, 0.001, 0.001, x / 1000))
        for x in (3.0, 7.0, 5.0)
    ]
    assert "k7.0 (bfloat16, out)" in (remark(ends) or "")
    assert remark([]) is None


# --- a report ------------------------------------------------------------------------------------


def test_a_kernel_that_errs_more_at_late_rows_shows_it(found: AuditReport) -> None:
    """Its last bin is far above what is predicted, its first ones are not, nor is the sound
    kernel's; the sentence names it."""
    of = {s.kernel: s for s in found.summary.profiles}
    bad, good = of["test_profile:late"], of["test_profile:sound"]
    assert (bad.ratios[-1] or 0) > 5
    for ratio in (*bad.ratios[1:8], *good.ratios[1:]):
        assert abs((ratio or 0) - 1) < 0.1
    assert "test_profile:late" in (found.summary.along or "")
    assert remark([good]) is None


def test_the_page_draws_them(found: AuditReport) -> None:
    """The error of every kernel beside floor and baseline, and over what is predicted; pointing at
    a dot tells its rows and the range of calls, and so does the table."""
    page = html.page(found)
    assert "bfloat16, out: error by position" in page
    assert "bfloat16, out: error over what is predicted, by position" in page
    assert page.count("first query row of the bin") == 4  # each drawing, and its table
    (bad,) = (s for s in found.summary.profiles if s.kernel == "test_profile:late")
    first, last = bad.starts[-1], bad.length - 1
    error, low, high = (x[-1] or 0 for x in (bad.errors, bad.lows, bad.highs))
    value = f"{error:.3g} [{low:.3g} to {high:.3g}]"
    assert f"test_profile:late at rows {first} to {last}: {value}</title>" in page
    assert f"<td>rows {first} to {last}</td><td>{value}</td><td>2</td>" in page
    assert (found.summary.along or "?") in page
    for name in ("floor", "baseline", "test_profile:sound"):
        assert f"<title>{name} at row 1: " in page


def test_a_first_row_with_nothing_to_round_stretches_no_axis() -> None:
    """Where it errs less than a tenth of the next bin with rows it is not drawn, in neither
    figure; else it is."""
    for errors, first in (
        ((0.00009, 0.001, 0.001, 0.001), 1.0),
        ((0.00009, None, 0.001, 0.001), 2.0),
        ((0.00011, 0.001, 0.001, 0.001), 0.0),
        ((None, 0.00001, 0.001, 0.001), 1.0),
    ):
        made = figures([summary(errors=errors, lows=errors, highs=errors, ratios=errors)])
        assert [along.figure.curves[0].points[0].x for along in made] == [first, first]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("extreme", [1e308, 5e-324, -1.0, 0.0, None])
def test_whatever_a_report_says_it_is_shown(
    found: AuditReport, name: str, extreme: float | None
) -> None:
    """Names that try to be markup add no element to the page; no number breaks a drawing."""

    def with_one(kernel: str) -> AuditReport:
        numbers = (extreme, 0.001, extreme, 0.002)
        odd = summary(
            kernel=kernel, errors=numbers, lows=numbers, highs=numbers, ratios=numbers, calls=9
        )
        changes = {"profiles": (odd,), "along": kernel}
        return found.model_copy(update={"summary": found.summary.model_copy(update=changes)})

    seen, harmless = (html.page(with_one(kernel)) for kernel in (name, "flash"))
    elements = re.compile(r"<[^\s>]+")
    assert {*elements.findall(seen)} == {*elements.findall(harmless)}
    assert 'onclick="' not in seen
    assert markdown.page(with_one(name)).count("\n#") == markdown.page(found).count("\n#")
    assert "\x1b[31" not in shown(with_one(name))


def test_tables_for_people_and_spreadsheets(found: AuditReport, tmp_path: Path) -> None:
    """Markdown has a row for each kernel and eight places; profiles.csv a line for each bin."""
    text = markdown.page(found)
    assert "| first query row of the bin | 0 |" in text
    report.write(found, tmp_path)
    with (tmp_path / "profiles.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == sum(len(s.starts) for s in found.summary.profiles)
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
