"""One case in one format, with everything that its kernels are measured against.

References, floor and baseline are computed once per format for all tasks of a case.
Kernels see the whole call; a selection of heads and rows restricts what is measured. With
gradients it grows to whole groups of query heads, since dk and dv are sums over a group.
Of a sample of query rows the baseline has these rows alone; dk and dv are measured in
sampled keys, without a baseline."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AXES, AttentionCase, empty_rows, mask_kind
from numdev.formats import FORMATS, Format, all_finite, format_of
from numdev.kernels import Output, find
from numdev.kernels.emulation import backward
from numdev.kernels.emulation.kernel import (
    emulated_step,
    emulation,
    recipe_of,
    returning,
    unpredictable,
)
from numdev.kernels.reference import attend, blocked, gradients, key_gradients
from numdev.kernels.reference.blocked import Gradients, Reference
from numdev.metrics import narrow_sum_search_scope
from numdev.metrics.deviation import Deviation, Metrics, nullify
from numdev.metrics.finiteness import Outside
from numdev.metrics.row_samples import Sample, Strata, membership
from numdev.metrics.yardstick import Yardstick, widened
from numdev.operations.attention.explain.narrow_sums import Sums, looked_at
from numdev.operations.attention.explain.wrong_function import far_off, suspect
from numdev.operations.attention.finiteness import (
    elsewhere,
    inputs_finite,
    nonfinite_inputs,
    overflowing_inputs,
)
from numdev.report import CaseRecord
from numdev.studies.audit.isolation import Failure, attempt
from numdev.studies.audit.operation import Distance
from numdev.studies.audit.section_timing import Stopwatch
from numdev.tensor_properties import ATTENTION, tensor_spec

KV_TENSORS = tuple(spec.name for spec in ATTENTION if spec.sums_over_rows)
# By tensor, the field of a reference with its term scale.
TERMS = {"out": "term_scale", "dq": "dq_terms", "dk": "dk_terms", "dv": "dv_terms"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """A call, and which of its heads and rows are measured: a `MeasuredPart`
    (`numdev.studies.audit.operation`), of which a unit is a head."""

    case: AttentionCase
    """Whole, and `settled`."""
    gradients: bool
    heads: tuple[int, ...]  # the query heads that are measured, in the order of the case
    queries: Tensor | None = None  # the query rows that are measured, where not all are
    keys: Tensor | None = None
    """The keys that dk and dv are measured in, where queries are sampled: some, or
    all."""
    strata: Mapping[str, Strata] = field(default_factory=dict)
    """The strata of each tensor of which some rows are measured because they stood
    out."""
    wholes: dict[str, Reference] = field(default_factory=dict)
    """The forward reference of all queries, by format, without its term scale."""
    rounded: dict[str, AttentionCase] = field(default_factory=dict)
    """The case in the format that was asked for last."""

    @classmethod
    def of(
        cls,
        case: AttentionCase,
        heads: Sequence[int] | None = None,
        *,
        gradients: bool = False,
        sample: Sample | None = None,
    ) -> Selection:
        """Returns the selection of the query heads `heads` of a case (None: all) and the
        rows of a sample (None: all). Numbers of heads that the case does not have are
        passed over. With `gradients` the heads grow to whole groups, and grad_out becomes
        0 in rows that see no key."""
        case = settled(case) if gradients else case
        chosen = set(range(case.heads) if heads is None else heads)
        if gradients:
            groups = {h // case.group for h in chosen}
            chosen = {h for h in range(case.heads) if h // case.group in groups}
        measured, queries, keys = (
            tuple(h for h in range(case.heads) if h in chosen),
            None,
            None,
        )
        if (
            sample is not None
            and (rows := sample.draw(case.q_len, "queries")) is not None
        ):
            some = sample.draw(case.kv_len, "keys")
            queries = rows.to(case.q.device)
            keys = (torch.arange(case.kv_len) if some is None else some).to(case.q.device)
        return cls(
            case=case, gradients=gradients, heads=measured, queries=queries, keys=keys
        )

    def in_format(self, fmt: Format) -> AttentionCase:
        """Returns the case rounded to a format; the case itself where it is stored in
        that format and needs no gradient. Returns the same object until another format is
        asked for."""
        if fmt.name not in self.rounded:
            self.rounded.clear()
            self.rounded[fmt.name] = self.case.rounded_to(fmt)
        return self.rounded[fmt.name]

    @cached_property
    def kv_heads(self) -> tuple[int, ...]:
        """Returns the kv heads that the measured query heads read, ascending."""
        return tuple(sorted({h // self.case.group for h in self.heads}))

    def units(self, tensor: str) -> tuple[int, ...]:
        """Returns the measured heads of a tensor, by its name: kv heads for dk and dv,
        else query heads."""
        return self.kv_heads if tensor in KV_TENSORS else self.heads

    def row_indices(self, tensor: str) -> Tensor | None:
        """Returns the positions, in the call, of the measured rows of a tensor, int64 on
        the call's device. Rows of dk and dv are keys. None where no query rows are
        sampled; where they are, those of keys may be all."""
        return self.keys if tensor in KV_TENSORS else self.queries

    def length_of(self, tensor: str) -> int:
        """Returns the number of rows that a tensor has in the whole call: keys for dk and
        dv, else queries."""
        return self.case.kv_len if tensor in KV_TENSORS else self.case.q_len

    def sampled_from(self, tensor: str) -> int | Strata | None:
        """Returns what the measured rows of a tensor are a sample of: the number of rows
        of the call, or, where rows that stood out were added, their strata. None where
        all rows are measured."""
        rows, length = self.row_indices(tensor), self.length_of(tensor)
        if tensor in self.strata:
            return self.strata[tensor]
        return None if rows is None or len(rows) == length else length

    def drawn_rows(self, tensor: str) -> Tensor | None:
        """Returns the positions in the call of the rows of `tensor` that were drawn,
        int64, without those measured only because they stood out. None where no query
        rows are sampled; where they are, those of keys may be all."""
        rows, of = self.row_indices(tensor), self.sampled_from(tensor)
        return rows[of.drawn] if rows is not None and isinstance(of, Strata) else rows

    def bins(self, tensor: str) -> Tensor | None:
        """Returns which measured rows of a tensor are in which bin of positions, fp64
        [rows, bins] of 0 and 1. Rows that were added because they stood out are in no
        bin. None where the call is too short for bins."""
        rows, length = self.row_indices(tensor), self.length_of(tensor)
        if rows is None:
            rows = torch.arange(length, device=self.case.q.device)
        bins, of = membership(length, rows), self.sampled_from(tensor)
        return (
            bins * of.drawn[:, None]
            if bins is not None and isinstance(of, Strata)
            else bins
        )

    def select(self, x: Tensor, tensor: str = "out", *, all_rows: bool = False) -> Tensor:
        """Returns the measured heads and rows of a tensor [batch, heads, rows, ...] named
        `tensor`; with `all_rows` the measured heads in all rows. An axis that has only
        the measured ones already stays as it is."""
        chosen, rows = self.units(tensor), self.row_indices(tensor)
        if len(chosen) != x.shape[1]:
            x = x[:, list(chosen)]
        return x if all_rows or rows is None or x.shape[2] == len(rows) else x[:, :, rows]

    def restricted(self, case: AttentionCase, *, all_rows: bool = False) -> AttentionCase:
        """Returns a case of this call's shape restricted to the measured heads (with
        gradients their whole groups) and, unless `all_rows`, to the measured query rows.
        The case itself where that leaves nothing out."""
        rows = None if all_rows or self.queries is None else self.queries.cpu()
        if len(self.heads) == case.heads:
            return case if rows is None else case.restrict(rows=rows)
        if self.gradients:
            return case.restrict(kv_heads=list(self.kv_heads), rows=rows)
        return case.restrict(heads=list(self.heads), rows=rows)

    def exact(self, case: AttentionCase) -> tuple[Reference, Tensor]:
        """Returns the fp64 reference of the measured heads and rows of a case of this
        call's shape, with gradients where these are measured; and the reference's
        log-sum-exp. The latter is of all queries where dk and dv of sampled keys need it,
        else of the measured queries. Raises UsageError where no head is measured, and for
        gradients of a case without grad_out."""
        restricted = self.restricted(case)
        reference = gradients(restricted) if self.gradients else attend(restricted)
        if self.keys is None or not isinstance(reference, Gradients):
            return reference, reference.lse
        whole = self.whole(case)
        of_keys: Any = key_gradients(
            self.restricted(case, all_rows=True), self.keys, whole
        )
        return dataclasses.replace(reference, **of_keys), whole.lse

    def whole(self, case: AttentionCase) -> Reference:
        """Returns the fp64 forward reference of the measured heads of a case of this
        call's shape, in all queries. Its term scale is empty. Cached by the case's format
        alone."""
        if (name := case.format.name) not in self.wholes:
            whole = attend(self.restricted(case, all_rows=True))
            self.wholes[name] = dataclasses.replace(whole, term_scale=whole.out[..., :0])
        return self.wholes[name]

    def baseline(
        self, case: AttentionCase, *, gradients: bool = False
    ) -> Output | Failure:
        """Returns the output of plain attention of a case of this call's shape; where
        queries are sampled, of these and the measured heads alone, and without dk and dv.
        A Failure with its reason where it cannot run. `gradients`: with those of one
        training step."""
        whole = case if self.queries is None else self.restricted(case)
        output = attempt(find("baseline"), whole, {}, gradients=gradients)
        if self.queries is None or isinstance(output, Failure):
            return output
        return dataclasses.replace(output, dk=None, dv=None)

    @cached_property
    def baseline_fp32(self) -> Tensor | None:
        """Returns the output of plain attention in float32 for the case as it came, in
        the measured heads and rows; None where it cannot run."""
        wide = self.baseline(self.case.rounded_to(FORMATS["float32"]))
        return self.select(wide.out) if isinstance(wide, Output) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Bench:
    """A selection in one format, with a yardstick for each of its tensors: a
    `PreparedCall` (`numdev.studies.audit.operation`)."""

    selection: Selection
    case: AttentionCase  # whole and rounded: what kernels are given
    restricted: AttentionCase  # the measured heads and query rows of it
    format: Format
    reference: Reference  # of what is measured; with gradients where they are wanted
    lse: Tensor
    """[B, H, q_len] of the measured heads: the reference's, of all queries where it is
    known."""
    baseline: Output | Failure
    # By tensor: `out`, and with gradients dq, dk and dv
    yardsticks: Mapping[str, Yardstick]
    distances: Mapping[str, Distance]  # of `lse`, of which only the distance is measured
    exact_by: str  # which path computed the reference, in words
    watch: Stopwatch
    unscreened: str | None = None  # why no rows stand beside a sample
    predictions: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """The tensors that emulations returned, by recipe."""
    narrow_sums: dict[str, tuple[Output, Sums]] = field(default_factory=dict)
    """The running sums of each gradient, with the output of the last kernel they
    follow."""

    @classmethod
    def of(
        cls,
        selection: Selection,
        fmt: Format,
        exact: tuple[Reference, Tensor],
        watch: Stopwatch,
    ) -> Bench:
        """Returns the bench of the selection in a format: the case rounded to it,
        reference, baseline and yardsticks. `exact`: what `Selection.exact` returns for
        the case as it came; used again where the rounded case is the same. A baseline
        that fails is a Failure; yardsticks are then without one. Time goes to the
        sections `reference` and `baseline` of `watch`."""
        original, case = selection.case, selection.in_format(fmt)
        unrounded, (reference, lse) = exact[0], exact
        if not fmt.contains(original.format):
            with watch("reference"):
                reference, lse = selection.exact(case)
        with watch("baseline"):
            baseline, fp32 = selection.baseline(case, gradients=selection.gradients), None
            if not isinstance(baseline, Failure) and not fmt.contains(FORMATS["float32"]):
                fp32 = selection.baseline_fp32
        by_query, by_key = _arithmetic_error(selection.restricted(case, all_rows=True))
        yardsticks = {}
        for tensor in TERMS if isinstance(reference, Gradients) else ("out",):
            plain = getattr(baseline, tensor, None)
            rows = {"empty": reference.empty, "lse": reference.lse}
            if tensor in KV_TENSORS and isinstance(reference, Gradients):
                # A key that no query sees has gradients of exactly 0, and is judged by
                # that.
                rows = {"empty": torch.zeros_like(reference.unseen)}
            arithmetic = by_key if tensor in KV_TENSORS else by_query
            rows["arithmetic"] = selection.select(arithmetic, tensor)
            if isinstance(of := selection.sampled_from(tensor), Strata):
                rows["drawn"] = of.drawn
            yardsticks[tensor] = Yardstick(
                reference=getattr(reference, tensor),
                term_scale=getattr(reference, TERMS[tensor]),
                format=fmt,
                baseline=None if plain is None else selection.select(plain, tensor),
                unrounded=getattr(unrounded, tensor),
                baseline_fp32=fp32 if tensor == "out" else None,
                **rows,
            )
        return cls(
            selection=selection,
            case=case,
            restricted=selection.restricted(case),
            format=fmt,
            reference=reference,
            lse=lse,
            baseline=baseline,
            yardsticks=yardsticks,
            distances={"lse": Distance(exact=reference.lse, empty=reference.empty)},
            exact_by=reference.by,
            watch=watch,
        )

    # What the loop asks (`numdev.studies.audit.operation.PreparedCall`).

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the inputs that kernels get."""
        return self.case.q.dtype

    def as_output(self, tensors: Mapping[str, Tensor], ran: str | None = None) -> Output:
        """Returns an `Output` with these tensors, by name, as a kernel would return it.
        `ran`: what ran, in words."""
        fields: dict[str, Any] = dict(tensors)
        return Output(**fields, ran=ran, ran_backward=ran)

    def format_of(self, x: Tensor) -> Format:
        """Returns the format that a kernel's tensor counts as: its dtype's, or the case's
        working format in two cases. One is that it came in the dtype that stores the
        working format. The other is that PyTorch has a dtype of the working format, the
        tensor came in a wider one, and all its numbers are of the working format; NaN
        counts as such. (What a kernel computes in a wider format it must then return in a
        wider dtype.) Raises UsageError for a dtype of no format."""
        case, narrow, wide = self.case, self.dtype, format_of(x.dtype)
        if x.dtype != narrow and case.working is None and wide.contains(case.format):
            same = x.to(narrow).to(x.dtype) == x
            return case.format if bool((same | x.isnan()).all()) else wide
        return case.format if x.dtype == narrow else wide

    def formats_of(self, output: Output) -> dict[str, Format]:
        """Returns by name the format that each tensor of an output counts as, of those
        that have a yardstick."""
        tensors = output.tensors
        return {
            name: self.format_of(tensors[name])
            for name in self.yardsticks
            if name in tensors
        }

    def unpredicted(self, claim: Mapping[str, object] | None, fmt: Format) -> str | None:
        """Returns why no size of error is predicted for a tensor that came back in `fmt`,
        as a clause; None where one is. `claim`: options of `emulated`; None: the kernel
        declares none, and nothing is predicted."""
        return unpredictable(claim, self.case.format, fmt, of_size=True)

    def expected(
        self, claim: Mapping[str, object] | None, output: Output
    ) -> Mapping[str, Tensor]:
        """Returns by name the tensors, float32, that a kernel with the roundings of
        `claim` (None: those of FlashAttention-2) returns for the measured heads and rows,
        rounded to the formats that `output` came in. Cached by claim. Raises as
        `predicted`."""
        return self.predicted(returning(claim, self.case, self.formats_of(output)))

    def outside_sample(self, output: Output) -> Mapping[str, Sequence[Outside]]:
        """Returns by tensor, for every head in order, how many elements are not finite in
        rows that are not measured, without query rows that see no key; or why that is
        unknown, as where inputs are not finite. Empty where all rows are measured, or the
        inputs and the output are finite. Raises UsageError for a tensor in a dtype of no
        format."""
        select = self.selection
        if select.queries is None:
            return {}
        formats = self.formats_of(output)
        if output.lse is not None:
            formats["lse"] = format_of(output.lse.dtype)
        whole = {
            name: select.select(output.tensors[name], name, all_rows=True)
            for name in formats
        }
        if all_finite(whole.values()) and inputs_finite(self.case):
            return {}
        case = select.restricted(self.case, all_rows=True)
        return {
            name: elsewhere(x, name, case, select.drawn_rows(name), formats[name])
            for name, x in whole.items()
        }

    def annotate(
        self,
        output: Output,
        tensor: str,
        units: Sequence[Metrics],
        deviation: Deviation,
        measured: Tensor,
    ) -> None:
        """Adds what only attention knows to the heads' metrics `units` of a kernel's
        tensor, in place: `empty_nonfinite`, a suspicion where the watch says `searching`,
        `narrow_sum`, and in `nulls` what the kernel returned in place of the log-sum-exp.
        Elements of dq that are not finite in rows that see no key are added to
        `nonfinite`. `measured`: the tensor's measured heads and rows; `deviation`: its
        metrics."""
        if tensor == "out":
            if any(unit["empty_rows"] for unit in units):
                self._count_in_empty_rows(units, measured)
            heads = self.selection.heads
            far = [h for h, unit in zip(heads, units, strict=True) if far_off(unit)]
            if far and self.watch.searching:
                self._add_suspicions(output, units, far)
            for unit in units if output.not_lse else ():
                why = f"the kernel returned {output.not_lse}"
                unit["nulls"] = {**unit["nulls"], "lse_error": why}
        if tensor == "dq":
            self._count_dq_of_empty_rows(units, measured)
        if tensor_spec(tensor).is_gradient:
            self._add_narrow_sums(output, tensor, units, deviation)

    def _count_in_empty_rows(self, units: Sequence[Metrics], out: Tensor) -> None:
        """Sets `empty_nonfinite` of each head, in place: how many elements of `out`, in
        the measured heads and rows, are not finite in rows that see no key."""
        wrong = ~out.isfinite() & self.yardsticks["out"].empty[..., None]
        counts = wrong.sum(dim=(0, 2, 3)).tolist()
        for unit, count in zip(units, counts, strict=True):
            unit["empty_nonfinite"] = count

    def _add_suspicions(
        self, output: Output, units: Sequence[Metrics], far: Sequence[int]
    ) -> None:
        """Adds to the metrics `units` of the heads `far`, whose output is far off, in
        place, what these heads seem to compute. A head without such a cause stays as it
        is."""
        heads = self.selection.heads
        with self.watch("names"):
            causes = suspect(
                self.case, output.out, self.reference, heads, far, self.selection.queries
            )
        for head, unit in zip(heads, units, strict=True):
            if head in causes:
                unit.update(causes[head].fields)

    def _count_dq_of_empty_rows(self, units: Sequence[Metrics], dq: Tensor) -> None:
        """Adds to `nonfinite` of each head, in place, how many elements of dq are not
        finite in rows that see no key. What such a row returns is a convention, yet
        nothing that follows depends on its query, whose gradient is 0; NaN there reaches
        the weights that make the query."""
        if all_finite([dq]):
            return
        wrong = ~dq.isfinite() & self.yardsticks["dq"].empty[..., None]
        counts = wrong.sum(dim=(0, 2, 3)).tolist()
        for unit, count in zip(units, counts, strict=True):
            unit["nonfinite"] += count

    def _add_narrow_sums(
        self,
        output: Output,
        tensor: str,
        units: Sequence[Metrics],
        deviation: Deviation,
    ) -> None:
        """Sets `narrow_sum` of each head of a gradient, in place: the least share of the
        error of a running sum in 16 bits that the head's error has. It is measured in one
        kv head of the call, or the query heads that read it; all other heads get None
        with a reason. The running sums of the last output are cached by gradient."""
        case, select, ref = self.restricted, self.selection, self.case.ref
        kv_head = narrow_sum_search_scope.chosen_head(
            ref.layer, ref.call, len(select.kv_heads)
        )
        heads = range(kv_head * case.group, (kv_head + 1) * case.group)
        chosen = heads if tensor == "dq" else range(kv_head, kv_head + 1)
        why = narrow_sum_search_scope.why_not_looked_for(
            tensor, self.format.name, case.q_len, case.kv_len
        )
        if select.queries is not None:
            why = narrow_sum_search_scope.SAMPLED
        elif why is None and (
            deviation.compared is None or deviation.compared[2] is None
        ):
            why = narrow_sum_search_scope.UNPREDICTED
        for number, unit in enumerate(units):
            if why is not None or number not in chosen:
                nullify(unit, ("narrow_sum",), why or narrow_sum_search_scope.ELSEWHERE)
        if why is not None or deviation.compared is None:
            return
        x, _, expected = deviation.compared
        assert expected is not None
        batch, queries, keys = looked_at(case, tensor)
        if tensor not in self.narrow_sums or self.narrow_sums[tensor][0] is not output:
            few = part(
                case,
                kv_head=range(kv_head, kv_head + 1),
                batch=batch,
                row=queries,
                key=keys,
            )
            place = (
                slice(batch.stop),
                slice(heads.start, heads.stop),
                slice(queries.start, queries.stop),
            )
            out = select.select(output.out)[place]
            sums = Sums.of(few, tensor, out, self.reference.lse[place])
            self.narrow_sums[tensor] = output, sums
        rows = queries if tensor == "dq" else keys
        looked = (
            slice(batch.stop),
            slice(chosen.start, chosen.stop),
            slice(rows.start, rows.stop),
        )
        shares = self.narrow_sums[tensor][1].narrow(x[looked], expected[looked])
        for number, share in zip(chosen, shares, strict=True):
            units[number]["narrow_sum"] = share

    @cached_property
    def in_float32(self) -> Reference:
        """Returns plain attention in float32 for the whole call, in the measured heads,
        with gradients where these are measured."""
        plain = blocked.gradients if self.selection.gradients else blocked.attend
        return plain(self.selection.restricted(self.case, all_rows=True), torch.float32)

    @property
    def by_row(self) -> tuple[str, ...]:
        """Returns the names of the tensors that can be computed from the measured queries
        alone: all, but not dk and dv where queries are sampled."""
        sampled = self.selection.queries is not None
        return tuple(n for n in self.yardsticks if not (sampled and n in KV_TENSORS))

    def predicted(
        self, claim: Mapping[str, object], *, forward: bool = False
    ) -> Mapping[str, Tensor]:
        """Returns by name, in float32, what the emulation with these options returns for
        the measured heads and rows; the output alone with `forward`, and where no
        gradients are measured. Cached by options. It computes in fp32, at a fraction of
        the reference's cost, which agrees in rms to 0.1 %. For sampled keys the forward
        pass is the exact one. Raises UsageError for options that contradict each other,
        and Refused where the call cannot be emulated."""
        key = f"{forward} {sorted(claim.items())!r}"
        if key not in self.predictions:
            with self.watch("predictions"):
                if isinstance(self.reference, Gradients) and not forward:
                    select, step = self.selection, emulated_step(self.restricted, claim)
                    if select.keys is not None:
                        whole = select.whole(self.case)
                        call, recipe = (
                            select.restricted(self.case, all_rows=True),
                            recipe_of(claim),
                        )
                        keys = backward.of_keys(
                            call, recipe, select.keys, whole.out, whole.lse
                        )
                        step |= {"dk": keys[1], "dv": keys[2]}
                else:
                    step = {"out": emulation(self.restricted, claim)}
            self.predictions[key] = step
        return self.predictions[key]


