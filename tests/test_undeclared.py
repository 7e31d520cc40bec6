"""Kernels that declare no claim: sound ones that round in another known way than `fa2`
pass, and say which way; faulty ones fail as they did, though other ways are tried.

That every planted fault is caught by the default cases is in test_planted.py; here are
rounding's."""

from __future__ import annotations

import itertools
import math
from typing import Any

import planted
import pytest
import torch
from on_bench import THIS_CPU, prepare, task_of
from planted import CATALOGUE, designs, flash
from torch import Tensor

from numdev import testing
from numdev.cases import AttentionCase, CaseRef
from numdev.kernels import Kernel, Output
from numdev.kernels.baseline import WAYS, OnlineSoftmax
from numdev.kernels.emulation.backward import attended as attend
from numdev.kernels.emulation.kernel import emulated_step
from numdev.kernels.emulation.recipe import recipe
from numdev.kernels.output import differentiate
from numdev.kernels.plain_functions import adapt
from numdev.kernels.reference import gradients
from numdev.metrics.bit_checksums import same
from numdev.report import Outcome
from numdev.request_models import AuditConfig
from numdev.sources.case_sources import ConfigSource
from numdev.studies.audit import explanations, mistake_search
from numdev.studies.audit.case_measurement import measure_task
from numdev.studies.audit.explanations import Likeness, examine, likenesses
from numdev.studies.audit.kernel_check import CheckSource
from numdev.studies.audit.prepared_attention import Bench
from numdev.testing import CheckFailed, check_attention
from numdev.yamlfile import validated

BF16 = "bfloat16"
FEW = ("causal", "grouped", "large-logits", "tied-maxima")
STRONG_SINK = {
    "name": "sink, head_dim 96",
    "heads": 2,
    "seq_len": 192,
    "head_dim": 96,
    "inputs": {"name": "sink", "strength": 16},
}
ONE_SIGN = {
    "name": "one_signed_gradient",
    "batch": 2,
    "heads": 2,
    "seq_len": 192,
    "head_dim": 64,
    "inputs": "one_signed_gradient",
}
LONG = {
    "name": "long",
    "heads": 2,
    "seq_len": 385,
    "inputs": {"name": "normal", "logits": 16.0},
}
FA4 = planted.flashattention_4
LAGGING = (
    "flashattention-4",
    "a-lagging-maximum-alone",
    "a-lagging-maximum-and-a-polynomial",
)


def eager(case: Any) -> Tensor:
    """The preset itself, in both passes."""
    return attend(case, recipe("eager"))


@pytest.fixture(autouse=True)
def _no_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "reproduce", lambda *_, **__: [])


def bench_of(name: str) -> Bench:
    """A default case of a check in bfloat16, with gradients."""
    (located,) = CheckSource([name], [0], "cpu", gradients=True).cases
    return prepare(located.load(), "bfloat16", gradients=True)


def claims(rows: Any) -> set[str]:
    return {r.claim for r in rows if r.role == "kernel" and r.claim}


@pytest.mark.parametrize(("function", "way"), [
    (planted.through_casts, "as autograd rounds exp(S - m), cast before P V"),
    (planted.wrapper, "as sdpa-flash rounds on this CPU"), (eager, "as eager rounds"),
])  # fmt: skip
@pytest.mark.one_in(3)
def test_sound_kernels_without_a_claim_pass(function: Any, way: str) -> None:
    """In both formats and passes; and the verdict says in which way they round."""
    result = check_attention(function, cases=FEW)
    assert any(claim.startswith(way) for claim in claims(result.report.rows))
    assert way in " ".join(str(result).split())
    assert any(way in line for line in result.report.tested)


def test_each_design_has_a_kernel_and_options() -> None:
    """Every design of the table but two; its options are a recipe."""
    listed = {design["kernel"] for design in explanations.designs()}
    assert listed - set(designs.DESIGNS) == {"Pallas splash", "llama.cpp"}
    for design in explanations.designs():
        for more in design.get("tried", ({},)):
            recipe(**{**design["claim"], **more})


@pytest.mark.slow
@pytest.mark.parametrize("name", designs.NAMES)
@pytest.mark.one_in(8)
def test_a_sound_design_is_not_accused(name: str) -> None:
    """In both formats and passes, in grouped heads too; a maximum that lags is told by
    that."""
    result = check_attention(CATALOGUE[name].function, cases=("grouped", LONG), seeds=0)
    claims_of = {r.claim for r in result.report.rows if r.role == "kernel" and r.claim}
    assert (name in LAGGING) == any("FlashAttention-4" in claim for claim in claims_of)


