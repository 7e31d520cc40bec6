"""The search for what a kernel that errs computes instead: in one call alone, or in the
calls of a check together.

An audit measures call after call, and searches each alone (`name`). A check has few calls
and keeps them (`Failing`). Where no known way of rounding explains those that fail, it
searches the one that errs most, then one of each feature of a call, and tries what it
finds on all others (`conclude`). So a fault that shows everywhere is found where it shows
best, hides no other, and is counted in every head that has it. Calls that pass one by one
are looked at again where the median over all of them does not pass."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.formats import FORMATS, Format
from numdev.gate.row_groups import INFERRED
from numdev.grouping import grouped
from numdev.kernels import Kernel, Output
from numdev.kernels.output import GRADIENTS
from numdev.operations.attention.explain.attribution import ENOUGH
from numdev.operations.attention.explain.call_sample import Alternative
from numdev.operations.attention.explain.imprecise_steps import Loss, imprecision
from numdev.operations.attention.explain.wrong_function import Suspicion, far_off, suspect
from numdev.operations.attention.explain.wrong_gradients import suspect_gradients
from numdev.report import DeviationRow
from numdev.report.number_text import label
from numdev.studies.audit.deviation_rows import Measured, Runs
from numdev.studies.audit.explanations import (
    Likeness,
    beyond,
    excess,
    excess_in_median,
    held_to,
    likenesses,
    locate,
    wrong_tensors,
)
from numdev.studies.audit.isolation import Failure, Runner
from numdev.studies.audit.prepared_attention import KV_TENSORS, TERMS, Bench
from numdev.studies.audit.prepared_attention import part as part_of
from numdev.system import System

# Rows of the part of a call whose gradients are searched: no multiple of a tile
SEARCHED = 109
UNKNOWN = "none of the mistakes that numdev knows explains the error"
ELSEWHERE = "its cause was not searched in this call, but in others"
Named = Mapping[tuple[str, int], Suspicion]  # by tensor and head


@dataclass(eq=False)
class Failing:
    """A measured call of which a tensor is beyond its limits, and what is needed to find
    out why. A call that passes is kept as one too, where the kernel declares no way of
    rounding."""

    kernel: Kernel
    system: System
    run: Runner
    options: Mapping[str, object]
    runs: Runs[Bench]
    measured: Measured[Bench]
    searched: bool = False
    is_searched_first: bool = field(default=False, repr=False)
    likes_of: dict[tuple[str, ...], Mapping[str, Likeness]] = field(
        default_factory=dict, repr=False
    )

    @property
    def bench(self) -> Bench:
        """Returns the bench that the call was measured on."""
        return self.measured.bench or self.runs.bench

    @property
    def output(self) -> Output:
        """Returns the output of the first run; errors are measured in this one."""
        output: Output = self.runs.runs[0]
        return output

    @property
    def rows(self) -> list[DeviationRow]:
        """Returns the rows of this call. It is always the same list, which the methods
        below change in place."""
        return self.measured.rows

    @cached_property
    def wrong(self) -> tuple[str, ...]:
        """Returns the names of the tensors beyond their limits, as `wrong_tensors` does;
        cached until the rows are replaced."""
        return wrong_tensors(self.rows)

    @cached_property
    def severity(self) -> float:
        """Returns the largest error of a head, as a multiple of its limit; 0 where no
        tensor is wrong, or the log-sum-exp alone is. Where nothing is predicted, half of
        the ratio to plain attention's error counts. Cached until the rows are
        replaced."""
        sizes = [0.0]
        for row in self.rows:
            if row.tensor in self.wrong and row.status == "ok":
                sizes.append(excess("expected_ratio", row.expected_ratio, row))
                sizes.append(excess("worst_row", row.worst_row, row))
                sizes.append(excess("narrow_sum", row.narrow_sum, row, n=1))
                if row.expected_ratio is None:
                    sizes.append((row.baseline_ratio or 0.0) / 2)
        return max(sizes)

    def worst_in_median(self, tensors: Collection[str]) -> float:
        """Returns the median over the call's heads of the error, as a multiple of its
        limit, of the tensor among `tensors` where that is largest; 0 where the call has
        none of them, or too few heads for a median."""
        sizes = excess_in_median(self.rows)
        return max((sizes.get(tensor, 0.0) for tensor in tensors), default=0.0)

    @property
    def features(self) -> tuple[str, ...]:
        """Returns, in words, the parts of a call that may go wrong by themselves
        (`window`, `grouped`; `plain` alone without any), and last `the output wrong`, or
        else `gradients wrong`: wrong gradients alone come of another fault."""
        case = self.bench.case
        masked = "" if case.mask is None else f"{case.mask.dtype} mask"
        present = {
            "window": case.window is not None,
            "soft cap": case.softcap is not None,
            "sinks": case.sinks is not None,
            masked: bool(masked),
            "grouped": case.group > 1,
            "one query": case.q_len == 1,
            "lengths that differ": case.q_len != case.kv_len,
            "causal": case.is_causal,
        }
        features = [name for name, has in present.items() if has] or ["plain"]
        wrong = "the output" if self.wrong[:1] == ("out",) else "gradients"
        return (*features, f"{wrong} wrong")

    def again(self, case: AttentionCase, **how: object) -> Output | Failure:
        """Runs the kernel on another case with the same options, and returns its output
        or a Failure. `how`: keywords of `attempt` (`gradients`)."""
        return self.run(self.kernel, case, self.options, **how)

    @cached_property
    def in_float32(self) -> Output | Failure:
        """Returns the kernel's output of the same inputs in float32, or in the case's
        format where that is wider, without gradients; or a Failure. In 16 bits a small
        mistake is hidden. Runs the kernel when it is first read."""
        case = dataclasses.replace(self.bench.case, grad_out=None)
        return self.again(case.rounded_to(_float32_or_wider(case)))

    # --- what it computes --------------------------------------------------------------

    def causes(self, hints: Hints | None = None) -> Named:
        """Returns the mistakes that explain wrong tensors, by tensor and head; of the
        output alone where that is wrong. Empty where no mistake does. `hints`: mistakes
        of other calls, the only ones that are tried; None: all known ones are. At least
        one tensor must be wrong."""
        with self.bench.watch("names"):
            if self.wrong[0] == "out":
                return {("out", h): by for h, by in self._causes_of_output(hints).items()}
            return self._causes_of_gradients(hints)

    def _causes_of_output(self, hints: Hints | None) -> Mapping[int, Suspicion]:
        """Returns the mistakes that explain the output, by query head. They are sought in
        float32; in the judged format only where that run fails, or less than VANISHED of
        the error is left in it. Empty where no mistake explains the output. `hints`: the
        only mistakes that are tried; None: all known ones are."""
        bench, select, out = self.bench, self.bench.selection, self.output.out
        heads, alternatives = select.heads, None if hints is None else hints.alternatives
        wide = self.in_float32
        if isinstance(wide, Output):
            fine, coarse = (self._sizes_of_errors(x) for x in (wide.out, out))
            # A cause has to explain enough of what was judged too. What is right in
            # float32 is not searched, which takes as long as all else of a check.
            if bool((fine > NOTHING * coarse).any()):
                case = bench.case.rounded_to(_float32_or_wider(bench.case))
                causes = suspect(
                    case, wide.out, bench.reference, heads, heads, select.queries, out,
                    alternatives,
                )  # fmt: skip
                if causes:
                    return causes
            # It is in float32 too, where it had been found
            if float(fine.norm()) >= VANISHED * float(coarse.norm()):
                return {}
        far = [r.head for r in self.rows if r.tensor == "out" and far_off(vars(r))]
        return suspect(
            bench.case, out, bench.reference, heads, [h for h in far if h is not None],
            select.queries, hints=alternatives,
        )  # fmt: skip

    def _sizes_of_errors(self, out: Tensor) -> Tensor:
        """Returns the norm of each measured head's error, fp64 [heads], over sequences,
        rows and features. Elements that are not finite count as 0. `out`: an output of
        the whole call."""
        error = self.bench.selection.select(out).double() - self.bench.reference.out
        heads = error.nan_to_num(0.0, 0.0, 0.0).transpose(0, 1).flatten(1)
        sizes: Tensor = torch.linalg.vector_norm(heads, dim=1)
        return sizes

    def _causes_of_gradients(self, hints: Hints | None) -> Named:
        """Returns the mistakes that explain gradients and the log-sum-exp, by tensor and
        head. They are sought in a part of the call: up to two sequences and the first
        SEARCHED queries and keys of the kv head that errs most, with the next kv head
        where heads are grouped. Empty where none explains these, and where the kernel
        fails on that part. `hints`: as of `_causes_of_output`."""
        case, wrong = self.bench.case, [r for r in self.rows if r.tensor in self.wrong]
        worst = max(wrong, key=lambda row: row.floor_ratio or 0.0)
        kv = (worst.head or 0) // (1 if worst.tensor in KV_TENSORS else case.group)
        few = sorted({kv, (kv + 1) % case.kv_heads}) if case.group > 1 else [kv]
        cut = part_of(
            case.restrict(kv_heads=few),
            batch=range(2),
            row=range(SEARCHED),
            key=range(SEARCHED),
        )
        how = {"gradients": any(row.tensor != "lse" for row in wrong)}
        wide = cut.rounded_to(_float32_or_wider(case))
        step, judged = (self.again(x, **how) for x in (wide, cut))
        if isinstance(step, Failure):
            step, wide = judged, cut
        if isinstance(step, Failure):
            return {}
        part = f" (tried on its first {SEARCHED} keys)" if case.kv_len > SEARCHED else ""
        beside = judged if isinstance(judged, Output) and judged is not step else None
        by = suspect_gradients(
            wide, step, part, beside, None if hints is None else hints.words
        )
        return {(r.tensor, r.head or 0): by[r.tensor] for r in wrong if r.tensor in by}

    def imprecise(self, hints: tuple[Loss, ...] | None = None) -> tuple[Loss, ...]:
        """Writes into rows without a cause, in place, which step is too coarse, where one
        explains the head's error. Returns the steps that explain a head's error, each
        once, those of heads with a cause too. `hints`: steps of other calls, the only
        ones that are tried; None: all known ones are. Returns () where only some rows or
        heads are measured, where a tensor is missing or in another dtype than the
        inputs', and where nothing but the log-sum-exp is wrong."""
        bench, select = self.bench, self.bench.selection
        names = ("out", *(n for n in GRADIENTS if n in bench.yardsticks))
        wrong = tuple(n for n in self.wrong if n != "lse")
        returned = {n: getattr(self.output, n) for n in names}
        whole = select.queries is None and len(select.heads) == bench.case.heads
        if not wrong or not whole or any(x is None for x in returned.values()):
            return ()
        if any(x.dtype != bench.case.q.dtype for x in returned.values()):
            return ()
        terms = {n: getattr(bench.reference, TERMS[n]) for n in names}
        with bench.watch("names"):
            losses = imprecision(
                bench.case, returned, bench.reference, terms, wrong, hints
            )
        for at in self.unnamed:
            row = self.rows[at]
            if by := losses.get((row.tensor, row.head or 0)):
                changes = {"imprecision": by[0].words, "imprecision_share": by[1]}
                self.rows[at] = row.model_copy(update=changes)
        return tuple(dict.fromkeys(loss for loss, _ in losses.values()))

    @property
    def ways(self) -> set[str]:
        """Returns the known ways of rounding that the call's rows were judged by, in
        words (`as eager rounds`); empty where they were judged by the kernel's claim."""
        return {r.claim for r in self.rows if r.claim and r.claim.startswith(INFERRED)}

    def say(self, named: Named) -> None:
        """Writes mistakes into the rows, in place. `named`: by tensor and head; a row
        without a head counts as head 0."""
        for at, row in enumerate(self.rows):
            if by := named.get((row.tensor, row.head or 0)):
                self.rows[at] = row.model_copy(update=by.fields)

    @property
    def unnamed(self) -> list[int]:
        """Returns the indices, in `rows`, of measured rows of a wrong tensor that name
        neither a mistake nor a coarse step."""
        return [
            at
            for at, row in enumerate(self.rows)
            if row.tensor in self.wrong
            and row.status == "ok"
            and not row.suspicion
            and not row.imprecision
        ]

    def finish(self) -> None:
        """Writes into the rows, in place, in which of their head's rows the errors are,
        and why a row of a wrong tensor has no cause: UNKNOWN or ELSEWHERE."""
        locate(self.measured, self.bench)
        for at in self.unnamed if self.wrong else ():
            self.rows[at].nulls["suspicion"] = UNKNOWN if self.searched else ELSEWHERE

    @property
    def nbytes(self) -> int:
        """Returns an estimate of the memory, in bytes, that keeping the call takes."""
        tensors = (*vars(self.bench.reference).values(), *vars(self.output).values())
        return 3 * sum(x.nbytes for x in tensors if isinstance(x, Tensor))

    # --- how it rounds -----------------------------------------------------------------

    @property
    def unnamed_formats(self) -> dict[str, Format]:
        """Returns the format of each tensor that came back and has a yardstick (not the
        log-sum-exp), by name, without tensors of which a row names a mistake."""
        named = {row.tensor for row in self.rows if row.suspicion}
        formats = self.bench.formats_of(self.output)
        return {tensor: fmt for tensor, fmt in formats.items() if tensor not in named}

    @property
    def likes(self) -> Mapping[str, Likeness]:
        """Returns by tensor the known way of rounding that explains the call, without
        tensors of which a row names a mistake. Empty where no way does, and where no
        tensor of the bench's `by_row` is beyond its limits by rounding. Cached for the
        same tensors."""
        formats, wrong = self.unnamed_formats, beyond(self.rows, narrow=False)
        if set(wrong).isdisjoint(self.bench.by_row):
            return {}
        if (*formats,) not in self.likes_of:
            likes = likenesses(self.output, wrong, formats, self.bench, self.system)
            self.likes_of[(*formats,)] = likes
        return self.likes_of[(*formats,)]

    def hold_to_known_way(self) -> bool:
        """Measures the call again against the known way of rounding that explains it, and
        replaces its rows. Returns False, and changes nothing, where no way does."""
        if likes := self.likes:
            self.hold(dataclasses.replace(self.runs, likes=likes).measured())
        return bool(likes)

    def hold_where_explained(self, tensors: Collection[str], words: str | None) -> bool:
        """Measures the call again against the way of rounding named `words` (None: the
        best known one). Replaces its rows, and returns True, where that explains nearly
        all of the errors of `tensors` and the call is within its limits then; else
        changes nothing and returns False."""
        likes = likenesses(
            self.output, tensors, self.unnamed_formats, self.bench, self.system, words
        )
        return self._hold_if_explained(likes, tensors)

    def hold_if_rounding_alone(self) -> bool:
        """Measures the call again against the known way of rounding that explains it.
        Replaces its rows, and returns True, where that explains all wrong tensors and
        nearly all of their errors and the call is within its limits then, so that there
        is no mistake to look for; else changes nothing and returns False."""
        return self._hold_if_explained(self.likes, self.wrong)

    def _hold_if_explained(
        self, likes: Mapping[str, Likeness], tensors: Collection[str]
    ) -> bool:
        """Replaces the call's rows by those measured against ways of rounding, and
        returns True, where these explain nearly all of the errors of each of `tensors`
        and the call is within its limits then; else changes nothing and returns False.
        `likes`: a way by tensor. How well they explain tensors within their limits does
        not count."""
        if not {*tensors} <= {*likes}:
            return False
        if any(likes[tensor].residuals[tensor] > ENOUGH for tensor in tensors):
            return False
        measured = dataclasses.replace(self.runs, likes=likes).measured()
        if right := not beyond(measured.rows):
            self.hold(measured)
        return right

    def hold_as_elsewhere(self, words: str) -> bool:
        """Measures the call again against the way of rounding named `words`, which
        explains the kernel in other calls. Replaces its rows, and returns True, where the
        call is within its limits then; else changes nothing and returns False."""
        formats = self.unnamed_formats
        likes = held_to(words, [*formats], formats, self.bench, self.system)
        if not likes:
            return False
        measured = dataclasses.replace(self.runs, likes=likes).measured()
        right = not beyond(measured.rows)
        if right:
            self.hold(measured)
        return right

    def hold(self, measured: Measured[Bench]) -> None:
        """Replaces the rows, in place, by those of `measured`. Rows that name a mistake
        and rows without a result stay."""
        bare = [row for row in self.rows if row.status != "ok"]
        named = {(row.tensor, row.head): row for row in self.rows if row.suspicion}
        merged = [named.get((row.tensor, row.head), row) for row in measured.rows]
        self.rows[:] = [*merged, *bare]
        self.measured = dataclasses.replace(measured, rows=self.rows)
        for name in ("wrong", "severity"):
            self.__dict__.pop(name, None)


