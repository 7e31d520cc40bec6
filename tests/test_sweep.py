"""Sweeps: grids, seeds, pooling, curves, formats without a dtype, and being killed
half-way."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from gate_rows import row
from on_bench import invoked
from oracles import make_case

from numdev import kernels, report
from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, UsageError
from numdev.formats import FORMATS, format_named, round_to
from numdev.kernels import Kernel, Output, find
from numdev.kernels.reference import attend
from numdev.metrics.statistics import factor, interval
from numdev.report import CellRow, SweepReport
from numdev.report.document import Table
from numdev.report.number_text import ratio, si
from numdev.report.sweep_statistics import cells, figures, sentences
from numdev.request_models import SweepConfig, SweepRequest
from numdev.studies.audit import sweep_view
from numdev.studies.audit.sweep import plan, sweep
from numdev.studies.audit.sweep_summary import summarised
from numdev.yamlfile import read_yaml

ROOT = Path(__file__).parent.parent
SIZES: dict[str, Any] = {"name": "a", "heads": 2, "head_dim": 8}
GRID = {**SIZES, "seq_len": [8, 16]}


def off(case: AttentionCase, *, by: float = 0.0, tile: int | None = None) -> Output:
    """The reference rounded to the working format, then scaled: its error is known."""
    out = round_to(attend(case).out, case.format) * (1.0 + by)
    return Output(out=out.to(case.q.dtype))


@pytest.fixture(autouse=True)
def kernel_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """`off`, registered for the length of a test; it takes any format."""
    how: Any = {
        "options": {"by": 0.0, "tile": None},
        "any_format": True,
        "made_from": "x",
    }
    monkeypatch.setitem(kernels._registry, "off", Kernel(name="off", function=off, **how))


def config(tmp_path: Path, **changes: Any) -> SweepConfig:
    """A configuration by way of YAML, as a user's comes."""
    path = tmp_path / "sweep.yaml"
    content: dict[str, Any] = {"cases": [GRID], "kernels": ["off"], "seeds": 2, **changes}
    path.write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not None}))
    return read_yaml(path, SweepConfig)


def planned(tmp_path: Path, **changes: Any) -> Any:
    passed = config(tmp_path, **changes).model_dump(exclude_unset=True)
    return plan(SweepRequest(target="sweep.yaml", **{"device": "cpu", **passed}))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., SweepReport]:
    """Sweep a configuration given as its differences from a small one."""
    return lambda **changes: sweep(planned(tmp_path, **changes), tmp_path / "out")


@pytest.mark.parametrize(("changes", "message"), [
    ({"sead": 3}, "unknown key 'sead'; did you mean 'seeds'"),
    ({"cases": []}, "cases: Value should have at least 1 item"),
    ({"formats": ["bf16", "bf16"]}, "names bf16 twice"),
    ({"kernels": [{"name": "off", "by": []}]}, "by is an empty list"),
    ({"seeds": 0}, "expected 1 to 100,000 seeds"), ({"seeds": [1, 1]}, "names 1 twice"),
    ({"seeds": [-1]}, "greater than or equal to 0"), ({"keep": "heads"}, ("'head' or 'cell'")),
    ({"cases": [{**SIZES, "seq_len": 8}]}, "a single cell"),
    ({"x": "seqlen"}, "did you mean 'seq_len'"), ({"x": "head_dim"}, ("not an axis of this grid")),
    ({"y": "max_ab"}, "did you mean 'max_abs'"),
    ({"kernels": [{"name": "off", "bye": 1}]}, "no option 'bye'; did you mean 'by'"),
    ({"baseline": "basline"}, "did you mean 'baseline'"),
    ({"cases": [{**GRID, "inputs": "normel"}]}, "did you mean 'normal'"),
])  # fmt: skip
def test_a_sweep_that_cannot_run(
    run: Any, tmp_path: Path, changes: Any, message: str
) -> None:
    """Empty or misspelt, it says which key and what to do; what only the machine and the
    registry know is refused before anything is measured."""
    with pytest.raises(UsageError) as caught:
        run(**changes)
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_axis_is_the_longest_numeric_one(tmp_path: Path) -> None:
    """Unless the file says otherwise. Its numbers ascend in whatever order they were
    asked for; formats by their bits, those of one width (tf32 and float16 both have 11)
    beside each other."""
    cases = [{**GRID, "causal": [True, False], "head_dim": [8, 16, 24]}]
    assert planned(tmp_path, cases=cases).grid.x == "head_dim"
    assert planned(tmp_path, cases=cases, x="causal").grid.x == "causal"
    assert planned(tmp_path, formats=["bf16", "fp16", "fp32"]).grid.x == "format"
    axis = planned(
        tmp_path, cases=[{**SIZES, "seq_len": [16, 4, 8]}], x="seq_len"
    ).grid.axis
    assert [(t.x, t.label) for t in axis.ticks] == [(4.0, "4"), (8.0, "8"), (16.0, "16")]
    axis = planned(tmp_path, formats=["tf32", "fp16", "bf16"], x="format").grid.axis
    assert [t.label for t in axis.ticks] == ["bfloat16", "tf32", "float16"]


