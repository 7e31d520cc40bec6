"""How far a model's output is from the exact one, sequence by sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from numdev.errors import MeasurementError
from numdev.exact.result_dtypes import is_floating
from numdev.exact.wide_tensors import widened
from numdev.studies.effects.report import Fields

PARTS = 8  # of a sequence, for the growth of the error with position
BLOCK = 1 << 24  # logits that are compared at once
# A flip is a near tie up to this many times the largest error that roundings make at its
# position: one of two such errors may be small by luck (in random models the other was
# 1.74 times as large).
NEAR = 4
EXACT_NONFINITE = "NaN or infinity in the exact output (fp64)"
TINY = 1e-300  # a divisor that is never 0


def main_output(answer: object) -> Tensor:
    """Returns the tensor by which answers of a model are compared, [sequences, positions,
    width] in fp64: its logits, else its last hidden state, else the first tensor among
    its fields. A tensor is taken itself, of a tuple or list the first element. An output
    [sequences, width] has one position; further axes between the first and last become
    positions. Raises MeasurementError where what is chosen so is no floating-point tensor
    of two axes or more."""
    parts = answer if isinstance(answer, Mapping) else getattr(answer, "__dict__", {})
    named = (parts[n] for n in ("logits", "last_hidden_state", *parts) if n in parts)
    x: object = next((x for x in named if isinstance(x, Tensor)), answer)
    x = x[0] if isinstance(x, tuple | list) and x else x
    if not is_floating(x) or x.ndim < 2:
        raise MeasurementError(
            f"the model returns {type(answer).__name__}, with no logits and no hidden "
            "state"
        )
    out: Tensor = widened(x)
    return out[:, None] if out.ndim == 2 else out.flatten(1, -2)


def outputs_by_name(answer: object) -> dict[str, Tensor]:
    """Returns the tensors by which answers of a model are compared, each [sequences,
    positions, width] in fp64, by the name of the output: "" for a model's only one,
    `latents` and `image` for a pipeline's. Raises MeasurementError as `main_output`."""
    x, image = main_output(answer), getattr(answer, "image", None)
    return {"": x} if image is None else {"latents": x, "image": main_output(image)}


def text_input_name(inputs: Mapping[str, object]) -> str | None:
    """Returns the name of the input whose tokens the model's output is about:
    `decoder_input_ids` if there is one, else `input_ids`, whatever these hold, else the
    first int64 tensor [sequences, positions]; None without one."""
    tensors = ((n, x) for n, x in inputs.items() if isinstance(x, Tensor))
    tokens = [n for n, x in tensors if x.dtype == torch.int64 and x.ndim == 2]
    return next(
        (n for n in ("decoder_input_ids", "input_ids", *tokens) if n in inputs), None
    )


def unpadded_positions(
    inputs: Mapping[str, object], out: Tensor, mask: str = "attention_mask"
) -> Tensor:
    """Returns which positions of an output are no padding, bool [sequences, positions] on
    its device: those that the input named `mask` has as other than 0. All positions where
    there is no such input, or it has another shape."""
    shown = inputs.get(mask)
    if isinstance(shown, Tensor) and shown.shape == out.shape[:2]:
        return shown.to(out.device).bool()
    return torch.ones(out.shape[:2], dtype=torch.bool, device=out.device)


