"""One case on the bench: prepared in a format, with everything kernels are measured against.

What the tasks of one case share (the references, the floor, the baseline) is nearly all the cost of
an audit, so it is computed once per format and all the case's tasks follow each other. What a
kernel returns is measured in `numdev.audit.task`.

Kernels always see the whole call. A selection of heads restricts what is measured: the reference is
computed for those heads alone, and outputs are cut down to them. With gradients a selection grows
to whole groups of query heads, since dk and dv are sums over a group.

So does a sample of rows. The reference of some query rows is exact for them at their share of the
cost, in out, log-sum-exp and dq, and so are emulations; the baseline, whose scores would not fit in
memory, is computed for these rows alone. dk and dv are measured in a sample of keys, which takes
one forward reference of all queries; for them there is neither baseline nor prediction.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from numdev.audit.attempt import Failure, attempt
from numdev.audit.meanwhile import wait
from numdev.audit.timing import Stopwatch
from numdev.cases import AttentionCase, CaseRef, empty_rows
from numdev.formats import FORMATS, Format, format_named, next_lower, ulp
from numdev.kernels import Output, find
from numdev.kernels.emulation.predict import emulated_step, emulation
from numdev.kernels.output import GRADIENTS
from numdev.kernels.reference import attend, gradients
from numdev.kernels.reference.key_gradients import key_gradients
from numdev.kernels.reference.results import Gradients, Reference
from numdev.metrics import deviation
from numdev.metrics.binning import membership
from numdev.metrics.comparison import widened
from numdev.metrics.deviation import Measured, Yardstick
from numdev.metrics.finiteness import inputs_finite
from numdev.metrics.sampling import Sample

KV_TENSORS = ("dk", "dv")
"""Tensors of kv heads; the others are of query heads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A case in one format, with everything its kernels are measured against."""

    case: AttentionCase
    """Whole: what kernels are given."""
    measured: AttentionCase
    """The selected heads and query rows of the case."""
    unrounded: Reference
    reference: Reference
    """Of the selected heads and rows, as is `unrounded`; with gradients where they are wanted."""
    lse: Tensor
    """[B, H, q_len] of the selected heads: the reference's, of all queries where it is known."""
    baseline: Output | Failure
    yardsticks: Mapping[str, Yardstick]
    """By tensor: `out`, and with gradients dq, dk and dv."""
    sampled: bool = False
    """Whether only some query rows are measured."""
    watch: Stopwatch
    predictions: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """What emulations return, by recipe."""
    known: dict[Hashable, list[tuple[Sequence[str], Any]]] = field(default_factory=dict)
    """By which tensor it was and what it was held to: checksums, and what the tensor came to. The
    default dispatch returns, bit for bit, what another kernel returned."""

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
            with self.watch("predictions"):
                self.predictions[key] = self._emulated(claim)
        return self.predictions[key]

    def _emulated(self, claim: Mapping[str, Any]) -> Mapping[str, Tensor]:
        if isinstance(self.reference, Gradients):
            step = emulated_step(self.measured, claim)
            return {name: x for name, x in step.items() if name in self.by_row}
        return {"out": emulation(self.measured, claim)}

    @property
    def by_row(self) -> tuple[str, ...]:
        """The tensors that the measured queries give alone: of a sample not dk and dv."""
        return tuple(n for n in self.tensors if not (self.sampled and n in KV_TENSORS))

    @cached_property
    def inputs_finite(self) -> bool:
        return inputs_finite(self.case)

    @cached_property
    def amplification(self) -> Mapping[str, Sequence[float | None]]:
        """Per tensor and head, row_rel of how the exact gradients respond when every input moves
        by one ulp of its format, up or down by chance: how ill-conditioned the problem is."""
        if not isinstance(self.reference, Gradients):
            return {}
        with self.watch("reference"):
            moved = gradients(_moved_by_an_ulp(self.measured))
        return {
            name: [
                head["row_rel"]
                for head in deviation.measure(getattr(moved, name), self.yardsticks[name])
            ]
            for name in GRADIENTS
            if name in self.by_row
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
        watch: Stopwatch | None = None,
        sample: Sample | None = None,
    ) -> None:
        self.watch = watch or Stopwatch()
        """Counts what loading, the references, the baseline and predictions take."""
        self.ref, self._load, self._chosen, self.gradients = ref, load, heads, gradients
        self.sample = sample
        self._at: Prepared | None = None
        self.last: tuple[str, Output, Mapping[str, Tensor] | None] | None = None
        """The task measured last, by its key, and what its kernel returned; and what it was held to
        where that is not what its claim predicts."""
        self.along: tuple[str, Mapping[str, Measured]] | None = None
        """The same task, and what its tensors came to, with sums by bin of positions."""
        self.under_way: list[Callable[[], object]] = []
        """What to look at for numbers that nobody has waited for (`settle`)."""
        self._bins: dict[str, Tensor | None] = {}

    @cached_property
    def case(self) -> AttentionCase:
        """The call. What a row that sees no key returns is a convention, and so would be what
        flows back through it: such rows get an upstream gradient of 0."""
        with self.watch("capture"):
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

    @cached_property
    def _drawn(self) -> Tensor | None:
        """`queries`, on the host."""
        return None if self.sample is None else self.sample.queries(self.case.q_len)

    @cached_property
    def queries(self) -> Tensor | None:
        """The query rows that are measured, where not all are."""
        return None if self._drawn is None else self._drawn.to(self.case.q.device)

    @cached_property
    def keys(self) -> Tensor | None:
        """The keys that dk and dv are measured in, where queries are sampled: some, or all."""
        if self.sample is None or self.queries is None:
            return None
        found, length = self.sample.keys(self.case.kv_len), self.case.kv_len
        return (torch.arange(length) if found is None else found).to(self.case.q.device)

    def rows_of(self, tensor: str) -> Tensor | None:
        """Where the measured rows of `tensor` stand in the call; None where all are measured."""
        return self.keys if tensor in KV_TENSORS else self.queries

    def sampled_from(self, tensor: str) -> int | None:
        """Of how many rows those of `tensor` are a sample; None where all are measured."""
        rows, length = self.rows_of(tensor), self.length_of(tensor)
        return None if rows is None or len(rows) == length else length

    def length_of(self, tensor: str) -> int:
        """How many rows a tensor of the call has."""
        return self.case.kv_len if tensor in KV_TENSORS else self.case.q_len

    def bins_of(self, tensor: str) -> Tensor | None:
        """Which measured row of `tensor` is in which bin of positions
        (`profiles.binning.membership`)."""
        side = "keys" if tensor in KV_TENSORS else "queries"
        if side not in self._bins:
            rows, length = self.rows_of(tensor), self.length_of(tensor)
            if rows is None:
                self._bins[side] = _bins_of_all(length, self.case.q.device)
            else:
                self._bins[side] = membership(length, rows)
        return self._bins[side]

    def select(self, x: Tensor, tensor: str = "out") -> Tensor:
        """The measured heads and rows of a tensor [batch, heads, rows, ...], which may be cut down
        to them already."""
        x, rows = self.select_heads(x, tensor), self.rows_of(tensor)
        return x if rows is None or x.shape[2] == len(rows) else x[:, :, rows]

    def select_heads(self, x: Tensor, tensor: str = "out") -> Tensor:
        """The measured heads of a tensor [batch, heads, ...]."""
        chosen = self.heads_of(tensor)
        return x if len(chosen) == x.shape[1] else x[:, list(chosen)]

    @cached_property
    def _unrounded(self) -> tuple[Reference, Tensor]:
        case = self.selected(self.case)
        return self._exact(case, self._rows(case))

    def at(self, format_name: str) -> Prepared:
        """The case prepared in a format."""
        fmt = format_named(format_name)
        if self._at is None or self._at.yardstick.format != fmt:
            self.settle()
            self._at = None  # free one format's tensors before making the next one's
            self._at = self._prepare(fmt)
        return self._at

    def settle(self) -> None:
        """Wait for all numbers that are under way. What is wrong with them is said where they are
        looked at again."""
        for look in self.under_way:
            with contextlib.suppress(Exception):
                look()
        self.under_way.clear()

    def _exact(self, case: AttentionCase, measured: AttentionCase) -> tuple[Reference, Tensor]:
        """The reference of the measured rows of a case with the measured heads, and the log-sum-exp
        of all queries that are known."""
        with self.watch("reference"):
            found = gradients(measured) if self.gradients else attend(measured)
            if self.keys is None or not isinstance(found, Gradients):
                return found, found.lse
            keys = dict(vars(key_gradients(case, self.keys)))
        lse = keys.pop("lse")
        return dataclasses.replace(found, **keys), lse

    def _rows(self, case: AttentionCase) -> AttentionCase:
        return case if self._drawn is None else case.select_rows(self._drawn)

    def selected(self, case: AttentionCase) -> AttentionCase:
        """A case of this call's shape restricted to the measured heads."""
        if len(self.heads) == case.heads:
            return case
        if self.gradients:
            return case.select_groups(list(self.kv_heads))
        return case.select_heads(list(self.heads))

    def _prepare(self, fmt: Format) -> Prepared:
        case = self.case if self.case.is_in(fmt) else self.case.rounded_to(fmt)
        unchanged = fmt.contains(self.case.format)
        selected = self.selected(case)
        measured = self._rows(selected)
        unrounded = self._unrounded[0]
        exact, lse = self._unrounded if unchanged else self._exact(selected, measured)
        with self.watch("baseline"):
            baseline = self._baseline(case if self.queries is None else measured)
            alone = isinstance(baseline, Failure)  # then there is nothing to set others beside
            in_fp32 = None if alone or fmt.contains(FORMATS["float32"]) else self._in_fp32
            lower = None if alone else self._in_lower(case, fmt)
        by_query, by_key = _arithmetic(measured)

        def yardstick(
            tensor: str,
            terms: Tensor,
            empty: Tensor,
            arithmetic: Tensor | None,
            lse: Tensor | None = None,
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
                unrounded=getattr(unrounded, tensor),
            )

        yardsticks = {
            "out": dataclasses.replace(
                yardstick("out", exact.term_scale, exact.empty, by_query, exact.lse),
                baseline_fp32=in_fp32,
                baseline_lower=lower,
                lower=None if lower is None else next_lower(fmt),
            ),
        }
        if isinstance(exact, Gradients):
            # A key that no query sees has gradients of exactly 0, and is judged by that.
            none = torch.zeros_like(exact.unseen)
            yardsticks["dq"] = yardstick("dq", exact.dq_terms, exact.empty, by_query, exact.lse)
            beside = by_key if self.keys is None else None  # what is not predicted
            yardsticks["dk"] = yardstick("dk", exact.dk_terms, none, beside)
            yardsticks["dv"] = yardstick("dv", exact.dv_terms, none, beside)
        return Prepared(
            case=case,
            measured=measured,
            unrounded=unrounded,
            reference=exact,
            lse=lse,
            baseline=baseline,
            yardsticks=yardsticks,
            sampled=self.queries is not None,
            watch=self.watch,
        )

    def _baseline(self, case: AttentionCase) -> Output | Failure:
        found = attempt(find("baseline"), case, {}, gradients=self.gradients, wait=wait)
        if isinstance(found, Failure) or self.queries is None:
            return found
        return dataclasses.replace(found, dk=None, dv=None)  # sums over these rows alone

    @cached_property
    def _in_fp32(self) -> Tensor | None:
        """What the baseline returns in float32 for the unrounded inputs, of what is measured."""
        fp32 = FORMATS["float32"]
        return self._plain(self.case if self.case.is_in(fp32) else self.case.rounded_to(fp32))

    def _in_lower(self, case: AttentionCase, fmt: Format) -> Tensor | None:
        """What it returns in the next lower format. Where PyTorch has no arithmetic in that, in 8
        bits, q, k and v are rounded to it and the rest is computed in `fmt`."""
        lower = next_lower(fmt)
        if lower is None:
            return None
        if lower.precision >= 8:
            return self._plain(self.case.rounded_to(lower))
        inputs = dataclasses.replace(self.case, mask=None, sinks=None, grad_out=None)
        return self._plain(_stored_as(case, inputs.rounded_to(lower)))

    def _plain(self, case: AttentionCase) -> Tensor | None:
        """The baseline's output in the measured heads and rows; None where it cannot run."""
        whole = case if self.queries is None else self._rows(self.selected(case))
        found = attempt(find("baseline"), whole, {}, wait=wait)
        return None if isinstance(found, Failure) else self.select(found.out)