def test_every_cell_is_measured_with_every_seed(run: Callable[..., SweepReport]) -> None:
    """Two lengths, two formats, two seeds, two heads, four kernels: nothing missing or
    twice."""
    result = run(formats=["bf16", "fp32"])
    keys = [
        (r.case, r.seed, r.head, r.kernel, r.format)
        for r in result.rows
        if r.tensor == "out"
    ]
    assert len(keys) == len(set(keys)) == 2 * 2 * 2 * 2 * 4
    assert {c.case for c in result.cases} == {"a/seq_len=8", "a/seq_len=16"}
    assert len(result.cases) == 2, "a case is described once, whatever its seeds"


def test_every_seed_measures_rows_of_its_own(tmp_path: Path) -> None:
    """A sample of rows is drawn with the seed of the case."""
    created = planned(tmp_path)
    sampled = dataclasses.replace(created.plan, rows=4)
    samples = [sampled.sample(located.ref) for located in created.source]
    assert {sample.seed for sample in samples if sample is not None} == {0, 1}


def test_ratios_are_taken_seed_by_seed() -> None:
    """2/1 and 3/6, not the ratio of the means."""
    errors = ((0, "k", 2.0), (1, "k", 3.0), (0, "base", 1.0), (1, "base", 6.0))
    rows = [row(seed=s, kernel=k, elements=1, max_abs=v) for s, k, v in errors]
    result = next(
        c for c in cells(rows, ("max_abs",), ("base", {}), {}) if c.kernel == "k"
    )
    assert result.ratio == pytest.approx(1.0), "the geometric mean of 2 and 0.5"


def cell_table(report: SweepReport) -> Table:
    """The first table of a sweep's page."""
    return next(node for node in sweep_view.blocks(report) if isinstance(node, Table))


def test_the_cells_of_a_sweep_are_one_table(run: Callable[..., SweepReport]) -> None:
    """A row for each place on the axes, a column for each kernel in each format, what is
    under audit first; every mean in its place, with its interval where the mouse points."""
    result = run(
        cases=[{**GRID, "causal": [False, True]}], formats=["bf16", "fp16"], y="rms",
        kernels=["off", "sdpa-math"],
    )  # fmt: skip
    table = cell_table(result)
    titles = [column.title for column in table.columns]
    assert titles[:6] == ["seq_len", "causal", "off bfloat16", "off float16",
                          "sdpa-math bfloat16", "sdpa-math float16"]  # fmt: skip
    places = [tuple(cell.text for cell in row.cells[:2]) for row in table.rows]
    assert places == [("8", "False"), ("16", "False"), ("8", "True"), ("16", "True")]
    means = {
        (str(c.axes["seq_len"]), str(c.axes["causal"]), f"{c.kernel} {c.format}"): c
        for c in result.cells
        if c.metric == "rms" and c.role == "kernel"
    }
    for shown in table.rows:
        where = tuple(cell.text for cell in shown.cells[:2])
        for title, cell in zip(titles[2:6], shown.cells[2:6], strict=True):
            expected = means[(*where, title)]
            assert cell.text == si(expected.mean)
            assert cell.title == f"{si(expected.low)} to {si(expected.high)} (95 %)"


