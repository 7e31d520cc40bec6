"""`numdev invariance`: what breaks along one axis is named, what does not is called the
same."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import planted
import pytest
import torch
import yaml
from commands import ran
from planted import CATALOGUE, of_family

import numdev
from numdev.cases import AttentionCase, CaseRef
from numdev.errors import MeasurementError
from numdev.formats import format_named
from numdev.gate import judgement, judging
from numdev.gate.rules import Rules, default_rules
from numdev.kernels.reference import gradients
from numdev.report import Outcome, Standing, read, write
from numdev.report.document import Details, Table
from numdev.request_models import AXES, InvarianceRequest
from numdev.sources.case_sources import CheckpointSource
from numdev.sources.input_regimes import Shapes, draw
from numdev.studies.audit.prepared_attention import TERMS, part, settled
from numdev.studies.invariance import axes, consistency, verdict
from numdev.studies.invariance.answers import (
    GROUPS,
    WORDS,
    AxisAnswer,
    answers_clause,
    answers_of_rows,
    details_clause,
)
from numdev.studies.invariance.axes import VARIANTS
from numdev.studies.invariance.consistency import _way_contradiction, check_consistency
from numdev.studies.invariance.differences import (
    _error_of_other_keys,
    _first_difference,
    _numbers_of_rows,
    _row_sums,
    count_keys_seen,
    differs,
    exact_change,
    explained_by_rounding,
)
from numdev.studies.invariance.model_output import _output_pairs
from numdev.studies.invariance.report import Cause, InvarianceReport, InvarianceRow
from numdev.studies.invariance.study import invariance
from numdev.studies.invariance.view import blocks
from numdev.testing import CheckFailed, check, check_attention

CASE = {
    "name": "c", "heads": 2, "kv_heads": 2, "seq_len": 64, "head_dim": 32, "causal": True,
    "batch": 2,
}  # fmt: skip

SHAPES = Shapes(batch=2, heads=4, kv_heads=2, q_len=40, kv_len=40, head_dim=8, v_dim=16)
SQUARE = Shapes(batch=2, heads=2, kv_heads=2, q_len=64, kv_len=64, head_dim=8, v_dim=8)
ROOT = Path(__file__).parent.parent


def studied(
    path: Path, *kernels: Any, cases: Any = (CASE,), **more: Any
) -> InvarianceReport:
    request = InvarianceRequest(
        target="t", cases=cases, kernels=kernels, logits=False, **more
    )
    return invariance(request, path)


def moved(rows: Any) -> set[tuple[str, str]]:
    """The axes and variants along which the output has other bits."""
    return {(r.axis, r.variant) for r in rows if r.differ}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: Any) -> set[tuple[str, str]]:
    """Where tiles that begin at other keys change a kernel that otherwise changes
    nothing."""
    return moved(studied(tmp_path_factory.mktemp("s"), "planted:in_tiles_of_16").rows)


@cache
def tokens(text: str) -> str:
    return {"split": "in 4 splits", "tile": "32 keys a tile in one split", "both": "in 2 splits",
            "order": "the last first,", "whole": "keys a tile in one split"}[text]  # fmt: skip


SWITCHES = [f"{axis}-{cut}" for axis, cuts in planted.invariance.SWITCHES.items() for cut in cuts.split()]  # fmt: skip


@pytest.mark.parametrize("kernel", SWITCHES)
@pytest.mark.one_in(6)
def test_a_tiling_that_depends_on_one_axis_is_named(tmp_path, sound, kernel):
    """The axis, and no other; the two ways to cut the keys; no finding, since both are
    sound."""
    report = studied(tmp_path, CATALOGUE[kernel].address)
    axis, _, cut = kernel.partition("-")
    rows = [r for r in report.rows if (r.axis, r.variant) not in sound]
    assert {r.axis for r in rows if r.differ} == {axis}
    words = [str(r.cause) for r in rows if r.cause is not None]
    assert words
    assert any("16 keys a tile" in text and tokens(cut) in text for text in words), words
    assert not report.findings


BROKEN = [entry for entry in of_family("invariance") if entry.rule]


@pytest.mark.parametrize("entry", BROKEN, ids=lambda entry: entry.name)
@pytest.mark.one_in(4)
def test_a_kernel_that_is_wrong_along_one_axis_is_found(tmp_path, entry):
    """One finding, of the axis from which all others follow, and a verdict."""
    report = studied(tmp_path, entry.address)
    assert [f.rule.split()[0] for f in report.findings] == [entry.rule]
    assert report.outcome == "exceeded"
    assert report.verdicts[0].finding == 0
    if entry.rule in ("beyond", "unwritten"):  # it is NaN that comes out
        assert report.findings[0].rule == f"{entry.rule} finite"
    # No tiling makes such a difference
    if entry.rule in ("decode", "chunks", "mask"):
        assert not [
            r for r in report.rows if r.axis == entry.rule and r.cause is not None
        ]


def test_a_dependence_hides_no_graver_one(tmp_path):
    """An ulp from call to call explains an ulp along other axes, not another answer."""
    report = studied(tmp_path, "planted:noise_and_batch", axes=["repeat", "batch"])
    assert [f.rule for f in report.findings] == ["repeat bitwise", "batch rounding"]
    # No tiling repeats itself so
    assert not [r for r in report.rows if r.cause is not None]
    planted.invariance.counted[:] = [1]
    poisoned = studied(tmp_path / "p", "planted:noise_beside_nan", axes=["hidden-nan"])
    assert [f.rule for f in poisoned.findings] == ["repeat bitwise"]


def test_a_tensor_in_one_form_alone_is_a_skipped_row(tmp_path):
    """It says why; the output beside it is compared, and nothing is accused."""
    kernel = "planted:lse_of_several_rows"
    report = studied(tmp_path, kernel, axes=("decode",))
    rows = {row.tensor: row for row in report.rows if row.variant == "row 63 by itself"}
    assert (rows["lse"].status, rows["lse"].differ) == ("skipped", 0)
    assert rows["lse"].reason == "lse is returned in one form alone"
    assert (rows["out"].status, rows["out"].elements) == ("ok", 2 * 2 * 32)
    assert rows["out"].tensors == rows["lse"].tensors == ("out", "lse")
    assert not report.findings


def test_what_is_no_answer_is_not_judged(tmp_path):
    """NaN at every call changes along no axis, and is no pass; a dtype without arithmetic
    is one that can be compared; a call too large for a machine, and an axis that is not
    for it, say so."""
    large = {**CASE, "heads": 64, "kv_heads": 64, "seq_len": 600}
    nan = studied(tmp_path / "n", "planted:always_nan", axes=["batch"])
    assert (nan.outcome, nan.measured) == ("unmeasured", False)
    assert "NaN or infinite where the exact result is not" in nan.findings[0].details
    bits = studied(tmp_path / "b", "planted:eight_bits", axes=["batch", "padding"])
    assert bits.outcome == "passed"
    assert not any(r.differ for r in bits.rows if r.axis == "batch")
    few = studied(tmp_path / "l", "sdpa-math", axes=["batch", "graph"], cases=[large])
    reasons = {r.variant: r.reason for r in few.rows if r.reason}
    assert "are more than are computed for it here" in reasons["64 in place of 2"]
    assert reasons["CUDA graph"] == "needs CUDA, but this run is on CPU"
    assert few.rows[0].elements == 2 * 600 * 32  # of the first kv head
    reason = verdict.passing(
        few, [t for t in verdict.tests(few, default_rules()) if t.runs]
    )
    assert reason == (
        "bit-identical: batch (in part)",
        "Tried in part: batch (2 of 3 calls, with kv head 0 alone).",
    )
    table = next(
        node
        for node in blocks(few)
        if isinstance(node, Table) and "html" not in node.only
    )
    cell = table.rows[0].cells[2]
    assert (cell.text, cell.after) == ("same", "2 of 3 calls, with kv head 0 alone")


@pytest.mark.parametrize(("splits", "moved", "words"), [
    (1, True, "16 keys a tile in one split in both, but the tiles start at other keys"),
    (4, True, "16 keys a tile in 4 splits in both, but the tiles start at other keys"),
    (4, False, "16 keys a tile in 4 splits in both, but the splits start at other keys"),
])  # fmt: skip
def test_what_moved_is_said(splits: int, moved: bool, words: str) -> None:
    cut = {"block_kv": 16, "splits": splits}
    cause = Cause(base=cut, variant=cut, moved=moved, residual=0.0)
    assert str(cause) == f"explained by tiling: {words}"


@pytest.mark.parametrize(("axis", "variant", "moved"), [
    ("padding", "37 on the left", True), ("padding", "37 on the right", False),
    ("lengths", "packed, behind another", True), ("decode", "row 63 by itself", False),
])  # fmt: skip
def test_keys_move_where_others_stand_before_them(
    axis: str, variant: str, moved: bool
) -> None:
    drawn = draw("normal", SQUARE, seed=0, label="", options={})
    case = AttentionCase(ref=CaseRef(case="c"), q=drawn.q, k=drawn.k, v=drawn.v, scale=1.0,
                         is_causal=True)  # fmt: skip
    [calls] = [v.calls for v in axes.VARIANTS[axis](case) if v.name == variant]
    assert [call.moves_keys for call in calls] == [moved]
    windowed = dataclasses.replace(case, window=(8, 0))
    [[cut]] = [
        v.calls for v in axes.decode_variants(windowed) if v.name == "row 63 by itself"
    ]
    assert cut.moves_keys


def test_a_decoding_is_compared_where_it_decodes() -> None:
    """Its last eight positions; chunks at all of them."""
    model = models.build("llama")
    ids = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(input_ids=ids[:1]).logits.double()
        ways = _output_pairs(model, {"input_ids": ids})
        one, other = ways["decode"]()
        chunks, _ = ways["chunks"]()
    assert torch.equal(one, whole[:, -8:])
    assert other.shape == one.shape
    assert chunks.shape == whole.shape


def test_a_model_is_not_loaded_for_what_the_journal_has(tmp_path, monkeypatch) -> None:
    """Neither in the format nor a wider one; the report is the same."""
    target = models.saved("llama", tmp_path)
    asked = {"kernels": ("sdpa-math",), "axes": ("batch",), "formats": ("bfloat16",),
             "sequences": 2, "length": 8, "layers": (0,)}  # fmt: skip
    request = InvarianceRequest(target="t", checkpoint=str(target), **asked)
    loads: list[Any] = []
    load = CheckpointSource.load
    monkeypatch.setattr(
        CheckpointSource,
        "load",
        lambda self, dtype: loads.append(dtype) or load(self, dtype),
    )
    first, again = (invariance(request, tmp_path / "out") for _ in range(2))
    assert loads == [torch.bfloat16, torch.float32]
    assert (first.plan.models, first.models) == (("batch",), again.models)
    assert first.plan == again.plan


def test_what_of_a_call_was_compared_is_in_finding_and_table() -> None:
    part = {"part": "kv head 0 alone", "repeats": True}
    [row] = rows_along("batch", {**MOVED, **part, "excess": 6.0, "case": "c"})
    report = stored(row, axes=("batch",), models=())
    result, _ = verdict.findings(judging.judgement_of(report, default_rules()), report)
    assert "along batch: the output changes by 6.00×" in result[0].sentence
    assert "in the batch: c, v0, kv head 0 alone." in result[0].details
    tables = {node.title: node for node in blocks(report) if isinstance(node, Table)}
    assert tables["What differs"].rows[0].cells[2].text == "v0, kv head 0 alone"
    check_way = report.plan.ways[0].model_copy(
        update={"format": row.format, "case": "c", "axis": "batch", "variant": "v0"}
    )
    assert (
        _way_contradiction(check_way, [row])
        == "compares another part of the call than the plan"
    )


@pytest.mark.parametrize("excuse", ["mask", "option", "way"])
def test_nothing_excuses_a_kernel_that_the_way_does_not_add(excuse: str) -> None:
    """A mask, an option or a way to run that the plan does not know of."""
    skipped = {"status": "skipped", "excuse": excuse, "reason": "no", "tensors": ()}
    blank: dict[str, Any] = dict.fromkeys(consistency.NUMBERS) | {
        "elements": 0,
        "first": None,
    }
    [row] = rows_along("strides", {**blank, **skipped})
    way = stored().plan.ways[0].model_copy(update={"axis": "strides", "variant": "v0"})
    wrong = f"is excused by the {excuse}, which the plan does not add"
    assert _way_contradiction(way, [row]) == wrong
    assert _way_contradiction(way.model_copy(update={"adds": excuse}), [row]) == ""


@pytest.mark.parametrize(("ran", "unjudged"), [(False, 0), (True, 1)])
def test_a_way_to_run_excuses_no_kernel_that_ran_so(ran: bool, unjudged: int) -> None:
    """`unwritten` in one variant and not in another: it ran in fewer ways than were
    planned."""
    no = {"status": "skipped", "excuse": "way", "reason": "no", "tensors": ()}
    rows = rows_along("unwritten", no, {} if ran else no)
    test = that_was_tested(stored(*rows, axes=("unwritten",), models=()), "runs")
    assert (test.judged, test.unjudged) == (int(ran), unjudged)


def test_the_page_answers_in_one_grid() -> None:
    """A row for each axis under its group's question, green where the bits are the same,
    grey where rounding explains the change, red and in words where a limit is exceeded;
    of all tensors together. What was not tried is a dash that says why."""
    skipped = {"status": "skipped", "excuse": "way", "reason": "needs CUDA", "tensors": (),
               "elements": 0}  # fmt: skip
    rows = [
        *rows_along("batch", {}),
        *rows_along("decode", {**MOVED, "floor_ratio": 0.25, "excess": 0.5}, {}),
        *rows_along("strides", {**MOVED, "floor_ratio": 6.0, "excess": 6.0}),
        *rows_along("graph", skipped),
    ]
    report = stored(*rows, axes=("batch", "decode", "strides", "graph"), models=())
    grid = next(node for node in blocks(report) if isinstance(node, Table))
    assert (grid.kind, grid.only) == ("grid", ("html",))
    shown = [
        (row.cells[0].text, row.cells[1].text, row.cells[1].style) for row in grid.rows
    ]
    assert shown == [
        ("Batch", "", ""), ("batch", "same", "good"),
        ("Serving", "", ""), ("decode", "0.25×", "soft"),
        ("Same call", "", ""), ("strides", "FAIL 6.00×", "bad"), ("graph", "–", ""),
    ]  # fmt: skip
    assert grid.rows[3].cells[1].after == "1/2"
    assert grid.rows[6].cells[1].title == "needs CUDA"
    assert (
        grid.rows[0].cells[0].after
        == "Does a sequence depend on what else is in the call?"
    )
    (details,) = (
        n for n in blocks(report) if isinstance(n, Details) and n.only == ("html",)
    )
    assert details.title == "What differs, and why (2)"


def test_headline_table_and_answer_are_of_one_call() -> None:
    """The largest difference, which call it is of, and whose cause is said."""
    cut = {"block_kv": 16, "splits": 1}
    cause = Cause(base=cut, variant=cut, moved=True, residual=0.01)
    small = {**MOVED, "floor_ratio": 4.1e-8, "cause": cause, "repeats": True}
    rows = rows_along("padding", small, {**MOVED, "floor_ratio": 0.0174, "repeats": True})
    report = stored(*rows, axes=("padding",), models=())
    answers = list(answers_of_rows(rows, ()))
    clause = answers_clause(answers)
    assert clause.text == "bit-identical: none; NOT: padding"
    sizes = "Differences over the floor's error: padding 0.017×."
    assert details_clause(answers, clause.named) == sizes
    [line] = verdict.answer_sentences(rows)
    name = rows[0].case
    assert line == (
        "sdpa-math (bfloat16) along padding: explained by tiling: 16 keys a tile in one "
        f"split in both, but the tiles start at other keys ({name}, v0)."
    )
    tables = {node.title: node for node in blocks(report) if isinstance(node, Table)}
    [table] = [node for title, node in tables.items() if "bfloat16." in title]
    cell = table.rows[0].cells[2]
    assert (cell.text, cell.after) == ("0.017", "2/2")


def test_each_axis_has_one_answer() -> None:
    """Bit-identical, other bits within the limits, beyond one, and planned without a
    call. Each axis is in one group."""
    beyond = {**MOVED, "excess": 6.0}
    rows = [
        *rows_along("batch", {}),
        *rows_along("decode", MOVED),
        *rows_along("chunks", beyond),
    ]
    planned = ("batch", "decode", "chunks", "padding")
    answers = verdict.axis_answers(stored(*rows, axes=planned, models=()))
    words = {
        a.axis: (a.answer, a.calls, a.moved) for a in answers if a.kernel == "sdpa-math"
    }
    assert words == {
        "batch": ("same", 1, 0), "decode": ("differs", 1, 1),
        "chunks": ("exceeds", 1, 1), "padding": ("not tried", 0, 0),
    }  # fmt: skip
    grouped_axes = [axis for group in GROUPS for axis in group.axes]
    assert sorted(grouped_axes) == sorted(VARIANTS)


@pytest.mark.parametrize(("tile", "lengths"), [
    (16, range(24, 257)), (128, range(257, 1300)),
])  # fmt: skip
def test_of_some_rows_one_stands_amid_a_tile(tile: int, lengths: range) -> None:
    """Beside the last one, and one that begins a tile."""
    for n in lengths:
        case = SimpleNamespace(q_len=n)
        first = {row % tile == 0 for row in axes._some_rows(case) if row < n - 1}
        assert False in first, n


@pytest.mark.parametrize("same", range(len(VARIANTS) + 1))
def test_a_clause_of_answers_is_short(same: int) -> None:
    """Whatever is bit-identical: at most WORDS words, and every axis is named or
    counted."""
    answers = [
        AxisAnswer("k", "f", axis, "same" if i < same else "differs", part="1 of 2 calls")
        for i, axis in enumerate(VARIANTS)
    ]
    text, named = answers_clause(answers)
    assert len(text.split()) <= WORDS
    assert ("batch (required)" in answers_clause(answers, required=["batch"]).text) == (
        "batch" in named and answers[list(VARIANTS).index("batch")].answer == "same"
    )
    verdict_line = answers_clause(answers, differing="rounding only (allowed)").text
    assert len(verdict_line.split()) <= WORDS
    others = sum(map(int, re.findall(r"and (\d+) others", text)))
    assert len(named) + others == len(VARIANTS)


def test_every_axis_of_a_kernel_that_passed_is_named() -> None:
    """In its clause, or in the details: a clause with longer words names fewer."""
    moved_along = ("decode", "lengths", "longer", "mask")
    rows = [
        row
        for axis in VARIANTS
        for row in rows_along(axis, MOVED if axis in moved_along else {})
    ]
    report = stored(*rows, axes=tuple(VARIANTS), models=())
    required = report.model_copy(update={"request": {"require": ["batch"]}})
    judged = [that_was_tested(report, f"{axis} rounding") for axis in moved_along]
    line, details = verdict.passing(required, judged)
    assert line == (
        "bit-identical: batch (required) and 17 others; "
        "rounding only (allowed): decode and 3 others"
    )
    named = set(re.findall(r"[\w-]+", f"{line} {details}"))
    assert set(VARIANTS) <= named


@pytest.mark.parametrize(("changes", "words"), [
    ([{"floor_ratio": None}], "in out, whose floor has no error"),
    ([{"floor_ratio": None}, {}], "2.00×"),
    ([{"floor_ratio": None, "tensor": "lse"}], "in the log-sum-exp alone"),
])  # fmt: skip
def test_a_change_without_a_size_says_of_which_tensor(
    changes: list[dict[str, Any]], words: str
) -> None:
    """The floor of a result that its format holds as it is has no error."""
    rows = rows_along("batch", *({**MOVED, **change} for change in changes))
    [answer] = answers_of_rows(rows, ())
    assert answer.change_in_words == words


def test_an_axis_that_is_required_decides(tmp_path, capsys, monkeypatch) -> None:
    """Every tensor must keep its bits along it, in the command's exit code too; one that
    could not be tested is no pass."""
    monkeypatch.chdir(tmp_path)
    request = {"cases": [CASE], "kernels": ["planted:batch_split"]}
    Path("cases.yaml").write_text(yaml.safe_dump(request))
    command = ("invariance", "cases.yaml", "--require")
    code, out, _ = ran(capsys, *command, "batch", "-o", "batch")
    assert code == 1
    assert "fails along batch: the output is not bit-identical" in " ".join(out.split())
    assert read(Path("batch")).plan.axes == ("batch",)
    assert ran(capsys, "gate", "batch")[0] == 1
    assert ran(capsys, *command, "order", "-o", "order")[0] == 0
    assert ran(capsys, *command, "graph", "-o", "graph")[0] == 3
    gradient = rows_along("batch", {**MOVED, "tensor": "dq"})
    report = stored(*gradient, axes=("batch",), models=())
    required = report.model_copy(update={"request": {"require": ["batch"]}})
    standings = [
        [
            t.standing
            for t in verdict.tests(r, default_rules())
            if t.rule == "batch bitwise"
        ]
        for r in (report, required)
    ]
    assert standings == [[], ["exceeded"]]


def test_a_maximum_in_autograds_graph_is_no_fault(tmp_path: Path) -> None:
    """Where scores tie, what rounding leaves goes to one key of dk, and to another one
    where the tiles begin elsewhere. A key of dk that is lost is a fault all the same."""
    case = {**CASE, "name": "u", "seq_len": 256, "inputs": {"name": "uniform"}}
    case |= {"batch": 1, "heads": 1, "kv_heads": 1}
    kernel = "planted:attached_maximum"
    report = studied(tmp_path, kernel, cases=[case], axes=["padding"], backward=True)
    keys = [
        r.excess_of_a_row or 0
        for r in report.rows
        if r.tensor == "dk" and r.status == "ok"
    ]
    assert keys
    assert max(keys) < 16
    assert not report.findings


def test_a_key_errs_as_another_of_its_head_does() -> None:
    """By hand: both forms err by 8 in some key, so that 1 is explained in all; the one
    that errs by less counts; dq and dv have no such keys."""
    rows = {"difference": torch.tensor([[[9.0, 0.0], [4.0, 1.0]]]),
            "error_base": torch.tensor([[[64.0, 0.0], [0.0, 0.0]]]),
            "error_variant": torch.tensor([[[0.0, 100.0], [1.0, 1.0]]])}  # fmt: skip
    assert _error_of_other_keys(rows, "dk")["elsewhere"].tolist() == [
        [[1.0, 1.0], [0.0, 0.0]]
    ]
    assert _error_of_other_keys(rows, "dq")["elsewhere"].tolist() == [
        [[0.0, 0.0], [0.0, 0.0]]
    ]


def test_sound_kernels_keep_their_bits(tmp_path):
    """Fixed tiles and plain attention, forward and backward: the same along every axis
    but where tiles begin at other keys; and no finding."""
    fixed = {"name": "emulated", "options": {"block_kv": 32}}
    cases = [CASE, {**CASE, "name": "d", "seq_len": 1, "kv_len": 100, "causal": False}]
    report = studied(tmp_path, fixed, "sdpa-math", cases=cases, backward=True)
    assert not report.findings
    assert len(report.rows) > 800
    left_out = {"lengths", "padding", "tiles", "hidden-nan"}
    # A matrix product may sum in another order in another layout
    gemm = {"strides", "paged"}
    for name, but in (("emulated", left_out), ("sdpa-math", {"hidden-nan"} | gemm)):
        assert not moved(
            r for r in report.rows if r.kernel == name and r.axis not in but
        ), name
    assert {r.tensor for r in report.rows} == {"out", "lse", "dq", "dk", "dv"}
    names = {r.variant for r in report.rows if r.axis == "tiles" and r.differ}
    assert {"block_kv=64", "splits=2"} <= names


def changes_something(variant: axes.Variant, base: AttentionCase) -> bool:
    """Whether a variant differs from its base, in a call or in how it is run."""
    runs_otherwise = variant.within is not variant.base_within
    if runs_otherwise or variant.options or variant.wrap:
        return True
    calls = [vars(call.case) for call in variant.calls]
    return any(unlike(call[name], x) for call in calls for name, x in vars(base).items())


def unlike(a: Any, b: Any) -> bool:
    """Whether two parts of a case differ, tensors also in their memory's order."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is not b and bool(a != b)
    return (a.shape, a.stride()) != (b.shape, b.stride()) or not torch.equal(a, b)


