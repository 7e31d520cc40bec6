"""Functions with a reference, sound and faulty, that tests check: an RMSNorm as models
write it, and others, importable by name in another process."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

REUSED: dict[str, Tensor] = {}


def rms_norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """The reference: normalised in float32, cast, weighted."""
    wide = x.float()
    r = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return w * (wide * r).to(x.dtype)


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(seed))
    return x.bfloat16(), torch.ones(256).bfloat16()


def fused(x: Tensor, w: Tensor) -> Tensor:
    """Rounded once."""
    wide = x.float()
    r = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + 1e-6)
    return (wide * r * w.float()).to(x.dtype)


def split(x: Tensor, w: Tensor) -> Tensor:
    """Sums of two halves, and another order of products."""
    halves = x.float().chunk(2, dim=-1)
    total = sum(half.square().sum(dim=-1, keepdim=True) for half in halves)
    return (x.float() * (w.float() * torch.rsqrt(total / x.shape[-1] + 1e-6))).to(x.dtype)


def other_eps(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm(x, w, 1e-1)


def scaled(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm(x, w) * 1.01


def shifted(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm(x, w) + 0.01


def cut(x: Tensor, w: Tensor) -> Tensor:
    mean = x.float()[:, :-64].square().mean(dim=-1, keepdim=True)
    return w * (x.float() * torch.rsqrt(mean + 1e-6)).to(x.dtype)


def without_weight(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm(x, torch.ones_like(w))


def stale_row(x: Tensor, w: Tensor) -> Tensor:
    out = rms_norm(x, w)
    out[17] = out[18]
    return out


def one_nan(x: Tensor, w: Tensor) -> Tensor:
    out = rms_norm(x, w)
    out[3, 5] = torch.nan
    return out


def unwritten(x: Tensor, w: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:-1] = rms_norm(x, w)[:-1]
    return out


def other_shape(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm(x, w)[None]


def other_dtype(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm(x, w).float()


def nothing(x: Tensor, w: Tensor) -> None:
    return None


def two(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return rms_norm(x, w), x


def writes(x: Tensor, w: Tensor) -> Tensor:
    x.mul_(2)
    return rms_norm(x, w)


def alias(x: Tensor, w: Tensor) -> Tensor:
    return x.view(x.shape)


def reused(x: Tensor, w: Tensor) -> Tensor:
    out = REUSED.setdefault("out", torch.empty_like(x))
    return out.copy_(rms_norm(x, w))


def remembered(x: Tensor, w: Tensor) -> Tensor:
    """The first call's result, whatever comes later."""
    return REUSED.setdefault("first", rms_norm(x, w)).clone()


def raises(x: Tensor, w: Tensor) -> Tensor:
    raise ValueError("no such kernel")


def ends(x: Tensor, w: Tensor) -> Tensor:
    os._exit(3)


def hangs(x: Tensor, w: Tensor) -> Tensor:
    time.sleep(60)
    return x


def loss(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target)


def loss_inputs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 100, generator=generator).bfloat16()
    return x, torch.randint(100, (64,), generator=generator)


def smoothed_loss(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target, label_smoothing=0.1)


def top(x: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = x.topk(4, dim=-1)
    return values, indices


def top_inputs(seed: int) -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))


def top_but_last(x: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = x.topk(5, dim=-1)
    keep = [0, 1, 2, 4]
    return values[:, keep], indices[:, keep]


def writes_after(x: Tensor, w: Tensor) -> Tensor:
    """Right, but autograd cannot go back through what was written."""
    out = rms_norm(x, w)
    x.mul_(2)
    return out


def crashes(x: Tensor, w: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return x


def column_major(x: Tensor, w: Tensor) -> Tensor:
    """Of other strides, which no `.view()` in one axis survives."""
    return rms_norm(x, w).T.contiguous().T


class _TwiceBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def twice_back(x: Tensor, w: Tensor) -> Tensor:
    """Right, with a gradient of x that is twice what it should be."""
    out: Tensor = fused(_TwiceBack.apply(x), w)
    return out


def without_gradient(x: Tensor, w: Tensor) -> Tensor:
    return fused(x, w).detach()


@dataclass
class Record:
    """What some functions return."""

    normed: Tensor
    size: int


def sound_record(x: Tensor, w: Tensor) -> Record:
    return Record(rms_norm(x, w), 1)


def scaled_record(x: Tensor, w: Tensor) -> Record:
    return Record(scaled(x, w), 1)


def sound_twice(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    normed = rms_norm(x, w)
    return normed, normed, normed + w


def scaled_twice(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    normed = rms_norm(x, w)
    return normed, normed, scaled(x, w) + w


def takes_w_for_contiguous(x: Tensor, w: Tensor) -> Tensor:
    """Wrong where w is expanded: it reads numbers that are not there as 0."""
    is_expanded = 0 in w.stride()
    return rms_norm(x, torch.zeros_like(w) if is_expanded else w)


def sound_mapping(x: Tensor, w: Tensor) -> dict[str, Tensor]:
    return {"normed": fused(x, w), "sum": x.float().sum(-1), "doubled": 2 * x}


def scaled_mapping(x: Tensor, w: Tensor) -> dict[str, Tensor]:
    """In another order, one of them too large."""
    of = sound_mapping(x, w)
    return {"sum": of["sum"], "normed": 1.1 * of["normed"], "doubled": of["doubled"]}


def reversed_mapping(x: Tensor, w: Tensor) -> dict[str, Tensor]:
    return dict(reversed(sound_mapping(x, w).items()))
