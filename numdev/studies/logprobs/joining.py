"""Two sides as pairs of sequences.

Sequences are paired by `uid`; those that have none, or one that the other side lacks, by
equal tokens; what is left by one being a part of the other, and last by their order,
where both sides have as many. That tokens differ is what the join finds, not an error:
it takes what both sides share, and counts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from operator import itemgetter
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from numdev.studies.logprobs.records import (
    NO_TOKEN,
    Integers,
    JoinCounts,
    Joined,
    Joining,
    RecordedSequence,
    SequencePair,
    Side,
    length_of,
)

Number = TypeVar("Number", bound=np.generic)
MOST_TRIES = 64  # matches of bytes that begin within a token
LEAST_SHARED = 0.5  # of the shorter sequence, for two to be paired by order alone


def join(a: Side, b: Side) -> Joined:
    """Returns the pairs of two sides, in the order of a's sequences, with what is on one
    side alone, counts and findings. Pure; raises nothing."""
    left = _Unpaired(dict(enumerate(a.sequences)), dict(enumerate(b.sequences)))
    pairs: dict[int, SequencePair] = {}
    # Some programs give all samples of one prompt the same uid.
    pairs |= left.pair_by("uid", lambda x: None if x.uid is None else (x.uid, _digest(x)))
    pairs |= left.pair_by("uid", lambda x: x.uid)
    pairs |= left.pair_by("token_ids", _digest)
    pairs |= left.pair_parts()
    if len(a.sequences) == len(b.sequences):
        pairs |= left.pair_by_order()
    pairs = {i: _with_prompts(pairs[i]) for i in sorted(pairs)}
    whole_a = _replaced(a, {i: pair.a for i, pair in pairs.items()})
    whole_b = _replaced(b, {left.partners[i]: pair.b for i, pair in pairs.items()})
    counts = replace(
        _counted(a, b, tuple(pairs.values()), left),
        prompts_of_b=_differing(a, whole_a),
        prompts_of_a=_differing(b, whole_b),
    )
    return Joined(
        a=whole_a,
        b=whole_b,
        pairs=tuple(pairs.values()),
        alone_in_a=tuple(left.a.values()),
        alone_in_b=tuple(left.b.values()),
        counts=counts,
        findings=tuple(_findings(a, b, counts)),
    )


class SoughtPart(NamedTuple):
    """A kind of part that sequences are looked up by: beginnings with `step` 1, ends with
    -1, of sequences with a prompt or without one on each side."""

    step: int
    prompt_of_a: bool
    prompt_of_b: bool


# A response alone is no beginning of a whole sequence, though it may look like one
PARTS = (
    SoughtPart(1, True, True),
    SoughtPart(1, False, False),
    SoughtPart(-1, True, True),
    SoughtPart(-1, True, False),
    SoughtPart(-1, False, True),
)


@dataclass
class _Unpaired:
    """The sequences of both sides that have no partner yet, by their number; `partners`
    has the number in b of each of a's that has one."""

    a: dict[int, RecordedSequence]
    b: dict[int, RecordedSequence]
    partners: dict[int, int] = field(default_factory=dict)
    # Of a, those that are the end of several of b, or one of several that are the same
    ambiguous: set[int] = field(default_factory=set)

    def pair_by(
        self, by: Joining, key: Callable[[RecordedSequence], Hashable]
    ) -> dict[int, SequencePair]:
        """Pairs sequences of one key, the first of a with the first of b; those whose key
        is None are left."""
        partners: defaultdict[Hashable, deque[int]] = defaultdict(deque)
        for j, sequence in self.b.items():
            partners[key(sequence)].append(j)
        partners.pop(None, None)
        pairs = {}
        for i, sequence in list(self.a.items()):
            if queue := partners.get(key(sequence)):
                pairs[i] = self._paired(i, queue.popleft(), by)
        return pairs

    def pair_parts(self) -> dict[int, SequencePair]:
        """Pairs sequences of which one is the beginning of the other, and was cut, or its
        end, and is a response without its prompt. Of a beginning any partner will do:
        what they share has one context. Of an end, the only one: where several could be,
        it stays without one and goes into `ambiguous`. Returns the pairs by number in
        a."""
        pairs = {}
        for part in PARTS if self.a and self.b else ():
            keys_of_a = _keys(self.a, part.step, part.prompt_of_a)
            keys_of_b = _keys(self.b, part.step, part.prompt_of_b)
            for key, i in keys_of_a:
                j = _partner(key, keys_of_b, self.b)
                if j is None:
                    continue
                shorter = min(key, _key(self.b[j], part.step), key=len)
                several = max(_count(keys_of_a, shorter), _count(keys_of_b, shorter)) > 1
                if part.step == -1 and several:
                    self.ambiguous.add(i)
                    continue
                _, shared = _shared(self.a[i], self.b[j])
                if length_of(shared) == min(len(self.a[i]), len(self.b[j])):
                    pairs[i] = self._paired(i, j, "token_ids")
        self.ambiguous &= self.a.keys()
        return pairs

    def pair_by_order(self) -> dict[int, SequencePair]:
        """Pairs the sequences of one number that share most of the shorter one."""
        pairs = {}
        for i in [i for i in self.a if i in self.b]:
            x, y = self.a[i], self.b[i]
            shared = length_of(_shared(x, y)[0])
            if shared >= max(LEAST_SHARED * min(len(x), len(y)), 1):
                pairs[i] = self._paired(i, i, "order")
        return pairs

    def _paired(self, i: int, j: int, by: Joining) -> SequencePair:
        """Returns a pair, whose sequences are unpaired no more."""
        self.partners[i] = j
        x, y = self.a.pop(i), self.b.pop(j)
        at_a, at_b = _shared(x, y)
        return SequencePair(a=x, b=y, at_a=at_a, at_b=at_b, joined_by=by)


