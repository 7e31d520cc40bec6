"""The stabilised softmax of `emulated`: its shift, what it leaves alone, its limits.

What it is for, and what is published of it, is in `test_guarded.py`; that `triton-flash` means the
same by it in `test_triton_flash.py`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from recipes import watched

from numdev.cases import AttentionCase, CaseRef
from numdev.formats import FORMATS, round_to
from numdev.kernels import find
from numdev.kernels.emulation.recipe import recipe

KERNEL = find("emulated")
STABILISED: dict[str, Any] = {"softmax": "stabilised"}
BF16 = FORMATS["bfloat16"]
nan, inf = math.nan, math.inf


def of_scores(scores: list[float], v: list[float], dtype: torch.dtype) -> AttentionCase:
    """One row with these scores, and V of one feature; all of them numbers of the dtype."""
    k, values = (torch.tensor(x, dtype=torch.float64).view(1, 1, -1, 1) for x in (scores, v))
    given = {"q": torch.ones(1, 1, 1, 1), "k": k, "v": values, "grad_out": torch.ones(1, 1, 1, 1)}
    tensors = {name: x.to(dtype) for name, x in given.items()}
    return AttentionCase(ref=CaseRef(case="row"), scale=1.0, **tensors)


def test_the_running_maximum_hears_of_it() -> None:
    """P is exp(S - 2 r) in the tile that is tied and in all that come after, and what came before
    is rescaled to it: with V = 1 at one key alone the output is its weight in any case."""
    scores = [1.0, 0.5, 3.0, 3.0, 4.0, 2.0]
    weights = torch.tensor(scores).double().exp()
    with watched() as seen:
        for key in range(6):
            case = of_scores(scores, [float(key == j) for j in range(6)], torch.float64)
            out = KERNEL.attend(case, preset="exact", block_kv=2, **STABILISED).out
            assert out.item() == pytest.approx((weights[key] / weights.sum()).item(), rel=1e-15)
    assert [x.item() for site, x in seen if site == "max"] == [1.0, 6.0, 4.0] * 6


@pytest.mark.parametrize(
    ("dtype", "options", "largest"),
    [
        # -log of the smallest normal number: 14, 126, 126 and 1022 times log 2.
        (torch.float16, {}, 14 * math.log(2)),
        (torch.float16, {"p": "float32"}, 126 * math.log(2)),
        (torch.bfloat16, {}, 126 * math.log(2)),
        (torch.bfloat16, {"p": "exact"}, 126 * math.log(2)),
        (torch.bfloat16, {"exp": "exact"}, 126 * math.log(2)),
        (torch.bfloat16, {"exp": "float16"}, 14 * math.log(2)),
        (torch.float32, {"preset": "exact"}, 1022 * math.log(2)),
        (torch.float32, {"preset": "exact", "compute": "float32"}, 126 * math.log(2)),
    ],
)
def test_where_P_would_be_lost_the_row_is_nan(
    dtype: torch.dtype, options: dict[str, Any], largest: float
) -> None:
    """From (beta - 1) r beyond the normal numbers of the formats P goes through, in output,
    log-sum-exp and gradients, and not before: there P is rounded as ever."""
    for beta in (2.0, 7.0):
        for share, lost in ((0.98, False), (1.02, True)):
            score = round_to(torch.tensor(share * largest / (beta - 1)).double(), BF16).item()
            case = of_scores([score, score], [1.0, 1.0], dtype)
            ran = KERNEL.gradients(case, beta=beta, **options, **STABILISED)
            found = {n: getattr(ran, n) for n in ("out", "lse", "dq", "dk", "dv")}
            assert all(bool(x.isnan().all()) for x in found.values()) == lost, (beta, score)
            if not lost:
                assert found["out"].item() == pytest.approx(1.0, abs=2.0**-7)
                assert found["lse"].item() == pytest.approx(score + math.log(2), abs=2.0**-11)


@pytest.mark.parametrize(
    ("dtype", "score", "out"),
    [
        (torch.bfloat16, -80.0, 1.0),
        (torch.bfloat16, -110.0, nan),
        (torch.float32, -110.0, nan),
        (torch.float16, -9.0, 1.0),
        (torch.float16, -18.0, 0.0),
        (torch.float16, -110.0, nan),
    ],
)
@pytest.mark.parametrize("algorithm", ["fa2", "fa1", "plain"])
def test_ties_far_below_zero_lose_their_P(
    algorithm: str, dtype: torch.dtype, score: float, out: float
) -> None:
    """Shifted by 0, P is exp(r). Where even l is 0 in fp32 the row is NaN, not 0. In float16 P is
    0 before l is, which is the method's limit and no NaN."""
    if algorithm == "plain" and out == 0.0:
        out = 1.0  # P is normalised before it is rounded
    case = of_scores([score, score], [1.0, 1.0], dtype)
    found = KERNEL.attend(case, algorithm=algorithm, **STABILISED).out.item()
    assert found == pytest.approx(out, abs=2.0**-7, nan_ok=True)


def test_one_tied_tile_moves_the_whole_row() -> None:
    """Padding that a finite mask hides is tied far below 0, and shifts the row by 0. A row of
    scores near -20 then has no P left in float16, unless its own tile came before."""
    case = of_scores([-20.0, -21.0, -1e4, -1e4], [1.0] * 4, torch.float16)
    for order, out in (("ascending", 1.0), ("descending", 0.0)):
        found = KERNEL.attend(case, block_kv=2, kv_order=order, **STABILISED).out.item()
        assert found == pytest.approx(out, abs=2.0**-10)


def test_it_has_the_authors_values() -> None:
    """Where they are not given, beta is 2 and the tolerance 1e-3; plain softmax has neither."""
    made = recipe(**STABILISED)
    assert (made.beta, made.tie_tolerance) == (2.0, 1e-3)
    assert (recipe().beta, recipe().tie_tolerance) == (None, None)
    assert recipe(**STABILISED, beta=7).beta == 7
