"""What two programs recorded of the same tokens, and how their records are paired.

`readers` makes `Side`s of files, `joining` makes a `Joined` of two sides; whatever judges
them reads these records alone. Their sequences and pairs may be read or made whenever one
is asked for (`lazy_sequences`), and then those of one number are equal, but not the same
object. Arrays are on the host, of numpy, and are not written to.

NaN in an array of log-probabilities means that none was recorded; minus infinity is a
recorded value. Nothing here is a judgement: unequal tokens and sequences of one side
alone are counted, not refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
Joining = Literal["uid", "token_ids", "order"]
NO_TOKEN = -1  # in `top_ids`, where a position has fewer alternatives than others


@dataclass(frozen=True)
class RecordedSettings:
    """How a program says that it computed a sequence's log-probabilities; None where it
    says nothing, which is not the same as a neutral value.

    `logprobs_mode` is vLLM's name: `raw_logprobs` (before temperature and filters) or
    `processed_logprobs` (after them, renormalised over the kept tokens). `head` is the
    format that the head multiplies in, where that is not `dtype`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    dtype: str | None = None
    head: str | None = None
    logprobs_mode: str | None = None
    engine: str | None = None
    weights_version: str | None = None
    step: int | None = None  # of training


@dataclass(frozen=True, eq=False)
class RecordedSequence:
    """One sequence as one program recorded it, n tokens long; n is at least 1.

    `logprobs[i]` belongs to token i: it is the log-probability of `token_ids[i]` after
    the tokens before it. It is NaN where none was recorded, as for the first token.
    Positive values are as recorded: they may be probabilities, or of another sign."""

    token_ids: Integers  # [n], each at least 0
    logprobs: Numbers  # [n], never +inf
    mask: Flags  # [n]; True where the token counts
    uid: str | None = None
    settings: RecordedSettings = RecordedSettings()
    top_ids: Integers | None = None  # [n, k]; NO_TOKEN where there is none
    top_logprobs: Numbers | None = None  # [n, k]; NaN where there is none
    kept_ids: Integers | None = None  # flat: what top-p or top-k left, by position
    kept_offsets: Integers | None = None  # [n + 1], from 0 up to len(kept_ids)
    position_ids: Integers | None = None  # [n]
    sequence_lengths: Integers | None = None  # of a pack, they sum to n
    routed_experts: Integers | None = None  # [n, layers, experts]; -1: none
    entropy: Numbers | None = None  # [n], nats; NaN where there is none
    turn: Integers | None = None  # [n]; which turn of a dialogue the token is in
    weights_versions: tuple[str, ...] = ()  # all it was sampled under, in their order
    has_prompt: bool = True  # False where tokens before the first were not recorded
    place: str = ""  # where it stands: `rank_0.jsonl line 12`

    def __len__(self) -> int:
        """Returns the number of tokens."""
        return len(self.token_ids)


@dataclass(frozen=True, eq=False)
class Side:
    """All sequences of one program. `layout` is how the file was understood, by the name
    in `readers`; `notes` are whole sentences on what a reader of the result must know, as
    how many values are minus infinity."""

    name: str  # `rollout`, `trainer`, or the file's name without its suffixes
    path: Path
    layout: str
    sequences: Sequence[RecordedSequence]
    notes: tuple[str, ...] = ()


def length_of(run: slice) -> int:
    """Returns the end of a slice less its beginning, both of which it must have. A step
    is not looked at."""
    return int(run.stop - run.start)