def test_every_axis_keeps_the_exact_answer():
    """Each variant of calls of many kinds, with gradients, in fp64; nothing is left out.
    None but those of `repeat` is the call itself, along which every kernel would keep its
    bits."""
    drawn = draw("normal", SHAPES, seed=0, label="", options={}, gradients=True)
    dO = torch.randn(SHAPES.out, generator=torch.Generator().manual_seed(1))
    base = dict(zip("qkv", drawn, strict=True), grad_out=dO, scale=0.3)
    plain = AttentionCase(ref=CaseRef(case="c"), **base)
    created = torch.rand(40, 40, generator=torch.Generator().manual_seed(0)) > 0.3
    created.fill_diagonal_(True)
    last = dataclasses.replace(
        plain, q=plain.q[:, :, -8:], grad_out=plain.grad_out[:, :, -8:], is_causal=True,
        causal_offset=32,
    )  # fmt: skip
    one = dataclasses.replace(
        plain, q=plain.q[:, :, :1], grad_out=plain.grad_out[:, :, :1]
    )
    cases = {
        "plain": plain, "causal": dataclasses.replace(plain, is_causal=True), "last": last,
        "window": dataclasses.replace(plain, is_causal=True, window=(9, 0)), "one": one,
        "mask": dataclasses.replace(plain, mask=created),
        "bias": dataclasses.replace(plain, mask=created.float().log()[None, None]),
        "soft": dataclasses.replace(plain, softcap=2.0, sinks=torch.ones(4)),
    }  # fmt: skip
    seen = set()
    for case in map(settled, cases.values()):
        for name, variants in axes.VARIANTS.items():
            for variant in (x for x in variants(case) if not x.reason):
                base_case = case if variant.base is None else variant.base
                same = not changes_something(variant, base_case)
                assert same == (name == "repeat"), (name, variant.name)
                exact = gradients(base_case)
                for call in variant.calls:
                    change = exact_change(call, exact, gradients(call.case))
                    assert change <= 1e-10, (name, variant.name)
                seen.add(name)
    assert seen == axes.VARIANTS.keys()


