"""Judges many versions of one function at the cost of one reference; no benchmark itself.

`numdev check` computes what rounding explains for every function anew. Here the calls of
a seed are prepared once (`Bench`), and each version is run on them and judged by the same
rules, without causes and reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from numdev.exact.result_dtypes import is_floating
from numdev.formats import Format, format_named
from numdev.gate.rules import Threshold, default_rules_for_functions
from numdev.operations.function.function_runs import FunctionRun
from numdev.operations.function.inputs import Make, calls_of
from numdev.operations.function.judged_call import DRAWS, FunctionCall
from numdev.operations.function.planted_faults import faults_of_inputs, faults_of_outputs
from numdev.operations.function.reference import FunctionReference
from numdev.operations.function.trees import Values, as_real
from numdev.report import BesideReference
from numdev.studies.audit.functions import Asked, Draw, is_few, planned, run_all
from numdev.studies.audit.isolation import Failure

Function = Callable[..., Any]
RULES = tuple(
    t for t in default_rules_for_functions().thresholds if t.at_most is not None
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """One tensor of one call of a version: its numbers, and the rule it breaks."""

    call: str
    tensor: str
    numbers: BesideReference
    rule: str  # empty: none


@dataclasses.dataclass(kw_only=True, eq=False)
class Bench:
    """The calls of a seed, with all that a function is judged by."""

    reference: Function
    calls: Sequence[FunctionCall]
    draws: Sequence[Any]
    backward: bool
    format: Format | None

    @classmethod
    def of(
        cls,
        reference: Function,
        inputs: Function,
        *,
        fmt: str | None,
        seed: int,
        backward: bool,
        device: str = "cpu",
    ) -> Bench:
        make: Make = calls_of(inputs, reference)
        asked = Asked(
            name="version",
            reference=reference,
            make=make,
            format=None if fmt is None else format_named(fmt),
            backward=backward,
            seeds=(seed,),
            device=device,
        )
        plan = planned(asked)
        first = _reference_on(reference, plan.draws[0], backward=backward)
        if is_few([first.plain], plan):
            plan = planned(asked, DRAWS)
        calls = [
            FunctionCall(
                name=name,
                draws=[
                    _reference_on(reference, drawn, backward=backward)
                    for drawn in plan.of(i)
                ],
                others=plan.others[i],
            )
            for i, name in enumerate(plan.names)
        ]
        return cls(
            reference=reference,
            calls=calls,
            draws=plan.draws,
            backward=backward,
            format=asked.format,
        )

    def runs_of(self, function: Function) -> list[FunctionRun]:
        """What a version comes to on all draws. Raises RuntimeError where it raises."""
        runs = run_all(function, self.draws, backward=self.backward)
        for ran in runs:
            if isinstance(ran, Failure):
                raise RuntimeError(ran.reason)
        return [ran for ran in runs if isinstance(ran, FunctionRun)]

    def judged(self, runs: Sequence[FunctionRun]) -> Iterator[Judged]:
        """Each tensor of each call, as `numdev check` would judge it."""
        for call in self.calls:
            of_call, runs = runs[: len(call.draws)], runs[len(call.draws) :]
            tensors, wrong = call.tensors_of(of_call)
            for name, judge in call.judges.items():
                x = tensors[name]
                judge = judge.beside(x)
                numbers, _ = judge.numbers(x, wrong.get(name))
                rule = "form" if numbers.form else broken(numbers)
                if x is not None and judge.nonfinite(x)[0]:
                    rule = "finiteness"
                yield Judged(call=call.name, tensor=name, numbers=numbers, rule=rule)

    def with_outputs(self, outputs: Sequence[Values]) -> list[FunctionRun]:
        """The reference's own runs with other outputs by name, one for each draw."""
        pairs = zip(self.plain(), outputs, strict=True)
        return [dataclasses.replace(ran, outputs=x) for ran, x in pairs]

    def outputs_break(self, runs: Sequence[FunctionRun]) -> str:
        """The first rule that an output breaks in some call; empty where none does."""
        names = set(self.plain()[0].outputs)
        return next(
            (x.rule for x in self.judged(runs) if x.rule and x.tensor in names), ""
        )

    def plain(self) -> list[FunctionRun]:
        """The reference's own runs, as PyTorch runs it."""
        return [draw.plain for call in self.calls for draw in call.draws]

    def wrong_versions(self) -> Iterator[tuple[str, list[FunctionRun]]]:
        """Runs of known-wrong versions, with what is wrong in words. A change that
        changes no bit of an output is left out."""
        plain = self.plain()
        for fault in faults_of_outputs():
            change = partial(tree_map, partial(_if_floating, fault.change))
            runs = self.with_outputs([change(ran.outputs) for ran in plain])
            if not _same_outputs(runs, plain):
                yield fault.words, runs
        for words in [f.words for f in faults_of_inputs(self.draws[0].arguments)]:
            outputs = []
            for drawn in (draw for call in self.calls for draw in call.draws):
                faults = {f.words: f for f in faults_of_inputs(drawn.arguments)}
                if words in faults:
                    changed = faults[words].applied(drawn.arguments)
                    outputs.append(drawn.as_pytorch(changed).outputs)
            if len(outputs) < len(self.draws):
                continue
            runs = [
                dataclasses.replace(p, outputs=x)
                for p, x in zip(plain, outputs, strict=True)
            ]
            if not _same_outputs(runs, plain):
                yield words, runs

    def passes_allclose(self, runs: Sequence[FunctionRun], tolerance: float) -> bool:
        """Whether torch.allclose with this absolute and relative tolerance passes all
        outputs of the first call, beside the reference as PyTorch runs it."""
        first = self.calls[0]
        for draw, ran in zip(first.draws, runs, strict=False):
            for name, x in draw.plain.outputs.items():
                y = ran.outputs.get(name)
                if y is None or y.shape != x.shape:
                    return False
                a, b = (as_real(v).double() for v in (y, x))
                if not torch.allclose(a, b, atol=tolerance, rtol=tolerance):
                    return False
        return True


def _reference_on(function: Function, draw: Draw, *, backward: bool) -> FunctionReference:
    return FunctionReference(
        function=function, arguments=draw.arguments, seed=draw.seed, backward=backward
    )


def _if_floating(change: Callable[[Tensor], Tensor], x: Any) -> Any:
    return change(x) if is_floating(x) else x


def _same_outputs(a: Sequence[FunctionRun], b: Sequence[FunctionRun]) -> bool:
    pairs = [(q.outputs, r.outputs) for q, r in zip(a, b, strict=True)]
    return all(all(x.equal(s[n]) for n, x in r.items()) for r, s in pairs)


def broken(numbers: BesideReference) -> str:
    """The first rule that numbers break; empty where they break none."""
    return next((t.name for t in RULES if exceeds(numbers, t)), "")


def exceeds(numbers: BesideReference, rule: Threshold) -> bool:
    """Whether numbers break a rule that has an upper limit."""
    fields = numbers.model_dump()
    value = fields.get(rule.metric)
    if value is None or rule.at_most is None:
        return False
    limit = rule.at_most * (fields[rule.times] if rule.times else 1.0)
    certain = all(abs(fields[n] or 0.0) > x for n, x in rule.only_where.items())
    return certain and abs(value) > limit
