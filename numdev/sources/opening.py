"""Where cases come from: a configuration's shapes, a model's forward pass, or tensors on disk.

A source hands its cases over one at a time and keeps none of them, so memory does not grow with
their number. It knows nothing of kernels, formats or metrics.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch

from numdev.cases import AttentionCase, CaseRef
from numdev.config import AuditRequest, CaseConfig
from numdev.errors import MeasurementError, UsageError
from numdev.formats import dtype_of, format_named
from numdev.layouts import laid_out, transposed
from numdev.sources.files import some
from numdev.sources.kinds import layer_of
from numdev.sources.layers import Layers
from numdev.sources.loss import STORED, Upstream, drawn_from, find_upstream, with_drawn
from numdev.sources.masks import draw_mask
from numdev.sources.pipeline import is_pipeline
from numdev.sources.projection import Projection, Projections
from numdev.sources.synthetic import Shapes, check, draw
from numdev.sources.tensorfile import StoredCase, holds_cases, open_cases
from numdev.system import System

NO_GRAPH = "the model's own loss needs the graph of the whole model, which was streamed"
FOR_PIPELINES = ("denoise", "steps")
FOR_MODELS = ("model", "text", "tokenizer", "inputs", "generate", "stream", *FOR_PIPELINES)
"""Options that say what a model is and reads, and mean nothing where there is no model."""
NOT_FOR_PIPELINES = ("model", "tokenizer", "inputs", "generate", "stream")


class Located(Protocol):
    """A case that can be had: its name is known, its tensors are made or taken when loaded."""

    @property
    def ref(self) -> CaseRef: ...
    @property
    def axes(self) -> dict[str, Any]: ...
    def load(self) -> AttentionCase: ...


class Source(Protocol):
    """Where cases come from: an iterable, which gives one at a time and keeps none."""

    def describe(self) -> dict[str, Any]: ...
    def count(self) -> int: ...
    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should be told of it at once."""

    def __iter__(self) -> Iterator[Located]: ...
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]: ...


def open_source(request: AuditRequest, system: System, *, projections: bool = False) -> Source:
    """The request's source, opened and checked but with nothing measured.

    Its cases carry grad_out where the request is for gradients. With `projections`, those out of a
    running model know the linear layer that made their queries.
    """
    gradients = bool(request.gradients)
    if request.cases:
        _refuse(request, ("layers", *FOR_MODELS), f"{request.target} draws its cases")
        return ConfigSource(
            request.target, request.cases, (request.seed,), system, gradients=gradients
        )
    if request.checkpoint != "demo" and is_pipeline(Path(request.checkpoint or "")):
        return PipelineSource(request, system, gradients=gradients)
    if request.checkpoint != "demo" and holds_cases(Path(request.checkpoint or "")):
        return TensorFileSource(request, system, gradients=gradients)
    _refuse(
        request, FOR_PIPELINES, f"{request.checkpoint} is no diffusers pipeline", "for pipelines"
    )
    return CheckpointSource(request, system, gradients=gradients, projections=projections)