def test_an_axis_that_changes_the_answer_judges_nobody(tmp_path, monkeypatch):
    """It is said, and nothing is measured."""

    def wrong(case: Any) -> Any:
        yield axes.single_call_variant("doubled", dataclasses.replace(case, v=case.v * 2))

    monkeypatch.setitem(axes.VARIANTS, "repeat", wrong)
    report = studied(tmp_path, "sdpa-math", axes=["repeat"])
    assert not report.measured
    assert "the exact answer changes by 1" in report.unmeasured


def test_bits_are_compared_as_they_are():
    """-0 is not 0, NaN is NaN, and numbers of two dtypes go by their value."""
    a = torch.tensor([0.0, math.nan, 1.0, 2.0])
    b = torch.tensor([-0.0, math.nan, 1.0, 2.0000002])
    assert differs(a, b).tolist() == [True, False, False, True]
    assert not differs(a, a.double()).any()
    assert differs(a, b.double()).tolist() == [True, False, False, True]


def test_numbers_of_a_row(tmp_path):
    """A thousandth more in one row of one head: its place, its share, its size in floors
    and ulps; a row by itself sees what it saw."""
    (tmp_path / "one.py").write_text(
        "from numdev.kernels import find\n"
        "def kernel(case):\n"
        "    out = find('emulated').attend(case, preset='exact').out.float()\n"
        "    if case.q.shape[0] == 8:\n"
        "        out[1, 1, 5] *= 1.001\n"
        "    return out\n"
    )
    report = studied(
        tmp_path / "r", f"{tmp_path}/one.py:kernel", axes=["batch"], formats=["float32"]
    )
    row = next(r for r in report.rows if r.variant == "8 in place of 2")
    assert (row.elements, row.differ, row.first[:3], row.keys) == (8192, 32, (1, 1, 5), 6)
    assert 8e3 < row.ulps < 1.7e4  # 1e-3 of 2^23 to 2^24 ulps
    assert row.floor_ratio > 100
    assert [f.rule for f in report.findings] == ["batch rounding"]


