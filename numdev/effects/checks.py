"""What an isolated call cannot show: properties of the model as a whole, tried in fp64. Without
rounding, two ways to compute one thing agree to fp64's own noise; a larger difference means another
function. It comes with the first layer whose attention differs, and with a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from numdev.audit.reproduce import written
from numdev.cases import AttentionCase, visible
from numdev.config import EffectsRequest, demo_checkpoint
from numdev.effects.outputs import counted, output_of, text_of
from numdev.effects.report import COMPILED, LIMIT, Check, EffectsReport
from numdev.effects.rounding import is_floating, widened
from numdev.effects.running import Inputs, Subject, exact
from numdev.errors import MeasurementError, NumdevError, one_line
from numdev.formats import Format
from numdev.report import Finding
from numdev.report.numbers import three
from numdev.sources.capture import attention_modules, in_parts, layer_of, led
from numdev.sources.loss import at_home

HIDDEN = 4  # tokens that a mask hides
INTERFACE = "computes another function than the model's attention interface"
WRONG = {  # what is, where a check does not hold
    "repeat": "The model gives another output when it runs again (dropout, or a state)",
    "eager": f"The model's eager attention {INTERFACE}",
    "sdpa": f"The model's own call of SDPA {INTERFACE}",
    "causality": "The model is not causal: later tokens change earlier outputs",
    "cache": "Decoding with a cache computes another function than one pass over the same tokens",
    "mask": "The attention mask is ignored: hidden tokens change other outputs",
    "compiled": "The compiled model computes another function",
    "compiled eager": "The compiled model computes another function with eager attention",
}

Exact = tuple[Tensor, dict[str, Tensor]]  # the output, and by module what attention gave


def checks_of(
    subject: Subject, inputs: Inputs, request: EffectsRequest, *, in_fp64: bool
) -> Iterator[Check]:
    """The checks that apply to a model and its inputs; those that cannot be tried say why.
    `in_fp64`: whether to try those that have nothing to do with the format."""
    checks, name, read = Checks(subject, inputs), text_of(inputs), "input_ids"
    tries: dict[str, Callable[[], Check | None]] = {"repeat": partial(checks.again, "repeat")}
    ways = ("eager", "sdpa") if hasattr(subject.wide, "set_attn_implementation") else ()
    tries |= {way: partial(checks.own_code, way) for way in ways}
    if name is not None and inputs[name].shape[1] > 2 * HIDDEN:
        tries["causality"] = partial(checks.causality, name)
        if request.generate and name == read:
            tries["cache"] = partial(checks.cache, request.generate)
    if read in inputs and inputs[read].shape[1] > 2 * HIDDEN:
        tries["mask"] = partial(checks.mask, decodes=name != read)
    tries = tries if in_fp64 else {}
    if request.compile:
        tries["compiled"] = checks.compiled
        if ways:
            tries["compiled eager"] = partial(checks.compiled, "compiled eager", "eager")
    for what, attempt in tries.items():
        try:
            check = attempt()
        except Exception as error:  # the model's own code: it may lack an argument or a way to run
            reason = error.message if isinstance(error, NumdevError) else one_line(error)
            check = Check(name=what, holds=None, reason=reason)
        if check is not None:
            yield check
            if what == "repeat" and check.holds is False:  # with dropout nothing else means much
                break
    for site, narrower in subject.narrower.items():
        fmt = subject.format.name
        reason = f"The model's own code computes in {narrower} at `{site}`, not in {fmt}"
        yield Check(name="format", holds=False, format=fmt, reason=reason)


class Checks:
    """Each check runs the model another way; None where the model need not have the property."""

    def __init__(self, subject: Subject, inputs: Inputs) -> None:
        self.subject, self.inputs, self.model = subject, inputs, subject.wide

    def exact(self, inputs: Inputs, **how: Any) -> Exact:
        """One exact run, and what each module of attention gave in it."""
        names = {self.model.get_submodule(name): name for name in attention_modules(self.model)}
        outs: dict[str, Tensor] = {}

        def keep(module: nn.Module, _inputs: Any, out: Any) -> None:
            x = out[0] if isinstance(out, tuple) else out
            if module in names and is_floating(x):
                outs[names[module]] = widened(x)

        with register_module_forward_hook(keep):
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
        far, reason = apart(one[0], other[0]), ""
        if far > LIMIT:
            reason = f"{WRONG[name]}: in fp64 outputs differ by {three(far)} of their size"
            both = (n for n in one[1] if n in other[1])
            parted = next((n for n in both if apart(one[1][n], other[1][n]) > LIMIT), None)
            layer = layer_of(self.model.get_submodule(parted), parted) if parted else None
            if layer is not None:
                reason += f"; layer {layer} is the first whose attention differs"
        return Check(name=name, holds=not reason, difference=far, limit=LIMIT, reason=reason)

    def again(self, name: str, **how: Any) -> Check:
        """Two runs alike, or one of them another way."""
        counts = counted(self.inputs, self.whole[0])
        return self.compared(name, self.whole, self.exact(self.inputs, **how), counts)

    def own_code(self, way: str) -> Check:
        """The model's own code for attention of one kind, beside what it asks to be computed."""
        model: Any = self.model
        with led(model, way):
            if model.config._attn_implementation != way:
                raise MeasurementError(f"the model cannot be switched to {way}")
            return self.again(way, attention=None)

    def causality(self, name: str) -> Check | None:
        """Later tokens change nothing before them: in a model for text generation, or one most of
        whose calls hide later keys."""
        hides: list[bool] = []

        def attention(case: AttentionCase, fmt: Format) -> Tensor:
            shown = visible(case, slice(0, 1), slice(0, case.kv_len))
            if case.q_len == case.kv_len:
                hides.append(shown is not None and not bool(shown[..., 1:].any()))
            return exact(case, fmt)

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
            answers = in_parts(self.model, wide, range(first, length + 1))
            return torch.cat([output_of(answer) for answer in answers], dim=1)

        out = output_of(self.subject.exactly(self.inputs, run=decoded))
        counts = counted(self.inputs, out)
        counts[:, :first] = False
        return self.compared("cache", self.whole, (out, {}), counts)

    def compiled(self, name: str = "compiled", way: str = "sdpa") -> Check:
        """The error of the model under torch.compile over that of the model as it is, its attention
        its own code's of one kind, where it has several."""
        model: nn.Module = self.subject.real
        with torch.no_grad(), led(model, way):
            home = at_home(model, self.inputs)
            own = output_of(model(**home))
            torch.compiler.reset()
            compiled = output_of(torch.compile(model, dynamic=False)(**home))
        counts = counted(self.inputs, self.whole[0])
        errors = [float((x - self.whole[0])[counts].norm()) for x in (own, compiled)]
        far = errors[1] / max(errors[0], 1e-300)
        holds = far <= COMPILED
        text = f"its error is {three(far)} times that of the model as it is"
        text = f"compiled, {text}" if holds else f"{WRONG[name]}: {text}"
        about: Any = {"format": self.subject.format.name, "difference": far, "limit": COMPILED}
        return Check(name=name, holds=holds, reason=text, **about)


def reproducers(report: EffectsReport, directory: Path, **_: Any) -> list[Path]:
    """A script for each finding that one can be written for; it needs torch and transformers."""
    path = report.request["checkpoint"]
    path = demo_checkpoint() if path == "demo" else Path(path).resolve()
    if not ((path / "config.json").is_file() and report.tokens):
        return []

    def facts(finding: Finding) -> dict[str, Any] | None:
        if finding.rule not in ("eager", "sdpa", "causality", "mask", "cache"):
            return None
        model = {"architecture": report.provenance.source["architecture"], "path": str(path)}
        length = min(4, len(report.tokens) // 3)
        return {"rule": finding.rule, "tokens": report.tokens, "length": length, **model}

    return written(report.findings, directory, "effects", facts)
