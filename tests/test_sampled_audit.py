"""Audits of sampled rows: the numbers are those of these rows, and what is said of them
is true."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from gate_rows import judge
from on_bench import THIS_CPU, grouped_step, invoked, prepare, rows_on, task_of
from recipes import drawn

from numdev.cases import AttentionCase
from numdev.kernels import Kernel, Output, find
from numdev.kernels.reference import gradients
from numdev.metrics.metrics_by_name import BESIDE_REFERENCE, WHOLE, value_of
from numdev.metrics.row_samples import Sample
from numdev.report import read
from numdev.report.summary import summarise
from numdev.studies.audit import attention, row_screening
from numdev.studies.audit import prepared_attention as prepared
from numdev.studies.audit.case_measurement import measure_task
from numdev.studies.audit.explanations import examine
from numdev.studies.audit.prepared_attention import Bench
from numdev.system import System

SAMPLE = Sample(count=40, seed=1)
DRAWN = SAMPLE.draw(200, "queries").tolist()
FA2: Any = lambda case, output, system: {"preset": "fa2"}  # noqa: E731
SHAPE = "batch: 2, heads: 4, kv_heads: 2, seq_len: 200, head_dim: 16, causal: true"
CONFIG = f"cases: [{{name: one, {SHAPE}}}]"


def bench_of(sample: Sample = SAMPLE, **options: Any) -> Bench:
    return prepare(
        grouped_step(200, is_causal=True), "bfloat16", sample=sample, **options
    )


def spoiling(place: Any, by: Any, name: str = "spoiled", tensor: str = "out") -> Kernel:
    """PyTorch's flash, and said to be, with a part of the output, or a gradient, set to
    by."""
    flash = find("sdpa-flash")

    def run(case: AttentionCase) -> Output:
        done = flash.attend(case) if tensor == "out" else flash.gradients(case)
        getattr(done, tensor)[place] = by
        return done

    of: Any = (
        {"backward": None}
        if tensor == "out"
        else {"function": flash.attend, "backward": run}
    )
    return Kernel(**{"name": name, "function": run, "claims": flash.claims, **of})


def test_gradients_are_measured_in_the_sampled_queries_and_keys() -> None:
    """dq in query rows, dk and dv in key rows of the whole call's gradients, of query
    heads 2 and 3 alone. Averages of dk and dv are not predicted, and the rows say why;
    single keys are."""
    kernel, bench = find("sdpa-flash"), bench_of(heads=[2], gradients=True)
    measured: Any = measure_task(
        task_of(bench, kernel, sample=SAMPLE), kernel, bench, THIS_CPU
    )
    rows, select = (
        {(r.tensor, r.head): r for r in measured.rows},
        measured.bench.selection,
    )
    by_query = {(t, h) for t in ("out", "lse", "dq") for h in (2, 3)}
    assert set(rows) == by_query | {("dk", 1), ("dv", 1)}
    output, exact = kernel.gradients(bench.case), gradients(bench.case)
    for (tensor, head), row in rows.items():
        error = (getattr(output, tensor).double() - getattr(exact, tensor))[:, head]
        error = error[:, select.row_indices(tensor)].abs()
        assert math.isclose(row.max_abs or 0, float(error.max()), rel_tol=1e-7)
        assert (row.sampled, row.nonfinite, row.rows_measured) == (True, 0, 40)
        if tensor in ("dk", "dv"):
            assert [row.expected_ratio, row.baseline_ratio, row.worst_row < 2] == [
                None,
                None,
                True,
            ]
            assert "single keys" in row.nulls["expected_ratio"]
        elif tensor != "lse":
            assert 0.95 < (row.expected_ratio or 0) < 1.05
    assert not torch.equal(select.keys, bench.selection.queries)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.one_in(3)
def test_a_rare_fault_stands_out_among_all_rows(seed: int, monkeypatch: Any) -> None:
    """Of 64 of 2048 rows and the 32 most suspicious, sound kernels pass. Faults of rows
    that were not drawn fail: every 512th row is 0, one of one head is 0 or lacks a key,
    an element is NaN."""
    # Names take seconds
    monkeypatch.setattr(attention, "name_mistakes", lambda *passed: None)
    monkeypatch.setattr(prepared, "suspect", lambda *passed: {})
    case = drawn(2048, head_dim=16, dtype=torch.float32, is_causal=True, seed=seed)
    bench = prepare(case, "bfloat16", sample=Sample(count=64, seed=seed))
    at = next(i for i in range(300, 512) if i not in bench.selection.queries)  # type: ignore
    q, k, v = (x[0, 1].double() for x in (bench.case.q, bench.case.k, bench.case.v))
    row, weights = (0, 1, at), (k[: at + 1] @ q[at] * case.scale).exp()
    weights[weights.argmax()] = 0
    for kernel, code in (
        (find("sdpa-flash"), 0),
        (
            Kernel(
                name="fa2", function=find("emulated").attend, backward=None, claims=FA2
            ),
            0,
        ),
        (find("sdpa-math"), 0),
        (
            Kernel(
                name="off",
                function=lambda case: find("sdpa-math").attend(case).out * 1.03,
            ),
            1,
        ),
        (spoiling((..., slice(at, None, 512), slice(None)), 0.0, "every 512th"), 1),
        (spoiling(row, 0.0, "one row"), 1),
        (spoiling(row, (weights @ v[: at + 1] / weights.sum()).bfloat16(), "one key"), 1),
        (spoiling((*row, 3), math.nan, "NaN"), 1),
    ):
        rows = rows_on(bench, kernel, repeats=2)
        assert judge(rows).exit_code == code, kernel.name
        assert [r.nonfinite for r in rows[:2]] == [0, kernel.name == "NaN"]
        assert {(r.rows_measured, r.suspects, r.reason) for r in rows} == {(64, 32, None)}


@pytest.mark.parametrize("part", [0.01, 0.9])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite_come_first(part: float, value: float) -> None:
    """Their suspicion is infinite, be they few of a head's rows or most."""
    bench = bench_of()
    output = find("sdpa-flash").attend(bench.case)
    beside = row_screening.second(bench, output)
    rows = range(int(part * bench.case.q_len))
    output.out[0, 1, rows, 2] = value
    suspicions = row_screening.suspicion(bench, output, beside, ("out",))
    assert suspicions.isinf().nonzero().flatten().tolist() == [*rows]
    assert not suspicions.isnan().any()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.one_in(2)
