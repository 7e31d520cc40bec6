"""Sources hand cases over one at a time and keep none: shapes, a model's run, tensors on
disk."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from numdev.cases import AttentionCase, CaseRef, expect_values, laid_out, transposed
from numdev.errors import UsageError
from numdev.formats import dtype_of, format_named
from numdev.request_models import AuditRequest, CaseConfig, demo_checkpoint
from numdev.sources import capture as capturing
from numdev.sources import checkpoint as stored
from numdev.sources.captured_calls import holds_cases, open_cases
from numdev.sources.containers import container_at
from numdev.sources.diffusers_pipeline import PipelineSource, is_pipeline
from numdev.sources.distributed_checkpoint import refuse_unfinished
from numdev.sources.input_regimes import Draws, Shapes, checked_regime, draw, draw_mask
from numdev.sources.prompts import Prompt, model_inputs
from numdev.sources.query_projection import Projections
from numdev.sources.tensor_files import some
from numdev.sources.unaudited_mixers import mixers_in_words
from numdev.sources.upstream_gradients import (
    Upstream,
    drawn_origin,
    find_upstream,
    with_drawn_gradient,
)
from numdev.system import System

# Options that say what a model is and reads, and mean nothing where there is none of that
# kind.
FOR_PIPELINES: tuple[str, ...] = ("denoise", "steps")
NOT_FOR_PIPELINES: tuple[str, ...] = (
    "model",
    "tokenizer",
    "inputs",
    "generate",
    "stream",
)
FOR_MODELS: tuple[str, ...] = ("text", *NOT_FOR_PIPELINES, *FOR_PIPELINES)
# In an order, since the first that is set is named
FOR_CALLS: tuple[str, ...] = (*FOR_MODELS, "model_dtype", "length", "sequences")
FOR_CHECKPOINTS = tuple(name for name in FOR_CALLS if name != "generate")


class Located(Protocol):
    """A case whose name is known before its tensors: `ref` names it, `axes` is its place
    on a grid (empty without one), and `load()` makes or reads its tensors."""

    @property
    def ref(self) -> CaseRef:
        """Returns the name of the case."""

    @property
    def axes(self) -> dict[str, object]:
        """Returns the case's place on a grid, by the names of the axes; empty without a
        grid."""

    def load(self) -> AttentionCase:
        """Returns the case with its tensors. One out of a running model can be loaded
        only until the next case is asked for."""


class Source(Protocol):
    """An iterable of cases, which gives one at a time and keeps none of their tensors."""

    # For the user; some are known only when all cases were met
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()  # what a report says of the inputs
    cases: Sequence[Located] = ()  # those that are known before a model runs

    def describe(self) -> dict[str, object]:
        """Returns what a report says of the source, by the report's field names."""

    def count(self) -> int:
        """Returns how many cases there will be, an estimate where a model has to run
        first."""
        return len(self.cases)

    def __iter__(self) -> Iterator[Located]:
        return iter(self.cases)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields name and tensor of the model's stored weights; nothing where there is no
        model."""
        return iter(())


def open_source(
    request: AuditRequest, system: System, *, projections: bool = False
) -> Source:
    """Returns the source that the request names, opened and checked, with nothing
    measured: cases of a configuration, a diffusers pipeline, captured tensors, or a
    model, told by the target in this order. Cases carry grad_out where the request is for
    gradients. With `projections`, cases of a running model have the linear layer of their
    queries. Raises UsageError for an option without meaning for this source, and whatever
    opening it raises."""
    if request.cases:
        refuse_options(request, "a configuration", ("layers", *FOR_MODELS))
        how = {"gradients": bool(request.backward)}
        return ConfigSource(request.target, request.cases, (request.seed,), system, **how)
    path = _checkpoint_path(request)
    if is_pipeline(path):
        refuse_options(request, "a diffusers pipeline", NOT_FOR_PIPELINES)
        return PipelineSource(request, system)
    if holds_cases(path):
        refuse_options(request, "a file of captured tensors", FOR_MODELS)
        return TensorFileSource(request, system)
    refuse_options(request, "not a diffusers pipeline", FOR_PIPELINES)
    return CheckpointSource(request, system, projections=projections)


def refuse_options(request: Any, kind: str, meaningless: Collection[str]) -> None:
    """Raises UsageError if one of the request's fields named in `meaningless` is not at
    its default; the message names the option. `kind`: what the target is, in words."""
    for name in meaningless:
        if getattr(request, name) != type(request).model_fields[name].default:
            what = f"{name!r} does not apply: {request.target} is {kind}"
            raise UsageError(what, hint=f"leave --{name.replace('_', '-')} out")


def _checkpoint_path(request: AuditRequest) -> Path:
    """Returns the path of the request's checkpoint; for `demo` that of the bundled
    one."""
    return (
        demo_checkpoint()
        if request.checkpoint == "demo"
        else Path(request.checkpoint or "")
    )


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A case that a configuration describes. It is plain data until it is loaded, so that
    any worker process can load it."""

    config: CaseConfig
    seed: int
    source: str
    device: str
    gradients: bool = False  # whether the case carries grad_out

    @property
    def ref(self) -> CaseRef:
        """Returns the name of the case, with its seed."""
        name = self.config.name
        return CaseRef(case=name, source=self.source, module=name, seed=self.seed)

    @property
    def axes(self) -> dict[str, object]:
        """Returns the case's place on the configuration's grid, by axis; empty without a
        grid."""
        return dict(self.config.axes)

    def load(self) -> AttentionCase:
        """Returns the case with tensors drawn in fp32, on `device`, from the seed and the
        name of the configuration's entry (`config.entry`). So cells of its grid that
        differ only in how attention is computed share their inputs. Raises UsageError for
        values that its regime cannot draw with, and for a call that is none
        (`AttentionCase`)."""
        config, inputs = self.config, self.config.inputs
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
            inputs.name,
            shapes,
            options=inputs.options,
            gradients=self.gradients,
            seed=self.seed,
            label=config.entry,
        )
        device, mask, sinks, grad_out = self.device, None, None, drawn.grad_out
        if config.mask is not None:
            mask = draw_mask(config.mask, shapes, seed=self.seed, label=config.entry).to(
                device
            )
        if config.sinks:
            draws = Draws(self.seed, config.entry)
            sinks = draws.normal("sinks", (1, config.heads))[0].to(device)
        if grad_out is not None:
            # The gradient of [batch, length, heads * dim]
            in_line = config.layout != "contiguous"
            grad_out = (transposed(grad_out) if in_line else grad_out).to(device)
        q, k, v = laid_out(config.layout, *(x.to(device) for x in drawn))
        side = None if config.window is None else config.window - 1
        return AttentionCase(
            ref=self.ref,
            q=q,
            k=k,
            v=v,
            grad_out=grad_out,
            mask=mask,
            scale=config.head_dim**-0.5 if config.scale is None else config.scale,
            is_causal=config.causal,
            causal_offset=config.causal_offset,
            window=None if side is None else (side, 0 if config.causal else side),
            softcap=config.softcap,
            sinks=sinks,
        )