def _digest(sequence: RecordedSequence) -> bytes:
    """Returns a hash, 16 bytes, of a sequence's token ids alone; two of the same hash are
    the same."""
    return blake2b(sequence.token_ids.tobytes(), digest_size=16).digest()


def _keys(
    sequences: Mapping[int, RecordedSequence], step: int, has_prompt: bool
) -> list[tuple[bytes, int]]:
    """Returns the keys, in their order, and numbers of the sequences with a prompt, or of
    those without."""
    numbers = [i for i, x in sequences.items() if x.has_prompt is has_prompt]
    return sorted((_key(sequences[i], step), i) for i in numbers)


def _key(sequence: RecordedSequence, step: int) -> bytes:
    """Returns tokens, with `step` -1 from the last to the first, as bytes that are in
    order as the tokens are."""
    return sequence.token_ids[::step].astype(">i8").tobytes()


def _partner(
    key: bytes, keys: Sequence[tuple[bytes, int]], free: Container[int]
) -> int | None:
    """Returns the number of the first free one of `keys`, which are sorted, that begins
    with `key`; else of the longest that `key` begins with; None without either."""
    place = bisect_left(keys, (key, -1))
    for longer, j in islice(keys, place, None):
        if not longer.startswith(key):
            break
        if j in free:
            return j
    place -= 1
    while place >= 0 and key:
        shorter, j = keys[place]
        if key.startswith(shorter):
            if j in free:
                return j
            place -= 1
            continue
        # What begins this key can share with the next lower one no more than both do.
        key = key[: _same_bytes(shorter, key)]
        place = min(bisect_right(keys, key, key=itemgetter(0)), place) - 1
    return None


def _count(keys: Sequence[tuple[bytes, int]], part: bytes) -> int:
    """Returns how many of `keys`, which are sorted, begin with `part`."""
    # No byte of a token below 2^31 is above all others at its place
    return bisect_left(keys, (part + b"\xff", -1)) - bisect_left(keys, (part, -1))


def _same_bytes(x: bytes, y: bytes) -> int:
    """Returns with how many equal bytes two begin."""
    m = min(len(x), len(y))
    differ = np.frombuffer(x[:m], np.uint8) != np.frombuffer(y[:m], np.uint8)
    return int(differ.argmax()) if differ.any() else m


def _shared(x: RecordedSequence, y: RecordedSequence) -> tuple[slice, slice]:
    """Returns where in each two sequences have the same tokens. Where one has no prompt,
    all of it at its place in the other, else nothing."""
    if x.has_prompt == y.has_prompt:
        return shared_run(x.token_ids, y.token_ids)
    response, whole = (y, x) if x.has_prompt else (x, y)
    start = _part_of(response.token_ids, whole.token_ids)
    m = 0 if start is None else len(response)
    inner, outer = slice(0, m), slice(start or 0, (start or 0) + m)
    return (outer, inner) if x.has_prompt else (inner, outer)


