"""One case on the bench: prepared in a format, with everything kernels are measured against.

What the tasks of one case share (the references, the floor, the baseline) is nearly all the cost of
an audit, so it is computed once per format and all the case's tasks follow each other. What a
kernel returns is measured in `numdev.measuring`.

Kernels always see the whole call. A selection of heads restricts what is measured: the reference is
computed for those heads alone, and outputs are cut down to them. With gradients a selection grows
to whole groups of query heads, since dk and dv are sums over a group.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from numdev import deviation
from numdev.attempt import Failure, attempt
from numdev.cases import AttentionCase, CaseRef, empty_rows
from numdev.deviation import Yardstick
from numdev.expectation import emulated_step, emulation
from numdev.formats import FORMATS, Format, format_named, ulp
from numdev.kernels import Output, find
from numdev.kernels.output import GRADIENTS
from numdev.kernels.reference import Gradients, Reference, attend, gradients

KV_TENSORS = ("dk", "dv")
"""Tensors of kv heads; the others are of query heads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A case in one format, with everything its kernels are measured against."""

    case: AttentionCase
    """Whole: what kernels are given."""
    measured: AttentionCase
    """The selected heads of the case."""
    unrounded: Reference
    reference: Reference
    """Of the selected heads, as is `unrounded`; with gradients where they are wanted."""
    baseline: Output | Failure
    yardsticks: Mapping[str, Yardstick]
    """By tensor: `out`, and with gradients dq, dk and dv."""
    predictions: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """What emulations return, by recipe."""

    @property
    def yardstick(self) -> Yardstick:
        return self.yardsticks["out"]

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(self.yardsticks)

    def predicted(self, claim: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """What the emulation with these options returns for the selected heads, by tensor. In fp32,
        which is a fraction of the reference's cost and agrees in rms with fp64 to 0.1 %."""
        key = repr(sorted(claim.items()))
        if key not in self.predictions:
            self.predictions[key] = self._emulated(claim)
        return self.predictions[key]

    def _emulated(self, claim: Mapping[str, Any]) -> Mapping[str, Tensor]:
        if isinstance(self.reference, Gradients):
            return emulated_step(self.measured, claim)
        return {"out": emulation(self.measured, claim)}

    @cached_property
    def amplification(self) -> Mapping[str, Sequence[float | None]]:
        """Per tensor and head, row_rel of how the exact gradients respond when every input moves
        by one ulp of its format, up or down by chance: how ill-conditioned the problem is."""
        if not isinstance(self.reference, Gradients):
            return {}
        moved = gradients(_moved_by_an_ulp(self.measured))
        return {
            name: [
                head["row_rel"]
                for head in deviation.measure(getattr(moved, name), self.yardsticks[name])
            ]
            for name in GRADIENTS
        }


