"""A kernel by itself: sound ones conform, wrong ones are told what is wrong, the rest refuse."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from numdev.audit import conformance as checking
from numdev.audit.conformance import FORMATS, conformance, small_cases
from numdev.cases import AttentionCase
from numdev.cli.main import cli
from numdev.errors import MeasurementError
from numdev.formats import round_to
from numdev.kernels import Kernel, Output, Refused, Requirement, find
from numdev.kernels.reference import attend
from numdev.report import ConformanceReport
from numdev.system import System

HERE = System.here("cpu")


def run(
    function: Callable[..., Any], *features: str, formats: tuple[str, ...] = FORMATS[:1]
) -> ConformanceReport:
    """Check a function, in bfloat16, in some features; only the first case of each."""
    cases = {c.entry.partition(": ")[0]: c for c in reversed(small_cases())}
    chosen = [cases[feature] for feature in features]
    return conformance(Kernel(name="mine", function=function), HERE, cases=chosen, formats=formats)


def exact(case: AttentionCase) -> Output:
    """The reference rounded once: right in everything."""
    return Output(out=round_to(attend(case).out, case.format).to(case.q.dtype))


def changed(**changes: object) -> Callable[[AttentionCase], Output]:
    return lambda case: exact(dataclasses.replace(case, **changes))


def verdicts(report: ConformanceReport) -> dict[str, str]:
    return {f.feature: f.verdict for f in report.features}


def words(report: ConformanceReport, feature: str) -> str:
    return next(f.words for f in report.features if f.feature == feature)


@pytest.mark.slow
def test_a_sound_kernel_conforms_in_every_format() -> None:
    """PyTorch's kernel is right in all it does not refuse, forward and backward."""
    found = conformance(find("sdpa-flash"), HERE)
    assert found.conforms, found.sentence
    refused = {f.feature for f in found.features if f.verdict == "refuses"}
    assert refused == {"soft cap", "attention sinks", "V of another head_dim"}
    assert {"log-sum-exp", "reproducible", "formats", "backward"} <= verdicts(found).keys()


def test_eager_attention_is_wrong_at_huge_scores() -> None:
    """With scores near -5e4 a bfloat16 score holds no difference below 256: the baseline is wrong
    there, is told so, and rounding is not called a mistake."""
    found = conformance(find("baseline"), HERE, formats=["bfloat16"])
    assert [f for f, v in verdicts(found).items() if v == "wrong"] == ["large logits"]
    assert "no known mistake explains it" in words(found, "large logits")


@pytest.mark.parametrize(
    ("feature", "wrong", "says"),
    [
        ("causal", changed(is_causal=False), "the causal mask is ignored"),
        ("bool mask", changed(mask=None), "the mask is ignored"),
        ("soft cap", changed(softcap=None), "the soft cap is ignored"),
        ("attention sinks", changed(sinks=None), "the attention sinks are ignored"),
        ("scale", changed(scale=0.125), "the scale is 1/sqrt(head_dim) instead of what was asked"),
        ("scale", lambda case: Output(out=exact(case).out * 0), "the output is 0 everywhere"),
        ("scale", lambda case: Output(out=exact(case).out * 1.5), "1.500 times too large"),
        ("batches", lambda case: Output(out=exact(case).out * torch.nan), "NaN or infinite"),
        ("batches", lambda case: Output(out=exact(case).out + 1), "no known mistake explains it"),
    ],
)
def test_what_is_wrong_is_said(feature: str, wrong: Callable[..., Output], says: str) -> None:
    """A wrong feature is named with its cause, and the sentence names the feature."""
    found = conformance(
        Kernel(name="mine", function=wrong),
        HERE,
        cases=[c for c in small_cases() if c.entry == feature and c.seq_len > 1],
        formats=["bfloat16"],
    )
    assert verdicts(found)[feature] == "wrong"
    assert says in words(found, feature)
    assert found.sentence == f"mine does not conform: {feature}."


def test_writing_into_the_inputs_is_wrong() -> None:
    """A kernel that scales q in place is found out although its answer is right."""

    def careless(case: AttentionCase) -> Output:
        out = exact(case)
        case.q.mul_(2)
        return out

    assert "it writes into its inputs (q)" in words(run(careless, "views"), "views")


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [(Refused, "refuses"), (NotImplementedError, "refuses"), (ValueError, "raises")],
)
def test_refusing_is_not_raising(kind: type[Exception], verdict: str) -> None:
    """A refusal conforms; any other exception does not, and its words stand in the report. A format
    in which nothing runs is said once, and not for every feature."""

    def picky(case: AttentionCase) -> Output:
        if case.q.shape[0] > 1 or case.q.dtype == torch.float32:
            raise kind("no")
        return exact(case)

    found = run(picky, "batches", "scale", formats=("bfloat16", "float32"))
    assert verdicts(found)["batches"] == verdict
    assert "no" in words(found, "batches")
    assert found.conforms == (verdict == "refuses")
    assert len([c for c in found.checks if c.format == "float32"]) == 1


