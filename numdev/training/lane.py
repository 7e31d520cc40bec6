"""One variant of one seed: its network, its attention, its optimiser, and a step of them.

A lane uses no random numbers but those of a generator of its own, and shares nothing with the lanes
beside it but the batch, so it computes the same whoever runs beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from numdev.cases import AttentionCase, CaseRef
from numdev.errors import MeasurementError, NumdevError
from numdev.kernels import Kernel, find
from numdev.kernels.training import attended, crossed
from numdev.training.config import ModelConfig, Optimiser, Variant
from numdev.training.data import seed_of
from numdev.training.models import Batch, build
from numdev.training.nulls import move_weights, rerounded
from numdev.training.replay import RECORDABLE, Replay

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HERE = CaseRef(case="training")
Chosen = tuple[Kernel, Mapping[str, Any]]
"""A kernel and its options."""


@dataclass(kw_only=True)
class Attention:
    """attend(q, k, v) of `numdev.training.models`: a registered kernel as a network calls
    it. q, k and v are cast to `dtype` where one is given, and the output comes in q's own dtype."""

    kernel: Chosen
    behind: Chosen | None  # whose gradients it has, where they are not its own
    dtype: torch.dtype | None
    noise: torch.Generator | None  # with which outputs are re-rounded at random
    draws: torch.Generator | None  # from which a kernel draws random numbers
    ran: str | None = None  # what the kernel says it runs, once it was asked
    largest: list[Tensor] | None = None  # if it is a list, every call adds its `largest_score`

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own, dtype, scale = q.dtype, self.dtype or q.dtype, 1 / math.sqrt(q.shape[-1])
        q, k, v = (x.to(dtype) for x in (q, k, v))
        case = AttentionCase(ref=HERE, q=q, k=k, v=v, scale=scale, is_causal=True)
        if self.largest is not None:
            self.largest.append(largest_score(case))
        kernel, options = self.kernel
        if self.ran is None:
            with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
                self.ran = kernel.attend(case, **options).ran or ""
        if self.behind is None:
            out = attended(kernel, case, options, self.draws).to(own)
        else:
            out = crossed(kernel, case, options, *self.behind).to(own)
        return out if self.noise is None else rerounded(out, self.noise)


@torch.no_grad()
def largest_score(case: AttentionCase) -> Tensor:
    """The largest |scale q·k| that a query sees, a float32 scalar, computed in float32; NaN if any
    is. A sequence at a time, which bounds the memory."""
    largest = []
    with torch.autocast(case.q.device.type, enabled=False):
        for q, k in zip(case.q.float(), case.k.float(), strict=True):
            scores = q.unflatten(0, (case.kv_heads, -1)) @ k[:, None].transpose(-1, -2)
            scores = scores.mul_(case.scale).abs_()
            largest.append((scores.tril() if case.is_causal else scores).amax())
    return torch.stack(largest).amax()


def rate(config: Optimiser, step: int, steps: int) -> float:
    """The learning rate of update `step`, counted from 1: linear up to `lr` over the warm-up, then
    constant, or half a cosine down to `final` of it at the last step."""
    if step <= config.warmup:
        return config.lr * step / config.warmup
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup) / max(1, steps - config.warmup)
    low = config.final
    return config.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


def make_optimiser(config: Optimiser, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Fused: one launch for all weights. Decay on matrices, none on gains and biases."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    device = parameters[0].device
    cuda = device.type == "cuda"
    # On the device, where a recorded step finds it.
    lr = torch.tensor(config.lr, device=device) if cuda else config.lr
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=config.momentum, fused=True)
    return torch.optim.AdamW(
        groups, lr=lr, betas=config.betas, eps=config.eps, fused=True, capturable=cuda
    )


