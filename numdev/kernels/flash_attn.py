"""FlashAttention 2, 3 and 4 as kernels: the packages' own calls, where they are
installed.

The differences of their interfaces (Dao-AILab/flash-attention: `flash_attn_interface.py`,
in the folder `hopper` for version 3, and `flash_attn/cute/interface.py`) are data
(`Version`). Tensors are [batch, length, heads, head_dim]. All align causality and windows
bottom-right: query i at key i + kv_len − q_len."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from numdev.cases import AttentionCase
from numdev.kernels import Output, Requirement, kernel, like_fa2
from numdev.kernels.output import Reason, why_not
from numdev.kernels.sdpa import flash_attention_2
from numdev.system import System

MOST_HEAD_DIM = 256
HALVES = ("float16", "bfloat16")
SPLITS: Mapping[str, object] = {"num_splits": 1, "pack_gqa": None}


class Version(NamedTuple):
    """One version of the flash-attn package: where its function is, what it takes, and
    how it rounds."""

    number: int
    package: str
    module: str
    capability: tuple[int, int]
    summary: str
    options: Mapping[str, object] = SPLITS  # beside `deterministic`, with their defaults
    multiple: int = 8  # of head dimensions, since loads are of 16 bytes; version 2 pads
    unlimited: int | None = -1  # a window's side without a limit
    with_lse: str = "return_attn_probs"

    def unsupported(self, case: AttentionCase) -> str | None:
        """Returns why this version cannot run the case, on any GPU; None where it can."""
        reason = why_not(*self._limits(case))
        return reason and f"flash-attn {self.number} {reason}"

    def _limits(self, case: AttentionCase) -> Iterator[Reason]:
        """Yields each limit of the package as (whether the case exceeds it, what to say),
        for `why_not`."""
        d, d_v, multiple = case.q.shape[-1], case.v.shape[-1], self.multiple
        sinks = None if case.sinks is None else case.sinks.dtype
        offset, at = case.kv_len - case.q_len, case.causal_offset
        elsewhere = case.restricts_positions and at != offset
        negative = any(side is not None and side < 0 for side in case.window or ())
        yield sinks and self.number != 4, "has no attention sinks"
        yield sinks != torch.bfloat16 and sinks, "takes sinks in bfloat16 only"
        yield multiple == 1 and d_v != d, "takes V of the head dimension of Q"
        yield d % multiple or d_v % multiple, "takes multiples of 8 features"
        yield case.format.name not in HALVES, "takes float16 and bfloat16"
        yield case.mask is not None, "takes no mask"
        yield d > MOST_HEAD_DIM, f"takes head dimensions up to {MOST_HEAD_DIM}"
        yield elsewhere, f"aligns bottom-right, an offset of {offset}, not {at}"
        yield negative, "takes a side of a window below 0 for one without a limit"

    def attend(self, case: AttentionCase, **options: object) -> Output:
        """Calls the package's `flash_attn_func` and returns out and lse, with the
        function's name in `ran`. `options` are passed on to it. What the package raises
        passes."""
        left, right = (
            self.unlimited if x is None else x for x in case.window or (None, None)
        )
        if self.number == 4:
            options["learnable_sink"] = case.sinks
        options[self.with_lse] = True
        out, lse, *_ = importlib.import_module(self.module).flash_attn_func(
            *(x.transpose(1, 2) for x in (case.q, case.k, case.v)),
            softmax_scale=case.scale,
            causal=case.is_causal,
            window_size=(left, 0 if case.window and case.is_causal else right),
            softcap=case.softcap or 0.0,
            **options,
        )
        return Output(
            out=out.transpose(1, 2), lse=lse, ran=f"{self.module}.flash_attn_func"
        )

    def claims(
        self, case: AttentionCase, output: Output, system: System
    ) -> Mapping[str, object] | None:
        """Returns how this version rounds, as options of `emulated`. Version 2: as
        PyTorch's copy of it. Version 4 on Blackwell (compute capability 10 or 11): the
        preset `fa4`. Any other: `like_fa2`, whose group is summed in fp32 (`dk_accum` in
        their sources). None with a soft cap, whose tanh is the GPU's approximate one: it
        is off by 2^-11, more than rounding P makes of such scores."""
        if case.softcap is not None:
            return None
        if self.number == 2:
            return flash_attention_2(case, system)
        # As on Blackwell
        if self.number == 4 and (system.capability or (0,))[0] in (10, 11):
            return {"preset": "fa4"}
        return like_fa2(case, output, system)


VERSIONS = (
    Version(2, "flash-attn", "flash_attn", (8, 0), "FlashAttention-2.", {}, multiple=1),
    Version(
        3,
        "flash-attn-3",
        "flash_attn_interface",
        (9, 0),
        ("FlashAttention-3, for Hopper."),
    ),
    Version(
        4,
        "flash-attn-4",
        "flash_attn.cute",
        (9, 0),
        ("FlashAttention-4, for Hopper and Blackwell."),
        unlimited=None,
        with_lse="return_lse",
    ),
)
for _version in VERSIONS:
    kernel(
        f"flash-attn-{_version.number}",
        summary=_version.summary,
        options={**_version.options, "deterministic": False},
        values={"num_splits": 0},  # 0 lets it choose
        requires=Requirement(
            device="cuda", package=_version.package, capability=_version.capability
        ),
        supports=_version.unsupported,
        claims=_version.claims,
    )(_version.attend)
