"""`numdev weights`: sets of weights, tensor by tensor, against the first of them.

One tensor at a time, in the order of the first set; the others are read by name. What is kept is a
row and a few sums for each tensor, so that memory is that of the largest tensor, however many there
are. Tensors that only one has, that changed shape or cannot be read become remarks, and the rest is
compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from numdev.audit.run import Progress, provenance
from numdev.audit.timing import stopwatch
from numdev.errors import MeasurementError, UsageError
from numdev.report.io import claim
from numdev.sources.files import some
from numdev.sources.kinds import KINDS, kind_of, layer_of
from numdev.system import System
from numdev.training.weights import pairs
from numdev.training.weights.files import Stored, Weights, open_weights
from numdev.training.weights.report import (
    GroupRow,
    Matter,
    Remark,
    SourceRecord,
    TensorRow,
    WeightsReport,
)
from numdev.training.weights.summary import summarise

RESULTS = ("report.json", "report.html", "rows.csv", "groups.csv", "remarks.csv")
HEADS = ("lm_head.weight", "embed_out.weight", "decoder.weight", "proj_out.weight")
EMBEDDINGS = (
    *("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight"),
    *("tok_embeddings.weight", "shared.weight"),
)
"""Ends of the names of output heads, and of the embeddings that they are commonly tied to."""


def weights(
    targets: Sequence[str],
    directory: Path,
    *,
    device: str = "auto",
    overwrite: bool = False,
    command: str = "",
    progress: Progress = lambda what, done, total: None,
) -> WeightsReport:
    """Compare every set of weights with the first, into `directory`; returns the report, which the
    caller writes.

    Raises UsageError where one is not there or the directory is taken, before anything is read, and
    MeasurementError where no tensor could be compared.
    """
    for target in targets[1:]:  # rows are told apart by the name of the set they are of
        if targets[1:].count(target) > 1:
            raise UsageError(f"{target}: is given twice", hint="name every set once")
    request = {"targets": list(targets), "device": device}
    system = System.here(device)
    opened = [open_weights(target) for target in targets]
    _claim(directory, request, overwrite=overwrite)
    watch = stopwatch(system.device)
    with watch("weights"):
        run = _Run(opened, system.device)
        run.over(progress)
        remarks = tuple(run.remarks)
        if not run.rows:
            raise _nothing(opened, remarks)
        sources = tuple(map(_record, opened))
    groups = tuple(_groups(run.rows, run.sums))
    return WeightsReport(
        provenance=provenance(system, {"checkpoint": ", ".join(targets)}, command),
        request=request,
        summary=summarise(run.rows, groups, remarks, sources),
        sources=sources,
        rows=tuple(run.rows),
        groups=groups,
        remarks=remarks,
        timings=watch.seconds(),
    )


def _claim(directory: Path, request: dict[str, Any], *, overwrite: bool) -> None:
    """Make the directory, or make sure that all in it is this command's and may be replaced."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        held = sorted(p.name for p in directory.iterdir())
    except OSError as error:
        raise UsageError(
            f"{directory}: cannot write results there ({error.strerror})",
            hint="choose another --output",
        ) from error
    foreign = [name for name in held if name not in RESULTS]
    unfinished = held and "report.json" not in held and not overwrite
    if foreign or unfinished:
        raise UsageError(
            f"{directory}: holds something else ({(foreign or held)[0]})",
            hint="choose an empty or a new --output",
        )
    claim(directory, "weights", request, overwrite=overwrite)


