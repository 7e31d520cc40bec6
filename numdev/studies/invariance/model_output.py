"""Measures how the model's own output changes when it is computed another way, and how
much of that is attention's.

Matrix products change with the batch as well. With attention in fp64, whose answer to the
same inputs is always the same, what is left is the rest's; shares are of mean squares,
which add up where changes are independent."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from numdev.cases import AttentionCase
from numdev.errors import NumdevError, Refused, one_line
from numdev.formats import Format, round_to
from numdev.kernels.reference import attend
from numdev.sources.capture import run_in_parts, run_with_answers
from numdev.sources.upstream_gradients import to_model_device
from numdev.studies.audit.isolation import Failure
from numdev.studies.audit.plan import Planned
from numdev.studies.effects.output_error import main_output
from numdev.studies.invariance.differences import KernelRun
from numdev.studies.invariance.report import ModelRow

DECODED = 8  # tokens, one at a time
Inputs = Mapping[str, Any]


def model_rows(
    model: nn.Module,
    wider: Callable[[], nn.Module],
    inputs: Inputs,
    planned: Planned,
    fmt: Format,
    run: Callable[[AttentionCase], KernelRun | Failure],
    axes: Collection[str],
) -> Iterator[ModelRow]:
    """Yields a row for the model with a kernel along each of `axes` that `model_axes`
    allows. It has a reason and no numbers where a run raises, an output is not finite, or
    the usual one is all zero. `run`: returns the kernel's run on a case, or a Failure.
    `wider`: returns the model in a wider format, whose output is taken as exact."""

    def kernel(case: AttentionCase) -> Tensor:
        """Returns the kernel's attention of a call, in the dtype of q. Raises Refused
        where the kernel gives none."""
        if isinstance(ran := run(case), Failure):
            raise Refused(ran.reason)
        return ran.output.out.to(case.q.dtype)

    def exact(case: AttentionCase) -> Tensor:
        """Returns the exact attention of a call, rounded once to the format."""
        return round_to(attend(case).out, fmt).to(case.q.dtype)

    home = to_model_device(model, inputs)
    for axis in model_axes(model, inputs, axes):
        way = _output_pairs(model, home)[axis]
        row = partial(
            ModelRow,
            axis=axis,
            kernel=planned.kernel.name,
            options=dict(planned.options),
            format=fmt.name,
        )
        try:
            with torch.no_grad():
                a, b = run_with_answers(model, way, kernel)
                c, d = run_with_answers(model, way, exact)  # attention changes nothing
                wide = wider()
                wide_way = _output_pairs(wide, to_model_device(wide, inputs))[axis]
                truth, _ = run_with_answers(wide, wide_way, _exact_attention)
        # The model's own code runs here: it may have no cache, or another one
        except Exception as error:
            reason = error.message if isinstance(error, NumdevError) else one_line(error)
            yield row(reason=reason)
            continue
        tensors = (a, a - b, c - d, a - truth, b - truth)
        size, change, others, *errors = (float(x.square().mean()) for x in tensors)
        if not math.isfinite(size + change + others + sum(errors)) or not size:
            yield row(reason="the model's output is not finite, or all zero")
            continue
        yield row(
            differ=int((a != b).sum()),
            elements=a.numel(),
            difference=(change / size) ** 0.5,
            other_difference=(others / size) ** 0.5,
            explained=(min(errors) / size) ** 0.5,
            share=max(0.0, 1 - others / change) if change else None,
        )


def model_axes(
    model: nn.Module, inputs: Inputs, axes: Collection[str]
) -> tuple[str, ...]:
    """Returns those of `axes` along which the model's own output can be compared, in this
    order: `batch` with several sequences, `chunks` and `decode` where the model can
    generate, nothing is masked and there are more than 2 DECODED tokens. `inputs`: has
    `input_ids`. Nothing is run."""
    return tuple(axis for axis in _output_pairs(model, inputs) if axis in axes)


def _exact_attention(case: AttentionCase) -> Tensor:
    """Returns the attention of a call computed in fp64, in the dtype of the model."""
    return attend(case).out.to(case.q.dtype)


def _output_pairs(
    model: nn.Module, inputs: Inputs
) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    """Returns by axis (`batch`, `chunks`, `decode`) a function without arguments. It runs
    the model and returns two outputs of the first sequence, [1, positions, width] in
    fp64: computed in the usual way, and in another. Positions are those where the two may
    differ: with `decode` the last DECODED. An axis that the model or its inputs do not
    allow is left out."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    count, n = ids.shape
    first = {name: x[:1] if isinstance(x, Tensor) and len(x) == count else x
             for name, x in inputs.items()}  # fmt: skip

    def with_cache(*ends: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Returns the output of one pass, and that of a pass in parts with a cache, each
        part ending at one of `ends`; both from position `first` on."""
        parts = [
            main_output(x) for x in run_in_parts(model, {"input_ids": ids[:1]}, ends)
        ]
        whole = main_output(model(input_ids=ids[:1]))
        return whole[:, first:], torch.cat(parts, dim=1)[:, first:]

    ways: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {}
    if count > 1:
        ways["batch"] = lambda: (
            main_output(model(**first)),
            main_output(model(**inputs))[:1],
        )
    whole = mask is None or bool(mask.bool().all())
    if whole and getattr(model, "can_generate", lambda: False)() and n > 2 * DECODED:
        ways["chunks"] = partial(with_cache, n // 2, n)
        ways["decode"] = partial(
            with_cache, *range(n - DECODED, n + 1), first=n - DECODED
        )
    return ways
