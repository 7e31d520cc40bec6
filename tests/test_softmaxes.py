"""The softmaxes of `emulated` that ties cannot bias: the stabilised one, its shift and
its limits, and the guarded one, which meets ties wherever they are and whatever the
scores' size.

That each is softmax: `test_emulated.py`; those of `triton-flash`:
`triton_flash_cases.py`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from recipes import drawn, watched
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef
from numdev.formats import FORMATS, round_to, ulp
from numdev.kernels import find
from numdev.kernels.emulation.forward import guarded_weights
from numdev.kernels.emulation.recipe import recipe
from numdev.kernels.reference import attend as reference

KERNEL = find("emulated")
GUARDED: dict[str, Any] = {"softmax": "guarded"}
STABILISED: dict[str, Any] = {"softmax": "stabilised"}
BF16, FP16 = FORMATS["bfloat16"], FORMATS["float16"]
SHIFTS = (-200, -105, -88, -24, -9, -1, 0, 1, 4, 9, 10, 24, 88, 200)
nan, inf = math.nan, math.inf


# --- the stabilised softmax -----------------------------------------------------------


def of_scores(scores: list[float], v: list[float], dtype: torch.dtype) -> AttentionCase:
    """One row with these scores, and V of one feature; all of them numbers of the
    dtype."""
    k, values = (
        torch.tensor(x, dtype=torch.float64).view(1, 1, -1, 1) for x in (scores, v)
    )
    passed = {
        "q": torch.ones(1, 1, 1, 1),
        "k": k,
        "v": values,
        "grad_out": torch.ones(1, 1, 1, 1),
    }
    tensors = {name: x.to(dtype) for name, x in passed.items()}
    return AttentionCase(ref=CaseRef(case="row"), scale=1.0, **tensors)


def test_the_running_maximum_hears_of_it() -> None:
    """P is exp(S - 2 r) in the tile that is tied and in all that come after, and what
    came before is rescaled to it: with V = 1 at one key alone the output is its weight in
    any case."""
    scores = [1.0, 0.5, 3.0, 3.0, 4.0, 2.0]
    weights = torch.tensor(scores).double().exp()
    with watched() as seen:
        for key in range(6):
            case = of_scores(scores, [float(key == j) for j in range(6)], torch.float64)
            out = KERNEL.attend(case, preset="exact", block_kv=2, **STABILISED).out
            assert out.item() == pytest.approx(
                (weights[key] / weights.sum()).item(), rel=1e-15
            )
    assert [x.item() for site, x in seen if site == "max"] == [1.0, 6.0, 4.0] * 6


@pytest.mark.parametrize(("dtype", "options", "least"), [
    (torch.float16, {}, 14), (torch.float16, {"p": "float32"}, 126), (torch.bfloat16, {}, 126),
    (torch.bfloat16, {"p": "exact"}, 126), (torch.bfloat16, {"exp": "exact"}, 126),
    (torch.bfloat16, {"exp": "float16"}, 14), (torch.float32, {"preset": "exact"}, 1022),
    (torch.float32, {"preset": "exact", "compute": "float32"}, 126),
])  # fmt: skip
def test_where_P_would_be_lost_the_row_is_nan(
    dtype: Any, options: Any, least: int
) -> None:
    """From (beta - 1) r beyond 2^-least, the smallest normal number of the formats P goes
    through, in output, log-sum-exp and gradients, and not before: there P is rounded as
    ever."""
    largest = least * math.log(2)
    for beta in (2.0, 7.0):
        for share, lost in ((0.98, False), (1.02, True)):
            score = round_to(
                torch.tensor(share * largest / (beta - 1)).double(), BF16
            ).item()
            case = of_scores([score, score], [1.0, 1.0], dtype)
            ran = KERNEL.gradients(case, beta=beta, **options, **STABILISED)
            result = {n: getattr(ran, n) for n in ("out", "lse", "dq", "dk", "dv")}
            assert all(bool(x.isnan().all()) for x in result.values()) == lost, (
                beta,
                score,
            )
            if not lost:
                assert result["out"].item() == pytest.approx(1.0, abs=2.0**-7)
                assert result["lse"].item() == pytest.approx(
                    score + math.log(2), abs=2.0**-11
                )


@pytest.mark.parametrize(("dtype", "score", "out"), [
    (torch.bfloat16, -80.0, 1.0), (torch.bfloat16, -110.0, nan), (torch.float32, -110.0, nan),
    (torch.float16, -9.0, 1.0), (torch.float16, -18.0, 0.0), (torch.float16, -110.0, nan),
])  # fmt: skip
@pytest.mark.parametrize("algorithm", ["fa2", "fa1", "plain"])
def test_ties_far_below_0_lose_P(
    algorithm: str, dtype: Any, score: float, out: float
) -> None:
    """Shifted by 0, P is exp(r). Where even l is 0 in fp32 the row is NaN, not 0. In
    float16 P is 0 before l is, which is the method's limit and no NaN."""
    if algorithm == "plain" and out == 0.0:
        out = 1.0  # P is normalised before it is rounded
    case = of_scores([score, score], [1.0, 1.0], dtype)
    result = KERNEL.attend(case, algorithm=algorithm, **STABILISED).out.item()
    assert result == pytest.approx(out, abs=2.0**-7, nan_ok=True)


