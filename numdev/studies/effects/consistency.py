"""Checks that a report of effects has the rows that its plan says, and that its numbers
do not contradict each other."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from numdev.gate.row_groups import (
    HUGE,
    format_differences,
    refuse_contradictions,
    unplanned_kernels,
)
from numdev.grouping import grouped
from numdev.report.number_text import label
from numdev.studies.effects.report import (
    LIMIT,
    LIMITS,
    Check,
    EffectsPlan,
    EffectsReport,
    Kind,
    OutputRow,
    rank_for_use,
)

SIZES = (
    *("cost", "error", "cost_p999", "cost_max"),
    *("log_prob", "log_prob_p999", "log_prob_max"),
    *("angle", "from_against"),
)
# Parts of a sequence in `growth`, which one of less than twice as many positions lacks
PARTS = 8
FAR = 10.0  # times the error of a kernel, which no floor reaches
# The kinds of runs that are also compared with the kernel `against`
STEADY = ("whole", "repeat", "moved")


def check_consistency(report: EffectsReport) -> None:
    """Raises MeasurementError, with the first contradiction, for a plan that is not what
    the request asked for; for rows or checks that nobody planned, or that are missing;
    and for numbers that contradict each other. Without this a missing row would exceed no
    limit."""
    refuse_contradictions(
        _plan_contradictions(report),
        _check_contradictions(report),
        _row_contradictions(report),
        _floor_contradictions(report),
    )


def _plan_contradictions(report: EffectsReport) -> Iterator[str]:
    """Yields a sentence for each way, of those that are looked for, in which the plan is
    not what the request asked for, has another output than the report, or contradicts
    itself."""
    plan, request = report.plan, report.request
    yield from format_differences(request, plan.formats)
    read = report.provenance.source.get("sequences_read")
    if read is not None and read != plan.sequences:
        yield "the plan has other sequences than were read"
    names = {kernel.kernel for kernel in plan.kernels}
    yield from unplanned_kernels(request, names)
    if request.get("against") != plan.against:
        yield "the plan has another kernel to set beside than the request"
    if plan.against not in names or len(plan.kernels) > 1 + len(
        request.get("kernels") or ()
    ):
        yield "the plan has other kernels than the request"
    used = min(
        plan.kernels,
        key=lambda kernel: rank_for_use(kernel.kernel, plan.against),
        default=None,
    )
    if used is not None and plan.sites_of != label(used):
        yield "the plan has attention's sites of another kernel than the one that is used"
    kinds = Counter(run.kind for run in plan.runs)
    if max(Counter(run.run for run in plan.runs).values(), default=0) > 1:
        yield "the plan has a run twice"
    of_kernels: tuple[Kind, ...] = ("whole", "attention", "predicted")
    for kind in of_kernels:
        ran = Counter(
            (run.kernel, str(run.options))
            for run in plan.runs
            if run.kind == kind and run.layer is None
        )
        lacking = [k for k in plan.kernels if not ran[k.kernel, str(k.options)]]
        if lacking:
            yield f"the plan has no run of kind {kind} with {lacking[0].kernel}"
    if not kinds["repeat"] == kinds["moved"] == 1:
        yield "the plan has no run, or several, that repeats another"
    if kinds["emulated"] != kinds["random"]:
        yield "the plan has some of the runs with all sites, and not all"
    if bool(kinds["site"]) != bool(request.get("sites") and kinds["emulated"]):
        yield "the plan has other runs of single sites than the request"
    other_output = (report.output == "logits") != plan.logits
    if other_output or not plan.outputs or plan.sequences < 1:
        yield "the plan has another output than the report"


def _check_contradictions(report: EffectsReport) -> Iterator[str]:
    """Yields a sentence for each contradiction of the checks: they are not those that
    were planned, in that order, each once; the plan has `cache` or `compiled`, which the
    request does not ask for; the plan has no `repeat`; a check contradicts itself."""
    present = [(check.name, check.format, check.applies) for check in report.checks]
    planned = [(check.name, check.format, check.applies) for check in report.plan.checks]
    if present != planned or len({name[:2] for name in present}) < len(present):
        yield "its checks are not those that were planned"
    applied = {check.name for check in report.plan.checks if check.applies}
    for option, name in (("generate", "cache"), ("compile", "compiled")):
        if bool(report.request.get(option)) < (name in applied):
            yield f"the plan has the check {name}, which the request has not"
    if "repeat" not in applied:
        yield "the plan has no check of whether the model repeats itself"
    for each in report.checks:
        if wrong := _check_contradiction(each):
            yield f"the check {each.name} {wrong}"


def _check_contradiction(check: Check) -> str:
    """Returns the first thing that is wrong with a check, as a clause that follows its
    name; empty where its fields fit together."""
    limit = LIMITS.get(check.name, LIMIT)
    if check.limit not in (None, limit):
        return f"has another limit than {limit:g}"
    size = check.difference
    if size is not None and (check.limit is None or not 0 <= size <= HUGE):
        return "has a difference without a limit, or one that cannot be"
    match check.holds:
        case None:
            return "" if check.reason and size is None else "has a result, and none"
        case _ if not check.applies:
            return "was tried, and does not apply"
        case True:
            if size is None:
                return "holds, and was not tried"
            return "holds beyond its limit" if size > limit else ""
        case False:
            if not check.reason or (size is not None and size <= limit):
                return "fails within its limit, or for no reason"
            return ""


def _row_contradictions(report: EffectsReport) -> Iterator[str]:
    """Yields a sentence for each planned run of a sequence that has no row or several,
    and for each such run that was not planned. Yields one for each planned row that
    contradicts itself, and for each that has another number of positions than the first
    one of its format, output and sequence. Rows that are not `ok` have no such number."""
    plan = report.plan
    rows = grouped(report.rows, lambda r: (r.run, r.sequence))
    wanted = itertools.product(
        plan.formats, plan.runs, plan.outputs, range(plan.sequences)
    )
    positions: dict[tuple[str, str, int], int] = {}
    for fmt, run, at, sequence in wanted:
        where = f"{' '.join(filter(None, (run.kind, run.kernel, run.site)))} ({fmt})"
        where += f" of sequence {sequence}"
        matching = rows.pop(((run.kind, fmt, at, *run.run[1:]), sequence), [])
        if len(matching) != 1:
            yield f"{where} has no row, or several"
        for row in matching:
            if wrong := _row_contradiction(row, plan):
                yield f"{where} {wrong}"
            if row.status != "ok":
                continue
            first = positions.setdefault((fmt, at, sequence), row.positions)
            if row.positions != first:
                yield f"{where} has another number of positions than other runs"
    for (kind, fmt, *_), sequence in rows:
        yield f"{kind} ({fmt}) of sequence {sequence} was not planned"


def _floor_contradictions(report: EffectsReport) -> Iterator[str]:
    """Yields a sentence for each format, output and sequence where the floor errs more
    than FAR times as much as a kernel. Errors are those of attention alone; rows without
    an error, or with the error 0, do not count. The floor is the exact result rounded
    once, so that no kernel of its format errs much less."""
    alone = [
        r for r in report.rows if r.kind == "attention" and r.layer is None and r.error
    ]
    by_call = grouped(alone, lambda r: (r.format, r.at, r.sequence))
    for (fmt, _, sequence), rows in by_call.items():
        errors = {row.kernel: row.error or 0.0 for row in rows}
        if errors.get("floor", 0.0) > FAR * min(errors.values()):
            yield f"the floor ({fmt}) of sequence {sequence} errs far more than a kernel"


def _row_contradiction(row: OutputRow, plan: EffectsPlan) -> str:
    """Returns the first thing that is wrong with a row, as a clause; empty where its
    fields fit together."""
    sizes = [x for name in SIZES if (x := getattr(row, name)) is not None]
    if row.status != "ok":
        return _unmeasured_contradiction(row, sizes)
    measured = row.positions > 0 and row.cost is not None and row.error is not None
    if row.lost or row.nonfinite or not measured:
        return "has no numbers, and was measured"
    if not all(0 <= x <= HUGE for x in sizes):
        return "has a number that cannot be"
    if not row.error and row.cost:
        return "has a cost without an error"
    for name in ("cost", "log_prob"):
        if not _ordered(*(getattr(row, f"{name}{end}") for end in ("", "_p999", "_max"))):
            return f"has a {name} above its largest"
    if len(row.growth) != (PARTS if row.positions >= 2 * PARTS else 0):
        return "has no growth along its positions"
    if plan.logits:
        return _flips_contradiction(row, plan)
    is_of_states = row.angle is not None and row.flips is None
    return "" if is_of_states else "has the numbers of logits"


def _unmeasured_contradiction(row: OutputRow, sizes: Sequence[float]) -> str:
    """Returns what is wrong with a row that is not `ok`: it must have a reason and no
    numbers, may be `lost` only where it was skipped, and have `nonfinite` only where it
    failed. Empty where nothing is wrong. `sizes`: the row's numbers of SIZES that are not
    null."""
    counts = (row.flips, row.unexplained, row.first_flip, row.log_perplexity)
    has_numbers = sizes or row.positions or row.growth
    if has_numbers or any(x is not None for x in counts):
        return "has numbers though it was not measured"
    if row.lost and (row.status != "skipped" or row.nonfinite):
        return "has no exact output, and was measured"
    if not row.reason or (row.nonfinite and row.status != "failed"):
        return "says no why"
    return ""


def _ordered(mean: float | None, point: float | None, largest: float | None) -> bool:
    """Whether a mean and the 99.9 % point over positions are at most the largest value,
    or a part in 1e9 more, which counts as rounding. True where all three are None, False
    where one or two are."""
    if mean is None or point is None or largest is None:
        return mean is None and point is None and largest is None
    return max(mean, point) <= largest * (1 + 1e-9)


def _flips_contradiction(row: OutputRow, plan: EffectsPlan) -> str:
    """Returns the first thing that is wrong with the flips of a row of logits, as a
    clause; empty where nothing is."""
    if row.flips is None or not 0 <= row.flips <= row.positions:
        return "has more flips than positions"
    if (row.first_flip is None) != (row.flips == 0):
        return "has a first flip and none"
    if row.unexplained is not None and plan.routes:
        return "says which flips are unexplained, and the model chooses experts"
    if row.unexplained is not None and not 0 <= row.unexplained <= row.flips:
        return "has more unexplained flips than flips"
    # Flips are told from near ties by the errors of the emulated run
    explained = not plan.routes and any(run.kind == "emulated" for run in plan.runs)
    if row.kind in STEADY and row.unexplained is None and explained:
        return "does not say which flips are unexplained"
    return ""
