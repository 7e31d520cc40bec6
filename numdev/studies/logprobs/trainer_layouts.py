"""Files that training frameworks write of both sides: prime-rl's token exports, slime's
debug dumps, NeMo-RL's train data. The field names are theirs, as of August 2026.

What stands in these files where nothing was predicted is no log-probability, and becomes
NaN: the first token of a sequence, and what comes before a response."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from numdev.studies.logprobs.plain_layout import (
    LARGEST,
    ROLLOUT,
    TRAINER,
    Sequences,
    kept_sets,
    rows,
    versions_of,
)
from numdev.studies.logprobs.record_fields import FileRecord, kind_of
from numdev.studies.logprobs.records import (
    Integers,
    Numbers,
    RecordedSequence,
    RecordedSettings,
)

PRIME_RL_SCHEMA = 1
SLIME_FORMAT = 2


def is_prime_rl(record: FileRecord) -> bool:
    """Whether a record is a line of prime-rl's token exports, by its fields."""
    return record.has("schema_version", "token_ids", "inference_logprobs")


def prime_rl_sequences(record: FileRecord) -> Sequences:
    """Yields (side, sequence) of a line of prime-rl's token exports, for each side that
    has values, the rollout first.

    Values belong to their tokens; the first value of each side becomes NaN: the trainer's
    is a filling, -log of the vocabulary's size. The sampling temperature, under which
    both sides are, is not in the file. What was not finite is null. A sequence is named
    by `step`, `rank` and `export_sequence_idx`, `3/0/1`, where it has all three. Raises
    MeasurementError for another version, and for fields that are missing or do not fit
    together."""
    _expect_version(record, "schema_version", PRIME_RL_SCHEMA)
    ids = record.token_ids("token_ids")
    n = len(ids)
    mask = record.flags("loss_mask", n)
    numbers = (record.whole(name) for name in ("step", "rank", "export_sequence_idx"))
    uid = _joined_uid(*numbers)
    for side, name in (
        (ROLLOUT, "inference_logprobs"),
        (TRAINER, "trainer_logprobs"),
    ):
        logprobs = record.numbers(name, n)
        if logprobs is None:
            continue
        entropy = record.numbers("entropy", n) if side == TRAINER else None
        yield (
            side,
            RecordedSequence(
                token_ids=ids,
                logprobs=_without_first(logprobs),
                mask=np.ones(n, np.bool_) if mask is None else mask,
                uid=uid,
                settings=RecordedSettings(step=record.whole("step")),
                position_ids=record.integers("position_ids", n, most=LARGEST),
                entropy=None if entropy is None else _without_first(entropy),
                place=record.place,
            ),
        )


def is_nemo_rl(record: FileRecord) -> bool:
    """Whether a record is a line of NeMo-RL's train data, by its fields."""
    is_one = record.has("generation_logprobs") or record.has("prev_logprobs")
    return is_one and record.has("token_ids", "input_lengths")


def nemo_rl_sequences(record: FileRecord) -> Sequences:
    """Yields (side, sequence) for each sequence of a line of NeMo-RL's train data, for
    each side that has values, the rollout first.

    Columns are rectangles, padded on the right up to `input_lengths`. Value i belongs to
    token i and the first is a filling. A token counts where its own mask is 1 and that of
    its sample is not 0; a missing mask is 1. A sequence is named by step, which the
    file's name says, and `idx`, `3/0`, and where a line has several also by its number
    there, `3/0/1`; not where one of these is missing. Raises MeasurementError for fields
    that are missing or do not fit together."""
    step = re.search(r"train_data_step(\d{1,9})", record.place)
    index = record.whole("idx")
    every = list(rows(record))
    for number, row in enumerate(every):
        ids = row.token_ids("token_ids")
        mask = row.flags("token_loss_mask", len(ids))
        sample = row.number("sample_loss_mask")
        if mask is None or sample == 0:
            mask = np.full(len(ids), mask is None and sample != 0)
        settings = RecordedSettings(step=int(step[1]) if step else None)
        places = (settings.step, index, *((number,) if len(every) > 1 else ()))
        names = ((ROLLOUT, "generation_logprobs"), (TRAINER, "prev_logprobs"))
        for side, name in names:
            logprobs = row.numbers(name, len(ids))
            if logprobs is None:
                continue
            yield (
                side,
                RecordedSequence(
                    token_ids=ids,
                    logprobs=_without_first(logprobs),
                    mask=mask,
                    uid=_joined_uid(*places),
                    settings=settings,
                    place=row.place,
                ),
            )


def is_slime(record: FileRecord) -> bool:
    """Whether a record is slime's debug dump, of training or of rollouts, by its
    fields."""
    return record.has("samples") and record.has("rollout_id")


