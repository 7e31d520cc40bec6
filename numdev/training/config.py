"""What a training run is asked to do: the YAML of `numdev train` and the request it comes to.

A variant says where it departs from the golden run; what it does not say is as there. A request
holds every variant complete, so that the report shows what ran.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from numdev.config import Choice, Named, Positive, Seeds
from numdev.errors import UsageError, closest
from numdev.training.report import VariantRole
from numdev.yamlfile import Strict

Format = Literal["float32", "bfloat16", "float16", "pure bfloat16"]
"""The whole network's: autocast over fp32 weights, or with `pure` weights and all."""
AttentionFormat = Literal["float32", "bfloat16", "float16"]
Share = Annotated[float, Field(ge=0, lt=1)]
Above = Annotated[float, Field(gt=0)]
Step = Annotated[int, Field(ge=0, strict=True)]
LEAST_BPE = 258
"""Tokens of the smallest tokenizer: the bytes, and two of its own."""
SEEDS_END = 2**63
"""PyTorch's generators take seeds below it."""
ONLY_IN = {
    **{"kv_heads": ("llama",), "context": ("llama", "gpt2"), "image": ("dit",)},
    **{"patch": ("dit",), "biases": ("gpt2",)},
}
NEEDS = {
    "golden": "kernel",
    "flash": "kernel",
    "low_precision": "format",
    "attention_precision": "attention_format",
    "other_seed": "seed",
}
"""What a variant in a role must give; but for the golden run the only thing that it may."""


def _refuse(*rules: tuple[object, str]) -> None:
    """Raise ValueError with the words of the first condition that holds."""
    for wrong, words in rules:
        if wrong:
            raise ValueError(words)


