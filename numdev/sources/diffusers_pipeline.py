"""A diffusers pipeline: opened safely, run for some steps, its denoiser's attention
handed over.

Its parts are classes of diffusers and transformers that `model_index.json` names, and
nothing else; weights are safetensors files alone, and nothing is fetched. A step ends
where the scheduler is asked for the next latents: guidance run apart belongs to the same
step, and Heun's two evaluations make two. The run ends with the last step that is wanted,
so no picture is decoded: that takes a `Painter`, the pipeline as one model."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from numdev.cases import Attends, AttentionCase
from numdev.errors import MeasurementError, UsageError
from numdev.formats import dtype_of, format_named, format_of
from numdev.request_models import AuditRequest
from numdev.sources import capture as capturing
from numdev.sources import tensor_files as storage
from numdev.sources.checkpoint import VARIADIC
from numdev.sources.containers import containers_of_model
from numdev.sources.prompts import Prompt, read_text
from numdev.sources.tensor_files import blaming, naming, quiet
from numdev.sources.unsupported_files import refuse_pointer
from numdev.sources.upstream_gradients import drawn_origin, with_drawn_gradient
from numdev.system import System
from numdev.target_names import name_of

INDEX = "model_index.json"
DENOISERS = ("unet", "transformer")  # the part that removes noise: the first there is
# They look at pictures, and none is made.
NOT_NEEDED = ("safety_checker", "feature_extractor", "watermarker", "watermark")
WEIGHTS = ("diffusion_pytorch_model.safetensors", "model.safetensors")
# What a part may be, by its library: a model, scheduler, tokenizer or processor.
ALLOWED = {
    "diffusers": ("ModelMixin", "SchedulerMixin"),
    "transformers": (
        *("PreTrainedModel", "PreTrainedTokenizerBase", "ProcessorMixin"),
        *("FeatureExtractionMixin", "ImageProcessingMixin"),
    ),
}
WRITTEN_BY = f"expected {' or '.join(WEIGHTS)}: pipeline.save_pretrained writes them"
STEPS = 4  # Denoising steps, where nobody says how many
PROMPT_TOKENS = 16  # Of a drawn prompt, at most


def is_pipeline(path: Path) -> bool:
    """Whether a directory has a model_index.json, as diffusers writes it."""
    return (path / INDEX).is_file()


class PipelineSource:
    """The attention calls of a diffusion pipeline's denoiser, at every denoising step or
    chosen ones; gradients are drawn, for a pipeline has no loss. It loads the pipeline
    when it is made, and runs it each time it is iterated. Raises UsageError without
    diffusers, for a part that is no class of diffusers or transformers, and for a request
    that has no meaning for it; MeasurementError for a damaged index, unknown classes, and
    weights that do not fit."""

    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    cases: Sequence[Any] = ()

    def __init__(self, request: AuditRequest, system: System) -> None:
        self.request, self.path = request, Path(request.checkpoint or "")
        self.steps, last = request.denoise or STEPS, max(request.steps or (0,))
        if last >= self.steps:
            raise UsageError(f"--steps: expected steps below {self.steps}, got {last}")
        self.kind, self.parts, settings = _read_index(self.path / INDEX)
        self.part = next((name for name in DENOISERS if name in self.parts), "")
        if not self.part:
            raise UsageError(
                f"{self.path / INDEX}: names no part {' or '.join(DENOISERS)}"
            )
        self.chatter = importlib.import_module("diffusers.utils.logging")
        with quiet(self.chatter):
            cls = _part_class(
                self.path / INDEX, "diffusers", self.kind, ("DiffusionPipeline",)
            )
            takes = inspect.signature(cls.__init__).parameters
            dtype = dtype_of(format_named(request.model_dtype))
            components = {
                **dict.fromkeys(NOT_NEEDED),
                **settings,
                "requires_safety_checker": False,
            }
            components |= {name: self._load_part(name, dtype) for name in self.parts}
            with blaming(self.path / INDEX, f"build {self.kind}"):
                pipeline = cls(
                    **{name: x for name, x in components.items() if name in takes}
                )
                pipeline.set_progress_bar_config(disable=True)
                self.pipeline = pipeline.to(system.device)
        self.denoiser: nn.Module = getattr(self.pipeline, self.part)
        self.modules = capturing.attention_modules(self.denoiser)
        self.arguments, self.prompt = self._read_prompts()
        parts = {
            n: x for n, x in self.pipeline.components.items() if isinstance(x, nn.Module)
        }
        attending = sorted(n for n, x in parts.items() if capturing.attention_modules(x))
        self.others = ", ".join(name for name in attending if name != self.part)
        if self.others:
            what = (
                f"Audited: the {self.part}. Not audited: the attention of {self.others}."
            )
            self.notes = (what,)
        if request.backward:
            self.notes += (f"Upstream gradients: {drawn_origin(request.seed)}.",)

    def describe(self) -> dict[str, object]:
        """Returns what a report says of the source, by its field names: the pipeline's
        name and hash, its denoiser and its prompt. Reads its index and the files of its
        parts for the hash; raises OSError where one cannot be read."""
        arguments = json.dumps(self.arguments, sort_keys=True).encode()
        described: dict[str, object] = {
            "checkpoint": name_of(self.path),
            "sha256": storage.identity((self.path / INDEX, *self._part_files())),
            "pipeline": f"{self.kind} of diffusers {version('diffusers')}",
            "architecture": type(self.denoiser).__name__,
            "parameters": sum(p.numel() for p in self.denoiser.parameters()),
            "scheduler": type(self.pipeline.scheduler).__name__,
            "denoising_steps": self.steps,
        }
        if self.others:
            described["not_audited"] = f"the attention of {self.others}"
        described |= {
            "prompt": self.prompt,
            "sequences_asked": self.request.sequences,
            "sequences_read": len(next(iter(self.arguments.values()))),
            "prompt_sha256": hashlib.sha256(arguments).hexdigest(),
        }
        if self.request.backward:
            described["grad_out"] = drawn_origin(self.request.seed)
        return described

    def _part_files(self) -> list[Path]:
        """Returns the files in the folders of its parts, not in folders of these, that
        decide what it computes, by their suffixes; sorted."""
        kinds = (".json", ".safetensors", ".txt", ".model")
        parts = (self.path / name for name in sorted(self.parts))
        every = sorted(file for part in parts for file in part.iterdir())
        return [file for file in every if file.is_file() and file.suffix in kinds]

    def count(self) -> int:
        """Returns how many calls there should be: one for every attention module of the
        denoiser in each chosen step; an estimate."""
        return len(self.modules) * len(self.request.steps or range(self.steps))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and tensor of the denoiser's stored weights. Raises UsageError
        without safetensors files, MeasurementError for a damaged one."""
        for container in containers_of_model(self.path / self.part, WEIGHTS, WRITTEN_BY):
            for stored in container.tensors():
                yield stored.name, stored.read()

    def __iter__(self) -> Iterator[capturing.Captured]:
        return capturing.items_from_run(self._run)

    def _load_part(self, name: str, dtype: torch.dtype) -> object:
        """Returns a part of the pipeline, loaded; a model in eval mode and cast to
        `dtype`. Raises UsageError for a model without safetensors files; MeasurementError
        for a class that is not allowed, for weights that are damaged or do not fit, and
        for whatever the class raises."""
        directory, (library, kind) = self.path / name, self.parts[name]
        for file in sorted(directory.glob("*")):
            refuse_pointer(file)
        cls = _part_class(directory, library, kind, ALLOWED[library])
        options: dict[str, object] = {"local_files_only": True}
        if library == "transformers":
            options["trust_remote_code"] = False
        if model := issubclass(cls, nn.Module):
            containers_of_model(directory, WEIGHTS, WRITTEN_BY)
            options |= {
                "dtype": dtype,
                "use_safetensors": True,
                "output_loading_info": True,
            }
        with blaming(directory, f"load {kind}"):
            part = cls.from_pretrained(directory, **options)
        if not model:
            return part
        model, info = part
        # What other parts have left over (older files' position ids) changes nothing
        # here.
        unused = info["unexpected_keys"] if name == self.part else ()
        missing, misshapen = info.get("missing_keys", ()), info.get("mismatched_keys", ())
        storage.refuse_misfits(directory, kind, missing, unused, misshapen)
        return model.eval()

    def _read_prompts(self) -> tuple[dict[str, list[str] | list[int]], str]:
        """Returns what images are made of, as arguments of the pipeline's call, and the
        same in words. The arguments are `prompt`, the lines of text files in turn, or
        without text drawn words of the pipeline's tokenizer; else `class_labels`, drawn.
        There are as many as `sequences`. Raises UsageError where the pipeline needs
        anything else, for texts that it does not read, that cannot be read or have no
        line, and for a pipeline that reads text and has no tokenizer to draw words of;
        MeasurementError for a pointer of git-lfs."""
        takes = inspect.signature(type(self.pipeline).__call__).parameters
        count, seed = self.request.sequences, self.request.seed
        needed = [
            n for n, p in takes.items() if p.default is p.empty and p.kind not in VARIADIC
        ]
        unknown = [n for n in needed if n not in ("self", "prompt", "class_labels")]
        if unknown or not takes.keys() & {"prompt", "class_labels"}:
            what = (
                f"{self.kind} needs {', '.join(unknown) or 'noise'}, which "
                "numdev cannot make"
            )
            raise UsageError(
                what, hint="audit tensors captured from it: docs/inputs.md says how"
            )
        generator = torch.Generator().manual_seed(seed)
        if self.request.text:
            files = [Path(text) for text in self.request.text]
            lines = [
                line.strip() for file in files for line in read_text(file).splitlines()
            ]
            prompts = list(islice(cycle(filter(None, lines)), count))
            if not prompts or "prompt" not in takes:
                what = (
                    f"{self.kind} reads no text"
                    if prompts
                    else f"{files[0]}: holds no prompt"
                )
                raise UsageError(what, hint="leave --text out")
            names = ", ".join(file.name for file in files)
            return {
                "prompt": prompts
            }, f"{count} images, prompts: {len(set(prompts))} of {names}"
        if "prompt" in takes:
            if (tokenizer := getattr(self.pipeline, "tokenizer", None)) is None:
                raise UsageError(f"{self.kind} has no tokenizer", hint="give --text")
            length = min(PROMPT_TOKENS, max(1, tokenizer.model_max_length - 2))
            ids = torch.randint(
                len(tokenizer), (count, length), generator=generator
            ).tolist()
            drawn = [
                tokenizer.decode(row, skip_special_tokens=True).strip() or "a"
                for row in ids
            ]
            return {"prompt": drawn}, f"{count} images, random prompts, seed {seed}"
        classes = getattr(self.denoiser.config, "num_embeds_ada_norm", None) or 1000
        labels = torch.randint(classes, (count,), generator=generator).tolist()
        return {"class_labels": labels}, f"{count} images of random classes, seed {seed}"

    def _run(self, handle: Callable[[capturing.Captured], None]) -> None:
        """Runs the pipeline and calls `handle` once with each call of the chosen steps
        and layers; latents are drawn on the CPU for every device. Adds to `self.notes`.
        Ends after the last step that is wanted. Raises MeasurementError where the
        pipeline fails, a call cannot be audited, or attention was not seen; UsageError
        where calls were met and none is in a chosen layer."""
        scheduler, wanted, now = self.pipeline.scheduler, self.request.steps, 0
        own_step = scheduler.step
        layers, seed = capturing.Layers(self.request.layers), self.request.seed

        def step(*args: object, **kwargs: object) -> object:
            """Does the scheduler's step, and ends the run after the last one that is
            wanted."""
            nonlocal now
            answer = own_step(*args, **kwargs)
            now += 1
            if now > (max(wanted) if wanted else len(scheduler.timesteps) - 1):
                raise capturing.Enough
            return answer

        def on_call(case: AttentionCase) -> None:
            """Hands over a call of a chosen step and layer."""
            if (wanted is None or now in wanted) and layers.choose(case.ref.layer):
                ref = dataclasses.replace(
                    case.ref, attends=_attended_input(case, watch.running[-1])
                )
                case = dataclasses.replace(case, ref=ref)
                case = with_drawn_gradient(case, seed) if self.request.backward else case
                handle(capturing.Captured(ref=ref, load=case.detached))

        def run() -> None:
            """Runs the pipeline, with the scheduler's step replaced."""
            scheduler.step = step
            generator = torch.Generator().manual_seed(seed)
            arguments = {
                "num_inference_steps": self.steps,
                "generator": generator,
                **self.arguments,
            }
            try:
                with quiet(self.chatter), torch.no_grad():
                    self.pipeline(**arguments)
            finally:
                del scheduler.step  # that of the class comes forth again

        watch = capturing.Watch(
            self.denoiser, source=name_of(self.path), step=lambda: now
        )
        capturing.capture_run(run, watch, on_call)
        self.notes += layers.notes(self.request.target)


