"""`numdev train`: variants of a small network, trained in lockstep from the same start.

Seeds come one after the other, their variants side by side
(`numdev.studies.training.side_by_side_training`). Rows are journalled by seed and step;
beside the journal is the state to continue from. Steps that were measured after the state
was saved are computed again, and not recorded twice."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from numdev.errors import UsageError
from numdev.kernels import find
from numdev.report import Provenance
from numdev.studies.audit.ctrl_c import deferred
from numdev.studies.audit.isolation import fitting_threads
from numdev.studies.audit.journal import Journal
from numdev.studies.audit.plan import Planned, digest, header, recorded
from numdev.studies.audit.run import Progress, provenance
from numdev.studies.audit.section_timing import Stopwatch
from numdev.studies.training import figures, hugging_face_writing
from numdev.studies.training.answer_sentences import answer_sentences
from numdev.studies.training.config import ResolvedVariant, TrainRequest
from numdev.studies.training.measure import finite_or_none, with_spikes
from numdev.studies.training.networks import build_network
from numdev.studies.training.report import (
    AttentionOutputRow,
    DistanceRow,
    TrainReport,
    TrainRow,
    TrainSummary,
    VariantRecord,
)
from numdev.studies.training.side_by_side_training import (
    PARTLY,
    STATE,
    Lockstep,
    Ran,
    deterministic,
    read_state,
)
from numdev.studies.training.token_batches import Tokens, load_tokens
from numdev.system import System


def train(
    request: TrainRequest,
    directory: Path,
    *,
    overwrite: bool = False,
    stop_after: float | None = None,
    command: str = "",
    progress: Progress = lambda what, done, total: None,
) -> TrainReport | None:
    """Trains all variants with all seeds and returns the report, which the caller writes.
    What is measured goes to a journal in `directory`, which is made, beside the state to
    continue from: a call with the same request, system, kernels and text continues there.
    `overwrite` replaces a damaged journal or any other, and removes all checkpoints in
    `directory`. Returns None where `stop_after` seconds are over before the last step;
    the state is saved then. `command`: as the report states it; `progress`: called with
    words, steps that are done and all steps, over all seeds.

    Raises UsageError for a kernel that cannot run here, for text that cannot be read or
    is too short, for a damaged or another journal without `overwrite`, and for other
    files in `directory`. Raises MeasurementError, which names the variant, for a kernel
    that refuses or fails, and where the state or weights cannot be written; OSError where
    a checkpoint's other files cannot be."""
    until = None if stop_after is None else time.monotonic() + stop_after
    model = request.model
    width = max(model.hidden, model.heads * model.context)
    numbers = request.batch * model.context * width
    with deterministic(wanted=request.deterministic), fitting_threads(numbers):
        system = System.probe(
            request.device
        )  # starts CUDA, when cuBLAS reads its setting
        watch = Stopwatch(system.device, ("training", "metrics", "saving", "other"))
        plan = list(_planned_kernels(request, system))
        device = torch.device(system.device)
        data = load_tokens(request.data, request.model, request.batch, device)
        described = {"config": request.target, **data.about}
        head = header(request.fields_of_numbers(), system, plan, described)
        with Journal.open(directory, head, overwrite=overwrite) as journal:
            if overwrite:
                shutil.rmtree(directory / hugging_face_writing.FOLDER, ignore_errors=True)
            run = _TrainingRun(
                request, data, device, directory, journal, progress, watch, until
            )
            if not run.train_seeds():
                return None
        report = _report_without_answer(
            request,
            data,
            journal,
            provenance=provenance(system, described, command),
            timings=watch.seconds(),
        )
        sentences = tuple(answer_sentences(report))
        summary = report.summary.model_copy(update={"answer": sentences})
        return report.model_copy(update={"summary": summary})


