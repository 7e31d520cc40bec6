"""Every number stands under its own column: reports whose every field has another number
are shown, and each column is compared with the field it is named after. Views are checked
as documents, cell by cell; then each medium is checked to print any document's cells in
their columns."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gate_rows import case, control, judge, report, row
from rich.console import Console
from test_html import audit, figure, sample, sweep

from numdev import report as reports
from numdev.cli.kernels import kernels_document
from numdev.gate import compare_view as compare
from numdev.gate.compare_report import Group, Move
from numdev.gate.findings import findings_in
from numdev.gate.rules import Rules
from numdev.report import (
    Curve,
    DeviationRow,
    KernelSummary,
    PartSummary,
    Places,
    Point,
    WeightRow,
)
from numdev.report.document import (
    Cell,
    Column,
    Details,
    Document,
    Figures,
    Row,
    Table,
    TableChoice,
    tables_of,
)
from numdev.report.number_text import three
from numdev.report.renderers import html, markdown, terminal
from numdev.report.views import document_of, gate
from numdev.studies.audit import view as audit_view
from numdev.studies.audit.number_colouring import FailedNumbers
from numdev.studies.diagnose import view as diagnose
from numdev.studies.diagnose.head_ranking import DELTA
from numdev.studies.diagnose.report import CureRow, HeadRow, KernelRow, Ranked
from numdev.studies.logprobs import view as logprobs
from numdev.studies.training.weights import view as weights


def kernel(**changes: Any) -> KernelSummary:
    """No two of its numbers are shown alike."""
    fields: dict[str, Any] = {
        "kernel": "k", "options": {}, "role": "kernel", "format": "bfloat16", "ok": 16,
        "skipped": 2, "failed": 0, "reasons": ("needs CUDA",), "ran": (), "nonfinite": 7,
        "biased_heads": 3, "floor_ratio_where": "layer 1 head 2",
        "floor_ratio": 1.01, "floor_ratio_worst": 1.02, "baseline_ratio": 1.03,
        "expected_ratio": 1.05, "expected_ratio_worst": 1.06, "flash_vs_precision": 1.07,
        "noise": 1.16, "mean_abs": 1.1e-3, "max_abs": 1.2e-3,
    }  # fmt: skip
    return KernelSummary(**{**fields, **changes})


def part(at: float, **of: Any) -> PartSummary:
    return PartSummary(ok=2, floor_ratio=at, floor_ratio_worst=at + 0.1, baseline_ratio=at + 0.2,
                       expected_ratio=at + 0.3, expected_ratio_worst=at + 0.4, **of)  # fmt: skip


def tables(nodes: Any) -> list[Table]:
    return [node for node in nodes if isinstance(node, Table)]


def as_lines(pairs: Iterable[tuple[str, str]]) -> str:
    return " | ".join(f"{name}: {text}" for name, text in pairs)


def cells(nodes: Any, title: str = "", row: int = 0) -> str:
    """Columns and what stands in them, of the first table with this in its title."""
    table = next(t for t in tables(nodes) if title in t.title)
    texts = (cell.text for cell in table.rows[row].cells)
    return as_lines(zip((column.title for column in table.columns), texts, strict=True))


def blocks(**summary: Any) -> list[Any]:
    result = audit()
    changed = result.summary.model_copy(update=summary)
    return list(audit_view.blocks(result.model_copy(update={"summary": changed})))


def test_each_column_of_the_ranking_has_its_own_number() -> None:
    """Medians are medians, the worst is the worst; what is of sampled rows says so."""
    title = "closest to fp64"
    assert cells(blocks(kernels=(kernel(nonfinite=0),)), title) == (
        "kernel: k | error / floor: 1.01 | worst head: 1.02 | error / expected: 1.06 | "
        "error / eager: 1.03 | mean error: 1.1e-3 | max error: 1.2e-3"
    )
    sampled = kernel(rows_measured=64, nonfinite=0)
    assert "max error: ≥1.2e-3" in cells(blocks(kernels=(sampled,)), title)
    assert cells(blocks(kernels=(kernel(),)), title).count("NaN") == 6


@pytest.mark.parametrize(("title", "parts", "names"), [
    ("gradients", {"gradients": (part(4, tensor="dv"), part(2, tensor="dq"))}, ("dv", "dq")),
    ("prefill beside decode",
     {"phases": (part(4, phase="prefill"), part(2, phase="decode"))}, ("prefill", "decode")),
])  # fmt: skip
def test_each_part_of_a_kernel_has_its_own_numbers(
    title: str, parts: Any, names: Any
) -> None:
    """Gradients and phases, a row each: medians over floor and baseline, and worst
    heads."""
    result = blocks(kernels=(kernel(**parts),))
    for i, (name, at) in enumerate(zip(names, "42", strict=True)):
        assert cells(result, title, i) == (
            f"kernel: k | of: {name} | error / floor: {at}.00 | worst head: {at}.10 | "
            f"error / expected: {at}.40 | error / eager: {at}.20"
        )


def test_what_is_said_of_a_format_has_the_right_numbers() -> None:
    """The cost of the format is the rounding's; noise and who did not run are the
    kernel's."""
    precision = kernel(
        role="precision", kernel="reference", mean_abs=2.1e-3, max_abs=2.2e-3
    )
    nodes = blocks(kernels=(precision, kernel()))
    text = "\n".join(
        f"{x.lead} {x.text}" for node in nodes for x in getattr(node, "items", ())
    )
    assert "alone moved the answer by 2.1e-3 on average, 2.2e-3 at most" in text
    assert "k changes between two runs by 1.2× the rounding floor" in text
    assert "k skipped: needs CUDA" in text


