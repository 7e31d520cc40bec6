"""Suspicion names planted mistakes rightly and leaves sound kernels alone.

The tables of benchmarks/suspicion_rates.py, at a size for every day: its full run is 486
units."""

from __future__ import annotations

import dataclasses
import math
import re
from types import SimpleNamespace
from typing import Any

import planted
import pytest
import torch
from loaded import load
from on_bench import THIS_CPU, prepare, task_of
from oracles import make_case
from planted import CATALOGUE
from planted.function import calls_of

import numdev
from numdev.cases import AttentionCase, CaseRef, visible
from numdev.kernels import find, kernel_of_function
from numdev.kernels.output import Output
from numdev.kernels.reference import attend, gradients
from numdev.operations.attention.explain import wrong_function
from numdev.operations.attention.explain.alternative_outputs import in_digits
from numdev.operations.attention.explain.call_sample import Alternative
from numdev.operations.attention.explain.mistakes import variants
from numdev.operations.attention.explain.wrong_function import CUT, far_off, suspect
from numdev.operations.attention.explain.wrong_gradients import suspect_gradients
from numdev.sources.upstream_gradients import with_drawn_gradient
from numdev.studies.audit.case_measurement import measure_task

rates = load("benchmarks/suspicion_rates.py")
CAUSAL = (("is_causal", True),)
LOST_IN_ROUNDING = {("scale-101", "bfloat16")}
"""One bfloat16 rounding of the output is more than a tenth of what this mistake does."""


@pytest.mark.parametrize("fmt", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("entry", "shape"), rates.PLANTED, ids=lambda x: getattr(x, "name", "")
)
@pytest.mark.one_in(5)
def test_a_planted_mistake_is_named(entry, shape, fmt: str) -> None:
    """Every planted wrong function is named by its own cause, and by no other."""
    case = rates.make(shape, "normal", fmt, 0)
    words = rates.judge(case, rates.wrong(entry, case), attend(case), always=False)
    hidden = (entry.name, fmt) in LOST_IN_ROUNDING
    assert rates.verdict(entry, words) == ("none" if hidden else "right"), words


@pytest.mark.parametrize("scale", [0.0, 1e-310])
def test_a_factor_of_a_gradient_is_none_of_a_scale_without_a_reciprocal(
    scale: float,
) -> None:
    case = with_drawn_gradient(make_case(dtype=torch.float32, scale=scale), 3)
    exact = gradients(case)
    out = attend(case).out.float()
    step = Output(out=out, dq=exact.dq, dk=exact.dk, dv=exact.dv * 1.37)
    by_name = suspect_gradients(case, step)
    assert {name: each.cause for name, each in by_name.items()} == {
        "dv": "dv is 1.37 times what it should be"
    }


@pytest.mark.parametrize("regime", rates.REGIMES)
@pytest.mark.parametrize("shape", [
    rates.Shape(batch=1, heads=2, kv_heads=1, q_len=24, kv_len=24, changes=CAUSAL),
    rates.Shape(batch=1, heads=2, kv_heads=2, q_len=5, kv_len=2),
], ids=["grouped, causal", "two keys"])  # fmt: skip
def test_sound_kernels_are_not_accused(shape, regime: str) -> None:
    """No sound kernel is accused, though the search is forced on every head."""
    case = rates.make(shape, regime, "bfloat16", 7)
    for name in ("sdpa-flash", "baseline"):
        out = find(name).attend(case).out
        assert rates.judge(case, out, attend(case), always=True) == ["none"], name


def test_causes_that_coincide_are_all_named() -> None:
    """With two kv heads the next one is the previous one: mappings that agree are one
    cause; and one query head per kv head cannot tell a rolled from a reversed order."""
    case = rates.make(rates.Shape(heads=2, kv_heads=2), "normal", "float32", 0)
    out = attend(
        dataclasses.replace(case, k=case.k.flip(1), v=case.v.flip(1))
    ).out.float()
    names = rates.judge(case, out, attend(case), always=False)
    assert names == ["query heads read the next kv head"]


def test_one_wrong_head_is_the_only_one_accused() -> None:
    """A mistake in one head is found in that head, and the others are cleared."""
    case = rates.make(rates.SHAPES["plain"], "normal", "bfloat16", 0)
    out = rates.wrong(CATALOGUE["scale-of-one-head"], case)
    every = list(range(case.heads))
    result = suspect(case, out, attend(case), every, every)
    assert list(result) == [1]
    assert result[1].cause == "the scale is 1.031 times the requested one"
    assert result[1].cut >= CUT


def test_outputs_that_are_not_finite() -> None:
    """NaN in some rows does not hide the cause; NaN everywhere names none."""
    case = rates.make(rates.SHAPES["causal"], "normal", "float32", 0)
    out = rates.wrong(CATALOGUE["causal-minus1"], case)
    out[:, :, 0] = math.nan  # which sees nothing
    assert "too few" in rates.judge(case, out, attend(case), always=False)[0]
    nothing = torch.full_like(out, math.nan)
    assert suspect(case, nothing, attend(case), [0, 1, 2, 3], [0]) == {}