VANISHED = 0.5  # of the error: what is left of it in float32 is another fault's
# Of the error: what is a tenth right of so little (`CUT`) shrinks the whole by less than
# `SHRINKS`: 1 / (1 - 1.1 * 0.005) = 1.006
NOTHING = 0.005


def _float32_or_wider(case: AttentionCase) -> Format:
    """Returns float32, or the case's format where that has at least as many significant
    bits."""
    return max(case.format, FORMATS["float32"], key=lambda fmt: fmt.precision)


@dataclass
class Hints:
    """Mistakes that were named in other calls of the kernel. False where there are
    none."""

    alternatives: list[Alternative] = field(default_factory=list)  # of outputs
    words: set[str] = field(default_factory=set)  # of gradients and the log-sum-exp

    def add(self, named: Named) -> None:
        """Adds the mistakes of another call, by tensor and head: of the output its
        alternatives, each cause once; of other tensors their causes in words."""
        for (tensor, _), by in named.items():
            if tensor == "out":
                causes = {hint.cause for hint in self.alternatives}
                self.alternatives += [x for x in by.alternatives if x.cause not in causes]
            else:
                self.words |= set(by.words)

    def __bool__(self) -> bool:
        return bool(self.alternatives or self.words)


KEPT_BYTES = 1 << 31  # of calls that wait to be named together


