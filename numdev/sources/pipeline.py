"""A diffusers pipeline: opened safely, run for some steps, its denoiser's attention handed over.

Its parts are classes of diffusers and transformers that `model_index.json` names, and nothing else;
weights are safetensors files alone, and nothing is fetched. The denoiser is audited: the UNet or
transformer that runs once a step. A step ends where the scheduler is asked for the next latents:
guidance run apart belongs to the same step, and Heun's two evaluations make two. The run ends with
the last step that is wanted, so no picture is decoded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from numdev.cases import Attends, AttentionCase
from numdev.errors import MeasurementError, UsageError
from numdev.sources import files as storage
from numdev.sources.capture import CaptureCount, capture_run
from numdev.sources.files import blaming, some
from numdev.sources.prompts import read_text
from numdev.sources.watch import Watch, attention_modules

INDEX = "model_index.json"
DENOISERS = ("unet", "transformer")
"""What pipelines call the part that removes noise; the first there is."""
NOT_NEEDED = ("safety_checker", "feature_extractor", "watermarker", "watermark")
"""They look at pictures, and none is made."""
WEIGHTS = ("diffusion_pytorch_model.safetensors", "model.safetensors")
ALLOWED = {
    "diffusers": ("ModelMixin", "SchedulerMixin"),
    "transformers": (
        *("PreTrainedModel", "PreTrainedTokenizerBase", "ProcessorMixin"),
        *("FeatureExtractionMixin", "ImageProcessingMixin"),
    ),
}
"""What a part may be, by its library: a model, scheduler, tokenizer or processor."""
STEPS = 4  # Denoising steps, where nobody says how many
PROMPT_TOKENS = 16  # Of a drawn prompt, at most


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """An opened pipeline: its index is read and its parts are found; nothing is loaded."""

    path: Path
    name: str
    kind: str  # the pipeline's class, in diffusers
    parts: Mapping[str, tuple[str, str]]  # library and class by name, of those that are needed
    settings: Mapping[str, Any]  # the plain values among its arguments, None for parts left out
    denoiser: str  # the name of the part that is audited

    def identity(self) -> str:
        """SHA-256 over names and contents of the index, the parts' configurations and weights."""
        inside = (
            file for part in sorted(self.parts) for file in sorted((self.path / part).iterdir())
        )
        kinds = (".json", ".safetensors", ".txt", ".model")
        stored = (file for file in inside if file.is_file() and file.suffix in kinds)
        return storage.identity((self.path / INDEX, *stored))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every stored tensor of the denoiser with its name, one at a time."""
        for path in _weight_files(self.path / self.denoiser):
            yield from storage.read(path)

    def load(self, *, dtype: torch.dtype, device: str) -> Any:
        """The diffusers pipeline, its models in eval mode and cast to `dtype`. Raises
        MeasurementError, naming the part, for unknown classes, and for weights that are missing or
        of another shape."""
        with _quiet():
            cls = _class(self.path / INDEX, "diffusers", self.kind, ("DiffusionPipeline",))
            made = {name: self._part(name, dtype) for name in self.parts}
            takes = inspect.signature(cls.__init__).parameters
            given = {**dict.fromkeys(NOT_NEEDED), **self.settings, **made}
            given["requires_safety_checker"] = False
            with blaming(self.path / INDEX, f"build {self.kind}"):
                pipeline = cls(**{name: x for name, x in given.items() if name in takes})
                pipeline.set_progress_bar_config(disable=True)
                return pipeline.to(device)

    def _part(self, name: str, dtype: torch.dtype) -> Any:
        directory, (library, kind) = self.path / name, self.parts[name]
        cls = _class(directory, library, kind, ALLOWED[library])
        options: dict[str, Any] = {"local_files_only": True}
        if library == "transformers":
            options["trust_remote_code"] = False
        if not issubclass(cls, nn.Module):
            with blaming(directory, f"load {kind}"):
                return cls.from_pretrained(directory, **options)
        _weight_files(directory)
        with blaming(directory, f"load {kind}"):
            model, loaded = cls.from_pretrained(
                directory, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
            )
        # Only the denoiser may have none left over: others' are older files' (position ids), and
        # nothing here depends on them.
        for problem, names in (
            ("needs weights that are not there", loaded.get("missing_keys")),
            ("needs other shapes than the stored", loaded.get("mismatched_keys")),
            ("has no place for the weights", name == self.denoiser and loaded["unexpected_keys"]),
        ):
            if names:
                raise MeasurementError(
                    f"{directory}: {kind} {problem}: {some(sorted(map(str, names)))}",
                    hint="is the pipeline complete?",
                )
        return model.eval()


def is_pipeline(path: Path) -> bool:
    """Whether this is the directory of a diffusers pipeline."""
    return (path / INDEX).is_file()


def open_pipeline(path: Path) -> Pipeline:
    """Open the pipeline in the directory `path` without loading anything. Raises UsageError without
    diffusers, for code of its own and for no denoiser; MeasurementError for a damaged index."""
    if find_spec("diffusers") is None:
        raise UsageError(
            "a pipeline needs the package diffusers, which is not installed here",
            hint="pip install 'numdev[diffusers]'",
        )
    index = storage.read_json(path / INDEX)
    kind = index.get("_class_name")
    if not isinstance(kind, str):
        raise _own_code(path, f"its pipeline is {kind!r}")
    parts, settings = {}, {}
    for name, value in index.items():
        if name.startswith("_") or name in NOT_NEEDED:
            continue
        if not isinstance(value, list) or value == [None, None]:
            settings[name] = None if isinstance(value, list) else value
        else:
            parts[name] = _checked_part(path, name, value)
    denoiser = next((name for name in DENOISERS if name in parts), None)
    if denoiser is None:
        raise UsageError(
            f"{path / INDEX}: names no part {' or '.join(DENOISERS)}",
            hint="numdev audits the model that removes the noise",
        )
    name = path.resolve().name
    return Pipeline(
        path=path, name=name, kind=kind, parts=parts, settings=settings, denoiser=denoiser
    )


def not_audited(pipeline: Any, denoiser: str) -> list[str]:
    """The other parts of a loaded pipeline that attend: text encoders, the VAE, and the like."""
    return [
        name
        for name, part in sorted(pipeline.components.items())
        if name != denoiser and isinstance(part, nn.Module) and attention_modules(part)
    ]


def _checked_part(path: Path, name: str, value: list[Any]) -> tuple[str, str]:
    """Library and class of a part whose directory is there."""
    words = len(value) == 2 and all(isinstance(x, str) and x.isidentifier() for x in value)
    if not words or not name.isidentifier():
        raise _own_code(path, f"its part {name!r} is {value!r}")
    library, kind = value
    if library not in ALLOWED:
        raise _own_code(path, f"its part {name!r} is {library}.{kind}")
    directory = path / name
    if not directory.is_dir():
        raise MeasurementError(f"{directory}: is missing", hint=storage.FETCH)
    for file in (directory / "config.json", directory / "tokenizer_config.json"):
        if file.is_file() and storage.read_json(file).get("auto_map"):
            raise _own_code(path, f"{file} has auto_map")
    return library, kind


def _own_code(path: Path, what: str) -> UsageError:
    return UsageError(
        f"{path / INDEX}: {what}, and numdev takes classes of diffusers and transformers alone: it "
        "runs no code that comes with a pipeline",
        hint="if diffusers has this pipeline too, name its class in a copy of model_index.json",
    )


def _class(path: Path, library: str, kind: str, allowed: Sequence[str]) -> Any:
    """The class of that library, if it is of one of these kinds, and no other thing it has."""
    import diffusers
    import transformers

    module: Any = {"diffusers": diffusers, "transformers": transformers}[library]
    with blaming(path, f"find {kind}"):
        found = getattr(module, kind, None)
    if isinstance(found, type) and issubclass(found, tuple(getattr(module, a) for a in allowed)):
        return found
    raise MeasurementError(
        f"{path}: {library} {module.__version__} has no {kind} that a pipeline is made of",
        hint=f"a newer {library} may",
    )


def _weight_files(directory: Path) -> tuple[Path, ...]:
    hint = f"expected {' or '.join(WEIGHTS)}: pipeline.save_pretrained writes them"
    return storage.weight_files(directory, WEIGHTS, hint)


@contextmanager
def _quiet() -> Iterator[None]:
    import diffusers.utils.logging

    with storage.quiet(diffusers.utils.logging):
        yield


# --- running it ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a pipeline is given beside its seed."""

    arguments: Mapping[str, Any]  # Of its call: `prompt`, `class_labels` or `batch_size`
    description: str

    @property
    def digest(self) -> str:
        """SHA-256 over the arguments."""
        return hashlib.sha256(json.dumps(self.arguments, sort_keys=True).encode()).hexdigest()


