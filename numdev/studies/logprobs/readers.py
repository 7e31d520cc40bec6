"""Files of log-probabilities as sides: one of a serving engine or a trainer, or both of
one file.

The first record says which layout a file has, and all its records must have it. What a
reader must know and no record says, as how many values are minus infinity, is in the
notes of a side."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from numdev.errors import MeasurementError, UsageError
from numdev.studies.logprobs.engine_layouts import (
    is_response,
    is_sglang,
    response_sequences,
    sglang_sequences,
)
from numdev.studies.logprobs.lazy_sequences import ItemFile, ItemPlace, Mapped
from numdev.studies.logprobs.plain_layout import (
    ROLLOUT,
    Sequences,
    is_plain,
    plain_sequences,
)
from numdev.studies.logprobs.record_fields import BYTES_PER_SEQUENCE, FileRecord
from numdev.studies.logprobs.record_files import (
    PACKED,
    SUFFIXES,
    read_records,
    suffix_of,
)
from numdev.studies.logprobs.records import RecordedSequence, Side
from numdev.studies.logprobs.trainer_layouts import (
    is_nemo_rl,
    is_prime_rl,
    is_slime,
    nemo_rl_sequences,
    prime_rl_sequences,
    slime_sequences,
)
from numdev.target_names import name_of

STABLE = "STABLE"  # the file that prime-rl writes into a step's folder when it is whole
ALIKE = 0.01  # of a value's size, up to which two records of it are the same
SHOWN = 6  # field names in a message or note
HINT = "numdev.dump_logprobs writes what this command reads"


@dataclass(frozen=True)
class FileLayout:
    """How records of one kind are told, and what they mean."""

    name: str
    fits: Callable[[FileRecord], bool]
    sequences: Callable[[FileRecord], Sequences]


# The most particular first: NeMo-RL's and prime-rl's records have `token_ids` too.
LAYOUTS = (
    FileLayout("prime-rl token export", is_prime_rl, prime_rl_sequences),
    FileLayout("NeMo-RL train data", is_nemo_rl, nemo_rl_sequences),
    FileLayout("slime debug dump", is_slime, slime_sequences),
    FileLayout("SGLang response", is_sglang, sglang_sequences),
    FileLayout("vLLM response", is_response, response_sequences),
    FileLayout("numdev", is_plain, plain_sequences),
)


@dataclass
class _Reading:
    """What was read of one or several files so far."""

    layout: FileLayout | None = None
    file: ItemFile[RecordedSequence] = field(default_factory=ItemFile)
    # By side, the places in the file of its sequences
    places: dict[str, list[ItemPlace]] = field(default_factory=lambda: defaultdict(list))
    unread: dict[str, None] = field(default_factory=dict)  # names, in their order


def read_sides(path: str | Path) -> tuple[Side, ...]:
    """Returns the one or two sides in a file or a folder of files, the rollout first. Of
    their sequences one record is in memory at a time; what was read of the others lies in
    a temporary file (`lazy_sequences`).

    Raises UsageError for a path that is not there or is none of the kinds in
    `record_files.SUFFIXES`, for a folder without such files, and where a package that
    reads a file is missing. Raises MeasurementError, in one line with file and line or
    record, for what cannot be read: a damaged file, an unknown or mixed layout, fields of
    a wrong type, length or range, no sequence, and more than two sides. Raises OSError
    where the disk of temporary files is full."""
    path = Path(path)
    files, notes = _files_of(path)
    reading = _Reading()
    for file in files:
        for record in read_records(file):
            _read_record(reading, record)
    if reading.layout is None or not reading.places:
        raise MeasurementError(f"{path}: expected at least one sequence, got none")
    names = sorted(reading.places, key=lambda name: (name != ROLLOUT, name))
    if len(names) > 2:
        got = ", ".join(name or "none" for name in names[:SHOWN])
        raise MeasurementError(f"{path}: side: expected at most two sides, got {got}")
    if reading.unread and reading.layout.name == "numdev":
        notes = (*notes, f"Fields that are not read: {_listed(reading.unread)}.")
    sides = []
    for name in names:
        sequences = Mapped(reading.file.read, reading.places[name])
        sides.append(
            Side(
                name=name or _stem(path),
                path=path,
                layout=reading.layout.name,
                sequences=sequences,
                notes=(*notes, *_notes(reading.layout.name, sequences)),
            )
        )
    return tuple(sides)


def _read_record(reading: _Reading, record: FileRecord) -> None:
    """Adds a record's sequences to those of the file. Raises MeasurementError for a
    record of no known layout, or of another one than the file's first, and for fields
    that are not as its layout has them."""
    layout = next((layout for layout in LAYOUTS if layout.fits(record)), None)
    if layout is None:
        wanted = "token_ids with logprobs, or a record of a program that numdev knows"
        got = _listed(record.fields) or "an empty object"
        what = f"{record.place}: expected {wanted}, got {got}"
        raise MeasurementError(what, hint=HINT)
    if reading.layout is not None and layout is not reading.layout:
        what = f"expected a record of {reading.layout.name}, got one of {layout.name}"
        raise MeasurementError(f"{record.place}: {what}", hint="give each its file")
    reading.layout = layout
    for side, sequence in layout.sequences(record):
        record.budget.spend(BYTES_PER_SEQUENCE)
        reading.places[side].append(reading.file.write(sequence))
    reading.unread.update(dict.fromkeys(map(str, record.unread())))


def _files_of(path: Path) -> tuple[list[Path], tuple[str, ...]]:
    """Returns the files that a path names, in their order, and notes on what is left out:
    of a folder all that can be read, of prime-rl's folders those of steps that are whole.
    Empty where whole steps hold no file. Raises UsageError for a path that is not there,
    a file of another suffix, and a folder with nothing to read; MeasurementError where no
    step is whole, as its file STABLE says."""
    if not path.exists():
        raise UsageError(f"{path}: no such file")
    if not path.is_dir():
        suffix_of(path)
        if not path.is_file():
            raise UsageError(f"{path}: expected a file or a folder, got neither")
        return [path], ()
    steps = [step for step in _in_order(path.glob("step_*")) if step.is_dir()]
    folders = [path] if _rank_files(path) else steps
    if not folders:
        files = [x for x in _in_order(path.iterdir()) if _is_readable(x) and x.is_file()]
        if not files:
            raise UsageError(f"{path}: expected a file {', '.join(SUFFIXES)}, got none")
        return files, ()
    whole = [folder for folder in folders if (folder / STABLE).exists()]
    if not whole:
        what = f"{path}: expected a file {STABLE}, which marks a step as whole, got none"
        hint = "give the files by name to read them nonetheless"
        raise MeasurementError(what, hint=hint)
    files = [file for folder in whole for file in _rank_files(folder)]
    left_out = [folder.name for folder in folders if folder not in whole]
    note = f"Not read, since they have no file {STABLE}: {_listed(left_out)}."
    return files, ((note,) if left_out else ())


def _rank_files(folder: Path) -> list[Path]:
    """Returns the files of prime-rl in a folder that have a suffix that can be read, in
    their order."""
    return [x for x in _in_order(folder.glob("rank_*.jsonl*")) if _is_readable(x)]


def _is_readable(path: Path) -> bool:
    """Whether a path has a suffix that can be read, as `suffix_of` says, and a name that
    does not begin with a dot."""
    with suppress(UsageError):
        return bool(suffix_of(path)) and not path.name.startswith(".")
    return False


def _in_order(paths: Iterable[Path]) -> list[Path]:
    """Returns paths by their names, numbers in them by size: step_2 before step_10."""

    def key(path: Path) -> list[tuple[int, str]]:
        """Returns a name in parts, each a number or a text."""
        parts = re.findall(r"\d+|\D+", path.name)
        return [(int(x[:18]), "") if x.isdecimal() else (-1, x) for x in parts]

    return sorted(paths, key=key)


def _stem(path: Path) -> str:
    """Returns the name of a file or folder (`name_of`). That of a file is
    without the suffixes PACKED and SUFFIXES, in small letters: `v1.2.jsonl.gz` is
    `v1.2`."""
    name = name_of(path)
    for suffix in (*PACKED, *SUFFIXES) if path.is_file() else ():
        name = name.removesuffix(suffix)
    return name


class NoteCounts(NamedTuple):
    """How many of a sequence's tokens, or of a side's tokens and sequences, are as a
    reader of the side must know."""

    tokens: int  # that count; of these:
    missing: int
    infinite: int
    positive: int
    without_prompt: int  # sequences
    other: int  # tokens with another value among their alternatives
    too_probable: int  # tokens
    not_left: int  # tokens
    counted_otherwise: int  # sequences
    mixed: int  # sequences of several versions of the weights

    @classmethod
    def of(cls, x: RecordedSequence) -> NoteCounts:
        """Returns the counts of one sequence."""
        values = x.logprobs[x.mask]
        flags = np.isnan(values), np.isneginf(values), values > 0
        missing, infinite, positive = (int(np.count_nonzero(flag)) for flag in flags)
        return cls(
            tokens=len(values),
            missing=missing,
            infinite=infinite,
            positive=positive,
            without_prompt=int(not x.has_prompt),
            other=_other_among_alternatives(x),
            too_probable=_too_probable(x),
            not_left=_not_left(x),
            counted_otherwise=int(_counts_otherwise(x)),
            mixed=int(len(x.weights_versions) > 1),
        )


def _notes(layout: str, sequences: Sequence[RecordedSequence]) -> Iterator[str]:
    """Yields sentences on what a reader of a side must know. `sequences`: at least
    one."""
    every = zip(*map(NoteCounts.of, sequences), strict=True)
    n = NoteCounts(*(sum(column) for column in every))
    if n.missing:
        yield f"{n.missing} of {n.tokens} counted tokens have no log-probability."
    if n.infinite:
        yield f"{n.infinite} of {n.tokens} log-probabilities are minus infinity."
    if n.positive:
        place, at, value = _first_positive(sequences)
        yield (
            f"{place}: logprobs[{at}]: expected at most 0, got {value:.6g}; "
            f"{n.positive} of {n.tokens} are above 0."
        )
    if n.without_prompt:
        yield f"{n.without_prompt} of {len(sequences)} sequences have no prompt."
    yield from _contradictions(n, len(sequences))
    if n.mixed:
        yield (
            f"{n.mixed} of {len(sequences)} sequences were sampled under several "
            "versions of the weights."
        )
    if layout.startswith("prime-rl"):
        yield (
            "The file does not have the sampling temperature; prime-rl applies it on "
            "both sides."
        )


def _contradictions(n: NoteCounts, sequences: int) -> Iterator[str]:
    """Yields sentences on what records say of one token twice, and not alike: its value
    among its alternatives, their probabilities, whether a filter left it; and on
    positions that do not count up from 0. `sequences`: how many there are."""
    words = {
        "another log-probability among their alternatives": n.other,
        "alternatives of more probability than 1": n.too_probable,
        "a filter that left other tokens alone (kept_ids)": n.not_left,
    }
    yield from (f"{count} tokens have {what}." for what, count in words.items() if count)
    if n.counted_otherwise:
        yield (
            f"{n.counted_otherwise} of {sequences} sequences have position_ids that do "
            "not count up by 1 from 0: a model is asked with such that do."
        )


def _other_among_alternatives(x: RecordedSequence) -> int:
    """Returns how many tokens stand among their alternatives with another value, by more
    than ALIKE of its size, or than ALIKE where it is below 1 in size. Values that are not
    finite on either are left out."""
    if x.top_ids is None or x.top_logprobs is None:
        return 0
    same = (x.top_ids == x.token_ids[:, None]) & np.isfinite(x.top_logprobs)
    value = np.where(np.isfinite(x.logprobs), x.logprobs, np.nan)[:, None]
    slack = ALIKE * np.maximum(1.0, np.abs(value))
    with np.errstate(invalid="ignore"):
        return int((same & (np.abs(x.top_logprobs - value) > slack)).any(axis=1).sum())


def _too_probable(x: RecordedSequence) -> int:
    """Returns how many tokens have alternatives whose probabilities sum to more than 1,
    by more than ALIKE."""
    if x.top_logprobs is None:
        return 0
    with np.errstate(over="ignore"):
        total = np.exp(np.nan_to_num(x.top_logprobs, nan=-np.inf)).sum(axis=1)
    return int((total > 1 + ALIKE).sum())


def _not_left(x: RecordedSequence) -> int:
    """Returns how many tokens that count, and have a record of the tokens that their
    filter left (`kept_ids`), are not among these. 0 where the sequence has no such
    record."""
    if x.kept_ids is None or x.kept_offsets is None:
        return 0
    at = np.repeat(np.arange(len(x)), np.diff(x.kept_offsets))
    is_left = np.zeros(len(x), np.bool_)
    is_left[at[x.kept_ids == x.token_ids[at]]] = True
    return int((x.mask & ~is_left & (np.diff(x.kept_offsets) > 0)).sum())


def _counts_otherwise(x: RecordedSequence) -> bool:
    """Whether recorded positions are not 0, 1, 2 ... in each sequence of a pack. Where
    the lengths of these are not recorded, each begins at position 0. False without
    positions."""
    if x.position_ids is None:
        return False
    counted = np.arange(len(x))
    if x.sequence_lengths is not None:
        starts = np.cumsum(x.sequence_lengths) - x.sequence_lengths
        counted -= np.repeat(starts, x.sequence_lengths)
    else:
        is_start = x.position_ids == 0
        is_start[0] = True
        counted -= np.maximum.accumulate(np.where(is_start, counted, 0))
    return not np.array_equal(counted, x.position_ids)


def _first_positive(sequences: Sequence[RecordedSequence]) -> tuple[str, int, float]:
    """Returns the place of the first sequence with a counted value above 0, where the
    value stands in it, and the value. Raises AssertionError where none is."""
    for sequence in sequences:
        at = np.flatnonzero(sequence.mask & (sequence.logprobs > 0))
        if len(at):
            return sequence.place, int(at[0]), float(sequence.logprobs[at[0]])
    raise AssertionError("none is above 0")


def _listed(names: Iterable[str]) -> str:
    """Returns the first SHOWN names, joined by commas, and how many more there are; empty
    for none. A name is cut after 60 characters; one that is not printable is as Python
    spells it."""
    texts = [str(name).encode(errors="replace").decode()[:60] for name in names]
    shown = [text if text.isprintable() else repr(text) for text in texts[:SHOWN]]
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return ", ".join(shown) + more
