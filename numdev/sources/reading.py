"""What one run of a model reads: the request's text and files, and the rest drawn.

Puts together what `numdev.sources.prompts` (text, token ids) and `numdev.sources.arguments`
(images, spectrograms, a decoder's inputs, tensors out of a file) provide, for the model at hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from numdev.config import AuditRequest, demo_checkpoint
from numdev.errors import UsageError
from numdev.sources import arguments, prompts
from numdev.sources.checkpoint import Checkpoint, load_tokenizer
from numdev.sources.prompts import Prompt
from numdev.sources.statedict import StateDict, longest, vocabulary


def model_inputs(
    request: AuditRequest, checkpoint: Checkpoint | StateDict, model: nn.Module
) -> Prompt:
    """Everything one run of the model needs: what the request gives, and the rest drawn.

    Raises UsageError for text where it would not be read, and for an input that must be given.
    """
    if request.tokenizer and not request.text:
        raise UsageError("--tokenizer reads --text, and there is none", hint="give --text")
    parts = [arguments.read(Path(request.inputs), model)] if request.inputs else []
    if isinstance(checkpoint, StateDict):
        return _of_plain_model(request, checkpoint, model, parts)
    given = parts[0].inputs if parts else {}
    needs = arguments.wanted(model, given=given, generates=request.generate is not None)
    if request.text and "input_ids" not in needs:
        has = "is given its input_ids" if "input_ids" in given else "reads no text"
        raise UsageError(f"{type(model).__name__} {has}", hint="leave --text out")
    count = arguments.first_axis(given) or request.sequences
    text = None
    for name in needs:
        if name == "input_ids":
            drawing = request.model_copy(update={"sequences": count})
            text = make_prompt(request if request.text else drawing, checkpoint, model)
            parts.append(text)
        elif name == "decoder_input_ids" and text is not None:
            parts.append(arguments.shifted(text, model))
        else:
            parts.append(
                arguments.draw(name, model, count=count, length=request.length, seed=request.seed)
            )
    return arguments.together(parts)


def make_prompt(
    request: AuditRequest, checkpoint: Checkpoint | StateDict, model: nn.Module
) -> Prompt:
    """What a text model reads: the request's text files (the demo's own), else drawn ids."""
    texts = [Path(t) for t in request.text]
    if not texts and request.checkpoint == "demo":
        texts = [demo_checkpoint() / "prompt.txt"]
    vocab_size, positions = _sizes(checkpoint, model)
    room = positions
    writes_on = request.generate and not (checkpoint.config or {}).get("is_encoder_decoder")
    if room and writes_on:
        room -= request.generate or 0  # what it writes follows what it reads
        if room < 1:
            raise UsageError(
                f"--generate {request.generate}: the model has only {positions} positions",
                hint="use a smaller number",
            )
    length = min(request.length, room or request.length)
    if texts:
        tokenizer = _tokenizer(request, checkpoint)
        if writes_on:
            tokenizer.padding_side = "left"  # what is written must follow the text itself
        return prompts.from_text(texts, tokenizer, length=length, sequences=request.sequences)
    if vocab_size is None:
        raise UsageError(
            f"{checkpoint.path}: nothing says how many token ids its model knows",
            hint="give --text or --inputs",
        )
    return prompts.drawn(vocab_size, length=length, sequences=request.sequences, seed=request.seed)


def _of_plain_model(
    request: AuditRequest, checkpoint: StateDict, model: nn.Module, parts: list[Prompt]
) -> Prompt:
    """A model somebody wrote by hand: a file of inputs, or token ids as its first argument."""
    if parts and request.text:
        raise UsageError("--inputs and --text both say what the model reads", hint="give one")
    prompt = parts[0] if parts else make_prompt(request, checkpoint, model)
    return prompts.fitted(prompt, model.forward)


def _sizes(checkpoint: Checkpoint | StateDict, model: nn.Module) -> tuple[int | None, int | None]:
    """How many token ids the model knows and how many positions it has; None where nothing says."""
    if isinstance(checkpoint, StateDict):
        return vocabulary(model, checkpoint.config), longest(model, checkpoint.config)
    return checkpoint.vocab_size, checkpoint.max_length


def _tokenizer(request: AuditRequest, checkpoint: Checkpoint | StateDict) -> Any:
    place = Path(request.tokenizer) if request.tokenizer else checkpoint.path
    tokenizer = load_tokenizer(place)
    if tokenizer is None:
        raise UsageError(
            f"{place}: has no tokenizer, so --text cannot be read",
            hint="give --tokenizer DIR, or leave --text out: token ids are then drawn from --seed",
        )
    return tokenizer
