"""Two sides as pairs of sequences.

Sequences are paired by `uid`; those that have none, or one that the other side lacks, by
equal tokens; what is left by one being a part of the other, and last by their order,
where both sides have as many. That tokens differ is what the join finds, not an error:
it takes what both sides share, and counts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import (
    Callable,
    Container,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from operator import itemgetter
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from numdev.studies.logprobs.lazy_sequences import Mapped
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
    side alone, counts and findings. One pair is in memory at a time, where the sides'
    sequences are: of each sequence its length and digests stay, and for as long as parts
    are looked for, the tokens of those that have no partner yet. The sides are not
    changed."""
    keys_of_a, keys_of_b = (list(map(SequenceKey.of, x.sequences)) for x in (a, b))
    left = _Unpaired(
        a.sequences, b.sequences, dict(enumerate(keys_of_a)), dict(enumerate(keys_of_b))
    )
    places: dict[int, PairPlace] = {}
    # Some programs give all samples of one prompt the same uid.
    places |= left.pair_by("uid", lambda x: None if x.uid is None else (x.uid, x.tokens))
    places |= left.pair_by("uid", lambda x: x.uid)
    places |= left.pair_by("token_ids", lambda x: x.tokens)
    places |= left.pair_parts()
    if len(keys_of_a) == len(keys_of_b):
        places |= left.pair_by_order()
    in_order = [places[i] for i in sorted(places)]
    pairs = Mapped(partial(_pair, a.sequences, b.sequences), in_order)
    whole_a = {at.numbers[0]: k for k, at in enumerate(in_order) if at.prompt_of == "b"}
    whole_b = {at.numbers[1]: k for k, at in enumerate(in_order) if at.prompt_of == "a"}
    counts = replace(
        _counted(pairs),
        alone_in_a=len(left.a),
        alone_in_b=len(left.b),
        ambiguous=len(left.ambiguous),
        prompts_of_b=len(whole_a),
        prompts_of_a=len(whole_b),
        repeated_in_a=_repeated(x.tokens for x in keys_of_a),
        repeated_in_b=_repeated(x.tokens for x in keys_of_b),
    )
    twice = _repeated(x[:2] for x in keys_of_a), _repeated(x[:2] for x in keys_of_b)
    return Joined(
        a=_replaced(a, whole_a, lambda k: pairs[k].a),
        b=_replaced(b, whole_b, lambda k: pairs[k].b),
        pairs=pairs,
        alone_in_a=Mapped(a.sequences.__getitem__, tuple(left.a)),
        alone_in_b=Mapped(b.sequences.__getitem__, tuple(left.b)),
        counts=counts,
        findings=tuple(_findings(a, b, counts, twice)),
    )


class SequenceKey(NamedTuple):
    """What a sequence is paired by."""

    tokens: bytes  # a digest of its token ids; two of the same digest are the same
    values: bytes  # and of its log-probabilities
    uid: str | None
    length: int
    has_prompt: bool
    takes_prompt: bool  # it has none, and nothing else says where its tokens stand

    @classmethod
    def of(cls, x: RecordedSequence) -> SequenceKey:
        """Returns the key of a sequence."""
        tokens, values = (
            blake2b(part.tobytes(), digest_size=16).digest()
            for part in (x.token_ids, x.logprobs)
        )
        takes = not x.has_prompt and x.position_ids is None and x.turn is None
        return cls(tokens, values, x.uid, len(x), x.has_prompt, takes)


