"""The mechanism of biased rounding in brief: benchmarks/biased_rounding.py has the tables.

Biases are judged by intervals over 20 fixed seeds, each with 8 heads of 64 features: 512 draws of
the tied significands, of which an error of 0.3 ulp leaves 0.013 a seed and 0.003 in all.
"""

from __future__ import annotations

import importlib
from fractions import Fraction
from itertools import product as pairs
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from numdev.diagnose.cures import CURES
from numdev.formats import format_named, round_to
from numdev.kernels import find
from numdev.kernels.emulation.recipe import Recipe, changed, recipe
from numdev.kernels.reference import gradients
from numdev.report.statistics import interval

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SEEDS = tuple(range(20))
SOME = 0.05
"""What counts as a bias, in ulps."""


def of_benchmarks(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def bench() -> Any:
    return of_benchmarks("biased_rounding")


@pytest.fixture(scope="module")
def sums() -> Any:
    return of_benchmarks("tied_sums")


@pytest.fixture(scope="module")
def measures() -> Any:
    return of_benchmarks("biased_measures")


# --- the exact sum -------------------------------------------------------------------------------


def test_the_papers_sum_bit_for_bit(bench: ModuleType) -> None:
    """-2.40625 - 2.296875 less a residual of 1815 * 2^-21, in the emulation of the paper's code:
    its P V, before and after, and the O that comes of it; without the residual it is a tie."""
    made = recipe("qiu2025")
    before, after = (x.item() for x in bench.product(bench.vector(residual=True), made))
    assert (before, after) == (-4.703990459442139, -4.71875)
    assert after - before == -0.014759540557861328
    assert Fraction(before) == -(Fraction("4.703125") + Fraction(1815, 2**21))
    before, after = (x.item() for x in bench.product(bench.vector(residual=False), made))
    assert (before, after) == (-4.703125, -4.6875)
    assert after - before == 0.015625
    sites = {"pv": "working", "out": "exact"}
    out, _ = bench.attend(bench.vector(residual=False), recipe("exact", sites=sites))
    assert out.item() == -4.6875 / 2


def test_what_is_not_rounded_there_has_no_error(bench: ModuleType) -> None:
    """The same sum in fp32, as production kernels keep it, is exact."""
    before, after = bench.product(bench.vector(residual=True), recipe("fa2"))
    assert before.item() == after.item() == -4.703990459442139


# --- the closed form -----------------------------------------------------------------------------


def test_every_pair_by_the_format_itself(sums: ModuleType) -> None:
    """All 128^2 pairs with a tail, rounded by `round_to`, against the enumeration in rationals, and
    both against the closed form. (Sums and tail fit in fp64 exactly.)"""
    tail = Fraction(7, 64)
    values = torch.tensor([a + b + 7 / 64 for a, b in pairs(range(128, 256), repeat=2)]).double()
    errors = round_to(values, format_named("bfloat16")) - values
    mean = Fraction(float(errors.sum())) / len(values) / 2  # an ulp is 2 here
    assert mean == sums.mean_error(2, tail) == sums.closed_form(tail / 2)


@pytest.mark.parametrize("tail", [Fraction(1, 10**9), Fraction(1, 3), Fraction(999, 1000)])
def test_the_closed_form_is_exact(sums: ModuleType, tail: Fraction) -> None:
    """Two values: 1/4 ulp less the tail, for any tail below half an ulp (1 unit)."""
    assert sums.mean_error(2, tail) == Fraction(1, 4) - tail / 2


def test_the_closed_form_ends_where_it_says(sums: ModuleType) -> None:
    """Without a tail ties go either way and nothing is left; at half an ulp and more the form no
    longer holds."""
    assert sums.mean_error(2, Fraction(0)) == 0
    assert sums.mean_error(2, Fraction(3, 2)) != sums.closed_form(Fraction(3, 4))


@pytest.mark.parametrize(("count", "bits"), [(2, 1), (4, 2), (8, 3)])
def test_more_ties_less_bias(sums: ModuleType, count: int, bits: int) -> None:
    """A vanishing tail leaves 2^-(bits + 1) ulp where the sum of `count` drops `bits` bits (all
    sums of that many do, from one binade)."""
    tail = Fraction(1, 10**12)
    assert abs(sums.mean_error(count, tail) - Fraction(1, 2 ** (bits + 1))) <= tail


@pytest.mark.parametrize(
    ("x", "rounded"), [(257, 256), (259, 260), (511, 512), (Fraction(2571, 10), 258), (255, 255)]
)
def test_rational_rounding(sums: ModuleType, x: Any, rounded: int) -> None:
    """Ties to even, over a binade's end too."""
    assert sums.nearest(Fraction(x)) == rounded


@pytest.mark.parametrize("count", [2, 3, 4])
def test_simulation_agrees(bench: ModuleType, sums: ModuleType, count: int) -> None:
    """P V of `emulated` errs by what enumeration says, within the interval over seeds widened to
    99.9 %: times 1.9, for 19 degrees of freedom; and not by a tenth of an ulp more."""
    errors, tau = bench.simulated(count, 1e-3, SEEDS)
    exact = float(sums.mean_error(count, Fraction(tau) * 128))
    mean, low, high = interval(errors)
    assert low is not None
    assert high is not None
    assert abs(mean - exact) <= 1.9 * (high - low) / 2 < 0.05


# --- presets -------------------------------------------------------------------------------------


def found(values: list[float]) -> int:
    """1 or -1 where the interval lies beyond SOME on that side, 0 where it lies within; else it
    fails."""
    _, low, high = interval(values)
    assert low is not None
    assert high is not None
    if low > SOME or high < -SOME:
        return 1 if low > SOME else -1
    assert -SOME < low <= high < SOME, (low, high)
    return 0


def test_the_judge_rejects() -> None:
    """A bias is told from none and from its opposite, and what is undecided passes as neither."""
    noise = [0.01, -0.01] * 10
    assert found([x + 0.2 for x in noise]) == 1
    assert found([x - 0.2 for x in noise]) == -1
    assert found(noise) == 0
    with pytest.raises(AssertionError):
        found([x + SOME for x in noise])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qiu2025", {"alike": 1, "no tail": 0, "small": 1, "large": 1}),
        ("eager", {"alike": 1, "no tail": 0, "small": 1, "large": 1}),
        ("fa2", {"alike": 0, "no tail": 0, "small": 1, "large": -1}),
        ("one correct cast", {"alike": 0, "no tail": 0, "small": 1, "large": -1}),
        ("qiu2025, stabilised", {"alike": 0, "no tail": 0, "small": 0}),
    ],
)
def test_where_o_is_biased(bench: ModuleType, name: str, expected: dict[str, int]) -> None:
    """Two ties, a tail of 1e-4: un-normalised P V in bf16 and normalised P both give O an error
    away from zero; one cast only where the ties have smaller |V|, and towards zero where they have
    larger; correct rounding does the same. Nothing without a tail."""
    inputs = {
        "alike": {"tail": 1e-4},
        "no tail": {"tail": 0.0},
        "small": {"tail": 1e-4, "value": 0.125},
        "large": {"tail": 1e-4, "value": 8.0},
    }
    assert {n: found(bench.out_bias(name, SEEDS, **inputs[n])) for n in expected} == expected


