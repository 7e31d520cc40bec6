"""What a training run is asked to do: the YAML of `numdev train` and the request it comes
to.

A variant says where it departs from the golden run; what it does not say is as there. A
request holds every variant complete, so that the report shows what ran."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Set
from typing import Annotated, Literal

from pydantic import Field, model_validator

from numdev.errors import UsageError, closest
from numdev.request_models import Choice, Count, Named, Positive, Seeds
from numdev.studies.training.report import VariantRole
from numdev.yamlfile import Strict

# Of the whole network: autocast over fp32 weights, or with `pure` the weights too
Format = Literal["float32", "bfloat16", "float16", "pure bfloat16"]
AttentionFormat = Literal["float32", "bfloat16", "float16"]
Share = Annotated[float, Field(ge=0, lt=1)]
Above = Annotated[float, Field(gt=0)]
# The rms of a re-rounding over that of the floor's rounding
Dose = Annotated[float, Field(ge=1 / 64, le=64)]
MOST_STEPS = 10_000_000
LEAST_BPE = 258  # tokens of the smallest tokenizer: the bytes, and two of its own
DIFFERENCES = {
    *("kernel", "backward_kernel", "format", "attention_format", "seed", "optimiser"),
}
OF_ROLE: dict[str, tuple[Set[str], Set[str]]] = {
    "golden": ({"kernel"}, {"format", "attention_format", "optimiser"}),
    "flash": ({"kernel"}, set()),
    "low_precision": ({"format"}, set()),
    "attention_precision": ({"attention_format"}, set()),
    "other_seed": ({"seed"}, set()),
    "variant": (set(), DIFFERENCES),
}
"""The keys that a variant in a role must have, and those that it may have; a variant in
another role may have none."""


class ModelConfig(Strict):
    """The network. `llama`: RMSNorm, rotary positions, SwiGLU. `gpt2`: LayerNorm, learned
    positions, GELU. Both have tied embeddings."""

    kind: Literal["llama", "gpt2"]
    layers: Positive
    width: Positive
    heads: Positive
    kv_heads: Positive | None = None
    context: Positive  # tokens in a window
    mlp: Positive | None = None  # its hidden width

    @model_validator(mode="after")
    def _check_consistency(self) -> ModelConfig:
        """Returns the configuration as it is. Raises ValueError for kv_heads in gpt2, a
        width that is no multiple of twice the heads, and heads that are no multiple of
        kv_heads."""
        if self.kv_heads is not None and self.kind != "llama":
            raise ValueError(f"kv_heads: expected with llama alone, got {self.kind}")
        for name, value, factor in (
            # Rotary positions pair a head's features
            ("width", self.width, 2 * self.heads),
            ("heads", self.heads, self.kv_heads or 1),
        ):
            if value % factor:
                raise ValueError(f"{name}: expected a multiple of {factor}, got {value}")
        return self

    @property
    def head_dim(self) -> int:
        """Returns the features of one head."""
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """Returns the width of the MLP's hidden layer: `mlp` where it is set; else 4
        widths in gpt2, and in llama 8/3 of the width, rounded up to a multiple of 32."""
        if self.mlp is not None:
            return self.mlp
        return -(-8 * self.width // 96) * 32 if self.kind == "llama" else 4 * self.width


class DataConfig(Strict):
    """The text that is learned. `stdlib`: the source of Python's standard library;
    `text`: UTF-8 files."""

    source: Literal["stdlib", "text"]
    files: tuple[str, ...] = ()
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    # Tokens of a bpe tokenizer; 2048 by default
    vocabulary: Annotated[int, Field(ge=LEAST_BPE, strict=True)] | None = None

    @model_validator(mode="after")
    def _check_consistency(self) -> DataConfig:
        """Returns the configuration as it is. Raises ValueError for `files` with another
        source than `text`, for the source `text` without files, and for a `vocabulary`
        with another tokenizer than `bpe`."""
        if bool(self.files) != (self.source == "text"):
            raise ValueError("files: expected with the source text alone")
        if self.vocabulary and self.tokenizer != "bpe":
            raise ValueError("vocabulary: expected with tokenizer bpe alone")
        return self


class Optimiser(Strict):
    """How weights are updated. Weight decay is on matrices alone, not on gains."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: Above = 1e-3  # at its highest
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: Above = 1e-8
    momentum: Share = 0.0  # of sgd
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    schedule: Literal["constant", "cosine"] = "constant"  # after the warm-up
    warmup: Count = 0  # steps over which the rate grows linearly
    final: Share = 0.01  # of the highest rate, where `cosine` ends
    # The largest norm of all gradients together; None: not clipped
    clip: Above | None = 1.0


