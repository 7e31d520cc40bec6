"""The rows that err most: which they are, and what is reported of them.

A kernel's error in a head is often the error of a few rows. `worst_rows` finds the head of a call
in which a row's error is largest beside what is predicted for it, takes that head's worst rows, and
has these recomputed in fp64. A few rows evenly spread over the head are recomputed too, as what is
usual there.

Rows are chosen on the tensors' device, so that the host waits twice: for the head, and for
everything that is said of its rows. Which rows there are is then known to the device alone, and
they fill lists of a fixed length; what is left over of these is dropped at the end.

What a row looks like is computed in `numdev.metrics.scrutiny`; what is said of it, and when
something stands out, is decided in `numdev.metrics.special`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import UsageError
from numdev.metrics.row_sums import row_ratios, typical_row
from numdev.metrics.scrutiny import of_keys, of_queries
from numdev.metrics.special import Usual, sentence
from numdev.metrics.yardstick import Yardstick, finite
from numdev.report import WorstRow

TYPICAL = 32
"""How many rows of the head stand for what is usual there."""
OF_QUERIES, OF_KEYS = ("out", "dq"), ("dk", "dv")
OF_SCORES = ("lse", "tied", "nearly_tied", "first_key", "sink", "entropy", "carriers", "one_sign")
COUNTS = ("row", "batch", "nonfinite", "sees", "position", "tied", "nearly_tied", "carriers")


def worst_rows(
    case: AttentionCase,
    output: Tensor,
    yardstick: Yardstick,
    heads: Sequence[int],
    *,
    predicted: Tensor | None = None,
    tensor: str = "out",
    lse: Tensor | None = None,
    rows: Tensor | None = None,
    count: int = 3,
    identity: Mapping[str, Any] | None = None,
) -> list[WorstRow]:
    """The `count` worst rows of the head of `output` where a row errs most, the worst first.

    `case` is whole; `output`, `yardstick` and `predicted` [B, len(heads), rows, features] are of
    its query heads `heads` for out and dq, of kv heads for dk and dv, whose rows are keys. `lse`
    [B, H, q_len] is the reference's log-sum-exp of all query heads, which dk and dv need: a key's
    probabilities are not to be had from its own scores. `rows`: where in the call the rows of
    `output` stand, if these are a sample; rows are named by that.

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
    worst = errors.worst(at, count)
    there, b, i = errors.located(torch.cat([worst, errors.typical(at, worst)]))
    place = i if rows is None else rows[i]
    if lse is None or tensor in OF_QUERIES:
        seen = of_queries(case, heads[at], b, place)
    else:
        seen = of_keys(case, heads[at], b, place, lse)
    columns = {"batch": b, "row": place, **errors.columns(at, b, i), **seen}
    table = _on_host({"there": there, **columns})
    if tensor in OF_QUERIES:
        table = [_without_scores(row) for row in table]
    fields = {
        **_identity(case, yardstick, tensor, identity),
        "head": heads[at],
        "rows": case.kv_len if tensor in OF_KEYS else case.q_len,
        "predicted": predicted is not None,
        "sentence": "",
    }
    found = [WorstRow(**fields, **row) for row in _rows(table[: len(worst)])]
    usual = _usual(_rows(table[len(worst) :]))
    return [w.model_copy(update={"sentence": sentence(w, usual)}) for w in found]