def has_room(waiting: Sequence[Failing], call: Failing) -> bool:
    """Whether a call and those that wait fit into KEPT_BYTES of memory. Calls that pass
    count only beside calls that pass, and calls that fail beside those that fail."""
    alike = (each for each in waiting if bool(each.wrong) == bool(call.wrong))
    return sum(each.nbytes for each in (*alike, call)) <= KEPT_BYTES


def name_mistakes(failing: Failing) -> None:
    """Writes into one call's rows, in place, which mistake or coarse step explains its
    wrong tensors, or that none is known; and in which rows of a head the errors are."""
    if failing.wrong:
        failing.say(failing.causes())
        failing.searched = True
        if failing.unnamed:
            failing.imprecise()
    failing.finish()


# Searches of a kernel's calls that find nothing: there is nothing to be found
IN_VAIN = 3
# Searches of all that is known: the worst call, and one of each feature that fails
MOST = 8


def conclude(calls: Sequence[Failing]) -> None:
    """Finds what the kernels of these calls compute, all calls of a kernel in one format
    together, and changes the calls' lists of rows in place. Rows name a mistake or a
    coarse step, or are replaced by rows measured against a known way of rounding; the
    latter also in calls that pass."""
    groups = grouped(calls, lambda c: (label(c.runs.task), c.bench.format.name))
    for same in groups.values():
        failing = [call for call in same if call.wrong]
        claims = _conclude_kernel(sorted(failing, key=lambda c: -c.severity))
        _hold_all_to_one_way(same, claims)
        for call in same:
            if call not in failing:
                call.finish()