class ModelConfig(Strict):
    """The network. `llama`: RMSNorm, rotary positions, SwiGLU. `gpt2`: LayerNorm, learned
    positions, GELU. Both have tied embeddings. `dit`: a denoiser of images in patches."""

    kind: Literal["llama", "gpt2", "dit"]
    layers: Positive
    width: Positive
    heads: Positive
    kv_heads: Positive | None = None
    context: Positive | None = None
    """Tokens in a window."""
    mlp: Positive | None = None
    """Its hidden width. None: 8/3 of the width, rounded up to a multiple of 32, in llama, else 4
    times the width."""
    biases: bool | None = None
    """Of gpt2: whether its projections and norms have them. None: no."""
    image: Positive | None = None
    """Pixels on a side."""
    patch: Positive | None = None
    """Pixels on a side of a token."""

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        for name, kinds in ONLY_IN.items():
            if getattr(self, name) is not None and self.kind not in kinds:
                raise ValueError(f"{name} is of {' and '.join(kinds)}, not of {self.kind}")
        needed = ("image", "patch") if self.kind == "dit" else ("context",)
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ValueError(f"{self.kind} needs {' and '.join(missing)}")
        image, patch, width, heads, kv = (
            self.image,
            self.patch,
            self.width,
            self.heads,
            self.kv_heads,
        )
        _refuse(
            (
                image and patch and image % patch,
                f"image ({image}) must be a multiple of patch ({patch})",
            ),
            (image == 1, "image (1) must be 2 or more: one pixel has no variance"),
            (width % (2 * heads), f"width ({width}) must be heads ({heads}) x an even number"),
            (heads % (kv or heads), f"heads ({heads}) must be a multiple of kv_heads ({kv})"),
        )
        return self

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def has_biases(self) -> bool:
        """Whether its projections have them."""
        return self.kind == "dit" or bool(self.biases)

    @property
    def hidden(self) -> int:
        """The width of the MLP."""
        if self.mlp is not None:
            return self.mlp
        return -(-8 * self.width // 96) * 32 if self.kind == "llama" else 4 * self.width


class DataConfig(Strict):
    """What is learned. `stdlib`: the source of the Python standard library that runs this; `text`:
    UTF-8 files; `tokens`: binary files of token ids; `images`: smooth random fields, drawn."""

    source: Literal["stdlib", "text", "tokens", "images"]
    files: tuple[str, ...] = ()
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    vocabulary: Positive | None = None
    """Of bpe: how many tokens it may have (2048). Of `tokens`: how many ids there are."""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """Of `tokens`."""
    images: Positive = 1024
    """How many are drawn."""

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        bpe, tokens, size = self.tokenizer == "bpe", self.source == "tokens", self.vocabulary
        has_files, is_text = tokens or self.source == "text", self.source in ("stdlib", "text")
        least = f"a bpe `vocabulary` is {LEAST_BPE} or more, not {size}"
        _refuse(
            (has_files != bool(self.files), "`files` go with the sources text and tokens alone"),
            (tokens and not size, "tokens need their `vocabulary`, the number of ids"),
            (bpe and not is_text, "a tokenizer is trained on text: source stdlib or text"),
            (size and not (bpe or tokens), "`vocabulary` is of tokenizer bpe or source tokens"),
            (bpe and size and size < LEAST_BPE, least),
        )
        return self


class Optimiser(Strict):
    """How weights are updated. Decay is on matrices alone."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: Above = 1e-3
    """At its highest."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: Above = 1e-8
    momentum: Share = 0.0
    """Of sgd."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up; `cosine` ends at `final` of the highest."""
    warmup: Step = 0
    """Steps over which the rate grows linearly."""
    final: Share = 0.01
    clip: Above | None = 1.0
    """The largest norm of all gradients together; None: not clipped."""


class VariantConfig(Strict):
    """One run beside the others. What is None is as in the golden run."""

    name: Annotated[str, Field(min_length=1, max_length=100)]
    role: VariantRole = "variant"
    kernel: Named | None = None
    backward_kernel: Named | None = None
    """Whose gradients it has: those of this kernel's whole training step, its forward pass
    included. None: its own kernel's, whatever the golden run has."""
    format: Format | None = None
    attention_format: AttentionFormat | None = None
    """q, k and v are cast to it, and the output back. In the golden run None: the network's."""
    seed: Positive | None = None
    """Added to the run's, for another initialisation."""
    data_order: Positive | None = None
    """Added to the run's, for other batches of the same data."""
    optimiser: Optimiser | None = None
    """The keys given here; the others are those of `optimiser`."""

    @model_validator(mode="after")
    def _in_its_role(self) -> VariantConfig:
        changed = {
            name for name, value in self if name not in ("name", "role") and value is not None
        }
        needed, golden, who = NEEDS.get(self.role), self.role == "golden", f"{self.name}: "
        extra = () if golden or self.role == "variant" else sorted(changed - {needed})
        another = golden and self.backward_kernel
        _refuse(
            (
                needed and needed not in changed,
                f"{who}a variant in the role {self.role} gives its `{needed}`",
            ),
            (golden and self.seed, f"{who}the golden run has the seeds of the run"),
            (golden and self.data_order, f"{who}the golden run has the seeds of the run"),
            (another, f"{who}the golden run has the gradients of its own kernel"),
            (
                extra,
                f"{who}the role {self.role} differs in {needed or 'nothing else'}, not in "
                f"{', '.join(extra)}; the role variant may differ in anything",
            ),
        )
        return self


class Variant(Strict):
    """A variant with everything that decides what it computes."""

    name: str
    role: VariantRole
    kernel: Choice
    backward_kernel: Choice | None = None
    format: Format
    attention_format: AttentionFormat | None
    seed: int = 0
    data_order: int = 0
    optimiser: Optimiser

    @property
    def kernels(self) -> tuple[Choice, ...]:
        """All that it runs: its own, and the one behind it."""
        return (self.kernel, *((self.backward_kernel,) if self.backward_kernel else ()))


def _check_variants(variants: tuple[VariantConfig, ...]) -> tuple[VariantConfig, ...]:
    golden = sum(v.role == "golden" for v in variants)
    if golden != 1:
        raise ValueError(f"one variant has the role golden; here {golden} have")
    name, count = Counter(v.name for v in variants).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{count} variants are called {name!r}")
    return variants


def folder_of(variant: str) -> str:
    """What the directories of a variant's checkpoints begin with."""
    return re.sub(r"[^\w.-]+", "-", variant)


class Checkpoints(Strict):
    """Which weights are written, as Hugging Face directories."""

    steps: tuple[Positive | Literal["last"], ...]
    variants: tuple[str, ...] | None = None
    """By name; None: all."""

    def at(self, steps: int) -> set[int]:
        """After which of so many steps."""
        return {steps if step == "last" else step for step in self.steps}


class _Run(Strict):
    """What a file and a request have in common."""

    title: str | None = None
    model: ModelConfig
    data: DataConfig
    batch: Positive
    steps: Positive
    checkpoints: Checkpoints | None = None
    deterministic: bool = True
    """Whether PyTorch is told to use deterministic algorithms alone."""
    save_every: Above = 300.0
    """Seconds after which the state of a run is saved, to continue from."""


class TrainConfig(_Run):
    """The keys of a YAML file for `numdev train`."""

    seeds: Seeds = (0,)
    """A list, or how many, counted from 0."""
    record: Literal["log"] | tuple[Step, ...] = "log"
    """Steps at which everything is measured; `log`: 1, 2, 3, 5, 10, 20, 30, 50, ... The first and
    the last always are."""
    record_every: Positive | None = None
    """And all multiples of this."""
    optimiser: Optimiser = Optimiser()
    variants: Annotated[tuple[VariantConfig, ...], AfterValidator(_check_variants)]
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if (self.model.kind == "dit") != (self.data.source == "images"):
            raise ValueError("a dit learns images, and the other models do not")
        names = [v.name for v in self.variants]
        written: dict[str, str] = {}
        for name in (self.checkpoints.variants or names) if self.checkpoints else ():
            if name not in names:
                raise ValueError(f"checkpoints: no variant {name!r}; {closest(name, names)}")
            other = written.setdefault(folder_of(name), name)
            if other != name:
                raise ValueError(
                    f"checkpoints: {other!r} and {name!r} would be in one directory; rename one"
                )
        return self


class TrainRequest(_Run):
    """A resolved training run."""

    target: str
    seeds: tuple[int, ...]
    recorded: tuple[int, ...]
    variants: tuple[Variant, ...]
    """In the order of the file."""
    device: str

    @property
    def golden(self) -> Variant:
        return next(v for v in self.variants if v.role == "golden")

    def measured(self) -> dict[str, Any]:
        """What decides the numbers, and so whether a run can be continued."""
        return self.model_dump(mode="json", exclude={"title", "save_every"})


def resolve(
    config: TrainConfig,
    target: str,
    *,
    steps: int | None = None,
    seed: int | None = None,
    device: str | None = None,
) -> TrainRequest:
    """The request a file and the command line come to; a flag beats the file.

    With `seed` the seeds are counted from it. Raises UsageError for a checkpoint after the end, and
    for a seed that no generator takes.
    """
    steps = steps or config.steps
    seeds = config.seeds if seed is None else tuple(range(seed, seed + len(config.seeds)))
    late = [s for s in (config.checkpoints.at(steps) if config.checkpoints else ()) if s > steps]
    if late:
        raise UsageError(
            f"{target}: checkpoints at step {late[0]} of {steps}", hint="name steps that are taken"
        )
    largest = max(seeds) + max(max(v.seed or 0, v.data_order or 0) for v in config.variants)
    if largest >= SEEDS_END:
        raise UsageError(f"{target}: the seed {largest} is too large", hint="seeds are below 2**63")
    golden = next(v for v in config.variants if v.role == "golden")
    shared = {name: getattr(config, name) for name in _Run.model_fields} | {"steps": steps}
    return TrainRequest(
        **shared,
        target=target,
        seeds=seeds,
        recorded=recorded_steps(config.record, config.record_every, steps),
        variants=tuple(_complete(v, golden, config.optimiser) for v in config.variants),
        device=device or config.device,
    )


def _complete(v: VariantConfig, golden: VariantConfig, optimiser: Optimiser) -> Variant:
    for changes in (golden.optimiser, v.optimiser):
        if changes is not None:
            optimiser = optimiser.model_copy(update=changes.model_dump(exclude_unset=True))
    as_golden: dict[str, Any] = {"kernel": golden.kernel, "format": golden.format or "bfloat16"}
    as_golden["attention_format"] = golden.attention_format
    own = {name: value for name, value in v if value is not None}
    return Variant(**{**as_golden, **own, "optimiser": optimiser})


def recorded_steps(
    record: Literal["log"] | tuple[int, ...], every: int | None, steps: int
) -> tuple[int, ...]:
    """The steps at which rows are made, ascending: 0 and the last always."""
    asked: set[int] = {0, steps, *(range(0, steps + 1, every) if every else ())}
    if record == "log":
        decades = itertools.takewhile(lambda ten: ten <= steps, (10**n for n in itertools.count()))
        asked |= {first * ten for ten in decades for first in (1, 2, 3, 5)}
    else:
        asked |= set(record)
    return tuple(sorted(step for step in asked if step <= steps))
