"""Where upstream gradients (dO) come from: the model's own loss, or a seed.

A model that gives a loss when asked as its class is asked gets its dO from that loss:

- A language model of transformers (it has an output layer over its vocabulary, and takes `labels`)
  predicts the tokens it reads: labels are its own token ids, which the model shifts itself where it
  is causal. What a decoder beside an encoder reads is already shifted, so its labels are the tokens
  that follow. Padding is ignored (`IGNORED`).
- A model with two towers is asked for its contrastive loss (`return_loss`).
- Any other model is run as it is, with whatever `labels` or targets its inputs hold, and asked for
  nothing. What counts as its loss is said by `loss_of`.

Else dO is drawn: N(0, 1) from the seed and the case's name, so that it does not depend on which
other cases there are. Which of the two it was goes with every case (`AttentionCase.grad_out_from`).

Whether a model returns a loss is found out by running it once, without gradients: its signature
does not tell.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from numdev.cases import AttentionCase
from numdev.formats import round_to
from numdev.layouts import transposed
from numdev.sources.draws import Draws

LANGUAGE = "the model's language-model loss"
OWN = "the model's own loss"
STORED = "stored in the file"
IGNORED = -100
"""The label of a position that has none, throughout transformers and by PyTorch's default."""


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """Where the upstream gradients of one run come from."""

    seed: int
    loss: str | None = None
    """Which loss of the model's, in words; None where it has none and gradients are drawn."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What the model takes beside its inputs to return that loss."""
    why_not: str = ""
    """Why the model's loss is not used, where it has one."""

    def describe(self) -> str:
        """For the report."""
        return self.loss or drawn_from(self.seed) + (f" ({self.why_not})" if self.why_not else "")

    def draw(self, case: AttentionCase) -> AttentionCase:
        return with_drawn(case, self.seed)


def find_upstream(model: nn.Module, inputs: Mapping[str, Tensor], seed: int) -> Upstream:
    """Where this model's upstream gradients on these inputs come from; runs it once to see.

    A loss that raises, or is not finite, is none; `why_not` says so.
    """
    words, arguments = _objective(model, inputs)
    try:
        with torch.no_grad():
            loss = loss_of(model(**at_home(model, {**inputs, **arguments})))
    except Exception as error:
        # On the inputs alone it may yet run, and where not, the capture says so.
        return Upstream(seed=seed, why_not=f"{words} raised {type(error).__name__}")
    if loss is None:
        return Upstream(seed=seed)
    if not bool(loss.isfinite()):
        return Upstream(seed=seed, why_not=f"{words} is {loss.item()}")
    return Upstream(seed=seed, loss=words, arguments=arguments)


def loss_of(answer: Any) -> Tensor | None:
    """The loss in what a model returned: its `loss`, itself a single number, or the one number of a
    tuple. None where there is none, or where there are several."""
    if hasattr(answer, "loss"):
        found = [answer.loss]
    elif isinstance(answer, Mapping):
        found = [answer.get("loss")]
    else:
        found = list(answer) if isinstance(answer, tuple | list) else [answer]
    numbers = [x for x in found if isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 0]
    return numbers[0] if len(numbers) == 1 else None


def drawn_from(seed: int) -> str:
    """A drawn gradient's origin in words."""
    return f"drawn from N(0, 1), seed {seed}"


def with_drawn(case: AttentionCase, seed: int) -> AttentionCase:
    """The case with dO of N(0, 1) in its own format, drawn from `seed` and its name.

    Where q is a view of [batch, length, heads, dim], as models have it, so is dO.
    """
    shape = (*case.q.shape[:3], case.v.shape[3])
    drawn = Draws(seed, case.ref.case).normal("grad_out", shape)
    x = round_to(drawn, case.format).to(case.q.device, case.q.dtype)
    x = x if case.q.is_contiguous() else transposed(x)
    return dataclasses.replace(case, grad_out=x, grad_out_from=drawn_from(seed))


def at_home(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs where the model is, floating-point tensors as it computes."""
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    if weight is None:
        return dict(inputs)
    return {
        name: x.to(weight.device, weight.dtype if x.is_floating_point() else x.dtype)
        if isinstance(x, Tensor)
        else x
        for name, x in inputs.items()
    }


def _objective(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[str, dict[str, Any]]:
    """The loss to ask the model for, in words, and the arguments that ask for it."""
    asks = inspect.signature(model.forward).parameters.keys() - inputs.keys()
    if not hasattr(model, "get_output_embeddings"):  # none of transformers
        return OWN, {}
    if "labels" in asks and model.get_output_embeddings() is not None:  # type: ignore[operator]
        labels = _labels(model, inputs)
        if labels is not None:
            return LANGUAGE, {"labels": labels}
    return OWN, {"return_loss": True} if "return_loss" in asks else {}


def _labels(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor | None:
    """[batch, length] of token ids, IGNORED at padding; None for a model that reads no tokens."""
    config: Any = model.config
    if not config.is_encoder_decoder:
        return _without_padding(inputs.get("input_ids"), inputs.get("attention_mask"))
    read = inputs.get("decoder_input_ids")
    labels = _without_padding(read, inputs.get("decoder_attention_mask"))
    if labels is None:
        return None
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)


def _without_padding(ids: Tensor | None, mask: Tensor | None) -> Tensor | None:
    if ids is None or mask is None or mask.shape != ids.shape:
        return ids
    return ids.masked_fill(mask == 0, IGNORED)
