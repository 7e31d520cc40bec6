"""One measured kernel explained: the attribution of one task, a row for each of its tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from numdev.audit.attempt import Failure, Runner, attempt
from numdev.audit.bench import KV_TENSORS, Bench
from numdev.audit.plan import Task
from numdev.audit.rows import COUNTED, given, identity, returned
from numdev.explain.attribution import FORWARD_VARIED, Attribution, Claim, attribute
from numdev.explain.words import sentence
from numdev.kernels import Kernel, Output
from numdev.kernels.emulation.predict import (
    CASTS,
    emulated_step,
    emulation,
    returning,
    unpredictable,
)
from numdev.kernels.emulation.recipe import SITES
from numdev.kernels.reference import attend, gradients
from numdev.kernels.reference.results import Gradients, Reference
from numdev.report import AttributionRow, SiteShare
from numdev.system import System

# How many heads are compared: a kernel rounds alike in all of them, and each costs emulations.
# Where gradients are, heads come in whole groups, at least one of them.
MOST_HEADS = 4
KEPT_BYTES = 1 << 30  # how much of the emulations is kept; the first are what tensors share
TERMS = {"out": "term_scale", "dq": "dq_terms", "dk": "dk_terms", "dv": "dv_terms"}


def explain(
    task: Task, kernel: Kernel, bench: Bench, system: System, run: Runner = attempt
) -> list[AttributionRow]:
    """Which roundings make the errors of the task's kernel, in its output and, where the task wants
    gradients and the kernel has them, in each of those; none where it returned nothing.

    "Unknown" where emulations predict nothing, as in fp32, and where the attempt fails.
    """
    if kernel.missing(system):
        return []
    case, heads, options = bench.case, bench.selection.heads, given(task.options, kernel)
    try:
        output = run(kernel, case, options, gradients=task.gradients)
        if task.gradients and isinstance(output, Failure):
            output = run(kernel, case, options)
        if isinstance(output, Failure):
            return []
        claim = kernel.claims(case, output, system)
        compared = _Compared(bench, output)
    except COUNTED as error:
        return [_row(task, "out", chosen(heads), None, f"it could not be tried ({error})")]
    rows = []
    for tensor in compared.formats:
        found, unknown = None, compared.unpredictable(tensor, claim)
        if not unknown:
            try:
                found = compared.attribution(tensor, claim)
            except COUNTED as error:
                unknown = f"it could not be tried ({error})"
        rows.append(_row(task, tensor, compared.heads[tensor], found, unknown))
        if tensor == "out":
            claim = _informed(claim, found)
    return rows


class _Compared:
    """Some heads of a kernel's output, in the measured rows, the truth, and emulations of them."""

    def __init__(self, bench: Bench, output: Output) -> None:
        case, select, self.output = bench.case, bench.selection, output
        tensors = {t: x for t in CASTS if (x := getattr(output, t)) is not None}
        self.formats = {t: returned(x, case) for t, x in tensors.items()}
        backward = "dq" in tensors
        query_heads, kv_heads = whole_groups(select.heads, case.group)
        if not backward:
            query_heads = chosen(select.heads)
        self.heads = {t: kv_heads if t in KV_TENSORS else query_heads for t in CASTS}
        self.rows = select.queries
        if backward:
            self.case = case.select_groups(list(kv_heads))
        else:
            self.case = case.select_heads(list(query_heads))
        if self.rows is not None:
            self.case = self.case.select_rows(self.rows)
        self.exact: Reference | Gradients = (gradients if backward else attend)(self.case)
        self.kept: dict[str, dict[str, Tensor]] = {}

    def unpredictable(self, tensor: str, claim: Claim | None) -> str | None:
        if self.rows is not None and tensor in KV_TENSORS:
            return "query rows are sampled, and a key's gradient is a sum over all of them"
        return unpredictable(claim or {"preset": "fa2"}, self.case.format, self.formats[tensor])

    def attribution(self, tensor: str, claim: Claim | None) -> Attribution | None:
        output = getattr(self.output, tensor)[:, list(self.heads[tensor])]
        return attribute(
            output if self.rows is None else output[:, :, self.rows],
            getattr(self.exact, tensor),
            getattr(self.exact, TERMS[tensor]).norm(dim=-1),
            self.case.format,
            claim,
            lambda tried: self.emulated(tensor, tried),
            tensor=tensor,
            group=self.case.group,
        )

    def emulated(self, tensor: str, tried: Claim) -> Tensor:
        """One emulation of backward serves all three gradients; the output needs none."""
        recipe = returning(tried, self.case, self.formats)
        key = f"{tensor == 'out'} {sorted(recipe.items())!r}"
        if key in self.kept:
            return self.kept[key][tensor]
        if tensor == "out":
            step = {"out": emulation(self.case, recipe)}
        else:
            step = {t: x for t, x in emulated_step(self.case, recipe).items() if t != "out"}
        if sum(x.nbytes for kept in self.kept.values() for x in kept.values()) < KEPT_BYTES:
            self.kept[key] = step
        return step[tensor]


def _informed(claim: Claim | None, found: Attribution | None) -> Claim | None:
    """The claim with the tiles that explain the output, where it was right but for those."""
    if claim is None or found is None or found.why_not:
        return claim
    shown = found.best.claim
    if shown.get("preset") != claim.get("preset", "fa2"):
        return claim
    rest = {k: v for k, v in claim.items() if k not in FORWARD_VARIED}
    return {**rest, **{k: v for k, v in shown.items() if k in FORWARD_VARIED}}


def chosen(heads: tuple[int, ...], most: int = MOST_HEADS) -> tuple[int, ...]:
    """At most so many of them, evenly spread."""
    return heads[:: max(1, len(heads) // most)][:most]


def whole_groups(heads: tuple[int, ...], group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """About MOST_HEADS query heads, all that read some of the kv heads these read, and those kv
    heads: dK and dV are sums over a group."""
    kv = chosen(tuple(dict.fromkeys(h // group for h in heads)), max(1, MOST_HEADS // group))
    return tuple(h * group + i for h in kv for i in range(group)), kv


def _row(
    task: Task,
    tensor: str,
    heads: tuple[int, ...],
    found: Attribution | None,
    unknown: str | None,
) -> AttributionRow:
    fields: dict[str, Any] = {**identity(task), "tensor": tensor, "heads": heads}
    fields |= {"explained_by": None, "reason": unknown, "sentence": ""}
    if found is not None:
        shares = [{**dataclasses.asdict(s), "rounds": SITES[s.site].rounds} for s in found.shares]
        fields |= {
            "explained_by": None if found.why_not else found.best.preset,
            "reason": found.why_not,
            "nearest": found.best.preset,
            "recipe": dict(found.best.claim),
            "residual": found.best.residual,
            "size": found.best.ratio,
            "next_preset": found.next.preset,
            "next_residual": found.next.residual,
            "sites": tuple(SiteShare(**share) for share in shares),
        }
    row = AttributionRow(**fields)
    return row.model_copy(update={"sentence": sentence(row)})
