"""A kernel by itself: sound ones conform, wrong ones are told what is wrong, the rest refuse."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from numdev.audit.conformance.cases import CHECKS, Check, case_of
from numdev.audit.conformance.checking import FORMATS, check
from numdev.cases import AttentionCase
from numdev.cli.main import cli
from numdev.errors import MeasurementError
from numdev.formats import round_to
from numdev.kernels import Kernel, Output, Refused, Requirement, find
from numdev.kernels.reference import attend
from numdev.report import ConformanceReport
from numdev.system import System

HERE = System.here("cpu")


def run(function: Callable[[AttentionCase], Output], *features: str) -> ConformanceReport:
    """Check a function in bfloat16, in some features."""
    chosen = [c for c in CHECKS if c.feature in features]
    return check(Kernel(name="mine", function=function), HERE, checks=chosen, formats=["bfloat16"])


def exact(case: AttentionCase) -> Output:
    """The reference rounded once: right in everything."""
    return Output(out=round_to(attend(case).out, case.format).to(case.q.dtype))


def changed(**changes: object) -> Callable[[AttentionCase], Output]:
    return lambda case: exact(dataclasses.replace(case, **changes))


def verdicts(report: ConformanceReport) -> dict[str, str]:
    return {f.feature: f.verdict for f in report.features}


def words(report: ConformanceReport, feature: str) -> str:
    return next(f.words for f in report.features if f.feature == feature)


@pytest.mark.parametrize("fmt", FORMATS)
def test_known_answers_agree_with_the_reference(fmt: str) -> None:
    """Every known answer is what fp64 computes too, so neither stands on the other's word."""
    for one in CHECKS:
        case, known = case_of(one, fmt)
        assert case.q.isfinite().all(), one.name
        assert case.k.isfinite().all(), one.name
        if known is not None:
            assert torch.allclose(attend(case).out, known, rtol=1e-12, atol=1e-12), one.name


@pytest.mark.parametrize(("name", "formats"), [("sdpa-flash", FORMATS), ("sdpa-math", FORMATS[:1])])
def test_sound_kernels_conform(name: str, formats: tuple[str, ...]) -> None:
    """PyTorch's kernels are right in all they do not refuse."""
    found = check(find(name), HERE, formats=formats)
    assert found.conforms, found.sentence
    refused = {f.feature for f in found.features if f.verdict == "refuses"}
    assert {"soft cap", "attention sinks"} <= refused
    assert set(verdicts(found)) - refused >= {"known answers", "causal", "bool mask", "formats"}


def test_eager_attention_is_wrong_at_huge_scores() -> None:
    """With scores near -5e4 a bfloat16 score holds no difference below 256: the baseline is wrong
    there, is told so, and rounding is not called a mistake."""
    found = check(find("baseline"), HERE, formats=["bfloat16"])
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
        ("lengths", lambda case: Output(out=exact(case).out * 0), "the output is 0 everywhere"),
        ("known answers", lambda case: Output(out=exact(case).out * 1.5), "1.500 times too large"),
    ],
)
def test_what_is_wrong_is_said(feature: str, wrong: Callable[..., Output], says: str) -> None:
    """A wrong feature is named with its cause, and the sentence names the feature."""
    found = run(wrong, feature)
    assert not found.conforms
    assert verdicts(found)[feature] == "wrong"
    assert says in words(found, feature)
    assert found.sentence == f"mine does not conform: {feature}."


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (lambda case: Output(out=exact(case).out * torch.nan), "NaN or infinite"),
        (lambda case: Output(out=exact(case).out.transpose(1, 2)), "it returned shape"),
        (lambda case: Output(out=exact(case).out + 1), "no known mistake explains it"),
    ],
)
def test_wrong_without_a_name(result: Callable[..., Output], says: str) -> None:
    """What no alternative explains is still wrong, and described."""
    assert says in words(run(result, "batches"), "batches")


def test_writing_into_the_inputs_is_wrong() -> None:
    """A kernel that scales q in place is found out although its answer is right."""

    def careless(case: AttentionCase) -> Output:
        out = exact(case)
        case.q.mul_(2)
        return out

    assert "it writes into its inputs (q)" in words(run(careless, "views"), "views")


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (Refused("no batches"), "refuses"),
        (NotImplementedError("no batches"), "refuses"),
        (ValueError("no batches"), "raises"),
    ],
)
def test_refusing_is_not_raising(error: Exception, verdict: str) -> None:
    """A refusal conforms; any other exception does not, and its words stand in the report."""

    def picky(case: AttentionCase) -> Output:
        if case.q.shape[0] > 1:
            raise error
        return exact(case)

    found = run(picky, "batches", "causal")
    assert verdicts(found)["batches"] == verdict
    assert "no batches" in words(found, "batches")
    assert found.conforms == (verdict == "refuses")


def test_a_format_that_never_runs_is_said_once() -> None:
    """A kernel without fp32 refuses the format, not every feature in it."""

    def half(case: AttentionCase) -> Output:
        if case.q.dtype == torch.float32:
            raise Refused("16 bits only")
        return exact(case)

    chosen = [c for c in CHECKS if c.feature == "causal"]
    found = check(Kernel(name="half", function=half), HERE, checks=chosen)
    assert verdicts(found) == {"causal": "right", "formats": "partly"}
    assert words(found, "formats") == "16 bits only (float32; float32)"