def shared_run(x: Integers, y: Integers) -> tuple[slice, slice]:
    """Returns where in each two runs of tokens are the same: where one is a part of the
    other, all of it, at the beginning if it is there; else from their beginning to the
    first difference, since after it the same token has another context."""
    m = min(len(x), len(y))
    differ = np.flatnonzero(x[:m] != y[:m])
    if not len(differ):
        return slice(0, m), slice(0, m)
    start = _part_of(x, y) if len(x) < len(y) else _part_of(y, x)
    if start is None:
        beginning = slice(0, int(differ[0]))
        return beginning, beginning
    inner, outer = slice(0, m), slice(start, start + m)
    return (inner, outer) if len(x) < len(y) else (outer, inner)


def _part_of(short: Integers, long: Integers) -> int | None:
    """Returns where the shorter run begins in the longer one, at its end if it is there,
    else at the first place; None where it is nowhere, or not among the first MOST_TRIES
    that look like it. `short`: at least one token."""
    n = len(short)
    if n > len(long):
        return None
    if np.array_equal(long[-n:], short):
        return len(long) - n
    part, whole, at = short.tobytes(), long.tobytes(), -1
    for _ in range(MOST_TRIES):
        at = whole.find(part, at + 1)
        if at % short.itemsize == 0:
            return at // short.itemsize
        if at < 0:
            break
    return None


def _with_prompts(pair: SequencePair) -> SequencePair:
    """Returns a pair in which a response without its prompt has that of the other side,
    and then all its tokens are shared; as it is else."""
    a, b = pair.a, pair.b
    if _lacks_prompt_of(a, b, pair.at_a, pair.at_b):
        a = _completed(a, b.token_ids[: pair.at_b.start])
        return replace(pair, a=a, at_a=slice(0, len(a)), at_b=slice(0, len(a)))
    if _lacks_prompt_of(b, a, pair.at_b, pair.at_a):
        b = _completed(b, a.token_ids[: pair.at_a.start])
        return replace(pair, b=b, at_a=slice(0, len(b)), at_b=slice(0, len(b)))
    return pair


def _lacks_prompt_of(
    x: RecordedSequence, y: RecordedSequence, at_x: slice, at_y: slice
) -> bool:
    """Whether x has no prompt, all of it is in y, and y has tokens before it."""
    is_part = not x.has_prompt and length_of(at_x) == len(x) and y.has_prompt
    return is_part and at_y.start > 0 and x.position_ids is None and x.turn is None


def _completed(x: RecordedSequence, prompt: Integers) -> RecordedSequence:
    """Returns a sequence with a prompt before it, whose tokens do not count and have no
    values."""
    p = len(prompt)
    whole = replace(
        x,
        token_ids=np.concatenate([prompt, x.token_ids]),
        logprobs=np.concatenate([np.full(p, np.nan), x.logprobs]),
        mask=np.concatenate([np.zeros(p, np.bool_), x.mask]),
        has_prompt=True,
    )
    return replace(
        whole,
        top_ids=_after(x.top_ids, p, NO_TOKEN),
        top_logprobs=_after(x.top_logprobs, p, np.nan),
        kept_offsets=_after(x.kept_offsets, p, 0),
        routed_experts=_after(x.routed_experts, p, -1),
        entropy=_after(x.entropy, p, np.nan),
    )


def _after(x: NDArray[Number] | None, p: int, fill: float) -> NDArray[Number] | None:
    """Returns an array after p rows of `fill`; None for None."""
    if x is None:
        return None
    return np.concatenate([np.full((p, *x.shape[1:]), fill, x.dtype), x])


def _replaced(side: Side, sequences: Mapping[int, RecordedSequence]) -> Side:
    """Returns a side with other sequences at some numbers."""
    whole = [sequences.get(i, x) for i, x in enumerate(side.sequences)]
    return replace(side, sequences=tuple(whole))


def _differing(before: Side, after: Side) -> int:
    """Returns how many sequences of a side were replaced."""
    pairs = zip(before.sequences, after.sequences, strict=True)
    return sum(x is not y for x, y in pairs)