class Lane:
    """A variant at step 0, or wherever `load` puts it. `loss`, and `norm`, that of the gradient
    before clipping, are of the last batch, on the device."""

    def __init__(
        self, variant: Variant, model: ModelConfig, vocabulary: int, seed: int, device: torch.device
    ) -> None:
        self.variant, self.device = variant, device
        self.loss: Tensor | None = None
        self.norm: Tensor | None = None
        self.lr: float | None = None
        kernels = [find(choice.name) for choice in variant.kernels]
        options = [k.with_options(c.options) for k, c in zip(kernels, variant.kernels, strict=True)]
        own, *behind = zip(kernels, options, strict=True)
        draws = [kernel.draws(given) for kernel, given in zip(kernels, options, strict=True)]
        rerounds = variant.role == "null_rounding"
        self.noise = None  # what all random numbers of the lane come from
        if rerounds:
            made = seed_of("rounding", seed, variant.name)
            self.noise = torch.Generator(device).manual_seed(made)
        elif draws[0]:  # without its name: a repeat of the golden run draws what that one drew
            made = seed_of("draws", seed + variant.seed, options[0].get("seed"))
            self.noise = torch.Generator(device).manual_seed(made)
        self.attention = Attention(
            kernel=own,
            behind=behind[0] if behind else None,
            dtype=DTYPES.get(variant.attention_format or ""),
            noise=self.noise if rerounds else None,
            draws=self.noise if draws[0] else None,
        )
        with _named(variant):
            network = build(model, vocabulary, seed + variant.seed, self.attention)
            if variant.format == "pure bfloat16":
                network = network.to(torch.bfloat16)
            if variant.role == "null_ulp":
                made = seed_of("ulp", seed, variant.name)
                move_weights(network, torch.Generator().manual_seed(made))
            self.network = network.to(device).train()
            self.parameters = list(network.parameters())
            self.optimiser = make_optimiser(variant.optimiser, self.parameters)
        self.scaler = torch.amp.GradScaler(device.type, enabled=variant.format == "float16")
        # Of two kernels neither may draw: only the first draws from what a recording knows.
        self.recordable = (
            device.type == "cuda"
            and not self.scaler.is_enabled()
            and all(kernel.name in RECORDABLE for kernel in kernels)
            and not (behind and any(draws))
        )
        self.forget()

    def forget(self) -> None:
        """Record the step anew, where it is recorded at all."""
        self.replay = Replay(self.device, self.noise) if self.recordable else None

    def step(self, batch: Batch, step: int, steps: int) -> None:
        """Update `step` of `steps`, from this batch. Nothing waits for the device."""
        self.lr = rate(self.variant.optimiser, step, steps)
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.lr)
            else:
                group["lr"] = self.lr
        with _named(self.variant):
            if self.replay is None:
                self.loss, self.norm = self._update(batch)
            else:
                watched = self.attention.largest is not None
                self.loss, self.norm = self.replay(self._update, batch, plain=watched)

    def _update(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """One update; the loss and the norm of its gradient."""
        loss = self._backward(batch)
        self.scaler.unscale_(self.optimiser)
        clip = self.variant.optimiser.clip
        norm = nn.utils.clip_grad_norm_(self.parameters, math.inf if clip is None else clip)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.optimiser.zero_grad()
        return loss, norm

    def _backward(self, batch: Batch) -> Tensor:
        """The loss; gradients are in the parameters."""
        name = self.variant.format
        with torch.autocast(
            self.device.type,
            torch.float16 if name == "float16" else torch.bfloat16,
            enabled=name in ("bfloat16", "float16"),
            # What was cast while a step is recorded has no value afterwards.
            cache_enabled=not self.recordable,
        ):
            loss = self.network.loss(batch)
        self.scaler.scale(loss).backward()
        return loss.detach()

    def gradient(self, batch: Batch) -> dict[str, Tensor]:
        """The gradient of a batch's loss by parameter, and nothing of the lane changed."""
        before = None if self.noise is None else self.noise.get_state()
        with _named(self.variant):
            self._backward(batch)
        scale = self.scaler.get_scale()
        gradient = {
            name: torch.zeros_like(p) if p.grad is None else p.grad / scale
            for name, p in self.network.named_parameters()
        }
        self.optimiser.zero_grad()
        if self.noise is not None and before is not None:
            self.noise.set_state(before)
        return gradient

    def weights(self) -> dict[str, Tensor]:
        """By name, as they are now."""
        return {name: p.detach() for name, p in self.network.named_parameters()}

    def state(self) -> dict[str, Any]:
        """Everything that decides the steps to come, as tensors and plain data."""
        return {
            "network": self.network.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "scaler": self.scaler.state_dict(),
            "noise": None if self.noise is None else self.noise.get_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned. A recorded step is forgotten: the optimiser's state is
        elsewhere now."""
        self.forget()
        self.network.load_state_dict(state["network"])
        self.optimiser.load_state_dict(state["optimiser"])
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"] = group["lr"].to(self.device)
        self.scaler.load_state_dict(state["scaler"])
        if self.noise is not None:
            self.noise.set_state(state["noise"].cpu())


@contextmanager
def _named(variant: Variant) -> Iterator[None]:
    """What goes wrong in here, as MeasurementError that names the variant. A kernel may be foreign
    code: anything may come out of it."""
    try:
        yield
    except Exception as error:
        words, hint = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", None
        if "deterministic" in str(error):
            hint = "`deterministic: false` allows all algorithms"
        elif isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            hint = "choose a smaller `batch` or `model`, or fewer variants: all are in memory"
        elif isinstance(error, NumdevError):
            words, hint = error.message, error.hint
        raise MeasurementError(
            f"variant {variant.name} ({variant.kernel.name}): {words}",
            hint=hint or "leave the variant out, or give it another kernel",
        ) from error
