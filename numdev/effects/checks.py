"""What an isolated call cannot show: properties of the model as a whole, tried in fp64.

Without rounding, two ways to compute one thing agree to fp64's own noise; a larger difference means
another function. Each check names the first layer whose attention differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from numdev.cases import AttentionCase, visible
from numdev.config import EffectsRequest
from numdev.effects.outputs import counted, output_of, text_of
from numdev.effects.report import Check
from numdev.effects.running import Subject
from numdev.effects.wide import widened
from numdev.errors import MeasurementError, NumdevError, one_line
from numdev.formats import Format
from numdev.kernels.reference import attend
from numdev.sources.capture import attention_modules, layer_of, led
from numdev.sources.loss import at_home

LIMIT = 1e-9  # over the rms of the exact output: fp64 in another order differs by 1e-13 and less
COMPILED = 2.0  # how much more a compiled model may err than the model as it is
HIDDEN = 4  # tokens that a mask hides

Exact = tuple[Tensor, dict[str, Tensor]]  # the output, and by module what attention gave


def checks_of(
    subject: Subject, inputs: Mapping[str, Any], request: EffectsRequest, *, exact: bool
) -> Iterator[Check]:
    """The checks that apply to a model and its inputs; those that cannot be tried say why. `exact`:
    whether to try those in fp64, which have nothing to do with the format."""
    checks, name, read = Checks(subject, inputs), text_of(inputs), "input_ids"
    tries: dict[str, Callable[[], Check | None]] = {"repeat": checks.repeat}
    ways = ("eager", "sdpa") if hasattr(subject.wide, "set_attn_implementation") else ()
    tries |= {way: partial(checks.implementation, way) for way in ways}
    if name is not None and inputs[name].shape[1] > 2 * HIDDEN:
        tries["causality"] = partial(checks.causality, name)
        if request.generate and name == read:
            tries["cache"] = partial(checks.cache, request.generate)
    if read in inputs and inputs[read].shape[1] > 2 * HIDDEN:
        tries["mask"] = partial(checks.mask, decodes=name != read)
    tries = tries if exact else {}
    if request.compile:
        tries["compiled"] = partial(checks.compiled, "sdpa")
        if ways:
            tries["compiled eager"] = partial(checks.compiled, "eager")
    for what, attempt in tries.items():
        try:
            check = attempt()
        except Exception as error:  # the model's own code: it may lack an argument or a way to run
            reason = error.message if isinstance(error, NumdevError) else one_line(error)
            check = Check(name=what, holds=None, reason=reason)
        if check is not None:
            yield check
            if what == "repeat" and check.holds is False:  # with dropout nothing else means much
                return


class Checks:
    """Each check runs the model another way; None where the model need not have the property."""

    def __init__(self, subject: Subject, inputs: Mapping[str, Any]) -> None:
        self.subject, self.inputs, self.model = subject, inputs, subject.wide

    def exact(self, inputs: Mapping[str, Any], **how: Any) -> Exact:
        """One exact run, and what each module of attention gave in it."""
        outs: dict[str, Tensor] = {}

        def keep(name: str, out: Any) -> None:
            x = out[0] if isinstance(out, tuple) else out
            if isinstance(x, Tensor) and x.is_floating_point():
                outs[name] = widened(x)

        with ExitStack() as stack:
            for name in attention_modules(self.model):
                hook = lambda _module, _inputs, out, name=name: keep(name, out)  # noqa: E731
                module = self.model.get_submodule(name)
                stack.callback(module.register_forward_hook(hook).remove)
            return output_of(self.subject.exactly(inputs, **how)), outs

    @cached_property
    def whole(self) -> Exact:
        """The exact run that others are held against."""
        return self.exact(self.inputs)

    def compared(self, name: str, one: Exact, other: Exact, counts: Tensor) -> Check:
        """Whether two exact runs agree at the positions that count, and where they part."""

        def apart(a: Tensor, b: Tensor) -> float:
            if a.shape != b.shape or a.shape[:2] != counts.shape:
                return 0.0
            a, b = a[counts], b[counts]
            error = (a - b).abs().max() / a.square().mean().sqrt().clamp_min(1e-300)
            return float(error.nan_to_num(nan=1e300, posinf=1e300))

        if one[0].shape != other[0].shape:
            shapes = f"{[*one[0].shape]} and {[*other[0].shape]}"
            raise MeasurementError(f"the two runs return outputs of shapes {shapes}")
        far, first = apart(one[0], other[0]), None
        if far > LIMIT:
            parted = (n for n, x in one[1].items() if n in other[1])
            parted = (n for n in parted if apart(one[1][n], other[1][n]) > LIMIT)
            if module := next(parted, None):
                first = layer_of(self.model.get_submodule(module), module)
        return Check(name=name, holds=far <= LIMIT, difference=far, limit=LIMIT, layer=first)

    def repeat(self) -> Check:
        """Two runs alike."""
        counts = counted(self.inputs, self.whole[0])
        return self.compared("repeat", self.whole, self.exact(self.inputs), counts)

    def implementation(self, way: str) -> Check:
        """The model's own code for attention of one kind, beside what it asks to be computed."""
        model: Any = self.model
        with led(model, way):
            if model.config._attn_implementation != way:
                raise MeasurementError(f"the model cannot be switched to {way}")
            other = self.exact(self.inputs, answers=False)
        return self.compared(way, self.whole, other, counted(self.inputs, self.whole[0]))

    def causality(self, name: str) -> Check | None:
        """Later tokens change nothing before them: in a model for text generation, or one most of
        whose calls hide later keys."""
        hides: list[bool] = []

        def attention(case: AttentionCase, _fmt: Format) -> Tensor:
            shown = visible(case, slice(0, 1), slice(0, case.kv_len))
            if case.q_len == case.kv_len:
                hides.append(shown is not None and not bool(shown[..., 1:].any()))
            return attend(case).out

        one, ids = self.exact(self.inputs, attention=attention), self.inputs[name]
        causal = type(self.model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        causal |= name.startswith("decoder") or 2 * sum(hides) > len(hides)
        if one[0].shape[:2] != ids.shape or not causal:
            return None
        later = slice(ids.shape[1] // 2, None)
        counts = counted(self.inputs if name == "input_ids" else {}, one[0])
        counts[:, later] = False
        other = self.exact({**self.inputs, name: self.changed(ids, later)})
        return self.compared("causality", one, other, counts)

    def changed(self, ids: Tensor, where: slice) -> Tensor:
        """With another token of the text in these places; padding stays, since models count it."""
        pad = getattr(getattr(self.model, "config", None), "pad_token_id", None)
        pads = torch.zeros_like(ids, dtype=torch.bool) if pad is None else ids == pad
        tokens, changed = ids[~pads].unique(), ids.clone()
        place = torch.searchsorted(tokens, ids).clamp_max(len(tokens) - 1)
        changed[:, where] = torch.where(pads, ids, tokens[(place + 1) % len(tokens)])[:, where]
        return changed

    def mask(self, *, decodes: bool) -> Check | None:
        """Tokens that the attention mask hides change nothing at the others."""
        ids = self.inputs["input_ids"]
        mask = self.inputs.get("attention_mask", torch.ones_like(ids)).clone()
        mask[:, :HIDDEN] = 0
        masked = {**self.inputs, "attention_mask": mask}
        changed = {**masked, "input_ids": self.changed(ids, slice(0, HIDDEN))}
        one, other = self.exact(masked), self.exact(changed)
        if not decodes and one[0].shape[:2] != ids.shape:
            return None
        return self.compared("mask", one, other, counted({} if decodes else masked, one[0]))

    def cache(self, steps: int) -> Check | None:
        """The last `steps` tokens one at a time, with a cache, beside all in one pass."""
        if not getattr(self.model, "can_generate", lambda: False)():
            return None
        length = self.inputs["input_ids"].shape[1]
        first = max(1, length - steps)

        def decoded(**wide: Any) -> Tensor:
            ids, mask = wide["input_ids"], wide.get("attention_mask")
            outs, past = [], None
            for start, stop in [(0, first), *((i, i + 1) for i in range(first, length))]:
                own: dict[str, Any] = {} if mask is None else {"attention_mask": mask[:, :stop]}
                own |= {"input_ids": ids[:, start:stop], "past_key_values": past}
                answer = self.model(**own, use_cache=True)
                past = answer.past_key_values
                outs.append(output_of(answer))
            return torch.cat(outs, dim=1)

        out = output_of(self.subject.exactly(self.inputs, run=decoded))
        counts = counted(self.inputs, out)
        counts[:, :first] = False
        return self.compared("cache", self.whole, (out, {}), counts)

    def compiled(self, way: str) -> Check:
        """The error of the model under torch.compile over that of the model as it is, its attention
        its own code's of one kind, where it has several."""
        model: nn.Module = self.subject.real
        exact, name = self.whole[0], "compiled eager" if way == "eager" else "compiled"
        with torch.no_grad(), led(model, way):
            home = at_home(model, self.inputs)
            own = output_of(model(**home))
            torch.compiler.reset()
            compiled = output_of(torch.compile(model, dynamic=False)(**home))
        counts = counted(self.inputs, exact)
        errors = [float((x - exact)[counts].norm()) for x in (own, compiled)]
        far, fmt = errors[1] / max(errors[0], 1e-300), self.subject.format.name
        holds = far <= COMPILED
        return Check(name=name, holds=holds, difference=far, limit=COMPILED, format=fmt)