@dataclass(frozen=True, eq=False)
class SequencePair:
    """One sequence as both sides recorded it.

    `at_a` and `at_b` are where in each the tokens are the same: one run without gaps of m
    tokens, `a.token_ids[at_a]` equals `b.token_ids[at_b]`. Where `is_equal`, that is the
    whole of both; else one side was cut, has the response alone, or has other tokens.
    What is taken of a side at it is a view, no copy."""

    a: RecordedSequence
    b: RecordedSequence
    at_a: slice
    at_b: slice
    joined_by: Joining
    numbers: tuple[int, int]  # of a and b among the sequences of their sides

    @property
    def shared(self) -> int:
        """Returns m, the number of shared tokens."""
        return length_of(self.at_a)

    @cached_property
    def is_equal(self) -> bool:
        """Whether both sides have the same tokens from the first to the last."""
        return len(self.a) == self.shared == len(self.b)

    @cached_property
    def unshared(self) -> tuple[int, int]:
        """How many tokens of a, and of b, are not among the shared ones."""
        return len(self.a) - self.shared, len(self.b) - self.shared

    @cached_property
    def is_cut(self) -> bool:
        """Whether all tokens of one side are shared and the other side has more: a
        truncation, or a response without its prompt. False where `is_equal`."""
        return not self.is_equal and min(self.unshared) == 0

    @cached_property
    def masks(self) -> tuple[Flags, Flags]:
        """bool [m] each: which of the shared tokens count on side a, and on side b."""
        return self.a.mask[self.at_a], self.b.mask[self.at_b]

    @cached_property
    def logprobs(self) -> tuple[Numbers, Numbers]:
        """float64 [m] each: the log-probabilities of the shared tokens on both sides."""
        return self.a.logprobs[self.at_a], self.b.logprobs[self.at_b]

    @cached_property
    def comparable(self) -> Flags:
        """bool [m]: the shared tokens that count on both sides and have a log-probability
        on both, be it minus infinity."""
        (mask_a, mask_b), (a, b) = self.masks, self.logprobs
        return mask_a & mask_b & ~np.isnan(a) & ~np.isnan(b)

    @cached_property
    def finite(self) -> Flags:
        """bool [m]: the comparable tokens of which neither value is minus infinity."""
        a, b = self.logprobs
        return self.comparable & np.isfinite(a) & np.isfinite(b)


@dataclass(frozen=True)
class JoinCounts:
    """What joining two sides came to, in sequences and tokens.

    Tokens are those of pairs; `counted` are shared tokens that count on both sides. Of
    these, `comparable` have both values, and `missing_in_*` have none on the side, on
    that side alone or on both."""

    pairs: int = 0
    by_uid: int = 0
    by_token_ids: int = 0
    by_order: int = 0
    unequal: int = 0  # pairs whose tokens are not all the same
    cut: int = 0  # of these, those where one side is a part of the other
    alone_in_a: int = 0
    alone_in_b: int = 0
    ambiguous: int = 0  # of these, those that fit several of the other side
    prompts_of_a: int = 0  # responses of b without a prompt that have a's
    prompts_of_b: int = 0  # and the other way round
    repeated_in_a: int = 0  # sequences with tokens that another of the side has too
    repeated_in_b: int = 0
    tokens_of_a: int = 0
    tokens_of_b: int = 0
    shared: int = 0
    counted_in_a_alone: int = 0  # by their masks, among shared tokens
    counted_in_b_alone: int = 0
    counted: int = 0
    comparable: int = 0
    missing_in_a: int = 0
    missing_in_b: int = 0
    missing_in_both: int = 0
    infinite_in_a: int = 0  # minus infinity, among comparable tokens
    infinite_in_b: int = 0


@dataclass(frozen=True, eq=False)
class Joined:
    """Two sides and their pairs, in the order of a's sequences. A response that was
    recorded without its prompt has that of its partner, in `a`, `b` and `pairs`, which is
    what a model must be asked with. `findings` are whole
    sentences on what does not match, the gravest first; empty where everything does."""

    a: Side
    b: Side
    pairs: Sequence[SequencePair]
    alone_in_a: Sequence[RecordedSequence]
    alone_in_b: Sequence[RecordedSequence]
    counts: JoinCounts = field(default_factory=JoinCounts)
    findings: tuple[str, ...] = ()