class ConfigSource(Source):
    """Cases drawn from a configuration's shapes, each with every seed; with grad_out if
    `gradients`. Raises UsageError for an unknown input regime or parameter."""

    def __init__(
        self,
        target: str,
        configs: Sequence[CaseConfig],
        seeds: Sequence[int],
        system: System,
        *,
        gradients: bool = False,
    ) -> None:
        self.target = target
        drawn = partial(Drawn, source=target, device=system.device, gradients=gradients)
        for config in configs:
            checked_regime(config.inputs.name, config.inputs.options)
        self.cases = [drawn(config=config, seed=s) for config in configs for s in seeds]

    def describe(self) -> dict[str, object]:
        """Returns the configuration's name and the number of cases."""
        return {"config": self.target, "cases": len(self.cases)}


class TensorFileSource(Source):
    """Cases in captured-tensor files, with a drawn grad_out where gradients are asked for
    and none is stored. Raises what `open_cases` raises, and UsageError where no case is
    in a layer that was asked for."""

    def __init__(self, request: AuditRequest, system: System) -> None:
        seed = request.seed if request.backward else None
        path = Path(request.checkpoint or "")
        self.stored = open_cases(path, device=system.device, upstream=seed)
        layers = capturing.Layers(request.layers)
        self.cases = chosen = [c for c in self.stored.cases if layers.choose(c.ref.layer)]
        self.origin = ""
        if many := sum(case.many_heads for case in chosen):
            what = (
                f"In {many} of {len(chosen)} calls the heads exceed the length in number"
            )
            self.doubts = (f"{what}: is `layout` right?",)
        if seed is not None:
            self.origin = "; ".join(dict.fromkeys(case.upstream_from for case in chosen))
            self.notes = (f"Upstream gradients: {self.origin}.",)
        self.notes += layers.notes(request.target)

    def describe(self) -> dict[str, object]:
        """Returns the file's name, hash and origin, how many cases it has, chosen or not,
        and where grad_out comes from. Reads the whole file for the hash; raises OSError
        where it cannot be read."""
        captured = dict.fromkeys(case.ref.source for case in self.stored.cases)
        return {
            "tensors": self.stored.path.name,
            "sha256": self.stored.identity(),
            "cases": len(self.stored.cases),
            "captured_from": ", ".join(captured),
            "captured_with": dict(self.stored.versions),
            **({"grad_out": self.origin} if self.origin else {}),
        }


