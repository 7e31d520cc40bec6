"""What a model is given to read: chunks of text files, token ids drawn with a seed, or a file.

A prompt is a batch of independent sequences. Chunks do not overlap and each carries the special
tokens its tokenizer puts around a text ([CLS] and [SEP], or a beginning-of-sequence token), so
that a row is what the model would see of such a text on its own. Statistics over sequences
(`bias_p`) rest on that.

Which files, how long and how many is decided elsewhere, and so is how long a model can read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numdev.errors import UsageError, closest


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """One batch of inputs for one run of a model."""

    inputs: Mapping[str, Tensor]
    """By the names of the model's arguments. Of a text: input_ids [sequences, length], int64;
    attention_mask of the same shape (1: a token, 0: padding) only where sequences differ in
    length."""
    description: str
    """In words, for example `8 x 256 tokens of prompt.txt`."""

    @property
    def digest(self) -> str:
        """SHA-256 over names, formats, shapes and values of the inputs."""
        whole = hashlib.sha256()
        for name, tensor in sorted(self.inputs.items()):
            whole.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            whole.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return whole.hexdigest()


def from_text(files: Sequence[Path], tokenizer: Any, *, length: int, sequences: int) -> Prompt:
    """Chunks of `length` tokens from UTF-8 text files, special tokens included.

    Up to `sequences` chunks, taken in turn from every file's beginning; every file contributes at
    least one, so there are more where there are more files. A file shorter than `length` gives one
    shorter chunk, and then the batch is padded on the tokenizer's side. What a longer file has
    left over after its last whole chunk is not used. Raises UsageError for a file that cannot be
    read, is not UTF-8 or holds no token, and where `length` leaves no room beside the special
    tokens.
    """
    if not files:
        raise UsageError("no text file was given", hint="name at least one")
    _check_counts(length, sequences)
    before, after = _special_tokens(tokenizer)
    room = length - len(before) - len(after)
    if room < 1:
        raise UsageError(
            f"a length of {length} leaves no room for text beside the tokenizer's "
            f"{len(before) + len(after)} special tokens",
            hint="use a greater length",
        )
    by_file = [_chunks(_encode(_read(file), tokenizer, file), room) for file in files]
    rows = [[*before, *chunk, *after] for chunk in _in_turn(by_file, max(sequences, len(files)))]
    longest = max(len(row) for row in rows)
    up_to = "up to " if any(len(row) < longest for row in rows) else ""
    return Prompt(
        inputs=_batch(rows, tokenizer),
        description=f"{len(rows)} x {up_to}{longest} tokens of {_names(files)}",
    )


def drawn(vocab_size: int, *, length: int, sequences: int, seed: int) -> Prompt:
    """Token ids drawn uniformly from [0, vocab_size), without padding or special tokens."""
    _check_counts(length, sequences)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (sequences, length), generator=generator)
    return Prompt(
        inputs={"input_ids": ids},
        description=f"{sequences} x {length} token ids drawn with seed {seed}",
    )


def fitted(prompt: Prompt, forward: Callable[..., Any]) -> Prompt:
    """The prompt with its token ids under the name that `forward` gives its first argument.

    Models written by hand call them `idx`, `tokens`, `x`. Raises UsageError where `forward` takes
    no such argument, or one of the others is not known to it.
    """
    parameters = inspect.signature(forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [
        p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    inputs = dict(prompt.inputs)
    if "input_ids" in inputs and "input_ids" not in parameters and named:
        inputs = {named[0] if name == "input_ids" else name: x for name, x in inputs.items()}
    unknown = [] if takes_all else [name for name in inputs if name not in named]
    if unknown == ["attention_mask"]:
        raise UsageError(
            "the sequences differ in length and the model takes no attention_mask",
            hint="give a smaller --length, so that all are equally long",
        )
    if unknown:
        raise UsageError(
            f"the model's forward takes no {unknown[0]!r}", hint=closest(unknown[0], named)
        )
    return dataclasses.replace(prompt, inputs=inputs)


def _check_counts(length: int, sequences: int) -> None:
    if length < 1 or sequences < 1:
        raise UsageError(f"{sequences} sequences of {length} tokens", hint="both must be positive")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{file}: cannot be read ({error.strerror})", hint="give a text file"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file}: is not UTF-8 at byte {error.start}", hint="convert it to UTF-8"
        ) from error


def _encode(text: str, tokenizer: Any, file: Path) -> list[int]:
    # verbose=False: a text longer than the model reads is cut here, no reason for a warning.
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if not ids:
        raise UsageError(f"{file}: holds no token", hint="give a file with text in it")
    return ids


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text: found by comparing one with and without."""
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    raise UsageError(
        f"{type(tokenizer).__name__} changes a text's tokens when it adds special ones",
        hint="leave --text out: token ids are then drawn with --seed",
    )


def _chunks(ids: list[int], room: int) -> list[list[int]]:
    """All whole chunks; the whole of what is shorter than one."""
    whole = [ids[i : i + room] for i in range(0, len(ids) - room + 1, room)]
    return whole or [ids]


def _in_turn(by_file: list[list[list[int]]], count: int) -> list[list[int]]:
    """Up to `count` chunks: the first of every file, then the second of every file, and so on."""
    rounds = range(max(len(chunks) for chunks in by_file))
    return [chunks[i] for i in rounds for chunks in by_file if i < len(chunks)][:count]


def _batch(rows: list[list[int]], tokenizer: Any) -> dict[str, Tensor]:
    longest = max(len(row) for row in rows)
    if all(len(row) == longest for row in rows):
        return {"input_ids": torch.tensor(rows)}
    # Padding is masked, so any token will do where the tokenizer has none for it.
    pad = tokenizer.pad_token_id
    ids = torch.full((len(rows), longest), 0 if pad is None else pad)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        left = longest - len(row) if tokenizer.padding_side == "left" else 0
        ids[i, left : left + len(row)] = torch.tensor(row)
        mask[i, left : left + len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def _names(files: Sequence[Path]) -> str:
    if len(files) > 3:
        return f"{len(files)} files"
    return " and ".join(file.name for file in files)
