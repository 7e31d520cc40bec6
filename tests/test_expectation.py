"""What a kernel's errors should be: expected_ratio and worst_row."""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from on_bench import THIS_CPU, prepare, rows_on
from recipes import drawn as drawn_case

from numdev.cases import AttentionCase
from numdev.formats import dtype_of, format_named
from numdev.kernels import Kernel, find
from numdev.kernels import sdpa as module
from numdev.kernels.emulation.kernel import (
    emulated_step,
    recipe_of,
    returning,
    unpredictable,
)
from numdev.kernels.reference import attend, gradients
from numdev.kernels.reference.blocked import Reference
from numdev.metrics.deviation import measure
from numdev.metrics.yardstick import Yardstick

unexpected = partial(unpredictable, of_size=True)
BF16, FP32 = format_named("bfloat16"), format_named("float32")


def training(
    regime: str = "normal", *, fmt: str = "bfloat16", length: int = 300, **fields: Any
) -> AttentionCase:
    passed = {
        "head_dim": 32,
        "is_causal": True,
        "dtype": dtype_of(format_named(fmt)),
        **fields,
    }
    return drawn_case(length, regime, **passed)


def yardstick_of(exact: Reference) -> Yardstick:
    shown = {"term_scale": exact.term_scale, "empty": exact.empty}
    return Yardstick(reference=exact.out, format=BF16, **shown)


def test_the_baseline_runs_in_float32_too() -> None:
    """Of the inputs before they are rounded; no format wide enough to hold float32 has
    one."""
    case = drawn_case(12, "normal", dtype=torch.float64, head_dim=8, is_causal=True)
    hidden = torch.ones(12, 12).triu(1).bool()
    scores = (case.q @ case.k.mT * case.scale).masked_fill(hidden, -math.inf)
    wide = prepare(case, "bfloat16").yardsticks["out"].baseline_fp32
    assert wide.dtype == torch.float32
    assert torch.allclose(
        wide.double(), scores.softmax(-1) @ case.v, rtol=1e-5, atol=1e-6
    )
    assert prepare(case, "float32").yardsticks["out"].baseline_fp32 is None


def test_the_metrics_are_their_definitions() -> None:
    """expected_ratio, rms_ratio, its rows and worst_row in numpy, row by row."""
    exact = attend(training(length=20, batch=2, heads=3))
    yardstick = yardstick_of(exact)
    generator = torch.Generator().manual_seed(1)
    predicted = (
        exact.out + 1e-3 * torch.randn(exact.out.shape, generator=generator).double()
    )
    output = exact.out + 2e-3 * torch.randn(exact.out.shape, generator=generator).double()
    output[1, 2, 7] += 0.1

    def sizes(x: torch.Tensor) -> Any:
        """[heads, batch and rows]"""
        return np.linalg.norm(x.transpose(0, 1).flatten(1, 2).numpy(), axis=-1)

    terms, least = sizes(exact.term_scale), 2.0**-8 / math.sqrt(12) * sizes(exact.out)
    actual, expected = sizes(output - exact.out), sizes(predicted - exact.out)
    rel = [np.sqrt(((x / terms) ** 2).mean(axis=1)) for x in (actual, expected, least)]
    typical = np.maximum(rel[1], rel[2])
    allowed = np.maximum(np.maximum(expected, typical[:, None] * terms), least)
    worst = (actual / allowed).max(axis=1)
    result = measure(output, yardstick, predicted).heads
    assert [h["expected_ratio"] for h in result] == pytest.approx(
        rel[0] / typical, rel=1e-12
    )
    assert [h["worst_row"] for h in result] == pytest.approx(worst, rel=1e-12)
    share = (actual / terms) ** 2
    rows = share.sum(axis=1) ** 2 / (share**2).sum(axis=1)
    assert [h["error_rows"] for h in result] == pytest.approx(rows, rel=1e-12)
    assert worst[2] > 10
    plain = [(x**2).sum(axis=1) for x in (actual, expected, least)]
    ratios = np.sqrt(plain[0] / np.maximum(plain[1], plain[2]))
    assert [h["rms_ratio"] for h in result] == pytest.approx(ratios, rel=1e-12)
    weight = np.maximum(expected, least) ** 2
    rows = weight.sum(axis=1) ** 2 / (weight**2).sum(axis=1)
    assert [h["rms_rows"] for h in result] == pytest.approx(rows, rel=1e-12)
    assert all(1 <= n < 40 for n in rows)


