"""What was asked: configurations and requests as validated data.

One model for each command: a YAML file (`numdev.yamlfile`) and the command line fill the
same fields (a flag beats the YAML, the YAML beats the default), and the report stores it
whole. A field with an `Option` is on the command line too; the string under it is its
help."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from numdev.errors import UsageError, closest, similar_file
from numdev.target_names import name_of
from numdev.yamlfile import (
    Names,
    Scalar,
    Strict,
    as_list,
    bundled_path,
    each_once,
    read_yaml,
    validated,
)

Positive = Annotated[int, Field(gt=0, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
Seconds = Annotated[float, Field(gt=0)]
Temperature = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]  # of probability
MaskKind = Literal[  # what `numdev.sources.input_regimes` can draw
    "all_true",
    "causal",
    "random",
    "mostly_masked",
    "padding",
    "one_empty",
    "bias",
    "bias_inf",
    "bias_lowest",
]
# `numdev.cases.laid_out`
Layout = Literal["contiguous", "transposed", "packed", "strided"]
MOST_SEEDS = 100_000


@dataclass(frozen=True)
class Option:
    """That a field is on the command line too, as `flag` if not by its own name."""

    flag: str = ""
    metavar: str | None = None


def _as_choice(value: object) -> object:
    """Returns a name, or a mapping {name: NAME, option: value, ...}, as the fields of a
    Choice (`name`, `options`). Other values, and a mapping with the key `options` or
    without `name`, are returned as they are."""
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping) and "name" in value and "options" not in value:
        return {
            "name": value["name"],
            "options": {k: v for k, v in value.items() if k != "name"},
        }
    return value


class Choice(Strict):
    """Something chosen by name, with options: a kernel, or an input regime."""

    name: str
    options: dict[str, Scalar] = Field(default_factory=dict)


Named = Annotated[Choice, BeforeValidator(_as_choice)]
BACKENDS = ("sdpa-math", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-default")
DEFAULT_KERNELS: tuple[Choice, ...] = tuple(Choice(name=name) for name in BACKENDS)


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
    """How many keys a query sees on each side, itself included, as models count sliding
    windows; under `causal` only the side before it."""
    softcap: Annotated[float, Field(gt=0)] | None = None
    scale: float | None = None
    """None: 1 / sqrt(head_dim)."""
    inputs: Named = Choice(name="normal")
    mask: MaskKind | None = None
    sinks: bool = False  # one extra logit per head, N(0, 1)
    layout: Layout = "contiguous"
    axes: dict[str, Scalar] = Field(default_factory=dict)
    """For a cell of a grid: its place on every axis. Filled in when the grid is
    expanded."""

    @property
    def entry(self) -> str:
        """Returns the name of the grid entry that the case comes from: its own name
        without its place on the axes."""
        # Axes of an input regime stand behind a slash of their own
        place = "[/,]".join(re.escape(f"{x}={value}") for x, value in self.axes.items())
        return re.sub(rf"/{place}\Z", "", self.name) if place else self.name

    @model_validator(mode="after")
    def _fits_together(self) -> CaseConfig:
        """Returns the case. Raises ValueError where heads is no multiple of kv_heads, and
        for the layout `packed` where q, k and v differ in length or head_dim."""
        if self.kv_heads and self.heads % self.kv_heads:
            what = (
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
            raise ValueError(what)
        alike = self.kv_len in (None, self.seq_len) and self.v_dim in (
            None,
            self.head_dim,
        )
        if self.layout == "packed" and not alike:
            raise ValueError(
                "layout packed: q, k and v in one tensor have one length and head_dim"
            )
        return self


def _with_distinct_names(cases: tuple[CaseConfig, ...]) -> tuple[CaseConfig, ...]:
    """Returns the cases, perhaps none. Raises ValueError for two of one name, since tasks
    and rows name a case by it."""
    each_once(tuple(case.name for case in cases) or (None,))
    return cases


Cases = Annotated[tuple[CaseConfig, ...], AfterValidator(_with_distinct_names)]


class CheckConfig(Strict):
    """The keys of a YAML file of cases for `numdev.check_attention`."""

    cases: Annotated[Cases, Field(min_length=1)]


class Placed(Strict):
    """Where a command runs. What is said to be null has its default."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    device: Annotated[str, Option()] = "auto"
    """Where to run.  [auto]"""

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, values: object) -> object:
        """Returns a mapping without the keys that are null, which then take their
        defaults; any other value as it is."""
        if isinstance(values, Mapping):
            return {name: value for name, value in values.items() if value is not None}
        return values


