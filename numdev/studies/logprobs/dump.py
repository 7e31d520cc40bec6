"""Log-probabilities as a file that `numdev logprobs` reads, written by the program that
has them: one line of JSON a sequence."""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from numdev.argument_checks import checked
from numdev.errors import UsageError, cannot_write, closest, one_line
from numdev.studies.logprobs.plain_layout import ROLLOUT, TRAINER, plain_sequences
from numdev.studies.logprobs.record_fields import FileRecord, ReadBudget, kind_of
from numdev.studies.logprobs.record_files import suffix_of, zstandard

FLAT: frozenset[type] = frozenset([int, float, bool, type(None)])
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
    """Appends one sequence to a file of JSON lines that `numdev logprobs` reads: `.jsonl`
    or `.ndjson`, also with `.gz` or `.zst` behind it. The file is made if it does not
    exist, its folder is not.

    `token_ids`: its n tokens, at least one, prompt and response, without padding. Either
    `logprobs`, those of one side, or `rollout_logprobs` and `trainer_logprobs`, those of
    both sides, or one of these two: lists, arrays or tensors, in which value i belongs to
    token i. With fewer than n values they are those of the last tokens, and so is a
    shorter `mask`. NaN and None mean that a token has no value. `mask`: which tokens
    count; None: those with a value.

    `fields`: what else is recorded, by the names in FIELDS, such as temperature, top_p,
    top_k, min_p, dtype, head, logprobs_mode, engine, weights_version, step, uid, side,
    top_ids and top_logprobs, kept_ids, position_ids, entropy, routed_experts, turn. None:
    left out. Raises UsageError for another name or suffix, for more than n values, for
    values that are no list or that JSON cannot hold, for a missing package, and for a
    folder that does not exist or cannot be written to; MeasurementError for values that
    could not be read back, and where the file cannot be written, as on a full disk.
    Nothing is written then, but on a full disk perhaps a part of the line. Each process
    needs its own file."""
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
    values = {name: _listed(name, x) for name, x in sides.items() if x is not None}
    if not values or (logprobs is not None and len(values) > 1):
        names = " or ".join(sides)
        raise UsageError(f"dump_logprobs: expected {names}, got {len(values)} of them")
    written = {name: _listed(name, x) for name, x in fields.items() if x is not None}
    record = {**_token_fields(token_ids, values, mask), **written}
    line = _json_line(record)
    pack = _packing(path)
    # What is refused now would be refused when the file is read.
    for _ in plain_sequences(
        FileRecord(record, "dump_logprobs", ReadBudget(path, sys.maxsize))
    ):
        pass
    try:
        with path.open("ab") as file:
            file.write(pack(line))
    except OSError as error:
        raise cannot_write(path, error) from error


def _token_fields(
    token_ids: object, values: Mapping[str, object], mask: object
) -> dict[str, object]:
    """Returns the fields of a record that have an element for each token: `token_ids`,
    those of `values`, log-probabilities as lists by name, and `mask`, 0 or 1. Values and
    mask may be shorter than the tokens: they are then of the last ones. `mask` None: 1
    where a token has a value. Raises UsageError for what is no list, for more values than
    tokens, and for other values in a mask."""
    ids = _listed("token_ids", token_ids)
    if not isinstance(ids, list):
        raise UsageError(f"token_ids: expected a list of tokens, got {kind_of(ids)}")
    n = len(ids)
    whole = {name: _at_end(name, x, n, None) for name, x in values.items()}
    if mask is None:
        counts = [any(x[i] is not None for x in whole.values()) for i in range(n)]
    else:
        counts = [_is_counted(x) for x in _at_end("mask", _listed("mask", mask), n, 0)]
    return {"token_ids": ids, **whole, "mask": [int(x) for x in counts]}


def _listed(name: str, value: object) -> object:
    """Returns an array or tensor, of any number of dimensions, as nested lists (one
    without dimensions as a number), with None for NaN; those in lists, tuples and
    mappings too. Infinity and other values stay as they are. Raises UsageError, which
    says `name`, for one whose values cannot be listed, as a tensor on the meta device."""
    tolist = getattr(value, "tolist", None)
    try:
        x = tolist() if callable(tolist) else value
    except Exception as error:  # of PyTorch, of several kinds
        got = f"{type(value).__name__} ({one_line(error)})"
        raise UsageError(f"{name}: expected values, got {got}") from error
    if isinstance(x, list | tuple):
        is_flat = set(map(type, x)) <= FLAT
        return [_plain(item) if is_flat else _listed(name, item) for item in x]
    if isinstance(x, Mapping):
        return {key: _listed(name, item) for key, item in x.items()}
    return _plain(x)


def _plain(value: object) -> object:
    """Returns None for NaN; any other value as it is."""
    return None if isinstance(value, float) and math.isnan(value) else value


def _is_counted(value: object) -> bool:
    """Whether a token counts, by its element of a mask. Raises UsageError for what is
    neither a bool nor 0 or 1, as in a nested mask."""
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise UsageError(f"mask: expected 0 or 1 for each token, got {kind_of(value)}")
    return bool(value)


def _json_line(record: Mapping[str, object]) -> bytes:
    """Returns a record as one line of JSON. Raises UsageError, which names the field, for
    a value that JSON cannot hold, as a set."""
    fields = []
    for name, value in record.items():
        try:
            fields.append(f'"{name}":{json.dumps(value, separators=(",", ":"))}')
        except (TypeError, ValueError, RecursionError) as error:
            what = f"{name}: expected values that JSON can hold, got {one_line(error)}"
            raise UsageError(what) from error
    return f"{{{','.join(fields)}}}\n".encode()


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
