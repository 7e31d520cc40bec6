"""One variant of one seed: its network, its optimiser, and a step of them.

A lane uses no random numbers but those of generators of its own, and shares nothing with the lanes
beside it but the batch, so it computes the same whoever runs beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from numdev.config import Choice
from numdev.errors import MeasurementError, NumdevError
from numdev.kernels import Kernel, find
from numdev.training.attention import Attention
from numdev.training.config import ModelConfig, Variant
from numdev.training.data import seed_of
from numdev.training.models import build
from numdev.training.network import Batch, Network
from numdev.training.nulls import move_weights
from numdev.training.optimiser import make_optimiser, rate, set_rate
from numdev.training.replay import RECORDABLE, Replay

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Lane:
    """A variant at step 0, or wherever `load` puts it."""

    def __init__(
        self,
        variant: Variant,
        model: ModelConfig,
        vocabulary: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.variant, self.device = variant, device
        (kernel, options), *behind = (_found(choice) for choice in variant.kernels)
        rerounds, draws = variant.role == "null_rounding", kernel.draws(options)
        self.noise = None
        """What all random numbers of the lane come from; None where it has none."""
        if rerounds:
            made = seed_of("rounding", seed, variant.name)
            self.noise = torch.Generator(device).manual_seed(made)
        elif draws:  # without its name: a repeat of the golden run draws what that one drew
            made = seed_of("draws", seed + variant.seed, options.get("seed"))
            self.noise = torch.Generator(device).manual_seed(made)
        self.attention = Attention(
            kernel,
            options,
            dtype=DTYPES.get(variant.attention_format or ""),
            noise=self.noise if rerounds else None,
            draws=self.noise if draws else None,
            behind=behind[0] if behind else None,
        )
        with _named(variant):
            self.network = self._built(model, vocabulary, seed).to(device).train()
            self.parameters = list(self.network.parameters())
            self.optimiser = make_optimiser(variant.optimiser, self.network)
        self.scaler = torch.amp.GradScaler(device.type, enabled=variant.format == "float16")
        self.loss: Tensor | None = None
        """Of the last batch, on the device."""
        self.norm: Tensor | None = None
        """Of the last batch's gradients, before clipping, on the device."""
        self.lr: float | None = None
        self._update = self._unrecorded()

    def _built(self, model: ModelConfig, vocabulary: int, seed: int) -> Network:
        network = build(model, vocabulary, seed + self.variant.seed, self.attention)
        if self.variant.format == "pure bfloat16":
            network = network.to(torch.bfloat16)
        if self.variant.role == "null_ulp":
            made = seed_of("ulp", seed, self.variant.name)
            move_weights(network, torch.Generator().manual_seed(made))
        return network

    def _unrecorded(self) -> Replay | None:
        return Replay(self.device, self.noise) if self._recordable else None

    @property
    def _recordable(self) -> bool:
        plain = not self.scaler.is_enabled() and self.device.type == "cuda"
        used = [_found(choice) for choice in self.variant.kernels]
        known = all(kernel.name in RECORDABLE for kernel, _ in used)
        # Of two kernels neither draws from the lane's generator, which the recording knows.
        foreign = len(used) > 1 and any(kernel.draws(options) for kernel, options in used)
        return plain and known and not foreign

    def step(self, batch: Batch, step: int, steps: int) -> None:
        """Update `step` of `steps`, from this batch. Nothing waits for the device."""
        self.lr = rate(self.variant.optimiser, step, steps)
        for group in self.optimiser.param_groups:
            set_rate(group, self.lr)
        with _named(self.variant):
            if self._update is None:
                self.loss, self.norm = self._updated(batch)
            else:
                watched = self.attention.largest is not None
                self.loss, self.norm = self._update(self._updated, batch, plain=watched)

    def _updated(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """One update; the loss and the norm of its gradient."""
        loss = self._backward(batch)
        self.scaler.unscale_(self.optimiser)
        clip = self.variant.optimiser.clip
        norm = nn.utils.clip_grad_norm_(self.parameters, math.inf if clip is None else clip)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.optimiser.zero_grad()
        return loss, norm

    def gradient(self, batch: Batch) -> dict[str, Tensor]:
        """The gradient of a batch's loss by parameter, and nothing of the lane changed."""
        before = None if self.noise is None else self.noise.get_state()
        with _named(self.variant):
            self._backward(batch)
        scale = self.scaler.get_scale()
        found = {
            name: torch.zeros_like(p) if p.grad is None else p.grad / scale
            for name, p in self.network.named_parameters()
        }
        self.optimiser.zero_grad()
        if self.noise is not None and before is not None:
            self.noise.set_state(before)
        return found

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
        self._update = self._unrecorded()
        self.network.load_state_dict(state["network"])
        self.optimiser.load_state_dict(state["optimiser"])
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"] = group["lr"].to(self.device)
        self.scaler.load_state_dict(state["scaler"])
        if self.noise is not None:
            self.noise.set_state(state["noise"].cpu())

    def _backward(self, batch: Batch) -> Tensor:
        """The loss; gradients are in the parameters."""
        with self._autocast():
            loss = self.network.loss(batch)
        self.scaler.scale(loss).backward()
        return loss.detach()

    def _autocast(self) -> AbstractContextManager[Any]:
        name = self.variant.format
        dtype = torch.float16 if name == "float16" else torch.bfloat16
        return torch.autocast(
            self.device.type,
            dtype,
            enabled=name in ("bfloat16", "float16"),
            # What was cast while a step is recorded has no value afterwards.
            cache_enabled=not self._recordable,
        )


def _found(choice: Choice) -> tuple[Kernel, dict[str, Any]]:
    kernel = find(choice.name)
    return kernel, kernel.with_options(choice.options)


@contextmanager
def _named(variant: Variant) -> Iterator[None]:
    """What goes wrong in here, as MeasurementError that names the variant. A kernel may be foreign
    code: anything may come out of it."""
    try:
        yield
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        said = (
            error.message if isinstance(error, NumdevError) else f"{type(error).__name__}: {words}"
        )
        raise MeasurementError(
            f"variant {variant.name} ({variant.kernel.name}): {said}", hint=_hint(error)
        ) from error


def _hint(error: Exception) -> str:
    if isinstance(error, NumdevError) and error.hint:
        return error.hint
    if "deterministic" in str(error):
        return "`deterministic: false` allows all algorithms"
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return "choose a smaller `batch` or `model`, or fewer variants: all are in memory together"
    return "leave the variant out, or give it another kernel"


def groups_of(names: Iterator[str] | list[str]) -> dict[str, list[str]]:
    """Parameters by kind: embedding, attention, mlp, norm (adaLN with it), head; and `all`."""
    found: dict[str, list[str]] = {"all": list(names)}
    for name in found["all"]:
        found.setdefault(_kind(name), []).append(name)
    return found


def _kind(name: str) -> str:
    words = {
        "norm": ("norm", "ln_", "modulation"),
        "embedding": ("embed", "wte", "wpe"),
        "attention": ("attn",),
        "mlp": ("mlp",),
    }
    return next((kind for kind, parts in words.items() if any(p in name for p in parts)), "head")
