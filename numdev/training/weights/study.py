"""`numdev weights`: sets of weights, tensor by tensor, against the first of them.

One tensor at a time, in the order of the first set; the others are read by name. What is kept is a
row and a few sums for each tensor, so that memory is that of the largest tensor, however many there
are. Tensors that only one has, that changed shape or cannot be read become remarks, and the rest is
compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from numdev.audit.run import Progress, provenance
from numdev.audit.timing import stopwatch
from numdev.errors import MeasurementError, UsageError
from numdev.report import read
from numdev.sources.files import some
from numdev.sources.kinds import KINDS, kind_of, layer_of
from numdev.system import System
from numdev.training.weights.files import Stored, Weights, open_weights
from numdev.training.weights.pairs import (
    CastSums,
    Sums,
    cast_costs,
    compare,
    numbers,
    pooled,
    stored,
    unfit,
)
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
    _refuse_twins(targets[1:])
    request = {"targets": list(targets), "device": device}
    system = System.here(device)
    first, *others = [open_weights(target) for target in targets]
    claim(directory, request, overwrite=overwrite)
    watch = stopwatch(system.device)
    with watch("weights"):
        run = _Run(first=first, others=tuple(others), device=system.device, progress=progress)
        run.over()
        remarks = tuple(run.remarks)
        if not run.rows:
            raise _nothing(first, others, remarks)
        sources = tuple(_record(source) for source in (first, *others))
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


def _refuse_twins(targets: Sequence[str]) -> None:
    """Rows are told apart by the name of the set they are of."""
    for target in targets:
        if targets.count(target) > 1:
            raise UsageError(f"{target}: is given twice", hint="name every set once")


def claim(directory: Path, request: dict[str, Any], *, overwrite: bool) -> None:
    """Make the directory, or make sure that what is in it may be replaced, which happens when the
    new report is there: a comparison of the same request, with `overwrite` of any. Raises
    UsageError otherwise."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        held = sorted(p.name for p in directory.iterdir())
    except OSError as error:
        raise UsageError(
            f"{directory}: cannot write results there ({error.strerror})",
            hint="choose another --output",
        ) from error
    foreign = [name for name in held if name not in RESULTS]
    finished = "report.json" in held
    if foreign or (held and not finished and not overwrite):
        raise UsageError(
            f"{directory}: holds something else ({(foreign or held)[0]})",
            hint="choose an empty or a new --output",
        )
    there = read(directory) if finished else None
    if there is not None and there.kind != "weights":
        raise UsageError(
            f"{directory}: holds the report of numdev {there.kind}",
            hint="choose an empty or a new --output",
        )
    if there is not None and there.request != request and not overwrite:
        raise UsageError(
            f"{directory}: holds another comparison",
            hint="choose another --output, or --overwrite to start anew",
        )