RULES = {"name": "mine", "invariance": {"bitwise": ["decode"]}}


def test_the_gate_judges_a_report_by_other_rules(tmp_path, capsys, monkeypatch):
    """The default passes what a stricter file refuses; exit codes, JUnit and JSON say so,
    and a finished run is not measured again."""
    monkeypatch.chdir(tmp_path)
    request = {"cases": [CASE], "kernels": ["planted:decode_split"],
               "axes": ["repeat", "decode"]}  # fmt: skip
    Path("cases.yaml").write_text(yaml.safe_dump(request))
    Path("rules.yaml").write_text(yaml.safe_dump(RULES))
    code, out, err = ran(capsys, "invariance", "cases.yaml", "-o", "r", "--gate")
    assert code == 0, err
    journal = Path("r/rows.jsonl").read_text()
    assert ran(capsys, "invariance", "cases.yaml", "-o", "r")[0] == 0
    assert Path("r/rows.jsonl").read_text() == journal
    whole = read(Path("r"))
    Path("r/rows.jsonl").write_text("".join(journal.splitlines(keepends=True)[:4]))
    assert ran(capsys, "invariance", "cases.yaml", "-o", "r")[0] == 0
    assert read(Path("r")).rows == whole.rows  # causes too, though less was left to do
    assert ran(capsys, "gate", "r")[0] == 0
    gate = ("gate", "r", "--thresholds", "rules.yaml", "--junit", "j.xml")
    code, out, err = ran(capsys, *gate, "--json")
    data = json.loads(out)
    assert (code, data["outcome"], data["rules"]) == (1, "exceeded", "mine")
    assert [t["rule"] for t in data["tests"] if t["standing"] == "exceeded"] == [
        "decode bitwise"
    ]
    assert re.search(r"against 16 keys a tile", data["findings"][0]["details"])
    assert 'failures="1"' in Path("j.xml").read_text()
    report = read(Path("r"))
    assert isinstance(report, InvarianceReport)
    assert report.to_pandas()["axis"].nunique() == 2
    Path("rules.yaml").write_text("invariance: {bitwise: [batch]}")
    code, out, _ = ran(capsys, "gate", "r", "--thresholds", "rules.yaml")
    assert code == 3  # a rule on an axis that the report has not
    assert "batch is not judged:" in out
    Path("rules.yaml").write_text("invariance: {bitwise: [decoding]}")
    code, _, err = ran(capsys, "gate", "r", "--thresholds", "rules.yaml")
    assert code == 2
    assert "there is no axis 'decoding'; did you mean 'decode'?" in err


