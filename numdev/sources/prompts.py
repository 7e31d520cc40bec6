"""What one run of a model reads: text files, token ids drawn with a seed, tensors out of
a file.

A prompt is a batch of independent sequences: chunks of text do not overlap and each
carries the tokenizer's special tokens, as statistics over sequences (`bias_p`) need.
Which arguments a run needs follows from the model. Images and spectrograms are N(0, 1),
as processors normalise them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from numdev.errors import UsageError, closest, one_line, why_no_file
from numdev.request_models import AuditRequest, demo_checkpoint
from numdev.sources.checkpoint import (
    LENGTHS,
    Checkpoint,
    StateDict,
    first_positive,
    load_tokenizer,
)
from numdev.sources.containers import SUFFIXES, read_tensors
from numdev.sources.tensor_files import checked_tensor, some
from numdev.sources.unsupported_files import refuse_pointer

PROMPT = "prompt.txt"  # what the demo reads, beside its weights


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """One batch of inputs for one run of a model."""

    # By the names of the model's arguments. Of a text: input_ids [sequences, length],
    # int64; and attention_mask alike (1: a token, 0: padding) where sequences differ in
    # length.
    inputs: Mapping[str, Tensor]
    description: str  # In words, for example `8 x 256 tokens of prompt.txt`
    # What was asked for, where that may be more than a text has; of tokens, those of a
    # sequence.
    sequences_asked: int | None = None
    tokens_asked: int | None = None

    def counts(self) -> dict[str, int]:
        """Returns how many sequences and how many tokens a sequence were asked for and
        are read. Keys: `sequences_asked`, `sequences_read`, `tokens_asked`,
        `tokens_read`; what does not apply is left out. `tokens_read` is the length of the
        shortest sequence, without padding. Where nothing was asked for, all that is read
        counts as asked."""
        tensors = [x for x in self.inputs.values() if isinstance(x, Tensor) and x.ndim]
        tokens = [x for x in tensors if x.dtype == torch.int64 and x.ndim == 2]
        shown = self.inputs.get("attention_mask")
        if not isinstance(shown, Tensor) or shown.ndim != 2:
            shown = torch.ones_like(tokens[0]) if tokens else None
        sequences = len(tensors[0]) if tensors else None
        length = None if shown is None else int(shown.bool().sum(dim=1).min())
        both = {  # of tensors that were given all is asked for
            "sequences_asked": sequences and (self.sequences_asked or sequences),
            "sequences_read": sequences,
            "tokens_asked": length if self.tokens_asked is None else self.tokens_asked,
            "tokens_read": length,
        }
        return {name: count for name, count in both.items() if count is not None}


def model_inputs(
    request: AuditRequest, checkpoint: Checkpoint | StateDict, model: nn.Module
) -> Prompt:
    """Returns everything one run of the model needs: the inputs that the request names,
    and the others drawn, as many sequences as the file of `inputs` has. The model of a
    StateDict gets what that file holds, or else token ids alone, under `input_ids` or its
    first argument. Raises UsageError for text where it would not be read, for `tokenizer`
    without `text`, for other options that do not go together or with the model, and for
    an input that cannot be read or drawn; MeasurementError for a damaged file."""
    if request.tokenizer and not request.text:
        raise UsageError("--tokenizer is used only with --text", hint="give --text too")
    parts = [read_prompt(Path(request.inputs), model)] if request.inputs else []
    takes, takes_all = argument_names(model.forward)
    if isinstance(checkpoint, StateDict):  # a model somebody wrote by hand
        if parts and request.text:
            raise UsageError(
                "--inputs and --text both say what the model reads", hint="give one"
            )
        if parts:
            return parts[0]
        text = _text_prompt(request, checkpoint, model)
        # Token ids go under the name that it gives its first argument (`idx`, `tokens`,
        # `x`).
        first = "input_ids" if "input_ids" in takes or not takes else takes[0]
        inputs = {
            first if name == "input_ids" else name: x for name, x in text.inputs.items()
        }
        if "attention_mask" in inputs.keys() - takes and not takes_all:
            what = "the sequences differ in length and the model takes no attention_mask"
            raise UsageError(what, hint="give a smaller --length")
        return dataclasses.replace(text, inputs=inputs)
    in_file = parts[0].inputs if parts else {}
    needs = needed_inputs(model, present=in_file, generates=request.generate is not None)
    if request.text and "input_ids" not in needs:
        raise UsageError(f"{type(model).__name__} reads no text", hint="leave --text out")
    count = next((len(x) for x in in_file.values()), request.sequences)
    read_by_encoder = None
    for name in needs:
        if name == "input_ids":
            drawing = request.model_copy(update={"sequences": count})
            read_by_encoder = _text_prompt(
                request if request.text else drawing, checkpoint, model
            )
            parts.append(read_by_encoder)
        elif name == "decoder_input_ids" and read_by_encoder:
            same = {f"decoder_{n}": x for n, x in read_by_encoder.inputs.items()}
            same = {n: x for n, x in same.items() if n in takes}
            parts.append(Prompt(inputs=same, description="the same for the decoder"))
        else:
            parts.append(
                draw_input(
                    name, model, count=count, length=request.length, seed=request.seed
                )
            )
    return Prompt(
        inputs={name: x for part in parts for name, x in part.inputs.items()},
        description=", ".join(part.description for part in parts),
        sequences_asked=read_by_encoder.sequences_asked if read_by_encoder else None,
        tokens_asked=read_by_encoder.tokens_asked if read_by_encoder else None,
    )


def _text_prompt(
    request: AuditRequest, checkpoint: Checkpoint | StateDict, model: nn.Module
) -> Prompt:
    """Returns what a text model reads: the request's text files (for the demo its own),
    else drawn token ids. Sequences are no longer than the model's positions, less the
    tokens that it is to write. Raises UsageError for a text that cannot be read, without
    a tokenizer for it, or with token ids outside the vocabulary; without a text, where
    the vocabulary's size is unknown; and where no position is left. Raises
    MeasurementError for a damaged tokenizer or a pointer of git-lfs."""
    texts = [Path(t) for t in request.text]
    if not texts and request.checkpoint == "demo":
        texts = [demo_checkpoint() / PROMPT]
    vocab_size, room = checkpoint.vocab_size, checkpoint.max_length
    if isinstance(checkpoint, StateDict):  # the model says what is not stored
        tables = (
            m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)
        )
        places = ("config", "args", "params", "cfg", "hparams")
        holders = (model, *(getattr(model, name, None) for name in places))
        fields = (
            x if isinstance(x, Mapping) else getattr(x, "__dict__", {}) for x in holders
        )
        limits = (limit for x in fields if (limit := first_positive(x, *LENGTHS)))
        vocab_size, room = vocab_size or next(tables, None), room or next(limits, None)
    writes_on = request.generate and not checkpoint.config.get("is_encoder_decoder")
    if room and writes_on:
        positions = room
        room -= request.generate or 0  # what it writes follows what it reads
        if room < 1:
            what = f"--generate: expected < {positions} (the model's positions)"
            raise UsageError(f"{what}, got {request.generate}")
    length = min(request.length, room or request.length)
    if texts:
        place = Path(request.tokenizer) if request.tokenizer else checkpoint.path
        tokenizer = load_tokenizer(place)
        if tokenizer is None:
            hint = "give --tokenizer DIR, or leave --text out for random token ids"
            raise UsageError(
                f"{place}: has no tokenizer, so --text cannot be read", hint=hint
            )
        if writes_on:
            tokenizer.padding_side = "left"  # what is written must follow the text itself
        prompt = prompt_from_text(
            texts, tokenizer, length=length, sequences=request.sequences
        )
        if vocab_size and (most := int(prompt.inputs["input_ids"].max())) >= vocab_size:
            what = (
                f"{place}: token id {most} is outside the model's vocabulary of "
                f"{vocab_size}"
            )
            raise UsageError(what, hint="give the model's own --tokenizer")
        return prompt
    if vocab_size is None:
        raise UsageError(
            f"{checkpoint.path}: its vocabulary's size is unknown", hint="give --text"
        )
    return drawn_tokens(
        vocab_size, length=length, sequences=request.sequences, seed=request.seed
    )


def prompt_from_text(
    files: Sequence[Path], tokenizer: Any, *, length: int, sequences: int
) -> Prompt:
    """Returns up to `sequences` chunks of `length` tokens, special ones included, taken
    in turn from the beginnings of UTF-8 files, at least one; every file gives at least
    one chunk, even where these are more than `sequences`. A file shorter than `length`
    gives one shorter chunk, and the batch is padded on the tokenizer's side; it has an
    attention mask only then. Raises UsageError for a file that cannot be read or holds no
    token, and where `length` leaves no room; MeasurementError for a pointer of
    git-lfs."""
    special = len(tokenizer("")["input_ids"])
    if length <= special:
        raise UsageError(
            f"--length: expected more than {special} (special tokens), got {length}"
        )
    by_file = []
    for file in files:
        chunks = list(_token_chunks(read_text(file), tokenizer, length))
        if not chunks:
            raise UsageError(
                f"{file}: holds no token", hint="give a file with text in it"
            )
        by_file.append([chunk for chunk in chunks if len(chunk) == length] or chunks)
    in_turn = [chunk for chunk in chain(*zip_longest(*by_file)) if chunk is not None]
    rows = [torch.tensor(chunk) for chunk in in_turn[: max(sequences, len(files))]]
    # Padding is masked, so any token will do where the tokenizer has none for it.
    padded = partial(pad_sequence, batch_first=True, padding_side=tokenizer.padding_side)
    inputs = {"input_ids": padded(rows, padding_value=tokenizer.pad_token_id or 0)}
    most, up_to = inputs["input_ids"].shape[1], ""
    if any(len(row) < most for row in rows):
        inputs["attention_mask"], up_to = (
            padded([torch.ones_like(row) for row in rows]),
            "up to ",
        )
    names = some([file.name for file in files])
    if tokenizer.init_kwargs.get("auto_map"):
        names += " (the tokenizer's own code is not run)"
    return Prompt(
        inputs=inputs,
        description=f"{len(rows)} x {up_to}{most} tokens of {names}",
        sequences_asked=sequences,
        tokens_asked=length,
    )


def _token_chunks(text: str, tokenizer: Any, length: int) -> Iterator[list[int]]:
    """Yields the token ids of a text, tokenised once and divided: each chunk has up to
    `length` tokens, among them the special ones that the tokenizer puts before and after
    a text. `length`: more than these. Nothing for a text without a token."""
    # transformers' own cutting (return_overflowing_tokens) gives a single chunk in some
    # versions.
    encoded = tokenizer(text, return_special_tokens_mask=True, verbose=False)
    ids, added = encoded["input_ids"], encoded["special_tokens_mask"]
    if 0 not in added:
        return
    begin, end = added.index(0), len(added) - added[::-1].index(0)
    step = length - begin - (len(ids) - end)
    for at in range(begin, end, step):
        yield [*ids[:begin], *ids[at : min(at + step, end)], *ids[end:]]


def drawn_tokens(vocab_size: int, *, length: int, sequences: int, seed: int) -> Prompt:
    """Returns `sequences` rows of `length` token ids drawn uniformly from [0, vocab_size)
    with a seed, int64, without padding or special tokens. Raises RuntimeError for a
    `vocab_size` below 1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (sequences, length), generator=generator)
    words = f"{sequences} x {length} random token ids, seed {seed}"
    return Prompt(
        inputs={"input_ids": ids},
        description=words,
        sequences_asked=sequences,
        tokens_asked=length,
    )


