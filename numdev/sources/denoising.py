"""Run a diffusers pipeline for some steps, and hand over its denoiser's attention calls.

A pipeline encodes its prompt, draws latents and then alternates between its denoiser, which
attends, and its scheduler. A step ends where the scheduler is asked for the next latents, so a
call's step is how often it has been asked: a second pass of the denoiser within a step (guidance
run apart) belongs to the same one, while a scheduler that evaluates twice a step (Heun) has as many
steps more. The run ends with the last step that is wanted, so no picture is decoded.

Guidance and image size are the pipeline's defaults. Prompts, class labels and latents come from the
seed, or prompts from a file. What the pipeline is and how it is opened is
`numdev.sources.pipeline`'.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from numdev.cases import Attends, AttentionCase
from numdev.errors import UsageError
from numdev.sources.capture import CaptureCount, capture_run
from numdev.sources.pipeline import quiet
from numdev.sources.watch import Watch, attention_modules

STEPS = 4
"""Denoising steps, where nobody says how many."""
PROMPT_TOKENS = 16
"""Of a drawn prompt, at most."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a pipeline is given beside its seed."""

    arguments: Mapping[str, Any]
    """Of its call: `prompt`, `class_labels` or `batch_size`."""
    description: str

    @property
    def digest(self) -> str:
        """SHA-256 over the arguments."""
        return hashlib.sha256(json.dumps(self.arguments, sort_keys=True).encode()).hexdigest()


def read(
    pipeline: Any, denoiser: nn.Module, texts: Sequence[Path], *, count: int, seed: int
) -> Reading:
    """What `count` images are made of: the prompts of files, a line each, else drawn ones.

    Fewer lines than images are used again, from the first on. Raises UsageError for a file that
    cannot be read or has no line, for text that the pipeline does not read, and for a pipeline that
    needs more than numdev can give.
    """
    takes = inspect.signature(type(pipeline).__call__).parameters
    kind = type(pipeline).__name__
    needed = [n for n, p in list(takes.items())[1:] if p.default is p.empty]
    unknown = [
        n
        for n in needed
        if n not in ("prompt", "class_labels", "batch_size")
        and takes[n].kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    ]
    if unknown:
        raise UsageError(
            f"{kind} needs {', '.join(unknown)}, which numdev cannot draw",
            hint="audit tensors captured from it: docs/inputs.md says how",
        )
    if texts and "prompt" not in takes:
        raise UsageError(f"{kind} reads no text", hint="leave --text out")
    if "prompt" in takes:
        lines = _lines(texts) if texts else _drawn_prompts(pipeline, count, seed)
        prompts = [lines[i % len(lines)] for i in range(count)]
        names = f"{len(set(prompts))} of {', '.join(t.name for t in texts)}"
        said = f"prompts: {names}" if texts else f"prompts drawn with seed {seed}"
        return Reading(arguments={"prompt": prompts}, description=f"{count} images, {said}")
    if "class_labels" in takes:
        config: Any = denoiser.config
        classes = getattr(config, "num_embeds_ada_norm", None) or 1000
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(classes, (count,), generator=generator).tolist()
        said = f"{count} images, of classes drawn with seed {seed}"
        return Reading(arguments={"class_labels": labels}, description=said)
    arguments = {"batch_size": count} if "batch_size" in takes else {}
    return Reading(arguments=arguments, description=f"{count} images, of nothing but noise")


