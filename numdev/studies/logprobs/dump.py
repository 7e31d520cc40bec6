"""Log-probabilities as a file that `numdev logprobs` reads, written by the program that
has them: one line of JSON a sequence."""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np

from numdev.argument_checks import checked
from numdev.errors import UsageError, closest
from numdev.studies.logprobs.file_content import suffix_of, zstandard
from numdev.studies.logprobs.file_records import FileRecord, ReadBudget
from numdev.studies.logprobs.plain_layout import ROLLOUT, TRAINER, plain_sequences

# Of numdev's layout, beside tokens, log-probabilities and mask
FIELDS = frozenset(
    [
        "dtype",
        "engine",
        "entropy",
        "head",
        "kept_ids",
        "kept_offsets",
        "logprobs_mode",
        "min_p",
        "pack_ids",
        "position_ids",
        "rollout_settings",
        "routed_experts",
        "sequence_lengths",
        "side",
        "step",
        "temperature",
        "top_ids",
        "top_k",
        "top_logprobs",
        "top_p",
        "trainer_settings",
        "turn",
        "uid",
        "weights_version",
    ]
)


@checked
def dump_logprobs(
    path: str | Path,
    token_ids: object,
    logprobs: object = None,
    *,
    rollout_logprobs: object = None,
    trainer_logprobs: object = None,
    mask: object = None,
    **fields: object,
) -> None:
    """Appends one sequence to a file of JSON lines, `.jsonl`, `.jsonl.gz` or
    `.jsonl.zst`, that `numdev logprobs` reads. The file is made if it does not exist, its
    folder is not.

    `token_ids`: its n tokens, prompt and response, without padding. Either `logprobs`,
    those of one side, or `rollout_logprobs` and `trainer_logprobs`, those of both sides:
    lists, arrays or tensors, in which value i belongs to token i. With fewer than n
    values they are those of the last tokens, and so is a shorter `mask`. NaN and None
    mean that a token has no value. `mask`: which tokens count; None: those with a value.

    `fields`: what else is recorded, by the names in FIELDS, such as temperature, top_p,
    top_k, min_p, dtype, head, logprobs_mode, engine, weights_version, step, uid, side,
    top_ids and top_logprobs, kept_ids, position_ids, entropy, routed_experts, turn. None:
    left out. Raises UsageError for another name or suffix, and for more than n values;
    MeasurementError for values that could not be read back; nothing is written then.
    Raises OSError where the file cannot be written. Each process needs its own file."""
    path = Path(path)
    if suffix_of(path) not in (".jsonl", ".ndjson"):
        raise UsageError(f"path: expected a file .jsonl, got {path.suffix}")
    if unknown := sorted(set(fields) - FIELDS):
        hint = closest(unknown[0], FIELDS)
        raise UsageError(f"dump_logprobs: unknown field {unknown[0]!r}", hint=hint)
    sides = {
        "logprobs": logprobs,
        f"{ROLLOUT}_logprobs": rollout_logprobs,
        f"{TRAINER}_logprobs": trainer_logprobs,
    }
    values = {name: _listed(x) for name, x in sides.items() if x is not None}
    if not values or (logprobs is not None and len(values) > 1):
        names = " or ".join(sides)
        raise UsageError(f"dump_logprobs: expected {names}, got {len(values)} of them")
    ids = cast(list[object], _listed(token_ids))
    n = len(ids)
    whole = {name: _at_end(name, x, n, None) for name, x in values.items()}
    if mask is None:
        counts = [any(x[i] is not None for x in whole.values()) for i in range(n)]
    else:
        counts = [bool(x) for x in _at_end("mask", _listed(mask), n, 0)]
    record = {"token_ids": ids, **whole, "mask": [int(x) for x in counts]}
    record |= {name: _listed(x) for name, x in fields.items() if x is not None}
    # What is refused now would be refused when the file is read.
    for _ in plain_sequences(
        FileRecord(record, "dump_logprobs", ReadBudget(path, sys.maxsize))
    ):
        pass
    line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    with path.open("ab") as file:
        file.write(_packing(path)(line))


def _listed(value: object) -> object:
    """Returns an array or tensor, of any number of dimensions, as nested lists (one
    without dimensions as a number), with None for NaN. Infinity and other values stay as
    they are."""
    tolist = getattr(value, "tolist", None)
    x = tolist() if callable(tolist) else value
    if isinstance(x, list | tuple):
        return [
            _listed(item) if isinstance(item, list | tuple) else _plain(item)
            for item in x
        ]
    return _plain(x)


def _plain(value: object) -> object:
    """Returns a number as JSON can hold it: None for NaN, Python's number for one of
    NumPy or a tensor of one element. Other values stay as they are."""
    if isinstance(value, np.generic) or hasattr(value, "item"):
        value = cast(np.generic, value).item()
    return None if isinstance(value, float) and math.isnan(value) else value


def _at_end(name: str, values: object, n: int, fill: object) -> list[object]:
    """Returns values of the last tokens as values of all n tokens, with `fill` before
    them. Raises UsageError for what is no list, and for more than n values."""
    if not isinstance(values, list) or len(values) > n:
        got = f"{len(values)}" if isinstance(values, list) else type(values).__name__
        raise UsageError(f"{name}: expected at most {n} values, one a token, got {got}")
    return [fill] * (n - len(values)) + values


def _packing(path: Path) -> Callable[[bytes], bytes]:
    """Returns the function that compresses a line of bytes, by the file's suffix: `.gz`,
    `.zst`, or not at all. Each line is compressed alone, so that a program that ends
    leaves whole lines. Raises UsageError where Zstandard is not installed."""
    if path.suffix.lower() == ".gz":
        return gzip.compress
    if path.suffix.lower() == ".zst":
        return cast(Callable[[bytes], bytes], zstandard(path).compress)
    return bytes