@pytest.mark.thorough
def test_a_lagging_maximum_is_beyond_fa2_in_the_output_alone() -> None:
    """Held to `fa2` the output is accused; held to what explains it, not even beside a
    wrong dV."""

    def wrong(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        v.register_hook(lambda grad: grad * 1.02) if v.requires_grad else None
        out: Tensor = FA4(q, k, v, is_causal=is_causal)
        return out

    for kernel, claims, tensor in ((FA4, {}, "out"), (wrong, None, "dv")):
        with pytest.raises(CheckFailed) as caught:
            check_attention(kernel, cases=LONG, claims=claims, formats=BF16)
        findings = caught.value.result.report.findings
        assert {f.tensor for f in findings if f.severity == "exceeded"} == {tensor}


FAULTS = (
    "row-sum-rounded",
    "p-truncated",
    "scores-rounded",
    "ds-truncated",
    "delta-missing",
)


def grouped(by_head: bool, fault: str = "") -> Any:
    """A function told of its groups, `planted.sound` in every query head but for the
    fault; dk and dv of each are rounded `apart`, or what they sum is."""

    def kernel(
        q: Tensor, k: Any, v: Any, is_causal: bool = False, enable_gqa: bool = False
    ) -> Any:
        wide = [x if by_head else x.float() for x in (k, v)]
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in wide)
        return Within.apply(q, k, v, is_causal, fault)

    return kernel


class Within(torch.autograd.Function):
    """Sound in q's format, with gradients of k and v in theirs."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, fault: str
    ) -> Tensor:
        low, scale = [x.to(q.dtype) for x in (q, k, v)], q.shape[-1] ** -0.5
        flash._Flash.forward(ctx, *low, causal, scale, "")
        out, lse, m = ctx.to_save[3:]
        lse = lse.half().float() if fault == "log-sum-exp in fp16" else lse
        ctx.save_for_backward(*(x.to(k.dtype) for x in low), out, lse, m)
        ctx.how = (
            causal,
            scale,
            "dq_accumulator_rounded" if fault.startswith("dq") else "",
        )
        ctx.low = q.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(flash, "_rounded", lambda x, dtype: x.to(ctx.low).to(x.dtype))
            if ctx.how[2]:
                patched.setattr(flash, "TILE", 32)
            dq, dk, dv, *_ = flash._Flash.backward(ctx, grad, None)
        return dq.to(ctx.low), dk, dv, None, None


BY_HEAD = ", dk and dv of each query head"
WIDE = {"name": "wide", "heads": 8, "kv_heads": 2, "seq_len": 256, "causal": True}


@pytest.mark.parametrize(("function", "way"), [
    (grouped(by_head=False), "fa2"), (grouped(by_head=True), "as fa2 rounds" + BY_HEAD),
    (lambda q, k, v, is_causal=False: planted.wrapper(q, k, v, is_causal=is_causal),
     "as sdpa-flash rounds on this CPU" + BY_HEAD),
])  # fmt: skip
@pytest.mark.one_in(3)
def test_sums_over_a_group_are_held_to_what_they_are(function: Any, way: str) -> None:
    """In fp32 within the kernel, or of the rounded dk and dv of every query head."""
    result = check_attention(function, cases="grouped", seeds=range(3))
    assert way in (ways := claims(result.report.rows))
    assert all(words.endswith(BY_HEAD) for words in ways - {"fa2"})


@pytest.mark.slow
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize(
    ("fault", "tensor"),
    [("log-sum-exp in fp16", "dv"), ("dq in bf16 over 8 tiles", "dq")],
)
@pytest.mark.one_in(4)
def test_no_way_to_sum_a_group_excuses_a_fault(
    by_head: bool, fault: str, tensor: str
) -> None:
    """Neither leaves room for what else is rounded."""
    with pytest.raises(CheckFailed) as caught:
        check_attention(grouped(by_head, fault), cases=WIDE, formats=BF16)
    assert tensor in {f.tensor for f in caught.value.result.report.findings}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.one_in(4)
def test_a_fault_is_explained_by_no_way(name: str) -> None:
    """Forward and backward, and forward alone where it shows there."""
    fault = CATALOGUE[name]
    for backward in (True, False) if "out" in fault.tensors else (True,):
        with pytest.raises(CheckFailed) as caught:
            check_attention(
                fault.function, cases=FEW[:2], formats=BF16, backward=backward
            )
        assert claims(caught.value.result.report.rows) <= {"fa2"}


@pytest.mark.parametrize(
    "name", ["causal", "grouped", "additive-mask", "empty-rows", "sinks"]
)
@pytest.mark.parametrize("words", WAYS)
def test_ways_are_attention(words: str, name: str) -> None:
    """Each, in both passes, is within a few roundings of fp64, and 0 where a row sees no
    key."""
    prepared = bench_of(name)
    result = Kernel(name="way", function=WAYS[words]).gradients(prepared.case)
    exact = gradients(prepared.case)
    for tensor in ("out", "dq", "dk", "dv"):
        x, r = getattr(result, tensor).double(), getattr(exact, tensor)
        assert float((x - r).norm() / r.norm()) < 0.02, tensor
    assert bool((result.out[exact.empty] == 0).all())


@pytest.mark.parametrize(
    "name", ["causal", "grouped", "additive-mask", "empty-rows", "sinks"]
)
@pytest.mark.parametrize("tile", [None, 4])
def test_steps_of_all_maxima_are_those_of_each(tile: int | None, name: str) -> None:
    """Bit for bit what autograd makes of each alone, where k and v are summed over a
    group in float32 and where the maximum is the sink's too."""
    case = bench_of(name).case
    sinks = (False,) if case.sinks is None else (False, True)
    for sums_wide, from_sink in itertools.product((False, True), sinks):
        steps = OnlineSoftmax(tile, "", sums_wide, from_sink).steps(case)
        for maximum, step in steps.items():
            way = OnlineSoftmax(tile, maximum, sums_wide, from_sink)
            alone = differentiate(way, case)
            for tensor in ("out", "dq", "dk", "dv"):
                assert same(getattr(step, tensor), getattr(alone, tensor)), maximum


