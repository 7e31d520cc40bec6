"""What a report of invariance answers for each kernel, format and axis: bit-identical,
differs as rounding does, differs by more, or not tried. Pure functions of rows.

A page, a table and the verdict all have their answer from here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from numdev.grouping import grouped
from numdev.report.number_text import label, ratio
from numdev.studies.invariance.report import InvarianceRow, ModelRow

Answer = Literal["same", "differs", "exceeds", "not tried"]


class AxisGroup(NamedTuple):
    """Axes that ask one question, with that question as a sentence."""

    title: str
    sentence: str
    axes: tuple[str, ...]


GROUPS = (
    AxisGroup(
        "Batch",
        "Does a sequence depend on what else is in the call?",
        ("batch", "order", "neighbours", "lengths", "heads"),
    ),
    AxisGroup(
        "Serving",
        "Does a row depend on how its sequence is cut and padded?",
        ("chunks", "decode", "padding", "paged", "rows", "longer"),
    ),
    AxisGroup(
        "Same call",
        "Does the same call, laid out or run another way, give the same?",
        ("repeat", "mask", "strides", "threads", "graph", "compiled", "tiles"),
    ),
    AxisGroup(
        "Must not matter",
        "Does anything count that is no part of the call?",
        ("beyond", "hidden", "hidden-nan", "unwritten"),
    ),
)
"""All axes, each in one group."""
# What serving asks first; a verdict names these before the others.
FIRST = ("batch", "chunks", "decode", "padding", "paged", "lengths")
WORDS = 14  # of a clause of answers: with kernel, format and verdict below 20
NAMED = 6  # axes that a clause names on each side at most


class AxisAnswer(NamedTuple):
    """The answer of one kernel in one format along one axis, over all its calls and
    tensors."""

    kernel: str  # with its options
    format: str
    axis: str
    answer: Answer
    calls: int = 0  # variants of calls in which the kernel ran
    moved: int = 0  # those of them in which some tensor has other bits
    part: str = ""  # what of the axis was left out, as a clause; empty where nothing
    change: float | None = None
    """The largest rms difference of a tensor but the log-sum-exp, over the floor's error.
    None where no such tensor differs, or the floor has no error in any that does."""
    tensors: tuple[str, ...] = ()  # those that differ
    sized: bool = True  # whether its change is over the floor's error; not a model's
    nonfinite: bool = False  # whether an element is NaN or infinite in one form alone
    reason: str = ""  # why it was not tried

    @property
    def change_in_words(self) -> str:
        """Returns how far the kernel changes: `0.012×` as a multiple of the floor's
        error, `0.012× in dq, dk` where the output stays, `NaN` where an element is not
        finite in one form alone. Where `change` is None it is `in out, whose floor has no
        error`, or `in the log-sum-exp alone`. Empty where the kernel does not change, or
        was not tried, and without a size (`sized`)."""
        if self.answer in ("same", "not tried") or not self.sized:
            return ""
        if self.nonfinite:
            return "NaN"
        sized = joined_tensors(self.tensors)
        if self.change is None:
            where = f"{sized}, whose floor has no error" if sized else ""
            return f"in {where or 'the log-sum-exp alone'}"
        of = "" if "out" in self.tensors else f" in {sized}"
        return f"{ratio(self.change)}×{of}"


def joined_tensors(tensors: Iterable[str]) -> str:
    """Returns the names of tensors joined by commas, in their order, without the
    log-sum-exp (`lse`) and with repetitions: `out, dq`. Empty for none."""
    return ", ".join(tensor for tensor in tensors if tensor != "lse")


def answers_of_rows(
    rows: Sequence[InvarianceRow],
    exceeding: Collection[tuple[str, str, str]],
    axes: Sequence[str] = (),
) -> Iterator[AxisAnswer]:
    """Yields the answer of each kernel in each format along each axis, in the order of
    the rows. `exceeding`: (kernel with options, format, axis) where a limit is exceeded.
    `axes`: planned axes; one along which a kernel has no row is answered `not tried`,
    after the kernel's others. A kernel without any row has no answer."""
    by_kernel = grouped(rows, lambda row: (label(row), row.format))
    for (kernel, fmt), of_kernel in by_kernel.items():
        along = grouped(of_kernel, lambda row: row.axis)
        for axis in dict.fromkeys((*along, *axes)):
            exceeds = (kernel, fmt, axis) in exceeding
            yield _answer(kernel, fmt, axis, along.get(axis, ()), exceeds=exceeds)


def _answer(
    kernel: str, fmt: str, axis: str, rows: Sequence[InvarianceRow], *, exceeds: bool
) -> AxisAnswer:
    """Returns the answer of a kernel's rows along one axis. It is `not tried`, with a
    reason, where no row is ok; else `exceeds` where that is so, `differs` where any
    tensor has other bits, or `same`."""
    ok = [row for row in rows if row.status == "ok"]
    if not ok:
        reason = next((row.reason for row in rows if row.reason), "no call was made so")
        return AxisAnswer(kernel, fmt, axis, "not tried", reason=reason)
    moved = [row for row in ok if not row.same]
    ratios = (row.floor_ratio for row in moved if row.tensor != "lse")
    answer: Answer = "exceeds" if exceeds else "differs" if moved else "same"
    calls, changed = (len({(r.case, r.variant) for r in part}) for part in (ok, moved))
    return AxisAnswer(
        kernel,
        fmt,
        axis,
        answer,
        calls=calls,
        moved=changed,
        part=untried_part_clause(rows, axis),
        change=max((x for x in ratios if x is not None), default=None),
        tensors=tuple(dict.fromkeys(row.tensor for row in moved)),
        nonfinite=any(row.nonfinite for row in moved),
    )


