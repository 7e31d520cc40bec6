"""Controls: nothing at dose 0, more at every dose, and each the fault it says it is."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
from oracles import FEATURES, make_case

from numdev.cases import AttentionCase, CaseRef
from numdev.errors import Refused, UsageError
from numdev.formats import format_named, round_to
from numdev.kernels import Kernel, find
from numdev.kernels.emulation.faults import CONTROLS
from numdev.kernels.reference import attend as reference
from numdev.sources.synthetic import Shapes, draw

FORWARD = [name for name, control in CONTROLS.items() if not control.in_backward_only]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def drawn(
    length: int,
    *,
    heads: int,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    **parts: Any,
) -> AttentionCase:
    """A case of N(0, 1) inputs, large enough to have statistics."""
    shapes = Shapes(
        batch=1,
        heads=heads,
        kv_heads=heads,
        q_len=length,
        kv_len=length,
        head_dim=head_dim,
        v_dim=head_dim,
    )
    q, k, v = (x.to(dtype) for x in draw("normal", shapes, seed=0, options={}))
    ref = CaseRef(case="test")
    return AttentionCase(ref=ref, q=q, k=k, v=v, scale=head_dim**-0.5, **parts)


def rms(x: torch.Tensor) -> torch.Tensor:
    """Root mean square per head."""
    return (x**2).mean(dim=(0, 2, 3)).sqrt()


@pytest.fixture(scope="module")
def case() -> AttentionCase:
    return drawn(200, heads=2, head_dim=32)


def error(control: str, case: AttentionCase, dose: float) -> torch.Tensor:
    """rms error per head."""
    return rms(CONTROLS[control].attend(case, dose).out.double() - reference(case).out)


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("feature", ["plain", "grouped", "bool mask and causal", "sliding window"])
def test_nothing_is_planted_at_dose_0(name: str, feature: str) -> None:
    """Every control without its fault is the sound emulation, bit for bit, in every format."""
    for dtype in DTYPES:
        case = make_case(**FEATURES[feature], dtype=dtype)
        planted, sound = CONTROLS[name].attend(case, 0), find("emulated").attend(case)
        assert planted.out.dtype == sound.out.dtype
        assert torch.equal(planted.out, sound.out)
        assert planted.lse is not None
        assert sound.lse is not None
        assert torch.equal(planted.lse, sound.lse)


def emulated_out(case: AttentionCase) -> torch.Tensor:
    return find("emulated").attend(case).out.double()


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("dtype", DTYPES[:3])  # in float64 the reference is no more exact
def test_a_larger_dose_errs_more(name: str, dtype: torch.dtype) -> None:
    """From the sound kernel on, every dose has a larger error in its worst head than the last."""
    case = drawn(200, heads=2, head_dim=32, dtype=dtype)
    doses = (0.0, *CONTROLS[name].doses)
    errors = [float(error(name, case, dose).max()) for dose in doses]
    assert all(b > 1.02 * a for a, b in pairwise(errors)), errors


def test_the_scale_is_that_much_larger(case: AttentionCase) -> None:
    """Against the reference with the wrong scale the control errs like a sound kernel."""
    sound = error("scale", case, 0)
    for dose in CONTROLS["scale"].doses:
        wrong = reference(dataclasses.replace(case, scale=case.scale * (1 + dose))).out
        out = CONTROLS["scale"].attend(case, dose).out.double()
        assert (rms(out - wrong) < 1.05 * sound).all()


@pytest.mark.parametrize("causal", [False, True])
def test_the_last_keys_are_dropped(causal: bool) -> None:
    """Hiding them behind a mask gives the same, but for sums in another order; rows that see none
    of them are sound, bit for bit."""
    case = drawn(100, heads=2, head_dim=32, is_causal=causal)
    for dose in (1, 4, 16, 64):
        seen = torch.arange(100) < 100 - dose
        masked = emulated_out(dataclasses.replace(case, mask=seen[None]))
        out = CONTROLS["keys-dropped"].attend(case, dose).out.double()
        assert (rms(out - masked) < 0.05 * error("keys-dropped", case, 0)).all()
        if causal:
            assert torch.equal(out[:, :, : 100 - dose], emulated_out(case)[:, :, : 100 - dose])


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)])
def test_p_has_fewer_bits(dtype: torch.dtype, bits: int) -> None:
    """P of one tile, multiplied with V = the identity, is what is left of it: P / l to that many
    bits. (l is a power of two by construction.)"""
    # Scores log(w) with integer weights below 2^11, whose sum is 2^14.
    weights = torch.tensor([2047.0] * 8 + [1.0] * 8)
    case = AttentionCase(
        ref=make_case().ref,
        q=torch.ones(1, 1, 1, 1, dtype=torch.float64),
        k=torch.log(weights.double()).view(1, 1, 16, 1),
        v=torch.eye(16, dtype=torch.float64)[None, None],
        scale=1.0,
    )
    # In float64 nothing is rounded but what the control rounds: P = w / 2047, to 53 - dose bits.
    for dose in (1, 4, 40):
        fmt = format_named(f"e11m{53 - dose - 1}")
        out = CONTROLS["p-bits"].attend(case, dose).out.flatten()
        expected = round_to(weights.double() / 2047, fmt) / (weights.double() / 2047).sum()
        assert torch.allclose(out, expected, rtol=2**-50)
    narrow = drawn(64, heads=1, head_dim=64, dtype=dtype)
    same = find("emulated").attend(narrow, p=f"e{8 if bits == 8 else 5}m{bits - 3}").out
    assert torch.equal(CONTROLS["p-bits"].attend(narrow, 2).out, same)


@pytest.mark.parametrize(
    ("dtype", "row_sum"),
    [
        (torch.bfloat16, ["e8m7", "e8m6", "e8m5", "e8m4"]),
        (torch.float16, ["e8m10", "e8m9", "e8m8", "e8m7"]),
        (torch.float32, ["e8m22", "e8m21", "e8m20", "e8m19"]),
    ],
)
def test_the_row_sum_is_rounded(dtype: torch.dtype, row_sum: list[str]) -> None:
    """Dose 1 is the working format's significand, or the first one narrower than a sound sum's."""
    case = drawn(150, heads=2, head_dim=32, dtype=dtype)
    for dose, fmt in enumerate(row_sum, start=1):
        expected = find("emulated").attend(case, row_sum=fmt).out
        assert torch.equal(CONTROLS["l-rounded"].attend(case, dose).out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_truncation_is_toward_zero(dtype: torch.dtype) -> None:
    """At dose 1 the output is nowhere larger than what is cast, and less than an ulp smaller."""
    case = drawn(100, heads=2, head_dim=32, dtype=dtype)
    before = find("emulated").attend(case, out="exact", normalised="exact").out
    after = CONTROLS["truncated"].attend(case, 1).out.double()
    assert torch.equal(after, round_to(before, case.format, "toward_zero"))
    assert (after.abs() <= before.abs()).all()
    shrunk = CONTROLS["truncated"].attend(case, 2).out.double().abs().mean()
    if dtype != torch.float64:
        assert shrunk < after.abs().mean()


def test_one_head_is_wrong(case: AttentionCase) -> None:
    """The first one; the others are sound, bit for bit."""
    sound, out = (CONTROLS["one-head"].attend(case, dose).out for dose in (0, 0.01))
    assert torch.equal(out[:, 1:], sound[:, 1:])
    larger = reference(case).out[:, :1] * 1.01
    assert (rms(out[:, :1].double() - larger) < 1.05 * error("one-head", case, 0)[0]).all()


def test_doses_that_cannot_be_had() -> None:
    """A case with too few keys or bits is refused; a dose that is none is a mistake."""
    case = make_case(dtype=torch.bfloat16, kv_len=5)
    with pytest.raises(Refused, match="it has 5 keys, so 16 cannot be dropped"):
        CONTROLS["keys-dropped"].attend(case, 16)
    with pytest.raises(Refused, match="has only 3 significant bits"):
        CONTROLS["p-bits"].attend(case.rounded_to(format_named("float8_e5m2")), 2)
    for dose in (-1, float("nan"), float("inf"), "1", True, None):
        with pytest.raises(UsageError, match="expected a number from 0 on"):
            CONTROLS["scale"].attend(case, dose)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"control:p-bits is 1.5; expected a whole number"):
        CONTROLS["p-bits"].attend(case, 1.5)


# --- gradients -----------------------------------------------------------------------------------

with_gradients = pytest.mark.skipif(
    not hasattr(Kernel, "gradients"), reason="kernels have no gradients yet"
)


@with_gradients
@pytest.mark.parametrize("name", CONTROLS)
def test_no_gradient_is_spoiled_at_dose_0(name: str) -> None:
    """Without its fault every control's gradients are the sound emulation's, bit for bit."""
    case = trained(make_case(dtype=torch.bfloat16, heads=4, kv_heads=2, q_len=9, kv_len=70))
    planted = CONTROLS[name].gradients(case, 0)
    sound = find("emulated").gradients(case)  # type: ignore[attr-defined]
    for tensor in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(planted, tensor), getattr(sound, tensor)), tensor


@with_gradients
@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_larger_dose_spoils_gradients_more(name: str, causal: bool) -> None:
    """In the gradient it spoils most, every dose errs more than the last."""
    case = trained(drawn(200, heads=2, head_dim=32, is_causal=causal))
    exact = autograd64(case)
    doses = (0.0, *CONTROLS[name].doses)
    runs = [CONTROLS[name].gradients(case, dose) for dose in doses]
    errors = [
        [float(rms(getattr(run, t).double() - exact[t]).max()) for run in runs] for t in exact
    ]
    worst = max(errors, key=lambda e: e[-1] / e[0])
    assert worst[-1] > 1.4 * worst[0]
    assert all(b > 0.98 * a for a, b in pairwise(worst)), worst


@with_gradients
@pytest.mark.parametrize("dose", [0.01, 1.0])
def test_delta_is_too_small(dose: float) -> None:
    """As autograd in fp64 has it with that delta, under a causal mask and grouped heads."""
    case = make_case(heads=4, kv_heads=2, q_len=6, kv_len=6, is_causal=True)
    case = trained(case)
    exact = autograd64(case, delta=1 - dose)
    got = CONTROLS["delta-small"].gradients(case, dose)
    for tensor in ("dq", "dk", "dv"):
        assert torch.allclose(getattr(got, tensor), exact[tensor], rtol=0, atol=1e-13), tensor


@with_gradients
def test_dq_lacks_the_scale() -> None:
    """It is dQ / scale."""
    case = trained(make_case())
    exact, got = autograd64(case), CONTROLS["dq-unscaled"].gradients(case, 1)
    assert torch.allclose(got.dq * case.scale, exact["dq"], rtol=1e-12)  # type: ignore[attr-defined]


def trained(case: AttentionCase) -> AttentionCase:
    """The case with a gradient with respect to its output."""
    generator = torch.Generator().manual_seed(7)
    shape = (*case.q.shape[:3], case.v.shape[3])
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64).to(case.q.dtype)
    return dataclasses.replace(case, grad_out=drawn)


def autograd64(case: AttentionCase, delta: float = 1.0) -> dict[str, torch.Tensor]:
    """Gradients by autograd in fp64; `delta` scales rowsum(dO o O) in dS = P o (dP - delta), which
    softmax's own derivative has: d(P) is exp's derivative P o dP, less P times a constant row sum.
    """
    q, k, v = (x.double().requires_grad_() for x in (case.q, case.k, case.v))
    K, V = (x.repeat_interleave(case.group, dim=1) for x in (k, v))
    S = (q @ K.transpose(-1, -2)) * case.scale
    if case.is_causal:
        S = S.masked_fill(torch.ones_like(S, dtype=torch.bool).triu(1), -torch.inf)
    E = (S - S.detach().amax(dim=-1, keepdim=True)).exp()
    l = E.sum(dim=-1, keepdim=True)
    l = delta * l + (1 - delta) * l.detach()  # the same number, with less of a derivative
    assert case.grad_out is not None
    found = torch.autograd.grad((E / l) @ V, (q, k, v), case.grad_out.double())
    return dict(zip(("dq", "dk", "dv"), found, strict=True))
