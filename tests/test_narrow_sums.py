"""A gradient that is summed in 16 bits from tile to tile is told by the errors that such
a sum makes; one that is not has none of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from loaded import ROOT, load
from planted import CATALOGUE

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError
from numdev.gate.judging import judge_report
from numdev.kernels.output import differentiate
from numdev.kernels.reference import gradients
from numdev.metrics import narrow_sum_search_scope
from numdev.operations.attention.explain.narrow_sums import CERTAIN, Sums
from numdev.report import AuditReport
from numdev.sources.upstream_gradients import with_drawn_gradient
from numdev.studies.audit.finding_reproducers import reproduce
from numdev.testing import check

rates = load("benchmarks/suspicion_rates.py")
LONG = {
    "name": "long", "heads": 3, "kv_heads": 1, "seq_len": 256, "head_dim": 32,
    "causal": True,
}  # fmt: skip


def drawn(fmt: str = "bfloat16") -> AttentionCase:
    shape = rates.Shape(batch=1, heads=2, kv_heads=2, q_len=224, kv_len=224)
    return with_drawn_gradient(rates.make(shape, "normal", fmt, 0), 0)


def shares(case: AttentionCase, function: Any, tensor: str) -> list[float]:
    """Of a function of q, k and v, as a kernel that the case's own exact gradients are
    the rounding model of."""
    step = differentiate(lambda c: function(c.q, c.k, c.v), case)
    exact = gradients(case)
    sums = Sums.of(case, tensor, step.out, exact.lse)
    x = getattr(step, tensor)
    return sums.narrow(x, getattr(exact, tensor).to(x.dtype))


@pytest.mark.parametrize("fmt", ["bfloat16", "float16"])
@pytest.mark.parametrize("tile", narrow_sum_search_scope.TILES)
def test_a_narrow_sum_is_seen_in_its_tiles_and_order(fmt: str, tile: int) -> None:
    """Of kernels that are written without what they are measured with."""
    for order in ("", "-last-first"):
        dq = CATALOGUE[f"narrow-dq-{tile}{order}"].function
        assert min(shares(drawn(fmt), dq, "dq")) > 0.5
        assert max(shares(drawn(fmt), dq, "dk")) < 0.05
        others = CATALOGUE[f"narrow-dk-dv-{tile}{order}"].function
        assert min(shares(drawn(fmt), others, "dk")) > 0.5
        assert min(shares(drawn(fmt), others, "dv")) > 0.5
        assert max(shares(drawn(fmt), others, "dq")) < 0.05


@pytest.mark.parametrize(
    "design", ["flashattention-2", "mlx", "tritons-tutorial-of-2023"]
)
def test_sound_designs_have_none_of_it(design: str) -> None:
    for tensor in ("dq", "dk", "dv"):
        assert max(shares(drawn(), CATALOGUE[design].function, tensor)) < 0.05


def test_a_share_is_what_was_put_in_less_its_uncertainty() -> None:
    """Half of the errors beside independent noise: half, less six standard deviations,
    which are the noise's over the root of the number of elements."""
    draw = torch.Generator().manual_seed(0)
    d = torch.randn(1, 1, 1, 400, 100, generator=draw)
    noise = torch.randn(1, 1, 400, 100, generator=draw)
    sums = Sums(s=torch.zeros(1, 1, 400, 100), d=d)
    share = float(sums.shares(0.5 * d[0] + noise)[1])
    assert share == pytest.approx(0.5 - CERTAIN * 1.25**0.5 / 200, abs=0.02)
    assert float(sums.shares(noise)[1]) < 0
    nothing = Sums(s=sums.s, d=torch.zeros_like(d))
    assert nothing.narrow(noise, noise) == [0.0]


def test_what_the_rounding_model_has_too_is_no_fault() -> None:
    """A way that sums in 16 bits is held to itself."""
    draw = torch.Generator().manual_seed(0)
    d = torch.randn(1, 1, 1, 400, 100, generator=draw)
    sums = Sums(s=torch.zeros(1, 1, 400, 100), d=d)
    assert sums.narrow(d[0], torch.zeros_like(d[0]))[0] > 0.9
    assert sums.narrow(d[0], d[0]) == [0.0]


@pytest.fixture(scope="module")
def report() -> AuditReport:
    """Of a kernel that sums dq in bfloat16 over tiles of 128 keys: its error is hardly
    larger for it."""
    return check(
        CATALOGUE["narrow-dq-128"].function, cases=LONG, formats="bfloat16"
    ).report