def test_the_weights_of_an_audit() -> None:
    """Mean over elements that the format holds, maximum and count are not exchanged."""
    rows = [
        WeightRow(tensor=name, shape=(1,), stored="float32", format="float16", elements=elements,
                  nonfinite=lost, max_abs=largest, mean_abs=mean, rel=0.1)
        for name, elements, lost, largest, mean in (
            ("v", 5, 4, 0.3, 0.55), ("w", 3, 0, 0.5, 0.15), ("x", 2, 2, None, None))
    ]  # fmt: skip
    page = audit_view.blocks(audit(weights=tuple(rows)))
    assert cells(page, "Stored weights") == (
        "format: float16 | tensors: 3 | mean change (= W1): 0.25 | max change: 0.5 "
        "| in: w | "
        "not finite: 6"
    )


def test_each_column_of_a_weight_table_has_its_own_number() -> None:
    """Of a group and of a tensor."""
    numbers: dict[str, Any] = {
        "nonfinite_of": 1, "nonfinite_against": 2, "max_abs": 0.11, "mean_abs": 0.12, "rel": 0.13,
        "equal": 0.15, "bfloat16_times": 2.1, "float16_times": 3.1,
        "float8_e4m3fn_times": 4.1,
    }  # fmt: skip
    created: Any = reports.read(sample("weights"))
    tensor = created.rows[0].model_copy(update={**numbers, "tensor": "t", "w1": 0.16})
    group = created.groups[0].model_copy(update=numbers | {"mean_w1": 0.17})
    times = "×bf16: 2.10 | ×fp16: 3.10 | ×fp8: 4.10"
    shared = "mean: 0.12 | max: 0.11 | rel: 0.13"
    after = f"{times} | NaN/inf: 3"
    changed = created.model_copy(update={"rows": (tensor,), "groups": (group,)})
    groups, tensors, *_ = tables(weights.blocks(changed))
    assert cells([groups]) == f"kind: all | {shared} | mean W1: 0.17 | {after}"
    expected = f"tensor, most ×bf16 first: t | {shared} | W1: 0.16 | {after}"
    assert cells([tensors]) == expected