class VariantConfig(Strict):
    """One variant of a file (docs/training.md). A key that is None has the golden run's
    value, but for `backward_kernel` and `optimiser`."""

    name: Annotated[str, Field(min_length=1, max_length=100)]
    role: VariantRole = "variant"
    kernel: Named | None = None
    backward_kernel: Named | None = None  # None: its own, whatever the golden run has
    format: Format | None = None
    # In the golden run None: the network's
    attention_format: AttentionFormat | None = None
    seed: Positive | None = None  # added to the run's, for another initialisation
    times: Dose | None = None  # of a null that re-rounds; 1 by default
    # Keys that it lacks are those of the file's `optimiser`
    optimiser: Optimiser | None = None

    @model_validator(mode="after")
    def _check_role(self) -> VariantConfig:
        """Returns the variant as it is. Raises ValueError where it lacks a key that
        OF_ROLE requires of its role, or has one that OF_ROLE does not allow; and for
        `times` in another role than `null_rounding`."""
        stated = {name for name in DIFFERENCES if getattr(self, name) is not None}
        required, optional = OF_ROLE.get(self.role, (set(), set()))
        if not required <= stated <= required | optional:
            expected = ", ".join(sorted(required)) or "nothing"
            if optional:
                expected += f" (and {', '.join(sorted(optional))} at will)"
            got = ", ".join(sorted(stated)) or "nothing"
            raise ValueError(f"{self.name}, {self.role}: expected {expected}, got {got}")
        if self.times is not None and self.role != "null_rounding":
            raise ValueError(
                f"{self.name}: times: expected with null_rounding, got {self.role}"
            )
        return self


class ResolvedVariant(Strict):
    """A variant with everything that decides what it computes, nothing left to the golden
    run."""

    name: str
    role: VariantRole
    kernel: Choice
    backward_kernel: Choice | None = None
    format: Format
    attention_format: AttentionFormat | None
    seed: int = 0
    times: float = 1.0
    optimiser: Optimiser

    @property
    def kernels(self) -> tuple[Choice, ...]:
        """Returns the kernels that the variant runs: its attention's, then its gradients'
        where a `backward_kernel` is set."""
        return (self.kernel, *((self.backward_kernel,) if self.backward_kernel else ()))


def folder_prefix(variant: str) -> str:
    """Returns the beginning of the names of a variant's checkpoint folders: its name,
    with one `-` for each run of characters other than letters, digits, `_`, `.` and `-`.
    Two variants may share one."""
    return re.sub(r"[^\w.-]+", "-", variant)


class Checkpoints(Strict):
    """Which weights are written, as Hugging Face directories."""

    steps: tuple[Positive | Literal["last"], ...]
    variants: tuple[str, ...] | None = None  # by name; None: all

    def steps_to_write(self, steps: int) -> set[int]:
        """Returns the steps after which weights are written, in a run of `steps` steps:
        `last` is `steps`. Steps beyond `steps` are not left out."""
        return {steps if step == "last" else step for step in self.steps}


class _CommonKeys(Strict):
    """The keys that a file and a request have in common."""

    title: str | None = None
    model: ModelConfig
    data: DataConfig
    batch: Positive
    steps: Annotated[int, Field(gt=0, le=MOST_STEPS, strict=True)]
    checkpoints: Checkpoints | None = None
    # Whether PyTorch is told to use deterministic algorithms alone
    deterministic: bool = True
    # Seconds after which the state of a run is saved, to continue from
    save_every: Above = 300.0