# --- a pipeline as one model: from prompts to denoised latents and the decoded image --
#
# Its noise is drawn once, in fp64, and cast: runs in all formats start alike.


@dataclass
class Picture:
    """The output of a `Painter`, [images, 1, numbers]: an image is one position, for the
    relative error of a single value near 0 says nothing."""

    last_hidden_state: Tensor  # the denoised latents
    image: Tensor  # as the VAE decodes it, before it is clamped to what can be shown


class Painter(nn.Module):
    """The models of a pipeline as one module, run from the numbers of prompts."""

    def __init__(self, source: PipelineSource) -> None:
        super().__init__()
        self.source, self.pipeline = source, source.pipeline
        for name, part in source.pipeline.components.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)

    def forward(self, number: Tensor) -> Picture:
        """Returns the denoised latents and the decoded image of the prompts with these
        numbers (their places in the source's prompts, from 0), int64 [images], at least
        one. The noise depends on the seed and the first number. The scheduler and the VAE
        are changed while it runs. Raises MeasurementError where the pipeline fails, and
        where it ends without a scheduler's step or without decoding; IndexError for a
        number without a prompt."""
        scheduler, vae, chosen = (
            self.pipeline.scheduler,
            self.pipeline.vae,
            number.tolist(),
        )
        arguments = {n: [x[i] for i in chosen] for n, x in self.source.arguments.items()}
        own_step, own_decode, own_table = (
            scheduler.step,
            vae.decode,
            scheduler.set_timesteps,
        )
        outs: dict[str, Tensor] = {}

        @functools.wraps(own_table)  # pipelines look at what it takes
        def table(*args: object, **kwargs: object) -> object:
            """Makes the scheduler's table of steps with NumPy, outside of any mode."""
            # It makes arrays of NumPy, as it does in every run
            with _disable_current_modes():
                return own_table(*args, **kwargs)

        @functools.wraps(own_step)
        def step(*args: object, **kwargs: object) -> object:
            """Does the scheduler's step, and keeps its latents."""
            answer = own_step(*args, **kwargs)
            outs["latents"] = answer[0]
            return answer

        def decode(*args: object, **kwargs: object) -> object:
            """Decodes the image, keeps it, and ends the run."""
            outs["image"] = own_decode(*args, **kwargs)[0]
            raise capturing.Enough

        scheduler.step, vae.decode, scheduler.set_timesteps = step, decode, table
        noise, dtype = _Noise(self.source.request.seed + chosen[0]), vae.dtype
        hint = f"does diffusers run it, with --denoise {self.source.steps}?"
        named = naming(self.source.kind, "the pipeline failed", hint)
        with named, quiet(self.source.chatter), suppress(capturing.Enough):
            try:
                with noise:
                    self.pipeline(**arguments, num_inference_steps=self.source.steps)
            finally:
                del scheduler.step, vae.decode, scheduler.set_timesteps
                if vae.dtype != dtype:  # some decode float16 in float32
                    vae.to(dtype)
        if lacking := " or ".join(sorted({"latents", "image"} - outs.keys())):
            what = f"{self.source.kind}: the pipeline ended without {lacking}"
            raise MeasurementError(what, hint=hint)
        # Guidance may leave a second half behind, which the pipeline does not decode.
        latents, image = (
            outs[n][: len(chosen)].flatten(1)[:, None] for n in ("latents", "image")
        )
        return Picture(latents, image)


