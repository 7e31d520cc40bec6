"""`numdev weights`: compares sets of weights, tensor by tensor, with the first of them.

Tensors are matched by name and read one at a time; a row and a few sums of each stay, so
memory is that of the largest tensor. A tensor that cannot be compared becomes a
remark."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

from torch import Tensor

from numdev.errors import MeasurementError, UsageError
from numdev.formats import FORMATS
from numdev.grouping import grouped
from numdev.report.io import claim_directory
from numdev.report.number_text import ratio, si
from numdev.sources.containers import StoredTensor
from numdev.sources.tensor_files import identity, some
from numdev.studies.audit.run import Progress, provenance
from numdev.studies.audit.section_timing import Stopwatch
from numdev.studies.training.report import Fields
from numdev.studies.training.weights import report as records
from numdev.studies.training.weights import tensor_comparison
from numdev.studies.training.weights.weight_sets import WeightSet, open_weights
from numdev.system import System

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
# Where W1 is below this share of the mean difference, a sentence says that it is blind
BLIND = 0.25
UNKNOWN = "{p.of} and {p.against}: the mean difference is not known ({null})."
EQUAL = (
    "{p.of} equals {p.against}: every finite element of the {tensors} tensors compared"
    "{elements}{zeros}."
)
NOTHING = (
    "{p.of} and {p.against}: all {p.tensors} tensors are 0 in both, so nothing is "
    "compared."
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
    "largest in {p.times_tensor} ({largest}×)."
)
BAGS = (
    "W1 of {p.of}, the mean of its tensors': {w1}, {share} of the mean "
    "difference{cast}.{blind}"
)
CAST = " and {times}× that of one cast to {p.yardstick}"
IS_BLIND = (
    " W1 is blind to pairing: it compares bags of values, is 0 for a permuted tensor, "
    "and of two seeds shrinks with the size of a tensor. The mean difference is what the "
    "weights differ by."
)

Measured = tuple[
    records.TensorRow, tensor_comparison.Sums
]  # a tensor's row, and its sums


def weights(
    targets: Sequence[str],
    directory: Path,
    *,
    device: str = "auto",
    overwrite: bool = False,
    command: str = "",
    progress: Progress = lambda what, done, total: None,
) -> records.WeightsReport:
    """Compares every set of weights with the first and returns the report, which the
    caller writes to `directory`, made here. Raises UsageError, before tensors are read,
    where there is no set, where one does not exist or is not one set of weights, where
    one other than the first is named twice, and where the directory has the report of
    another command, or (unless `overwrite`) of another request. Raises MeasurementError
    where no tensor could be compared, as with one set, and where the directory's old
    report cannot be read. Tensors that cannot be compared are remarks in the report."""
    if not targets:
        raise UsageError("weights: expected a set of weights, got none")
    for target in targets[1:]:  # rows are identified by the name of their set
        if targets[1:].count(target) > 1:
            raise UsageError(f"{target}: is given twice", hint="name every set once")
    request = {"targets": list(targets), "device": device}
    system = System.probe(device)
    opened = [open_weights(target) for target in targets]
    claim_directory(directory, "weights", request, overwrite=overwrite)
    watch = Stopwatch(system.device)
    with watch("weights"):
        comparison = WeightComparison(opened, system.device)
        measured = list(comparison.compare_tensors(progress))
        if not measured:
            raise nothing_compared_error(comparison.remarks)
        sources = tuple(map(source_record, opened))
    groups = tuple(_group_rows(measured))
    remarks = tuple(comparison.remarks)
    return records.WeightsReport(
        provenance=provenance(system, {"checkpoint": ", ".join(targets)}, command),
        request=request,
        summary=records.WeightsSummary(answer=tuple(_answer_sentences(groups, remarks))),
        sources=sources,
        rows=tuple(row for row, _ in measured),
        groups=groups,
        remarks=remarks,
        timings=watch.seconds(),
    )


def nothing_compared_error(remarks: Iterable[records.Remark]) -> MeasurementError:
    """Returns, without raising it, the error where no tensor could be compared, with the
    first reasons of `remarks`; without any no set has a tensor."""
    words = [f"{r.source}: {r.tensor or ''} {r.words}" for r in remarks]
    why = some(words) if words else "the files hold no tensor"
    return MeasurementError(f"no tensor could be compared: {why}")


def source_record(source: WeightSet) -> records.SourceRecord:
    """Returns a set of weights as a report records it. Reads all its files for their
    hash."""
    return records.SourceRecord(
        name=source.name,
        tensors=len(source.tensors),
        elements=sum(math.prod(stored.shape) for stored in source.tensors.values()),
        sha256=identity(source.files),
    )


class WeightComparison:
    """The tensors of sets of weights beside those of the first set, on `device`.
    `remarks` gets, in place, what cannot be compared. `opened`: at least one."""

    def __init__(self, opened: Sequence[WeightSet], device: str) -> None:
        self.first, *self.others = opened
        self.device = device
        # As keys, since several sets may lead to one remark on the first
        self.remarks: dict[records.Remark, None] = {}

    def compare_tensors(
        self, progress: Progress = lambda what, done, total: None
    ) -> Iterator[Measured]:
        """Yields the row and the sums of each tensor that can be compared, of each set
        other than the first; in the order of the first set's tensors. One with NaN or
        infinity also adds a remark to `remarks`, as does each that cannot be compared.
        `progress`: called with a tensor's name, how many are done, and how many there
        are."""
        costs: dict[str, float] = {}
        last = None
        for name, other, of, against in self.matching_tensors(progress):
            if against is not last:  # the casts are the same for all other sets
                costs, last = tensor_comparison.cast_costs(against), against
            sums = tensor_comparison.compare_pair(of, against, costs)
            row = records.TensorRow(
                of=other.name,
                against=self.first.name,
                tensor=name,
                kind=kind_by_name(name),
                shape=tuple(against.shape),
                stored_of=tensor_comparison.dtype_name(of),
                stored_against=tensor_comparison.dtype_name(against),
                zero=not bool(of.any()) and not bool(against.any()),
                **tensor_comparison.row_numbers(sums),
            )
            nonfinite = ((other, row.nonfinite_of), (self.first, row.nonfinite_against))
            for source, count in nonfinite:
                if count:
                    words = f"has {count} NaN or infinite elements of {row.elements}"
                    self.add_remark(source, name, "not finite", words)
            yield row, sums

    def matching_tensors(
        self, progress: Progress = lambda what, done, total: None
    ) -> Iterator[tuple[str, WeightSet, Tensor, Tensor]]:
        """Yields for each tensor that can be compared its name, the other set, the other
        set's tensor and the first set's, both on the device; in the order of the first
        set. What cannot be compared becomes a remark. A tensor of the first set is read
        once for all others."""
        for source in (self.first, *self.others):
            for words in source.damage:
                self.add_remark(source, None, "damaged", words)
        plan: dict[str, list[tuple[WeightSet, StoredTensor, StoredTensor]]] = {
            n: [] for n in self.first.tensors
        }
        for other in self.others:
            for name, theirs, ours in self.match_tensors(other):
                plan.setdefault(name, []).append((other, theirs, ours))
        for done, (name, partners) in enumerate(plan.items()):
            progress(name, done, len(plan))
            against = (
                self.read_tensor(self.first, name, partners[0][2]) if partners else None
            )
            for other, theirs, _ in partners if against is not None else ():
                of = self.read_tensor(other, name, theirs)
                if of is not None and against is not None:
                    yield name, other, of, against

    def match_tensors(
        self, other: WeightSet
    ) -> Iterator[tuple[str, StoredTensor, StoredTensor]]:
        """Yields (name, stored tensor of another set, that of the first) for each tensor
        that both have in one shape; nothing is read. Every other tensor becomes a remark:
        `missing`, `extra` or `reshaped`. No tensor is called missing or extra where the
        set that lacks it has damage, since a file that cannot be read may have it."""
        first = self.first
        for name, ours in first.tensors.items():
            aliases = [alias for alias, target in first.tied.items() if target == name]
            theirs = next(filter(None, map(other.find, (name, *aliases))), None)
            if theirs is None:
                if not other.damage:
                    self.add_remark(other, name, "missing", "is not there")
            elif theirs.shape != ours.shape:
                words = f"is {list(theirs.shape)}, and {list(ours.shape)} in {first.name}"
                self.add_remark(other, name, "reshaped", words)
            else:
                yield name, theirs, ours
        names = {*first.tensors, *first.tied}
        names |= {name for alias, name in other.tied.items() if alias in names}
        for name in other.tensors:
            if name not in names and not first.damage:
                self.add_remark(other, name, "extra", f"is not in {first.name}")

    def read_tensor(
        self, source: WeightSet, name: str, stored: StoredTensor
    ) -> Tensor | None:
        """Returns a tensor on the device. Returns None, after a remark, where it cannot
        be read or is not a plain array of floating-point values."""
        try:
            tensor = stored.read()
        except MeasurementError as error:
            self.add_remark(source, name, "damaged", f"cannot be read: {error.message}")
            return None
        if why := tensor_comparison.unfit_reason(tensor):
            self.add_remark(source, name, "not compared", why)
            return None
        return tensor.detach().to(self.device)  # a saved Parameter would record a graph

    def add_remark(
        self, source: WeightSet, name: str | None, what: records.Matter, words: str
    ) -> None:
        """Adds a remark to `remarks`, once: on the tensor `name`, or, for None, on the
        whole set."""
        remark = records.Remark(source=source.name, tensor=name, what=what, words=words)
        self.remarks[remark] = None


def kind_by_name(name: str) -> str:
    """Returns the kind of a weight by its name, one of KINDS; `other` for a name that no
    rule fits. It only groups rows."""
    parts = name.split(".")
    module = parts[-2] if len(parts) > 1 and _LEAF.match(parts[-1]) else parts[-1]
    if _NORM.search(module):
        return "norm"
    if name == "output.weight":  # of a Llama from Meta's own files
        return "head"
    return next((kind for kind, rule in _RULES.items() if rule.search(name)), "other")


def _group_rows(measured: Sequence[Measured]) -> Iterator[records.GroupRow]:
    """Yields for each set the row of all its tensors together (`all`), then one for each
    kind of KINDS that it has."""
    for of_set in grouped(measured, lambda pair: pair[0].of).values():
        for name in (records.ALL, *KINDS):
            group = [pair for pair in of_set if name in (records.ALL, pair[0].kind)]
            if group:
                yield records.GroupRow(name=name, **group_fields(group))


def group_fields(measured: Sequence[Measured]) -> Fields:
    """Returns the fields of a `Together` row, by name, of several tensors of one set
    compared with those of the first. A number is None where no tensor has it, and where
    it is beyond float64. `measured`: the row and sums of each tensor, at least one."""
    rows = [row for row, _ in measured]
    cast = _coarser_cast(rows)
    ratios = {
        r.tensor: x for r in rows if cast and (x := r.multiple_of_cast(cast)) is not None
    }
    changes = {r.tensor: r.max_abs for r in rows if r.max_abs is not None}
    largest = max(ratios, key=lambda name: ratios[name], default=None)
    most_changed = max(changes, key=lambda name: changes[name], default=None)
    median = statistics.median(ratios.values()) if ratios else None
    sums = tensor_comparison.pool_sums([sums for _, sums in measured])
    return {
        "of": rows[0].of,
        "against": rows[0].against,
        **tensor_comparison.row_numbers(sums, "mean_w1"),
        "tensors": len(rows),
        "identical": sum(row.is_equal for row in rows),
        "zeros": sum(row.zero for row in rows),
        "max_tensor": most_changed,
        "yardstick": cast,
        "times_median": median,
        "times_largest": None if largest is None else ratios[largest],
        "times_tensor": largest,
    }


def _coarser_cast(rows: Sequence[records.TensorRow]) -> str | None:
    """Returns the first of CASTS that is coarser than the formats in which more than half
    of the first set's tensors are stored; None where no cast is. `rows`: at least one."""
    stored = [FORMATS[row.stored_against].precision for row in rows]
    for name in tensor_comparison.CASTS:
        precision = FORMATS[name].precision
        if 2 * sum(precision < p for p in stored) > len(rows):
            return name
    return None


