"""The guarded softmax of `emulated`: in exact arithmetic it is softmax; it meets ties wherever they
are and whatever the scores' size; and what it does to bias. Beside it, where the stabilised softmax
becomes NaN.

That `triton-flash` means the same is in `test_triton_flash.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from recipes import drawn
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef
from numdev.formats import FORMATS, round_to, ulp
from numdev.kernels import find
from numdev.kernels.emulation.forward import guarded_weights
from numdev.kernels.reference import attend as reference

KERNEL = find("emulated")
GUARDED: dict[str, Any] = {"softmax": "guarded"}
STABILISED: dict[str, Any] = {"softmax": "stabilised"}
BF16, FP16 = FORMATS["bfloat16"], FORMATS["float16"]
SHIFTS = (-200, -105, -88, -24, -9, -1, 0, 1, 4, 9, 10, 24, 88, 200)
nan, inf = math.nan, math.inf


# --- helpers -------------------------------------------------------------------------------------


def tied(
    shift: float = 0,
    ties: int = 2,
    n: int = 37,
    dtype: torch.dtype = torch.bfloat16,
    v: Tensor | None = None,
    **changes: Any,
) -> AttentionCase:
    """Every row has whole scores of at most `shift`, and `ties` keys with that, spread evenly from
    the first; V is of one sign. All are numbers of the dtype."""
    made = torch.Generator().manual_seed(ties)
    scores = shift - 1.0 - torch.randint(0, 8, (n,), generator=made)
    scores[torch.linspace(0, n - 1, ties).long()] = float(shift)
    k = scores.view(1, 1, n, 1)
    v = -2.0 - torch.rand(1, 1, n, 8, generator=made) if v is None else v
    q, dO = torch.ones(1, 1, n, 1), torch.randn(1, 1, n, v.shape[-1], generator=made)
    q, k, v, dO = (x.to(dtype) for x in (q, k, v, dO))
    ref = CaseRef(case=f"tied {ties}")
    return AttentionCase(ref=ref, q=q, k=k, v=v, scale=1.0, grad_out=dO, **changes)


def worst(found: Tensor, case: AttentionCase) -> float:
    """The largest error of the output in unit roundoffs of its term scale; NaN if any is."""
    exact = reference(case)
    error = (found.double() - exact.out).abs() / exact.term_scale
    u = case.format.unit_roundoff
    return float((error / u).max()) if error.isfinite().all() else nan


# --- the weights ---------------------------------------------------------------------------------


def test_weights_are_odd_and_exact() -> None:
    """64 odd numbers over 256, between 1/2 and 1, which bf16 and fp16 hold and no power of two is
    among."""
    w = guarded_weights(tied(n=4000), torch.float64)
    assert sorted(set((w * 256).tolist())) == list(range(129, 256, 2))
    for fmt in (BF16, FP16):
        assert torch.equal(round_to(w, fmt), w)
    assert (torch.frexp(w).mantissa != 0.5).all()


def test_weights_belong_to_places() -> None:
    """Rows of a sample have the weights they have in the call, and its outputs. In decoding, where
    the row is always the first, the number of keys decides."""
    case = dataclasses.replace(tied(), is_causal=True)
    rows = torch.tensor([3, 4, 20, 36])
    whole, some = KERNEL.attend(case, **GUARDED), KERNEL.attend(case.select_rows(rows), **GUARDED)
    assert torch.equal(whole.out[:, :, rows], some.out)
    steps = [dataclasses.replace(tied(n=n), grad_out=None) for n in range(30, 50)]
    one = [guarded_weights(dataclasses.replace(x, q=x.q[:, :, :1]), torch.float64) for x in steps]
    assert len({float(w) for w in one}) > 15


# --- ties, wherever they are ---------------------------------------------------------------------


def test_where_the_stabilised_softmax_is_nan() -> None:
    """Ours says so where the published one is silently wrong: in fp16 from r = 10 on, in bf16 from
    88 on, and where r is so far below 0 that l is 0 (in fp16 P is lost before, and the output 0).
    Guarded every one is right."""
    for dtype, lost in ((torch.float16, {-200, -105, 10, 24, 88, 200}), (torch.bfloat16, None)):
        lost = {-200, -105, 88, 200} if lost is None else lost
        found = {
            shift: worst(KERNEL.attend(tied(shift, dtype=dtype), softmax="stabilised").out,
                         tied(shift, dtype=dtype))
            for shift in SHIFTS
        }  # fmt: skip
        assert {shift for shift, error in found.items() if math.isnan(error)} == lost
        for shift in SHIFTS:
            case = tied(shift, dtype=dtype)
            assert worst(KERNEL.attend(case, **GUARDED).out, case) <= 4.0


# --- what it is for ------------------------------------------------------------------------------


def signed_error(case: AttentionCase, **options: Any) -> float:
    """Mean error in ulps of the output."""
    exact = reference(case).out
    return float(((KERNEL.attend(case, **options).out.double() - exact) / ulp(exact, BF16)).mean())


@pytest.mark.parametrize(
    ("options", "cures"),
    [
        ({"preset": "exact", "pv": "bfloat16"}, (GUARDED, STABILISED, {**STABILISED, "beta": 4.0})),
        ({"pv": "working"}, (GUARDED,)),
        ({"pv": "working", "l_from": "rounded"}, (GUARDED,)),
        ({"preset": "qiu2025"}, (GUARDED,)),
    ],
)
def test_the_bias_of_ties_is_gone(
    options: dict[str, Any], cures: tuple[dict[str, Any], ...]
) -> None:
    """Two tied keys, all of V negative, P V in bf16: plain softmax errs by about -0.2 ulp in the
    mean, guarded by a tenth of that at most, with l from P before or after it is rounded; and so
    stabilised where nothing else is rounded."""
    shape: dict[str, Any] = {"heads": 8, "kv_heads": 4, "head_dim": 32, "seed": 1}
    case = drawn(192, "one_signed_gradient", strength=16.0, **shape)
    plain = signed_error(case, **options)
    assert plain == pytest.approx(-0.2, abs=0.06)
    for cure in cures:
        assert abs(signed_error(case, **options, **cure)) < 0.1 * abs(plain)
