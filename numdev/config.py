"""What was asked: configurations and requests as validated data.

A YAML file is validated against the models here; an unknown key is an error that names the closest
known one. A list where a scalar belongs is a grid: the entry is repeated for every value, and
several lists multiply. A request is what a configuration and the command line come to together
(flag beats YAML, YAML beats default); it is stored whole in the report.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from numdev.errors import UsageError, closest

Scalar = bool | int | float | str | None
Positive = Annotated[int, Field(gt=0, strict=True)]
Step = Annotated[int, Field(ge=0, strict=True)]


MOST_CELLS = 100_000
"""Of a grid in one file: more are a slip of the pen, and would fill the memory."""
MOST_SEEDS = 100_000
MOST_VALUES = 200_000
"""Of one file, aliases written out."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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
"""What `numdev.masks` can draw."""
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


def _each_once(values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    if values is not None:
        if not values:
            raise ValueError("is an empty list")
        twice = next((v for v, n in Counter(map(str, values)).items() if n > 1), None)
        if twice is not None:
            raise ValueError(f"names {twice} twice")
    return values


def _as_list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Seed = Annotated[int, Field(ge=0, strict=True)]
Seeds = Annotated[tuple[Seed, ...], BeforeValidator(_seeds), AfterValidator(_each_once)]
Names = Annotated[tuple[str, ...], BeforeValidator(_as_list), AfterValidator(_each_once)]
Kernels = Annotated[tuple[Named, ...], AfterValidator(_each_once)]
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


M = TypeVar("M", bound=BaseModel)


def read_yaml(path: Path, model: type[M]) -> M:
    """A YAML file as a validated model; raises UsageError that names the file and the key."""
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_EachKeyOnce)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: cannot be read (no such file)", hint=_shipped(path)) from error
    except (OSError, ValueError) as error:  # not text, or a value such as the date 2024-13-01
        raise UsageError(f"{path}: cannot be read ({error})", hint="give a YAML file") from error
    except RecursionError as error:
        raise UsageError(
            f"{path}: is nested too deeply", hint="see the files under configs/"
        ) from error
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or "malformed"
        raise UsageError(
            f"{path}{line}: not valid YAML: {problem}", hint="fix that line"
        ) from error
    if not isinstance(raw, dict):
        raise UsageError(f"{path}: holds no mapping of keys", hint="see the files under configs/")
    if _endless(raw):
        raise UsageError(
            f"{path}: comes to more than {MOST_VALUES:,} values", hint="see to its aliases (*name)"
        )
    return validated(raw, model, str(path))


class _EachKeyOnce(yaml.SafeLoader):
    """YAML forbids a key that stands twice in a mapping; of two limits the loader would take the
    last and say nothing."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                problem = f"the key {key.value!r} stands twice"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            seen.add(str(key.value))
        return node


def validated(raw: Mapping[str, Any], model: type[M], where: str) -> M:
    """A mapping as a validated model, its grids expanded; raises UsageError that names `where` it
    stands and the key."""
    for part, cells in (("cases", expand), ("kernels", expand_options)):
        if isinstance(raw.get(part), list):
            found = (cell for entry in raw[part] for cell in cells(entry, where))
            raw = {**raw, part: list(itertools.islice(found, MOST_CELLS + 1))}
            if len(raw[part]) > MOST_CELLS:
                raise UsageError(
                    f"{where}: {part}: a grid of more than {MOST_CELLS:,} cells",
                    hint="give fewer values, or several files",
                )
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise UsageError(f"{where}: {_explain(error, model)}") from error


def lines_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Of a YAML file that can be read, for each key of its mapping: the line, from 1, where the key
    stands, then those where the entries of its list or mapping begin."""
    tree = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    found = {}
    for key, value in tree.value if isinstance(tree, yaml.MappingNode) else ():
        entries = value.value if isinstance(value, yaml.CollectionNode) else ()
        begin = (entry[0] if isinstance(entry, tuple) else entry for entry in entries)
        found[str(key.value)] = (key.start_mark.line + 1, *(e.start_mark.line + 1 for e in begin))
    return found


def _endless(raw: Any) -> bool:
    """Whether aliases that repeat aliases come to more values than any file would hold. Such values
    are small in memory, until something writes them out."""
    waiting, seen = [raw], 0
    while waiting and seen <= MOST_VALUES:
        value = waiting.pop()
        seen += 1
        if isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value
    return seen > MOST_VALUES


