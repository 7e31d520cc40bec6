"""`numdev train`: variants of a small network, trained in lockstep from the same start.

Seeds come one after the other, their variants side by side (`numdev.training.lockstep`).
Rows are journalled by seed and step; beside the journal stands the state to continue
from. What of it was measured after the state was saved is computed again, and not
recorded twice."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from numdev.audit.interrupt import deferred
from numdev.audit.isolation import fitting, threads
from numdev.audit.journal import Journal
from numdev.audit.plan import Planned, digest, header, recorded
from numdev.audit.run import Progress, provenance
from numdev.audit.timing import Stopwatch
from numdev.errors import UsageError
from numdev.kernels import find
from numdev.system import System
from numdev.training import checkpoints, figures
from numdev.training.config import TrainRequest, Variant
from numdev.training.data import Tokens, load
from numdev.training.lockstep import (
    PARTLY,
    STATE,
    Lockstep,
    Ran,
    deterministic,
    read_state,
)
from numdev.training.measure import number, with_spikes
from numdev.training.models import build
from numdev.training.report import (
    DistanceRow,
    OutputRow,
    TrainReport,
    TrainRow,
    TrainSummary,
    VariantRecord,
)
from numdev.training.words import answer


def train(
    request: TrainRequest,
    directory: Path,
    *,
    overwrite: bool = False,
    stop_after: float | None = None,
    command: str = "",
    progress: Progress = lambda what, done, total: None,
) -> TrainReport | None:
    """Train all variants with all seeds, journalling into `directory`; returns the
    report, which the caller writes. None when `stop_after` seconds were over before the
    end: what was reached is saved, and the same call continues.

    Raises UsageError for a kernel that cannot run here, and MeasurementError, naming the
    variant, for one that refuses or fails."""
    until = None if stop_after is None else time.monotonic() + stop_after
    model = request.model
    numbers = (
        request.batch * model.context * max(model.hidden, model.heads * model.context)
    )
    with deterministic(wanted=request.deterministic), threads(fitting(numbers)):
        system = System.probe(
            request.device
        )  # starts CUDA, when cuBLAS reads its setting
        watch = Stopwatch(system.device, ("training", "metrics", "saving", "other"))
        plan = list(_planned(request, system))
        device = torch.device(system.device)
        data = load(request.data, request.model, request.batch, device)
        described = {"config": request.target, **data.about}
        head = header(request.measured(), system, plan, described)
        with Journal.open(directory, head, overwrite=overwrite) as journal:
            if overwrite:
                shutil.rmtree(directory / checkpoints.FOLDER, ignore_errors=True)
            run = _Run(request, data, device, journal, progress, watch, until)
            if not run.finished():
                return None
            rows = tuple(with_spikes(journal.records("row", TrainRow)))
            distances = journal.records("distance", DistanceRow)
            outputs = journal.records("output", OutputRow)
            ran = {lane.variant: lane.ran for lane in journal.records("variant", Ran)}
        variants = [
            record_of(v, request.golden, ran.get(v.name)) for v in request.variants
        ]
        # On the meta device its weights would be drawn by references, which import
        # Dynamo.
        network = build(request.model, data.vocabulary, None)
        report = TrainReport(
            provenance=provenance(system, described, command),
            request=request.model_dump(mode="json"),
            summary=TrainSummary(
                answer=(),
                steps=request.steps,
                seeds=request.seeds,
                parameters=sum(p.numel() for p in network.parameters()),
                model=request.model.kind,
                data=described["prompt"],
                axis=figures.axis_of(request.recorded),
            ),
            variants=tuple(variants),
            rows=rows,
            distances=distances,
            outputs=outputs,
            figures=figures.of_run(variants, rows, distances),
            timings=watch.seconds(),
        )
        said = report.summary.model_copy(update={"answer": tuple(answer(report))})
        return report.model_copy(update={"summary": said})


@dataclass(eq=False)
class _Run:
    """One call of the study, until it is finished or the monotonic clock says `until`."""

    request: TrainRequest
    data: Tokens
    device: torch.device
    journal: Journal
    progress: Progress
    watch: Stopwatch
    until: float | None
    loss: float | None = None  # the last that was recorded of the golden run

    def __post_init__(self) -> None:
        self.state = self.journal.directory / STATE
        self.name = digest(self.journal.header)  # what a saved state must be of

    def finished(self) -> bool:
        """Train all seeds; False if time ran out before, with the state saved."""
        request = self.request
        for place in itertools.product(request.seeds, request.recorded):
            self.journal.visit(_key(*place))
        done = all(
            self.is_recorded(s, request.steps) or self.seed(s) for s in request.seeds
        )
        if done:
            for name in (STATE, PARTLY):  # the latter where a save was killed
                (self.journal.directory / name).unlink(missing_ok=True)
        return done

    def is_recorded(self, seed: int, step: int) -> bool:
        """Whether all that is measured up to a step is in the journal."""
        steps = [at for at in self.request.recorded if at <= step]
        return all(self.journal.visit(_key(seed, at)) for at in steps)

    def seed(self, seed: int) -> bool:
        """Train one seed to its end; False if time ran out before."""
        lanes = Lockstep(self.request, self.data, seed, self.device)
        state = read_state(self.state, self.name)
        if state and state["seed"] == seed and self.is_recorded(seed, state["step"]):
            lanes.load(state)
        else:
            self.record(lanes)
        try:
            with self.watch("training"):
                finished = self.steps(lanes)
        except KeyboardInterrupt:
            # A second Ctrl-C breaks a step off: then the state before it stands.
            if lanes.whole and self.is_recorded(seed, lanes.step):
                self.save(lanes)
            raise
        if not finished:
            self.save(lanes)
        return finished

    def steps(self, lanes: Lockstep) -> bool:
        """All steps that are left; where time runs out one at least, and False. A step
        with its rows is whole or was not made: an interrupt waits for its end."""
        saved = time.monotonic()
        self.tell(lanes)
        while lanes.step < self.request.steps:
            with deferred():
                lanes.advance()
                self.record(lanes)
            self.tell(lanes)
            over = self.until is not None and time.monotonic() >= self.until
            if over and lanes.step < self.request.steps:
                return False
            if time.monotonic() - saved >= self.request.save_every:
                self.save(lanes)
                saved = time.monotonic()
        return True

    def save(self, lanes: Lockstep) -> None:
        with self.watch("saving"):
            lanes.save(self.state, self.name)

    def record(self, lanes: Lockstep) -> None:
        """Measure and write what this step asks for, unless that is done."""
        self.checkpoint(lanes)
        key = _key(lanes.seed, lanes.step)
        if lanes.step in self.request.recorded and not self.journal.visit(key):
            with self.watch("metrics"):
                self.journal.append(key, lanes.measured())
                self.loss = number(lanes.golden.loss)

    def checkpoint(self, lanes: Lockstep) -> None:
        asked = self.request.checkpoints
        if asked is None or lanes.step not in asked.at(self.request.steps):
            return
        for lane in lanes.lanes:
            name = lane.variant.name
            if asked.variants is None or name in asked.variants:
                about = {
                    "variant": lane.variant.model_dump(mode="json"),
                    "seed": lanes.seed,
                    "step": lanes.step,
                    "loss": number(lane.loss),
                    "request": self.request.measured(),
                    "data": self.data.about,
                }
                where = checkpoints.place(
                    self.journal.directory, name, lanes.seed, lanes.step
                )
                checkpoints.write(
                    lane.network, self.request.model, self.data, where, about
                )

    def tell(self, lanes: Lockstep) -> None:
        """Progress; an interrupt arrives here."""
        steps, seeds = self.request.steps, self.request.seeds
        done = seeds.index(lanes.seed) * steps + lanes.step
        loss = "" if self.loss is None else f", loss {self.loss:.3f}"
        self.progress(f"seed {lanes.seed}{loss}", done, steps * len(seeds))


def record_of(variant: Variant, golden: Variant, ran: str | None) -> VariantRecord:
    """A variant as the report holds it, with what else differs from the golden run."""
    given = variant.model_dump(mode="json")
    differs = {n: given[n] for n in ("seed", "backward_kernel") if given[n]}
    theirs = golden.optimiser.model_dump()
    changed = {k: x for k, x in variant.optimiser.model_dump().items() if x != theirs[k]}
    if changed:
        differs["optimiser"] = changed
    return VariantRecord(
        name=variant.name,
        role=variant.role,
        kernel=variant.kernel.name,
        options=dict(variant.kernel.options),
        format=variant.format,
        attention_format=variant.attention_format or variant.format.removeprefix("pure "),
        times=variant.times if variant.role == "null_rounding" else None,
        ran=ran,
        differs=differs,
    )


def _planned(request: TrainRequest, system: System) -> Iterator[Planned]:
    """The variants' kernels, each with options that it has and on a machine that can run
    it."""
    for variant, choice in (
        (v, choice) for v in request.variants for choice in v.kernels
    ):
        kernel = find(choice.name)
        options = recorded(kernel.with_options(choice.options))
        if missing := kernel.missing(system):
            words = f"variant {variant.name}: {kernel.name} cannot run here: {missing}"
            raise UsageError(words, hint="leave it out, or choose another kernel")
        yield Planned(role="kernel", kernel=kernel, options=options)


def _key(seed: int, step: int) -> str:
    return digest({"seed": seed, "step": step})
