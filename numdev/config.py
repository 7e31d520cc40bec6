"""What was asked: configurations and requests as validated data.

A YAML file (`numdev.yamlfile`) is validated against the models here. A request is what a
configuration and the command line come to together (flag beats YAML, YAML beats default); it is
stored whole in the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from numdev.yamlfile import Names, Scalar, Strict, each_once

Positive = Annotated[int, Field(gt=0, strict=True)]
Step = Annotated[int, Field(ge=0, strict=True)]
MOST_SEEDS = 100_000


def _named(value: Any) -> Any:
    """`NAME`, or {name: NAME, option: value, ...}, as a Choice."""
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping) and "name" in value and "options" not in value:
        return {"name": value["name"], "options": {k: v for k, v in value.items() if k != "name"}}
    return value


class Choice(Strict):
    """Something chosen by name, with options: a kernel, or an input regime."""

    name: str
    options: dict[str, Scalar] = Field(default_factory=dict)


Named = Annotated[Choice, BeforeValidator(_named)]


MaskKind = Literal[
    "all_true", "causal", "random", "mostly_masked", "padding", "bias", "bias_inf", "bias_lowest"
]
"""What `numdev.sources.synthetic` can draw."""
Layout = Literal["contiguous", "transposed", "packed"]
"""How q, k and v lie in memory (`numdev.layouts`)."""


class CaseConfig(Strict):
    """One attention call to draw. Every scalar may be a list in YAML (a grid)."""

    name: str
    batch: Positive = 1
    heads: Positive
    kv_heads: Positive | None = None
    seq_len: Positive
    kv_len: Positive | None = None
    head_dim: Positive
    v_dim: Positive | None = None
    causal: bool = False
    causal_offset: int = 0
    window: Positive | None = None
    """How many keys a query sees on each side, itself included, as models count sliding windows;
    under `causal` only the side before it."""
    softcap: Annotated[float, Field(gt=0)] | None = None
    scale: float | None = None
    """None: 1 / sqrt(head_dim)."""
    inputs: Named = Choice(name="normal")
    mask: MaskKind | None = None
    layout: Layout = "contiguous"
    axes: dict[str, Scalar] = Field(default_factory=dict)
    """For a cell of a grid: its place on every axis. Filled in when the grid is expanded."""

    @property
    def entry(self) -> str:
        """The name of the grid entry it comes from."""
        place = ",".join(f"{axis}={value}" for axis, value in self.axes.items())
        return self.name.removesuffix(f"/{place}") if place else self.name

    @model_validator(mode="after")
    def _heads_divide(self) -> CaseConfig:
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        return self

    @model_validator(mode="after")
    def _packable(self) -> CaseConfig:
        alike = self.kv_len in (None, self.seq_len) and self.v_dim in (None, self.head_dim)
        if self.layout == "packed" and not alike:
            raise ValueError("layout packed: q, k and v in one tensor have one length and head_dim")
        return self


def _distinct(cases: tuple[CaseConfig, ...]) -> tuple[CaseConfig, ...]:
    """Tasks and rows know a case by its name, so two of one name would be taken for one."""
    name, count = next(iter(Counter(case.name for case in cases).most_common(1)), ("", 0))
    if count > 1:
        raise ValueError(f"{count} cases are called {name!r}")
    return cases


Cases = Annotated[tuple[CaseConfig, ...], AfterValidator(_distinct)]


class CheckConfig(Strict):
    """The keys of a YAML file of cases for `numdev.check_attention`."""

    cases: Annotated[Cases, Field(min_length=1)]


class AuditConfig(Strict):
    """The keys of a YAML file for `numdev audit`. None: the default of the command."""

    checkpoint: str | None = None
    cases: Cases = ()
    model: str | None = None
    kernels: tuple[Named, ...] | None = None
    formats: tuple[str, ...] | None = None
    model_dtype: str | None = None
    device: str | None = None
    seed: int | None = None
    text: tuple[str, ...] | None = None
    tokenizer: str | None = None
    inputs: str | None = None
    generate: Positive | None = None
    denoise: Positive | None = None
    """For a diffusers pipeline: how many denoising steps are run."""
    steps: tuple[Step, ...] | None = None
    """Only these of them, counted from 0."""
    stream: bool | None = None
    """Whether weights are read layer by layer while the model runs. None: where they are too large
    to be loaded whole."""
    length: Positive | None = None
    sequences: Positive | None = None
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    explain: bool | None = None
    control: bool | None = None
    gradients: bool | None = None
    """Whether the backward pass is measured too: dq, dk and dv."""
    repeats: Positive | None = None
    """How often each kernel runs on the same inputs; from two on its noise is measured."""
    isolate: bool | None = None
    """Whether kernels run in a supervised process, so that a crash or a hang costs one row."""
    time_limit: Annotated[float, Field(gt=0)] | None = None
    """Seconds that an isolated kernel may take."""
    reproducers: Annotated[int, Field(ge=0)] | None = None
    """For how many findings, in the order of the rules, a script is written that shows them."""
    sampled_rows: Positive | None = None
    """How many query rows of each head are measured, drawn with the seed; None: all."""

    @model_validator(mode="after")
    def _one_source(self) -> AuditConfig:
        if bool(self.checkpoint) == bool(self.cases):
            raise ValueError("give either `checkpoint` or `cases`")
        return self


class AuditRequest(Strict):
    """A resolved audit: what was asked, with every default filled in."""

    target: str
    checkpoint: str | None = None
    """A checkpoint directory, a state dict, a file or directory of captured tensors, or `demo`."""
    cases: Cases = ()
    model: str | None = None
    """The factory of a state dict's model, as package.module:name."""
    kernels: tuple[Choice, ...]
    formats: tuple[str, ...] = ("bfloat16",)
    model_dtype: str = "float32"
    device: str = "auto"
    seed: int = 0
    text: tuple[str, ...] = ()
    tokenizer: str | None = None
    """A directory; None: the checkpoint's own."""
    inputs: str | None = None
    """A safetensors file of arguments for the model's forward."""
    generate: Positive | None = None
    """Decode this many tokens after the prefill; None: one forward pass."""
    denoise: Positive | None = None
    """For a diffusers pipeline: how many denoising steps are run. None: 4."""
    steps: tuple[Step, ...] | None = None
    """Only these of them, counted from 0; None: all."""
    stream: bool | None = None
    """Whether weights are read layer by layer while the model runs. None: where they are too large
    to be loaded whole."""
    length: Positive = 256
    sequences: Positive = 8
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    explain: bool = False
    """Whether to find out which roundings make each kernel's errors."""
    control: bool = False
    """Whether planted faults are measured beside the kernels, to show what a gate would catch."""
    gradients: bool = False
    """Whether the backward pass is measured too: dq, dk and dv."""
    repeats: Positive = 2
    """How often each kernel runs on the same inputs; from two on its noise is measured."""
    isolate: bool = False
    """Whether kernels run in a supervised process, so that a crash or a hang costs one row."""
    time_limit: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that an isolated kernel may take."""
    reproducers: Annotated[int, Field(ge=0)] = 8
    """For how many findings, in the order of the rules, a script is written that shows them."""
    sampled_rows: Positive | None = None
    """How many query rows of each head are measured, drawn with the seed; None: all."""


def _seeds(value: Any) -> Any:
    """A number of seeds as these seeds, counted from 0; a list as it is."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise ValueError(f"{value} seeds are none; give 1 or more, or a list of seeds")
        if value > MOST_SEEDS:
            raise ValueError(f"{value} seeds are too many; give up to {MOST_SEEDS:,}")
        return tuple(range(value))
    return value


