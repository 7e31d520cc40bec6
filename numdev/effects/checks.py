"""What an isolated call cannot show: properties of the model as a whole, tried in fp64.

Without rounding, two ways to compute one thing agree to fp64's own noise; a larger difference means
another function. Each check names the first layer whose attention differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from numdev.cases import AttentionCase, visible
from numdev.effects.outputs import output_of, text_of
from numdev.effects.report import Check
from numdev.effects.running import Subject
from numdev.effects.wide import widened
from numdev.errors import MeasurementError, NumdevError, one_line
from numdev.kernels.reference import attend
from numdev.sources.capture import attention_modules, layer_of
from numdev.sources.loss import at_home

LIMIT = 1e-9  # over the rms of the exact output: fp64 in another order differs by 1e-13 and less
COMPILED = 2.0  # how much more a compiled model may err than the model as it is
HIDDEN = 4  # tokens that a mask hides

Exact = tuple[Tensor, dict[str, Tensor]]  # the output, and by module what attention gave


class _NotMeant(Exception):
    """The property is none that this model should have."""


def checks_of(
    subject: Subject,
    inputs: Mapping[str, Any],
    generate: int | None,
    *,
    exact: bool,
    compiles: bool,
) -> Iterator[Check]:
    """The checks that apply to a model and its inputs; those that cannot be tried say why. `exact`:
    whether to try those in fp64, which have nothing to do with the format."""
    tries: dict[str, Callable[[], Check]] = {"repeat": partial(_repeat, subject, inputs)}
    if hasattr(subject.wide, "set_attn_implementation"):
        for way in ("eager", "sdpa"):
            tries[way] = partial(_implementation, subject, inputs, way)
    name, read = text_of(inputs), "input_ids"
    if name is not None and inputs[name].shape[1] > 2 * HIDDEN:
        tries["causality"] = partial(_causality, subject, inputs, name)
        if generate and name == read:
            tries["cache"] = partial(_cache, subject, inputs, generate)
    if read in inputs and inputs[read].shape[1] > 2 * HIDDEN:
        tries["mask"] = partial(_mask, subject, inputs, decodes=name != read)
    tries = tries if exact else {}
    if compiles:
        tries["compiled"] = partial(_compiled, subject, inputs)
    for what, attempt in tries.items():
        try:
            yield (check := attempt())
            if what == "repeat" and not check.holds:
                return
        except _NotMeant:
            continue
        except Exception as error:  # the model's own code: it may lack an argument or a way to run
            reason = error.message if isinstance(error, NumdevError) else one_line(error)
            yield Check(name=what, holds=None, reason=reason)


def _exact(subject: Subject, inputs: Mapping[str, Any], **how: Any) -> Exact:
    seen: dict[str, Tensor] = {}

    def keep(name: str, out: Any) -> None:
        x = out[0] if isinstance(out, tuple) else out
        if isinstance(x, Tensor) and x.is_floating_point():
            seen[name] = widened(x)

    with ExitStack() as stack:
        for name in attention_modules(subject.wide):
            hook = lambda _module, _inputs, out, name=name: keep(name, out)  # noqa: E731
            module = subject.wide.get_submodule(name)
            stack.callback(module.register_forward_hook(hook).remove)
        return output_of(subject.exactly(inputs, **how)), seen


def _compared(name: str, subject: Subject, one: Exact, other: Exact, counted: Tensor) -> Check:
    """Whether two exact runs agree at the positions that count, and where they part."""

    def apart(a: Tensor, b: Tensor) -> float:
        if a.shape != b.shape or a.shape[:2] != counted.shape:
            return 0.0
        a, b = a[counted], b[counted]
        error = (a - b).abs().max() / a.square().mean().sqrt().clamp_min(1e-300)
        return float(error.nan_to_num(nan=1e300, posinf=1e300))

    if one[0].shape != other[0].shape:
        shapes = f"{[*one[0].shape]} and {[*other[0].shape]}"
        raise MeasurementError(f"the two runs return outputs of shapes {shapes}")
    far, first = apart(one[0], other[0]), None
    if far > LIMIT:
        parted = (n for n, x in one[1].items() if n in other[1] and apart(x, other[1][n]) > LIMIT)
        if module := next(parted, None):
            first = layer_of(subject.wide.get_submodule(module), module)
    return Check(name=name, holds=far <= LIMIT, difference=far, limit=LIMIT, layer=first)


def _counted(inputs: Mapping[str, Any], out: Tensor) -> Tensor:
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == out.shape[:2]:
        return mask.to(out.device).bool()
    return torch.ones(out.shape[:2], dtype=torch.bool, device=out.device)


def _repeat(subject: Subject, inputs: Mapping[str, Any]) -> Check:
    """Two runs alike; where they are not, nothing else can be tried."""
    one = _exact(subject, inputs)
    return _compared("repeat", subject, one, _exact(subject, inputs), _counted(inputs, one[0]))


def _implementation(subject: Subject, inputs: Mapping[str, Any], way: str) -> Check:
    """The model's own code for attention of one kind, beside what it asks to be computed."""
    model: Any = subject.wide
    one, before = _exact(subject, inputs), model.config._attn_implementation
    model.set_attn_implementation(way)
    try:
        if model.config._attn_implementation != way:
            raise MeasurementError(f"the model cannot be switched to {way}")
        other = _exact(subject, inputs, answers=False)
    finally:
        model.set_attn_implementation(before)
    return _compared(way, subject, one, other, _counted(inputs, one[0]))