def test_each_column_of_a_comparison_has_its_own_number() -> None:
    """A before B, counts in their columns; a group told by rms is written as an error."""
    shared: dict[str, Any] = {"role": "kernel", "kernel": "k", "format": "bfloat16"}
    group = Group(**shared, tensor="dq", pairs=9, same_bits=2, moved=4, metric="floor_ratio",
                  a=1.5, b=2.5, change=3.5)  # fmt: skip
    by_rms = group.model_copy(update={"metric": "rms", "tensor": "lse", "a": 1.5e-3})
    place = reports.Place(
        case="c", module="m.3", layer=3, call=0, head=5, phase=None, seed=0
    )
    move = Move(**shared, tensor="dq", place=place, metric="m", a=1.0, b=2.0, change=2.0,
                noise=1.25, excess=3.0, words="from 1 to 2")  # fmt: skip
    changes = {"groups": (group, by_rms), "moves": (move,)}
    report: Any = reports.read(sample("compare")).model_copy(update=changes)
    nodes = list(compare.blocks(report))
    assert cells(nodes, "Every tensor") == (
        "kernel: k | tensor: dq bfloat16 | heads: 9 | moved: 4 | same bits: 2 | A: "
        "1.50 | "
        "B: 2.50 | unit: × the floor | one head's B/A: 3.50 | which head: "
    )
    assert "A: 1.5e-3" in cells(nodes, "Every tensor", 1)
    assert cells(nodes, "What moved") == (
        "kernel: k | tensor: dq bfloat16 | where: layer 3 head 5 | before and "
        "after: from 1 to 2 | "
        "factor: 2.00× | noise explains: 1.25×"
    )


@pytest.mark.parametrize(("score", "judged", "clean"), [
    (0.4, True, True), (0.5, True, False), (0.4, False, False),
])  # fmt: skip
def test_a_diagnosis_of_nothing_wrong_has_no_tables_in_the_way(
    score: float, judged: bool, clean: bool
) -> None:
    """They are behind a line of the page while every head was judged and rounding changes
    no layer's dW_Q by half; a head that was not judged is no head without fault."""
    created: Any = reports.read(sample("diagnose"))
    states = {"conditions": (), "missing": (DELTA,) if judged else ()}
    ranking = tuple(
        head.model_copy(update={"score": score, **states})
        for head in created.summary.ranking
    )
    summary = created.summary.model_copy(update={"ranking": ranking})
    result = created.model_copy(update={"summary": summary, "figures": ()})
    document = Document("d", tuple(diagnose.blocks(result)))
    assert bool(tables(document.blocks)) != clean
    assert bool(tables(document.shown_in("terminal"))) != clean
    assert "All 3 heads in numbers" in html.page(document) or not clean
    assert "Heads by" in markdown.page(document)


def test_a_side_is_coloured_by_the_rule_on_its_error() -> None:
    """Of the stored report: the rollout's error of 6.41 times the predicted one has no
    interval above its limit yet, and warns; were it 10 in every sequence, it would be
    sure. The trainer's passes. A cause that is named is refused by itself. Where the sides are
    off, and the worst tokens, are behind a line of the page."""
    created: Any = reports.read(sample("logprobs"))
    for sure, style in ((False, "warn"), (True, "bad")):
        rows = tuple(
            row.model_copy(update={"square": 100 * row.predicted_square})
            if sure and row.side == "rollout"
            else row
            for row in created.rows
        )
        nodes = list(logprobs.blocks(created.model_copy(update={"rows": rows})))
        sides, causes, *_ = tables(nodes)
        assert [row.cells[3].style for row in sides.rows] == [style, ""]
        assert [row.cells[1].style for row in causes.rows] == ["bad"]
    details = {node.title: node.blocks for node in nodes if isinstance(node, Details)}
    assert [*details] == [
        "By position, entropy and probability", "The tokens that are farthest off"
    ]  # fmt: skip
    assert len(details["By position, entropy and probability"]) == 6
    unjudged = created.model_copy(update={"rules": None})
    assert {r.cells[3].style for r in tables(logprobs.blocks(unjudged))[0].rows} == {""}