class _Noise(TorchFunctionMode):
    """A mode in which `torch.randn` draws in fp64 on the CPU, whatever is asked for, and
    casts."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func is not torch.randn:
            return func(*args, **(kwargs or {}))
        asked = dict(kwargs or {})
        device, dtype, _ = (
            asked.pop(name, None) for name in ("device", "dtype", "generator")
        )
        noise = func(*args, **asked, dtype=torch.float64, generator=self.generator)
        return noise.to(device, dtype or torch.get_default_dtype())


class PictureSource:
    """An opened pipeline in place of a checkpoint: its model is a `Painter`, its inputs
    the numbers of its prompts. Raises UsageError for a pipeline without a VAE."""

    notes: tuple[str, ...] = ()
    streamed = None

    def __init__(self, opened: PipelineSource, system: System) -> None:
        self.opened, self.system = opened, system
        if not hasattr(getattr(opened.pipeline, "vae", None), "decode"):
            raise UsageError(
                f"{opened.path}: expected a pipeline with a VAE, got {opened.kind}"
            )
        inputs = {"number": torch.arange(opened.request.sequences)}
        self.model = Painter(opened)
        self.prompt = Prompt(inputs=inputs, description=opened.prompt)

    def describe(self) -> dict[str, object]:
        """Returns what a report says of the pipeline; all of it is measured."""
        return {n: x for n, x in self.opened.describe().items() if n != "not_audited"}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and tensor of the denoiser's stored weights. Raises UsageError
        without safetensors files, MeasurementError for a damaged one."""
        return self.opened.weights()

    def load(self, dtype: torch.dtype) -> nn.Module:
        """Returns the pipeline as a model once more, loaded from disk in another format.
        Raises UsageError or MeasurementError where it can no longer be loaded, or for a
        dtype of no format."""
        named = self.opened.request.model_copy(
            update={"model_dtype": format_of(dtype).name}
        )
        return Painter(PipelineSource(named, self.system))


