"""The search for causes on one side: which are named, in which order they are undone,
and which hide each other. What a cause is and when it is named stands in `causes`. Needs
no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy

import numpy as np

from numdev.studies.logprobs.causes import (
    AT_PREDICTION,
    LEAST_CUT,
    CauseKind,
    Effects,
    Observed,
    cause_rows,
    decide,
    undone,
)
from numdev.studies.logprobs.lazy_sequences import Mapped, Storing
from numdev.studies.logprobs.report import CauseRow

# Sequences held to their temperature over another number
DivideTemperature = Callable[[Sequence[Observed], float], Sequence[Observed]]
MOST_CAUSES = 4  # undone one after the other
MOST_TRIED = 3  # undone on trial, to see what they hide


class CauseSearch:
    """Looks for causes on one side, and undoes those that are named, the one that takes
    away most first. `stored`: where its sequences are, and their errors: with `in_file`
    one is in memory at a time."""

    def __init__(
        self, side: str, sequences: Iterable[Observed],
        divide_temperature: DivideTemperature | None = None, stored: Storing = list,
    ) -> None:  # fmt: skip
        self.side, self.stored = side, stored
        self.sequences: Sequence[Observed] = stored(sequences)
        self.divide_temperature = divide_temperature
        self.errors: Sequence[np.ndarray] = stored(seen.errors for seen in self.sequences)
        self.scale = 1.0  # by which causes undone so far multiply the format's errors
        self.rows: list[CauseRow] = []
        self.stage = 0

    @property
    def noise(self) -> list[float]:
        """Returns by sequence the sum of the predicted error's square over tokens that
        still count, times `scale` squared; 0 where none is predicted."""
        return [
            0.0
            if seen.predicted is None
            else float((seen.predicted[np.isfinite(d)] ** 2).sum()) * self.scale**2
            for seen, d in zip(self.sequences, self.errors, strict=True)
        ]

    @property
    def left(self) -> float:
        """Returns the squared error that is left over the predicted one; infinite where
        none is predicted."""
        square, noise = sum(float(np.nansum(d**2)) for d in self.errors), sum(self.noise)
        return square / noise if noise else math.inf

    @property
    def at_prediction(self) -> bool:
        """Whether the error is at most AT_PREDICTION times the predicted one, rms."""
        square = sum(float(np.nansum(d**2)) for d in self.errors)
        return square <= AT_PREDICTION**2 * sum(self.noise)

    def undo_all(self, kinds: list[CauseKind]) -> None:
        """Undoes the causes that are named, one after another, MOST_CAUSES at most, those
        that are known by single tokens last. Adds to `rows` those of each kind once: of
        one that is undone as it was then, of every other as it is in the end, if it can
        be tried then. `kinds` stays as it is."""
        kinds = list(kinds)
        for _ in range(MOST_CAUSES):
            tried = self._tried(kinds)
            named = [t for t in tried if decide(t[1]).named]
            if not named:
                break
            # Those that are known by single tokens last: others may explain these.
            kind, rows, effects = max(
                named, key=lambda t: (not t[0].counted, decide(t[1]).cut)
            )
            self.rows += rows
            self._undo(kind, effects)
            kinds.remove(kind)
        else:
            tried = self._tried(kinds)
        self.rows += [row for _, rows, _ in tried for row in rows]

    def copied(self) -> CauseSearch:
        """Returns a search that goes on from this one, and leaves it as it is."""
        other = copy(self)
        other.rows = list(self.rows)
        return other

    def undo_hidden(self, kinds: list[CauseKind]) -> CauseSearch | None:
        """Returns a copy of this search with causes undone that hide each other, each of
        which is named once the others are undone; None where there are none. Recorded
        alternatives are left out of the copy where more is explained without them. This
        search stays as it is."""
        best = self._undone_together(kinds)
        plain = self._without_alternatives()
        if plain is not None and (best is None or not best.at_prediction):
            # Alternatives are of the other causes too, which are not undone in them.
            other = plain.undo_hidden(kinds)
            both = [search for search in (best, other) if search is not None]
            best = min(both, key=lambda search: search.left, default=None)
        return best

    def _undone_together(self, kinds: list[CauseKind]) -> CauseSearch | None:
        """Returns a copy of this search with the first two causes or more undone that are
        named together; None where none of those that are tried are."""
        for kind, effects in self._on_trial(kinds):
            undone_both = self._undone_with(kind, effects, kinds)
            if undone_both is not None:
                search, refined = undone_both  # its dose, now that others are undone
                again = self._undone_with(kind, refined, kinds)
                return again[0] if again is not None else search
        return None

    def _without_alternatives(self) -> CauseSearch | None:
        """Returns a copy of this search as if no alternatives had been recorded; None
        where none were."""
        if all(seen.record.top_logprobs is None for seen in self.sequences):
            return None
        other = self.copied()
        other.sequences = self.stored(
            dataclasses.replace(
                seen,
                record=dataclasses.replace(seen.record, top_ids=None, top_logprobs=None),
            )
            for seen in self.sequences
        )
        return other

    def _undone_with(
        self, kind: CauseKind, effects: Effects, kinds: Sequence[CauseKind]
    ) -> tuple[CauseSearch, Effects] | None:
        """Returns a copy of this search with those of `kinds` undone that are named once
        `kind` is undone by its `effects`, and then `kind`, by the effects that it has by
        then; and these effects. None where no other is named, or then not `kind`."""
        trial = self.copied()
        trial._undo(kind, effects)
        trial.undo_all([other for other in kinds if other is not kind])
        if trial.stage == self.stage + 1:
            return None
        last = trial._with(self, kind, effects)
        for _, rows, refined in last._tried([kind]):
            if decide(rows).named:
                last._undo(kind, refined)
                last.rows += [*rows, *trial.rows[len(self.rows) :]]
                last.stage = trial.stage
                return last, refined
        return None

    def _on_trial(
        self, kinds: Sequence[CauseKind]
    ) -> Iterator[tuple[CauseKind, Effects]]:
        """Yields the causes that may hide others, with their effects: at most MOST_TRIED
        that are not named, the one that cuts the squared error most first. Then a
        temperature, as it is once the cause that cuts most, named or not, is undone; not
        where that cause is the temperature. All are `by_slope`, not `in_part`, and cut
        the squared error LEAST_CUT times or more. This search stays as it is."""
        tried = [
            (decide(rows), kind, effects)
            for kind, rows, effects in self._tried(kinds)
            if kind.by_slope and not kind.in_part
        ]
        tried = [each for each in tried if each[0].cut >= LEAST_CUT]
        tried.sort(key=lambda each: each[0].cut, reverse=True)
        hidden = [each for each in tried if not each[0].named]
        for _, kind, effects in hidden[:MOST_TRIED]:
            yield kind, effects
        for _, kind, effects in tried[:1]:
            trial = self.copied()
            trial._undo(kind, effects)
            warm = [other for other in kinds if other.name == "temperature" != kind.name]
            for other, rows, then in trial._tried(warm):
                if decide(rows).cut >= LEAST_CUT:
                    yield other, then

    def _with(
        self, before: CauseSearch, kind: CauseKind, effects: Effects
    ) -> CauseSearch:
        """Returns a copy of the search `before`, in which the cause `kind` is not undone,
        with all other causes undone that this search has named since it undid `kind` on
        trial by its `effects`. Rows and stage are those of `before`. Neither search is
        changed."""
        last = before.copied()
        last.scale = self.scale / effects.scale
        pairs = zip(before.sequences, self.sequences, effects.effects, strict=True)
        last.sequences = self.stored(
            dataclasses.replace(
                seen,
                values=now.values + (0.0 if self._is_held_to(kind) else effect),
                predicted=seen.predicted if effects.predicted else now.predicted,
            )
            for seen, now, effect in pairs
        )
        last.errors = self.stored(
            np.where(np.isnan(now), np.nan, seen.errors)
            for seen, now in zip(last.sequences, self.errors, strict=True)
        )
        return last

    def _is_held_to(self, kind: CauseKind) -> bool:
        """Whether the cause `kind` is undone by holding the side to it, not by its
        effect: a temperature, where the search has a function for that
        (`divide_temperature`)."""
        return kind.name == "temperature" and self.divide_temperature is not None

    def _undo(self, kind: CauseKind, effects: Effects) -> None:
        """Undoes the cause `kind`, which has these `effects`, and counts it in `stage`.
        Of one that is undone in part (`in_part`), what is left is noise from here on."""
        self._take_off(kind, effects)
        self.scale *= effects.scale
        if kind.in_part:  # what is left of it is noise from here on
            squares = sum(float(np.nansum(d**2)) for d in self.errors)
            self.scale *= max(1.0, math.sqrt(squares / sum(self.noise)))
        self.stage += 1

    def _take_off(self, kind: CauseKind, effects: Effects) -> None:
        """Undoes the cause `kind` in values and errors: one that the side can be held to
        (`_is_held_to`) by that, from here on; any other by taking its `effects` off. A
        token that has no value then counts no more."""
        if self._is_held_to(kind):
            assert self.divide_temperature is not None
            self.sequences = self.divide_temperature(self.sequences, effects.scale)
            self.errors = self.stored(
                np.where(np.isnan(d), np.nan, seen.values - seen.reference)
                for seen, d in zip(self.sequences, self.errors, strict=True)
            )
            return
        self.errors = self.stored(undone(self.errors, effects))
        predicted: Sequence[np.ndarray | None] = effects.predicted
        predicted = predicted or Mapped(lambda seen: seen.predicted, self.sequences)
        parts = zip(self.sequences, effects.effects, predicted, strict=True)
        with np.errstate(invalid="ignore"):  # minus infinity less itself
            self.sequences = self.stored(
                dataclasses.replace(seen, values=seen.values - effect, predicted=noise)
                for seen, effect, noise in parts
            )

    def _tried(
        self, kinds: Sequence[CauseKind]
    ) -> list[tuple[CauseKind, list[CauseRow], Effects]]:
        """Returns (kind, its rows, its effects) for every kind that can be tried, in
        order. Nothing is undone."""
        results, noise = [], self.noise
        for kind in kinds:
            tried = cause_rows(
                self.side, kind, self.sequences, self.errors, noise, self.stage
            )
            if tried is not None:
                results.append((kind, *tried))
        return results
