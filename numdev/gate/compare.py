"""`numdev compare`: two reports of one request, on two versions, machines or commits.

Each report is first asked whether it is whole (`require_whole`). Each pair of rows
(`pairs`) is held to what noise explains (`noise_model`; of other studies, by their own
`moves`); what one alone has is gone or new. Planted faults (`role: control`) are left
out. Reads rows alone: no torch, no GPU."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from numdev.errors import MeasurementError, UsageError, closest
from numdev.gate.compare_report import (
    Compared,
    CompareReport,
    CompareSummary,
    Difference,
    Group,
    Move,
    Past,
    Presence,
    Which,
)
from numdev.gate.findings import first_clauses, joined_words
from numdev.gate.noise_model import (
    FAR,
    THRESHOLD,
    Change,
    NoiseModel,
    Pair,
    audit_keys,
    has_same_bits,
    may_differ_by_chance,
    option_sets,
    paired_rows,
    ratio_of_log,
)
from numdev.gate.row_groups import NUMBERS, Measured, Rows
from numdev.gate.row_pairs import R, RowKeys
from numdev.grouping import grouped
from numdev.report import (
    CallRecord,
    CaseRecord,
    DeviationRow,
    Place,
    Places,
    Provenance,
    Report,
    SweepReport,
    read,
)
from numdev.report.number_text import label, ratio, three
from numdev.report_kinds import judged_by, kind_of
from numdev.tensor_properties import tensor_spec

MUST = (
    *(
        "checkpoint",
        "model",
        "text",
        "inputs",
        "cases",
        "formats",
        "model_dtype",
        "seed",
        "seeds",
    ),
    *(
        "generate",
        "denoise",
        "steps",
        "length",
        "sequences",
        "layers",
        "heads",
        "backward",
        "rows",
    ),
    "against",
)
"""Keys of a request that must be the same, and that `compare --allow` takes."""
HASHES = {"checkpoint": "sha256", "text": "prompt_sha256"}
"""Keys that name files, and where the files' hashes stand in a report's source."""
PROMPT = ("text", "length", "sequences")
"""What the hash of the prompt covers: the same text may come from another file."""
UNITS = {
    "floor_ratio": "× the rounding floor",
    "expected_ratio": "× what its rounding model predicts",
    "worst_row": "× the error predicted for its worst row",
    "rms": " (rms)",
}
PLANNED = ("formats", "heads", "backward", "rows", "against")
"""Keys of a request that its plan has too."""
SHAPE = (
    *("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "v_dim", "is_causal"),
    *("causal_offset", "window", "softcap", "sinks", "scale", "mask"),
)
"""What of a call decides its result: calls that differ in it are not the same call."""
EACH = {"cost": "sequences", "difference": "variants"}  # what is a pair, by metric
NAMED = 3  # numbers that a sentence names
ABSENT = "the kernel is not in the other report"
NEITHER = "nothing new, nothing gone"
NOTHING = "nothing was measured in both reports"
NO_KERNEL = "no kernel under audit was measured in both reports"
OTHER = (
    "The inputs differ in {count} of {every} rows, judging by the floor: there "
    "errors are judged "
    "beside what each report predicts for its own inputs, and by how results scatter."
)


def compare(
    *reports: Path | Report,
    allow: Collection[str] = (),
    by_date: bool = False,
    command: str = "",
) -> CompareReport:
    """Returns the comparison of report B with the earlier report A of the same request.
    `reports`: two or more, each a report, its file or its directory; the last is compared
    with the one before, and of three or more all are in the history. `allow`: keys out of
    `MUST` in which the requests may differ. `by_date` sorts the reports by when they were
    created. `command`: the command line to record.

    Raises UsageError for reports that are not there, cannot be compared or were asked for
    different things, and for an unknown key in `allow`; MeasurementError for a report
    that cannot be understood, is not whole or contradicts itself."""
    named = _ordered_reports(reports, allow, by_date)
    several = len(named) > 2
    (old, first), (new, last) = named[-2:]
    for report, name in named:
        require_whole(report, name)
    allowed = [shared_request(x, new, allow) for x, _ in named[:-1]][-1]
    rows = _rows_without_controls(old), _rows_without_controls(new)
    keys, compared = _comparison_function(new.kind)(old, new)
    moves = sorted(compared.moves, key=lambda move: -move.excess)
    presences = (*_presence_records(*rows, keys), *compared.presences)
    summary = _summary(compared, {row.role for row in (*rows[0], *rows[1])})
    places = Places([move.place for move in moves])
    if isinstance(new, Measured):
        places = Places(rows[1], new.words)
    sides = f"{last} against {first}: " if several else ""
    sentences = answer_sentences(
        compared.groups, moves, presences, allowed, places, sides, summary
    )
    verdict, *others = sentences
    answer = (verdict, *_changed_sources(old, new), *others)
    answered = summary.model_copy(update={"answer": answer})
    source = {"config": last, "run": new.provenance.source}
    history = tuple(_history_entry(x) for x, _ in named) if several else ()
    return CompareReport(
        provenance=Provenance.now(command, new.provenance.system, source),
        request={"a": first, "b": last, "allow": sorted(allow)},
        summary=answered,
        groups=tuple(compared.groups),
        moves=tuple(moves),
        presences=presences,
        a=old.provenance,
        b=new.provenance,
        allowed=tuple(allowed),
        changes=_setting_differences(old, new),
        history=history,
    )


def _ordered_reports(
    reports: Sequence[Path | Report], allow: Collection[str], by_date: bool
) -> list[tuple[Any, str]]:
    """Returns the reports in the order in which they are compared, each with what errors
    call it. Raises UsageError for fewer than two, for more than two of which the first is
    no audit or sweep, for a kind that cannot be compared, and for an unknown key in
    `allow`; and what `report.read` raises for a path."""
    for key in allow:
        if key not in MUST:
            raise UsageError(f"--allow {key}: no such key", hint=closest(key, MUST))
    if len(reports) < 2:
        raise UsageError(f"compare: expected two reports or more, got {len(reports)}")
    named = [
        (
            _comparable_report(x),
            f"report of {x.provenance.created}" if isinstance(x, Report) else str(x),
        )
        for x in reports
    ]
    first = named[0][0]
    if len(named) > 2 and not isinstance(first, Measured):
        what = f"compare: of {first.kind}, expected two reports, got {len(named)}"
        raise UsageError(what)
    if by_date:
        named.sort(key=lambda pair: pair[0].provenance.created)
    return named


def _summary(compared: Compared, roles: Collection[str]) -> CompareSummary:
    """Returns two counts of pairs, with the notes and inputs of `compared`: `unjudged`,
    those that differ and have no number that could be judged, and `judged`, all others.
    The answer is left empty. Counts the groups of kernels under audit, or all groups
    where `roles` (those of the rows) has no `kernel`."""
    audited = [g for g in compared.groups if g.role == "kernel" or "kernel" not in roles]
    unjudged = sum(group.unjudged for group in audited)
    return CompareSummary(
        answer=(),
        notes=compared.notes,
        inputs=compared.inputs,
        judged=sum(group.pairs for group in audited) - unjudged,
        unjudged=unjudged,
    )


def require_whole(report: Report, name: str) -> None:
    """Raises MeasurementError, with the name of the report, where it lacks rows that were
    planned, has others, or contradicts itself; UsageError for a kind of report that is
    not judged."""
    try:
        judged_by(report.kind).check(report)
    except MeasurementError as error:
        raise MeasurementError(f"{name}: {error.message}", hint=error.hint) from error


def _history_entry(report: Measured) -> Past:
    """Returns a report's line in the history: when and on what it was made, its outcome,
    and by kernel and format the median of its outputs' errors over the floor. Kernels
    without such an error have none. What the report does not record is `unknown`."""
    system, kernels = (
        report.provenance.system,
        (r for r in report.rows if r.role == "kernel"),
    )
    outputs = [
        (f"{label(r)} {r.format}", r.floor_ratio)
        for r in kernels
        if tensor_spec(r.tensor).is_output and r.floor_ratio is not None
    ]
    by_kernel = grouped(outputs, lambda output: output[0]).items()
    return Past(
        created=report.provenance.created,
        numdev=report.provenance.numdev,
        torch=system.get("packages", {}).get("torch", "unknown"),
        on=system.get("gpu") or system.get("cpu") or "unknown",
        outcome=report.outcome or "unknown",
        errors={
            kernel: statistics.median(ratio for _, ratio in of_kernel)
            for kernel, of_kernel in by_kernel
        },
    )


def _comparable_report(source: Path | Report) -> Any:
    """Returns a report, read from its file or directory where a path is passed. Raises
    UsageError for a kind that cannot be compared, and for a sweep without rows per head;
    and what `report.read` raises."""
    report, name = (
        (source, "report") if isinstance(source, Report) else (read(source), source)
    )
    if kind_of(report.kind).moves is None:
        raise UsageError(
            f"{name}: expected a report that can be compared, got {report.kind}"
        )
    if isinstance(report, SweepReport) and not report.rows:
        what = (
            f"{name}: is a sweep that kept one result per cell; compare needs "
            "one per head"
        )
        raise UsageError(what, hint="run the sweep with `keep: head`")
    return report


def _setting_differences(a: Measured, b: Measured) -> tuple[Difference, ...]:
    """Returns the differences of two reports beside what was measured: versions, machine,
    settings, `repeats`, `isolate`, the sources of kernels that both know, the options of
    kernels that ran with one set of options, and the first difference of their rules.
    Empty where all of these agree."""
    sides: list[dict[str, object]] = []
    in_both = _kernel_sources(a).keys() & _kernel_sources(b)
    for report in (a, b):
        facts: dict[str, object] = dict(report.provenance.system)
        facts = {"numdev": report.provenance.numdev, **facts}
        facts |= {key: report.request.get(key) for key in ("repeats", "isolate")}
        for (_, kernel), sets in option_sets(report.rows).items():
            facts |= {f"{kernel}: {k}": x for k, x in next(iter(sets.values())).items()
                      if len(sets) == 1}  # fmt: skip
        facts |= {f"source of {k}": x for k, x in _kernel_sources(report).items()
                  if k in in_both}  # fmt: skip
        sides.append(
            {key: x for name, y in facts.items() for key, x in leaves_with_paths(y, name)}
        )
    keys = dict.fromkeys((*sides[1], *sides[0]))
    changes = [
        d
        for key in keys
        for d in first_difference(key, *(side.get(key) for side in sides))
    ]
    return (*changes, *first_difference("rules", a.rules, b.rules))


def _kernel_sources(report: Report) -> Mapping[str, str]:
    """Returns the fingerprints of the sources of kernels that do not ship with numdev, by
    name; empty for a report without them."""
    sources = report.provenance.source.get("kernel_sources")
    return sources if isinstance(sources, dict) else {}


def _changed_sources(a: Report, b: Report) -> Iterator[str]:
    """Yields a sentence on the kernels that are in both reports and whose source is
    another in B; nothing where all are the same."""
    old, new = _kernel_sources(a), _kernel_sources(b)
    names = [name for name in new if old.get(name, new[name]) != new[name]]
    if names:
        yield f"The source of {joined_words(names)} changed."


def shared_request(a: Report, b: Report, allow: Collection[str] = ()) -> list[Difference]:
    """Returns the differences of two requests, in keys of MUST and in `output`, that
    `allow` lets pass. Prompts and weights are compared by their hashes, where a report
    has them. Where the requests agree, the calls of both are compared instead. Raises
    UsageError for any other difference, and for reports of two kinds."""
    differences = [Difference(key="kind", a=a.kind, b=b.kind)] if a.kind != b.kind else []
    sources = [report.provenance.source for report in (a, b)]
    same_prompt = all(source.get(HASHES["text"]) for source in sources)
    for key in () if differences else (*MUST, "output"):
        hashes = [str(source.get(HASHES.get(key, "")) or "unknown") for source in sources]
        if hashes != ["unknown", "unknown"]:
            short = [each[:16] for each in hashes]
            if hashes[0] != hashes[1]:
                differences.append(Difference(key=key, a=short[0], b=short[1]))
        elif not (same_prompt and key in PROMPT):
            differences += next(
                filter(
                    None,
                    (first_difference(key, *x) for x in _requested_values(key, a, b)),
                ),
                [],
            )
    differences = differences or list(_call_differences(a, b))
    refused = [d for d in differences if d.root not in allow]
    if refused:
        words = ", ".join(f"{d.key} ({d.a} in A, {d.b} in B)" for d in refused)
        keys = dict.fromkeys(d.root for d in refused if d.root in MUST)
        options = f", or {' '.join(f'--allow {key}' for key in keys)}" if keys else ""
        what = f"the two reports measure different things: {words}"
        raise UsageError(what, hint=f"repeat A's request{options}")
    return differences


def _requested_values(key: str, *reports: Report) -> Iterator[list[object]]:
    """Yields pairs [value of A, value of B] of what was asked for under a key: in the
    requests, for a key of PLANNED in the plans, and for the key `output` in the reports'
    field of that name. None stands for what a report does not have."""
    yield [report.request.get(key) for report in reports]
    if key in PLANNED:
        plans = [getattr(report, "plan", None) for report in reports]
        yield [getattr(plan, key, None) for plan in plans]
    if key == "output":
        yield [getattr(report, key, None) for report in reports]


def _call_differences(a: Report, b: Report) -> Iterator[Difference]:
    """Yields the first difference in shape or options of each call of attention that both
    reports have, matched by the call's name; nothing for calls of other functions, and
    where a report is no audit or sweep."""
    if not isinstance(a, Measured) or not isinstance(b, Measured):
        return
    before = {case.case: case for case in a.cases if isinstance(case, CaseRecord)}
    for case in b.cases:
        if isinstance(case, CaseRecord) and case.case in before:
            sides = [{n: getattr(c, n) for n in SHAPE} for c in (before[case.case], case)]
            yield from first_difference(f"cases.{case.case}", *sides)


def first_difference(key: str, a: object, b: object) -> list[Difference]:
    """Returns a list with the first place at which two values differ, its path beginning
    with `key`; an empty list where they are equal. As whole values, empty lists, mappings
    and strings equal None; 0 does not."""
    if a == b or all(x is None or (x == EMPTY.get(type(x))) for x in (a, b)):
        return []
    sides = [dict(leaves_with_paths(x, key)) for x in (a, b)]
    keys = (*sides[1], *sides[0])
    at = next(k for k in keys if sides[0].get(k, MISSING) != sides[1].get(k, MISSING))
    return [
        Difference(
            key=at,
            a=_shortened_text(sides[0].get(at)),
            b=_shortened_text(sides[1].get(at)),
        )
    ]


def leaves_with_paths(value: object, key: str) -> Iterator[tuple[str, object]]:
    """Yields (path, leaf) for each leaf of nested mappings and lists of mappings; paths
    begin with `key`, as in `cases.0.seq_len`. Any other value is a leaf, as are empty
    mappings and lists."""
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    if (
        value
        and isinstance(value, list | tuple)
        and all(isinstance(x, Mapping) for x in value)
    ):
        items = enumerate(value)
    if not items:
        yield key, value
    for name, inner in items:
        yield from leaves_with_paths(inner, f"{key}.{name}")


# What moved from a report to a later one of its kind
Moves = Callable[[Any, Any], tuple[RowKeys[Any], Compared]]
MISSING = object()
EMPTY: dict[type, object] = {list: [], tuple: (), dict: {}, str: ""}


def _shortened_text(value: object) -> str:
    """Returns a value as text of at most 60 characters, cut off with `...`; what is no
    string is written as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _rows_without_controls(report: Measured) -> list[DeviationRow]:
    """Returns the rows of a report without those of planted faults (`role: control`)."""
    return [row for row in report.rows if row.role != "control"]