class CallsSource(Source):
    """Attention calls in memory, with a drawn grad_out where gradients are asked for and
    a call has none. Raises UsageError for two calls of one name, for a call without
    values, for an option that only models have, and where no call is in a layer that was
    asked for."""

    def __init__(
        self, request: AuditRequest, system: System, *, calls: Sequence[AttentionCase]
    ) -> None:
        refuse_options(request, "calls in memory", FOR_CALLS)
        for case in calls:
            expect_values(case, f"attention case {case.ref.case!r}")
        layers, self.calls = capturing.Layers(request.layers), calls
        names = [case.ref.case for case in calls]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            what = f"{names.count(twice[0])} cases are named {twice[0]!r}"
            raise UsageError(what, hint="give each a `ref` with another name")
        seed = request.seed if request.backward else None

        def loaded(case: AttentionCase) -> AttentionCase:
            """Returns the call on the device of the audit, without a graph, with a drawn
            grad_out if it needs one."""
            return with_drawn_gradient(case.detached(system.device), seed)

        self.cases = [
            capturing.Captured(ref=case.ref, load=partial(loaded, case))
            for case in calls
            if layers.choose(case.ref.layer)
        ]
        self.notes = layers.notes(request.target)

    def describe(self) -> dict[str, object]:
        """Returns what a report says of the calls, chosen or not: their number, a hash of
        all their fields, and where they were captured."""
        parts = {
            f"{case.ref.case} {field.name}": getattr(case, field.name)
            for case in self.calls
            for field in fields(case)
        }
        return {
            "tensors": "calls in memory",
            "sha256": stored.digest_of(parts),
            "cases": len(self.calls),
            "captured_from": ", ".join(
                dict.fromkeys(case.ref.source for case in self.calls)
            ),
        }


