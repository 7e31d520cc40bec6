"""`numdev logprobs`: sets what two programs recorded beside the exact model and beside
each other, looks for causes, and makes the report."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from numdev.errors import UsageError
from numdev.formats import FORMATS
from numdev.gate.judging import check_system, judged
from numdev.gate.rules import Rules, default_rules
from numdev.report import Provenance
from numdev.report.number_text import percent, ratio, si
from numdev.request_models import LogprobsRequest, demo_checkpoint
from numdev.sources.checkpoint import load_tokenizer
from numdev.studies.logprobs import causes
from numdev.studies.logprobs.cause_search import CauseSearch
from numdev.studies.logprobs.causes import Observed, Rerouted
from numdev.studies.logprobs.joining import join
from numdev.studies.logprobs.lazy_sequences import in_file
from numdev.studies.logprobs.pair_causes import shared_alternatives
from numdev.studies.logprobs.readers import read_sides
from numdev.studies.logprobs.records import (
    Joined,
    RecordedSequence,
    SequencePair,
    Side,
)
from numdev.studies.logprobs.report import (
    PAIR,
    CauseRow,
    CostRow,
    LogprobsPlan,
    LogprobsReport,
    LogprobsSummary,
    PairRow,
    PlannedSide,
    SideRow,
    WorstToken,
)
from numdev.studies.logprobs.routing_replay import NotReplayed, count_other
from numdev.studies.logprobs.side_settings import (
    PREDICTED,
    PREDICTED_HEADS,
    common,
    recipe_of,
    settings_remarks,
    several_of,
    support_of,
    supports_tried,
)
from numdev.studies.logprobs.statistics import outside, pair_sums
from numdev.studies.logprobs.token_bins import bins_of, worst_tokens
from numdev.studies.logprobs.training_costs import (
    HALF,
    HEAD,
    SideErrors,
    evenly_spread,
    pair_cost_rows,
    side_cost_rows,
)
from numdev.studies.logprobs.truth import (
    FP64,
    ExactModel,
    ProgramRecipe,
    Support,
    exact_instead,
    exact_values,
    other_experts,
    predicted_errors,
    segments_of,
)
from numdev.system import System

Progress = Callable[[str, int, int], None]
NO_TOKENS = "no token of it counts and has a value"
# Why a cause was not looked for, where no dose of it could be tried
NEEDS = {
    "temperature": "the side is held to a filtered support",
    "truncated support": "no filter is known that could be undone",
    "padded vocabulary": "the vocabulary needs no padding, or is filtered",
    "stale weights": "needs an earlier checkpoint: --previous",
    "window, cap or scale": "the model has none of its own",
    "packing": "no record packs several sequences",
    "quantised weights": "the side is held to a filtered support",
    "quantised cache": "no kernel answers for the attention of the model",
    "adapter": "needs the adapter: --adapter",
    "not repeatable": "needs a second run of the side: --repeat",
    "narrow head": "the head is meant to be in 16 bits, or its logits' grid tells",
    "logits in 16 bits": "the head is meant to be in 16 bits, or needs top_logprobs",
}
AT_PREDICTION = "the side is at its prediction"
NO_ROUTER = "the model has no router of experts"
# Causes that the model must be run for
BY_MODEL = (
    *("stale weights", "window, cap or scale", "packing", "quantised weights"),
    *("narrow head", "logits in 16 bits", "quantised cache", "adapter"),
    "routing of experts",
)


def logprobs(
    request: LogprobsRequest, sides: Sequence[Side], joined: Joined | None = None, *,
    progress: Progress = lambda what, done, total: None, command: str = "",
    rules: Rules | None = None, text_of: Callable[[int], str] | None = None,
    open_model: Callable[[str], ExactModel] | None = None,
) -> LogprobsReport:  # fmt: skip
    """Returns the report on one side or two, judged by `rules` (None: the default ones).
    `joined`: both sides' sequences in pairs; None: no pair is compared. `text_of`: the
    text of a token id, where the worst tokens are to be shown as text. `open_model`:
    opens a checkpoint, where it is not to be opened anew; one with an adapter always is.
    Raises UsageError for no side or three, for one without a model, for a format whose
    roundings cannot be predicted, and for a second run (`repeat`) of other sequences.
    Raises MeasurementError for a system that the rules do not hold for, for a token that
    the model lacks, and where the model fails; and what opening the model raises."""
    rules, begun = rules or default_rules(), time.monotonic()
    system = System.probe(request.device)
    check_system(system.as_dict(), rules)
    if not sides or len(sides) > 2:
        raise UsageError(f"logprobs: expected one side or two, got {len(sides)}")
    if len(sides) == 1 and request.model is None:
        what = f"{sides[0].path}: has log-probabilities of one program alone"
        raise UsageError(what, hint="give the other one's file too, or --model")
    check_format(request.format, "--format", PREDICTED)
    check_format(request.head or request.format, "--head", PREDICTED_HEADS)
    study = LogprobsStudy(request, sides, joined, open_model)
    measured = list(study.measured_sides(progress))
    pairs = [pair_row(i, pair, study.clip) for i, pair in enumerate(study.pairs)]
    pair_causes = study.pair_cause_rows() if study.model is None else []
    plan = LogprobsPlan(
        sides=tuple(m.plan for m in measured),
        pairs=len(study.pairs),
        model=request.model,
        pair_causes=tuple(dict.fromkeys(row.cause for row in pair_causes)),
        clip=study.clip,
    )
    source: dict[str, object] = study.model.describe() if study.model else {}
    source |= {"records": ", ".join(Path(file).name for file in request.files)}
    report = LogprobsReport(
        provenance=Provenance.now(command, system.as_dict(), source),
        request=request.model_dump(mode="json"),
        timings={"total": time.monotonic() - begun},
        plan=plan,
        summary=LogprobsSummary(answer=()),
        **study.measured_fields(measured, text_of),
        pairs=tuple(pairs),
        remarks=tuple(study.remarks(measured)),
    )
    cause_rows = (*report.causes, *pair_causes)
    report = report.model_copy(update={"causes": cause_rows})
    return judged(report, rules)


def logprobs_of_files(
    request: LogprobsRequest, *, progress: Progress = lambda what, done, total: None,
    command: str = "", rules: Rules | None = None,
) -> LogprobsReport:  # fmt: skip
    """Returns the report on the request's files: one with both sides, one of each, or one
    of one side alone. Raises what reading them raises, and what `logprobs` does."""
    sides = distinct_sides(
        [side for file in request.files for side in read_sides(Path(file))]
    )
    joined = join(*sides) if len(sides) == 2 else None
    if joined is not None:  # in which a response has the prompt of its partner
        sides = [joined.a, joined.b]
    return logprobs(
        request,
        sides,
        joined,
        progress=progress,
        command=command,
        rules=rules,
        text_of=text_of_tokens(request.model) if request.show_text else None,
    )


Key = tuple[str | None, bytes]


def key_of(record: RecordedSequence) -> Key:
    """Returns the uid of a sequence and its tokens as bytes, which a second run shares
    with the first."""
    return record.uid, record.token_ids.tobytes()


def repeats_of(
    request: LogprobsRequest, sides: Sequence[Side]
) -> dict[tuple[str, Key], np.ndarray]:
    """Returns by side and sequence the log-probabilities of a second run, of the side
    that the request's file names, else of the first; empty where the request has no such
    file. Raises what reading it raises, and UsageError where it has both sides, or none
    of the sequences. `sides`: at least one."""
    if request.repeat is None:
        return {}
    runs = read_sides(Path(request.repeat))
    if len(runs) != 1:
        what = f"expected one side, got {len(runs)}"
        raise UsageError(f"--repeat {request.repeat}: {what}")
    names = [side.name for side in sides]
    of = runs[0].name if runs[0].name in names else names[0]
    first = next(side for side in sides if side.name == of)
    values = {key_of(x): x.logprobs for x in runs[0].sequences}
    if not values.keys() & {key_of(x) for x in first.sequences}:
        what = f"none of its sequences is one of {of}, by uid and tokens"
        raise UsageError(f"--repeat {request.repeat}: {what}")
    return {(of, key): x for key, x in values.items()}


def distinct_sides(sides: Sequence[Side]) -> list[Side]:
    """Returns the sides in order; those that share a name, or are called PAIR as both
    together are, as copies named `FILE (NUMBER)` by their place, from 1. FILE is their
    file's name without its last suffix."""
    names = [side.name for side in sides]
    return [
        side
        if names.count(side.name) == 1 and side.name != PAIR
        else dataclasses.replace(side, name=f"{side.path.stem} ({number})")
        for number, side in enumerate(sides, 1)
    ]