def test_where_p_v_is_biased(bench: ModuleType) -> None:
    """In the paper's code; not in fp32, nor under a softmax that keeps P below 1."""
    names = ("qiu2025", "fa2", "qiu2025, stabilised")
    assert [found(bench.pv_bias(name, SEEDS, tail=1e-4)) for name in names] == [1, 0, 0]


def test_no_ties_are_needed(bench: ModuleType) -> None:
    """One key with P = 1 whose V is a number of the format, and a tail of the same sign below half
    an ulp: every rounding takes the tail away, towards zero."""
    options = {"tail": 1e-4, "value": 0.125, "count": 1}
    assert found(bench.out_bias("one correct cast", SEEDS, **options)) == -1


def test_a_shift_trades_one_error_for_another(bench: ModuleType) -> None:
    """Under the stabilised softmax with l in fp32, P at the ties is rounded and l is not: O errs by
    that at each tied score, some 0.2 to 0.4 ulp, of either sign."""
    made = changed(CURES["stabilised"].of(recipe("qiu2025")), sites=bench.L_IN_FP32)
    values = bench.out_of(bench.drawn((("tail", 1e-4),), SEEDS), made)
    assert min(values) < -0.2
    assert max(values) > 0.2
    assert 0.2 < sum(map(abs, values)) / len(values) < 0.4


# --- backward ------------------------------------------------------------------------------------

TWO_TIES = (("value", 0.125), ("tail", 1e-3))


def dq_error(bench: ModuleType, made: Recipe, formula: str) -> float:
    """|dQ error| / |dQ|, mean over seeds."""
    *_, dq = bench.backward_of(made, formula, TWO_TIES, SEEDS[:6])
    return float(interval(dq)[0])