class Reading(Placed):
    """How a model is built, and what it reads."""

    model: Annotated[str | None, Option(metavar="FACTORY")] = None
    """For a state dict: package.module:factory, which builds its model. It is called with
    the configuration stored in the file if it takes an argument."""
    model_dtype: Annotated[str, Option(metavar="NAME")] = "float32"
    """Format the model itself runs in.  [float32]"""
    text: Annotated[tuple[str, ...], Option(metavar="PATH")] = ()
    """Text file the model reads. Repeatable. Default: random token ids."""
    tokenizer: Annotated[str | None, Option(metavar="DIR")] = None
    """Directory of the tokenizer for --text.  [the checkpoint's]"""
    inputs: Annotated[str | None, Option(metavar="FILE")] = None
    """Safetensors file of further inputs, named like the arguments of the model's
    forward, e.g. pixel_values. Missing required inputs are random."""
    length: Annotated[Positive, Option(metavar="N")] = 256
    """Tokens in a sequence.  [256]"""
    sequences: Annotated[Positive, Option(metavar="N")] = 8
    """Independent sequences (bias test: 8 or more).  [8]"""
    layers: Annotated[tuple[int, ...] | None, Option(metavar="LIST")] = None
    """Only these layers, e.g. 0,3-5.  [all]"""
    seed: Annotated[int, Option(metavar="N")] = 0
    """Seed of all random data.  [0]"""


class Measuring(Placed):
    """How kernels are run and measured, in an audit and in a sweep."""

    backward: Annotated[bool, Option()] = False
    """Measure the backward pass too: dq, dk and dv."""
    rows: Annotated[Positive | None, Option(metavar="N")] = None
    """Measure only N random query rows of each head, spread over positions, plus the 32
    that look worst in a full run of the kernel. The output and dq of these rows are
    exact. --backward samples keys too, which needs an fp64 forward pass of all queries.
    Averages get 95 % intervals; maxima are lower bounds. [all]"""
    isolate: Annotated[bool, Option()] = False
    """Run kernels in a process of their own, so that a crash or a hang costs one row."""
    reproducers: Annotated[Count, Option(metavar="N")] = 8
    """Write reproducer scripts for the first N findings.  [8]"""
    time_limit: Annotated[Seconds, Option(metavar="SECONDS")] = 60.0
    """Time limit of a kernel with --isolate or --workers.  [60]"""


class OneSource(Strict):
    """What calls are taken from."""

    checkpoint: str | None = None
    """A checkpoint directory, a state dict, a file or directory of captured tensors, or
    `demo`."""
    cases: Cases = ()

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        """Returns the configuration; raises ValueError unless it has exactly one of
        `checkpoint` and `cases`."""
        if bool(self.checkpoint) == bool(self.cases):
            raise ValueError("give either `checkpoint` or `cases`")
        return self


class AuditConfig(OneSource, Measuring, Reading):
    """The keys of a YAML file for `numdev audit`."""

    kernels: Annotated[tuple[Named, ...], Option("--kernel", "NAME")] = DEFAULT_KERNELS
    """Kernel to audit: a name of `numdev kernels`, or package.module:function.
    Repeatable; replaces the default, all SDPA backends."""
    formats: Annotated[tuple[str, ...], Option("--format", "NAME")] = ("bfloat16",)
    """Format to audit, e.g. bfloat16, float16, float32. Repeatable.  [bfloat16]"""
    generate: Annotated[Positive | None, Option(metavar="N")] = None
    """Let the model generate: audit the prefill and N decode steps with a cache, not one
    forward pass."""
    denoise: Annotated[Positive | None, Option(metavar="N")] = None
    """For a diffusers pipeline: run N denoising steps.  [4]"""
    steps: Annotated[tuple[Count, ...] | None, Option(metavar="LIST")] = None
    """Denoising steps to audit, 0-based: 0,3.  [all]"""
    stream: Annotated[bool, Option()] = False
    """Read weights from disk layer by layer during the run, with one layer in memory: for
    models too large to load whole."""
    heads: Annotated[tuple[int, ...] | None, Option(metavar="LIST")] = None
    """Only these query heads.  [all]"""
    explain: Annotated[bool, Option()] = False
    """Find which roundings cause each kernel's errors."""
    control: Annotated[bool, Option()] = False
    """Measure planted faults of growing size too, to show which of them a gate would
    catch."""
    repeats: Annotated[Positive, Option(metavar="N")] = 2
    """Run each kernel N times on the same inputs; 2 or more measure its noise.  [2]"""