def test_one_tied_tile_moves_the_whole_row() -> None:
    """Padding that a finite mask hides is tied far below 0, and shifts the row by 0. A
    row of scores near -20 then has no P left in float16, unless its own tile came
    before."""
    case = of_scores([-20.0, -21.0, -1e4, -1e4], [1.0] * 4, torch.float16)
    for order, out in (("ascending", 1.0), ("descending", 0.0)):
        result = KERNEL.attend(case, block_kv=2, kv_order=order, **STABILISED).out.item()
        assert result == pytest.approx(out, abs=2.0**-10)


def test_it_has_the_authors_values() -> None:
    """Where they are not given, beta is 2 and the tolerance 1e-3; plain softmax has
    neither."""
    created = recipe(**STABILISED)
    assert (created.beta, created.tie_tolerance) == (2.0, 1e-3)
    assert (recipe().beta, recipe().tie_tolerance) == (None, None)
    assert recipe(**STABILISED, beta=7).beta == 7


# --- the guarded softmax --------------------------------------------------------------


def tied(
    shift: float = 0, n: int = 37, dtype: torch.dtype = torch.bfloat16
) -> AttentionCase:
    """Every row has whole scores of at most `shift`, the first and the last key with
    that; V is of one sign. All are numbers of the dtype."""
    created = torch.Generator().manual_seed(2)
    scores = shift - 1.0 - torch.randint(0, 8, (n,), generator=created)
    scores[0] = scores[-1] = float(shift)
    v = -2.0 - torch.rand(1, 1, n, 8, generator=created)
    q, k, v = (x.to(dtype) for x in (torch.ones(1, 1, n, 1), scores.view(1, 1, n, 1), v))
    return AttentionCase(ref=CaseRef(case="tied"), q=q, k=k, v=v, scale=1.0)


def worst(result: Tensor, case: AttentionCase) -> float:
    """The largest error of the output in unit roundoffs of its term scale; NaN if any
    is."""
    exact = reference(case)
    error = (result.double() - exact.out).abs() / exact.term_scale
    u = case.format.unit_roundoff
    return float((error / u).max()) if error.isfinite().all() else nan


def test_weights_are_odd_and_exact() -> None:
    """64 odd numbers over 256, between 1/2 and 1, which bf16 and fp16 hold; no power of
    two."""
    w = guarded_weights(tied(n=4000), torch.float64)
    assert sorted(set((w * 256).tolist())) == list(range(129, 256, 2))
    for fmt in (BF16, FP16):
        assert torch.equal(round_to(w, fmt), w)
    assert (torch.frexp(w).mantissa != 0.5).all()


def test_weights_belong_to_places() -> None:
    """Rows of a sample have the weights they have in the call, and its outputs. In
    decoding, where the row is always the first, the number of keys decides."""
    case = dataclasses.replace(tied(), is_causal=True)
    rows = torch.tensor([3, 4, 20, 36])
    whole, some = (
        KERNEL.attend(case, **GUARDED),
        KERNEL.attend(case.restrict(rows=rows), **GUARDED),
    )
    assert torch.equal(whole.out[:, :, rows], some.out)
    steps = [tied(n=n) for n in range(30, 50)]
    one = [
        guarded_weights(dataclasses.replace(x, q=x.q[:, :, :1]), torch.float64)
        for x in steps
    ]
    assert len({float(w) for w in one}) > 15


def test_where_the_stabilised_softmax_is_nan() -> None:
    """Ours says so where the published one is silently wrong: in fp16 from r = 10 on, in
    bf16 from 88 on, and where r is so far below 0 that l is 0. Guarded every one is
    right."""
    for dtype, more in ((torch.float16, {10, 24}), (torch.bfloat16, set())):
        lost = set()
        for shift in SHIFTS:
            case = tied(shift, dtype=dtype)
            if math.isnan(worst(KERNEL.attend(case, **STABILISED).out, case)):
                lost.add(shift)
            assert worst(KERNEL.attend(case, **GUARDED).out, case) <= 4.0
        assert lost == {-200, -105, 88, 200} | more


def signed_error(case: AttentionCase, **options: Any) -> float:
    """Mean error in ulps of the output."""
    exact = reference(case).out
    return float(
        ((KERNEL.attend(case, **options).out.double() - exact) / ulp(exact, BF16)).mean()
    )


@pytest.mark.parametrize(("options", "cures"), [
    ({"preset": "exact", "pv": "bfloat16"}, (GUARDED, STABILISED, {**STABILISED, "beta": 4.0})),
    ({"pv": "working"}, (GUARDED,)), ({"pv": "working", "l_from": "rounded"}, (GUARDED,)),
    ({"preset": "qiu2025"}, (GUARDED,)),
])  # fmt: skip
def test_the_bias_of_ties_is_gone(options: Any, cures: tuple[Any, ...]) -> None:
    """Two tied keys, all of V negative, P V in bf16: plain softmax errs by about -0.2 ulp
    in the mean, guarded by a tenth of that at most, with l from P before or after it is
    rounded; and so stabilised where nothing else is rounded."""
    shape: dict[str, Any] = {"heads": 8, "kv_heads": 4, "head_dim": 32, "seed": 1}
    case = drawn(192, "one_signed_gradient", strength=16.0, **shape)
    plain = signed_error(case, **options)
    assert plain == pytest.approx(-0.2, abs=0.06)
    for cure in cures:
        assert abs(signed_error(case, **options, **cure)) < 0.1 * abs(plain)