def test_an_option_is_an_axis_of_the_table(run: Callable[..., SweepReport]) -> None:
    """A kernel's own option along the axis makes rows; a kernel without it has its number
    in each."""
    kernels = [{"name": "off", "by": [0.5, 2.5]}]
    result = run(
        cases=[{**SIZES, "seq_len": 8}],
        formats=["fp32"],
        y="rms",
        x="by",
        kernels=kernels,
    )
    table = cell_table(result)
    assert [column.title for column in table.columns][:3] == ["by", "off", "baseline"]
    off, base = ([row.cells[i].text for row in table.rows] for i in (1, 2))
    assert off[0] != off[1]
    assert base[0] == base[1]


def test_a_refused_cell_says_by_which_rule(run: Callable[..., SweepReport]) -> None:
    """A result scaled by 1.5 is red in its cell, and names what it fails; a sound kernel
    beside it is not."""
    kernels = [{"name": "off", "by": 0.5}, "sdpa-math"]
    table = cell_table(run(kernels=kernels, y="rms"))
    off, sound = table.rows[0].cells[1:3]
    assert (off.style, sound.style) == ("bad", "")
    assert "fails: function" in off.title


def test_a_sweep_that_contradicts_itself_has_no_table(
    run: Callable[..., SweepReport],
) -> None:
    """Its page shows what it holds all the same; the gate says what is wrong."""
    result = run(y="rms")
    wrong = result.model_copy(update={"request": {**result.request, "x": "no axis"}})
    assert not [node for node in sweep_view.blocks(wrong) if isinstance(node, Table)]


def test_a_report_without_cells_of_its_metric_has_no_table(
    run: Callable[..., SweepReport],
) -> None:
    result = run(y="rms")
    cells = tuple(cell for cell in result.cells if cell.metric != "rms")
    assert cells
    nodes = list(sweep_view.blocks(result.model_copy(update={"cells": cells})))
    assert not [node for node in nodes if isinstance(node, Table)]


def test_the_interval_is_students() -> None:
    """1 to 5: mean 3, standard error sqrt(2.5 / 5), and t(0.975, 4) = 2.776445."""
    mean, low, high = interval([1, 2, 3, 4, 5])
    assert mean == 3
    assert (3 - low, high - 3) == pytest.approx(
        (2.776445 * math.sqrt(0.5),) * 2, rel=1e-6
    )
    assert interval([4.0]) == (4.0, None, None), "one seed has no spread"


@pytest.mark.parametrize("values", [
    [math.nan, 1.0], [1.0, math.nan], [math.nan, 0.0], [0.0, math.nan], [math.inf, 1.0],
])  # fmt: skip
def test_what_is_not_finite_has_no_interval(values: list[float]) -> None:
    """Not one that begins at the least possible value; the mean says what is wrong."""
    for mean, *ends in (interval(values, least=0.0), factor(values)):
        assert mean == math.inf if math.inf in values else math.isnan(mean)
        assert ends == [None, None]


def test_a_known_change_is_said(run: Callable[..., SweepReport]) -> None:
    """Five times the fault: the two ends and the last ratio stand in the sentence."""
    kernels = [{"name": "off", "by": [0.5, 2.5]}]
    result = run(
        cases=[{**SIZES, "seq_len": 8}],
        formats=["fp32"],
        y="rms",
        x="by",
        kernels=kernels,
    )
    ends = [c for c in result.cells if (c.kernel, c.metric) == ("off", "rms")]
    means = [cell.mean or 0.0 for cell in ends]
    assert means[1] == pytest.approx(5 * means[0])
    words = next(s for s in result.summary.answer if s.startswith("off: "))
    text = (
        f"off: rms error {si(means[0])} at 0.5 to {si(means[1])} at 2.5; over baseline "
    )
    assert words.startswith(text + ratio(ends[1].ratio))


@pytest.mark.parametrize(("means", "ratio", "words"), [
    ((1.0, 9.0, 2.0), 0.5, "1 at 0 to 9 at 1 to 2 at 2; over base 0.50×."),
    ((1.0, 3.0, 2.0), 1.3e13, "1 at 0 to 2 at 2."),
])  # fmt: skip
def test_a_peak_is_said_and_noise_is_not(means: Any, ratio: float, words: str) -> None:
    """A peak of more than twice both ends; no ratio to a baseline that fp64 cannot tell
    from 0."""
    fields: Any = dict.fromkeys(("low", "high", "ratio_low", "ratio_high")) | {
        "ratio": ratio
    }
    of = {
        "kernel": "k",
        "role": "kernel",
        "format": "bfloat16",
        "metric": "rms",
        "seeds": 1,
    }
    rows = [CellRow(**fields, **of, case="c", mean=mean) for mean in means]
    curve = {str(at): row for at, row in enumerate(rows)}
    request, axis = SimpleNamespace(y=["rms"]), SimpleNamespace(scale="log")
    grid: Any = SimpleNamespace(axis=axis, request=request)
    assert sentences({("rms", (), "k"): curve}, grid, "base") == (
        f"k: rms error {words}",
    )


