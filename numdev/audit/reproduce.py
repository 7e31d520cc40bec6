"""A report's findings, each made small and written as a script (`numdev.audit.script`).

The call a finding is worst in is opened again from the source, rounded as the kernel saw it, and
reduced for as long as the accused row is accused again, by the same measurements and limit; a
kernel that raises is asked whether it still does. What does not come again gets no script, and that
is said. `reduce` is delta debugging on the axes of attention (Zeller and Hildebrandt, Simplifying
and Isolating Failure-Inducing Input, 2002): it leaves out heads, sequences, keys and query rows,
halves first.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numdev.audit.bench import Selection
from numdev.audit.isolation import Failure, Runner
from numdev.audit.plan import Plan, Planned
from numdev.audit.rows import given
from numdev.audit.script import figure_for, write
from numdev.audit.task import measure_one
from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, NumdevError
from numdev.formats import format_named
from numdev.metrics.of_rows import value_of
from numdev.metrics.statistics import BIAS_ALPHA, BIAS_SEQUENCES, BIAS_ULP
from numdev.report import DeviationRow, Finding
from numdev.sources.opening import Source
from numdev.sources.tensorfile import storage_order

FOLDER = "reproducers"
SECONDS = 20.0  # how long one finding is reduced
# A kernel that takes so many seconds to fail hangs, or takes its process along: it is not asked
# again and again, and the case is kept whole.
SLOW = 2.0
PLACE = ("case", "module", "layer", "call", "phase", "seed")


def reproduce(
    findings: Sequence[Finding],
    source: Source,
    plan: Plan,
    run: Runner,
    directory: Path,
    say: Callable[[str], None],
    *,
    count: int,
    seconds: float = SECONDS,
    folder: Path | None = None,
) -> list[Path]:
    """Write a reproducer for the first `count` findings that have a place, into
    `directory`/reproducers; returns the scripts. Each is reduced for `seconds`; `folder` is where a
    script finds the module of a kernel that is a function. What cannot be reproduced or written
    costs its script and no more; `say` is told."""
    scripts: list[Path] = []
    shutil.rmtree(directory / FOLDER, ignore_errors=True)  # of an earlier run of this request
    wanted: dict[tuple[str, str | None, str], Finding] = {}
    for finding in findings:  # one script for a fault that shows in several formats
        if finding.severity != "note" and finding.place is not None:
            wanted.setdefault((finding.kernel, finding.tensor, finding.rule), finding)
    waiting = list(wanted.values())[:count]
    try:
        for located in source if waiting else ():
            place = [getattr(located.ref, name) for name in PLACE]
            here = [f for f in waiting if [getattr(f.place, name) for name in PLACE] == place]
            waiting = [f for f in waiting if f not in here]
            for finding in here:
                at = directory / FOLDER / finding.folder
                while at.exists():  # of the same kernel with other options
                    at = at.with_name(f"{at.name}-2")
                try:
                    whole = Selection.of(located.load(), gradients=plan.gradients).case
                    shown = _shown(finding, whole, plan, run, seconds)
                    about: Any = {"words": finding.sentence, "system": plan.system}
                    script = write(at, **about, folder=folder, **shown)
                except (NumdevError, RuntimeError, ValueError) as error:
                    say(f"No reproducer for {finding.folder}: {error}")
                else:
                    scripts.append(script)
                    say(f"Reproducer: {script}")
    except RuntimeError as error:  # a fault that ruined the device, so that no model runs on it
        say(f"No reproducer for {', '.join(f.folder for f in waiting)}: {error}")
    if count and len(wanted) > count:
        say(f"{len(wanted) - count} more findings have no reproducer.")
    return scripts


def _shown(
    finding: Finding, whole: AttentionCase, plan: Plan, run: Runner, seconds: float
) -> dict[str, Any]:
    """A small call that shows a finding, and what a script looks at in it. Raises NumdevError where
    it does not show again."""
    which = ("kernel", finding.kernel, finding.options)
    planned = next(p for p in plan.kernels if (p.role, p.kernel.name, p.options) == which)
    case = whole.rounded_to(format_named(finding.formats[0]))
    options = given(planned.options, planned.kernel)
    shown = {"kernel": planned.kernel, "options": options, "tensor": finding.tensor or "out"}
    if finding.rule != "runs":
        return {**shown, **_accused(finding, case, planned, plan, run, seconds)}
    backward = finding.tensor == "dq"
    case = case if backward else dataclasses.replace(case, grad_out=None)

    def fails(case: AttentionCase) -> bool:
        result = run(planned.kernel, case, options, gradients=backward)
        return isinstance(result, Failure) and result.status == "failed"

    began = time.monotonic()
    slow = fails(case) and time.monotonic() - began > SLOW
    small = case if slow else reduce(case, fails, seconds)
    return {**shown, "case": small, "head": 0, "metric": "raises", "observed": None}


def _accused(
    finding: Finding,
    whole: AttentionCase,
    planned: Planned,
    plan: Plan,
    run: Runner,
    seconds: float,
) -> dict[str, Any]:
    """A small call in which the finding's row is accused again, with the figure of the row."""
    kernel, metric = planned.kernel, finding.metric or ""
    if not kernel.declares:  # what explained nothing in the whole call is not tried in its parts
        kernel = dataclasses.replace(kernel, claims=lambda case, output, system: {"preset": "fa2"})
    task = dataclasses.replace(
        plan.task(planned, finding.formats[0], whole.ref),
        heads=None,
        repeats=3 if metric == "noise_ratio" else 1,
    )

    def accused(case: AttentionCase) -> DeviationRow | None:
        rows = measure_one(task, kernel, case, plan.system, run)
        worst_first = sorted(rows, key=lambda row: _size(row, metric), reverse=True)
        return next((row for row in worst_first if _shows(row, finding)), None)

    head = finding.place.head if finding.place is not None else None
    if finding.tensor in ("dk", "dv") and head is not None:
        head *= whole.group
    small = reduce(whole, lambda case: accused(case) is not None, seconds, head=head)
    row = accused(small) or accused(small)
    if row is None:
        raise NumdevError("it does not show every time", hint="the kernel differs between runs")
    figure = figure_for(metric, row.bias_of)
    observed, limit = getattr(row, figure), None
    if metric == "expected_ratio" and row.expected_ratio and observed:
        limit = observed * (finding.limit or 1.0) / row.expected_ratio
    shown = {"head": row.head or 0, "metric": figure, "observed": observed, "limit": limit}
    return {"case": small, **shown}