def test_delta_from_dp_cures_what_it_is_consistent_with(bench: ModuleType) -> None:
    """dQ's error from rounding dP or O alone falls by a factor of ten and more with
    rowsum(dP o P). In the paper's code only if l and the products of delta are not rounded: P must
    sum to one, and the sum be that of what it is subtracted from."""
    for sites in bench.ROUNDED.values():
        made = recipe("exact", sites=dict(sites))
        assert dq_error(bench, made, "dP*P") < 0.1 * dq_error(bench, made, "dO*O")
    paper = recipe("qiu2025")
    before = dq_error(bench, paper, "dO*O")
    assert dq_error(bench, paper, "dP*P") > 0.2 * before
    assert dq_error(bench, changed(paper, sites=bench.CONSISTENT), "dP*P") < 0.1 * before


def test_the_step_is_that_of_emulated(measures: ModuleType) -> None:
    """What the benchmark takes apart gives the numbers of the kernel `emulated`; delta's error by
    rowsum(dO o O) is that of O, and by rowsum(dP o P) with nothing rounded there is none."""
    case = measures.case_of({"tail": 0.1}, seeds=(0, 1), heads=2)
    for preset in ("qiu2025", "fa2", "eager"):
        taken = measures.step(case, recipe(preset))
        output = find("emulated").gradients(case, preset=preset)
        assert torch.equal(taken.out, output.out.double())
        assert output.dq is not None
        assert torch.equal(taken.dq, output.dq.double())
    made = recipe("exact", sites={"out": "working", "delta_o": "working"})
    taken = measures.step(case, made)
    assert torch.allclose(taken.delta, measures.delta_from(case, taken.out), rtol=1e-12)
    exact = measures.step(case, recipe("exact", delta_from="dP*P")).delta
    assert torch.allclose(exact, measures.delta_from(case, gradients(case).out), rtol=1e-12)


# --- real kernels --------------------------------------------------------------------------------


def test_pushed_finds_an_error_of_delta(measures: ModuleType) -> None:
    """Where delta alone is wrong by a known e_T, the projection of dQ's error on -scale P K is e_T;
    and of an error across that direction it is 0."""
    kernels = of_benchmarks("biased_kernels")
    case = measures.case_of({"tail": 0.1}, seeds=(0,), heads=2)
    exact = gradients(case)
    e = torch.linspace(-1.0, 2.0, 16, dtype=torch.float64).reshape(1, 2, 8)
    PK = kernels.weighted_keys(case)
    wrong = exact.dq - case.scale * e[..., None] * PK
    assert torch.allclose(kernels.pushed(case, exact, wrong), e, atol=1e-9)
    across = torch.randn(PK.shape, generator=torch.Generator().manual_seed(0)).double()
    across -= (across * PK).sum(-1, keepdim=True) / PK.square().sum(-1, keepdim=True) * PK
    assert float(kernels.pushed(case, exact, exact.dq + across).abs().max()) < 1e-9


def test_sdpa_carries_the_bias_where_its_claim_does(measures: ModuleType) -> None:
    """PyTorch's fused CPU kernel on ties with small V: O's bias is that of its emulation, and the
    error of its dQ is the error of delta that this makes."""
    kernels = of_benchmarks("biased_kernels")
    case = measures.case_of({"tail": 1e-4, "value": 0.125}, seeds=SEEDS[:8], rows=16)
    exact = gradients(case)
    output = find("sdpa-flash").gradients(case)
    assert found(measures.outward(output.out, exact.out, case.format)) == 1
    size = measures.delta_size(case, exact)
    own = (measures.delta_from(case, output.out) - measures.delta_from(case, exact.out)) / size
    along = kernels.pushed(case, exact, output.dq) / size
    # dS is rounded to bf16 before its products, at random: some 1e-4 of delta in a row, 1e-5 in the
    # mean of a sequence's 128, where the push is 9e-4.
    assert torch.allclose(along.mean(dim=(1, 2)), own.mean(dim=(1, 2)), rtol=0.05)
    assert not torch.allclose(along.mean(dim=(1, 2)), 0.9 * own.mean(dim=(1, 2)), rtol=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "triton-flash"])
def test_gpu_kernels_are_biased_where_correct_rounding_is(measures: ModuleType, name: str) -> None:
    """Ties with small V: O is biased away from zero, whoever rounds it once."""
    case = measures.case_of({"tail": 1e-4, "value": 0.125}, seeds=SEEDS, rows=64, device="cuda")
    output = find(name).attend(case)
    assert found(measures.outward(output.out, gradients(case).out, case.format)) == 1