class _Run:
    """One pass over the first set's tensors, and what comes of it."""

    def __init__(self, opened: Sequence[Weights], device: str) -> None:
        self.first, *self.others = opened
        self.device = device
        self.rows: list[TensorRow] = []
        self.sums: list[pairs.Sums] = []
        """Of each row."""
        self.remarks: dict[Remark, None] = {}
        """Each once: the first set is met again with every other."""

    def over(self, progress: Progress) -> None:
        for source in (self.first, *self.others):
            for damage in source.damage:
                self.remark(source, None, "damaged", damage.words)
        for done, (name, kept) in enumerate(self.first.tensors.items()):
            progress(name, done, len(self.first.tensors))
            partners = [(o, found) for o in self.others if (found := self.partner(o, name, kept))]
            self.compare(name, kept, partners)
        for other in self.others:
            self.extra(other)

    def partner(self, other: Weights, name: str, kept: Stored) -> Stored | None:
        """The tensor of this name and shape in another set; None, with a remark, where it has
        none."""
        found = other.find(name)
        if found is None and not other.is_lost(name):
            found = self.tied(other, name, kept)
        if found is None:
            self.missing(other, name)
        elif found.shape != kept.shape:
            here, there = (list(x.shape) for x in (found, kept))
            self.remark(other, name, "reshaped", f"is {here}, and {there} in {self.first.name}")
            return None
        return found

    def missing(self, source: Weights, name: str) -> None:
        if source.is_lost(name):
            self.remark(source, name, "damaged", "was in a file that cannot be read")
        elif source.tensors:  # a set of which nothing can be read was said to be damaged
            unless = ", unless in the file that cannot be read" if source.damage else ""
            self.remark(source, name, "missing", f"is not there{unless}")

    def tied(self, source: Weights, name: str, kept: Stored) -> Stored | None:
        """The embedding in place of an output head that a file leaves out, as Hugging Face's do
        where the two are tied."""
        for its, found in source.tensors.items() if name.endswith(HEADS) else ():
            if its.endswith(EMBEDDINGS) and found.shape == kept.shape:
                self.remark(source, name, "tied", f"is not stored, and taken to be tied to {its}")
                return found
        return None

    def extra(self, other: Weights) -> None:
        """Tensors of another set that the first lacks."""
        known = {*self.first.tensors, *self.first.tied}
        also = {name for alias, name in other.tied.items() if alias in known}
        for name, found in other.tensors.items():
            if name in known or name in also:
                continue
            embedding = self.tied(self.first, name, found)
            if embedding is not None:
                self.compare(name, embedding, [(other, found)])
            elif self.first.is_lost(name):
                self.missing(self.first, name)
            else:
                self.remark(other, name, "extra", f"is not in {self.first.name}")

    def compare(self, name: str, kept: Stored, partners: list[tuple[Weights, Stored]]) -> None:
        """One tensor of the first set beside the same of others."""
        against = self.values(self.first, name, kept) if partners else None
        if against is None:
            return
        casts = pairs.cast_costs(against)
        for other, found in partners:
            of = self.values(other, name, found)
            if of is not None:
                self.row(name, other, of, against, pairs.compare(of, against, casts))

    def values(self, source: Weights, name: str, kept: Stored) -> Tensor | None:
        """A tensor on the device; None, with a remark, where it has no values to measure."""
        try:
            found = kept.read()
        except MeasurementError as error:
            self.remark(source, name, "damaged", f"cannot be read: {error.message}")
            return None
        why = pairs.unfit(found)
        if why:
            self.remark(source, name, "not compared", why)
            return None
        if found.numel() == 0:
            self.remark(source, name, "empty", "holds no elements")
        return found.detach().to(self.device)  # a saved Parameter would record a graph

    def row(self, name: str, other: Weights, of: Tensor, against: Tensor, sums: pairs.Sums) -> None:
        row = TensorRow(
            of=other.name,
            against=self.first.name,
            tensor=name,
            layer=layer_of(name),
            kind=kind_of(name),
            shape=tuple(against.shape),
            stored_of=pairs.stored(of),
            stored_against=pairs.stored(against),
            **pairs.numbers(sums),
        )
        for source, lost in ((other, row.nonfinite_of), (self.first, row.nonfinite_against)):
            if lost:
                words = f"has {lost} NaN or infinite elements of {row.elements}"
                self.remark(source, name, "not finite", words)
        self.rows.append(row)
        self.sums.append(sums)

    def remark(self, source: Weights, name: str | None, what: Matter, words: str) -> None:
        self.remarks[Remark(source=source.name, tensor=name, what=what, words=words)] = None


def _groups(rows: Sequence[TensorRow], sums: Sequence[pairs.Sums]) -> Iterator[GroupRow]:
    """For each set: all together, then by kind, then by layer in the order of the file."""
    for of in dict.fromkeys(row.of for row in rows):
        parts: dict[tuple[str, str], list[pairs.Sums]] = {("all", "all"): []}
        parts |= {("kind", kind): [] for kind in KINDS}
        for row, part in zip(rows, sums, strict=True):
            if row.of == of:
                for group in (("all", "all"), ("kind", row.kind), ("layer", row.layer)):
                    if group[1] is not None:
                        parts.setdefault((group[0], group[1]), []).append(part)
        for (kind, name), these in parts.items():
            if these:
                found = pairs.numbers(pairs.pooled(these))
                means = {key: f"mean_{key}" for key in ("w1", "spread", "w1_rel")}
                nulls = {means.get(key, key): why for key, why in found.pop("nulls").items()}
                found = {means.get(key, key): value for key, value in found.items()}
                place: Any = {"of": of, "against": rows[0].against, "group": kind, "name": name}
                yield GroupRow(**place, tensors=len(these), nulls=nulls, **found)


def _record(source: Weights) -> SourceRecord:
    return SourceRecord(
        name=source.name,
        files=tuple(file.name for file in source.files),
        tensors=len(source.tensors),
        elements=sum(math.prod(kept.shape) for kept in source.tensors.values()),
        sha256=source.identity(),
        prefix_removed=source.prefix,
        tied=dict(source.tied),
    )


def _nothing(opened: Sequence[Weights], remarks: Sequence[Remark]) -> MeasurementError:
    """Why no tensor could be compared."""
    said = [r.words for r in remarks if r.what == "damaged"]
    said += [f"{r.source}: {r.tensor} {r.words}" for r in remarks if r.what == "not compared"]
    if said:
        return MeasurementError(said[0], hint="nothing is left to compare")
    names = "; ".join(f"{w.name} has {some(list(w.tensors)) or 'none'}" for w in opened)
    return MeasurementError(f"no tensor could be compared: {names}", hint="are these one model's?")