Seed = Annotated[int, Field(ge=0, strict=True)]
Seeds = Annotated[tuple[Seed, ...], BeforeValidator(_seeds), AfterValidator(each_once)]
Kernels = Annotated[tuple[Named, ...], AfterValidator(each_once)]
RowsOf = Literal["head", "cell"]


class SweepConfig(Strict):
    """The keys of a YAML file for `numdev sweep`. None: the default of the command."""

    title: str | None = None
    cases: Cases
    kernels: Kernels | None = None
    formats: Names | None = None
    seeds: Seeds | None = None
    """A list, or how many, counted from 0. Each draws every case anew."""
    device: str | None = None
    baseline: Named | None = None
    """Whom ratios are taken to. An emulation stands in where plain attention has no format."""
    x: str | None = None
    """The axis curves run along: a key with several values, `format`, or a kernel's option."""
    y: Names | None = None
    """Metrics to draw."""
    gradients: bool | None = None
    """Whether the backward pass is measured too: dq, dk and dv."""
    repeats: Positive | None = None
    """How often each kernel runs on the same inputs; from two on its noise is measured."""
    isolate: bool | None = None
    """Whether kernels run in a supervised process, so that a crash or a hang costs one row."""
    time_limit: Annotated[float, Field(gt=0)] | None = None
    """Seconds that an isolated kernel may take."""
    reproducers: Annotated[int, Field(ge=0)] | None = None
    """For how many findings, in the order of the rules, a script is written that shows them."""
    sampled_rows: Positive | None = None
    """How many query rows of each head are measured, drawn with each case's seed; None: all."""
    rows: RowsOf | None = None
    """`head`: the report keeps a row for every head and seed. `cell`: only what they come to."""

    @model_validator(mode="after")
    def _not_empty(self) -> SweepConfig:
        if not self.cases:
            raise ValueError("`cases` is an empty grid; give it at least one case")
        return self


class SweepRequest(Strict):
    """A resolved sweep: what was asked, with every default filled in."""

    target: str
    title: str | None = None
    cases: Cases
    kernels: Kernels
    formats: Names = ("bfloat16",)
    seeds: Seeds = (0, 1, 2, 3, 4)
    device: str = "auto"
    baseline: Choice = Choice(name="baseline")
    x: str | None = None
    y: Names = ("max_abs", "rms")
    rows: RowsOf = "head"
    gradients: bool = False
    """Whether the backward pass is measured too: dq, dk and dv."""
    repeats: Positive = 1
    """How often each kernel runs on the same inputs; from two on its noise is measured."""
    isolate: bool = False
    """Whether kernels run in a supervised process, so that a crash or a hang costs one row."""
    time_limit: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that an isolated kernel may take."""
    reproducers: Annotated[int, Field(ge=0)] = 8
    """For how many findings, in the order of the rules, a script is written that shows them."""
    sampled_rows: Positive | None = None
    """How many query rows of each head are measured, drawn with each case's seed; None: all."""

    def measured(self) -> dict[str, Any]:
        """What decides the numbers, and so whether a finished task can be kept: not how they are
        shown."""
        return self.model_dump(mode="json", exclude={"title", "x", "y", "rows"})


def demo_checkpoint() -> Path:
    """The demo checkpoint that ships with the package."""
    from importlib import resources  # ten milliseconds that most commands need not wait for

    return Path(str(resources.files("numdev"))) / "data" / "demo"