@dataclass(frozen=True, eq=False)
class _Errors:
    """Errors row by row, [B, len(heads), rows] but for `usable`, which has features too.

    A row of one head is named by its place in [B, rows], flattened; the number of places stands
    for a row that is not there.
    """

    yardstick: Yardstick
    usable: Tensor
    bad: Tensor
    """Elements that are not finite where the floor is."""
    size: Tensor
    ratio: Tensor
    order: Tensor
    """The larger the worse."""

    @classmethod
    def of(cls, output: Tensor, y: Yardstick, predicted: Tensor | None) -> _Errors:
        o = output.detach().double()
        here = finite(o)
        bad = (y.usable & finite(y.floor) & ~here).sum(dim=-1)
        usable, expected = y.usable & here, None
        if predicted is not None:
            expected = predicted.double() - y.reference
            usable = usable & finite(expected)
            expected = torch.where(usable, expected, 0.0)
        error = torch.where(usable, o - y.reference, 0.0)
        size = error.norm(dim=-1)
        if expected is None:
            scale = torch.where(usable, y.term_scale, 0.0).norm(dim=-1)
            ratio = torch.where(size > 0, size / scale, 0.0)
        else:
            ratio = row_ratios(error, expected, typical_row(expected, usable, y), usable, y)
        order = torch.where((bad > 0) | ratio.isnan(), math.inf, ratio)
        return cls(yardstick=y, usable=usable, bad=bad, size=size, ratio=ratio, order=order)

    def worst(self, at: int, count: int) -> Tensor:
        """The places of the `count` worst rows of a head, or of all, the worst first."""
        order = self.order[:, at].flatten()
        ranked = order.argsort(descending=True, stable=True)[: count * len(self.order)]
        new = order[ranked] > 0
        if len(self.order) > 1:
            new &= ~self._repeats(at, ranked)
        first = _nth(new, torch.arange(1, min(count, len(order)) + 1, device=order.device))
        return torch.where(first < len(new), ranked[first.clamp_max(len(new) - 1)], len(order))

    def _repeats(self, at: int, ranked: Tensor) -> Tensor:
        """Which of these rows have the exact result of one before them in the list, at the same
        place of another sequence (see `Yardstick.repeated`)."""
        _, b, i = self.located(ranked)
        r = self.yardstick.reference[:, at][b, i]
        same = (i[:, None] == i) & (r[:, None] == r).all(dim=-1)
        if self.yardstick.lse is not None:
            lse = self.yardstick.lse[:, at][b, i]
            same &= lse[:, None] == lse
        return same.tril(diagonal=-1).any(dim=1)

    def typical(self, at: int, but: Tensor) -> Tensor:
        """The places of at most TYPICAL rows of a head that can be judged, evenly spread, without
        those at the places `but`."""
        judged = (self.usable[:, at].any(dim=-1) | (self.bad[:, at] > 0)).flatten()
        left = torch.cat([judged, judged[:1]]).index_fill(0, but, False)[: len(judged)]
        step = ((left.sum() + TYPICAL - 1) // TYPICAL).clamp_min(1)
        numbers = torch.arange(min(TYPICAL, len(left)), device=left.device)
        return _nth(left, step * numbers + 1)

    def located(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whether there are rows at these places; their batch entries, and their rows there."""
        entries, _, rows = self.order.shape
        near = places.clamp_max(entries * rows - 1)
        return places < entries * rows, near // rows, near % rows

    def columns(self, at: int, b: Tensor, i: Tensor) -> dict[str, Tensor]:
        """What a report says of the errors of these rows [n] of a head; NaN where it is nothing."""
        y, usable = self.yardstick, self.usable[:, at][b, i]
        left_out, without = ~usable, ~usable.any(dim=-1)
        r, terms = (
            x[:, at][b, i].masked_fill_(left_out, 0.0).norm(dim=-1)
            for x in (y.reference, y.term_scale)
        )
        return {
            "nonfinite": self.bad[:, at][b, i],
            "error": self.size[:, at][b, i].masked_fill_(without, math.nan),
            "ratio": self.ratio[:, at][b, i].masked_fill_(without, math.nan),
            "cancellation": r / terms,
        }


def _nth(flags: Tensor, n: Tensor) -> Tensor:
    """The places of the n-th true flags [m], counted from 1; m where there are not so many."""
    return torch.searchsorted(flags.cumsum(dim=0), n)


def _on_host(columns: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Columns [n] as one dict per row, as a report holds them: counts are integers, and a number
    that is not finite is none."""
    # Of one type, or each column would be copied by itself.
    table = torch.stack([x.double() for x in columns.values()], dim=1).tolist()
    return [
        {
            name: None if not math.isfinite(x) else int(x) if name in COUNTS else x
            for name, x in zip(columns, row, strict=True)
        }
        for row in table
    ]


def _without_scores(row: dict[str, Any]) -> dict[str, Any]:
    """The row of a query; one that sees no key has no properties of scores."""
    return row if row["sees"] else {k: x for k, x in row.items() if k not in OF_SCORES}


def _rows(table: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that are there."""
    return [{k: x for k, x in row.items() if k != "there"} for row in table if row["there"]]


def _usual(rows: Sequence[Mapping[str, Any]]) -> Usual:
    names = rows[0] if rows else ()
    return Usual({name: [row.get(name) for row in rows] for name in names}, len(rows))


def _identity(
    case: AttentionCase, y: Yardstick, tensor: str, identity: Mapping[str, Any] | None
) -> dict[str, Any]:
    names = ("case", "source", "module", "layer", "call", "seed", "phase", "step", "attends")
    return {
        **{name: getattr(case.ref, name) for name in names},
        "format": y.format.name,
        "tensor": tensor,
        **(identity or {}),
    }