def _causality(subject: Subject, inputs: Mapping[str, Any], name: str) -> Check:
    """Later tokens change nothing before them: in a model for text generation, or one most of whose
    calls hide later keys."""
    hides: list[bool] = []

    def attention(case: AttentionCase) -> Tensor:
        shown = visible(case, slice(0, 1), slice(0, case.kv_len))
        if case.q_len == case.kv_len:
            hides.append(shown is not None and not bool(shown[..., 1:].any()))
        return attend(case).out

    one, ids, model = _exact(subject, inputs, attention=attention), inputs[name], subject.wide
    if one[0].shape[:2] != ids.shape:
        raise _NotMeant
    causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    if not (causal or name.startswith("decoder") or 2 * sum(hides) > len(hides)):
        raise _NotMeant
    changed, middle = ids.clone(), ids.shape[1] // 2
    changed[:, middle:] = _other(subject, ids)[:, middle:]
    other = _exact(subject, {**inputs, name: changed})
    counted = _counted(inputs if name == "input_ids" else {}, one[0])
    counted[:, middle:] = False
    return _compared("causality", subject, one, other, counted)


def _other(subject: Subject, ids: Tensor) -> Tensor:
    """In each place another token of the same text; padding stays, since models count it."""
    pad = getattr(getattr(subject.wide, "config", None), "pad_token_id", None)
    tokens = ids.unique()
    tokens = tokens[tokens != (-1 if pad is None else pad)]
    other = tokens[(torch.searchsorted(tokens, ids).clamp_max(len(tokens) - 1) + 1) % len(tokens)]
    return torch.where(ids == pad, ids, other) if pad is not None else other


def _mask(subject: Subject, inputs: Mapping[str, Any], *, decodes: bool) -> Check:
    """Tokens that the attention mask hides change nothing at the others."""
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask", torch.ones_like(ids)).clone()
    mask[:, :HIDDEN] = 0
    changed = ids.clone()
    changed[:, :HIDDEN] = _other(subject, ids)[:, :HIDDEN]
    masked = {**inputs, "attention_mask": mask}
    one, other = _exact(subject, masked), _exact(subject, {**masked, "input_ids": changed})
    if not decodes and one[0].shape[:2] != ids.shape:
        raise _NotMeant
    counted = _counted({} if decodes else masked, one[0])
    return _compared("mask", subject, one, other, counted)


def _cache(subject: Subject, inputs: Mapping[str, Any], steps: int) -> Check:
    """The last `steps` tokens one at a time, with a cache, beside all in one pass."""
    if not getattr(subject.wide, "can_generate", lambda: False)():
        raise _NotMeant
    length = inputs["input_ids"].shape[1]
    first = max(1, length - steps)

    def decoded(**wide: Any) -> Tensor:
        ids, mask = wide["input_ids"], wide.get("attention_mask")
        outs, past = [], None
        for start, stop in [(0, first), *((i, i + 1) for i in range(first, length))]:
            own: dict[str, Any] = {} if mask is None else {"attention_mask": mask[:, :stop]}
            own |= {"input_ids": ids[:, start:stop], "past_key_values": past, "use_cache": True}
            answer = subject.wide(**own)
            past = answer.past_key_values
            outs.append(output_of(answer))
        return torch.cat(outs, dim=1)

    whole, out = _exact(subject, inputs), output_of(subject.exactly(inputs, run=decoded))
    counted = _counted(inputs, out)
    counted[:, :first] = False
    return _compared("cache", subject, whole, (out, {}), counted)


def _compiled(subject: Subject, inputs: Mapping[str, Any]) -> Check:
    """The error of the model under torch.compile over that of the model as it is."""
    exact = _exact(subject, inputs)[0]
    model: nn.Module = subject.real
    with torch.no_grad():
        home = at_home(model, inputs)
        own = output_of(model(**home))
        torch.compiler.reset()
        compiled = output_of(torch.compile(model, dynamic=False)(**home))
    counts = _counted(inputs, exact)
    errors = [float((x - exact)[counts].norm()) for x in (own, compiled)]
    ratio = errors[1] / max(errors[0], 1e-300)
    numbers: Any = {"difference": ratio, "limit": COMPILED}
    return Check(name="compiled", holds=ratio <= COMPILED, format=subject.format.name, **numbers)