def test_the_default_rules_catch_it(report: AuditReport) -> None:
    """By that rule alone, and with its name."""
    (finding,) = [f for f in report.findings if f.severity == "exceeded"]
    assert (finding.rule, finding.tensor, finding.limit) == ("narrow sum", "dq", 0.6)
    assert (finding.observed or 0) > 0.6
    assert finding.cause == "dQ is summed in bfloat16 over tiles of 128 keys"
    assert "sums dq from tile to tile in 16 bits: share 0." in finding.sentence
    middle = [r.expected_ratio for r in report.rows if r.tensor == "dq"]
    assert max(x for x in middle if x is not None) < 1.05
    judge_report(report)


@pytest.mark.slow
def test_a_check_writes_a_script_that_shows_it(tmp_path: Path) -> None:
    """On a smaller call, and not for a sound function in its place."""
    function = CATALOGUE["narrow-dq-128"].function
    result = check(function, cases=LONG, formats="bfloat16", reproducers=tmp_path)
    assert result.reproducer is not None, result.notes
    script = result.reproducer.read_text()
    assert 'TENSOR, HEAD = "dq", 0' in script
    sound = result.reproducer.with_name("sound.py")
    other = "torch.nn.functional.scaled_dot_product_attention(q,"
    sound.write_text(script.replace("= narrow_dq_128(q,", f"= {other}"))
    path = os.pathsep.join(str(ROOT / name) for name in (".", "benchmarks", "tests"))
    for file, code in ((result.reproducer, 1), (sound, 0)):
        ran = subprocess.run(
            [sys.executable, file], capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert ran.returncode == code, ran.stdout + ran.stderr


def test_what_no_script_shows_is_said_before_a_call_is_made_small(
    report: AuditReport, tmp_path: Path
) -> None:
    """No call is drawn and no kernel runs for it."""
    (finding,) = [f for f in report.findings if f.severity == "exceeded"]
    unshown = finding.model_copy(update={"metric": "empty_nonfinite"})
    never: Any = Mock(side_effect=AssertionError)
    located: Any = SimpleNamespace(ref=finding.place, load=never)
    messages: list[str] = []
    plan: Any = SimpleNamespace(backward=True)
    source: Any = [located]
    assert not reproduce(
        [unshown], source, plan, never, tmp_path, messages.append, count=1
    )
    (message,) = messages
    assert "a script cannot show 'empty_nonfinite'; " in message


def test_a_report_without_the_number_contradicts_itself(report: AuditReport) -> None:
    """Whatever it gives as a reason; the head that it is looked for in is known."""
    data = json.loads(report.model_dump_json())
    for row in data["rows"]:
        if row["narrow_sum"] is not None and row["tensor"] == "dq":
            row["narrow_sum"] = None
            row["nulls"]["narrow_sum"] = narrow_sum_search_scope.ELSEWHERE
    with pytest.raises(MeasurementError, match="lacks the narrow_sum of dq head 0"):
        judge_report(AuditReport.model_validate(data))


def test_another_number_does_not_follow(report: AuditReport) -> None:
    data = json.loads(report.model_dump_json())
    for row in data["rows"]:
        row["narrow_sum"] = row["narrow_sum"] and 0.0
    with pytest.raises(MeasurementError, match="does not follow from its rows"):
        judge_report(AuditReport.model_validate(data))


@pytest.mark.parametrize(
    ("tensor", "fmt", "q_len", "kv_len", "why"),
    [
        ("dq", "bfloat16", 32, 192, None),
        ("dq", "bfloat16", 31, 192, "fewer than 32 queries tell of nothing"),
        ("dq", "float16", 192, 191, "fewer than 192 keys are hardly more than one tile"),
        ("dk", "float16", 192, 32, None),
        (
            "dv",
            "float16",
            191,
            192,
            "fewer than 192 queries are hardly more than one tile",
        ),
        ("dv", "float32", 192, 192, "a sum in float32 is not looked for"),
    ],
)
def test_in_which_calls_it_is_looked_for(
    tensor: str, fmt: str, q_len: int, kv_len: int, why: str | None
) -> None:
    assert narrow_sum_search_scope.why_not_looked_for(tensor, fmt, q_len, kv_len) == why


def test_heads_take_turns() -> None:
    assert [
        narrow_sum_search_scope.chosen_head(layer, 0, 3) for layer in (None, 0, 1, 2, 3)
    ] == [
        0,
        0,
        1,
        2,
        0,
    ]
    assert narrow_sum_search_scope.chosen_head(1, 1, 3) == 2
