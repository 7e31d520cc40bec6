"""The kernels that are wrong on purpose: sound without their fault, and wrong as they say.

A power study is worth what its planted faults are. Each is held to an fp64 computation of the very
mistake its name says, and must leave alone what that mistake does not touch.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef
from numdev.kernels import find
from numdev.sources.synthetic import Shapes, draw

FILE = Path(__file__).parent.parent / "benchmarks" / "planted.py"


def load() -> Any:
    """The module, as `planted`, so that numdev finds `planted:NAME`."""
    spec = importlib.util.spec_from_file_location("planted", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["planted"] = module
    spec.loader.exec_module(module)
    return module


planted = load()
BY_NAME = {p.name: p for p in planted.PLANTED}
HALVES = (torch.bfloat16, torch.float16)
Results = dict[str, Tensor]


def drawn(length: int = 200, dtype: torch.dtype = torch.bfloat16, **parts: Any) -> AttentionCase:
    """Three tiles and a piece of one, with a gradient for its output."""
    shapes = Shapes(
        batch=1, heads=2, kv_heads=2, q_len=length, kv_len=length, head_dim=64, v_dim=64
    )
    q, k, v = (x.to(dtype) for x in draw("normal", shapes, seed=1, options={}))
    up = torch.randn(q.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    ref = CaseRef(case="test")
    return AttentionCase(ref=ref, q=q, k=k, v=v, scale=0.125, grad_out=up, **parts)


def step(function: Callable[..., Any], case: AttentionCase) -> Results:
    """One training step of a function of q, k, v."""
    leaves = [x.detach().clone().requires_grad_() for x in (case.q, case.k, case.v)]
    out, lse = function(*leaves, is_causal=case.is_causal, scale=case.scale)
    assert case.grad_out is not None
    dq, dk, dv = torch.autograd.grad(out, leaves, case.grad_out.to(out.dtype))
    found = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    return {name: x.detach().double() for name, x in found.items()}


def exact(case: AttentionCase) -> Results:
    """The same in fp64, plainly, by autograd."""

    def plain(
        q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        S = (q @ k.transpose(-1, -2)) * scale
        if is_causal:
            i, j = (torch.arange(n) for n in S.shape[-2:])
            S = S.masked_fill(j > i[:, None] + case.causal_offset, -math.inf)
        return S.softmax(dim=-1) @ v, S.logsumexp(dim=-1)

    parts: dict[str, Any] = {n: getattr(case, n).double() for n in ("q", "k", "v")}
    return step(plain, dataclasses.replace(case, **parts))


def errors(got: Results, truth: Results) -> dict[str, float]:
    return {n: float((got[n] - truth[n]).pow(2).mean().sqrt()) for n in truth}


# --- without a fault -----------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_without_a_fault_it_is_sound(dtype: torch.dtype, causal: bool) -> None:
    """As near fp64 as PyTorch's flash kernel, forward and backward, and in 16 bits as near as the
    emulation of a production kernel predicts."""
    case = drawn(dtype=dtype, is_causal=causal)
    truth, found = exact(case), step(planted.sound, case)
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        flash = torch.nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=causal, scale=case.scale
        )
    grads = torch.autograd.grad(flash, leaves, case.grad_out)
    theirs = dict(zip(("out", "dq", "dk", "dv"), (flash.detach(), *grads), strict=True))
    wide = {n: x.double() for n, x in theirs.items()}
    ours = errors(found, truth)
    slack = 1.1 if dtype in HALVES else 1.5  # in fp32 the order of sums is all there is
    for name, size in errors(wide, {n: truth[n] for n in wide}).items():
        assert ours[name] <= slack * size, name
    assert ours["lse"] < 1e-6
    if dtype in HALVES:
        emulated = find("emulated").attend(case, block_kv=64).out.double()
        predicted = float((emulated - truth["out"]).pow(2).mean().sqrt())
        assert ours["out"] == pytest.approx(predicted, rel=0.03)


# --- with one ------------------------------------------------------------------------------------


def mistaken_delta(case: AttentionCase, change: Callable[[Tensor], Tensor]) -> Results:
    """The exact results, with dq and dk of dS = P o (dP - change(delta))."""
    truth = exact(case)
    q, k, v = (getattr(case, n).double() for n in ("q", "k", "v"))
    assert case.grad_out is not None
    dO = case.grad_out.double()
    P = ((q @ k.transpose(-1, -2)) * case.scale - truth["lse"][..., None]).exp()
    delta = (dO * truth["out"]).sum(dim=-1)
    dS = P * (dO @ v.transpose(-1, -2) - change(delta)[..., None])
    dq, dk = case.scale * dS @ k, case.scale * dS.transpose(-1, -2) @ q
    return {**truth, "dq": dq, "dk": dk}


def first_keys(count: int) -> Callable[[AttentionCase], Results]:
    def mistake(case: AttentionCase) -> Results:
        kept = dataclasses.replace(case, k=case.k[:, :, :count], v=case.v[:, :, :count])
        found = exact(kept)
        nothing = torch.zeros_like(case.k[:, :, count:]).double()
        for name in ("dk", "dv"):
            found[name] = torch.cat([found[name], nothing], dim=2)
        return found

    return mistake


def shifted_heads(case: AttentionCase) -> Results:
    rolled = dataclasses.replace(case, k=case.k.roll(1, 1), v=case.v.roll(1, 1))
    found = exact(rolled)
    return {n: x.roll(-1, 1) if n in ("dk", "dv") else x for n, x in found.items()}


def last_head(case: AttentionCase) -> Results:
    right, wrong = exact(case), exact(dataclasses.replace(case, scale=1.03 * case.scale))
    found = {n: torch.cat([x[:, :-1], wrong[n][:, -1:]], dim=1) for n, x in right.items()}
    for name in ("dq", "dk"):  # the factor is taken for a part of S, and not differentiated
        found[name][:, -1] /= 1.03
    return found


def unnormalised(case: AttentionCase) -> Results:
    found = exact(case)
    S = (case.q.double() @ case.k.double().transpose(-1, -2)) * case.scale
    assert case.grad_out is not None
    P = (S - S.amax(dim=-1, keepdim=True)).exp()
    return {**found, "dv": P.transpose(-1, -2) @ case.grad_out.double()}


def scaled(name: str, factor: float) -> Callable[[AttentionCase], Results]:
    return lambda case: {n: x * factor if n == name else x for n, x in exact(case).items()}


MISTAKES: dict[str, Callable[[AttentionCase], Results]] = {
    "scale_off": lambda case: exact(dataclasses.replace(case, scale=1.01 * case.scale)),
    "causal_off_by_one": lambda case: exact(dataclasses.replace(case, causal_offset=1)),
    "last_tile_dropped": first_keys(192),
    "last_keys_dropped": first_keys(192),
    "kv_heads_shifted": shifted_heads,
    "one_head_wrong": last_head,
    "zeros": lambda case: {
        **mistaken_delta(case, torch.zeros_like),
        "out": torch.zeros(case.q.shape).double(),
    },
    "output_larger": lambda case: {
        **mistaken_delta(case, lambda x: x * (1 + 1 / 256)),
        "out": exact(case)["out"] * (1 + 1 / 256),
    },
    "lse_in_base_2": scaled("lse", 1 / math.log(2)),
    "dq_without_scale": scaled("dq", 1 / 0.125),
    "delta_missing": lambda case: mistaken_delta(case, torch.zeros_like),
    "delta_of_the_next_row": lambda case: mistaken_delta(case, lambda x: x.roll(-1, -1)),
    "dv_unnormalised": unnormalised,
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_mistake_is_the_one_it_says(name: str) -> None:
    """In fp32 it is the exact result of that mistake, to 1e-5 of its size, in every tensor."""
    case = drawn(dtype=torch.float32, is_causal=name == "causal_off_by_one")
    found, expected = step(BY_NAME[name].function, case), MISTAKES[name](case)
    for tensor, x in expected.items():
        assert float((found[tensor] - x).norm()) <= 1e-5 * float(x.norm()), tensor


# Fault: the tensors that it makes worse. The measured ratios to a sound kernel are 1.37 or more in
# these, and 1.03 or less in others.
WORSE = {
    "p_truncated": ("out", "dv"),
    "p_in_4_bits": ("out", "dq", "dk"),
    "row_sum_rounded": ("out", "lse", "dq", "dk", "dv"),
    "accumulator_rounded": ("out",),
    "scores_rounded": ("out", "lse", "dq", "dk", "dv"),
    "stale_maximum": ("out", "lse", "dq", "dk", "dv"),
    "non_deterministic": (),
    "ds_truncated": ("dq", "dk"),
    "dq_accumulator_rounded": ("dq",),
}


def test_every_fault_is_in_one_of_the_tables() -> None:
    assert set(BY_NAME) == MISTAKES.keys() | WORSE.keys()


@pytest.mark.parametrize("name", WORSE)
def test_a_rounding_fault_makes_its_tensors_worse_and_no_others(name: str) -> None:
    """The rms error beside that of the sound kernel on the same inputs."""
    case = drawn()
    truth = exact(case)
    sound, wrong = (errors(step(f, case), truth) for f in (planted.sound, BY_NAME[name].function))
    worse = {tensor for tensor in truth if wrong[tensor] > 1.2 * sound[tensor]}
    assert worse == set(WORSE[name])


def test_the_order_is_drawn() -> None:
    """Runs of `non_deterministic` differ, forward and backward."""
    case = drawn()
    runs = [step(BY_NAME["non_deterministic"].function, case) for _ in range(6)]
    for name in ("out", "dq"):
        assert any(not torch.equal(runs[0][name], run[name]) for run in runs[1:]), name


def shrinkage(result: Tensor, truth: Tensor) -> float:
    """How much smaller the result is along the truth, in unit roundoffs of bf16 (half an ulp)."""
    return (1 - float((result * truth).sum() / (truth**2).sum())) * 2**8


@pytest.mark.parametrize(
    ("name", "tensors"), [("p_truncated", ("out", "dv")), ("ds_truncated", ("dq", "dk"))]
)
def test_truncation_shrinks(name: str, tensors: tuple[str, ...]) -> None:
    """What is cut loses half an ulp on average, which is u / s of a significand s: between u / 2
    and u, and 0.72 u for significands spread like 1 / s."""
    case = drawn()
    truth, wrong = exact(case), step(BY_NAME[name].function, case)
    for tensor in tensors:
        assert 0.5 < shrinkage(wrong[tensor], truth[tensor]) < 1.0, tensor