class PairPlace(NamedTuple):
    """A pair by the numbers of its sequences, where in each they are the same, and which
    of them has the prompt that the other takes."""

    numbers: tuple[int, int]
    at_a: slice
    at_b: slice
    joined_by: Joining
    prompt_of: Literal["a", "b"] | None


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
    """The sequences of both sides, and by their number the keys of those that have no
    partner yet."""

    of_a: Sequence[RecordedSequence]
    of_b: Sequence[RecordedSequence]
    a: dict[int, SequenceKey]
    b: dict[int, SequenceKey]
    # Of a, those that are the end of several of b, or one of several that are the same
    ambiguous: set[int] = field(default_factory=set)

    def pair_by(
        self, by: Joining, key: Callable[[SequenceKey], Hashable]
    ) -> dict[int, PairPlace]:
        """Pairs sequences of one key, the first of a with the first of b; those whose key
        is None are left. Returns the pairs by number in a."""
        partners: defaultdict[Hashable, deque[int]] = defaultdict(deque)
        for j, sequence in self.b.items():
            partners[key(sequence)].append(j)
        partners.pop(None, None)
        places = {}
        for i, sequence in list(self.a.items()):
            if queue := partners.get(key(sequence)):
                j = queue.popleft()
                places[i] = self._paired(i, j, by, self._shared(i, j))
        return places

    def pair_parts(self) -> dict[int, PairPlace]:
        """Pairs sequences of which one is the beginning of the other, and was cut, or its
        end, as a response without its prompt is. Of a beginning any partner will do: what
        they share has one context. Of an end, the only one: where several could be, it
        stays without one and goes into `ambiguous`. Returns the pairs by number in a."""
        places = {}
        for part in PARTS if self.a and self.b else ():
            keys_of_a = _keys(self.of_a, self.a, part.step, part.prompt_of_a)
            keys_of_b = _keys(self.of_b, self.b, part.step, part.prompt_of_b)
            for key, i in keys_of_a:
                j = _partner(key, keys_of_b, self.b)
                if j is None:
                    continue
                shorter = min(key, _key(self.of_b[j], part.step), key=len)
                several = max(_count(keys_of_a, shorter), _count(keys_of_b, shorter)) > 1
                if part.step == -1 and several:
                    self.ambiguous.add(i)
                    continue
                shared = self._shared(i, j)
                if length_of(shared[1]) == min(self.a[i].length, self.b[j].length):
                    places[i] = self._paired(i, j, "token_ids", shared)
        self.ambiguous &= self.a.keys()
        return places

    def pair_by_order(self) -> dict[int, PairPlace]:
        """Pairs the sequences of one number that share LEAST_SHARED or more of the
        shorter one, at least one token. Returns the pairs by number in a."""
        places = {}
        for i in [i for i in self.a if i in self.b]:
            shared = self._shared(i, i)
            shorter = min(self.a[i].length, self.b[i].length)
            if length_of(shared[0]) >= max(LEAST_SHARED * shorter, 1):
                places[i] = self._paired(i, i, "order", shared)
        return places

    def _shared(self, i: int, j: int) -> tuple[slice, slice]:
        """Returns where in each two sequences have the same tokens; of those of one
        digest everywhere, without reading them."""
        if self.a[i].tokens == self.b[j].tokens:
            whole = slice(0, self.a[i].length)
            return whole, whole
        return _shared(self.of_a[i], self.of_b[j])

    def _paired(
        self, i: int, j: int, by: Joining, shared: tuple[slice, slice]
    ) -> PairPlace:
        """Returns a pair, whose sequences are unpaired no more. `shared`: where in each
        they have the same tokens."""
        x, y = self.a.pop(i), self.b.pop(j)
        at_a, at_b = shared
        prompt_of: Literal["a", "b"] | None = None
        if _lacks_prompt_of(x, y, at_a, at_b):
            prompt_of = "b"
        elif _lacks_prompt_of(y, x, at_b, at_a):
            prompt_of = "a"
        return PairPlace((i, j), at_a, at_b, by, prompt_of)


def _pair(
    of_a: Sequence[RecordedSequence], of_b: Sequence[RecordedSequence], place: PairPlace
) -> SequencePair:
    """Returns the pair at a place. Where the place says that one side has the other's
    prompt, the response that lacks it gets it, and then all its tokens are shared."""
    a, b = of_a[place.numbers[0]], of_b[place.numbers[1]]
    at_a, at_b = place.at_a, place.at_b
    if place.prompt_of == "b":
        a = _completed(a, b.token_ids[: at_b.start])
        at_a = at_b = slice(0, len(a))
    elif place.prompt_of == "a":
        b = _completed(b, a.token_ids[: at_a.start])
        at_a = at_b = slice(0, len(b))
    return SequencePair(a, b, at_a, at_b, place.joined_by, place.numbers)


def _keys(
    sequences: Sequence[RecordedSequence],
    unpaired: Mapping[int, SequenceKey],
    step: int,
    has_prompt: bool,
) -> list[tuple[bytes, int]]:
    """Returns (tokens as bytes, number), sorted, of the unpaired sequences with a prompt,
    or of those without. With `step` -1 tokens are from the last to the first."""
    numbers = [i for i, x in unpaired.items() if x.has_prompt is has_prompt]
    return sorted((_key(sequences[i], step), i) for i in numbers)


def _key(sequence: RecordedSequence, step: int) -> bytes:
    """Returns tokens, with `step` -1 from the last to the first, as bytes that are in
    order as the tokens are: four of each, since none is 2^31 or more."""
    return sequence.token_ids[::step].astype(">i4").tobytes()


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
    """Returns where in each two sequences have the same tokens. Where one of them alone
    has no prompt: all of it at its place in the other, else nothing."""
    if x.has_prompt == y.has_prompt:
        return shared_run(x.token_ids, y.token_ids)
    response, whole = (y, x) if x.has_prompt else (x, y)
    start = _part_of(response.token_ids, whole.token_ids)
    m = 0 if start is None else len(response)
    inner, outer = slice(0, m), slice(start or 0, (start or 0) + m)
    return (outer, inner) if x.has_prompt else (inner, outer)