@dataclass(kw_only=True)
class _Run:
    """One pass over the first set's tensors, and what comes of it."""

    first: Weights
    others: tuple[Weights, ...]
    device: str
    progress: Progress
    rows: list[TensorRow] = field(default_factory=list)
    sums: list[Sums] = field(default_factory=list)
    """Of each row."""
    remarks: dict[Remark, None] = field(default_factory=dict)
    """Each once: the first set is met again with every other."""

    def over(self) -> None:
        for source in (self.first, *self.others):
            for damage in source.damage:
                self._remark(source, None, "damaged", damage.words)
        todo = len(self.first.tensors)
        for done, (name, kept) in enumerate(self.first.tensors.items()):
            self.progress(name, done, todo)
            self._tensor(name, kept)
        for other in self.others:
            self._extra(other)

    def _tensor(self, name: str, kept: Stored) -> None:
        """One tensor of the first set beside the same of every other."""
        partners = [(o, found) for o in self.others if (found := self._partner(o, name, kept))]
        against = self._values(self.first, name, kept) if partners else None
        if against is None:
            return
        casts = cast_costs(against)
        for other, found in partners:
            of = self._values(other, name, found)
            if of is not None:
                self._compare(other, name, of, against, casts)

    def _partner(self, other: Weights, name: str, kept: Stored) -> Stored | None:
        """The tensor of this name and shape in another set; None, with a remark, where it has
        none."""
        found = other.find(name)
        if found is None and not _lost(other, name):
            found = self._tied(other, name, kept)
        if found is None:
            self._missing(other, name)
        elif found.shape != kept.shape:
            here, there = (list(x.shape) for x in (found, kept))
            self._remark(other, name, "reshaped", f"is {here}, and {there} in {self.first.name}")
        else:
            return found
        return None

    def _missing(self, source: Weights, name: str) -> None:
        if _lost(source, name):
            self._remark(source, name, "damaged", "was in a file that cannot be read")
        elif source.tensors:  # a set of which nothing can be read was said to be damaged
            unless = ", unless in the file that cannot be read" if source.damage else ""
            self._remark(source, name, "missing", f"is not there{unless}")

    def _tied(self, source: Weights, name: str, kept: Stored) -> Stored | None:
        """The embedding in place of an output head that a file leaves out, as Hugging Face's do
        where the two are tied."""
        if not name.endswith(HEADS):
            return None
        for its, found in source.tensors.items():
            if its.endswith(EMBEDDINGS) and found.shape == kept.shape:
                words = f"is not stored, and taken to be tied to {its}"
                self._remark(source, name, "tied", words)
                return found
        return None

    def _extra(self, other: Weights) -> None:
        """Tensors of another set that the first lacks."""
        known = {*self.first.tensors, *self.first.tied}
        also: dict[str, set[str]] = {}
        for alias, name in other.tied.items():
            also.setdefault(name, set()).add(alias)
        for name, found in other.tensors.items():
            if name in known or also.get(name, set()) & known:
                continue
            embedding = self._tied(self.first, name, found)
            if embedding is not None:
                self._pair(other, name, found, embedding)
            elif _lost(self.first, name):
                self._missing(self.first, name)
            else:
                self._remark(other, name, "extra", f"is not in {self.first.name}")

    def _pair(self, other: Weights, name: str, its: Stored, firsts: Stored) -> None:
        against = self._values(self.first, name, firsts)
        of = self._values(other, name, its) if against is not None else None
        if of is not None and against is not None:
            self._compare(other, name, of, against, cast_costs(against))

    def _values(self, source: Weights, name: str, kept: Stored) -> Tensor | None:
        """A tensor on the device; None, with a remark, where it has no values to measure."""
        try:
            found = kept.read()
        except MeasurementError as error:
            self._remark(source, name, "damaged", f"cannot be read: {error.message}")
            return None
        why = unfit(found)
        if why:
            self._remark(source, name, "not compared", why)
            return None
        if found.numel() == 0:
            self._remark(source, name, "empty", "holds no elements")
        return found.detach().to(self.device)  # a saved Parameter would record a graph

    def _compare(
        self,
        other: Weights,
        name: str,
        of: Tensor,
        against: Tensor,
        casts: dict[str, CastSums],
    ) -> None:
        sums = compare(of, against, casts)
        row = TensorRow(
            of=other.name,
            against=self.first.name,
            tensor=name,
            layer=layer_of(name),
            kind=kind_of(name),
            shape=tuple(against.shape),
            stored_of=stored(of),
            stored_against=stored(against),
            **numbers(sums),
        )
        for source, lost in ((other, row.nonfinite_of), (self.first, row.nonfinite_against)):
            if lost:
                words = f"has {lost} NaN or infinite elements of {row.elements}"
                self._remark(source, name, "not finite", words)
        self.rows.append(row)
        self.sums.append(sums)

    def _remark(self, source: Weights, name: str | None, what: Matter, words: str) -> None:
        self.remarks[Remark(source=source.name, tensor=name, what=what, words=words)] = None


def _lost(source: Weights, name: str) -> bool:
    """Whether the tensor is known to have been in a file that cannot be read."""
    return any(name in damage.tensors for damage in source.damage)


def _groups(rows: Sequence[TensorRow], sums: Sequence[Sums]) -> Iterator[GroupRow]:
    """For each set: all together, then by kind, then by layer in the order of the file."""
    for of in dict.fromkeys(row.of for row in rows):
        these = [(row, part) for row, part in zip(rows, sums, strict=True) if row.of == of]
        yield _group("all", "all", these)
        for kind in KINDS:
            if chosen := [pair for pair in these if pair[0].kind == kind]:
                yield _group("kind", kind, chosen)
        for layer in dict.fromkeys(row.layer for row, _ in these if row.layer is not None):
            yield _group("layer", layer, [pair for pair in these if pair[0].layer == layer])


def _group(group: Any, name: str, these: Sequence[tuple[TensorRow, Sums]]) -> GroupRow:
    found = numbers(pooled([part for _, part in these]))
    means = {f"mean_{key}": found.pop(key) for key in ("w1", "spread", "w1_rel")}
    nulls = {f"mean_{k}" if f"mean_{k}" in means else k: v for k, v in found.pop("nulls").items()}
    row = these[0][0]
    return GroupRow(
        of=row.of,
        against=row.against,
        group=group,
        name=name,
        tensors=len(these),
        nulls=nulls,
        **found,
        **means,
    )


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


def _nothing(
    first: Weights, others: Sequence[Weights], remarks: Sequence[Remark]
) -> MeasurementError:
    """Why no tensor could be compared."""
    damaged = next((r for r in remarks if r.what == "damaged"), None)
    unfit = next((r for r in remarks if r.what == "not compared"), None)
    if found := damaged or unfit:
        named = f"{found.source}: {found.tensor} " if found is unfit else ""
        return MeasurementError(f"{named}{found.words}", hint="nothing is left to compare")
    names = "; ".join(f"{w.name} has {some(list(w.tensors)) or 'none'}" for w in (first, *others))
    return MeasurementError(f"no tensor could be compared: {names}", hint="are these one model's?")