def _read_index(path: Path) -> tuple[str, dict[str, tuple[str, str]], dict[str, object]]:
    """Returns the name of a pipeline's class; of its parts that are needed, (library,
    class) by name; and its plain settings. Raises UsageError without diffusers, for an
    index that names no class, and for a part of another library or without a plain name;
    MeasurementError for a damaged or missing index, or a part whose folder is missing."""
    if find_spec("diffusers") is None:
        raise UsageError(
            "a pipeline needs diffusers", hint="pip install 'numdev[diffusers]'"
        )

    refused = "and numdev takes classes of diffusers and transformers alone"
    index = storage.read_json(path)
    kind, parts, settings = index.get("_class_name"), {}, {}
    if not isinstance(kind, str):
        raise UsageError(f"{path}: its pipeline is {kind!r}, {refused}")
    for name, value in index.items():
        if name.startswith("_") or name in NOT_NEEDED:
            continue
        if not isinstance(value, list) or value == [None, None]:
            settings[name] = None if isinstance(value, list) else value
            continue
        named = all(isinstance(x, str) and x.isidentifier() for x in (name, *value))
        if len(value) != 2 or not named or value[0] not in ALLOWED:
            raise UsageError(f"{path}: its part {name!r} is {value!r}, {refused}")
        directory = path.parent / name
        if not directory.is_dir():
            raise MeasurementError(f"{directory}: is missing", hint=storage.FETCH)
        parts[name] = (value[0], value[1])
    return kind, parts, settings