def _comparison_function(kind: str) -> Moves:
    """Returns the function that compares two reports of a kind; the kind must be one that
    can be compared."""
    moves = kind_of(kind).moves
    assert moves is not None  # `_comparable_report` refused it
    return moves


def moves_of_rows(a: Measured, b: Measured) -> tuple[RowKeys[DeviationRow], Compared]:
    """Compares the rows of an audit or a sweep B with those of A, without planted faults.
    Returns the keys by which rows are paired, and what moved."""
    return _compare_rows(_rows_without_controls(a), _rows_without_controls(b), b.cases)


def _compare_rows(
    old: Rows, new: Rows, cases: Sequence[CallRecord]
) -> tuple[RowKeys[DeviationRow], Compared]:
    """Compares the rows of B with those of A. Returns the keys by which rows are paired,
    and the groups, moves and notes. A row that is in a report twice counts once. `cases`:
    the calls of B."""
    keys, pairs = audit_keys(old, new), paired_rows(old, new, cases)
    noise = NoiseModel(pairs)
    groups: list[Group] = []
    moves: list[Move] = list(_operator_moves(pairs, keys))
    for members in grouped(pairs, lambda p: (*keys.kernel(p.b), p.b.tensor)).values():
        judged = [noise.judged_changes(pair) for pair in members]
        of_group: list[Move] = []
        for pair, changes in zip(members, judged, strict=True):
            of_group += _pair_moves(pair, changes)
        of_group += _reproducibility_moves(members)
        groups.append(_group_record(members, judged, of_group))
        moves += of_group
    inputs = Counter(str(pair.inputs) for pair in pairs)
    notes = [THRESHOLD.format(tests=noise.tests)]
    if other := inputs["other"]:
        notes.insert(0, OTHER.format(count=other, every=len(pairs)))
    ran = {label(r) for r in new if r.status != "skipped"}
    for who, why in {label(r): r.reason for r in new if label(r) not in ran}.items():
        notes.insert(0, f"Skipped in B: {who} ({why}).")
    if unjudged := sum(group.unjudged for group in groups):
        notes.insert(
            0, f"{unjudged} rows differ, and have no number that could be judged."
        )
    return keys, Compared(groups, moves, tuple(notes), inputs)