def _report_without_answer(
    request: TrainRequest,
    data: Tokens,
    journal: Journal,
    *,
    provenance: Provenance,
    timings: dict[str, float],
) -> TrainReport:
    """Returns the report of all that is in the journal, its answer left empty."""
    rows = tuple(with_spikes(journal.records("row", TrainRow)))
    distances = journal.records("distance", DistanceRow)
    ran = {lane.variant: lane.ran for lane in journal.records("variant", Ran)}
    variants = [
        variant_record(v, request.golden, ran.get(v.name)) for v in request.variants
    ]
    # On the meta device its weights would be drawn by references, which import
    # Dynamo.
    network = build_network(request.model, data.vocabulary, None)
    summary = TrainSummary(
        answer=(),
        steps=request.steps,
        seeds=request.seeds,
        parameters=sum(p.numel() for p in network.parameters()),
        model=request.model.kind,
        data=data.about["prompt"],
        axis=figures.step_axis(request.recorded),
    )
    return TrainReport(
        provenance=provenance,
        request=request.model_dump(mode="json"),
        summary=summary,
        variants=tuple(variants),
        rows=rows,
        distances=distances,
        outputs=journal.records("output", AttentionOutputRow),
        figures=figures.run_figures(variants, rows, distances),
        timings=timings,
    )


@dataclass(eq=False)
class _TrainingRun:
    """One call of the study: it trains until the last seed is finished, or until the
    monotonic clock is past `until`, in seconds (None: no limit)."""

    request: TrainRequest
    data: Tokens
    device: torch.device
    directory: Path
    journal: Journal
    progress: Progress
    watch: Stopwatch
    until: float | None
    loss: float | None = None  # the golden run's, at the last recorded step

    def __post_init__(self) -> None:
        self.state = self.directory / STATE
        self.name = digest(self.journal.header)  # identifies states saved by this run

    def train_seeds(self) -> bool:
        """Trains all seeds, one after the other; returns False if time ran out before the
        end, with the state saved. Seeds of which all is in the journal are passed over.
        Removes the saved state at the end."""
        request = self.request
        for seed, step in itertools.product(request.seeds, request.recorded):
            self.journal.visit(_journal_key(seed, step))
        done = all(
            self.is_recorded(seed, request.steps) or self.train_seed(seed)
            for seed in request.seeds
        )
        if done:
            for name in (STATE, PARTLY):  # the latter where a save was killed
                (self.directory / name).unlink(missing_ok=True)
        return done

    def is_recorded(self, seed: int, step: int) -> bool:
        """Whether every recorded step of a seed, up to `step`, is in the journal."""
        steps = [at for at in self.request.recorded if at <= step]
        return all(self.journal.visit(_journal_key(seed, at)) for at in steps)

    def train_seed(self, seed: int) -> bool:
        """Trains one seed to its last step; returns False if time ran out before, with
        the state saved. Begins from the saved state where that is of this seed and all
        its steps are in the journal, else at step 0. An interrupt is raised again. After
        step 0 was recorded it saves the state first, unless a second one broke a step
        off."""
        lanes = Lockstep(self.request, self.data, seed, self.device)
        state = read_state(self.state, self.name)
        if state and state["seed"] == seed and self.is_recorded(seed, state["step"]):
            lanes.load_state(state)
        else:
            self.record_step(lanes)
        try:
            with self.watch("training"):
                finished = self.take_steps(lanes)
        except KeyboardInterrupt:
            # A second Ctrl-C breaks a step off: then the state before it stands.
            if lanes.whole and self.is_recorded(seed, lanes.step):
                self.save_state(lanes)
            raise
        if not finished:
            self.save_state(lanes)
        return finished

    def take_steps(self, lanes: Lockstep) -> bool:
        """Takes the steps that are left. Returns True after the last one, False where
        time runs out before it, after one step or more. Reports progress at the beginning
        and after each step. Saves the state after the first step that ends `save_every`
        seconds or more after the last save. A step is recorded whole or not at all: an
        interrupt waits for its end."""
        saved = time.monotonic()
        self.report_progress(lanes)
        while lanes.step < self.request.steps:
            with deferred():
                lanes.advance()
                self.record_step(lanes)
            self.report_progress(lanes)
            over = self.until is not None and time.monotonic() >= self.until
            if over and lanes.step < self.request.steps:
                return False
            if time.monotonic() - saved >= self.request.save_every:
                self.save_state(lanes)
                saved = time.monotonic()
        return True

    def save_state(self, lanes: Lockstep) -> None:
        """Writes the state from which a later call continues. Raises MeasurementError
        where it cannot be written."""
        with self.watch("saving"):
            lanes.save_state(self.state, self.name)

    def record_step(self, lanes: Lockstep) -> None:
        """Writes the checkpoints of this step, if the request asks for them, and journals
        its rows, if it is a recorded step. Rows that are in the journal are not measured
        again."""
        self.write_checkpoints(lanes)
        key = _journal_key(lanes.seed, lanes.step)
        if lanes.step in self.request.recorded and not self.journal.visit(key):
            with self.watch("metrics"):
                self.journal.append(key, lanes.measure_step())
                self.loss = finite_or_none(lanes.golden.loss)

    def write_checkpoints(self, lanes: Lockstep) -> None:
        """Writes the weights of this step, of each variant whose checkpoints the request
        asks for; does nothing at other steps. Raises what `write_checkpoint` raises."""
        chosen = self.request.checkpoints
        if chosen is None or lanes.step not in chosen.steps_to_write(self.request.steps):
            return
        for lane in lanes.lanes:
            name = lane.variant.name
            if chosen.variants is None or name in chosen.variants:
                about = {
                    "variant": lane.variant.model_dump(mode="json"),
                    "seed": lanes.seed,
                    "step": lanes.step,
                    "loss": finite_or_none(lane.loss),
                    "request": self.request.fields_of_numbers(),
                    "data": self.data.about,
                }
                path = hugging_face_writing.checkpoint_folder(
                    self.directory, name, lanes.seed, lanes.step
                )
                hugging_face_writing.write_checkpoint(
                    lane.network, self.request.model, self.data, path, about
                )

    def report_progress(self, lanes: Lockstep) -> None:
        """Reports progress as `seed 0, loss 3.142`, with the golden run's loss at the
        last step measured by this call; `seed 0` alone where that is unknown or not
        finite. An interrupt that `deferred` put off is raised here."""
        steps, seeds = self.request.steps, self.request.seeds
        done = seeds.index(lanes.seed) * steps + lanes.step
        loss = "" if self.loss is None else f", loss {self.loss:.3f}"
        self.progress(f"seed {lanes.seed}{loss}", done, steps * len(seeds))