def _refuse(
    request: AuditRequest, options: tuple[str, ...], why: str, whose: str = "for models"
) -> None:
    """Raise UsageError for an option that has no meaning for this source."""
    for name in options:
        if getattr(request, name):
            raise UsageError(f"{why}, and {name!r} is {whose}", hint=f"leave --{name} out")


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A case a configuration describes. Plain data until it is loaded, so any worker can."""

    config: CaseConfig
    seed: int
    source: str
    device: str
    gradients: bool = False
    """Whether the case carries grad_out."""

    @property
    def ref(self) -> CaseRef:
        name = self.config.name
        return CaseRef(case=name, source=self.source, module=name, seed=self.seed)

    @property
    def axes(self) -> dict[str, Any]:
        return dict(self.config.axes)

    def load(self) -> AttentionCase:
        """Draw what the case has, in fp32, from the seed and the name of the grid's entry.

        So cells that differ only in how attention is computed share their inputs.
        """
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

    def projection(self) -> Projection:
        """The linear layer that made its queries. Raises MeasurementError, with the reason, where
        it is not known."""
        if self.projections is None:
            raise MeasurementError(f"{self.ref.case}: was captured without its projection")
        return self.projections.of(self.case)

    @property
    def axes(self) -> dict[str, Any]:
        return {}

    def load(self) -> AttentionCase:
        return self.case.detached()


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


class ConfigSource:
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
            Drawn(
                config=config, seed=seed, source=target, device=system.device, gradients=gradients
            )
            for config in configs
            for seed in seeds
        ]
        self.notes: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        return {"config": self.target, "cases": len(self.cases)}

    def count(self) -> int:
        return len(self.cases)

    def __iter__(self) -> Iterator[Located]:
        return iter(self.cases)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())


class TensorFileSource:
    """Cases that are on disk: a captured-tensor file, or a directory of them.

    With `gradients`, what stores no grad_out is given a drawn one.
    """

    def __init__(self, request: AuditRequest, system: System, *, gradients: bool = False) -> None:
        _refuse(request, FOR_MODELS, f"{request.checkpoint} holds captured tensors")
        self.stored = open_cases(Path(request.checkpoint or ""), device=system.device)
        layers = Layers(request.layers)
        self.chosen = [case for case in self.stored.cases if layers.choose(case.ref.layer)]
        self.seed, self.gradients = request.seed, gradients
        origin = self._origin()
        self.notes: tuple[str, ...] = (f"Upstream gradients: {origin}.",) if origin else ()
        self.notes += layers.notes(request.target)

    def _origin(self) -> str | None:
        """Where the gradients of all calls come from."""
        if not self.gradients:
            return None
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
            **({"grad_out": origin} if (origin := self._origin()) else {}),
        }

    def count(self) -> int:
        return len(self.chosen)

    def __iter__(self) -> Iterator[Located]:
        for case in self.chosen:
            lacks = self.gradients and "grad_out" not in case.tensors
            yield GivenUpstream(stored=case, seed=self.seed) if lacks else case

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())


class CheckpointSource:
    """The attention calls of a checkpoint's model: of one forward pass, or of a generation.

    With `gradients` of one training step: cases carry grad_out, from the model's own loss where it
    has one (`numdev.sources.loss`). Once it was iterated, `notes` says which calls that loss does
    not reach.
    """

    def __init__(
        self,
        request: AuditRequest,
        system: System,
        *,
        gradients: bool = False,
        projections: bool = False,
    ) -> None:
        from numdev.sources.generation import check as check_generates
        from numdev.sources.models import open_model
        from numdev.sources.reading import model_inputs
        from numdev.sources.watch import attention_modules, numbered

        if gradients and request.generate:
            raise UsageError(
                f"--generate {request.generate}: a generation has no backward pass",
                hint="leave --generate out, or audit it without gradients",
            )
        self.request, self.projections = request, projections
        opened = open_model(request, system)
        self.model = opened.model
        self.checkpoint = opened.checkpoint.fitted(self.model)
        self.streamed, self.notes = opened.streamed, opened.notes
        if request.generate:
            check_generates(self.model)
        self.prompt = model_inputs(request, self.checkpoint, self.model)
        self.modules = attention_modules(self.model)
        there = numbered(self.model)
        self.numbers = request.layers if there else None
        self.layers = request.layers or tuple((there or {}).values())
        prefix = self.checkpoint.describe().get("prefix_removed")
        whose = "The model's weights are stored" if self.checkpoint.split else "All weights are"
        removed = f"{whose} under names that begin with {prefix!r}; it was taken off."
        self.notes += (removed,) if prefix else ()
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
        from numdev.sources.capture import handed_over

        return handed_over(self._run)

    def _run(self, handle: Callable[[Located], None]) -> None:
        from numdev.sources.capture import capture

        made = Projections() if self.projections else None
        layers = Layers(self.request.layers)

        def chosen(case: AttentionCase) -> None:
            if layers.choose(case.ref.layer):
                handle(Captured(case=case, projections=made))

        with (
            self.streamed.running(None if self.request.generate else self.layers)
            if self.streamed
            else contextlib.nullcontext(),
            made.following(self.model) if made else contextlib.nullcontext(),
        ):
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
            self.notes += (
                f"The loss has no usable gradient for {missed}; theirs is "
                f"{drawn_from(self.request.seed)}.",
            )

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of the layers asked for, where these are numbered in names, and what is in none."""
        for name, tensor in self.checkpoint.tensors():
            layer = layer_of(name)
            if not self.numbers or not layer or int(layer.rpartition(".")[2]) in self.numbers:
                yield name, tensor


class PipelineSource:
    """The attention calls of a diffusion pipeline's denoiser, at every denoising step or at chosen
    ones. Other parts of it (text encoders, the VAE) are not audited, and `notes` names them.

    With `gradients`, cases carry a drawn grad_out: a pipeline has no loss.
    """

    def __init__(self, request: AuditRequest, system: System, *, gradients: bool = False) -> None:
        from numdev.sources import denoising
        from numdev.sources.pipeline import not_audited, open_pipeline
        from numdev.sources.watch import attention_modules

        where = request.checkpoint or ""
        _refuse(request, NOT_FOR_PIPELINES, f"{where} is a diffusers pipeline", "for other models")
        self.request, self.gradients = request, gradients
        self.steps = request.denoise or denoising.STEPS
        if request.steps and max(request.steps) >= self.steps:
            raise UsageError(
                f"--steps {max(request.steps)}: steps are counted from 0, and there are "
                f"{self.steps}",
                hint="give a larger --denoise, or other --steps",
            )
        self.opened = open_pipeline(Path(where))
        dtype = dtype_of(format_named(request.model_dtype))
        self.pipeline = self.opened.load(dtype=dtype, device=system.device)
        self.denoiser = getattr(self.pipeline, self.opened.denoiser)
        self.reading = denoising.read(
            self.pipeline,
            self.denoiser,
            [Path(text) for text in request.text],
            count=request.sequences,
            seed=request.seed,
        )
        self.modules = attention_modules(self.denoiser)
        self.others = not_audited(self.pipeline, self.opened.denoiser)
        self.notes: tuple[str, ...] = ()
        if self.others:
            self.notes += (
                f"Audited: the {self.opened.denoiser}. Not audited: the attention of "
                f"{', '.join(self.others)}.",
            )
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
            "not_audited": ", ".join(self.others),
            "prompt": self.reading.description,
            "prompt_sha256": self.reading.digest,
            **({"grad_out": drawn_from(self.request.seed)} if self.gradients else {}),
        }

    def count(self) -> int:
        return len(self.modules) * len(self.request.steps or range(self.steps))

    def __iter__(self) -> Iterator[Located]:
        from numdev.sources.capture import handed_over

        return handed_over(self._run)

    def _run(self, handle: Callable[[Located], None]) -> None:
        from numdev.sources.denoising import denoise

        layers = Layers(self.request.layers)

        def chosen(case: AttentionCase) -> None:
            if layers.choose(case.ref.layer):
                upstream = self.gradients
                handle(Captured(case=with_drawn(case, self.request.seed) if upstream else case))

        denoise(
            self.pipeline,
            self.denoiser,
            self.reading,
            chosen,
            source=self.opened.name,
            steps=self.steps,
            chosen=self.request.steps,
            seed=self.request.seed,
        )
        self.notes += layers.notes(self.request.target)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.opened.tensors()