def _pair_moves(pair: Pair, judged: Sequence[Change]) -> Iterator[Move]:
    """Yields what moved in one head: a number of elements that are not finite, a mistake
    that one report alone names, and of the numbers in `judged` the one farthest beyond
    noise, if any is."""
    a, b = pair.a, pair.b
    before, now = a.nonfinite, b.nonfinite
    if before is not None and now is not None and not may_differ_by_chance(before, now):
        words = f"elements that are not finite: {before}, now {now}"
        yield _move_record(pair, "nonfinite", words, a=a.nonfinite, b=b.nonfinite)
    if (a.suspicion is None) != (b.suspicion is None):
        words = (
            f"{a.suspicion or 'no mistake named'}, now "
            f"{b.suspicion or 'no mistake named'}"
        )
        yield _move_record(pair, "suspicion", words)
    worst = max(judged, key=lambda change: change.excess, default=None)
    if worst is not None and worst.excess > 1:
        words = f"from {three(worst.a)} to {three(worst.b)}{UNITS[worst.metric]}"
        yield _move_record(
            pair, worst.metric, words, worst.excess,
            a=worst.a, b=worst.b, change=worst.change, noise=ratio_of_log(worst.noise),
        )  # fmt: skip


def _reproducibility_moves(members: Sequence[Pair]) -> Iterator[Move]:
    """Yields at most one move: where a kernel returned the same bits in all heads and no
    longer does in more than half, or the reverse. In fewer heads runs may agree, or not,
    by luck. Heads that ran once in either report do not count."""
    noises = [(p.a.noise, p.b.noise, p) for p in members]
    repeated = [(a, b, p) for a, b, p in noises if a is not None and b is not None]
    noisy = [
        sum(map(bool, side))
        for side in zip(*((a, b) for a, b, _ in repeated), strict=True)
    ]
    if not noisy or min(noisy) or 2 * max(noisy) <= len(repeated):
        return
    pair = max(repeated, key=lambda each: max(each[:2]))[2]
    state = [
        f"not reproducible ({n} of {len(repeated)} results)" if n else "the same"
        for n in noisy
    ]
    words = f"runs on the same inputs: {state[0]}, now {state[1]}"
    yield _move_record(pair, "noise", words, a=pair.a.noise, b=pair.b.noise)