def test_two_reports_are_compared(tmp_path, capsys, monkeypatch):
    """Bits that were the same and are no longer are named, with the cause; the same say
    so."""
    monkeypatch.chdir(tmp_path)
    for name, kernel in (("a", "in_tiles_of_16"), ("b", "batch_split")):
        code = f"import planted as k\ndef mine(case): return k.{kernel}(case)\n"
        Path("changing.py").write_text(code)
        sys.modules.pop("changing", None)
        report = studied(
            tmp_path / name, f"{tmp_path}/changing.py:mine", axes=["batch", "order"]
        )
        write(report, tmp_path / name)
    code, out, _ = ran(capsys, "compare", "a", "b")
    assert code == 1
    assert "the same bits, now 0." in " ".join(out.split())
    assert "16 keys a tile in 4 splits" in " ".join(out.split())
    assert ran(capsys, "compare", "a", "a")[0] == 0


@pytest.mark.slow
def test_a_finding_has_a_script(tmp_path, capsys, monkeypatch):
    """It shows the finding by itself, along its axis alone, and ends with 1."""
    monkeypatch.chdir(tmp_path)
    request = {"cases": [CASE], "kernels": ["planted:cast_in_decode"],
               "axes": ["repeat", "decode"]}  # fmt: skip
    Path("cases.yaml").write_text(yaml.safe_dump(request))
    assert ran(capsys, "invariance", "cases.yaml", "-o", "r")[0] == 0
    (script,) = Path("r/reproducers").glob("*/reproduce.py")
    assert script.parent.name == read(Path("r")).findings[0].folder
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    done = subprocess.run([sys.executable, script], env={**os.environ, "PYTHONPATH": path},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith(read(Path("r")).findings[0].sentence)


def test_a_check_holds_a_function_to_axes(tmp_path):
    """The door for pytest: what keeps its bits passes, what does not names axis and
    cause."""
    how = {"cases": {**CASE, "name": "mine"}, "formats": "bfloat16", "backward": False,
           "claims": {"block_kv": 16}, "reproducers": tmp_path}  # fmt: skip
    assert check_attention(
        planted.in_tiles_of_16, invariant=["batch", "decode"], **how
    ).passed
    with pytest.raises(
        CheckFailed, match=r"depends\s+on\s+whether\s+a\s+row\s+is\s+decoded"
    ) as failed:
        check_attention(planted.cast_in_decode, invariant="decode", **how)
    assert failed.value.result.verdict == "FAIL"
    with pytest.raises(CheckFailed, match=r"the function takes no\s+mask") as failed:
        check_attention(
            planted.takes_no_mask, invariant=["mask"], **how | {"claims": None}
        )
    assert failed.value.result.verdict == "NOT JUDGED"


def unsteady(period, batch):
    """A kernel that errs in each `period`-th of its calls; of those of this `batch`, if
    that is not None."""
    calls = itertools.count(1)

    def attend(q, k, v, is_causal=False, scale=None):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=scale
        )
        errs = batch in (None, len(q)) and not next(calls) % period
        return out * (1 + torch.finfo(out.dtype).eps * errs)

    return attend


@pytest.mark.parametrize(
    ("period", "batch", "axes", "verdict"),
    [
        (2, None, ["batch"], "FAIL"),
        (2, None, ["batch", "chunks", "repeat"], "FAIL"),
        (3, 3, ["batch"], "NOT JUDGED"),  # in no run of the check
        (4, 3, ["batch", "neighbours", "repeat"], "FAIL"),
    ],
)
def test_axes_of_a_kernel_that_does_not_repeat_itself_are_not_judged(
    period, batch, axes, verdict
):
    """Neither those whose bits differ nor those whose bits are the same by luck: each is
    named."""
    case = {"name": "a", "heads": 2, "seq_len": 33, "head_dim": 16, "batch": 3}
    result = check(
        unsteady(period, batch),
        cases=case,
        formats="bfloat16",
        backward=False,
        invariant=axes,
    )
    assert result.verdict == verdict
    sentences = {re.sub(r" \(bfloat16\)", "", sentence) for sentence in result.untried}
    why = "is not judged: the kernel gives another answer to the same call."
    assert sentences == {f"attend: {axis} {why}" for axis in axes if axis != "repeat"}
    assert all(sentence in " ".join(str(result).split()) for sentence in result.untried)


