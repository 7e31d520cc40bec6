"""Compares two outputs bit by bit, and measures how large their difference is beside
rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Required, TypedDict

import torch
from torch import Tensor

from numdev.cases import AttentionCase, visible
from numdev.formats import Format, format_of, round_to, ulp
from numdev.kernels import Output
from numdev.kernels.output import GRADIENTS
from numdev.kernels.reference.blocked import Reference
from numdev.metrics.bit_checksums import bits
from numdev.studies.audit.isolation import Within
from numdev.studies.audit.plan import Planned
from numdev.studies.audit.prepared_attention import TERMS
from numdev.studies.invariance.axes import Variant, VariantCall

TENSORS = ("out", "lse", *GRADIENTS)
# A key of dk whose error is this many times smaller still errs like another of its head
ELSEWHERE = 8.0
EXACT = 1e-10  # change of a sum over its terms that fp64 in another order may make


def differs(a: Tensor, b: Tensor) -> Tensor:
    """Returns which elements of two tensors of one shape have other bits, bool. Tensors
    of two dtypes are compared in fp64. 0 and -0 differ; a NaN does not differ from a NaN
    of the same bits."""
    if a.dtype != b.dtype:
        a, b = a.double(), b.double()
    return bits(a) != bits(b)


def exact_change(call: VariantCall, base: Reference, variant: Reference) -> float:
    """Returns the largest change of the exact answer of a call's rows against the base's,
    over the terms of its sums. Beyond EXACT it is another answer. It is infinite where a
    row sees no key in one form alone, and where a change is NaN; 0 where nothing can be
    compared. Tensors that one form lacks, or that the call does not compare, are passed
    over, and so are `out`, `lse` and `dq` in rows that see no key. `base`, `variant`: the
    fp64 references of the base and of the call."""
    counted = call.in_base.select_query_rows(~base.empty)
    if not counted.equal(call.in_call.select_query_rows(~variant.empty)):
        return math.inf
    worst = 0.0
    for tensor in TENSORS:
        a = call.in_base.select(tensor, getattr(base, tensor, None))
        b = call.in_call.select(tensor, getattr(variant, tensor, None))
        if a is None or b is None:
            continue
        terms = a.abs() + 1
        if tensor in TERMS:
            of_terms = call.in_base.select(tensor, getattr(base, TERMS[tensor]))
            assert of_terms is not None  # as `a` is
            terms = of_terms
        change = torch.where(a == b, 0.0, (a - b).abs() / terms)  # -inf is -inf
        change = change if tensor in ("dk", "dv") else change[counted]
        if change.numel():
            worst = max(worst, float(change.nan_to_num(nan=math.inf).amax()))
    return worst


def explained_by_rounding(
    tensor: str, case: AttentionCase, exact: Reference, fmt: Format
) -> Tensor:
    """Returns for each element of a tensor the change that roundings explain even where
    the floor (and by luck one of two forms) has no error, since terms cancel. It is a
    share of the sizes of all n terms of the element: half the format's unit roundoff over
    √n, for roundings of like terms, and |scale| max|q| max|k| 2^-24, for rounding a score
    in fp32. max|q| and max|k| are the largest norms of a sequence's head; NaN and
    infinity count as 0. For `lse` it is 1 + its size. `tensor`: `out`, `lse`, `dq`, `dk`
    or `dv`. The shape broadcasts to the tensor's."""
    if tensor == "lse":
        return 1 + exact.lse.abs()
    # Poison is no number of the call, and does not count
    norms = (x.double().norm(dim=-1).nan_to_num(0.0, 0.0) for x in (case.q, case.k))
    q, k = (x.amax(dim=-1) for x in norms)
    score = abs(case.scale) * 2.0**-24 * q * k.repeat_interleave(case.group, dim=1)
    count = case.q_len if tensor in ("dk", "dv") else case.kv_len
    if tensor in ("dk", "dv"):
        score = score.unflatten(1, (-1, case.group)).amax(dim=2)
    part: Tensor = score[..., None, None] + fmt.unit_roundoff / 2 / math.sqrt(count)
    return part * getattr(exact, TERMS[tensor])  # type: ignore[no-any-return]


class KernelRun(NamedTuple):
    """One run of a kernel on a case, laid out and run in a way, with its output."""

    planned: Planned
    case: AttentionCase
    within: Within
    wrap: str | None
    output: Output
    declined: str = ""  # why it has no gradients, though they were asked for