def read_text(file: Path) -> str:
    """Returns the content of a UTF-8 text file. Raises UsageError for a file that cannot
    be read or is not UTF-8, and for a path that can name no file; MeasurementError for a
    pointer of git-lfs."""
    try:
        refuse_pointer(file)
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file}: expected text in UTF-8, got {one_line(error)}"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: for a NUL in its name
        why = getattr(error, "strerror", error)
        raise UsageError(f"{file}: cannot be read ({why})") from error


def needed_inputs(
    model: nn.Module, *, present: Collection[str] = (), generates: bool = False
) -> list[str]:
    """Returns the names of the tensors that a transformers model needs and that are not
    among `present`: its main input first, then images, then a decoder's ids. `generates`:
    whether it writes text, and makes its decoder's ids itself."""
    takes, _ = argument_names(model.forward)
    config, names = cast(Any, model.config), [cast(str, model.main_input_name)]
    # In a model of text and vision without two towers side by side, images replace
    # tokens.
    towers = all(hasattr(config, name) for name in ("text_config", "vision_config"))
    replaced = any(hasattr(config, n) for n in ("image_token_id", "image_token_index"))
    if "pixel_values" in takes and towers and not replaced:
        names.append("pixel_values")
    if config.is_encoder_decoder and "decoder_input_ids" in takes and not generates:
        names.append("decoder_input_ids")
    return [name for name in dict.fromkeys(names) if name not in present]