class AuditRequest(AuditConfig):
    """A resolved audit: what was asked, with every default filled in, and what it is
    called."""

    target: str


def _as_seeds(value: object) -> object:
    """Returns a number N as the seeds 0 to N - 1; any other value (a list) as it is.
    Raises ValueError for a number below 1 or above MOST_SEEDS."""
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= MOST_SEEDS:
            raise ValueError(
                f"expected 1 to {MOST_SEEDS:,} seeds, or a list of them, got {value}"
            )
        return tuple(range(value))
    return value


Seeds = Annotated[
    tuple[Count, ...], BeforeValidator(_as_seeds), AfterValidator(each_once)
]
Kernels = Annotated[tuple[Named, ...], AfterValidator(each_once)]


class SweepConfig(Measuring):
    """The keys of a YAML file for `numdev sweep`."""

    title: str | None = None
    cases: Annotated[Cases, Field(min_length=1)]
    kernels: Annotated[Kernels, Option("--kernel", "NAME")] = DEFAULT_KERNELS
    """Kernel to sweep: a name of `numdev kernels`, or package.module:function.
    Repeatable; replaces the file's."""
    formats: Annotated[Names, Option("--format", "NAME")] = ("bfloat16",)
    """Format, e.g. bfloat16, or e8m10 for kernels that take any. Repeatable; replaces the
    file's."""
    seeds: Seeds = (0, 1, 2, 3, 4)
    """A list, or how many, counted from 0. Every case gets new inputs for each."""
    baseline: Named = Choice(name="baseline")
    """What ratios are relative to. An emulation replaces it where plain attention has no
    format."""
    x: str | None = None
    """The axis curves run along: a key with several values, `format`, or a kernel's
    option."""
    y: Names = ("max_abs", "rms")
    """Metrics to plot."""
    keep: Literal["head", "cell"] = "head"
    """`head`: the report keeps a row for every head and seed. `cell`: only what they come
    to."""
    repeats: Annotated[Positive, Option(metavar="N")] = 1
    """Run each kernel N times on the same inputs; 2 or more measure its noise.  [1]"""


class SweepRequest(SweepConfig):
    """A resolved sweep: what was asked, with every default filled in, and what it is
    called."""

    target: str

    def measured(self) -> dict[str, object]:
        """Returns the request as plain data without `title`, `x`, `y` and `keep`, which
        change no measured number. A run continues only where this is the same."""
        return self.model_dump(mode="json", exclude={"title", "x", "y", "keep"})


class DiagnoseRequest(Reading):
    target: str  # what it is called
    targets: tuple[str, ...]
    attention: dict[str, Scalar]  # the options of `emulated` that are diagnosed
    format: Annotated[str, Option(metavar="NAME")] = "bfloat16"
    """Format of q, k, v and of the attention's roundings.  [bfloat16]"""
    kernels: Annotated[tuple[Named, ...] | None, Option("--kernel", "NAME")] = None
    """Real kernel to compare on the same inputs. Repeatable.  [sdpa-flash and baseline,
    where they run]"""
    cures: Annotated[bool, Option("--cures/--no-cures")] = True
    """Whether to measure what each cure changes.  [cures]"""
    every_checkpoint: Annotated[bool, Option()] = False
    """Cures and real kernels for every checkpoint of a series, not for the last alone."""