def _operator_moves(pairs: Sequence[Pair], keys: RowKeys[DeviationRow]) -> Iterator[Move]:
    """Yields a move for each operator that ran in place of another in a pass (forward or
    backward) of a kernel, with in how many of its calls. All tensors of a pass carry this
    evidence; it is reported once."""
    kernels = (p for p in pairs if p.b.role == "kernel" and p.a.ran and p.b.ran)
    by_pass = grouped(
        kernels, lambda p: (keys.kernel(p.b), tensor_spec(p.b.tensor).is_gradient)
    )
    for passes in by_pass.values():
        calls = len({keys.step(p.b) for p in passes})
        for (a, b), of_pass in grouped(passes, lambda p: (p.a.ran, p.b.ran)).items():
            if a != b:
                count = len({keys.step(p.b) for p in of_pass})
                yield _move_record(
                    of_pass[0], "ran", f"{a} ran, now {b} ({count} of {calls} calls)"
                )


def _move_record(
    pair: Pair,
    metric: str,
    words: str,
    excess: float = FAR,
    *,
    a: float | None = None,
    b: float | None = None,
    change: float | None = None,
    noise: float | None = None,
) -> Move:
    """Returns the record of what moved in a pair. `words` is part of a sentence; `a` and
    `b` are the numbers; `change` is B / A. `noise` is the factor that noise explains, and
    `excess` how far beyond it the change is (FAR where there is no ratio)."""
    return Move(
        **pair.b.who,
        tensor=pair.b.tensor,
        place=Place.of(pair.b),
        metric=metric,
        excess=excess,
        words=words,
        a=a,
        b=b,
        change=change,
        noise=noise,
    )