def shared_run(x: Integers, y: Integers) -> tuple[slice, slice]:
    """Returns where in each two runs of tokens are the same. Where the shorter is found
    in the longer it is all of the shorter: at the beginning if it is there, else at the
    end, else at the first place, though only MOST_TRIES that look like it are tried. Else
    it is from their beginning to the first difference, since after it the same token has
    another context."""
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


def _lacks_prompt_of(x: SequenceKey, y: SequenceKey, at_x: slice, at_y: slice) -> bool:
    """Whether x takes a prompt, all of it is in y, and y has a prompt and tokens before
    it."""
    is_part = length_of(at_x) == x.length and y.has_prompt and at_y.start > 0
    return x.takes_prompt and is_part


def _completed(x: RecordedSequence, prompt: Integers) -> RecordedSequence:
    """Returns a sequence with a prompt before it, whose tokens do not count and have no
    values. `x`: without positions, turns and lengths of a pack."""
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


def _replaced(
    side: Side, whole: Mapping[int, int], sequence: Callable[[int], RecordedSequence]
) -> Side:
    """Returns a side with other sequences at the numbers that are the keys of `whole`:
    `sequence` gives each by the pair's number that is its value. The side itself where
    `whole` is empty."""
    if not whole:
        return side

    def at(i: int) -> RecordedSequence:
        """Returns sequence i."""
        return sequence(whole[i]) if i in whole else side.sequences[i]

    return replace(side, sequences=Mapped(at, range(len(side.sequences))))


def _counted(pairs: Sequence[SequencePair]) -> JoinCounts:
    """Returns the counts of a join that are of its pairs and of their tokens."""
    by = Counter[str]()
    tokens = np.zeros(14, np.int64)
    for pair in pairs:
        by[pair.joined_by] += 1
        whole = (not pair.is_equal, pair.is_cut, len(pair.a), len(pair.b))
        tokens += (*whole, *_token_counts(pair))
    unequal, cut, of_a, of_b, shared, in_a, in_b, counted = tokens[:8].tolist()
    both, no_a, no_b, neither, infinite_a, infinite_b = tokens[8:].tolist()
    return JoinCounts(
        pairs=len(pairs),
        by_uid=by["uid"],
        by_token_ids=by["token_ids"],
        by_order=by["order"],
        unequal=unequal,
        cut=cut,
        tokens_of_a=of_a,
        tokens_of_b=of_b,
        shared=shared,
        counted_in_a_alone=in_a,
        counted_in_b_alone=in_b,
        counted=counted,
        comparable=both,
        missing_in_a=no_a,
        missing_in_b=no_b,
        missing_in_both=neither,
        infinite_in_a=infinite_a,
        infinite_in_b=infinite_b,
    )


def _token_counts(pair: SequencePair) -> tuple[int, ...]:
    """Returns ten counts of a pair's shared tokens: all; that count on a alone, on b
    alone, on both. Of the last: with both values, without a's alone, without b's alone,
    without either; and of those with both values, with minus infinity on a, and on b."""
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
    return tuple(int(np.count_nonzero(flag)) for flag in flags)


def _repeated(keys: Iterable[Hashable]) -> int:
    """Returns how many keys are equal to an earlier one."""
    return sum(times - 1 for times in Counter(keys).values())


def _findings(a: Side, b: Side, n: JoinCounts, twice: tuple[int, int]) -> Iterator[str]:
    """Yields sentences on what does not match, the gravest first; nothing where all does.
    `twice`: how many sequences of each side have the tokens and values of an earlier
    one."""
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
    for side, count in zip((a, b), twice, strict=True):
        if count:
            yield (
                f"{count} of {len(side.sequences)} sequences on {side.name} have the "
                "tokens and values of an earlier one: each counts."
            )
    if n.ambiguous:
        yield (
            f"{n.ambiguous} of these are the end of several sequences, or one of several "
            "that are the same: which belong together is not known."
        )
    for name, other, count in (
        (a.name, b.name, n.prompts_of_b),
        (b.name, a.name, n.prompts_of_a),
    ):
        if count:
            yield f"{count} responses on {name} have no prompt: that on {other} is taken."
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
    for name, count in (
        (a.name, n.counted_in_a_alone),
        (b.name, n.counted_in_b_alone),
    ):
        if count:
            yield f"{count} of {n.shared} shared tokens count on {name} alone."
