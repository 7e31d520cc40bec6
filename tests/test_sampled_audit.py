"""Audits of sampled rows: the numbers are those of these rows, and what is said of them is true."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from gate_rows import judge
from on_bench import HERE, grouped_step, invoked, prepare, rows_on, task_of
from recipes import drawn

from numdev.audit.bench import Bench
from numdev.audit.explanations import examine
from numdev.audit.task import measure_task
from numdev.cases import AttentionCase
from numdev.kernels import Kernel, Output, find
from numdev.kernels.reference import gradients
from numdev.metrics.sampling import Sample
from numdev.report import AuditReport, read
from numdev.system import System

SAMPLE = Sample(count=40, seed=1)
DRAWN = SAMPLE.queries(200).tolist()
CONFIG = """
cases:
  - {name: one, batch: 2, heads: 4, kv_heads: 2, seq_len: 200, head_dim: 16, causal: true}
"""


def bench_of(sample: Sample = SAMPLE, **options: Any) -> Bench:
    return prepare(grouped_step(200, is_causal=True), "bfloat16", sample=sample, **options)


def spoiling(place: tuple[int, int, int], by: float) -> Kernel:
    """PyTorch's flash with one element of the output set to something."""

    def run(case: AttentionCase) -> Output:
        out = find("sdpa-flash").attend(case).out.clone()
        out[(*place, 0)] = by
        return Output(out=out)

    return Kernel(name="spoiled", function=run, backward=None)


def test_gradients_are_measured_in_the_sampled_queries_and_keys() -> None:
    """dq in query rows, dk and dv in key rows of the whole call's gradients, of query heads 2 and 3
    alone. dk and dv are not predicted, and the rows say why."""
    kernel, bench = find("sdpa-flash"), bench_of(heads=[2], gradients=True)
    rows = {(r.tensor, r.head): r for r in rows_on(bench, kernel)}
    by_query = {(t, h) for t in ("out", "lse", "dq") for h in (2, 3)}
    assert set(rows) == by_query | {("dk", 1), ("dv", 1)}
    output, exact = kernel.gradients(bench.case), gradients(bench.case)
    for (tensor, head), row in rows.items():
        at = bench.selection.row_indices(tensor)
        assert at is not None
        x, r = getattr(output, tensor), getattr(exact, tensor)
        error = (x.double() - r)[:, head, at]
        assert math.isclose(row.max_abs or 0, float(error.abs().max()), rel_tol=1e-7)
        assert row.sampled
        assert row.nonfinite == 0
        if tensor in ("dk", "dv"):
            assert row.expected_ratio is row.worst_row is row.baseline_ratio is None
            assert "single keys" in row.nulls["expected_ratio"]
        elif tensor != "lse":
            assert 0.95 < (row.expected_ratio or 0) < 1.05
    assert bench.selection.keys is not None
    assert not torch.equal(bench.selection.keys, bench.selection.queries)  # type: ignore[arg-type]


def test_one_bad_element_anywhere_is_counted() -> None:
    """NaN in a row that was not drawn is found; the other heads have none."""
    for row_index in (DRAWN[0], next(i for i in range(200) if i not in DRAWN)):
        rows = rows_on(bench_of(), spoiling((1, 2, row_index), math.nan))
        assert [r.nonfinite for r in rows] == [0, 0, 1, 0]


def test_sound_kernels_pass_and_wrong_ones_do_not() -> None:
    """By the default rules, of 40 of 200 rows, forward and backward; and one that is 3 % off, or
    has a single bad row in the sample, is exceeded."""

    def off(case: AttentionCase) -> Output:
        return Output(out=find("sdpa-flash").attend(case).out * 1.03)

    for kernel, trained, code in (
        (find("sdpa-flash"), True, 0),
        (find("sdpa-math"), False, 0),
        (Kernel(name="off", function=off, backward=None), False, 1),
        (spoiling((0, 1, DRAWN[30]), 9.0), False, 1),
    ):
        rows = rows_on(bench_of(gradients=trained), kernel, repeats=2)
        assert judge(rows).exit_code == code, kernel.name


# --- from end to end -----------------------------------------------------------------------------


