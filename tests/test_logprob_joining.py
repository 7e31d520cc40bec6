"""Two sides are joined by uid, else by tokens; what does not match is counted and told,
and nothing is an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numdev.studies.logprobs.joining import join, shared_run
from numdev.studies.logprobs.records import (
    Joined,
    RecordedSequence,
    Side,
    length_of,
)


def sequence(
    ids: Sequence[int], uid: str | None = None, first: float = 0.0
) -> RecordedSequence:
    """A sequence whose value i is first - i."""
    n = len(ids)
    return RecordedSequence(
        token_ids=np.array(ids, np.int64),
        logprobs=first - np.arange(n),
        mask=np.ones(n, np.bool_),
        uid=uid,
    )


def side(name: str, *sequences: RecordedSequence) -> Side:
    """A side of these sequences."""
    return Side(name, Path(name), "numdev", sequences)


def joined(a: Sequence[RecordedSequence], b: Sequence[RecordedSequence]) -> Joined:
    """Two sides joined."""
    return join(side("a", *a), side("b", *b))


def test_uids_pair_in_any_order() -> None:
    """The pairs are in a's order, and the same tokens do not matter where uids say who
    belongs together."""
    a = [sequence([1, 2], "x"), sequence([1, 2], "y", -5)]
    result = joined(a, [a[1], a[0]])
    assert [(pair.a.uid, pair.b.uid) for pair in result.pairs] == [("x", "x"), ("y", "y")]
    assert (result.counts.by_uid, result.counts.repeated_in_a) == (2, 1)
    assert result.findings == ()


def test_records_that_are_there_twice_are_told() -> None:
    """By tokens and values: two samples may well have the same tokens."""
    a = [sequence([1, 2], "x"), sequence([1, 2], "y"), sequence([1, 2], "z", -5)]
    b = [sequence([1, 2], uid, i) for i, uid in enumerate("xyz")]
    (words,) = joined(a, b).findings
    assert words.startswith("1 of 3 sequences on a have the tokens and values")


def test_one_uid_for_all_samples_of_a_prompt() -> None:
    """Of several with one uid those of the same tokens belong together, in any order; what
    is left of them pairs in its order."""
    a = [sequence([1, n, n + 1], "p") for n in range(3)]
    b = [sequence([1, 2, 3], "p"), sequence([1, 0, 9], "p"), sequence([1, 1, 2], "p")]
    result = joined(a, b)
    assert [pair.b.token_ids.tolist() for pair in result.pairs] == [
        [1, 0, 9],
        [1, 1, 2],
        [1, 2, 3],
    ]
    assert (result.counts.by_uid, result.counts.unequal, result.counts.cut) == (3, 1, 0)


def test_without_uids_equal_tokens_pair_the_first_with_the_first() -> None:
    """Two samples of one prompt may be the same tokens: they pair in their order. A uid
    that the other side lacks is no obstacle."""
    a = [sequence([1, 2], "x"), sequence([3]), sequence([1, 2], first=-7)]
    b = [sequence([1, 2]), sequence([1, 2], first=-9), sequence([3], "z")]
    result = joined(a, b)
    assert [pair.b.logprobs[0] for pair in result.pairs] == [0, 0, -9]
    assert result.counts.by_token_ids == 3


@pytest.mark.parametrize(
    ("a", "b", "at_a", "at_b"),
    [
        ([1, 2, 3, 4], [1, 2, 3], [0, 1, 2], [0, 1, 2]),  # cut
        ([1, 2, 3, 4], [3, 4], [2, 3], [0, 1]),  # a response alone
        ([2, 3], [1, 2, 3, 4], [0, 1], [1, 2]),  # a part
        (
            [1, 2, 9, 4],
            [1, 2, 3, 4],
            [0, 1],
            [0, 1],
        ),  # other tokens: context differs after
        ([9, 2, 3], [1, 2, 3], [], []),  # and from the beginning
        ([7, 7, 7], [7, 7, 7, 7, 8], [0, 1, 2], [0, 1, 2]),
        ([7, 7], [7, 7, 7, 8, 7, 7], [0, 1], [0, 1]),  # at its beginning first
        ([5, 7], [7, 5, 7, 8, 5, 7], [0, 1], [4, 5]),  # then at its end
        ([256], [1, 256], [0], [1]),
        ([1, 0], [256, 1, 1, 0, 4], [0, 1], [2, 3]),  # no match of bytes within tokens
    ],
)
def test_what_two_runs_share(
    a: list[int], b: list[int], at_a: list[int], at_b: list[int]
) -> None:
    """One run without gaps: the whole shorter one where it is a part, else the common
    beginning."""
    for x, y, at_x, at_y in ((a, b, at_a, at_b), (b, a, at_b, at_a)):
        shared = shared_run(np.array(x, np.int64), np.array(y, np.int64))
        assert [[*range(run.start, run.stop)] for run in shared] == [at_x, at_y]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
)
def test_shared_tokens_are_the_same_and_without_gaps(a: list[int], b: list[int]) -> None:
    """The law of a shared run, and a part is always shared whole."""
    x, y = np.array(a, np.int64), np.array(b, np.int64)
    at_x, at_y = shared_run(x, y)
    assert np.array_equal(x[at_x], y[at_y])
    assert {at_x.step, at_y.step} == {None}
    short, long = sorted((a, b), key=len)
    starts = range(len(long) - len(short) + 1)
    if any(long[i : i + len(short)] == short for i in starts):
        assert length_of(at_x) == len(short)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=7),
            st.integers(0, 6),
            st.booleans(),
        ),
        min_size=1,
        max_size=9,
    ),
    st.randoms(use_true_random=False),
)
def test_parts_find_partners_of_which_they_are_parts(
    drawn: list[tuple[list[int], int, bool]], random: object
) -> None:
    """Sequences cut at one end and shuffled: every pair is a part of its partner or the
    same, nobody is paired twice, and where one side is whole nobody who has a partner's
    tokens is left on both sides."""
    a = [sequence(ids) for ids, _, _ in drawn]
    b = [
        sequence((ids[:-cut] if first else ids[cut:]) if 0 < cut < len(ids) else ids)
        for ids, cut, first in drawn
    ]
    random.shuffle(b)  # type: ignore[attr-defined]
    result = join(side("a", *a), replace(side("b", *b), sequences=(*b, sequence([9]))))
    for pair in result.pairs:
        assert pair.is_equal or pair.is_cut
    assert len({id(pair.b) for pair in result.pairs}) == len(result.pairs)
    assert len(result.pairs) + len(result.alone_in_a) == len(a)
    left = [*result.alone_in_a, *result.alone_in_b]
    for x in result.alone_in_a:
        for y in result.alone_in_b:
            short, long = sorted((x.token_ids.tolist(), y.token_ids.tolist()), key=len)
            n = len(short)
            assert long[:n] != short
            if long[-n:] == short:  # not the only ones of that end
                ends = [z for z in (*a, *b, *left) if z.token_ids.tolist()[-n:] == short]
                assert len(ends) > 2


def test_a_response_takes_its_partners_prompt() -> None:
    """A server's response alone is compared and asked of a model with the prompt that the
    trainer has; its tokens there do not count. By uid or by its tokens."""
    whole = sequence([5, 6, 7, 8, 9], "x")
    response = replace(
        sequence([7, 8], first=-3),
        has_prompt=False,
        top_ids=np.array([[7], [8]]),
        top_logprobs=np.array([[-3.0], [-4.0]]),
        kept_ids=np.array([7, 8]),
        kept_offsets=np.array([0, 1, 2]),
    )
    end = replace(sequence([8, 9], first=-3), has_prompt=False)
    for one, expected in (
        (replace(response, uid="x"), [5, 6, 7, 8]),
        (end, [5, 6, 7, 8, 9]),
    ):
        p = len(expected) - 2
        for swapped in (False, True):
            result = joined([one], [whole]) if swapped else joined([whole], [one])
            (pair,) = result.pairs
            side = result.a if swapped else result.b
            (completed,) = side.sequences
            assert pair.numbers == (0, 0)
            assert len(completed) == len(pair.a if swapped else pair.b)
            assert completed.token_ids.tolist() == expected
            assert np.array_equal(
                completed.logprobs, [*[np.nan] * p, -3, -4], equal_nan=True
            )
            assert completed.mask.tolist() == [False] * p + [True, True]
            assert completed.has_prompt
            assert pair.at_a == pair.at_b == slice(0, len(expected))
            assert result.counts.comparable == 2
            names = ("a", "b") if swapped else ("b", "a")
            words = "1 responses on {} have no prompt: that on {} is taken."
            assert words.format(*names) in result.findings
    (pair,) = joined([whole], [replace(response, uid="x")]).pairs
    assert pair.b.top_ids is not None
    assert pair.b.top_ids.tolist() == [[-1], [-1], [7], [8]]
    assert pair.b.top_ids.dtype == np.int64
    assert pair.b.kept_offsets is not None
    assert pair.b.kept_offsets.tolist() == [0, 0, 0, 1, 2]


@pytest.mark.parametrize("uid", [None, "x"])
def test_a_response_is_looked_for_at_the_end(uid: str | None) -> None:
    """A text that repeats itself begins as its response does: the response is the end, and
    never the beginning; one that differs shares nothing."""
    whole = sequence([1, 2, 1, 2, 1, 2], uid)
    response = replace(sequence([1, 2, 1, 2], uid), has_prompt=False)
    (pair,) = joined([response], [whole]).pairs
    assert pair.a.token_ids.tolist() == [1, 2, 1, 2, 1, 2]
    assert pair.a.mask.tolist() == [False, False, True, True, True, True]
    other = replace(sequence([1, 2, 9], uid), has_prompt=False)
    result = joined([other], [whole])
    assert result.counts.shared == 0
    assert [pair.shared for pair in result.pairs] == ([0] if uid else [])


def test_a_response_that_fits_several_prompts_is_not_paired() -> None:
    """The same short answer to two questions: which prompt is its own cannot be told, and
    a wrong one would accuse a sound side. A cut sequence has one context wherever."""
    response = replace(sequence([8, 9]), has_prompt=False)
    questions = [sequence([1, 8, 9]), sequence([2, 8, 9])]
    for a, b in ((questions, [response]), ([response], questions)):
        result = joined(a, b)
        assert not result.pairs
        assert result.counts.ambiguous >= 1
        assert any("is not known" in words for words in result.findings)
    result = joined([sequence([1, 8, 9])], [response, response])
    assert not result.pairs
    cut = joined([sequence([4, 5])], [sequence([4, 5, 6]), sequence([4, 5, 7])])
    assert (cut.counts.pairs, cut.counts.ambiguous) == (1, 0)


def test_a_pair_by_order_shares_half_at_least() -> None:
    """Without uids, other tokens in the middle leave the order, where both sides have as
    many sequences; unrelated ones stay alone."""
    a = [sequence([1, 2, 3, 4, 5, 6]), sequence([1, 1, 1, 1])]
    b = [sequence([1, 2, 3, 4, 9, 6]), sequence([2, 2, 2, 2])]
    result = joined(a, b)
    assert [pair.joined_by for pair in result.pairs] == ["order"]
    assert result.pairs[0].at_a == slice(0, 4)
    assert (result.counts.unequal, result.counts.cut, result.counts.shared) == (1, 0, 4)
    assert result.findings == (
        "1 of 1 pairs have other tokens on b than on a; what comes before the first "
        "difference is compared.",
        "1 sequences are on a alone, with no partner on b.",
        "1 sequences are on b alone, with no partner on a.",
        "1 of 1 pairs were joined by their order alone.",
    )


def test_every_token_is_counted_once() -> None:
    """Masks and missing values of either side, of both, and minus infinity."""
    nan = np.nan
    a = replace(
        sequence([1, 2, 3, 4, 5, 6, 7]),
        logprobs=np.array([nan, nan, -1, -1, -np.inf, -1, -1]),
        mask=np.array([1, 1, 1, 1, 1, 1, 0], np.bool_),
    )
    b = replace(
        a,
        logprobs=np.array([nan, -1, nan, -1, -np.inf, -1, -1]),
        mask=np.array([1, 1, 1, 1, 1, 0, 0], np.bool_),
    )
    counts = joined([a], [b]).counts
    assert (counts.shared, counts.counted, counts.comparable) == (7, 5, 2)
    assert (counts.missing_in_both, counts.missing_in_a, counts.missing_in_b) == (1, 1, 1)
    assert (counts.counted_in_a_alone, counts.counted_in_b_alone) == (1, 0)
    assert (counts.infinite_in_a, counts.infinite_in_b) == (1, 1)
    assert joined([a], [b]).findings == (
        "1 of 5 tokens have no value on a alone.",
        "1 of 5 tokens have no value on b alone.",
        "1 of 5 tokens have no value on both sides.",
        "1 of 7 shared tokens count on a alone.",
    )
    (pair,) = joined([a], [b]).pairs
    assert pair.comparable.tolist() == [False, False, False, True, True, False, False]


def test_nothing_in_common_is_no_error() -> None:
    """Sides without a pair are all alone."""
    result = joined([sequence([1, 2])], [sequence([3, 4]), sequence([5])])
    assert not result.pairs
    assert (result.counts.alone_in_a, result.counts.alone_in_b) == (1, 2)