@pytest.mark.parametrize("reasons", [None, ()])
def test_axes_that_do_not_pass_fail_a_check(reasons, tmp_path, monkeypatch):
    """Also where no test says so (None), or one that has no reason."""
    tests = () if reasons is None else (
        judgement.Test(rule="batch", kernel="k", standing=Standing.MISSING, reasons=reasons),
    )  # fmt: skip
    unsure = judgement.Judgement(rules="default", outcome=Outcome.NOT_JUDGED, tests=tests)
    monkeypatch.setattr(numdev.testing, "judgement_of", lambda *_: unsure)
    how = {"cases": {**CASE, "name": "mine"}, "formats": "bfloat16", "backward": False}
    result = numdev.check(
        planted.in_tiles_of_16, invariant="batch", claims={"block_kv": 16},
        reproducers=tmp_path, **how,
    )  # fmt: skip
    says = "the axes are NOT JUDGED" if reasons is None else "batch is not judged"
    assert result.verdict == "NOT JUDGED"
    assert result.untried == (f"{result.kernel}: {says}.",)


def test_an_fp8_cache_parts_at_the_first_length_with_two_tiles(tmp_path):
    """Where P has 8 bits, the running maximum under which each is rounded decides it: a
    decode step that walks 16 keys a tile from the last one parts from a prefill of 32
    keys a tile at 17 keys, the first length of which one form makes two tiles. The cause
    says the tiles and the order."""
    report = studied(tmp_path, "planted:fp8_cache", axes=["decode"])
    words = {str(r.cause) for r in report.rows if r.cause is not None and r.keys > 33}
    assert words == {
        "explained by tiling: 32 keys a tile in one split against 16 keys a tile, "
        "the last first, "
        "in one split"
    }
    q, k, v = draw("normal", SHAPES, seed=0, label="", options={})
    case = AttentionCase(ref=CaseRef(case="c"), q=q, k=k, v=v, scale=0.3, is_causal=True)
    case = case.rounded_to(format_named("bfloat16"))
    whole = planted.fp8_cache(case)
    parted = []
    for length in range(1, 25):
        one = part(case, row=range(length - 1, length), key=range(length))
        step = planted.fp8_cache(axes.without_positions(one))
        parted.append(bool(differs(whole[:, :, length - 1 : length], step).any()))
    assert parted.index(True) == 16


@pytest.mark.slow
def test_the_page_shows_what_the_command_prints(capsys, monkeypatch, tmp_path):
    """The example of docs/invariance.md is printed by its command, line by line, on any
    machine."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "118")
    page = (ROOT / "docs" / "invariance.md").read_text()
    line = re.search(
        r"^numdev (invariance configs/invariance/tiles.yaml.*)$", page, re.MULTILINE
    )[1]
    code, out, _ = ran(capsys, *line.split(), "--device", "cpu", "-o", tmp_path / "r")
    assert code == 0
    printed = [text.rstrip() for text in out.splitlines()]
    shown = re.search(r"```text\n(.*?)```", page, re.DOTALL)[1]
    for text in shown.splitlines():
        assert text in printed
    for axis in AXES:
        assert f"| `{axis}` |" in page, axis


@pytest.mark.gpu
def test_every_axis_runs_on_a_gpu(tmp_path):
    """Nothing fails, the exact answers agree, and a CUDA graph is an axis."""
    cases = [CASE, {**CASE, "name": "d", "seq_len": 1, "kv_len": 100, "causal": False}]
    kernels = ("sdpa-math", "sdpa-flash", "sdpa-efficient", "emulated")
    report = studied(tmp_path, *kernels, cases=cases, device="cuda", backward=True)
    assert not [r.reason for r in report.rows if r.status == "failed"]
    assert not [r.reason for r in report.rows if "exact answer" in (r.reason or "")]
    assert not report.findings
    graphs = studied(tmp_path / "g", *kernels, cases=cases, device="cuda", axes=["graph"])
    assert {r.status for r in graphs.rows} == {"ok"}


STORED = Path(__file__).parent / "data" / "reports" / "invariance.json"
MOVED = {
    "differ": 3, "first": (0, 1, 2, 0), "difference": 0.1, "floor_ratio": 2.0, "ulps": 1.5,
    "error_base": 1.1, "error_variant": 1.7, "excess": 1.0, "excess_of_a_row": 1.0,
}  # fmt: skip


def stored(*rows: InvarianceRow, **plan: Any) -> InvarianceReport:
    """The stored report, of these rows if there are any."""
    report = read(STORED)
    assert isinstance(report, InvarianceReport)
    changed = report.plan.model_copy(update=plan)
    return report.model_copy(update={"plan": changed, "rows": rows or report.rows})


def rows_along(axis: str, *changes: dict[str, Any], like: int = 0) -> list[InvarianceRow]:
    """Rows of sdpa-math's output along an axis, each with what it changes."""
    row = stored().rows[like].model_copy(update={"axis": axis})
    return [
        row.model_copy(update={"variant": f"v{i}", **x}) for i, x in enumerate(changes)
    ]


def that_was_tested(report: InvarianceReport, rule: str, **limits: Any) -> Any:
    """The test of sdpa-math by this rule."""
    book = Rules.model_validate({"invariance": limits} if limits else {})
    [test] = (
        t
        for t in verdict.tests(report, book)
        if (t.rule, t.kernel) == (rule, "sdpa-math")
    )
    return test


@pytest.mark.parametrize(("named", "excuse", "ran", "standing"), [
    (False, "kernel", False, "not applicable"), (True, "kernel", False, "missing"),
    (False, "memory", False, "missing"), (False, "kernel", True, "missing"),
])  # fmt: skip
def test_a_backend_that_is_lacking_here_and_that_nobody_named(
    named: bool, excuse: str, ran: bool, standing: str
) -> None:
    """It was given every call along an axis that was asked for, and declined them all.
    One that ran along another axis, or lacked memory, has to answer."""
    declined = {"status": "skipped", "excuse": excuse, "reason": "needs CUDA"}
    rows = rows_along("batch", declined, declined)
    rows += rows_along("padding", MOVED if ran else declined)
    report = stored(*rows, axes=("batch", "padding"), named=named, asked=True)
    assert that_was_tested(report, "batch").standing == standing
    lacking = report.models[0].model_copy(
        update={"difference": None, "explained": None, "reason": "needs CUDA"}
    )
    report = report.model_copy(update={"models": (lacking,)})
    of_model = [t for t in verdict.tests(report, Rules()) if t.kernel == "model"]
    assert bool(of_model) == (standing == "missing")


