"""The rows that err most: which they are, and what is reported of them.

A kernel's error in a head is often the error of a few rows. `worst_rows` finds the head
of a call in which a row's error is largest beside what is predicted for it, takes that
head's worst rows, and has these recomputed in fp64 (`row_facts`). A few rows evenly
spread over the head are recomputed too, as what is usual there (`row_words` says what
stands out)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.metrics.row_sums import row_ratios
from numdev.metrics.yardstick import Yardstick, finite, kept
from numdev.operations.attention.row_facts import of_keys, of_queries
from numdev.operations.attention.row_words import sentence
from numdev.report import WorstRow
from numdev.tensors import tensor_spec

TYPICAL = 32  # rows of the head that stand for what is usual there
OF_SCORES = (
    "lse",
    "tied",
    "nearly_tied",
    "first_key",
    "sink",
    "entropy",
    "carriers",
    "one_sign",
)
COUNTS = (
    "row",
    "batch",
    "nonfinite",
    "sees",
    "position",
    "tied",
    "nearly_tied",
    "carriers",
)


def worst_rows(
    case: AttentionCase,
    output: Tensor,
    y: Yardstick,
    heads: Sequence[int],
    *,
    predicted: Tensor | None = None,
    tensor: str = "out",
    lse: Tensor | None = None,
    rows: Tensor | None = None,
    count: int = 3,
    identity: Mapping[str, Any] | None = None,
) -> list[WorstRow]:
    """The `count` worst rows of the head of `output` where a row errs most, the worst
    first.

    `case` is whole; `output`, its yardstick `y` and `predicted` [B, len(heads), rows,
    features] are of its query heads `heads` for out and dq, of kv heads for dk and dv,
    whose rows are keys. `lse` [B, H, q_len] is the reference's log-sum-exp of all query
    heads, which dk and dv need: a key's probabilities are not to be had from its own
    scores. `rows`: where in the call the rows of `output` stand, if these are a sample;
    rows are named by that.

    Rows are ordered by `row_sums.row_ratios` if there is a prediction, else by |o_i -
    r_i| over |term scale_i|; before all others come those with an element that is not
    finite where the exact one, rounded once, is. Left out are empty rows, rows without an
    error, and rows that repeat a worse one at the same place of another sequence.
    `identity`: more fields of a report's row."""
    o, spec = output.detach().double(), tensor_spec(tensor)
    bad = (y.usable & y.floor_finite & ~finite(o)).sum(dim=-1)
    usable = y.usable & finite(o)
    if predicted is not None:
        expected = predicted.double() - y.reference
        usable = usable & finite(expected)
        ratio = row_ratios(
            kept(o - y.reference, usable), kept(expected, usable), usable, y
        )
    size = kept(o - y.reference, usable).norm(dim=-1)
    if predicted is None:
        ratio = torch.where(size > 0, size / kept(y.term_scale, usable).norm(dim=-1), 0.0)
    order = torch.where((bad > 0) | ratio.isnan(), math.inf, ratio)  # [B, heads, rows]
    at = int(order.amax(dim=(0, 2)).argmax())
    worst = _worst(order[:, at], y, at, count)
    if not worst:
        return []
    # Of the head from here on; [B, rows] or [B, rows, features].
    bad, usable, size, ratio = bad[:, at], usable[:, at], size[:, at], ratio[:, at]
    judged = (usable.any(dim=-1) | (bad > 0)).flatten().cpu()
    judged[worst] = False
    others = judged.nonzero()[:, 0]
    usual = others[:: -(-len(others) // TYPICAL) or 1].tolist()
    places = torch.tensor(worst + usual, device=o.device)
    b, i = places // order.shape[2], places % order.shape[2]
    place = i if rows is None else rows[i]
    without = ~usable[b, i].any(dim=-1)
    r, terms = (
        kept(x[:, at][b, i], usable[b, i]).norm(dim=-1)
        for x in (y.reference, y.term_scale)
    )
    columns = {
        "batch": b,
        "row": place,
        "nonfinite": bad[b, i],
        "error": size[b, i].masked_fill(without, math.nan),
        "ratio": ratio[b, i].masked_fill(without, math.nan),
        "cancellation": r / terms,
    }
    if spec.sums_over_rows:
        assert lse is not None
        columns |= of_keys(case, heads[at], b, place, lse)
    else:
        columns |= of_queries(case, heads[at], b, place)
    # Of one type, or each column would be copied by itself.
    numbers = torch.stack([x.double() for x in columns.values()], dim=1).tolist()
    table: list[dict[str, Any]] = [
        {
            name: None if not math.isfinite(x) else int(x) if name in COUNTS else x
            for name, x in zip(columns, row, strict=True)
        }
        for row in numbers
    ]
    for row in table:
        if not spec.sums_over_rows and not row["sees"]:
            row.update(dict.fromkeys(OF_SCORES))
    fields = {
        **vars(case.ref),
        "format": y.format.name,
        "tensor": tensor,
        **(identity or {}),
        "head": heads[at],
        "rows": case.kv_len if spec.sums_over_rows else case.q_len,
        "predicted": predicted is not None,
        "sentence": "",
    }
    found = [WorstRow(**fields, **row) for row in table[: len(worst)]]
    return [
        w.model_copy(update={"sentence": sentence(w, table[len(worst) :])}) for w in found
    ]


def _worst(order: Tensor, y: Yardstick, head: int, count: int) -> list[int]:
    """The places in [B, rows], flattened, of the `count` worst rows of a head, or of all
    that err, the worst first. `order` [B, rows]: the larger the worse."""
    ranked = order.flatten().argsort(descending=True, stable=True)[: count * len(order)]
    ranked = ranked[order.flatten()[ranked] > 0]
    # A repeat has the exact result of a worse row, at the same place of another sequence.
    b, i = ranked // order.shape[1], ranked % order.shape[1]
    r = y.reference[:, head][b, i]
    same = (i[:, None] == i) & (r[:, None] == r).all(dim=-1)
    if y.lse is not None:
        lse = y.lse[:, head][b, i]
        same &= lse[:, None] == lse
    new: list[int] = ranked[~same.tril(diagonal=-1).any(dim=1)].tolist()
    return new[:count]
