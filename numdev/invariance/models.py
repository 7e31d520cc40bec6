"""The model's own output, computed another way, and how much of its change is attention's.

Matrix products change with the batch as well. With attention in fp64, whose answer to the same
inputs is always the same, what is left is the rest's; shares are of mean squares, which add up
where changes are independent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from numdev.audit.isolation import Failure
from numdev.audit.plan import Planned
from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, NumdevError, Refused, one_line
from numdev.formats import Format, dtype_of, round_to
from numdev.invariance.differences import differs
from numdev.invariance.report import ModelRow
from numdev.kernels.reference import attend
from numdev.sources.capture import answered
from numdev.sources.loss import at_home
from numdev.sources.opening import CheckpointSource

DECODED = 8  # tokens, one at a time
Inputs = Mapping[str, Any]


def model_of(source: Any, fmt: Format, device: str) -> nn.Module | None:
    """The source's model in a format; None where it has none, or stays on disk."""
    if not isinstance(source, CheckpointSource) or source.streamed is not None:
        return None
    if "input_ids" not in source.prompt.inputs or not hasattr(source.checkpoint, "load_model"):
        return None
    model: nn.Module = source.checkpoint.load_model(dtype=dtype_of(fmt), device=device)
    return model.eval()


def model_rows(
    model: nn.Module,
    inputs: Inputs,
    planned: Planned,
    fmt: Format,
    run: Callable[[AttentionCase], Any],
    axes: Collection[str],
) -> Iterator[ModelRow]:
    """The model with a kernel, each way that is an axis asked for; `run` gives what the kernel
    returns for a case, or a Failure."""

    def kernel(case: AttentionCase) -> Tensor:
        output = run(case)
        if isinstance(output, Failure):
            raise Refused(output.reason)
        out: Tensor = output.out.to(case.q.dtype)
        return out

    def exact(case: AttentionCase) -> Tensor:
        return round_to(attend(case).out, fmt).to(case.q.dtype)

    home = at_home(model, inputs)
    for axis, way in ((axis, way) for axis, way in _ways(model, home).items() if axis in axes):
        row: dict[str, Any] = {"axis": axis, "kernel": planned.kernel.name, "format": fmt.name}
        try:
            with torch.no_grad():
                a, b = answered(model, way, kernel)
                c, d = answered(model, way, exact)
        except NumdevError as error:
            yield ModelRow(**row, reason=error.message)
        except Exception as error:  # the model's own code: it may have no cache, or another
            yield ModelRow(**row, reason=one_line(error))
        else:
            size = float(a.double().square().mean())
            pairs = ((a, b), (c, d))
            whole, rest = (float((x.double() - y).square().mean()) for x, y in pairs)
            yield ModelRow(
                **row, differ=int(differs(a, b).sum()), elements=a.numel(),
                difference=(whole / size) ** 0.5, rest=(rest / size) ** 0.5,
                share=max(0.0, 1 - rest / whole) if whole else None,
            )  # fmt: skip


def _ways(model: nn.Module, inputs: Inputs) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    """By axis, what gives the output of the first sequence in the usual way and in another."""
    ids = inputs["input_ids"]
    first = {n: x[:1] if isinstance(x, Tensor) and len(x) == len(ids) else x
             for n, x in inputs.items()}  # fmt: skip
    ways: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {}
    if len(ids) > 1:
        ways["batch"] = lambda: (_output(model(**first)), _output(model(**inputs))[:1])
    mask = inputs.get("attention_mask")
    whole = mask is None or bool(mask.bool().all())
    if whole and getattr(model, "can_generate", lambda: False)() and ids.shape[1] > 2 * DECODED:
        n = ids.shape[1]
        ways["chunks"] = partial(_cached, model, ids[:1], (n // 2, n))
        ways["decode"] = partial(_cached, model, ids[:1], tuple(range(n - DECODED, n + 1)))
    return ways


def _cached(model: nn.Module, ids: Tensor, ends: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """One pass, and the same tokens with a cache up to each of these ends."""
    parts, past, start = [], None, 0
    for end in ends:
        answer = model(input_ids=ids[:, start:end], past_key_values=past, use_cache=True)
        parts.append(_output(answer))
        past, start = answer.past_key_values, end
    return _output(model(input_ids=ids)), torch.cat(parts, dim=1)


def _output(answer: Any) -> Tensor:
    """A model's logits, else its last hidden state."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(x := getattr(answer, name, None), Tensor):
            return x
    raise MeasurementError(f"the model returns {type(answer).__name__}, with no logits")
