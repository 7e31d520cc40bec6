"""numdev's own layout of log-probabilities: one record a sequence, or one of many in
rectangles or flat arrays. `numdev.dump_logprobs` writes the former."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import numpy as np

from numdev.studies.logprobs.record_fields import FileRecord, kind_of, row_count
from numdev.studies.logprobs.records import (
    NO_TOKEN,
    Integers,
    Numbers,
    RecordedSequence,
    RecordedSettings,
)

Sequences = Iterator[tuple[str, RecordedSequence]]  # with a side's name; "" is the file's
ROLLOUT, TRAINER = "rollout", "trainer"
LENGTHS = ("lengths", "input_lengths")
OFFSETS = ("offsets", "cu_seqlens")
MODES = ("raw_logprobs", "processed_logprobs")
HOTTEST = 1e6  # a temperature at which all tokens are alike
LARGEST = 2**62  # of whole numbers that are no tokens


def is_plain(record: FileRecord) -> bool:
    """Whether a record has `token_ids`, and log-probabilities by one of numdev's
    names."""
    names = ("logprobs", f"{ROLLOUT}_logprobs", f"{TRAINER}_logprobs")
    return record.has("token_ids") and any(map(record.has, names))


def plain_sequences(record: FileRecord) -> Sequences:
    """Yields the sequences of a record in numdev's layout as (side, sequence), one for
    each side that it has. Raises MeasurementError for a field of another type or length.

    Of many sequences, `token_ids` has a row each, cut to `lengths`, else to where
    `attention_mask` is 1; or all of them one after the other, from `offsets[i]` up to
    `offsets[i + 1]`. Other fields as long as the tokens are cut as these are."""
    for row in rows(record):
        yield from _sides_of_row(row)


def rows(record: FileRecord) -> Iterator[FileRecord]:
    """Yields the record of each sequence of a record that may have many, in order; a
    record of one sequence as it is. Many are rows of lists in `token_ids`, or flat with
    `offsets` or `cu_seqlens`. Raises MeasurementError where rows, offsets, lengths or
    masks do not fit together."""
    ids = record.get("token_ids")
    count = row_count(ids)
    if record.has("offsets") or record.has("cu_seqlens"):
        yield from _flat_rows(record, count)
    elif count and row_count(cast(Any, ids)[0]) is not None:
        yield from _rectangle_rows(record, count)
    else:
        yield record


def _flat_rows(record: FileRecord, total: int | None) -> Iterator[FileRecord]:
    """Yields the record of each sequence where all follow one another. A field as long as
    all sequences together (`total`) is cut as the tokens are. One with a row for each
    sequence is taken apart. Every other field goes to all sequences. Raises
    MeasurementError for offsets that do not go up from 0 to `total`: no sequence may be
    empty."""
    name = next(filter(record.has, OFFSETS))
    offsets = record.integers(name, most=LARGEST)
    ends = [] if offsets is None else offsets.tolist()
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != total or ends != sorted(set(ends)):
        got = f"{len(ends)} from {ends[0]} to {ends[-1]}" if ends else "none"
        raise record.error(name, f"numbers that go up from 0 to {total}", got)
    others = {key: value for key, value in record.fields.items() if key != name}
    for i in range(len(ends) - 1):
        fields = {
            key: cast(Any, value)[ends[i] : ends[i + 1]]
            if row_count(value) == total
            else _row(value, i, len(ends) - 1)
            for key, value in others.items()
        }
        yield _row_record(record, fields, i)


def _rectangle_rows(record: FileRecord, count: int) -> Iterator[FileRecord]:
    """Yields the record of each row, without the padding that lengths, or without these
    an attention mask, mark. A field as wide as the row's tokens is cut as they are; the
    mask is left out. `count`: how many rows. Raises MeasurementError for a row that is no
    list, for lengths below 1 or beyond the row's tokens, and for an attention mask with
    gaps or without a 1."""
    name = next(filter(record.has, LENGTHS), "")
    lengths = record.integers(name, count, least=1, most=LARGEST) if name else None
    others = {key: value for key, value in record.fields.items() if key != name}
    for i in range(count):
        fields = {key: _row(value, i, count) for key, value in others.items()}
        row = _row_record(record, fields, i)
        width = row_count(fields["token_ids"])
        if width is None:
            got = kind_of(fields["token_ids"])
            raise record.error(f"token_ids[{i}]", "a list of tokens", got)
        start, end = _attended(row, width)
        if lengths is not None:
            start, end = 0, int(lengths[i])
        if end > width:
            wanted = f"at most {width}, the row's tokens"
            raise record.error(f"{name}[{i}]", wanted, str(end))
        cut = {
            key: cast(Any, value)[start:end] if row_count(value) == width else value
            for key, value in fields.items()
            if key != "attention_mask"
        }
        yield _row_record(record, cut, i)


def _attended(row: FileRecord, width: int) -> tuple[int, int]:
    """Returns the first position at which the attention mask of a row is 1, and the one
    after the last; 0 and `width` where the row has no mask. Raises MeasurementError for a
    mask with gaps or without a 1."""
    mask = row.flags("attention_mask", width)
    if mask is None:
        return 0, width
    at = np.flatnonzero(mask)
    if not len(at) or at[-1] - at[0] + 1 != len(at):
        raise row.error("attention_mask", "1 from one place to another", "gaps or no 1")
    return int(at[0]), int(at[-1]) + 1


def _row_record(record: FileRecord, fields: dict[str, object], i: int) -> FileRecord:
    """Returns a row of a record of many, with `row 2` in its place, as a record. Names of
    fields that are asked for are added to `read` of the whole record."""
    return FileRecord(fields, f"{record.place} row {i + 1}", record.budget, record.read)


def _row(value: object, i: int, count: int) -> object:
    """Returns row i of a value that has a row for each of `count` sequences; another
    value as it is, since it is the same for all."""
    return cast(Any, value)[i] if row_count(value) == count else value


def _sides_of_row(record: FileRecord) -> Sequences:
    """Yields (side, sequence) for each side of a record. One with `logprobs` has a single
    side, named by its `side` (empty where it has none). Else they are `rollout` and
    `trainer`, where the record has their log-probabilities. Raises MeasurementError for a
    field of another type or length, and without tokens."""
    ids = record.token_ids("token_ids")
    shared = shared_fields(record, ids)
    if record.has("logprobs"):
        name = record.text("side") or ""
        logprobs = record.numbers("logprobs", len(ids))
        yield name, replace(shared, logprobs=cast(Numbers, logprobs))
        return
    for name in (ROLLOUT, TRAINER):
        logprobs = record.numbers(f"{name}_logprobs", len(ids))
        if logprobs is not None:
            settings = shared.settings
            if record.has(f"{name}_settings"):
                settings = settings_of(record.part(f"{name}_settings"), settings)
            yield name, replace(shared, logprobs=logprobs, settings=settings)


def shared_fields(record: FileRecord, ids: Integers) -> RecordedSequence:
    """Returns a sequence with all fields of numdev's names but the log-probabilities,
    which are NaN. Raises MeasurementError for a field of another type or length."""
    n = len(ids)
    mask = record.flags("mask", n)
    top_ids, top_logprobs = _alternatives(record, n)
    kept_ids, kept_offsets = _kept_sets(record, n)
    sequence = RecordedSequence(
        token_ids=ids,
        logprobs=np.full(n, np.nan),
        mask=np.ones(n, np.bool_) if mask is None else mask,
        uid=record.text("uid"),
        settings=settings_of(record),
        weights_versions=versions_of(record, "weights_version"),
        place=record.place,
    )
    return replace(
        sequence,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        kept_ids=kept_ids,
        kept_offsets=kept_offsets,
        position_ids=record.integers("position_ids", n, most=LARGEST),
        sequence_lengths=_pack_lengths(record, n),
        routed_experts=_experts(record, n),
        entropy=record.numbers("entropy", n),
        turn=record.integers("turn", n, most=LARGEST),
    )


def _experts(record: FileRecord, n: int) -> Integers | None:
    """Returns the experts of each token and layer, int64 [n, layers, k], -1 where a token
    has none; None where the record has no experts. Raises MeasurementError for another
    shape, and for numbers below -1."""
    value = record.get("routed_experts")
    if value is None:
        return None
    return record.integers_of("routed_experts", value, n, least=-1, depth=3)


def settings_of(
    record: FileRecord, default: RecordedSettings | None = None
) -> RecordedSettings:
    """Returns what a record says of how its values came about, with the values of
    `default` where it says nothing. A record with several versions of the weights says
    nothing of the version. Raises MeasurementError for a field of another type or range,
    and for a `logprobs_mode` that is none of MODES."""
    versions = versions_of(record, "weights_version")
    texts = {n: record.text(n) for n in ("dtype", "head", "logprobs_mode", "engine")}
    if (mode := texts["logprobs_mode"]) is not None and mode not in MODES:
        raise record.error("logprobs_mode", " or ".join(MODES), repr(mode[:40]))
    says = RecordedSettings(
        **texts,
        temperature=record.number("temperature", most=HOTTEST),
        top_p=record.number("top_p", most=1.0),
        top_k=record.whole("top_k", least=-1),
        min_p=record.number("min_p", most=1.0),
        weights_version=versions[0] if len(versions) == 1 else None,
        step=record.whole("step"),
    )
    if says.top_p == 0:
        raise record.error("top_p", "a number above 0, at most 1", "0")
    # What is None in one record may be said in the other
    changes = {name: value for name, value in vars(says).items() if value is not None}
    return replace(default or RecordedSettings(), **changes)


def versions_of(record: FileRecord, name: str) -> tuple[str, ...]:
    """Returns the versions of the weights in a field, each once, in their order. The
    field is one value, or a list of values (of tokens, for example), of which null is
    left out. Empty where it is missing. Raises MeasurementError for a value that is no
    text or whole number."""
    value = record.get(name)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    values = value if isinstance(value, list | tuple) else [value]
    record.budget.spend(8 * len(values))
    versions: dict[str, None] = {}
    for x in values:
        text = FileRecord({name: x}, record.place, record.budget).text(name)
        if text is not None:
            versions[text] = None
    return tuple(versions)


def _alternatives(record: FileRecord, n: int) -> tuple[Integers | None, Numbers | None]:
    """Returns ids and log-probabilities of each position's likeliest tokens, int64 and
    float64 [n, k]; (None, None) where the record has neither. Raises MeasurementError
    where it has one alone, and for other shapes."""
    ids, logprobs = record.get("top_ids"), record.get("top_logprobs")
    if ids is None and logprobs is None:
        return None, None
    if ids is None or logprobs is None:
        names = ("top_ids", "top_logprobs")
        missing, other = names if ids is None else names[::-1]
        raise record.error(missing, f"a list beside {other}", "none")
    if isinstance(ids, list) and isinstance(logprobs, list):
        return padded(record, "top", ids, logprobs, n)
    x = record.integers_of("top_ids", ids, n, least=NO_TOKEN, depth=2)
    y = record.numbers_of("top_logprobs", logprobs, n, depth=2)
    if x.shape != y.shape:
        raise record.error("top_logprobs", f"shape {list(x.shape)}", f"{list(y.shape)}")
    return x, y


def padded(
    record: FileRecord, name: str, ids: list[Any], logprobs: list[Any], n: int
) -> tuple[Integers, Numbers]:
    """Returns lists of alternatives of different lengths as rectangles [n, k], ids and
    log-probabilities, with NO_TOKEN and NaN where a position has fewer than k. A position
    may be null. `name`: that of the fields, without `_ids`, in errors. Raises
    MeasurementError unless there are n lists of each, of the same lengths."""
    for what, lists in (("ids", ids), ("logprobs", logprobs)):
        if len(lists) != n:
            wanted = f"{n} lists, one a token"
            raise record.error(f"{name}_{what}", wanted, str(len(lists)))
    counts = _row_lengths(record, f"{name}_ids", ids)
    if (other := _row_lengths(record, f"{name}_logprobs", logprobs)) != counts:
        at = next(i for i in range(n) if other[i] != counts[i])
        raise record.error(
            f"{name}_logprobs[{at}]", f"{counts[at]} values", str(other[at])
        )
    wide = max(counts, default=0)
    record.budget.spend(16 * n * wide)
    x = np.full((n, wide), NO_TOKEN, np.int64)
    y = np.full((n, wide), np.nan)
    filled = np.arange(wide) < np.array(counts)[:, None]
    x[filled] = record.integers_of(f"{name}_ids", _joined(ids), None, least=NO_TOKEN)
    y[filled] = record.numbers_of(f"{name}_logprobs", _joined(logprobs), None)
    return x, y


def _row_lengths(record: FileRecord, name: str, rows: list[Any]) -> list[int]:
    """Returns the lengths of lists, 0 for null. Raises MeasurementError for what is
    neither, and beyond the budget."""
    for at, row in enumerate(rows):
        if row is not None and not isinstance(row, list | tuple):
            raise record.error(f"{name}[{at}]", "a list or null", kind_of(row))
    lengths = [0 if row is None else len(row) for row in rows]
    record.budget.spend(8 * sum(lengths))
    return lengths


def _joined(rows: list[Any]) -> list[Any]:
    """Returns the elements of lists, each of which may be null, in one list."""
    return list(chain.from_iterable(row for row in rows if row is not None))


def _kept_sets(record: FileRecord, n: int) -> tuple[Integers | None, Integers | None]:
    """Returns the tokens that a filter left, flat, and n + 1 offsets of where each
    position's begin; (None, None) where the record has neither. Without offsets they are
    n lists, each of which may be null. Raises MeasurementError where they do not fit the
    n tokens."""
    ids, offsets = record.get("kept_ids"), record.get("kept_offsets")
    if ids is None and offsets is None:
        return None, None
    if offsets is None and isinstance(ids, list | tuple):
        if len(ids) != n:
            raise record.error("kept_ids", f"{n} lists, one a token", str(len(ids)))
        lengths = _row_lengths(record, "kept_ids", list(ids))
        flat = record.integers_of("kept_ids", _joined(list(ids)), None)
        return flat, np.cumsum([0, *lengths], dtype=np.int64)
    return kept_sets(record, "kept_ids", "kept_offsets", n)


def kept_sets(
    record: FileRecord, ids_name: str, offsets_name: str, n: int
) -> tuple[Integers, Integers]:
    """Returns flat kept tokens and their offsets, n + 1 numbers from 0 to how many kept
    tokens there are, none below the one before. Raises MeasurementError for anything
    else, and where one of the two is missing."""
    ids = record.integers(ids_name)
    offsets = record.integers(offsets_name, most=LARGEST)
    if ids is None or offsets is None:
        names = (ids_name, offsets_name)
        missing, other = names if ids is None else names[::-1]
        raise record.error(missing, f"a list beside {other}", "none")
    is_sound = len(offsets) == n + 1 and offsets[0] == 0 and offsets[-1] == len(ids)
    if not is_sound or (np.diff(offsets) < 0).any():
        wanted = f"{n + 1} numbers that go up from 0 to {len(ids)}"
        ends = f" from {offsets[0]} to {offsets[-1]}" if len(offsets) else ""
        raise record.error(offsets_name, wanted, f"{len(offsets)}{ends}")
    return ids, offsets


def _pack_lengths(record: FileRecord, n: int) -> Integers | None:
    """Returns the lengths of the sequences that are packed into one of n tokens: from
    `pack_ids` (a number a token, which changes where a sequence begins), else from
    `seq_lens` or `sequence_lengths`. None where the record has none of these. Raises
    MeasurementError for lengths that do not sum to n or are below 1."""
    packs = record.integers("pack_ids", n, least=-LARGEST, most=LARGEST)
    if packs is not None:
        starts = np.flatnonzero(np.diff(packs)) + 1
        return np.diff(np.concatenate([[0], starts, [n]])).astype(np.int64)
    name = "seq_lens" if record.has("seq_lens") else "sequence_lengths"
    lengths = record.integers(name, least=1, most=LARGEST)
    if lengths is not None and lengths.sum() != n:
        raise record.error(name, f"lengths that sum to {n}", str(lengths.sum()))
    return lengths
