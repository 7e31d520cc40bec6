"""Let a model write: one pass over what it is given (the prefill), then one for each new token.

From the second pass on a model with a cache reads one token and attends to all before it, which is
another shape of attention than any forward pass has: one query against many keys. Tokens are chosen
greedily, so that the same inputs give the same calls.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from numdev.errors import UsageError


def generate(model: nn.Module, inputs: Mapping[str, Tensor], steps: int) -> None:
    """The prefill and `steps` decode passes, with a cache, whatever tokens the model chooses.

    It never ends early: the end token is not let through. A model with a `generate` of its own
    (Whisper's splits audio into chunks) is run by transformers' common one all the same.
    """
    check(model)
    import transformers

    library: Any = transformers
    text = _config(model)
    end = getattr(text, "eos_token_id", None)
    pad = getattr(text, "pad_token_id", None)
    config = library.GenerationConfig(
        max_new_tokens=steps + 1,  # the prefill gives the first one
        min_new_tokens=None if end is None else steps + 1,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        pad_token_id=0 if pad is None else pad,  # else it is guessed, aloud
        disable_compile=True,  # nothing could be seen in compiled code
    )
    # Else drawn ids that happen to be the padding token would be masked.
    whole = dict(inputs)
    if "input_ids" in inputs and "attention_mask" in inspect.signature(model.forward).parameters:
        whole.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
    with _quiet():
        library.GenerationMixin.generate(model, **whole, generation_config=config)


def check(model: nn.Module) -> None:
    """Raises UsageError for a model that does not write."""
    able = getattr(model, "can_generate", None)
    if able is None or not able():
        raise UsageError(
            f"{type(model).__name__} does not generate text",
            hint="leave --generate out: a forward pass is then audited",
        )


def _config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' advice on settings that are chosen here."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