def denoise(
    pipeline: Any,
    denoiser: nn.Module,
    reading: Reading,
    on_call: Callable[[AttentionCase], None],
    *,
    source: str,
    steps: int,
    chosen: Sequence[int] | None,
    seed: int,
) -> CaptureCount:
    """Run `steps` denoising steps, calling `on_call` at every call of the `chosen` ones (None: of
    all), whose case knows its step and what it attends to.

    Latents are drawn on the CPU from `seed`, so they are the same on every device. Raises
    MeasurementError where attention ran that was not seen, and for whatever the pipeline raises.
    """
    clock = _Clock(pipeline.scheduler, None if chosen is None else max(chosen))
    lengths = _Lengths(denoiser)

    def handed(case: AttentionCase) -> None:
        if chosen is None or case.ref.step in chosen:
            ref = dataclasses.replace(case.ref, attends=lengths.attends(case))
            on_call(dataclasses.replace(case, ref=ref))

    def run() -> None:
        with clock, lengths, contextlib.suppress(_Over), quiet():
            pipeline(
                **reading.arguments,
                num_inference_steps=steps,
                generator=torch.Generator().manual_seed(seed),
            )

    watch = Watch(denoiser, source=source, step=lambda: clock.now)
    return capture_run(run, watch, handed, owner=pipeline)


class _Over(Exception):
    """The last step that is wanted has ended, and so does the run."""


class _Clock:
    """Counts how often the scheduler was asked, and ends the run after the last step."""

    def __init__(self, scheduler: Any, last: int | None) -> None:
        self.scheduler, self.last, self.now = scheduler, last, 0

    def __enter__(self) -> None:
        step = self.scheduler.step

        def counted(*args: Any, **kwargs: Any) -> Any:
            answer = step(*args, **kwargs)
            self.now += 1
            last = len(self.scheduler.timesteps) - 1 if self.last is None else self.last
            if self.now > last:
                raise _Over
            return answer

        self.scheduler.step = counted

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del self.scheduler.step  # that of the class comes forth again


class _Lengths:
    """How many positions each attention module was given, of the image and of what it is told."""

    def __init__(self, denoiser: nn.Module) -> None:
        self.modules = {n: denoiser.get_submodule(n) for n in attention_modules(denoiser)}
        self.given: dict[str, tuple[int | None, int | None]] = {}
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self.modules.items():
            self.handles.append(
                module.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: self._note(name, args, kwargs),
                    with_kwargs=True,
                )
            )

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _note(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        first = kwargs.get("hidden_states", args[0] if args else None)
        told = kwargs.get("encoder_hidden_states", args[1] if len(args) > 1 else None)
        self.given[name] = _positions(first), None if told is first else _positions(told)

    def attends(self, case: AttentionCase) -> Attends:
        """By what the module was given: nothing beside the image, or something, which joins it as
        keys, or stands in its place."""
        own, told = self.given.get(case.ref.module, (None, None))
        if told is None:
            return "self" if case.q_len == case.kv_len else "cross"
        return "joint" if own is not None and case.kv_len == own + told else "cross"


def _positions(x: Any) -> int | None:
    """Of [batch, positions, channels], or of a picture [batch, channels, height, width]."""
    if not isinstance(x, Tensor) or x.ndim not in (3, 4):
        return None
    return x.shape[1] if x.ndim == 3 else x.shape[2] * x.shape[3]


def _lines(texts: Sequence[Path]) -> list[str]:
    found = []
    for path in texts:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"{path}: cannot be read as UTF-8 text", hint="one prompt a line"
            ) from error
        found += [line.strip() for line in lines if line.strip()]
    if not found:
        raise UsageError(f"{texts[0]}: holds no prompt", hint="one prompt a line")
    return found


def _drawn_prompts(pipeline: Any, count: int, seed: int) -> list[str]:
    """Words of the pipeline's own tokenizer, drawn; they mean nothing."""
    tokenizer = next(
        (
            x
            for n in ("tokenizer", "tokenizer_2", "tokenizer_3")
            if (x := getattr(pipeline, n, None))
        ),
        None,
    )
    if tokenizer is None:
        raise UsageError(
            f"{type(pipeline).__name__} has no tokenizer to draw prompts from", hint="give --text"
        )
    length = min(PROMPT_TOKENS, max(1, tokenizer.model_max_length - 2))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(len(tokenizer), (count, length), generator=generator).tolist()
    return [tokenizer.decode(row, skip_special_tokens=True).strip() or "a" for row in ids]