def test_a_key_whose_gradient_is_zero_stands_out_among_all(
    seed: int, monkeypatch: Any
) -> None:
    """As rows do: one key of dk or of dv that is 0, or every 512th, fails; sound kernels
    pass."""
    monkeypatch.setattr(attention, "name_mistakes", lambda *passed: None)
    case = drawn(2048, head_dim=16, dtype=torch.float32, is_causal=True, seed=seed)
    bench = prepare(case, "bfloat16", sample=Sample(count=64, seed=seed), gradients=True)
    at = next(i for i in range(300, 512) if i not in bench.selection.keys)  # type: ignore
    places: Any = ((0, 1, at), (..., slice(at, None, 512), slice(None)))
    fa2: Any = vars(find("emulated")) | {"name": "fa2", "claims": FA2}
    sound = (find("sdpa-flash"), Kernel(**fa2))
    for kernel in (
        *sound,
        *(spoiling(at, 0.0, t, t) for t in ("dk", "dv") for at in places),
    ):
        assert judge(rows_on(bench, kernel, repeats=2)).exit_code == (kernel not in sound)


def test_rows_that_could_not_be_screened_say_so(monkeypatch: Any) -> None:
    """The sample alone is measured then; the reason is in every row, and in the
    answer."""
    monkeypatch.setattr(row_screening, "second", lambda *passed: 1 + "")  # type: ignore
    rows = rows_on(bench_of(), find("sdpa-flash"))
    why = (
        "rows were not screened: TypeError: unsupported operand type(s) for +: "
        "'int' and 'str'"
    )
    result = {(r.status, r.rows_measured, r.suspects, r.reason) for r in rows}
    assert result == {("ok", 40, None, why)}
    assert summarise(rows).kernels[0].reasons == (why,)


