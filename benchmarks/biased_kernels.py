"""Real kernels on constructed inputs: which of them round to one side, and what it does to dQ.

Of each kernel that runs here, in bf16 and fp16: the outward error of its O in ulps; the error of
delta = rowsum(dO o O) from its own O; the relative error of its dQ; and *pushed*, the error of dQ
along the direction in which an error of delta pushes it. dQ_T = scale (dS K)_T moves by
-scale e_T (P K)_T where delta is off by e_T (formula 1 of Qiu & Yao), so pushed is the e_T that
explains most of dQ's error, in the unit of delta. If it equals the error of delta, the bias of O is
what dQ's error is made of. Beside each kernel stands the emulation that it claims to be.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from biased_measures import (
    case_of,
    delta_from,
    delta_size,
    head,
    outward,
    per_sequence,
    relative,
    row,
    text,
)
from torch import Tensor

from numdev.audit.attempt import Failure, attempt
from numdev.cases import AttentionCase
from numdev.errors import UsageError
from numdev.kernels import Kernel, Output, all_kernels, find
from numdev.kernels.reference import gradients
from numdev.kernels.reference.results import Gradients
from numdev.system import System

INPUTS: Mapping[str, Mapping[str, Any]] = {
    "two ties, V alike": {"tail": 1e-4},
    "two ties, |V| there 1/8": {"tail": 1e-4, "value": 0.125},
    "two ties, |V| there 8 times": {"tail": 1e-4, "value": 8.0},
    "one key, |V| there 1/8": {"tail": 1e-4, "value": 0.125, "count": 1},
}
FILLED: Mapping[str, Mapping[str, Any]] = {"bfloat16": {}, "float16": {"v_bits": 11}}
"""Values of V that fill the format."""
SMALLER = {"bfloat16": 1.0, "float16": 0.125}
"""The tail's mass, so that it is the same part of an ulp."""
LENGTH = 128
LEFT_OUT = ("reference", "emulated", "sdpa-default")
TRITON: tuple[Mapping[str, Any], ...] = (
    {},
    {"l_from": "rounded"},
    {"accumulator": "working"},
    {"delta_from": "dP*P"},
    {"delta_o": "float32"},
    {"softmax": "stabilised"},
    {"softmax": "guarded"},
)
"""Options of triton-flash that are tried; those it does not have are left out."""


def show(seeds: Sequence[int]) -> None:
    for device in (*(("cuda",) if torch.cuda.is_available() else ()), "cpu"):
        system = System.here(device)
        name = torch.cuda.get_device_name() if device == "cuda" else system.cpu_capability
        for fmt in ("bfloat16", "float16"):
            print(f"\n### {name}, {fmt}")
            for title, options in INPUTS.items():
                print(f"\n{title}:\n")
                fitting = {**options, **FILLED[fmt], "tail": options["tail"] * SMALLER[fmt]}
                table(fitting, seeds, fmt, device, system)
    print(f"\nnot run: {', '.join(skipped(System.here('cpu'))) or 'none'}")


def skipped(system: System) -> list[str]:
    """Kernels that cannot run on the CPU, nor on a GPU that is not there."""
    here = [system, *([System.here("cuda")] if torch.cuda.is_available() else [])]
    return [name for name, k in all_kernels().items() if all(k.missing(s) for s in here)]


def runs(system: System) -> list[tuple[Kernel, Mapping[str, Any]]]:
    """What can run here, with its options."""
    kernels = [k for k in all_kernels().values() if k.name not in LEFT_OUT]
    return [
        (kernel, options)
        for kernel in kernels
        if kernel.missing(system) is None
        for options in (TRITON if kernel.name == "triton-flash" else ({},))
        if has(kernel, options)
    ]


def has(kernel: Kernel, options: Mapping[str, Any]) -> bool:
    try:
        kernel.with_options(options)
    except UsageError:
        return False
    return True


def table(
    options: Mapping[str, Any], seeds: Sequence[int], fmt: str, device: str, system: System
) -> None:
    case = case_of(options, seeds=seeds, rows=LENGTH, keys=LENGTH, fmt=fmt, device=device)
    exact = gradients(case)
    head("kernel", "O, ulp outward", "delta error", "pushed", "dQ, relative", "as it claims", "s")
    for kernel, given in runs(system):
        name = " ".join([kernel.name, *(f"{k}={v}" for k, v in given.items())])
        start = time.perf_counter()
        output = attempt(kernel, case, kernel.with_options(given), gradients=True)
        took = time.perf_counter() - start
        if isinstance(output, Failure):
            row(name, output.reason[:90], "", "", "", "", "")
            continue
        cells = measured(case, exact, output)
        row(name, *cells, claimed(case, exact, kernel, output, system), f"{took:.1f}")


def measured(case: AttentionCase, exact: Gradients, output: Output) -> list[str]:
    """O, delta, pushed and dQ."""
    size = delta_size(case, exact)
    wrong = (delta_from(case, output.out) - delta_from(case, exact.out)) / size
    assert output.dq is not None
    along = pushed(case, exact, output.dq) / size
    return [
        text(outward(output.out, exact.out, case.format)),
        text(per_sequence(wrong), 5),
        text(per_sequence(along), 5),
        text(relative(output.dq, exact.dq)),
    ]


def pushed(case: AttentionCase, exact: Gradients, dq: Tensor) -> Tensor:
    """The error of delta, [B, H, rows], that explains most of dq's error: its projection on
    -scale (P K)."""
    PK = weighted_keys(case)
    error = dq.double() - exact.dq
    return -(error * PK).sum(dim=-1) / (case.scale * PK.square().sum(dim=-1))


def weighted_keys(case: AttentionCase) -> Tensor:
    """P K in fp64, [B, H, rows, head_dim], of a call without a mask or grouped heads."""
    q, k = case.q.double(), case.k.double()
    return torch.softmax(q @ k.mT * case.scale, dim=-1) @ k


def claimed(
    case: AttentionCase, exact: Gradients, kernel: Kernel, output: Output, system: System
) -> str:
    """The bias of O, and the error of dQ, of the emulation that the kernel claims to be."""
    claim = kernel.claims(case, output, system)
    if claim is None:
        return ""
    emulated = find("emulated").gradients(case, **claim)
    assert emulated.dq is not None
    bias = text(outward(emulated.out, exact.out, case.format))
    return f"O {bias}, dQ {text(relative(emulated.dq, exact.dq))}"
