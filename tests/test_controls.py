"""Controls: nothing at dose 0, more at every dose, and each the fault it says it is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from oracles import FEATURES, make_case
from recipes import autograd, drawn, rms, with_grad

from numdev.cases import AttentionCase
from numdev.errors import Refused
from numdev.formats import format_named, round_to
from numdev.kernels import find
from numdev.kernels.emulation.faults import CONTROLS
from numdev.kernels.reference import attend as reference

SOUND = find("emulated")
FORWARD = [name for name, control in CONTROLS.items() if not control.in_backward_only]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def usual(length: int = 200, **parts: Any) -> AttentionCase:
    return drawn(length, head_dim=32, **parts)


def error(control: str, case: AttentionCase, dose: float) -> torch.Tensor:
    """rms error per head."""
    out = CONTROLS[control].kernel().attend(case, dose=dose).out
    return rms(out.double() - reference(case).out)


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize(
    "feature", ["plain", "grouped", "bool mask and causal", "sliding window"]
)
def test_nothing_is_planted_at_dose_0(name: str, feature: str) -> None:
    """Every control without its fault is the sound emulation, bit for bit, in every
    format."""
    for dtype in DTYPES:
        case = with_grad(make_case(**FEATURES[feature], dtype=dtype))
        planted, sound = (
            CONTROLS[name].kernel().gradients(case, dose=0),
            SOUND.gradients(case),
        )
        for tensor in ("out", "lse", "dq", "dk", "dv"):
            assert getattr(planted, tensor).dtype == getattr(sound, tensor).dtype
            assert torch.equal(getattr(planted, tensor), getattr(sound, tensor)), tensor
        assert torch.equal(CONTROLS[name].kernel().attend(case, dose=0).out, sound.out)


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("dtype", DTYPES[:3])  # in float64 the reference is no more exact
def test_a_larger_dose_errs_more(name: str, dtype: torch.dtype) -> None:
    """From the sound kernel on, every dose has a larger error in its worst head than the
    last."""
    case = usual(dtype=dtype)
    errors = [
        float(error(name, case, dose).max()) for dose in (0.0, *CONTROLS[name].doses)
    ]
    assert all(b > 1.02 * a for a, b in pairwise(errors)), errors


@pytest.mark.parametrize(
    ("control", "dtype", "site", "formats"),
    [
        ("p-bits", torch.bfloat16, "p", ["e8m6", "e8m5", "e8m4"]),
        ("p-bits", torch.float16, "p", ["e5m9", "e5m8", "e5m7"]),
        # Dose 1 is the working format's significand, or the first one narrower than a
        # sound sum's.
        ("l-rounded", torch.bfloat16, "row_sum", ["e8m7", "e8m6", "e8m5", "e8m4"]),
        ("l-rounded", torch.float16, "row_sum", ["e8m10", "e8m9", "e8m8", "e8m7"]),
        ("l-rounded", torch.float32, "row_sum", ["e8m22", "e8m21", "e8m20", "e8m19"]),
    ],
)
def test_the_row_sum_is_rounded(
    control: str, dtype: Any, site: str, formats: list[str]
) -> None:
    """And so is P: to a format of as many bits fewer as the dose is."""
    case = usual(150, dtype=dtype)
    for dose, fmt in enumerate(formats, start=1):
        expected = SOUND.attend(case, **{site: fmt}).out
        assert torch.equal(
            CONTROLS[control].kernel().attend(case, dose=dose).out, expected
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_truncation_is_toward_zero(dtype: torch.dtype) -> None:
    """At dose 1 the output is what is cast, toward zero; at dose 2 it is smaller
    still."""
    case = usual(100, dtype=dtype)
    before = SOUND.attend(case, out="exact", normalised="exact").out
    after = CONTROLS["truncated"].kernel().attend(case, dose=1).out.double()
    assert torch.equal(after, round_to(before, case.format, "toward_zero"))
    shrunk = CONTROLS["truncated"].kernel().attend(case, dose=2).out.double().abs().mean()
    assert dtype == torch.float64 or shrunk < after.abs().mean()


@pytest.mark.parametrize("dose", [0.01, 1.0])
def test_gradients_are_those_of_the_fault(dose: float) -> None:
    """Those of autograd in fp64 with that delta; dQ that lacks the scale is dQ /
    scale."""
    case = with_grad(make_case(heads=4, kv_heads=2, q_len=6, kv_len=6, is_causal=True))
    exact = autograd(case, delta=1 - dose)
    got = CONTROLS["delta-small"].kernel().gradients(case, dose=dose)
    for tensor in ("dq", "dk", "dv"):
        assert torch.allclose(getattr(got, tensor), exact[tensor], rtol=0, atol=1e-13), (
            tensor
        )
    unscaled = CONTROLS["dq-unscaled"].kernel().gradients(case, dose=1).dq
    assert torch.allclose(unscaled * case.scale, autograd(case)["dq"], rtol=1e-12)


def test_doses_that_cannot_be_had() -> None:
    """A case with too few keys or bits is refused."""
    case = make_case(dtype=torch.bfloat16, kv_len=5)
    with pytest.raises(Refused, match="the case has 5 keys, so 16 cannot be dropped"):
        CONTROLS["keys-dropped"].kernel().attend(case, dose=16)
    with pytest.raises(Refused, match="has only 3 significant bits"):
        CONTROLS["p-bits"].kernel().attend(
            case.rounded_to(format_named("float8_e5m2")), dose=2
        )