class CheckpointSource(Source):
    """The attention calls of a model: of one forward pass, a generation, or with
    gradients of one training step. It loads the model when it is made, and runs it each
    time it is iterated. Iterating adds to `notes`, such as which calls the loss does not
    reach. `in_memory`: a model in memory, in place of the request's checkpoint. Raises
    UsageError for options that exclude each other, MeasurementError for weights that
    cannot be loaded."""

    def __init__(
        self,
        request: AuditRequest,
        system: System,
        *,
        projections: bool = False,
        in_memory: stored.InMemory | None = None,
    ) -> None:
        if in_memory is not None:
            refuse_options(request, "a model in memory", FOR_CHECKPOINTS)
        if request.backward and request.generate:
            raise UsageError(
                f"--generate {request.generate}: a generation has no backward pass"
            )
        self.request, self.projections, self.device = request, projections, system.device
        opened = in_memory or open_model_weights(request)
        self.identified = opened.start_identity()  # while the weights are loaded
        self.streamed: stored.Streamed | None = None
        self.model = self._load_model(opened)
        self.checkpoint = opened.fitted(self.model)
        if request.generate and not getattr(self.model, "can_generate", lambda: False)():
            raise UsageError(
                f"--generate: {type(self.model).__name__} does not generate text"
            )
        if isinstance(self.checkpoint, stored.InMemory):
            self.prompt = Prompt(
                inputs=self.checkpoint.inputs, description=self.checkpoint.inputs_in_words
            )
        else:
            self.prompt = model_inputs(request, self.checkpoint, self.model)
        self.modules = capturing.attention_modules(self.model)
        layers = [
            capturing.layer_of(self.model.get_submodule(name), name)
            for name in self.modules
        ]
        self.numbers = [] if None in layers else layers
        self.others = mixers_in_words(capturing.unaudited_modules(self.model))
        self.upstream = self._find_upstream(request)
        self.notes = tuple(self._notes())

    def _load_model(
        self, opened: stored.Checkpoint | stored.StateDict | stored.InMemory
    ) -> nn.Module:
        """Returns the model of opened weights, in the request's `model_dtype`. With
        `stream` it is one that can run only within `Streamed.running`, and
        `self.streamed` is set. A model in memory is returned as it is. Raises UsageError
        and MeasurementError where it cannot be built of these weights."""
        dtype = dtype_of(format_named(self.request.model_dtype))
        if self.request.stream and isinstance(opened, stored.Checkpoint):
            deferred = opened.deferred_model(dtype=dtype)
            self.streamed = stored.Streamed(deferred, device=self.device)
            return self.streamed.model
        return opened.load_model(dtype=dtype, device=self.device)

    def _find_upstream(self, request: AuditRequest) -> Upstream | None:
        """Returns where gradients of outputs come from; None where none are asked for.
        Runs the model once to see whether it has a loss, unless it is streamed."""
        if not request.backward:
            return None
        if not self.streamed:
            return find_upstream(self.model, self.prompt.inputs, request.seed)
        why_not = (
            "the model's own loss needs the graph of the whole model, which was streamed"
        )
        return Upstream(seed=request.seed, why_not=why_not)

    def _notes(self) -> Iterator[str]:
        """Yields what the user is told before the model runs, each where it applies:
        streaming, code that is not run, a removed prefix, and where gradients come
        from."""
        described = self.checkpoint.describe()
        if self.streamed:
            yield "The model's weights are streamed from disk, layer by layer."
        if "auto_map" in described:
            library = type(self.model).__module__.partition(".")[0]
            which = f"{type(self.model).__name__} of {library}"
            yield f"The checkpoint's own code (auto_map) is not run: it is {which}."
        if prefix := described.get("prefix_removed"):
            whose = (
                "The model's weights are stored"
                if self.checkpoint.has_more
                else "All weights are"
            )
            yield f"{whose} under names that begin with {prefix!r}; it was taken off."
        if self.upstream:
            evaluates = self.upstream.loss and not self.model.training
            mode = ", in eval mode (no dropout)" if evaluates else ""
            yield f"Upstream gradients: {self.upstream.describe()}{mode}."

    def describe(self) -> dict[str, object]:
        """Returns what a report says of the source, by its field names: the checkpoint's
        name and hash, the model and its prompt. Waits until the weights are hashed;
        raises OSError where a file of them cannot be read."""
        described: dict[str, object] = {"checkpoint": self.checkpoint.name}
        if self.streamed:
            described["streamed"] = "layer by layer"
        described |= {"sha256": self.identified(), **self.checkpoint.describe()}
        if self.others:
            described["not_audited"] = f"{self.others}: no softmax attention"
        described |= {
            "architecture": type(self.model).__name__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "prompt": self.prompt.description,
            **self.prompt.counts(),
            "prompt_sha256": stored.digest_of(self.prompt.inputs),
        }
        if self.upstream:
            described["grad_out"] = self.upstream.describe()
        return described

    def load(self, dtype: torch.dtype) -> nn.Module:
        """Returns the model once more, its weights in `dtype`; with deferred weights
        where it is streamed. A model in memory is returned as it is, whatever `dtype`
        says. Raises UsageError and MeasurementError where the weights cannot be read
        again."""
        if self.streamed and isinstance(self.checkpoint, stored.Checkpoint):
            return self.checkpoint.deferred_model(dtype=dtype)
        return self.checkpoint.load_model(dtype=dtype, device=self.device)

    def count(self) -> int:
        """Returns how many calls there should be: one for every attention module, or
        chosen layer, in each pass; an estimate."""
        chosen = self.request.layers
        calls = (
            len(self.modules) if chosen is None else min(len(chosen), len(self.modules))
        )
        return calls * (1 + (self.request.generate or 0))

    def __iter__(self) -> Iterator[Located]:
        return capturing.items_from_run(self._run)

    def _run(self, handle: Callable[[Located], None]) -> None:
        """Runs the model and calls `handle` with every call of the chosen layers; adds to
        `self.notes`. A streamed run ends with the last wanted layer where every layer
        runs once. Raises MeasurementError where the model fails, a call cannot be
        audited, or attention was not seen; UsageError where calls were met and none is in
        a chosen layer."""
        projections, layers = Projections(), capturing.Layers(self.request.layers)
        numbers, ends = set(self.numbers), False
        # A streamed run ends with its last call, so that no later weight is read: unless
        # a layer may run twice, or the model writes, which takes its head.
        if self.streamed and not self.request.generate:
            config: Any = self.model.config
            depth = getattr(config.get_text_config(), "num_hidden_layers", None)
            ends = len(numbers) == len(self.numbers) == depth
        wanted = set(self.request.layers or numbers)

        def chosen(case: AttentionCase) -> None:
            """Hands over a call of a chosen layer; raises Enough once no later call is
            wanted."""
            if layers.choose(case.ref.layer):
                projection = partial(projections.take, case) if self.projections else None
                load = partial(case.detached, self.device)
                handle(capturing.Captured(ref=case.ref, load=load, projection=projection))
            if ends and wanted <= layers.met:
                raise capturing.Enough

        with self.streamed.running() if self.streamed else nullcontext():
            calls, drawn = capturing.capture(
                self.model,
                self.prompt.inputs,
                chosen,
                source=self.checkpoint.name,
                generate=self.request.generate,
                upstream=self.upstream,
                on_met=projections.record_call if self.projections else None,
            )
        self.notes += layers.notes(self.request.target)
        if drawn:
            missed = f"The loss has no usable gradient for {len(drawn)} of {calls} calls"
            origin = drawn_origin(self.request.seed)
            self.notes += (f"{missed} ({some(drawn)}); theirs is {origin}.",)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields name and tensor of the stored weights of the chosen layers, and of those
        that are in no numbered layer: the layer is the first number in a name. Yields all
        where no layers are chosen, where the model has no attention module, or one
        without a number. Raises MeasurementError for a damaged file."""
        asked = self.request.layers if self.numbers else None
        for name, tensor in self.checkpoint.tensors():
            layer = re.search(r"(?:^|\.)(\d+)\.", name)
            if not asked or not layer or int(layer[1]) in asked:
                yield name, tensor


def open_model_weights(
    request: AuditRequest,
) -> stored.Checkpoint | stored.StateDict:
    """Opens the request's weights without loading them: a Hugging Face directory as a
    Checkpoint; a file, or a directory of bare weights, as a StateDict with the factory
    `model`. Raises UsageError for a factory where the directory names its model itself,
    for `stream` with a factory, for a path without weights, and for bare weights without
    a factory that can be imported. Raises MeasurementError for an unfinished distributed
    checkpoint, and for damaged or missing files."""
    path = _checkpoint_path(request)
    refuse_unfinished(path)
    is_container = path.is_dir() and container_at(path) is not None
    is_bare = is_container and not (path / "config.json").is_file()
    if path.is_file() or is_bare or (request.model and is_container):
        opened = stored.open_state_dict(path, request.model)
        if request.stream:
            raise UsageError(
                "--stream excludes --model: a factory builds the whole model"
            )
        return opened
    if request.model:
        what = (
            f"{request.checkpoint}: says itself which model it is, so "
            "--model has no place"
        )
        raise UsageError(what, hint="or give the weight file instead of the directory")
    return stored.open_checkpoint(path)