def expand(entry: Any, where: str) -> Iterator[Any]:
    """The cells of one grid entry: every list (also inside `inputs`) is an axis.

    A cell's name says its place on every axis. A value of the axis `inputs` may hold axes itself.
    Raises UsageError for an empty axis.
    """
    if not isinstance(entry, dict):
        yield entry
        return
    inputs = entry.get("inputs")
    axes: list[tuple[tuple[str, ...], list[Any]]] = [
        ((key,), value) for key, value in entry.items() if isinstance(value, list)
    ]
    if isinstance(inputs, dict):
        axes += [(("inputs", k), v) for k, v in inputs.items() if isinstance(v, list)]
    for path, values in axes:
        if not values:
            raise UsageError(f"{where}: {'.'.join(path)} is an empty list", hint="give it values")
    for cell in itertools.product(*(values for _, values in axes)):
        case = {**entry, "inputs": dict(inputs)} if isinstance(inputs, dict) else dict(entry)
        place = {}
        for (path, _), value in zip(axes, cell, strict=True):
            target = case if len(path) == 1 else case["inputs"]
            target[path[-1]] = value
            place[path[-1]] = _shown(value)
        if place:
            case["axes"] = {**case.get("axes", {}), **place}
            shown = ",".join(f"{axis}={value}" for axis, value in place.items())
            if "name" in case:  # else its absence is what validation reports
                case["name"] = f"{case['name']}/{shown}"
        if isinstance(case.get("inputs"), dict) and case["inputs"] != inputs:
            yield from expand(case, where)
        else:
            yield case


def expand_options(entry: Any, where: str) -> Iterator[Any]:
    """The kernels of one entry of `kernels`: every list among its options is an axis."""
    if not isinstance(entry, dict):
        yield entry
        return
    if isinstance(entry.get("options"), dict):
        options = expand_options(entry["options"], where)
        entries = [{**entry, "options": given} for given in options]
    else:
        entries = [entry]
    for each in entries:
        axes = {key: value for key, value in each.items() if isinstance(value, list)}
        for key, values in axes.items():
            if not values:
                raise UsageError(f"{where}: kernels: {key} is an empty list", hint="give it values")
        for cell in itertools.product(*axes.values()):
            yield {**each, **dict(zip(axes, cell, strict=True))}


def _shown(value: Any) -> str:
    """A value as a cell's name has it; of a regime its name and the options it is given."""
    if not isinstance(value, dict):
        return type(value).__name__ if isinstance(value, list) else str(value)
    nested = (list, dict)
    options = [f"{k}={v}" for k, v in value.items() if k != "name" and not isinstance(v, nested)]
    return f"{value.get('name')}({','.join(options)})" if options else str(value.get("name"))


def bundled(name: str) -> Path:
    """A file of `configs/`, from the source tree or from inside the installed package."""
    for folder in (Path(__file__).parent / "configs", Path(__file__).parent.parent / "configs"):
        if (folder / name).is_file():
            return folder / name
    raise UsageError(f"the bundled configuration {name} is missing", hint="reinstall numdev")


def _shipped(path: Path) -> str:
    """Where a file is of which the documentation speaks as it is called in the source tree."""
    try:
        return f"numdev's own is {bundled(path.relative_to('configs').as_posix())}"
    except (UsageError, ValueError):
        return "give a YAML file"


def demo_checkpoint() -> Path:
    """The demo checkpoint that ships with the package."""
    from importlib import resources  # ten milliseconds that most commands need not wait for

    return Path(str(resources.files("numdev"))) / "data" / "demo"


def _explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first thing wrong, in one sentence, with the closest known key for an unknown one.

    An unknown key comes first: a misspelt one is also missed under its right name.
    """
    errors = error.errors()
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        nested = _model_at(first["loc"], model)
        hint = closest(str(first["loc"][-1]), nested.model_fields)
        return f"unknown key {where!r}; {hint}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def _model_at(place: tuple[int | str, ...], model: type[BaseModel]) -> type[BaseModel]:
    """The model whose key stands at the end of `place`, for example cases.0.inputs.KEY."""
    for part in place[:-1]:
        if part in model.model_fields:
            model = _model_in(model.model_fields[str(part)].annotation) or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The first model an annotation speaks of: of `tuple[CaseConfig, ...]`, CaseConfig."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _model_in(arg))), None)