@pytest.mark.parametrize(("floors", "baselines", "far"), [
    (9.9, 100, False), (150, 1.9, False), (10, 2, True), (10, None, True), (None, 5, False),
])  # fmt: skip
def test_when_a_search_begins(
    floors: float | None, baselines: float | None, far: bool
) -> None:
    """Ten floors are needed for a tenfold cut; what the baseline errs as well is
    rounding."""
    assert far_off({"floor_ratio": floors, "baseline_ratio": baselines}) == far


@pytest.mark.parametrize(("fit", "best"), [(79.0, [40.0, 30.0]), (81.0, [81.0])])
def test_the_best_explanations_come_first(
    monkeypatch: pytest.MonkeyPatch, fit: float, best: list[float]
) -> None:
    """Of mistakes that cut the error 12, 40 and 30 times: the last two, the larger cut
    first. Since these are two, an estimated factor is named instead if it explains twice
    as much."""
    cuts = [Alternative(f"cut {x}", lambda probe, x=x: x) for x in (12.0, 40.0, 30.0)]
    monkeypatch.setattr(wrong_function, "alternatives", lambda probe: cuts)
    monkeypatch.setattr(
        wrong_function,
        "estimated",
        lambda probe: [(Alternative("a factor", probe.cut), fit)],
    )
    monkeypatch.setattr(wrong_function, "scales", lambda case: [])
    probe: Any = SimpleNamespace(case=None, cut=lambda output: output)
    result = wrong_function._explaining_alternatives(probe)
    assert [cut for _, cut in result] == best


@pytest.mark.parametrize(("function", "tensor", "cause"), [
    (planted.scale_1001, "out", "the scale is 1.0010 times the requested one"),
    (planted.dq_without_scale, "dq", "dq lacks the scale"),
    (planted.delta_missing, "dk",
     "in the backward pass, delta, the row sum of dO·O, is left out"),
    (planted.sound, "out", None),
])  # fmt: skip
def test_what_bfloat16_hides_is_named(function, tensor: str, cause: str | None) -> None:
    """From the same call in float32; gradients by their own mistake; a sound kernel by
    nothing."""
    case = rates.make(rates.SHAPES["causal"], "normal", "bfloat16", 0)
    bench = prepare(with_drawn_gradient(case, 0), "bfloat16", gradients=True)
    kernel = kernel_of_function("mine", function)
    rows = measure_task(task_of(bench, kernel), kernel, bench, THIS_CPU).rows
    assert {r.suspicion for r in rows if r.tensor == tensor} == {cause}
    assert all(r.suspicion is None for r in rows if r.role != "kernel")


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    *("window-tiles", "sinks-of-head-0", "sinks-zero", "epsilon-1e1", "stale-sum"),
    *("lse-without-sinks", "lse-without-maximum", "backward-without-slope", "backward-kv-modulo"),
])  # fmt: skip
@pytest.mark.one_in(9)
def test_a_fault_is_named_by_its_class(name: str) -> None:
    """One of a class that is no case, or of another tensor, in a call of an audit."""
    entry = CATALOGUE[name]
    result = numdev.check(entry.function, cases=calls_of(entry)[-1:])
    causes = {row.suspicion for row in result.report.rows if row.suspicion}
    assert causes
    assert all(re.search(str(entry.says), cause) for cause in causes), causes


@pytest.mark.slow
def test_a_wrong_output_is_searched_though_gradients_err_more_elsewhere() -> None:
    """Of 577 keys the last one is missed in a gradient alone, where it errs 89 times as
    much as it should; of 193 in the output, by which it is named."""
    result = numdev.check(planted.tail_192, cases=["long", "causal"], formats="bfloat16")
    assert {f.cause for f in result.report.findings} == {"the last key is dropped"}


@pytest.mark.slow
def test_an_error_without_a_name_is_said_to_have_none() -> None:
    """Noise is no known mistake, in 16 bits or in float32, in whichever call."""
    bench = prepare(
        rates.make(rates.SHAPES["plain"], "normal", "bfloat16", 0), "bfloat16"
    )
    kernel = kernel_of_function(
        "mine", lambda q, k, v: planted.sound(q, k, v)[0] + q.cos()
    )
    for _ in range(2):
        row = measure_task(task_of(bench, kernel), kernel, bench, THIS_CPU).rows[0]
        assert row.nulls["suspicion"].startswith("none of the mistakes")


