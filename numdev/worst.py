"""The rows that err most: which they are, and what they look like.

A kernel's error in a head is often the error of a few rows. `worst_rows` finds the head of a call
in which a row's error is largest beside what is predicted for it, takes that head's worst rows, and
recomputes these rows alone in fp64: their scores, and what the literature makes responsible for
errors of attention (ties of the maximum with V of one sign, arXiv 2510.04212; sinks; cancellation).
A few rows evenly spread over the head are recomputed too, as what is usual there. The cost is
O((count + TYPICAL) * length * head_dim); no matrix of scores is ever made.

What is said of a row, and when something stands out, is decided in `numdev.special`.

Legend: S scores, P probabilities, m row maximum, L log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase, additive, key_range, visible
from numdev.deviation import Yardstick, finite, row_ratios, typical_row
from numdev.errors import UsageError
from numdev.report import WorstRow
from numdev.special import sentence

TYPICAL = 32
"""How many rows of the head stand for what is usual there."""
CARRIED = 0.9
EQUAL, NEAR = 1e-12, 1e-3
"""Scores are equal within fp64's own rounding (times 1 or |m|), nearly so within 1e-3."""
OF_QUERIES, OF_KEYS = ("out", "dq"), ("dk", "dv")


def worst_rows(
    case: AttentionCase,
    output: Tensor,
    yardstick: Yardstick,
    heads: Sequence[int],
    *,
    predicted: Tensor | None = None,
    tensor: str = "out",
    lse: Tensor | None = None,
    count: int = 3,
    identity: Mapping[str, Any] | None = None,
) -> list[WorstRow]:
    """The `count` worst rows of the head of `output` where a row errs most, the worst first.

    `case` is whole; `output`, `yardstick` and `predicted` [B, len(heads), rows, features] are of
    its query heads `heads` for out and dq, of kv heads for dk and dv, whose rows are keys. `lse`
    [B, H, q_len] is the reference's log-sum-exp of all query heads, which dk and dv need: a key's
    probabilities are not to be had from its own scores.

    Rows are ordered by `deviation.row_ratios` if there is a prediction, else by |o_i - r_i| over
    |term scale_i|; before all others come those with an element that is not finite where the exact
    one, rounded once, is. Left out are empty rows, rows without an error, and rows that repeat a
    worse one at the same place of another sequence. `identity` holds fields of the report's row
    beyond what the case says. Raises UsageError for a tensor without rows.
    """
    if tensor not in OF_QUERIES + OF_KEYS:
        raise UsageError(f"{tensor} has no rows to name", hint="one of out, dq, dk, dv")
    if tensor in OF_KEYS and lse is None:
        raise UsageError(f"the worst rows of {tensor} need the log-sum-exp of all query heads")
    errors = _Errors.of(output, yardstick, predicted)
    at = int(errors.order.amax(dim=(0, 2)).argmax())
    look = _Looking(case, heads[at], tensor, None if lse is None else lse.double())
    fields = _identity(case, yardstick, tensor, identity)

    def row(b: int, i: int) -> WorstRow:
        return WorstRow(**fields, **errors.at(b, at, i), **look.at(b, i), sentence="")

    judged = errors.usable[:, at].any(dim=-1) | (errors.bad[:, at] > 0)
    picked = _picked(errors.order[:, at], yardstick, at, count)
    others = [x for x in torch.nonzero(judged).tolist() if x not in picked]
    typical = [row(b, i) for b, i in others[:: max(1, math.ceil(len(others) / TYPICAL))]]
    worst = [row(b, i) for b, i in picked]
    return [w.model_copy(update={"sentence": sentence(w, typical)}) for w in worst]


@dataclass(frozen=True, eq=False)
class _Errors:
    """Errors row by row, [B, len(heads), rows] but for `usable`, which has features too."""

    usable: Tensor
    bad: Tensor
    """Elements that are not finite where the floor is."""
    size: Tensor
    ratio: Tensor
    cancellation: Tensor
    predicted: bool

    @classmethod
    def of(cls, output: Tensor, y: Yardstick, predicted: Tensor | None) -> _Errors:
        o = output.detach().double()
        expected = torch.zeros_like(o) if predicted is None else predicted.double() - y.reference
        usable = y.shown & finite(o) & finite(expected)
        error, r, terms, expected = (
            torch.where(usable, x, 0.0)
            for x in (o - y.reference, y.reference, y.term_scale, expected)
        )
        size, scale = error.norm(dim=-1), terms.norm(dim=-1)
        if predicted is None:
            ratio = torch.where(size > 0, size / scale, 0.0)
        else:
            typical = typical_row(expected, usable, y)
            ratio = row_ratios(error, expected, typical, usable, y)
        return cls(
            usable=usable,
            bad=(y.shown & y.floor_finite & ~finite(o)).sum(dim=-1),
            size=size,
            ratio=ratio,
            cancellation=r.norm(dim=-1) / scale,
            predicted=predicted is not None,
        )

    @property
    def order(self) -> Tensor:
        """The larger the worse."""
        return torch.where((self.bad > 0) | self.ratio.isnan(), math.inf, self.ratio)

    def at(self, b: int, head: int, i: int) -> dict[str, Any]:
        found = (x[b, head, i] for x in (self.size, self.ratio, self.cancellation))
        size, ratio, cancellation = (_number(x) for x in found)
        judged = bool(self.usable[b, head, i].any())
        return {
            "batch": b,
            "row": i,
            "rows": self.size.shape[-1],
            "nonfinite": int(self.bad[b, head, i]),
            "error": size if judged else None,
            "ratio": ratio if judged else None,
            "predicted": self.predicted,
            "cancellation": cancellation,
        }


