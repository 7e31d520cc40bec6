"""Responses of serving engines, as JSON: completions and chat of vLLM and of servers with
the same interface, and SGLang's own `meta_info`. The field names are theirs.

A response has one side. Its tokens count, and those of a prompt only where nothing else
has log-probabilities. A record may wrap the response, as batch files do, and may have the
request beside it, which says temperature and support."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from numdev.errors import MeasurementError
from numdev.studies.logprobs.plain_layout import (
    Sequences,
    padded,
    settings_of,
    versions_of,
)
from numdev.studies.logprobs.record_fields import FileRecord, kind_of
from numdev.studies.logprobs.records import (
    Integers,
    Numbers,
    RecordedSequence,
    RecordedSettings,
)

Values = list[Any]  # as JSON has them, not yet checked
Pairs = tuple[Values, Values]  # ids of alternatives, and their values
STAND_IN = -9999.0  # what vLLM writes for minus infinity and NaN, which JSON cannot hold
TOKEN = re.compile(r"token_id:(\d{1,10})")
ASK_FOR_IDS = "ask the server with return_token_ids=true (or return_tokens_as_token_ids)"


@dataclass
class ResponseTokens:
    """A growing run of tokens, with what a response has of each; None for a token without
    it. `is_response` says of each token whether it was generated."""

    ids: Values = field(default_factory=list)
    logprobs: Values = field(default_factory=list)
    top_ids: Values = field(default_factory=list)
    top_logprobs: Values = field(default_factory=list)
    is_response: list[bool] = field(default_factory=list)

    def add(
        self,
        ids: Values,
        logprobs: Values | None = None,
        tops: list[Pairs | None] | None = None,
        *,
        is_response: bool,
    ) -> None:
        """Adds tokens with their values and their alternatives, in place, each as long as
        `ids`; None: no token has one. Nothing is checked."""
        self.ids += ids
        self.is_response += [is_response] * len(ids)
        self.add_values(len(ids), logprobs, tops)

    def add_values(
        self, n: int, logprobs: Values | None, tops: list[Pairs | None] | None
    ) -> None:
        """Adds values and alternatives of n tokens, each n long, in place; None: no token
        has one. Tokens are not added."""
        self.logprobs += [None] * n if logprobs is None else logprobs
        pairs = [None] * n if tops is None else tops
        self.top_ids += [None if pair is None else pair[0] for pair in pairs]
        self.top_logprobs += [None if pair is None else pair[1] for pair in pairs]

    def drop_values(self) -> None:
        """Removes the values and alternatives of all tokens, in place, and leaves the
        tokens."""
        self.logprobs, self.top_ids, self.top_logprobs = [], [], []

    def sequence(
        self, record: FileRecord, uid: str | None, settings: RecordedSettings
    ) -> RecordedSequence:
        """Returns the tokens as a sequence with their alternatives, and -inf in place of
        STAND_IN. Tokens of a response count; where none of these has a log-probability,
        all tokens that have one count. Raises MeasurementError, with the record's place,
        for values that are no tokens, no numbers, or plus infinity."""
        ids = record.integers_of("token ids", self.ids, None)
        logprobs = record.numbers_of("log-probabilities", self.logprobs, len(ids))
        responses = np.array(self.is_response, np.bool_)
        has_values = bool((responses & ~np.isnan(logprobs)).any())
        top_ids: Integers | None = None
        top_logprobs: Numbers | None = None
        if any(row is not None for row in self.top_ids):
            top_ids, top_logprobs = padded(
                record, "top", self.top_ids, self.top_logprobs, len(ids)
            )
            top_logprobs = _with_infinities(top_logprobs)
        return RecordedSequence(
            token_ids=ids,
            logprobs=_with_infinities(logprobs),
            mask=responses if has_values else ~np.isnan(logprobs),
            uid=uid,
            settings=settings,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            place=record.place,
        )


def is_response(record: FileRecord) -> bool:
    """Whether a record is a response of completions or chat (it has `choices`), or has an
    object under `response`."""
    return record.has("choices") or isinstance(record.fields.get("response"), Mapping)


def response_sequences(record: FileRecord) -> Sequences:
    """Yields the choices, in order, of a response of completions, chat or generate, as
    (empty text, sequence). Each is named by the record's `custom_id` or `uid`, else by
    the response's `id` or `request_id`, else not; with several choices the choice's
    `index` follows, else its number from 0 on, `x/0`. Raises MeasurementError for a
    response without a list of choices, a choice without tokens, and a field of another
    type or length."""
    response, request = _unwrapped(record)
    settings = _settings(record, request)
    names = ("custom_id", "uid")
    uid = next((x for name in names if (x := record.text(name))), None)
    uid = uid or response.text("id") or response.text("request_id")
    choices = list(response.parts("choices"))
    for number, choice in enumerate(choices):
        index = choice.whole("index")
        place = number if index is None else index
        one = uid if len(choices) == 1 or uid is None else f"{uid}/{place}"
        tokens = ResponseTokens()
        has_prompt = _add_prompt(tokens, choice, response)
        _add_response(tokens, choice)
        if not tokens.ids:
            raise choice.error("logprobs", "log-probabilities of tokens", "none")
        sequence = tokens.sequence(choice, one, settings)
        versions = versions_of(record, "weights_version")
        yield "", replace(sequence, has_prompt=has_prompt, weights_versions=versions)


def _unwrapped(record: FileRecord) -> tuple[FileRecord, FileRecord | None]:
    """Returns the response in a record (the record itself, where it has no `response`),
    and the request beside it, or None. Of each it is the `body`, where it has one. Raises
    MeasurementError where one of them is no object."""
    request = record.part("request") if record.has("request") else None
    if request is not None and request.has("body"):
        request = request.part("body")
    response = record.part("response") if record.has("response") else record
    return (response.part("body") if response.has("body") else response), request


def _settings(record: FileRecord, request: FileRecord | None) -> RecordedSettings:
    """Returns the settings in a record by numdev's names. What the record does not say
    comes from its `sampling_params`, then from the request, then from the request's
    `sampling_params`. Raises MeasurementError for a setting of another type or range."""
    settings = RecordedSettings()
    for says in (request, record):
        if says is not None:
            if says.has("sampling_params"):
                settings = settings_of(says.part("sampling_params"), settings)
            settings = settings_of(says, settings)
    return settings


def _add_prompt(tokens: ResponseTokens, choice: FileRecord, response: FileRecord) -> bool:
    """Adds the prompt's tokens, and their log-probabilities where these were asked for,
    to `tokens`; a value is None where the token is not among its position's entries.
    Returns whether the prompt's tokens were recorded. Raises MeasurementError for values
    without tokens, and for another number of values than of tokens."""
    of_ids = choice if choice.has("prompt_token_ids") else response
    ids = _token_ids(of_ids, "prompt_token_ids")
    of_values = choice if choice.has("prompt_logprobs") else response
    values = of_values.get("prompt_logprobs")
    if ids is None:
        if values is not None:
            raise of_values.error("prompt_token_ids", "the prompt's tokens", "none")
        return False
    if values is None:
        tokens.add(ids, is_response=False)
        return True
    if not isinstance(values, list) or len(values) != len(ids):
        got = str(len(values)) if isinstance(values, list) else "no list"
        raise of_values.error("prompt_logprobs", f"{len(ids)} entries", got)
    of_ids.integers_of("prompt_token_ids", ids, None)
    logprobs: Values = []
    tops: list[Pairs | None] = []
    for at, (token, entry) in enumerate(zip(ids, values, strict=True)):
        pairs = _prompt_entry(of_values, f"prompt_logprobs[{at}]", entry)
        logprobs.append(
            None if pairs is None else dict(zip(*pairs, strict=True)).get(token)
        )
        tops.append(pairs)
    tokens.add(ids, logprobs, tops, is_response=False)
    return True


def _prompt_entry(record: FileRecord, name: str, entry: object) -> Pairs | None:
    """Returns ids and values of one position of `prompt_logprobs`; None for None. Raises
    MeasurementError for anything but an object with token ids as keys. Values are not
    checked."""
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise record.error(name, "an object or null", kind_of(entry))
    ids: Values = []
    values: Values = []
    for key, value in entry.items():
        if not str(key).isdecimal() or len(str(key)) > 10:
            raise record.error(name, "token ids as keys", repr(str(key)[:40]))
        ids.append(int(key))
        values.append(value.get("logprob") if isinstance(value, Mapping) else value)
    return ids, values


def _add_response(tokens: ResponseTokens, choice: FileRecord) -> None:
    """Adds a choice's tokens with their log-probabilities to `tokens`. Where the prompt
    came back with them (`echo`), the values are those of the prompt too. A choice without
    values adds its tokens alone. Raises MeasurementError for another number of values
    than of tokens, and for tokens without ids."""
    ids = _token_ids(choice, "token_ids")
    if not choice.has("logprobs"):
        tokens.add(ids or [], is_response=True)
        return
    texts, values, tops = _values(choice.part("logprobs"))
    if ids is None:
        ids = [_token_id(choice, text) for text in texts]
        if tokens.ids and values and values[0] is None:
            ids = ids[len(tokens.ids) :]
    if len(tokens.ids) + len(ids) == len(values):
        tokens.drop_values()
    elif len(ids) != len(values):
        raise choice.error("logprobs", f"{len(ids)}, one a token", str(len(values)))
    tokens.ids += ids
    tokens.is_response += [True] * len(ids)
    tokens.add_values(len(ids), values, tops)


def _token_ids(record: FileRecord, name: str) -> Values | None:
    """Returns a field's list of tokens, its elements not yet checked; None where it is
    missing or null. An array becomes a list. Raises MeasurementError for anything
    else."""
    value = record.get(name)
    if value is None or isinstance(value, list):
        return value
    ids: Values = record.integers_of(name, value, None).tolist()
    return ids


def _values(
    logprobs: FileRecord,
) -> tuple[Values, Values, list[Pairs | None] | None]:
    """Returns texts, values and alternatives of the tokens in a choice's `logprobs`, of
    chat or of completions, not yet checked. A token's alternatives are None where it has
    none, or they have no ids; None in place of the list where completions have no
    alternatives at all. Raises MeasurementError for lists that are missing or of
    different lengths, and for alternatives of another type."""
    if logprobs.has("content"):
        entries = list(logprobs.parts("content"))
        texts = [entry.get("token") for entry in entries]
        values = [entry.get("logprob") for entry in entries]
        return texts, values, list(map(_chat_alternatives, entries))
    texts, values = _list(logprobs, "tokens"), _list(logprobs, "token_logprobs")
    if len(texts) != len(values):
        raise logprobs.error("token_logprobs", f"{len(texts)} values", str(len(values)))
    if not logprobs.has("top_logprobs"):
        return texts, values, None
    alternatives = _list(logprobs, "top_logprobs")
    if len(alternatives) != len(values):
        got = str(len(alternatives))
        raise logprobs.error("top_logprobs", f"{len(values)} entries", got)
    for at, entry in enumerate(alternatives):
        if entry is not None and not isinstance(entry, Mapping):
            wanted = "an object or null"
            raise logprobs.error(f"top_logprobs[{at}]", wanted, kind_of(entry))
    return texts, values, [_alternatives(entry or {}) for entry in alternatives]


def _chat_alternatives(entry: FileRecord) -> Pairs | None:
    """Returns ids and values of chat's alternatives of one token; None where there are
    none, and where some have no ids (`token_id:5`). Raises MeasurementError where they
    are no list of objects, and for a token that is no text."""
    values: dict[str, object] = {}
    for one in entry.parts("top_logprobs") if entry.has("top_logprobs") else ():
        token = one.get("token")
        if not isinstance(token, str | None):
            raise one.error("token", "a text or null", kind_of(token))
        values[token or ""] = one.get("logprob")
    return _alternatives(values)


def _alternatives(entry: Mapping[str, object]) -> Pairs | None:
    """Returns ids and values of alternatives of one token, an object with tokens as keys.
    None for an empty one, and where some keys are no ids (`token_id:5`)."""
    if not entry:
        return None
    matches = [TOKEN.fullmatch(str(key)) for key in entry]
    if not all(matches):
        return None
    return [int(match[1]) for match in matches if match], list(entry.values())


def _token_id(choice: FileRecord, text: object) -> int:
    """Returns the number in `token_id:5`. Raises MeasurementError for anything else: from
    a token's text its id cannot be told."""
    match = TOKEN.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        what = f"{choice.place}: token_ids: expected the tokens' ids, got their texts"
        raise MeasurementError(what, hint=ASK_FOR_IDS)
    return int(match[1])