@pytest.mark.parametrize(
    ("fill", "says"),
    [(0.0, "is 0"), (torch.nan, "is NaN"), ("mean", "is the mean of V"), (7.0, "is neither")],
)
def test_the_convention_of_empty_rows_is_named(fill: object, says: str) -> None:
    """What stands in fully masked rows is reported, and is no fault."""

    def kernel(case: AttentionCase) -> Output:
        answer = attend(case)
        value = case.v.double().mean(dim=2, keepdim=True) if fill == "mean" else torch.tensor(fill)
        out = torch.where(answer.empty[..., None], value, answer.out)
        return Output(out=out.to(case.q.dtype))

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
def test_the_log_sum_exp_is_checked(transform: Callable[..., torch.Tensor], says: str) -> None:
    """A returned log-sum-exp must be the natural one."""

    def kernel(case: AttentionCase) -> Output:
        return Output(out=exact(case).out, lse=transform(attend(case).lse))

    found = run(kernel, "batches")
    assert found.conforms == (not says)
    assert says in words(found, "log-sum-exp")


def test_runs_that_differ_are_reported_and_not_judged() -> None:
    """A kernel that is not reproducible is told so."""
    calls = iter(range(100))

    def kernel(case: AttentionCase) -> Output:
        return Output(out=exact(case).out * (1 + 2**-8 * (next(calls) % 2)))

    found = run(kernel, "batches")
    assert found.conforms
    assert words(found, "reproducible").startswith("not bit by bit: runs differ by up to")


def test_what_cannot_run_is_not_measured() -> None:
    """A kernel that misses something here, or runs no check, is an error: it did not conform."""
    elsewhere = Kernel(name="far", function=exact, requires=Requirement(device="cuda"))
    with pytest.raises(MeasurementError, match="far cannot run here: needs CUDA"):
        check(elsewhere, HERE)
    never = Kernel(name="never", function=exact, supports=lambda case: "not today")
    with pytest.raises(MeasurementError, match="never ran none of the checks: not today"):
        check(never, HERE, checks=[Check(feature="causal", name="x")])


def test_the_command(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`numdev kernels --check` exits with 1 for a wrong kernel, and --json is the whole report."""
    (tmp_path / "wrongly.py").write_text(
        "import torch\n"
        "def attention(q, k, v, is_causal=False):\n"
        "    print('noise')\n"
        "    return torch.softmax(q @ k.mT / 8, dim=-1) @ v\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    chosen = tuple(c for c in CHECKS if c.feature in ("causal", "batches"))
    monkeypatch.setitem(check.__kwdefaults__, "checks", chosen)
    command = ["kernels", "--device", "cpu", "--check", "wrongly:attention"]
    answer = CliRunner().invoke(cli, [*command, "--json"])
    assert answer.exit_code == 1
    report = ConformanceReport.model_validate(json.loads(answer.stdout))
    assert verdicts(report)["causal"] == "wrong"
    shown = CliRunner().invoke(cli, command)
    assert "the causal mask is ignored" in " ".join(shown.stdout.split())


# --- the backward pass ---------------------------------------------------------------------------


def backward_checks() -> list[Check]:
    return [c for c in CHECKS if c.backward]


def differentiable(
    case: AttentionCase, *, dq: float = 1.0, dk: float = 1.0, shift_dv: bool = False
) -> Tensor:
    """Plain attention, with a gradient that may be wrong on purpose."""

    def scaled(x: Tensor, by: float) -> Tensor:
        # The value of x, and `by` times its gradient.
        return x * by - (x * by - x).detach()

    v = case.v
    if shift_dv:
        v = v.detach() + v.roll(1, dims=2) - v.roll(1, dims=2).detach()
    spoiled = dataclasses.replace(case, q=scaled(case.q, dq), k=scaled(case.k, dk), v=v)
    return find("baseline").attend(spoiled).out


def backward_words(function: Callable[..., Any], fmt: str = "float32") -> dict[str, str]:
    kernel = Kernel(name="mine", function=function)
    found = check(kernel, System.here("cpu"), checks=[*backward_checks()], formats=[fmt])
    return {f.feature: f"{f.verdict} {f.words}".strip() for f in found.features}


@pytest.mark.parametrize("fmt", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["baseline", "sdpa-math", "sdpa-flash"])
def test_sound_gradients_conform(name: str, fmt: str) -> None:
    """The gradients of PyTorch's own attention are right wherever they exist."""
    found = check(find(name), System.here("cpu"), checks=backward_checks(), formats=[fmt])
    assert found.conforms, found.sentence
    assert found.features[0].verdict == "right"


def test_wrong_gradients_are_found_and_multiples_named() -> None:
    """A forward that is right does not hide a backward that is not."""
    assert backward_words(differentiable)["backward"] == "right"
    assert "dq is 8 times" in backward_words(lambda case: differentiable(case, dq=8.0))["backward"]
    assert (
        "dk is 1.1 times" in backward_words(lambda case: differentiable(case, dk=1.1))["backward"]
    )
    shifted = backward_words(lambda case: differentiable(case, shift_dv=True))["backward"]
    assert shifted.startswith("wrong dv is off by")


def test_a_kernel_that_autograd_cannot_follow_has_no_backward() -> None:
    """No gradient is a refusal, not a fault."""
    kernel = Kernel(name="mine", function=lambda case: find("baseline").attend(case).out.detach())
    checks = [CHECKS[0], *backward_checks()]
    found = check(kernel, System.here("cpu"), checks=checks, formats=["float32"])
    assert found.conforms
    assert {f.verdict for f in found.features if f.feature.startswith("backward")} == {"refuses"}