def test_each_number_of_a_diagnosis_is_its_own() -> None:
    """Of a head, a cure and a real kernel: every column shows the field it is named
    after."""
    where: dict[str, Any] = {"checkpoint": "c", "case": "x", "layer": 1, "head": 2}
    seen = {"out_bias": 0.12, "delta_mean": 0.13, "delta_t": 15.0, "dq_rel": 0.17}
    head = HeadRow(**where, rows=8, tied=0.31, out_bias=0.104, delta_mean=0.21, delta_t=20.3,
                   moved=0.38)  # fmt: skip
    cure = CureRow(**where, **seen, cure="c", dw_q_error=0.21, nonfinite=22)
    real = KernelRow(**where, **seen, kernel="k", dw_q_error=0.42)
    ranking = (Ranked(**where, rank=1, score=0.5, conditions=("a",), missing=("b", "c")),)
    created: Any = reports.read(sample("diagnose"))
    summary = created.summary.model_copy(update={"ranking": ranking})
    changes = {"heads": (head,), "cures": (cure,), "kernels": (real,), "summary": summary}
    heads, _, cures, kernels = tables(diagnose.blocks(created.model_copy(update=changes)))
    assert cells([heads]) == (
        "head: L1H2 | layer's dW_Q off, %: 50 | tied rows, %: 31 | O bias, ulp: +0.104 | "
        "δ error, %: +21 | its t: 20 | dW_Q by δ, %: 38 | conditions: 1 of 3"
    )
    start, more = (
        "δ error, %: +13 | its t: 15 | dW_Q error, %:",
        "dQ error, %: 17 | O bias, ulp: +0.120",
    )
    assert cells([cures]).startswith(f"cure: c | {start} 21 | {more} | NaN/inf: 22")
    assert cells([kernels]) == f"kernel: k | {start} 42 | {more}"


def judged_by_ratio(rows: list[DeviationRow]) -> list[Table]:
    """The tables of a gate whose one rule holds `expected_ratio` to 1.1."""
    limit = {"name": "error", "metric": "expected_ratio", "at_most": 1.1}
    judgement = judge(rows, Rules.model_validate({"thresholds": [limit]}))
    return tables(
        gate.document(judgement, *findings_in(judgement, rows), Places(rows)).blocks
    )


def test_each_column_of_a_gate_has_its_own_number() -> None:
    """How far beyond, what is there and what may be, and where; the offending and the
    judged heads of a rule; and what each planted fault took."""
    rule, beyond, doses = judged_by_ratio(
        [row(5, layer=2, module="m.2", expected_ratio=1.31), control("scale", 0.01, 1.0),
         row(6), control("scale", 0.03, 9.0)]
    )  # fmt: skip
    assert cells([beyond]) == (
        "over: 1.19× | kernel: mine | in: out bfloat16 | where: layer 2 head 5 | "
        "number: 1.31 | "
        "limit: expected_ratio ≤ 1.1 | rule: error"
    )
    assert cells([rule]) == (
        "rule: error | outcome: FAIL | judged: 1/2 | worst: 1.31 | "
        "limit: ≤ 1.1 | in: mine out bfloat16"
    )
    assert cells([doses]) == (
        "planted fault: scale | format: bfloat16 | missed: 0.01 | caught: 0.03 | "
        "caught from: 0.03 | by: error"
    )


@pytest.mark.parametrize("largest", [1.05, 1.5])
def test_a_rule_shows_the_number_nearest_to_its_limit(largest: float) -> None:
    """Or farthest beyond it, whichever kernel comes first."""
    ratios = enumerate((1.01, largest, 1.02))
    result = judged_by_ratio([row(kernel=f"k{i}", expected_ratio=x) for i, x in ratios])
    rule = cells(result)
    assert f"worst: {three(largest)} |" in rule
    assert rule.endswith("in: k1 out bfloat16")


def test_each_column_of_a_list_of_kernels_has_its_own_words() -> None:
    """The name, whether it runs here, what it is."""
    kernel = {
        "name": "k",
        "missing": "needs CUDA",
        "summary": "Fused.",
        "options": {"b": 1},
    }
    listed = kernels_document(
        (kernel, {**kernel, "missing": None, "options": {}}), "CPU"
    ).blocks
    expected = "kernel: k | here: no: needs CUDA | what it is: Fused. Options: b."
    assert cells(listed, "CPU") == expected
    assert cells(listed, "CPU", 1) == "kernel: k | here: available | what it is: Fused."


