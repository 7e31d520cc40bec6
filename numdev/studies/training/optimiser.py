"""AdamW and SGD as PyTorch's fused functions compute them, around state of our own.

torch.optim's classes import torch._dynamo when they are made, three seconds of CPU that
compile nothing here; the functions that they call do not. Every number is that of
torch.optim.AdamW and torch.optim.SGD with `fused=True` (tests/test_train.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from numdev.studies.training.config import Optimiser

Slots = dict[
    str, Tensor
]  # the optimiser's state of one parameter, by torch.optim's names


class Updates:
    """Updates of parameters in place from their gradients, by AdamW or SGD
    (`config.name`): one launch for all weights of a group. Weight decay is on parameters
    of two or more dimensions alone. A parameter without a gradient stays as it is.
    `parameters`: at least one, all on one device."""

    # By this torch.amp.GradScaler hands `found_inf` over on the device, and does not wait
    _step_supports_amp_scaling = True

    def __init__(self, config: Optimiser, parameters: Sequence[nn.Parameter]) -> None:
        self.config = config
        device = parameters[0].device
        self.capturable = device.type == "cuda"
        # On the device, where a recorded step finds it.
        self.lr = torch.tensor(config.lr, device=device) if self.capturable else config.lr
        matrices = [p for p in parameters if p.ndim >= 2]
        others = [p for p in parameters if p.ndim < 2]
        # GradScaler reads it by this name
        self.param_groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.slots: dict[nn.Parameter, Slots] = {}
        self.update: Callable[..., None] = (
            self._sgd if config.name == "sgd" else self._adamw
        )

    def set_rate(self, lr: float) -> None:
        """Sets the learning rate of all later steps. Nothing waits for the device."""
        if isinstance(self.lr, Tensor):
            self.lr.fill_(lr)
        else:
            self.lr = lr

    @torch.no_grad()
    def step(self) -> None:
        """Updates every parameter that has a gradient, in place, at the rate that is set;
        none where a GradScaler found a gradient that is not finite. Gradients stay."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self.update(
                    parameters,
                    [p.grad for p in parameters],
                    lr=self.lr,
                    weight_decay=group["weight_decay"],
                    maximize=False,
                    foreach=False,
                    fused=True,
                    # Both set by GradScaler
                    grad_scale=getattr(self, "grad_scale", None),
                    found_inf=getattr(self, "found_inf", None),
                )

    def zero_grad(self) -> None:
        """Sets the gradient of every parameter to None."""
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def state(self) -> list[Slots]:
        """Returns the optimiser's state of each parameter, matrices first: tensors by
        torch.optim's names, not copied. Empty for a parameter without an update yet, and
        for SGD without momentum. With the weights they decide all later steps."""
        return [self.slots.get(p, {}) for p in self._parameters()]

    def load_state(self, state: Sequence[Slots]) -> None:
        """Continues from what `state` returned, in its order. Tensors on another device
        than their parameter's are copied to it; others are used as they are, and change
        with later steps. A parameter whose state is empty starts anew. Raises ValueError
        for a state of another number of parameters."""
        self.slots = {
            p: {name: x.to(p.device) for name, x in slots.items()}
            for p, slots in zip(self._parameters(), state, strict=True)
            if slots
        }

    def _parameters(self) -> list[nn.Parameter]:
        """Returns all parameters, matrices first."""
        return [p for group in self.param_groups for p in group["params"]]

    def _adamw(
        self, parameters: list[nn.Parameter], grads: list[Tensor], **same: Any
    ) -> None:
        """Makes one update by AdamW of parameters with gradients, in place. `same`: the
        arguments that PyTorch's functions have in common."""
        for p in parameters:
            if p not in self.slots:
                self.slots[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(
                        p, memory_format=torch.preserve_format
                    ),
                }
        slots = [self.slots[p] for p in parameters]
        beta1, beta2 = self.config.betas
        adamw(
            list[Tensor](parameters),
            grads,
            [slot["exp_avg"] for slot in slots],
            [slot["exp_avg_sq"] for slot in slots],
            [],
            [slot["step"] for slot in slots],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            eps=self.config.eps,
            capturable=self.capturable,
            **same,
        )

    def _sgd(
        self, parameters: list[nn.Parameter], grads: list[Tensor], **same: Any
    ) -> None:
        """Makes one update by SGD of parameters with gradients, in place. `same`: the
        arguments that PyTorch's functions have in common."""
        buffers = [self.slots.get(p, {}).get("momentum_buffer") for p in parameters]
        momentum = self.config.momentum
        sgd(
            list[Tensor](parameters),
            grads,
            buffers,
            momentum=momentum,
            dampening=0.0,
            nesterov=False,
            **same,
        )
        if momentum:
            for p, buffer in zip(parameters, buffers, strict=True):
                if buffer is not None:
                    self.slots[p] = {"momentum_buffer": buffer}