class Forms(NamedTuple):
    """A call computed in two ways, with its exact answer."""

    variant: Variant
    first: KernelRun  # the base
    others: list[KernelRun]  # the variant's calls
    exact: Reference  # of the base
    format: Format


class Numbers(TypedDict, total=False):
    """Fields of an `InvarianceRow` that say how a tensor differs."""

    elements: Required[int]
    differ: Required[int]
    nonfinite: Required[int]
    difference: Required[float]
    floor_ratio: float
    error_base: float
    error_variant: float
    ulps: Required[float]
    excess: Required[float]
    excess_of_a_row: Required[float]
    first: tuple[int, int, int, int] | None


def compare_forms(forms: Forms) -> Iterator[tuple[str, Numbers | str]]:
    """Yields (tensor, numbers of its row) for each tensor that the base has, or (tensor,
    reason) where one of the variant's calls does not return it. Passed over are tensors
    that the variant alone returns, or that the exact answer lacks, and dk and dv where no
    call compares them. Rows that see no key are left out; all keys of dk and dv count."""
    exact, calls = forms.exact, forms.variant.calls
    for tensor in TENSORS:
        truth = getattr(exact, tensor, None)
        values = getattr(forms.first.output, tensor)
        if truth is None or values is None:
            continue
        if all(call.in_base.select(tensor, truth) is None for call in calls):
            continue
        others = [getattr(run.output, tensor) for run in forms.others]
        if any(other is None for other in others):
            yield tensor, f"{tensor} is returned in one form alone"
            continue
        of_keys = tensor in ("dk", "dv")
        sees = (
            torch.ones_like(truth[..., 0], dtype=torch.bool) if of_keys else ~exact.empty
        )
        unit = explained_by_rounding(tensor, forms.first.case, exact, forms.format)
        parts, firsts = [], []
        for call, other in zip(calls, others, strict=True):
            counted = call.in_base.select(tensor, sees)
            b = call.in_call.select(tensor, other)
            a, right, size = (
                call.in_base.select(tensor, x) for x in (values, truth, unit)
            )
            if counted is None or b is None:
                continue
            assert a is not None  # as `b` is not
            assert right is not None
            assert size is not None
            if tensor == "lse":
                b, a, right, size = (x[..., None] for x in (b, a, right, size))
            moved = differs(a, b) & counted[..., None]
            sums = _row_sums(a, b, right, size, moved, counted, forms.format)
            parts.append(sums | _error_of_other_keys(sums, tensor))
            if bool(moved.any()):
                firsts.append(_first_difference(call, tensor, moved))
        if parts:
            rows = {n: torch.cat([part[n].flatten() for part in parts]) for n in parts[0]}
            first = min(firsts, key=lambda at: (at[2], at[0], at[1]), default=None)
            yield tensor, {**_numbers_of_rows(rows), "first": first}


def _row_sums(
    a: Tensor,
    b: Tensor,
    truth: Tensor,
    unit: Tensor,
    moved: Tensor,
    counted: Tensor,
    fmt: Format,
) -> dict[str, Tensor]:
    """Returns sums over the features of each row, by name, [batch, heads, rows]: of
    squares (`difference`, `floor`, `unit`, `error_base`, `error_variant`) and of elements
    (`elements`, `differ`, `nonfinite`, `finite`); `ulps` is the largest of a row. Only
    elements that are finite in both forms and the truth, in rows that count, are in the
    squares. `a`, `b`, `truth`, `unit`, `moved`: [batch, heads, rows, features], `moved` a
    mask of elements that differ; `counted`: a mask of rows."""
    one, other, shown = a.double(), b.double(), counted[..., None]
    finite = one.isfinite() & other.isfinite()
    usable = finite & truth.isfinite() & shown
    turned = ~finite & (one != other) & ~(one.isnan() & other.isnan()) & shown
    one, other, truth, unit = (
        torch.where(usable, x, 0.0) for x in (one, other, truth, unit)
    )
    squares = {
        "difference": one - other, "floor": round_to(truth, fmt) - truth, "unit": unit,
        "error_base": one - truth, "error_variant": other - truth,
    }  # fmt: skip
    counts = {
        "elements": shown.expand_as(a),
        "differ": moved,
        "nonfinite": turned,
        "finite": usable,
    }
    spacing = ulp(torch.maximum(one.abs(), other.abs()), format_of(a.dtype))
    ulps = torch.where(moved, (one - other).abs() / spacing, 0.0)
    sums = {name: x.square() for name, x in squares.items()} | counts
    return {name: x.sum(dim=-1) for name, x in sums.items()} | {"ulps": ulps.amax(dim=-1)}


