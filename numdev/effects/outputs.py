"""How far a model's output is from the exact one, sequence by sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from numdev.effects.wide import widened
from numdev.errors import MeasurementError

PARTS = 8  # of a sequence, for the growth of the error with position
BLOCK = 1 << 24  # logits that are compared at once
# A flip is a near tie up to so many times the largest error that roundings make at its position:
# of two such errors one may be small by luck (in random models 1.74 times the other's).
NEAR = 4
TINY = 1e-300  # a divisor that is never 0


def output_of(answer: Any) -> Tensor:
    """What a model's answer is compared by, [sequences, positions, width] in fp64: its logits, else
    its last hidden state, else what it returns first. Raises MeasurementError for anything else."""
    parts = answer if isinstance(answer, Mapping) else getattr(answer, "__dict__", {})
    named = (parts[n] for n in ("logits", "last_hidden_state", *parts) if n in parts)
    x: Any = next((x for x in named if isinstance(x, Tensor)), answer)
    x = x[0] if isinstance(x, tuple | list) and x else x
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
        what = f"the model returns {type(answer).__name__}, with no logits and no hidden state"
        raise MeasurementError(what)
    out: Tensor = widened(x)
    return out[:, None] if out.ndim == 2 else out.flatten(1, -2)


def text_of(inputs: Mapping[str, Any]) -> str | None:
    """The name of the input that the model's output is about, if that is token ids."""
    named = [n for n in ("decoder_input_ids", "input_ids") if n in inputs]
    tokens = (n for n, x in inputs.items() if isinstance(x, Tensor) and x.dtype == torch.int64)
    return named[0] if named else next((n for n in tokens if inputs[n].ndim == 2), None)


def predicts_next(model: nn.Module) -> bool:
    """Whether position i of its logits is of token i + 1."""
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return not encodes and not type(model).__name__.endswith("ForMaskedLM")


@dataclass(frozen=True, kw_only=True, eq=False)
class Scored:
    """How an output counts."""

    logits: bool  # else final states
    counted: Tensor  # bool [sequences, positions]: not padding
    targets: Tensor | None  # int64 alike: the text's own token that a position predicts, or -1

    @classmethod
    def of(cls, model: nn.Module, answer: Any, inputs: Mapping[str, Any]) -> Scored:
        out, name = output_of(answer), text_of(inputs)
        config: Any = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
        sizes = {
            getattr(text, "vocab_size", None),
            getattr(config, "num_labels", None),
            *tables[:1],
        }
        logits = out.shape[-1] in sizes and not hasattr(answer, "last_hidden_state")
        counted = torch.ones(out.shape[:2], dtype=torch.bool, device=out.device)
        mask = inputs.get(
            "decoder_attention_mask" if name == "decoder_input_ids" else "attention_mask"
        )
        if isinstance(mask, Tensor) and mask.shape == counted.shape:
            counted = mask.to(out.device).bool()
        targets = None
        is_text = out.shape[-1] in (getattr(text, "vocab_size", None), *tables[:1])
        if logits and is_text and name and inputs[name].shape == counted.shape:
            targets = inputs[name].to(out.device).masked_fill(~counted, -1)
            if predicts_next(model):
                targets = torch.cat([targets[:, 1:], targets.new_full((len(out), 1), -1)], dim=1)
        return cls(logits=logits, counted=counted, targets=targets)


def largest_error(x: Tensor, truth: Tensor) -> Tensor:
    """[sequences, positions]: the largest error of a logit, less the mean error of the position."""
    error = x - truth
    return (error - error.mean(dim=-1, keepdim=True)).abs().amax(dim=-1)


