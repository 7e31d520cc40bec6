"""Where cases come from: a configuration's shapes, a model's forward pass, or tensors on disk. A
source hands its cases over one at a time and keeps none of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from numdev.cases import AttentionCase, CaseRef
from numdev.config import AuditRequest, CaseConfig, demo_checkpoint
from numdev.errors import MeasurementError, UsageError
from numdev.formats import dtype_of, format_named
from numdev.layouts import laid_out, transposed
from numdev.sources import pipeline as denoising
from numdev.sources.capture import capture, check_writes, handed_over
from numdev.sources.checkpoint import Checkpoint, open_checkpoint
from numdev.sources.dcp import is_distributed
from numdev.sources.files import FETCH, some
from numdev.sources.kinds import layer_of
from numdev.sources.loss import STORED, Upstream, drawn_from, find_upstream, with_drawn
from numdev.sources.pipeline import is_pipeline, not_audited, open_pipeline
from numdev.sources.projection import Projection, Projections
from numdev.sources.prompts import model_inputs
from numdev.sources.statedict import StateDict, open_state_dict
from numdev.sources.streaming import Streamed
from numdev.sources.synthetic import Shapes, check, draw, draw_mask
from numdev.sources.tensorfile import StoredCase, holds_cases, open_cases
from numdev.sources.watch import Layers, attention_modules, numbered
from numdev.system import System, free_memory

NO_GRAPH = "the model's own loss needs the graph of the whole model, which was streamed"
FOR_PIPELINES = ("denoise", "steps")
FOR_MODELS = ("model", "text", "tokenizer", "inputs", "generate", "stream", *FOR_PIPELINES)
"""Options that say what a model is and reads, and mean nothing where there is no model."""
NOT_FOR_PIPELINES = ("model", "tokenizer", "inputs", "generate", "stream")
FILLED = 0.8  # How much of the free memory a whole model may take; an audit needs some beside it


class Located(Protocol):
    """A case that can be had: its name is known, its tensors are made or taken when loaded."""

    @property
    def ref(self) -> CaseRef: ...
    @property
    def axes(self) -> dict[str, Any]: ...
    def load(self) -> AttentionCase: ...


class Source(Protocol):
    """An iterable of cases, which gives one at a time and keeps none."""

    notes: tuple[str, ...] = ()
    """What a user should be told; some is known only when all cases were met."""

    def describe(self) -> dict[str, Any]: ...
    def count(self) -> int: ...
    def __iter__(self) -> Iterator[Located]: ...
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's stored weights, where there is a model."""
        return iter(())


def open_source(request: AuditRequest, system: System, *, projections: bool = False) -> Source:
    """The request's source, opened and checked, with nothing measured. Its cases carry grad_out
    where the request is for gradients; with `projections`, those of a running model know the layer
    that made their queries. Raises UsageError for an option without meaning for this source."""
    gradients, target = bool(request.gradients), request.checkpoint or ""
    path = None if request.checkpoint == "demo" else Path(target)
    if request.cases:
        _refuse(request, ("layers", *FOR_MODELS), f"{request.target} draws its cases", "models")
        return ConfigSource(
            request.target, request.cases, (request.seed,), system, gradients=gradients
        )
    if path and is_pipeline(path):
        _refuse(request, NOT_FOR_PIPELINES, f"{target} is a diffusers pipeline", "other models")
        return PipelineSource(request, system, gradients=gradients)
    if path and holds_cases(path):
        _refuse(request, FOR_MODELS, f"{target} holds captured tensors", "models")
        return TensorFileSource(request, system, gradients=gradients)
    _refuse(request, FOR_PIPELINES, f"{target} is no diffusers pipeline", "pipelines")
    return CheckpointSource(request, system, gradients=gradients, projections=projections)