def _group_record(
    pairs: Sequence[Pair], judged: Sequence[Sequence[Change]], moves: list[Move]
) -> Group:
    """Returns the summary of one tensor of one kernel, of at least one pair. Its medians
    and its farthest ratio are of the metric that most heads were judged by, the floor
    ratio first; None where no head has a number. `judged`: the changes of each pair."""
    named = [change.metric for changes in judged for change in changes]
    metric = (
        max(("floor_ratio", *dict.fromkeys(named)), key=named.count) if named else None
    )
    shown: list[tuple[Pair, Change]] = []
    for pair, changes in zip(pairs, judged, strict=True):
        shown += [(pair, change) for change in changes if change.metric == metric]
    ratios = [(x.change, pair) for pair, x in shown if x.change]
    farthest = max(ratios, key=lambda r: abs(math.log(r[0])), default=None)
    change, where = farthest or (None, None)
    moved = len({(move.place, move.tensor) for move in moves})
    a = statistics.median(x.a for _, x in shown) if shown else None
    b = statistics.median(x.b for _, x in shown) if shown else None
    row = pairs[0].b
    return Group(
        **row.who,
        tensor=row.tensor,
        pairs=len(pairs),
        same_bits=sum(has_same_bits(p.a, p.b) for p in pairs),
        moved=moved,
        metric=metric,
        a=a,
        b=b,
        change=change,
        where=None if where is None else Place.of(where.b),
        unjudged=sum(map(_is_unjudged, pairs, judged)),
    )