class Scored(NamedTuple):
    """How an output is scored: as logits or states, at which positions, for which
    tokens."""

    logits: bool  # else final states
    counted: Tensor  # bool [sequences, positions]: not padding
    targets: Tensor  # int64 alike: the text's own token that a position predicts, or -1

    @classmethod
    def from_answer(
        cls, model: nn.Module, answer: object, inputs: Mapping[str, Tensor]
    ) -> Scored:
        """Returns how to score an answer of the model on `inputs`. It is scored as logits
        where the width of its output is the size of a vocabulary (the config's, or that
        of the first embedding) or the number of labels, and it has no
        `last_hidden_state`. For logits over tokens `targets` has the next token of the
        text, of a masked or an encoder-decoder model the token itself; it is -1 where
        that is padding, or the inputs have no such token, and for all other outputs.
        Raises MeasurementError as `main_output`."""
        out, name = main_output(answer), text_input_name(inputs)
        config: object = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        tables = [
            m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)
        ]
        tokens = {getattr(text, "vocab_size", None), *tables[:1]}
        is_text = out.shape[-1] in tokens
        logits = is_text or out.shape[-1] == getattr(config, "num_labels", None)
        logits &= not hasattr(answer, "last_hidden_state")
        decodes = name == "decoder_input_ids"
        counts = unpadded_positions(
            inputs, out, "decoder_attention_mask" if decodes else "attention_mask"
        )
        targets = torch.full_like(counts, -1, dtype=torch.int64)
        if logits and is_text and name and inputs[name].shape == counts.shape:
            targets = inputs[name].to(out.device).masked_fill(~counts, -1)
            encodes = getattr(config, "is_encoder_decoder", False)
            if not encodes and not type(model).__name__.endswith("ForMaskedLM"):
                # position i predicts token i + 1
                targets = torch.cat(
                    [targets[:, 1:], targets.new_full((len(out), 1), -1)], dim=1
                )
        return cls(logits, counts, targets)


def count_nonfinite_positions(x: Tensor, counts: Tensor) -> int:
    """Returns at how many of the positions that count `x` [sequences, positions, width]
    has NaN or infinity. `counts`: bool [sequences, positions]."""
    return int((~x.isfinite().all(dim=-1) & counts).sum())


def largest_error(x: Tensor, truth: Tensor) -> Tensor:
    """Returns the largest |error| of a logit at each position, [sequences, positions],
    after each position's mean error is taken off. `x`, `truth`: [sequences, positions,
    tokens]."""
    return _centred(x - truth).abs().amax(dim=-1)


def score_sequences(
    x: Tensor,
    truth: Tensor,
    how: Scored,
    by_chance: Tensor | None,
    beside: Tensor | None,
    first: Mapping[int, str] = MappingProxyType({}),
) -> list[Fields]:
    """Returns the numbers of an `OutputRow` for each sequence, as dicts of its fields.
    `x`, `truth`, `beside`: [sequences, positions, width]. Only positions that count
    (`how.counted`) are looked at.

    `by_chance` [sequences, positions]: the `largest_error` that roundings make, by which
    flips are told from near ties; None leaves `unexplained` out. `beside`: the output
    that `from_against` is measured from; None, or one that is not finite in a sequence,
    leaves it out there. `growth` is empty for fewer than 2 PARTS positions. A sequence
    without numbers has a `status` and a `reason`: `skipped` where it is all padding or
    `truth` is not finite (then `lost` too), `failed` where `x` is not finite (with
    `nonfinite`, how many positions). `first`: by the number of a sequence, where NaN or
    infinity first came up, which the reason then says."""
    rows: list[Fields] = []
    for i, counts in enumerate(how.counted):
        values, exact = x[i][counts], truth[i][counts]
        bad = int((~values.isfinite()).any(dim=-1).sum())
        where = f", first in {first[i]}" if i in first else ""
        if not len(values):
            rows.append({"status": "skipped", "reason": "the sequence is all padding"})
            continue
        # No kernel's fault, and nothing to measure it by
        if not bool(exact.isfinite().all()):
            rows.append(
                {"status": "skipped", "reason": f"{EXACT_NONFINITE}{where}", "lost": True}
            )
            continue
        if bad:
            positions = f"{bad} of {len(values)} positions"
            reason = f"NaN or infinity in the output at {positions}{where}"
            rows.append({"status": "failed", "reason": reason, "nonfinite": bad})
            continue
        if how.logits:
            errors = None if by_chance is None else by_chance[i][counts]
            cost, row = _score_logits(values, exact, how.targets[i][counts], errors)
        else:
            cost, row = _score_states(values, exact)
        # What is added to all logits of a position alike changes nothing.
        centred = _centred if how.logits else lambda x: x
        size = centred(exact).norm().clamp_min(TINY)
        parts = cost.tensor_split(PARTS) if len(cost) >= 2 * PARTS else ()
        row |= {**_mean_and_tail("cost", cost), "positions": len(values)}
        row["growth"] = tuple(float(part.mean()) for part in parts)
        row["error"] = float(centred(values - exact).norm() / size)
        if beside is not None and bool(beside[i][counts].isfinite().all()):
            row["from_against"] = float(centred(values - beside[i][counts]).norm() / size)
        rows.append(row)
    return rows