def _refuse(request: AuditRequest, options: Sequence[str], why: str, whose: str) -> None:
    for name in options:
        if getattr(request, name):
            raise UsageError(f"{why}, and {name!r} is for {whose}", hint=f"leave --{name} out")


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A case a configuration describes. Plain data until it is loaded, so any worker can."""

    config: CaseConfig
    seed: int
    source: str
    device: str
    gradients: bool = False  # whether the case carries grad_out

    @property
    def ref(self) -> CaseRef:
        name = self.config.name
        return CaseRef(case=name, source=self.source, module=name, seed=self.seed)

    @property
    def axes(self) -> dict[str, Any]:
        return dict(self.config.axes)

    def load(self) -> AttentionCase:
        """Draw it, in fp32, from the seed and the name of the grid's entry: cells that differ only
        in how attention is computed share their inputs."""
        config = self.config
        shapes = Shapes(
            batch=config.batch,
            heads=config.heads,
            kv_heads=config.kv_heads or config.heads,
            q_len=config.seq_len,
            kv_len=config.kv_len or config.seq_len,
            head_dim=config.head_dim,
            v_dim=config.v_dim or config.head_dim,
        )
        drawn = draw(
            config.inputs.name,
            shapes,
            seed=self.seed,
            options=config.inputs.options,
            label=config.entry,
            gradients=self.gradients,
        )
        q, k, v = laid_out(config.layout, *(x.to(self.device) for x in drawn))
        grad_out = None
        if drawn.grad_out is not None:
            grad_out = drawn.grad_out.to(self.device)
            if config.layout != "contiguous":  # the gradient of [batch, length, heads * dim]
                grad_out = transposed(grad_out)
        mask = None
        if config.mask is not None:
            mask = draw_mask(config.mask, shapes, seed=self.seed, label=config.entry)
        side = None if config.window is None else config.window - 1
        return AttentionCase(
            ref=self.ref,
            q=q,
            k=k,
            v=v,
            grad_out=grad_out,
            mask=None if mask is None else mask.to(self.device),
            scale=config.head_dim**-0.5 if config.scale is None else config.scale,
            is_causal=config.causal,
            causal_offset=config.causal_offset,
            window=None if side is None else (side, 0 if config.causal else side),
            softcap=config.softcap,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Captured:
    """A case out of a running model: here now, and gone when the model goes on."""

    case: AttentionCase
    projections: Projections | None = None

    @property
    def ref(self) -> CaseRef:
        return self.case.ref

    @property
    def axes(self) -> dict[str, Any]:
        return {}

    def load(self) -> AttentionCase:
        return self.case.detached()

    def projection(self) -> Projection:
        """The linear layer that made its queries. Raises MeasurementError where it is not known."""
        if self.projections is None:
            raise MeasurementError(f"{self.ref.case}: was captured without its projection")
        return self.projections.of(self.case)


@dataclass(frozen=True, kw_only=True)
class GivenUpstream:
    """A case out of a file that stores no grad_out, with a drawn one."""

    stored: StoredCase
    seed: int

    @property
    def ref(self) -> CaseRef:
        return self.stored.ref

    @property
    def axes(self) -> dict[str, Any]:
        return self.stored.axes

    def load(self) -> AttentionCase:
        return with_drawn(self.stored.load(), self.seed)


class ConfigSource(Source):
    """Cases drawn from a configuration's shapes, each with every seed; with grad_out if wanted."""

    def __init__(
        self,
        target: str,
        configs: Sequence[CaseConfig],
        seeds: Sequence[int],
        system: System,
        *,
        gradients: bool = False,
    ) -> None:
        for config in configs:
            check(config.inputs.name, config.inputs.options)
        self.target = target
        self.cases = [
            Drawn(config=c, seed=seed, source=target, device=system.device, gradients=gradients)
            for c in configs
            for seed in seeds
        ]

    def describe(self) -> dict[str, Any]:
        return {"config": self.target, "cases": len(self.cases)}

    def count(self) -> int:
        return len(self.cases)

    def __iter__(self) -> Iterator[Located]:
        return iter(self.cases)


class TensorFileSource(Source):
    """Cases on disk: a captured-tensor file, or a directory of them; with a drawn grad_out where
    `gradients` are asked for and none is stored."""

    def __init__(self, request: AuditRequest, system: System, *, gradients: bool = False) -> None:
        self.stored = open_cases(Path(request.checkpoint or ""), device=system.device)
        layers = Layers(request.layers)
        self.chosen = [case for case in self.stored.cases if layers.choose(case.ref.layer)]
        self.seed, self.gradients = request.seed, gradients
        self.origin = self._origin() if gradients else None
        self.notes = (f"Upstream gradients: {self.origin}.",) if self.origin else ()
        self.notes += layers.notes(request.target)

    def _origin(self) -> str:
        """Where the gradients of all calls come from."""
        count = Counter(
            (case.call.grad_out or STORED) if "grad_out" in case.tensors else drawn_from(self.seed)
            for case in self.chosen
        )
        if len(count) == 1:
            return next(iter(count))
        return "; ".join(f"{origin} ({n} of {count.total()} calls)" for origin, n in count.items())

    def describe(self) -> dict[str, Any]:
        captured = dict.fromkeys(case.ref.source for case in self.stored.cases)
        return {
            "tensors": self.stored.path.name,
            "sha256": self.stored.identity(),
            "cases": len(self.stored.cases),
            "captured_from": ", ".join(captured),
            "captured_with": dict(self.stored.versions),
            **({"grad_out": self.origin} if self.origin else {}),
        }

    def count(self) -> int:
        return len(self.chosen)

    def __iter__(self) -> Iterator[Located]:
        for case in self.chosen:
            lacks = self.gradients and "grad_out" not in case.tensors
            yield GivenUpstream(stored=case, seed=self.seed) if lacks else case


