"""Attention whose errors lean to one side, and two that do not: what the bias statistic is
calibrated by. All compute in fp32 or more and round once, but for what each says."""

from __future__ import annotations

import torch
from torch import Tensor

from numdev.cases import AttentionCase, explicit_mask
from numdev.formats import round_to, ulp
from numdev.kernels import Output
from numdev.kernels.reference import attend
from planted.record import planted


@planted("sound", "In fp32, rounded once and correctly.")
def fp32(case: AttentionCase) -> Output:
    k, v = (x.repeat_interleave(case.group, dim=1) for x in (case.k, case.v))
    P = torch.softmax(_scores(case.q.float(), k.float(), case), dim=-1)
    return Output(out=(P.nan_to_num(0.0) @ v.float()).to(case.q.dtype))


@planted("rounding", "P and the un-normalised PV are in the working format.")
def unnormalised(case: AttentionCase) -> Output:
    q, k, v = (x.double() for x in (case.q, case.k, case.v))
    S = _scores(q, k, case)
    P = torch.exp(S - S.amax(dim=-1, keepdim=True))
    PV = round_to(round_to(P, case.format) @ v, case.format)
    return _in_format(PV / P.sum(dim=-1, keepdim=True), case)


@planted("rounding", "The exact result is cut to the format instead of rounded.")
def truncated(case: AttentionCase) -> Output:
    out = round_to(attend(case).out, case.format, "toward_zero")
    return Output(out=out.to(case.q.dtype))


@planted("rounding", "One element in ten is an ulp, at the term scale, too high.")
def drift(case: AttentionCase) -> Output:
    exact, draw = attend(case), _generator(case)
    chosen = torch.rand(exact.out.shape, generator=draw, device=draw.device) < 0.1
    off = chosen * ulp(exact.term_scale, case.format)
    return _in_format(round_to(exact.out, case.format) + off, case)


@planted("rounding", "The exact result is rounded stochastically: without bias itself.")
def stochastic(case: AttentionCase) -> Output:
    draw = _generator(case)
    out = round_to(attend(case).out, case.format, "stochastic", generator=draw)
    return Output(out=out.to(case.q.dtype))


def _scores(q: Tensor, k: Tensor, case: AttentionCase) -> Tensor:
    """Raises NotImplementedError for a soft cap, sinks and masks that are added."""
    if case.softcap is not None or case.sinks is not None:
        raise NotImplementedError("a soft cap or sinks")
    if case.mask is not None and case.mask.dtype != torch.bool:
        raise NotImplementedError("a mask that is added")
    S, mask = q @ k.mT * case.scale, explicit_mask(case)
    return S if mask is None else S.masked_fill(~mask, -torch.inf)


def _in_format(out: Tensor, case: AttentionCase) -> Output:
    return Output(out=round_to(out, case.format).to(case.q.dtype))


def _generator(case: AttentionCase) -> torch.Generator:
    """Other numbers for other inputs."""
    return torch.Generator(case.q.device).manual_seed(int(case.q.float().abs().sum()))