def _mean_and_tail(name: str, x: Tensor) -> dict[str, float]:
    """Returns the fields `name`, `name_p999` and `name_max` of a row: the mean of `x`
    [positions], its 99.9 % point and its largest value. `x`: at least one."""
    point = x.kthvalue(math.ceil(0.999 * len(x))).values
    return {
        name: float(x.mean()),
        f"{name}_p999": float(point),
        f"{name}_max": float(x.max()),
    }


def _centred(x: Tensor) -> Tensor:
    """Returns the logits with the mean of each position taken off, since what is added to
    all logits of a position changes no probability."""
    return x - x.mean(dim=-1, keepdim=True)


def _score_states(x: Tensor, exact: Tensor) -> tuple[Tensor, Fields]:
    """Returns the cost of each position [positions], the squared error over the squared
    norm of the exact state (TINY for a norm of 0), and the field `angle` of the row: the
    mean angle in degrees. `x`, `exact`: final states [positions, width]."""
    size = exact.square().sum(dim=-1).clamp_min(TINY)
    cost = (x - exact).square().sum(dim=-1) / size
    cosine = torch.cosine_similarity(x, exact, dim=-1, eps=TINY).clamp(-1, 1)
    return cost, {"angle": float(cosine.acos().rad2deg().mean())}


def _score_logits(
    x: Tensor, exact: Tensor, targets: Tensor, by_chance: Tensor | None
) -> tuple[Tensor, Fields]:
    """Returns the cost of each position [positions], KL(exact || x) in nats, and the
    fields of the row that only logits have: `flips` and `first_flip`; `unexplained` where
    `by_chance` [positions], the `largest_error` that roundings make, is not None; the
    changes of log-probabilities where any of `targets` [positions] is a token, not -1. A
    top token that the exact logits have as high as their own is no flip. `x`, `exact`:
    finite [positions, tokens]."""
    step = max(1, BLOCK // x.shape[-1])
    parts = []
    for logits, exact_logits, token in zip(
        *(y.split(step) for y in (x, exact, targets)), strict=True
    ):
        log_q, log_p = logits.log_softmax(dim=-1), exact_logits.log_softmax(dim=-1)
        change = log_q - log_p
        cost = -(log_p.exp() * change).sum(dim=-1)  # KL(exact || x)
        best, top = log_p.max(dim=-1).values, log_q.argmax(dim=-1, keepdim=True)
        margin = best - log_p.gather(1, top)[:, 0]  # 0 where the top token is the same
        change_of_token = change.gather(1, token.clamp_min(0)[:, None])
        parts.append((cost.clamp_min(0), margin, change_of_token))
    cost, margin, change = (torch.cat(p) for p in zip(*parts, strict=True))
    flips = margin.nonzero()[:, 0].tolist()
    row: Fields = {"flips": len(flips), "first_flip": next(iter(flips), None)}
    if by_chance is not None:
        row["unexplained"] = int((margin > NEAR * by_chance).sum())
    if len(change := change[targets >= 0]):
        row |= _mean_and_tail("log_prob", change.abs().flatten())
        row["log_perplexity"] = -float(change.mean())
    return cost, row
