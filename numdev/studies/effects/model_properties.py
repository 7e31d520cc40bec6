"""What an isolated call cannot show: properties of the model as a whole, tried in fp64.
Without rounding, two ways to compute one thing agree to fp64's own noise; a larger
difference means another function. It comes with the first layer whose attention differs,
and with a script."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, NumdevError, one_line
from numdev.exact.result_dtypes import is_floating
from numdev.exact.wide_tensors import widened
from numdev.formats import Format
from numdev.kernels.reference import attend
from numdev.report import Finding
from numdev.report.number_text import three
from numdev.request_models import EffectsRequest, demo_checkpoint
from numdev.sources.capture import (
    attention_modules,
    attention_override,
    layer_of,
    run_in_parts,
    unaudited_modules,
)
from numdev.sources.prompts import argument_names
from numdev.sources.upstream_gradients import to_model_device
from numdev.studies.audit.finding_reproducers import written
from numdev.studies.effects.model_runs import (
    Inputs,
    Subject,
    exact_attention,
    first_nonfinite,
)
from numdev.studies.effects.output_error import (
    EXACT_NONFINITE,
    count_nonfinite_positions,
    main_output,
    text_input_name,
    unpadded_positions,
)
from numdev.studies.effects.report import (
    COMPILED,
    LIMIT,
    Check,
    EffectsReport,
    check_names,
    not_asked_reason,
)
from numdev.studies.effects.rounding_sites import layer_names

BEFORE = ""  # the name of what the first layer gets
HIDDEN = 4  # tokens that a mask hides
NO_PLACES = "the output has no position for each token"
INTERFACE = "computes another function than the model's attention interface"
WRONG = {  # by check, what is wrong where it does not hold
    "repeat": "The model gives another output when it runs again (dropout, or a state)",
    "eager": f"The model's eager attention {INTERFACE}",
    "sdpa": f"The model's own call of SDPA {INTERFACE}",
    "causality": "The model is not causal: later tokens change earlier outputs",
    "cache": (
        "Decoding with a cache computes another function than one pass over "
        "the same tokens"
    ),
    "mask": "The attention mask is ignored: hidden tokens change other outputs",
    "batch": "A sequence's output depends on the others in its batch",
    "compiled": "The compiled model computes another function",
    "compiled eager": "The compiled model computes another function with eager attention",
}

Exact = tuple[Tensor, dict[str, Tensor]]  # the output, and by module what it gave


def run_checks(
    subject: Subject,
    inputs: Inputs,
    request: EffectsRequest,
    before: Sequence[Check] = (),
) -> Iterator[Check]:
    """Yields one check for each name that `check_names` has for the subject's format, in
    that order. `before`: the checks of earlier formats; with any, checks that are tried
    in fp64 alone are left out, since they were tried. Where the check `repeat`, here or
    in `before`, fails or could not be tried, no later check is tried. `inputs`: tensors
    by name, of the first part of the text. An error of the model becomes a check's
    reason."""
    checks = Checks(subject, inputs, request)
    repeat = next((check for check in before if check.name == "repeat"), None)
    for name, fmt in check_names(request, [subject.format.name]):
        if before and not fmt:
            continue
        check = checks.try_check(name, repeat).model_copy(update={"format": fmt})
        repeat = check if name == "repeat" else repeat
        yield check


class Checks:
    """The checks of one model in one format. Each check runs the model another way, and
    compares within a limit, not bit by bit. What runs the model raises what the model
    raises."""

    def __init__(self, subject: Subject, inputs: Inputs, request: EffectsRequest) -> None:
        self.subject, self.inputs, self.request = subject, inputs, request
        self.model = subject.wide
        self.text = text_input_name(inputs)

    def try_check(self, name: str, repeat: Check | None) -> Check:
        """Returns the check `name`, one of `check_names`. Its `holds` is None, with a
        reason, where the check does not apply, was not asked for or raised an error. It
        is None too where `repeat`, the check of whether the model repeats itself, fails
        or could not be tried; None for `repeat`: it was not tried yet."""
        untried = Check(name=name, holds=None)
        if why := not_asked_reason(self.request, name) or self.inapplicable_reason(name):
            return untried.model_copy(update={"applies": False, "reason": why})
        if repeat is not None and repeat.holds is not True:
            return untried.model_copy(update={"reason": f"not tried: {repeat.reason}"})
        try:
            check = self.attempt(name)
        # The model's own code runs here: it may lack an argument or a way to run
        except Exception as error:
            reason = error.message if isinstance(error, NumdevError) else one_line(error)
            return untried.model_copy(update={"reason": reason})
        if isinstance(check, str):
            return untried.model_copy(update={"applies": False, "reason": check})
        return check

    def inapplicable_reason(self, name: str) -> str:
        """Returns why the check `name` does not apply to this model or its inputs, as far
        as that shows before the check runs. Empty where it may apply, and for a name that
        is no check. Whether the check was asked for plays no part."""
        model: Any = self.model
        if name in ("eager", "sdpa", "compiled eager"):
            if self.subject.by_hand:
                return f"there is one implementation: {self.subject.by_hand}"
            several = hasattr(model, "set_attn_implementation")
            several &= name != "sdpa" or getattr(model, "_supports_sdpa", True)
            return "" if several else "the model has one implementation of attention"
        if name == "batch":
            return "" if self.sequences > 1 else "the model reads one sequence at a time"
        if name not in ("causality", "cache", "mask"):
            return ""
        if name == "mask":
            named, takes_all = argument_names(model.forward)
            if not takes_all and "attention_mask" not in named:
                return "no attention mask"
        if name == "cache" and not getattr(model, "can_generate", lambda: False)():
            return "the model is no decoder"
        text = self.text if name == "causality" else "input_ids"
        if text is None or text not in self.inputs:
            return "the model reads no token ids"
        if self.inputs[text].shape[1] <= 2 * HIDDEN:
            return f"fewer than {2 * HIDDEN + 1} tokens"
        return ""

    def attempt(self, name: str) -> Check | str:
        """Runs the check `name`, which must apply as far as is known, and returns it; or
        returns why it does not apply, where only the run shows that. A name that is no
        other check counts as `compiled`. Raises what the model raises, and
        MeasurementError where nothing can be compared."""
        if name == "repeat":
            return self.check_repeat()
        if name in ("eager", "sdpa"):
            return self.check_own_attention(name)
        if name == "causality":
            assert self.text is not None
            return self.check_causality(self.text)
        if name == "cache":
            return self.check_cache(self.request.generate or 0)
        if name == "mask":
            return self.check_mask(decodes=self.text != "input_ids")
        if name == "batch":
            return self.check_batch()
        if name == "format":
            return self.check_format()
        return self.check_compiled(name, "eager" if name == "compiled eager" else "sdpa")

    @property
    def sequences(self) -> int:
        """Returns how many sequences the inputs hold: the length of the first tensor
        among them, which must have one."""
        return next(len(x) for x in self.inputs.values() if isinstance(x, Tensor))

    @cached_property
    def followed_modules(self) -> dict[nn.Module, str]:
        """Returns the modules whose outputs show where two runs first differ, with their
        names: attention, other modules that mix tokens, and whole layers, in this
        order."""
        names = attention_modules(self.model) + [
            name for _, name, _ in unaudited_modules(self.model)
        ]
        return {
            self.model.get_submodule(n): n for n in (*names, *layer_names(self.model))
        }

    def run_exactly(self, inputs: Inputs, **how: Any) -> Exact:
        """Returns the output of one exact run, and by name the output of each of the
        `followed_modules` that returned a floating-point tensor (of a tuple, the first):
        the last one of several calls, in the order in which modules first ended. Before
        these, under the name BEFORE, is the input of the first layer; it is missing where
        the layer gets it by keyword, or where another followed module ended before.
        `how`: further arguments of the subject's `run_exactly`. Raises MeasurementError
        where the model returns no floating-point tensor of two axes or more."""
        outs: dict[str, Tensor] = {}
        layers = set(layer_names(self.model))

        def enter(module: nn.Module, args: tuple[object, ...]) -> None:
            """Keeps the input of the first layer."""
            is_first = not outs and self.followed_modules.get(module) in layers
            if is_first and args and is_floating(args[0]):
                outs[BEFORE] = widened(args[0])

        def keep(module: nn.Module, _inputs: object, out: object) -> None:
            """Keeps the output of a followed module."""
            x = out[0] if isinstance(out, tuple) else out
            if module in self.followed_modules and is_floating(x):
                outs[self.followed_modules[module]] = widened(x)

        with register_module_forward_pre_hook(enter), register_module_forward_hook(keep):
            return main_output(self.subject.run_exactly(inputs, **how)), outs

    @cached_property
    def exact_run(self) -> Exact:
        """Returns the exact run that others are compared with, made once: the output, and
        the outputs of `followed_modules` by name."""
        return self.run_exactly(self.inputs)

    def compare_runs(self, name: str, one: Exact, other: Exact, counts: Tensor) -> Check:
        """Returns the check `name`. It holds where two exact runs agree within LIMIT of
        the rms of `one`, at the positions that count (`counts`, bool [sequences,
        positions]). It does not hold where `other` is not finite at one of these. The
        reason then names the layer of the first module whose output differs by more than
        LIMIT; it names none where no module of both runs, with an output in one shape at
        these positions, does. Raises MeasurementError where the outputs' shapes differ,
        no position counts, or `one` is not finite at one that counts."""

        def difference(a: Tensor, b: Tensor) -> float:
            """Returns the largest difference over the rms of `a`; 0 for tensors that are
            not of one shape, or have no positions."""
            if a.shape != b.shape or a.shape[:2] != counts.shape:
                return 0.0
            a, b = a[counts], b[counts]
            error = (a - b).abs().max() / a.square().mean().sqrt().clamp_min(1e-300)
            return float(error.nan_to_num(nan=1e300, posinf=1e300))

        if one[0].shape != other[0].shape:
            shapes = f"{[*one[0].shape]} and {[*other[0].shape]}"
            raise MeasurementError(f"the two runs return outputs of shapes {shapes}")
        if not counts.any():
            raise MeasurementError("no position of the output counts")
        if count_nonfinite_positions(one[0], counts):
            raise MeasurementError("NaN or infinity in the exact output")
        largest: float | None = difference(one[0], other[0])
        reason = ""
        if bad := count_nonfinite_positions(other[0], counts):
            largest, reason = None, f"{WRONG[name]}: {_nonfinite_clause(bad, counts)}"
        elif largest is not None and largest > LIMIT:
            reason = (
                f"{WRONG[name]}: in fp64 outputs differ by {three(largest)} of their size"
            )
        if reason:
            in_both = (n for n in one[1] if n in other[1])
            first = next(
                (n for n in in_both if difference(one[1][n], other[1][n]) > LIMIT), None
            )
            reason += "" if first is None else self.first_difference_clause(first)
        return Check(
            name=name, holds=not reason, difference=largest, limit=LIMIT, reason=reason
        )

    def first_difference_clause(self, name: str) -> str:
        """Returns a clause on where two runs first differ, by the name of a module or
        BEFORE: `; layer 3 is the first whose attention differs`, `; they differ before
        the first layer`. Empty for a module whose layer has no number."""
        if name == BEFORE:
            return "; they differ before the first layer"
        module = self.model.get_submodule(name)
        layer = layer_of(module, name)
        if layer is None:
            return ""
        if name in layer_names(self.model):
            what = "output"
        elif name in attention_modules(self.model):
            what = "attention"
        else:
            what = type(module).__name__
        return f"; layer {layer} is the first whose {what} differs"

    def check_against_exact_run(self, name: str, **how: object) -> Check:
        """Returns the check `name` of whether the exact run agrees with one that is made
        with `how`, further arguments of `run_exactly`; without any it is the same run
        again. Padding does not count. Raises what `compare_runs` raises."""
        counts = unpadded_positions(self.inputs, self.exact_run[0])
        return self.compare_runs(
            name, self.exact_run, self.run_exactly(self.inputs, **how), counts
        )

    def check_repeat(self) -> Check:
        """Returns the check of whether the model gives the same output again: within
        LIMIT, not bit by bit, at positions that are no padding. Raises MeasurementError
        where the exact output is not finite at one of these, since NaN does not differ
        from NaN, and as `compare_runs`."""
        if count_nonfinite_positions(
            self.exact_run[0], unpadded_positions(self.inputs, self.exact_run[0])
        ):
            with first_nonfinite(self.model, len(self.exact_run[0])) as first:
                self.subject.run_exactly(self.inputs)
            raise MeasurementError(
                f"{EXACT_NONFINITE}, first in {next(iter(first.values()), '')}"
            )
        return self.check_against_exact_run("repeat")

    def check_format(self) -> Check:
        """Returns the check of whether the model computes in its own format, or a wider
        one, at every site. Its `difference` is the number of sites that compute in a
        narrower one. The model runs once where no exact run was made before."""
        if not self.subject.ran_exactly:  # elsewhere, or before it was interrupted
            self.subject.run_exactly(self.inputs)
        fmt, sites = self.subject.format.name, self.subject.narrower
        where = ", ".join(f"in {narrow} at `{site}`" for site, narrow in sites.items())
        reason = f"The model's own code computes {where}, not in {fmt}"
        reason = reason if sites else f"The model computes in {fmt} at every site"
        count = float(len(sites))
        return Check(
            name="format", holds=not sites, difference=count, limit=0.0, reason=reason
        )

    def check_own_attention(self, way: str) -> Check:
        """Returns the check of whether the model's own code for attention, `eager` or
        `sdpa`, computes what it asks the attention interface to compute. Raises
        MeasurementError where the model cannot be switched to that code, and as
        `compare_runs`."""
        model: Any = self.model
        with attention_override(model, way):
            if model.config._attn_implementation != way:
                raise MeasurementError(f"the model cannot be switched to {way}")
            return self.check_against_exact_run(way, attention=None)

    def check_causality(self, name: str) -> Check | str:
        """Returns the check of whether other tokens in the second half of the text change
        nothing in the first; or why it does not apply. It applies to a decoder whose
        output has a position for each token. The name of the model's class or of the
        input shows a decoder; or else most calls with as many keys as queries, in which
        the first query sees no later key. `name`: the input that holds the token ids.
        Raises what `compare_runs` raises, and MeasurementError where no id would
        change."""
        hides: list[bool] = []

        def attention(case: AttentionCase, fmt: Format) -> Tensor:
            """Returns the exact attention of a call; notes whether its first query sees
            later keys: what it reads of values that are 1 there and 0 at its own key. A
            mask may hide by a flag, by -inf or by a large negative number. A row that
            sees no key, as padding does, counts as one that sees none of these."""
            if case.q_len == case.kv_len:
                later = torch.ones_like(case.v[..., :1])
                later[:, :, 0] = 0.0
                first = case.restrict(rows=torch.tensor([0]))
                read = attend(dataclasses.replace(first, v=later))
                hides.append(not bool(read.out[~read.empty].any()))
            return exact_attention(case, fmt)

        by_hand = bool(self.exact_run and self.subject.by_hand)
        ids = self.inputs[name]
        one = (
            self.run_exactly(self.inputs)
            if by_hand
            else self.run_exactly(self.inputs, attention=attention)
        )
        causal = type(self.model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        causal |= name.startswith("decoder") or 2 * sum(hides) > len(hides)
        if not causal:
            return "the model is no decoder"
        if one[0].shape[:2] != ids.shape:
            return NO_PLACES
        later = slice(ids.shape[1] // 2, None)
        counts = unpadded_positions(self.inputs if name == "input_ids" else {}, one[0])
        counts[:, later] = False
        other = self.run_exactly({**self.inputs, name: self.replace_tokens(ids, later)})
        return self.compare_runs("causality", one, other, counts)

    def replace_tokens(self, ids: Tensor, where: slice) -> Tensor:
        """Returns a copy of the ids [sequences, positions] with another token of `ids` at
        each position of `where`: the next larger one, for the largest the smallest.
        Padding stays, since models count it. Raises MeasurementError where no id would
        change."""
        pad = getattr(getattr(self.model, "config", None), "pad_token_id", None)
        pads = torch.zeros_like(ids, dtype=torch.bool) if pad is None else ids == pad
        tokens, changed = ids[~pads].unique(), ids.clone()
        place = torch.searchsorted(tokens, ids).clamp_max(len(tokens) - 1)
        if len(tokens) > 1:
            others = torch.where(pads, ids, tokens[(place + 1) % len(tokens)])
            changed[:, where] = others[:, where]
        if torch.equal(changed, ids):
            raise MeasurementError(
                "no other token of the text can stand in the place of one"
            )
        return changed

    def check_mask(self, *, decodes: bool) -> Check | str:
        """Returns the check of whether the first HIDDEN tokens, where the attention mask
        hides them, change nothing at the others; or, where the output has no position for
        each token, why it does not apply. `decodes`: the output is about other tokens
        than `input_ids`. Raises what `compare_runs` raises, and MeasurementError where no
        id would change."""
        ids = self.inputs["input_ids"]
        mask = self.inputs.get("attention_mask", torch.ones_like(ids)).clone()
        mask[:, :HIDDEN] = 0
        masked = {**self.inputs, "attention_mask": mask}
        changed = {**masked, "input_ids": self.replace_tokens(ids, slice(0, HIDDEN))}
        one, other = self.run_exactly(masked), self.run_exactly(changed)
        if not decodes and one[0].shape[:2] != ids.shape:
            return NO_PLACES
        return self.compare_runs(
            "mask", one, other, unpadded_positions({} if decodes else masked, one[0])
        )

    def check_batch(self) -> Check:
        """Returns the check of whether the first sequence has the same output alone and
        in the batch. Raises MeasurementError where the output has another number of
        sequences than the inputs, and as `compare_runs`."""
        count = self.sequences
        alone = {
            name: x[:1] if isinstance(x, Tensor) and len(x) == count else x
            for name, x in self.inputs.items()
        }
        out, outs = self.exact_run
        if len(out) != count:
            raise MeasurementError(
                f"the output has {len(out)} sequences, and {count} were read"
            )
        first = out[:1], {name: x[:1] for name, x in outs.items() if len(x) == count}
        return self.compare_runs(
            "batch", first, self.run_exactly(alone), unpadded_positions(alone, out[:1])
        )

    def check_cache(self, steps: int) -> Check:
        """Returns the check of whether decoding the last `steps` tokens one at a time,
        with a cache, gives the outputs of one pass over all tokens. At least the first
        token is read before that. Raises MeasurementError where the text is not in
        `input_ids`, where `steps` is 0, and as `compare_runs`."""
        if self.text != "input_ids":
            raise MeasurementError("a model that encodes is not decoded with a cache")
        length = self.inputs["input_ids"].shape[1]
        first = max(1, length - steps)

        def decoded(**wide: Tensor) -> Tensor:
            """Returns the outputs of a model that reads the last tokens one at a time,
            joined along positions."""
            answers = run_in_parts(self.model, wide, range(first, length + 1))
            return torch.cat([main_output(answer) for answer in answers], dim=1)

        out = main_output(self.subject.run_exactly(self.inputs, run=decoded))
        counts = unpadded_positions(self.inputs, out)
        counts[:, :first] = False
        return self.compare_runs("cache", self.exact_run, (out, {}), counts)

    def check_compiled(self, name: str, way: str) -> Check:
        """Returns the check of whether torch.compile leaves the model's error as it is.
        `name`: of the check; `way`: which of the model's own codes for attention runs,
        `eager` or `sdpa`, where it has several. torch.compile is reset: what this process
        compiled before is compiled anew when it is next called. Raises what the model and
        the compiler raise, and as `compare_with_compiled`."""
        model: nn.Module = self.subject.real
        with torch.no_grad(), attention_override(model, way):
            home = to_model_device(model, self.inputs)
            as_is = main_output(model(**home))
            torch.compiler.reset()
            compiled = main_output(torch.compile(model, dynamic=False)(**home))
        return self.compare_with_compiled(name, as_is, compiled)

    def compare_with_compiled(self, name: str, as_is: Tensor, compiled: Tensor) -> Check:
        """Returns the check of whether a compiled model's output errs at most COMPILED
        times as much as `as_is`, the output of the model as it is. It does not hold where
        the compiled output is not finite at a position that counts. Raises
        MeasurementError where shapes differ, no position counts or `as_is` is not finite
        there."""
        exact = self.exact_run[0]
        counts = unpadded_positions(self.inputs, exact)
        if not as_is.shape == compiled.shape == exact.shape:
            shapes = f"{[*as_is.shape]} and {[*compiled.shape]}"
            raise MeasurementError(f"the two runs return outputs of shapes {shapes}")
        if not counts.any():
            raise MeasurementError("no position of the output counts")
        if count_nonfinite_positions(as_is, counts):
            raise MeasurementError("NaN or infinity in the output of the model as it is")
        tested = partial(Check, name=name, limit=COMPILED)
        if bad := count_nonfinite_positions(compiled, counts):
            return tested(
                holds=False, reason=f"{WRONG[name]}: {_nonfinite_clause(bad, counts)}"
            )
        errors = [float((x - exact)[counts].norm()) for x in (as_is, compiled)]
        ratio = min(errors[1] / max(errors[0], 1e-300), 1e300)
        holds = ratio <= COMPILED
        text = f"its error is {three(ratio)} times that of the model as it is"
        text = f"compiled, {text}" if holds else f"{WRONG[name]}: {text}"
        return tested(holds=holds, difference=ratio, reason=text)


def _nonfinite_clause(bad: int, counts: Tensor) -> str:
    """Returns a clause on how many positions have NaN or infinity, of those that count:
    `NaN or infinity at 3 of 64 positions`."""
    return f"NaN or infinity at {bad} of {int(counts.sum())} positions"


def reproducers(report: EffectsReport, directory: Path, **_: object) -> list[Path]:
    """Writes a script, which needs torch and transformers, for each finding on the
    model's own attention, causality, masks and the cache; returns the scripts' paths.
    Scripts are in folders below `directory`, which are made. None is written, and the
    list is empty, where the checkpoint is no folder with a config.json, or the model
    reads no tokens. Raises OSError where a script cannot be written."""
    path = report.request["checkpoint"]
    path = demo_checkpoint() if path == "demo" else Path(path).resolve()
    if not ((path / "config.json").is_file() and report.tokens):
        return []

    def facts(finding: Finding) -> dict[str, object] | None:
        """Returns what the script of a finding needs, by name; None for a finding of
        another rule."""
        if finding.rule not in ("eager", "sdpa", "causality", "mask", "cache"):
            return None
        model = {
            "architecture": report.provenance.source["architecture"],
            "path": str(path),
        }
        length = min(4, len(report.tokens) // 3)
        return {"rule": finding.rule, "tokens": report.tokens, "length": length, **model}

    return written(report.findings, directory, "effects", facts)