def _size(row: DeviationRow, metric: str) -> float:
    """Of a number, how large it is; 0 where there is none."""
    value = value_of(row, metric)[0]
    return abs(value) if isinstance(value, int | float) else 0.0


def _shows(row: DeviationRow, finding: Finding) -> bool:
    """Whether a row is accused as the finding's was."""
    if row.status != "ok" or row.tensor != (finding.tensor or "out"):
        return False
    if finding.metric == "suspicion":
        return row.suspicion is not None
    size = _size(row, finding.metric or "")
    if finding.metric == "bias_size":
        certain = row.bias_p is not None and row.bias_p <= BIAS_ALPHA
        return certain and (row.sequences or 0) >= BIAS_SEQUENCES and size >= BIAS_ULP
    return size > (finding.limit or 0.0)


# --- the smallest call ---------------------------------------------------------------------------

TRIES = 3  # how often the input and the result are asked: a kernel may differ from run to run
# Which are cut together where positions count: rows at the start, rows at the end, keys at the
# start, keys at the end. Cuts that keep the offset come first, since a kernel may be wrong at one
# alignment only. As many queries as keys stay as many: where they differ kernels align causality at
# one corner or the other, and a kernel that is right could be shown to differ for that alone.
SQUARE_CUTS = ((0, 1, 0, 1), (1, 0, 1, 0))
CUTS = (*SQUARE_CUTS, (0, 1, 0, 0), (0, 0, 0, 1), (1, 0, 1, 0), (0, 0, 1, 0), (1, 0, 0, 0))
# Into how many pieces an axis is cut, round by round: all axes become coarsely small first.
ALL = 1 << 30
PIECES = (4, 32, ALL)
# The axes of a case's tensors; a mask may have the last ones alone, and broadcast along them.
AXES = {
    "q": ("batch", "head", "row", "feature"),
    "k": ("batch", "kv_head", "key", "feature"),
    "v": ("batch", "kv_head", "key", "feature"),
    "grad_out": ("batch", "head", "row", "feature"),
    "mask": ("batch", "head", "row", "key"),
    "sinks": ("head",),
}


def reduce(
    case: AttentionCase,
    still_shows: Callable[[AttentionCase], bool],
    budget_s: float = 60.0,
    *,
    head: int | None = None,
) -> AttentionCase:
    """The smallest form of `case` for which `still_shows` holds, `head` being the query head to
    begin with. No candidate is begun after `budget_s` seconds. Raises MeasurementError where the
    finding does not show in `case` itself."""
    if not any(still_shows(case) for _ in range(TRIES)):
        raise MeasurementError(
            f"the finding does not show again in case {case.ref.case!r}, {TRIES} times asked"
        )
    search = _Search(case, still_shows, time.monotonic() + budget_s)
    search.heads(head)
    search.fewer_features()
    for pieces in PIECES:
        search.fewer("batch", pieces)
        if search.best.restricts_positions:
            search.ranges()
        else:
            search.fewer("key", pieces)
            search.fewer("row", pieces)
    search.fewer_features()
    return search.best if any(still_shows(search.best) for _ in range(TRIES)) else case