def _answer_sentences(
    groups: Sequence[records.GroupRow], remarks: Sequence[records.Remark]
) -> Iterator[str]:
    """Yields sentences on each set but the first. One is on its mean difference: unknown,
    0, or its multiple of what one cast of the same tensors would change. One is on W1,
    where the mean difference is not 0. Then sentences on what could not be compared,
    damage first."""
    for g in (g for g in groups if g.name == records.ALL):
        zeros = ZEROS.format(p=g) if g.zeros else ""
        if g.mean_abs is None:
            yield UNKNOWN.format(p=g, null=g.nulls.get("mean_abs"))
            continue
        if g.max_abs == 0:
            sentence = NOTHING if g.zeros == g.tensors else EQUAL
            elements = "" if g.zeros else f" ({g.elements:,})"
            compared = g.tensors - g.zeros
            yield sentence.format(p=g, tensors=compared, elements=elements, zeros=zeros)
            continue
        beside = NO_CAST if g.times_median is None else BESIDE
        ratios = {"median": ratio(g.times_median), "largest": ratio(g.times_largest)}
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
        casts = None if g.yardstick is None else g.multiple_of_cast(g.yardstick)
        cast = "" if casts is None else CAST.format(p=g, times=ratio(share * casts))
        blind = IS_BLIND if share < BLIND else ""
        yield BAGS.format(p=g, w1=si(g.mean_w1), share=si(share), cast=cast, blind=blind)
    yield from remark_sentences(remarks)


def remark_sentences(remarks: Sequence[records.Remark]) -> Iterator[str]:
    """Yields one sentence for each matter and set that has remarks, in the order of
    `Matter`, damage first: `Missing in b: h.0.weight is not there.` Of many remarks it
    names some."""
    by_matter = grouped(remarks, lambda r: r.what)
    for what in get_args(records.Matter):
        by_source = grouped(by_matter.get(what, ()), lambda r: r.source)
        for source, of_source in by_source.items():
            words = [f"{r.tensor} {r.words}" if r.tensor else r.words for r in of_source]
            yield f"{what.capitalize()} in {source}: {some(words)}."
