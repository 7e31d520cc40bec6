"""The findings of a report, each made small and written as a script
(`numdev.studies.audit.reproducer_script`).

The call a finding is worst in is opened again from the source, and rounded as the kernel
saw it. It is reduced as long as the row is beyond the same limit again, by the same
measurements, or the kernel raises. A finding that does not show again gets no script, and
a message says so."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, NumdevError
from numdev.formats import format_named
from numdev.kernels import Kernel
from numdev.metrics.metrics_by_name import value_of
from numdev.metrics.statistics import BIAS_ALPHA, BIAS_SEQUENCES, BIAS_ULP
from numdev.report import DeviationRow, Finding
from numdev.report.safe_text import plain
from numdev.sources.case_sources import Source
from numdev.studies.audit.case_measurement import measure_one
from numdev.studies.audit.deviation_rows import options_set
from numdev.studies.audit.explanations import excess
from numdev.studies.audit.isolation import Failure, Runner
from numdev.studies.audit.mistake_search import Failing
from numdev.studies.audit.plan import Plan
from numdev.studies.audit.prepared_attention import KV_TENSORS, Selection, part
from numdev.studies.audit.reproducer_script import EVERYWHERE, figure_for, rendered, write
from numdev.tensor_properties import tensor_spec

FOLDER = "reproducers"
SECONDS = 20.0  # how long one finding is reduced
# A kernel that takes so many seconds to fail hangs, or takes its process along: it is not
# asked again and again, and the case is kept whole.
SLOW = 2.0
PLACE = ("case", "module", "layer", "call", "phase", "seed")


def written(
    findings: Sequence[Finding],
    directory: Path,
    template: str,
    facts_of: Callable[[Finding], Mapping[str, object] | None],
) -> list[Path]:
    """Writes a script for each finding into a folder of `directory`/reproducers, by a
    template of `data/reproducer`; returns the paths. `facts_of`: the facts of a finding
    for the template; None: no script. Raises OSError where a script cannot be written."""
    scripts = []
    for finding in findings:
        if (facts := facts_of(finding)) is not None:
            script = directory / FOLDER / finding.folder / "reproduce.py"
            script.parent.mkdir(parents=True, exist_ok=True)
            sentence = plain(finding.whole).replace('"', "'").replace("\\", "/")
            text = rendered(template, {"sentence": sentence, **facts})
            script.write_text(text, encoding="utf-8")
            scripts.append(script)
    return scripts


def reproduce(
    findings: Sequence[Finding],
    source: Source,
    plan: Plan,
    run: Runner,
    directory: Path,
    say: Callable[[str], None],
    *,
    count: int,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    seconds: float = SECONDS,
) -> list[Path]:
    """Writes reproducers for findings that have a place and are no notes, into folders of
    `directory`/reproducers: of the findings on one kernel, tensor and rule for the first,
    and of these for the first `count`. Returns the paths of the scripts. Each call is
    reduced for `seconds` at most. A finding that cannot be reproduced or written gets no
    script, nor does one whose call the source does not give. `say` gets a message for
    each script, for each finding that failed, and one on those beyond a `count` above 0.
    Raises what the source raises, but for RuntimeError."""
    scripts: list[Path] = []
    wanted: dict[tuple[str, str | None, str], Finding] = {}
    for finding in findings:  # one script for a fault that shows in several formats
        if finding.severity != "note" and finding.place is not None:
            wanted.setdefault((finding.kernel, finding.tensor, finding.rule), finding)
    waiting = list(wanted.values())[:count]
    total = len(waiting)
    try:
        for located in source if waiting else ():
            place = [getattr(located.ref, name) for name in PLACE]
            in_call = [
                f for f in waiting if [getattr(f.place, name) for name in PLACE] == place
            ]
            waiting = [f for f in waiting if f not in in_call]
            for finding in in_call:
                progress(
                    f"minimising the reproducer of {finding.folder}", len(scripts), total
                )
                at = directory / FOLDER / finding.folder
                while at.exists():  # of the same kernel with other options
                    at = at.with_name(f"{at.name}-2")
                try:
                    if finding.rule != "runs":
                        figure_for(finding.metric or "")  # before it is made small
                    whole = Selection.of(located.load(), gradients=plan.backward).case
                    shown = _shrink_call(finding, whole, plan, run, seconds)
                    about: Any = {"words": finding.whole, "system": plan.system}
                    script = write(at, **about, **shown)
                except (NumdevError, RuntimeError, ValueError) as error:
                    say(f"No reproducer for {finding.folder}: {error}")
                else:
                    scripts.append(script)
                    say(f"Reproducer: {script}")
    except (
        RuntimeError
    ) as error:  # a fault that ruined the device, so that no model runs on it
        say(f"No reproducer for {', '.join(f.folder for f in waiting)}: {error}")
    if count and len(wanted) > count:
        say(f"{len(wanted) - count} more findings have no reproducer.")
    return scripts


def _shrink_call(
    finding: Finding, whole: AttentionCase, plan: Plan, run: Runner, seconds: float
) -> dict[str, Any]:
    """Returns the arguments, by name, of `reproducer_script.write` for a finding: a small
    call in which its row is accused again, or its kernel fails, and what a script looks
    at in it. `whole`: the call as it came; `seconds`: how long it is reduced. Raises
    NumdevError where the finding does not show again."""
    which, metric = ("kernel", finding.kernel, finding.options), finding.metric or ""
    planned = next(p for p in plan.kernels if (p.role, p.kernel.name, p.options) == which)
    case, kernel = whole.rounded_to(format_named(finding.formats[0])), planned.kernel
    options = options_set(planned.options, kernel)
    shown = {"kernel": kernel, "options": options, "tensor": finding.tensor or "out"}
    if finding.rule == "runs":
        if not tensor_spec(finding.tensor or "").is_gradient:
            case = dataclasses.replace(case, grad_out=None)
        small = _shrink_failing_call(case, kernel, options, run, seconds)
        return {**shown, "case": small, "head": 0, "metric": "raises", "observed": None}

    # What explained nothing in the whole call is not tried in its parts
    declaring = kernel
    if not kernel.declares:
        declaring = dataclasses.replace(
            kernel, claims=lambda case, output, system: {"preset": "fa2"}
        )
    repeats = 3 if metric == "noise_ratio" else 1
    task = plan.task(planned, finding.formats[0], case.ref)
    task = dataclasses.replace(task, heads=None, repeats=repeats)

    def accused(case: AttentionCase) -> DeviationRow | None:
        """Returns the worst row of a case of those that are accused as the finding's was;
        None where none is."""
        # Why it errs is known, unless that is what must show
        is_searched = metric == "suspicion" and named
        later: list[Failing] | None = None if is_searched else []
        rows = measure_one(
            task, declaring, case, plan.system, run, searching=False, later=later
        )
        worst_first = sorted(rows, key=lambda row: -_metric_size(row, metric))
        rows_again = (
            r for r in worst_first if _is_accused_again(r, finding, named=named)
        )
        return next(rows_again, None)

    # A mistake that was named in other calls may not be named again in this one alone,
    # where its error is the same: then it shows where a head is beyond its limit.
    named = True
    named = metric != "suspicion" or accused(case) is not None
    head = (finding.place.head if finding.place is not None else None) or 0
    head *= case.group if finding.tensor in KV_TENSORS else 1
    small = reduce(case, lambda case: accused(case) is not None, seconds, head=head)
    row = accused(small) or accused(small)
    if row is None:
        raise NumdevError(
            "it does not show every time", hint="the kernel differs between runs"
        )
    figure = figure_for(metric, row.bias_of)
    observed = getattr(row, figure)
    limit = observed_at_limit(row, observed, finding)
    of = {"case": small, "head": row.head or 0, "metric": figure}
    return {**shown, **of, "observed": observed, "limit": limit}


def _shrink_failing_call(
    case: AttentionCase,
    kernel: Kernel,
    options: Mapping[str, object],
    run: Runner,
    seconds: float,
) -> AttentionCase:
    """Returns a small form of a call in which a kernel fails, in a training step where
    the case has an upstream gradient. The case itself where it takes longer than SLOW
    seconds to fail. `seconds`: how long it is reduced. Raises MeasurementError where the
    kernel does not fail."""

    def fails(case: AttentionCase) -> bool:
        """Whether the kernel fails on a case."""
        result = run(kernel, case, options, gradients=case.grad_out is not None)
        return isinstance(result, Failure) and result.status == "failed"

    began = time.monotonic()
    slow = fails(case) and time.monotonic() - began > SLOW
    return case if slow else reduce(case, fails, seconds)


def observed_at_limit(
    row: DeviationRow, observed: float | None, finding: Finding
) -> float | None:
    """Returns the value of a row's figure at which the finding's limit lies: `observed`
    times the limit (1 without one) over the row's `expected_ratio`. None for findings on
    another metric, and where `observed` or the ratio is None or 0."""
    if finding.metric == "expected_ratio" and row.expected_ratio and observed:
        return observed * (finding.limit or 1.0) / row.expected_ratio
    return None


def _metric_size(row: DeviationRow, metric: str) -> float:
    """Returns the absolute value of a row's metric; 0 where it is no number. Raises
    AttributeError for the name of no metric."""
    value = value_of(row, metric)[0]
    return abs(value) if isinstance(value, int | float) else 0.0


def _is_accused_again(row: DeviationRow, finding: Finding, *, named: bool) -> bool:
    """Whether a row is accused as the finding's was: beyond the finding's limit, with a
    suspicion, or with a certain bias. False for another tensor, and for a row that is not
    ok. Without `named` a finding on a suspicion needs none: its error must be beyond the
    default limit."""
    if row.status != "ok" or row.tensor != (finding.tensor or "out"):
        return False
    if finding.metric == "suspicion" and not named:
        return excess("expected_ratio", row.expected_ratio, row) > 1
    if finding.metric == "suspicion":
        return row.suspicion is not None
    size = _metric_size(row, finding.metric or "")
    if finding.metric == "bias_size":
        certain = row.bias_p is not None and row.bias_p <= BIAS_ALPHA
        return certain and (row.sequences or 0) >= BIAS_SEQUENCES and size >= BIAS_ULP
    return size > (finding.limit or 0.0)


# --- the smallest call ----------------------------------------------------------------

# How often the input and the result are asked: a kernel may differ from run to run
TRIES = 3
# Axes that are cut together; whether at the start or the end
Ends = tuple[tuple[str, bool], ...]
ROWS_START, ROWS_END = ("row", True), ("row", False)
KEYS_START, KEYS_END = ("key", True), ("key", False)
# Cuts that keep the offset come first, since a kernel may be wrong at one alignment only.
# Where positions count, as many queries as keys stay as many: where they differ kernels
# align causality at one corner or the other, and a kernel that is right could be shown to
# differ for that alone.
SQUARE: tuple[Ends, ...] = ((ROWS_END, KEYS_END), (ROWS_START, KEYS_START))
SINGLE: tuple[Ends, ...] = ((ROWS_END,), (KEYS_END,), (KEYS_START,), (ROWS_START,))


def reduce(
    case: AttentionCase,
    still_shows: Callable[[AttentionCase], bool],
    budget_s: float = 60.0,
    *,
    head: int = 0,
) -> AttentionCase:
    """Returns the smallest form of `case` that was tried and for which `still_shows`
    holds: with query head `head` alone, else with as few kv heads as will do. No form is
    tried after `budget_s` seconds. The case itself where the smallest form no longer
    shows the finding when it is asked again. Raises MeasurementError where the finding
    does not show in `case` itself."""
    if not any(still_shows(case) for _ in range(TRIES)):
        raise MeasurementError(
            f"the finding could not be reproduced in case {case.ref.case!r} "
            f"({TRIES} attempts)"
        )
    best, deadline = case, time.monotonic() + budget_s

    def accept(candidate: AttentionCase) -> bool:
        """Takes the candidate as the best so far, and returns True, where it shows the
        finding and there is time left; else returns False."""
        nonlocal best
        shows = time.monotonic() < deadline and still_shows(candidate)
        best = candidate if shows else best
        return shows

    def trim(*ends: tuple[str, bool]) -> None:
        """Cuts as much off these ends of axes together as can be, by bisection. `ends`:
        (axis, whether at its start)."""
        whole = best
        sizes = {"batch": len(whole.q), "row": whole.q_len, "key": whole.kv_len}
        sizes["kv_head"] = whole.kv_heads
        most = min(sizes[axis] for axis, _ in ends) - 1
        dropped, step = 0, 1 << most.bit_length() >> 1
        while step:
            t = dropped + step
            ranges = {
                a: range(t, sizes[a]) if start else range(sizes[a] - t)
                for a, start in ends
            }
            if t <= most and accept(part(whole, **ranges)):
                dropped = t
            step //= 2

    kv = head // case.group
    if not accept(part(case, head=range(head, head + 1), kv_head=range(kv, kv + 1))):
        trim(("kv_head", False))
        trim(("kv_head", True))
    if best.mask is not None:
        accept(dataclasses.replace(best, mask=None))
    if best.restricts_positions:
        accept(dataclasses.replace(best, **EVERYWHERE))
    for end in (False, True):
        trim(("batch", end))
    square = best.restricts_positions and best.q_len == best.kv_len
    for ends in SQUARE if square else (*SQUARE, *SINGLE):
        trim(*ends)
    return best if any(still_shows(best) for _ in range(TRIES)) else case