class Bench:
    """One case. Loads it when first needed, and prepares one format at a time."""

    def __init__(
        self,
        ref: CaseRef,
        load: Callable[[], AttentionCase],
        heads: Sequence[int] | None = None,
        *,
        gradients: bool = False,
    ) -> None:
        self.ref, self._load, self._chosen, self.gradients = ref, load, heads, gradients
        self._at: Prepared | None = None
        self.last: tuple[str, Output] | None = None
        """The task measured last, by its key, and what its kernel returned."""

    @cached_property
    def case(self) -> AttentionCase:
        """The call. What a row that sees no key returns is a convention, and so would be what
        flows back through it: such rows get an upstream gradient of 0."""
        case = self._load()
        if not self.gradients or case.grad_out is None:
            return case
        empty = empty_rows(case)[..., None]
        return dataclasses.replace(case, grad_out=case.grad_out.masked_fill(empty, 0.0))

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """The query heads that are measured, in the order of the case."""
        chosen, case = self._chosen, self.case
        every = range(case.heads)
        if chosen is None:
            return tuple(every)
        if self.gradients:
            groups = {h // case.group for h in chosen}
            return tuple(h for h in every if h // case.group in groups)
        return tuple(h for h in every if h in chosen)

    @cached_property
    def kv_heads(self) -> tuple[int, ...]:
        """The kv heads of the measured query heads."""
        return tuple(sorted({h // self.case.group for h in self.heads}))

    def heads_of(self, tensor: str) -> tuple[int, ...]:
        """The heads of `tensor` that are measured."""
        return self.kv_heads if tensor in KV_TENSORS else self.heads

    def select(self, x: Tensor, tensor: str = "out") -> Tensor:
        """The measured heads of a tensor [batch, heads, ...]."""
        chosen = self.heads_of(tensor)
        return x if len(chosen) == x.shape[1] else x[:, list(chosen)]

    @cached_property
    def _unrounded(self) -> Reference:
        return self._exact(self._selected(self.case))

    def at(self, format_name: str) -> Prepared:
        """The case prepared in a format."""
        fmt = format_named(format_name)
        if self._at is None or self._at.yardstick.format != fmt:
            self._at = None  # free one format's tensors before making the next one's
            self._at = self._prepare(fmt)
        return self._at

    def _exact(self, case: AttentionCase) -> Reference:
        return gradients(case) if self.gradients else attend(case)

    def _selected(self, case: AttentionCase) -> AttentionCase:
        if len(self.heads) == case.heads:
            return case
        if self.gradients:
            return case.select_groups(list(self.kv_heads))
        return case.select_heads(list(self.heads))

    def _prepare(self, fmt: Format) -> Prepared:
        case = self.case.rounded_to(fmt)
        unchanged = fmt.contains(self.case.format)
        measured = self._selected(case)
        exact = self._unrounded if unchanged else self._exact(measured)
        baseline = attempt(find("baseline"), case, {}, gradients=self.gradients)
        by_query, by_key = _arithmetic(measured)

        def yardstick(
            tensor: str, terms: Tensor, empty: Tensor, arithmetic: Tensor, lse: Tensor | None = None
        ) -> Yardstick:
            plain = getattr(baseline, tensor, None)
            return Yardstick(
                reference=getattr(exact, tensor),
                term_scale=terms,
                empty=empty,
                format=fmt,
                lse=lse,
                arithmetic=arithmetic,
                baseline=None if plain is None else self.select(plain, tensor),
                unrounded=getattr(self._unrounded, tensor),
            )

        yardsticks = {
            "out": yardstick("out", exact.term_scale, exact.empty, by_query, exact.lse),
        }
        if isinstance(exact, Gradients):
            # A key that no query sees has gradients of exactly 0, and is judged by that.
            none = torch.zeros_like(exact.unseen)
            yardsticks["dq"] = yardstick("dq", exact.dq_terms, exact.empty, by_query, exact.lse)
            yardsticks["dk"] = yardstick("dk", exact.dk_terms, none, by_key)
            yardsticks["dv"] = yardstick("dv", exact.dv_terms, none, by_key)
        return Prepared(
            case=case,
            measured=measured,
            unrounded=self._unrounded,
            reference=exact,
            baseline=baseline,
            yardsticks=yardsticks,
        )


def _arithmetic(case: AttentionCase) -> tuple[Tensor, Tensor]:
    """What fp32 arithmetic alone may err, relative to the term scale: [B, H, q_len] by query and
    [B, kv_heads, kv_len] by key.

    A score is a sum of d products; in fp32 its roundings amount to about u sqrt(d) / 3 of the sum
    of their sizes, at most |scale| |q_i| |k_j|, and P moves by that relatively. Nothing beside the
    rounding to 16 bits for scores of usual size, and all there is where they reach 1e4.
    """
    u = FORMATS["float32"].unit_roundoff * math.sqrt(case.q.shape[-1]) / 3 * abs(case.scale)
    q, k = (x.double().norm(dim=-1) for x in (case.q, case.k))
    largest_k = k.amax(dim=-1, keepdim=True).repeat_interleave(case.group, dim=1)
    largest_q = q.unflatten(1, (case.kv_heads, case.group)).amax(dim=(2, 3))
    return u * q * largest_k, u * k * largest_q[..., None]


def _moved_by_an_ulp(case: AttentionCase) -> AttentionCase:
    """The case with every element of q, k, v and grad_out one ulp of its format up or down."""
    generator = torch.Generator().manual_seed(0)

    def moved(x: Tensor) -> Tensor:
        up = torch.rand(x.shape, generator=generator) < 0.5
        step = ulp(x.double(), case.format)
        return x.double() + torch.where(up.to(x.device), step, -step)

    q, k, v = (moved(x) for x in (case.q, case.k, case.v))
    grad_out = None if case.grad_out is None else moved(case.grad_out)
    return dataclasses.replace(case, q=q, k=k, v=v, grad_out=grad_out, working=None)