def read_prompt(path: Path, model: nn.Module) -> Prompt:
    """Returns the tensors of a file as inputs, sorted by name: by its suffix (`.bin`,
    `.pt`, `.pth`) of one that torch.save wrote, else of a safetensors file. Each is named
    after an argument that the model's forward declares (`**kwargs` does not count) and is
    [batch, ...]. Raises UsageError where the path is no file, for no tensor, no such
    argument, or a tensor of no dimension or element; MeasurementError for a damaged
    file."""
    if not path.is_file():
        raise UsageError(
            f"{path}: {why_no_file(path)}",
            hint=f"--inputs takes a file of tensors: {', '.join(SUFFIXES)}",
        )
    inputs = {
        name: checked_tensor(path, name, x) for name, x in sorted(read_tensors(path))
    }
    if not inputs:
        raise UsageError(
            f"{path}: holds no tensor", hint="name tensors after the model's inputs"
        )
    takes, _ = argument_names(model.forward)
    for name, tensor in inputs.items():
        if name not in takes:
            what = f"{path}: {type(model).__name__} takes no input {name!r}"
            raise UsageError(what, hint=closest(name, takes))
        if not tensor.ndim or not tensor.numel():
            raise UsageError(
                f"{path}: {name}: expected [batch, ...], got {list(tensor.shape)}"
            )
    return Prompt(inputs=inputs, description=f"{' and '.join(inputs)} of {path.name}")