def text_of_tokens(checkpoint: str | None) -> Callable[[int], str]:
    """Returns the function that gives the text of a token id by the tokenizer in a
    checkpoint's directory; `demo` is numdev's own checkpoint. Raises UsageError where
    there is no tokenizer, or no checkpoint (None); MeasurementError where its files
    cannot be read."""
    path = demo_checkpoint() if checkpoint == "demo" else Path(checkpoint or "")
    tokenizer = load_tokenizer(path) if checkpoint else None
    if tokenizer is None:
        what = "--show-text: expected a checkpoint with a tokenizer"
        raise UsageError(f"{what}, got {checkpoint or 'no --model'}")
    return lambda token: str(tokenizer.decode([token]))


def check_format(name: str, option: str, formats: Sequence[str]) -> None:
    """Raises UsageError, which says `option`, for a format whose roundings cannot be
    predicted: a name that is not in `formats`, be it another name of one."""
    if name not in formats:
        raise UsageError(f"{option}: expected one of {', '.join(formats)}, got {name!r}")


def with_text(
    tokens: Sequence[WorstToken], text_of: Callable[[int], str] | None
) -> Iterator[WorstToken]:
    """Yields the tokens, in order, with their text by `text_of`; None without it."""
    for token in tokens:
        text = text_of(token.token) if text_of is not None else None
        yield token.model_copy(update={"text": text})