def _is_unjudged(pair: Pair, changes: Sequence[Change]) -> bool:
    """Whether a pair differs, and has no number that could be judged: none at all, or
    noise could explain any change of those it has."""
    judged = any(math.isfinite(change.noise) for change in changes)
    return not judged and not has_equal_numbers(pair.a, pair.b)


def has_equal_numbers(a: DeviationRow, b: DeviationRow) -> bool:
    """Whether two rows have the same bits (or both none) and the same numbers, so that
    there is nothing to judge."""
    return a.bits == b.bits and all(
        getattr(a, name) == getattr(b, name) for name in NUMBERS
    )


def _presence_records(
    old: Sequence[R], new: Sequence[R], keys: RowKeys[R]
) -> Iterator[Presence]:
    """Yields, by kernel and reason, a record of rows and numbers that only A has (`gone`)
    or only B (`new`), then of rows that failed in either."""
    lacking: list[tuple[R, Which, str, tuple[str, ...]]] = []
    sides: tuple[tuple[Which, Sequence[R], Sequence[R]], ...]
    sides = (("gone", old, new), ("new", new, old))
    for what, mine, others in sides:
        bare = {keys.step(r): r for r in others if r.status != "ok"}
        measured = {keys.row(r): r for r in others if r.status == "ok"}
        kernels = {keys.kernel(r) for r in others}
        for key, row in {keys.row(r): r for r in mine if r.status == "ok"}.items():
            if key in measured:
                if lost := tuple(keys.lost(row, measured[key])):
                    lacking.append((row, what, "no number", lost))
            else:
                kernel, call, _ = step = keys.step(row)
                other = bare.get(step) or bare.get((kernel, call, False))
                why = (
                    f"{other.status}: {other.reason}" if other else "there is no such row"
                )
                if kernel not in kernels:
                    why = ABSENT
                lacking.append((row, what, why, ()))
    for side, rows, others in (("A", old, new), ("B", new, old)):
        kernels = {keys.kernel(r) for r in others}
        for row in (row for row in rows if row.status == "failed"):
            alone = " alone" * (keys.kernel(row) not in kernels)
            lacking.append((row, "failed", f"in {side}{alone}: {row.reason}", ()))
    for (_, which, why, lost), members in grouped(
        lacking, lambda x: (keys.kernel(x[0]), *x[1:])
    ).items():
        abouts = [keys.about(row) for row, *_ in members]
        yield Presence(
            role=abouts[0]["role"],
            kernel=abouts[0]["kernel"],
            options=abouts[0]["options"],
            format=abouts[0]["format"],
            what=which,
            tensors=tuple(dict.fromkeys(about["tensor"] for about in abouts)),
            rows=len(members),
            why=why,
            place=keys.place(members[0][0]),
            lacks=lost,
        )