def draw_input(
    name: str, model: nn.Module, *, count: int, length: int, seed: int
) -> Prompt:
    """Returns the argument `name` of the model for `count` sequences, drawn with a seed:
    token ids of a decoder, at most `length` of them, or images and spectrograms of N(0,
    1), of the sizes in its config. Raises UsageError for another name, and for sizes that
    the config does not have."""
    config: Any = getattr(model, "config", None)
    if name == "decoder_input_ids":
        text = config.get_text_config(decoder=True)
        limits = ("max_target_positions", "max_position_embeddings")
        length = min(
            length, next((n for x in limits if (n := getattr(text, x, 0))), length)
        )
        ids = drawn_tokens(text.vocab_size, length=length, sequences=count, seed=seed)
        words = f"{ids.description} for the decoder"
        return Prompt(inputs={name: ids.inputs["input_ids"]}, description=words)
    what, shape = "images", [0]
    # [mel bins, frames], two frames to a position of the encoder
    if name == "input_features":
        bins, positions = (
            getattr(config, n, 0) for n in ("num_mel_bins", "max_source_positions")
        )
        what, shape = "spectrograms", [bins, 2 * positions]
    elif name == "pixel_values":  # [channels, height, width]
        places = (
            config,
            *(getattr(config, n, None) for n in ("vision_config", "encoder")),
        )
        place = next((x for x in places if getattr(x, "image_size", None)), None)
        size = getattr(place, "image_size", 0)
        sides = size if isinstance(size, list | tuple) else (size, size)
        shape = [getattr(place, "num_channels", 3), *sides]
    if not all(shape):
        what = f"{type(model).__name__} reads {name}, which numdev cannot make for it"
        raise UsageError(what, hint="give it with --inputs FILE")
    x = torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))
    words = f"{count} {what} of {' x '.join(map(str, shape))}, random, seed {seed}"
    return Prompt(inputs={name: x}, description=words)


def argument_names(forward: Callable[..., object]) -> tuple[list[str], bool]:
    """Returns the names of a function's arguments, in order, without `*args`, `**kwargs`
    and positional-only ones; and whether it takes any other by name (`**kwargs`). Raises
    UsageError for one without a signature, as a scripted model's: nothing that runs in it
    can be seen."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except ValueError as error:
        got = type(forward).__name__
        what = f"expected a model whose forward is a function of Python, got a {got}"
        raise UsageError(
            what, hint="give the module that was scripted or traced"
        ) from error
    named = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)