def test_each_point_of_a_sweep_has_its_own_number() -> None:
    """A curve at each place: its mean; and on the page, where the mouse points, its
    interval."""

    def curve(label: str, at: float) -> Curve:
        points = (Point(x=x, label=f"{x:g}", mean=at + i, low=at + i - 0.1, high=at + i + 0.2)
                  for i, x in enumerate((64.0, 128.0)))  # fmt: skip
        return Curve(label=label, role="kernel", points=tuple(points))

    ticks = tuple(reports.Tick(x=x, label=f"{x:g}") for x in (64.0, 128.0))
    axis = reports.Axis(name="n", title="length", scale="log", ticks=ticks)
    created = sweep(figure(curve("a", 1.1), curve("b", 5.5)), axis=axis, notes=())
    node = next(node for node in document_of(created).blocks if isinstance(node, Figures))
    shown = list(tables_of(node))
    assert cells(shown) == "length: a | 64: 1.1 | 128: 2.1"
    assert cells(shown, row=1) == "length: b | 64: 5.5 | 128: 6.5"
    places = tuple(
        node.figures[0].model_copy(update={"place": {"tile": name}}) for name in "xy"
    )
    (both,) = tables_of(replace(node, figures=places))
    assert cells([both], row=2) == "length: y: a | 64: 1.1 | 128: 2.1"
    titles = re.findall("<title>(b .*?)</title>", html.page(created))
    assert titles == ["b at 64: 5.5 [5.4 to 5.7]", "b at 128: 6.5 [6.4 to 6.7]"]


GRID = Table(
    columns=(Column("name", align="left"), *(Column(f"c{i}") for i in range(6))),
    rows=tuple(Row(tuple(Cell(f"r{j}x{i}") for i in range(7))) for j in range(4)),
    title="grid",
)


def on_terminal(document: Any, width: int = 80) -> str:
    """What is printed of a document, or of a report, on a terminal of that width."""
    file = io.StringIO()
    terminal.show(document, Console(file=file, width=width))
    return file.getvalue()


def grid_in(medium: str, kind: Any) -> list[list[str]]:
    """The words of the grid's lines as a medium prints them."""
    document = Document("d", (replace(GRID, kind=kind),))
    if medium == "html":
        rows = re.findall("<tr.*?</tr>", html.page(document))
        return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]
    if medium == "markdown":
        lines = [line for line in markdown.page(document).splitlines() if "|" in line]
        return [line.strip("| ").split(" | ") for line in (lines[0], *lines[2:])]
    lines = [line.split() for line in on_terminal(document).splitlines()]
    return [words for words in lines if len(words) == 7]


@pytest.mark.parametrize("medium", ["html", "markdown", "terminal"])
@pytest.mark.parametrize("kind", ["numbers", "words", "map", "series"])
def test_a_medium_prints_every_cell_in_its_column(medium: str, kind: str) -> None:
    """The header first, then row by row, none exchanged."""
    expected = [["name", *(f"c{i}" for i in range(6))]]
    expected += [[f"r{j}x{i}" for i in range(7)] for j in range(4)]
    assert grid_in(medium, kind) == expected


def test_a_node_is_shown_where_it_belongs() -> None:
    """Every table's title of a real report is on the page; what is for it alone is
    nowhere else."""
    document = document_of(audit())
    page = html.page(document)
    assert all(t.title in page for t in tables(document.shown_in("html")))
    only = Document(
        "d", (Table((Column("a"),), (Row((Cell("secret"),)),), only=("html",)),)
    )
    assert "secret" in html.page(only)
    assert "secret" not in markdown.page(only)


def test_a_gates_page_counts_all_and_begins_with_the_worst() -> None:
    """Rows beyond a limit, the farthest first; heads that lack a number over all tensors;
    those that pass flash-attention's own rule, of all."""
    rows = [
        row(h, expected_ratio=x, fa_rule=h != 1) for h, x in enumerate((1.3, 2.5, 1.9))
    ]
    _, beyond, *_ = judged_by_ratio(rows)
    assert [line.cells[4].text for line in beyond.rows] == ["2.5", "1.9", "1.3"]
    lacking = [
        row(h, noise=None, tensor=t) for t, n in (("dq", 2), ("dk", 3)) for h in range(n)
    ]
    judgement = judge(lacking)
    (sentence,) = {
        p.sentence for p in gate.problems_of(judgement, ()) if "repro" in p.title
    }
    assert "in 5 results of mine (dq, bfloat16), of mine (dk, bfloat16):" in sentence
    page = markdown.page(gate.document(judge(rows), (), (), Places(rows)))
    assert "2 of 3 heads pass flash-attention's own" in page


