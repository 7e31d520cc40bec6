"""Open a diffusers pipeline safely, and build it: a directory with `model_index.json`.

A pipeline is foreign data and is not trusted. Its parts are classes of diffusers and transformers
that `model_index.json` names, and nothing else: a pipeline or a part with code of its own is
refused, weights are read from safetensors files alone, and nothing is fetched. What a run without
pictures does not need (the safety checker, the watermarker) is not loaded.

The part that is audited is the denoiser: the UNet or the transformer that runs once a step. How it
is run is `numdev.sources.denoising`'s business.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from numdev.errors import MeasurementError, NumdevError, UsageError
from numdev.sources import files as storage
from numdev.sources.files import one_line, some
from numdev.sources.watch import attention_modules

INDEX = "model_index.json"
DENOISERS = ("unet", "transformer")
"""What pipelines call the part that removes noise; the first there is."""
NOT_NEEDED = ("safety_checker", "feature_extractor", "watermarker", "watermark")
"""They look at pictures, and none is made."""
WEIGHTS = ("diffusion_pytorch_model.safetensors", "model.safetensors")
LOGGERS = ("diffusers", "transformers")


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """An opened pipeline: its index is read and its weight files are found; nothing is loaded."""

    path: Path
    name: str
    kind: str
    """The pipeline's class, in diffusers."""
    parts: Mapping[str, tuple[str, str]]
    """Library and class by the part's name; without those that are not needed."""
    settings: Mapping[str, Any]
    """The plain values among its arguments, and None for parts that were left out."""
    denoiser: str
    """The name of the part that is audited."""

    def identity(self) -> str:
        """SHA-256 over the names and contents of the index, the parts' configurations and
        weights."""
        inside = (
            file
            for part in sorted(self.parts)
            for file in sorted((self.path / part).iterdir())
            if file.is_file() and file.suffix in (".json", ".safetensors", ".txt", ".model")
        )
        return storage.identity((self.path / INDEX, *inside))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every stored tensor of the denoiser with its name, one at a time."""
        for path in _weight_files(self.path / self.denoiser):
            yield from storage.read(path)

    def load(self, *, dtype: torch.dtype, device: str) -> Any:
        """The diffusers pipeline, its models in eval mode and cast to `dtype`.

        Raises MeasurementError, naming the part, for a class that the library does not have, for
        weights that are missing or of another shape, and for whatever the library raises.
        """
        with quiet():
            cls = _pipeline_class(self.path, self.kind)
            made = {name: self._part(name, dtype) for name in self.parts}
            takes = inspect.signature(cls.__init__).parameters
            given = {**dict.fromkeys(NOT_NEEDED), **self.settings, **made}
            if "requires_safety_checker" in takes:
                given["requires_safety_checker"] = False
            with _blaming(self.path / INDEX, f"build {self.kind}"):
                pipeline = cls(**{name: x for name, x in given.items() if name in takes})
                pipeline.set_progress_bar_config(disable=True)
                return pipeline.to(device)

    def _part(self, name: str, dtype: torch.dtype) -> Any:
        """One part, loaded; None where the index has none."""
        directory = self.path / name
        library, kind = self.parts[name]
        cls = _part_class(self.path, name, library, kind)
        options: dict[str, Any] = {"local_files_only": True}
        if library == "transformers":
            options["trust_remote_code"] = False
        if not issubclass(cls, nn.Module):
            with _blaming(directory, f"load {kind}"):
                return cls.from_pretrained(directory, **options)
        _weight_files(directory)
        with _blaming(directory, f"load {kind}"):
            model, loaded = cls.from_pretrained(
                directory, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
            )
        self._check(directory, kind, loaded, whole=name == self.denoiser)
        return model.eval()

    def _check(self, path: Path, kind: str, loaded: Mapping[str, Any], *, whole: bool) -> None:
        """Raises MeasurementError for weights that are not the model's. Only the denoiser may have
        none left over: others' are older files' (position ids), and nothing here depends on
        them."""
        problems = {
            "needs weights that are not there": loaded.get("missing_keys"),
            "needs other shapes than the stored": loaded.get("mismatched_keys"),
            "has no place for the weights": loaded.get("unexpected_keys") if whole else None,
        }
        for problem, names in problems.items():
            if names:
                raise MeasurementError(
                    f"{path}: {kind} {problem}: {some(sorted(map(str, names)))}",
                    hint="is the pipeline complete?",
                )


def open_pipeline(path: Path) -> Pipeline:
    """Open the pipeline in the directory `path` without loading anything.

    Raises UsageError where diffusers is not installed, the pipeline asks for code of its own, or it
    has no denoiser; MeasurementError where the index or a weight file is damaged.
    """
    needs_diffusers()
    index = storage.read_json(path / INDEX)
    kind = index.get("_class_name")
    if not isinstance(kind, str):
        raise _own_code(path, f"its pipeline is {kind!r}")
    parts, settings = {}, {}
    for name, value in index.items():
        if name.startswith("_") or name in NOT_NEEDED:
            continue
        if not isinstance(value, list):
            settings[name] = value
        elif value == [None, None]:
            settings[name] = None
        else:
            parts[name] = _checked_part(path, name, value)
    denoiser = next((name for name in DENOISERS if name in parts), None)
    if denoiser is None:
        raise UsageError(
            f"{path / INDEX}: names no part {' or '.join(DENOISERS)}",
            hint="numdev audits the model that removes the noise",
        )
    return Pipeline(
        path=path,
        name=path.resolve().name,
        kind=kind,
        parts=parts,
        settings=settings,
        denoiser=denoiser,
    )


def is_pipeline(path: Path) -> bool:
    """Whether this is the directory of a diffusers pipeline."""
    return (path / INDEX).is_file()


def needs_diffusers() -> None:
    """Raises UsageError where diffusers is not installed."""
    try:
        importlib.import_module("diffusers")
    except ImportError as error:
        raise UsageError(
            "a pipeline needs the package diffusers, which is not installed here",
            hint="pip install 'numdev[diffusers]'",
        ) from error


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
    if library not in ("diffusers", "transformers"):
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


def _pipeline_class(path: Path, kind: str) -> Any:
    import diffusers

    return _class(path / INDEX, diffusers, kind, (diffusers.DiffusionPipeline,))


def _part_class(path: Path, name: str, library: str, kind: str) -> Any:
    """A model, scheduler, tokenizer or processor of the library, and no other thing it has."""
    import diffusers
    import transformers

    if library == "diffusers":
        return _class(
            path / name, diffusers, kind, (diffusers.ModelMixin, diffusers.SchedulerMixin)
        )
    allowed = (
        transformers.PreTrainedModel,
        transformers.PreTrainedTokenizerBase,
        transformers.ProcessorMixin,
        transformers.FeatureExtractionMixin,
        transformers.ImageProcessingMixin,
    )
    return _class(path / name, transformers, kind, allowed)


def _class(path: Path, library: Any, kind: str, allowed: tuple[type, ...]) -> Any:
    with _blaming(path, f"find {kind}"):
        found = getattr(library, kind, None)
    if isinstance(found, type) and issubclass(found, allowed):
        return found
    raise MeasurementError(
        f"{path}: {library.__name__} {library.__version__} has no {kind} that a pipeline is made "
        "of",
        hint=f"a newer {library.__name__} may",
    )


def _weight_files(directory: Path) -> tuple[Path, ...]:
    """A model's safetensors files, whole or sharded, and all beside their index."""
    for name in WEIGHTS:
        if (directory / name).is_file():
            return (directory / name,)
        if (directory / f"{name}.index.json").is_file():
            return storage.shards(directory / f"{name}.index.json")
    others = sorted(p.name for p in directory.glob("*.safetensors"))
    others += sorted(p.name for p in directory.glob("*.bin"))
    raise UsageError(
        f"{directory}: has no weights that numdev reads"
        + (f" (it has {some(others)})" if others else ""),
        hint=f"expected {' or '.join(WEIGHTS)}: pipeline.save_pretrained writes them",
    )


@contextmanager
def _blaming(path: Path, what: str) -> Iterator[None]:
    """Whatever a library raises on foreign data, as one line that names the part."""
    try:
        yield
    except NumdevError:
        raise
    except Exception as error:
        raise MeasurementError(
            f"{path}: cannot {what}: {one_line(error)}",
            hint="is the pipeline complete, and made for this diffusers?",
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, log lines or warnings, and all as before afterwards."""
    import diffusers.utils.logging
    import transformers.utils.logging

    chatter: list[Any] = [diffusers.utils.logging, transformers.utils.logging]
    bars = [c for c in chatter if c.is_progress_bar_enabled()]
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    for c in bars:
        c.disable_progress_bar()
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for c in bars:
            c.enable_progress_bar()