@dataclasses.dataclass
class _Search:
    """The smallest case so far that shows."""

    best: AttentionCase
    shows: Callable[[AttentionCase], bool]
    deadline: float

    def accept(self, candidate: AttentionCase) -> bool:
        """Make the candidate the best case if it shows; False once the budget is spent."""
        if time.monotonic() >= self.deadline or not self.shows(candidate):
            return False
        self.best = candidate
        return True

    def fewer(self, axis: str, pieces: int = ALL) -> None:
        """Leave out indices of an axis of the best case."""
        case = self.best
        size = {"batch": len(case.q), "row": case.q_len, "key": case.kv_len, "head": case.heads}
        _fewest(size[axis], lambda few: self.accept(part(case, **{axis: few})), pieces)

    def heads(self, head: int | None) -> None:
        """The given head; else as few kv heads as will do, then as few query heads of a single
        one."""
        case, group = self.best, self.best.group

        def groups(kv_heads: Sequence[int]) -> bool:
            heads = [h * group + g for h in kv_heads for g in range(group)]
            return self.accept(part(case, head=heads, kv_head=kv_heads))

        if head is not None and self.accept(part(case, head=[head], kv_head=[head // group])):
            return
        _fewest(case.kv_heads, groups)
        if self.best.kv_heads == 1:
            self.fewer("head")

    def ranges(self) -> None:
        """Cut rows and keys off the ends, by bisection."""
        square = self.best.q_len == self.best.kv_len
        for rows_first, rows_last, keys_first, keys_last in SQUARE_CUTS if square else CUTS:
            case = self.best
            n, m = case.q_len, case.kv_len
            moves_rows, moves_keys = rows_first or rows_last, keys_first or keys_last
            most = min(n if moves_rows else m, m if moves_keys else n) - 1
            dropped, step = 0, (most + 1) // 2
            while step:
                t = dropped + step
                rows = range(rows_first * t, n - rows_last * t)
                keys = range(keys_first * t, m - keys_last * t)
                if t <= most and self.accept(at_positions(case, rows, keys)):
                    dropped = t
                step //= 2

    def fewer_features(self) -> None:
        """Leave out the mask, and causality and the window."""
        if self.best.mask is not None:
            self.accept(dataclasses.replace(self.best, mask=None))
        if self.best.is_causal or self.best.window:
            everywhere: dict[str, Any] = {"is_causal": False, "causal_offset": 0, "window": None}
            self.accept(dataclasses.replace(self.best, **everywhere))


def _fewest(size: int, shows: Callable[[list[int]], bool], pieces: int = ALL) -> None:
    """Leave out pieces of `size` items, halves first, for as long as `shows` says yes; at most
    `pieces` pieces. Never leaves nothing."""
    items = list(range(size))
    smallest = max(1, -(-size // pieces))
    size = (size + 1) // 2
    while len(items) > 1:
        start = 0
        while start < len(items):
            fewer = items[:start] + items[start + size :]
            if fewer and shows(fewer):
                items = fewer
            else:
                start += size
        if size <= smallest:
            return
        size = max(smallest, min(size, len(items)) // 2)


def at_positions(case: AttentionCase, rows: range, keys: range) -> AttentionCase:
    """The call with a range of query rows and of keys, each row seeing what it saw among them: of
    rows from r and keys from k, j <= i + offset becomes j' + k <= i' + r + offset."""
    moved = rows[0] - keys[0] if case.restricts_positions else 0
    smaller = part(case, row=rows, key=keys)
    return dataclasses.replace(smaller, causal_offset=case.causal_offset + moved)


def part(case: AttentionCase, **indices: Sequence[int]) -> AttentionCase:
    """The call with the given indices of some axes alone (`batch`, `head`, `kv_head`, `row`,
    `key`), its tensors copied, dense, in their own order of axes in memory: kernels choose by it.
    Query head h must still read kv head h // group; positions are the caller's business."""
    parts: dict[str, Any] = {}
    for name, axes in AXES.items():
        x: Tensor | None = getattr(case, name)
        if x is None:
            continue
        for dim, axis in enumerate(axes[-x.ndim :]):
            broadcasts = name == "mask" and x.shape[dim] == 1
            if axis in indices and not broadcasts and len(indices[axis]) < x.shape[dim]:
                order = storage_order(x)
                index = torch.tensor(list(indices[axis]), device=x.device)
                picked = x.detach().permute(order).index_select(order.index(dim), index)
                x = picked.permute([order.index(axis) for axis in range(x.ndim)])
        parts[name] = x
    return dataclasses.replace(case, **parts)