def test_ways_share_what_is_theirs_alone() -> None:
    """What ran last is taken for another maximum, and never for another tile."""
    case = bench_of("causal").case
    last: dict[object, Any] = {}
    for tile, maximum in ((4, "a"), (4, "b"), (None, "b"), (4, "b")):
        way = OnlineSoftmax(tile, maximum)
        assert same(explanations._shared_output(way, last, case).out, way(case)), tile
        assert len(last) == 1


def test_only_elements_explain() -> None:
    """Errors of a way's size but another sign, or twice as large, are not its own; its
    own are."""
    prepared = bench_of("causal")
    step = emulated_step(prepared.case, {"preset": "eager"})
    formats = dict.fromkeys(step, prepared.case.format)

    def likeness(factor: float) -> Likeness | None:
        exact = {n: getattr(prepared.reference, n) for n in step}
        moved = {n: exact[n] + factor * (step[n].double() - exact[n]) for n in step}
        return likenesses(Output(**moved), tuple(step), formats, prepared, THIS_CPU).get(
            "dv"
        )

    likeness_of: Any = likeness(1.0)
    assert likeness_of.words == "as eager rounds"
    assert likeness_of.residual < 1e-6
    assert [likeness(factor) for factor in (-1.0, 4.0, 0.0)] == [None] * 3


def test_worst_rows_are_held_to_the_way_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's worst row is as far off where it is named as in the kernel's own
    rows."""
    # Else rows as predicted are not listed
    monkeypatch.setattr(explanations, "NOTABLE", 0.0)
    bench, kernel = bench_of("large-logits"), Kernel(name="mine", function=eager)
    task = task_of(bench, kernel)
    measured = measure_task(task, kernel, bench, THIS_CPU)
    rows = measured.rows
    assert claims(rows) == {"as eager rounds"}
    named = examine(task, kernel, measured, bench, THIS_CPU)
    for tensor in ("out", "dq", "dk", "dv"):
        largest = max(r.worst_row or 0.0 for r in rows if r.tensor == tensor)
        result = max(w.ratio or 0.0 for w in named if w.tensor == tensor)
        assert result == pytest.approx(largest, rel=1e-9), tensor


@pytest.mark.parametrize(
    ("name", "case", "fmt", "wrong"),
    [
        ("cudnn", STRONG_SINK, "float16", False),
        ("cudnn", STRONG_SINK, "float16", True),
        ("flashattention-4", ONE_SIGN, "bfloat16", False),
        ("flashattention-4", ONE_SIGN, "bfloat16", True),
    ],
)
def test_gradients_may_err_far_more_than_plain_attentions(
    name: str, case: dict[str, Any], fmt: str, wrong: bool
) -> None:
    """Beside a sink dS is a subnormal number of float16, and cuDNN rounds it times the
    scale; plain attention has another delta. Each call by itself, as in an audit: a known
    way that explains what is wrong wholly excuses it, and excuses nothing else."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        k.register_hook(lambda dk: dk * 1.3) if wrong and k.requires_grad else None
        return CATALOGUE[name].function(q, k, v, scale=scale)

    configs = validated({"cases": [case]}, AuditConfig, "here").cases
    (located,) = ConfigSource("here", configs, (0,), THIS_CPU, gradients=True).cases
    bench = prepare(located.load(), fmt, gradients=True)
    by_name = adapt("mine:kernel", kernel)
    rows = measure_task(task_of(bench, by_name), by_name, bench, THIS_CPU).rows
    gradients = [row for row in rows if row.tensor in ("dq", "dk")]
    far = max(row.baseline_ratio or 0.0 for row in gradients)
    assert far > mistake_search.FAR
    way = f"as {CATALOGUE[name].what} rounds"
    assert claims(rows) == {"fa2" if wrong else way}
    over = [explanations.excess("expected_ratio", r.expected_ratio, r) for r in rows]
    assert (max(over) > 1) == wrong