def drawn_call(**changes: Any) -> AttentionCase:
    """Four query heads on two kv heads, 12 queries, 12 keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 12, 8, generator=generator) for h in (4, 2, 2))
    usual: dict[str, Any] = {
        "ref": CaseRef(case="c"),
        "q": q,
        "k": k,
        "v": v,
        "scale": 0.3,
    }
    return AttentionCase(**{**usual, **changes})


def mistaken(case: AttentionCase) -> dict[str, AttentionCase]:
    return dict(variants(case))


def keys_of_row(case: AttentionCase, row: int) -> list[int]:
    """Which keys a row of a call sees, by their places."""
    shown = visible(case, slice(row, row + 1), slice(0, case.kv_len))
    if shown is None:
        return list(range(case.kv_len))
    return shown.expand(2, 4, 1, case.kv_len)[0, 0, 0].nonzero()[:, 0].tolist()


def test_a_causal_mask_aligned_to_the_last_key_shows_it_to_the_last_query() -> None:
    """Five queries over twelve keys: the first one sees eight of them, where the call
    itself shows one or all."""
    few = drawn_call().q[:, :, :5]
    asked = mistaken(drawn_call(q=few, is_causal=True))
    unasked = mistaken(drawn_call(q=few))
    added = "a causal mask is applied that was not requested (aligned bottom-right)"
    for case in (asked["the causal mask is aligned bottom-right"], unasked[added]):
        assert keys_of_row(case, 0) == list(range(8))
        assert keys_of_row(case, 4) == list(range(12))


def test_a_mask_that_is_off_shows_what_its_name_says() -> None:
    """By one key too many or too few, at the diagonal and at the left end of a window."""
    last = drawn_call(q=drawn_call().q[:, :, -1:], is_causal=True, causal_offset=11)
    few = mistaken(last)["the causal mask is off by one: each query sees one key too few"]
    assert keys_of_row(few, 0) == list(range(11))
    whole = mistaken(drawn_call(is_causal=True, causal_offset=0))
    for step, words in ((1, "too many"), (-1, "too few")):
        name = f"the causal mask is off by one: each query sees one key {words}"
        assert keys_of_row(whole[name], 5) == list(range(6 + step))
    window = mistaken(drawn_call(window=(3, 1)))
    shifted = {"wide on the left": range(2, 8), "narrow on the left": range(4, 8),
               "wide on the right": range(3, 9), "narrow on the right": range(3, 7)}  # fmt: skip
    for words, keys in shifted.items():
        assert keys_of_row(window[f"the window is one key too {words}"], 6) == list(keys)
    assert keys_of_row(drawn_call(window=(3, 1)), 6) == list(range(3, 8))


def test_a_wrong_head_is_the_one_that_is_named() -> None:
    """Of three kv heads and three sinks the next, the previous, or the first."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 12, 8, generator=generator) for h in (6, 3, 3))
    result = mistaken(drawn_call(q=q, k=k, v=v, sinks=torch.arange(6.0)))
    for words, heads in (
        ("the next kv head", [1, 1, 2, 2, 0, 0]), ("the previous kv head", [2, 2, 0, 0, 1, 1]),
        ("kv head 0 instead of their own", [0] * 6),
    ):  # fmt: skip
        assert torch.equal(result[f"query heads read {words}"].v, v[:, heads])
    for words, sinks in (("next", [1, 2, 3, 4, 5, 0]), ("previous", [5, 0, 1, 2, 3, 4])):
        case = result[f"query heads get the sink of the {words} one"]
        assert case.sinks is not None
        assert case.sinks.tolist() == sinks


def test_a_factor_of_log_2_is_on_the_side_that_is_named() -> None:
    """Without log2(e) before 2^x a term is multiplied by ln 2; with it before e^x divided
    by it."""
    sinks, ln2 = torch.tensor([1.0, 2.0, 3.0, 4.0]), math.log(2)
    bias = torch.linspace(-1, 1, 12).expand(12, 12)
    result = mistaken(drawn_call(sinks=sinks, mask=bias))
    for words, factor in (
        ("lacks log2(e) before an exponential to base 2", ln2),
        ("is multiplied by log2(e), although the exponential has base e", 1 / ln2),
        ("is scaled like the scores", 0.3),
    ):
        one, other = (
            result[f"the attention sink {words}"],
            result[f"the additive mask {words}"],
        )
        assert one.sinks is not None and other.mask is not None  # noqa: PT018
        assert torch.allclose(one.sinks, sinks.double() * factor)
        assert torch.allclose(other.mask, bias.double() * factor)
    scales = {
        "the exponential is to base 2 (the scale lacks log2(e))": 0.3 * ln2,
        "the scale has log2(e) in it, and the exponential is to base e": 0.3 / ln2,
        "the scale is applied twice": 0.09, "the scale is 1/head_dim": 1 / 8,
        "the scores are not scaled": 1.0,
    }  # fmt: skip
    assert {name: result[name].scale for name in scales} == pytest.approx(scales)


@pytest.mark.parametrize(("factors", "words"), [
    ((9999.8, 1e4, 10000.2), "10000"),
    ((0.099996, 0.1, 0.10001), "0.1"),
    ((1e9 - 1, 1e9, 1e9 + 1), "1e9"),
])  # fmt: skip
def test_a_factor_has_the_same_words_on_either_side_of_a_round_number(
    factors: tuple[float, ...], words: str
) -> None:
    """Else the heads of one mistake are two findings: dk 10000 and 1e4 times as large."""
    assert {in_digits(factor) for factor in factors} == {words}