def _list(record: FileRecord, name: str) -> Values:
    """Returns a field that must be a list. Raises MeasurementError for anything else, and
    where the field is missing."""
    value = record.get(name)
    if not isinstance(value, list):
        raise record.error(name, "a list", kind_of(value))
    return value


def is_sglang(record: FileRecord) -> bool:
    """Whether a record is a response of SGLang's `/generate` (it has `meta_info`), or
    wraps under `response` an object with that field."""
    inner = record.fields.get("response")
    return record.has("meta_info") or (
        isinstance(inner, Mapping) and "meta_info" in inner
    )


def sglang_sequences(record: FileRecord) -> Sequences:
    """Yields the one sequence of SGLang's response, as (empty text, sequence), named by
    the record's `uid`, else by the `id` in `meta_info`. Its tokens are triples of value,
    id and text; the first value of a prompt is null. The prompt is known whole
    (`has_prompt`) where as many of its tokens came back as it has, or where the request
    beside the response, or the record, has `input_ids`. Raises MeasurementError where
    there is no token, and for fields that do not fit together."""
    response, request = _unwrapped(record)
    meta = response.part("meta_info")
    ids, values = _triples(meta, "input_token_logprobs")
    asked = next((r for r in (request, record) if r and r.has("input_ids")), None)
    prompt_length = meta.whole("prompt_tokens")
    tokens = ResponseTokens()
    prompt = _list(asked, "input_ids") if asked else ids
    has_prompt = bool(prompt) and (asked is not None or len(ids) == prompt_length)
    before = len(prompt) - len(ids)  # those from logprob_start_len on came back
    if before < 0:
        got = f"{len(ids)} in input_token_logprobs"
        raise meta.error("input_ids", f"at most {len(prompt)} tokens", got)
    tops = _top_triples(meta, "input_top_logprobs", len(ids))
    tokens.add(prompt[:before], is_response=False)
    tokens.add(ids, values, tops, is_response=False)
    ids, values = _triples(meta, "output_token_logprobs")
    tops = _top_triples(meta, "output_top_logprobs", len(ids))
    tokens.add(ids, values, tops, is_response=True)
    if not tokens.ids:
        wanted = "values of tokens (return_logprob=true)"
        raise meta.error("output_token_logprobs", wanted, "none")
    versions = versions_of(meta, "weight_version")
    settings = _settings(record, request)
    if settings.weights_version is None and len(versions) == 1:
        settings = replace(settings, weights_version=versions[0])
    uid = record.text("uid") or meta.text("id")
    sequence = tokens.sequence(meta, uid, settings)
    yield "", replace(sequence, has_prompt=has_prompt, weights_versions=versions)