@pytest.mark.parametrize("fmt", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "case",
    [
        {"seq_len": 63, "head_dim": 64},  # keys left over by the fast exp
        {"seq_len": 127, "head_dim": 64},
        {"seq_len": 129, "kv_len": 1, "head_dim": 64},  # dq and dk are exactly 0
    ],
)
def test_sdpas_own_rounding_is_found_in_a_call_alone(
    case: dict[str, Any], fmt: str
) -> None:
    """A function around it, in calls for which no other call speaks."""
    cases = [{"name": "alone", "heads": 2, **case}]
    configs = validated({"cases": cases}, AuditConfig, "here").cases
    (located,) = ConfigSource("here", configs, (0,), THIS_CPU, gradients=True).cases
    bench = prepare(located.load(), fmt, gradients=True)
    kernel = adapt("mine:kernel", planted.wrapper)
    rows = measure_task(task_of(bench, kernel), kernel, bench, THIS_CPU).rows
    assert explanations.wrong_tensors(rows) == ()


def test_the_order_of_keys_tells_how_a_group_is_summed() -> None:
    """dK and dV of each query head, rounded in float16 before seven are summed, and keys
    from the last tile to the first: by another order a third of dK would be left."""
    grouped = {"batch": 2, "heads": 14, "kv_heads": 2, "seq_len": 129, "head_dim": 64}
    cases = [{"name": "packed, grouped heads", **grouped, "layout": "packed"}]
    configs = validated({"cases": cases}, AuditConfig, "here").cases
    (located,) = ConfigSource("here", configs, (0,), THIS_CPU, gradients=True).cases
    bench = prepare(located.load(), "float16", gradients=True)
    kernel = adapt("mine:kernel", CATALOGUE["flashattention-2"].function)
    rows = measure_task(task_of(bench, kernel), kernel, bench, THIS_CPU).rows
    way = "as FlashAttention-2 rounds (block_kv 64, kv_order descending)"
    assert claims(rows) == {f"{way}, dk and dv of each query head"}
    assert explanations.wrong_tensors(rows) == ()


@pytest.mark.parametrize("backward", [False, True])
def test_nan_in_rows_without_keys_fails(backward: bool) -> None:
    """And the message says so, with or without gradients."""
    cases = ["empty-rows", "full"]
    with pytest.raises(CheckFailed) as caught:
        check_attention(
            planted.nan_without_keys, cases=cases, formats=BF16, backward=backward
        )
    words = " ".join(str(caught.value).split())
    assert "returns NaN or infinity in fully masked rows" in words
    assert "empty-rows" in words
    rows = [
        r
        for r in caught.value.result.report.rows
        if r.role == "kernel" and r.tensor == "out"
    ]
    hurt = [r for r in rows if r.empty_nonfinite is not None]
    assert {r.case for r in hurt} == {"empty-rows"}
    assert all(r.empty_rows and r.empty_nonfinite == 64 * r.empty_rows for r in hurt)


def test_a_number_in_rows_without_keys_passes() -> None:
    """0 there; and what takes no mask is not asked."""
    for function in (planted.through_casts, planted.wrapper):
        check_attention(function, cases="empty-rows")
    result = check_attention(planted.sound, cases=["empty-rows", "full"])
    assert (
        result.skipped[0]
        == "Not tested, since the function has no parameter for it: mask."
    )