@pytest.mark.parametrize(("name", "dtype"), [
    ("e8m10", torch.float32), ("e11m30", torch.float64), ("e8m7", torch.bfloat16)])  # fmt: skip
def test_a_case_can_be_in_any_format(name: str, dtype: torch.dtype) -> None:
    """Its values are the format's, in a dtype that holds them; `format` says which it
    is."""
    case, fmt = make_case(dtype=torch.float32), format_named(name)
    rounded = case.rounded_to(fmt)
    assert rounded.q.dtype == dtype
    assert torch.equal(rounded.k.double(), round_to(case.k.double(), fmt))
    assert rounded.format.contains(fmt)
    assert fmt.contains(rounded.format)
    assert rounded.rounded_to(FORMATS["bfloat16"]).working is None, (
        "and back to one with a dtype"
    )


def test_a_sweep_over_widths(run: Callable[..., SweepReport]) -> None:
    """The floor falls by 2 for every bit; the kernel that rounds once lies on it, judged
    against the floor of its own format; those without a dtype are named with their
    reason."""
    result = run(formats=["e8m10", "e8m11", "e8m12"], cases=[{**SIZES, "seq_len": 64}],
                kernels=["off", "sdpa-math"], y="rms", x="format", baseline="off")  # fmt: skip
    (curve,) = (c for f in result.figures for c in f.curves if c.label == "floor")
    floor = [p.mean for p in curve.points]
    assert floor[0] / floor[1] == pytest.approx(2, rel=0.1)
    assert floor[1] / floor[2] == pytest.approx(2, rel=0.1)
    mine = [r for r in result.rows if r.kernel == "off"]
    assert {r.out_format for r in mine} == {"e8m10", "e8m11", "e8m12"}
    assert all(r.floor_ratio == pytest.approx(1) for r in mine)
    assert [t.label for t in result.summary.axis.ticks] == ["e8m10", "e8m11", "e8m12"]
    reason = "sdpa-math skipped in e8m10, e8m11, e8m12: no torch dtype stores it"
    assert reason in result.summary.notes


def invoke(tmp_path: Path, *arguments: Any, **changes: Any) -> Any:
    config(tmp_path, **changes)
    return invoked("sweep", tmp_path / "sweep.yaml", "--device", "cpu", *arguments)


def test_a_dry_run_measures_nothing(tmp_path: Path) -> None:
    """It says how much there would be to do, in tasks and in time by a few calls, and
    leaves no trace."""
    result = invoke(tmp_path, "--dry-run", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "8 cells x 2 seeds: 16 tasks" in result.output
    about = r"About \d+ s on this machine, by \d of \d calls, measured in \d+\.\d s\."
    assert re.search(about, result.output)
    assert not (tmp_path / "out").exists()


def test_the_command_writes_every_file(tmp_path: Path) -> None:
    """A report that reads back as a sweep, its lists as CSV, and a page; on stdout the
    answer."""
    out = tmp_path / "out"
    result = invoke(tmp_path, "-o", out, y=["rms"])
    assert result.exit_code == 0, result.output
    names = ["cells.csv", "report.html", "report.json", "rows.csv", "rows.jsonl"]
    assert sorted(p.name for p in out.iterdir()) == names
    actual = report.read(out)
    assert f"{len(actual.cells)}" == str(
        len((out / "cells.csv").read_text().splitlines()) - 1
    )
    assert "Rms error, cell by cell" in result.stdout
    assert invoked("report", out).stdout == result.stdout, (
        "`numdev report` shows the same"
    )
    assert invoke(tmp_path, "-o", out, "--overwrite", "-q", y=["rms"]).exit_code == 0


@pytest.mark.thorough
def test_a_killed_sweep_ends_with_the_same_report(tmp_path: Path) -> None:
    """SIGKILL in the middle."""
    config(tmp_path, kernels=["sdpa-math", "sdpa-flash"], seeds=4)
    script = ROOT / "scripts" / "kill_and_resume.py"
    command = [sys.executable, str(script), str(tmp_path / "sweep.yaml"), "--kills", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the report is the same" in done.stdout


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "sweep").glob("*.yaml")), ids=str
)
def test_every_bundled_sweep_is_valid(path: Path) -> None:
    """At least five seeds, as a confidence interval needs, and comments that say what it
    is. The hazards look for what goes wrong, not for a mean: two will do."""
    result = read_yaml(path, SweepConfig)
    assert len(result.seeds) >= {"hazards": 2, "hazards-large": 1}.get(path.stem, 5)
    assert result.title
    assert path.read_text().startswith("# ")
    for chosen in result.kernels:  # they and their options exist
        find(chosen.name).with_options(chosen.options)


