"""Mistakes that a whole model can be computed with, as changes of it in place: a window,
a cap or a scale left out, weights or a cache in fewer bits, a narrow head, an adapter
that is absent or added twice. Each gives an exact model of its own."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from numdev.cases import AttentionCase
from numdev.errors import UsageError
from numdev.exact.wide_tensors import Wide, widened
from numdev.formats import Format, format_named, round_to
from numdev.studies.effects.model_runs import Subject, exact_attention
from numdev.studies.logprobs.record_fields import kind_of

Edit = Callable[[Subject], None]
NARROW_HEAD = "narrow head"  # a variant: the head alone computes in the format
SCALE = "the model's scale of scores"
ALL_KEYS = 1 << 30  # a window that hides nothing
TINY = 1e-300  # a scale of a row of zeros
# By the dose of a cause, the key of the config that it leaves out
KEYS = {
    "the sliding window": "sliding_window",
    "the cap of scores": "attn_logit_softcapping",
    "the cap of logits": "final_logit_softcapping",
}
BASE = ("base_model.model.", "base_model.")  # before a module's name in an adapter's file


def without(model: nn.Module, dose: str) -> None:
    """Takes a window, a cap, or the model's own scale of scores out of a model, in place.
    In the config, and in every module that has copied it, a window becomes ALL_KEYS and a
    cap None. The scale becomes 1 / sqrt(head_dim). Does nothing where the model has none.
    `dose`: a key of KEYS, or SCALE; another raises KeyError. Raises AttributeError for a
    key of KEYS where the model has no config."""
    if dose == SCALE:
        for module in model.modules():
            size = getattr(module, "head_dim", None)
            if isinstance(getattr(module, "scaling", None), float) and size:
                module.scaling = size**-0.5
        return
    key = KEYS[dose]
    value = ALL_KEYS if key == "sliding_window" else None
    for holder in (model.config, *model.modules()):
        if getattr(holder, key, None):
            setattr(holder, key, value)


def has(model: object, dose: str) -> bool:
    """Whether a model's config has the window, the cap or the scale
    (`query_pre_attn_scalar`, if other than `head_dim`) that `dose` leaves out, a key of
    KEYS or SCALE; another raises KeyError. False without a config."""
    config = getattr(model, "config", None)
    if dose != SCALE:
        return bool(getattr(config, KEYS[dose], None))
    scalar = getattr(config, "query_pre_attn_scalar", None)
    return scalar is not None and scalar != getattr(config, "head_dim", None)


def round_head(subject: Subject) -> None:
    """Rounds what the head of a model reads, in place, to the subject's format: its
    weight, and by a hook the states before it. The hook stays. Raises AttributeError for
    a model without output embeddings."""
    head: Any = subject.wide.get_output_embeddings()  # type: ignore[operator]
    subject.change_weight(head, lambda values: round_to(values, subject.format))

    def rounded(_head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns the head's arguments with the states rounded."""
        states, *others = args
        with _disable_current_modes():
            narrow = round_to(widened(states), subject.format)
            return Wide.of(narrow, states.dtype), *others

    head.register_forward_pre_hook(rounded)


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Yields (name, module, axis) of each Linear and Conv1D of a model (by the name of
    its class) other than its head, in the model's order. `axis`: the axis of the weight
    that is summed over: 1 in a Linear, 0 in a Conv1D of GPT-2's."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in ("Linear", "Conv1D") and module is not head:
            yield name, module, 1 if kind == "Linear" else 0


def quantised(values: Tensor, axis: int, dose: str) -> Tensor:
    """Returns values of a weight, fp64, in 8 or 4 bits with a scale for each row along
    `axis`: integers up to 127 or 7, or float8_e4m3fn up to 448. A row of zeros stays 0.
    `dose`: `int8`, `int4` or `e4m3`; another raises KeyError."""
    e4m3 = format_named("float8_e4m3fn")
    largest = {"int8": 127.0, "int4": 7.0, "e4m3": 448.0}[dose]
    scale = (values.abs().amax(dim=axis, keepdim=True) / largest).clamp_min(TINY)
    scaled = values / scale
    return (round_to(scaled, e4m3) if dose == "e4m3" else scaled.round()) * scale


def leave_out(dose: str) -> Edit:
    """Returns the edit that takes out of a model what `without` does for this dose."""
    return lambda subject: without(subject.wide, dose)


def quantise(dose: str) -> Edit:
    """Returns the edit that rounds the weights of linear layers, with a scale for each
    output; the head stays as it is. `dose`: `int8`, `int4` or `e4m3`; the edit raises
    KeyError for another."""

    def edit(subject: Subject) -> None:
        """Rounds the weights of a subject's linear layers, in place."""
        for _name, module, axis in linear_layers(subject.wide):
            subject.change_weight(module, partial(quantised, axis=axis, dose=dose))

    return edit


def cached(x: Tensor, dose: str) -> Tensor:
    """Returns keys or values, fp64 [batch, heads, n, dim], as a cache in 8 bits holds
    them. `int8 cache`: integers with a scale for each token and head. Every other `dose`:
    float8_e4m3fn without a scale, larger values cut to 448."""
    if dose == "int8 cache":
        return quantised(x, -1, "int8")
    return round_to(x.clamp(-448.0, 448.0), format_named("float8_e4m3fn"))