def read(
    pipeline: Any, denoiser: nn.Module, texts: Sequence[Path], *, count: int, seed: int
) -> Reading:
    """What `count` images are made of: the prompts of files, a line each and used again from the
    first on, else drawn ones. Raises UsageError for files without a line, for text that is not
    read, and for a pipeline that needs more than numdev can give."""
    takes = inspect.signature(type(pipeline).__call__).parameters
    kind = type(pipeline).__name__
    known = ("prompt", "class_labels", "batch_size")
    unknown = [
        name
        for name, p in list(takes.items())[1:]
        if p.default is p.empty
        and name not in known
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if unknown:
        raise UsageError(
            f"{kind} needs {', '.join(unknown)}, which numdev cannot draw",
            hint="audit tensors captured from it: docs/inputs.md says how",
        )
    if texts and "prompt" not in takes:
        raise UsageError(f"{kind} reads no text", hint="leave --text out")
    arguments: dict[str, Any] = {}
    said = "of nothing but noise"
    if "prompt" in takes:
        lines = _lines(texts) if texts else _drawn_prompts(pipeline, count, seed)
        arguments["prompt"] = prompts = [lines[i % len(lines)] for i in range(count)]
        names = f"{len(set(prompts))} of {', '.join(t.name for t in texts)}"
        said = f"prompts: {names}" if texts else f"prompts drawn with seed {seed}"
    elif "class_labels" in takes:
        config: Any = denoiser.config
        classes = getattr(config, "num_embeds_ada_norm", None) or 1000
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(classes, (count,), generator=generator).tolist()
        arguments["class_labels"], said = labels, f"of classes drawn with seed {seed}"
    elif "batch_size" in takes:
        arguments["batch_size"] = count
    return Reading(arguments=arguments, description=f"{count} images, {said}")


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
    all), whose case knows its step and what it attends to. Latents are drawn on the CPU, the same
    for every device. Raises MeasurementError for attention that was not seen, and whatever the
    pipeline raises."""
    scheduler, now = pipeline.scheduler, 0
    own_step = scheduler.step
    given: dict[str, tuple[int | None, int | None]] = {}

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal now
        answer = own_step(*args, **kwargs)
        now += 1
        if now > (max(chosen) if chosen else len(scheduler.timesteps) - 1):
            raise _Over
        return answer

    def note(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        first = kwargs.get("hidden_states", args[0] if args else None)
        told = kwargs.get("encoder_hidden_states", args[1] if len(args) > 1 else None)
        given[name] = _positions(first), None if told is first else _positions(told)

    def handed(case: AttentionCase) -> None:
        if chosen is None or case.ref.step in chosen:
            ref = dataclasses.replace(case.ref, attends=_attends(case, given))
            on_call(dataclasses.replace(case, ref=ref))

    def run() -> None:
        generator = torch.Generator().manual_seed(seed)
        with ExitStack() as stack, suppress(_Over), _quiet():
            for name in attention_modules(denoiser):
                handle = denoiser.get_submodule(name).register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: note(name, args, kwargs), with_kwargs=True
                )
                stack.callback(handle.remove)
            scheduler.step = step
            stack.callback(delattr, scheduler, "step")  # that of the class comes forth again
            pipeline(**reading.arguments, num_inference_steps=steps, generator=generator)

    watch = Watch(denoiser, source=source, step=lambda: now)
    return capture_run(run, watch, handed, owner=pipeline)


class _Over(Exception):
    """The last step that is wanted has ended, and so does the run."""


def _attends(case: AttentionCase, given: Mapping[str, tuple[int | None, int | None]]) -> Attends:
    """By what the module was given: nothing beside the image, or something, which joins it as keys,
    or stands in its place."""
    own, told = given.get(case.ref.module, (None, None))
    if told is None:
        return "self" if case.q_len == case.kv_len else "cross"
    return "joint" if own is not None and case.kv_len == own + told else "cross"


def _positions(x: Any) -> int | None:
    """Of [batch, positions, channels], or of a picture [batch, channels, height, width]."""
    if not isinstance(x, Tensor) or x.ndim not in (3, 4):
        return None
    return x.shape[1] if x.ndim == 3 else x.shape[2] * x.shape[3]


def _lines(texts: Sequence[Path]) -> list[str]:
    lines = (line.strip() for path in texts for line in read_text(path).splitlines())
    if not (found := [line for line in lines if line]):
        raise UsageError(f"{texts[0]}: holds no prompt", hint="one prompt a line")
    return found


def _drawn_prompts(pipeline: Any, count: int, seed: int) -> list[str]:
    """Words of the pipeline's own tokenizer, drawn; they mean nothing."""
    names = ("tokenizer", "tokenizer_2", "tokenizer_3")
    tokenizer = next(filter(None, (getattr(pipeline, name, None) for name in names)), None)
    if tokenizer is None:
        what = f"{type(pipeline).__name__} has no tokenizer to draw prompts from"
        raise UsageError(what, hint="give --text")
    length = min(PROMPT_TOKENS, max(1, tokenizer.model_max_length - 2))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(len(tokenizer), (count, length), generator=generator).tolist()
    return [tokenizer.decode(row, skip_special_tokens=True).strip() or "a" for row in ids]