def _arithmetic_error(case: AttentionCase) -> tuple[Tensor, Tensor]:
    """Returns the error that fp32 arithmetic alone may make, relative to the term scale:
    fp64 [B, H, q_len] by query and [B, kv_heads, kv_len] by key.

    A score is a sum of d products. In fp32 its roundings amount to about u sqrt(d) / 3 of
    the sum of their sizes, at most |scale| |q_i| |k_j|, and P moves by that relatively.
    Beside the rounding to 16 bits that is nothing for scores of usual size; where scores
    reach 1e4 it is the whole error."""
    u = (
        FORMATS["float32"].unit_roundoff
        * math.sqrt(case.q.shape[-1])
        / 3
        * abs(case.scale)
    )
    q, k = (
        torch.linalg.vector_norm(widened(x), dim=-1, dtype=torch.float64)
        for x in (case.q, case.k)
    )
    largest_k = k.amax(dim=-1, keepdim=True).repeat_interleave(case.group, dim=1)
    largest_q = q.unflatten(1, (case.kv_heads, case.group)).amax(dim=(2, 3))
    return u * q * largest_k, u * k * largest_q[..., None]


def settled(case: AttentionCase) -> AttentionCase:
    """Returns the case with an upstream gradient of 0 in rows that see no key: what such
    a row returns is a convention, and so would be what flows back through it. The case
    itself where it has no upstream gradient."""
    if case.grad_out is None:
        return case
    empty = empty_rows(case)[..., None]
    return dataclasses.replace(case, grad_out=case.grad_out.masked_fill(empty, 0.0))