def _triples(meta: FileRecord, name: str) -> Pairs:
    """Returns ids and values of a list of [value, id, text]; two empty lists where the
    field is missing. Raises MeasurementError for anything else."""
    return _of_triples(meta, name, _list(meta, name)) if meta.has(name) else ([], [])


def _of_triples(meta: FileRecord, name: str, entries: Values) -> Pairs:
    """Returns ids and values of entries [value, id, text] or [value, id]. Raises
    MeasurementError for other entries; ids and values themselves are not checked."""
    is_sound = set(map(type, entries)) <= {list} and set(map(len, entries)) <= {2, 3}
    if not is_sound:
        at, wrong = next(
            (i, entry)
            for i, entry in enumerate(entries)
            if not isinstance(entry, list) or not 2 <= len(entry) <= 3
        )
        raise meta.error(f"{name}[{at}]", "[value, id, text]", kind_of(wrong))
    return [entry[1] for entry in entries], [entry[0] for entry in entries]


def _top_triples(meta: FileRecord, name: str, n: int) -> list[Pairs | None] | None:
    """Returns for each of n tokens the ids and values of its alternatives, None for a
    token without one; None where the response has no such field. Raises MeasurementError
    for another number of lists, and for entries that are no triples."""
    if not meta.has(name):
        return None
    rows = _list(meta, name)
    if len(rows) != n:
        raise meta.error(name, f"{n} entries, one a token", str(len(rows)))
    if wrong := set(map(type, rows)) - {list, type(None)}:
        at = next(i for i, row in enumerate(rows) if type(row) in wrong)
        raise meta.error(f"{name}[{at}]", "a list or null", kind_of(rows[at]))
    ids, values = _of_triples(
        meta, name, list(chain.from_iterable(row or () for row in rows))
    )
    pairs: list[Pairs | None] = []
    start = 0
    for row in rows:
        end = start + len(row or ())
        pairs.append((ids[start:end], values[start:end]) if row else None)
        start = end
    return pairs


def _with_infinities(x: Numbers) -> Numbers:
    """Returns values, with minus infinity in place of vLLM's stand-in for it."""
    return np.where(x == STAND_IN, -np.inf, x)