class EffectsRequest(Reading):
    """A resolved study of what rounding does to a model's output."""

    target: str  # what it is called
    checkpoint: str
    kernels: Annotated[tuple[Named, ...], Option("--kernel", "NAME")] = DEFAULT_KERNELS
    """Kernel for the model's attention: a name of `numdev kernels`, or
    package.module:function. Repeatable; replaces the default, all SDPA backends."""
    formats: Annotated[tuple[str, ...], Option("--format", "NAME")] = ("bfloat16",)
    """Format the model runs in, for example bfloat16, float16, float32. Repeatable.
    [bfloat16]"""
    against: Annotated[str, Option(metavar="KERNEL")] = "baseline"
    """Kernel that every other one's output is also compared with.  [baseline, eager
    attention]"""
    sites: Annotated[bool, Option("--sites/--no-sites")] = True
    """Also round one site of the model at a time, to show the share of each.  [sites]"""
    by_layer: Annotated[bool, Option()] = False
    """Also run attention in the format in one layer at a time, with the first kernel."""
    generate: Annotated[Positive | None, Option(metavar="N")] = None
    """Also decode the last N tokens with a cache, and compare with one pass."""
    compile: Annotated[bool, Option()] = False
    """Also run the model under torch.compile, and compare with the model as it is."""
    denoise: Annotated[Positive | None, Option(metavar="N")] = None
    """For a diffusers pipeline: run N denoising steps.  [4]"""
    stream: Annotated[bool, Option()] = False
    """Read the model's weights from disk layer by layer while it runs."""
    time_limit: Annotated[Seconds, Option(metavar="SECONDS")] = 60.0
    """Time limit of a kernel with --isolate.  [60]"""
    isolate: Annotated[bool, Option()] = False
    """Run kernels in a process of their own."""
    # Of a Reading; the whole model is run, in fp64 and in the formats
    layers: None = None
    model_dtype: Literal["float64"] = "float64"


def effects_request(target: str, flags: Mapping[str, object]) -> EffectsRequest:
    """Returns the request of `numdev effects`. `target`: a checkpoint's path, the name of
    a model in the local Hugging Face cache, or `demo`; `flags`: options by field; None
    and () mean that an option was not set. Raises UsageError for a target that does not
    exist, and for a wrong option."""
    name, path = name_of(Path(target)), str(Path(target))
    if target == "demo" or not Path(target).exists():
        name, path = target, target if target == "demo" else _cached_model(target)
    asked = {**_options_set(flags), "target": name, "checkpoint": path}
    return validated(asked, EffectsRequest, f"numdev effects {target}")


class LogprobsRequest(Placed):
    """A resolved study of log-probabilities that two programs recorded."""

    target: str  # what it is called
    files: tuple[str, ...]
    model: Annotated[str | None, Option(metavar="CHECKPOINT")] = None
    """Checkpoint that was sampled and trained, or `demo`: its exact log-probabilities
    tell which side is off. Without it only the difference of two sides is known."""
    previous: Annotated[str | None, Option(metavar="CHECKPOINT")] = None
    """An earlier checkpoint, to tell stale weights."""
    adapter: Annotated[str | None, Option(metavar="DIR")] = None
    """Adapter (LoRA, as PEFT writes it) that both sides are meant to add to the model."""
    repeat: Annotated[str | None, Option(metavar="FILE")] = None
    """A second run of one side on the same tokens, to tell chance from rounding: of the
    side that FILE names, else of the first."""
    temperature: Annotated[Temperature | None, Option(metavar="T")] = None
    """Temperature that the values are meant to be under, where a file does not say.
    [1]"""
    top_p: Annotated[Share | None, Option(metavar="P")] = None
    """Filter that the values are meant to be renormalised by.  [none]"""
    top_k: Annotated[Positive | None, Option(metavar="K")] = None
    """The same, of the K likeliest tokens.  [none]"""
    min_p: Annotated[Share | None, Option(metavar="P")] = None
    """The same, of tokens with P times the likeliest one's probability.  [none]"""
    format: Annotated[str, Option(metavar="NAME")] = "bfloat16"
    """Format whose roundings are predicted, where a file does not say.  [bfloat16]"""
    head: Annotated[str | None, Option(metavar="NAME")] = None
    """Format that the head multiplies in, where a file does not say and it is not that of
    the rest, as float32.  [the same]"""
    attention: Annotated[Literal["sdpa", "eager"], Option(metavar="NAME")] = "sdpa"
    """How attention rounds: sdpa (as FlashAttention-2), or eager.  [sdpa]"""
    clip_low: Annotated[float, Field(gt=0), Option(metavar="R")] = 0.8
    """Importance ratio below which training clips.  [0.8]"""
    clip_high: Annotated[float, Field(gt=0), Option(metavar="R")] = 1.2
    """Importance ratio above which training clips.  [1.2]"""
    sequences: Annotated[Positive | None, Option(metavar="N")] = None
    """Compare only N sequences, evenly spread.  [all]"""
    stream: Annotated[bool, Option()] = False
    """Read the model's weights from disk layer by layer while it runs."""
    show_text: Annotated[bool, Option()] = False
    """Show the worst tokens as text; by default a report has their ids alone."""