def part(case: AttentionCase, **ranges: range) -> AttentionCase:
    """Returns the call with ranges of some axes alone. `ranges`: keywords `batch`,
    `head`, `kv_head`, `row` and `key`; a range as long as the axis, or longer, leaves it
    whole. Shortened tensors are copied, dense, their axes in the same order in memory, by
    which kernels choose. With `kv_head` all query heads that read these come along,
    unless `head` says which. Each row sees what it saw: of rows from r and keys from k, j
    <= i + offset becomes j' + k <= i' + r + offset."""
    if "kv_head" in ranges and "head" not in ranges:
        group, heads = case.group, ranges["kv_head"]
        ranges["head"] = range(heads.start * group, heads.stop * group)
    parts: dict[str, Any] = {}
    for name, axes in AXES.items():
        x = getattr(case, name)
        for dim, axis in enumerate(() if x is None else axes[-x.ndim :]):
            # A mask may broadcast there
            if axis in ranges and len(ranges[axis]) < x.shape[dim]:
                x = x.detach().narrow(dim, ranges[axis].start, len(ranges[axis])).clone()
        parts[name] = x
    moved = ranges.get("row", range(1)).start - ranges.get("key", range(1)).start
    parts["causal_offset"] = case.causal_offset + (
        moved if case.restricts_positions else 0
    )
    return dataclasses.replace(case, **parts)