def _hold_all_to_one_way(calls: Sequence[Failing], claims: Counter[str]) -> None:
    """Measures calls of one kernel and format again against the known way of rounding
    that explains them, and replaces their rows, where each call passes and the medians
    over all calls do not. Does nothing for a kernel that declares its way, and where a
    row names a mistake or a coarse step. `claims`: how many calls each way explains
    already; the most frequent one is tried first, then ways that explain one of the
    IN_VAIN calls that err most."""
    rows = [row for call in calls for row in call.rows]
    tensors = {t for t, excess in excess_in_median(rows).items() if excess > 1}
    if not tensors or any(call.kernel.declares or call.wrong for call in calls):
        return
    if any(row.suspicion or row.imprecision for row in rows):
        return
    words = [words for words, _ in claims.most_common(1)]
    waiting = [call for call in calls if not call.ways]
    for call in sorted(waiting, key=lambda c: -c.worst_in_median(tensors))[:IN_VAIN]:
        likes = likenesses(
            call.output, tensors, call.unnamed_formats, call.bench, call.system
        )
        words += [like.words for like in likes.values() if like.words not in words]
        if likes:
            break
    for call in waiting:
        tried = (*words, None) if words else ()
        any(call.hold_where_explained(tensors, each) for each in tried)


def _conclude_kernel(calls: Sequence[Failing]) -> Counter[str]:
    """Writes into the rows, in place, what the failing calls of one kernel in one format
    compute. `calls`: the worst first. Mistakes, ways of rounding and coarse steps that
    explain one call are tried on the others, and searches stop after some that find
    nothing. Returns how many calls each known way of rounding explains, by its words."""
    hints, vain, ways, coarse, early = Hints(), Counts(), Counts(), Counts(), Counts()
    losses: tuple[Loss, ...] = ()
    claims: Counter[str] = Counter()
    for call in _order_calls(calls):
        if hints and _try_hints(call, hints):
            continue
        # A search costs ten times what asking for a way does, and finds nothing in sound
        # code.
        may_be = _may_be_rounding(call) or _errs_near_plain_output(call)
        if not early.misses and not call.kernel.declares and may_be:
            likely = [words for words, _ in claims.most_common(1)]
            only = (
                any(map(call.hold_as_elsewhere, likely)) or call.hold_if_rounding_alone()
            )
            early.count(only)
            if only:
                ways.count(True)
                claims.update(call.ways)
                continue
        if call.is_searched_first and vain.misses < IN_VAIN and vain.tries < MOST:
            named = call.causes()
            call.searched = True
            vain.count(bool(named))
            call.say(named)
            hints.add(named)
        open_ = not call.kernel.declares and (ways.hits or ways.misses < IN_VAIN)
        if open_ and _may_be_rounding(call):
            # A kernel rounds alike in all calls: what explains another is tried first,
            # and alone.
            alike = any(
                call.hold_as_elsewhere(words) for words, _ in claims.most_common(1)
            )
            ways.count(alike or call.hold_to_known_way())
            claims.update(call.ways)
        if call.unnamed and losses:
            call.imprecise(losses)
        if call.unnamed and call.is_searched_first and coarse.misses < MOST:
            new = call.imprecise()
            coarse.count(bool(new))
            losses = tuple(dict.fromkeys((*losses, *new)))
    for call in calls:  # those that came before something was found
        if hints and call.unnamed and call.wrong:
            _try_hints(call, hints)
        if losses and call.unnamed and call.wrong:
            call.imprecise(losses)
        if claims and _may_be_rounding(call):
            words, count = claims.most_common(1)[0]
            if count >= 2 * len([c for c in calls if c.unnamed]) and words:
                call.hold_as_elsewhere(words)
        call.finish()
    return claims