def test_an_exact_prediction_still_leaves_a_rounding() -> None:
    """Where the emulation makes no error at all (V = 1), one rounding is not infinite."""
    case = training(length=40)
    exact = attend(dataclasses.replace(case, v=torch.ones_like(case.v)))
    yardstick = yardstick_of(exact)
    result = measure(exact.out + 2.0**-9, yardstick, exact.out.float()).heads[0]
    assert result["expected_ratio"] == pytest.approx(math.sqrt(12) * 2.0**-9 / 2.0**-8)


def test_what_underflows_counts_for_nothing_but_garbage_there_is_seen() -> None:
    """What fp32 flushes is no error; a number where nothing belongs is the worst row."""
    generator = torch.Generator().manual_seed(1)
    exact = torch.randn((1, 1, 6, 8), generator=generator).double()
    exact[0, 0, 2] *= 2.0**-120
    exact[0, 0, 4] = 0.0
    none = torch.zeros(exact.shape[:3], dtype=torch.bool)
    yardstick = Yardstick(
        reference=exact, term_scale=exact.abs(), empty=none, format=BF16
    )
    predicted = yardstick.floor.float()
    flushed = predicted.clone()
    flushed[0, 0, 2] = 0.0
    result = measure(flushed, yardstick, predicted).heads[0]
    assert (result["expected_ratio"], result["worst_row"]) == pytest.approx((1.0, 1.0))
    for row, value in ((2, 1e-3), (4, 1e-3), (4, 1e-20)):
        garbage = predicted.clone()
        garbage[0, 0, row] = value
        seen = measure(garbage, yardstick, predicted).heads[0]
        assert seen["worst_row"] > 1e6
        assert seen["row_rel"] == pytest.approx(result["row_rel"], rel=0.3)


# Tiles of 32, 64 and 256 rows, keys too few for the fast exp, odd head_dims, a group.
SHAPES: tuple[dict[str, Any], ...] = (
    *({"length": n} for n in (9, 33, 191, 768)),
    *({"head_dim": 80}, {"head_dim": 128}, {"kv_heads": 1}, {"is_causal": False}),
)
KINDS: tuple[dict[str, Any], ...] = (
    *({}, {"logits": 4.0}, {"logits": 16.0}),
    *({"regime": name} for name in ("outliers", "sink", "ties", "one_sign")),
)


BIAS = torch.randn(300, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
# Every site of `eager` at work: what PyTorch's kernels do not take.
OF_BASELINE: tuple[dict[str, Any], ...] = (
    *(
        {"softcap": 3.3, "logits": 4.0},
        {"mask": BIAS},
        {"mask": BIAS > -0.5, "kv_heads": 1},
    ),
    *({"sinks": BIAS[0, :2]}, {"logits": 8.0}),
)
CLAIMED = [
    *({"fmt": fmt, **kind} for fmt in ("bfloat16", "float16") for kind in KINDS),
    *({"logits": 2.0, **shape} for shape in SHAPES),
]


@pytest.mark.parametrize(("name", "fields"), [
    *itertools.product(("sdpa-flash", "sdpa-math", "baseline"), CLAIMED),
    *(("baseline", fields) for fields in OF_BASELINE),
])  # fmt: skip
@pytest.mark.one_in(3)
def test_real_kernels_err_as_their_claim_predicts(
    name: str, fields: dict[str, Any]
) -> None:
    """In every head the output's error is within 3 % of the prediction and a gradient's
    within 5 %; and element by element at most 0.15 and 0.25 of them are left over
    (measured 0.05 and 0.10; by another tile or exp 0.27), in float16 0.2 and 0.4 (0.12
    and 0.28): boundaries are eight times as dense there."""
    case = training(**fields)
    exact, output = gradients(case), find(name).gradients(case)
    predicted = emulated_step(case, find(name).claims(case, output, THIS_CPU) or {})
    for tensor, x in predicted.items():
        r, result = getattr(exact, tensor), getattr(output, tensor)
        yardstick = Yardstick(
            reference=r,
            term_scale=exact.term_scale
            if tensor == "out"
            else getattr(exact, f"{tensor}_terms"),
            empty=exact.empty if tensor in ("out", "dq") else exact.unseen,
            format=case.format,
        )
        for head in measure(result, yardstick, x).heads:
            most = 0.03 if tensor == "out" else 0.05
            assert head["expected_ratio"] == pytest.approx(1.0, abs=most), tensor
            assert tensor != "out" or head["worst_row"] < 2.5
        left = (result.double() - x.double()).norm() / (result.double() - r).norm()
        most = {"bfloat16": (0.15, 0.25), "float16": (0.2, 0.4)}[case.format.name]
        assert left <= most[tensor != "out"], tensor


def test_a_grouped_gradient_cast_by_head_errs_by_a_quarter_more() -> None:
    """Three roundings for one: with P rounded, sqrt((p + 2 c) / (p + c)), c = 1.2 p."""
    case = training(kv_heads=1, length=600)
    exact, errors = gradients(case), {}
    for value in ("working", "exact"):
        dv = emulated_step(case, {"preset": "fa2", "dv_partial": value})["dv"]
        errors[value] = float((dv - exact.dv).norm() / exact.dv.norm())
    assert 1.15 < errors["working"] / errors["exact"] < 1.35
    claim = module.flash_attention_2(case, THIS_CPU)
    assert recipe_of(claim).sites["dv_partial"] == "working"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"logits": 16.0}])