@pytest.mark.parametrize(("sizes", "standing", "observed"), [
    ((1.0, 4.0), "held", 4.0), ((1.0, 4.01, 9.0, 2.0), "exceeded", 9.0),
    ((0.5, None), "exceeded", "inf"),
])  # fmt: skip
def test_a_difference_on_both_sides_of_its_limit(
    sizes: tuple[float | None, ...], standing: str, observed: Any
) -> None:
    """4 times what roundings explain; the largest is shown, those beyond are counted, and
    a number that is not there is beyond every limit."""
    rows = rows_along("batch", *({**MOVED, "excess": x} for x in sizes))
    test = that_was_tested(stored(*rows), "batch rounding")
    assert (test.standing, test.observed, test.bound) == (standing, observed, 4.0)
    beyond = [x for x in sizes if x is None or x > 4]
    assert (test.judged, test.offending) == (len(sizes), len(beyond))


@pytest.mark.parametrize(("ratio", "difference", "standing"), [
    (1.0, 0.1, "held"), (1.01, 0.1, "exceeded"), (None, 0.0, "held"), (None, 0.1, "exceeded"),
])  # fmt: skip
def test_where_nothing_is_rounded_nothing_may_differ(
    ratio: float | None, difference: float, standing: str
) -> None:
    """A rule on the floor's error: once it at most, and nothing where it is 0."""
    rows = rows_along("batch", {**MOVED, "floor_ratio": ratio, "difference": difference})
    assert (
        that_was_tested(stored(*rows), "batch floor", within_floor=["batch"]).standing
        == standing
    )


@pytest.mark.parametrize(("excuse", "asked", "standing"), [
    ("kernel", True, "missing"), ("kernel", False, "not applicable"), ("", False, "missing"),
    ("memory", False, "missing"), ("option", False, "not applicable"),
])  # fmt: skip
def test_an_axis_without_a_number(excuse: str, asked: bool, standing: str) -> None:
    """It may be declined unless it was asked for; what failed or ran out of memory is
    missing."""
    status = "skipped" if excuse else "failed"
    rows = rows_along(
        "padding", {"status": status, "excuse": excuse, "reason": "x", "tensors": ()}
    )
    report = stored(*rows, asked=asked, axes=("padding",))
    test = that_was_tested(report, "padding")
    assert (test.standing, test.reasons) == (standing, ("padding is not judged: x",))


@pytest.mark.parametrize(("ratio", "standing"), [(4.0, "held"), (4.1, "exceeded")])
def test_a_models_output_on_both_sides_of_its_limit(ratio: float, standing: str) -> None:
    """Its difference over what roundings explain, and how much of its size it is."""
    report = stored()
    row = report.models[0].model_copy(
        update={
            "differ": 5,
            "difference": 0.25 * ratio,
            "explained": 0.25,
            "other_difference": 0.0,
        }
    )
    report = report.model_copy(update={"models": (row, *report.models[1:])})
    book = Rules.model_validate({"invariance": {"model_beyond_roundings": 4.0}})
    [test] = (t for t in verdict.tests(report, book) if t.rule == "batch with sdpa-math")
    assert (test.standing, test.observed) == (standing, pytest.approx(ratio))
    findings = judging.judged(report, book).findings
    of_model = [f for f in findings if f.kernel == "model"]
    assert len(of_model) == (standing == "exceeded")
    for finding in of_model:
        assert "batch: it changes by 4.1× what roundings explain" in finding.sentence
        assert finding.details.endswith("sequences in the batch, by 1 of its size.")


@pytest.mark.parametrize(("excess", "nonfinite", "follows"), [
    (20.0, 0, True), (20.5, 0, False), (9.0, 4, False),
])  # fmt: skip
def test_what_another_axis_brings_about(
    excess: float, nonfinite: int, follows: bool
) -> None:
    """Neighbours move the output by 10 times what roundings explain: along batch up to
    twice that has the same cause; more, or NaN where there was none, is a finding of its
    own."""
    rows = [
        *rows_along("neighbours", {**MOVED, "excess": 10.0}),
        *rows_along("batch", {**MOVED, "excess": excess, "nonfinite": min(nonfinite, 3)}),
    ]
    book = Rules.model_validate({"invariance": {"bitwise": ["repeat"]}})
    plan = {"axes": ("neighbours", "batch"), "named": False, "asked": False, "models": ()}
    report = stored(*rows, **plan)
    result = judging.judgement_of(report, book)
    axes_of = [
        f.rule.split()[0] for f in verdict.findings(result, report)[0] if f.rule != "runs"
    ]
    assert sorted(axes_of) == (["neighbours"] if follows else ["batch", "neighbours"])


def test_a_finding_tells_its_numbers_apart() -> None:
    """The call as it is, and its other form; number and limit; ulps of what must be
    equal."""
    [row] = rows_along("batch", {**MOVED, "excess": 6.0, "keys": 7, "case": "c"})
    report = stored(row, axes=("batch",), models=())
    book = Rules.model_validate({"invariance": {"bitwise": ["repeat"]}})
    result, _ = verdict.findings(judging.judgement_of(report, book), report)
    assert result[0].sentence == (
        "sdpa-math (bfloat16) fails along batch: the output changes by 6.00× what roundings "
        "explain (limit 4×)."
    )
    assert result[0].details == (
        "It depends on the number of sequences in the batch: c, v0. The call as it is "
        "errs by 1.1× the floor's error, the other form by 1.7×. First at sequence 0 "
        "head 1 row 2, which sees 7 keys. In all, bit-identical: none; NOT: batch."
    )
    book = Rules.model_validate({"invariance": {"bitwise": ["batch"]}})
    [same] = rows_along("batch", {**MOVED, "case": "c"})
    report = stored(same, axes=("batch",), models=())
    result, _ = verdict.findings(judging.judgement_of(report, book), report)
    assert result[0].sentence.endswith(
        "the output is not bit-identical: 3 of 65,536 elements differ, by up to 1.5 ulp."
    )


@pytest.mark.parametrize(("changes", "words"), [
    ({**MOVED, "nonfinite": 4, "repeats": True}, ("has more NaN or infinity than elements that")),
    ({**MOVED, "repeats": False}, ("says something else of its repeats than the rows along repeat")),
])  # fmt: skip
def test_a_row_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    """Of one kernel in one way; and a request with gradients is no plan without."""
    report = stored()
    check_consistency(report)
    row = report.rows[0].model_copy(update=changes)
    with pytest.raises(MeasurementError, match=words):
        check_consistency(report.model_copy(update={"rows": (row, *report.rows[1:])}))
    request = {**report.request, "backward": True}
    with pytest.raises(
        MeasurementError, match="the plan and the request differ in `backward`"
    ):
        check_consistency(report.model_copy(update={"request": request}))