def cached_attention(dose: str) -> Callable[[AttentionCase, Format], Tensor]:
    """Returns the function that computes a call's exact attention with keys and values
    from such a cache. `dose`: as `cached` takes it."""

    def attention(case: AttentionCase, fmt: Format) -> Tensor:
        """Returns the output of a call."""
        k, v = (cached(x, dose) for x in (case.k, case.v))
        return exact_attention(dataclasses.replace(case, k=k, v=v), fmt)

    return attention


# By cause and dose, what makes that mistake of a model, in place
VARIANTS: Mapping[tuple[str, str], Edit] = {
    **{("window, cap or scale", dose): leave_out(dose) for dose in (*KEYS, SCALE)},
    **{("quantised weights", dose): quantise(dose) for dose in ("int8", "e4m3", "int4")},
}
CACHES = {
    dose: cached_attention(dose) for dose in ("e4m3 cache", "int8 cache")
}  # by dose, how attention reads


class Adapter(NamedTuple):
    """A low-rank adapter (LoRA): what it adds to the weights of modules, by their
    name."""

    name: str
    deltas: Mapping[str, Tensor]  # float64 [out, in]

    def add_to(self, subject: Subject, dose: str = "") -> None:
        """Adds the adapter to the weights of a subject, in place. `dose`: `absent`
        (nothing is added), `added twice`, `merged in FORMAT` (the sums are rounded to
        it); any other text: once. Raises UsageError where a name is not exactly one
        linear layer of the model, a weight has another shape, or the format is none;
        layers before that one are changed then. Of a weight that stays on disk the last
        two are raised whenever it is read."""
        times = {"absent": 0, "added twice": 2}.get(dose, 1)
        modules = {name: (m, axis) for name, m, axis in linear_layers(subject.wide)}
        for name, delta in self.deltas.items():
            ends = [key for key in modules if key == name or key.endswith(f".{name}")]
            if len(ends) != 1:
                raise UsageError(
                    f"--adapter: {name} is not one linear layer of the model"
                )
            module, axis = modules[ends[0]]
            matrix = delta if axis == 1 else delta.T

            def added(values: Tensor, change: Tensor = matrix) -> Tensor:
                """Returns the weight with the adapter added, rounded where it is merged.
                Raises UsageError for another shape."""
                if values.shape != change.shape:
                    what = f"expected {tuple(values.shape)}, got {tuple(change.shape)}"
                    raise UsageError(f"--adapter: a weight's shape: {what}")
                merged = values + times * change.to(values.device)
                on_grid = dose.partition("merged in ")[2]
                return round_to(merged, format_named(on_grid)) if on_grid else merged

            subject.change_weight(module, added)


ADAPTER_DOSES = ("absent", "added twice", "merged in bfloat16")


def read_adapter(path: str) -> Adapter:
    """Returns the adapter in a directory as PEFT writes it: adapter_config.json and
    adapter_model.safetensors. Its deltas are fp64 [out, in], B A times alpha / rank (with
    rsLoRA alpha / sqrt(rank)), by the module's name in the model. Tensors other than
    `lora_A.weight` and their `lora_B.weight` are ignored, those of embeddings too. Raises
    UsageError where a file is missing or cannot be read, for another kind of adapter than
    LoRA (DoRA too), for patterns of ranks or alphas, for a `lora_alpha` that is no finite
    number, and where there is no A, or one has no B that fits it."""
    folder = Path(path)
    settings, weights = (
        folder / "adapter_config.json",
        folder / "adapter_model.safetensors",
    )
    if not settings.is_file() or not weights.is_file():
        what = (
            "expected a directory with adapter_config.json and adapter_model.safetensors"
        )
        raise UsageError(f"--adapter {path}: {what}")
    try:
        config = json.loads(settings.read_text(encoding="utf-8"))
        tensors = load_file(weights)
    except Exception as error:  # of a foreign file, whatever its reader raises
        raise UsageError(f"--adapter {path}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        what = f"--adapter {path}: adapter_config.json: expected an object, got "
        raise UsageError(what + kind_of(config))
    if config.get("peft_type") != "LORA" or config.get("use_dora"):
        raise UsageError(
            f"--adapter {path}: expected LoRA, got {config.get('peft_type')}"
        )
    if config.get("alpha_pattern") or config.get("rank_pattern"):
        raise UsageError(f"--adapter {path}: patterns of ranks are not read")
    alpha, most = config.get("lora_alpha"), sys.float_info.max
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not is_number or not -most <= cast(float, alpha) <= most:
        what = f"lora_alpha: expected a number, got {kind_of(alpha)}"
        raise UsageError(f"--adapter {path}: {what}")
    deltas = {}
    for key, down in tensors.items():
        if not key.endswith(".lora_A.weight"):
            continue
        stem = key.removesuffix(".lora_A.weight")
        up = tensors.get(f"{stem}.lora_B.weight")
        if up is None or up.ndim != 2 or down.ndim != 2 or up.shape[1] != len(down):
            raise UsageError(f"--adapter {path}: {stem} is no pair of matrices")
        rank = len(down)
        if not rank:
            raise UsageError(f"--adapter {path}: {stem}: expected rank >= 1, got 0")
        over = rank**0.5 if config.get("use_rslora") else rank
        scale = cast(float, alpha) / over
        name = stem
        for prefix in BASE:
            name = name.removeprefix(prefix)
        deltas[name] = scale * (up.double() @ down.double())
    if not deltas:
        raise UsageError(f"--adapter {path}: has no weights of LoRA")
    return Adapter(folder.name, deltas)