def test_in_float32_a_size_is_expected(options: Any) -> None:
    """An upper bound on what arithmetic errs, far below the error of scores rounded to
    bf16."""
    case = training(fmt="float32", length=200, **options)
    bench = prepare(case)
    rounded = lambda case: find("emulated").attend(case, block_kv=64, scores="bfloat16")  # noqa: E731
    for tried, low, high in (
        (find("sdpa-flash"), 0.0, 1.5),
        (find("sdpa-math"), 0.0, 1.5),
        (Kernel(name="coarse", function=rounded), 30.0, math.inf),
    ):
        rows = [r for r in rows_on(bench, tried) if r.tensor == "out"]
        assert len(rows) == case.heads
        assert all(low < r.expected_ratio <= high for r in rows), tried.name


def test_nothing_is_expected_where_nothing_is_known() -> None:
    """In float32 arithmetic rules, in float64 the reference's own; the row says why."""
    fa2, fp64 = {"preset": "fa2"}, format_named("float64")
    math_ = {
        "preset": "exact",
        **dict.fromkeys(("out", "dq_out", "dk_out", "dv_out"), "working"),
    }
    for claim, passed, back, why in (
        (fa2, FP32, FP32, unpredictable), (None, BF16, BF16, unpredictable),
        ({"preset": "exact", "out": "working"}, BF16, FP32, unpredictable),
        (math_, BF16, FP32, unpredictable), ({**math_, "p": "wide"}, BF16, FP32, unpredictable),
        (None, FP32, FP32, unexpected), (fa2, fp64, fp64, unexpected),
    ):  # fmt: skip
        assert why(claim, passed, back) is not None
    for claim, passed, back, why in (
        (fa2, BF16, FP32, unpredictable), (math_, BF16, BF16, unpredictable),
        ({**math_, "p": "float16"}, BF16, FP32, unpredictable),
        (fa2, FP32, FP32, unexpected), (fa2, BF16, BF16, unexpected),
    ):  # fmt: skip
        assert why(claim, passed, back) is None
    row = rows_on(prepare(training(length=20)), find("emulated"))[0]
    assert row.expected_ratio is None
    assert "no emulation" in row.nulls["expected_ratio"]


def test_returning_knows_the_casts_of_gradients() -> None:
    """Each tensor's own; delta is made from the O returned, unless the claim has another
    idea."""
    case, claim = training(length=9), {"preset": "fa2"}
    wide, same = format_named("float32"), case.format
    formats = {"out": same, "dq": wide, "dk": same, "dv": format_named("float16")}
    assert returning(claim, case, same) == claim
    assert returning(claim, case, format_named("float16"))["out"] == "float16"
    assert returning(claim, case, formats) == {
        **claim,
        "dq_out": "exact",
        "dv_out": "float16",
    }
    assert returning(claim, case, {"out": wide}) == {
        **claim,
        "out": "exact",
        "delta_o": "exact",
    }
    passed = {**claim, "delta_o": "e8m3"}
    assert returning(passed, case, {"out": wide}) == {**passed, "out": "exact"}
