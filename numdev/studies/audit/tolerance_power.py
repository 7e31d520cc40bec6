"""What a tolerance passes, beside numdev's rules: both judge the same wrong kernels
(`numdev.operations.function.wrong_kernels`) on the same call.

The tolerance is applied as tests do it, by `torch.allclose` with what the reference
returns as PyTorch runs it in the format."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from numdev.errors import UsageError
from numdev.gate.judgement import Test
from numdev.gate.row_tests import threshold_tests
from numdev.gate.rules import Rules
from numdev.operations.function.function_runs import FunctionRun
from numdev.operations.function.judged_call import FunctionCall
from numdev.operations.function.trees import Values
from numdev.operations.function.wrong_kernels import WrongKernel, wrong_kernels
from numdev.report import (
    DeviationRow,
    FormatPower,
    Outcome,
    PlannedKernel,
    PlanRecord,
    TolerancePower,
    WrongKernelRecord,
    worst,
)

NOTHING_WRONG = "it returns what the reference returns"
RAISES = "the reference does not run on its arguments"


def parsed_tolerance(text: str) -> tuple[float, float]:
    """Returns (rtol, atol) of a text: `1e-3,1e-5` has one number for each, `1e-2` one for
    both. Raises UsageError for any other text, and for numbers that are negative or not
    finite."""
    parts = text.split(",")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    is_usable = all(math.isfinite(number) and number >= 0 for number in numbers)
    if len(numbers) not in (1, 2) or not is_usable:
        raise UsageError(
            f"power: expected a tolerance, got {text!r}",
            hint="--power 1e-2, or rtol and atol: --power 1e-3,1e-5",
        )
    return numbers[0], numbers[-1]


def power_of(
    call: FunctionCall, fmt: str, tolerance: tuple[float, float], rules: Rules
) -> FormatPower:
    """Returns which wrong kernels pass on a call's outputs: by the tolerance (rtol,
    atol), which every output of every draw must keep, and by the rules. A kernel that
    returns numbers equal to the reference's is not wrong on these inputs, and gets a
    reason instead; so does one that raises. Gradients are not compared. Raises what the
    reference raises."""
    forward = dataclasses.replace(
        call, draws=[dataclasses.replace(draw, backward=False) for draw in call.draws]
    )
    kernels = wrong_kernels(call.draws[0].arguments)
    return FormatPower(
        format=fmt,
        case=call.name,
        kernels=tuple(
            _judged(kernel, forward, fmt, tolerance, rules) for kernel in kernels
        ),
    )


def _judged(
    kernel: WrongKernel,
    call: FunctionCall,
    fmt: str,
    tolerance: tuple[float, float],
    rules: Rules,
) -> WrongKernelRecord:
    """Returns the outcomes of tolerance and rules for one wrong kernel. In place of both
    it has a reason, where the kernel raises on a draw, or returns numbers equal to the
    reference's on all."""
    pairs = list(zip(call.draws, call.others, strict=False))
    outputs = [kernel.outputs(draw, others) for draw, others in pairs]
    returned = [x for x in outputs if x is not None]
    if len(returned) < len(call.draws):
        return WrongKernelRecord(words=kernel.words, reason=RAISES)
    plain = [draw.plain.outputs for draw in call.draws]
    if all(_close(x, y, (0.0, 0.0)) for x, y in zip(returned, plain, strict=True)):
        return WrongKernelRecord(words=kernel.words, reason=NOTHING_WRONG)
    close = (_close(x, y, tolerance) for x, y in zip(returned, plain, strict=True))
    return WrongKernelRecord(
        words=kernel.words,
        tolerance=Outcome.PASSED if all(close) else Outcome.EXCEEDED,
        rules=_outcome(returned, call, kernel.words, fmt, rules),
    )


def _close(x: Values, y: Values, tolerance: tuple[float, float]) -> bool:
    """Whether every output of y is in x and within a tolerance (rtol, atol) of it, with
    NaN equal to NaN; False for another shape."""
    rtol, atol = tolerance

    def is_close(a: Tensor, b: Tensor) -> bool:
        """Whether two tensors have one shape and are close, compared in fp64, or
        complex128 where b is complex, so that nothing is rounded."""
        if a.shape != b.shape:
            return False
        wide = torch.complex128 if b.is_complex() else torch.float64
        return torch.allclose(a.to(wide), b.to(wide), rtol, atol, equal_nan=True)

    return all(name in x and is_close(x[name], b) for name, b in y.items())


def _outcome(
    returned: list[Values], call: FunctionCall, words: str, fmt: str, rules: Rules
) -> Outcome:
    """Returns the outcome of the rules for a wrong kernel's outputs, one of each draw:
    EXCEEDED where a test is, else the worst outcome, NOT_JUDGED where no test has an
    outcome. No cause is looked for, so that the rule on other functions finds nothing."""
    runs = [FunctionRun(outputs=values) for values in returned]
    outcomes = [test.outcome for test in tests_of_runs(runs, call, words, fmt, rules)]
    judged = [outcome for outcome in outcomes if outcome is not None]
    if Outcome.EXCEEDED in judged:
        return Outcome.EXCEEDED
    return worst(judged) if judged else Outcome.NOT_JUDGED


def tests_of_runs(
    runs: Sequence[FunctionRun], call: FunctionCall, name: str, fmt: str, rules: Rules
) -> Iterator[Test]:
    """Yields the tests of the rules on a function's runs, one run for each draw of a
    call. No cause of an error is looked for. Rules on mismatches are left out where all
    tensors are floating-point. `name`: the function's. Raises what the reference
    raises."""
    tensors, wrong = call.tensors_of(runs)
    rows: list[DeviationRow] = []
    for tensor, judge in call.judges.items():
        x = tensors[tensor]
        judge = judge.beside(x)
        numbers, nulls = judge.numbers(x, wrong.get(tensor))
        nonfinite = 0 if x is None else judge.nonfinite(x)[0]
        rows.append(
            DeviationRow(
                role="kernel", kernel=name, format=fmt, case=call.name, source="inputs",
                module="", layer=None, call=0, seed=None, head=0, tensor=tensor,
                status="ok", elements=0 if x is None else x.numel(), nonfinite=nonfinite,
                beside_reference=numbers, nulls=nulls,
            )
        )  # fmt: skip
    if all(judge.errors is not None for judge in call.judges.values()):
        floats = [t for t in rules.thresholds if t.metric != "mismatches"]
        rules = rules.model_copy(update={"thresholds": tuple(floats)})
    plan = PlanRecord(
        kernels=(PlannedKernel(role="kernel", kernel=name),), named=True,
        formats=(fmt,), calls=((call.name, None),),
    )  # fmt: skip
    yield from threshold_tests(rows, plan, rules)


def tolerance_power(
    parts: list[FormatPower], tolerance: tuple[float, float]
) -> TolerancePower:
    """Returns the record of a tolerance (rtol, atol), with its power in each format."""
    rtol, atol = tolerance
    return TolerancePower(rtol=rtol, atol=atol, formats=tuple(parts))