@dataclass(frozen=True)
class _Looking:
    """One head of a case, of which single rows are recomputed in fp64."""

    case: AttentionCase
    head: int
    tensor: str
    lse: Tensor | None

    def at(self, b: int, i: int) -> dict[str, Any]:
        seen = self._query(b, i) if self.tensor in OF_QUERIES else self._key(b, i)
        return {"head": self.head, **seen}

    def _query(self, b: int, i: int) -> dict[str, Any]:
        case, rows = self.case, slice(i, i + 1)
        keys = key_range(case, rows)
        S = _scores(case, b, self.head, rows, keys)[0]
        shown = S.ne(-math.inf)
        S, places = S[shown], torch.nonzero(shown)[:, 0] + keys.start
        if not len(S):
            return {"sees": 0, "position": 0, "max_probability": 0.0}
        sink = None if case.sinks is None else case.sinks[self.head].detach().double()
        logits = S if sink is None else torch.cat([S, sink[None]])
        L = logits.logsumexp(dim=0)
        P, m = (S - L).exp(), S.max()
        outcomes = (logits - L).exp()
        carriers = _carriers(P)
        V = case.v[b, self.head // case.group, places[carriers]].detach().double()
        weights = P[carriers]
        one_sign = (weights @ V.sign()).abs().mean() / weights.sum()
        return {
            "sees": len(S),
            "position": int((places < i + case.causal_offset).sum()),
            "max_probability": float(P.max()),
            "lse": _number(L),
            "tied": int((m - S <= EQUAL * max(1.0, abs(float(m)))).sum()),
            "nearly_tied": int((m - S <= NEAR).sum()),
            "first_key": float(P[places == 0].sum()),
            "sink": None if sink is None else float(outcomes[-1]),
            "entropy": _number(-torch.xlogy(outcomes, outcomes).sum()),
            "carriers": len(carriers),
            "one_sign": _number(one_sign),
        }

    def _key(self, b: int, j: int) -> dict[str, Any]:
        case, group = self.case, self.case.group
        assert self.lse is not None
        heads = range(self.head * group, (self.head + 1) * group)
        rows, keys = slice(0, case.q_len), slice(j, j + 1)
        S = torch.stack([_scores(case, b, h, rows, keys)[:, 0] for h in heads])
        shown = S.ne(-math.inf)
        P = (S - self.lse[b, heads.start : heads.stop])[shown].exp()
        places = torch.nonzero(shown)[:, 1] + case.causal_offset
        return {
            "sees": len(P),
            "position": int((places < j).sum()),
            "max_probability": float(P.max()) if len(P) else 0.0,
            "carriers": len(_carriers(P)),
            "mass": float(P.sum()),
        }


def _scores(case: AttentionCase, b: int, h: int, rows: slice, keys: slice) -> Tensor:
    """S [rows, keys] of one query head, -inf where hidden; one of the two is a single one."""
    q = case.q[b, h, rows].detach().double()
    k = case.k[b, h // case.group, keys].detach().double()
    X = (q[:, None] * k[None]).sum(dim=-1) * case.scale
    S = X if case.softcap is None else case.softcap * (X / case.softcap).tanh()
    whole = (case.q.shape[0], case.heads, *S.shape)
    bias, shown = additive(case, rows, keys), visible(case, rows, keys)
    if bias is not None:
        S = S + bias.broadcast_to(whole)[b, h].double()
    return S if shown is None else S.masked_fill(~shown.broadcast_to(whole)[b, h], -math.inf)


def _carriers(P: Tensor) -> Tensor:
    """The places of the fewest probabilities that make up CARRIED of their sum."""
    largest, order = P.sort(descending=True, stable=True)
    before = largest.cumsum(dim=0) - largest
    return order[before < CARRIED * P.sum()]


def _picked(order: Tensor, y: Yardstick, head: int, count: int) -> list[list[int]]:
    """(batch entry, row) of the worst rows of a head, `order` [B, rows] being how bad they are."""
    rows = order.shape[1]
    ranked = order.flatten().argsort(descending=True, stable=True)[: count * order.shape[0]]
    picked: list[list[int]] = []
    for place in ranked[order.flatten()[ranked] > 0].tolist():
        b, i = divmod(place, rows)
        if len(picked) < count and not any(_repeats(y, head, b, a, i) for a, r in picked if r == i):
            picked.append([b, i])
    return picked


def _repeats(y: Yardstick, head: int, b: int, a: int, i: int) -> bool:
    """Whether row i of two sequences has one exact result (see `Yardstick.repeated`)."""
    same = torch.equal(y.reference[b, head, i], y.reference[a, head, i])
    return same and (y.lse is None or bool(y.lse[b, head, i] == y.lse[a, head, i]))


def _identity(
    case: AttentionCase, y: Yardstick, tensor: str, identity: Mapping[str, Any] | None
) -> dict[str, Any]:
    names = ("case", "source", "module", "layer", "call", "seed", "phase")
    return {
        **{name: getattr(case.ref, name) for name in names},
        "format": y.format.name,
        "tensor": tensor,
        **(identity or {}),
    }


def _number(x: Tensor) -> float | None:
    """As a report holds it: a number that is not finite is none."""
    value = float(x)
    return value if math.isfinite(value) else None