def test_an_audit_of_sampled_rows(tmp_path: Path) -> None:
    """The request has the number, every row says so, the terminal marks maxima as lower bounds, and
    the gate passes; the same request continues, and another number is another request."""
    (tmp_path / "a.yaml").write_text(CONFIG)
    common = ("audit", tmp_path / "a.yaml", "--device", "cpu", "--kernel", "sdpa-flash")
    arguments = (*common, "--backward", "--output", tmp_path / "out")
    first = invoked(*arguments, "--rows", "50")
    assert first.exit_code == 0, first.output
    assert "≥" in first.stdout
    assert "50 query rows of each head" in " ".join(first.stdout.split())
    found = read(tmp_path / "out")
    assert isinstance(found, AuditReport)
    assert "50 query rows of each head" in (tmp_path / "out" / "report.html").read_text()
    assert found.request["sampled_rows"] == 50
    assert all(row.rows_measured == 50 for row in found.rows if row.status == "ok")
    assert invoked("gate", tmp_path / "out").exit_code == 0
    journal = (tmp_path / "out" / "rows.jsonl").read_bytes()
    assert "finished before" in invoked(*arguments, "--rows", "50").stderr
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == journal
    assert "sampled_rows was 50, now 51" in str(invoked(*arguments, "--rows", "51").exception)


def test_a_finding_of_a_sample_is_reproduced(tmp_path: Path, monkeypatch: Any) -> None:
    """A kernel that is wrong in its last rows gets a finding, and scripts whose limits are those of
    the figures they print."""
    (tmp_path / "a.yaml").write_text(CONFIG)
    (tmp_path / "late_kernel.py").write_text(
        "import torch\n"
        "def late(q, k, v, is_causal=False):\n"
        "    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)\n"
        "    out = out.clone()\n"
        "    out[:, :, -60:] *= 1.5\n"
        "    return out\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = invoked(
        "audit", tmp_path / "a.yaml", "--kernel", "late_kernel:late", "--rows", "50",
        "--device", "cpu", "-o", tmp_path / "out",
    )  # fmt: skip
    assert "Reproducer:" in result.stderr
    scripts = [p.read_text() for p in (tmp_path / "out").glob("reproducers/*/reproduce.py")]
    assert any("def term_scale" in script for script in scripts), "one is about the error"
    for script in scripts:
        reported, limit = (
            float(re.search(rf"^{name} = (\S+)", script, re.MULTILINE)[1])  # type: ignore[index]
            for name in ("REPORTED", "LIMIT")
        )
        assert 0 < limit < abs(reported)


@pytest.mark.gpu
def test_a_long_call_fits() -> None:
    """131072 tokens, whose scores in bf16 alone are 137 GB for 4 heads: 256 rows of each are
    measured in under 40 GB, the baseline among them, and flash is where its claim says."""
    case = drawn(131072, heads=4, dtype=torch.float32, is_causal=True, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    bench = prepare(case, "bfloat16", sample=Sample(count=256))
    rows = rows_on(bench, find("sdpa-flash"), System.here("cuda"))
    assert torch.cuda.max_memory_allocated() < 40e9
    assert {r.status for r in rows} == {"ok"}
    for row in rows[:4]:
        assert row.baseline_ratio is not None
        assert 0.9 < (row.expected_ratio or 0) < 1.1


def test_the_worst_rows_are_named_by_their_place_in_the_call() -> None:
    """A sampled row that is spoiled is named by its position, of so many; one that was not drawn is
    not seen."""
    outside = next(i for i in range(100, 200) if i not in DRAWN)
    for row_index, head in ((DRAWN[25], 3), (outside, 1)):
        kernel, bench = spoiling((1, head, row_index), 9.0), bench_of()
        task = task_of(bench, kernel, sample=SAMPLE)
        measured = measure_task(task, kernel, bench, HERE)
        worst = examine(task, kernel, measured, bench, HERE)
        assert {w.row for w in worst} <= set(DRAWN)
        assert bool(worst) == (row_index in DRAWN)
        for first in worst[:1]:
            assert first.rows == 200
            assert (first.row, first.head, first.batch) == (row_index, head, 1)
            assert first.sees == row_index + 1
            assert f"row {row_index} (of 200" in first.sentence