def logprobs_request(
    files: Sequence[str], flags: Mapping[str, object]
) -> LogprobsRequest:
    """Returns the request of `numdev logprobs` on one file or two, which are not opened.
    `flags`: options by field; None and () mean that an option was not set. Raises
    UsageError for another number of files, and for a wrong option."""
    if not 1 <= len(files) <= 2:
        raise UsageError(f"logprobs: expected one file or two, got {len(files)}")
    paths = tuple(str(Path(file)) for file in files)
    asked = {**_options_set(flags), "target": name_of(Path(files[0])), "files": paths}
    return validated(asked, LogprobsRequest, f"numdev logprobs {' '.join(files)}")


AXES: Mapping[str, str] = {
    "repeat": "nothing that was given",
    "batch": "the number of sequences in the batch",
    "order": "the order of sequences in the batch",
    "neighbours": "the values of other sequences",
    "lengths": "the lengths of other sequences",
    "padding": "side and amount of padding",
    "heads": "the number of heads in the call",
    "rows": "the number of queries in the call",
    "longer": "later tokens that no row sees",
    "chunks": "how a prefill is cut into chunks",
    "decode": "whether a row is decoded or prefilled",
    "paged": "whether keys and values come from pages",
    "mask": "whether the mask is a flag or a tensor",
    "strides": "the layout in memory",
    "threads": "the number of threads",
    "graph": "whether it runs in a CUDA graph",
    "compiled": "whether it is compiled",
    "tiles": "its tiles and splits of the keys",
    "beyond": "what lies beyond its inputs in memory",
    "hidden": "keys that a mask hides",
    "hidden-nan": "keys that a mask hides, where these hold NaN",
    "unwritten": "what the memory of its output held before",
}
"""The axes of `numdev invariance`, and what a kernel depends on that changes along
one."""
# Axes that are gone along only where they are asked for by name
ONLY_ASKED = ("compiled",)


def _checked_axis(name: str) -> str:
    """Returns the name of an axis of invariance. Raises ValueError for a name that is not
    in AXES; the message has the most similar one, or all where none is similar."""
    if name not in AXES:
        raise ValueError(f"there is no axis {name!r}; {closest(name, AXES)}")
    return name


Axis = Annotated[str, AfterValidator(_checked_axis)]
Axes = Annotated[tuple[Axis, ...], BeforeValidator(as_list)]


class InvarianceConfig(OneSource, Reading):
    """The keys of a YAML file for `numdev invariance`."""

    kernels: Annotated[tuple[Named, ...], Option("--kernel", "NAME")] = DEFAULT_KERNELS
    """Kernel to test: a name of `numdev kernels`, or package.module:function. Repeatable;
    replaces the default, all SDPA backends."""
    formats: Annotated[tuple[str, ...], Option("--format", "NAME")] = ("bfloat16",)
    """Format, for example bfloat16, float16, float32. Repeatable.  [bfloat16]"""
    backward: Annotated[bool, Option()] = False
    """Compare the backward pass too: dq, dk and dv."""
    axes: Annotated[Axes, Option("--axis", "NAME")] = ()
    """Axis to test, for example batch. Repeatable.  [all but compiled]"""
    require: Annotated[Axes, Option("--require", "NAME")] = ()
    """Axis along which every kernel must be bit-identical: the exit code says whether it
    is. Repeatable; without --axis only these are tested."""
    sequences: Annotated[Positive, Option(metavar="N")] = 2
    """Sequences that the model reads.  [2]"""
    logits: Annotated[bool, Option("--logits/--no-logits")] = True
    """Whether to compare the model's own output too.  [logits]"""
    isolate: Annotated[bool, Option()] = False
    """Run kernels in a process of their own, so that a crash or a hang costs one row."""
    time_limit: Annotated[Seconds, Option(metavar="SECONDS")] = 60.0
    """What an isolated kernel may take.  [60]"""


class InvarianceRequest(InvarianceConfig):
    target: str  # what it is called

    @property
    def axes_asked(self) -> tuple[str, ...]:
        """Returns the axes that were set by name, in `axes` or `require`, each once;
        empty where all are to be tested."""
        return tuple(dict.fromkeys((*self.axes, *self.require)))