def answer_sentences(
    groups: Sequence[Group],
    moves: Sequence[Move],
    presences: Sequence[Presence],
    allowed: Sequence[Difference],
    place: Places,
    sides: str,
    summary: CompareSummary,
) -> Iterator[str]:
    """Yields the verdict with the largest moves, then which differences were allowed,
    which other operators ran, and a sentence for each kernel. `moves`: the farthest
    beyond noise first; `place` puts a place in words; `sides`: `B against A: `, which
    goes behind the verdict's first words, or empty."""
    by_kernel = grouped(groups, _kernel_and_format)
    numbers = [move for move in moves if move.metric != "ran"]
    moved = [
        name for name, of_kernel in by_kernel.items() if any(g.moved for g in of_kernel)
    ]
    # Checks, and the model's own output, are in no group.
    moved += [
        name
        for name in dict.fromkeys(map(_kernel_and_format, numbers))
        if name not in moved
    ]
    verdict = _verdict(moves, presences, summary)
    what = list(_moved_clauses(moves, numbers, moved, place))
    if not moves and not summary.judged and not summary.unjudged:
        what = [NO_KERNEL if groups else NOTHING]
    uncompared = _uncompared_clause(presences, summary.unjudged)
    parts = [uncompared, *what] if "BUT" in verdict else [*what, uncompared or NEITHER]
    # A side's path may have blanks: it is one word of the verdict
    line, more = first_clauses(verdict, parts, more="Also: ", least=1)
    yield line.replace(f"{verdict}: ", f"{verdict}: {sides}", 1)
    if more:
        yield more
    if allowed:
        keys = joined_words(f"{d.key} ({d.a} and {d.b})" for d in allowed)
        yield f"Compared although they differ: {keys}."
    for move in moves:
        if move.metric == "ran":
            yield f"{_kernel_and_format(move)}, {move.tensor}: {move.words}."
    for kernel, of_kernel in by_kernel.items():
        yield _kernel_sentence(kernel, of_kernel, numbers, f"{place.words.unit}s")


def _verdict(
    moves: Sequence[Move], presences: Sequence[Presence], summary: CompareSummary
) -> str:
    """Returns the first words of the answer: `CHANGED` where anything moved. Else `NO
    NUMBER CHANGED, BUT A KERNEL CRASHED` where a row failed in either report; `NO NUMBER
    CHANGED, BUT NOT ALL WAS COMPARED` where a row or number is gone, or only some pairs
    could be judged. Else `NO CHANGE`, or `NOT JUDGED` where no pair was judged."""
    if moves:
        return "CHANGED"
    gone = any(p.what != "new" for p in presences)
    if gone or (summary.unjudged and summary.judged):
        crashed = any(p.what == "failed" for p in presences)
        why = "A KERNEL CRASHED" if crashed else "NOT ALL WAS COMPARED"
        return f"NO NUMBER CHANGED, BUT {why}"
    return "NO CHANGE" if summary.judged else "NOT JUDGED"


def _uncompared_clause(presences: Sequence[Presence], unjudged: int) -> str:
    """Returns a clause on what one report alone has, what failed (first), and what could
    not be judged; empty where there is none of these."""
    counts: Counter[str] = Counter()
    for p in sorted(presences, key=lambda p: p.what != "failed"):
        counts[_presence_clause(p)] += p.rows
    parts = [f"{what} ({n} row{'s' * (n != 1)})" for what, n in counts.items() if what]
    if unjudged:
        rows = f"row{'s' * (unjudged != 1)}"
        parts.append(f"{unjudged} {rows} differ and could not be judged")
    return ", ".join(parts)