def test_heads_are_pooled_before_seeds() -> None:
    """The largest max, the root mean square by elements, the median ratio: one value per
    seed."""
    rows = [
        row(0, elements=1, max_abs=3.0, rms=1.0, mean_abs=2.0, floor_ratio=1.0),
        row(1, elements=3, max_abs=5.0, rms=3.0, mean_abs=6.0, floor_ratio=2.0),
    ]
    pooled = {
        "max_abs": 5.0,
        "rms": math.sqrt(28 / 4),
        "mean_abs": 5.0,
        "floor_ratio": 1.5,
    }
    result = {
        cell.metric: cell.mean for cell in cells(rows, tuple(pooled), ("mine", {}), {})
    }
    assert result == pytest.approx(pooled)


@pytest.mark.parametrize(
    ("counts", "pooled"),
    [((0, None), None), ((0, 0), 0.0), ((2, None), 2.0), ((2, 1), 3.0)],
)
def test_elements_that_are_not_finite_are_none_where_a_head_is_unknown(
    counts: Sequence[int | None], pooled: float | None
) -> None:
    rows = [row(head, nonfinite=count) for head, count in enumerate(counts)]
    (cell,) = cells(rows, ("nonfinite",), ("mine", {}), {})
    assert cell.mean == pooled


def test_a_cell_has_the_extremes_of_its_heads_and_counts_its_seeds() -> None:
    """The largest ulps; how many seeds have a number; limited where any row was."""
    rows = [row(h, seed=s, max_ulp=float(10 * h + s)) for h in range(3) for s in range(3)]
    rows[0] = rows[0].model_copy(update={"reason": "reference-limited"})
    rows += [row(seed=3, max_ulp=None)]
    (cell,) = cells(rows, ("max_ulp",), ("base", {}), {})
    assert (cell.mean, cell.seeds, cell.limited) == (21.0, 3, True)  # of 20, 21 and 22


def curve_of(means: Any, **fields: Any) -> Any:
    """Cells of one kernel along an axis, and the grid they stand on."""
    usual: Any = dict.fromkeys(("low", "high", "ratio", "ratio_low", "ratio_high"))
    of = {
        "kernel": "k",
        "role": "kernel",
        "format": "bfloat16",
        "metric": "rms",
        "seeds": 1,
    }
    created = [
        CellRow(**{**usual, **of, **fields}, case="c", mean=mean) for mean in means
    ]
    ticks = [SimpleNamespace(label=str(at), x=float(at)) for at in range(len(created))]
    axis = SimpleNamespace(scale="log", title="n", ticks=ticks)
    grid: Any = SimpleNamespace(axis=axis, request=SimpleNamespace(y=["rms"]))
    return {("rms", (), "k"): {str(at): cell for at, cell in enumerate(created)}}, grid


def test_a_peak_stands_above_both_ends_and_a_ratio_has_its_interval() -> None:
    """9 between 1 and 5 is no peak, since it is less than twice 5; the lower end is told
    first."""
    assert sentences(*curve_of((1.0, 9.0, 5.0)), "base") == (
        "k: rms error 1 at 0 to 5 at 2.",
    )
    ends = {"ratio": 0.5, "ratio_low": 0.4, "ratio_high": 0.6}
    assert sentences(*curve_of((1.0, 2.0), **ends), "base") == (
        "k: rms error 1 at 0 to 2 at 1; over base 0.50× [0.40 to 0.60].",
    )