def invariance_request(target: str, flags: Mapping[str, object]) -> InvarianceRequest:
    """Returns the request of `numdev invariance`: the fields of a YAML file, if the
    target is one, else the target as `checkpoint`; and over them `flags` (options by
    field; None and () mean that an option was not set). Raises UsageError for a target
    that does not exist, and for a wrong key or option."""
    name, fields = _target_fields(target, InvarianceConfig)
    return validated(
        {**fields, **_options_set(flags), "target": name}, InvarianceRequest, target
    )


def audit_request(
    target: str | None,
    flags: Mapping[str, object],
    fields: Mapping[str, object] | None = None,
) -> AuditRequest:
    """Returns the request of `numdev audit`: the fields of `target`'s YAML file, if it is
    one (None: configs/audit/default.yaml), else the target as `checkpoint`; and over them
    `flags` (options by field; None and () mean that an option was not set). `fields`: the
    fields of a target in memory, of which `target` is only the name; None: it is a path
    or a name. Raises UsageError for a target that does not exist, and for a wrong key or
    option."""
    path = str(bundled_path("audit/default.yaml") if target is None else target)
    named = (
        (str(target), dict(fields))
        if fields is not None
        else _target_fields(path, AuditConfig)
    )
    return validated(
        {**named[1], **_options_set(flags), "target": named[0]}, AuditRequest, path
    )


def _target_fields(
    target: str, config: type[AuditConfig | InvarianceConfig]
) -> tuple[str, dict[str, object]]:
    """Returns a target's name, and the fields of a request that it sets. Those are the
    fields in a YAML file; of `demo`, and of another file or folder, `checkpoint`; of a
    name that is no path `checkpoint`, the folder in the local cache. Raises UsageError
    for a target that does not exist, and for a wrong key of the file."""
    path = Path(target)
    if target == "demo":
        return "demo", {"checkpoint": "demo"}
    if path.suffix in (".yaml", ".yml"):
        named = read_yaml(path, config)
        return path.name, {n: getattr(named, n) for n in named.model_fields_set}
    if path.exists():
        return name_of(path), {"checkpoint": str(path)}
    return target, {"checkpoint": _cached_model(target)}


def sweep_request(path: Path, flags: Mapping[str, object]) -> SweepRequest:
    """Returns the request of `numdev sweep`: the fields of a YAML file, and over them
    `flags` (options by field; None and () mean that an option was not set).
    `flags["seed"]` replaces the file's seeds by as many from that number on. Raises
    UsageError for a file that cannot be read, and for a wrong key or option."""
    asked = _options_set(flags)
    first = asked.pop("seed", None)
    config = read_yaml(path, SweepConfig)
    fields = {name: getattr(config, name) for name in config.model_fields_set}
    if isinstance(first, int):
        asked["seeds"] = tuple(range(first, first + len(config.seeds)))
    return validated({**fields, **asked, "target": path.name}, SweepRequest, str(path))


def _cached_model(name: str) -> str:
    """Returns the folder of a model of this name in the local cache of Hugging Face;
    nothing is downloaded. Raises UsageError where the cache does not have it, for a name
    that is rather a path (`_is_path`), and where a file of a similar name is there."""
    hint = "give a checkpoint, a file of captured tensors, a YAML file, or `demo`"
    if near := similar_file(Path(name)):
        hint = f"did you mean {str(near)!r}?"
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII) and not _is_path(name):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            return snapshot_download(name, local_files_only=True)
        except (HFValidationError, LocalEntryNotFoundError):
            hint += (
                f"; a Hugging Face model must be downloaded first: `hf download {name}`"
            )
    raise UsageError(f"{name}: no such file or directory", hint=hint)


def _is_path(name: str) -> bool:
    """Whether `part/part` is rather the path of a missing file than a model's name: its
    first part is a folder, it begins with `.` or `~`, or its ending is a file's."""
    path = Path(name)
    endings = "safetensors bin pt pth ckpt gguf onnx json jsonl yaml yml py txt html npz"
    is_file = path.suffix.lower().removeprefix(".") in endings.split()
    return is_file or name.startswith((".", "~")) or path.parent.is_dir()


def _options_set(flags: Mapping[str, object]) -> dict[str, object]:
    """Returns the options that were set, by field: those that are neither None nor ()."""
    return {
        name: value for name, value in flags.items() if value is not None and value != ()
    }


def demo_checkpoint() -> Path:
    """Returns the directory of the checkpoint that ships with numdev."""
    return Path(__file__).parent / "data" / "demo"