@pytest.mark.parametrize(
    ("fill", "says"), [(0.0, "is 0"), (torch.nan, "is NaN"), (7.0, "is neither 0 nor NaN")]
)
def test_the_convention_of_empty_rows_is_named(fill: float, says: str) -> None:
    """What stands in fully masked rows is reported, and is no fault."""

    def kernel(case: AttentionCase) -> Output:
        answer = attend(case)
        out = answer.out.masked_fill(answer.empty[..., None], fill)
        return Output(out=round_to(out, case.format).to(case.q.dtype))

    found = run(kernel, "fully masked rows")
    assert found.conforms
    assert says in words(found, "fully masked rows")


@pytest.mark.parametrize(
    ("transform", "says"),
    [
        (lambda lse: lse, ""),
        (lambda lse: lse / torch.tensor(2.0).log(), "base 2"),
        (torch.exp, "the sum of exponentials"),
        (lambda lse: lse + 3, "off by up to 3"),
    ],
)
def test_the_log_sum_exp_is_checked(transform: Callable[..., Tensor], says: str) -> None:
    """A returned log-sum-exp must be the natural one."""
    found = run(lambda case: Output(out=exact(case).out, lse=transform(attend(case).lse)), "scale")
    assert found.conforms == (not says)
    assert says in words(found, "log-sum-exp")


def test_runs_that_differ_are_reported_and_not_judged() -> None:
    """A kernel that is not reproducible is told so."""
    calls = iter(range(100))
    found = run(
        lambda case: Output(out=exact(case).out * (1 + 2**-8 * (next(calls) % 2))), "batches"
    )
    assert found.conforms
    assert words(found, "reproducible").startswith("not bit by bit: runs differ by")


def test_what_cannot_run_is_not_measured() -> None:
    """A kernel that misses something here, or runs no check, is an error: it did not conform."""
    elsewhere = Kernel(name="far", function=exact, requires=Requirement(device="cuda"))
    with pytest.raises(MeasurementError, match="far cannot run here: needs CUDA"):
        conformance(elsewhere, HERE)
    never = Kernel(name="never", function=exact, supports=lambda case: "not today")
    with pytest.raises(MeasurementError, match="never ran none of the checks: not today"):
        conformance(never, HERE, cases=small_cases()[:1])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`numdev kernels --check` exits with 1 for a wrong kernel, and --json is the whole report."""
    (tmp_path / "wrongly.py").write_text(
        "import torch\n"
        "def attention(q, k, v, is_causal=False):\n"
        "    print('noise')\n"
        "    return torch.softmax(q @ k.mT / 8, dim=-1) @ v\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    chosen = tuple(c for c in small_cases() if c.entry in ("causal", "batches"))
    monkeypatch.setattr(checking, "small_cases", lambda: chosen)
    command = ["kernels", "--device", "cpu", "--check", "wrongly:attention"]
    answer = CliRunner().invoke(cli, [*command, "--json"])
    assert answer.exit_code == 1
    report = ConformanceReport.model_validate(json.loads(answer.stdout))
    assert verdicts(report)["causal"] == "wrong"
    shown = CliRunner().invoke(cli, command)
    assert "the causal mask is ignored" in " ".join(shown.stdout.split())


# --- the backward pass ---------------------------------------------------------------------------


def differentiable(case: AttentionCase, dq: float = 1.0, shift_dv: bool = False) -> Tensor:
    """Plain attention, with a gradient that may be wrong on purpose."""
    q, v = case.q * dq - (case.q * dq - case.q).detach(), case.v
    if shift_dv:
        v = v.detach() + v.roll(1, dims=2) - v.roll(1, dims=2).detach()
    return find("baseline").attend(dataclasses.replace(case, q=q, v=v)).out


@pytest.mark.parametrize(
    ("function", "begins"),
    [
        (differentiable, "right"),
        (lambda case: differentiable(case, dq=1.1), "wrong the error of dq is 10 %"),
        (lambda case: differentiable(case, shift_dv=True), "wrong the error of dv"),
        (lambda case: differentiable(case).detach(), "refuses it has no backward"),
    ],
)
def test_gradients_are_checked(function: Callable[..., Any], begins: str) -> None:
    """A forward that is right does not hide a backward that is not; none at all is a refusal."""
    found = run(function, "scale", "backward", "backward, grouped heads", formats=("float32",))
    assert found.conforms == (not begins.startswith("wrong"))
    for feature in found.features:
        if feature.feature.startswith("backward"):
            assert f"{feature.verdict} {feature.words}".startswith(begins)