def test_an_audit_of_rows(tmp_path: Path) -> None:
    """The request has the number, every row says so, the terminal marks maxima as lower
    bounds, and the gate passes; the same request continues, and another number is another
    request."""
    (tmp_path / "a.yaml").write_text(CONFIG)
    common = ("audit", tmp_path / "a.yaml", "--device", "cpu", "--kernel", "sdpa-flash")
    arguments = (*common, "--backward", "--output", tmp_path / "out")
    first = invoked(*arguments, "--rows", "50")
    assert first.exit_code == 0, first.output
    assert "≥" in first.stdout
    assert "50 random query rows per head" in " ".join(first.stdout.split())
    result = read(tmp_path / "out")
    assert (
        "50 random query rows per head" in (tmp_path / "out" / "report.html").read_text()
    )
    assert result.request["rows"] == 50
    assert all(row.rows_measured == 50 for row in result.rows if row.status == "ok")
    assert invoked("gate", tmp_path / "out").exit_code == 0
    journal = (tmp_path / "out" / "rows.jsonl").read_bytes()
    assert "finished before" in invoked(*arguments, "--rows", "50").stderr
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == journal
    assert "rows was 50, now 51" in str(invoked(*arguments, "--rows", "51").exception)


@pytest.mark.slow
def test_a_finding_of_a_sample_is_reproduced(tmp_path: Path, monkeypatch: Any) -> None:
    """A kernel wrong in its last rows gets scripts whose limits are of the figures they
    print."""
    (tmp_path / "a.yaml").write_text(CONFIG)
    (tmp_path / "late_kernel.py").write_text(
        "from torch.nn.functional import scaled_dot_product_attention as attend\n"
        "def late(q, k, v, is_causal=False):\n"
        "    out = attend(q, k, v, is_causal=is_causal).clone()\n"
        "    out[:, :, -60:] *= 1.5\n"
        "    return out\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    how = ("--kernel", "late_kernel:late", "--rows", "50", "--device", "cpu")
    result = invoked("audit", tmp_path / "a.yaml", *how, "-o", tmp_path / "out")
    assert "Reproducer:" in result.stderr
    scripts = [
        p.read_text() for p in (tmp_path / "out").glob("reproducers/*/reproduce.py")
    ]
    assert any("def term_scale" in script for script in scripts), "one is about the error"
    for script in scripts:
        numbers = dict(re.findall(r"^(REPORTED|LIMIT) = (\S+)", script, re.MULTILINE))
        assert 0 < float(numbers["LIMIT"]) < abs(float(numbers["REPORTED"]))


@pytest.mark.gpu
def test_a_long_call_fits() -> None:
    """131072 tokens, whose scores in bf16 alone are 137 GB for 4 heads: 256 rows of each
    are measured in under 40 GB, the baseline among them, and flash is where its claim
    says."""
    case = drawn(131072, heads=4, dtype=torch.float32, is_causal=True, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    bench = prepare(case, "bfloat16", sample=Sample(count=256))
    rows = rows_on(bench, find("sdpa-flash"), System.probe("cuda"))
    assert torch.cuda.max_memory_allocated() < 40e9
    assert {r.status for r in rows} == {"ok"}
    assert all(r.baseline_ratio and 0.9 < (r.expected_ratio or 0) < 1.1 for r in rows[:4])


@pytest.mark.slow
def test_the_worst_rows_are_named_by_their_place_in_the_call() -> None:
    """A row that is spoiled is named by its position, of so many, whether it was drawn or
    not."""
    outside = next(i for i in range(100, 200) if i not in DRAWN)
    for row_index, head in ((DRAWN[25], 3), (outside, 1)):
        kernel, bench = spoiling((1, head, row_index, 0), 9.0), bench_of()
        task = task_of(bench, kernel, sample=SAMPLE)
        measured = measure_task(task, kernel, bench, THIS_CPU)
        first = examine(task, kernel, measured, bench, THIS_CPU)[0]
        assert (first.row, first.rows, first.head, first.batch) == (
            row_index,
            200,
            head,
            1,
        )
        assert first.sees == row_index + 1
        assert f"row {row_index} (of 200" in first.sentence


def test_what_sampled_rows_give_exactly_is_exact() -> None:
    """`WHOLE` says so of a metric: it equals that of all rows. What is about the sample
    itself is left out."""
    of_sample = {"elements", "sequences", "rows_measured", "suspects", "empty_rows"}
    case, kernel = grouped_step(200, is_causal=True), find("sdpa-flash")
    every, sampled = (
        rows_on(prepare(case, "bfloat16", gradients=True, **rows), kernel, repeats=2)
        for rows in ({}, {"sample": SAMPLE})
    )
    whole = {(row.tensor, row.head): row for row in every}
    metrics = WHOLE - BESIDE_REFERENCE - of_sample
    assert metrics
    for row in sampled:
        for metric in metrics:
            exact = value_of(whole[row.tensor, row.head], metric)[0]
            assert value_of(row, metric)[0] == exact, (row.tensor, metric)