class ComparedSide(NamedTuple):
    """One side beside the truth."""

    plan: PlannedSide
    rows: list[SideRow]
    causes: list[CauseRow]
    errors: SideErrors  # of the sequences that have numbers


class LogprobsStudy:
    """Sides, their pairs and the exact model of one request."""

    def __init__(
        self, request: LogprobsRequest, sides: Sequence[Side], joined: Joined | None,
        open_model: Callable[[str], ExactModel] | None = None,
    ) -> None:  # fmt: skip
        self.request, self.sides, self.joined = request, sides, joined
        self.settings = [[x.settings for x in side.sequences] for side in sides]
        self.clip = (request.clip_low, request.clip_high)
        self.model: ExactModel | None = None
        self.previous: ExactModel | None = None
        plain = partial(ExactModel, device=request.device, stream=request.stream)
        opening = open_model or plain
        if request.model is not None:
            adapted = partial(plain, adapter=request.adapter)
            self.model = (adapted if request.adapter else opening)(request.model)
            if request.previous is not None:
                self.previous = opening(request.previous)
        self.repeats = repeats_of(request, sides)

    @property
    def pairs(self) -> Sequence[SequencePair]:
        """Returns the pairs of sequences that both sides have, empty for one side; one is
        in memory at a time, where they were read of files."""
        return self.joined.pairs if self.joined is not None else ()

    def chosen(self, side: Side) -> Sequence[int]:
        """Returns the numbers of the sequences of a side that are compared with the
        model: as many as the request says, evenly spread, else all."""
        count, most = len(side.sequences), self.request.sequences
        if most is None or most >= count:
            return range(count)
        return [i * count // most for i in range(most)]

    def fixes_of(
        self, recipe: ProgramRecipe, sequences: Sequence[Observed]
    ) -> dict[str, dict[int, np.ndarray]]:
        """Returns by fix, and by the place of a sequence, the errors that are predicted
        with it; for at most MOST_SEQUENCES of them, evenly spread. Empty where no ratio
        is outside the clip band, so that nothing is to be mended, and for a recipe
        without a fix. There is a model."""
        fixed: dict[str, dict[int, np.ndarray]] = {}
        is_clipped = any(
            outside(np.exp(s.errors[s.counts]), self.clip).any() for s in sequences
        )
        assert self.model is not None
        for name, other in fixed_recipes(recipe).items() if is_clipped else ():
            fixed[name] = {
                at: predicted_errors(
                    self.model,
                    sequences[at].record,
                    sequences[at].reference,
                    sequences[at].support or Support(),
                    other,
                )
                for at in evenly_spread(len(sequences))
            }
        return fixed

    def measured_sides(self, progress: Progress) -> Iterator[ComparedSide]:
        """Yields each side beside the truth, in order; without a model, sides with a plan
        and without numbers."""
        for side, every in zip(self.sides, self.settings, strict=True):
            numbers = self.chosen(side)
            settings = [every[i] for i in numbers]
            recipe = recipe_of(settings, self.request)
            supports = dict.fromkeys(support_of(x, self.request).words for x in settings)
            plan = PlannedSide(
                name=side.name,
                file=side.path.name,
                layout=side.layout,
                sequences=len(numbers),
                format=recipe.format,
                head=recipe.head,
                attention=recipe.attention,
                support="; ".join(supports),
                engine=common(settings, "engine"),
                weights_version=common(settings, "weights_version"),
                several=several_of(settings, self.request),
            )
            if self.model is None:
                errors = SideErrors(side.name, [], [], [], False, {})
                yield ComparedSide(plan, [], [], errors)
                continue
            tried, rows, observed = supports_tried(settings, self.request), [], []
            for i, number in enumerate(numbers):
                progress(f"{side.name} sequence {i}", i, len(numbers))
                record = side.sequences[number]
                row, seen = self.measure(side.name, i, record, recipe, tried)
                rows.append(row)
                observed += [seen] if seen is not None else []
            search, untested = self.causes_of(side.name, observed)
            searched = tuple(dict.fromkeys(row.cause for row in search.rows))
            fixes = self.fixes_of(recipe, observed)
            errors = SideErrors(
                side.name,
                observed,
                [numbers[seen.sequence] for seen in observed],
                search.errors,
                search.stage > 0,
                fixes,
            )
            update = {"causes": searched, "untested": untested, "fixes": tuple(fixes)}
            plan = plan.model_copy(update=update)
            yield ComparedSide(plan, rows, search.rows, errors)

    def measure(
        self, side: str, number: int, record: RecordedSequence, recipe: ProgramRecipe,
        tried: Sequence[Support],
    ) -> tuple[SideRow, Observed | None]:  # fmt: skip
        """Returns the row of one sequence, and what causes are looked for in; skipped
        with a reason and None where its prompt is not known, it has several versions of
        the weights, or no token has numbers. There is a model. Raises MeasurementError
        for a token that the model lacks."""
        assert self.model is not None
        support = support_of(record.settings, self.request)
        about = {"side": side, "sequence": number, "uid": record.uid}
        if why := unmeasurable(record):
            return skipped_row(about, why), None
        exact = exact_values(self.model, record, support, tried)
        predicted = predicted_errors(self.model, record, exact.logprobs, support, recipe)
        has_exact = np.isfinite(exact.logprobs) & np.isfinite(predicted)
        counts = record.mask & np.isfinite(record.logprobs) & has_exact
        outside_support = int((record.mask & np.isneginf(exact.logprobs)).sum())
        infinite = record.mask & np.isneginf(record.logprobs) & has_exact
        about |= {
            "missing": int((record.mask & np.isnan(record.logprobs)).sum()),
            "outside": outside_support,
            "infinite": int(infinite.sum()),
        }
        if not counts.any():
            return skipped_row(about, NO_TOKENS), None
        seen = Observed(
            sequence=number,
            record=record,
            values=record.logprobs,
            counts=counts,
            reference=exact.logprobs,
            predicted=predicted,
            exact=exact,
            vocabulary=self.model.vocabulary,
            support=support,
            recipe=recipe,
            again=self.repeats.get((side, key_of(record))),
        )
        return side_row(about, seen, self.clip), seen

    def causes_of(
        self, side: str, sequences: list[Observed]
    ) -> tuple[CauseSearch, dict[str, str]]:
        """Returns the search for causes on a side, done, and why those that it has no row
        of could not be looked for. What a model must be run for is tried only where the
        side is not at its prediction."""
        untested: dict[str, str] = {}
        search = CauseSearch(side, sequences, self.divide_temperature)
        if not sequences:
            return search, dict.fromkeys(causes.KINDS, NO_TOKENS)
        search.undo_all([kind for kind in causes.SIDE_CAUSES if kind.stage == 0])
        later = [kind for kind in causes.SIDE_CAUSES if kind.stage == 1]
        if search.at_prediction:
            untested |= dict.fromkeys(BY_MODEL, AT_PREDICTION)
        else:
            search.sequences = self.with_instead(search.sequences)
            untested |= self.why_not_rerouted(search.sequences)
        begun = search.copied()
        search.undo_all(later)
        if not search.at_prediction:
            hidden = begun.undo_hidden(later)
            both = [search] if hidden is None else [search, hidden]
            search = min(both, key=lambda each: each.left)
        done = {row.cause for row in search.rows}
        for name in causes.KINDS.keys() - done:
            untested.setdefault(name, NEEDS.get(name, "it could not be tried"))
        return search, dict(sorted(untested.items()))

    def divide_temperature(
        self, sequences: Sequence[Observed], beta: float
    ) -> list[Observed]:
        """Returns sequences held to their temperature over `beta`, rounded to three
        digits, of all tokens, with all that is known of the exact model there. Predicted
        errors stay as they are. There is a model."""
        assert self.model is not None
        moved = []
        for seen in sequences:
            meant = 1.0 if seen.support is None else seen.support.temperature
            temperature = float(f"{meant / beta:.3g}")  # as the cause is called
            support = Support(temperature=temperature)
            others = seen.exact.log_mass if seen.exact is not None else ()
            tried = [other._replace(temperature=temperature) for other in others]
            exact = exact_values(self.model, seen.record, support, tried)
            moved.append(
                dataclasses.replace(
                    seen, exact=exact, reference=exact.logprobs, support=support
                )
            )
        has_instead = any(seen.instead for seen in sequences)
        return self.with_instead(moved) if has_instead else moved

    def with_instead(self, sequences: Sequence[Observed]) -> list[Observed]:
        """Returns sequences with their exact values under every cause that the model must
        be run for, and with the experts that they recorded: one mistake after the other,
        since each is a model of its own. There is a model, and each sequence has a
        support."""
        assert self.model is not None
        values: list[dict[tuple[str, str], np.ndarray]] = [{} for _ in sequences]
        for cause, dose in self.model.variants():
            for seen, instead in zip(sequences, values, strict=True):
                assert seen.support is not None
                instead[cause, dose] = exact_instead(
                    self.model, seen.record, seen.support, dose
                )
        for fmt in ("bfloat16", "float16"):
            for seen, instead in zip(sequences, values, strict=True):
                instead |= self.with_narrow_head(seen, fmt)
        for seen, instead in zip(sequences, values, strict=True):
            instead |= self.with_other_inputs(seen)
        return [
            dataclasses.replace(seen, instead=instead, rerouted=self.rerouted(seen))
            for seen, instead in zip(sequences, values, strict=True)
        ]

    def rerouted(self, seen: Observed) -> Rerouted | None:
        """Returns a sequence's numbers with the experts that it recorded; None where it
        has none that fit the model, and without a support or a recipe."""
        model, record, support = self.model, seen.record, seen.support
        if record.routed_experts is None or support is None or seen.recipe is None:
            return None
        assert model is not None
        with suppress(NotReplayed):
            other, recorded = other_experts(model, record)
            values = exact_instead(model, record, support, replayed=True)
            predicted = predicted_errors(
                model, record, values, support, seen.recipe, replayed=True
            )
            return Rerouted(values, predicted, other, recorded)
        return None

    def why_not_rerouted(self, sequences: Sequence[Observed]) -> dict[str, str]:
        """Returns by the cause's name why the routing of experts was not looked for;
        empty where it was; the first sequence without it says why."""
        assert self.model is not None
        name = "routing of experts"
        for record in (seen.record for seen in sequences if seen.rerouted is None):
            if record.routed_experts is None:
                needs = "needs the experts of each token: routed_experts"
                return {name: needs if self.model.routes else NO_ROUTER}
            try:
                other_experts(self.model, record)
            except NotReplayed as error:
                return {name: str(error)}
        return {}

    def with_other_inputs(self, seen: Observed) -> dict[tuple[str, str], np.ndarray]:
        """Returns the exact values of a sequence by the earlier checkpoint, where there
        is one, and, of a pack that the model has positions for, as if its sequences saw
        each other, or their positions went on; by cause and dose."""
        assert self.model is not None
        assert seen.support is not None
        record, support = seen.record, seen.support
        instead = {}
        if self.previous is not None:
            values = exact_instead(self.previous, record, support)
            instead["stale weights", self.previous.name] = values
        is_pack = len(segments_of(record)) > 1
        if is_pack and len(record) <= self.model.most_positions:
            together = exact_instead(self.model, record, support, as_one=True)
            onward = exact_instead(self.model, record, support, continued=True)
            instead["packing", "see each other"] = together
            instead["packing", "continue each other's positions"] = onward
        return instead

    def with_narrow_head(
        self, seen: Observed, fmt: str
    ) -> dict[tuple[str, str], np.ndarray]:
        """Returns the log-probabilities of a sequence, by cause and format, with a head
        in the format `fmt` of FORMATS, after exact states: what it errs token by token
        where the states are more exact than it, and how much where they are not. Empty
        for a format that is as wide as is meant, for one that is not narrower than the
        states', unless it is theirs, and without a recipe or a support."""
        assert self.model is not None
        recipe, support = seen.recipe, seen.support
        if recipe is None or support is None:
            return {}
        bits, meant, states = (
            FORMATS[name].precision
            for name in (fmt, recipe.head or recipe.format, recipe.format)
        )
        if bits >= meant or (bits >= states and fmt != recipe.format):
            return {}
        cause = "narrow head" if bits < states else "logits in 16 bits"
        narrow = ProgramRecipe(FP64, head=fmt)
        errors = predicted_errors(
            self.model, seen.record, seen.reference, support, narrow
        )
        return {(cause, fmt): seen.reference + errors}

    def pair_cause_rows(self) -> list[CauseRow]:
        """Returns the rows of the causes that two sides alone can tell: what one of them
        is beside the other. Empty where no pair can be compared."""
        search = CauseSearch(PAIR, self.observed_pairs(), stored=in_file)
        for stage in (0, 1) if search.sequences else ():
            search.undo_all([k for k in causes.PAIR_CAUSES if k.stage == stage])
        return search.rows

    def observed_pairs(self) -> Iterator[Observed]:
        """Yields of each pair of sequences, in order, the tokens that both sides have:
        with the second side's values, and the first side's for a reference. `sequence` is
        the pair's number. Pairs without a token that counts and has a finite value on
        both sides are left out."""
        for number, pair in enumerate(self.pairs):
            a, b = pair.logprobs
            if pair.finite.any():
                ids = pair.b.token_ids[pair.at_b]
                yield Observed(
                    sequence=number,
                    record=RecordedSequence(ids, logprobs=b, mask=pair.finite),
                    values=b,
                    counts=pair.finite,
                    reference=a,
                    shared=shared_alternatives(pair),
                )

    def routing_remark(self, side: str, sequences: Sequence[Observed]) -> Iterator[str]:
        """Yields a sentence on how many of a side's recorded experts are not the exact
        model's, or on why they cannot be replayed. Nothing where a sequence before that
        recorded none, and without a model."""
        other = every = 0
        for record in (seen.record for seen in sequences):
            if record.routed_experts is None or self.model is None:
                return
            try:
                counts = other_experts(self.model, record)
            except NotReplayed as error:
                yield f"{side}: recorded experts cannot be replayed: {error}."
                return
            other, every = other + counts[0], every + counts[1]
        if every:
            share = f"{percent(other / every)} of its {every:,} recorded experts"
            yield f"{side}: {share} are not those that the exact model chooses."

    def format_remark(self, side: SideErrors) -> Iterator[str]:
        """Yields a question where a side of a format more precise than float16 is beyond
        its prediction without a cause, and errs as much as one in bfloat16 or float16: a
        size is no proof. It is by some of its sequences. Else nothing."""
        recipe = side.sequences[0].recipe if side.sequences else None
        is_wide = (
            recipe is not None
            and FORMATS[recipe.format].precision > FORMATS["float16"].precision
        )
        if self.model is None or recipe is None or not is_wide or side.has_causes:
            return
        some = [side.sequences[at] for at in evenly_spread(len(side.sequences))]
        squares = [s.errors[s.counts] ** 2 for s in some]
        error = float(np.concatenate(squares).sum())
        if error <= causes.AT_PREDICTION**2 * _square_of(
            some, [s.predicted for s in some]
        ):
            return
        for fmt in ("bfloat16", "float16"):
            other = recipe._replace(format=fmt, head=None)
            predicted = [
                predicted_errors(
                    self.model, s.record, s.reference, s.support or Support(), other
                )
                for s in some
            ]
            over = math.sqrt(error / _square_of(some, predicted))
            if 1 / causes.AT_PREDICTION <= over <= causes.AT_PREDICTION:
                yield (
                    f"{side.name}: it errs {ratio(over)}× what {fmt} explains: does it "
                    f"compute in {fmt}, and not in {recipe.format}?"
                )
                return

    def worst(self, measured: Sequence[ComparedSide]) -> list[WorstToken]:
        """Returns the tokens that are farthest off, the worst first and at most MOST of a
        side: of each side beside the truth, in order, else of the second side beside the
        first."""
        if self.model is not None:
            return [
                w for m in measured for w in worst_tokens(m.plan.name, m.errors.sequences)
            ]
        return worst_tokens(PAIR, self.observed_pairs())

    def measured_fields(
        self, measured: Sequence[ComparedSide], text_of: Callable[[int], str] | None
    ) -> dict[str, Any]:
        """Returns the fields of a report that hold what was measured of sides, by name:
        `rows`, `causes`, `costs`, `bins` and `worst`. `text_of`: gives the text of a
        token of the worst; None: they have none."""
        rows = [row for side in measured for row in side.rows]
        cause_rows = [row for side in measured for row in side.causes]
        bins = [
            b for side in measured for b in bins_of(side.plan.name, side.errors.sequences)
        ]
        worst = with_text(self.worst(measured), text_of)
        return {
            "rows": tuple(rows),
            "causes": tuple(cause_rows),
            "costs": tuple(self.cost_rows(measured)),
            "bins": tuple(bins),
            "worst": tuple(worst),
        }

    def cost_rows(self, measured: Sequence[ComparedSide]) -> Iterator[CostRow]:
        """Yields what each side, and then both, would cost if something were mended: rows
        by sequence. Where the study has joined sides, `measured` has two."""
        for side in measured:
            yield from side_cost_rows(side.errors, self.clip)
        if self.joined is not None:
            first, second = (side.errors for side in measured)
            yield from pair_cost_rows(self.joined.pairs, first, second, self.clip)

    def remarks(self, measured: Sequence[ComparedSide]) -> Iterator[str]:
        """Yields what the readers said, what does not match, and what values look like
        without that anything follows."""
        for side in self.sides:
            yield from (f"{side.name}: {note}" for note in side.notes)
        yield from self.joined.findings if self.joined is not None else ()
        plans = [each.plan for each in measured]
        of_chosen = [
            [every[i] for i in self.chosen(side)]
            for side, every in zip(self.sides, self.settings, strict=True)
        ]
        yield from settings_remarks(plans, of_chosen)
        for each in measured:
            yield from repeat_remark(each.errors)
            yield from self.routing_remark(each.plan.name, each.errors.sequences)
            yield from self.format_remark(each.errors)
        yield from routing_difference(self.joined)
        for side, every in zip(self.sides, self.settings, strict=True):
            tops = (s.top_logprobs for s in side.sequences if s.top_logprobs is not None)
            temperatures = {support_of(x, self.request).temperature for x in every}
            share = causes.share_on_grid(tops, sorted({1.0, *temperatures}))
            if share is not None and share > causes.CHANCE:
                yield (
                    f"{side.name}: {100 * share:.0f} % of the differences between "
                    "alternatives are multiples of 2^-8: its logits have 16 bits."
                )


def _square_of(
    sequences: Sequence[Observed], errors: Sequence[np.ndarray | None]
) -> float:
    """Returns the sum of the squares of errors, float64 [n] each, at the tokens that
    count; of None 0."""
    return math.fsum(
        float(np.nansum(e[s.counts] ** 2))
        for s, e in zip(sequences, errors, strict=True)
        if e is not None
    )


def routing_difference(joined: Joined | None) -> Iterator[str]:
    """Yields at most one sentence, on how many of the experts that the first side
    recorded the second did not choose. Nothing where in some pair a side recorded none,
    or they are of other layers."""
    other = every = 0
    for pair in joined.pairs if joined is not None else ():
        a, b = pair.a.routed_experts, pair.b.routed_experts
        if a is None or b is None or a.shape[1:] != b.shape[1:]:
            return
        counts = count_other(a[pair.at_a], b[pair.at_b])
        other, every = other + counts[0], every + counts[1]
    if every and joined is not None:
        share = f"{percent(other / every)} of its {every:,} recorded experts"
        yield f"{joined.a.name}: {share} are not those of {joined.b.name}."


def repeat_remark(side: SideErrors) -> Iterator[str]:
    """Yields a sentence on how far two runs of a side differ, beside its predicted error;
    none without a second run, where no token has finite values in both, and where that
    error is 0."""
    pairs = [
        (s.again[s.counts] - s.values[s.counts], s.predicted[s.counts])
        for s in side.sequences
        if s.again is not None and s.predicted is not None
    ]
    if pairs:
        d, e = (np.concatenate(x) for x in zip(*pairs, strict=True))
        finite = np.isfinite(d)
        rms, noise = (float(np.sqrt(np.mean(x[finite] ** 2))) for x in (d, e))
        if finite.any() and noise:
            yield (
                f"{side.name}: two runs of it differ by {si(rms)} nats (rms, "
                f"{int(finite.sum()):,} tokens), {ratio(rms / noise)}× what its format "
                "errs."
            )


def fixed_recipes(recipe: ProgramRecipe) -> dict[str, ProgramRecipe]:
    """Returns by fix the recipes that a program could have instead. A program whose head
    is narrower than the rest: a head in the rest's format, and nothing else. Any other in
    at most float16's significant bits: a head in float32, where its head is no wider than
    the rest, and float16, where that is not its format. Empty for a wider format."""
    fixed = {}
    if recipe.has_narrower_head:
        fixed[HEAD] = recipe._replace(head=None)
    elif FORMATS[recipe.format].precision <= FORMATS["float16"].precision:
        if not recipe.has_wider_head:
            fixed[HEAD] = recipe._replace(head="float32")
        if recipe.format != HALF:
            fixed[HALF] = recipe._replace(format=HALF)
    return fixed


def skipped_row(about: Mapping[str, object], why: str) -> SideRow:
    """Returns the row of a sequence that has no numbers, with the fields `about`."""
    return SideRow.model_validate({**about, "status": "skipped", "reason": why})


def unmeasurable(record: RecordedSequence) -> str:
    """Returns why nothing of a recorded sequence can be measured; empty where it can."""
    if len(record.weights_versions) > 1:
        return "it was sampled under several versions of the weights"
    return "" if record.has_prompt else "its prompt was not recorded"


def side_row(
    about: dict[str, object], seen: Observed, clip: tuple[float, float]
) -> SideRow:
    """Returns the row of a sequence that has numbers, with the fields `about`. At least
    one of its tokens counts."""
    assert seen.predicted is not None
    d, e = seen.errors[seen.counts], seen.predicted[seen.counts]
    with np.errstate(over="ignore"):
        ratios, predicted_ratios = np.exp(d), np.exp(e)
    sums = {
        "error": d.sum(),
        "square": (d**2).sum(),
        "largest": np.abs(d).max(),
        "predicted": e.sum(),
        "predicted_square": (e**2).sum(),
        "product": (d * e).sum(),
    }
    return SideRow(
        **about,  # type: ignore[arg-type]
        tokens=len(d),
        clipped=int(outside(ratios, clip).sum()),
        predicted_clipped=int(outside(predicted_ratios, clip).sum()),
        **{name: float(x) for name, x in sums.items()},  # type: ignore[arg-type]
    )


def pair_row(number: int, pair: SequencePair, clip: tuple[float, float]) -> PairRow:
    """Returns the row of a pair of sequences."""
    mask_a, mask_b = pair.masks
    a, b = pair.logprobs
    without = mask_a & mask_b & (np.isnan(a) | np.isnan(b))
    p, q = b[pair.finite], a[pair.finite]
    row = PairRow(
        sequence=number,
        uid=pair.a.uid or pair.b.uid,
        tokens=len(p),
        missing=int(without.sum()),
        unshared=sum(pair.unshared),
        cut=pair.is_cut,
        mask=int((mask_a != mask_b).sum()),
        equal=int((p == q).sum()),
    )
    if not len(p):
        return row
    numbers = {
        "sums": pair_sums(p, q, clip),
        "largest": float(np.abs(p - q).max()),
        "largest_probability": float(np.abs(np.exp(p) - np.exp(q)).max()),
    }
    return row.model_copy(update=numbers)