def test_a_series_is_cut_evenly_and_a_long_table_says_by_how_much() -> None:
    """The first and the last are always there; three rows more than a table of Markdown
    has."""
    assert terminal.evenly_spread(range(10), 4) == [0, 3, 6, 9]
    assert terminal.evenly_spread(range(3), 4) == [0, 1, 2]
    rows = tuple(Row((Cell(str(i)),)) for i in range(markdown.LONGEST + 3))
    text = markdown.page(Document("d", (Table((Column("n"),), rows),)))
    assert "\n3 more rows are in the report." in text


def test_curves_beside_kernels_are_there_for_comparison() -> None:
    """In the table of a figure the floor's line is soft, the kernel's is not."""
    created = sweep(figure(), notes=())
    node = next(node for node in document_of(created).blocks if isinstance(node, Figures))
    curves = [Curve(label=name, role=role, points=(Point(x=1.0, label="1", mean=1.0, low=None,
              high=None),)) for name, role in (("k", "kernel"), ("floor", "floor"))]  # fmt: skip
    one = node.figures[0].model_copy(update={"curves": tuple(curves)})
    (shown,) = tables_of(replace(node, figures=(one,)))
    assert [line.standard for line in shown.rows] == [False, True]


@pytest.mark.parametrize(("ratio", "style", "heat"), [
    (1.0, "good", 0), (1.09, "good", 4), (1.41, "bad", 15), (10**0.5, "bad", 50), (10.0, "bad", 100),
])  # fmt: skip
def test_a_number_has_the_colour_of_the_rule_that_it_was_held_to(
    ratio: float, style: str, heat: int
) -> None:
    """The default rules let an error be 1.1 times the predicted one: 1.41 fails, and is no
    mere warning. On the map a refused number is outlined; colours go by logarithms from 1
    to 10."""
    created = report(row(expected_ratio=ratio))
    summary = created.summary.kernels[0].expected_ratio_worst
    nodes = list(audit_view.blocks(created))
    ranking = next(t for t in tables(nodes) if "closest to fp64" in t.title)
    assert (summary, ranking.rows[0].cells[3].style) == (ratio, style)
    (cell,) = (
        next(n for n in nodes if isinstance(n, TableChoice)).tables[0].rows[0].cells[1:]
    )
    assert (cell.heat, cell.style) == (heat, style if style == "bad" else "")


def test_a_report_that_was_not_judged_accuses_no_number() -> None:
    """An error of 9 times the predicted one, by no rule; nor by rules that cannot be
    read."""
    judged = report(row(expected_ratio=9.0))
    for rules in (None, {"name": "of another version", "limits": 3}):
        created = judged.model_copy(update={"rules": rules})
        ranking = next(
            t for t in tables(audit_view.blocks(created)) if "closest" in t.title
        )
        assert {cell.style for cell in ranking.rows[0].cells[1:]} == {""}


def test_only_the_refused_phase_and_gradient_are_coloured() -> None:
    """A decode that fails leaves the prefill's numbers alone, and dq those of dk."""
    created = report(
        row(0, phase="prefill"), row(0, call=1, phase="decode", expected_ratio=2.0),
        row(0, tensor="dq", expected_ratio=9.0), row(0, tensor="dk", expected_ratio=1.02),
    )  # fmt: skip
    failed = FailedNumbers(created)

    def style(tensor: str, phase: str | None) -> str:
        return failed.style_of_tensor("mine", "bfloat16", tensor, "expected_ratio", phase)

    assert style("out", "decode") == style("out", None) == style("dq", None) == "bad"
    assert (style("out", "prefill"), style("dk", None)) == ("", "good")
    assert [failed.style(r, "expected_ratio") for r in created.rows] == [
        "",
        "bad",
        "bad",
        "",
    ]