def model_answers(models: Sequence[ModelRow]) -> Iterator[AxisAnswer]:
    """Yields the answer of the model's own output in each format along each axis, over
    all kernels, in the order of the rows. It is `differs` or `same`, without a size. Rows
    without numbers are left out."""
    ran = [row for row in models if row.reason is None]
    for (fmt, axis), rows in grouped(ran, lambda row: (row.format, row.axis)).items():
        moved = [row for row in rows if row.differ]
        answer: Answer = "differs" if moved else "same"
        yield AxisAnswer("model", fmt, axis, answer, len(rows), len(moved), sized=False)


class Clause(NamedTuple):
    """The answers of one kernel in words, and the axes that the words name."""

    text: str
    named: tuple[str, ...]


def answers_clause(
    answers: Iterable[AxisAnswer],
    *,
    differing: str = "NOT",
    required: Collection[str] = (),
) -> Clause:
    """Returns the answers of one kernel as a clause of at most WORDS words, or more where
    naming one axis on each side takes more: `bit-identical: batch (required), chunks and
    3 others; NOT: decode`. Axes of FIRST are named first. Axes that were not tried are
    left out; `no axis was tried` where none was. A bit-identical axis that was tried in
    part is followed by ` (in part)`. `differing`: what stands before the axes that are
    not bit-identical; `required`: axes along which the request requires all bits."""
    tried = sorted(
        (answer for answer in answers if answer.answer != "not tried"),
        key=lambda a: FIRST.index(a.axis) if a.axis in FIRST else len(FIRST),
    )
    same = [answer for answer in tried if answer.answer == "same"]
    other = [answer for answer in tried if answer.answer != "same"]
    clause = Clause("no axis was tried", ())
    for count in range(NAMED if tried else 0, 0, -1):
        clause = _clause(same, other, count, differing, required)
        if len(clause.text.split()) <= WORDS:
            break
    return clause


def _clause(
    same: Sequence[AxisAnswer],
    other: Sequence[AxisAnswer],
    count: int,
    differing: str,
    required: Collection[str],
) -> Clause:
    """Returns the clause on the axes `same` and `other`, together at least one, with at
    most `count` of them named on each side (`count` + 1 where that is all)."""
    marks = (
        " (required)" * (a.axis in required) + " (in part)" * bool(a.part) for a in same
    )
    first = [a.axis + mark for a, mark in zip(same, marks, strict=True)]
    yes, named = _first_names(first, count)
    no, others = _first_names([a.axis for a in other], count)
    text = f"bit-identical: {yes or 'none'}"
    if other:
        text += f"; {differing}: {no}"
    axes = (*(a.axis for a in same[:named]), *(a.axis for a in other[:others]))
    return Clause(text, axes)


def _first_names(names: Sequence[str], count: int) -> tuple[str, int]:
    """Returns names in words, `batch, chunks and 3 others`, and how many of them are
    named: the first `count`, or all where there is at most one more."""
    if len(names) <= count + 1:
        return ", ".join(names), len(names)
    return f"{', '.join(names[:count])} and {len(names) - count} others", count


def details_clause(
    answers: Sequence[AxisAnswer], named: Collection[str], limit: str = ""
) -> str:
    """Returns sentences on what the clause of `answers` leaves out: by how much the
    kernel differs along which axes, `limit`, the axes along which it is bit-identical and
    that the clause does not name, and what of an axis was not tried. Sentences with
    nothing to say are left out; empty without any. `named`: the axes that the clause
    names (`Clause.named`); `limit`: a sentence on the limit of the differences."""
    sizes = [f"{a.axis} {a.change_in_words}" for a in answers if a.change_in_words]
    same = [a.axis for a in answers if a.answer == "same" and a.axis not in named]
    partly = [f"{a.axis} ({a.part})" for a in answers if a.part]
    texts = []
    if sizes:
        texts.append(f"Differences over the floor's error: {', '.join(sizes)}.")
    texts.append(limit)
    if same:
        texts.append(f"Bit-identical too: {', '.join(same)}.")
    if partly:
        texts.append(f"Tried in part: {', '.join(partly)}.")
    return " ".join(filter(None, texts))


def untried_part_clause(rows: Iterable[InvarianceRow], axis: str) -> str:
    """Returns a clause on how much of an axis a kernel's rows tried, where that is not
    all of it: `3 of 4 calls`, of which three ran, and the part of a call that was
    compared, `2 with kv head 0 alone`, in two of those that ran (without the number where
    it is all of them); both are joined by a comma. Empty where each call ran and was
    compared whole. `rows`: of one kernel in one format; those of other axes are passed
    over. A variant with an option that the kernel lacks does not count as left out."""
    along = [row for row in rows if row.axis == axis and row.excuse != "option"]
    calls = {(row.case, row.variant) for row in along}
    ok = [row for row in along if row.status == "ok"]
    ran = {(row.case, row.variant) for row in ok}
    cut = {(row.case, row.variant): row.part for row in ok if row.part}
    texts = [f"{len(ran)} of {len(calls)} calls"] if len(ran) < len(calls) else []
    if cut:
        count = "" if len(cut) == len(ran) else f"{len(cut)} "
        texts.append(f"{count}with {' and '.join(dict.fromkeys(cut.values()))}")
    return ", ".join(texts)


def largest_change(rows: Iterable[InvarianceRow]) -> InvarianceRow:
    """Returns the row that a table and the headline show for several: the one with the
    most elements that are not finite in one form alone; of equal ones, the one with the
    largest difference over the floor's error, 0 where that is null. `rows`: at least
    one."""
    return max(rows, key=lambda row: (row.nonfinite, row.floor_ratio or 0.0))