@pytest.mark.parametrize("scale", ["log", "category"])
@pytest.mark.parametrize(
    "means", [(1.0, 1.5), (2.0, 1.5, 1.0), (1.0, 9.0, 2.0), (1.5, 1.6), (0.0, 1.0)]
)
@pytest.mark.parametrize("width", [None, 0.1, 1.0])
def test_a_curve_below_zero_reads_as_its_mirror_image(
    means: tuple[float, ...], width: float | None, scale: str
) -> None:
    """A bias of -1 moves as one of 1 does, and no point is told twice."""
    lines = []
    for sign in (1, -1):
        curves, grid = curve_of([sign * mean for mean in means])
        grid.axis.scale = scale
        cells = curves["rms", (), "k"]
        for at, cell in cells.items() if width else ():
            ends = {"low": cell.mean - width, "high": cell.mean + width}
            cells[at] = cell.model_copy(update=ends)
        (line,) = sentences(curves, grid, "base")
        assert len(set(re.findall("at .", line))) == line.count(" at ")
        lines.append(line.replace("-", ""))
    assert lines[0] == lines[1]


@pytest.mark.parametrize(("low", "high", "moves"), [(0.9, 1.1, True), (-1.5, 1.5, False)])
def test_a_change_of_sign_is_a_move(low: float, high: float, moves: bool) -> None:
    """From -1 to 1 where the intervals do not meet."""
    curves, grid = curve_of((-1.0, 1.0))
    cells = curves["rms", (), "k"]
    cells["0"] = cells["0"].model_copy(update={"low": -high, "high": -low})
    cells["1"] = cells["1"].model_copy(update={"low": low, "high": high})
    (line,) = sentences(curves, grid, "base")
    assert ("moves little" in line) is not moves


def test_only_curves_that_move_have_a_sentence() -> None:
    """By more than a quarter where the intervals do not meet, and by more than twice where
    they do. The others are named together, each with its last number; so is a curve of one
    point, and one of zeros."""
    still = "rms error moves little along n: k 1.2."
    for means in ((1.0, 1.25, 1.2), (1.2,), (1.25, 1.2)):
        assert sentences(*curve_of(means), "base") == (still,)
    wide, narrow = {"low": 0.5, "high": 1.5}, {"low": 1.6, "high": 1.4}
    assert sentences(*curve_of((1.0, 2.0, 1.2), **wide), "base") == (still,)
    for means, ends in (((1.0, 1.26), {}), ((1.0, 2.01), wide), ((1.0, 1.3), narrow)):
        (line,) = sentences(*curve_of(means, **ends), "base")
        assert line.startswith("k: rms error 1 at 0 to ")
    zeros = "rms error moves little along n: k 0."
    assert sentences(*curve_of((0.0, 0.0)), "base") == (zeros,)
    cells, grid = curve_of((1.0, 1.0))
    (curve,) = cells.values()
    lines = {("rms", (), f"k{i}"): curve for i in range(14)}
    (line,) = sentences(lines, grid, "base")
    assert line.endswith("k11 1 and 2 more.")


@pytest.mark.parametrize(("largest", "scale"), [(3.9, "linear"), (4.0, "log")])
def test_values_that_span_a_factor_of_four_are_drawn_by_logarithms(
    largest: float, scale: str
) -> None:
    (figure,) = figures(*curve_of((1.0, 2.0, largest)), "base")
    assert figure.y_scale == scale


@pytest.mark.parametrize(("lengths", "scale"), [([4, 28], "linear"), ([4, 32], "log")])
def test_an_axis_that_spans_a_factor_of_eight_is_logarithmic(
    tmp_path: Path, lengths: list[int], scale: str
) -> None:
    grid = planned(tmp_path, cases=[{**SIZES, "seq_len": lengths}], x="seq_len").grid
    assert grid.axis.scale == scale


@pytest.mark.parametrize(
    "changes",
    [
        {"kernels": []},
        {"baseline": "nobody"},
        {"y": ["nothing"]},
        {"x": "nothing"},
        {"cases": []},
    ],
)
def test_a_stored_request_that_is_none_of_a_sweep_is_one_line(
    changes: dict[str, Any],
) -> None:
    """A report from elsewhere may hold anything."""
    stored = report.read(ROOT / "tests" / "data" / "reports" / "sweep.json")
    assert isinstance(stored, SweepReport)
    altered = stored.model_copy(update={"request": {**stored.request, **changes}})
    with pytest.raises(MeasurementError, match="inconsistent report: "):
        summarised(altered)
