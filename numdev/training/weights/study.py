"""`numdev weights`: sets of weights, tensor by tensor, against the first of them.

Tensors are matched by name, one is read at a time, and a row and a few sums of it stay,
so memory is that of the largest tensor. What cannot be compared becomes a remark."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from numdev.audit.run import Progress, provenance
from numdev.audit.timing import Stopwatch
from numdev.errors import MeasurementError, UsageError
from numdev.formats import FORMATS
from numdev.report.io import claim
from numdev.report.numbers import si, times
from numdev.sources.containers import StoredTensor
from numdev.sources.files import identity, some
from numdev.system import System
from numdev.training.weights import pairs
from numdev.training.weights import report as records
from numdev.training.weights.files import Weights, open_weights

_LEAF = re.compile(r"(?:weight|bias|gamma|beta|running_mean|running_var)$")
_NORM = re.compile(r"norm|layrnorm|^ln(_|\d|$)|^bn\d*$", re.IGNORECASE)
# By the habits of GPT-2, Llama, BERT, T5, ViT, CLIP, timm and `nn.Transformer`; the first
# fits.
_KINDS = {
    "head": r"lm_head|embed_out|classifier|score|qa_outputs|proj_out|head|head_dist|"
    r"predictions",
    "other": r"inv_freq|rotary\w*",
    "embedding": r"\w*embed\w*|wte|wpe|tok_embd|pos_embd|cls_token|mask_token|dist_token|"
    r"shared|relative_attention_bias|relative_position_bias_table",
    "attention": r"\w*(?:attn|attention|mha)\w*",
    "mlp": r"\w*mlp\w*|ffn?|feed_forward|feedforward|densereludense|\w*experts?|\w*moe|"
    r"fc\d?|c_fc|w[123]|\w+_proj|linear[12]|lin[12]|intermediate|output\.dense|dense_\w+",
}
_RULES = {
    kind: re.compile(rf"(?:^|\.)(?:{pattern})(?:\.|$)", re.IGNORECASE)
    for kind, pattern in _KINDS.items()
}
KINDS = ("embedding", "attention", "mlp", "norm", "head", "other")  # in the order shown
BLIND = 0.25
"""Below this share of the mean difference, W1 needs the word that it is blind to
pairing."""
UNKNOWN = "{p.of} and {p.against}: the mean difference is not known ({null})."
EQUAL = (
    "{p.of} equals {p.against}: every finite element of the {tensors} tensors compared"
    "{elements}{zeros}."
)
NOTHING = (
    "{p.of} and {p.against}: all {p.tensors} tensors are 0 in both, so "
    "nothing is compared."
)
DIFFERS = (
    "{p.of} differs from {p.against} by {mean} on average: {beside} At most "
    "{most}, in {p.max_tensor}; {p.identical} of {tensors} tensors are equal{zeros}."
)
ZEROS = ", and {p.zeros} more are 0 in both"
NO_CAST = (
    "no cast that would have changed anything is coarser than how {p.against} is stored."
)
BESIDE = (
    "{median}× what one cast to {p.yardstick} would have changed (median tensor), "
    "largest in "
    "{p.times_tensor} ({largest}×)."
)
BAGS = (
    "W1 of {p.of}, the mean of its tensors': {w1}, {share} of the mean "
    "difference{cast}.{blind}"
)
CAST = " and {times}× that of one cast to {p.yardstick}"
IS_BLIND = (
    " W1 is blind to pairing: it compares bags of values, is 0 for a permuted "
    "tensor, and of two "
    "seeds shrinks with the size of a tensor. The mean difference is what the "
    "weights differ by."
)


def weights(
    targets: Sequence[str],
    directory: Path,
    *,
    device: str = "auto",
    overwrite: bool = False,
    command: str = "",
    progress: Progress = lambda what, done, total: None,
) -> records.WeightsReport:
    """Compare every set of weights with the first, for a report in `directory`, which the
    caller writes. Raises UsageError, before anything is read, where one is not there or
    the directory is taken, and MeasurementError where no tensor could be compared."""
    for target in targets[1:]:  # rows are told apart by the name of the set they are of
        if targets[1:].count(target) > 1:
            raise UsageError(f"{target}: is given twice", hint="name every set once")
    request = {"targets": list(targets), "device": device}
    system = System.probe(device)
    opened = [open_weights(target) for target in targets]
    claim(directory, "weights", request, overwrite=overwrite)
    watch = Stopwatch(system.device)
    with watch("weights"):
        both = Comparison(opened, system.device)
        rows, sums = _split(both.measured(progress))
        if not rows:
            said = [f"{r.source}: {r.tensor or ''} {r.words}" for r in both.remarks]
            raise MeasurementError(f"no tensor could be compared: {some(said)}")
        sources = tuple(map(record_of, opened))
    groups = tuple(_groups(rows, sums))
    remarks = tuple(both.remarks)
    return records.WeightsReport(
        provenance=provenance(system, {"checkpoint": ", ".join(targets)}, command),
        request=request,
        summary=records.WeightsSummary(answer=tuple(_answer(groups, remarks))),
        sources=sources,
        rows=tuple(rows),
        groups=groups,
        remarks=remarks,
        timings=watch.seconds(),
    )


def record_of(source: Weights) -> records.SourceRecord:
    return records.SourceRecord(
        name=source.name,
        tensors=len(source.tensors),
        elements=sum(math.prod(stored.shape) for stored in source.tensors.values()),
        sha256=identity(source.files),
    )


def _split(
    measured: Iterable[tuple[records.TensorRow, pairs.Sums]],
) -> tuple[list[records.TensorRow], list[pairs.Sums]]:
    both = list(measured)
    return [row for row, _ in both], [sums for _, sums in both]


class Comparison:
    """The tensors of sets of weights beside the first's, and remarks on what has no place
    there."""

    def __init__(self, opened: Sequence[Weights], device: str) -> None:
        self.first, *self.others = opened
        self.device = device
        # Each once: the first set is met by all
        self.remarks: dict[records.Remark, None] = {}

    def measured(
        self, progress: Progress = lambda what, done, total: None
    ) -> Iterator[tuple[records.TensorRow, pairs.Sums]]:
        """The row of each of `tensors`, and what adds up of it. NaN and infinity are a
        remark."""
        costs, costed = {}, None
        for name, other, of, against in self.tensors(progress):
            if against is not costed:  # once for all others
                costs, costed = pairs.cast_costs(against), against
            sums = pairs.compare(of, against, costs)
            row = records.TensorRow(
                of=other.name,
                against=self.first.name,
                tensor=name,
                kind=kind_of(name),
                shape=tuple(against.shape),
                stored_of=pairs.name_of(of),
                stored_against=pairs.name_of(against),
                zero=not bool(of.any()) and not bool(against.any()),
                **pairs.numbers(sums),
            )
            for source, lost in (
                (other, row.nonfinite_of),
                (self.first, row.nonfinite_against),
            ):
                if lost:
                    words = f"has {lost} NaN or infinite elements of {row.elements}"
                    self.remark(source, name, "not finite", words)
            yield row, sums

    def tensors(
        self, progress: Progress = lambda what, done, total: None
    ) -> Iterator[tuple[str, Weights, Tensor, Tensor]]:
        """A name, another set, its tensor and the first set's, on the device: whatever
        can be compared, in the order of the first set."""
        for source in (self.first, *self.others):
            for words in source.damage:
                self.remark(source, None, "damaged", words)
        plan: dict[str, list[tuple[Weights, StoredTensor, StoredTensor]]] = {
            n: [] for n in self.first.tensors
        }
        for other in self.others:
            for name, theirs, ours in self.matched(other):
                plan.setdefault(name, []).append((other, theirs, ours))
        for done, (name, partners) in enumerate(plan.items()):
            progress(name, done, len(plan))
            against = self.values(self.first, name, partners[0][2]) if partners else None
            for other, theirs, _ in partners if against is not None else ():
                of = self.values(other, name, theirs)
                if of is not None and against is not None:
                    yield name, other, of, against

    def matched(self, other: Weights) -> Iterator[tuple[str, StoredTensor, StoredTensor]]:
        """The tensors that another set and the first have in one shape. What a damaged
        set lacks may be in the file that cannot be read, and is not called missing."""
        first = self.first
        for name, ours in first.tensors.items():
            called = (name, *(alias for alias, its in first.tied.items() if its == name))
            theirs = next(filter(None, map(other.find, called)), None)
            if theirs is None:
                if not other.damage:
                    self.remark(other, name, "missing", "is not there")
            elif theirs.shape != ours.shape:
                words = f"is {list(theirs.shape)}, and {list(ours.shape)} in {first.name}"
                self.remark(other, name, "reshaped", words)
            else:
                yield name, theirs, ours
        known = {*first.tensors, *first.tied}
        known |= {name for alias, name in other.tied.items() if alias in known}
        for name in other.tensors:
            if name not in known and not first.damage:
                self.remark(other, name, "extra", f"is not in {first.name}")

    def values(self, source: Weights, name: str, stored: StoredTensor) -> Tensor | None:
        """A tensor on the device; None, with a remark, where it has no values to
        measure."""
        try:
            tensor = stored.read()
        except MeasurementError as error:
            self.remark(source, name, "damaged", f"cannot be read: {error.message}")
            return None
        if why := pairs.unfit(tensor):
            self.remark(source, name, "not compared", why)
            return None
        return tensor.detach().to(self.device)  # a saved Parameter would record a graph

    def remark(
        self, source: Weights, name: str | None, what: records.Matter, words: str
    ) -> None:
        self.remarks[
            records.Remark(source=source.name, tensor=name, what=what, words=words)
        ] = None


def kind_of(name: str) -> str:
    """What a weight is by its name, one of KINDS; it only groups rows."""
    parts = name.split(".")
    module = parts[-2] if len(parts) > 1 and _LEAF.match(parts[-1]) else parts[-1]
    if _NORM.search(module):
        return "norm"
    if name == "output.weight":  # of a Llama from Meta's own files
        return "head"
    return next((kind for kind, rule in _RULES.items() if rule.search(name)), "other")


def _groups(
    rows: Sequence[records.TensorRow], sums: Sequence[pairs.Sums]
) -> Iterator[records.GroupRow]:
    for of in dict.fromkeys(row.of for row in rows):
        for name in (records.ALL, *KINDS):
            these = [
                (row, part)
                for row, part in zip(rows, sums, strict=True)
                if row.of == of and name in (records.ALL, row.kind)
            ]
            if these:
                own, parts = _split(these)
                yield records.GroupRow(name=name, **together(own, parts))


def together(
    rows: Sequence[records.TensorRow], sums: Sequence[pairs.Sums]
) -> dict[str, Any]:
    """The fields of several tensors of one set, as one."""
    stored = [FORMATS[row.stored_against].precision for row in rows]
    coarser = {
        name: sum(FORMATS[name].precision < p for p in stored) for name in pairs.CASTS
    }
    cast = next((name for name, count in coarser.items() if 2 * count > len(rows)), None)
    ratios = {r.tensor: x for r in rows if cast and (x := r.times(cast)) is not None}
    apart = {r.tensor: r.max_abs for r in rows if r.max_abs is not None}
    largest = max(ratios, key=lambda name: ratios[name], default=None)
    return {
        "of": rows[0].of,
        "against": rows[0].against,
        **pairs.numbers(pairs.pooled(sums), "mean_w1"),
        "tensors": len(rows),
        "identical": sum(
            r.equal == 1 and not (r.nonfinite_of or r.nonfinite_against) for r in rows
        ),
        "zeros": sum(r.zero for r in rows),
        "max_tensor": max(apart, key=lambda name: apart[name], default=None),
        "yardstick": cast,
        "times_median": statistics.median(ratios.values()) if ratios else None,
        "times_largest": None if largest is None else ratios[largest],
        "times_tensor": largest,
    }


def _answer(
    groups: Sequence[records.GroupRow], remarks: Sequence[records.Remark]
) -> Iterator[str]:
    """The mean difference beside what one cast of the same tensors would have changed, W1
    beside the mean difference, and what could not be compared, damage first."""
    for g in (g for g in groups if g.name == records.ALL):
        zeros = ZEROS.format(p=g) if g.zeros else ""
        if g.mean_abs is None or g.max_abs == 0:
            same = NOTHING if g.zeros == g.tensors else EQUAL
            yield (UNKNOWN if g.mean_abs is None else same).format(
                p=g,
                null=g.nulls.get("mean_abs"),
                tensors=g.tensors - g.zeros,
                elements="" if g.zeros else f" ({g.elements:,})",
                zeros=zeros,
            )
            continue
        beside = NO_CAST if g.times_median is None else BESIDE
        ratios = {"median": times(g.times_median), "largest": times(g.times_largest)}
        beside = beside.format(p=g, **ratios)
        yield DIFFERS.format(
            p=g,
            mean=si(g.mean_abs),
            most=si(g.max_abs),
            beside=beside,
            tensors=g.tensors - g.zeros,
            zeros=zeros,
        )
        share = (g.mean_w1 or 0.0) / g.mean_abs
        casts = None if g.yardstick is None else g.times(g.yardstick)
        cast = "" if casts is None else CAST.format(p=g, times=times(share * casts))
        blind = IS_BLIND if share < BLIND else ""
        yield BAGS.format(p=g, w1=si(g.mean_w1), share=si(share), cast=cast, blind=blind)
    yield from matters(remarks)


def matters(remarks: Sequence[records.Remark]) -> Iterator[str]:
    """What could not be compared, or needs a word, damage first."""
    for what in get_args(records.Matter):
        for source in dict.fromkeys(r.source for r in remarks if r.what == what):
            these = [r for r in remarks if (r.what, r.source) == (what, source)]
            listed = some(
                [f"{r.tensor} {r.words}" if r.tensor else r.words for r in these]
            )
            yield f"{what.capitalize()} in {source}: {listed}."