def test_what_a_sample_means_has_its_numbers() -> None:
    """64 random rows of each head, and 3 that looked worst."""
    result = blocks(kernels=(kernel(rows_measured=64, suspects=3),))
    assert any(("Only 64 random query rows per head were measured, over all positions, and the 3")
               in getattr(node, "text", "") for node in result)  # fmt: skip


def test_which_roundings_make_the_errors_in_shares_and_calls() -> None:
    """Per cent of the squared error; in how many calls of all."""
    one = reports.Explanation(
        kernel="k", options={}, format="bfloat16", tensor="dq", is_identified=True, nearest="`fa2`",
        residual=0.11, next_preset="eager", next_residual=0.72, explained=3, calls=4, reason=None,
        sites=tuple(reports.SiteShare(site=s, rounds="x", share=x, residual=0.5)
                    for s, x in (("p", 0.62), ("out", 0.07))),
    )  # fmt: skip
    assert cells(blocks(explanations=(one,)), "Which roundings") == (
        "kernel: k bfloat16 | : dq | makes the errors of: fa2 (3 of 4 calls) | "
        "residual: 0.11 | "
        "next: eager 0.72 | of its squared error: 62 % p, 7 % out"
    )


def profile(**changes: Any) -> reports.ProfileRow:
    fields: dict[str, Any] = {
        "role": "kernel", "kernel": "k", "format": "bfloat16", "tensor": "out", "case": "c",
        "layer": 0, "length": 64, "starts": (0, 16, 32), "counts": (1, 1, 1),
        "errors": (1.0, 2.5, 6.0), "predicted": (1.0, 1.0, 2.0),
    }  # fmt: skip
    return reports.ProfileRow(**{**fields, **changes})


def test_where_a_kernel_errs_along_its_rows() -> None:
    """Error over what is predicted, of the length that most calls have, the longer one of
    two; where it is first above twice that, and where most; how many elements err by how
    much, in per cent."""
    short = [profile(case="s", length=32, errors=(9.0, 9.0, 9.0))]
    nodes = list(audit_view.positions([profile(), *short]))
    (drawn,) = (node for node in nodes if isinstance(node, Figures))
    assert [p.mean for p in drawn.figures[0].curves[0].points] == [1.0, 2.5, 3.0]
    assert "(64 rows)" in drawn.figures[0].title
    (item,) = (item for node in nodes for item in getattr(node, "items", ()))
    assert (
        item.text
        == "first above 2× the predicted error at row 16; most at row 32: 3.00×."
    )
    counts = [0] * len(audit_view.ULP_LABELS)
    counts[1], counts[2] = 3, 9
    (node,) = audit_view.spread([profile(ulps=tuple(counts))])
    assert [p.mean for p in node.figures[0].curves[0].points] == [25.0, 75.0]


def test_where_numbers_come_from_names_the_threads_of_large_calls() -> None:
    """One for small calls, and the most that a call had."""
    result = audit()
    threads = (1, 8)
    few = tuple(case(str(n)).model_copy(update={"threads": n}) for n in threads)
    system = {**result.provenance.system, "gpu": None}
    origin = result.provenance.model_copy(update={"system": system})
    text = on_terminal(
        result.model_copy(update={"cases": few, "provenance": origin}), 400
    )
    assert "1 thread for small calls, 8 threads for large ones." in text


def test_each_finding_has_its_own_script(tmp_path: Path) -> None:
    """Of two that were written, and none where there is none."""
    rows = [row(kernel=name, expected_ratio=9.0) for name in ("a", "b", "c")]
    created = report(*rows)
    for finding in created.findings[:2]:
        folder = tmp_path / "reproducers" / finding.folder
        folder.mkdir(parents=True)
        (folder / "reproduce.py").write_text(f"# of {finding.kernel}")
    items = [
        x for n in document_of(created, tmp_path).blocks for x in getattr(n, "items", ())
    ]
    scripts = {
        (item.lead.split() or item.text.split())[1]: item.script
        for item in items
        if item.script
    }
    assert scripts == {
        f.kernel: (f"reproducers/{f.folder}/reproduce.py", f"# of {f.kernel}")
        for f in created.findings[:2]
    }