def variant_record(
    variant: ResolvedVariant, golden: ResolvedVariant, ran: str | None
) -> VariantRecord:
    """Returns a variant's record. `differs`: its seed where it is not 0, the kernel of
    its gradients where it has one, and settings of its optimiser that are not the golden
    run's. `ran`: what the kernel reported; None where that is unknown."""
    fields = variant.model_dump(mode="json")
    differs = {n: fields[n] for n in ("seed", "backward_kernel") if fields[n]}
    usual = golden.optimiser.model_dump()
    changed = {k: x for k, x in variant.optimiser.model_dump().items() if x != usual[k]}
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


def _planned_kernels(request: TrainRequest, system: System) -> Iterator[Planned]:
    """Yields the kernels of all variants, each with its options, gradients' kernels
    behind attention's. Raises UsageError for a name that no kernel has, for an option
    that a kernel has not, and for a kernel that cannot run here."""
    for variant in request.variants:
        for choice in variant.kernels:
            kernel = find(choice.name)
            options = recorded(kernel.with_options(choice.options))
            if missing := kernel.missing(system):
                what = f"variant {variant.name}: {kernel.name} cannot run here: {missing}"
                raise UsageError(what, hint="leave it out, or choose another kernel")
            yield Planned(role="kernel", kernel=kernel, options=options)


def _journal_key(seed: int, step: int) -> str:
    """Returns the journal's key of a step of a seed, a digest."""
    return digest({"seed": seed, "step": step})