@functools.lru_cache(maxsize=4)
def _bins_of_all(length: int, device: torch.device) -> Tensor | None:
    """`membership` of all rows of a call: the same for every layer."""
    return membership(length, torch.arange(length, device=device))


def _stored_as(case: AttentionCase, other: AttentionCase) -> AttentionCase:
    """`case` with the values of another's q, k and v in its own dtype, which holds them."""
    q, k, v = (x.to(case.q.dtype) for x in (other.q, other.k, other.v))
    return dataclasses.replace(case, q=q, k=k, v=v)


def _arithmetic(case: AttentionCase) -> tuple[Tensor, Tensor]:
    """What fp32 arithmetic alone may err, relative to the term scale: [B, H, q_len] by query and
    [B, kv_heads, kv_len] by key.

    A score is a sum of d products; in fp32 its roundings amount to about u sqrt(d) / 3 of the sum
    of their sizes, at most |scale| |q_i| |k_j|, and P moves by that relatively. Nothing beside the
    rounding to 16 bits for scores of usual size, and all there is where they reach 1e4.
    """
    u = FORMATS["float32"].unit_roundoff * math.sqrt(case.q.shape[-1]) / 3 * abs(case.scale)
    q, k = (
        torch.linalg.vector_norm(widened(x), dim=-1, dtype=torch.float64) for x in (case.q, case.k)
    )
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