def _attended_input(case: AttentionCase, frame: capturing.Frame) -> Attends:
    """Returns what a call attends to. Its module (`frame`) was given an image,
    `hidden_states`, and may have been given `encoder_hidden_states`, each [batch,
    positions, channels] or a picture [batch, channels, height, width]. `joint`: there are
    as many keys as both have positions together; `self`: only the image was given, or it
    was given as both, and there are as many keys as queries; else `cross`."""
    arguments = (
        inspect.signature(frame.module.forward)
        .bind(*frame.arguments, **frame.named)
        .arguments
    )
    first, encoded = (
        arguments.get("hidden_states"),
        arguments.get("encoder_hidden_states"),
    )
    if encoded is None or encoded is first:
        return "self" if case.q_len == case.kv_len else "cross"
    if first is None:
        return "cross"
    positions = (
        x.shape[1] if x.ndim == 3 else x.shape[2] * x.shape[3] for x in (first, encoded)
    )
    return "joint" if case.kv_len == sum(positions) else "cross"


def _part_class(path: Path, library: str, kind: str, allowed: tuple[str, ...]) -> Any:
    """Returns the class `kind` of the library. Raises MeasurementError where it does not
    exist, or is no subclass of any class named in `allowed`. `path` is for the
    message."""
    module: Any = importlib.import_module(library)
    with blaming(path, f"find {kind}"):
        cls = getattr(module, kind, None)
    if isinstance(cls, type) and issubclass(
        cls, tuple(getattr(module, a) for a in allowed)
    ):
        return cls
    what = (
        f"{path}: {library} {module.__version__} has no {kind} that a pipeline is made of"
    )
    raise MeasurementError(what, hint=f"a newer {library} may")