@pytest.mark.parametrize("wrong", [False, True])
def test_tensors_are_explained_beside_one_that_is_not_finite(wrong: bool) -> None:
    """V near the largest number of float16: dP, rounded to it by autograd, overflows, so
    that dq is NaN. The output rounds P normalised, by a known way, and is not accused;
    one that errs by more than that is."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        S = q.float() @ k.float().mT * (scale or 1.0)
        P = S.softmax(-1).to(q.dtype)
        P = torch.nextafter(P, torch.zeros_like(P)) if wrong else P
        return P @ v

    near = {"seq_len": 128, "head_dim": 64, "inputs": "near_overflow"}
    cases = [{"name": "near", "heads": 2, **near}]
    configs = validated({"cases": cases}, AuditConfig, "here").cases
    (located,) = ConfigSource("here", configs, (0,), THIS_CPU, gradients=True).cases
    bench = prepare(located.load(), "float16", gradients=True)
    by_name = adapt("mine:kernel", kernel)
    rows = measure_task(task_of(bench, by_name), by_name, bench, THIS_CPU).rows
    assert {row.tensor for row in rows if row.nonfinite} >= {"dq"}
    assert explanations.wrong_tensors(rows) == (("out",) if wrong else ())
    of_output = [row for row in rows if row.tensor == "out"]
    assert (claims(of_output) == {"fa2"}) == wrong


@pytest.mark.parametrize(("wrong", "passes"), [(0, True), (1, False)])
def test_what_overflows_on_the_way_is_no_fault_of_a_kernel(
    wrong: int, passes: bool
) -> None:
    """dS of upstream gradients as large as this is beyond float16 wherever it is rounded,
    and dq is not; beside it the other tensors are explained as ever. NaN elsewhere is."""

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if wrong:
            v.register_hook(lambda dv: torch.where(torch.arange(64) == 5, math.nan, dv))
        return planted.wrapper(q, k, v)

    draw = torch.Generator().manual_seed(0)
    q, k, v, dO = (torch.randn(1, 2, 64, 64, generator=draw) for _ in range(4))
    ref = CaseRef(case="c", source="s", module="m", layer=None, call=0, seed=None)
    case = AttentionCase(ref=ref, q=q, k=k, v=2000 * v, grad_out=300 * dO, scale=0.125)
    try:
        result = check_attention(kernel, cases=case, formats="float16", backward=True)
    except CheckFailed as failed:
        result = failed.result
    over = {
        (r.tensor, bool(r.overflow)) for r in result.report.rows if r.role == "kernel"
    }
    assert over == {("out", False), ("dq", True), ("dk", True), ("dv", False)}
    assert result.passed == passes
    assert "intermediates overflow float16" in str(result) or not passes


def test_what_explained_a_call_is_tried_alone_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A check's kernel rounds alike in all calls: all ways are tried in one of them."""
    searched: list[str] = []
    whole = mistake_search.likenesses

    def counted(output: Any, tensors: Any, formats: Any, bench: Any, system: Any) -> Any:
        searched.append(bench.case.ref.case)
        return whole(output, tensors, formats, bench, system)

    monkeypatch.setattr(mistake_search, "likenesses", counted)
    passed: Any = {"cases": ["causal", "long", "cross"], "formats": "bfloat16"}
    rows = check_attention(planted.wrapper, **passed).report.rows
    assert len(searched) == 1
    claims = {r.claim for r in rows if r.role == "kernel" and r.tensor == "dv"}
    assert claims == {"as sdpa-flash rounds on this CPU"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "fmt", "cases"),
    [
        (0, "float16", ("causal", "grouped", "large-logits", "tied-maxima")),
        (4, "bfloat16", None),  # all default cases
    ],
)
def test_a_way_that_medians_alone_tell_of_is_found(
    seed: int, fmt: str, cases: tuple[str, ...] | None
) -> None:
    """Calls that pass one by one as FlashAttention-2's, though they round as autograd
    does, are judged by that where the median over all of them would not pass."""
    function = CATALOGUE["sound-by-autograd"].function
    report = testing.check(function, cases=cases, formats=fmt, seeds=seed).report
    assert [f.sentence for f in report.findings if f.severity == "exceeded"] == []
    rows = [r for r in report.rows if r.role == "kernel" and r.tensor == "dq"]
    assert any("autograd" in (r.claim or "") for r in rows)
    assert report.outcome is Outcome.PASSED