def case_record(
    case: AttentionCase,
    axes: Mapping[str, object] | None = None,
    formats: Sequence[Format] = (),
) -> CaseRecord:
    """Returns the report's record of a whole call: its numbers of heads, lengths,
    options, and how many elements of each input tensor are NaN or infinite. `axes`: its
    values on a sweep's axes; None: none. `formats`: those that its inputs are rounded to;
    for each that is too narrow, how many finite elements of q, k, v, sinks and grad_out
    overflow in it."""
    batch, _, _, head_dim = case.q.shape
    has_sinks, v_dim = case.sinks is not None, case.v.shape[3]
    mask, swept = mask_kind(case.mask), dict(axes or {})
    upstream = case.grad_out_from or ("given" if case.grad_out is not None else None)
    threads = None if case.q.is_cuda else torch.get_num_threads()
    nonfinite, overflows = nonfinite_inputs(case), overflowing_inputs(case, formats)
    return CaseRecord(
        case=case.ref.case,
        batch=batch,
        heads=case.heads,
        kv_heads=case.kv_heads,
        q_len=case.q_len,
        kv_len=case.kv_len,
        head_dim=head_dim,
        v_dim=v_dim,
        source_format=case.format.name,
        is_causal=case.is_causal,
        causal_offset=case.causal_offset,
        window=case.window,
        softcap=case.softcap,
        scale=case.scale,
        mask=mask,
        sinks=has_sinks,
        grad_out=upstream,
        threads=threads,
        axes=swept,
        nonfinite=nonfinite,
        overflows=overflows,
    )
