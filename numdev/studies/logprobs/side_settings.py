"""What the records of a side say of how it computed, and what its values are held to by
that: a temperature and a filter of each record, one format of all of them. Where records
of a side do not agree on what a side has one of, the plan says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from numdev.errors import UsageError
from numdev.formats import format_named
from numdev.request_models import LogprobsRequest
from numdev.studies.logprobs.records import RecordedSettings
from numdev.studies.logprobs.report import PlannedSide
from numdev.studies.logprobs.truth import ProgramRecipe, Support

# Filters that are tried beside those that the files and the request say
USUAL = (
    *(Support(top_p=p) for p in (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)),
    *(Support(top_k=k) for k in (10, 20, 40, 50, 100)),
    *(Support(min_p=p) for p in (0.01, 0.05, 0.1)),
)
# Formats that PyTorch builds a model in: no other one's roundings are predicted
PREDICTED = ("float64", "float32", "bfloat16", "float16")
PREDICTED_HEADS = (*PREDICTED, "tf32")  # a product alone may read its factors so
LONGEST_NAME = 40  # characters of what a record says, in a sentence
COLDEST = 1e-4  # a temperature below which servers take the likeliest token


def support_of(says: RecordedSettings, request: LogprobsRequest) -> Support:
    """Returns what a record's values are meant to be under: the temperature that it says,
    else the request's, else 1. A temperature below COLDEST, which is greedy, counts as 1.
    Each filter is the request's, else, where the record says that its values are
    processed, the record's; else none. Values that the record says are raw are at
    temperature 1, of all tokens, whatever the request says."""
    mode, temperature = says.logprobs_mode, says.temperature
    if mode == "raw_logprobs":
        return Support()
    filtered = _filter_of(says) if mode == "processed_logprobs" else Support()
    greedy = 1.0 if temperature is not None and temperature < COLDEST else None
    return Support(
        temperature=greedy or temperature or request.temperature or 1.0,
        top_p=request.top_p or filtered.top_p,
        top_k=request.top_k or filtered.top_k,
        min_p=request.min_p or filtered.min_p,
    )


def _filter_of(says: RecordedSettings) -> Support:
    """Returns the filter that a record says, at temperature 1: what leaves all tokens, as
    a top_k of -1 or a top_p of 1, is none."""
    p, k = says.top_p, says.top_k
    return Support(
        top_p=p if p is not None and p < 1 else None,
        top_k=k if k is not None and k > 0 else None,
        min_p=says.min_p or None,
    )


def supports_tried(
    settings: Sequence[RecordedSettings], request: LogprobsRequest
) -> list[Support]:
    """Returns the filters that are tried on every record of a side, each once: those that
    its records say, that of the request, and the usual ones; each at the records'
    temperature. Empty where the records are not held to one and the same temperature, and
    without records."""
    meant = [support_of(says, request) for says in settings]
    temperatures = {support.temperature for support in meant}
    if len(temperatures) != 1:
        return []
    filters = dict.fromkeys((*map(_filter_of, settings), *meant, *USUAL))
    (temperature,) = temperatures
    return list(
        dict.fromkeys(
            support._replace(temperature=temperature)
            for support in filters
            if not support.is_full
        )
    )


def recipe_of(
    settings: Sequence[RecordedSettings], request: LogprobsRequest
) -> ProgramRecipe:
    """Returns how a side rounds: its format, and the head's, as all of its records say,
    else as the request does. A format that is not in PREDICTED counts as not said, a head
    that is not in PREDICTED_HEADS as in the rest's. A head as narrow as the rest, though
    in another format, is taken to be of the rest's."""
    says = format_name(common(settings, "dtype"))
    fmt = says if says in PREDICTED else request.format
    head = format_name(common(settings, "head") or request.head)
    recipe = ProgramRecipe(
        fmt, request.attention, head if head in PREDICTED_HEADS else None
    )
    differs = recipe.has_wider_head or recipe.has_narrower_head
    return recipe if differs else recipe._replace(head=None)


def format_name(name: str | None) -> str:
    """Returns a format's name as numdev has it, of `torch.bfloat16` or `bf16` too; what
    names no format as it is, None as `None`."""
    with suppress(UsageError):
        return format_named(str(name)).name
    return str(name)


def common(settings: Sequence[RecordedSettings], name: str) -> str | None:
    """Returns what all records say of the setting `name`, a field; None where they do not
    agree, as where one says nothing, and without records."""
    values = {getattr(says, name) for says in settings}
    return next(iter(values)) if len(values) == 1 else None


def several_of(
    settings: Sequence[RecordedSettings], request: LogprobsRequest
) -> dict[str, tuple[str, ...]]:
    """Returns by name of each setting that a side has one of the different values that
    its records say, in their order; only settings with two or more. They are
    `weights_version`; `step` of training, where some record says no version; `engine`;
    and the formats `dtype` and `head`, where those that say nothing have the request's. A
    head that neither says is of the record's `dtype`."""
    says: dict[str, list[object]] = {
        "weights_version": [x.weights_version for x in settings],
        "step": [x.step for x in settings],
        "dtype": [format_name(x.dtype or request.format) for x in settings],
        "engine": [x.engine for x in settings],
    }
    heads = (x.head or request.head or x.dtype for x in settings)
    says["head"] = [format_name(head or request.format) for head in heads]
    if None not in says["weights_version"]:
        del says["step"]  # of weights that are known otherwise
    several = {
        name: tuple(dict.fromkeys(str(x) for x in values if x is not None))
        for name, values in says.items()
    }
    return {name: values for name, values in several.items() if len(values) > 1}


def settings_remarks(
    sides: Sequence[PlannedSide], settings: Sequence[Sequence[RecordedSettings]]
) -> Iterator[str]:
    """Yields sentences on what the records of a side, or those of two sides, do not agree
    in, on formats whose roundings cannot be predicted, and on temperatures below COLDEST,
    which count as 1. `settings`: of the records of each side."""
    for side, of_side in zip(sides, settings, strict=True):
        if engines := side.several.get("engine"):
            listed = ", ".join(name[:LONGEST_NAME] for name in engines)
            yield (
                f"{side.name}: its records are of {len(engines)} engines ({listed}), "
                "and judged together."
            )
        formats, heads = {x.dtype for x in of_side}, {x.head for x in of_side}
        names = {x for x in formats if x and format_name(x) not in PREDICTED}
        names |= {x for x in heads if x and format_name(x) not in PREDICTED_HEADS}
        for name in sorted(names):
            yield (
                f"{side.name}: roundings to {name[:LONGEST_NAME]!r}, which it says, are "
                "not predicted: "
                f"it is held to {side.recipe}."
            )
        says = [x.temperature for x in of_side]
        greedy = [t for t in says if t is not None and t < COLDEST]
        if greedy:
            yield (
                f"{side.name}: {len(greedy)} of {len(of_side)} records say temperature "
                f"{greedy[0]:g}: they are held to temperature 1."
            )
    if len(sides) < 2:
        return
    first, second = sides
    versions = (first.weights_version, second.weights_version)
    if None not in versions and len(set(versions)) > 1:
        yield (
            f"{first.name} says version {versions[0]} of the weights, {second.name} "
            f"{versions[1]}: one model cannot be both."
        )
    if first.support != second.support:
        yield (
            f"{first.name} is held to {first.support}, {second.name} to "
            f"{second.support}: their ratios are not about 1 where both are exact."
        )
