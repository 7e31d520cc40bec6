"""`numdev kernels --check`: sound kernels pass every feature, wrong ones fail with their cause."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_bench import invoked

from numdev.cases import AttentionCase
from numdev.formats import round_to
from numdev.kernels import Kernel, Output, find
from numdev.kernels.reference import attend
from numdev.testing import CheckFailed, CheckResult, check_attention

SMALL = {"batch": 1, "heads": 2, "seq_len": 64, "head_dim": 64}


def exact(case: AttentionCase) -> Output:
    """The reference rounded once: right in everything."""
    return Output(out=round_to(attend(case).out, case.format).to(case.q.dtype))


def changed(**changes: object) -> Callable[[AttentionCase], Output]:
    return lambda case: exact(dataclasses.replace(case, **changes))


def checked(function: Callable[..., Any], **case: Any) -> CheckResult:
    kernel = Kernel(name="mine", function=function)
    try:
        return check_attention(kernel, cases={**SMALL, **case}, formats="bfloat16", backward=False)
    except CheckFailed as failed:
        return failed.result


@pytest.mark.slow
def test_a_sound_kernel_passes_every_feature() -> None:
    """PyTorch's kernel passes in all it does not refuse, gradients too; what it refuses is said."""
    done = invoked("kernels", "--check", "sdpa-flash", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["passed"]
    assert {r["tensor"] for r in found["report"]["rows"]} >= {"out", "lse", "dq", "dk", "dv"}
    assert any("soft cap" in words for words in found["skipped"])


@pytest.mark.parametrize(
    ("case", "wrong", "says"),
    [
        ({"causal": True}, changed(is_causal=False), "the causal mask is ignored"),
        ({"mask": "mostly_masked"}, changed(mask=None), "the mask is ignored"),
        ({"softcap": 2.0}, changed(softcap=None), "the soft cap is ignored"),
        ({"scale": 0.3}, changed(scale=0.125), "the scale is 1/sqrt(head_dim) instead of"),
        ({}, lambda case: Output(out=exact(case).out * 0), "the output is 0 everywhere"),
        ({}, lambda case: Output(out=exact(case).out * 1.5), "1.500 times too large"),
        ({}, lambda case: Output(out=exact(case).out * torch.nan), "not finite"),
        ({}, lambda case: Output(out=exact(case).out + 1), "the output is off by"),
    ],
)
def test_what_is_wrong_is_said(
    case: dict[str, Any], wrong: Callable[..., Output], says: str
) -> None:
    """A wrong kernel fails with its cause; the same case right passes."""
    result = checked(wrong, **case)
    assert not result.passed
    assert says in " ".join(str(result).split())
    assert checked(exact, **case).passed


def test_writing_into_the_inputs_is_wrong() -> None:
    """A kernel that scales q in place is found out although its answer is right."""

    def careless(case: AttentionCase) -> Output:
        out = exact(case)
        case.q.mul_(2)
        return out

    result = checked(careless)
    assert not result.passed
    assert "it writes into its inputs (q)" in " ".join(str(result).split())


@pytest.mark.parametrize("kind", [NotImplementedError, ValueError])
def test_a_kernel_that_runs_nothing_does_not_pass(kind: type[Exception]) -> None:
    """Whether it refuses or raises, the reason is said and nothing was measured."""

    def unable(case: AttentionCase) -> Output:
        raise kind("no such luck")

    result = checked(unable)
    assert (result.passed, result.judgement.exit_code) == (False, 3)
    assert "no such luck" in str(result)


def test_eager_attention_at_huge_scores() -> None:
    """With scores near -5e4 a bfloat16 score holds no difference below 256: plain attention is off
    by more than half of the answer, as its own roundings predict."""
    inputs = {"name": "far_below", "lse": -5.0e4, "q": 64.0}
    case = {**SMALL, "inputs": inputs}
    result = check_attention(find("baseline"), cases=case, formats="bfloat16", backward=False)
    rows = [r for r in result.report.rows if r.role == "kernel"]
    assert all(r.rel is not None and r.rel > 0.5 for r in rows)
    assert all(r.expected_ratio == pytest.approx(1.0, abs=0.1) for r in rows)


def test_a_kernel_that_cannot_run_here() -> None:
    """One that needs a GPU, and a name that is none."""
    assert invoked("kernels", "--check", "no-such-kernel").exit_code != 0
    if not torch.cuda.is_available():
        assert "cannot run here" in str(invoked("kernels", "--check", "sdpa-cudnn").exception)