def slime_sequences(record: FileRecord) -> Sequences:
    """Yields (side, sequence) for each sample of slime's debug dump: both sides of its
    training data (format 2), the rollout alone of its rollouts.

    `tokens` are prompt and response; masks, log-probabilities, entropies and kept sets
    are of the response alone, the last tokens. Experts are of all tokens but the last.
    Raises MeasurementError for another format, and for fields that are missing or do not
    fit together."""
    if record.has("format_version"):
        _expect_version(record, "format_version", SLIME_FORMAT)
    step = record.whole("rollout_id")
    for number, sample in enumerate(record.parts("samples")):
        position = sample.whole("rollout_position")
        uid = _joined_uid(step, number if position is None else position)
        yield from _sample_sequences(sample, uid, step)


def _sample_sequences(sample: FileRecord, uid: str | None, step: int | None) -> Sequences:
    """Yields (side, sequence) of one sample of slime's dump for each side that has
    log-probabilities, the rollout first. Raises MeasurementError for lengths that do not
    fit the tokens."""
    ids = sample.token_ids("tokens")
    n = len(ids)
    is_training = sample.has("response_lengths")
    length = sample.whole("response_lengths" if is_training else "response_length")
    total = sample.whole("total_lengths")
    if length is None or length > n:
        wanted = f"at most {n}, the sample's tokens"
        got = "none" if length is None else str(length)
        raise sample.error("response_length", wanted, got)
    if total is not None and total != n:
        raise sample.error("total_lengths", f"{n}, the sample's tokens", str(total))
    mask = sample.flags("loss_masks" if is_training else "loss_mask", length)
    mask = np.ones(length, np.bool_) if mask is None else mask
    removed = sample.get("remove_sample")
    if not isinstance(removed, bool | None):
        raise sample.error("remove_sample", "true, false or null", kind_of(removed))
    if removed:
        mask = np.zeros(length, np.bool_)
    versions = versions_of(sample, "weight_versions")
    settings = RecordedSettings(
        step=step, weights_version=versions[0] if len(versions) == 1 else None
    )
    shared = RecordedSequence(
        token_ids=ids,
        logprobs=np.full(n, np.nan),
        mask=np.concatenate([np.zeros(n - length, np.bool_), mask]),
        uid=uid,
        settings=settings,
        place=sample.place,
    )
    if (x := sample.numbers("rollout_log_probs", length)) is not None:
        kept_ids, kept_offsets = _slime_kept_sets(sample, length, n)
        rollout = replace(
            shared,
            logprobs=_at_end(x, n),
            weights_versions=versions,
            kept_ids=kept_ids,
            kept_offsets=kept_offsets,
            routed_experts=_slime_experts(sample, n),
        )
        yield ROLLOUT, rollout
    if (x := sample.numbers("log_probs", length)) is not None:
        entropy = sample.numbers("entropy", length)
        trainer = replace(
            shared,
            logprobs=_at_end(x, n),
            settings=RecordedSettings(step=step),
            entropy=None if entropy is None else _at_end(entropy, n),
        )
        yield TRAINER, trainer


def _slime_kept_sets(
    sample: FileRecord, length: int, n: int
) -> tuple[Integers | None, Integers | None]:
    """Returns the kept tokens of a sample, flat, and n + 1 offsets of where each token's
    begin; tokens of the prompt have none. (None, None) where the sample has no offsets.
    Raises MeasurementError for offsets that do not fit. `length`: of the response."""
    if not sample.has("rollout_top_p_token_offsets"):
        return None, None
    names = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")
    ids, offsets = kept_sets(sample, *names, length)
    return ids, np.concatenate([np.zeros(n - length, np.int64), offsets])


def _slime_experts(sample: FileRecord, n: int) -> Integers | None:
    """Returns the experts of each token, int64 [n, layers, k], -1 for the last token,
    which was never an input. None where the sample has none. Raises MeasurementError for
    another shape."""
    value = sample.get("rollout_routed_experts")
    if value is None:
        return None
    name = "rollout_routed_experts"
    x = sample.integers_of(name, value, n - 1, least=-1, depth=3)
    return np.concatenate([x, np.full((1, *x.shape[1:]), -1, np.int64)])


def _at_end(x: Numbers, n: int) -> Numbers:
    """Returns values of the last tokens as values of all n tokens, float64 [n], with NaN
    for the others."""
    return np.concatenate([np.full(n - len(x), np.nan), x])


def _without_first(x: Numbers) -> Numbers:
    """Returns a copy of the values with NaN in place of the first, which is a filling."""
    return np.concatenate([[np.nan], x[1:]])


def _joined_uid(*numbers: int | None) -> str | None:
    """Returns numbers joined by `/`, `3/0`; None where one of them is None. Without
    numbers an empty text."""
    parts = [str(number) for number in numbers if number is not None]
    return "/".join(parts) if len(parts) == len(numbers) else None


def _expect_version(record: FileRecord, name: str, version: int) -> None:
    """Raises MeasurementError where a file's field `name` is not `version`, the one that
    these field names are of."""
    if (got := record.whole(name)) != version:
        raise record.error(name, str(version), "none" if got is None else str(got))