class TrainConfig(_CommonKeys):
    """The keys of a YAML file for `numdev train`."""

    seeds: Seeds = (0,)  # A list, or how many, counted from 0
    # Steps at which everything is measured (`recorded_steps`)
    record: Literal["log"] | tuple[Count, ...] = "log"
    record_every: Positive | None = None  # and all multiples of this
    optimiser: Optimiser = Optimiser()
    variants: tuple[VariantConfig, ...]
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @model_validator(mode="after")
    def _check_consistency(self) -> TrainConfig:
        """Returns the configuration as it is. Raises ValueError where not exactly one
        variant has the role `golden`, where two variants would write to one folder, and
        where checkpoints are asked for of a variant that the file lacks."""
        names = [v.name for v in self.variants]
        golden = sum(v.role == "golden" for v in self.variants)
        if golden != 1:
            raise ValueError(f"variants: expected one with the role golden, got {golden}")
        (folder, count), *_ = Counter(map(folder_prefix, names)).most_common(1)
        if count > 1:
            raise ValueError(
                f"variants: expected distinct names, got {folder!r} {count} times"
            )
        for name in (self.checkpoints.variants or ()) if self.checkpoints else ():
            if name not in names:
                raise ValueError(
                    f"checkpoints: no variant {name!r}; {closest(name, names)}"
                )
        return self


class TrainRequest(_CommonKeys):
    """A training run with everything resolved: what `resolve` returns."""

    target: str
    seeds: tuple[int, ...]
    recorded: tuple[int, ...]
    variants: tuple[ResolvedVariant, ...]  # in the order of the file
    device: str

    @property
    def golden(self) -> ResolvedVariant:
        """Returns the variant with the role `golden`, which all others are compared with.
        A request has one."""
        return next(v for v in self.variants if v.role == "golden")

    def fields_of_numbers(self) -> dict[str, object]:
        """Returns the fields that decide the numbers, in JSON's types: all but `title`
        and `save_every`. A run can only be continued with the same ones."""
        return self.model_dump(mode="json", exclude={"title", "save_every"})


def resolve(
    config: TrainConfig,
    target: str,
    *,
    steps: int | None = None,
    seed: int | None = None,
    device: str | None = None,
) -> TrainRequest:
    """Returns the request that a file and the flags of the command line come to. A flag
    beats the file; None: not set. `target`: the file as it is named in the report;
    `steps`: at least 1; `seed`: from where as many seeds as the file has are counted;
    `device`: `auto`, `cpu` or `cuda`. Raises UsageError for a checkpoint after the last
    step. One of the file's variants must be the golden one."""
    steps = steps or config.steps
    seeds = config.seeds if seed is None else tuple(range(seed, seed + len(config.seeds)))
    last = max(
        config.checkpoints.steps_to_write(steps) if config.checkpoints else (), default=0
    )
    if last > steps:
        raise UsageError(
            f"{target}: checkpoints: expected at most step {steps}, got {last}"
        )
    golden = next(v for v in config.variants if v.role == "golden")
    shared = {name: getattr(config, name) for name in _CommonKeys.model_fields}
    shared["steps"] = steps
    return TrainRequest(
        **shared,
        target=target,
        seeds=seeds,
        recorded=recorded_steps(config.record, config.record_every, steps),
        variants=tuple(
            _resolve_variant(v, golden, config.optimiser) for v in config.variants
        ),
        device=device or config.device,
    )


def _resolve_variant(
    v: VariantConfig, golden: VariantConfig, optimiser: Optimiser
) -> ResolvedVariant:
    """Returns a variant with the kernel and formats of the golden run where it has none
    (the format is bfloat16 where neither has one). Settings of the optimiser are those of
    the variant, else of the golden run, else `optimiser`, the file's."""
    for changes in (golden.optimiser, v.optimiser):
        if changes is not None:
            update = changes.model_dump(exclude_unset=True)
            optimiser = optimiser.model_copy(update=update)
    as_golden: dict[str, object] = {
        "kernel": golden.kernel,
        "format": golden.format or "bfloat16",
        "attention_format": golden.attention_format,
    }
    stated = {name: value for name, value in v if value is not None}
    return ResolvedVariant.model_validate({**as_golden, **stated, "optimiser": optimiser})


def recorded_steps(
    record: Literal["log"] | tuple[int, ...], every: int | None, steps: int
) -> tuple[int, ...]:
    """Returns the steps to record, ascending: 0, `steps`, multiples of `every` (None:
    none), and those of `record`, or for `log` 1, 2, 3 and 5 times powers of ten. Steps
    beyond `steps` are dropped, and each step is there once."""
    chosen: set[int] = {0, steps, *(range(0, steps + 1, every) if every else ())}
    if record == "log":
        chosen |= {
            first * 10**n for n in range(len(str(steps))) for first in (1, 2, 3, 5)
        }
    else:
        chosen |= set(record)
    return tuple(sorted(step for step in chosen if step <= steps))