def _counted(
    a: Side, b: Side, pairs: Sequence[SequencePair], left: _Unpaired
) -> JoinCounts:
    """Returns the counts of a join: pairs, sequences without a partner, and tokens."""
    by = Counter(pair.joined_by for pair in pairs)
    tokens = np.zeros(10, np.int64)
    for pair in pairs:
        tokens += _token_counts(pair)
    shared, in_a, in_b, counted, both, no_a, no_b, neither, inf_a, inf_b = tokens.tolist()
    counts = JoinCounts(
        pairs=len(pairs),
        by_uid=by["uid"],
        by_token_ids=by["token_ids"],
        by_order=by["order"],
        unequal=sum(not pair.is_equal for pair in pairs),
        cut=sum(pair.is_cut for pair in pairs),
        alone_in_a=len(left.a),
        alone_in_b=len(left.b),
        repeated_in_a=_repeated(a),
        repeated_in_b=_repeated(b),
    )
    return replace(
        counts,
        ambiguous=len(left.ambiguous),
        tokens_of_a=sum(len(pair.a) for pair in pairs),
        tokens_of_b=sum(len(pair.b) for pair in pairs),
        shared=shared,
        counted_in_a_alone=in_a,
        counted_in_b_alone=in_b,
        counted=counted,
        comparable=both,
        missing_in_a=no_a,
        missing_in_b=no_b,
        missing_in_both=neither,
        infinite_in_a=inf_a,
        infinite_in_b=inf_b,
    )


def _token_counts(pair: SequencePair) -> Integers:
    """Returns int64 [10] of a pair's shared tokens: all; that count on a alone, on b
    alone, on both; of the last, with both values, without a's, b's and either's alone;
    with minus infinity on a, and on b, of those with both."""
    (mask_a, mask_b), (x, y) = pair.masks, pair.logprobs
    counted, no_x, no_y = mask_a & mask_b, np.isnan(x), np.isnan(y)
    both = pair.comparable
    flags = (
        np.ones_like(counted),
        mask_a & ~mask_b,
        mask_b & ~mask_a,
        counted,
        both,
        counted & no_x & ~no_y,
        counted & no_y & ~no_x,
        counted & no_x & no_y,
        both & np.isneginf(x),
        both & np.isneginf(y),
    )
    return np.array([np.count_nonzero(flag) for flag in flags], np.int64)


def _repeated(side: Side) -> int:
    """Returns how many sequences have the tokens of an earlier one."""
    return len(side.sequences) - len({*map(_digest, side.sequences)})


def _recorded_twice(side: Side) -> int:
    """Returns how many sequences have the tokens and values of an earlier one."""
    records = {(_digest(x), x.logprobs.tobytes()) for x in side.sequences}
    return len(side.sequences) - len(records)


def _findings(a: Side, b: Side, n: JoinCounts) -> Iterator[str]:
    """Yields sentences on what does not match, the gravest first; nothing where all
    does."""
    if n.unequal > n.cut:
        yield (
            f"{n.unequal - n.cut} of {n.pairs} pairs have other tokens on {b.name} than "
            f"on {a.name}; what comes before the first difference is compared."
        )
    for name, other, alone in (
        (a.name, b.name, n.alone_in_a),
        (b.name, a.name, n.alone_in_b),
    ):
        if alone:
            yield f"{alone} sequences are on {name} alone, with no partner on {other}."
    for both in (a, b):
        if count := _recorded_twice(both):
            yield (
                f"{count} of {len(both.sequences)} sequences on {both.name} have the "
                "tokens and values of an earlier one: each counts."
            )
    if n.ambiguous:
        yield (
            f"{n.ambiguous} of these are the end of several sequences, or one of several "
            "that are the same: which belong together is not known."
        )
    for side, other, count in (
        (a.name, b.name, n.prompts_of_b),
        (b.name, a.name, n.prompts_of_a),
    ):
        if count:
            yield f"{count} responses on {side} have no prompt: that on {other} is taken."
    if n.cut:
        yield f"{n.cut} of {n.pairs} pairs are whole on one side and a part on the other."
    if n.by_order:
        yield f"{n.by_order} of {n.pairs} pairs were joined by their order alone."
    for where, missing in (
        (f"{a.name} alone", n.missing_in_a),
        (f"{b.name} alone", n.missing_in_b),
        ("both sides", n.missing_in_both),
    ):
        if missing:
            yield f"{missing} of {n.counted} tokens have no value on {where}."
    for side, count in (
        (a.name, n.counted_in_a_alone),
        (b.name, n.counted_in_b_alone),
    ):
        if count:
            yield f"{count} of {n.shared} shared tokens count on {side} alone."