def _error_of_other_keys(rows: Mapping[str, Tensor], tensor: str) -> dict[str, Tensor]:
    """Returns `elsewhere`, [batch, heads, rows]: for each key of dk the largest squared
    error over the keys of its head, of the form in which that is smaller, over
    ELSEWHERE²; 0 for other tensors. Rounded dS does not sum to 0 over the keys, and the
    gradient of a maximum takes what is left to the key that has it. Where scores tie,
    each form may choose another key."""
    if tensor != "dk" or not rows["difference"].numel():
        return {"elsewhere": torch.zeros_like(rows["difference"])}
    errors = (
        rows[name].amax(dim=-1, keepdim=True) for name in ("error_base", "error_variant")
    )
    both = torch.minimum(*errors) / ELSEWHERE**2
    return {"elsewhere": both.expand_as(rows["difference"])}


def _numbers_of_rows(rows: Mapping[str, Tensor]) -> Numbers:
    """Returns the numbers of an `InvarianceRow` from the sums over each row, at least
    one. `floor_ratio`, `error_base` and `error_variant` are missing where the floor has
    no error."""
    whole = {name: x.sum()[None] for name, x in rows.items()}
    whole["elsewhere"] = torch.zeros_like(whole["unit"])  # a matter of single keys
    names = ("difference", "floor", "error_base", "error_variant")
    size = max(1, int(whole["finite"]))
    difference, floor, error_base, error_variant = (
        math.sqrt(float(whole[name]) / size) for name in names
    )
    numbers: Numbers = {
        "elements": int(rows["elements"].sum()),
        "differ": int(rows["differ"].sum()),
        "nonfinite": int(rows["nonfinite"].sum()),
        "difference": difference,
        "ulps": float(rows["ulps"].amax()),
        "excess": _largest_excess(whole),
        "excess_of_a_row": _largest_excess(rows),
    }
    if floor:
        numbers["floor_ratio"] = difference / floor
        numbers["error_base"] = error_base / floor
        numbers["error_variant"] = error_variant / floor
    return numbers


def _largest_excess(squares: Mapping[str, Tensor]) -> float:
    """Returns the largest over rows of the rms difference over the rms that roundings
    explain; 0 without rows, at most 1e150. What roundings explain is the largest of: the
    error of the better form, `floor`, `unit`, `elsewhere`. `squares`: sums of squares by
    name, [rows]."""
    explained = torch.minimum(squares["error_base"], squares["error_variant"])
    for name in ("floor", "unit", "elsewhere"):
        explained = torch.maximum(explained, squares[name])
    differences = squares["difference"]
    ratios = torch.where(differences > 0, differences / explained, 0.0)
    return math.sqrt(float(ratios.amax().clamp_max(1e300))) if len(ratios) else 0.0


def _first_difference(
    call: VariantCall, tensor: str, moved: Tensor
) -> tuple[int, int, int, int]:
    """Returns the place in the base of the first element that differs in one call:
    sequence, head, row (of dk and dv: kv head, key) and feature. The smallest row comes
    first, then sequence, head, feature. `moved`: which of the call's compared elements
    differ, [batch, heads, rows, features], at least one."""
    row = int(moved.any(dim=3).any(dim=0).any(dim=0).nonzero()[0])
    sequence, head, feature = moved[:, :, row].nonzero()[0].tolist()
    place = call.in_base
    heads, rows = (
        (place.kv_head, place.key) if tensor in ("dk", "dv") else (place.head, place.row)
    )
    before = [x.start or 0 if x else 0 for x in (place.batch, heads, rows)]
    return sequence + before[0], head + before[1], row + before[2], feature


def count_keys_seen(case: AttentionCase, first: tuple[int, int, int, int]) -> int:
    """Returns how many keys one row of a case sees, by causality, window and mask.
    `first`: its sequence, head, row, and a feature, which is ignored."""
    sequence, head, row, _ = first
    shown = visible(case, slice(row, row + 1), slice(0, case.kv_len))
    if shown is None:
        return case.kv_len
    shown = shown.expand(*case.q.shape[:2], 1, case.kv_len)
    return int(shown[sequence, head].sum())