class CheckpointSource(Source):
    """The attention calls of a model: of one forward pass, a generation, or with `gradients` of one
    training step. Once it was iterated, `notes` says which calls the loss does not reach."""

    def __init__(
        self,
        request: AuditRequest,
        system: System,
        *,
        gradients: bool = False,
        projections: bool = False,
    ) -> None:
        if gradients and request.generate:
            raise UsageError(
                f"--generate {request.generate}: a generation has no backward pass",
                hint="leave --generate out, or audit it without gradients",
            )
        self.request, self.projections = request, projections
        opened, self.model, self.streamed, self.notes = open_model(request, system)
        self.checkpoint = opened.fitted(self.model)
        if request.generate:
            check_writes(self.model)
        self.prompt = model_inputs(request, self.checkpoint, self.model)
        self.modules = attention_modules(self.model)
        there = numbered(self.model)
        self.numbers = request.layers if there else None
        self.layers = request.layers or tuple((there or {}).values())
        if prefix := self.checkpoint.prefix:
            whose = "The model's weights are stored" if self.checkpoint.split else "All weights are"
            self.notes += (f"{whose} under names that begin with {prefix!r}; it was taken off.",)
        self.upstream = None
        if gradients:
            self.upstream = (
                Upstream(seed=request.seed, why_not=NO_GRAPH)
                if self.streamed
                else find_upstream(self.model, self.prompt.inputs, request.seed)
            )
            mode = ", in eval mode (no dropout)" if self.upstream.loss else ""
            self.notes += (f"Upstream gradients: {self.upstream.describe()}{mode}.",)

    def describe(self) -> dict[str, Any]:
        return {
            "checkpoint": self.checkpoint.name,
            **({"streamed": "layer by layer"} if self.streamed else {}),
            "sha256": self.checkpoint.identity(),
            **self.checkpoint.describe(),
            "architecture": type(self.model).__name__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "prompt": self.prompt.description,
            "prompt_sha256": self.prompt.digest,
            **({"grad_out": self.upstream.describe()} if self.upstream else {}),
        }

    def count(self) -> int:
        chosen = self.request.layers
        calls = len(self.modules) if chosen is None else min(len(chosen), len(self.modules))
        return calls * (1 + (self.request.generate or 0))

    def __iter__(self) -> Iterator[Located]:
        return handed_over(self._run)

    def _run(self, handle: Callable[[Located], None]) -> None:
        made = Projections() if self.projections else None
        layers = Layers(self.request.layers)

        def chosen(case: AttentionCase) -> None:
            if layers.choose(case.ref.layer):
                handle(Captured(case=case, projections=made))

        with ExitStack() as stack:
            if self.streamed:
                wanted = None if self.request.generate else self.layers
                stack.enter_context(self.streamed.running(wanted))
            if made:
                stack.enter_context(made.following(self.model))
            count = capture(
                self.model,
                self.prompt.inputs,
                chosen,
                source=self.checkpoint.name,
                generate=self.request.generate,
                upstream=self.upstream,
                on_met=made.met if made else lambda ref: None,
            )
        self.notes += layers.notes(self.request.target)
        if count.drawn:
            missed = f"{len(count.drawn)} of {count.calls} calls ({some(list(count.drawn))})"
            origin = drawn_from(self.request.seed)
            self.notes += (f"The loss has no usable gradient for {missed}; theirs is {origin}.",)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of the layers asked for, where these are numbered in names, and what is in none."""
        for name, tensor in self.checkpoint.tensors():
            layer = layer_of(name)
            if not self.numbers or not layer or int(layer.rpartition(".")[2]) in self.numbers:
                yield name, tensor


class PipelineSource(Source):
    """The attention calls of a diffusion pipeline's denoiser, at every denoising step or chosen
    ones; `gradients` are drawn, for a pipeline has no loss. `notes` names the parts that are not
    audited."""

    def __init__(self, request: AuditRequest, system: System, *, gradients: bool = False) -> None:
        self.request, self.gradients = request, gradients
        self.steps = request.denoise or denoising.STEPS
        if request.steps and max(request.steps) >= self.steps:
            last = max(request.steps)
            raise UsageError(
                f"--steps {last}: steps are counted from 0, and there are {self.steps}",
                hint="give a larger --denoise, or other --steps",
            )
        self.opened = open_pipeline(Path(request.checkpoint or ""))
        dtype = dtype_of(format_named(request.model_dtype))
        self.pipeline = self.opened.load(dtype=dtype, device=system.device)
        self.denoiser = getattr(self.pipeline, self.opened.denoiser)
        texts = [Path(text) for text in request.text]
        self.reading = denoising.read(
            self.pipeline, self.denoiser, texts, count=request.sequences, seed=request.seed
        )
        self.modules = attention_modules(self.denoiser)
        self.others = ", ".join(not_audited(self.pipeline, self.opened.denoiser))
        if self.others:
            audited = f"Audited: the {self.opened.denoiser}."
            self.notes += (f"{audited} Not audited: the attention of {self.others}.",)
        if gradients:
            self.notes += (f"Upstream gradients: {drawn_from(request.seed)}.",)

    def describe(self) -> dict[str, Any]:
        return {
            "checkpoint": self.opened.name,
            "sha256": self.opened.identity(),
            "pipeline": f"{self.opened.kind} of diffusers {version('diffusers')}",
            "architecture": type(self.denoiser).__name__,
            "parameters": sum(p.numel() for p in self.denoiser.parameters()),
            "scheduler": type(self.pipeline.scheduler).__name__,
            "denoising_steps": self.steps,
            "not_audited": self.others,
            "prompt": self.reading.description,
            "prompt_sha256": self.reading.digest,
            **({"grad_out": drawn_from(self.request.seed)} if self.gradients else {}),
        }

    def count(self) -> int:
        return len(self.modules) * len(self.request.steps or range(self.steps))

    def __iter__(self) -> Iterator[Located]:
        return handed_over(self._run)

    def _run(self, handle: Callable[[Located], None]) -> None:
        layers, seed = Layers(self.request.layers), self.request.seed

        def chosen(case: AttentionCase) -> None:
            if layers.choose(case.ref.layer):
                handle(Captured(case=with_drawn(case, seed) if self.gradients else case))

        denoising.denoise(
            self.pipeline,
            self.denoiser,
            self.reading,
            chosen,
            source=self.opened.name,
            steps=self.steps,
            chosen=self.request.steps,
            seed=seed,
        )
        self.notes += layers.notes(self.request.target)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.opened.tensors()


# --- the model of a request ---------------------------------------------------------------------


def open_model(
    request: AuditRequest, system: System
) -> tuple[Checkpoint | StateDict, nn.Module, Streamed | None, tuple[str, ...]]:
    """The request's weights, their model on the system's device, how it is streamed if it is (it is
    then run within `Streamed.running`), and what a user should be told at once. Raises UsageError
    for a request that cannot be met, MeasurementError for damaged weights, or another model's."""
    opened = open_weights(request)
    dtype = dtype_of(format_named(request.model_dtype))
    why = _why_streamed(request, opened, dtype, system)
    if why is None or isinstance(opened, StateDict):
        return opened, opened.load_model(dtype=dtype, device=system.device), None, ()
    streamed = Streamed(opened.deferred_model(dtype=dtype), device=system.device)
    note = f"The model's weights are streamed from disk, layer by layer{why}."
    return opened, streamed.model, streamed, (note,)


