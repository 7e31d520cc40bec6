"""The emulated backward pass: the gradient when nothing rounds. That it rounds where it says is in
`test_emulated.py`, and that real kernels round so in `test_expectation.py`."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from fused_bounds import of_group, operands, weights
from oracles import FEATURES, U64, step
from recipes import autograd, drawn, rms
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import Refused
from numdev.formats import FORMATS, ulp
from numdev.kernels.emulation.backward import gradients
from numdev.kernels.emulation.recipe import recipe
from numdev.kernels.reference import gradients as reference

BF16 = FORMATS["bfloat16"]
NAMES = ("dq", "dk", "dv")


def truth_of(case: AttentionCase) -> list[Tensor]:
    return list(autograd(case).values())[1:]


def term_scales(case: AttentionCase) -> tuple[Tensor, Tensor, Tensor]:
    """What is added up in dQ, dK and dV before anything cancels, dP and delta included:
    X = scale sum P (D + E) |K| with D = sum |dO||V| and E = sum |dO||O|; sum P |dO| for dV."""
    exact = reference(case)
    q, dO, k, v = (x if i == 0 else x.abs() for i, x in enumerate(operands(case)))
    P, _ = weights(case, exact, q, operands(case)[2])
    E = (dO * exact.term_scale).sum(dim=-1, keepdim=True)
    W = abs(case.scale) * P * (dO @ v.mT + E)
    return W @ k, of_group(case, W.mT @ q.abs()), of_group(case, P.mT @ dO)


@pytest.mark.parametrize("name", FEATURES)
def test_exact_is_the_gradient(name: str) -> None:
    """With all sites exact, every algorithm, tile, order and formula is the gradient to within fp64
    rounding, with all features. 300 u of the term scale: a score of these cases has at most eight
    terms and size 30, and exp makes its rounding, up to 2 * 30 u, a relative error of P."""
    case = step(**FEATURES[name])
    truth, scales = truth_of(case), term_scales(case)
    choices = itertools.product(
        ("fa2", "fa1", "plain"),
        (("q", "ascending"), ("kv", "descending")),
        (("lse", "dO*O"), ("m_and_l", "dP*P")),
        (("before", "scores", "separate"), ("after", "q", "running")),
        ({"block_q": 2, "block_kv": 1}, {"block_q": 2, "block_kv": 3}, {}),
    )
    for algorithm, (loop, order), (p, delta), (ds_scale, scale_in, group), tile in choices:
        if algorithm == "plain" and tile:
            continue
        made = recipe(
            "exact", algorithm=algorithm, loop_order=loop, kv_order=order, p_from=p,
            delta_from=delta, ds_scale=ds_scale, scale_in=scale_in, group_sum=group, **tile,
        )  # fmt: skip
        for found, exact, scale in zip(gradients(case, made)[2:], truth, scales, strict=True):
            assert ((found - exact).abs() <= 300 * U64 * scale).all(), made


# --- tiles, and compute: float32 -----------------------------------------------------------------


def test_tiles_matter_through_the_running_sums() -> None:
    """In `fa2` backward another tile changes no gradient by more than fp32 sums do; with dq, dk and
    dv in the working format smaller tiles mean larger errors, and the order of keys changes dq."""
    case = drawn(256)
    truth = truth_of(case)

    def found(tile: int, sums: str, **more: Any) -> list[Tensor]:
        # Without `p`, whose rounding in forward depends on the tile.
        sites = {"p": "exact", **dict.fromkeys(NAMES, sums)}
        return list(gradients(case, recipe(block_q=tile, block_kv=tile, **sites, **more))[2:])

    for a, b, t in zip(found(16, "wide"), found(128, "wide"), truth, strict=True):
        assert (rms(a - b) < 0.2 * rms(a - t)).all()
    small = found(16, "working")
    for a, b, t in zip(small, found(128, "working"), truth, strict=True):
        assert (rms(a - t) > 1.3 * rms(b - t)).all()
    assert not torch.equal(found(16, "working", kv_order="descending")[0], small[0])


@pytest.mark.parametrize("options", [{}, {"logits": 8.0}, {"regime": "ties"}])
def test_float32_is_within_its_bound(options: dict[str, Any]) -> None:
    """|d32 - d64| is within the bound of `numdev.kernels.emulation.backward` in every element,
    which is below eight ulps of the term scale; and rms errors agree to 1 %, on ties to 5 % (a few
    keys carry everything there)."""
    n, d, t = 256, 64, 2
    case = drawn(n, is_causal=True, **options)
    u, w = BF16.unit_roundoff, 2.0**-24
    A = case.scale * (case.q.double().abs() @ case.k.double().abs().transpose(-1, -2)).amax()
    e = float((6 * d + 24 + 4 * t) * w * A + (n + 20 + 8 * t + 2 * math.log(n)) * w)
    of_ds, of_p = 4 * u + 3 * e + (2 * n + 4 * d + 8 * t + 16) * w, 2 * u + 2 * e + 2 * (n + 8) * w
    d64 = gradients(case, recipe("fa2"))[2:]
    d32 = gradients(case, recipe("fa2", compute="float32"))[2:]
    bounds = zip(d64, d32, truth_of(case), term_scales(case), (of_ds, of_ds, of_p), strict=True)
    for a, b, exact, X, factor in bounds:
        assert b.dtype == torch.float32
        assert ((a - b).abs() <= factor * X + ulp(a, BF16)).all()
        assert (factor * X < 8 * ulp(X, BF16)).all()
        ratio = rms(b - exact) / rms(a - exact)
        assert ((ratio - 1).abs() < (0.05 if options.get("regime") else 0.01)).all()


def test_what_cannot_be_done_is_refused() -> None:
    """No grad_out, and one that fp32 does not hold, are Refused."""
    case = drawn(4)
    with pytest.raises(Refused, match="grad_out"):
        gradients(dataclasses.replace(case, grad_out=None), recipe("fa2"))
    assert case.grad_out is not None
    wide = dataclasses.replace(case, grad_out=case.grad_out.double())
    with pytest.raises(Refused, match="would round grad_out"):
        gradients(wide, recipe("fa2", compute="float32"))