@dataclass
class Counts:
    """How often something was tried (`tries`), how often it succeeded (`hits`), and how
    often it failed since the last success (`misses`)."""

    tries: int = 0
    hits: int = 0
    misses: int = 0

    def count(self, hit: bool) -> None:
        """Counts one more try. `hit`: whether it succeeded."""
        self.tries += 1
        self.hits += hit
        self.misses = 0 if hit else self.misses + 1


def _try_hints(call: Failing, hints: Hints) -> bool:
    """Writes into a call's rows, in place, which of the mistakes of other calls explain
    it. Returns whether every row of a wrong tensor has a cause then."""
    call.say(call.causes(hints))
    return not call.unnamed


def _order_calls(calls: Sequence[Failing]) -> Iterator[Failing]:
    """Yields all calls, in two groups that keep their order: first those with a feature
    that no call before has, marked `is_searched_first`; then the others. `calls`: the
    worst first."""
    seen: set[str] = set()
    first: list[Failing] = []
    others: list[Failing] = []
    for call in calls:
        new = set(call.features) - seen
        seen |= new
        (first if new else others).append(call)
    for call in first:
        call.is_searched_first = True
    yield from first
    yield from others


FAR = 10.0  # no sound way of rounding errs so many times what plain attention does


def far_off_tensors(rows: Sequence[DeviationRow], tensors: Collection[str]) -> set[str]:
    """Returns those of `tensors` of which a row errs more than FAR times what plain
    attention does. Rows without that ratio do not count."""
    return {
        row.tensor
        for row in rows
        if row.tensor in tensors and (row.baseline_ratio or 0.0) > FAR
    }


def _errs_near_plain_output(call: Failing) -> bool:
    """Whether a row of a wrong tensor has no cause and the output is not far off, beyond
    its limits or not. Gradients may be: where exact ones are nearly 0, or dS is a
    subnormal number, a sound way may err many times as much as another."""
    return bool(call.unnamed) and "out" not in far_off_tensors(call.rows, call.wrong)


def _may_be_rounding(call: Failing) -> bool:
    """Whether a known way of rounding may explain what is wrong: a row of a wrong tensor
    has no cause, no row of the output names a mistake, and a tensor is beyond its limits
    on rounding, none of them with errors of more than FAR times plain attention's. Sums
    in 16 bits and the log-sum-exp do not count as beyond."""
    # A wrong log-sum-exp or gradient says nothing about how the others are rounded.
    if not call.unnamed or any(row.suspicion for row in call.rows if row.tensor == "out"):
        return False
    wrong = beyond(call.rows, narrow=False)
    return bool(wrong) and not far_off_tensors(call.rows, wrong)