def _moved_clauses(
    moves: Sequence[Move], numbers: Sequence[Move], moved: Sequence[str], place: Places
) -> Iterator[str]:
    """Yields clauses on the kernels that moved, the move farthest beyond noise, and the
    one of the largest factor, where that is another. `numbers`: the moves but those of
    operators, the farthest first; `moved`: the kernels that moved."""
    what = f"{joined_words(moved) or 'nothing'} moved beyond noise"
    yield f"other code ran, {what}" if moves and not moved else what
    farthest = next(iter(numbers), None)
    if farthest is not None:
        where = _place_clause(farthest, moved, place)
        factor = f" ({ratio(farthest.change)} times as much)" if farthest.change else ""
        yield f"farthest beyond noise {where}, {farthest.words}{factor}"
    largest = max(moves, key=_size_of_factor, default=None)
    if largest and largest.change and largest not in numbers[:1]:
        where = _place_clause(largest, moved, place)
        yield f"the largest factor, {ratio(largest.change)}×, {where}"


def _size_of_factor(move: Move) -> float:
    """Returns |ln(B / A)| of a move; 0 where it has no ratio."""
    return abs(math.log(move.change)) if move.change else 0.0


def _kernel_sentence(
    kernel: str, groups: Sequence[Group], numbers: Sequence[Move], units: str
) -> str:
    """Returns a sentence on what moved of one kernel in one format, and how many of its
    rows have the same bits, as `mine (bfloat16): moved in out (3 of 8 heads); the same
    bits in 5 of 8 rows.`; it says `within noise` where nothing moved. `kernel`: its name
    with options and format, as `_kernel_and_format` writes it; `groups`: its groups, at
    least one; `numbers`: the moves of all kernels but those of the metric `ran`, of which
    those of `kernel` name tensors that are in no group; `units`: what pairs of rows are
    of, as `heads`, where their metric does not say it."""
    each = EACH.get(groups[0].metric or "", units)
    tensors = [f"{g.tensor} ({g.moved} of {g.pairs} {each})" for g in groups if g.moved]
    in_groups = {group.tensor for group in groups}
    beside = (m.tensor for m in numbers if _kernel_and_format(m) == kernel)
    tensors += dict.fromkeys(tensor for tensor in beside if tensor not in in_groups)
    what = f"moved in {joined_words(tensors)}" if tensors else "within noise"
    pairs = sum(group.pairs for group in groups)
    same = sum(group.same_bits for group in groups)
    return f"{kernel}: {what}; the same bits in {same} of {pairs} rows."


def _presence_clause(of: Presence) -> str:
    """Returns a clause on what one report alone has, or what failed, as `mine was
    measured in A alone`; empty for rows that failed in the other report, which have a
    clause of their own."""
    if of.what == "failed":
        where, alone = of.why[:4], of.why[4:].startswith(" alone")
        return f"{label(of)} {f'was run {where} alone, and ' * alone}crashed {where}"
    side, other = "AB" if of.what == "gone" else "BA"
    if lacks := of.lacks:
        more = f" and {len(lacks) - NAMED} numbers more" if len(lacks) > NAMED else ""
        named = ", ".join(lacks[:NAMED]) + more if more else joined_words(lacks)
        return f"{label(of)} lacks {named} in {other}"
    if of.why == ABSENT:
        return f"{label(of)} was run in {side} alone"
    return (
        "" if of.why.startswith("failed") else f"{label(of)} was measured in {side} alone"
    )


def _place_clause(move: Move, moved: Sequence[str], place: Places) -> str:
    """Returns the place of a move in words, with its kernel where several moved
    (`moved`): `in out of mine, layer 3 head 2`."""
    of = f" of {label(move)}" if len(moved) > 1 else ""
    return f"in {move.tensor}{of}, {place(move.place)}"


def _kernel_and_format(of: Group | Move) -> str:
    """Returns the kernel with its options and format, as in `mine[block=64]
    (bfloat16)`."""
    return f"{label(of)} ({of.format})"
