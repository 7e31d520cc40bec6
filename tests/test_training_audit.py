"""A training step audited: gradients, noise, planted faults, worst rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from gate_rows import planned
from on_bench import grouped_step, invoked, prepare, rows_on

from numdev.cases import AttentionCase
from numdev.gate.row_tests import run_tests
from numdev.gate.rules import default_rules
from numdev.kernels import Kernel, Output, find
from numdev.report import DeviationRow, read

CASES = """
backward: true
cases:
  - {name: one, batch: 2, heads: 4, kv_heads: 2, seq_len: 70, head_dim: 32, causal: true}
"""


def rows_of(kernel: Kernel, heads: Any = None, **changes: Any) -> list[DeviationRow]:
    bench = prepare(grouped_step(60, **changes), "bfloat16", heads, gradients=True)
    return rows_on(bench, kernel)


def unfinished(case: AttentionCase) -> Output:
    """Plain attention whose backward is yet to be written."""
    k, v = (x.repeat_interleave(case.group, dim=1) for x in (case.k, case.v))
    out = (case.q @ k.mT * 0.25).softmax(dim=-1) @ v
    if out.requires_grad:
        out.register_hook(Mock(side_effect=NotImplementedError("to be written")))
    return Output(out=out)


@pytest.mark.parametrize(("kernel", "status", "reason"), [
    (Kernel(name="a", function=unfinished, backward=None), "skipped", "no backward pass"),
    (Kernel(name="b", function=unfinished), "failed",
     "in a training step: NotImplementedError: to be written"),
])  # fmt: skip
def test_without_a_backward_its_output_is_measured(
    kernel: Any, status: str, reason: str
) -> None:
    """And it says in one row, and to the gate, why it has no gradient."""
    *measured, last = rows_of(kernel)
    assert [(r.tensor, r.head, r.status) for r in measured] == [
        ("out", h, "ok") for h in range(4)
    ]
    assert all((r.floor_ratio or 0) >= 0.9 for r in measured)
    assert (last.tensor, last.head, last.status, last.reason) == (
        "dq",
        None,
        status,
        reason,
    )
    forward, backward = run_tests([*measured, last], planned(measured), default_rules())
    assert (forward.tensor, forward.judged) == ("out", 1)
    name = {"ok": "judged", "skipped": "unjudged", "failed": "offending"}[status]
    assert (backward.tensor, getattr(backward, name)) == ("dq", 1)


def test_a_selection_of_heads_grows_to_its_groups() -> None:
    """dk and dv are sums over a group: head 1 alone measures heads 0 and 1, and their kv
    head's numbers are those of the whole case."""
    measured = (rows_of(find("sdpa-math"), heads) for heads in (None, (1,)))
    whole, part = ({(r.tensor, r.head): r.rms for r in rows} for rows in measured)
    assert {key for key in part if key[0] in ("out", "dk")} == {
        ("out", 0),
        ("out", 1),
        ("dk", 0),
    }
    assert all(
        whole[key] == pytest.approx(value, rel=1e-12) for key, value in part.items()
    )


def test_what_a_row_without_keys_returns_flows_back_nowhere() -> None:
    """It is a convention: its upstream gradient is 0, and the mean of V there is no fault
    in dv."""
    mask = torch.ones(60, 60, dtype=torch.bool)
    mask[7:20] = False
    bench = prepare(grouped_step(60, mask=mask), gradients=True)
    assert not bench.case.grad_out[:, :, 7:20].any()
    assert bench.case.grad_out[:, :, 20:].any()
    lowest = torch.zeros(60, 60).masked_fill(~mask, torch.finfo(torch.float32).min)
    rows = rows_of(find("sdpa-math"), mask=lowest)
    worst = max(r.expected_ratio for r in rows if r.expected_ratio is not None)
    assert worst == pytest.approx(1.0, abs=0.05)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "case.yaml"
    path.write_text(CASES)
    return path


def audited(config: Path, *arguments: str) -> Any:
    directory = config.parent / "out"
    done = invoked("audit", config, "--output", directory, "--overwrite", *arguments)
    assert done.exit_code == 0, done.output
    return read(directory)


def test_the_report_has_gradients(config: Path) -> None:
    """In the summary and on the page, beside the floor and what is predicted; drawn, and
    said."""
    result = audited(config, "--kernel", "sdpa-flash")
    kernel = next(k for k in result.summary.kernels if k.role == "kernel")
    assert [g.tensor for g in kernel.gradients] == ["dq", "dk", "dv"]
    assert all(
        g.expected_ratio_worst == pytest.approx(1, abs=0.1) for g in kernel.gradients
    )
    assert kernel.noise == 0
    assert result.cases[0].grad_out is not None
    assert result.summary.worst_rows == ()
    assert result.findings == ()
    page = (config.parent / "out" / "report.html").read_text()
    assert "dq" in page


def test_planted_faults_are_measured_and_caught(config: Path) -> None:
    """Every control in every dose beside the kernel; the findings say from which dose
    they would be caught; the kernel's own ranking is without them."""
    result = audited(config, "--kernel", "sdpa-math", "--control")
    doses = {(r.kernel, r.options["dose"]) for r in result.rows if r.role == "control"}
    assert ("control:scale", 0.03) in doses
    assert ("control:dq-unscaled", 1.0) in doses
    assert len(doses) > 20
    assert not any(k.kernel.startswith("control:") for k in result.summary.kernels)
    assert any("planted" in line and "scale" in line for line in result.tested)


def test_a_sweep_measures_gradients_too(config: Path) -> None:
    """`backward: true` in a sweep's YAML, and `--backward` on the command line."""
    text = CASES.replace("seq_len: 70", "seq_len: [33, 65]")
    path = config.parent / "sweep.yaml"
    for content, flags in (
        (text, ()),
        (text.replace("backward: true", ""), ("--backward",)),
    ):
        path.write_text("seeds: 1\nkernels: [sdpa-math]\n" + content)
        output = ("-o", config.parent / "s", "--overwrite")
        done = invoked("sweep", path, *output, "--json", *flags)
        assert done.exit_code == 0, done.output
        rows = json.loads(done.stdout)["rows"]
        assert {row["tensor"] for row in rows if row["status"] == "ok"} >= {
            "out",
            "dq",
            "dk",
            "dv",
        }