def test_the_views_numbers_stand_in_their_columns() -> None:
    """The largest difference of an axis, in how many of its variants; shares in per cent;
    of the model its change, and what is left of that without attention."""
    rows = rows_along(
        "batch", {**MOVED, "floor_ratio": 2.0}, {**MOVED, "floor_ratio": 5.0}, {}
    )
    model = (
        stored()
        .models[0]
        .model_copy(
            update={
                "differ": 131072,
                "difference": 0.5,
                "other_difference": 0.3,
                "share": 0.64,
                "explained": 0.9,
            }
        )
    )
    report = stored(*rows).model_copy(update={"models": (model,)})
    tables = {node.title: node for node in blocks(report) if isinstance(node, Table)}
    [table] = [node for title, node in tables.items() if "bfloat16." in title]
    cell = table.rows[0].cells[2]
    assert (cell.text, cell.after) == ("5.00", "2/3")
    assert [c.text for c in tables["The model's own output, over its size"].rows[0].cells] == [
        "batch", "sdpa-math", "25 %", "0.5", "0.56", "0.3", "64 %"
    ]  # fmt: skip
    differences = tables["What differs"]
    titles = [column.title for column in differences.columns]
    # 3 of 65,536
    assert differences.rows[0].cells[titles.index("differ")].text == "0.00458 %"


def test_two_forms_in_numbers() -> None:
    """By hand, over two elements that are finite of three: their difference, which form
    errs how much beside the floor; over the error of the better form; in ulps of the
    larger value."""
    one, other, truth = (torch.tensor([x], dtype=torch.float64)[None, None] for x in (
        [1.0, 4.0, math.nan], [1.25, 3.0, math.nan], [1.002, 3.0, math.nan]
    ))  # fmt: skip
    a, b = one.bfloat16(), other.bfloat16()
    unit, counted = torch.zeros_like(truth), torch.ones(1, 1, 1, dtype=torch.bool)
    fmt = format_named("bfloat16")
    unlike = differs(a, b)
    rows = _row_sums(a, b, truth, unit, unlike, counted, fmt)
    fields = _numbers_of_rows({**rows, **_error_of_other_keys(rows, "out")})
    assert (fields["elements"], fields["differ"], fields["nonfinite"]) == (3, 2, 0)
    floor = math.sqrt(0.002**2 / 2)
    rms = {"difference": math.sqrt((0.25**2 + 1) / 2), "error_base": math.sqrt((0.002**2 + 1) / 2),
           "error_variant": math.sqrt(0.248**2 / 2)}  # fmt: skip
    assert fields["difference"] == pytest.approx(rms["difference"])
    assert fields["floor_ratio"] == pytest.approx(rms["difference"] / floor)
    assert fields["error_base"] == pytest.approx(rms["error_base"] / floor)
    assert fields["error_variant"] == pytest.approx(rms["error_variant"] / floor)
    assert fields["excess"] == pytest.approx(rms["difference"] / rms["error_variant"])
    assert fields["ulps"] == 1 / 2**-5  # of 4: 2^2 * 2^-7


def test_what_roundings_explain_without_an_error() -> None:
    """Half a unit in each of n like terms, √n of one: of 40 keys for the output, of 8
    query rows for dv; and of the scores |scale| max|q| max|k| 2^-24."""
    q, k, v = draw("normal", SHAPES, seed=0, label="", options={})
    dO = torch.randn(2, 4, 8, 16, generator=torch.Generator().manual_seed(1))
    case = AttentionCase(
        ref=CaseRef(case="c"), q=q[:, :, :8], k=k, v=v, scale=0.3, grad_out=dO
    )
    exact, fmt = gradients(case), format_named("bfloat16")
    norms = [x.double().norm(dim=-1).amax(dim=-1) for x in (case.q, case.k)]
    score = 0.3 * 2.0**-24 * norms[0] * norms[1].repeat_interleave(2, dim=1)
    of_group = score.unflatten(1, (2, 2)).amax(2)
    for tensor, count, of_heads in (("out", 40, score), ("dv", 8, of_group)):
        share = of_heads[..., None, None] + 2.0**-9 / math.sqrt(count)
        expected = share * getattr(exact, TERMS[tensor])
        assert torch.allclose(
            explained_by_rounding(tensor, case, exact, fmt), expected, rtol=1e-12
        )


def test_the_first_row_that_differs_is_told_where_it_stands_in_the_call(
    tmp_path: Path,
) -> None:
    """Of several parts the first row of all, and its head and sequence in the whole; a
    causal row sees itself and those before."""
    report = studied(tmp_path, "planted:cast_in_decode", axes=["decode"])
    rows = [r for r in report.rows if r.tensor == "out" and r.first is not None]
    assert rows
    assert all(r.keys == r.first[2] + 1 for r in rows)
    by_itself = {int(re.findall(r"row (\d+) by", r.variant)[0]): r for r in rows
                 if r.variant.endswith("by itself")}  # fmt: skip
    assert by_itself
    assert all(r.first[2] == at for at, r in by_itself.items())
    (tmp_path / "chunked.py").write_text(
        "from numdev.kernels import find\n"
        "def kernel(case):\n"
        "    out = find('emulated').attend(case, preset='exact').out\n"
        "    return out if case.q.shape[2] == 64 else 2 * out\n"
    )
    report = studied(tmp_path / "c", f"{tmp_path}/chunked.py:kernel", axes=["chunks"])
    firsts = {r.variant: (r.first, r.keys) for r in report.rows if r.tensor == "out"}
    assert firsts == dict.fromkeys(("chunks of 24", "chunks of 32"), ((0, 0, 0, 0), 1))


def test_a_part_that_begins_later_is_counted_from_the_whole() -> None:
    """A call of sequence 1, heads 2 and 3: what differs there first is told by the call's
    own numbers; a row of a mask of its own sees the keys that it shows."""
    drawn = dict(
        zip("qkv", draw("normal", SHAPES, seed=0, label="", options={}), strict=True)
    )
    case = AttentionCase(ref=CaseRef(case="c"), **drawn, scale=0.3, is_causal=True)
    part = SimpleNamespace(batch=slice(1, 2), head=slice(2, 4), row=slice(8, 12),
                            kv_head=slice(1, 2), key=slice(4, 9))  # fmt: skip
    unlike = torch.zeros(1, 2, 4, 16, dtype=torch.bool)
    unlike[0, 1, 2, 5] = unlike[0, 0, 3, 1] = True
    call: Any = SimpleNamespace(in_base=part)
    assert _first_difference(call, "out", unlike) == (1, 3, 10, 5)
    assert _first_difference(call, "dk", unlike[:, 1:]) == (1, 1, 6, 5)
    assert [count_keys_seen(case, (0, 1, row, 0)) for row in (0, 10, 39)] == [1, 11, 40]


def test_every_axis_that_may_be_asked_for_has_variants() -> None:
    assert AXES.keys() == VARIANTS.keys()


def test_a_row_that_sees_no_key_is_compared_with_nothing(tmp_path: Path) -> None:
    """Alone it is no call to judge: its rows say why, and the report is consistent. The
    other rows of the same call are compared."""
    case = {**CASE, "seq_len": 24, "kv_len": 16, "causal_offset": -18}
    report = studied(tmp_path, "sdpa-math", cases=(case,), axes=("rows",))
    reasons = {row.variant: row.reason for row in report.rows}
    assert reasons["row 9 alone"] == "no row that it compares sees a key"
    assert reasons["row 23 alone"] is None
    assert all(row.elements for row in report.rows if row.status == "ok")
    check_consistency(report)