def open_weights(request: AuditRequest) -> Checkpoint | StateDict:
    """The request's weights, opened and not loaded. A directory says itself which model it is; a
    file or a bare distributed checkpoint needs a factory."""
    path = demo_checkpoint() if request.checkpoint == "demo" else Path(request.checkpoint or "")
    distributed = is_distributed(path)
    if path.is_dir() and not distributed and any(path.glob("*.distcp")):
        raise MeasurementError(
            f"{path}: .metadata is missing, the last file of a distributed checkpoint",
            hint=f"{FETCH}, or take one whose save has ended",
        )
    bare = distributed and not (path / "config.json").is_file()
    if path.is_file() or bare or (request.model and distributed):
        return open_state_dict(path, request.model)
    if request.model:
        raise UsageError(
            f"{request.checkpoint}: says itself which model it is, so --model has no place",
            hint="leave it out, or give the weight file instead of the directory",
        )
    return open_checkpoint(path)


def _why_streamed(
    request: AuditRequest, opened: Checkpoint | StateDict, dtype: torch.dtype, system: System
) -> str | None:
    """What a note adds on why the model is streamed; None where it is not."""
    if isinstance(opened, StateDict):
        if request.stream:
            raise UsageError(
                f"--stream: the factory {opened.factory} builds its model whole",
                hint="leave --stream out, or give a Hugging Face directory",
            )
        return None
    if request.stream is not None:
        return "" if request.stream else None
    if not opened.can_be_streamed:
        return None
    size = opened.size_in(dtype)
    for place, free in free_memory(system.device).items():
        if size > FILLED * free:
            why = f"they take {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB of {place} are free"
            break
    else:
        return None
    if request.gradients:
        raise UsageError(
            f"{opened.path}: its weights cannot be loaded whole ({why}), as the gradients of a "
            "model's own loss need them",
            hint="numdev audit --stream draws upstream gradients; --no-stream loads all the same",
        )
    return f", since {why}"