def compared(
    x: Tensor, truth: Tensor, how: Scored, by_chance: Tensor | None, beside: Tensor | None
) -> list[dict[str, Any]]:
    """For each sequence, the numbers of an `OutputRow`. `by_chance`: the `largest_error` that
    roundings make; `beside`: the output of the run to take `apart` from. A sequence with NaN or
    infinity has a `reason` and no numbers."""
    rows: list[dict[str, Any]] = []
    for i, counts in enumerate(how.counted):
        own, exact = x[i][counts], truth[i][counts]
        if not len(own):
            rows.append({"status": "skipped", "reason": "the sequence is all padding"})
            continue
        if bad := int((~own.isfinite()).any(dim=-1).sum()):
            reason = f"NaN or infinity in the output at {bad} of {len(own)} positions"
            rows.append({"status": "failed", "reason": reason})
            continue
        row = (_of_logits if how.logits else _of_states)(own, exact)
        cost = row.pop("cost")
        row |= {**_spread("cost", cost), "positions": len(own), "growth": _growth(cost)}
        row["error"] = _relative(own - exact, exact, how.logits)
        if beside is not None and bool(beside[i][counts].isfinite().all()):
            row["apart"] = _relative(own - beside[i][counts], exact, how.logits)
        margin, change = row.pop("margin", None), row.pop("change", None)
        if margin is not None and by_chance is not None:
            row["unexplained"] = int((margin > NEAR * by_chance[i][counts]).sum())
        if change is not None and how.targets is not None:
            targets = how.targets[i][counts]
            known = targets >= 0
        if change is not None and how.targets is not None and bool(known.any()):
            change = change[known].gather(1, targets[known][:, None])
            row |= _spread("log_prob", change.abs().flatten())
            row["log_perplexity"] = -float(change.mean())
        rows.append(row)
    return rows


def _relative(error: Tensor, exact: Tensor, logits: bool) -> float:
    """The rms of an error over that of the exact output. Of logits, what is added to all of a
    position alike changes nothing, and is left out of both."""
    if logits:
        error, exact = (x - x.mean(dim=-1, keepdim=True) for x in (error, exact))
    return float(error.norm() / exact.norm().clamp_min(TINY))


def _of_states(x: Tensor, exact: Tensor) -> dict[str, Any]:
    """Final states [positions, width] beside the exact ones."""
    norms = x.norm(dim=-1) * exact.norm(dim=-1)
    cosine = (x * exact).sum(dim=-1) / norms.clamp_min(TINY)
    cost = (x - exact).square().sum(dim=-1) / exact.square().sum(dim=-1).clamp_min(TINY)
    return {"cost": cost, "angle": float(torch.rad2deg(cosine.clamp(-1, 1).acos()).mean())}


def _of_logits(x: Tensor, exact: Tensor) -> dict[str, Any]:
    """Logits [positions, tokens] beside the exact ones. `margin` is the exact one between the two
    likeliest tokens, where these differ, and `change` that of the log-probabilities."""
    step, parts = max(1, BLOCK // x.shape[-1]), []
    for at in range(0, len(x), step):
        own, right = (y[at : at + step].log_softmax(dim=-1) for y in (x, exact))
        change = own - right
        cost = -(right.exp() * change).sum(dim=-1)  # KL(exact || x)
        best, first = right.max(dim=-1), own.argmax(dim=-1, keepdim=True)
        margin = best.values - right.gather(1, first)[:, 0]
        parts.append((cost, change, margin))
    cost, change, margin = (torch.cat(p) for p in zip(*parts, strict=True))
    places = margin.nonzero()[:, 0]
    return {
        "cost": cost.clamp_min(0), "change": change, "margin": margin, "flips": len(places),
        "first_flip": int(places[0]) if len(places) else None,
    }  # fmt: skip


def _spread(name: str, x: Tensor) -> dict[str, float]:
    """The mean over positions, the 99.9 % point and the largest."""
    ordered = x.sort().values
    at = max(0, math.ceil(0.999 * len(x)) - 1)
    numbers = {"": x.mean(), "_p999": ordered[at], "_max": ordered[-1]}
    return {name + which: float(number) for which, number in numbers.items()}


def _growth(cost: Tensor) -> tuple[float, ...]:
    """The mean cost in equal parts of a sequence; empty for a short one."""
    parts = cost.tensor_split(PARTS) if len(cost) >= 2 * PARTS else ()
    return tuple(float(part.mean()) for part in parts)
