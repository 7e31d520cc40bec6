"""One attempt at a case: a kernel is foreign code, and anything may come out of it.

Whatever goes wrong becomes a `Failure` with its reason in words. What takes the process along (a
segmentation fault, a hang) is beyond this file: see `numdev.audit.isolation`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import Refused
from numdev.kernels import Kernel, Output
from numdev.layouts import strided_as


@dataclass(frozen=True)
class Failure:
    """Why there is no output. Plain words: an exception would keep the kernel's tensors alive."""

    status: Literal["skipped", "failed"]
    reason: str


Runner = Callable[..., Output | Failure]  # `attempt`, or `Isolated.run` in a process of its own


def attempt(
    kernel: Kernel, case: AttentionCase, options: Mapping[str, Any], *, gradients: bool = False
) -> Output | Failure:
    """The kernel's output, with `gradients` that of one training step, or what went wrong. The
    kernel gets a copy of the inputs, so that writing into them spoils no other kernel's."""
    run = kernel.gradients if gradients else kernel.attend
    try:
        with torch.set_grad_enabled(gradients):
            output = run(copied(case), **options)
        if case.q.is_cuda:
            torch.cuda.synchronize()  # a fault of this kernel comes out here, not in the next one
        return output
    except Refused as refusal:
        return Failure("skipped", refusal.message)
    except Exception as error:
        return Failure("failed", one_line(error))
    except SystemExit as stop:
        return Failure("failed", f"it ended the program (exit code {stop.code})")


def copied(case: AttentionCase) -> AttentionCase:
    """The case with tensors of its own, which lie in memory as the originals do."""
    tensors: dict[str, Any] = {
        name: strided_as(x.clone(), x) for name, x in vars(case).items() if isinstance(x, Tensor)
    }
    return dataclasses.replace(case, **tensors)


def one_line(error: Exception) -> str:
    """The exception's kind and the first line of what it says, without its full stop."""
    text = str(error).strip() or repr(error)
    return f"{type(error).__name__}: {text.splitlines()[0].removesuffix('.')}"
